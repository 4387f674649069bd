"""Bases whose files have older names, or those of a class with another head, are compared and fused as loading sees them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent, Undecidable
from ckpt_cli.hub.classes.in_memory.loaded import LoadedNames, loaded_names_of
from ckpt_cli.hub.classes.known_names import class_names, types_of
from ckpt_cli.hub.classes.rules import _shipped
from ckpt_cli.lora.on_base.trained_class import trained_config
from tests.architectures import MODELS, WORDS, build
from tests.tensors import load

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")),
    pytest.mark.usefixtures("quiet_transformers", "asked_here"),
]

State = dict[str, torch.Tensor]
Form = Callable[[Mapping[str, torch.Tensor]], State]


def as_it_is(state: Mapping[str, torch.Tensor]) -> State:
    return dict(state)


def tensorflows(state: Mapping[str, torch.Tensor]) -> State:
    """As google-bert/bert-base-uncased has it."""
    words = {"weight": "LayerNorm.gamma", "bias": "LayerNorm.beta"}
    return {re.sub(r"LayerNorm\.(weight|bias)$", lambda found: words[found[1]], name): tensor for name, tensor in state.items()}


def bare(state: Mapping[str, torch.Tensor]) -> State:
    """As openai-community/gpt2 and bigscience/bloom-560m have it, with the masks of attention, which were buffers."""
    state = {re.sub(r"^(transformer|bert)\.", "", name): tensor for name, tensor in state.items()}
    masks = {f"{name}.attn.bias" for name in {name[:3] for name in state if ".attn.c_attn." in name}}
    return {**state, **{name: torch.ones(1, 1, 32, 32) for name in masks}}


def both(state: Mapping[str, torch.Tensor]) -> State:
    return bare(tensorflows(state))


def before_parametrizations(state: Mapping[str, torch.Tensor]) -> State:
    """As facebook/wav2vec2-base has it."""
    return {re.sub(r"parametrizations\.weight\.original(\d)", lambda n: f"weight_{'gv'[int(n[1])]}", key): t for key, t in state.items()}


def of_a_tower(state: Mapping[str, torch.Tensor]) -> State:
    """As the text encoder of Stable Diffusion has it."""
    return {f"text_model.{name}": tensor for name, tensor in state.items()}


SIZES: dict[str, dict[str, Any]] = {
    "bert": {**WORDS, "max_position_embeddings": 32},
    "roberta": {**WORDS, "max_position_embeddings": 40},
    "clip_text_model": {**WORDS, "max_position_embeddings": 16},
    "gpt2": dict(MODELS["gpt2"][2]),
    "bloom": dict(MODELS["bloom"][2]),
    "llama": dict(MODELS["llama"][2]),
    "wav2vec2": {
        **WORDS, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    },
}  # fmt: skip
TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}


def base_of(model_type: str, kind: str, form: Form, folder: Path) -> Path:
    """A base of a class, with its tensors in a form of other days."""
    build(kind, model_type, SIZES[model_type]).save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in form(load(folder)).items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def loaded(kind: str, folder: Path) -> Any:
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)


def moved(model: Any, scale: float = 0.2) -> Any:
    """The model with other values in what is trained."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    return model


def assert_loads_as(kind: str, folder: Path, wanted: Mapping[str, torch.Tensor], made_anew: tuple[str, ...] = ()) -> None:
    """Every tensor of the model is what it was in the one that was trained; ``made_anew`` neither the base nor the adapter has."""
    found = loaded(kind, folder).state_dict()
    assert found.keys() == wanted.keys()
    others = [name for name, tensor in wanted.items() if not torch.allclose(found[name], tensor, atol=1e-5)]
    assert [name for name in others if not name.startswith(made_anew or ("-",))] == []


def run_of(model: Any, kind: str, folder: Path) -> Path:
    """What a trainer saves that knows nothing of ``save_pretrained``: the names of the class."""
    folder.mkdir()
    model.config.architectures = [kind]
    model.config.save_pretrained(folder)
    torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "pytorch_model.bin")
    return folder


def codes(result: Any) -> set[str]:
    return {note.code for note in result.outputs[0].notes if note.level != "info"}


