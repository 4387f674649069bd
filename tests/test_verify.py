"""`verify` finds every defect of docs/findings.md at the levels that its table names, and nothing in an output that is right."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, NotFound, SourceChanged, UsageError
from ckpt_cli.results.verify import VerifyResult
from ckpt_cli.verifying.findings import KINDS
from ckpt_cli.verifying.source import compare_with_source
from tests.architectures import MODELS, build
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.conftest import Copy
from tests.training import trained

PAGE = Path(__file__).parent.parent / "docs" / "findings.md"
INDEX = "model.safetensors.index.json"
MODEL = "qwen3_moe"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a run, with a tokenizer, as files of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    for step, seed in ((1, 7), (2, 8)):
        model = build(*MODELS[MODEL])
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter))
        (folder / str(step)).mkdir()
        made = trained(model, folder / str(step))
        (made / "huggingface" / "tokenizer.json").write_text(json.dumps(tokenizer(64)))
        made.rename(folder / f"global_step_{step}")
    return folder


def tokenizer(size: int) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {f"w{i}": i for i in range(size)}}, "added_tokens": []}


@pytest.fixture(scope="module")
def merged(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "out"
    ckpt_cli.merge(run, out, step=1, max_shard_size=40_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    return out


@pytest.fixture
def out(merged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(merged, tmp_path / "out"))


def codes(result: VerifyResult, level: str | None = None) -> set[str]:
    return {item.code for item in result.findings if level is None or KINDS[item.code].level == level}


# -- making defects --------------------------------------------------------------------------------------------------


def owner(out: Path, name: str) -> Path:
    """The file that holds a tensor."""
    return out / str(json.loads((out / INDEX).read_text())["weight_map"][name])


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def in_index(out: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((out / INDEX).read_text())
    edit(content)
    (out / INDEX).write_text(json.dumps(content))


def in_config(out: Path, **values: object) -> None:
    (out / "config.json").write_text(json.dumps({**json.loads((out / "config.json").read_text()), **values}))


def renamed(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def drop_a_tensor(out: Path) -> None:
    change(owner(out, QUERY), lambda tensors: tensors.pop(QUERY))


def leave_an_old_file(out: Path) -> None:
    shutil.copy(owner(out, QUERY), out / "model-00009-of-00009.safetensors")


def name_the_wrong_dtype(out: Path) -> None:
    in_config(out, dtype="bfloat16")


def change_the_rotary_base(out: Path) -> None:
    in_config(out, rope_theta=5e5, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})


def hold_an_answer(out: Path) -> None:
    (out / "generation_config.json").write_text("Entry not found")


def cut_a_template(out: Path) -> None:
    (out / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}")


def name_another_end(out: Path) -> None:
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


def mark_a_text(out: Path) -> None:
    path = out / "tokenizer.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def truncate(out: Path) -> None:
    path = owner(out, QUERY)
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_file(out: Path) -> None:
    owner(out, QUERY).unlink()


def lose_the_index(out: Path) -> None:
    (out / INDEX).unlink()


def break_the_index(out: Path) -> None:
    (out / INDEX).write_text("{")


def confuse_the_index(out: Path) -> None:
    other = next(path.name for path in sorted(out.glob("*.safetensors")) if path != owner(out, QUERY))
    in_index(out, lambda content: content["weight_map"].update({QUERY: other}))


def count_elements(out: Path) -> None:
    in_index(out, lambda content: content["metadata"].update(total_size=content["metadata"]["total_size"] // 4))


def hold_it_twice(out: Path) -> None:
    tensor = load_file(owner(out, QUERY))[QUERY]
    other = next(path for path in sorted(out.glob("*.safetensors")) if path != owner(out, QUERY))
    change(other, lambda tensors: tensors.update({QUERY: tensor}))


def give_another_shape(out: Path) -> None:
    change(owner(out, QUERY), lambda tensors: tensors.update({QUERY: tensors[QUERY].reshape(16, 64)}))


def give_another_name(out: Path) -> None:
    change(owner(out, QUERY), lambda tensors: renamed(tensors, QUERY, "model.layers.0.self_attn.query_projection.weight"))


def cast_it(out: Path) -> None:
    change(owner(out, QUERY), lambda tensors: tensors.update({QUERY: tensors[QUERY].bfloat16()}))


def want_more_layers(out: Path) -> None:
    in_config(out, num_hidden_layers=3, layer_types=["full_attention"] * 3)


def want_fewer_layers(out: Path) -> None:
    in_config(out, num_hidden_layers=1, layer_types=["full_attention"])


def break_the_config(out: Path) -> None:
    (out / "config.json").write_text("{")


def take_another_tokenizer(out: Path) -> None:
    (out / "tokenizer.json").write_text(json.dumps(tokenizer(65)))


def put_arguments_in_its_place(out: Path) -> None:
    (out / "config.json").write_text(json.dumps({"model_name_or_path": "Qwen/Qwen3", "learning_rate": 1e-5}))


def say_that_it_is_quantised(out: Path) -> None:
    (out / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))


def lose_the_vocabulary(out: Path) -> None:
    (out / "tokenizer.json").unlink()
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))


def hold_other_adapters(out: Path) -> None:
    module = QUERY.removesuffix(".weight")
    added = {f"{module}.lokr_w1": torch.ones(4, 4), f"{module}.lokr_w2": torch.ones(4, 4)}
    change(owner(out, QUERY), lambda tensors: tensors.update(added))


def name_a_class_of_images(out: Path) -> None:
    in_config(out, architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl")


def flip_a_bit(out: Path) -> None:
    path = owner(out, QUERY)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(out: Path, first: str, second: str) -> None:
    tensors = {name: load_file(owner(out, name))[name] for name in (first, second)}
    for name, other in ((first, second), (second, first)):
        change(owner(out, name), lambda held, name=name, other=other: held.update({name: tensors[other]}))  # type: ignore[misc]


def swap_two_tensors(out: Path) -> None:
    swap(out, QUERY, "model.layers.1.self_attn.q_proj.weight")


def permute_experts(out: Path) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        swap(out, *(f"model.layers.1.mlp.experts.{expert}.{part}.weight" for expert in (0, 3)))


def take_another_step(out: Path, run: Path) -> None:
    other = out.with_name("other")
    ckpt_cli.merge(run, other, step=2, max_shard_size=40_000)
    for path in other.glob("*.safetensors"):
        shutil.copy(path, out / path.name)


def make_it_nan(out: Path) -> None:
    change(owner(out, QUERY), lambda tensors: tensors[QUERY][3, 4].fill_(float("nan")))


def tear_a_file(out: Path) -> None:
    """In the middle of the largest matrix that is no vocabulary."""
    held = {name: path for path in out.glob("*.safetensors") for name in load_file(path) if "embed" not in name and "head" not in name}
    largest = max(held, key=lambda name: load_file(held[name])[name].nbytes)
    content = held[largest].read_bytes()
    header = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + header])[largest]["data_offsets"]
    at = 8 + header + (start + end) // 2
    held[largest].write_bytes(content[:at] + bytes(len(content) - at))


def never_load_it(out: Path) -> None:
    change(owner(out, QUERY), lambda tensors: tensors[QUERY].zero_())


DEFECTS: dict[str, Callable[..., None]] = {
    "a tensor was dropped": drop_a_tensor,
    "a file of an older save is in the folder": leave_an_old_file,
    "config.json names the wrong dtype": name_the_wrong_dtype,
    "config.json has another base of the rotary embedding": change_the_rotary_base,
    "an editor put a byte order mark into tokenizer.json": mark_a_text,
    "a download left the answer of a server in a file": hold_an_answer,
    "a chat template was cut off": cut_a_template,
    "a file is truncated": truncate,
    "a file is missing": lose_a_file,
    "the index is missing": lose_the_index,
    "the index is not valid JSON": break_the_index,
    "the index names the wrong file for a tensor": confuse_the_index,
    "the index counts elements as bytes": count_elements,
    "two files hold the same tensor": hold_it_twice,
    "a tensor has another shape": give_another_shape,
    "a tensor has another name": give_another_name,
    "a tensor was cast": cast_it,
    "config.json is of a larger model": want_more_layers,
    "config.json is of a smaller model": want_fewer_layers,
    "config.json is not valid JSON": break_the_config,
    "config.json holds the arguments of a training": put_arguments_in_its_place,
    "a file says that plain weights are quantised": say_that_it_is_quantised,
    "the tokenizer is of another model": take_another_tokenizer,
    "tokenizer_config.json names an end that the vocabulary lacks": name_another_end,
    "the vocabulary of the tokenizer is missing": lose_the_vocabulary,
    "config.json is of a model of images": name_a_class_of_images,
    "adapters of another kind are beside the weights": hold_other_adapters,
    "one bit is flipped": flip_a_bit,
    "two tensors of one shape are swapped": swap_two_tensors,
    "two experts are swapped": permute_experts,
    "the values are those of another step": take_another_step,
    "a value is NaN": make_it_nan,
    "a copy was cut off, and the rest of its file is zeros": tear_a_file,
    "a matrix was never loaded": never_load_it,
}


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading of docs/findings.md, as lists of cells."""
    lines = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


