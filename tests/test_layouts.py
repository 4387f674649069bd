"""Every layout of a trainer merges into the tensors of its training, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, InputError, MissingShard
from tests.conftest import Copy
from tests.tensors import differences, load

RESULTS = {
    "accelerate": 3,
    "bagel-hybrid": 2,
    "bagel-runs": 6,
    "composer": 1,
    "dcp-odd-tensors": 1,
    "dcp-options": 6,
    "experts": 4,
    "fake-ranks": 2,
    "lightning": 2,
    "lmms-run": 4,
    "mesh-grid": 8,
    "mesh-line": 2,
    "olmo-core": 1,
    "plain-files": 8,
    "torchtitan": 1,
    "veomni-experts": 1,
    "verl-others": 4,
    "verl-run": 3,
}
"""How many results are expected per layout: the list is unpacked only when the tests run, after they were collected."""

LIKE_BASE = {"bagel-hybrid": 2, "bagel-runs": 6}
"""The same for results of `--match-base`."""

REFUSED = {"accelerate": 2, "verl-run": 1}

FUSED = ("veomni-experts",)
"""What is expected there are experts as they are in memory, not one by one as on the hub."""

FLAGS = ("--match-base",)
"""Options without a value."""


NOT_FINITE = {"dcp-odd-tensors": {"non-finite-in-source"}}
"""What is wrong with the values of a layout, on purpose."""


def proved(out: Path, source: Path) -> set[str]:
    """Codes of what `verify` finds above notes, after every byte was read and compared with the source.

    The runs have tensors that no class has, to be hard: these are a warning in each. Some have no config.json.
    """
    result = ckpt_cli.verify(out, full=True, against=source)
    assert result.against[0].identical
    found = {item.code for item in result.findings if item.severity != "info"} - {"extra-tensor"}
    lacking = {"lacks-config"} if (out / "model.safetensors").exists() and not (out / "config.json").exists() else set()
    assert found >= lacking
    return found - lacking


def cases(counts: dict[str, int]) -> list[tuple[str, int]]:
    return [(layout, index) for layout, count in counts.items() for index in range(count)]


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The path and the options of a command line."""
    path, *rest = arguments
    options: dict[str, Any] = {}
    while rest:
        name = rest.pop(0)
        options[name.removeprefix("--").replace("-", "_")] = True if name in FLAGS else rest.pop(0)
    if "step" in options:
        options["step"] = int(options["step"])
    return path, options


def test_every_expectation_is_tested(expect: dict[str, Any]) -> None:
    assert {layout: len(content["results"]) for layout, content in expect.items()} == RESULTS
    assert {layout: len(content["like_base"]) for layout, content in expect.items() if content["like_base"]} == LIKE_BASE
    assert {layout: len(content["refused"]) for layout, content in expect.items() if content["refused"]} == REFUSED


@pytest.mark.parametrize(("layout", "index"), cases(RESULTS))
def test_it_merges_into_the_tensors_of_the_training(layouts: Path, expect: dict[str, Any], tmp_path: Path, layout: str, index: int) -> None:
    result = expect[layout]["results"][index]
    path, options = parsed(result["arguments"])
    ckpt_cli.merge(layouts / layout / path, tmp_path / "out", names="native" if layout in FUSED else "hub", **options)
    assert differences(load(tmp_path / "out"), load(layouts / layout / result["file"])) == []
    assert proved(tmp_path / "out", layouts / layout / path) == NOT_FINITE.get(layout, set())


@pytest.mark.parametrize(("layout", "index"), cases(RESULTS))
def test_it_is_detected_and_inspected_as_what_it_merges_into(layouts: Path, expect: dict[str, Any], layout: str, index: int) -> None:
    result = expect[layout]["results"][index]
    path, options = parsed(result["arguments"])
    detected = ckpt_cli.detect(layouts / layout / path, **options)
    inspected = ckpt_cli.inspect(layouts / layout / path, **options)
    assert detected.problem is None
    assert detected.checkpoint.path == inspected.checkpoint.path
    (component,) = (component for component in inspected.checkpoint.components if component.tensors is not None)
    assert component.tensors is not None
    shapes = {tensor.name: tensor.shape for tensor in component.tensors}
    expected = {name: tuple(tensor.shape) for name, tensor in load(layouts / layout / result["file"]).items()}
    assert {name: shapes[name] for name in expected} == expected
    assert shapes.keys() - expected.keys() <= {"lm_head.weight"}, "only a tied head is left out"
    assert sum(group.count for group in inspected.groups[component.name]) == len(shapes)


