"""Write the pages that are made from the code, docs/reference/ and docs/trainers.md: `python docs/generate.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.cli.app import root_command
from ckpt_cli.cli.looking.json_schema import RESULTS, schema_text
from ckpt_cli.cli.words.help import help_of, label_of, metavar_of, panels_of
from ckpt_cli.formats.trainers import LATEST, PLACES, TRAINERS, Trainer

DOCS = Path(__file__).parent
MADE = "<!-- made by docs/generate.py -->"


def pages() -> dict[str, str]:
    """The text of every page by its path below docs/."""
    made = {
        "reference/commands.md": _commands(),
        "reference/json.md": _json(),
        "reference/environment.md": _environment(),
        "trainers.md": _trainers(),
    }
    return {name: "\n".join([MADE, "", *lines]) + "\n" for name, lines in made.items()}


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


# -- commands --------------------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    root = root_command()
    yield from ("# Commands", "", f"{root.help}", "")
    yield "Options that every command has (`--json`, `-q`, `-v`, `--color`, `--progress`, `--debug`) are in its last table."
    with root.make_context("ckpt", [], resilient_parsing=True) as context:
        for name, command in root.commands.items():
            if not command.hidden:
                with command.make_context(name, [], parent=context, resilient_parsing=True) as inner:
                    yield from ("", f"## ckpt {name}", "", *_command(name, command, inner))


def _command(name: str, command: Any, context: Any) -> Iterator[str]:
    arguments, panels = panels_of(command, context)
    takes = "".join(f" {metavar_of(argument)}" for argument in arguments)
    yield from ("```text", f"ckpt {name}{takes} [OPTIONS]", "```", "", command.help, "")
    for argument in arguments:
        yield from (f"{_code(metavar_of(argument))}: {argument.help}", "")
    for panel, options in panels.items():
        yield from (f"| {panel} | |", "|---|---|")
        yield from (f"| {_code(label_of(option))} | {_cell(help_of(option))} |" for option in options)
        yield ""
    yield from ("```sh", *command.epilog.splitlines(), "```")


# -- JSON ------------------------------------------------------------------------------------------------------------


def _json() -> Iterator[str]:
    schema = json.loads(schema_text(None))
    yield from ("# JSON", "")
    yield "With `--json` every command prints one document, on success and on failure; `ckpt --json-schema [COMMAND]` prints its schema."
    yield "The document has these fields:"
    yield from ("", "| field | |", "|---|---|")
    for field, text in ENVELOPE.items():
        yield f"| `{field}` | {text} |"
    yield from ("", "| command | `data` |", "|---|---|")
    for command, classes in RESULTS.items():
        names = [path.rpartition(".")[2] for path in classes]
        yield f"| `ckpt {command}` | {' or '.join(f'[{name}](#{name.lower()})' for name in names)} |"
    for name, made in schema["$defs"].items():
        yield from ("", f"## {name}", "", _cell(made.get("description", "").split("\n\n")[0]), "", "| field | type |", "|---|---|")
        yield from (f"| `{field}` | {_type(value)} |" for field, value in made.get("properties", {}).items())


ENVELOPE = {
    "schema": "the version of this form",
    "command": "the command that was run",
    "status": "`success`, `findings` or `error`",
    "exit_code": "as in [errors](../errors.md#exit-codes)",
    "data": "the result, `null` on failure; see below",
    "errors": "what went wrong: code, message, path, tensor, what was expected, and a hint",
}


def _type(value: Mapping[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(map(_type, value["anyOf"])))
    if "enum" in value or "const" in value:
        return ", ".join(f"`{word}`" for word in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        items = value.get("items") or (value.get("prefixItems") or [{}])[0]
        return f"list of {_type(items)}"
    if isinstance(value.get("additionalProperties"), dict):
        return f"by name: {_type(value['additionalProperties'])}"
    return str(value.get("type", "any"))


# -- environment -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "CKPT_COLOR": "as `--color`",
    "CKPT_PROGRESS": "as `--progress`",
    "CKPT_DEBUG": "as `--debug`",
    "NO_COLOR": "no colours",
    "FORCE_COLOR": "colours also off a terminal",
    "TERM": "`dumb`: progress in plain lines",
}
PLACES_OF = {
    "HF_HOME": "where the cache of the Hub is: `--base org/name` looks in its `hub/`; default `$XDG_CACHE_HOME/huggingface`",
    "HF_HUB_CACHE": "the cache of the Hub itself; goes before `HF_HOME`",
    "HUGGINGFACE_HUB_CACHE": "the old name of `HF_HUB_CACHE`, which goes before it",
    "XDG_CACHE_HOME": "where it is remembered which tensors a model class of transformers has; default `~/.cache`",
    "XDG_DATA_HOME": "where `--install-completion` puts the scripts of bash and zsh",
    "XDG_CONFIG_HOME": "where it puts that of fish",
    "SHELL": "for which shell, if none is named",
}
MACHINES = {
    "RANK": "`--part auto`: which part, under torchrun",
    "WORLD_SIZE": "of how many",
    "SLURM_PROCID": "the same under srun",
    "SLURM_STEP_NUM_TASKS": "of how many; a batch script has none",
    "OMPI_COMM_WORLD_RANK": "the same under Open MPI",
    "OMPI_COMM_WORLD_SIZE": "of how many",
    "PMI_RANK": "the same under mpirun of MPICH and Intel MPI",
    "PMI_SIZE": "of how many",
    "RAY_ADDRESS": "`--engine ray`: the cluster, if `--ray-address` names none",
}
GIVEN = {
    "CKPT_OUTPUT": "`ckpt watch --exec`: the folder that was written, as `{output}`",
    "CKPT_STEP": "its step, as `{step}`",
    "CKPT_RUN": "its run, as `{run}`",
}
VARIABLES = {
    "Instead of options": OPTIONS,
    "Places": PLACES_OF,
    "Several machines": MACHINES,
    "What commands of `ckpt watch` are given": GIVEN,
}


def _environment() -> Iterator[str]:
    yield from ("# Environment variables", "")
    yield "An option that is given goes before its variable. Credentials of object stores are in [remote.md](../remote.md#credentials)."
    for title, rows in VARIABLES.items():
        yield from ("", f"| {title} | |", "|---|---|")
        yield from (f"| `{name}` | {text} |" for name, text in rows.items())


# -- trainers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Trainers that leave folders for which the same is typed; ``below`` is a folder in the step that the table does not have."""

    trainers: tuple[str, ...]
    type: str
    text: str = ""
    name: str = ""
    below: str = ""

    @property
    def title(self) -> str:
        return self.name or ", ".join(self.trainers)


