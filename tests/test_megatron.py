"""From what Megatron trained to what the hub has: tables of rows, a config from arguments, and proofs in both directions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, MissingTensors, Unsupported
from ckpt_cli.hub.megatron.architectures import ARCHITECTURES
from ckpt_cli.hub.megatron.config import config_from
from ckpt_cli.hub.megatron.names import parsed
from ckpt_cli.hub.megatron.settings import SETTINGS
from tests.conftest import Copy
from tests.megatron import arguments, write_legacy
from tests.tensors import Tensors, cast_floats, differences, load

CASES = (
    "legacy-qwen2-te-tp2",
    "legacy-qwen3moe-ep2",
    "llama-main-tp2",
    "llama-tp2",
    "mixtral-ep2",
    "qwen2-0.12-dist",
    "qwen3-tp2-dp2-fullypar",
    "qwen3moe-first-dense",
    "verl2-qwen3-tp2-pp2",
    "llama-tp1",
)
"""The last one does not record the size of its vocabulary, and that of verl has no arguments."""

QUICK = ("legacy-qwen3moe-ep2", "verl2-qwen3-tp2-pp2")


@pytest.fixture
def base(data: Path, tmp_path: Path) -> Any:
    """A folder with the config.json of a case, changed."""

    def make(case: str, **changes: Any) -> Path:
        folder = tmp_path / "base"
        folder.mkdir(exist_ok=True)
        config = json.loads((data / "megatron" / case / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return make


def expected(data: Path, case: str) -> Tensors:
    return load(data / "megatron" / case / "expected_hf.safetensors")


class TestHubNames:
    """What `save_pretrained` wrote of the model from which Megatron's weights were made."""

    @pytest.mark.parametrize("case", CASES)
    def test_of_a_base(self, case: str, data: Path, base: Any, tmp_path: Path) -> None:
        run = data / "megatron" / case / "checkpoint"
        ckpt_cli.merge(run, tmp_path / "out", base=base(case))
        assert differences(load(tmp_path / "out"), expected(data, case)) == []
        ckpt_cli.merge(run, tmp_path / "half", base=tmp_path / "base", dtype="bf16")
        assert differences(load(tmp_path / "half"), cast_floats(expected(data, case), torch.bfloat16)) == []

    @pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES[:-1]])
    def test_of_arguments_alone(self, case: str, data: Path, copy: Copy, tmp_path: Path) -> None:
        run = copy("megatron", case, "checkpoint")  # away from the config beside it
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert differences(load(tmp_path / "out"), expected(data, case)) == []
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        wanted = json.loads((data / "megatron" / case / "config.json").read_text())
        same = ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
        assert {key: written[key] for key in same} == {key: wanted[key] for key in same}
        made = [note for note in result.checkpoint.notes if note.code == "config-made"]
        assert len(made) == (0 if case.startswith("verl") else 1)
        assert ckpt_cli.verify(tmp_path / "out", full=True, against=run).against[0].identical

    def test_padding_is_written_where_nothing_tells_the_size_of_the_vocabulary(self, copy: Copy, tmp_path: Path) -> None:
        result = ckpt_cli.merge(copy("megatron", "llama-tp1", "checkpoint"), tmp_path / "out")
        assert load(tmp_path / "out")["lm_head.weight"].shape == (56, 24)
        assert [note.level for note in result.outputs[0].notes if note.code == "vocabulary-padded"] == ["warning"]

    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES)
    def test_the_model_gives_the_logits_of_its_oracle(self, case: str, data: Path, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        folder = data / "megatron" / case
        shutil.copytree(folder, tmp_path / "oracle", ignore=shutil.ignore_patterns("checkpoint", "expected_native*"))
        (tmp_path / "oracle" / "expected_hf.safetensors").rename(tmp_path / "oracle" / "model.safetensors")
        ckpt_cli.merge(folder / "checkpoint", tmp_path / "out")
        tokens = torch.arange(40).reshape(2, 20) % 53
        logits = []
        for path in (tmp_path / "oracle", tmp_path / "out"):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            with torch.no_grad():
                logits.append(model(tokens).logits[..., :53])
        assert torch.equal(logits[0], logits[1])

    def test_names_of_megatron_in_a_folder_of_safetensors(self, data: Path, base: Any, tmp_path: Path) -> None:
        """What `--names native` wrote can be given the names of the hub later."""
        run = data / "megatron" / "mixtral-ep2" / "checkpoint"
        ckpt_cli.merge(run, tmp_path / "native", names="native", base=base("mixtral-ep2"))
        ckpt_cli.merge(tmp_path / "native", tmp_path / "out")
        assert differences(load(tmp_path / "out"), expected(data, "mixtral-ep2")) == []


class TestTied:
    """A head that is there although the config ties it is compared with the embedding, never just left out."""

    def merged(self, data: Path, base: Any, tmp_path: Path, head: torch.Tensor | None = None) -> tuple[Tensors, list[str]]:
        weights = load(data / "megatron" / "legacy-qwen2-te-tp2" / "expected_native.safetensors")
        embedding = weights["embedding.word_embeddings.weight"]
        weights["output_layer.weight"] = embedding.clone() if head is None else head
        args = arguments(hidden_size=32, add_qkv_bias=True, layernorm_epsilon=1e-6, untie_embeddings_and_output_weights=True)
        write_legacy(tmp_path / "run", weights, args, [[2]])
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base("legacy-qwen2-te-tp2"))
        return load(tmp_path / "out"), [note.code for note in result.outputs[0].notes]

    def test_an_equal_one_is_left_out(self, data: Path, base: Any, tmp_path: Path) -> None:
        found, codes = self.merged(data, base, tmp_path)
        assert differences(found, expected(data, "legacy-qwen2-te-tp2")) == []
        assert "config-differs" in codes

    def test_one_of_its_own_is_written(self, data: Path, base: Any, tmp_path: Path) -> None:
        head = torch.ones(64, 32, dtype=torch.bfloat16)
        found, codes = self.merged(data, base, tmp_path, head)
        assert torch.equal(found["lm_head.weight"], head[:53])
        assert "tied-heads-differ" in codes