@pytest.mark.parametrize(("layout", "index"), cases(LIKE_BASE))
def test_it_takes_the_form_of_its_base(layouts: Path, expect: dict[str, Any], tmp_path: Path, layout: str, index: int) -> None:
    result = expect[layout]["like_base"][index]
    path, options = parsed(result["arguments"])
    base = layouts / layout / options.pop("base")
    before = {file: file.read_bytes() for file in base.rglob("*") if file.is_file()}
    ckpt_cli.merge(layouts / layout / path, tmp_path / "out", base=base, **options)
    merged = {name: tensor for file in weights_of(tmp_path / "out") for name, tensor in load(file).items()}
    assert differences(merged, load(layouts / layout / result["file"])) == []
    assert proved(tmp_path / "out", layouts / layout / path) == set()
    assert {file: file.read_bytes() for file in base.rglob("*") if file.is_file()} == before


def weights_of(output: Path) -> list[Path]:
    """The files with the model's weights: a folder of BAGEL has those of its autoencoder as well."""
    return [file for file in sorted(output.glob("*.safetensors")) if file.name != "ae.safetensors"]


@pytest.mark.parametrize(("layout", "index"), cases(REFUSED))
def test_it_is_refused_and_nothing_is_written(layouts: Path, expect: dict[str, Any], tmp_path: Path, layout: str, index: int) -> None:
    path, options = parsed(expect[layout]["refused"][index]["arguments"])
    with pytest.raises(CkptError) as caught:
        ckpt_cli.merge(layouts / layout / path, tmp_path / "out", **options)
    assert caught.value.exit_code in (3, 4)
    assert list(tmp_path.iterdir()) == []


