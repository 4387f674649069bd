"""Codes whose scales have other names or lie elsewhere, codes that are called floats, and other buffers that no mean is right for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Unsupported
from tests.tensors import Tensors, differences, load
from tests.tiny import adapter, classless, factors, folder, weights

ROWS, COLUMNS = 8, 16


def integers(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(-100, 100, shape or (ROWS, COLUMNS), generator=torch.Generator().manual_seed(seed)).to(dtype)


def scale(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(shape or (ROWS, 1), generator=torch.Generator().manual_seed(seed)) + 0.1


KINDS: dict[str, Callable[[int], Tensors]] = {
    "marlin": lambda seed: {
        "q.B": integers(seed, torch.int32),
        "q.s": scale(seed).half(),
        "q.workspace": torch.zeros(4, dtype=torch.int32),
    },
    "quip": lambda seed: {"q.Qidxs": integers(seed, torch.int64).abs(), "q.SU": scale(seed, ROWS).half(), "q.Wscale": scale(seed, 1)},
    "trellis": lambda seed: {"q.trellis": integers(seed, torch.int16), "q.suh": scale(seed, ROWS).half()},
    "own-name": lambda seed: {"q.weight": integers(seed, torch.int8), "q.alpha": scale(seed), "q.bias": scale(seed, ROWS)},
    "below": lambda seed: {"q.weight": integers(seed, torch.int8), "q.quantizer.scale": scale(seed)},
    "around": lambda seed: {"q.impl.int_data": integers(seed, torch.int8), "q.scale": scale(seed)},
    "wide": lambda seed: {"q.weight": integers(seed, torch.int64), "q.weight_scale": scale(seed)},
}


def saved(path: Path, tensors: Tensors) -> Path:
    return folder(path, {"norm.weight": scale(0, 4), **tensors}, classless())


@pytest.mark.parametrize("kind", KINDS)
class TestScalesOfAnyNameAndPlace:
    def test_are_neither_cast_nor_averaged(self, tmp_path: Path, kind: str) -> None:
        first, second = (saved(tmp_path / str(seed), KINDS[kind](seed)) for seed in (1, 2))
        with pytest.raises(Unsupported, match="quantised weights cannot be cast to bf16"):
            ckpt_cli.merge(second, tmp_path / "out", dtype="bf16")
        with pytest.raises(Unsupported, match="quantised weights are not averaged"):
            ckpt_cli.average([first, second], tmp_path / "out")

    def test_are_copied_and_told(self, tmp_path: Path, kind: str) -> None:
        source = saved(tmp_path / "source", KINDS[kind](1))
        result = ckpt_cli.merge(source, tmp_path / "out")
        said = {note.code: note.text for note in result.outputs[0].notes}["odd-dtype"]
        assert "config.json has no quantization_config, without which loaders ignore the scales" in said
        assert differences(load(tmp_path / "out"), load(source)) == []


@pytest.mark.parametrize("kind", ["marlin", "quip", "trellis"])
def test_declared_ones_have_their_scales(tmp_path: Path, kind: str) -> None:
    source = folder(tmp_path / "source", KINDS[kind](1), classless(quantization_config={"quant_method": "gptq", "bits": 4}))
    assert not {note.code for note in ckpt_cli.merge(source, tmp_path / "out").outputs[0].notes} & {"no-scales", "odd-dtype"}
    assert "no-scales" not in {item.code for item in ckpt_cli.verify(source).findings}


def test_tables_beside_floats_are_no_codes(tmp_path: Path) -> None:
    """SwinV2 has a table of positions beside a learned scale, body models have faces beside vertices."""
    table = {"attn.relative_position_index": torch.arange(16).reshape(4, 4), "attn.logit_scale": scale(1, 4, 1, 1)}
    body = {"body.faces": torch.arange(12).reshape(4, 3), "body.vertices": scale(1, 4, 3), "embed.position_ids": torch.arange(4)[None]}
    source = saved(tmp_path / "source", {**table, **body})
    result = ckpt_cli.merge(source, tmp_path / "out", dtype="bf16")
    assert "odd-dtype" not in {note.code for note in result.outputs[0].notes}
    assert load(tmp_path / "out")["attn.logit_scale"].dtype == torch.bfloat16


def coded(seed: int, values: torch.Tensor) -> Tensors:
    return {"q.weight": values, "q.weight_scale": scale(seed)}


@pytest.mark.parametrize("kind", ["integers", "ternary", "float8"])
def test_codes_that_are_floats_are_not_averaged(tmp_path: Path, kind: str) -> None:
    made = {
        "integers": lambda seed: integers(seed, torch.bfloat16),
        "ternary": lambda seed: integers(seed, torch.float32).sign(),
        "float8": lambda seed: integers(seed, torch.float32).div(7).to(torch.float8_e4m3fn).float(),
    }[kind]
    paths = [saved(tmp_path / str(seed), coded(seed, made(seed))) for seed in (1, 2)]
    with pytest.raises(Unsupported, match="quantised weights are not averaged"):
        ckpt_cli.average(paths, tmp_path / "out")


@pytest.mark.parametrize("are_codes", [True, False])
def test_adapters_are_not_fused_into_codes_that_are_floats(tmp_path: Path, are_codes: bool) -> None:
    values = {name: tensor.mul(500).round().clamp(-100, 100) if are_codes else tensor for name, tensor in weights().items()}
    held = {name: values[name] if name.endswith("q_proj.weight") else tensor for name, tensor in weights().items()}
    held |= {f"{name}_scale": scale(1, 1) for name in held if name.endswith("q_proj.weight")}
    base = folder(tmp_path / "base", held, classless())
    tuned = adapter(tmp_path / "adapter", factors(), base)
    if are_codes:
        with pytest.raises(Unsupported, match="the base weight is codes that are called F32"):
            ckpt_cli.merge(tuned, tmp_path / "out", base=base)
    else:
        ckpt_cli.merge(tuned, tmp_path / "out", base=base)


def test_trained_weights_with_a_scale_are_averaged(tmp_path: Path) -> None:
    """Training for quantisation keeps weights of floats, and learns their scale."""
    paths = [saved(tmp_path / str(seed), coded(seed, torch.randn(8, 16) * seed)) for seed in (1, 2)]
    ckpt_cli.average(paths, tmp_path / "out")
    first, second = map(load, paths)
    assert torch.equal(load(tmp_path / "out")["q.weight_scale"], (first["q.weight_scale"] + second["q.weight_scale"]) / 2)


def averaged(tmp_path: Path, *held: Tensors) -> dict[str, str]:
    paths = [saved(tmp_path / str(number), tensors) for number, tensors in enumerate(held)]
    return {note.code: note.text for note in ckpt_cli.average(paths, tmp_path / "out").outputs[0].notes if note.level == "warning"}


@pytest.mark.parametrize("name", ["q.weight_quantizer._amax", "q.observer.min_val"])
def test_ranges_of_quantisers_are_told(tmp_path: Path, name: str) -> None:
    said = averaged(tmp_path, {name: scale(1)}, {name: scale(2)})
    assert said["batch-statistics"].startswith(f"{name}: ranges that quantisers found")


@pytest.mark.parametrize(("factor", "told"), [(1.5, True), (1 + 1e-6, False)])
def test_tables_of_other_settings_are_told(tmp_path: Path, factor: float, told: bool) -> None:
    """Without a class, nothing else shows that the frequencies of rotary embeddings were scaled meanwhile."""
    table = torch.rand(4) + 0.1
    said = averaged(tmp_path, {"rotary_emb.inv_freq": table}, {"rotary_emb.inv_freq": table * factor})
    assert ("tables-differ" in said) is told


@pytest.mark.parametrize(("values", "refused"), [((0.0, 1.0, 1.0), True), ((0.2, 1.0, 0.7), False), ((1.0, 1.0, 0.0), False)])
def test_masks_of_floats_that_differ_are_not_averaged(tmp_path: Path, values: tuple[float, ...], refused: bool) -> None:
    """Zeros and ones, in whatever module of the user's own; a mask that is learned lies between."""
    held = [{"own.mask": torch.tensor([1.0, 1.0, 0.0])}, {"own.mask": torch.tensor(values)}]
    if refused:
        with pytest.raises(Unsupported, match="a mask of zeros and ones"):
            averaged(tmp_path, *held)
    else:
        averaged(tmp_path, *held)


@pytest.mark.parametrize("codes", [True, False])
def test_distances_between_codes_that_are_floats_are_told(tmp_path: Path, codes: bool) -> None:
    values = integers(1, torch.float32) if codes else torch.randn(ROWS, COLUMNS)
    paths = [saved(tmp_path / str(seed), coded(seed, values * seed)) for seed in (1, 2)]
    assert ("codes-compared" in {note.code for note in ckpt_cli.diff(*paths).notes}) is codes
