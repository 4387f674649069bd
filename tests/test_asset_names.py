"""Files beside the weights: the names that transformers reads are copied, and what is not known is told."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import sys
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import OutputExists
from ckpt_cli.hub.beside.names import CODE_FOLDER, OF_VOCABULARY, PICKLED, TEMPLATE_FOLDER, VOCABULARIES, is_asset_name, is_unknown
from ckpt_cli.output.staging import Staging
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

    @pytest.mark.parametrize("name", ["ice_text.model", "action_statistics.json", "codes.bpe", "words.vocab"])
    def test_that_a_loader_may_read_are_not(self, name: str) -> None:
        assert is_unknown(name)


def model(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    save_file({"a.weight": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "own"}')
    return fill(folder, *names)


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = f"{b64encode(folder.name.encode()).decode()} 0\n" if name.endswith(".model") else f"{folder.name}\n"
        (folder / name).write_text(json.dumps({folder.name: 0}) if name.endswith(".json") else text)
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
    NAMES = (
        f"{TEMPLATE_FOLDER}/rag.jinja",
        f"{TEMPLATE_FOLDER}/tools.jinja",
        f"{CODE_FOLDER}/generate.py",
        f"{CODE_FOLDER}/requirements.txt",
    )

    def test_are_copied_and_proved(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run", "tokenizer.json", *self.NAMES)
        out = tmp_path / "out"
        for made in (ckpt_cli.merge(run, out), ckpt_cli.merge(run, out, overwrite=True), ckpt_cli.average([run, run], tmp_path / "mean")):
            folder = Path(made.outputs[0].output)
            assert set(self.NAMES) <= set(made.outputs[0].assets)
            assert [(folder / name).read_bytes() == (run / name).read_bytes() for name in self.NAMES] == [True] * 4
            assert "lacks-part" not in told(made)
            assert not ckpt_cli.verify(folder, against=None if folder != out else run).of_severity("error")
        (out / self.NAMES[0]).write_text("changed")
        (out / self.NAMES[1]).unlink()
        found = {(item.code, item.file) for item in ckpt_cli.verify(out, against=run).findings}
        assert found >= {("changed-side-file", self.NAMES[0]), ("other-side-file", self.NAMES[0]), ("missing-file", self.NAMES[1])}
        (out / TEMPLATE_FOLDER / "of_a_user.jinja").write_text("")
        with pytest.raises(OutputExists, match=r"holds more than ckpt wrote there \(additional_chat_templates/of_a_user.jinja\)"):
            ckpt_cli.merge(run, out, overwrite=True)

    def test_hold_what_transformers_reads(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        run = model(tmp_path / "run")
        (run / "config.json").write_text('{"model_type": "t5"}')
        tokenizer = transformers.ByT5Tokenizer()
        tokenizer.chat_template = {"default": "DEFAULT", "rag": "RAG"}
        tokenizer.save_pretrained(run)
        assert (run / TEMPLATE_FOLDER / "rag.jinja").is_file()
        ckpt_cli.average([run, run], tmp_path / "mean")
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / "mean").chat_template == tokenizer.chat_template

    def test_come_from_a_base_where_the_run_has_none(self, tmp_path: Path) -> None:
        base = model(tmp_path / "base", "tokenizer.json", *self.NAMES)
        ckpt_cli.merge(model(tmp_path / "run"), tmp_path / "out", base=base)
        assert (tmp_path / "out" / self.NAMES[0]).read_text() == "base\n"
        assert (tmp_path / "out" / self.NAMES[2]).read_text() == "base\n"
        own = model(tmp_path / "own", "tokenizer.json", "chat_template.jinja", f"{CODE_FOLDER}/other.py")
        ckpt_cli.merge(own, tmp_path / "other", base=base)
        assert not (tmp_path / "other" / TEMPLATE_FOLDER).exists()
        assert [path.name for path in (tmp_path / "other" / CODE_FOLDER).iterdir()] == ["other.py"]

    def test_are_added_in_place_and_stay_as_they_are(self, layouts: Path, tmp_path: Path) -> None:
        step = Path(shutil.copytree(layouts / "verl-run" / "run" / "global_step_20" / "actor", tmp_path / "actor"))
        fill(step / "huggingface", *self.NAMES)
        fill(step, self.NAMES[1])
        ckpt_cli.merge(step, in_place=True)
        assert (step / self.NAMES[0]).read_text() == "huggingface\n"
        assert (step / self.NAMES[1]).read_text() == "actor\n"
        assert not ckpt_cli.verify(step).of_severity("error")

    def test_go_away_with_an_output_that_is_withdrawn(self, tmp_path: Path) -> None:
        folder, target = fill(tmp_path / "built", "a.json", *self.NAMES), tmp_path / "step"
        fill(target, "taken.json")
        staging = Staging.of(folder, target)
        staging.publish_into(target)
        assert (target / self.NAMES[2]).is_file()
        staging.withdraw()
        assert [path.name for path in target.rglob("*")] == ["taken.json"]

    def test_are_written_by_parts(self, tmp_path: Path) -> None:
        run, out = model(tmp_path / "run", "tokenizer.json", *self.NAMES), tmp_path / "out"
        for part in ("0/2", "1/2"):
            ckpt_cli.merge(run, out, part=part)
        ckpt_cli.publish(out)
        assert all((out / name).is_file() for name in self.NAMES)
        assert not ckpt_cli.verify(out, against=run).of_severity("error")

    def test_that_a_step_lost_are_told(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        for number in (1, 2):
            model(run / f"checkpoint-{number}", "tokenizer.json", *self.NAMES)
        shutil.rmtree(run / "checkpoint-2" / TEMPLATE_FOLDER)
        text = told(ckpt_cli.merge(run, tmp_path / "out"))["fewer-files"]
        assert text.startswith(
            f"the step lacks {self.NAMES[0]}, {self.NAMES[1]}, which checkpoint-1 has: copy both from {run}/checkpoint-1 "
        )


class TestCodeInFolders:
    CODE = "from transformers import PreTrainedConfig\n{}\nclass Own(PreTrainedConfig):\n    model_type = 'own'\n"

    def loads(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
        transformers = pytest.importorskip("transformers")
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.parent / "modules"))
        monkeypatch.setattr(sys, "path", [*sys.path])
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            monkeypatch.delitem(sys.modules, name)
        try:
            return bool(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "own")
        except (ImportError, OSError, ValueError):
            return False

    @pytest.mark.parametrize(
        ("module", "imported", "files", "loaded"),
        [
            ("configuration_own", "from .helper import x", ["helper.py"], True),
            ("sub/configuration_own", "from .helper import x", ["sub/helper.py"], True),
            ("configuration_own", "from .sub import x", ["sub/__init__.py"], False),
            ("configuration_own", "from .sub.inner import x", ["sub/__init__.py", "sub/inner.py"], False),
        ],
    )
    def test_is_what_transformers_finds(
        self, module: str, imported: str, files: list[str], loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = fill(model(tmp_path / "run", "tokenizer.json", "configuration_other.py"), *files, f"{module}.py")
        for name in files:
            (run / name).write_text("x = 1\n")
        (run / "configuration_other.py").write_text("")
        (run / f"{module}.py").write_text(self.CODE.format(imported))
        (run / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": f"{module}.Own"}}))
        assert self.loads(run, monkeypatch) == loaded
        notes = told(ckpt_cli.merge(run, tmp_path / "out"))
        assert ("lacks-code" in notes) != loaded
        assert self.loads(tmp_path / "out", monkeypatch) == loaded
