"""Names of PEFT: which tensors of a component are a model, and which are LoRA adapters on it.

Names as peft 0.21 makes them (`tuners/lora/layer.py`, `utils/save_and_load.py`): everything lies under ``base_model.model.``; a module that
is adapted keeps its own tensors under ``base_layer.``, its adapter in ``lora_A.<adapter>.weight`` and so on; a module that was trained as
a whole lies in ``modules_to_save.<adapter>.``, its first state in ``original_module.``. Files of an adapter leave out the adapter's name.

A part of a model may be wrapped alone (``language_model.base_model.model.``), and a trainer may hold the model by a name of its own.
What lies in a parametrization of torch is the module's own, whatever it is called (`ckpt_cli.hub.adapters.parametrized`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.boxes import Shape, shape_text
from ckpt_cli.errors import Inconsistent, Unsupported
from ckpt_cli.files.folders import is_file
from ckpt_cli.hub.adapters.other_kinds import other_adapters
from ckpt_cli.hub.adapters.parametrized import outside
from ckpt_cli.names import few, printable, stripped_names
from ckpt_cli.tensors.tensor import Tensor

PREFIX = "base_model.model."
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FOLDER = "lora_adapter"
"""Where verl puts the adapter in PEFT's own format."""

BASE = "base_layer"
ADAPTED = re.compile(
    r"(?!(?:.*\.)?parametrizations\.)(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
COPIES_OF_BIAS = re.compile(r"(?P<module>.+)\.(?:modules_to_save|original_module)\.(?P<rest>(?:.+\.)?bias)")
"""With ``bias`` "all", PEFT's files have the biases of modules that were trained as a whole three times: under the name that is loaded,
and twice as the wrapper holds them, of modules within it also behind the name of the adapter."""

ORIGINAL = re.compile(r"(?P<module>.+)\.original_module\.(?P<rest>.+)")
OWNER = "base_model."
"""The only child of PEFT's model, whose only child is the model that it wraps."""

LORA = re.compile(r"(^|\.)(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer|modules_to_save)(\.|$)")
UNKNOWN = re.compile(r"(^|\.)(lora_|modules_to_save|token_adapter|ranknum)")

HOLDERS = ("linear", "conv")
"""What modules of LitGPT and loralib call the layer that has the weight."""

CUT = "it may have been cut, or be what one process held of it: merge the files of all ranks, or save the adapter again"
ELSEWHERE = "fuse it with the program that trained it, or pass --lora keep to write the tensors as they are"


@dataclass(frozen=True, slots=True)
class Adapter:
    """The LoRA tensors of one module.

    ``a`` [r, in] and ``b`` [out, r], or of an embedding ``a`` [r, rows] and ``b`` [columns, r]; ``magnitude`` is that of DoRA, ``bias`` is
    added to the module's own; ``path`` is the name with the layers that PEFT puts around a module. ``part`` is what begins both if PEFT
    wrapped one part of the model: within it, PEFT knows the module by ``inner``.
    """

    module: str
    path: str
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    part: str = ""

    @property
    def inner(self) -> str:
        return self.module.removeprefix(self.part)

    @property
    def stored(self) -> str:
        """One of its tensors, as the file calls it: for messages."""
        return next(iter(self.parts.values())).name

    @property
    def embedding(self) -> bool:
        return "lora_embedding_A" in self.parts

    @property
    def a(self) -> Tensor:
        return self.parts["lora_embedding_A" if self.embedding else "lora_A"]

    @property
    def b(self) -> Tensor:
        return self.parts["lora_embedding_B" if self.embedding else "lora_B"]

    @property
    def magnitude(self) -> Tensor | None:
        return self.parts.get("lora_magnitude_vector")

    @property
    def bias(self) -> Tensor | None:
        return self.parts.get("bias")


@dataclass(frozen=True, slots=True)
class PeftState:
    """A component with adapters: the model's tensors by their names without PEFT, and the adapters by module.

    ``saved`` are the names of tensors that were trained as they are; ``exported`` all tensors of the adapter as PEFT's files name them.
    ``wrapped`` are the names of the model's own tensors in adapted modules, with those that PEFT gives them; ``adapter_in_names``:
    names have that of the adapter, as state dicts have and PEFT's files have not. ``parts`` are the beginnings of names, each with its dot,
    of the parts of the model that were wrapped; empty text for the whole of it. ``originals`` are the first states of what is ``saved``.
    """

    tensors: dict[str, Tensor]
    adapters: tuple[Adapter, ...]
    saved: tuple[str, ...]
    exported: dict[str, Tensor]
    wrapped: Mapping[str, str] = field(default_factory=dict)
    adapter_in_names: bool = True
    parts: tuple[str, ...] = ("",)
    originals: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def part(self) -> str:
        """What begins the names of the one part that was wrapped; empty if that was the whole model, or several parts."""
        return self.parts[0] if len(self.parts) == 1 else ""

    def would_be(self, name: str) -> str:
        """A name of the model as the file of the adapters would have it: for messages about what it lacks."""
        lead, found, _ = self.adapters[0].stored.partition(self.adapters[0].path) if self.adapters else ("", "", "")
        return f"{lead}{name}" if found else name


def adapter_config(homes: Iterable[Path]) -> Path | None:
    """PEFT's config in the first of these folders that has one; None without."""
    return next((path for home in homes for path in (home / ADAPTER_FOLDER / ADAPTER_CONFIG, home / ADAPTER_CONFIG) if is_file(path)), None)


def has_adapters(names: Mapping[str, object]) -> bool:
    """Whether any name is one of PEFT's."""
    # What is searched for holds one of these words, and looking for a word is many times as fast.
    return any(LORA.search(outside(name)) for name in names if "lora_" in name or "base_layer" in name or "modules_to_save" in name)


def wrapped_parts(names: Collection[str]) -> frozenset[str]:
    """What begins the names of the parts that PEFT wrapped, in front of its prefix; empty text for a whole model.

    A module that a model itself calls so is no sign of PEFT: it has more than the one child.

    >>> sorted(wrapped_parts(["base_model.model.h.q.lora_A.weight"])), sorted(wrapped_parts(["llm.base_model.model.h.q.lora_A.weight"]))
    ([''], ['llm.'])
    >>> sorted(wrapped_parts(["base_model.model.h.q.lora_A.weight", "base_model.head.weight"]))
    []
    """
    parts = {part for name in names if has_adapters({name: None}) and (part := _part_of(name)) is not None}
    owned = {part: f"{part}{OWNER}" for part in parts}
    return frozenset(part for part, own in owned.items() if all(_part_of(name) == part for name in names if name.startswith(own)))


def _part_of(name: str) -> str | None:
    """What stands in front of PEFT's prefix, None without it."""
    if name.startswith(PREFIX):
        return ""
    before, found, _ = name.partition(f".{PREFIX}")
    return f"{before}." if found else None


def _unwrapped(name: str, parts: Collection[str]) -> tuple[str, str]:
    """The part that PEFT wrapped, empty without one, and the name within it."""
    part = _part_of(name)
    return (part, name.removeprefix(f"{part}{PREFIX}")) if part is not None and part in parts else ("", name)


def plain_name(name: str, parts: Collection[str] = ("",)) -> str:
    """The name of a tensor without what PEFT adds in memory: its prefix, ``base_layer``, and the name of an adapter.

    ``parts`` are those of `wrapped_parts`.

    >>> plain_name("base_model.model.h.0.q.base_layer.weight"), plain_name("base_model.model.h.0.q.lora_A.default.weight")
    ('h.0.q.weight', 'h.0.q.lora_A.weight')
    >>> plain_name("base_model.model.head.modules_to_save.default.weight"), plain_name("base_model.model.head.original_module.weight")
    ('head.weight', 'head.original_module.weight')
    """
    short = _without_base("".join(_unwrapped(name, parts)))
    if (saved := SAVED.fullmatch(short)) is not None:
        return f"{saved['module']}.{saved['rest']}"
    match = ADAPTED.fullmatch(short)
    return short if match is None else ".".join(part for part in (match["module"], match["part"], match["leaf"]) if part)


def first_state_of(name: str) -> str | None:
    """The name under which a module that is trained as a whole is used, of a tensor of its first state; None for other tensors.

    >>> first_state_of("head.original_module.weight")
    'head.weight'
    """
    original = ORIGINAL.fullmatch(name)
    return None if original is None else f"{original['module']}.{original['rest']}"


def parse_peft(component: Mapping[str, Tensor]) -> PeftState:
    """Sort the tensors of a component. Raises Unsupported for several adapters or other kinds, Inconsistent for incomplete ones."""
    if (other := other_adapters(component)) is not None:
        raise Unsupported(other.text, tensor=other.names[0], expected="LoRA or DoRA of PEFT", hint=other.cure)
    stripped = stripped_names(component)
    wrapped_in = wrapped_parts(stripped.values())
    inner = {old: _unwrapped(new, wrapped_in) for old, new in stripped.items()}
    names = {old: "".join(both) for old, both in inner.items()}
    parts = tuple(sorted({part for old, (part, _) in inner.items() if has_adapters({stripped[old]: None})})) or ("",)

    def named(old: str, name: str) -> str:
        """A name as the files of PEFT have it, of the one part or of several."""
        part = inner[old][0]
        return f"{part if len(parts) > 1 else ''}{PREFIX}{name.removeprefix(part)}"

    tensors: dict[str, Tensor] = {}
    factors_of: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    exported: dict[str, Tensor] = {}
    adapters: set[str] = set()
    wrapped: dict[str, str] = {}
    originals: dict[str, Tensor] = {}
    factors = {name: ADAPTED.fullmatch(name) for name in names.values()}
    adapter_in_names = any(match["adapter"] for match in factors.values() if match is not None)
    again = {} if adapter_in_names else {name: match for name in factors if (match := COPIES_OF_BIAS.fullmatch(name)) is not None}
    copies = {name for name, match in again.items() if any(f"{match['module']}.{rest}" in factors for rest in _rests(match["rest"]))}
    for old, name in names.items():
        tensor = component[old]
        match, whole, original = factors[name], SAVED.fullmatch(name), ORIGINAL.fullmatch(name)
        if name in copies:
            continue
        if match is not None:
            part = "bias" if match["leaf"] == "bias" else match["part"]
            factors_of.setdefault(match["module"], {})[part] = tensor
            adapters.add(match["adapter"] or "")
            bare = "weight" if match["part"] in ("lora_A", "lora_B") else ""  # loralib's parameters, which are linear layers of PEFT
            leaf = "" if match["part"] == "lora_magnitude_vector" else match["leaf"] or bare
            exported[named(old, f"{match['module']}.{match['part']}{leaf and f'.{leaf}'}")] = tensor
        elif whole is not None:
            adapters.add(whole["adapter"])
            saved[f"{whole['module']}.{whole['rest']}"] = tensor
            exported[named(old, f"{whole['module']}.{whole['rest']}")] = tensor
        elif original is None:
            plain = _without_base(name)
            if plain in tensors:
                raise Inconsistent(f"two tensors are {printable(plain)} without PEFT's names", tensor=old)
            tensors[plain] = tensor
            if plain != name:
                wrapped[plain] = named(old, name)
    for old, name in names.items():
        if (used := first_state_of(name)) is not None and name not in copies:
            (originals if used in saved else tensors)[used] = component[old]
    unknown = [tensor.name for name, tensor in tensors.items() if UNKNOWN.search(outside(name))]
    if unknown:
        raise Unsupported("this is not a tensor of plain LoRA or DoRA", tensor=unknown[0], hint="merge it with PEFT, or pass --lora keep")
    if len(adapters) > 1:
        found = few(sorted(adapter or "(without a name)" for adapter in adapters))
        hint = "merge them with PEFT, or pass --lora keep to write the tensors as they are"
        raise Unsupported(f"there are {len(adapters)} adapters: {found}", expected="one", hint=hint)
    _refuse_other_modules(factors_of, tensors)
    made = tuple(_adapter(path, found, parts[0] if len(parts) == 1 else "") for path, found in factors_of.items())
    return PeftState({**tensors, **saved}, made, tuple(saved), exported, wrapped, adapter_in_names, parts, originals)


def _refuse_other_modules(factors: Mapping[str, Mapping[str, Tensor]], tensors: Mapping[str, Tensor]) -> None:
    """Raise Unsupported for factors that are parameters of their module, which holds the weight in a module of its own: no PEFT's."""
    for path, parts in factors.items():
        module = _without_base(path)
        if f"{module}.weight" in tensors or not _are_bare(parts):
            continue
        held = next((name for word in HOLDERS if (name := f"{module}.{word}.weight") in tensors), None)
        if held is not None:
            raise Unsupported(
                f"these are factors of a module that holds its weight as {held}, as modules of LitGPT and convolutions of loralib do",
                tensor=next(iter(parts.values())).name,
                expected="factors of PEFT, or of a module that has the weight itself",
                hint=ELSEWHERE,
            )


def _are_bare(parts: Mapping[str, Tensor]) -> bool:
    """Whether factors are parameters of their module, as PEFT has none of these names."""
    return all(part in ("lora_A", "lora_B") and tensor.name.endswith(f".{part}") for part, tensor in parts.items())


def _adapter(path: str, parts: Mapping[str, Tensor], part: str) -> Adapter:
    """The adapter of a module, with both factors."""
    adapter = Adapter(_without_base(path), path, parts, part)
    wanted = {"lora_embedding_A", "lora_embedding_B"} if any("embedding" in part for part in parts) else {"lora_A", "lora_B"}
    lacking = sorted(wanted - set(parts))
    if lacking:
        raise Inconsistent(f"the adapter has no {lacking[0]}", tensor=adapter.stored, expected="both factors of every adapter")
    empty = [part for part in sorted(wanted) if len(parts[part].shape) < 2 or not parts[part].numel]
    if empty:
        raise Inconsistent(
            f"{empty[0]} is not a matrix",
            tensor=parts[empty[0]].name,
            expected="two factors of rank 1 or more",
            hint="it may be what one rank held of it, saved without gathering: merge the files of all ranks, or save the adapter again",
        )
    magnitude = adapter.magnitude
    if magnitude is not None and magnitude.numel != adapter.b.shape[0]:
        raise Inconsistent(
            f"there are {magnitude.numel} magnitudes, but lora_B has {adapter.b.shape[0]} outputs",
            tensor=(magnitude if magnitude.numel < adapter.b.shape[0] else adapter.b).name,
            expected="a magnitude for each output",
            hint=CUT,
        )
    _check_ranks(adapter.a, adapter.b, is_bare=_are_bare(parts))
    return adapter


def _check_ranks(a: Tensor, b: Tensor, *, is_bare: bool) -> None:
    """Raise Unsupported for factors that are not two of one matrix, Inconsistent for those of different ranks.

    ``is_bare`` is what `_are_bare` says.
    """
    rows, columns = a.shape[0], b.shape[1]
    both = f"lora_A {shape_text(a.shape)} and lora_B {shape_text(b.shape)}"
    stacked, grouped = _are_stacked(a.shape, b.shape), len(b.shape) > 2 and rows % columns == 0
    if rows == columns or (grouped and not stacked):
        return
    if stacked or _are_stacked(b.shape, a.shape):
        raise Unsupported(
            f"{both} are stacks of factors, as for several experts or tasks",
            tensor=a.name,
            expected="two matrices, as PEFT has them",
            hint=ELSEWHERE,
        )
    if is_bare and rows % columns == 0:
        # Of a weight that is several in one, such as q, k and v: A has the rows of all adapters, B the columns of one.
        raise Unsupported(
            f"{both} are not of one rank: they may be {rows // columns} adapters for parts of one weight, as loralib and LitGPT have them",
            tensor=a.name,
            expected="factors of one rank, as PEFT has them",
            hint=ELSEWHERE,
        )
    raise Inconsistent(
        f"lora_A has rank {rows} and lora_B rank {columns}",
        tensor=(a if rows < columns else b).name,
        expected="as many rows of lora_A as columns of lora_B",
        hint=CUT,
    )


def _rests(rest: str) -> tuple[str, str]:
    """What may be the name of a tensor within a module that was trained as a whole: all of it, or what follows the adapter's name."""
    return rest, rest.partition(".")[2]


def _are_stacked(a: Shape, b: Shape) -> bool:
    """Whether factors are [E, r, in] and [E, out, r], where experts may share one of them, as Tinker has it: E is 1 there."""
    return len(a) == len(b) == 3 and a[1] == b[2] and (a[0] == b[0] or 1 in (a[0], b[0]))


def _without_base(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != BASE)
