"""A merge writes what `save_pretrained` would have written: the same names, shapes, dtypes and bytes, for every architecture."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.dtypes import BY_TORCH
from ckpt_cli.errors import Inconsistent, UsageError
from ckpt_cli.hub.classes.known_names import class_names
from ckpt_cli.hub.classes.names import hub_tensors, native_names, natural_key, renamed_for_hub, unknown_operations
from ckpt_cli.hub.classes.rules import FILE, rules_for
from ckpt_cli.hub.critics import repaired_class
from ckpt_cli.names import Naming
from ckpt_cli.tensors.tensor import Tensor
from tests.architectures import COMPILED, DENSE, EXPERTS, GROUPS, LATENT, MODELS, answered_here, build
from tests.tensors import differences, load
from tests.training import trained

os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(autouse=True)
def quiet(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is asked in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


@pytest.mark.parametrize("name", MODELS)
class TestEveryArchitecture:
    def test_is_written_as_save_pretrained_writes_it(self, tmp_path: Path, name: str) -> None:
        run = trained(build(*MODELS[name]), tmp_path)
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(tmp_path / "saved")) == []
        count = len(load(tmp_path / "saved"))
        assert result.outputs[0].naming.startswith(f"those of the hub: {count} of {count} tensors of {MODELS[name][0]} (transformers")

    @pytest.mark.parametrize("names", ["hub", "native"])
    def test_is_verified_without_a_warning(self, tmp_path: Path, name: str, names: Naming) -> None:
        run = trained(build(*MODELS[name]), tmp_path)
        ckpt_cli.merge(run, tmp_path / "out", names=names)
        result = ckpt_cli.verify(tmp_path / "out", full=True, against=run)
        # The default configs of some ask for multi-token prediction, which transformers has no place for.
        assert {item.code for item in result.findings if item.severity != "info"} <= {"no-prediction-layers"}
        assert not {"not-compared", "extra-tensor", "tied-stored"} & {item.code for item in result.findings}
        assert result.expected == len(load(tmp_path / ("saved" if names == "hub" else "out")))
        assert result.against[0].identical

    def test_is_left_alone_if_it_has_these_names_already(self, tmp_path: Path, name: str) -> None:
        build(*MODELS[name]).save_pretrained(tmp_path / "saved")
        result = ckpt_cli.merge(tmp_path / "saved", tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(tmp_path / "saved")) == []
        assert result.outputs[0].renamed == 0


@pytest.mark.parametrize("name", ["qwen3, tied", "qwen3_moe", "mixtral", "gpt_oss", "qwen2_5_vl", "t5", "mistral3", "jamba", "bert"])
def test_the_merged_model_computes_the_same(tmp_path: Path, name: str) -> None:
    model = build(*MODELS[name])
    run = trained(model, tmp_path)
    ckpt_cli.merge(run, tmp_path / "out")
    loaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    words = {"input_ids": torch.tensor([[3, 4, 5, 6]])}
    if name == "t5":
        words["decoder_input_ids"] = torch.tensor([[1, 2]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**words).logits, model(**words).logits)


def test_names_as_trained_are_kept_on_request(tmp_path: Path) -> None:
    model = build(*MODELS["qwen3_moe"])
    run = trained(model, tmp_path)
    result = ckpt_cli.merge(run, tmp_path / "out", names="native")
    assert load(tmp_path / "out").keys() == model.state_dict().keys()
    assert result.outputs[0].naming.startswith("as the training named them: 25 of 25 tensors of Qwen3MoeForCausalLM")


class TestCritics:
    """verl trains a value model under the config of the language model that it began as."""

    @pytest.mark.parametrize("labels", [1, 2])
    def test_of_token_classification_get_the_class_that_has_their_head(self, tmp_path: Path, labels: int) -> None:
        model = build("Qwen3ForTokenClassification", "qwen3", {**MODELS["qwen3, tied"][2], "num_labels": labels})
        run = trained(model, tmp_path)
        config = run / "huggingface" / "config.json"
        content = json.loads(config.read_text())
        content.update(architectures=["Qwen3ForCausalLM"])
        for name in ("id2label", "label2id", "num_labels"):
            content.pop(name, None)
        config.write_text(json.dumps(content))
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert ("info", "class-repaired") in {(note.level, note.code) for note in result.outputs[0].notes}
        loaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        words = {"input_ids": torch.tensor([[3, 4, 5, 6]])}
        with torch.no_grad():
            assert torch.equal(loaded.eval()(**words).logits, model(**words).logits)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen3ForTokenClassification"]

    def test_of_which_only_the_base_has_a_config_may_be_of_another_class(self, tmp_path: Path) -> None:
        """A module of the user's own around the body, with a head called alike, which pools otherwise."""
        kind, model_type, options = MODELS["qwen3, tied"]
        build(kind, model_type, options).save_pretrained(tmp_path / "base")
        model = build("Qwen3ForTokenClassification", "qwen3", {**options, "num_labels": 1})
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        result = ckpt_cli.merge(tmp_path / "pytorch_model.bin", tmp_path / "out", base=tmp_path / "base")
        (told,) = [note for note in result.outputs[0].notes if note.code == "class-repaired"]
        assert told.level == "warning"
        assert "may be another class than was trained" in told.text

    def test_without_a_bias_are_sequence_classifiers(self) -> None:
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        assert repaired_class(config, {"score.weight": (2, 8)}) == {"architectures": ["Qwen2ForSequenceClassification"]}
        assert repaired_class(config, {"score.weight": (1, 8)})["num_labels"] == 1
        assert repaired_class({**config, "num_labels": 1}, {"score.weight": (1, 8)}).keys() == {"architectures"}

    def test_that_nobody_knows_are_left_alone(self) -> None:
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        assert repaired_class(config, {"score.weight": (2, 8), "lm_head.weight": (9, 8)}) == {}
        assert repaired_class(config, {"v_head.summary.weight": (1, 8)}) == {}
        assert repaired_class({**config, "architectures": ["OwnForCausalLM"]}, {"score.weight": (2, 8)}) == {}


