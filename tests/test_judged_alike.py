"""One fact, two commands: what `verify` calls an error `merge` refuses, and what it calls a warning `merge` warns of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, UsageError
from tests.tensors import Tensors
from tests.tiny import TOKENIZER, config, folder, unknown, weights

LATER = {"other-shapes", "vocabulary", "damaged-asset"}
"""Warnings of a merge that are errors of `verify`: the weights that a merge writes are right, and another file
beside them makes the folder whole; as it is, no loader takes it."""

W = weights()
KEYS = "model.layers.0.self_attn.k_proj.weight"
MORE_TOKENS: dict[str, Any] = copy.deepcopy(TOKENIZER)
MORE_TOKENS["tokenizer.json"]["model"]["vocab"] = {f"t{i}": i for i in range(70)}

Folder = tuple[Tensors, Mapping[str, Any], Mapping[str, Any]]

FACTS: dict[str, tuple[Folder, str, str]] = {
    "a cut tensor": (({**W, KEYS: W[KEYS][:4]}, config(), {}), "inconsistent", "cut-tensor"),
    "a missing tensor": (({name: W[name] for name in W if name != "model.norm.weight"}, config(), {}), "missing-tensors", "missing-tensor"),
    "fewer layers": ((W, config(num_hidden_layers=3), {}), "missing-tensors", "missing-tensor"),
    "names of nobody": (({f"x.{name}y": W[name] for name in W}, config(), {}), "missing-tensors", "unknown-names"),
    "other shapes, as of another config": ((W, config(intermediate_size=48), {}), "other-shapes", "wrong-shape"),
    "fewer rows than vocab_size": ((W, config(vocab_size=80), {}), "other-shapes", "wrong-shape"),
    "more tokens than rows": ((W, config(), MORE_TOKENS), "vocabulary", "vocabulary"),
    "more tokens than rows, of an unknown class": ((W, unknown(), MORE_TOKENS), "vocabulary", "vocabulary"),
    "fewer rows than vocab_size, of an unknown class": ((W, unknown(vocab_size=80), {}), "vocabulary-rows", "vocabulary-rows"),
    "a tensor too many": (({**W, "foo.weight": torch.ones(3)}, config(), {}), "extra-tensors", "extra-tensor"),
    "a layer too many": ((weights(layers=3), config(), {}), "extra-layers", "extra-layer"),
    "integers": (({**W, "model.norm.weight": torch.ones(16, dtype=torch.int32)}, config(), {}), "odd-dtype", "odd-dtype"),
    "token ids beyond the rows": ((W, config(eos_token_id=9999), {}), "token-ids", "token-ids"),
    "tokens that the vocabulary lacks": (
        (W, config(), {"tokenizer_config.json": {"additional_special_tokens": [f"<{i}>" for i in range(5)]}}),
        "token-ids",
        "token-ids",
    ),
    "half a chat template": ((W, config(), {"chat_template.jinja": "{% if a %}"}), "damaged-asset", "damaged-side-file"),
    "a server's answer": ((W, config(), {"merges.txt": "Entry not found"}), "damaged-asset", "damaged-side-file"),
    "a template under nearly its name": ((W, config(), {"Chat_Template.jinja": "{{ messages }}"}), "near-name", "near-name"),
    "settings of generation without an end": (
        (W, config(eos_token_id=3), {"generation_config.json": {"max_new_tokens": 16}}),
        "no-end",
        "no-end",
    ),
    "a config that builds nothing": ((W, config(num_attention_heads=0), {}), "unbuildable-config", "unbuildable-config"),
    "a prefix twice": (
        ({f"model.{name}" if name.startswith("model.") else name: W[name] for name in W}, config(), {}),
        "doubled-prefix",
        "doubled-prefix",
    ),
    "a head without its embedding": (
        ({name: W[name] for name in W if "embed" not in name}, config(tie_word_embeddings=True), {}),
        "tied-alone",
        "tied-alone",
    ),
}
"""Fact -> a folder, the code of the error or warning of a merge, and the code of the finding."""


@pytest.fixture(autouse=True)
def asked(asked_here: None) -> None:
    """transformers answers in this process."""


def judged(source: Path, output: Path) -> tuple[dict[str, str], CkptError | None]:
    """The levels of what a merge notes, by code, or the error."""
    try:
        return {note.code: note.level for note in ckpt_cli.merge(source, output).outputs[0].notes}, None
    except CkptError as error:
        return {}, error


@pytest.mark.parametrize("fact", FACTS)
def test_merge_and_verify_judge_alike(tmp_path: Path, fact: str) -> None:
    (tensors, of, files), code, found = FACTS[fact]
    source = folder(tmp_path / "source", tensors, of, files)
    severities = {item.code: item.severity for item in ckpt_cli.verify(source).findings if item.severity != "info"}
    assert severities.keys() == {found}
    told, refused = judged(source, tmp_path / "out")
    if refused is not None:
        assert (refused.code, refused.exit_code, severities[found]) == (code, 4, "error")
        return
    assert told == {code: "warning"}
    assert severities[found] == ("error" if code in LATER else "warning")
    again = {item.code: item.severity for item in ckpt_cli.verify(tmp_path / "out").findings if item.severity != "info"}
    assert again == severities
    with pytest.raises(CkptError) as caught:
        ckpt_cli.merge(source, tmp_path / "strict", strict=True)
    assert not isinstance(caught.value, UsageError)
    assert not (tmp_path / "strict").exists()
