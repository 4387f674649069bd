"""docs/performance.md from what `report.py` measured. Every number of the page is made here from docs/performance.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from growth import Row, checked

Record = Mapping[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def page(report: Record) -> str:
    """The page of a report; parts that were not measured are left out."""
    lines = ["# Performance", "", *_about(report)]
    for part, section in (("copies", _copies), ("peers", _peers), ("growth", _growth)):
        if part in report:
            lines += ["", *section(report[part])]
    return "\n".join(lines) + "\n"


def _about(report: Record) -> list[str]:
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return [
        "Measured by `python benchmarks/report.py FOLDER`, which writes this page and `docs/performance.json`. Do not edit it by hand.",
        "",
        *table(
            ("machine", ""),
            (
                ("processor", f"{machine['processor']}, {machine['cores']} cores"),
                ("memory", f"{machine['memory'] / 1e9:.0f} GB"),
                ("system", f"Linux {machine['kernel']}, {machine['file_system']}, Python {machine['python']}"),
                ("versions", versions),
            ),
        ),
        "",
        "The machine is virtual, and other programs ran beside the benchmarks (their load is given). So what is compared runs in turn,",
        "in alternating order, and the ratios are medians over these rounds: quote those, not the seconds. Sources are in the page cache",
        "unless a row says cold. *Durable* is the time until the output is on the disk: `ckpt` syncs by itself, the files of the others",
        "are synced when they have ended. *Not synced* is the time until the program ends, for `ckpt` with its syncs taken out. CPU is",
        "user and system time of all cores. Before the rounds `ckpt` plans the merge once: the first time that it meets a config it asks",
        "transformers in a child process which tensors the class has, and keeps the answer.",
    ]


def _when(part: Record) -> str:
    return f"{part['when']}; load of the machine {part['load'][0]} before, {part['load'][1]} after, own work included."


def _seconds(side: Record, key: str) -> str:
    return f"{side[key]:.1f} s"


def _size(count: float) -> str:
    unit, name = next(pair for pair in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if count >= pair[0] or pair[0] == 1e3)
    return f"{count / unit:.3g} {name}"


def _copies(part: Record) -> list[str]:
    head = (
        "size",
        "to",
        "cache",
        "rounds",
        "`cp`, durable",
        "`ckpt merge`, durable",
        "ratio",
        "`cp`, not synced",
        "`ckpt merge`, not synced",
        "ratio",
        "CPU",
        "peak memory",
    )
    rows = (
        (
            f"{row['bytes'] / 1e9:.1f} GB",
            {"keep": "fp32, as stored"}.get(row["dtype"], row["dtype"]),
            "cold" if row["cold"] else "warm",
            str(row["pairs"]),
            _seconds(row["copy"], "durable"),
            _seconds(row["ours"], "durable"),
            f"**{row['of_cp_durable']:.2f}**",
            _seconds(row["copy"], "seconds"),
            _seconds(row["ours_unsynced"], "seconds"),
            f"{row['of_cp_unsynced']:.2f}",
            f"{row['ours']['cpu']:.1f} s (`cp` {row['copy']['cpu']:.1f} s)",
            f"{row['ours']['peak'] / 1e6:.0f} MB",
        )
        for row in part["rows"]
    )
    return ["## Beside cp", "", f"FSDP2 files of 4 ranks in fp32. {_when(part)}", "", *table(head, rows)]


def _peers(part: Record) -> list[str]:
    asked = any(row["ours"]["peak"] > 3e8 for row in part["rows"])
    head = (
        "program",
        "parameters",
        "rounds",
        "its time, durable",
        "CPU",
        "memory",
        "`ckpt`, durable",
        "CPU",
        "memory",
        "times as fast",
        "not synced",
        "tensors",
    )
    rows = (
        (
            f"{row['peer']} ({row['version']})",
            f"{row['parameters'] / 1e9:.2f} B",
            str(row["pairs"]),
            _seconds(row["theirs"], "durable"),
            _seconds(row["theirs"], "cpu"),
            f"{row['theirs']['peak'] / 1e9:.2f} GB",
            _seconds(row["ours"], "durable"),
            _seconds(row["ours"], "cpu"),
            f"{row['ours']['peak'] / 1e9:.2f} GB",
            f"**{row['times_durable']:.1f}**",
            f"{row['times_unsynced']:.1f}",
            {"same": "the same, bit for bit"}.get(row["tensors"], row["tensors"]),
        )
        for row in part["rows"]
    )
    return [
        "## Beside other programs",
        "",
        f"Each reads a checkpoint of its own format; both sides write the same dtype. {_when(part)}",
        "",
        *table(head, rows),
        "",
        "verl's merger reads FSDP2 files of ranks in fp32 and writes bf16; accelerate and `dcp_to_torch_save` read a DCP folder; torch's",
        "consolidation reads safetensors of ranks; `zero_to_fp32` reads ZeRO stage 3 with its optimizer; slime's converter reads",
        "Megatron's torch_dist in bf16; mergekit and `ckpt average` take the mean of two fp32 models. accelerate's merger,",
        "`dcp_to_torch_save` and torch's consolidation write neither config nor tokenizer.",
        "",
        *(
            ["A peak of `ckpt` above 0.3 GB was measured without a plan before the rounds: it is that of the child process.", ""]
            if asked
            else []
        ),
        "Not measured: lmms-engine's merger (0.1.4). It imports all models of lmms-engine, which want an older transformers (below 5.9)",
        "than the others ran with, and torchvision. What reads Megatron's checkpoints only with Megatron or a GPU is named in",
        "[megatron.md](megatron.md#beside-other-tools).",
    ]


def _growth(part: Record) -> list[str]:
    found = [Row(**row) for row in part["rows"]]
    model, largest = checked(found)
    kinds = {"sparse": "safetensors of 2 MiB a tensor, data are holes", "ranks": "FSDP2 files of ranks"}
    rows = (
        (
            kinds[row.kind],
            f"{row.files:,}",
            f"{row.tensors:,}",
            f"{row.pieces:,}",
            _size(row.bytes),
            f"{row.seconds:.1f} s",
            f"{row.cpu:.1f} s",
            f"{row.peak / 1e6:.0f} MB",
            f"{model.of(row) / 1e6:.0f} MB" + (" (not fitted)" if row in largest else ""),
        )
        for row in found
    )
    return [
        "## Planning many tensors",
        "",
        f"`ckpt merge --dry-run`: everything but moving bytes. {_when(part)}",
        "",
        *table(("checkpoint", "files", "tensors", "pieces", "output", "time", "CPU", "peak memory", "by the model"), rows),
        "",
        f"Memory is about {model.base / 1e6:.0f} MB {_signed(model.tensor)} a tensor {_signed(model.piece)} a piece",
        "(what one file holds of a tensor). This is fitted to the smaller checkpoints of each kind and checked with the largest. The",
        "buffers of a merge come on top.",
        "",
        f"The smallest plan takes {min(row.cpu for row in found):.1f} s of CPU: the start of `ckpt`, which shows where little is copied.",
    ]


def _signed(count: float) -> str:
    """Bytes that are added, or taken off: every tensor has a piece at least."""
    return f"{'-' if count < 0 else '+'} {abs(count) / 1e3:.2f} KB"