ROWS = {row[0]: [set(cell.split(", ")) - {"-"} for cell in row[1:]] for row in table("Which level finds what")}


def test_every_defect_of_the_page_is_made_here() -> None:
    assert list(ROWS) == list(DEFECTS)


@pytest.mark.parametrize("defect", DEFECTS)
class TestADefect:
    def make(self, defect: str, out: Path, run: Path) -> None:
        DEFECTS[defect](out, run) if defect == "the values are those of another step" else DEFECTS[defect](out)

    def test_is_found_at_the_levels_of_the_page(self, defect: str, out: Path, run: Path) -> None:
        self.make(defect, out, run)
        headers, full, against = ROWS[defect]
        first = ckpt_cli.verify(out)
        assert {code for code in codes(first) if KINDS[code].severity != "info"} == {c for c in headers if KINDS[c].severity != "info"}
        assert headers <= codes(first)
        everything = ckpt_cli.verify(out, full=True, against=run / "global_step_1")
        for level, wanted in (("headers", headers), ("full", full), ("against", against)):
            grave = {code for code in codes(everything, level) if KINDS[code].severity != "info"}
            assert grave == {code for code in wanted if KINDS[code].severity != "info"}, level
        assert everything.exit_code == any(KINDS[code].severity == "error" for code in headers | full | against)

    def test_is_named_and_ends_the_command_with_1_if_it_is_an_error(self, defect: str, out: Path, run: Path) -> None:
        self.make(defect, out, run)
        done = ckpt("verify", out, "--full", "--against", run / "global_step_1", "--json")
        document = json.loads(done.out)
        grave = [item for item in document["data"]["findings"] if item["severity"] != "info"]
        assert grave
        assert all(item["tensor"] or item["file"] for item in grave)
        if all(item["severity"] == "warning" for item in grave):
            assert (done.code, document["exit_code"], document["status"]) == (0, 0, "success")
        else:
            assert (done.code, document["exit_code"], document["status"]) == (1, 1, "findings")


