"""Files of Megatron's ranks that were exchanged, copied over each other or taken from another run: each says who wrote it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CorruptFile, Inconsistent, Unsupported
from tests.conftest import Copy
from tests.formats.test_megatron_legacy import CASES, LAYERS, model, with_experts
from tests.megatron import arguments, write_legacy
from tests.tensors import differences, load

FILE = "model_optim_rng.pt"


def exchange(step: Path, first: str, second: str) -> None:
    (step / first).rename(step / "between")
    (step / second).rename(step / first)
    (step / "between").rename(step / second)


def over(step: Path, first: str, second: str) -> None:
    """The first file is copied over the second one."""
    shutil.copy(step / first / FILE, step / second / FILE)


COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "merge": lambda step, out: ckpt_cli.merge(step, out, names="native"),
    "inspect": lambda step, out: ckpt_cli.inspect(step),
    "extract-state": ckpt_cli.extract_state,
    "average": lambda step, out: ckpt_cli.average([step, step], out, names="native"),
    "open": lambda step, out: ckpt_cli.open(step),
    "diff": lambda step, out: ckpt_cli.diff(step, step),
}


def refused(step: Path, out: Path, command: str = "merge") -> Inconsistent:
    with pytest.raises(Inconsistent) as caught:
        COMMANDS[command](step, out)
    assert caught.value.exit_code == 4
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", [exchange, over])
@pytest.mark.parametrize("case", CASES)
def test_megatron_s_own_files(case: str, damage: Callable[..., None], command: str, copy: Copy, tmp_path: Path) -> None:
    step = copy("megatron", case, "checkpoint") / "iter_0000005"
    damage(step, *sorted(path.name for path in step.iterdir()))
    if damage is exchange:
        assert "was written by rank 1" in refused(step, tmp_path / "out", command).message
    elif case == CASES[0]:
        assert "hold the same weights" in refused(step, tmp_path / "out", command).message
    elif command == "merge":
        # Two expert ranks have equal weights when a dense model was just made into one with experts.
        notes = ckpt_cli.merge(step, tmp_path / "out", names="native").checkpoint.notes
        assert "equal experts" in next(note.text for note in notes if note.code == "equal-experts")


@pytest.mark.parametrize("damage", [exchange, over])
@pytest.mark.parametrize(
    ("first", "second"), [("mp_rank_00_000", "mp_rank_01_000"), ("mp_rank_00_001", "mp_rank_00_002"), ("mp_rank_01_000", "mp_rank_00_001")]
)
def test_ranks_and_stages(first: str, second: str, damage: Callable[..., None], tmp_path: Path) -> None:
    step = write_legacy(tmp_path / "run", model(), arguments(tensor_model_parallel_size=2, num_layers=LAYERS), [[1], [2], [1]])
    damage(step, first, second)
    assert "rank" in refused(step, tmp_path / "out").message


@pytest.mark.parametrize("damage", [exchange, over])
def test_experts(damage: Callable[..., None], tmp_path: Path) -> None:
    args = arguments(expert_model_parallel_size=4, num_experts=4, moe_ffn_hidden_size=12)
    step = write_legacy(tmp_path / "run", with_experts(2, 4), args, [[2]])
    damage(step, "mp_rank_00_001", "mp_rank_00_003")
    assert "written by rank" in refused(step, tmp_path / "out").message


class TestOneProcess:
    """A program that converts checkpoints writes the files of all ranks as rank 0."""

    def step(self, tmp_path: Path, stages: int = 4) -> Path:
        args = arguments(tensor_model_parallel_size=2, num_layers=LAYERS)
        return write_legacy(tmp_path / "run", model(), args, [[LAYERS // stages]] * stages, converted=True)

    def test_is_no_doubt(self, tmp_path: Path) -> None:
        result = ckpt_cli.merge(self.step(tmp_path), tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), model()) == []
        assert not {"arguments-differ", "equal-experts"} & {note.code for note in result.checkpoint.notes}

    @pytest.mark.parametrize(("first", "second"), [("mp_rank_00_000", "mp_rank_01_000"), ("mp_rank_00_001", "mp_rank_00_002")])
    def test_a_file_that_is_there_twice(self, first: str, second: str, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        over(step, first, second)
        assert f"{first} and {second} hold the same weights" in refused(step, tmp_path / "out").message

    @pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 3), (0, 3)])
    def test_stages_whose_tensors_cannot_be_in_this_order(self, first: int, second: int, tmp_path: Path) -> None:
        step = self.step(tmp_path)
        for rank in (0, 1):
            exchange(step, f"mp_rank_{rank:02d}_{first:03d}", f"mp_rank_{rank:02d}_{second:03d}")
        assert "belongs before" in refused(step, tmp_path / "out").message

    def test_experts_that_were_just_made_of_a_dense_model(self, tmp_path: Path) -> None:
        weights = with_experts(2, 2)
        weights |= {name.replace("experts.1.", "experts.0."): weights[name] for name in weights if "experts.1." in name}
        args = arguments(expert_model_parallel_size=2, num_experts=2, moe_ffn_hidden_size=12)
        for converted in (False, True):
            step = write_legacy(tmp_path / f"{converted}", weights, args, [[2]], converted=converted)
            notes = ckpt_cli.merge(step, tmp_path / f"out-{converted}", names="native").checkpoint.notes
            assert [note.level for note in notes if note.code == "equal-experts"] == ["warning"] * converted
            assert differences(load(tmp_path / f"out-{converted}"), weights) == []


class TestAnotherRun:
    def changed(self, tmp_path: Path, scheduler: Any = None, **more: Any) -> Path:
        args = arguments(tensor_model_parallel_size=2, num_layers=LAYERS)
        extra = {"opt_param_scheduler": {"num_steps": 28, "max_lr": 1e-4}}
        step = write_legacy(tmp_path / "run", model(), args, [[2], [2]], extra=extra)
        content = torch.load(step / "mp_rank_01_001" / FILE, weights_only=False)
        for name, value in more.items():
            setattr(content["args"], name, value)
        content["opt_param_scheduler"] |= scheduler or {}
        torch.save(content, step / "mp_rank_01_001" / FILE)
        return step

    @pytest.mark.parametrize(
        "more", [{"seed": 7}, {"save": "/other"}, {"world_size": 16}, {"lr": 2.0}, {"rotary_base": 500000}, {"num_query_groups": 1}]
    )
    @pytest.mark.parametrize("command", ["merge", "inspect", "extract-state"])
    def test_with_arguments_that_a_run_has_once(self, more: dict[str, Any], command: str, tmp_path: Path) -> None:
        error = refused(self.changed(tmp_path, **more), tmp_path / "out", command)
        assert next(iter(more)) in error.message
        assert "mp_rank_01_001" in str(error.path)

    def test_with_another_scheduler(self, tmp_path: Path) -> None:
        assert "opt_param_scheduler" in refused(self.changed(tmp_path, {"num_steps": 56}), tmp_path / "out").message

    @pytest.mark.parametrize("command", [ckpt_cli.merge, ckpt_cli.extract_state])
    def test_arguments_of_a_node_are_a_warning(self, command: Any, tmp_path: Path) -> None:
        result = command(self.changed(tmp_path, data_cache_path="/node7"), tmp_path / "out")
        notes = (*getattr(result, "notes", ()), *result.checkpoint.notes) if hasattr(result, "checkpoint") else result.notes
        assert "data_cache_path" in next(note.text for note in notes if note.code == "arguments-differ")


class TestArguments:
    """What only arguments tell about how tensors were cut."""

    def test_experts_that_every_expert_rank_holds_a_part_of(self, tmp_path: Path) -> None:
        args = arguments(expert_model_parallel_size=2, num_experts=4, moe_ffn_hidden_size=12, moe_extended_tp=True)
        step = write_legacy(tmp_path / "run", with_experts(2, 4), args, [[2]], grouped=True)
        with pytest.raises(Unsupported, match="cut by 2 ranks"):
            ckpt_cli.merge(step, tmp_path / "out", names="native")

    @pytest.mark.parametrize("name", ["swiglu", "quick_geglu", "gated_linear_unit"])
    def test_gates_of_every_activation_are_joined_as_gates(self, name: str, tmp_path: Path) -> None:
        args = arguments(tensor_model_parallel_size=2, num_layers=LAYERS, **{"swiglu": False, name: True})
        write_legacy(tmp_path / "run", model(), args, [[2], [2]])
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), model()) == []

    @pytest.mark.parametrize("experts", [None, 2])
    def test_shapes_tell_of_gates_where_arguments_do_not(self, experts: int | None, tmp_path: Path) -> None:
        weights = model() if experts is None else with_experts(2, experts)
        args = arguments(tensor_model_parallel_size=2, num_layers=2 if experts else LAYERS, num_experts=experts)
        del args.swiglu
        write_legacy(tmp_path / "run", weights, args, [[args.num_layers]])
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), weights) == []

    def test_layers_without_gates_are_joined_as_they_are(self, tmp_path: Path) -> None:
        weights = {name: tensor[: len(tensor) // 2] if name.endswith("linear_fc1.weight") else tensor for name, tensor in model().items()}
        args = arguments(tensor_model_parallel_size=2, num_layers=LAYERS, swiglu=False)
        step = write_legacy(tmp_path / "run", weights, args, [[LAYERS]])
        for rank in range(2):
            path = step / f"mp_rank_{rank:02d}" / FILE
            content = torch.load(path, weights_only=False)
            plain = {name: tensor.chunk(2)[rank].clone() for name, tensor in weights.items() if name.endswith("linear_fc1.weight")}
            for said in (True, False):
                content["model"] |= plain
                if said:
                    torch.save(content, path)
                else:
                    del content["args"].swiglu
                    torch.save(content, tmp_path / f"{rank}.pt")
        ckpt_cli.merge(step, tmp_path / "out", names="native")
        for rank in range(2):
            (tmp_path / f"{rank}.pt").replace(step / f"mp_rank_{rank:02d}" / FILE)
        ckpt_cli.merge(step, tmp_path / "unsaid", names="native")
        for output in ("out", "unsaid"):
            assert differences(load(tmp_path / output), weights) == []

    @pytest.mark.parametrize(("swiglu", "what"), [(False, "holds no gate"), (True, "holds a gate")])
    def test_arguments_that_contradict_the_shapes(self, swiglu: bool, what: str, tmp_path: Path) -> None:
        cut = 1 if not swiglu else 2
        weights = {name: tensor[: len(tensor) // cut] if name.endswith("linear_fc1.weight") else tensor for name, tensor in model().items()}
        step = write_legacy(
            tmp_path / "run", weights, arguments(tensor_model_parallel_size=2, num_layers=LAYERS, swiglu=swiglu), [[LAYERS]]
        )
        with pytest.raises(Inconsistent, match=what):
            ckpt_cli.merge(step, tmp_path / "out", names="native")

    def test_two_models_in_one_file(self, tmp_path: Path) -> None:
        step = write_legacy(tmp_path / "run", model(), arguments(num_layers=LAYERS), [[LAYERS]])
        content = torch.load(step / "mp_rank_00" / FILE, weights_only=False)
        torch.save({"model0": content["model"], **content}, step / "mp_rank_00" / FILE)
        with pytest.raises(CorruptFile, match="both model and model0"):
            ckpt_cli.merge(step, tmp_path / "out", names="native")
