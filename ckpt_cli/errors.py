"""The errors of ckpt.

    CkptError
    ├── UsageError            2  usage                options that contradict each other
    ├── InputError            3
    │   ├── NotFound             not-found            the path, step or component is not there
    │   ├── NotRecognised        not-recognised       no reader knows this folder or file
    │   ├── Unreadable           unreadable           permissions, I/O errors, not a regular file
    │   ├── CorruptFile          corrupt-file         truncated, damaged or inconsistent bytes
    │   ├── LfsPointer           lfs-pointer          a Git LFS pointer, not the file itself
    │   ├── FilePointer          file-pointer         another pointer, or the text of a link, not the file itself
    │   ├── UnfinishedDownload   unfinished-download  a file that a download has not filled yet
    │   ├── Unsupported          unsupported          understood, but deliberately not read
    │   ├── NoMemory             no-memory            the process may not use as much memory as it needs
    │   └── SourceChanged        source-changed       a source file changed while it was being read
    ├── IncompleteError       4
    │   ├── MissingShard         missing-shard        files of some ranks are not there
    │   ├── PartOfSet            part-of-set          one file of a set, which is not a model alone
    │   ├── MixedWorldSizes      mixed-world-sizes    shards of two saves in one folder
    │   ├── Gap                  gap                  elements that no shard holds
    │   ├── Overlap              overlap              elements that two shards hold
    │   ├── Inconsistent         inconsistent         ranks contradict each other
    │   ├── MissingTensors       missing-tensors      tensors that the model class needs and that are nowhere
    │   ├── DifferentTensors     different-tensors    checkpoints that should hold the same tensors do not
    │   └── Undecidable          undecidable          the files do not say how to merge the tensor
    ├── OutputError           5
    │   ├── OutputExists         output-exists
    │   ├── OutputInUse          output-in-use        another run writes it
    │   ├── OutputInsideSource   output-inside-source
    │   ├── Watched              watched              another watch writes into the folder
    │   ├── NoSpace              no-space
    │   ├── NotWritable          not-writable
    │   ├── EngineFailed         engine-failed        an engine (Ray) that cannot be reached, or that lost its workers
    │   └── PushFailed           push-failed          the Hub cannot be reached, or refuses what is pushed to it
    └── FindingsError         1
        ├── Warned               strict               warnings, where --strict asks for none
        ├── CastOverflow         cast-overflow        finite values that the requested dtype cannot hold
        └── NonFinite            non-finite           NaN or infinite values in tensors to be averaged, or in LoRA factors to be fused

A message is one line in lower case. ``expected`` says what should have been there, ``hint`` what to do next, only if it was
checked that this helps: a wrong hint is worse than none.
Texts that come from files are escaped when they are shown, never here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import TracebackType
from typing import ClassVar, ParamSpec, TypeVar

from ckpt_cli.urls import shown

LEAST_MEMORY = 256 << 20
"""Bytes of address space that a command takes, mostly for numpy."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SHOWN = 20
"""How many details the text of an error shows."""

INTERRUPTED = "the save or the copy may have been interrupted: get the file again from where it was written"
"""The hint for truncated files."""


def install(extra: str) -> str:
    """How to install what an extra of this distribution brings; it is not on PyPI yet, so a clone is what one has."""
    return f"in a clone of the repository of ckpt: pip install '.[{extra}]'"


