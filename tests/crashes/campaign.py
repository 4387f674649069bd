"""Commands that crash at every call: builds the inputs and the library, and starts the driver."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import tiny
from tests.cli import ROOT, ckpt_fork
from tests.crashes.driver import KILL, SHORT, Report

FAILURES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
LIMITS = (0, 100, 10_000, 20_000, 30_000)


def library(folder: Path) -> Path | None:
    """The library that lets calls fail, if it can be made and loaded here."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not os.path.isdir("/proc/self/fd"):
        return None
    made = folder / "crash.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, Path(__file__).parent / "crash.c", "-ldl"], check=True)
    return made


def scenarios(work: Path) -> list[dict[str, Any]]:
    """Outputs of several files: new, in place of old ones, of two components, in place, front to back, averages, state, parts, watches."""
    for step in (1, 2):
        tiny.verl(work / "run", tiny.weights(step), tiny.unknown(), step=step)
        tiny.verl(work / "run", tiny.weights(10 + step), tiny.unknown(), step=step, role="critic")
        state = {"lr_scheduler": {"last_epoch": step}, "rng": {"cpu": torch.arange(100)}}
        torch.save(state, work / "run" / f"global_step_{step}" / "actor" / "extra_state_world_size_1_rank_0.pt")
    hub = tiny.folder(work / "hub", tiny.weights(5), tiny.unknown())
    # As large as what the system copies by itself, and beside them what is assembled.
    large = {f"{i}.weight": torch.full((300, 300), float(i)) for i in range(3)} | {"bias": torch.ones(5)}
    save_file(large, work / "large.safetensors", metadata={"format": "pt"})
    small = ("--max-shard-size", "20KB", "--jobs", "1", "--progress", "off", "--verbose")
    empty, old, place = work / "empty", work / "old", work / "in-place"
    empty.mkdir()
    old.mkdir()
    place.mkdir()
    shutil.copytree(work / "run" / "global_step_2" / "actor", place / "actor")
    run, parts, replacing = str(work / "run"), work / "parts", work / "replacing"
    actor, plain = ("merge", run, "--type", "actor"), ("--progress", "off", "--verbose")
    _run(*actor, "--step", "1", "-o", str(old / "out"), *small)
    for folder, part in ((parts, "0/2"), (replacing, "0/2"), (replacing, "1/2")):
        if folder is replacing and not folder.exists():
            shutil.copytree(old, folder)
        _run(*actor, "-o", str(folder / "out"), "--part", part, "--overwrite", *small)

    def of(
        name: str, before: Path, *command: str, lacking: str = "", options: Sequence[str] = small, then: Sequence[str] = ()
    ) -> dict[str, Any]:
        return {"name": name, "before": str(before), "command": [*command, *options], "lacking": lacking, "then": [*then]}

    return [
        of("merge", empty, "merge", run, "--type", "actor", "-o", "PLACE/out"),
        of("overwrite", old, "merge", run, "--type", "actor", "-o", "PLACE/out", "--overwrite", "--dtype", "bf16"),
        of("components", empty, "merge", run, "--type", "all", "-o", "PLACE/new/out"),
        of("in place", place, "merge", "PLACE/actor", "--in-place", "--type", "actor"),
        of("front to back", empty, "merge", str(hub), "--write", "sequential", "--checksum", "-o", "PLACE/out"),
        of("average", empty, "average", run, "--all", "--type", "actor", "-o", "PLACE/out"),
        of("average, overwriting", old, "average", run, "--all", "--type", "actor", "-o", "PLACE/out", "--overwrite"),
        of("copies", empty, "merge", str(work / "large.safetensors"), "-o", "PLACE/out"),
        of("copies through memory", empty, "merge", str(work / "large.safetensors"), "-o", "PLACE/out", lacking="copy_file_range"),
        of("with state", empty, *actor, "-o", "PLACE/out", "--with-state"),
        of("state", empty, "extract-state", run, "--type", "actor", "-o", "PLACE/out", options=plain),
        of("part", parts, *actor, "-o", "PLACE/out", "--part", "1/2", "--overwrite", then=("publish", "PLACE/out")),
        of("first part", parts, *actor, "-o", "PLACE/out", "--part", "0/1", "--overwrite"),
        of("publish", replacing, "publish", "PLACE/out", "--overwrite", options=plain),
        of("watch", empty, "watch", run, "--once", "--settle", "0", "--since", "2", "--type", "actor", "-o", "PLACE/out"),
        of("watch, keeping one", empty, "watch", run, "--once", "--settle", "0", "--keep", "1", "--type", "actor", "-o", "PLACE/out"),
        of("without exchange", old, "average", run, "--all", "--type", "actor", "-o", "PLACE/out", "--overwrite", lacking="renameat2"),
    ]


def campaign(
    work: Path,
    library: Path,
    *,
    every: int = 1,
    failures: Sequence[int] = (KILL, SHORT, *FAILURES),
    forever: Sequence[bool] = (False, True),
    limits: Sequence[int] = LIMITS,
    only: Sequence[str] | None = None,
    halved: bool = False,
) -> Report:
    """Crash at every ``every``-th call of the scenarios (or ``only`` some) with each of the failures, or each with half of them in turn."""
    (work / "driven").mkdir()
    spec = {
        "scenarios": [each for each in scenarios(work) if only is None or each["name"] in only],
        "work": str(work / "driven"),
        "every": every,
        "failures": list(failures),
        "forever": list(forever),
        "limits": list(limits),
        "halved": halved,
    }
    (work / "spec.json").write_text(json.dumps(spec))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.crashes.driver", str(work / "spec.json")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Report(**json.loads(done.stdout))


def _run(*command: str) -> None:
    done = ckpt_fork(*command)
    if done.code:
        raise RuntimeError(done.err)
