"""The options of `watch`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ckpt_cli.errors import UsageError
from ckpt_cli.given import DtypeLike, PathLike, options_of
from ckpt_cli.names import Naming

if TYPE_CHECKING:
    from ckpt_cli.pushing.destination import Destination

AVERAGED_BY = ("last", "method", "decay", "half_life", "decay_shape")
"""What ``--average`` may say: options of `average` that mean something for the newest steps of a run."""

WRITTEN = (
    "dtype",
    "cast_all",
    "names",
    "key_map",
    "include",
    "exclude",
    "max_shard_size",
    "carry_from_base",
    "allow_missing",
    "jobs",
    "strict",
)
"""Options that are handed to `merge` and `average` as they are."""

PASSING = ("jobs", "strict")
"""Those of them that do not change what is written."""

MANY_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The options of `watch`, with the meaning that ``ckpt watch --help`` gives them.

    ``average`` is what ``--average`` says ("last=5"), None to merge; ``execute`` is a command for the shell. ``interval`` and ``settle``
    are seconds.
    """

    dtype: str | None = None
    cast_all: bool = False
    average: str | None = None
    execute: str | None = None
    every: int | None = None
    since: int | None = None
    keep: int | None = None
    once: bool = False
    interval: float = 30.0
    settle: float = 60.0
    names: Naming = "hub"
    key_map: tuple[PathLike, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_shard_size: int | None = None
    carry_from_base: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    verify: bool = False
    jobs: int | None = None
    strict: bool = False
    push_to_hub: str | None = None
    private: bool = False
    branch: str | None = None

    @property
    def averaging(self) -> Mapping[str, Any] | None:
        """The options of `average` that ``--average`` says, ``last`` always among them; None to merge. Raises UsageError."""
        from ckpt_cli.averaging.options import AverageOptions

        if self.average is None:
            return None
        said: dict[str, Any] = {}
        for part in self.average.split(","):
            name, _, value = part.strip().replace("-", "_").partition("=")
            name, value = ("last", name) if not value and name.isdecimal() else (name, value)
            if name not in AVERAGED_BY or not value:
                known = ", ".join(known.replace("_", "-") for known in AVERAGED_BY)
                raise UsageError(f"--average does not understand {part.strip()!r}", expected=f"last=5, or more of {known}")
            said[name] = _number(value)
        last = said.get("last")
        if not isinstance(last, int) or last < 2:
            raise UsageError("--average does not say how many steps", expected="last=5, or another number from 2 on")
        options_of(AverageOptions, said)
        return said

    @property
    def handed_on(self) -> dict[str, Any]:
        """The options for `merge` and `average`."""
        return {name: getattr(self, name) for name in WRITTEN}

    def deciding(self, component: str | None, base: Path | None) -> dict[str, Any]:
        """What decides the content of the outputs, as far as it was given: a folder of outputs has one set of it. Fit for JSON."""
        from ckpt_cli.output.key_map import read_key_map

        usual = {field.name: field.default for field in fields(self)}
        said = {name: value for name, value in self.handed_on.items() if name not in PASSING and value != usual[name]}
        more = {"type": component, "base": str(base) if base is not None else None, "average": self.averaging}
        said |= {name: value for name, value in more.items() if value is not None}
        if self.key_map:
            said["key_map"] = [[rule.match.pattern, rule.to] for rule in read_key_map(self.key_map)]
        return dict(json.loads(json.dumps(said)))

    def destination(self, runs: Sequence[str]) -> Destination | None:
        """Where the outputs of these runs, by their names, are pushed to; None for nowhere. Raises what `Destination.of` raises."""
        from ckpt_cli.pushing.destination import Destination

        to = Destination.of(self)
        if to is not None and len({to.of_step(0, run).branch for run in runs}) < len(runs):
            raise UsageError("several runs would be pushed to one branch", hint="pass --branch '{run}', or '{run}-step{step}'")
        return to

    def check(self, base: object) -> None:
        """Raise UsageError for options that are out of range, that contradict each other, or that need a base."""
        from ckpt_cli.merging.options import MergeOptions

        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} is out of range", expected="1 or more")
        for name in ("interval", "settle"):
            if not 0 <= getattr(self, name) <= MANY_SECONDS:
                raise UsageError(f"--{name} is out of range", expected=f"0 to {MANY_SECONDS} seconds")
        if self.averaging is not None and self.verify:
            raise UsageError("--verify compares with one step, so --average does not apply", hint="leave out --verify")
        options_of(MergeOptions, self.handed_on).check_with(base, None)


class WatchKeywords(TypedDict, total=False):
    """The keyword arguments of `watch` besides paths: `WatchOptions` as callers may give them."""

    dtype: DtypeLike | None
    cast_all: bool
    average: str | None
    execute: str | None
    every: int | None
    since: int | None
    keep: int | None
    once: bool
    interval: float
    settle: float
    names: Naming
    key_map: PathLike | Sequence[PathLike]
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    max_shard_size: int | str | None
    carry_from_base: str | Sequence[str]
    allow_missing: str | Sequence[str]
    verify: bool
    jobs: int | None
    strict: bool
    push_to_hub: str | None
    private: bool
    branch: str | None


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
