"""A module and its twin: a state dict whose names say that a part of it may be an average of another part, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.discover.forms.twins import twin_notes
from ckpt_cli.dtypes import BY_CODE
from ckpt_cli.errors import MissingTensors
from ckpt_cli.tensors.tensor import Tensor
from tests.tensors import Tensors

TWINS = ["ema_encoder", "encoder_ema", "ema", "avg_model"]


def tensors(twin: str, *, head: bool = True, counter: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    part = {name: shape for layer in (0, 1) for name, shape in ((f"{layer}.weight", (8, 8)), (f"{layer}.bias", (8,)))}
    made = {f"{first}.{name}": torch.randn(shape, generator=generator) for first in ("encoder", twin) for name, shape in part.items()}
    made |= {"head.weight": torch.randn(4, 8, generator=generator)} if head else {}
    return made | ({f"{twin}.num_updates": torch.tensor(7)} if counter else {})


def torch_file(folder: Path, held: Tensors) -> Path:
    folder.mkdir()
    torch.save(held, folder / "pytorch_model.bin")
    return folder


def safetensors(folder: Path, held: Tensors) -> Path:
    folder.mkdir()
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def ranks(folder: Path, held: Tensors) -> Path:
    folder.mkdir()
    torch.save(held, folder / "model_world_size_1_rank_0.pt")
    return folder


def store(folder: Path, held: Tensors) -> Path:
    dcp.save({"model": held}, checkpoint_id=str(folder), no_dist=True)
    return folder


def indexed(folder: Path, held: Tensors) -> Path:
    folder.mkdir()
    half = len(held) // 2
    places = {name: f"pytorch_model-0000{1 + (index >= half)}-of-00002.bin" for index, name in enumerate(held)}
    for file in set(places.values()):
        torch.save({name: tensor for name, tensor in held.items() if places[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def of_deepspeed(folder: Path, held: Tensors) -> Path:
    step = folder / "global_step3"
    step.mkdir(parents=True)
    content = {"module": held, "buffer_names": [], "optimizer": None, "ds_version": "0.15", "global_steps": 3, "dp_world_size": 1}
    torch.save(content, step / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step3")
    return folder


def shards_of_torch(folder: Path, held: Tensors) -> Path:
    folder.mkdir()
    offsets = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in held.items()}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    save_file(held, folder / "shard-00001-model-00001-of-00001.safetensors", metadata=metadata)
    return folder


WRITERS: list[Callable[[Path, Tensors], Path]] = [torch_file, safetensors, ranks, store, indexed, of_deepspeed, shards_of_torch]


@pytest.mark.parametrize("write", WRITERS)
class TestATwinOfAPart:
    @pytest.mark.parametrize("twin", TWINS)
    def test_is_written_with_the_model_and_told(self, write: Callable[[Path, Tensors], Path], twin: str, tmp_path: Path) -> None:
        held = tensors(twin)
        result = ckpt_cli.merge(write(tmp_path / "run", held), tmp_path / "out")
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert {name: value.tolist() for name, value in written.items()} == {name: value.tolist() for name, value in held.items()}
        notes = {note.code: note for note in (*result.checkpoint.notes, *result.outputs[0].notes)}
        assert notes["average-or-part"].level == "warning"
        assert f"--exclude '{twin}.*'" in notes["average-or-part"].text
        assert not {"other-components", "other-groups"} & notes.keys()

    def test_can_be_taken_alone_or_left_out(self, write: Callable[[Path, Tensors], Path], tmp_path: Path) -> None:
        held = tensors("ema_encoder")
        run = write(tmp_path / "run", held)
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(run, tmp_path / "ema", type="ema")
        assert "head.weight" in caught.value.message
        assert "ema_encoder" not in str(caught.value)
        ckpt_cli.merge(run, tmp_path / "ema", type="ema", allow_missing="head.*")
        average = load_file(tmp_path / "ema" / next(path.name for path in (tmp_path / "ema").glob("*.safetensors")))
        assert {name: value.tolist() for name, value in average.items()} == {
            name.removeprefix("ema_"): value.tolist() for name, value in held.items() if name.startswith("ema_")
        }
        ckpt_cli.merge(run, tmp_path / "model", exclude="ema_encoder.*")
        assert load_file(tmp_path / "model" / "model.safetensors").keys() == {name for name in held if not name.startswith("ema_")}

    @pytest.mark.parametrize("shown", ["all have partners", "a counter"])
    def test_is_an_average_where_something_shows_it(self, write: Callable[[Path, Tensors], Path], shown: str, tmp_path: Path) -> None:
        held = tensors("ema_encoder", head=shown != "all have partners", counter=shown == "a counter")
        result = ckpt_cli.merge(write(tmp_path / "run", held), tmp_path / "out")
        assert not any(name.startswith("ema_") for name in load_file(tmp_path / "out" / "model.safetensors"))
        assert "average-or-part" not in {note.code for note in (*result.checkpoint.notes, *result.outputs[0].notes)}


@pytest.mark.parametrize("write", WRITERS)
def test_an_average_of_the_whole_is_a_component_of_its_own(write: Callable[[Path, Tensors], Path], tmp_path: Path) -> None:
    """As Lightning saves a latent diffusion model, also with DeepSpeed."""
    held = {name.replace("model_ema.", "model_ema.encoder."): tensor for name, tensor in tensors("model_ema", head=False).items()}
    run = write(tmp_path / "run", held)
    result = ckpt_cli.merge(run, tmp_path / "model")
    assert [info.name for info in result.checkpoint.components] == ["model", "ema"]
    ckpt_cli.merge(run, tmp_path / "ema", type="ema")
    for kind, prefix in (("model", ""), ("ema", "model_ema.")):
        (file,) = (tmp_path / kind).glob("*.safetensors")
        written = load_file(file)
        assert {name: value.tolist() for name, value in written.items()} == {
            name: held[f"{prefix}{name}"].tolist() for name in held if name.startswith("encoder.")
        }
        assert ckpt_cli.verify(tmp_path / kind, against=run).exit_code == 0


def test_an_average_that_a_format_leaves_with_the_model_is_told() -> None:
    held = {name: Tensor(name, BY_CODE["F32"], (4, 4), ()) for name in ("encoder.weight", "model_ema.encoder.weight")}
    (told,) = twin_notes("model", held)
    assert "--exclude 'model_ema.*'" in told.text
