"""Completion scripts of the shells, and where each shell finds them.

All three ask the program, in the way in which Typer's script for fish does, which prints a line per word: the word, a tab, its help.
Where the program knows no word, files complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Optional

import typer

from ckpt_cli.errors import NotWritable, UsageError

# ruff: noqa: UP045 - Typer evaluates these types on Python 3.10

BASH = r"""_ckpt_completion() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line%%$'\t'*}")
    done < <(_CKPT_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS="${COMP_LINE:0:COMP_POINT}" "$1" 2>/dev/null)
    [[ ${COMPREPLY[*]} == "" ]] && COMPREPLY=()
    return 0
}

complete -o default -F _ckpt_completion ckpt unshard
"""

ZSH = r"""#compdef ckpt unshard

_ckpt_completion() {
    local line
    local -a found
    local asked="${(j: :)words[1,CURRENT]}"
    for line in "${(@f)$(_CKPT_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
        _TYPER_COMPLETE_ARGS="$asked" ${words[1]} 2>/dev/null)}"; do
        [[ -n $line ]] && found+=("${${line%%$'\t'*}//:/\\:}:${${line#*$'\t'}//:/\\:}")
    done
    compset -P '--*='
    if (( $#found )); then
        _describe -V 'ckpt' found
    else
        _files
    fi
}

if [[ $funcstack[1] == _ckpt ]]; then
    # Loaded by the completion system on the first TAB, which this one answers.
    _ckpt_completion "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _ckpt_completion ckpt unshard
fi
"""

FISH = r"""function __ckpt_completion
    set -lx _CKPT_COMPLETE complete_fish
    set -lx _TYPER_COMPLETE_FISH_ACTION get-args
    set -lx _TYPER_COMPLETE_ARGS (commandline -cp | string collect)
    set -l found (ckpt 2>/dev/null | string match -r '.+')
    # Of --dtype=bf the whole word is completed.
    set -l before (commandline -ct | string match -r '^--[^=]*=')
    if test (count $found) -gt 0
        printf "$before%s\n" $found
    else
        __fish_complete_path (commandline -ct)
    end
end

for name in ckpt unshard
    complete --command $name --no-files --arguments '(__ckpt_completion)'
end
"""

SCRIPTS: Mapping[str, str] = {"bash": BASH, "zsh": ZSH, "fish": FISH}
STARTS: Mapping[str, str] = {"bash": ".bashrc", "zsh": ".zshrc"}
"""The files that shells read when they start, in the home folder."""


def installed(shell: str) -> str:
    """Put the script of a shell where that shell finds it, and say where. Raises UsageError, NotWritable."""
    script, home = _script(shell), Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "ckpt"
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions"
    path = config / "ckpt.fish" if shell == "fish" else data / f"completion.{shell}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
        if shell == "fish":
            (config / "unshard.fish").write_text(script)
            return str(path)
        start, line = home / STARTS[shell], f"source {path}"
        content = start.read_text() if start.exists() else ""
        if line not in content.splitlines():
            start.write_text(f"{content.rstrip()}\n{line}\n".lstrip())
    except OSError as error:
        raise NotWritable(f"the completion cannot be installed: {error.strerror}", path=path, hint="ckpt --show-completion") from error
    return f"{path}, which {start} reads"


def own_shell() -> str:
    """The shell of the user."""
    return Path(os.environ.get("SHELL") or "bash").name


def _script(shell: str) -> str:
    if shell not in SCRIPTS:
        raise UsageError(f"there is no completion for {shell}", expected=", ".join(SCRIPTS), hint="ckpt --install-completion bash")
    return SCRIPTS[shell]


def _install(shell: Optional[str]) -> None:
    if shell is not None:
        typer.echo(f"completion for {shell} is installed: {installed(shell)}\nnext: exec {shell}")
        raise typer.Exit


def _show(shell: Optional[str]) -> None:
    if shell is not None:
        typer.echo(_script(shell), nl=False)
        raise typer.Exit


OPTIONS = ("--install-completion", "--show-completion")
Install = Annotated[
    Optional[str],
    typer.Option(
        OPTIONS[0], metavar="SHELL", callback=_install, is_eager=True, show_default=False, help="Install completion for bash, zsh or fish."
    ),
]
Show = Annotated[
    Optional[str],
    typer.Option(OPTIONS[1], metavar="SHELL", callback=_show, is_eager=True, show_default=False, help="Print the completion script."),
]