class TestAverages:
    def test_of_other_parallel_sizes_and_paddings(self, data: Path, base: Any, tmp_path: Path) -> None:
        runs = [data / "megatron" / case / "checkpoint" for case in ("llama-tp1", "llama-tp2")]
        ckpt_cli.average(runs, tmp_path / "out", base=base("llama-tp2"))
        one, two = (expected(data, case) for case in ("llama-tp1", "llama-tp2"))
        want = {name: ((one[name].double() + two[name].double()) / 2).to(one[name].dtype) for name in one}
        assert differences(load(tmp_path / "out"), want) == []

    @pytest.mark.parametrize("cases", [("llama-tp1", "llama-tp2"), ("llama-tp2", "llama-tp1")])
    def test_padding_is_never_averaged_in(self, cases: tuple[str, str], data: Path, tmp_path: Path) -> None:
        """Only one of the two records the size of its vocabulary."""
        result = ckpt_cli.average([data / "megatron" / case / "checkpoint" for case in cases], tmp_path / "out")
        assert not any(note.code == "vocabulary-padded" for output in result.outputs for note in output.notes)
        one, two = (expected(data, case) for case in cases)
        want = {name: ((one[name].double() + two[name].double()) / 2).to(one[name].dtype) for name in one}
        assert differences(load(tmp_path / "out"), want) == []
        assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 53

    def test_of_one_model_under_megatron_s_names(self, data: Path, tmp_path: Path) -> None:
        weights = load(data / "megatron" / "legacy-qwen3moe-ep2" / "expected_native.safetensors")
        args = arguments(num_experts=4, moe_ffn_hidden_size=12, tensor_model_parallel_size=2)
        write_legacy(tmp_path / "run", weights, args, [[1], [1]])
        runs = [data / "megatron" / "legacy-qwen3moe-ep2" / "checkpoint", tmp_path / "run"]
        ckpt_cli.average(runs, tmp_path / "out", names="native")
        assert differences(load(tmp_path / "out"), weights) == []


def tiny(kind: str, **more: Any) -> Any:
    """A tiny config of a model type."""
    from transformers import AutoConfig

    plain = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 29, "max_position_embeddings": 32, "tie_word_embeddings": False,
        "pad_token_id": 0,
    }  # fmt: skip
    return AutoConfig.for_model(kind, **{**plain, **more})


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 6, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5, "first_k_dense_replace": 1, "n_group": 1}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 10, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2}),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4_moe": ("glm4_moe", {**EXPERTS, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "n_group": 1}),
    "deepseek_v3": ("deepseek_v3", {**EXPERTS, **LATENT, "q_lora_rank": 7, "num_key_value_heads": 4}),
    "deepseek_v3 with plain queries": ("deepseek_v3", {**EXPERTS, **LATENT, "q_lora_rank": None, "num_key_value_heads": 4}),
}
PROVED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""What Megatron's own saves show above."""

