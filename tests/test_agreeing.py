"""Which tensors are averaged, which are copied, and which checkpoints are no checkpoints of one model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ckpt_cli.averaging.agreement import Agreed, agree
from ckpt_cli.boxes import Box, contiguous_strides, whole
from ckpt_cli.dtypes import BY_TORCH
from ckpt_cli.errors import DifferentTensors, Unsupported
from ckpt_cli.tensors.tensor import Piece, Tensor
from ckpt_cli.tensors.weighted_sum import Formula
from tests.test_kernels import Memory

LABELS = ("step 10", "step 20", "step 30")
MEAN = Formula((1.0, 1.0, 1.0), 3.0)
Model = dict[str, torch.Tensor]


class Stored(Memory):
    """A file of its own: two of the same size are not the same file."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(bytes(values.contiguous().flatten().view(torch.uint8).tolist()))
        self.identity = replace(self.identity, path=f"memory {id(self)}")


def held(model: Model) -> dict[str, Tensor]:
    """The tensors of a model, each in one piece that lies in memory."""
    found = {}
    for name, values in model.items():
        shape = tuple(values.shape)
        piece = Piece(Stored(values), 0, contiguous_strides(shape), whole(shape))  # type: ignore[arg-type]
        found[name] = Tensor(name, BY_TORCH[str(values.dtype).removeprefix("torch.")], shape, (piece,))
    return found


def agreed(*models: Model, formula: Formula = MEAN, **options: Any) -> Agreed:
    """What three checkpoints agree on; the last model is that of all that are not given."""
    filled = [*models, *[models[-1]] * (3 - len(models))]
    return agree([held(model) for model in filled], LABELS, formula, **options)


def refused(*models: Model, **options: Any) -> DifferentTensors | Unsupported:
    with pytest.raises((DifferentTensors, Unsupported)) as caught:
        agreed(*models, **options)
    assert caught.value.advice or caught.value.expected
    assert isinstance(caught.value, DifferentTensors | Unsupported)
    return caught.value


def notes(found: Agreed) -> dict[str, str]:
    return {note.code: note.text for note in found.notes}


def changed(model: Model, *names: str) -> Model:
    """A model in which some tensors have another first element."""
    result = dict(model)
    for name in names:
        values = model[name].clone().contiguous()
        flat = values.view(-1).view(torch.uint8)
        flat[0] ^= 1
        result[name] = values
    return result


class TestTensorsThatAreAveraged:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
    def test_are_those_of_numbers_with_fractions(self, dtype: torch.dtype) -> None:
        model = {"w": torch.ones(3, dtype=dtype)}
        found = agreed(changed(model, "w"), model)
        assert list(found.combinations) == ["w"]
        assert found.combinations["w"].formula == MEAN
        assert (found.dropped, found.notes) == ({}, ())

    def test_are_combined_in_the_order_of_the_checkpoints(self) -> None:
        models = [held({"w": torch.full((2,), float(step))}) for step in (1, 2, 3)]
        found = agree(models, LABELS, MEAN)
        assert [id(tensor) for tensor in found.combinations["w"].tensors] == [id(model["w"]) for model in models]
        assert found.tensors["w"] is models[-1]["w"]

    def test_keep_the_order_of_the_newest_checkpoint(self) -> None:
        one, other = torch.zeros(1), torch.ones(2)
        assert list(agreed({"b": one, "a": other}, {"a": other, "b": one}).tensors) == ["a", "b"]

    def test_are_not_read(self) -> None:
        models = [held({"w": torch.full((2,), float(step))}) for step in (1, 2, 3)]
        agree(models, LABELS, MEAN)
        assert all(piece.source.largest == 0 for model in models for piece in model["w"].pieces)  # type: ignore[attr-defined]


