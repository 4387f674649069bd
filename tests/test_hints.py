"""A hint is followed by whoever reads it: each kind is produced here, its condition checked, and where that can be done it is followed.

``CASES`` has one row per kind: what fails, what the hint says, and what a user does who follows it, which must then work.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.cli import _run
from ckpt_cli.cli.words.hints import fitting, options_by_command
from ckpt_cli.cli.words.scripts import OPTIONS
from ckpt_cli.discover import open as opening
from ckpt_cli.errors import CkptError
from tests import tiny
from tests.cli import ROOT
from tests.formats.test_deepspeed import changed

EXAMPLE = ROOT / "examples" / "tiny-run"
COMMANDS = ("detect", "inspect", "merge", "average", "extract-state", "verify", "diff", "show")
W = {"w": torch.ones(2, 3)}
NAN = torch.tensor([1.0, float("nan")])


@dataclass(frozen=True)
class Place:
    """Where a case builds its files."""

    tmp: Path
    data: Path

    @property
    def out(self) -> Path:
        return self.tmp / "out"

    def run(self) -> Path:
        return self.tmp / "run" if (self.tmp / "run").exists() else Path(shutil.copytree(EXAMPLE, self.tmp / "run"))

    def shard(self, rank: int, step: int = 200) -> Path:
        return self.run() / f"checkpoint-{step}" / "pytorch_model_fsdp_0" / f"model_world_size_4_rank_{rank}.pt"

    def hub(self, name: str, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
        folder = self.tmp / name
        if not folder.exists():
            folder.mkdir(parents=True)
            save_file(tensors if tensors is not None else W, folder / "model.safetensors", {"format": "pt"})
            if config:
                (folder / "config.json").write_text(json.dumps(config))
        return folder

    def steps(self, **models: dict[str, torch.Tensor]) -> Path:
        for name, tensors in models.items():
            self.hub(f"steps/checkpoint-{name[1:]}", tensors)
        return self.tmp / "steps"

    def torch_file(self, name: str, content: Any) -> Path:
        path = self.tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
        return path

    def raw(self, name: str, content: bytes) -> Path:
        path = self.tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def without_rank(self) -> Path:
        self.shard(2).unlink(missing_ok=True)
        return self.run()

    def layout(self, *parts: str) -> Path:
        return self.data.joinpath("layouts", *parts)


Do = Callable[[Place], Any]


@dataclass(frozen=True)
class Case:
    """``hint`` is an expression for the whole hint, None if there must be none; ``follow`` is what a user does then."""

    name: str
    fails: Do
    hint: str | None
    follow: Do | None = None


def merge(path: Path, place: Place, **options: Any) -> Any:
    return ckpt_cli.merge(path, options.pop("output", place.out), **options)


def _whole_module(place: Place) -> Path:
    return place.torch_file("module/model.pt", torch.nn.Linear(2, 3))


def _two_world_sizes(place: Place) -> Path:
    step = place.run() / "checkpoint-200" / "pytorch_model_fsdp_0"
    shutil.copy(place.shard(0), step / "model_world_size_8_rank_0.pt")
    return place.run() / "checkpoint-200"


def _parts_without_index(place: Place, suffix: str) -> Path:
    folder = place.tmp / "parts"
    folder.mkdir(exist_ok=True)
    for i in (1, 2):
        if suffix == "bin":
            torch.save({f"w{i}": torch.ones(2)}, folder / f"pytorch_model-0000{i}-of-00002.bin")
        else:
            save_file({f"w{i}": torch.ones(2)}, folder / f"model-0000{i}-of-00002.safetensors")
    return folder


def _link_as_text(place: Place) -> Path:
    """A template that was a link in a repository, cloned where links are not allowed."""
    folder = place.hub("linked")
    place.raw("linked/chat_template.jinja", b"../templates/chat_template.jinja")
    return folder


def _annexed(place: Place) -> Path:
    folder = place.hub("annexed")
    place.raw("annexed/model.safetensors", b"/annex/objects/SHA256E-s1048576--1234.safetensors\n")
    return folder


def _unfinished_download(place: Place) -> Path:
    folder = place.hub("loaded")
    place.raw("loaded/model.safetensors.aria2", b"\0\1")
    return folder


def _with_missing_part(place: Place) -> Path:
    folder = _parts_without_index(place, "safetensors")
    mapping = {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


def _restored_part(place: Place) -> Path:
    save_file({"w2": torch.ones(2)}, _with_missing_part(place) / "model-00002-of-00002.safetensors")
    return place.tmp / "parts"


def _megatron(place: Place, case: str, name: str | None = None) -> Path:
    """A copy of a run of Megatron; its step under another name."""
    run = place.tmp / "megatron" / case
    if not run.exists():
        shutil.copytree(place.data / "megatron" / case / "checkpoint", run)
    if name is not None:
        (step,) = run.glob("iter_*")
        step.rename(run / name)
    return run


def _without_config(place: Place) -> Path:
    run = _megatron(place, "verl2-qwen3-tp2-pp2")
    shutil.rmtree(run / "global_step_5" / "actor" / "model" / "huggingface", ignore_errors=True)
    return run


def _published_in_parts(place: Place, title: str | None = None) -> None:
    """Two parts, between which the config may change."""
    for number in range(2):
        merge(place.hub("model", model_type="x", title="a"), place, part=f"{number}/2")
        if title is not None:
            (place.tmp / "model" / "config.json").write_text(json.dumps({"model_type": "x", "title": title}))
    ckpt_cli.publish(place.out)


CASES = (
    # -- Megatron
    Case(
        "no config for names of the hub",
        lambda p: merge(_without_config(p), p),
        r"pass --base DIR with the base model; --names native writes them as they are",
        lambda p: (
            merge(_without_config(p), p, base=p.data / "megatron" / "verl2-qwen3-tp2-pp2"),
            merge(_without_config(p), p, names="native", output=p.tmp / "native"),
        ),
    ),
    Case(
        "a step under the name of another iteration",
        lambda p: merge(_megatron(p, "llama-tp2", "iter_0000030"), p),
        r"if all its files are of iteration 20, call it iter_0000020",
        lambda p: merge(_megatron(p, "llama-tp2", "iter_0000020"), p),
    ),
    Case(
        "an optimizer in buckets",
        lambda p: ckpt_cli.extract_state(_megatron(p, "llama-tp2"), p.out, optimizer=True),
        r"leave out --optimizer",
        lambda p: ckpt_cli.extract_state(_megatron(p, "llama-tp2"), p.out),
    ),
    # -- parts
    Case(
        "a config that changed between two parts",
        lambda p: _published_in_parts(p, "b"),
        r"run all parts again, with the files as they are now; then publish again",
        _published_in_parts,
    ),
    # -- paths, steps, components
    Case(
        "a typo",
        lambda p: merge(p.run() / "checkpoint-20", p),
        r"did you mean .*/checkpoint-200\?",
        lambda p: merge(p.run() / "checkpoint-200", p),
    ),
    Case("two as near", lambda p: merge(p.run() / "checkpoint-300", p), r"did you mean .*/checkpoint-[12]00 or .*/checkpoint-[12]00\?"),
    Case(
        "a typo above",
        lambda p: merge(p.run().with_name("Rum") / "checkpoint-200", p),
        r"did you mean .*/run/checkpoint-200\?",
        lambda p: merge(p.run() / "checkpoint-200", p),
    ),
    Case("a base with a typo", lambda p: merge(p.run(), p, base=p.hub("base").with_name("bsae")), r"did you mean .*/base\?"),
    Case("something to scan with a typo", lambda p: ckpt_cli.scan(p.run().with_name("runn")), r"did you mean .*/run\?"),
    Case(
        "the optimizer of accelerate",
        lambda p: merge(p.data / "layouts" / "accelerate" / "run" / "checkpoint-7" / "optimizer_0", p),
        r"the weights are pytorch_model_fsdp_0 beside it: ckpt merge .*/checkpoint-7; .* ckpt extract-state .*/checkpoint-7 --optimizer",
        lambda p: merge(p.data / "layouts" / "accelerate" / "run" / "checkpoint-7", p),
    ),
    Case(
        "a file of an optimizer",
        lambda p: merge(p.data / "layouts" / "accelerate" / "full" / "optimizer.bin", p),
        r"the weights are pytorch_model_fsdp\.bin beside it: ckpt merge .*/full; .* ckpt extract-state .*/full --optimizer",
        lambda p: ckpt_cli.extract_state(p.data / "layouts" / "accelerate" / "full", p.out, optimizer=True),
    ),
    Case(
        "a folder of an optimizer",
        lambda p: ckpt_cli.inspect(p.run() and p.raw("run/checkpoint-200/states/optimizer_rank_0.pt", b"x").parent),
        r"the weights are pytorch_model_fsdp_0 beside it: .*",
    ),
    Case("nothing alike", lambda p: merge(p.run() / "zzzz", p), r"nothing in .*/run has a similar name"),
    Case("no parent", lambda p: merge(p.tmp / "none" / "run", p), r".*/none does not exist either"),
    Case("the folder above", lambda p: merge(p.run().parent, p), r"did you mean .*/run\?", lambda p: merge(p.run(), p)),
    Case(
        "a file of another kind",
        lambda p: ckpt_cli.detect(p.raw("x/y/a.java", b"")),
        r"ckpt knows no file of weights with a name like a\.java",
    ),
    Case(
        "the folder above two",
        lambda p: ckpt_cli.detect(shutil.copytree(p.run(), p.tmp / "two" / "a") and shutil.copytree(p.run(), p.tmp / "two" / "b").parent),
        r"2 checkpoints below: a, b",
        lambda p: merge(p.tmp / "two" / "a", p),
    ),
    Case("other files", lambda p: ckpt_cli.detect(p.raw("x/a.txt", b"").parent), r"the folder holds a\.txt"),
    Case(
        "an unknown component",
        lambda p: merge(p.run(), p, type="bf16"),
        r"pass one of these to --type",
        lambda p: merge(p.run(), p, type="ema"),
    ),
    Case(
        "almost a component",
        lambda p: merge(p.run(), p, type="emma"),
        r"did you mean --type ema\?",
        lambda p: merge(p.run(), p, type="ema"),
    ),
    Case(
        "a step twice", lambda p: merge(_step_twice(p), p, step=7), r"pass the folder itself", lambda p: merge(_step_twice(p) / "step_7", p)
    ),
    Case("--also is the folder", lambda p: ckpt_cli.merge(p.run(), p.out, also=p.run()), r"leave it out", lambda p: merge(p.run(), p)),
    Case(
        "several snapshots of a cached model",
        lambda p: merge(_cached(p), p),
        r"pass the folder of one of them",
        lambda p: merge(_cached(p) / "snapshots" / "one", p),
    ),
    # -- what is missing
    Case(
        "a save that did not finish, another step is whole",
        lambda p: merge(_unfinished(p), p, step=9),
        r"save it again, or pass --step 7, which is whole",
        lambda p: merge(_unfinished(p), p, step=7),
    ),
    Case("a save that did not finish", lambda p: merge(_unfinished(p, alone=True) / "epoch_0_step_9", p), r"save it again"),
    Case(
        "an item of torch_checkpointing that can only be saved again",
        lambda p: merge(_without_resharder(p), p),
        r"save it again with a resharder for this item, or as \.pt files, which say it themselves",
    ),
    Case(
        "a missing rank, another step is whole",
        lambda p: merge(p.without_rank(), p, step=200),
        r"get the file from the node that wrote it, .*--also, or pass --step 100, which is whole",
        lambda p: merge(p.without_rank(), p, step=100),
    ),
    Case(
        "the same by folder",
        lambda p: merge(p.without_rank() / "checkpoint-200", p),
        r"get the file .*, or use .*/checkpoint-100, which is whole",
        lambda p: merge(p.run() / "checkpoint-100", p),
    ),
    Case(
        "a missing rank, no step is whole",
        lambda p: merge(_no_step_whole(p), p),
        r"get the file from the node that wrote it, or pass that node's folder with --also; no step of this run is complete",
    ),
    Case(
        "a step by number, no other is whole",
        lambda p: merge(_no_step_whole(p), p, step=200),
        r"get the file from the node that wrote it, or pass that node's folder with --also",
    ),
    Case(
        "an average names no option that it lacks",
        lambda p: ckpt_cli.average(p.without_rank(), p.out, steps=(100, 200)),
        r"(?!.*--step ).*",
    ),
    Case(
        "a missing part",
        lambda p: merge(_with_missing_part(p), p),
        r"copy the missing files from where the model came from",
        lambda p: merge(_restored_part(p), p),
    ),
    Case("no index", lambda p: merge(_parts_without_index(p, "safetensors"), p), r"copy the index from where the model came from"),
    Case("no index of torch files", lambda p: merge(_parts_without_index(p, "bin"), p), r"copy the index from where the model came from"),
    Case("two world sizes", lambda p: merge(_two_world_sizes(p), p), r"move the files of the older save .*"),
    # -- content
    Case("a whole nn.Module", lambda p: merge(_whole_module(p), p), None),
    Case("no state dict in a rank's file", lambda p: merge(_module_as_rank(p), p), r"use .*/checkpoint-100, which is whole"),
    Case("zeros", lambda p: merge(p.raw("z/model.pt", bytes(4096)), p), r"it begins with zeros: the copy may have been interrupted"),
    Case(
        "a cut file",
        lambda p: merge(_cut(p), p),
        r"the save or the copy may have been interrupted: get the file again from where it was written",
    ),
    Case(
        "a download that did not finish",
        lambda p: merge(_unfinished_download(p), p),
        r"finish it \(aria2c -c, with the same address\), or if the file is known to be whole, delete .*/model\.safetensors\.aria2",
        lambda p: (p.raw("loaded/model.safetensors.aria2", b"").unlink(), merge(p.hub("loaded"), p)),
    ),
    Case(
        "a link that became a text",
        lambda p: merge(_link_as_text(p), p),
        r"put the file that it names in its place",
        lambda p: (p.raw("linked/chat_template.jinja", b"{{ messages }}"), merge(p.hub("linked"), p)),
    ),
    Case("a pointer of git-annex", lambda p: merge(_annexed(p), p), r"run `git annex get` in its repository"),
    Case("a page", lambda p: merge(p.raw("h/model.pt", b"<html></html>" * 10), p), r"if it was downloaded, .*"),
    Case("a gzip file", lambda p: merge(p.raw("g/model.pt", b"\x1f\x8b" + bytes(100)), p), r"unpack it first"),
    Case(
        "a nested entry",
        lambda p: merge(p.torch_file("n/model.pt", {"w": torch.ones(2), "more": {"x": torch.ones(2)}}), p),
        r"save the state dict inside it on its own",
    ),
    Case(
        "two models",
        lambda p: merge(_two_models(p), p),
        r"pass the file itself instead of its folder",
        lambda p: merge(_two_models(p) / "model.pt", p),
    ),
    Case(
        "a flat parameter",
        lambda p: merge(p.torch_file("f/model.pt", {"a._flat_param": torch.ones(4)}), p),
        r"load it once in the training script and save with SHARDED_STATE_DICT",
    ),
    Case("a tensor that no file of an index lists", lambda p: merge(_foreign_tensor(p), p), r"files from two models may be mixed"),
    Case(
        "a partition that DeepSpeed offloaded",
        lambda p: merge(_offloaded(p), p),
        r"the weights were offloaded to NVMe \(offloaded_tensors/\), which is not read: load it with DeepSpeed, .* save_16bit_model",
    ),
    Case(
        "values that only some ranks should have",
        lambda p: ckpt_cli.extract_state(_unequal_states(p), p.out, optimizer=True),
        r"files from two saves may be mixed, or each rank has its own part: .*",
        lambda p: ckpt_cli.extract_state(_unequal_states(p), p.out),
    ),
    Case("a renamed rank file", lambda p: merge(_renamed_rank(p), p), r"it may have been renamed or copied over another one.*"),
    # -- options
    Case("--lora without adapters", lambda p: merge(p.run(), p, lora="export"), r"leave out --lora", lambda p: merge(p.run(), p)),
    Case("--lora-alpha without adapters", lambda p: merge(p.run(), p, lora_alpha=1.0), r"leave it out", lambda p: merge(p.run(), p)),
    Case(
        "--match-base alone",
        lambda p: merge(p.run(), p, match_base=True),
        r"pass --base with the folder of the base model",
        lambda p: merge(p.hub("m"), p, match_base=True, base=p.hub("b")),
    ),
    Case(
        "--drop-extra alone",
        lambda p: merge(p.hub("m"), p, drop_extra=True, base=p.hub("b")),
        r"pass --match-base as well",
        lambda p: merge(p.hub("m"), p, drop_extra=True, match_base=True, base=p.hub("b")),
    ),
    Case(
        "a base without weights",
        lambda p: merge(p.hub("m"), p, match_base=True, base=p.raw("b/config.json", b"{}").parent),
        r"pass the folder of the model with its weights",
    ),
    Case("no such base", lambda p: merge(p.run(), p, base=p.tmp / "none"), r"check the path: nothing is there"),
    Case(
        "a file as base",
        lambda p: merge(p.hub("m"), p, base=p.hub("b") / "model.safetensors"),
        r"pass the folder of the file: --base \S+/b",
        lambda p: merge(p.hub("m"), p, base=p.hub("b")),
    ),
    Case(
        "a Hub ID that is not here",
        lambda p: merge(p.run(), p, base="nobody/nothing"),
        r"download it first, ckpt never does: hf download nobody/nothing",
    ),
    Case(
        "nothing is left",
        lambda p: merge(p.hub("m"), p, include=("nothing*",)),
        r"patterns are matched against whole names, as in '\*\.mlp\.\*'",
        lambda p: merge(p.hub("m"), p, include=("w",)),
    ),
    Case("a key map that leaves nothing", lambda p: merge(p.hub("m"), p, key_map=p.raw("k.json", b'{"w": null}')), None),
    Case(
        "a key map with one name for two",
        lambda p: merge(p.hub("m", {"a": torch.ones(1), "b": torch.ones(1)}), p, key_map=p.raw("k.json", b'{"a": "c", "b": "c"}')),
        r"make the rules distinguish the two",
    ),
    Case(
        "no training state to write",
        lambda p: merge(p.hub("m"), p, with_state=True),
        r"leave out --with-state",
        lambda p: merge(p.hub("m"), p),
    ),
    Case(
        "no training state",
        lambda p: ckpt_cli.extract_state(p.hub("m"), p.out),
        r"pass the folder of the training step that these weights come from",
    ),
    Case(
        "no optimizer",
        lambda p: ckpt_cli.extract_state(_no_optimizer(p), p.out, optimizer=True),
        r"leave out --optimizer",
        lambda p: ckpt_cli.extract_state(_no_optimizer(p), p.out),
    ),
    Case(
        "an optimizer alone",
        lambda p: ckpt_cli.extract_state(_only_optimizer(p), p.out),
        r"pass --optimizer: only optimizer state was found",
        lambda p: ckpt_cli.extract_state(_only_optimizer(p), p.out, optimizer=True),
    ),
    Case(
        "a missing optimizer file",
        lambda p: ckpt_cli.extract_state(_lost_optimizer(p), p.out, optimizer=True),
        r"(.*, or )?leave out --optimizer|copy the optimizer's file .*, or leave out --optimizer",
        lambda p: ckpt_cli.extract_state(_lost_optimizer(p), p.out),
    ),
    Case(
        "another base",
        lambda p: merge(p.hub("m"), p, match_base=True, base=p.hub("b", {"w": torch.ones(5)})),
        r"pass that model as --base",
    ),
    Case(
        "the run lacks tensors",
        lambda p: merge(p.hub("m"), p, match_base=True, base=p.hub("b", {**W, "x": torch.ones(1)})),
        r"pass --fill-missing-from-base .*",
        lambda p: merge(p.hub("m"), p, match_base=True, base=p.hub("b"), fill_missing_from_base=True),
    ),
    Case(
        "the run has more",
        lambda p: merge(p.hub("m", {**W, "x": torch.ones(1)}), p, match_base=True, base=p.hub("b")),
        r"pass --drop-extra to leave them out",
        lambda p: merge(p.hub("m"), p, match_base=True, base=p.hub("b"), drop_extra=True),
    ),
    Case(
        "too large for fp16",
        lambda p: merge(p.hub("m", {"w": torch.full((2,), 1e6)}), p, dtype="fp16"),
        r"use a wider --dtype such as fp32, or pass --allow-overflow .*",
        lambda p: (merge(p.hub("m"), p, dtype="fp32"), merge(p.hub("m"), p, output=p.tmp / "b", dtype="fp16", allow_overflow=True)),
    ),
    Case(
        "too large for float32",
        lambda p: ckpt_cli.average(_large(p), p.out, normalize=False, weights=(2, 2)),
        r"pass --allow-overflow to write infinities",
        lambda p: ckpt_cli.average(_large(p), p.out, normalize=False, weights=(2, 2), allow_overflow=True),
    ),
    # -- outputs
    Case(
        "an output of ckpt is there",
        lambda p: (merge(p.hub("m"), p), merge(p.hub("m"), p)),
        r"pass --overwrite to replace it, or choose another -o",
        lambda p: merge(p.hub("m"), p, overwrite=True),
    ),
    Case(
        "something is there",
        lambda p: merge(p.hub("m"), p, output=p.raw("o/x", b"").parent, overwrite=True),
        r"choose another -o, or move the folder away",
        lambda p: merge(p.hub("m"), p),
    ),
    Case(
        "inside the input",
        lambda p: merge(p.run(), p, output=p.run() / "checkpoint-200" / "x"),
        r"choose another -o",
        lambda p: merge(p.run(), p),
    ),
    Case(
        "a file above",
        lambda p: merge(p.hub("m"), p, output=p.raw("f", b"") / "x"),
        r"choose another place with -o",
        lambda p: merge(p.hub("m"), p),
    ),
    Case(
        "--in-place twice",
        lambda p: (merge(p.run(), p, output=None, in_place=True), merge(p.run(), p, output=None, in_place=True)),
        r"use -o instead of --in-place",
        lambda p: merge(p.run(), p),
    ),
    Case(
        "--in-place beside an adapter's config",
        lambda p: (p.run(), p.raw("run/checkpoint-200/adapter_config.json", b"{}"), merge(p.run(), p, output=None, in_place=True)),
        r"pass -o instead of --in-place",
        lambda p: merge(p.run(), p),
    ),
    Case("--in-place and -o", lambda p: merge(p.run(), p, in_place=True), r"leave out one of them", lambda p: merge(p.run(), p)),
    # -- averages
    Case(
        "no steps chosen",
        lambda p: ckpt_cli.average(p.run(), p.out),
        r"pass --all, .*",
        lambda p: ckpt_cli.average(p.run(), p.out, everything=True),
    ),
    Case(
        "one checkpoint", lambda p: ckpt_cli.average([p.hub("m")], p.out), r"ckpt merge writes a single one", lambda p: merge(p.hub("m"), p)
    ),
    Case("no whole checkpoint", lambda p: ckpt_cli.average(_no_step_whole(p), p.out, everything=True), r"see --help"),
    Case(
        "other tensors",
        lambda p: ckpt_cli.average([p.hub("a", {**W, "x": torch.ones(1)}), p.hub("b")], p.out),
        r"pass --intersect to average the 1 tensor that matches",
        lambda p: ckpt_cli.average([p.hub("a"), p.hub("b")], p.out, intersect=True),
    ),
    Case("nothing in common", lambda p: ckpt_cli.average([p.hub("a", {"x": torch.ones(1)}), p.hub("b")], p.out), None),
    Case(
        "only integers in common",
        lambda p: ckpt_cli.average(
            [
                p.hub("a", {"i": torch.ones(1, dtype=torch.int64), "x": torch.ones(1)}),
                p.hub("b", {"i": torch.ones(1, dtype=torch.int64), "w": torch.ones(1)}),
            ],
            p.out,
        ),
        None,
    ),
    Case(
        "another dtype everywhere",
        lambda p: ckpt_cli.average([p.hub("a", {"w": torch.ones(2, 3).half()}), p.hub("b")], p.out),
        r"merge the others with --dtype first",
        lambda p: ckpt_cli.average([merge(p.hub("a"), p, output=p.tmp / "c", dtype="fp32").outputs[0].output, p.hub("b")], p.out),
    ),
    Case("another shape and dtype", lambda p: ckpt_cli.average([p.hub("a", {"w": torch.ones(3).half()}), p.hub("b")], p.out), None),
    Case(
        "values that are not finite",
        lambda p: ckpt_cli.average([p.hub("a", {"w": NAN}), p.hub("b", {"w": NAN})], p.out),
        r"leave out these checkpoints or tensors \(--exclude\), or pass --allow-non-finite .*",
        lambda p: ckpt_cli.average([p.hub("a"), p.hub("b")], p.out, allow_non_finite=True),
    ),
    Case(
        "weights that cancel",
        lambda p: ckpt_cli.average([p.hub("a"), p.hub("b")], p.out, weights=(1, -1)),
        r"pass --no-normalize .*",
        lambda p: ckpt_cli.average([p.hub("a"), p.hub("b")], p.out, weights=(1, -1), normalize=False),
    ),
    Case(
        "steps that go back",
        lambda p: ckpt_cli.average([p.run() / "checkpoint-200", p.run() / "checkpoint-100"], p.out, method="ema", decay=0.5),
        r"pass them in order",
        lambda p: ckpt_cli.average([p.run() / "checkpoint-100", p.run() / "checkpoint-200"], p.out, method="ema", decay=0.5),
    ),
    Case(
        "an option of another method",
        lambda p: ckpt_cli.average(p.run(), p.out, everything=True, method="uniform", decay=0.5),
        r"pass --method ema, or leave --decay out",
        lambda p: ckpt_cli.average(p.run(), p.out, everything=True, method="ema", decay=0.5),
    ),
    Case(
        "options of two methods",
        lambda p: ckpt_cli.average(p.run(), p.out, everything=True, weights=(1, 2), decay=0.5),
        r"leave --decay out",
        lambda p: ckpt_cli.average(p.run(), p.out, everything=True, weights=(1, 2)),
    ),
    Case(
        "averages of what is no average",
        lambda p: ckpt_cli.average(p.run(), p.out, everything=True, sigma_rel=0.1, source_sigma_rel=0.05),
        r"pass --type ema, or use another method for plain weights",
    ),
    Case(
        "the same without EMA",
        lambda p: ckpt_cli.average([p.hub("s/step_1"), p.hub("s/step_2")], p.out, sigma_rel=0.1, source_sigma_rel=0.05),
        r"use another method for plain weights",
        lambda p: ckpt_cli.average([p.hub("s/step_1"), p.hub("s/step_2")], p.out),
    ),
    Case(
        "integers that differ",
        lambda p: ckpt_cli.average(_counted(p), p.out, strict=True),
        r"without --strict those of .* are used",
        lambda p: ckpt_cli.average(_counted(p), p.out),
    ),
    Case("a step twice in a list", lambda p: ckpt_cli.average(p.run(), p.out, steps=(100, 100)), r"use --weights to give one more weight"),
    Case("steps of one checkpoint", lambda p: ckpt_cli.average(p.hub("m"), p.out, last=2), r"pass the run, or several checkpoints"),
    # -- verify
    Case("a plot without a base", lambda p: ckpt_cli.verify(p.hub("m"), plot=p.tmp / "x.svg"), r"ckpt verify PATH --base DIR --plot FILE"),
    Case(
        "an average against its source",
        lambda p: (ckpt_cli.average(p.run(), p.out, everything=True), ckpt_cli.verify(p.out, against=p.run())),
        r"compare it with another average, or pass --full.*",
        lambda p: ckpt_cli.verify(p.out, full=True),
    ),
    # -- LoRA
    Case(
        "adapters alone",
        lambda p: merge(p.layout("verl-lora", "lora_only"), p, lora="fuse"),
        r"pass --base with the model .*, or --lora export .*",
        lambda p: merge(p.layout("verl-lora", "lora_only"), p, base=p.layout("verl-lora", "base")),
    ),
    Case(
        "adapters against a base",
        lambda p: ckpt_cli.verify(_adapter(p), base=p.layout("verl-lora", "base")),
        r"fuse them first: ckpt merge with --base, then verify the result",
    ),
    Case(
        "factors that are not finite",
        lambda p: merge(_spoiled(p), p, base=p.tmp / "whole"),
        r"merge a step from before that, or pass --allow-overflow to write what comes of them",
        lambda p: merge(p.tmp / "spoiled", p, base=p.tmp / "whole", allow_overflow=True),
    ),
)


def _step_twice(place: Place) -> Path:
    for name in ("step_7", "step-7"):
        place.hub(f"twice/{name}")
    return place.tmp / "twice"


def _no_step_whole(place: Place) -> Path:
    place.without_rank()
    place.shard(1, step=100).unlink(missing_ok=True)
    return place.run()


def _module_as_rank(place: Place) -> Path:
    torch.save(torch.nn.Linear(2, 3), place.shard(0))
    return place.run() / "checkpoint-200"


def _cut(place: Place) -> Path:
    path = place.torch_file("cut/model.pt", {"w": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:-100])
    return path


def _two_models(place: Place) -> Path:
    for name in ("model.pt", "checkpoint.pt"):
        place.torch_file(f"two/{name}", {"w": torch.ones(2)})
    return place.tmp / "two"


def _foreign_tensor(place: Place) -> Path:
    folder = _restored_part(place)
    save_file({"w2": torch.ones(2), "other": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    return folder


def _cached(place: Place) -> Path:
    repository = place.tmp / "models--org--tiny"
    for commit in ("one", "two"):
        place.hub(f"models--org--tiny/snapshots/{commit}")
    return repository


def _unfinished(place: Place, *, alone: bool = False) -> Path:
    run = place.tmp / "automodel"
    for step in (9,) if alone else (7, 9):
        folder = run / f"epoch_0_step_{step}" / "model"
        if not folder.exists():
            dcp.save(W, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True), no_dist=True)
    (run / "epoch_0_step_9" / ".incomplete").touch()
    return run


def _without_resharder(place: Place) -> Path:
    folder = Path(shutil.copytree(place.data / "torch-checkpointing" / "st-fsdp-4" / "run" / "checkpoint" / "step-3", place.tmp / "step-3"))
    metadata = pickle.loads((folder / "metadata.pkl").read_bytes())
    del metadata["metadata"]["model"]
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return folder


def _offloaded(place: Place) -> Path:
    folder = place.tmp / "offloaded"
    shutil.copytree(place.data / "deepspeed" / "z3-bf16-w2" / "run", folder)
    for path in folder.glob("global_step3/*_optim_states.pt"):
        with changed(path) as content:
            content["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0)]
    (folder / "global_step3" / "offloaded_tensors").mkdir()
    return folder


def _unequal_states(place: Place) -> Path:
    folder = place.tmp / "states"
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        torch.save(W, folder / f"model_world_size_2_rank_{rank}.pt")
        optimizer = {"state": {"w": {"exp_avg": torch.full((2, 3), 1.0 + rank)}}, "param_groups": [{"params": ["w"]}]}
        torch.save(optimizer, folder / f"optim_world_size_2_rank_{rank}.pt")
    torch.save({"scheduler": {"last_epoch": 3}}, folder / "extra_state_world_size_2_rank_0.pt")
    torch.save({"scheduler": {"last_epoch": 3}}, folder / "extra_state_world_size_2_rank_1.pt")
    return folder


def _renamed_rank(place: Place) -> Path:
    shutil.copy(place.shard(1), place.shard(2))
    return place.run() / "checkpoint-200"


def _no_optimizer(place: Place) -> Path:
    shutil.rmtree(place.run() / "checkpoint-200" / "optimizer", ignore_errors=True)
    return place.run() / "checkpoint-200"


def _only_optimizer(place: Place) -> Path:
    for name in ("extra_state", "dataloader_state"):
        shutil.rmtree(place.run() / "checkpoint-200" / name, ignore_errors=True)
    return place.run() / "checkpoint-200"


def _lost_optimizer(place: Place) -> Path:
    (place.run() / "checkpoint-200" / "optimizer" / "optimizer_world_size_4_rank_1.pt").unlink(missing_ok=True)
    return place.run() / "checkpoint-200"


def _large(place: Place) -> list[Path]:
    return [place.hub(name, {"w": torch.full((2,), 3e38)}) for name in ("a", "b")]


def _counted(place: Place) -> list[Path]:
    return [place.hub(f"c{i}", {"w": torch.ones(2), "n": torch.tensor([i])}) for i in (1, 2)]


def _spoiled(place: Place) -> Path:
    tiny.folder(place.tmp / "whole", tiny.weights())
    factors = {name: torch.full_like(tensor, float("nan")) for name, tensor in tiny.factors().items()}
    return tiny.adapter(place.tmp / "spoiled", factors, place.tmp / "whole")


def _adapter(place: Place) -> Path:
    merge(place.layout("verl-lora", "lora_only"), place, lora="export", output=place.tmp / "adapter")
    return place.tmp / "adapter"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hint_says_what_helps(case: Case, data: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, data)
    with pytest.raises(CkptError) as caught:
        case.fails(place)
    hint = caught.value.advice
    if case.hint is None:
        assert hint is None
    else:
        assert hint is not None
        assert re.fullmatch(case.hint, hint), hint
    if case.follow is not None:
        case.follow(place)


class TestLinks:
    """What was typed is never proposed, nor what is not there."""

    def test_a_broken_link_is_called_one(self, tmp_path: Path) -> None:
        (tmp_path / "latest").symlink_to("global_step_10")
        with pytest.raises(CkptError) as caught:
            ckpt_cli.detect(tmp_path / "latest")
        assert caught.value.message == "this is a link to global_step_10, which does not exist"
        assert caught.value.advice is None

    def test_nor_is_another_broken_link_proposed(self, tmp_path: Path) -> None:
        (tmp_path / "latest1").symlink_to("nowhere")
        with pytest.raises(CkptError) as caught:
            ckpt_cli.detect(tmp_path / "latest2")
        assert "did you mean" not in str(caught.value.advice)

    @pytest.mark.parametrize("given", ["notes", "./notes", "notes/a.txt"])
    def test_a_dot_is_no_proposal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
        run = Path(shutil.copytree(EXAMPLE / "checkpoint-200", tmp_path / "checkpoint-200"))
        (run / "notes").mkdir()
        (run / "notes" / "a.txt").write_text("")
        monkeypatch.chdir(run)
        with pytest.raises(CkptError) as caught:
            ckpt_cli.detect(given)
        assert caught.value.advice == f"did you mean {run}?"
        assert not re.search(r"mean \.+\?", str(caught.value.advice))


class TestVerify:
    """The last line of `verify` is a hint as well."""

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        run = shutil.copytree(EXAMPLE, tmp_path / "run")
        return Path(ckpt_cli.merge(run, tmp_path / "out", step=200).outputs[0].output)

    def last_line(self, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
        capsys.readouterr()
        assert _run(["verify", *map(str, arguments)]) == 1
        return capsys.readouterr().err.splitlines()[-1]

    def test_a_good_folder_against_a_wrong_source_is_not_overwritten(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wrong, right = out.parent / "run" / "checkpoint-100", out.parent / "run" / "checkpoint-200"
        line = self.last_line(capsys, out, "--against", wrong)
        assert line == f"next: ckpt verify {out} --against {right}"
        assert ckpt_cli.verify(out, against=right).exit_code == 0

    def test_where_nothing_says_what_it_was_made_from(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (out / "ckpt-manifest.json").unlink()
        line = self.last_line(capsys, out, "--against", out.parent / "run" / "checkpoint-100")
        assert line == "hint: check that --against names the source of this folder"

    def test_a_source_that_changed_since(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = out.parent / "run" / "checkpoint-200"
        shutil.rmtree(source)
        shutil.copytree(EXAMPLE / "checkpoint-100", source)
        line = self.last_line(capsys, out, "--against", source)
        assert line.startswith("hint: find out why the source changed")

    def test_a_damaged_folder_is_merged_again(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = out / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
        line = self.last_line(capsys, out, "--against", out.parent / "run" / "checkpoint-200")
        assert line.startswith("next: ckpt merge ")
        assert line.endswith(" --overwrite --verify")
        assert _run(line.removeprefix("next: ckpt ").split()) == 0


class TestOtherSteps:
    """Looking for a step that a hint can name takes no longer for a run of hundreds."""

    @pytest.mark.parametrize(("whole", "looked_into"), [((), 3), ((9,), 1), ((7,), 3), ((6,), 3)])
    def test_few_are_looked_into(self, whole: tuple[int, ...], looked_into: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for step in range(1, 11):
            folder = tmp_path / "run" / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            save_file(W, folder / "model.safetensors", {"format": "pt"})
            if step not in whole:
                (folder / "model.safetensors").write_bytes(b"x" * 100)
        seen: list[str] = []
        describe_place = opening.describe_place

        def counted(found: Any, *rest: Any) -> Any:
            seen.append(found.path.name)
            return describe_place(found, *rest)

        monkeypatch.setattr(opening, "describe_place", counted)
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out", step=10)
        assert len(seen) == 1 + looked_into
        proposed = [step for step in whole if step >= 7]
        assert ("which is whole" in str(caught.value.hint)) == bool(proposed)
        for step in proposed:
            assert str(caught.value.hint).endswith(f"pass --step {step}, which is whole")
            ckpt_cli.merge(tmp_path / "run", tmp_path / "out", step=step)

    def test_those_that_lack_files_by_name_are_not_among_them(self, tmp_path: Path) -> None:
        run = Path(shutil.copytree(EXAMPLE, tmp_path / "run"))
        for step in range(101, 120):
            folder = Path(shutil.copytree(run / "checkpoint-200", run / f"checkpoint-{step}"))
            (folder / "pytorch_model_fsdp_0" / "model_world_size_4_rank_1.pt").unlink()
        (run / "checkpoint-200" / "pytorch_model_fsdp_0" / "model_world_size_4_rank_2.pt").unlink()
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(run, tmp_path / "out", step=200)
        assert str(caught.value.hint).endswith("pass --step 100, which is whole")


class TestOptions:
    """Errors of reading are shared: a hint names no option that the command lacks."""

    def test_a_hint_with_foreign_options_names_the_command(self) -> None:
        assert fitting("pass --base with the folder", "merge") == "pass --base with the folder"
        assert fitting("pass --base with the folder", "detect") == "ckpt merge has --base for this: pass --base with the folder"
        assert str(fitting("pass --base with the folder", "verify")).startswith("ckpt merge has --base")
        assert fitting("pass --base with the folder", "extract-state") is None
        assert fitting("choose another disk with -o, or pass --dtype bf16", "extract-state") == "choose another disk with -o"
        assert fitting("ckpt verify PATH --base DIR --plot FILE", "verify") == "ckpt verify PATH --base DIR --plot FILE"
        assert fitting("see --help", "detect") == "see --help"
        for command in COMMANDS:
            for program in ("aws s3 cp --recursive s3://b/x DIR", "hf download org/name --local-dir name", "rsync --whole-file a b"):
                assert fitting(program, command) == program
        assert fitting(None, "merge") is None

    def test_of_adapters_alone_detect_and_inspect_say_what_merge_takes(
        self, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert _run(["average", *[str(data / "layouts" / "verl-lora" / "lora_only")] * 2, "-o", str(tmp_path / "o"), "--json"]) != 0
        hint = json.loads(capsys.readouterr().out)["errors"][0]["hint"]
        assert hint is None or "--lora" not in hint or hint.startswith("ckpt merge has ")

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_is_known(self, command: str) -> None:
        assert {"--json", "--strict", "--quiet", "-q"} <= options_by_command()[command]


# -- all hints of the package ----------------------------------------------------------------------------------------


def texts(node: ast.expr) -> Iterator[str]:
    """The texts that an expression can be; what is put in is "{}"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)


