"""Every input of the catalogue, through every command that reads: refused with a reason, or read as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.hostile.cases_more  # noqa: F401 - adds to the cases
from tests.hostile.cases import CASES
from tests.hostile.running import Ran, check, run_all, snapshot
from tests.tensors import differences, load

Ranges = tuple[dict[str, dict[str, Ran]], dict[str, Path], dict[str, dict[str, tuple[object, ...]]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ranges:
    """All commands on all inputs, the folders, and what was in them before."""
    work = tmp_path_factory.mktemp("catalogue")
    places = {name: work / str(number) for number, name in enumerate(CASES)}
    for name, folder in places.items():
        (folder / "in").mkdir(parents=True)
        (folder / "writes").mkdir()
        CASES[name].build(folder / "in")
    before = {name: snapshot(folder / "in") for name, folder in places.items()}
    return run_all(places, work), places, before


@pytest.mark.parametrize("name", CASES)
def test_input(name: str, ran: Ranges) -> None:
    outcomes, places, before = ran
    folder, right = places[name], CASES[name].right
    check(name, outcomes[name], folder)
    assert snapshot(folder / "in") == before[name]
    merged = outcomes[name]["merge"]
    if right is None:
        assert merged.code in (3, 4), merged
    else:
        assert merged.code == 0, merged
        assert differences(load(folder / "writes" / "merged"), right) == []
