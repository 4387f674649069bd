"""DeepSpeed saves with parameters of no elements, and universal saves with other slots than Adam's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, MissingShard
from tests.conftest import Copy
from tests.formats.test_deepspeed import changed
from tests.tensors import Tensors, differences, load

CASES = ("z1-bf16-w2", "z1-bf16opt-w2", "z3-bf16-w2")
CONVERTED = ("z1-bf16-w2", "z3-bf16-w2")
TAG, UNIVERSAL = "global_step3", "global_step3_universal"


def merged(path: Path, out: Path) -> Tensors:
    """What is written, but for the dtype of what has no values: the optimizer has no master of it."""
    ckpt_cli.merge(path, out, names="native")
    return {name: tensor if tensor.numel() else tensor.float() for name, tensor in load(out / "model.safetensors").items()}


@pytest.mark.parametrize(("case", "tag"), [*((case, TAG) for case in CASES), *((case, UNIVERSAL) for case in CONVERTED)])
def test_parameters_without_elements_are_written_with_their_shapes(data: Path, tmp_path: Path, case: str, tag: str) -> None:
    folder = data / "deepspeed-empty" / case
    found = merged(folder / "run" / tag, tmp_path / "out")
    assert sorted(tuple(tensor.shape) for tensor in found.values() if not tensor.numel()) == [(0,), (0, 5)]
    assert differences(found, load(folder / "expected.safetensors")) == []


@pytest.mark.parametrize(("case", "tag"), [*((case, TAG) for case in CASES), *((case, UNIVERSAL) for case in CONVERTED)])
def test_the_optimizer_beside_them_is_complete(data: Path, tmp_path: Path, case: str, tag: str) -> None:
    folder = data / "deepspeed-empty" / case
    ckpt_cli.extract_state(folder / "run" / tag, tmp_path / "state", optimizer=True)
    moments = load(tmp_path / "state" / "optimizer.safetensors")
    trained = {name for name, tensor in load(folder / "expected.safetensors").items() if tensor.numel()}
    assert {key.removeprefix("state.").removesuffix(".exp_avg") for key in moments if key.endswith(".exp_avg")} == trained


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("case", CONVERTED)
def test_one_that_the_partitions_list_takes_no_place_in_them(copy: Copy, tmp_path: Path, case: str, place: str) -> None:
    """Versions that do not leave it out of the optimizer have it among the shapes."""
    folder = copy("deepspeed-empty", case)
    for path in (folder / "run" / TAG).glob("*_model_states.pt"):
        with changed(path) as content:
            shapes = content["param_shapes"][0]
            shapes["more"] = torch.Size([4, 0])
            shapes.move_to_end("more", last=place == "last")
            content["module"]["more"] = torch.zeros(0 if case.startswith("z3") else (4, 0), dtype=torch.bfloat16)
    for path in (folder / "run" / TAG).glob("*_optim_states.pt"):
        with changed(path) as content:
            gaps = content["optimizer_state_dict"].get("param_alignment_paddings")
            if gaps is not None:
                gaps[0].insert(0 if place == "first" else len(gaps[0]), 0)
    found = merged(folder / "run" / TAG, tmp_path / "out")
    assert found.pop("more").shape == (4, 0)
    assert differences(found, load(folder / "expected.safetensors")) == []
    ckpt_cli.extract_state(folder / "run" / TAG, tmp_path / "state", optimizer=True)
    assert load(tmp_path / "state" / "optimizer.safetensors")["state.more.exp_avg"].shape == (4, 0)


def with_slot(folder: Path, slot: str, case: str) -> Tensors:
    """Another slot of every parameter of a universal save, in the form of the others; returns it by parameter."""
    made: Tensors = {}
    shapes = load(folder / "expected.safetensors")
    for number, parameter in enumerate(sorted(path for path in (folder / "run" / UNIVERSAL / "zero").iterdir() if path.is_dir())):
        shape = shapes[parameter.name].shape
        if shape.numel():
            made[parameter.name] = torch.arange(shape.numel(), dtype=torch.float32).reshape(shape) + 1000 * number
            value = made[parameter.name]
            torch.save({"param": value} if case.startswith("z1") else value.flatten(), parameter / f"{slot}.pt")
    return made


@pytest.mark.parametrize("case", CONVERTED)
@pytest.mark.parametrize("slot", ["momentum_buffer", "max_exp_avg_sq"])
def test_a_universal_save_has_the_slots_that_its_files_are_called_after(copy: Copy, tmp_path: Path, case: str, slot: str) -> None:
    folder = copy("deepspeed-empty", case)
    made = with_slot(folder, slot, case)
    ckpt_cli.extract_state(folder / "run" / UNIVERSAL, tmp_path / "state", optimizer=True)
    found = load(tmp_path / "state" / "optimizer.safetensors")
    assert {f"state.{name}.exp_avg" for name in made} <= set(found)
    of_slot = {key: tensor for key, tensor in found.items() if key.endswith(f".{slot}")}
    assert differences(of_slot, {f"state.{name}.{slot}": tensor for name, tensor in made.items()}) == []


def test_a_slot_that_one_parameter_lacks_is_refused(copy: Copy, tmp_path: Path) -> None:
    folder = copy("deepspeed-empty", "z1-bf16-w2")
    with_slot(folder, "momentum_buffer", "z1")
    (folder / "run" / UNIVERSAL / "zero" / "up.bias" / "momentum_buffer.pt").unlink()
    with pytest.raises(MissingShard) as caught:
        ckpt_cli.extract_state(folder / "run" / UNIVERSAL, tmp_path / "state", optimizer=True)
    assert (caught.value.tensor, Path(str(caught.value.expected)).name) == ("up.bias", "momentum_buffer.pt")


class TestWhatIsOffloadedToNvme:
    """Stage 3 leaves the partitions empty that are in swap files, which it copies into the folder of a step."""

    def emptied(self, folder: Path, *, length: int = 0) -> Path:
        for path in (folder / "run" / TAG).glob("*_optim_states.pt"):
            with changed(path) as content:
                state = content["optimizer_state_dict"]
                key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
                state[key] = [group[:length].clone() for group in state[key]]
        return folder / "run" / TAG

    @pytest.mark.parametrize("swapped", [True, False])
    @pytest.mark.parametrize("case", ["z3-bf16-w2", "z3-bf16-w2-offload", "z3-bf16-w4-subgroups"])
    def test_is_said_to_be_there(self, copy: Copy, tmp_path: Path, case: str, swapped: bool) -> None:
        folder = self.emptied(copy("deepspeed", case))
        if swapped:
            (folder / "offloaded_tensors" / "optimizer").mkdir(parents=True)
        with pytest.raises(Inconsistent, match="has 0 elements") as caught:
            ckpt_cli.merge(folder, tmp_path / "out")
        assert "offloaded to NVMe" in str(caught.value.hint)
        assert ("(offloaded_tensors/)" in str(caught.value.hint)) == swapped
        assert "two saves" not in str(caught.value.hint)

    @pytest.mark.parametrize(("case", "length"), [("z3-bf16-w2", 5), ("z1-bf16-w2", 0), ("z2-bf16-w2-roundrobin", 0)])
    def test_of_other_lengths_and_stages_nothing_is(self, copy: Copy, tmp_path: Path, case: str, length: int) -> None:
        folder = self.emptied(copy("deepspeed", case), length=length)
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(folder, tmp_path / "out")
        assert "NVMe" not in str(caught.value.hint)
