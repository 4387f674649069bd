"""Tokenizers and other files beside weights: what the run has counts, and what does not fit the weights is named."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Unsupported
from tests.architectures import MODELS, build


def tokenizer(order: str = "abcdefgh") -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(order)}, "merges": []}, "added_tokens": []}


def model(folder: Path, rows: int = 8, **texts: Any) -> Path:
    folder.mkdir(parents=True)
    tensors = {"model.embed_tokens.weight": torch.randn(rows, 4), "model.norm.weight": torch.ones(4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in {"config": {}, "tokenizer": tokenizer(), **texts}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def warnings(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes if note.level == "warning"}


class TestFilesOfABase:
    def test_a_chat_template_of_the_run_counts(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", tokenizer_config={"chat_template": "RUN"})
        base = model(tmp_path / "base", tokenizer_config={})
        (base / "chat_template.jinja").write_text("BASE")
        ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert not (tmp_path / "out" / "chat_template.jinja").exists()

    def test_a_template_that_the_run_lacks_is_taken(self, tmp_path: Path) -> None:
        run, base = model(tmp_path / "run", tokenizer_config={}), model(tmp_path / "base")
        (base / "chat_template.jinja").write_text("BASE")
        ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert (tmp_path / "out" / "chat_template.jinja").read_text() == "BASE"

    @pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "x.tiktoken"])
    def test_no_vocabulary_is_mixed_of_two(self, tmp_path: Path, name: str) -> None:
        run, base = model(tmp_path / "run"), model(tmp_path / "base")
        (base / name).write_text("{}")
        ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert not (tmp_path / "out" / name).exists()
        (run / "tokenizer.json").unlink()
        ckpt_cli.merge(run, tmp_path / "other", base=base)
        assert (tmp_path / "other" / name).exists()

    @pytest.mark.parametrize("name", ["tokenizer_config", "added_tokens", "special_tokens_map"])
    def test_an_incomplete_tokenizer_of_the_run_is_not_mixed_with_that_of_the_base(self, tmp_path: Path, name: str) -> None:
        run, base = model(tmp_path / "run", **{name: {"from": "run"}}), model(tmp_path / "base", tokenizer_config={"eos_token": "a"})
        (run / "tokenizer.json").unlink()
        result = ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert f"{name}.json" in warnings(result)["tokenizer-of-base"]
        for each in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "out" / each).read_bytes() == (base / each).read_bytes()
        assert name == "tokenizer_config" or not (tmp_path / "out" / f"{name}.json").exists()

    def test_the_config_of_another_tokenizer_is_not_added(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run")
        base = model(tmp_path / "base", tokenizer=tokenizer("abcdefhg"), tokenizer_config={"eos_token": "a"})
        told = warnings(ckpt_cli.merge(run, tmp_path / "out", base=base))
        assert "tokenizer-of-base" not in told
        assert f"the tokenizer of {run} has no tokenizer_config.json" in told["tokenizer-settings"]
        assert str(base) in told["tokenizer-settings"]
        assert not (tmp_path / "out" / "tokenizer_config.json").exists()


class TestATokenizer:
    def test_with_more_ids_than_rows_is_named(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", rows=5)
        assert "3 of 8 tokens have ids of 5 and above" in warnings(ckpt_cli.merge(run, tmp_path / "out"))["vocabulary"]
        assert "vocabulary" in warnings(ckpt_cli.average([run, model(tmp_path / "two", rows=5)], tmp_path / "mean"))
        assert "vocabulary" in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}

    def test_that_fits_is_not(self, tmp_path: Path) -> None:
        assert "vocabulary" not in warnings(ckpt_cli.merge(model(tmp_path / "run", rows=9), tmp_path / "out"))

    def test_with_other_ids_makes_no_average(self, tmp_path: Path) -> None:
        first, second = model(tmp_path / "one"), model(tmp_path / "two", tokenizer=tokenizer("abcdefhg"))
        told = warnings(ckpt_cli.average([first, second], tmp_path / "mean"))
        assert "give other ids to tokens" in told["tokenizers-differ"]
        same = warnings(ckpt_cli.average([first, model(tmp_path / "three")], tmp_path / "other"))
        assert "tokenizers-differ" not in same

    @pytest.mark.parametrize(
        ("first", "second", "differ"),
        [
            ({"<a>": 6, "<b>": 7}, {"<a>": 7, "<b>": 6}, True),
            ({"<a>": 6}, {"<b>": 6}, True),
            ({"<a>": 6}, {"<a>": 7}, True),
            ({"<a>": 6}, {"<a>": 6, "<b>": 7}, False),
            ({"a": 0}, {}, False),
            ({}, {"<b>": 6}, False),
        ],
    )
    def test_whose_added_tokens_have_other_ids_makes_none_either(
        self, first: dict[str, int], second: dict[str, int], differ: bool, tmp_path: Path
    ) -> None:
        paths = []
        for name, added in (("one", first), ("two", second)):
            listed = [{"content": token, "id": number} for token, number in added.items()]
            paths.append(model(tmp_path / name, tokenizer={**tokenizer("abcdef"), "added_tokens": listed}))
        for one, two in (paths, paths[::-1]):
            told = warnings(ckpt_cli.average([one, two], tmp_path / "mean", overwrite=True))
            assert ("tokenizers-differ" in told) == differ
            assert ("other-side-file" in {item.code for item in ckpt_cli.verify(one, against=two).findings}) == differ

    def test_is_compared_where_the_newest_checkpoint_has_none(self, tmp_path: Path) -> None:
        paths = [model(tmp_path / "one"), model(tmp_path / "two", tokenizer=tokenizer("abcdefhg")), model(tmp_path / "three")]
        (paths[2] / "tokenizer.json").unlink()
        assert f"{paths[0]} and {paths[1]}" in warnings(ckpt_cli.average(paths, tmp_path / "mean"))["tokenizers-differ"]


class TestATokenizerWithoutTokenizerJson:
    """The same question, of the tables that older classes read."""

    LETTERS = "abcdefgh"
    SWAPPED = "abcdefhg"

    @staticmethod
    def files(kind: str, order: str) -> dict[str, bytes]:
        numbered = {token: number for number, token in enumerate(order)}
        plain = {
            "vocab.json": json.dumps({token: number for number, token in enumerate("abcdef")}).encode(),
            "merges.txt": b"#version: 0.2\n",
        }
        decoder = {str(number): {"content": token} for token, number in numbered.items() if number > 5}
        return {
            "vocab.json": {"vocab.json": json.dumps(numbered).encode(), "merges.txt": b"#version: 0.2\n"},
            "languages": {"vocab.json": json.dumps({"eng": numbered, "deu": {"a": 0}}).encode()},
            "vocab.txt": {"vocab.txt": "\n".join(order).encode()},
            "added_tokens.json": {**plain, "added_tokens.json": json.dumps({t: n for t, n in numbered.items() if n > 5}).encode()},
            "tokenizer_config.json": {**plain, "tokenizer_config.json": json.dumps({"added_tokens_decoder": decoder}).encode()},
            "tokenizer.model": {
                "tokenizer.model": b"".join(base64.b64encode(t.encode()) + f" {n}\n".encode() for t, n in numbered.items())
            },
        }[kind]

    @staticmethod
    def put(folder: Path, files: dict[str, bytes]) -> Path:
        model(folder)
        (folder / "tokenizer.json").unlink()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    KINDS = pytest.mark.parametrize(
        "kind", ["vocab.json", "languages", "vocab.txt", "added_tokens.json", "tokenizer_config.json", "tokenizer.model"]
    )

    @KINDS
    @pytest.mark.parametrize("same", [False, True])
    def test_with_other_ids_makes_no_average(self, kind: str, same: bool, tmp_path: Path) -> None:
        one = self.put(tmp_path / "one", self.files(kind, self.LETTERS))
        two = self.put(tmp_path / "two", self.files(kind, self.LETTERS if same else self.SWAPPED))
        told = warnings(ckpt_cli.average([one, two], tmp_path / "mean"))
        assert ("tokenizers-differ" in told) != same
        assert same or f"({kind.replace('languages', 'vocab.json')})" in told["tokenizers-differ"]

    def test_with_more_tokens_is_no_other(self, tmp_path: Path) -> None:
        for kind in ("vocab.json", "vocab.txt"):
            one = self.put(tmp_path / kind / "one", self.files(kind, self.LETTERS[:6]))
            two = self.put(tmp_path / kind / "two", self.files(kind, self.LETTERS))
            for paths in ([one, two], [two, one]):
                assert "tokenizers-differ" not in warnings(ckpt_cli.average(paths, tmp_path / "mean", overwrite=True))

    def test_in_another_form_is_no_other(self, tmp_path: Path) -> None:
        one = self.put(tmp_path / "one", self.files("vocab.json", self.LETTERS))
        two = self.put(tmp_path / "two", self.files("vocab.json", self.LETTERS))
        (two / "vocab.json").write_text(json.dumps(json.loads((two / "vocab.json").read_text()), indent=2))
        assert "tokenizers-differ" not in warnings(ckpt_cli.average([one, two], tmp_path / "mean"))


def test_parts_of_sentence_transformers_are_named(tmp_path: Path) -> None:
    modules = [
        {"idx": 0, "path": "", "type": "Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "Pooling"},
        {"idx": 2, "path": "2_Dense"},
    ]
    told = warnings(ckpt_cli.merge(model(tmp_path / "run", modules=modules), tmp_path / "out"))
    assert "1_Pooling, 2_Dense" in told["lacks-part"]
    alone = warnings(ckpt_cli.merge(model(tmp_path / "other", modules=modules[:1]), tmp_path / "alone"))
    assert "lacks-part" not in alone


def test_parts_of_sentence_transformers_that_are_gone_are_found(tmp_path: Path) -> None:
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}, {"path": "2_N", "type": "x.Normalize"}]
    run = model(tmp_path / "run", modules=modules)

    def found() -> dict[str, str]:
        kinds = ("lacks-part", "damaged-side-file")
        return {str(item.file): item.message for item in ckpt_cli.verify(run).findings if item.code in kinds}

    assert found() == {"modules.json": "1_Pooling, which it names, is not there"}
    told = warnings(ckpt_cli.merge(run, tmp_path / "out"))["lacks-part"]
    assert told.endswith(f"1_Pooling is not in {run} either")
    (run / "1_Pooling").mkdir()
    (run / "1_Pooling" / "config.json").write_text("")
    assert [*found()] == ["1_Pooling/config.json"]
    (run / "1_Pooling" / "config.json").write_text("{}")
    assert not found()
    assert warnings(ckpt_cli.merge(run, tmp_path / "again"))["lacks-part"].endswith(f"copy them from {run}")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_the_same_weights_through_a_link_are_averaged_twice(tmp_path: Path, link: Any) -> None:
    first, second = model(tmp_path / "one"), model(tmp_path / "two")
    (second / "model.safetensors").unlink()
    link(first / "model.safetensors", second / "model.safetensors")
    assert "is averaged 2 times" in {n.code: n.text for n in ckpt_cli.average([first, second], tmp_path / "mean").notes}["same-twice"]


def test_adapters_in_a_folder_beside_whole_weights_are_named(tmp_path: Path) -> None:
    run = model(tmp_path / "run")
    (run / "lora_adapter").mkdir()
    (run / "lora_adapter" / "adapter_config.json").write_text("{}")
    told = {note.code: note.text for note in ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes if note.level == "warning"}
    assert "lora_adapter" in told["adapters-beside"]


def test_the_same_weights_in_two_copies_are_averaged_twice(tmp_path: Path) -> None:
    first = model(tmp_path / "one")
    shutil.copytree(first, tmp_path / "two")
    result = ckpt_cli.average([first, tmp_path / "two"], tmp_path / "mean")
    assert "hold the same weights" in {note.code: note.text for note in result.outputs[0].notes}["same-twice"]
    other = ckpt_cli.average([first, model(tmp_path / "three")], tmp_path / "other")
    assert "same-twice" not in {note.code for note in (*other.notes, *other.outputs[0].notes)}


@pytest.mark.parametrize("name", ["lora_unet_down.lora_up.weight", "attn.to_q.lora.down.weight", "x.hada_w1_a", "layers.0.q_proj.lora_a"])
def test_factors_of_adapters_are_not_averaged(tmp_path: Path, name: str) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        save_file({name: torch.randn(4, 2)}, tmp_path / folder / "model.safetensors")
    with pytest.raises(Unsupported, match="mean of products"):
        ckpt_cli.average([tmp_path / "one", tmp_path / "two"], tmp_path / "out")


class TestCustomCode:
    AUTO: ClassVar = {"auto_map": {"AutoConfig": "configuration_my.MyConfig", "AutoModel": "modeling_my.MyModel"}}

    def test_that_is_missing_is_named(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", config=self.AUTO)
        (run / "configuration_my.py").write_text("from .helper_my import x\nclass MyConfig: ...")
        told = warnings(ckpt_cli.merge(run, tmp_path / "out"))["lacks-code"]
        assert "helper_my.py, modeling_my.py" in told

    def test_of_another_repository_or_none_is_not(self, tmp_path: Path) -> None:
        remote = {"auto_map": {"AutoModel": "org/name--modeling_my.MyModel"}}
        assert "lacks-code" not in warnings(ckpt_cli.merge(model(tmp_path / "run", config=remote), tmp_path / "out"))
        whole = model(tmp_path / "whole", config=self.AUTO)
        for name in ("configuration_my.py", "modeling_my.py"):
            (whole / name).write_text("class MyConfig: ...\nclass MyModel: ...")
        assert "lacks-code" not in warnings(ckpt_cli.merge(whole, tmp_path / "other"))

    @pytest.mark.parametrize(
        ("code", "helper", "lacking"),
        [
            ("", "", "MyModel of modeling_my.py"),
            ("from .helper_my import x\n# MyModel", "x = 1", "MyModel of modeling_my.py"),
            ("from .helper_my import (  # names\n    x as y,\n    z,\n)\nclass MyModel: ...", "x = 1", "z of helper_my.py"),
            ("from .helper_my import MyModel", "class MyModel: ...", None),
            ("from .helper_my import MyModel", "from .others_my import *", None),
            ("from .helper_my import MyModel", "def __getattr__(name): ...", None),
            ("MyModel = type('MyModel', (), {})", "", None),
        ],
    )
    def test_that_lacks_what_is_named_in_it_is_told(self, code: str, helper: str, lacking: str | None, tmp_path: Path) -> None:
        run = model(tmp_path / "run", config={"auto_map": {"AutoModel": "modeling_my.MyModel"}})
        for name, content in (("modeling_my.py", code), ("helper_my.py", helper), ("others_my.py", "")):
            (run / name).write_text(content)
        told = warnings(ckpt_cli.merge(run, tmp_path / "out")).get("lacks-code")
        found = {item.code: item.message for item in ckpt_cli.verify(run).findings}.get("lacks-code")
        for text in (told, found):
            assert (text is None) == (lacking is None)
            assert text is None or text.startswith(f"{lacking}, which auto_map or another module names, is not in the file")


EMPTY = [
    "tokenizer.model",
    "merges.txt",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "chat_template.jinja",
    "x.tiktoken",
    "preprocessor_config.json",
]


@pytest.mark.parametrize("name", [*EMPTY, "bpe.codes", "modeling_my.py"])
def test_a_file_of_zeros_is_named(name: str, tmp_path: Path) -> None:
    """As a power loss leaves it: of the right size, without its content."""
    config = {"auto_map": {"AutoModel": "modeling_my.MyModel"}} if name.endswith(".py") else {}
    run = model(tmp_path / "run", config=config)
    (run / name).write_bytes(bytes(5000))
    told = warnings(ckpt_cli.merge(run, tmp_path / "out"))["damaged-asset"]
    assert told == f"{name} is passed on as it is: the file begins with zeros, as after a power loss"
    found = ckpt_cli.verify(tmp_path / "out").findings
    assert name.endswith(".py") or "damaged-side-file" in {item.code for item in found}


class TestAnEmptyFile:
    """As an interrupted copy or a full disk leaves it."""

    @pytest.mark.parametrize("name", EMPTY)
    def test_is_named_by_every_command(self, name: str, tmp_path: Path) -> None:
        run = model(tmp_path / "run")
        (run / name).touch()
        assert warnings(ckpt_cli.merge(run, tmp_path / "out"))["damaged-asset"] == f"{name} is passed on as it is: the file is empty"
        averaged = ckpt_cli.average([run, model(tmp_path / "older")], tmp_path / "mean")
        assert "older" in str(tmp_path / "older")
        assert "damaged-asset" not in warnings(averaged)
        averaged = ckpt_cli.average([tmp_path / "older", run], tmp_path / "again")
        assert warnings(averaged)["damaged-asset"].startswith(name)
        for path in (run, tmp_path / "out"):
            found = [(item.code, item.severity, item.file) for item in ckpt_cli.verify(path).findings if item.file == name]
            assert found == [("damaged-side-file", "error", name)]

    @pytest.mark.parametrize("name", ["LICENSE", "NOTICE"])
    def test_that_no_loader_opens_is_none(self, name: str, tmp_path: Path) -> None:
        run = model(tmp_path / "run")
        (run / name).touch()
        assert "damaged-asset" not in warnings(ckpt_cli.merge(run, tmp_path / "out"))
        assert not any(item.file == name for item in ckpt_cli.verify(tmp_path / "out").findings)


class TestSpecialIds:
    """Of the end of a text, for example: where the model has no row for it, generation never ends."""

    @pytest.mark.parametrize("name", ["generation_config", "config"])
    def test_beyond_the_embedding_are_named(self, name: str, tmp_path: Path) -> None:
        ids = {"eos_token_id": [3, 151645], "pad_token_id": 151643, "bos_token_id": 1}
        run = model(tmp_path / "run", **{name: ids})
        text = f"{name}.json: eos_token_id 151645, pad_token_id 151643: the embedding has 8 rows"
        assert warnings(ckpt_cli.merge(run, tmp_path / "out"))["token-ids"] == text
        assert warnings(ckpt_cli.average([model(tmp_path / "older"), run], tmp_path / "mean"))["token-ids"] == text
        for path in (run, tmp_path / "out"):
            (item,) = [item for item in ckpt_cli.verify(path).findings if item.code == "token-ids"]
            assert (item.severity, item.file) == ("warning", f"{name}.json")

    def test_in_the_config_of_a_language_model_are_named(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", config={"text_config": {"eos_token_id": 8}})
        assert "eos_token_id 8" in warnings(ckpt_cli.merge(run, tmp_path / "out"))["token-ids"]

    @pytest.mark.parametrize("kind", ["SiglipModel", "ModernBertForMaskedLM"])
    def test_of_a_class_that_writes_no_text_are_not(self, kind: str, tmp_path: Path) -> None:
        run = model(tmp_path / "run", config={"architectures": [kind], "eos_token_id": 49407})
        assert "token-ids" not in warnings(ckpt_cli.merge(run, tmp_path / "out"))

    @pytest.mark.parametrize(
        "ids", [{"eos_token_id": 7, "pad_token_id": -1, "bos_token_id": None}, {"image_token_id": 99}, {"eos_token_id": "</s>"}]
    )
    def test_that_have_a_row_or_need_none_are_not(self, ids: dict[str, Any], tmp_path: Path) -> None:
        run = model(tmp_path / "run", config=ids, generation_config=ids)
        assert "token-ids" not in warnings(ckpt_cli.merge(run, tmp_path / "out"))


class TestSettingsForGenerationWithoutAnEnd:
    """As a rollout's are: transformers takes the end of a text from them alone, and not from config.json."""

    @pytest.mark.parametrize("config", [{"eos_token_id": 3}, {"text_config": {"eos_token_id": [3, 4]}}])
    def test_are_told(self, config: dict[str, Any], tmp_path: Path) -> None:
        run = model(tmp_path / "run", config=config, generation_config={"max_new_tokens": 16, "n": 8})
        assert "texts never end" in warnings(ckpt_cli.merge(run, tmp_path / "out"))["no-end"]
        assert "texts never end" in warnings(ckpt_cli.average([model(tmp_path / "older"), run], tmp_path / "mean"))["no-end"]
        for path in (run, tmp_path / "out"):
            (item,) = [item for item in ckpt_cli.verify(path).findings if item.code == "no-end"]
            assert (item.severity, item.file) == ("warning", "generation_config.json")

    @pytest.mark.parametrize(
        ("config", "generation"),
        [
            ({"eos_token_id": 3}, {"eos_token_id": [3]}),
            ({"eos_token_id": 3}, {"eos_token_id": 0}),
            ({"eos_token_id": 3}, None),
            ({}, {"max_new_tokens": 16}),
            ({"eos_token_id": None}, {"max_new_tokens": 16}),
            ({"eos_token_id": 3, "architectures": ["SiglipModel"]}, {"max_new_tokens": 16}),
        ],
    )
    def test_others_are_not(self, config: dict[str, Any], generation: dict[str, Any] | None, tmp_path: Path) -> None:
        files = {} if generation is None else {"generation_config": generation}
        run = model(tmp_path / "run", config=config, **files)
        assert "no-end" not in warnings(ckpt_cli.merge(run, tmp_path / "out"))

    @pytest.mark.parametrize(
        ("own", "of_base", "told"), [(5, 3, True), ([5, 6], [3, 4], True), (5, [3, 5], False), (3, 3, False), (None, 3, False)]
    )
    def test_of_a_base_that_end_elsewhere_are_told(self, own: Any, of_base: Any, told: bool, tmp_path: Path) -> None:
        """Chat templates end a turn with a token of their own, which a training writes into config.json."""
        run = model(tmp_path / "run", config={"eos_token_id": own} if own is not None else {"model_type": "own"})
        base = model(tmp_path / "base", config={"eos_token_id": 3}, generation_config={"eos_token_id": of_base})
        found = warnings(ckpt_cli.merge(run, tmp_path / "out", base=base))
        assert ("other-end" in found) is told
        if told:
            assert "comes from base" in found["other-end"]

    def test_never_end_in_transformers(self, tmp_path: Path) -> None:
        made = build(*MODELS["llama"])
        made.config.eos_token_id = 3
        made.save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 16}')
        assert type(made).from_pretrained(tmp_path).generation_config.eos_token_id is None


@pytest.mark.parametrize("command", ["merge", "average"])
def test_a_tokenizer_is_parsed_once(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 250 000 tokens takes a second and hundreds of megabytes."""
    paths = [model(tmp_path / name, tokenizer=tokenizer(f"abc{name}")) for name in "xy"]
    parsed: list[str] = []
    loads = json.loads

    def counted(text: str | bytes, *arguments: Any, **options: Any) -> Any:
        parsed.append(text if isinstance(text, str) else text.decode())
        return loads(text, *arguments, **options)

    monkeypatch.setattr(json, "loads", counted)
    if command == "merge":
        ckpt_cli.merge(paths[0], tmp_path / "out", base=paths[1])
    else:
        ckpt_cli.average(paths, tmp_path / "out")
    vocabularies = [text for text in parsed if '"BPE"' in text]
    assert len(vocabularies) == (1 if command == "merge" else 2)
    assert len(set(vocabularies)) == len(vocabularies)
