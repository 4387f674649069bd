"""What is said of names is what a comparison with the model class gave; what the class needs and nobody has is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.cli.screens.verify import source_fact
from ckpt_cli.errors import (
    CorruptFile,
    DifferentTensors,
    IncompleteError,
    Inconsistent,
    LfsPointer,
    MissingTensors,
    NotFound,
    PartOfSet,
    UsageError,
)
from ckpt_cli.hub.classes.claims import Claim, refuse_lacking
from ckpt_cli.hub.classes.config_counts import mismatches
from ckpt_cli.hub.classes.fit import Fit, KnownClass, compared, known_class
from ckpt_cli.hub.classes.known_names import FILE, class_names, fitting_class
from ckpt_cli.names import foreign_names
from tests.architectures import COMPILED, MODELS, answered_here, build
from tests.cli import ckpt_fork as ckpt
from tests.tensors import Tensors, differences, load

Rename = Callable[[str], str]


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers answers in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is not installed."""
    for module in ("expected_tensors", "rules", "transformers_child"):
        monkeypatch.setattr(f"ckpt_cli.hub.classes.{module}.installed_version", lambda: None)


def saved_by(folder: Path, name: str = "qwen2", layers: int = 2, **changes: Any) -> tuple[Path, Tensors]:
    """What `save_pretrained` makes of a model, with changes to its config.json, and its tensors in memory."""
    kind, model_type, options = MODELS[name]
    model = build(kind, model_type, options if layers == 2 else {**options, "num_hidden_layers": layers})
    model.save_pretrained(folder / "saved")
    config(folder / "saved", **changes)
    return folder / "saved", {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


def config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def trained(folder: Path, saved: Path, tensors: Tensors, key: str = "state_dict") -> Path:
    """A file as Lightning writes it, beside the config of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({key: dict(tensors), "epoch": 3, "global_step": 7}, folder / "last.ckpt")
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    return folder / "last.ckpt"


def notes(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes}


class TestAPrefix:
    """that all names share and the class does not have goes away, and that is said."""

    @pytest.mark.parametrize("prefix", ["net.", "model.", "policy.actor.", "student.backbone."])
    def test_of_a_wrapper(self, tmp_path: Path, prefix: str) -> None:
        saved, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", saved, {prefix + name: tensor for name, tensor in tensors.items()})
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(saved)) == []
        assert result.outputs[0].naming.startswith("those of the hub: 27 of 27 tensors of Qwen2ForCausalLM")
        assert f", {prefix} was removed from every name" in result.outputs[0].naming

    def test_in_an_average(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        runs = [trained(tmp_path / n, saved, {f"net.{name}": t for name, t in tensors.items()}) for n in "ab"]
        result = ckpt_cli.average(runs, tmp_path / "out")
        assert load(tmp_path / "out").keys() == load(saved).keys()
        assert result.outputs[0].compared is not None
        assert result.outputs[0].compared.fitting == 27

    def test_that_lacks_is_added(self, tmp_path: Path) -> None:
        """Lightning around the base model, without a head: the config ties it."""
        saved, tensors = saved_by(tmp_path, "llama, tied")
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        ckpt_cli.merge(trained(tmp_path / "run", saved, bare), tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(saved)) == []

    def test_of_fused_experts_is_known_before_they_are_cut(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path, "qwen3_moe")
        ckpt_cli.merge(trained(tmp_path / "run", saved, {f"net.{n}": t for n, t in tensors.items()}), tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(saved)) == []

    @pytest.mark.parametrize(
        "beside", [["ema_model.n_averaged"], ["disc.conv.weight", "scale"], ["model_old.model.norm.weight", "loss.weight"]]
    )
    @pytest.mark.parametrize("prefix", ["model.", "net.", "policy.actor."])
    def test_of_the_model_goes_also_beside_others(self, tmp_path: Path, prefix: str, beside: list[str]) -> None:
        saved, tensors = saved_by(tmp_path)
        others = {name: torch.ones(4) for name in beside}
        run = trained(tmp_path / "run", saved, {**{prefix + name: tensor for name, tensor in tensors.items()}, **others})
        result = ckpt_cli.merge(run, tmp_path / "out")
        written = load(tmp_path / "out")
        assert {name for name in written if name not in load(saved)} == set(beside)
        assert differences({name: tensor for name, tensor in written.items() if name not in beside}, load(saved)) == []
        assert f", {prefix} was removed from 27 of the names" in result.outputs[0].naming
        assert "doubled-prefix" not in notes(result)

    def test_of_one_of_two_models_is_not_chosen(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        two = {f"{who}.{name}": tensor for who in ("student", "teacher") for name, tensor in tensors.items()}
        with pytest.raises(MissingTensors, match="no tensor has a name of Qwen2ForCausalLM"):
            ckpt_cli.merge(trained(tmp_path / "run", saved, two), tmp_path / "out")

    def test_that_lacks_is_added_to_the_model_alone(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path, "llama, tied")
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        run = trained(tmp_path / "run", saved, {**bare, "ema.num_updates": torch.tensor(3)})
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert load(tmp_path / "out").keys() == {*load(saved), "ema.num_updates"}
        assert f", model. was prepended to {len(bare)} of the names" in result.outputs[0].naming

    def test_that_stays_is_warned_of(self, tmp_path: Path) -> None:
        """A head without the prefix is a name of the class as well, so not all of the model have it."""
        saved, tensors = saved_by(tmp_path)
        mixed = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in tensors.items()}
        result = ckpt_cli.merge(trained(tmp_path / "run", saved, mixed), tmp_path / "out")
        said = "26 of 27 names begin with model. once too often"
        assert said in notes(result)["doubled-prefix"]
        (found,) = (item for item in ckpt_cli.verify(tmp_path / "out").findings if item.code == "doubled-prefix")
        assert said in found.message

    def test_stays_if_names_are_kept_as_trained(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", saved, {f"net.{name}": tensor for name, tensor in tensors.items()})
        result = ckpt_cli.merge(run, tmp_path / "out", names="native")
        assert load(tmp_path / "out").keys() == {f"net.{name}" for name in tensors}
        assert result.outputs[0].naming.startswith("as the training named them: none of them is one of Qwen2ForCausalLM")
        assert "native-names" in notes(result)

    def test_that_a_key_map_gives_stays(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        (tmp_path / "map.json").write_text(json.dumps({"rules": [{"match": "(.*)", "to": r"mine.\1"}]}))
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(trained(tmp_path / "run", saved, tensors), tmp_path / "out", key_map=tmp_path / "map.json")
        assert "--names native" in str(caught.value.hint)

    @pytest.mark.parametrize(("prefix", "code", "severity"), [("model.", "doubled-prefix", "warning"), ("net.", "prefixed-names", "error")])
    def test_is_found_by_verify(self, tmp_path: Path, prefix: str, code: str, severity: str) -> None:
        saved, tensors = saved_by(tmp_path)
        save_file({prefix + name: tensor for name, tensor in tensors.items()}, saved / "model.safetensors")
        found = {item.code: item for item in ckpt_cli.verify(saved).findings if item.severity != "info"}
        assert {name: item.severity for name, item in found.items()} == {code: severity}

    def test_beside_others_is_found_by_verify(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        save_file({**{f"net.{name}": tensor for name, tensor in tensors.items()}, "ema.decay": torch.ones(1)}, saved / "model.safetensors")
        (found,) = (item for item in ckpt_cli.verify(saved).findings if item.severity == "error")
        assert (found.code, found.message.split(",")[0]) == ("prefixed-names", "27 of 28 names begin with net.")

    @pytest.mark.parametrize("prefix", ["model.", "pretrained_model."])
    def test_hides_no_shape_of_extra_tensors(self, tmp_path: Path, prefix: str) -> None:
        """Extras are shown with their shapes, under whatever prefix the file has them."""
        saved, tensors = saved_by(tmp_path)
        held = {prefix + name: tensor for name, tensor in {**tensors, "extra.weight": torch.ones(3, 5)}.items()}
        head = {"v_head.summary.weight": torch.ones(1, 8)} if prefix == "pretrained_model." else {}
        save_file({**held, **head}, saved / "model.safetensors")
        (extra,) = (item for item in ckpt_cli.verify(saved).findings if item.tensor == "extra.weight")
        assert (extra.code, extra.message) == ("extra-tensor", "the class has no tensor of this name (shape 3 x 5)")

    def test_is_named_by_what_it_is(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        kind = known_class(json.loads((saved / "config.json").read_text()), shapes)
        assert isinstance(kind, KnownClass)
        assert kind.has_shapes
        inner = {name.removeprefix("model."): shape for name, shape in shapes.items()}
        forms = {
            "as it is": (shapes, ("", "", "")),
            "doubled": ({f"model.{name}": shape for name, shape in shapes.items()}, ("", "model.", "")),
            "lacking": (inner, ("", "", "model.")),
            "wrapped": (
                {**{f"pretrained_model.{name}": shape for name, shape in shapes.items()}, "v_head.summary.weight": (1, 8)},
                ("pretrained_model.", "", ""),
            ),
        }
        for form, (held, expected) in forms.items():
            fit = compared(held, kind)
            assert (fit.wrapper, fit.doubles, fit.lacks) == expected, form
            assert fit.name_in(held, "model.norm.weight") in held, form

    def test_goes_also_where_transformers_cannot_be_asked(self, tmp_path: Path, alone: None) -> None:
        saved, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", saved, {f"net.{name}": tensor for name, tensor in tensors.items()})
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(saved)) == []
        assert result.outputs[0].naming == (
            "those of the hub: 27 of 27 are known names of Qwen2ForCausalLM (transformers 5.24.0); neither shapes "
            "nor counts were compared: transformers is not installed, net. was removed from every name"
        )


class TestOneTensorAlone:
    def test_has_its_name_also_with_another_shape(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        save_file({"lm_head.weight": tensors["lm_head.weight"][:3].contiguous()}, saved / "model.safetensors")
        found = {item.code for item in ckpt_cli.verify(saved).findings if item.severity != "info"}
        assert "wrong-shape" in found
        assert "unknown-names" not in found

    def test_that_is_tied_is_one_of_the_model(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path, "llama, tied")
        save_file({"lm_head.weight": tensors["lm_head.weight"].contiguous()}, saved / "model.safetensors")
        with pytest.raises(MissingTensors, match=r"[0-9]+ of the [0-9]+ tensors of LlamaForCausalLM are missing"):
            ckpt_cli.merge(saved, tmp_path / "out")


class TestNamesOfNobody:
    @pytest.mark.parametrize("installed", [True, False])
    def test_are_refused(self, tmp_path: Path, request: pytest.FixtureRequest, installed: bool) -> None:
        if not installed:
            request.getfixturevalue("alone")
        saved, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", saved, {f"t{i}.w": tensor for i, tensor in enumerate(tensors.values())})
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(run, tmp_path / "out")
        assert "no tensor has a name of Qwen2ForCausalLM" in caught.value.message
        assert not (tmp_path / "out").exists()
        with pytest.raises(MissingTensors):
            ckpt_cli.average([run, run], tmp_path / "out")

    def test_are_an_error_of_verify(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        save_file({f"t{i}.w": tensor for i, tensor in enumerate(tensors.values())}, saved / "model.safetensors")
        result = ckpt_cli.verify(saved)
        assert result.exit_code == 1
        assert [item.code for item in result.findings if item.severity == "error"] == ["unknown-names"]


class TestNamesOfATrainer:
    """are told as such, unless they are names of the class, or of code of the model's own."""

    TITAN: ClassVar[dict[str, Any]] = {"tok_embeddings.weight": torch.randn(8, 4), "layers.0.attention.wq.weight": torch.randn(4, 4)}

    def test_that_no_class_has_are_a_warning(self, tmp_path: Path) -> None:
        torch.save(self.TITAN, tmp_path / "model.pt")
        assert "torchtitan" in notes(ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out"))["foreign-names"]

    META: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.": "", "self_attn.": "attention.", "q_proj": "wq",
        "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
        "post_attention_layernorm": "ffn_norm", "input_layernorm": "attention_norm",
    }  # fmt: skip
    LITGPT: ClassVar[dict[str, str]] = {
        "model.layers": "transformer.h",
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
    }

    @pytest.mark.parametrize(
        ("renamed", "chance", "told"),
        [(META, "norm.weight", "names of Meta's Llama, Mistral and torchtitan"), (LITGPT, "lm_head.weight", "")],
        ids=["Meta", "litgpt"],
    )
    def test_take_nothing_from_a_base_though_one_is_of_the_class_by_chance(
        self, tmp_path: Path, renamed: dict[str, str], chance: str, told: str
    ) -> None:
        """The base has all that seems to be missing, but untrained."""
        saved, tensors = saved_by(tmp_path)
        names = {name: name for name in tensors}
        for old, new in renamed.items():
            names = {name: other.replace(old, new) for name, other in names.items()}
        assert chance in names.values()
        torch.save({names[name]: tensor for name, tensor in tensors.items()}, tmp_path / "model.pt")
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(tmp_path / "model.pt", tmp_path / "out", base=saved)
        hint = str(caught.value.hint)
        assert "--key-map" in hint
        assert told in hint
        assert "--carry-from-base" not in hint
        assert "--allow-missing" not in hint

    @pytest.mark.parametrize(
        ("name", "whose"),
        [
            ("layers.0.attention.wq.weight", "Meta's Llama, Mistral and torchtitan"),
            ("layers.0.attention.qkv_linear.wq.weight", "torchtitan"),
            ("blocks.0.attention.w_q.weight", "OLMo-core"),
        ],
    )
    def test_are_called_what_they_are(self, name: str, whose: str) -> None:
        assert foreign_names([name, "tok_embeddings.weight"] if "layers" in name else [name]) == whose

    def test_are_nothing_to_say_of_a_class_that_has_some_alike(self, tmp_path: Path) -> None:
        layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "block_multiple_of": 8}
        build("Lfm2ForCausalLM", "lfm2", {**layers, **sizes}).save_pretrained(tmp_path / "saved")
        done = ckpt_cli.merge(tmp_path / "saved", tmp_path / "out")
        assert "foreign-names" not in notes(done)
        assert done.outputs[0].compared is not None
        (tmp_path / "saved/config.json").unlink()
        assert "foreign-names" not in notes(ckpt_cli.merge(tmp_path / "saved", tmp_path / "bare"))

    def test_are_nothing_to_say_of_code_of_the_models_own(self, tmp_path: Path) -> None:
        (tmp_path / "saved").mkdir()
        save_file(self.TITAN, tmp_path / "saved/model.safetensors")
        config(tmp_path / "saved", **TestCustomCode.OWN)
        assert "foreign-names" not in notes(ckpt_cli.merge(tmp_path / "saved", tmp_path / "out"))


