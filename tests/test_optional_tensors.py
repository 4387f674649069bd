"""Tensors that a class may lack, as loaders make them anew without a word: they are not counted as there, and told where they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import MissingTensors
from tests import architectures

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("asked_here")

SMALL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "axk1": (
        "AXK1ForCausalLM",
        "axk1",
        {**architectures.DENSE, **architectures.EXPERTS, **architectures.LATENT, **architectures.GROUPS, "num_hidden_layers": 3},
    ),
    "bart": ("BartForConditionalGeneration", "bart", architectures.SEQ2SEQ),
    "marian": ("MarianMTModel", "marian", {**architectures.SEQ2SEQ, "pad_token_id": 0, "decoder_start_token_id": 0}),
}
LOST = {
    "axk1": [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)],
    "bart": ["final_logits_bias"],
    "marian": ["final_logits_bias"],
}


def built(name: str) -> Any:
    model = architectures.build(*SMALL[name])
    for buffer in LOST[name]:
        model.get_buffer(buffer).data.normal_()
    return model


def parameters(model: Any, folder: Path) -> Path:
    """A state of parameters only, as averages and optimizers keep it."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    torch.save({name: parameter.detach() for name, parameter in model.named_parameters()}, folder / "pytorch_model.bin")
    return folder


def notes(result: Any) -> dict[str, Any]:
    return {note.code: note for output in result.outputs for note in output.notes}


@pytest.mark.parametrize("name", SMALL)
def test_are_told_and_not_counted(name: str, tmp_path: Path) -> None:
    model = built(name)
    run = parameters(model, tmp_path / "run")
    done = ckpt_cli.merge(run, tmp_path / "out")
    compared = done.outputs[0].compared
    assert compared is not None
    assert compared.expected is not None
    assert [*compared.optional] == LOST[name]
    assert compared.fitting == compared.expected - len(LOST[name])
    assert f"{compared.fitting} of {compared.expected} tensors" in done.outputs[0].naming
    assert notes(done)["optional-tensors"].level == "warning"
    checked = ckpt_cli.verify(tmp_path / "out")
    assert [item.tensor for item in checked.findings if item.code == "optional-tensor"] == LOST[name]
    assert "error" not in {item.severity for item in checked.findings}


@pytest.mark.parametrize("name", SMALL)
def test_are_missing_if_the_base_has_them(name: str, tmp_path: Path) -> None:
    model = built(name)
    model.save_pretrained(tmp_path / "base")
    run = parameters(model, tmp_path / "run")
    with pytest.raises(MissingTensors, match=r"of the \d+ tensors of") as caught:
        ckpt_cli.merge(run, tmp_path / "out", base=tmp_path / "base")
    assert "--carry-from-base" in str(caught.value.hint)
    allowed = ckpt_cli.merge(run, tmp_path / "part", base=tmp_path / "base", allow_missing=LOST[name])
    assert {"missing-allowed"} <= notes(allowed).keys()
    assert "optional-tensors" not in notes(allowed)
    again = ckpt_cli.verify(tmp_path / "part", base=tmp_path / "base")
    assert [item.tensor for item in again.findings if item.code == "left-out" and item.tensor] == LOST[name]
    ckpt_cli.merge(run, tmp_path / "plain")
    lacking = ckpt_cli.verify(tmp_path / "plain", base=tmp_path / "base")
    assert [item.tensor for item in lacking.findings if item.code == "missing-of-base"] == LOST[name]
    whole = ckpt_cli.merge(run, tmp_path / "out", base=tmp_path / "base", carry_from_base=LOST[name])
    assert "optional-tensors" not in notes(whole)
    back = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", SMALL)
def test_that_are_there_are_no_matter(name: str, tmp_path: Path) -> None:
    model = built(name)
    model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "run")
    done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=tmp_path / "base")
    compared = done.outputs[0].compared
    assert compared is not None
    assert compared.fitting == compared.expected
    assert not compared.optional
    assert not {"optional-tensors", "recomputed-tensors"} & notes(done).keys()
    assert not {"optional-tensor", "recomputed-tensor"} & {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}


def test_that_only_count_are_a_note(tmp_path: Path) -> None:
    model = architectures.build("PPLCNetForImageClassification", "pp_lcnet", {})
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    (tmp_path / "run").mkdir()
    model.config.save_pretrained(tmp_path / "run")
    torch.save(state, tmp_path / "run" / "pytorch_model.bin")
    model.save_pretrained(tmp_path / "base")
    done = notes(ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=tmp_path / "base"))
    assert done["recomputed-tensors"].level == "info"
    assert "optional-tensors" not in done
    found = {item.code: item.severity for item in ckpt_cli.verify(tmp_path / "out", base=tmp_path / "base").findings}
    assert found["recomputed-tensor"] == "info"
    assert "missing-of-base" not in found


def test_that_filters_left_out_are_no_matter(tmp_path: Path) -> None:
    built("bart").save_pretrained(tmp_path / "run")
    done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", exclude=["final_logits_bias"])
    assert "optional-tensors" not in notes(done)
    assert "optional-tensor" not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}


def test_that_only_some_averaged_checkpoints_have_are_missing(tmp_path: Path) -> None:
    model = built("bart")
    model.save_pretrained(tmp_path / "whole")
    run = parameters(model, tmp_path / "run")
    with pytest.raises(MissingTensors, match="final_logits_bias"):
        ckpt_cli.average([tmp_path / "whole", run], tmp_path / "out", intersect=True)


def test_are_told_by_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("expected_tensors", "rules", "transformers_child"):
        monkeypatch.setattr(f"ckpt_cli.hub.classes.{module}.installed_version", lambda: None)
    run = parameters(built("bart"), tmp_path / "run")
    assert "final_logits_bias" in notes(ckpt_cli.merge(run, tmp_path / "out"))["missing-kinds"].text
    assert "final_logits_bias" in {item.tensor for item in ckpt_cli.verify(tmp_path / "out").findings if item.code == "not-proved"}
