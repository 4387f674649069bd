"""What is not written is said, and what is written belongs to the model: side files, averages, extra state, bases."""

from __future__ import annotations

import argparse
import fractions
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, NotFound, NotRecognised, Unsupported
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.hub.assets import find_assets
from ckpt_cli.results.written import MergeResult
from tests.architectures import MODELS, build
from tests.cli import ckpt_fork as ckpt
from tests.tensors import differences, load
from tests.training import trained

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
    (folder / "config.json").write_text('{"model_type": "own"}')
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
        assert name in str(ckpt_cli.inspect(folders[0]).checkpoint.notes)
        ckpt_cli.average(folders, tmp_path / "mean")
        assert f"warning: {name} beside" in ckpt("average", *folders, "-o", tmp_path / "again").err

    @pytest.mark.parametrize("name", ["value_head.bin", "v_head.pt", "critic_head.pth", "non_lora_trainables.bin"])
    def test_of_torch_as_well(self, tmp_path: Path, name: str) -> None:
        folder = hub_folder(tmp_path / "run")
        torch.save({"v_head.weight": torch.ones(1, 3)}, folder / name)
        assert "other-weights" in codes(ckpt_cli.merge(folder, tmp_path / "out"), "warning")

    def test_beside_files_of_ranks(self, layouts: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(layouts / "verl-run" / "run" / "global_step_20", tmp_path / "global_step_20"))
        save_file({"v_head.weight": torch.ones(1, 3)}, run / "actor" / "value_head.safetensors")
        assert "other-weights" in codes(ckpt_cli.merge(run, tmp_path / "out"), "warning")
        assert ckpt_cli.verify(run / "actor").format == "rank-shards"

    @pytest.mark.parametrize("name", ["model.fp16.safetensors", "consolidated.safetensors", "consolidated.00.pth", "tf_model.h5"])
    def test_in_another_form_are_no_reason_to_warn(self, tmp_path: Path, name: str) -> None:
        folder = hub_folder(tmp_path / "run")
        save_file({"a": torch.ones(1)}, folder / name) if name.endswith("safetensors") else torch.save({}, folder / name)
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert "other-weights" not in codes(result, "warning")
        assert "other-weights" in codes(result)
        assert name in str(result.checkpoint.notes)

    @pytest.mark.parametrize("name", ["model.fp16.safetensors", "model.bf16.safetensors", "pytorch_model.fp16.bin"])
    @pytest.mark.parametrize("changed", [False, True])
    def test_rounded_are_a_warning_only_with_other_values(self, tmp_path: Path, name: str, changed: bool) -> None:
        folder = hub_folder(tmp_path / "run")
        dtype = torch.bfloat16 if "bf16" in name else torch.float16
        other = {key: (tensor + changed).to(dtype) for key, tensor in MODEL.items()}
        save_file(other, folder / name) if name.endswith("safetensors") else torch.save(other, folder / name)
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert ("other-model" in codes(result, "warning")) is changed
        assert ("other-weights" in codes(result, "info")) is not changed
        found = {item.code for item in ckpt_cli.verify(folder).findings if item.file == name}
        assert found == {"other-model" if changed else "other-weights"}

    @pytest.mark.parametrize("kind", ["one file", "an index"])
    @pytest.mark.parametrize("name", ["value_head.safetensors", "adapter_model.safetensors", "projector.safetensors"])
    def test_are_not_the_model_where_torch_wrote_that(self, tmp_path: Path, name: str, kind: str) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        file = "pytorch_model.bin" if kind == "one file" else "pytorch_model-00001-of-00001.bin"
        torch.save(MODEL, folder / file)
        if kind == "an index":
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(MODEL, file)}))
        save_file({"v_head.weight": torch.ones(1, 3)}, folder / name)
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), MODEL) == []
        assert "other-weights" in codes(result, "warning")
        verified = ckpt_cli.verify(folder)
        assert (verified.format, verified.tensors) == ("torch-file", len(MODEL))

    @pytest.mark.parametrize("name", ["model.safetensors", "model-EMA.safetensors", "model_ema.pt", "swa.pt"])
    def test_that_may_be_other_values_are_a_warning(self, tmp_path: Path, name: str) -> None:
        folder = hub_folder(tmp_path / "run")
        save_file(AVERAGE, folder / name) if name.endswith("safetensors") else torch.save(AVERAGE, folder / name)
        assert codes(ckpt_cli.merge(folder, tmp_path / "out"), "warning") & {"other-weights", "other-model"}

    @pytest.mark.parametrize(
        "name",
        ["pytorch_model.bin", "Model.safetensors", "model_1.safetensors", "checkpoint-100.pt", "step_100.pth", "model.pt", "last.ckpt"],
    )
    def test_that_could_be_the_model_are_a_warning_that_names_both(self, tmp_path: Path, name: str) -> None:
        folder = hub_folder(tmp_path / "run")
        other = {key: tensor + 1 for key, tensor in MODEL.items()}
        save_file(other, folder / name) if name.endswith("safetensors") else torch.save(other, folder / name)
        result = ckpt_cli.merge(folder, tmp_path / "out")
        (note,) = [note for note in result.checkpoint.notes if note.code == "other-model"]
        assert note.level == "warning"
        assert name in note.text
        assert "model.safetensors.index.json" in note.text
        assert differences(load(tmp_path / "out"), MODEL) == []
        assert "other-model" in {note.code for note in ckpt_cli.detect(folder).checkpoint.notes}
        found = [(item.code, item.file, item.severity) for item in ckpt_cli.verify(folder).findings]
        assert ("other-model", name, "warning") in found
        assert name in ckpt("average", folder, folder, "-o", tmp_path / "mean").err

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "Model.safetensors"])
    @pytest.mark.parametrize("changed", ["nothing", "the last value", "one name", "dtype"])
    def test_are_copies_only_by_their_values(self, tmp_path: Path, name: str, changed: str) -> None:
        folder = hub_folder(tmp_path / "run")
        other = {key: tensor.clone() for key, tensor in MODEL.items()}
        if changed == "the last value":
            other["b.weight"][-1] += 1
        elif changed == "one name":
            other["c.weight"] = other.pop("b.weight")
        elif changed == "dtype":
            other["b.weight"] = other["b.weight"].double()
        save_file(other, folder / name) if name.endswith("safetensors") else torch.save(other, folder / name)
        result = ckpt_cli.merge(folder, tmp_path / "out")
        assert ("other-model" in codes(result, "warning")) == (changed != "nothing")
        assert ("other-weights" in codes(result, "info")) == (changed == "nothing")
        found = {item.code for item in ckpt_cli.verify(folder).findings if item.file == name}
        assert found == {"other-weights" if changed == "nothing" else "other-model"}

    def test_of_another_step_beside_files_of_ranks_are_a_warning(self, layouts: Path, tmp_path: Path) -> None:
        run = Path(shutil.copytree(layouts / "verl-run" / "run" / "global_step_20", tmp_path / "global_step_20"))
        torch.save(MODEL, run / "actor" / "pytorch_model.bin")
        result = ckpt_cli.merge(run, tmp_path / "out")
        (note,) = [note for note in result.checkpoint.notes if note.code == "other-model"]
        assert "pytorch_model.bin beside it" in note.text
        assert "model_world_size_" in note.text

    def test_the_index_of_torch_beside_that_of_safetensors_is_looked_at(self, tmp_path: Path) -> None:
        folder = hub_folder(tmp_path / "run")
        torch.save(AVERAGE, folder / "pytorch_model-00001-of-00001.bin")
        index = {"weight_map": dict.fromkeys(MODEL, "pytorch_model-00001-of-00001.bin")}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        result = ckpt_cli.merge(folder, tmp_path / "out")
        (note,) = [note for note in result.checkpoint.notes if note.code == "other-model"]
        assert "pytorch_model.bin.index.json" in note.text
        torch.save(MODEL, folder / "pytorch_model-00001-of-00001.bin")
        assert "other-model" not in codes(ckpt_cli.merge(folder, tmp_path / "again"))

    @pytest.mark.parametrize(
        "name", ["optimizer.bin", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "optimizer.safetensors", "step.pt"]
    )
    def test_that_are_training_state_are_not_weights(self, tmp_path: Path, name: str) -> None:
        folder = hub_folder(tmp_path / "run")
        save_file({"a": torch.ones(1)}, folder / name) if name.endswith("safetensors") else torch.save({}, folder / name)
        assert codes(ckpt_cli.merge(folder, tmp_path / "out")).isdisjoint({"other-weights", "other-model"})


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
    "under a prefix": {**MODEL, **{f"net_ema.module.{name}": tensor for name, tensor in AVERAGE.items()}},
    "params_ema": {"model": MODEL, "params_ema": AVERAGE},
    "capitals": {"model": MODEL, "EMA": {"shadow": AVERAGE, "mu": 0.9}},
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
    @pytest.mark.parametrize("callback", ["EMA", "EMACallback", "ema_weights"])
    def test_in_a_callback_are_listed_once(self, tmp_path: Path, callback: str) -> None:
        torch.save({"state_dict": MODEL, "callbacks": {callback: {"ema": AVERAGE, "decay": 0.9}}}, tmp_path / "model.pt")
        assert [component.name for component in ckpt_cli.detect(tmp_path / "model.pt").checkpoint.components] == ["model", "ema"]
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "ema", type="ema")
        assert differences(load(tmp_path / "ema"), AVERAGE) == []

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

    @pytest.mark.parametrize("index", [False, True])
    def test_of_latent_diffusion_in_safetensors(self, tmp_path: Path, index: bool) -> None:
        tensors = lit_ema(MODEL, AVERAGE)
        if index:
            run = hub_folder(tmp_path / "run", tensors)
        else:
            run = tmp_path / "run"
            run.mkdir()
            save_file(tensors, run / "model.safetensors")
        assert [component.name for component in ckpt_cli.detect(run).checkpoint.components] == ["model", "ema"]
        assert "other-components" in codes(ckpt_cli.merge(run, tmp_path / "out"))
        ckpt_cli.merge(run, tmp_path / "ema", type="ema")
        assert differences(load(tmp_path / "out"), {f"model.{name}": tensor for name, tensor in MODEL.items()}) == []
        assert differences(load(tmp_path / "ema"), {f"model.{name}": tensor for name, tensor in AVERAGE.items()}) == []
        assert not ckpt_cli.verify(tmp_path / "ema", against=run).of_severity("error")

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

    @pytest.mark.parametrize("active", [True, False])
    @pytest.mark.parametrize("form", [dict, list])
    @pytest.mark.parametrize("kind", ["file", "DCP"])
    def test_of_composer_are_exchanged_with_the_model_where_it_says_so(self, tmp_path: Path, kind: str, form: type, active: bool) -> None:
        second = {"named_parameters_dict": MODEL if active else AVERAGE, "named_buffers_dict": {}}
        algorithms = form({"EMA": {"repr": "EMA", "ema_weights_active": active, "ema_model": second}}.items())
        content = {"state": {"model": AVERAGE if active else MODEL, "algorithms": algorithms, "run_name": "x"}}
        path = tmp_path / ("ep1-ba10.pt" if kind == "file" else "ep1-ba10")
        if kind == "file":
            torch.save(content, path)
        else:
            save_dcp(content, checkpoint_id=path, no_dist=True)
        result = ckpt_cli.merge(path, tmp_path / "out")
        assert ("averaged" in codes(result, "warning")) == active
        assert differences(load(tmp_path / "out"), AVERAGE if active else MODEL) == []
        if kind == "DCP" and form is list:
            # An object, of which nothing is read, and which is told once.
            assert len([note for note in result.checkpoint.notes if "state.algorithms" in note.text]) == 1
            return
        other = "current" if active or kind == "DCP" else "ema"
        result = ckpt_cli.merge(path, tmp_path / other, type=other)
        assert differences(load(tmp_path / other), MODEL if active else AVERAGE) == []
        assert ("averaged" in codes(result, "warning")) == (other == "current" and not active)

    @pytest.mark.parametrize("key", ["swa_model", "model_avg", "averaged_model"])
    def test_that_are_no_ema_go_by_their_key(self, tmp_path: Path, key: str) -> None:
        torch.save({"model": MODEL, key: averaged_model(AVERAGE)}, tmp_path / "model.pt")
        assert [component.name for component in ckpt_cli.detect(tmp_path / "model.pt").checkpoint.components] == ["model", key]
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out", type=key)
        assert differences(load(tmp_path / "out"), AVERAGE) == []

    @pytest.mark.parametrize("key", ["teacher", "target_model", "polyak", "discriminator", "value_head"])
    def test_and_other_state_dicts_beside_the_model_are_components(self, tmp_path: Path, key: str) -> None:
        beside = {"metrics": {"accuracy": torch.tensor(0.5)}, "rng_states": {"cpu": torch.ones(4)}, "lr_scheduler": {"t": torch.ones(2)}}
        torch.save({"model": MODEL, key: AVERAGE, **beside}, tmp_path / "model.pt")
        assert [component.name for component in ckpt_cli.detect(tmp_path / "model.pt").checkpoint.components] == ["model", key]
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out", type=key)
        assert differences(load(tmp_path / "out"), AVERAGE) == []
        assert f"--type {key}" in str(ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "model").checkpoint.notes)

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
        ckpt_cli.merge(tmp_path / "checkpoint.pt", tmp_path / "out")
        assert differences(load(tmp_path / "out"), MODEL) == []
        torch.save({"ema": AVERAGE, "generator": MODEL, "discriminator": MODEL}, tmp_path / "checkpoint.pt")
        with pytest.raises(CkptError):
            ckpt_cli.merge(tmp_path / "checkpoint.pt", tmp_path / "several")

    def test_a_parameter_of_such_a_name_is_a_tensor(self, tmp_path: Path) -> None:
        torch.save({**MODEL, "ema": torch.nn.Parameter(torch.ones(3)), "ema_decay": torch.tensor(0.9)}, tmp_path / "model.pt")
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out")
        assert load(tmp_path / "out").keys() == {*MODEL, "ema", "ema_decay"}

    def test_a_file_of_torch_s_averaged_model(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        torch.save(torch.optim.swa_utils.AveragedModel(model).state_dict(), tmp_path / "model.pt")
        ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out")
        assert differences(load(tmp_path / "out"), dict(model.state_dict())) == []


SLOTS = {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]}
QUIET: dict[str, Any] = {
    "optimizer": SLOTS,
    "muon": SLOTS,
    "ema_optimizer": SLOTS,
    "adam": {0: {"exp_avg": torch.ones(2, 3)}},
    "opt_g": {"momentum": torch.ones(2, 3)},
    "lr_scheduler": {"last": torch.ones(2)},
    "cuda_rng": [torch.ones(9, dtype=torch.uint8)],
    "random_states": {"cpu": torch.ones(9, dtype=torch.uint8)},
    "train_dataloader": {"buffer": torch.ones(3, 3)},
    "callbacks": {"Timer": {"seconds": torch.tensor(3.0), "losses": torch.ones(3)}},
    "grad_scaler": {"scale": torch.tensor(1.0)},
    "metrics": {"accuracy": torch.tensor(0.5)},
    "train_losses": {"values": torch.ones(5)},
}