LOST = ["model.norm.weight", "model.layers.1.self_attn.q_proj.bias", "lm_head.weight", "model.layers.0.*"]


def without(tensors: Mapping[str, torch.Tensor], lost: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(lost.removesuffix("*"))}


class TestTensorsThatTheClassNeeds:
    @pytest.mark.parametrize("lost", LOST)
    def test_are_refused_if_nobody_has_them(self, tmp_path: Path, lost: str) -> None:
        saved, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", saved, without(tensors, lost))
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(run, tmp_path / "out")
        assert caught.value.exit_code == 4
        count = len(tensors) - len(without(tensors, lost))
        assert caught.value.message.startswith(f"{count} of the 27 tensors of Qwen2ForCausalLM")
        assert len(caught.value.details) == (count if count > 1 else 0)
        assert f"--allow-missing '{lost}'" in str(caught.value.hint)
        assert not (tmp_path / "out").exists()
        with pytest.raises(MissingTensors):
            ckpt_cli.average([run, run], tmp_path / "out")

    @pytest.mark.parametrize("lost", LOST)
    def test_may_be_allowed_to_be_missing(self, tmp_path: Path, lost: str) -> None:
        saved, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", saved, without(tensors, lost))
        result = ckpt_cli.merge(run, tmp_path / "out", allow_missing=lost)
        assert "missing-allowed" in notes(result)
        assert f"{len(without(tensors, lost))} of 27 tensors" in result.outputs[0].naming
        assert ckpt_cli.verify(tmp_path / "out", against=run).exit_code == 0
        assert "missing-allowed" in notes(ckpt_cli.average([run, run], tmp_path / "average", allow_missing=(lost,)))

    def test_a_pattern_that_allows_nothing_is_told(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path)
        assert "unused-pattern" in notes(ckpt_cli.merge(saved, tmp_path / "out", allow_missing="visual.*"))

    def test_are_no_matter_if_filters_left_them_out(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path)
        result = ckpt_cli.merge(saved, tmp_path / "out", exclude="*.mlp.*")
        assert result.outputs[0].left_out == 6

    @pytest.mark.parametrize("lost", LOST)
    def test_are_carried_from_a_base_that_has_them(self, tmp_path: Path, lost: str) -> None:
        base, tensors = saved_by(tmp_path)
        trainee = {name: tensor + 1 for name, tensor in without(tensors, lost).items()}
        run = trained(tmp_path / "run", base, trainee)
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert f"--carry-from-base '{lost}'" in str(caught.value.hint)
        result = ckpt_cli.merge(run, tmp_path / "out", base=base, carry_from_base=lost)
        assert differences(load(tmp_path / "out"), {**load(base), **trainee}) == []
        assert result.outputs[0].carried == tuple(name for name in load(base) if name not in trainee)
        assert ckpt_cli.verify(tmp_path / "out", against=run).exit_code == 0
        ckpt_cli.average([run, run], tmp_path / "average", base=base, carry_from_base=lost)
        assert differences(load(tmp_path / "average"), load(tmp_path / "out")) == []

    @pytest.mark.parametrize("of", ["another model", "the model"])
    def test_beside_matrices_without_a_place_may_be_those_of_another_model(self, tmp_path: Path, of: str) -> None:
        """EAGLE's draft models have the config of what they draft for, a matrix of their own, and less of the rest."""
        base, tensors = saved_by(tmp_path)
        own = {"fc.weight": torch.ones(4, 8)} if of == "another model" else {}
        run = trained(tmp_path / "run", base, {**without(tensors, LOST[0]), **own})
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert ("fc.weight has no place in" in str(caught.value.hint)) == bool(own)
        save_file({**without(load(base), LOST[0]), **own}, base / "model.safetensors", metadata={"format": "pt"})
        told = ckpt("verify", str(base))
        assert ("unless the weights are those of another model" in f"{told.out}{told.err}") == bool(own)

    def test_patterns_that_carry_nothing(self, tmp_path: Path) -> None:
        base, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", base, tensors)
        assert "unused-pattern" in notes(ckpt_cli.merge(run, tmp_path / "out", base=base, carry_from_base="*.mlp.*"))
        with pytest.raises(NotFound):
            ckpt_cli.merge(run, tmp_path / "out2", base=base, carry_from_base="visual.*")
        for command in (ckpt_cli.merge, ckpt_cli.average):
            with pytest.raises(UsageError):
                command(run, tmp_path / "out3", carry_from_base="visual.*")

    def test_a_tower_that_was_not_trained(self, tmp_path: Path) -> None:
        base, tensors = saved_by(tmp_path, "qwen2_5_vl")
        run = trained(tmp_path / "run", base, {name: tensor for name, tensor in tensors.items() if ".visual." not in name})
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert "--carry-from-base 'visual.*'" in str(caught.value.hint)
        ckpt_cli.merge(run, tmp_path / "out", base=base, carry_from_base="visual.*")
        assert differences(load(tmp_path / "out"), load(base)) == []


