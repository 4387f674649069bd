"""Words that people type because another tool has them, or because a finger slipped: each works, or names the way out."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.numpy import save_file

import ckpt_cli
from ckpt_cli.cli import _run
from ckpt_cli.cli.words.mistakes import OTHERS
from ckpt_cli.cli.words.synonyms import option_names
from ckpt_cli.errors import UsageError
from tests.cli import ROOT, ckpt

WORK = {
    # What other tools call things, and what it is here.
    "merge run --component ema -o out": "ckpt verify out",
    "merge run --out out": "ckpt verify out",
    "merge run --output-dir out": "ckpt verify out",
    "merge run --output_dir out": "ckpt verify out",
    "merge run --target-dir out": "ckpt verify out",
    "merge run --target_dir=out": "ckpt verify out",
    "merge run out": "ckpt verify out",
    "merge --local_dir run --target_dir out": "ckpt verify out",
    "merge --local-dir=run out": "ckpt verify out",
    "merge run out --max_shard_size 5GB": "ckpt verify out",
    "merge run old -f": "ckpt verify old",
    "merge run old --force": "ckpt verify old",
    "merge run out --dtype BF16": "ckpt verify out",
    "merge run out --dtype F32": "ckpt verify out",
    "merge run out --dtype half": "ckpt verify out",
    "merge run out --dtype float": "ckpt verify out",
    "merge run out --dtype torch.bfloat16": "ckpt verify out",
    "merge run out --torch_dtype float32": "ckpt verify out",
    "merge run out --names HUB": "ckpt verify out",
    "merge run out --step latest": "checkpoint-200",
    "merge run out --step checkpoint-100": "checkpoint-100",
    "merge run out --tag global_step100": "checkpoint-100",
    "merge run --checkpoint 100 -o out": "checkpoint-100",
    "inspect run --checkpoint=100": "checkpoint-100",
    "merge --checkpoint run/checkpoint-100 -o out": "checkpoint-100",
    "ls run": "ckpt merge run --dry-run",
    "info run": "ckpt merge run --dry-run",
    "convert run -o out": "ckpt verify out",
    "consolidate run -o out": "ckpt verify out",
    "unshard run -o out": "ckpt verify out",
    "merge run out --dtype bfloat": "BF16 18,200",
    "merge run out --step last": "checkpoint-200",
    "publish old": "old",
    "help merge": "--match-base",
    "-V": "ckpt ",
    "diff run --steps 100, 200": "differ",
    "diff run --steps 100 200": "differ",
    "average run --all --weights 3 7 -o out": "70.00%",
    "merge run out --max-shard-size 5 GB": "ckpt verify out",
    "merge run --max-shard-size '5 gb' -o out": "ckpt verify out",
    "merge run -o=out": "ckpt verify out",
    "merge run out -j=2": "ckpt verify out",
    "merge run out --jobs auto": "ckpt verify out",
    "merge run/ -o out/": "ckpt verify out",
    "watch run --once --interval 5s --settle 0s": "ckpt verify run_merged/step-200",
    "watch run --once --interval 1h30m --settle 0 min": "ckpt verify run_merged/step-200",
}
FAIL = {
    # Wrong words, and the way out.
    "run": "ckpt detect run",
    "mrege run": "did you mean ckpt merge?",
    "instpect run": "did you mean ckpt inspect?",
    "frobnicate": "ckpt --help",
    "serve run": "ckpt merge RUN -o DIR && vllm serve DIR",
    "push old": "ckpt publish DIR --push-to-hub REPO",
    "stats run": "ckpt inspect PATH --stats",
    "restate run": "ckpt --help",
    "sevre run": "ckpt --help",
    "./nothing": "ckpt detect PATH",
    "--json detect run": "ckpt detect run --json",
    "--type ema merge run": "ckpt merge run --type ema",
    "-q merge run": "ckpt merge run -q",
    "--vresion": "did you mean --version?",
    "merge": "ckpt merge ./run",
    "merge run --stp 1": "did you mean --step?",
    "merge run --dytpe bf16": "did you mean --dtype?",
    "merge run --outptu x": "did you mean --output?",
    "merge run --overwrit": "did you mean --overwrite?",
    "merge run --cheksum": "did you mean --checksum?",
    "merge run --full": "ckpt verify has it",
    "merge run --backend fsdp": "the format is detected",
    "merge run --trust_remote_code": "never run",
    "merge run --safe_serialization": "safetensors is what is written",
    "merge run --bf16": "--dtype bf16",
    "merge run --yes": "--overwrite replaces an output",
    "merge run --dtype": "--dtype DTYPE",
    "merge run --dtype bf17": "did you mean bf16?",
    "merge run --dtype int4": "does not quantise",
    "merge run --dtype fp8": "does not quantise",
    "merge run --dtype float8": "does not quantise",
    "merge run --dtype 4bit": "does not quantise",
    "merge run --dtype NF4": "does not quantise",
    "merge run --dtype float64": "fp32 is the widest",
    "merge run --dtype 16-mixed": "did you mean bf16 or fp16?",
    "merge run --dtype bf16-mixed": "did you mean bf16?",
    "merge run --dtype bf16,fp32": "one dtype for all tensors",
    "diff run --steps 100-200": "--steps 100,200 takes these two",
    "diff run --steps '100 200'": "did you mean --steps 100,200?",
    "average run --steps 100..200 -o out": "--from 100 --to 200",
    "average run --steps all -o out": "--all takes all",
    "average run --steps step-100,step-200 -o out": "did you mean --steps 100,200?",
    "average run --steps 100,200, -o out": "did you mean --steps 100,200?",
    "diff run --steps 1,2,3": "ckpt diff --help",
    "average run --all --weights 1:2 -o out": "did you mean --weights 1,2?",
    "average run --all --weights 1/3,2/3 -o out": "did you mean --weights 1,2?",
    "average run --all --weights 30%,70% -o out": "did you mean --weights 30,70?",
    "average run --all --weights 1,2,3 -o out": "--dry-run lists them",
    "average run --last -o out": "--last N",
    "merge run --jobs 50%": "a whole number, or auto",
    "merge run --jobs 0": "leave --jobs out",
    "merge run --max-shard-size 5gigs": "did you mean 5GB?",
    "merge run --max-shard-size none": "for one file",
    "merge run --max-shard-size 50%": "not a share",
    "merge run --type EMA": "did you mean --type ema?",
    "merge run --type model,ema": "--type both",
    "merge run --type model --type ema": "--type both",
    "merge run --step 100 --step 200": "one step: --step 200",
    "merge run --step 100,200": "ckpt average RUN --steps 100,200 -o DIR",
    "merge run --step 1e2": "did you mean --step 100?",
    "merge run --step first": "ckpt detect RUN lists the steps",
    "merge run --step all": "ckpt watch RUN --once",
    "merge run/checkpoint-100 run/checkpoint-200 -o out": "ckpt average run/checkpoint-100 run/checkpoint-200 -o out",
    "detect run run/checkpoint-100": "for each in run run/checkpoint-100; do ckpt detect",
    "scan run/checkpoint-200/config.json run/checkpoint-200/tokenizer.json": "ckpt scan run/checkpoint-200",
    "merge run --include lm_head": "did you mean --include 'lm_head*'?",
    "merge run --include norm.weight": "did you mean --include '*norm.weight*'?",
    "merge run --include '^model.layers.0.*mlp$'": "did you mean --include",
    "merge run --base run --match-base -o out": "merge it first, and pass the output as --base: ckpt merge run",
    "merge run --base run/checkpoint-200/config.json": "--base run/checkpoint-200",
    "merge run -dtype bf16": "did you mean --dtype?",
    "merge run dtype=bf16": "did you mean --dtype bf16?",
    "merge run \u2014dtype bf16": "two minus signs: --dtype",
    "merge run --rank 0": "all ranks are read",
    "merge run --precision bf16": "--dtype bf16",
    "merge run --iteration 100": "--step N",
    "merge run --tokenizer some/model": "--base BASE",
    "merge run --filter norm": "--include GLOB",
    "merge run --dest out": "-o DIR",
    "diff run,old": "ckpt diff run old",
    "diff run/checkpoint-100..run/checkpoint-200": "ckpt diff run/checkpoint-100 run/checkpoint-200",
    "watch run,old --once": "ckpt watch run old --once",
    "average run/checkpoint-100,run/checkpoint-200": "ckpt average run/checkpoint-100 run/checkpoint-200 -o DIR",
    "average run/checkpoint-100:1 run/checkpoint-200:2 -o x": "ckpt average run/checkpoint-100 run/checkpoint-200 --weights 1,2 -o x",
    "average run/checkpoint-100=.3,run/checkpoint-200=.7": "ckpt average run/checkpoint-100 run/checkpoint-200 --weights .3,.7 -o DIR",
    "average A:1 B:2": "ckpt average A B --weights 1,2 -o DIR",
    "average run/epoch=0-step=1 run/epoch=1-step=2 -o x": "has a similar name",
    "watch run --exec python evaluate.py {output} --once": "ckpt watch run --exec 'python evaluate.py {output}' --once",
    "watch run --exec=python e.py --model {output} --batch 8": "ckpt watch run --exec 'python e.py --model {output} --batch 8'",
    "watch --exec ./e.sh {output} run": "ckpt watch --exec './e.sh {output}' run",
    "watch run --interval fast": "30s, 5m or 1h",
    "watch run --every 1k": "did you mean --every 1000?",
    "merge run --to out": "-o DIR",
    "average run --all --to out": "-o DIR names the folder to write",
    "merge run --ckpt out": "PATH stands alone",
    "verify old --sample 5": "5% is 0.05",
    "merge run --dtype flaot32": "did you mean fp32?",
    "merge run --names hubb": "did you mean hub?",
    "merge run --lora exprot": "did you mean export?",
    "merge run --step ten": "a step such as 100, or latest",
    "merge run --step ''": "unset shell variable",
    "merge run --jobs many": "a whole number",
    "merge run --dry-run=yes": "write --dry-run alone",
    "merge run out -o other": "leave out out, or -o",
    "merge run out third": "PATH, and where to write",
    "merge run --base Some/Modle": "did you mean some/model?",
    "merge run --base other/thing": "hf download other/thing",
    "merge Qwen/Qwen3-8B": "hf download Qwen/Qwen3-8B",
    "merge rnu": "did you mean run?",
    "merge 'run '": "path: 'run '",
    "diff run '\u00a0run'": "path: '\u00a0run'",
    "merge run --step 300": "one of the steps 100, 200",
    "merge run --type emma": "model, ema",
    "merge run old": "--overwrite",
    "merge run --max-shard-size 5": "did you mean 5GB?",
    "average run": "-o, --output DIR",
    "average run -o out --last two": "a whole number",
    "average run -o out --method emma": "did you mean ema?",
    "average run -o out --weights a,b": "numbers separated by commas",
    "verify run old": "--against old",
    "verify run --sample much": "5%",
    "detect run run": "one PATH",
    "inspect run --color alwyas": "did you mean always?",
    "inspect run --progress bar": "auto, plain, json, off",
    "help mrge": "did you mean ckpt merge?",
    "--install-completion tcsh": "bash, zsh, fish",
    "merge run --part 1": "0/8 to 7/8",
    "merge run --part 2/2": "0/2 to 1/2",
    "merge run --part 0/0": "counted from 0",
    "merge run --part first": "0/8 to 7/8",
    "publish run": "--part 0/8 to --part 7/8",
    "publish run -o out": "ckpt publish ./model",
    "publish": "ckpt publish ./model",
    "merge out run": "PATH comes first: ckpt merge run out",
    "merge old run": "choose another -o",
    "merge run run/checkpoint-100/config.json": "choose another -o",
    "show model.norm.weight run": "PATH comes first: ckpt show run model.norm.weight",
    "show run": "ckpt show ./run model.norm.weight",
    "show run norm": "did you mean model.norm.weight?",
    "show run xyzzy": "ckpt inspect run",
    "inspect run model.norm.weight": "for one by its name: ckpt show run model.norm.weight",
    "inspect run '*.norm.*'": "ckpt inspect run --all lists every tensor; for one by its name: ckpt show run NAME",
    "show run '*model.norm*'": "did you mean model.norm.weight?",
    "show run '*norm*'": "it matches 9, such as model.",
    "show run 'model.layers.?.mlp.up_proj.weight'": ".0.mlp.up_proj.weight or model.layers.1.mlp.up_proj.weight?",
    "show run '*xyzzy*'": "ckpt inspect run/checkpoint-200 --all lists them",
    "inspect run --tensor model.norm.weight": "ckpt show PATH TENSOR",
    "diff run": "ckpt diff run OTHER",
    "diff run old third": "A and B",
    "merge run --all": "ckpt inspect and ckpt average have it",
    "merge run --steps 100,200": "did you mean --step?",
    "average run --step 100 -o out": "did you mean --steps?",
    "merge run --world-size 4": "how many ranks",
    "merge --model run": "ckpt merge RUN",
    "detect run/checkpoint-100/config.json": "did you mean run/checkpoint-100?",
    "verify run --against": "--against SRC",
    "merge run --type actor": "model, ema",
    "merge run --key-map net.": "net= takes net. off",
    "merge run --key-map a=b=c": "A=B renames",
    "merge run --checkpoint 300": "one of the steps 100, 200",
    "merge run 100": "did you mean ckpt merge run --step 100?",
    "merge run --step 100 200": "did you mean ckpt merge run --step 200?",
    "merge run pytorch_model.bin": "-o pytorch_model",
    "merge run -o out/model.safetensors": "-o out/model",
    "average run --last 2 -o averaged.pt": "-o averaged",
    "extract-state run -o state.pth": "-o state",
    "merge run --step -1": "leave out --step",
    "merge run/checkpoint-200 --step 100": "checkpoint-100, which is beside it",
    "merge old run/checkpoint-100": "ckpt average old run/checkpoint-100 -o DIR, or ckpt diff old run/checkpoint-100",
    "diff ./run": "ckpt diff run --steps 100,200",
    "average run --last 5": "ckpt average run --last 5 -o DIR",
    "merge run --type optim": "ckpt extract-state run --optimizer",
    "verify run/checkpoint-200 --type optimizer": "ckpt extract-state run/checkpoint-200 --optimizer",
    "inspect run --top 5": "ckpt inspect --help",
    "merge s3:/bucket/run": "write it as s3://bucket/run",
}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and an output of it."""
    folder = tmp_path_factory.mktemp("merged")
    shutil.copytree(ROOT / "examples" / "tiny-run", folder / "run")
    ckpt_cli.merge(folder / "run", folder / "old")
    return folder


