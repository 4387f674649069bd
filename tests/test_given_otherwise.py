"""What a command was given, and uses, is never said to be passed over, wherever it lies: beside another input, or in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests import tiny

UNUSED = ("was not used", "was not read", "were not read", "were not used")


@pytest.fixture(autouse=True)
def here(quiet_transformers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all folders are made, so that also relative paths are given."""
    monkeypatch.chdir(tmp_path)


def model(folder: str, seed: int) -> str:
    tiny.folder(Path(folder), tiny.weights(seed), tiny.config())
    return folder


def texts(result: Any) -> list[str]:
    """All that a result says."""
    parts = [result, *getattr(result, "outputs", ()), *filter(None, (getattr(result, "checkpoint", None),))]
    said = [note.text for part in parts for note in getattr(part, "notes", ())]
    return [*said, *(str(item.message) for item in getattr(result, "findings", ()))]


def unused(result: Any) -> list[str]:
    return [text for text in texts(result) if any(words in text for words in UNUSED)]


class TestInputsOfAnAverage:
    @pytest.mark.parametrize(
        "places",
        [
            ("run/checkpoint-10/model_0", "run/checkpoint-10/model_1"),
            ("run/checkpoint-10/diloco-0", "run/checkpoint-10/diloco-1"),
            ("run/checkpoint-10/a/model", "run/checkpoint-10/b/model"),
            ("model", "model/other"),
            ("run/checkpoint-10", "run/checkpoint-10/checkpoint-5"),
            ("run/checkpoint-10", "run/stage2/checkpoint-20"),
        ],
    )
    @pytest.mark.parametrize("absolute", [False, True])
    def test_are_used_wherever_they_lie(self, places: tuple[str, str], absolute: bool) -> None:
        paths = [Path(model(place, seed)) for seed, place in enumerate(places)]
        result = ckpt_cli.average([path.absolute() if absolute else path for path in paths], "out")
        assert unused(result) == []

    def test_may_be_files_of_one_folder(self) -> None:
        model("model", 1)
        torch.save(tiny.weights(2), "model/pytorch_model.bin")
        assert unused(ckpt_cli.average(["model", "model/pytorch_model.bin"], "out")) == []
        assert unused(ckpt_cli.merge("model", "alone"))

    def test_may_be_runs_in_one_another(self) -> None:
        for seed, place in enumerate(("run/checkpoint-10", "run/checkpoint-20", "run/stage2/checkpoint-30", "run/stage2/checkpoint-40")):
            model(place, seed)
        assert unused(ckpt_cli.average(["run", "run/stage2"], "out")) == []

    def test_of_others_it_is_still_said(self) -> None:
        for seed, place in enumerate(("run/checkpoint-10/model_0", "run/checkpoint-10/model_1", "run/checkpoint-10/model_2")):
            model(place, seed)
        told = unused(ckpt_cli.average(["run/checkpoint-10/model_0", "run/checkpoint-10/model_1"], "out"))
        assert told
        assert all("model_2/" in text and "model_1/" not in text for text in told)


class TestABase:
    @pytest.mark.parametrize("place", ["model/base", "run/checkpoint-10/model_1"])
    def test_that_lies_with_the_model_is_used(self, place: str) -> None:
        main = model("model" if place.startswith("model") else "run/checkpoint-10/model_0", 1)
        model(place, 2)
        assert unused(ckpt_cli.merge(main, "out", base=place)) == []
        assert unused(ckpt_cli.verify(main, base=place)) == []
        assert len(unused(ckpt_cli.merge(main, "alone"))) == 1

    def test_is_not_all_that_lies_there(self) -> None:
        model("model", 1)
        model("model/base", 2)
        model("model/other", 3)
        (text,) = unused(ckpt_cli.merge("model", "out", base="model/base"))
        assert "other/" in text


@pytest.mark.parametrize("places", [("model", "model/other"), ("run/checkpoint-10/model_0", "run/checkpoint-10/model_1")])
def test_both_sides_of_a_comparison_are_used(places: tuple[str, str]) -> None:
    first, second = (model(place, seed) for seed, place in enumerate(places))
    assert unused(ckpt_cli.diff(first, second)) == []
    assert unused(ckpt_cli.diff(second, first)) == []
    assert unused(ckpt_cli.verify(first, against=second)) == []
    assert unused(ckpt_cli.verify(second, against=first)) == []
