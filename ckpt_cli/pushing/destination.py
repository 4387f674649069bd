"""Where an output is pushed to: a repository of the Hub and a branch of it, both checked before anything is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_cli import shell
from ckpt_cli.errors import PushFailed, Unsupported, UsageError, install
from ckpt_cli.files.remote.failures import ALLOW_NETWORK

MAIN = "main"
PLACEHOLDERS = ("step", "run")
ADDRESS = re.compile(r"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/|hf://)(?:models/)?([\w.-]+/[\w.-]+?)/?", re.ASCII | re.IGNORECASE)
NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?", re.ASCII)
"""A namespace, or the name of a repository: what huggingface_hub accepts."""

BRANCH = re.compile(r"(?!refs/)[A-Za-z0-9_](?:[\w./-]*[\w-])?", re.ASCII)
"""A part of what git accepts for a branch (git check-ref-format)."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A repository, whether it must be private, and a branch, which may have placeholders until `of_step`."""

    repo: str
    private: bool = False
    branch: str = MAIN

    @classmethod
    def of(cls, options: Any) -> Destination | None:
        """What ``push_to_hub``, ``private`` and ``branch`` of a command's options say; None if nothing is to be pushed.

        Raises UsageError for IDs and branches that cannot be, Unsupported without huggingface_hub, PushFailed without a token.
        """
        if options.push_to_hub is None:
            for name in ("private", "branch"):
                if getattr(options, name):
                    raise UsageError(f"--{name} is for --push-to-hub", hint="pass --push-to-hub with the repository as well")
            return None
        _check_repo(options.push_to_hub)
        unknown = [found for found in re.findall(r"\{([^{}]*)\}", options.branch or "") if found not in PLACEHOLDERS]
        if unknown:
            raise UsageError(f"--branch has an unknown placeholder {{{unknown[0]}}}", expected="{step} or {run}")
        destination = cls(options.push_to_hub, options.private, options.branch or MAIN)
        destination.of_step(1, "run")
        check_ready()
        return destination

    def of_step(self, step: int | None, run: str) -> Destination:
        """With the placeholders of the branch replaced. Raises UsageError for a name that git does not take."""
        if step is None and "{step}" in self.branch:
            hint = "write the branch without {step}"
            raise UsageError("--branch has {step}, but nothing says which step this is", hint=hint)
        values = {"step": str(step), "run": run}
        branch = re.sub(r"\{(step|run)\}", lambda found: values[found[1]], self.branch)
        wrong = any(part in branch for part in ("..", "//", "/.", "./")) or branch.endswith(".lock") or len(branch) > 200
        if wrong or not BRANCH.fullmatch(branch):
            raise UsageError(
                f"--branch: no branch can be called {branch!r}", expected="a name such as step100, of letters, digits, . _ - and /"
            )
        return replace(self, branch=branch)

    def again(self, folder: Path) -> str:
        """The command that pushes an output that is there."""
        words = ["--push-to-hub", self.repo]
        words += ["--private"] if self.private else []
        words += ["--branch", self.branch] if self.branch != MAIN else []
        return f"ckpt publish {shell.path(folder)} {shell.join(words)}"


def refuse_several(destination: Destination | None, outputs: Sequence[Path]) -> None:
    """Raise UsageError if several folders should go to one repository: one would overwrite the other."""
    if destination is not None and len(outputs) > 1:
        listed = ", ".join(path.name for path in outputs)
        hint = "choose one with --type, or push each with `ckpt publish OUTPUT --push-to-hub REPO`"
        raise UsageError(f"--push-to-hub takes one folder, and this writes {len(outputs)}: {listed}", hint=hint)


def check_ready() -> None:
    """Raise Unsupported without huggingface_hub, PushFailed if it is offline by choice or has no token. Nothing is asked of the Hub."""
    hub = imported()
    if hub.constants.HF_HUB_OFFLINE:
        raise PushFailed("nothing can be pushed while HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set", hint=ALLOW_NETWORK)
    try:
        token = hub.get_token()
    except Exception as error:  # a token that is exchanged for another one (OIDC) needs the network
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise PushFailed("there is no token for the Hub", details=[said]) from error
    if not token:
        hint = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"
        raise PushFailed("there is no token for the Hub", expected="HF_TOKEN, or a token that was saved by logging in", hint=hint)


def imported() -> Any:
    """huggingface_hub, with the modules that are used here. Raises Unsupported without it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise Unsupported("--push-to-hub needs huggingface_hub, which is not installed", hint=install("hub")) from None
    return huggingface_hub


def _check_repo(repo: str) -> None:
    parts = repo.split("/")
    valid = len(parts) <= 2 and all(NAME.fullmatch(part) for part in parts)
    if valid and ".." not in repo and "--" not in repo and not repo.endswith((".git", ".ipynb")):
        return
    address = ADDRESS.fullmatch(repo)
    hint = f"did you mean {address[1]}?" if address is not None else "write it as user/name, or organization/name"
    # Not repeated: an address may have a password in it.
    raise UsageError(
        "--push-to-hub takes the ID of a repository of the Hub",
        expected="an ID such as me/model",
        hint=hint,
    )
