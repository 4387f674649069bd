"""The layout of a model folder: which files its loader needs. Hugging Face folders, and BAGEL's.

BAGEL's inference loads one file called ``ema.safetensors`` whatever weights are in it, and its training resumes from
``model.safetensors`` and ``ema.safetensors`` side by side (ByteDance-Seed/Bagel, app.py and train/fsdp_utils.py). The
published folder has an index that maps every tensor to ``ema.safetensors``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.discover.found import Found
from ckpt_cli.files.folders import is_there


@dataclass(frozen=True, slots=True)
class FolderStyle:
    """``shared``: all components in one folder; ``splits``: large weights become several files; ``loaded``: the file loaders read."""

    name: str
    shared: bool = False
    splits: bool = True
    loaded: str | None = None
    names: dict[str, str] = field(default_factory=dict)

    def weights_name(self, component: str, components: Sequence[str]) -> str:
        """The weights file of a component; one that stands alone is called as loaders want it."""
        if len(components) == 1:
            return self.loaded or "model.safetensors"
        return self.names.get(component, "model.safetensors")


HUGGING_FACE = FolderStyle("Hugging Face")
BAGEL = FolderStyle(
    "BAGEL", shared=True, splits=False, loaded="ema.safetensors", names={"model": "model.safetensors", "ema": "ema.safetensors"}
)


def style_of(found: Found, base: Path | None) -> FolderStyle:
    """The style that fits a checkpoint and its base."""
    folders = [found.path, *([base] if base is not None else [])]
    bagel = any(is_there(folder / name) for folder in folders for name in ("ema.safetensors", "llm_config.json"))
    sharded = any(is_there(found.path / name) for name in ("model_sharded", "ema_sharded"))
    writer = any(place.match.evidence == "BAGEL fork" for place in found.places)
    return BAGEL if bagel or sharded or writer else HUGGING_FACE
