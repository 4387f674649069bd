"""DeepSpeed's saves: every kind of its optimizers, against tensors gathered in-process with DeepSpeed's own collectives."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MissingShard, MixedWorldSizes, Undecidable, Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import WEIGHTS_16
from ckpt_cli.formats.deepspeed.names import is_deepspeed_name, save_files
from ckpt_cli.formats.deepspeed.reader import DeepSpeed
from tests.cli import ckpt_fork as ckpt
from tests.conftest import Copy
from tests.formats.conformance import Example, FormatConformance, everything_said_by
from tests.tensors import Tensors, cast_floats, differences, load

CASES = (
    *("accelerate-z3-w2", "hf-trainer-z3-w2", "hpz-z3-w4", "mics-z3-w4", "moe-z0-w2-ep2", "moe-z2-w2-ep2", "pipe-bf16opt-pp2"),
    *(
        "pipe-z1-bf16-pp2",
        "tp2-z1-w2",
        "universal-z1-w3",
        "universal-z3-w2",
        "z0-bf16-w2",
        "z0-fp32-w2",
        "z1-bf16-w2",
        "z1-bf16-w2-elastic",
    ),
    *("z1-bf16-w3-odd-groups", "z1-bf16opt-w2", "z2-bf16-w2-bf16master", "z2-bf16-w2-ds0.14.5", "z2-bf16-w2-legacy-pickle"),
    *("z2-bf16-w2-paramalign", "z2-bf16-w2-roundrobin", "z2-bf16-w4-frozen", "z2-fp32-w2", "z3-bf16-w2", "z3-bf16-w2-gather16"),
    *("z3-bf16-w2-offload", "z3-bf16-w4-subgroups", "z3-fp16-w2-lossscale", "zpp-z3-w2-quantized"),
)
"""All saves but one with adapters alone and one whose frozen weights are codes."""

WITH_16_BIT = (
    *("moe-z0-w2-ep2", "moe-z2-w2-ep2", "pipe-bf16opt-pp2", "pipe-z1-bf16-pp2", "tp2-z1-w2", "universal-z1-w3", "z0-bf16-w2", "z1-bf16-w2"),
    *("z1-bf16-w2-elastic", "z1-bf16-w3-odd-groups", "z1-bf16opt-w2", "z2-bf16-w2-ds0.14.5", "z2-bf16-w2-legacy-pickle"),
    *("z2-bf16-w2-paramalign", "z2-bf16-w2-roundrobin", "z2-bf16-w4-frozen"),
)
"""Saves that also hold the module's weights in the dtype of the training."""

TAG = Path("run", "global_step3")


def path_of(case: str) -> Path:
    """What a user passes, below the folder of a case."""
    if case == "universal-z1-w3":
        return Path("run", "global_step3_universal")  # the save that it was made from lies beside it
    return Path("run", "checkpoint_0") if case.startswith("accelerate") else Path("run")


def expected(folder: Path, found: Tensors, name: str = "expected.safetensors") -> Tensors:
    """What should be found; another name of a tensor, which is written once, is left out where its values are the same."""
    wanted = load(folder / name)
    tied: dict[str, str] = json.loads((folder / "facts.json").read_text())["tied"]
    for alias, kept in tied.items():
        if alias in wanted and alias not in found:
            assert torch.equal(wanted[alias], wanted[kept])
            del wanted[alias]
    return wanted


def dtype_of(folder: Path) -> str:
    said: str = json.loads((folder / "facts.json").read_text())["dtype"]
    return said


class TestConformance(FormatConformance):
    reader = DeepSpeed()

    def example(self, data: Path) -> Example:
        return Example(data / "deepspeed" / "z3-bf16-w2" / TAG, data / "deepspeed" / "z3-bf16-w2" / "expected.safetensors")


class TestConformanceOfStage2(FormatConformance):
    """Without the optimizer the module is still whole: a missing rank must be refused nevertheless."""

    reader = DeepSpeed()

    def example(self, data: Path) -> Example:
        return Example(data / "deepspeed" / "z2-bf16-w4-frozen" / TAG, data / "deepspeed" / "z2-bf16-w4-frozen" / "expected.safetensors")


