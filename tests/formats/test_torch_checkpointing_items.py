"""torch_checkpointing: several items with weights, parts of a model, and tensors at nested places, in both forms."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, PartOfSet
from tests.tensors import differences, load

CASES = ("one-1", "fsdp-2", "fsdp-4", "tp-4", "st-one-1", "st-fsdp-4")
FIRST = ("embed.weight", "layers.0.")
"""What the names in the first part begin with."""


class Save:
    """A copy of a save whose item ``model`` is to be changed: its files, and the metadata as the library pickles them."""

    def __init__(self, case: Path, folder: Path) -> None:
        self.run = Path(shutil.copytree(case / "run", folder / "run"))
        self.step = self.run / "checkpoint" / "step-3"
        self.expected = case / "expected.safetensors"
        self.files = sorted(self.step.glob("model_[0-9].*"))

    def content(self, file: Path) -> dict[str, Any]:
        return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=False)

    def write(self, file: Path, content: Any) -> None:
        if file.suffix == ".safetensors":
            save_file(content, file)
        else:
            torch.save(content, file)

    def metadata(self, change: Callable[[dict[str, Any]], object]) -> None:
        root = pickle.loads((self.step / "metadata.pkl").read_bytes())
        change(root["metadata"])
        (self.step / "metadata.pkl").write_bytes(pickle.dumps(root))

    def split(self, first: str, second: str, *, keep: Callable[[str], bool] = lambda name: name.startswith(FIRST)) -> None:
        """The item as two: the first has the names that ``keep`` accepts."""
        wanted = {first: keep, second: lambda name: not keep(name)}
        for file in self.files:
            content = self.content(file)
            file.unlink()
            for item, has in wanted.items():
                self.write(file.with_name(file.name.replace("model", item)), {name: t for name, t in content.items() if has(name)})

        def items(held: dict[str, Any]) -> None:
            whole = held.pop("model")
            for item, has in wanted.items():
                held[item] = part = copy.deepcopy(whole)
                places = part["nested_path_to_metadata"]
                part["nested_path_to_metadata"] = {path: entry for path, entry in places.items() if has(json.loads(path)[-1])}
                for layout in filter(None, part["rank_to_layout_info"].values()):
                    layout["file_path"] = layout["file_path"].replace("model", item)

        self.metadata(items)

    def nest(self, *keys: str | int) -> None:
        """The item one or more levels down, as a training that saves ``{"net": state_dict}`` has it."""
        for file in self.files:
            content: Any = self.content(file)
            if file.suffix == ".safetensors":
                self.write(file, {".".join(map(str, (*keys, name))): tensor for name, tensor in content.items()})
                continue
            for key in reversed(keys):
                content = {key: content} if isinstance(key, str) else [content]
            self.write(file, content)

        def deeper(held: dict[str, Any]) -> None:
            places = held["model"]["nested_path_to_metadata"]
            held["model"]["nested_path_to_metadata"] = {json.dumps([*keys, *json.loads(p)]): entry for p, entry in places.items()}

        self.metadata(deeper)


@pytest.fixture
def save(data: Path, tmp_path: Path) -> Callable[[str], Save]:
    return lambda case: Save(data / "torch-checkpointing" / case, tmp_path)


def codes(notes: Any) -> dict[str, str]:
    return {note.code: note.text for note in notes}


# -- several items -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_pipeline_are_one_model(save: Callable[[str], Save], tmp_path: Path, case: str) -> None:
    made = save(case)
    made.split("model_part0", "model_part1")
    given = (made.run, made.step, next(made.step.glob("model_part1_0.*")))
    for number, path in enumerate(given):
        result = ckpt_cli.merge(path, tmp_path / f"out{number}")
        assert differences(load(tmp_path / f"out{number}"), load(made.expected)) == []
        assert {info.name for info in result.checkpoint.components} <= {"model", "ema"}
    assert ckpt_cli.verify(tmp_path / "out0", against=made.run).exit_code == 0


@pytest.mark.parametrize("case", ["one-1", "tp-4", "st-fsdp-4"])
def test_a_lost_part_of_a_pipeline_is_named(save: Callable[[str], Save], tmp_path: Path, case: str) -> None:
    made = save(case)
    made.split("model_part0", "model_part2")
    with pytest.raises(PartOfSet, match="part 1 is not"):
        ckpt_cli.merge(made.run, tmp_path / "out")


@pytest.mark.parametrize("case", ["fsdp-2", "st-fsdp-4"])
def test_parts_that_count_layers_anew_are_refused(save: Callable[[str], Save], tmp_path: Path, case: str) -> None:
    made = save(case)
    made.split("model_part0", "model_part1")
    for file in made.step.glob("model_part0_*"):
        shutil.copy(file, file.with_name(file.name.replace("part0", "part1")))
    made.metadata(
        lambda held: held.update(model_part1={**held["model_part0"], "rank_to_layout_info": held["model_part1"]["rank_to_layout_info"]})
    )
    with pytest.raises(PartOfSet, match="two of them hold this tensor") as caught:
        ckpt_cli.merge(made.run, tmp_path / "out")
    assert caught.value.tensor == "embed.weight"


@pytest.mark.parametrize("case", CASES)
def test_an_item_beside_the_model_is_named_and_chosen_by_its_file(save: Callable[[str], Save], tmp_path: Path, case: str) -> None:
    made = save(case)
    made.split("model", "projector")
    expected = load(made.expected)
    first = {name: tensor for name, tensor in expected.items() if name.startswith(FIRST)}
    rest = {name: tensor for name, tensor in expected.items() if name not in first}
    result = ckpt_cli.merge(made.run, tmp_path / "model")
    assert differences(load(tmp_path / "model"), first) == []
    assert "projector (--type projector)" in codes(result.checkpoint.notes)["other-groups"]
    ckpt_cli.merge(made.run, tmp_path / "typed", type="projector")
    ckpt_cli.merge(next(made.step.glob("projector_0.*")), tmp_path / "given")
    for name in ("typed", "given"):
        assert differences(load(tmp_path / name), rest) == []


@pytest.mark.parametrize("case", ["fsdp-4", "st-one-1"])
def test_of_items_without_a_model_one_is_taken_and_the_other_is_named(save: Callable[[str], Save], tmp_path: Path, case: str) -> None:
    made = save(case)
    made.split("actor", "projector")
    result = ckpt_cli.merge(made.run, tmp_path / "out")
    assert all(name.startswith(FIRST) for name in load(tmp_path / "out"))
    assert "projector" in codes(result.checkpoint.notes)["other-groups"]


def test_an_average_beside_the_model_is_no_doubt(save: Callable[[str], Save], tmp_path: Path) -> None:
    result = ckpt_cli.merge(save("fsdp-4").run, tmp_path / "out")
    assert "other-groups" not in codes(result.checkpoint.notes)


# -- nested places -----------------------------------------------------------------------------------------------------


NESTED = [(case, keys) for keys in (("net",), ("net", "inner"), ("state", 0)) for case in CASES if keys[-1] != 0 or case.startswith("st-")]


@pytest.mark.parametrize(("case", "keys"), NESTED)
def test_tensors_at_nested_places_are_all_there(save: Callable[[str], Save], tmp_path: Path, case: str, keys: tuple[Any, ...]) -> None:
    made = save(case)
    made.nest(*keys)
    ckpt_cli.merge(made.run, tmp_path / "out")
    held = {name.removeprefix(".".join(map(str, keys)) + "."): tensor for name, tensor in load(tmp_path / "out").items()}
    assert differences(held, load(made.expected)) == []


@pytest.mark.parametrize("case", ["one-1", "fsdp-4"])
def test_state_dicts_in_a_list_are_refused_by_name(save: Callable[[str], Save], tmp_path: Path, case: str) -> None:
    made = save(case)
    made.nest("state", 0)
    with pytest.raises(CkptError) as caught:
        ckpt_cli.merge(made.run, tmp_path / "out")
    assert caught.value.path == str(made.files[0])


@pytest.mark.parametrize("keys", [(), ("net",), ("net", "inner")], ids=["flat", "dict", "dicts"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("command", [ckpt_cli.merge, ckpt_cli.inspect])
def test_a_tensor_of_the_metadata_that_is_in_no_file_is_named(
    save: Callable[[str], Save], tmp_path: Path, case: str, keys: tuple[str, ...], command: Any
) -> None:
    made = save(case)
    for file in made.files[-1:]:
        content = made.content(file)
        del content["head.weight"]
        made.write(file, content)
    if keys:
        made.nest(*keys)
    options = {"output": tmp_path / "out"} if command is ckpt_cli.merge else {}
    with pytest.raises(Inconsistent) as caught:
        command(made.run, **options)
    assert caught.value.exit_code == 4
    assert (caught.value.tensor, caught.value.path) == (".".join((*keys, "head.weight")), str(made.files[-1]))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("command", [ckpt_cli.merge, ckpt_cli.inspect])
def test_a_tensor_that_the_metadata_does_not_list_is_named(
    save: Callable[[str], Save], tmp_path: Path, case: str, nested: bool, command: Any
) -> None:
    made = save(case)
    if nested:
        made.nest("net")

    def forget(held: dict[str, Any]) -> None:
        places = held["model"]["nested_path_to_metadata"]
        places.pop(next(path for path in places if json.loads(path)[-1] == "head.weight"))

    made.metadata(forget)
    options = {"output": tmp_path / "out"} if command is ckpt_cli.merge else {}
    with pytest.raises(Inconsistent) as caught:
        command(made.run, **options)
    assert caught.value.exit_code == 4
    assert str(caught.value.tensor).endswith("head.weight")
    assert Path(str(caught.value.path)) in made.files


@pytest.mark.parametrize("case", ["one-1", "fsdp-4"])
def test_a_tensor_beside_the_state_dict_is_said(save: Callable[[str], Save], tmp_path: Path, case: str) -> None:
    """A matrix in a list beside the state dict: no name in the file leads to it but its place."""
    made = save(case)
    for file in made.files:
        made.write(file, {"net": made.content(file), "queues": [torch.ones(1, 2)]})

    def deeper(held: dict[str, Any]) -> None:
        places = held["model"]["nested_path_to_metadata"]
        nested = {json.dumps(["net", *json.loads(path)]): entry for path, entry in places.items()}
        one = {"global_shape": [1, 2], "global_offsets": [[0, 0]], "local_offsets": [[0, 0]], "local_sizes": [[1, 2]]}
        ranks = tuple(range(len(made.files)))
        nested['["queues", 0]'] = [{"ranks": ranks, "sharding_metadata": {"type": "default_tensor_v1", "data": one}}]
        held["model"]["nested_path_to_metadata"] = nested

    made.metadata(deeper)
    result = ckpt_cli.merge(made.run, tmp_path / "out")
    assert "queues" in codes(result.checkpoint.notes)["beside-weights"]


def test_two_places_of_one_name_are_refused(save: Callable[[str], Save], tmp_path: Path) -> None:
    made = save("st-one-1")

    def double(held: dict[str, Any]) -> None:
        places = held["model"]["nested_path_to_metadata"]
        places['["head", "weight"]'] = places[next(path for path in places if json.loads(path) == ["head.weight"])]

    made.metadata(double)
    with pytest.raises(CkptError, match="two places"):
        ckpt_cli.merge(made.run, tmp_path / "out")


# -- files of safetensors, which say no rank ---------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "first", "second"), [("st-fsdp-4", 0, 1), ("st-tp-4", 0, 3), ("st-tp-4", 1, 2)])
def test_a_file_that_was_copied_over_that_of_another_rank(
    save: Callable[[str], Save], tmp_path: Path, case: str, first: int, second: int
) -> None:
    made = save(case)
    # What shows it otherwise: replicas that differ, and parts of other sizes.
    for file in made.files:
        made.write(file, {name: tensor for name, tensor in made.content(file).items() if name in ("head.weight", "embed.weight")})
    made.metadata(
        lambda held: held["model"].update(
            nested_path_to_metadata={
                path: entry
                for path, entry in held["model"]["nested_path_to_metadata"].items()
                if json.loads(path)[-1] in ("head.weight", "embed.weight")
            }
        )
    )
    ckpt_cli.merge(made.run, tmp_path / "whole")
    shutil.copy(made.files[first], made.files[second])
    with pytest.raises(Inconsistent) as caught:
        ckpt_cli.merge(made.run, tmp_path / "out")
    assert caught.value.path == str(made.files[second])


@pytest.mark.parametrize("case", ["hsdp-4", "st-tp-4", "st-boxes-2"])
def test_replicas_are_no_copies(data: Path, tmp_path: Path, case: str) -> None:
    ckpt_cli.merge(data / "torch-checkpointing" / case / "run", tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(data / "torch-checkpointing" / case / "expected.safetensors")) == []


def test_boxes_of_another_rank_that_were_copied(save: Callable[[str], Save], tmp_path: Path) -> None:
    made = save("st-boxes-2")
    shutil.copy(made.files[0], made.files[1])
    with pytest.raises(Inconsistent, match="same parts"):
        ckpt_cli.merge(made.run, tmp_path / "out")


@pytest.mark.parametrize("given", ["", "step", "file"])
def test_safetensors_without_the_metadata_are_parts_of_unknown_places(save: Callable[[str], Save], tmp_path: Path, given: str) -> None:
    made = save("st-fsdp-4")
    (made.step / "metadata.pkl").unlink()
    path = {"": made.run, "step": made.step, "file": made.files[2]}[given]
    with pytest.raises(CkptError, match=r"metadata\.pkl") as caught:
        ckpt_cli.merge(path, tmp_path / "out")
    assert caught.value.exit_code == 4


def test_state_beside_an_item_that_was_given_is_no_other_model(data: Path, tmp_path: Path) -> None:
    case = data / "torch-checkpointing" / "layout-2"
    result = ckpt_cli.merge(case / "run" / "checkpoint" / "step-3" / "ema_1.pt", tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(case / "expected-ema.safetensors")) == []
    assert "other-model" not in codes(result.checkpoint.notes)
