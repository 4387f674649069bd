"""DeepSpeed saves of models whose parameters have second names that DeepSpeed does not list, and of averages in ``client_state``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, Gap, Inconsistent, Unsupported
from tests.cli import ckpt_fork as ckpt
from tests.conftest import Copy
from tests.formats.test_deepspeed import changed
from tests.payloads import Runs
from tests.tensors import Tensors, differences, load

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

    @pytest.mark.parametrize("case", ["z2-bf16-w4-frozen", "z2-fp32-w2", "z3-bf16-w2"])
    def test_frozen_ones_of_one_name_that_were_left_out_are_said_to_be_so(self, case: str, copy: Copy, tmp_path: Path) -> None:
        """What DeepSpeed writes with exclude_frozen_parameters: None instead of their list, and a module without them."""
        folder = copy("deepspeed", case)
        wanted = load(folder / "expected.safetensors")
        for path in (folder / "run").rglob("*_model_states.pt"):
            with changed(path) as content:
                frozen = set(content["frozen_param_shapes"])
                content |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
                for name in frozen:
                    del content["module"][name]
        assert frozen
        for kind in ("model", "weights16") if case == "z2-bf16-w4-frozen" else ("model",):
            result = ckpt_cli.merge(folder / "run", tmp_path / kind, type=kind)
            (text,) = (note.text for note in result.checkpoint.notes if note.code == "frozen-left-out")
            assert "exclude_frozen_parameters" in text
            assert load(tmp_path / kind).keys() == wanted.keys() - frozen

    @pytest.mark.parametrize("case", ["z0-bf16-w2", "z1-bf16-w2", "z1-bf16opt-w2", "z2-bf16-w2-roundrobin", "z3-fp16-w2-lossscale"])
    def test_where_nothing_is_frozen_nothing_is_said_of_it(self, case: str, data: Path) -> None:
        assert "frozen-left-out" not in {note.code for note in ckpt_cli.detect(data / "deepspeed" / case / "run").checkpoint.notes}

    def test_that_adapters_were_saved_without_their_model_is_no_news(self, copy: Copy) -> None:
        folder = copy("deepspeed", "lora-z3-w2-nofrozen")
        for path in (folder / "run").rglob("*_model_states.pt"):
            with changed(path) as content:
                for name in ("model.embed_tokens", "lm_head"):
                    content["module"].pop(f"base_model.model.{name}.weight", None)
                content["shared_params"] = {}
        assert "frozen-left-out" not in {note.code for note in ckpt_cli.detect(folder / "run").checkpoint.notes}

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


def in_client_state(folder: Path) -> Tensors:
    """What the training passed as `ema`, read by torch."""
    with changed(next((folder / TAG).glob("*rank_00_model_states.pt"))) as content:
        held: Tensors = content["ema"]
        return held


class TestClientState:
    @pytest.mark.parametrize("case", ["z2-ema", "z3-subtied-ema"])
    def test_an_average_is_a_component(self, case: str, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed-extra", case)
        names = {component.name for component in ckpt_cli.detect(folder / "run").checkpoint.components}
        assert names == {"model", "ema"} | ({"weights16"} if case.startswith("z2") else set())
        result = ckpt_cli.merge(folder / "run", tmp_path / "model", names="native")
        assert any("also holds ema (--type ema)" in note.text for note in result.checkpoint.notes)
        assert differences(load(tmp_path / "model"), load(folder / "expected.safetensors")) == []
        ckpt_cli.merge(folder / "run", tmp_path / "ema", type="ema", names="native", verify=True)
        assert differences(load(tmp_path / "ema"), in_client_state(folder)) == []

    def test_it_is_no_part_of_the_training_state(self, data: Path, tmp_path: Path) -> None:
        ckpt_cli.extract_state(data / "deepspeed-extra" / "z2-ema" / "run", tmp_path / "state")
        state = torch.load(tmp_path / "state" / "extra_state_merged.pt")
        assert "epoch" in str(state)
        assert "norm.weight" not in str(state)

    def test_every_screen_names_it(self, data: Path) -> None:
        run = data / "deepspeed-extra" / "z2-ema" / "run"
        assert "ema" in ckpt("detect", run).out.split()
        assert "ema (--type ema)" in ckpt("inspect", run, "-v").err
        assert "ema" in str(ckpt_cli.inspect(run, type="ema").checkpoint.components)

    @pytest.mark.parametrize(("key", "name"), [("ema", "norm.weight"), ("module", "buf")])
    def test_a_call_in_the_place_of_a_tensor_is_refused_with_its_file(self, copy: Copy, tmp_path: Path, key: str, name: str) -> None:
        path = copy("deepspeed-extra", "z2-ema") / TAG / "mp_rank_00_model_states.pt"
        with changed(path) as content:
            content[key][name] = Runs(os.system, "true")
        done = ckpt("merge", path.parent, "--type", "ema" if key == "ema" else "model", "-o", tmp_path / "out")
        assert done.code in (3, 4)
        assert f"path: {path}\n" in done.err
        assert name in done.err
        assert "system" in done.err
        assert not (tmp_path / "out").exists()

    def test_a_teacher_and_an_average_of_another_name(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed-extra", "z2-ema")
        with changed(folder / TAG / "mp_rank_00_model_states.pt") as content:
            content["module_ema"] = {"updates": 3, "module": content.pop("ema")}
            content["teacher"] = {"proj.weight": torch.ones(2, 3)}
            content["queue"] = torch.ones(4, 4)
        notes = ckpt_cli.merge(folder / "run", tmp_path / "out").checkpoint.notes
        assert [note.text for note in notes if note.code == "beside-weights"] == ["left out, since they are beside the state dict: queue"]
        ckpt_cli.merge(folder / "run", tmp_path / "ema", type="ema")
        assert "embed.weight" in load(tmp_path / "ema")
        ckpt_cli.merge(folder / "run", tmp_path / "teacher", type="teacher")
        assert differences(load(tmp_path / "teacher"), {"proj.weight": torch.ones(2, 3)}) == []

    @pytest.mark.parametrize(
        ("change", "kind"),
        [
            (lambda average: average["a.weight"].add_(1), Inconsistent),
            (lambda average: average.pop("a.weight"), Inconsistent),
            (lambda average: average.update(dict.fromkeys(average, torch.empty(0))), Gap),
        ],
    )
    def test_what_the_ranks_hold_must_be_the_same_and_be_there(
        self, change: object, kind: type[CkptError], copy: Copy, tmp_path: Path
    ) -> None:
        folder = copy("deepspeed-extra", "z3-subtied-ema")
        with changed(folder / TAG / FIRST.replace("zero_pp_rank_0", "zero_pp_rank_1")) as content:
            change(content["ema"])  # type: ignore[operator]
        with pytest.raises(kind):
            ckpt_cli.merge(folder / "run", tmp_path / "out", type="ema")
        assert not (tmp_path / "out").exists()


class TestAdapterConfig:
    """What scales adapters is found where config.json is: beside the weights, in the step, in the run."""

    @pytest.mark.parametrize(
        ("tag", "lies", "given"),
        [
            ("global_step2", ".", "."),
            ("global_step2", ".", "global_step2"),
            ("checkpoint-2/global_step2", "checkpoint-2", "."),
            ("checkpoint-2/global_step2", ".", "."),
            ("checkpoint-2/global_step2", ".", "checkpoint-2/global_step2"),
            ("checkpoints/checkpoint_2/pytorch_model", ".", "."),
            ("checkpoints/checkpoint_2/pytorch_model", "checkpoints", "checkpoints/checkpoint_2"),
            ("2", ".", "."),
        ],
    )
    def test_it_is_found(self, tag: str, lies: str, given: str, copy: Copy, tmp_path: Path) -> None:
        run, moved = copy("deepspeed", "lora-z3-w2-nofrozen") / "run", tmp_path / "moved"
        (moved / tag).parent.mkdir(parents=True)
        (run / "global_step2").rename(moved / tag)
        (moved / tag).with_name("latest").write_text(Path(tag).name)
        (run / "adapter_config.json").rename(moved / lies / "adapter_config.json")
        result = ckpt_cli.merge(moved / given, tmp_path / "out")
        wanted = json.loads((moved / lies / "adapter_config.json").read_text())
        written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (written["r"], written["lora_alpha"]) == (wanted["r"], wanted["lora_alpha"])
        told = [note.text for note in result.checkpoint.notes if note.code == "assets-of-run"]
        in_run = lies in (".", "checkpoints")
        assert [text.startswith("adapter_config.json: taken from the folder of the run") for text in told] == [True] * in_run


class Planted:
    """What would make a file if it were loaded."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.made),))


