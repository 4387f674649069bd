"""What `--also` names adds files to the checkpoints that were passed, and nothing else: never another run's, never in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.cli import _run
from ckpt_cli.errors import CkptError, Inconsistent, MissingShard, MixedWorldSizes, NotFound, UsageError
from ckpt_cli.reporting.drift import total
from tests.formats.test_deepspeed import OPTIM, TAG

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-run"
MODEL, EMA = "pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"
ROLE = Path("actor")


def shards(home: Path, ranks: tuple[int, ...], of: int = 4, step: int = 200, kind: str = MODEL) -> Path:
    """Files of ranks of the example, in the folder of a component."""
    home.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        source = EXAMPLE / f"checkpoint-{step}" / kind / f"model_world_size_4_rank_{rank}.pt"
        shutil.copy(source, home / f"model_world_size_{of}_rank_{rank}.pt")
    return home


def config(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads((EXAMPLE / "checkpoint-200" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))


def node(run: Path, ranks: tuple[int, ...], steps: tuple[int, ...] = (100, 200), **changes: Any) -> Path:
    for step in steps:
        shards(run / f"checkpoint-{step}" / MODEL, ranks, step=step)
        config(run / f"checkpoint-{step}", **changes)
    return run


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    return node(tmp_path / "a" / "run", (0, 1)), node(tmp_path / "b" / "run", (2, 3))


def codes(notes: Any, level: str = "warning") -> list[str]:
    return [note.code for note in notes if note.level == level]


def values(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def of_every_command(path: Path, also: Path, out: Path) -> Iterator[Any]:
    """What every command that takes `--also` makes of a folder."""
    ckpt_cli.merge(EXAMPLE, out / "whole")
    yield lambda: ckpt_cli.detect(path, also=also)
    yield lambda: ckpt_cli.inspect(path, also=also)
    yield lambda: ckpt_cli.merge(path, out / "merged", also=also)
    yield lambda: ckpt_cli.average(path, out / "mean", also=also, everything=True)
    yield lambda: ckpt_cli.extract_state(path, out / "state", also=also)
    yield lambda: ckpt_cli.verify(path, also=also)
    yield lambda: ckpt_cli.verify(out / "whole", against=path, also=also)
    yield lambda: ckpt_cli.show(path, "model.norm.weight", also=also)
    yield lambda: ckpt_cli.open(path, also=also)


class TestAnotherRun:
    """Its steps are never read, and files of the same step are refused."""

    @pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1)], ids=["whole", "not whole"])
    def test_with_another_step_is_refused_by_every_command(self, ranks: tuple[int, ...], tmp_path: Path) -> None:
        path, also = node(tmp_path / "a", ranks, (100,)), node(tmp_path / "b", (0, 1, 2, 3), (200,))
        for command in of_every_command(path, also, tmp_path):
            with pytest.raises(UsageError, match="also holds no step of this run") as caught:
                command()
            assert caught.value.expected is not None
            assert caught.value.hint == "leave it out; another run is merged by itself"
        assert not (tmp_path / "merged").exists()

    def test_with_the_same_steps_is_refused_by_every_command(self, tmp_path: Path) -> None:
        path, also = node(tmp_path / "a", (0, 1, 2, 3)), node(tmp_path / "b", (0, 1, 2, 3))
        for command in of_every_command(path, also, tmp_path):
            with pytest.raises(Inconsistent, match="rank 0 is in both") as caught:
                command()
            assert caught.value.expected == "the file of every rank in one of the folders"
            folder = path / "checkpoint-200" / MODEL
            assert caught.value.hint == f"{folder} has the files of all 4 ranks: pass it alone"
            assert ckpt_cli.merge(folder, tmp_path / "alone", overwrite=True).checkpoint.step == 200

    def test_does_not_complete_a_step(self, tmp_path: Path) -> None:
        """Not even where an older step of the run is whole: what was named does not fit."""
        path, also = node(tmp_path / "a", (0, 1, 2, 3), (100,)), node(tmp_path / "b", (0, 1, 2, 3), (200,))
        node(path, (0, 1), (200,))
        with pytest.raises(Inconsistent, match="rank 0 is in both"):
            ckpt_cli.merge(path, tmp_path / "out", also=also)

    def test_by_another_number_of_ranks_is_refused(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        for file in sorted(nodes[1].rglob("model_world_size_4_*.pt")):
            file.rename(file.with_name(file.name.replace("size_4", "size_8")))
        with pytest.raises(MixedWorldSizes) as caught:
            ckpt_cli.merge(nodes[0], tmp_path / "out", also=nodes[1])
        assert caught.value.hint is not None

    @pytest.mark.parametrize("place", ["checkpoint-200", "."], ids=["in the step", "in the run"])
    def test_with_another_config_is_refused(self, place: str, tmp_path: Path) -> None:
        path, also = node(tmp_path / "a", (0, 1)), node(tmp_path / "b", (2, 3))
        for run in (path, also):
            (run / "checkpoint-200" / "config.json").unlink()
        config(path / "checkpoint-200")
        config(also / place, hidden_act="relu")
        with pytest.raises(Inconsistent, match="the config of another model: hidden_act") as caught:
            ckpt_cli.merge(path, tmp_path / "out", also=also)
        assert caught.value.path == str(also / place / "config.json")
        with pytest.raises(Inconsistent, match="the config of another model"):
            ckpt_cli.extract_state(path, tmp_path / "state", also=also)

    def test_with_other_tensors_is_refused_and_not_passed_over(self, tmp_path: Path) -> None:
        path, also = node(tmp_path / "a", (0, 1)), node(tmp_path / "b", (2, 3), (200,))
        shards(path / "checkpoint-100" / MODEL, (2, 3), step=100)
        for file in (also / "checkpoint-200" / MODEL).iterdir():
            torch.save({"other.weight": torch.ones(4, 4)}, file)
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(path, tmp_path / "out", also=also)
        assert not isinstance(caught.value, MissingShard)
        assert "--step 100" not in (caught.value.hint or ""), "the other folder has no such step"
        with pytest.raises(CkptError):
            ckpt_cli.average(path, tmp_path / "mean", also=also, everything=True)

    def test_does_not_lend_a_component(self, tmp_path: Path) -> None:
        """An average that lies beside a contradicting model is of that other model."""
        path, also = node(tmp_path / "a", (0, 1, 2, 3), (200,)), node(tmp_path / "b", (0, 1, 2, 3), (200,))
        shards(also / "checkpoint-200" / EMA, (0, 1, 2, 3), kind=EMA)
        for name in ("model", "ema", "both"):
            with pytest.raises(Inconsistent, match="rank 0 is in both"):
                ckpt_cli.merge(path, tmp_path / "out", also=also, type=name)

    def test_of_another_format_is_refused(self, tmp_path: Path) -> None:
        path = node(tmp_path / "a", (0, 1, 2, 3), (200,))
        ckpt_cli.merge(path, tmp_path / "b" / "checkpoint-200")
        with pytest.raises(Inconsistent, match=r"is rank-shards, .* is safetensors") as caught:
            ckpt_cli.merge(path, tmp_path / "out", also=tmp_path / "b" / "checkpoint-200")
        assert caught.value.hint is not None

    def test_of_whole_files_adds_nothing(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
            save_file({"w": torch.full((4, 4), float(ord(name)))}, tmp_path / name / "model.safetensors", {"format": "pt"})
        with pytest.raises(UsageError, match="also adds nothing to a"):
            ckpt_cli.merge(tmp_path / "a", tmp_path / "out", also=tmp_path / "b")

    def test_does_not_fill_a_set_of_safetensors(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
            files = {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
            for tensor, file in files.items():
                save_file({tensor: torch.full((4, 4), float(ord(name)))}, tmp_path / name / file, {"format": "pt"})
            (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        (tmp_path / "a" / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(UsageError, match="also adds nothing"):
            ckpt_cli.merge(tmp_path / "a", tmp_path / "out", also=tmp_path / "b")

    def test_of_dcp_does_not_complete_a_save(self, tmp_path: Path) -> None:
        for name in "ab":
            state = {"model": {"w": torch.full((4, 4), float(ord(name)))}}
            dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / name / "step_1"), no_dist=True)
        with pytest.raises(Inconsistent, match=r"__0_0.distcp is in both") as caught:
            ckpt_cli.merge(tmp_path / "a", tmp_path / "out", also=tmp_path / "b")
        assert caught.value.hint is not None
        (tmp_path / "a" / "step_1" / "__0_0.distcp").unlink()
        with pytest.raises(Inconsistent, match="is from another save"):
            ckpt_cli.merge(tmp_path / "a", tmp_path / "out", also=tmp_path / "b")

    def test_of_deepspeed_does_not_complete_a_save(self, copy: Any, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z2-bf16-w4-frozen")
        other = Path(shutil.copytree(folder / TAG, tmp_path / "other" / Path(TAG).name))
        (folder / TAG / OPTIM.format(3)).unlink()
        with pytest.raises(Inconsistent, match="is in both"):
            ckpt_cli.merge(folder / TAG, tmp_path / "out", also=other)

    def test_of_torch_checkpointing_does_not_complete_a_save(self, copy: Any, tmp_path: Path) -> None:
        first = copy("torch-checkpointing", "fsdp-4") / "run" / "checkpoint" / "step-3"
        second = Path(shutil.copytree(first, tmp_path / "b" / "step-3"))
        for file in first.glob("*_3.*"):
            file.unlink()
        with pytest.raises(Inconsistent, match="is in both"):
            ckpt_cli.merge(first, tmp_path / "out", also=second)
        for file in (path for rank in range(3) for path in second.glob(f"*_{rank}.*")):
            file.unlink()
        assert ckpt_cli.merge(first, tmp_path / "out", also=second).checkpoint.also == (str(second),)
        other = copy("torch-checkpointing", "tp-4") / "run" / "checkpoint" / "step-3"
        shutil.copy(other / "metadata.pkl", second)
        with pytest.raises(Inconsistent, match="is from another save"):
            ckpt_cli.merge(first, tmp_path / "other", also=second)

    def test_of_sharded_safetensors_does_not_complete_a_save(self, tmp_path: Path) -> None:
        def save(folder: Path, rank: int, parts: int = 1) -> None:
            folder.mkdir(exist_ok=True)
            offsets = json.dumps({"w": {"saved_offsets": [4 * (rank - 1), 0]}})
            name = f"shard-{rank:05d}-model-00001-of-{parts:05d}.safetensors"
            save_file({"w": torch.ones(4, 4)}, folder / name, {"format": "pt", "DCP_SHARDING_INFO": offsets})

        save(tmp_path / "a", 1)
        save(tmp_path / "b", 2)
        assert ckpt_cli.merge(tmp_path / "b", tmp_path / "out", also=tmp_path / "a").outputs[0].elements == 32
        save(tmp_path / "b", 1)
        with pytest.raises(Inconsistent, match="is in both"):
            ckpt_cli.merge(tmp_path / "a", tmp_path / "two", also=tmp_path / "b")
        save(tmp_path / "c", 2, 2)
        with pytest.raises(MixedWorldSizes):
            ckpt_cli.merge(tmp_path / "a", tmp_path / "two", also=tmp_path / "c")

    def test_of_megatron_s_first_format_does_not_complete_a_save(self, copy: Any, tmp_path: Path) -> None:
        first = copy("megatron", "legacy-qwen2-te-tp2") / "checkpoint"
        second = Path(shutil.copytree(first, tmp_path / "b"))
        shutil.rmtree(next(first.rglob("mp_rank_01")))
        with pytest.raises(Inconsistent, match="mp_rank_00 is in both"):
            ckpt_cli.merge(first, tmp_path / "out", also=second)


class TestAnotherNode:
    @pytest.mark.parametrize("first", ["", "checkpoint-200", f"checkpoint-200/{MODEL}"], ids=["run", "step", "component"])
    @pytest.mark.parametrize("second", ["", "checkpoint-200", f"checkpoint-200/{MODEL}"], ids=["run", "step", "component"])
    def test_may_be_given_at_any_level(self, first: str, second: str, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        result = ckpt_cli.merge(nodes[0] / first, tmp_path / "out", also=nodes[1] / second)
        assert result.checkpoint.step == 200
        assert codes(result.checkpoint.notes) == []
        ckpt_cli.merge(EXAMPLE, tmp_path / "whole")
        assert all(torch.equal(tensor, values(tmp_path / "out")[name]) for name, tensor in values(tmp_path / "whole").items())

    @pytest.mark.parametrize("which", [0, 1])
    @pytest.mark.parametrize("place", ["checkpoint-200", "."], ids=["in the step", "in the run"])
    def test_may_alone_have_the_config(self, which: int, place: str, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        for path in [*nodes[0].rglob("config.json"), *nodes[1].rglob("config.json")]:
            path.unlink()
        config(nodes[which] / place)
        result = ckpt_cli.merge(nodes[0], tmp_path / "out", also=nodes[1])
        assert "config.json" in result.outputs[0].assets

    def test_may_have_steps_that_the_first_lacks(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        shards(nodes[1] / "checkpoint-300" / MODEL, (0, 1, 2, 3))
        result = ckpt_cli.merge(nodes[0], tmp_path / "out", also=nodes[1])
        assert result.checkpoint.step == 200
        assert codes(result.checkpoint.notes) == ["step-skipped"]
        averaged = ckpt_cli.average(nodes[0], tmp_path / "mean", also=nodes[1], everything=True)
        assert [source.step for source in averaged.outputs[0].sources] == [100, 200]
        assert codes(averaged.notes) == ["step-skipped"]
        with pytest.raises(NotFound, match="there is no step 300") as caught:
            ckpt_cli.merge(nodes[0], tmp_path / "out3", also=nodes[1], step=300)
        assert caught.value.hint == f"only {nodes[1]} has it, and --also adds files to steps that PATH has"
        with pytest.raises(NotFound, match="there is no step 300") as caught:
            ckpt_cli.merge(nodes[1], tmp_path / "out3", also=nodes[0], step=300)
        assert str(caught.value.hint).startswith("--also adds files to step 300")

    def test_may_lack_the_step_that_is_read_but_that_is_said(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        shards(nodes[0] / "checkpoint-200" / MODEL, (2, 3))
        shutil.rmtree(nodes[1] / "checkpoint-200")
        result = ckpt_cli.merge(nodes[0], tmp_path / "out", also=nodes[1])
        assert (result.checkpoint.step, codes(result.checkpoint.notes)) == (200, ["also-unused"])
        assert result.checkpoint.also == ()
        with pytest.raises(CkptError, match="warning"):
            ckpt_cli.merge(nodes[0], tmp_path / "strict", also=nodes[1], strict=True)

    def test_that_holds_another_component_than_the_one_read_is_a_note(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        shards(nodes[0] / "checkpoint-200" / MODEL, (2, 3))
        shutil.rmtree(nodes[1])
        shards(nodes[1] / "checkpoint-200" / EMA, (0, 1, 2, 3), kind=EMA)
        config(nodes[1] / "checkpoint-200")
        result = ckpt_cli.merge(nodes[0], tmp_path / "out", also=nodes[1])
        assert codes(result.checkpoint.notes, "info").count("also-unused") == 1
        ema = ckpt_cli.merge(nodes[0], tmp_path / "ema", also=nodes[1], type="ema")
        assert codes(ema.checkpoint.notes) == ["also-alone"]
        config(nodes[1] / "checkpoint-200", hidden_act="relu")
        with pytest.raises(Inconsistent, match="the config of another model"):
            ckpt_cli.merge(nodes[0], tmp_path / "other", also=nodes[1], type="ema")

    def test_is_no_node_of_the_model_where_it_holds_an_average(self, tmp_path: Path) -> None:
        shards(tmp_path / "a" / "checkpoint-200" / MODEL, (0, 1))
        shards(tmp_path / "b" / "checkpoint-200" / EMA, (2, 3), kind=EMA)
        for path, also in (("a", "b"), ("b", "a")):
            with pytest.raises(MissingShard):
                ckpt_cli.merge(tmp_path / path / "checkpoint-200", tmp_path / "out", also=tmp_path / also / "checkpoint-200")

    def test_of_one_component_is_no_place_for_others(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        shards(nodes[1] / "checkpoint-200" / EMA, (0, 1, 2, 3), kind=EMA)
        with pytest.raises(NotFound, match="no component ema"):
            ckpt_cli.merge(nodes[0] / "checkpoint-200" / MODEL, tmp_path / "out", also=nodes[1], type="ema")

    def test_says_which_step_it_is_of(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        plain = Path(shutil.copytree(nodes[1] / "checkpoint-200" / MODEL, tmp_path / "files"))
        with pytest.raises(UsageError, match="files that say no step") as caught:
            ckpt_cli.merge(nodes[0], tmp_path / "out", also=plain)
        assert caught.value.hint == "to add files to one step, pass the folder of that step as PATH"

    def test_may_hold_the_states_of_its_ranks_beside_a_whole_model(self, tmp_path: Path) -> None:
        """transformers' ``save_on_each_node``."""
        for number, name in enumerate("ab"):
            folder = tmp_path / name / "checkpoint-10"
            folder.mkdir(parents=True)
            save_file({"w": torch.ones(4, 4)}, folder / "model.safetensors", {"format": "pt"})
            for rank in (2 * number, 2 * number + 1):
                torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
        result = ckpt_cli.extract_state(tmp_path / "a", tmp_path / "state", also=tmp_path / "b")
        assert result.ranks == 4


