"""The checkpoint descriptor: what every command knows about a checkpoint, and what ``--json`` prints of it.

It lists tensors with their layout, never their pieces, of which a large run has hundreds of thousands.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.tensor import LayoutKind, Tensor
from ckpt_cli.urls import shown

Place = Annotated[str, AfterValidator(shown)]
"""A path on this machine, or an address."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def _repr_html_(self) -> str:
        """How a notebook shows a result: its fields as a table, what is long or nested folded away."""
        from ckpt_cli.results.notebook import as_html

        return as_html(self)


class NoteInfo(Frozen):
    """Something the user should know: ``level`` "info" or "warning", a stable ``code``, a sentence."""

    level: str
    code: str
    text: Place

    @classmethod
    def of(cls, note: Note) -> NoteInfo:
        return cls(level=note.level, code=note.code, text=note.text)


class TensorInfo(Frozen):
    """One tensor: ``shape`` in elements, ``bytes`` as stored, ``layout`` such as "Shard(0) x8"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int
    kind: LayoutKind
    layout: str
    pieces: int
    copies: int
    alias_of: str | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        return cls(
            name=tensor.name,
            dtype=tensor.dtype.code,
            shape=tensor.shape,
            elements=tensor.numel,
            bytes=tensor.nbytes,
            kind=tensor.kind,
            layout=tensor.layout,
            pieces=len(tensor.pieces),
            copies=len(tensor.copies),
            alias_of=tensor.alias_of,
        )


class Count(Frozen):
    """How many tensors there are of some kind, and their elements."""

    tensors: int = 0
    elements: int = 0


class LeafInfo(Frozen):
    name: str
    text: str


class ComponentInfo(Frozen):
    """One component. ``tensors`` is None where only names were looked at (other components, other steps).

    ``tied`` tensors share the storage of others: ``elements`` and ``bytes`` count these once.
    """

    name: str
    format: str
    writer: str
    path: Place
    files: int
    world_size: int | None = None
    missing_ranks: tuple[int, ...] = ()
    problem: str | None = None
    mesh: str | None = None
    elements: int | None = None
    bytes: int | None = None
    tied: int = 0
    dtypes: dict[str, Count] = {}
    kinds: dict[str, Count] = {}
    tensors: tuple[TensorInfo, ...] | None = None
    leaves: tuple[LeafInfo, ...] = ()

    @property
    def complete(self) -> bool:
        return self.problem is None

    @classmethod
    def of(cls, component: Component, name: str, *, listed: bool = True) -> ComponentInfo:
        """``listed``: with its tensors and other entries, not only their totals."""
        tensors = list(component.tensors.values())
        return cls(
            name=name,
            format=component.format,
            writer=component.writer,
            path=str(component.root),
            files=len(component.files),
            world_size=component.world_size,
            missing_ranks=component.missing_ranks,
            mesh=str(component.mesh) if component.mesh else None,
            elements=component.numel,
            bytes=component.nbytes,
            tied=sum(tensor.alias_of is not None for tensor in tensors),
            dtypes=_counts([(tensor.dtype.code, tensor) for tensor in tensors]),
            kinds=_counts([(tensor.kind, tensor) for tensor in tensors]),
            tensors=tuple(TensorInfo.of(tensor) for tensor in tensors) if listed else None,
            leaves=tuple(LeafInfo(name=leaf.name, text=leaf.text) for leaf in component.leaves) if listed else (),
        )


class StepInfo(Frozen):
    """One step of a run. ``problem`` says why it is not complete, as far as names (or, if it was tried, contents) tell.

    ``trainer`` wrote it, by its name, where the steps in a folder are those of several; ``label`` is what it is called where steps are
    counted anew in each epoch, so that several have one number.
    """

    step: int | None
    path: Place
    components: tuple[str, ...]
    problem: str | None = None
    trainer: str | None = None
    label: str | None = None

    @property
    def called(self) -> str:
        return self.label or str(self.step)


class Checkpoint(Frozen):
    """A checkpoint: where it is, what it holds, whether it is complete.

    ``steps`` lists the whole run when a run was given; ``newest_complete``: the step was chosen for this reason, nobody asked
    for it. ``components`` begins with the main one; ``also`` are folders of other nodes that hold files of it.
    """

    path: Place
    step: int | None
    run: Place | None = None
    also: tuple[Place, ...] = ()
    framework: str
    components: tuple[ComponentInfo, ...]
    newest_complete: bool = False
    steps: tuple[StepInfo, ...] = ()
    assets: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    architecture: str | None = None
    layers: int | None = None
    notes: tuple[NoteInfo, ...] = ()

    @property
    def complete(self) -> bool:
        return all(component.complete for component in self.components)

    def component(self, name: str) -> ComponentInfo:
        """The component of this name. Raises KeyError if there is none."""
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)


def _counts(tensors: list[tuple[str, Tensor]]) -> dict[str, Count]:
    totals: dict[str, list[int]] = {}
    for key, tensor in tensors:
        total = totals.setdefault(key, [0, 0])
        total[0] += 1
        total[1] += tensor.numel if tensor.alias_of is None else 0
    return {key: Count(tensors=count, elements=elements) for key, (count, elements) in totals.items()}


class LoraInfo(Frozen):
    """The result for LoRA adapters: "fused", "exported" or "kept"; ranks and scales that occur, and where alpha comes from.

    ``alphas`` are those that occur, ``alpha`` is the common one, which patterns may overrule for every module.
    """

    outcome: str
    modules: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    alpha: float | None
    origin: str
    dora: bool = False
    alphas: tuple[float, ...] = ()
