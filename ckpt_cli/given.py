"""The arguments of callers: paths, sizes, dtypes and options, checked and normalised before anything else happens.

The command line and Python both use this module. Empty values are refused: in a script they come from an unset variable.
"""

from __future__ import annotations

import difflib
import errno
import functools
import operator
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import unquote

from ckpt_cli import shell
from ckpt_cli.dtypes import cast_name
from ckpt_cli.errors import CkptError, NoSpace, NotWritable, Unreadable, UsageError
from ckpt_cli.hub_ids import of_address
from ckpt_cli.meant import size_meant, steps_meant, weights_meant
from ckpt_cli.paths import without_above
from ckpt_cli.progress import Progress
from ckpt_cli.urls import BUCKETS, WEB, Address, parsed

if TYPE_CHECKING:
    import numpy
    import torch

    DtypeLike: TypeAlias = str | torch.dtype | numpy.dtype[Any] | type[numpy.generic]
else:
    DtypeLike: TypeAlias = Any

PathLike: TypeAlias = str | os.PathLike[str]
Use: TypeAlias = Literal["read", "output", "local"]
"""What a path is for: something that is read, a folder that is written, a file or folder that is written to disks only."""

Options = TypeVar("Options")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Number = TypeVar("Number", int, float)

URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)
STORES = ("s3", "gs", "az", "abfs", "abfss", "wasb", "wasbs", "hdfs", "hf", *WEB)
"""Schemes that are known for sure, so that one slash behind them is enough: pathlib makes one of two."""

PATHS = ("file", "local")
"""Schemes of files of this machine; fsspec knows the second."""

SPELLED = ("s3", "s3a", "hdfs", "hf", "ftp", "sftp", "ssh", "smb", "http", "https", "r2")
"""Schemes that are spoken letter by letter, of which the first begins with a vowel."""

EMPTY = "an unset shell variable expands to an empty string; nothing was read or written"
FLAGS = {"everything": "--all", "begin": "--from", "end": "--to", "normalize": "--no-normalize", "execute": "--exec"}
"""How the command line calls fields whose names differ."""

SYNONYMS = {"component": "type", "force": "overwrite", "torch_dtype": "dtype", "max_size": "max_shard_size"}
"""Words for options in other tools, and those that are meant."""

LEAST_BARE = 1_000
"""Bytes. A size in text without a unit below this is one whose unit was forgotten."""

SUFFIXES = {"": 1, "B": 1} | {
    name: factor
    for letter, power in (("K", 1), ("M", 2), ("G", 3), ("T", 4))
    for name, factor in ((letter, 1000**power), (f"{letter}B", 1000**power), (f"{letter}IB", 1024**power))
}
FILES = (".safetensors", ".bin", ".pt", ".pth", ".th", ".ckpt")
"""Endings of files of weights: a folder that is still to be made is not meant by such a name."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def boundary(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes every error about a file that a public function raises a CkptError, even unforeseen ones."""

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **named)
        except UsageError as error:
            error.function = f"ckpt_cli.{function.__name__}"
            raise
        except OSError as error:
            if error.filename is None:
                raise  # a stream: the caller's business
            kind = NoSpace if error.errno in FULL else NotWritable if error.errno == errno.EROFS else Unreadable
            raise kind(f"the system says: {error.strerror}", path=os.fsdecode(error.filename)) from error

    return call


# -- paths -----------------------------------------------------------------------------------------------------------


def path_of(value: object, option: str = "PATH", *, use: Use = "read") -> Path:
    """A path, with a leading ``~/`` or ``~user/`` expanded. Raises UsageError for an empty text, no path, or an address of no ``use``."""
    return Path(path_text(value, option, use=use))


