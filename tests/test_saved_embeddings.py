"""Adapters of tied embeddings as PEFT saves them by default: with a copy of the weight that is adapted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, Unsupported
from tests import tiny
from tests.tensors import differences, load

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning")]
MODULES = ["embed_tokens", "lm_head"]


def adapted(folder: Path, base: Path, module: str, **options: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter saved by PEFT, and what PEFT makes of it and its base."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", module], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.3
    wrapped.save_pretrained(folder, **options)
    merged = wrapped.merge_and_unload().state_dict()
    return folder, {name: tensor.clone() for name, tensor in merged.items()}


def base_of(folder: Path, *, tied: bool, stored: bool = False) -> Path:
    weights = tiny.weights(tied=tied)
    if stored:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    return tiny.folder(folder, weights, tiny.config(tie_word_embeddings=tied))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("tied", "stored"), [(True, False), (True, True), (False, False)], ids=["tied", "tied, both stored", "untied"])
@pytest.mark.parametrize("options", [{}, {"save_embedding_layers": False}], ids=["with a copy", "without"])
def test_is_fused_as_peft_does(module: str, tied: bool, stored: bool, options: dict[str, Any], tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", tied=tied, stored=stored)
    adapter, wanted = adapted(tmp_path / "adapter", base, module, **options)
    assert any("base_layer" in name for name in load_file(adapter / "adapter_model.safetensors")) == (not options)
    result = ckpt_cli.merge(adapter, tmp_path / "out", base=base, verify=True)
    found = load(tmp_path / "out")
    assert found.keys() == {name for name in wanted if name != "lm_head.weight" or not tied}
    for name, tensor in found.items():
        assert torch.allclose(tensor, wanted[name], atol=1e-6), name
    # Training used the other one of two tied tensors without the adapter.
    assert any(note.code == "lora-tied" for note in result.outputs[0].notes) == tied
    assert not [item for item in result.outputs[0].verified[0].findings if item.severity == "error"]


@pytest.mark.parametrize("module", MODULES)
def test_is_exported_as_it_was_saved(module: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", tied=True)
    adapter, _ = adapted(tmp_path / "adapter", base, module)
    for number, options in enumerate(({}, {"base": base, "lora": "export"})):
        ckpt_cli.merge(adapter, tmp_path / f"out{number}", **options)  # type: ignore[arg-type]
        assert differences(load(tmp_path / f"out{number}"), load_file(adapter / "adapter_model.safetensors")) == []
        assert json.loads((tmp_path / f"out{number}" / "adapter_config.json").read_text())["modules_to_save"] is None


@pytest.mark.parametrize("module", MODULES)
def test_of_another_base_is_refused(module: str, tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path / "adapter", base_of(tmp_path / "base", tied=True), module)
    other = tiny.folder(tmp_path / "other", tiny.weights(9, tied=True), tiny.config(tie_word_embeddings=True))
    with pytest.raises(Inconsistent, match="copy of this weight") as caught:
        ckpt_cli.merge(adapter, tmp_path / "out", base=other)
    assert "base_layer" in str(caught.value.tensor)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", MODULES)
def test_of_a_base_in_another_dtype_is_fused(module: str, tmp_path: Path) -> None:
    """The copy is in the dtype of training."""
    base = base_of(tmp_path / "base", tied=True)
    rounded = tiny.folder(
        tmp_path / "bf16",
        {name: tensor.bfloat16() for name, tensor in load(base).items()},
        tiny.config(tie_word_embeddings=True, torch_dtype="bfloat16"),
    )
    adapter, _ = adapted(tmp_path / "adapter", base, module)
    ckpt_cli.merge(adapter, tmp_path / "out", base=rounded)
    assert load(tmp_path / "out")["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_resized_embedding_replaces_that_of_the_base(tmp_path: Path) -> None:
    """New tokens were added before training: the copy has rows that the base lacks."""
    base = base_of(tmp_path / "base", tied=False)
    adapter, _ = adapted(tmp_path / "adapter", base, "embed_tokens")
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    copy, factor = "base_model.model.model.embed_tokens.base_layer.weight", "base_model.model.model.embed_tokens.lora_embedding_A"
    tensors[copy] = torch.cat([tensors[copy], torch.ones(8, 16)])
    tensors[factor] = torch.cat([tensors[factor], torch.zeros(4, 8)], dim=1)
    save_file(tensors, path, metadata={"format": "pt"})
    # Its head has the rows of the base: no vocab_size fits both.
    with pytest.raises(Inconsistent, match="unlike the others") as caught:
        ckpt_cli.merge(adapter, tmp_path / "out", base=base)
    assert "cut or resized alone" in (caught.value.hint or "")
    # PEFT saves the head too where tokens were added.
    tensors["base_model.model.lm_head.weight"] = torch.cat([load(base)["lm_head.weight"], torch.full((8, 16), 2.0)])
    save_file(tensors, path, metadata={"format": "pt"})
    ckpt_cli.merge(adapter, tmp_path / "out", base=base)
    assert torch.equal(load(tmp_path / "out")["model.embed_tokens.weight"][64:], torch.ones(8, 16))
    assert torch.equal(load(tmp_path / "out")["lm_head.weight"][64:], torch.full((8, 16), 2.0))


def test_a_checkpoint_with_a_lost_weight_is_no_adapter(tmp_path: Path) -> None:
    """All else of the model is there, so that the adapters are not alone."""
    weights = {
        f"base_model.model.{name}": tensor for name, tensor in tiny.weights().items() if name != "model.layers.0.self_attn.q_proj.weight"
    }
    home = tiny.verl(tmp_path / "run", {**weights, **tiny.factors()})
    (home / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    with pytest.raises(CkptError, match="weight that this adapter belongs to"):
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(10)[None]).logits
    return found


class TestWeightsThatPeftTies:
    """With ``ensure_weight_tying`` a head has its embedding's factors, turned: training had their product once in each."""

    def trained(self, folder: Path, base: Path, modules: list[str], **options: Any) -> torch.Tensor:
        """Saves an adapter; the logits of the model with it, before anything is merged."""
        from transformers import AutoModelForCausalLM

        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM", **options)
        wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        torch.manual_seed(0)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn_like(parameter) * 0.3)
        wrapped.save_pretrained(folder)
        return logits(wrapped)

    @pytest.mark.parametrize("modules", [["embed_tokens"], ["embed_tokens", "q_proj"], ["lm_head", "q_proj"], ["embed_tokens", "lm_head"]])
    @pytest.mark.parametrize("stored", [False, True])
    def test_are_fused_once_as_trained(self, modules: list[str], stored: bool, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        base = base_of(tmp_path / "base", tied=True, stored=stored)
        wanted = self.trained(tmp_path / "adapter", base, modules, ensure_weight_tying=True)
        result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base, verify=True)
        assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted, atol=1e-5)
        (told,) = (note for note in result.outputs[0].notes if note.code == "lora-tied")
        assert (told.level, "the same factors, which are added once" in told.text) == ("info", True)
        assert not [item for item in result.outputs[0].verified[0].findings if item.severity == "error"]

    def test_with_factors_of_their_own_are_warned_of(self, tmp_path: Path) -> None:
        base = base_of(tmp_path / "base", tied=True)
        self.trained(tmp_path / "adapter", base, ["embed_tokens", "lm_head"])
        (told,) = (n for n in ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base).outputs[0].notes if n.code == "lora-tied")
        assert (told.level, "a merged model has the sum in both" in told.text) == ("warning", True)

    @pytest.mark.parametrize("changed", [1.0, 0.0])
    @pytest.mark.parametrize("part", ["embed_tokens.lora_embedding_A", "lm_head.lora_B"])
    def test_of_a_file_that_has_others_is_said_what_the_config_says(self, tmp_path: Path, part: str, changed: float) -> None:
        base = base_of(tmp_path / "base", tied=True)
        self.trained(tmp_path / "adapter", base, ["embed_tokens", "lm_head"], ensure_weight_tying=True)
        tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        save_file({name: t + changed * (part in name) for name, t in tensors.items()}, tmp_path / "adapter" / "adapter_model.safetensors")
        (told,) = (n for n in ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base).outputs[0].notes if n.code == "lora-tied")
        assert told.level == ("warning" if changed else "info")
        assert ("ensure_weight_tying" in told.text) == bool(changed)
        assert ("newer ones load one of them for both" in told.text) == bool(changed)

    def test_with_scales_of_their_own_each_was_in_one_use(self, tmp_path: Path) -> None:
        base = base_of(tmp_path / "base", tied=True)
        self.trained(tmp_path / "adapter", base, ["embed_tokens", "lm_head"], ensure_weight_tying=True, alpha_pattern={"lm_head": 32})
        (told,) = (n for n in ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base).outputs[0].notes if n.code == "lora-tied")
        assert (told.level, "in training each was in one use of it alone" in told.text) == ("warning", True)
        assert "ensure_weight_tying" not in told.text

    def test_with_magnitudes_are_refused(self, tmp_path: Path) -> None:
        base = base_of(tmp_path / "base", tied=True)
        self.trained(tmp_path / "adapter", base, ["embed_tokens"], ensure_weight_tying=True, use_dora=True)
        with pytest.raises(Unsupported, match="two DoRA adapters change one tensor"):
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)

    def test_of_an_untied_model_are_fused_each(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        base = base_of(tmp_path / "base", tied=False)
        wanted = self.trained(tmp_path / "adapter", base, ["embed_tokens", "lm_head"])
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
        assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted, atol=1e-5)

    def test_without_a_base_are_told_to_lack_it(self, tmp_path: Path) -> None:
        self.trained(tmp_path / "adapter", base_of(tmp_path / "base", tied=True), ["embed_tokens"], ensure_weight_tying=True)
        (tmp_path / "base").rename(tmp_path / "moved")
        assert ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out").outputs[0].lora.outcome == "exported"  # type: ignore[union-attr]

    def test_with_a_head_that_was_trained_as_a_whole_is_not_said_to_change_it(self, tmp_path: Path) -> None:
        base = base_of(tmp_path / "base", tied=True)
        self.trained(tmp_path / "adapter", base, ["embed_tokens"], modules_to_save=["lm_head"])
        tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        head = "base_model.model.lm_head.weight"
        save_file({**tensors, head: tensors[head] + 1}, tmp_path / "adapter" / "adapter_model.safetensors")
        codes = {note.code for note in ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base).outputs[0].notes}
        assert "tied-heads-differ" in codes
        assert "lora-tied" not in codes

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("options", [{}, {"modules_to_save": ["norm"]}, {"bias": "all"}], ids=["alone", "beside a norm", "biases"])
    @pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=["embedding", "head", "both"])
    def test_are_on_their_base_where_the_file_has_a_copy_of_each(
        self, modules: list[str], options: dict[str, Any], tied: bool, tmp_path: Path
    ) -> None:
        from transformers import AutoModelForCausalLM

        base = base_of(tmp_path / "base", tied=tied)
        wanted = self.trained(tmp_path / "adapter", base, modules, **options)
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
        assert load(tmp_path / "out").keys() == load(base).keys()
        if not tied:
            assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted, atol=1e-5)


