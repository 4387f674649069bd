"""What a folder is loaded with besides its weights is whole, or said not to be: tokenizers, processors, files that a step lost."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.assets import Assets, find_assets
from ckpt_cli.hub.beside.lacking import lacking_notes
from ckpt_cli.hub.loaded_with.needs import FILE
from ckpt_cli.verifying.beside import check_beside

VOCABULARY = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "<unk>": 4, "<pad>": 5, "<s>": 6, "</s>": 7}
TEXTS: dict[str, str] = {
    "vocab.json": json.dumps(VOCABULARY),
    "merges.txt": "#version: 0.2\na b\n",
    "vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n",
    "emoji.json": json.dumps({"emoji": {}, "emoji_inv": {}}),
    "word_shape.json": json.dumps({"[UNK]": 0}),
    "word_pronunciation.json": json.dumps({"[UNK]": 0}),
    "tokenizer.json": json.dumps(
        {
            **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")),
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
        }
    ),
}


def model(folder: Path, *names: str, **configs: Any) -> Path:
    folder.mkdir(parents=True)
    save_file({"a.weight": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors", metadata={"format": "pt"})
    for name in names:
        (folder / name).write_text(TEXTS.get(name, "{}"))
    for name, content in {"config": {"model_type": "own"}, **configs}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def of(kind: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [kind], "model_type": model_type}


def told(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes if note.level == "warning"}


def found(path: Path) -> dict[str, str]:
    return {item.code: item.message for item in check_beside(path)}


def planned(run: Path, base: Path | None = None) -> tuple[Assets, dict[str, str]]:
    """What a merge would take of a run with a config of a real class, and say of that."""
    assets = find_assets([run], base)
    return assets, {note.code: note.text for note in lacking_notes(assets, base, run.parent / "out")}


def loads(folder: Path) -> bool:
    """Whether transformers makes a tokenizer of a folder that has more than its special tokens."""
    transformers = pytest.importorskip("transformers")
    try:
        made = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, TypeError, ValueError):
        return False
    return made.convert_tokens_to_ids("a") not in (None, made.unk_token_id)


SETS = [
    ("GPT2Tokenizer", ("vocab.json", "merges.txt")),
    ("RobertaTokenizerFast", ("vocab.json", "merges.txt")),
    ("BertTokenizer", ("vocab.txt",)),
    ("GPTNeoXJapaneseTokenizer", ("vocab.txt", "emoji.json")),
    ("CTRLTokenizer", ("vocab.json", "merges.txt")),
    ("VitsTokenizer", ("vocab.json",)),
]


class TestATokenizer:
    @pytest.mark.parametrize(("kind", "names"), SETS, ids=[kind for kind, _ in SETS])
    def test_that_transformers_loads_is_quiet_and_one_that_lacks_a_file_is_told(
        self, kind: str, names: tuple[str, ...], tmp_path: Path
    ) -> None:
        config, said = of("Own", "own"), {"tokenizer_class": kind}
        for lost in (None, *names):
            run = model(tmp_path / f"run-{lost}", *(name for name in names if name != lost), config=config, tokenizer_config=said)
            out = tmp_path / f"out-{lost}"
            notes, whole = told(ckpt_cli.merge(run, out)), lost is None
            assert loads(run) == whole
            lacks = notes.get("partial-tokenizer", notes.get("lacks-asset"))
            assert (lacks is None) == whole
            assert whole or lost in lacks or "no tokenizer" in lacks
            assert set(found(out)) == set(found(run)) == (set() if whole else {"partial-tokenizer"})
            assert {"partial-tokenizer"} & {item.code for item in ckpt_cli.verify(out).findings} == set(found(out))
            assert ("partial-tokenizer" in told(ckpt_cli.average([run, run], tmp_path / f"mean-{lost}"))) == ("partial-tokenizer" in notes)
            detected = ckpt_cli.detect(run).checkpoint
            assert detected is not None
            assert ({*names, "a tokenizer"} & set(detected.lacking) == set()) == whole
            assert (told(ckpt_cli.merge(run, in_place=True, weights_name="other.safetensors")).keys() & {"partial-tokenizer"}) == (
                notes.keys() & {"partial-tokenizer"}
            )

    def test_whose_class_only_the_model_tells(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", "vocab.json", config=of("Qwen2ForCausalLM", "qwen2"))
        assert not loads(run)
        assert "Qwen2Tokenizer also reads merges.txt" in planned(run)[1]["partial-tokenizer"]
        speech = model(tmp_path / "speech", "vocab.json", "preprocessor_config.json", config=of("Wav2Vec2ForCTC", "wav2vec2"))
        assert loads(speech)
        assert planned(speech)[1] == found(speech) == {}

    @pytest.mark.parametrize("kind", ["ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer"])
    def test_of_bytes_needs_no_vocabulary(self, kind: str, tmp_path: Path) -> None:
        run = model(tmp_path / "run", config=of("T5ForConditionalGeneration", "t5"), tokenizer_config={"tokenizer_class": kind})
        assert loads(run)
        assert planned(run)[1] == found(run) == {}
        base = model(tmp_path / "base", "tokenizer.json", config=of("T5ForConditionalGeneration", "t5"))
        assert "tokenizer.json" not in planned(run, base)[0].files

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tekken.json", "vocab.txt"])
    def test_of_one_file_is_whole(self, name: str, tmp_path: Path) -> None:
        said = {"tokenizer_class": "PreTrainedTokenizerFast"}
        run = model(tmp_path / "run", name, config=of("LlamaForCausalLM", "llama"), tokenizer_config=said)
        assert planned(run)[1] == {}
        assert "partial-tokenizer" not in found(run)

    def test_of_code_of_its_own_is_not_judged(self, tmp_path: Path) -> None:
        said = {"tokenizer_class": "GPT2Tokenizer", "auto_map": {"AutoTokenizer": ["tokenization_my.My", None]}}
        run = model(tmp_path / "run", "vocab.json", "tokenization_my.py", tokenizer_config=said)
        (run / "tokenization_my.py").write_text("class My: ...")
        assert planned(run)[1] == found(run) == {}

    def test_that_is_not_whole_is_that_of_the_base_which_is(self, tmp_path: Path) -> None:
        config = of("Qwen2ForCausalLM", "qwen2")
        base = model(tmp_path / "base", "vocab.json", "merges.txt", config=config)
        assets, notes = planned(model(tmp_path / "run", "vocab.json", config=config), base)
        assert "vocab.json" in notes["tokenizer-of-base"]
        assert assets.files["vocab.json"] == base / "vocab.json"
        assert "partial-tokenizer" not in notes

    def test_that_is_not_whole_in_the_base_is_told(self, tmp_path: Path) -> None:
        config = of("Qwen2ForCausalLM", "qwen2")
        base = model(tmp_path / "base", "vocab.json", config=config)
        notes = planned(model(tmp_path / "run", config=config), base)[1]
        assert "merges.txt" in notes["partial-tokenizer"]
        assert "the base has none either" in notes["partial-tokenizer"]


class TestWhatAModelIsLoadedWith:
    @pytest.mark.parametrize(
        ("kind", "model_type", "lacks"),
        [
            ("Qwen2VLForConditionalGeneration", "qwen2_vl", ["an image processor", "a video processor"]),
            ("CLIPModel", "clip", ["an image processor"]),
            ("WhisperForConditionalGeneration", "whisper", ["a feature extractor"]),
            ("Wav2Vec2ForCTC", "wav2vec2", ["a feature extractor"]),
        ],
    )
    def test_lacks_a_processor(self, kind: str, model_type: str, lacks: list[str], tmp_path: Path) -> None:
        run = model(tmp_path / "run", "tokenizer.json", "vocab.json", "merges.txt", config=of(kind, model_type))
        assets, notes = planned(run)
        assert assets.lacking == lacks
        assert lacks[0].split(" ", 1)[1] in notes["lacks-asset"]
        assert set(found(run)) == {"lacks-processor"}
        (run / "preprocessor_config.json").write_text("{}")
        assert planned(run)[1] == found(run) == {}

    def test_has_all_processors_in_one_file_or_says_which_it_lacks(self, tmp_path: Path) -> None:
        inside = {"image_processor": {}, "processor_class": "Qwen2VLProcessor"}
        config = of("Qwen2VLForConditionalGeneration", "qwen2_vl")
        run = model(tmp_path / "run", "tokenizer.json", config=config, processor_config=inside)
        assert planned(run)[1]["lacks-asset"].startswith("the output has no video processor:")
        (run / "video_preprocessor_config.json").write_text("{}")
        assert planned(run)[1] == {}

    @pytest.mark.parametrize(
        "config",
        [
            of("ViTForImageClassification", "vit"),
            of("Wav2Vec2ForSequenceClassification", "wav2vec2"),
            of("CLIPVisionModel", "clip_vision_model"),
            of("PatchTSTModel", "patchtst"),
            {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0"},
            {"architecture": "resnet18", "num_classes": 1000, "pretrained_cfg": {}},
        ],
        ids=lambda config: str(config.get("architectures", ["none"])[0]),
    )
    def test_is_no_tokenizer_where_no_text_is_read(self, config: dict[str, Any], tmp_path: Path) -> None:
        run = model(tmp_path / "run", "preprocessor_config.json", config=config)
        assert planned(run)[1] == found(run) == {}

    @pytest.mark.parametrize(
        "config",
        [
            of("Qwen2ForCausalLM", "qwen2"),
            of("Gemma3ForCausalLM", "gemma3_text"),
            of("Llama4ForCausalLM", "llama4"),
            of("Own", "clip"),
            {**of("CLIPModel", "clip"), "auto_map": {"AutoModel": "org/own--modeling_my.My"}},
        ],
        ids=lambda config: str(config["architectures"][0]),
    )
    def test_is_no_processor_where_only_text_is_read_or_nothing_is_known(self, config: dict[str, Any], tmp_path: Path) -> None:
        run = model(tmp_path / "run", "tokenizer.json", config=config)
        assert planned(run)[1] == found(run) == {}

    def test_is_told_by_every_command(self, tmp_path: Path) -> None:
        """Of a class whose tensors nobody compares, since it is a part of a pipeline, and of one that nobody knows."""
        config = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0"}
        run = model(tmp_path / "run", config=config)
        assert "lacks-asset" not in told(ckpt_cli.merge(run, tmp_path / "out"))
        assert "lacks-asset" in told(ckpt_cli.merge(model(tmp_path / "other"), tmp_path / "text"))


def steps(run: Path, *names: str, numbers: tuple[int, ...] = (100, 200), **configs: Any) -> Path:
    for number in numbers:
        model(run / f"checkpoint-{number}", *names, **configs)
    return run


class TestAStepThatLostFiles:
    NAMES = ("tokenizer.json", "generation_config.json", "preprocessor_config.json", "chat_template.jinja")

    @pytest.mark.parametrize(("lost", "other"), [(200, 100), (100, 200)])
    def test_is_told_with_the_step_that_has_them(self, lost: int, other: int, tmp_path: Path) -> None:
        run = steps(tmp_path / "run", *self.NAMES)
        step = run / f"checkpoint-{lost}"
        assert "fewer-files" not in told(ckpt_cli.merge(run, tmp_path / "all", step=lost))
        for name in ("generation_config.json", "chat_template.jinja"):
            (step / name).unlink()
        text = f"the step lacks chat_template.jinja, generation_config.json, which checkpoint-{other} has: copy both from "
        for result in (ckpt_cli.merge(run, tmp_path / "out", step=lost), ckpt_cli.merge(step, in_place=True, weights_name="x.safetensors")):
            assert told(result)["fewer-files"] == f"{text}{run / f'checkpoint-{other}'} into the merged folder"
        detected = ckpt_cli.detect(step).checkpoint
        assert detected is not None
        assert "fewer-files" in {note.code for note in detected.notes}
        for path, number in ((step, None), (run, lost)):
            notes = {note.code: note for note in ckpt_cli.verify(path, step=number).notes}
            assert notes["fewer-files"].level == "warning"
            assert notes["fewer-files"].text == f"{text}{run / f'checkpoint-{other}'} into the step"
        assert "fewer-files" not in {note.code for note in ckpt_cli.verify(run / f"checkpoint-{other}").notes}

    @pytest.mark.parametrize(("lost", "other"), [(200, 100), (100, 200)])
    def test_is_told_of_the_usual_template_beside_others(self, lost: int, other: int, tmp_path: Path) -> None:
        run = steps(tmp_path / "run", *self.NAMES)
        for number in (100, 200):
            (run / f"checkpoint-{number}" / "additional_chat_templates").mkdir()
            (run / f"checkpoint-{number}" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
        (run / f"checkpoint-{lost}" / "chat_template.jinja").unlink()
        text = f"the step lacks chat_template.jinja, which checkpoint-{other} has"
        assert told(ckpt_cli.merge(run, tmp_path / "out", step=lost))["fewer-files"].startswith(text)

    def test_of_its_tokenizer_names_it_and_not_the_base(self, tmp_path: Path) -> None:
        run = steps(tmp_path / "run", *self.NAMES)
        (run / "checkpoint-200" / "tokenizer.json").unlink()
        text = told(ckpt_cli.merge(run, tmp_path / "out"))["lacks-asset"]
        assert text == f"the output has no tokenizer: checkpoint-100 has it: copy it from {run / 'checkpoint-100'} into the merged folder"
        shutil.copy(run / "checkpoint-100" / "tokenizer.json", tmp_path / "out")
        assert loads(tmp_path / "out")

    @pytest.mark.parametrize("folder", ["hf", "tokenizer", "huggingface", "some files"])
    @pytest.mark.parametrize(("lost", "other"), [(200, 100), (100, 200)])
    def test_with_their_folder_is_told_too(self, folder: str, lost: int, other: int, tmp_path: Path) -> None:
        run = steps(tmp_path / "run", "generation_config.json")
        for number in (100, 200):
            inner = run / f"checkpoint-{number}" / folder
            inner.mkdir()
            for name in ("tokenizer.json", "chat_template.jinja"):
                shutil.copy(model(tmp_path / f"{number}-{name}", name) / name, inner)
        assert "fewer-files" not in told(ckpt_cli.merge(run, tmp_path / "all", step=lost))
        shutil.rmtree(run / f"checkpoint-{lost}" / folder)
        base = model(tmp_path / "base", "tokenizer.json")
        for result in (ckpt_cli.merge(run, tmp_path / "out", step=lost), ckpt_cli.merge(run, tmp_path / "of_base", step=lost, base=base)):
            text = told(result)["fewer-files"]
            assert "chat_template.jinja" in text
            assert f"which checkpoint-{other} has" in text
            assert str(run / f"checkpoint-{other}" / folder) in text

    def test_of_a_folder_with_weights_of_their_own_is_not(self, tmp_path: Path) -> None:
        run = steps(tmp_path / "run")
        model(run / "checkpoint-100" / "reference", "tokenizer.json", "chat_template.jinja")
        assert "fewer-files" not in told(ckpt_cli.merge(run, tmp_path / "out"))

    def test_is_not_where_the_base_has_them(self, tmp_path: Path) -> None:
        run = steps(tmp_path / "run", *self.NAMES)
        (run / "checkpoint-200" / "generation_config.json").unlink()
        base = model(tmp_path / "base", "generation_config.json")
        assert "fewer-files" not in told(ckpt_cli.merge(run, tmp_path / "of_base", base=base))

    def test_is_told_of_an_average_and_by_a_watch(self, tmp_path: Path) -> None:
        run = steps(tmp_path / "run", *self.NAMES)
        (run / "checkpoint-200" / "chat_template.jinja").unlink()
        assert "chat_template.jinja" in told(ckpt_cli.average(run, tmp_path / "mean", everything=True))["fewer-files"]
        result = ckpt_cli.watch(run, tmp_path / "merged", once=True, settle=0.1, interval=0.1)
        assert any("chat_template.jinja" in text for event in result.events for text in event.warnings)

    def test_and_has_them_in_other_forms_is_not(self, tmp_path: Path) -> None:
        run = steps(tmp_path / "run", "tokenizer.json", "vocab.json", "merges.txt", "preprocessor_config.json", "chat_template.jinja")
        step = run / "checkpoint-200"
        for name in ("vocab.json", "merges.txt", "preprocessor_config.json", "chat_template.jinja"):
            (step / name).unlink()
        (step / "processor_config.json").write_text(json.dumps({"image_processor": {}}))
        (step / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
        assert "fewer-files" not in told(ckpt_cli.merge(run, tmp_path / "out"))

    def test_that_a_merge_in_place_gave_to_another_one_is_not(self, tmp_path: Path) -> None:
        run = steps(tmp_path / "run")
        base = model(tmp_path / "base", "tokenizer.json", "generation_config.json")
        ckpt_cli.merge(run / "checkpoint-100", in_place=True, weights_name="x.safetensors", base=base)
        assert (run / "checkpoint-100" / "tokenizer.json").exists()
        assert "fewer-files" not in told(ckpt_cli.merge(run, tmp_path / "out", step=200))


def test_the_shipped_table_is_that_of_the_installed_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from ckpt_cli.hub.loaded_with.compile import loaded_with

    shipped, made = json.loads(FILE.read_text()), loaded_with()
    if shipped["transformers"] != made["transformers"]:
        pytest.skip(f"the table is of transformers {shipped['transformers']}")
    # Packages that are not installed hide classes of tokenizers, and of models.
    here = {kind: name for kind, name in made["types"].items() if name is not None}
    assert here.items() <= shipped["types"].items()
    assert made["types"].keys() == shipped["types"].keys()
    assert made["distrusted"] == shipped["distrusted"]
    assert made["tokenizers"].items() <= shipped["tokenizers"].items()
    assert made["processors"] == shipped["processors"]
    beyond = {kinds: sorted(set(names) - set(shipped["needs"].get(kinds, ()))) for kinds, names in made["needs"].items()}
    assert not any(beyond.values()), beyond
    assert made["beside"] == shipped["beside"]
