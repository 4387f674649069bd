"""Megatron's torch_dist steps: DCP folders whose keys stack layers and experts, with what is not sharded beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard
from ckpt_cli.files.folders import Folders, entries_in, is_file, is_folder
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Match, ReadOptions
from ckpt_cli.formats.dcp.groups import Group
from ckpt_cli.formats.dcp.metadata import METADATA, RANK_METADATA, CatalogTensor, named_metadata
from ckpt_cli.formats.dcp.reader import Dcp, doubts_of_save, lost_metadata, notes_of_objects, notes_of_other_saves
from ckpt_cli.formats.megatron.common import SHOWN, Common
from ckpt_cli.formats.megatron.native import is_state
from ckpt_cli.formats.megatron.run_config import with_settings
from ckpt_cli.formats.megatron.signs import BACKEND, COMMON, TORCH_DIST, backend_of, is_step, trouble_of
from ckpt_cli.formats.megatron.step import Step, data_files
from ckpt_cli.formats.megatron.training import of_step, optimizer_of_step, steps_beside
from ckpt_cli.formats.optimizer_state import NamedState
from ckpt_cli.names import is_extra_state, plural
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Component, Leaf, Note
from ckpt_cli.tensors.plain_values import Unrepresented, to_json
from ckpt_cli.tensors.tensor import Tensor

FORMAT = "megatron-dist"
MASTER = "master"
"""The component of the float32 masters that an optimizer keeps of bf16 weights."""

NOTED = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_experts", "padded_vocab_size")
"""Arguments by which tensors are cut."""

ITERATION_FOLDER = re.compile(r"iter_(?P<iteration>[0-9]{7})", re.ASCII)


class TorchDist(Dcp):
    """Reader of steps that Megatron core's dist_checkpointing wrote."""

    name = FORMAT
    display = "Megatron torch_dist"

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        is_part = path.name in (METADATA, COMMON) or RANK_METADATA.fullmatch(path.name) or path.suffix == ".distcp"
        folder = path.parent if is_part else path
        if not is_step(folder, there):
            return []
        found = named_metadata(folder, there)
        items = tuple(entry for entry in there.entries(folder) if entry.suffix == ".distcp")
        trouble = trouble_of(folder, there)
        if trouble is None and not found:
            trouble = lost_metadata(folder, there)
        if isinstance(trouble, MissingShard) and not found and not items:
            return []
        return [Match(FORMAT, "model", folder, items or tuple(found), self.display, trouble=trouble)]

    def takes(self, other: Match) -> bool:
        # What names the backend is on the node of rank 0 only; files of other nodes are those of any DCP folder.
        return other.format in (FORMAT, Dcp.name)

    def of_save(self, match: Match, there: Folders) -> list[Path]:
        return [path for root in (match.root, *match.more_roots) if there.is_file(path := root / COMMON)]

    def groups(self, match: Match, files: Files) -> list[str]:
        if match.trouble is not None:
            return []
        return ["model", MASTER] if _opened(match, files).masters is not None else ["model"]

    def training_state(self, match: Match, files: Files) -> tuple[dict[str, Any], Path]:
        step = _opened(match, files)
        _check_iteration(step.common, match)
        beside = [of_step(other) for other in steps_beside(match.root, files)]
        return {name: value for held in (*beside, of_step(step)) for name, value in held.items()}, match.root

    def doubts(self, match: Match, files: Files) -> list[Note]:
        step = _opened(match, files)
        _check_iteration(step.common, match)
        return doubts_of_save(step.catalog, match, step.reader, files)

    def ranks_told(self, match: Match, files: Files) -> int | None:
        step = _opened(match, files)
        return _world(step) or step.catalog.ranks

    def optimizer(self, match: Match, files: Files) -> NamedState | None:
        steps = [_opened(match, files), *steps_beside(match.root, files)]
        return next((state for step in steps if (state := optimizer_of_step(step)) is not None), None)

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        step = _opened(match, files)
        entries = step.model
        if not entries:
            text, hint = "the step holds no tensor that could be a weight", _weights_beside(match.root)
            raise CorruptFile(text, path=match.root, expected="a model's tensors", hint=hint)
        _check_iteration(step.common, match)
        notes: list[Note] = []
        masters = step.slots[step.masters] if match.group == MASTER and step.masters is not None else {}
        if masters:
            tensors, notes = _masters(step, masters)
        else:
            tensors = step.tensors(entries)
        used = data_files((*entries.values(), *masters.values()))
        step.reader.check_ends(step.catalog, used)
        objects = {key: thing for key, thing in step.catalog.objects.items() if not is_state(key)}
        notes += notes_of_objects(Group("model", self.display, entries, objects), step.reader, match.root)
        notes += notes_of_other_saves(step.catalog, match, used, step.reader, files)
        leaves = [Leaf(key, "stored object") for key in step.catalog.objects if is_extra_state(key)]
        return Component(
            name=match.component,
            format=FORMAT,
            root=match.root,
            tensors=tensors,
            files=tuple(step.reader.path(file) for file in used),
            world_size=_world(step),
            mesh=next((mesh for other in (step, *steps_beside(match.root, files)) if (mesh := other.mesh) is not None), None),
            leaves=(*leaves, *argument_leaves(step.common)),
            notes=(*notes, *step.unused.notes, *_form_notes(step)),
            writer=self.display,
            arguments=with_settings(step.common.arguments, match.root, files),
        )


