"""A tokenizer of a training that ends texts with another token than that of its base, whose settings for generation do not know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from tests.test_tokenizers import model, warnings

ENDS = {"eos_token": "b"}
MOVED = {"eos_token": "d"}
OF_BASE = {"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": 1}, "tokenizer_config": ENDS}


def trained(folder: Path, **texts: Any) -> Path:
    """A run with a tokenizer and no configs, as adapters are saved."""
    run = model(folder, **{"tokenizer_config": MOVED, **texts})
    if "config" not in texts:
        (run / "config.json").unlink()
    return run


def found(run: Path, base: Path, output: Path) -> str | None:
    """What a merge says of ends, after verify has said the same of its output."""
    told = warnings(ckpt_cli.merge(run, output, base=base)).get("other-end")
    ends = [f"{item.file}: {item.message}" for item in ckpt_cli.verify(output, base=base).findings if item.code == "other-end"]
    assert ends == ([told] if told else [])
    return told


@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_are_told_with_what_to_do(file: str, tmp_path: Path) -> None:
    base = model(tmp_path / "base", **OF_BASE)
    if file == "config":
        (base / "generation_config.json").unlink()
    told = found(trained(tmp_path / "run"), base, tmp_path / "out") or ""
    assert told.startswith(f"{file}.json: it ends texts at 1, and the tokenizer at d (3), that of the base at b")
    assert told.endswith(f"add 3 to eos_token_id of {file}.json")


def test_are_told_of_averages(tmp_path: Path) -> None:
    base, runs = model(tmp_path / "base", **OF_BASE), [trained(tmp_path / name) for name in ("one", "two")]
    assert "d (3)" in warnings(ckpt_cli.average(runs, tmp_path / "out", base=base))["other-end"]


def test_are_told_of_a_token_that_was_added(tmp_path: Path) -> None:
    added = {"eos_token": "<end>", "added_tokens_decoder": {"7": {"content": "<end>"}}}
    run = trained(
        tmp_path / "run", tokenizer={"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 7, "content": "<end>"}]}, tokenizer_config=added
    )
    assert "<end> (7)" in (found(run, model(tmp_path / "base", **OF_BASE), tmp_path / "out") or "")


def test_a_base_without_a_tokenizer_leaves_it_open(tmp_path: Path) -> None:
    base = model(tmp_path / "base", **OF_BASE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    told = found(trained(tmp_path / "run"), base, tmp_path / "out") or ""
    assert "and the base has no tokenizer to compare that with: texts may not end as in the training" in told
    assert told.endswith("add 3 to eos_token_id of generation_config.json")
    assert found(trained(tmp_path / "same", tokenizer_config=ENDS), base, tmp_path / "same_out") is None
    for name in ("config", "generation_config"):
        (base / f"{name}.json").write_text('{"model_type": "own"}')
    assert found(trained(tmp_path / "open"), base, tmp_path / "open_out") is None


@pytest.mark.parametrize(
    ("run", "base"),
    [
        ({}, {"generation_config": {"eos_token_id": [1, 3]}}),
        ({"generation_config": {"eos_token_id": 3}}, {}),
        ({"tokenizer_config": ENDS}, {}),
        ({"tokenizer_config": {}}, {}),
        ({}, {"tokenizer_config": MOVED}),
        ({}, {"tokenizer_config": {}}),
        ({"tokenizer_config": {"eos_token": "not a token", "added_tokens_decoder": {}}, "tokenizer": {}}, {}),
        ({}, {"config": {"eos_token_id": 1, "architectures": ["BertForSequenceClassification"]}}),
    ],
    ids=["several", "own", "same", "none", "as in the base", "unknown", "no id", "no texts"],
)
def test_others_are_not(run: dict[str, Any], base: dict[str, Any], tmp_path: Path) -> None:
    assert found(trained(tmp_path / "run", **run), model(tmp_path / "base", **{**OF_BASE, **base}), tmp_path / "out") is None


def test_are_told_once(tmp_path: Path) -> None:
    """The run's own config says the same."""
    run = trained(tmp_path / "run", config={"eos_token_id": 3})
    result = ckpt_cli.merge(run, tmp_path / "out", base=model(tmp_path / "base", **OF_BASE))
    assert [note.code for note in result.outputs[0].notes].count("other-end") == 1
