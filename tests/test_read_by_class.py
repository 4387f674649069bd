"""What a class reads beside its weights under names of its own is passed on, pickles and weights too, and never opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

import ckpt_cli
from ckpt_cli.output.staging import Staging
from ckpt_cli.results.written import MergeResult
from tests.test_asset_names import told

NO_PICKLE = b"no pickle that anybody should open"


def model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file({"a.weight": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


OMNI = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniForConditionalGeneration"]}
MMS = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}
BARK = {"model_type": "bark", "architectures": ["BarkModel"]}
VOICE = "speaker_embeddings/v2/en_speaker_0_semantic_prompt.npy"
VOICES = json.dumps({"repo_or_path": "../outside", "v2/en_speaker_0": {"semantic_prompt": VOICE}}).encode()
READ: list[tuple[dict[str, Any], dict[str, bytes]]] = [
    (OMNI, {"spk_dict.pt": NO_PICKLE}),
    (MMS, {"adapter.fra.safetensors": save({"lm_head.weight": torch.ones(2)}), "adapter.deu.bin": NO_PICKLE}),
    (BARK, {"speaker_embeddings_path.json": VOICES, VOICE: NO_PICKLE}),
]


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these models are none of the classes that their configs name."""
    monkeypatch.setattr("ckpt_cli.hub.classes.expected_tensors.installed_version", lambda: None)
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child.installed_version", lambda: None)


def merge(run: Path, output: Path, **options: Any) -> MergeResult:
    return ckpt_cli.merge(run, output, allow_missing=["*"], **options)


def filled(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("of_base", [True, False])
@pytest.mark.parametrize(("config", "files"), READ, ids=["omni", "mms", "bark"])
def test_is_passed_on(config: dict[str, Any], files: dict[str, bytes], of_base: bool, tmp_path: Path) -> None:
    run, base = model(tmp_path / "run", config), model(tmp_path / "base", config)
    filled(base if of_base else run, files)
    made = merge(run, tmp_path / "out", base=base)
    assert set(files) <= set(made.outputs[0].assets)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    assert {"other-weights", "other-model", "unknown-files", "put-aside"}.isdisjoint(told(made))
    checked = ckpt_cli.verify(tmp_path / "out", full=True)
    assert {item.code for item in checked.of_severity("error")} <= {"unknown-names"}
    assert not {item.file for item in checked.findings} & set(files)
    again = merge(tmp_path / "out", tmp_path / "again", dtype="bf16")
    assert set(files) <= set(again.outputs[0].assets)
    merge(run, tmp_path / "out", base=base, overwrite=True)
    (tmp_path / "out" / next(iter(files))).write_bytes(b"other")
    assert next(iter(files)) in {item.file for item in ckpt_cli.verify(tmp_path / "out", full=True).findings}


@pytest.mark.parametrize("name", ["spk_dict.pt", "adapter.fra.safetensors", VOICE])
def test_is_none_of_other_models(name: str, tmp_path: Path) -> None:
    run = filled(model(tmp_path / "run", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}), {name: NO_PICKLE})
    merge(run, tmp_path / "out")
    assert not (tmp_path / "out" / name).exists()


def test_that_a_class_does_not_load_without_is_missed(tmp_path: Path) -> None:
    said = told(merge(model(tmp_path / "omni", OMNI), tmp_path / "of_omni"))["lacks-asset"]
    assert "spk_dict.pt: pass --base DIR" in said
    for name, config in (("mms", MMS), ("bark", BARK), ("thinker", {**OMNI, "architectures": ["Qwen2_5OmniThinkerModel"]})):
        said = told(merge(model(tmp_path / name, config), tmp_path / f"of_{name}")).get("lacks-asset", "")
        assert "spk_dict" not in said
        assert "adapter" not in said
        assert "speaker" not in said


def test_are_added_in_place_and_withdrawn(tmp_path: Path) -> None:
    folder, target = filled(tmp_path / "built", {VOICE: b"a", "b.json": b"b"}), tmp_path / "step"
    target.mkdir()
    staging = Staging.of(folder, target)
    staging.publish_into(target)
    assert (target / VOICE).read_bytes() == b"a"
    staging.withdraw()
    assert list(target.iterdir()) == []


def test_lists_of_voices_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    named = {"v2/x": {"semantic_prompt": "../secret.npy"}, "v2/y": {"semantic_prompt": str(tmp_path / "secret.npy")}, "v2/z": [VOICE]}
    (tmp_path / "secret.npy").write_bytes(b"secret")
    run = filled(model(tmp_path / "run", BARK), {"speaker_embeddings_path.json": json.dumps(named).encode()})
    made = merge(run, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.npy"))
    assert "speaker_embeddings_path.json" in made.outputs[0].assets


@pytest.mark.parametrize("name", ["dataset_statistics.json", "experiment_cfg/metadata.json"])
def test_what_policies_for_robots_scale_with_is_passed_on(name: str, tmp_path: Path) -> None:
    run = filled(model(tmp_path / "run", {"model_type": "own"}), {name: b'{"action": {}}', "experiment_cfg/conf.yaml": b""})
    made = merge(run, tmp_path / "out")
    assert name in made.outputs[0].assets
    assert (tmp_path / "out" / name).read_bytes() == b'{"action": {}}'
    assert not (tmp_path / "out" / "experiment_cfg" / "conf.yaml").exists()