def all_hints() -> Iterator[tuple[str, str]]:
    """(module, text) of everything that is given as a hint, directly or by a variable called so."""
    for path in sorted((ROOT / "ckpt_cli").rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "hint" in source else ():
            found: list[ast.expr] = []
            if (isinstance(node, ast.keyword) and node.arg == "hint") or (
                isinstance(node, ast.Assign)
                and any(getattr(target, "id", getattr(target, "attr", "")) == "hint" for target in node.targets)
            ):
                found = [node.value]
            yield from ((path.stem, text) for expression in found for text in texts(expression))


HINTS = sorted(set(all_hints()))


def test_there_are_hints_to_look_at() -> None:
    assert len(HINTS) > 100


@pytest.mark.parametrize(("module", "text"), HINTS, ids=lambda value: value[:60])
class TestEveryHint:
    def test_names_only_options_that_exist(self, module: str, text: str) -> None:
        known = {option for command in COMMANDS for option in options_by_command()[command]} | {"--help", "--debug", *OPTIONS, "--head"}
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known

    def test_claims_nothing_that_nobody_checked(self, module: str, text: str) -> None:
        """What happened to files elsewhere, and that an older step would help, is not known where an error is raised."""
        assert not re.search(r"\b(was interrupted|were mixed|was renamed|are of different|use an older step)\b", text), (module, text)

    def test_is_one_short_line(self, module: str, text: str) -> None:
        assert "\n" not in text
        assert text == text.strip()
        assert len(text) <= 140
        assert not text.endswith(".")


@pytest.mark.parametrize("way", ["nodes", "also"])
def test_the_next_command_after_a_merge_of_several_nodes_works(tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str) -> None:
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        folder = tmp_path / "nodes" / node / "checkpoint-200" / "pytorch_model_fsdp_0"
        folder.mkdir(parents=True)
        for rank in ranks:
            shutil.copy(EXAMPLE / "checkpoint-200" / folder.name / f"model_world_size_4_rank_{rank}.pt", folder)
    nodes = tmp_path / "nodes"
    given = [nodes] if way == "nodes" else [nodes / "a", "--also", nodes / "b"]
    assert _run(["merge", *map(str, given), "-o", str(tmp_path / "out")]) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("next: ckpt verify ")
    assert _run(line.removeprefix("next: ckpt ").split()) == 0