BASE = "`BASE` is the model that training started from: config and tokenizer are taken from it where the run has none."
FAMILIES = (
    Family(
        ("verl", "EasyR1", "SkyRL", "verl family"),
        "ckpt merge RUN --dtype bf16\nckpt merge RUN --type critic",
        "The actor (or policy) is taken; `--type` names another role. The weights are often saved in fp32 even where training computes "
        "in bf16.",
        name="verl, EasyR1, SkyRL",
    ),
    Family(("verl (Megatron)",), "ckpt merge RUN", "The config beside `dist_ckpt/` gives the names of the Hub."),
    Family(
        ("lmms-engine",),
        "ckpt merge RUN --dtype bf16\nckpt merge RUN --type ema --dtype bf16\nckpt merge RUN --type both",
        "`both` writes `model/` and `ema/` into one output folder.",
    ),
    Family(
        ("Hugging Face Trainer", "accelerate", "lerobot"),
        "ckpt merge RUN --dtype bf16",
        "Config and tokenizer come from the step or from the run. If both lack them, add `--base BASE`. LoRA adapters alone become a "
        "PEFT folder.",
    ),
    Family(
        ("Hugging Face Trainer with DeepSpeed", "accelerate with DeepSpeed"),
        "ckpt merge RUN --dtype bf16",
        "Without `--dtype` the output has the fp32 weights of the optimizer.",
        below="global_step100",
    ),
    Family(("DeepSpeed",), "ckpt merge RUN --base BASE --dtype bf16", BASE),
    Family(
        ("torchtitan", "torch_checkpointing", "OLMo-core", "OLMo", "composer", "prime-rl", "VeOmni", "ByteCheckpoint", "meta lingua"),
        "ckpt merge RUN --base BASE",
        f"{BASE} Models with names of their own keep them; `--key-map` renames tensors.",
    ),
    Family(
        ("torch DCP", "torch DCP, Hugging Face storage", "files of ranks"),
        "ckpt merge RUN --base BASE",
        BASE,
        name="Your own loop with torch.distributed.checkpoint",
    ),
    Family(("xtuner", "RLinf", "AReaL", "slime"), "ckpt merge RUN --base BASE", BASE),
    Family(
        ("Lightning",),
        "ckpt merge RUN --base BASE --key-map net.=",
        "`--key-map net.=` takes the attribute's name off if the names begin with it: `ckpt inspect RUN` shows them. "
        "A `.ckpt` file is read too.",
    ),
    Family(
        ("NeMo AutoModel", "NeMo RL"),
        "ckpt merge RUN",
        "Config and tokenizer are in `.hf_metadata/`. Of NeMo RL the policy is taken; `--type value` is the other role.",
    ),
    Family(
        ("Megatron-LM", "NeMo (Megatron-Bridge)", "NeMo", "Megatron-FSDP"),
        "ckpt merge RUN --base BASE",
        "Names, fused matrices and padding become those of the Hub; without `--base` a config is made from the arguments of the "
        "training. `--names native` keeps Megatron's. See [Megatron](megatron.md).",
    ),
    Family(
        ("BAGEL fork", "BAGEL"),
        "ckpt merge RUN --type ema --base BASE --match-base",
        "`--match-base` gives the output the names, shapes and dtypes of the base, and all of its other files.",
    ),
    Family(
        ("mmengine", "mmengine with DeepSpeed"),
        "ckpt merge RUN --base BASE",
        "A step is a file, or with DeepSpeed (XTuner 0.1) a folder of that name. What `last_checkpoint` names is compared.",
    ),
    Family(("ColossalAI", "Open-Sora", "litgpt", "torchtune", "torch.save"), "ckpt merge RUN --base BASE", BASE),
    Family(
        ("Hugging Face", "loops with save_pretrained", "Hugging Face Hub cache"),
        "ckpt verify RUN --full\nckpt merge RUN -o OUT --dtype bf16",
        "A model folder already: it can be checked, compared, averaged, cast, and cut into other files.",
    ),
)