@pytest.fixture(autouse=True)
def beside_the_run(merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, an output of it, and a Hub cache with one model."""
    shutil.copytree(merged, tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "old" / "ckpt-manifest.json"
    manifest.write_text(manifest.read_text().replace(str(merged), str(tmp_path)))
    (tmp_path / "hub" / "models--some--model").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def test_there_are_fifty_of_them() -> None:
    assert len(WORK) + len(FAIL) >= 110
    assert len(FAIL) >= 80


@pytest.mark.parametrize("line", WORK)
def test_a_word_of_another_tool_works(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(shlex.split(line)) == 0
    said = "".join(capsys.readouterr())
    assert WORK[line] in said
    assert not any(word in ckpt_help(line) for word in ("--component", "--local", "--force", "--target"))


def ckpt_help(line: str) -> str:
    """The help of the command in a line: it does not show synonyms."""
    from ckpt_cli.cli.app import command_of, root_command

    root = root_command()
    _, command = command_of(shlex.split(line))
    with root.make_context("ckpt", [], resilient_parsing=True) as outer:
        return str(command.get_help(command.make_context("ckpt", [], parent=outer, resilient_parsing=True)))


@pytest.mark.parametrize("line", FAIL)
def test_a_mistake_gets_an_answer_that_names_the_way_out(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = _run(shlex.split(line))
    out, err = capsys.readouterr()
    said = err or "\n".join(error["hint"] or "" for error in json.loads(out)["errors"])
    assert code in (2, 3, 4, 5)
    assert FAIL[line] in said
    assert not any(word in said for word in ("Traceback", "pydantic", "Invalid value", "Value error", "bug", "<str>"))
    if err:
        assert err.startswith("error[")
        assert "  hint: " in err or "  expected: " in err


@pytest.mark.parametrize("word", OTHERS)
def test_what_there_is_instead_of_a_command_is_there(word: str) -> None:
    from ckpt_cli.cli.app import root_command

    commands = root_command().commands
    assert word not in commands
    for name, rest in re.findall(r"\bckpt ([a-z-]+)([^;]*)", OTHERS[word]):
        if name in ("casts", "never", "writes"):
            continue
        if name != "--version":
            assert set(re.findall(r"--?[a-z][a-z-]*", rest.partition("&&")[0])) <= option_names(commands[name])


@pytest.mark.parametrize("line", ["ls run", "convert run out"])
def test_a_command_says_its_own_name_in_json(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([*line.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] in ("detect", "merge")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compnent": "ema"}, "did you mean"),
        ({"component": "ema"}, "did you mean"),
        ({"overwrit": True}, "did you mean overwrite?"),
        ({"dtype": "bf17"}, "did you mean bf16?"),
        ({"match_base": True}, "match_base needs a base"),
    ],
    ids=repr,
)
def test_python_is_answered_in_its_own_words(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        ckpt_cli.merge("run", "new", **options)
    assert said in str(caught.value)
    assert "--" not in str(caught.value)


# -- what other programs wrote ---------------------------------------------------------------------------------------

FOREIGN = {
    "gguf": ({"model-Q4_K_M.gguf": b"GGUF\x03"}, "GGUF"),
    "onnx": ({"model.onnx": b"\x08", "model.onnx_data": b""}, "ONNX"),
    "tensorflow": ({"checkpoint": b"", "model.ckpt-1.index": b"", "model.ckpt-1.data-00000-of-00001": b""}, "TensorFlow"),
    "saved model": ({"saved_model.pb": b"", "variables/variables.index": b""}, "TensorFlow"),
    "keras": ({"tf_model.h5": b"\x89HDF", "config.json": b"{}"}, "Keras"),
    "flax": ({"flax_model.msgpack": b"", "config.json": b"{}"}, "Flax"),
    "orbax": ({"_CHECKPOINT_METADATA": b"{}", "items/manifest.ocdbt": b""}, "orbax"),
    "maxtext": ({"100/items/_METADATA": b"{}", "100/items/manifest.ocdbt": b""}, "MaxText"),
    "paddle": ({"0.metadata": b"", "0_0.distcp": b"", "1_0.distcp": b""}, "Paddle"),
    "paddle weights": ({"model_state.pdparams": b""}, "Paddle"),
    "nanotron": ({"latest.txt": b"10", "10/checkpoint_metadata.json": b"{}", "10/model_config.json": b"{}"}, "nanotron"),
    "fairseq": ({"checkpoint_last-shard0.pt": b"PK", "checkpoint_last-shard1.pt": b"PK"}, "fairseq"),
    "mindspore": ({"rank_0/net-1_10.ckpt": b"\n", "rank_1/net-1_10.ckpt": b"\n"}, "MindSpore"),
    "vllm": ({"model-rank-0-part-0.safetensors": b"", "model-rank-1-part-0.safetensors": b"", "config.json": b"{}"}, "vLLM"),
    "wandb": ({"wandb/run-1/run-abc.wandb": b":W&B"}, "Weights & Biases"),
    "archive": ({"run.tar.gz": b"\x1f\x8b"}, "archive"),
    "NeMo": ({"model.nemo": b"\x1f\x8b"}, "archive of NeMo"),
    "zip": ({"run.zip": b"PK"}, "archive"),
    "numpy": ({"weights.npz": b"PK", "config.json": b"{}"}, "numpy"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_things_of_other_programs_are_named_with_what_to_do(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, name = FOREIGN[kind]
    for place, content in files.items():
        path = tmp_path / "foreign" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for command in ("detect", "merge"):
        assert _run([command, str(tmp_path / "foreign")]) in (3, 4)
        said = "".join(capsys.readouterr())
        assert name in said
        assert "hint: " in said
        assert "the folder holds" not in said


def test_a_file_of_another_program_with_a_suffix_of_torch_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama.ckpt").write_bytes(b"\n\x20\n\x10model.tok_embeddings\x12\x04")
    assert _run(["merge", str(tmp_path / "llama.ckpt")]) == 3
    assert "MindSpore" in capsys.readouterr().err


@pytest.mark.parametrize("names", [["checkpoint_0003"], ["checkpoint-12"], ["checkpoint_0003", "checkpoint_0004"]], ids=" ".join)
@pytest.mark.parametrize("command", ["detect", "merge", "average"])
def test_numbered_files_of_image_trainers_are_no_archives(
    names: list[str], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MoCo and timm call files of torch.save ``.pth.tar``: their folder is answered as one of ``.pth`` is."""
    said = []
    for suffix in (".pth", ".pth.tar"):
        run = tmp_path / "images"
        run.mkdir()
        for name in names:
            torch.save({"state_dict": {"module.fc.weight": torch.ones(2)}}, run / f"{name}{suffix}")
        assert _run([command, str(run), *(["--all", "-o", str(tmp_path / "out")] if command == "average" else [])]) == 3
        said.append(capsys.readouterr().err.replace(".tar", ""))
        shutil.rmtree(run)
    assert said[0] == said[1]
    assert names[-1] in said[1]


def test_a_readable_checkpoint_below_is_suggested_before_anything_foreign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "both" / "logs").mkdir(parents=True)
    (tmp_path / "both" / "logs" / "run-abc.wandb").touch()
    for name in ("model", "other"):  # one alone would be read
        (tmp_path / "both" / name).mkdir()
        save_file({"w": numpy.ones(2)}, tmp_path / "both" / name / "model.safetensors")
    assert _run(["merge", str(tmp_path / "both")]) == 3
    said = capsys.readouterr().err
    assert "hint: 2 checkpoints below: model, other" in said
    assert "wandb" not in said


