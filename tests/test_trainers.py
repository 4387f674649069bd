"""The table of trainers: a tiny checkpoint for every row, made by torch and safetensors, is found from every folder that people pass."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, MissingShard, NotRecognised, PartOfSet, Undecidable
from ckpt_cli.formats.trainers import CERTAIN, THE_RUN, TRAINERS, Trainer
from ckpt_cli.names import Naming
from tests.tensors import Tensors, differences, load

DOCS = Path(__file__).parents[1] / "docs" / "formats.md"
BEGIN, END = "<!-- trainers: begin -->\n", "<!-- trainers: end -->\n"
STEP = 7


def model(seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {
        "embed.weight": torch.randn(9, 4),
        "layers.0.proj.weight": torch.randn(3, 4).to(torch.bfloat16),
        "layers.0.norm.weight": torch.ones(4),
        "counts": torch.arange(3),
    }


GROUPS = [{"lr": 0.5, "params": ["embed.weight"]}]
OPTIMIZER = {"optimizer": {"state": {"embed.weight": {"exp_avg": torch.arange(36.0).view(9, 4)}}, "param_groups": GROUPS}}

# -- a tree for a row ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A checkpoint of a row: the ``paths`` that people may pass, and what must come out."""

    run: Path
    step: Path | None
    home: Path
    weights: Path
    expected: Tensors

    @property
    def paths(self) -> list[Path]:
        run = [] if self.step is None else [self.run, self.step]
        between = [folder for folder in self.weights.parents if folder.is_relative_to(self.home)]
        return list(dict.fromkeys((*run, *reversed(between), self.weights)))


def named(form: str, step: int = STEP) -> str:
    """A name of a form: "iter_NNN" is "iter_007"."""
    text = re.sub(r"(?<![A-Z])N+(?![A-Z])", lambda found: f"{step:0{len(found[0])}d}", form)
    return re.sub(r"(?<![A-Z])[EB](?![A-Z])", "2", text)


def nested(keys: str, wrapper: str, state: Tensors) -> dict[str, Any]:
    inner: dict[str, Any] = {f"{wrapper}{name}": tensor for name, tensor in state.items()}
    for key in reversed(keys.split(".") if keys else []):
        inner = {key: inner}
    return inner


