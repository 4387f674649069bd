"""Adapters and the model that they were trained on: one that holds them already, and one of another name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests import tiny
from tests.tensors import differences, load


def notes(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes}


class TestTheSameAdapterAgain:
    def run(self, tmp_path: Path) -> tuple[Path, Path, Path]:
        base = tiny.folder(tmp_path / "base", tiny.weights())
        adapter = tiny.adapter(tmp_path / "adapter", tiny.factors(), base)
        ckpt_cli.merge(adapter, tmp_path / "fused", base=base)
        return base, adapter, tmp_path / "fused"

    def test_is_refused_and_the_base_named(self, tmp_path: Path) -> None:
        base, adapter, fused = self.run(tmp_path)
        with pytest.raises(Inconsistent, match="already holds this adapter") as caught:
            ckpt_cli.merge(adapter, tmp_path / "out", base=fused)
        assert caught.value.hint == f"pass --base {base}"
        ckpt_cli.merge(adapter, tmp_path / "out", base=base)
        assert differences(load(tmp_path / "out"), load(fused)) == []

    def test_is_known_by_its_content(self, tmp_path: Path) -> None:
        _, adapter, fused = self.run(tmp_path)
        shutil.copytree(adapter, tmp_path / "copy", copy_function=shutil.copyfile)
        with pytest.raises(Inconsistent, match="already holds"):
            ckpt_cli.merge(tmp_path / "copy", tmp_path / "out", base=fused)

    def test_is_known_in_outputs_of_outputs(self, tmp_path: Path) -> None:
        base, adapter, fused = self.run(tmp_path)
        ckpt_cli.merge(fused, tmp_path / "cast", dtype="bf16")
        ckpt_cli.average([base, tmp_path / "fused"], tmp_path / "mean")
        for model in ("cast", "mean"):
            with pytest.raises(Inconsistent, match="already holds") as caught:
                ckpt_cli.merge(adapter, tmp_path / "out", base=tmp_path / model)
            assert caught.value.hint is None

    def test_of_a_checkpoint_that_holds_both_is_known(self, tmp_path: Path) -> None:
        weights = {f"base_model.model.{name}": tensor for name, tensor in tiny.weights().items() if "q_proj.weight" not in name}
        for name, tensor in tiny.weights().items():
            if "q_proj" in name:
                weights.pop(f"base_model.model.{name}", None)
                weights[f"base_model.model.{name.replace('q_proj', 'q_proj.base_layer')}"] = tensor
        trained = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tiny.factors().items()}
        home = tiny.verl(tmp_path / "run", {**weights, **trained})
        (home / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
        ckpt_cli.merge(tmp_path / "run", tmp_path / "fused")
        adapter = tiny.adapter(tmp_path / "adapter", tiny.factors(), "base")
        with pytest.raises(Inconsistent, match="already holds"):
            ckpt_cli.merge(adapter, tmp_path / "out", base=tmp_path / "fused")

    def test_is_known_by_its_file_where_a_manifest_has_no_checksum(self, tmp_path: Path) -> None:
        _, adapter, fused = self.run(tmp_path)
        manifest = json.loads((fused / "ckpt-manifest.json").read_text())
        del manifest["fused_adapters"]
        (fused / "ckpt-manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(Inconsistent, match="already holds"):
            ckpt_cli.merge(adapter, tmp_path / "out", base=fused)

    def test_is_another_one_after_more_training(self, tmp_path: Path) -> None:
        base, _, fused = self.run(tmp_path)
        second = tiny.adapter(tmp_path / "second", tiny.factors(5), fused)
        ckpt_cli.merge(second, tmp_path / "out", base=fused)
        weights, first, last = load(base), load(fused), load(tmp_path / "out")
        name = "model.layers.0.self_attn.q_proj.weight"
        assert not torch.equal(first[name], last[name])
        assert not torch.equal(weights[name], last[name])


class TestAnotherBase:
    def merged(self, tmp_path: Path, named: str, base: str = "base", **config: Any) -> dict[str, str]:
        folder = tiny.folder(tmp_path / base, tiny.weights(), tiny.config(**config))
        return notes(ckpt_cli.merge(tiny.adapter(tmp_path / "adapter", tiny.factors(), named), tmp_path / "out", base=folder))

    @pytest.mark.parametrize(
        ("named", "base", "config"),
        [
            ("org/Other-7B-Instruct", "base", {"_name_or_path": "org/Base-7B"}),
            ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B", {}),
            ("/models/Qwen2.5-7B-Instruct", "Qwen2.5-7B", {}),
            ("Qwen/Qwen2.5-7B", "models--Qwen--Qwen2.5-7B-Instruct/snapshots/abc", {}),
        ],
    )
    def test_is_a_warning_with_both_names(self, named: str, base: str, config: dict[str, Any], tmp_path: Path) -> None:
        assert named in self.merged(tmp_path, named, base, **config)["other-base"]

    @pytest.mark.parametrize(
        ("revision", "named", "warned"),
        [
            ("v9", "org/m", True),
            ("2" * 40, "org/m", True),
            (None, f"/hub/models--org--m/snapshots/{'1' * 40}", False),
            (None, f"/hub/models--org--m/snapshots/{'2' * 40}", True),
            ("0" * 40, "org/m", False),
            ("main", "org/m", False),
            (None, "org/m", False),
            ("../../x", "other/m", True),
        ],
    )
    def test_of_another_revision_is_a_warning(
        self, revision: str | None, named: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        cache = tmp_path / "models--org--m"
        for number in "01":
            tiny.folder(cache / "snapshots" / (number * 40), tiny.weights())
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("0" * 40)
        (cache / "refs" / "v1").write_text("1" * 40)
        adapter = tiny.adapter(tmp_path / "adapter", tiny.factors(), named)
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "revision": revision}))
        told = notes(ckpt_cli.merge(adapter, tmp_path / "out", base="org/m")).get("other-base", "")
        assert bool(told) is warned

    @pytest.mark.parametrize("revision", ["1" * 40, "v1"])
    def test_by_its_hub_id_is_the_revision_that_was_trained_on(
        self, revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        cache = tmp_path / "models--org--m"
        main, trained = (tiny.folder(cache / "snapshots" / (str(at) * 40), tiny.weights(at)) for at in (0, 1))
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("0" * 40)
        (cache / "refs" / "v1").write_text("1" * 40)
        adapter = tiny.adapter(tmp_path / "adapter", tiny.factors(), "org/m")
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "revision": revision}))
        assert "other-base" not in notes(ckpt_cli.merge(adapter, tmp_path / "out", base="org/m"))
        ckpt_cli.merge(adapter, tmp_path / "wanted", base=trained)
        assert differences(load(tmp_path / "out"), load(tmp_path / "wanted")) == []
        assert f"pass --base {trained}" in notes(ckpt_cli.merge(adapter, tmp_path / "main", base=main))["other-base"]

    @pytest.fixture
    def cached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
        """Snapshots of ``org/m`` in a cache, of which ``main`` is the first, and an adapter that was trained on the second."""
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        cache = tmp_path / "models--org--m"
        main, trained = (tiny.folder(cache / "snapshots" / (str(at) * 40), tiny.weights(at)) for at in (0, 1))
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("0" * 40)
        adapter = tiny.adapter(tmp_path / "adapter", tiny.factors(), "org/m")
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "revision": "1" * 40}))
        return main, trained, adapter

    def test_of_every_command_is_the_same_revision(self, cached: tuple[Path, Path, Path], tmp_path: Path) -> None:
        main, trained, adapter = cached
        ckpt_cli.merge(adapter, tmp_path / "wanted", base=trained)
        wanted = load(tmp_path / "wanted")
        with ckpt_cli.open(adapter, base="org/m") as opened:
            assert "other-base" not in {note.code for note in opened.notes}
        assert differences(ckpt_cli.load_state_dict(adapter, base="org/m"), wanted) == []
        with ckpt_cli.open(adapter, base=main) as opened:
            assert f"pass --base {trained}" in next(note.text for note in opened.notes if note.code == "other-base")
        found = ckpt_cli.verify(tmp_path / "wanted", base="org/m")
        assert found.comparison is not None
        assert found.comparison.base == str(trained)

    def test_that_a_path_in_the_cache_names_is_taken(self, cached: tuple[Path, Path, Path], tmp_path: Path) -> None:
        main, trained, _ = cached
        adapter = tiny.adapter(tmp_path / "named", tiny.factors(), str(trained))
        ckpt_cli.merge(adapter, tmp_path / "out", base="org/m")
        assert json.loads((tmp_path / "out" / "ckpt-manifest.json").read_text())["base"] == str(trained)
        assert f"pass --base {trained}" in notes(ckpt_cli.merge(adapter, tmp_path / "main", base=main))["other-base"]

    def test_that_is_here_is_a_warning(self, tmp_path: Path) -> None:
        other = tiny.folder(tmp_path / "other", tiny.weights())
        assert f"trained on {other}, but the base is {tmp_path / 'base'}" in self.merged(tmp_path, str(other))["other-base"]

    def test_is_said_of_an_export_too(self, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "Qwen2.5-7B", tiny.weights())
        adapter = tiny.adapter(tmp_path / "adapter", tiny.factors(), "Qwen/Qwen2.5-7B-Instruct")
        assert "other-base" in notes(ckpt_cli.merge(adapter, tmp_path / "out", base=base, lora="export"))

    @pytest.mark.parametrize(
        ("named", "base", "config"),
        [
            ("Qwen/Qwen2.5-7B", "Qwen2.5-7B", {}),
            ("Qwen/Qwen2.5-7B", "base", {"_name_or_path": "Qwen/Qwen2.5-7B"}),
            ("unsloth/qwen2.5-7b-unsloth-bnb-4bit", "Qwen2.5-7B", {}),
            ("/cluster/models/Qwen2.5-7B/", "models--Qwen--Qwen2.5-7B/snapshots/abc", {}),
            ("Qwen/Qwen2.5-7B", "base", {}),
            ("/home/somebody/model", "Qwen2.5-7B", {}),
            ("my-sft", "base", {"_name_or_path": "Qwen/Qwen2.5-7B"}),
            ("a\0b", "Qwen2.5-7B", {}),
            ("/a\0b", "Qwen2.5-7B", {}),
        ],
    )
    def test_is_none_where_names_agree_or_say_nothing(self, named: str, base: str, config: dict[str, Any], tmp_path: Path) -> None:
        assert "other-base" not in self.merged(tmp_path, named, base, **config)

    def test_is_none_by_a_link(self, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", tiny.weights())
        (tmp_path / "Qwen2.5-7B").symlink_to(base)
        result = ckpt_cli.merge(tiny.adapter(tmp_path / "adapter", tiny.factors(), tmp_path / "Qwen2.5-7B"), tmp_path / "out", base=base)
        assert "other-base" not in notes(result)
