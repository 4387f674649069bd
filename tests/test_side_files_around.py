"""Side files in folders beside the one that was passed: taken where it is certain whose they are, and else named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from tests.test_families_of_side_files import OLD, config, notes, put, text, tokenizer, weights

OWN = {**tokenizer(eos="c"), "chat_template.jinja": "RUN"}
PLACES = ["tokenizer", "hf_tokenizer", "tokenizers", "processor", "hf_model", "components/tokenizer", "components/processor"]


def merged(path: Path, tmp_path: Path, *, base: bool = True, name: str = "merged") -> tuple[Any, Path]:
    known = tmp_path / "elsewhere" / "base"
    if base and not known.exists():
        weights(known, *OLD, {"preprocessor_config.json": '{"size": 32}'})
    return ckpt_cli.merge(path, tmp_path / "made" / name, base=known if base else None), tmp_path / "made" / name


class TestOfOneModel:
    @pytest.mark.parametrize("where", PLACES)
    @pytest.mark.parametrize("model", ["model", "final", "hf_model_bf16", "lora_merged"])
    def test_are_taken_before_the_base(self, where: str, model: str, tmp_path: Path) -> None:
        path = weights(tmp_path / "out" / model, config())
        folder = put(tmp_path / "out" / where, OWN)
        result, output = merged(path, tmp_path)
        assert {name: text(output, name) for name in OWN} == OWN
        assert str(folder) in notes(result, "info")["assets-of-folder"]
        assert "assets-beside" not in notes(result)
        checked = ckpt_cli.verify(output, against=path, base=tmp_path / "elsewhere" / "base")
        assert not {finding.file for finding in checked.findings} & set(OWN)
        result, output = merged(path, tmp_path, base=False, name="alone")
        assert text(output, "tokenizer.json") == OWN["tokenizer.json"]

    @pytest.mark.parametrize("where", ["components/tokenizer", "components/feature_extractor", "image_processor", "checkpoint-5/tokenizer"])
    def test_are_taken_where_the_folder_around_is_passed(self, where: str, tmp_path: Path) -> None:
        own = OWN if where.endswith("tokenizer") else {"preprocessor_config.json": '{"size": 64}'}
        weights(tmp_path / "out" / "checkpoint-5" / "model" if "5" in where else tmp_path / "out" / "model", config())
        put(tmp_path / "out" / where, own)
        _, output = merged(tmp_path / "out", tmp_path)
        assert {name: text(output, name) for name in own} == own

    def test_are_found_from_within(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = weights(tmp_path / "out" / "model", config())
        put(tmp_path / "out" / "tokenizer", OWN)
        link = tmp_path / "current"
        link.symlink_to(path)
        for number, passed in enumerate((Path(), link, Path("model.safetensors"))):
            monkeypatch.chdir(path)
            _, output = merged(passed, tmp_path, name=str(number))
            assert text(output, "chat_template.jinja") == "RUN"

    def test_come_after_its_own(self, tmp_path: Path) -> None:
        path = weights(tmp_path / "out" / "model", config(), tokenizer())
        put(tmp_path / "out" / "tokenizer", tokenizer("bacdefgh"), {"preprocessor_config.json": '{"size": 64}'})
        result, output = merged(path, tmp_path)
        assert text(output, "tokenizer.json") == tokenizer()["tokenizer.json"]
        assert text(output, "preprocessor_config.json") == '{"size": 64}'
        assert "assets-beside" not in notes(result)

    def test_are_taken_beside_steps_averages_outputs_and_logs(self, tmp_path: Path) -> None:
        path = weights(tmp_path / "out" / "final", config())
        put(tmp_path / "out" / "tokenizer", OWN)
        for other in ("checkpoint-5", "ema", "logs", "optimizer"):
            weights(tmp_path / "out" / other)
        ckpt_cli.merge(path, tmp_path / "out" / "mine")
        _, output = merged(path, tmp_path)
        assert text(output, "chat_template.jinja") == "RUN"


class TestOfNobodyForCertain:
    @pytest.mark.parametrize(
        ("model", "others"),
        [("run1", ()), ("model", ("model_b",)), ("model", ("runs/a",)), ("model", ("sft/checkpoint-5",)), ("model", (".",))],
    )
    def test_are_named_where_the_base_says_something_else(self, model: str, others: tuple[str, ...], tmp_path: Path) -> None:
        path = weights(tmp_path / "out" / model, config())
        folder = put(tmp_path / "out" / "tokenizer", OWN)
        for other in others:
            weights(tmp_path / "out" / other)
        result, output = merged(path, tmp_path)
        if others == ("runs/a",):  # a folder of logs
            assert text(output, "tokenizer.json") == OWN["tokenizer.json"]
            return
        assert text(output, "tokenizer.json") == OLD[1]["tokenizer.json"]
        told = notes(result)["assets-beside"]
        assert f"{folder} holds a chat template and a tokenizer, and was not read" in told
        assert f"what is taken instead says something else; if so, copy the files into {path}" in told
        # Without a base they are named too, and the hint holds.
        assert str(folder) in notes(merged(path, tmp_path, base=False, name="alone")[0])["assets-beside"]
        shutil.copytree(folder, path, dirs_exist_ok=True)
        result, output = merged(path, tmp_path, name="again")
        assert text(output, "tokenizer.json") == OWN["tokenizer.json"]
        assert "assets-beside" not in notes(result)

    def test_are_not_named_where_the_base_says_the_same(self, tmp_path: Path) -> None:
        path = weights(tmp_path / "out" / "run1", config())
        same = {name: json.dumps(json.loads(content), indent=1) for name, content in OLD[1].items()}
        put(tmp_path / "out" / "tokenizer", same, {"chat_template.jinja": "BASE", "generation_config.json": '{"top_k": 3}'})
        assert "assets-beside" not in notes(merged(path, tmp_path)[0])

    @pytest.mark.parametrize(
        "which", ["tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "config.json", "tokenizer_config.json"]
    )
    def test_are_named_by_family(self, which: str, tmp_path: Path) -> None:
        path = weights(tmp_path / "out" / "run1")
        same = {name: content for each in OLD for name, content in each.items()} | {"preprocessor_config.json": '{"size": 32}'}
        other = {**OWN, **config(), "preprocessor_config.json": '{"size": 64}'}
        put(tmp_path / "out" / "tokenizer", {**same, which: other[which]})
        kinds = {
            "tokenizer": "a tokenizer",
            "chat_template": "a chat template",
            "preprocessor_config": "a processor",
            "config": "config.json",
        }
        kind = kinds[Path(which).stem.removesuffix("_config") if "tokenizer" in which else Path(which).stem]
        assert f"holds {kind}, and" in notes(merged(path, tmp_path)[0])["assets-beside"]

    def test_of_the_folder_around_are_named(self, tmp_path: Path) -> None:
        path = weights(tmp_path / "out" / "model", config())
        put(tmp_path / "out", OWN)
        assert f"{tmp_path / 'out'} holds" in notes(merged(path, tmp_path)[0])["assets-beside"]
        weights(tmp_path / "out")  # with weights of its own they are those of these
        assert "assets-beside" not in notes(merged(path, tmp_path, name="again")[0])

    @pytest.mark.parametrize("two", [True, False])
    def test_that_contradict_each_other_are_named(self, two: bool, tmp_path: Path) -> None:
        path = weights(tmp_path / "out" / "model", config())
        put(tmp_path / "out" / "tokenizer", OWN)
        put(tmp_path / "out" / "hf_tokenizer", tokenizer("bacdefgh") if two else OWN)
        told = [note.text for note in merged(path, tmp_path)[0].checkpoint.notes if note.code == "assets-beside"]
        assert len(told) == (2 if two else 0)


class TestOfOthers:
    @pytest.mark.parametrize("other", ["run2", "model_b", "checkpoint-5", "exp", "tokenizer"])
    def test_models_are_not_named(self, other: str, tmp_path: Path) -> None:
        path = weights(tmp_path / "runs" / "model", config())
        weights(tmp_path / "runs" / other, OWN)
        result, output = merged(path, tmp_path)
        assert text(output, "tokenizer.json") == OLD[1]["tokenizer.json"]
        assert "assets-beside" not in notes(result)

    def test_runs_whose_steps_hold_the_weights_are_not_named(self, tmp_path: Path) -> None:
        path = weights(tmp_path / "runs" / "run1", config())
        put(tmp_path / "runs" / "run2", OWN)
        weights(tmp_path / "runs" / "run2" / "checkpoint-5")
        put(tmp_path / "runs" / "begun", OWN)
        assert "assets-beside" not in notes(merged(path, tmp_path)[0])

    def test_parts_of_a_pipeline_are_not(self, tmp_path: Path) -> None:
        path = weights(tmp_path / "pipe" / "model", config())
        put(tmp_path / "pipe", {"model_index.json": "{}"})
        put(tmp_path / "pipe" / "tokenizer", OWN)
        result, output = merged(path, tmp_path)
        assert text(output, "tokenizer.json") == OLD[1]["tokenizer.json"]
        assert "assets-beside" not in notes(result)

    def test_those_of_an_output_are_not(self, tmp_path: Path) -> None:
        path = weights(tmp_path / "out" / "model", config())
        ckpt_cli.merge(path, tmp_path / "out" / "merged")
        put(tmp_path / "out" / "tokenizer", OWN)
        assert ckpt_cli.inspect(tmp_path / "out" / "merged").checkpoint.assets == ("config.json",)
