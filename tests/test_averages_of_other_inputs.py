"""Averages of models whose weights fit, and that were trained on inputs prepared in different ways: only side files show it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BertTokenizerFast,
    GenerationConfig,
    PreTrainedTokenizerFast,
    ViTImageProcessor,
)

import ckpt_cli
from tests import tiny

WORDS = ("<unk>", "<s>", "</s>", "<pad>", "Abc", "abc", "▁Abc", "▁abc")
CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
INST = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"

Save = Callable[[Path], None]


def folder(path: Path, *saves: Save) -> Path:
    random = torch.Generator().manual_seed(len(path.name))
    tensors = {"model.embed_tokens.weight": torch.randn(8, 4, generator=random), "model.norm.weight": torch.ones(4)}
    tiny.folder(path, tensors, files={"config.json": {"model_type": "x"}}, bare=True)
    for save in saves:
        save(path)
    return path


def backend() -> Tokenizer:
    built = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    return built


def words(change: Callable[[Tokenizer], None] | None = None, **settings: Any) -> Save:
    """A tokenizer, whose steps ``change`` sets in another way."""

    def save(path: Path) -> None:
        built = backend()
        if change is not None:
            change(built)
        special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        PreTrainedTokenizerFast(tokenizer_object=built, **{**special, **settings}).save_pretrained(path)

    return save


def pictures(**settings: Any) -> Save:
    return lambda path: ViTImageProcessor(**settings).save_pretrained(path) and None


def generation(**settings: Any) -> Save:
    return lambda path: GenerationConfig(**settings).save_pretrained(path)


def text(name: str, content: Any) -> Save:
    def save(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))

    return save


def bert(lower: bool) -> Save:
    def save(path: Path) -> None:
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Abc", "abc"]
        BertTokenizerFast(vocab={word: number for number, word in enumerate(vocabulary)}, do_lower_case=lower).save_pretrained(path)

    return save


def averaged(*paths: Path) -> tuple[dict[str, str], Path]:
    """What is said of an average at each level, by code, and the average."""
    out = paths[0].parent / "mean"
    result = ckpt_cli.average(list(paths), out, overwrite=True)
    return {note.code: note.text for note in result.outputs[0].notes}, out


def lowered(built: Tokenizer) -> None:
    built.normalizer = normalizers.Lowercase()


def begun(built: Tokenizer) -> None:
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


def unjoined(built: Tokenizer) -> None:
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")


def undecoded(built: Tokenizer) -> None:
    built.decoder = decoders.ByteLevel()


def test_other_code_is_told(tmp_path: Path) -> None:
    paths = [tiny.folder(tmp_path / name, tiny.weights(1), tiny.classless(auto_map={"AutoModel": "modeling_my.My"})) for name in "ab"]
    for path, code in zip(paths, ("class My: ...\n", "class My:  ...\r\n"), strict=True):
        (path / "modeling_my.py").write_bytes(code.encode())
    assert "side-files-differ" not in averaged(*paths)[0]
    (paths[0] / "modeling_my.py").write_text("class My:\n    scale = 2\n")
    text = averaged(*paths)[0]["side-files-differ"]
    assert text == f"code of the model differs in {paths[0]} and {paths[1]}: modeling_my.py; that of {paths[1]} is taken"


class TestWhatIsPreparedDifferently:
    @pytest.mark.parametrize(
        ("first", "second", "said"),
        [
            (bert(True), bert(False), "tokenizer.json (normalizer), tokenizer_config.json (do_lower_case)"),
            (words(), words(lowered), "tokenizer.json (normalizer)"),
            (words(), words(begun), "tokenizer.json (post_processor)"),
            (words(), words(unjoined), "tokenizer.json (pre_tokenizer)"),
            (words(), words(undecoded), "tokenizer.json (decoder)"),
            (words(eos_token="</s>"), words(eos_token="<pad>"), "tokenizer.json (added_tokens), tokenizer_config.json (eos_token)"),
            (words(model_max_length=512), words(model_max_length=128), "tokenizer_config.json (model_max_length)"),
            (pictures(image_mean=[0.5] * 3), pictures(image_mean=[0.4] * 3), "preprocessor_config.json (image_mean)"),
            (pictures(resample=2), pictures(resample=3), "preprocessor_config.json (resample)"),
            (generation(eos_token_id=2), generation(eos_token_id=[2, 3]), "generation_config.json (eos_token_id)"),
            (words(chat_template=CHATML), words(chat_template=INST), "the chat template"),
        ],
    )
    def test_is_told(self, first: Save, second: Save, said: str, tmp_path: Path) -> None:
        one, two = folder(tmp_path / "one", first), folder(tmp_path / "three", second)
        for paths in ((one, two), (two, one)):
            last = paths[-1]
            expected = f"files that prepare inputs and texts differ in {paths[0]} and {last}: {said}; those of {last} are taken"
            assert averaged(*paths)[0]["side-files-differ"] == expected

    def test_is_what_the_libraries_do_with_the_files(self, tmp_path: Path) -> None:
        one, two = folder(tmp_path / "one", bert(True), pictures()), folder(tmp_path / "three", bert(False), pictures(image_std=[0.2] * 3))
        told, out = averaged(one, two)
        assert "do_lower_case), preprocessor_config.json (image_std); those" in told["side-files-differ"]
        ids = [AutoTokenizer.from_pretrained(path)("Abc")["input_ids"] for path in (one, two, out)]
        scales = [list(AutoImageProcessor.from_pretrained(path).image_std) for path in (one, two, out)]
        assert ids[0] != ids[1] == ids[2]
        assert scales[0] != scales[1] == scales[2]

    def test_is_told_of_a_template_that_only_one_has(self, tmp_path: Path) -> None:
        one, two = folder(tmp_path / "one", words(chat_template=CHATML)), folder(tmp_path / "three", words())
        for paths in ((one, two), (two, one)):
            assert f"the chat template (only {one} has one)" in averaged(*paths)[0]["side-files-differ"]

    def test_is_told_once_of_a_lost_template(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        folder(run / "checkpoint-100", words(chat_template=CHATML))
        folder(run / "checkpoint-2000", words())
        told = {note.code: note.text for note in ckpt_cli.average(run, tmp_path / "mean", everything=True).outputs[0].notes}
        assert "chat_template.jinja" in told["fewer-files"]
        assert "side-files-differ" not in told

    def test_is_told_of_templates_by_name(self, tmp_path: Path) -> None:
        one, two = (
            folder(tmp_path / name, words(chat_template={"default": CHATML, "tool_use": tool}))
            for name, tool in (("a", CHATML), ("bc", INST))
        )
        assert "chat templates (tool_use)" in averaged(one, two)[0]["side-files-differ"]

    def test_is_told_of_the_one_of_many_that_differs(self, tmp_path: Path) -> None:
        paths = [folder(tmp_path / ("x" * number), words(lowered if number == 2 else None)) for number in (1, 2, 3)]
        assert f"differ in {paths[1]} and {paths[2]}: tokenizer.json" in averaged(*paths)[0]["side-files-differ"]

    def test_is_compared_with_the_files_that_are_taken(self, tmp_path: Path) -> None:
        paths = [folder(tmp_path / ("x" * number), words(lowered if number == 1 else None)) for number in (1, 2, 3)]
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (paths[2] / name).unlink()
        told, out = averaged(*paths)
        assert told["side-files-differ"].endswith(f"tokenizer.json (normalizer); those of {paths[1]} are taken")
        assert (out / "tokenizer.json").read_bytes() == (paths[1] / "tokenizer.json").read_bytes()

    def test_is_told_of_merges(self, tmp_path: Path) -> None:
        vocabulary = {token: number for number, token in enumerate(("a", "b", "c", "ab", "bc"))}
        merges = (["a b", "b c"], [["b", "c"], ["a", "b"]], [["a", "b"], ["b", "c"]])
        saved = [text("tokenizer.json", {"model": {"type": "BPE", "vocab": vocabulary, "merges": each}}) for each in merges]
        one, two, same = (folder(tmp_path / ("x" * number), save) for number, save in enumerate(saved, 1))
        assert "tokenizer.json (merges)" in averaged(one, two)[0]["side-files-differ"]
        assert "side-files-differ" not in averaged(one, same)[0]

    def test_is_told_of_pooling_prompts_and_scales(self, tmp_path: Path) -> None:
        modules = text("modules.json", [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}])
        files = {
            "1_Pooling/config.json": ({"pooling_mode_cls_token": True}, {"pooling_mode_cls_token": False}),
            "config_sentence_transformers.json": (
                {"prompts": {"query": "q: "}, "__version__": {"a": "1"}},
                {"prompts": {"query": ""}, "__version__": {"a": "2"}},
            ),
            "dataset_statistics.json": ({"bridge": {"mean": [0.0]}}, {"bridge": {"mean": [1.0]}}),
        }
        one, two = (
            folder(tmp_path / name, words(), modules, *(text(file, both[place]) for file, both in files.items()))
            for place, name in enumerate(("a", "bc"))
        )
        said = averaged(one, two)[0]["side-files-differ"]
        for part in ("1_Pooling/config.json (pooling_mode_cls_token)", "transformers.json (prompts)", "statistics.json (bridge)"):
            assert part in said

    def test_is_no_warning_where_texts_are_only_sampled_in_another_way(self, tmp_path: Path) -> None:
        one = folder(tmp_path / "a", generation(do_sample=True, temperature=0.7))
        two = folder(tmp_path / "bc", text("generation_config.json", {"do_sample": True, "top_k": 50}))
        told = averaged(one, two)[0]
        assert "temperature (0.7, 1.0); that of" in told["sampling-differs"]
        assert "side-files-differ" not in told


class TestWhatIsWrittenDifferently:
    """Two steps of one run, of which the second is saved by another version, or after other calls."""

    @staticmethod
    def steps(path: Path, *saves: Save) -> tuple[Path, Path]:
        one, two = folder(path / "checkpoint-100", *saves), path / "checkpoint-2000"
        shutil.copytree(one, two)
        folder(two)
        return one, two

    @staticmethod
    def rewrite(path: Path, **entries: Any) -> None:
        content = {**json.loads(path.read_text()), **entries}
        content = {key: content[key] for key in reversed(content) if content[key] is not ...}
        path.write_text(json.dumps(content, indent=4))

    def test_is_nothing_to_tell(self, tmp_path: Path) -> None:
        one, two = self.steps(
            tmp_path, words(chat_template=CHATML), generation(eos_token_id=2, do_sample=True, temperature=0.7), pictures()
        )
        assert not {"side-files-differ", "sampling-differs"} & averaged(one, two)[0].keys()
        called = Tokenizer.from_file(str(two / "tokenizer.json"))
        called.enable_padding(length=4)
        called.enable_truncation(5)
        called.save(str(two / "tokenizer.json"), pretty=False)
        self.rewrite(
            two / "tokenizer_config.json",
            tokenizer_class="TokenizersBackend",
            name_or_path="elsewhere",
            _commit_hash="0" * 40,
            max_length=5,
            padding_side="left",
            eos_token={"__type": "AddedToken", "content": "</s>", "lstrip": False, "special": True},
            added_tokens_decoder={"2": {"content": "</s>"}},
            chat_template=f"{CHATML}\n",
        )
        (two / "chat_template.jinja").unlink()
        self.rewrite(two / "generation_config.json", transformers_version="4.40.0", eos_token_id=[2], top_p=1.0, _from_model_config=True)
        self.rewrite(two / "preprocessor_config.json", size=224, image_processor_type="ViTImageProcessorFast", _valid_processor_keys=["a"])
        assert not {"side-files-differ", "sampling-differs"} & averaged(one, two)[0].keys()
        ids = [AutoTokenizer.from_pretrained(path)("Abc abc")["input_ids"] for path in (one, two)]
        assert ids[0] == ids[1]

    def test_of_a_tokenizer_is_its_old_form(self, tmp_path: Path) -> None:
        one, two = self.steps(tmp_path, words())
        old = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
        self.rewrite(two / "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [old]}, decoder=old)
        assert "side-files-differ" not in averaged(one, two)[0]
        first, second = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (one, two))
        assert first.encode("Abc abc").ids == second.encode("Abc abc").ids

    @pytest.mark.parametrize("same", [True, False])
    def test_of_a_processor_is_another_file(self, same: bool, tmp_path: Path) -> None:
        one, two = self.steps(tmp_path, pictures())
        settings = json.loads((two / "preprocessor_config.json").read_text())
        (two / "preprocessor_config.json").unlink()
        inner = settings if same else {**settings, "image_std": [0.1] * 3}
        text("processor_config.json", {"image_processor": inner, "processor_class": "P"})(two)
        told = averaged(one, two)[0]
        assert ("side-files-differ" not in told) == same
        assert same or "processor_config.json (image_std)" in told["side-files-differ"]

    def test_of_a_file_that_cannot_be_read_is_told_elsewhere(self, tmp_path: Path) -> None:
        one, two = self.steps(tmp_path, words(), generation(eos_token_id=2))
        for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
            (one / name).write_text('{"a": ' if name != "tokenizer_config.json" else '{"a":' * 900 + "1" + "}" * 900)
        assert "side-files-differ" not in averaged(one, two)[0]
