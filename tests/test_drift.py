"""Drifts in groups, frozen parts, and the data of the heatmap; BAGEL's formats; names by their pattern."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.bagel import bagel_facts
from ckpt_cli.name_patterns import pattern_of, ranged
from ckpt_cli.results.drift import HeatmapRow, TensorDrift
from ckpt_cli.verifying.drift.groups import frozen_parts, group_drifts, heatmap_of, largest_rows, scale_of
from tests.drifts import MODULES, comparison, drift, layers


class TestPatterns:
    def test_a_name_without_its_numbers(self) -> None:
        assert pattern_of("model.layers.12.mlp.experts.3.w1.weight") == ("model.layers.{}.mlp.experts.{}.w1.weight", (12, 3))
        assert pattern_of("conv2d.weight") == ("conv2d.weight", ())

    @pytest.mark.parametrize(
        ("numbers", "text"),
        [
            ([5], "5"),
            ([0, 1, 2], "{0..2}"),
            ([3, 7, 11], "{3..11..4}"),
            ([0, 1, 5], "{0..1,5}"),
            ([0, 2], "{0,2}"),
            ([0, 2, 5, 9, 14, 20], "{0,2,5,...,20}"),
        ],
    )
    def test_ranges_of_numbers(self, numbers: list[int], text: str) -> None:
        assert ranged("layers.{}.w", [(number,) for number in numbers]) == f"layers.{text}.w"


class TestGroups:
    def test_the_relative_change_of_a_group_is_that_of_its_tensors_as_one_vector(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        base = {f"model.layers.{i}.w.weight": torch.randn(7, 5) * 10**i for i in range(3)}
        mine = {name: tensor + torch.randn(7, 5) * 0.1 for name, tensor in base.items()}
        mine["model.layers.1.w.weight"] = base["model.layers.1.w.weight"]
        (tmp_path / "base").mkdir()
        (tmp_path / "run").mkdir()
        save_file(base, tmp_path / "base" / "model.safetensors")
        torch.save(mine, tmp_path / "run" / "model_world_size_1_rank_0.pt")
        found = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=tmp_path / "base", compare=True).outputs[0].comparison
        assert found is not None
        (group,) = found.groups
        a, b = (np.concatenate([tensor.double().numpy().ravel() for tensor in side.values()]) for side in (mine, base))
        assert (group.pattern, group.tensors, group.changed_tensors) == ("model.layers.{0..2}.w.weight", 3, 2)
        assert (group.elements, group.changed) == (105, np.count_nonzero(a != b))
        assert group.max_abs == pytest.approx(np.abs(a - b).max(), rel=1e-12, abs=0)
        assert group.mean_abs == pytest.approx(np.abs(a - b).mean(), rel=1e-12, abs=0)
        assert group.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-12, abs=0)
        assert group.cosine == min(each.cosine for each in found.drifts if each.cosine is not None)

    def test_the_biggest_drift_comes_first_and_nan_before_it(self) -> None:
        small, big, nan, same, lost = drift("a", 0.1), drift("b", 0.5), drift("c", math.nan), drift("d", 0.0), drift("e", math.inf)
        packed = TensorDrift(name="f", elements=4, compared=4, changed=1)
        found = group_drifts([small, same, packed, big, lost, nan])
        assert [group.pattern for group in found] == ["c", "e", "b", "a", "f", "d"]

    def test_means_are_weighted_by_elements(self) -> None:
        (group,) = group_drifts([drift("l.0.w", 0.2, elements=300), drift("l.1.w", 0.6, elements=100)])
        assert group.mean_abs == pytest.approx((300 * 0.1 + 100 * 0.3) / 400)

    def test_a_new_part_without_a_base_is_infinitely_far(self) -> None:
        tensor = drift("w", 1.0).model_copy(update={"l2": 2.0, "base_norm": 0.0, "relative_l2": math.inf, "cosine_distance": None})
        (group,) = group_drifts([tensor])
        assert (group.relative_l2, group.cosine) == (math.inf, None)

    def test_packed_tensors_have_no_numbers(self) -> None:
        (group,) = group_drifts([TensorDrift(name="w", elements=4, compared=4, changed=1)])
        assert (group.changed, group.max_abs, group.mean_abs, group.relative_l2, group.cosine) == (1, None, None, None, None)

    def test_an_empty_tensor_divides_by_nothing(self) -> None:
        (group,) = group_drifts([drift("w", 0.0, elements=0, base_norm=0.0)])
        assert (group.mean_abs, group.relative_l2) == (0.0, 0.0)

    def test_huge_norms_do_not_overflow(self) -> None:
        (group,) = group_drifts([drift(f"l.{i}.w", 0.5, base_norm=1e200) for i in range(4)])
        assert group.relative_l2 == pytest.approx(0.5)


class TestFrozenParts:
    def test_a_tower_in_which_nothing_changed_is_one_line(self) -> None:
        tower = layers(3, "visual.blocks", frozen=3)
        (part,) = frozen_parts([*tower, drift("visual.merger.weight", 0), drift("model.norm.weight", 0.1)])
        assert (part.part, part.tensors) == ("visual.*", len(tower) + 1)

    def test_layers_that_were_frozen_alike_are_one_line(self) -> None:
        (part,) = frozen_parts(layers(5, frozen=3))
        assert (part.part, part.tensors) == ("model.layers.{0..2}.*", 3 * len(MODULES))

    def test_a_single_tensor_has_its_name(self) -> None:
        (part,) = frozen_parts([drift("a.b.weight", 0), drift("a.c.weight", 1)])
        assert (part.part, part.tensors) == ("a.b.weight", 1)

    def test_everything_is_a_star(self) -> None:
        (part,) = frozen_parts([drift("a.w", 0), drift("b.w", 0)])
        assert (part.part, part.tensors) == ("*", 2)

    def test_a_part_with_a_tensor_that_could_not_be_compared_is_not_frozen(self) -> None:
        found = frozen_parts([drift("visual.a.w", 0), drift("visual.a.b", 0), drift("model.w", 1)], ["visual.patch.w"])
        assert [part.part for part in found] == ["visual.a.*"]

    def test_the_largest_part_comes_first(self) -> None:
        found = frozen_parts([drift("x.a.w", 0), drift("y.a.w", 0), drift("y.b.w", 0), drift("z.w", 1)])
        assert [part.part for part in found] == ["y.*", "x.a.w"]


class TestHeatmap:
    def test_rows_are_modules_and_columns_are_layers(self) -> None:
        found = heatmap_of([*layers(4), drift("model.embed_tokens.weight", 0.3), drift("lm_head.weight", 0.0)])
        (block,) = found.blocks
        assert (block.stack, block.layers) == ("model.layers", (0, 1, 2, 3))
        assert [row.module for row in block.rows] == list(MODULES)
        assert block.rows[0].values == pytest.approx([10 ** (-4 + layer / 2) for layer in range(4)])
        assert [(row.module, row.values) for row in found.outside] == [("model.embed_tokens", (pytest.approx(0.3),)), ("lm_head", (0.0,))]

    def test_every_tower_is_a_block(self) -> None:
        found = heatmap_of([*layers(2, "visual.blocks"), *layers(3, "model.language_model.layers")])
        assert [(block.stack, len(block.layers)) for block in found.blocks] == [("visual.blocks", 2), ("model.language_model.layers", 3)]

    def test_experts_of_a_layer_are_one_cell(self) -> None:
        names = [f"model.layers.{layer}.mlp.experts.{expert}.w1.weight" for layer in range(2) for expert in range(3)]
        (block,) = heatmap_of([drift(name, 0.1 * i) for i, name in enumerate(names)]).blocks
        (row,) = block.rows
        assert row.module == "mlp.experts.*.w1"
        assert row.values == pytest.approx([math.sqrt((0 + 0.01 + 0.04) / 3), math.sqrt((0.09 + 0.16 + 0.25) / 3)])

    def test_weight_and_bias_share_a_row_and_other_parameters_have_their_own(self) -> None:
        names = ("mlp.fc.weight", "mlp.fc.bias", "mixer.A_log")
        (block,) = heatmap_of([drift(f"h.{layer}.{name}", 0.1) for layer in range(2) for name in names]).blocks
        assert [row.module for row in block.rows] == ["mlp.fc", "mixer.A_log"]

    def test_a_layer_without_a_module_has_no_value_there(self) -> None:
        drifts = [each for each in layers(3) if each.name != "model.layers.1.mlp.gate.weight"]
        (block,) = heatmap_of(drifts).blocks
        row = next(row for row in block.rows if row.module == "mlp.gate")
        assert row.values[1] is None
        assert None not in (row.values[0], row.values[2])

    def test_members_of_a_sequence_are_no_layers(self) -> None:
        found = heatmap_of([drift("time_embedder.mlp.0.weight", 0.1), drift("time_embedder.mlp.2.weight", 0.1)])
        assert found.blocks == ()
        assert [row.module for row in found.outside] == ["time_embedder.mlp.0", "time_embedder.mlp.2"]

    def test_a_model_of_one_layer_has_layers(self) -> None:
        (block,) = heatmap_of(layers(1)).blocks
        assert block.layers == (0,)

    def test_sublayers_stay_apart(self) -> None:
        names = [f"encoder.block.{i}.layer.{j}.{what}.weight" for i in range(2) for j, what in ((0, "SelfAttention.q"), (1, "Dense.wi"))]
        (block,) = heatmap_of([drift(name, 0.1) for name in names]).blocks
        assert [row.module for row in block.rows] == ["layer.0.SelfAttention.q", "layer.1.Dense.wi"]

    def test_nothing_at_all(self) -> None:
        assert heatmap_of([]) == comparison([]).heatmap


class TestScale:
    def test_it_has_whole_decades_around_the_values(self) -> None:
        scale = scale_of([None, 0.0, math.nan, math.inf, 2e-4, 3e-2])
        assert scale is not None
        assert (scale.low, scale.high, scale.more_below) == (-4, -1, False)
        assert (scale.place(1e-4), scale.place(1e-1), scale.place(5.0)) == pytest.approx((0, 1, 1))

    def test_it_ends_six_decades_below_the_largest(self) -> None:
        scale = scale_of([1e-12, 0.5])
        assert scale is not None
        assert (scale.low, scale.high, scale.more_below, scale.place(1e-12)) == (-6, 0, True, 0.0)

    def test_one_value_has_a_decade(self) -> None:
        scale = scale_of([0.01])
        assert scale is not None
        assert scale.low < scale.high

    def test_where_nothing_changed_there_is_none(self) -> None:
        assert scale_of([0.0, None, math.nan]) is None

    def test_rows_with_the_biggest_drift_are_kept_in_their_order(self) -> None:
        rows = [HeatmapRow(module=str(i), values=(value,)) for i, value in enumerate((0.1, 0.5, None, math.nan, 0.2))]
        assert [row.module for row in largest_rows(rows, 3)] == ["1", "3", "4"]


class TestBagel:
    NAME = "vit_model.vision_model.embeddings.patch_embedding.weight"
    NORMS = tuple(
        f"language_model.model.layers.{i}.self_attn.{n}_norm{twin}.weight" for i in (0, 1) for n in "qk" for twin in ("", "_moe_gen")
    )

    def test_the_form_of_the_patch_embedding_and_the_norms_of_both_sides_are_told(self) -> None:
        mine = {"vae2llm.weight": (8, 4), self.NAME: (1152, 588), **dict.fromkeys(self.NORMS, (128,))}
        base = {"vae2llm.weight": (8, 4), self.NAME: (1152, 3, 14, 14), **dict.fromkeys(self.NORMS[::2], (128,)), "lm.weight": (1,)}
        embedding, norms = bagel_facts(mine, base)
        assert embedding[1:] == ("NaViT linear [1152, 588]", "convolution [1152, 3, 14, 14]")
        assert norms[1:] == ("4 tensors, 4 of _moe_gen", "4 tensors, none of _moe_gen")

    def test_what_is_not_there_is_said(self) -> None:
        embedding, norms = bagel_facts({"llm2vae.weight": (1,)}, {"llm2vae.weight": (1,)})
        assert (embedding[1], norms[2]) == ("none", "none")

    def test_other_models_have_no_such_lines(self) -> None:
        assert bagel_facts({self.NAME: (1152, 588)}, {"model.norm.weight": (1,)}) == ()
