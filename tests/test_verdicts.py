"""What `verify` says first: how much is wrong, by what stands below, and whether the folder can be loaded at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import UsageError
from ckpt_cli.hub.layers.lengths import length_mismatch
from tests import tiny
from tests.cli import ckpt_fork as ckpt


def codes(path: Path) -> set[str]:
    return {item.code for item in ckpt_cli.verify(path).findings}


class TestAModelFolderWithoutConfig:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        tiny.verl(tmp_path / "run", tiny.weights(), tiny.unknown())
        for path in (tmp_path / "run").rglob("config.json"):
            path.rename(tmp_path / "config.json")
        return tmp_path / "run"

    def test_is_warned_of_and_merged_again_with_a_base(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out")
        shown = ckpt("verify", tmp_path / "out", "--against", run)
        assert shown.out.startswith("result    ok: 1 warning\n")
        assert "transformers cannot load it" in shown.out
        assert shown.err.splitlines()[-1].endswith(f" -o {tmp_path / 'out'} --type actor --base DIR --overwrite --verify")

    def test_whose_source_is_gone_needs_the_file(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out", max_shard_size=2000)
        shutil.rmtree(run)
        shown = ckpt("verify", tmp_path / "out")
        assert "warning[lacks-config]" in shown.out
        assert shown.err == "hint: copy the config.json of the model into it\n"

    def test_is_told_where_something_is_wrong_as_well(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out")
        (tmp_path / "out/model.safetensors").write_bytes(b"")
        assert "lacks-config" not in codes(tmp_path / "out")  # nothing is known of the weights

    def test_of_ranks_or_with_other_names_is_a_note_as_before(self, run: Path, tmp_path: Path) -> None:
        assert "no-config" in codes(run)
        ckpt_cli.merge(run, tmp_path / "out")
        (tmp_path / "out/model.safetensors").rename(tmp_path / "out/some.safetensors")
        assert "no-config" in codes(tmp_path / "out/some.safetensors")


class TestTheCounts:
    def test_are_those_of_the_headings(self, tmp_path: Path) -> None:
        held = tiny.weights() | {f"extra.{number}.weight": tiny.weights()["model.norm.weight"] for number in range(3)}
        folder = tiny.folder(tmp_path / "model", held)
        assert ckpt("verify", folder).out.startswith("result    ok: 1 warning in 3 places\n")
        torn = folder / "model.safetensors"
        torn.write_bytes(torn.read_bytes()[:-4])
        assert ckpt("verify", folder).out.startswith("result    failed: 1 error\n")


@pytest.mark.parametrize(("layers", "said"), [((1,), "layer 1 is missing"), ((0, 1), "layers 0, 1 are missing")])
def test_layers_that_are_missing_are_named_and_not_taken_for_a_count(layers: tuple[int, ...], said: str) -> None:
    held = {number: {f"{part}.weight" for part in range(8)} for number in range(3) if number not in layers}
    (found,) = length_mismatch("model.layers", held, 3, exact=False)
    assert found.text.endswith(f": {said}")


@pytest.mark.parametrize("function", ["merge", "verify", "diff", "open"])
def test_a_caller_in_python_is_sent_to_the_documentation_of_the_function(function: str) -> None:
    with pytest.raises(UsageError) as caught:
        getattr(ckpt_cli, function)("x\0")
    assert str(caught.value).endswith(f"hint: see help(ckpt_cli.{function})")
