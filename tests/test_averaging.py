"""`average` from end to end: checkpoints of any format and sharding, against fractions computed from whole tensors."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Placement, Replicate, Shard

import ckpt_cli
from ckpt_cli import average
from ckpt_cli.errors import (
    CastOverflow,
    CkptError,
    DifferentTensors,
    NonFinite,
    OutputExists,
    OutputInsideSource,
    SourceChanged,
    Unsupported,
    UsageError,
)
from ckpt_cli.tensors.weighted_sum import Formula
from tests.cli import ROOT, Outcome
from tests.cli import ckpt_fork as ckpt
from tests.conftest import Copy
from tests.tensors import Tensors, differences, load
from tests.test_placements import Laid, plain_mesh, save_ranks
from tests.test_weighted_sum import exactly, rounded

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
MANIFEST = "ckpt-manifest.json"


def mean(models: Sequence[Tensors], weights: Sequence[float], divisor: float, dtype: torch.dtype | None = None) -> Tensors:
    """The oracle: every element as a fraction, rounded once; what has no fractions is that of the last model."""
    formula = Formula(tuple(weights), divisor)
    result = dict(models[-1])
    for name, newest in models[-1].items():
        if newest.is_floating_point():
            wanted = dtype or newest.dtype
            columns = zip(*(model[name].double().flatten().tolist() for model in models), strict=True)
            values = [rounded(exactly(formula, column), CODES[wanted]) for column in columns]
            result[name] = torch.tensor(values, dtype=torch.float64).to(wanted).reshape(newest.shape)
    return result


def save_hub(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A model folder as `save_pretrained` leaves it; without ``config`` only the weights."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_steps(run: Path, models: Mapping[int, Tensors], **config: Any) -> list[Path]:
    return [save_hub(run / f"checkpoint-{step}", tensors, **config) for step, tensors in models.items()]


def refused(*arguments: Any, **options: Any) -> CkptError:
    with pytest.raises(CkptError) as caught:
        average(*arguments, **options)
    assert caught.value.advice or caught.value.expected
    return caught.value


def manifest_of(output: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / MANIFEST).read_text())
    return content


def codes(result: ckpt_cli.AverageResult) -> dict[str, str]:
    return {note.code: note.text for note in (*result.outputs[0].notes, *result.notes)}


TRAINERS = {
    "verl-run/run/global_step_10": "verl-run/expected-actor-10.safetensors",
    "verl-run/run/global_step_20/actor": "verl-run/expected.safetensors",
    "accelerate/run/checkpoint-7": "accelerate/expected.safetensors",
    "torchtitan/run": "torchtitan/expected.safetensors",
    "olmo-core/run/step5": "olmo-core/expected.safetensors",
    "plain-files/plain/model.pt": "plain-files/expected-plain.safetensors",
    "dcp-options/zstd": "dcp-options/expected-zstd.safetensors",
    "plain-files/hub": "plain-files/expected.safetensors",
}
"""Files of ranks, DCP of three trainers and compressed, files of torch.save, safetensors: one model, and what each holds."""

SHARDINGS = {
    "mesh-line/line/ranks": "mesh-line/expected.safetensors",
    "mesh-grid/tp/dcp": "mesh-grid/expected-tp.safetensors",
    "mesh-grid/any/ranks": "mesh-grid/expected.safetensors",
    "mesh-grid/hsdp/ranks": "mesh-grid/expected-hsdp.safetensors",
    "fake-ranks/cube": "fake-ranks/expected-cube.safetensors",
    "plain-files/single/weights.safetensors": "plain-files/expected-single.safetensors",
}
"""All pairs of placements on one and two mesh dimensions, tensor parallelism, replicas, twelve ranks, no sharding."""


class TestEveryElement:
    @pytest.mark.parametrize(("method", "dtype"), [("uniform", "keep"), ("weighted", "keep"), ("ema", "keep"), ("weighted", "bf16")])
    @pytest.mark.parametrize("mixture", [TRAINERS, SHARDINGS], ids=["trainers", "shardings"])
    def test_is_the_exact_average_whatever_the_format_and_the_sharding(
        self, layouts: Path, tmp_path: Path, mixture: dict[str, str], method: str, dtype: str
    ) -> None:
        count = len(mixture)
        given = [0.7, -0.25, 0.1, 0.3, 1.5, 0.05, 0.2, 0.4][:count]
        options: dict[str, Any] = {}
        weights, divisor = [1.0] * count, float(count)
        if method == "weighted":
            options, weights, divisor = {"weights": given}, given, math.fsum(given)
        elif method == "ema":
            options, divisor = {"decay": 0.75}, 1.0
            weights = [0.75 ** (count - 1), *(0.25 * 0.75**k for k in reversed(range(count - 1)))]
        result = average([layouts / path for path in mixture], tmp_path / "out", dtype=dtype, **options)
        assert result.method == method
        assert (result.outputs[0].averaged, result.outputs[0].copied) == (29, 1)
        expected = mean([load(layouts / file) for file in mixture.values()], weights, divisor, torch.bfloat16 if dtype == "bf16" else None)
        assert differences(load(tmp_path / "out"), expected) == []

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_may_be_of_any_dtype(self, tmp_path: Path, dtype: torch.dtype) -> None:
        models = [{"w": torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)} for seed in range(3)]
        for name, target in {"keep": dtype, "fp32": torch.float32, "fp16": torch.float16}.items():
            average(save_steps(tmp_path / name, dict(enumerate(models))), tmp_path / "out" / name, dtype=name)
            assert differences(load(tmp_path / "out" / name), mean(models, [1, 1, 1], 3, target)) == []

    def test_may_be_complex(self, tmp_path: Path) -> None:
        models = [{"w": torch.complex(torch.randn(4, 5), torch.randn(4, 5))} for _ in range(3)]
        average(save_steps(tmp_path / "run", dict(enumerate(models))), tmp_path / "out", weights=(0.1, 0.2, 0.7), dtype="bf16")
        parts = [{"w": torch.view_as_real(model["w"])} for model in models]
        expected = torch.view_as_complex(mean(parts, (0.1, 0.2, 0.7), math.fsum((0.1, 0.2, 0.7)))["w"])
        assert differences(load(tmp_path / "out"), {"w": expected}) == []

    def test_of_copies_is_that_of_the_original(self, layouts: Path, tmp_path: Path) -> None:
        """Each of another format: by merging, with a file of torch.save, and the shards themselves."""
        shards = layouts / "verl-run" / "run" / "global_step_20"
        expected = load(layouts / "verl-run" / "expected.safetensors")
        torch.save(expected, tmp_path / "model.pt")
        ckpt_cli.merge(shards, tmp_path / "merged")
        for weights in (None, (0.1, 0.2, 0.7)):
            out = tmp_path / f"out{weights}"
            average([shards, tmp_path / "merged", tmp_path / "model.pt"], out, weights=weights)
            assert differences(load(out), expected) == []

    def test_is_the_same_for_any_number_of_threads(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        for jobs in (1, 2, 7):
            average(run, tmp_path / str(jobs), last=2, weights=(0.3, 0.7), jobs=jobs)
        written = {(tmp_path / jobs / "model.safetensors").read_bytes() for jobs in ("1", "2", "7")}
        assert len(written) == 1


class TestLargeTensors:
    """More elements than a tile, so that tiles meet the shards of each checkpoint in other places."""

    SHAPE = (700, 611)
    CUTS: tuple[tuple[Placement, ...], ...] = ((Shard(0),), (Shard(1),), (Replicate(),))

    @staticmethod
    def multiples(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Multiples of 2^-10 with 21 bits: float64 adds up a few of them without rounding."""
        return torch.randint(-(1 << 20), 1 << 20, shape, generator=torch.Generator().manual_seed(seed)).float() / 1024

    @pytest.mark.parametrize(("dtype", "target"), [("keep", torch.float32), ("bf16", torch.bfloat16)])
    def test_are_put_together_in_every_checkpoint_on_their_own(self, tmp_path: Path, dtype: str, target: torch.dtype) -> None:
        models = [{"w": self.multiples(seed, self.SHAPE), "v": self.multiples(seed + 10, (600_001,))} for seed in range(4)]
        paths = []
        for step, cut in enumerate(self.CUTS):
            folder = tmp_path / f"global_step_{step}"
            vector = (Shard(0),) if cut == (Shard(1),) else cut
            save_ranks(folder, plain_mesh(3), {"w": Laid(models[step]["w"], cut), "v": Laid(models[step]["v"], vector)})
            paths.append(folder)
        paths.append(save_hub(tmp_path / "hub", models[3]))
        average(paths, tmp_path / "out", weights=(1, 2, 3, 2), dtype=dtype)
        first, second, third, fourth = ({name: values.double() for name, values in model.items()} for model in models)
        expected = {name: ((first[name] + 2 * second[name] + 3 * third[name] + 2 * fourth[name]) / 8).to(target) for name in first}
        assert differences(load(tmp_path / "out"), expected) == []

    def test_are_computed_again_at_the_right_place_where_that_is_needed(self, tmp_path: Path) -> None:
        """A few elements whose rounding is decided by what two float64 cannot hold."""
        shape, places = (1000, 700), [(0, 0), (374, 361), (999, 699)]
        columns = [torch.full(shape, value) for value in (2.0**100, 1.0, -(2.0**100), 2.0**-8, 0.0)]
        for place in places:
            columns[-1][place] = 2.0**-120
        paths = []
        for step, values in enumerate(columns):
            folder = tmp_path / f"global_step_{step}"
            save_ranks(folder, plain_mesh(3), {"w": Laid(values, (Shard(step % 2),))})
            paths.append(folder)
        average(paths, tmp_path / "out", weights=[1] * 5, normalize=False, dtype="bf16")
        found = load(tmp_path / "out")["w"].float()
        assert [tuple(place) for place in (found != 1.0).nonzero().tolist()] == places
        assert {found[place].item() for place in places} == {1 + 2.0**-7}

    def test_may_be_empty_or_single_numbers(self, tmp_path: Path) -> None:
        models = [{"none": torch.zeros(0, 5), "one": torch.tensor(float(step)), "w": torch.ones(2)} for step in (1, 2)]
        average(save_steps(tmp_path / "run", dict(enumerate(models))), tmp_path / "out")
        assert differences(load(tmp_path / "out"), {**models[0], "one": torch.tensor(1.5)}) == []


