"""Schedule-free optimizers that were saved in train mode: the weights beside them are not those that are meant to be used."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckpt_cli
from tests.tensors import load

State = dict[str, Any]


def trained(mode: bool | None = True, *, steps: int = 1, beta: float = 0.9) -> tuple[State, State]:
    """A model and the state of an optimizer that has the options and slots of schedulefree."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(beta, 0.999))
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    for group in optimizer.param_groups:
        group.update({} if mode is None else {"train_mode": mode, "k": steps})
    for state in optimizer.state.values():
        state["z"] = torch.ones_like(state.pop("exp_avg"))
    return model.state_dict(), optimizer.state_dict()


def by_name(model: State, state: State) -> State:
    names = list(model)
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: slots for number, slots in state["state"].items()}, "param_groups": groups}


def flattened(model: State, state: State) -> State:
    named = by_name(model, state)
    flat = {f"state.{name}.{slot}": value for name, slots in named["state"].items() for slot, value in slots.items()}
    for group in named["param_groups"]:
        flat |= {f"param_groups.{name}.{option}": group[option] for name in group["params"] for option in group if option != "params"}
    return flat


def trainer(folder: Path, model: State, state: State, name: str = "optimizer.pt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model, folder / "model.safetensors")
    torch.save(state, folder / name)
    return folder


def accelerate(folder: Path, model: State, state: State) -> Path:
    return trainer(folder, model, state, "optimizer.bin")


def one_file(content: Callable[[State, State], State], name: str) -> Callable[[Path, State, State], Path]:
    def save(folder: Path, model: State, state: State) -> Path:
        folder.mkdir()
        torch.save(content(model, state), folder / name)
        return folder / name

    return save


def dcp(content: Callable[[State, State], State]) -> Callable[[Path, State, State], Path]:
    def save(folder: Path, model: State, state: State) -> Path:
        save_dcp(content(model, state), checkpoint_id=folder, no_dist=True)
        return folder

    return save


def accelerate_fsdp(folder: Path, model: State, state: State) -> Path:
    save_dcp({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    save_dcp({"optimizer": by_name(model, state)}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return folder


FORMS = {
    "Trainer": trainer,
    "accelerate": accelerate,
    "accelerate, FSDP": accelerate_fsdp,
    "Lightning": one_file(lambda model, state: {"state_dict": model, "optimizer_states": [state]}, "last.ckpt"),
    "a file with both": one_file(lambda model, state: {"model": model, "optimizer": state}, "step-3.pt"),
    "several optimizers": one_file(lambda model, state: {"model": model, "optimizers": {"a": trained(None)[1], "b": state}}, "step-3.pt"),
    "DCP, by number": dcp(lambda model, state: {"model": model, "optimizer": state}),
    "DCP, by name": dcp(lambda model, state: {"model": model, "optim": by_name(model, state)}),
    "DCP, flattened": dcp(lambda model, state: {"model": model, "optim": flattened(model, state)}),
}


def said(result: Any) -> list[str]:
    notes = (*getattr(result, "notes", ()), *(result.checkpoint.notes if hasattr(result, "checkpoint") else ()))
    return [note.text for note in notes if note.code == "train-mode" and note.level == "warning"]


@pytest.mark.parametrize("save", FORMS.values(), ids=FORMS)
class TestForms:
    def test_train_mode_is_a_warning(self, save: Callable[..., Path], tmp_path: Path) -> None:
        path = save(tmp_path / "step", *trained(beta=0.95))
        (text,) = said(ckpt_cli.detect(path))
        assert "saved in train mode" in text
        assert "y.lerp(z, 1 - 1/0.95)" in text
        assert said(ckpt_cli.merge(path, tmp_path / "out")) == [text]

    @pytest.mark.parametrize("how", [{"mode": False}, {"mode": None}, {"steps": 0}], ids=str)
    def test_others_are_not(self, save: Callable[..., Path], how: dict[str, Any], tmp_path: Path) -> None:
        """Eval mode, other optimizers, and one that has made no step: then y is x."""
        assert not said(ckpt_cli.detect(save(tmp_path / "step", *trained(**how))))


def test_sgd_has_a_momentum_instead_of_betas(tmp_path: Path) -> None:
    model, state = trained()
    for group in state["param_groups"]:
        del group["betas"]
        group["momentum"] = 0.8
    (text,) = said(ckpt_cli.detect(trainer(tmp_path / "step", model, state)))
    assert "1 - 1/0.8)" in text


def test_groups_of_several_betas_give_no_number(tmp_path: Path) -> None:
    model, state = trained()
    state["param_groups"].append({**state["param_groups"][0], "params": [], "betas": (0.8, 0.9)})
    (text,) = said(ckpt_cli.detect(trainer(tmp_path / "step", model, state)))
    assert "1 - 1/beta1)" in text


def test_an_average_is_none_of_its_weights(tmp_path: Path) -> None:
    model, state = trained()
    torch.save({"model": model, "ema": model, "optimizer": state}, tmp_path / "both.pt")
    ema = ckpt_cli.merge(tmp_path / "both.pt", tmp_path / "out", type="ema")
    assert not said(ema)
    assert said(ckpt_cli.merge(tmp_path / "both.pt", tmp_path / "model"))


def test_an_optimizer_that_cannot_be_read_is_no_reason_to_refuse_the_weights(tmp_path: Path) -> None:
    folder = trainer(tmp_path / "step", *trained())
    (folder / "optimizer.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    assert ckpt_cli.merge(folder, tmp_path / "out").exit_code == 0


def test_averages_and_verification_say_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        trainer(run / f"checkpoint-{step}", *trained(steps=step))
    result = ckpt_cli.average(run, tmp_path / "out", everything=True)
    texts = said(result)
    assert len(texts) == 2
    assert any(text.startswith("checkpoint-1, checkpoint-2: ") for text in texts)
    ckpt_cli.merge(run, tmp_path / "one")
    assert said(ckpt_cli.verify(tmp_path / "one", against=run))


@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_the_way_that_is_named_gives_the_weights_of_eval_mode(kind: str, tmp_path: Path) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = getattr(schedulefree, kind)(model.parameters(), lr=0.1)
    optimizer.train()
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    (text,) = said(ckpt_cli.merge(tmp_path / "last.pt", tmp_path / "out"))
    factor = re.search(r"y\.lerp\(z, 1 - 1/([0-9.]+)\)", text)
    assert factor is not None
    points = torch.load(tmp_path / "last.pt")["optimizer"]["state"]
    held = load(tmp_path / "out")
    computed = {name: held[name].lerp(points[number]["z"], 1 - 1 / float(factor[1])) for number, name in enumerate(model.state_dict())}
    optimizer.eval()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(computed[name], tensor, atol=1e-6)
        assert not torch.allclose(held[name], tensor, atol=1e-6)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "eval.pt")
    assert not said(ckpt_cli.detect(tmp_path / "eval.pt"))
