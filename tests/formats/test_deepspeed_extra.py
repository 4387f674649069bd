"""DeepSpeed saves of models whose parameters have second names that DeepSpeed does not list."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import Unsupported
from tests.conftest import Copy
from tests.formats.test_deepspeed import changed
from tests.tensors import differences, load

TAG = Path("run", "global_step2")
ALIASES = {"b2.weight": "b.weight", "b2.bias": "b.bias", "two2": "two", "f2.weight": "frozen.weight", "fz2": "fz1"}
"""One parent has these modules and parameters twice: `shared_params` lacks them."""

FIRST = "zero_pp_rank_0_mp_rank_00_model_states.pt"


class TestSecondNames:
    def test_a_module_under_two_names_of_one_parent_is_written_under_both(self, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed-extra" / "z3-subtied-ema"
        result = ckpt_cli.inspect(folder / "run").checkpoint
        (model,) = (component for component in result.components if component.name == "model")
        assert {tensor.name: tensor.alias_of for tensor in model.tensors or () if tensor.name in ALIASES} == ALIASES
        ckpt_cli.merge(folder / "run", tmp_path / "out", verify=True)
        assert differences(load(tmp_path / "out"), load(folder / "expected.safetensors")) == []
        ckpt_cli.extract_state(folder / "run", tmp_path / "state", optimizer=True)
        moments = load(tmp_path / "state" / "optimizer.safetensors")
        assert "state.b.weight.exp_avg" in moments
        assert not any(f"state.{name}.exp_avg" in moments for name in ALIASES)

    def test_of_frozen_ones_that_were_left_out_the_second_names_are_said_to_be_so(self, data: Path, tmp_path: Path) -> None:
        folder = data / "deepspeed-extra" / "z3-subtied-nofz"
        result = ckpt_cli.merge(folder / "run", tmp_path / "out")
        wanted = load(folder / "expected.safetensors")
        frozen = {"frozen.weight", "fz1", "f2.weight", "fz2"}
        assert differences(load(tmp_path / "out"), {name: tensor for name, tensor in wanted.items() if name not in frozen}) == []
        (text,) = (note.text for note in result.checkpoint.notes if note.code == "frozen-left-out")
        assert text.startswith("f2.weight, fz2: named but not stored")

    @pytest.mark.parametrize("lost", ["b2.bias", "f2.weight"])
    def test_a_placeholder_of_no_parameter_is_refused(self, lost: str, copy: Copy, tmp_path: Path) -> None:
        """What it is another name of is not known where it has a storage of its own, as every empty tensor has that torch loaded."""
        folder = copy("deepspeed-extra", "z3-subtied-ema")
        with changed(folder / TAG / FIRST) as content:
            module = content["module"]
            module |= {name: module[kept] for name, kept in ALIASES.items() if name != lost}
        with pytest.raises(Unsupported, match="placeholder") as caught:
            ckpt_cli.merge(folder / "run", tmp_path / "out")
        assert caught.value.tensor == lost
        assert "--also" not in str(caught.value.hint)

    def test_placeholders_of_one_storage_for_all_prove_nothing(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed-extra", "z3-subtied-ema")
        with changed(folder / TAG / FIRST) as content:
            module = content["module"]
            module |= dict.fromkeys((name for name in module if module[name].shape == (0,)), module["scale"])
        with pytest.raises(Unsupported, match="placeholder"):
            ckpt_cli.merge(folder / "run", tmp_path / "out")
