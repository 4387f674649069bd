"""Whether checkpoints of an average prepare inputs and texts alike: what their tokenizers, processors, templates and the like say.

Such files are those of one checkpoint in an average, and no weights show that another one had been trained with others. They are compared
by what they say: how versions of transformers write them makes no difference, nor what a training leaves in them from step to step.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.assets import CONFIG, GENERATION_CONFIG, MODULES, Assets
from ckpt_cli.hub.beside.lacking import parts_elsewhere
from ckpt_cli.hub.beside.names import OF_ROBOT_PROCESSOR, ROBOT_ASSETS, ROBOT_FOLDER, ROUTER_CONFIG, TEMPLATE_FOLDER, TOKENIZER_CONFIG
from ckpt_cli.hub.beside.processors import KINDS, NAMES, PARTS, PREPROCESSOR, PROCESSOR
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.hub.contents.templates import templates_in
from ckpt_cli.hub.entries.written import plain
from ckpt_cli.hub.text_assets import read_text
from ckpt_cli.hub.tokenizer_file import TOKENIZER
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

Files = Mapping[str, Path]
Settings = Mapping[str, Any]

SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE, OF_PROCESSOR = "chat_template.jinja", "chat_template.json"
CHAT, CHATS = "the chat template", "chat templates"
TEMPLATE_KEY, DEFAULT = "chat_template", "default"

IRRELEVANT = (
    KINDS
    | {"name_or_path", "_name_or_path", "_commit_hash", "tokenizer_class", "tokenizer_file", "special_tokens_map_file", "backend"}
    | {"is_local", "local_files_only", "use_fast", "_valid_processor_keys", "__version__", TEMPLATE_KEY}
)
"""Entries that say where a file is from, what reads it, or what is compared elsewhere."""

LEFT = frozenset({"added_tokens_decoder", "max_length", "stride", "pad_to_multiple_of", "pad_token_type_id", "padding", "truncation"}) | {
    "truncation_strategy", "padding_side", "version",
}  # fmt: skip
"""What the last call leaves in the files of a tokenizer, and tokens whose ids are compared elsewhere."""

ENDS = frozenset({"eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"})
"""What decides where a text begins and ends."""

SAMPLING: Settings = {
    "do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0, "num_beams": 1, "min_p": None,
    "typical_p": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "max_length": 20, "max_new_tokens": None,
}  # fmt: skip
"""How the next token is chosen, and what counts where a generation_config.json does not say it."""

SETTINGS = frozenset({TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, GENERATION_CONFIG})
WHOLE = frozenset({"sentence_bert_config.json", "config_sentence_transformers.json", "dataset_statistics.json"}) | {
    "policy_preprocessor.json", "policy_postprocessor.json", ROUTER_CONFIG, *OF_ROBOT_PROCESSOR,
}  # fmt: skip
"""Files of which every entry counts: of sentence-transformers, and of policies for robots."""
SCALES = (f"{ROBOT_FOLDER}/", f"{ROBOT_ASSETS}/")
CODE = ".py"
MERGES = frozenset({"merges.txt", "bpe.codes"})
"""What a tokenizer joins, in which order, where no tokenizer.json says it."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A checkpoint with those of its files that prepare inputs and texts, and a digest of each."""

    label: str
    assets: Assets
    files: Files
    digests: Mapping[str, bytes]

    @classmethod
    def of(cls, label: str, assets: Assets) -> _Prepared:
        files = {name: path for name, path in assets.files.items() if _prepares(name)}
        for part in parts_elsewhere(assets):
            if ".." not in Path(part).parts:
                files[f"{part}/{CONFIG}"] = assets.files[MODULES].parent / part / CONFIG
        return cls(label, assets, files, {name: digest for name, path in files.items() if (digest := _digest(path)) is not None})


