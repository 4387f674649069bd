"""The folders of a base with other models, which the model may be loaded with, such as the codec of a speech model.

They are not written. A folder with the weights of the base once more, in another form, is no part of it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_cli.base_model.opened import Base
from ckpt_cli.discover.beside.files import OTHER_FORM
from ckpt_cli.discover.beside.folders import Held, files_with_weights, held_below
from ckpt_cli.discover.beside.models import comparison_with_folder
from ckpt_cli.discover.beside.siblings import FORMS
from ckpt_cli.drafting.draft import Draft
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders, is_file, is_folder
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe
from ckpt_cli.hub.assets import CONFIG, Assets
from ckpt_cli.hub.beside.lacking import parts_elsewhere, tokenizers_below
from ckpt_cli.hub.beside.processors import content_of
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.names import few, printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

TOKENIZER = "a tokenizer"
PIPELINE = "model_index.json"
"""What makes each folder beside it a part of a pipeline of diffusers."""

SAME = re.compile(
    r"fp?(8|16|32)|bf16|half|single|native|consolidated|safetensors|pytorch|torch|pth|pt|bin|w?[2-8]-?bit|q[2-8]|awq|gptq|exl[23]|bnb|nf4"
    r"|hqq|quanto|marlin|nncf|trt|tensorrt|coreml|webgpu|npu|ggml|gguf|litert|metal",
    re.IGNORECASE,
)
"""Words in the name of a folder that has the same weights in another form."""

NEARLY = 0.05
"""The part of its elements by which another form of a model may differ from it: tied and padded tensors."""


def parts_of_base(base: Base | None, drafts: Sequence[Draft], output: Path) -> list[Note]:
    """A warning about folders with other models in a base that the output lacks; of those that the run has too, another says so."""
    if base is None or base.component is None or is_file(base.folder / PIPELINE):
        return []
    sources = [source for draft in drafts for source in draft.sources]
    homes = {folder for source in sources for folder in (source.component.root, source.place.home)}
    known = parts_elsewhere(base.assets)
    found: list[tuple[str, str]] = []
    with contextlib.suppress(CkptError):  # only looked at for a warning
        for entry in held_below(base.folder, Folders()) or ():
            is_known = entry.name in known or any(is_folder(home / entry.name) for home in (*homes, output))
            is_below = any(entry.path.is_relative_to(base.folder / name) for name, _ in found)
            if not (is_known or is_below) and _may_be_part(entry) and not _is_base_again(entry, base):
                found.append((entry.name, _class_of(content_of(entry.path / CONFIG))))
    return [*_told_of_models(found, base.folder), *_told_of_tokenizers(base.folder, drafts[0].assets)]


def _told_of_models(found: Sequence[tuple[str, str]], base: Path) -> list[Note]:
    """What is said of folders with another model, each with its class."""
    if not found:
        return []
    named = few([f"{name}/ ({kind})" if kind else f"{name}/" for name, kind in found], 4)
    one, it = len(found) == 1, "it" if len(found) == 1 else "them"
    text = f"the base has {'another model' if one else 'other models'} in {named}, which {'is' if one else 'are'} not written:"
    return [Note("warning", "lacks-part", f"{text} if the model is loaded with {it}, copy {it} from {base}")]


def _told_of_tokenizers(base: Path, assets: Assets) -> list[Note]:
    """What is said of tokenizers in folders of a base, where the output has none, and nothing says that it lacks one."""
    folders = tokenizers_below(base) if not has_vocabulary(assets.files) and TOKENIZER not in assets.lacking else []
    if not folders:
        return []
    named, them = few([f"{folder.name}/" for folder in folders], 4), "it" if len(folders) == 1 else "them"
    text = f"the output has no tokenizer; the base has {named}: copy {them} from {base}, if the model is loaded with {them}"
    return [Note("warning", "lacks-part", text)]


def _may_be_part(entry: Held) -> bool:
    """Whether a folder may hold another model, by names."""
    names = entry.name.split("/")
    if entry.kind not in ("model", "companion", "adapter") or any(map(_is_form, names)):
        return False
    files = files_with_weights(entry.path, Folders())
    return bool(entry.matches) or entry.kind == "companion" or not all(map(OTHER_FORM.fullmatch, files))


def _is_form(name: str) -> bool:
    """Whether a folder is called like one with the same weights for another program, or of another precision."""
    return FORMS.fullmatch(name) is not None or any(SAME.fullmatch(word) for word in re.split(r"[._ -]+", name))


def _is_base_again(entry: Held, base: Base) -> bool:
    """Whether a folder has the weights of the base, under the same names or as many: in another precision, or in another program's form.

    Of what cannot be read, nothing but its config or its name tells that it is another model.
    """
    kind = content_of(entry.path / CONFIG).get("model_type")
    if kind is not None and kind == base.config.get("model_type"):
        return True
    tensors: Mapping[str, Tensor] = base.component.tensors if base.component is not None else {}
    with Files() as files, contextlib.suppress(CkptError):
        for match in entry.matches[:1]:
            held = describe(match, files, ReadOptions()).tensors
            as_many = kind is None and abs(_elements(held) - _elements(tensors)) <= NEARLY * _elements(tensors)
            return as_many or comparison_with_folder(entry.path, tensors, base.config, files) is not None
    return kind is None and entry.kind == "model"


def _elements(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel for tensor in tensors.values())


def _class_of(config: Config) -> str:
    kind = architecture(config) or config.get("model_type")
    return printable(kind) if isinstance(kind, str) else ""
