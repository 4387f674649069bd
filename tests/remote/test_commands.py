"""Every command on an address says and writes what it does on a copy of the same files on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError
from tests import tiny
from tests.cli import ckpt_fork as ckpt
from tests.remote.stores import SECRET, Bucket, Proxy

LAYOUTS = [
    ("layouts/verl-run/run", {}),
    ("layouts/accelerate/rank_files", {}),
    ("layouts/lightning/trainer", {}),
    ("layouts/torchtitan/run", {}),
    ("layouts/olmo-core/run", {}),
    ("layouts/dcp-options/safetensors_items", {}),
    ("layouts/dcp-options/zstd", {}),
    ("layouts/plain-files/hub", {}),
    ("layouts/plain-files/legacy", {}),
    ("deepspeed/z3-bf16-w2", {}),
]


def content(folder: Path) -> dict[str, bytes]:
    """All files of an output, without the manifest, which names what was read."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "ckpt-manifest.json"
    }


def said(call: Callable[[], Any], *names: str | Path) -> str:
    """What a call returns or raises, as text, without times and places and with the same names for inputs and outputs."""
    try:
        result = call()
        text = result.model_dump_json() if hasattr(result, "model_dump_json") else repr(result)
    except CkptError as error:
        text = f"{type(error).__name__} {error}"
    for name in names:
        text = text.replace(str(name), "@")
    return re.sub(r'"(seconds|\w*free|peak_memory|plan_digest)":[^,}]+', r'"\1":0', text)


@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=lambda value: str(value).replace("/", "-"))
def test_results_and_outputs_are_those_of_a_copy(
    data: Path, layout: str, options: dict[str, Any], tmp_path: Path, store: Proxy, bucket: Bucket
) -> None:
    local, address = data / layout, bucket.fill(data / layout, "some/run")
    for command in (ckpt_cli.detect, ckpt_cli.inspect):
        store.requests.clear()
        assert said(partial(command, address, **options), address) == said(partial(command, local, **options), local)
        asked = [each.key for each in store.of("")]
        # Every item of a .distcp file says by itself what is in it.
        assert [key for key in sorted(set(asked)) if asked.count(key) > (8 if key.endswith(".distcp") else 3)] == []
        listed = [each.listing for each in store.listings()]
        assert len(listed) == len(set(listed)), "a folder was listed twice"
    here, there = tmp_path / "here", tmp_path / "there"
    merged = said(lambda: ckpt_cli.merge(local, here, **options), local, here)
    assert said(lambda: ckpt_cli.merge(address, there, **options), address, there) == merged
    assert content(there) == content(here) if here.exists() else not there.exists()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "model", tiny.weights(1), tiny.unknown())


