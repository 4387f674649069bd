"""The commands by name: what lists of them say is at hand, and the command itself is made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Listed:
    """A command: the module of its function in `cli`, its summary (at most 55 characters), its help, and examples that work as they are."""

    module: str
    name: str
    short: str
    help: str
    examples: tuple[str, ...]

    def made(self, kind: Any) -> Any:
        """The command of class ``kind``. Its module is loaded now: a process that starts needs one of them."""
        import typer.main

        function = getattr(import_module(f"ckpt_cli.cli.{self.module}"), self.name.replace("-", "_"))
        alone = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
        said = {"short_help": self.short, "help": self.help, "epilog": "\n".join(self.examples)}
        context = {"help_option_names": ["-h", "--help"]}
        alone.command(name=self.name, cls=kind, context_settings=context, **said)(function)  # type: ignore[arg-type]
        return typer.main.get_command(alone)


class Commands(Mapping[str, Any]):
    """Commands of class ``kind`` as `listed`, and after them those that are made already."""

    def __init__(self, listed: Mapping[str, Listed], kind: Any, made: Mapping[str, Any]) -> None:
        self._listed, self._kind, self._made = listed, kind, dict(made)
        self._names = tuple(dict.fromkeys((*listed, *made)))

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._listed[name].made(self._kind)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def summaries(self) -> list[tuple[str, str]]:
        """The name and the summary of each that help shows."""
        return [(name, said.short) for name, said in self._listed.items()]
