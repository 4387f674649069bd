"""What is said about a command line that does not parse: what is wrong in our words, and the way out."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli import shell
from ckpt_cli.cli.words.help import kind_of, label_of, metavar_of
from ckpt_cli.cli.words.synonyms import COMMANDS
from ckpt_cli.errors import CkptError, NotFound, UsageError
from ckpt_cli.urls import URL

ELSEWHERE: Mapping[str, str] = {
    "--backend": "leave it out: the format is detected",
    "--format": "leave it out: the format is detected",
    "--framework": "leave it out: the format is detected",
    "--tie-word-embedding": "leave it out: tied tensors are recognised",
    "--is-value-model": "leave it out: critics are recognised",
    "--trust-remote-code": "leave it out: code of a model is copied, and never run",
    "--use-cpu-initialization": "leave it out: no model is built",
    "--device": "leave it out: no device is needed",
    "--cpu": "leave it out: no device is needed",
    "--safe-serialization": "leave it out: safetensors is what is written",
    "--unsafe-serialization": "leave it out: only safetensors is written",
    "--hf-upload-path": "upload the folder afterwards: hf upload REPO FOLDER",
    "--push-to-hub": "upload the folder afterwards: hf upload REPO FOLDER",
    "--remove-checkpoint-dir": "leave it out: ckpt never removes a source",
    "--test-hf-dir": "ckpt verify FOLDER --against RUN",
    "--exclude-frozen-parameters": "--exclude GLOB leaves out tensors",
    "--recursive": "leave it out: a run is searched for its steps",
    "--yes": "leave it out: ckpt asks nothing; --overwrite replaces an output",
    "-y": "leave it out: ckpt asks nothing; --overwrite replaces an output",
    "--silent": "-q prints only the result and warnings",
    "--no-color": "--color never",
    "--plain": "--color never --progress plain",
    "--fp16": "--dtype fp16",
    "--bf16": "--dtype bf16",
    "--fp32": "--dtype fp32",
    "--half": "--dtype fp16",
    "--ema": "--type ema",
    "--last-step": "leave it out: the newest complete step is taken",
    "--world-size": "leave it out: the files say how many ranks there were",
    "--num-shards": "leave it out: the files say how many ranks there were",
    "--num-gpus": "leave it out: no GPU is needed",
    "--model": "PATH stands alone: ckpt merge RUN; --base BASE names the base model",
    "--tensor": "ckpt show PATH TENSOR",
    "--num-workers": "--jobs N",
    "--workers": "--jobs N",
    "--threads": "--jobs N",
    "--rank": "leave it out: all ranks are read",
    "--ranks": "leave it out: all ranks are read",
    "--precision": "--dtype bf16",
    "--cast": "--dtype bf16",
    "--iteration": "--step N",
    "--iter": "--step N",
    "--epoch": "--step N: ckpt detect RUN lists the steps",
    "--global-step": "--step N",
    "--tokenizer": "--base BASE, a folder with config and tokenizer",
    "--config": "--base BASE, a folder with config and tokenizer",
    "--role": "--type ROLE",
    "--filter": "--include GLOB",
    "--skip": "--exclude GLOB",
    "--into": "-o DIR",
    "--to": "-o DIR",
    "--dest": "-o DIR",
    "--dst": "-o DIR",
    "--destination": "-o DIR",
    "--dir": "-o DIR",
    "--src": "PATH stands alone, without an option",
    "--in": "PATH stands alone, without an option",
    "--ckpt": "PATH stands alone, without an option",
    "--checkpoint-dir": "PATH stands alone, without an option",
    "--run": "PATH stands alone, without an option",
    "--save": "-o DIR",
    "-d": "did you mean --dtype?",
    "-n": "--dry-run writes nothing",
    "--hf": "leave it out: a Hugging Face folder is what is written",
    "--pt": "leave it out: safetensors is what is written",
    "--log-level": "-v says more, -q less",
}
"""Options of other tools (verl.model_merger, accelerate merge-weights, zero_to_fp32, git, cp), and what stands for them here."""

SERVED = "merge it, then pass the folder to a server: ckpt merge RUN -o DIR && vllm serve DIR"
OTHERS: Mapping[str, str] = {
    "serve": SERVED,
    "chat": SERVED,
    "generate": SERVED,
    "upload": "ckpt publish DIR --push-to-hub REPO pushes an output; ckpt merge RUN --push-to-hub REPO writes one first",
    "push": "ckpt publish DIR --push-to-hub REPO pushes an output; ckpt merge RUN --push-to-hub REPO writes one first",
    "download": "hf download REPO --local-dir DIR",
    "pull": "hf download REPO --local-dir DIR",
    "eval": "ckpt watch RUN --exec 'python evaluate.py {output}' runs a command for every step",
    "evaluate": "ckpt watch RUN --exec 'python evaluate.py {output}' runs a command for every step",
    "test": "ckpt verify DIR checks an output",
    "quantize": "ckpt casts, and does not quantise: ckpt merge RUN -o DIR, then a tool for it, such as llm-compressor",
    "cast": "ckpt merge RUN --dtype bf16",
    "version": "ckpt --version",
    "rm": "ckpt never removes a source",
    "remove": "ckpt never removes a source",
    "delete": "ckpt never removes a source",
    "clean": "ckpt never removes a source",
    "prune": "ckpt never removes a source; ckpt watch RUN --keep N removes outputs of its own",
    "shard": "ckpt writes folders of Hugging Face only; ckpt merge RUN --max-shard-size 5GB sets the size of their files",
    "reshard": "ckpt writes folders of Hugging Face only; ckpt merge RUN --max-shard-size 5GB sets the size of their files",
    "split": "ckpt writes folders of Hugging Face only; ckpt merge RUN --max-shard-size 5GB sets the size of their files",
    "stats": "ckpt inspect PATH --stats",
    "keys": "ckpt inspect PATH --all",
    "tensors": "ckpt inspect PATH --all",
    "cat": "ckpt show PATH TENSOR",
    "print": "ckpt show PATH TENSOR",
    "plot": "ckpt diff A B --plot FILE",
    "steps": "ckpt detect RUN",
    "report": "ckpt detect RUN --report",
    "state": "ckpt extract-state RUN",
    "optimizer": "ckpt extract-state RUN --optimizer",
    "load": "in Python: ckpt_cli.open(PATH)",
    "open": "in Python: ckpt_cli.open(PATH)",
    "lora": "ckpt merge RUN --base BASE",
    "fuse": "ckpt merge RUN --base BASE",
    "export": "ckpt merge RUN -o DIR",
    "save": "ckpt merge RUN -o DIR",
}
"""Commands of other tools that are none here, and what there is instead."""

NEAR = 0.7
"""How alike a word and a command must be: commands are short, so that less is found in words of another meaning."""


def explained(error: Exception, arguments: Sequence[str]) -> CkptError:
    """The error that a command line which does not parse ends in, with the way out as its hint."""
    from ckpt_cli.cli.app import command_of

    name, command = command_of(arguments)
    path = f"ckpt {name}" if name is not None else "ckpt"
    if hasattr(error, "possibilities"):
        option = str(getattr(error, "option_name", ""))
        option = next((word for word in arguments if re.fullmatch(f"{option}[a-z_-]+(=.*)?", word)), option) if len(option) == 2 else option
        return (
            _no_such_option(option, path, command) if name is not None and _follows(option, name, arguments) else _early(option, arguments)
        )
    if hasattr(error, "option_name"):
        return _wrong_use(str(getattr(error, "option_name", "")), str(getattr(error, "message", error)), path, command)
    parameter = getattr(error, "param", None)
    if parameter is not None and not getattr(error, "message", ""):
        return _missing(parameter, command, arguments)
    describe = getattr(error, "format_message", None)
    message = (describe() if describe else str(error)).rstrip(".")
    extra = re.match(r"Got unexpected extra argument\S* \((.*)\)", message)
    if extra is not None:
        return _too_many(extra[1], path, command, arguments)
    return UsageError(message[:1].lower() + message[1:], hint=f"{path} --help")


def _follows(option: str, name: str, arguments: Sequence[str]) -> bool:
    """Whether an option stands after the command."""
    at = next((i for i, word in enumerate(arguments) if word.partition("=")[0] == option), len(arguments))
    first = next(i for i, word in enumerate(arguments) if word == name or COMMANDS.get(word) == name)
    return at > first


def no_such_command(word: str, commands: Mapping[str, Any], arguments: Sequence[str]) -> CkptError:
    """The error for a word that is no command: a path without one, a misspelt one."""
    rest = shell.join(arguments)
    is_address = URL.fullmatch(word) is not None
    if (is_address or os.path.lexists(os.path.expanduser(word))) and word not in commands:
        what = "an address" if is_address else "a path"
        return UsageError(f"{word} is {what}: which command?", expected=", ".join(shown(commands)), hint=f"ckpt detect {rest}")
    known = [*shown(commands), *(other for other, name in COMMANDS.items() if name in commands)]
    if (instead := OTHERS.get(word)) is not None:
        return UsageError(f"there is no command {word}", expected=", ".join(shown(commands)), hint=instead)
    near = closest(word, known, NEAR)
    if near is None and ("/" in word or word.startswith((".", "~"))):
        return UsageError(f"{word} is no command, and no such path exists", hint="the command comes first: ckpt detect PATH")
    hint = f"did you mean ckpt {COMMANDS.get(near, near)}?" if near is not None else "ckpt --help"
    return UsageError(f"there is no command {word}", expected=", ".join(shown(commands)), hint=hint)


def shown(commands: Mapping[str, Any]) -> list[str]:
    """The commands that are not hidden."""
    return [name for name, command in commands.items() if not command.hidden]


def closest(word: str, known: Collection[str], alike: float = 0.6) -> str | None:
    """The most similar of the known words, None if none is similar enough."""
    bare = {name.lower().lstrip("-"): name for name in known}  # dashes would make all short options alike
    near = difflib.get_close_matches(word.lower().lstrip("-"), bare, n=1, cutoff=alike)
    return bare[near[0]] if near else None


def _early(option: str, arguments: Sequence[str]) -> CkptError:
    """An option of a command before the command, or without one."""
    from ckpt_cli.cli.app import command_of, root_command

    name, _ = command_of(arguments)
    if name is not None:
        at = next(i for i, word in enumerate(arguments) if word == name or COMMANDS.get(word) == name)
        rest = shell.join(["ckpt", *arguments[at:], *arguments[:at]])
        return UsageError(f"{option} stands before the command", expected="options after it", hint=rest)
    near = closest(option, [name for parameter in root_command().params for name in parameter.opts])
    hint = f"did you mean {near}?" if near else "options come after a command: ckpt COMMAND PATH [OPTIONS]"
    return UsageError(f"ckpt has no option {option}", hint=hint)


def _no_such_option(option: str, path: str, command: Any) -> CkptError:
    dashed = option.replace("_", "-")
    way_out = ELSEWHERE.get(dashed)
    own = {name for parameter in command.params for name in parameter.opts}
    if way_out is not None and any(word not in own for word in re.findall(r"(?<!\S)--?[a-z-]+", way_out) if way_out.startswith("-")):
        way_out = None
    if way_out is None:
        names = {name: parameter for parameter in command.params if parameter.param_type_name == "option" for name in parameter.opts}
        near = closest(dashed, [name for name in names if name.startswith("--")]) if len(dashed) > 2 else None
        others = _commands_with(dashed)
        words = [f"did you mean {_long(names[near])}?"] if near else []
        words += [f"{_listed(others)} {'have' if len(others) > 1 else 'has'} {dashed if near else 'it'}"] if others else []
        if others and "-o" not in names and dashed in ("-o", "--output"):
            words = [f"write what it names without it: {command.epilog.splitlines()[0]}"]
        way_out = " ".join(words) or f"{path} --help"
    return UsageError(f"{path} has no option {option}", hint=way_out)


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _long(parameter: Any) -> str:
    return next(str(name) for name in parameter.opts if name.startswith("--"))


def _commands_with(option: str) -> list[str]:
    from ckpt_cli.cli.app import root_command

    commands = root_command().commands
    return [f"ckpt {name}" for name in shown(commands) if any(option in parameter.opts for parameter in commands[name].params)]


def _wrong_use(option: str, message: str, path: str, command: Any) -> CkptError:
    parameter = next((p for p in command.params if option in (*p.opts, *p.secondary_opts)), None)
    if "not take a value" in message:
        return UsageError(f"{option} takes no value", hint=f"write {option} alone")
    if parameter is None:
        return UsageError(message.rstrip("."), hint=f"{path} --help")
    kind, (_, says_default, default) = kind_of(parameter), parameter.help.partition("Default: ")
    expected = f"a {kind}; without {option} it is {default.rstrip('.')}" if kind is not None and says_default else parameter.help
    return UsageError(f"{option} needs a value", expected=expected, hint=f"{option} {metavar_of(parameter)}")


def refuse_swapped(command: str, path: str, other: str) -> None:
    """Raise NotFound for a PATH that is not there where what stands after it is: a checkpoint that ckpt did not write."""
    from ckpt_cli.files.manifest import NAME as MANIFEST

    first, second = (os.path.expanduser(each) for each in (path, other))
    if (
        first
        and not URL.fullmatch(first)
        and os.path.exists(second)
        and not os.path.lexists(first)
        and not os.path.lexists(os.path.join(second, MANIFEST))
    ):
        hint = f"PATH comes first: {shell.join(['ckpt', command, other, path])}"
        raise NotFound("no such file or folder", path=path, hint=hint)


def refuse_two_inputs(path: str, other: str, output: str | None = None) -> None:
    """Raise UsageError for a checkpoint where the output stands, unless ckpt wrote it: an output may be replaced.

    With an ``output`` of its own, the second one is an input.
    """
    from ckpt_cli.discover.locate import locate
    from ckpt_cli.files.manifest import NAME as MANIFEST

    second = os.path.expanduser(other)
    if not os.path.exists(second) or os.path.lexists(os.path.join(second, MANIFEST)):
        return
    try:
        locate(Path(second), None, ())
    except CkptError:
        return
    both = shell.join([path, other])
    if output is not None:
        hint = f"ckpt average {both} -o {shell.word(output)} writes their mean; merge them one by one otherwise"
        raise UsageError(f"two checkpoints: {both}", expected="one PATH, and a folder to write", hint=hint)
    hint = f"two inputs? ckpt average {both} -o DIR, or ckpt diff {both}; to write a folder, choose another -o"
    raise UsageError(
        f"{other} is a checkpoint, and stands where the output is named", expected="one PATH, and a folder to write", hint=hint
    )


def refuse_number(path: str, other: str) -> None:
    """Raise UsageError for a bare number where the output stands: a step is meant, or the name is to be written as a path."""
    if other.isdecimal():
        again = shell.join(["ckpt", "merge", path, "--step", other])
        raise UsageError(f"{other} stands where the output is named", hint=f"did you mean {again}? a folder of that name is -o ./{other}")


def _missing(parameter: Any, command: Any, arguments: Sequence[str]) -> CkptError:
    if parameter.param_type_name == "argument":
        return UsageError(f"{metavar_of(parameter)} is missing", expected=parameter.help, hint=command.epilog.splitlines()[0])
    short = min(parameter.opts, key=len)
    return UsageError(
        f"{_long(parameter)} is missing",
        expected=f"{label_of(parameter)}: {parameter.help}",
        hint=f"{shell.join(['ckpt', *arguments])} {short} {metavar_of(parameter)}",
    )


def _too_many(words: str, path: str, command: Any, arguments: Sequence[str]) -> CkptError:
    message = f"one argument too many: {words}" if " " not in words else f"too many arguments: {words}"
    options = {name for parameter in command.params for name in parameter.opts}
    takes = [metavar_of(parameter) for parameter in command.params if parameter.param_type_name == "argument" and not parameter.hidden]
    expected = "PATH, and where to write" if "--output" in options else f"one {takes[0]}" if len(takes) == 1 else " and ".join(takes)
    first = words.split()[0]
    hint = f"{path} --help"
    there = [word for word in arguments if not word.startswith("-") and os.path.exists(os.path.expanduser(word))]
    if len(there) > 1 and len(takes) == 1 and there[-1] == words.split()[-1]:
        folders = {os.path.dirname(word) for word in there}
        together = len(folders) == 1 and "" not in folders and not any(map(os.path.isdir, there))
        each = f'one at a time: for each in {shell.join(there)}; do {path} "$each"; done'
        hint = f"the folder that holds them: {path} {shell.word(folders.pop())}" if together else each
    if "--stats" in options and not os.path.lexists(first):
        given = shell.word(next((word for word in there if word != first), "PATH"))
        one = f"ckpt show {given} {'NAME' if re.search(r'[*?[]', first) else shell.word(first)}"
        hint = f"ckpt inspect {given} --all lists every tensor; for one by its name: {one}"
    return UsageError(message, expected=expected, hint=hint)
