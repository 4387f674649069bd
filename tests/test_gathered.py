"""What a rule of the hub makes one tensor of must be whole and must fit the config; otherwise nothing is written.

Every case ends in an error of the project with the tensor and the rule, with and without ``PYTHONOPTIMIZE=1``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.boxes import Shape
from ckpt_cli.dtypes import BY_CODE
from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.classes.names import hub_tensors, natural_key
from ckpt_cli.hub.classes.rules import Conversion, HubRules, Renaming
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import concatenated, interleaved, merged, permuted, selected, sliced, stacked, unfolded
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt

DINO = {"model_type": "dinov2", "architectures": ["Dinov2Model"]}
MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
LAYER = "encoder.layer.0.mlp"
EXPERTS = "model.layers.0.mlp.experts"


def folder(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    path.mkdir()
    save_file(dict(tensors), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def refused(path: Path, out: Path) -> Inconsistent:
    """The error of a merge, which is that of an average as well."""
    with pytest.raises(Inconsistent) as caught:
        ckpt_cli.merge(path, out)
    with pytest.raises(Inconsistent):
        ckpt_cli.average([path, path], out)
    assert not out.exists()
    error = caught.value
    assert error.exit_code == 4
    assert error.tensor
    assert error.details
    assert error.details[0].startswith("rule: ")
    return error


def swiglu(**others: torch.Tensor) -> dict[str, torch.Tensor]:
    parts = {"gate_proj.weight": torch.ones(6, 4), "up_proj.weight": torch.ones(6, 4), "down_proj.weight": torch.ones(4, 6)}
    return {f"{LAYER}.{name.replace('__', '.')}": tensor for name, tensor in {**parts, **others}.items()}


class TestAHalfIsNoWhole:
    """29 model types concatenate two, three or four tensors of the training into one of the hub."""

    def test_all_parts_become_one(self, tmp_path: Path) -> None:
        tensors = swiglu(gate_proj__bias=torch.ones(6), up_proj__bias=torch.zeros(6))
        ckpt_cli.merge(folder(tmp_path / "run", tensors, DINO), tmp_path / "out", allow_missing="*")
        from safetensors.torch import load_file

        written = load_file(tmp_path / "out" / "model.safetensors")
        assert written[f"{LAYER}.weights_in.bias"].tolist() == [1] * 6 + [0] * 6

    def test_no_part_at_all_is_a_model_without_biases(self, tmp_path: Path) -> None:
        ckpt_cli.merge(folder(tmp_path / "run", swiglu(), DINO), tmp_path / "out", allow_missing="*")

    @pytest.mark.parametrize("there", ["gate_proj", "up_proj"])
    def test_one_bias_of_two_is_refused(self, tmp_path: Path, there: str) -> None:
        error = refused(folder(tmp_path / "run", swiglu(**{f"{there}__bias": torch.ones(6)}), DINO), tmp_path / "out")
        assert error.tensor == f"{LAYER}.{there}.bias"
        assert {"gate_proj": "mlp.up_proj.bias", "up_proj": "mlp.gate_proj.bias"}[there] in error.message
        assert "mlp.gate_proj.bias + mlp.up_proj.bias -> mlp.weights_in.bias" in error.details[0]

    def test_one_weight_of_two_is_refused(self, tmp_path: Path) -> None:
        tensors = swiglu()
        del tensors[f"{LAYER}.up_proj.weight"]
        refused(folder(tmp_path / "run", tensors, DINO), tmp_path / "out")

    def test_native_names_write_what_is_there(self, tmp_path: Path) -> None:
        """What the hint says works."""
        run = folder(tmp_path / "run", swiglu(gate_proj__bias=torch.ones(6)), DINO)
        ckpt_cli.merge(run, tmp_path / "out", names="native")

    @pytest.mark.parametrize("optimized", ["", "1"])
    def test_parts_of_two_dtypes_are_refused(self, tmp_path: Path, optimized: str) -> None:
        tensors = swiglu(gate_proj__bias=torch.ones(6), up_proj__bias=torch.ones(6, dtype=torch.bfloat16))
        refused(folder(tmp_path / "run", tensors, DINO), tmp_path / "out")
        done = ckpt("merge", tmp_path / "run", "-o", tmp_path / "out", PYTHONOPTIMIZE=optimized)
        assert done.code == 4, done.err
        assert "BF16" in done.err
        assert "rule: mlp.gate_proj.bias" in done.err
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("optimized", ["", "1"])
    def test_parts_of_two_shapes_are_refused(self, tmp_path: Path, optimized: str) -> None:
        tensors = {**swiglu(), f"{LAYER}.up_proj.weight": torch.ones(6, 5)}
        refused(folder(tmp_path / "run", tensors, DINO), tmp_path / "out")
        assert ckpt("merge", tmp_path / "run", "-o", tmp_path / "out", PYTHONOPTIMIZE=optimized).code == 4


class TestConfigAndTensorsDisagree:
    @pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
    @pytest.mark.parametrize("shape", [(4,), ()])
    def test_experts_of_too_few_dimensions(self, tmp_path: Path, name: str, shape: Shape) -> None:
        error = refused(folder(tmp_path / "run", {f"{EXPERTS}.{name}": torch.ones(shape)}, MOE), tmp_path / "out")
        assert error.tensor == f"{EXPERTS}.{name}"
        assert "dimensions" in f"{error.expected}"

    def test_gate_and_up_of_an_odd_number_of_rows(self, tmp_path: Path) -> None:
        error = refused(folder(tmp_path / "run", {f"{EXPERTS}.gate_up_proj": torch.ones(4, 5, 6)}, MOE), tmp_path / "out")
        assert "5 elements cannot be cut into 2 equal parts" in error.message

    def test_more_experts_than_any_model_has(self, tmp_path: Path) -> None:
        """A tensor without elements may have any size in a few bytes of file."""
        run = folder(tmp_path / "run", {"norm.weight": torch.ones(1)}, MIXTRAL)
        header = json.dumps(
            {
                f"{EXPERTS}.down_proj": {"dtype": "F32", "shape": [10**12, 0, 4], "data_offsets": [0, 0]},
                "norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            }
        ).encode()
        (run / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
        refused(run, tmp_path / "out")

    def test_a_stack_of_no_experts(self, tmp_path: Path) -> None:
        """It would become no tensor at all."""
        tensors = {"norm.weight": torch.ones(2), f"{EXPERTS}.down_proj": torch.ones(0, 4, 4)}
        refused(folder(tmp_path / "run", tensors, MOE), tmp_path / "out")

    def test_two_tensors_of_one_name(self, tmp_path: Path) -> None:
        """Neither is lost: the one that is renamed and the one that has the name already."""
        tensors = {"a.block_sparse_moe.gate.weight": torch.ones(2), "a.mlp.gate.weight": torch.zeros(2)}
        run = folder(tmp_path / "run", tensors, MIXTRAL)
        with pytest.raises(Inconsistent) as caught:
            ckpt_cli.merge(run, tmp_path / "out")
        assert "same name" in caught.value.message


def described(name: str, shape: Shape, dtype: str = "F32") -> Tensor:
    return Tensor(name, BY_CODE[dtype], shape, ())


def rules(sources: list[str], targets: list[str], *operations: Mapping[str, Any]) -> HubRules:
    """One conversion, as `hub_compile` writes it: numbers stand for the star of a source."""
    escaped = [re.escape(source).replace(r"\*", r"(\d+)") for source in sources]
    match = re.compile("|".join(f"(?P<g{i}>{text})" for i, text in enumerate(escaped)))
    return HubRules("X", "a test", (Conversion(Renaming(match, tuple(sources), tuple(targets), None), operations),), (), (), (), {}, False)


MERGE = {"name": "MergeModulelist", "dim": 0}
JOIN = {"name": "Concatenate", "dim": 1}


class TestListsAreWhole:
    def made(self, numbers: list[int | str], shapes: Mapping[int | str, Shape] = {}) -> dict[str, Tensor]:
        tensors = {f"m.experts.{i}.w": described(f"m.experts.{i}.w", shapes.get(i, (2, 3))) for i in numbers}
        return hub_tensors(tensors, rules(["experts.*.w"], ["experts.w"], MERGE), {})

    def test_a_whole_one_is_stacked_in_the_order_of_its_numbers(self) -> None:
        assert self.made(list(range(12)))["m.experts.w"].shape == (12, 2, 3)

    @pytest.mark.parametrize(
        ("numbers", "absent"), [([0, 1, 2, 4, 5, 6, 7], 3), ([1, 2, 3], 0), ([0, 10**9], 1), ([0, 1, 10**6], 2), (["0", "2", "03"], 1)]
    )
    def test_gaps_are_refused(self, numbers: list[int | str], absent: int) -> None:
        with pytest.raises(Inconsistent) as caught:
            self.made(numbers)
        assert caught.value.exit_code == 4
        assert caught.value.tensor == f"m.experts.{absent}.w"
        assert "rule: experts.*.w -> experts.w (MergeModulelist)" in caught.value.details

    def test_numbers_that_are_written_twice_are_refused(self) -> None:
        with pytest.raises(Inconsistent):
            self.made([0, 1, "01"])

    def test_elements_of_two_shapes_are_refused(self) -> None:
        with pytest.raises(Inconsistent) as caught:
            self.made([0, 1], {1: (2, 4)})
        assert caught.value.tensor == "m.experts.1.w"

    def test_lists_of_two_lengths_are_refused(self) -> None:
        """Expert 1 has a gate and no up projection: shapes would not tell."""
        names = ["m.0.gate", "m.1.gate", "m.0.up"]
        tensors = {name: described(name, (2, 3)) for name in names}
        with pytest.raises(Inconsistent) as caught:
            hub_tensors(tensors, rules(["m.*.gate", "m.*.up"], ["m.gate_up"], MERGE, JOIN), {})
        assert "2 of m.*.gate, 1 of m.*.up" in caught.value.message

    def test_two_tensors_are_not_taken_for_one(self) -> None:
        tensors = {f"m.{name}.w": described(f"m.{name}.w", (4, 3)) for name in ("a", "b")}
        with pytest.raises(Inconsistent):
            hub_tensors(tensors, rules(["m.a.w", "m.b.w"], ["m.w"], {"name": "Interleave", "dim": 0}), {})


class TestNumbersOfTheConfig:
    @pytest.mark.parametrize("count", [3, 0, -2, 2.0, True, "2", None, 10**10, [2]])
    def test_that_do_not_divide_are_refused(self, count: object) -> None:
        chunk = {"name": "Chunk", "dim": 0, "num_shards_attribute": "parts"}
        with pytest.raises(Inconsistent) as caught:
            hub_tensors({"m.w": described("m.w", (4, 3))}, rules(["m.w"], ["m.*.w"], chunk), {"parts": count})
        assert caught.value.tensor == "m.w"
        assert caught.value.details == ("rule: m.w -> m.*.w (Chunk)",)

    def test_that_divide_are_taken(self) -> None:
        chunk = {"name": "Chunk", "dim": 0, "num_shards_attribute": "parts"}
        made = hub_tensors({"m.w": described("m.w", (4, 3))}, rules(["m.w"], ["m.*.w"], chunk), {"parts": 2})
        assert {name: tensor.shape for name, tensor in made.items()} == {"m.0.w": (2, 3), "m.1.w": (2, 3)}

    @pytest.mark.parametrize("heads", [5, 0, -1, 4.0, "4", True, 15, 10**12])
    def test_heads_that_do_not_divide_are_refused(self, heads: object) -> None:
        """15 rows are 1, 3, 5 or 15 heads, and none of these has two halves."""
        permute = {"name": "PermuteForRope", "subconfig_key": None, "inverse": True, "permute_layer_names": None}
        with pytest.raises(Inconsistent) as caught:
            hub_tensors({"m.q": described("m.q", (15, 3))}, rules(["m.q"], ["m.q"], permute), {"num_attention_heads": heads})
        assert "num_attention_heads" in caught.value.message

    @pytest.mark.parametrize(
        "operation",
        [
            {"name": "Chunk", "dim": 2},
            {"name": "SplitModulelist", "dim": -3},
            {"name": "Transpose", "dim0": 0, "dim1": 2},
            {"name": "Interleave", "dim": 5},
            {"name": "Interleave", "dim": "0"},
            {"name": "Chunk"},
        ],
    )
    def test_dimensions_out_of_range_are_refused(self, operation: Mapping[str, Any]) -> None:
        with pytest.raises(Inconsistent) as caught:
            hub_tensors({"m.w": described("m.w", (4, 3))}, rules(["m.w"], ["m.*.w"], operation), {})
        assert caught.value.tensor == "m.w"
        assert caught.value.details

    def test_a_name_with_digits_that_are_no_numbers_is_sorted(self) -> None:
        assert natural_key("layers.².w") < natural_key("layers.³.w")


class TestViews:
    """Nothing is computed from shapes that do not fit, whoever asks."""

    @pytest.fixture
    def tensor(self) -> Tensor:
        return described("w", (4, 6))

    def test_of_other_shapes_are_refused(self, tensor: Tensor) -> None:
        for wrong in (
            lambda: permuted(tensor, (0, 0)),
            lambda: permuted(tensor, (0,)),
            lambda: sliced(tensor, 0, 3, 5),
            lambda: sliced(tensor, 2, 0, 1),
            lambda: sliced(tensor, 0, 0, 4, 0),
            lambda: selected(tensor, 1, 6),
            lambda: stacked([tensor, described("v", (4, 5))], 0),
            lambda: stacked([tensor], 3),
            lambda: concatenated([tensor, described("v", (5, 5))], 0),
            lambda: concatenated([tensor, described("v", (4, 6), "BF16")], 0),
            lambda: interleaved(described("v", (5,)), 0, inverse=True),
            lambda: merged(tensor, 1),
            lambda: unfolded(tensor, 1, (2, 2)),
        ):
            with pytest.raises(Inconsistent) as caught:
                wrong()
            assert caught.value.tensor in ("v", "w")


def test_no_result_hangs_on_an_assertion() -> None:
    """`python -O` and PYTHONOPTIMIZE=1 leave assertions out."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "ckpt_cli").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == []
