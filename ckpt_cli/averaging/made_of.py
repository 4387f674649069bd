"""What the manifests of ckpt's own outputs say of checkpoints that are averaged: which component they are, and of what they were made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.files.manifest import Manifest
from ckpt_cli.names import few, printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import full_name

COMPONENT, AVERAGED = "component", "averaged"
"""Entries of a manifest: what was merged or averaged, and the checkpoints of an average."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint of an average: its name in messages, its component as it was found, and the manifest of an output of ckpt."""

    label: str
    path: Path
    component: str
    made: Manifest | None

    @property
    def holds(self) -> str:
        """Its component, which for an output is the one that it was made from: an EMA that was merged is found as a model."""
        said = self.made.facts.get(COMPONENT) if self.made is not None else None
        return said if isinstance(said, str) else self.component

    @property
    def averaged(self) -> tuple[str, ...]:
        """The paths of the checkpoints that it is an average of."""
        listed = self.made.facts.get(AVERAGED) if self.made is not None else None
        entries = listed if isinstance(listed, list) else []
        return tuple(str(entry["path"]) for entry in entries if isinstance(entry, Mapping) and isinstance(entry.get("path"), str))


def made_notes(origins: Sequence[Origin]) -> list[Note]:
    """Warnings about outputs of ckpt among the checkpoints, as a glob takes them in: another component, or an average of the others."""
    return [*_mixed(origins), *_twice(origins)]


def _mixed(origins: Sequence[Origin]) -> Iterator[Note]:
    of: dict[str, list[str]] = {}
    for origin in origins:
        of.setdefault(origin.holds, []).append(origin.label)
    if len(of) > 1 and len({origin.component for origin in origins}) == 1:
        said = " and ".join(f"{printable(name)} ({few(labels)})" for name, labels in of.items())
        yield Note("warning", "mixed-components", f"different components are averaged, as ckpt-manifest.json of an output says: {said}")


def _twice(origins: Sequence[Origin]) -> Iterator[Note]:
    labels = {full_name(origin.path): origin.label for origin in origins}
    for origin in origins:
        again = [labels[path] for path in origin.averaged if path in labels]
        if again:
            yield Note("warning", "counted-twice", f"{origin.label} is itself an average of {few(again)}, so that these count twice")