class TestWhatIsNotKnown:
    def test_an_architecture_keeps_its_names_and_that_is_said(self, tmp_path: Path) -> None:
        run = trained(build(*MODELS["qwen2"]), tmp_path)
        config = run / "huggingface" / "config.json"
        config.write_text(config.read_text().replace("Qwen2ForCausalLM", "SomethingNew").replace('"qwen2"', '"something_new"'))
        result = ckpt_cli.merge(run, tmp_path / "out")
        said = "as the training named them, not compared: transformers 5.24.0 cannot build SomethingNew from this config"
        assert result.outputs[0].naming.startswith(f"{said}: ")
        assert "something_new" in result.outputs[0].naming.removeprefix(said)
        assert differences(load(tmp_path / "out"), load(tmp_path / "saved")) == []

    def test_without_a_config_the_names_are_those_of_the_training(self, tmp_path: Path) -> None:
        run = trained(build(*MODELS["qwen2"]), tmp_path)
        (run / "huggingface" / "config.json").unlink()
        assert (
            ckpt_cli.merge(run, tmp_path / "out").outputs[0].naming == "as the training named them, not compared: there is no config.json"
        )

    @pytest.mark.parametrize("name", COMPILED)
    def test_a_composition_is_compiled_once_and_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        run = trained(build(*COMPILED[name]), tmp_path)
        result = ckpt_cli.merge(run, tmp_path / "out")
        count = len(load(tmp_path / "saved"))
        assert result.outputs[0].naming.startswith(f"those of the hub: {count} of {count} tensors of {COMPILED[name][0]}")
        assert differences(load(tmp_path / "out"), load(tmp_path / "saved")) == []
        kept = list((tmp_path / "cache" / "ckpt" / "hub_rules").iterdir())
        assert len(kept) == 1
        monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", lambda *_: pytest.fail("the cache was not used"))
        ckpt_cli.merge(run, tmp_path / "again")

    def test_custom_code_is_never_run_to_find_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", lambda *_: pytest.fail("a process was started"))
        assert rules_for({"architectures": ["Own"], "model_type": "own", "auto_map": {"AutoModel": "own.Own"}}) is None

    def test_a_kind_of_names_is_a_usage_error(self, tmp_path: Path) -> None:
        run = trained(build(*MODELS["qwen2"]), tmp_path)
        with pytest.raises(UsageError):
            ckpt_cli.merge(run, tmp_path / "out", names="other")