def write(row: Trainer, kind: str, folder: Path, data: Path) -> Tensors:
    """Weights of a row in one of its formats, written by the library that trainers use. Returns the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    state = model()
    if kind == "dcp":
        dcp.save(nested(row.keys[0] if row.keys else "", row.wrapper, state), checkpoint_id=str(folder), no_dist=True)
    elif kind == "hub-shards":
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True), no_dist=True)
    elif kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif kind == "torch-file" and row.name in ("ColossalAI", "Open-Sora"):
        in_parts(state, folder)
    elif kind == "torch-file":
        names = {"accelerate": "pytorch_model_fsdp.bin", "litgpt": "lit_model.pth", "torch.save": "model.pt"}
        torch.save(nested(row.keys[0] if row.keys else "", "", state), folder / names.get(row.name, "pytorch_model.bin"))
    elif kind == "torch-checkpointing":
        save = data / "torch-checkpointing" / "fsdp-2"
        shutil.copytree(save / "run" / "checkpoint" / "step-3", folder, dirs_exist_ok=True)
        return load(save / "expected.safetensors")
    elif kind == "deepspeed":
        save = data / "deepspeed" / "z3-bf16-w2-offload"
        shutil.copytree(save / "run" / "global_step3", folder, dirs_exist_ok=True)
        return load(save / "expected.safetensors")
    elif kind.startswith("megatron"):
        is_legacy = kind == "megatron-legacy"
        case = data / "megatron" / ("legacy-qwen2-te-tp2" if is_legacy else "verl2-qwen3-tp2-pp2")
        inner = "iter_0000005" if is_legacy else "global_step_5/actor/model/dist_ckpt"
        shutil.copytree(case / "checkpoint" / inner, folder, dirs_exist_ok=True)
        return load(case / ("expected_hf.safetensors" if is_legacy else "expected_native.safetensors"))
    else:
        source = data / "torch-2.13.0" / "fsdp2"
        for rank in range(4):
            names = {"BAGEL fork": f"model_rank{rank:05d}.pt", "accelerate": f"pytorch_model_fsdp_rank{rank}.bin"}
            names["Hugging Face Trainer"] = names["accelerate"]
            own = f"checkpoint_rank_{rank}.pt" if kind == "self-describing" else f"model_world_size_4_rank_{rank}.pt"
            shutil.copy(source / f"model_world_size_4_rank_{rank}.pt", folder / names.get(row.name, own))
        return load(source / "expected.safetensors")
    return state


def in_parts(state: Tensors, folder: Path) -> None:
    """Several files with an index, named as ColossalAI does."""
    files = {name: f"pytorch_model-0000{1 + index % 2}.bin" for index, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({name: tensor for name, tensor in state.items() if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def build(row: Trainer, kind: str, weights: str, base: Path, data: Path, step: int = STEP, role: str = "") -> Tree:
    """The checkpoint of a row, with everything that the row says there is, and with an optimizer that must not be taken for the model."""
    run = base / "experiment"
    steps = run / (row.run or (row.runs[0] if row.runs else ""))
    checkpoint = steps / named(row.steps[0], step) if row.steps else steps / "saved"
    role = role or row.role.split("|")[0]
    home = checkpoint / role if role else checkpoint
    folder = home / named(weights, 0)
    expected = write(row, kind, folder, data)
    for name in row.inside:
        if not (folder / name).exists():
            content = model(1) if name.endswith(".safetensors") else None
            save_file(content, folder / name) if content is not None else (folder / name).write_bytes(b"{}")
    if "meta.pt" in row.inside:
        torch.save({"epoch": 1}, folder / "meta.pt")
    for name in row.beside:
        if "." in name:
            (checkpoint / name).write_text(json.dumps({"global_step": step}))
        else:
            (checkpoint / name).mkdir(exist_ok=True)
    for name in row.optimizers:
        dcp.save(OPTIMIZER, checkpoint_id=str(home / named(name, 0)), no_dist=True)
    for name in row.states:
        (home / name).mkdir(parents=True, exist_ok=True)
        torch.save({"last_epoch": 3}, home / name / "rng.pt")
    if row.own and row.own[0] not in (*row.trackers, *row.states):
        torch.save({"epoch": 2}, checkpoint / row.own[0])
    if row.finished:
        (home / row.finished).write_text("{}")
    for name in row.trackers:
        track(steps, name, checkpoint, step)
    for name in row.in_run:
        track(steps, name, checkpoint, step)
    return Tree(run if row.steps else checkpoint, checkpoint if row.steps else None, home, folder, expected)


def track(steps: Path, name: str, checkpoint: Path, step: int) -> None:
    path = steps / name
    if path.is_symlink():
        path.unlink()
    if name.endswith(".json"):
        path.write_text(json.dumps({"last_global_step": step}))
    elif name.endswith(".txt"):
        path.write_text(checkpoint.name if name.isupper() or name == "LATEST.txt" else str(step))
    else:
        path.symlink_to(checkpoint.name)


CASES = [
    (index, kind, weights)
    for index, row in enumerate(TRAINERS)
    for kind in row.formats
    for weights in row.weights or ("",)
    # lmms-engine's and the fork's averages are components of their own; shards of safetensors have no keys above them.
    if "ema" not in weights
    if not (kind == "safetensors" and "dist_ckpt" in weights) and not (kind == "megatron-dist" and "huggingface" in weights)
    if not (row.name == "RLinf" and (kind == "torch-file") != (weights == "model_state_dict"))
]


def title(case: tuple[int, str, str]) -> str:
    index, kind, weights = case
    return f"{index}-{TRAINERS[index].name}-{kind}-{weights}".replace(" ", "_").replace("/", "+")


@pytest.mark.parametrize("case", CASES, ids=title)
def test_a_checkpoint_is_found_from_every_folder_of_its_tree(case: tuple[int, str, str], tmp_path: Path, data: Path) -> None:
    index, kind, weights = case
    row = TRAINERS[index]
    # Files of Megatron and DeepSpeed say their step; those of Megatron need a config for names of the hub.
    step = 5 if kind.startswith("megatron") else 3 if kind == "deepspeed" else STEP
    names: Naming = "native" if kind == "megatron-dist" else "hub"
    tree = build(row, kind, weights, tmp_path, data, step)
    for number, path in enumerate(tree.paths):
        result = ckpt_cli.detect(path)
        found = result.checkpoint
        assert (result.problem, found.step) == (None, step if row.steps else None), path
        assert [note.code for note in found.notes if note.level == "warning" and note.code != "unproven-end"] == [], path
        ckpt_cli.merge(path, tmp_path / f"out-{number}", names=names)
        assert differences(load(tmp_path / f"out-{number}"), tree.expected) == [], path
        assert ckpt_cli.verify(tmp_path / f"out-{number}", against=path).exit_code == 0
        if path in (tree.run, tree.step):
            assert found.framework == row.name


IN_ROLES = [case for case in CASES if case[2] and not TRAINERS[case[0]].role and not case[1].startswith("megatron")]


@pytest.mark.parametrize("case", IN_ROLES, ids=title)
def test_the_same_in_a_role_folder(case: tuple[int, str, str], tmp_path: Path, data: Path) -> None:
    index, kind, weights = case
    tree = build(TRAINERS[index], kind, weights, tmp_path, data, role="actor")
    for number, path in enumerate(tree.paths):
        found = ckpt_cli.detect(path).checkpoint
        assert ([info.name for info in found.components], found.step) == (["actor"], STEP), path
        ckpt_cli.merge(path, tmp_path / f"out-{number}")
        assert differences(load(tmp_path / f"out-{number}"), tree.expected) == [], path


WITH_OPTIMIZER = [index for index, row in enumerate(TRAINERS) if "dcp" in row.formats and row.optimizers and "/" not in row.optimizers[0]]


@pytest.mark.parametrize("index", WITH_OPTIMIZER, ids=lambda index: TRAINERS[index].name)
def test_an_optimizer_in_its_own_folder_is_extracted(index: int, tmp_path: Path, data: Path) -> None:
    row = TRAINERS[index]
    tree = build(row, "dcp", row.weights[0] if row.weights else "", tmp_path, data)
    ckpt_cli.extract_state(tree.run, tmp_path / "state", optimizer=True)
    expected = {"state.embed.weight.exp_avg": torch.arange(36.0).view(9, 4)}
    assert differences(load(tmp_path / "state" / "optimizer.safetensors"), expected) == []


@pytest.mark.parametrize("index", [index for index, row in enumerate(TRAINERS) if row.trackers], ids=lambda index: TRAINERS[index].name)
def test_every_tracker_is_compared(index: int, tmp_path: Path, data: Path) -> None:
    row = TRAINERS[index]
    tree = build(row, row.formats[0], row.weights[0] if row.weights else "", tmp_path, data, step=8)
    assert tree.step is not None
    steps, older = tree.step.parent, tree.step.parent / named(row.steps[0], 5)
    shutil.copytree(tree.step, older)
    for name in row.trackers:
        track(steps, name, older, 5)
        codes = {note.code: note.text for note in ckpt_cli.detect(tree.run).checkpoint.notes if note.level == "warning"}
        assert codes["tracker"].startswith(f"{name} says 5"), name
        (steps / name).unlink()


def test_a_link_to_a_step_that_is_gone_is_said(tmp_path: Path, data: Path) -> None:
    row = next(row for row in TRAINERS if "LATEST" in row.trackers)
    tree = build(row, "dcp", row.weights[0], tmp_path, data)
    assert tree.step is not None
    for name in row.trackers:
        track(tree.step.parent, name, tree.step.parent / "epoch_2_step_9", 9)
    told = [note.text for note in ckpt_cli.detect(tree.run).checkpoint.notes if note.code == "tracker" and note.level == "warning"]
    assert [text.split(" says ")[0] for text in told] == ["LATEST", "LATEST.txt"]
    assert all("that step is not there" in text for text in told)


@pytest.mark.parametrize("place", [THE_RUN, "the step", "the weights"])
@pytest.mark.parametrize(
    "index", [index for index, row in enumerate(TRAINERS) if row.weights and row.steps], ids=lambda index: TRAINERS[index].name
)
def test_a_config_is_found_wherever_it_lies(index: int, place: str, tmp_path: Path, data: Path) -> None:
    row = TRAINERS[index]
    tree = build(row, row.formats[0], row.weights[0], tmp_path, data)
    assert tree.step is not None
    folder = {THE_RUN: tree.run, "the step": tree.step, "the weights": tree.weights}[place]
    (folder / "config.json").write_text('{"model_type": "own"}')
    (folder / "tokenizer.json").write_text("{}")
    found = ckpt_cli.detect(tree.run).checkpoint
    assert found.assets == ("config.json", "tokenizer.json")
    notes = [note.text for note in found.notes if note.code == "assets-of-run"]
    assert bool(notes) == (place == THE_RUN)
    assert all(str(tree.run) in text for text in notes)


@pytest.mark.parametrize(
    ("index", "name"),
    [(index, name) for index, row in enumerate(TRAINERS) for name in row.config if name != THE_RUN and row.steps],
    ids=lambda value: TRAINERS[value].name if isinstance(value, int) else value,
)
def test_a_config_of_the_row_is_found(index: int, name: str, tmp_path: Path, data: Path) -> None:
    row = TRAINERS[index]
    tree = build(row, row.formats[0], row.weights[0] if row.weights else "", tmp_path, data)
    assert tree.step is not None
    in_run = name.startswith(f"{THE_RUN}/")
    folder = tree.run / name.removeprefix(f"{THE_RUN}/") if in_run else Path(os.path.normpath(tree.weights / name))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "own"}')
    assert "config.json" in ckpt_cli.detect(tree.step).checkpoint.assets


def test_a_tokenizer_that_lies_elsewhere_than_the_config_is_taken_too(tmp_path: Path, data: Path) -> None:
    row = next(row for row in TRAINERS if row.name == "NeMo RL")
    tree = build(row, "dcp", "weights", tmp_path, data)
    (tree.weights / ".hf_metadata").mkdir()
    (tree.weights / ".hf_metadata" / "config.json").write_text('{"vocab_size": 9}')
    (tree.home / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tree.home / "tokenizer" / name).write_text("{}")
    found = ckpt_cli.detect(tree.run).checkpoint
    assert (found.assets, found.lacking) == (("config.json", "tokenizer.json", "tokenizer_config.json"), ())


def test_the_step_that_lerobot_counts_is_compared_with_the_folder(tmp_path: Path, data: Path) -> None:
    row = next(row for row in TRAINERS if row.name == "lerobot")
    tree = build(row, "safetensors", "pretrained_model", tmp_path, data)
    (tree.home / "training_state" / "training_step.json").write_text(json.dumps({"step": STEP}))
    result = ckpt_cli.extract_state(tree.run, tmp_path / "state")
    assert [note.code for note in result.notes if note.level == "warning"] == []
    (tree.home / "training_state" / "training_step.json").write_text(json.dumps({"step": 6}))
    assert "step-differs" in [note.code for note in ckpt_cli.extract_state(tree.run, tmp_path / "other").notes]


# -- marks -----------------------------------------------------------------------------------------------------------


def unfinished(kind: str, tmp_path: Path, data: Path) -> Tree:
    row = next(row for row in TRAINERS if row.unfinished == ".incomplete")
    tree = build(row, kind, row.weights[0], tmp_path, data)
    assert tree.step is not None
    (tree.step / row.unfinished).write_text("")
    return tree


def test_a_save_in_progress_is_said_where_the_files_prove_the_weights(tmp_path: Path, data: Path) -> None:
    tree = unfinished("dcp", tmp_path, data)
    codes = {note.code: note.text for note in ckpt_cli.detect(tree.run).checkpoint.notes}
    assert ".incomplete says" in codes["unfinished"]


@pytest.mark.parametrize("command", ["merge", "average", "extract_state", "verify", "detect"])
def test_a_save_on_sigterm_that_was_killed_is_said(tmp_path: Path, command: str) -> None:
    """transformers leaves a file in the step until the save ended, which may go over an older one."""
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"a.weight": torch.ones(3, 3) * step}, folder / "model.safetensors")
        torch.save({"last_epoch": step}, folder / "scheduler.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (folder / "checkpoint-is-incomplete.txt").write_text("Checkpoint started at step 2 and in progress...")
    path = folder if command == "verify" else tmp_path / "run"
    given: dict[str, Any] = {"average": {"last": 2, "output": tmp_path / "out"}, "verify": {}, "detect": {}}.get(
        command, {"output": tmp_path / "out"}
    )
    result = getattr(ckpt_cli, command)(path, **given)
    notes = result.checkpoint.notes if command in ("merge", "detect", "average") else result.notes
    assert "checkpoint-is-incomplete.txt says that checkpoint-2 was not saved to its end" in str([note.text for note in notes])


def test_a_mark_beside_a_file_is_one_of_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo puts one beside a checkpoint until it is whole."""
    torch.save({"a.weight": torch.ones(3, 3)}, tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt-unfinished").write_text("")
    assert "unfinished" in {note.code for note in ckpt_cli.detect(tmp_path / "last.ckpt").checkpoint.notes}
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.ones(3, 3)}, "model.safetensors")
    assert ckpt_cli.verify(".").tensors == 1


