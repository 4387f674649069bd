"""The state of torch's ``AveragedModel`` in every format: its counter is no weight, and says whether the average has begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckpt_cli
from ckpt_cli.errors import MissingTensors, Unsupported
from tests.tensors import Tensors, differences, load
from tests.tiny import classless, folder

Save = Callable[[Path, Tensors], dict[str, Any]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def averaged(updates: int) -> Tensors:
    average = AveragedModel(model())
    for _ in range(updates):
        average.update_parameters(model())
    return dict(average.state_dict())


def in_dcp(place: Path, state: Tensors) -> dict[str, Any]:
    dcp.save({"model": model().state_dict(), "ema_model": state}, checkpoint_id=place, no_dist=True)
    return {"path": place, "type": "ema"}


def alone_in_dcp(place: Path, state: Tensors) -> dict[str, Any]:
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return {"path": place}


def in_safetensors(place: Path, state: Tensors) -> dict[str, Any]:
    save_file(state, place / "model.safetensors")
    return {"path": place}


def in_a_file(place: Path, state: Tensors) -> dict[str, Any]:
    torch.save(state, place / "pytorch_model.bin")
    return {"path": place}


def beside_the_model(place: Path, state: Tensors) -> dict[str, Any]:
    torch.save({"model": model().state_dict(), "swa_model": state, "epoch": 3}, place / "checkpoint.pt")
    return {"path": place, "type": "swa_model"}


def codes(done: Any) -> dict[str, str]:
    return {note.code: note.text for note in done.checkpoint.notes}


@pytest.mark.parametrize("save", [in_dcp, alone_in_dcp, in_safetensors, in_a_file, beside_the_model])
class TestAnAveragedModel:
    def test_is_the_model_in_it(self, tmp_path: Path, save: Save) -> None:
        given = save(folder(tmp_path / "step-5", None, classless()), averaged(2))
        done = ckpt_cli.merge(**given, output=tmp_path / "out")
        assert differences(load(tmp_path / "out"), dict(model().state_dict())) == []
        assert "average-not-begun" not in codes(done)
        assert ckpt_cli.verify(tmp_path / "out", against=given["path"], type=given.get("type")).exit_code == 0

    def test_that_has_not_begun_is_a_warning(self, tmp_path: Path, save: Save) -> None:
        done = ckpt_cli.merge(**save(folder(tmp_path / "step-5", None, classless()), averaged(0)), output=tmp_path / "out")
        assert codes(done)["average-not-begun"].startswith("n_averaged is 0: the average has not begun")


class TestOtherCounters:
    @pytest.mark.parametrize("begun", [True, False])
    def test_ema_pytorch_says_whether_it_has_begun(self, tmp_path: Path, begun: bool) -> None:
        own = model().state_dict()
        pair = {f"{which}_model.{name}": tensor for which in ("online", "ema") for name, tensor in own.items()}
        ema = {"initted": torch.tensor(begun), "step": torch.tensor(5), **pair}
        torch.save({"model": own, "ema": ema}, folder(tmp_path / "run", None, classless()) / "checkpoint.pt")
        done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="ema")
        assert ("average-not-begun" in codes(done)) is not begun

    @pytest.mark.parametrize("updates", [0, 3])
    def test_of_lightning_lies_beside(self, tmp_path: Path, updates: int) -> None:
        own = {f"model.{name}": tensor for name, tensor in model().state_dict().items()}
        counter = {"n_averaged": torch.tensor(updates)}
        saved = {"state_dict": own, "current_model_state": own, "averaging_state": counter, "pytorch-lightning_version": "2.6.0"}
        torch.save(saved, folder(tmp_path / "run", None, classless()) / "last.ckpt")
        assert ("average-not-begun" in codes(ckpt_cli.merge(tmp_path / "run", tmp_path / "out"))) is (updates == 0)
        assert "average-not-begun" not in codes(ckpt_cli.merge(tmp_path / "run", tmp_path / "now", type="current"))

    @pytest.mark.parametrize("counter", [0, 3, torch.tensor(0), torch.tensor(3)])
    def test_of_a_callback_lies_beside(self, tmp_path: Path, counter: Any) -> None:
        """Lightning's StochasticWeightAveraging writes a plain number."""
        callbacks = {"StochasticWeightAveraging": {"n_averaged": counter, "latest_update_epoch": -1, "average_model_state": averaged(0)}}
        del callbacks["StochasticWeightAveraging"]["average_model_state"]["n_averaged"]
        saved = {"state_dict": model().state_dict(), "callbacks": callbacks, "global_step": 5, "pytorch-lightning_version": "2.5.0"}
        torch.save(saved, tmp_path / "last.ckpt")
        told = codes(ckpt_cli.merge(tmp_path / "last.ckpt", tmp_path / "out", type="ema"))
        assert told.get("average-not-begun", "").startswith("n_averaged is 0") is (int(counter) == 0)
        assert "average-not-begun" not in codes(ckpt_cli.merge(tmp_path / "last.ckpt", tmp_path / "model"))

    @pytest.mark.parametrize("updates", [0, 3])
    @pytest.mark.parametrize("place", ["in it", "beside it", "of the authors of SWA"])
    def test_is_a_plain_number(self, tmp_path: Path, updates: int, place: str) -> None:
        own = dict(model().state_dict())
        beside: dict[str, dict[str, Any]] = {
            "in it": {"ema": {"module": own, "updates": updates}},
            "beside it": {"ema": own, "updates": updates},
            "of the authors of SWA": {"swa_state_dict": own, "swa_n": updates},
        }
        torch.save({"state_dict": own, **beside[place]}, tmp_path / "last.pt")
        told = codes(ckpt_cli.merge(tmp_path / "last.pt", tmp_path / "out", type="ema"))
        assert ("average-not-begun" in told) is (updates == 0)

    @pytest.mark.parametrize("updates", [0, 3])
    def test_lies_beside_in_dcp(self, tmp_path: Path, updates: int) -> None:
        callbacks = {"SWA": {"n_averaged": updates, "average_model_state": dict(model().state_dict())}}
        dcp.save({"state_dict": model().state_dict(), "callbacks": callbacks}, checkpoint_id=tmp_path / "run", no_dist=True)
        told = [note.code for note in ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="ema").checkpoint.notes]
        assert told.count("average-not-begun") == (updates == 0)

    def test_a_codebook_that_has_none_yet_is_no_average(self, tmp_path: Path) -> None:
        """Codebooks of lucidrains' VQ have such a buffer, too."""
        book = {"initted": torch.tensor(False), "embed.weight": torch.randn(4, 4), "embed_avg": torch.randn(4, 4)}
        torch.save({"model": dict(model().state_dict()), "codebook": book}, folder(tmp_path / "run", None, classless()) / "checkpoint.pt")
        done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="codebook")
        assert "average-not-begun" not in codes(done)


