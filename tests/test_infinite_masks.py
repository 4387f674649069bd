"""Masks of minus infinity among the tensors of a model: they are no damage, and no average of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import NonFinite
from ckpt_cli.results.verify import VerifyResult
from tests.tensors import Tensors, load
from tests.tiny import classless, folder

SIZE = 8
INF = float("inf")
CAUSAL = torch.full((SIZE, SIZE), -INF).triu(1)
MASKS = {
    "attn.causal_mask": CAUSAL,
    "attn.bias": CAUSAL[None, None],
    "attn.window": CAUSAL + torch.full((SIZE, SIZE), -INF).tril(-3),
    "attn.heads": CAUSAL.expand(3, SIZE, SIZE),
    "attn.mask": torch.tensor([0.0, -INF, 0.0, -INF]),
    "attn.ones_mask": torch.where(CAUSAL == 0, 1.0, -INF),
    "attn.masked_bias": torch.tensor(-INF),
}
DAMAGED = {
    "attn.weight": CAUSAL,
    "attn.mask": torch.tensor([0.0, INF, 0.0]),
    "attn.bias": torch.tensor([0.0, -INF, 0.0]),
    "attn.other": torch.tensor([[0.0, -INF, 0.0], [0.0, 0.0, 0.0]]),
    "attn.causal_mask": CAUSAL + 0.5,
    "attn.table": torch.where(CAUSAL == 0, torch.randn(SIZE, SIZE), CAUSAL),
    "attn.nan_mask": torch.tensor([0.0, float("nan"), -INF]),
}


def saved(path: Path, tensors: Tensors) -> Path:
    return folder(path, {"norm.weight": torch.rand(4), **tensors}, classless())


def codes(result: VerifyResult) -> dict[str, tuple[str, str]]:
    """What is found about each tensor, the most severe thing of several."""
    return {item.tensor: (item.code, item.severity) for item in reversed(result.findings) if item.tensor is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_no_damage(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    result = ckpt_cli.verify(saved(tmp_path / "m", {name: MASKS[name].to(dtype)}), full=True)
    assert codes(result)[name] == ("infinite-mask", "info")


@pytest.mark.parametrize("name", DAMAGED)
def test_other_values_that_are_not_finite_are_errors(name: str, tmp_path: Path) -> None:
    result = ckpt_cli.verify(saved(tmp_path / "m", {name: DAMAGED[name]}), full=True)
    assert codes(result)[name] == ("non-finite", "error")


def test_large_masks_are_read_in_blocks(tmp_path: Path) -> None:
    size = 1500
    mask = torch.full((size, size), -INF).triu(1)
    torn = mask.clone()
    torn[-1, 7] = -INF
    found = codes(ckpt_cli.verify(saved(tmp_path / "m", {"a.seen": mask, "b.seen": torn}), full=True))
    assert [found[name][0] for name in ("a.seen", "b.seen")] == ["infinite-mask", "non-finite"]


def test_a_file_that_ends_with_a_mask_is_not_torn(tmp_path: Path) -> None:
    """The last row of a causal mask is all zeros, as the end of a copy that was interrupted is."""
    size = 2048
    run = tmp_path / "run"
    run.mkdir()
    save_file({"a.seen": torch.full((size, size), -INF).triu(1)}, run / "model.safetensors")
    done = ckpt_cli.merge(run, tmp_path / "out")
    assert not any("zero" in note.text for note in done.outputs[0].notes)
    assert "zero-tail" not in {item.code for item in ckpt_cli.verify(tmp_path / "out", full=True).findings}


def test_what_the_source_has_too_is_a_warning(tmp_path: Path) -> None:
    spoilt = torch.rand(4, 4)
    spoilt[1, 2] = float("nan")
    source = saved(tmp_path / "source", {"a.weight": spoilt})
    ckpt_cli.merge(source, tmp_path / "out")
    result = ckpt_cli.verify(tmp_path / "out", full=True, against=source)
    assert codes(result)["a.weight"] == ("non-finite-in-source", "warning")
    assert ("non-finite", "error") in codes(ckpt_cli.verify(tmp_path / "out", full=True)).values()


def test_what_a_cast_kept_is_a_warning_and_what_it_made_is_an_error(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", {"a.weight": torch.tensor([[1.0, INF]]), "b.weight": torch.tensor([[1.0, 1e6]])})
    ckpt_cli.merge(source, tmp_path / "out", dtype="fp16", allow_overflow=True)
    found = codes(ckpt_cli.verify(tmp_path / "out", full=True, against=source))
    assert found["a.weight"] == ("non-finite-in-source", "warning")
    assert found["b.weight"] == ("non-finite", "error")


@pytest.mark.parametrize("name", MASKS)
def test_equal_masks_are_copied_into_an_average(name: str, tmp_path: Path) -> None:
    paths = [saved(tmp_path / str(number), {name: MASKS[name], "a.weight": torch.randn(4, 4)}) for number in range(2)]
    ckpt_cli.average(paths, tmp_path / "out")
    assert torch.equal(load(tmp_path / "out")[name], MASKS[name])


def test_masks_that_differ_are_refused(tmp_path: Path) -> None:
    held = [{"own.mask": torch.tensor([0.0, -INF, 0.0])}, {"own.mask": torch.tensor([0.0, 0.0, -INF])}]
    with pytest.raises(NonFinite):
        ckpt_cli.average([saved(tmp_path / str(number), tensors) for number, tensors in enumerate(held)], tmp_path / "out")


def test_equal_weights_with_infinities_are_refused(tmp_path: Path) -> None:
    held: Tensors = {"own.weight": torch.tensor([[0.0, -INF]])}
    with pytest.raises(NonFinite):
        ckpt_cli.average([saved(tmp_path / str(number), held) for number in range(2)], tmp_path / "out")
