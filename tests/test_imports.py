"""Looking at a checkpoint and merging it loads neither torch nor transformers, and works where they are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt_cli

CALLS = {
    "detect": "ckpt_cli.detect(run)",
    "inspect": "ckpt_cli.inspect(run, type='all')",
    "dry run": "ckpt_cli.merge(run, out, type='both', dry_run=True)",
    "dry run with a cast": "ckpt_cli.merge(run, out, dtype='bf16', dry_run=True)",
    "merge": "ckpt_cli.merge(run, out, type='both')",
    "merge with a cast": "ckpt_cli.merge(run, out, type='both', dtype='bf16')",
    "merge and verify": "ckpt_cli.merge(run, out, type='both', verify=True)",
    "merge, then verify": "ckpt_cli.merge(run, out); ckpt_cli.verify(out, full=True, against=run, base=run)",
    "statistics": "ckpt_cli.inspect(run, stats=True)",
    "diff": "ckpt_cli.diff(run, steps=(100, 200))",
    "scan": "ckpt_cli.scan(run)",
    "show": "ckpt_cli.show(run, 'model.norm.weight')",
    "values": "ckpt_cli.open(run)['model.norm.weight'].numpy()",
    "open": "ckpt_cli.open(run)['model.norm.weight'][:4].shape",
}
READING = ("merge", "verify", "statistics", "diff", "show", "values")
LIGHT = [name for name in CALLS if not name.startswith(READING)]


@pytest.fixture
def run(layouts: Path) -> Path:
    return layouts / "lmms-run" / "run"


def in_a_fresh_process(code: str, run: Path, out: Path) -> list[str]:
    """The modules that are loaded when the code has run; `run` and `out` are paths in it."""
    script = f"import sys, ckpt_cli\nrun, out = sys.argv[1:]\n{code}\nprint(*sorted(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(Path(ckpt_cli.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(run), str(out)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("call", CALLS)
def test_neither_torch_nor_transformers_is_loaded(run: Path, tmp_path: Path, call: str) -> None:
    loaded = in_a_fresh_process(CALLS[call], run, tmp_path / "out")
    assert "ckpt_cli" in loaded
    assert {"torch", "transformers", "safetensors"} & set(loaded) == set()
    assert (tmp_path / "out").exists() == call.startswith("merge")


@pytest.mark.parametrize("call", LIGHT)
def test_numpy_is_loaded_only_to_write(tmp_path: Path, call: str) -> None:
    """Or where values are read: those of the buffers in the other run, say, which are compared with config.json."""
    run = Path(__file__).parent.parent / "examples/tiny-run"
    assert {"numpy", "ml_dtypes"} & set(in_a_fresh_process(CALLS[call], run, tmp_path / "out")) == set()


def test_the_package_alone_loads_nothing_heavy(run: Path, tmp_path: Path) -> None:
    loaded = set(in_a_fresh_process("dir(ckpt_cli)", run, tmp_path / "out"))
    assert {"torch", "transformers", "numpy", "ml_dtypes", "pydantic", "rich", "typer", "ray"} & loaded == set()


def test_ray_and_huggingface_hub_are_loaded_where_they_are_asked_for(run: Path, tmp_path: Path) -> None:
    assert {"ray", "huggingface_hub"} & set(in_a_fresh_process(CALLS["merge"], run, tmp_path / "out")) == set()


@pytest.mark.parametrize("call", ["inspect", "merge", "merge with a cast", "statistics", "diff", "show", "values"])
def test_it_works_where_torch_and_transformers_are_not_installed(run: Path, tmp_path: Path, call: str) -> None:
    absent = "sys.modules.update(dict.fromkeys(['torch', 'transformers', 'safetensors']))"  # import raises ModuleNotFoundError
    in_a_fresh_process(f"{absent}\n{CALLS[call]}", run, tmp_path / "out")
    assert (tmp_path / "out").exists() == call.startswith("merge")


@pytest.mark.parametrize("name", [name for name in ckpt_cli.__all__ if not name.startswith("__")])
def test_every_public_name_is_there_at_first_use(run: Path, tmp_path: Path, name: str) -> None:
    in_a_fresh_process(f"assert getattr(ckpt_cli, {name!r}) is ckpt_cli.{name}", run, tmp_path / "out")


EXTRAS = {
    "torch to load": ("torch", "torch", "ckpt_cli.load_state_dict(run)"),
    "torch to write": ("torch", "torch", "ckpt_cli.extract_state(run, out)"),
    "plot of a diff": ("matplotlib", "plot", "ckpt_cli.diff(run, steps=(100, 200), plot='drift.svg')"),
    "zstd": ("zstandard", "zstd", "from ckpt_cli.files.compressed import inflated; inflated(None, 0, 0, ['stream.zstd/1'], None)"),
    "ray": ("ray", "ray", "ckpt_cli.merge(run, out, engine='ray')"),
    "the Hub": ("huggingface_hub", "hub", "ckpt_cli.merge(run, out, push_to_hub='me/model')"),
    "a bucket": ("obstore", "remote", "ckpt_cli.detect('s3://bucket/run')"),
    "what else fsspec knows": ("fsspec", "fsspec", "ckpt_cli.detect('memory://run')"),
}


@pytest.mark.parametrize("case", EXTRAS)
def test_what_needs_an_extra_says_how_to_install_it(run: Path, tmp_path: Path, case: str) -> None:
    package, extra, call = EXTRAS[case]
    lines = [
        f"sys.modules[{package!r}] = None",
        "try:",
        *(f"    {part}" for part in call.split("; ")),
        "except ckpt_cli.CkptError as error:",
    ]
    wanted = f"in a clone of the repository of ckpt: pip install '.[{extra}]'"
    in_a_fresh_process(
        "\n".join([*lines, f"    assert error.hint == {wanted!r}, error", "else: raise AssertionError"]), run, tmp_path / "out"
    )


def test_every_extra_that_is_named_exists() -> None:
    """No place advises a package by itself, and each extra that the code names is one of pyproject.toml."""
    import re

    root = Path(ckpt_cli.__file__).parent
    texts = {path: path.read_text() for path in root.rglob("*.py")}
    named = {extra for text in texts.values() for extra in re.findall(r"""install\("(\w+)"\)""", text)}
    assert named == {extra for _, extra, _ in EXTRAS.values()}
    project = (root.parent / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in named)
    assert [path for path, text in texts.items() if "pip install" in text and path.name != "errors.py"] == []


def test_a_start_loads_the_command_that_was_asked_for_and_no_other(run: Path, tmp_path: Path) -> None:
    start = "import contextlib\nfrom ckpt_cli.cli import main\nwith contextlib.suppress(SystemExit): main([{}])"
    loaded = {words: set(in_a_fresh_process(start.format(words), run, tmp_path)) for words in ("'--help'", "'merge', '--help'")}
    names = {"merge", "average", "verify", "watching.watch", "looking.diff"}
    assert {name for name in names if f"ckpt_cli.cli.{name}" in loaded["'--help'"]} == set()
    assert {name for name in names if f"ckpt_cli.cli.{name}" in loaded["'merge', '--help'"]} == {"merge"}
    unneeded = ("output", "averaging", "watching", "pushing", "files", "formats", "results", "cli.options", "cli.live")
    assert [name for name in loaded["'--help'"] if name.startswith(tuple(f"ckpt_cli.{part}" for part in unneeded))] == []
    assert [name for name in loaded["'merge', '--help'"] if name.startswith(("ckpt_cli.files", "ckpt_cli.pushing"))] == []
