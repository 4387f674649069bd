"""Each option of a merge is heeded, refused or told where adapters get a folder of their own: a key map was recorded, and not applied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import UsageError
from ckpt_cli.merging.options import MergeOptions
from tests.tiny import adapter, config, factors, folder, weights

REFUSED: dict[str, Any] = {
    "include": ["*q_proj*"],
    "exclude": ["*q_proj*"],
    "key_map": ["model.layers=model.language_model.layers"],
    "weights_name": "other.safetensors",
    "match_base": True,
    "carry_from_base": ["lm_head*"],
    "compare": True,
}
TOLD: dict[str, Any] = {"max_shard_size": 2000, "allow_missing": ["lm_head*"]}

HEEDED = {
    "dtype", "cast_all", "overwrite", "jobs", "dry_run", "verify", "checksum", "strict", "lora", "lora_alpha",
    "ema_from_model", "with_state", "in_place", "allow_overflow", "allow_unequal_replicas", "shard_order", "write", "part",
    "engine", "ray_address", "ray_parts", "push_to_hub", "private", "branch", "also",
}  # fmt: skip
"""Options that mean the same for adapters: how is read and written, where to, and what of it."""

OF_OTHERS = {"names", "fill_missing_from_base", "drop_extra"}
"""Adapters have the names of PEFT, as the line says; the other two need --match-base."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(tmp_path / "base", weights(), config())


@pytest.fixture
def source(base: Path, tmp_path: Path) -> Path:
    return adapter(tmp_path / "adapter", factors(), base)


def test_every_option_is_decided() -> None:
    fields = set(MergeOptions.__dataclass_fields__)
    assert fields - REFUSED.keys() - TOLD.keys() - OF_OTHERS - HEEDED == set()


@pytest.mark.parametrize("name", REFUSED)
def test_what_asks_for_another_result_is_refused(source: Path, base: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not of an adapter") as caught:
        ckpt_cli.merge(source, tmp_path / "out", lora="export", base=base, **{name: REFUSED[name]})
    assert not (tmp_path / "out").exists()
    # What the hint says is true.
    assert caught.value.hint == "leave out --lora export"
    if name not in ("include", "exclude", "key_map", "carry_from_base"):
        ckpt_cli.merge(source, tmp_path / "out", base=base, **{name: REFUSED[name]})


def test_alone_it_needs_a_base(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ckpt_cli.merge(source, tmp_path / "out", key_map=["model.layers=model.language_model.layers"])
    assert "--base" in str(caught.value.hint)
    assert "--lora keep" in str(caught.value.hint)


@pytest.mark.parametrize("name", TOLD)
def test_what_changes_nothing_is_told(source: Path, tmp_path: Path, name: str) -> None:
    (output,) = ckpt_cli.merge(source, tmp_path / "out", **{name: TOLD[name]}).outputs
    (text,) = [note.text for note in output.notes if note.code == "no-effect"]
    assert f"--{name.replace('_', '-')} has no effect" in text


def test_with_both_it_is_for_the_model(source: Path, base: Path, tmp_path: Path) -> None:
    done = ckpt_cli.merge(source, tmp_path / "out", lora="both", base=base, max_shard_size=4000)
    assert not [note for output in done.outputs for note in output.notes if note.code == "no-effect"]
    assert sorted(len(output.files) > 1 for output in done.outputs) == [False, True]
