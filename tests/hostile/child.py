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


def run(folder: str, commands: list[list[str]], results: list[Path], told: int) -> None:
    """In a fork: never returns. What became of each command is a line of JSON in the pipe ``told``."""
    from ckpt_cli.cli import main

    events: list[str] = []
    files = [[os.open(place / name, os.O_CREAT | os.O_WRONLY, 0o600) for name in ("stdout", "stderr", "events")] for place in results]
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    watch(folder, events)
    seconds = 0.0
    for arguments, (out, err, noted) in zip(commands, files, strict=True):
        os.dup2(out, 1)
        os.dup2(err, 2)
        signal.alarm(6 * SECONDS)
        events.clear()
        code = 99
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 98
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(noted, json.dumps(events).encode())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        before, seconds = seconds, usage.ru_utime + usage.ru_stime
        os.write(told, (json.dumps({"code": code, "seconds": seconds - before, "peak": usage.ru_maxrss << 10}) + "\n").encode())
    os._exit(0)


def outcomes(folder: str, commands: list[list[str]], results: list[Path]) -> list[dict[str, Any]]:
    """Of the commands on one folder, in one fork, whose pages are copied once; of one that ends it, and of none after that."""
    for place in results:
        place.mkdir(exist_ok=True)
    reading, told = os.pipe()
    child = os.fork()
    if not child:
        run(folder, commands, results, told)
    os.close(told)
    with open(reading) as lines:
        found = [json.loads(line) for line in lines]
    _, status, usage = os.wait4(child, 0)
    if len(found) < len(commands):
        seconds = usage.ru_utime + usage.ru_stime - sum(each["seconds"] for each in found)
        found.append({"code": os.waitstatus_to_exitcode(status), "seconds": seconds, "peak": usage.ru_maxrss << 10})
    return found


def ready() -> None:
    """All modules are loaded, once for all forks, and transformers is not installed: it would be asked about every config, in a child."""
    from ckpt_cli.hub.classes import transformers_child
    from tests.cli_forks import preload

    transformers_child.installed_version = lambda: None
    preload()


if __name__ == "__main__":
    ready()
    lines, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    found: list[dict[str, Any]] = []
    while (begun := len(found)) < len(lines):
        folder = lines[begun][0]
        end = next((number for number in range(begun, len(lines)) if lines[number][0] != folder), len(lines))
        found += outcomes(folder, [arguments for _, arguments in lines[begun:end]], [target / str(number) for number in range(begun, end)])
    print(json.dumps(found))