BESIDE: dict[str, dict[str, Any]] = {
    "two vectors": {"mean": torch.zeros(4), "std": torch.ones(4)},
    "a dict of scalars": {"normalizer": {"mean": torch.tensor(1.7), "std": torch.tensor(0.4)}},
    "numpy arrays": {"obs_rms": {"mean": np.zeros(4), "var": np.ones(4), "count": 5.0}},
    "an object": {"target_scaler": fractions.Fraction(1, 3)},
    "plain numbers": {"y_mean": 3.5, "y_std": [1.0, 2.0]},
    "a scalar": {"log_temperature": torch.tensor(0.1)},
    "some with a matrix": {"prototypes": torch.ones(3, 3), "scale": torch.ones(4), "priors": torch.ones(4)},
}


@pytest.mark.parametrize("form", ["file", "ranks"])
class TestWhatLiesBesideTheModel:
    """One content has one answer, as one file and as files of ranks."""

    def save(self, form: str, content: Any, folder: Path, ranks: int = 2) -> Path:
        folder.mkdir(parents=True)
        if form == "file":
            torch.save(content, folder / "model.pt")
            return folder / "model.pt"
        for rank in range(ranks):
            torch.save(content, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        return folder

    def notes(self, result: MergeResult) -> dict[str, str]:
        return {note.code: note.text for note in result.checkpoint.notes}

    def test_is_named_or_a_component(self, tmp_path: Path, form: str) -> None:
        run = self.save(form, {"model": MODEL, "ema": AVERAGE, "queue": torch.zeros(5, 5)}, tmp_path / "run")
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert self.notes(result)["other-components"].endswith("also holds ema (--type ema)")
        assert self.notes(result)["beside-weights"].endswith(": queue")
        assert "beside-weights" in codes(result, "warning")
        assert differences(load(tmp_path / "out"), MODEL) == []
        ckpt_cli.merge(run, tmp_path / "ema", type="ema")
        assert differences(load(tmp_path / "ema"), AVERAGE) == []
        assert [component.name for component in ckpt_cli.detect(run).checkpoint.components] == ["model", "ema"]
        assert ckpt_cli.verify(tmp_path / "ema", against=run).exit_code == 0
        ckpt_cli.average([run, run], tmp_path / "mean", type="ema")
        assert differences(load(tmp_path / "mean"), AVERAGE) == []
        with pytest.raises(CkptError, match="queue"):
            ckpt_cli.merge(run, tmp_path / "strict", strict=True)

    @pytest.mark.parametrize("key", ["best_model_state", "loss", "data", "train", "optimal_model", "extra_state", "random_features"])
    def test_is_a_component_whatever_it_is_called(self, tmp_path: Path, form: str, key: str) -> None:
        other = {"weight": torch.ones(9, 9)}
        run = self.save(form, {"model": MODEL, key: other}, tmp_path / "run")
        said = self.notes(ckpt_cli.merge(run, tmp_path / "out"))
        assert f"--type {key}" in said["other-components" if "model" in key or key in ("loss", "extra_state") else "other-groups"]
        ckpt_cli.merge(run, tmp_path / "other", type=key)
        assert differences(load(tmp_path / "other"), other) == []

    @pytest.mark.parametrize("key", ["generator", "head", "projector", "value_head", "fc", "tokenizer.quantizer"])
    def test_is_a_warning_where_it_may_be_a_part_of_the_model(self, tmp_path: Path, form: str, key: str) -> None:
        run = self.save(form, {"model": MODEL, key: {"c.weight": torch.ones(3, 3)}}, tmp_path / "run")
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert f"{key} (--type {key}), which are not in this component" in self.notes(result)["other-groups"]
        assert "other-groups" in codes(result, "warning")

    @pytest.mark.parametrize(
        "key", ["teacher", "discriminator", "netD", "value_net", "ref_policy", "critic", "lora", "swa_state", "best_model"]
    )
    def test_is_a_row_where_it_is_a_model_of_its_own(self, tmp_path: Path, form: str, key: str) -> None:
        run = self.save(form, {"model": MODEL, key: {"c.weight": torch.ones(3, 3)}}, tmp_path / "run")
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert key in self.notes(result)["other-components"]
        assert not codes(result, "warning") & {"other-groups", "beside-weights"}

    @pytest.mark.parametrize("key", ["head", "projector"])
    def test_is_a_row_where_its_names_are_those_of_the_model(self, tmp_path: Path, form: str, key: str) -> None:
        result = ckpt_cli.merge(self.save(form, {"model": MODEL, key: AVERAGE}, tmp_path / "run"), tmp_path / "out")
        assert "other-groups" not in codes(result)

    @pytest.mark.parametrize("key", BESIDE)
    def test_statistics_are_named(self, tmp_path: Path, form: str, key: str) -> None:
        """They are applied to the inputs or outputs, and the weights mean nothing without them."""
        run = self.save(
            form, {"model": MODEL, **BESIDE[key], "epoch": 3, "best_acc1": torch.tensor(0.7), "val_losses": np.ones(3)}, tmp_path / "run"
        )
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert self.notes(result)["beside-weights"].endswith(f": {', '.join(BESIDE[key])}")
        assert "beside-weights" in codes(result, "warning")
        with pytest.raises(CkptError, match=next(iter(BESIDE[key]))):
            ckpt_cli.merge(run, tmp_path / "strict", strict=True)

    @pytest.mark.parametrize(
        "beside",
        [
            {"epoch": torch.tensor(3), "best_acc1": torch.tensor(0.7), "loss": np.ones(4), "metrics": {"auc": np.ones(2)}},
            {"scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3}, "grad_scaler": {"scale": torch.ones(1)}},
            {"scaler": {}, "scale": None, "norm": "layer", "stats": {}, "mean_loss": 0.3, "train_stats": {"lr": 0.1}},
            {"args": argparse.Namespace(mean=[0.5]), "config": {"image_mean": [0.5]}, "hyper_parameters": {"pos_weight": torch.ones(2)}},
            {
                "generator_state": torch.get_rng_state(),
                "numpy": np.random.RandomState(0).get_state(),
                "cuda_state": torch.ones(9),
                "val_idx": np.ones(3),
            },
            {"time": 3.5, "iter_time": np.ones(3), "history": {"reward": [np.ones(2)]}, "amp": {"loss_scaler0": {"loss_scale": 2.0}}},
        ],
        ids=["results", "a GradScaler", "no numbers", "settings", "generators and data", "logs"],
    )
    def test_numbers_of_a_training_are_not(self, tmp_path: Path, form: str, beside: dict[str, Any]) -> None:
        result = ckpt_cli.merge(self.save(form, {"model": MODEL, **beside}, tmp_path / "run"), tmp_path / "out")
        assert not codes(result) & {"other-components", "other-groups", "beside-weights"}

    @pytest.mark.parametrize(
        "beside",
        [
            {"trainer": {"adam": {"exp_avg": torch.ones(2)}, "critic": AVERAGE}},
            {"replay": [torch.ones(3, 3)]},
            {"callbacks": {"x": {"buffer": torch.ones(3, 3)}}},
        ],
        ids=["a dict of state dicts", "a list", "a callback"],
    )
    def test_is_named_where_it_is_no_state_dict(self, tmp_path: Path, form: str, beside: dict[str, Any]) -> None:
        run = self.save(form, {"model": MODEL, **beside}, tmp_path / "run")
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert self.notes(result)["beside-weights"].endswith(f": {next(iter(beside))}")
        assert differences(load(tmp_path / "out"), MODEL) == []

    def test_is_told_on_every_level(self, tmp_path: Path, form: str) -> None:
        inner = {"state_dict": MODEL, "ema": AVERAGE, "queue": torch.ones(3, 3)}
        run = self.save(form, {"model": inner, "queue": 3, "ema": {"x.weight": torch.ones(7, 7)}}, tmp_path / "run")
        said = self.notes(ckpt_cli.merge(run, tmp_path / "out"))
        assert said["beside-weights"].endswith(": ema, queue")

    def test_of_two_usual_names_both_are_told(self, tmp_path: Path, form: str) -> None:
        run = self.save(form, {"state_dict": MODEL, "model": AVERAGE}, tmp_path / "run")
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert "model (--type other_0)" in self.notes(result)["other-groups"]
        ckpt_cli.merge(run, tmp_path / "other", type="other_0")
        assert differences(load(tmp_path / "other"), AVERAGE) == []

    @pytest.mark.parametrize("key", ["all", "both", "main", "regular", "a name"])
    def test_has_a_name_that_can_be_asked_for(self, tmp_path: Path, form: str, key: str) -> None:
        run = self.save(form, {"model": MODEL, key: AVERAGE}, tmp_path / "run")
        assert f"{key} (--type other_0)" in self.notes(ckpt_cli.merge(run, tmp_path / "out"))["other-components"]
        ckpt_cli.merge(run, tmp_path / "other", type="other_0")
        assert differences(load(tmp_path / "other"), AVERAGE) == []

    def test_is_quiet_about_training_state(self, tmp_path: Path, form: str) -> None:
        run = self.save(form, {"model": MODEL, **QUIET}, tmp_path / "run")
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert not codes(result) & {"other-components", "beside-weights"}
        assert [component.name for component in ckpt_cli.detect(run).checkpoint.components] == ["model"]

    @pytest.mark.parametrize(
        "content",
        [
            {"checkpoint": {"model": {"module": MODEL}}},
            {"a": {"b": {"c": {"d": MODEL}}}},
            {"run": {"net": MODEL, "optimizer": SLOTS}, "step": torch.tensor(3), "counters": {"seen": torch.tensor(4)}},
        ],
        ids=["usual names below", "four levels", "counters beside it"],
    )
    def test_the_only_group_is_found_however_deep(self, tmp_path: Path, form: str, content: Any) -> None:
        run = self.save(form, content, tmp_path / "run")
        assert not codes(ckpt_cli.merge(run, tmp_path / "out"), "warning") & {"beside-weights"}
        assert differences(load(tmp_path / "out"), MODEL) == []

    def test_an_average_below_the_only_group(self, tmp_path: Path, form: str) -> None:
        run = self.save(form, {"checkpoint": {"net": MODEL, "ema": AVERAGE}}, tmp_path / "run")
        ckpt_cli.merge(run, tmp_path / "out", type="ema")
        assert differences(load(tmp_path / "out"), AVERAGE) == []

    def test_two_groups_below_the_only_one_are_refused(self, tmp_path: Path, form: str) -> None:
        run = self.save(form, {"checkpoint": {"left": MODEL, "right": AVERAGE}}, tmp_path / "run")
        with pytest.raises(CkptError, match="left, right"):
            ckpt_cli.merge(run, tmp_path / "out")

    def test_an_entry_that_is_none_stays_a_leaf(self, tmp_path: Path, form: str) -> None:
        run = self.save(form, {"model": {**MODEL, "nothing": None}, "ema": AVERAGE}, tmp_path / "run")
        assert "nothing" in [leaf.name for leaf in ckpt_cli.inspect(run).checkpoint.components[0].leaves]


class TestRanksThatHoldDifferentThings:
    def save(self, folder: Path, *contents: Any) -> Path:
        folder.mkdir()
        for rank, content in enumerate(contents):
            torch.save(content, folder / f"model_world_size_{len(contents)}_rank_{rank}.pt")
        return folder

    def test_a_component_that_a_rank_lacks_is_refused(self, tmp_path: Path) -> None:
        run = self.save(tmp_path / "run", {"model": MODEL, "ema": AVERAGE}, {"model": MODEL})
        assert "other-components" in codes(ckpt_cli.merge(run, tmp_path / "out"), "warning")
        with pytest.raises(Inconsistent, match="rank 1 holds no ema"):
            ckpt_cli.merge(run, tmp_path / "ema", type="ema")

    def test_an_average_is_never_put_together_with_a_model(self, tmp_path: Path) -> None:
        run = self.save(tmp_path / "run", {"model": MODEL}, {"ema": AVERAGE, "step": 3})
        with pytest.raises(Inconsistent, match="rank 1 holds no model"):
            ckpt_cli.merge(run, tmp_path / "out")

    def test_a_matrix_beside_one_of_them_is_told(self, tmp_path: Path) -> None:
        run = self.save(tmp_path / "run", {"model": MODEL}, {"model": MODEL, "queue": torch.ones(3, 3)})
        assert "beside-weights" in codes(ckpt_cli.merge(run, tmp_path / "out"), "warning")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
class TestStatisticsInADcpFolder:
    def merged(self, folder: Path, beside: dict[str, Any]) -> MergeResult:
        save_dcp({"model": MODEL, **beside, "epoch": 3, "best_acc1": 0.7}, checkpoint_id=folder / "run", no_dist=True)
        return ckpt_cli.merge(folder / "run", folder / "out")

    @pytest.mark.parametrize("key", [key for key in BESIDE if key != "some with a matrix"])
    def test_are_named(self, tmp_path: Path, key: str) -> None:
        result = self.merged(tmp_path, BESIDE[key])
        (text,) = [
            note.text for note in result.checkpoint.notes if note.code in ("beside-weights", "other-groups") and note.level == "warning"
        ]
        assert all(name in text for name in BESIDE[key])

    @pytest.mark.parametrize(
        "beside", [{"norm": "layer", "scale": None, "stats": {}}, {"optimizer": SLOTS, "train_stats": {"lr": 0.1}, "scaler": {}}]
    )
    def test_settings_and_results_are_none(self, tmp_path: Path, beside: dict[str, Any]) -> None:
        assert not codes(self.merged(tmp_path, beside)) & {"beside-weights", "other-groups"}

    def test_a_generator_is_a_model_of_its_own_in_gans_only(self, tmp_path: Path) -> None:
        other = {"generator": {"c.weight": torch.ones(3, 3)}}
        assert "other-groups" in codes(self.merged(tmp_path / "decoder", other), "warning")
        result = self.merged(tmp_path / "gan", {**other, "discriminator": {"d.weight": torch.ones(3, 3)}})
        assert "other-groups" not in codes(result)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
class TestAnAverageOfADcpFolder:
    def save(self, folder: Path, content: Any) -> Path:
        import torch.distributed.checkpoint as dcp

        dcp.save(content, checkpoint_id=folder, no_dist=True)
        return folder

    @pytest.mark.parametrize("key", ["ema", "model_ema", "ema_model", "swa_model"])
    def test_is_what_type_ema_means(self, tmp_path: Path, key: str) -> None:
        run = self.save(tmp_path / "run", {"model": MODEL, key: AVERAGE})
        assert f"{key} (--type {key})" in str(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes)
        result = ckpt_cli.merge(run, tmp_path / "ema", type="ema")
        assert differences(load(tmp_path / "ema"), AVERAGE) == []
        assert ("ema-by-name" in codes(result)) == (key != "ema")
        assert ckpt_cli.verify(tmp_path / "ema", against=run).exit_code == 0
        assert [output.component for output in ckpt_cli.merge(run, tmp_path / "all", type="both").outputs] == ["model", key]
        ckpt_cli.merge(run, tmp_path / "from", type="ema", ema_from_model=True)
        assert differences(load(tmp_path / "from"), AVERAGE) == []

    def test_is_asked_for_by_name_where_there_are_several(self, tmp_path: Path) -> None:
        run = self.save(tmp_path / "run", {"model": MODEL, "ema_fast": AVERAGE, "ema_slow": AVERAGE})
        with pytest.raises(NotFound, match="no component ema"):
            ckpt_cli.merge(run, tmp_path / "out", type="ema")

    def test_in_a_callback_is_offered_and_counters_are_not(self, tmp_path: Path) -> None:
        counters = {"callbacks": {"Timer": {"seconds": torch.tensor(3.0)}}, "train_state": {"step": torch.tensor(3)}}
        run = self.save(tmp_path / "run", {"model": MODEL, **counters})
        assert [component.name for component in ckpt_cli.detect(run).checkpoint.components] == ["model"]
        run = self.save(tmp_path / "other", {"model": MODEL, "callbacks": {"EMA": {"ema_weights": AVERAGE}}})
        assert [component.name for component in ckpt_cli.detect(run).checkpoint.components] == ["model", "ema_weights"]


STATE_FILES = ("lr_scheduler.pt", "trainer_state.pt", "sampler.bin", "metrics.pt", "loss-00001-of-00002.pt", "distrib_optim.pt")
WEIGHT_FILES = ("loss_0.31.pt", "trainable_params.bin", "data2vec_base.pt", "random_init.pt", "logits_model.pt", "trained.pt")


class TestFilesCalledLikeTrainingState:
    @pytest.mark.parametrize("name", STATE_FILES)
    def test_are_no_model(self, tmp_path: Path, name: str) -> None:
        torch.save({"_schedulers": [], "x": torch.ones(2), "y": torch.ones(1)}, tmp_path / name)
        with pytest.raises(NotRecognised):
            ckpt_cli.detect(tmp_path / name)

    @pytest.mark.parametrize("name", WEIGHT_FILES)
    def test_are_told_from_weights_with_such_a_beginning(self, tmp_path: Path, name: str) -> None:
        torch.save(MODEL, tmp_path / name)
        ckpt_cli.merge(tmp_path / name, tmp_path / "out")
        assert differences(load(tmp_path / "out"), MODEL) == []

    def test_and_weights_with_such_a_beginning_are_told_beside_a_model(self, tmp_path: Path) -> None:
        folder = hub_folder(tmp_path / "run")
        torch.save(MODEL, folder / "trainable_params.bin")
        assert "trainable_params.bin" in str(ckpt_cli.merge(folder, tmp_path / "out").checkpoint.notes)


def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": MODEL, "ema": AVERAGE}, tmp_path / "model.pt")
    read: list[object] = []
    parse = TorchFile._read
    monkeypatch.setattr(TorchFile, "_read", lambda file: read.append(file) or parse(file))
    ckpt_cli.detect(tmp_path / "model.pt")
    assert len(read) == 1


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

    def test_of_a_dcp_folder_in_parts(self, tmp_path: Path, kind: str) -> None:
        import torch.distributed.checkpoint as dcp

        held = {name.replace("_state", "_state/part_0"): value for name, value in with_state(kind).items() if name != "_extra_state"}
        dcp.save({"model": held}, checkpoint_id=tmp_path / "run", no_dist=True)
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert differences(load(tmp_path / "out"), MODEL) == []

    def test_of_safetensors(self, tmp_path: Path, kind: str) -> None:
        held = {name: value for name, value in with_state("tensor").items() if isinstance(value, torch.Tensor)}
        (tmp_path / "run").mkdir()
        save_file(held, tmp_path / "run" / "model.safetensors")
        (tmp_path / "run" / "other.txt").write_text(kind)
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert "extra-state" in codes(result)
        assert differences(load(tmp_path / "out"), MODEL) == []


def test_what_is_left_out_is_on_the_screen(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "run", {**MODEL, "a._extra_state": torch.ones(2, dtype=torch.uint8)})
    save_file({"a": torch.ones(1)}, folder / "consolidated.safetensors")
    for command in (["merge", folder], ["average", folder, folder]):
        out = " ".join(ckpt(*command, "-o", tmp_path / str(command[0])).out.split())
        assert "left out" in out
        assert "a._extra_state: extra state of modules" in out
        assert "consolidated.safetensors: other weights beside model, not checked" in out


def test_a_config_without_a_dtype_gets_one(tmp_path: Path) -> None:
    ckpt_cli.merge(hub_folder(tmp_path / "run"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "float32", "model_type": "own"}


def test_a_file_with_nothing_but_extra_state_holds_no_tensor(tmp_path: Path) -> None:
    save_file({"a._extra_state": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptFile, match="no tensor"):
        ckpt_cli.merge(tmp_path, tmp_path.with_name("out"))


# -- bases -----------------------------------------------------------------------------------------------------------

QWEN3 = ("Qwen3ForCausalLM", "qwen3", MODELS["qwen2"][2])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two models, and folders that may be passed as their base, all tiny."""
    folder = tmp_path_factory.mktemp("models")
    trained(build(*MODELS["qwen2_5_vl"]), folder / "qwen2_5_vl")
    trained(build(*QWEN3), folder / "qwen3")
    changes: dict[str, dict[str, Any]] = {
        "larger": {"hidden_size": 64, "intermediate_size": 96},
        "deeper": {"num_hidden_layers": 4},
        "vocabulary": {"vocab_size": 80},
    }
    for name, change in changes.items():
        build(*QWEN3[:2], {**QWEN3[2], **change}).save_pretrained(folder / name)
    build(*MODELS["qwen2"]).save_pretrained(folder / "qwen2")
    build(*MODELS["gpt2"]).save_pretrained(folder / "gpt2")
    for saved in (*folder.glob("*/saved"), *(path.parent for path in folder.glob("*/config.json"))):
        (saved / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.usefixtures("asked_here")
class TestAnotherModelAsBase:
    def run(self, models: Path, name: str) -> Path:
        return models / name / "global_step_1"

    @pytest.mark.parametrize("base", ["qwen3/saved", "gpt2", "larger"])
    def test_is_refused_by_merge_and_average_and_an_error_of_verify(self, models: Path, tmp_path: Path, base: str) -> None:
        run = self.run(models, "qwen2_5_vl")
        for options in ({}, {"match_base": True}, {"match_base": True, "fill_missing_from_base": True, "drop_extra": True}):
            with pytest.raises(Inconsistent, match=r"the base is another model: .*\d+ of \d+ tensors") as raised:
                ckpt_cli.merge(run, tmp_path / "out", base=models / base, **options)
            assert "--base" in str(raised.value.hint)
        with pytest.raises(Inconsistent, match="another model"):
            ckpt_cli.average([run, run], tmp_path / "out", base=models / base)
        assert not (tmp_path / "out").exists()
        ckpt_cli.merge(run, tmp_path / "good")
        for path in (tmp_path / "good", run):
            result = ckpt_cli.verify(path, base=models / base)
            assert result.exit_code == 1
            (found,) = [item for item in result.findings if item.code == "other-base"]
            assert int(found.numbers["alike"]) < int(found.numbers["tensors"])

    def test_of_another_size_of_the_family_is_refused(self, models: Path, tmp_path: Path) -> None:
        with pytest.raises(Inconsistent, match="same shape"):
            ckpt_cli.merge(self.run(models, "qwen3"), tmp_path / "out", base=models / "larger")
        assert ckpt_cli.verify(self.run(models, "qwen3"), base=models / "larger").exit_code == 1

    @pytest.mark.parametrize("base", ["qwen3/saved", "vocabulary", "deeper"])
    def test_that_may_be_the_right_one_is_taken(self, models: Path, tmp_path: Path, base: str) -> None:
        """A vocabulary is resized, layers are pruned."""
        run = self.run(models, "qwen3")
        result = ckpt_cli.merge(run, tmp_path / "out", base=models / base)
        assert "tokenizer.json" in result.outputs[0].assets
        assert "other-base" not in codes(result)
        assert "other-base" not in {item.code for item in ckpt_cli.verify(tmp_path / "out", base=models / base).findings}

    def test_may_be_the_language_model_inside(self, models: Path, tmp_path: Path) -> None:
        result = ckpt_cli.merge(self.run(models, "qwen2_5_vl"), tmp_path / "out", base=models / "qwen2")
        assert "other-base" in codes(result, "warning")
        assert "27 of them in the same shape" in str(result.outputs[0].notes)

    def test_of_the_same_shapes_and_another_family_is_told_by_the_configs(self, models: Path, tmp_path: Path) -> None:
        base = Path(shutil.copytree(models / "vocabulary", tmp_path / "base"))
        content = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**content, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
        with pytest.raises(Inconsistent, match="qwen3 and mistral"):
            ckpt_cli.merge(self.run(models, "qwen3"), tmp_path / "out", base=base)

    def test_of_which_nothing_is_taken_is_a_warning(self, models: Path, tmp_path: Path) -> None:
        (tmp_path / "base").mkdir()
        for path in (models / "larger").glob("model*.safetensors"):
            shutil.copy(path, tmp_path / "base")
        result = ckpt_cli.merge(self.run(models, "qwen3"), tmp_path / "out", base=tmp_path / "base", compare=True)
        assert "other-base" in codes(result, "warning")

    def test_without_weights_is_doubted_by_its_config(self, models: Path, tmp_path: Path) -> None:
        (tmp_path / "base").mkdir()
        for path in (models / "larger").glob("*.json"):
            shutil.copy(path, tmp_path / "base")
        result = ckpt_cli.merge(self.run(models, "qwen3"), tmp_path / "out", base=tmp_path / "base")
        assert any("hidden_size" in note.text for note in result.outputs[0].notes if note.code == "other-base")

    @pytest.mark.parametrize(("base", "fits"), [("qwen3/saved", True), ("gpt2", False), ("larger", False)])
    def test_that_is_quantised_is_told_by_its_norms(self, models: Path, tmp_path: Path, base: str, fits: bool) -> None:
        folder = Path(shutil.copytree(models / base, tmp_path / "base"))
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, "quantization_config": {"quant_method": "gptq"}}))
        tensors = {
            name.replace(".weight", ".qweight"): torch.ones(4, 4, dtype=torch.int32) if tensor.dim() == 2 else tensor
            for name, tensor in load(folder).items()
        }
        norms = {name: tensor for name, tensor in load(folder).items() if tensor.dim() == 1}
        save_file({**tensors, **norms}, folder / "model.safetensors")
        if fits:
            ckpt_cli.merge(self.run(models, "qwen3"), tmp_path / "out", base=folder)
        else:
            with pytest.raises(Inconsistent, match="another model"):
                ckpt_cli.merge(self.run(models, "qwen3"), tmp_path / "out", base=folder)

    def test_names_of_memory_and_of_the_hub_are_one_model(self, models: Path, tmp_path: Path) -> None:
        run, base = self.run(models, "qwen2_5_vl"), models / "qwen2_5_vl" / "saved"
        ckpt_cli.merge(run, tmp_path / "native", names="native")
        ckpt_cli.merge(run, tmp_path / "out", names="native", base=base)
        assert "other-base" not in {item.code for item in ckpt_cli.verify(tmp_path / "native", base=base).findings}

    def test_names_of_a_trainer_are_a_warning(self, models: Path, tmp_path: Path) -> None:
        """torchtitan's and others': the shapes are those of the base, and the names are not."""
        tensors = load(models / "qwen3" / "saved")
        (tmp_path / "run").mkdir()
        save_file({f"net.{name.replace('proj', 'w')}": tensor for name, tensor in tensors.items()}, tmp_path / "run" / "model.safetensors")
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=models / "qwen3" / "saved", names="native")
        assert "--key-map" in str([note.text for note in result.outputs[0].notes if note.code == "other-base"])
        found = ckpt_cli.verify(tmp_path / "run", base=models / "qwen3" / "saved")
        assert "other-names" in {item.code for item in found.of_severity("warning")}

    def test_filters_do_not_make_another_model_of_it(self, models: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(self.run(models, "qwen3"), tmp_path / "out", base=models / "vocabulary", include="*embed_tokens*")

    def test_of_adapters_is_refused_as_well(self, layouts: Path, models: Path, tmp_path: Path) -> None:
        run = layouts / "verl-lora" / "lora_only"
        for mode in ("export", "fuse"):
            with pytest.raises(CkptError, match=r"another model|not here|do not fit"):
                ckpt_cli.merge(run, tmp_path / "out", base=models / "larger", lora=mode)


class TestWhatABaseGives:
    NAMES = (
        "consolidated.safetensors", "model.fp16.safetensors", "model.bf16.safetensors", "adapter_model.safetensors",
        "value_head.safetensors", "unrelated.safetensors", "ae.safetensors", "pytorch_model.bin", "model.gguf", "model.onnx",
        "model.onnx_data", "rust_model.ot", "adapter_config.json", "model.safetensors.index.fp16.json", "trainer_state.json",
        "zero_to_fp32.py", "weights.tar", "fsdp_config.json", "latest", "latest_checkpointed_iteration.txt", "training_args.yaml",
        "args.json", "trainer_log.jsonl", "train.log", "ds_config.json",
    )  # fmt: skip

    def test_are_assets_and_never_its_weights_in_another_form(self, tmp_path: Path) -> None:
        base, run = hub_folder(tmp_path / "base"), hub_folder(tmp_path / "run")
        for name in self.NAMES:
            save_file({"a": torch.ones(1)}, base / name) if name.endswith(".safetensors") else (base / name).write_text("{}")
        (base / "tokenizer.json").write_text("{}")
        (base / "params.json").write_text("{}")
        ckpt_cli.merge(run, tmp_path / "out", base=base)
        ckpt_cli.average([run, run], tmp_path / "mean", base=base)
        for out in (tmp_path / "out", tmp_path / "mean"):
            written = {path.name for path in out.iterdir()}
            assert written == {"model.safetensors", "config.json", "tokenizer.json", "params.json", "ckpt-manifest.json"}

    def test_are_assets_of_its_huggingface_folder_and_nothing_of_the_training_around_it(self, layouts: Path, tmp_path: Path) -> None:
        run, base = hub_folder(tmp_path / "run"), layouts / "verl-run" / "run" / "global_step_20" / "actor"
        (run / "config.json").unlink()
        actor = Path(shutil.copytree(base, tmp_path / "actor"))
        (actor / "what_some_trainer_writes.json").write_text("{}")
        opened = find_assets([run], actor)
        assert set(opened.files) == {path.name for path in (base / "huggingface").iterdir()}
        assert opened.config == json.loads((base / "huggingface" / "config.json").read_text())

    def test_is_the_image_decoder_of_bagel(self, layouts: Path, tmp_path: Path) -> None:
        fork, base = layouts / "bagel-runs" / "fork_dcp", tmp_path / "base"
        shutil.copytree(layouts / "bagel-runs" / "base", base)
        save_file({"a": torch.ones(1)}, base / "consolidated.safetensors")
        result = ckpt_cli.merge(fork, tmp_path / "out", base=base)
        assert "ae.safetensors" in result.outputs[0].assets
        assert "consolidated.safetensors" not in result.outputs[0].assets
        ckpt_cli.average([fork, fork], tmp_path / "mean", base=base)
        assert (tmp_path / "mean" / "ae.safetensors").read_bytes() == (base / "ae.safetensors").read_bytes()


class TestABaseThatIsARun:
    """Its weights lie in folders below, and none of them is taken for the model that training started from."""

    TOLD = "the base has its weights in folders below"

    @pytest.mark.parametrize("below", ["", "global_step_20"])
    @pytest.mark.parametrize("options", [{"dtype": "base"}, {"match_base": True}, {"compare": True}])
    def test_is_merged_first(self, layouts: Path, tmp_path: Path, below: str, options: dict[str, Any]) -> None:
        run = layouts / "verl-run" / "run"
        with pytest.raises(NotFound) as caught:
            ckpt_cli.merge(run / "global_step_10", tmp_path / "out", type="actor", base=run / below, **options)
        assert caught.value.message == self.TOLD
        ckpt_cli.merge(run / below, tmp_path / "base")
        ckpt_cli.merge(run / "global_step_10", tmp_path / "out", type="actor", base=tmp_path / "base", **options)

    def test_is_compared_with_nothing_which_is_said(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "verl-run" / "run"
        done = ckpt_cli.merge(run / "global_step_10", tmp_path / "out", type="actor", base=run)
        assert any(note.code == "base-unread" and self.TOLD in note.text for note in done.outputs[0].notes)

    @pytest.mark.parametrize("weights", [False, True])
    def test_is_no_base_of_adapters_alone(self, layouts: Path, tmp_path: Path, weights: bool) -> None:
        base = layouts / "verl-run" / "run" if weights else tmp_path
        (tmp_path / "config.json").write_text('{"model_type": "own"}')
        with pytest.raises(NotFound, match=self.TOLD if weights else "the base has no weights"):
            ckpt_cli.merge(layouts / "verl-lora" / "lora_only", tmp_path / "out", base=base)


class TestCustomCode:
    """Of Python files, those that a config refers to, and what these import."""

    def written(self, run: Path, out: Path, **options: Any) -> set[str]:
        ckpt_cli.merge(run, out, **options)
        return {path.name for path in out.glob("*.py")}

    @pytest.mark.parametrize("name", ["zero_to_fp32.py", "train.py", "handler.py", "custom_processing.py"])
    def test_is_no_script_that_lies_around(self, tmp_path: Path, name: str) -> None:
        run = hub_folder(tmp_path / "run")
        (run / name).write_text("import torch")
        assert self.written(run, tmp_path / "out") == set()
        base = Path(shutil.copytree(run, tmp_path / "base"))
        (run / name).unlink()
        assert self.written(run, tmp_path / "again", base=base) == set()

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("config.json", {"auto_map": {"AutoModel": "modeling_x.X", "AutoConfig": None}}),
            ("config.json", {"text_config": {"auto_map": {"AutoModel": "org/name--modeling_x.X"}}}),
            ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["modeling_x.X", None]}}),
            ("preprocessor_config.json", {"auto_map": {"AutoProcessor": "modeling_x.X"}}),
            ("config.json", {"custom_pipelines": {"x": {"impl": "modeling_x.X"}}}),
            ("modules.json", [{"idx": 0, "type": "modeling_x.X"}]),
        ],
    )
    def test_is_what_a_config_refers_to_and_what_that_imports(self, tmp_path: Path, file: str, content: Any) -> None:
        run = hub_folder(tmp_path / "run")
        (run / file).write_text(json.dumps(content))
        (run / "modeling_x.py").write_text("from .layers import (\n a,\n b)\nfrom . import (config_x,\n  others as o)\nimport json\n")
        (run / "layers.py").write_text("    from .deeper.inside import z  # noqa\n")
        for name in ("config_x.py", "others.py", "deeper.py", "json.py", "zero_to_fp32.py"):
            (run / name).write_text("x = 1")
        wanted = {"modeling_x.py", "layers.py", "config_x.py", "others.py", "deeper.py"}
        assert self.written(run, tmp_path / "out") == wanted
        base = Path(shutil.copytree(run, tmp_path / "base"))
        assert self.written(hub_folder(tmp_path / "plain"), tmp_path / "again", base=base) == wanted

    def test_of_a_base_that_the_run_refers_to(self, tmp_path: Path) -> None:
        run, base = hub_folder(tmp_path / "run"), hub_folder(tmp_path / "base")
        (run / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_x.X"}}))
        (base / "modeling_x.py").write_text("")
        assert self.written(run, tmp_path / "out", base=base) == {"modeling_x.py"}

    @pytest.mark.parametrize("content", ["{", "[1]", '{"auto_map": 3}', '{"auto_map": {"a": {"b": []}}}', '{"auto_map": "../../evil.X"}'])
    def test_is_nothing_where_a_config_makes_no_sense(self, tmp_path: Path, content: str) -> None:
        run = hub_folder(tmp_path / "run")
        (run / "tokenizer_config.json").write_text(content)
        (run / "evil.py").write_text("")
        assert self.written(run, tmp_path / "out") == set()
