"""A merge writes what `save_pretrained` would have written: the same names, shapes, dtypes and bytes, for every architecture."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_cli
from ckpt_cli.errors import UsageError
from ckpt_cli.hub.classes.known_names import class_names
from ckpt_cli.hub.classes.names import native_names, natural_key, renamed_for_hub, unknown_operations
from ckpt_cli.hub.classes.rules import FILE, rules_for
from ckpt_cli.hub.critics import repaired_class
from ckpt_cli.names import Naming
from tests.architectures import COMPILED, MODELS, answered_here, build
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
        assert "class-repaired" in {note.code for note in result.outputs[0].notes}
        loaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        words = {"input_ids": torch.tensor([[3, 4, 5, 6]])}
        with torch.no_grad():
            assert torch.equal(loaded.eval()(**words).logits, model(**words).logits)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen3ForTokenClassification"]

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
        config.write_text(config.read_text().replace("Qwen2ForCausalLM", "SomethingNew"))
        result = ckpt_cli.merge(run, tmp_path / "out")
        said = "as the training named them, not compared: transformers 5.24.0 cannot build SomethingNew from this config"
        assert result.outputs[0].naming.startswith(f"{said}: ")
        assert "SomethingNew" in result.outputs[0].naming.removeprefix(said)
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