class TestDtypeOfTheBase:
    def test_is_given_to_each_tensor(self, tmp_path: Path) -> None:
        base, tensors = saved_by(tmp_path)
        mixed = {name: tensor.to(torch.float32 if "norm" in name else torch.bfloat16) for name, tensor in load(base).items()}
        save_file(mixed, base / "model.safetensors")
        run = trained(tmp_path / "run", base, tensors)
        ckpt_cli.merge(run, tmp_path / "out", base=base, dtype="base")
        assert differences(load(tmp_path / "out"), {name: tensors[name].to(mixed[name].dtype) for name in tensors}) == []
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
        ckpt_cli.average([run, run], tmp_path / "average", base=base, dtype="base")
        assert differences(load(tmp_path / "average"), load(tmp_path / "out")) == []
        assert ckpt_cli.verify(tmp_path / "out", against=run).exit_code == 0

    def test_is_kept_where_the_base_has_no_such_tensor_and_told(self, tmp_path: Path) -> None:
        base, tensors = saved_by(tmp_path)
        save_file({name: t.to(torch.bfloat16) for name, t in load(base).items()}, base / "model.safetensors")
        run = trained(tmp_path / "run", base, {**tensors, "extra.weight": torch.ones(3)})
        result = ckpt_cli.merge(run, tmp_path / "out", base=base, dtype="base")
        assert "extra.weight" in notes(result)["dtype-kept"]
        assert load(tmp_path / "out")["extra.weight"].dtype == torch.float32

    def test_needs_a_base_and_a_cast_that_exists(self, tmp_path: Path) -> None:
        base, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", base, tensors)
        for command in (ckpt_cli.merge, ckpt_cli.average):
            with pytest.raises(UsageError):
                command(run, tmp_path / "out", dtype="base")
        save_file({**load(base), "model.norm.weight": torch.ones(32, dtype=torch.int32)}, base / "model.safetensors")
        with pytest.raises(IncompleteError) as caught:
            ckpt_cli.merge(run, tmp_path / "out", base=base, dtype="base")
        assert caught.value.tensor == "model.norm.weight"


class TestOtherShapes:
    def test_of_the_embedding_are_a_warning_of_merge_and_an_error_of_verify(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path, vocab_size=67)
        result = ckpt_cli.merge(saved, tmp_path / "out")
        assert (
            "model.embed_tokens.weight is 64 x 32, but Qwen2ForCausalLM with this config.json has 67 x 32" in notes(result)["other-shapes"]
        )
        assert "wrong-shape" in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings if item.severity == "error"}

    @pytest.mark.parametrize("changes", [{"intermediate_size": 52}, {"num_key_value_heads": 4}])
    def test_of_anything_else_too(self, tmp_path: Path, changes: dict[str, int]) -> None:
        saved, _ = saved_by(tmp_path, **changes)
        assert "other-shapes" in notes(ckpt_cli.merge(saved, tmp_path / "out"))

    def test_of_the_embedding_where_the_class_cannot_be_asked(self, tmp_path: Path, alone: None) -> None:
        saved, _ = saved_by(tmp_path, vocab_size=67)
        assert "has 64 rows, but config.json says vocab_size 67" in notes(ckpt_cli.merge(saved, tmp_path / "out"))["vocabulary-rows"]
        assert "vocabulary-rows" in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}


class TestOlderNames:
    """that loaders still understand are compared as they are, by merge and by verify alike."""

    def test_of_the_time_of_bert(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path, "bert")
        words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        old = {re.sub(r"LayerNorm\.(weight|bias)$", lambda m: words[m[0]], name): tensor for name, tensor in load(saved).items()}
        assert old.keys() != load(saved).keys()
        save_file(old, saved / "model.safetensors")
        result = ckpt_cli.merge(saved, tmp_path / "out")
        assert result.outputs[0].naming.startswith("those of an older version: ")
        assert ckpt_cli.verify(tmp_path / "out", against=saved).exit_code == 0
        lost = {name: tensor for name, tensor in old.items() if not name.endswith("LayerNorm.beta")}
        save_file(lost, saved / "model.safetensors")
        with pytest.raises(MissingTensors):
            ckpt_cli.merge(saved, tmp_path / "half")


class TestMultiTokenPrediction:
    """speculative decoding needs its layers, and no class of transformers has a place for them."""

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("glm4_moe", {"num_nextn_predict_layers": 1}),
            ("deepseek_v3", {"num_nextn_predict_layers": 2}),
            ("qwen3_next", {"mtp_num_hidden_layers": 1}),
        ],
    )
    def test_that_is_not_there_is_told(self, tmp_path: Path, name: str, changes: dict[str, int]) -> None:
        saved, _ = saved_by(tmp_path, name, **changes)
        text = notes(ckpt_cli.merge(saved, tmp_path / "out"))["no-prediction-layers"]
        assert "speculative decoding" in text
        assert "--carry-from-base" in text
        assert "no-prediction-layers" in notes(ckpt_cli.average([saved, saved], tmp_path / "average"))
        assert "no-prediction-layers" in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings if item.severity == "warning"}


class TestAConfigWithoutAClass:
    @pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_moe", "gemma3, images"])
    def test_means_the_class_of_its_type_that_fits(self, tmp_path: Path, name: str) -> None:
        saved, tensors = saved_by(tmp_path, name, architectures=None)
        result = ckpt_cli.merge(trained(tmp_path / "run", saved, tensors), tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(saved)) == []
        assert f"{MODELS[name][0]} (transformers 5.24.0), the class of its model type that fits" in result.outputs[0].naming
        assert MODELS[name][0] in str(ckpt_cli.verify(tmp_path / "out").names)

    def test_tells_heads_apart(self) -> None:
        for name in ("qwen2", "qwen2, sequence classification", "qwen3, token classification", "vit", "t5"):
            kind, model_type, _ = MODELS[name]
            known = class_names({"model_type": model_type, "architectures": [kind]})
            assert known is not None
            assert fitting_class({"model_type": model_type}, [n.replace("{}", "0") for n in known.hub]) == kind

    def test_of_an_unknown_type_is_not_compared(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path, architectures=None, model_type="new")
        assert (
            ckpt_cli.merge(saved, tmp_path / "out").outputs[0].naming
            == "as the training named them, not compared: config.json names no architecture"
        )


