"""A verification in parts: gathered, it ends with the result of one process; parts that do not prove that are refused by name."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import ckpt_cli
from ckpt_cli.cli import _run
from ckpt_cli.commands.verify import verify_part
from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MissingParts, NotFound, UsageError
from ckpt_cli.files.descriptors import Identity
from tests.cli import ROOT, Outcome

RUN = ROOT / "examples" / "tiny-run"
INDEX = "model.safetensors.index.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
VALUE = "model.layers.1.self_attn.v_proj.weight"
BOTH = {"full": True, "against": str(RUN)}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "out"
    ckpt_cli.merge(RUN, out, max_shard_size=20_000)
    assert len(list(out.glob("*.safetensors"))) > 3
    return out


@pytest.fixture
def out(merged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(merged, tmp_path / "out"))


def parts_of(folder: Path, count: int, beside: Path, **asked: Any) -> list[Path]:
    """The documents of all parts, in a folder of their own."""
    beside.mkdir(exist_ok=True)
    paths = []
    for number in range(count):
        done = verify_part(folder, f"{number}/{count}", **asked)
        paths.append(beside / f"part-{number}-of-{count}.json")
        paths[-1].write_text(done.model_dump_json())
    return paths


def text(result: Any) -> str:
    return str(result.model_copy(update={"seconds": 0.0}).model_dump_json(indent=2))


def owner(out: Path, name: str) -> Path:
    index = out / INDEX
    return out / str(json.loads(index.read_text())["weight_map"][name]) if index.exists() else out / "model.safetensors"


def changed(out: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Write a tensor anew; None takes it out, of the index too."""
    path = owner(out, name)
    tensors = load_file(path)
    made = change(tensors.pop(name))
    if made is not None:
        tensors[name] = made
    else:
        index = json.loads((out / INDEX).read_text())
        del index["weight_map"][name]
        (out / INDEX).write_text(json.dumps(index))
    save_file(tensors, path, {"format": "pt"})


def flipped(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def with_nan(values: Any) -> Any:
    values[0, 0] = float("nan")
    return values


def swapped(out: Path) -> None:
    queries = {name: load_file(owner(out, name))[name] for name in (QUERY, QUERY.replace("0", "1"))}
    first, second = queries
    changed(out, first, lambda _: queries[second])
    changed(out, second, lambda _: queries[first])


def with_a_head(out: Path) -> None:
    """A head that the config ties to the embedding, with other values."""
    path, index = owner(out, EMBEDDING), json.loads((out / INDEX).read_text())
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors[EMBEDDING] * 2}, path, {"format": "pt"})
    index["weight_map"]["lm_head.weight"] = path.name
    (out / INDEX).write_text(json.dumps(index))


