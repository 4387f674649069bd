"""What adapter_config.json says beside factors: biases as PEFT merges them, and every setting followed, without effect, or refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, Undecidable, Unsupported
from ckpt_cli.lora import settings
from tests.architectures import MODELS, build
from tests.tensors import load
from tests.training import shard

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "of adapted modules": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "of all modules": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    "all, modules to save": ("qwen2", {"target_modules": ["q_proj"], "bias": "all", "modules_to_save": ["k_proj"]}),
    "adapted, modules to save": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only", "modules_to_save": ["k_proj"]}),
    "all, fan in, fan out": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "bias": "all", "fan_in_fan_out": True}),
    "adapted, DoRA": ("gpt2", {"target_modules": ["c_attn"], "bias": "lora_only", "fan_in_fan_out": True, "use_dora": True}),
    "with a bias of B": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only", "lora_bias": True}),
    "all, an embedding": ("qwen2", {"target_modules": ["embed_tokens", "q_proj"], "bias": "all"}),
    "all, an embedding, modules to save": (
        "qwen2",
        {"target_modules": ["embed_tokens", "q_proj"], "bias": "all", "modules_to_save": ["k_proj"]},
    ),
    "an embedding, modules to save": ("qwen2", {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["k_proj"]}),
    "of one layer, patterns": (
        "qwen2",
        {
            "target_modules": ["q_proj"],
            "bias": "lora_only",
            "layers_to_transform": [1],
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"q_proj": 7},
        },
    ),
}


@pytest.fixture(autouse=True)
def quiet(quiet_transformers: None) -> None:
    """transformers and peft are the oracles here."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return CASES[request.param]


def adapted(kind: str, options: dict[str, Any], folder: Path) -> Any:
    """A model with trained adapters and biases, its base in ``base``, and what PEFT saves of it in ``adapter``."""
    model = build(*MODELS[kind])
    model.config.architectures = [type(model).__name__]
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder / "base")
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=10, **options))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1 if "magnitude" in name else 0))
    made.eval().save_pretrained(folder / "adapter")
    return made