class TestTheSameFolder:
    @pytest.mark.parametrize("given", ["step", "run", "link", "component"])
    def test_inside_or_around_is_refused(self, given: str, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        run = nodes[0]
        (tmp_path / "link").mkdir()
        (tmp_path / "link" / "checkpoint-200").symlink_to(run / "checkpoint-200")
        path = run / "checkpoint-200" if given == "run" else run
        places = {"step": run / "checkpoint-200", "run": run, "link": tmp_path / "link", "component": run / "checkpoint-200" / MODEL}
        with pytest.raises(UsageError, match="also names files that are read already") as caught:
            ckpt_cli.merge(path, tmp_path / "out", also=places[given])
        assert caught.value.hint == "leave it out"

    def test_around_all_nodes_is_passed_alone(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        for number, run in enumerate(nodes):
            run.rename(tmp_path / f"n{number}")
        (tmp_path / "nodes").mkdir()
        for number in (0, 1):
            (tmp_path / f"n{number}").rename(tmp_path / "nodes" / f"n{number}")
        with pytest.raises(UsageError, match="are read already") as caught:
            ckpt_cli.merge(tmp_path / "nodes" / "n0", tmp_path / "out", also=tmp_path / "nodes")
        assert caught.value.hint == f"pass {tmp_path / 'nodes'} alone: its folders are joined"
        assert ckpt_cli.merge(tmp_path / "nodes", tmp_path / "out").checkpoint.step == 200


class TestTheNextCommand:
    """What is printed to be copied works."""

    @pytest.mark.parametrize("first", ["", "checkpoint-200"], ids=["run", "step"])
    @pytest.mark.parametrize("second", ["", "checkpoint-200", f"checkpoint-200/{MODEL}"], ids=["run", "step", "component"])
    def test_after_a_merge(
        self, first: str, second: str, nodes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.follow(["merge", nodes[0] / first, "--also", nodes[1] / second, "-o", tmp_path / "out"], capsys)
        self.follow(["verify", tmp_path / "out"], capsys)

    def test_leaves_out_what_added_nothing(self, nodes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shards(nodes[0] / "checkpoint-200" / MODEL, (2, 3))
        shutil.rmtree(nodes[1] / "checkpoint-200")
        self.follow(["merge", nodes[0], "--also", nodes[1], "-o", tmp_path / "out"], capsys)

    def follow(self, command: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
        assert _run(list(map(str, command))) == 0
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("next: ckpt verify ")
        assert _run(line.removeprefix("next: ckpt ").split()) == 0
        capsys.readouterr()


class TestTheDistanceOfTwoSteps:
    """whose files lie on several nodes."""

    def test_of_a_run(self, nodes: tuple[Path, Path], tmp_path: Path) -> None:
        found = ckpt_cli.diff(nodes[0], steps="100,200", also=nodes[1])
        for step in (100, 200):
            ckpt_cli.merge(nodes[0], tmp_path / str(step), step=step, also=nodes[1])
        assert found.comparison.drifts == ckpt_cli.diff(tmp_path / "100", tmp_path / "200").comparison.drifts
        assert (found.before.step, found.after.step) == (100, 200)

    def test_of_which_another_node_has_one(self, tmp_path: Path) -> None:
        path, also = node(tmp_path / "a", (0, 1)), node(tmp_path / "b", (2, 3), (200,))
        shards(path / "checkpoint-100" / MODEL, (2, 3), step=100)
        assert ckpt_cli.diff(path, steps="100,200", also=also).after.step == 200

    def test_in_a_report(self, nodes: tuple[Path, Path]) -> None:
        rows = {row.step: row for row in ckpt_cli.report(nodes[0], also=nodes[1], drift=True).steps}
        assert [row.mergeable for row in rows.values()] == [True, True]
        found = ckpt_cli.diff(nodes[0], steps="100,200", also=nodes[1])
        assert rows[200].drift == total(found.comparison.groups)

    def test_of_two_paths_is_refused(self, nodes: tuple[Path, Path]) -> None:
        with pytest.raises(UsageError, match="also applies to one run"):
            ckpt_cli.diff(nodes[0] / "checkpoint-100", nodes[0] / "checkpoint-200", also=nodes[1])