class TestTheNewestCompleteStep:
    """Rank 2 of step 30 is missing, although the tracker names step 30."""

    @pytest.fixture
    def run(self, layouts: Path) -> Path:
        return layouts / "verl-run" / "run"

    def test_is_chosen_and_the_skipped_step_is_named(self, run: Path, tmp_path: Path) -> None:
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert result.checkpoint.step == 20
        (note,) = (note for note in result.checkpoint.notes if note.code == "step-skipped")
        assert note.level == "warning"
        assert note.text.startswith("global_step_30 is skipped: ")
        assert "rank 2" in note.text

    def test_is_told_apart_from_what_the_tracker_says(self, run: Path) -> None:
        notes = {note.code: note.text for note in ckpt_cli.detect(run).checkpoint.notes}
        assert notes["tracker"] == "latest_checkpointed_iteration.txt says 30, but step 20 was chosen"

    def test_is_proposed_where_an_incomplete_one_was_asked_for(self, run: Path) -> None:
        for path, step in ((run, 30), (run / "global_step_30", None), (run / "global_step_30" / "actor", None)):
            with pytest.raises(MissingShard) as caught:
                ckpt_cli.inspect(path, step=step)
            assert caught.value.expected == str(run / "global_step_30" / "actor" / "model_world_size_4_rank_2.pt")
            assert "20" in (caught.value.hint or "")

    def test_is_complete_in_every_step_of_the_list_but_the_last(self, run: Path) -> None:
        steps = ckpt_cli.detect(run).checkpoint.steps
        assert [(step.step, step.components) for step in steps] == [(10, ("actor", "critic")), (20, ("actor",)), (30, ("actor",))]
        assert [bool(step.problem) for step in steps] == [False, False, True]

    def test_is_the_newest_that_has_the_component(self, run: Path) -> None:
        assert ckpt_cli.inspect(run, type="critic").checkpoint.step == 10

    def test_is_an_older_one_where_a_newer_one_is_damaged(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        (run / "global_step_20" / "actor" / "model_world_size_4_rank_1.pt").write_bytes(b"")
        checkpoint = ckpt_cli.inspect(run).checkpoint
        assert checkpoint.step == 10
        assert {note.text.split()[0] for note in checkpoint.notes if note.code == "step-skipped"} == {"global_step_20", "global_step_30"}

    def test_is_nowhere_where_all_are_damaged(self, copy: Copy) -> None:
        run = copy("layouts", "lmms-run", "run")
        for file in run.glob("*/pytorch_model_fsdp_0/*_rank_0.pt"):
            file.write_bytes(b"")
        with pytest.raises(CorruptFile):
            ckpt_cli.inspect(run)
        assert ckpt_cli.detect(run).problem


class TestWhatIsWrittenBesides:
    def test_the_config_and_the_tokenizer_of_the_run_come_along(self, layouts: Path, tmp_path: Path) -> None:
        source = layouts / "lmms-run" / "run" / "checkpoint-200"
        ckpt_cli.merge(source, tmp_path / "out")
        names = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"}
        for name in names:
            assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
        written = {path.name for path in (tmp_path / "out").iterdir()}
        assert written - names == {"config.json", "model.safetensors", "ckpt-manifest.json"}

    def test_the_config_names_the_dtype_that_was_written(self, layouts: Path, tmp_path: Path) -> None:
        source = layouts / "verl-run" / "run" / "global_step_20"
        for dtype, name in (("keep", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
            ckpt_cli.merge(source, tmp_path / dtype, dtype=dtype)
            config = json.loads((tmp_path / dtype / "config.json").read_text())
            before = json.loads((source / "actor" / "huggingface" / "config.json").read_text())
            assert config == {**before, "dtype": name}

    def test_a_value_head_is_told_where_the_config_says_causal_lm(self, layouts: Path, tmp_path: Path) -> None:
        result = ckpt_cli.merge(layouts / "verl-others" / "value_head", tmp_path / "out")
        assert "value-head" in {note.code for note in result.outputs[0].notes}

    def test_both_components_go_to_folders_of_their_names(self, layouts: Path, tmp_path: Path) -> None:
        layout = layouts / "lmms-run"
        ckpt_cli.merge(layout / "run", tmp_path / "out", type="both")
        assert differences(load(tmp_path / "out" / "model"), load(layout / "expected.safetensors")) == []
        assert differences(load(tmp_path / "out" / "ema"), load(layout / "expected-ema.safetensors")) == []

    def test_without_an_output_each_has_its_own_folder_beside_the_checkpoint(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        ckpt_cli.merge(run, step=10, type="all")
        ckpt_cli.merge(run / "global_step_20" / "actor")
        assert {path.name for path in run.glob("*_merged*")} == {
            "global_step_10_merged",
            "global_step_10_merged_critic",
            "global_step_20_merged",
        }


def test_flat_parameters_are_not_taken_for_weights(tmp_path: Path) -> None:
    """`LOCAL_STATE_DICT` of FSDP1 holds flat parameters without names and shapes; nobody can put these together."""
    for rank in range(4):
        (tmp_path / f"pytorch_model_fsdp_rank{rank}.bin").write_bytes(b"PK")
    with pytest.raises(InputError):
        ckpt_cli.inspect(tmp_path)


@pytest.mark.parametrize(("component", "folder"), [("model", "pytorch_model_fsdp_0"), ("ema", "pytorch_ema_model_fsdp_0")])
def test_the_example_of_the_documentation_merges(tmp_path: Path, component: str, folder: str) -> None:
    """FSDP2 cuts along the first dimension: the local parts of all ranks after each other are the tensor."""
    run = Path(__file__).parent.parent / "examples" / "tiny-run"
    ranks = [torch.load(run / "checkpoint-200" / folder / f"model_world_size_4_rank_{rank}.pt", weights_only=False) for rank in range(4)]
    expected = {name: torch.cat([rank[name].to_local() for rank in ranks]) for name in ranks[0] if name != "lm_head.weight"}
    ckpt_cli.merge(run, tmp_path / "out", type=component)
    assert differences(load(tmp_path / "out"), expected) == []
