"""Something read by the machines of a Ray cluster: a task per part, each of which returns what it found. Nothing is written anywhere."""

from __future__ import annotations

from typing import Any

from ckpt_cli import __version__
from ckpt_cli.engines.call import PartCall
from ckpt_cli.engines.ray_cluster import connected, imported, run_tasks, tasks_at_once, threads_of_a_task
from ckpt_cli.engines.ray_task import Outcome, check_part
from ckpt_cli.output.part import Part
from ckpt_cli.progress import Progress, stages


def parts_by_ray(
    call: PartCall, address: str | None, count: int | None, jobs: int | None, progress: Progress | None
) -> list[tuple[str, Any]]:
    """What ``call`` found in each of ``count`` parts, in their order, with the node; by default as many as run at once.

    Raises what the tasks raise, EngineFailed, and Unsupported without Ray.
    """
    ray = imported()
    found: dict[int, tuple[str, Any]] = {}
    with connected(ray, address):
        threads = threads_of_a_task(ray, jobs)
        count = count or tasks_at_once(ray, threads)

        def done(part: Part, outcome: Outcome) -> None:
            found[part.number] = outcome.node, outcome.found

        run_tasks(
            ray,
            check_part,
            [Part(number, count) for number in range(count)],
            lambda part: (call, str(part), threads, __version__),
            threads=threads,
            done=done,
            look=lambda: stages(progress).reading(len(found), count, "parts"),
            call_off=None,
        )
    return [found[number] for number in range(count)]
