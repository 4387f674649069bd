"""Outputs written by the machines of a Ray cluster: a task per part, each of which plans for itself and writes to the shared file system.

The driver has planned the output already. It leaves a mark in the folder of the parts, submits the tasks (Ray repeats those whose worker or
node is lost), and publishes as `ckpt publish` does. If a task fails, or the driver is interrupted, the others are called off and
nothing is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli import __version__
from ckpt_cli.engines.call import PartCall
from ckpt_cli.engines.ray_task import Outcome, mark_of, write_part
from ckpt_cli.errors import EngineFailed, Unsupported, install
from ckpt_cli.output.options import WritingOptions
from ckpt_cli.output.part import Part
from ckpt_cli.output.parts import publish_parts
from ckpt_cli.output.parts_folder import PartsFolder
from ckpt_cli.output.publish import Order, Publication, publish
from ckpt_cli.output.target import make_parents, remove_empty
from ckpt_cli.output.writer import Written, output_errors
from ckpt_cli.progress import Progress, Silent
from ckpt_cli.tensors.parallel import default_jobs

RETRIES = 5
"""How often a part is begun again because its worker or node was lost."""

LOOK = 0.5
"""Seconds between two looks at what is written."""

PATIENCE = 10.0
"""Seconds in which tasks that are called off should end."""

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""For what this process starts: nothing is reported to anybody, and stderr is ours. What the user set stays."""


def publish_by_ray(orders: Sequence[Order], call: PartCall, options: WritingOptions, progress: Progress | None) -> list[Publication]:
    """Write and publish all orders, by default a task per output file.

    Raises what `publish` and the tasks raise, EngineFailed, and Unsupported without Ray.
    """
    ray = _imported()
    planned = publish(orders, dry_run=True)
    count = options.ray_parts or max(len(order.plan.files) for order in orders) or 1
    parts = [Part(number, count, whole_files=options.ray_parts is None) for number in range(count)]
    shared = [PartsFolder(order.target.folder, order.plan.digest) for order in orders]
    mark, created = uuid.uuid4().hex, list[Path]()
    try:
        for folder in shared:
            with output_errors(folder.target):
                created += make_parents(folder.target)
                # Left by a run that was killed: everything is written again.
                folder.remove()
                folder.root.mkdir()
                mark_of(folder).write_text(mark)
        shown = _Shown(progress or Silent(), shared, sum(order.plan.bytes_written for order in orders), count)
        with shown, _connected(ray, options.ray_address):
            _write(ray, call, parts, options.jobs, shared, mark, shown)
        published = publish_parts([order.target.folder for order in orders], digests=[order.plan.digest for order in orders])
    except BaseException:
        for folder in shared:
            folder.remove()
        remove_empty(created)
        raise
    return [
        Publication(Written(before.written.files, done.overflows, done.non_finite), before.free, before.side_files)
        for before, done in zip(planned, published, strict=True)
    ]


def _write(
    ray: Any, call: PartCall, parts: Sequence[Part], jobs: int | None, shared: Sequence[PartsFolder], mark: str, shown: _Shown
) -> None:
    """Run a task per part. Raises the error of the first that fails, when the others have ended."""
    threads = min(jobs or default_jobs(), max(1, int(max((node["Resources"].get("CPU", 0) for node in ray.nodes()), default=1))))
    task = ray.remote(write_part).options(num_cpus=threads, max_retries=RETRIES, scheduling_strategy="SPREAD", name="ckpt")
    waiting: dict[Any, Part] = {}
    try:
        with _signals_deferred() as check:
            for part in parts:
                waiting[task.remote(call, str(part), threads, shared, mark, __version__)] = part
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=LOOK)
                check()
                for reference in done:
                    _raise_failure(ray, reference, waiting.pop(reference))
                    shown.done += 1
                shown.look()
    finally:
        if waiting:
            _call_off(ray, list(waiting), shared)


