"""The drift in a terminal: the map of layers and modules, and the table of groups, at every width."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from ckpt_cli.cli.screens.heatmap import A_AND_B, LEVELS, cosines, drift_table, heatmap, table_legend
from ckpt_cli.results.drift import TensorDrift
from tests.drifts import MODULES, comparison, drift, layers

WIDTHS = (80, 120)
UNIT = A_AND_B.unit
EDGES = [drift("model.embed_tokens.weight", 3e-5), drift("model.norm.weight", 0.0)]


def lines(drifts: list[TensorDrift], width: int, **options: bool) -> list[str]:
    found = comparison(drifts).heatmap
    assert found is not None
    return [line.plain for line in heatmap(found, width, A_AND_B, **options)]


def row(shown: list[str], module: str) -> str:
    """The cells behind a module's name."""
    (line,) = [line for line in shown if line.strip().startswith(f"{module}  ")]
    return line.split(f"{module}  ", 1)[1]


def table(drifts: list[TensorDrift], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(drift_table(comparison(drifts).groups, width))
    return [line.rstrip() for line in capture.get().splitlines()]


class TestMap:
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("count", [1, 2, 28, 36, 80, 126])
    def test_no_line_is_wider_than_the_screen_and_columns_line_up(self, width: int, count: int) -> None:
        shown = lines([*EDGES, *layers(count), *layers(3, "a.very.long.name.of.some.vision_tower.encoder.blocks")], width)
        assert max(map(len, shown)) <= width
        assert len({len(line) for line in shown[2 : 2 + len(MODULES)]}) == 1

    def test_every_layer_has_a_column_where_there_is_room(self) -> None:
        shown = lines(layers(80), 120)
        assert shown[0] == "model.layers  layers 0 to 79"
        assert len(row(shown, "mlp.up_proj")) == 80
        ruler = shown[1]
        first = shown[2].index(row(shown, MODULES[0])[0])
        assert [ruler[first + layer :].split()[0] for layer in range(0, 80, 10)] == [str(layer) for layer in range(0, 80, 10)]

    def test_else_a_column_stands_for_several_and_the_largest_counts(self) -> None:
        drifts = [drift(f"model.layers.{i}.mlp.up.weight", 1e-1 if i == 13 else 1e-4) for i in range(160)]
        shown = lines(drifts, 80)
        assert shown[0] == "model.layers  layers 0 to 159, the largest of 3 per column"
        cells = row(shown, "mlp.up")
        assert len(cells) == math.ceil(160 / 3)
        assert [i for i, sign in enumerate(cells) if sign == LEVELS[-1]] == [13 // 3]

    def test_of_a_few_layers_the_values_are_written_out(self) -> None:
        values = {0: 0.0, 1: 0.1, 3: math.nan}
        drifts = [drift(f"h.{i}.a.weight", value) for i, value in values.items()] + [drift(f"h.{i}.b.weight", 0.1) for i in range(4)]
        shown = lines(drifts, 80)
        assert shown[1].split("  layer")[1:] == [f" {i}".ljust(6) for i in range(3)] + [" 3"]
        assert row(shown, "a").split() == ["·", "unchanged", LEVELS[-1], "0.1", "!", "nan"]
        assert not any("1.0e-01" in line for line in shown), "a scale is for signs without values"
        assert lines(drifts, 50)[2].split() == ["a", f"··{2 * LEVELS[-1]}", "!!"], "where there is no room, a map"

    def test_a_heading_is_whole_on_a_narrow_screen(self) -> None:
        shown = lines(layers(126, "model.language_model.decoder.transformer.stack.layers"), 60)
        assert len(shown[0]) <= 60
        assert shown[0].startswith("mod")
        assert shown[0].endswith(".layers  layers 0 to 125, the largest of 4 per column")

    def test_names_have_the_room_that_few_layers_leave(self) -> None:
        name = "self_attn.linear_attention.in_projection_of_keys"
        assert any(name in line for line in lines([drift(f"h.{i}.{name}.weight", 0.1) for i in range(28)], 80))
        assert not any(name in line for line in lines([drift(f"h.{i}.{name}.weight", 0.1) for i in range(60)], 80))

    @pytest.mark.parametrize("width", [40, 60, 80])
    def test_a_legend_of_several_lines_is_in_columns(self, width: int) -> None:
        shown = lines([*EDGES, *layers(10), drift("a.weight", 1e-12)], width)
        legend = shown[next(i for i, line in enumerate(shown) if line.startswith("relative L2")) + 1 :]
        rows = [line for line in legend if any(level in line for level in LEVELS)]
        assert len(rows) > 1
        assert max(map(len, legend)) <= width
        places = [[line.index(level) for level in LEVELS if level in line] for line in rows]
        assert all(each == places[0][: len(each)] for each in places)

    def test_the_height_of_a_sign_grows_with_the_change(self) -> None:
        cells = row(lines(layers(40), 80), "mlp.up_proj")
        heights = [LEVELS.index(sign) for sign in cells]
        assert heights == sorted(heights)
        assert (heights[0], heights[-1]) == (0, len(LEVELS) - 1)

    def test_unchanged_missing_and_odd_cells_have_signs_of_their_own(self) -> None:
        values = {0: 0.0, 1: 0.1, 3: math.nan}
        drifts = [drift(f"h.{i}.a.weight", value) for i, value in values.items()] + [drift(f"h.{i}.b.weight", 0.1) for i in range(5)]
        shown = lines(drifts, 80)
        assert row(shown, "a")[::2] == f"·{LEVELS[-1]} ! "
        assert shown[-1].endswith("· unchanged  ! NaN, or A is all zero")

    def test_the_legend_says_unit_and_scale(self) -> None:
        shown = lines(layers(10), 120)
        assert UNIT in shown
        assert UNIT == "relative L2 change, ||B - A|| / ||A||, log scale"
        legend = shown[shown.index(UNIT) + 1]
        assert legend.startswith("▁ 1.0e-04  ▂ ")
        assert [legend[legend.index(level) + 2 :].split()[0] for level in LEVELS] == [f"{10 ** (-4 + i / 4):.1e}" for i in range(8)]

    def test_smaller_values_than_the_scale_are_said_to_be_smaller(self) -> None:
        shown = lines([drift("a.weight", 1e-12), drift("b.weight", 0.5)], 120)
        assert any(line.startswith("▁ <") for line in shown)

    def test_ascii_is_enough(self) -> None:
        shown = lines([*EDGES, *layers(10, frozen=1)], 80, ascii_only=True)
        assert "".join(shown).isascii()
        assert row(shown, "mlp.up_proj").startswith("..")

    def test_colours_are_not_needed_but_there(self) -> None:
        found = comparison(layers(10)).heatmap
        assert found is not None
        console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        with console.capture() as capture:
            for line in heatmap(found, 80, A_AND_B):
                console.print(line, soft_wrap=True)
        assert "\x1b[38;2;253;231;37m" in capture.get()

    def test_off_a_terminal_lines_stay_readable(self) -> None:
        assert max(map(len, lines(layers(126), 100_000))) <= 160

    def test_a_model_without_layers_is_a_list(self) -> None:
        assert lines(EDGES, 80)[0] == "all tensors"

    def test_nothing_changed(self) -> None:
        shown = lines(layers(5, frozen=5), 80)
        assert UNIT not in shown
        assert shown[-1] == "· unchanged"

    def test_nothing_changed_in_few_layers(self) -> None:
        shown = [line for line in lines(layers(3, frozen=3), 80)[2:] if line]
        assert UNIT not in shown
        assert {line.split("  ", 1)[1].strip() for line in map(str.strip, shown)} == {"  ".join(["· unchanged"] * 3)}

    def test_names_are_shortened_in_the_middle_and_escaped(self) -> None:
        shown = lines([drift(f"h.{i}.{'x' * 100}.\x1b[31m.end.weight", 0.1) for i in range(2)], 80)
        assert "\x1b" not in "".join(shown)
        assert any(".." in line and ".end  " in line for line in shown)


class TestTable:
    def test_wide_screens_have_every_column(self) -> None:
        shown = table(layers(28), 120)
        assert shown[0].split() == ["tensor", "tensors", "changed", "max", "|d|", "mean", "|d|", "rel", "L2", "cosine"]
        assert len(shown) == 1 + len(MODULES)
        assert "model.layers.{0..27}.mlp.up_proj.weight" in "\n".join(shown)

    def test_narrow_screens_have_those_needed_most(self) -> None:
        shown = table(layers(28), 80)
        assert shown[0].replace("(.weight left out)", "").split() == ["tensor", "changed", "max", "|d|", "rel", "L2", "cosine"]
        assert max(map(len, shown)) <= 80

    @pytest.mark.parametrize(("width", "missing"), [(60, "tensors, mean |d|, max |d|"), (80, "tensors, mean |d|"), (120, None)])
    def test_columns_without_room_are_named_below(self, width: int, missing: str | None) -> None:
        first, *rest = [line.plain for line in table_legend(width, A_AND_B)]
        assert first == "d = B - A; rel L2 = ||d|| / ||A||; cosine 1: same direction"
        assert bool(rest) is (missing is not None)
        assert " ".join(rest).startswith(f"not shown at this width: {missing} (" if missing else "")

    @pytest.mark.parametrize("width", [60, 80, 100, 120])
    def test_a_tensor_has_one_line_however_long_its_name_is(self, width: int) -> None:
        drifts = [*layers(28, "model.language_model.decoder.transformer_stack.layers"), *(drift(f"part{i}x.w", 1e-9) for i in range(25))]
        shown = table(drifts, width)
        assert len(shown) == 1 + 20 + 1
        assert max(map(len, shown)) <= width
        assert sum("post_attention_layernorm" in line for line in shown) == (width > 60)
        assert shown[-1].startswith("... and 17 more")

    @pytest.mark.parametrize("width", WIDTHS)
    def test_numbers_end_in_one_column(self, width: int) -> None:
        shown = table([drift("a.w", 0.5), drift("b.w", 1e-5), drift("c.w", 12.0)], width)
        assert len({len(line) for line in shown}) == 1

    def test_unchanged_groups_are_left_out(self) -> None:
        assert len(table([drift("a.w", 0.5), drift("b.w", 0.0)], 120)) == 2

    def test_tensors_without_distances_have_no_row(self) -> None:
        odd = [TensorDrift(name="w", kind=kind, elements=4, compared=4, changed=1) for kind in ("packed", "integer")]
        assert len(table([*odd, drift("a.w", 0.5)], 120)) == 2

    def test_of_many_groups_the_rest_is_counted(self) -> None:
        shown = table([drift(f"part{i}x.w", 0.1) for i in range(25)], 120)
        assert shown[-1] == "... and 5 more (--json lists all)"

    @pytest.mark.parametrize(
        ("distance", "text"),
        [
            (None, ""),
            (0.0, "1"),
            (5.1e-4, "0.99949"),
            (2.1e-6, "0.9999979"),
            (2.1e-9, ">0.9999999"),
            (0.25, "0.7500"),
            (1.5, "-0.5000"),
            (math.nan, "nan"),
        ],
    )
    def test_a_cosine_near_one_has_the_digits_that_tell_it_from_one(self, distance: float | None, text: str) -> None:
        assert cosines([distance]) == [text]

    def test_cosines_of_a_table_have_as_many_digits(self) -> None:
        assert cosines([0.002, 2.2e-6, 1e-9, None]) == ["0.9980000", "0.9999978", ">0.9999999", ""]
