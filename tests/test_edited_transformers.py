"""What is remembered of transformers' classes is of the modules as they were: a checkout keeps its version from edit to edit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from ckpt_cli.hub.classes.installed import package
from ckpt_cli.hub.classes.installed.package import state_of_transformers

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = Path(str(transformers.__file__)).parent
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16,
}  # fmt: skip
ASK = "import json, sys, ckpt_cli.hub.classes.expected_tensors as e; print(len(e.expected_tensors(json.loads(sys.argv[1])).native))"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A transformers of its own: links to the installed one, but for what is edited."""
    own = tmp_path / "checkout" / "transformers"
    (own / "models").mkdir(parents=True)
    for entry in (*INSTALLED.iterdir(), *(INSTALLED / "models").iterdir()):
        copy = own / entry.relative_to(INSTALLED)
        if entry.name in ("qwen2", "llama"):
            shutil.copytree(entry, copy, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.name == "core_model_loading.py":
            shutil.copy2(entry, copy)
        elif entry.name not in ("models", "__pycache__"):
            copy.symlink_to(entry)
    return own


def test_a_class_that_was_edited_is_asked_for_again(checkout: Path, tmp_path: Path) -> None:
    places = os.pathsep.join([str(ROOT), str(checkout.parent)])
    environment = {**os.environ, "PYTHONPATH": places, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def asked() -> int:
        done = subprocess.run([sys.executable, "-c", ASK, json.dumps(CONFIG)], capture_output=True, text=True, check=True, env=environment)
        return int(done.stdout)

    first = asked()
    modeling = checkout / "models" / "qwen2" / "modeling_qwen2.py"
    line = "self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)"
    assert line in modeling.read_text()
    modeling.write_text(modeling.read_text().replace(line, line.replace("False", "True")))
    assert asked() == first + 1
    assert len(list((tmp_path / "cache" / "ckpt" / "hub_tensors").iterdir())) == 2
    assert asked() == first + 1
    assert len(list((tmp_path / "cache" / "ckpt" / "hub_tensors").iterdir())) == 2


def state(checkout: Path) -> str | None:
    package._digest.cache_clear()  # as a new process
    return state_of_transformers([str(checkout.parent)])


def touched(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def longer(path: Path) -> None:
    status = path.stat()
    path.write_text(path.read_text() + "\n")
    os.utime(path, ns=(0, status.st_mtime_ns))


@pytest.mark.parametrize("name", ["models/qwen2/configuration_qwen2.py", "models/llama/modeling_llama.py", "core_model_loading.py"])
@pytest.mark.parametrize("edit", [touched, longer])
def test_every_module_that_a_class_may_be_made_of_counts(checkout: Path, name: str, edit: Callable[[Path], None]) -> None:
    before = state(checkout)
    assert before is not None
    assert state(checkout) == before
    edit(checkout / name)
    assert state(checkout) not in (None, before)


def test_a_new_file_counts_and_a_tokenizer_does_not(checkout: Path) -> None:
    before = state(checkout)
    touched(checkout / "models" / "qwen2" / "tokenization_qwen2.py")
    assert state(checkout) == before
    (checkout / "models" / "qwen2" / "modeling_own.py").touch()
    assert state(checkout) != before


def test_two_places_are_two_installations(checkout: Path) -> None:
    assert state(checkout) != state(INSTALLED)
    assert state_of_transformers([str(checkout.parent.parent)]) is None
