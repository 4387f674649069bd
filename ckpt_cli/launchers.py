"""Launchers that start one program many times: what each tells a process, and which of several that it inherits from started it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Launcher:
    """By which variables a launcher tells a process its ``number`` (from 0) and the ``count``.

    ``run``: those that tell one run from the next, equal for all of its processes. ``once``: one that no second run and no restart has.
    """

    name: str
    number: str
    count: str
    run: tuple[str, ...]
    once: str | None = None

    def says(self, environment: Mapping[str, str]) -> str | None:
        """The number and the count as "3/8", unchecked; None if it did not start this process or any above it."""
        if self.number in environment and self.count in environment:
            return f"{environment[self.number]}/{environment[self.count]}"
        return None

    def run_of(self, environment: Mapping[str, str]) -> str:
        """What tells its run from others, as far as it says."""
        return "/".join(environment.get(name, "") for name in self.run)

    def runs_once(self, environment: Mapping[str, str]) -> bool:
        """Whether no other run, and no second try of this one, says the same of itself."""
        return self.once is not None and self.once in environment


LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")),
    # SLURM_PROCID and SLURM_NTASKS are set in a batch script as well (0, and the tasks of the job), and inherited by all that it starts;
    # SLURM_STEP_... only by srun: https://slurm.schedmd.com/srun.html, "Output environment variables".
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"), once="SLURM_STEP_ID"
    ),
    # On other nodes than its own, mpirun starts processes within a step of srun: no variable of a step may name its run.
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE", "SLURM_JOB_ID"), once="PMIX_NAMESPACE"),
    Launcher("MPICH", "PMI_RANK", "PMI_SIZE", ("SLURM_JOB_ID",)),
)


def launcher_of(environment: Mapping[str, str], above: Iterable[Mapping[str, str]] = ()) -> Launcher | None:
    """The launcher nearest to the process that has this environment; None if there is none.

    ``above``: the environments of the processes above it, nearest first. One that has what a launcher said, and not what another said,
    was started before the other began: the other is nearer. Of those that cannot be told apart, one of a single process says nothing
    of parts. Raises UsageError for others that contradict each other.
    """
    said = {launcher: text for launcher in LAUNCHERS if (text := launcher.says(environment)) is not None}
    for each in above:
        if len(set(said.values())) < 2:
            break
        nearer = {launcher: text for launcher, text in said.items() if launcher.says(each) != text}
        said = nearer or said
    if len(set(said.values())) > 1:
        said = {launcher: text for launcher, text in said.items() if not text.endswith("/1")} or said
    if len(set(said.values())) > 1:
        raise UsageError(
            "--part auto: launchers contradict each other, and nothing says which of them started this process",
            details=[f"{launcher.name}: {launcher.number}/{launcher.count} is {text[:40]}" for launcher, text in said.items()],
            hint="pass --part K/N, such as 0/8 to 7/8, or unset the variables of all but one",
        )
    return next(iter(said), None)


def environments_above() -> Iterator[dict[str, str]]:
    """With which environments the processes above this one were started, nearest first; none where the system does not tell (no /proc)."""
    process = os.getppid()
    while process > 0:
        folder = Path("/proc") / str(process)
        # Those of other users are not told, and say nothing.
        with contextlib.suppress(OSError):
            pairs = (os.fsdecode(item).partition("=") for item in (folder / "environ").read_bytes().split(b"\0"))
            yield {name: value for name, _, value in pairs}
        try:
            process = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
