"""What `scan` found as SARIF 2.1.0, which code hosts and editors show (docs.oasis-open.org/sarif/sarif/v2.1.0)."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import ckpt_cli
from ckpt_cli.results.scan import ScanFinding, ScanResult

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
RULES = {
    "dangerous-call": ("error", "A pickle names something that runs code, or opens files or connections, when the file is loaded."),
    "unknown-call": ("warning", "A pickle names something that checkpoints usually do not; what it does when it is loaded is not known."),
    "not-scanned": ("warning", "Something was not looked at."),
    "custom-code": ("note", "A Python file that trust_remote_code=True runs."),
}
ORDER = list(RULES)


def as_sarif(result: ScanResult) -> str:
    """The document as text, ASCII only."""
    rules = [
        {"id": name, "shortDescription": {"text": text}, "defaultConfiguration": {"level": level}} for name, (level, text) in RULES.items()
    ]
    driver = {"name": "ckpt scan", "version": ckpt_cli.__version__, "rules": rules}
    found = [_of_finding(finding) for finding in result.findings]
    found += [_result("not-scanned", f"not looked at: {item.why}", item.file, item.entry) for item in result.not_scanned]
    found += [_result("custom-code", "trust_remote_code=True runs this file", file, None) for file in result.custom_code]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": found}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _of_finding(finding: ScanFinding) -> dict[str, Any]:
    verb = "calls" if finding.called else "names"
    text = f"the pickle {verb} {finding.name}, at byte {finding.offset}{f' of {finding.entry}' if finding.entry else ''}"
    found = _result(f"{finding.severity}-call", text, finding.file, finding.entry)
    if finding.position is not None:
        found["locations"][0]["physicalLocation"]["region"] = {"byteOffset": finding.position, "byteLength": 1}
    return found


def _result(rule: str, text: str, file: str, entry: str | None) -> dict[str, Any]:
    place: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": quote(file, errors="surrogateescape")}}}
    if entry:
        place["logicalLocations"] = [{"fullyQualifiedName": entry, "kind": "member"}]
    return {
        "ruleId": rule,
        "ruleIndex": ORDER.index(rule),
        "level": RULES[rule][0],
        "message": {"text": text},
        "locations": [place],
    }
