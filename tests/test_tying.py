"""Tied heads of an EMA: left out only where the files prove that they are no average."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.ties import Tie, find_ties
from ckpt_cli.results.written import MergeResult
from tests.tensors import differences, load

OF_HUB = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "tie_word_embeddings": True}
Tensors = dict[str, torch.Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tensors(embedding: torch.Tensor, head: torch.Tensor) -> Tensors:
    return {EMBEDDING: embedding, HEAD: head, "model.norm.weight": embedding[0].clone()}


def values(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def saved(folder: Path, content: dict[str, Tensors]) -> Path:
    folder.mkdir()
    torch.save(content, folder / "model.pt")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "architectures": ["Unheard"]}))
    return folder


def merged(folder: Path, output: Path) -> tuple[MergeResult, Tensors]:
    return ckpt_cli.merge(folder, output, type="ema"), load(output)


def codes(result: MergeResult) -> set[str]:
    return {note.code for note in result.outputs[0].notes}


class TestHeadOfAnEma:
    def test_that_was_averaged_is_written_with_a_warning(self, tmp_path: Path) -> None:
        model = tensors(values(1), values(2))
        ema = {name: tensor * 0.9 for name, tensor in model.items()}
        folder = saved(tmp_path / "run", {"model": model, "ema": ema})
        result, out = merged(folder, tmp_path / "out")
        assert differences(out, ema) == []
        assert "tied-heads-differ" in codes(result)
        assert ckpt_cli.verify(tmp_path / "out", against=folder, type="ema").exit_code == 0

    @pytest.mark.parametrize("live", ["head", "embedding"])
    @pytest.mark.parametrize("prefix", ["", "module."])
    def test_that_is_the_models_own_is_left_out(self, tmp_path: Path, live: str, prefix: str) -> None:
        head = values(2) if live == "head" else values(1)
        model = {f"{prefix}{name}": tensor for name, tensor in tensors(values(1), head).items()}
        result, out = merged(saved(tmp_path / "run", {"model": model, "ema": tensors(values(3), head.clone())}), tmp_path / "out")
        assert HEAD not in out
        assert "the model's own, so it is not an average" in result.outputs[0].dropped[HEAD]
        assert "tied-heads-differ" not in codes(result)

    def test_that_shares_memory_with_its_own_embedding_is_compared_by_values(self, tmp_path: Path) -> None:
        """The names of aliases belong to the model: there the two are one tensor, here they are not."""
        one = values(1)
        folder = saved(tmp_path / "run", {"model": tensors(one, one), "ema": tensors(values(3), values(4))})
        result, out = merged(folder, tmp_path / "out")
        assert HEAD in out
        assert "tied-heads-differ" in codes(result)

    @pytest.mark.parametrize(("live", "own"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
    def test_in_another_dtype_is_compared_as_that(self, tmp_path: Path, live: torch.dtype, own: torch.dtype) -> None:
        head = values(2, live)
        model = tensors(values(1, live), head)
        _, out = merged(saved(tmp_path / "run", {"model": model, "ema": tensors(values(3, own), head.to(own))}), tmp_path / "out")
        assert HEAD not in out
        averaged = tensors(values(3, own), (head * 0.9).to(own))
        _, out = merged(saved(tmp_path / "other", {"model": model, "ema": averaged}), tmp_path / "out of the other")
        assert HEAD in out

    @pytest.mark.parametrize("content", [{}, {"model": {"w": torch.ones(2)}}])
    def test_without_a_model_to_compare_with_nothing_is_claimed(self, tmp_path: Path, content: dict[str, Tensors]) -> None:
        result, out = merged(saved(tmp_path / "run", {**content, "ema": tensors(values(3), values(4))}), tmp_path / "out")
        assert HEAD not in out
        reason = result.outputs[0].dropped[HEAD]
        assert "not compared" in reason
        assert "is not an average" not in reason

    def test_is_averaged_where_it_is_an_average(self, tmp_path: Path) -> None:
        folders = []
        for seed in (1, 5):
            model = tensors(values(seed), values(seed + 1))
            content = {"model": model, "ema": {name: tensor * 0.5 for name, tensor in model.items()}}
            folders.append(saved(tmp_path / f"run{seed}", content))
        ckpt_cli.average(folders, tmp_path / "mean", type="ema")
        assert torch.allclose(load(tmp_path / "mean")[HEAD], (values(2) + values(6)) / 4)


class TestWhatIsSaidOfAHeadOfItsOwn:
    """is judged by what is written, not by what one checkpoint had."""

    def runs(self, root: Path) -> list[Path]:
        """One with a head of its own, and one that ties it."""
        untied, tied = tensors(values(1), values(2)), tensors(values(3), values(4))
        del tied[HEAD]
        return [saved(root / "untied", {"model": untied}), saved(root / "tied", {"model": tied})]

    @pytest.mark.parametrize("order", [1, -1])
    def test_that_intersect_leaves_out(self, tmp_path: Path, order: int) -> None:
        result = ckpt_cli.average(self.runs(tmp_path)[::order], tmp_path / "out", intersect=True).outputs[0]
        assert HEAD not in load(tmp_path / "out")
        said = [note.text for note in result.notes if note.code == "tied-heads-differ"]
        assert said == [
            f"config.json ties {HEAD} to {EMBEDDING}, but their values differ, and only {EMBEDDING} is written: a loader uses it for both"
        ]

    @pytest.mark.parametrize(("left_out", "outcome"), [(HEAD, "a loader uses it for both"), (EMBEDDING, "looks for the other one")])
    def test_that_a_filter_leaves_out(self, tmp_path: Path, left_out: str, outcome: str) -> None:
        result = ckpt_cli.merge(self.runs(tmp_path)[0], tmp_path / "out", exclude=left_out).outputs[0]
        said = [note.text for note in result.notes if note.code == "tied-heads-differ"]
        assert [text.endswith(outcome) and "both are written" not in text for text in said] == [True]

    def test_of_which_neither_is_written_is_nothing(self, tmp_path: Path) -> None:
        result = ckpt_cli.merge(self.runs(tmp_path)[0], tmp_path / "out", exclude=(HEAD, EMBEDDING)).outputs[0]
        assert "tied-heads-differ" not in {note.code for note in result.notes}

    def test_that_is_written(self, tmp_path: Path) -> None:
        run = self.runs(tmp_path)[0]
        for result in (ckpt_cli.merge(run, tmp_path / "a"), ckpt_cli.average([run, run], tmp_path / "b")):
            (said,) = [note.text for note in result.outputs[0].notes if note.code == "tied-heads-differ"]
            assert said.endswith("both are written, of which transformers 5 keeps both and other loaders ignore one")

    def test_that_is_tied_goes_the_way_of_its_embedding(self, tmp_path: Path) -> None:
        small, large = values(1), torch.cat([values(1), values(2)])
        runs = [saved(tmp_path / str(i), {"model": {**tensors(e, e.clone()), "a": values(5)}}) for i, e in enumerate((small, large))]
        dropped = ckpt_cli.average(runs, tmp_path / "out", intersect=True).outputs[0].dropped
        assert dropped[HEAD] == dropped[EMBEDDING]
        assert dropped[HEAD].startswith("left out by --intersect: shape")


class TestNamesOfTheHub:
    """A folder of the hub may call the tied tensors otherwise than the model in memory does."""

    def found(self, tmp_path: Path, head: torch.Tensor) -> tuple[list[Tie], list[tuple[str, str]]]:
        save_file({EMBEDDING: values(1), HEAD: head}, tmp_path / "model.safetensors")
        match = recognise(tmp_path / "model.safetensors")[0]
        held = format_of(match).describe(match, Files(), ReadOptions()).tensors
        rules = rules_for(OF_HUB)
        assert rules is not None
        return find_ties("model", held, OF_HUB, rules)

    def test_equal_tensors_are_one(self, tmp_path: Path) -> None:
        ties, differing = self.found(tmp_path, values(1))
        assert [(tie.name, tie.partner) for tie in ties] == [(HEAD, EMBEDDING)]
        assert EMBEDDING in ties[0].reason
        assert not differing

    def test_others_differ(self, tmp_path: Path) -> None:
        assert self.found(tmp_path, values(2)) == ([], [(HEAD, EMBEDDING)])