class TestComponents:
    def test_of_the_name_are_taken_from_every_checkpoint(self, layouts: Path, tmp_path: Path) -> None:
        layout = layouts / "lmms-run"
        result = average(layout / "run", tmp_path / "out", everything=True, type="ema")
        assert result.outputs[0].component == "ema"
        assert [source.component for source in result.outputs[0].sources] == ["ema", "ema"]
        expected = mean([load(layout / "expected-ema-100.safetensors"), load(layout / "expected-ema.safetensors")], [1, 1], 2)
        assert differences(load(tmp_path / "out"), expected) == []

    def test_are_averaged_each_on_its_own_where_several_are_wanted(self, layouts: Path, tmp_path: Path) -> None:
        layout = layouts / "lmms-run"
        result = average(layout / "run", tmp_path / "out", steps=(100, 200), type="both", weights=(1, 3))
        assert [output.output for output in result.outputs] == [str(tmp_path / "out" / name) for name in ("model", "ema")]
        for name, infix in (("model", ""), ("ema", "-ema")):
            expected = mean([load(layout / f"expected{infix}{step}.safetensors") for step in ("-100", "")], [1, 3], 4)
            assert differences(load(tmp_path / "out" / name), expected) == []

    def test_of_different_names_are_averaged_with_a_warning(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "lmms-run" / "run"
        paths = [run / "checkpoint-100" / "pytorch_model_fsdp_0", run / "checkpoint-200" / "pytorch_ema_model_fsdp_0"]
        result = average(paths, tmp_path / "out")
        assert codes(result)["mixed-components"] == "components of different names are averaged: model, ema"
        expected = [load(layouts / "lmms-run" / f"expected{name}.safetensors") for name in ("-100", "-ema")]
        assert differences(load(tmp_path / "out"), mean(expected, [1, 1], 2)) == []

    def test_of_different_numbers_are_refused(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        error = refused([run / "global_step_10", run / "global_step_20"], tmp_path / "out", type="all")
        assert isinstance(error, UsageError)
        assert error.hint == "average them one by one with --type"

    def test_must_be_ema_for_the_method_that_combines_averages(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "lmms-run" / "run"
        widths: dict[str, Any] = {"sigma_rel": 0.1, "source_sigma_rel": 0.05}
        error = refused(run, tmp_path / "out", everything=True, **widths)
        assert isinstance(error, UsageError)
        assert (error.hint or "").startswith("pass --type ema")
        result = average(run, tmp_path / "out", everything=True, type="ema", **widths)
        assert result.method == "posthoc-ema"
        models = [load(layouts / "lmms-run" / f"expected-ema{step}.safetensors") for step in ("-100", "")]
        assert differences(load(tmp_path / "out"), mean(models, [source.weight for source in result.outputs[0].sources], 1)) == []


class TestTiedHeads:
    def test_are_left_out_once(self, layouts: Path, tmp_path: Path) -> None:
        layout = layouts / "lmms-run"
        result = average(layout / "run", tmp_path / "out", everything=True)
        expected = mean([load(layout / "expected-100.safetensors"), load(layout / "expected.safetensors")], [1, 1], 2)
        assert "lm_head.weight" not in expected
        assert differences(load(tmp_path / "out"), expected) == []
        assert result.outputs[0].dropped == {"lm_head.weight": "tied to model.embed_tokens.weight, which has the same values"}

    def test_may_be_stored_in_some_checkpoints_and_left_out_in_others(self, tmp_path: Path) -> None:
        embedding = [torch.randn(6, 4), torch.randn(6, 4)]
        with_head = {"model.embed_tokens.weight": embedding[0], "lm_head.weight": embedding[0].clone()}
        models = {1: with_head, 2: {"model.embed_tokens.weight": embedding[1]}}
        average(save_steps(tmp_path / "run", models, tie_word_embeddings=True), tmp_path / "out")
        expected = mean([{"model.embed_tokens.weight": values} for values in embedding], [1, 1], 2)
        assert differences(load(tmp_path / "out"), expected) == []

    def test_are_averaged_like_the_rest_where_they_are_not_tied(self, layouts: Path, tmp_path: Path) -> None:
        result = average(layouts / "verl-run" / "run", tmp_path / "out", last=2)
        assert "lm_head.weight" in load(tmp_path / "out")
        assert result.outputs[0].dropped == {}


class TestWhatIsWritten:
    def test_is_a_model_folder(self, layouts: Path, tmp_path: Path) -> None:
        run, out = layouts / "verl-run" / "run", tmp_path / "out"
        average(run, out, last=2, dtype="bf16")
        home = run / "global_step_20" / "actor" / "huggingface"
        names = {path.name for path in home.iterdir()}
        assert {path.name for path in out.iterdir()} == {*names, "model.safetensors", MANIFEST}
        for name in names - {"config.json"}:
            assert (out / name).read_bytes() == (home / name).read_bytes()
        assert json.loads((out / "config.json").read_text()) == {**json.loads((home / "config.json").read_text()), "dtype": "bfloat16"}

    def test_can_be_averaged_again(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        average(run, tmp_path / "first", last=2)
        average([tmp_path / "first", run / "global_step_20"], tmp_path / "second", weights=(3, 1))
        expected = mean([load(tmp_path / "first"), load(layouts / "verl-run" / "expected.safetensors")], [3, 1], 4)
        assert differences(load(tmp_path / "second"), expected) == []

    def test_says_what_it_is_made_of(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        result = average(run, tmp_path / "out", last=2, weights=(1, 3))
        content = manifest_of(tmp_path / "out")
        assert (content["command"], content["method"], content["divisor"]) == ("average", "weighted", 4.0)
        assert content["averaged"] == [
            {"step": 10, "component": "actor", "weight": 1.0, "coefficient": 0.25, "path": str(run / "global_step_10")},
            {"step": 20, "component": "actor", "weight": 3.0, "coefficient": 0.75, "path": str(run / "global_step_20")},
        ]
        assert content["options"]["weights"] == [1, 3]
        assert len(content["sources"]) == 8
        output = result.outputs[0]
        assert [(s.step, s.weight, s.coefficient, s.format) for s in output.sources] == [
            (10, 1.0, 0.25, "rank-shards"),
            (20, 3.0, 0.75, "rank-shards"),
        ]
        assert output.bytes_read == sum(source.bytes for source in output.sources) - 3 * 8, "what is copied is read once"
        assert (result.checkpoint.step, result.dry_run) == (20, False)
        assert codes(result).keys() == {"step-skipped", "extra-tensors"}

    def test_leaves_the_sources_alone(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
        average(run, tmp_path / "out", last=2)
        assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()} == before

    def test_has_several_files_with_an_index_where_one_would_be_too_large(self, layouts: Path, tmp_path: Path) -> None:
        layout = layouts / "verl-run"
        average(layout / "run", tmp_path / "out", last=2, max_shard_size=5000)
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        expected = mean([load(layout / "expected-actor-10.safetensors"), load(layout / "expected.safetensors")], [1, 1], 2)
        assert index["weight_map"].keys() == expected.keys()
        assert len(set(index["weight_map"].values())) > 2
        assert differences(load(tmp_path / "out"), expected) == []

    def test_is_selected_and_renamed_as_by_merge(self, layouts: Path, tmp_path: Path) -> None:
        layout = layouts / "verl-run"
        (tmp_path / "map.json").write_text(json.dumps({"rules": [{"match": r"model\.(.*)", "to": r"\1"}]}))
        options: dict[str, Any] = {
            "include": ("layers.0.*", "norm.weight"),
            "exclude": ("*.mlp.*",),
            "key_map": tmp_path / "map.json",
            "names": "native",
        }
        result = average(layout / "run", tmp_path / "out", last=2, **options)
        whole = mean([load(layout / "expected-actor-10.safetensors"), load(layout / "expected.safetensors")], [1, 1], 2)
        expected = {
            name.removeprefix("model."): tensor
            for name, tensor in whole.items()
            if (name.startswith("model.layers.0.") and ".mlp." not in name) or name == "model.norm.weight"
        }
        assert differences(load(tmp_path / "out"), expected) == []
        assert result.outputs[0].left_out == len(whole) - len(expected)

    def test_warns_where_the_descriptions_of_the_models_differ(self, tmp_path: Path) -> None:
        first = save_hub(tmp_path / "a", {"w": torch.ones(2)}, model_type="x", rope_theta=1e4, torch_dtype="float32")
        second = save_hub(tmp_path / "b", {"w": torch.ones(2)}, model_type="x", rope_theta=1e6, torch_dtype="bfloat16")
        result = average([first, second], tmp_path / "out")
        assert codes(result)["configs-differ"] == f"config.json of {first} and {second} differ: rope_theta (10000.0, 1000000.0)"

    def test_has_the_description_of_another_checkpoint_where_the_newest_has_none(self, tmp_path: Path) -> None:
        first = save_hub(tmp_path / "a", {"w": torch.ones(2)}, model_type="x")
        second = save_hub(tmp_path / "b", {"w": torch.ones(2)})
        average([first, second], tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "x"


class TestTensorsThatAreNotAveraged:
    def test_are_copied_or_those_of_the_newest(self, tmp_path: Path) -> None:
        models = [{"w": torch.ones(3), "same": torch.arange(5), "count": torch.tensor([step])} for step in (1, 2)]
        paths = save_steps(tmp_path / "run", {10: models[0], 20: models[1]})
        result = average(paths, tmp_path / "out")
        assert differences(load(tmp_path / "out"), models[1]) == []
        assert codes(result)["newest-taken"].startswith("count: ")
        assert codes(result)["newest-taken"].endswith("taken from step 20")
        assert (result.outputs[0].copied, set(result.outputs[0].copied_names)) == (2, {"same", "count"})
        error = refused(paths, tmp_path / "strict", strict=True)
        assert isinstance(error, DifferentTensors)
        assert error.tensor == "count"

    def test_are_refused_where_they_are_quantised_and_differ(self, tmp_path: Path) -> None:
        config = {"quantization_config": {"quant_method": "x"}}
        models = [{"q.packed": torch.full((3,), step, dtype=torch.int32), "norm": torch.ones(2) * step} for step in (1, 2)]
        different = save_steps(tmp_path / "run", {10: models[0], 20: models[1]}, **config)
        assert isinstance(refused(different, tmp_path / "out"), Unsupported)
        equal = save_steps(tmp_path / "equal", {10: models[0], 20: {**models[0], "norm": models[1]["norm"]}}, **config)
        average(equal, tmp_path / "out")
        assert differences(load(tmp_path / "out"), {**models[0], "norm": torch.full((2,), 1.5)}) == []
        assert isinstance(refused(equal, tmp_path / "cast", dtype="bf16"), Unsupported)


class TestDifferentTensors:
    def test_are_refused_with_a_list_or_left_out(self, layouts: Path, tmp_path: Path) -> None:
        paths = [layouts / "verl-run" / "run" / "global_step_10" / name for name in ("critic", "actor")]
        error = refused(paths, tmp_path / "out")
        assert isinstance(error, DifferentTensors)
        assert error.exit_code == 4
        critic, actor = (load(layouts / "verl-run" / f"expected-{name}-10.safetensors") for name in ("critic", "actor"))
        common = [name for name in actor if name in critic and critic[name].shape == actor[name].shape]
        assert {line.split(":")[0] for line in error.details} == {*actor, *critic} - {*common}
        average(paths, tmp_path / "out", intersect=True, allow_missing="lm_head.weight")
        expected = mean([{name: model[name] for name in common} for model in (critic, actor)], [1, 1], 2)
        assert differences(load(tmp_path / "out"), expected) == []
        assert manifest_of(tmp_path / "out")["dropped"].keys() == {*actor, *critic} - {*common}

    def test_that_are_left_out_are_a_warning_where_no_class_says_what_it_needs(self, tmp_path: Path) -> None:
        paths = save_steps(tmp_path / "run", {10: {"a": torch.ones(2)}, 20: {"a": torch.ones(2), "b": torch.ones(2)}})
        for order in (paths, paths[::-1]):
            result = average(order, tmp_path / "out", intersect=True, overwrite=True)
            (text,) = (note.text for note in result.outputs[0].notes if note.code == "left-out-unproved")
            assert text.startswith("--intersect leaves out b, and nothing tells whether the model needs it")
        assert "left-out-unproved" not in {
            note.code for note in average([paths[0]] * 2, tmp_path / "same", intersect=True).outputs[0].notes
        }


class TestStrangeValues:
    @pytest.fixture
    def paths(self, tmp_path: Path) -> list[Path]:
        """Step 20 has two NaNs in one tensor and an infinity in another, step 30 an infinity."""
        models = {step: {"a": torch.ones(3, 4), "b": torch.ones(5), "c": torch.ones(2)} for step in (10, 20, 30)}
        models[20]["a"][1, 1:3] = math.nan
        models[20]["b"][0] = math.inf
        models[30]["b"][1] = -math.inf
        return save_steps(tmp_path / "run", models)

    def test_are_refused_with_names_and_nothing_is_written(self, paths: list[Path], tmp_path: Path) -> None:
        error = refused(paths, tmp_path / "new" / "out")
        assert isinstance(error, NonFinite)
        assert error.exit_code == 1
        assert error.message == "NaN or infinite values in 2 tensors of step 20, step 30"
        assert sorted(error.details) == [
            "a: 2 in step 20",
            "b: 1 in step 20",
            "b: 1 in step 30",
        ]
        assert "--allow-non-finite" in (error.hint or "")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    def test_are_written_where_that_is_wanted(self, paths: list[Path], tmp_path: Path) -> None:
        result = average(paths, tmp_path / "out", allow_non_finite=True)
        expected = {"a": torch.ones(3, 4), "b": torch.ones(5), "c": torch.ones(2)}
        expected["a"][1, 1:3] = math.nan
        expected["b"][:2] = torch.tensor([math.inf, -math.inf])
        assert differences(load(tmp_path / "out"), expected, nan_payload=False) == []
        warnings = [note.code for note in result.outputs[0].notes if note.level == "warning"]
        assert warnings == ["lacks-asset"] + ["non-finite"] * 3

    def test_of_checkpoints_and_tensors_that_are_left_out_do_not_matter(self, paths: list[Path], tmp_path: Path) -> None:
        average(paths, tmp_path / "weights", weights=(1, 0, 0))
        assert differences(load(tmp_path / "weights"), load(paths[0])) == []
        average(paths, tmp_path / "exclude", exclude=("a", "b"))
        assert load(tmp_path / "exclude").keys() == {"c"}

    def test_too_large_for_the_dtype_are_refused_unless_that_is_wanted(self, tmp_path: Path) -> None:
        models = {step: {"w": torch.tensor([1.0, 6e4, 7e4, -1e38]) * step, "v": torch.ones(1)} for step in (1, 2)}
        paths = save_steps(tmp_path / "run", models)
        error = refused(paths, tmp_path / "out", dtype="fp16")
        assert isinstance(error, CastOverflow)
        assert error.tensor == "w"
        assert not (tmp_path / "out").exists()
        result = average(paths[:1] * 2, tmp_path / "out", dtype="fp16", allow_overflow=True)
        assert load(tmp_path / "out")["w"].tolist() == [1.0, 60000.0, math.inf, -math.inf]
        assert result.outputs[0].overflows == {"w": 2}

    def test_that_weights_make_too_large_are_refused(self, tmp_path: Path) -> None:
        for dtype, large in ((torch.float32, 3e38), (torch.float64, 1.7e308)):
            models = {step: {"w": torch.tensor([1.0, large], dtype=dtype)} for step in (1, 2)}
            paths = save_steps(tmp_path / str(dtype), models)
            error = refused(paths, tmp_path / "out", weights=(1, 1), normalize=False)
            assert isinstance(error, CastOverflow), dtype


class TestWhereItGoes:
    def test_is_nowhere_in_a_dry_run(self, layouts: Path, tmp_path: Path) -> None:
        result = average(layouts / "verl-run" / "run", tmp_path / "out", last=2, dry_run=True)
        assert list(tmp_path.iterdir()) == []
        assert result.dry_run
        written = average(layouts / "verl-run" / "run", tmp_path / "out", last=2)
        assert result.outputs[0].plan_digest == written.outputs[0].plan_digest
        assert result.outputs[0].files == written.outputs[0].files

    def test_is_not_in_or_around_a_source(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        steps = [run / "global_step_10", run / "global_step_20"]
        for output in (steps[0] / "out", steps[1] / "actor" / "out", steps[0], run, run.parent):
            assert isinstance(refused(steps, output), OutputInsideSource), output
        average(steps, run / "averaged")
        assert (run / "averaged" / "model.safetensors").exists(), "beside the steps is no harm"

    def test_is_not_in_the_base(self, layouts: Path, copy: Copy) -> None:
        base = copy("layouts", "plain-files", "hub")
        assert isinstance(refused(layouts / "verl-run" / "run", base / "out", last=2, base=base), OutputInsideSource)

    def test_is_never_over_something_else(self, layouts: Path, tmp_path: Path) -> None:
        run, out = layouts / "verl-run" / "run", tmp_path / "out"
        average(run, out, last=2)
        before = (out / "model.safetensors").read_bytes()
        assert isinstance(refused(run, out, last=2), OutputExists)
        assert (out / "model.safetensors").read_bytes() == before
        average(run, out, last=2, weights=(1, 2), overwrite=True)
        assert (out / "model.safetensors").read_bytes() != before
        (out / "notes.txt").write_text("mine")
        assert isinstance(refused(run, out, last=2, overwrite=True), OutputExists)

    def test_is_nowhere_where_a_source_changes_meanwhile(self, copy: Copy, tmp_path: Path) -> None:
        run = copy("layouts", "verl-run", "run")
        shard = run / "global_step_10" / "actor" / "model_world_size_4_rank_0.pt"

        class Toucher(ckpt_cli.progress.Silent):
            def finish(self) -> None:
                shard.write_bytes(shard.read_bytes())

        with pytest.raises(SourceChanged):
            average(run, tmp_path / "out", last=2, progress=Toucher())
        assert not (tmp_path / "out").exists()


class TestOptions:
    def test_imply_their_method(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        cases: tuple[tuple[str, dict[str, Any]], ...] = (
            ("uniform", {}),
            ("weighted", {"weights": (1, 2)}),
            ("ema", {"decay": 0.5}),
            ("ema", {"half_life": 10}),
            ("wsm", {"decay_shape": "cosine"}),
        )
        for method, options in cases:
            assert average(run, tmp_path / "out", last=2, dry_run=True, **options).method == method

    @pytest.mark.parametrize("method", ["linear", "ema", "wsm"])
    def test_of_order_need_checkpoints_from_old_to_new(self, layouts: Path, tmp_path: Path, method: str) -> None:
        run = layouts / "verl-run" / "run"
        options = {"decay": 0.5} if method == "ema" else {}
        error = refused([run / "global_step_20", run / "global_step_10"], tmp_path / "out", method=method, **options)
        assert isinstance(error, UsageError)
        assert error.message == f"the method {method} needs checkpoints ordered from old to new, but these are steps 20, 10"
        assert error.hint == "pass them in order"
        average([run / "global_step_20", run / "global_step_10"], tmp_path / "out", dry_run=True)

    @pytest.mark.parametrize(
        ("options", "word"),
        [
            ({"lats": 2}, "lats"),
            ({"jobs": 0}, "--jobs"),
            ({"weights_name": "../x.safetensors"}, "weights name"),
            ({"max_shard_size": 0}, "--max-shard-size"),
            ({"dtype": "int4"}, "int4"),
            ({"method": "median"}, "median"),
            ({"weights": (1, 2, 3)}, "3 weights for 2 checkpoints"),
        ],
    )
    def test_that_make_no_sense_are_refused(self, layouts: Path, tmp_path: Path, options: dict[str, Any], word: str) -> None:
        error = refused(layouts / "verl-run" / "run", tmp_path / "out", **{"last": 2, **options})
        assert isinstance(error, UsageError)
        assert word in error.message
        assert list(tmp_path.iterdir()) == []


def assert_told(outcome: Outcome, code: int, name: str, *parts: str) -> None:
    """One error on stderr with its code, these parts and a hint, nothing on stdout."""
    assert outcome.code == code, outcome
    assert outcome.err.count("error[") == 1
    assert f"error[{name}]: " in outcome.err
    for part in parts:
        assert part in outcome.err
    assert "hint: " in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


class TestCommandLine:
    def test_writes_and_shows_what_each_checkpoint_weighs(self, layouts: Path, tmp_path: Path) -> None:
        layout = layouts / "verl-run"
        outcome = ckpt("average", layout / "run", "--last", "2", "--weights", "0.25,0.75", "-o", tmp_path / "out", "--dtype", "bf16")
        assert outcome.code == 0, outcome
        for part in ("25.00%", "75.00%", "29 tensors averaged, 1 copied from step 20: ", "weighted: sum(weight x value), rounded once"):
            assert part in outcome.out
        assert "warning: global_step_30 is left out: rank 2 of 4 is missing" in outcome.err
        models = [load(layout / "expected-actor-10.safetensors"), load(layout / "expected.safetensors")]
        assert differences(load(tmp_path / "out"), mean(models, [0.25, 0.75], 1.0, torch.bfloat16)) == []

    def test_prints_one_document_as_json(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        arguments = ("--from", "10", "--to", "20", "--every", "10", "--method", "linear", "-o", tmp_path / "out", "--dry-run", "--json")
        outcome = ckpt("average", run, *arguments)
        assert (outcome.code, outcome.err) == (0, "")
        document = json.loads(outcome.out)
        assert (document["command"], document["status"], document["exit_code"], document["errors"]) == ("average", "success", 0, [])
        data = document["data"]
        assert (data["method"], data["divisor"], data["dry_run"]) == ("linear", 3.0, True)
        (output,) = data["outputs"]
        assert (output["averaged"], output["copied"], output["tensors"], output["elements"]) == (29, 1, 30, 2874)
        assert output["copied_names"] == ["model.token_counts"]
        shares = [(source["step"], source["weight"], Fraction(source["coefficient"])) for source in output["sources"]]
        assert shares == [(10, 1.0, Fraction(1 / 3)), (20, 2.0, Fraction(2 / 3))]
        assert not (tmp_path / "out").exists()

    def test_lists_differences_in_words_and_in_json(self, layouts: Path, tmp_path: Path) -> None:
        step = layouts / "verl-run" / "run" / "global_step_10"
        arguments = ("average", step / "critic", step / "actor", "-o", tmp_path / "out")
        outcome = ckpt(*arguments)
        assert_told(
            outcome, 4, "different-tensors", "the checkpoints do not hold the same tensors", "  lm_head.weight: not in ", "--intersect"
        )
        document = json.loads(ckpt(*arguments, "--json").out)
        assert document["exit_code"] == 4
        (error,) = document["errors"]
        assert error["code"] == "different-tensors"
        assert [line for line in error["details"] if line.startswith("lm_head.weight: not in ")]

    def test_ends_with_1_for_values_that_are_not_finite(self, tmp_path: Path) -> None:
        models = {step: {"w": torch.tensor([1.0, math.nan if step == 2 else 1.0])} for step in (1, 2)}
        save_steps(tmp_path / "run", models)
        arguments = ("average", tmp_path / "run", "--all", "-o", tmp_path / "out")
        assert_told(ckpt(*arguments), 1, "non-finite", "w: 1 in step 2", "--allow-non-finite")
        assert not (tmp_path / "out").exists()
        outcome = ckpt(*arguments, "--allow-non-finite", "--quiet")
        assert (outcome.code, outcome.out.strip()) == (0, str(tmp_path / "out"))
        assert load(tmp_path / "out")["w"].isnan().tolist() == [False, True]

    def test_ends_with_2_for_options_that_make_no_sense(self, layouts: Path, tmp_path: Path) -> None:
        run, out = layouts / "verl-run" / "run", tmp_path / "out"
        cases = (
            ((), "which steps of the run should be averaged?"),
            (("--last", "2", "--weights", "a,b"), "--weights 'a,b' is not a list of numbers"),
            (("--steps", "10;20"), "--steps '10;20' is not a list of numbers"),
            (("--last", "2", "--weights", "1,-1"), "--no-normalize"),
        )
        for arguments, message in cases:
            assert_told(ckpt("average", run, *arguments, "-o", out), 2, "usage", message)
        assert ckpt("average", run, "--last", "2").code == 2, "an output must be named"
        assert list(tmp_path.iterdir()) == []

    def test_ends_with_4_and_5_for_what_is_incomplete_and_what_is_in_the_way(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        assert_told(ckpt("average", run, "--steps", "10,30", "-o", tmp_path / "out"), 4, "missing-shard", "rank 2 of 4 is missing")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("mine")
        assert_told(ckpt("average", run, "--last", "2", "-o", tmp_path / "out"), 5, "output-exists")


class TestDifferentTrainings:
    @pytest.fixture
    def steps(self, tmp_path: Path) -> Any:
        def made(*histories: dict[int, float]) -> list[Path]:
            paths = [save_hub(tmp_path / f"run{n}" / f"checkpoint-{n}", {"a": torch.ones(2) * n}) for n in (1, 2)]
            for path, history in zip(paths, histories, strict=True):
                entries = [{"step": step, "loss": loss, "epoch": 1.0} for step, loss in history.items()]
                (path / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
            return paths

        return made

    def test_are_told_by_the_losses_that_both_record(self, steps: Any, tmp_path: Path) -> None:
        paths = steps({10: 2.5, 20: 2.25}, {10: 2.5, 20: 2.0, 30: 1.5})
        said = codes(average(paths, tmp_path / "out"))["different-runs"]
        assert said == f"{paths[0]} and {paths[1]} are of different trainings: trainer_state.json records other losses at step 20"

    @pytest.mark.parametrize("second", [{10: 2.5, 20: 2.25, 30: 1.5}, {40: 1.0}, {}])
    def test_nothing_is_said_of_one_training_or_of_what_is_not_recorded(self, steps: Any, tmp_path: Path, second: dict[int, float]) -> None:
        assert "different-runs" not in codes(average(steps({10: 2.5, 20: 2.25}, second), tmp_path / "out"))


class TestWeightsOfAListOfSteps:
    """Each weight is that of the step in the same position."""

    @pytest.mark.parametrize(("steps", "weights"), [((200, 100), (3, 7)), ((100, 200), (7, 3))])
    def test_in_any_order(self, tmp_path: Path, steps: tuple[int, ...], weights: tuple[float, ...]) -> None:
        result = ckpt_cli.average(ROOT / "examples" / "tiny-run", tmp_path / "out", steps=steps, weights=weights, type="model")
        assert {source.step: source.weight for source in result.outputs[0].sources} == {100: 7.0, 200: 3.0}

    def test_three_of_them(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        shutil.copytree(ROOT / "examples" / "tiny-run", run)
        shutil.copytree(run / "checkpoint-100", run / "checkpoint-300")
        outcome = ckpt("average", run, "--steps", "200,300,100", "--weights", "5,2,3", "--type", "model", "-o", tmp_path / "out", "--json")
        sources = json.loads(outcome.out)["data"]["outputs"][0]["sources"]
        assert {source["step"]: source["weight"] for source in sources} == {100: 3.0, 200: 5.0, 300: 2.0}

    def test_steps_of_several_runs_must_be_in_order(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            shutil.copytree(ROOT / "examples" / "tiny-run", tmp_path / name)
        runs, weights = [tmp_path / "a", tmp_path / "b"], (1, 2, 3, 4)
        with pytest.raises(UsageError, match="cannot be told apart"):
            ckpt_cli.average(runs, tmp_path / "out", steps=(200, 100), weights=weights, type="model")
        result = ckpt_cli.average(runs, tmp_path / "out", steps=(100, 200), weights=weights, type="model")
        assert [source.weight for source in result.outputs[0].sources] == [1, 2, 3, 4]
