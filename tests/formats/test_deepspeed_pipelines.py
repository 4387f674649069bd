"""DeepSpeed saves of pipelines whose layers are used more than once, and universal saves of pipelines and of tensor parallelism."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, MissingShard, MixedWorldSizes, PartOfSet, Undecidable, Unsupported
from ckpt_cli.formats.base import WEIGHTS_16
from tests.conftest import Copy
from tests.formats.test_deepspeed import changed
from tests.tensors import differences, load

PIPELINES = "deepspeed-pipelines"
TAG = Path("run", "global_step3")
UNIVERSAL = "global_step3_universal"
TIED = "tied_modules.mix.weight"


class TestLayersUsedTwice:
    """``mix`` is layer 1 and layer 5, on two stages: each has a file, with the same values."""

    @pytest.mark.parametrize("case", ["tied-twice-z1", "tied-twice-bf16opt"])
    def test_equal_layers_are_the_shared_parameter(self, case: str, data: Path, tmp_path: Path) -> None:
        folder = data / PIPELINES / case
        ckpt_cli.merge(folder / "run", tmp_path / "fp32", verify=True)
        wanted = load(folder / "expected.safetensors")
        assert differences(load(tmp_path / "fp32"), wanted) == []
        ckpt_cli.merge(folder / "run", tmp_path / "bf16", type=WEIGHTS_16)
        narrow = load(tmp_path / "bf16")
        assert narrow.keys() == wanted.keys()
        assert torch.equal(narrow[TIED], wanted[TIED].bfloat16())

    def test_layers_that_differ_are_not_taken_for_one(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy(PIPELINES, "tied-twice-z1")
        for path in (folder / TAG).glob("*optim_states.pt"):
            path.unlink()
        with changed(folder / TAG / "layer_05-model_states.pt") as content:
            content["weight"] = content["weight"] + 1
        with pytest.raises(Undecidable, match="layers hold a tensor like it"):
            ckpt_cli.merge(folder / "run", tmp_path / "out")

    def test_a_copy_with_other_values_than_the_optimizer_is_told(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy(PIPELINES, "tied-twice-z1")
        with changed(folder / TAG / "layer_05-model_states.pt") as content:
            content["weight"] = content["weight"] + 1
        result = ckpt_cli.merge(folder / "run", tmp_path / "out")
        (note,) = (note for note in result.checkpoint.notes if note.code == "unlisted")
        assert note.level == "warning"
        assert note.text.startswith("5.weight: ")

    def test_a_shared_layer_that_has_no_file_is_in_the_partitions(self, copy: Copy, tmp_path: Path) -> None:
        """No file is written where every use is a function with the layer's weights."""
        folder = copy(PIPELINES, "tied-twice-z1")
        for number in (1, 5):
            (folder / TAG / f"layer_{number:02d}-model_states.pt").unlink()
        ckpt_cli.merge(folder / "run", tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(folder / "expected.safetensors")) == []
        with pytest.raises(MissingShard) as caught:
            ckpt_cli.merge(folder / "run", tmp_path / "bf16", type=WEIGHTS_16)
        assert caught.value.tensor == TIED

    def test_that_frozen_ones_may_be_shared_is_a_warning(self, data: Path, tmp_path: Path) -> None:
        """No file says the key of a shared layer that is frozen."""
        folder = data / PIPELINES / "tied-twice-frozen"
        result = ckpt_cli.merge(folder / "run", tmp_path / "out")
        (note,) = (note for note in result.checkpoint.notes if note.code == "unlisted")
        assert note.level == "warning"
        assert note.text.startswith("1.weight, 5.weight: ")
        found, wanted = load(tmp_path / "out"), load(folder / "expected.safetensors")
        assert torch.equal(found["1.weight"], wanted[TIED])
        assert torch.equal(found["5.weight"], wanted[TIED])


