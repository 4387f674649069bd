"""Files of torch in which several state dicts could be the model: the one that is asked for by its key is it. Also files called ``.th``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, NoComponent, Undecidable, Unsupported
from tests.tensors import load

PAIRS = [("net", "best_net"), ("state", "best_state"), ("params", "params_best"), ("weights", "best_weights")]


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((2, 3), float(value)), "a.bias": torch.full((2,), float(value))}


def saved(folder: Path, content: Any, name: str = "checkpoint.pt") -> Path:
    folder.mkdir(parents=True)
    torch.save(content, folder / name)
    return folder


def value(out: Path) -> float:
    return float(load(out)["a.weight"][0, 0])


@pytest.mark.parametrize("keys", PAIRS)
def test_each_can_be_asked_for(tmp_path: Path, keys: tuple[str, str]) -> None:
    path = saved(tmp_path / "run", {key: state(number) for number, key in enumerate(keys)} | {"epoch": 3})
    for number, key in enumerate(keys):
        ckpt_cli.merge(path, tmp_path / f"out{number}", type=key)
        assert value(tmp_path / f"out{number}") == number
    assert ckpt_cli.verify(tmp_path / "out1", against=path, type=keys[1]).against[0].identical
    other = saved(tmp_path / "other", {keys[0]: state(4), keys[1]: state(6)})
    ckpt_cli.average([path, other], tmp_path / "mean", type=keys[1])
    assert value(tmp_path / "mean") == 3.5


def test_without_one_the_hint_names_them(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", {"net": state(1), "best_net": state(2)})
    with pytest.raises(Undecidable) as raised:
        ckpt_cli.merge(path, tmp_path / "out")
    assert raised.value.hint == "pass one of these to --type: net, best_net"
    with pytest.raises(NoComponent) as absent:
        ckpt_cli.merge(path, tmp_path / "out", type="nets")
    assert "best_net" in str(absent.value.expected)


def test_of_keys_that_no_option_can_name_none_is_offered(tmp_path: Path) -> None:
    with pytest.raises(Undecidable) as raised:
        ckpt_cli.merge(saved(tmp_path / "run", {"my net": state(1), 7: state(2)}), tmp_path / "out")
    assert raised.value.hint == "save the right one on its own"


def test_below_other_keys_and_for_all_steps_of_a_run(tmp_path: Path) -> None:
    for step in (10, 20):
        saved(tmp_path / f"run/checkpoint-{step}", {"model": {"net": state(step), "best_net": state(step + 1)}})
    ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="best_net")
    assert value(tmp_path / "out") == 21


def test_the_average_of_dora_lies_in_its_state(tmp_path: Path) -> None:
    content = {"model": state(1), "ema": {"state": {"model": state(2)}, "count": 100}, "best_state": {"model": state(3)}}
    path = saved(tmp_path / "run", content, "checkpoint.th")
    for number, kind in enumerate(("model", "ema", "best_state"), 1):
        ckpt_cli.merge(path, tmp_path / kind, type=kind)
        assert value(tmp_path / kind) == number


def test_an_optimizer_under_such_a_key_is_none(tmp_path: Path) -> None:
    """Its ``state`` is not that of an average."""
    inner = {"state": {"a.weight": {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]}
    with pytest.raises(CkptError):
        ckpt_cli.merge(saved(tmp_path / "run", {"model": state(1), "ema": inner}), tmp_path / "out", type="ema")


@pytest.mark.parametrize("name", ["checkpoint.th", "model.th", "weights.th"])
def test_th_is_another_name_for_files_of_torch(tmp_path: Path, name: str) -> None:
    """So dora, Demucs and AllenNLP call them."""
    path = saved(tmp_path / "run", state(5), name)
    for number, given in enumerate((path, path / name)):
        ckpt_cli.merge(given, tmp_path / f"out{number}")
        assert value(tmp_path / f"out{number}") == 5


def test_the_state_of_a_training_is_no_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", state(5), "weights.th")
    torch.save({"optimizer": {"state": {}, "param_groups": []}}, path / "training_state_epoch_1.th")
    done = ckpt_cli.merge(path, tmp_path / "out")
    assert not [note.text for note in done.checkpoint.notes if note.level == "warning"]


@pytest.mark.parametrize("beside", ["norm", "ema", "generator"])
def test_nothing_takes_the_place_of_a_model_of_arrays(tmp_path: Path, beside: str) -> None:
    """Arrays of numpy are not read; what lies beside them is another component."""
    arrays = {name: tensor.numpy() for name, tensor in state(1).items()}
    path = saved(tmp_path / "run", {"model": arrays, beside: state(2)})
    with pytest.raises(Unsupported, match="arrays of numpy"):
        ckpt_cli.merge(path, tmp_path / "out")
    ckpt_cli.merge(path, tmp_path / "out", type=beside)
    assert value(tmp_path / "out") == 2


def test_an_average_beside_results_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", {"ema": state(2), "curve": numpy.ones(3), "score": numpy.float64(0.5)})
    ckpt_cli.merge(path, tmp_path / "out")
    assert value(tmp_path / "out") == 2


def test_statistics_that_are_read_are_not_called_left_out(tmp_path: Path) -> None:
    held = {"mean": torch.ones(2, 3), "std": torch.ones(2, 3)}
    path = saved(tmp_path / "run", {"model": state(1), "norm": held})
    for kind, told in (("norm", False), ("model", True)):
        done = ckpt_cli.merge(path, tmp_path / kind, type=kind)
        notes = [note.text for note in (*done.checkpoint.notes, *done.outputs[0].notes) if note.code == "beside-weights"]
        assert any("norm" in text for text in notes) == told, notes
    alone = ckpt_cli.merge(saved(tmp_path / "alone", {"model": {}, "norm": held}), tmp_path / "out")
    assert not [note for note in alone.checkpoint.notes if note.code == "beside-weights"]


def test_a_module_called_like_state_is_told(tmp_path: Path) -> None:
    """What an optimizer, a generator or a scheduler keeps is none."""
    held = {"model": {"embed.weight": torch.ones(6, 4)}, "sched_net": {"up.weight": torch.ones(3, 3)}}
    state = {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(6, 4)}}, "param_groups": []},
        "optim": {"state.embed.weight.exp_avg": torch.ones(6, 4)},
        "rng": {"cpu.state": torch.ones(2, 8, dtype=torch.uint8)},
        "scheduler": {"betas": torch.ones(10)},
    }
    torch.save({**held, **state}, tmp_path / "model.pt")
    notes = ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out").checkpoint.notes
    assert [note.text for note in notes] == ["model.pt also holds sched_net (--type sched_net)"]


def test_of_two_usual_keys_of_the_model_the_other_is_told(tmp_path: Path) -> None:
    torch.save({"model": {"a.weight": torch.ones(6, 4)}, "state_dict": {"b.weight": torch.ones(3, 3)}}, tmp_path / "model.pt")
    (note,) = ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out").checkpoint.notes
    assert (note.level, note.code) == ("warning", "other-groups")
    assert note.text.startswith("model.pt also holds tensors of model (--type other_0)")


class TestAverages:
    """Averages beside several state dicts that could be the model (Self-Forcing, CausVid), and those that are not where others are."""

    def test_one_beside_several_models_is_found(self, tmp_path: Path) -> None:
        critic = {"layer.weight": torch.full((1, 2), 9.0), "layer.bias": torch.full((1,), 9.0)}
        path = saved(tmp_path / "run", {"critic": critic, "generator": state(1), "generator_ema": state(2), "step": 3})
        assert [each.name for each in ckpt_cli.detect(path).checkpoint.components] == ["model", "critic", "generator", "generator_ema"]
        with pytest.raises(Undecidable) as raised:
            ckpt_cli.merge(path, tmp_path / "out")
        assert raised.value.hint == "pass one of these to --type: critic, generator, generator_ema"
        for number, asked in enumerate(("ema", "generator_ema")):
            ckpt_cli.merge(path, tmp_path / f"out{number}", type=asked)
            assert value(tmp_path / f"out{number}") == 2
        report = ckpt_cli.merge(path, tmp_path / "model", type="generator")
        assert value(tmp_path / "model") == 1
        assert "generator_ema (--type ema)" in str(report)

    def test_of_several_each_goes_by_its_key(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "run", {"G": state(1), "D": state(2), "G_ema": state(3), "D_ema": state(4)})
        with pytest.raises(NoComponent):
            ckpt_cli.merge(path, tmp_path / "out", type="ema")
        ckpt_cli.merge(path, tmp_path / "out", type="D_ema")
        assert value(tmp_path / "out") == 4

    @pytest.mark.parametrize("kept", ["file", "callback", "both"])
    def test_one_with_names_under_the_key_of_a_list(self, tmp_path: Path, kept: str) -> None:
        held = {"cur_step": 5, "ema_weights": state(2)}
        content: dict[str, Any] = {"state_dict": state(1), "pytorch-lightning_version": "2.5", "callbacks": {}}
        content |= {"ema": held} if kept != "callback" else {}
        content |= {"callbacks": {"EMA": held}} if kept != "file" else {}
        path = saved(tmp_path / "run", content)
        assert len(ckpt_cli.detect(path).checkpoint.components) == 2
        ckpt_cli.merge(path, tmp_path / "out", type="ema")
        assert value(tmp_path / "out") == 2
