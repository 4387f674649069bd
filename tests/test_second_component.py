"""A second component with fewer tensors than the model beside it, of a class that nobody knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from ckpt_cli.errors import MissingTensors, Undecidable
from tests.cli import ckpt_fork as ckpt
from tests.tensors import Tensors, load

CUSTOM = {"architectures": ["MyModel"], "model_type": "my_model", "auto_map": {"AutoModel": "modeling_my.MyModel"}}


def model(layers: int = 4, **more: torch.Tensor) -> Tensors:
    return {"embed.weight": torch.ones(6, 2), **{f"layers.{i}.w": torch.full((2, 2), float(i)) for i in range(layers)}, **more}


def without(tensors: Tensors, part: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def in_one_file(folder: Path, weights: Tensors, average: Tensors, key: str = "ema") -> Path:
    folder.mkdir()
    torch.save({"model": weights, key: average}, folder / "model.pt")
    (folder / "config.json").write_text(json.dumps(CUSTOM))
    return folder / "model.pt"


def in_dcp(folder: Path, weights: Tensors, average: Tensors) -> Path:
    dcp.save({"model": weights, "ema": average}, checkpoint_id=folder / "step-5", no_dist=True)
    return folder


def in_folders(folder: Path, weights: Tensors, average: Tensors) -> Path:
    for name, held in (("pytorch_model_fsdp_0", weights), ("pytorch_ema_model_fsdp_0", average)):
        dcp.save({"model": held}, checkpoint_id=folder / "step-5" / name, no_dist=True)
    return folder


@pytest.mark.parametrize("layout", [in_one_file, in_dcp, in_folders])
class TestAnAverage:
    def test_that_lacks_a_layer_is_refused(self, layout, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        path = layout(tmp_path / "run", model(), without(model(), ".3."))
        with pytest.raises(MissingTensors, match=r"layers\.3\.w") as caught:
            ckpt_cli.merge(path, tmp_path / "out", type="ema")
        assert "--allow-missing 'layers.3.w'" in str(caught.value.hint)
        assert not (tmp_path / "out").exists()
        ckpt_cli.merge(path, tmp_path / "out", type="ema", allow_missing="layers.3.w")
        assert load(tmp_path / "out").keys() == without(model(), ".3.").keys()

    def test_that_lacks_a_kind_of_tensor_is_refused(self, layout, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(MissingTensors, match="embed"):
            ckpt_cli.merge(layout(tmp_path / "run", model(), without(model(), "embed")), tmp_path / "out", type="both")

    def test_that_lacks_what_a_filter_leaves_out_is_not(self, layout, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        path = layout(tmp_path / "run", model(), without(model(), ".3."))
        ckpt_cli.merge(path, tmp_path / "out", type="ema", exclude="layers.3.*")

    def test_is_whole_without_counters_and_second_names(self, layout, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        weights = model(steps=torch.tensor(3))
        path = layout(tmp_path / "run", weights, model())
        result = ckpt_cli.merge(path, tmp_path / "out", type="ema")
        assert "lacks-tensors" not in {note.code for note in result.checkpoint.notes}

    def test_is_told_by_verify_detect_and_inspect(self, layout, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        path = layout(tmp_path / "run", model(), without(model(), ".3."))
        checked = ckpt_cli.verify(path, type="ema")
        assert [item.tensor for item in checked.findings if item.code == "less-than-model"] == ["layers.3.w"]
        for command in ("detect", "inspect"):
            assert "ema lacks 1 of the 5 tensors of the model beside it: layers.3.w" in ckpt(command, path, "--type", "ema").err


def half(tensors: Tensors) -> Tensors:
    """What one of two ranks holds of each matrix under tensor parallelism."""
    return {name: tensor[: len(tensor) // 2].clone() for name, tensor in tensors.items()}


def flat(tensors: Tensors) -> Tensors:
    """What one of two ranks holds under ZeRO-3."""
    return {name: tensor.flatten()[: tensor.numel() // 2].clone() for name, tensor in tensors.items()}


def of_layer(tensors: Tensors) -> Tensors:
    """What a stage that does not know its place calls its layer."""
    return {name.removeprefix("layers.3."): tensor for name, tensor in tensors.items() if ".3." in name}


def renamed(tensors: Tensors) -> Tensors:
    return {f"p{number}": tensor for number, tensor in enumerate(tensors.values())}


class TestWhatOneRankHolds:
    """Nothing in a file says how the parts of several ranks are put together, so that they are no average."""

    @pytest.mark.parametrize("layout", [in_one_file, in_dcp, in_folders])
    @pytest.mark.parametrize("part", [half, flat])
    def test_is_refused_by_its_shapes(self, layout, part, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        path = layout(tmp_path / "run", model(), part(model()))
        with pytest.raises(Undecidable, match="5 of 5 have another shape") as caught:
            ckpt_cli.merge(path, tmp_path / "out", type="ema")
        assert caught.value.tensor == "embed.weight"
        assert not (tmp_path / "out").exists()
        assert "--type model reads the model itself" in str(caught.value.hint)
        ckpt_cli.merge(path, tmp_path / "out", type="model")
        assert load(tmp_path / "out").keys() == model().keys()

    @pytest.mark.parametrize(("part", "why"), [(of_layer, "the names fit several"), (renamed, "has a name of model")])
    def test_is_refused_by_its_names(self, part, why: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        path = in_one_file(tmp_path / "run", model(), part(model()))
        with pytest.raises(Undecidable, match=why):
            ckpt_cli.merge(path, tmp_path / "out", type="both")

    def test_is_refused_by_every_command(self, tmp_path: Path) -> None:
        path = in_one_file(tmp_path / "run", model(), half(model()))
        for command in ("inspect", "verify", "detect"):
            shown = ckpt(command, path, "--type", "ema")
            assert (shown.code, "have another shape" in shown.err) == (4, True)
        with pytest.raises(Undecidable):
            ckpt_cli.open(path, type="ema")
        with pytest.raises(Undecidable):
            ckpt_cli.diff(path, type="model,ema")

    def test_is_refused_in_the_state_of_deepspeed(self, data: Path, tmp_path: Path) -> None:
        shutil.copytree(data / "deepspeed" / "tp2-z1-w2" / "run", tmp_path / "run")
        (first,) = (tmp_path / "run").rglob("mp_rank_00_model_states.pt")
        states = torch.load(first, weights_only=False)
        torch.save({**states, "ema": {name: tensor.float() for name, tensor in states["module"].items()}}, first)
        with pytest.raises(Undecidable, match="have another shape"):
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out", type="ema")


@pytest.mark.parametrize("key", ["net.{}", "net.inner.{}"])
def test_an_average_of_one_module_of_several(key: str, tmp_path: Path) -> None:
    weights = {**{key.format(name): tensor for name, tensor in model().items()}, "teacher.head": torch.ones(3, 2)}
    ckpt_cli.merge(in_one_file(tmp_path / "run", weights, model()), tmp_path / "out", type="ema")
    for number, (part, error) in enumerate(((without(model(), ".3."), MissingTensors), (half(model()), Undecidable))):
        with pytest.raises(error):
            ckpt_cli.merge(in_one_file(tmp_path / f"run{number}", weights, part), tmp_path / "none", type="ema")


def test_an_average_without_dots_in_its_names(tmp_path: Path) -> None:
    average = {name.replace(".", ""): tensor for name, tensor in model().items()}
    ckpt_cli.merge(in_one_file(tmp_path / "run", model(), average), tmp_path / "out", type="ema")


@pytest.mark.parametrize("layout", [in_one_file, in_dcp])
def test_what_is_written_too_is_not_left_out(layout, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = layout(tmp_path / "run", model(), model())
    assert "also holds ema" in ckpt("merge", path, "-o", tmp_path / "one").out
    assert "also holds" not in ckpt("merge", path, "--type", "both", "-o", tmp_path / "two").out


def test_averages_of_partial_averages_are_refused(tmp_path: Path) -> None:
    for step in (5, 10):
        dcp.save({"model": model(), "ema": without(model(), ".3.")}, checkpoint_id=tmp_path / f"run/step-{step}", no_dist=True)
    with pytest.raises(MissingTensors, match=r"layers\.3\.w"):
        ckpt_cli.average(tmp_path / "run", tmp_path / "out", everything=True, type="ema")


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    weights = model()
    weights["head.weight"] = weights["embed.weight"]
    ckpt_cli.merge(in_one_file(tmp_path / "run", weights, without(weights, "head")), tmp_path / "out", type="ema")


def test_an_average_of_one_module_of_a_larger_model_has_its_own_names(tmp_path: Path) -> None:
    """Lightning modules hold the network in an attribute, which their average leaves out of the names."""
    path = in_one_file(tmp_path / "run", {f"net.{name}": tensor for name, tensor in model().items()}, without(model(), ".3."))
    with pytest.raises(MissingTensors, match=r"layers\.3\.w"):
        ckpt_cli.merge(path, tmp_path / "out", type="ema")


class TestAnotherModel:
    def test_of_the_same_shapes_that_lacks_a_layer_is_a_warning(self, tmp_path: Path) -> None:
        path = in_one_file(tmp_path / "run", model(), without(model(), ".3."), key="teacher")
        result = ckpt_cli.merge(path, tmp_path / "out", type="teacher")
        assert "teacher lacks 1 of the 5 tensors of the model beside it: layers.3.w" in [note.text for note in result.checkpoint.notes]

    def test_with_another_head_or_of_another_size_is_none(self, tmp_path: Path) -> None:
        critic = {**without(model(), "embed"), "score.weight": torch.ones(1, 2)}
        small = {name: tensor[:1] for name, tensor in model(2).items()}
        for number, other in enumerate((critic, small)):
            path = in_one_file(tmp_path / f"run{number}", model(), other, key="critic")
            result = ckpt_cli.merge(path, tmp_path / f"out{number}", type="critic")
            assert "lacks-tensors" not in {note.code for note in result.checkpoint.notes}


class TestAnAverageBesideSeveralModels:
    """It is of the one that it fits, whatever stands first."""

    def of(self, tmp_path: Path, average: Tensors) -> Path:
        critic = {"embed.weight": torch.ones(9, 5), "layers.0.w": torch.ones(5, 5), "score.w": torch.ones(1, 5)}
        dcp.save({"discriminator": critic, "generator": model(), "ema": average}, checkpoint_id=tmp_path / "step-5", no_dist=True)
        return tmp_path / "step-5"

    def test_is_compared_with_that_one(self, tmp_path: Path) -> None:
        step = self.of(tmp_path, model())
        ckpt_cli.merge(step, tmp_path / "out", type="ema")
        assert load(tmp_path / "out").keys() == model().keys()

    def test_is_refused_if_it_is_of_none(self, tmp_path: Path) -> None:
        step = self.of(tmp_path, {name: tensor[:1] for name, tensor in model().items()})
        with pytest.raises(Undecidable, match="discriminator"):
            ckpt_cli.merge(step, tmp_path / "out", type="ema")

    def test_lacks_what_that_one_has(self, tmp_path: Path) -> None:
        step = self.of(tmp_path, without(model(), "layers.3"))
        with pytest.raises(MissingTensors, match=r"layers\.3"):
            ckpt_cli.merge(step, tmp_path / "out", type="ema")
