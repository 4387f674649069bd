"""The command line as people and scripts meet it: exit codes, streams, errors with hints, JSON, help that works."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli import ROOT, Outcome, ckpt_fork
from tests.cli import ckpt as ckpt_alone
from tests.cli import ckpt_fork as ckpt

EXAMPLE = ROOT / "examples" / "tiny-run"
NUMBERS = re.compile(r"[0-9.]+ [KMG]?B(/s| free)|[0-9.]+ s\b")
COMMANDS = ("detect", "inspect", "merge", "average", "extract-state", "verify")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the tiny run with two steps, EMA included."""
    run = tmp_path / "run"
    shutil.copytree(EXAMPLE, run)
    return run


def shard(run: Path, rank: int, step: int = 200, folder: str = "pytorch_model_fsdp_0") -> Path:
    return run / f"checkpoint-{step}" / folder / f"model_world_size_4_rank_{rank}.pt"


def assert_told(outcome: Outcome, code: int, name: str, *parts: str) -> None:
    """One error of ours on stderr: its code, these parts, a hint, no traceback, nothing on stdout."""
    assert outcome.code == code, outcome
    assert outcome.err.count("error[") == 1
    assert f"error[{name}]: " in outcome.err
    for part in parts:
        assert part in outcome.err
    assert "hint: " in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize(
    "words",
    [
        "detect RUN",
        "inspect RUN --json",
        "merge RUN -q -o out",
        "average RUN --all -q -o out",
        "extract-state RUN --dry-run",
        "verify RUN",
        "diff RUN --steps 100,200",
        "show RUN model.norm.weight",
        "scan RUN",
        "env",
        "merge",
        "merge RUN --dtpe bf16",
        "detect ./nothing",
    ],
)
def test_a_process_of_its_own_says_what_a_fork_says(words: str, tmp_path: Path) -> None:
    """Most tests run a command in a fork of a process that has loaded the modules: see `tests.cli.ckpt_fork`."""
    outcomes = []  # in folders whose names are equally long
    for name, run in (("alone", ckpt_alone), ("forks", ckpt_fork)):
        (tmp_path / name).mkdir()
        outcomes.append(run(*words.replace("RUN", str(EXAMPLE)).split(), cwd=tmp_path / name))
    alone, forked = map(without_sizes, outcomes)
    assert alone == forked
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")} for name in ("alone", "forks")]
    assert files[0] == files[1]
    assert bool(files[0]) == ("-o" in words)


def without_sizes(outcome: Outcome) -> Outcome:
    """Without what differs from one run to the next: its folder, the room on the disk, seconds and rates."""
    out, err = (NUMBERS.sub("", text.replace("/alone", "/forks")) for text in (outcome.out, outcome.err))
    return replace(outcome, out=out, err=err)


