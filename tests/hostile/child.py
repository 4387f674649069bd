"""Runs command lines in forks of one process, under limits and watched by an audit hook: `python -m tests.hostile.child SPEC RESULTS`.

SPEC is JSON: a list of [folder, arguments]; each runs in its folder, into ``stdout``, ``stderr`` and ``events`` of RESULTS/<number>.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

MEMORY, FILE_SIZE, SECONDS = 1 << 30, 64 << 20, 20
"""Bytes of memory and of any file, and seconds of CPU; one that waits for something has six times as long."""
FORBIDDEN = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "socket",
    "shutil",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def watch(folder: str, events: list[str]) -> None:
    """Write down what no command may do: start something, connect, unpickle, write anywhere but beside the output."""
    allowed = os.path.realpath(os.path.join(folder, "writes")) + os.sep

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "shutil.rmtree":
            noted(event, os.path.realpath(args[0]))
        elif event.startswith(FORBIDDEN):
            events.append(event)
        elif event == "open" and isinstance(args[2], int) and args[2] & WRITING:
            path = os.path.realpath(os.fsdecode(args[0])) if isinstance(args[0], (str, bytes)) else "a descriptor"
            if not path.startswith((allowed, "/dev/null")) and path != "a descriptor":
                events.append(f"open {path}")
        elif event in ("os.remove", "os.rmdir") and args[1] >= 0:
            # In a folder that is open already, as rmtree does.
            noted(event, os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), os.fsdecode(args[0])))
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.rename", "os.truncate"):
            for each in args[:2]:
                if isinstance(each, (str, bytes)):
                    noted(event, os.path.realpath(os.fsdecode(each)))

    def noted(event: str, path: str) -> None:
        if not path.startswith(allowed) and path + os.sep != allowed:
            events.append(f"{event} {path}")

    sys.addaudithook(hook)


def run(folder: str, arguments: list[str], results: Path) -> None:
    """In a fork: never returns."""
    from ckpt_cli.cli import main

    events: list[str] = []
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(results / name, os.O_CREAT | os.O_WRONLY, 0o600), number)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    signal.alarm(6 * SECONDS)
    watch(folder, events)
    code = 99
    try:
        main(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 98
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(3, json.dumps(events).encode())
    os._exit(code)


def outcome(folder: str, arguments: list[str], results: Path) -> dict[str, Any]:
    results.mkdir()
    child = os.fork()
    if not child:
        os.dup2(os.open(results / "events", os.O_CREAT | os.O_WRONLY, 0o600), 3)
        run(folder, arguments, results)
    _, status, usage = os.wait4(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "seconds": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss << 10}


def ready() -> None:
    """All modules are loaded, once for all forks, and transformers is not installed: it would be asked about every config, in a child."""
    from ckpt_cli.hub.classes import transformers_child
    from tests.cli_forks import preload

    transformers_child.installed_version = lambda: None
    preload()


if __name__ == "__main__":
    ready()
    lines, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    print(json.dumps([outcome(folder, arguments, target / str(number)) for number, (folder, arguments) in enumerate(lines)]))