def test_a_save_in_progress_is_refused_where_they_do_not(tmp_path: Path, data: Path) -> None:
    tree = unfinished("hub-shards", tmp_path, data)
    with pytest.raises(MissingShard, match=r"\.incomplete says"):
        ckpt_cli.merge(tree.run, tmp_path / "out")


def test_of_a_run_the_newest_step_that_was_saved_to_its_end_is_taken(tmp_path: Path, data: Path) -> None:
    tree = unfinished("hub-shards", tmp_path, data)
    assert tree.step is not None
    older = tree.step.parent / "epoch_2_step_5"
    shutil.copytree(tree.step, older)
    (older / ".incomplete").unlink()
    found = ckpt_cli.detect(tree.run).checkpoint
    assert found.step == 5
    assert any(note.code == "step-skipped" and ".incomplete" in note.text for note in found.notes)


PARTLY = [index for index, row in enumerate(TRAINERS) if row.partial]


@pytest.mark.parametrize("index", PARTLY, ids=lambda index: TRAINERS[index].name)
def test_a_newer_step_that_is_still_being_saved_is_named(index: int, tmp_path: Path, data: Path) -> None:
    row = TRAINERS[index]
    tree = build(row, row.formats[0], row.weights[0] if row.weights else "", tmp_path, data)
    assert tree.step is not None
    shutil.copytree(tree.step, tree.step.parent / f"{row.partial}{named(row.steps[0], 9)}")
    found = ckpt_cli.detect(tree.run).checkpoint
    assert found.step == STEP
    skipped = [note.text for note in found.notes if note.code == "step-skipped"]
    assert skipped == [f"{row.partial}{named(row.steps[0], 9)} is skipped: its name says that the save did not finish"]


