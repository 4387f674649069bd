"""What is not written is said, and what is written belongs to the model: side files, averages, extra state, bases."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, NotFound, Unsupported
from ckpt_cli.report import MergeResult
from tests.cli import ckpt
from tests.tensors import differences, load

Tensors = dict[str, torch.Tensor]
MODEL = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.arange(4.0)}
AVERAGE = {name: tensor + 100 for name, tensor in MODEL.items()}


def codes(result: MergeResult, level: str | None = None) -> set[str]:
    notes = [*result.checkpoint.notes, *(note for output in result.outputs for note in output.notes)]
    return {note.code for note in notes if level in (None, note.level)}


def hub_folder(folder: Path, tensors: Mapping[str, torch.Tensor] = MODEL) -> Path:
    """A folder with an index."""
    folder.mkdir(parents=True)
    parts = [f"model-{i:05d}-of-{len(tensors):05d}.safetensors" for i in range(1, len(tensors) + 1)]
    for part, (name, tensor) in zip(parts, tensors.items(), strict=True):
        save_file({name: tensor}, folder / part)
    index = {"metadata": {}, "weight_map": dict(zip(tensors, parts, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


class TestFilesBesideTheWeights:
    @pytest.mark.parametrize("name", ["value_head.safetensors", "v_head.safetensors", "adapter_model.safetensors", "mtp.safetensors"])
    def test_are_named_by_merge_and_average(self, tmp_path: Path, name: str) -> None:
        folders = [hub_folder(tmp_path / step) for step in "ab"]
        for folder in folders:
            save_file({"v_head.weight": torch.ones(1, 3)}, folder / name)
        result = ckpt_cli.merge(folders[0], tmp_path / "out")
        (note,) = [note for note in result.checkpoint.notes if note.code == "other-weights"]
        assert note.level == "warning"
        assert name in note.text
        assert differences(load(tmp_path / "out"), MODEL) == []
        for command in (
            ["merge", folders[0], "-o", tmp_path / "one"],
            ["average", *folders, "-o", tmp_path / "mean"],
            ["inspect", folders[0]],
        ):
            assert f"warning: {name} beside" in ckpt(*command).err

    @pytest.mark.parametrize("name", ["value_head.bin", "v_head.pt", "critic_head.pth", "non_lora_trainables.bin"])
    def test_of_torch_as_well(self, tmp_path: Path, name: str) -> None:
        folder = hub_folder(tmp_path / "run")
        torch.save({"v_head.weight": torch.ones(1, 3)}, folder / name)
        assert "other-weights" in codes(ckpt_cli.merge(folder, tmp_path / "out"), "warning")

    def test_beside_files_of_ranks(self, layouts: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(layouts / "verl-run" / "run" / "global_step_20", tmp_path / "global_step_20"))
        save_file({"v_head.weight": torch.ones(1, 3)}, run / "actor" / "value_head.safetensors")
        assert "other-weights" in codes(ckpt_cli.merge(run, tmp_path / "out"), "warning")

    @pytest.mark.parametrize("name", ["model.fp16.safetensors", "consolidated.safetensors", "pytorch_model.bin", "tf_model.h5"])
    def test_in_another_form_are_no_reason_to_warn(self, tmp_path: Path, name: str) -> None:
        folder = hub_folder(tmp_path / "run")
        save_file({"a": torch.ones(1)}, folder / name) if name.endswith("safetensors") else torch.save({}, folder / name)
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert "other-weights" not in codes(result, "warning")
        assert "other-weights" in codes(result)
        assert name in ckpt("merge", folder, "-o", tmp_path / "again").out

    @pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "optimizer.safetensors"])
    def test_that_are_training_state_are_not_weights(self, tmp_path: Path, name: str) -> None:
        folder = hub_folder(tmp_path / "run")
        save_file({"a": torch.ones(1)}, folder / name) if name.endswith("safetensors") else torch.save({}, folder / name)
        assert "other-weights" not in codes(ckpt_cli.merge(folder, tmp_path / "out"))


def lit_ema(model: Tensors, average: Tensors) -> Tensors:
    own = {f"model.{name}": tensor for name, tensor in model.items()}
    names = {f"model_ema.{name.replace('.', '')}": tensor for name, tensor in average.items()}
    return {**own, **names, "model_ema.decay": torch.tensor(0.99), "model_ema.num_updates": torch.tensor(3)}


def averaged_model(average: Tensors) -> dict[str, Any]:
    return {"n_averaged": torch.tensor(5), **{f"module.{name}": tensor for name, tensor in average.items()}}


IN_ONE_FILE: dict[str, Any] = {
    "ema": {"model": MODEL, "ema": AVERAGE, "opt": {"state": {0: {"exp_avg": torch.ones(2)}}}},
    "model_ema": {"model": MODEL, "model_ema": AVERAGE},
    "timm": {"state_dict": MODEL, "state_dict_ema": AVERAGE, "epoch": 3},
    "ema_state_dict": {"model_state_dict": MODEL, "ema_state_dict": AVERAGE},
    "torchvision": {"model": MODEL, "model_ema": averaged_model(AVERAGE)},
    "RT-DETR": {"model": MODEL, "ema": {"module": AVERAGE, "updates": 7}},
    "DistributedDataParallel": {"state_dict": MODEL, "ema": {f"module.{name}": tensor for name, tensor in AVERAGE.items()}},
    "ema-pytorch": {
        "model": MODEL,
        "ema": {
            **{f"online_model.{name}": tensor for name, tensor in MODEL.items()},
            **{f"ema_model.{name}": tensor for name, tensor in AVERAGE.items()},
            "initted": torch.tensor(True),
            "step": torch.tensor(4),
        },
    },
    "a callback of Lightning": {"state_dict": MODEL, "callbacks": {"EMACallback": {"ema_state_dict": AVERAGE, "decay": 0.9}}},
    "another callback": {"state_dict": MODEL, "callbacks": {"EMA{'decay': 0.9}": {"ema": {"state_dict": AVERAGE}}}},
    "fairseq": {"model": MODEL, "extra_state": {"ema": AVERAGE, "epoch": 2}},
    "beside the inner dict": {"model": {"state_dict": MODEL, "ema": AVERAGE}},
    "among the tensors": {**MODEL, "ema": AVERAGE},
    "net_ema": {"model": MODEL, "net_ema": AVERAGE},
    "ema_0.9999": {"model": MODEL, "ema_0.9999": AVERAGE},
}


class TestAnAverageInTheFile:
    @pytest.fixture(params=IN_ONE_FILE)
    def file(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        torch.save(IN_ONE_FILE[request.param], tmp_path / "model.pt")
        return tmp_path / "model.pt"

    def test_is_a_component(self, file: Path, tmp_path: Path) -> None:
        assert [component.name for component in ckpt_cli.detect(file).checkpoint.components] == ["model", "ema"]
        result = ckpt_cli.merge(file, tmp_path / "out")
        assert "other-components" in codes(result)
        assert differences(load(tmp_path / "out"), MODEL) == []
        ckpt_cli.merge(file, tmp_path / "ema", type="ema")
        assert differences(load(tmp_path / "ema"), AVERAGE) == []
        assert [output.component for output in ckpt_cli.merge(file, tmp_path / "all", type="both").outputs] == ["model", "ema"]

    def test_is_verified_inspected_and_averaged(self, file: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(file, tmp_path / "ema", type="ema")
        assert ckpt_cli.verify(tmp_path / "ema", against=file).exit_code == 0
        assert ckpt_cli.inspect(file, type="ema").checkpoint.components[1].tensors
        ckpt_cli.average([file, file], tmp_path / "mean", type="ema")
        assert differences(load(tmp_path / "mean"), AVERAGE) == []

    def test_is_no_training_state(self, file: Path, tmp_path: Path) -> None:
        try:
            result = ckpt_cli.extract_state(file, tmp_path / "state")
        except NotFound:
            return
        held = (torch.load(path) for path in (tmp_path / "state").glob("*.pt"))
        assert all("weight" not in str(list(content)) for content in held)
        assert result.files


class TestOtherAverages:
    def test_are_mentioned(self, tmp_path: Path) -> None:
        torch.save({"model": MODEL, "ema": AVERAGE}, tmp_path / "model.pt")
        assert "model.pt also holds ema (--type ema)" in ckpt("merge", tmp_path / "model.pt", "-o", tmp_path / "out").out
        assert "ema" in ckpt("detect", tmp_path / "model.pt").out

    def test_of_latent_diffusion_have_the_names_of_the_model(self, tmp_path: Path) -> None:
        torch.save({"state_dict": lit_ema(MODEL, AVERAGE), "global_step": 3}, tmp_path / "model.ckpt")
        ckpt_cli.merge(tmp_path / "model.ckpt", tmp_path / "out")
        ckpt_cli.merge(tmp_path / "model.ckpt", tmp_path / "ema", type="ema")
        assert differences(load(tmp_path / "out"), {f"model.{name}": tensor for name, tensor in MODEL.items()}) == []
        assert differences(load(tmp_path / "ema"), {f"model.{name}": tensor for name, tensor in AVERAGE.items()}) == []

    def test_whose_tensors_have_no_partner_are_part_of_the_model(self, tmp_path: Path) -> None:
        tensors = {**MODEL, "model_ema.other.weight": torch.ones(2)}
        torch.save(tensors, tmp_path / "model.pt")
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out")
        assert differences(load(tmp_path / "out"), tensors) == []

    @pytest.mark.parametrize(
        ("extra", "key"),
        [
            ({"averaging_state": {"n_averaged": torch.tensor(3)}}, "current_model_state"),
            ({"meta": {"mmengine_version": "0.10"}}, "ema_state_dict"),
        ],
        ids=["Lightning", "mmengine"],
    )
    def test_that_stand_in_the_place_of_the_model_are_named(self, tmp_path: Path, extra: dict[str, Any], key: str) -> None:
        current = {**{f"module.{name}": tensor for name, tensor in MODEL.items()}, "steps": torch.tensor(4)} if extra.get("meta") else MODEL
        torch.save({"state_dict": AVERAGE, key: current, **extra}, tmp_path / "model.ckpt")
        result = ckpt_cli.merge(tmp_path / "model.ckpt", tmp_path / "out")
        assert "averaged" in codes(result, "warning")
        for kind, wanted in (("current", MODEL), ("ema", AVERAGE), ("model", AVERAGE)):
            ckpt_cli.merge(tmp_path / "model.ckpt", tmp_path / kind, type=kind)
            assert differences(load(tmp_path / kind), wanted) == []

    @pytest.mark.parametrize("key", ["swa_model", "model_avg", "averaged_model"])
    def test_that_are_no_ema_go_by_their_key(self, tmp_path: Path, key: str) -> None:
        torch.save({"model": MODEL, key: averaged_model(AVERAGE)}, tmp_path / "model.pt")
        assert [component.name for component in ckpt_cli.detect(tmp_path / "model.pt").checkpoint.components] == ["model", key]
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out", type=key)
        assert differences(load(tmp_path / "out"), AVERAGE) == []

    def test_of_several_decays_are_all_listed(self, tmp_path: Path) -> None:
        torch.save({"model": MODEL, "ema_0.999": AVERAGE, "ema_0.9999": MODEL}, tmp_path / "model.pt")
        assert [c.name for c in ckpt_cli.detect(tmp_path / "model.pt").checkpoint.components] == ["model", "ema", "ema_0.9999"]

    @pytest.mark.parametrize("average", [{"decay": 0.9, "shadow_params": [torch.ones(2)]}, [torch.ones(2)]], ids=["diffusers", "a list"])
    def test_without_names_are_refused_by_name(self, tmp_path: Path, average: Any) -> None:
        torch.save({"model": MODEL, "ema": average}, tmp_path / "model.pt")
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out")
        with pytest.raises(Unsupported, match="list of tensors without names"):
            ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "ema", type="ema")

    def test_that_are_whole_modules_are_refused(self, tmp_path: Path) -> None:
        torch.save({"model": MODEL, "ema": torch.nn.Linear(2, 2)}, tmp_path / "model.pt")
        assert [component.name for component in ckpt_cli.detect(tmp_path / "model.pt").checkpoint.components] == ["model", "ema"]
        with pytest.raises(Unsupported, match="not a state dict"):
            ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "ema", type="ema")

    def test_alone_in_a_file_are_the_main_component(self, tmp_path: Path) -> None:
        torch.save({"ema": AVERAGE, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "step": 3}, tmp_path / "checkpoint.pt")
        result = ckpt_cli.merge(tmp_path / "checkpoint.pt", tmp_path / "out")
        assert [output.component for output in result.outputs] == ["ema"]
        assert differences(load(tmp_path / "out"), AVERAGE) == []

    def test_beside_what_may_be_the_model_do_not_become_it(self, tmp_path: Path) -> None:
        torch.save({"ema": AVERAGE, "generator": MODEL}, tmp_path / "checkpoint.pt")
        with pytest.raises(CkptError):
            ckpt_cli.merge(tmp_path / "checkpoint.pt", tmp_path / "out")

    def test_a_parameter_of_such_a_name_is_a_tensor(self, tmp_path: Path) -> None:
        torch.save({**MODEL, "ema": torch.nn.Parameter(torch.ones(3)), "ema_decay": torch.tensor(0.9)}, tmp_path / "model.pt")
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out")
        assert load(tmp_path / "out").keys() == {*MODEL, "ema", "ema_decay"}

    def test_a_file_of_torch_s_averaged_model(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        torch.save(torch.optim.swa_utils.AveragedModel(model).state_dict(), tmp_path / "model.pt")
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out")
        assert differences(load(tmp_path / "out"), dict(model.state_dict())) == []


def with_state(kind: str) -> dict[str, Any]:
    content = io.BytesIO()
    torch.save({"scale_fwd": torch.ones(3)}, content)
    content.seek(0)
    state: Any = content if kind == "BytesIO" else torch.frombuffer(bytearray(b"x" * 40), dtype=torch.uint8)
    return {**MODEL, "layers.0.mlp._extra_state": state, "layers.1.mlp._extra_state": None, "_extra_state": {"recipe": torch.ones(2)}}


@pytest.mark.parametrize("kind", ["tensor", "BytesIO"])
class TestExtraState:
    def check(self, path: Path, out: Path) -> None:
        result = ckpt_cli.merge(path, out, verify=True)
        assert result.exit_code == 0
        assert "extra-state" in codes(result)
        assert differences(load(out), MODEL) == []
        ckpt_cli.average([path, path], out.with_name("mean"))
        assert differences(load(out.with_name("mean")), MODEL) == []
        assert "extra state of modules" in ckpt("merge", path, "-o", out.with_name("again")).out
        assert "_extra_state" in str([leaf.name for leaf in ckpt_cli.inspect(path).checkpoint.components[0].leaves])
        assert ckpt_cli.verify(path).exit_code == 0

    def test_of_a_file_of_torch(self, tmp_path: Path, kind: str) -> None:
        torch.save({"model": with_state(kind)}, tmp_path / "model.pt")
        self.check(tmp_path / "model.pt", tmp_path / "out")

    def test_of_ranks_differs_between_them(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "run").mkdir()
        for rank in range(2):
            held = with_state(kind)
            if kind == "tensor":
                held["layers.0.mlp._extra_state"] = torch.full((30 + rank,), rank, dtype=torch.uint8)
            torch.save(held, tmp_path / "run" / f"model_world_size_2_rank_{rank}.pt")
        self.check(tmp_path / "run", tmp_path / "out")

    def test_of_a_dcp_folder(self, tmp_path: Path, kind: str) -> None:
        import torch.distributed.checkpoint as dcp

        held = {name: value for name, value in with_state(kind).items() if name != "_extra_state"}
        dcp.save({"model": held}, checkpoint_id=tmp_path / "run", no_dist=True)
        self.check(tmp_path / "run", tmp_path / "out")

    def test_of_safetensors(self, tmp_path: Path, kind: str) -> None:
        held = {name: value for name, value in with_state("tensor").items() if isinstance(value, torch.Tensor)}
        (tmp_path / "run").mkdir()
        save_file(held, tmp_path / "run" / "model.safetensors")
        (tmp_path / "run" / "other.txt").write_text(kind)
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert "extra-state" in codes(result)
        assert differences(load(tmp_path / "out"), MODEL) == []


def test_a_file_with_nothing_but_extra_state_holds_no_tensor(tmp_path: Path) -> None:
    save_file({"a._extra_state": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptFile, match="no tensor"):
        ckpt_cli.merge(tmp_path, tmp_path.with_name("out"))
