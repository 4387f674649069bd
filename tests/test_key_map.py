"""``--key-map``: rules that rename and drop tensors, and rules that make no sense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, NotFound, UsageError
from ckpt_cli.output.key_map import MAX_PATTERN, Rule, mapped_names, read_key_map
from tests.cli import ROOT
from tests.cli import ckpt_fork as ckpt

NAMES = ("transformer.h.0.attn.weight", "transformer.h.0.mlp.weight", "transformer.h.11.mlp.weight", "lm_head.weight")


class Place:
    """A key map to be written, and what it does to names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def json(self, content: object) -> tuple[Rule, ...]:
        return self.text(json.dumps(content))

    def rules(self, *rules: dict[str, Any]) -> tuple[Rule, ...]:
        return self.json({"rules": rules})

    def text(self, content: str, name: str = "map.json") -> tuple[Rule, ...]:
        path = self.folder / name
        path.write_text(content)
        return read_key_map([path])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class TestJson:
    def test_groups_of_the_pattern_are_put_into_the_new_name(self, place: Place) -> None:
        rules = place.rules({"match": r"transformer\.h\.(\d+)\.(?P<rest>.+)", "to": r"model.layers.\1.\g<rest>"})
        assert mapped_names(NAMES, rules) == {
            "transformer.h.0.attn.weight": "model.layers.0.attn.weight",
            "transformer.h.0.mlp.weight": "model.layers.0.mlp.weight",
            "transformer.h.11.mlp.weight": "model.layers.11.mlp.weight",
            "lm_head.weight": "lm_head.weight",
        }

    def test_a_pattern_is_for_the_whole_name(self, place: Place) -> None:
        rules = place.rules({"match": "lm_head", "to": "head"}, {"match": "head.weight", "to": "x"})
        assert mapped_names(NAMES, rules) == {name: name for name in NAMES}

    def test_the_first_rule_that_matches_wins(self, place: Place) -> None:
        rules = place.rules(
            {"match": r"transformer\.h\.0\.(.*)", "to": r"first.\1"},
            {"match": r"transformer\.(.*)", "to": r"second.\1"},
            {"match": "first.*", "to": "never"},
        )
        assert [mapped_names(NAMES, rules)[name] for name in NAMES] == [
            "first.attn.weight",
            "first.mlp.weight",
            "second.h.11.mlp.weight",
            "lm_head.weight",
        ]

    @pytest.mark.parametrize("drop", [{"to": None}, {"drop": True}, {"drop": True, "to": None}])
    def test_a_rule_may_leave_tensors_out(self, place: Place, drop: dict[str, Any]) -> None:
        rules = place.rules({"match": r".*\.mlp\..*"} | drop)
        assert [name for name, new in mapped_names(NAMES, rules).items() if new is None] == [NAMES[1], NAMES[2]]

    def test_a_group_that_took_no_part_is_empty(self, place: Place) -> None:
        rules = place.rules({"match": r"(model\.)?(.*)", "to": r"\1x.\2"})
        assert mapped_names(["model.a", "b"], rules) == {"model.a": "model.x.a", "b": "x.b"}

    def test_an_object_maps_old_names_to_new_ones(self, place: Place) -> None:
        rules = place.json({"lm_head.weight": "output.weight", NAMES[0]: None})
        assert mapped_names(NAMES, rules) == {NAMES[0]: None, NAMES[1]: NAMES[1], NAMES[2]: NAMES[2], "lm_head.weight": "output.weight"}

    def test_names_of_such_an_object_are_no_patterns(self, place: Place) -> None:
        """A dot is a dot, and a backslash is a backslash."""
        rules = place.json({"a.b": "x", "(c)": "y", "d": r"z\1", "e": r"z\g<0>"})
        assert mapped_names(["aXb", "c", "a.b", "(c)", "d", "e"], rules) == {
            "aXb": "aXb",
            "c": "c",
            "a.b": "x",
            "(c)": "y",
            "d": r"z\1",
            "e": r"z\g<0>",
        }

    def test_a_map_without_rules_is_a_mistake(self, place: Place) -> None:
        for content in ({}, {"rules": []}):
            with pytest.raises(UsageError, match="no list of rules"):
                place.json(content)

    def test_the_order_of_names_stays(self, place: Place) -> None:
        rules = place.rules({"match": "(.*)", "to": r"x.\1"})
        assert list(mapped_names(reversed(NAMES), rules)) == list(reversed(NAMES))