def test_a_mark_that_is_written_last_is_missed(tmp_path: Path, data: Path) -> None:
    row = next(row for row in TRAINERS if row.finished)
    tree = build(row, "dcp", row.weights[0], tmp_path, data)
    (tree.home / row.finished).unlink()
    codes = {note.code: note.text for note in ckpt_cli.detect(tree.run).checkpoint.notes}
    assert codes["unfinished"].startswith("ckpt_contents.json, which is written last, is not in")


def shown_elsewhere(folder: Path, where: Path) -> list[Path]:
    """Links to a folder, to the one above it as part of a path, and a folder of links to its files."""
    (where / "direct").symlink_to(folder)
    (where / "above").symlink_to(folder.parent)
    (where / "each").mkdir()
    for path in folder.iterdir():
        (where / "each" / path.name).symlink_to(path)
    return [where / "direct", where / "above" / folder.name, where / "each", where / "direct" / next(folder.iterdir()).name]


def test_a_save_in_progress_is_refused_through_links(tmp_path: Path, data: Path) -> None:
    tree = unfinished("hub-shards", tmp_path, data)
    assert tree.step is not None
    for path in shown_elsewhere(tree.step / "model", tmp_path):
        with pytest.raises(MissingShard, match=r"\.incomplete says"):
            ckpt_cli.merge(path, tmp_path / "out")


