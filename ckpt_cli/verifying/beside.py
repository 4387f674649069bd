"""Header level of `verify` for files beside the weights: unreadable or cut files, what a server said instead, half a tokenizer.

Files that ckpt wrote have a checksum in its manifest.
"""

from __future__ import annotations

import contextlib
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ckpt_cli.discover.forms.tensors_beside import tensors_beside
from ckpt_cli.errors import CkptError, Unsupported
from ckpt_cli.files.folders import files_in, is_file, status_of, stays_inside
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import Manifest
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.files.zip_archive import ZipMap
from ckpt_cli.hub.assets import CONFIG, MODULES
from ckpt_cli.hub.beside.lacking import broken_text, partial_text
from ckpt_cli.hub.beside.listed import Seen, json_of, listed
from ckpt_cli.hub.beside.named import named_by
from ckpt_cli.hub.beside.names import NO_ASSETS, TOKENIZER_CONFIG, has_weight_suffix, is_asset_name
from ckpt_cli.hub.beside.near_names import is_near_some, near_names
from ckpt_cli.hub.beside.tokenizers import is_trace
from ckpt_cli.hub.beside.whole import lacking_processors, tokenizer_of
from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.custom_code import code_of, lacking_names, missing_code
from ckpt_cli.hub.loaded_with.read_by_class import files_read
from ckpt_cli.hub.loaded_with.read_by_processor import lacking_of_processors, processor_classes, read_by_processors
from ckpt_cli.hub.sentences.parts import lost_own_weights, parts_gone, parts_of, parts_without_weights, routers_without_file
from ckpt_cli.hub.text_assets import TEXTS, check_filled, check_text
from ckpt_cli.names import few, plural, printable
from ckpt_cli.results.verify import Finding
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.verifying.findings import finding, unread

OF_WEIGHTS = (".safetensors", ".pt", ".bin", ".pth", ".th")
"""Side files that hold weights: large, and only read with ``--full``."""

MAX_TEXT = 1 << 30
ZIP = b"PK\x03\x04"


def check_beside(folder: Path, written: Iterable[str] = ()) -> Iterator[Finding]:
    """Problems for loaders in tokenizer, processor, custom code and the like. The config has its own checks.

    ``written`` are the files that a manifest lists, among them some whose names tell nothing.
    """
    assets = {path.name: path for path in files_in(folder, is_asset_name)}
    named = (name for name in written if stays_inside(name) and NO_ASSETS.fullmatch(name) is None)
    files = {**assets, **{name: folder / name for name in named if is_file(folder / name)}}
    try:
        found = listed(folder, Seen(), everything=False)
        files |= found.files
        for path in found.broken:
            yield finding("damaged-side-file", broken_text(path), file=path.relative_to(folder).as_posix())
    except CkptError as error:
        yield unread("damaged-side-file", error, Path(error.path or folder).name)
    yield from damaged_files(files)
    yield from _incomplete(assets)
    yield from _without_named(folder, files)
    yield from _without_code(files)
    yield from _without_parts(folder)
    for name, paths in near_names(files_in(folder, is_near_some), files, files).items():
        yield from (finding("near-name", f"no loader reads it under this name, and there is no {name}", file=path.name) for path in paths)


def damaged_files(files: Mapping[str, Path], *, written: bool = True) -> Iterator[Finding]:
    """Side files by name that hold something else than their names say, or a part of it. The config has its own checks."""
    for name, path in files.items():
        if name in (CONFIG, MANIFEST) or has_weight_suffix(name):
            continue
        try:
            check_filled(path)
            if path.suffix in TEXTS:
                check_text(path, written=written)
        except CkptError as error:
            yield unread("damaged-side-file", error, name)


def _incomplete(files: Mapping[str, Path]) -> Iterator[Finding]:
    """What a folder with files of a tokenizer lacks to make inputs of the model. One without any is not loaded with a tokenizer."""
    if not any(map(is_trace, files)):
        return
    config: Config = {}
    with contextlib.suppress(CkptError):  # it has its own checks
        config = read_config(files[CONFIG]) if CONFIG in files else {}
    tokenizer = tokenizer_of(files, config)
    said = TOKENIZER_CONFIG if TOKENIZER_CONFIG in files else next(filter(is_trace, files))
    if tokenizer.lacking:
        yield finding("partial-tokenizer", partial_text(tokenizer), file=said)
    elif not tokenizer.there and tokenizer.kind:
        there = few([name for name in files if is_trace(name)])
        yield finding("partial-tokenizer", f"beside {there} there is no vocabulary that {printable(tokenizer.kind)} reads", file=said)
    processors = lacking_processors(files, config)
    if processors:
        text = f"{printable(architecture(config) or '')} is loaded with {' and '.join(processors)}, and no file holds {_any(processors)}"
        yield finding("lacks-processor", text, file=CONFIG)