class TestUniversal:
    """``zero/`` has whole parameters, the model states those of their ranks."""

    def test_tensor_parallelism(self, data: Path, tmp_path: Path) -> None:
        source, original = data / PIPELINES / "universal-tp2-z1-w2" / UNIVERSAL, data / "deepspeed" / "tp2-z1-w2"
        for kind, name in (("model", "expected.safetensors"), (WEIGHTS_16, "expected16.safetensors")):
            ckpt_cli.merge(source, tmp_path / kind, type=kind, verify=True)
            assert differences(load(tmp_path / kind), load(original / name)) == []

    def test_a_pipeline_lacks_the_buffers_of_its_layers_until_their_files_are_there(self, copy: Copy, data: Path, tmp_path: Path) -> None:
        source = copy(PIPELINES, "universal-pipe-z1-bf16-pp2") / UNIVERSAL
        original = data / "deepspeed" / "pipe-z1-bf16-pp2"
        with pytest.raises(MissingShard, match="a universal save of a pipeline") as caught:
            ckpt_cli.merge(source, tmp_path / "out")
        assert (caught.value.tensor or "").endswith(".seen")
        for path in (original / TAG).glob("layer_*"):
            shutil.copy(path, source)
        ckpt_cli.merge(source, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(original / "expected.safetensors")) == []

    def test_a_pipeline_without_buffers(self, copy: Copy, data: Path, tmp_path: Path) -> None:
        source = copy(PIPELINES, "universal-pipe-z1-bf16-pp2") / UNIVERSAL
        original = data / "deepspeed" / "pipe-z1-bf16-pp2"
        for path in source.glob("mp_rank_*"):
            with changed(path) as content:
                content["buffer_names"] = []
        result = ckpt_cli.merge(source, tmp_path / "out")
        (text,) = (note.text for note in result.checkpoint.notes if note.code == "frozen-left-out")
        assert "universal save of a pipeline" in text
        wanted = {name: tensor for name, tensor in load(original / "expected.safetensors").items() if not name.endswith(".seen")}
        assert differences(load(tmp_path / "out"), wanted) == []
        ckpt_cli.extract_state(source, tmp_path / "state", optimizer=True)
        moments = load(tmp_path / "state" / "optimizer.safetensors")
        assert {f"state.{name}.exp_avg" for name in wanted} <= moments.keys()

    def test_a_parameter_of_a_pipeline_that_is_missing(self, copy: Copy, tmp_path: Path) -> None:
        source = copy(PIPELINES, "universal-pipe-z1-bf16-pp2") / UNIVERSAL
        shutil.rmtree(source / "zero" / "4.up.weight")
        with pytest.raises(MissingShard) as caught:
            ckpt_cli.merge(source, tmp_path / "out")
        assert caught.value.tensor == "4.up.weight"

    def test_a_pipeline_whose_parameters_are_not_listed(self, copy: Copy, tmp_path: Path) -> None:
        source = copy(PIPELINES, "universal-pipe-z1-bf16-pp2") / UNIVERSAL
        for path in source.glob("mp_rank_*"):
            with changed(path) as content:
                content |= {"buffer_names": [], "param_shapes": None}
        with pytest.raises(Undecidable, match="nothing tells which parameters"):
            ckpt_cli.merge(source, tmp_path / "out")


class TestLayersCutByTensorParallelism:
    """Megatron-DeepSpeed writes a file per layer and rank. They were taken for files of two saves, of which one should be moved away."""

    @pytest.mark.parametrize("states", [True, False], ids=["with model states", "alone"])
    def test_are_refused_as_what_they_are(self, tmp_path: Path, states: bool) -> None:
        tag = tmp_path / "run" / "global_step10"
        tag.mkdir(parents=True)
        for rank in range(2):
            for layer in (1, 3):
                torch.save({"up.weight": torch.ones(4, 2)}, tag / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
            if states:
                torch.save({"module": None, "mp_world_size": 2}, tag / f"mp_rank_{rank:02d}_model_states.pt")
        with pytest.raises(Unsupported, match="cut by tensor parallelism") as refused:
            ckpt_cli.merge(tag, tmp_path / "out")
        assert "deepspeed_to_megatron.py with target_tp 1" in str(refused.value.hint)
        for path in tag.glob("*-model_01-*"):
            path.unlink()  # the first rank's part alone
        with pytest.raises(CkptError):
            ckpt_cli.merge(tag, tmp_path / "out")


class TestModelParallelFilesThatSayNothing:
    """SwissArmyTransformer writes a file per model parallel rank under DeepSpeed's names, and nothing of DeepSpeed's into it."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        (tmp_path / "run" / "1000").mkdir(parents=True)
        (tmp_path / "run" / "latest").write_text("1000")
        for rank in range(2):
            torch.save({"module": {"up.weight": torch.full((4, 2), rank)}}, tmp_path / "run" / "1000" / f"mp_rank_0{rank}_model_states.pt")
        return tmp_path / "run"

    @pytest.mark.parametrize("path", ["", "1000", "1000/mp_rank_00_model_states.pt"])
    def test_are_refused_as_parts(self, path: str, run: Path, tmp_path: Path) -> None:
        """They were taken for files of two saves, of which one should be moved away."""
        with pytest.raises(PartOfSet, match="2 model parallel ranks, of which none says how the weights are cut") as refused:
            ckpt_cli.merge(run / path, tmp_path / "out")
        assert "move it to a folder of its own" in str(refused.value.hint)

    def test_are_read_alone(self, run: Path, tmp_path: Path) -> None:
        (run / "1000" / "mp_rank_01_model_states.pt").unlink()
        ckpt_cli.merge(run, tmp_path / "out")

    def test_of_which_the_first_is_by_one_rank_are_of_two_saves(self, run: Path, tmp_path: Path) -> None:
        torch.save({"module": {"up.weight": torch.ones(4, 2)}, "mp_world_size": 1}, run / "1000" / "mp_rank_00_model_states.pt")
        with pytest.raises(MixedWorldSizes):
            ckpt_cli.merge(run, tmp_path / "out")