def side_file_notes(sources: Sequence[tuple[str, Assets]], taken: Assets) -> list[Note]:
    """A warning about files that make other inputs or texts in a checkpoint than in the one whose files are ``taken``; the first such.

    ``sources`` are the checkpoints with their labels. Other settings of sampling are only told.
    """
    label = next((label for label, assets in sources if assets is taken), sources[-1][0])
    newest = _Prepared.of(label, taken)
    warned, coded, told, seen = list[Note](), list[Note](), list[Note](), [newest.digests]
    for label, assets in sources:
        each = _Prepared.of(label, assets)
        if each.digests in seen:
            continue  # of most runs all: nothing is parsed
        seen.append(each.digests)
        between = f"{each.label} and {newest.label}"
        with contextlib.suppress(RecursionError):  # JSON that is this deep is none that a loader knows
            if not warned and (differing := [f"{name} ({few(keys, 4)})" if keys else name for name, keys in _differing(each, newest)]):
                text = f"files that prepare inputs and texts differ in {between}: {few(differing)}; those of {newest.label} are taken"
                warned.append(Note("warning", "side-files-differ", text))
            if not coded and (names := other_code(each.assets.files, newest.assets.files)):
                text = f"code of the model differs in {between}: {few(names)}; that of {newest.label} is taken"
                coded.append(Note("warning", "side-files-differ", text))
            if not told and (keys := sampling(each.files, newest.files)):
                text = f"{GENERATION_CONFIG} of {between} differ in how texts are sampled: {few(keys)}; that of {newest.label} is taken"
                told.append(Note("info", "sampling-differs", text))
    return [*warned, *coded, *told]


def _prepares(name: str) -> bool:
    return name in SETTINGS | NAMES | WHOLE | MERGES or name.startswith(SCALES) or _is_template(name) or name.endswith(CODE)


def _digest(path: Path) -> bytes | None:
    with contextlib.suppress(CkptError):
        return hashlib.sha256(read_small(path)).digest()
    return None  # what cannot be read is told elsewhere


def differing(one: Assets, label: str, other: Assets, other_label: str) -> list[tuple[str, Sequence[str]]]:
    """Which files that prepare inputs and texts say something else in one model than in another, each with the entries.

    Nothing is said of missing files but of a chat template. Templates have no name of a file, as they are kept in several.
    """
    with contextlib.suppress(RecursionError):
        return list(_differing(_Prepared.of(label, one), _Prepared.of(other_label, other)))
    return []


def other_code(one: Files, other: Files) -> list[str]:
    """Python files that two models have, with different content; spaces and ends of lines make no difference."""
    both = (name for name in sorted(one.keys() & other.keys()) if name.endswith(CODE) and one[name] != other[name])
    return [name for name in both if _words(one[name]) != _words(other[name])]


def _words(path: Path) -> list[bytes]:
    with contextlib.suppress(CkptError):
        return read_small(path).split()
    return []


def has_template(assets: Assets) -> bool:
    """Whether there is a chat template in any form."""
    return bool(_templates(assets.files))


def processors_of(assets: Assets) -> dict[str, str]:
    """The file of every processor, by what it is in `PROCESSOR`."""
    return {part: name for part, (name, _) in _processors(assets.files).items() if part}


def is_needed_whole(name: str) -> bool:
    """Whether a file is one of those that a library reads under this name alone, and in which every entry counts."""
    return name in WHOLE or name.startswith(SCALES)


def _differing(each: _Prepared, newest: _Prepared) -> Iterator[tuple[str, Sequence[str]]]:
    """The files that differ, each with the entries that do."""
    for name in sorted(each.digests.keys() & newest.digests.keys()):
        if each.digests[name] == newest.digests[name] or name in NAMES or name == OF_PROCESSOR or not name.endswith(".json"):
            continue
        if name == TOKENIZER:
            keys = _other_steps(each.assets, newest.assets)
        else:
            keys = _other_entries(name, _content(each.files[name]), _content(newest.files[name]))
        if keys:
            yield name, keys
    if each.assets.tokenizer is None or newest.assets.tokenizer is None:
        both = sorted(MERGES & each.digests.keys() & newest.digests.keys())
        yield from ((name, ()) for name in both if _lines(each.files[name]) != _lines(newest.files[name]))
    yield from _other_processors(each.files, newest.files)
    yield from _other_templates(each, newest)