def by_peft(folder: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """What PEFT merges of an adapter folder and the base."""
    from transformers import AutoModelForCausalLM

    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), adapter)
    loaded.merge_and_unload().save_pretrained(folder / "peft")
    return load(folder / "peft")


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    """Biases bit for bit where nothing is added to them."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if name.endswith(".bias") and not options.get("lora_bias"):
            assert torch.equal(found[name], tensor), name
        assert torch.allclose(found[name], tensor, atol=1e-5), name


class TestBiases:
    def test_of_an_adapter_folder_are_what_peft_merges(self, case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
        adapted(*case, tmp_path)
        result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", verify=True)
        assert_same(load(tmp_path / "out"), by_peft(tmp_path, tmp_path / "adapter"), case[1])
        assert result.exit_code == 0

    def test_are_exported_from_an_adapter_folder(self, case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
        adapted(*case, tmp_path)
        wanted = by_peft(tmp_path, tmp_path / "adapter")
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "exported", base=tmp_path / "base", lora="export")
        found = by_peft(tmp_path, tmp_path / "exported")
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())

    @pytest.mark.parametrize("alone", [True, False], ids=["adapters alone", "whole model"])
    @pytest.mark.parametrize("save", ["ranks", "dcp"])
    def test_of_sharded_saves(self, case: tuple[str, dict[str, Any]], save: str, alone: bool, tmp_path: Path) -> None:
        model = adapted(*case, tmp_path)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if alone:
            saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
            marks = ("lora_", "modules_to_save")
            state = {n: t for n, t in state.items() if n.replace(".default", "") in saved or any(mark in n for mark in marks)}
        run = tmp_path / "run" / "global_step_1"
        run.mkdir(parents=True)
        if save == "ranks":
            shard(state, set(state), run)
        else:
            dcp.save(state, checkpoint_id=run, no_dist=True)
        for name in ("config.json", "adapter_config.json"):
            source = tmp_path / ("base" if name == "config.json" else "adapter") / name
            (run / name).write_bytes(source.read_bytes())
        wanted = by_peft(tmp_path, tmp_path / "adapter")
        ckpt_cli.merge(run, tmp_path / "out", base=tmp_path / "base" if alone else None, lora="fuse")
        assert_same(load(tmp_path / "out"), wanted, case[1])
        ckpt_cli.merge(run, tmp_path / "exported", lora="export")
        assert_same(by_peft(tmp_path, tmp_path / "exported"), wanted, {"lora_bias": True})

    @pytest.mark.parametrize("kind", ["lora_only", "all"])
    def test_that_are_missing_are_refused(self, kind: str, tmp_path: Path) -> None:
        adapted("qwen2", {"target_modules": ["q_proj"], "bias": kind}, tmp_path)
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        save_file({name: tensor for name, tensor in load_file(file).items() if "lora_" in name}, file)
        with pytest.raises(Inconsistent, match=rf"biases were trained \({kind}\), but .*q_proj.bias.* missing") as caught:
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
        assert "set bias to none" in str(caught.value.hint)
        change(tmp_path / "adapter", bias="none")
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")

    def test_that_nothing_says_were_trained_are_refused_by_name(self, tmp_path: Path) -> None:
        adapted("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}, tmp_path)
        change(tmp_path / "adapter", bias="none")
        with pytest.raises(Inconsistent, match="says bias none") as caught:
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
        assert "set bias to lora_only" in str(caught.value.hint)
        (tmp_path / "adapter" / "adapter_config.json").unlink()
        with pytest.raises(Inconsistent, match=r"there is no adapter_config\.json that says whether it was trained"):
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", lora_alpha=10)

    def test_that_the_base_has_not_are_refused(self, tmp_path: Path) -> None:
        adapted("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}, tmp_path)
        file = tmp_path / "base" / "model.safetensors"
        save_file({name: tensor for name, tensor in load_file(file).items() if "q_proj.bias" not in name}, file, {"format": "pt"})
        with pytest.raises(CkptError, match="its module in the base has no bias"):
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")

    def test_of_an_unknown_kind_are_refused(self, tmp_path: Path) -> None:
        adapted("qwen2", {"target_modules": ["q_proj"]}, tmp_path)
        change(tmp_path / "adapter", bias="some")
        with pytest.raises(Unsupported, match="says bias some"):
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")


def change(adapter: Path, **values: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


class TestSettings:
    def test_of_peft_are_all_known(self) -> None:
        """A new one must be looked at: followed, without effect, or refused."""
        known = [*settings.FOLLOWED, *settings.WITHOUT_EFFECT, *settings.REFUSED]
        assert len(known) == len(set(known))
        assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= set(known)

    @pytest.fixture
    def adapter(self, tmp_path: Path) -> Path:
        adapted("qwen2", {"target_modules": ["q_proj"]}, tmp_path)
        return tmp_path / "adapter"

    @pytest.mark.parametrize("name", settings.REFUSED)
    def test_that_change_the_arithmetic_are_refused_by_name(self, adapter: Path, name: str, tmp_path: Path) -> None:
        change(adapter, **{name: {"a": 1}})
        for lora in ("fuse", "export"):
            with pytest.raises(Unsupported, match=name):
                ckpt_cli.merge(adapter, tmp_path / "out", base=tmp_path / "base", lora=lora)

    @pytest.mark.parametrize("way", ["pissa", "pissa_niter_4", "PiSSA", "olora", "OLoRA", "corda", "loftq", "lora_ga", "not_yet_known"])
    def test_initialisations_that_change_the_base_are_refused(self, adapter: Path, way: str, tmp_path: Path) -> None:
        change(adapter, init_lora_weights=way)
        with pytest.raises(Unsupported, match=way) as caught:
            ckpt_cli.merge(adapter, tmp_path / "out", base=tmp_path / "base")
        assert "set init_lora_weights to true" in str(caught.value.hint)
        change(adapter, init_lora_weights=True)
        ckpt_cli.merge(adapter, tmp_path / "out", base=tmp_path / "base")

    @pytest.mark.parametrize("way", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
    def test_other_initialisations_are_not(self, adapter: Path, way: Any, tmp_path: Path) -> None:
        change(adapter, init_lora_weights=way)
        ckpt_cli.merge(adapter, tmp_path / "out", base=tmp_path / "base")

    def test_that_peft_converts_while_it_saves_need_nothing(self, tmp_path: Path) -> None:
        """The base of PiSSA is changed; what PEFT converts while it saves is an adapter of the unchanged one, of twice the rank."""
        model = build(*MODELS["qwen2"])
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(tmp_path / "base")
        made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=10, target_modules=["q_proj"], init_lora_weights="pissa"))
        made.peft_config["default"].init_lora_weights = True
        made.save_pretrained(tmp_path / "first")
        made.peft_config["default"].init_lora_weights = "pissa"
        torch.manual_seed(3)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        made.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
        made.merge_and_unload().save_pretrained(tmp_path / "peft")
        found, wanted = load(tmp_path / "out"), load(tmp_path / "peft")
        assert all(torch.allclose(found[name], tensor, atol=1e-4) for name, tensor in wanted.items())

    @pytest.mark.parametrize(("name", "trained"), [("use_dora", False), ("use_dora", True), ("lora_bias", False), ("lora_bias", True)])
    def test_that_contradict_the_files_are_refused(self, name: str, trained: bool, tmp_path: Path) -> None:
        adapted("qwen2", {"target_modules": ["q_proj"], name: trained}, tmp_path)
        change(tmp_path / "adapter", **{name: not trained})
        for lora in ("fuse", "export"):
            with pytest.raises(Inconsistent, match=f"says {name} {str(not trained).lower()}"):
                ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", lora=lora)

    def test_that_are_not_known_are_a_warning(self, adapter: Path, tmp_path: Path) -> None:
        change(adapter, use_something_new=True, something_off=False)
        notes = ckpt_cli.merge(adapter, tmp_path / "out", base=tmp_path / "base").outputs[0].notes
        assert [note.text for note in notes if note.code == "unknown-setting"] == [
            "adapter_config.json has a setting that ckpt does not know, and which may change the result: use_something_new"
        ]


class TestAlphasAndRanks:
    """of adapter_config.json: as PEFT takes them, or refused where it does not load them."""

    def edited(self, folder: Path, values: dict[str, Any], **options: Any) -> Path:
        adapted("qwen2", {"target_modules": ["q_proj", "up_proj"], **options}, folder)
        path = folder / "adapter" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder / "adapter"

    @pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["LoRA", "rank-stabilised", "DoRA"])
    @pytest.mark.parametrize(
        ("values", "scaled"),
        [
            ({"alpha_pattern": {"q_proj": 0}}, {"q": 0, "up": 10}),
            ({"alpha_pattern": {"q_proj": 0.0, "up_proj": -5, "proj": 3}}, {"q": 0, "up": -5}),
            ({"alpha_pattern": {"q_proj": -4}}, {"q": -4, "up": 10}),
            ({"alpha_pattern": {".*layers.0.*": 0, "q_proj": 6}}, {}),
            ({"lora_alpha": -10}, {"q": -10, "up": -10}),
            ({"lora_alpha": 0, "alpha_pattern": {"q_proj": 3, "up_proj": 0}}, {"q": 3, "up": 0}),
        ],
        ids=str,
    )
    def test_are_those_of_peft(self, values: dict[str, Any], scaled: dict[str, float], options: dict[str, Any], tmp_path: Path) -> None:
        adapter = self.edited(tmp_path, values, **options)
        result = ckpt_cli.merge(adapter, tmp_path / "out", base=tmp_path / "base", verify=True)
        wanted, found, base = by_peft(tmp_path, adapter), load(tmp_path / "out"), load(tmp_path / "base")
        assert_same(found, wanted, {})
        assert result.exit_code == 0
        for name in (name for name in found if "q_proj.weight" in name and scaled.get("q") == 0 and not options.get("use_dora")):
            assert torch.equal(found[name], base[name])
        ckpt_cli.merge(adapter, tmp_path / "exported", base=tmp_path / "base", lora="export")
        again = by_peft(tmp_path, tmp_path / "exported")
        assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"alpha_pattern": {"q_proj": None}}, "adapter_config.json says null as the alpha of q_proj"),
            ({"alpha_pattern": {"q_proj": "8"}}, 'adapter_config.json says "8" as the alpha of q_proj'),
            ({"alpha_pattern": {"q_proj": float("inf"), "proj": 4}}, "adapter_config.json says Infinity as the alpha of q_proj"),
            ({"lora_alpha": 0}, "is unknown: adapter_config.json says 0, which some trainers write whatever was trained"),
            ({"lora_alpha": "16"}, 'is unknown: adapter_config.json says "16"'),
            ({"r": 0}, "the factors have rank 4, but adapter_config.json says 0"),
            ({"r": -2}, "the factors have rank 4, but adapter_config.json says -2"),
            ({"rank_pattern": {"q_proj": 0}}, "the factors have rank 4, but adapter_config.json says 0"),
            ({"rank_pattern": {"q_proj": None, "proj": 4}}, "the factors have rank 4, but adapter_config.json says null"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("lora", ["merge", "export"])
    def test_that_peft_does_not_load_or_nobody_means_are_refused(
        self, values: dict[str, Any], said: str, lora: str, tmp_path: Path
    ) -> None:
        adapter = self.edited(tmp_path, values)
        if values != {"lora_alpha": 0} and float("inf") not in values.get("alpha_pattern", {}).values():
            with pytest.raises((TypeError, ValueError)):
                by_peft(tmp_path, adapter)
        with pytest.raises((Inconsistent, Undecidable)) as raised:
            ckpt_cli.merge(adapter, tmp_path / "out", base=tmp_path / "base", **({"lora": lora} if lora == "export" else {}))
        assert said in raised.value.message
        assert not (tmp_path / "out").exists()
        assert "damaged-adapter" in {item.code for item in ckpt_cli.verify(adapter).findings}
