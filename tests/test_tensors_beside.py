"""A side file with tensors of the model, such as the adapter of a language, is not passed on beside other weights without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import ckpt_cli
from tests.test_asset_names import told
from tests.test_read_by_class import filled, merge, unasked  # noqa: F401

CONFIG = json.dumps({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}).encode()
VOCABULARY = b'{"tur": {"a": 0, "|": 1}}'
ADAPTER, HEAD, BODY = "wav2vec2.encoder.layers.0.adapter_layer.norm.weight", "lm_head.weight", "wav2vec2.encoder.layers.0.final.weight"


def tensors(number: float, body: float = 0) -> dict[str, torch.Tensor]:
    return {ADAPTER: torch.full((4,), float(number)), HEAD: torch.full((3, 4), float(number)), BODY: torch.full((4, 4), float(body))}


def adapter(number: float, rows: int = 3) -> dict[str, torch.Tensor]:
    return {ADAPTER: torch.full((4,), float(number)), HEAD: torch.full((rows, 4), float(number))}


def settings(language: str | None) -> bytes:
    return json.dumps({"tokenizer_class": "Wav2Vec2CTCTokenizer", **({"target_lang": language} if language else {})}).encode()


def folder(path: Path, number: float, body: float = 0, *, language: str | None = "tur", **files: bytes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors(number, body), path / "model.safetensors")
    named = {name.replace("__", "."): content for name, content in files.items()}
    return filled(path, {"config.json": CONFIG, "vocab.json": VOCABULARY, "tokenizer_config.json": settings(language), **named})


def run(path: Path, form: str = "safetensors", body: float = 0) -> Path:
    """Steps 50 and 100, and in the folder of the run the adapter of the end, as the example of transformers leaves it."""
    for number in (50, 100):
        folder(path / f"checkpoint-{number}", number, body * number)
    if form == "bin":
        torch.save(adapter(100), path / "adapter.tur.bin")
    else:
        save_file(adapter(100), path / "adapter.tur.safetensors")
    return path


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize(("step", "is_taken"), [(50, False), (100, True)])
def test_an_adapter_of_another_step_is_left_out(step: int, is_taken: bool, form: str, tmp_path: Path) -> None:
    made = merge(run(tmp_path / "run", form), tmp_path / "out", step=step)
    name = f"adapter.tur.{form}"
    assert (tmp_path / "out" / name).exists() is is_taken
    said = told(made)
    assert name not in said.get("assets-of-run", "")
    text = f"{tmp_path}/run/{name} is not written: 2 of its 2 tensors have other values than the weights that are"
    assert said.get("other-tensors", "").startswith(text) is not is_taken
    assert ("other-tensors" in said) is not is_taken
    assert not {item.code for item in ckpt_cli.verify(tmp_path / "out").findings} & {"other-tensors"}


def test_half_precision_is_the_same(tmp_path: Path) -> None:
    """The output is rounded; the file beside it holds what was trained, and is put into the model's precision by loaders."""
    made = merge(run(tmp_path / "run"), tmp_path / "out", step=100, dtype="bf16")
    assert "other-tensors" not in told(made)
    assert "other-tensors" not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}


@pytest.mark.parametrize("own", [True, False])
def test_an_average_has_no_adapter_of_one_step(own: bool, tmp_path: Path) -> None:
    run(tmp_path / "run")
    for number in (50, 100) if own else ():
        save_file(adapter(number), tmp_path / f"run/checkpoint-{number}/adapter.tur.safetensors")
    made = ckpt_cli.average(tmp_path / "run", tmp_path / "out", last=2, allow_missing=["*"])
    assert "than some of what is averaged" in told(made)["other-tensors"]
    assert not (tmp_path / "out" / "adapter.tur.safetensors").exists()
    assert load_file(tmp_path / "out" / "model.safetensors")[HEAD].unique().tolist() == [75.0]


def test_an_average_keeps_what_no_step_changed(tmp_path: Path) -> None:
    for number in (50, 100):
        step = folder(tmp_path / f"run/checkpoint-{number}", 1)
        save_file(tensors(1, number), step / "model.safetensors")
        save_file(adapter(1), step / "adapter.tur.safetensors")
    made = ckpt_cli.average(tmp_path / "run", tmp_path / "out", last=2, allow_missing=["*"])
    assert "other-tensors" not in told(made)
    assert (tmp_path / "out" / "adapter.tur.safetensors").exists()


def test_adapters_of_other_languages_go_with_their_weights(tmp_path: Path) -> None:
    """Of the checkpoint itself always; of a base as long as the rest of the model is the base's, or else with a warning."""
    base = folder(tmp_path / "base", 1, 7, language="eng", adapter__eng__safetensors=save(adapter(1)))
    save_file(adapter(9, rows=5), base / "adapter.fra.safetensors")
    assert "other-tensors" not in told(merge(base, tmp_path / "own"))
    assert (tmp_path / "own" / "adapter.fra.safetensors").exists()
    for body, is_told in ((7, False), (8, True)):
        made = merge(folder(tmp_path / f"of_{body}", 2, body), tmp_path / f"out_{body}", base=base)
        assert (tmp_path / f"out_{body}" / "adapter.fra.safetensors").exists()
        text = f"adapter.eng.safetensors, adapter.fra.safetensors: they go with the weights of {base}, and these differ"
        assert told(made).get("other-tensors", "").startswith(text) is is_told


@pytest.mark.parametrize("language", ["eng", None])
def test_an_adapter_of_the_base_does_not_replace_what_was_trained(language: str | None, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", 1, language="eng", adapter__eng__safetensors=save(adapter(1)))
    made = merge(folder(tmp_path / "step", 2, language=language), tmp_path / "out", base=base)
    assert not (tmp_path / "out" / "adapter.eng.safetensors").exists()
    assert "other-tensors" in told(made)


def test_what_a_folder_says_twice_is_told(tmp_path: Path) -> None:
    """The user's own file is kept, as they may want it: `merge` and `verify` say what it does."""
    step = folder(tmp_path / "step", 2, adapter__tur__safetensors=save(adapter(1)))
    made = merge(step, tmp_path / "out")
    assert "whoever asks for tur gets those of the file" in told(made)["other-tensors"]
    assert (tmp_path / "out" / "adapter.tur.safetensors").exists()
    for checked in (step, tmp_path / "out"):
        (item,) = (item for item in ckpt_cli.verify(checked).findings if item.code == "other-tensors")
        assert (item.file, item.message) == (
            "adapter.tur.safetensors",
            f"2 tensors of tur differ from those of the model: {HEAD}, {ADAPTER}",
        )


def test_nothing_is_said_of_a_file_whose_language_is_not_known(tmp_path: Path) -> None:
    step = folder(tmp_path / "step", 2, language=None, adapter__tur__safetensors=save(adapter(1)))
    assert "other-tensors" not in told(merge(step, tmp_path / "out"))
    assert "other-tensors" not in {item.code for item in ckpt_cli.verify(step).findings}
