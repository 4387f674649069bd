"""`--push-to-hub`: an output goes to a repository of the Hub after it was verified, and whatever fails there, the output stays.

The client is huggingface_hub, the Hub a stand-in (`tests.hub_server`) to which HF_ENDPOINT points.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import ckpt_cli
from ckpt_cli.engines.call import part_call
from ckpt_cli.errors import PushFailed, Unsupported, UsageError
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.pushing import card
from ckpt_cli.pushing.destination import Destination
from ckpt_cli.pushing.folder import manifest_of, public_manifest
from ckpt_cli.pushing.upload import delivered
from ckpt_cli.results.verify import Finding
from ckpt_cli.results.watch import WatchEvent, WatchResult
from ckpt_cli.results.written import MergeResult
from ckpt_cli.watching.watched_run import Listener
from tests import hub_server
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt
from tests.hub_server import TOKEN, Fault, Hub, Repo

EXAMPLE = ROOT / "examples" / "tiny-run"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, which this process and those that it starts use; retries do not wait."""
    import huggingface_hub
    from huggingface_hub.utils import _http

    with hub_server.serving() as served:
        for name, value in {
            "HF_ENDPOINT": served.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "home"),
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
        monkeypatch.setattr(_http, "time", types.SimpleNamespace(**{**vars(_http.time), "sleep": lambda _: None}))
        yield served


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def merge(out: Path, **options: Any) -> MergeResult:
    return ckpt_cli.merge(EXAMPLE, out, **{"push_to_hub": "me/model", **options})