SIMPLE = {
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.gate": "mlp.router",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    "mlp.shared_expert.down_proj": "mlp.shared_experts.linear_fc2",
    "post_attention_layernorm": "pre_mlp_layernorm",
}
RENAMED = {
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}
TOPS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
}


def of_megatron(hub: Tensors, config: Any) -> Tensors:
    """A model as Megatron trains it, from its tensors on the hub: fused as Megatron core's modules compute."""
    native: Tensors = {new: hub[old] for old, new in TOPS.items() if old in hub}
    for name, whole in hub.items():
        if not name.startswith("model.layers."):
            continue
        tensor = whole
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        rest = rest.replace("block_sparse_moe.", "mlp.").replace(".w2.", ".down_proj.").replace(".w1.", ".gate_proj.")
        third = name.replace(".w1.", ".w3.").replace("gate_proj", "up_proj")
        new, _, kind = rest.rpartition(".")
        if rest in RENAMED:
            target = RENAMED[rest]
        elif (new.endswith(("k_proj", "v_proj", "up_proj")) and "gate_up" not in new) or ".w3" in name:
            continue
        elif new == "self_attn.q_proj" and getattr(config, "kv_lora_rank", None) is None:
            target = f"self_attention.linear_qkv.{kind}"
            tensor = grouped(hub, name, config)
        elif new == "self_attn.q_proj":
            target = f"self_attention.linear_q_proj.{kind}"
        elif new.endswith("gate_proj"):
            inner = new.removesuffix("gate_proj").replace("shared_expert.", "shared_experts.").replace("experts.", "experts.experts.")
            inner = inner.replace("shared_experts.experts.", "shared_experts.")
            target = f"{inner}linear_fc1.{kind}"
            tensor = torch.cat([whole, hub[third]])
        elif ".experts." in new:
            target = f"{new.replace('experts.', 'experts.experts.').removesuffix('down_proj')}linear_fc2.{kind}"
        else:
            target = f"{SIMPLE.get(new, new)}.{kind}"
        native[f"decoder.layers.{layer}.{target}"] = tensor
    return native