def test_a_planted_call_beside_what_is_read_is_not_run_and_scan_lists_it(copy: Copy, tmp_path: Path) -> None:
    folder, made = copy("deepspeed", "z2-fp32-w2"), tmp_path / "made"
    (path,) = (folder / "run").rglob("mp_rank_00_model_states.pt")
    with changed(path) as content:
        content["note"] = Planted(made)
    ckpt_cli.merge(folder / "run", tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(folder / "expected.safetensors")) == []
    ckpt_cli.extract_state(folder / "run", tmp_path / "state", optimizer=True)
    assert "mkdir" in ckpt("scan", path).out
    assert not made.exists()
    with changed(path) as content:
        content["note"], content["param_shapes"] = None, Planted(made / "inner")
    with pytest.raises(CkptError) as caught:
        ckpt_cli.merge(folder / "run", tmp_path / "refused")
    assert path.name in str(caught.value.path)
    assert not (made / "inner").exists()


@pytest.mark.parametrize("component", ["model", "weights16"])
def test_tied_weights_of_autotp_are_cut_alike(data: Path, component: str, tmp_path: Path) -> None:
    folder = data / "deepspeed" / "tied-autotp"
    ckpt_cli.merge(folder / "run", tmp_path / "out", type=component, names="native")
    written, expected = load(tmp_path / "out"), load(folder / "expected.safetensors")
    # The oracle lists the parameters, of which the head is none of its own.
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert {name: value.shape for name, value in written.items()} == {name: value.shape for name, value in expected.items()}
    if component == "model":
        assert differences(written, expected) == []
