"""Tasks on a Ray cluster: the connection to it, a task per part, signals, and errors as ours.

Ray repeats tasks whose worker or node is lost. If a task fails, or the driver is interrupted, the others are called off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_cli import __version__
from ckpt_cli.engines.ray_task import Outcome
from ckpt_cli.errors import EngineFailed, Unsupported, install
from ckpt_cli.output.part import Part
from ckpt_cli.tensors.parallel import default_jobs

RETRIES = 5
"""How often a part is begun again because its worker or node was lost."""

LOOK = 0.5
"""Seconds between two looks at what is done."""

PATIENCE = 10.0
"""Seconds in which tasks that are called off should end."""

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""For what this process starts: nothing is reported to anybody, and stderr is ours. What the user set stays."""


def threads_of_a_task(ray: Any, jobs: int | None) -> int:
    """How many processors a task takes: ``jobs``, if any node has as many."""
    return min(jobs or default_jobs(), max(1, int(max(_processors(ray), default=1))))


def tasks_at_once(ray: Any, threads: int) -> int:
    """How many tasks of so many threads the cluster runs at the same time."""
    return max(1, sum(int(count) // threads for count in _processors(ray)))


def _processors(ray: Any) -> list[float]:
    return [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]


def run_tasks(
    ray: Any,
    function: Callable[..., Outcome],
    parts: Sequence[Part],
    arguments: Callable[[Part], tuple[Any, ...]],
    *,
    threads: int,
    done: Callable[[Part, Outcome], None],
    look: Callable[[], None],
    call_off: Callable[[], None] | None,
) -> None:
    """Run ``function`` in a task per part. ``done`` is called for each that ended, ``look`` twice a second.

    Raises the error of the first that fails, when the others have ended: they are waited for if ``call_off`` tells them to end. Without it
    they end with the connection, so they must leave nothing.
    """
    task = ray.remote(function).options(num_cpus=threads, max_retries=RETRIES, scheduling_strategy="SPREAD", name="ckpt")
    waiting: dict[Any, Part] = {}
    try:
        with _signals_deferred() as check:
            for part in parts:
                waiting[task.remote(*arguments(part))] = part
            while waiting:
                ended, _ = ray.wait(list(waiting), timeout=LOOK)
                check()
                for reference in ended:
                    part = waiting.pop(reference)
                    done(part, _outcome(ray, reference, part))
                look()
    finally:
        if waiting and call_off is not None:
            call_off()
            _end(ray, list(waiting))


def _end(ray: Any, references: list[Any]) -> None:
    """Wait for tasks that were told to end; `ray.cancel`, for the deaf, can end the driver itself if a task ends at that moment."""
    _, deaf = ray.wait(references, num_returns=len(references), timeout=PATIENCE)
    for reference in deaf:
        ray.cancel(reference, force=True)
    if deaf:
        ray.wait(deaf, num_returns=len(deaf), timeout=PATIENCE)


def _outcome(ray: Any, reference: Any, part: Part) -> Outcome:
    """What a part came to. Raises its error, as ours."""
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
    return outcome


# -- the cluster -----------------------------------------------------------------------------------------------------


def imported() -> Any:
    # Read when Ray is imported.
    with _environment(QUIET):
        try:
            import ray
        except ImportError:
            raise Unsupported("--engine ray needs Ray, which is not installed", hint=install("ray")) from None
    return ray


@contextlib.contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
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
        with contextlib.redirect_stdout(_WithoutRay(sys.stdout)):
            yield
    finally:
        ray.shutdown()


class _WithoutRay:
    """A stream without what Ray's own threads print to it, such as that a worker died."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread().name.startswith("ray_") else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