def _call_off(ray: Any, references: list[Any], shared: Sequence[PartsFolder]) -> None:
    """End tasks by taking away the mark at which they look; `ray.cancel` can end the driver itself if a task ends at that moment."""
    for folder in shared:
        with contextlib.suppress(OSError):
            mark_of(folder).unlink()
    _, deaf = ray.wait(references, num_returns=len(references), timeout=PATIENCE)
    for reference in deaf:
        ray.cancel(reference, force=True)
    if deaf:
        ray.wait(deaf, num_returns=len(deaf), timeout=PATIENCE)


def _raise_failure(ray: Any, reference: Any, part: Part) -> None:
    """Raise the error of a part that ended, as ours."""
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (ImportError, AttributeError)) or "failed to import" in str(error):
            hint = f"install ckpt {__version__} on all nodes, for the Python that Ray runs"
            raise EngineFailed("a node cannot import this version of ckpt", details=[str(error.cause)], hint=hint) from error
        raise error.cause from error
    except ray.exceptions.RayError as error:
        text = f"part {part} was lost with its worker {RETRIES + 1} times: the process was killed, or its node"
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise EngineFailed(text, details=[reason], hint="look for what ends it: often too little memory on the node") from error
    if outcome.error is not None:
        raise outcome.error


class _Shown:
    """Progress by what lies on the disk, so that no task has to report; what is begun again does not count twice."""

    def __init__(self, progress: Progress, shared: Sequence[PartsFolder], total: int, count: int) -> None:
        self.done = 0
        self._progress, self._shared, self._total, self._count, self._seen = progress, shared, total, count, 0

    def __enter__(self) -> _Shown:
        self._progress.start(self._total, self._label)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.finish()

    @property
    def _label(self) -> str:
        return f"{self.done} of {self._count} parts"

    def look(self) -> None:
        """Tell what came since the last look."""
        now = self._total if self.done == self._count else min(sum(map(_on_disk, self._shared)), self._total)
        if now > self._seen:
            self._progress.advance(now - self._seen, self._label)
            self._seen = now


def _on_disk(shared: PartsFolder) -> int:
    """Bytes of the files that have been written: they are sparse before."""
    with contextlib.suppress(OSError), os.scandir(shared.output) as entries:
        return sum(min(status.st_blocks * 512, status.st_size) for status in (entry.stat(follow_symlinks=False) for entry in entries))
    return 0


# -- the cluster -----------------------------------------------------------------------------------------------------


def _imported() -> Any:
    # Read when Ray is imported.
    with _environment(QUIET):
        try:
            import ray
        except ImportError:
            raise Unsupported("--engine ray needs Ray, which is not installed", hint=install("ray")) from None
    return ray


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """A connection to the cluster at an address; without one, to what Ray finds (RAY_ADDRESS, this machine's), or to a new one here."""
    if ray.is_initialized():
        yield
        return
    _check_address(address or os.environ.get("RAY_ADDRESS", ""))
    with _signals_kept(), _environment(QUIET), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, include_dashboard=False)
        except Exception as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            text = "Ray could not be started" if address is None else f"there is no connection to the Ray cluster at {address}"
            raise EngineFailed(text, details=[reason]) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise EngineFailed if nothing answers at HOST:PORT, which Ray would try for minutes. Addresses of other kinds are left to Ray."""
    found = re.fullmatch(r"(?:ray://)?([^/\s]+):([0-9]{1,5})", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "`ray start --head` on that machine prints its address"
        raise EngineFailed(f"there is no connection to the Ray cluster at {address}", details=[reason], hint=hint) from error


SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and does not give it back."""
    handlers = _handlers()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[Callable[[], None]]:
    """Signals wait until the function that is given is called: an exception in the middle of Ray's own code could become any other."""
    handlers, came = _handlers(), list[int]()

    def note(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 1:
            # A second signal ends at once.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def check() -> None:
        if came and callable(handler := handlers[came[0]]):
            handler(came[0], None)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield check
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _handlers() -> dict[int, Any]:
    """The handlers that Python functions are, by signal; only the main thread may set others."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """With these variables where they are not set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
