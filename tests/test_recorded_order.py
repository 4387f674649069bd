"""The order of checkpoints whose names do not say it, for methods in which new ones count for more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import UsageError
from ckpt_cli.files.manifest import NAME as MANIFEST

ORDERED = ("linear", "ema", "wsm")
NAMES = ("sft-ep1", "sft-ep10", "sft-ep2")


def model(folder: Path, step: int | None = None, losses: Sequence[float] = ()) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": torch.full((4,), float(step or 0))}, folder / "model.safetensors", metadata={"format": "pt"})
    if step is not None:
        history = [{"step": 10 * number, "loss": loss} for number, loss in enumerate(losses)]
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))
    return folder


def averaged(paths: Sequence[Path], method: str = "ema") -> None:
    ckpt_cli.average(paths, paths[0].parent.parent / "average", method=method, dry_run=True, **({"decay": 0.5} if method == "ema" else {}))


def refused(paths: Sequence[Path], method: str = "ema") -> str:
    with pytest.raises(UsageError) as caught:
        averaged(paths, method)
    assert caught.value.hint == "pass them in order"
    return caught.value.message


class TestATrainerState:
    @pytest.mark.parametrize("method", ORDERED)
    def test_says_the_order(self, tmp_path: Path, method: str) -> None:
        paths = [model(tmp_path / name, step) for name, step in zip(NAMES, (100, 1000, 200), strict=True)]
        assert refused(paths, method).endswith("but these are steps 100, 1000, 200, by trainer_state.json")
        averaged([paths[0], paths[2], paths[1]], method)
        averaged(paths, "uniform")

    def test_of_another_training_does_not(self, tmp_path: Path) -> None:
        """The second stage of a training counts from the start."""
        averaged([model(tmp_path / "sft", 1000, [5.0, 4.0]), model(tmp_path / "dpo", 200, [0.7, 0.6])])
        assert "1000, 200" in refused([model(tmp_path / "b", 1000, [5.0, 4.0]), model(tmp_path / "a", 200, [5.0])])

    def test_that_some_lack_or_that_is_the_same_does_not(self, tmp_path: Path) -> None:
        averaged([model(tmp_path / "a", 200), model(tmp_path / "b")])
        averaged([model(tmp_path / "seed1", 200), model(tmp_path / "seed2", 200)])

    def test_says_it_between_epochs_and_steps(self, tmp_path: Path) -> None:
        paths = [model(tmp_path / "epoch_2", 2000), model(tmp_path / "step_1500", 1500)]
        assert "2000, 1500" in refused(paths)
        averaged(paths[::-1])


def test_revisions_of_the_hub_cache_say_the_order(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    commits = {"stage1-step1000-tokens5B": "b", "stage1-step20000-tokens100B": "a", "stage2-step3000-tokens1B": "c", "main": "c"}
    for name, letter in commits.items():
        (repository / "refs" / name).write_text(letter * 40)
    first, second, third = (model(repository / "snapshots" / (letter * 40)) for letter in "bac")
    assert "stage1-step20000-tokens100B, stage1-step1000-tokens5B, stage2-step3000-tokens1B" in refused([second, first, third])
    averaged([first, second, third])
    (repository / "refs" / "stage1-step1000-tokens5B").unlink()
    averaged([second, first, third])


def test_outputs_of_one_run_are_in_the_order_of_its_steps(tmp_path: Path) -> None:
    for step in (100, 200):
        model(tmp_path / "run" / f"checkpoint-{step}", step)
    new, old = (
        Path(ckpt_cli.merge(tmp_path / "run", tmp_path / name, step=step).outputs[0].output) for name, step in (("a", 200), ("b", 100))
    )
    assert "200, 100, by ckpt-manifest.json" in refused([new, old])
    averaged([old, new])


class TestFiles:
    """Files of steps, as a shell puts them: 100, 1000, 200."""

    def in_folders(self, folder: Path) -> list[Path]:
        return [model(folder / f"checkpoint-{step}") / "model.safetensors" for step in (100, 1000, 200)]

    @pytest.mark.parametrize("method", ORDERED)
    def test_are_of_the_steps_of_their_folders(self, tmp_path: Path, method: str) -> None:
        paths = self.in_folders(tmp_path)
        assert refused(paths, method).endswith("but these are steps 100, 1000, 200")
        averaged(paths, "uniform")
        result = ckpt_cli.average([paths[0], *paths[:0:-1]], tmp_path / "out", method="ema", half_life=100)
        assert [source.step for source in result.outputs[0].sources] == [100, 200, 1000]

    def test_in_a_folder_of_an_epoch_are_of_no_step(self, tmp_path: Path) -> None:
        for epoch in (1, 2):
            model(tmp_path / f"epoch_{epoch}")
        paths = [tmp_path / f"epoch_{epoch}" / "model.safetensors" for epoch in (1, 2)]
        assert "steps 2, 1" in refused(paths[::-1])
        ckpt_cli.merge(paths[0], tmp_path / "out")
        facts = json.loads((tmp_path / "out" / MANIFEST).read_text())
        assert (facts["step"], facts["epochs"]) == (None, 1)

    def test_whose_names_are_steps(self, tmp_path: Path) -> None:
        paths = [lightning(tmp_path / f"epoch=0-step={step}.ckpt", step) for step in (100, 1000, 200)]
        assert refused(paths).endswith("but these are steps 100, 1000, 200")
        assert ckpt_cli.detect(paths[0]).checkpoint.step == 100

    def test_that_hold_their_step(self, tmp_path: Path) -> None:
        paths = [lightning(tmp_path / f"epoch={step}-loss=0.{step}.ckpt", step) for step in (100, 1000, 200)]
        assert refused(paths).endswith("100, 1000, 200, by global_step in each file")

    def test_whose_names_differ_in_a_number_alone(self, tmp_path: Path) -> None:
        paths = [plain(tmp_path / f"model_{step}.pt") for step in (100, 1000, 200)]
        assert refused(paths).endswith("model_100.pt, model_1000.pt, model_200.pt, by their names")
        averaged([paths[0], *paths[:0:-1]])

    def test_without_any_order_count_as_they_were_given(self, tmp_path: Path) -> None:
        """Widths of averages are no steps, and neither are names that differ in more than a number."""
        for names in (("ema_0.99.pt", "ema_0.9.pt"), ("b.pt", "a.pt"), ("e2_l1.pt", "e1_l3.pt")):
            paths = [plain(tmp_path / name) for name in names]
            assert ordered_as_given(paths, "ema")
            assert not ordered_as_given(paths, "uniform")
        assert not ordered_as_given(self.in_folders(tmp_path)[:2], "ema")

    def test_beside_one_without_a_number_keep_their_order(self, tmp_path: Path) -> None:
        paths = [*self.in_folders(tmp_path), plain(tmp_path / "last.pt")]
        assert "1000, 200" in refused(paths)


class TestWhatIsRecorded:
    """Counts in every arrangement of the paths: files in folders, folders in folders, what loops of people's own and kohya record."""

    VERSIONS = ("model-abc:v0", "model-abc:v1", "model-abc:v10", "model-abc:v2")

    @pytest.mark.parametrize("method", ORDERED)
    def test_of_files_in_folders_whose_numbers_agree_is_the_order(self, tmp_path: Path, method: str) -> None:
        paths = [lightning(made(tmp_path / name / "model.ckpt"), step) for name, step in zip(self.VERSIONS, (10, 20, 110, 30), strict=True)]
        assert refused(paths, method).endswith("but these are steps 10, 20, 110, 30, by global_step")
        ordered = [*paths[:2], paths[3], paths[2]]
        assert order_note(ordered, method) is None
        assert order_note(paths, "uniform") is None

    def test_against_the_numbers_of_folders_or_without_any_is_a_warning(self, tmp_path: Path) -> None:
        """Of a second stage, which counts from the start, it is true as well: so nothing is refused."""
        for names in (("stage1", "stage2"), ("sft", "dpo")):
            paths = [lightning(made(tmp_path / name / "last.ckpt"), step) for name, step in zip(names, (1000, 200), strict=True)]
            level, text = order_note(paths) or ("", "")
            assert (level, f"{paths[0]} (global_step 1000) is before {paths[1]} (200)" in text) == ("warning", True)
            assert "in which they were given" in text
            assert order_note(paths[::-1]) is None

    def test_in_the_folder_around_a_model(self, tmp_path: Path) -> None:
        paths = [model(tmp_path / name / "model") for name in "ab"]
        for path, step in zip(paths, (300, 200), strict=True):
            (path.parent / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        level, text = order_note(paths) or ("", "")
        assert (level, "trainer_state.json 300" in text) == ("warning", True)
        assert order_note(paths[::-1]) is None
        beside = [model(tmp_path / "c" / name) for name in "de"]
        (tmp_path / "c" / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
        assert (order_note(beside) or ("",))[0] == "info"

    @pytest.mark.parametrize("name", ["epoch", "iteration", "step"])
    def test_by_loops_of_ones_own(self, tmp_path: Path, name: str) -> None:
        for folders in (("a", "b"), (".", ".")):
            paths = [made(tmp_path / folder / f"{file}.pt") for folder, file in zip(folders, ("best", "last"), strict=True)]
            for path, number in zip(paths, (9, 5), strict=True):
                torch.save({"model": {"w": torch.randn(4)}, name: number}, path)
            level, text = order_note(paths) or ("", "")
            assert (level, f"({name} 9)" in text) == ("warning", True)
            assert order_note(paths[::-1]) is None

    def test_in_headers_of_safetensors(self, tmp_path: Path) -> None:
        paths = [made(tmp_path / name / "lora.safetensors") for name in "ab"]
        for path, step in zip(paths, ("90", "50"), strict=True):
            save_file({"w": torch.randn(4)}, path, metadata={"ss_steps": step})
        assert (order_note(paths) or ("",))[0] == "warning"
        assert order_note(paths[::-1]) is None

    def test_of_some_or_alike_is_said_to_tell_nothing(self, tmp_path: Path) -> None:
        alike = [lightning(made(tmp_path / name / "last.ckpt"), 10) for name in "ab"]
        level, text = order_note(alike) or ("", "")
        assert (level, "what they record (global_step 10, 10) does not say which" in text) == ("info", True)
        other = plain(made(tmp_path / "c" / "last.ckpt"))
        older = lightning(made(tmp_path / "d" / "last.ckpt"), 5)
        assert (order_note([*alike, other, older]) or ("",))[0] == "warning"
        level, text = order_note([older, other, alike[0]]) or ("", "")
        assert (level, "global_step 5, none, 10" in text) == ("info", True)

    def test_by_other_trainings_is_none(self, tmp_path: Path) -> None:
        paths = [model(tmp_path / "sft", 1000, [5.0, 4.0]), model(tmp_path / "dpo", 200, [0.7, 0.6])]
        assert (order_note(paths) or ("",))[0] == "info"


class TestTheOrderOfAShell:
    """Where nothing is recorded."""

    @pytest.mark.parametrize("form", ["model-abc:v{}", "v{}", "run_{}_merged", "v{}/model"])
    def test_is_a_warning(self, tmp_path: Path, form: str) -> None:
        paths = [model(tmp_path / form.format(number)) for number in (0, 1, 10, 11, 2)]
        level, text = order_note(paths) or ("", "")
        assert (level, f"{paths[3]} is before {paths[4]}, as a shell lists them" in text) == ("warning", True)
        for others in ([*paths[:2], paths[4], *paths[2:4]], paths[::-1], [paths[1], paths[0], paths[4]]):
            assert (order_note(others) or ("",))[0] == "info"

    @pytest.mark.parametrize(
        "names", [("ckpt_1M", "ckpt_2M", "ckpt_500k"), ("step_1.5k", "step_1k", "step_900"), ("t_10b", "t_1b", "t_2B")]
    )
    def test_counts_units(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        """`ckpt_500k.pt` came last in `*.pt`, and got the largest share as the newest."""
        numbered = [model(tmp_path / f"v{name.partition('_')[2]}" / "model") for name in names]
        level, text = order_note(numbered) or ("", "")
        assert (level, "as a shell lists them" in text) == ("warning", True)
        files = [made(tmp_path / "files" / f"{name}.pt") for name in names]
        for file in files:
            plain(file)
        with pytest.raises(UsageError, match="ordered from old to new"):
            order_note(files)
        order = {"ckpt_500k": 0, "ckpt_1M": 1, "ckpt_2M": 2, "step_900": 0, "step_1k": 1, "step_1.5k": 2, "t_1b": 0, "t_2B": 1, "t_10b": 2}
        ordered = sorted(files, key=lambda file: order[file.stem])
        assert (order_note(ordered) or ("info",))[0] == "info"

    def test_of_names_that_differ_otherwise_is_none(self, tmp_path: Path) -> None:
        for names in (("a10", "b2"), ("lr_0.10", "lr_0.9"), ("v01", "v02", "v10")):
            assert (order_note([model(tmp_path / name) for name in names]) or ("",))[0] == "info"


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def order_note(paths: Sequence[Path], method: str = "ema") -> tuple[str, str] | None:
    options = {"decay": 0.5} if method == "ema" else {}
    result = ckpt_cli.average(paths, paths[0].parent.parent / "average", method=method, dry_run=True, **options)
    return next(((note.level, note.text) for note in result.outputs[0].notes if note.code == "order-given"), None)


def plain(path: Path) -> Path:
    torch.save({"w": torch.randn(4)}, path)
    return path


def lightning(path: Path, step: int) -> Path:
    torch.save({"state_dict": {"w": torch.randn(4)}, "global_step": step, "pytorch-lightning_version": "2.5.0"}, path)
    return path


def ordered_as_given(paths: Sequence[Path], method: str) -> bool:
    options = {"decay": 0.5} if method == "ema" else {}
    result = ckpt_cli.average(paths, paths[0].parent.parent / "average", method=method, dry_run=True, **options)
    return any(note.code == "order-given" and note.level == "info" for note in result.outputs[0].notes)