class CkptError(Exception):
    """The base of all errors that ckpt raises on purpose.

    Attributes: ``code`` (stable, kebab-case), ``exit_code``, ``message``, ``expected``, ``hint``, ``path``, ``tensor``, and
    ``details``: lines for what does not fit in one, such as a list of differences.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    usual_hint: ClassVar[str | None] = None
    """The default hint: only for kinds of errors where it always helps."""
    function: str = ""
    """The function of Python whose documentation --help means, set by `given.boundary`."""

    def __init__(
        self,
        message: str,
        *,
        path: object = None,
        tensor: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
        details: Sequence[str] = (),
    ) -> None:
        self.message, self.path = message, None if path is None else str(path)
        super().__init__(self.message)
        self.tensor, self.expected, self.hint = tensor, expected, hint
        self.details = tuple(map(shown, details))

    def __setattr__(self, name: str, value: object) -> None:
        """Addresses in place of the paths that stand for them, also in what is added later."""
        super().__setattr__(name, shown(value) if isinstance(value, str) else value)

    def __str__(self) -> str:
        """Everything known, one line each, with options as Python calls them: shown in tracebacks and logs of Python callers."""
        from ckpt_cli.names import delimited, printable
        from ckpt_cli.shell import in_python

        where = {
            "tensor": self.tensor,
            "path": None if self.path is None else delimited(self.path),
            "expected": None if self.expected is None else in_python(self.expected),
            "hint": None if self.advice is None else in_python(self.advice).replace("help()", f"help({self.function})"),
        }
        given = (f"{label}: {text}" for label, text in where.items() if text is not None)
        lines = [in_python(self.message), *self.details[:SHOWN], *given]
        return "\n  ".join(printable(line) for line in lines)

    @property
    def advice(self) -> str | None:
        """The hint, or the usual one of its kind."""
        return self.hint or self.usual_hint


class UsageError(CkptError):
    """Options or arguments that cannot be what the user meant."""

    code = "usage"
    exit_code = 2
    usual_hint = "see --help"


class AmbiguousStep(UsageError):
    """Several folders hold the step that is meant."""

    code = "ambiguous-step"


class InputError(CkptError):
    """An input is missing, unreadable or not recognised."""

    code = "input"
    exit_code = 3


class NotFound(InputError):
    code = "not-found"


class NoComponent(NotFound):
    """A checkpoint lacks the component that was asked for."""


class NotRecognised(InputError):
    code = "not-recognised"


class IsOptimizer(NotRecognised):
    """An optimizer where a model was expected."""


class Unreadable(InputError):
    code = "unreadable"


class CorruptFile(InputError):
    code = "corrupt-file"


class NotFetched(InputError):
    """A file has its name, but not its content, which something should still fetch."""


class LfsPointer(NotFetched):
    """A three-line pointer file in place of the content that Git LFS should have fetched."""

    code = "lfs-pointer"
    usual_hint = "run `git lfs pull` in its repository"


class FilePointer(NotFetched):
    code = "file-pointer"


class UnfinishedDownload(NotFetched):
    """A file beside which a download tool keeps account of the parts that are there: it may have its full size, with holes."""

    code = "unfinished-download"


class Unsupported(InputError):
    code = "unsupported"
    usual_hint = "load it with the library that wrote it, and save plain tensors"


class NoMemory(InputError):
    code = "no-memory"
    usual_hint = "use a machine, or a batch job, with more memory"


class SourceChanged(InputError):
    code = "source-changed"
    usual_hint = "run the command again when nothing writes to it any more"


class IncompleteError(CkptError):
    """The checkpoint was read, but it is incomplete or contradicts itself."""

    code = "incomplete"
    exit_code = 4


class MissingShard(IncompleteError):
    code = "missing-shard"


class MissingParts(IncompleteError):
    code = "missing-parts"


class PartOfSet(IncompleteError):
    code = "part-of-set"


class MixedWorldSizes(IncompleteError):
    code = "mixed-world-sizes"


class Gap(IncompleteError):
    code = "gap"


class Overlap(IncompleteError):
    code = "overlap"


class Inconsistent(IncompleteError):
    code = "inconsistent"


class MissingTensors(IncompleteError):
    code = "missing-tensors"


class DifferentTensors(IncompleteError):
    code = "different-tensors"


class Undecidable(IncompleteError):
    code = "undecidable"


class OutputError(CkptError):
    """The output cannot be written where it was asked for."""

    code = "output"
    exit_code = 5


class OutputExists(OutputError):
    code = "output-exists"
    planned: object = None  # the result of a dry run, which shows it before it ends so


class OutputInUse(OutputError):
    code = "output-in-use"
    usual_hint = "wait until it is done, or choose another place with -o"


class OutputInsideSource(OutputError):
    code = "output-inside-source"


class Watched(OutputError):
    code = "watched"


class NoSpace(OutputError):
    code = "no-space"


class NotWritable(OutputError):
    code = "not-writable"
    usual_hint = "choose another place with -o"


class EngineFailed(OutputError):
    """The machines that should write cannot be reached, or were lost while they wrote."""

    code = "engine-failed"


class PushFailed(OutputError):
    """The Hub cannot be reached, or refuses what is pushed to it; an output that was written stays."""

    code = "push-failed"


class FindingsError(CkptError):
    """A check ran and found an error in the values."""

    code = "findings"
    exit_code = 1


class Warned(FindingsError):
    """Warnings, which ``--strict`` treats as errors; ``warnings`` are their codes and texts."""

    code = "strict"

    warnings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, warnings: Sequence[tuple[str, str]]) -> Warned:
        """The error that these warnings, by code and text, become."""
        unique = tuple(dict.fromkeys(warnings))
        counted = "1 warning as an error" if len(unique) == 1 else f"{len(unique)} warnings as errors"
        error = cls(f"--strict treats {counted}", details=[f"{code}: {text}" for code, text in unique])
        error.warnings = unique
        return error


class CastOverflow(FindingsError):
    code = "cast-overflow"


class NonFinite(FindingsError):
    code = "non-finite"


class reading:  # noqa: N801
    """Attach the file and the tensor to any CkptError that passes through without them. A class: it is entered for every tensor."""

    __slots__ = ("path", "tensor")

    def __init__(self, path: object = None, *, tensor: str | None = None) -> None:
        self.path = path
        self.tensor = tensor

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, CkptError):
            if error.path is None and self.path is not None:
                error.path = str(self.path)
            if error.tensor is None:
                error.tensor = self.tensor


def within_memory(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Turns a MemoryError of a command into NoMemory."""

    @wraps(command)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            _take_buffers()
            return command(*arguments, **options)
        except MemoryError:
            # Raised when the frames that held the memory are gone.
            pass
        raise no_memory()

    return run


def _take_buffers() -> None:
    """OpenBLAS ends the process if it finds no memory for its buffers, so under a limit they are allocated first."""
    limits = memory_limits()
    if not limits:
        return
    if min(limits.values()) < LEAST_MEMORY:
        raise MemoryError
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise MemoryError from error


def no_memory() -> NoMemory:
    """The error for a lack of memory, with the limit of the process if it has one."""
    limits = memory_limits()
    if not limits:
        return NoMemory("there is not enough memory", expected=f"at least {LEAST_MEMORY >> 20} MiB")
    option, size = min(limits.items(), key=lambda item: item[1])
    return NoMemory(
        f"the memory limit of this process is too low: ulimit {option} is {size >> 20} MiB",
        expected=f"at least {LEAST_MEMORY >> 20} MiB, more for files with long pickles",
        hint=f"raise it with `ulimit {option} unlimited` where that is allowed, or run it in a batch job",
    )


def memory_limits() -> dict[str, int]:
    """The limits of this process's memory in bytes, by the option of ``ulimit``; without those that are not set."""
    try:
        import resource
    except ImportError:
        return {}
    soft = {"-v": resource.getrlimit(resource.RLIMIT_AS)[0], "-d": resource.getrlimit(resource.RLIMIT_DATA)[0]}
    return {option: size for option, size in soft.items() if size != resource.RLIM_INFINITY}
