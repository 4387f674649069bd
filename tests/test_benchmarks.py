"""The benchmarks run, and docs/performance.md is what they make of docs/performance.json."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT
from tests.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the machine is described by /proc")

BENCHMARKS = ROOT / "benchmarks"


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in_a_rank(_: int, script: str, *arguments: str) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / script), run_name="__main__")


def test_the_page_is_made_from_the_stored_numbers(tmp_path: Path) -> None:
    stored = ROOT / "docs" / "performance.json"
    (tmp_path / "performance.json").write_text(stored.read_text())
    run("report.py", ".", "--render", "--output", tmp_path)
    assert (tmp_path / "performance.md").read_text() == (ROOT / "docs" / "performance.md").read_text()
    report = json.loads(stored.read_text())
    assert set(report) == {"machine", "copies", "peers", "growth"}
    # Another number is another page.
    report["peers"]["rows"][0]["times_durable"] += 1
    (tmp_path / "performance.json").write_text(json.dumps(report))
    run("report.py", ".", "--render", "--output", tmp_path)
    assert (tmp_path / "performance.md").read_text() != (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.slow
def test_a_tiny_report_is_measured(tmp_path: Path) -> None:
    run("report.py", tmp_path / "scratch", "--tiny", "--output", tmp_path)
    report = json.loads((tmp_path / "performance.json").read_text())
    # Torch is installed, so the programs that it brings are there at least.
    peers = {row["peer"]: row for row in report["peers"]["rows"]}
    assert {"dcp_to_torch_save", "consolidate_safetensors_files"} <= set(peers)
    assert {row["tensors"] for row in peers.values()} == {"same"}
    assert [(row["dtype"], row["cold"]) for row in report["copies"]["rows"]] == [
        ("keep", False),
        ("bf16", False),
        ("keep", True),
        ("bf16", True),
    ]
    assert [row["pieces"] for row in report["growth"]["rows"]] == [100, 200, 400, 100, 200, 400]
    assert all(row["ours"]["peak"] > 20e6 and row["ours"]["cpu"] > 0 for row in (*peers.values(), *report["copies"]["rows"]))
    assert list((tmp_path / "scratch").iterdir()) == []
    page = (tmp_path / "performance.md").read_text()
    assert all(f"## {title}" in page for title in ("Beside cp", "Beside other programs", "Planning many tensors"))


def test_what_differs_is_said(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    # Not in a process of its own, which would load torch each time; the tiny report starts it.
    compare = runpy.run_path(str(BENCHMARKS / "same_tensors.py"))
    tensors = {"a": torch.arange(4.0), "b": torch.ones(3)}
    others = {
        "same": tensors,
        "1 of 2 tensors differ, by at most 3e-01": {**tensors, "a": torch.tensor([0.0, 1, 2, 4])},
        "1 names on one side only, such as b": {"a": tensors["a"]},
        "a: torch.float32 (4,) and torch.bfloat16 (4,)": {**tensors, "a": tensors["a"].bfloat16()},
    }
    (tmp_path / "ours").mkdir()
    save_file(tensors, tmp_path / "ours" / "model.safetensors")
    for number, (said, other) in enumerate(others.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number % 2:
            torch.save({"model": other}, folder / "model.pt")
        else:
            save_file(other, folder / "model.safetensors")
        assert compare["difference"](*map(compare["Output"], (tmp_path / "ours", folder))) == said


@pytest.mark.parametrize(
    "kind", ["torch-dist", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("rank-files", "dcp", "zero-3", "hub-shards"))]
)
def test_checkpoints_of_the_benchmarks_are_read(kind: str, tmp_path: Path) -> None:
    """All of the layouts, with a class that proves names and shapes; torch_dist has its padded vocabulary cut."""
    import ckpt_cli

    # In a process that has loaded torch: the tiny report starts the script as users do.
    run_ranks(run_in_a_rank, "checkpoints.py", kind, str(tmp_path / "checkpoint"), "--billions", "0.0015", "--width", "128", ranks=1)
    run_folder = tmp_path / "checkpoint" / "run"
    base = tmp_path / "checkpoint" / "hf" if run_folder.exists() else None
    ckpt_cli.merge(run_folder if base else tmp_path / "checkpoint", tmp_path / "merged", base=base)
    findings = ckpt_cli.verify(tmp_path / "merged").findings
    assert [finding for finding in findings if finding.severity == "error"] == []
    header = json.loads((tmp_path / "merged" / "config.json").read_text())
    from safetensors import safe_open

    with safe_open(tmp_path / "merged" / "model.safetensors", framework="pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [header["vocab_size"], header["hidden_size"]]
