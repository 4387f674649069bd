"""A model whose output head is stored and whose embedding is not, as `safetensors.torch.save_model` leaves tied weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.architectures import MODELS, answered_here, build
from tests.tensors import differences, load

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers answers in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def saved(folder: Path, name: str = "llama, tied") -> Any:
    kind, model_type, options = MODELS[name]
    model = build(kind, model_type, options)
    model.save_pretrained(folder)
    return model


def head_alone(folder: Path) -> Any:
    """The folder as `save_model` writes it, which keeps the name that sorts first."""
    model = saved(folder)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    assert EMBEDDING not in load(folder)
    return model


class TestAHeadWithoutItsEmbedding:
    def test_is_counted_as_it_is(self, tmp_path: Path) -> None:
        head_alone(tmp_path / "run")
        count = len(load(tmp_path / "run"))
        output = ckpt_cli.merge(tmp_path / "run", tmp_path / "out").outputs[0]
        assert f"{count - 1} of {count} tensors" in output.naming
        assert f"{HEAD} in place of {EMBEDDING}" in output.naming
        assert output.compared is not None
        assert (output.compared.fitting, output.compared.expected, output.compared.missing) == (count - 1, count, ())
        assert [note.level for note in output.notes if note.code == "tied-alone"] == ["warning"]
        assert load(tmp_path / "out").keys() == load(tmp_path / "run").keys()

    def test_is_found_by_verify(self, tmp_path: Path) -> None:
        head_alone(tmp_path / "run")
        found = ckpt_cli.verify(tmp_path / "run")
        (item,) = (item for item in found.findings if item.code == "tied-alone")
        assert (item.tensor, item.severity, item.numbers["partner"]) == (HEAD, "warning", EMBEDDING)
        assert "tied-stored" not in {item.code for item in found.findings}
        assert f"{HEAD} in place of {EMBEDDING}" in str(found.names)

    def test_is_loaded_by_transformers_as_the_note_says(self, tmp_path: Path) -> None:
        model = head_alone(tmp_path / "run")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        loaded = type(model).from_pretrained(tmp_path / "out").state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())

    def test_is_renamed_as_the_note_says(self, tmp_path: Path) -> None:
        head_alone(tmp_path / "run")
        output = ckpt_cli.merge(tmp_path / "run", tmp_path / "out").outputs[0]
        (text,) = (note.text for note in output.notes if note.code == "tied-alone")
        rule = text.split("'")[1]
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "renamed", key_map=rule)
        assert "tied-alone" not in {note.code for note in result.outputs[0].notes}
        saved(tmp_path / "whole")
        assert differences(load(tmp_path / "renamed"), load(tmp_path / "whole")) == []

    def test_of_another_shape_is_refused(self, tmp_path: Path) -> None:
        head_alone(tmp_path / "run")
        tensors = load(tmp_path / "run")
        save_file({**tensors, HEAD: tensors[HEAD][:, :5].clone()}, tmp_path / "run" / "model.safetensors")
        with pytest.raises(Inconsistent, match="not whole") as caught:
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert caught.value.tensor == HEAD


@pytest.mark.parametrize("kept", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
def test_any_of_several_tied_names_may_be_the_one(tmp_path: Path, kept: str) -> None:
    model = saved(tmp_path / "run", "t5")
    tensors = load(tmp_path / "run")
    tensors[kept] = tensors.pop("shared.weight")
    save_file(tensors, tmp_path / "run" / "model.safetensors", metadata={"format": "pt"})
    output = ckpt_cli.merge(tmp_path / "run", tmp_path / "out").outputs[0]
    assert f"{kept} in place of shared.weight" in output.naming
    loaded = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama, tied", "t5", "bert"])
def test_what_save_pretrained_writes_is_whole(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "run", name)
    output = ckpt_cli.merge(tmp_path / "run", tmp_path / "out").outputs[0]
    assert "in place of" not in output.naming
    assert output.compared is not None
    assert output.compared.fitting == output.compared.expected
