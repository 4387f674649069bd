"""Side files of a run under names that are nearly the right ones, where those of the base are taken, or none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError
from ckpt_cli.hub.beside.near_names import meant_by
from tests.tiny import config, folder, verl, weights

OTHER = config(rope_theta=1e6)
GENERATION = {"eos_token_id": 1, "top_k": 7}


def told(result: Any) -> list[str]:
    return [note.text for note in result.outputs[0].notes if note.code == "near-name" and note.level == "warning"]


def renamed(path: Path, name: str, **more: Any) -> Path:
    made = folder(path, weights(), OTHER, {"generation_config.json": GENERATION, "chat_template.jinja": "OWN", **more})
    right = next(meant for meant in meant_by(name) if (made / meant).exists())
    (made / right).rename(made / name)
    return made


class TestWhereTheFileOfTheBaseIsTaken:
    @pytest.mark.parametrize(
        "name",
        [
            "config.json.txt",
            "Config.json",
            "CONFIG.JSON",
            "config (1).json",
            "config - Copy.json",
            "config.json.1",
            "config.json.bak",
            "config.json.tmp",
            "config.json.json",
            "config_backup.json",
            "Config (1).json.txt",
            "GENERATION_CONFIG.JSON",
            "generation_config.json.txt",
            "Chat_Template.jinja",
            "chat_template.jinja.txt",
            "Tokenizer.json",
            "tokenizer_config.json.crdownload",
        ],
    )
    def test_both_are_named(self, name: str, tmp_path: Path) -> None:
        files = {"generation_config.json": {"eos_token_id": 1}, "chat_template.jinja": "BASE"}
        base = folder(tmp_path / "base", weights(1), config(), files)
        if name == "Tokenizer.json":
            (base / "tokenizer.json").write_text((base / "tokenizer.json").read_text().replace("t59", "x59"))
        (base / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 7}')
        made = renamed(tmp_path / "run", name)
        right = next(meant for meant in meant_by(name) if (base / meant).exists())
        for result in (
            ckpt_cli.merge(made, tmp_path / "out", base=base),
            ckpt_cli.average([made, made], tmp_path / "mean", base=base),
        ):
            assert told(result) == [
                f"{made / name}: no loader reads it under that name, and {base / right} is taken, that of the base; "
                f"if it is the {right} of the run, rename it"
            ]
        with pytest.raises(CkptError, match="strict"):
            ckpt_cli.merge(made, tmp_path / "strict", base=base, strict=True)
        (made / name).rename(made / right)
        assert told(ckpt_cli.merge(made, tmp_path / "again", base=base)) == []

    def test_so_is_code(self, tmp_path: Path) -> None:
        of = config(auto_map={"AutoModelForCausalLM": "modeling_my.MyModel"}, model_type="my", architectures=["MyModel"])
        base = folder(tmp_path / "base", weights(1), of, {"modeling_my.py": "x = 1\n"})
        made = folder(tmp_path / "run", weights(), of, {"modeling_my (1).py": "x = 2\n"})
        (text,) = told(ckpt_cli.merge(made, tmp_path / "out", base=base))
        assert text.startswith(f"{made / 'modeling_my (1).py'}: ")

    def test_so_are_those_beside_shards(self, tmp_path: Path) -> None:
        home = verl(tmp_path, weights(), OTHER)
        (home / "huggingface" / "config.json").rename(home / "huggingface" / "config.json.txt")
        base = folder(tmp_path / "base", weights(1))
        made = ckpt_cli.merge(home, tmp_path / "out", base=base)
        assert len(told(made)) == 1
        assert "config.json.txt" not in str([note.text for note in made.outputs[0].notes if note.code == "put-aside"])

    def test_not_where_both_say_the_same(self, tmp_path: Path) -> None:
        base = folder(tmp_path / "base", weights(1), OTHER, {"generation_config.json": GENERATION, "chat_template.jinja": "OWN"})
        made = renamed(tmp_path / "run", "Config.json")
        (made / "Config.json").write_text(json.dumps(OTHER, indent=4))
        assert told(ckpt_cli.merge(made, tmp_path / "out", base=base)) == []

    def test_not_what_holds_something_else(self, tmp_path: Path) -> None:
        base = folder(tmp_path / "base", weights(1))
        made = folder(tmp_path / "run", weights(), files={"Config.json": {"learning_rate": 1e-5, "output_dir": "x"}})
        (made / "config.json").unlink()
        assert told(ckpt_cli.merge(made, tmp_path / "out", base=base)) == []


class TestWhereThereIsNone:
    @pytest.mark.parametrize(
        ("name", "right"),
        [
            ("GENERATION_CONFIG.JSON", "generation_config.json"),
            ("Chat_Template.jinja", "chat_template.jinja"),
            ("chat_template (1).jinja", "chat_template.jinja"),
            ("tokenizer_config.json.txt", "tokenizer_config.json"),
            ("Config.json", "config.json"),
        ],
    )
    def test_it_is_told(self, name: str, right: str, tmp_path: Path) -> None:
        made = renamed(tmp_path / "run", name)
        (text,) = told(ckpt_cli.merge(made, tmp_path / "out"))
        assert text == (
            f"{made / name}: no loader reads it under that name, and the output has no {right}; if it is the {right} of the run, rename it"
        )
        (item,) = [item for item in ckpt_cli.verify(made).findings if item.code == "near-name"]
        assert (item.severity, item.file) == ("warning", name)
        assert item.message == f"no loader reads it under this name, and there is no {right}"

    @pytest.mark.parametrize(
        "name",
        [
            "config.json.bak",
            "config (1).json",
            "Config.json",
            "generation_config.json.orig",
            "generation_config.json~",
            "tokenizer.json.old",
            "Vocab.txt",
            "vocab.json.txt",
            "merges.txt.1",
            "chat_template.json.txt",
            "LICENSE (1)",
            "license",
            "model.safetensors.bak",
            "Trainer_State.json",
            "README.MD",
        ],
    )
    @pytest.mark.parametrize("with_base", [True, False])
    def test_it_is_not_where_the_run_has_its_own(self, name: str, with_base: bool, tmp_path: Path) -> None:
        made = folder(tmp_path / "run", weights(), files={"chat_template.jinja": "OWN", "generation_config.json": GENERATION, name: "{}"})
        base = shutil.copytree(folder(tmp_path / "base", weights(1), files={"chat_template.jinja": "BASE"}), tmp_path / "b")
        assert told(ckpt_cli.merge(made, tmp_path / "out", base=base if with_base else None)) == []
        assert "near-name" not in {item.code for item in ckpt_cli.verify(made).findings}

    @pytest.mark.parametrize("name", ["generation_config.json.bak", "chat_template.jinja~", "special_tokens_map.json.orig"])
    def test_it_is_not_for_what_somebody_put_aside(self, name: str, tmp_path: Path) -> None:
        made = folder(tmp_path / "run", weights(), files={name: '{"a": 1}'})
        assert told(ckpt_cli.merge(made, tmp_path / "out")) == []


def test_names_are_read_in_time() -> None:
    for part in (".bak", "~", " (1)", ".txt", "copy of ", ".a", "."):
        assert len(meant_by(part * (250 // len(part)))) <= 5