class TestCustomCode:
    """is not run, so that only the counts of the config can be compared."""

    OWN: ClassVar[dict[str, Any]] = {"auto_map": {"AutoModelForCausalLM": "own.Own"}, "architectures": ["Own"], "model_type": "own"}

    def test_is_said_not_to_be_compared(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path, **self.OWN)
        naming = ckpt_cli.merge(saved, tmp_path / "out").outputs[0].naming
        assert naming == "as the training named them, not compared: Own is custom code, which is not run"

    @pytest.mark.parametrize("lost", ["model.layers.2.*", "model.layers.1.*", "model.layers.3.*"])
    def test_lacks_no_layer(self, tmp_path: Path, lost: str) -> None:
        saved, tensors = saved_by(tmp_path, layers=4, **self.OWN)
        save_file(without(tensors, lost), saved / "model.safetensors")
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(saved, tmp_path / "out")
        assert f"--allow-missing '{lost}'" in str(caught.value.hint)
        assert "missing-layers" in {item.code for item in ckpt_cli.verify(saved).findings if item.severity == "error"}
        ckpt_cli.merge(saved, tmp_path / "allowed", allow_missing=lost)
        assert ckpt_cli.verify(tmp_path / "allowed", against=saved).exit_code == 0

    def test_a_layer_that_was_left_out_on_purpose_is_no_fault(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path, layers=4, **self.OWN)
        ckpt_cli.merge(saved, tmp_path / "out", exclude="model.layers.1.*", verify=True)
        result = ckpt_cli.verify(tmp_path / "out", against=saved)
        assert result.exit_code == 0
        assert "left-out" in {item.code for item in result.findings}

    def test_may_have_other_stacks_than_layers(self, tmp_path: Path) -> None:
        """A tower with layers of its own, blocks with activations between, and a stack that ends elsewhere."""
        saved, tensors = saved_by(tmp_path, layers=4, **self.OWN)
        tower = {
            name.replace("model.", "vision_tower.encoder."): t
            for name, t in tensors.items()
            if ".layers.0." in name or ".layers.1." in name
        }
        names = [name for name in tensors if ".layers.0." in name]
        gaps = {name.replace("model.layers.0.", f"decoder.layers.{i}."): tensors[name].clone() for name in names for i in (0, 3, 6, 9)}
        save_file({**tensors, **{name: t.clone() for name, t in tower.items()}, **gaps}, saved / "model.safetensors")
        result = ckpt_cli.merge(saved, tmp_path / "out")
        assert not {"missing-layers", "extra-layers"} & notes(result).keys()

    def test_lacks_no_expert(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path, "qwen3_moe", **self.OWN)
        save_file(without(load(saved), "model.layers.1.mlp.experts.3.*"), saved / "model.safetensors")
        with pytest.raises(MissingTensors):
            ckpt_cli.merge(saved, tmp_path / "out")

    def test_has_a_tower_if_the_config_says_so(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path, **self.OWN, vision_config={"depth": 2})
        assert "no-tower" in notes(ckpt_cli.merge(saved, tmp_path / "out"))

    def test_has_an_audio_part_by_the_names_of_its_class(self) -> None:
        """A class may call it otherwise than others do: on the hub this one's is `perception.encoder`."""
        kinds = {
            "nemo_speechlm": ("Nemotron3_5TranscribeForConditionalGeneration", []),
            "qwen2_audio": ("Qwen2AudioForConditionalGeneration", ["config.json has an audio_config"]),
        }
        for model_type, (name, said) in kinds.items():
            content = {"model_type": model_type, "architectures": [name], "audio_config": {"depth": 2}}
            names = class_names(content)
            assert names is not None
            found = mismatches(content, {"language_model.lm_head.weight": (4, 4)}, known=False, namings=(names.native, names.hub))
            assert [item.text.split(",")[0] for item in found if item.code == "no-tower"] == said

    @pytest.mark.parametrize(
        ("names", "there"),
        [
            (("model.mm_projector.0.weight", "model.mm_projector.2.weight"), "only 2 numbered modules"),
            (("head.weight",), "no numbered module"),
            (("lm_head.weight", "model.embed_tokens.weight"), "no numbered module"),
            (("head.layers.0.weight", "head.layers.0.bias"), "only 1 numbered module"),
        ],
    )
    def test_of_which_only_a_projector_or_a_head_is_there_is_told(self, tmp_path: Path, names: tuple[str, ...], there: str) -> None:
        saved, _ = saved_by(tmp_path, layers=4, **self.OWN)
        (saved / "model.safetensors").unlink()
        torch.save({name: torch.ones(6, 6) * 2 for name in names}, saved / "mm_projector.bin")
        result = ckpt_cli.merge(saved / "mm_projector.bin", tmp_path / "out")
        (told,) = [note.text for output in result.outputs for note in output.notes if note.code == "no-layers"]
        assert told.startswith(f"config.json says 4 layers, and the tensors are of {there}: they may be those of one part of the model")
        assert "no-layers" in [item.code for item in ckpt_cli.verify(tmp_path / "out").findings]

    @pytest.mark.parametrize("names", ["blocks.{}.w", "trunk.layer_{}.w", "layer{}.w", "encoder.stage.0.{}.w"])
    def test_may_call_its_layers_as_it_likes(self, names: str) -> None:
        shapes = {names.format(number): (8, 8) for number in range(4)}
        assert mismatches({"num_hidden_layers": 4}, shapes, known=False) == []
        assert mismatches({"num_hidden_layers": 4}, {"layers.w": (4, 8, 8), "norm.w": (8,)}, known=False) == []

    def test_may_have_linear_layers_with_activations_between(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path, **self.OWN)
        head = {f"head.layers.{i}.{kind}": torch.ones(4) for i in (0, 2, 4) for kind in ("weight", "bias")}
        save_file({**tensors, **head}, saved / "model.safetensors")
        ckpt_cli.merge(saved, tmp_path / "out")

    @pytest.mark.slow
    def test_no_sound_model_lacks_anything(self) -> None:
        """The default config of every twelfth class of transformers, built without memory."""
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        refused = []
        for key in list(json.loads(FILE.read_text())["models"])[::12]:
            model_type, kind = key.split("/")
            config = CONFIG_MAPPING[model_type]()
            with torch.device("meta"):
                model = getattr(transformers, kind)(config)
            shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            content = json.loads(config.to_json_string(use_diff=False))
            refused += [(key, item.text) for item in mismatches(content, shapes, known=False) if item.lacking or item.code == "no-layers"]
        assert refused == []

    @pytest.mark.parametrize("count", [10**9, -1, 2.5, True, "2", None])
    def test_counts_that_are_none_hang_nothing(self, tmp_path: Path, count: object) -> None:
        saved, _ = saved_by(tmp_path, "qwen3_moe", **{**self.OWN, "num_experts": count})
        try:
            ckpt_cli.merge(saved, tmp_path / "out")
        except IncompleteError:
            assert count == 10**9


class TestWithoutTransformers:
    def test_names_are_compared_with_those_that_the_package_ships(self, tmp_path: Path, alone: None) -> None:
        saved, _ = saved_by(tmp_path)
        result = ckpt_cli.merge(saved, tmp_path / "out")
        assert result.outputs[0].compared is not None
        assert (result.outputs[0].compared.shapes, result.outputs[0].compared.fitting) == (False, 27)
        assert "27 of 27 are known names of Qwen2ForCausalLM" in str(ckpt_cli.verify(saved).names)

    def test_what_is_usually_there_is_missed_but_not_refused(self, tmp_path: Path, alone: None) -> None:
        saved, tensors = saved_by(tmp_path)
        save_file(without(tensors, "model.norm.weight"), saved / "model.safetensors")
        assert "model.norm.weight" in notes(ckpt_cli.merge(saved, tmp_path / "out"))["missing-kinds"]
        assert "not-proved" in {item.code for item in ckpt_cli.verify(saved).findings if item.severity == "warning"}

    def test_a_layer_is_refused(self, tmp_path: Path, alone: None) -> None:
        saved, tensors = saved_by(tmp_path, layers=3)
        save_file(without(tensors, "model.layers.2.*"), saved / "model.safetensors")
        with pytest.raises(MissingTensors):
            ckpt_cli.merge(saved, tmp_path / "out")

    @pytest.mark.parametrize("name", sorted({*MODELS} - {"deepseek_v2", "llama4", "paligemma"}))
    def test_every_architecture_is_known_by_its_names(self, name: str, alone: None) -> None:
        kind, _, _ = MODELS[name]
        model = build(*MODELS[name])
        known = known_class({**model.config.to_dict(), "architectures": [kind]}, {})
        assert isinstance(known, KnownClass)
        shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        assert known.count(shapes) == len(shapes)

    @pytest.mark.parametrize("name", ["deepseek_v2", "llama4", "paligemma"])
    def test_names_that_only_other_settings_have_are_not_called_wrong(self, tmp_path: Path, name: str, alone: None) -> None:
        saved, _ = saved_by(tmp_path, name)
        result = ckpt_cli.merge(saved, tmp_path / "out")
        assert "not among those known" in notes(result)["unknown-names"]
        assert "extra-tensors" not in notes(result)
        assert ckpt_cli.verify(saved).exit_code == 0

    def test_another_composition_is_not_compared(self, tmp_path: Path, alone: None) -> None:
        build(*COMPILED["llava of qwen2 and siglip"]).save_pretrained(tmp_path / "saved")
        saved = tmp_path / "saved"
        assert (
            ckpt_cli.merge(saved, tmp_path / "out").outputs[0].naming
            == "as the training named them, not compared: transformers is not installed"
        )

    def test_the_shipped_names_are_those_of_the_installed_transformers(self) -> None:
        """Those of the architectures that are tested here; `python -m ckpt_cli.hub.classes.compile --names` writes the whole."""
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        from ckpt_cli.hub.classes.compile import tensors_of_model
        from ckpt_cli.name_patterns import pattern_of

        content = json.loads(FILE.read_text())
        assert content["transformers"] == transformers.__version__
        for kind, model_type, _ in MODELS.values():
            made = tensors_of_model(getattr(transformers, kind), CONFIG_MAPPING[model_type]())
            known = class_names({"model_type": model_type, "architectures": [kind]})
            assert known is not None
            assert known.native == {pattern_of(name)[0] for name in made["native"]}


