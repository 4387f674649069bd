"""A state with adapters that was saved while they were merged: fused again, each would be in the model twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.architectures import MODELS, build
from tests.tensors import load
from tests.test_lora import CASES, adapted, merged_by_peft, trained

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")),
    pytest.mark.usefixtures("quiet_transformers", "asked_here"),
]

KINDS = ["plain", "DoRA", "embedding", "fan in, fan out", "convolutions", "fused experts"]


def base_of(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    build(*MODELS[CASES[case][0]]).to(dtype).save_pretrained(folder)
    return folder


def model_of(case: str, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Any:
    model = adapted(*CASES[case], dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "embedding_B" in name:
                parameter.mul_(scale)
    return model


def notes(result: Any) -> set[str]:
    return {note.code for note in (*result.checkpoint.notes, *result.outputs[0].notes)}


@pytest.mark.parametrize("case", KINDS)
def test_a_merged_state_is_refused_and_the_hint_works(case: str, tmp_path: Path) -> None:
    base, model = base_of(case, tmp_path / "base"), model_of(case)
    plain = trained(model, tmp_path / "plain")
    assert "not-frozen" not in notes(ckpt_cli.merge(plain, tmp_path / "right", base=base))
    model.merge_adapter()
    merged = trained(model, tmp_path / "merged")
    with pytest.raises(Inconsistent, match="in these weights already") as caught:
        ckpt_cli.merge(merged, tmp_path / "out", base=base)
    assert "--lora export, without --base" in caught.value.advice
    with pytest.raises(Inconsistent, match="in these weights already"):
        ckpt_cli.verify(tmp_path / "right", against=merged, base=base)
    assert not (tmp_path / "out").exists()
    ckpt_cli.merge(merged, tmp_path / "adapter", lora="export")
    ckpt_cli.merge(tmp_path / "adapter", tmp_path / "followed", base=base)
    right, followed = load(tmp_path / "right"), load(tmp_path / "followed")
    assert right.keys() == followed.keys()
    assert all(torch.allclose(right[name], followed[name], atol=1e-5) for name in right)


@pytest.mark.parametrize("scale", [1.0, 0.02])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_hides_nothing_and_is_no_difference(dtype: torch.dtype, scale: float, tmp_path: Path) -> None:
    """Trained in 16 bits on a base in float32, also where masters are float32 again."""
    base, model = base_of("plain", tmp_path / "base"), model_of("plain", torch.bfloat16, scale).to(dtype)
    assert "not-frozen" not in notes(ckpt_cli.merge(trained(model, tmp_path / "plain"), tmp_path / "right", base=base))
    model.merge_adapter()
    with pytest.raises(Inconsistent, match="in these weights already"):
        ckpt_cli.merge(trained(model, tmp_path / "merged"), tmp_path / "out", base=base)


def test_adapters_that_were_not_trained_say_nothing(tmp_path: Path) -> None:
    base, model = base_of("plain", tmp_path / "base"), model_of("plain", scale=0.0)
    model.merge_adapter()
    assert "not-frozen" not in notes(ckpt_cli.merge(trained(model, tmp_path / "run"), tmp_path / "out", base=base))


@pytest.mark.parametrize(("share", "said"), [(0.05, ("4.", "5.")), (0.8, ("7", "8")), (1.5, ("14", "15"))])
def test_other_weights_than_those_of_the_base_are_told(tmp_path: Path, share: float, said: tuple[str, ...]) -> None:
    """From a share of 50 % on nothing was said, as if all such were another model's."""
    base, model = base_of("plain", tmp_path / "base"), model_of("plain")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("base_layer.weight"):
                parameter.add_(torch.randn_like(parameter) * parameter.std() * share)
    run = trained(model, tmp_path / "run")
    result = ckpt_cli.merge(run, tmp_path / "out", base=base)
    (note,) = [note for note in result.outputs[0].notes if note.code == "not-frozen"]
    assert note.text.partition("differs from the base by ")[2].startswith(said)
    expected = merged_by_peft(model, tmp_path / "peft")
    assert all(torch.allclose(value, expected[name], atol=1e-5) for name, value in load(tmp_path / "out").items())
