"""A short run of the fuzzer; `python -m tests.fuzzing --seconds 600` is a long one. What mutants brought to light is kept in a corpus."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from ckpt_cli.errors import CkptError
from ckpt_cli.files.pickle_reader import load_pickle
from tests.fuzzing.__main__ import Outcome, fuzz
from tests.fuzzing.targets import parsers

CORPUS = Path(__file__).parent / "fuzzing" / "corpus.tar.xz"


def test_two_thousand_mutants_raise_nothing_but_errors_of_ours(data: Path, tmp_path: Path) -> None:
    outcome = fuzz(data, tmp_path, 20261129, mutants=2_000)
    assert outcome.faults == {}
    assert outcome.mutants == 2_000
    assert min(sum(outcome.read.values()), sum(outcome.refused.values())) > 200


def test_the_fuzzer_notices_other_errors_and_endless_work() -> None:
    outcome = Outcome()
    outcome.judge("a", b"", lambda: {}["x"])
    outcome.judge("a", b"", lambda: load_pickle(b""))
    outcome.judge("a", b"", lambda: load_pickle(b"N."))
    assert [fault.split()[0] for fault in outcome.faults] == ["KeyError"]
    assert (outcome.mutants, outcome.read["a"]) == (3, 1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """By target, a mutant for every place in ckpt where one was refused."""
    folder = tmp_path_factory.mktemp("corpus")
    with tarfile.open(CORPUS) as archive:
        archive.extractall(folder, filter="data")
    return {each.name: [path.read_bytes() for path in sorted(each.iterdir())] for each in folder.iterdir()}


def test_the_corpus_is_read_or_refused_by_every_parser(corpus: dict[str, list[bytes]], data: Path, tmp_path: Path) -> None:
    places: dict[str, int] = {}
    targets = list(parsers(data, tmp_path))
    assert {target.name for target in targets} >= corpus.keys()
    for target in targets:
        for kind, mutants in corpus.items():
            for mutant in mutants:
                try:
                    target.run(mutant)
                except CkptError:
                    places[kind] = places.get(kind, 0) + 1
    assert min(places.values()) > 5
