"""Adapters whose config names a class that may compute otherwise than the one of config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from tests import tiny

OURS = "transformers.models.qwen2.modeling_qwen2"
CASES: list[tuple[dict[str, Any] | None, dict[str, Any], bool]] = [
    ({"base_model_class": "Qwen2BiModel", "parent_library": "llm2vec.models.bidirectional_qwen2"}, {}, True),
    ({"base_model_class": "MyQwen", "parent_library": "__main__"}, {}, True),
    ({"base_model_class": "Qwen2ForCausalLM", "parent_library": OURS}, {}, False),
    ({"base_model_class": "Qwen2Model", "parent_library": OURS}, {}, False),
    ({"base_model_class": "FSDPQwen2ForCausalLM", "parent_library": "train"}, {}, False),
    ({"base_model_class": "Own", "parent_library": "transformers_modules.own"}, {"auto_map": {"AutoModel": "modeling.Own"}}, False),
    ({"unsloth_fixed": True}, {}, False),
    (None, {}, False),
]


@pytest.mark.parametrize(("mapped", "changes", "is_told"), CASES)
def test_a_class_of_its_own_is_told(mapped: dict[str, Any] | None, changes: dict[str, Any], is_told: bool, tmp_path: Path) -> None:
    files = {"modeling.py": "class Own: ...\n"} if changes else None
    base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config(**changes), files)
    tiny.adapter(tmp_path / "adapter", tiny.factors(), base, auto_mapping=mapped, task_type=None)
    (output,) = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base).outputs
    texts = [note.text for note in output.notes if note.code == "trained-class"]
    assert [str(mapped and mapped["base_model_class"]) in text for text in texts] == [True] * is_told
