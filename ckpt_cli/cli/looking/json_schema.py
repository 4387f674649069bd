"""`ckpt --json-schema [COMMAND]`: the JSON Schema of what ``--json`` prints, made from the results themselves."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

RESULTS: Mapping[str, tuple[str, ...]] = {
    "detect": ("inspect.DetectResult", "inspect.ReportResult"),
    "inspect": ("inspect.InspectResult", "statistics.StatsResult"),
    "merge": ("written.MergeResult",),
    "average": ("written.AverageResult",),
    "publish": ("written.PublishResult",),
    "watch": ("watch.WatchResult",),
    "extract-state": ("written.ExtractResult",),
    "verify": ("verify.VerifyResult", "verify.VerifyPart"),
    "diff": ("diff.DiffResult",),
    "show": ("statistics.ShowResult",),
    "scan": ("scan.ScanResult",),
    "env": ("environment.EnvResult",),
}
"""The class of ``data``, by command; other names of a command have what it has."""

SAME = {"compare": "diff"}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_text(command: str | None) -> str:
    """The schema of one command's document, or of any command's, as text."""
    commands = [SAME.get(command, command)] if command is not None else list(RESULTS)
    definitions: dict[str, Any] = {}
    documents = [_document(name, definitions) for name in commands]
    content: dict[str, Any] = {"$schema": DIALECT, "title": f"ckpt {command or 'COMMAND'} --json"}
    content |= documents[0] if len(documents) == 1 else {"anyOf": documents}
    return json.dumps({**content, "$defs": dict(sorted(definitions.items()))}, indent=2)


def _document(command: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The envelope with the results of a command; what they refer to goes into ``definitions``."""
    from ckpt_cli.results.envelope import SCHEMA

    results = [_reference(path, definitions) for path in RESULTS.get(command, ())]
    properties: dict[str, Any] = {
        "schema": {"const": SCHEMA},
        "command": {"enum": [command, *(name for name, same in SAME.items() if same == command)]},
        "status": {"enum": ["success", "findings", "error"]},
        "exit_code": {"type": "integer"},
        "data": {"anyOf": [*results, {"type": "null"}]},
        "errors": {"type": "array", "items": _reference("envelope.ErrorInfo", definitions)},
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _reference(path: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of a class of `ckpt_cli.results`."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(f"ckpt_cli.results.{module}"), name)
    made = kind.model_json_schema(mode="serialization", ref_template="#/$defs/{model}")
    definitions.update(made.pop("$defs", {}))
    definitions[name] = made
    return {"$ref": f"#/$defs/{name}"}
