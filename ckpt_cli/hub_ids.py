"""Models of the Hub as people paste them, where the local Hub cache has them, and the command that downloads them.

An ID, with a slash behind it, a revision or a folder; the name of its folder in the cache; the address of a page or a file. Nothing of
that is opened or downloaded here: whoever finds no such path says what else it may be, and what to type.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from ckpt_cli import shell

WEB = re.compile(r"(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/+(?P<rest>[^?#]*)(?:[?#].*)?", re.IGNORECASE | re.DOTALL)
FILES = re.compile(r"hf:/+(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
PART = r"[A-Za-z0-9][\w.-]*"
PLAIN = re.compile(rf"{PART}/{PART}(@[^/@\s]+)?(/(tree|blob|resolve)/.+)?", re.ASCII)
CACHED = re.compile(
    rf"models--((?P<org>{PART}?)--)?(?P<name>{PART})(/snapshots(/(?P<commit>[0-9a-f]{{40}})(/(?P<below>.+))?)?)?/*", re.ASCII
)
COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
PAGES = {
    *("api", "blog", "chat", "collections", "docs", "enterprise", "inference", "join", "learn", "login", "new", "organizations", "papers"),
    *("posts", "pricing", "search", "settings", "tasks", *KINDS),
}
"""First parts of addresses of the Hub that are no models of an owner, nor owners."""

MAIN = "main"


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the Hub (or another ``kind`` of repository), and which revision, folder or file of it is meant."""

    id: str
    revision: str = MAIN
    below: str = ""
    is_file: bool = False
    kind: str = "model"

    @property
    def is_base(self) -> bool:
        """Whether the ID alone says it, as --base takes one."""
        return self.kind == "model" and "/" in self.id and self.revision == MAIN and not self.below

    @property
    def cached(self) -> Path | None:
        """Where the local Hub cache has it, None if it does not."""
        repository = hub_cache() / f"{self.kind}s--{self.id.replace('/', '--')}"
        commit = commit_of(repository, self.revision)
        try:
            there = [name for name in os.listdir(repository / "snapshots") if COMMIT.fullmatch(name)]
            if commit is None and self.revision == MAIN and len(there) == 1:
                commit = there[0]
            place = repository / "snapshots" / (commit or "") / self.below
            is_there = os.path.isfile(place) or bool(os.listdir(place))
        except OSError:
            return None
        return place if commit in there and is_there else None

    def advice(self, *, as_base: bool = False) -> str:
        """How to read it: from the cache if it is there, else after the command that downloads it. A base is a folder, or an ID."""
        if as_base and self.is_file:
            return replace(self, below=self.below.rpartition("/")[0], is_file=False).advice(as_base=True)
        if (cached := self.cached) is not None:
            return f"it is in the Hub cache: pass {self.id if as_base and self.is_base else shell.path(cached)}"
        if as_base and self.is_base:
            return f"download it first: {self._download()}, then pass {self.id}"
        folder = self.id.rpartition("/")[2]
        place = f"{folder}/{self.below}" if self.below else folder
        return f"download it first: {self._download()} --local-dir {folder}, then pass {shell.path(place)}"

    def _download(self) -> str:
        words = ["hf", "download", self.id, *([self.below] if self.is_file else [])]
        words += ["--repo-type", self.kind] if self.kind != "model" else []
        words += ["--revision", self.revision] if self.revision != MAIN else []
        words += ["--include", f"{self.below}/*"] if self.below and not self.is_file else []
        return shell.join(words)


def of_address(text: str) -> HubName | None:
    """The repository that an address of the Hub is about, ``hf://`` too; None for pages that are about none, and other addresses."""
    found = WEB.fullmatch(text)
    is_web = found is not None
    found = found or FILES.fullmatch(text)
    if found is None:
        return None
    parts = [unquote(part) if is_web else part for part in found["rest"].split("/") if part not in ("", ".")]
    kind = KINDS[parts.pop(0)] if parts and parts[0] in KINDS else "model"
    if not parts or ".." in parts or parts[0] in PAGES:
        return None
    # Some old models have no owner.
    count = 1 if is_web and kind == "model" and (len(parts) == 1 or parts[1] in ("tree", "blob", "resolve")) else 2
    return _named(parts, count, kind) if len(parts) >= count else None


def of_path(text: str) -> HubName | None:
    """The model that a path may be meant for which leads nowhere; None for what looks like a path alone."""
    inside = text.removeprefix(f"{hub_cache()}/")
    if (found := CACHED.fullmatch(inside)) is not None:
        return HubName("/".join(filter(None, (found["org"], found["name"]))), found["commit"] or MAIN, found["below"] or "")
    text = text.rstrip("/")
    if ".." in text or os.path.lexists(text.partition("/")[0]):
        return None
    if PLAIN.fullmatch(text):
        return _named(text.split("/"), 2, "model")
    parts = text.split("/")
    if len(parts) == 2 or not all(re.fullmatch(PART, part, re.ASCII) for part in parts[:2]):
        return None
    # Any relative path looks like this: the cache must have it. Some old models have no owner.
    inside_model = HubName("/".join(parts[:2]), below="/".join(parts[2:]))
    return inside_model if inside_model.cached is not None else None


def _named(parts: list[str], count: int, kind: str) -> HubName | None:
    """The repository whose name has so many parts, and what follows it."""
    *owner, name = parts[:count]
    name, _, revision = name.removesuffix(".git").partition("@")
    rest, is_file = parts[count:], False
    if not all(re.fullmatch(PART, part, re.ASCII) for part in (*owner, name)):
        return None
    if rest and rest[0] in ("tree", "blob", "resolve", "raw", "commit") and not revision:
        is_file, (revision, rest) = rest[0] in ("blob", "resolve", "raw"), (rest[1] if len(rest) > 1 else "", rest[2:])
    elif rest and rest[0] in ("discussions", "commits", "settings", "edit", "upload"):
        rest = []
    return HubName("/".join((*owner, name)), revision or MAIN, "/".join(rest), is_file and bool(rest), kind)


def hub_cache() -> Path:
    """The local Hub cache, as huggingface_hub finds it: a variable that is set to nothing counts, and means the current folder."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.join("~", ".cache")), "huggingface")
    home = os.environ.get("HF_HOME", default)
    # The old name of the variable is still read, and goes after the new one.
    given = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(_expanded(home), "hub")))
    return Path(_expanded(given))


def _expanded(path: str) -> str:
    """A path in a variable, in which ~ and other variables may be: nothing expands them in a Dockerfile or a unit file."""
    return os.path.expandvars(os.path.expanduser(path))


def commit_of(repository: Path, revision: str) -> str | None:
    """The commit that a revision of a model in the local Hub cache is: a commit itself, or what a branch or tag points to there."""
    if COMMIT.fullmatch(revision):
        return revision
    if not REVISION.fullmatch(revision) or ".." in revision:
        return None
    reference = repository / "refs" / revision
    try:
        if not reference.is_file():
            return None  # a pipe of this name would never end
        with reference.open("rb") as file:
            commit = file.read(1 << 10).decode("ascii", "replace").strip()
    except OSError:
        return None
    return commit if COMMIT.fullmatch(commit) else None
