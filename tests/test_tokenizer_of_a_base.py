"""A training that goes without a tokenizer gets that of its base: whether it can have all tokens, the rows of the embedding tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from tests.architectures import MODELS, build
from tests.test_tokenizers import model, tokenizer

TOKENS = "abcdefghijklmnopqrstuvwxyz0123456789ABCD"


def told(run: Path, base: Path, output: Path, **options: Any) -> dict[str, str]:
    """The texts about a base's tokenizer by their level."""
    result = ckpt_cli.merge(run, output, base=base, **options)
    return {note.level: note.text for note in result.outputs[0].notes if note.code == "base-tokenizer"}


def of_base(folder: Path, rows: int = 40, **texts: Any) -> Path:
    return model(folder, rows, **{"config": {"vocab_size": rows}, "tokenizer": tokenizer(TOKENS), **texts})


def without_tokenizer(folder: Path, rows: int) -> Path:
    run = model(folder, rows, config={"vocab_size": rows})
    (run / "tokenizer.json").unlink()
    return run


@pytest.mark.parametrize(("rows", "before"), [(43, 40), (53, 50), (57, 50), (88, 40)])
def test_that_lacks_tokens_of_the_training_is_a_warning(rows: int, before: int, tmp_path: Path) -> None:
    run, base = without_tokenizer(tmp_path / "run", rows), of_base(tmp_path / "base", before)
    found = told(run, base, tmp_path / "out")
    assert found.keys() == {"warning"}
    assert all(f"{rows} rows" in text and f"the base {before}" in text and "40 tokens" in text for text in found.values())


@pytest.mark.parametrize(("rows", "before"), [(128, 40), (64, 40), (40, 48), (1024, 40)])
def test_rows_that_padding_explains_are_none(rows: int, before: int, tmp_path: Path) -> None:
    run, base = without_tokenizer(tmp_path / "run", rows), of_base(tmp_path / "base", before)
    assert "warning" not in told(run, base, tmp_path / "out")


@pytest.mark.parametrize("rows", [40, 48])
def test_nothing_is_said_where_the_rows_are_those_of_the_base(rows: int, tmp_path: Path) -> None:
    run, base = without_tokenizer(tmp_path / "run", rows), of_base(tmp_path / "base", rows)
    assert told(run, base, tmp_path / "out") == {}


def test_nothing_is_said_of_a_tokenizer_of_the_run(tmp_path: Path) -> None:
    run, base = model(tmp_path / "run", 43, config={"vocab_size": 43}), of_base(tmp_path / "base")
    assert told(run, base, tmp_path / "out") == {}


def test_tokens_that_loading_adds_have_rows_too(tmp_path: Path) -> None:
    added = {"added_tokens_decoder": {str(40 + number): {"content": word} for number, word in enumerate(["<x>", "<y>", "<z>"])}}
    base = of_base(tmp_path / "base", tokenizer_config=added)
    assert told(without_tokenizer(tmp_path / "run", 43), base, tmp_path / "out") == {}


@pytest.mark.parametrize("kind", ["a vocabulary alone", "a config alone"])
def test_is_told_by_whatever_the_base_says(kind: str, tmp_path: Path) -> None:
    base = of_base(tmp_path / "base")
    if kind == "a vocabulary alone":
        (base / "tokenizer.json").rename(base / "tokenizer.model")
    else:
        (base / "model.safetensors").unlink()
    assert "40" in told(without_tokenizer(tmp_path / "run", 43), base, tmp_path / "out")["warning"]


def test_of_an_embedding_that_transformers_resized(tmp_path: Path) -> None:
    made = build(*MODELS["llama"])
    rows = made.config.vocab_size
    made.save_pretrained(tmp_path / "base")
    model(tmp_path / "other", tokenizer=tokenizer(TOKENS))
    (tmp_path / "other" / "tokenizer.json").rename(tmp_path / "base" / "tokenizer.json")
    made.resize_token_embeddings(rows + 3)
    made.save_pretrained(tmp_path / "run")
    assert f"{rows + 3} rows" in told(tmp_path / "run", tmp_path / "base", tmp_path / "out")["warning"]
