"""From what a user types to a checkpoint: every level of a run resolves, and what does not is answered with what was meant."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt_cli.discover.components import component_names
from ckpt_cli.discover.found import Target, Tracker
from ckpt_cli.discover.locate import locate
from ckpt_cli.errors import NotFound, NotRecognised, Unreadable, UsageError
from tests.conftest import Copy


@pytest.fixture
def verl(layouts: Path) -> Path:
    """Steps 10 (actor and critic), 20 and 30 (actor; rank 2 is missing)."""
    return layouts / "verl-run" / "run"


@pytest.fixture
def lmms(layouts: Path) -> Path:
    """Checkpoints 100 and 200, each with model and EMA."""
    return layouts / "lmms-run" / "run"


def summary(target: Target) -> list[tuple[str, int | None, list[str]]]:
    return [(found.path.name, found.step, [place.name for place in found.places]) for found in target.checkpoints]


class TestEveryLevelResolves:
    def test_a_run_is_its_steps_oldest_first(self, verl: Path) -> None:
        target = locate(verl)
        assert target.run == verl
        assert summary(target) == [
            ("global_step_10", 10, ["actor", "critic"]),
            ("global_step_20", 20, ["actor"]),
            ("global_step_30", 30, ["actor"]),
        ]

    def test_a_step_folder_is_one_checkpoint(self, verl: Path) -> None:
        target = locate(verl / "global_step_10")
        assert target.run is None
        assert summary(target) == [("global_step_10", 10, ["actor", "critic"])]

    @pytest.mark.parametrize("role", ["actor", "critic"])
    def test_a_role_folder_is_one_component_of_its_step(self, verl: Path, role: str) -> None:
        target = locate(verl / "global_step_10" / role)
        assert summary(target) == [("global_step_10", 10, [role])]
        assert target.checkpoints[0].places[0].home == verl / "global_step_10" / role

    @pytest.mark.parametrize(("folder", "component"), [("pytorch_model_fsdp_0", "model"), ("pytorch_ema_model_fsdp_0", "ema")])
    def test_a_component_folder_is_one_component_of_its_checkpoint(self, lmms: Path, folder: str, component: str) -> None:
        target = locate(lmms / "checkpoint-100" / folder)
        assert summary(target) == [("checkpoint-100", 100, [component])]
        assert target.checkpoints[0].places[0].home == lmms / "checkpoint-100"

    @pytest.mark.parametrize(
        ("file", "component"),
        [
            ("verl-run/run/global_step_10/critic/model_world_size_4_rank_3.pt", "critic"),
            ("lmms-run/run/checkpoint-200/pytorch_ema_model_fsdp_0/model_world_size_4_rank_0.pt", "ema"),
            ("verl-others/supervised/global_step_10/model_world_size_4_rank_1.pt", "model"),
            ("bagel-runs/fork_ranks/0000006/model_rank00002.pt", "model"),
            ("bagel-runs/fork_ranks/0000006/ema_rank00002.pt", "ema"),
            ("plain-files/single/weights.safetensors", "model"),
        ],
    )
    def test_one_file_is_the_component_that_it_belongs_to(self, layouts: Path, file: str, component: str) -> None:
        (found,) = locate(layouts / file).checkpoints
        assert component_names(found, None) == [component]

    @pytest.mark.parametrize(
        ("folder", "step"),
        [
            ("global_step_7", 7),
            ("global_steps_7", 7),
            ("checkpoint-7", 7),
            ("step-7", 7),
            ("step_7", 7),
            ("step7", 7),
            ("0000007", 7),
            ("best", None),
            ("checkpoint-last", None),
        ],
    )
    def test_the_names_of_step_folders_of_many_trainers_are_known(self, data: Path, copy: Copy, folder: str, step: int | None) -> None:
        saved = copy("torch-2.13.0", "fsdp2")
        checkpoint = saved.rename(saved.parent / folder)
        assert summary(locate(checkpoint)) == [(folder, step, ["model"])]
        if step is not None:
            assert summary(locate(checkpoint.parent)) == [(folder, step, ["model"])]

    def test_steps_are_ordered_as_numbers(self, copy: Copy) -> None:
        run = copy("layouts", "lmms-run", "run")
        (run / "checkpoint-200").rename(run / "checkpoint-1000")
        (run / "checkpoint-100").rename(run / "checkpoint-900")
        assert [found.step for found in locate(run).checkpoints] == [900, 1000]

    def test_optimizer_and_other_state_is_no_component(self, verl: Path, lmms: Path, layouts: Path) -> None:
        assert (verl / "global_step_20" / "actor" / "optim_world_size_4_rank_0.pt").is_file()
        assert (lmms / "checkpoint-200" / "optimizer").is_dir()
        assert (layouts / "bagel-hybrid" / "run" / "0000006" / "optimizer_rank00000.pt").is_file()
        assert [place.name for place in locate(verl / "global_step_20").checkpoints[0].places] == ["actor"]
        assert [place.name for place in locate(lmms / "checkpoint-200").checkpoints[0].places] == ["model", "ema"]
        assert [place.name for place in locate(layouts / "bagel-hybrid" / "run").checkpoints[0].places] == ["model", "ema"]
        with pytest.raises(NotRecognised):
            locate(lmms / "checkpoint-200" / "optimizer")
        with pytest.raises(NotRecognised):
            locate(verl / "global_step_20" / "actor" / "optim_world_size_4_rank_0.pt")

    def test_a_relative_path_with_dots_is_the_folder_it_leads_to(self, verl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(verl / "global_step_10" / "actor")
        assert [found.step for found in locate("../..").checkpoints] == [10, 20, 30]
        assert [place.name for place in locate("../critic").checkpoints[0].places] == ["critic"]

    @pytest.mark.parametrize("role", ["actor", "critic"])
    def test_the_working_directory_is_the_component_that_it_is(self, verl: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
        monkeypatch.chdir(verl / "global_step_10" / role)
        assert [place.name for place in locate(".").checkpoints[0].places] == [role]

    def test_the_working_directory_is_the_step_that_it_is(self, verl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(verl / "global_step_20")
        assert locate(".").checkpoints[0].step == 20

    def test_shards_come_before_weights_that_were_merged_into_their_folder(self, copy: Copy, layouts: Path) -> None:
        folder = copy("torch-2.13.0", "fsdp2")
        (folder / "expected.safetensors").rename(folder / "model.safetensors")
        (place,) = locate(folder).checkpoints[0].places
        assert place.match.format == "rank-shards"


class TestWhatDoesNotResolve:
    @pytest.mark.parametrize(
        ("typed", "meant"),
        [
            ("rum", "run"),
            ("run/global_step_2", "run/global_step_20"),
            ("run/globalstep_20", "run/global_step_20"),
            ("run/global_step_10/actr", "run/global_step_10/actor"),
            ("run/global_step_10/critic/model_world_size_4_rank3.pt", "run/global_step_10/critic/model_world_size_4_rank_3.pt"),
        ],
    )
    def test_a_name_wrong_by_a_letter_is_answered_with_the_right_one(self, layouts: Path, typed: str, meant: str) -> None:
        with pytest.raises(NotFound) as caught:
            locate(layouts / "verl-run" / typed)
        assert caught.value.exit_code == 3
        assert caught.value.path == str(layouts / "verl-run" / typed)
        assert caught.value.hint == f"did you mean {layouts / 'verl-run' / meant}?"

    def test_a_path_whose_folder_is_not_there_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound) as caught:
            locate(tmp_path / "nowhere" / "run")
        assert caught.value.hint == f"{tmp_path / 'nowhere'} does not exist either"

    def test_nothing_is_proposed_for_a_name_like_no_other(self, layouts: Path) -> None:
        with pytest.raises(NotFound) as caught:
            locate(layouts / "verl-run" / "zzzzzzzz")
        assert caught.value.hint == f"nothing in {layouts / 'verl-run'} has a similar name"

    def test_an_impossible_path_is_simply_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            locate(tmp_path / "a\0b")

    @pytest.mark.parametrize("name", ["a" * 300, "loop"])
    def test_a_path_that_the_system_refuses_is_told_with_its_reason(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(Unreadable) as caught:
            locate(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
        assert caught.value.hint

    def test_an_empty_folder_is_called_empty(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        with pytest.raises(NotRecognised) as caught:
            locate(tmp_path / "run")
        assert caught.value.exit_code == 3
        assert caught.value.hint == "the folder is empty"

    def test_a_folder_of_other_things_is_answered_with_what_it_holds(self, tmp_path: Path) -> None:
        for name in ("b.txt", "a.txt"):
            (tmp_path / name).write_text("")
        with pytest.raises(NotRecognised) as caught:
            locate(tmp_path)
        assert caught.value.hint == "the folder holds a.txt, b.txt"

    def test_a_file_of_another_kind_is_answered_with_its_name(self, tmp_path: Path) -> None:
        (tmp_path / "run" / "src").mkdir(parents=True)
        for file in (tmp_path / "run" / "Main.java", tmp_path / "run" / "src" / "optimizer.txt"):
            file.write_text("")
            with pytest.raises(NotRecognised) as caught:
                locate(file)
            assert caught.value.hint == f"ckpt knows no file of weights with a name like {file.name}"

    def test_many_checkpoints_below_are_counted(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        for name in ("b", "a/deep"):
            shutil.copytree(run, run.parent / "several" / name)
        several = run.parent / "several"
        (several / "notes.txt").write_text("")
        for path, where in ((several, "below"), (several / "notes.txt", "beside it")):
            with pytest.raises(NotRecognised) as caught:
                locate(path)
            assert caught.value.hint == f"2 checkpoints {where}: b, a/deep"
        (several / "x" / "y").mkdir(parents=True)
        with pytest.raises(NotRecognised) as caught:
            locate(several)
        assert caught.value.hint == "at least 2 checkpoints below: b, a/deep"

    def test_of_more_folders_than_are_looked_into_it_is_said_that_there_may_be_more(
        self, copy: Copy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = copy("layouts", "verl-run", "run")
        for name in ("b", "c", "d"):
            shutil.copytree(run, run.parent / "several" / name)
        monkeypatch.setattr("ckpt_cli.discover.locate.MAX_LOOKED_INTO", 3)
        with pytest.raises(NotRecognised) as caught:
            locate(run.parent / "several")
        assert caught.value.hint == "at least 2 checkpoints below: b, c"

    def test_the_folder_above_a_run_is_answered_with_the_run(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        with pytest.raises(NotRecognised) as caught:
            locate(run.parent)
        assert caught.value.hint == f"did you mean {run}?"

    def test_the_config_folder_of_an_actor_is_answered_with_the_actor(self, verl: Path) -> None:
        with pytest.raises(NotRecognised) as caught:
            locate(verl / "global_step_20" / "actor" / "huggingface")
        assert caught.value.hint == f"did you mean {verl / 'global_step_20' / 'actor'}?"

    def test_a_side_file_is_answered_with_the_checkpoint_that_it_lies_in(self, verl: Path, lmms: Path) -> None:
        for file in (verl / "global_step_20" / "actor" / "fsdp_config.json", lmms / "checkpoint-200" / "config.json"):
            with pytest.raises(NotRecognised) as caught:
                locate(file)
            assert caught.value.hint == f"did you mean {file.parent}?"

    def test_a_step_folder_without_weights_is_no_step(self, copy: Copy) -> None:
        run = copy("layouts", "lmms-run", "run")
        (run / "checkpoint-300").mkdir()
        (run / "checkpoint-300" / "config.json").write_text("{}")
        assert [found.step for found in locate(run).checkpoints] == [100, 200]


class TestSteps:
    @pytest.mark.parametrize("step", [10, 20, 30])
    def test_a_step_is_picked_by_its_number(self, verl: Path, step: int) -> None:
        assert [found.step for found in locate(verl, step).checkpoints] == [step]

    def test_a_step_that_is_not_there_is_answered_with_those_that_are(self, verl: Path) -> None:
        with pytest.raises(NotFound) as caught:
            locate(verl, 40)
        assert "40" in caught.value.message
        assert caught.value.expected == "one of the steps 10, 20, 30"

    @pytest.mark.parametrize("inside", [".", "actor", "actor/model_world_size_4_rank_0.pt"])
    def test_the_step_of_a_checkpoint_may_be_said_again(self, verl: Path, inside: str) -> None:
        path = verl / "global_step_20" / inside
        assert [found.step for found in locate(path, 20).checkpoints] == [20]

    @pytest.mark.parametrize("inside", [".", "actor", "actor/model_world_size_4_rank_0.pt"])
    def test_another_step_than_that_of_the_checkpoint_is_refused(self, verl: Path, inside: str) -> None:
        with pytest.raises(NotFound, match="no step 10"):
            locate(verl / "global_step_20" / inside, 10)

    def test_two_folders_of_one_step_are_ambiguous(self, copy: Copy) -> None:
        run = copy("layouts", "lmms-run", "run")
        (run / "checkpoint-100").rename(run / "checkpoint-0200")
        with pytest.raises(UsageError, match="checkpoint-0200, checkpoint-200") as caught:
            locate(run, 200)
        assert caught.value.exit_code == 2

    def test_tracker_files_are_hints(self, verl: Path) -> None:
        assert locate(verl).trackers == (Tracker("latest_checkpointed_iteration.txt", 30),)

    @pytest.mark.parametrize("content", [b"", b"latest", b"\xff\xfe", b"-3", "\u0663".encode()])
    def test_a_tracker_that_makes_no_sense_says_nothing(self, copy: Copy, content: bytes) -> None:
        run = copy("layouts", "verl-run", "run")
        (run / "latest_checkpointed_iteration.txt").write_bytes(content)
        assert locate(run).trackers == ()


class TestTypes:
    """`--type` takes the names that `detect` lists, and words that people use for them."""

    @pytest.mark.parametrize(
        ("type", "names"),
        [
            (None, ["model"]),
            ("model", ["model"]),
            ("regular", ["model"]),
            ("main", ["model"]),
            ("ema", ["ema"]),
            ("both", ["model", "ema"]),
            ("all", ["model", "ema"]),
        ],
    )
    def test_of_a_checkpoint_with_an_average(self, lmms: Path, type: str | None, names: list[str]) -> None:
        assert component_names(locate(lmms / "checkpoint-200").checkpoints[0], type) == names

    @pytest.mark.parametrize(
        ("type", "names"),
        [
            (None, ["actor"]),
            ("model", ["actor"]),
            ("regular", ["actor"]),
            ("main", ["actor"]),
            ("actor", ["actor"]),
            ("critic", ["critic"]),
            ("all", ["actor", "critic"]),
        ],
    )
    def test_of_a_checkpoint_with_roles(self, verl: Path, type: str | None, names: list[str]) -> None:
        assert component_names(locate(verl / "global_step_10").checkpoints[0], type) == names

    @pytest.mark.parametrize("type", [None, "critic", "all"])
    def test_of_a_checkpoint_with_a_critic_alone(self, layouts: Path, type: str | None) -> None:
        (found,) = locate(layouts / "verl-others" / "value_head").checkpoints
        assert component_names(found, type) == ["critic"]

    @pytest.mark.parametrize(("type", "lacks"), [("ema", "ema"), ("both", "ema"), ("value", "value"), ("Actor", "Actor"), ("", "")])
    def test_a_component_that_is_not_there_is_answered_with_those_that_are(self, verl: Path, type: str, lacks: str) -> None:
        with pytest.raises(NotFound, match=f"no component {lacks}") as caught:
            component_names(locate(verl / "global_step_10").checkpoints[0], type)
        assert caught.value.expected == "one of: actor, critic"
        assert caught.value.path == str(verl / "global_step_10")


def test_a_folder_that_would_be_refused_is_not_suggested(tmp_path: Path) -> None:
    """Beside it lie files of two saves, so that the folder above holds such a checkpoint."""
    (tmp_path / "run" / "global_step5").mkdir(parents=True)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (tmp_path / "run" / "global_step5" / name).touch()
    (tmp_path / "run" / "notes").mkdir()
    (tmp_path / "run" / "notes" / "a.txt").touch()
    with pytest.raises(NotRecognised) as caught:
        locate(tmp_path / "run" / "notes")
    assert caught.value.hint == "the folder holds a.txt"