def ema_pytorch(begun: bool = True, online: bool = True) -> Tensors:
    """The state of ema-pytorch's ``EMA``: buffers, and the two models as modules."""
    trained = {f"online_model.{name}": tensor for name, tensor in model().state_dict().items()} if online else {}
    average = {f"ema_model.{name}": tensor for name, tensor in other().state_dict().items()}
    return {"initted": torch.tensor(begun), "step": torch.tensor(5 * begun), **trained, **average}


def other() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def as_teacher_in_dcp(place: Path, state: Tensors) -> dict[str, Any]:
    dcp.save({"model": model().state_dict(), "teacher": state}, checkpoint_id=place, no_dist=True)
    return {"path": place, "type": "teacher"}


def of_ranks(place: Path, state: Tensors) -> dict[str, Any]:
    for rank in range(2):
        torch.save({"model": dict(model().state_dict()), "ema": state}, place / f"model_world_size_2_rank_{rank}.pt")
    return {"path": place, "type": "ema"}


STATES = [in_dcp, as_teacher_in_dcp, alone_in_dcp, in_safetensors, in_a_file, beside_the_model, of_ranks]


@pytest.mark.parametrize("save", STATES)
class TestTheStateOfEmaPytorch:
    """Also of a later group."""

    @pytest.mark.parametrize("online", [True, False])
    def test_is_the_average_in_it(self, tmp_path: Path, save: Save, online: bool) -> None:
        given = save(folder(tmp_path / "step-5", None, classless()), ema_pytorch(online=online))
        alone = "type" not in given
        done = ckpt_cli.merge(**{**given, **({"type": "ema"} if alone and online else {})}, output=tmp_path / "out")
        assert differences(load(tmp_path / "out"), dict(other().state_dict())) == []
        assert "average-not-begun" not in codes(done)
        assert ("trained-beside" in codes(done)) is (online and not alone)

    def test_alone_is_the_model_too(self, tmp_path: Path, save: Save) -> None:
        given = save(folder(tmp_path / "step-5", None, classless()), ema_pytorch())
        done = ckpt_cli.merge(given["path"], tmp_path / "out")
        assert differences(load(tmp_path / "out"), dict(model().state_dict())) == []
        assert {note.level for note in done.checkpoint.notes if note.code in ("other-groups", "other-components")} == {"info"} or (
            save is as_teacher_in_dcp
        )

    @pytest.mark.parametrize("online", [True, False])
    def test_that_has_not_begun_is_a_warning(self, tmp_path: Path, save: Save, online: bool) -> None:
        given = save(folder(tmp_path / "step-5", None, classless()), ema_pytorch(begun=False, online=online))
        more = {"type": "ema"} if "type" not in given and online else {}
        done = ckpt_cli.merge(**given, **more, output=tmp_path / "out")
        assert codes(done)["average-not-begun"].startswith("initted is False: the average has not begun")
        assert ckpt_cli.verify(tmp_path / "out", against=given["path"], **(more or {"type": given.get("type")})).exit_code == 0


