"""Whether adapters meet the model that they were trained on: one that holds them already, or one of another name, is none."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from ckpt_cli import shell
from ckpt_cli.base_model.opened import Base
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.errors import CkptError, Inconsistent
from ckpt_cli.files.folders import is_folder, is_there, status_of
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import Manifest
from ckpt_cli.hub.assets import resolve_base
from ckpt_cli.hub.config import Config
from ckpt_cli.hub_ids import commit_of
from ckpt_cli.lora.config import CONFIG, adapter_facts
from ckpt_cli.lora.merge import adapters_alone
from ckpt_cli.names import printable
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.urls import full_name

NAME_OR_PATH = "base_model_name_or_path"
MAX_NAME = 4096
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
SIZED = re.compile(r"(?<![a-z0-9])[0-9]+([.][0-9]+)?[bm](?![a-z0-9])")
"""The number of parameters, which names of models have and those of other folders have not."""

CACHED = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")
SNAPSHOT = re.compile(r"(?P<repository>(?:.*/)?models--(?P<owner>[^/]+?)--(?P<name>[^/]+))/snapshots/(?P<commit>[0-9a-f]{40})/*")
QUANTISED = re.compile(r"([-_](unsloth|bnb|nf4|4bit|8bit|int4|int8|gptq|awq|fp8|hf|dynamic))+$")
"""Endings of the names of one model in other forms: adapters are trained on a quantised one and fused into the original."""


def fused_before(base: Base, digest: str, adapter: Component) -> None:
    """Raise Inconsistent if the manifest of a base says that this very adapter (`adapter_digest`) is in it."""
    manifest = base.manifest
    if manifest is None or not (digest in manifest.fused_adapters or _was_read(manifest, adapter)):
        return
    source = manifest.facts.get("base")
    there = isinstance(source, str) and is_there(source)
    raise Inconsistent(
        "the base already holds this adapter: a second time would double it",
        path=base.folder / MANIFEST,
        expected="the model that the adapter was trained on",
        hint=f"pass --base {source}" if there else None,
    )


def trained_on_notes(config: Config, base: Base) -> list[Note]:
    """A warning about an adapter whose config names another model than the base, where the names of both say which they are.

    The base is known by its folder, its place in the Hub cache and the ``_name_or_path`` in its config: one of these is enough.
    """
    named = config.get(NAME_OR_PATH)
    if not isinstance(named, str) or not named or len(named) > MAX_NAME:
        return []
    there = _folder_at(named)
    here = status_of(base.folder)
    if there is not None and here is not None and os.path.samestat(there, here):
        return []
    known = list(_names(base))
    if _short(_model_of(named)) in map(_short, known):
        return _revision_notes(named, config.get("revision"), base)
    telling = [name for name in known if HUB_ID.fullmatch(name) or SIZED.search(_short(name))]
    if there is None and not (telling and (HUB_ID.fullmatch(named) or SIZED.search(_short(named)))):
        return []
    given = printable((telling or [str(base.folder)])[0])
    text = f"{CONFIG} says that the adapter was trained on {printable(named)}, but the base is {given}"
    return [Note("warning", "other-base", text)]


class Holding(Protocol):
    """What was opened: one checkpoint, or several of which the newest tells what is in it."""

    @property
    def components(self) -> Sequence[OpenedComponent]:
        """The components of the newest."""


Held = TypeVar("Held", bound=Holding)


def opened_on_base(given: str | None, opening: Callable[[Path | None], Held]) -> tuple[Held, Path | None]:
    """What ``opening`` opens with the folder of a base, and that folder: every command that takes a base finds it here.

    ``given`` is a path or a Hub ID as the user gave it. Of an ID the Hub cache may have several snapshots: the one that the adapters
    record is taken before that of ``refs/main``. Raises NotFound for a base that is not there, and what ``opening`` raises.
    """
    if given is None:
        return opening(None), None
    folder = resolve_base(given)
    opened = opening(folder)
    trained = _trained_snapshot(given, folder, opened.components)
    return (opened, folder) if trained == folder else (opening(trained), trained)


def recorded_snapshot(given: str, folder: Path, manifest: Manifest | None) -> Path:
    """The ``folder`` of a base, or, of one ``given`` as a Hub ID, the snapshot that an output was made with, where it is in the cache."""
    said = manifest.facts.get("base") if manifest is not None else None
    made_with = SNAPSHOT.fullmatch(said) if isinstance(said, str) and len(said) <= MAX_NAME else None
    if made_with is None or _model_of(str(said)) != given:
        return folder
    return _snapshot(given, folder, made_with["commit"])


def recorded_base(config: Config) -> Path | None:
    """The folder of the model that an adapter's config names, where it is on this machine or in the Hub cache; None where it is not."""
    named = config.get(NAME_OR_PATH)
    if not isinstance(named, str) or not 0 < len(named) <= MAX_NAME:
        return None
    try:
        folder = resolve_base(named)
    except (CkptError, ValueError):
        return None
    revision = _revision(named, config.get("revision"))
    return folder if revision is None else _snapshot(named, folder, revision)