def grouped(hub: Tensors, name: str, config: Any) -> torch.Tensor:
    """Queries, keys and values, group by group."""
    q, k, v = (hub[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv")
    groups = config.num_key_value_heads
    return torch.cat([part for i in range(groups) for part in (q.chunk(groups)[i], k.chunk(groups)[i], v.chunk(groups)[i])])


def put(folder: Path, tensors: Tensors, config: Any) -> Path:
    folder.mkdir()
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny models with random values as `save_pretrained` writes them: the tensors, and the config with its class."""
    from transformers import AutoModelForCausalLM

    made: dict[str, tuple[Tensors, Any]] = {}

    def make(case: str) -> tuple[Tensors, Any]:
        if case not in made:
            kind, more = CLASSES[case]
            model = AutoModelForCausalLM.from_config(tiny(kind, **more))
            generator = torch.Generator().manual_seed(3)
            for tensor in model.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            made[case] = load(folder), model.config
        return made[case]

    return make


class TestEveryClass:
    @pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in PROVED else ()) for case in CLASSES])
    def test_all_its_tensors_come_out(self, case: str, models: Any, tmp_path: Path) -> None:
        hub, config = models(case)
        native = of_megatron(hub, config)
        result = ckpt_cli.merge(put(tmp_path / "native", native, config), tmp_path / "out")
        assert differences(load(tmp_path / "out"), hub) == []
        assert f"{len(hub)} of {len(hub)} tensors" in str(result.outputs[0].naming)

    def test_every_model_type_is_tested(self) -> None:
        assert {kind for kind, _ in CLASSES.values()} == ARCHITECTURES.keys()

    @pytest.mark.parametrize("case", CLASSES)
    def test_no_tensor_can_be_spared(self, case: str, models: Any, tmp_path: Path) -> None:
        hub, config = models(case)
        native = of_megatron(hub, config)
        first = {parsed(name).rest: name for name in native}
        for number, name in enumerate(first.values()):
            without = {other: tensor for other, tensor in native.items() if other != name}
            with pytest.raises(MissingTensors):
                ckpt_cli.merge(put(tmp_path / f"{number}", without, config), tmp_path / "out")

    @pytest.mark.parametrize("inner", ["transformer_layer", "mtp_model_layer"])
    def test_layers_of_multi_token_prediction_follow_the_others(self, inner: str, models: Any, tmp_path: Path) -> None:
        hub, config = models("deepseek_v3")
        native = of_megatron(hub, config)
        last = {name.removeprefix("decoder.layers.2."): tensor for name, tensor in native.items() if name.startswith("decoder.layers.2.")}
        own = {"eh_proj": (16, 32), "enorm": (16,), "hnorm": (16,), "final_layernorm": (16,)}
        predicted = {f"mtp.layers.0.{name}.weight": torch.randn(shape) for name, shape in own.items()}
        predicted |= {f"mtp.layers.0.{inner}.{name}": tensor for name, tensor in last.items()}
        ckpt_cli.merge(put(tmp_path / "native", {**native, **predicted}, config), tmp_path / "out")
        found = load(tmp_path / "out")
        want = {name.replace(".2.", ".3.", 1): tensor for name, tensor in hub.items() if name.startswith("model.layers.2.")}
        for old, new in (("eh_proj", "eh_proj"), ("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")):
            want[f"model.layers.3.{new}.weight"] = predicted[f"mtp.layers.0.{old}.weight"]
        assert differences(found, {**hub, **want}) == []

    def test_gate_and_up_apart_as_megatron_fsdp_saves_them(self, models: Any, tmp_path: Path) -> None:
        hub, config = models("qwen3_moe")
        native: Tensors = {}
        for name, tensor in of_megatron(hub, config).items():
            new = name
            if ".experts.experts." in name:
                before, number, part, kind = name.replace(".experts.experts.", ".experts.").rsplit(".", 3)
                new = f"{before}.{part}.{kind}{number}"
            halves = tensor.chunk(2) if "linear_fc1" in name else ()
            native |= {f"{new}_{letter}": half for letter, half in zip("wv", halves, strict=False)} or {new: tensor}
        wrapped = {f"module.{name}": tensor for name, tensor in native.items()}
        ckpt_cli.merge(put(tmp_path / "native", wrapped, config), tmp_path / "out")
        assert differences(load(tmp_path / "out"), hub) == []

    @pytest.mark.parametrize("bias", [False, True])
    def test_a_critic_s_head_is_no_vocabulary(self, bias: bool, models: Any, tmp_path: Path) -> None:
        hub, config = models("qwen2")
        native = {**of_megatron(hub, config), "output_layer.weight": torch.ones(1, 16)}
        native |= {"output_layer.bias": torch.ones(1)} if bias else {}
        ckpt_cli.merge(put(tmp_path / "native", native, config), tmp_path / "out")
        found = load(tmp_path / "out")
        assert torch.equal(found["score.weight"], native["output_layer.weight"])
        assert ("score.bias" in found, "lm_head.weight" in found) == (bias, False)


class TestRefused:
    def error(self, path: Path, kind: type[CkptError], **options: Any) -> str:
        out = path.parent / "refused"
        with pytest.raises(kind) as caught:
            ckpt_cli.merge(path, out, **options)
        assert not out.exists()
        ckpt_cli.merge(path, path.parent / "native-names", names="native", dry_run=True, **options)
        error = caught.value
        return f"{error.message} {error.tensor} {error.expected} {error.hint}"

    def native(self, models: Any, folder: Path, case: str = "qwen3", **more: torch.Tensor) -> Path:
        hub, config = models(case)
        return put(folder / "native", {**of_megatron(hub, config), **more}, config)

    def test_a_tensor_without_a_row(self, models: Any, tmp_path: Path) -> None:
        name = "decoder.layers.1.self_attention.linear_gate.weight"
        said = self.error(self.native(models, tmp_path, **{name: torch.ones(4)}), Unsupported)
        assert name in said
        assert "--names native" in said

    def test_a_shape_that_the_config_does_not_say(self, models: Any, tmp_path: Path) -> None:
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        assert name in self.error(self.native(models, tmp_path, **{name: torch.ones(16, 22)}), Inconsistent)

    @pytest.mark.parametrize("name", ["decoder.layers.7.mlp.router.weight", "decoder.layers.1.mlp.experts.experts.9.linear_fc2.weight"])
    def test_layers_and_experts_beyond_those_of_the_config(self, name: str, models: Any, tmp_path: Path) -> None:
        assert name in self.error(self.native(models, tmp_path, "mixtral", **{name: torch.ones(4, 16)}), Inconsistent)

    def test_two_tensors_of_one_name(self, models: Any, tmp_path: Path) -> None:
        name = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
        assert "input_layernorm" in self.error(self.native(models, tmp_path, **{name: torch.ones(16)}), Inconsistent)

    def test_layers_of_prediction_of_a_class_without_them(self, models: Any, tmp_path: Path) -> None:
        name = "mtp.layers.0.enorm.weight"
        assert name in self.error(self.native(models, tmp_path, **{name: torch.ones(16)}), Unsupported)

    def test_a_class_without_a_table(self, base: Any, copy: Copy) -> None:
        said = self.error(copy("megatron", "llama-tp1", "checkpoint"), Unsupported, base=base("llama-tp1", model_type="gpt2"))
        assert "gpt2" in said

    @pytest.mark.parametrize("changes", [{"num_attention_heads": 8, "head_dim": 4}, {"num_key_value_heads": 4}])
    def test_a_config_with_other_heads(self, changes: dict[str, int], data: Path, base: Any, copy: Copy) -> None:
        step = copy("megatron", "llama-tp2", "checkpoint")
        self.error(step, Inconsistent, base=base("llama-tp2", **changes))

    def test_without_config_and_arguments(self, copy: Copy) -> None:
        step = copy("megatron", "verl2-qwen3-tp2-pp2", "checkpoint")
        shutil.rmtree(step / "global_step_5" / "actor" / "model" / "huggingface")
        assert "--base DIR" in self.error(step, Unsupported)

    @pytest.mark.parametrize("name", ["apply_layernorm_1p", "rotary_interleaved"])
    def test_weights_that_mean_something_else(self, name: str, data: Path, base: Any, tmp_path: Path) -> None:
        weights = load(data / "megatron" / "llama-tp2" / "expected_native.safetensors")
        run = tmp_path / "run"
        write_legacy(run, weights, arguments(num_layers=3, **{name: True}), [[3]])
        assert name in self.error(run, Unsupported, base=base("llama-tp2"))

    def test_more_layers_in_the_config_than_there_are(self, data: Path, base: Any, copy: Copy) -> None:
        run = copy("megatron", "llama-tp2", "checkpoint")
        assert "layers.3." in self.error(run, MissingTensors, base=base("llama-tp2", num_hidden_layers=1 << 30))


class TestConfigFromArguments:
    @pytest.mark.parametrize("name", [row.name for row in SETTINGS if row.plain])
    def test_what_no_class_has(self, name: str) -> None:
        made = config_from(vars(arguments(**{name: "something else"})))
        assert isinstance(made, str)
        assert name in made

    @pytest.mark.parametrize("lacking", ["hidden_size", "num_layers", "ffn_hidden_size", "layernorm_epsilon", "rotary_base"])
    def test_what_the_arguments_do_not_say(self, lacking: str) -> None:
        assert isinstance(config_from({name: value for name, value in vars(arguments()).items() if name != lacking}), str)

    def test_no_arguments(self) -> None:
        assert isinstance(config_from({}), str)

    @pytest.mark.parametrize("every", [1 << 40, [1], ["x", 1], -1])
    def test_layers_with_experts_that_cannot_be(self, every: Any) -> None:
        made = config_from(vars(arguments(num_experts=4, moe_router_topk=2, qk_layernorm=True, moe_layer_freq=every)))
        assert isinstance(made, str) == (every != 1 << 40)

    def test_shared_experts_and_every_other_layer(self) -> None:
        more = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_layer_freq": 2, "moe_router_pre_softmax": True}
        more |= {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True, "add_qkv_bias": True}
        made = config_from(vars(arguments(**more)))
        assert isinstance(made, dict)
        assert (made["model_type"], made["mlp_only_layers"], made["norm_topk_prob"]) == ("qwen2_moe", [1], False)


def test_neither_torch_nor_megatron_is_imported(data: Path, tmp_path: Path) -> None:
    run = data / "megatron" / "qwen2-0.12-dist" / "checkpoint"
    code = (
        "import sys, ckpt_cli; ckpt_cli.merge(sys.argv[1], sys.argv[2]);"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'megatron', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run), str(tmp_path / "out")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