class TestWeights:
    @pytest.mark.parametrize("case", CASES)
    def test_merging_gives_the_fp32_weights_bit_for_bit(self, case: str, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed" / case
        ckpt_cli.merge(folder / path_of(case), tmp_path / "out", names="native")
        found = load(tmp_path / "out")
        assert differences(found, expected(folder, found)) == []

    @pytest.mark.parametrize("case", [case for case in CASES if "fp32" not in case and "bf16master" not in case])
    def test_a_cast_gives_the_weights_of_the_training(self, case: str, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed" / case
        kind = dtype_of(folder)
        ckpt_cli.merge(folder / path_of(case), tmp_path / "out", names="native", dtype=kind)
        found = load(tmp_path / "out")
        # Buffers keep their own dtype in training.
        wanted = cast_floats(expected(folder, found, "expected16.safetensors"), torch.bfloat16 if kind == "bf16" else torch.float16)
        assert differences(found, wanted) == []

    @pytest.mark.parametrize("case", WITH_16_BIT)
    def test_weights16_are_those_of_the_module(self, case: str, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed" / case
        ckpt_cli.merge(folder / path_of(case), tmp_path / "out", names="native", type=WEIGHTS_16)
        found = load(tmp_path / "out")
        assert differences(found, expected(folder, found, "expected16.safetensors")) == []

    @pytest.mark.parametrize("case", sorted(set(CASES) - set(WITH_16_BIT)))
    def test_weights16_are_only_offered_where_they_are_and_differ(self, case: str, data: Path) -> None:
        detected = ckpt_cli.detect(data / "deepspeed" / case / path_of(case)).checkpoint
        assert WEIGHTS_16 not in {component.name for component in detected.components}

    @pytest.mark.parametrize("case", ["z3-bf16-w4-subgroups", "tp2-z1-w2", "pipe-z1-bf16-pp2", "moe-z2-w2-ep2", "universal-z3-w2"])
    def test_verify_finds_the_output_equal_and_a_changed_one_not(self, case: str, data: Path, tmp_path: Path) -> None:
        source = data / "deepspeed" / case / path_of(case)
        ckpt_cli.merge(source, tmp_path / "out", names="native", verify=True)
        assert ckpt_cli.verify(tmp_path / "out", against=source).exit_code == 0
        (file,) = (tmp_path / "out").glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert ckpt_cli.verify(tmp_path / "out", against=source).exit_code == 1

    def test_hub_names_tokenizer_and_config_of_the_trainer(self, data: Path, tmp_path: Path) -> None:
        """The folder of the Trainer has all of these beside the save."""
        folder = data / "deepspeed" / "hf-trainer-z3-w2"
        result = ckpt_cli.merge(folder / "run", tmp_path / "out")
        assert result.checkpoint.step == 4
        assert result.checkpoint.framework == "Hugging Face Trainer with DeepSpeed"
        assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
        wanted = load(folder / "expected.safetensors")
        del wanted["lm_head.weight"]
        assert differences(load(tmp_path / "out"), wanted) == []
        for path in (folder / "run" / "checkpoint-2", folder / "run" / "checkpoint-2" / "global_step2"):
            ckpt_cli.merge(path, tmp_path / path.name)
            earlier = load(folder / "step2" / "expected.safetensors")
            del earlier["lm_head.weight"]
            assert differences(load(tmp_path / path.name), earlier) == []
            assert (tmp_path / path.name / "config.json").is_file()

    def test_adapters_whose_base_was_left_out_are_a_peft_folder(self, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed" / "lora-z3-w2-nofrozen"
        ckpt_cli.merge(
            folder / "run", tmp_path / "out", lora_alpha=json.loads((folder / "run" / "adapter_config.json").read_text())["lora_alpha"]
        )
        found = load(tmp_path / "out" / "adapter_model.safetensors")
        wanted = load(folder / "expected.safetensors")
        assert sorted(found) == sorted(name.replace(".default", "") for name in wanted)
        assert all(torch.equal(found[name.replace(".default", "")], tensor) for name, tensor in wanted.items())

    def test_codes_without_their_scales_are_refused_by_name(self, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed" / "zpp-z3-w2-frozen-int8"
        with pytest.raises(Unsupported, match="codes without their scales") as caught:
            ckpt_cli.merge(folder / "run", tmp_path / "out")
        assert caught.value.tensor in json.loads((folder / "facts.json").read_text())["unrecoverable"]
        assert not (tmp_path / "out").exists()

    def test_a_save_without_its_optimizer_is_the_module(self, copy: Copy, tmp_path: Path) -> None:
        """Optimizer states are often deleted to save room: what is left of stages 1 and 2 is whole."""
        folder = copy("deepspeed", "z2-bf16-w4-frozen")
        for path in (folder / TAG).glob("*_optim_states.pt"):
            path.unlink()
        result = ckpt_cli.merge(folder / "run", tmp_path / "out")
        assert [note.level for note in result.checkpoint.notes if note.code == "no-masters"] == ["warning"]
        found = load(tmp_path / "out")
        assert differences(found, expected(folder, found, "expected16.safetensors")) == []

    def test_stage_3_without_its_optimizer_is_refused(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z3-bf16-w2")
        for path in (folder / TAG).glob("*_optim_states.pt"):
            path.unlink()
        with pytest.raises(MissingShard, match="optimizer states are missing"):
            ckpt_cli.merge(folder / "run", tmp_path / "out")

    def test_the_padding_of_stage_3_is_never_read(self, data: Path, tmp_path: Path) -> None:
        """It is uninitialised memory: here NaN, which no check may see."""
        folder = data / "deepspeed" / "z3-bf16-w4-subgroups" / "run"
        ckpt_cli.average([folder, folder], tmp_path / "out")
        assert not any(torch.isnan(tensor).any() for tensor in load(tmp_path / "out").values() if tensor.is_floating_point())
        assert ckpt_cli.verify(tmp_path / "out", full=True).exit_code == 0

    def test_an_average_over_steps_and_over_kinds_of_saves(self, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed" / "hf-trainer-z3-w2"
        ckpt_cli.average(folder / "run", tmp_path / "out", everything=True, names="native")
        first, second = load(folder / "step2" / "expected.safetensors"), load(folder / "expected.safetensors")
        found = load(tmp_path / "out")
        for name, tensor in found.items():
            assert torch.equal(tensor, ((first[name].double() + second[name].double()) / 2).float()), name

    @pytest.mark.parametrize("case", ["z1-bf16-w2", "z3-bf16-w2", "moe-z2-w2-ep2", "tp2-z1-w2", "pipe-bf16opt-pp2"])
    def test_nothing_of_torch_or_deepspeed_is_imported(self, case: str, data: Path, tmp_path: Path) -> None:
        code = "import sys, ckpt_cli; ckpt_cli.merge(sys.argv[1], sys.argv[2]); print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
        source = data / "deepspeed" / case / path_of(case)
        done = subprocess.run([sys.executable, "-c", code, str(source), str(tmp_path / "out")], capture_output=True, text=True, check=True)
        assert done.stdout.strip().endswith("[]")


class TestState:
    @pytest.mark.parametrize("case", CASES)
    def test_the_optimizer_by_parameter_bit_for_bit(self, case: str, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed" / case
        ckpt_cli.extract_state(folder / path_of(case), tmp_path / "out", optimizer=True)
        found = {
            name.removeprefix("state."): tensor
            for name, tensor in load(tmp_path / "out" / "optimizer.safetensors").items()
            if not name.endswith(".step")
        }
        assert differences(found, load(folder / "optimizer.expected.safetensors")) == []
        content = json.loads((tmp_path / "out" / "optimizer.json").read_text())
        listed = [name for group in content["param_groups"] for name in group["params"]]
        assert sorted(listed) == sorted({name.rpartition(".")[0] for name in found})

    def test_counters_scheduler_loss_scale_and_what_the_caller_kept(self, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed" / "z3-fp16-w2-lossscale"
        facts = json.loads((folder / "facts.json").read_text())
        result = ckpt_cli.extract_state(folder / "run", tmp_path / "out")
        training = json.loads((tmp_path / "out" / "training_state.json").read_text())
        assert training["step"] == facts["global_steps"]
        assert training["counters"]["loss_scale"] == facts["loss_scale"]
        assert training["counters"]["big"] == 2**70
        assert any("argparse.Namespace" in lost for lost in result.not_represented)
        state = torch.load(tmp_path / "out" / "extra_state_merged.pt")
        assert state["global_steps"] == facts["global_steps"]
        assert state["loss_scaler"]["cur_scale"] == facts["loss_scale"]

    def test_the_scheduler_and_the_random_states_of_the_trainer(self, data: Path, tmp_path: Path) -> None:
        result = ckpt_cli.extract_state(data / "deepspeed" / "hf-trainer-z3-w2" / "run", tmp_path / "out")
        assert result.scheduler is not None
        assert result.step == 4
        assert set(result.random) >= {"cpu", "numpy"}

    @pytest.mark.parametrize("kind", ["tensor", "number", "option"])
    def test_ranks_that_have_counted_different_steps_are_refused(self, kind: str, copy: Copy, tmp_path: Path) -> None:
        """Optimizers for GPUs count in a number beside the moments or in the options of the group."""
        folder = copy("deepspeed", "z3-bf16-w2")
        for rank in range(2):
            with changed(folder / TAG / OPTIM.format(rank)) as content:
                inner = content["optimizer_state_dict"]["optimizer_state_dict"]
                for state in inner["state"].values():
                    del state["step"]
                    if kind != "option":
                        state["step"] = torch.tensor(3.0 + rank) if kind == "tensor" else 3 + rank
                if kind == "option":
                    inner["param_groups"][0]["step"] = 3 + rank
        for call in (
            lambda: ckpt_cli.merge(folder / "run", tmp_path / "out"),
            lambda: ckpt_cli.extract_state(folder / "run", tmp_path / "out", optimizer=True),
        ):
            with pytest.raises(Inconsistent):
                call()

    def test_other_steps_than_the_model_states_are_a_warning(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z3-bf16-w2")
        for rank in range(2):
            with changed(folder / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt") as content:
                content["global_steps"] = 9
        for notes in (ckpt_cli.detect(folder / "run").checkpoint.notes, ckpt_cli.extract_state(folder / "run", tmp_path / "out").notes):
            assert "step-differs" in {note.code for note in notes if note.level == "warning"}

    def test_moments_of_another_save_are_refused(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z1-bf16-w2")
        for rank in range(2):
            with changed(folder / TAG / OPTIM.format(rank)) as content:
                for vector in content["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                    vector.data.add_(1)
        with pytest.raises(Inconsistent):
            ckpt_cli.extract_state(folder / "run", tmp_path / "out", optimizer=True)

    def test_codes_in_place_of_moments_are_refused_and_weights_are_read(self, copy: Copy, tmp_path: Path) -> None:
        """Optimizers of 8 bits keep codes, and tables of other lengths."""
        folder = copy("deepspeed", "z1-bf16-w2")
        for rank in range(2):
            with changed(folder / TAG / OPTIM.format(rank)) as content:
                state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
                state["state1"] = torch.zeros(len(state.pop("exp_avg")), dtype=torch.uint8)
                state["qmap1"] = torch.zeros(256)
        ckpt_cli.merge(folder / "run", tmp_path / "out")
        found = load(tmp_path / "out")
        assert differences(found, expected(folder, found)) == []
        with pytest.raises(Unsupported, match="state1"):
            ckpt_cli.extract_state(folder / "run", tmp_path / "state", optimizer=True)

    def test_a_moment_that_is_shorter_on_one_rank(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z1-bf16-w2")
        for rank in range(2):
            with changed(folder / TAG / OPTIM.format(rank)) as content:
                state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
                state["exp_avg"] = state["exp_avg"][: -200 * rank or None].clone()
        with pytest.raises(Inconsistent, match="exp_avg"):
            ckpt_cli.extract_state(folder / "run", tmp_path / "out", optimizer=True)

    def test_a_vector_of_another_length_on_all_ranks(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z1-bf16-w2")
        for rank in range(2):
            with changed(folder / TAG / OPTIM.format(rank)) as content:
                content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["feedback"] = torch.zeros(7)
        ckpt_cli.merge(folder / "run", tmp_path / "out")
        with pytest.raises(Unsupported, match="feedback"):
            ckpt_cli.extract_state(folder / "run", tmp_path / "state", optimizer=True)

    def test_a_moment_that_a_universal_save_lacks(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "universal-z3-w2")
        (folder / "run" / "global_step3_universal" / "zero" / "norm.bias" / "exp_avg.pt").unlink()
        with pytest.raises(MissingShard) as caught:
            ckpt_cli.extract_state(folder / "run", tmp_path / "out", optimizer=True)
        assert caught.value.tensor == "norm.bias"


def stage_0(folder: Path, module: Tensors, **optimizer: Any) -> Path:
    """A save of stage 0 in bf16 with this optimizer."""
    folder.mkdir()
    content = {
        "module": module,
        "buffer_names": [],
        "param_shapes": None,
        "optimizer": optimizer,
        "global_steps": 3,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 0}},
        "ds_version": "0.19.8",
    }
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    return folder


class TestStage0:
    """The fp32 weights have no names: only what values tell is believed."""

    def test_equal_parameters_in_another_order_are_not_told_by_their_place(self, tmp_path: Path) -> None:
        names = [f"l{number}.weight" for number in range(12)]
        module = {name: torch.ones(4, dtype=torch.bfloat16) for name in names}
        masters = {name: torch.full((4,), 1 + number * 1e-6) for number, name in enumerate(names)}
        save = stage_0(tmp_path / "save", module, fp32_groups=[[masters[name] for name in sorted(names)]])
        result = ckpt_cli.merge(save, tmp_path / "out")
        assert differences(load(tmp_path / "out"), module) == []
        assert "nameless-masters" in {note.code for note in result.checkpoint.notes}

    def test_a_few_equal_ones_among_others_keep_their_order(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        masters = {
            f"l{number}.{kind}": torch.ones(4) * (1 + number * 1e-6) if kind == "norm" else torch.randn(4, 4)
            for number in range(12)
            for kind in ("proj", "norm")
        }
        module = {name: tensor.to(torch.bfloat16) for name, tensor in masters.items()}
        ckpt_cli.merge(stage_0(tmp_path / "save", module, fp32_groups=[list(masters.values())]), tmp_path / "out")
        assert differences(load(tmp_path / "out"), masters) == []

    def test_tied_parameters_have_one_master(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        masters = [torch.randn(6, 4), torch.randn(4)]
        embed = masters[0].to(torch.bfloat16)
        module = {"embed.weight": embed, "norm.weight": masters[1].to(torch.bfloat16), "head.weight": embed}
        for groups in ([masters], [[masters[0]], [masters[1]]]):
            shutil.rmtree(tmp_path / "save", ignore_errors=True)
            save = stage_0(tmp_path / "save", module, fp32_groups=groups)
            ckpt_cli.merge(save, tmp_path / "out", names="native", overwrite=True)
            found = load(tmp_path / "out")
            assert torch.equal(found["embed.weight"], masters[0])
            assert torch.equal(found.get("head.weight", masters[0]), masters[0])

    def test_vectors_without_names_are_said_not_to_be_read(self, tmp_path: Path) -> None:
        module = {"weight": torch.ones(4, dtype=torch.bfloat16)}
        save = stage_0(tmp_path / "save", module, fp32_groups_flat=[torch.ones(4)])
        result = ckpt_cli.merge(save, tmp_path / "out")
        assert "no-masters" in {note.code for note in result.checkpoint.notes}
        with pytest.raises(Unsupported, match="fp32_groups_flat"):
            ckpt_cli.extract_state(save, tmp_path / "state", optimizer=True)

    def test_a_missing_rank_of_experts_is_refused(self, copy: Copy, tmp_path: Path) -> None:
        for lost in ([1], [0], [0, 1]):
            folder = copy("deepspeed", "moe-z0-w2-ep2")
            for rank in lost:
                (folder / TAG / f"expp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
            commands: list[Callable[[Path], object]] = [
                lambda run: ckpt_cli.merge(run, tmp_path / "out"),
                lambda run: ckpt_cli.extract_state(run, tmp_path / "out", optimizer=True),
            ]
            for command in commands:
                with pytest.raises(MissingShard) as caught:
                    command(folder / "run")
                assert Path(str(caught.value.expected)).name == f"expp_rank_{lost[0]}_mp_rank_00_optim_states.pt"
            shutil.rmtree(folder)


class changed:  # noqa: N801
    """The content of a file, which is written again when the block ends. Only for files that these tests unpacked."""

    def __init__(self, path: Path, legacy: bool = False) -> None:
        self.path = path
        self.legacy = legacy

    def __enter__(self) -> Any:
        self.content = torch.load(self.path, weights_only=False, pickle_module=_Inert)
        return self.content

    def __exit__(self, *error: object) -> None:
        torch.save(self.content, self.path, _use_new_zipfile_serialization=not self.legacy)


class _Stub:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class _Inert:
    """Unpickles what DeepSpeed wrote where it is not installed: its classes become stubs."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith("deepspeed"):
                return int if name == "ZeroStageEnum" else _Stub
            return super().find_class(module, name)

    load = staticmethod(pickle.load)
    loads = staticmethod(pickle.loads)


OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


class TestWhatIsRefused:
    """Everything that would give other weights than those of the training, with the name of the file."""

    def refused(self, path: Path, tmp_path: Path, *kinds: type[CkptError]) -> CkptError:
        for call in (
            lambda: ckpt_cli.merge(path, tmp_path / "out"),
            lambda: ckpt_cli.average([path, path], tmp_path / "out"),
            lambda: ckpt_cli.inspect(path),
        ):
            with pytest.raises(kinds) as caught:
                call()
        assert not (tmp_path / "out").exists()
        return caught.value

    @pytest.mark.parametrize("case", ["z1-bf16-w2", "z2-bf16-w4-frozen", "z3-bf16-w2", "z1-bf16opt-w2"])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_missing_rank(self, case: str, rank: int, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", case)
        path = folder / TAG / OPTIM.format(rank)
        path.unlink()
        error = self.refused(folder / "run", tmp_path, MissingShard)
        assert path.name in everything_said_by(error)

    @pytest.mark.parametrize(
        ("case", "name"),
        [
            ("z3-bf16-w2", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
            ("pipe-z1-bf16-pp2", "mp_rank_01_model_states.pt"),
            ("pipe-z1-bf16-pp2", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
            ("tp2-z1-w2", "mp_rank_01_model_states.pt"),
            ("tp2-z1-w2", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
            ("moe-z2-w2-ep2", "layer_1_expert_2_mp_rank_00_model_states.pt"),
            ("moe-z0-w2-ep2", "layer_1_expert_3_mp_rank_00_model_states.pt"),
            ("z1-bf16-w2", "mp_rank_00_model_states.pt"),
        ],
    )
    def test_a_missing_file_of_another_kind(self, case: str, name: str, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", case)
        (folder / TAG / name).unlink()
        error = self.refused(folder / "run", tmp_path, MissingShard)
        assert name in everything_said_by(error)

    def test_a_layer_of_a_pipeline_that_is_missing(self, copy: Copy, tmp_path: Path) -> None:
        for case in ("pipe-bf16opt-pp2", "pipe-z1-bf16-pp2"):
            folder = copy("deepspeed", case)
            (folder / TAG / "layer_03-model_states.pt").unlink()
            self.refused(folder / "run", tmp_path, MissingShard, Undecidable)

    @pytest.mark.parametrize("case", ["z1-bf16-w2", "z2-bf16-w2-legacy-pickle", "z2-fp32-w2", "z3-bf16-w2"])
    def test_files_of_two_ranks_that_were_swapped(self, case: str, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", case)
        first, second = sorted((folder / TAG).glob("*_optim_states.pt"))
        first.rename(tmp_path / "kept")
        second.rename(first)
        (tmp_path / "kept").rename(second)
        self.refused(folder / "run", tmp_path, Inconsistent)

    def test_swapped_values_are_noticed_without_any_name(self, copy: Copy, tmp_path: Path) -> None:
        """Ranks of equal length, in archives that are called alike: the module has the same weights, rounded."""
        folder = copy("deepspeed", "z1-bf16-w2")
        paths = sorted((folder / TAG).glob("*_optim_states.pt"))
        contents = [torch.load(path, weights_only=False, pickle_module=_Inert) for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            torch.save(content, path)
        error = self.refused(folder / "run", tmp_path, Inconsistent)
        assert error.tensor is not None or "elements" in error.message

    def test_the_optimizer_of_another_save(self, copy: Copy, data: Path, tmp_path: Path) -> None:
        """The sizes fit, the values are those of another training."""
        folder = copy("deepspeed", "z1-bf16-w2")
        for rank in range(2):
            with changed(folder / TAG / OPTIM.format(rank)) as content:
                for vector in content["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                    vector.data.add_(1)
        error = self.refused(folder / "run", tmp_path, Inconsistent)
        assert error.tensor is not None
        assert WEIGHTS_16 in str(error.hint)
        ckpt_cli.merge(folder / "run", tmp_path / "out", type=WEIGHTS_16)

    @pytest.mark.parametrize("count", [1, 3, 1 << 40])
    def test_another_partition_count(self, count: int, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z2-fp32-w2")
        for rank in range(2):
            with changed(folder / TAG / OPTIM.format(rank).removeprefix("bf16_")) as content:
                content["optimizer_state_dict"]["partition_count"] = [count]
        error = self.refused(folder / "run", tmp_path, MissingShard, MixedWorldSizes)
        assert "zero_pp_rank_" in everything_said_by(error)

    @pytest.mark.parametrize("key", ["shape", "order", "missing", "more"])
    def test_shapes_that_do_not_fit(self, key: str, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z1-bf16-w2")
        with changed(folder / TAG / "mp_rank_00_model_states.pt") as content:
            (shapes,) = content["param_shapes"]
            if key == "shape":
                shapes["layers.0.qkv.weight"] = torch.Size([33, 12])
            elif key == "order":
                listed = list(shapes.items())
                content["param_shapes"] = [dict(reversed(listed))]
            elif key == "missing":
                del shapes["layers.0.qkv.weight"]
            else:
                shapes["another"] = torch.Size([1 << 40])
        self.refused(folder / "run", tmp_path, Inconsistent)

    def test_left_over_files_of_more_ranks(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z2-bf16-w2-legacy-pickle")
        shutil.copy(folder / TAG / OPTIM.format(1), folder / TAG / OPTIM.format(2))
        self.refused(folder / "run", tmp_path, MixedWorldSizes, Inconsistent)

    def test_model_states_of_two_stages(self, copy: Copy, data: Path, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z3-bf16-w2")
        shutil.copy(data / "deepspeed" / "z2-bf16-w2-legacy-pickle" / TAG / "mp_rank_00_model_states.pt", folder / TAG)
        error = self.refused(folder / "run", tmp_path, Inconsistent)
        assert "different saves" in error.message

    def test_model_states_of_another_step(self, copy: Copy, data: Path, tmp_path: Path) -> None:
        folder = copy("deepspeed", "hf-trainer-z3-w2")
        name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
        shutil.copy(folder / "run" / "checkpoint-2" / "global_step2" / name, folder / "run" / "checkpoint-4" / "global_step4" / name)
        error = self.refused(folder / "run" / "checkpoint-4", tmp_path, Inconsistent)
        assert "global_steps" in error.message

    def test_a_universal_save_of_shuffled_parameters(self, copy: Copy, tmp_path: Path) -> None:
        """The converter places parameters that were shuffled (round_robin_gradients) wrongly, under right names and shapes."""
        folder = copy("deepspeed", "universal-z1-w3")
        shutil.rmtree(folder / "run" / "global_step3")
        zero = folder / "run" / "global_step3_universal" / "zero"
        first, second = zero / "layers.0.up.weight" / "fp32.pt", zero / "layers.1.up.weight" / "fp32.pt"
        first.rename(tmp_path / "kept")
        second.rename(first)
        (tmp_path / "kept").rename(second)
        self.refused(folder / "run", tmp_path, Inconsistent)

    def test_a_parameter_that_a_universal_save_lacks(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "universal-z3-w2")
        shutil.rmtree(folder / "run" / "global_step3_universal" / "zero" / "layers.0.up.weight")
        error = self.refused(folder / "run", tmp_path, MissingShard)
        assert error.tensor == "layers.0.up.weight"

    def test_tensor_parallel_ranks_without_the_map(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "tp2-z1-w2")
        with changed(folder / TAG / "mp_rank_00_model_states.pt") as content:
            del content["universal_checkpoint_info"]["affine_map"]
        self.refused(folder / "run", tmp_path, Unsupported)

    @pytest.mark.parametrize("case", ["z1-bf16-w2", "z3-bf16-w2", "moe-z2-w2-ep2", "pipe-z1-bf16-pp2"])
    def test_nothing_in_a_file_is_executed(self, case: str, copy: Copy, tmp_path: Path) -> None:
        """DeepSpeed's own tools run what a file asks for. Here it is a value that nobody can represent."""
        folder = copy("deepspeed", case)
        for path in sorted((folder / TAG).glob("*_states.pt")):
            plant(path, tmp_path / "ran")
        with contextlib.suppress(CkptError):
            ckpt_cli.merge(folder / "run", tmp_path / "out")
        with contextlib.suppress(CkptError):
            ckpt_cli.extract_state(folder / "run", tmp_path / "state", optimizer=True)
        assert not (tmp_path / "ran").exists()

    def test_a_damaged_pickle_is_refused_by_name(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z2-bf16-w2-legacy-pickle")
        for path in sorted((folder / TAG).iterdir()):
            content = path.read_bytes()
            for length in (0, 20, len(content) // 2, len(content) - 1):
                os.truncate(path, length)
                with pytest.raises(CorruptFile) as caught:
                    ckpt_cli.inspect(folder / "run")
                assert caught.value.path == str(path)
                path.write_bytes(content)


def plant(path: Path, trace: Path) -> None:
    """Adds an entry to a file that creates ``trace`` if it is unpickled."""

    class Planted:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return os.system, (f"touch {trace}",)

    with zipfile.ZipFile(path) as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = next(name for name in members if name.endswith("/data.pkl"))
    # The last opcodes are SETITEMS (or SETITEM) of the outer dict and STOP: one more key and value are put before these.
    last = members[name][-2:]
    assert last in (b"u.", b"s.")
    body = pickle.dumps(Planted(), protocol=2)[2:-1]
    members[name] = members[name][:-2] + (b"" if last == b"u." else b"s") + b"X\x07\x00\x00\x00planted" + body + last
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, content in members.items():
            archive.writestr(zipfile.ZipInfo(member), content)


class TestPartsOfTheModule:
    """The module alone, without the optimizer, must be whole too."""

    def test_a_missing_layer_of_a_pipeline(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "pipe-z1-bf16-pp2")
        (folder / TAG / "layer_05-model_states.pt").unlink()
        with pytest.raises(MissingShard) as caught:
            ckpt_cli.merge(folder / "run", tmp_path / "out", type=WEIGHTS_16)
        assert "layer_05" in str(caught.value.expected)
        for path in (folder / TAG).glob("*_optim_states.pt"):
            path.unlink()
        with pytest.raises(MissingShard):
            ckpt_cli.merge(folder / "run", tmp_path / "out")

    def test_a_pipeline_without_its_optimizer(self, copy: Copy, tmp_path: Path) -> None:
        for case in ("pipe-z1-bf16-pp2", "pipe-bf16opt-pp2"):
            folder = copy("deepspeed", case)
            for path in (folder / TAG).glob("*_optim_states.pt"):
                path.unlink()
            result = ckpt_cli.merge(folder / "run", tmp_path / case)
            assert "no-masters" in {note.code for note in result.checkpoint.notes}

    def test_a_parameter_that_the_module_lacks(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z2-bf16-w4-frozen")
        with changed(folder / TAG / "mp_rank_00_model_states.pt") as content:
            del content["module"]["layers.0.up.weight"]
        with pytest.raises(MissingShard) as caught:
            ckpt_cli.merge(folder / "run", tmp_path / "out", type=WEIGHTS_16)
        assert caught.value.tensor == "layers.0.up.weight"

    def test_frozen_parameters_that_were_left_out_are_named(self, data: Path) -> None:
        notes = ckpt_cli.detect(data / "deepspeed" / "lora-z3-w2-nofrozen" / "run").checkpoint.notes
        assert ["embed_tokens" in note.text for note in notes if note.code == "frozen-left-out"] == [True]

    def test_parameters_in_another_order_on_one_rank(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z3-bf16-w2")
        with changed(folder / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt") as content:
            content["param_shapes"] = [dict(reversed(list(group.items()))) for group in content["param_shapes"]]
        with pytest.raises(Inconsistent, match="its parameters differ"):
            ckpt_cli.merge(folder / "run", tmp_path / "out")

    def test_the_hint_names_weights_only_where_there_are_any(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z2-fp32-w2")
        with changed(folder / TAG / "mp_rank_00_model_states.pt") as content:
            content["module"]["layers.0.up.weight"].data.add_(1)
        with pytest.raises(Inconsistent) as caught:
            ckpt_cli.merge(folder / "run", tmp_path / "out")
        assert caught.value.hint is None

    def test_nodes_with_model_states_of_two_saves(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z2-bf16-w4-frozen")
        other = tmp_path / "node1" / "global_step3"
        other.mkdir(parents=True)
        (folder / TAG / OPTIM.format(3)).rename(other / OPTIM.format(3))
        name = "mp_rank_00_model_states.pt"
        shutil.copy(folder / TAG / name, other / name)
        ckpt_cli.merge(folder / TAG, tmp_path / "out", also=other)
        with changed(other / name) as content:
            content["module"]["layers.0.up.weight"].data.add_(1)
        with pytest.raises(Inconsistent, match="differs from"):
            ckpt_cli.merge(folder / TAG, tmp_path / "again", also=other)


class TestFolders:
    """Where DeepSpeed's saves lie, and which of them is meant."""

    def test_a_tag_of_any_name_below_the_folder_of_a_step(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z3-bf16-w2")
        (folder / TAG).rename(folder / "run" / "best of all")
        (folder / "run" / "latest").write_text("best of all")
        assert ckpt_cli.merge(folder / "run", tmp_path / "out").checkpoint.components[0].path == str(folder / "run" / "best of all")

    def test_of_several_tags_the_latest_is_taken_and_the_others_are_told(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z3-bf16-w2")
        (folder / TAG).rename(folder / "run" / "b")
        for name in ("a", "c"):
            shutil.copytree(folder / "run" / "b", folder / "run" / name)
        (folder / "run" / "latest").write_text("b")
        checkpoint = ckpt_cli.detect(folder / "run").checkpoint
        assert checkpoint.components[0].path == str(folder / "run" / "b")
        assert any("a/, c/ could be model too" in note.text for note in checkpoint.notes)
        (folder / "run" / "latest").unlink()
        with pytest.raises(Undecidable, match="3 saves"):
            ckpt_cli.merge(folder / "run", tmp_path / "out")
        ckpt_cli.merge(folder / "run" / "c", tmp_path / "out")

    def test_what_the_trainer_gathered_is_a_component_of_its_own(self, copy: Copy, tmp_path: Path) -> None:
        """``model.safetensors`` beside a save of ZeRO holds the weights in the dtype of the training."""
        from safetensors.torch import save_file

        folder = copy("deepspeed", "hf-trainer-z3-w2")
        step = folder / "run" / "checkpoint-4"
        gathered = {
            name: tensor.contiguous() for name, tensor in load(folder / "expected16.safetensors").items() if name != "lm_head.weight"
        }
        save_file(gathered, step / "model.safetensors")
        assert [component.name for component in ckpt_cli.detect(step).checkpoint.components] == ["model", WEIGHTS_16]
        ckpt_cli.merge(step, tmp_path / "fp32")
        ckpt_cli.merge(step, tmp_path / "bf16", type=WEIGHTS_16)
        assert load(tmp_path / "fp32")["model.norm.weight"].dtype == torch.float32
        assert differences(load(tmp_path / "bf16"), gathered) == []

    def test_what_was_merged_into_the_folder_is_none_of_the_trainers(self, copy: Copy, tmp_path: Path) -> None:
        step = copy("deepspeed", "hf-trainer-z3-w2") / "run" / "checkpoint-4"
        ckpt_cli.merge(step, in_place=True)
        assert [component.name for component in ckpt_cli.detect(step).checkpoint.components] == ["model"]

    def test_a_save_of_several_nodes(self, copy: Copy, tmp_path: Path) -> None:
        """Without a shared disk every node keeps the optimizer states of its own ranks."""
        folder = copy("deepspeed", "z2-bf16-w4-frozen")
        nodes = [tmp_path / "node0" / "global_step3", tmp_path / "node1" / "global_step3"]
        for index, node in enumerate(nodes):
            node.mkdir(parents=True)
            for rank in (2 * index, 2 * index + 1):
                shutil.copy(folder / TAG / OPTIM.format(rank), node)
        shutil.copy(folder / TAG / "mp_rank_00_model_states.pt", nodes[0])
        with pytest.raises(MissingShard):
            ckpt_cli.merge(nodes[0], tmp_path / "out")
        ckpt_cli.merge(nodes[0], tmp_path / "out", also=nodes[1])
        found = load(tmp_path / "out")
        assert differences(found, expected(folder, found)) == []

    def test_one_file_stands_for_its_save(self, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed" / "z3-bf16-w2"
        ckpt_cli.merge(folder / TAG / OPTIM.format(1), tmp_path / "out")
        found = load(tmp_path / "out")
        assert differences(found, expected(folder, found)) == []

    @pytest.mark.parametrize("case", [*CASES, "lora-z3-w2-nofrozen"])
    def test_detect_and_inspect_say_what_it_is(self, case: str, data: Path) -> None:
        said = ckpt("inspect", data / "deepspeed" / case / path_of(case), "-v")
        assert said.code == 0
        detected = ckpt_cli.detect(data / "deepspeed" / case / path_of(case))
        assert "DeepSpeed" in detected.checkpoint.framework
        (kind,) = [note.text for note in detected.checkpoint.notes if note.code == "deepspeed"]
        stage = {"z1-bf16opt": "BF16_Optimizer", "z0": "stage 0", "z1": "ZeRO-1", "z2": "ZeRO-2", "z3": "ZeRO-3"}
        wanted = next((text for mark, text in stage.items() if f"{mark}-" in f"{case}-"), "")
        assert kind.startswith("universal" if case.startswith("universal") else wanted)


class TestNames:
    def test_whole_names_tell_layers_from_experts(self) -> None:
        paths = [
            Path(name) for name in ("layer_01-model_states.pt", "layer_0_expert_1_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")
        ]
        names = save_files(paths)
        assert list(names.layers) == [1]
        assert list(names.experts) == [(0, 1)]
        assert list(names.model) == [0]
        assert names.trouble is None

    @pytest.mark.parametrize(
        "name", ["zero_pp_rank_0_mp_rank_00_optim_states.pt.tmp", "model_states.pt", "xmp_rank_00_model_states.pt", "mp_rank_00", "latest"]
    )
    def test_other_names_are_none(self, name: str) -> None:
        assert not is_deepspeed_name(name)

    def test_numbers_in_names_are_bounded(self, tmp_path: Path) -> None:
        for name in ("mp_rank_9999999_model_states.pt", "bf16_zero_pp_rank_9999999_mp_rank_00_optim_states.pt"):
            (tmp_path / name).write_bytes(b"")
        (match,) = DeepSpeed().recognise(tmp_path, Folders())
        assert isinstance(match.trouble, MixedWorldSizes)
        with Files() as files:
            assert DeepSpeed().groups(match, files) == ["model"]


def test_merging_reads_every_file_of_a_save_once(data: Path, tmp_path: Path) -> None:
    """Headers and pickles of large saves take seconds."""
    opened: dict[str, int] = {}

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and "zero_pp_rank" in arguments[0]:
            opened[arguments[0]] = opened.get(arguments[0], 0) + 1

    sys.addaudithook(watch)
    ckpt_cli.merge(data / "deepspeed" / "z3-bf16-w2" / "run", tmp_path / "out")
    assert opened
    assert max(opened.values()) == 1
