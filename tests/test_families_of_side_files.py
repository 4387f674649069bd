"""Side files that are only right together come from one place: that of the run which is nearest, and the base only after that."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from tests.tiny import classless

ROOT = Path(__file__).parents[1]
ORDER = "abcdefgh"
NUMBERS = {"image_mean": [0.5, 0.5, 0.5], "do_resize": True}


def tokenizer(order: str = ORDER, eos: str = "h") -> dict[str, str]:
    """The files of a tokenizer."""
    vocabulary = {token: number for number, token in enumerate(order)}
    plain = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    special = {"id": order.index(eos), "content": eos, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole = {**plain, "version": "1.0", "added_tokens": [{**special, **flags}], "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    return {"tokenizer.json": json.dumps(whole), "tokenizer_config.json": json.dumps(said)}


def config(theta: float = 1e4) -> dict[str, str]:
    return {"config.json": json.dumps(classless(rope_theta=theta))}


def put(folder: Path, *files: Mapping[str, str]) -> Path:
    for name, text in {name: text for each in files for name, text in each.items()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def weights(folder: Path, *files: Mapping[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a.weight": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors", metadata={"format": "pt"})
    return put(folder, *files)


OLD = (config(1e6), tokenizer("hgfedcba", eos="a"), {"chat_template.jinja": "BASE", "generation_config.json": '{"top_k": 1}'})


def notes(result: Any, level: str = "warning") -> dict[str, str]:
    listed = [*result.checkpoint.notes, *result.outputs[0].notes]
    return {note.code: note.text for note in listed if note.level == level}


def text(folder: Path, name: str) -> str:
    """A file as the sources have it; the dtype in config.json is written anew."""
    content = (folder / name).read_text()
    return content if name != "config.json" else str(json.loads(content)["rope_theta"])


class TestProcessors:
    """One file for all of them (transformers 5), or one for each (4)."""

    @staticmethod
    def image(size: int) -> dict[str, Any]:
        return {**NUMBERS, "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": size}}

    @staticmethod
    def sound(size: int) -> dict[str, Any]:
        return {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": size}

    @staticmethod
    def video(size: int) -> dict[str, Any]:
        return {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": {"height": size, "width": size}}

    KINDS = pytest.mark.parametrize(
        ("kind", "name"),
        [
            ("image_processor", "preprocessor_config.json"),
            ("feature_extractor", "preprocessor_config.json"),
            ("video_processor", "video_preprocessor_config.json"),
        ],
    )

    def made(self, kind: str, size: int) -> dict[str, Any]:
        return {"image_processor": self.image, "feature_extractor": self.sound, "video_processor": self.video}[kind](size)

    def loaded(self, kind: str, folder: Path) -> Any:
        transformers = pytest.importorskip("transformers")
        if kind == "image_processor":
            return transformers.AutoImageProcessor.from_pretrained(folder).size["shortest_edge"]
        if kind == "feature_extractor":
            return transformers.AutoFeatureExtractor.from_pretrained(folder).feature_size
        # The class needs torchvision; this is how it finds its settings.
        return importlib.import_module("transformers.video_processing_utils").BaseVideoProcessor.get_video_processor_dict(folder)[0]["size"]

    @KINDS
    @pytest.mark.parametrize("newer", ["base", "run"])
    def test_of_two_generations_are_those_of_the_run(self, kind: str, name: str, newer: str, tmp_path: Path) -> None:
        folders = {}
        for size, who in ((64, "run"), (32, "base")):
            own = self.made(kind, size)
            files = {"processor_config.json": {kind: own, "patch_size": 14}} if who == newer else {name: own}
            folders[who] = weights(tmp_path / who, config(), {each: json.dumps(content) for each, content in files.items()})
        result = ckpt_cli.merge(folders["run"], tmp_path / "out", base=folders["base"])
        assert self.loaded(kind, tmp_path / "out") == self.loaded(kind, folders["run"]) != self.loaded(kind, folders["base"])
        told = notes(result, "warning" if newer == "base" else "info")["other-processor"]
        assert kind in told
        assert ("patch_size" in told) == (newer == "base")

    @KINDS
    def test_of_two_generations_that_say_the_same_are_all_taken(self, kind: str, name: str, tmp_path: Path) -> None:
        own = self.made(kind, 64)
        run = weights(tmp_path / "run", config(), {name: json.dumps({**own, "resample": None})})
        base = weights(tmp_path / "base", config(), {"processor_config.json": json.dumps({kind: own, "patch_size": 14})})
        result = ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert {name, "processor_config.json"} <= set(result.outputs[0].assets)
        assert "other-processor" not in {**notes(result), **notes(result, "info")}

    def test_of_one_generation_are_completed_by_the_base(self, tmp_path: Path) -> None:
        run = weights(tmp_path / "run", config(), {"preprocessor_config.json": json.dumps(self.image(64))})
        older = {"preprocessor_config.json": json.dumps(self.image(32)), "processor_config.json": '{"patch_size": 14}'}
        result = ckpt_cli.merge(run, tmp_path / "out", base=weights(tmp_path / "base", config(), older))
        assert "processor_config.json" in result.outputs[0].assets
        assert self.loaded("image_processor", tmp_path / "out") == 64


class TestAChatTemplateInsideOfAProcessor:
    """Processors take it before the file of the template."""

    @pytest.mark.parametrize("own", [{"chat_template.jinja": "RUN"}, {"chat_template.json": '{"chat_template": "RUN"}'}, None], ids=str)
    @pytest.mark.parametrize("same", [False, True])
    def test_of_a_base_is_told_where_the_run_has_another(self, own: dict[str, str] | None, same: bool, tmp_path: Path) -> None:
        files = tokenizer()
        if own is None:
            files["tokenizer_config.json"] = json.dumps({**json.loads(files["tokenizer_config.json"]), "chat_template": "RUN"})
        run = weights(tmp_path / "run", config(), files, own or {})
        inside = {"processor_config.json": json.dumps({"patch_size": 14, "chat_template": "RUN" if same else "BASE"})}
        result = ckpt_cli.merge(run, tmp_path / "out", base=weights(tmp_path / "base", config(), inside))
        utils = importlib.import_module("transformers.processing_utils")
        taken = utils.ProcessorMixin.get_processor_dict(tmp_path / "out")[0]["chat_template"]
        assert taken == ("RUN" if same else "BASE")
        assert ("other-template" in notes(result)) == (not same)

    def test_without_another_is_the_template(self, tmp_path: Path) -> None:
        run = weights(tmp_path / "run", config(), tokenizer())
        inside = {"processor_config.json": json.dumps({"patch_size": 14, "chat_template": "BASE"})}
        result = ckpt_cli.merge(run, tmp_path / "out", base=weights(tmp_path / "base", config(), inside))
        assert "other-template" not in notes(result)


class TestATokenizerWithoutSettings:
    @pytest.mark.parametrize("where", ["base", "the run"])
    def test_gets_those_of_the_same_vocabulary(self, where: str, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        whole = tokenizer(eos="c")
        step = weights(tmp_path / "run" / "checkpoint-5", config(), {"tokenizer.json": whole["tokenizer.json"]})
        base = weights(tmp_path / "base", config())
        # Written by another version: the same tokens in other words.
        put(
            base if where == "base" else step.parent, {**whole, "tokenizer.json": json.dumps(json.loads(whole["tokenizer.json"]), indent=1)}
        )
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "c"
        assert text(tmp_path / "out", "tokenizer.json") == whole["tokenizer.json"]
        assert "tokenizer-settings" not in notes(result)

    def test_says_that_it_has_none_where_the_vocabulary_is_another(self, tmp_path: Path) -> None:
        run = weights(tmp_path / "run", config(), {"tokenizer.json": tokenizer()["tokenizer.json"]})
        for number, other in enumerate((tokenizer("hgfedcba"), tokenizer(ORDER + "i"), {**tokenizer(), "tokenizer.json": "{}"})):
            base = weights(tmp_path / f"base{number}", config(), other)
            result = ckpt_cli.merge(run, tmp_path / f"out{number}", base=base)
            assert "tokenizer_config.json" not in result.outputs[0].assets
            assert str(base) in notes(result)["tokenizer-settings"]


class TestCodeForGeneration:
    CODE = "custom_generate/generate.py"

    def test_of_a_base_goes_with_a_config_of_the_run(self, tmp_path: Path) -> None:
        run, base = weights(tmp_path / "run", config(), tokenizer()), weights(tmp_path / "base", config(), {self.CODE: "BASE"})
        ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert text(tmp_path / "out", self.CODE) == "BASE"

    def test_of_a_run_is_not_mixed_with_it(self, tmp_path: Path) -> None:
        run = weights(tmp_path / "run", config(), {"custom_generate/own.py": "RUN"})
        base = weights(tmp_path / "base", config(), {self.CODE: "BASE"})
        ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert [path.name for path in (tmp_path / "out" / "custom_generate").iterdir()] == ["own.py"]

    def test_comes_with_all_chat_templates_of_the_base(self, tmp_path: Path) -> None:
        templates = {"chat_template.jinja": "BASE", "additional_chat_templates/tools.jinja": "TOOLS"}
        base = weights(tmp_path / "base", config(), templates)
        ckpt_cli.merge(weights(tmp_path / "run", config(), tokenizer()), tmp_path / "out", base=base)
        assert {name: text(tmp_path / "out", name) for name in templates} == templates
        own = weights(tmp_path / "own", config(), tokenizer(), {"chat_template.json": '{"chat_template": "RUN"}'})
        result = ckpt_cli.merge(own, tmp_path / "other", base=base)
        assert not set(templates) & set(result.outputs[0].assets)


class TestEachFamily:
    def test_is_of_the_nearest_folder_that_has_it(self, tmp_path: Path) -> None:
        of_step = (config(), tokenizer())
        of_run = {
            "preprocessor_config.json": '{"size": 64}',
            "chat_template.jinja": "RUN",
            "generation_config.json": '{"top_k": 7}',
            "custom_generate/generate.py": "RUN",
        }
        step = weights(tmp_path / "run" / "checkpoint-5", *of_step)
        put(step.parent, of_run, config(1e5), tokenizer("bacdefgh"))
        base = weights(tmp_path / "base", *OLD, {**dict.fromkeys(of_run, "BASE"), "preprocessor_config.json": '{"size": 32}'})
        for name, options in (("without", {}), ("with", {"base": base})):
            ckpt_cli.merge(tmp_path / "run", tmp_path / name, **options)  # type: ignore[arg-type]
            assert {each: text(tmp_path / name, each) for each in of_run} == of_run
            assert {each: text(tmp_path / name, each) for each in of_step[1]} == of_step[1]
            assert text(tmp_path / name, "config.json") == "10000.0"

    @pytest.mark.parametrize(("files", "says"), [(tokenizer(), "found"), ({}, "Permission denied")], ids=["whole", "lacking"])
    def test_is_not_looked_for_where_nobody_may_look(self, files: dict[str, str], says: str, tmp_path: Path) -> None:
        """In the folder above the steps, say a home, which may be entered and not listed."""
        step = weights(tmp_path / "run" / "checkpoint-5", config(), files)
        tmp_path.chmod(0o755)
        step.parent.chmod(0o711)
        program = (
            "import os, sys\nfrom pathlib import Path\nfrom ckpt_cli.hub.assets import find_assets\nos.chdir(sys.argv[1])\n"
            "homes = [Path('run/checkpoint-5'), Path('run')]\nfind_assets(homes)\n"
            "if os.geteuid() == 0: os.setuid(65534)\nelse: os.chmod('run', 0o311)\n"
            "try: find_assets(homes); print('found')\n"
            "except Exception as error: print(error)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment)
        finally:
            step.parent.chmod(0o755)
        assert says in done.stdout, done.stderr

    def test_of_a_template_inside_the_tokenizer_is_decided(self, tmp_path: Path) -> None:
        said = {"tokenizer_config.json": json.dumps({"chat_template": "STEP", "eos_token": "h"})}
        step = weights(tmp_path / "run" / "checkpoint-5", config(), {**tokenizer(), **said})
        put(step.parent, {"chat_template.jinja": "RUN"})
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=weights(tmp_path / "base", *OLD))
        assert "chat_template.jinja" not in result.outputs[0].assets

    def test_of_a_tokenizer_is_not_mixed_of_step_and_run(self, tmp_path: Path) -> None:
        step = weights(tmp_path / "run" / "checkpoint-5", config(), {"special_tokens_map.json": '{"eos_token": "b"}'})
        put(step.parent, tokenizer())
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert "special_tokens_map.json" in notes(result)["tokenizer-elsewhere"]
        assert "special_tokens_map.json" not in result.outputs[0].assets


FOLDERS = ["hf", "config", "hf_model", "model_config", "final", "tokenizer", "hf_tokenizer", "processor", "assets", "tokenizer_and_config"]
OF_RUNS = ["hf_config", "tokenizer", "model_assets", "hf"]


class TestAFolderOfSideFiles:
    @pytest.mark.parametrize("where", [*(f"checkpoint-5/{name}" for name in FOLDERS), *OF_RUNS])
    @pytest.mark.parametrize("whole", [True, False], ids=["with a config", "tokenizer"])
    def test_counts_before_the_base(self, where: str, whole: bool, tmp_path: Path) -> None:
        own = {**tokenizer(eos="c"), "chat_template.jinja": "RUN", **(config() if whole else {})}
        weights(tmp_path / "run" / "checkpoint-5", {} if whole else config())
        folder = put(tmp_path / "run" / where, own)
        base = weights(tmp_path / "base", *OLD)
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)
        for name, content in {**own, **config()}.items():
            assert text(tmp_path / "out", name) == (content if name != "config.json" else "10000.0")
        assert str(folder) in notes(result, "info")["assets-of-folder"]
        assert "assets-beside" not in notes(result)

    @pytest.mark.parametrize("name", ["reward_tokenizer", "judge", "verifier", "prm", "Qwen2.5-7B-Instruct"])
    def test_of_an_unknown_name_in_a_step_counts_last(self, name: str, tmp_path: Path) -> None:
        other = (config(1e5), tokenizer("bacdefgh"), {"chat_template.jinja": "JUDGE"})
        step = weights(tmp_path / "run" / "checkpoint-5")
        folder = put(step / name, *other)
        base = weights(tmp_path / "base", *OLD)
        result = ckpt_cli.merge(step, tmp_path / "out", base=base)
        assert text(tmp_path / "out", "config.json") == "1000000.0"
        assert text(tmp_path / "out", "tokenizer.json") == OLD[1]["tokenizer.json"]
        assert text(tmp_path / "out", "chat_template.jinja") == "BASE"
        assert str(folder) in notes(result)["assets-beside"]
        alone = ckpt_cli.merge(step, tmp_path / "alone")
        assert text(tmp_path / "alone", "config.json") == "100000.0"
        told = notes(alone)["assets-of-folder"]
        assert str(folder) in told
        assert all(said in told for said in ("config.json", "tokenizer.json", "chat_template.jinja"))
        # The hint holds, also for what the folder of the run has.
        put(step.parent, tokenizer())
        put(step, config())
        again = ckpt_cli.merge(step, tmp_path / "again")
        assert text(tmp_path / "again", "config.json") == "10000.0"
        assert text(tmp_path / "again", "tokenizer.json") == tokenizer()["tokenizer.json"]
        assert "chat_template.jinja" not in again.outputs[0].assets
        assert not {"assets-of-folder", "assets-beside"} & set(notes(again))
        # Nothing is said where the base has all the same.
        shutil.rmtree(folder)
        put(step / name, *OLD[1:])
        for own in (step / "config.json", *(step.parent / each for each in tokenizer())):
            own.unlink()
        assert not {"assets-of-folder", "assets-beside"} & set(notes(ckpt_cli.merge(step, tmp_path / "same", base=base)))

    def test_comes_after_what_lies_nearer(self, tmp_path: Path) -> None:
        for where in ("checkpoint-5/tokenizer", "hf"):
            run = tmp_path / where.replace("/", "-") / "run"
            weights(run / "checkpoint-5", config(), tokenizer())
            put(run / where, config(1e5), tokenizer("bacdefgh"))
            result = ckpt_cli.merge(run, run.parent / "out", base=weights(run.parent / "base", *OLD))
            assert text(run.parent / "out", "tokenizer.json") == tokenizer()["tokenizer.json"]
            assert text(run.parent / "out", "config.json") == "10000.0"
            assert "assets-beside" not in notes(result)

    @pytest.mark.parametrize("name", ["critic", "ref_model", "reward", "old", "lora_adapter", "vae", "ema", "eval", "checkpoint-4", "logs"])
    def test_of_another_role_does_not(self, name: str, tmp_path: Path) -> None:
        weights(tmp_path / "run" / "checkpoint-5")
        put(tmp_path / "run" / "checkpoint-5" / name, config(1e5), tokenizer("bacdefgh"))
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=weights(tmp_path / "base", *OLD), step=5)
        assert text(tmp_path / "out", "config.json") == "1000000.0"

    @pytest.mark.parametrize("held", ["model.safetensors", "adapter_config.json", "optimizer.pt", "below/model.safetensors"])
    def test_with_weights_or_state_does_not(self, held: str, tmp_path: Path) -> None:
        step = weights(tmp_path / "run" / "checkpoint-5", config(), tokenizer())
        folder = put(step / "part", {"preprocessor_config.json": '{"size": 64}', held: "{}"})
        if held.endswith(".safetensors"):
            shutil.copy(step / "model.safetensors", folder / held)
        base = weights(tmp_path / "base", *OLD, {"preprocessor_config.json": '{"size": 32}'})
        ckpt_cli.merge(step, tmp_path / "out", base=base)
        assert text(tmp_path / "out", "preprocessor_config.json") == '{"size": 32}'

    def test_of_a_pipeline_does_not(self, tmp_path: Path) -> None:
        step = weights(tmp_path / "run" / "checkpoint-5", config(), {"modules.json": "[]"})
        put(step / "1_Pooling", tokenizer())
        assert "tokenizer.json" not in ckpt_cli.merge(step, tmp_path / "out").outputs[0].assets

    @pytest.mark.parametrize("with_base", [True, False])
    def test_beside_another_one_is_named_and_not_taken(self, with_base: bool, tmp_path: Path) -> None:
        step = weights(tmp_path / "run" / "checkpoint-5", config())
        for name, order in (("tokenizer_a", ORDER), ("tokenizer_b", "bacdefgh")):
            put(step / name, tokenizer(order))
        options: dict[str, Any] = {"base": weights(tmp_path / "base", *OLD)} if with_base else {}
        result = ckpt_cli.merge(step, tmp_path / "out", **options)
        assert (tmp_path / "out" / "tokenizer.json").exists() == with_base
        told = [note.text for note in result.checkpoint.notes if note.code == "assets-beside"]
        assert [name for name in ("tokenizer_a", "tokenizer_b") if any(str(step / name) in each for each in told)] == [
            "tokenizer_a",
            "tokenizer_b",
        ]
        shutil.rmtree(step / "tokenizer_b")
        shutil.copytree(step / "tokenizer_a", step / "tokenizer_b")
        again = ckpt_cli.merge(step, tmp_path / "same", **options)
        assert text(tmp_path / "same", "tokenizer.json") == (OLD[1] if with_base else tokenizer())["tokenizer.json"]
        assert ("assets-beside" in notes(again)) == with_base
        assert ("assets-of-folder" in notes(again)) != with_base

    def test_of_a_run_with_a_name_that_says_nothing_is_named(self, tmp_path: Path) -> None:
        step = weights(tmp_path / "run" / "checkpoint-5")
        put(step.parent / "experiment_b", config(1e5), tokenizer("bacdefgh"))
        result = ckpt_cli.merge(step, tmp_path / "out", base=weights(tmp_path / "base", *OLD))
        assert text(tmp_path / "out", "config.json") == "1000000.0"
        told = notes(result)["assets-beside"]
        assert str(step.parent / "experiment_b") in told
        # The hint holds: copied into the step, they are taken.
        shutil.copytree(step.parent / "experiment_b", step, dirs_exist_ok=True)
        again = ckpt_cli.merge(step, tmp_path / "again", base=tmp_path / "base")
        assert text(tmp_path / "again", "config.json") == "100000.0"
        assert "assets-beside" not in notes(again)
