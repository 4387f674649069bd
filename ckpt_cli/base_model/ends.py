"""Whether texts of a merged model end where the tokenizer of its training does: settings for generation of a base know nothing of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_cli.hub.assets import Assets
from ckpt_cli.hub.beside.tokenizers import is_trace
from ckpt_cli.hub.beside.told_tokens import told_tokens, with_ids
from ckpt_cli.hub.config import writes_texts
from ckpt_cli.hub.tokenizer import END, endless, ends_used
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

CODE = "other-end"
ROLE = "eos_token"
BASE_WITHOUT = "and the base has no tokenizer to compare that with: texts may not end as in the training"


def moved_end(before: Assets, assets: Assets) -> tuple[str, str] | None:
    """(file name, text) where a tokenizer ends texts with another token than that ``before``, at which generation does not end.

    A trainer takes the end of its tokenizer over into config and settings for generation in memory (``Trainer`` of transformers), and
    an adapter is saved without these. What both tokenizers end with is as the base is used: many models end a turn otherwise. Where there
    was none before, that remains open.
    """
    own, base = _end(assets.files), _end(before.files)
    alone = base is None and not any(map(is_trace, before.files))
    if own is None or (base is None and not alone) or own == base or not writes_texts(assets.config):
        return None
    number, (name, ends) = _id(own, assets), ends_used(assets.files, assets.config)
    if number is None or number in ends or name not in assets.files or endless(assets.files, assets.config) is not None:
        return None
    if alone and not ends:
        return None
    there = f"ends texts at {few([str(end) for end in ends])}" if ends else f"has no {END}"
    text = f"it {there}, and the tokenizer at {own} ({number}), "
    text += f"that of the base at {base}: texts do not end as in the training" if base is not None else BASE_WITHOUT
    return name, f"{text}; if it taught that end, add {number} to {END} of {name}"


def moved_end_notes(before: Assets, assets: Assets, notes: Sequence[Note]) -> list[Note]:
    """A warning of that, unless ``notes`` say already that generation ends elsewhere."""
    moved = moved_end(before, assets) if not any(note.code == CODE for note in notes) else None
    return [Note("warning", CODE, f"{moved[0]}: {moved[1]}")] if moved is not None else []


def _end(files: Mapping[str, Path]) -> str | None:
    """The token that ends texts, as the files of a tokenizer say."""
    return next((each.token for each in told_tokens(files) if each.role == ROLE), None)


def _id(token: str, assets: Assets) -> int | None:
    """The id of a token that the files of a tokenizer name; None where nothing says it."""
    read = assets.tokenizer() if assets.tokenizer is not None else None
    if read is not None and read.following is not None:
        return next((number for each, number, _ in with_ids(read.told, read.held, read.following) if each.token == token), None)
    return next((each.id for each in told_tokens(assets.files) if each.token == token and each.id is not None), None)
