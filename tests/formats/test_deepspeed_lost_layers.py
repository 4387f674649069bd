"""A pipeline that lost the file of a layer is refused, whatever is read of it and whichever other files are gone with it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError, MissingShard
from tests.conftest import Copy
from tests.tensors import differences, load

CASES = ("pipe-bf16opt-pp2", "pipe-z1-bf16-pp2")


def layers(folder: Path) -> list[Path]:
    return sorted(folder.rglob("layer_*-model_states.pt"))


@pytest.mark.parametrize("component", ["model", "weights16"])
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("case", CASES)
def test_one_lost_layer(copy: Copy, case: str, number: int, component: str, tmp_path: Path) -> None:
    folder = copy("deepspeed", case) / "run"
    assert len(layers(folder)) == 5
    layers(folder)[number].unlink()
    try:
        ckpt_cli.merge(folder, tmp_path / "out", type=component, names="native")
    except CkptError:
        assert not (tmp_path / "out").exists()
    else:  # nothing of the layer is in its file alone
        assert component == "model"
        assert differences(load(tmp_path / "out"), load(folder.parent / "expected.safetensors")) == []


def test_the_file_is_named(copy: Copy, tmp_path: Path) -> None:
    folder = copy("deepspeed", "pipe-bf16opt-pp2", "run")
    lost = next(path for path in layers(folder) if path.name == "layer_03-model_states.pt")
    lost.unlink()
    with pytest.raises(MissingShard) as caught:
        ckpt_cli.merge(folder, tmp_path / "out", type="weights16", names="native")
    assert lost.name in str(caught.value.expected)


def test_shared_layers_have_their_name_without_the_optimizer(copy: Copy, tmp_path: Path) -> None:
    folder = copy("deepspeed", "pipe-bf16opt-pp2")
    for path in folder.rglob("*optim_states.pt"):
        path.unlink()
    ckpt_cli.merge(folder / "run", tmp_path / "out", names="native")
    assert differences(load(tmp_path / "out"), load(folder / "expected16.safetensors")) == []


@pytest.mark.parametrize("case", CASES)
def test_one_lost_layer_and_no_optimizer(copy: Copy, case: str, tmp_path: Path) -> None:
    folder = copy("deepspeed", case, "run")
    for path in [layers(folder)[-1], *folder.rglob("*optim_states.pt")]:
        path.unlink()
    with pytest.raises(CkptError):
        ckpt_cli.merge(folder, tmp_path / "out", names="native")
    assert not (tmp_path / "out").exists()


class TestAFrozenLayer:
    """whose file is lost: no list of the save has it, and only its number is left out."""

    def said(self, folder: Path) -> list[tuple[str, str]]:
        notes = ckpt_cli.detect(folder / "run").checkpoint.notes
        return [(note.level, note.text) for note in notes if note.code == "layers-without-file"]

    def test_is_said_to_be_possible(self, copy: Copy) -> None:
        folder = copy("deepspeed-pipelines", "tied-twice-frozen")
        assert self.said(folder) == []
        layers(folder)[5].unlink()
        ((level, text),) = self.said(folder)
        assert level == "warning"
        assert text.startswith("layers without a file: 5. ")
        layers(folder)[1].unlink()
        ((level, text),) = self.said(folder)
        assert (level, text[:29]) == ("info", "layers without a file: 1, 5. ")

    def test_or_a_function(self, data: Path) -> None:
        ((level, text),) = self.said(data / "deepspeed" / "pipe-z1-bf16-pp2")
        assert level == "info"
        assert text.startswith("layers without a file: 2. ")