def flat_in_dcp(place: Path, state: Tensors) -> None:
    dcp.save(state, checkpoint_id=place, no_dist=True)


def nested_in_dcp(place: Path, state: Tensors) -> None:
    dcp.save({"app": {"model": state}}, checkpoint_id=place, no_dist=True)


FORMS: list[Callable[[Path, Tensors], Any]] = [flat_in_dcp, nested_in_dcp, in_safetensors, in_a_file]


@pytest.mark.parametrize("save", FORMS)
@pytest.mark.parametrize("place", ["ema", "net.ema", "_orig_mod.model_ema"])
class TestAStateUnderAPrefix:
    """Of a module that has its average as a part; the whole may be a part of another."""

    def check(self, tmp_path: Path, place: str, save: Callable[[Path, Tensors], Any], state: Tensors, counter: str) -> None:
        start = place.removesuffix("model_ema").removesuffix("ema")
        own = {f"{start}net.{name}": tensor for name, tensor in model().state_dict().items()}
        run = folder(tmp_path / "step-5", None, classless())
        save(run, own | {f"{place}.{name}": tensor for name, tensor in state.items()})
        bare = start.replace("_orig_mod.", "") + "net."
        for kind, wanted in (("model", model()), ("ema", other())):
            done = ckpt_cli.merge(run, tmp_path / kind, type=kind)
            assert differences(load(tmp_path / kind), {f"{bare}{name}": tensor for name, tensor in wanted.state_dict().items()}) == []
            assert not any(note.level == "warning" and note.code in WARNED for note in done.checkpoint.notes)
            assert ("average-not-begun" in codes(done)) is (kind == "ema")
        assert counter in codes(done)["average-not-begun"]

    def test_of_ema_pytorch(self, tmp_path: Path, place: str, save: Callable[[Path, Tensors], Any]) -> None:
        self.check(tmp_path, place, save, ema_pytorch(begun=False), "initted is False")

    def test_of_torch(self, tmp_path: Path, place: str, save: Callable[[Path, Tensors], Any]) -> None:
        state = {"n_averaged": torch.tensor(0), **{f"module.{name}": tensor for name, tensor in other().state_dict().items()}}
        self.check(tmp_path, place, save, state, "n_averaged is 0")


WARNED = ("other-groups", "beside-weights", "average-or-part", "left-out")


@pytest.mark.parametrize("save", FORMS)
class TestWhatIsBesideAnAverage:
    def test_is_no_state_of_the_training(self, tmp_path: Path, save: Callable[[Path, Tensors], Any]) -> None:
        """Neither the model there, nor the average's own count of steps."""
        for name, state in (("alone", ema_pytorch()), ("part", {f"ema.{name}": tensor for name, tensor in ema_pytorch().items()})):
            run = folder(tmp_path / name / "global_step_100", None, classless())
            save(run, state if name == "alone" else state | {f"net.{own}": tensor for own, tensor in model().state_dict().items()})
            torch.save({"last_epoch": 100}, run / "scheduler.pt")
            found = ckpt_cli.extract_state(run, tmp_path / f"{name}.out")
            held = str(torch.load(tmp_path / f"{name}.out" / "extra_state_merged.pt", weights_only=False))
            assert "online_model" not in held
            assert "initted" not in held
            assert "step-differs" not in {note.code for note in found.notes}


@pytest.mark.parametrize("save", FORMS)
class TestAnAveragedModelThatIsAPart:
    def test_has_its_counter_under_the_prefix(self, tmp_path: Path, save: Callable[[Path, Tensors], Any]) -> None:
        run = folder(tmp_path / "step-5", None, classless())
        save(run, {f"net.{name}": tensor for name, tensor in averaged(0).items()})
        done = ckpt_cli.merge(run, tmp_path / "out")
        assert differences(load(tmp_path / "out"), {f"net.{name}": tensor for name, tensor in model().state_dict().items()}) == []
        assert "n_averaged is 0" in codes(done)["average-not-begun"]


