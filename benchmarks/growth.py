"""What a plan costs: seconds and memory of `ckpt merge --dry-run` by the number of tensors and pieces.

    python benchmarks/growth.py FOLDER

No weights are moved: the checkpoints are headers and holes, or tensors of a few bytes (`many_tensors.py`). Memory is described by
base + a * tensors + b * pieces, fitted to all but the largest checkpoint of each kind, and checked against those.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import ckpt, timed

HERE = Path(__file__).parent
TENSORS = (1_000, 10_000, 100_000, 500_000)
RANKS = ((8, 723), (32, 723), (128, 723), (512, 723))
SUCCESS, NO_SPACE = 0, 5
"""Exit codes: a plan that is larger than the disk is made in full, and then refused."""


@dataclass(frozen=True)
class Row:
    """A plan: ``bytes`` are those of the output; ``cpu`` and wall ``seconds``; ``peak`` resident bytes."""

    kind: str
    files: int
    tensors: int
    pieces: int
    bytes: int
    seconds: float
    cpu: float
    peak: int


@dataclass(frozen=True)
class Model:
    """Peak memory in bytes: ``base + tensor * tensors + piece * pieces``."""

    base: float
    tensor: float
    piece: float

    def of(self, row: Row) -> float:
        return self.base + self.tensor * row.tensors + self.piece * row.pieces


def fit(rows: Sequence[Row]) -> Model:
    """From rows of both kinds: a piece is what more ranks of the same tensors cost, a tensor what is left of a whole tensor."""
    sparse, ranks = ([row for row in rows if row.kind == kind] for kind in ("sparse", "ranks"))
    piece = statistics.linear_regression([row.pieces for row in ranks], [row.peak for row in ranks]).slope
    tensor = statistics.linear_regression([row.tensors for row in sparse], [row.peak for row in sparse]).slope - piece
    base = statistics.median(row.peak - tensor * row.tensors - piece * row.pieces for row in rows)
    return Model(base, tensor, piece)


def checked(rows: Sequence[Row]) -> tuple[Model, list[Row]]:
    """The model that all but the largest of each kind give, and those largest."""
    largest = [max((row for row in rows if row.kind == kind), key=lambda row: row.pieces) for kind in ("sparse", "ranks")]
    return fit([row for row in rows if row not in largest]), largest


def plan(folder: Path, kind: str, numbers: Sequence[int]) -> Row:
    """Write a checkpoint, plan its merge, remove it."""
    subprocess.run([sys.executable, str(HERE / "many_tensors.py"), kind, str(folder), *map(str, numbers)], check=True, capture_output=True)
    cost = timed(ckpt("merge", folder, "-o", folder.parent / "planned", "--dry-run"), allowed=(SUCCESS, NO_SPACE))
    files = len(list(folder.glob("model*.safetensors" if kind == "sparse" else "*.pt")))
    shutil.rmtree(folder)
    tensors = numbers[-1]
    pieces = tensors if kind == "sparse" else tensors * numbers[0]
    size = tensors * 2 * 1024 * 1024 if kind == "sparse" else pieces * 16
    return Row(kind, files, tensors, pieces, size, round(cost.seconds, 2), round(cost.cpu, 2), cost.peak)


def rows(folder: Path, tensors: Sequence[int] = TENSORS, ranks: Sequence[tuple[int, int]] = RANKS) -> Iterator[Row]:
    """A plan per checkpoint, smallest first."""
    for count in tensors:
        yield plan(folder / "sparse", "sparse", (count,))
    for numbers in ranks:
        yield plan(folder / "ranks", "ranks", numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = []
    for row in rows(options.folder):
        found.append(row)
        print(row, flush=True)
    model, largest = checked(found)
    print(model, *(f"{row.peak / 1e6:.0f} MB, expected {model.of(row) / 1e6:.0f} MB" for row in largest), sep="\n")


if __name__ == "__main__":
    main()
