"""From what the user typed to files: run -> checkpoint (step) -> component.

A *run* holds checkpoints in step folders, a *checkpoint* holds components: directly, in role folders (``actor/``), or in
component folders (``pytorch_model_fsdp_0/``). Names alone are looked at here; tracker files are hints, files decide.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.final_model import stray_files
from ckpt_cli.discover.found import Blocked, Found, Place, Target
from ckpt_cli.discover.nodes import doubted, joined_targets
from ckpt_cli.errors import CkptError, CorruptFile, NotFound, NotRecognised, Unreadable, UsageError
from ckpt_cli.files.folders import Folders, entries_in, folders_in, is_file, is_folder, status_of
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.registry import complement, format_of, groups, order_of, recognise
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.unread import refused_tag
from ckpt_cli.names import few, printable

ROLES = ("actor", "policy", "critic", "reward", "value")
"""Folders of a checkpoint that hold one trained model each; the first one present is the main component."""

COMPONENT_FOLDERS = {
    re.compile(r"pytorch_model_fsdp_[0-9]+", re.ASCII): "model",
    re.compile(r"pytorch_ema_model_fsdp_[0-9]+", re.ASCII): "ema",
    re.compile(r"model_sharded|model_and_optim|trainer", re.ASCII): "model",
    re.compile(r"ema_sharded", re.ASCII): "ema",
    re.compile(r"dist_ckpt", re.ASCII): "model",
}
MAIN = ("model", *ROLES[:2])
DIST_CKPT = ("dist_ckpt", "model/dist_ckpt")
RUN_FOLDERS = ("checkpoint", "checkpoints", "ckpt")
"""Where some trainers keep the steps inside of their output folder."""

MAX_NODES = 1024
SYNONYMS = {"regular": "model", "main": "model"}


def locate(path: str | os.PathLike[str], step: int | None = None, also: Sequence[Path] = (), *, steps: bool = False) -> Target:
    """Find out what a path is; ``also`` are folders of other nodes with more files of the same checkpoints.

    ``steps``: steps are asked for, so that a model that lies beside them is not what is meant.
    Raises NotFound or NotRecognised, with what is there and what might have been meant.
    """
    parts = [_locate(Path(path), step, steps)]
    target = parts[0]
    for other in also:
        _check_exists(other)
        if os.path.samefile(path, other):
            raise UsageError(f"--also names the folder itself: {other}", hint="leave it out")
        parts.append(_locate(other, step, steps))
        target = joined_targets(target, parts[-1])
    return doubted(target, parts) if target.run is not None else target


def _locate(given: Path, step: int | None, steps_meant: bool) -> Target:
    _check_exists(given)
    if given.name == "" or ".." in given.parts:
        # "link/.." is not the folder that the link lies in.
        given = given.resolve()
    stray: tuple[str, str] | None = None
    if step is None and not steps_meant:
        inside = _inside_checkpoint(given)
        steps, unknown = _steps_beneath(given) if inside is not None else ((), ())
        if inside is not None and (steps or unknown):
            stray = stray_files(given, [place.match for place in inside.checkpoints[0].places])
        # What is refused by name beside steps, such as one folder of DeepSpeed, does not hide them, and neither does a stray file.
        if inside is not None and stray is None and not (_unread(inside.checkpoints[0].places) and steps):
            return replace(inside, steps_inside=sum(not _unread(found.places) for found in steps))
    for run in (given, *(given / name for name in RUN_FOLDERS)):
        checkpoints, blocked = _steps(run)
        if checkpoints or blocked:
            known = {found.path for found in checkpoints} | {unknown.path for unknown in blocked}
            bare = tuple(folder for folder in _step_folders(run) if folder not in known)
            target = Target(given, run, checkpoints, hints=_tracker_hints(run), bare=bare, blocked=blocked, stray=stray)
            if not checkpoints:
                target.check_readable(lambda _: True)
            return _with_step(target, step)
    if step is not None or steps_meant:
        inside = _inside_checkpoint(given)
        if inside is not None:
            return _with_step(inside, step)
    for name in RUN_FOLDERS:
        inside = _inside_checkpoint(given / name)
        if inside is not None and _unread(inside.checkpoints[0].places):
            return replace(inside, path=given)
    nodes = _node_folders(given, step)
    if nodes is not None:
        return nodes
    raise NotRecognised(
        "no checkpoint was recognised here",
        path=given,
        expected="a run, a step folder, a folder of rank files, or safetensors",
        hint=_suggestion(given),
    )


def expanded(found: Found, files: Files) -> Found:
    """The checkpoint with the state dicts inside of each component as components: a DCP folder may hold several."""
    places = list(found.places)
    taken = {place.name for place in places}
    for place in found.places:
        try:
            names = groups(place.match, files)
        except CkptError as error:
            # What it holds is not known; whoever asks for a component of it is told why.
            if place.match.trouble is None:
                places[places.index(place)] = replace(place, match=replace(place.match, trouble=error))
            continue
        if names and names[0] not in taken and place.name == "model" and (len(names) > 1 or names[0] == "ema"):
            # No state dict is called model, so that the first one goes by its own name.
            taken.add(names[0])
            places[places.index(place)] = replace(place, name=names[0])
        for name in names[1:]:
            if name not in taken:
                taken.add(name)
                places.append(replace(place, name=name, match=replace(place.match, component=name, group=name)))
    return replace(found, places=tuple(places))


def with_ema_of_model(found: Found) -> Found:
    """The checkpoint with its main component under the name "ema" as well, if it has no EMA of its own."""
    model = found.places[0]
    if called_ema(found) is not None:
        return found
    return replace(found, places=(*found.places, replace(model, name="ema")))


def called_ema(found: Found) -> str | None:
    """The component that ``--type ema`` means: the one of that name, or the only one whose name is an average's."""
    there = [place.name for place in found.places]
    averages = ["ema"] if "ema" in there else [name for name in there if is_average_name(name)]
    return averages[0] if len(averages) == 1 else None


