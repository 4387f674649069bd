"""Files of a base that are no side files of a model: weights in other forms, copies put aside, and what tells how a base is quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.beside.names import MAX_UNKNOWN
from tests import tiny

ASIDE = (
    "model.safetensors.orig", "model.safetensors.bak", "model.gguf.part1of2", "saved_model.pb", "model.keras", "model.pte", "gemma.task",
    "model.litertlm", "model.mnn.weight", "model.plan", "model.trt", "model.params", "model.exl2", "model.pt2", "qwen.tgz", "qwen.7z",
    "config.json.bak", "config (1).json", "tokenizer.json.orig", "tokenizer copy.json",
)  # fmt: skip
KEPT = ("ice_text.model", "tokenizer.model.v3", "dataset_statistics.json", "special.json", "generation_defaults.txt")
SETTINGS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json", "quanto_qmap.json")


def told(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes}


class TestFilesOfABase:
    def test_that_may_be_weights_are_named_and_not_copied(self, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", tiny.weights(1), files=dict.fromkeys((*ASIDE, *KEPT), "{}"))
        with (base / "unheard_of").open("wb") as file:
            file.truncate(MAX_UNKNOWN + 1)
        run = tiny.folder(tmp_path / "run", tiny.weights())
        for made in (
            ckpt_cli.merge(run, tmp_path / "out", base=base, max_shard_size="5GB"),
            ckpt_cli.average([run, run], tmp_path / "mean", base=base),
        ):
            written = {path.name for path in Path(made.outputs[0].output).iterdir()}
            assert not written & {*ASIDE, "unheard_of"}
            assert written >= {*KEPT}
            text = told(made)["put-aside"]
            assert f"{base / 'config (1).json'}" in text
            assert f"and {len(ASIDE) + 1 - 5} more" in text

    @pytest.mark.parametrize("name", SETTINGS)
    def test_that_say_how_it_is_quantised_are_not_copied_beside_plain_weights(self, name: str, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", tiny.weights(1), files={name: {"quant_method": "gptq", "bits": 4}})
        made = ckpt_cli.merge(tiny.folder(tmp_path / "run", tiny.weights()), tmp_path / "out", base=base)
        assert not (tmp_path / "out" / name).exists()
        assert name in told(made)["settings-of-codes"]
        assert not ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run").of_severity("warning")
        (tmp_path / "out" / name).write_text("{}")
        assert ("no-scales", name) in {(item.code, item.file) for item in ckpt_cli.verify(tmp_path / "out").findings}

    @pytest.mark.parametrize("quantised", [True, False])
    def test_that_say_how_weights_are_quantised_are_written_with_them_alone(self, quantised: bool, tmp_path: Path) -> None:
        """ModelOpt says it in a file beside config.json only."""
        run = tiny.folder(tmp_path / "run", None, tiny.classless(), files={"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}})
        tensors = {"a.weight": torch.ones(2, 2, dtype=torch.float8_e4m3fn if quantised else torch.float32)}
        tensors |= {"a.weight_scale": torch.ones(())} if quantised else {}
        save_file(tensors, run / "model.safetensors", metadata={"format": "pt"})
        for made in (ckpt_cli.merge(run, tmp_path / "out"), ckpt_cli.average([run, run], tmp_path / "mean")):
            assert (Path(made.outputs[0].output) / "hf_quant_config.json").exists() == quantised
            assert ("no-scales" in told(made)) != quantised

    @pytest.mark.parametrize(
        "names", [("compressed", "bitmask", "shape"), ("compressed", "row_offsets"), ("indices", "centroids.weight")], ids=str
    )
    def test_compressed_weights_need_no_scales(self, names: tuple[str, ...], tmp_path: Path) -> None:
        config = {**tiny.classless(), "quantization_config": {"quant_method": "compressed-tensors"}}
        run = tiny.folder(tmp_path / "run", None, config)
        save_file({f"layers.0.q.{name}": torch.ones(2) for name in names}, run / "model.safetensors", metadata={"format": "pt"})
        assert "no-scales" not in told(ckpt_cli.merge(run, tmp_path / "out"))
        assert "no-scales" not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}

    def test_that_say_how_it_is_quantised_go_with_weights_that_are(self, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", None, tiny.classless(), files={SETTINGS[0]: {"bits": 8}})
        tensors = {"a.weight": torch.ones(2, 2, dtype=torch.float8_e4m3fn), "a.weight_scale": torch.ones(())}
        run = tiny.folder(tmp_path / "run", None, tiny.classless())
        save_file(tensors, run / "model.safetensors", metadata={"format": "pt"})
        ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert json.loads((tmp_path / "out" / SETTINGS[0]).read_text()) == {"bits": 8}
        assert "no-scales" not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}