class TestExitCodesAndErrors:
    def test_done_is_0_and_the_last_line_says_what_to_do_next(self, run: Path) -> None:
        for arguments in (["detect", run], ["inspect", run], ["merge", run, "--dry-run"], ["merge", run]):
            outcome = ckpt(*arguments)
            assert outcome.code == 0, outcome
            assert outcome.err.splitlines()[-1].startswith("next: ")

    def test_the_next_command_that_is_printed_works(self, run: Path) -> None:
        outcome, commands = ckpt("detect", run), []
        for _ in range(5):
            line = outcome.err.splitlines()[-1].removeprefix("next: ")
            commands.append(line.split()[:2])
            outcome = ckpt(*shlex.split(line)[1:])
            assert outcome.code == 0, outcome
        assert [command for _, command in commands] == ["merge", "merge", "verify", "inspect", "verify"]

    def test_a_dry_run_says_how_to_do_it_for_real(self, run: Path, tmp_path: Path) -> None:
        for arguments in (["merge", run, "--dtype", "bf16"], ["average", run, "--all", "-o", tmp_path / "a b"], ["extract-state", run]):
            line = ckpt(*arguments, "--dry-run").err.splitlines()[-1]
            assert line == f"next: ckpt {shlex.join(map(str, arguments))}"

    def test_a_missing_rank_is_4_with_the_file_and_the_newest_complete_step(self, run: Path) -> None:
        shard(run, 2).unlink()
        assert_told(ckpt("merge", run, "--step", "200"), 4, "missing-shard", "rank 2 of 4 is missing", shard(run, 2).name, "--step 100")
        assert not (run / "checkpoint-200_merged").exists()

    def test_without_a_step_the_incomplete_newest_one_is_named_and_skipped(self, run: Path) -> None:
        shard(run, 2).unlink()
        outcome = ckpt("merge", run)
        assert outcome.code == 0
        assert "warning: checkpoint-200 is skipped: rank 2 of 4 is missing" in outcome.err
        assert (run / "checkpoint-100_merged" / "model.safetensors").exists()

    def test_detect_of_an_incomplete_checkpoint_is_4_and_still_shows_it(self, run: Path) -> None:
        shard(run, 0).unlink()
        outcome = ckpt("detect", run / "checkpoint-200")
        assert outcome.code == 4
        assert "rank 0 of 4 is missing" in outcome.out

    def test_a_truncated_shard_is_3_and_named(self, run: Path) -> None:
        path = shard(run, 1)
        path.write_bytes(path.read_bytes()[:-100])
        assert_told(ckpt("merge", run, "--step", "200"), 3, "corrupt-file", path.name, "cut off")

    def test_two_world_sizes_are_4(self, run: Path) -> None:
        shutil.copy(shard(run, 0), shard(run, 0).with_name("model_world_size_8_rank_0.pt"))
        assert_told(ckpt("merge", run, "--step", "200"), 4, "mixed-world-sizes", "4 (4 files) and 8 (1 file)")

    def test_a_wrong_path_is_3_with_the_right_one(self, run: Path) -> None:
        assert_told(ckpt("merge", run.with_name("rum")), 3, "not-found", f"did you mean {run}")

    def test_a_folder_without_a_checkpoint_is_3(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("hello")
        assert_told(ckpt("merge", tmp_path), 3, "not-recognised", "notes.txt")

    def test_an_unknown_step_lists_the_steps(self, run: Path) -> None:
        outcome = ckpt("merge", run, "--step", "7")
        assert (outcome.code, "expected: one of the steps 100, 200" in outcome.err) == (3, True)

    def test_an_unknown_component_lists_the_components(self, run: Path) -> None:
        assert_told(ckpt("merge", run, "--type", "critic"), 3, "not-found", "one of: model, ema")

    def test_an_existing_output_is_5_and_stays(self, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "precious.txt").write_text("mine")
        for extra in ([], ["--overwrite"]):
            assert_told(ckpt("merge", run, "-o", out, *extra), 5, "output-exists")
            assert [path.name for path in out.iterdir()] == ["precious.txt"]

    def test_overwrite_replaces_what_ckpt_wrote(self, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert ckpt("merge", run, "-o", out).code == 0
        assert_told(ckpt("merge", run, "-o", out), 5, "output-exists", "--overwrite")
        assert ckpt("merge", run, "-o", out, "--overwrite", "--dtype", "bf16").code == 0
        assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"

    @pytest.mark.parametrize("where", ["checkpoint-200", "checkpoint-200/merged", "."])
    def test_an_output_in_or_around_the_source_is_5(self, run: Path, where: str) -> None:
        assert_told(ckpt("merge", run / "checkpoint-200", "-o", run / where), 5, "output-inside-source")

    def test_an_output_inside_the_base_is_5(self, run: Path, tmp_path: Path) -> None:
        base = tmp_path / "base"
        base.mkdir()
        (base / "config.json").write_text('{"model_type": "own"}')
        assert_told(ckpt("merge", run, "--base", base, "-o", base / "out"), 5, "output-inside-source")
        assert sorted(path.name for path in base.iterdir()) == ["config.json"]

    def test_a_usage_error_is_2_and_says_where_help_is(self, run: Path) -> None:
        for arguments in (["merge", run, "--stp", "1"], ["merge"], ["mrege", run], ["merge", run, "--step", "x"]):
            outcome = ckpt(*arguments)
            assert outcome.code == 2
            assert "error[usage]: " in outcome.err
            assert "  hint: " in outcome.err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--dtype", "int8"],
            ["--max-shard-size", "much"],
            ["--weights-name", "../x.safetensors"],
            ["--jobs", "0"],
            ["--in-place", "-o", "x"],
        ],
    )
    def test_option_values_that_make_no_sense_are_2(self, run: Path, arguments: list[str]) -> None:
        outcome = ckpt("merge", run, *arguments)
        assert outcome.code == 2, outcome
        assert "error[usage]: " in outcome.err

    def test_too_large_values_for_fp16_are_1_and_nothing_is_left(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        folder = tmp_path / "global_step_1" / "actor"
        folder.mkdir(parents=True)
        torch.save({"w": torch.tensor([1.0, 70000.0, -1e9])}, folder / "model_world_size_1_rank_0.pt")
        assert_told(ckpt("merge", tmp_path, "--dtype", "fp16"), 1, "cast-overflow", "2 finite values", "--allow-overflow")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1"]
        outcome = ckpt("merge", tmp_path, "--dtype", "fp16", "--allow-overflow")
        assert outcome.code == 0
        assert "2 finite values became infinite" in outcome.err

    def test_every_failure_leaves_nothing_behind(self, run: Path) -> None:
        shard(run, 3).write_bytes(b"")
        before = sorted(path.name for path in run.iterdir())
        assert ckpt("merge", run, "--step", "200").code == 3
        assert sorted(path.name for path in run.iterdir()) == before

    def test_a_bug_of_ours_is_one_line_unless_debug(self, run: Path) -> None:
        program = (
            "import ckpt_cli.commands.merge as m\n"
            "def broken(*a, **k): raise ZeroDivisionError('oops')\n"
            "m.merge = broken\n"
            "from ckpt_cli.cli import main\n"
            f"main(['merge', {str(run)!r}, *EXTRA])\n"
        )
        for extra, traceback in (("[]", False), ("['--debug']", True)):
            command = [sys.executable, "-c", program.replace("*EXTRA", f"*{extra}")]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
            assert ("Traceback" in done.stderr) is traceback
            assert done.returncode == (1 if traceback else 70)


class TestOutput:
    def test_names_from_files_are_neither_markup_nor_control_characters(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        names = ["[red]x[/red]", "a[/foo].weight", "esc\x1b[31m", "bell\x07", "bidi\u202e", "new\nline", "[link=http://x]y"]
        torch.save({name: torch.ones(2) for name in names}, tmp_path / "model_world_size_1_rank_0.pt")
        for arguments in (["inspect", tmp_path, "--all"], ["inspect", tmp_path, "-q"]):
            outcome = ckpt(*arguments)
            assert outcome.code == 0, outcome
            assert all(character.isprintable() or character == "\n" for character in outcome.out)
            assert "[red]x[/red]" in outcome.out
            assert "a[/foo].weight" in outcome.out
            assert "esc\\x1b[31m" in outcome.out
            assert "new\\nline" in outcome.out

    def test_a_pipe_gets_no_colour_no_cut_and_no_trailing_spaces(self, run: Path) -> None:
        outcome = ckpt("inspect", run)
        assert "\x1b" not in outcome.out + outcome.err
        assert "…" not in outcome.out
        assert not re.search(r" $", outcome.out, re.MULTILINE)

    def test_colour_follows_the_option_then_no_color_then_force_color(self, run: Path) -> None:
        assert "\x1b[" in ckpt("inspect", run, "--color", "always", NO_COLOR="1").out
        assert "\x1b[" in ckpt("inspect", run, FORCE_COLOR="1").out
        assert "\x1b[" not in ckpt("inspect", run, FORCE_COLOR="1", NO_COLOR="1").out
        assert "\x1b[" not in ckpt("inspect", run, "--color", "never", FORCE_COLOR="1").out

    def test_quiet_prints_only_the_answer(self, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        outcome = ckpt("merge", run, "-o", out, "-q")
        assert outcome.out == f"{out}\n"
        assert all(line.startswith("warning: ") for line in outcome.err.splitlines())
        assert ckpt("merge", run, "-o", out, "-qq", "--overwrite").err == ""
        assert ckpt("inspect", out, "-q").out.splitlines()[0].startswith("model.")

    def test_stdout_is_data_and_stderr_is_talk(self, run: Path) -> None:
        shard(run, 2).unlink()
        outcome = ckpt("inspect", run)
        assert "warning" not in outcome.out
        assert "next:" not in outcome.out
        assert "warning: checkpoint-200 is skipped" in outcome.err

    def test_a_reader_that_goes_away_is_no_error_message(self, run: Path) -> None:
        command = f"{sys.executable} -m ckpt_cli inspect {run} --all | head -n 1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.stdout.startswith("checkpoint")
        assert "Traceback" not in done.stderr

    def test_a_full_stdout_is_an_error(self, run: Path) -> None:
        command = f"{sys.executable} -m ckpt_cli inspect {run} > /dev/full"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 5
        assert "Traceback" not in done.stderr

    def test_an_ascii_locale_works(self, run: Path) -> None:
        outcome = ckpt("inspect", run, LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
        assert outcome.code == 0, outcome

    def test_progress_as_json_lines_adds_up(self, run: Path, tmp_path: Path) -> None:
        outcome = ckpt("merge", run, "-o", tmp_path / "out", "--progress", "json")
        assert outcome.code == 0
        events = [json.loads(line) for line in outcome.err.splitlines() if line.startswith("{")]
        events = [event for event in events if event["event"] != "waiting"]  # transformers may be asked for the first time
        assert [event["event"] for event in events if event["event"] not in ("progress", "flushing", "reading")] == ["start", "summary"]
        assert events[0]["event"] == "start"
        assert events[-1]["done"] == events[-1]["total"] == events[0]["total"] > 0


class TestJson:
    KEYS = frozenset({"schema", "command", "status", "exit_code", "data", "errors"})

    @pytest.mark.parametrize("command", COMMANDS)
    def test_success_is_one_document_with_the_envelope(self, run: Path, tmp_path: Path, command: str) -> None:
        extra = {"merge": ["-o", tmp_path / "out"], "average": ["--all", "-o", tmp_path / "out"]}.get(command, [])
        outcome = ckpt(command, run, "--json", *extra)
        document = json.loads(outcome.out)
        assert set(document) == self.KEYS
        assert (document["schema"], document["command"], document["status"], document["exit_code"]) == (1, command, "success", 0)
        assert document["errors"] == []
        if command == "verify":
            assert document["data"]["tensors"] == 24
        else:
            assert document["data"].get("checkpoint", document["data"])["step"] == 200
        assert outcome.err == ""

    def test_failure_is_the_same_document(self, run: Path) -> None:
        outcome = ckpt("merge", run, "--step", "1", "--json")
        document = json.loads(outcome.out)
        assert set(document) == self.KEYS
        assert (document["status"], document["exit_code"], document["data"]) == ("error", 3, None)
        assert set(document["errors"][0]) == {"code", "message", "hint", "path", "tensor", "expected", "details"}
        assert document["errors"][0]["code"] == "not-found"

    def test_a_usage_error_is_the_same_document(self) -> None:
        outcome = ckpt("merge", "--json")
        document = json.loads(outcome.out)
        assert set(document) == self.KEYS
        assert (document["exit_code"], document["errors"][0]["code"], document["command"]) == (2, "usage", "merge")

    def test_inspect_lists_every_tensor_with_its_layout(self, run: Path) -> None:
        data = json.loads(ckpt("inspect", run, "--json").out)["data"]
        tensors = {tensor["name"]: tensor for tensor in data["checkpoint"]["components"][0]["tensors"]}
        embedding = tensors["model.embed_tokens.weight"]
        assert (embedding["shape"], embedding["dtype"], embedding["layout"]) == ([320, 24], "F32", "Shard(0) x4")
        assert (embedding["elements"], embedding["bytes"], embedding["pieces"]) == (7680, 30720, 4)
        assert tensors["lm_head.weight"]["alias_of"] == "model.embed_tokens.weight"

    def test_a_file_name_that_is_no_utf8_is_escaped(self, run: Path, tmp_path: Path) -> None:
        hostile = os.fsencode(tmp_path) + b"/r\xff"
        os.rename(os.fsencode(run), hostile)
        outcome = ckpt("merge", os.fsdecode(hostile), "--step", "1", "--json")
        assert json.loads(outcome.out)["exit_code"] == 3
        assert ckpt("merge", os.fsdecode(hostile)).code == 0


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_the_examples_in_the_help_work(self, run: Path, command: str) -> None:
        text = ckpt(command, "--help").out
        examples = [line.strip() for line in text.split("Examples:")[1].splitlines() if line.strip().startswith("ckpt ")]
        assert len(examples) >= 2
        if command == "verify":
            for folder in ("merged", "base"):
                assert ckpt("merge", run, "-o", folder, cwd=run.parent).code == 0
        for example in examples:
            words, _, redirected = example.partition(" > ")
            outcome = ckpt(*words.split()[1:], cwd=run.parent, HF_TOKEN="hf_token", HF_HUB_OFFLINE="0")
            assert outcome.code == 0, (example, outcome)
            if redirected:
                (run.parent / redirected).write_text(outcome.out)

    def test_every_option_has_help(self) -> None:
        from ckpt_cli.cli.app import LISTED

        assert set(COMMANDS) <= LISTED.keys()
        assert all(command.help for command in LISTED.values())
        for command in COMMANDS:
            options = re.findall(r"^  (-[\w, -]+)(?: [A-Z<{].*?)?  +(\S.*)?$", ckpt(command, "--help").out, re.MULTILINE)
            assert len(options) >= 8

    def test_without_a_command_the_first_steps_are_printed(self) -> None:
        outcome = ckpt()
        assert outcome.code == 0
        assert all(f"ckpt {words} " in outcome.out for words in ("detect ./run", "merge ./run -o ./merged", "verify ./merged"))
        assert "ckpt help" in outcome.out

    @pytest.mark.parametrize("width", [60, 80, 100, 120])
    def test_help_is_as_wide_as_the_terminal(self, width: int) -> None:
        for command in ("", *COMMANDS):
            lines = ckpt(*command.split(), "--help", COLUMNS=str(width)).out.splitlines()
            assert max(map(len, lines)) <= max(width, 75)  # examples are commands to copy: they are not wrapped
            assert not re.search(r"[{}]|<str>|\.\.\.$", re.sub(r"A,B,\.\.\.|\{(step|run|output)\}", "", "\n".join(lines)))

    def test_every_command_is_summed_up_in_a_line(self) -> None:
        lines = [line.split(maxsplit=1) for line in ckpt("--help", COLUMNS="80").out.splitlines() if line.startswith("  ")]
        summaries = dict(line for line in lines if not line[0].startswith(("-", "finding,", "or")))
        assert set(COMMANDS) <= set(summaries)
        assert max(map(len, summaries.values())) <= 55

    def test_help_is_a_command_too(self) -> None:
        assert ckpt("help").out == ckpt("--help").out
        for command in COMMANDS:
            assert ckpt("help", command).out == ckpt(command, "--help").out
        assert "did you mean ckpt merge?" in ckpt("help", "merg").err

    def test_the_most_common_options_of_a_merge_come_first(self) -> None:
        panels = re.findall(r"^(\w[\w, ]+):\n((?:  .*\n)+)", ckpt("merge", "--help").out, re.MULTILINE)
        assert [name for name, _ in panels] == [
            *("Most common", "What to read", "What to write", "With a base", "LoRA and EMA", "Checks"),
            *("To the Hub", "On several machines", "Output", "Examples"),
        ]
        assert len(re.findall(r"^  -", panels[0][1], re.MULTILINE)) == 9

    def test_start_up_takes_hardly_longer_than_a_minimal_typer_app(self, tmp_path: Path) -> None:
        (tmp_path / "least.py").write_text("import typer\napp = typer.Typer()\n@app.command()\ndef run(path: str) -> None: ...\napp()\n")
        code = "import sys; from ckpt_cli.cli import main; main(['--help'])"

        def seconds(*arguments: str) -> float:
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
            done = resource.getrusage(resource.RUSAGE_CHILDREN)
            return done.ru_utime + done.ru_stime - usage.ru_utime - usage.ru_stime

        least = min(seconds(str(tmp_path / "least.py"), "--help") for _ in range(5))
        assert min(seconds("-c", code) for _ in range(5)) <= 1.3 * least

    def test_version(self) -> None:
        from ckpt_cli import __version__

        assert ckpt("--version").out == ckpt("-V").out == f"ckpt {__version__}\n"

    def test_completions_and_man_pages_are_what_the_program_generates(self) -> None:
        sys.path.insert(0, str(ROOT / "completions"))
        try:
            import generate  # type: ignore[import-not-found]
        finally:
            sys.path.pop(0)
        for name, shell in generate.FILES.items():
            assert (ROOT / "completions" / name).read_text() == ckpt("--show-completion", shell).out
        pages = generate.pages()
        assert {path.name: path.read_text() for path in (ROOT / "docs" / "man").iterdir()} == pages
        assert set(pages) >= {"ckpt.1", *(f"ckpt-{command}.1" for command in COMMANDS)}
        assert all("\\-\\-json" in text for name, text in pages.items() if name != "ckpt.1")
        assert not any(re.search(r"^['.](?!TH|SH|SS|TP|B |PP|nf|fi)", text, re.MULTILINE) for text in pages.values())


class TestMergeOptions:
    def test_in_place_adds_files_and_replaces_none(self, run: Path) -> None:
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert ckpt("merge", run, "--in-place").code == 0
        assert (run / "checkpoint-200" / "model.safetensors").exists()
        assert (run / "checkpoint-200" / "ckpt-manifest.json").exists()
        assert all(path.read_bytes() == content for path, content in before.items())
        assert_told(ckpt("merge", run, "--in-place"), 5, "output-exists", "model.safetensors")

    def test_include_and_exclude_choose_tensors(self, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert ckpt("merge", run, "-o", out, "--include", "model.layers.0.*", "--exclude", "*norm*").code == 0
        names = ckpt("inspect", out, "-q").out.split()
        assert names
        assert all(name.startswith("model.layers.0.") and "norm" not in name for name in names)
        assert_told(ckpt("merge", run, "-o", tmp_path / "none", "--include", "nothing"), 3, "not-found", "no tensor is left")

    def test_several_components_get_a_folder_each(self, run: Path, tmp_path: Path) -> None:
        assert ckpt("merge", run, "--type", "both", "-o", tmp_path / "out").code == 0
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["ema", "model"]
        assert ckpt("merge", run, "--type", "all").code == 0
        assert (run / "checkpoint-200_merged").is_dir()
        assert (run / "checkpoint-200_merged_ema").is_dir()

    def test_small_shards_make_an_index(self, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert ckpt("merge", run, "-o", out, "--max-shard-size", "20KB").code == 0
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(
            tensor.numel() for path in out.glob("*.safetensors") for tensor in load_file(path).values()
        )
        assert len(set(index["weight_map"].values())) > 2
        assert set(index["weight_map"].values()) == {path.name for path in out.glob("model-*.safetensors")}

    def test_base_supplies_what_the_run_lacks(self, run: Path, tmp_path: Path) -> None:
        base = tmp_path / "base"
        base.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.move(run / "checkpoint-200" / name, base / name)
            (run / "checkpoint-100" / name).unlink()
        lacking = ckpt("merge", run, "--step", "200", "-o", tmp_path / "a")
        assert lacking.err.count("the output has no") == 1
        assert "warning: the output has no config.json and no tokenizer: pass --base DIR" in lacking.err
        (base / "tokenizer.json").rename(tmp_path / "tokenizer.json")
        without = ckpt("merge", run, "--step", "200", "-o", tmp_path / "c", "--base", base)
        assert "warning: the output has no tokenizer: the base has none either; copy it from" in without.err
        (tmp_path / "tokenizer.json").rename(base / "tokenizer.json")
        supplied = ckpt("merge", run, "--step", "200", "-o", tmp_path / "b", "--base", base)
        assert "the output has no" not in supplied.err
        assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()

    def test_a_hub_id_is_found_in_the_local_cache_only(self, run: Path, tmp_path: Path) -> None:
        commit = "0" * 40
        snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "NOTICE").write_text("from the base")
        refs = snapshot.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text(commit)
        outcome = ckpt("merge", run, "-o", tmp_path / "out", "--base", "some/model", HF_HUB_CACHE=str(tmp_path / "hub"))
        assert outcome.code == 0, outcome
        assert (tmp_path / "out" / "NOTICE").read_text() == "from the base"
        assert_told(ckpt("merge", run, "--base", "other/model", HF_HUB_CACHE=str(tmp_path / "hub")), 3, "not-found", "other/model")

    def test_dry_run_writes_nothing(self, run: Path) -> None:
        before = sorted(run.rglob("*"))
        outcome = ckpt("merge", run, "--dry-run")
        assert "would write" in outcome.out
        assert sorted(run.rglob("*")) == before

    def test_wrapper_prefixes_go_away(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        names = ["_orig_mod.model.layers.0._fsdp_wrapped_module.w", "_orig_mod.model._checkpoint_wrapped_module.b"]
        torch.save({f"module.{name}": torch.ones(2) for name in names}, tmp_path / "model_world_size_1_rank_0.pt")
        out = tmp_path.parent / f"{tmp_path.name}_out"
        outcome = ckpt("merge", tmp_path, "-o", out)
        assert "2 tensors renamed" in outcome.out
        assert ckpt("inspect", out, "-q").out.split() == ["model.layers.0.w", "model.b"]

    def test_names_that_change_places_are_renamed(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        torch.save({"a.w": torch.ones(2), "b.w": torch.zeros(2), "c.w": torch.zeros(2)}, tmp_path / "model_world_size_1_rank_0.pt")
        out = tmp_path.parent / f"{tmp_path.name}_out"
        outcome = ckpt("merge", tmp_path, "--key-map", "a=b", "--key-map", "b=a", "-o", out)
        assert "2 tensors renamed" in outcome.out

    def test_adapters_without_an_alpha_are_refused_unless_asked_for_as_they_are(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        names = [f"base_model.model.q_proj.{part}.weight" for part in ("base_layer", "lora_A.default", "lora_B.default")]
        torch.save({name: torch.ones(2, 2) for name in names}, tmp_path / "model_world_size_1_rank_0.pt")
        out = tmp_path.parent / f"{tmp_path.name}_out"
        assert_told(ckpt("merge", tmp_path, "-o", out), 4, "undecidable", "alpha", "--lora-alpha")
        assert ckpt("merge", tmp_path, "-o", out, "--lora", "keep").code == 0


class TestSignals:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
    def test_a_signal_ends_with_its_code_and_leaves_nothing(self, tmp_path: Path, number: int, code: int) -> None:
        torch = pytest.importorskip("torch")
        folder = tmp_path / "global_step_1"
        folder.mkdir()
        torch.save({f"w{i}": torch.ones(1 << 20) for i in range(60)}, folder / "model_world_size_1_rank_0.pt")
        program = (
            "import sys, time, ckpt_cli.output.writer as e\n"
            "slow = e._Workers._copy\n"
            "def copy(self, work, buffers):\n"
            "    time.sleep(0.1); slow(self, work, buffers)\n"
            "e._Workers._copy = copy\n"
            "from ckpt_cli.cli import main\n"
            f"main(['merge', {str(tmp_path)!r}, '--jobs', '1'])\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(200):
            if any("ckpt-tmp" in path.name for path in tmp_path.iterdir()):
                break
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert "Traceback" not in err
        assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


class TestWhatAScreenAdds:
    def test_a_dry_run_that_cannot_be_done_ends_with_the_way_past_it(self, run: Path) -> None:
        assert ckpt("merge", run).code == 0
        done = ckpt("merge", run, "--dry-run")
        assert "would replace" not in done.out
        said = [line for line in done.err.splitlines() if line.startswith(("error", "next:"))]
        assert said == ["error[output-exists]: the output folder exists", f"next: ckpt merge {run} -o {run}/checkpoint-200_merged_2"]

    def test_what_was_replaced_is_said(self, run: Path) -> None:
        assert "\nreplaced" not in ckpt("merge", run).out
        assert "\nwould replace  the folder of this name" in ckpt("merge", run, "-f", "--dry-run").out
        assert "\nreplaced    the folder of this name that was there before\n" in ckpt("merge", run, "-f").out
        assert ckpt("extract-state", run).code == 0
        assert "\nreplaced    the folder of this name that was there before\n" in ckpt("extract-state", run, "-f").out

    def test_a_newer_step_that_was_passed_over_is_named_by_every_command(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run / "checkpoint-100", run / "checkpoint-50")
        shutil.copytree(run / "checkpoint-200" / "extra_state", run / "checkpoint-100" / "extra_state")
        shard(run, 2).unlink()
        for command in (["merge", run], ["extract-state", run], ["average", run, "--last", "2", "-o", tmp_path / "out"]):
            assert "step 100 (not 200: rank 2 of 4 is missing)" in ckpt(*command, "--dry-run").out

    def test_an_optimizer_that_was_not_asked_for_is_not_passed_over_in_silence(self, run: Path) -> None:
        assert "--optimizer adds its state" in ckpt("extract-state", run, "--dry-run").out
        assert "--optimizer" not in ckpt("extract-state", run, "--optimizer", "--dry-run").out

    def test_counts_are_reconciled(self, run: Path) -> None:
        """A tied tensor is one of 25, and its values are counted once."""
        assert "counted once" in ckpt("inspect", run).out
        assert "tied to others, counted once" in ckpt("detect", run).out
