"""What a repository of the Hub holds besides an output that is pushed to it, and what loaders would do with that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import Manifest
from ckpt_cli.hub.beside.codes import has_scales, settings_of_codes
from ckpt_cli.hub.beside.names import (
    CODE_FOLDER,
    OF_VOCABULARY,
    TEMPLATE_FOLDER,
    TOKENIZER_CONFIG,
    VOCABULARIES,
    folder_read,
    has_weight_suffix,
    is_asset_name,
)
from ckpt_cli.pushing import card

PART = r"(-[0-9]+-of-[0-9]+)?"
OF_SET = re.compile(rf"{PART}\.safetensors(\.index\.json)?")
"""The end of the name of a weights file, also of one of several, and of their index."""

CHOSEN = re.compile(
    rf"(adapter_config\.json|adapter_model{PART}\.(safetensors|bin)(\.index\.json)?"
    rf"|model{PART}\.safetensors(\.index\.json)?|consolidated([.-].*)?\.(safetensors|pth?)(\.index\.json)?)"
)
"""What loaders look for first, or load on top: PEFT's adapters, transformers' own names, and those of Mistral."""

CHOSEN_LAST = re.compile(rf"pytorch_model{PART}\.bin(\.index\.json)?|tf_model\.h5|flax_model\.msgpack")
"""What transformers takes where there is no model.safetensors."""

TEMPLATES = frozenset({"chat_template.json", "chat_template.jinja"})
OF_TOKENIZER = VOCABULARIES | OF_VOCABULARY | TEMPLATES | {TOKENIZER_CONFIG}
OF_NO_MODEL = frozenset({"LICENSE", "LICENSE.txt", "NOTICE"})


@dataclass(frozen=True, slots=True)
class Beside:
    """Names of files that are not of an output: at the top of a repository, and those in its folders that loaders read or ckpt wrote.

    ``stale``: ckpt wrote them before, or they are parts of weights that the output replaces. ``taken``: loaders would take them instead
    of, or on top of, the output. ``left``: more that belongs to a model.
    """

    stale: tuple[str, ...]
    taken: tuple[str, ...]
    left: tuple[str, ...]

    @classmethod
    def of(cls, there: Sequence[str], manifest: Manifest, before: Manifest | None) -> Beside:
        """What is ``there`` besides the output with a manifest; ``before`` is the manifest that the repository has."""
        own = {*manifest.outputs, *manifest.side_files, MANIFEST, card.NAME}
        written = {*before.outputs, *before.side_files} if before is not None else set()
        stems = {OF_SET.sub("", name) for name in manifest.outputs}
        others = sorted(name for name in there if name not in own and ("/" not in name or name in written or folder_read(name)))
        stale = [name for name in others if name in written or (OF_SET.search(name) and OF_SET.sub("", name) in stems)]
        rest = [name for name in others if name not in stale]
        has_tokenizer = not own.isdisjoint({*VOCABULARIES, TOKENIZER_CONFIG})
        settings = settings_of_codes(rest)
        tensors = [name for known in manifest.checksums.values() for name in known]
        are_plain = bool(tensors) and not has_scales(tensors)

        def is_taken(name: str) -> bool:
            if name in OF_TOKENIZER or folder_read(name) == TEMPLATE_FOLDER:
                return has_tokenizer
            if name in settings:
                return are_plain
            if folder_read(name) == CODE_FOLDER:
                return True
            return bool(CHOSEN.fullmatch(name) or ("model" not in stems and CHOSEN_LAST.fullmatch(name)))

        taken = [name for name in rest if is_taken(name)]
        left = [name for name in rest if name not in taken and (name in settings or _is_of_model(name))]
        return cls(tuple(stale), tuple(taken), tuple(left))


def _is_of_model(name: str) -> bool:
    return folder_read(name) is not None or (is_asset_name(name) and name not in OF_NO_MODEL) or has_weight_suffix(name)
