"""Files of one step that are those of another: a mixed model was written without a word, and an old one under a new number."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.conftest import Copy
from tests.test_steps import HOUR, NOW, model, of_all_commands, told, value_of

Link = Callable[[Path, Path], None]


def symlink(path: Path, target: Path) -> None:
    path.symlink_to(os.path.relpath(target, path.parent))


def absolute(path: Path, target: Path) -> None:
    path.symlink_to(target)


def hard(path: Path, target: Path) -> None:
    os.link(target, path)


def step(folder: Path, value: float, world: int = 2) -> Path:
    """A step of files of ranks, which all hold the same."""
    folder.mkdir(parents=True)
    for rank in range(world):
        torch.save({"w": torch.full((4, 4), value)}, folder / f"model_world_size_{world}_rank_{rank}.pt")
        torch.save({"lr_scheduler": {"last_epoch": int(value)}}, folder / f"extra_state_world_size_{world}_rank_{rank}.pt")
        for path in folder.iterdir():
            os.utime(path, (NOW, NOW))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 10 and 20, of values like these."""
    for number in (10, 20):
        step(tmp_path / "run" / f"global_step_{number}" / "actor", float(number))
    return tmp_path / "run"


@pytest.mark.parametrize("link", [symlink, absolute, hard])
class TestAFileOfARankFromAnotherStep:
    def damage(self, run: Path, link: Link, name: str = "model_world_size_2_rank_1.pt") -> None:
        path = run / "global_step_20" / "actor" / name
        path.unlink()
        link(path, run / "global_step_10" / "actor" / name)

    def test_is_skipped_in_the_run(self, run: Path, tmp_path: Path, link: Link) -> None:
        self.damage(run, link)
        for notes in (
            ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes,
            ckpt_cli.detect(run).checkpoint.notes,
            ckpt_cli.verify(run).notes,
            ckpt_cli.extract_state(run, tmp_path / "state").notes,
        ):
            ((level, text),) = told(notes, "step-skipped")
            assert level == "warning"
            assert text.startswith("global_step_20 is skipped: ")
            assert text.endswith("not all of global_step_20: model_world_size_2_rank_1.pt is that of global_step_10")
        assert value_of(tmp_path / "out") == 10.0

    @pytest.mark.parametrize("inside", ["", "actor"])
    def test_is_refused_in_the_step(self, run: Path, tmp_path: Path, link: Link, inside: str) -> None:
        self.damage(run, link)
        path = run / "global_step_20" / inside
        for refused in (
            lambda: ckpt_cli.merge(path, tmp_path / "out"),
            lambda: ckpt_cli.inspect(path),
            lambda: ckpt_cli.open(path),
            lambda: ckpt_cli.average([path, path], tmp_path / "out"),
            lambda: ckpt_cli.diff(path, path),
        ):
            with pytest.raises(Inconsistent) as caught:
                refused()
            assert caught.value.hint is not None
            assert caught.value.hint.startswith(
                f"put the file of global_step_20 in place of {run / 'global_step_20' / 'actor' / 'model_world_size_2_rank_1.pt'}"
            )

    def test_with_the_state_of_a_rank_is_refused_where_that_is_read(self, run: Path, tmp_path: Path, link: Link) -> None:
        self.damage(run, link, "extra_state_world_size_2_rank_1.pt")
        with pytest.raises(Inconsistent):
            ckpt_cli.extract_state(run / "global_step_20", tmp_path / "state")


def test_a_file_under_two_names_is_doubted_in_the_other_step_too(run: Path) -> None:
    name = "model_world_size_2_rank_1.pt"
    (run / "global_step_20" / "actor" / name).unlink()
    os.link(run / "global_step_10" / "actor" / name, run / "global_step_20" / "actor" / name)
    ((level, text),) = told(ckpt_cli.detect(run / "global_step_10").checkpoint.notes, "other-step")
    assert level == "warning"
    assert text.endswith(f"{name} is also in global_step_20")


