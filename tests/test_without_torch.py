"""The core works in an environment that has neither torch nor transformers."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.cli import ROOT

EXAMPLE = ROOT / "examples" / "tiny-run"
ABSENT = {"torch", "transformers"}


def requirements(name: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Collect a distribution and everything it needs, without extras."""
    distribution = importlib.metadata.distribution(name)
    key = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
    if key in found:
        return
    found[key] = distribution
    for requirement in distribution.requires or ():
        if "extra ==" in requirement or re.search(r"platform_system *== *\"Windows\"|python_version *< *", requirement):
            continue
        needed = re.match(r"[\w.-]+", requirement)
        assert needed is not None
        try:
            requirements(needed[0], found)
        except importlib.metadata.PackageNotFoundError:
            continue


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the declared dependencies, which torch and transformers are none of."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    declared = re.findall(
        r'^ +"([\w-]+)[><=]', (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0], re.MULTILINE
    )
    assert set(declared) == {"typer", "rich", "pydantic", "numpy", "ml_dtypes", "safetensors", "typing-extensions"}
    found: dict[str, importlib.metadata.Distribution] = {}
    for name in declared:
        requirements(name, found)
    for distribution in found.values():
        for top in {Path(file).parts[0] for file in distribution.files or () if not str(file).startswith("..")}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(source)
    (packages / "ckpt_cli").symlink_to(ROOT / "ckpt_cli")
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["detect"], ["inspect"], ["merge", "--dry-run"], ["merge"], ["merge", "--type", "ema", "--dtype", "bf16"]),
        *(
            ["inspect", "--stats", "-v"],
            ["diff", "--steps", "100,200"],
            ["show", "--slice", "0:2"],
            ["env"],
            ["extract-state", "--dry-run"],
        ),
    ],
    ids=" ".join,
)
def test_a_command_works_without_torch_and_transformers(python: Path, tmp_path: Path, arguments: list[str]) -> None:
    for package in ABSENT:
        absent = subprocess.run([python, "-c", f"import {package}"], capture_output=True, text=True)
        assert "ModuleNotFoundError" in absent.stderr
    command = [str(python), "-m", "ckpt_cli", *arguments]
    if arguments not in (["--help"], ["env"]):
        command.append(str(EXAMPLE))
    if arguments[0] == "show":
        command.append("model.norm.weight")
    if arguments[0] == "merge":
        command += ["-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    if arguments[0] == "merge" and "--dry-run" not in arguments:
        from safetensors.numpy import load_file

        if "bf16" not in arguments:
            assert load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"].shape == (320, 24)
        assert (tmp_path / "out" / "ckpt-manifest.json").exists()


def test_commands_never_import_torch_or_transformers(tmp_path: Path) -> None:
    """The same where both are installed: they are not even looked at."""
    program = (
        "import sys\n"
        "from ckpt_cli.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "loaded = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print('LOADED', sorted(loaded))\n"
    )
    expected: dict[tuple[str, ...], str] = {
        ("--help",): "[]",
        ("detect", str(EXAMPLE)): "[]",
        ("inspect", str(EXAMPLE)): "[]",
        ("merge", str(EXAMPLE), "--dry-run"): "[]",
        ("merge", str(EXAMPLE), "--dry-run", "--with-state"): "[]",
        ("extract-state", str(EXAMPLE), "--dry-run", "--optimizer"): "[]",
        ("merge", str(EXAMPLE), "-o", str(tmp_path / "a")): "[]",
        ("merge", str(EXAMPLE), "-o", str(tmp_path / "b"), "--dtype", "bf16"): "['numpy']",
    }
    for arguments, loaded in expected.items():
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"LOADED {loaded}", arguments