class TestHintsAboutWhatIsMissing:
    def test_name_nothing_that_is_there(self, tmp_path: Path) -> None:
        """One glob for each part of the model that is missing as a whole; followed literally they are enough."""
        saved, tensors = saved_by(tmp_path)
        held = {
            name: t for name, t in tensors.items() if ".layers.1.mlp." not in name and name not in ("model.norm.weight", "lm_head.weight")
        }
        with pytest.raises(MissingTensors) as caught:
            ckpt_cli.merge(trained(tmp_path / "run", saved, held), tmp_path / "out")
        globs = re.findall(r"--allow-missing '([^']+)'", str(caught.value.hint))
        assert sorted(globs) == ["lm_head.*", "model.layers.1.mlp.*", "model.norm.*"]
        ckpt_cli.merge(tmp_path / "run" / "last.ckpt", tmp_path / "out", allow_missing=globs)


def test_transformers_is_asked_once_also_where_no_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")

    def answer(question: str, text: str) -> dict[str, Any]:
        asked.append(question)
        return answered_here(question, text)

    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answer)
    saved, _ = saved_by(tmp_path, rope_theta=4321.0)
    ckpt_cli.average([saved, saved, saved], tmp_path / "out")
    ckpt_cli.verify(tmp_path / "out")
    assert asked.count("tensors") == 1


class TestGroupsOfADcpFolder:
    """lose every level above their names, however deep they lie."""

    @pytest.mark.parametrize(
        "path",
        [
            "model_state.model",
            "app_state.model",
            "state_dict.model",
            "trainer.policy.model",
            "app.model_raw",
            "a.b.c.model",
            "net",
            "state.trainer.net",
        ],
    )
    @pytest.mark.parametrize("described", [True, False])
    def test_lie_at(self, tmp_path: Path, path: str, described: bool) -> None:
        saved, tensors = saved_by(tmp_path)
        run = dcp(tmp_path / "run", nested(path, dict(tensors)))
        if described:
            (run / "config.json").write_bytes((saved / "config.json").read_bytes())
        ckpt_cli.merge(run, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(saved)) == []

    def test_of_several_models_are_components(self, tmp_path: Path) -> None:
        _, tensors = saved_by(tmp_path)
        averaged = {name: tensor + 1 for name, tensor in tensors.items()}
        run = dcp(tmp_path / "run", {"app": {"ema": averaged, "model": dict(tensors), "optim": {"state": {"a.b": torch.ones(2)}}}})
        assert [info.name for info in ckpt_cli.detect(run).checkpoint.components] == ["model", "ema"]
        ckpt_cli.merge(run, tmp_path / "ema", type="ema")
        assert differences(load(tmp_path / "ema"), averaged) == []

    def test_of_the_parts_of_one_model_stay_together(self, tmp_path: Path) -> None:
        parts = {"encoder": {"layer.0.w": torch.ones(2)}, "decoder": {"layer.0.w": torch.zeros(2)}}
        ckpt_cli.merge(dcp(tmp_path / "run", {"stuff": parts}), tmp_path / "out")
        assert load(tmp_path / "out").keys() == {"encoder.layer.0.w", "decoder.layer.0.w"}

    def test_go_before_a_counter_at_the_top(self, tmp_path: Path) -> None:
        _, tensors = saved_by(tmp_path)
        ckpt_cli.merge(dcp(tmp_path / "run", {"step": torch.tensor(3), "generator": dict(tensors)}), tmp_path / "out")
        assert load(tmp_path / "out").keys() == tensors.keys()


def nested(path: str, content: dict[str, Any]) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        content = {key: content}
    return content


def dcp(folder: Path, state: dict[str, Any]) -> Path:
    import warnings

    import torch.distributed.checkpoint as dist

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_the_manifest_says_what_was_compared(tmp_path: Path) -> None:
    saved, _ = saved_by(tmp_path)
    result = ckpt_cli.merge(saved, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "ckpt-manifest.json").read_text())["names"] == [result.outputs[0].naming]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load(saved).keys()


class TestWhatComesFromTheBase:
    def run(self, tmp_path: Path, lost: str = "model.layers.1.") -> tuple[Path, Path]:
        """A run that lacks some tensors of a base."""
        base, _ = saved_by(tmp_path)
        run = tmp_path / "run"
        run.mkdir()
        save_file({name: tensor + 1 for name, tensor in load(base).items() if not name.startswith(lost)}, run / "model.safetensors")
        (run / "config.json").write_bytes((base / "config.json").read_bytes())
        return run, base

    @pytest.mark.parametrize(
        "how", [{"carry_from_base": "model.layers.1.*"}, {"match_base": True, "fill_missing_from_base": True}], ids=str
    )
    def test_is_not_compared_with_it(self, tmp_path: Path, how: dict[str, Any]) -> None:
        run, base = self.run(tmp_path)
        kept = len(load_file(run / "model.safetensors"))
        taken = len(load(base)) - kept
        assert taken
        result = ckpt_cli.merge(run, tmp_path / "out", base=base, compare=True, verify=True, **how).outputs[0]
        assert result.comparison is not None
        assert (result.comparison.common, result.comparison.unchanged, result.comparison.missing) == (kept, 0, ())
        assert [(source.tensors, source.from_base) for verified in result.verified for source in verified.against] == [(kept, taken)]

        verified = ckpt_cli.verify(tmp_path / "out", against=run).against[0]
        assert (verified.tensors, verified.from_base, verified.identical) == (kept, taken, True)
        assert verified.bytes == sum(tensor.nbytes for tensor in load_file(run / "model.safetensors").values())
        assert source_fact(verified).endswith(f", and {taken} to the base")

    @pytest.mark.parametrize("how", [{"carry_from_base": "*"}, {"dtype": "base"}], ids=str)
    def test_by_name_needs_names_that_are_the_same(self, tmp_path: Path, how: dict[str, Any]) -> None:
        run, base = self.run(tmp_path, lost="lm_head.")
        other = tmp_path / "other"
        other.mkdir()
        save_file(
            {name.replace("model.layers", "gpt.h").replace("proj", "p"): t for name, t in load(base).items()}, other / "model.safetensors"
        )
        with pytest.raises(Inconsistent, match="under other names"):
            ckpt_cli.merge(run, tmp_path / "out", base=other, allow_missing="*", **how)
        with pytest.raises(Inconsistent, match="under other names"):
            ckpt_cli.average([run, run], tmp_path / "out", base=other, allow_missing="*", **how)
        result = ckpt_cli.merge(run, tmp_path / "out", base=other, allow_missing="*")
        assert "names were not compared" in notes(result)["other-base"]