class TestToml:
    def test_it_says_the_same_as_json(self, place: Place) -> None:
        rules = place.text(
            r"""
            [[rules]]
            match = 'transformer\.h\.(\d+)\.(.+)'
            to = 'model.layers.\1.\2'

            [[rules]]
            match = "lm_head.*"
            drop = true
            """,
            "map.toml",
        )
        assert rules == place.rules(
            {"match": r"transformer\.h\.(\d+)\.(.+)", "to": r"model.layers.\1.\2"}, {"match": "lm_head.*", "drop": True}
        )

    def test_a_table_maps_old_names_to_new_ones(self, place: Place) -> None:
        rules = place.text('"lm_head.weight" = "output.weight"', "map.toml")
        assert mapped_names(NAMES, rules)["lm_head.weight"] == "output.weight"

    @pytest.mark.parametrize("text", ["rules = [", "= 3", '"a" = "b"\n"a" = "c"'])
    def test_a_file_that_is_none_is_refused(self, place: Place, text: str) -> None:
        with pytest.raises(UsageError, match="TOML") as caught:
            place.text(text, "map.toml")
        assert caught.value.path == str(place.folder / "map.toml")

    def test_bytes_that_are_no_text_are_refused(self, place: Place) -> None:
        (place.folder / "map.toml").write_bytes(b'"a" = "\xff"')
        with pytest.raises(UsageError, match="TOML"):
            read_key_map([place.folder / "map.toml"])


class TestCollisions:
    def test_two_names_that_become_one_are_refused(self, place: Place) -> None:
        rules = place.rules({"match": r"transformer\.h\.\d+\.(.*)", "to": r"layer.\1"})
        with pytest.raises(Inconsistent, match=r"transformer\.h\.0\.mlp\.weight .* layer\.mlp\.weight") as caught:
            mapped_names(NAMES, rules)
        assert caught.value.tensor == "transformer.h.11.mlp.weight"

    def test_a_new_name_that_is_there_already_is_refused(self, place: Place) -> None:
        rules = place.json({NAMES[0]: "lm_head.weight"})
        for names in (NAMES, NAMES[::-1]):
            with pytest.raises(Inconsistent):
                mapped_names(names, rules)

    def test_names_may_be_exchanged(self, place: Place) -> None:
        assert mapped_names(["a", "b"], place.json({"a": "b", "b": "a"})) == {"a": "b", "b": "a"}

    def test_a_name_that_was_left_out_is_free(self, place: Place) -> None:
        assert mapped_names(["a", "b"], place.json({"a": None, "b": "a"})) == {"a": None, "b": "a"}

    def test_all_may_be_left_out(self, place: Place) -> None:
        assert set(mapped_names(NAMES, place.rules({"match": ".*", "to": None})).values()) == {None}

    def test_a_new_name_that_cannot_be_written_is_refused(self, place: Place) -> None:
        with pytest.raises(CkptError, match="__metadata__"):
            mapped_names(NAMES, place.json({NAMES[0]: "__metadata__"}))
        with pytest.raises(CkptError, match="characters"):
            mapped_names(NAMES, place.json({NAMES[0]: "x" * 5000}))