class TestNamesWithoutDots:
    """As LitEma keeps them, which is a module of its own too; in the model's state dict they were known before."""

    @pytest.mark.parametrize("updates", [0, 3])
    @pytest.mark.parametrize("start", ["", "net.", "_orig_mod."])
    @pytest.mark.parametrize("kind", ["dcp", "file"])
    def test_become_those_of_the_model(self, tmp_path: Path, kind: str, start: str, updates: int) -> None:
        own = {f"{start}{name}": tensor for name, tensor in model().state_dict().items()}
        average = {name.replace(".", ""): tensor for name, tensor in other().state_dict().items()}
        state = {"decay": torch.tensor(0.9), "num_updates": torch.tensor(updates), **average}
        run = folder(tmp_path / "run", None, classless())
        if kind == "dcp":
            dcp.save({"model": own, "model_ema": state}, checkpoint_id=run, no_dist=True)
        else:
            torch.save({"model": own, "model_ema": state}, run / "checkpoint.pt")
        done = ckpt_cli.merge(run, tmp_path / "out", type="ema")
        bare = start.replace("_orig_mod.", "")
        assert differences(load(tmp_path / "out"), {f"{bare}{name}": tensor for name, tensor in other().state_dict().items()}) == []
        assert ("average-not-begun" in codes(done)) is (updates == 0)

    def test_of_another_model_are_refused(self, tmp_path: Path) -> None:
        average = {"0weight": torch.ones(8, 4), "7bias": torch.ones(4)}
        saved = {"model": dict(model().state_dict()), "model_ema": average}
        torch.save(saved, folder(tmp_path / "run", None, classless()) / "checkpoint.pt")
        with pytest.raises(MissingTensors):
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="ema")


class TestWhatIsNoSuchState:
    def test_a_twin_of_these_names_stays(self, tmp_path: Path) -> None:
        """Without its buffers nothing tells the library."""
        for name, held in (("dcp", {"ema_model.a": torch.ones(2, 2), "head.a": torch.ones(3, 2)}), ("vq", {"initted": torch.tensor(True)})):
            state = {**model().state_dict(), **held}
            dcp.save({"model": state}, checkpoint_id=folder(tmp_path / name, None, classless()), no_dist=True)
            ckpt_cli.merge(tmp_path / name, tmp_path / f"{name}.out")
            assert differences(load(tmp_path / f"{name}.out"), state) == []

    def test_a_state_dict_that_is_no_average_keeps_its_step(self, tmp_path: Path) -> None:
        held = {**model().state_dict(), "step": torch.tensor(3)}
        torch.save({"model": dict(model().state_dict()), "teacher": held}, folder(tmp_path / "run", None, classless()) / "checkpoint.pt")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="teacher")
        assert differences(load(tmp_path / "out"), held) == []

    @pytest.mark.parametrize("nested", [True, False])
    def test_a_list_without_names_is_refused(self, tmp_path: Path, nested: bool) -> None:
        state = {"decay": 0.99, "num_updates": 10, "shadow_params": list(other().parameters()), "collected_params": None}
        saved = {"model": model().state_dict(), "ema": state}
        dcp.save({"app": saved} if nested else saved, checkpoint_id=folder(tmp_path / "run", None, classless()), no_dist=True)
        with pytest.raises(Unsupported, match="a list of tensors without names"):
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="app" if nested else "ema")

    @pytest.mark.parametrize("save", [in_dcp, beside_the_model])
    def test_several_averages_are_refused(self, tmp_path: Path, save: Save) -> None:
        pair = ema_pytorch()
        several = {f"ema_models.{at}.{name}": pair[name] for at in (0, 1) for name in pair if not name.startswith("online")}
        given = save(folder(tmp_path / "run", None, classless()), {**{k: pair[k] for k in pair if k.startswith("online")}, **several})
        with pytest.raises(Unsupported, match="several averages"):
            ckpt_cli.merge(**given, output=tmp_path / "out")


@pytest.mark.parametrize("beside", [True, False], ids=["beside the model", "alone"])
def test_a_parameter_called_like_a_counter_is_a_weight(tmp_path: Path, beside: bool) -> None:
    weights = {"embed.weight": torch.ones(6, 4), "decay": torch.rand(4)}
    held = {"ema": {**weights, "steps": torch.tensor([7])}, **({"model": weights} if beside else {})}
    torch.save(held, tmp_path / "model.pt")
    ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out", type="ema")
    assert load(tmp_path / "out").keys() == weights.keys()
