"""The way from the top of a file down to the dict of the model's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_cli.errors import CkptError, CorruptFile, Undecidable, Unsupported
from ckpt_cli.files.pickle_nodes import as_dict, describe
from ckpt_cli.formats.rank_files.dtensor import Local, LocalReader
from ckpt_cli.formats.torch_files.averages import is_average
from ckpt_cli.formats.torch_files.matrices import is_optimizer, is_tensor, pairs_of
from ckpt_cli.formats.training_state_names import is_record_key, is_state_key, is_trainer_key
from ckpt_cli.names import few

MAX_LEVELS = 8


class SeveralGroups(Undecidable):
    """Several groups of tensors could be the model; whoever asks for one of them by its key means that.

    ``averages`` are the keys of those beside them, which may be asked for alike.
    """

    def __init__(self, keys: Iterable[object], averages: Iterable[str] = ()) -> None:
        held = list(keys)
        self.held = tuple(held)
        self.keys = tuple(key for key in held if isinstance(key, str))
        self.averages = tuple(dict.fromkeys(averages))
        text = f"several groups of tensors could be the model: {few([str(key) for key in held])}"
        super().__init__(text, expected="one of them", hint="save the right one on its own")


@dataclass(frozen=True, slots=True)
class Way:
    """The dicts from the top of a file (first) down to the model's (last), and the keys that lead from one to the next."""

    levels: tuple[Mapping[Any, Any], ...]
    keys: tuple[Any, ...]

    @property
    def entries(self) -> Mapping[Any, Any]:
        """The dict of the model's tensors."""
        return self.levels[-1]

    @property
    def beside(self) -> list[dict[Any, Any]]:
        """What each level holds besides the next one; all of the last."""
        above = [{key: node for key, node in level.items() if key != taken} for level, taken in zip(self.levels, self.keys, strict=False)]
        return [*above, dict(self.entries)]

    @property
    def above(self) -> dict[Any, Any]:
        """What is around the model's dict, by key; if several levels have a key, the inner one."""
        return {key: node for level in self.beside[:-1] for key, node in level.items()}


def way_down(root: object, keys: tuple[str, ...], reader: LocalReader, asked: str | None = None) -> Way:
    """The way to the dict of tensors in a file: down through ``keys`` that hold a dict, or the only group; of several that ``asked`` for.

    Tensors beside such a key (a random state, a loss) do not make a state dict of what is around it. Raises CorruptFile,
    SeveralGroups, and Unsupported for state dicts in a list, such as those of DDIM and NCSN.
    """
    levels: list[Mapping[Any, Any]] = []
    taken: list[Any] = []
    node = root
    for _ in range(MAX_LEVELS):
        entries = as_dict(node)
        if entries is None and isinstance(node, (list, tuple)) and any(_is_held(each) for each in node):
            text = f"the file holds a {describe(node)}, not a state dict: what it has in it has no names"
            raise Unsupported(
                text, expected="a dict of tensors", hint="load it with the trainer that wrote it, and save the state dict of the model"
            )
        if entries is None:
            raise CorruptFile(f"the file holds {describe(node)}, not a state dict", expected="a dict of tensors")
        levels.append(entries)
        inner = next((key for key in keys if as_dict(entries.get(key)) is not None), None)
        if inner is None:
            try:
                inner = sole_group(entries, reader, asked)
            except SeveralGroups as several:
                beside = (key for level in levels for key, node in level.items() if is_average(key, node))
                raise SeveralGroups(several.held, beside) from None
        elif _has_named_matrix(entries, reader):
            inner = None
        if inner is None:
            return Way(tuple(levels), tuple(taken))
        taken.append(inner)
        node = entries[inner]
    raise CorruptFile("the state dict is nested too deeply")


def sole_group(entries: Mapping[Any, Any], reader: LocalReader, asked: str | None = None) -> Any | None:
    """The key of the only group of tensors in a dict, however deep, if it holds more than the loose tensors beside it (a step, a queue).

    Of several groups the one with matrices of its own, or else with matrices at all: counters are not the model. None if there is no
    group, or if the tensors beside it may be the model. Raises SeveralGroups if several may be the model, none of which was ``asked`` for.
    """
    if all(as_dict(node) is None for node in entries.values()) or _has_named_matrix(entries, reader):
        return None
    groups: dict[Any, Mapping[Any, Any]] = {}
    # A random state has thousands of bytes: more than a small model.
    held = (reader.read(node) for key, node in entries.items() if as_dict(node) is None and not (is_state_key(key) or is_record_key(key)))
    loose = sum(math.prod(local.shape) for local in held if local is not None)
    for key, node in entries.items():
        inner = as_dict(node)
        if inner is not None and _may_hold_model(key, node, inner) and sum(map(math.prod, _shapes_below(inner, reader))) > loose:
            groups[key] = inner
    if len(groups) > 1:
        own = [key for key, inner in groups.items() if _has_matrix(map(reader.read, inner.values()))]
        deep = own or [key for key, inner in groups.items() if any(len(shape) > 1 for shape in _shapes_below(inner, reader))]
        groups = {key: groups[key] for key in deep} or groups
    if len(groups) > 1 and asked in groups:
        return asked
    if len(groups) > 1:
        raise SeveralGroups(groups)
    return next(iter(groups), None)


def _is_held(node: object) -> bool:
    """Whether something in a list may be weights: a tensor, or a dict of what may be."""
    return as_dict(node) is not None or is_tensor(node)


def _may_hold_model(key: object, node: object, entries: Mapping[Any, Any]) -> bool:
    return not (is_state_key(key) or is_trainer_key(key) or is_average(key, node) or is_optimizer(entries))


def _shapes_below(entries: Mapping[Any, Any], reader: LocalReader) -> list[Sequence[int]]:
    """The shapes of the tensors in a dict and in the dicts below it, without training state and averages."""
    shapes: list[Sequence[int]] = []
    seen: set[int] = set()
    pending = [entries]
    while pending:
        current = pending.pop()
        for key, node in current.items():
            inner = pairs_of(node)
            if inner is None:
                local = reader.read(node) if current is entries else _readable(node, reader)
                shapes += [] if local is None else [local.shape]
            elif id(node) not in seen and _may_hold_model(key, node, inner):
                seen.add(id(node))
                pending.append(inner)
    return shapes


def _readable(node: object, reader: LocalReader) -> Local | None:
    """A tensor further down; one that cannot be read is not an error here."""
    try:
        return reader.read(node)
    except CkptError:
        return None


def _has_named_matrix(entries: Mapping[Any, Any], reader: LocalReader) -> bool:
    """Whether a matrix has the name of a module's weight: what lies beside groups is a state dict as well."""
    return _has_matrix(reader.read(node) for key, node in entries.items() if "." in str(key) and as_dict(node) is None)


def _has_matrix(tensors: Iterable[Local | None]) -> bool:
    return any(local is not None and len(local.shape) > 1 for local in tensors)
