"""``--match-base``: the same names, shapes and dtypes as the base, and nothing changed in silence."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_cli.boxes import Box, Shape, contiguous_strides, whole
from ckpt_cli.dtypes import BY_CODE
from ckpt_cli.errors import Inconsistent
from ckpt_cli.merging.match_base import BaseForm, match_base
from ckpt_cli.tensors.tensor import Piece, Tensor
from tests.test_kernels import Memory, tilings
from tests.test_views import numbered, read, stored

PATCHES = "vit_model.vision_model.embeddings.patch_embedding.weight"
Tensors = dict[str, Tensor]


def tensor(name: str, shape: Shape, code: str = "F32") -> Tensor:
    dtype = BY_CODE[code]
    source = Memory(bytes(math.prod(shape) * dtype.itemsize))
    return Tensor(name, dtype, shape, (Piece(source, 0, contiguous_strides(shape), whole(shape)),))  # type: ignore[arg-type]


def model(**shapes: Shape) -> Tensors:
    return {name.replace("__", "."): tensor(name.replace("__", "."), shape) for name, shape in shapes.items()}


def match(tensors: Tensors, base: Tensors, *, fill_missing: bool = False, drop_extra: bool = False) -> BaseForm:
    return match_base(tensors, base, fill_missing=fill_missing, drop_extra=drop_extra)


def refused(tensors: Tensors, base: Tensors, text: str, **options: bool) -> Inconsistent:
    with pytest.raises(Inconsistent, match=text) as caught:
        match(tensors, base, **options)
    assert caught.value.hint
    return caught.value


def notes(matched: BaseForm, level: str | None = None) -> dict[str, str]:
    return {note.code: note.text for note in matched.notes if level in (None, note.level)}


class TestSameForm:
    def test_what_fits_is_taken_as_it_is(self) -> None:
        run, base = model(a=(2, 3), b=(4,)), model(a=(2, 3), b=(4,))
        matched = match(run, base)
        assert matched.tensors == run
        assert all(matched.tensors[name] is run[name] for name in run)
        assert matched.dropped == {}
        assert notes(matched, "warning") == {}

    def test_the_order_is_that_of_the_base(self) -> None:
        assert list(match(model(b=(1,), c=(1,), a=(1,)), model(a=(1,), b=(1,), c=(1,))).tensors) == ["a", "b", "c"]

    def test_the_dtypes_are_those_of_the_base(self) -> None:
        run = {"a": tensor("a", (2,), "F32"), "b": tensor("b", (2,), "F32")}
        base = {"a": tensor("a", (2,), "BF16"), "b": tensor("b", (2,), "F32")}
        matched = match(run, base)
        assert {name: dtype.code for name, dtype in matched.dtypes.items()} == {"a": "BF16", "b": "F32"}
        assert {t.dtype.code for t in matched.tensors.values()} == {"F32"}, "the cast is made when it is written"

    @pytest.mark.parametrize(("here", "there"), [("I64", "F32"), ("F32", "I64"), ("BOOL", "U8"), ("C64", "F32")])
    def test_another_kind_of_number_is_refused(self, here: str, there: str) -> None:
        refused({"a": tensor("a", (2,), here)}, {"a": tensor("a", (2,), there)}, f"a: {here} .* base {there}")

    def test_integers_of_another_width_are_not_cast(self) -> None:
        """Only floats are ever cast; where the base has other integers, somebody has to look."""
        refused({"a": tensor("a", (2,), "I64")}, {"a": tensor("a", (2,), "I32")}, "I64")

    def test_nothing_at_all_fits_nothing(self) -> None:
        assert match({}, {}).tensors == {}


class TestMissing:
    def test_a_tensor_that_the_run_lacks_is_refused_by_name(self) -> None:
        error = refused(model(a=(2,)), model(a=(2,), b=(3,)), "lacks 1 of the base's 2 tensors: b")
        assert "--fill-missing-from-base" in (error.hint or "")

    def test_it_is_taken_from_the_base_where_that_is_asked_for(self) -> None:
        base = model(a=(2,), b=(3,))
        matched = match(model(a=(2,)), base, fill_missing=True)
        assert matched.tensors["b"] is base["b"]
        assert "b" in notes(matched, "warning")["filled"]

    def test_only_the_first_of_many_are_listed(self) -> None:
        base = {f"layer.{i:02d}": tensor(f"layer.{i:02d}", (1,)) for i in range(20)}
        assert "layer.05 and 14 more" in refused({}, base, "lacks 20").message


class TestExtra:
    def test_a_tensor_that_the_base_lacks_is_refused_by_name(self) -> None:
        error = refused(model(a=(2,), b=(3,)), model(a=(2,)), "has 1 tensor that the base lacks: b")
        assert "--drop-extra" in (error.hint or "")

    def test_it_is_left_out_where_that_is_asked_for_and_listed(self) -> None:
        matched = match(model(a=(2,), b=(3,)), model(a=(2,)), drop_extra=True)
        assert list(matched.tensors) == ["a"]
        assert list(matched.dropped) == ["b"]

    def test_one_permission_is_not_the_other(self) -> None:
        refused(model(a=(2,), b=(3,)), model(a=(2,)), "b", fill_missing=True)
        refused(model(a=(2,)), model(a=(2,), b=(3,)), "b", drop_extra=True)

    def test_both_at_once(self) -> None:
        matched = match(model(a=(2,), x=(3,)), model(a=(2,), b=(3,)), fill_missing=True, drop_extra=True)
        assert (list(matched.tensors), list(matched.dropped)) == (["a", "b"], ["x"])


class TestShapes:
    @pytest.mark.parametrize(
        ("here", "there"), [((2, 3), (3, 2)), ((6,), (2, 3)), ((2, 3), (6,)), ((1,), ()), ((2, 3), (2, 4)), ((0,), (0, 3))]
    )
    def test_no_other_tensor_is_reshaped(self, here: Shape, there: Shape) -> None:
        error = refused(model(a=here), model(a=there), "cannot be given the base's shape")
        assert str(list(here)) in error.message
        assert str(list(there)) in error.message

    def test_the_same_elements_under_another_name_are_not_reshaped(self) -> None:
        for name in ("conv.weight", "patch_embedding.bias", "patch_embed.proj.weight", "patch_embedding.weight.extra"):
            refused({name: tensor(name, (4, 3, 2, 2))}, {name: tensor(name, (4, 12))}, "base's shape")

    def test_permissions_do_not_help(self) -> None:
        refused(model(a=(2,)), model(a=(3,)), "base's shape", fill_missing=True, drop_extra=True)

    def test_all_that_do_not_fit_are_counted(self) -> None:
        refused(model(a=(2,), b=(2,), c=(2,)), model(a=(3,), b=(2,), c=(3,)), "^2 tensors .*a: .*c: ")

    def test_names_from_files_are_escaped_where_they_are_shown(self) -> None:
        name = "\x1b[2J"
        error = refused({name: tensor(name, (2,))}, {name: tensor(name, (3,))}, "base's shape")
        assert "\x1b" not in error.message


@st.composite
def patch_embeddings(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    shape = tuple(draw(st.integers(1, 4)) for _ in range(4))
    return shape, draw(tilings(shape))


class TestPatchEmbedding:
    """A convolution [out, in, height, width] in the training, a linear layer [out, height * width * in] in the base, or the other way."""

    @settings(deadline=None, derandomize=True, max_examples=80)
    @given(patch_embeddings(), st.integers(1, 200))
    def test_a_convolution_becomes_the_linear_layer_that_torch_makes_of_it(self, case: tuple[Shape, list[Box]], budget: int) -> None:
        shape, boxes = case
        content = numbered(shape)
        out, channels, height, width = shape
        flat = (out, height * width * channels)
        run = {PATCHES: replaced(stored(content, boxes, [[0, 1, 2, 3]] * len(boxes)), PATCHES)}
        matched = match(run, {PATCHES: tensor(PATCHES, flat, "I16")})
        assert matched.tensors[PATCHES].shape == flat
        assert torch.equal(read(matched.tensors[PATCHES], budget), content.permute(0, 2, 3, 1).reshape(flat))

    @settings(deadline=None, derandomize=True, max_examples=80)
    @given(patch_embeddings(), st.integers(1, 200), st.data())
    def test_and_back(self, case: tuple[Shape, list[Box]], budget: int, data: st.DataObject) -> None:
        """Shards may cut rows, as FSDP does, and columns, as tensor parallelism does."""
        shape, _ = case
        content = numbered(shape)
        flat = content.permute(0, 2, 3, 1).reshape(shape[0], -1)
        cuts = data.draw(tilings(tuple(flat.shape)))
        run = {PATCHES: replaced(stored(flat, cuts, [[1, 0]] * len(cuts)), PATCHES)}
        matched = match(run, {PATCHES: tensor(PATCHES, shape, "I16")})
        assert matched.tensors[PATCHES].shape == shape
        assert torch.equal(read(matched.tensors[PATCHES], budget), content)

    def test_it_is_noted(self) -> None:
        matched = match({PATCHES: tensor(PATCHES, (4, 3, 2, 2))}, {PATCHES: tensor(PATCHES, (4, 12))})
        assert notes(matched, "info")["reshaped"] == f"{PATCHES}: [4, 3, 2, 2] was converted to the base's [4, 12]"

    @pytest.mark.parametrize(
        ("here", "there"),
        [((4, 3, 2, 2), (4, 13)), ((4, 3, 2, 2), (3, 16)), ((4, 3, 2, 2), (48,)), ((4, 12), (4, 3, 2, 3)), ((4, 12), (3, 4, 2, 2)),
         ((4, 12), (4, 3, 4)), ((4, 3, 2, 2), (4, 2, 2, 3))],
    )  # fmt: skip
    def test_a_shape_that_is_not_that_of_the_other_form_is_refused(self, here: Shape, there: Shape) -> None:
        refused({PATCHES: tensor(PATCHES, here)}, {PATCHES: tensor(PATCHES, there)}, "base's shape")

    def test_the_same_form_is_left_alone(self) -> None:
        run = {PATCHES: tensor(PATCHES, (4, 3, 2, 2))}
        matched = match(run, {PATCHES: tensor(PATCHES, (4, 3, 2, 2))})
        assert matched.tensors[PATCHES] is run[PATCHES]
        assert "reshaped" not in notes(matched)

    def test_the_shape_is_that_of_the_tensor_whatever_name_it_was_stored_under(self) -> None:
        """Wrappers and key maps change names: the name that counts is the one that is written."""
        matched = match({PATCHES: tensor("_orig_mod.patches", (4, 3, 2, 2))}, {PATCHES: tensor(PATCHES, (4, 12))})
        assert matched.tensors[PATCHES].shape == (4, 12)


def replaced(old: Tensor, name: str) -> Tensor:
    return Tensor(name, old.dtype, old.shape, old.pieces, old.copies)


class TestNormsOfQueriesAndKeys:
    NORMS = ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight")

    def test_it_is_said_whether_both_have_them(self) -> None:
        with_norms = {name: tensor(name, (2,)) for name in self.NORMS}
        assert notes(match(with_norms, with_norms), "info")["qk-norm"].endswith("in both")
        assert notes(match(model(a=(2,)), model(a=(2,))), "info")["qk-norm"].endswith("in neither")

    def test_it_is_a_warning_where_one_side_lacks_them(self) -> None:
        plain = model(a=(2,))
        with_norms = plain | {name: tensor(name, (2,)) for name in self.NORMS}
        assert notes(match(with_norms, plain, drop_extra=True), "warning")["qk-norm"].endswith("only in the run")
        assert notes(match(plain, with_norms, fill_missing=True), "warning")["qk-norm"].endswith("only in the base")

    def test_other_norms_do_not_count(self) -> None:
        """Part of a name is no name."""
        other = {name: tensor(name, (2,)) for name in ("layers.0.q_norms.weight", "layers.0.norm.weight", "seq_norm.weight")}
        assert notes(match(other, other))["qk-norm"].endswith("in neither")