def _other_entries(name: str, mine: Settings, others: Settings) -> list[str]:
    if name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        return _keys(_of_class(mine), _of_class(others))
    if name == GENERATION_CONFIG:
        return _keys(*({key: _ids(value) for key, value in content.items() if key in ENDS} for content in (mine, others)))
    return _keys(mine, others)


def _content(path: Path) -> dict[str, Any]:
    """The content of a JSON object; nothing of what cannot be read, which is told elsewhere."""
    with contextlib.suppress(CkptError):
        content = plain(read_text(path).content)
        return content if isinstance(content, dict) else {}
    return {}


def _keys(mine: Settings, others: Settings) -> list[str]:
    """The entries that differ. What one of the two does not say is left to what reads it, and is no difference."""
    return sorted(key for key in (mine.keys() & others.keys()) - IRRELEVANT if _differ(mine[key], others[key]))


def _differ(one: Any, other: Any) -> bool:
    if any(value is None or value == [] or value == {} for value in (one, other)):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return bool(_keys(one, other))
    return bool(one != other) and not (one != one and other != other)


# -- tokenizers ------------------------------------------------------------------------------------------------------


def _other_steps(each: Assets, newest: Assets) -> list[str]:
    """What two tokenizer.json do differently with a text. These are parsed for other questions too, and once."""
    if each.tokenizer is None or newest.tokenizer is None:
        return []
    mine, others = each.tokenizer(), newest.tokenizer()
    if mine.trouble is not None or others.trouble is not None:
        return []
    return sorted(key for key in mine.steps.keys() | others.steps.keys() if mine.steps.get(key) != others.steps.get(key))


def _lines(path: Path) -> list[bytes]:
    """The lines of a table, whichever ends they have; a first one says by which version it was written."""
    with contextlib.suppress(CkptError):
        return [line for line in read_small(path).splitlines() if line.strip() and not line.startswith(b"#version")]
    return []


def _of_class(content: Settings) -> dict[str, Any]:
    """The settings of the class of a tokenizer; of special tokens their words alone."""
    return {key: _word(value) for key, value in content.items() if key not in LEFT}


def _word(value: Any) -> Any:
    if isinstance(value, list):
        return sorted(map(str, map(_word, value)))
    return value["content"] if isinstance(value, dict) and "content" in value else value


# -- processors ------------------------------------------------------------------------------------------------------


def _other_processors(mine: Files, others: Files) -> Iterator[tuple[str, Sequence[str]]]:
    """The processors that differ, in whichever files the two have them."""
    if all(mine.get(name) == others.get(name) for name in NAMES):
        return
    one, other = _processors(mine), _processors(others)
    found = dict[str, list[str]]()
    for part in one.keys() & other.keys():
        keys = _keys(*(_sized(settings) for settings in (one[part][1], other[part][1])))
        if keys:
            found[other[part][0]] = sorted({*found.get(other[part][0], []), *keys})
    for name in sorted(found):
        yield name, found[name]


def _processors(files: Files) -> dict[str, tuple[str, Settings]]:
    """The settings of every processor, and the file that has them: loaders ask `PROCESSOR` first."""
    found = dict[str, tuple[str, Settings]]()
    for name in sorted((NAMES - {PROCESSOR}) & files.keys(), key=lambda name: name != PREPROCESSOR):
        content = _content(files[name])
        of_sounds = name == PREPROCESSOR and ("sampling_rate" in content or "feature_size" in content)
        found["feature_extractor" if of_sounds else PARTS[name][0]] = (name, content)
    if PROCESSOR in files:
        content = _content(files[PROCESSOR])
        parts = {part for each in PARTS.values() for part in each}
        inner = {key: value for key, value in content.items() if key in parts and isinstance(value, dict)}
        found |= {part: (PROCESSOR, value) for part, value in inner.items()}
        found[""] = (PROCESSOR, {key: value for key, value in content.items() if key not in parts})
    return found


