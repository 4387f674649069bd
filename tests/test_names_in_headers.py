"""Names that `save_model` of safetensors leaves out and notes in the header: a class is known by them where it is not by those stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from transformers import AutoConfig, Qwen3ForCausalLM

import ckpt_cli
from ckpt_cli.errors import CkptError

EXAMPLE = Path(__file__).parent.parent / "examples/tiny-run/checkpoint-200"


def model(cls: type[Qwen3ForCausalLM] = Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    config = AutoConfig.from_pretrained(EXAMPLE)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    return cls(config)


class Outside(nn.Module):
    """A wrapper that holds a part of its model under a name of its own, too, which sorts first."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = model()
        self.backbone = self.lm.model


class Inside(Qwen3ForCausalLM):
    """A class that holds its own model under a second name."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.encoder = self.model


MODULES: dict[str, Callable[[], nn.Module]] = {"outside": Outside, "inside": lambda: model(Inside)}


def saved(folder: Path, module: nn.Module) -> Path:
    folder.mkdir()
    save_model(module, str(folder / "model.safetensors"))
    config = json.loads((EXAMPLE / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", MODULES)
def test_a_model_is_written_under_the_names_of_its_class(kind: str, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", MODULES[kind]())
    with safe_open(run / "model.safetensors", "pt") as file:
        assert "model.norm.weight" not in list(file.keys())
    wanted = model().state_dict()
    result = ckpt_cli.merge(run, tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    assert "names-in-header" in {note.code for note in result.outputs[0].notes}
    assert ckpt_cli.verify(tmp_path / "out", against=run, full=True)


def test_what_neither_the_file_nor_its_header_names_is_still_missing(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", Outside())
    file = run / "model.safetensors"
    with safe_open(file, "pt") as source:
        metadata = source.metadata()
    tensors = load_file(file)
    del tensors["backbone.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata)
    with pytest.raises(CkptError, match="missing") as error:
        ckpt_cli.merge(run, tmp_path / "out")
    assert error.value.exit_code == 4


@pytest.mark.parametrize("claim", ["backbone.layers.0.mlp.up_proj.weight", "nowhere"])
def test_a_header_that_names_another_tensor_is_no_proof(claim: str, tmp_path: Path) -> None:
    """Shapes are compared all the same."""
    run = saved(tmp_path / "run", Outside())
    file = run / "model.safetensors"
    with safe_open(file, "pt") as source:
        metadata = source.metadata()
    metadata["lm.model.norm.weight"] = claim
    save_file(load_file(file), file, metadata)
    with pytest.raises(CkptError):
        ckpt_cli.merge(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