def test_other_commands(model: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    other = tiny.folder(tmp_path / "other", tiny.weights(2), tiny.unknown())
    first, second = bucket.fill(model, "a"), bucket.fill(other, "b")
    pairs: list[tuple[Callable[[Any, Any, Path], Any], str]] = [
        (lambda a, b, out: ckpt_cli.average([a, b], out), "average"),
        (lambda a, b, out: ckpt_cli.diff(a, b), "diff"),
        (lambda a, b, out: ckpt_cli.show(a, "model.norm.weight"), "show"),
        (lambda a, b, out: ckpt_cli.inspect(a, stats=True), "stats"),
        (lambda a, b, out: ckpt_cli.verify(a, full=True), "verify"),
        (lambda a, b, out: ckpt_cli.verify(model, against=b), "verify against"),
        (lambda a, b, out: ckpt_cli.merge(a, out, base=b), "base"),
    ]
    for call, name in pairs:
        here, there = tmp_path / f"{name} here", tmp_path / f"{name} there"
        wanted = said(lambda: call(model, other, here), model, other, here)  # noqa: B023
        assert said(lambda: call(first, second, there), first, second, there, model) == wanted, name  # noqa: B023
        assert content(there) == content(here), name


def test_state_is_extracted(data: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    address = bucket.fill(data / "layouts/verl-run/run", "run")
    ckpt_cli.extract_state(data / "layouts/verl-run/run", tmp_path / "here")
    ckpt_cli.extract_state(address, tmp_path / "there")
    read = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*/*.pt"))]
    assert len(read) >= 2
    assert content(tmp_path / "here").keys() == content(tmp_path / "there").keys()
    recorded = json.loads((tmp_path / "there" / "ckpt-manifest.json").read_text())
    assert recorded["checkpoint"].startswith(address)


def test_lazy_tensors(model: Path, store: Proxy, bucket: Bucket) -> None:
    address = bucket.fill(model, "run")
    with ckpt_cli.open(address) as remote, ckpt_cli.open(model) as local:
        assert list(remote) == list(local)
        assert all(torch.equal(remote[name].torch(), local[name].torch()) for name in local)
        assert (remote["model.norm.weight"][1:3].numpy() == local["model.norm.weight"][1:3].numpy()).all()


def test_a_path_object_is_an_address_too(model: Path, store: Proxy, bucket: Bucket) -> None:
    address = bucket.fill(model, "run")
    assert ckpt_cli.detect(Path(address)) == ckpt_cli.detect(address)


def test_on_the_command_line_nothing_secret_is_said(model: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    address = bucket.fill(model, "some/run")
    (tmp_path / "run_merged").mkdir()
    missing = f"{address}-not-there"
    for words in (["detect", address], ["inspect", address, "--json"], ["merge", address, "run_merged", "--json"], ["detect", missing]):
        outcome = ckpt(*words, cwd=tmp_path)
        assert outcome.code == (3 if words[1] == missing else 0), outcome.err
        assert address in outcome.out + outcome.err
        assert SECRET not in outcome.out + outcome.err
        assert "/dev/null" not in outcome.out + outcome.err
    merged = tmp_path / "run_merged"
    assert content(merged)["model.safetensors"] == (model / "model.safetensors").read_bytes()
    manifest = (merged / "ckpt-manifest.json").read_text()
    assert SECRET not in manifest
    assert "/dev/null" not in manifest
    assert json.loads(manifest)["checkpoint"] == address
    assert json.loads(manifest)["sources"][0]["path"] == f"{address}/model.safetensors"
    assert ckpt_cli.verify(merged).exit_code == 0
    outcome = ckpt(address)
    assert f"{address} is an address: which command?" in outcome.err
    assert f"ckpt detect {address}" in outcome.err


def test_no_message_has_a_path_of_its_own_for_a_store(model: Path, tmp_path: Path, store: Proxy, bucket: Bucket) -> None:
    """Hints are joined and changed after an error was made, so every command is asked about what it cannot do."""
    for step in (1, 2):
        bucket.fill(model, f"run/checkpoint-{step}")
    weights = (model / "model.safetensors").read_bytes()
    bucket.put("run/checkpoint-2/model.safetensors", weights[: len(weights) // 2])
    run, there = f"s3://{bucket.name}/run", f"s3://{bucket.name}/run/checkpoint-2"
    lines = [
        ["detect", there], ["inspect", there], ["merge", there, "out"], ["merge", run, "o2", "--step", "2"], ["verify", there],
        ["average", run, "--last", "2", "-o", "mean"], ["extract-state", there], ["diff", there, f"{run}/checkpoint-1"],
        ["show", there, "x"], ["merge", f"{run}/checkpoint-3", "o3"], ["merge", run, "o4", "--base", there],
    ]  # fmt: skip
    outcomes = [(words, ckpt(*words, cwd=tmp_path)) for words in lines]
    assert [words for words, outcome in outcomes if "/dev/null" in outcome.out + outcome.err] == []
    assert f"{run}/checkpoint-1" in outcomes[2][1].err
    error = CkptError("x")
    error.hint = f"use {Path('/dev/null/s3:/b/run')}"
    assert error.hint == "use s3://b/run"


def test_what_a_process_sees_is_not_kept_for_the_next_call(model: Path, store: Proxy, bucket: Bucket) -> None:
    """A notebook that asks again sees the step that was written in between."""
    bucket.fill(model, "run/checkpoint-1")
    address = f"s3://{bucket.name}/run"
    assert [step.step for step in ckpt_cli.detect(address).checkpoint.steps] == [1]
    bucket.fill(model, "run/checkpoint-2")
    assert [step.step for step in ckpt_cli.detect(address).checkpoint.steps] == [1, 2]