def _sized(settings: Settings) -> dict[str, Any]:
    """Settings whose sizes are in the form that newer versions write, whichever sides that names: one number is all sides."""
    sides = ("height", "width", "shortest_edge")
    return {
        key: dict.fromkeys(sides, value) if key in ("size", "crop_size") and isinstance(value, int) else value
        for key, value in settings.items()
    }


# -- texts -----------------------------------------------------------------------------------------------------------


def _other_templates(each: _Prepared, newest: _Prepared) -> Iterator[tuple[str, Sequence[str]]]:
    """The chat templates, where they differ in any form, or only one of two tokenizers has some and nothing else tells that."""
    mine, others = _templates(each.files), _templates(newest.files)
    if mine == others or not (_takes_texts(each.assets.files) and _takes_texts(newest.assets.files)):
        return
    if not others and any(_is_template(name) for name in newest.assets.lost.files):
        return
    if mine and others:
        names = sorted(name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name))
        yield (CHAT, ()) if names == [DEFAULT] else (CHATS, names)
    else:
        yield CHAT, [f"only {each.label if mine else newest.label} has one"]


def _takes_texts(files: Files) -> bool:
    return has_vocabulary(files) or TOKENIZER_CONFIG in files


def _is_template(name: str) -> bool:
    return name in (TEMPLATE, OF_PROCESSOR) or name.startswith(f"{TEMPLATE_FOLDER}/")


def _templates(files: Files) -> dict[str, frozenset[str]]:
    """The chat templates by name; the same one may be kept in several places."""
    found = dict[str, set[str]]()
    for name, path in files.items():
        if name.endswith(".jinja") and _is_template(name):
            key = DEFAULT if name == TEMPLATE else Path(name).stem
            with contextlib.suppress(CkptError):
                found.setdefault(key, set()).add(_printed(read_small(path).decode("utf-8", "replace")))
        elif name in (TOKENIZER_CONFIG, OF_PROCESSOR, PROCESSOR):
            for key, text in _named(_content(path).get(TEMPLATE_KEY)):
                found.setdefault(key, set()).add(_printed(text))
    return {name: frozenset(texts) for name, texts in found.items()}


def _named(held: Any) -> Iterator[tuple[str, str]]:
    entries: list[tuple[str, Any]] = [(DEFAULT, held)]
    if isinstance(held, dict):
        entries = [*held.items()]
    elif isinstance(held, list):
        entries = [(str(entry.get("name")), entry) for entry in held if isinstance(entry, dict)]
    for name, entry in entries:
        yield from ((name, text) for text in templates_in({TEMPLATE_KEY: [entry]}))


def _printed(text: str) -> str:
    """A template as Jinja reads it, which takes all line ends for one, and leaves out the last."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").removesuffix("\n")


def _ids(value: Any) -> Any:
    """Ids of tokens, of which one may be written as a list; their order does not matter."""
    return sorted(value, key=str) if isinstance(value, list) else [value] if type(value) is int else value


def sampling(one: Files, other: Files) -> list[str]:
    """How texts are sampled differently where both say anything of it: the settings, each with its two values."""
    if not (GENERATION_CONFIG in one and GENERATION_CONFIG in other):
        return []
    mine, others = (_content(files[GENERATION_CONFIG]) for files in (one, other))
    mine, others = ({**SAMPLING, **{key: value for key, value in content.items() if value is not None}} for content in (mine, others))
    return sorted(f"{key} ({mine[key]}, {others[key]})" for key in SAMPLING if mine[key] != others[key])
