"""Files of ``torch.save`` that are not sharded: one or several with an index, nested, and those that are no model."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, IncompleteError, Inconsistent, InputError, MissingShard, NotRecognised, Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.torch_files.reader import TorchFiles
from tests.conftest import Copy
from tests.formats.conformance import Example, FormatConformance, everything_said_by
from tests.tensors import differences, load

INDEX = "pytorch_model.bin.index.json"
FIRST, SECOND, THIRD = (f"pytorch_model-{i:05d}-of-00003.bin" for i in (1, 2, 3))


def state() -> dict[str, torch.Tensor]:
    return {"embed.weight": torch.arange(12.0).reshape(3, 4), "norm.weight": torch.ones(4)}


def merged(path: Path, output: Path, **options: Any) -> dict[str, torch.Tensor]:
    ckpt_cli.merge(path, output, **options)
    return load(output)


def refused(path: Path, error: type[CkptError], match: str | None = None) -> CkptError:
    """Merging is refused for this reason and writes nothing."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(error, match=match) as caught:
        ckpt_cli.merge(path, path.parent / "out")
    assert sorted(path.parent.iterdir()) == before
    return caught.value


class OneFile(FormatConformance):
    """What is promised of one file; without it there is nothing to be recognised."""

    reader = TorchFiles()

    def test_a_missing_file_is_refused_by_name(self, folder: Path) -> None:
        (file,) = self.files_of(folder)
        file.unlink()
        assert self.reader.recognise(folder, Folders()) == []


class TestTied(OneFile):
    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "plain-files"
        return Example(layout / "tied", layout / "expected-tied.safetensors")

    def test_names_and_shapes_are_those_of_the_training(self, original: Example, folder: Path) -> None:
        """The file has both names of one storage; the output leaves out the one that config.json ties."""
        tensors = self.describe(folder).tensors
        assert tensors["lm_head.weight"].alias_of == "model.embed_tokens.weight"
        assert {name: tensor.shape for name, tensor in tensors.items() if name != "lm_head.weight"} == {
            name: tuple(tensor.shape) for name, tensor in load(original.expected).items()
        }


class TestPlain(OneFile):
    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "plain-files"
        return Example(layout / "plain", layout / "expected-plain.safetensors")


class TestOfBeforeTorch16(OneFile):
    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "plain-files"
        return Example(layout / "legacy", layout / "expected-legacy.safetensors")


class TestBesideOptimizerAndArguments(OneFile):
    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "plain-files"
        return Example(layout / "nested", layout / "expected-nested.safetensors")


class TestWithIndex(FormatConformance):
    reader = TorchFiles()

    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "plain-files"
        return Example(layout / "hub_bin", layout / "expected-hub_bin.safetensors")


class TestAnIndexThatLies:
    @pytest.fixture
    def folder(self, copy: Copy) -> Path:
        return copy("layouts", "plain-files", "hub_bin")

    @staticmethod
    def edit(folder: Path, **files: str | None) -> None:
        """Assign tensors to files; None removes a tensor from the index."""
        index = json.loads((folder / INDEX).read_text())
        for name, file in files.items():
            index["weight_map"][name] = file
            if file is None:
                del index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))

    def test_a_missing_file_is_named(self, folder: Path) -> None:
        (folder / SECOND).unlink()
        error = refused(folder, MissingShard, SECOND)
        assert (error.expected, error.exit_code) == (str(folder / SECOND), 4)

    @pytest.mark.parametrize(
        "outside",
        ["../{}", "{folder}/{}", "C:{}", "C:\\{}", "..\\{}", "x/../../{}", "\\{}", "", "{}\0", "model-00001.safetensors", 5, None],
        ids=repr,
    )
    def test_a_file_outside_of_the_folder_is_never_opened(self, folder: Path, monkeypatch: pytest.MonkeyPatch, outside: str | None) -> None:
        shutil.copyfile(folder / THIRD, folder.parent / THIRD)
        if isinstance(outside, str):
            outside = outside.replace("{folder}", str(folder.parent)).replace("{}", THIRD)
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = outside
        (folder / INDEX).write_text(json.dumps(index))
        opened, real = [], os.open

        def spy(name: Any, *arguments: Any, **options: Any) -> int:
            opened.append(Path(os.fsdecode(name)).resolve())
            return real(name, *arguments, **options)

        monkeypatch.setattr(os, "open", spy)
        error = refused(folder, CorruptFile)
        assert (error.tensor, error.path) == ("model.norm.weight", str(folder / INDEX))
        assert all(path.is_relative_to(folder) for path in opened)

    def test_a_tensor_that_the_file_lacks_is_named(self, folder: Path) -> None:
        self.edit(folder, **{"model.extra": FIRST})
        assert refused(folder, Inconsistent).tensor == "model.extra"

    def test_a_tensor_that_the_index_lacks_is_named(self, folder: Path) -> None:
        self.edit(folder, **{"model.norm.weight": None})
        assert refused(folder, Inconsistent).tensor == "model.norm.weight"

    def test_two_files_with_one_tensor_are_refused(self, folder: Path) -> None:
        content = torch.load(folder / FIRST)
        name = next(iter(content))
        torch.save(torch.load(folder / SECOND) | {name: content[name] + 1}, folder / SECOND)
        assert refused(folder, Inconsistent).tensor == name

    def test_parts_without_an_index_prove_nothing(self, folder: Path) -> None:
        (folder / INDEX).unlink()
        assert INDEX in everything_said_by(refused(folder, IncompleteError))


