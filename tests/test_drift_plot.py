"""The picture of a drift: what is in it, for models of every shape and with hostile names, and how the file is written."""

from __future__ import annotations

import html.parser
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib import image

import ckpt_cli
from ckpt_cli.errors import NotWritable, OutputExists, UsageError
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.verifying.drift.plot import LABEL, check_plot, draw
from tests.drifts import MODULES, comparison, drift, layers

SVG = "{http://www.w3.org/2000/svg}"
EDGES = [drift("model.embed_tokens.weight", 3e-5), drift("model.norm.weight", 0.0), drift("lm_head.weight", 2e-3)]
MODELS = {
    "80 layers": [*EDGES, *layers(80, frozen=4)],
    "two layers": [*EDGES, *layers(2)],
    "two towers": [*layers(32, "visual.blocks", frozen=32), *EDGES, *layers(28, "model.language_model.layers")],
    "no layers": EDGES,
    "nothing changed": [drift("model.embed_tokens.weight", 0.0), *layers(3, frozen=3)],
    "no tensors": [],
    "not finite": [*layers(2), drift("a.weight", math.nan), drift("b.weight", math.inf)],
}


def texts(path: Path) -> list[str]:
    """Every text of an SVG file, from top to bottom."""
    return ["".join(element.itertext()) for element in ET.parse(path).iter(f"{SVG}text")]


def drawn(tmp_path: Path, made: BaseComparison, name: str = "run/step-2000") -> list[str]:
    draw(made, tmp_path / "drift.svg", name=name)
    return texts(tmp_path / "drift.svg")