class TestAWholeStepThatIsAnother:
    @pytest.mark.parametrize("inside", ["", "actor"])
    def test_is_named_by_every_command(self, run: Path, tmp_path: Path, inside: str) -> None:
        target = run / "global_step_20" / inside
        (run / "global_step_30" / inside).parent.mkdir(exist_ok=True)
        (run / "global_step_30" / inside).symlink_to(target)
        seen = of_all_commands(run, tmp_path / "out", "other-step")
        seen |= {"extract-state": told(ckpt_cli.extract_state(run, tmp_path / "state").notes, "other-step")}
        seen |= {"the step": told(ckpt_cli.detect(run / "global_step_30").checkpoint.notes, "other-step")}
        for command, notes in seen.items():
            wanted = [("warning", "the files of actor in global_step_30 are those of global_step_20")]
            assert notes == wanted, command

    def test_by_second_names_of_its_files_is_named(self, run: Path) -> None:
        later = run / "global_step_30" / "actor"
        later.mkdir(parents=True)
        for path in (run / "global_step_10" / "actor").iterdir():
            os.link(path, later / path.name)
        ((_, text),) = told(ckpt_cli.detect(run).checkpoint.notes, "other-step")
        assert "global_step_10" in text

    def test_a_part_of_a_model_that_is_shared_is_a_warning(self, tmp_path: Path) -> None:
        """Parts that were not trained are the same in every step."""
        for number in (10, 20):
            folder = model(tmp_path / "run" / f"checkpoint-{number}", 1.0, time=NOW + HOUR * number)
            (folder / "model.safetensors").unlink()
            for part, name in ((1, "a"), (2, "b")):
                save_file({name: torch.full((4, 4), float(number))}, folder / f"model-0000{part}-of-00002.safetensors")
            index = '{"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
            (folder / "model.safetensors.index.json").write_text(index)
        path = tmp_path / "run" / "checkpoint-20" / "model-00001-of-00002.safetensors"
        path.unlink()
        path.symlink_to("../checkpoint-10/model-00001-of-00002.safetensors")
        ((level, text),) = told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out").checkpoint.notes, "other-step")
        assert level == "warning"
        assert "model-00001-of-00002.safetensors is that of checkpoint-10" in text


class TestALayerOfAPipelineThatWasNotTrained:
    """Its file has the same bytes in every step, of which programs that save space make one file."""

    @pytest.fixture
    def run(self, copy: Copy) -> Path:
        run = copy("deepspeed", "pipe-z1-bf16-pp2", "run")
        shutil.copytree(run / "global_step3", run / "global_step6")
        for path in (run / "global_step6").glob("layer_0[1-9]-*"):
            torch.save({name: value * 2 for name, value in torch.load(path).items()}, path)
        for path in (run / "global_step6").iterdir():
            os.utime(path, (NOW + HOUR, NOW + HOUR))
        return run

    def shared(self, run: Path, link: Link) -> Path:
        path = run / "global_step6" / "layer_00-model_states.pt"
        path.unlink()
        link(path, run / "global_step3" / path.name)
        return path

    def test_is_a_warning_under_two_names(self, run: Path) -> None:
        self.shared(run, hard)
        notes = ckpt_cli.merge(run / "global_step6", dry_run=True, type="weights16").checkpoint.notes
        ((level, text),) = told(notes, "other-step")
        assert (level, text.count("layer_00-model_states.pt")) == ("warning", 1)

    def test_is_refused_behind_a_link_until_it_is_a_file(self, run: Path) -> None:
        path = self.shared(run, symlink)
        with pytest.raises(Inconsistent) as caught:
            ckpt_cli.merge(run / "global_step6", dry_run=True, type="weights16")
        command = str(caught.value.hint).partition("of the link: ")[2].partition(", or use ")[0]
        subprocess.run(command, shell=True, check=True)
        assert not path.is_symlink()
        assert told(ckpt_cli.merge(run / "global_step6", dry_run=True, type="weights16").checkpoint.notes, "other-step") == []


class TestLinksThatLeadToNoOtherStep:
    @pytest.mark.parametrize("link", [symlink, hard])
    def test_to_a_store_of_files(self, run: Path, tmp_path: Path, link: Link) -> None:
        for number, path in enumerate((run / "global_step_20" / "actor").iterdir()):
            (tmp_path / "1234567").mkdir(exist_ok=True)
            path.rename(tmp_path / "1234567" / f"{number}")
            link(path, tmp_path / "1234567" / f"{number}")
        assert ckpt_cli.merge(run, tmp_path / "out").checkpoint.step == 20
        assert told(ckpt_cli.detect(run).checkpoint.notes, "other-step") == []

    def test_to_the_same_step_elsewhere(self, run: Path, tmp_path: Path) -> None:
        (run / "global_step_20").rename(tmp_path / "global_step_20")
        (run / "global_step_20").symlink_to(tmp_path / "global_step_20")
        assert told(ckpt_cli.detect(run).checkpoint.notes, "other-step") == []

    def test_from_an_epoch_to_its_step(self, tmp_path: Path) -> None:
        model(tmp_path / "run" / "step_300", 1.0)
        (tmp_path / "run" / "epoch_3").symlink_to("step_300")
        assert told(ckpt_cli.detect(tmp_path / "run" / "epoch_3").checkpoint.notes, "other-step") == []