def path_text(value: object, option: str = "PATH", *, use: Use = "read") -> str:
    """The same as text, as it was given: a trailing slash or "./" stays, ``..`` is followed as the system does."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise _wrong(value, option, "a path")
    if not text.strip():
        raise UsageError(f"{option} is empty", expected="a path", hint=EMPTY)
    if "\0" in text:
        raise UsageError(f"{option} contains a NUL character, which no path can", path=text.replace("\0", "\\0"))
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise UsageError(f"{option} has characters that no path can have here", expected="a path") from None
    stem, suffix = os.path.splitext(text)
    if use == "output" and suffix.lower() in FILES and not os.path.lexists(os.path.expanduser(text)):
        hint = f"-o {shell.path(stem)}"
        raise UsageError(f"the output is a folder, and {text} is the name of a file", expected="the name of a folder", hint=hint)
    address = _address(text, isinstance(value, os.PathLike), use)
    if address is not None:
        return str(address.path)
    _refuse_address(text, option, use)
    return without_above(_expanded(text, option))


def optional_path(value: object, option: str, *, use: Use = "read") -> Path | None:
    """A path, or None if none was given."""
    return None if value is None else path_of(value, option, use=use)


def paths_of(value: object, option: str) -> tuple[Path, ...]:
    """One path or several."""
    if value is None or isinstance(value, (str, os.PathLike)) or not isinstance(value, Sequence):
        return (path_of(value, option),)
    return tuple(path_of(each, option) for each in value)


def _address(text: str, is_path: bool, use: Use) -> Address | None:
    """An address for this use, or None. pathlib has made one slash of two, so that of a path a scheme that is known is enough."""
    found = URL.fullmatch(text)
    scheme = found["scheme"].lower() if found is not None else ""
    if use == "local" or (use == "output" and scheme not in BUCKETS):
        return None
    if found is None or scheme == "file" or (scheme in WEB and of_address(text) and "/resolve/" not in text):
        return None
    if is_path and len(found["slashes"]) == 1 and scheme in STORES:
        text = f"{scheme}://{found['rest']}"
    return parsed(text)


def _expanded(text: str, option: str) -> str:
    user, slash, _ = text.partition("/")
    if not user.startswith("~") or (user != "~" and not slash):
        return text
    expanded = os.path.expanduser(text)
    if expanded != text:
        return expanded
    if os.path.lexists(text):
        return text
    what = "there is no home folder" if user == "~" else f"there is no user {user[1:]}"
    raise UsageError(f"{option} begins with {user}/, but {what}", path=text, hint=f"write a folder called {user} as ./{user}")


def _refuse_address(text: str, option: str, use: Use) -> None:
    """Raise UsageError for an address that is not read, or not written, with what to do instead."""
    found = URL.fullmatch(text)
    hub = of_address(text)
    known = found is not None and found["scheme"].lower() in (*STORES, "file")
    if hub is None and (found is None or (len(found["slashes"]) < 2 and not known)):
        return
    scheme = found["scheme"].lower() if found is not None else "https"
    if scheme in PATHS and found is not None:
        local = "/" + unquote(found["rest"].removeprefix("localhost/")) if scheme == "file" else found["slashes"][2:] + found["rest"]
        raise UsageError(f"{option} is a {scheme}:// address, but ckpt takes paths", path=text, hint=f"write it as {local or '.'}")
    if hub is not None and os.path.lexists(text):
        return
    article = "an" if scheme[0] in "aeiou" or scheme in SPELLED else "a"
    one_slash = found is not None and len(found["slashes"]) == 1 and scheme in BUCKETS
    if use == "local" or (use == "output" and not one_slash):
        upload = f"then: hf upload {hub.id} FOLDER" if hub is not None else "and copy it there"
        hint = f"write to a local folder, {upload}"
        where = "local files only" if use == "local" else "to local folders, s3://, gs:// and az:// only"
        raise UsageError(f"{option} is {article} {scheme}:// address, and ckpt writes {where}", path=text, hint=hint)
    if hub is not None:
        message = f"{option} names a {hub.kind} of the Hub, not {'its files' if hub.kind == 'model' else 'a model'}"
        raise UsageError(message, path=text, hint=hub.advice(as_base=option == "--base"))
    if found is not None:
        what = "with one slash" if len(found["slashes"]) == 1 else f"without a {'bucket' if scheme in BUCKETS else 'host'}"
        # Of these, what follows begins with the bucket or host; others may leave theirs to a configuration.
        advice = f"write it as {scheme}://{found['rest']}" if found["rest"] and scheme in (*BUCKETS, *WEB) else None
        raise UsageError(f"{option} is {article} {scheme}: address {what}", path=text, expected=f"{scheme}://NAME/...", hint=advice)


# -- single values ---------------------------------------------------------------------------------------------------


def text_of(value: object, option: str) -> str | None:
    """A text that is not empty, or None. Raises UsageError."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong(value, option, "a str")
    if not value.strip():
        raise UsageError(f"{option} is empty", hint=EMPTY)
    return value


def int_of(value: object, option: str) -> int | None:
    """A whole number, or None. Raises UsageError."""
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _wrong(value, option, "an int") from None


def progress_of(value: Progress | None) -> Progress | None:
    """A progress display, or None. Raises UsageError."""
    if value is not None and not all(callable(getattr(value, name, None)) for name in ("start", "advance", "finish")):
        raise _wrong(value, "progress", "an object with the methods start, advance and finish")
    return value


def dtype_of(value: object) -> str | None:
    """The name of a dtype: of the command line ("bf16"), of torch or numpy, as a text or as the object itself."""
    if value is None:
        return None
    if isinstance(value, str):
        return cast_name(text_of(value, "--dtype") or "")
    if value is float:
        raise _wrong(value, "--dtype", 'a name such as "bf16", or a dtype of torch or numpy')
    if isinstance(value, type):
        return cast_name(value.__name__)
    name = getattr(value, "name", None)
    name = name if isinstance(name, str) else str(value)
    if not re.fullmatch(r"(torch\.)?[a-z][a-z0-9_]+", name):
        raise _wrong(value, "--dtype", 'a name such as "bf16", or a dtype of torch or numpy')
    return cast_name(name)


