"""Buffers that a class computes anew: what is stored of them says what the training computed with, and config.json may say otherwise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests import architectures, tiny
from tests.tensors import Tensors

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("asked_here")

HALF = 32
CONFIG = tiny.config(model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=True, head_dim=4)
NAMES = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(tiny.LAYERS)]
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def frequencies(theta: float, count: int = HALF) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(count).float() / count)


def model(tables: Tensors) -> Tensors:
    held = {name: tensor for name, tensor in tiny.weights().items() if not name.endswith("bias")}
    return {
        **held,
        **{f"model.layers.{n}.self_attn.o_proj.bias": torch.randn(tiny.WIDTH) for n in range(tiny.LAYERS)},
        **biases(),
        **tables,
    }


def biases() -> Tensors:
    return {name: tensor for name, tensor in tiny.weights().items() if name.endswith("bias")}


def told(tmp_path: Path, tables: Tensors, **changes: Any) -> tuple[dict[str, tuple[str, str]], dict[str, list[str]]]:
    """What a merge says, as code -> (level, text), and what verify finds in its output, as code -> texts. They judge alike."""
    run = tiny.folder(tmp_path / "run", model(tables), {**CONFIG, **changes})
    done = ckpt_cli.merge(run, tmp_path / "out").outputs[0]
    found: dict[str, list[str]] = {}
    for item in ckpt_cli.verify(tmp_path / "out").findings:
        found.setdefault(item.code, []).append(item.message)
    return {note.code: (note.level, note.text) for note in done.notes}, found


def differs(tmp_path: Path, tables: Tensors, **changes: Any) -> str:
    notes, found = told(tmp_path, tables, **changes)
    level, text = notes["buffer-differs"]
    assert level == "warning"
    assert "extra-tensors" not in notes
    assert "extra-tensor" not in found
    assert all(message in text for message in found["buffer-differs"])
    return text


def agrees(tmp_path: Path, tables: Tensors, **changes: Any) -> None:
    notes, found = told(tmp_path, tables, **changes)
    assert notes["buffer-agrees"][0] == "info"
    assert not {"buffer-differs", "extra-tensors"} & notes.keys()
    assert not {"buffer-differs", "extra-tensor"} & found.keys()


class TestRotaryTables:
    def test_of_another_base_are_told_with_both(self, tmp_path: Path) -> None:
        text = differs(tmp_path, {name: frequencies(1e6) for name in NAMES})
        assert "model.layers.{0..1}.self_attn.rotary_emb.inv_freq: the frequencies stored are those of rope_theta 1000000" in text
        assert "config.json says rope_theta 10000; LlamaForCausalLM computes this anew" in text

    def test_that_were_interpolated_are_told(self, tmp_path: Path) -> None:
        text = differs(tmp_path, {NAMES[0]: frequencies(1e4) / 4})
        assert "are those of rope_theta 10000, divided by 4, and config.json says rope_theta 10000 without scaling" in text

    def test_that_no_base_gives_are_told(self, tmp_path: Path) -> None:
        table = frequencies(1e4)
        table[10:] /= 8
        assert "are those of no rope_theta without scaling" in differs(tmp_path, {NAMES[0]: table})

    def test_that_were_never_filled_are_told(self, tmp_path: Path) -> None:
        assert "none of a rotary embedding (0, 0, 0, ...)" in differs(tmp_path, {NAMES[0]: torch.zeros(HALF)})

    @pytest.mark.parametrize("theta", [1e4, 1e6, 5e6])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_that_were_rounded_agree(self, tmp_path: Path, dtype: torch.dtype, theta: float) -> None:
        rounded = frequencies(theta, 64).to(dtype)
        agrees(tmp_path, {NAMES[0]: rounded, NAMES[1]: rounded.float().clone()}, rope_theta=theta)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_of_another_base_are_known_in_16_bits(self, tmp_path: Path, dtype: torch.dtype) -> None:
        assert "those of rope_theta 500000, and" in differs(tmp_path, {NAMES[0]: frequencies(5e5, 64).to(dtype)})

    def test_whose_powers_were_computed_in_16_bits_are_no_contradiction(self, tmp_path: Path) -> None:
        powers = torch.arange(64).bfloat16() / 64
        notes, found = told(tmp_path, {NAMES[0]: 1.0 / 1e6**powers}, rope_theta=1e6)
        assert "buffer-differs" not in {*notes, *found}

    def test_agree_with_any_way_to_write_the_base(self, tmp_path: Path) -> None:
        said = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": None}
        agrees(tmp_path, {NAMES[0]: frequencies(5e5)}, **said)

    def test_agree_with_the_base_of_a_class_where_config_json_names_none(self, tmp_path: Path) -> None:
        agrees(tmp_path, {NAMES[0]: frequencies(1e4)}, rope_theta=None)


class TestScaling:
    """Older code divides positions, and keeps the table."""

    @pytest.mark.parametrize("divided", [1, 4])
    def test_linear(self, tmp_path: Path, divided: float) -> None:
        agrees(tmp_path, {NAMES[0]: frequencies(1e4) / divided}, rope_scaling={"type": "linear", "factor": 4.0})

    def test_llama_3(self, tmp_path: Path) -> None:
        plain = frequencies(5e5)
        waves = 2 * math.pi / plain
        mixed = (8192 / waves - 1.0) / 3.0
        scaled = torch.where(waves > 8192, plain / 8, torch.where(waves < 2048, plain, (1 - mixed) * plain / 8 + mixed * plain))
        agrees(tmp_path / "scaled", {NAMES[0]: scaled}, rope_theta=5e5, rope_scaling=LLAMA_3)
        text = differs(tmp_path / "plain", {NAMES[0]: plain}, rope_theta=5e5, rope_scaling=LLAMA_3)
        assert "those of rope_theta 500000, and config.json says rope_theta 500000, scaled by 8 (llama3)" in text

    @pytest.mark.parametrize("theta", [1e4, 3e4])
    def test_a_dynamic_table_may_have_grown(self, tmp_path: Path, theta: float) -> None:
        scaling = {"type": "dynamic", "factor": 2.0}
        notes, found = told(tmp_path, {NAMES[0]: frequencies(theta)}, rope_scaling=scaling)
        assert "buffer-differs" not in {*notes, *found}

    def test_yarn_explains_no_other_base(self, tmp_path: Path) -> None:
        slowed = frequencies(1e4) / torch.linspace(1, 4, HALF)
        for number, table in enumerate((slowed, frequencies(1e4))):
            notes, _ = told(tmp_path / str(number), {NAMES[0]: table}, rope_scaling=YARN)
            assert "buffer-differs" not in notes
        text = differs(tmp_path / "other", {NAMES[0]: frequencies(1e6)}, rope_scaling=YARN)
        assert "config.json says rope_theta 10000, scaled by 4 (yarn)" in text


def rows(theta: float, positions: int = 16) -> torch.Tensor:
    return torch.outer(torch.arange(positions).float(), frequencies(theta))


TABLES = {
    "freqs_cis": lambda theta: {"freqs_cis": torch.polar(torch.ones_like(rows(theta)), rows(theta))},
    "pairs": lambda theta: {"freqs_cis": torch.stack((rows(theta).cos(), rows(theta).sin()), -1)},
    "halves": lambda theta: {
        "rotary.sin_cached": torch.cat((rows(theta).sin(),) * 2, -1)[None, None],
        "rotary.cos_cached": torch.cat((rows(theta).cos(),) * 2, -1)[None, None],
    },
    "neighbours": lambda theta: {"rotary.sin_cached": rows(theta).sin().repeat_interleave(2, -1).bfloat16()},
}


@pytest.mark.parametrize("form", TABLES)
def test_tables_with_a_row_for_each_position(form: str, tmp_path: Path) -> None:
    agrees(tmp_path / "same", TABLES[form](1e4))
    text = differs_beside(tmp_path / "other", TABLES[form](1e6))
    assert "those of rope_theta 1000000, and config.json says rope_theta 10000" in text


def differs_beside(tmp_path: Path, tables: Tensors) -> str:
    notes, found = told(tmp_path, tables)
    assert len(found["buffer-differs"]) == 1
    return notes["buffer-differs"][1]


def test_names_that_a_loader_passes_over_are_looked_at(tmp_path: Path) -> None:
    """The class says itself that it ignores them, so that they were not even called extra tensors."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
    built = architectures.build("NomicBertForMaskedLM", "nomic_bert", {**size, "max_position_embeddings": 64})
    run = tmp_path / "run"
    built.save_pretrained(run)
    (run / "model.safetensors").unlink()
    base = built.config.rope_parameters["rope_theta"]
    for theta, code in ((base, "buffer-agrees"), (base * 1000, "buffer-differs")):
        torch.save({**built.state_dict(), "nomic_bert.rotary_emb.inv_freq": frequencies(theta, 4)}, run / "pytorch_model.bin")
        out = tmp_path / code
        (said,) = [note for note in ckpt_cli.merge(run, out).outputs[0].notes if note.code.startswith("buffer-")]
        assert said.code == code
        assert {item.code for item in ckpt_cli.verify(out).findings if item.code.startswith("buffer-")} == {code}


