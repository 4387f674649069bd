"""Weights that are computed from several tensors whenever they are used: parametrizations, norms of weights, masks of pruning."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt_cli.errors import Inconsistent
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few

PARAMETRIZATIONS = ".parametrizations."
SUFFIXES = {
    ("_orig", "_mask"): "torch.nn.utils.prune.remove",
    ("_orig", "_u"): "torch.nn.utils.remove_spectral_norm",
    ("_g", "_v"): "torch.nn.utils.remove_weight_norm",
}
"""Endings of the tensors that torch puts in the place of one -> what makes one of them again."""

REMOVE = "torch.nn.utils.parametrize.remove_parametrizations"


@dataclass(frozen=True, slots=True)
class Computed:
    """The tensors in the place of one, and the function of torch that makes one of them."""

    parts: tuple[str, ...]
    remove: str

    @property
    def masks(self) -> tuple[str, ...]:
        """Zeros and ones of torch.nn.utils.prune, which say what elements are kept. Those of parametrizations may be trained."""
        return tuple(part for part in self.parts if part.endswith("_mask") and self.remove != REMOVE)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Singular vectors that a spectral norm brings nearer to those of its weight in every forward pass of a training."""
        spectral = any(part.endswith("_u") for part in self.parts)
        return tuple(part for part in self.parts if spectral and part.endswith(("_u", "_v")))


def computed(names: Collection[str]) -> dict[str, Computed]:
    """The tensors that are not in a state dict with these ``names``, as they are computed from several that are.

    >>> computed(["a.weight_g", "a.weight_v", "b.weight"])["a.weight"].parts
    ('a.weight_g', 'a.weight_v')
    """
    there, parts = set(names), dict[str, list[str]]()
    for name in names:
        module, found, rest = f".{name}".rpartition(PARAMETRIZATIONS)
        if found and "." in rest:
            parts.setdefault(f"{module}.{rest.partition('.')[0]}"[1:], []).append(name)
    made = {name: Computed(tuple(sorted(listed)), REMOVE) for name, listed in parts.items()}
    for suffixes, remove in SUFFIXES.items():
        for name in [name.removesuffix(suffixes[0]) for name in names if name.endswith(suffixes[0])]:
            if all(name + suffix in there for suffix in suffixes):
                made[name] = Computed(tuple(name + end for end in dict.fromkeys((*suffixes, "_v")) if name + end in there), remove)
    return {name: of for name, of in made.items() if name not in there}


def computed_hint(wanted: Collection[str], names: Collection[str]) -> tuple[str, bool]:
    """The hint about wanted tensors that are computed from those of ``names``, and whether all of them are; empty if none is."""
    ends = {f".{name}": of for name, of in computed(names).items()}
    found = {name: of for name in wanted for end, of in ends.items() if f".{name}".endswith(end) or end.endswith(f".{name}")}
    if not found:
        return "", False
    parts = [part for of in found.values() for part in of.parts]
    remove = " or ".join(dict.fromkeys(of.remove for of in found.values()))
    it = "it is" if len(found) == 1 else "they are"
    one = "one tensor" if len(found) == 1 else "one tensor of each"
    text = f"{few(grouped([*found]), 3)}: {it} computed from {few(grouped(parts), 3)}, and none of these alone is right"
    return f"{text}; make {one} with {remove} in the training program, and save again", len(found) == len(wanted)


def refuse_made_of_part(renamed: Mapping[str, str | None]) -> None:
    """Raise Inconsistent for a key map (old name -> new) that gives one of several tensors the name of what is computed from all."""
    for name, of in computed(renamed).items():
        own = name.rpartition(".")[2]
        for part in of.parts:
            new = renamed[part]
            if new is not None and new.rpartition(".")[2] == own and PARAMETRIZATIONS not in new:
                raise Inconsistent(
                    f"the key map makes {new} of one of the tensors that it is computed from",
                    tensor=part,
                    expected=f"one tensor, computed from {_listed(of.parts)}",
                    hint=f"make it with {of.remove} in the training program, and save again",
                )


def _listed(parts: Sequence[str]) -> str:
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]
