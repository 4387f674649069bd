"""`publish`: the output whose parts were written by `merge` or `average`, each with ``--part``, gets its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.errors import UsageError, within_memory
from ckpt_cli.given import PathLike, boundary, paths_of
from ckpt_cli.output.parts import published
from ckpt_cli.results.written import FileInfo, PublishedFolder, PublishResult


@boundary
@within_memory
def publish(outputs: PathLike | Sequence[PathLike], *, overwrite: bool = False) -> PublishResult:
    """Publish outputs once all of their parts are written. It is no error if that was done before.

    ``outputs`` are the folders that the parts were given with ``-o``. Raises NotFound, MissingParts, Inconsistent,
    CorruptFile, OutputError.
    """
    folders = [Path(os.path.abspath(path)) for path in paths_of(outputs, "OUTPUT")]
    if not folders:
        raise UsageError("there is no output to publish", expected="the folders that the parts were given with -o")
    done = [published(folder, overwrite=overwrite) for folder in folders]
    return PublishResult(
        outputs=tuple(
            PublishedFolder(
                output=str(each.folder),
                parts=each.parts,
                files=tuple(FileInfo(name=name, bytes=size) for name, size in each.files.items()),
                tensors=each.tensors,
            )
            for each in done
        )
    )
