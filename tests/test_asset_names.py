"""Files beside the weights: the names that transformers reads are copied, and what is not known is told."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.beside.names import CODE_FOLDER, OF_VOCABULARY, PICKLED, TEMPLATE_FOLDER, VOCABULARIES, is_asset_name, is_unknown
from ckpt_cli.results.written import AverageResult, MergeResult
from tests.cli import ckpt_fork as ckpt

VOCABULARY_KEYS = {"vocab", "vocab_file", "src_vocab_file", "tokenizer_file"}
NO_KEYS = {"tokenizer_config_file"}


def transformers_folder() -> Path:
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed")
    return Path(found.origin).parent


@cache
def vocabulary_files() -> frozenset[tuple[str, str]]:
    """The files that tokenizers of transformers read, with their roles, from the source: importing all of them takes minutes."""
    found = set()
    for path in transformers_folder().rglob("token*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        values = {target.id: node.value for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if is_name(target)}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if any(is_name(target) and target.id.lower() == "vocab_files_names" for target in targets):
                value = values.get(node.value.id, node.value) if is_name(node.value) else node.value
                found |= set(entries(value, values)) if isinstance(value, ast.Dict) else set()
    return frozenset(found)


def is_name(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name)


def entries(value: ast.Dict, values: dict[str, ast.expr]) -> Iterator[tuple[str, str]]:
    for key, name in zip(value.keys, value.values, strict=True):
        said = values.get(name.id, name) if isinstance(name, ast.Name) else name
        if isinstance(key, ast.Constant):
            assert isinstance(said, ast.Constant), f"{ast.dump(name)} is not followed"
            yield str(key.value), str(said.value)


class TestNames:
    def test_of_all_vocabularies_of_transformers_are_known(self) -> None:
        found = {pair for pair in vocabulary_files() if pair[0] not in NO_KEYS and pair[1] not in PICKLED}
        assert len(found) > 15
        assert {name for role, name in found if role in VOCABULARY_KEYS} <= VOCABULARIES
        assert {name for _, name in found} <= VOCABULARIES | OF_VOCABULARY
        assert all(is_asset_name(name) for _, name in found)

    def test_of_all_configs_of_transformers_are_known(self) -> None:
        source = "".join((transformers_folder() / "utils" / name).read_text(encoding="utf-8") for name in ("__init__.py", "hub.py"))
        source += (transformers_folder() / "tokenization_utils_base.py").read_text(encoding="utf-8")
        found = set(re.findall(r'^[A-Z_]+_(?:NAME|FILE) = "([\w.]+\.(?:json|jinja))"', source, re.MULTILINE))
        assert {"config.json", "tokenizer_config.json", "chat_template.jinja"} <= found
        others = {name for name in found if name.endswith(".index.json")} | {"modelcard.json", "adapter_config.json"}
        assert {name for name in found - others if not is_asset_name(name)} == set()
        folders = set(re.findall(r'^CHAT_TEMPLATE_DIR = "(\w+)"', source, re.MULTILINE))
        assert folders <= {TEMPLATE_FOLDER}

    def test_that_old_tokenizers_pickled_are_not_passed_on(self) -> None:
        assert not any(is_asset_name(name) for name in PICKLED)
        assert all(is_unknown(name) for name in PICKLED)

    @pytest.mark.parametrize(
        "name",
        [
            *("README.md", "LICENSE-MODEL.txt", ".gitattributes", "training_args.bin", "trainer_state.json", "scheduler.pt"),
            *("all_results.json", "eval_results.json", "trainer_log.jsonl", "training_loss.png", "zero_to_fp32.py", "latest", "nohup.out"),
            *("train.sh", "hparams.yaml", "events.out.tfevents.1.host", "model.safetensors.index.json", "ckpt-manifest.json", "run.log"),
            *("requirements.txt", "latest_checkpointed_iteration.txt", "fsdp_config.json", "ds_config.json", "wandb-summary.json"),
            *("global_step.txt", "rng_state_0.pth", "all_metrics.json", "loss_3.txt", "checkpoint-info.json"),
        ],
    )
    def test_that_any_run_has_are_quiet(self, name: str) -> None:
        assert not is_unknown(name)

    @pytest.mark.parametrize("name", ["ice_text.model", "dataset_statistics.json", "quantize_config.json", "codes.bpe", "words.vocab"])
    def test_that_a_loader_may_read_are_not(self, name: str) -> None:
        assert is_unknown(name)


def model(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    save_file({"a.weight": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return fill(folder, *names)


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({folder.name: 0}) if name.endswith(".json") else f"{folder.name}\n")
    return folder


def told(result: MergeResult | AverageResult) -> dict[str, str]:
    checkpoints = [result.checkpoint] if isinstance(result, MergeResult) else []
    notes = [note for checkpoint in checkpoints for note in checkpoint.notes] + [note for output in result.outputs for note in output.notes]
    return {note.code: note.text for note in notes}


FILES = ("vocab.txt", "bpe.codes", "dict.txt", "spm.model", "emoji.json", "target_vocab.json")


class TestATokenizerOfSeveralFiles:
    def test_is_copied_whole(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", *FILES, "README.md", "trainer_log.jsonl")
        notes = told(ckpt_cli.merge(run, tmp_path / "out"))
        assert {name for name in FILES if (tmp_path / "out" / name).read_bytes() == (run / name).read_bytes()} == set(FILES)
        assert {"lacks-asset", "unknown-files", "lacks-part"}.isdisjoint(notes)
        assert not [item for item in ckpt_cli.verify(tmp_path / "out", against=run).findings if item.severity == "error"]

    def test_is_copied_by_an_average_and_from_a_folder_above(self, layouts: Path, tmp_path: Path) -> None:
        runs = [model(tmp_path / name, *FILES) for name in "ab"]
        ckpt_cli.average(runs, tmp_path / "mean")
        assert set(FILES) <= {path.name for path in (tmp_path / "mean").iterdir()}
        run = Path(shutil.copytree(layouts / "verl-run" / "run", tmp_path / "verl"))
        hub = run / "global_step_20" / "actor" / "huggingface"
        fill(hub, *FILES)
        ckpt_cli.merge(run / "global_step_20" / "actor", tmp_path / "out")
        assert set(FILES) <= {path.name for path in (tmp_path / "out").iterdir()}

    def test_is_all_of_the_run_or_all_of_the_base(self, tmp_path: Path) -> None:
        base = model(tmp_path / "base", *FILES)
        ckpt_cli.merge(model(tmp_path / "whole", "spm.model"), tmp_path / "own", base=base)
        assert {path.name for path in (tmp_path / "own").iterdir()}.isdisjoint({*FILES} - {"spm.model"})
        notes = told(ckpt_cli.merge(model(tmp_path / "part", "bpe.codes"), tmp_path / "of_base", base=base))
        assert "bpe.codes" in notes["tokenizer-of-base"]
        assert (tmp_path / "of_base" / "bpe.codes").read_text() == "base\n"

    def test_that_is_empty_is_found(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", "vocab.txt")
        (run / "bpe.codes").touch()
        assert "bpe.codes" in told(ckpt_cli.merge(run, tmp_path / "out"))["damaged-asset"]
        assert "damaged-side-file" in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}


class TestAFileOfNoKnownName:
    def test_is_told_and_left_out(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", "tokenizer.json", "words.vocab", "vocab.pkl", "notes.md", "run.sh")
        notes = told(ckpt_cli.merge(run, tmp_path / "out"))
        assert notes["unknown-files"].startswith("vocab.pkl, words.vocab in ")
        assert not (tmp_path / "out" / "words.vocab").exists()
        shown = ckpt("merge", run, "-o", tmp_path / "shown")
        assert "words.vocab" in shown.out
        assert "words.vocab" in str(ckpt_cli.average([run, run], tmp_path / "mean"))

    def test_comes_from_the_run_where_the_base_has_one_too(self, tmp_path: Path) -> None:
        base, run = model(tmp_path / "base", "words.vocab", "params.json"), model(tmp_path / "run", "words.vocab")
        notes = told(ckpt_cli.merge(run, tmp_path / "out", base=base))
        assert (tmp_path / "out" / "words.vocab").read_text() == "run\n"
        assert json.loads((tmp_path / "out" / "params.json").read_text()) == {"base": 0}
        assert "unknown-files" not in notes

    def test_is_of_the_base_with_its_tokenizer(self, tmp_path: Path) -> None:
        base, run = model(tmp_path / "base", "vocab.txt", "words.vocab"), model(tmp_path / "run", "merges.txt", "words.vocab")
        ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert (tmp_path / "out" / "words.vocab").read_text() == "base\n"


class TestAFileThatCustomCodeNames:
    CODE = "import torch\nVOCAB_FILES_NAMES = {'vocab_file': 'words.vocab', \"model\": \"weights.bin\"}\n"

    def test_is_copied(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", "tokenizer.json", "words.vocab", "other.vocab", "weights.bin")
        (run / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.Own", None]}}))
        (run / "tokenization_x.py").write_text(self.CODE)
        notes = told(ckpt_cli.merge(run, tmp_path / "out"))
        assert (tmp_path / "out" / "words.vocab").read_text() == "run\n"
        assert not (tmp_path / "out" / "weights.bin").exists()
        assert notes["unknown-files"].startswith("other.vocab in ")

    def test_is_not_where_no_config_names_the_code(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", "tokenizer.json", "words.vocab")
        (run / "tokenization_x.py").write_text(self.CODE)
        assert "words.vocab" in told(ckpt_cli.merge(run, tmp_path / "out"))["unknown-files"]


class TestFoldersThatLoadersRead:
    NAMES = (f"{TEMPLATE_FOLDER}/rag.jinja", f"{CODE_FOLDER}/generate.py")

    def test_are_told(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", "tokenizer.json", *self.NAMES)
        for result in (ckpt_cli.merge(run, tmp_path / "out"), ckpt_cli.average([run, run], tmp_path / "mean")):
            texts = [note.text for note in result.outputs[0].notes if note.code == "lacks-part"]
            assert [str(run / name.split("/")[0]) in text for name, text in zip(self.NAMES, texts, strict=True)] == [True, True]

    def test_are_told_of_a_base_whose_tokenizer_is_taken(self, tmp_path: Path) -> None:
        base = model(tmp_path / "base", "tokenizer.json", *self.NAMES)
        notes = told(ckpt_cli.merge(model(tmp_path / "run"), tmp_path / "out", base=base))
        assert str(base / TEMPLATE_FOLDER) in notes["lacks-part"]
        assert "lacks-part" not in told(ckpt_cli.merge(model(tmp_path / "own", "tokenizer.json"), tmp_path / "other", base=base))

    def test_are_not_where_the_output_is_beside_them(self, layouts: Path, tmp_path: Path) -> None:
        step = Path(shutil.copytree(layouts / "verl-run" / "run" / "global_step_20" / "actor", tmp_path / "actor"))
        fill(step, "config.json", "tokenizer.json", *self.NAMES)
        shutil.rmtree(step / "huggingface")
        assert "lacks-part" not in told(ckpt_cli.merge(step, in_place=True))
