"""Asking transformers about a config, in a child process: it imports torch, which takes seconds and 300 MB. Answers are kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt_cli.hub.classes.installed.package import state_of_transformers
from ckpt_cli.hub.config import Config, architecture, huge_number
from ckpt_cli.names import printable
from ckpt_cli.paths import current_folder
from ckpt_cli.progress import shown

if TYPE_CHECKING:
    import subprocess

TIMEOUT = 300
"""Seconds for a child process that imports torch and transformers and builds a model without weights."""

OFTEN = 0.1
"""Seconds between two looks at the child."""

NO_TORCH = "torch is not installed"
"""Why transformers has no answer where ckpt is installed without what it does not need: no fault of this machine."""

Question = Literal["rules", "tensors", "numbers"]


def installed_version() -> str | None:
    """The version of transformers, without importing it; None if it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def asked_child(question: Question, config: Config, schema: int) -> dict[str, Any] | None:
    """What `ckpt_cli.hub.classes.compile` answers to a question about a config, from the user's cache if it was asked before.

    ``schema`` counts the forms that the answer has had. {"error": ...} if transformers cannot build the model; {"unasked": ...} with the
    reason if this machine has no answer; None if transformers is not installed, or if the config asks for an impossibly large model.
    """
    version = installed_version()
    if version is None or huge_number(config) is not None:
        return None
    state = state_of_transformers(_import_path())
    return _asked(question, json.dumps(config, sort_keys=True), f"{schema}-{version}-{state}", cache_home() if state is not None else None)


@lru_cache(maxsize=64)
def _asked(question: Question, text: str, form: str, home: Path | None) -> dict[str, Any] | None:
    """An answer from the user's cache, or else of a child; asked once in this process, also where no cache can be written.

    ``form`` is the form of answers, and the version of transformers and the state of its modules.
    """
    name = f"{form}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    kept = home / f"hub_{question}" / name if home is not None else None
    try:
        content = json.loads(kept.read_text()) if kept is not None else None
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        content = _run_child(question, text)
        if kept is not None and content is not None and "unasked" not in content:
            _keep(kept, content)
    return content


def cache_home() -> Path | None:
    """The user's cache folder of ckpt, None for a user without a home. A relative one is ignored, as the XDG specification asks."""
    given = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", ""))
    home = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"))
    return home / "ckpt" if home.is_absolute() else None


def _import_path() -> list[str]:
    """Where the child finds packages.

    Nothing is imported from the folder that the user is in: it may be the one that is checked, with a ``torch.py`` in it.
    """
    here = str(current_folder() or "")
    package = str(Path(os.path.realpath(__file__)).parents[3])
    return [package, *(entry for entry in sys.path if entry and os.path.realpath(entry) not in (here, package))]


def _run_child(question: Question, text: str) -> dict[str, Any] | None:
    """The answer, {"error": ...} if transformers has none, or {"unasked": ...} if it could not be asked (which is not kept)."""
    import subprocess
    import tempfile

    what = f"asking transformers for {printable(architecture(json.loads(text)) or 'the class')[:100]}"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(_import_path()), "CKPT_PARENT": str(os.getpid())}
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(text)
            command: Sequence[str] = [sys.executable, "-m", "ckpt_cli.hub.classes.compile", f"--{question}", str(path)]
            # torch makes folders for compiled code in the temporary folder: here they go away with it.
            environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=folder
            ) as child:
                said = _waited_for(child, what)
            content = json.loads(said.splitlines()[-1]) if child.returncode == 0 and said else None
    except subprocess.TimeoutExpired:
        return {"unasked": f"it gave no answer in {TIMEOUT} s"}
    except (OSError, ValueError) as error:
        return {"unasked": f"its process failed: {printable(str(error))[:160]}"}
    return content if isinstance(content, dict) else {"unasked": _why_ended(child.returncode)}


def _why_ended(code: int) -> str:
    """Why a process ended without an answer; systems that lack memory kill it, or let it fail at any place."""
    import signal

    if code == -signal.SIGKILL:
        return "its process was killed, as systems do that run out of memory"
    return "its process failed, as it does where memory is short or transformers cannot be imported"


def _waited_for(child: subprocess.Popen[str], what: str) -> str:
    """What a child says until it ends, told to the display meanwhile. It is killed after a time, or if this process is interrupted."""
    import subprocess

    end = time.monotonic() + TIMEOUT
    try:
        while True:
            try:
                return child.communicate(timeout=OFTEN)[0]
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    raise
                shown().waiting(what)
    except BaseException:
        child.kill()
        raise


def _keep(path: Path, content: Mapping[str, Any]) -> None:
    """Write a cache file completely or not at all, also for a config without an answer; an unwritable cache is ignored."""
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                json.dump(content, file)
                os.replace(file.name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError:
        pass
