"""A part is never taken for the whole: names, siblings and content of files that are one of a set."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, IncompleteError, MissingShard, PartOfSet, Undecidable, Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.sets.names import part_error, part_name, part_of, unlisted_parts
from tests.cli import ckpt_fork as ckpt
from tests.tensors import load

WEIGHTS = {"model.layers.0.weight": torch.arange(12.0).reshape(3, 4), "model.norm.weight": torch.ones(4)}
STEP = torch.tensor(3)


def put(path: Path, content: Any = None) -> Path:
    """A file of weights, well-formed in itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = dict(WEIGHTS) if content is None else content
    if ".safetensors" in path.name:
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


def refused_everywhere(path: Path, tmp_path: Path, code: int, *words: str) -> None:
    """Every command that speaks of weights says no, with this exit code, and writes nothing."""
    out = tmp_path / "out"
    calls: dict[str, Callable[[], Any]] = {
        "merge": lambda: ckpt_cli.merge(path, out),
        "average": lambda: ckpt_cli.average([path, path], out),
        "inspect": lambda: ckpt_cli.inspect(path),
    }
    for name, call in calls.items():
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.exit_code == code, name
        said = f"{caught.value.message} {caught.value.expected} {caught.value.advice}"
        assert all(word in said for word in words), said
    detected = ckpt_cli.detect(path)
    assert detected.exit_code == code
    assert detected.problem
    assert not out.exists()
    assert verified(path) in (1, code)


def verified(path: Path) -> int:
    try:
        return ckpt_cli.verify(path).exit_code
    except CkptError as error:
        return error.exit_code


PARTS = [
    "checkpoint_last-shard0.pt",
    "reshard-model_part-0-shard0.pt",
    "model-rank-0-of-4.pth",
    "weights_tp-rank-0-of-2.pt",
    "weights_tp_rank_world_size=0_2_pp_rank_world_size=0_1.pth",
    "weights_tp_rank_world_size=0_1_pp_rank_world_size=1_2.pth",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "expp_rank_0_mp_rank_00_optim_states.pt",
    "layer_0_expert_1_mp_rank_00_model_states.pt",
    "layer_01-model_states.pt",
    "mp_rank_01_model_states.pt",
    "consolidated.01.pth",
    "model-00002-of-00002.safetensors",
    "ft-model-00001-of-00002.safetensors",
    "model.fp16-00001-of-00002.safetensors",
    "pytorch_model-00001-of-00003.bin",
    "model_00002-of-00004.pt",
    "pytorch_model-00002.bin",
    "rank0.pt",
    "rank_0.safetensors",
    "checkpoint_rank_3.pt",
    "fsdp_shard_0_of_8.pt",
    "model.part1.safetensors",
    "model_tp0.pt",
    "model-rank-0-part-0.safetensors",
    "model0-mp8.safetensors",
    "epoch3_rank0.pth.tar",
    "shard-00001-model-00001-of-00002.safetensors",
    "model_rank0.pt",
    "pytorch_model_fsdp_rank0.bin",
    "sdp_00.pt",
    "model_wp0.pt",
    "non-tp.pt",
]


