"""Tokens that only the files beside a vocabulary name: loading adds them, with ids that the embedding may have no row for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.beside.told_tokens import told_tokens, with_ids
from ckpt_cli.hub.tokenizer_file import tokenizer_at

WORDS = 60
KIND = {"tokenizer_class": "PreTrainedTokenizerFast"}


def vocabulary(added: dict[str, int] | None = None) -> dict[str, Any]:
    settings = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    listed = [{"id": number, "content": token, **settings} for token, number in (added or {}).items()]
    words = {f"t{number}": number for number in range(WORDS)}
    return {"version": "1.0", "added_tokens": listed, "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"}}


def model(path: Path, rows: int, **files: Any) -> Path:
    path.mkdir(parents=True)
    save_file({"model.embed_tokens.weight": torch.randn(rows, 4), "model.norm.weight": torch.ones(4)}, path / "model.safetensors")
    for name, content in {"config": {}, "tokenizer": vocabulary(), "tokenizer_config": KIND, **files}.items():
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


def told(result: Any) -> list[str]:
    return [note.text for note in result.outputs[0].notes if note.code == "token-ids" and note.level == "warning"]


def found(path: Path) -> list[tuple[str, str | None, str]]:
    return [(item.severity, item.file, item.message) for item in ckpt_cli.verify(path).findings if item.code == "token-ids"]


def decoder(**tokens: str) -> dict[str, Any]:
    settings = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"added_tokens_decoder": {number.lstrip("n"): {"content": token, **settings} for number, token in tokens.items()}}


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the end": ({"tokenizer_config": {**KIND, "eos_token": "<end>"}}, ["tokenizer_config.json: eos_token <end> (60)"]),
    "an object": (
        {"tokenizer_config": {**KIND, "pad_token": {"__type": "AddedToken", "content": "<pad>", "special": True}}},
        ["tokenizer_config.json: pad_token <pad> (60)"],
    ),
    "a map": (
        {"special_tokens_map": {"eos_token": {"content": "<end>"}, "additional_special_tokens": ["<a>", "t1"]}},
        ["special_tokens_map.json: eos_token <end> (60), <a> (61)"],
    ),
    "more": ({"tokenizer_config": {**KIND, "extra_special_tokens": ["<a>", "<b>"]}}, ["tokenizer_config.json: <a> (60), <b> (61)"]),
    "added ones": ({"added_tokens": {"<a>": 60, "<b>": 61}}, ["added_tokens.json: <a> (60), <b> (61)"]),
    "a list of another vocabulary": (
        {"tokenizer_config": {**KIND, **decoder(n0="<start>", n59="<stop>"), "eos_token": "<stop>"}},
        ["tokenizer_config.json: <start> (60), eos_token <stop> (61)"],
    ),
    "behind an added one": (
        {"tokenizer": vocabulary({"<x>": 60}), "tokenizer_config": {**KIND, "eos_token": "<end>", "pad_token": "<x>"}},
        ["tokenizer_config.json: eos_token <end> (61)"],
    ),
}


@pytest.mark.parametrize("case", CASES)
class TestATokenThatTheVocabularyLacks:
    def test_gets_the_id_that_is_told(self, case: str, tmp_path: Path) -> None:
        """What loading the tokenizer gives."""
        transformers = pytest.importorskip("transformers")
        folder = model(tmp_path / "model", 0, **CASES[case][0])
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        files = {path.name: path for path in folder.iterdir()}
        tokenizer = tokenizer_at(files["tokenizer.json"], files)()
        assert tokenizer.following is not None
        ids = {each.token: number for each, number, _ in with_ids(told_tokens(files), tokenizer.held, tokenizer.following)}
        assert ids
        assert ids == {token: loaded.convert_tokens_to_ids(token) for token in ids}

    def test_is_told_where_the_embedding_has_no_row(self, case: str, tmp_path: Path) -> None:
        files, wanted = CASES[case]
        rows = 61 if case == "behind an added one" else 60
        texts = [f"{text}, which tokenizer.json lacks and loading adds: the embedding has {rows} rows" for text in wanted]
        run = model(tmp_path / "run", rows, **files)
        assert told(ckpt_cli.merge(run, tmp_path / "out")) == texts
        assert told(ckpt_cli.average([model(tmp_path / "older", rows), run], tmp_path / "mean")) == texts
        for path in (run, tmp_path / "out"):
            assert [(f"{file}: {text}", severity) for severity, file, text in found(path)] == [(text, "warning") for text in texts]

    def test_is_not_where_the_embedding_was_padded(self, case: str, tmp_path: Path) -> None:
        run = model(tmp_path / "run", 128, **CASES[case][0])
        assert told(ckpt_cli.merge(run, tmp_path / "out")) == found(run) == []


class TestATokenWithAnIdOfItsOwn:
    """The vocabulary has it, or there is no tokenizer.json that decides."""

    @pytest.mark.parametrize("role", ["eos_token", "pad_token"])
    def test_that_ends_or_fills_texts_is_told(self, role: str, tmp_path: Path) -> None:
        run = model(tmp_path / "run", 60, tokenizer=vocabulary({"<x>": 60}), tokenizer_config={**KIND, role: "<x>"})
        text = f"{role} <x> (60): the embedding has 60 rows"
        assert told(ckpt_cli.merge(run, tmp_path / "out")) == [f"tokenizer_config.json: {text}"]
        assert found(run) == [("warning", "tokenizer_config.json", text)]

    def test_that_no_text_needs_is_a_note(self, tmp_path: Path) -> None:
        """Gemma 3 has a token for images also where it reads none, and no row for it."""
        run = model(
            tmp_path / "run",
            60,
            tokenizer=vocabulary({"<image>": 60}),
            tokenizer_config={**KIND, **decoder(n60="<image>"), "extra_special_tokens": ["<image>"], "eos_token": "t1", "unk_token": "t0"},
            added_tokens={"<image>": 60},
        )
        assert told(ckpt_cli.merge(run, tmp_path / "out")) == found(run) == []
        assert "added-tokens" in {item.code for item in ckpt_cli.verify(run).findings}

    @pytest.mark.parametrize(
        ("files", "wanted"),
        [
            ({"added_tokens": {"<a>": 60, "<b>": 59}}, "added_tokens.json: <a> (60)"),
            (
                {"tokenizer_config": {**decoder(n59="<a>", n60="<b>", n61="<c>"), "eos_token": "<b>"}},
                "tokenizer_config.json: eos_token <b> (60), <c> (61)",
            ),
        ],
    )
    def test_is_told_without_a_tokenizer_json(self, files: dict[str, Any], wanted: str, tmp_path: Path) -> None:
        run = model(tmp_path / "run", 60, tokenizer=None, vocab={f"t{number}": number for number in range(59)}, **files)
        (run / "merges.txt").write_text("#version: 0.2\n")
        (text,) = told(ckpt_cli.merge(run, tmp_path / "out"))
        assert set(text.partition(": the")[0].partition(": ")[2].split(", ")) == set(wanted.partition(": ")[2].split(", "))
        assert [file for _, file, _ in found(run)] == [wanted.partition(":")[0]]
        for more in (64, 200):
            assert found(model(tmp_path / f"{more}", more, tokenizer=None, vocab={"t": 0}, **files)) == []


@pytest.mark.parametrize(
    "content",
    [
        {"eos_token": None, "pad_token": 3, "bos_token": {"content": 7}, "extra_special_tokens": {"image_token": 3}},
        {"added_tokens_decoder": {"x": {"content": "<a>"}, "\u0663": {"content": "<a>"}, "9" * 40: {"content": "<a>"}, "1": None}},
        {"added_tokens_decoder": [], "additional_special_tokens": "<a>"},
        [],
    ],
)
def test_what_names_no_token_tells_nothing(content: Any, tmp_path: Path) -> None:
    run = model(tmp_path / "run", 60, tokenizer_config=content)
    assert told(ckpt_cli.merge(run, tmp_path / "out")) == found(run) == []
