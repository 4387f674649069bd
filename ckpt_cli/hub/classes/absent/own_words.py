"""What is said of a class of the user's own (``own``), which is compared with a ``kind`` of transformers."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, printable


def own_text(own: str, kind: str) -> str:
    """What is added to a line about the class that was compared; nothing where it is the one that the config names."""
    return f", as {printable(kind)}: {printable(own)} is no class of transformers" if own else ""


def not_there(own: str, kind: str, placed: int, count: int) -> str:
    """Why nothing was compared: ``placed`` of ``count`` tensors have a name of the other class."""
    having = f"only {placed} of {count} tensors {'has' if placed == 1 else 'have'}" if placed else "no tensor has"
    return f"{printable(own)} is no class of transformers, and {having} a name of {printable(kind)}"


def prefix_text(own: str, kind: str, prefix: str) -> str:
    """What is said of names without what all of them begin with, which a wrapper or the user's own class may have put there."""
    text = f"{printable(prefix)} was removed from the names, which are those of {printable(kind)} then: if {printable(own)} has"
    return f"{text} a module of that name, --names native keeps it"


def replaced_text(own: str, kind: str, names: Sequence[str]) -> str:
    """What is said of tensors of the class that the user's own may have others for."""
    many = "is not there" if len(names) == 1 else "are not there"
    text = f"{few(grouped(names), 3)} of {printable(kind)} {many}; {printable(own)} may have others in their place"
    return f"{text}, and what loads the model by its model_type makes new ones"