class TestAnEmbeddingTrainedAsAWhole:
    """PEFT trains a copy of what ``modules_to_save`` names: a head that is tied to the embedding keeps the values of the base."""

    def trained(self, folder: Path, base: Path, **options: Any) -> torch.Tensor:
        """Saves an adapter with trained copies; the logits of the model with it."""
        from transformers import AutoModelForCausalLM

        settings = {"modules_to_save": ["embed_tokens"], **options}
        config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **settings})
        wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        torch.manual_seed(0)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
        wrapped.save_pretrained(folder)
        return logits(wrapped)

    @pytest.mark.parametrize(
        "options", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}, {"modules_to_save": ["lm_head"]}, {"ensure_weight_tying": True}]
    )
    @pytest.mark.parametrize(("tied", "stored"), [(True, False), (True, True), (False, False)], ids=["tied", "tied, both stored", "untied"])
    def test_computes_what_training_did(self, options: dict[str, Any], tied: bool, stored: bool, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        base = base_of(tmp_path / "base", tied=tied, stored=stored)
        wanted = self.trained(tmp_path / "adapter", base, **options)
        result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base, verify=True)
        assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted, atol=1e-5)
        told = {note.code: note for note in result.outputs[0].notes}
        assert ("tied-heads-differ" in told) == (tied and "ensure_weight_tying" not in options)
        assert ("lora-tied" in told) == (tied and not stored and not options)
        assert not ckpt_cli.verify(tmp_path / "out", full=True, against=tmp_path / "adapter").of_severity("error")

    def test_with_an_adapter_on_the_head(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        base = base_of(tmp_path / "base", tied=True)
        wanted = self.trained(tmp_path / "adapter", base, target_modules=["q_proj", "lm_head"])
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
        assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted, atol=1e-5)

    @pytest.mark.parametrize("way", ["more rows", "class unknown"])
    def test_is_warned_of_where_the_head_is_not_known(self, way: str, tmp_path: Path) -> None:
        base = base_of(tmp_path / "base", tied=True)
        self.trained(tmp_path / "adapter", base)
        if way == "more rows":
            path, name = tmp_path / "adapter" / "adapter_model.safetensors", "base_model.model.model.embed_tokens.weight"
            tensors = load_file(path)
            save_file({**tensors, name: torch.cat([tensors[name], torch.ones(8, 16)])}, path, metadata={"format": "pt"})
            (base / "config.json").write_text(json.dumps(tiny.config(tie_word_embeddings=True, vocab_size=72)))
        else:
            (base / "config.json").write_text(json.dumps(tiny.unknown(tie_word_embeddings=True)))
        result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
        (told,) = (note for note in result.outputs[0].notes if note.code == "lora-tied")
        assert (told.level, "the output has the trained one in both" in told.text) == ("warning", True)

    def test_that_no_config_names_was_only_resized(self, tmp_path: Path) -> None:
        """PEFT saves a resized embedding unasked: its head is the same one."""
        base = base_of(tmp_path / "base", tied=True)
        self.trained(tmp_path / "adapter", base, modules_to_save=None)
        path = tmp_path / "adapter" / "adapter_model.safetensors"
        save_file({**load_file(path), "base_model.model.model.embed_tokens.weight": torch.ones(72, 16)}, path, metadata={"format": "pt"})
        (base / "config.json").write_text(json.dumps(tiny.config(tie_word_embeddings=True, vocab_size=72)))
        result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=base)
        assert "lora-tied" not in {note.code for note in result.outputs[0].notes}


@pytest.mark.usefixtures("quiet_transformers")
def test_peft_ties_only_embeddings_of_names_that_it_knows(tmp_path: Path) -> None:
    """GPT-2's ``wte`` is none of them: whatever ``ensure_weight_tying`` says, its head kept the values of the base in training."""
    from tests.architectures import MODELS, build

    model = build(*MODELS["gpt2"])
    assert model.config.tie_word_embeddings
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["wte"], ensure_weight_tying=True))
    wrapped.get_input_embeddings().weight.data.add_(1)
    wrapped.save_pretrained(tmp_path / "adapter")
    head = wrapped.merge_and_unload().lm_head.weight
    result = ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", verify=True)
    assert result.exit_code == 0
    assert torch.equal(load(tmp_path / "out")["lm_head.weight"], head)
    assert not torch.equal(load(tmp_path / "out")["lm_head.weight"], load(tmp_path / "out")["transformer.wte.weight"])
