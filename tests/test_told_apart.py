"""What looks the same and is not: a source that was rewritten, a name that loaders understand otherwise, a folder compared with itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import SourceChanged, UsageError
from ckpt_cli.files.source import Files
from ckpt_cli.hub.settings import different_settings


def model(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir()
    save_file({"a.weight": torch.full((4, 4), value), "b.weight": torch.full((4,), value)}, folder / "model.safetensors")
    return folder


class TestASourceThatIsRewrittenInPlace:
    """with its size and mtime kept."""

    @staticmethod
    def rewrite(path: Path) -> None:
        status, content = path.stat(), path.read_bytes()
        with path.open("r+b") as file:
            file.write(content[:-1] + b"\1")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def test_is_noticed_by_who_has_it_open(self, tmp_path: Path) -> None:
        path = model(tmp_path / "run") / "model.safetensors"
        with Files() as files:
            source = files.source(path)
            source.check_unchanged()
            self.rewrite(path)
            with pytest.raises(SourceChanged):
                source.check_unchanged()

    def test_is_noticed_by_a_merge(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run")

        class Rewriting:
            def start(self, *_: object) -> None:
                TestASourceThatIsRewrittenInPlace.rewrite(run / "model.safetensors")

            def advance(self, *_: object) -> None: ...

            def finish(self) -> None: ...

        with pytest.raises(SourceChanged):
            ckpt_cli.merge(run, tmp_path / "out", progress=Rewriting())
        assert not (tmp_path / "out").exists()

    def test_is_the_same_plan_on_a_machine_with_another_ctime(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run")
        ckpt_cli.merge(run, tmp_path / "out", part="0/2")
        os.chmod(run / "model.safetensors", 0o600)
        result = ckpt_cli.merge(run, tmp_path / "out", part="1/2")
        assert result.outputs[0].part is not None
        assert len(result.outputs[0].part.done) == 2


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "adapter_model.safetensors", "consolidated.safetensors", "consolidated.00.safetensors"]
)
def test_a_weights_name_that_means_something_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="means something else"):
        ckpt_cli.merge(model(tmp_path / "run"), tmp_path / "out", weights_name=name)


class TestAFolderThatIsComparedWithItself:
    @pytest.mark.parametrize("how", ["itself", "link", "file"])
    def test_is_refused(self, tmp_path: Path, how: str) -> None:
        run = model(tmp_path / "run")
        (tmp_path / "link").symlink_to(run)
        other = {"itself": run, "link": tmp_path / "link", "file": run / "model.safetensors"}[how]
        with pytest.raises(UsageError, match="itself"):
            ckpt_cli.verify(run, against=other)

    def test_is_not_what_an_output_and_its_source_are(self, tmp_path: Path) -> None:
        run = model(tmp_path / "run")
        ckpt_cli.merge(run, tmp_path / "out")
        assert ckpt_cli.verify(tmp_path / "out", against=run).against[0].identical


@pytest.mark.parametrize(
    ("mine", "base", "keys"),
    [
        ({}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, {"use_sliding_window"}),
        ({"use_sliding_window": True, "max_window_layers": 1}, {"use_sliding_window": True, "max_window_layers": 0}, {"max_window_layers"}),
        ({"layer_types": ["full_attention"]}, {"layer_types": ["sliding_attention"]}, {"layer_types"}),
        ({"use_sliding_window": False, "max_window_layers": 28}, {"max_window_layers": 21, "use_sliding_window": False}, set()),
        ({}, {"use_sliding_window": False, "sliding_window": 4}, set()),
    ],
)
def test_windows_are_settings(mine: dict[str, object], base: dict[str, object], keys: set[str]) -> None:
    assert {setting.key for setting in different_settings(mine, base)} == keys
    assert {setting.key for setting in different_settings(base, mine)} == keys