class Tags(html.parser.HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


class TestPicture:
    @pytest.mark.parametrize("suffix", ["png", "svg", "html"])
    @pytest.mark.parametrize("model", MODELS)
    def test_every_model_is_drawn_in_every_format(self, tmp_path: Path, model: str, suffix: str) -> None:
        path = tmp_path / f"drift.{suffix}"
        draw(comparison(MODELS[model]), path, name="run")
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
        if suffix == "png":
            height, width, _ = image.imread(path).shape
            assert 300 < width < 4000
            assert 200 < height < 4000
        elif suffix == "svg":
            assert "Drift of weights" in texts(path)
        else:
            assert "svg" in Tags(path.read_text()).tags

    def test_it_names_modules_axes_scale_and_both_checkpoints(self, tmp_path: Path) -> None:
        found = drawn(tmp_path, comparison(MODELS["80 layers"]))
        assert set(MODULES) <= set(found)
        assert {"layer", "model.layers", "outside of the layers", "model.embed_tokens", "unchanged", LABEL} <= set(found)
        assert {"new: run/step-2000", "base: models/base", "963 tensors compared, 914 changed, 49 unchanged"} <= set(found)
        assert LABEL == "relative L2 change, ||new - base|| / ||base|| (log scale)"

    def test_every_fifth_of_80_layers_has_its_number(self, tmp_path: Path) -> None:
        found = drawn(tmp_path, comparison(layers(80)))
        assert [text for text in found if text.isdigit() and text != "1"] == [str(layer) for layer in range(0, 80, 5)]

    def test_the_scale_has_whole_decades(self, tmp_path: Path) -> None:
        found = drawn(tmp_path, comparison(MODELS["80 layers"]))
        assert {"1e-5", "1e-4", "1e-3", "1e-2"} <= set(found)

    def test_where_nothing_changed_there_is_no_scale(self, tmp_path: Path) -> None:
        found = drawn(tmp_path, comparison(MODELS["nothing changed"]))
        assert LABEL not in found
        assert "unchanged" in found

    def test_what_is_no_number_is_named(self, tmp_path: Path) -> None:
        assert {"NaN, or the base is all zero", "nan", "inf"} <= set(drawn(tmp_path, comparison(MODELS["not finite"])))

    def test_every_tower_has_its_map(self, tmp_path: Path) -> None:
        assert {"visual.blocks", "model.language_model.layers"} <= set(drawn(tmp_path, comparison(MODELS["two towers"])))

    def test_of_very_many_rows_the_biggest_drifts_are_drawn(self, tmp_path: Path) -> None:
        found = drawn(tmp_path, comparison([drift(f"part{i:03d}.weight", (i + 1) / 1000) for i in range(300)]))
        assert "part299" in found
        assert "part000" not in found

    def test_of_very_many_stacks_the_first_are_drawn_and_the_rest_is_counted(self, tmp_path: Path) -> None:
        found = drawn(tmp_path, comparison([drift(f"s{i:02d}.layers.{layer}.w.weight", 0.1) for i in range(20) for layer in (0, 1)]))
        assert {"s00.layers", "s11.layers"} <= set(found)
        assert "s12.layers" not in found
        assert any(text.endswith("; 8 more stacks of layers are not drawn") for text in found)

    def test_what_is_left_out_is_said(self, tmp_path: Path) -> None:
        found = drawn(tmp_path, comparison([drift(f"h.{layer}.m{i}.weight", (i + 1) / 100) for layer in (0, 1) for i in range(70)]))
        assert "h, 60 of 70 rows, those with the biggest drift" in found

    @pytest.mark.parametrize("suffix", ["png", "svg", "html"])
    def test_equal_input_gives_equal_bytes(self, tmp_path: Path, suffix: str) -> None:
        for name in ("a", "b"):
            draw(comparison(MODELS["two layers"]), tmp_path / f"{name}.{suffix}", name="run")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


class TestHostileNames:
    NAMES = ("$\\frac{a}{b}$", "<script>alert(1)</script>", "a & b", "\x1b[31mred", "\u202eleft", "名前", "]]>", "x" * 300, "{0}%s", " ")

    @pytest.mark.parametrize("suffix", ["png", "svg", "html"])
    def test_they_are_only_text(self, tmp_path: Path, suffix: str) -> None:
        made = comparison([drift(f"{name}.weight", 0.1) for name in self.NAMES], base="</title><script>")
        path = tmp_path / f"drift.{suffix}"
        draw(made, path, name="<b>$x_1$\n")
        if suffix == "svg":
            found = texts(path)
            assert {"$\\frac{a}{b}$", "<script>alert(1)</script>", "a & b", "new: <b>$x_1$\\n"} <= set(found)
            assert not any("\x1b" in text or "\u202e" in text for text in found)
        if suffix == "html":
            page = Tags(path.read_text())
            assert "script" not in page.tags
            assert "名前.weight" in page.texts


class TestPage:
    def test_it_loads_nothing(self, tmp_path: Path) -> None:
        draw(comparison(MODELS["two layers"]), tmp_path / "drift.html", name="run")
        text = (tmp_path / "drift.html").read_text()
        page = Tags(text)
        assert not {"script", "link", "img", "iframe"} & set(page.tags)
        assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
        assert "@import" not in text

    def test_the_table_has_the_twenty_groups_with_the_biggest_drift(self, tmp_path: Path) -> None:
        made = comparison([drift(f"part{i:02d}.w", (i + 1) / 100) for i in range(30)])
        draw(made, tmp_path / "drift.html", name="run")
        found = [text for text in Tags((tmp_path / "drift.html").read_text()).texts if text.startswith("part") and text.endswith(".w")]
        # The picture has a row for each of them; the table comes last.
        assert found[30:] == [f"part{i:02d}.w" for i in range(29, 9, -1)]

    def test_its_title_names_both(self, tmp_path: Path) -> None:
        draw(comparison(EDGES), tmp_path / "drift.html", name="run a&b")
        assert "<title>Drift of run a&amp;b against models/base</title>" in (tmp_path / "drift.html").read_text()


class TestFile:
    @pytest.mark.parametrize("name", ["drift.pdf", "drift", "drift.png.gz"])
    def test_another_suffix_is_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UsageError) as caught:
            draw(comparison(EDGES), tmp_path / name, name="run")
        assert caught.value.expected == "a name that ends in .png, .svg, .html"
        assert not list(tmp_path.iterdir())

    def test_the_suffix_may_be_in_capitals(self, tmp_path: Path) -> None:
        assert check_plot(tmp_path / "DRIFT.PNG") == ".png"

    def test_what_is_there_stays_unless_it_may_be_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "drift.svg"
        path.write_text("mine")
        with pytest.raises(OutputExists):
            draw(comparison(EDGES), path, name="run")
        assert path.read_text() == "mine"
        draw(comparison(EDGES), path, name="run", overwrite=True)
        assert "Drift of weights" in texts(path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["drift.svg"]

    def test_a_folder_is_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "drift.svg").mkdir()
        with pytest.raises(OutputExists):
            draw(comparison(EDGES), tmp_path / "drift.svg", name="run", overwrite=True)

    def test_a_link_that_leads_nowhere_is_there_already(self, tmp_path: Path) -> None:
        (tmp_path / "drift.svg").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OutputExists):
            draw(comparison(EDGES), tmp_path / "drift.svg", name="run")
        assert not (tmp_path / "elsewhere").exists()

    def test_a_missing_folder_is_an_error_of_the_output(self, tmp_path: Path) -> None:
        with pytest.raises(NotWritable) as caught:
            draw(comparison(EDGES), tmp_path / "none" / "drift.svg", name="run")
        assert caught.value.path == str(tmp_path / "none" / "drift.svg")

    def test_its_mode_follows_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            draw(comparison(EDGES), tmp_path / "drift.svg", name="run")
        finally:
            os.umask(before)
        assert (tmp_path / "drift.svg").stat().st_mode & 0o777 == 0o640

    def test_without_values_there_is_nothing_to_draw(self, tmp_path: Path) -> None:
        names = BaseComparison(base="base", common=1, missing=(), extra=(), reshaped=(), other_dtype=())
        with pytest.raises(UsageError, match="values"):
            draw(names, tmp_path / "drift.svg", name="run")


def in_a_fresh_process(code: str, *arguments: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(ckpt_cli.__file__).parent.parent)}
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from ckpt_cli.verifying.drift.plot import check_plot\n"
        "from ckpt_cli.errors import UsageError\n"
        "try: check_plot(sys.argv[1])\n"
        "except UsageError as error: print(error.message, '|', error.advice)"
    )
    told = in_a_fresh_process(code, tmp_path / "a.png")
    assert told == "drawing needs matplotlib, which is not installed | in a clone of the repository of ckpt: pip install '.[plot]'\n"


def test_pyplot_and_its_global_figures_stay_out(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from ckpt_cli.verifying.drift.plot import draw\n"
        "from ckpt_cli.results.drift import BaseComparison, Heatmap\n"
        "nothing = BaseComparison(base='b', common=0, missing=(), extra=(), reshaped=(), other_dtype=(), heatmap=Heatmap())\n"
        "draw(nothing, sys.argv[1], name='a')\n"
        "print('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    assert in_a_fresh_process(code, tmp_path / "a.png") == "True False\n"