class TestCheckpointsWithoutWeight:
    FORMULA = Formula((0.5, 0.0, 0.5), 1.0)

    def test_are_left_out_of_the_sum(self) -> None:
        models = [held({"w": torch.full((2,), float(step))}) for step in (1, 2, 3)]
        combination = agree(models, LABELS, self.FORMULA).combinations["w"]
        assert combination.formula == Formula((0.5, 0.5), 1.0)
        assert [id(tensor) for tensor in combination.tensors] == [id(models[0]["w"]), id(models[2]["w"])]

    def test_must_hold_the_same_tensors_all_the_same(self) -> None:
        model = {"w": torch.zeros(3), "more": torch.zeros(1)}
        assert refused(model, {"w": torch.zeros(4)}, model, formula=self.FORMULA).details == (
            "w: shape [4] in step 20, [3] in step 30",
            "more: not in step 20",
        )


ABC = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(5)}


class TestDifferences:
    def test_are_refused_and_listed(self) -> None:
        older = {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16), "d": torch.zeros(1), "é\n": torch.zeros(1)}
        error = refused(older, ABC)
        assert isinstance(error, DifferentTensors)
        assert error.exit_code == 4
        assert error.message == "the checkpoints do not hold the same tensors: 5 differ"
        assert error.details == (
            "a: shape [3, 2] in step 10, [2, 3] in step 30",
            "b: dtype BF16 in step 10, F32 in step 30",
            "c: not in step 10",
            "d: not in step 20, step 30",
            "é\n: not in step 20, step 30",
        )

    def test_say_how_to_go_on(self) -> None:
        assert refused({"a": torch.zeros(2, 3)}, ABC).hint == "pass --intersect to average the 1 tensor that matches"
        halves = {**ABC, "b": torch.zeros(4, dtype=torch.bfloat16)}
        assert (refused(halves, ABC).hint or "").endswith(", or merge the others with --dtype first")

    def test_are_told_one_per_tensor(self) -> None:
        halves = {"a": torch.zeros(2, dtype=torch.float16)}
        assert refused(halves, {"a": torch.zeros(3)}).details == ("a: shape [2] in step 10, [3] in step 30",)

    def test_are_left_out_where_only_the_common_part_is_wanted(self) -> None:
        older = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "d": torch.zeros(1)}
        found = agreed(older, ABC, intersect=True)
        assert list(found.tensors) == list(found.combinations) == ["a"]
        assert found.dropped == {
            "b": "left out by --intersect: dtype BF16 in step 10, F32 in step 30",
            "c": "left out by --intersect: not in step 10",
            "d": "left out by --intersect: not in step 20, step 30",
        }

    def test_must_leave_something_in_common(self) -> None:
        error = refused({"x": torch.zeros(1)}, ABC, intersect=True)
        assert error.message == "the checkpoints have no tensor in common"


class TestTensorsThatAreNotAveraged:
    KINDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

    @pytest.mark.parametrize("dtype", KINDS)
    def test_are_copied_where_they_are_equal(self, dtype: torch.dtype) -> None:
        model = {"count": torch.ones(3, dtype=dtype), "w": torch.zeros(1)}
        found = agreed(model, strict=True)
        assert list(found.combinations) == ["w"]
        assert list(found.tensors) == ["count", "w"]
        assert found.notes == ()

    @pytest.mark.parametrize("dtype", KINDS)
    def test_are_those_of_the_newest_where_they_differ(self, dtype: torch.dtype) -> None:
        model = {"count": torch.ones(3, dtype=dtype), "w": torch.zeros(1)}
        newest = held(model)
        found = agree([held(model), held(changed(model, "count")), newest], LABELS, MEAN)
        assert list(found.combinations) == ["w"]
        assert found.tensors["count"] is newest["count"]
        assert notes(found) == {
            "newest-taken": "count: not averaged because of their dtype and not equal everywhere; taken from step 30",
        }
        assert {note.level for note in found.notes} == {"warning"}

    def test_are_refused_where_they_differ_and_that_is_wanted(self) -> None:
        model = {"count": torch.ones(3, dtype=torch.int64), "w": torch.zeros(1)}
        error = refused(model, changed(model, "count"), model, strict=True)
        assert isinstance(error, DifferentTensors)
        assert error.tensor == "count"
        assert error.message == "I64 values are not averaged, and those of step 20 and step 30 differ"
        assert error.hint == "without --strict those of step 30 are used"

    def test_are_compared_however_they_are_cut(self) -> None:
        values = torch.arange(12, dtype=torch.int64).reshape(4, 3)
        cut = held({"count": values, "w": torch.zeros(1)})
        halves = [held({"count": values[rows]})["count"] for rows in (slice(0, 2), slice(2, 4))]
        pieces = tuple(Piece(part.pieces[0].source, 0, (3, 1), Box((2 * place, 0), (2, 3))) for place, part in enumerate(halves))
        cut["count"] = Tensor("count", cut["count"].dtype, (4, 3), pieces)
        plain = {"count": values, "w": torch.zeros(1)}
        assert agree([cut, held(plain), held(plain)], LABELS, MEAN, strict=True).notes == ()
        assert notes(agree([cut, held(changed(plain, "count")), cut], LABELS, MEAN)).keys() == {"newest-taken"}