ROLES = {"verl": "actor", "verl (Megatron)": "actor", "EasyR1": "actor", "SkyRL": "policy"}
"""The role folder of trainers of which the table has it nowhere, or not in the first row."""

FILES = {
    "rank-shards": ("model_world_size_8_rank_0.pt", "..."),
    "dcp": (".metadata", "__0_0.distcp", "..."),
    "torch-checkpointing": ("metadata.pkl", "model_0.pt", "..."),
    "hub-shards": ("shard-00001-model-00001-of-00001.safetensors", "..."),
    "deepspeed": ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "..."),
    "megatron-dist": ("metadata.json", ".metadata", "__0_0.distcp", "..."),
    "safetensors": ("model.safetensors",),
    "torch-file": ("pytorch_model.bin",),
    "self-describing": ("rank0.pt", "..."),
}


def _trainers() -> Iterator[str]:
    yield from ("# What you have, what to type", "")
    yield "Find the folder that your trainer left. `RUN` is that folder, one of its steps, or the folder of the weights. Of a run the"
    yield "newest complete step is taken (`--step N` for another). `ckpt detect RUN` says what is there, `--dry-run` what would be done."
    yield "A folder that is not listed is read too if its files are of a [known format](formats.md)."
    # Of several rows the one with more folders says more, otherwise the first.
    rows: dict[str, Trainer] = {}
    for row in sorted(TRAINERS, key=lambda row: not (row.certain and len(row.weights) > 1)):
        rows.setdefault(row.name, row)
    for family in FAMILIES:
        yield from ("", f"## {family.title}", "", "```text", *_trees([rows[name] for name in family.trainers], family.below), "```", "")
        yield from ("```sh", *family.type.splitlines(), "```")
        if family.text:
            yield from ("", family.text)
    yield from ("", "## Anything else", "", *ELSE)


