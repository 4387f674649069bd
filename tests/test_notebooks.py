"""Results in notebooks: tables of HTML that hold what there is, in which names are text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.results.checkpoint import Frozen
from tests.cli import ROOT

EXAMPLE = ROOT / "examples" / "tiny-run"


class Checked(HTMLParser):
    """HTML in which every tag is closed; its tags and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert attrs == []
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def every_result(path: Path, out: Path) -> list[Frozen]:
    return [
        ckpt_cli.detect(path),
        ckpt_cli.inspect(path),
        ckpt_cli.inspect(path, stats=True, histogram=True),
        ckpt_cli.merge(path, out / "merged"),
        ckpt_cli.verify(out / "merged", full=True, against=path, base=path),
        ckpt_cli.diff(path, out / "merged"),
    ]


def test_every_result_has_one(tmp_path: Path) -> None:
    results = every_result(EXAMPLE, tmp_path)
    results += [ckpt_cli.average(EXAMPLE, tmp_path / "average", everything=True), ckpt_cli.extract_state(EXAMPLE, tmp_path / "state")]
    results += [ckpt_cli.show(EXAMPLE, "model.norm.weight")]
    for result in results:
        page = Checked(result._repr_html_())
        assert page.tags <= {"div", "strong", "table", "tr", "th", "td", "details", "summary", "p"}
        assert page.text.startswith(type(result).__name__)
    assert "model.layers.{0..1}.mlp.up_proj.weight" in Checked(results[1]._repr_html_()).text
    assert str(tmp_path / "merged") in Checked(results[3]._repr_html_()).text


def test_of_a_loaded_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert "tensors2" in Checked(ckpt_cli.load_into(model, tmp_path / "model.safetensors")._repr_html_()).text


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "\x1b[31m\u202e&amp;"])
def test_names_are_text(name: str, tmp_path: Path) -> None:
    save_file({name: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    for result in every_result(tmp_path / "model.safetensors", tmp_path):
        page = Checked(result._repr_html_())
        assert not {"script", "img"} & page.tags
        assert not {"\x1b", "\u202e"} & set(page.text)