class TestTheShippedRules:
    def test_are_those_of_the_installed_transformers(self) -> None:
        """Those of the architectures that are tested here; the whole file is written by `python -m ckpt_cli.hub.classes.compile --all`."""
        from transformers import logging

        from ckpt_cli.hub.classes.compile import compile_model

        logging.set_verbosity_error()
        content = json.loads(FILE.read_text())
        for kind, model_type, _ in MODELS.values():
            import transformers
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            compiled = compile_model(getattr(transformers, kind), CONFIG_MAPPING[model_type]())
            index, ties, parts = content["models"][f"{model_type}/{kind}"]
            assert {**content["rules"][index], "ties": ties, "parts": parts} == compiled, kind

    def test_cover_many_architectures_and_few_unknown_operations(self) -> None:
        content = json.loads(FILE.read_text())
        built = [key.split("/") for key, entry in content["models"].items() if entry is not None]
        assert len(built) > 1400
        configs = [{"model_type": model_type, "architectures": [kind]} for model_type, kind in built]
        unknown = {config["architectures"][0] for config in configs if (rules := rules_for(config)) and unknown_operations(rules)}
        assert all(re.match("Ernie4_5_VL|Inkling", name) for name in unknown), unknown

    def test_leave_every_name_in_memory_alone(self) -> None:
        """Expressions for names of the hub match names in memory too: "state_proj" is in "embed_action_time.state_proj"."""
        changed = []
        for key in json.loads(FILE.read_text())["models"]:
            model_type, _, kind = key.partition("/")
            config = {"model_type": model_type, "architectures": [kind]}
            rules, known = rules_for(config), class_names(config)
            if rules is not None and known is not None:
                names = [name.replace("{}", "0") for name in known.native]
                changed += [(key, old, new) for old, new in native_names(names, rules).items() if old != new]
        assert changed == []

    def test_leave_what_they_made_alone(self) -> None:
        """Expressions for names in memory match parts of names of the hub: "conv1d.weight" is in "q_conv1d.weight"."""
        changed = []
        for key, entry in json.loads(FILE.read_text())["models"].items():
            model_type, _, kind = key.partition("/")
            config = {"model_type": model_type, "architectures": [kind]}
            rules = rules_for(config) if entry is not None else None
            if rules is not None and not unknown_operations(rules):
                names = {name for name in (pattern.replace("{}", "0") for pattern in rules.hub) if rules.only_on_hub(name)}
                made = hub_tensors({name: Tensor(name, BY_TORCH["float32"], (1,), ()) for name in names}, rules, config)
                changed += [(key, name) for name in made.keys() ^ names]
        assert changed == []

    def test_leave_a_saved_model_alone_of_which_they_match_parts(self, tmp_path: Path) -> None:
        options = {
            **DENSE, **EXPERTS, **LATENT, **GROUPS, "head_dim": 8, "num_hidden_layers": 4, "num_experts": 4, "num_shared_experts": 1,
            "layer_group_size": 2, "moe_shared_expert_intermediate_size": 24, "num_nextn_predict_layers": 0,
        }  # fmt: skip
        model = build("BailingHybridForCausalLM", "bailing_hybrid", options)
        model.save_pretrained(tmp_path / "saved")
        assert any(name.endswith("q_conv1d.weight") for name in load(tmp_path / "saved"))
        ckpt_cli.merge(tmp_path / "saved", tmp_path / "out")
        ckpt_cli.merge(trained(model, tmp_path), tmp_path / "again")
        for made in ("out", "again"):
            assert differences(load(tmp_path / made), load(tmp_path / "saved")) == []

    @pytest.mark.parametrize("sizes", [(16, 16, 32), (24, 24, 16), (22, 22, 20)], ids=["heads", "others", "equal"])
    def test_cut_what_files_may_divide_otherwise(self, sizes: tuple[int, ...], tmp_path: Path) -> None:
        """Query, key and value of other sizes: save_pretrained cuts their convolution in thirds, and loaders join any parts."""
        linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        model = build("OlmoHybridForCausalLM", "olmo_hybrid", {**DENSE, **linear, "num_hidden_layers": 4})
        run = trained(model, tmp_path)
        ckpt_cli.merge(run, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(tmp_path / "saved")) == []
        weights = load(tmp_path / "saved")
        for layer in {name.rpartition(".q_conv1d")[0] for name in weights if ".q_conv1d" in name}:
            names = [f"{layer}.{part}_conv1d.weight" for part in "qkv"]
            joined = torch.cat([weights[name] for name in names])
            weights |= {name: part.clone() for name, part in zip(names, joined.split(sizes), strict=True)}
        save_file(weights, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
        made = ckpt_cli.merge(tmp_path / "saved", tmp_path / "again").outputs[0]
        assert made.compared is not None
        assert made.compared.fitting == made.compared.expected
        assert not made.compared.reshaped
        assert "wrong-shape" not in {item.code for item in ckpt_cli.verify(tmp_path / "again").findings}
        back = type(model).from_pretrained(tmp_path / "again").state_dict()
        assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())
        names = [name for name in weights if name.endswith("v_conv1d.weight")]
        save_file({**weights, names[0]: weights[names[0]][1:].clone()}, tmp_path / "saved" / "model.safetensors")
        with pytest.raises(Inconsistent):
            ckpt_cli.merge(tmp_path / "saved", tmp_path / "cut")

    @pytest.mark.parametrize(
        ("model_type", "kind", "native", "hub"),
        [
            ("pi0", "PI0ForConditionalGeneration", "embed_action_time.state_proj.weight", "state_proj.weight"),
            ("axk1", "AXK1ForCausalLM", "model.layers.0.mlp.post_mlp_layernorm.weight", "model.layers.0.post_mlp_layernorm.weight"),
            ("dinov3_vit", "DINOv3ViTModel", "model.layer.0.layer_scale2.lambda1", "layer.0.layer_scale2.lambda1"),
        ],
    )
    def test_know_one_tensor_by_both_of_its_names(self, model_type: str, kind: str, native: str, hub: str) -> None:
        rules = rules_for({"model_type": model_type, "architectures": [kind]})
        assert rules is not None
        assert [native_names([name], rules)[name] for name in (native, hub)] == [native, native]
        assert list(renamed_for_hub({native: ()}, rules)) == [hub]

    def test_are_matched_in_the_order_of_transformers(self) -> None:
        from transformers.core_model_loading import dot_natural_key

        names = ["a.10.w", "a.9.w", "a.b2.w", "a.b10.w", "a.b.w", "a.2", "b", "a"]
        assert sorted(names, key=natural_key) == sorted(names, key=dot_natural_key)


def test_averages_have_hub_names_as_well(tmp_path: Path) -> None:
    run = trained(build("Qwen3MoeForCausalLM", "qwen3_moe", MODELS["qwen3_moe"][2]), tmp_path)
    ckpt_cli.average([run, tmp_path / "saved"], tmp_path / "out")
    assert differences(load(tmp_path / "out"), load_file(tmp_path / "saved" / "model.safetensors")) == []
