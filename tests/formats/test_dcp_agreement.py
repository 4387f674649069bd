"""The lists in the metadata of a DCP folder name the same tensors, each at a place of its own, or that is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.formats.test_dcp import patch, refused, save
from tests.tensors import load

WEIGHTS = {"embed.weight": torch.arange(12.0).reshape(3, 4), "head.weight": torch.arange(12.0).reshape(3, 4) - 5, "scale": torch.ones(1)}
OF_OPTIMIZER = {"state": {"embed.weight": {"exp_avg": torch.zeros(3, 4)}}}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return save(tmp_path / "dcp", {"model": dict(WEIGHTS), "optim": OF_OPTIMIZER, "note": "text"})


def merged(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of the result, and its warnings by code."""
    result = ckpt_cli.merge(folder, folder.parent / "out")
    notes = [*result.checkpoint.notes, *result.outputs[0].notes]
    return load(folder.parent / "out"), {note.code: note.text for note in notes if note.level == "warning"}


def without_entry(metadata: Metadata, name: str) -> None:
    del metadata.state_dict_metadata[name]


def without_entry_and_place(metadata: Metadata, name: str) -> None:
    del metadata.state_dict_metadata[name]
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        del metadata.storage_data[index]


class TestNames:
    @pytest.mark.parametrize("name", ["model.head.weight", "model.scale"])
    def test_a_tensor_that_only_its_place_names_is_told(self, written: Path, name: str) -> None:
        tensors, warned = merged(patch(written, lambda metadata: without_entry(metadata, name)))
        assert name.removeprefix("model.") not in tensors
        assert warned["lost-entries"].startswith(f"{name}: ")

    def test_a_tensor_that_only_the_planner_names_is_told(self, written: Path) -> None:
        _, warned = merged(patch(written, lambda metadata: without_entry_and_place(metadata, "model.head.weight")))
        assert warned["lost-entries"].startswith("model.head.weight: ")

    def test_a_planner_that_leaves_weights_out_is_told(self, tmp_path: Path) -> None:
        class Frozen(DefaultSavePlanner):
            def create_local_plan(self) -> SavePlan:
                plan = super().create_local_plan()
                plan.items[:] = [item for item in plan.items if item.index.fqn != "model.embed.weight"]
                return plan

        planner: SavePlanner = Frozen()
        torch.distributed.checkpoint.save({"model": dict(WEIGHTS)}, checkpoint_id=tmp_path / "dcp", planner=planner, no_dist=True)
        assert merged(tmp_path / "dcp")[1]["lost-entries"].startswith("model.embed.weight: ")

    @pytest.mark.parametrize("change", [without_entry, without_entry_and_place])
    def test_an_optimizer_that_was_taken_out_is_no_news(self, written: Path, change: Callable[[Metadata, str], None]) -> None:
        tensors, warned = merged(patch(written, lambda metadata: change(metadata, "optim.state.embed.weight.exp_avg")))
        assert tensors.keys() == WEIGHTS.keys()
        assert "lost-entries" not in warned

    def test_objects_of_ranks_that_did_not_write_them_are_no_news(self, written: Path) -> None:
        """As torch <= 2.2 plans them."""
        folder = patch(written, lambda metadata: metadata.planner_data.update({"model.layout": ("model", "layout")}))
        assert "lost-entries" not in merged(folder)[1]

    def test_what_is_not_planned_lies_where_its_name_says(self, written: Path) -> None:
        tensors, warned = merged(patch(written, lambda metadata: metadata.planner_data.pop("model.scale")))
        assert tensors.keys() == WEIGHTS.keys()
        assert "lost-entries" not in warned

    @pytest.mark.parametrize("other", ["model.head.weight", "note"])
    def test_two_tensors_of_one_path_are_refused(self, written: Path, other: str) -> None:
        def collide(metadata: Metadata) -> None:
            metadata.planner_data["model.scale"] = metadata.planner_data[other]

        assert refused(patch(written, collide), Inconsistent, "the path of").tensor in ("model.scale", other)


class TestPlaces:
    @pytest.mark.parametrize("other", ["model.head.weight", "optim.state.embed.weight.exp_avg"])
    def test_two_tensors_at_one_place_are_refused(self, written: Path, other: str) -> None:
        def share(metadata: Metadata) -> None:
            places = {index.fqn: index for index in metadata.storage_data}
            metadata.storage_data[places["model.embed.weight"]] = metadata.storage_data[places[other]]

        assert refused(patch(written, share), Inconsistent, "the same bytes").tensor in ("model.embed.weight", other)

    def test_two_chunks_at_one_place_are_refused(self, copy: Any) -> None:
        folder = copy("layouts", "mesh-line", "line", "dcp")

        def share(metadata: Metadata) -> None:
            name = next(name for name, entry in metadata.state_dict_metadata.items() if _chunks_of_one_shape(entry))
            first, second = [index for index in metadata.storage_data if index.fqn == name][:2]
            metadata.storage_data[first] = metadata.storage_data[second]

        assert refused(patch(folder, share), Inconsistent, "the same bytes").tensor is not None


def _chunks_of_one_shape(entry: Any) -> bool:
    chunks = getattr(entry, "chunks", ())
    return len(chunks) > 1 and chunks[0].sizes == chunks[1].sizes
