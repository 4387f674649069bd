"""Descriptors that are well formed and say anything: one value in the object that a framework wrote is another, and it is pickled again.

The mutation fuzzer changes bytes, and seldom gets past the syntax. Here everything is read, and what it means is at stake.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt_cli
from ckpt_cli.errors import CkptError

INTEGERS = st.one_of(st.integers(-3, 9), st.sampled_from([2**31, 2**62, 2**63, 10**30, -(2**63)]))
TENSORS = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]),
)
PLAIN = st.one_of(
    st.none(), st.booleans(), INTEGERS, st.floats(), st.text(max_size=5), st.sampled_from(["model.norm.weight", "../..", "F32"])
)
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6
)
VALUES = st.one_of(
    st.recursive(
        st.one_of(PLAIN, TENSORS, st.binary(max_size=5), st.builds(torch.Size, st.lists(st.integers(0, 9), max_size=3))),
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(PLAIN, inner, max_size=3),
        max_leaves=6,
    )
)

Place = tuple[Any, Any]
"""A container and a key, an index or the name of a field in it."""


def places(value: Any) -> Iterator[Place]:
    """Everything that an object holds, at any depth."""
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in seen or isinstance(each, torch.Tensor):
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            held = list(each.items())
        elif isinstance(each, list):
            held = list(enumerate(each))
        elif dataclasses.is_dataclass(each) and not isinstance(each, type):
            held = [(field.name, getattr(each, field.name)) for field in dataclasses.fields(each)]
        else:
            continue
        yield from ((each, key) for key, _ in held)
        pending += [inner for _, inner in held]


def put(place: Place, value: Any) -> None:
    container, key = place
    if isinstance(container, (dict, list)):
        container[key] = value
    else:
        object.__setattr__(container, key, value)


def torch_saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


Format = tuple[Callable[[bytes], Any], Callable[[Any], bytes], st.SearchStrategy[Any]]
FORMATS: dict[str, Format] = {
    "torch": (lambda raw: torch.load(io.BytesIO(raw), weights_only=False), torch_saved, VALUES),
    "pickle": (pickle.loads, pickle.dumps, VALUES),
    "json": (json.loads, lambda content: json.dumps(content).encode(), JSON),
}
FILES = [
    ("ZeRO-2", "deepspeed/z2-bf16-w2-bf16master/run", "*mp_rank_00_model_states.pt", "torch"),
    ("ZeRO-3", "deepspeed/z3-bf16-w2/run", "zero_pp_rank_0*model_states.pt", "torch"),
    ("Megatron", "megatron/llama-tp2/checkpoint", ".metadata", "pickle"),
    ("DCP", "dcp/2.13.0/fsdp2", ".metadata", "pickle"),
    ("torch_checkpointing", "torch-checkpointing/fsdp-2/run/checkpoint/step-3", "metadata.pkl", "pickle"),
    ("rank file", "torch-2.13.0/fsdp2", "*rank_1.pt", "torch"),
    ("config", "layouts/plain-files/hub", "config.json", "json"),
    ("index", "layouts/plain-files/hub", "*.index.json", "json"),
]


@pytest.mark.parametrize(("name", "folder", "pattern", "form"), FILES, ids=[name for name, *_ in FILES])
def test_gives_a_plan_or_an_error_of_ours(
    name: str, folder: str, pattern: str, form: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child.installed_version", lambda: None)  # it would be asked about every config
    step = Path(shutil.copytree(data / folder, tmp_path / "in"))
    path = min(step.rglob(pattern))
    read, write, values = FORMATS[form]
    honest = read(path.read_bytes())
    count = sum(1 for _ in places(honest))
    outcomes = {"read": 0, "refused": 0}

    def planned() -> None:
        ckpt_cli.merge(step, tmp_path / "out", type="all", dry_run=True)
        ckpt_cli.inspect(step)

    path.write_bytes(write(honest))
    planned()

    @settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, count - 1), values)
    def change(number: int, value: Any) -> None:
        changed = copy.deepcopy(honest)
        put(list(places(changed))[number], value)
        try:
            raw = write(changed)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return  # what torch does not write, nobody reads
        path.write_bytes(raw)
        try:
            planned()
            outcomes["read"] += 1
        except CkptError:
            outcomes["refused"] += 1

    change()
    assert sum(outcomes.values()) > 20


OTHER_KINDS: tuple[Any, ...] = ([], {}, [[]], "x", 10**30)


@pytest.mark.parametrize("folder", ["layouts/plain-files/hub"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_every_entry_of_a_config_may_be_of_any_kind(
    folder: str, name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child.installed_version", lambda: None)  # it would be asked about every config
    step = Path(shutil.copytree(data / folder, tmp_path / "in"))
    honest = json.loads((step / name).read_text())
    for number in range(sum(1 for _ in places(honest))):
        for value in OTHER_KINDS:
            changed = copy.deepcopy(honest)
            put(list(places(changed))[number], value)
            (step / name).write_text(json.dumps(changed))
            with contextlib.suppress(CkptError):
                ckpt_cli.merge(step, tmp_path / "out", dry_run=True)
