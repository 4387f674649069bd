"""Regressions for the kinds of damage that attacks on the tool did: data lost, wrong files read, streams that go away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import CkptError, OutputExists, Undecidable, UsageError
from tests.cli import ROOT, ckpt

EXAMPLE = ROOT / "examples" / "tiny-run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "run"))


def save(folder: Path, value: float, **more: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.full((2, 2), value), **more}, folder / "model_world_size_1_rank_0.pt")
    return folder


def written(folder: Path) -> float:
    from safetensors.torch import load_file

    return float(load_file(folder / "model.safetensors")["w"][0, 0])


class TestOverwrite:
    def test_never_replaces_a_checkpoint_that_was_merged_in_place(self, tmp_path: Path) -> None:
        target = save(tmp_path / "a" / "global_step_1", 1.0)
        ckpt_cli.merge(target, in_place=True)
        with pytest.raises(OutputExists):
            ckpt_cli.merge(save(tmp_path / "b" / "global_step_1", 2.0), target, overwrite=True)
        assert (target / "model_world_size_1_rank_0.pt").exists()

    @pytest.mark.parametrize("name", ["notes.txt", "subfolder"])
    def test_never_removes_what_ckpt_did_not_write(self, tmp_path: Path, name: str) -> None:
        source, out = save(tmp_path / "a" / "global_step_1", 1.0), tmp_path / "out"
        ckpt_cli.merge(source, out)
        if "." in name:
            (out / name).write_text("mine")
        else:
            (out / name).mkdir()
        with pytest.raises(OutputExists, match=name):
            ckpt_cli.merge(source, out, overwrite=True)
        assert (out / name).exists()

    def test_never_replaces_the_folder_where_links_lead(self, tmp_path: Path) -> None:
        real = tmp_path / "real"
        ckpt_cli.merge(save(tmp_path / "a" / "global_step_1", 1.0), real)
        links = tmp_path / "links"
        links.mkdir()
        (links / "model.safetensors").symlink_to(real / "model.safetensors")
        with pytest.raises(CkptError) as caught:
            ckpt_cli.merge(links, real, overwrite=True)
        assert caught.value.code == "output-inside-source"
        assert (real / "model.safetensors").exists()


class TestPaths:
    def test_two_dots_after_a_link_are_where_the_system_says(self, tmp_path: Path) -> None:
        save(tmp_path / "far" / "run" / "global_step_1", 1.0)
        save(tmp_path / "run" / "global_step_1", 2.0)
        (tmp_path / "far" / "deep").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
        ckpt_cli.merge(f"{tmp_path}/link/../run", tmp_path / "out")
        assert written(tmp_path / "out") == 1.0

    def test_unfinished_steps_without_weights_are_named(self, tmp_path: Path) -> None:
        save(tmp_path / "global_step_1", 1.0)
        (tmp_path / "global_step_2" / "actor").mkdir(parents=True)
        result = ckpt_cli.detect(tmp_path)
        assert [note.text for note in result.checkpoint.notes] == ["global_step_2 is skipped: no weights were recognised in it"]

    def test_a_folder_without_permission_is_unreadable_not_unrecognised(self, run: Path, tmp_path: Path) -> None:
        secret = save(tmp_path / "secret" / "global_step_1", 1.0).parent
        secret.chmod(0)
        program = (
            "import os, sys, ckpt_cli.commands.inspect as i\n"
            "from ckpt_cli.errors import Unreadable\n"
            "i.detect(sys.argv[1])\n"
            "os.chdir(sys.argv[2])\n"
            "if os.geteuid() == 0: os.setuid(65534)\n"
            "try: i.detect('secret')\n"
            "except Unreadable as error: print(error)\n"
        )
        command = [sys.executable, "-c", program, str(run), str(tmp_path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        finally:
            secret.chmod(0o700)
        assert "Permission denied" in done.stdout, done.stderr

    def test_several_files_that_could_be_the_model_are_refused(self, tmp_path: Path) -> None:
        for name in ("model.pt", "checkpoint.pt"):
            torch.save({"w": torch.ones(2)}, tmp_path / name)
        with pytest.raises(Undecidable, match=r"checkpoint.pt, model.pt"):
            ckpt_cli.merge(tmp_path, tmp_path.parent / f"{tmp_path.name}_out")

    def test_python_files_beside_a_single_file_stay_where_they_are(self, tmp_path: Path) -> None:
        folder = tmp_path / "project"
        folder.mkdir()
        torch.save({"w": torch.ones(2)}, folder / "model.pt")
        (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_toy.Toy"}}))
        (folder / "modeling_toy.py").write_text("from .helpers import thing\n")
        (folder / "helpers.py").write_text("")
        (folder / "deploy.py").write_text("PASSWORD = 'x'")
        ckpt_cli.merge(folder / "model.pt", tmp_path / "out")
        assert sorted(path.name for path in (tmp_path / "out").glob("*.py")) == ["helpers.py", "modeling_toy.py"]


class TestComponents:
    def test_in_place_of_several_components_is_refused_before_anything_happens(self, run: Path) -> None:
        before = sorted(run.rglob("*"))
        with pytest.raises(UsageError, match="same weights file") as caught:
            ckpt_cli.merge(run, type="both", in_place=True)
        assert sorted(run.rglob("*")) == before
        assert caught.value.hint == "leave out --in-place: each then gets a folder of its own"
        assert len({output.output for output in ckpt_cli.merge(run, type="both").outputs}) == 2

    def test_one_name_for_several_is_refused_with_a_way_that_works(self, run: Path, tmp_path: Path) -> None:
        """A merge in place beside another is refused: the manifest is there."""
        with pytest.raises(UsageError, match="one weights name for several") as caught:
            ckpt_cli.merge(run, type="both", in_place=True, weights_name="x.safetensors")
        assert caught.value.hint == "leave out --in-place, and merge them one by one with --type and -o"
        for kind in ("model", "ema"):
            ckpt_cli.merge(run, tmp_path / kind, type=kind, weights_name="x.safetensors")

    def test_both_of_a_run_that_has_only_an_ema_is_that_one(self, run: Path, tmp_path: Path) -> None:
        for step in run.glob("checkpoint-*"):
            shutil.rmtree(step / "pytorch_model_fsdp_0")
        assert [output.component for output in ckpt_cli.merge(run, tmp_path / "out", type="both").outputs] == ["ema"]


class TestConfigs:
    @pytest.mark.parametrize(
        "text",
        [
            '{"dtype": "float32", "x": "\\ud800"}',
            '{"torch_dtype":"float32","limit":[0.0,Infinity],"n":1e999}',
            '{"transformers_version": "4.\u00b2"}',
            '{"dtype": "float32", "text_config": {"dtype": "float32", "other": ["float32"]}, "name": "float32"}',
        ],
    )
    def test_only_the_words_of_the_dtype_change(self, run: Path, tmp_path: Path, text: str) -> None:
        (run / "checkpoint-200" / "config.json").write_text(text, encoding="utf-8")
        ckpt_cli.merge(run, tmp_path / "out", dtype="bf16")
        after = (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
        if "transformers_version" in text:
            assert after == text.replace("{", '{\n  "torch_dtype": "bfloat16",')
        else:
            assert after == text.replace('dtype": "float32"', 'dtype": "bfloat16"').replace('dtype":"float32"', 'dtype":"bfloat16"')


class TestStreams:
    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        line = command.replace("ckpt", f"{sys.executable} -m ckpt_cli", 1)
        return subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, env=environment, timeout=60)

    @pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
    def test_closed_streams_do_not_stop_the_work(self, run: Path, tmp_path: Path, closed: str) -> None:
        done = self.shell(f"ckpt merge {run} -o {tmp_path / 'out'} {closed}")
        assert "Traceback" not in done.stderr
        assert done.returncode == 0
        assert (tmp_path / "out" / "model.safetensors").exists()

    def test_a_reader_that_goes_away_ends_with_141(self, run: Path) -> None:
        done = self.shell(f"ckpt inspect {run} --all | true")
        assert done.returncode in (0, 141)
        assert done.stderr.count("\n") <= 1

    def test_nobody_who_reads_the_progress_is_no_reason_to_stop(self, run: Path, tmp_path: Path) -> None:
        done = self.shell(f"ckpt merge {run} -o {tmp_path / 'out'} --progress json 2> >(true)")
        assert done.returncode == 0
        assert (tmp_path / "out" / "model.safetensors").exists()

    def test_a_signal_is_told_in_json_as_well(self, run: Path) -> None:
        program = (
            "import os, signal, ckpt_cli.commands.merge as m\n"
            "def slow(*a, **k): os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)\n"
            "m.merge = slow\n"
            "from ckpt_cli.cli import main\n"
            f"main(['merge', {str(run)!r}, '--json'])\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        document = json.loads(done.stdout)
        assert (done.returncode, document["exit_code"], document["errors"][0]["code"]) == (143, 143, "interrupted")


def test_every_error_of_the_command_line_has_a_hint(run: Path, tmp_path: Path) -> None:
    """Each kind of failure that a user meets first, by its text."""
    file = tmp_path / "file"
    file.write_text("")
    for arguments in (
        ["merge", tmp_path / "none"],
        ["merge", run, "-o", file / "x"],
        ["merge", run, "--base", tmp_path / "none"],
        ["merge", run, "--match-base"],
        ["merge", run, "--key-map", file],
        ["inspect", run, "--type", "none"],
        ["merge", run, "--drop-extra", "--base", run],
    ):
        outcome = ckpt(*arguments)
        assert outcome.code in (2, 3, 5), outcome
        assert "  hint: " in outcome.err, outcome.err
