"""`ckpt diff`: any two readable things, judged by numpy; its page, its exit codes, its screens."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.cli.screens.diff import diff_result
from ckpt_cli.errors import CkptError, DifferentTensors, NotFound, OutputExists, UsageError
from ckpt_cli.reporting.drift import total
from ckpt_cli.results.drift import Coverage
from ckpt_cli.verifying.drift.page import MOST_ROWS, drift_page
from tests import tiny
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.drifts import comparison, drift, layers
from tests.golden_screens import WIDTHS, check_golden, screen

EXAMPLE = ROOT / "examples" / "tiny-run"


@pytest.mark.parametrize(("changes", "is_told"), [({"lora_alpha": 64}, True), ({"use_rslora": True}, True), ({"lora_dropout": 0.5}, False)])
def test_two_adapters_of_the_same_factors_with_another_scale(tmp_path: Path, changes: dict[str, object], is_told: bool) -> None:
    """The factors are identical, and what they add to the weights is not."""
    first = tiny.adapter(tmp_path / "first", tiny.factors(), "base")
    second = tiny.adapter(tmp_path / "second", tiny.factors(), "base", **changes)
    found = ckpt_cli.diff(first, second)
    assert found.identical is not is_told
    assert bool(found.rescaled) is is_told
    assert ckpt("diff", first, second, "--exit-code", "-q").code == is_told
    assert [note.level for note in found.notes if note.code == "different-scale"] == ["warning"] * is_told


class TestTwoThings:
    def test_two_steps_of_a_run(self) -> None:
        found = ckpt_cli.diff(EXAMPLE, steps=(100, 200))
        assert (found.before.step, found.after.step) == (100, 200)
        old, new = (ckpt_cli.open(EXAMPLE, step=step) for step in (100, 200))
        assert {each.name for each in found.comparison.drifts} == set(new)
        for each in found.comparison.drifts:
            a, b = (side[each.name].numpy().astype(float) for side in (new, old))
            assert each.relative_l2 == pytest.approx(numpy.linalg.norm(a - b) / numpy.linalg.norm(b), rel=1e-12)
            assert each.max_abs == pytest.approx(abs(a - b).max(), rel=1e-12)
            assert each.changed == (a != b).sum()

    def test_two_components(self) -> None:
        found = ckpt_cli.diff(EXAMPLE, type="model,ema")
        assert (found.before.component, found.after.component) == ("model", "ema")
        assert found.comparison.drifts
        assert not found.identical

    def test_shards_and_what_was_merged_from_them(self, tmp_path: Path) -> None:
        ckpt_cli.merge(EXAMPLE, tmp_path / "out")
        assert ckpt_cli.diff(EXAMPLE, tmp_path / "out").identical
        assert ckpt_cli.diff(tmp_path / "out" / "model.safetensors", EXAMPLE / "checkpoint-200").identical
        ckpt_cli.merge(EXAMPLE, tmp_path / "bf16", dtype="bf16")
        cast = ckpt_cli.diff(EXAMPLE, tmp_path / "bf16")
        assert not cast.identical
        assert len(cast.comparison.other_dtype) == 24

    def test_every_pair_of_shardings_differs_where_its_full_tensors_do(self, layouts: Path, tmp_path: Path) -> None:
        """Models that were cut by rows, by columns and on grids: what differs is known from before they were sharded."""
        known = {
            "mesh-line/line/ranks": "mesh-line/expected",
            "mesh-grid/tp/ranks": "mesh-grid/expected-tp",
            "mesh-grid/hsdp/ranks": "mesh-grid/expected-hsdp",
            "fake-ranks/line": "fake-ranks/expected",
        }
        full = {place: load_file(layouts / f"{file}.safetensors") for place, file in known.items()}
        some = 0
        for before, old in full.items():
            for after, new in full.items():
                other = layouts / after if after != before else shutil.copytree(layouts / after, tmp_path / after)
                found = ckpt_cli.diff(layouts / before, other, names="native").comparison
                common = {name for name in old.keys() & new.keys() if old[name].shape == new[name].shape}
                differing = {name for name in common if not torch.equal(old[name], new[name])}
                assert {each.name for each in found.drifts} == differing
                assert (set(found.missing), set(found.extra)) == (old.keys() - new.keys(), new.keys() - old.keys())
                assert set(found.reshaped) == (old.keys() & new.keys()) - common
                some += len(differing)
        assert some > 0

    def test_hub_names_on_one_side_and_those_of_training_on_the_other(self, tmp_path: Path) -> None:
        save_file({"module.a.weight": torch.ones(3), "module.b": torch.ones(2)}, tmp_path / "a.safetensors")
        save_file({"a.weight": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "b.safetensors")
        found = ckpt_cli.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        assert [each.name for each in found.comparison.drifts] == ["b"]

    def test_what_only_one_of_them_has(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(3), "b": torch.ones(2), "old": torch.ones(1)}, tmp_path / "a.safetensors")
        save_file({"a": torch.ones(3), "b": torch.ones(2, 1), "new": torch.ones(1)}, tmp_path / "b.safetensors")
        found = ckpt_cli.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        assert (found.comparison.missing, found.comparison.extra, found.comparison.reshaped) == (("old",), ("new",), ("b",))
        assert not found.identical
        assert ckpt_cli.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", include="a").identical

    def test_two_that_have_nothing_in_common(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
        save_file({"b": torch.ones(3)}, tmp_path / "b.safetensors")
        with pytest.raises(DifferentTensors, match="no tensor name in common"):
            ckpt_cli.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")

    def test_two_without_a_tensor_of_one_shape_are_not_called_equal(self, tmp_path: Path) -> None:
        for name, rows in (("a", 4), ("b", 5)):
            save_file({f"layers.{i}.weight": torch.ones(rows, 4) for i in range(3)}, tmp_path / f"{name}.safetensors")
        shown = ckpt("diff", "a.safetensors", "b.safetensors", "--exit-code", "--html", "page.html", cwd=tmp_path)
        assert shown.code == 1
        assert "result       nothing could be compared: no tensor has the same name and shape in both\n" in shown.out
        assert "equal" not in shown.out
        assert "nothing could be compared" in (tmp_path / "page.html").read_text()
        data = json.loads(ckpt("diff", "a.safetensors", "b.safetensors", "--json", cwd=tmp_path).out)["data"]
        assert (data["identical"], data["compared"]) == (False, 0)
        sampled = ckpt("diff", "a.safetensors", "b.safetensors", "--sample", "50%", cwd=tmp_path)
        assert "in both\n" in sampled.out

    def test_two_models_are_told_apart(self, tmp_path: Path) -> None:
        same = {"norm.weight": torch.ones(3)}
        save_file({**same, **{f"a.{i}.weight": torch.ones(4, 4) for i in range(9)}}, tmp_path / "a.safetensors")
        save_file({**same, **{f"b.{i}.weight": torch.ones(5, 4) for i in range(9)}}, tmp_path / "b.safetensors")
        notes = ckpt_cli.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").notes
        (note,) = [note for note in notes if note.code == "other-model"]
        assert (note.level, note.code) == ("warning", "other-model")
        assert "1 of 10 and 10 tensors have the same name" in note.text

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"steps": 200},
            {"type": "ema"},
            {"steps": (1, 2, 3)},
            {"steps": "a,b"},
            {"steps": (200, 200)},
            {"type": 5},
            {"sample": 2.0},
            {"jobs": 0},
        ],
        ids=str,
    )
    def test_what_is_no_pair(self, options: dict[str, object]) -> None:
        with pytest.raises(UsageError):
            ckpt_cli.diff(EXAMPLE, **options)  # type: ignore[arg-type]

    def test_a_step_that_is_not_there(self) -> None:
        with pytest.raises(NotFound):
            ckpt_cli.diff(EXAMPLE, steps=(100, 150))

    @pytest.mark.parametrize(("asked", "steps"), [((10, 30), "10,20"), ((30, 20), "10,20"), ((10, 40), "10,20"), ((30, 40), "10,20")])
    def test_a_hint_names_steps_that_can_be_compared(self, layouts: Path, asked: tuple[int, int], steps: str) -> None:
        run = layouts / "verl-run" / "run"
        with pytest.raises(CkptError) as caught:
            ckpt_cli.diff(run, steps=asked)
        assert caught.value.hint == f"pass --steps {steps}, which are whole"
        assert ("step 40" if 40 in asked and asked[0] != 30 else "step 30: rank 2 of 4 is missing") in caught.value.message
        assert ckpt_cli.diff(run, steps=steps).compared

    def test_no_hint_names_a_step_where_only_one_is_whole(self, layouts: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(layouts / "verl-run" / "run", tmp_path / "run"))
        shutil.rmtree(run / "global_step_10")
        with pytest.raises(CkptError) as caught:
            ckpt_cli.diff(run, steps=(20, 30))
        assert "--step" not in (caught.value.hint or "")

    def test_two_components_are_those_of_one_step(self, layouts: Path, tmp_path: Path) -> None:
        """The newest step has the actor alone."""
        run = Path(shutil.copytree(layouts / "verl-run" / "run", tmp_path / "run"))
        found = ckpt_cli.diff(run, type="actor,critic")
        assert [(side.component, side.step) for side in (found.before, found.after)] == [("actor", 10), ("critic", 10)]
        passed = [note.text for note in found.notes if note.code == "step-skipped"]
        assert passed == [
            "global_step_30 is skipped: rank 2 of 4 is missing",
            "global_step_30, global_step_20 are skipped: no component critic",
        ]
        shutil.rmtree(run / "global_step_10" / "actor")
        with pytest.raises(UsageError, match="no step has both actor and critic whole") as caught:
            ckpt_cli.diff(run, type="actor,critic")
        assert caught.value.hint == "pass --steps 20,10 to compare these two"
        assert ckpt_cli.diff(run, type="actor,critic", steps="20,10").before.step == 20

    def test_integers_differ_without_a_distance(self, tmp_path: Path) -> None:
        """Counters are huge beside weights, and no weights: they are named, and enter no number."""
        weights = {f"layers.{i}.mlp.weight": torch.ones(2, 2) for i in range(2)}
        counts = {f"layers.{i}.token_counts": torch.tensor([10**6 * i, 1]) for i in range(2)} | {"seen": torch.tensor([True])}
        save_file(weights | counts, tmp_path / "a.safetensors")
        moved = {name: value * 1.5 if value.is_floating_point() else value + 7 for name, value in (weights | counts).items()}
        save_file(moved | {"seen": torch.tensor([False])}, tmp_path / "b.safetensors")
        found = ckpt_cli.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").comparison
        assert {each.name for each in found.drifts if each.kind == "integer" and each.relative_l2 is None} == counts.keys()
        assert total(found.groups) == 0.5
        assert found.heatmap is not None
        assert [row.module for block in found.heatmap.blocks for row in block.rows] == ["mlp"]
        assert found.heatmap.outside == ()
        shown = ckpt("diff", "a.safetensors", "b.safetensors", cwd=tmp_path).out
        assert "5 of 5 tensors differ" in shown
        assert "integers  3 of 3 tensors differ, without a distance: " in shown
        assert sum("token_counts" in line for line in shown.splitlines()) == 1

    def test_how_much_of_each_side_was_compared_is_said(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(3), "b": torch.ones(4, 2), "c": torch.ones(8, 2)}, tmp_path / "a.safetensors")
        save_file({"a": torch.zeros(3), "b": torch.ones(2, 2), "c": torch.ones(2), "d": torch.ones(1)}, tmp_path / "b.safetensors")
        found = ckpt_cli.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", html=tmp_path / "page.html")
        assert found.comparison.coverage == Coverage(elements=3, mine=10, base=27)
        said = "only 3 of 27 elements in A and of 10 in B: 2 tensors have other shapes, 1 tensor is on one side only"
        assert said in ckpt("diff", "a.safetensors", "b.safetensors", cwd=tmp_path).out
        assert said in (tmp_path / "page.html").read_text()
        whole = ckpt_cli.diff(EXAMPLE, steps=(100, 200)).comparison.coverage
        assert whole is not None
        assert not whole.partial

    def test_every_unchanged_tensor_is_named_or_counted(self, tmp_path: Path) -> None:
        same = {f"{name}.weight": torch.ones(2) for name in "abcdef"} | {f"vision.{i}.w": torch.ones(1) for i in range(3)}
        for name, value in (("a", 1.0), ("b", 2.0)):
            save_file({**same, "moved": torch.full((1,), value)}, tmp_path / f"{name}.safetensors")
        shown = ckpt("diff", "a.safetensors", "b.safetensors", cwd=tmp_path).out
        assert "unchanged  9 tensors: vision.* (3), a.weight, b.weight, c.weight and 3 more\n" in shown

    def test_a_sample_reads_less_and_claims_less(self, tmp_path: Path) -> None:
        values = torch.randn(1 << 20)
        save_file({"a": values}, tmp_path / "a.safetensors")
        save_file({"a": values * 1.01}, tmp_path / "b.safetensors")
        found = ckpt_cli.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", sample="25%")
        (only,) = found.comparison.drifts
        assert only.compared == 1 << 18
        assert only.relative_l2 == pytest.approx(0.01, rel=1e-3)


class Page(HTMLParser):
    """The tags and the attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