def _trained_snapshot(given: str, folder: Path, components: Sequence[OpenedComponent]) -> Path:
    """The ``folder`` of a base, or, of one ``given`` as a Hub ID, the snapshot that adapters alone record, where it is in the cache."""
    for component in components:
        if not adapters_alone(component.component.tensors):
            continue
        config = adapter_facts(component.homes, None).config
        named = config.get(NAME_OR_PATH)
        revision = _revision(named, config.get("revision"))
        if isinstance(named, str) and revision is not None and len(named) <= MAX_NAME and _model_of(named) == given:
            return _snapshot(given, folder, revision)
    return folder


def _snapshot(given: str, folder: Path, revision: str) -> Path:
    """The snapshot of a revision beside the ``folder`` of a base; that folder where it is none of the Hub cache, or has no such one."""
    if is_folder(given) or SNAPSHOT.fullmatch(os.path.realpath(folder)) is None:
        return folder
    commit = commit_of(folder.parents[1], revision)
    return folder.with_name(commit) if commit is not None and is_folder(folder.with_name(commit)) else folder


def _revision(named: object, revision: object) -> str | None:
    """The revision that an adapter records, in the path of a snapshot or by itself; None for none."""
    there = SNAPSHOT.fullmatch(named) if isinstance(named, str) and len(named) <= MAX_NAME else None
    if there is not None:
        return there["commit"]
    return revision if isinstance(revision, str) and 0 < len(revision) <= MAX_NAME else None


def _revision_notes(named: str, revision: object, base: Base) -> list[Note]:
    """A warning about a base that is another revision of the model than the one that an adapter was trained on."""
    here, revision = SNAPSHOT.fullmatch(os.path.realpath(base.folder)), _revision(named, revision)
    if here is None or revision is None:
        return []
    repository = Path(here["repository"])
    wanted = commit_of(repository, revision)
    if wanted == here["commit"] or (wanted is None and revision == "main"):
        return []
    model = f"{here['owner']}/{here['name']}"
    text = f"{CONFIG} says that the adapter was trained on revision {printable(revision)} of {model}, but the base is {here['commit']}"
    snapshot = repository / "snapshots" / (wanted or "")
    cure = f"pass --base {shell.path(snapshot)}" if wanted is not None and is_there(snapshot) else "that revision is not in the Hub cache"
    return [Note("warning", "other-base", f"{text}: {cure}")]


def _model_of(named: str) -> str:
    """The Hub ID of a snapshot's path, or the name as it is."""
    found = SNAPSHOT.fullmatch(named)
    return f"{found['owner']}/{found['name']}" if found is not None else named


def _names(base: Base) -> Iterator[str]:
    cached = next((found for part in os.path.realpath(base.folder).split(os.sep) if (found := CACHED.fullmatch(part))), None)
    if cached is not None:
        yield f"{cached['owner']}/{cached['name']}"
    said = base.config.get("_name_or_path")
    if isinstance(said, str) and said:
        yield said
    if cached is None:
        yield base.folder.name


def _short(name: str) -> str:
    """The last part of a name or path, without what says in which form the weights are."""
    return QUANTISED.sub("", name.rstrip("/").rpartition("/")[2].lower())


def _folder_at(named: str) -> os.stat_result | None:
    """The folder at an absolute path that a file names; None for anything else, also for text that is no path."""
    try:
        status = status_of(named) if os.path.isabs(named) else None
    except (CkptError, ValueError):
        return None
    return status if status is not None and stat.S_ISDIR(status.st_mode) else None


def _was_read(manifest: Manifest, adapter: Component) -> bool:
    """Whether the manifest of a merge before these checksums lists a file of the adapter as a source, unchanged since."""
    listed = manifest.facts.get("sources")
    if manifest.options.get("lora") in ("keep", "export") or not isinstance(listed, list):
        return False
    read = {(entry.get("path"), entry.get("size"), entry.get("mtime_ns")) for entry in listed if isinstance(entry, Mapping)}
    weights = [path for path in adapter.files if path.suffix != ".json"]
    found = {path: status for path in weights if (status := status_of(path)) is not None}
    return any(s.st_mtime_ns and (full_name(path), s.st_size, s.st_mtime_ns) in read for path, s in found.items())
