"""Which modules adapter_config.json names: PEFT's own rules, and adapters whose config and factors differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from ckpt_cli.lora.expressions import Expression
from ckpt_cli.lora.targets import Targets

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]

NAMES = [
    *(f"model.layers.{n}.self_attn.{m}" for n in (0, 1, 11) for m in ("q_proj", "v_proj")),
    "model.layers.1.mlp.experts.0.up_proj",
    "model.layers.0.mlp.experts.1.up_proj",
    "layers.1.q_proj",
    "q_proj",
    "visual.blocks.1.attn.q_proj",
    "lm_head",
    "model.lm_head_norm",
]
CONFIGS: dict[str, dict[str, Any]] = {
    "ends": {"target_modules": ["q_proj"]},
    "longer ends": {"target_modules": ["self_attn.q_proj", "layers.1.self_attn.v_proj"]},
    "a whole name": {"target_modules": ["q_proj", "model.layers.0.self_attn.v_proj"], "layers_to_transform": [1]},
    "none": {"target_modules": []},
    "an expression": {"target_modules": r".*q_proj"},
    "an expression of layers": {"target_modules": r"model\.layers\.(0|1[0-9])\..*_proj"},
    "an expression that looks ahead": {"target_modules": r"^(?!visual)(model(?=\.).*\.(q_proj|v_proj))$"},
    "a name that is no expression of it": {"target_modules": "q_proj"},
    "one layer": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1},
    "layers by a pattern": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"},
    "layers by patterns": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    "no layers": {"target_modules": ["q_proj"], "layers_to_transform": []},
    "excluded": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj", "layers.1.self_attn.q_proj"]},
    "excluded by an expression": {"target_modules": ["q_proj"], "exclude_modules": r"visual.*"},
    "saved": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head", "visual"]},
}


class TestNames:
    @pytest.mark.parametrize("case", CONFIGS)
    def test_are_those_of_peft(self, case: str) -> None:
        config = CONFIGS[case]
        targets = Targets(config)
        oracle = SimpleNamespace(**{"target_parameters": None, **config})
        for name in NAMES:
            assert targets.leaves_out(name) is not None, name
            assert (targets.leaves_out(name) == "") is bool(check_target_module_exists(oracle, name)), name

    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"target_modules": None},
            {"target_modules": "all-linear"},
            {"target_modules": "All-Linear"},
            {"target_modules": r"(.*)\.\1"},
            {"target_modules": "("},
            {"target_modules": "(?i).*Q_PROJ"},
            {"target_modules": ["q_proj"], "exclude_modules": "("},
            {"target_modules": ["q_proj"], "modules_to_save": [r"(a|b)*"]},
        ],
        ids=str,
    )
    def test_that_do_not_decide_claim_nothing(self, config: dict[str, Any]) -> None:
        assert Targets(config).leaves_out("model.layers.0.self_attn.q_proj") is None

    def test_of_every_linear_module_can_be_excluded(self) -> None:
        targets = Targets({"target_modules": "all-linear", "exclude_modules": ["q_proj"]})
        assert targets.leaves_out("model.layers.0.self_attn.q_proj") == "exclude_modules"

    def test_of_layers_that_versions_of_peft_count_differently_claim_nothing(self) -> None:
        """The first number of a name counts, or in old versions the last one."""
        targets = Targets({"target_modules": ["up_proj"], "layers_to_transform": [1]})
        assert targets.leaves_out("model.layers.0.mlp.experts.1.up_proj") is None
        assert targets.leaves_out("model.layers.1.mlp.experts.1.up_proj") == ""
        assert targets.leaves_out("model.layers.0.mlp.experts.0.up_proj") == "layers_to_transform"


class TestExpressions:
    @pytest.mark.parametrize(
        "pattern",
        [
            r"a|b.c",
            r"(a|b)*\.[^x]+",
            r"[a-c\d_.]{2,5}?",
            r"\w+(?:\.\w+)*",
            r"(?!b)a.*",
            r"a(?<=a)\.b\b.*",
            r"\D\S\W?.*$",
            r"(a*)*(b*)*",
            r"(?:a|)+\.",
        ],
    )
    def test_match_as_re_does(self, pattern: str) -> None:
        for name in ("a", "b", "a.b", "a.b.c", "aa.c1", "b_c", "a.", ".", "abab.b", "a.b1", "x.y"):
            assert Expression(pattern).matches(name) is (re.fullmatch(pattern, name) is not None), name

    def test_take_no_longer_for_many_ways(self) -> None:
        assert Expression(r"(a*)*b").matches("a" * 2000) is False
        assert Expression(r"((a*)*)*(.*.*.*)*b").matches("a" * 60) in (False, None)
        assert Expression("(" * 5000).matches("a") is None


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    kinds = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
    tensors = {f"model.layers.{n}.{kind}.weight": torch.ones(4, 4) for n in range(2) for kind in kinds}
    tensors |= {"model.embed_tokens.weight": torch.ones(6, 4), "lm_head.weight": torch.ones(6, 4)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "tie_word_embeddings": False}))
    return folder


def adapter(folder: Path, kinds: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj"), **config: Any) -> Path:
    folder.mkdir()
    tensors = {}
    for path in (f"base_model.model.model.layers.{n}.{kind}" for n in range(2) for kind in kinds):
        tensors |= {f"{path}.lora_A.weight": torch.ones(2, 4), f"{path}.lora_B.weight": torch.ones(4, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ["q_proj"]}, "config's target_modules leaves them out"),
    ({"target_modules": []}, "config's target_modules leaves them out"),
    ({"target_modules": ".*q_proj"}, "config's target_modules leaves them out"),
    ({"target_modules": "q_proj"}, "config's target_modules leaves them out"),
    ({"layers_to_transform": [0]}, "config's layers_to_transform leaves them out"),
    ({"layers_to_transform": 1, "layers_pattern": "layers"}, "config's layers_to_transform leaves them out"),
    ({"exclude_modules": ["v_proj"]}, "config's exclude_modules leaves them out"),
    ({"exclude_modules": r".*\.1\.self_attn\.v_proj"}, "config's exclude_modules leaves it out"),
    ({"modules_to_save": ["v_proj"]}, "config's modules_to_save leaves them out"),
    ({"target_modules": "all-linear", "exclude_modules": ["v_proj"]}, "config's exclude_modules leaves them out"),
    ({"target_parameters": ["mlp.up_proj.weight"]}, "targets the parameter mlp.up_proj.weight, but there are no factors for it"),
]


class TestDifferences:
    @pytest.mark.parametrize(("config", "told"), REFUSED, ids=str)
    def test_are_refused_and_found(self, base: Path, tmp_path: Path, config: dict[str, Any], told: str) -> None:
        folder = adapter(tmp_path / "adapter", **config)
        for options in ({"base": base}, {"base": base, "lora": "export"}, {}):
            with pytest.raises(Inconsistent) as caught:
                ckpt_cli.merge(folder, tmp_path / "out", **options)
            assert told in caught.value.message
            assert caught.value.exit_code == 4
        assert told in " ".join(item.message for item in ckpt_cli.verify(folder).findings if item.code == "damaged-adapter")

    @pytest.mark.parametrize(
        ("config", "told"),
        [
            ({"target_modules": r".*(q_proj|v_proj|up_proj)"}, "targets up_proj, but there are no factors"),
            ({"target_parameters": ["up_proj.weight"]}, "targets the parameter up_proj.weight"),
            ({"target_parameters": ["weight"], "target_modules": []}, "targets the parameter weight, but there are no factors for it ("),
        ],
        ids=str,
    )
    def test_that_the_base_shows_are_refused(self, base: Path, tmp_path: Path, config: dict[str, Any], told: str) -> None:
        folder = adapter(tmp_path / "adapter", **config)
        for lora in ("fuse", "export"):
            with pytest.raises(Inconsistent) as caught:
                ckpt_cli.merge(folder, tmp_path / "out", base=base, lora=lora)
            assert told in caught.value.message

    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"target_modules": None},
            {"target_modules": "all-linear"},
            {"target_modules": r".*\.self_attn\.[qv]_proj"},
            {"target_modules": r"(?i).*_PROJ"},
            {"layers_to_transform": [0, 1]},
            {"exclude_modules": ["up_proj"]},
            {"target_modules": ["q_proj", "v_proj", "w1"], "exclude_modules": ["w1"]},
            {"target_parameters": ["mlp.experts.down_proj"]},
        ],
        ids=str,
    )
    def test_that_are_none_are_not_refused(self, base: Path, tmp_path: Path, config: dict[str, Any]) -> None:
        result = ckpt_cli.merge(adapter(tmp_path / "adapter", **config), tmp_path / "out", base=base)
        assert result.exit_code == 0
        assert result.outputs[0].lora is not None
        assert result.outputs[0].lora.modules == 4

    @pytest.mark.parametrize("setting", ["rank_pattern", "alpha_pattern"])
    def test_of_patterns_are_a_warning(self, base: Path, tmp_path: Path, setting: str) -> None:
        folder = adapter(tmp_path / "adapter", **{setting: {"k_proj": 2, "q_proj": 2, r"layers\.1\..*v_proj": 2}})
        for lora in ("fuse", "export"):
            notes = ckpt_cli.merge(folder, tmp_path / lora, base=base, lora=lora).outputs[0].notes
            assert [note.text.rpartition(": ")[2] for note in notes if note.code == "unused-pattern"] == ["k_proj"]

    def test_a_parameter_of_two_dimensions_is_no_module(self, base: Path, tmp_path: Path) -> None:
        kinds = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
        folder = adapter(tmp_path / "adapter", kinds, target_parameters=["mlp.up_proj.weight"])
        assert ckpt_cli.merge(folder, tmp_path / "out", base=base).exit_code == 0
        assert ckpt_cli.verify(folder).exit_code == 0
        other = adapter(tmp_path / "other", kinds)
        with pytest.raises(Inconsistent, match=r"there are factors for .*up_proj"):
            ckpt_cli.merge(other, tmp_path / "other_out", base=base)

    def test_a_parameter_may_be_named_without_its_module(self, tmp_path: Path) -> None:
        """Four experts of rank 2, without the weights that tell how many there are."""
        folder = adapter(tmp_path / "adapter", target_parameters=["down_proj"])
        tensors = {
            f"base_model.model.model.layers.0.self_attn.{kind}": torch.ones(2, 2)
            for kind in ("q_proj.lora_A.weight", "q_proj.lora_B.weight")
        }
        path = "base_model.model.model.layers.0.mlp.experts"
        tensors |= {f"{path}.lora_A.weight": torch.ones(8, 4), f"{path}.lora_B.weight": torch.ones(4, 8)}
        save_file(tensors, folder / "adapter_model.safetensors")
        config = folder / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "target_modules": ["q_proj"]}))
        assert ckpt_cli.merge(folder, tmp_path / "out").exit_code == 0
        assert ckpt_cli.verify(folder).exit_code == 0

    def test_peft_leaves_these_factors_out(self, tmp_path: Path) -> None:
        """What the refusal claims."""
        model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4), "v_proj": torch.nn.Linear(4, 4)})
        made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        made.save_pretrained(tmp_path / "adapter")
        path = tmp_path / "adapter" / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": ["q_proj"]}))
        fresh = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4), "v_proj": torch.nn.Linear(4, 4)})
        loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").state_dict()
        assert {name for name in loaded if "lora_A" in name} == {"base_model.model.q_proj.lora_A.default.weight"}
        with pytest.raises(Inconsistent, match="v_proj"):
            ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out")
