"""Whether checkpoints hold the same tensors, and which of these are averaged, copied or refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_cli import shell
from ckpt_cli.averaging.buffers import buffer_notes, is_equal_mask, refuse_other_masks
from ckpt_cli.averaging.companions import leaning
from ckpt_cli.errors import DifferentTensors, Unsupported
from ckpt_cli.hub.classes.computed.coded_floats import coded_floats
from ckpt_cli.hub.classes.dtypes import quantised_names
from ckpt_cli.names import few, plural, printable
from ckpt_cli.output.plan import Combination
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_values
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.weighted_sum import BITS, Formula


@dataclass(frozen=True, slots=True)
class Agreed:
    """Tensors of the output (those of the newest checkpoint), how averaged ones are computed, and what was left out."""

    tensors: dict[str, Tensor]
    combinations: dict[str, Combination]
    dropped: dict[str, str]
    notes: tuple[Note, ...]


def agree(
    held: Sequence[Mapping[str, Tensor]],
    labels: Sequence[str],
    formula: Formula,
    *,
    intersect: bool = False,
    strict: bool = False,
    quantised: bool = False,
    needed: Callable[[dict[str, Tensor], Collection[str]], Sequence[str]] = lambda _, __: (),
) -> Agreed:
    """Decide about every tensor that the checkpoints ``held`` (name -> tensor, old to new) share.

    Floating tensors are averaged; others are copied if they are equal, integers that differ are the newest's (``strict``:
    refused), quantised weights that differ are refused, and so are masks, indices and the like that say what floats mean; of
    floats, masks of torch's pruning.
    ``needed`` says which tensors a model of the common ones would lack, of those that are left out: --intersect is no way out
    then. Raises DifferentTensors if names, shapes or dtypes differ, unless ``intersect`` keeps the common part; Unsupported for
    quantised or compressed weights that differ.
    """
    differences = _differences(held, labels)
    common = [name for name in held[-1] if all(name in tensors for tensors in held) and name not in differences]
    if differences and not intersect:
        alike = sum(held[-1][name].dtype.code in BITS for name in common)
        lacking = needed({name: held[-1][name] for name in common}, differences.keys()) if alike else ()
        matching = plural(alike, "tensor that matches", "tensors that match")
        hints = [f"pass --intersect to average the {matching}"] if alike and not lacking else []
        if lacking:
            hints.append(f"--intersect would leave out {few(lacking, 2)}, which the model needs")
        if all(_castable(name, held) for name in differences):
            hints.append("merge the others with --dtype first")
        raise DifferentTensors(
            f"the checkpoints do not hold the same tensors: {len(differences)} differ",
            details=[f"{name}: {what}" for name, what in differences.items()],
            expected="the same names, shapes and dtypes in all of them",
            hint=", or ".join(hints) or None,
        )
    if not common:
        raise DifferentTensors("the checkpoints have no tensor in common", expected="checkpoints of one model")
    fixed = quantised_names(held[-1], quantised) | coded_floats(held[-1])
    combinations: dict[str, Combination] = {}
    newest: list[str] = []
    kept = {index for index, weight in enumerate(formula.weights) if weight}
    used = formula.without_zeros()
    for name in common:
        tensors = tuple(tensors[name] for tensors in held)
        if tensors[-1].dtype.code in BITS and name not in fixed and not is_equal_mask(name, tensors):
            combinations[name] = Combination(tuple(tensor for index, tensor in enumerate(tensors) if index in kept), used)
            continue
        alone = [replace(tensor, alias_of=None) for tensor in tensors]
        differing = next((index for index, tensor in enumerate(alone) if not same_values(tensor, alone[-1])), None)
        if differing is None:
            continue
        fake = _fakes(held[-1]) if name in fixed else {}
        if name.rpartition(".")[0] in fake:
            options = " ".join(f"--exclude {shell.word(pattern)}" for pattern in dict.fromkeys(fake.values()))
            raise Unsupported(
                f"scales and zero points of fake quantisation belong together, and those of {labels[differing]} and {labels[-1]} differ",
                tensor=name,
                expected="equal values in all checkpoints, or weights without them",
                hint=f"average the weights alone with {options}",
            )
        if name in fixed or tensors[-1].dtype.kind == "opaque":
            raise Unsupported(
                f"quantised weights are not averaged, and those of {labels[differing]} and {labels[-1]} differ",
                tensor=name,
                expected="equal values in all checkpoints, or weights that are not quantised",
                hint="average the checkpoints from before quantisation, or leave the tensor out with --exclude",
            )
        floats = leaning(name, held[-1])
        if floats is not None:
            raise Unsupported(
                f"it says what {printable(floats)} means, and those of {labels[differing]} and {labels[-1]} differ",
                tensor=name,
                expected="equal values in all checkpoints, or weights that are not compressed",
                hint="average the checkpoints from before compression, or leave both out with --exclude",
            )
        if strict:
            raise DifferentTensors(
                f"{tensors[-1].dtype} values are not averaged, and those of {labels[differing]} and {labels[-1]} differ",
                tensor=name,
                hint=f"without --strict those of {labels[-1]} are used",
            )
        newest.append(name)
    refuse_other_masks(combinations)
    if differences and not combinations:
        raise DifferentTensors("nothing is left to average: the checkpoints share no floating tensor", expected="checkpoints of one model")
    notes = []
    if newest:
        text = f"{few(newest)}: not averaged because of their dtype and not equal everywhere; taken from {labels[-1]}"
        notes.append(Note("warning", "newest-taken", text))
    notes += buffer_notes(combinations)
    dropped = {name: f"left out by --intersect: {what}" for name, what in differences.items()}
    return Agreed({name: held[-1][name] for name in common}, combinations, dropped, tuple(notes))


def _fakes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The modules of torch.ao that round weights or activations in a training, with patterns for all that is in them."""
    modules = [module for module, _, leaf in (name.rpartition(".") for name in tensors) if leaf == "fake_quant_enabled"]
    return {module: f"*{module.rpartition('.')[2]}.*" for module in modules}


def _differences(held: Sequence[Mapping[str, Tensor]], labels: Sequence[str]) -> dict[str, str]:
    """Name -> what differs between checkpoints, in the order of the newest one."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for tensors in reversed(held) for name in tensors):
        lacking = [label for label, tensors in zip(labels, held, strict=True) if name not in tensors]
        if lacking:
            found[name] = f"not in {few(lacking)}"
            continue
        for what, values in (
            ("shape", [list(tensors[name].shape) for tensors in held]),
            ("dtype", [tensors[name].dtype.code for tensors in held]),
        ):
            other = next((i for i, value in enumerate(values) if value != values[-1]), None)
            if other is not None:
                found[name] = f"{what} {values[other]} in {printable(labels[other])}, {values[-1]} in {printable(labels[-1])}"
                break
    return found


def _castable(name: str, held: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether a tensor differs only in its floating dtype, which a merge can change."""
    found = [tensors[name] for tensors in held if name in tensors]
    return len(found) == len(held) and len({tensor.shape for tensor in found}) == 1 and all(t.dtype.kind == "float" for t in found)