class TestPage:
    def test_holds_everything_and_loads_nothing(self, tmp_path: Path) -> None:
        found = ckpt_cli.diff(EXAMPLE, steps=(100, 200), html=tmp_path / "drift.html")
        text = (tmp_path / "drift.html").read_text()
        page = Page(text)
        assert found.written == (str(tmp_path / "drift.html"),)
        assert not any({"src", "href", "srcset", "action", "data", "poster"} & attributes.keys() for _, attributes in page.tags)
        assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in page.tags}
        assert "url(" not in text
        assert "@import" not in text
        (policy,) = [attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv") == "Content-Security-Policy"]
        assert policy is not None
        assert policy.startswith("default-src 'none'")
        listed = [attributes["data-value"] for _, attributes in page.tags if "data-value" in attributes][::7]
        assert set(listed) == {each.name for each in found.comparison.drifts}
        assert text == drift_page(found.comparison, str(EXAMPLE / "checkpoint-200"))

    def test_cells_say_where_they_are_and_what_they_mean(self) -> None:
        page = Page(drift_page(comparison([*layers(3), drift("model.norm.weight", 0.0), drift("odd.weight", math.nan)]), "new"))
        tips = [str(attributes["title"]) for tag, attributes in page.tags if tag == "td" and "title" in attributes]
        assert sum(tip.startswith("self_attn.q_proj, layer ") for tip in tips) == 3
        assert "model.norm: unchanged" in tips
        assert any(tip.startswith("odd: NaN") for tip in tips)

    @pytest.mark.parametrize(
        "name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a'b&c", "\x1b[31m\u202e", "{title}{0}"]
    )
    def test_names_are_text(self, name: str, tmp_path: Path) -> None:
        for file, value in (("a", 1.0), ("b", 2.0)):
            more = {f"layers.{i}.{name}.weight": torch.full((2,), value) for i in range(2)}
            save_file({**more, name: torch.full((2,), value), f"{file}{name}": torch.ones(1)}, tmp_path / f"{file}.safetensors")
        ckpt_cli.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", html=tmp_path / "drift.html")
        text = (tmp_path / "drift.html").read_text()
        page = Page(text)
        assert [tag for tag, _ in page.tags].count("script") == 1
        assert not {"img"} & {tag for tag, _ in page.tags}
        assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
        assert not re.search("[\x00-\x08\x0e-\x1f\u202e]", text)

    def test_of_more_tensors_than_a_browser_sorts_holds_those_with_the_biggest_drift(self) -> None:
        found = comparison([drift(f"experts.{i}.weight", 1e-3 * (i + 1)) for i in range(MOST_ROWS + 7)])
        text = drift_page(found, "new")
        assert text.count("<tr title=") == MOST_ROWS
        assert "... and 7 more with less drift" in text
        assert f"experts.{MOST_ROWS + 6}.weight" in text

    def test_a_file_that_is_there_is_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "drift.html").write_text("mine")
        with pytest.raises(OutputExists):
            ckpt_cli.diff(EXAMPLE, steps=(100, 200), html=tmp_path / "drift.html")
        assert (tmp_path / "drift.html").read_text() == "mine"
        with pytest.raises(UsageError, match="writes a page"):
            ckpt_cli.diff(EXAMPLE, steps=(100, 200), html=tmp_path / "drift.png")

    def test_a_picture_beside_it(self, tmp_path: Path) -> None:
        found = ckpt_cli.diff(EXAMPLE, steps=(100, 200), html=tmp_path / "a.html", plot=tmp_path / "a.svg")
        assert [Path(path).name for path in found.written] == ["a.svg", "a.html"]
        assert (tmp_path / "a.svg").read_text().startswith("<?xml")


