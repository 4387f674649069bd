"""Why this machine cannot ask transformers about a class is told, and is a warning where nothing else tells which tensors it has."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.hub.classes import compile, transformers_child
from tests import tiny

pytest.importorskip("transformers")

DETR = {
    "model_type": "detr",
    "architectures": ["DetrForObjectDetection"],
    "use_timm_backbone": True,
    "backbone": "resnet50",
    "use_pretrained_backbone": False,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
}
LACKS_TIMM = "TimmBackbone requires the timm library but it was not found in your environment"


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    yield
    transformers_child._asked.cache_clear()


def saying(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> list[str]:
    """Give this answer to every question; the questions."""
    asked: list[str] = []
    transformers_child._asked.cache_clear()
    monkeypatch.setattr(transformers_child, "_run_child", lambda question, _: asked.append(question) or answer)
    return asked


def told(items: Any) -> dict[str, str]:
    return {item.code: getattr(item, "text", None) or item.message for item in items}


def test_a_library_that_the_class_needs_is_named_by_merge_average_and_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, {"unasked": LACKS_TIMM})
    run = tiny.folder(tmp_path / "run", tiny.weights(), DETR)
    merged = told(ckpt_cli.merge(run, tmp_path / "out").outputs[0].notes)
    averaged = told(ckpt_cli.average([run, run], tmp_path / "mean").outputs[0].notes)
    for notes in (merged, averaged):
        assert LACKS_TIMM in notes["unasked-class"]
        assert "ckpt verify" in notes["unasked-class"]
    found = told(ckpt_cli.verify(tmp_path / "out").findings)
    assert LACKS_TIMM in found["unasked-class"]
    assert "not-compared" not in found


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_transformers_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DETR))
    assert compile.answer_to("--tensors", tmp_path / "config.json") == {"unasked": LACKS_TIMM}


def test_where_names_are_known_they_are_compared_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, {"unasked": "it ran out of memory"})
    run = tiny.folder(tmp_path / "run", tiny.weights(), tiny.config())
    merged = ckpt_cli.merge(run, tmp_path / "out").outputs[0]
    assert "unasked-class" not in told(merged.notes)
    assert "unasked-class" not in told(ckpt_cli.verify(tmp_path / "out").findings)


def test_without_torch_nothing_is_amiss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else pytest.fail(name))
    assert compile.reason_here(ImportError("DetrForObjectDetection requires the PyTorch library")) == transformers_child.NO_TORCH
    monkeypatch.undo()
    saying(monkeypatch, {"unasked": transformers_child.NO_TORCH})
    run = tiny.folder(tmp_path / "run", tiny.weights(), DETR)
    assert "unasked-class" not in told(ckpt_cli.merge(run, tmp_path / "out").outputs[0].notes)
    assert "torch is not installed" in told(ckpt_cli.verify(tmp_path / "out").findings)["not-compared"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'torchvision'", name="torchvision"), "No module named 'torchvision'"),
        (ImportError(f"\n{LACKS_TIMM}. You can install it with pip:\n`pip install timm`.\n"), LACKS_TIMM),
        (MemoryError(), "it ran out of memory"),
        (OSError("We couldn't connect to the hub\nCheck your connection"), "OSError: Check your connection"),
        (ImportError(), "ImportError"),
    ],
    ids=["module", "backend", "memory", "file", "nothing said"],
)
def test_every_reason_has_its_text(error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setitem(compile.ANSWERS, "--tensors", fail)
    (tmp_path / "config.json").write_text("{}")
    assert compile.answer_to("--tensors", tmp_path / "config.json") == {"unasked": reason}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", "killed"),
        ("raise SystemExit(1)", "its process failed"),
        ("print('[]')", "its process failed"),
        ("import time; time.sleep(60)", "no answer in 0.2 s"),
    ],
    ids=["killed", "failed", "answers otherwise", "too slow"],
)
def test_a_child_without_an_answer_is_told_apart(code: str, reason: str, own_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: plain([sys.executable, "-S", "-c", code], **options))
    monkeypatch.setattr(transformers_child, "TIMEOUT", 0.2 if "sleep" in code else 60)
    answer = transformers_child._run_child("tensors", "{}")
    assert answer is not None
    assert reason in answer["unasked"]


def test_no_reason_of_this_machine_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for answer in ({"unasked": LACKS_TIMM}, {"native": {}, "reason": "timm is there now"}):
        asked = saying(monkeypatch, answer)
        assert transformers_child.asked_child("tensors", DETR, 1) == answer
        assert asked == ["tensors"]