ELSE = (
    "| the case | type |",
    "|---|---|",
    "| each node saved its own ranks on a disk of its own | `ckpt merge NODE0/RUN --also NODE1/RUN` |",
    "| the checkpoint is in an object store | `ckpt merge s3://bucket/run -o OUT` ([remote.md](remote.md)) |",
    "| the mean of several steps | `ckpt average RUN --last 5 -o OUT` ([averaging.md](averaging.md)) |",
    "| LoRA adapters | `ckpt merge RUN --base BASE`, `--lora export` for a PEFT folder ([lora.md](lora.md)) |",
    "| training still runs | `ckpt watch RUN` ([watch.md](watch.md)) |",
    "| another step than the newest | `ckpt merge RUN --step 400` |",
    "| optimizer, scheduler, random states | `ckpt extract-state RUN --optimizer` ([state.md](state.md)) |",
)


def _trees(rows: Sequence[Trainer], below: str) -> Iterator[str]:
    """The folder of each trainer, equal ones once, under its name where there are several."""
    drawn: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row is rows[0] or row.steps or row.inside:
            drawn.setdefault(tuple(_tree(row, below)), []).append(row.name)
    for tree, names in drawn.items():
        yield from ([f"# {', '.join(names)}"] if len(drawn) > 1 else [])
        yield from tree


def _tree(row: Trainer, below: str) -> Iterator[str]:
    """A folder of a trainer, from the top down; its step is 100."""
    if row.formats == ("torch-file",) and row.steps and Path(row.steps[0]).suffix:
        # Each step is a file.
        yield from ("RUN/", *(f"  {name}" for name in row.in_run), f"  {_named(row.steps[0], 100)}")
        return
    role, below = row.role.split("|")[0] or ROLES.get(row.name, ""), "" if row.weights else below
    outer = ["RUN", *row.runs[:1], *(_named(step, 100) for step in row.steps[:1]), *filter(None, (role, below))]
    tracker = next((name for name in row.trackers if "." in name or name == "latest"), None)
    # DeepSpeed's lies beside the folder of the tag, in the step of the trainer around it.
    place = len(outer) - 1 - bool(below) if below or (row.weights and row.trackers == LATEST) else len(row.runs[:1])
    for depth, folder in enumerate(outer):
        yield f"{'  ' * depth}{folder}/"
        if tracker and row.steps and depth == place:
            yield f"{'  ' * (depth + 1)}{tracker}"
    files = [*row.inside, *(FILES[row.formats[0]] if not row.inside or len(FILES[row.formats[0]]) > 1 else ())]
    for weights in (row.weights if row.certain else row.weights[:1]) or ("",):
        inner = _named(weights, 0).split("/") if weights else []
        yield from (f"{'  ' * (len(outer) + depth)}{folder}/" for depth, folder in enumerate(inner))
        yield from (f"{'  ' * (len(outer) + len(inner))}{name}" for name in files)


def _named(form: str, step: int) -> str:
    def digits(found: re.Match[str]) -> str:
        letters = found[0]
        return str(step).zfill(len(letters)) if letters[0] == "N" else "1"

    return PLACES.sub(digits, form)


def main() -> None:
    for name, text in pages().items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