ADAPTED: list[tuple[str, str, Form, str, dict[str, Any]]] = [
    ("bert", "BertForPreTraining", tensorflows, "BertForPreTraining", {"modules_to_save": ["LayerNorm"]}),
    ("bert", "BertForPreTraining", tensorflows, "BertForSequenceClassification", {"modules_to_save": ["LayerNorm", "classifier"]}),
    ("bert", "BertForPreTraining", tensorflows, "BertForSequenceClassification", {"bias": "all"}),
    ("bert", "BertForPreTraining", both, "BertForSequenceClassification", {"modules_to_save": ["LayerNorm"]}),
    ("bert", "BertModel", tensorflows, "BertForSequenceClassification", {"modules_to_save": ["LayerNorm"]}),
    ("bert", "BertForMaskedLM", tensorflows, "BertModel", {"modules_to_save": ["LayerNorm"]}),
    ("roberta", "RobertaForMaskedLM", as_it_is, "RobertaForSequenceClassification", {"bias": "all"}),
    ("gpt2", "GPT2LMHeadModel", bare, "GPT2LMHeadModel", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ("gpt2", "GPT2LMHeadModel", bare, "GPT2LMHeadModel", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    ("gpt2", "GPT2LMHeadModel", bare, "GPT2ForSequenceClassification", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ("bloom", "BloomForCausalLM", bare, "BloomForCausalLM", {"target_modules": ["query_key_value"]}),
    ("llama", "LlamaForCausalLM", as_it_is, "LlamaModel", {"target_modules": ["q_proj"]}),
    ("clip_text_model", "CLIPTextModel", of_a_tower, "CLIPTextModel", {"target_modules": ["q_proj"], "bias": "all"}),
    ("wav2vec2", "Wav2Vec2ForCTC", before_parametrizations, "Wav2Vec2ForCTC", {"target_modules": ["q_proj"]}),
]


def saved_while_merged(model: Any, run: Path) -> Path:
    """The whole state of a model of PEFT whose adapters are in its weights already."""
    model.save_pretrained(run)
    (run / "adapter_model.safetensors").unlink()
    model.get_base_model().config.save_pretrained(run)
    model.merge_adapter()
    torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, run / "pytorch_model.bin")
    return run


class TestAdapters:
    @pytest.mark.parametrize(("model_type", "of_base", "form", "kind", "options"), ADAPTED)
    def test_are_fused_as_peft_does(
        self, model_type: str, of_base: str, form: Form, kind: str, options: dict[str, Any], tmp_path: Path
    ) -> None:
        base = base_of(model_type, of_base, form, tmp_path / "base")
        task = next((task for ending, task in TASKS.items() if kind.endswith(ending)), None)
        settings = {"target_modules": ["query", "value"], **options}
        model = moved(peft.get_peft_model(loaded(kind, base), peft.LoraConfig(r=4, task_type=task, **settings)))
        model.save_pretrained(tmp_path / "run")
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)
        assert not codes(result) & {"other-base", "unlike-base", "partial-adapter", "doubled-prefix"}
        assert_loads_as(kind, tmp_path / "out", model.merge_and_unload().state_dict(), ("pooler",))
        assert ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run", base=base).exit_code == 0
        ckpt_cli.merge(tmp_path / "run", tmp_path / "exported", base=base, lora="export")

    def test_that_lack_a_bias_of_their_own_class_are_refused(self, tmp_path: Path) -> None:
        base = base_of("bert", "BertForPreTraining", tensorflows, tmp_path / "base")
        config = peft.LoraConfig(r=4, task_type="SEQ_CLS", target_modules=["query"], bias="all")
        moved(peft.get_peft_model(loaded("BertForSequenceClassification", base), config)).save_pretrained(tmp_path / "run")
        held = load(tmp_path / "run")
        del held["base_model.model.bert.embeddings.LayerNorm.bias"]
        save_file(held, tmp_path / "run" / "adapter_model.safetensors")
        with pytest.raises(Inconsistent, match=r"\(all\), but bert.embeddings.LayerNorm.bias is missing"):
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)

    def test_in_a_state_beside_the_weights_are_compared_with_that_base(self, tmp_path: Path) -> None:
        base = base_of("gpt2", "GPT2LMHeadModel", bare, tmp_path / "base")
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        model = moved(peft.get_peft_model(loaded("GPT2LMHeadModel", base), config))
        model.config.architectures = ["GPT2LMHeadModel"]
        run = saved_while_merged(model, tmp_path / "run")
        with pytest.raises(Inconsistent, match="in these weights already") as caught:
            ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert "merge that with this --base" in caught.value.advice

    def test_saved_while_merged_are_for_peft_where_this_base_does_not_go_together(self, tmp_path: Path) -> None:
        """One expert of another dtype: nothing here makes the fused one that an adapter is for."""
        build(*MODELS["qwen3_moe"]).save_pretrained(tmp_path / "base")
        options = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
        model = moved(peft.get_peft_model(loaded("Qwen3MoeForCausalLM", tmp_path / "base"), options))
        held, name = load(tmp_path / "base"), "model.layers.0.mlp.experts.1.down_proj.weight"
        save_file({**held, name: held[name].bfloat16()}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
        run = saved_while_merged(model, tmp_path / "run")
        with pytest.raises(Inconsistent, match="in these weights already") as caught:
            ckpt_cli.merge(run, tmp_path / "out", base=tmp_path / "base")
        assert "--lora export, without --base, to write the adapter alone, and fuse it into the base with PEFT" in caught.value.advice
        ckpt_cli.merge(run, tmp_path / "adapter", lora="export")
        with pytest.raises(Undecidable, match="is not here"):
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")


TRAINED: list[tuple[str, str, Form, str]] = [
    ("bert", "BertForMaskedLM", tensorflows, "BertForMaskedLM"),
    ("bert", "BertForPreTraining", both, "BertForMaskedLM"),
    ("gpt2", "GPT2LMHeadModel", bare, "GPT2LMHeadModel"),
    ("bloom", "BloomForCausalLM", bare, "BloomForCausalLM"),
    ("wav2vec2", "Wav2Vec2ForCTC", before_parametrizations, "Wav2Vec2ForCTC"),
]


class TestAFullRun:
    @pytest.mark.parametrize(("model_type", "of_base", "form", "kind"), TRAINED)
    def test_is_compared_with_its_base(self, model_type: str, of_base: str, form: Form, kind: str, tmp_path: Path) -> None:
        base = base_of(model_type, of_base, form, tmp_path / "base")
        model = moved(loaded(kind, base), scale=0.01)
        run = run_of(model, kind, tmp_path / "run")
        result = ckpt_cli.merge(run, tmp_path / "out", base=base, dtype="base", compare=True)
        assert codes(result) <= {"lacks-asset", "reserialised"}
        (comparison,) = [output.comparison for output in result.outputs]
        assert comparison is not None
        assert (comparison.extra, comparison.common) == ((), len(load(tmp_path / "out")))
        assert_loads_as(kind, tmp_path / "out", model.state_dict())
        verified = ckpt_cli.verify(tmp_path / "out", against=run, base=base, full=True)
        assert [item for item in verified.findings if item.severity != "info"] == []
        assert ckpt_cli.diff(base, run).compared == comparison.common

    @pytest.mark.parametrize(("model_type", "of_base", "form", "kind"), TRAINED)
    def test_that_was_saved_with_those_names_is_too(self, model_type: str, of_base: str, form: Form, kind: str, tmp_path: Path) -> None:
        """Later versions of transformers save what they load under the names that it had."""
        base = base_of(model_type, of_base, form, tmp_path / "base")
        model = moved(loaded(kind, base), scale=0.01)
        model.save_pretrained(tmp_path / "run")
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)
        assert codes(result) <= {"lacks-asset"}
        assert_loads_as(kind, tmp_path / "out", model.state_dict())
        assert ckpt_cli.verify(tmp_path / "out", base=base).exit_code == 0

    @pytest.mark.parametrize(("model_type", "of_base", "form", "kind"), TRAINED[:4])
    def test_gets_what_it_lacks_under_the_names_of_its_class(
        self, model_type: str, of_base: str, form: Form, kind: str, tmp_path: Path
    ) -> None:
        base = base_of(model_type, of_base, form, tmp_path / "base")
        model = loaded(kind, base)
        first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        run = run_of(moved(model, scale=0.01), kind, tmp_path / "run")
        glob = next(name for name in first if (".0." in name and "norm" in name.lower()) or ".0.ln_1." in name)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != glob}
        torch.save(state, run / "pytorch_model.bin")
        with pytest.raises(ckpt_cli.errors.MissingTensors) as caught:
            ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert f"the base has them: pass --carry-from-base '{glob}'" in caught.value.advice
        result = ckpt_cli.merge(run, tmp_path / "out", base=base, carry_from_base=glob)
        assert result.outputs[0].carried == (glob,)
        assert_loads_as(kind, tmp_path / "out", {**model.state_dict(), glob: first[glob]})

    def test_in_the_form_of_its_base_keeps_the_names_of_its_class(self, tmp_path: Path) -> None:
        base = base_of("bloom", "BloomForCausalLM", bare, tmp_path / "base")
        run = run_of(moved(loaded("BloomForCausalLM", base), scale=0.01), "BloomForCausalLM", tmp_path / "run")
        ckpt_cli.merge(run, tmp_path / "out", base=base, match_base=True)
        assert load(tmp_path / "out").keys() == {f"transformer.{name}" for name in load(base)}

    def test_of_another_base_is_still_told(self, tmp_path: Path) -> None:
        base = base_of("gpt2", "GPT2LMHeadModel", bare, tmp_path / "base")
        other = build("GPT2LMHeadModel", "gpt2", {**SIZES["gpt2"], "n_embd": 48})
        with pytest.raises(Inconsistent, match="the base is another model: 28 of 28 tensors have a name that is in the base"):
            ckpt_cli.merge(run_of(other, "GPT2LMHeadModel", tmp_path / "run"), tmp_path / "out", base=base)

    def test_is_averaged_with_its_base(self, tmp_path: Path) -> None:
        base = base_of("bert", "BertForMaskedLM", tensorflows, tmp_path / "base")
        first = loaded("BertForMaskedLM", base).state_dict()
        model = moved(loaded("BertForMaskedLM", base), scale=0.01)
        ckpt_cli.average([base, run_of(model, "BertForMaskedLM", tmp_path / "run")], tmp_path / "out")
        assert_loads_as("BertForMaskedLM", tmp_path / "out", {name: (first[name] + own) / 2 for name, own in model.state_dict().items()})

    @pytest.mark.parametrize(("model_type", "of_base", "form", "kind"), [TRAINED[0], TRAINED[4]])
    def test_starts_from_such_a_folder(self, model_type: str, of_base: str, form: Form, kind: str, tmp_path: Path) -> None:
        base = base_of(model_type, of_base, form, tmp_path / "base")
        wanted, model = loaded(kind, base).state_dict(), build(kind, model_type, SIZES[model_type])
        ckpt_cli.load_into(moved(model), base)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


