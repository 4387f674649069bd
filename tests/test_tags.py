"""Saves in tags: which of them is meant, what is said where `latest` means another one, and those that cannot be looked at."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Undecidable, Unreadable
from tests.cli import ckpt_fork as ckpt
from tests.tensors import load
from tests.test_recorded_steps import WEIGHTS, deepspeed


def save(folder: Path, step: int, value: float = 0.0) -> Path:
    deepspeed(folder, step)
    path = folder / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["module"] = {name: torch.full_like(tensor, value) for name, tensor in WEIGHTS.items()}
    torch.save(content, path)
    return folder


def warnings(path: Path, code: str) -> list[str]:
    return [note.text for note in ckpt_cli.detect(path).checkpoint.notes if note.code == code and note.level == "warning"]


def value(path: Path, out: Path, **options: str | int) -> float:
    ckpt_cli.merge(path, out, **options)  # type: ignore[arg-type]
    return float(load(out)["a.weight"][0, 0])


def gathered(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in WEIGHTS.items()}, folder / "model.safetensors")


def test_of_several_that_nothing_names_one_is_passed_as_a_shell_takes_it(tmp_path: Path) -> None:
    for tag in ("it's", "my save"):
        save(tmp_path / "run" / tag, 1)
    with pytest.raises(Undecidable) as caught:
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", names="native")
    assert (caught.value.hint or "").startswith(f"pass '{tmp_path / 'run' / 'my save'}', or another of them")


# -- latest decides ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["run", "checkpoint-4", "run/global_step_4/actor"])
def test_of_several_the_one_that_latest_names_is_taken(tmp_path: Path, folder: str) -> None:
    """In a folder that is a step, or a role's, as in any other."""
    for number, tag in enumerate(("a", "b", "c")):
        save(tmp_path / folder / tag, 4, number)
    (tmp_path / folder / "latest").write_text("b")
    assert value(tmp_path / folder, tmp_path / "out") == 1
    (text,) = warnings(tmp_path / folder, "passed-over")
    assert "a/, c/ could be" in text
    (tmp_path / folder / "latest").unlink()
    with pytest.raises(CkptError):
        ckpt_cli.merge(tmp_path / folder, tmp_path / "none")


def test_latest_does_not_decide_against_other_weights(tmp_path: Path) -> None:
    """What lies beside the tags in a step may be the model too."""
    for number, tag in enumerate(("a", "b")):
        save(tmp_path / "checkpoint-4" / tag, 4, number)
    gathered(tmp_path / "checkpoint-4" / "net")
    (tmp_path / "checkpoint-4" / "latest").write_text("b")
    with pytest.raises(CkptError, match="nothing tells which"):
        ckpt_cli.merge(tmp_path / "checkpoint-4", tmp_path / "out")


def test_of_universal_ones_the_file_of_these_names_it(tmp_path: Path) -> None:
    for number in (3, 6):
        save(tmp_path / "run" / f"global_step{number}_universal", number, number)
    (tmp_path / "run" / "latest").write_text("global_step6")
    (tmp_path / "run" / "latest_universal").write_text("global_step6_universal")
    assert value(tmp_path / "run", tmp_path / "out") == 6


# -- latest is compared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["myexp", "exp/final"])
def test_a_save_of_another_name_beside_steps_is_said(tmp_path: Path, named: str) -> None:
    save(tmp_path / "run" / "global_step3", 3)
    save(tmp_path / "run" / named, 9, 9)
    (tmp_path / "run" / "latest").write_text(f"{named}\n")
    (text,) = warnings(tmp_path / "run", "tracker")
    assert text == f"latest says {named}, which is a save too, but step 3 was taken: to take the former, give {named}/ itself"
    assert value(tmp_path / "run" / named, tmp_path / "out") == 9


@pytest.mark.parametrize("where", ["run", "checkpoint-4"])
def test_a_tag_that_is_not_there_is_said(tmp_path: Path, where: str) -> None:
    save(tmp_path / where / "alpha", 4)
    (tmp_path / where / "latest").write_text("beta")
    assert warnings(tmp_path / where, "tracker") == ["latest names beta, which is not there: model was read from alpha/"]
    assert warnings(tmp_path / where / "alpha", "tracker") == [], "given itself, it is meant"
    (tmp_path / where / "latest").write_text("alpha")
    assert warnings(tmp_path / where, "tracker") == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_tag_without_a_save_is_said_where_gathered_weights_are_read(tmp_path: Path, is_there: bool) -> None:
    step = tmp_path / "run" / "checkpoint-4"
    gathered(step)
    (step / "latest").write_text("global_step4")
    if is_there:
        (step / "global_step4").mkdir()
    why = "in which there is no save" if is_there else "which is not there"
    assert warnings(step, "tracker") == [f"latest names global_step4, {why}: model was read from model.safetensors"]


