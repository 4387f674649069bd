"""The documentation: links lead somewhere, every page is in the navigation, pages made from code are up to date, options exist."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ckpt_cli.cli.app import root_command
from ckpt_cli.formats.trainers import TRAINERS
from tests.cli import ROOT
from tests.pages import blocks_of, environment, run

yaml = pytest.importorskip("yaml")

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *PAGES]
LINK = re.compile(r"\]\((?P<link>[^()\s]+)\)|\b(?:src|srcset|href)=\"(?P<picture>[^\"]+)\"")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def links_of(path: Path) -> Iterator[str]:
    for found in LINK.finditer(CODE.sub("", path.read_text())):
        link = found["link"] or found["picture"]
        if not link.startswith(("http:", "https:", "mailto:")):
            yield link


def anchors_of(path: Path) -> set[str]:
    """The anchors of the headings of a page that GitHub and mkdocs call alike."""
    headings = re.findall(r"^#{1,6} (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower() for heading in headings]
    by_github, by_mkdocs = ([re.sub(spaces, "-", text) for text in plain] for spaces in (r"\s", r"[-\s]+"))
    return {one for one, other in zip(by_github, by_mkdocs, strict=True) if one == other}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in links_of(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
        elif DOCS in path.parents and DOCS not in target.parents:
            broken.append(f"{link}, which is not a part of the site")
    assert broken == []


def nav(entries: object) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        entries = list(entries.values())
    for entry in entries if isinstance(entries, list) else ():
        yield from nav(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == [path.relative_to(DOCS).as_posix() for path in PAGES]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    for name in ("mkdocs.yml", "docs"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "tutorial" / "index.html").is_file()


# -- what is made from the code --------------------------------------------------------------------------------------


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


GENERATE = _generator()


def test_the_pages_made_from_the_code_are_up_to_date() -> None:
    """`python docs/generate.py` writes them again."""
    made = GENERATE.pages()
    assert {name: (DOCS / name).read_text() for name in made} == made
    assert {path.relative_to(DOCS).as_posix() for path in (DOCS / "reference").iterdir()} <= set(made)


def test_every_trainer_has_a_section() -> None:
    named = Counter(name for family in GENERATE.FAMILIES for name in family.trainers)
    assert named == dict.fromkeys((row.name for row in TRAINERS), 1)


def test_every_variable_that_is_read_is_listed() -> None:
    from ckpt_cli.launchers import LAUNCHERS

    source = "\n".join(path.read_text() for path in (ROOT / "ckpt_cli").rglob("*.py"))
    read = set(re.findall(r'(?:environ(?:\.get\(|\[)|envvar=)"([A-Z_]+)"', source)) | {
        name for one in LAUNCHERS for name in (one.number, one.count)
    }
    given = {f"CKPT_{name.upper()}" for name in ("output", "step", "run")}
    listed = {name for rows in GENERATE.VARIABLES.values() for name in rows}
    # The child process is told in this variable who waits for it.
    assert listed == (read | given) - {"CKPT_PARENT"}


# -- commands in texts -----------------------------------------------------------------------------------------------

ROOT_COMMAND = root_command()
COMMANDS = re.compile(r"(?:^|`|\(|\$ |srun |wrap '|exec )(ckpt [a-z][^`\n]*?)(?:`|$)", re.MULTILINE)


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of every `ckpt` command in a text, up to what the shell would do next."""
    for found in COMMANDS.findall(text.replace("\\\n", " ").replace("\\|", "|")):
        try:
            words = shlex.split(found, comments=True)
        except ValueError:
            words = found.rstrip("'").split()
        yield words[: next((i for i, word in enumerate(words) if re.match(r"[|;&>]|\d>", word)), None)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_option_of_a_command_exists(path: Path) -> None:
    unknown = []
    for words in commands_of(path.read_text()):
        command = ROOT_COMMAND.get_command(None, words[1])
        if command is None:
            unknown.append(" ".join(words))
            continue
        has = {name for option in command.params for name in option.opts + option.secondary_opts} | {"--help", "-h", "-qq"}
        unknown += [
            f"{words[1]} {word}" for word in words[2:] if re.match(r"--?[a-z]", word) and word.partition("=")[0].rstrip(",") not in has
        ]
    assert unknown == []


def test_every_option_that_replaces_one_of_another_tool_exists() -> None:
    """The second column of the tables; `hf upload` is a command of another program."""
    known = {
        name for command in ROOT_COMMAND.commands.values() for option in command.params for name in option.opts + option.secondary_opts
    }
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", (DOCS / "coming-from.md").read_text(), re.MULTILINE)
    named = {word for row in rows if "hf upload" not in row for word in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row)}
    assert len(rows) > 60
    assert named <= known


def test_the_questions_name_codes_that_exist() -> None:
    """What people see is what they look for."""
    from ckpt_cli.errors import CkptError

    def codes(error: type[CkptError]) -> Iterator[str]:
        yield error.code
        for each in error.__subclasses__():
            yield from codes(each)

    named = re.findall(r"error\[([\w-]+)\]", (DOCS / "faq.md").read_text())
    assert len(named) >= 3
    assert set(named) <= set(codes(CkptError))


def test_the_lines_for_jq_print_what_they_say(tmp_path: Path) -> None:
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    variables = environment(tmp_path)
    shutil.copytree(ROOT / "examples" / "tiny-run", tmp_path / "RUN")
    (tmp_path / "RUN" / "checkpoint-100" / "pytorch_model_fsdp_0" / "model_world_size_4_rank_2.pt").unlink()
    (tmp_path / "RUN_merged").mkdir()
    (events,) = [block.text for block in blocks_of("docs/watch.md") if block.language == "json"]
    (tmp_path / "RUN_merged" / "watch.jsonl").write_text(events)
    (script,) = [block.text for block in blocks_of("docs/faq.md") if "jq" in block.text]
    lines = run(script, variables).splitlines()
    assert lines[0] == "100\tmodel: rank 2 of 4 is missing"
    assert lines[1].split("\t")[1] == "model.embed_tokens.weight"
    assert lines[-1].split("\t")[0] == "100"