def test_a_save_in_progress_is_refused_in_the_current_folder(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = unfinished("hub-shards", tmp_path, data)
    assert tree.step is not None
    for folder, path in ((tree.step, "model"), (tree.step / "model", "."), (tree.step.parent, tree.step.name)):
        monkeypatch.chdir(folder)
        with pytest.raises(MissingShard, match=r"\.incomplete says"):
            ckpt_cli.merge(Path(path), tmp_path / "out")


def test_a_mark_that_is_written_last_is_missed_through_links(tmp_path: Path, data: Path) -> None:
    row = next(row for row in TRAINERS if row.finished)
    tree = build(row, "dcp", row.weights[0], tmp_path, data)
    (tree.home / row.finished).unlink()
    for path in shown_elsewhere(tree.home / row.weights[0], tmp_path):
        codes = {note.code: note.text for note in ckpt_cli.detect(path).checkpoint.notes}
        assert codes["unfinished"].startswith("ckpt_contents.json, which is written last, is not in"), path


@pytest.mark.parametrize("index", PARTLY, ids=lambda index: TRAINERS[index].name)
def test_a_step_whose_name_says_that_it_is_being_saved_is_no_whole_one(index: int, tmp_path: Path, data: Path) -> None:
    """Given itself, and through links."""
    row = TRAINERS[index]
    tree = build(row, row.formats[0], row.weights[0] if row.weights else "", tmp_path, data)
    assert tree.step is not None
    partly = tree.step.rename(tree.step.parent / f"{row.partial}{tree.step.name}")
    weights = partly / tree.home.relative_to(tree.step) / (row.weights[0] if row.weights else "")
    for path in (partly, *shown_elsewhere(weights, tmp_path)[:-1]):
        codes = {note.code: note.text for note in ckpt_cli.detect(path).checkpoint.notes}
        assert codes["unfinished"].startswith(f"the name of {partly.name} says that the save did not finish"), path


def test_a_link_shows_the_step_the_trainer_and_the_role(tmp_path: Path, data: Path) -> None:
    row = next(row for row in TRAINERS if row.name == "lerobot")
    tree = build(row, "safetensors", "pretrained_model", tmp_path, data)
    assert tree.step is not None
    (tmp_path / "it").symlink_to(tree.step / "pretrained_model")
    for path in (tree.step.parent / "last", tree.step.parent / "last" / "pretrained_model", tmp_path / "it"):
        found = ckpt_cli.detect(path).checkpoint
        assert (found.step, found.framework) == (STEP, "lerobot"), path
    other = tmp_path / "other"
    other.mkdir()
    verl = build(next(row for row in TRAINERS if row.name == "verl"), "rank-shards", "", other, data, role="critic")
    (tmp_path / "one").symlink_to(verl.home)
    found = ckpt_cli.detect(tmp_path / "one").checkpoint
    assert (found.step, [info.name for info in found.components]) == (STEP, ["critic"])


# -- folders that no row has -----------------------------------------------------------------------------------------


def some_step(tmp_path: Path) -> Path:
    step = tmp_path / "run" / "global_step_7"
    step.mkdir(parents=True)
    return step


@pytest.mark.parametrize("name", ["anything", "my_net", "anything/deeper", "policy/whatever"])
def test_the_only_folder_with_weights_is_meant_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    step = some_step(tmp_path)
    dcp.save(model(), checkpoint_id=str(step / name), no_dist=True)
    (step / "logs").mkdir()
    for number, path in enumerate((step.parent, step, step / name)):
        ckpt_cli.merge(path, tmp_path / f"out-{number}")
        assert differences(load(tmp_path / f"out-{number}"), model()) == []
    notes = {note.code: note.text for note in ckpt_cli.detect(step).checkpoint.notes}
    assert "the only folder with weights" in notes["between"]


def test_that_it_is_the_only_one_is_said_only_where_it_is(tmp_path: Path) -> None:
    step = some_step(tmp_path)
    for seed, name in enumerate(("anything", "ema")):
        dcp.save(model(seed), checkpoint_id=str(step / name), no_dist=True)
    notes = {note.code: note.text for note in ckpt_cli.detect(step).checkpoint.notes}
    assert notes["between"] == "model was read from anything/"


def test_of_two_folders_neither_is_meant(tmp_path: Path) -> None:
    step = some_step(tmp_path)
    for seed, name in enumerate(("one", "two")):
        dcp.save(model(seed), checkpoint_id=str(step / name), no_dist=True)
    with pytest.raises(Undecidable, match="nothing tells which of these in global_step_7/ is the model: one/, two/"):
        ckpt_cli.merge(step, tmp_path / "out")
    # An average beside them is not what is meant either.
    dcp.save(model(2), checkpoint_id=str(step / "ema"), no_dist=True)
    for component in (None, "ema"):
        with pytest.raises(Undecidable):
            ckpt_cli.merge(step, tmp_path / "out", type=component)


def test_a_folder_of_a_row_goes_before_others(tmp_path: Path) -> None:
    step = some_step(tmp_path)
    for seed, name in enumerate(("weights", "two")):
        dcp.save(model(seed), checkpoint_id=str(step / name), no_dist=True)
    ckpt_cli.merge(step, tmp_path / "out")
    assert differences(load(tmp_path / "out"), model(0)) == []


def test_two_folders_of_rows_are_a_warning(tmp_path: Path) -> None:
    step = some_step(tmp_path)
    dcp.save(model(), checkpoint_id=str(step / "dcp_checkpoint"), no_dist=True)
    (step / "model_state_dict").mkdir()
    torch.save(model(1), step / "model_state_dict" / "full_weights.pt")
    ckpt_cli.merge(step, tmp_path / "out")
    assert differences(load(tmp_path / "out"), model()) == []
    notes = {note.code: note.text for note in ckpt_cli.detect(step).checkpoint.notes if note.level == "warning"}
    assert "model_state_dict/ could be model too" in notes["passed-over"]


NO_MODELS = ["optimizer", "optim", "ref", "base_model", "lora_adapter", "rank0", "tp_rank_00", "vae", "critic_optimizer", ".cache"]


@pytest.mark.parametrize("name", NO_MODELS)
def test_an_optimizer_another_model_or_a_part_is_never_taken(tmp_path: Path, name: str) -> None:
    step = some_step(tmp_path)
    (step / name).mkdir()
    save_file(model(), step / name / "model.safetensors")
    with pytest.raises(CkptError):
        ckpt_cli.merge(step, tmp_path / "out")
    with pytest.raises(CkptError):
        ckpt_cli.merge(step.parent, tmp_path / "out")


def test_an_adapter_in_a_folder_is_not_the_model_of_a_step(tmp_path: Path) -> None:
    step = some_step(tmp_path)
    (step / "adapted").mkdir()
    save_file({"a.lora_A.weight": torch.ones(2, 3), "a.lora_B.weight": torch.ones(3, 2)}, step / "adapted" / "adapter_model.safetensors")
    with pytest.raises(CkptError):
        ckpt_cli.merge(step, tmp_path / "out")


def test_an_average_beside_the_model_is_a_component(tmp_path: Path) -> None:
    step = some_step(tmp_path)
    for seed, name in enumerate(("weights", "ema_model")):
        dcp.save(model(seed), checkpoint_id=str(step / name), no_dist=True)
    for seed, component in enumerate(("model", "ema")):
        ckpt_cli.merge(step, tmp_path / component, type=component)
        assert differences(load(tmp_path / component), model(seed)) == []


def test_an_average_alone_is_not_the_model(tmp_path: Path) -> None:
    step = some_step(tmp_path)
    dcp.save(model(), checkpoint_id=str(step / "ema"), no_dist=True)
    assert [info.name for info in ckpt_cli.detect(step).checkpoint.components] == ["ema"]


def test_an_average_in_the_step_does_not_hide_the_folder_of_the_model(tmp_path: Path) -> None:
    """Open-Sora: ema.pt beside model/."""
    step = tmp_path / "run" / "epoch0-global_step7"
    (step / "model").mkdir(parents=True)
    in_parts(model(), step / "model")
    torch.save(model(1), step / "ema.pt")
    for seed, component in enumerate(("model", "ema")):
        ckpt_cli.merge(step.parent, tmp_path / component, type=component)
        assert differences(load(tmp_path / component), model(seed)) == []
    found = ckpt_cli.detect(step).checkpoint
    assert (found.framework, [info.name for info in found.components]) == ("Open-Sora", ["model", "ema"])


def test_weights_right_in_the_step_go_before_folders(tmp_path: Path) -> None:
    step = some_step(tmp_path)
    save_file(model(), step / "model.safetensors")
    dcp.save(model(1), checkpoint_id=str(step / "weights"), no_dist=True)
    ckpt_cli.merge(step, tmp_path / "out")
    assert differences(load(tmp_path / "out"), model()) == []


def test_a_folder_without_steps_may_have_one_around_the_weights(tmp_path: Path) -> None:
    dcp.save(model(), checkpoint_id=str(tmp_path / "trial" / "recover_checkpoint"), no_dist=True)
    ckpt_cli.merge(tmp_path / "trial", tmp_path / "out")
    assert differences(load(tmp_path / "out"), model()) == []


def test_a_folder_of_many_others_is_not_searched(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / "many" / f"x{number}").mkdir(parents=True)
    dcp.save(model(), checkpoint_id=str(tmp_path / "many" / "x5" / "net"), no_dist=True)
    with pytest.raises(NotRecognised):
        ckpt_cli.merge(tmp_path / "many", tmp_path / "out")


def test_certain_folders_are_those_of_rows() -> None:
    assert set(CERTAIN) <= {name for row in TRAINERS for name in row.weights}


# -- files of ranks under other names --------------------------------------------------------------------------------

RANK_NAMES = ["checkpoint_rank_{}.pt", "rank{}.pt", "rank_{}.pt", "fsdp_shard_{}_of_4.pt", "model_{}.pt", "shard{}.bin"]

COUNTED = ["checkpoint_{}.pt", "ckpt-{}.pth"]
"""Names of files of ranks (torch.distributed.checkpoint._experimental) and of steps: what is in them tells."""


@pytest.mark.parametrize("form", [*RANK_NAMES, *COUNTED])
@pytest.mark.parametrize("mode", ["fsdp2", "fsdp2_tp", "fsdp1_sharded_tensor"])
def test_distributed_tensors_say_their_rank_whatever_the_file_is_called(tmp_path: Path, data: Path, form: str, mode: str) -> None:
    folder = ranks_as(form, mode, tmp_path, data)
    ckpt_cli.merge(folder, tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(data / "torch-2.13.0" / mode / "expected.safetensors")) == []


@pytest.mark.parametrize("form", [*RANK_NAMES, *COUNTED])
def test_a_missing_rank_is_named(tmp_path: Path, data: Path, form: str) -> None:
    folder = ranks_as(form, "fsdp2", tmp_path, data)
    (folder / form.format(2 + ("_of_" in form))).unlink()
    with pytest.raises(MissingShard, match="rank 2 of 4 is missing"):
        ckpt_cli.merge(folder, tmp_path / "out")


@pytest.mark.parametrize("form", RANK_NAMES)
def test_plain_tensors_stay_parts_of_a_set(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for number in range(4):
        torch.save(model(number), folder / form.format(number + ("_of_" in form)))
    with pytest.raises(PartOfSet):
        ckpt_cli.merge(folder, tmp_path / "out")


@pytest.mark.parametrize("form", COUNTED)
def test_counted_files_of_whole_models_are_no_ranks(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for number in range(3):
        torch.save({"model": model(0), "epoch": number}, folder / form.format(number))
    ckpt_cli.merge(folder / form.format(1), tmp_path / "out")
    with pytest.raises(CkptError) as caught:
        ckpt_cli.merge(folder, tmp_path / "all")
    assert caught.value.code == "not-recognised"


@pytest.mark.parametrize("form", [*RANK_NAMES, *COUNTED])
def test_renamed_files_of_ranks_are_refused(tmp_path: Path, data: Path, form: str) -> None:
    folder = ranks_as(form, "fsdp2", tmp_path, data)
    first = "_of_" in form
    one, two = folder / form.format(1 + first), folder / form.format(2 + first)
    one.rename(folder / "kept")
    two.rename(one)
    (folder / "kept").rename(two)
    with pytest.raises(CkptError) as caught:
        ckpt_cli.merge(folder, tmp_path / "out")
    assert caught.value.exit_code == 4


def test_one_file_stands_for_all_ranks(tmp_path: Path, data: Path) -> None:
    folder = ranks_as("rank{}.pt", "fsdp2", tmp_path, data)
    ckpt_cli.merge(folder / "rank2.pt", tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(data / "torch-2.13.0" / "fsdp2" / "expected.safetensors")) == []


def test_a_rank_file_may_hold_everything_else_too(tmp_path: Path, data: Path) -> None:
    """RLinf's: model, optimizer by name, scheduler and versions in one dict."""
    folder = tmp_path / "global_step_7" / "actor" / "local_shard_checkpoint"
    folder.mkdir(parents=True)
    source = data / "torch-2.13.0" / "fsdp2"
    for rank in range(4):
        weights = torch.load(source / f"model_world_size_4_rank_{rank}.pt", weights_only=False)
        sharded = {name: tensor for name, tensor in weights.items() if hasattr(tensor, "_local_tensor")}
        optimizer = {
            "state": {name: {"exp_avg": tensor} for name, tensor in sharded.items()},
            "param_groups": [{"lr": 0.5, "params": list(sharded)}],
        }
        content = {"model": weights, "optimizers": optimizer, "lr_scheduler": {"last_epoch": 7}, "fsdp_version": 2}
        torch.save(content, folder / f"checkpoint_rank_{rank}.pt")
    expected = load(source / "expected.safetensors")
    for number, path in enumerate((tmp_path, folder.parents[1], folder.parent, folder, folder / "checkpoint_rank_1.pt")):
        ckpt_cli.merge(path, tmp_path / f"out-{number}", step=7 if path == tmp_path else None)
        assert differences(load(tmp_path / f"out-{number}"), expected) == []
    result = ckpt_cli.extract_state(folder.parents[1], tmp_path / "state", optimizer=True)
    assert isinstance(result.scheduler, dict)
    assert (result.ranks, result.scheduler["last_epoch"], result.not_represented) == (4, 7, ())
    moments = load(tmp_path / "state" / "optimizer.safetensors")
    assert moments
    assert differences(moments, {f"state.{name}.exp_avg": expected[name] for name in sharded}) == []


def test_such_files_beside_steps_do_not_hide_these(tmp_path: Path) -> None:
    step = some_step(tmp_path)
    save_file(model(), step / "model.safetensors")
    for number in range(3):
        torch.save(model(number + 1), step.parent / f"model_{number}.pt")
    ckpt_cli.merge(step.parent, tmp_path / "out")
    assert differences(load(tmp_path / "out"), model()) == []


def test_a_save_of_torch_checkpointing_without_metadata_is_read(data: Path, tmp_path: Path) -> None:
    save = data / "torch-checkpointing" / "bare-2"
    for name, file in (("model", "expected.safetensors"), ("ema", "expected-ema.safetensors")):
        ckpt_cli.merge(save / "run", tmp_path / name, type=name)
        assert differences(load(tmp_path / name), load(save / file)) == []


def ranks_as(form: str, mode: str, tmp_path: Path, data: Path) -> Path:
    """Real rank files under other names; "of 4" counts from one."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(4):
        shutil.copy(data / "torch-2.13.0" / mode / f"model_world_size_4_rank_{rank}.pt", folder / form.format(rank + ("_of_" in form)))
    return folder


# -- the Hub cache ---------------------------------------------------------------------------------------------------


def cached(tmp_path: Path, commits: list[str], main: str | None) -> Path:
    repository = tmp_path / "hub" / "models--org--tiny"
    for seed, commit in enumerate(commits):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "blobs").mkdir(exist_ok=True)
        save_file(model(seed), repository / "blobs" / f"blob{seed}")
        (repository / "snapshots" / commit / "model.safetensors").symlink_to(f"../../blobs/blob{seed}")
    if main is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(main)
    return repository


@pytest.mark.parametrize("inner", ["", "snapshots"])
def test_the_root_of_a_cached_model_is_its_snapshot(tmp_path: Path, inner: str) -> None:
    commits = ["a" * 40, "b" * 40]
    path = cached(tmp_path, commits, commits[1]) / inner
    found = ckpt_cli.detect(path).checkpoint
    assert found.path.endswith("b" * 40)
    assert any(note.code == "snapshot" for note in found.notes)
    ckpt_cli.merge(path, tmp_path / "out")
    assert differences(load(tmp_path / "out"), model(1)) == []


def test_the_only_snapshot_needs_no_reference(tmp_path: Path) -> None:
    ckpt_cli.merge(cached(tmp_path, ["a" * 40], None), tmp_path / "out")
    assert differences(load(tmp_path / "out"), model()) == []


def test_nothing_is_written_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached(tmp_path, ["a" * 40], None)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(path.rglob("*"))
    ckpt_cli.merge(path)
    assert differences(load(tmp_path / "here" / "org--tiny_merged"), model()) == []
    assert sorted(path.rglob("*")) == before


def test_several_snapshots_without_a_reference_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Undecidable, match="2 snapshots"):
        ckpt_cli.merge(cached(tmp_path, ["a" * 40, "b" * 40], "c" * 40), tmp_path / "out")


# -- the documentation -----------------------------------------------------------------------------------------------


def table() -> str:
    """The rows as they stand in docs/formats.md, those of one trainer together; not those without folders of their own."""
    lines = [
        "| trainer | step folders | weights in | optimizer, state | newest, complete | config and tokenizer in |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row.name for row in TRAINERS):
        rows = [row for row in TRAINERS if row.name == name]
        cells = [
            listed(row.steps for row in rows),
            listed((*(f"{role}/" for role in row.role.split("|") if role), *row.weights) for row in rows),
            listed((*row.optimizers, *row.states) for row in rows),
            listed((*row.trackers, *filter(None, (row.unfinished, row.finished, row.partial and f"{row.partial}*"))) for row in rows),
            listed(row.config for row in rows),
        ]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def listed(names: Any) -> str:
    flat = dict.fromkeys(name for each in names for name in each)
    return ", ".join(name if name == THE_RUN else f"`{name}`" for name in flat)


def test_the_documentation_has_the_table() -> None:
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    inside, after = rest.split(END)
    if os.environ.get("GOLDEN_UPDATE"):
        DOCS.write_text(before + BEGIN + table() + END + after)
        return
    assert inside == table()


OF_OTHERS = [(index, kind) for index, row in enumerate(TRAINERS) if row.own for kind in row.formats if kind != "torch-file"]


@pytest.mark.parametrize("case", OF_OTHERS, ids=lambda case: f"{TRAINERS[case[0]].name}-{case[1]}".replace(" ", "_"))
def test_a_name_of_steps_that_others_use_too_is_no_sign_of_a_trainer(case: tuple[int, str], tmp_path: Path) -> None:
    """Weights right in folders of such names, or in ``model``, beside nothing of the trainer's own."""
    index, kind = case
    row = TRAINERS[index]
    for step in (STEP, STEP + 1):
        write(row, kind, tmp_path / "run" / named(row.steps[0], step) / ("model" if "model" in row.weights else ""), tmp_path)
    found = ckpt_cli.detect(tmp_path / "run").checkpoint
    assert (found.step, found.framework in {"torch DCP", "torch DCP, Hugging Face storage", "Hugging Face"}) == (STEP + 1, True)
    for name in row.own:
        own = tmp_path / "run" / named(row.steps[0], STEP + 1) / name
        own.mkdir()
        assert ckpt_cli.detect(tmp_path / "run").checkpoint.framework == row.name, name
        own.rmdir()


def test_the_folder_of_weights_tells_steps_of_xtuner(tmp_path: Path) -> None:
    row = next(row for row in TRAINERS if row.name == "xtuner")
    write(row, "dcp", tmp_path / "run" / "epoch-2-step-7", tmp_path)
    assert ckpt_cli.detect(tmp_path / "run").checkpoint.framework == "torch DCP"