def _weights_beside(root: Path) -> str | None:
    """Where verl has the weights if it saves them as a Hugging Face folder, and only optimizer and random states in ``dist_ckpt``."""
    folder = root.parent / "huggingface"
    there = is_folder(folder) and any(path.suffix == ".safetensors" for path in entries_in(folder))
    return f"pass {folder}, which holds weights" if there else None


def argument_leaves(common: Common) -> list[Leaf]:
    """The arguments that say what the weights are, as entries that are no tensors."""
    held = {name: common.arguments[name] for name in SHOWN if name in common.arguments}
    return [Leaf(f"args.{name}", str(to_json(value))) for name, value in held.items() if not isinstance(value, Unrepresented)]


def check_iteration(common: Common, folder: Path, expected: int | None) -> None:
    """Raise Inconsistent if what lies beside the tensors is of another iteration than the folder, or than other files."""
    said = common.iteration
    if said is not None and expected is not None and said != expected:
        raise Inconsistent(
            f"the folder is of iteration {expected}, the state in it is of {said}: files of two saves are mixed",
            path=folder,
            expected=f"iteration {expected} everywhere",
            hint=f"if all its files are of iteration {said}, call it iter_{said:07d}",
        )


def iteration_of(folder: Path) -> int | None:
    """The iteration in the name of a step's folder."""
    fields = ITERATION_FOLDER.fullmatch(Path(absolute(folder)).name)
    return int(fields["iteration"]) if fields is not None else None


def _check_iteration(common: Common, match: Match) -> None:
    check_iteration(common, match.root, iteration_of(match.root))


def _opened(match: Match, files: Files) -> Step:
    if match.trouble is not None:
        raise match.trouble
    backend = match.root / BACKEND
    if is_file(backend):
        files.watch(backend)
        if backend_of(match.root, Folders()) is None:
            raise CorruptFile("it names no backend", path=backend, expected=f'{{"sharded_backend": "{TORCH_DIST}", ...}}')
    return Step.opened((match.root, *match.more_roots), files)


def _world(step: Step) -> int | None:
    world = step.common.arguments.get("world_size")
    return world if type(world) is int and world > 0 else None


def _form_notes(step: Step) -> list[Note]:
    form = f"optimizer {step.optimizer_form}" if step.optimizer_form is not None else "no optimizer"
    return [step_note(step.common, form)]


def step_note(common: Common, form: str) -> Note:
    """What is said of a step: iteration, the ``form`` of what else it holds, and the arguments by which tensors are cut."""
    said = [] if common.iteration is None else [f"iteration {common.iteration}"]
    said.append(form)
    held = common.arguments
    said += [f"{name} {held[name]}" for name in NOTED if held.get(name) is not None] if held else ["no arguments of the run"]
    return Note("info", "megatron", f"Megatron step: {', '.join(said)}")


def _masters(step: Step, held: Mapping[str, CatalogTensor]) -> tuple[dict[str, Tensor], list[Note]]:
    """The float32 masters; what the optimizer does not hold (buffers such as a router's bias) is the model's own."""
    tensors, weights = step.tensors(held), step.tensors({key: entry for key, entry in step.model.items() if key not in held})
    foreign = sorted(held.keys() - step.model.keys())
    if foreign:
        raise Inconsistent("the optimizer has a master of a tensor that the model lacks", path=step.roots[0], tensor=foreign[0])
    others = plural(len(weights), "tensor that it does not hold is", "tensors that it does not hold are")
    text = f"float32 masters of the optimizer; {others} the model's"
    return {**tensors, **weights}, [Note("info", "masters", text)] if weights else []
