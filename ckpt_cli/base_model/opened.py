"""The base model: its folder, weights and config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.errors import CkptError, NotFound
from ckpt_cli.files.folders import folders_in, is_file
from ckpt_cli.files.manifest import Manifest, read_manifest, refuse_unfinished, watched_manifest
from ckpt_cli.files.source import Files, Watched
from ckpt_cli.formats.base import Match, ReadOptions
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.hub.assets import CONFIG, Assets, find_assets
from ckpt_cli.hub.config import Config
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Component

LEVELS = 3
"""How far below a run weights lie: in a step, in the folder of a role, in one of their own."""


@dataclass(frozen=True, slots=True)
class Base:
    """The base model: its folder, its weights if it has any, and what lies beside them.

    ``trouble`` is why its weights cannot be read, if nothing needs them.
    """

    folder: Path
    component: Component | None
    assets: Assets
    trouble: CkptError | None = None

    def weights(self) -> Component:
        """Its weights, where they are needed. Raises NotFound without any, or why they cannot be read."""
        if self.component is not None:
            return self.component
        hint = "pass the folder of the model with its weights"
        missing = NotFound("the base has no weights", path=self.folder, expected="safetensors or pytorch_model.bin", hint=hint)
        raise self.trouble or missing

    @property
    def watched(self) -> tuple[Watched, ...]:
        """The files that say what it is, which must not change."""
        return (*self.assets.watched, *(self.component.watched if self.component is not None else ()))

    @property
    def config(self) -> Config:
        """Its config, empty without one."""
        return self.assets.config

    @property
    def manifest(self) -> Manifest | None:
        """The manifest in its folder, None if there is none that can be read."""
        try:
            return read_manifest(self.folder)
        except CkptError:
            return None  # what is damaged proves nothing

    @property
    def fused_adapters(self) -> tuple[str, ...]:
        """The checksums of the adapters that it holds, as far as its manifest says so."""
        manifest = self.manifest
        return manifest.fused_adapters if manifest is not None else ()


def open_base(folder: Path, files: Files, *, needed: bool) -> Base:
    """The base model, with its weights if it has any. Raises NotFound if it has none and they are ``needed``, or their own trouble.

    Raises IncompleteError for a folder that a run is still writing, or has left half written.
    """
    refuse_unfinished(folder)
    assets = find_assets((folder,))
    match = _weights_match(folder)
    if match is None:
        base = Base(folder, None, assets, _weights_below(folder))
        if needed:
            base.weights()
        return base
    if match.trouble is not None and not needed:
        return Base(folder, None, assets, match.trouble)
    manifest = watched_manifest(folder, files)
    component = describe(match, files, ReadOptions())
    return Base(folder, replace(component, watched=(*component.watched, *manifest)), assets)


def _weights_match(folder: Path) -> Match | None:
    """The weights of a base model: the model's before an average's, and complete ones before those with an error."""
    matches = recognise(folder)
    models = [match for match in matches if match.component == "model"] or matches
    return next((match for match in models if match.trouble is None), models[0] if models else None)


def _one_of(models: Sequence[Path]) -> str:
    """What to pass where each of these is a model: versions of one, as kagglehub keeps them, or several."""
    last = max(models, key=lambda path: (int(path.name) if path.name.isdecimal() else 0, path.name))
    passed = f"pass --base {shell.path(last)}"
    others = sorted(path.name for path in models if path != last)
    return f"{passed}, or another of the models here: {few(others, 4)}" if others else passed


def _is_model(folder: Path) -> bool:
    return is_file(folder / CONFIG) and _whole_match(folder)


def _whole_match(folder: Path) -> bool:
    """Whether a folder has weights that a base may have."""
    match = _weights_match(folder)
    return match is not None and match.trouble is None


def _weights_below(folder: Path) -> CkptError | None:
    """Why the weights of a run or a step are not a base's: they lie in folders below, one of which would have to be chosen."""
    level = [folder]
    try:
        for _ in range(LEVELS):
            level = [child for parent in level for child in folders_in(parent)]
            held = [child for child in level if recognise(child)]
            if held:
                is_model = len(held) == 1 and is_file(held[0] / CONFIG) and not is_file(folder / CONFIG)
                several = len(held) > 1 and all(step_of(child) is None and _is_model(child) for child in held)
                merged = f"merge it first, and pass the output as --base: ckpt merge {shell.path(folder)}"
                return NotFound(
                    "the base has its weights in folders below",
                    path=folder,
                    expected="a folder with the weights of one model",
                    hint=_one_of(held) if several or (is_model and _whole_match(held[0])) else merged,
                )
    except CkptError:
        return None  # only asked for a message
    return None