DAMAGE: dict[str, tuple[Callable[[Path], Any], set[str]]] = {
    "nothing": (lambda out: None, set()),
    "a bit": (lambda out: flipped(owner(out, VALUE), -1 + owner(out, VALUE).stat().st_size), {"different-values", "wrong-checksum"}),
    "other values": (lambda out: changed(out, QUERY, lambda values: values * 1.1), {"different-values", "wrong-checksum"}),
    "NaN": (lambda out: changed(out, QUERY, with_nan), {"non-finite", "different-values", "wrong-checksum"}),
    "zeros": (lambda out: changed(out, KEY, lambda values: values * 0), {"all-zero", "different-values", "wrong-checksum"}),
    "two swapped": (swapped, {"different-values", "wrong-checksum"}),
    "a lost tensor": (lambda out: changed(out, QUERY, lambda _: None), {"lost-tensor", "missing-tensor"}),
    "another shape": (lambda out: changed(out, QUERY, lambda values: values[:4]), {"different-shape", "cut-tensor"}),
    "a tied head": (with_a_head, {"tied-stored", "tied-differ", "different-values"}),
    "config": (lambda out: (out / "config.json").write_text("{"), {"damaged-config"}),
    "a file gone": (lambda out: owner(out, VALUE).unlink(), {"missing-file"}),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_gathered_parts_are_what_one_process_finds(out: Path, tmp_path: Path, what: str) -> None:
    damage, codes = DAMAGE[what]
    damage(out)
    whole = ckpt_cli.verify(out, **BOTH)
    assert codes <= {item.code for item in whole.findings}
    assert whole.exit_code == bool(codes)
    for count in (1, 3, 8):
        gathered = ckpt_cli.verify(out, gather=parts_of(out, count, tmp_path / "parts", **BOTH))
        assert text(gathered) == text(whole)


@pytest.mark.parametrize(
    "asked", [{"full": True}, {"against": str(RUN)}, {"sample": "30%"}, {"full": True, "against": str(RUN), "step": 200}]
)
def test_every_level(out: Path, tmp_path: Path, asked: dict[str, Any]) -> None:
    for name in (QUERY, VALUE):
        changed(out, name, with_nan)
    whole = ckpt_cli.verify(out, **asked)
    assert text(ckpt_cli.verify(out, gather=parts_of(out, 3, tmp_path / "parts", **asked))) == text(whole)


class TestShardedSources:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(RUN / "checkpoint-200", tmp_path / "run"))

    def test_a_run_itself(self, run: Path, tmp_path: Path) -> None:
        """With the CRC-32 of its records: every rank's file is damaged somewhere."""
        for path in sorted((run / "pytorch_model_fsdp_0").glob("*.pt")):
            flipped(path, path.stat().st_size // 3)
        whole = ckpt_cli.verify(run, full=True)
        assert "wrong-checksum" in {item.code for item in whole.findings}
        for count in (1, 3, 8):
            assert text(ckpt_cli.verify(run, gather=parts_of(run, count, tmp_path / "parts", full=True))) == text(whole)

    def test_a_source_that_is_damaged(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out")
        for path in sorted((run / "pytorch_model_fsdp_0").glob("*.pt")):
            flipped(path, path.stat().st_size // 3)
        asked = {"against": str(run)}
        whole = ckpt_cli.verify(tmp_path / "out", **asked)
        assert any(item.numbers.get("damaged") == "source" for item in whole.findings)
        for count in (1, 3, 8):
            gathered = ckpt_cli.verify(tmp_path / "out", gather=parts_of(tmp_path / "out", count, tmp_path / "parts", **asked))
            assert text(gathered) == text(whole)

    def test_two_components_in_one_folder(self, tmp_path: Path) -> None:
        out = tmp_path / "both"
        ckpt_cli.merge(RUN, out, type="ema", weights_name="ema.safetensors")
        ckpt_cli.merge(RUN, tmp_path / "model")
        shutil.copy(tmp_path / "model" / "model.safetensors", out)
        whole = ckpt_cli.verify(out, type="all", full=True)
        assert text(ckpt_cli.verify(out, gather=parts_of(out, 3, tmp_path / "parts", type="all", full=True))) == text(whole)


def seen_elsewhere(identity: Identity) -> Identity:
    return replace(identity, device=identity.device + 5, inode=identity.inode + 7, ctime_ns=identity.ctime_ns + 9)


@pytest.mark.parametrize("source", ["verl-lora/full", "dcp-options/zstd"])
def test_parts_of_several_machines(layouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Which see the same files with other devices, inodes and ctimes: also where weights are computed (LoRA) or inflated."""
    of = Identity.of
    out, asked = tmp_path / "out", {"full": True, "against": str(layouts / source)}
    planned = ckpt_cli.merge(layouts / source, out).outputs[0].plan_digest
    whole, (first, _) = ckpt_cli.verify(out, **asked), parts_of(out, 2, tmp_path / "here", **asked)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Identity, "of", lambda path, status: seen_elsewhere(of(path, status)))
        _, second = parts_of(out, 2, tmp_path / "there", **asked)
        assert ckpt_cli.merge(layouts / source, tmp_path / "again", dry_run=True).outputs[0].plan_digest == planned
    assert text(ckpt_cli.verify(out, gather=[first, second])) == text(whole)


def test_an_average(tmp_path: Path) -> None:
    out = tmp_path / "average"
    ckpt_cli.average(RUN, output=out, everything=True)
    changed(out, QUERY, with_nan)
    whole = ckpt_cli.verify(out, full=True)
    assert {"non-finite", "wrong-checksum"} <= {item.code for item in whole.findings}
    assert text(ckpt_cli.verify(out, gather=parts_of(out, 3, tmp_path / "parts", full=True))) == text(whole)


def test_every_tensor_is_read_by_one_part(out: Path) -> None:
    """By bytes: no part reads more than its share and one tensor, and more parts than tensors do no harm."""
    whole = ckpt_cli.verify(out, full=True)
    largest = max(values.nbytes for path in out.glob("*.safetensors") for values in load_file(path).values())
    for count in (2, 5, 40):
        read = [verify_part(out, f"{number}/{count}", full=True).shares["values 0"].bytes_read for number in range(count)]
        assert sum(read) == whole.bytes_read
        assert max(read) <= whole.bytes_read / count + largest


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """A command line in this process, of which a test runs many."""

    def run(*words: str | Path, **environment: str) -> Outcome:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        code = _run([str(word) for word in words])
        shown = capsys.readouterr()
        return Outcome(code, shown.out, shown.err)

    return run


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ckpt: Callable[..., Outcome]) -> None:
        monkeypatch.chdir(tmp_path)
        self.ckpt = ckpt

    def parts(self, out: Path, *words: str | Path, count: int = 3) -> list[str]:
        for number in range(count):
            done = self.ckpt("verify", out, *words, "--part", f"{number}/{count}", "--json")
            assert (done.code, done.err) == (0, "")
            Path(f"part-{number}.json").write_text(done.out)
        return [f"part-{number}.json" for number in range(count)]

    def same(self, first: str, second: str) -> bool:
        documents = [json.loads(each) for each in (first, second)]
        for document in documents:
            document["data"].pop("seconds")
        return json.dumps(documents[0]) == json.dumps(documents[1])

    def test_the_same_document_screen_and_exit_code(self, out: Path) -> None:
        changed(out, QUERY, with_nan)
        changed(out, VALUE, lambda values: values * 2)
        Path("run").symlink_to(RUN)
        words = ["--full", "--against", "run"]
        whole = self.ckpt("verify", "out", *words, "--json")
        listed = self.parts(Path("out"), *words)
        gathered = self.ckpt("verify", "out", "--gather", *listed, "--json")
        assert gathered.code == whole.code == 1
        assert self.same(gathered.out, whole.out)
        screens = [self.ckpt("verify", "out", *more, "--progress", "off") for more in (words, ["--gather", *listed])]
        assert screens[0] == screens[1]
        assert "different-values" in screens[0].out

    def test_a_part_gives_no_verdict(self, out: Path) -> None:
        """Whatever it finds: exit code 0, no result of a verification, and nothing that says ok."""
        changed(out, QUERY, with_nan)
        (path,) = self.parts(out, "--full", count=1)
        data = json.loads(Path(path).read_text())["data"]
        assert "findings" not in data
        assert [item["code"] for item in data["shares"]["values 0"]["findings"]] == ["wrong-checksum", "non-finite"]

    def test_by_the_numbers_of_a_launcher(self, out: Path) -> None:
        for rank in range(2):
            done = self.ckpt("verify", out, "--full", "--part", "auto", "--json", RANK=str(rank), WORLD_SIZE="2")
            Path(f"part-{rank}.json").write_text(done.out)
        done = self.ckpt("verify", out, "--gather", "part-0.json", "part-1.json")
        assert done.code == 0, done.err
        assert "24 checksums compared" in done.out

    def test_the_last_process_of_a_launcher_has_the_result(self, out: Path, tmp_path: Path) -> None:
        changed(out, QUERY, with_nan)
        words = ["verify", "out", "--full", "--against", RUN]
        whole = self.ckpt(*words)
        for rank, code in ((2, 0), (0, 0), (1, 1)):
            done = self.ckpt(*words, "--part", "auto", SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS="3", SLURM_JOB_ID="7")
            assert done.code == code
            if rank != 1:
                count = len(verify_part(out, f"{rank}/3", **BOTH).findings)
                found = f"{count} findings" if count else "nothing found"
                assert done.out == f"part {rank} of 3: {found}; the process that is done last has the result\n"
                (meeting,) = tmp_path.glob(".*")
                assert meeting.name.startswith(".out.ckpt-verify-")
        assert done == whole
        assert list(tmp_path.glob(".*")) == []

    @pytest.mark.parametrize("step", ["SLURM_STEP_ID", ""])
    def test_a_part_that_two_processes_did_is_refused(self, out: Path, tmp_path: Path, step: str) -> None:
        """Always if the run is known, else if the other wrote it while this one was at work: the first document stays."""
        words = ["verify", "out", "--full", "--part", "auto"]
        launched = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"} | ({step: "0"} if step else {})
        assert self.ckpt(*words, **launched).code == 0
        (record,) = tmp_path.glob(".*/part-0-of-2.json")
        if not step:
            os.utime(record, (time.time() + 60,) * 2)
        first = record.stat()
        done = self.ckpt(*words, **launched)
        assert done.code != 0
        assert "did part 0 of 2 as well" in done.err
        assert [(path.name, path.stat()) for path in record.parent.iterdir()] == [(record.name, first)]
        assert self.ckpt(*words, **launched | {"SLURM_PROCID": "1"}).code == 0

    def test_a_part_of_an_earlier_try_is_done_again(self, out: Path, tmp_path: Path) -> None:
        """As torchrun starts all processes again if one failed."""
        words, launched = ["verify", "out", "--full", "--part", "auto"], {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
        assert self.ckpt(*words, RANK="0", **launched).code == 0
        (record,) = tmp_path.glob(".*/part-0-of-2.json")
        os.utime(record, (time.time() - 60,) * 2)
        assert self.ckpt(*words, RANK="0", **launched).code == 0
        assert self.ckpt(*words, RANK="1", **launched).code == 0
        assert list(tmp_path.glob(".*")) == []

    def test_runs_of_a_launcher_do_not_mix(self, out: Path, tmp_path: Path) -> None:
        for job in ("7", "8"):
            done = self.ckpt("verify", "out", "--full", "--part", "auto", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2", SLURM_JOB_ID=job)
            assert (done.code, done.out) == (0, "part 0 of 2: nothing found; the process that is done last has the result\n")
        assert len(list(tmp_path.glob(".*"))) == 2

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_where_nothing_may_be_written(self, out: Path, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        done = self.ckpt("verify", "out", "--full", "--part", "auto", RANK="0", WORLD_SIZE="2")
        tmp_path.chmod(0o700)
        assert done.code == 5
        assert "--part auto --json" in done.err

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--part", "3/3", "--full", "--json"], "0/3 to 2/3"),
            (["--part", "0/3:files", "--full", "--json"], ":files"),
            (["--part", "auto", "--full", "--json"], "no launcher says"),
            (["--part", "0/3", "--json"], "--full"),
            (["--part", "0/3", "--full"], "--json"),
            (["--part", "0/3", "--full", "--base", RUN, "--json"], "--base"),
            (["--part", "0/3", "--full", "--gather", "part.json", "--json"], "--gather"),
            (["--gather"], "part-*.json"),
            (["part.json"], "--gather"),
        ],
    )
    def test_options_that_do_not_go_together(self, out: Path, words: Sequence[str | Path], said: str) -> None:
        done = self.ckpt("verify", out, *words)
        assert done.code == 2
        assert said in done.out + done.err


class TestRefused:
    """Parts that do not prove what one process would have found."""

    @pytest.fixture
    def parts(self, out: Path, tmp_path: Path) -> list[Path]:
        return parts_of(out, 3, tmp_path / "parts", **BOTH)

    def test_missing(self, out: Path, parts: list[Path]) -> None:
        with pytest.raises(MissingParts, match="2 of 3 parts are missing: 0, 2"):
            ckpt_cli.verify(out, gather=parts[1:2])

    def test_twice(self, out: Path, parts: list[Path], tmp_path: Path) -> None:
        again = Path(shutil.copy(parts[1], tmp_path / "again.json"))
        with pytest.raises(Inconsistent, match="part 1 of 3 is there twice") as caught:
            ckpt_cli.verify(out, gather=[*parts, again])
        assert caught.value.path == str(again)

    def test_no_such_file(self, out: Path, parts: list[Path], tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            ckpt_cli.verify(out, gather=[*parts, tmp_path / "part-*.json"])

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({"full": True}, "verification: against is not given"),
            ({"against": str(RUN)}, "verification: full is not given"),
            ({**BOTH, "exclude": ["lm_head*"]}, "verification: exclude is lm_head"),
            ({**BOTH, "step": 100}, "verification: step is 100"),
        ],
    )
    def test_another_question(self, out: Path, parts: list[Path], tmp_path: Path, asked: dict[str, Any], said: str) -> None:
        other = parts_of(out, 3, tmp_path / "others", **asked)[1]
        with pytest.raises(Inconsistent, match=said) as caught:
            ckpt_cli.verify(out, gather=[parts[0], other, parts[2]])
        assert caught.value.path == str(other)

    def test_cut_into_another_number(self, out: Path, parts: list[Path], tmp_path: Path) -> None:
        other = parts_of(out, 4, tmp_path / "others", **BOTH)[1]
        with pytest.raises(Inconsistent, match="one of 4 parts, not of 3"):
            ckpt_cli.verify(out, gather=[parts[0], other, parts[2]])

    def test_of_another_folder(self, out: Path, parts: list[Path], tmp_path: Path) -> None:
        other = Path(shutil.copytree(out, tmp_path / "other"))
        with pytest.raises(Inconsistent, match=r"PATH is .*out, not .*other"):
            ckpt_cli.verify(other, gather=parts)

    def test_options_besides_must_be_those_of_the_parts(self, out: Path, parts: list[Path]) -> None:
        assert ckpt_cli.verify(out, full=True, against=RUN, gather=parts).exit_code == 0
        with pytest.raises(Inconsistent, match="step is not given, not 100"):
            ckpt_cli.verify(out, step=100, gather=parts)

    @pytest.mark.parametrize("side", ["output", "source"])
    def test_files_that_changed_since(self, out: Path, tmp_path: Path, side: str) -> None:
        """Also if one part was run before and the others after that."""
        run = Path(shutil.copytree(RUN, tmp_path / "run"))
        asked = {"against": str(run)}
        before = parts_of(out, 3, tmp_path / "before", **asked)
        path = owner(out, QUERY) if side == "output" else run / "checkpoint-200" / "pytorch_model_fsdp_0" / "model_world_size_4_rank_2.pt"
        os.utime(path, ns=(1, 1))
        with pytest.raises(Inconsistent, match=r"all 3 parts are out of date: .* changed since") as caught:
            ckpt_cli.verify(out, gather=before)
        assert caught.value.path == str(path)
        after = parts_of(out, 3, tmp_path / "after", **asked)
        with pytest.raises(Inconsistent, match=f"{path.name} was another file then") as caught:
            ckpt_cli.verify(out, gather=[after[0], before[1], after[2]])
        assert caught.value.path == str(before[1])
        assert ckpt_cli.verify(out, gather=after).exit_code == 0

    @pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "on another machine"])
    @pytest.mark.parametrize("how", ["in place", "replaced"])
    def test_files_that_changed_with_their_size_and_mtime_kept(
        self, out: Path, tmp_path: Path, how: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On another machine the same file system has another device number."""
        run = Path(shutil.copytree(RUN, tmp_path / "run"))
        of, name = Identity.of, platform.node
        with monkeypatch.context() as there:
            if elsewhere:
                there.setattr(Identity, "of", lambda path, status: replace(of(path, status), device=of(path, status).device + 5))
                there.setattr(platform, "node", lambda: f"not-{name()}")
            parts = parts_of(out, 2, tmp_path / "parts", against=str(run))
        assert ckpt_cli.verify(out, gather=parts).exit_code == 0
        path = run / "checkpoint-200" / "pytorch_model_fsdp_0" / "model_world_size_4_rank_2.pt"
        before = path.stat()
        if how == "replaced":
            shutil.copy(path, tmp_path / "new")
            os.replace(tmp_path / "new", path)
        flipped(path, before.st_size // 2)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(Inconsistent, match="changed since, although size and mtime are the same") as caught:
            ckpt_cli.verify(out, gather=parts)
        assert caught.value.path == str(path)

    def test_a_manifest_with_other_checksums(self, out: Path, parts: list[Path]) -> None:
        """What the parts compared with is no longer what there is to compare with."""
        manifest = json.loads((out / "ckpt-manifest.json").read_text())
        crcs = manifest["checksums"]["files"][owner(out, QUERY).name]
        crcs[QUERY] = "00000000"
        (out / "ckpt-manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(Inconsistent, match="the tensors that are checked changed"):
            ckpt_cli.verify(out, gather=parts)

    def edited(self, path: Path, change: Callable[[dict[str, Any]], None]) -> None:
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    @pytest.mark.parametrize(
        "change",
        [
            lambda part: part.update(part=1 << 70),
            lambda part: part.update(parts=1 << 62),
            lambda part: part.update(part=-1),
            lambda part: part.update(part=7),
            lambda part: part.update(digest="0" * 64),
            lambda part: part.update(more=1),
            lambda part: part.pop("shares"),
            lambda part: part["shares"]["values 0"].update(items=10**18),
            lambda part: part["shares"]["values 0"].update(bytes_read=-5),
            lambda part: part["shares"]["values 0"].update(first=0),
            lambda part: part["shares"].pop("against 0"),
            lambda part: part["question"].update(full=False),
            lambda part: part["files"].clear(),
            lambda part: part["shares"]["values 0"]["findings"].append({"code": "made-up", "severity": "error", "message": "x"}),
            lambda part: part["shares"]["values 0"]["findings"].append({"code": "non-finite", "severity": "info", "message": "x"}),
        ],
    )
    def test_what_no_part_says(self, out: Path, parts: list[Path], change: Callable[[dict[str, Any]], None]) -> None:
        self.edited(parts[1], change)
        with pytest.raises(CorruptFile) as caught:
            ckpt_cli.verify(out, gather=parts)
        assert caught.value.exit_code == 3

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"part": 1e999}', b'{"schema": 1, "command": "merge", "data": null}'],
    )
    def test_what_is_no_document(self, out: Path, parts: list[Path], content: bytes) -> None:
        parts[2].write_bytes(content)
        with pytest.raises(CorruptFile, match="not what verify part prints") as caught:
            ckpt_cli.verify(out, gather=parts)
        assert caught.value.path == str(parts[2])

    def test_cut_short_at_any_byte(self, out: Path, parts: list[Path]) -> None:
        whole = parts[0].read_bytes()
        for length in range(0, len(whole), max(1, len(whole) // 40)):
            parts[0].write_bytes(whole[:length])
            with pytest.raises(CorruptFile):
                ckpt_cli.verify(out, gather=parts)

    def test_the_result_of_one_process_is_no_part(self, out: Path, parts: list[Path]) -> None:
        parts[0].write_text(ckpt_cli.verify(out, full=True).model_dump_json())
        with pytest.raises(CorruptFile):
            ckpt_cli.verify(out, gather=parts)

    def test_another_version(self, out: Path, parts: list[Path]) -> None:
        self.edited(parts[1], lambda part: part.update(version="9.9"))
        with pytest.raises(Inconsistent, match=r"checked by ckpt 9\.9"):
            ckpt_cli.verify(out, gather=parts)

    def test_links_and_pipes(self, out: Path, parts: list[Path], tmp_path: Path) -> None:
        link, pipe = tmp_path / "link.json", tmp_path / "pipe.json"
        link.symlink_to(parts[0])
        os.mkfifo(pipe)
        for path in (link, pipe, tmp_path):
            with pytest.raises(CkptError) as caught:
                ckpt_cli.verify(out, gather=[path, *parts[1:]])
            assert caught.value.exit_code == 3

    def test_a_part_names_no_host(self, out: Path, tmp_path: Path) -> None:
        """A document with a right digest that would make this machine ask another one."""
        from ckpt_cli.results.verify import VerifyPart
        from ckpt_cli.verifying.checks import digest_of

        (path,) = parts_of(out, 1, tmp_path / "parts", **BOTH)
        part = VerifyPart.model_validate_json(path.read_text())
        part = part.model_copy(update={"question": part.question.model_copy(update={"against": "s3://bucket/run"})})
        path.write_text(part.model_copy(update={"digest": digest_of(part)}).model_dump_json())
        with pytest.raises(UsageError, match="s3://bucket/run, which is not on this machine"):
            ckpt_cli.verify(out, gather=[path])