# -- tags that cannot be looked at -------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["", "policy"])
def test_gathered_weights_do_not_replace_a_tag_that_cannot_be_looked_at(tmp_path: Path, role: str) -> None:
    step = tmp_path / "run" / "global_step_4"
    home = step / role
    if not role:
        gathered(home)
    home.mkdir(parents=True, exist_ok=True)
    (home / "latest").write_text("tag")
    (home / "tag").symlink_to(tmp_path / "unmounted" / "tag")
    for path in (step, tmp_path / "run"):
        with pytest.raises(Unreadable, match="which does not exist"):
            ckpt_cli.merge(path, tmp_path / "out")


# -- where tags lie ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latest", [True, False])
def test_those_of_roles_are_components_of_the_step(tmp_path: Path, latest: bool) -> None:
    step = tmp_path / "run" / "global_step_5"
    for number, role in enumerate(("policy", "critic")):
        save(step / role / "global_step_5", 5, number)
        if latest:
            (step / role / "latest").write_text("global_step_5")
    for path in (tmp_path / "run", step):
        found = ckpt_cli.detect(path).checkpoint
        assert (found.step, [info.name for info in found.components]) == (5, ["policy", "critic"])
    assert value(tmp_path / "run", tmp_path / "critic", type="critic", step=5) == 1
    assert ckpt_cli.detect(step / "policy").checkpoint.step == 5


def test_a_tag_with_a_slash_is_the_one_that_latest_names(tmp_path: Path) -> None:
    for number in (5, 10):
        save(tmp_path / "run" / "epoch_1" / f"step_{number}", number, number)
        save(tmp_path / "other" / "exp" / f"try{number}", number, number)
    (tmp_path / "run" / "latest").write_text("epoch_1/step_10")
    (tmp_path / "other" / "latest").write_text("exp/try5")
    assert value(tmp_path / "run", tmp_path / "out") == 10
    assert warnings(tmp_path / "run", "tracker") == []
    assert value(tmp_path / "other", tmp_path / "also") == 5


def test_numbers_are_steps(tmp_path: Path) -> None:
    for number in (100, 200):
        save(tmp_path / "run" / str(number), number, number)
    (tmp_path / "run" / "latest").write_text("200")
    found = ckpt_cli.detect(tmp_path / "run").checkpoint
    assert (found.step, [step.step for step in found.steps]) == (200, [100, 200])
    assert [note.code for note in found.notes if note.level == "warning" and note.code in ("tracker", "uncounted")] == []
    assert value(tmp_path / "run", tmp_path / "out", step=100) == 100
    assert ckpt_cli.detect(tmp_path / "run" / "100").checkpoint.step == 100
    assert ckpt("average", tmp_path / "run", "-o", tmp_path / "mean", "--last", "2").code == 0
    (tmp_path / "run" / "latest").unlink()
    with pytest.raises(CkptError):
        ckpt_cli.merge(tmp_path / "run", tmp_path / "none")


def test_two_models_of_accelerate(tmp_path: Path) -> None:
    """It writes `latest` with each of them."""
    step = tmp_path / "run" / "checkpoint_0"
    for number, tag in enumerate(("pytorch_model", "pytorch_model_1")):
        save(step / tag, 4, number)
    (step / "latest").write_text("pytorch_model_1")
    found = ckpt_cli.detect(step).checkpoint
    assert [info.name for info in found.components] == ["model", "model_1"]
    assert [code for code in ("other-models", "passed-over", "tracker") if warnings(step, code)] == ["other-models"]
    assert value(step, tmp_path / "first") == 0
    assert value(step, tmp_path / "second", type="model_1") == 1
    shutil.rmtree(step / "pytorch_model")
    assert warnings(step, "no-first-model")


def refused_below(name: str, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith(name):
            raise error
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)