def moment(path: Path, seconds: int) -> None:
    for each in path.rglob("*"):
        os.utime(each, ns=(NOW * 10**9 + seconds * 10**9 + 7,) * 2)


class TestACopyFromAnotherStep:
    """What is put in the place of a lost file or folder has the size of that, and any loader takes it."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        for number in (10, 20):
            step(tmp_path / "run" / f"global_step_{number}" / "actor", float(number))
            moment(tmp_path / "run" / f"global_step_{number}", 60 * number)
        return tmp_path / "run"

    def test_of_one_rank_with_its_time_is_refused(self, run: Path, tmp_path: Path) -> None:
        name = "actor/model_world_size_2_rank_1.pt"
        shutil.copy2(run / "global_step_10" / name, run / "global_step_20" / name)
        with pytest.raises(Inconsistent, match=r"model_world_size_2_rank_1\.pt is that of global_step_10"):
            ckpt_cli.merge(run / "global_step_20", tmp_path / "out")
        assert told(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, "step-skipped")
        assert value_of(tmp_path / "out") == 10.0

    @pytest.mark.parametrize("copy", [shutil.copy2, shutil.copy], ids=["with times", "without"])
    def test_of_a_whole_component_is_told(self, run: Path, tmp_path: Path, copy: Callable[[Path, Path], object]) -> None:
        shutil.copytree(run / "global_step_10" / "actor", run / "global_step_20" / "actor", copy_function=copy, dirs_exist_ok=True)
        ((level, text),) = told(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, "other-step")
        assert level == "warning"
        assert text == "the files of actor in global_step_20 are those of global_step_10"

    @pytest.mark.parametrize("names", [("ema.safetensors",), ("model.safetensors", "ema.safetensors")])
    def test_of_a_component_of_one_file(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        run = tmp_path / "run"
        for number in (10, 20):
            (run / f"{number:07}").mkdir(parents=True)
            for name in ("model.safetensors", "ema.safetensors"):
                save_file({"w": torch.full((400, 400), float(number))}, run / f"{number:07}" / name)
            moment(run / f"{number:07}", 60 * number)
        for name in names:
            shutil.copy2(run / "0000010" / name, run / "0000020" / name)
        for name in ("model", "ema"):
            notes = ckpt_cli.merge(run, tmp_path / name, type=name).checkpoint.notes
            assert bool(told(notes, "other-step")) == (f"{name}.safetensors" in names)

    def test_of_one_rank_without_its_time_may_be_what_is_not_trained(self, run: Path, tmp_path: Path) -> None:
        name = "actor/model_world_size_2_rank_1.pt"
        shutil.copy(run / "global_step_10" / name, run / "global_step_20" / name)
        done = ckpt_cli.merge(run / "global_step_20", tmp_path / "out", allow_unequal_replicas=True)
        assert told(done.checkpoint.notes, "other-step") == []

    def test_is_not_looked_for_in_a_step_that_cannot_be_looked_at(self, run: Path, tmp_path: Path) -> None:
        """What lies beside a step that was passed is no reason to refuse it."""
        shutil.rmtree(run / "global_step_10")
        (run / "global_step_10").symlink_to("global_step_10")
        ckpt_cli.merge(run / "global_step_20", tmp_path / "out")
        assert value_of(tmp_path / "out") == 20.0

    def test_of_training_state_is_none(self, run: Path, tmp_path: Path) -> None:
        """Random states are the same where nothing random was computed."""
        for rank in range(2):
            name = f"actor/extra_state_world_size_2_rank_{rank}.pt"
            shutil.copy2(run / "global_step_10" / name, run / "global_step_20" / name)
        done = ckpt_cli.extract_state(run, tmp_path / "state")
        assert done.step == 20
        assert told(done.notes, "other-step") == []

    def test_of_the_same_size_and_time_with_another_content_is_none(self, run: Path, tmp_path: Path) -> None:
        moment(run, 0)
        assert told(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, "other-step") == []