class TestNested:
    @pytest.mark.parametrize("key", ["state_dict", "model", "module", "model_state_dict"])
    def test_the_model_is_found_below_its_usual_key(self, tmp_path: Path, key: str) -> None:
        content = {"epoch": 3, key: state(), "optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}}, "args": argparse.Namespace(lr=1)}
        torch.save(content, tmp_path / "checkpoint.pt")
        assert differences(merged(tmp_path / "checkpoint.pt", tmp_path / "out"), state()) == []

    def test_it_may_be_two_levels_down(self, tmp_path: Path) -> None:
        torch.save({"model": {"module": state(), "step": 3}}, tmp_path / "model.pt")
        assert differences(merged(tmp_path / "model.pt", tmp_path / "out"), state()) == []

    @pytest.mark.parametrize(
        "beside",
        [{"rng_state": torch.get_rng_state()}, {"loss": torch.tensor(0.3)}, {"rng": {"cpu": torch.get_rng_state()}}],
        ids=lambda b: next(iter(b)),
    )
    def test_tensors_beside_the_model_are_not_taken_for_it(self, tmp_path: Path, beside: dict[str, Any]) -> None:
        """Random states and losses are tensors as well; a dict below "model" is none, so it is the state dict."""
        torch.save({"model": state(), **beside}, tmp_path / "checkpoint.pt")
        assert differences(merged(tmp_path / "checkpoint.pt", tmp_path / "out"), state()) == []

    def test_a_tensor_called_model_is_a_tensor(self, tmp_path: Path) -> None:
        torch.save({"model": torch.ones(2), "module": torch.ones(3)}, tmp_path / "model.pt")
        assert set(merged(tmp_path / "model.pt", tmp_path / "out")) == {"model", "module"}

    def test_what_stands_beside_it_is_shown_and_not_written(self, tmp_path: Path) -> None:
        torch.save({"epoch": 3, "model": state() | {"note": "text"}}, tmp_path / "model.pt")
        (component,) = ckpt_cli.inspect(tmp_path / "model.pt").checkpoint.components
        assert component.tensors is not None
        assert {tensor.name for tensor in component.tensors} == set(state())

    def test_too_many_levels_are_refused(self, tmp_path: Path) -> None:
        content: dict[str, Any] = state()
        for _ in range(10):
            content = {"model": content}
        torch.save(content, tmp_path / "model.pt")
        assert refused(tmp_path / "model.pt", CorruptFile, "nested").path == str(tmp_path / "model.pt")


class TestEma:
    class TestOneFile(OneFile):
        component = "ema"

        def example(self, data: Path) -> Example:
            folder = data / "made" / "ema"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"ema": load(data / "layouts" / "plain-files" / "expected-plain.safetensors"), "decay": 0.9}, folder / "ema.pt")
            return Example(folder, data / "layouts" / "plain-files" / "expected-plain.safetensors")

    @pytest.mark.parametrize("key", [None, "ema", "ema_model", "model_ema", "ema_state_dict"])
    def test_it_stands_beside_the_model(self, tmp_path: Path, key: str | None) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        averaged = {name: tensor + 1 for name, tensor in state().items()}
        torch.save(state(), folder / "model.pt")
        torch.save({key: averaged} if key else averaged, folder / "ema.pt")
        assert [component.name for component in ckpt_cli.detect(folder).checkpoint.components] == ["model", "ema"]
        assert differences(merged(folder, tmp_path / "out"), state()) == []
        assert differences(merged(folder, tmp_path / "out_ema", type="ema"), averaged) == []


NO_MODELS = (
    "optimizer.pt", "optim.pt", "optimizer.bin", "optim_world_size_4_rank_0.pt", "extra_state_world_size_4_rank_0.pt", "scheduler.pt",
    "scheduler.bin", "rng_state.pth", "rng_state_0.pth", "random_states_0.bin", "training_args.bin", "data.pt",
    "data_status.pt", "scaler.pt",
)  # fmt: skip


