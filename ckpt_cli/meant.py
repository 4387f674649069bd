"""What was probably meant by a value that cannot be read: lists of numbers, sizes, dtypes. For hints."""

from __future__ import annotations

import difflib
import math
import re
from fractions import Fraction

from ckpt_cli.dtypes import BASE, CAST_NAMES, CAST_SYNONYMS, cast_name

SEPARATORS = re.compile(r"[\s,;:|&+\[\](){}]+")
SPAN = re.compile(r"\s*(\d+)\s*(?:-|\.\.+|:|to)\s*(\d+)\s*", re.ASCII)
STEP = re.compile(r"(?:[A-Za-z_]+[-_=]?)?(\d+)/?", re.ASCII)
QUANTISED = re.compile(r"(?!bf)(.*(?<!\d)[468](?!\d).*|awq|gptq|gguf|bnb|.*quant.*)")
WIDER = ("float64", "fp64", "f64", "double", "float128")


def steps_meant(text: str, option: str) -> str | None:
    """The list of steps that a text was meant to be: other separators, a range, the names of folders.

    >>> steps_meant("100 200", "--steps")
    'did you mean --steps 100,200?'
    """
    if text.strip().lower() == "all":
        return "--all takes all of them"
    span = SPAN.fullmatch(text)
    if span is not None:
        return f"{option} {span[1]},{span[2]} takes these two, or --from {span[1]} --to {span[2]} all that lie between"
    found = [STEP.fullmatch(part) for part in _parts(text)]
    listed = [step[1] for step in found if step is not None]
    return f"did you mean {option} {','.join(listed)}?" if listed and len(listed) == len(found) else None


def weights_meant(text: str, option: str) -> str | None:
    """The list of weights that a text was meant to be: other separators, fractions, percentages.

    >>> weights_meant("1:2", "--weights"), weights_meant("1/3,2/3", "--weights")
    ('did you mean --weights 1,2?', 'did you mean --weights 1,2? by default only their ratio counts')
    """
    parts = _parts(text)
    try:
        shares = [Fraction(part.removesuffix("%")) for part in parts]
    except (ValueError, ZeroDivisionError):
        return None
    if not parts:
        return None
    if not re.search("[/%]", text):
        return f"did you mean {option} {','.join(parts)}?"
    whole = math.lcm(*(share.denominator for share in shares))
    return f"did you mean {option} {','.join(str(int(share * whole)) for share in shares)}? by default only their ratio counts"


def size_meant(text: str) -> str | None:
    """What to write for a size that is none: a number with letters behind it, a share, no limit.

    >>> size_meant("5gigs"), size_meant("none")
    ('did you mean 5GB?', 'for one file give more than the size of the model, such as 100TB')
    """
    if text.strip().lower() in ("none", "0", "0gb", "inf", "infinity", "unlimited", "max", "-1"):
        return "for one file give more than the size of the model, such as 100TB"
    if "%" in text:
        return "a size of bytes, not a share: did you mean 5GB?"
    named = re.fullmatch(r"\s*([\d_]+(?:[.,]\d+)?)\s*([kmgt])(?:iga|ega|ilo|era)?[a-z]*\s*", text, re.IGNORECASE)
    return f"did you mean {named[1].replace('_', '').replace(',', '.')}{named[2].upper()}B?" if named is not None else None


def dtype_meant(text: str) -> str:
    """What to do instead of a cast to a dtype that ``--dtype`` does not have.

    >>> dtype_meant("flaot32"), dtype_meant("16-mixed")
    ('did you mean fp32?', 'did you mean bf16 or fp16?')
    """
    if re.search(r"[\s,;+]", text.strip()):
        return f"one dtype for all tensors; --dtype {BASE} takes that of each tensor in the base"
    if re.fullmatch(r"16(\W?bits?|-mixed|-true)?", text):
        return "did you mean bf16 or fp16?"
    if QUANTISED.fullmatch(text):
        return "ckpt casts, and does not quantise: leave --dtype out, and quantise the output with a tool for it, such as llm-compressor"
    if text in WIDER:
        return "fp32 is the widest; tensors that were saved in 64 bits keep them if --dtype is left out"
    if "mixed" in text and "16" not in text:
        return "leave --dtype out to keep what was saved; a loader casts too"
    within = next((name for name in ("bf16", "fp16", "fp32") if name in text), None)
    near = difflib.get_close_matches(text, ("keep", *CAST_NAMES, *CAST_SYNONYMS, BASE), n=1)
    found = within or (cast_name(near[0]) if near else None)
    return f"did you mean {found}?" if found is not None else "leave --dtype out to keep what was saved"


def _parts(text: str) -> list[str]:
    return [part for part in SEPARATORS.split(text) if part]