FP8 = {"mlp.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "mlp.weight_scale_inv": torch.ones(1), "mlp.bias": torch.ones(4)}
INT8 = {"q.weight": torch.ones(4, 4, dtype=torch.int8), "q.weight_scale": torch.ones(4, 1), "q.bias": torch.ones(4)}
GPTQ = {
    "q.qweight": torch.ones(4, 4, dtype=torch.int32),
    "q.qzeros": torch.ones(1, 4, dtype=torch.int32),
    "q.scales": torch.ones(1, 4, dtype=torch.float16),
    "q.g_idx": torch.zeros(4, dtype=torch.int32),
}
NF4 = {
    "a.weight": torch.ones(8, 1, dtype=torch.uint8),
    "a.weight.absmax": torch.ones(2),
    "a.weight.quant_map": torch.ones(16),
    "a.weight.nested_absmax": torch.ones(1),
    "a.weight.quant_state.bitsandbytes__nf4": torch.ones(5, dtype=torch.uint8),
    "a.bias": torch.ones(4),
}
MXFP4 = {
    "experts.up_proj_blocks": torch.ones(2, 4, dtype=torch.uint8),
    "experts.up_proj_scales": torch.ones(2, 1, dtype=torch.uint8),
    "experts.up_proj_bias": torch.ones(4, dtype=torch.bfloat16),
}
QUANTISED = {"fp8": FP8, "int8": INT8, "gptq": GPTQ, "nf4": NF4, "mxfp4": MXFP4}


class TestQuantisedWeights:
    @pytest.mark.parametrize("name", QUANTISED)
    def test_are_copied_with_their_scales_where_they_are_equal(self, name: str) -> None:
        model = {**QUANTISED[name], "norm.weight": torch.ones(4)}
        found = agreed(model)
        assert found.combinations.keys() == {each for each in model if each.endswith("bias")} | {"norm.weight"}
        assert found.tensors.keys() == model.keys()
        assert found.notes == ()

    @pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, model in QUANTISED.items() for name in model if "bias" not in name])
    @pytest.mark.parametrize("intersect", [False, True])
    def test_are_refused_where_they_or_their_scales_differ(self, kind: str, name: str, intersect: bool) -> None:
        model = QUANTISED[kind]
        error = refused(changed(model, name), model, intersect=intersect)
        assert isinstance(error, Unsupported)
        assert error.tensor == name
        assert error.message == "quantised weights are not averaged, and those of step 10 and step 30 differ"
        assert error.hint == "average the checkpoints from before quantisation, or leave the tensor out with --exclude"

    def test_that_are_only_rounded_in_training_are_called_so(self) -> None:
        """torch.ao's QAT: plain weights, and beside them what rounds them."""
        scales = {"scale": torch.ones(1), "zero_point": torch.zeros(1, dtype=torch.int32), "fake_quant_enabled": torch.ones(1).long()}
        model = {"c.weight": torch.ones(4, 4), **{f"c.weight_fake_quant.{name}": value for name, value in scales.items()}}
        error = refused(changed(model, "c.weight_fake_quant.scale"), model)
        assert "fake quantisation" in error.message
        assert error.hint == "average the weights alone with --exclude '*weight_fake_quant.*'"
        assert agreed(changed(model, "c.weight"), model).combinations.keys() == {"c.weight"}

    def test_leave_everything_else_of_their_module_to_be_averaged(self) -> None:
        found = agreed(changed(INT8, "q.bias"), INT8)
        assert list(found.combinations) == ["q.bias"]

    def test_are_integers_of_any_name_where_the_config_says_so(self) -> None:
        model = {"q.packed": torch.ones(4, dtype=torch.int32), "w": torch.ones(1)}
        assert notes(agreed(changed(model, "q.packed"), model)).keys() == {"newest-taken"}
        assert isinstance(refused(changed(model, "q.packed"), model, quantised=True), Unsupported)
        assert list(agreed(model, quantised=True).combinations) == ["w"]

    def test_are_no_counters(self) -> None:
        """A step counter beside something that is called a scale, as in a norm of some models."""
        model = {"norm.scale": torch.ones(4), "norm.num_batches_tracked": torch.tensor(3)}
        found = agreed(changed(model, "norm.num_batches_tracked"), model)
        assert list(found.combinations) == ["norm.scale"]
        assert notes(found).keys() == {"newest-taken"}

    @pytest.mark.parametrize("quantised", [False, True])
    @pytest.mark.parametrize(
        ("name", "companion", "floats"),
        [
            ("q.bitmask", torch.tensor([5, 6], dtype=torch.uint8), {"q.compressed": torch.ones(4)}),
            ("q.mask", torch.tensor([True, False]), {"q.weight": torch.ones(4)}),
            ("q.row_offsets", torch.tensor([0, 2]), {"q.compressed": torch.ones(4)}),
            ("q.indices", torch.tensor([3, 4], dtype=torch.int32), {"q.centroids.weight": torch.ones(4)}),
            ("q.Qidxs", torch.tensor([3, 4]), {"q.SU": torch.ones(4), "q.SV": torch.ones(4)}),
            ("q.places", torch.tensor([3, 4]), {"q.codebook": torch.ones(4)}),
            ("q.g_idx", torch.tensor([0, 1]), {"q.weight": torch.ones(4)}),
            ("d2t", torch.tensor([0, 1]), {"lm_head.weight": torch.ones(4)}),
        ],
        ids=str,
    )
    def test_that_integers_give_a_meaning_to_need_the_same_integers(
        self, name: str, companion: torch.Tensor, floats: Model, quantised: bool
    ) -> None:
        model = {name: companion, **floats, "norm.weight": torch.ones(4)}
        error = refused({**model, name: companion.flip(0)}, model, quantised=quantised)
        assert isinstance(error, Unsupported)
        assert error.tensor == name
        assert agreed(model, model, quantised=quantised).combinations.keys() >= {"norm.weight"}

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("bn.num_batches_tracked", torch.tensor(3)),
            ("gate.token_counts", torch.tensor([3, 4])),
            ("gate.tokens_per_expert", torch.tensor([3, 4])),
            ("vq.code_usage", torch.tensor([3, 4])),
            ("embeddings.position_ids", torch.tensor([[0, 1]])),
        ],
        ids=str,
    )
    def test_are_no_statistics_of_integers(self, name: str, values: torch.Tensor) -> None:
        module = name.rpartition(".")[0]
        model = {name: values, f"{module}.weight": torch.ones(4), f"{module}.table": torch.ones(2)}
        found = agreed({**model, name: values + 1}, model)
        assert found.combinations.keys() == model.keys() - {name}
        assert notes(found).keys() == {"newest-taken"}

    def test_of_float8_mean_nothing_even_without_scales(self) -> None:
        model = {"w": torch.ones(4).to(torch.float8_e5m2)}
        assert agreed(model).combinations == {}
        assert isinstance(refused(changed(model, "w"), model), Unsupported)