class TestAnOutputThatIsRight:
    def test_gives_nothing_above_a_note_at_any_level(self, merged: Path, run: Path) -> None:
        result = ckpt_cli.verify(merged, full=True, against=run)
        assert not result.of_severity("error")
        assert not result.of_severity("warning")
        assert result.exit_code == 0
        assert (result.expected, result.naming) == (result.tensors, "those of the hub")
        assert result.against[0].identical
        assert result.against[0].tensors == result.tensors == result.checksums
        assert result.bytes_read == result.bytes

    @pytest.mark.parametrize(
        "options",
        [
            {"names": "native"},
            {"dtype": "bf16"},
            {"dtype": "fp16", "max_shard_size": 50_000},
            {"exclude": "*.mlp.*"},
            {"weights_name": "other.safetensors"},
            {"weights_name": "other.safetensors", "max_shard_size": 50_000},
            {"step": 1, "in_place": True},
        ],
        ids=str,
    )
    def test_however_it_was_merged(self, run: Path, tmp_path: Path, options: dict[str, Any]) -> None:
        source = Path(shutil.copytree(run, tmp_path / "run"))
        result = ckpt_cli.merge(source, None if options.get("in_place") else tmp_path / "out", **options)
        verified = ckpt_cli.verify(result.outputs[0].output, full=True, against=source)
        told = {item.code for item in verified.findings if item.severity != "info"}
        assert told == ({"unloaded-name"} if "weights_name" in options else set())
        assert ("left-out" in codes(verified)) == ("exclude" in options)
        assert verified.against[0].identical
        assert verified.against[0].cast == (verified.tensors if "dtype" in options else 0)

    def test_needs_no_manifest_to_equal_its_source(self, out: Path, run: Path) -> None:
        (out / "ckpt-manifest.json").unlink()
        result = ckpt_cli.verify(out, full=True, against=run / "global_step_1")
        assert result.exit_code == 0
        assert result.checksums == 0
        assert result.against[0].identical

    def test_equals_what_save_pretrained_wrote(self, merged: Path, run: Path) -> None:
        assert ckpt_cli.verify(merged, against=run / "1" / "saved").against[0].identical
        assert ckpt_cli.verify(run / "1" / "saved", full=True, against=merged).exit_code == 0

    def test_is_not_another_step_of_its_run(self, merged: Path, run: Path) -> None:
        result = ckpt_cli.verify(merged, against=run / "global_step_2")
        assert codes(result) == {"different-values"}
        assert result.against[0].different == result.tensors