def test_a_folder_of_lightning_opens_by_its_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name, value in (("epoch=1-step=50.ckpt", 1.0), ("last.ckpt", 2.0)):
        torch.save({"state_dict": {"net.weight": torch.full((2, 2), value)}, "global_step": 50, "epoch": 1}, folder / name)
    result = ckpt_cli.merge(folder, tmp_path / "out")
    assert os.path.basename(result.checkpoint.components[0].path) == "checkpoints"
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert data.endswith(numpy.full(4, 2.0, numpy.float32).tobytes())


def test_an_answer_loads_nothing_heavy() -> None:
    code = "import sys; from ckpt_cli.cli import _run; _run(['merge', 'run', '--json', '--stp', '1']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert {"torch", "numpy", "transformers", "rich"} & set(done.stderr.split()) == set()


@pytest.mark.parametrize(
    "line", ["merge run old", "merge run -o ./old/", "average run --all --output=old", "extract-state run -o taken", "merge run taken"]
)
def test_a_dry_run_shows_its_plan_where_the_output_exists_and_a_command_that_works(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").mkdir()
    Path("taken", "mine").touch()
    assert _run([*line.split(), "--dry-run"]) == 5
    out, err = capsys.readouterr()
    assert "would write" in out
    assert "error[output-exists]" in err
    proposed = next(each for each in err.splitlines() if each.startswith("next: "))
    assert _run(shlex.split(proposed.removeprefix("next: ckpt "))) == 0
    assert os.listdir("taken") == ["mine"]


def test_a_dry_run_tells_of_the_source_before_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    shard = Path("run/checkpoint-200/pytorch_model_fsdp_0/model_world_size_4_rank_1.pt")
    shard.write_bytes(shard.read_bytes()[:100])
    assert _run(["merge", "run", "old", "--step", "200", "--dry-run"]) == 3
    assert "error[corrupt-file]" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["detect run", "inspect run", "detect run --type ema"])