def _without_named(folder: Path, files: Mapping[str, Path]) -> Iterator[Finding]:
    """Files that others name and do not load without, and that are not there."""
    for lack in named_by(files).lacking:
        if not is_file(lack.place):
            yield finding("lacks-named-file", f"{printable(lack.name)}, which it names, is not there", file=lack.by.name)
    kinds = {kind: by for kind, by in processor_classes(files, {}).items() if by != CONFIG}
    for name, kind in lacking_of_processors(kinds, {*files, *read_by_processors(kinds, [folder])}).items():
        yield finding("lacks-named-file", f"{name}, which {kind} reads, is not there", file=kinds[kind])


def _without_code(files: Mapping[str, Path]) -> Iterator[Finding]:
    """Code that configs or other code name, and that is not there. What cannot be read is found by other checks."""
    with contextlib.suppress(CkptError):
        for modules, beside in code_of(files):
            configs = json_of(beside, Seen())
            for code, where in ((missing_code(modules, configs), "there"), (lacking_names(modules, configs), "in the file")):
                verb = "is" if len(code) == 1 else "are"
                if code:
                    yield finding("lacks-code", f"{few(code)}, which auto_map or another module names, {verb} not {where}", file=CONFIG)


def _without_parts(folder: Path) -> Iterator[Finding]:
    """Folders of a model of sentence-transformers that are not there, lack their weights, or hold a damaged config.

    Where another part is the only one with weights, that is the ``folder``: the model is the one around it.
    """
    modules, shown = folder / MODULES, MODULES
    if not is_file(modules) and folder.name in parts_of(folder.parent / MODULES):
        folder, modules, shown = folder.parent, folder.parent / MODULES, f"../{MODULES}"
        if lost_own_weights(modules):
            yield finding("lacks-part", "the model that it names in its own folder has no weights there", file=shown)
    if not is_file(modules):
        return
    if lost := routers_without_file(modules):
        text = f"{few(lost)}, without which the Router that it names does not load, {'is' if len(lost) == 1 else 'are'} not there"
        yield finding("lacks-named-file", text, file=shown)
    if gone := parts_gone(modules):
        yield finding("lacks-part", f"{few(gone)}, which it names, {'is' if len(gone) == 1 else 'are'} not there", file=shown)
    if hollow := parts_without_weights(modules):
        yield finding("lacks-part", f"{few(hollow)}, which it names, {'holds' if len(hollow) == 1 else 'hold'} no weights", file=shown)
    configs = {f"{part}/{CONFIG}": folder / part / CONFIG for part in parts_of(modules) if stays_inside(part)}
    yield from damaged_files({name: path for name, path in configs.items() if is_file(path)})


def _any(kinds: list[str]) -> str:
    return "one" if len(kinds) == 1 else "any"


def check_sizes_beside(folder: Path, manifest: Manifest, files: Files) -> Iterator[Finding]:
    """Files of weights or state beside the model that have another size than was written, or are cut off, where no size is known.

    Other files are small enough for their checksums.
    """
    for name in (name for name in manifest.side_files if name.endswith(OF_WEIGHTS) and stays_inside(name)):
        status, size = status_of(folder / name), manifest.side_sizes.get(name)
        if status is None or not stat.S_ISREG(status.st_mode):
            continue  # it is found elsewhere
        now = status.st_size
        if size is not None and now != size:
            yield finding("changed-size", f"{now} bytes, but {size} were written", file=name, bytes=now, expected=size)
        elif size is None:
            try:
                source = files.source(folder / name)
                if source.read(0, min(len(ZIP), source.size)) == ZIP:
                    ZipMap(source)
            except Unsupported:
                continue  # what is no archive of torch may be whole
            except CkptError as error:
                yield unread("damaged-file", error, name)


def check_changed(folder: Path, checksums: Mapping[str, int]) -> Iterator[Finding]:
    """Files beside the weights that changed since they were written, by the CRC-32 in a manifest. Missing ones are found elsewhere."""
    for name, wanted in checksums.items():
        if name.endswith(OF_WEIGHTS) or not stays_inside(name) or not is_file(folder / name):
            continue
        with contextlib.suppress(CkptError):  # what cannot be read is found by other checks
            if zlib.crc32(read_small(folder / name, MAX_TEXT)) != wanted:
                yield finding("changed-side-file", "it changed since it was written", file=name)


def check_tensors_beside(folder: Path, model: Mapping[str, Tensor], files: Files) -> Iterator[Finding]:
    """Side files for what the model is by itself, its language say, whose tensors have other values than those of the model."""
    with contextlib.suppress(CkptError):  # what cannot be read is found by other checks
        config = read_config(folder / CONFIG) if is_file(folder / CONFIG) else {}
        said = {TOKENIZER_CONFIG: folder / TOKENIZER_CONFIG} if is_file(folder / TOKENIZER_CONFIG) else {}
        for each in tensors_beside({**said, **files_read(config, [folder])}, config, files, folder):
            differing = each.differing({name: (tensor,) for name, tensor in model.items()}) if each.is_main else []
            if differing:
                text = (
                    f"{plural(len(differing), 'tensor')} of {printable(each.for_what)} differ from those of the model: {few(differing, 2)}"
                )
                yield finding("other-tensors", text, file=each.name)
