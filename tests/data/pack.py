"""Pack a folder into a .tar.xz whose bytes depend on names and contents alone: `python pack.py FOLDER ARCHIVE.tar.xz`."""

from __future__ import annotations

import lzma
import sys
import tarfile
from pathlib import Path


def pack(folder: Path, archive: Path) -> None:
    """Regular files below ``folder``, sorted by name, under the folder's own name; no times, owners or modes."""
    with (
        lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(path.relative_to(folder.parent).as_posix())
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as content:
                tar.addfile(entry, content)


if __name__ == "__main__":
    pack(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
