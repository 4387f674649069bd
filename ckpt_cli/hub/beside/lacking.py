"""What is said of the files beside the weights of an output that are not there, and where they may come from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.hub.assets import CONFIG, HUB_FOLDER, MODULES, Assets, Lost
from ckpt_cli.hub.beside.listed import MOST_INNER, Seen, home_of, json_of
from ckpt_cli.hub.beside.model_config import DOUBTFUL
from ckpt_cli.hub.beside.names import OWN_CONFIGS
from ckpt_cli.hub.beside.processors import OF_VIDEOS, PREPROCESSOR, PROCESSOR
from ckpt_cli.hub.beside.tokenizers import TokenizerFiles, has_vocabulary
from ckpt_cli.hub.beside.whole import tokenizer_of
from ckpt_cli.hub.custom_code import code_of, lacking_names, missing_code
from ckpt_cli.hub.sentences.parts import part_notes, parts_of
from ckpt_cli.names import few, printable
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Note

PACKED, COMPONENTS = "MLmodel", "components"
"""What MLflow describes a model in, and the folder of all but its weights and config."""


def lacking_notes(assets: Assets, base: Path | None, output: Path) -> list[Note]:
    """What a model that is written lacks to be usable, and where it may come from. An output added to a folder has what is in that."""
    notes, partial = list[Note](), tokenizer_of(assets.files, assets.config)
    notes += [*no_config_notes(assets), *aside_notes(assets)]
    lacking = [what.removeprefix("a ").removeprefix("an ") for what in assets.lacking if what not in partial.lacking]
    own = next((name for name in OWN_CONFIGS if name in assets.files), None)
    if own is not None and CONFIG in lacking:
        lacking.remove(CONFIG)
        notes.append(
            Note("info", "own-config", f"there is no {CONFIG}: {OWN_CONFIGS[own]} builds the model from {own}, which is beside it")
        )
    told = [path for path in assets.broken if _stands_for(path.name, [*lacking, *partial.lacking])]
    for path in (path for path in assets.broken if path not in told):
        instead = f": {assets.files[path.name]} was taken" if path.name in assets.files else ""
        notes.append(Note("warning", "lacks-asset", f"{broken_text(path)}{instead}"))
    broken = "; ".join(map(broken_text, told))
    if lacking:
        text = f"the output has no {' and no '.join(lacking)}: {broken or _cure(assets, base, lacking)}"
        notes.append(Note("warning", "lacks-asset", text))
    if files := partial.lacking:
        cure = (broken if not lacking else "") or _cure(assets, base, files)
        notes.append(Note("warning", "partial-tokenizer", f"{partial_text(partial)}: {cure}"))
    return [*notes, *_notes_of_any(assets, output)]


def lacking_beside_adapter(assets: Assets, output: Path) -> list[Note]:
    """What a folder of adapters lacks of the files that its ``assets`` name, or that others need.

    It needs neither a config.json nor a tokenizer, since it is loaded on a model that has both; a tokenizer of its own must be whole.
    """
    partial = tokenizer_of(assets.files, assets.config)
    notes = [Note("warning", "lacks-asset", broken_text(path)) for path in assets.broken]
    if partial.lacking:
        them = _them(partial.lacking)
        text = f"{partial_text(partial)}: copy {them} from the model that training started from, or load its tokenizer"
        notes.append(Note("warning", "partial-tokenizer", text))
    return [*notes, *_notes_of_any(assets, output)]


def _notes_of_any(assets: Assets, output: Path) -> list[Note]:
    """What is said of the files beside the weights of any output, a whole model or not."""
    notes = lost_notes(assets)
    if assets.unused:
        text = f"the tokenizer is that of the base: the run has only {few(assets.unused)}, which alone is no tokenizer"
        notes.append(Note("warning", "tokenizer-of-base", text))
    notes += assets.choices
    for modules, beside in code_of(assets.files):
        configs = json_of(beside, Seen())
        if code := missing_code(modules, configs):
            text = f"{few(code)}, which auto_map or another module names, is not among the files: the model does not load without"
            notes.append(Note("warning", "lacks-code", text))
        if names := lacking_names(modules, configs):
            text = f"{few(names)}, which auto_map or another module names, is not in the file: it was cut off, or is another one"
            notes.append(Note("warning", "lacks-code", text))
    if MODULES in assets.files and not _is_same(assets.files[MODULES].parent, output):
        notes += part_notes(assets.files)
    return notes


def partial_text(tokenizer: TokenizerFiles) -> str:
    """What a tokenizer that is not whole lacks."""
    files = tokenizer.lacking
    return f"the tokenizer is not whole: {tokenizer.kind} also reads {few(files)}, which {'is' if len(files) == 1 else 'are'} not there"


def no_config_notes(assets: Assets) -> list[Note]:
    """What is said of files named config.json that were passed over. Where another was taken, only a doubtful one is a warning."""
    there, notes = assets.files.get(CONFIG), []
    for path, what in assets.no_configs.items():
        instead = f"that of {there.parent} was taken" if there is not None else "it was not copied"
        is_warning = there is None or what.startswith(DOUBTFUL)
        text = f"{path} is no config of a model, it holds {what}: {instead}"
        notes.append(Note("warning" if is_warning else "info", "no-model-config", text))
    return notes


def aside_notes(assets: Assets) -> list[Note]:
    """What is said of files that may be weights of other forms."""
    if not assets.aside:
        return []
    named = few(sorted(map(str, assets.aside)), 5)
    text = f"not copied, since these may hold other weights, are pickles, or are copies that were put aside: {named}"
    return [Note("info", "put-aside", text)]


def lost_notes(assets: Assets, into: str = "the merged folder") -> list[Note]:
    """A warning about files that another step of the run has, and that neither this one nor its base has; ``into`` needs them."""
    lost = sorted(assets.lost.files)
    if not lost:
        return []
    text = f"the step lacks {few(lost, 5)}, which {assets.lost.step} has: {_copied(assets.lost, lost, into)}"
    return [Note("warning", "fewer-files", text)]


def _cure(assets: Assets, base: Path | None, lacking: Sequence[str]) -> str:
    """Where what is lacking may come from: another step that has it, or the base, which has none if it was passed."""
    if all(any(_stands_for(name, [what]) for name in assets.lost.files) for what in lacking):
        return f"{assets.lost.step} has {_them(lacking)}: {_copied(assets.lost, lacking)}"
    if base is not None and (there := _packed(base, lacking)):
        return there
    if base is not None and "tokenizer" in lacking and (folders := tokenizers_below(base)):
        names = few([f"{folder.name}/" for folder in folders], 4)
        return f"the base has {'one' if len(folders) == 1 else 'some'} in {names}: copy from there what the model is loaded with"
    if base is not None:
        return f"the base has none either; copy {_them(lacking)} from the model that training started from"
    return "pass --base DIR with the model that training started from"


def _packed(base: Path, lacking: Sequence[str]) -> str | None:
    """Where in a base its model and tokenizer lie, if some program packed each into a folder of its own; None if nothing is found.

    MLflow has the model in ``model/`` and the tokenizer in ``components/tokenizer/`` beside it.
    """
    there, models, tokenizers = Folders(), list[Path](), list[Path]()
    with contextlib.suppress(CkptError):  # only looked at for a message
        if CONFIG in lacking:
            inner = there.folders(base, lambda name: name != HUB_FOLDER)[:MOST_INNER]
            models = [folder for folder in inner if there.is_file(folder / CONFIG)]
        if "tokenizer" in lacking and not (models and has_vocabulary(path.name for path in there.files(models[0]))):
            top = base.parent if there.is_file(base.parent / PACKED) else base
            tokenizers = tokenizers_below(top / COMPONENTS) if there.is_folder(top / COMPONENTS) else []
    copies = f"copy the tokenizer from {few([str(folder) for folder in tokenizers], 4)}" if tokenizers else None
    passed = f"the base has its model in {models[0].name}/: pass --base {shell.path(models[0])}" if len(models) == 1 else None
    return ", and ".join(filter(None, (passed, copies))) or None


def tokenizers_below(base: Path) -> list[Path]:
    """The folders of a base that hold a tokenizer: a model with several, such as RAG, has a folder for each."""
    there = Folders()
    with contextlib.suppress(CkptError):  # only looked at for a message
        inner = there.folders(base, lambda name: not name.startswith(".") and name != HUB_FOLDER)[:MOST_INNER]
        return [folder for folder in inner if has_vocabulary(path.name for path in there.files(folder))]
    return []


def _copied(lost: Lost, what: Sequence[str], into: str = "the merged folder") -> str:
    return f"copy {_them(what)} from {few(sorted({str(home_of(name, path)) for name, path in lost.files.items()}))} into {into}"


def _them(what: Sequence[str]) -> str:
    return "it" if len(what) == 1 else "both" if len(what) == 2 else "them"


def _stands_for(name: str, lacking: Sequence[str]) -> bool:
    """Whether a file is what is lacking, or makes that."""
    processors = any(what.endswith(("processor", "extractor")) for what in lacking) and name in (PREPROCESSOR, PROCESSOR, OF_VIDEOS)
    return name in lacking or processors or ("tokenizer" in lacking and has_vocabulary([name]))


def _is_same(one: Path, other: Path) -> bool:
    return absolute(one) == absolute(other)


def broken_text(path: Path) -> str:
    """What is said of a link that leads nowhere."""
    return f"{path} is a link to {os.readlink(path)}, which does not exist"


def parts_elsewhere(assets: Assets) -> list[str]:
    """The folders of a model of sentence-transformers: pooling, and dense layers with weights of their own."""
    return [printable(part) for part in parts_of(assets.files[MODULES])] if MODULES in assets.files else []