class TestOtherFolders:
    @pytest.mark.parametrize("entry", [{"quantization_config": {"quant_method": "gptq"}}, {"quantization": {"group_size": 32, "bits": 4}}])
    def test_of_quantised_models_are_not_compared_by_name(self, tmp_path: Path, entry: dict[str, Any]) -> None:
        save_file({"model.layers.0.q_proj.qweight": torch.ones(4, 4, dtype=torch.int32)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **entry}))
        assert codes(ckpt_cli.verify(tmp_path)) == {"not-compared"}

    def test_made_of_several_nodes_are_compared_with_all(self, run: Path, tmp_path: Path) -> None:
        for node in (0, 1):
            folder = tmp_path / f"node{node}" / "global_step_1"
            folder.mkdir(parents=True)
            shutil.copy(run / "global_step_1" / f"model_world_size_2_rank_{node}.pt", folder)
        nodes = [tmp_path / f"node{node}" / "global_step_1" for node in (0, 1)]
        ckpt_cli.merge(nodes[0], tmp_path / "out", also=nodes[1])
        assert ckpt_cli.verify(tmp_path / "out", against=nodes[0], also=nodes[1]).exit_code == 0

    def test_nan_in_replicas_counts_once(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        for path in run.glob("global_step_20/actor/model_*_rank_*.pt"):
            content = bytearray(path.read_bytes())
            scale = torch.load(path, weights_only=False)["model.inv_freq"].numpy().tobytes()
            at = content.index(scale)
            content[at : at + 4] = b"\xff\xff\xff\x7f"
            path.write_bytes(content)
        found = [item for item in ckpt_cli.verify(run, step=20, full=True).findings if item.code == "non-finite"]
        assert [item.numbers["nan"] for item in found] == [1]


class TestShards:
    def test_are_verified_as_they_are(self, run: Path) -> None:
        result = ckpt_cli.verify(run, full=True)
        assert result.exit_code == 0
        assert result.format == "rank-shards"
        assert result.checksums > 0

    def test_a_flipped_bit_is_found_by_the_checksum_of_its_record(self, run: Path, tmp_path: Path) -> None:
        step = Path(shutil.copytree(run / "global_step_1", tmp_path / "global_step_1"))
        path = step / "model_world_size_2_rank_1.pt"
        content = bytearray(path.read_bytes())
        local = torch.load(path, weights_only=False)[QUERY].to_local()
        content[content.index(local.numpy().tobytes()) + 5] ^= 4
        path.write_bytes(content)
        result = ckpt_cli.verify(step, full=True)
        assert [(item.code, item.file) for item in result.of_severity("error")] == [("wrong-checksum", path.name)]
        with pytest.raises(CkptError, match="not those that were saved"):
            ckpt_cli.merge(step, tmp_path / "out")
        merged = ckpt_cli.merge(step, tmp_path / "out", dtype="bf16")  # which is not compared with the records
        result = ckpt_cli.verify(merged.outputs[0].output, against=step)
        assert [(item.code, item.file) for item in result.of_severity("error")] == [("wrong-checksum", path.name)]
        assert result.against[0].identical

    def test_replicas_that_differ_are_found(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        for path in sorted(run.glob("global_step_20/actor/model_*_rank_*.pt"))[:1]:
            content = bytearray(path.read_bytes())
            state = torch.load(path, weights_only=False)
            counts = state["model.token_counts"]
            assert not hasattr(counts, "placements")
            content[content.index(counts.numpy().tobytes())] ^= 1
            path.write_bytes(content)
        result = ckpt_cli.verify(run, step=20, full=True)
        assert {"replicas-differ", "wrong-checksum"} <= codes(result)

    def test_missing_ranks_end_with_4(self, copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        assert ckpt("verify", run, "--step", "30").code == 4


class TestSeveralSetsOfWeights:
    """A folder of BAGEL holds a model, its EMA and the image decoder: none of them is passed over."""

    @pytest.fixture
    def both(self, layouts: Path, tmp_path: Path) -> Path:
        ckpt_cli.merge(layouts / "bagel-runs" / "fork_dcp", tmp_path / "both", type="both", base=layouts / "bagel-runs" / "base")
        return tmp_path / "both"

    def test_are_all_verified(self, both: Path, layouts: Path) -> None:
        result = ckpt_cli.verify(both, full=True, against=layouts / "bagel-runs" / "fork_dcp")
        assert result.exit_code == 0
        assert result.component == "model+ema"
        assert [source.component for source in result.against] == ["model", "ema"]

    @pytest.mark.parametrize("file", ["model.safetensors", "ema.safetensors", "ae.safetensors"])
    def test_a_flipped_bit_is_found_in_each(self, both: Path, layouts: Path, file: str) -> None:
        content = bytearray((both / file).read_bytes())
        content[-1] ^= 1
        (both / file).write_bytes(content)
        result = ckpt_cli.verify(both, full=True, against=layouts / "bagel-runs" / "fork_dcp")
        assert file in {item.file for item in result.findings if item.code == "wrong-checksum"}
        assert ("different-values" in codes(result)) == (file != "ae.safetensors")

    @pytest.mark.parametrize("kind", ["model", "ema", "both", "all"])
    def test_are_chosen_by_type(self, both: Path, layouts: Path, kind: str) -> None:
        result = ckpt_cli.verify(both, type=kind, against=layouts / "bagel-runs" / "fork_dcp")
        assert result.exit_code == 0
        assert result.component == ("model+ema" if kind in ("both", "all") else kind)


@pytest.mark.parametrize("name", ["ema.safetensors", "value_head.safetensors"])
def test_weights_that_the_manifest_does_not_list_are_told(out: Path, name: str) -> None:
    save_file({"w": torch.ones(2)}, out / name)
    assert [item.file for item in ckpt_cli.verify(out).findings if item.code == "other-weights"] == [name]


class TestSamples:
    def test_read_a_share_and_prove_no_checksum(self, merged: Path) -> None:
        result = ckpt_cli.verify(merged, sample=0.05)
        assert result.checksums == 0
        assert result.exit_code == 0
        assert 0 < result.bytes_read <= result.bytes

    def test_of_everything_find_everything(self, out: Path) -> None:
        make_it_nan(out)
        assert "non-finite" in codes(ckpt_cli.verify(out, sample=1.0))

    def test_take_the_place_of_everything(self, merged: Path) -> None:
        assert ckpt_cli.verify(merged, full=True, sample=0.05).levels == ("headers", "sample")

    @pytest.mark.parametrize("sample", ["0%", "101%", "x", "-5%", "nan"])
    def test_need_a_share(self, merged: Path, sample: str) -> None:
        assert ckpt("verify", merged, "--sample", sample).code == 2


class TestASingleFile:
    """A file of a model folder means what is loaded with it; the manifest beside it counts."""

    def test_that_is_damaged_is_found(self, out: Path) -> None:
        truncate(out)
        assert codes(ckpt_cli.verify(owner(out, QUERY))) >= {"damaged-file"}

    def test_is_compared_with_its_checksums_and_its_source(self, out: Path, run: Path) -> None:
        swap_two_tensors(out)
        result = ckpt_cli.verify(owner(out, QUERY), full=True, against=run)
        assert {"wrong-checksum", "different-values"} <= codes(result)

    def test_of_an_ema_is_compared_with_the_ema(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "lmms-run" / "run"
        ckpt_cli.merge(run, tmp_path / "ema", type="ema")
        assert ckpt_cli.verify(tmp_path / "ema" / "model.safetensors", against=run).exit_code == 0

    def test_outside_of_a_folder_of_ours_is_read_as_well(self, tmp_path: Path) -> None:
        save_file({"w": torch.ones(2, 2)}, tmp_path / "some.safetensors")
        assert codes(ckpt_cli.verify(tmp_path / "some.safetensors", full=True)) == {"no-config", "constant"}


class TestOlderFolders:
    """Published folders have names of other days, which loaders understand."""

    def test_without_the_prefix_of_the_base_model(self, tmp_path: Path) -> None:
        build(*MODELS["gpt2"]).save_pretrained(tmp_path / "saved")
        change(
            tmp_path / "saved" / "model.safetensors", lambda held: [renamed(held, n, n.removeprefix("transformer.")) for n in list(held)]
        )
        result = ckpt_cli.verify(tmp_path / "saved")
        assert result.findings == ()
        assert result.naming == "those of an older version"

    def test_with_the_words_of_tensorflow(self, tmp_path: Path) -> None:
        build(*MODELS["bert"]).save_pretrained(tmp_path / "saved")
        words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

        def older(held: dict[str, torch.Tensor]) -> None:
            for name in list(held):
                for new, old in words.items():
                    if name.endswith(new):
                        renamed(held, name, name.removesuffix(new) + old)

        change(tmp_path / "saved" / "model.safetensors", older)
        assert ckpt_cli.verify(tmp_path / "saved").findings == ()


class TestAdapterFolders:
    @pytest.fixture
    def adapter(self, layouts: Path, tmp_path: Path) -> Path:
        ckpt_cli.merge(layouts / "verl-lora" / "full", tmp_path / "adapter", lora="export")
        return tmp_path / "adapter"

    def edit(self, adapter: Path, **values: object) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    def test_that_are_right(self, adapter: Path, layouts: Path) -> None:
        result = ckpt_cli.verify(adapter, full=True, against=layouts / "verl-lora" / "full")
        assert not [item for item in result.findings if item.severity != "info"]

    @pytest.mark.parametrize("values", [{"r": 8}, {"lora_alpha": 0}, {"target_modules": ["k_proj"]}, {"peft_type": "IA3"}], ids=str)
    def test_whose_config_does_not_fit_the_factors(self, adapter: Path, values: dict[str, object]) -> None:
        self.edit(adapter, **values)
        assert "damaged-adapter" in codes(ckpt_cli.verify(adapter))

    def test_whose_config_is_broken(self, adapter: Path) -> None:
        (adapter / "adapter_config.json").write_text("{")
        assert "damaged-adapter" in codes(ckpt_cli.verify(adapter))

    def test_that_lack_a_factor(self, adapter: Path) -> None:
        change(adapter / "adapter_model.safetensors", lambda held: held.pop(next(name for name in held if "lora_B" in name)))
        assert "damaged-adapter" in codes(ckpt_cli.verify(adapter))

    def test_that_scale_otherwise_than_the_run(self, adapter: Path, layouts: Path) -> None:
        self.edit(adapter, lora_alpha=12)
        result = ckpt_cli.verify(adapter, against=layouts / "verl-lora" / "full")
        assert [item.code for item in result.of_severity("error")] == ["different-scale"] * 4


class TestTheNextCommand:
    def test_merges_again_exactly_as_it_was_merged(self, layouts: Path, tmp_path: Path) -> None:
        source = layouts / "lmms-run" / "run"
        out = tmp_path / "my out"
        ckpt_cli.merge(source, out, type="ema", dtype="bf16", exclude="*norm*", max_shard_size=3000)
        before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "ckpt-manifest.json"}
        flip = next(path for path in sorted(out.glob("*.safetensors")))
        content = bytearray(flip.read_bytes())
        content[-1] ^= 1
        flip.write_bytes(content)
        command = ckpt("verify", out, "--full").err.splitlines()[-1].removeprefix("next: ")
        assert command.startswith("ckpt merge ")
        assert ckpt(*shlex.split(command)[1:]).code == 0
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != "ckpt-manifest.json"} == before

    @pytest.mark.parametrize("wrong", [("run", "--type", "ema"), ("run", "--step", "100"), ("copy/checkpoint-100",)], ids=str)
    def test_never_replaces_a_good_folder_that_was_compared_with_something_else(
        self, layouts: Path, tmp_path: Path, wrong: tuple[str, ...]
    ) -> None:
        for name in ("run", "copy"):
            shutil.copytree(layouts / "lmms-run" / "run", tmp_path / name)
        run = tmp_path / "run"
        ckpt_cli.merge(run, tmp_path / "out", step=200)
        shown = ckpt("verify", tmp_path / "out", "--against", tmp_path / wrong[0], *wrong[1:])
        assert shown.code == 1
        why, command = shown.err.splitlines()[-2:]
        assert why == f"hint: it was merged from {run / 'checkpoint-200'} (model, step 200)"
        command = command.removeprefix("next: ")
        assert shlex.split(command) == ["ckpt", "verify", str(tmp_path / "out"), "--against", str(run / "checkpoint-200")]
        assert ckpt(*shlex.split(command)[1:]).code == 0

    def test_replaces_a_folder_that_is_not_what_it_was_made_from(self, layouts: Path, tmp_path: Path) -> None:
        run = layouts / "lmms-run" / "run"
        ckpt_cli.merge(run, tmp_path / "out", type="ema")
        change(tmp_path / "out" / "model.safetensors", lambda tensors: next(iter(tensors.values())).zero_())
        assert "--type ema --overwrite" in ckpt("verify", tmp_path / "out", "--against", run).err.splitlines()[-1]

    def test_names_the_file_to_move(self, out: Path) -> None:
        leave_an_old_file(out)
        assert ckpt("verify", out).err.endswith("hint: move model-00009-of-00009.safetensors away\n")


def test_a_step_is_one_of_the_source(merged: Path, run: Path) -> None:
    assert ckpt_cli.verify(merged, against=run, step=1).exit_code == 0
    assert codes(ckpt_cli.verify(merged, against=run, step=2)) == {"different-values"}


class TestTies:
    @pytest.fixture
    def tied(self, tmp_path: Path) -> Path:
        build(*MODELS["llama, tied"]).save_pretrained(tmp_path / "tied")
        return tmp_path / "tied"

    def test_a_head_that_is_stored_as_well_is_a_note(self, tied: Path) -> None:
        change(tied / "model.safetensors", lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}))
        result = ckpt_cli.verify(tied, full=True)
        assert codes(result) >= {"tied-stored"}
        assert not [item for item in result.findings if item.severity != "info"]

    def test_a_head_that_differs_is_a_warning(self, tied: Path) -> None:
        change(tied / "model.safetensors", lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"] + 1}))
        assert [item.code for item in ckpt_cli.verify(tied, full=True).of_severity("warning")] == ["tied-differ"]


class TestWhatIsSaid:
    def test_of_a_swap_names_whose_values_they_are(self, out: Path, run: Path) -> None:
        swap_two_tensors(out)
        found = {item.tensor: item.message for item in ckpt_cli.verify(out, against=run / "global_step_1").findings}
        assert found[QUERY] == "holds the values of model.layers.1.self_attn.q_proj.weight"

    def test_of_a_source_that_changed_since_is_a_note(self, run: Path, tmp_path: Path) -> None:
        source = Path(shutil.copytree(run / "global_step_1", tmp_path / "global_step_1"))
        out = ckpt_cli.merge(source, tmp_path / "out").outputs[0].output
        assert "changed-source" not in codes(ckpt_cli.verify(out, against=source))
        (source / "model_world_size_2_rank_0.pt").touch()
        result = ckpt_cli.verify(out, against=source)
        assert codes(result) == {"changed-source"}
        assert result.exit_code == 0
        moved = source.rename(tmp_path / "elsewhere")
        assert codes(ckpt_cli.verify(out, against=moved)) == {"changed-source"}

    def test_of_a_source_that_cannot_be_looked_at_is_no_absence(self, run: Path, tmp_path: Path) -> None:
        source = Path(shutil.copytree(run / "global_step_1", tmp_path / "global_step_1"))
        out = ckpt_cli.merge(source, tmp_path / "out").outputs[0].output
        moved = source.rename(tmp_path / "elsewhere")
        source.symlink_to(source)
        found = ckpt_cli.verify(out, against=moved).findings
        assert {item.code for item in found} == {"changed-source"}
        assert all("cannot be accessed" in item.message for item in found)

    def test_of_a_flipped_bit_says_how_many_elements_and_where(self, out: Path, run: Path) -> None:
        change(owner(out, QUERY), lambda held: held[QUERY][5, 7].add_(1.0))
        (item,) = ckpt_cli.verify(out, against=run / "global_step_1").findings
        assert item.message.startswith("1 of 1024 elements differ, by up to 1")
        assert item.message.endswith("first at [5, 7]")
        assert item.numbers["different"] == 1

    def test_without_transformers_says_what_was_not_compared(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt_cli.hub.classes.expected_tensors.installed_version", lambda: None)
        assert str(ckpt_cli.verify(out).names).endswith(
            "are known names of Qwen3MoeForCausalLM (transformers 5.24.0); neither shapes nor counts "
            "were compared: transformers is not installed"
        )
        in_config(out, architectures=["SomethingNew"], model_type="something_new")
        (item,) = [item for item in ckpt_cli.verify(out).findings if item.code == "not-compared"]
        assert item.message == "transformers is not installed"

    def test_nothing_is_imported_from_the_folder_that_is_checked(self, out: Path, tmp_path: Path) -> None:
        for name in ("torch", "transformers", "ckpt_cli", "json"):
            (out / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        program = "import sys; sys.path[0] = sys.argv[1]; from ckpt_cli.cli import main; main(['verify', '.'])"
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment = {**kept, "XDG_CACHE_HOME": str(tmp_path / "empty"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, "-c", program, str(ROOT)], cwd=out, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "45 of 45 tensors" in done.stdout
        assert not (tmp_path / "ran").exists()

    def test_custom_code_is_never_run(self, out: Path) -> None:
        (out / "modeling_x.py").write_text("raise SystemExit('it ran')")
        in_config(out, auto_map={"AutoModel": "modeling_x.X"})
        assert "custom code, which is not run" in str(ckpt_cli.verify(out).findings)


class TestRefusals:
    def test_a_path_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            ckpt_cli.verify(tmp_path / "nothing")

    def test_an_average_equals_no_checkpoint(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.average(run, tmp_path / "mean", everything=True)
        assert ckpt_cli.verify(tmp_path / "mean", full=True).exit_code == 0
        with pytest.raises(UsageError, match="average of 2 checkpoints"):
            ckpt_cli.verify(tmp_path / "mean", against=run)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{}",
            b"[1]",
            b'{"tool": "ckpt", "schema": 1}',
            b'{"tool":"ckpt","schema":1,"options":{},"outputs":{"a":"x"},"side_files":[]}',
        ],
    )
    def test_a_damaged_manifest_is_a_warning(self, out: Path, content: bytes) -> None:
        (out / "ckpt-manifest.json").write_bytes(content)
        assert [item.code for item in ckpt_cli.verify(out).of_severity("warning")] == ["damaged-manifest"]

    @pytest.mark.parametrize(
        "options",
        [
            {"dtype": 5},
            {"names": "x"},
            {"include": "a"},
            {"include": [1]},
            {"lora": "x"},
            {"key_map": "map.json"},
            {"key_map": [5]},
            {"match_base": 1},
            {"lora_alpha": "2"},
        ],
        ids=str,
    )
    def test_a_manifest_with_options_that_are_none(self, out: Path, run: Path, options: dict[str, Any]) -> None:
        content = json.loads((out / "ckpt-manifest.json").read_text())
        content["options"].update(options)
        (out / "ckpt-manifest.json").write_text(json.dumps(content))
        with pytest.raises(CorruptFile, match="option"):
            ckpt_cli.verify(out, against=run)

    def test_a_source_that_changes_meanwhile(self, out: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = Path(shutil.copytree(run / "global_step_1", tmp_path / "global_step_1"))

        def compare(*arguments: Any, **options: Any) -> Any:
            (source / "model_world_size_2_rank_1.pt").touch()
            return compare_with_source(*arguments, **options)

        monkeypatch.setattr("ckpt_cli.commands.verify.compare_with_source", compare)
        with pytest.raises(SourceChanged):
            ckpt_cli.verify(out, against=source)

    def test_a_shape_of_many_dimensions(self, tmp_path: Path) -> None:
        header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 62] * 200_000 + [0], "data_offsets": [0, 0]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert codes(ckpt_cli.verify(tmp_path)) == {"unread-file"}

    def test_a_dtype_of_the_future_proves_nothing(self, tmp_path: Path) -> None:
        header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"123")
        result = ckpt_cli.verify(tmp_path)
        assert codes(result) == {"unread-file"}
        assert result.exit_code == 1

    def test_an_index_into_a_folder_is_followed(self, out: Path) -> None:
        path = owner(out, QUERY)
        (out / "parts").mkdir()
        path.rename(out / "parts" / path.name)
        (out / "ckpt-manifest.json").unlink()
        moved = {path.name: f"parts/{path.name}"}
        in_index(out, lambda c: c.update(weight_map={k: moved.get(v, v) for k, v in c["weight_map"].items()}))
        assert ckpt_cli.verify(out, full=True).exit_code == 0

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("tokenizer.json", '{"model": {"vocab": {"a": 1}}, "added_tokens": [{"content": [], "id": 1}, {"id": {}}]}'),
            (INDEX, '{"metadata": {"total_size": NaN}, "weight_map": {"a": "b.safetensors"}}'),
            (INDEX, '{"metadata": {"total_size": Infinity}, "weight_map": {"a": "model-00001-of-00004.safetensors"}}'),
            ("ckpt-manifest.json", '{"tool":"ckpt","schema":1,"options":{},"outputs":{"a":Infinity},"side_files":[]}'),
            ("ckpt-manifest.json", '{"tool":"ckpt","schema":1,"command":"average","averaged":3,"options":{},"outputs":{},"side_files":[]}'),
            (
                "ckpt-manifest.json",
                '{"tool":"ckpt","schema":1,"command":"merge","base":"\\u0000","options":{},"outputs":{},"side_files":[]}',
            ),
            ("config.json", '{"model_type": "qwen3_moe", "architectures": ["\\ud800"]}'),
        ],
    )
    def test_files_that_lie_are_no_bugs(self, out: Path, run: Path, name: str, content: str) -> None:
        (out / name).write_text(content)
        with contextlib.suppress(CkptError):
            ckpt_cli.verify(out, full=True, against=run / "global_step_1").model_dump_json()

    @pytest.mark.parametrize(
        ("said", "told"),
        [({"schema": 2}, "has format 2"), ({"schema": "x"}, "has no format"), ({"side_files": None}, "has no side_files, as"), ({}, None)],
    )
    def test_a_manifest_of_another_format_is_called_that(self, out: Path, said: dict[str, object], told: str | None) -> None:
        path = out / "ckpt-manifest.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, **said}))
        found = [item.message for item in ckpt_cli.verify(out).findings]
        assert bool(found) is (told is not None)
        assert told is None or (f"the manifest {told}" in found[0] and f"written by ckpt {content['versions']['ckpt']}" in found[0])

    def test_a_config_that_nobody_builds(self, out: Path) -> None:
        in_config(out, num_hidden_layers=10**9)
        assert "config.json says 1,000,000,000 layers" in str(ckpt_cli.verify(out).findings)
        in_config(out, architectures=["SomethingNew"], model_type="something_new")
        assert "num_hidden_layers 1000000000, more than any model has" in str(ckpt_cli.verify(out).findings)

    def test_a_manifest_that_names_files_elsewhere_opens_none(self, out: Path) -> None:
        content = json.loads((out / "ckpt-manifest.json").read_text())
        content["outputs"]["../secret.safetensors"] = 10
        (out / "ckpt-manifest.json").write_text(json.dumps(content))
        (out.parent / "secret.safetensors").write_bytes(b"0123456789")
        assert codes(ckpt_cli.verify(out)) == {"missing-file"}