def component_names(found: Found, wanted: str | None) -> list[str]:
    """The components that ``--type`` means. Raises NotFound with the list of those that are there."""
    there = [place.name for place in found.places]
    main, ema = there[0], called_ema(found) or "ema"
    if wanted is None:
        return [main]
    if wanted == "all":
        return there
    if wanted == "both":
        names = list(dict.fromkeys((main, ema)))
    else:
        name = ema if wanted == "ema" else SYNONYMS.get(wanted, wanted)
        names = [main if name == "model" and "model" not in there and main != "ema" else name]
    for name in names:
        if name not in there:
            unknown = next(
                (place.match.trouble for place in found.places if format_of(place.match).by_content and place.match.trouble), None
            )
            if unknown is not None:
                raise unknown
            close = difflib.get_close_matches(name, there, n=1)
            raise NotFound(
                f"this checkpoint has no component {name}",
                path=found.path,
                expected=f"one of: {', '.join(there)}",
                hint=f"did you mean --type {close[0]}?" if close else "pass one of these to --type",
            )
    return names


def _check_exists(path: Path) -> None:
    """Raise NotFound, with what was perhaps meant, if nothing is there; Unreadable if that cannot be told."""
    if status_of(path) is not None:
        return
    parent = path.parent
    if path.is_symlink():
        raise NotFound(f"this is a link to {printable(os.readlink(path))}, which is not there", path=path)
    hint = None
    try:
        if status_of(parent) is None:
            hint = f"{parent} does not exist either"
        else:
            there = [entry.name for entry in entries_in(parent) if status_of(entry) is not None]
            close = difflib.get_close_matches(path.name, there, n=1)
            hint = f"did you mean {parent / close[0]}?" if close else f"nothing in {os.path.abspath(parent)} has a name like this"
    except Unreadable:
        pass  # what else is there is only asked for the hint
    raise NotFound("no such file or folder", path=path, hint=hint)


def _inside_checkpoint(path: Path) -> Target | None:
    """The path as a checkpoint, a role folder, a component folder or a file of one."""
    places = _places(path)
    if places:
        name = path.name
        role = name if name in ROLES else next((c for regex, c in COMPONENT_FOLDERS.items() if regex.fullmatch(name)), None)
        root = path.parent if role is not None else path
        if role in ROLES:
            places = tuple(replace(place, name=role if place.name == "model" else place.name) for place in places)
        elif role is not None:
            places = tuple(replace(place, name=role, home=root) for place in places)
        return Target(path, None, (Found(root, step_of(root), places),))
    if not is_file(path):
        return None
    matches = recognise(path)
    if not matches:
        return None
    outer = _inside_checkpoint(path.parent) if matches[0].root == path.parent else None
    if outer is not None:
        found = outer.checkpoints[0]
        chosen = [place for place in found.places if place.match.component == matches[0].component or len(found.places) == 1]
        return Target(path, None, (replace(found, places=tuple(chosen or found.places)),))
    places = tuple(Place(match.component, match, path.parent) for match in matches)
    return Target(path, None, (Found(path, None, places),))


