"""`python -m tests.cli_forks SOCKET [MODULE...]`: runs command lines in forks of one process, which has loaded what every command loads.

A request is one message: what to run, with the ends of two pipes for its stdout and stderr. The answer is the exit code.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pkgutil
import runpy
import socket
import sys
import threading
from typing import Any

from tests.transformers_forks import asked_in_forks


def preload(*more: str) -> None:
    """All of ckpt and what its commands import, with a BLAS that starts no threads, as `ckpt_cli.cli.main` has it."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import encodings.utf_8_sig  # noqa: F401
    import importlib.metadata

    import ml_dtypes  # noqa: F401
    import numpy  # noqa: F401
    import rich.console
    import rich.table  # noqa: F401
    import typer._adapters
    import typer._click.decorators  # noqa: F401

    import ckpt_cli
    from ckpt_cli.cli.app import root_command

    importlib.metadata.version("numpy")
    for module in pkgutil.walk_packages(ckpt_cli.__path__, "ckpt_cli."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    for name in ckpt_cli.__all__:
        getattr(ckpt_cli, name)
    tuple(root_command().commands.values())
    # What ckpt ships and reads once per process.
    from ckpt_cli.formats import step_names
    from ckpt_cli.hub.classes import known_names, rules
    from ckpt_cli.hub.entries import harmless
    from ckpt_cli.hub.loaded_with import needs, read_by_class

    for read in (known_names._shipped, rules._shipped, needs._needs, read_by_class._read, harmless._expression, step_names._like_step):
        read()
    for name in more:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def become(request: dict[str, Any], streams: list[int]) -> None:
    """This fork is now as a process that ``python -m ckpt_cli`` starts in that folder, with that environment."""
    from ckpt_cli.hub.classes import transformers_child

    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    transformers_child._run_child = asked_in_forks(transformers_child._run_child)
    sys.argv = ["ckpt", *request["arguments"]]


def at_once(ended: SystemExit) -> None:
    """End as the interpreter does, but for taking all modules apart: that touches all of their memory, which this fork shares until then.

    Only with a number for an exit code, and streams that take what is left for them.
    """
    if not isinstance(ended.code, int):
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(ended.code & 0xFF)


def serve(link: socket.socket) -> None:
    """Until the other end closes; a fork comes out of here with its own end of the program ahead."""
    while True:
        message, streams, _, _ = socket.recv_fds(link, 1 << 20, 2)
        if not message:
            return
        child = os.fork()
        if not child:
            link.close()
            become(json.loads(message), streams)
            try:
                runpy.run_module("ckpt_cli", run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                at_once(ended)
                raise
            return
        for stream in streams:
            os.close(stream)
        link.send(json.dumps(child).encode())
        _, status = os.waitpid(child, 0)
        link.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    preload(*sys.argv[2:])
    serve(socket.socket(fileno=int(sys.argv[1])))
