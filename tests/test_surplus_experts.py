"""Experts beyond those of config.json: loaders that make one tensor of all refuse it, others leave them out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.architectures import MODELS, answered_here
from tests.tensors import differences, load
from tests.test_claims import notes, saved_by, trained


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def with_more(saved: Path, *, routers: bool = False) -> set[str]:
    """One expert more than the four of each list, and what it is made of."""
    held = load(saved)
    more = {name.replace("experts.3.", "experts.4."): tensor + 1 for name, tensor in held.items() if "experts.3." in name}
    wider = {name: torch.cat([t, t[:1]]) for name, t in held.items() if routers and t.shape[0] == 4 and t.dim() == 2}
    save_file({**held, **more, **wider}, saved / "model.safetensors", metadata={"format": "pt"})
    return set(more)


@pytest.mark.parametrize("name", ["qwen3_moe", "jamba", "mixtral", "glm4_moe", "olmoe"])
class TestAnExpertTooMany:
    def test_is_refused_and_can_be_left_out(self, tmp_path: Path, name: str) -> None:
        saved, _ = saved_by(tmp_path, name)
        whole = load(saved)
        more = with_more(saved)
        assert more
        with pytest.raises((RuntimeError, ValueError)):
            getattr(transformers, MODELS[name][0]).from_pretrained(saved)
        with pytest.raises(Inconsistent, match="of experts beyond those of config") as caught:
            ckpt_cli.merge(saved, tmp_path / "out")
        assert caught.value.exit_code == 4
        assert caught.value.tensor in more
        found = [item for item in ckpt_cli.verify(saved).findings if item.tensor in more]
        assert {item.code for item in found} == {"wrong-shape"}
        assert {item.tensor for item in found} == more
        globs = [part.strip("'") for part in str(caught.value.hint).split() if part.startswith("'")]
        ckpt_cli.merge(saved, tmp_path / "out", exclude=globs or [f"{n}" for n in more])
        assert differences(load(tmp_path / "out"), whole) == []


def test_in_fused_tensors(tmp_path: Path) -> None:
    saved, tensors = saved_by(tmp_path, "qwen3_moe")
    name = next(name for name in tensors if name.endswith("gate_up_proj"))
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    with pytest.raises(Inconsistent, match="of experts beyond those of config"):
        ckpt_cli.merge(trained(tmp_path / "run", saved, tensors), tmp_path / "out")


def test_with_its_routers_another_config_is_meant(tmp_path: Path) -> None:
    saved, _ = saved_by(tmp_path, "qwen3_moe")
    with_more(saved, routers=True)
    assert {"extra-layers", "other-shapes"} <= notes(ckpt_cli.merge(saved, tmp_path / "out")).keys()