class TestAnOutputWithoutWhatWasLeftOut:
    """is no defect to verify: the manifest says what was left out."""

    def test_by_a_key_map(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path)
        (tmp_path / "map.json").write_text(json.dumps({"rules": [{"match": r"model\.layers\.1\..*", "drop": True}]}))
        result = ckpt_cli.merge(saved, tmp_path / "out", key_map=tmp_path / "map.json", verify=True)
        assert [verified.exit_code for verified in result.outputs[0].verified] == [0]
        verified = ckpt_cli.verify(tmp_path / "out", against=saved)
        assert verified.exit_code == 0
        assert {item.code for item in verified.findings} == {"left-out"}

    def test_by_a_key_map_under_the_names_of_the_training(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path, "qwen2_vl")
        path = trained(tmp_path / "run", saved, tensors)
        dropped = next(name for name in tensors if "layers.1" in name and name not in load(saved))
        (tmp_path / "map.json").write_text(json.dumps({"rules": [{"match": re.escape(dropped), "drop": True}]}))
        result = ckpt_cli.merge(path, tmp_path / "out", key_map=tmp_path / "map.json", allow_missing="*", verify=True)
        manifest = tmp_path / "out" / "ckpt-manifest.json"
        content = json.loads(manifest.read_text())
        content["options"]["allow_missing"] = []
        manifest.write_text(json.dumps(content))
        assert [verified.exit_code for verified in result.outputs[0].verified] == [0]
        assert ckpt_cli.verify(tmp_path / "out").exit_code == 0

    def test_by_intersect(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        less = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.1.")}
        runs = [trained(tmp_path / "a", saved, tensors), trained(tmp_path / "b", saved, less)]
        ckpt_cli.average(runs, tmp_path / "out", intersect=True, allow_missing="model.layers.1.*")
        verified = ckpt_cli.verify(tmp_path / "out")
        assert (verified.exit_code, {item.code for item in verified.findings}) == (0, {"left-out"})

    def test_is_one_where_the_manifest_does_not_explain_it(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path)
        (tmp_path / "map.json").write_text(json.dumps({"rules": [{"match": r"model\.layers\.1\.mlp\..*", "drop": True}]}))
        ckpt_cli.merge(saved, tmp_path / "out", key_map=tmp_path / "map.json")
        held = load_file(tmp_path / "out" / "model.safetensors")
        del held["model.layers.1.self_attn.q_proj.weight"]
        save_file(held, tmp_path / "out" / "model.safetensors")
        missing = [item.tensor for item in ckpt_cli.verify(tmp_path / "out").findings if item.code == "missing-tensor"]
        assert missing == ["model.layers.1.self_attn.q_proj.weight"]


class TestALayerUnderOtherNames:
    """is renamed where a wrapper explains its names, and pointed at otherwise, before anything is said about a base."""

    LAYER = "model.layers.0."

    def renamed(self, folder: Path, rename: Rename, layers: int = 6) -> tuple[Path, Path]:
        saved, tensors = saved_by(folder, layers=layers)
        run = trained(folder / "run", saved, {rename(n) if self.LAYER in n else n: t for n, t in tensors.items()})
        return saved, run

    @pytest.mark.parametrize("asked", [True, False], ids=["transformers", "shipped names"])
    @pytest.mark.parametrize("place", ["", "model.", "model.layers.0."])
    def test_with_a_wrappers_part(self, request: pytest.FixtureRequest, tmp_path: Path, place: str, asked: bool) -> None:
        saved, run = self.renamed(tmp_path, lambda name: f"{place}module.{name.removeprefix(place)}")
        if not asked:
            request.getfixturevalue("alone")
        result = ckpt_cli.merge(run, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(saved)) == []
        assert result.outputs[0].naming.endswith(", module. was removed from 12 of them")

    def test_with_a_wrappers_part_beside_tensors_of_its_names_is_left_alone(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        more = {f"module.{name}": tensor + 1 for name, tensor in tensors.items() if self.LAYER in name}
        result = ckpt_cli.merge(trained(tmp_path / "run", saved, {**tensors, **more}), tmp_path / "out")
        assert "12 tensors have no place in" in notes(result)["extra-tensors"]
        assert differences({name: tensor for name, tensor in load(tmp_path / "out").items() if name in tensors}, load(saved)) == []

    @pytest.mark.parametrize(
        ("rename", "rule"),
        [
            (lambda name: f"net.{name}", "net="),
            (lambda name: name.removeprefix("model."), "layers=model.layers"),
            (lambda name: name.replace("model.layers", "blocks"), "blocks=model.layers"),
        ],
        ids=["more", "less", "another"],
    )
    def test_with_another_prefix(self, tmp_path: Path, rename: Rename, rule: str) -> None:
        saved, run = self.renamed(tmp_path, rename)
        with pytest.raises(MissingTensors) as refused:
            ckpt_cli.merge(run, tmp_path / "out")
        hint = str(refused.value.hint)
        assert hint.startswith(f"12 tensors that are missing are there under other names: {rename(self.LAYER)}")
        assert hint.endswith(f"--key-map '{rule}' gives them theirs")
        ckpt_cli.merge(run, tmp_path / "out", key_map=rule)
        assert differences(load(tmp_path / "out"), load(saved)) == []

    @pytest.mark.parametrize("layers", [6, 30])
    def test_is_not_replaced_by_the_bases_without_a_word(self, tmp_path: Path, layers: int) -> None:
        saved, run = self.renamed(tmp_path, lambda name: f"net.{name}", layers)
        result = ckpt_cli.merge(run, tmp_path / "out", base=saved, carry_from_base="model.layers.0.*")
        assert "12 of the tensors taken from the base are in the run under other names" in notes(result)["carried-beside"]
        assert "net.model.layers.0." in notes(result)["carried-beside"]

    def test_with_names_of_its_own(self, tmp_path: Path) -> None:
        """The base fits as far as names go: that it is another model would be a guess."""
        saved, run = self.renamed(tmp_path, lambda name: name.replace("model.layers", "blocks").replace("self_attn", "attn"))
        with pytest.raises(MissingTensors) as refused:
            ckpt_cli.merge(run, tmp_path / "out")
        assert str(refused.value.hint).endswith("have the shapes of these: if they are meant, rename them with --key-map")
        with pytest.raises(Inconsistent, match="too few tensors have a name of the base") as doubted:
            ckpt_cli.merge(run, tmp_path / "out", base=saved, carry_from_base="model.layers.0.*")
        assert "63 of 75 tensors have a name that is in the base" in doubted.value.message


class TestNamesOfTwoKinds:
    """are refused with what was compared; experts are only mentioned where there are some of both kinds."""

    SINGLE = "model.layers.0.mlp.experts.1.up_proj.weight"

    @pytest.mark.parametrize(
        ("mixed", "more", "expected", "hint"),
        [
            ("embed.in_proj.weight", ["in_proj.weight"], "the names of the hub, or those in memory", True),
            ("model.layers.0.mlp.experts.up_proj", [SINGLE], "fused or single experts, as no loader accepts both", True),
            ("model.layers.0.mlp.experts.up_proj", [], "the names of the hub, or those in memory", True),
            ("embed.in_proj.weight", [SINGLE], "the names of the hub, or those in memory", False),
        ],
    )
    def test_are_refused(self, mixed: str, more: list[str], expected: str, hint: bool) -> None:
        fit = Fit("X", "a test", "hub", 2, 3, {} if hint else {"in_proj.weight": (1,)})
        made = Claim("", fit, (), {} if hint else {"in_proj.weight": "1"}, "X", (mixed,))
        with pytest.raises(Inconsistent) as refused:
            refuse_lacking(made, dict.fromkeys(["model.norm.weight", *more, mixed], (1,)), None, "hub")
        assert refused.value.message.startswith("1 tensor has its name in memory, the others have those of the hub, of X")
        assert refused.value.expected == expected
        assert refused.value.hint == (f"without these the model is whole: --exclude '{mixed}' leaves them out" if hint else None)

    @pytest.mark.parametrize("name", ["qwen2_vl", "internvl", "qwen2"])
    def test_names_of_the_hub_that_are_kept_are_all_of_one_kind(self, tmp_path: Path, name: str) -> None:
        """One of them, such as lm_head.weight, may be the same in memory."""
        kind, model_type, options = MODELS[name]
        build(kind, model_type, options).save_pretrained(tmp_path / "saved")
        result = ckpt_cli.merge(tmp_path / "saved", tmp_path / "out", names="native")
        assert "those of the hub" in result.outputs[0].naming or name == "qwen2"
        assert differences(load(tmp_path / "out"), load(tmp_path / "saved")) == []


class TestWhatIntersectLeavesOut:
    """is missing where the class needs it, as in a merge; --intersect is not suggested then."""

    @pytest.mark.parametrize("asked", [True, False], ids=["transformers", "shipped names"])
    @pytest.mark.parametrize("newer", [True, False])
    def test_a_head_that_one_step_lacks(self, request: pytest.FixtureRequest, tmp_path: Path, asked: bool, newer: bool) -> None:
        saved, tensors = saved_by(tmp_path)
        if not asked:
            request.getfixturevalue("alone")
        less = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        runs = [trained(tmp_path / "a", saved, tensors if newer else less), trained(tmp_path / "b", saved, less if newer else tensors)]
        with pytest.raises(DifferentTensors) as refused:
            ckpt_cli.average(runs, tmp_path / "out")
        assert refused.value.hint == "--intersect would leave out lm_head.weight, which the model needs"
        with pytest.raises(MissingTensors) as missing:
            ckpt_cli.average(runs, tmp_path / "out", intersect=True)
        assert "average checkpoints that all have them alike" in str(missing.value.hint)
        result = ckpt_cli.average(runs, tmp_path / "out", intersect=True, allow_missing="lm_head.*")
        assert "missing-allowed" in notes(result)

    def test_an_embedding_of_another_shape(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        name = "model.embed_tokens.weight"
        runs = [trained(tmp_path / "a", saved, {**tensors, name: tensors[name][:-1].clone()}), trained(tmp_path / "b", saved, tensors)]
        with pytest.raises(MissingTensors, match=re.escape(name)):
            ckpt_cli.average(runs, tmp_path / "out", intersect=True)

    def test_what_the_class_has_no_place_for_goes(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        runs = [trained(tmp_path / "a", saved, {**tensors, "value.weight": torch.ones(3)}), trained(tmp_path / "b", saved, tensors)]
        with pytest.raises(DifferentTensors) as refused:
            ckpt_cli.average(runs, tmp_path / "out")
        assert refused.value.hint == "pass --intersect to average the 27 tensors that match"
        ckpt_cli.average(runs, tmp_path / "out", intersect=True)
        assert load(tmp_path / "out").keys() == load(saved).keys()

    def test_filters_are_the_users_own_choice(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        runs = [trained(tmp_path / n, saved, tensors) for n in "ab"]
        ckpt_cli.average(runs, tmp_path / "out", exclude="lm_head.weight")
        assert "lm_head.weight" not in load(tmp_path / "out")


class TestWhatAKeyMapLeavesOut:
    """is left out under the name that the output would have, which is another one where names change on the way."""

    def map(self, folder: Path, *rules: dict[str, Any]) -> Path:
        (folder / "map.json").write_text(json.dumps({"rules": rules}))
        return folder / "map.json"

    def test_is_not_missing_under_the_name_of_the_hub(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path, "qwen2_vl")
        path = trained(tmp_path / "run", saved, tensors)
        trained_name = next(name for name in tensors if "layers.1" in name and name not in load(saved))
        rules = self.map(tmp_path, {"match": re.escape(trained_name), "drop": True})
        assert ckpt_cli.merge(path, tmp_path / "out", key_map=rules).outputs[0].dropped == {trained_name: "left out by the key map"}
        ckpt_cli.average([path, path], tmp_path / "mean", key_map=rules)
        assert len(load(tmp_path / "out")) == len(load(tmp_path / "mean")) == len(load(saved)) - 1

    def test_is_not_missing_under_the_name_that_another_rule_gives(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        path = trained(tmp_path / "run", saved, {f"net.{name}": tensor for name, tensor in tensors.items()})
        rules = self.map(tmp_path, {"match": r"net\.model\.norm\.weight", "drop": True}, {"match": r"net\.(.*)", "to": r"\1"})
        ckpt_cli.merge(path, tmp_path / "out", key_map=rules)
        assert load(tmp_path / "out").keys() == load(saved).keys() - {"model.norm.weight"}

    def test_hides_no_tensor_that_takes_its_name(self, tmp_path: Path) -> None:
        """A stale head goes, a new one gets its name: rows of the head are counted."""
        saved, tensors = saved_by(tmp_path)
        held = {**tensors, "new_head.weight": tensors["lm_head.weight"] + 1}
        path = trained(tmp_path / "run", saved, held)
        rules = self.map(tmp_path, {"match": r"lm_head\.weight", "drop": True}, {"match": r"new_head\.(.*)", "to": r"lm_head.\1"})
        result = ckpt_cli.merge(path, tmp_path / "out", key_map=rules).outputs[0]
        assert torch.equal(load(tmp_path / "out")["lm_head.weight"], tensors["lm_head.weight"] + 1)
        assert result.naming.startswith("those of the hub: 27 of 27")

    def test_excuses_no_other_tensor_of_its_old_name(self, tmp_path: Path) -> None:
        """What was called as another tensor of the output is called leaves that one missing."""
        saved, tensors = saved_by(tmp_path)
        held = {f"net.{name}": tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        path = trained(tmp_path / "run", saved, {**held, "lm_head.weight": torch.ones(3)})
        rules = self.map(
            tmp_path,
            {"match": r"lm_head\.weight", "drop": True},
            {"match": r"lm_head\.weight", "to": "old_head.weight"},
            {"match": r"net\.(.*)", "to": r"\1"},
        )
        with pytest.raises(MissingTensors, match=r"lm_head\.weight"):
            ckpt_cli.merge(path, tmp_path / "out", key_map=rules)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"


class TestABaseWhoseWeightsCannotBeRead:
    """is refused for what is wrong with it, wherever it is needed; where it is not, that nothing was compared is said."""

    def base(self, folder: Path, saved: Path, name: str, content: bytes) -> Path:
        folder.mkdir()
        (folder / name).write_bytes(content)
        (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
        return folder

    @pytest.mark.parametrize("how", [{"match_base": True}, {"carry_from_base": "lm_head.*"}, {"dtype": "base"}, {"compare": True}], ids=str)
    @pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"])
    def test_as_one_part_of_a_set(self, tmp_path: Path, name: str, how: dict[str, Any]) -> None:
        saved, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", saved, tensors)
        content = (saved / "model.safetensors").read_bytes() if name.endswith("safetensors") else run.read_bytes()
        base = self.base(tmp_path / "base", saved, name, content)
        calls: list[Callable[[], Any]] = [lambda: ckpt_cli.merge(run, tmp_path / "out", base=base, **how)]
        if "carry_from_base" in how or "dtype" in how:
            calls.append(lambda: ckpt_cli.average([run, run], tmp_path / "out", base=base, **how))
        calls.append(lambda: ckpt_cli.verify(saved, base=base))
        for call in calls:
            with pytest.raises(PartOfSet, match="is one of 2 files") as caught:
                call()
            assert caught.value.hint is not None
            assert "get the other files" in caught.value.hint

    @pytest.mark.parametrize(
        ("name", "content", "error"),
        [("model.safetensors", LFS, LfsPointer), ("model.safetensors", b"", CorruptFile), ("pytorch_model.bin", LFS, LfsPointer)],
    )
    def test_as_a_file_that_is_none(self, tmp_path: Path, name: str, content: bytes, error: type[Exception]) -> None:
        saved, _ = saved_by(tmp_path)
        base = self.base(tmp_path / "base", saved, name, content)
        for how in ({"match_base": True}, {"carry_from_base": "lm_head.*"}, {"dtype": "base"}, {}):
            with pytest.raises(error):
                ckpt_cli.merge(saved, tmp_path / "out", base=base, **how)  # type: ignore[arg-type]

    def test_is_told_where_nothing_needs_them(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", saved, tensors)
        base = self.base(tmp_path / "base", saved, "model-00001-of-00002.safetensors", (saved / "model.safetensors").read_bytes())
        for result in (
            ckpt_cli.merge(run, tmp_path / "a", base=base),
            ckpt_cli.average([run, run], tmp_path / "b", base=base),
        ):
            assert notes(result)["base-unread"].startswith("nothing was compared with the weights of the base: model-00001-of-00002")

    def test_and_an_average_beside_them_is_not_the_model(self, tmp_path: Path) -> None:
        saved, tensors = saved_by(tmp_path)
        run = trained(tmp_path / "run", saved, tensors)
        content = (saved / "model.safetensors").read_bytes()
        base = self.base(tmp_path / "base", saved, "model-00001-of-00002.safetensors", content)
        (base / "ema.safetensors").write_bytes(content)
        with pytest.raises(PartOfSet):
            ckpt_cli.merge(run, tmp_path / "out", base=base, match_base=True)


NO_FLOATS = {
    "complex64": torch.complex64,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}


class TestADtype:
    """that a class does not have where a tensor stands is told by merge, average and verify alike."""

    def run(self, folder: Path, changed: Mapping[str, torch.Tensor], **changes: Any) -> Path:
        saved, tensors = saved_by(folder)
        run = trained(folder / "run", saved, {**tensors, **changed})
        config(run.parent, **changes)
        return run

    def said(self, run: Path, folder: Path) -> list[list[str]]:
        """What merge, average, and verify of the output and of the source say."""
        results = [ckpt_cli.merge(run, folder / "out"), ckpt_cli.average([run, run], folder / "mean")]
        told = [[note.text for note in result.outputs[0].notes if note.code == "odd-dtype"] for result in results]
        checked = [ckpt_cli.verify(folder / "out"), ckpt_cli.verify(run)]
        return told + [[item.message for item in result.findings if item.code == "odd-dtype"] for result in checked]

    @pytest.mark.parametrize("known", ["by transformers", "by its names", "not at all"])
    @pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"])
    @pytest.mark.parametrize("dtype", NO_FLOATS)
    def test_of_a_weight(self, tmp_path: Path, request: pytest.FixtureRequest, dtype: str, name: str, known: str) -> None:
        if known == "by its names":
            request.getfixturevalue("alone")
        weight = saved_by(tmp_path / "shape")[1][name]
        changes = {"architectures": ["Unheard"], "model_type": "unheard"} if known == "not at all" else {}
        run = self.run(tmp_path, {name: torch.ones(weight.shape).to(NO_FLOATS[dtype])}, **changes)
        for texts in self.said(run, tmp_path):
            assert [text.startswith(f"{name}: ") and " where a model has floats" in text for text in texts] == [True]

    @pytest.mark.parametrize("dtype", ["int32", "complex64"])
    def test_of_what_a_class_knows_or_other_layers_have_as_floats(self, tmp_path: Path, dtype: str) -> None:
        """Mamba's A_log is not called a weight."""
        layers = {f"model.layers.{i}.mixer.A_log": torch.ones(4, 2) for i in range(3)}
        run = self.run(tmp_path, {**layers, "model.layers.2.mixer.A_log": torch.ones(4, 2).to(NO_FLOATS[dtype])}, architectures=["Unheard"])
        for texts in self.said(run, tmp_path):
            assert [text.startswith("model.layers.2.mixer.A_log: ") for text in texts] == [True]

    def test_of_codes_without_scales_is_not_told_as_if_there_were_some(self, tmp_path: Path) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        codes = torch.ones(saved_by(tmp_path / "shape")[1][name].shape, dtype=torch.int8)
        run = self.run(tmp_path, {name: codes, f"{name}_scale": torch.ones(1)}, architectures=["Unheard"])
        for texts in self.said(run, tmp_path):
            assert [text.endswith("has no quantization_config, without which loaders ignore the scales") for text in texts] == [True]

    @pytest.mark.parametrize(
        ("codes", "scale"),
        [
            ({"mlp.up_proj.weight": torch.uint8}, "mlp.up_proj.weight.absmax"),
            ({"mlp.up_proj.weight": torch.int8}, "mlp.up_proj.SCB"),
            ({"mlp.up_proj.weight": torch.float8_e4m3fn}, "mlp.up_proj.weight_scale_inv"),
            ({"mlp.up_proj.qweight": torch.int32, "mlp.up_proj.qzeros": torch.int32}, "mlp.up_proj.scales"),
        ],
        ids=["bitsandbytes 4 bit", "bitsandbytes 8 bit", "fp8", "gptq"],
    )
    def test_of_a_quantised_model_is_what_its_config_says(self, tmp_path: Path, codes: dict[str, torch.dtype], scale: str) -> None:
        start = "model.layers.1."
        changed = {f"{start}{name}": torch.ones(8, 8).to(dtype) for name, dtype in codes.items()} | {f"{start}{scale}": torch.ones(8)}
        run = self.run(tmp_path, changed, quantization_config={"quant_method": "any"})
        assert self.said(run, tmp_path) == [[], [], [], []]
        run = self.run(tmp_path / "complex", {**changed, "model.norm.weight": torch.ones(16, dtype=torch.complex64)})
        config(run.parent, quantization_config={"quant_method": "any"})
        for texts in self.said(run, tmp_path / "complex"):
            assert ["no loader takes complex numbers" in text for text in texts] == [True]

    def test_of_gptq_without_a_word_of_the_config(self, tmp_path: Path) -> None:
        changed = {"model.layers.1.mlp.up_proj.qweight": torch.ones(8, 8, dtype=torch.int32)}
        for texts in self.said(self.run(tmp_path, changed, architectures=["Unheard"]), tmp_path):
            assert len(texts) == 1

    def test_of_what_counts_or_is_looked_up_is_right(self, tmp_path: Path) -> None:
        changed = {
            "model.embeddings.position_ids": torch.arange(8)[None],
            "model.bn.num_batches_tracked": torch.tensor(3),
            "model.relative_position_index": torch.ones(4, 4, dtype=torch.int64),
            "model.layers.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
            "model.layers.1.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        }
        assert self.said(self.run(tmp_path, changed, architectures=["Unheard"]), tmp_path) == [[], [], [], []]

    def test_of_codes_for_other_tools_is_none_where_there_is_no_config(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        save_file({"a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "a.scale_weight": torch.ones(1)}, run / "model.safetensors")
        assert "odd-dtype" not in notes(ckpt_cli.merge(run, tmp_path / "out"))
        save_file({"a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)}, run / "model.safetensors")
        assert "odd-dtype" in notes(ckpt_cli.merge(run, tmp_path / "other"))
        assert "odd-dtype" in {item.code for item in ckpt_cli.verify(run).findings}


BLOCK = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight")


class TestATensorOfOneLayer:
    """between layers that have it is lost, also of a class that nobody knows; layers that may be made otherwise are only told."""

    def run(self, folder: Path, lost: Mapping[int, tuple[str, ...]], layers: int = 8, **changes: Any) -> Path:
        folder.mkdir()
        tensors = {f"model.layers.{i}.{leaf}": torch.ones(2, 2) for i in range(layers) for leaf in BLOCK if leaf not in lost.get(i, ())} | {
            "model.embed_tokens.weight": torch.ones(4, 2)
        }
        save_file(tensors, folder / "model.safetensors")
        config(folder, architectures=["Unheard"], model_type="unheard", num_hidden_layers=layers, **changes)
        return folder

    @pytest.mark.parametrize("leaf", ["mlp.down_proj.weight", "self_attn.q_proj.weight", "input_layernorm.weight"])
    @pytest.mark.parametrize("number", [1, 3, 6])
    def test_is_refused(self, tmp_path: Path, number: int, leaf: str) -> None:
        run = self.run(tmp_path / "run", {number: (leaf,)})
        name = f"model.layers.{number}.{leaf}"
        for call in (ckpt_cli.merge, lambda path, out, **how: ckpt_cli.average([path, path], out, **how)):
            with pytest.raises(MissingTensors, match=re.escape(f"layers.{number} lacks {leaf}")) as caught:
                call(run, tmp_path / "out")
            assert f"--allow-missing '{name}'" in (caught.value.hint or "")
        assert ckpt_cli.merge(run, tmp_path / "out", allow_missing=name).exit_code == 0
        assert [item.tensor for item in ckpt_cli.verify(run).findings if item.code == "missing-layers"] == [name]
        assert "missing-layers" not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}

    @pytest.mark.parametrize(
        ("lost", "changes"),
        [
            ({0: ("mlp.down_proj.weight",)}, {}),
            ({7: ("mlp.down_proj.weight",)}, {}),
            ({3: ("mlp.down_proj.weight",), 7: ("mlp.down_proj.weight",)}, {}),
            ({3: ("mlp.down_proj.weight", "mlp.up_proj.weight")}, {}),
            ({5: ("self_attn.q_proj.weight",)}, {"layer_types": ["s"] * 5 + ["f"] + ["s"] * 2}),
            ({5: ("self_attn.q_proj.weight",)}, {"global_attn_layers": [5]}),
            ({5: ("self_attn.q_proj.weight",)}, {"full_attention_interval": 6}),
        ],
        ids=["the first", "the last", "every fourth", "no mlp", "a list of kinds", "a list of numbers", "an interval"],
    )
    def test_is_none_where_the_layer_may_be_made_like_this(
        self, tmp_path: Path, lost: Mapping[int, tuple[str, ...]], changes: dict[str, Any]
    ) -> None:
        result = ckpt_cli.merge(self.run(tmp_path / "run", lost, **changes), tmp_path / "out")
        assert result.exit_code == 0

    def test_is_none_of_a_short_stack(self, tmp_path: Path) -> None:
        ckpt_cli.merge(self.run(tmp_path / "run", {1: ("mlp.down_proj.weight",)}, layers=4), tmp_path / "out")

    def test_that_a_filter_leaves_out_is_not_missing(self, tmp_path: Path) -> None:
        ckpt_cli.merge(self.run(tmp_path / "run", {}), tmp_path / "out", exclude="model.layers.3.mlp.down_proj.weight")
        assert ckpt_cli.verify(tmp_path / "out").exit_code == 0

    def test_is_refused_where_only_names_are_known(self, tmp_path: Path, alone: None) -> None:
        saved, tensors = saved_by(tmp_path, layers=8)
        name = "model.layers.3.mlp.down_proj.weight"
        run = trained(tmp_path / "run", saved, {key: tensor for key, tensor in tensors.items() if key != name})
        with pytest.raises(MissingTensors, match=r"lacks mlp\.down_proj\.weight"):
            ckpt_cli.merge(run, tmp_path / "out")


class TestWhatOnlyNamesProve:
    """is told as that: which names were compared, and that nobody counted how many there must be."""

    def test_a_name_that_the_shipped_list_lacks_has_not_no_place(self, tmp_path: Path, alone: None) -> None:
        saved, tensors = saved_by(tmp_path)
        save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, saved / "model.safetensors")
        (item,) = [item for item in ckpt_cli.verify(saved).findings if item.tensor == "model.layers.0.self_attn.q_norm.weight"]
        assert (item.code, item.message) == (
            "unlisted-tensor",
            "Qwen2ForCausalLM has none in transformers 5.24.0 by default (shape 8)",
        )

    @pytest.mark.parametrize(("left_out", "named"), [("model.norm.weight", "model.norm.weight"), ("lm_head.*", "lm_head.weight")])
    def test_a_kind_of_tensors_that_was_left_out_is_named(self, tmp_path: Path, alone: None, left_out: str, named: str) -> None:
        saved, _ = saved_by(tmp_path, tie_word_embeddings=False)
        merged = ckpt_cli.merge(saved, tmp_path / "out", exclude=left_out).outputs[0].naming
        verified = ckpt_cli.verify(tmp_path / "out")
        for text in (merged, str(verified.names)):
            assert text.startswith("those of the hub: 26 of 26 are known names of Qwen2ForCausalLM (transformers 5.24.0)")
            assert f", which usually has {named} too; neither shapes nor counts were compared: transformers is not" in text
        assert {item.code for item in verified.findings if item.tensor == named} == {"left-out"}

    def test_of_a_layer_nobody_counted(self, tmp_path: Path, alone: None) -> None:
        saved, _ = saved_by(tmp_path)
        ckpt_cli.merge(saved, tmp_path / "out", exclude="model.layers.1.mlp.up_proj.weight")
        names = str(ckpt_cli.verify(tmp_path / "out").names)
        assert names.endswith("; neither shapes nor counts were compared: transformers is not installed")

    def test_a_tied_head_is_none_that_is_usually_there(self, tmp_path: Path, alone: None) -> None:
        saved, _ = saved_by(tmp_path, "llama, tied")
        assert "usually" not in str(ckpt_cli.verify(saved).names)
        assert "usually" not in ckpt_cli.merge(saved, tmp_path / "out").outputs[0].naming

    def test_with_transformers_what_the_class_needs_is_counted(self, tmp_path: Path) -> None:
        saved, _ = saved_by(tmp_path)
        ckpt_cli.merge(saved, tmp_path / "out", exclude="model.norm.weight")
        assert "26 of 27 tensors" in str(ckpt_cli.verify(tmp_path / "out").names)