class TestTwoTensorsForOneParameter:
    def folder(self, tmp_path: Path) -> Path:
        """What a merge of earlier days made of trained norms and a base with TensorFlow's words."""
        base_of("bert", "BertForMaskedLM", as_it_is, tmp_path / "model")
        held = load(tmp_path / "model")
        older = {name: tensor + 1 for name, tensor in tensorflows(held).items() if name not in held}
        save_file({**held, **older}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
        return tmp_path / "model"

    def test_are_refused(self, tmp_path: Path) -> None:
        """transformers takes one of them, here the base's."""
        folder = self.folder(tmp_path)
        held, name = load(folder), "bert.embeddings.LayerNorm.weight"
        assert not torch.equal(loaded("BertForMaskedLM", folder).state_dict()[name], held[name])
        with pytest.raises(Inconsistent, match=r"12 tensors are a second one .* beside bert\.embeddings\.LayerNorm\.") as caught:
            ckpt_cli.merge(folder, tmp_path / "out")
        globs = re.findall(r"--exclude (\S+)", str(caught.value.hint).replace("'", ""))
        ckpt_cli.merge(folder, tmp_path / "out", exclude=globs)
        assert torch.equal(loaded("BertForMaskedLM", tmp_path / "out").state_dict()[name], held[name])

    def test_are_an_error_of_the_folder(self, tmp_path: Path) -> None:
        result = ckpt_cli.verify(self.folder(tmp_path))
        found = [item for item in result.findings if item.severity != "info"]
        assert (result.exit_code, len(found), {item.code for item in found}) == (1, 12, {"second-tensor"})

    def test_with_and_without_a_prefix_are_too(self, tmp_path: Path) -> None:
        folder = base_of("gpt2", "GPT2LMHeadModel", as_it_is, tmp_path / "model")
        held = load(folder)
        save_file({**held, "ln_f.weight": held["transformer.ln_f.weight"] + 1}, folder / "model.safetensors", {"format": "pt"})
        assert {item.code for item in ckpt_cli.verify(folder).findings if item.severity == "error"} == {"second-tensor"}


class TestNames:
    def test_of_no_class_are_taken_for_others(self) -> None:
        """Of each twelfth class that transformers has, the names are what they are in memory, and none is another one's."""
        for key in list(_shipped()["models"])[::12]:
            model_type, kind = key.split("/")
            config = {"model_type": model_type, "architectures": [kind]}
            known, names = loaded_names_of(config), class_names(config)
            if known is None or names is None:
                continue
            native, hub = ([name.replace("{}", "0") for name in side] for side in (names.native, names.hub))
            assert known.of(native) == {name: name for name in native}, key
            assert (known.beside(native), known.beside(hub)) == ({}, {}), key

    def test_are_those_that_loading_makes_of_them(self) -> None:
        known = loaded_names_of({"model_type": "bert", "architectures": ["BertForMaskedLM"]})
        assert known is not None
        assert types_of("BertForMaskedLM") == ["bert"]
        made = {
            "embeddings.LayerNorm.gamma": "bert.embeddings.LayerNorm.weight",
            "bert.encoder.layer.3.output.LayerNorm.beta": "bert.encoder.layer.3.output.LayerNorm.bias",
            "cls.predictions.bias": "cls.predictions.bias",
            "classifier.weight": "classifier.weight",
            "encoder.layer.0.attention.self.query.more": "bert.encoder.layer.0.attention.self.query.more",
        }
        assert known.of(made) == made
        clip = loaded_names_of({"model_type": "clip_text_model", "architectures": ["CLIPTextModel"]})
        assert clip is not None
        towers = [name.replace("{}", "0") for name in clip.patterns]
        own, others = ([f"{start}{name}" for name in towers] for start in ("text_model.", "vision_model."))
        assert clip.of([*own, *others[1:]]) == {**dict(zip(own, towers, strict=True)), **{name: name for name in others[1:]}}
        assert clip.of([*own, *others]) == {name: name for name in (*own, *others)}  # nothing tells which it is
        two = ["bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight"]
        assert known.of(two) == dict(zip(two, two, strict=True))
        assert known.beside(two) == {two[0]: two[1]}

    def test_of_a_class_without_a_prefix(self) -> None:
        bert = loaded_names_of({"model_type": "bert", "architectures": ["BertModel"]})
        assert bert is not None
        known = LoadedNames(bert.rules, "", frozenset({"a.LayerNorm.bias"}))
        assert known.of(["a.LayerNorm.beta", "b.LayerNorm.beta"]) == {
            "a.LayerNorm.beta": "a.LayerNorm.bias",
            "b.LayerNorm.beta": "b.LayerNorm.beta",
        }


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"task_type": "SEQ_CLS"}, "BertForSequenceClassification"),
        ({"task_type": "FEATURE_EXTRACTION"}, "BertModel"),
        ({"auto_mapping": {"base_model_class": "BertForMaskedLM"}}, "BertForMaskedLM"),
        ({"auto_mapping": {"base_model_class": "MyBert"}}, "BertForPreTraining"),
        ({"task_type": "NEW"}, "BertForPreTraining"),
        ({}, "BertForPreTraining"),
    ],
)
def test_the_class_that_was_trained_is_what_the_adapter_says(settings: dict[str, Any], kind: str) -> None:
    config = {"model_type": "bert", "architectures": ["BertForPreTraining"]}
    assert trained_config(config, settings)["architectures"] == [kind]
