"""--in-place never leaves two sets of weights in a folder of which loaders would take one or the other."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import OutputExists
from tests import tiny


def step(folder: Path, *, parts: int) -> Path:
    """A step with the model in safetensors, and its average in a file of torch."""
    state = tiny.weights()
    tiny.folder(folder, state, tiny.config())
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    files = (
        {f"model-{i + 1:05}-of-{parts:05}.safetensors": names[i::parts] for i in range(parts)}
        if parts > 1
        else {"model.safetensors": names}
    )
    for file, of in files.items():
        save_file({name: state[name] for name in of}, folder / file, metadata={"format": "pt"})
    if parts > 1:
        index = {"metadata": {}, "weight_map": {name: file for file, of in files.items() for name in of}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save({name: tensor + 1 for name, tensor in state.items()}, folder / "ema.pt")
    return folder


@pytest.mark.parametrize("size", [None, "3KB"], ids=["one file", "parts"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dry_run", [True, False])
def test_an_average_beside_the_model_is_refused_however_both_are_cut(parts: int, size: str | None, dry_run: bool, tmp_path: Path) -> None:
    run = step(tmp_path / "run", parts=parts)
    before = sorted(path.name for path in run.iterdir())
    options = {"max_shard_size": size} if size else {}
    with pytest.raises(OutputExists) as caught:
        ckpt_cli.merge(run, type="ema", in_place=True, dry_run=dry_run, **options)
    assert "use -o instead of --in-place" in str(caught.value.hint)
    assert sorted(path.name for path in run.iterdir()) == before


def test_under_a_name_that_nothing_takes_it_is_written(tmp_path: Path) -> None:
    run = step(tmp_path / "run", parts=2)
    ckpt_cli.merge(run, type="ema", in_place=True, weights_name="average.safetensors")
    assert (run / "average.safetensors").exists()


def test_an_average_is_refused_beside_a_model_that_loaders_would_no_longer_take(tmp_path: Path) -> None:
    run = tiny.folder(tmp_path / "run", tiny.weights(), tiny.config())
    (run / "model.safetensors").unlink()
    torch.save(tiny.weights(), run / "pytorch_model.bin")
    torch.save({name: tensor + 1 for name, tensor in tiny.weights().items()}, run / "ema.pt")
    with pytest.raises(OutputExists, match=r"pytorch_model\.bin"):
        ckpt_cli.merge(run, type="ema", in_place=True)
    ckpt_cli.merge(run, type="model", in_place=True)
    assert (run / "model.safetensors").exists()


def test_each_of_two_steps_that_lack_alike_warns_from_one_line_of_code(tmp_path: Path) -> None:
    """Python shows a text once for each line of code."""
    for number in (8, 12):
        state = {name: tensor for name, tensor in tiny.weights().items() if name != "model.norm.weight"}
        tiny.folder(tmp_path / "run" / f"checkpoint-{number}", state, tiny.config())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for number in (8, 12):
            ckpt_cli.load_state_dict(tmp_path / "run", step=number)
    texts = [str(item.message) for item in told if "not here" in str(item.message)]
    assert ["checkpoint-8" in text.split(":")[0] for text in texts] == [True, False]
    assert len(texts) == 2
