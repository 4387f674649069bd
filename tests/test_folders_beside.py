"""Which folder holds the model where several hold weights: one of a row, the only one that could be meant, or none; others are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.discover.beside.folders import kind_of
from ckpt_cli.discover.tags import MAX_TAGS
from ckpt_cli.errors import CkptError, NotFound, Undecidable
from ckpt_cli.results.checkpoint import NoteInfo
from tests.conftest import Copy
from tests.tensors import load

STEP = "step_10"


def model(folder: Path, value: float = 1.0, name: str = "w") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"{name}.weight": torch.full((4, 4), value), f"{name}.bias": torch.ones(4)}, folder / "model.safetensors")
    return folder


def put(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * 99)
    return file


def value_of(folder: Path) -> float:
    return float(next(tensor for name, tensor in load(folder).items() if name.endswith("weight"))[0, 0])


COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "inspect": lambda path, _: ckpt_cli.inspect(path),
    "merge": ckpt_cli.merge,
    "average": lambda path, out: ckpt_cli.average([path, path], out),
    "verify": lambda path, _: ckpt_cli.verify(path),
    "verify --against": lambda path, out: ckpt_cli.verify(model(out), against=path),
    "extract-state": lambda path, out: ckpt_cli.extract_state(path, out, optimizer=True),
    "diff": lambda path, out: ckpt_cli.diff(path, shutil.copytree(path, out / path.name)),
    "show": lambda path, _: ckpt_cli.show(path, "w.weight"),
    "open": lambda path, _: ckpt_cli.open(path),
    "load": lambda path, _: ckpt_cli.load_state_dict(path),
}


def told(notes: tuple[NoteInfo, ...], code: str = "other-folders") -> list[tuple[str, str]]:
    return [(note.level, note.text) for note in notes if note.code == code]


def warnings(path: Path) -> list[str]:
    return [f"{note.code}: {note.text}" for note in ckpt_cli.detect(path).checkpoint.notes if note.level == "warning"]


UNREAD = [
    "online/model.msgpack",
    "online/model.gguf",
    "online/weights.npz",
    "online/model.h5",
    "online/model.onnx",
    "online/model.tflite",
    "online/ckpt-5.index",
    "online/ckpt-5.data-00000-of-00001",
    "new/model.safetensors.tmp",
    "new/.model.safetensors.Xa81Kd",
    "new/__0_0.distcp",
    "new/pytorch_model.bin.incomplete",
    "new/deeper/flax_model.msgpack",
    "a/b/c/d/model.msgpack",
    "new/agent.pt",
    "policy/model.msgpack",
    "policy.msgpack",
    "model.safetensors.part",
    "agent.pth",
    "params.pkl",
]
GUESSED = ["net", "my_model", "target_net", "previous", "old"]


class TestAdaptersBelow:
    """Adapters in folders of the folder that is merged are named, however deep they lie and whatever lies around them."""

    @staticmethod
    def adapter(folder: Path, *, config: bool = True, value: float = 1.0) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        factors = {f"base_model.model.w.lora_{part}.weight": torch.full((4, 4), value) for part in "AB"}
        save_file(factors, folder / "adapter_model.safetensors")
        if config:
            (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["w"]}))
        return folder

    @pytest.mark.parametrize("name", ["sub", "adapters/sft", "lora/x/default"])
    @pytest.mark.parametrize("config", [True, False])
    def test_are_named(self, tmp_path: Path, name: str, config: bool) -> None:
        run = model(tmp_path / "run")
        self.adapter(run / name, config=config)
        for notes in (ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, ckpt_cli.verify(run).notes):
            ((level, text),) = told(notes, "adapters-beside")
            assert (level, name in text) == ("warning", True)

    @pytest.mark.parametrize("name", ["reference", "more/second"])
    def test_are_named_beside_adapters(self, tmp_path: Path, name: str) -> None:
        run = self.adapter(tmp_path / "run")
        self.adapter(run / name, value=2.0)
        assert name in told(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, "adapters-beside")[0][1]

    @pytest.mark.parametrize("name", ["checkpoint-5", "lora_adapter", "logs/adapter"])
    def test_of_steps_and_of_the_same_weights_are_not(self, tmp_path: Path, name: str) -> None:
        run = self.adapter(tmp_path / "run" / "checkpoint-10")
        self.adapter(run / name)
        assert not told(ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes, "adapters-beside")


class TestAGuess:
    """A model in a folder that no trainer's row names."""

    @pytest.mark.parametrize("file", UNREAD)
    def test_is_refused_beside_what_is_not_read(self, tmp_path: Path, file: str) -> None:
        for name in GUESSED:
            step = tmp_path / name / STEP
            model(step / name)
            put(step / file)
            for path in (step.parent, step):
                with pytest.raises(Undecidable) as caught:
                    ckpt_cli.merge(path, tmp_path / "out")
                assert str(step / name) in (caught.value.hint or "").removeprefix("give the folder you mean: ").split(", ")
                assert f"{name}/" in caught.value.message
                found = file if "/" not in file else f"{Path(file).parent}/"
                assert found in caught.value.message, name

    @pytest.mark.parametrize("command", COMMANDS)
    def test_is_refused_in_every_command(self, tmp_path: Path, command: str) -> None:
        step = tmp_path / "run" / STEP
        model(step / "target_net")
        put(step / "online" / "model.msgpack")
        with pytest.raises(CkptError) as caught:
            COMMANDS[command](step, tmp_path / "out")
        assert isinstance(caught.value, Undecidable)
        assert ckpt_cli.detect(step).problem == caught.value.message

    def test_of_the_newest_step_is_not_passed_over(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        model(run / "step_10" / "net")
        model(run / "step_20" / "net")
        model(run / "step_20" / "net2")
        for refused in (lambda: ckpt_cli.merge(run, tmp_path / "out"), lambda: ckpt_cli.average(run, tmp_path / "out", everything=True)):
            with pytest.raises(Undecidable, match="net/, net2/"):
                refused()
        ckpt_cli.merge(run, tmp_path / "out", step=10)

    def test_may_be_followed_by_its_hint(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / STEP
        model(step / "net", 2.0)
        put(step / "old" / "model.gguf")
        result = ckpt_cli.merge(step / "net", tmp_path / "out")
        assert (value_of(tmp_path / "out"), result.checkpoint.step) == (2.0, 10)
        assert told(result.checkpoint.notes) == []

    @pytest.mark.parametrize(
        "name",
        [
            "old",
            "previous",
            "prev",
            "backup",
            "model.bak",
            "target",
            "target_net",
            "targetNet",
            "discriminator",
            "teacher",
            "draft_model",
            "ref",
            "reference",
            "ref_policy",
            "old-policy",
            "backup_2",
            "critic_target",
            "my_old_model",
            "tmp",
            "model copy",
            "vision_encoder",
        ],
    )
    def test_is_never_a_folder_of_another_model_or_an_older_copy(self, tmp_path: Path, name: str) -> None:
        model(tmp_path / "run" / STEP / name)
        model(tmp_path / "single" / name)
        for path in (tmp_path / "run", tmp_path / "run" / STEP, tmp_path / "single"):
            with pytest.raises(Undecidable, match="the only weights in") as caught:
                ckpt_cli.merge(path, tmp_path / "out")
            assert name in (caught.value.hint or "")
        ckpt_cli.merge(tmp_path / "single" / name, tmp_path / "out")

    @pytest.mark.parametrize("name", ["net", "gold", "threshold", "refined", "preview", "folded", "criticality", "basement", "bert-base"])
    def test_is_not_prevented_by_a_name_that_only_looks_like_one(self, name: str) -> None:
        assert kind_of(name) == "model"

    @pytest.mark.parametrize(
        "file",
        [
            "optimizer.pt",
            "optimizer/model.safetensors",
            "rng_state_0.pth",
            "random_states_0.pkl",
            "training_args.bin",
            "logs/a.npz",
            "sampler.bin",
            "dl_state_dict.bin",
            "custom_checkpoint_0.pkl",
            "replay_buffer.pt",
            "meta.pt",
            "args.pt",
            "norm_stats.npz",
            "dataloader/rank_0.pt",
            "tokenizer/tokenizer.bin",
            "trainer_state.json",
            "model.safetensors.index.json.bak.txt",
            "README.md",
            "data/part.npz",
        ],
    )
    def test_is_not_prevented_by_training_state(self, tmp_path: Path, file: str) -> None:
        step = tmp_path / "run" / STEP
        model(step / "net", 3.0)
        put(step / file)
        ckpt_cli.merge(step.parent, tmp_path / "out")
        assert value_of(tmp_path / "out") == 3.0
        assert warnings(step) == []

    def test_is_not_prevented_by_an_output_of_ckpt(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / STEP
        model(step / "net", 3.0)
        ckpt_cli.merge(step, tmp_path / "merged")
        shutil.copytree(tmp_path / "merged", step / "merged")
        ckpt_cli.merge(step, tmp_path / "out")
        assert warnings(step) == []

    def test_is_refused_where_a_row_s_name_is_in_no_step(self, tmp_path: Path) -> None:
        model(tmp_path / "some" / "weights")
        put(tmp_path / "some" / "net" / "model.gguf")
        with pytest.raises(Undecidable):
            ckpt_cli.merge(tmp_path / "some", tmp_path / "out")

    def test_does_not_hide_the_nodes_of_a_save(self, copy: Copy, tmp_path: Path) -> None:
        step = tmp_path / "global_step_10"
        source = copy("layouts", "verl-run", "run") / "global_step_10" / "actor"
        for rank in range(4):
            folder = step / f"host{'ab'[rank // 2]}"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / f"model_world_size_4_rank_{rank}.pt", folder)
        assert ckpt_cli.detect(step).problem is None

    @pytest.mark.parametrize("beside", ["online.msgpack", "policy.pt", "online/model.gguf", "online/model.safetensors"])
    @pytest.mark.parametrize("name", ["target_net", "previous", "discriminator"])
    def test_by_the_name_of_a_file_is_refused_too(self, tmp_path: Path, name: str, beside: str) -> None:
        for folder in (tmp_path / "run" / STEP, tmp_path / "some"):
            model(folder).joinpath("model.safetensors").rename(folder / f"{name}.safetensors")
            ckpt_cli.detect(folder)
            put(folder / beside)
            with pytest.raises(Undecidable, match="nothing tells which"):
                ckpt_cli.merge(folder, tmp_path / "out")
            ckpt_cli.inspect(folder / f"{name}.safetensors")

    def test_by_the_name_of_an_index_is_refused_too(self, tmp_path: Path) -> None:
        folder = tmp_path / "run" / STEP
        model(folder).joinpath("model.safetensors").rename(folder / "old-00001-of-00001.safetensors")
        weights = {"w.weight": "old-00001-of-00001.safetensors", "w.bias": "old-00001-of-00001.safetensors"}
        (folder / "old.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        assert ckpt_cli.detect(folder).problem is None
        put(folder / "online.msgpack")
        with pytest.raises(Undecidable, match=r"old\.safetensors\.index\.json, online\.msgpack"):
            ckpt_cli.merge(folder, tmp_path / "out")

    def test_is_not_prevented_by_links_to_the_same_folder(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / STEP
        model(step / "net", 4.0)
        (step / "latest").symlink_to("net")
        (step / "a_link").symlink_to("net")
        (step / "itself").symlink_to(".")
        ckpt_cli.merge(step.parent, tmp_path / "out")
        assert value_of(tmp_path / "out") == 4.0
        assert warnings(step) == []

    def test_of_pipelines_of_diffusers_is_refused(self, tmp_path: Path) -> None:
        for name in ("unet", "vae", "text_encoder"):
            model(tmp_path / "pipeline" / name)
        (tmp_path / "pipeline" / "model_index.json").write_text("{}")
        with pytest.raises(Undecidable, match="unet/, text_encoder/, vae/"):
            ckpt_cli.merge(tmp_path / "pipeline", tmp_path / "out")
        ckpt_cli.merge(tmp_path / "pipeline" / "unet", tmp_path / "out")

    def test_is_not_said_of_a_file_that_was_given(self, tmp_path: Path) -> None:
        torch.save({"w.weight": torch.ones(4, 4)}, put(tmp_path / "m.pt"))
        torch.save({"w.weight": torch.ones(4, 4)}, put(tmp_path / "n.pt"))
        model(tmp_path / "some")
        for file in (tmp_path / "m.pt", tmp_path / "n.pt", tmp_path / "some" / "model.safetensors"):
            assert told(ckpt_cli.detect(file).checkpoint.notes, "between") == []


PARTS = [
    ("weights", "projector"),
    ("weights", "vision_encoder"),
    ("modeling", "modeling_1"),
    ("weights", "weights_vision"),
    ("model", "rank_1"),
]


class TestACritic:
    """Or another second model, where the folder of the first one has no usual name."""

    def test_is_not_taken_for_the_model_beside_it(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / STEP
        model(step / "critic", 1.0)
        model(step / "weights", 2.0)
        for path in (step, step.parent):
            assert [info.name for info in ckpt_cli.detect(path).checkpoint.components] == ["model", "critic"]
            assert warnings(path) == []
        ckpt_cli.merge(step, tmp_path / "out")
        assert value_of(tmp_path / "out") == 2.0

    @pytest.mark.parametrize("file", ["actor/model.msgpack", "policy/model.safetensors.tmp", "generator.pt", "net/model.gguf"])
    @pytest.mark.parametrize("where", ["run/step_10", "some"])
    def test_is_not_taken_for_one_that_is_not_read(self, tmp_path: Path, file: str, where: str) -> None:
        folder = tmp_path / where
        model(folder / "critic")
        put(folder / file)
        with pytest.raises(Undecidable, match="critic/"):
            ckpt_cli.merge(folder, tmp_path / "out")
        ckpt_cli.merge(folder / "critic", tmp_path / "out")

    @pytest.mark.parametrize("name", ["ema/model.safetensors", "Model_EMA/model.safetensors", "ema.safetensors"])
    def test_neither_is_an_average(self, tmp_path: Path, name: str) -> None:
        step = tmp_path / "run" / STEP
        (step / name).parent.mkdir(parents=True)
        save_file({"w.weight": torch.full((4, 4), 5.0)}, step / name)
        assert [info.name for info in ckpt_cli.detect(step).checkpoint.components] == ["ema"]
        put(step / "net" / "model.gguf")
        for path in (step, step.parent):
            with pytest.raises(Undecidable, match="net/"):
                ckpt_cli.merge(path, tmp_path / "out")
        ckpt_cli.merge(step, tmp_path / "out", type="ema")
        assert value_of(tmp_path / "out") == 5.0

    def test_alone_is_read(self, tmp_path: Path) -> None:
        model(tmp_path / "run" / STEP / "critic")
        assert [info.name for info in ckpt_cli.detect(tmp_path / "run").checkpoint.components] == ["critic"]


PARTS = [
    ("weights", "projector"),
    ("weights", "vision_encoder"),
    ("modeling", "modeling_1"),
    ("weights", "weights_vision"),
    ("model", "rank_1"),
]


class TestFoldersThatAreLeftOut:
    """A model in several folders, of which one is read."""

    def step(self, tmp_path: Path, first: str, second: str) -> Path:
        step = tmp_path / "run" / STEP
        model(step / first)
        model(step / second, name="v")
        return step

    @pytest.mark.parametrize(("first", "second"), PARTS)
    def test_are_named(self, tmp_path: Path, first: str, second: str) -> None:
        step = self.step(tmp_path, first, second)
        for path in (step.parent, step):
            ((level, text),) = told(ckpt_cli.detect(path).checkpoint.notes)
            assert level == "warning"
            assert text.startswith(f"{second}/ holds weights too, and was not read")

    @pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("extract-state", "load")])
    def test_are_named_by_every_command_that_reads_weights(self, tmp_path: Path, command: str) -> None:
        result = COMMANDS[command](self.step(tmp_path, "weights", "projector"), tmp_path / "out")
        notes = [*getattr(result, "notes", ()), *getattr(getattr(result, "checkpoint", None), "notes", ())]
        notes += [note for side in ("first", "second") for note in getattr(getattr(result, side, None), "notes", ())]
        assert any("projector/ holds weights too" in note.text and note.level == "warning" for note in notes), result

    def test_that_are_not_read_are_named_too(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / STEP
        model(step / "weights")
        put(step / "projector" / "model.msgpack")
        ((level, text),) = told(ckpt_cli.detect(step).checkpoint.notes)
        assert (level, text.split("/")[0]) == ("warning", "projector")

    def test_below_weights_that_lie_right_in_the_step_are_named(self, tmp_path: Path) -> None:
        step = model(tmp_path / "run" / STEP)
        model(step / "vision_tower", name="v")
        for notes in (
            ckpt_cli.detect(step).checkpoint.notes,
            ckpt_cli.verify(step).notes,
            ckpt_cli.merge(step, tmp_path / "out").checkpoint.notes,
        ):
            ((level, text),) = told(notes)
            assert (level, text.split("/")[0]) == ("warning", "vision_tower")

    def test_beside_a_role_are_named(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / STEP
        model(step / "actor")
        model(step / "projector", name="v")
        ((level, text),) = told(ckpt_cli.detect(step.parent).checkpoint.notes)
        assert (level, text.split("/")[0]) == ("warning", "projector")
        assert told(ckpt_cli.detect(step / "actor").checkpoint.notes) == []

    def test_of_a_role_are_named(self, tmp_path: Path) -> None:
        policy = tmp_path / "run" / STEP / "policy"
        model(policy / "weights" / "model")
        model(policy / "weights" / "model_head", name="h")
        for path in (policy.parent.parent, policy.parent, policy, policy / "weights"):
            ((_, text),) = told(ckpt_cli.detect(path).checkpoint.notes)
            assert "weights/model_head/ holds" in text or text.startswith("model_head/ holds"), path
        assert told(ckpt_cli.detect(policy / "weights" / "model").checkpoint.notes) == []

    def test_beside_a_folder_that_was_given_are_its_own_matter(self, tmp_path: Path) -> None:
        step = self.step(tmp_path, "weights", "projector")
        assert warnings(step / "weights") == []
        model(tmp_path / "models" / "one")
        model(tmp_path / "models" / "one_1", name="v")
        assert warnings(tmp_path / "models" / "one") == []

    def test_beside_a_folder_that_was_given_are_named_if_called_like_another_part(self, tmp_path: Path) -> None:
        step = self.step(tmp_path, "modeling", "modeling_1")
        ((level, text),) = told(ckpt_cli.detect(step / "modeling").checkpoint.notes)
        assert (level, text.split("/")[0]) == ("warning", "modeling_1")

    def test_with_the_same_tensors_are_compared(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / STEP
        for name, value in (("weights", 1.0), ("same", 1.0), ("other", 2.0)):
            model(step / name, value)
        notes = told(ckpt_cli.detect(step).checkpoint.notes)
        assert [(level, "same weights" in text, "other values" in text) for level, text in sorted(notes)] == [
            ("info", True, False),
            ("warning", False, True),
        ]

    def test_that_are_another_model_by_name_are_a_note(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / STEP
        model(step / "weights")
        model(step / "ref", name="v")
        model(step / "target_net")
        ((level, text),) = told(ckpt_cli.detect(step).checkpoint.notes)
        assert level == "info"
        assert text.startswith("ref/, target_net/ hold weights too")

    @pytest.mark.parametrize(
        "beside",
        [
            "onnx/model.onnx",
            "openvino/model.bin",
            "optimizer_0/__0_0.distcp",
            "global_step10/a.txt",
            "checkpoint-5/model.safetensors",
            "runs/x/model.safetensors",
            "tokenizer/tokenizer.json",
            "1_Pooling/config.json",
            "critic/model.msgpack",
            "eval/preds.npz",
        ],
    )
    def test_are_none_in_usual_folders(self, tmp_path: Path, beside: str) -> None:
        step = model(tmp_path / "run" / "checkpoint-10")
        put(step / beside)
        assert told(ckpt_cli.detect(step).checkpoint.notes) == []

    def test_are_a_note_beside_an_adapter_if_called_like_a_reference(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / "checkpoint-5"
        model(step / "ref")
        (step / "adapter_config.json").write_text("{}")
        factors = {"base_model.model.q.lora_A.weight": torch.ones(2, 3), "base_model.model.q.lora_B.weight": torch.ones(3, 2)}
        save_file(factors, step / "adapter_model.safetensors")
        assert [level for level, _ in told(ckpt_cli.detect(step).checkpoint.notes)] == ["info"]

    def test_are_none_where_they_are_components_or_adapters(self, tmp_path: Path) -> None:
        step = tmp_path / "run" / "global_step_7"
        for seed, name in enumerate(("weights", "ema_model", "critic")):
            dcp.save({"w": torch.full((3, 3), float(seed))}, checkpoint_id=str(step / name), no_dist=True)
        (model(step / "lora_adapter") / "adapter_config.json").write_text("{}")
        (step / "lora_adapter" / "model.safetensors").rename(step / "lora_adapter" / "adapter_model.safetensors")
        for path in (step, step.parent):
            assert told(ckpt_cli.detect(path).checkpoint.notes) == []


class TestTheHubCache:
    A, B = "a" * 40, "b" * 40

    def repository(self, tmp_path: Path, name: str = "m") -> Path:
        repository = tmp_path / "hub" / f"models--org--{name}"
        model(repository / "snapshots" / self.A)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(self.B)
        return repository

    @pytest.mark.parametrize("named", [None, "config.json", "README.md"])
    def test_does_not_give_another_snapshot_than_the_one_that_is_named(self, tmp_path: Path, named: str | None) -> None:
        repository = self.repository(tmp_path)
        if named is not None:
            put(repository / "snapshots" / self.B / named)
        for path in (repository, repository / "snapshots", repository.parent):
            for command in (ckpt_cli.detect, ckpt_cli.inspect, lambda p: ckpt_cli.merge(p, tmp_path / "out"), ckpt_cli.verify):
                with pytest.raises(NotFound, match="holds no weights" if named else "is not there") as caught:
                    command(path)
                assert str(repository / "snapshots" / self.A) in (caught.value.hint or "")
        ckpt_cli.merge(repository / "snapshots" / self.A, tmp_path / "out")

    def test_gives_the_one_that_is_named(self, tmp_path: Path) -> None:
        repository = self.repository(tmp_path)
        model(repository / "snapshots" / self.B, 2.0)
        for number, path in enumerate((repository, repository / "snapshots", repository.parent)):
            ckpt_cli.merge(path, tmp_path / f"out-{number}")
            assert value_of(tmp_path / f"out-{number}") == 2.0

    def test_inside_of_a_model_s_folder_is_not_taken_in_its_place(self, tmp_path: Path) -> None:
        self.repository(tmp_path)
        model(tmp_path / "hub", 3.0)
        ckpt_cli.merge(tmp_path / "hub", tmp_path / "out")
        assert value_of(tmp_path / "out") == 3.0

    def test_with_several_models_asks_for_one(self, tmp_path: Path) -> None:
        for name in "mn":
            self.repository(tmp_path, name)
        with pytest.raises(Undecidable, match="2 models in this Hub cache"):
            ckpt_cli.detect(tmp_path / "hub")


class TestMegatronsRelease:
    def run(self, data: Path, tmp_path: Path, *steps: str) -> Path:
        for name in ("release", *steps):
            shutil.copytree(data / "megatron" / "llama-tp1" / "checkpoint" / "iter_0000030", tmp_path / "run" / name)
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release\n")
        return tmp_path / "run"

    def test_alone_is_the_model(self, data: Path, tmp_path: Path) -> None:
        run = self.run(data, tmp_path)
        assert ckpt_cli.detect(run).problem is None
        assert ckpt_cli.detect(run, step=0).checkpoint.step == 0
        with pytest.raises(NotFound, match="there is no step 30"):
            ckpt_cli.detect(run, step=30)

    def test_beside_steps_is_named(self, data: Path, tmp_path: Path) -> None:
        run = self.run(data, tmp_path, "iter_0000030")
        found = ckpt_cli.detect(run).checkpoint
        assert found.step == 30
        ((level, text),) = told(found.notes, "tracker")
        assert level == "warning"
        assert text.startswith("latest_checkpointed_iteration.txt says release, which Megatron would load, but step 30 was taken")
        assert told(ckpt_cli.detect(run, step=30).checkpoint.notes, "tracker")[0][0] == "info"
        assert Path(ckpt_cli.detect(run, step=0).checkpoint.path).name == "release"
        assert Path(ckpt_cli.detect(run / "release").checkpoint.path).name == "release"

    def test_that_is_gone_is_no_advice(self, data: Path, tmp_path: Path) -> None:
        run = self.run(data, tmp_path, "iter_0000030")
        shutil.rmtree(run / "release")
        assert [level for level, _ in told(ckpt_cli.detect(run).checkpoint.notes, "tracker")] == ["info"]


def test_a_save_in_a_tag_is_found_beside_any_number_of_files(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(data / "deepspeed" / "z3-bf16-w2-offload" / "run" / "global_step3", run / "tag")
    for number in range(MAX_TAGS + 1):
        (run / f"a{number}.txt").touch()
    assert ckpt_cli.detect(run).problem is None


class TestARunBelowAStrayFile:
    """Weights in the folder above a run never hide it silently."""

    @pytest.mark.parametrize("where", ["run", "a/experiment", "out/checkpoints"])
    @pytest.mark.parametrize("command", ["inspect", "verify", "merge"])
    def test_it_is_named(self, tmp_path: Path, where: str, command: str) -> None:
        top = model(tmp_path / "top")
        for step in (5, 10):
            model(top / where / f"step-{step}", value=float(step))
        result = COMMANDS[command](top, tmp_path / "made")
        notes = result.notes if command == "verify" else result.checkpoint.notes
        run = where.removesuffix("/checkpoints")
        ((level, text),) = told(notes, "run-below")
        assert level == "warning"
        assert text.startswith(f"{run}/ (step-5, step-10) beside the weights of model holds a run of its own, which was not read")
        assert text.endswith(f"if that is meant, pass {top / run}")

    def test_several(self, tmp_path: Path) -> None:
        top = model(tmp_path / "top")
        for name in ("a", "b"):
            model(top / name / "step-5")
        ((_, text),) = told(ckpt_cli.detect(top).checkpoint.notes, "run-below")
        assert text.endswith(f"hold runs of their own, which were not read: if one is meant, pass {top / 'a'}, {top / 'b'}")

    def test_a_file_that_was_passed_is_meant_and_outputs_are_no_run(self, tmp_path: Path) -> None:
        top = model(tmp_path / "top")
        ckpt_cli.merge(model(tmp_path / "source"), top / "made" / "step-5")
        assert not told(ckpt_cli.detect(top).checkpoint.notes, "run-below")
        model(top / "run" / "step-5")
        assert not told(ckpt_cli.detect(top / "model.safetensors").checkpoint.notes, "run-below")
