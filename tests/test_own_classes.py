"""A class of the user's own that transformers lacks is compared with the class of its model type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import MissingTensors
from ckpt_cli.hub.classes.absent.own_class import comparable
from ckpt_cli.names import Naming
from ckpt_cli.results.verify import VerifyResult
from tests.architectures import answered_here
from tests.tensors import Tensors, load

H, V = 8, 16
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["MyQwen"],
    "hidden_size": H,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "tie_word_embeddings": False,
}
HEADS = {"v_head.weight": (1, H)}


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def tensors() -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {f"{layer}self_attn.{part}_proj.weight": (H, H) for part in "qkvo"}
        shapes |= {f"{layer}self_attn.{part}_proj.bias": (H,) for part in "qkv"}
        shapes |= {f"{layer}mlp.{part}_proj.weight": (12, H) for part in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (H, 12)}
        shapes |= {f"{layer}{part}_layernorm.weight": (H,) for part in ("input", "post_attention")}
    return made(shapes)


def made(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return {name: torch.rand(shape, generator=torch.Generator().manual_seed(i)) for i, (name, shape) in enumerate(shapes.items())}


def saved(folder: Path, state: Tensors, **entries: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | entries))
    save_file(state, folder / "model.safetensors")
    return folder


def severe(result: VerifyResult) -> set[str]:
    return {item.code for item in result.findings if item.severity != "info"} - {"lacks-tokenizer"}


LOST: dict[str, Callable[[str], bool]] = {
    "the head": lambda name: name == "lm_head.weight",
    "the embedding": lambda name: "embed" in name,
    "the last norm": lambda name: name == "model.norm.weight",
    "attention": lambda name: "self_attn" in name,
    "all but the feed-forward network": lambda name: ".mlp." not in name,
}


@pytest.mark.parametrize("lost", LOST)
def test_it_lacks_what_the_class_of_its_type_lacks(tmp_path: Path, lost: str) -> None:
    run = saved(tmp_path / "run", {name: tensor for name, tensor in tensors().items() if not LOST[lost](name)})
    with pytest.raises(MissingTensors, match="Qwen2ForCausalLM") as caught:
        ckpt_cli.merge(run, tmp_path / "out")
    assert "as Qwen2ForCausalLM: MyQwen is no class of transformers" in str(caught.value.expected)
    assert "missing-tensor" in severe(ckpt_cli.verify(run))


def test_a_head_of_its_own_makes_no_lost_layers_good(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in tensors().items() if "self_attn" not in name} | made({"v_head.weight": (V, 100)})
    with pytest.raises(MissingTensors):
        ckpt_cli.merge(saved(tmp_path / "run", state), tmp_path / "out")


@pytest.mark.parametrize("more", [{}, HEADS, {"model.layers.0.gate.weight": (1, H), "router.weight": (3, H)}], ids=str)
def test_whole_ones_raise_no_alarm(tmp_path: Path, more: dict[str, tuple[int, ...]]) -> None:
    state = tensors() | made(more)
    result = ckpt_cli.merge(saved(tmp_path / "run", state), tmp_path / "out")
    assert not [note for note in result.outputs[0].notes if note.level == "warning" and note.code != "lacks-asset"]
    assert "27 tensors of Qwen2ForCausalLM" in result.outputs[0].naming
    assert "as Qwen2ForCausalLM: MyQwen is no class of transformers" in result.outputs[0].naming
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MyQwen"]
    assert load(tmp_path / "out").keys() == state.keys()
    assert severe(ckpt_cli.verify(tmp_path / "out")) == set()


def renamed(name: str) -> str:
    return name.replace("self_attn", "mixer").replace("mlp", "ffn").replace("layernorm", "scale")


REPLACED: dict[str, Tensors] = {
    "a value head": {name: tensor for name, tensor in tensors().items() if name != "lm_head.weight"} | made(HEADS),
    "a head of another size": tensors() | made({"lm_head.weight": (1, H)}),
    "fused projections": {
        name: tensor for name, tensor in tensors().items() if "_proj." not in name or "self_attn.o" in name or "mlp" in name
    }
    | made({f"model.layers.{i}.self_attn.qkv.weight": (3 * H, H) for i in (0, 1)})
    | made({f"model.layers.{i}.self_attn.qkv.bias": (3 * H,) for i in (0, 1)}),
    "modules of other names": {renamed(name): tensor for name, tensor in tensors().items()},
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_it_replaces_is_a_warning(tmp_path: Path, what: str) -> None:
    ckpt_cli.merge(saved(tmp_path / "run", REPLACED[what]), tmp_path / "out")
    expected = "wrong-shape" if what == "a head of another size" else "replaced-tensors"
    assert severe(ckpt_cli.verify(tmp_path / "out")) == {expected}


def test_names_that_are_all_its_own_are_not_compared(tmp_path: Path) -> None:
    state = made({"trunk.0.a": (H,), "trunk.1.b": (H, H)})
    naming = ckpt_cli.merge(saved(tmp_path / "run", state), tmp_path / "out").outputs[0].naming
    assert naming.endswith("MyQwen is no class of transformers, and no tensor has a name of Qwen2ForCausalLM")
    assert severe(ckpt_cli.verify(tmp_path / "out")) == set()


OTHERS = {
    "llava": "LlavaLlamaForCausalLM",
    "internvl": "InternVLChatModel",
    "qwen2": "MyQwen",
}


@pytest.mark.parametrize("names", ["hub", "native"])
@pytest.mark.parametrize("model_type", OTHERS)
def test_models_that_transformers_took_in_later_keep_the_names_of_their_own_code(tmp_path: Path, model_type: str, names: Naming) -> None:
    """One or two are those of the class too, such as the head's, which says nothing about the others."""
    layers = [name for i in (0, 1) for name in (f"model.layers.{i}.mixer.weight", f"model.layers.{i}.ffn.weight")]
    tower = [f"model.vision_tower.vision_tower.vision_model.encoder.layers.{i}.mlp.{part}.bias" for i in (0, 1) for part in ("fc1", "fc2")]
    state = made(dict.fromkeys(["lm_head.weight", "model.mm_projector.0.weight", *layers, *tower], (V, H)))
    small = {"hidden_size": H, "intermediate_size": H, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": V, "image_size": 16}
    parts = {} if model_type == "qwen2" else {"text_config": {**small, "model_type": "qwen2"}, "vision_config": {**small, "patch_size": 8}}
    run = saved(tmp_path / "run", state, model_type=model_type, architectures=[OTHERS[model_type]], **parts)
    told = ckpt_cli.merge(run, tmp_path / "out", names=names).outputs[0]
    assert load(tmp_path / "out").keys() == state.keys()
    assert f"not compared: {OTHERS[model_type]} is no class of transformers" in told.naming
    verified = ckpt_cli.verify(tmp_path / "out")
    hardly = "no tensor has" not in told.naming
    assert hardly == ("replaced-tensors" in severe(verified)) == ("replaced-tensors" in {note.code for note in told.notes})


@pytest.mark.parametrize(
    ("kind", "names", "chosen"),
    [
        ("MyQwen", ("model.norm.weight",), "Qwen2ForCausalLM"),
        ("MyQwen", ("model.norm.weight", "score.weight"), "Qwen2ForSequenceClassification"),
        ("MyQwen", ("model.norm.weight", "score.weight", "score.bias"), "Qwen2ForTokenClassification"),
        ("MyForSequenceClassification", ("model.norm.weight",), "Qwen2ForSequenceClassification"),
        ("MyQwen", ("norm.weight", "layers.0.mlp.up_proj.weight"), "Qwen2Model"),
        ("Qwen2ForCausalLM", (), "Qwen2ForCausalLM"),
        ("Qwen3ForCausalLM", (), "Qwen3ForCausalLM"),
    ],
)
def test_the_class_to_compare_with(kind: str, names: tuple[str, ...], chosen: str) -> None:
    assert comparable({**CONFIG, "architectures": [kind]}, names)["architectures"] == [chosen]


def test_custom_code_and_unknown_types_stand_for_themselves() -> None:
    for entries in ({"auto_map": {"AutoModel": "my.MyQwen"}}, {"model_type": "my"}, {"architectures": []}):
        assert comparable({**CONFIG, **entries}) == {**CONFIG, **entries}


def test_rules_of_the_type_apply() -> None:
    from ckpt_cli.hub.classes.rules import rules_for

    own, real = ({"model_type": "deepseek_v3", "architectures": [kind]} for kind in ("MyDeep", "DeepseekV3ForCausalLM"))
    mine, theirs = rules_for(own), rules_for(real)
    assert mine == theirs
    assert mine is not None
    assert "e_score_correction_bias" in mine.kept["BF16"].pattern


class TestAModelAsAModule:
    """``self.llm = Qwen2ForCausalLM(config)`` in a class of the user's own: all names of the model begin with "llm."."""

    PICTURES: ClassVar[dict[str, tuple[int, ...]]] = {"vision.weight": (3, 3)}

    @staticmethod
    def state(more: dict[str, tuple[int, ...]], lost: str = "") -> Tensors:
        return {f"llm.{name}": tensor for name, tensor in tensors().items() if name != lost} | made(more)

    @pytest.mark.parametrize("more", [{}, PICTURES], ids=["alone", "beside others"])
    def test_keeps_its_name_as_the_class_saves_it(self, more: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
        state = self.state(more)
        output = ckpt_cli.merge(saved(tmp_path / "run", state), tmp_path / "out").outputs[0]
        assert load(tmp_path / "out").keys() == state.keys()
        assert not [note for note in output.notes if note.level == "warning" and note.code != "lacks-asset"]
        assert "behind llm.: 27 of 27 tensors of Qwen2ForCausalLM" in output.naming
        assert severe(ckpt_cli.verify(tmp_path / "out")) == set()

    def test_keeps_its_name_beside_others_in_any_file(self, tmp_path: Path) -> None:
        saved(tmp_path / "run", {})
        (tmp_path / "run" / "model.safetensors").unlink()
        torch.save({"state_dict": self.state(self.PICTURES), "global_step": 3}, tmp_path / "run" / "step=3.ckpt")
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert load(tmp_path / "out").keys() == self.state(self.PICTURES).keys()

    def test_loses_it_with_a_warning_where_a_wrapper_may_have_put_it(self, tmp_path: Path) -> None:
        saved(tmp_path / "run", {})
        (tmp_path / "run" / "model.safetensors").unlink()
        torch.save({"state_dict": self.state({}), "global_step": 3}, tmp_path / "run" / "step=3.ckpt")
        notes = ckpt_cli.merge(tmp_path / "run", tmp_path / "out").outputs[0].notes
        assert load(tmp_path / "out").keys() == tensors().keys()
        told = [note.text for note in notes if note.code == "own-prefix"]
        assert [text.partition(" was")[0] for text in told] == ["llm."]
        assert "if MyQwen has a module of that name, --names native keeps it" in told[0]
        ckpt_cli.merge(tmp_path / "run", tmp_path / "native", names="native")  # as the warning says
        assert load(tmp_path / "native").keys() == self.state({}).keys()

    @pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
    def test_lacks_what_the_model_lacks(self, lost: str, tmp_path: Path) -> None:
        run = saved(tmp_path / "run", self.state(self.PICTURES, lost))
        with pytest.raises(MissingTensors, match=f"llm.{lost}"):
            ckpt_cli.merge(run, tmp_path / "out")
        assert "missing-tensor" in severe(ckpt_cli.verify(run))

    def test_does_not_lack_what_was_left_out_on_purpose(self, tmp_path: Path) -> None:
        run = saved(tmp_path / "run", self.state(self.PICTURES))
        ckpt_cli.merge(run, tmp_path / "out", exclude=["llm.model.norm.weight"])
        assert load(tmp_path / "out").keys() == self.state(self.PICTURES, "model.norm.weight").keys()


OWN = {"patch.weight": (3, H)}


def kept(state: Tensors, *lost: str) -> Tensors:
    return {name: tensor for name, tensor in state.items() if name not in lost}


def test_what_it_has_of_its_own_a_base_of_the_same_class_tells(tmp_path: Path) -> None:
    """The class of its model type has no place for it: that nothing else is missing says nothing about it."""
    whole = tensors() | made(OWN)
    base = saved(tmp_path / "base", whole)
    run = saved(tmp_path / "run", kept(whole, *OWN))
    with pytest.raises(MissingTensors, match=r"patch\.weight"):
        ckpt_cli.merge(run, tmp_path / "out", base=base)
    assert {item.tensor for item in ckpt_cli.verify(run, base=base).findings if item.code == "missing-of-base"} == {*OWN}
    ckpt_cli.merge(run, tmp_path / "carried", base=base, carry_from_base=[*OWN])
    assert severe(ckpt_cli.verify(tmp_path / "carried", base=base)) == set()
    allowed = ckpt_cli.merge(run, tmp_path / "allowed", base=base, allow_missing=[*OWN])
    assert "missing-allowed" in {note.code for note in allowed.outputs[0].notes}
    assert "missing-of-base" not in severe(ckpt_cli.verify(tmp_path / "allowed", base=base))


def test_a_base_of_another_class_tells_nothing_of_what_it_has_of_its_own(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", tensors() | made(OWN), architectures=["Another"])
    run = saved(tmp_path / "run", tensors())
    ckpt_cli.merge(run, tmp_path / "out", base=base)
    assert "missing-of-base" not in severe(ckpt_cli.verify(run, base=base))


def test_what_a_base_of_the_same_class_lacks_too_is_no_warning(tmp_path: Path) -> None:
    state = REPLACED["a value head"]
    base = saved(tmp_path / "base", state)
    told = ckpt_cli.merge(saved(tmp_path / "run", state), tmp_path / "out", base=base).outputs[0].notes
    assert "replaced-tensors" not in {note.code for note in told}
    assert severe(ckpt_cli.verify(tmp_path / "out", base=base)) == set()
    assert severe(ckpt_cli.verify(tmp_path / "out")) == {"replaced-tensors"}
    whole = saved(tmp_path / "whole", tensors() | made(HEADS))
    assert "replaced-tensors" in severe(ckpt_cli.verify(tmp_path / "out", base=whole))
    with pytest.raises(MissingTensors, match="lm_head"):
        ckpt_cli.merge(tmp_path / "run", tmp_path / "lost", base=whole)
