"""What people see, kept as golden files: each screen at 60, 80 and 120 columns and in a pipe."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.cli import session
from ckpt_cli.cli.screens.extracted import extract_result
from ckpt_cli.cli.screens.inspect import detect_result, inspect_result
from ckpt_cli.cli.screens.verify import verify_result
from ckpt_cli.cli.screens.written import average_result, merge_result
from ckpt_cli.cli.text import elided
from ckpt_cli.commands.average import average
from ckpt_cli.commands.extract_state import extract_state
from ckpt_cli.commands.inspect import detect, group_tensors, inspect
from ckpt_cli.commands.merge import merge
from ckpt_cli.commands.verify import verify
from ckpt_cli.results.checkpoint import Checkpoint, ComponentInfo, Count, StepInfo, TensorInfo
from ckpt_cli.results.inspect import DetectResult, InspectResult
from tests.cli import ROOT


def tensor(name: str, *shape: int, dtype: str = "BF16", layout: str = "Shard(0) x8") -> TensorInfo:
    count = math.prod(shape)
    return TensorInfo(
        name=name, dtype=dtype, shape=shape, elements=count, bytes=2 * count, kind="sharded", layout=layout, pieces=8, copies=0
    )


def attention(prefix: str, hidden: int, keys: int) -> list[TensorInfo]:
    shapes = {"q_proj": (hidden, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, hidden)}
    return [tensor(f"{prefix}self_attn.{name}.weight", *shape) for name, shape in shapes.items()]


def norms(prefix: str, hidden: int) -> list[TensorInfo]:
    return [tensor(f"{prefix}{name}.weight", hidden) for name in ("input_layernorm", "post_attention_layernorm")]


def dense() -> list[TensorInfo]:
    """Qwen3-8B, with one norm that training left in float32."""
    found = [tensor("model.embed_tokens.weight", 151936, 4096)]
    for layer in range(36):
        prefix = f"model.layers.{layer}."
        found += attention(prefix, 4096, 1024)
        found += [tensor(f"{prefix}mlp.{name}_proj.weight", 12288, 4096) for name in ("gate", "up")]
        found += [tensor(f"{prefix}mlp.down_proj.weight", 4096, 12288), *norms(prefix, 4096)]
    odd = "model.layers.35.input_layernorm.weight"
    found = [tensor(odd, 4096, dtype="F32", layout="replicated x8") if each.name == odd else each for each in found]
    return [*found, tensor("model.norm.weight", 4096), tensor("lm_head.weight", 151936, 4096)]


def moe() -> list[TensorInfo]:
    """Qwen3-30B-A3B."""
    found = [tensor("model.embed_tokens.weight", 151936, 2048)]
    for layer in range(48):
        prefix = f"model.layers.{layer}."
        found += [*attention(prefix, 2048, 512), tensor(f"{prefix}mlp.gate.weight", 128, 2048)]
        for expert in range(128):
            found += [tensor(f"{prefix}mlp.experts.{expert}.{name}_proj.weight", 768, 2048) for name in ("gate", "up")]
            found.append(tensor(f"{prefix}mlp.experts.{expert}.down_proj.weight", 2048, 768))
        found += norms(prefix, 2048)
    return [*found, tensor("model.norm.weight", 2048), tensor("lm_head.weight", 151936, 2048)]


def vlm() -> list[TensorInfo]:
    """A Qwen2.5-VL with 48 layers: 969 tensors with the longest names that are common."""
    found = [tensor("model.visual.patch_embed.proj.weight", 1280, 3, 2, 14, 14)]
    for block in range(32):
        prefix = f"model.visual.blocks.{block}."
        found += [tensor(f"{prefix}norm{number}.weight", 1280) for number in (1, 2)]
        for name, rows, columns in (("attn.qkv", 3840, 1280), ("attn.proj", 1280, 1280), ("mlp.gate_proj", 3420, 1280)):
            found += [tensor(f"{prefix}{name}.weight", rows, columns), tensor(f"{prefix}{name}.bias", rows)]
        for name, rows, columns in (("mlp.up_proj", 3420, 1280), ("mlp.down_proj", 1280, 3420)):
            found += [tensor(f"{prefix}{name}.weight", rows, columns), tensor(f"{prefix}{name}.bias", rows)]
    found.append(tensor("model.visual.merger.ln_q.weight", 1280))
    for number, rows in ((0, 5120), (2, 5120)):
        prefix = f"model.visual.merger.mlp.{number}."
        found += [tensor(f"{prefix}weight", rows, 5120), tensor(f"{prefix}bias", rows)]
    found.append(tensor("model.language_model.embed_tokens.weight", 152064, 5120))
    for layer in range(48):
        prefix = f"model.language_model.layers.{layer}."
        found += attention(prefix, 5120, 1024)
        found += [tensor(f"{prefix}self_attn.{name}_proj.bias", rows) for name, rows in (("q", 5120), ("k", 1024), ("v", 1024))]
        found += [tensor(f"{prefix}mlp.{name}_proj.weight", 27648, 5120) for name in ("gate", "up")]
        found += [tensor(f"{prefix}mlp.down_proj.weight", 5120, 27648), *norms(prefix, 5120)]
    return [*found, tensor("model.language_model.norm.weight", 5120), tensor("lm_head.weight", 152064, 5120)]


MODELS = {"dense": dense, "moe": moe, "vlm": vlm}


def inspected(tensors: list[TensorInfo], name: str) -> InspectResult:
    """What `inspect` would return for these tensors."""
    dtypes: dict[str, Count] = {}
    for each in tensors:
        count = dtypes.get(each.dtype, Count())
        dtypes[each.dtype] = Count(tensors=count.tensors + 1, elements=count.elements + each.elements)
    info = ComponentInfo(
        name="model",
        format="rank-shards",
        writer="torch",
        path=f"{name}/global_step_100/actor",
        files=8,
        world_size=8,
        mesh="fsdp=8",
        elements=sum(each.elements for each in tensors),
        bytes=sum(each.bytes for each in tensors),
        dtypes=dtypes,
        kinds={"sharded": Count(tensors=len(tensors))},
        tensors=tuple(tensors),
    )
    checkpoint = Checkpoint(path=f"{name}/global_step_100", step=100, framework="verl", components=(info,))
    return InspectResult(checkpoint=checkpoint, groups={"model": group_tensors(tensors)})


EXAMPLE = ROOT / "examples" / "tiny-run"
GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (60, 80, 120, None)


class Terminal(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def screen(monkeypatch: pytest.MonkeyPatch, width: int | None, show: Any) -> str:
    """What ``show(session)`` prints, without colour, both streams in one."""
    stream = Terminal(width is not None)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", str(width or 80))
    monkeypatch.setenv("TERM", "xterm")
    show(session.Session("test", color="never", verbose=True))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("width", WIDTHS, ids=str)
class TestScreens:
    @pytest.fixture(autouse=True)
    def beside_the_run(self, layouts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run with odd tensors: replicas, padded shards, a counter, one that is tied."""
        monkeypatch.chdir(layouts / "lmms-run")

    def check(self, name: str, width: int | None, text: str) -> None:
        text = re.sub(r"[\d.]+ [GT]B free", "# GB free", text)
        text = re.sub(r"at most about [\d.]+ MB", "at most about # MB", text)
        text = re.sub(r" in [\d.]+ s( \(.*?/s\))?", " in # s", text)
        if width is not None:
            # A command to copy is one line.
            assert all(len(line) <= width for line in text.splitlines() if not line.startswith("next:"))
        path = GOLDEN / f"{name}-{width or 'pipe'}.txt"
        if os.environ.get("GOLDEN_UPDATE"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text()

    def test_detect(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = detect("run")
        self.check("detect", width, screen(monkeypatch, width, lambda s: detect_result(result, s)))

    def test_inspect(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = inspect("run")
        self.check("inspect", width, screen(monkeypatch, width, lambda s: inspect_result(result, s)))

    def test_no_column_vanishes_without_a_word(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        """What is in the pipe is in the table, in its heading, or named below it."""
        results = [(detect("run"), detect_result), (inspect("run"), inspect_result)]
        for result, show in results:
            heads, said = (screen(monkeypatch, wide, lambda s, show=show, result=result: show(result, s)) for wide in (None, width))  # type: ignore[misc]
            (head,) = (line for line in heads.splitlines() if line.startswith(("component ", "tensor ")))
            assert [name for name in re.split("  +", head) if not re.search(rf"\b{name}\b", said)] == []

    @pytest.mark.parametrize("model", MODELS)
    def test_inspect_of_a_large_model(self, monkeypatch: pytest.MonkeyPatch, width: int | None, model: str) -> None:
        result = inspected(MODELS[model](), model)
        text = screen(monkeypatch, width, lambda s: inspect_result(result, s))
        self.check(f"inspect-{model}", width, text)
        rows = [line for line in text.splitlines() if re.search(r"  [0-9]+( x [0-9]+)*(  |$)", line)]
        assert len(rows) == len(result.groups["model"])  # a row is a line

    def test_dry_run(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = merge("run", type="ema", dtype="bf16", dry_run=True, max_shard_size=3000)
        self.check("dry-run", width, screen(monkeypatch, width, lambda s: merge_result(result, s)))

    def test_average(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = average("run", "averaged", everything=True, weights=(-0.25, 1.25), dtype="bf16", dry_run=True)
        text = screen(monkeypatch, width, lambda s: average_result(result, s))
        self.check("average", width, text)

    def test_extract_state(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = extract_state("run", optimizer=True, dry_run=True)
        text = screen(monkeypatch, width, lambda s: extract_result(result, s))
        self.check("extract-state", width, text)

    def test_verify(self, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        result = verify("run", full=True, base="run/checkpoint-100")
        text = screen(monkeypatch, width, lambda s: verify_result(result, s))
        self.check("verify", width, text)

    def test_verify_that_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int | None) -> None:
        merge("run", tmp_path / "out", type="ema", dtype="bf16")
        path = tmp_path / "out" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        config = tmp_path / "out" / "config.json"
        config.write_text(config.read_text().replace('"bfloat16"', '"float32"'))
        result = verify(tmp_path / "out", full=True, against="run").model_copy(update={"path": "tiny-ema"})
        text = screen(monkeypatch, width, lambda s: verify_result(result, s))
        self.check("verify-failed", width, text)


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_why_nothing_can_be_merged_is_said_once_on_a_terminal(width: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "tiny-run" / "checkpoint-200", tmp_path / "step")
    for path in list((tmp_path / "step").rglob("model_world_size_4_rank_3.pt")):
        path.unlink()
    monkeypatch.chdir(tmp_path)
    result = detect("step")
    assert result.problem is not None
    said = screen(monkeypatch, width, lambda s: detect_result(result, s))
    assert " ".join(said.split()).count(result.problem.split(":")[0]) == (3 if width is None else 1)  # of model and ema, and in full
    table = said.split("warning:")[0].split("component")[-1]
    assert said.startswith("result  cannot be merged\n")
    assert ("cannot be merged" in table) is (width is not None)


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_a_step_that_was_passed_over_is_a_warning_on_every_screen(
    width: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples" / "tiny-run", tmp_path / "run")
    for path in list((tmp_path / "run" / "checkpoint-200").rglob("model_world_size_4_rank_3.pt")):
        path.unlink()
    monkeypatch.chdir(tmp_path)
    said = " ".join(screen(monkeypatch, width, lambda s: detect_result(detect("run"), s)).split())
    assert "warning: checkpoint-200 is skipped: rank 3 of 4 is missing" in said


@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize(("layout", "legend"), [("flat x2", "flat xN: cut where"), ("dim 0 x4", "dim D xN: cut along"), ("", None)])
def test_words_of_layouts_are_explained(layout: str, legend: str | None, width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a flat vector is cut is no oddity of the tensor there; what is not cut is whole."""
    tensors = [tensor(f"model.layers.{i}.mlp.weight", 8, 8, layout=layout if i == 1 else "") for i in range(4)]
    result = inspected(tensors, "model")
    said = " ".join(screen(monkeypatch, width, lambda s: inspect_result(result, s)).split())
    assert (legend in said) if legend is not None else ("xN" not in said)
    assert ("whole" in said) is bool(layout)
    assert any(group.odd for groups in result.groups.values() for group in groups) is layout.startswith("dim")
    tensors = [tensor(f"model.layers.{i}.mlp.weight", 8, 8, layout=f"dim 0 x2{', flat x2' if i == 1 else ''}") for i in range(4)]
    assert not any(group.odd for group in group_tensors(tensors))


def test_a_single_component_is_not_named_above_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "tiny-run" / "checkpoint-200", tmp_path / "step")
    monkeypatch.chdir(tmp_path)
    result = detect("step")
    one = result.model_copy(update={"checkpoint": result.checkpoint.model_copy(update={"components": result.checkpoint.components[:1]})})
    said = screen(monkeypatch, 60, lambda s: detect_result(one, s))
    assert "\nformat rank-shards, files 4" in said
    assert "the component" not in said


@pytest.mark.parametrize("width", [60, 80])
def test_a_long_problem_of_a_step_is_said_in_full(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "ranks 1, 3, 5, 7, 9 and 11 of 16 are missing, and the files of ranks 2 and 4 are cut short"
    info = ComponentInfo(name="model", format="rank-shards", writer="torch", path="run/2", files=8, world_size=16)
    steps = tuple(
        StepInfo(step=step, path=f"run/{step}", components=("model", "ema"), problem=why) for step, why in ((1, problem), (2, None))
    )
    checkpoint = Checkpoint(path="run/2", step=2, run="run", framework="verl", components=(info,), steps=steps)
    said = screen(monkeypatch, width, lambda s: detect_result(DetectResult(checkpoint=checkpoint), s))
    assert max(map(len, said.splitlines())) <= width
    assert problem in " ".join(said.split())


@pytest.mark.parametrize("width", range(8, 60))
def test_a_shortened_name_has_no_half_of_a_range(width: int) -> None:
    name = "model.language_model.layers.{0..47}.experts.{0..127}.post_attention_layernorm"
    short = elided(name, width)
    assert len(short) <= width
    assert not set("{}") & set(short.replace("{0..47}", "").replace("{0..127}", ""))
