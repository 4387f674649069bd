"""Feed mutants to everything that ckpt parses; only its own errors may come out, each within seconds.

    python -m tests.fuzzing --seconds 600
    python -m tests.fuzzing --mutants 100000 --seed 7 --keep /some/folder

Ends with 1 and writes the mutants to ``--keep`` if anything else comes out. What was found is kept in `corpus`, where tests read it.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from unittest.mock import patch

from ckpt_cli.errors import CkptError
from ckpt_cli.hub.classes import transformers_child
from tests.fuzzing.targets import CASES, Checkpoint, parsers

DATA = Path(__file__).parent.parent / "data"
SLOW = 10
"""Seconds after which a mutant has taken too long."""

MEMORY = 3 << 30
OF_FOLDERS = 0.03
"""The share of mutants that are files of checkpoints: these take fifty times as long."""


class TooSlow(BaseException):
    """Not an Exception, so that nothing on the way takes it for one of its own."""


@dataclass
class Outcome:
    """What became of the mutants: by target, how many were read, refused, and faults by where they come from."""

    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    faults: dict[str, tuple[str, bytes, str]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def mutants(self) -> int:
        return sum(self.read.values()) + sum(self.refused.values())

    def judge(self, target: str, mutant: bytes, run: Callable[[], object]) -> None:
        """Run one mutant."""
        signal.alarm(SLOW)
        try:
            run()
        except CkptError:
            self.refused[target] += 1
        except (Exception, TooSlow) as error:  # noqa: BLE001 - whatever comes out is what is looked for
            self.refused[target] += 1
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "ckpt_cli" in frame.filename]
            place = f"{frames[-1].filename.split('ckpt_cli/')[-1]}:{frames[-1].lineno}" if frames else "?"
            self.faults.setdefault(f"{type(error).__name__} at {place}", (target, mutant, traceback.format_exc()))
        else:
            self.read[target] += 1
        finally:
            signal.alarm(0)


def fuzz(data: Path, work: Path, seed: int, *, mutants: int | None = None, seconds: float | None = None) -> Outcome:
    """Mutants until their number or the time is reached. ``data``: the unpacked archives; ``work``: an empty folder."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    source, outcome, start = random.Random(seed), Outcome(), time.monotonic()
    targets = list(parsers(data, work))
    checkpoints = {case: Checkpoint(data / case, work).mutants(source) for case in CASES if (data / case).exists()}
    try:
        # As where transformers is not installed: a child process would ask it about every config that is a mutant.
        with patch.object(transformers_child, "installed_version", lambda: None):
            while (mutants is None or outcome.mutants < mutants) and (seconds is None or time.monotonic() - start < seconds):
                if source.random() < OF_FOLDERS:
                    case = source.choice(list(checkpoints))
                    mutant, run = next(checkpoints[case])
                    outcome.judge(f"checkpoints of {case.split('/')[0]}", mutant, run)
                else:
                    target = source.choice(targets)
                    mutant = target.change(source.choice(target.seeds), source)
                    outcome.judge(target.name, mutant, partial(target.run, mutant))
    finally:
        signal.signal(signal.SIGALRM, before)
    outcome.seconds = time.monotonic() - start
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--mutants", type=int)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", type=Path, help="where mutants are written that something else than an error of ckpt came out of")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        for archive in sorted(DATA.glob("*.tar.xz")):
            with tarfile.open(archive) as tar:
                tar.extractall(Path(folder) / "data", filter="data")
        (Path(folder) / "work").mkdir()
        limit = given.mutants if given.mutants or given.seconds else 10_000
        outcome = fuzz(Path(folder) / "data", Path(folder) / "work", given.seed, mutants=limit, seconds=given.seconds)
    for name in sorted(outcome.read.keys() | outcome.refused.keys()):
        print(f"{name:40} {outcome.read[name]:8} read {outcome.refused[name]:8} refused")
    print(f"{outcome.mutants} mutants in {outcome.seconds:.0f} s, seed {given.seed}, {len(outcome.faults)} faults")
    for number, (fault, (target, mutant, trace)) in enumerate(outcome.faults.items()):
        print(f"\n{fault} ({target}, {len(mutant)} bytes)\n{trace}")
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            (given.keep / f"{target.replace(' ', '-')}-{number}").write_bytes(mutant)
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