class TestATagThatCannotBeLookedAt:
    """may be the newest one."""

    @pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
    def test_where_none_is_named(self, error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for tag in ("first", "second"):
            save(tmp_path / "run" / tag, 1)
        refused_below("second", monkeypatch, error)
        with pytest.raises(Unreadable) as caught:
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out", names="native")
        assert caught.value.path == str(tmp_path / "run" / "second")
        assert f"pass {tmp_path / 'run' / 'first'}" in (caught.value.hint or "")
        ckpt_cli.merge(tmp_path / "run" / "first", tmp_path / "out", names="native")

    def test_is_said_with_a_hint_that_a_shell_understands(self, tmp_path: Path) -> None:
        save(tmp_path / "my run" / "first one", 1)
        (tmp_path / "my run" / "second").symlink_to("/gone/second")
        with pytest.raises(Unreadable) as caught:
            ckpt_cli.detect(tmp_path / "my run")
        assert f"pass '{tmp_path / 'my run' / 'first one'}' if that is the save you mean" in (caught.value.hint or "")

    def test_where_it_is_a_link_that_leads_nowhere(self, tmp_path: Path) -> None:
        save(tmp_path / "run" / "first", 1)
        (tmp_path / "run" / "second").symlink_to("/gone/second")
        with pytest.raises(Unreadable, match="does not exist"):
            ckpt_cli.detect(tmp_path / "run")

    def test_where_another_one_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for tag in ("first", "second"):
            save(tmp_path / "run" / tag, 1)
        (tmp_path / "run" / "latest").write_text("first")
        refused_below("second", monkeypatch, PermissionError(13, "Permission denied"))
        (text,) = warnings(tmp_path / "run", "unread")
        assert text.startswith("second beside first/ was not read, and may be newer")

    @pytest.mark.parametrize("name", ["logs", "wandb", "tokenizer.json", "old_run"])
    def test_what_is_no_save_by_its_name(self, name: str, tmp_path: Path) -> None:
        save(tmp_path / "run" / "first", 1)
        (tmp_path / "run" / name).symlink_to("/gone")
        assert warnings(tmp_path / "run", "unread") == []


# -- latest cannot be read ---------------------------------------------------------------------------------------------


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracker files that the system does not let anybody read."""

    def refused(path: Path, limit: int) -> bytes:
        raise Unreadable("the file cannot be opened: Permission denied", path=path)

    monkeypatch.setattr("ckpt_cli.discover.tags.read_small", refused)


def test_of_several_saves_an_unreadable_latest_is_called_that(tmp_path: Path, closed: None) -> None:
    for name, number in (("best", 4), ("other", 5)):
        save(tmp_path / "run" / name, number, number)
    (tmp_path / "run" / "latest").write_text("other")
    with pytest.raises(Unreadable) as caught:
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    assert caught.value.path == str(tmp_path / "run" / "latest")
    assert "2 saves in this folder: best, other; which of them is meant is in a file that was not read: " in caught.value.message
    assert caught.value.hint == f"make it readable, or pass {tmp_path / 'run' / 'other'}, or another of them"
    assert value(tmp_path / "run" / "other", tmp_path / "out") == 5


def test_a_latest_that_names_none_of_several_saves_is_told(tmp_path: Path) -> None:
    for name, number in (("best", 4), ("other", 5)):
        save(tmp_path / "run" / name, number, number)
    (tmp_path / "run" / "latest").write_text("lost")
    with pytest.raises(Undecidable) as caught:
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    assert caught.value.expected == "a file latest that names one of them, not lost"


def test_beside_one_save_an_unreadable_latest_is_a_warning(tmp_path: Path, closed: None) -> None:
    save(tmp_path / "run" / "other", 5)
    (tmp_path / "run" / "latest").write_text("lost")
    (text,) = warnings(tmp_path / "run", "unread")
    assert text == "latest beside other/ was not read, and may name another save: the file cannot be opened: Permission denied"


@pytest.mark.parametrize("tracker", ["latest", "latest_checkpointed_iteration.txt", "checkpoint_tracker.json"])
def test_an_unreadable_tracker_beside_steps_is_a_warning(tmp_path: Path, tracker: str, closed: None) -> None:
    for number in (3, 6):
        save(tmp_path / "run" / f"global_step{number}", number)
    (tmp_path / "run" / tracker).write_text("3")
    (text,) = warnings(tmp_path / "run", "unread")
    assert text.startswith(f"{tracker} was not read, and may name another step (the file cannot be opened: Permission denied)")
    assert not [note for note in ckpt_cli.detect(tmp_path / "run", step=3).checkpoint.notes if note.code == "unread"]
