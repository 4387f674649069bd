"""Files that torch 2.3 to 2.13 wrote, in every way of sharding a model that the version knows, merge into the weights of the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from ckpt_cli.errors import Undecidable
from tests.tensors import Tensors, cast_floats, differences, load

FSDP1 = ("fsdp1_dtensor", "fsdp1_hsdp", "fsdp1_sharded_tensor")
MODES = {
    "2.3.1": (*FSDP1, "fsdp2", "fsdp2_bf16", "fsdp2_hsdp", "fsdp2_tp", "fsdp2_tp_even"),
    "2.4.1": (*FSDP1, "fsdp2", "fsdp2_bf16"),
    "2.6.0": (*FSDP1, "fsdp2", "fsdp2_bf16", "fsdp2_hsdp", "fsdp2_tp_even"),
    "2.9.1": (*FSDP1, "fsdp2", "fsdp2_bf16", "fsdp2_hsdp", "fsdp2_tp", "fsdp2_tp_even"),
    "2.13.0": (*FSDP1, "fsdp2", "fsdp2_bf16", "fsdp2_hsdp", "fsdp2_tp", "fsdp2_tp_even"),
}
PERMUTED = {("2.3.1", "fsdp2_hsdp"), ("2.3.1", "fsdp2_tp"), ("2.3.1", "fsdp2_tp_even")}
"""DCP folders whose chunks torch 2.3 recorded in a wrong order. They tile perfectly, so nothing but the writer and the mesh tells."""

every_save = pytest.mark.parametrize(("version", "mode"), [(version, mode) for version, modes in MODES.items() for mode in modes])


def true_weights(data: Path, version: str, mode: str) -> Tensors:
    if (version, mode) == ("2.3.1", "fsdp2_hsdp"):
        # torch 2.3 gathers HSDP wrongly: it repeats the rows of the first shard, so its own full tensors are no oracle. The
        # model has the same seed in all modes of float32, and later versions gather it right.
        truth = load(data / "torch-2.3.1" / "fsdp2" / "expected.safetensors")
        assert differences(truth, load(data / "torch-2.6.0" / "fsdp2_hsdp" / "expected.safetensors")) == []
        return truth
    return load(data / f"torch-{version}" / mode / "expected.safetensors")


def test_every_mode_of_the_archives_is_tested(data: Path) -> None:
    there = {folder.name.removeprefix("torch-"): sorted(mode.name for mode in folder.iterdir()) for folder in data.glob("torch-[0-9]*")}
    assert there == {version: sorted(modes) for version, modes in MODES.items()}


@every_save
def test_keeping_the_dtype_gives_the_bytes_of_the_training(data: Path, tmp_path: Path, version: str, mode: str) -> None:
    ckpt_cli.merge(data / f"torch-{version}" / mode, tmp_path / "out", dtype="keep")
    assert differences(load(tmp_path / "out"), true_weights(data, version, mode)) == []


@every_save
def test_bf16_rounds_floats_as_torch_does_and_leaves_integers_alone(data: Path, tmp_path: Path, version: str, mode: str) -> None:
    ckpt_cli.merge(data / f"torch-{version}" / mode, tmp_path / "out", dtype="bf16")
    expected = cast_floats(true_weights(data, version, mode), torch.bfloat16)
    assert differences(load(tmp_path / "out"), expected, nan_payload=False) == []
    assert {tensor.dtype for tensor in expected.values()} == {torch.bfloat16, torch.int64}


def test_the_meshes_of_all_versions_are_read_alike(data: Path) -> None:
    """DTensor pickled its mesh in four ways; what is shown of it does not depend on the version."""
    shown = {}
    for version in MODES:
        component = ckpt_cli.inspect(data / f"torch-{version}" / "fsdp2").checkpoint.components[0]
        assert component.tensors is not None
        shown[version] = (component.world_size, component.mesh, {tensor.name: tensor.layout for tensor in component.tensors})
    assert shown["2.13.0"][0] == 4
    assert shown["2.13.0"][2]["model.layers.0.self_attn.q_proj.weight"] == "Shard(0) x4"
    assert [version for version in MODES if shown[version] != shown["2.13.0"]] == []


class TestDcp:
    """The same models, saved in the same run by `torch.distributed.checkpoint`."""

    def test_every_mode_is_there(self, data: Path) -> None:
        there = {folder.name: sorted(mode.name for mode in folder.iterdir()) for folder in (data / "dcp").iterdir()}
        assert there == {version: sorted(modes) for version, modes in MODES.items()}

    @every_save
    def test_it_merges_into_the_weights_of_the_training_or_is_refused(self, data: Path, tmp_path: Path, version: str, mode: str) -> None:
        folder = data / "dcp" / version / mode
        if (version, mode) in PERMUTED:
            with pytest.raises(Undecidable, match=r"torch <= 2\.4 recorded the chunks of FSDP2 .* in a wrong order") as caught:
                ckpt_cli.merge(folder, tmp_path / "out")
            assert caught.value.path == str(folder)
            assert list(tmp_path.iterdir()) == []
        else:
            ckpt_cli.merge(folder, tmp_path / "out")
            assert differences(load(tmp_path / "out"), true_weights(data, version, mode)) == []

    @every_save
    def test_the_writer_is_named(self, data: Path, version: str, mode: str) -> None:
        if (version, mode) in PERMUTED:
            return
        writers = {"2.3.1": "2.3", "2.4.1": "2.4-2.6", "2.6.0": "2.4-2.6", "2.9.1": ">= 2.9", "2.13.0": ">= 2.9"}
        (component,) = ckpt_cli.inspect(data / "dcp" / version / mode).checkpoint.components
        assert component.writer == f"torch DCP ({writers[version]})"

    def test_what_is_refused_would_have_been_wrong(self, data: Path) -> None:
        """Where all parts have one shape, torch itself reads them without a complaint, and gives other tensors than those trained."""
        expected = true_weights(data, "2.3.1", "fsdp2_tp_even")
        loaded = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        dcp.load(loaded, checkpoint_id=data / "dcp" / "2.3.1" / "fsdp2_tp_even", no_dist=True)
        assert differences(loaded, expected) != []