def _places(folder: Path) -> tuple[Place, ...]:
    """The components of a checkpoint folder, the main one first."""
    if not is_folder(folder):
        return ()
    places = [Place(match.component, match, folder) for match in recognise(folder)]
    children = [child.name for child in folders_in(folder, _may_hold_component)]
    for role in ROLES:
        if role in children:
            places += [Place(role, match, folder / role) for match in _of_role(folder / role) if match.component == "model"]
    for child in children:
        for regex, component in COMPONENT_FOLDERS.items():
            if regex.fullmatch(child):
                places += [Place(component, match, folder) for match in recognise(folder / child)]
    read = {place.name for place in places if not _unread([place])}
    places = [place for place in places if not _unread([place]) or place.name not in read]
    return _chosen(places or [Place("model", match, folder) for match in _of_role(folder) or _tags(folder)])


def _of_role(folder: Path) -> list[Match]:
    """What a role folder holds: directly, or in ``dist_ckpt`` where verl's Megatron workers put it."""
    return recognise(folder) or next((found for name in DIST_CKPT if (found := recognise(folder / name))), [])


def _tags(folder: Path) -> list[Match]:
    """What DeepSpeed or Megatron keep one level below a checkpoint's folder, in a folder of any name, such as ``global_step500``.

    Of a folder that is no step, step folders are its steps and not this.
    """
    is_step = step_of(folder) is not None
    for child in entries_in(folder)[:MAX_NODES]:
        if is_step or step_of(child) is None:
            # What cannot be looked at beside it may be anything, and no weights are taken from here in any case.
            with contextlib.suppress(Unreadable):
                found = refused_tag(child, Folders())
                if found:
                    return found
    return []


def _unread(places: Sequence[Place]) -> bool:
    """Whether these are formats that are refused by name."""
    return all(format_of(place.match).is_refused for place in places)


def _may_hold_component(name: str) -> bool:
    return name in ROLES or any(regex.fullmatch(name) for regex in COMPONENT_FOLDERS)


def _chosen(places: Sequence[Place]) -> tuple[Place, ...]:
    """One place per component, the main one first. Where two formats claim a name, shards go before merged weights."""
    unique: dict[str, Place] = {}
    for place in sorted(places, key=lambda place: order_of(place.match)):
        first = unique.setdefault(place.name, place)
        if first is not place:
            passed = f"{place.match.evidence} ({place.match.format})"
            unique[place.name] = replace(first, passed_over=(*first.passed_over, passed))
    return tuple(sorted(unique.values(), key=lambda place: MAIN.index(place.name) if place.name in MAIN else len(MAIN)))


def _step_folders(run: Path) -> list[Path]:
    """What is called like a step of a run, by name: folders, and what cannot be looked at."""
    folders = []
    for path in entries_in(run):
        if step_of(path) is not None:
            with contextlib.suppress(Unreadable):
                if not is_folder(path):
                    continue
            folders.append(path)
    return folders


def _steps(folder: Path) -> tuple[tuple[Found, ...], tuple[Blocked, ...]]:
    """The checkpoints in the step folders of a run, by step number; and the step folders that cannot be looked at."""
    found: list[Found] = []
    blocked: list[Blocked] = []
    for path in _step_folders(folder):
        step = step_of(path) or 0
        try:
            places = _places(path)
        except Unreadable as error:
            blocked.append(Blocked(path, step, error))
            continue
        if places:
            found.append(Found(path, step, places))
    return tuple(sorted(found, key=lambda checkpoint: (checkpoint.step or 0, checkpoint.path.name))), tuple(blocked)