class TestRulesThatMakeNoSense:
    @pytest.mark.parametrize(
        "rule",
        [
            {"to": "x"},
            {"match": None, "to": "x"},
            {"match": 5, "to": "x"},
            {"match": "a", "to": 5},
            {"match": "a", "to": ["x"]},
            {"match": "a"},
            {"match": "a", "too": "x"},
            {"match": "(", "to": "x"},
            {"match": "a", "to": r"\1"},
            {"match": "(a)", "to": r"\2"},
            {"match": "(?P<n>a)", "to": r"\g<m>"},
            {"match": "a", "to": r"\g<"},
            {"match": "a", "to": "\\"},
            {"match": "a", "to": r"\q"},
            {"match": "x" * 2000, "to": "y"},
            "a",
            ["a", "b"],
            None,
        ],
        ids=lambda rule: repr(rule)[:40],
    )
    def test_the_number_of_the_rule_is_said(self, place: Place, rule: Any) -> None:
        with pytest.raises(UsageError, match=r"rule 2 ") as caught:
            place.rules({"match": "ok", "to": "fine"}, rule)
        assert caught.value.exit_code == 2
        assert caught.value.path == str(place.folder / "map.json")

    @pytest.mark.parametrize("pattern", ["(?x) a  # a comment", "(?i)A", "a|b", "", "(?:a)(b)?"])
    def test_patterns_of_every_style_are_understood(self, place: Place, pattern: str) -> None:
        assert mapped_names(["a", "z"], place.rules({"match": pattern, "to": "new"}))["z"] == "z"

    @pytest.mark.parametrize("content", [[], "text", 5, None, {"rules": {}}, {"rules": "a"}, {"rules": 5}], ids=repr)
    def test_a_file_without_rules_is_refused(self, place: Place, content: object) -> None:
        with pytest.raises(UsageError) as caught:
            place.json(content)
        assert caught.value.path == str(place.folder / "map.json")

    @pytest.mark.parametrize("value", [5, [], {}, True], ids=repr)
    def test_a_new_name_is_text_or_nothing(self, place: Place, value: object) -> None:
        with pytest.raises(UsageError, match="rule 1 "):
            place.json({"a": value})

    @pytest.mark.parametrize("text", ["", "{", "{'a': 'b'}", '{"a": "b", "a": "c"}', "[" * 100_000], ids=lambda text: repr(text)[:12])
    def test_a_file_that_is_no_json_is_refused(self, place: Place, text: str) -> None:
        """It was written by the user, not by a trainer: as a broken TOML file, it is a mistake in usage."""
        with pytest.raises(UsageError) as caught:
            place.text(text)
        assert caught.value.path == str(place.folder / "map.json")

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound) as caught:
            read_key_map([tmp_path / "map.json"])
        assert caught.value.path == str(tmp_path / "map.json")


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.dictionaries(st.text("ab.\\(*1", min_size=1, max_size=4), st.text("xy.\\g<>1", min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_object_of_names_says_what_it_means(mapping: dict[str, str]) -> None:
    if len(set(mapping.values())) < len(mapping):
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rules = Place(Path(folder)).json(mapping)
    assert mapped_names(mapping, rules) == mapping


@pytest.mark.parametrize("pattern", ["a{4294967296}", "(" * 490 + ")" * 490], ids=["a huge count", "deep groups"])
def test_a_pattern_that_cannot_be_compiled_is_refused(place: Place, pattern: str) -> None:
    with pytest.raises(UsageError, match="rule 1"):
        place.rules({"match": pattern, "to": "x"})


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "1" * 5000], ids=["deep lists", "a long number"])
def test_toml_that_the_parser_cannot_hold_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "map.toml"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_key_map([path])


class TestRulesOnTheCommandLine:
    """A=B: names that begin with A begin with B instead."""

    @pytest.mark.parametrize(
        ("given", "old", "new"),
        [
            ("net=model", "net.layers.0.w", "model.layers.0.w"),
            ("net.=model.", "net.layers.0.w", "model.layers.0.w"),
            ("net.=model", "net.w", "model.w"),
            ("net=", "net.w", "w"),
            ("net.=", "net.net.w", "net.w"),
            ("net=", "net", "net"),
            ("net=", "network.w", "network.w"),
            ("net=", "a.net.w", "a.net.w"),
            ("=model.", "w", "model.w"),
            ("head.weight=lm_head.weight", "head.weight", "lm_head.weight"),
            ("head.w=lm_head.w", "head.weight", "head.weight"),
            ("a.b=x", "a.b.w", "x.w"),
            ("a.b=x", "aXb.w", "aXb.w"),
            (r"(a)=\1", "(a).w", r"\1.w"),
            (r"a=\g<0>", "a.w", r"\g<0>.w"),
        ],
    )
    def test_are_for_whole_parts_of_names(self, given: str, old: str, new: str) -> None:
        assert mapped_names([old], read_key_map([given])) == {old: new}

    def test_come_in_their_order_with_those_of_files(self, place: Place) -> None:
        place.json({"net.b.w": "second", "net.c.w": None})
        rules = read_key_map(["net.a=first", str(place.folder / "map.json"), "net="])
        names = ["net.a.w", "net.b.w", "net.c.w", "net.d.w"]
        assert list(mapped_names(names, rules).values()) == ["first.w", "second", None, "d.w"]

    def test_a_file_with_an_equals_sign_in_its_path_is_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("epoch=1.json", "epoch=2"):
            (tmp_path / name).write_text('{"a": "b"}')
        assert [mapped_names(["a"], read_key_map([given])) for given in ("epoch=1.json", "./epoch=2")] == [{"a": "b"}] * 2

    @pytest.mark.parametrize(
        "text",
        [
            "=",
            ".=",
            "a=a",
            "a.=a",
            "a=b=c",
            "a=b,c=d",
            "a= b",
            "a\n=b",
            "a*=b",
            "a=\u202e",
            "a\0=b",
            "\x1b[31m=a=",
            "a=" + "b" * MAX_PATTERN,
        ],
    )
    def test_what_is_no_rule_is_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="is no rule for names") as caught:
            read_key_map([text])
        assert "\x1b" not in str(caught.value)
        assert "net= takes net. off" in (caught.value.hint or "")

    def test_a_word_that_is_neither_says_what_a_rule_looks_like(self) -> None:
        with pytest.raises(NotFound) as caught:
            read_key_map(["net."])
        assert "net= takes net. off" in (caught.value.hint or "")

    def test_two_names_that_become_one_are_refused(self) -> None:
        with pytest.raises(Inconsistent):
            mapped_names(["net.w", "w"], read_key_map(["net="]))

    def test_a_name_that_cannot_be_written_is_refused(self) -> None:
        with pytest.raises(UsageError, match="cannot be written"):
            mapped_names(["net.w"], read_key_map(["net.w=__metadata__"]))


