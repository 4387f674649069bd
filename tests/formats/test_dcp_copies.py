"""A data file of a DCP folder that was copied over another is refused, or told where layers or experts may be equal."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.formats.test_dcp import save

HINT = "copied over the other"


def warned(folder: Path) -> dict[str, str]:
    result = ckpt_cli.merge(folder, folder.parent / "out")
    return {note.code: note.text for note in result.checkpoint.notes if note.level == "warning"}


def of_ranks(folder: Path, *ranks: Mapping[str, torch.Tensor], cut: bool = False) -> Path:
    """One folder of ranks that each wrote other tensors, as pipeline stages do, or the same ones; ``cut``: their own rows of these."""
    entries: dict[str, TensorStorageMetadata] = {}
    places = {}
    folder.mkdir()
    for rank, tensors in enumerate(ranks):
        alone = save(folder.parent / f"rank{rank}", {"model": dict(tensors)})
        metadata: Metadata = pickle.loads((alone / ".metadata").read_bytes())
        for index, info in metadata.storage_data.items():
            entry, rows = metadata.state_dict_metadata[index.fqn], tensors[index.fqn.removeprefix("model.")].shape[0]
            assert isinstance(entry, TensorStorageMetadata)
            assert index.offset is not None
            info.relative_path = f"__{rank}_0.distcp"
            offset = torch.Size((rank * rows, *index.offset[1:])) if cut else index.offset
            if cut:
                entry.chunks[0].offsets, entry.size = offset, torch.Size((len(ranks) * rows, *entry.size[1:]))
            known = entries.setdefault(index.fqn, entry)
            known.chunks += entry.chunks if known is not entry else []
            places[MetadataIndex(index.fqn, offset, index.index)] = info
        shutil.copy2(alone / "__0_0.distcp", folder / f"__{rank}_0.distcp")
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(dict(entries), None, places)))
    return folder


@pytest.mark.parametrize(("source", "target"), [(0, 1), (2, 1), (3, 0)])
def test_the_part_of_another_rank_is_refused(tmp_path: Path, source: int, target: int) -> None:
    ranks = [{"norm.weight": torch.ones(2), "a.weight": torch.randn(2, 4)} for _ in range(4)]
    folder = of_ranks(tmp_path / "dcp", *ranks, cut=True)
    assert "equal-files" not in warned(folder)
    shutil.rmtree(tmp_path / "out")
    shutil.copy2(folder / f"__{source}_0.distcp", folder / f"__{target}_0.distcp")
    with pytest.raises(Inconsistent, match="hold the same bytes") as caught:
        ckpt_cli.merge(folder, folder.parent / "out")
    assert HINT in str(caught.value.hint)


def test_the_files_of_another_stage_are_told(tmp_path: Path) -> None:
    stages = [{f"layers.{n}.a.weight": torch.randn(8, 4), f"layers.{n}.norm.weight": torch.ones(8)} for n in range(2)]
    folder = of_ranks(tmp_path / "dcp", *stages)
    shutil.copy2(folder / "__0_0.distcp", folder / "__1_0.distcp")
    assert warned(folder)["equal-files"].startswith("__0_0.distcp and __1_0.distcp hold the same bytes")


def test_equal_norms_and_masks_are_no_sign(tmp_path: Path) -> None:
    masks = torch.ones(4, 4).tril().bool()
    ranks = [
        {f"layers.{n}.norm.weight": torch.ones(8, 1), f"layers.{n}.freq": torch.arange(8.0), f"layers.{n}.mask": masks} for n in range(3)
    ]
    assert "equal-files" not in warned(of_ranks(tmp_path / "dcp", *ranks))


def test_replicas_are_equal(tmp_path: Path) -> None:
    weight = {"a.weight": torch.randn(8, 4)}
    folder = of_ranks(tmp_path / "dcp", weight, weight)
    assert "equal-files" not in warned(folder)
