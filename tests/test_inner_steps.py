"""A step folder inside of a step: a second `cp -r` into its own copy, or a training that went on there. The outer one is the old save."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from tests.conftest import Copy
from tests.test_steps import model, of_all_commands, told
from tests.test_uncounted_steps import of_every_command

CODE = "steps-inside"


def rank_files(folder: Path, value: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        torch.save({"w": torch.full((4, 4), value)}, folder / f"model_world_size_2_rank_{rank}.pt")
    return folder


def step(folder: Path, kind: str, value: float) -> Path:
    if kind == "hub":
        return model(folder, value)
    rank_files(folder / "actor" if kind == "actor" else folder, value)
    return folder


class TestACopyThatLandedInItsTarget:
    @pytest.mark.parametrize(("kind", "name"), [("hub", "checkpoint-200"), ("ranks", "checkpoint-200"), ("actor", "global_step_5")])
    def test_is_named_by_every_command(self, tmp_path: Path, kind: str, name: str) -> None:
        run = tmp_path / "run"
        older = name.replace("200", "100").replace("5", "4")
        step(run / older, kind, 0.5)
        step(run / name, kind, 1.0)
        step(run / name / name, kind, 2.0)
        for command, notes in of_every_command(run, tmp_path / "out", CODE).items():
            ((level, text),) = notes
            assert level == "warning", command
            assert f"{name}/{name}/ holds the same tensors with other values" in text, command
            assert text.endswith(f"passing {run / name / name}"), command
        opened = ckpt_cli.merge(run / name / name, tmp_path / "inner")
        assert float(ckpt_cli.load_state_dict(run / name / name)["w"][0, 0]) == 2.0
        assert told(opened.checkpoint.notes, CODE) == []

    def test_is_named_where_the_step_is_passed_or_was_merged(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        outer = rank_files(run / "checkpoint-200", 1.0)
        rank_files(outer / "checkpoint-200", 2.0)
        for notes in (
            ckpt_cli.detect(outer).checkpoint.notes,
            ckpt_cli.merge(outer, tmp_path / "out").checkpoint.notes,
            ckpt_cli.merge(run, tmp_path / "other", step=200).checkpoint.notes,
            ckpt_cli.verify(outer).notes,
            ckpt_cli.verify(tmp_path / "out", against=run).notes,
        ):
            ((level, _),) = told(notes, CODE)
            assert level == "warning"

    def test_with_the_same_values_is_a_note(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        rank_files(run / "checkpoint-100", 0.5)
        outer = rank_files(run / "checkpoint-200", 1.0)
        rank_files(outer / "checkpoint-200", 1.0)
        for path in (run, outer):
            ((level, text),) = told(ckpt_cli.merge(path, tmp_path / "out", overwrite=True).checkpoint.notes, CODE)
            assert level == "info"
            assert "holds the same weights" in text

    def test_with_one_other_tensor_among_many_is_named(self, tmp_path: Path) -> None:
        outer = tmp_path / "run" / "checkpoint-200"
        for folder, value in ((outer, 1.0), (outer / outer.name, 2.0)):
            folder.mkdir(parents=True)
            tensors = {f"layers.{number}.w": torch.ones(2, 2) for number in range(200)}
            save_file({**tensors, "layers.77.w": torch.full((2, 2), value)}, folder / "model.safetensors")
        ((level, text),) = told(ckpt_cli.detect(outer.parent).checkpoint.notes, CODE)
        assert (level, "layers.77.w" in text) == ("warning", True)

    def test_of_another_component_is_compared_with_that(self, copy: Copy, tmp_path: Path) -> None:
        outer = copy("layouts", "verl-run") / "run" / "global_step_10"
        shutil.copytree(outer, outer / outer.name)
        for kind in ("actor", "critic"):
            result = ckpt_cli.merge(outer.parent, tmp_path / kind, type=kind, step=10, dry_run=True)
            assert [level for level, _ in told(result.checkpoint.notes, CODE)] == ["info"]

    def test_that_holds_a_tag_of_deepspeed_is_compared(self, data: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(data / "deepspeed" / "hf-trainer-z3-w2" / "run", tmp_path / "run"))
        outer = run / "checkpoint-4"
        shutil.copytree(outer, outer / "checkpoint-4")
        assert [level for level, _ in told(ckpt_cli.detect(run).checkpoint.notes, CODE)] == ["info"]
        shutil.rmtree(outer / "checkpoint-4")
        shutil.copytree(run / "checkpoint-2", outer / "checkpoint-4")
        assert [level for level, _ in told(ckpt_cli.detect(run).checkpoint.notes, CODE)] == ["warning"]

    def test_that_cannot_be_read_or_looked_at_is_named(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        outer = rank_files(run / "checkpoint-200", 1.0)
        inner = rank_files(outer / "checkpoint-200", 1.0)
        (inner / "model_world_size_2_rank_1.pt").unlink()
        ((level, text),) = told(ckpt_cli.detect(run).checkpoint.notes, CODE)
        assert (level, "cannot be read" in text) == ("warning", True)
        shutil.rmtree(inner)
        inner.symlink_to(tmp_path / "nowhere")
        ((level, text),) = told(ckpt_cli.detect(run).checkpoint.notes, CODE)
        assert (level, "cannot be looked at" in text) == ("warning", True)

    def test_is_named_for_the_state(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        outer = model(run / "checkpoint-200", 1.0, state=200)
        model(outer / "checkpoint-200", 2.0, state=200)
        ((level, text),) = told(ckpt_cli.extract_state(run, tmp_path / "state").notes, CODE)
        assert (level, text.startswith("the state was read from checkpoint-200/ itself")) == ("warning", True)
        model(outer / "checkpoint-200", 1.0, state=200)
        ((level, _),) = told(ckpt_cli.extract_state(run, tmp_path / "again").notes, CODE)
        assert level == "info"


class TestATrainingThatWentOnInItsStep:
    @pytest.mark.parametrize("names", [("checkpoint-50",), ("checkpoint-250",), ("checkpoint-50", "checkpoints/checkpoint-60")])
    def test_is_named(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        run = tmp_path / "run"
        outer = rank_files(run / "checkpoint-200", 1.0)
        for number, name in enumerate(names):
            model(outer / name, 2.0 + number)
        for notes in of_all_choosing(run, tmp_path / "out"):
            ((level, text),) = notes
            assert level == "warning"
            assert all(f"checkpoint-200/{name}/ holds" in text for name in names)
            assert text.endswith(f"passing {outer / names[-1]}")

    def test_with_many_steps_is_not_compared_with_all(self, tmp_path: Path) -> None:
        outer = model(tmp_path / "run" / "checkpoint-200", 1.0)
        for number in range(1, 8):
            model(outer / f"checkpoint-{number}", 1.0 if number > 3 else 2.0)
        warned, note = sorted(told(ckpt_cli.detect(outer.parent).checkpoint.notes, CODE), reverse=True)
        assert (warned[0], note[0]) == ("warning", "info")
        assert "checkpoint-200/checkpoint-3/, checkpoint-200/checkpoint-2/ and 1 more were not read, nor compared" in warned[1]


class TestAHealthyStep:
    def test_with_a_tag_of_deepspeed_or_a_link_is_not_named(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        earlier = model(run / "checkpoint-100", 1.0)
        outer = model(run / "checkpoint-200", 2.0)
        (outer / "global_step200").mkdir()
        for name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            (outer / "global_step200" / name).write_bytes(b"")
        (outer / "checkpoint-100").symlink_to(earlier)
        (outer / "checkpoint-300").mkdir()
        for path in (run, outer):
            assert told(ckpt_cli.merge(path, tmp_path / "out", overwrite=True).checkpoint.notes, CODE) == []

    def test_that_ends_an_epoch_is_newer_than_its_steps(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "epoch_1", 1.0)
        model(run / "epoch_1" / "step_10", 2.0)
        assert told(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, CODE) == []


def of_all_choosing(run: Path, out: Path) -> list[Any]:
    model(run / "checkpoint-100", 1.0)
    return list(of_all_commands(run, out, CODE).values())
