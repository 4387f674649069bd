"""Weights that are computed from several tensors: none of these is the weight, and no hint or key map makes it so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune, remove_spectral_norm, remove_weight_norm, spectral_norm, weight_norm

import ckpt_cli
from ckpt_cli.errors import Inconsistent, MissingTensors
from ckpt_cli.hub.classes.computed.parametrized import computed
from tests import architectures

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("asked_here"), pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")]

PART: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str, str]] = {
    "weight-norm": (
        parametrizations.weight_norm,
        lambda module: parametrize.remove_parametrizations(module, "weight"),
        "parametrizations.weight.original1",
        "remove_parametrizations",
    ),
    "old-weight-norm": (weight_norm, remove_weight_norm, "weight_v", "remove_weight_norm"),
    "spectral-norm": (
        parametrizations.spectral_norm,
        lambda module: parametrize.remove_parametrizations(module, "weight"),
        "parametrizations.weight.original",
        "remove_parametrizations",
    ),
    "old-spectral-norm": (spectral_norm, remove_spectral_norm, "weight_orig", "remove_spectral_norm"),
    "pruned": (
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        lambda module: prune.remove(module, "weight"),
        "weight_orig",
        "prune.remove",
    ),
}


def saved(model: Any, folder: Path) -> Path:
    folder.mkdir()
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("form", PART)
def test_are_told_with_what_makes_them_one(form: str, tmp_path: Path) -> None:
    make, remove, part, named = PART[form]
    model = architectures.build(*architectures.MODELS["llama"])
    modules = [layer.mlp.down_proj for layer in model.model.layers]
    for module in modules:
        make(module)
    run = saved(model, tmp_path / "run")
    with pytest.raises(MissingTensors) as caught:
        ckpt_cli.merge(run, tmp_path / "out")
    hint = str(caught.value.hint)
    assert "computed from" in hint
    assert named in hint
    assert "rename" not in hint
    rule = {"match": rf"(.*down_proj)\.{part.replace('.', '[.]')}", "to": r"\1.weight"}
    (tmp_path / "map.json").write_text(json.dumps({"rules": [rule]}))
    with pytest.raises(Inconsistent, match="of one of the tensors that it is computed from"):
        ckpt_cli.merge(run, tmp_path / "out", key_map=[tmp_path / "map.json"])
    for module in modules:
        remove(module)
    ckpt_cli.merge(saved(model, tmp_path / "one"), tmp_path / "out")
    back = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


def test_that_a_class_has_so_are_whole(tmp_path: Path) -> None:
    model = architectures.build(
        "Wav2Vec2Model",
        "wav2vec2",
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "num_conv_pos_embedding_groups": 4}
        | {"conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_conv_pos_embeddings": 16},
    )
    model.save_pretrained(tmp_path / "run")
    done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    compared = done.outputs[0].compared
    assert compared is not None
    assert compared.fitting == compared.expected
    plain = {"rules": [{"match": r"(.*)\.original0", "to": r"\1.original0"}]}
    (tmp_path / "map.json").write_text(json.dumps(plain))
    ckpt_cli.merge(tmp_path / "run", tmp_path / "again", key_map=[tmp_path / "map.json"])


def test_only_names_of_a_kind_together_are_parts() -> None:
    assert computed(["a.weight_v", "b.weight_g", "c.weight_orig", "d.weight", "d.weight_g", "d.weight_v", "parametrizations.x"]) == {}


def test_a_hint_at_other_names_lists_tensors_of_these_shapes_alone(tmp_path: Path) -> None:
    model = architectures.build(*architectures.MODELS["llama"])
    state = {name.replace("down_proj.weight", "other"): tensor for name, tensor in model.state_dict().items()}
    state["odd"] = torch.ones(3)
    (tmp_path / "run").mkdir()
    model.config.save_pretrained(tmp_path / "run")
    torch.save(state, tmp_path / "run" / "pytorch_model.bin")
    with pytest.raises(MissingTensors, match="missing") as caught:
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    hint = str(caught.value.hint)
    assert "mlp.other have the shapes of these" in hint
    assert "odd" not in hint
