"""torch_checkpointing: files that the library wrote, on 1, 2 and 4 ranks, as .pt and as .safetensors, and damage to them."""

from __future__ import annotations

import json
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import (
    CkptError,
    CorruptFile,
    IncompleteError,
    Inconsistent,
    MissingShard,
    NotFound,
    PartOfSet,
    Undecidable,
    Unsupported,
)
from ckpt_cli.formats.torch_checkpointing.reader import TorchCheckpointing
from tests.formats.conformance import Example, FormatConformance, everything_said_by
from tests.tensors import differences, load

STEP = Path("run", "checkpoint", "step-3")
WHOLE = ("one-1", "fsdp-2", "fsdp-4", "hsdp-4", "tp-4", "tponly-2", "st-one-1", "st-fsdp-4", "st-tp-4", "st-boxes-2", "layout-2")
WITH_EMA = ("fsdp-4", "tp-4", "st-fsdp-4", "st-tp-4", "layout-2")
WITH_STATE = tuple(case for case in WHOLE if case != "st-boxes-2")


@pytest.fixture
def saves(data: Path) -> Path:
    return data / "torch-checkpointing"


@pytest.fixture
def step(saves: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the step folder of a case, to be damaged."""

    def copied(case: str) -> Path:
        run = Path(shutil.copytree(saves / case / "run", tmp_path / "copy" / "run"))
        return run / "checkpoint" / "step-3"

    return copied


class TestTorchForm(FormatConformance):
    reader = TorchCheckpointing()

    def example(self, data: Path) -> Example:
        home = data / "torch-checkpointing" / "tp-4"
        return Example(home / STEP, home / "expected.safetensors")


class TestSafetensorsForm(FormatConformance):
    reader = TorchCheckpointing()

    def example(self, data: Path) -> Example:
        home = data / "torch-checkpointing" / "st-tp-4"
        return Example(home / STEP, home / "expected.safetensors")


class TestSecondItem(FormatConformance):
    reader = TorchCheckpointing()
    component = "ema"

    def example(self, data: Path) -> Example:
        home = data / "torch-checkpointing" / "fsdp-4"
        return Example(home / STEP, home / "expected-ema.safetensors")


# -- whole saves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("given", [Path("run"), Path("run", "checkpoint"), STEP], ids=["run", "checkpoint", "step"])
def test_every_tensor_is_that_of_the_training(saves: Path, tmp_path: Path, case: str, given: Path) -> None:
    ckpt_cli.merge(saves / case / given, tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(saves / case / "expected.safetensors")) == []
    assert ckpt_cli.verify(tmp_path / "out", against=saves / case / given).exit_code == 0


@pytest.mark.parametrize("case", WITH_EMA)
def test_another_item_is_a_component(saves: Path, tmp_path: Path, case: str) -> None:
    ckpt_cli.merge(saves / case / "run", tmp_path / "out", type="ema")
    assert differences(load(tmp_path / "out"), load(saves / case / "expected-ema.safetensors")) == []


@pytest.mark.parametrize("case", WHOLE)
def test_a_save_is_named_with_its_items(saves: Path, case: str) -> None:
    result = ckpt_cli.detect(saves / case / "run")
    found = result.checkpoint
    assert (found.framework, found.step, result.problem) == ("torchtitan", 3, None)
    assert [info.name for info in found.components] == (["model", "ema"] if case in WITH_EMA else ["model"])
    assert found.components[0].world_size == int(case[-1])
    assert [note.code for note in found.notes if note.level == "warning"] == []


def test_the_mean_of_the_model_and_its_half_is_three_quarters(saves: Path, tmp_path: Path) -> None:
    for name in ("model", "ema"):
        ckpt_cli.merge(saves / "tp-4" / "run", tmp_path / name, type=name)
    ckpt_cli.average([saves / "tp-4" / "run", tmp_path / "ema"], tmp_path / "out")
    model, mean = load(saves / "tp-4" / "expected.safetensors"), load(tmp_path / "out")
    for name, tensor in model.items():
        if tensor.is_floating_point():
            exact = (tensor.numpy().astype(np.float64) + tensor.numpy().astype(np.float64) * 0.5) / 2
            assert np.array_equal(mean[name].numpy(), exact.astype(np.float32)), name


def test_one_file_of_an_item_means_that_item(saves: Path, tmp_path: Path) -> None:
    ckpt_cli.merge(saves / "fsdp-4" / STEP / "ema_2.pt", tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(saves / "fsdp-4" / "expected-ema.safetensors")) == []


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WITH_STATE)
def test_the_optimizer_is_that_of_the_training(saves: Path, tmp_path: Path, case: str) -> None:
    result = ckpt_cli.extract_state(saves / case / "run", tmp_path / "state", optimizer=True)
    expected = load(saves / case / "expected-optimizer.safetensors")
    assert differences(load(tmp_path / "state" / "optimizer.safetensors"), expected) == []
    assert result.notes == ()


@pytest.mark.parametrize("case", WITH_STATE)
def test_items_without_weights_are_training_state(saves: Path, tmp_path: Path, case: str) -> None:
    result = ckpt_cli.extract_state(saves / case / "run", tmp_path / "state")
    world = int(case[-1])
    training = result.training
    assert isinstance(training, dict)
    assert (result.ranks, result.not_represented, training["step"]) == (world, (), 3)
    extra = torch.load(tmp_path / "state" / "extra_state_merged.pt", weights_only=True)
    assert extra["lr_scheduler"]["last_epoch"] == 1
    assert extra["train_state"]["ntokens_seen"].item() == 3000
    assert ("settings" in extra) == (case == "layout-2")
    loaders = torch.load(tmp_path / "state" / "dataloader_state.pt", weights_only=True)
    assert [loaders[f"dataloader_rank_{rank}"]["dp_rank_0"]["position"] for rank in range(world)] == [10 + rank for rank in range(world)]


def test_a_rank_without_state_is_named(step: Callable[[str], Path], tmp_path: Path) -> None:
    folder = step("hsdp-4")
    for name in ("dataloader", "lr_scheduler", "step", "train_state"):
        (folder / f"{name}_3.pt").unlink()
    notes = {note.code: note.text for note in ckpt_cli.extract_state(folder, tmp_path / "state").notes}
    assert notes["missing-rank"].startswith("rank 3 of 4 is missing")


def test_an_optimizer_of_a_missing_rank_is_refused(step: Callable[[str], Path], tmp_path: Path) -> None:
    folder = step("fsdp-4")
    (folder / "optimizer_3.pt").unlink()
    with pytest.raises(MissingShard, match="rank 3 of 4 is missing"):
        ckpt_cli.extract_state(folder, tmp_path / "state", optimizer=True)


# -- missing, mixed, renamed -----------------------------------------------------------------------------------------


def refused(folder: Path, kind: type[CkptError], out: Path, **options: Any) -> CkptError:
    with pytest.raises(kind) as caught:
        ckpt_cli.merge(folder, out, **options)
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("case", ["fsdp-4", "tp-4", "st-fsdp-4", "st-tp-4"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_missing_rank_is_named_with_its_file(step: Callable[[str], Path], tmp_path: Path, case: str, rank: int) -> None:
    folder = step(case)
    file = next(folder.glob(f"model_{rank}.*"))
    file.unlink()
    error = refused(folder, MissingShard, tmp_path / "out")
    assert f"rank {rank} of 4 is missing" in error.message
    assert error.expected == str(file)


def test_replicas_stand_in_for_a_missing_rank(step: Callable[[str], Path], saves: Path, tmp_path: Path) -> None:
    folder = step("hsdp-4")
    (folder / "model_1.pt").unlink()
    result = ckpt_cli.merge(folder, tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(saves / "hsdp-4" / "expected.safetensors")) == []
    assert "replicas-only" in [note.code for note in result.checkpoint.notes]


@pytest.mark.parametrize("case", ["fsdp-4", "tp-4"])
def test_swapped_ranks_are_refused(step: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    folder = step(case)
    (folder / "model_1.pt").rename(folder / "kept")
    (folder / "model_2.pt").rename(folder / "model_1.pt")
    (folder / "kept").rename(folder / "model_2.pt")
    assert "model_" in everything_said_by(refused(folder, IncompleteError, tmp_path / "out"))


def test_files_and_metadata_of_two_saves_are_refused(step: Callable[[str], Path], saves: Path, tmp_path: Path) -> None:
    folder = step("fsdp-4")
    shutil.copy(saves / "hsdp-4" / STEP / "metadata.pkl", folder)
    error = refused(folder, Inconsistent, tmp_path / "out")
    assert "metadata.pkl disagree" in error.message
    assert error.path == str(folder / "model_0.pt")


@pytest.mark.parametrize("case", ["fsdp-2", "tponly-2"])
def test_an_item_that_the_metadata_do_not_list_is_doubted(case: str, step: Callable[[str], Path], saves: Path, tmp_path: Path) -> None:
    """A save leaves the files of an earlier one in its folder, which nothing else tells from items that were saved without a resharder."""
    folder = step(case)
    for path in (saves / "layout-2" / STEP).glob("ema_*.pt"):
        shutil.copy2(path, folder)
    for chosen in ("ema", "all"):
        done = ckpt_cli.merge(folder, tmp_path / chosen, type=chosen)
        (text,) = [note.text for note in done.checkpoint.notes if note.code == "unlisted-item"]
        assert text.startswith("metadata.pkl lists model and not ema: ")
    done = ckpt_cli.merge(folder, tmp_path / "model")
    assert "unlisted-item" not in {note.code for note in done.checkpoint.notes}


@pytest.mark.parametrize("form", ["pt", "safetensors"])
@pytest.mark.parametrize("begun", [True, False])
def test_an_item_that_is_the_state_of_an_average(step: Callable[[str], Path], tmp_path: Path, form: str, begun: bool) -> None:
    """As ema-pytorch gives it: the average is written, not the model of the training beside it."""
    folder = step("one-1")
    ckpt_cli.merge(folder, tmp_path / "model")
    own = load(tmp_path / "model")
    average = {name: tensor + 1 for name, tensor in own.items()}
    pair = {f"{key}.{name}": tensor for key, held in (("online_model", own), ("ema_model", average)) for name, tensor in held.items()}
    state = {"initted": torch.tensor(begun), "step": torch.tensor(3), **pair}
    torch.save(state, folder / "ema_0.pt") if form == "pt" else save_file(state, folder / "ema_0.safetensors")
    done = ckpt_cli.merge(folder, tmp_path / "out", type="ema")
    assert differences(load(tmp_path / "out"), average) == []
    assert ("average-not-begun" in {note.code for note in done.checkpoint.notes}) is not begun


@pytest.mark.parametrize("case", WITH_EMA)
def test_items_that_the_metadata_list_are_not(case: str, step: Callable[[str], Path], tmp_path: Path) -> None:
    done = ckpt_cli.merge(step(case), tmp_path / "out", type="all")
    assert "unlisted-item" not in {note.code for note in done.checkpoint.notes}


def test_safetensors_and_metadata_of_two_saves_are_refused(step: Callable[[str], Path], saves: Path, tmp_path: Path) -> None:
    folder = step("st-fsdp-4")
    shutil.copy(saves / "st-tp-4" / STEP / "metadata.pkl", folder)
    refused(folder, IncompleteError, tmp_path / "out")


def test_safetensors_that_no_metadata_describes_are_refused(step: Callable[[str], Path], tmp_path: Path) -> None:
    folder = step("st-fsdp-4")
    rewrite(folder, lambda root: root["metadata"].pop("model"))
    error = refused(folder, Undecidable, tmp_path / "out")
    assert "without a resharder" in error.message


def test_without_metadata_safetensors_are_parts_of_a_set(step: Callable[[str], Path], tmp_path: Path) -> None:
    folder = step("st-fsdp-4")
    (folder / "metadata.pkl").unlink()
    refused(folder, CkptError, tmp_path / "out")


@pytest.mark.parametrize("kept", ["all", "weights", "a rank is missing", "one file", "one file elsewhere", "its tensors alone"])
def test_without_metadata_one_file_of_safetensors_is_no_model(kept: str, step: Callable[[str], Path], tmp_path: Path) -> None:
    folder = step("st-fsdp-4")
    (folder / "metadata.pkl").unlink()
    given = folder / "model_0.safetensors"
    gone = {"all": "nothing", "weights": "[!m]*_?.*", "a rank is missing": "model_2.*", "one file": "*_[!1].*"}.get(kept, "nothing")
    for path in folder.glob(gone):
        path.unlink()
    if kept == "one file":
        given = folder / "model_1.safetensors"
    if kept == "one file elsewhere":
        given = Path(shutil.copy(given, tmp_path / "model_3.safetensors"))
    if kept == "its tensors alone":
        given = tmp_path / "policy_0.safetensors"
        save_file(load_file(folder / "model_0.safetensors"), given)
    refused(given, CkptError, tmp_path / "out")
    with pytest.raises(CkptError) as caught:
        ckpt_cli.inspect(given)
    assert "metadata.pkl" in str(caught.value.expected)
    assert caught.value.exit_code == 4


def test_a_numbered_file_with_metadata_in_its_header_is_a_model(tmp_path: Path) -> None:
    """As accelerate writes the second of two models."""
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model_1.safetensors", {"format": "pt"})
    ckpt_cli.merge(tmp_path / "model_1.safetensors", tmp_path / "out")
    assert list(load(tmp_path / "out")) == ["w"]


@pytest.mark.parametrize("lost", ["model_0.pt", "model_[!2].pt", "nothing"])
def test_one_file_of_ranks_names_its_set(lost: str, step: Callable[[str], Path], tmp_path: Path) -> None:
    folder = step("fsdp-4")
    (folder / "metadata.pkl").unlink()
    for path in folder.glob(lost):
        path.unlink()
    given = folder / "model_2.pt"
    if lost == "nothing":
        given = given.rename(tmp_path / "model.pt")
    error = refused(given, PartOfSet, tmp_path / "out")
    assert "one rank's file of a set by 4 ranks" in error.message
    assert ("model_0.pt" in str(error.expected)) == (lost != "nothing")


@pytest.mark.parametrize("given", ["", "checkpoint", "checkpoint/step-3"])
def test_items_of_one_rank_without_metadata_are_a_step(given: str, step: Callable[[str], Path], saves: Path, tmp_path: Path) -> None:
    folder = step("one-1")
    (folder / "metadata.pkl").unlink()
    result = ckpt_cli.merge(folder.parent.parent / given, tmp_path / "out")
    assert result.checkpoint.step == 3
    assert "no-metadata" in {note.code for note in result.checkpoint.notes}
    assert differences(load(tmp_path / "out"), load(saves / "one-1" / "expected.safetensors")) == []


@pytest.mark.parametrize("case", ["fsdp-4", "tp-4"])
def test_torch_items_without_metadata_are_read_and_it_is_said(case: str, step: Callable[[str], Path], saves: Path, tmp_path: Path) -> None:
    folder = step(case)
    (folder / "metadata.pkl").unlink()
    for result in (ckpt_cli.inspect(folder), ckpt_cli.merge(folder, tmp_path / "out")):
        warnings = {note.code: note.text for note in result.checkpoint.notes if note.level == "warning"}
        assert "other-model" not in warnings
        assert warnings["no-metadata"].startswith("metadata.pkl, which lists what torch_checkpointing saved, is missing")
    assert differences(load(tmp_path / "out"), load(saves / case / "expected.safetensors")) == []
    with pytest.raises(NotFound) as caught:
        ckpt_cli.extract_state(folder, tmp_path / "state")
    assert any("metadata.pkl" in text for text in caught.value.details)


def test_other_weights_beside_items_without_metadata_are_still_told(step: Callable[[str], Path], tmp_path: Path) -> None:
    folder = step("fsdp-4")
    (folder / "metadata.pkl").unlink()
    shutil.copy(folder / "model_0.pt", folder / "step_best.pt")
    notes = {note.code: note.text for note in ckpt_cli.merge(folder, tmp_path / "out").checkpoint.notes}
    assert "step_best.pt" in str(notes)


def test_files_of_ranks_of_other_trainers_lack_no_metadata(step: Callable[[str], Path], tmp_path: Path) -> None:
    folder = step("fsdp-4")
    for path in folder.iterdir():
        if not path.name.startswith("model_"):
            path.unlink()
    assert "no-metadata" not in {note.code for note in ckpt_cli.merge(folder, tmp_path / "out").checkpoint.notes}


def test_a_torch_item_that_no_metadata_describes_is_read_from_its_files(step: Callable[[str], Path], saves: Path, tmp_path: Path) -> None:
    folder = step("tp-4")
    rewrite(folder, lambda root: root["metadata"].pop("model"))
    ckpt_cli.merge(folder, tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(saves / "tp-4" / "expected.safetensors")) == []


def test_an_unknown_item_is_told_from_the_others(step: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        ckpt_cli.merge(step("fsdp-4"), tmp_path / "out", type="settings")


# -- metadata of strangers -------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    root = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(root)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(root))


class Planted:
    """What a stranger may put into a pickle: loading it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_planted_code_does_not_run(step: Callable[[str], Path], tmp_path: Path) -> None:
    folder, trap = step("fsdp-4"), tmp_path / "trap"
    rewrite(folder, lambda root: root.update(world_size=Planted(trap)))
    error = refused(folder, CorruptFile, tmp_path / "out")
    assert error.path == str(folder / "metadata.pkl")
    assert not trap.exists()


@pytest.mark.parametrize("length", [0, 1, 50, -1])
def test_cut_metadata_is_refused_by_name(step: Callable[[str], Path], tmp_path: Path, length: int) -> None:
    folder = step("st-fsdp-4")
    content = (folder / "metadata.pkl").read_bytes()
    (folder / "metadata.pkl").write_bytes(content[:length])
    assert refused(folder, CorruptFile, tmp_path / "out").path == str(folder / "metadata.pkl")


def _entries(root: Any) -> Any:
    return root["metadata"]["model"]["nested_path_to_metadata"][json.dumps(["embed.weight"], separators=(",", ":"))]


def _mesh(root: Any) -> Any:
    return _entries(root)[0]["sharding_metadata"]["data"]


DAMAGE: dict[str, Callable[[Any], object]] = {
    "no dict of items": lambda root: root.update(metadata=5),
    "no world size": lambda root: root.pop("world_size"),
    "endless world": lambda root: root.update(world_size=1 << 60),
    "no item": lambda root: root.update(metadata={}, world_size=1 << 20),
    "world of none": lambda root: root.update(world_size=0),
    "one rank more": lambda root: root.update(world_size=5),
    "file outside": lambda root: root["metadata"]["model"]["rank_to_layout_info"][0].update(file_path="../../../../model_0.safetensors"),
    "absolute file": lambda root: root["metadata"]["model"]["rank_to_layout_info"][0].update(file_path="/etc/passwd"),
    "mesh too small": lambda root: _mesh(root)["mesh_spec"].update(mesh_data=(0, 1)),
    "rank twice": lambda root: _mesh(root)["mesh_spec"].update(mesh_data=(0, 1, 1, 3)),
    "endless rank": lambda root: _mesh(root)["mesh_spec"].update(mesh_data=(0, 1, 2, 1 << 70)),
    "a tensor twice": lambda root: _entries(root).append(dict(_entries(root)[0])),
    "a rank that is not there": lambda root: _entries(root)[0].update(ranks=(0, 1, 2, 4)),
    "a mesh without its rank": lambda root: _mesh(root)["mesh_spec"].update(mesh_data=(0, 1, 2, 7)),
    "negative shape": lambda root: _mesh(root).update(global_shape=[-37, 10]),
    "shape of text": lambda root: _mesh(root).update(global_shape="37"),
    "dimension that is not there": lambda root: _mesh(root)["placements"][0].update(dim=2),
    "endless split": lambda root: _mesh(root)["placements"][0].update(type="StridedShard", split_factor=1 << 60),
    "name with a folder": lambda root: root["metadata"].update({"../x": root["metadata"].pop("ema")}),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_metadata_that_makes_no_sense_is_refused(step: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    folder = step("st-fsdp-4")
    rewrite(folder, DAMAGE[kind])
    error = refused(folder, CorruptFile, tmp_path / "out")
    assert error.path in (str(folder / "metadata.pkl"), str(folder / "model_3.safetensors"))


def test_what_the_metadata_repeat_is_read_once(step: Callable[[str], Path], tmp_path: Path) -> None:
    """A list of a million ranks that a hundred thousand entries refer to is a small file."""
    folder = step("st-fsdp-4")

    def repeat(root: Any) -> None:
        ranks = tuple(range(1 << 20))
        mesh = {"device_type": "cpu", "mesh_shape": (1 << 20,), "mesh_data": ranks, "mesh_dim_names": None}
        data = {"global_shape": [4], "dtype": "torch.float32", "stride": [1], "mesh_spec": mesh, "placements": [{"type": "Replicate"}]}
        entries = [{"ranks": (0,), "sharding_metadata": {"type": "DTensorShardingMetadata", "data": dict(data)}} for _ in range(30_000)]
        _entries(root).extend(entries)

    rewrite(folder, repeat)
    started = time.monotonic()
    refused(folder, CorruptFile, tmp_path / "out")
    assert time.monotonic() - started < 60


UNKNOWN: dict[str, Callable[[Any], object]] = {
    "version": lambda root: root.update(version="9.0"),
    "placement": lambda root: _mesh(root)["placements"][0].update(type="Spiral"),
    "sharding": lambda root: root["metadata"]["ema"]["nested_path_to_metadata"]['["cap"]'][0]["sharding_metadata"].update(type="other"),
    "way of writing": lambda root: root["metadata"]["model"]["rank_to_layout_info"][0]["serialization_format"].update(type="Other"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_a_newer_version_may_write_is_refused_as_unknown(step: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    folder = step("st-fsdp-4")
    rewrite(folder, UNKNOWN[kind])
    assert refused(folder, Unsupported, tmp_path / "out").path == str(folder / "metadata.pkl")


@pytest.mark.parametrize("shape", [[36, 10], [38, 10], [37, 11], [37]])
def test_a_shape_that_does_not_fit_the_files_is_refused(step: Callable[[str], Path], tmp_path: Path, shape: list[int]) -> None:
    folder = step("st-fsdp-4")
    rewrite(folder, lambda root: _mesh(root).update(global_shape=shape))
    error = refused(folder, CkptError, tmp_path / "out")
    assert error.exit_code in (3, 4)
