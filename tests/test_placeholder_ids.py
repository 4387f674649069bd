"""The ids that config.json and the tokenizer have for the place of images, sounds and videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError
from tests.tiny import folder

CODE = "placeholder-ids"


def tokenizer(*added: str, first: int = 60) -> dict[str, Any]:
    vocabulary = {f"t{number}": number for number in range(first)}
    tokens = [{"id": first + at, "content": token, "special": True} for at, token in enumerate(added)]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": tokens,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }


def config(**entries: Any) -> dict[str, Any]:
    """The config of a class that nobody knows, with pictures."""
    return {"architectures": ["StrangeForConditionalGeneration"], "model_type": "strange", "vocab_size": 128, **entries}


WEIGHTS = {"language_model.embed_tokens.weight": torch.zeros(128, 4)}


def told(path: Path, out: Path, **options: Any) -> list[str]:
    (output,) = ckpt_cli.merge(path, out, **options).outputs
    merged = [note.text for note in output.notes if note.code == CODE]
    verified = [f"config.json: {item.message}" for item in ckpt_cli.verify(out).findings if item.code == CODE]
    if "base" not in options:
        assert merged == verified == [f"config.json: {item.message}" for item in ckpt_cli.verify(path).findings if item.code == CODE]
    return merged


@pytest.mark.parametrize(
    ("entries", "files", "text"),
    [
        ({"image_token_index": 63}, {"processor_config.json": {"image_token": "<image>"}}, "image_token_index 63"),
        ({"image_token_id": 3}, {"tokenizer_config.json": {"image_token": "<image>"}}, "image_token_id 3"),
        ({"image_token_id": 3}, {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}}}, "image_token_id 3"),
        ({"image_token_id": 3}, {"special_tokens_map.json": {"image_token": {"content": "<image>"}}}, "image_token_id 3"),
        ({"text_config": {"image_token_id": 99}}, {"processor_config.json": {"image_token": "<image>"}}, "image_token_id 99"),
        ({"audio_token_id": 61}, {"processor_config.json": {"audio_token": "<sound>"}}, "place of sounds"),
        ({"video_token_id": 7}, {"processor_config.json": {"video_token": "<movie>"}}, "place of videos"),
    ],
)
def test_two_ids_are_told(tmp_path: Path, entries: dict[str, Any], files: dict[str, Any], text: str) -> None:
    held = tokenizer("<pad>", "<image>", "<sound>", "<movie>")
    path = folder(
        tmp_path / "model", WEIGHTS, config(**entries), {**held, **{name: {**held.get(name, {}), **said} for name, said in files.items()}}
    )
    (message,) = told(path, tmp_path / "out")
    assert text in message
    assert "tokenizer.json gives" in message


@pytest.mark.parametrize(
    ("entries", "files"),
    [
        ({"image_token_index": 61}, {"processor_config.json": {"image_token": "<image>"}}),
        ({"image_token_index": -200}, {"processor_config.json": {"image_token": "<image>"}}),  # LLaVA's own
        ({"image_token_index": 64}, {"processor_config.json": {"image_token": "<image>"}}),  # Llama 4 looks for <|patch|>
        ({"image_token_id": 3}, {}),
        ({"image_token_id": 3}, {"processor_config.json": {"image_token": "<other>"}}),
        ({"bos_token_id": 3, "pad_token_id": 5}, {"tokenizer_config.json": {"pad_token": "<pad>"}}),
        ({"image_token_id": [3]}, {"processor_config.json": {"image_token": "<image>"}}),
        ({"image_token_id": 3}, {"processor_config.json": {"image_token": ["<image>"]}}),
    ],
)
def test_nothing_else_is(tmp_path: Path, entries: dict[str, Any], files: dict[str, Any]) -> None:
    held = tokenizer("<pad>", "<image>", "<sound>", "<movie>", "<|patch|>")
    path = folder(
        tmp_path / "model", WEIGHTS, config(**entries), {**held, **{name: {**held.get(name, {}), **said} for name, said in files.items()}}
    )
    assert told(path, tmp_path / "out") == []


class TestTheTokenizerOfABase:
    """A run without a tokenizer gets that of its base, whose special tokens are others than those of the training."""

    def test_has_other_ids_than_the_run(self, tmp_path: Path) -> None:
        base = folder(tmp_path / "base", WEIGHTS, config(image_token_id=61), tokenizer("<pad>", "<image>"))
        run = folder(tmp_path / "run", WEIGHTS, None, bare=True)
        (run / "config.json").write_text(json.dumps(config(image_token_id=65)))
        (message,) = told(run, tmp_path / "out", base=base)
        assert "image_token_id 65, that of the base 61, and tokenizer.json is the base's" in message
        with pytest.raises(CkptError):
            ckpt_cli.merge(run, tmp_path / "strict", base=base, strict=True)

    def test_has_the_same(self, tmp_path: Path) -> None:
        base = folder(tmp_path / "base", WEIGHTS, config(image_token_id=61), tokenizer("<pad>", "<image>"))
        run = folder(tmp_path / "run", WEIGHTS, None, bare=True)
        (run / "config.json").write_text(json.dumps(config(image_token_index=61)))
        assert told(run, tmp_path / "out", base=base) == []

    def test_is_not_used_beside_one_of_the_run(self, tmp_path: Path) -> None:
        base = folder(tmp_path / "base", WEIGHTS, config(image_token_id=61), tokenizer("<pad>", "<image>"))
        run = folder(tmp_path / "run", WEIGHTS, config(image_token_id=63), tokenizer("<a>", "<b>", "<c>", "<image>"))
        assert told(run, tmp_path / "out", base=base) == []
