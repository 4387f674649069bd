"""PEFT around a part of a model, or around the model inside of a trainer's module: its prefix stands in the middle of names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt_cli
from ckpt_cli.errors import Unsupported
from ckpt_cli.hub.peft_names import parse_peft, wrapped_parts
from tests.architectures import answered_here
from tests.tensors import Tensors, differences, load
from tests.tiny import config, folder, unknown

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers answers in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


class Chat(nn.Module):
    """A language model and a tower, as models of code of their own hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16))
        self.language_model = language_model()


class Trainer(nn.Module):
    """A trainer's module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def language_model() -> Any:
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{k: v for k, v in config().items() if k != "architectures"}))


def wrapped(model: Any, rank: int = 4, alpha: int = 8, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> Any:
    """A model with adapters that change something."""
    made = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets)))
    torch.manual_seed(1)
    for name, tensor in made.named_parameters():
        if "lora_" in name:
            tensor.data.normal_(std=0.1)
    return made


def state_of(model: nn.Module, *, adapters: bool = False) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if not adapters or "lora_" in name}


def saved(place: Path, tensors: Tensors, of: dict[str, Any] | None = None) -> Path:
    folder(place, None, unknown() if of is None else of)
    torch.save({"state_dict": tensors}, place / "last.ckpt")
    return place / "last.ckpt"


def chat(*, language: bool = True, vision: bool = False) -> tuple[Chat, Tensors, Tensors]:
    """A model with wrapped parts, its state, and the state of what PEFT makes of it."""
    model = Chat()
    if language:
        model.language_model = wrapped(model.language_model)
    if vision:
        model.vision_model = wrapped(model.vision_model, 2, 2, ("0",))
    held = state_of(model)
    for name in ("language_model", "vision_model"):
        part = getattr(model, name)
        if hasattr(part, "merge_and_unload"):
            setattr(model, name, part.merge_and_unload())
    return model, held, state_of(model)


def codes(done: Any) -> dict[str, str]:
    return {note.code: note.text for note in done.outputs[0].notes}


def same(found: Tensors, wanted: Tensors) -> None:
    """The same names and values, but for the order in which a product was summed."""
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.allclose(found[name], tensor, atol=1e-6)] == []


class TestFused:
    @pytest.mark.parametrize(("language", "vision"), [(True, False), (False, True)])
    def test_a_part_of_a_model(self, tmp_path: Path, language: bool, vision: bool) -> None:
        _, held, wanted = chat(language=language, vision=vision)
        ckpt_cli.merge(saved(tmp_path / "run", held), tmp_path / "out", lora_alpha=8 if language else 2)
        same(load(tmp_path / "out"), wanted)

    def test_the_model_inside_of_a_trainer(self, tmp_path: Path) -> None:
        model = wrapped(language_model())
        held = state_of(Trainer(model))
        ckpt_cli.merge(saved(tmp_path / "run", held, config()), tmp_path / "out", lora_alpha=8)
        same(load(tmp_path / "out"), state_of(model.merge_and_unload()))

    @pytest.mark.parametrize("of", [config(), unknown()])
    def test_adapters_alone_of_a_trainer_find_their_base(self, tmp_path: Path, of: dict[str, Any]) -> None:
        model = wrapped(language_model())
        path = saved(tmp_path / "run", state_of(Trainer(model), adapters=True), of)
        base = folder(tmp_path / "base", state_of(language_model()), of)
        ckpt_cli.merge(path, tmp_path / "out", base=base, lora_alpha=8)
        same(load(tmp_path / "out"), state_of(model.merge_and_unload()))

    def test_adapters_alone_of_a_part_keep_its_name(self, tmp_path: Path) -> None:
        base = folder(tmp_path / "base", state_of(Chat()), unknown())
        _, held, wanted = chat()
        path = saved(tmp_path / "run", {f"model.{name}": tensor for name, tensor in held.items() if "lora_" in name})
        ckpt_cli.merge(path, tmp_path / "out", base=base, lora_alpha=8)
        same(load(tmp_path / "out"), wanted)

    def test_two_parts_with_ranks_of_their_own_may_have_had_other_alphas(self, tmp_path: Path) -> None:
        _, held, wanted = chat(vision=True)
        path = saved(tmp_path / "run", held)
        done = ckpt_cli.merge(path, tmp_path / "one", lora_alpha=8)
        assert "language_model with r 4, vision_model with r 2" in codes(done)["lora-alpha"]
        said = {"peft_type": "LORA", "lora_alpha": 8, "alpha_pattern": {"vision_model.*": 2}}
        (tmp_path / "run/adapter_config.json").write_text(json.dumps(said))
        done = ckpt_cli.merge(path, tmp_path / "out")
        assert "lora-alpha" not in codes(done)
        same(load(tmp_path / "out"), wanted)


class TestExported:
    def test_an_adapter_loads_on_the_part_that_was_wrapped(self, tmp_path: Path) -> None:
        model, held, wanted = chat()
        done = ckpt_cli.merge(saved(tmp_path / "run", held), tmp_path / "out", lora="export", lora_alpha=8)
        assert "PeftModel.from_pretrained(model.language_model, ...)" in codes(done)["lora-part"]
        model.language_model = peft.PeftModel.from_pretrained(language_model(), tmp_path / "out").merge_and_unload()
        same(state_of(model), wanted)

    def test_the_task_of_a_whole_model_is_not_that_of_a_part(self, tmp_path: Path) -> None:
        """PEFT refuses a base model without a head where the config says that it generates."""
        model = language_model()
        model.model = wrapped(model.model)
        path = saved(tmp_path / "run", state_of(model), config())
        done = ckpt_cli.merge(path, tmp_path / "out", lora="export", lora_alpha=8)
        assert "PeftModel.from_pretrained(model.model, ...)" in codes(done)["lora-part"]
        found = language_model()
        found.model = peft.PeftModel.from_pretrained(found.model, tmp_path / "out").merge_and_unload()
        model.model = model.model.merge_and_unload()
        same(state_of(found), state_of(model))

    def test_the_model_inside_of_a_trainer_is_no_part(self, tmp_path: Path) -> None:
        model = wrapped(language_model())
        path = saved(tmp_path / "run", state_of(Trainer(model)), config())
        done = ckpt_cli.merge(path, tmp_path / "out", lora="export", lora_alpha=8)
        assert "lora-part" not in codes(done)
        found = peft.PeftModel.from_pretrained(language_model(), tmp_path / "out").merge_and_unload()
        same(state_of(found), state_of(model.merge_and_unload()))
        assert ckpt_cli.verify(tmp_path / "out").exit_code == 0

    def test_adapters_of_two_parts_are_refused(self, tmp_path: Path) -> None:
        _, held, _ = chat(vision=True)
        with pytest.raises(Unsupported, match="2 parts of the model, each wrapped by PEFT: language_model, vision_model"):
            ckpt_cli.merge(saved(tmp_path / "run", held), tmp_path / "out", lora="export", lora_alpha=8)

    def test_what_was_trained_outside_of_the_part_is_refused(self, tmp_path: Path) -> None:
        _, held, _ = chat()
        alone = {name: tensor for name, tensor in held.items() if "lora_" in name or name.startswith("vision_model.1")}
        with pytest.raises(Unsupported, match="trained outside of that part"):
            ckpt_cli.merge(saved(tmp_path / "run", alone), tmp_path / "out", lora_alpha=8)


class TestLive:
    def test_a_model_with_a_wrapped_part_is_filled(self, tmp_path: Path) -> None:
        _, held, _ = chat()
        model = Chat()
        model.language_model = wrapped(model.language_model)
        for tensor in model.parameters():
            tensor.data.zero_()
        ckpt_cli.load_into(model, saved(tmp_path / "run", held))
        assert differences(state_of(model), held) == []


class TestNames:
    def test_a_module_of_the_models_own_called_so_is_no_sign_of_peft(self, tmp_path: Path) -> None:
        model = nn.ModuleDict({"base_model": language_model()})
        config_ = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
        held = state_of(peft.inject_adapter_in_model(config_, model))
        assert wrapped_parts(held) == frozenset()
        folder(tmp_path / "run", held, unknown())
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", lora_alpha=8)
        assert load_file(tmp_path / "out/model.safetensors").keys() == {f"base_model.{name}" for name in language_model().state_dict()}

    def test_names_of_peft_without_a_part_stay_what_they_were(self) -> None:
        names = ("base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight")
        assert wrapped_parts(names) == frozenset({""})
        assert parse_peft({}).parts == ("",)
