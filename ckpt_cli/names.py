"""Tensor names: which are valid, and which prefixes of training wrappers are removed."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal

from ckpt_cli.errors import CorruptFile, Inconsistent

Naming = Literal["hub", "native"]
"""Whose names are written: those that Hugging Face's hub has for a class, or as trained."""

ShardOrder = Literal["auto", "tp-first", "left-to-right"]
"""The order in which two mesh dimensions cut one dimension of a tensor."""

Write = Literal["auto", "positioned", "sequential"]
"""How the bytes of an output file are written: at any position, or front to back."""

LoraMode = Literal["fuse", "export", "both", "keep"]
"""What becomes of adapters."""

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module", "_fpw_module"})
"""Put into names by FSDP1, activation checkpointing, torch.compile, Lightning and old FSDP."""

DDP = "module."
"""Put in front of every name by DistributedDataParallel."""

MAX_NAME = 4096

EXTRA_STATE = re.compile(r"(.*\.)?_extra_state(/.*)?", re.DOTALL)
"""What torch calls the extra state of a module (``nn.Module.get_extra_state``); Megatron appends "/shard_0_1"."""


def check_name(name: object) -> str:
    """A tensor name that can be written: text that encodes to UTF-8, at most 4096 characters, not "__metadata__"."""
    if not isinstance(name, str):
        raise CorruptFile(f"a key of the state dict is a {type(name).__name__}", expected="text")
    if len(name) > MAX_NAME:
        raise CorruptFile(f"a tensor name has {len(name)} characters", expected=f"at most {MAX_NAME}")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise CorruptFile("a tensor name is not valid Unicode", tensor=printable(name)) from None
    if name == "__metadata__":
        raise CorruptFile("a tensor is called __metadata__, which safetensors reserves", tensor=name)
    return name


def is_extra_state(name: object) -> bool:
    """Whether an entry is extra state of a module, such as TransformerEngine's scales of fp8: whatever it holds, it is not a weight.

    >>> is_extra_state("decoder.layers.0.mlp.linear_fc1._extra_state")
    True
    """
    return isinstance(name, str) and "_extra_state" in name and EXTRA_STATE.fullmatch(name) is not None


def strip_wrappers(name: str) -> str:
    """The name without the parts that training wrappers insert.

    >>> strip_wrappers("_orig_mod.model.layers.0._fsdp_wrapped_module.mlp.weight")
    'model.layers.0.mlp.weight'
    """
    parts = name.split(".")
    return name if WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in WRAPPERS)


def stripped_names(names: Iterable[str], *, keep_module: bool = False) -> dict[str, str]:
    """Old name -> name without wrappers; "module." is removed only if every name begins with it (DistributedDataParallel).

    ``keep_module``: not even then, as a model may have an attribute of that name. Raises Inconsistent if two names become one.
    """
    renamed = {name: strip_wrappers(name) for name in names}
    while renamed and not keep_module and all(new.startswith(DDP) for new in renamed.values()):
        renamed = {name: strip_wrappers(new.removeprefix(DDP)) for name, new in renamed.items()}
    taken: dict[str, str] = {}
    for name, new in renamed.items():
        if new in taken:
            raise Inconsistent(f"without wrapper prefixes, {printable(taken[new])} has the same name", tensor=name)
        taken[new] = name
    return renamed


FOREIGN = (
    ("torchtitan", re.compile(r"(.*\.)?layers\.[0-9]+\.attention\.qkv_linear\.w[qkvo]\..*")),
    ("Meta's Llama, Mistral and torchtitan", re.compile(r"(.*\.)?(tok_embeddings\.weight|layers\.[0-9]+\.attention\.w[qkvo]\..*)")),
    ("OLMo-core", re.compile(r"(.*\.)?(blocks\.[0-9]+\.attention\.w_[qkvo].*|lm_head\.w_out\.weight)")),
)
"""Names of programs that classes of transformers do not have, even where the architecture is the same. (LFM2 has feed_forward.w1.)

Meta's are those of Mistral's own files and of torchtitan's first models as well: nothing tells whose a file is.
"""


def foreign_names(names: Iterable[str]) -> str | None:
    """The program (or those) whose own names these are, None if there is no sign of one."""
    listed = list(names)
    return next((program for program, regex in FOREIGN if any(regex.fullmatch(name) for name in listed)), None)


NUMBERED = re.compile(r"(?P<stem>model|ema)_(?P<number>[1-9][0-9]{0,8})", re.ASCII)
"""Components of which accelerate numbers several in one save: number 0 goes by the name alone."""


def numbered(component: str, number: int) -> str:
    """The name of one of several models (averages) that were saved together.

    >>> numbered("model", 0), numbered("ema", 1)
    ('model', 'ema_1')
    """
    return f"{component}_{number}" if number else component


def unnumbered(component: str) -> tuple[str, int]:
    """The name and the number of a component: the reverse of `numbered`.

    >>> unnumbered("model_1"), unnumbered("critic")
    (('model', 1), ('critic', 0))
    """
    fields = NUMBERED.fullmatch(component)
    return (fields["stem"], int(fields["number"])) if fields is not None else (component, 0)


def few(names: Sequence[str], shown: int = 6) -> str:
    """The first names of a list, safe to print, and how many more there are."""
    listed = ", ".join(printable(name) for name in names[:shown])
    return f"{listed} and {len(names) - shown} more" if len(names) > shown else listed


def printable(text: object) -> str:
    """Text from a file, safe for a terminal: control, format and surrogate characters become escapes."""
    return "".join(
        character if character == " " or unicodedata.category(character) not in UNSAFE else ascii(character)[1:-1]
        for character in str(text)
    )


def delimited(text: str) -> str:
    """A path in quotes if it begins or ends with a blank, which nobody would see.

    >>> delimited("run"), delimited("run ")
    ('run', "'run '")
    """
    return text if text == text.strip() else f"'{text}'"


UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def plural(count: int, one: str, many: str | None = None) -> str:
    """A count with what is counted, and its verb where that differs too.

    >>> plural(1, "file"), plural(2000, "file"), plural(1, "tensor is", "tensors are")
    ('1 file', '2,000 files', '1 tensor is')
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def span_text(seconds: float) -> str:
    """A length of time in hours, from two days on in days.

    >>> span_text(5000), span_text(7300), span_text(3 * 86400)
    ('1 hour', '2 hours', '3 days')
    """
    hours = round(seconds / 3600)
    return plural(hours, "hour") if hours < 48 else plural(round(hours / 24), "day")


UNITS = (("T", 10**12), ("G", 10**9), ("M", 10**6), ("K", 10**3))


def size_text(count: float) -> str:
    """Bytes, with two digits where they are few: 15 GB, 7.6 GB, 545 MB."""
    for letter, factor in UNITS:
        # What would be rounded to a thousand of the next smaller unit is one of this.
        if count >= factor * 0.9995:
            return f"{count / factor:.1f} {letter}B" if count < 9.95 * factor else f"{count / factor:.0f} {letter}B"
    return f"{int(count)} B"