def test_averages_are_told_too(tmp_path: Path) -> None:
    paths = [tiny.folder(tmp_path / str(theta), model({NAMES[0]: frequencies(1e6)}), CONFIG) for theta in (1, 2)]
    codes = {note.code for note in ckpt_cli.average(paths, tmp_path / "out").outputs[0].notes if note.level == "warning"}
    assert "buffer-differs" in codes


def test_nothing_is_said_where_code_of_the_model_may_load_it(tmp_path: Path) -> None:
    notes, found = told(tmp_path, {NAMES[0]: frequencies(1e6)}, model_type="strange", auto_map={"AutoModel": "m.M"}, architectures=["M"])
    assert not {"buffer-differs", "buffer-agrees"} & {*notes, *found}


def test_nothing_is_said_of_a_table_that_the_class_loads(tmp_path: Path) -> None:
    size = {"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    options = {**size, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 32, "max_position_embeddings": 64}
    built = architectures.build("EsmForMaskedLM", "esm", options)
    tables = [name for name in built.state_dict() if name.endswith("inv_freq")]
    if not tables:
        pytest.skip("this version of transformers does not store it")
    for number, named in enumerate((["EsmForMaskedLM"], None)):
        built.config.architectures = named
        run = tmp_path / str(number)
        built.config.save_pretrained(run)
        torch.save({**built.state_dict(), **dict.fromkeys(tables, frequencies(1e6, 4))}, run / "pytorch_model.bin")
        notes = ckpt_cli.merge(run, tmp_path / f"out{number}").outputs[0].notes
        assert not any(note.code.startswith("buffer-") for note in notes)


class TestPositions:
    def test_that_count_agree_in_any_dtype(self, tmp_path: Path) -> None:
        counted = torch.arange(512)[None]
        agrees(tmp_path, {"model.position_ids": counted, "model.a.position_ids": counted.bfloat16()})

    def test_others_are_told(self, tmp_path: Path) -> None:
        text = differs(tmp_path, {"model.position_ids": torch.arange(512) + 2})
        assert "position 0 is stored as 2, and the class counts 0, 1, 2, ..." in text


class TestMasks:
    @pytest.mark.parametrize(("seen", "code"), [(0, "buffer-agrees"), (4, "buffer-differs")])
    def test_of_gpt2(self, tmp_path: Path, seen: int, code: str) -> None:
        """A mask that lets all positions see a prefix is not the one that the class makes."""
        size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16}
        built = architectures.build("GPT2LMHeadModel", "gpt2", size)
        mask = torch.ones(16, 16).tril()
        mask[:, :seen] = 1
        masks = {f"transformer.h.{layer}.attn.bias": mask[None, None].to(torch.uint8) for layer in range(2)}
        built.config.save_pretrained(tmp_path / "run")
        torch.save({**built.state_dict(), **masks}, tmp_path / "run" / "pytorch_model.bin")
        (note,) = [note for note in ckpt_cli.merge(tmp_path / "run", tmp_path / "out").outputs[0].notes if note.code.startswith("buffer-")]
        assert note.code == code
        assert seen == 0 or "row 0 of the mask stored sees 4 of 16 positions" in note.text
