"""Models of the Hub as people paste them: each form is told what it is, and what the hint says to type is right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError, NotFound, UsageError
from ckpt_cli.hub_ids import HubName, of_address, of_path
from tests import tiny

COMMIT, OTHER = "a" * 40, "b" * 40

FORMS = {
    "org/name": HubName("org/name"),
    "org/name/": HubName("org/name"),
    "org/name@v1": HubName("org/name", "v1"),
    "org/name@refs/pr/1": None,
    "org/name/tree/main": HubName("org/name"),
    "org/name/tree/main/": HubName("org/name"),
    "org/name/tree/v1/a/b": HubName("org/name", "v1", "a/b"),
    "org/name/blob/main/a/model.safetensors": HubName("org/name", below="a/model.safetensors", is_file=True),
    "models--org--name": HubName("org/name"),
    "models--org--name/": HubName("org/name"),
    "models--org--a-b--c": HubName("org/a-b--c"),
    "models--gpt2": HubName("gpt2"),
    f"models--org--name/snapshots/{COMMIT}": HubName("org/name", COMMIT),
    f"models--org--name/snapshots/{COMMIT}/sub": HubName("org/name", COMMIT, "sub"),
    "org/name/sub": None,
    "./org/name": None,
    "/org/name": None,
    "../name": None,
    "org/../name": None,
    "name": None,
    "name/": None,
    "org/na me": None,
    "org/name@": None,
}
ADDRESSES = {
    "https://huggingface.co/org/name": HubName("org/name"),
    "https://huggingface.co/org/name/": HubName("org/name"),
    "http://www.huggingface.co/org/name?library=transformers#use": HubName("org/name"),
    "huggingface.co/org/name.git": HubName("org/name"),
    "https://hf.co/models/org/name": HubName("org/name"),
    "https:/huggingface.co/org/name": HubName("org/name"),
    "https://huggingface.co/org/name/tree/refs%2Fpr%2F1/sub": HubName("org/name", "refs/pr/1", "sub"),
    "https://huggingface.co/org/name/blob/v1/a/model.safetensors": HubName("org/name", "v1", "a/model.safetensors", is_file=True),
    "https://huggingface.co/org/name/commit/" + COMMIT: HubName("org/name", COMMIT),
    "https://huggingface.co/org/name/discussions/7": HubName("org/name"),
    "https://huggingface.co/gpt2": HubName("gpt2"),
    "https://huggingface.co/gpt2/tree/main": HubName("gpt2"),
    "https://huggingface.co/datasets/org/name/tree/main/data": HubName("org/name", below="data", kind="dataset"),
    "https://huggingface.co/spaces/org/name": HubName("org/name", kind="space"),
    "hf://org/name": HubName("org/name"),
    "hf:/org/name@v1/sub": HubName("org/name", "v1", "sub"),
    "hf://datasets/org/name": HubName("org/name", kind="dataset"),
    "https://huggingface.co/": None,
    "https://huggingface.co/docs/hub": None,
    "https://huggingface.co/models": None,
    "https://example.org/org/name": None,
    "hf://org": None,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache, and an empty current folder."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


@pytest.fixture
def cached(cache: Path) -> Path:
    """The snapshot of org/name in the cache, with a model inside of it too; a branch v1 has another."""
    repository = cache / "models--org--name"
    for commit, branch in ((COMMIT, "main"), (OTHER, "v1")):
        tiny.folder(repository / "snapshots" / commit, tiny.weights())
        tiny.folder(repository / "snapshots" / commit / "sub", tiny.weights(seed=1))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    return repository / "snapshots" / COMMIT


@pytest.mark.parametrize("text", FORMS)
def test_paths(text: str, cache: Path) -> None:
    assert of_path(text) == FORMS[text]


@pytest.mark.parametrize("text", ADDRESSES)
def test_addresses(text: str) -> None:
    assert of_address(text) == ADDRESSES[text]


def test_a_folder_that_is_there_is_no_owner(cache: Path) -> None:
    Path("org").mkdir()
    assert of_path("org/name") is None


def answer(form: str, way: str, tmp_path: Path) -> CkptError:
    calls: dict[str, Callable[[], object]] = {
        "PATH": lambda: ckpt_cli.merge(form, tmp_path / "out"),
        "--base": lambda: ckpt_cli.merge(tmp_path / "model", tmp_path / "out", base=form),
        "--against": lambda: ckpt_cli.verify(tmp_path / "model", against=form),
        "scan": lambda: ckpt_cli.scan(form),
    }
    with pytest.raises((NotFound, UsageError)) as caught:
        calls[way]()
    return caught.value


PASTED = {
    "org/name/": "",
    "org/name@main": "",
    "org/name@v1": OTHER,
    "models--org--name": "",
    "https://huggingface.co/org/name": "",
    "huggingface.co/org/name/tree/v1": OTHER,
    "hf:/org/name": "",
    "org/name/tree/main": "",
    "org/name/tree/main/sub": "sub",
    "org/name/sub": "sub",
    "https://huggingface.co/org/name/tree/v1/sub": f"{OTHER}/sub",
}


@pytest.mark.parametrize("form", PASTED)
@pytest.mark.parametrize("way", ["PATH", "--base", "--against", "scan"])
def test_of_a_cached_model_the_hint_says_what_to_pass(form: str, way: str, cached: Path, tmp_path: Path) -> None:
    tiny.folder(tmp_path / "model", tiny.weights())
    hint = str(answer(form, way, tmp_path).hint)
    found = re.search(r"it is in the Hub cache: pass (\S+)$", hint)
    assert found is not None, hint
    passed = shlex.split(found[1])[0]
    meant = cached / PASTED[form] if not PASTED[form].startswith(OTHER) else cached.parent / PASTED[form]
    if way == "--base" and not PASTED[form]:
        assert passed == "org/name"
    else:
        assert Path(passed) == meant
    if way == "--base":
        ckpt_cli.merge(tmp_path / "model", tmp_path / "out", base=passed)
    elif way == "--against":
        assert ckpt_cli.verify(tmp_path / "model", against=passed).exit_code == int("sub" in passed)
    elif way == "scan":
        assert ckpt_cli.scan(passed).exit_code == 0
    else:
        ckpt_cli.merge(passed, tmp_path / "out")


DOWNLOADED = {
    "org/name/": "hf download org/name --local-dir name, then pass name",
    "org/name@v1": "hf download org/name --revision v1 --local-dir name, then pass name",
    "models--org--name": "hf download org/name --local-dir name, then pass name",
    "https://huggingface.co/org/name": "hf download org/name --local-dir name, then pass name",
    "https://huggingface.co/datasets/org/name": "hf download org/name --repo-type dataset --local-dir name, then pass name",
    "org/name/tree/main/sub": "hf download org/name --include 'sub/*' --local-dir name, then pass name/sub",
    "org/name/blob/v1/a/x.pt": "hf download org/name a/x.pt --revision v1 --local-dir name, then pass name/a/x.pt",
}


@pytest.mark.parametrize("form", DOWNLOADED)
@pytest.mark.parametrize("way", ["PATH", "--base", "--against", "scan"])
def test_of_another_it_says_how_to_get_it(form: str, way: str, cache: Path, tmp_path: Path) -> None:
    tiny.folder(tmp_path / "model", tiny.weights())
    error, expected = answer(form, way, tmp_path), DOWNLOADED[form]
    hint = str(error.hint)
    if way == "--base" and expected == "hf download org/name --local-dir name, then pass name":
        expected = "hf download org/name, then pass org/name"
    elif way == "--base" and "x.pt" in expected:
        expected = "hf download org/name --revision v1 --include 'a/*' --local-dir name, then pass name/a"
    assert hint.endswith(expected)
    assert expected in str(error)  # its options are no keywords of Python


def test_the_commands_are_those_of_huggingface_hub() -> None:
    pytest.importorskip("huggingface_hub")
    program = Path(sys.executable).with_name("hf")
    if not program.exists():
        pytest.skip("hf is not installed")
    said = subprocess.run([program, "download", "--help"], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"--[a-z-]+", " ".join(DOWNLOADED.values()))) <= set(re.findall(r"--[a-z-]+", said))


def test_what_a_store_cannot_reach_may_be_in_the_cache(cached: Path) -> None:
    from ckpt_cli.files.remote.failures import _to_reach
    from ckpt_cli.urls import Address

    assert _to_reach(Address("hf", "org", "name"), "").startswith(f"it is in the Hub cache: pass {cached}; or check the network")
    assert _to_reach(Address("hf", "org", "else"), "").startswith("check the network")


@pytest.mark.parametrize("text", ["gpt2", "models--gpt2", "https://huggingface.co/gpt2"])
def test_models_without_an_owner(text: str, cache: Path, tmp_path: Path) -> None:
    """--base takes no such ID: its folder is passed."""
    tiny.folder(tmp_path / "model", tiny.weights())
    tiny.folder(cache / "models--gpt2" / "snapshots" / COMMIT, tiny.weights())
    hint = str(answer(text, "--base", tmp_path).hint)
    assert hint == f"it is in the Hub cache: pass {cache}/models--gpt2/snapshots/{COMMIT}"
