"""Whether two outputs hold the same tensors, bit for bit: `python benchmarks/same_tensors.py A B` prints "same", or how they differ.

An output is a folder of safetensors files or of one `.pt` file of plain tensors, perhaps below a key.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


class Output:
    """Tensors by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.read: dict[str, Any] = {}
        for file in sorted(folder.rglob("*.safetensors")):
            handle = safe_open(file, framework="pt")
            self.read |= {name: (lambda name=name, handle=handle: handle.get_tensor(name)) for name in handle.keys()}  # noqa: SIM118
        for file in sorted(folder.rglob("*.pt")):
            state = torch.load(file, mmap=True, weights_only=True)
            state = next(iter(state.values())) if len(state) == 1 else state
            self.read |= {name: (lambda tensor=tensor: tensor) for name, tensor in state.items()}


def difference(ours: Output, theirs: Output) -> str:
    """In words; the largest difference of an element is relative to the largest element of its tensor."""
    if len(only := ours.read.keys() ^ theirs.read.keys()):
        return f"{len(only)} names on one side only, such as {min(only)}"
    unlike, largest = 0, 0.0
    for name, read in ours.read.items():
        a, b = read(), theirs.read[name]()
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{name}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            unlike += 1
            largest = max(largest, float((a.double() - b.double()).abs().max() / a.double().abs().max()))
    return f"{unlike} of {len(ours.read)} tensors differ, by at most {largest:.0e}" if unlike else "same"


if __name__ == "__main__":
    print(difference(*(Output(Path(folder)) for folder in sys.argv[1:3])))