class TestWhatIsNoModel:
    @pytest.mark.parametrize("name", NO_MODELS)
    def test_a_file_of_other_state_is_not_recognised_by_its_name(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "run").mkdir()
        torch.save(state(), tmp_path / "run" / name)
        refused(tmp_path / "run" / name, NotRecognised)
        refused(tmp_path / "run", NotRecognised)

    @pytest.mark.parametrize(
        "content",
        [{}, {"step": 3}, [torch.ones(2)], torch.ones(2), "text", None, 7, argparse.Namespace(a=1), {"model": {}}],
        ids=lambda content: type(content).__name__,
    )
    def test_a_file_without_a_state_dict_is_refused(self, tmp_path: Path, content: object) -> None:
        torch.save(content, tmp_path / "model.pt")
        kind = Unsupported if isinstance(content, list) else CorruptFile
        assert refused(tmp_path / "model.pt", kind).path == str(tmp_path / "model.pt")

    @pytest.mark.parametrize("around", [None, "optimizer_state_dict"])
    def test_an_optimizer_alone_is_told_as_that(self, tmp_path: Path, around: str | None) -> None:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))])
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 2)
        optimizer.step()
        torch.save({around: optimizer.state_dict(), "epoch": 3} if around else optimizer.state_dict(), tmp_path / "last.pt")
        assert refused(tmp_path / "last.pt", Unsupported, "state of an optimizer, and no weights of a model").hint is None
        torch.save({"net": torch.nn.Linear(2, 2), "optimizer_state": optimizer.state_dict()}, tmp_path / "whole.pt")
        assert "optimizer" not in refused(tmp_path / "whole.pt", Unsupported, "holds tensors").message

    def test_a_whole_module_is_refused_and_not_unpickled(self, tmp_path: Path) -> None:
        torch.save(torch.nn.Linear(2, 3), tmp_path / "model.pt")
        refused(tmp_path / "model.pt", CorruptFile, "Linear")

    def test_keys_that_are_no_text_are_refused(self, tmp_path: Path) -> None:
        torch.save({0: torch.ones(2), 1: torch.ones(2)}, tmp_path / "model.pt")
        refused(tmp_path / "model.pt", CorruptFile, "int")

    def test_code_is_refused_and_does_not_run(self, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.mkdir, (str(tmp_path / "marker"),)

        torch.save(Bomb(), tmp_path / "model.pt")
        refused(tmp_path / "model.pt", CorruptFile)
        torch.save(state() | {"x": Bomb()}, tmp_path / "model.pt")
        assert differences(merged(tmp_path / "model.pt", tmp_path / "out"), state()) == []
        assert not (tmp_path / "marker").exists()

    @pytest.mark.parametrize("suffix", [".zip", ".txt", ".npz", ""])
    def test_other_suffixes_are_not_recognised(self, tmp_path: Path, suffix: str) -> None:
        torch.save(state(), tmp_path / f"model{suffix}")
        refused(tmp_path / f"model{suffix}", Unsupported if suffix in (".zip", ".npz") else NotRecognised)


class TestPartsOfShardedModels:
    def test_flat_parameters_are_refused_with_the_recipe(self, layouts: Path, tmp_path: Path) -> None:
        for path in ("local", "local/pytorch_model_fsdp_rank0.bin"):
            with pytest.raises(Unsupported, match="LOCAL_STATE_DICT") as caught:
                ckpt_cli.merge(layouts / "accelerate" / path, tmp_path / "out")
            assert "SHARDED_STATE_DICT" in (caught.value.hint or "")
            assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["_flat_param", "model.layers.0._flat_param", "_fsdp_wrapped_module._flat_param"])
    def test_so_are_flat_parameters_in_one_file(self, tmp_path: Path, name: str) -> None:
        torch.save({name: torch.ones(100)}, tmp_path / "pytorch_model.bin")
        assert "SHARDED_STATE_DICT" in (refused(tmp_path / "pytorch_model.bin", Unsupported).hint or "")

    @pytest.mark.parametrize("mode", ["fsdp1_sharded_tensor", "fsdp2"])
    def test_one_rank_alone_is_never_taken_for_a_model(self, data: Path, tmp_path: Path, mode: str) -> None:
        """The file of a rank under the name of a whole model, as a careless copy makes it."""
        shutil.copyfile(data / "torch-2.13.0" / mode / "model_world_size_4_rank_0.pt", tmp_path / "pytorch_model.bin")
        error = refused(tmp_path / "pytorch_model.bin", CkptError)
        assert error.exit_code in (3, 4)

    def test_two_names_of_one_storage_are_both_written_where_no_config_ties_them(self, tmp_path: Path) -> None:
        weight = torch.arange(6.0).reshape(2, 3)
        torch.save({"model.embed_tokens.weight": weight, "lm_head.weight": weight}, tmp_path / "pytorch_model.bin")
        expected = {"model.embed_tokens.weight": weight, "lm_head.weight": weight.clone()}
        assert differences(merged(tmp_path / "pytorch_model.bin", tmp_path / "out"), expected) == []


def test_a_truncated_file_is_not_taken_for_another_kind(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "model.pt")
    os.truncate(tmp_path / "model.pt", 100)
    assert refused(tmp_path / "model.pt", InputError).path == str(tmp_path / "model.pt")
