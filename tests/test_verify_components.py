"""`verify --type both` and `--type all` of a run: every component that was asked for is checked, not the first alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import NotFound, UsageError
from tests.cli import ckpt_fork

EXAMPLE = Path(__file__).parent.parent / "examples/tiny-run"
STEP = EXAMPLE / "checkpoint-200"
EMA = "pytorch_ema_model_fsdp_0"
LOST = "model.layers.1.mlp.up_proj.weight"
Change = Callable[[dict[str, torch.Tensor]], object]


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def _lost(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[LOST]


def _as_it_is(tensors: dict[str, torch.Tensor]) -> None:
    assert LOST in tensors


def _run(folder: Path, change: Change, where: str) -> Path:
    """A DCP step with a model and its EMA, one of which is changed."""
    step = folder / "step-100"
    state = {}
    for name in ("model", "ema"):
        tensors = ckpt_cli.load_state_dict(EXAMPLE, type=name)
        state[name] = {key: value.clone() for key, value in tensors.items()}
    change(state[where])
    dcp.save(state, checkpoint_id=step, no_dist=True)
    shutil.copy(STEP / "config.json", step)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("type", ["both", "all"])
@pytest.mark.parametrize("where", ["model", "ema"])
@pytest.mark.parametrize(("change", "code"), [(_nan, "non-finite"), (_lost, "uneven-layers")], ids=["nan", "lost"])
def test_a_fault_of_any_component_is_found(change: Change, code: str, where: str, type: str, tmp_path: Path) -> None:
    result = ckpt_cli.verify(_run(tmp_path / "run", change, where), type=type, full=True)
    assert result.component == "model+ema"
    found = [item for item in result.findings if item.severity == "error"]
    assert code in {item.code for item in found} or LOST in {item.tensor for item in found}
    assert all(item.message.startswith(f"{where}: ") for item in found)
    assert not result.ok


@pytest.mark.filterwarnings("ignore")
def test_healthy_components_are_all_counted(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _as_it_is, "ema")
    one, both = ckpt_cli.verify(run, full=True), ckpt_cli.verify(run, full=True, type="both")
    assert (both.tensors, both.bytes_read) == (2 * one.tensors, 2 * one.bytes_read)
    assert both.ok
    assert not both.of_severity("warning")


def test_each_component_is_compared_with_its_own(tmp_path: Path) -> None:
    copy = shutil.copytree(EXAMPLE, tmp_path / "copy")
    result = ckpt_cli.verify(EXAMPLE, against=copy, type="all", full=True)
    assert [(one.component, one.different) for one in result.against] == [("model", 0), ("ema", 0)]
    # The averages of another step, beside the same model.
    shutil.rmtree(copy / "checkpoint-200" / EMA)
    shutil.copytree(copy / "checkpoint-100" / EMA, copy / "checkpoint-200" / EMA)
    result = ckpt_cli.verify(EXAMPLE, against=copy, type="all")
    assert [bool(one.different) for one in result.against] == [False, True]
    assert {item.message.partition(":")[0] for item in result.of_severity("error")} == {"ema"}


def test_a_bit_of_the_second_component(tmp_path: Path) -> None:
    run = shutil.copytree(EXAMPLE, tmp_path / "run")
    file = next(path for path in sorted((run / "checkpoint-200" / EMA).rglob("*rank_1.pt")))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    outcome = ckpt_fork("verify", run, "--full", "--type", "both")
    assert outcome.code == 1, outcome.out
    assert "model+ema" in outcome.out


def test_a_base_is_compared_with_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="base is compared with one component, and there are 2: model, ema") as error:
        ckpt_cli.verify(EXAMPLE, type="both", base=shutil.copytree(EXAMPLE, tmp_path / "base"))
    assert error.value.hint == "pass one of them: --type model"
    ckpt_cli.verify(EXAMPLE, type="model", base=tmp_path / "base")


def test_a_result_is_true_if_nothing_is_wrong(tmp_path: Path) -> None:
    out: Any = tmp_path / "out"
    ckpt_cli.merge(EXAMPLE, out)
    assert ckpt_cli.verify(out)
    file = out / "model.safetensors"
    tensors = load_file(file)
    del tensors[LOST]
    save_file(tensors, file, {"format": "pt"})
    assert not ckpt_cli.verify(out)


@pytest.mark.parametrize("type", ["ema", "both", "critic"])
def test_what_an_output_does_not_hold_is_not_verified_in_its_place(type: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt_cli.merge(EXAMPLE, out)
    for path in (out, out / "model.safetensors"):
        with pytest.raises(NotFound, match="this output does not hold what"):
            ckpt_cli.verify(path, type=type)
    assert ckpt_cli.verify(out, type="all")
    assert ckpt_cli.verify(out, type="main")
    # There it names the component of the source.
    assert not ckpt_cli.verify(out, type="ema", against=EXAMPLE)


def test_the_component_that_an_output_was_merged_from_is_in_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt_cli.merge(EXAMPLE, out, type="ema")
    assert ckpt_cli.verify(out, type="ema").tensors == 24


def test_an_average_beside_a_model_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    ckpt_cli.merge(EXAMPLE, folder)
    ckpt_cli.merge(EXAMPLE, folder / "ema", type="ema")
    for manifest in folder.rglob("*manifest*"):
        manifest.unlink()
    for kind in ("ema", "both"):
        with pytest.raises(NotFound, match="this checkpoint has no component") as error:
            ckpt_cli.verify(folder, type=kind)
        assert "ema" in (error.value.hint or "")
    assert any("was not used" in note.text for note in ckpt_cli.verify(folder, type="all").notes)


@pytest.mark.parametrize("given", [{"step": 100}, {"also": EXAMPLE}])
def test_options_of_a_run_are_not_passed_over_for_an_output(given: dict[str, Any], tmp_path: Path) -> None:
    ckpt_cli.merge(EXAMPLE, tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "out/model.safetensors"):
        with pytest.raises((NotFound, UsageError)):
            ckpt_cli.verify(path, **given)