class TestCommandsWithRulesOnTheCommandLine:
    """What is written under other names is compared again from the manifest, wherever that is read."""

    RULES = ("--key-map", "model.layers=net.blocks", "--key-map", "model.norm=net.norm")
    NAMES = ("net.blocks.0.mlp.up_proj.weight", "net.norm.weight", "model.embed_tokens.weight")

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        """A run without a config, whose names are then its own."""
        shutil.copytree(ROOT / "examples" / "tiny-run", tmp_path / "run")
        for config in (tmp_path / "run").rglob("config.json"):
            config.unlink()
        return tmp_path / "run"

    def test_merge_and_verify(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "map.json").write_text('{"lm_head.weight": null}')
        monkeypatch.chdir(tmp_path)
        assert ckpt("merge", "run", "-o", "out", *self.RULES, "--key-map", "map.json", cwd=tmp_path).code == 0
        assert set(self.NAMES) <= set(ckpt_cli.open(tmp_path / "out"))
        said = json.loads((tmp_path / "out" / "ckpt-manifest.json").read_text())["options"]["key_map"]
        assert said == ["model.layers=net.blocks", "model.norm=net.norm", str(tmp_path / "map.json")]
        (tmp_path / "elsewhere").mkdir()
        outcome = ckpt("verify", tmp_path / "out", "--against", tmp_path / "run", "--json", cwd=tmp_path / "elsewhere")
        result = json.loads(outcome.out)["data"]
        assert (outcome.code, result["against"][0]["tensors"], result["against"][0]["different"]) == (0, 24, 0)
        assert [word for word in result["made_by"] if word in self.RULES[1::2]] == list(self.RULES[1::2])

    def test_verify_without_a_manifest(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out", key_map=self.RULES[1::2])
        (tmp_path / "out" / "ckpt-manifest.json").unlink()
        assert ckpt("verify", tmp_path / "out", "--against", run).code == 1
        assert ckpt("verify", tmp_path / "out", "--against", run, *self.RULES).code == 0

    def test_average(self, run: Path, tmp_path: Path) -> None:
        assert ckpt("average", run, "--all", "-o", tmp_path / "mean", *self.RULES).code == 0
        assert set(self.NAMES) <= set(ckpt_cli.open(tmp_path / "mean"))

    def test_python(self, run: Path) -> None:
        assert set(self.NAMES) <= set(ckpt_cli.open(run, key_map=self.RULES[1::2]))
        assert "embed_tokens.weight" in ckpt_cli.open(run, key_map="model=")

    def test_a_rule_without_effect_is_a_warning(self, run: Path, tmp_path: Path) -> None:
        outcome = ckpt("merge", run, "-o", tmp_path / "out", "--key-map", "nett=")
        assert outcome.code == 0
        assert "no tensor name begins with nett." in outcome.err + outcome.out

    @pytest.mark.parametrize("rules", [["a=b=c"], ["\x1b[2J=a="], ["a\0=b"], ["/nothing/map\0.json"], ["=" * 5000]], ids=repr)
    def test_rules_in_a_manifest_are_checked_too(self, rules: list[str], run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out")
        manifest = tmp_path / "out" / "ckpt-manifest.json"
        content = json.loads(manifest.read_text())
        content["options"]["key_map"] = rules
        manifest.write_text(json.dumps(content))
        with pytest.raises(CkptError) as caught:
            ckpt_cli.verify(tmp_path / "out", against=run)
        assert "\x1b" not in str(caught.value)