class TestPush:
    def test_a_merge_is_verified_and_pushed_as_one_commit(self, hub: Hub, out: Path) -> None:
        result = merge(out, step=200)
        assert result.exit_code == 0
        assert result.push is not None
        assert (result.push.repo, result.push.branch, result.push.url) == ("me/model", "main", f"{hub.url}/me/model")
        assert result.outputs[0].verified[0].against[0].identical
        there = hub.files("me/model")
        names = {path.name for path in out.iterdir()}
        assert set(there) == names | {".gitattributes"}
        assert all(there[name] == (out / name).read_bytes() for name in names - {"ckpt-manifest.json"})
        assert [(branch, sorted(files)) for branch, _, files in hub.repos["me/model"].commits] == [("main", sorted(names))]

    def test_an_average_is_read_in_full_and_pushed(self, hub: Hub, out: Path) -> None:
        result = ckpt_cli.average(EXAMPLE, out, everything=True, push_to_hub="me/model", private=True)
        assert result.exit_code == 0
        assert hub.repos["me/model"].private
        assert result.outputs[0].verified[0].levels == ("headers", "full")
        assert hub.files("me/model")[WEIGHTS] == (out / WEIGHTS).read_bytes()

    def test_a_name_without_a_namespace_is_that_of_the_user(self, hub: Hub, out: Path) -> None:
        result = merge(out, push_to_hub="model")
        assert result.push is not None
        assert (result.push.asked, result.push.repo) == ("model", "me/model")

    def test_what_is_pushed_says_nothing_about_this_machine(self, hub: Hub, out: Path) -> None:
        merge(out)
        for name in ("README.md", "ckpt-manifest.json", "config.json"):
            assert str(ROOT).encode() not in hub.files("me/model")[name]
        pushed = json.loads(hub.files("me/model")["ckpt-manifest.json"])
        assert pushed["checkpoint"] == "tiny-run/checkpoint-200"
        assert json.loads((out / "ckpt-manifest.json").read_text())["checkpoint"] == str(EXAMPLE / "checkpoint-200")

    def test_names_of_buckets_are_not_pushed_either(self, out: Path) -> None:
        ckpt_cli.merge(EXAMPLE, out)
        text = (out / "ckpt-manifest.json").read_text().replace(str(EXAMPLE), "s3://secret-bucket/deep/runs/a")
        (out / "ckpt-manifest.json").write_text(text)
        public = json.loads(public_manifest(out, manifest_of(out)))
        assert public["checkpoint"] == "a/checkpoint-200"
        assert public["sources"][0]["path"] == "a/checkpoint-200/pytorch_model_fsdp_0/model_world_size_4_rank_0.pt"
        assert "secret" not in json.dumps(public)

    def test_the_pushed_folder_can_be_verified_where_it_is_downloaded(self, hub: Hub, out: Path, tmp_path: Path) -> None:
        merge(out)
        download = tmp_path / "download"
        download.mkdir()
        for name, data in hub.files("me/model").items():
            (download / name).write_bytes(data)
        found = ckpt_cli.verify(download, full=True, against=EXAMPLE)
        assert (found.exit_code, found.checksums) == (0, 24)
        (download / WEIGHTS).write_bytes((out / WEIGHTS).read_bytes()[:-4] + b"\1\2\3\4")
        assert ckpt_cli.verify(download, full=True).exit_code == 1

    def test_the_output_with_its_card_is_still_one_that_ckpt_wrote(self, hub: Hub, out: Path) -> None:
        merge(out)
        assert ckpt_cli.verify(out, full=True).findings == ckpt_cli.verify(out).findings
        assert not [found for found in ckpt_cli.verify(out).findings if found.severity != "info"]
        assert merge(out, overwrite=True).exit_code == 0

    def test_pushing_again_changes_nothing(self, hub: Hub, out: Path) -> None:
        merge(out)
        before = dict(hub.files("me/model"))
        again = ckpt_cli.publish(out, push_to_hub="me/model")
        assert (again.exit_code, again.notes, len(hub.uploaded)) == (0, (), 1)
        assert hub.files("me/model") == before
        assert len(hub.repos["me/model"].commits) == 1

    def test_every_step_goes_to_its_branch(self, hub: Hub, tmp_path: Path) -> None:
        for step in (100, 200):
            merge(tmp_path / str(step), step=step, branch="{run}/step{step}")
            assert hub.files("me/model", f"tiny-run/step{step}")[WEIGHTS] == (tmp_path / str(step) / WEIGHTS).read_bytes()
        assert set(hub.repos["me/model"].branches) == {"main", "tiny-run/step100", "tiny-run/step200"}
        assert WEIGHTS not in hub.files("me/model")

    @pytest.mark.parametrize("size", [None, 20_000])
    def test_headers_and_cuts_of_two_steps_are_equal(self, hub: Hub, tmp_path: Path, size: int | None) -> None:
        """So that parts of files which did not change are known to the Hub."""
        told = []
        for step in (100, 200):
            merge(tmp_path / str(step), step=step, branch=f"step{step}", max_shard_size=size)
            files = {name: data for name, data in hub.files("me/model", f"step{step}").items() if ".safetensors" in name}
            headers = {}
            for name in sorted(files):
                if name.endswith(".json"):
                    headers[name] = files[name]
                    continue
                length = int.from_bytes(files[name][:8], "little")
                headers[name] = files[name][: 8 + length]
                with safe_open(tmp_path / str(step) / name, "np") as opened:
                    assert list(opened.offset_keys()) == [key for key in json.loads(files[name][8 : 8 + length]) if key != "__metadata__"]
            told.append(headers)
        assert len(told[0]) == (1 if size is None else 5)
        assert told[0] == told[1]

    def test_weights_of_an_older_output_do_not_stay_beside_the_new_ones(self, hub: Hub, tmp_path: Path) -> None:
        merge(tmp_path / "a", max_shard_size=20_000)
        hub.files("me/model").update({"adapter/model.safetensors": b"", "ema.safetensors": b"", "notes.txt": b""})
        result = merge(tmp_path / "b")
        assert result.push is not None
        assert len(result.push.removed) == 5
        left = set(hub.files("me/model"))
        assert {name for name in left if ".safetensors" in name} == {WEIGHTS, "adapter/model.safetensors", "ema.safetensors"}
        assert "notes.txt" in left

    def test_what_ckpt_wrote_there_before_does_not_stay(self, hub: Hub, tmp_path: Path) -> None:
        """Weights under another name, and a tokenizer that this output does not have."""
        merge(tmp_path / "a", weights_name="weights.safetensors")
        run = tmp_path / "run"
        shutil.copytree(EXAMPLE, run)
        for path in [*run.rglob("tokenizer*"), *run.rglob("special_tokens_map.json")]:
            path.unlink()
        result = ckpt_cli.merge(run, tmp_path / "b", push_to_hub="me/model")
        assert result.push is not None
        assert {"weights.safetensors", "tokenizer.json"} <= set(result.push.removed)
        assert set(hub.files("me/model")) == {path.name for path in (tmp_path / "b").iterdir()} | {".gitattributes"}

    def test_an_adapter_that_ckpt_pushed_makes_way_for_the_whole_model(self, hub: Hub, out: Path) -> None:
        hub.repos["me/model"] = Repo()
        listed = {"adapter_model.safetensors": 1}
        manifest = {"tool": "ckpt", "schema": 1, "options": {}, "outputs": listed, "side_files": ["adapter_config.json"]}
        there = {"ckpt-manifest.json": json.dumps(manifest).encode(), "adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
        hub.files("me/model").update(there)
        result = merge(out)
        assert result.push is not None
        assert result.push.removed == ("adapter_config.json", "adapter_model.safetensors")
        assert set(hub.files("me/model")) == {path.name for path in out.iterdir()} | {".gitattributes"}

    @pytest.mark.parametrize(
        ("names", "options"),
        [
            (["adapter_config.json", "adapter_model.safetensors"], {}),
            (["consolidated.00.pth"], {}),
            (["vocab.json", "merges.txt"], {}),
            (["additional_chat_templates/tool_use.jinja"], {}),
            (["additional_chat_templates/default.jinja", "chat_template.jinja"], {}),
            (["custom_generate/generate.py", "custom_generate/requirements.txt"], {}),
            (["hf_quant_config.json"], {}),
            (["quantize_config.json", "quantization_config.json"], {}),
            ([WEIGHTS], {"weights_name": "weights.safetensors"}),
            (["pytorch_model-00001-of-00002.bin"], {"weights_name": "weights.safetensors"}),
        ],
        ids=str,
    )
    def test_files_of_others_that_would_be_loaded_are_refused_before_anything_is_uploaded(
        self, hub: Hub, out: Path, names: list[str], options: dict[str, Any]
    ) -> None:
        hub.repos["me/model"] = Repo()
        hub.files("me/model").update(dict.fromkeys(names, b"theirs"))
        before = dict(hub.files("me/model"))
        result = merge(out, **options)
        assert result.exit_code == 5
        assert result.error is not None
        assert all(name in result.error.message for name in names)
        assert (hub.files("me/model"), hub.uploaded, hub.repos["me/model"].commits) == (before, [], [])
        for name in names:
            del hub.files("me/model")[name]
        command = shlex.split((result.error.hint or "").partition("then run: ")[2])
        assert command == ["ckpt", "publish", str(out), "--push-to-hub", "me/model"]
        assert ckpt_cli.publish(out, push_to_hub="me/model").exit_code == 0

    def test_other_files_of_a_model_are_a_warning(self, hub: Hub, out: Path, tmp_path: Path) -> None:
        hub.repos["me/model"] = Repo()
        theirs = ("ema.safetensors", "pytorch_model.bin", "preprocessor_config.json", "LICENSE", "notes.txt", "onnx/model.onnx")
        hub.files("me/model").update(dict.fromkeys(theirs, b"{}"))
        done = ckpt("merge", EXAMPLE, "-o", out, "--push-to-hub", "me/model")
        assert done.code == 0
        said = "me/model also has files of a model that are not of this output, and they stay: "
        assert f"warning: {said}ema.safetensors, preprocessor_config.json, pytorch_model.bin\n" in done.err.replace("\n  ", " ")
        assert set(theirs) < set(hub.files("me/model"))
        refused = ckpt_cli.publish(out, push_to_hub="me/model")
        assert refused.push is not None
        assert [note.code for note in refused.push.notes] == ["left-in-repository"]
        strict = merge(tmp_path / "strict", strict=True)
        assert strict.exit_code == 5
        assert strict.error is not None
        assert "ema.safetensors" in strict.error.message

    def test_what_no_loader_reads_with_the_output_stays(self, hub: Hub, tmp_path: Path) -> None:
        """Templates where no tokenizer is pushed, and settings of codes beside weights that have scales; other files of such folders."""
        source = tmp_path / "quantised"
        source.mkdir()
        save_file({"w.weight": numpy.ones((4, 4), "float32"), "w.weight_scale": numpy.ones((4, 1), "float32")}, source / WEIGHTS)
        hub.repos["me/model"] = Repo()
        theirs = ("additional_chat_templates/tool_use.jinja", "hf_quant_config.json", "tool.jinja")
        others = ("additional_chat_templates/notes.md", "custom_generate/README.md", "templates/tool_use.jinja", "old/hf_quant_config.json")
        hub.files("me/model").update(dict.fromkeys((*theirs, *others), b"{}"))
        result = ckpt_cli.merge(source, tmp_path / "out", push_to_hub="me/model")
        assert result.push is not None
        assert result.push.error is None
        assert [note.text.partition("stay: ")[2] for note in result.push.notes] == [", ".join(theirs)]
        assert {*theirs, *others} < set(hub.files("me/model"))

    def test_a_template_that_ckpt_pushed_is_removed(self, hub: Hub, out: Path) -> None:
        hub.repos["me/model"] = Repo()
        template = "additional_chat_templates/tool_use.jinja"
        manifest = {"tool": "ckpt", "schema": 1, "options": {}, "outputs": {WEIGHTS: 1}, "side_files": [template]}
        hub.files("me/model").update({"ckpt-manifest.json": json.dumps(manifest).encode(), template: b"old"})
        result = merge(out)
        assert result.push is not None
        assert result.push.removed == (template,)

    def test_on_the_command_line(self, hub: Hub, out: Path) -> None:
        done = ckpt("merge", EXAMPLE, "-o", out, "--push-to-hub", "me/model", "--branch", "step{step}")
        assert done.code == 0
        assert f"pushed      {hub.url}/me/model/tree/step200   6 files" in done.out
        assert "verified    identical to" in done.out
        assert "next: ckpt inspect" in done.err
        assert hub.files("me/model", "step200")[WEIGHTS] == (out / WEIGHTS).read_bytes()
        assert TOKEN not in done.out + done.err


class TestCard:
    def test_it_says_where_the_weights_come_from(self, hub: Hub, out: Path) -> None:
        import yaml

        merge(out, step=100)
        text = (out / "README.md").read_text()
        head = yaml.safe_load(text.split("---\n")[1])
        assert head == {"library_name": "transformers", "tags": ["ckpt"]}
        for said in ("| step | 100 |", "| method | merge |", "| trainer | lmms-engine |", f"| tool | ckpt {ckpt_cli.__version__} |"):
            assert said in text
        assert "| dtype | F32 (18,200 parameters) |" in text
        assert "24 tensors with the checkpoint's model: identical, bit for bit" in text
        assert "names and shapes with the 24 tensors of Qwen3ForCausalLM" in text
        assert "- `tiny-run/checkpoint-100/pytorch_model_fsdp_0/model_world_size_4_rank_0.pt`, 33,926 bytes" in text

    def test_an_average_names_its_steps_and_weights(self, hub: Hub, out: Path) -> None:
        ckpt_cli.average(EXAMPLE, out, everything=True, weights=(1, 3), push_to_hub="me/model")
        text = (out / "README.md").read_text()
        assert "| method | weighted average: step 100 x 0.25 + step 200 x 0.75, each element rounded once |" in text
        assert "every value of 24 tensors read" in text

    @pytest.mark.parametrize(
        ("base", "config", "named"),
        [
            ("/cache/models--org--base-1.5B/snapshots/" + "a" * 40, {"_name_or_path": "/disk/base"}, "org/base-1.5B"),
            ("/disk/base", {"_name_or_path": "org/base-1.5B"}, None),
            (None, {"_name_or_path": "org/base-1.5B"}, None),
            (None, {"_name_or_path": "models/Qwen3-8B"}, None),
            (None, {"_name_or_path": "runs/sft"}, None),
            (None, {"_name_or_path": "/disk/base"}, None),
            (None, {"_name_or_path": "tests/data"}, None),
            (None, {"_name_or_path": 7}, None),
            ("/disk/base", {}, None),
        ],
    )
    def test_the_base_model_is_named_if_it_is_known(self, out: Path, base: str | None, config: dict[str, Any], named: str | None) -> None:
        import yaml

        ckpt_cli.merge(EXAMPLE, out)
        (out / "config.json").write_text(json.dumps(config))
        manifest = manifest_of(out)
        text = card.card(out, replace(manifest, facts={**manifest.facts, "base": base}), ())
        assert yaml.safe_load(text.split("---\n")[1]).get("base_model") == named
        unproved = config.get("_name_or_path")
        said = f"not known, config.json names {unproved}" if unproved in ("org/base-1.5B", "models/Qwen3-8B", "runs/sft") else "not known"
        assert f"| base model | {named or said} |" in text

    def test_an_average_names_no_base_that_only_its_newest_config_does(self, tmp_path: Path) -> None:
        import yaml

        from tests import tiny

        paths = [
            tiny.folder(tmp_path / name, tiny.weights(seed), tiny.classless(_name_or_path=f"org/{name}")) for seed, name in enumerate("ab")
        ]
        ckpt_cli.average(paths, tmp_path / "mean")
        text = card.card(tmp_path / "mean", manifest_of(tmp_path / "mean"), ())
        assert "base_model" not in yaml.safe_load(text.split("---\n")[1])
        assert "| base model | not known, config.json names org/b |" in text

    def test_a_card_that_people_wrote_stays(self, hub: Hub, out: Path) -> None:
        hub.repos["me/model"] = Repo()
        hub.files("me/model")["README.md"] = b"# ours\n"
        result = merge(out)
        assert result.push is not None
        assert result.push.card == "kept"
        assert hub.files("me/model")["README.md"] == b"# ours\n"
        assert WEIGHTS in hub.files("me/model")

    def test_a_card_of_ckpt_is_brought_up_to_date_until_somebody_edits_it(self, hub: Hub, tmp_path: Path) -> None:
        merge(tmp_path / "a", step=100)
        merge(tmp_path / "b", step=200)
        ours = hub.files("me/model")["README.md"]
        assert b"| step | 200 |" in ours
        edited = ours.replace(b"| merge |", b"| merge, and it works |")
        hub.files("me/model")["README.md"] = edited
        merge(tmp_path / "c", step=100)
        assert hub.files("me/model")["README.md"] == edited

    def test_a_card_beside_the_weights_stays(self, hub: Hub, out: Path, tmp_path: Path) -> None:
        shutil.copytree(EXAMPLE / "checkpoint-200", tmp_path / "run" / "checkpoint-200")
        home = tmp_path / "run" / "checkpoint-200" / "pytorch_model_fsdp_0" / "huggingface"
        home.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EXAMPLE / "checkpoint-200" / name, home / name)
        (home / "README.md").write_text("# of the run\n")
        ckpt_cli.merge(tmp_path / "run", out, push_to_hub="me/model")
        assert (out / "README.md").read_text() == "# of the run\n"
        assert hub.files("me/model")["README.md"] == b"# of the run\n"

    def test_a_card_that_is_written_by_hand_before_pushing_is_pushed(self, hub: Hub, out: Path) -> None:
        ckpt_cli.merge(EXAMPLE, out)
        (out / "README.md").write_text("# by hand\n")
        (out / "scores.txt").write_text("7")
        assert ckpt_cli.publish(out, push_to_hub="me/model").exit_code == 0
        assert hub.files("me/model")["README.md"] == b"# by hand\n"
        assert "scores.txt" not in hub.files("me/model")

    @pytest.mark.parametrize(
        "facts", [{"averaged": [7, {"step": None}]}, {"sources": "x"}, {"sources": [{"size": "?"}]}, {"versions": 7, "step": "x"}]
    )
    def test_a_manifest_that_somebody_changed(self, out: Path, facts: dict[str, Any]) -> None:
        ckpt_cli.merge(EXAMPLE, out)
        manifest = manifest_of(out)
        assert card.is_own(card.card(out, replace(manifest, facts={**manifest.facts, **facts}), ()))

    def test_an_adapter_names_its_base_model(self, out: Path) -> None:
        import yaml

        ckpt_cli.merge(EXAMPLE, out)
        (out / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
        head = yaml.safe_load(card.card(out, manifest_of(out), ()).split("---\n")[1])
        assert (head["library_name"], head["base_model"]) == ("peft", "org/base")

    def test_names_from_files_are_only_text(self, hub: Hub, out: Path, tmp_path: Path) -> None:
        hostile = tmp_path / "run | <script> `x`\n# y"
        shutil.copytree(EXAMPLE / "checkpoint-200", hostile / "checkpoint-200")
        ckpt_cli.merge(hostile, out, push_to_hub="me/model")
        text = (out / "README.md").read_text()
        assert card.is_own(text)
        table, sources = text.split("## Sources")
        assert "<script>" not in table
        assert "\n# y" not in text
        assert "- `run | <script> 'x'\\n# y/checkpoint-200/" in sources

    def test_without_the_option_there_is_no_card(self, out: Path) -> None:
        ckpt_cli.merge(EXAMPLE, out)
        assert not (out / "README.md").exists()


REFUSED = {
    "token": (Fault("POST", "repos/create", 401, message="Invalid credentials in Authorization header"), "does not accept the token"),
    "namespace": (Fault("POST", "repos/create", 403, message="You don't have the rights"), "the token may not write to me/model"),
    "not there": (Fault("POST", "/branch/", 404, "RepoNotFound", "Repository not found"), "has no me/model that this token may see"),
    "gated": (Fault("GET", "/tree/", 403, "GatedRepo", "Access is restricted"), "me/model is gated"),
    "plan": (Fault("POST", "/preupload/", 402, message="Payment required"), "storage of the account is used up"),
    "storage": (
        Fault("POST", "/objects/batch", 403, message="Private repository storage limit reached"),
        "storage of the account is used up",
    ),
    "large": (Fault("PUT", "/lfs/", 413, message="Payload too large"), "no room for this upload"),
    "full": (Fault("PUT", "/lfs/", 507, message="Insufficient storage"), "no room for this upload"),
    "rate": (Fault("POST", "/preupload/", 429, message="Too many", headers={"Retry-After": "70"}), "rate limit is reached"),
    "race": (Fault("POST", "/commit/", 409, message="The branch moved"), "something else changed me/model"),
    "broken": (Fault("POST", "/objects/batch", 503, message="Down"), "the Hub has trouble (HTTP 503)"),
    "connection": (Fault("PUT", "/lfs/", 0), "there is no connection to the Hub, or it broke"),
}


class TestFailures:
    @pytest.mark.parametrize("name", REFUSED)
    def test_the_output_stays_and_the_command_that_is_named_goes_on(self, hub: Hub, out: Path, name: str) -> None:
        fault, said = REFUSED[name]
        hub.faults.append(fault)
        result = merge(out, branch="step{step}")
        assert result.exit_code == 5
        assert result.error is not None
        assert result.error.code == "push-failed"
        assert said in result.error.message
        assert TOKEN not in str(result)
        if fault.message and fault.status not in (413, 507):
            assert fault.message in " ".join(result.error.details)
        command = f"ckpt publish {out} --push-to-hub me/model --branch step200"
        assert result.error.hint is not None
        assert result.error.hint.endswith(f", then run: {command}")
        assert (out / WEIGHTS).is_file()
        if name not in ("namespace", "storage", "full", "connection"):
            return
        hub.faults.clear()
        done = ckpt_cli.publish(out, push_to_hub="me/model", branch="step200")
        assert done.exit_code == 0
        assert hub.files("me/model", "step200")[WEIGHTS] == (out / WEIGHTS).read_bytes()
        assert hub.files("me/model", "step200")["README.md"] == (out / "README.md").read_bytes()

    def test_a_connection_that_breaks_once_is_tried_again(self, hub: Hub, out: Path) -> None:
        hub.faults.append(Fault("PUT", "/lfs/", 0, times=1))
        assert merge(out).exit_code == 0

    def test_what_was_uploaded_is_not_uploaded_again(self, hub: Hub, out: Path) -> None:
        """Cut off in the middle of four files: the rest is uploaded the next time, and no commit has less than all."""
        uploads = Fault("PUT", "/lfs/", 0)
        hub.faults.append(uploads)
        first = merge(out, max_shard_size=20_000)
        assert first.exit_code == 5
        names = sorted(path.name for path in out.glob("*.safetensors"))
        assert len(names) == 4
        hub.faults.clear()
        hub.faults.append(Fault("POST", "/commit/", 500))
        assert ckpt_cli.publish(out, push_to_hub="me/model").exit_code == 5
        assert len(hub.uploaded) == 4
        assert hub.repos["me/model"].commits == []
        hub.faults.clear()
        assert ckpt_cli.publish(out, push_to_hub="me/model").exit_code == 0
        assert len(hub.uploaded) == 4
        assert len(hub.repos["me/model"].commits) == 1

    def test_nobody_answers(self, hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        result = merge(out)
        assert result.error is not None
        assert "there is no connection to the Hub" in result.error.message
        assert (out / WEIGHTS).is_file()

    def test_on_the_command_line(self, hub: Hub, out: Path) -> None:
        hub.faults.append(Fault("POST", "repos/create", 403, message="You don't have the rights"))
        done = ckpt("merge", EXAMPLE, "-o", out, "--push-to-hub", "me/model")
        assert done.code == 5
        assert "error[push-failed]: the token may not write to me/model\n  You don't have the rights\n" in done.err
        assert f"then run: ckpt publish {out} --push-to-hub me/model" in done.err
        assert "wrote" in done.out
        assert "Traceback" not in done.err
        quiet = ckpt("merge", EXAMPLE, "-o", out, "--overwrite", "--push-to-hub", "me/model", "-q")
        assert (quiet.code, quiet.out) == (5, f"{out}\n")
        assert "ckpt publish" in quiet.err
        told = json.loads(ckpt("publish", out, "--push-to-hub", "me/model", "--json").out)
        assert (told["exit_code"], told["errors"][0]["code"], told["data"]["outputs"][0]["output"]) == (5, "push-failed", str(out))

    def test_what_is_wrong_is_not_pushed(self, hub: Hub, out: Path) -> None:
        ckpt_cli.merge(EXAMPLE, out, checksum=True)
        data = bytearray((out / WEIGHTS).read_bytes())
        data[-3] ^= 255
        (out / WEIGHTS).write_bytes(data)
        result = ckpt_cli.publish(out, push_to_hub="me/model")
        assert result.exit_code == 1
        assert result.error is not None
        assert "its verification found errors" in result.error.message
        assert hub.repos == {}

    def test_strict_does_not_push_what_has_warnings(self, hub: Hub, out: Path, tmp_path: Path) -> None:
        merge(out)
        found = ckpt_cli.verify(out).model_copy(update={"findings": (Finding(code="some", severity="warning", message="odd"),)})
        to = Destination("me/strict")
        assert delivered(out, to, (found,)).error is None
        refused = delivered(out, to, (found,), strict=True)
        assert refused.error is not None
        assert (refused.error.details, refused.exit_code) == (("some: odd",), 5)

    def test_xet_tells_the_answer_of_the_hub_in_words(self, hub: Hub, out: Path) -> None:
        """The real hf_xet: the stand-in has no such store."""
        done = ckpt("merge", EXAMPLE, "-o", out, "--push-to-hub", "me/model", HF_HUB_DISABLE_XET="0")
        assert done.code == 5
        assert "error[push-failed]: the Hub has no me/model that this token may see" in done.err
        assert "xet-write-token" in done.err

    def test_a_public_repository_is_not_private(self, hub: Hub, out: Path) -> None:
        hub.repos["me/model"] = Repo(private=False)
        result = merge(out, private=True)
        assert result.error is not None
        assert "me/model is public" in result.error.message
        assert hub.repos["me/model"].commits == []


class TestBeforeAnythingIsWritten:
    """--dry-run checks the same, and the Hub is asked nothing."""

    @pytest.mark.parametrize("dry_run", [True, False])
    @pytest.mark.parametrize(
        "options",
        [
            {"push_to_hub": "a/b/c"},
            {"push_to_hub": "https://me:hf_secret@huggingface.co/me/model"},
            {"push_to_hub": "./out"},
            {"push_to_hub": "me/mo del"},
            {"push_to_hub": "me/model.git"},
            {"push_to_hub": "me/a--b"},
            {"push_to_hub": "-me/model"},
            {"push_to_hub": "me/" + "x" * 97},
            {"push_to_hub": ""},
            {"push_to_hub": None, "private": True},
            {"push_to_hub": None, "branch": "step"},
            {"branch": "step{stpe}"},
            {"branch": "step{}"},
            {"branch": "step{step"},
            {"branch": "a..b"},
            {"branch": "refs/pr/1"},
            {"branch": "a b"},
            {"branch": "/a"},
            {"branch": "a.lock"},
            {"type": "both"},
            {"part": "0/2"},
            {"in_place": True},
        ],
    )
    def test_options_that_cannot_be(self, hub: Hub, out: Path, options: dict[str, Any], dry_run: bool) -> None:
        target = None if options.get("in_place") else out
        with pytest.raises(UsageError) as caught:
            ckpt_cli.merge(EXAMPLE, target, **{"push_to_hub": "me/model", "dry_run": dry_run, **options})
        assert "hf_secret" not in str(caught.value)
        assert not out.exists()
        assert hub.asked == []

    def test_the_form_of_an_id_is_shown(self, hub: Hub, out: Path) -> None:
        for given in ("bad id", "a/b/c", "me/"):
            with pytest.raises(UsageError) as caught:
                merge(out, push_to_hub=given)
            assert caught.value.hint == "write it as user/name, or organization/name"

    @pytest.mark.parametrize("given", ["https://huggingface.co/me/model", "hf://me/model", "huggingface.co/me/model/"])
    def test_an_address_of_the_hub(self, hub: Hub, out: Path, given: str) -> None:
        with pytest.raises(UsageError) as caught:
            merge(out, push_to_hub=given)
        assert caught.value.hint == "did you mean me/model?"

    @pytest.mark.parametrize("repo", ["me/model", "model", "Org-1/Model_2.5-x", "a", "_a/b_"])
    def test_ids_are_those_that_huggingface_hub_takes(self, hub: Hub, out: Path, repo: str) -> None:
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(repo)
        assert merge(out, push_to_hub=repo, dry_run=True).push is not None

    def test_a_step_that_nothing_names(self, hub: Hub, out: Path, tmp_path: Path) -> None:
        shutil.copytree(EXAMPLE / "checkpoint-200", tmp_path / "final")
        with pytest.raises(UsageError, match="which step"):
            ckpt_cli.merge(tmp_path / "final", out, push_to_hub="me/model", branch="step{step}")
        assert not out.exists()

    @pytest.mark.parametrize("dry_run", [True, False])
    def test_there_must_be_a_token(self, hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool) -> None:
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(PushFailed, match="no token"):
            merge(out, dry_run=dry_run)
        assert not out.exists()
        (Path(os.environ["HF_HOME"])).mkdir()
        (Path(os.environ["HF_HOME"]) / "token").write_text(TOKEN)
        assert merge(out, dry_run=dry_run).exit_code == 0

    def test_nothing_is_pushed_offline(self, hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(PushFailed, match="HF_HUB_OFFLINE"):
            merge(out)
        assert not out.exists()

    def test_without_huggingface_hub(self, hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(Unsupported) as caught:
            merge(out)
        assert "'.[hub]'" in str(caught.value.hint)
        assert not out.exists()

    def test_a_dry_run_says_where_it_would_go(self, hub: Hub, out: Path) -> None:
        done = ckpt("merge", EXAMPLE, "-o", out, "--push-to-hub", "me/model", "--branch", "step{step}", "--dry-run")
        assert done.code == 0
        assert f"would push   {hub.url}/me/model/tree/step200" in done.out
        assert f"next: ckpt merge {EXAMPLE} -o {out} --push-to-hub me/model --branch 'step{{step}}'" in done.err
        assert hub.asked == []

    @pytest.mark.parametrize("kind", ["path", "parent", "link", "folder link"])
    def test_no_other_file_of_this_machine_is_pushed(self, hub: Hub, out: Path, tmp_path: Path, kind: str) -> None:
        """The folder may come from somebody else."""
        secret = tmp_path / "secrets" / "key.txt"
        secret.parent.mkdir()
        secret.write_text("secret")
        ckpt_cli.merge(EXAMPLE, out)
        manifest = json.loads((out / "ckpt-manifest.json").read_text())
        if kind == "link":
            (out / "tokenizer_config.json").unlink()
            (out / "tokenizer_config.json").symlink_to(secret)
        elif kind == "folder link":
            (out / "deep").symlink_to(secret.parent)
            manifest["side_files"].append("deep/key.txt")
        else:
            manifest["side_files"].append(str(secret) if kind == "path" else "../secrets/key.txt")
        (out / "ckpt-manifest.json").write_text(json.dumps(manifest))
        assert delivered(out, Destination("me/model"), ()).exit_code == 5
        assert hub.asked == []

    def test_a_folder_that_ckpt_did_not_write(self, hub: Hub, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        with pytest.raises(ckpt_cli.CkptError):
            ckpt_cli.publish(tmp_path / "other", push_to_hub="me/model")
        assert hub.asked == []


class TestParts:
    def test_publish_pushes_what_parts_wrote(self, hub: Hub, out: Path) -> None:
        for part in ("0/2", "1/2"):
            ckpt_cli.merge(EXAMPLE, out, part=part)
        result = ckpt_cli.publish(out, push_to_hub="me/model", branch="{run}-{step}")
        assert (result.exit_code, result.outputs[0].parts) == (0, 2)
        assert hub.files("me/model", "tiny-run-200")[WEIGHTS] == (out / WEIGHTS).read_bytes()
        assert b"| step | 200 |" in hub.files("me/model", "tiny-run-200")["README.md"]

    def test_the_hint_for_a_part_is_that_command(self, hub: Hub, out: Path) -> None:
        with pytest.raises(UsageError) as caught:
            merge(out, part="0/2")
        assert "ckpt publish OUTPUT --push-to-hub me/model" in str(caught.value.hint)

    def test_one_repository_takes_one_folder(self, hub: Hub, tmp_path: Path) -> None:
        for name in ("a", "b"):
            ckpt_cli.merge(EXAMPLE, tmp_path / name)
        with pytest.raises(UsageError, match="one folder"):
            ckpt_cli.publish([tmp_path / "a", tmp_path / "b"], push_to_hub="me/model")


class TestWatch:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        """A run that ended yesterday, so that nothing has to be waited for."""
        shutil.copytree(EXAMPLE, tmp_path / "run")
        for path in (tmp_path / "run").rglob("*"):
            os.utime(path, (time.time() - 86400,) * 2)
        return tmp_path / "run"

    def watch(self, run: Path, out: Path, **options: Any) -> WatchResult:
        return ckpt_cli.watch(run, out, **{"once": True, "settle": 0, "push_to_hub": "me/model", "branch": "step{step}", **options})

    def events(self, out: Path) -> list[tuple[str, int, int]]:
        lines = [json.loads(line) for line in (out / "watch.jsonl").read_text().splitlines()]
        return [(line["event"], line["step"], line["exit_code"]) for line in lines]

    @pytest.mark.parametrize("average", [None, "last=2"])
    def test_every_step_is_pushed_to_its_branch_once(self, hub: Hub, run: Path, out: Path, average: str | None) -> None:
        result = self.watch(run, out, average=average)
        steps = [100, 200] if average is None else [200]
        assert result.exit_code == 0
        assert self.events(out) == [(event, step, 0) for step in steps for event in ("made", "pushed")]
        for step in steps:
            files = hub.files("me/model", f"step{step}")
            assert files[WEIGHTS] == (out / f"step-{step}" / WEIGHTS).read_bytes()
            compared = b"identical, bit for bit" if average is None else b"every value of 24 tensors read"
            assert compared in files["README.md"]
        line = json.loads((out / "watch.jsonl").read_text().splitlines()[1])
        assert (line["push"]["repo"], line["push"]["branch"], line["push"]["commit"][:1] != "") == ("me/model", f"step{steps[0]}", True)
        asked = list(hub.asked)
        assert self.watch(run, out, average=average).events == ()
        assert hub.asked == asked

    def test_a_push_that_fails_is_noted_and_done_the_next_time(self, hub: Hub, run: Path, out: Path) -> None:
        hub.faults.append(Fault("POST", "/commit/step100", 403, message="no rights"))
        result = self.watch(run, out, execute="true {output}", keep=1)
        assert result.exit_code == 5
        assert self.events(out) == [
            ("made", 100, 0),
            ("pushed", 100, 5),
            ("ran", 100, 0),
            ("made", 200, 0),
            ("pushed", 200, 0),
            ("ran", 200, 0),
        ]
        failed = json.loads((out / "watch.jsonl").read_text().splitlines()[1])
        assert (failed["error"], failed["message"]) == ("push-failed", "the token may not write to me/model: no rights")
        assert (out / "step-100").is_dir()
        assert TOKEN not in (out / "watch.jsonl").read_text()
        hub.faults.clear()
        assert self.watch(run, out, execute="true {output}", keep=1).exit_code == 0
        assert self.events(out)[6:] == [("pushed", 100, 0), ("removed", 100, 0)]
        assert WEIGHTS in hub.files("me/model", "step100")

    def test_a_watch_that_goes_on_tries_at_every_look(self, hub: Hub, run: Path, out: Path) -> None:
        hub.faults.append(Fault("POST", "/commit/", 500, times=2))
        told: list[WatchEvent] = []

        def event(happened: WatchEvent) -> None:
            told.append(happened)
            if happened.event == "pushed" and not happened.exit_code:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.watch(run, out, once=False, interval=0.05, since=200, listener=Listener(event=event))
        # The same failure is noted once.
        assert [(each.event, each.exit_code) for each in told] == [("made", 0), ("pushed", 5), ("pushed", 0)]

    def test_outputs_of_an_earlier_watch_are_verified_and_pushed(self, hub: Hub, run: Path, out: Path) -> None:
        ckpt_cli.watch(run, out, once=True, settle=0)
        weights = out / "step-100" / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-40])
        result = self.watch(run, out)
        # What lost bytes since is not pushed at all.
        assert result.exit_code == 4
        assert self.events(out)[2:] == [("failed", 100, 4), ("pushed", 200, 0)]
        assert "step100" not in hub.repos["me/model"].branches
        assert b"every value of 24 tensors read" in hub.files("me/model", "step200")["README.md"]

    def test_what_stays_in_a_repository_is_noted(self, hub: Hub, run: Path, out: Path) -> None:
        hub.repos["me/model"] = Repo()
        hub.files("me/model")["old.safetensors"] = b"theirs"
        result = self.watch(run, out, since=200, branch=None)
        assert [event.event for event in result.events] == ["made", "pushed"]
        assert "old.safetensors" in result.events[1].warnings[0]

    def test_another_destination_is_another_push(self, hub: Hub, run: Path, out: Path) -> None:
        self.watch(run, out, since=200)
        self.watch(run, out, since=200, push_to_hub="other", branch=None)
        self.watch(run, out, since=200, push_to_hub="other", branch=None)
        assert self.events(out) == [("made", 200, 0), ("pushed", 200, 0), ("pushed", 200, 0)]
        assert set(hub.repos) == {"me/model", "me/other"}

    def test_several_runs(self, hub: Hub, run: Path, out: Path, tmp_path: Path) -> None:
        shutil.copytree(run, tmp_path / "second", copy_function=shutil.copy2)
        with pytest.raises(UsageError, match="one branch"):
            ckpt_cli.watch([run, tmp_path / "second"], out, once=True, push_to_hub="me/model", branch="step{step}")
        assert not out.exists()
        result = ckpt_cli.watch(
            [run, tmp_path / "second"], out, once=True, settle=0, since=200, push_to_hub="me/model", branch="{run}/{step}"
        )
        assert result.exit_code == 0
        assert set(hub.repos["me/model"].branches) == {"main", "run/200", "second/200"}

    @pytest.mark.parametrize("options", [{"branch": "{stpe}"}, {"push_to_hub": "a/b/c"}, {"push_to_hub": None}, {"type": "both"}])
    def test_options_that_cannot_be(self, hub: Hub, run: Path, out: Path, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            self.watch(run, out, **options)
        assert not list(out.glob("step-*"))
        assert hub.asked == []

    def test_a_watch_that_was_killed_before_the_card_was_written(self, hub: Hub, run: Path, out: Path) -> None:
        ckpt_cli.merge(run, out / "step-200", step=200)
        assert self.watch(run, out, since=200).exit_code == 0
        assert b"every value of 24 tensors read" in hub.files("me/model", "step200")["README.md"]

    def test_on_the_command_line(self, hub: Hub, run: Path, out: Path) -> None:
        hub.faults.append(Fault("POST", "/branch/step100", 403, message="no rights"))
        done = ckpt("watch", run, "-o", out, "--once", "--settle", "0", "--push-to-hub", "me/model", "--branch", "step{step}")
        assert done.code == 5
        assert f"step 200  pushed  {hub.url}/me/model/tree/step200   87 KB in" in done.out
        assert "error[push-failed]: step 100: the token may not write to me/model: no rights" in done.err


def test_tasks_of_a_cluster_push_nothing() -> None:
    """What is pushed is pushed once, by the process that publishes."""
    options = MergeOptions(push_to_hub="me/model", private=True, branch="b")
    assert not {"push_to_hub", "private", "branch"} & part_call(ckpt_cli.merge, [], options, reads=()).keywords.keys()


def test_bars_of_an_upload_go_away_when_they_are_done() -> None:
    """Those of huggingface_hub itself, on what it takes for a terminal of 80 and 120 columns."""
    import io

    from huggingface_hub.utils import tqdm

    from ckpt_cli.pushing.upload import _quiet

    for columns in (80, 120):
        shown = io.StringIO()
        with _quiet(bars=True):
            bar = tqdm(total=10, desc="model.safetensors", file=shown, ncols=columns, disable=False)
            bar.update(10)
            bar.close()
        assert "model.safetensors" in shown.getvalue()
        assert shown.getvalue().split("\r")[-1].strip() == shown.getvalue().split("\r")[-2].strip() == ""
        assert "\n" not in shown.getvalue()
    assert tqdm(total=1, file=io.StringIO(), disable=False).leave is True
