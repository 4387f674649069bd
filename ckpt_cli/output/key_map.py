r"""``--key-map``: rules that rename tensors, for trainers whose names are not Hugging Face names.

A rule on the command line is ``A=B``: names that begin with ``A`` begin with ``B`` instead. Both are whole parts of names, between
dots: ``net=`` takes "net." off, ``=model`` puts "model." in front. Anything else is a JSON or TOML file with ``rules``, a list of
objects with ``match`` (a regular expression for the whole name) and ``to`` (the new name, with ``\1`` or ``\g<name>`` for groups),
or simply an object that maps old names to new ones; ``"to": null`` (or ``"drop": true``) leaves the tensor out. The first rule of
all that matches a name wins.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Inconsistent, NotFound, UsageError, reading
from ckpt_cli.files.folders import is_there
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.files.streams.pipes import is_descriptor, piped
from ckpt_cli.names import check_name, printable
from ckpt_cli.paths import absolute

MAX_PATTERN = 1000
MAX_SMALL = 64 << 20
FROM_A_PIPE = "<pipe>"
"""How rules that came through a pipe are recorded: its path leads elsewhere, or nowhere, in another process."""

FILES = (".json", ".toml")
INLINE = "net= takes net. off the names, A=B renames what begins with A"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; ``to`` is None where the tensor is left out, ``wanted`` says in words which names it is for."""

    match: re.Pattern[str]
    to: str | None
    wanted: str


def read_key_map(given: Sequence[str | os.PathLike[str]]) -> tuple[Rule, ...]:
    """The rules of several files and texts ``A=B``, in their order. Raises UsageError that says which rule is invalid, and NotFound."""
    return tuple(rule for text in map(str, given) for rule in ([_inline(text)] if _is_inline(text) else _of_file(Path(text))))


def lasting_key_map(given: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The same rules for whoever reads them in another folder: files by their absolute path. A pipe is gone then."""
    return [each if _is_inline(each) else FROM_A_PIPE if is_descriptor(each) else absolute(each) for each in map(str, given)]


def _is_inline(text: str) -> bool:
    """Told from the text alone, so that it means the same wherever it is read: no tensor has a name with a slash."""
    return "=" in text and "/" not in text and not text.endswith(FILES)


def _inline(text: str) -> Rule:
    old, _, new = (part.removesuffix(".") for part in text.partition("="))
    if text.count("=") > 1 or old == new or len(text) > MAX_PATTERN or re.search(r"[\s,*]", text) or not text.isprintable():
        expected = "A=B, whole parts of names, one rule in each --key-map"
        raise UsageError(f"{printable(text)} is no rule for names", expected=expected, hint=f"{INLINE}; a file holds other rules")
    # With B, a tensor may be called A itself; without, only what comes after A is a name.
    pattern = (rf"{re.escape(old)}(\..+)?" if new else rf"{re.escape(old)}\.(.+)") if old else "(.+)"
    target = _literal(new) + (r"\1" if old else r".\1") if new else r"\1"
    return Rule(re.compile(pattern, re.DOTALL), target, f"begins with {printable(old)}.")


def _of_file(path: Path) -> tuple[Rule, ...]:
    if str(path) == FROM_A_PIPE:
        hint = "pass the same rules in a file: --key-map FILE"
        raise NotFound("the key map came through a pipe, which is gone", path=path, expected="a JSON or TOML file", hint=hint)
    if not is_there(path):
        raise NotFound("no such file", path=path, expected="a JSON or TOML file, or a rule", hint=INLINE)
    with reading(path):
        through = piped(path, MAX_SMALL)
        raw = read_small(path, MAX_SMALL) if through is None else through
        # A descriptor has no suffix, and no file of rules in TOML begins like one in JSON.
        in_toml = path.suffix == ".toml" or (is_descriptor(path) and not raw.lstrip().startswith(b"{"))
        content = _toml(raw) if in_toml else _json(raw)
        if not isinstance(content, dict):
            raise UsageError("the key map is not an object", expected='{"rules": [{"match": "...", "to": "..."}]}')
        listed = content.get("rules")
        if listed is None:
            listed = [{"match": re.escape(old), "to": _literal(new)} for old, new in content.items()]
        if not isinstance(listed, list) or not listed:
            raise UsageError("the key map has no list of rules", expected='{"rules": [{"match": "...", "to": "..."}]}')
        return tuple(_rule(entry, number) for number, entry in enumerate(listed, 1))


def unused_rules(names: Iterable[str], rules: tuple[Rule, ...]) -> list[str]:
    """Of the rules that match no name, which names they are for."""
    listed = list(names)
    return [rule.wanted for rule in rules if not any(rule.match.fullmatch(name) for name in listed)]


def mapped_names(names: Iterable[str], rules: tuple[Rule, ...]) -> dict[str, str | None]:
    """Old name -> new name, None for tensors to leave out. Raises Inconsistent if two names become one."""
    result: dict[str, str | None] = {}
    taken: dict[str, str] = {}
    for name in names:
        new: str | None = name
        for rule in rules:
            found = rule.match.fullmatch(name)
            if found:
                new = None if rule.to is None else _new_name(name, found.expand(rule.to))
                break
        if new is not None and new in taken:
            text = f"the key map gives {printable(taken[new])} the same new name, {printable(new)}"
            raise Inconsistent(text, tensor=name, hint="make the rules distinguish the two")
        if new is not None:
            taken[new] = name
        result[name] = new
    return result


def _new_name(old: str, new: str) -> str:
    try:
        return check_name(new)
    except CorruptFile as error:
        raise UsageError(f"the key map gives a name that cannot be written: {error.message}", tensor=old) from None


def _rule(entry: Any, number: int) -> Rule:
    if not isinstance(entry, dict) or not isinstance(entry.get("match"), str) or len(entry["match"]) > MAX_PATTERN:
        raise UsageError(f"rule {number} of the key map has no match", expected='{"match": "...", "to": "..."}')
    if "to" not in entry and entry.get("drop") is not True:
        raise UsageError(f"rule {number} of the key map has no new name", hint='write "drop": true to leave tensors out')
    target = None if entry.get("drop") is True else entry["to"]
    if target is not None and not isinstance(target, str):
        raise UsageError(f"rule {number} of the key map has no new name")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pattern = re.compile(entry["match"])
            if target is not None:
                pattern.sub(target, "")
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        raise UsageError(f"rule {number} of the key map is not a valid regular expression: {error}") from None
    return Rule(pattern, target, f"matches {printable(pattern.pattern)} as a whole")


def _literal(new: Any) -> Any:
    return new.replace("\\", r"\\") if isinstance(new, str) else new


def _json(raw: bytes) -> Any:
    try:
        return parse_json(raw, "the key map")
    except CorruptFile as error:
        raise UsageError(error.message) from None


def _toml(raw: bytes) -> Any:
    try:
        import tomllib
    except ImportError:
        raise UsageError("TOML key maps need Python 3.11", hint="write the key map as JSON") from None
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the key map is not valid TOML: {error}") from None
