"""``*.index.json`` of a Hugging Face model: which file holds which tensor."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

from ckpt_cli.errors import CorruptFile, MissingShard, reading
from ckpt_cli.files import read_small
from ckpt_cli.safetensors_file import parse_json


def read_weight_map(index: Path, suffix: str) -> dict[str, str]:
    """Tensor name -> file name; every file lies in the index's folder, has the ``suffix``, and is there.

    The rule for names is that of huggingface_hub (serialization/_torch.py): parsed as a Windows path on every system, so
    that no drive, root or ".." gets through. Raises CorruptFile or MissingShard.
    """
    with reading(index):
        content = parse_json(read_small(index), "the index")
        mapping = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(mapping, dict) or not mapping:
            raise CorruptFile("the index has no weight_map")
        for name, file in mapping.items():
            parsed = PureWindowsPath(file) if isinstance(file, str) else None
            if parsed is None or parsed.drive or parsed.root or ".." in parsed.parts or parsed.suffix != suffix or "\0" in file:
                message = "the index names a file outside of its folder or of another format"
                raise CorruptFile(message, tensor=name, expected=f"a {suffix} file")
        names = sorted(set(mapping.values()))
        absent = [name for name in names if not (index.parent / name).is_file()]
        if absent:
            raise MissingShard(
                f"{len(absent)} of {len(names)} weight files are missing: {', '.join(absent[:5])}",
                expected=str(index.parent / absent[0]),
                hint="copy the missing files from where the model came from",
            )
        return mapping
