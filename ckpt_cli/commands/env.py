"""`env`: versions, extras, platform and paths, for bug reports. Nothing is imported for it, and nothing secret is in it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import ckpt_cli
from ckpt_cli.errors import memory_limits
from ckpt_cli.hub.classes.transformers_child import cache_home
from ckpt_cli.hub_ids import hub_cache
from ckpt_cli.results.environment import EnvResult
from ckpt_cli.tensors.parallel import default_jobs

NEEDED = ("typer", "rich", "pydantic", "numpy", "ml_dtypes", "safetensors", "typing-extensions")
EXTRAS = {
    "torch": ("torch", "transformers"),
    "plot": ("matplotlib",),
    "zstd": ("zstandard",),
    "remote": ("obstore",),
    "fsspec": ("fsspec",),
    "ray": ("ray",),
    "hub": ("huggingface_hub",),
}
"""The packages of each extra; pyproject.toml declares them."""

VARIABLES = ("CKPT_DEBUG", "CKPT_COLOR", "CKPT_PROGRESS", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "XDG_CACHE_HOME")
HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


def environment() -> EnvResult:
    """What a bug report needs to know about this process."""
    versions = {name: _version(name) for name in (*NEEDED, *(name for names in EXTRAS.values() for name in names))}
    cache = cache_home()
    return EnvResult(
        version=ckpt_cli.__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        executable=sys.executable,
        platform=platform.platform(),
        package=str(Path(ckpt_cli.__file__).parent),
        packages=versions,
        extras={extra: all(versions[name] is not None for name in names) for extra, names in EXTRAS.items()},
        threads=default_jobs(),
        limits=memory_limits(),
        encoding=sys.getfilesystemencoding(),
        cache=str(cache) if cache is not None else None,
        hub_cache=str(hub_cache()),
        variables={name: os.environ[name] for name in (*VARIABLES, *HUB_VARIABLES) if name in os.environ},
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
