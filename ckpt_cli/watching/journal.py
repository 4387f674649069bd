"""``watch.jsonl``: what happened to every step, one JSON object a line. It is also how a watch that is started again knows what is done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ckpt_cli import shell
from ckpt_cli.discover.found import Age, ages
from ckpt_cli.errors import CorruptFile, NotWritable, UsageError
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import read_small
from ckpt_cli.output.staging import sync_folder
from ckpt_cli.results.watch import WatchEvent, WatchOutput
from ckpt_cli.watching.outputs import folders_of, trouble_of
from ckpt_cli.watching.trainings import Written

NAME = "watch.jsonl"
MOST = 1 << 30
"""Bytes. A line takes a few hundred, more only with many metrics."""


@dataclass(slots=True)
class Journal:
    """The journal of one run, and what it says: the last output of every step, whether its command ran, and where it was pushed."""

    path: Path
    made: dict[int, WatchEvent] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    pushed: dict[int, set[tuple[str, str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Journal:
        """The journal in a folder, with the events of watches before. Raises CorruptFile for what no watch has written."""
        journal = cls(folder / NAME)
        for event in _events(journal.path):
            journal._take(event)
        return journal

    def refuse_other(self, run: Path, options: Mapping[str, Any]) -> None:
        """Raise UsageError if the outputs here are those of another run, or were made with other options: steps are told by number."""
        for event in self.made.values():
            hint = "choose another folder with -o"
            if os.path.realpath(event.run) != os.path.realpath(run):
                raise UsageError(f"the outputs here are of {event.run}, not of {run}", path=self.path.parent, hint=hint)
            if event.options is not None and event.options != options:
                said = [f"then: {as_typed(event.options)}", f"now: {as_typed(options)}"]
                raise UsageError("the outputs here were made with other options", path=self.path.parent, details=said, hint=hint)

    def kept(self) -> list[int]:
        """The steps that were made here and not removed by ``--keep``, in the order of their run, as its folders say it."""
        return [step for step in self._ages() if step not in self.removed]

    def written(self) -> Written[int]:
        """When the steps were saved of which outputs were made here, also of those that were removed."""
        saved = {step: event.saved for step, event in self.made.items()}
        return Written(tuple((step, age, time / 1e9) for step, age in self._ages().items() if (time := saved[step]) is not None))

    def _ages(self) -> dict[int, Age]:
        """How new the steps are that were made here, oldest first."""
        folder = {step: Path(event.source) for step, event in self.made.items()}
        age = ages(folder.values())
        of_steps = {step: (age(folder[step])[0], step) for step in folder}
        return dict(sorted(of_steps.items(), key=lambda item: item[1]))

    def newest(self) -> WatchOutput | None:
        """The output of the newest step that was made here and not removed by ``--keep``."""
        kept = self.kept()
        if not kept:
            return None
        step = kept[-1]
        event = self.made[step]
        folders = folders_of(event)
        source = event.source if not event.steps and os.path.exists(event.source) else None
        is_there = all(map(os.path.isdir, folders))
        return WatchOutput(
            run=event.run,
            step=step,
            output=event.output,
            outputs=tuple(map(str, folders)),
            made=event.time,
            is_there=is_there,
            trouble=trouble_of(event) if is_there else None,
            source=source,
        )

    def add(self, event: WatchEvent) -> None:
        """Append an event, durably. A line that was cut off by a kill is ended first. Raises NotWritable."""
        content = {name: value for name, value in event.model_dump(mode="json").items() if value not in (None, "", [])}
        line = (json.dumps(content, ensure_ascii=False) + "\n").encode()
        try:
            new = not self.path.exists()
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o666)
            try:
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":
                    line = b"\n" + line
                done = 0
                while done < len(line):
                    done += os.write(fd, line[done:])
                os.fsync(fd)
            finally:
                os.close(fd)
            if new:
                sync_folder(self.path.parent)
        except OSError as error:
            raise NotWritable(f"the journal cannot be written: {error.strerror}", path=self.path) from error
        self._take(event)

    def _take(self, event: WatchEvent) -> None:
        if event.event == "made":
            self.made[event.step] = event
            self.ran.discard(event.step)
            self.removed.discard(event.step)
            self.pushed.pop(event.step, None)
        elif event.event == "ran":
            self.ran.add(event.step)
        elif event.event == "pushed" and event.push is not None and not event.exit_code:
            self.pushed.setdefault(event.step, set()).add((event.push.asked, event.push.branch))
        elif event.event == "removed":
            self.removed.add(event.step)


def as_typed(options: Mapping[str, Any]) -> str:
    """Options that decide what is written, as they are typed; rules of names in words, since a file may hold them."""
    words: list[str] = []
    for name, value in sorted(options.items()):
        option = f"--{name.replace('_', '-')}"
        if name == "key_map":
            words.append(f"{option} ({', '.join(f'{old} -> {new}' if new is not None else f'{old} left out' for old, new in value)})")
        elif isinstance(value, Mapping):
            words.append(f"{option} {','.join(f'{key}={each}'.replace('_', '-') for key, each in value.items())}")
        else:
            words += [f"{option} {shell.word(str(each))}" for each in (value if isinstance(value, list) else [value])]
    return " ".join(words) or "none that changes what is written"


def _events(path: Path) -> Iterator[WatchEvent]:
    if not is_file(path):
        return
    lines = read_small(path, MOST).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield WatchEvent.model_validate_json(line)
        except ValidationError as error:
            # Only the end of a line that a kill or a full disk cut off may be anything.
            is_cut = not line.rstrip().endswith(b"}") or "EOF while parsing" in error.errors()[0]["msg"]
            if number == len(lines) or is_cut:
                continue
            hint = "move it away to begin anew"
            raise CorruptFile(f"line {number} was not written by ckpt watch", path=path, hint=hint) from None
