"""Which tensor of a checkpoint goes where in a live model, decided from names, shapes and dtypes before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_cli.errors import CkptError, DifferentTensors, MissingTensors
from ckpt_cli.loading.live import elements_of
from ckpt_cli.names import Naming, printable
from ckpt_cli.output.select import is_wanted
from ckpt_cli.tensors.casting import can_cast
from ckpt_cli.tensors.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the checkpoint and the place of its elements in the model; ``others`` are further values for a tied one."""

    name: str
    source: Tensor
    target: Tensor
    others: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Matched:
    """The pairs, and what has no partner. ``wrong`` are differences in shape and dtype, as lines; ``hint`` says what else can be loaded.

    ``apart`` are names of the model that got the values of another one, which the checkpoint ties them to and the model does not.
    """

    naming: Naming
    pairs: tuple[Pair, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong: tuple[str, ...]
    hint: str | None = None
    apart: tuple[str, ...] = ()

    @property
    def faults(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.wrong)

    def refuse(self, *, strict: bool, path: object) -> None:
        """Raise MissingTensors or DifferentTensors unless the model can be filled."""
        absent = [f"missing in the checkpoint: {printable(name)}" for name in self.missing]
        extra = [f"not in the model: {printable(name)}" for name in self.unexpected]
        lines = [*self.wrong, *(absent + extra if strict else [])]
        if not self.pairs and not self.wrong:
            text = "the model and the checkpoint have no tensor in common"
            raise DifferentTensors(text, path=path, expected="a model of the class that was trained", details=[*absent, *extra])
        if not lines:
            return
        hint = None if self.wrong else self.hint or "pass strict=False to load the tensors that both have"
        kind = MissingTensors if strict and not (extra or self.wrong) else DifferentTensors
        differ = "1 tensor differs" if len(lines) == 1 else f"{len(lines)} tensors differ"
        raise kind(f"the model and the checkpoint do not fit: {differ}", path=path, details=lines, hint=hint)


def matched(
    stored: Mapping[str, Tensor], tied: Mapping[str, Tensor], live: Mapping[str, Tensor], naming: Naming, allow_missing: Sequence[str] = ()
) -> Matched:
    """Pair the tensors of a checkpoint with those of a model by name.

    ``tied`` are names of the checkpoint that it does not store on their own: they fill a model that does not tie them. Names of the model
    that share their elements are filled once, by any of them that is stored.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in live.items():
        groups.setdefault(elements_of(tensor), []).append(name)
    pairs: list[Pair] = []
    missing: list[str] = []
    wrong: list[str] = []
    for names in groups.values():
        held = [name for name in names if name in stored] or [name for name in names if name in tied][:1]
        if not held:
            missing += [] if any(is_wanted(name, allow_missing, ()) for name in names if allow_missing) else names[:1]
            continue
        sources = [stored[name] if name in stored else tied[name] for name in held]
        faults = [line for name, source in zip(held, sources, strict=True) if (line := _fault(name, source, live[name])) is not None]
        wrong += faults
        if not faults:
            others = [source for source in sources[1:] if not _same_pieces(source, sources[0])]
            pairs.append(Pair(held[0], sources[0], live[held[0]], tuple(others)))
    unexpected = [name for name in stored if name not in live]
    apart = tuple(pair.name for pair in pairs if pair.name not in stored)
    return Matched(naming, tuple(pairs), tuple(missing), tuple(unexpected), tuple(wrong), apart=apart)


def best_match(candidates: Sequence[Matched], errors: Sequence[CkptError]) -> Matched:
    """The match with the fewest faults, the first of several. Raises the first error if there is none at all."""
    if not candidates:
        raise errors[0]
    return min(candidates, key=lambda found: found.faults)


def _fault(name: str, source: Tensor, target: Tensor) -> str | None:
    if source.shape != target.shape:
        return f"other shape: {printable(name)} is {list(source.shape)} in the checkpoint, {list(target.shape)} in the model"
    if not can_cast(source.dtype, target.dtype):
        return f"other dtype: {printable(name)} is {source.dtype.torch} in the checkpoint, {target.dtype.torch} in the model"
    return None


def _same_pieces(first: Tensor, second: Tensor) -> bool:
    return {piece.same_bytes_as for piece in first.pieces} == {piece.same_bytes_as for piece in second.pieces}
