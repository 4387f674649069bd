"""`ckpt env`, `ckpt --json-schema`, and the page that lists all errors."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.cli import INTERNAL, SIGPIPE
from ckpt_cli.cli.looking.environment import env_result
from ckpt_cli.cli.looking.json_schema import RESULTS, SAME, schema_text
from ckpt_cli.commands.env import EXTRAS, NEEDED, environment
from ckpt_cli.errors import CkptError
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.golden_screens import WIDTHS, check_golden, screen

EXAMPLE = ROOT / "examples" / "tiny-run"


# -- env -------------------------------------------------------------------------------------------------------------


class TestEnv:
    def test_says_what_is_installed(self) -> None:
        found = environment()
        assert found.version == ckpt_cli.__version__
        assert found.packages["torch"] == torch.__version__
        assert found.extras["torch"] is True
        assert Path(found.package) == ROOT / "ckpt_cli"

    def test_knows_the_packages_that_are_declared(self) -> None:
        declared = (ROOT / "pyproject.toml").read_text()
        needed = re.findall(r'^ +"([\w-]+)[><=]', declared.split("dependencies = [")[1].split("]")[0], re.MULTILINE)
        assert set(needed) == set(NEEDED)
        for extra, names in EXTRAS.items():
            (line,) = re.findall(rf"^{extra} = \[(.*)\]$", declared, re.MULTILINE)
            assert tuple(re.findall(r'"([\w-]+)[><=]', line)) == names

    def test_loads_none_of_them(self) -> None:
        code = "import sys; from ckpt_cli.commands.env import environment; environment(); print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert not {"torch", "transformers", "numpy", "matplotlib"} & set(done.stdout.split())

    def test_tells_no_secret(self) -> None:
        outcome = ckpt("env", "--json", HF_TOKEN="hf_secret", AWS_SECRET_ACCESS_KEY="secret", CKPT_COLOR="never")
        assert outcome.code == 0
        assert "secret" not in outcome.out
        assert json.loads(outcome.out)["data"]["variables"]["CKPT_COLOR"] == "never"

    def test_paths_follow_the_environment(self, tmp_path: Path) -> None:
        data = json.loads(ckpt("env", "--json", XDG_CACHE_HOME=str(tmp_path), HF_HUB_CACHE=str(tmp_path / "hf" / "hub")).out)["data"]
        assert (data["cache"], data["hub_cache"]) == (str(tmp_path / "ckpt"), str(tmp_path / "hf" / "hub"))

    @pytest.mark.parametrize("width", WIDTHS, ids=str)
    def test_its_screen(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = environment().model_copy(
            update={
                "version": "1.0",
                "python": "CPython 3.12.1",
                "executable": "/usr/bin/python3",
                "platform": "Linux-6.1-x86_64",
                "package": "/usr/lib/python3/ckpt_cli",
                "packages": {**dict.fromkeys(environment().packages, "1.2.3"), "matplotlib": None},
                "extras": {"torch": True, "plot": False, "zstd": True, "ray": True},
                "threads": 8,
                "limits": {"-v": 1 << 30},
                "encoding": "utf-8",
                "cache": "/home/user/.cache/ckpt",
                "hub_cache": "/home/user/.cache/huggingface/hub",
                "variables": {"NO_COLOR": "1"},
            }
        )
        check_golden("env", width, screen(monkeypatch, width, lambda s: env_result(result, s)))


class TestExamples:
    @pytest.mark.parametrize("command", ["diff", "show", "env"])
    def test_in_the_help_work(self, command: str, tmp_path: Path) -> None:
        shutil.copytree(EXAMPLE, tmp_path / "run")
        for folder in ("base", "merged"):
            ckpt_cli.merge(tmp_path / "run", tmp_path / folder)
        text = ckpt(command, "--help").out
        examples = [line.strip() for line in text.split("Examples:")[1].splitlines() if line.strip().startswith("ckpt ")]
        assert len(examples) >= 2
        for example in examples:
            outcome = ckpt(*example.split()[1:], cwd=tmp_path)
            assert outcome.code == 0, (example, outcome)


# -- schemas ---------------------------------------------------------------------------------------------------------

TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def faults(value: Any, schema: dict[str, Any], defs: dict[str, Any], where: str = "$") -> Iterator[str]:
    """What of a JSON value breaks a schema; the words of JSON Schema that pydantic uses."""
    known = {"$ref", "anyOf", "const", "enum", "type", "items", "prefixItems", "minItems", "maxItems", "properties", "required"}
    known |= {"additionalProperties", "title", "description", "default", "$schema", "$defs", "minimum", "exclusiveMaximum"}
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema:
        yield from faults(value, defs[schema["$ref"].removeprefix("#/$defs/")], defs, where)
    if "anyOf" in schema and all(list(faults(value, option, defs, where)) for option in schema["anyOf"]):
        yield f"{where} is none of {[option.get('$ref', option.get('type')) for option in schema['anyOf']]}"
    if "const" in schema and value != schema["const"]:
        yield f"{where} is {value!r}, not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}, not one of {schema['enum']}"
    if "type" in schema and (
        not isinstance(value, TYPES[schema["type"]]) or (isinstance(value, bool) and schema["type"] in ("integer", "number"))
    ):
        yield f"{where} is {type(value).__name__}, not {schema['type']}"
        return
    if isinstance(value, int) and not schema.get("minimum", value) <= value < schema.get("exclusiveMaximum", value + 1):
        yield f"{where} is {value}"
    if isinstance(value, list):
        places = [*schema.get("prefixItems", []), *[schema.get("items", {})] * len(value)]
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{where} has {len(value)} items"
        for i, item in enumerate(value):
            yield from faults(item, places[i] or {}, defs, f"{where}[{i}]")
    if isinstance(value, dict):
        yield from (f"{where} lacks {name}" for name in schema.get("required", []) if name not in value)
        for name, item in value.items():
            more = schema.get("additionalProperties", {})
            inner = schema.get("properties", {}).get(name, more)
            if inner is False:
                yield f"{where}.{name} is not in the schema"
            elif isinstance(inner, dict):
                yield from faults(item, inner, defs, f"{where}.{name}")


def check(document: dict[str, Any], command: str | None) -> list[str]:
    schema = json.loads(schema_text(command))
    return list(faults(document, schema, schema["$defs"]))


class TestSchemas:
    def test_every_command_has_one(self) -> None:
        from ckpt_cli.cli.app import LISTED

        assert LISTED.keys() - {"help", *SAME} == set(RESULTS)  # other names, and help, which has no result

    @pytest.mark.parametrize(
        "arguments",
        [
            ("detect", EXAMPLE),
            ("inspect", EXAMPLE),
            ("inspect", EXAMPLE, "--stats", "-v"),
            ("merge", EXAMPLE, "--dry-run", "--base", EXAMPLE / "checkpoint-100", "--compare"),
            ("average", EXAMPLE, "--all", "-o", "out", "--dry-run"),
            ("extract-state", EXAMPLE, "--dry-run"),
            ("verify", EXAMPLE, "--full", "--against", EXAMPLE),
            ("verify", EXAMPLE, "--full", "--part", "0/2"),
            ("diff", EXAMPLE, "--steps", "100,200"),
            ("compare", EXAMPLE, EXAMPLE),
            ("show", EXAMPLE, "model.norm.weight"),
            ("env",),
            ("merge", EXAMPLE, "--step", "1"),
            ("show", EXAMPLE, "nothing"),
            ("merge",),
        ],
        ids=lambda arguments: " ".join(str(part) for part in arguments if not isinstance(part, Path)),
    )
    def test_what_is_printed_is_what_it_says(self, arguments: tuple[str | Path, ...], tmp_path: Path) -> None:
        document = json.loads(ckpt(*arguments, "--json", cwd=tmp_path).out)
        assert check(document, str(arguments[0])) == []
        assert check(document, None) == []
        assert check({**document, "more": 1}, str(arguments[0])) != []
        assert check({**document, "data": {"wrong": 1}}, str(arguments[0])) != []

    def test_numbers_that_json_has_no_word_for(self, tmp_path: Path) -> None:
        save_file({"a": torch.tensor([float("nan"), 1.0])}, tmp_path / "a.safetensors")
        save_file({"a": torch.tensor([0.0, 0.0])}, tmp_path / "b.safetensors")
        document = json.loads(ckpt("diff", tmp_path / "b.safetensors", tmp_path / "a.safetensors", "--json").out)
        assert document["data"]["comparison"]["drifts"][0]["relative_l2"] == "NaN"
        assert check(document, "diff") == []

    def test_on_the_command_line(self) -> None:
        assert json.loads(ckpt("--json-schema", "merge").out) == json.loads(schema_text("merge"))
        assert json.loads(ckpt("--json-schema").out)["title"] == "ckpt COMMAND --json"
        assert ckpt("--json-schema", "nothing").code == 2


# -- errors ----------------------------------------------------------------------------------------------------------


def classes(kind: type[CkptError] = CkptError) -> Iterator[type[CkptError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from classes(below)


class TestErrors:
    PAGE = (ROOT / "docs" / "errors.md").read_text()

    def rows(self) -> dict[str, tuple[str, str]]:
        found = re.findall(r"^\| `([\w-]+)` \| ([\d, ]+) \| (?:`(\w+)`)? ?\| .+ \|$", self.PAGE, re.MULTILINE)
        assert len({code for code, _, _ in found}) == len(found)
        return {code: (exits, name) for code, exits, name in found}

    def test_every_code_is_listed_with_its_exit_code_and_class(self) -> None:
        for module in pkgutil.walk_packages(ckpt_cli.__path__, "ckpt_cli."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        own = {kind.code: (str(kind.exit_code), kind.__name__) for kind in classes() if "code" in vars(kind)}
        beside = {"internal": (str(INTERNAL), ""), "interrupted": ("129, 130, 143", "")}
        assert self.rows() == {**own, **beside}

    def test_every_code_that_the_command_line_has_is_listed(self) -> None:
        told = re.findall(r'_tell\(arguments, [^,]+, "([\w-]+)"', (ROOT / "ckpt_cli" / "cli" / "__init__.py").read_text())
        assert set(told) == {"interrupted", "output", "internal"}
        assert set(told) <= set(self.rows())

    def test_every_exit_code_is_listed(self) -> None:
        table = self.PAGE.split("## Exit codes")[1].split("## Codes")[0]
        listed = {int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in cell.split(",")}
        ended = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
        assert listed == {0, INTERNAL, 128 + SIGPIPE, *ended, *(kind.exit_code for kind in classes())}

    def test_a_reader_that_goes_away(self) -> None:
        """141, and silence: what the page says of `ckpt inspect run | head`."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "ckpt_cli", "inspect", str(EXAMPLE), "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(60) == 141

    def test_a_bug_is_70(self) -> None:
        code = (
            "import sys, ckpt_cli.commands.inspect as m\n"
            "def broken(*_, **__): raise ZeroDivisionError\n"
            "m.detect = broken\n"
            "from ckpt_cli.cli import main\nmain(['detect', '.'])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == INTERNAL
        assert done.stderr.startswith("error[internal]: ZeroDivisionError")


def test_one_of_anything_is_not_said_in_the_plural() -> None:
    """Counts that may be one are made by `names.plural`, which knows both."""
    from ckpt_cli.names import plural

    assert [plural(count, "tensor is", "tensors are") for count in (0, 1, 2)] == ["0 tensors are", "1 tensor is", "2 tensors are"]
    counted = re.compile(r"(?<!of )\{len\([^{}]*\)\} (parameter groups|data parallel ranks|tensors (are|were|have)|files of|adapters of)\b")
    assert [said[0] for path in (ROOT / "ckpt_cli").rglob("*.py") for said in counted.finditer(path.read_text())] == []