class TestCommand:
    def test_drift_is_information_unless_an_exit_code_is_asked_for(self, tmp_path: Path) -> None:
        plain = ckpt("diff", EXAMPLE, "--steps", "100,200")
        assert plain.code == 0
        assert "24 of 24 tensors differ" in plain.out
        asked = ckpt("diff", EXAMPLE, "--steps", "100,200", "--exit-code", "-q")
        assert (asked.code, asked.out) == (1, "different\n")
        same = ckpt("diff", EXAMPLE, shutil.copytree(EXAMPLE, tmp_path / "copy"), "--exit-code", "-q")
        assert (same.code, same.out) == (0, "identical\n")

    def test_compare_is_the_same_command(self) -> None:
        done = [ckpt(name, EXAMPLE, "--steps", "100,200") for name in ("compare", "diff")]
        assert done[0].out == done[1].out != ""
        assert "compare" not in ckpt("--help").out.split("Examples")[0].replace("Compare", "").split("Commands:")[1]

    def test_json(self, tmp_path: Path) -> None:
        done = ckpt("diff", EXAMPLE, "--type", "model,ema", "--json", cwd=tmp_path)
        document = json.loads(done.out)
        assert (done.code, document["command"], document["status"]) == (0, "diff", "success")
        assert document["data"]["identical"] is False
        assert len(document["data"]["comparison"]["drifts"]) == 24

    def test_the_next_command_works(self, tmp_path: Path) -> None:
        done = ckpt("diff", EXAMPLE, "--steps", "100,200", cwd=tmp_path)
        (line,) = [line for line in done.err.splitlines() if line.startswith("next: ckpt ")]
        again = ckpt(*line.removeprefix("next: ckpt ").split(), cwd=tmp_path)
        assert again.code == 0, again.err
        assert (tmp_path / "drift.html").exists()

    @pytest.mark.parametrize(("arguments", "code"), [((EXAMPLE,), 2), ((EXAMPLE, "nothing"), 3), ((), 2)], ids=str)
    def test_errors_end_as_elsewhere(self, arguments: tuple[Path | str, ...], code: int) -> None:
        assert ckpt("diff", *arguments).code == code


@pytest.mark.parametrize("width", WIDTHS, ids=str)
class TestScreens:
    def test_steps(self, layouts: Path, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        monkeypatch.chdir(layouts / "lmms-run")
        result = ckpt_cli.diff("run", steps=(100, 200))
        check_golden("diff", width, screen(monkeypatch, width, lambda s: diff_result(result, s)))

    def test_identical(self, layouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
        for name in ("run", "copy"):
            shutil.copytree(layouts / "lmms-run" / "run", tmp_path / name)
        monkeypatch.chdir(tmp_path)
        result = ckpt_cli.diff("run", "copy/checkpoint-200")
        check_golden("diff-identical", width, screen(monkeypatch, width, lambda s: diff_result(result, s)))
