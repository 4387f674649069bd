"""``*.index.json`` of a Hugging Face model: which file holds which tensor, and where the files differ from that."""

from __future__ import annotations

import codecs
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError, CorruptFile, IncompleteError, Inconsistent, MissingShard, PartOfSet, reading
from ckpt_cli.files.folders import Folders, files_in, is_file, stays_inside
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.formats.sets.names import lost_part, part_name, unlisted_parts
from ckpt_cli.names import few, plural, printable


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with files of a model: the ``code`` and ``text`` of its finding, and the ``error`` for whoever needs these files.

    Without ``text`` the error says it; without ``error`` the model can be read all the same. ``is_told``: whoever reads it is warned then,
    since its weights may not be those of one model.
    """

    code: str
    text: str | None
    error: CkptError | None = None
    file: str | None = None
    tensor: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    is_told: bool = False


def raise_first(problems: Iterable[Problem]) -> None:
    """Raise the error of the first problem that keeps a model from being read."""
    for problem in problems:
        if problem.error is not None:
            raise problem.error


@dataclass(frozen=True, slots=True)
class Index:
    """``owners``: tensor name -> file name; ``files``: their names; ``total``: what it says of the size of all, None if nothing.

    ``unloadable``: why transformers and diffusers, which read no index without its metadata, do not load it.
    """

    path: Path
    owners: Mapping[str, str]
    files: tuple[str, ...]
    total: Any = None
    unloadable: str | None = None

    @classmethod
    def read(cls, path: Path, suffix: str, files: Files) -> Index:
        """An index whose files all have the ``suffix`` and lie in its folder. Raises CorruptFile, NotFound or Unreadable."""
        files.watch(path)
        with reading(path):
            raw = read_small(path)
            content = parse_json(raw, "the index")
            owners = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(owners, dict) or not owners:
                raise CorruptFile("the index has no weight_map")
            for name, file in owners.items():
                if not stays_inside(file) or not file.endswith(suffix):
                    message = "the index names a file outside of its folder or of another format"
                    raise CorruptFile(message, tensor=name, expected=f"a {suffix} file")
        metadata = content.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        trouble = None
        if raw.startswith(codecs.BOM_UTF8):
            trouble = "it begins with a byte order mark, which loaders do not read"
        elif not isinstance(metadata, dict):
            lacks = "it has no metadata" if "metadata" not in content else f"its metadata is {_written(metadata)}"
            trouble = f"{lacks}: transformers and diffusers need a JSON object there, if only an empty one"
        return cls(path, owners, tuple(sorted(set(owners.values()))), total, trouble)

    def for_loaders(self) -> Iterator[Problem]:
        """What keeps loaders from an index that can be read."""
        if self.unloadable is not None:
            yield Problem("damaged-index", self.unloadable, file=self.path.name)

    def miscounted(self, total: int, *, is_usual: bool) -> Iterator[Problem]:
        """Another size of all than ``total``, or one that is no number. ``is_usual``: indexes of sound models may have it too."""
        if type(self.total) not in (int, float, type(None)):
            text = f"total_size is {_written(self.total)}, where a number is needed: {total} bytes are in the files"
            yield Problem("index-total", text, file=self.path.name, numbers={"bytes": total})
        elif self.total is not None and self.total != total:
            doubt = "" if is_usual else ": some of them may be of another save"
            text = f"{str(self.total)[:40]} bytes in the index, {total} in the files{doubt}"
            numbers = {"bytes": total, "listed": self.total} if abs(self.total) < math.inf else {"bytes": total}
            yield Problem("index-total", text, file=self.path.name, numbers=numbers, is_told=not is_usual)

    def missing(self) -> Iterator[Problem]:
        """Files of its set that it does not list, and files that it lists and that are not there. Raises Unreadable."""
        if unlisted := unlisted_parts(self.files):
            text = f"the index lists {plural(len(self.files), 'file')} but not {few(unlisted)}, which their names imply"
            hint = "get the index again from where the model came from"
            part = PartOfSet(text, path=self.path, expected="the index of the whole model", hint=hint)
            yield Problem("part-of-set", text, part, self.path.name)
        absent = [file for file in self.files if not is_file(self.path.parent / file)]
        counts = Counter(self.owners.values())
        for file in absent:
            text = f"{len(absent)} of {plural(len(self.files), 'weight file')} are missing: {few(absent)}"
            hint = "copy the missing files from where the model came from"
            if len(absent) == len(self.files) and (parts := files_in(self.path.parent, self._may_be_of_another)):
                hint = f"the index is of another model than {few([part.name for part in parts], 1)}: copy the one that was saved with it"
            lost = MissingShard(text, path=self.path, expected=str(self.path.parent / absent[0]), hint=hint)
            yield Problem("missing-file", f"the index says that it holds {counts[file]} tensors", lost, file)

    def _may_be_of_another(self, name: str) -> bool:
        """Whether a file is a part of a set, such as that of a model whose index this one was copied over."""
        return name.endswith(Path(self.files[0]).suffix) and part_name(name) is not None

    def misplaced(self, held: Mapping[str, Collection[str] | None]) -> Iterator[Problem]:
        """Tensors that are not in the file that it says; ``held`` are the names in each file, None for one that could not be read."""
        holders: dict[str, list[str]] = {}
        for file in sorted(held):
            for name in held[file] or ():
                holders.setdefault(name, []).append(file)
        for name, files in holders.items():
            owner = self.owners.get(name)
            for file in [file for file in files if file != owner][:1]:
                text, hint = "the file holds a tensor that the index does not assign to it", "files from two models may be mixed"
                mixed = Inconsistent(text, path=self.path.parent / file, tensor=name, hint=hint)
                said = "the index does not list it" if owner is None else f"the index says {owner}"
                twice = Problem("duplicate-tensor", f"{' and '.join(files)} hold it", mixed, files[0], name)
                yield twice if len(files) > 1 else Problem("misplaced-tensor", f"{said}, and it is here", mixed, file, name)
        for name, owner in self.owners.items():
            if name not in holders and held.get(owner) is not None:
                text = "the index says that this tensor is in the file, but it is not"
                lost = Inconsistent(text, path=self.path.parent / owner, tensor=name)
                yield Problem("misplaced-tensor", "the index says that it is here, and no file holds it", lost, owner, name)


def _written(value: object) -> str:
    """A value as the index has it."""
    return printable(json.dumps(value, ensure_ascii=False))[:40]


def without_index(index: Path, parts: Sequence[Path], there: Folders) -> IncompleteError:
    """The error for parts of a model without an index: what their names show to be missing, or that nothing shows them complete."""
    text = f"{index.name} is missing, so nothing shows that the {len(parts)} parts are complete"
    return lost_part(parts, there) or MissingShard(text, path=index, hint="copy the index from where the model came from")
