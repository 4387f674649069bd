"""What a class of a processor or tokenizer reads in folders is passed on, whichever file names the class: a language model, tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from tests.test_asset_names import told
from tests.test_read_by_class import filled, merge, model, unasked  # noqa: F401

CTC = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}
RAG = {"model_type": "rag", "architectures": ["RagTokenForGeneration"]}
BLIP = {"model_type": "instructblip", "architectures": ["InstructBlipForConditionalGeneration"]}
WITH_LM = json.dumps({"feature_extractor_type": "Wav2Vec2FeatureExtractor", "processor_class": "Wav2Vec2ProcessorWithLM"}).encode()
WITH_LM_INSIDE = json.dumps({"feature_extractor": {}, "processor_class": "Wav2Vec2ProcessorWithLM"}).encode()
PLAIN = json.dumps({"feature_extractor_type": "Wav2Vec2FeatureExtractor", "processor_class": "Wav2Vec2Processor"}).encode()
TOKENIZER = b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
VOCABULARY = b'{"a": 0, "|": 1}'
OF_LM = {"alphabet.json": b'{"labels": ["a"]}', "language_model/5gram.bin": b"mmap lm", "language_model/attrs.json": b"{}"}
OF_RAG = {
    f"{folder}/{name}": content
    for folder in ("question_encoder_tokenizer", "generator_tokenizer")
    for name, content in (("vocab.json", VOCABULARY), ("tokenizer_config.json", b"{}"))
}
OF_BLIP = {"qformer_tokenizer/vocab.txt": b"a\nb\n", "qformer_tokenizer/tokenizer_config.json": b"{}"}
READ: list[tuple[dict[str, Any], dict[str, bytes], dict[str, bytes]]] = [
    (CTC, {"preprocessor_config.json": WITH_LM, "vocab.json": VOCABULARY}, OF_LM),
    (CTC, {"processor_config.json": WITH_LM_INSIDE, "vocab.json": VOCABULARY}, OF_LM),
    (CTC, {"tokenizer_config.json": WITH_LM, "preprocessor_config.json": PLAIN, "vocab.json": VOCABULARY}, OF_LM),
    (RAG, {}, OF_RAG),
    (BLIP, {"preprocessor_config.json": b"{}", "tokenizer.json": TOKENIZER}, OF_BLIP),
]
IDS = ["lm", "lm-of-processor", "lm-of-tokenizer", "rag", "blip"]


@pytest.mark.parametrize("where", ["step", "run", "base"])
@pytest.mark.parametrize(("config", "naming", "files"), READ, ids=IDS)
def test_is_passed_on(config: dict[str, Any], naming: dict[str, bytes], files: dict[str, bytes], where: str, tmp_path: Path) -> None:
    step, base = model(tmp_path / "run" / "checkpoint-5", config), model(tmp_path / "base", config)
    filled(step, naming)
    filled({"step": step, "run": step.parent, "base": base}[where], files)
    made = merge(step, tmp_path / "out", base=base)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    assert set(files) <= set(made.outputs[0].assets)
    assert {"lacks-asset", "unknown-files", "put-aside", "partial-tokenizer", "assets-beside"}.isdisjoint(told(made)), told(made)
    checked = ckpt_cli.verify(tmp_path / "out", full=True)
    assert not {item.file for item in checked.findings} & {*files, *naming}
    (tmp_path / "out" / next(iter(files))).write_bytes(b'{"other": 1}')
    assert next(iter(files)) in {item.file for item in ckpt_cli.verify(tmp_path / "out").findings}


def test_all_of_a_class_is_from_one_place(tmp_path: Path) -> None:
    """An alphabet belongs to its language model."""
    step, base = model(tmp_path / "step", CTC), model(tmp_path / "base", CTC)
    filled(step, {"tokenizer_config.json": WITH_LM, "alphabet.json": b'{"labels": ["own"]}'})
    filled(base, OF_LM)
    merge(step, tmp_path / "out", base=base)
    assert (tmp_path / "out" / "alphabet.json").read_bytes() == b'{"labels": ["own"]}'
    assert not (tmp_path / "out" / "language_model").exists()


def test_a_base_has_both_or_none(tmp_path: Path) -> None:
    """Where only the base names the class, the language model comes with the alphabet, which alone is of no use."""
    step, base = model(tmp_path / "step", CTC), model(tmp_path / "base", CTC)
    filled(step, {"preprocessor_config.json": PLAIN})
    filled(base, {**OF_LM, "preprocessor_config.json": WITH_LM})
    merge(step, tmp_path / "out", base=base)
    assert (tmp_path / "out" / "alphabet.json").exists() == (tmp_path / "out" / "language_model" / "5gram.bin").exists() is True


def test_is_none_of_other_classes(tmp_path: Path) -> None:
    step = filled(model(tmp_path / "step", CTC), {"preprocessor_config.json": PLAIN, **OF_LM, **OF_BLIP})
    merge(step, tmp_path / "out")
    assert not (tmp_path / "out" / "language_model").exists()
    assert not (tmp_path / "out" / "qformer_tokenizer").exists()


@pytest.mark.parametrize(
    ("config", "naming", "lacking"), [(*READ[0][:2], "alphabet.json"), (RAG, {}, "generator_tokenizer/")], ids=["lm", "rag"]
)
def test_what_is_lacking_is_told(config: dict[str, Any], naming: dict[str, bytes], lacking: str, tmp_path: Path) -> None:
    step = filled(model(tmp_path / "step", config), naming)
    assert lacking in told(merge(step, tmp_path / "out"))["lacks-asset"]
    found = {item.file: item.message for item in ckpt_cli.verify(tmp_path / "out").findings if item.code == "lacks-named-file"}
    assert found == ({"preprocessor_config.json": "alphabet.json, which Wav2Vec2ProcessorWithLM reads, is not there"} if naming else {})


def test_no_pickle_is_taken_for_a_vocabulary(tmp_path: Path) -> None:
    step = filled(model(tmp_path / "step", BLIP), {**OF_BLIP, "qformer_tokenizer/vocab.pkl": b"x", "qformer_tokenizer/.hidden": b"x"})
    merge(step, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out" / "qformer_tokenizer").iterdir()} == {"vocab.txt", "tokenizer_config.json"}


def test_averages_have_them_and_another_program_may_lose_them(tmp_path: Path) -> None:
    for number in (1, 2):
        step = filled(model(tmp_path / f"run/checkpoint-{number}", CTC), {**READ[0][1], **OF_LM})
        save_file({"a.weight": torch.full((2, 3), float(number))}, step / "model.safetensors")
    ckpt_cli.average(tmp_path / "run", tmp_path / "out", last=2, allow_missing=["*"])
    assert {name: (tmp_path / "out" / name).read_bytes() for name in OF_LM} == OF_LM
    other = filled(model(tmp_path / "other", CTC), READ[0][1])
    save_file({"a.weight": torch.full((2, 3), 2.0)}, other / "model.safetensors")
    found = {item.file for item in ckpt_cli.verify(other, against=tmp_path / "run/checkpoint-2").findings if item.code == "other-side-file"}
    assert set(OF_LM) <= found


def test_a_language_model_is_no_part_with_weights(tmp_path: Path) -> None:
    """It is added to the last step of a run, whose others lost nothing."""
    for number in (1, 2):
        step = model(tmp_path / f"run/checkpoint-{number}", CTC)
        filled(step, {**READ[0][1], "preprocessor_config.json": PLAIN, **({**OF_LM, **READ[0][1]} if number == 2 else {})})
    assert "fewer-components" not in told(merge(tmp_path / "run", tmp_path / "out", step=1))


def test_a_font_goes_with_the_processor_that_names_it(tmp_path: Path) -> None:
    config = {"model_type": "ernie4_5_vl_moe", "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"]}
    naming = {"video_preprocessor_config.json": b'{"font": "Roboto-Regular.ttf"}', "Roboto-Regular.ttf": b"font"}
    merge(filled(model(tmp_path / "step", config), naming), tmp_path / "out")
    assert (tmp_path / "out" / "Roboto-Regular.ttf").read_bytes() == b"font"