def _steps_beneath(given: Path) -> tuple[tuple[Found, ...], tuple[Blocked, ...]]:
    """The steps in a folder, or in the one inside of it where some trainers keep them."""
    if not is_folder(given):
        return (), ()
    return next((found for name in ("", *RUN_FOLDERS) if any(found := _steps(given / name))), ((), ()))


def _node_folders(parent: Path, step: int | None) -> Target | None:
    """A folder whose subfolders are the nodes of one training, each with its own ranks' files of the same checkpoints."""
    targets: list[Target] = []
    unknown: Unreadable | None = None
    seen = 0
    for path in entries_in(parent):
        try:
            if not is_folder(path):
                continue
            seen += 1
            if seen > MAX_NODES:
                break
            checkpoints, blocked = _steps(path)
            inside = Target(path, path, checkpoints, blocked=blocked) if checkpoints or blocked else _inside_checkpoint(path)
        except Unreadable as error:
            unknown = unknown or error
            continue
        if inside is not None:
            targets.append(inside)
    if len(targets) < 2:
        return None
    if unknown is not None:
        # It may be one more node.
        raise unknown
    for node in targets:
        if not node.checkpoints:
            node.check_readable(lambda _: True)
    # The newest step that all of them have decides; the last save may have ended on some nodes only.
    by_step = [{found.step: found for found in target.checkpoints} for target in targets]
    shared = [step for step in by_step[0] if all(step in listed for listed in by_step)]
    if not shared:
        return None
    first, *twins = (listed[shared[-1]].places[0].match for listed in by_step)
    if not all(complement(first, twin) for twin in twins):
        return None
    if seen > MAX_NODES:
        raise NotRecognised(
            f"there are more than {MAX_NODES} folders, and some of those that were looked into hold parts of one checkpoint",
            path=parent,
            expected=f"at most {MAX_NODES} folders",
            hint="pass one node's folder, and those of the others with --also",
        )
    whole = targets[0]
    for other in targets[1:]:
        whole = joined_targets(whole, other)
    whole = doubted(whole, targets)
    return _with_step(replace(whole, path=parent, run=parent, nodes=len(targets)), step)


def _with_step(target: Target, step: int | None) -> Target:
    if step is None:
        return target
    blocked = next((blocked for blocked in target.blocked if blocked.step == step), None)
    if blocked is not None:
        raise blocked.error
    chosen = tuple(found for found in target.checkpoints if found.step == step)
    bare = next((folder for folder in target.bare if step_of(folder) == step), None)
    if bare is not None and not chosen:
        raise NotFound("nothing in this step folder is recognised as weights", path=bare)
    if len(chosen) > 1:
        names = ", ".join(found.path.name for found in chosen)
        raise UsageError(f"step {step} is there more than once: {names}", path=target.path, hint="pass the folder itself")
    if not chosen:
        there = ", ".join(str(found.step) for found in target.checkpoints if found.step is not None)
        raise NotFound(f"there is no step {step}", path=target.path, expected=f"one of the steps {there}" if there else None)
    return replace(target, checkpoints=chosen)


def _tracker_hints(run: Path) -> tuple[str, ...]:
    """What tracker files say the last step is; never trusted, only shown when the files disagree."""
    hints = []
    for name in ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt", "latest_global_step.txt"):
        if not is_file(run / name):
            continue
        try:
            text = read_small(run / name, 1 << 10).decode("ascii", "replace").strip()
        except (NotFound, CorruptFile):
            continue  # one that is too long says nothing
        if text.isascii() and text.isdigit():
            hints.append(f"{name} says {int(text)}")
    return tuple(hints)


def _suggestion(path: Path) -> str | None:
    """The nearest folder, one or two levels down or one level up, in which something is recognised; else what is there."""
    try:
        folder = path if is_folder(path) else path.parent
        entries = entries_in(folder)
    except Unreadable:
        return None
    for candidate in [folder, *entries[:200], folder.parent]:
        try:
            if is_folder(candidate) and not os.path.samefile(candidate, path) and (_places(candidate) or _steps(candidate)[0]):
                # "." says nothing to somebody who just typed a path in it.
                return f"did you mean {candidate if candidate.name else os.path.abspath(candidate)}?"
        except (CkptError, OSError):
            continue  # what cannot be looked at is not suggested
    return f"the folder holds {few([entry.name for entry in entries], 5)}" if entries else "the folder is empty"