def test_what_is_proposed_after_a_merge_works(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt_cli.merge("run", type="ema" if "ema" in line else None)
    assert _run(line.split()) == 0
    proposed = capsys.readouterr().err.splitlines()[-1]
    assert _run(shlex.split(proposed.removeprefix("next: ckpt "))) == 0


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("verify run/checkpoint-200 --full --type ema", "ckpt inspect run/checkpoint-200 --type ema"),
        ("verify run/checkpoint-200 --type ema", "ckpt verify run/checkpoint-200 --type ema --full"),
        ("scan run", "ckpt detect run"),
        ("scan plain", "ckpt scan plain -v"),
    ],
)
def test_what_is_proposed_keeps_the_options_and_works(line: str, proposed: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain").mkdir()
    Path("plain", "notes.txt").write_text("nothing")
    assert _run(line.split()) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"next: {proposed}"
    assert _run(shlex.split(proposed)[1:]) == 0


@pytest.mark.parametrize(
    ("words", "told", "hint"),
    [
        ("merge run -o --dry-run", "-o needs a value, and --dry-run follows", "for a folder of that name, write -o ./--dry-run"),
        ("merge run -o -q", "-o needs a value, and -q follows", "for a folder of that name, write -o ./-q"),
        ("average run --all --output --jobs=2", "--output needs a value, and --jobs=2 follows", "write --output ./--jobs=2"),
        ("merge run --base --dtype bf16", "--base needs a value, and --dtype follows", "write --base ./--dtype"),
        ("diff run run --plot --html page.html", "--plot needs a value, and --html follows", "for a file of that name, write --plot"),
        ("merge run --jobs --dry-run", "--jobs needs a value, and --dry-run follows", None),
        ("merge run --step --dry-run", "--step needs a value, and --dry-run follows", None),
        ("merge run --weights-name --dry-run", "--weights-name needs a value, and --dry-run follows", None),
        ("average run --weights --all", "--weights needs a value, and --all follows", None),
        ("merge run -o", "-o needs a value", "-o DIR"),
    ],
)
def test_an_option_is_no_value_of_another(words: str, told: str, hint: str | None, tmp_path: Path) -> None:
    """It would name a folder, and what it asks for would not be done. Only a path has another spelling."""
    shutil.copytree(ROOT / "examples" / "tiny-run", tmp_path / "here" / "run")
    done = ckpt(*words.split(), cwd=tmp_path / "here")
    assert done.code == 2
    assert done.err.startswith(f"error[usage]: {told}\n")
    assert "Default" not in done.err
    assert (hint in done.err) if hint is not None else ("./" not in done.err), done.err
    assert os.listdir(tmp_path / "here") == ["run"]