def bytes_of(value: object, option: str) -> int | None:
    """A number of bytes, given as such or as "5GB"."""
    if isinstance(value, str):
        return parse_size(value)
    return int(value) if isinstance(value, float) and value.is_integer() else int_of(value, option)


def parse_size(text: str) -> int:
    """Bytes of "5GB" (decimal), "512MiB" (binary) or "1000000". Raises UsageError."""
    digits = text.strip().rstrip("kKmMgGtTiIbB ").strip()
    suffix = text.strip()[len(digits) :].strip().upper()
    try:
        number = float(digits)
    except ValueError:
        number = -1.0
    if suffix not in SUFFIXES or not 0 < number * SUFFIXES.get(suffix, 0) < 1 << 62:
        raise UsageError(f"{text!r} is not a size", expected="a size such as 5GB, 512MiB or 1000000000", hint=size_meant(text))
    if not suffix and number < LEAST_BARE:
        raise UsageError(f"{text} bytes is hardly what was meant", expected="a size with its unit", hint=f"did you mean {text}GB?")
    return int(number * SUFFIXES[suffix])


def parse_share(value: str) -> float:
    """A share as a number from 0 to 1: "5%" or "0.05". Raises UsageError."""
    try:
        return float(value[:-1]) / 100 if value.endswith("%") else float(value)
    except ValueError:
        raise UsageError("the share is not a number", expected="a share such as 5%") from None


def parse_list(text: str | None, kind: Callable[[str], Number], option: str) -> tuple[Number, ...] | None:
    """Numbers separated by commas; None stays None. Raises UsageError that names the option."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        hint = (weights_meant if option == "--weights" else steps_meant)(text, option)
        raise UsageError(f"{option} {text!r} is not a list of numbers", expected="numbers separated by commas", hint=hint) from None


# -- options ---------------------------------------------------------------------------------------------------------


def options_of(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """The options of a command (a dataclass) from keyword arguments, each checked against the type of its field.

    If several values are allowed, a single one is accepted too; sizes, shares and lists may be texts as on the command line.
    Raises UsageError for unknown options and for values of another type.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(SYNONYMS.get(name, name), known, n=1)
            raise UsageError(f"unknown option: {name}", expected=", ".join(known), hint=f"did you mean {close[0]}?" if close else None)
    hints = get_type_hints(kind)
    return kind(**{name: _option(name, value, hints[name]) for name, value in given.items()})


def _option(name: str, value: object, hint: Any) -> Any:
    option = FLAGS.get(name, f"--{name.replace('_', '-')}")
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    choices = [kind for kind in kinds if kind is not types.NoneType]
    if value is None:
        if types.NoneType not in kinds:
            raise _wrong(value, option, _wanted(hint))
        return None
    if name == "dtype":
        return dtype_of(value)
    if name == "max_shard_size":
        return bytes_of(value, option)
    if name == "sample" and isinstance(value, str):
        return parse_share(value)
    return _typed(value, option, choices[0])


def _typed(value: object, option: str, kind: Any) -> Any:
    """A value of one type, or UsageError."""
    if get_origin(kind) is tuple:
        return _several(value, option, get_args(kind)[0])
    if any(get_origin(choice) is os.PathLike for choice in get_args(kind)):
        return path_text(value, option)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{value} is not a choice for {option}", expected=", ".join(get_args(kind)))
        return value
    if kind is str:
        return text_of(value, option)
    if kind is int:
        return int_of(value, option)
    if kind is float:
        return _float_of(value, option)
    if not isinstance(value, bool):
        raise _wrong(value, option, "True or False")
    return value


def _several(value: object, option: str, kind: type) -> tuple[Any, ...]:
    if isinstance(value, str) and kind in (int, float):
        return parse_list(value, kind, option) or ()
    if isinstance(value, (set, frozenset)) and kind in (int, float):
        raise UsageError(f"{option} must be a list: a {type(value).__name__} has no order", hint="the order says which number is whose")
    # An array of numpy without dimensions is a number, although it has __iter__.
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__") or getattr(value, "ndim", 1) == 0:
        return (_typed(value, option, kind),)
    return tuple(_typed(each, option, kind) for each in value)


def _float_of(value: object, option: str) -> float:
    if isinstance(value, (str, bool)) or not hasattr(value, "__float__"):
        raise _wrong(value, option, "a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _wrong(value, option, "a number") from None


def _wanted(kind: Any) -> str:
    """What an option of this type takes, in words."""
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "a list"
    return "True or False" if kind is bool else f"{'an' if kind is int else 'a'} {kind.__name__}"


def _wrong(value: object, option: str, expected: str) -> CkptError:
    return UsageError(f"{option} must be {expected}, not {'None' if value is None else type(value).__name__}")