class TestThePage:
    def test_lists_every_code_as_it_is(self) -> None:
        listed = {row[0].strip("`"): row[1:] for row in table("Codes")}
        assert listed == {code: [kind.severity, kind.level, kind.meaning] for code, kind in KINDS.items()}


def test_errors_are_ours(out: Path) -> None:
    """Whatever is in the JSON files, the worst is an error of ours."""
    for name in ("config.json", INDEX, "ckpt-manifest.json", "tokenizer.json"):
        kept = (out / name).read_bytes()
        for content in (
            b"",
            b"null",
            b"[]",
            b'"x"',
            b"{}",
            b'{"weight_map": {"a": 1}}',
            b"\xff\xfe",
            b'{"model": {"vocab": [1, 2]}, "added_tokens": [1]}',
        ):
            (out / name).write_bytes(content)
            with contextlib.suppress(CkptError):
                ckpt_cli.verify(out)
        (out / name).write_bytes(kept)
    assert ckpt_cli.verify(out).exit_code == 0


@pytest.mark.parametrize("where", ["in the metadata", "in the padding", "in the length"])
@pytest.mark.parametrize("command", ["merge", "average"])
def test_every_byte_of_a_file_is_compared(where: str, command: str, tmp_path: Path) -> None:
    """A header has no tensor to which its bytes belong."""
    run = ROOT / "examples" / "tiny-run"
    if command == "merge":
        ckpt_cli.merge(run, tmp_path / "out", checksum=True)
    else:
        ckpt_cli.average([run], tmp_path / "out", checksum=True, last=2)
    assert not ckpt_cli.verify(tmp_path / "out", full=True).of_severity("error")
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    at = {"in the metadata": data.index(b'"pt"') + 1, "in the padding": end - 1, "in the length": 0}[where]
    data[at] ^= 1 if where == "in the metadata" else 0x29 if where == "in the padding" else 8
    path.write_bytes(data)
    found = ckpt_cli.verify(tmp_path / "out", full=True).of_severity("error")
    assert path.name in {item.file for item in found}