class TestNames:
    @pytest.mark.parametrize("name", PARTS)
    def test_a_part_given_as_a_file_is_refused(self, name: str, tmp_path: Path) -> None:
        refused_everywhere(put(tmp_path / "folder" / name), tmp_path, 4)

    @pytest.mark.parametrize("name", PARTS)
    def test_a_part_alone_in_a_folder_is_refused(self, name: str, tmp_path: Path) -> None:
        refused_everywhere(put(tmp_path / "folder" / name).parent, tmp_path, 4)

    @pytest.mark.parametrize(
        "folder",
        ["mp_rank_01", "mp_rank_00_001", "tp_rank_00_pp_rank_000", "zero/model.norm.weight", "pp_00/tp_00"],
    )
    def test_the_folder_of_one_rank_is_a_part(self, folder: str, tmp_path: Path) -> None:
        path = put(tmp_path / folder / ("fp32.pt" if folder.startswith("zero") else "model_weights.ckpt"))
        refused_everywhere(path, tmp_path, 4)

    @pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
    def test_folders_of_ranks_beside_each_other(self, name: str, tmp_path: Path) -> None:
        first = put(tmp_path / "rank0" / name)
        assert part_of(first, Folders()) is None
        put(tmp_path / "rank1" / name)
        refused_everywhere(first, tmp_path, 4, "rank0", "rank1")
        refused_everywhere(first.parent, tmp_path, 4)

    @pytest.mark.parametrize(
        "name",
        [
            "model-00001-of-00001.safetensors",
            "model.safetensors-00001-of-00001.safetensors",
            "pytorch_model-00001-of-00001.bin",
            "model_world_size_1_rank_0.pt",
            "weights_tp_rank_world_size=0_1_pp_rank_world_size=0_1.pth",
            "model.pt",
            "lora_rank32.safetensors",
            "adapter_rank_8.pt",
            "epoch_3.pt",
            "model_1000.pt",
            "step-00002000.safetensors",
            "model_stage2.pt",
            "best_of_5.pt",
            "top2of10_mean.pt",
            "ranker-v2.pt",
            "sharded8x.safetensors",
            "consolidated.00.pth",
            "epoch_3_of_10.pt",
            "epoch3of10.pt",
            "model-epoch-3-of-10.safetensors",
            "step-100-of-500.safetensors",
            "global_step_1_of_2.bin",
            "fold_1_of_5.pth",
            "seed-2-of-3.pt",
            "best-1-of-3.pt",
            "ckpt.2.of.4.pt",
            "model-rank16.pt",
            "svd_rank_64.pt",
            "layers12.pt",
            "model.00.pt",
            "epoch_00.pt",
            "model.1.pt",
        ],
    )
    def test_whole_files_stay_readable(self, name: str, tmp_path: Path) -> None:
        path = put(tmp_path / "folder" / name)
        ckpt_cli.merge(path, tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()
        assert ckpt_cli.detect(path).exit_code == 0
        assert ckpt_cli.verify(path).exit_code == 0

    @pytest.mark.parametrize(
        "name",
        [
            "model-00001-of-00001.safetensors",
            "pytorch_model-00001-of-00001.bin",
            "step-100-of-500.safetensors",
            "seed-2-of-3.safetensors",
        ],
    )
    def test_whole_files_alone_in_a_folder(self, name: str, tmp_path: Path) -> None:
        ckpt_cli.merge(put(tmp_path / "folder" / name).parent, tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()

    def test_part_0_of_a_set_whose_names_do_not_say_it(self, tmp_path: Path) -> None:
        first = put(tmp_path / "consolidated.00.pth")
        put(tmp_path / "consolidated.01.pth")
        refused_everywhere(first, tmp_path, 4, "consolidated.01.pth")

    @pytest.mark.parametrize(
        "names", [("svd_rank_64.pt", "svd_rank_128.pt"), ("layers12.pt", "layers24.pt"), ("fold_1_of_5.pth", "fold_2_of_5.pth")]
    )
    def test_models_that_differ_in_a_number_are_whole(self, names: tuple[str, ...], tmp_path: Path) -> None:
        for name in names:
            put(tmp_path / "folder" / name)
        for name in names:
            ckpt_cli.merge(tmp_path / "folder" / name, tmp_path / f"{name}.out")
            assert load(tmp_path / f"{name}.out").keys() == WEIGHTS.keys()
        if "rank" in names[0]:
            for rank in (64, 128):
                put(tmp_path / f"rank{rank}" / "model.pt")
            assert part_error(tmp_path / "rank64" / "model.pt", Folders()) is None

    @pytest.mark.parametrize(
        "names", [("rank_12.pt", "rank_13.pt"), ("rank16.pt", "rank0.pt"), ("layers.12.pt", "layers.11.pt"), ("host9.bin", "host10.bin")]
    )
    def test_a_neighbour_makes_it_a_set(self, names: tuple[str, ...], tmp_path: Path) -> None:
        for name in names:
            put(tmp_path / "folder" / name)
        refused_everywhere(tmp_path / "folder" / names[0], tmp_path, 4)

    @pytest.mark.parametrize(
        ("name", "missing"),
        [
            ("checkpoint-00001-of-00002.safetensors", "checkpoint-00002-of-00002.safetensors"),
            ("best-00002-of-00002.bin", "best-00001-of-00002.bin"),
            ("epoch_3_of_10-1-of-2.pt", "epoch_3_of_10-2-of-2.pt"),
            ("epoch_3_of_10_rank0.pt", "rank 0"),
            ("shard12.pt", "shard 12"),
            ("rank_016.pt", "rank 16"),
            ("model_tp_rank_16.pt", "rank 16"),
            ("model-fsdp-rank16.bin", "rank 16"),
        ],
    )
    def test_counters_hide_no_parts(self, name: str, missing: str, tmp_path: Path) -> None:
        refused_everywhere(put(tmp_path / "folder" / name), tmp_path, 4, missing)

    def test_what_the_name_of_a_part_says(self) -> None:
        assert part_name("model-00002-of-00003.safetensors") == ("model", 2, 3, ".safetensors")
        assert part_name("pytorch_model-00001-of-00001.bin") == ("pytorch_model", 1, 1, ".bin")
        assert part_name("model.fp16-1-of-2.safetensors") == ("model.fp16", 1, 2, ".safetensors")
        for name in ("model.safetensors", "model-1-of-2.pt", "step-100-of-500.safetensors", f"model-1-of-{'9' * 200}.bin", "-1-of-2.bin"):
            assert part_name(name) is None

    def test_numbers_without_end_are_no_sets(self, tmp_path: Path) -> None:
        for name in (f"rank{'9' * 300}.pt", f"model-1-of-{'9' * 200}.safetensors", "shard2147483647.pt", "rank999999999999.pt"):
            path = put(tmp_path / name[-250:])
            error = part_error(path, Folders())
            assert error is None or len(str(error.expected)) < 5000


class TestSiblings:
    """What stands beside a file, behind a link, or in an index."""

    @pytest.mark.parametrize("name", ["gpu{}.pt", "model_worker{}.bin", "chunk-{}.safetensors", "layers.{}.pt"])
    def test_weak_marks_count_with_a_sibling(self, name: str, tmp_path: Path) -> None:
        first = put(tmp_path / "folder" / name.format(0))
        assert part_of(first, Folders()) is None
        put(tmp_path / "folder" / name.format(1))
        refused_everywhere(first, tmp_path, 4, name.format(1))

    @pytest.mark.parametrize("name", ["rank0.pt", "model-00001-of-00002.safetensors", "x-shard3.bin"])
    def test_a_link_to_a_part_is_one(self, name: str, tmp_path: Path) -> None:
        part = put(tmp_path / "parts" / name)
        link = tmp_path / "folder" / f"model{part.suffix}"
        link.parent.mkdir()
        link.symlink_to(part)
        refused_everywhere(link, tmp_path, 4, name)

    @pytest.mark.parametrize("name", ["model-0000{}-of-00003.safetensors", "pytorch_model-0000{}-of-00003.bin"])
    def test_an_index_that_lists_some_parts(self, name: str, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        mapping = {}
        for number, (tensor, value) in enumerate(WEIGHTS.items(), 1):
            put(folder / name.format(number), {tensor: value})
            mapping[tensor] = name.format(number)
        index = "model.safetensors.index.json" if "safetensors" in name else "pytorch_model.bin.index.json"
        (folder / index).write_text(json.dumps({"weight_map": mapping}))
        refused_everywhere(folder, tmp_path, 4, name.format(3))
        assert unlisted_parts(["x-0-of-2.pt", "x-1-of-2.pt", "x-1-of-1.pt", "y.pt", "z_2_of_10.pt"]) == ["z_1_of_10.pt"]

    def test_a_shard_of_dcp_under_another_name(self, tmp_path: Path) -> None:
        for name in ("model.safetensors", "weights.safetensors"):
            path = tmp_path / name.split(".")[0] / name
            path.parent.mkdir()
            offsets = {"model.norm.weight": {"saved_offsets": [4]}}
            save_file(WEIGHTS, path, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
            refused_everywhere(path, tmp_path, 4, "DCP_SHARDING_INFO")
            assert [found.code for found in ckpt_cli.verify(path).findings if found.severity == "error"] == ["part-of-set"]

    @pytest.mark.parametrize(
        "name", ["model_weight_pp-rank-0-of-1_tp-rank-0-of-2", "model_weight_pp-rank-0-of-1_tp-rank-0-of-1", "model_weight"]
    )
    def test_the_file_of_one_parameter(self, name: str, tmp_path: Path) -> None:
        path = put(tmp_path / "o_proj" / f"{name}.safetensors", {"data": torch.ones(4)})
        refused_everywhere(path, tmp_path, 4, "Nanotron")
        refused_everywhere(path.parent, tmp_path, 4, "Nanotron")

    def test_the_files_of_ranks_have_no_index(self, tmp_path: Path) -> None:
        for suffix in ("safetensors", "bin"):
            for rank in range(2):
                put(tmp_path / suffix / f"x_tp-rank-{rank}-of-2.{suffix}")
            with pytest.raises(PartOfSet) as caught:
                ckpt_cli.merge(tmp_path / suffix)
            assert "index" not in str(caught.value.hint)

    def test_the_ranks_of_adapters_beside_each_other(self, tmp_path: Path) -> None:
        for rank in (8, 16):
            put(tmp_path / f"rank{rank}" / "adapter_model.safetensors")
            put(tmp_path / f"lora_rank{rank}.safetensors")
        assert part_error(tmp_path / "rank8" / "adapter_model.safetensors", Folders()) is None
        assert part_error(tmp_path / "lora_rank16.safetensors", Folders()) is None

    def test_a_run_takes_an_older_whole_step(self, tmp_path: Path) -> None:
        for name in ("rank0.pt", "ft-model-00001-of-00002.safetensors"):
            run = tmp_path / name.split("-")[0]
            put(run / "checkpoint-100" / name)
            put(run / "checkpoint-50" / "model.safetensors")
            result = ckpt_cli.detect(run)
            assert result.checkpoint.step == 50
            assert any(note.code == "step-skipped" and name in note.text for note in result.checkpoint.notes)
            assert [step.problem is None for step in result.checkpoint.steps] == [True, False]


class TestRanks:
    """Files of ranks that readers know, with plain tensors: nothing in them says what other ranks held."""

    @pytest.mark.parametrize("world", [2, 4])
    def test_missing_ranks_of_plain_tensors(self, world: int, tmp_path: Path) -> None:
        path = put(tmp_path / "folder" / f"model_world_size_{world}_rank_0.pt")
        refused_everywhere(path, tmp_path, 4, "rank_1.pt")
        refused_everywhere(path.parent, tmp_path, 4, "rank_1.pt")

    @pytest.mark.parametrize("name", ["model_rank{}.pt", "pytorch_model_fsdp_rank{}.bin"])
    def test_ranks_without_number_and_meshes(self, name: str, tmp_path: Path) -> None:
        for rank in range(2):
            path = put(tmp_path / "folder" / name.format(rank))
        refused_everywhere(path.parent, tmp_path, 4, "how many ranks")

    def test_a_part_is_not_passed_over_for_another_component(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / "global_step_5"
        put(step / "actor" / "rank0.pt")
        put(step / "critic" / "model.safetensors")
        with pytest.raises(PartOfSet):
            ckpt_cli.merge(step, tmp_path / "out")
        put(tmp_path / "bagel" / "model_sharded" / "x-shard0.pt")
        put(tmp_path / "bagel" / "ema.safetensors")
        with pytest.raises(PartOfSet):
            ckpt_cli.merge(tmp_path / "bagel", tmp_path / "out")
        ckpt_cli.merge(step, tmp_path / "out", type="critic")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()


class TestHints:
    def test_the_index_that_lists_the_part_is_named(self, tmp_path: Path) -> None:
        one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
        folder = put(tmp_path / "folder" / one, {"a": torch.ones(2)}).parent
        put(folder / two, {"b": torch.ones(2)})
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": one, "b": two}}))
        error = part_error(folder / one, Folders())
        assert error is not None
        assert error.hint == f"pass {index}"
        ckpt_cli.merge(index, tmp_path / "out")
        assert load(tmp_path / "out").keys() == {"a", "b"}
        (folder / two).unlink()
        error = part_error(folder / one, Folders())
        assert error is not None
        assert error.hint is not None
        assert two in error.hint

    def test_files_of_any_name_that_an_index_lists_are_parts(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        put(folder / "first.safetensors", {"a": torch.ones(2)})
        put(folder / "second.safetensors", {"b": torch.ones(2)})
        (folder / "any.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}})
        )
        with pytest.raises(PartOfSet, match=r"any\.safetensors\.index\.json lists"):
            ckpt_cli.merge(folder / "first.safetensors", tmp_path / "out")
        ckpt_cli.merge(folder, tmp_path / "out")
        assert load(tmp_path / "out").keys() == {"a", "b"}

    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        error = part_error(put(tmp_path / "x-rank-2-of-4.pth"), Folders())
        assert error is not None
        assert error.expected == "the whole set; not here: x-rank-0-of-4.pth, x-rank-1-of-4.pth, x-rank-3-of-4.pth"

    RENAMING = "if it is a whole model, rename it without the number"

    @pytest.mark.parametrize("name", ["rank0.pt", "rank3.pt", "model.part1.safetensors", "x_1of3.pt", "variant-2-of-3.safetensors"])
    def test_renaming_is_advised_for_a_file_without_siblings(self, name: str, tmp_path: Path) -> None:
        path = put(tmp_path / name)
        error = part_error(path, Folders())
        assert error is not None
        assert str(error.hint).endswith(self.RENAMING)
        ckpt_cli.merge(path.rename(path.with_name(f"model{path.suffix}")), tmp_path / "out")

    def test_renaming_is_not_advised_for_what_is_certainly_a_part(self, tmp_path: Path) -> None:
        put(tmp_path / "ranks" / "rank4.pt")
        for name in ("ranks/rank3.pt", "a/model-00002-of-00003.safetensors", "b/model0-mp8.safetensors", "mp_rank_01/model.pt"):
            error = part_error(put(tmp_path / name), Folders())
            assert error is not None
            assert "rename" not in str(error.hint), name

    @pytest.mark.parametrize("copy", ["-HOST-1", " (1)", ".sync-conflict-20260101-120000-ABCDEFG", " (host's conflicted copy)"])
    def test_a_copy_of_one_beside_the_whole_is_a_warning(self, tmp_path: Path, copy: str) -> None:
        """`merge` warned of it, and `verify` failed the folder."""
        names = [f"model-{number:05}-of-00002" for number in (1, 2)]
        for name, key in zip(names, WEIGHTS, strict=True):
            put(tmp_path / "m" / f"{name}.safetensors", {key: WEIGHTS[key]})
        listed = {key: f"{name}.safetensors" for name, key in zip(names, WEIGHTS, strict=True)}
        (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
        put(tmp_path / "m" / f"{names[0]}{copy}.safetensors", {key: WEIGHTS[key] + 1 for key in list(WEIGHTS)[:1]})
        result = ckpt_cli.verify(tmp_path / "m")
        assert result.ok
        assert "other-model" in {item.code for item in result.findings}
        assert len(load(Path(ckpt_cli.merge(tmp_path / "m", tmp_path / "out").outputs[0].output))) == len(WEIGHTS)
        (tmp_path / "m" / f"{names[1]}.safetensors").unlink()
        assert not ckpt_cli.verify(tmp_path / "m").ok

    def test_the_command_line_says_it(self, tmp_path: Path) -> None:
        done = ckpt("merge", put(tmp_path / "rank0.pt"), "-o", tmp_path / "out")
        assert done.code == 4
        assert "error[part-of-set]: rank0.pt is one file of a set" in done.err


def megatron_args(**sizes: int) -> argparse.Namespace:
    return argparse.Namespace(**{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, **sizes})


def deepspeed(module: Any, **more: Any) -> dict[str, Any]:
    shapes = {name: tensor.shape for name, tensor in WEIGHTS.items()}
    return {"module": module, "ds_version": "0.19.8", "mp_world_size": 1, "param_shapes": [shapes], **more}


class TestContent:
    """The name of these files says nothing: each was renamed to model.pt."""

    @pytest.mark.parametrize(
        "content",
        [
            {"args": megatron_args(tensor_model_parallel_size=2), "checkpoint_version": 3.0, "model": dict(WEIGHTS)},
            {"args": megatron_args(pipeline_model_parallel_size=4), "model": dict(WEIGHTS)},
            {"args": megatron_args(expert_model_parallel_size=2), "model0": dict(WEIGHTS)},
            deepspeed({name: torch.empty(0) for name in WEIGHTS}),
            deepspeed(dict(WEIGHTS), mp_world_size=2),
            deepspeed(dict(WEIGHTS), checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 2}),
            deepspeed(dict(WEIGHTS), num_experts=[4]),
            deepspeed(None),
            deepspeed({"model.norm.weight": torch.ones(4)}),
            {"optimizer_state_dict": {"fp32": torch.ones(4)}, "ds_config": {}, "ds_version": "0.19.8"},
            {"model": dict(WEIGHTS), "shard_metadata": {"param_metadata": [{"fsdp_path": ""}]}},
        ],
        ids=["tp", "pp", "ep", "zero3", "mp", "degrees", "moe", "pipeline", "absent", "optimizer", "fairscale"],
    )
    def test_what_a_file_says_of_its_set(self, content: Any, tmp_path: Path) -> None:
        path = put(tmp_path / "folder" / "model.pt", content)
        refused_everywhere(path, tmp_path, 4)
        refused_everywhere(path.parent, tmp_path, 4)
        shutil.copy(path, tmp_path / "folder" / "model_world_size_1_rank_0.pt")
        with pytest.raises(IncompleteError):
            ckpt_cli.merge(tmp_path / "folder" / "model_world_size_1_rank_0.pt", tmp_path / "out")

    def test_shards_of_torch_xla_are_called_so(self, tmp_path: Path) -> None:
        content = {"model": dict(WEIGHTS), "shard_metadata": {"shard_info": {}, "flatten_info": {}, "world_size": 4, "rank": 0}}
        with pytest.raises(PartOfSet, match="torch_xla's FSDP") as caught:
            ckpt_cli.merge(put(tmp_path / "rank0-of-4-pytorch_model.bin", content), tmp_path / "out")
        assert "torch_xla.distributed.fsdp.consolidate_sharded_ckpts" in str(caught.value.hint)

    @pytest.mark.parametrize("is_there", [True, False])
    def test_tensors_in_files_of_their_own_are_no_damage(self, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What torch_xla's xser leaves of a state dict: references by number."""
        module = types.ModuleType("torch_xla")
        reference = type("TensorReference", (), {"__module__": module.__name__})
        module.TensorReference = reference  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        path = put(tmp_path / "model.pt", {name: reference() for name in WEIGHTS})
        if is_there:
            put(tmp_path / "model.pt.tensors" / "tensor_0.pt", torch.ones(4))
        with pytest.raises(Unsupported, match=r"in model\.pt\.tensors/") as caught:
            ckpt_cli.merge(path, tmp_path / "out")
        assert ("which is not here" in caught.value.message) is not is_there

    def test_ranks_of_several_kinds_are_renamed_only_if_alone(self, tmp_path: Path) -> None:
        """neuronx-distributed numbers three kinds of ranks in one name."""
        path = put(tmp_path / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", dict(WEIGHTS))
        with pytest.raises(PartOfSet) as caught:
            ckpt_cli.merge(path, tmp_path / "out")
        assert str(caught.value.hint).endswith("rename it to model.pt")
        put(path.with_name("dp_rank_00_tp_rank_01_pp_rank_00.pt"), dict(WEIGHTS))
        with pytest.raises(PartOfSet) as caught:
            ckpt_cli.merge(path, tmp_path / "out")
        assert "rename" not in str(caught.value.hint)

    def test_one_rank_of_megatron_away_from_its_folder(self, tmp_path: Path) -> None:
        content = {"args": megatron_args(), "checkpoint_version": 3.0, "model": dict(WEIGHTS)}
        refused_everywhere(put(tmp_path / "folder" / "model.pt", content), tmp_path, 3, "Megatron", "mp_rank_*")

    def test_deepspeed_that_cuts_no_weights_is_read(self, tmp_path: Path) -> None:
        result = ckpt_cli.merge(put(tmp_path / "save" / "mp_rank_00_model_states.pt", deepspeed(dict(WEIGHTS))), tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()
        assert "no-masters" in {note.code for note in result.checkpoint.notes}

    def test_arguments_of_other_trainers_are_no_sign(self, tmp_path: Path) -> None:
        content = {"args": argparse.Namespace(lr=1.0), "model": dict(WEIGHTS), "shard_metadata": None}
        ckpt_cli.merge(put(tmp_path / "model.pt", content), tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()

    @pytest.mark.parametrize(
        ("columns", "params"), [(4, None), (4, {"dim": 8, "n_heads": 4, "head_dim": 2}), (8, {"n_heads": 8, "head_dim": 2})]
    )
    def test_a_share_of_a_model_of_meta(self, columns: int, params: dict[str, int] | None, tmp_path: Path) -> None:
        path = put(tmp_path / "consolidated.00.pth", {"layers.0.attention.wo.weight": torch.ones(8, columns)})
        if params is not None:
            (tmp_path / "params.json").write_text(json.dumps(params))
        refused_everywhere(path, tmp_path, 4, "one of 2 files")

    @pytest.mark.parametrize(("columns", "params"), [(8, None), (4, {"n_heads": 2, "head_dim": 2}), (6, None)])
    def test_a_whole_model_of_meta(self, columns: int, params: dict[str, int] | None, tmp_path: Path) -> None:
        path = put(tmp_path / "consolidated.00.pth", {"layers.0.attention.wo.weight": torch.ones(8, columns)})
        if params is not None:
            (tmp_path / "params.json").write_text(json.dumps(params))
        ckpt_cli.merge(path, tmp_path / "out")

    def test_flat_parameters_of_fairscale(self, tmp_path: Path) -> None:
        for name in ("flat_param_0", "model.flat_param", "layers.0._flat_param"):
            path = put(tmp_path / "model.pt", {name: torch.ones(9), "model.norm.weight": torch.ones(4)})
            with pytest.raises(Unsupported, match="flat parameters"):
                ckpt_cli.merge(path, tmp_path / "out")


class TestFolders:
    """DeepSpeed and Megatron are named, wherever in their folders one points."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        for step in (10, 20):
            tag = tmp_path / "run" / f"checkpoint-{step}" / f"global_step{step}"
            for rank in range(2):
                put(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", deepspeed({}))
                put(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        return tmp_path / "run"

    def test_a_damaged_save_of_deepspeed_is_refused_by_name(self, run: Path, tmp_path: Path) -> None:
        for path in (run, run / "checkpoint-20", run / "checkpoint-20" / "global_step20"):
            refused_everywhere(path, tmp_path, 3, "DeepSpeed")
        assert ckpt_cli.detect(run).checkpoint.framework == "DeepSpeed"

    def test_a_whole_model_beside_the_tag_is_the_checkpoint(self, run: Path, tmp_path: Path) -> None:
        put(run / "checkpoint-20" / "model.safetensors")
        result = ckpt_cli.merge(run / "checkpoint-20", tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()
        assert not any(note.code in ("steps-inside", "passed-over") for note in result.checkpoint.notes)
        assert ckpt_cli.detect(run).checkpoint.step == 20

    def test_what_is_not_read_hides_no_steps(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run / "checkpoint-10" / "global_step10", run / "last")
        shutil.rmtree(run / "checkpoint-20")
        put(run / "checkpoint-30" / "model.safetensors")
        ckpt_cli.merge(run, tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()

    def test_other_things_of_a_trainer_are_no_sets(self, tmp_path: Path) -> None:
        for name in ("optim_rank0.pt", "rng_state_rank0.pth", "dataloader_rank0.pt", "scheduler-shard0.pt"):
            put(tmp_path / "folder" / name)
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(tmp_path / "folder")
        assert caught.value.code == "not-recognised"


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


QKV = "self_attention.linear_qkv.weight"


@pytest.mark.filterwarnings("ignore:torch.distributed is")
class TestMegatronDcp:
    @pytest.mark.parametrize(
        "state",
        [
            {f"decoder.layers.0.{QKV}": torch.ones(4, 4), "common_state/shard_0_1": [{"args": 1}]},
            {f"decoder.layers.0.{QKV}": torch.ones(4, 4), "rng_state/shard_0.0.1_1.1.2": ["x"]},
            {f"decoder.layers.1.{QKV}": torch.ones(4, 4), "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.param": torch.ones(16)},
            {f"decoder.layers.1.{QKV}": torch.ones(4, 4), f"optimizer.state.fp32_param.decoder.layers.1.{QKV}": torch.ones(4, 4)},
            {f"decoder.layers.{QKV}": torch.ones(2, 4, 4), "embedding.word_embeddings.weight": torch.ones(8, 4)},
            {f"decoder.layers.0.{QKV}": torch.ones(4, 4), "decoder.layers.0.mlp._extra_state/shard_0_1": [None]},
        ],
        ids=["common", "rng", "buckets", "masters", "stacked", "extra"],
    )
    def test_unfinished_torch_dist_is_recognised_by_its_keys(self, state: dict[str, Any], tmp_path: Path) -> None:
        step = save_dcp(tmp_path / "run" / "iter_0000005", state)
        refused_everywhere(step, tmp_path, 4, "Megatron torch_dist", "metadata.json")
        refused_everywhere(step.parent, tmp_path, 4, "Megatron torch_dist")
        refused_everywhere(step / "__0_0.distcp", tmp_path, 4, "Megatron torch_dist")
        with pytest.raises(MissingShard, match="Megatron torch_dist"):
            ckpt_cli.extract_state(step, tmp_path / "out")

    def test_unfinished_torch_dist_is_recognised_by_its_files(self, tmp_path: Path) -> None:
        step = save_dcp(tmp_path / "actor" / "model" / "dist_ckpt", {f"decoder.layers.0.{QKV}": torch.ones(4, 4)})
        torch.save({"content_metadata": {}}, step / "common.pt")
        for path in (step, tmp_path / "actor"):
            refused_everywhere(path, tmp_path, 4, "Megatron torch_dist", "metadata.json")

    def test_optimizers_at_the_top_level_are_no_weights(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "step", {**WEIGHTS, "optimizer.state.exp_avg.x": torch.ones(4), "optim": torch.ones(2)})
        (folder / "metadata.json").write_text('{"author": "someone"}')
        ckpt_cli.merge(folder, tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
class TestLooseTensors:
    """A tensor beside the group that is the model."""

    STATES: tuple[dict[str, Any], ...] = (
        {"net": dict(WEIGHTS), "step": STEP},
        {"step": STEP, "queue": torch.zeros(2, 2), "generator": dict(WEIGHTS)},
        {"net": dict(WEIGHTS), "loss": torch.ones(3), "counters": {"seen": STEP}, "optimizer": {"exp_avg": torch.ones(40)}},
    )

    def save(self, form: str, state: dict[str, Any], tmp_path: Path) -> Path:
        if form == "dcp":
            return save_dcp(tmp_path / "step", state)
        return put(tmp_path / "step" / ("model.pt" if form == "file" else "model_world_size_1_rank_0.pt"), state)

    @pytest.mark.parametrize("form", ["dcp", "file", "ranks"])
    @pytest.mark.parametrize("state", STATES, ids=["step", "queue", "counters"])
    def test_the_group_is_the_model(self, form: str, state: dict[str, Any], tmp_path: Path) -> None:
        ckpt_cli.merge(self.save(form, state, tmp_path), tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()

    @pytest.mark.parametrize("form", ["file", "ranks"])
    def test_two_groups_are_refused(self, form: str, tmp_path: Path) -> None:
        with pytest.raises(Undecidable, match="net, critic"):
            ckpt_cli.merge(self.save(form, {"net": dict(WEIGHTS), "critic": dict(WEIGHTS), "step": STEP}, tmp_path), tmp_path / "out")

    @pytest.mark.parametrize("form", ["file", "ranks"])
    def test_a_state_dict_with_a_group_in_it_is_refused(self, form: str, tmp_path: Path) -> None:
        for key in ("head", "model"):
            state = {**WEIGHTS, key: {"weight": torch.ones(100, 4)}}
            with pytest.raises(Unsupported, match="holds tensors"):
                ckpt_cli.merge(self.save(form, state, tmp_path), tmp_path / "out")

    def test_a_model_at_the_top_level_stays_the_model(self, tmp_path: Path) -> None:
        folder = self.save("dcp", {**WEIGHTS, "counters": {"seen": STEP}, "teacher": {"weight": torch.ones(100, 4)}}, tmp_path)
        ckpt_cli.merge(folder, tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()

    def test_a_matrix_that_is_left_out_is_told(self, tmp_path: Path) -> None:
        result = ckpt_cli.merge(self.save("file", self.STATES[1], tmp_path), tmp_path / "out")
        assert any(note.code == "beside-weights" and "queue" in note.text for note in result.checkpoint.notes)


class TestNamesThatAreRead:
    @pytest.mark.parametrize("name", ["model_best.pth.tar", "checkpoint.pth.tar", "model.pth.tar"])
    def test_files_of_torch_save_called_tar(self, name: str, tmp_path: Path) -> None:
        path = put(tmp_path / "folder" / name, {"epoch": 3, "arch": "resnet", "state_dict": dict(WEIGHTS), "best_acc1": torch.tensor(7.0)})
        for index, given in enumerate((path, path.parent)):
            ckpt_cli.merge(given, tmp_path / f"out{index}")
            assert load(tmp_path / f"out{index}").keys() == WEIGHTS.keys()

    def test_an_adapter_of_peft_before_safetensors(self, tmp_path: Path) -> None:
        factors = {
            f"base_model.model.layers.0.q_proj.lora_{side}.weight": torch.ones(2, 4) if side == "A" else torch.ones(4, 2) for side in "AB"
        }
        for suffix in ("bin", "safetensors"):
            folder = put(tmp_path / suffix / f"adapter_model.{suffix}", dict(factors)).parent
            (folder / "adapter_config.json").write_text(
                json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"})
            )
            ckpt_cli.merge(folder, tmp_path / f"out-{suffix}", lora="keep")
        found, expected = load(tmp_path / "out-bin"), load(tmp_path / "out-safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


LAYERS = {f"model.layers.{layer}.mlp.weight": torch.full((4, 4), float(layer + 1)) for layer in range(2)}
"""A model of two layers."""


class TestFilesBesideStepFolders:
    """A stray file does not hide the steps, a final model does; --step always picks one of them."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        for step in (100, 200):
            folder = tmp_path / "run" / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            save_file({name: tensor + step for name, tensor in LAYERS.items()}, folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
            torch.save({"last_epoch": step}, folder / "scheduler.pt")
        return tmp_path / "run"

    @pytest.mark.parametrize("name", ["notes.safetensors", "model.safetensors", "pytorch_model.bin", "model.pt", "ema.safetensors"])
    @pytest.mark.parametrize("config", ["none", "of a larger model"])
    def test_are_passed_over_unless_they_are_a_model(self, run: Path, name: str, config: str, tmp_path: Path) -> None:
        write = save_file if name.endswith("safetensors") else torch.save
        write({"embedding": torch.ones(3, 4)} if config != "none" else LAYERS, run / name)
        if config != "none":
            (run / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert result.checkpoint.step == 200
        (note,) = [note for note in result.checkpoint.notes if note.code == "stray-weights"]
        assert (note.level, name in note.text) == ("warning", True)
        assert ckpt_cli.detect(run).checkpoint.step == 200
        assert ckpt_cli.extract_state(run, tmp_path / "state").step == 200
        assert ckpt_cli.merge(run, tmp_path / "older", step=100).checkpoint.step == 100
        assert ckpt_cli.merge(run / name, tmp_path / "file").checkpoint.step is None
        ckpt_cli.average([run], tmp_path / "mean", last=2)
        assert ckpt_cli.inspect(run).checkpoint.step == 200

    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
    def test_a_final_model_stays_what_the_folder_means(self, run: Path, name: str, tmp_path: Path) -> None:
        write = save_file if name.endswith("safetensors") else torch.save
        write(LAYERS, run / name)
        (run / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert result.checkpoint.step is None
        (note,) = [note for note in result.checkpoint.notes if note.code == "steps-inside"]
        assert "2 step folders" in note.text
        assert ckpt_cli.merge(run, tmp_path / "older", step=100).checkpoint.step == 100
        mean = ckpt_cli.average([run], tmp_path / "mean", last=2)
        assert (mean.checkpoint.step, mean.divisor) == (200, 2)

    def test_a_final_model_that_cannot_be_read_is_not_replaced_by_a_step(self, run: Path, tmp_path: Path) -> None:
        (run / "model.safetensors").write_bytes(b"\x00" * 20)
        (run / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
        with pytest.raises(CkptError):
            ckpt_cli.merge(run, tmp_path / "out")

    def test_steps_one_folder_further_down_count_as_well(self, run: Path, tmp_path: Path) -> None:
        outer = tmp_path / "outer"
        outer.mkdir()
        run.rename(outer / "checkpoints")
        save_file({"a": torch.ones(2)}, outer / "notes.safetensors")
        result = ckpt_cli.merge(outer, tmp_path / "out")
        assert result.checkpoint.step == 200
        assert "stray-weights" in {note.code for note in result.checkpoint.notes}


class TestPartsOfTorchtune:
    """The number stands before that of the epoch."""

    def test_are_parts_beside_each_other(self, tmp_path: Path) -> None:
        first, second = (put(tmp_path / f"hf_model_000{number}_0.pt") for number in (1, 2))
        for path in (first, second):
            error = part_error(path, Folders())
            assert error is not None
            assert "torchtune" in error.message

    def test_the_second_alone_is_one(self, tmp_path: Path) -> None:
        assert part_error(put(tmp_path / "hf_model_0002_3.pt"), Folders()) is not None

    def test_the_first_alone_may_be_all(self, tmp_path: Path) -> None:
        assert part_error(put(tmp_path / "hf_model_0001_3.pt"), Folders()) is None


class TestNumbersWithGaps:
    """``model_0.pt``, ``model_50.pt``, ``model_100.pt`` of rsl_rl are steps."""

    def test_of_whole_files_are_steps_and_each_can_be_merged(self, tmp_path: Path) -> None:
        paths = [put(tmp_path / f"model_{step}.pt", {"model_state_dict": WEIGHTS, "iter": step}) for step in (0, 50, 100)]
        with pytest.raises(PartOfSet, match="they are steps rather than ranks") as caught:
            ckpt_cli.merge(tmp_path, tmp_path / "out")
        assert caught.value.hint == f"pass one of them, such as {paths[-1]}"
        (component,) = ckpt_cli.detect(tmp_path).checkpoint.components
        assert "missing" not in str(component.problem)
        ckpt_cli.merge(paths[-1], tmp_path / "out")
        assert load(tmp_path / "out").keys() == WEIGHTS.keys()

    @pytest.mark.parametrize("steps", [(0, 1), (0, 2)])
    def test_that_ranks_may_have_too_are_not_called_steps(self, steps: tuple[int, ...], tmp_path: Path) -> None:
        for step in steps:
            put(tmp_path / f"model_{step}.pt")
        with pytest.raises(PartOfSet, match="says how many ranks there are"):
            ckpt_cli.merge(tmp_path, tmp_path / "out")

    def test_of_files_with_other_tensors_are_not_called_steps(self, tmp_path: Path) -> None:
        for number in (0, 50, 100):
            put(tmp_path / f"model_{number}.pt", {f"layers.{number}.weight": torch.ones(2, 2)})
        with pytest.raises(PartOfSet, match="says how many ranks there are"):
            ckpt_cli.merge(tmp_path, tmp_path / "out")


class TestOneRank:
    """TensorRT-LLM counts ranks in config.json."""

    @pytest.mark.parametrize("config", [{"world_size": 1, "mapping": {"world_size": 1}}, {"world_size": 1}, {"mapping": {"world_size": 1}}])
    def test_alone_is_a_whole_model_where_the_config_counts_one(self, config: dict[str, Any], tmp_path: Path) -> None:
        path = put(tmp_path / "run" / "rank0.safetensors")
        (path.parent / "config.json").write_text(json.dumps(config))
        for number, given in enumerate((path, path.parent)):
            ckpt_cli.merge(given, tmp_path / f"out{number}")
            assert load(tmp_path / f"out{number}").keys() == WEIGHTS.keys()
        assert ckpt_cli.verify(path.parent).exit_code == 0
        put(path.with_name("rank1.safetensors"))
        assert part_error(path, Folders()) is not None

    @pytest.mark.parametrize("config", ["{}", "[]", "no json", '{"world_size": 2}', '{"world_size": 1, "mapping": {"world_size": 2}}'])
    def test_alone_is_a_part_where_the_config_does_not_say_so(self, config: str, tmp_path: Path) -> None:
        path = put(tmp_path / "rank0.safetensors")
        (tmp_path / "config.json").write_text(config)
        assert part_error(path, Folders()) is not None


@pytest.mark.parametrize("name", ["checkpoint_2-{}.pt", "model.{}.safetensors"])
def test_what_ranks_share_is_a_part_beside_their_files(name: str, tmp_path: Path) -> None:
    """As fairseq writes a mixture of experts."""
    shared = put(tmp_path / "set" / name.format("shared"))
    assert part_of(shared, Folders()) is None
    put(shared.with_name(name.format("unshared-rank-0")))
    assert part_of(shared, Folders()) is None
    ranks = [put(shared.with_name(name.format(f"rank-{rank}"))).name for rank in range(2)]
    refused_everywhere(shared, tmp_path, 4, "what the ranks share", *ranks)


def test_files_of_experts_beside_a_file_that_was_passed_are_told(tmp_path: Path) -> None:
    """As they are beside a folder that was passed."""
    model = put(tmp_path / "set" / "model.pt")
    put(tmp_path / "set" / "expert_policy.pt")
    assert not any(note.code == "other-weights" for note in ckpt_cli.merge(model, tmp_path / "one").checkpoint.notes)
    for number in range(2):
        put(tmp_path / "set" / f"experts_rank{number}.pt")
    for path in (model, model.parent):
        notes = ckpt_cli.merge(path, tmp_path / "out", overwrite=True).checkpoint.notes
        assert any(note.code == "other-weights" and "experts_rank0.pt, experts_rank1.pt" in note.text for note in notes), path
