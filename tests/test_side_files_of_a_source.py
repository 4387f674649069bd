"""`verify --against` compares what lies beside the weights, too: equal weights under another config are another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.results.inspect import DetectResult
from ckpt_cli.results.verify import VerifyResult
from ckpt_cli.results.written import AverageResult, MergeResult
from tests import tiny
from tests.cli import ckpt_fork as ckpt

SETTINGS: list[tuple[str, Any]] = [
    ("rope_theta", 1e6),
    ("num_attention_heads", 8),
    ("tie_word_embeddings", True),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ("rms_norm_eps", 1e-5),
]
each_setting = pytest.mark.parametrize(("key", "value"), SETTINGS, ids=[key for key, _ in SETTINGS])

GENERATION = {"generation_config.json": {"eos_token_id": 1, "temperature": 0.6}}


def of_source(result: VerifyResult) -> dict[str, str]:
    """What was found about files beside the weights, by file, with the code."""
    return {
        str(item.file): f"{item.code}: {item.message}" for item in result.findings if item.code in ("other-settings", "other-side-file")
    }


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """The folder beside the shards of a run that was merged to "out"."""
    home = tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless(), GENERATION)
    ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    return home / "huggingface"


class TestAnotherConfig:
    @each_setting
    def test_of_the_output_is_an_error(self, key: str, value: Any, hub: Path, tmp_path: Path) -> None:
        assert of_source(ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run")) == {}
        edit(tmp_path / "out" / "config.json", **{key: value})
        result = ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run")
        assert of_source(result)["config.json"].startswith(f"other-settings: {key} is ")
        assert result.exit_code == 1
        assert result.against[0].identical

    @each_setting
    def test_of_the_run_is_an_error(self, key: str, value: Any, hub: Path, tmp_path: Path) -> None:
        edit(hub / "config.json", **{key: value})
        result = ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run")
        assert ", in the source " in of_source(result)["config.json"]
        assert result.exit_code == 1

    def test_of_an_output_of_another_program_is_an_error(self, hub: Path, tmp_path: Path) -> None:
        other = tiny.folder(tmp_path / "export", tiny.weights(1), tiny.classless(rope_theta=1e6, eos_token_id=2), GENERATION)
        assert of_source(ckpt_cli.verify(other, against=tmp_path / "run")) == {
            "config.json": "other-settings: rope_theta is 1000000.0, in the source 10000.0"
        }

    def test_of_two_averages_is_an_error(self, tmp_path: Path) -> None:
        paths = [tiny.folder(tmp_path / str(i), tiny.weights(i), tiny.classless()) for i in (1, 2)]
        for name in ("one", "two"):
            ckpt_cli.average(paths, tmp_path / name)
        assert of_source(ckpt_cli.verify(tmp_path / "one", against=tmp_path / "two")) == {}
        edit(tmp_path / "two" / "config.json", num_key_value_heads=4)
        result = ckpt_cli.verify(tmp_path / "one", against=tmp_path / "two")
        assert of_source(result) == {"config.json": "other-settings: num_key_value_heads is 2, in the source 4"}

    def test_in_entries_that_are_no_settings_is_a_warning(self, hub: Path, tmp_path: Path) -> None:
        edit(hub / "config.json", eos_token_id=2)
        done = ckpt("verify", tmp_path / "out", "--against", tmp_path / "run")
        assert done.code == 0
        assert "entries differ from those of the source: eos_token_id (1, 2)" in " ".join(done.out.split())
        assert ckpt("verify", tmp_path / "out", "--against", tmp_path / "run", "--strict").code == 1

    def test_of_a_run_merged_with_a_base_is_that_of_the_base(self, tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless())
        for path in (home / "huggingface").iterdir():
            path.unlink()
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.classless())
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)
        assert of_source(ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run")) == {}
        edit(base / "config.json", hidden_act="gelu")
        edit(base / "tokenizer_config.json", padding_side="left")
        found = of_source(ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run"))
        assert found["config.json"] == "other-settings: hidden_act is silu, in the source gelu"
        assert found["tokenizer_config.json"] == "other-side-file: the source has another content"


class TestOtherFiles:
    @pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
    @pytest.mark.parametrize("side", ["run", "output"])
    def test_are_a_warning(self, name: str, side: str, hub: Path, tmp_path: Path) -> None:
        edit((hub if side == "run" else tmp_path / "out") / name, other=1)
        result = ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run")
        assert of_source(result) == {name: "other-side-file: the source has another content"}
        assert result.exit_code == 0

    def test_of_another_program_are_compared_by_the_ids_of_tokens(self, hub: Path, tmp_path: Path) -> None:
        other = tiny.folder(tmp_path / "export", tiny.weights(1), tiny.classless(), {"generation_config.json": {"temperature": 0.6}})
        edit(other / "tokenizer.json", other=1)
        assert of_source(ckpt_cli.verify(other, against=tmp_path / "run")) == {}
        vocabulary = {f"t{i}": 59 - i for i in range(60)}
        edit(other / "tokenizer.json", model={"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"})
        text = "other-side-file: it gives other ids to tokens than that of the source"
        assert of_source(ckpt_cli.verify(other, against=tmp_path / "run")) == {"tokenizer.json": text}


class TestWhatAMergeChanges:
    """is no difference."""

    def check(self, run: Path, out: Path, **options: Any) -> None:
        ckpt_cli.merge(run, out, **options)
        assert of_source(ckpt_cli.verify(out, against=run)) == {}

    def test_the_dtype_at_every_level(self, tmp_path: Path) -> None:
        part = {"torch_dtype": "float32", "parts": [{"torch_dtype": "float32"}]}
        tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless(vision_config=part))
        self.check(tmp_path / "run", tmp_path / "out", dtype="bf16")

    def test_a_dtype_that_was_not_named(self, tmp_path: Path) -> None:
        config = tiny.classless()
        del config["torch_dtype"]
        tiny.verl(tmp_path / "run", tiny.weights(1), config)
        self.check(tmp_path / "run", tmp_path / "out")

    def test_the_class_of_a_critic(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt_cli.hub.classes.expected_tensors.installed_version", lambda: None)  # the class is not asked for
        held = {name: tensor for name, tensor in tiny.weights(1).items() if name != "lm_head.weight"}
        held["score.weight"] = tiny.weights(1)["model.norm.weight"][None]
        tiny.verl(tmp_path / "run", held)
        self.check(tmp_path / "run", tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["num_labels"] == 1

    def test_a_byte_order_mark(self, tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless())
        path = home / "huggingface" / "tokenizer_config.json"
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        self.check(tmp_path / "run", tmp_path / "out")

    def test_nothing_when_it_writes_in_place(self, tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless())
        (home / "huggingface" / "config.json").rename(home / "config.json")
        ckpt_cli.merge(tmp_path / "run", in_place=True, dtype="bf16")
        assert of_source(ckpt_cli.verify(home, against=tmp_path / "run")) == {}

    def test_nor_what_versions_of_transformers_write_for_the_same(self, tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless(rope_scaling=None))
        newer = {key: value for key, value in tiny.classless(dtype="bfloat16", transformers_version="5.0").items() if key != "rope_theta"}
        newer["rope_parameters"] = {"rope_theta": 10000, "rope_type": "default"}
        other = tiny.folder(tmp_path / "export", tiny.weights(1), newer)
        assert of_source(ckpt_cli.verify(other, against=tmp_path / "run")) == {}


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
CODE = {"auto_map": {"AutoModel": "modeling_my.My"}}


class TestWhatAnotherProgramWrote:
    """has no manifest: what the source would give is looked for by what it says."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> tuple[Path, Path]:
        """A source, and the same model as another program writes it."""
        more = {"preprocessor_config.json": {"image_processor_type": "X", "size": 3}}
        paths = [tiny.folder(tmp_path / name, tiny.weights(1), tiny.classless(**CODE), more) for name in ("source", "other")]
        for path in paths:
            (path / "chat_template.jinja").write_text(TEMPLATE)
            (path / "modeling_my.py").write_text("class My: ...\n")
        return paths[0], paths[1]

    def found(self, pair: tuple[Path, Path]) -> dict[str, str]:
        return of_source(ckpt_cli.verify(pair[1], against=pair[0]))

    def test_in_another_form_is_no_difference(self, pair: tuple[Path, Path]) -> None:
        other = pair[1]
        for path in other.glob("*.json"):
            path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True, indent=1))
        edit(other / "config.json", transformers_version="9.9")
        (other / "preprocessor_config.json").unlink()
        (other / "processor_config.json").write_text(json.dumps({"image_processor": {"image_processor_type": "XFast", "size": 3}}))
        (other / "chat_template.jinja").unlink()
        edit(other / "tokenizer_config.json", chat_template=TEMPLATE)
        (other / "generation_config.json").write_text(json.dumps({"do_sample": True}))
        (other / "modeling_my.py").write_bytes(b"class My: ...\r\n")
        (other / "README.md").write_text("what it is")
        assert self.found(pair) == {}
        assert self.found(pair[::-1]) == {}

    def test_is_missed(self, pair: tuple[Path, Path]) -> None:
        for name in ("chat_template.jinja", "tokenizer_config.json", "preprocessor_config.json"):
            (pair[1] / name).unlink()
        assert self.found(pair) == {
            "tokenizer_config.json": "other-side-file: the source has settings of the tokenizer, which are not here",
            "chat_template.jinja": "other-side-file: the source has a chat template, which is not here",
            "preprocessor_config.json": "other-side-file: the source has a processor, which is not here",
        }
        (pair[1] / "tokenizer.json").unlink()
        (pair[1] / "config.json").unlink()
        found = self.found(pair)
        assert found["tokenizer.json"] == "other-side-file: the source has a tokenizer, which is not here"
        assert found["config.json"] == "other-side-file: the source has a config, which is not here"

    def test_that_says_something_else_is_a_warning(self, pair: tuple[Path, Path]) -> None:
        (pair[1] / "chat_template.jinja").write_text("other")
        (pair[1] / "modeling_my.py").write_text("x = 2\n")
        edit(pair[1] / "preprocessor_config.json", size=4)
        edit(pair[0] / "tokenizer_config.json", padding="left", add_bos_token=True)
        edit(pair[1] / "tokenizer_config.json", add_bos_token=False)
        assert self.found(pair) == {
            "None": "other-side-file: the chat template of the source says otherwise",
            "modeling_my.py": "other-side-file: the source has other code",
            "preprocessor_config.json": "other-side-file: it says otherwise than that of the source: size",
            "tokenizer_config.json": "other-side-file: it says otherwise than that of the source: add_bos_token",
        }

    def test_and_samples_texts_otherwise_is_told(self, pair: tuple[Path, Path]) -> None:
        sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": 1, "transformers_version": "1"}
        for path in pair:
            (path / "generation_config.json").write_text(json.dumps(sampled))
        # Defaults may be written or not, and other versions of transformers write nothing for them.
        edit(pair[1] / "generation_config.json", num_beams=1, repetition_penalty=None, transformers_version="2")
        assert self.found(pair) == {}
        edit(pair[1] / "generation_config.json", temperature=0.1, top_p=None)
        text = "other-side-file: it samples texts otherwise than that of the source: "
        assert self.found(pair) == {"generation_config.json": f"{text}temperature (0.1, 0.7), top_p (1.0, 0.9)"}
        assert self.found(pair[::-1])["generation_config.json"].startswith(text)
        edit(pair[1] / "generation_config.json", temperature=0.7, top_p=0.9, eos_token_id=2)
        assert self.found(pair)["generation_config.json"].startswith("other-side-file: it says otherwise than that of the source: eos")

    @pytest.mark.parametrize(("name", "mine", "others"), [("vocab.txt", "a\nb\n", "b\na\n"), ("tokenizer.model", "YQ== 0\n", "Yg== 0\n")])
    def test_and_has_another_vocabulary_is_told(self, name: str, mine: str, others: str, pair: tuple[Path, Path]) -> None:
        for path in pair:
            (path / "tokenizer.json").unlink(missing_ok=True)
            (path / name).write_text(mine)
        assert self.found(pair) == {}
        (pair[1] / name).write_text(others)
        assert self.found(pair) == {name: "other-side-file: it gives other ids to tokens than that of the source"}

    def test_and_lacks_where_texts_end_is_told(self, pair: tuple[Path, Path]) -> None:
        for path in pair:
            edit(path / "config.json", architectures=["MyForCausalLM"], eos_token_id=1)
        for ends, lost in (([1, 3], "3"), (1, None)):
            (pair[0] / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
            text = f"other-side-file: the source has such a file, and without it texts do not end at {lost}"
            assert self.found(pair) == ({"generation_config.json": text} if lost else {})

    def test_and_joins_other_tokens_is_told(self, pair: tuple[Path, Path]) -> None:
        for path, merges in zip(pair, ("#version: 0.2\na b\nab c\n", "a b\r\nab c"), strict=True):
            (path / "tokenizer.json").unlink(missing_ok=True)
            (path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(("a", "b", "c", "ab", "abc"))}))
            (path / "merges.txt").write_text(merges)
        assert self.found(pair) == {}
        (pair[1] / "merges.txt").write_text("a b\n")
        assert self.found(pair) == {"merges.txt": "other-side-file: it joins other tokens than that of the source"}
        averaged = ckpt_cli.average(list(pair), pair[0].parent / "mean").outputs[0].notes
        assert "merges.txt" in {note.code: note.text for note in averaged}["side-files-differ"]

    def test_and_lacks_the_code_of_its_config_is_told_without_a_source(self, pair: tuple[Path, Path]) -> None:
        assert "lacks-code" not in {item.code for item in ckpt_cli.verify(pair[1]).findings}
        (pair[1] / "modeling_my.py").unlink()
        told = {item.code: item.message for item in ckpt_cli.verify(pair[1]).findings}
        assert told["lacks-code"] == "modeling_my.py, which auto_map or another module names, is not there"


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"])
def test_links_that_lead_nowhere_are_found_by_every_command(name: str, tmp_path: Path) -> None:
    run = tiny.folder(tmp_path / "run", tiny.weights(1), tiny.classless())
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("blobs/gone")
    found = {item.file: item.message for item in ckpt_cli.verify(run).findings if item.code == "damaged-side-file"}
    assert found == {name: f"{run / name} is a link to blobs/gone, which does not exist"}
    told = " ".join(note.text for note in ckpt_cli.merge(run, tmp_path / "out").outputs[0].notes if note.code == "lacks-asset")
    assert found[name] in told


class TestACopyOfAnOutput:
    """that left files behind which its manifest lists."""

    @pytest.fixture
    def release(self, tmp_path: Path) -> Path:
        run = tiny.folder(tmp_path / "run", tiny.weights(1), tiny.classless())
        (run / "chat_template.jinja").write_text(TEMPLATE)
        ckpt_cli.merge(run, tmp_path / "release")
        (tmp_path / "release" / "chat_template.jinja").unlink()
        return tmp_path / "release"

    def lost(self, result: MergeResult | AverageResult | DetectResult) -> list[str]:
        notes = (
            result.checkpoint.notes if isinstance(result, DetectResult) else [note for output in result.outputs for note in output.notes]
        )
        return [note.text for note in notes if note.code == "fewer-files" and note.level == "warning"]

    def test_is_told_of_a_source(self, release: Path, tmp_path: Path) -> None:
        for result in (ckpt_cli.merge(release, tmp_path / "out"), ckpt_cli.average([release, release], tmp_path / "mean")):
            (text,) = self.lost(result)
            assert text.startswith(f"{release} lacks chat_template.jinja, which is in its manifest: copy it ")
        assert self.lost(ckpt_cli.detect(release))
        (release / "chat_template.jinja").write_text(TEMPLATE)
        assert not self.lost(ckpt_cli.merge(release, tmp_path / "whole"))

    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "LICENSE"])
    def test_and_has_a_file_of_another_model_is_told(self, name: str, release: Path, tmp_path: Path) -> None:
        def changed(result: MergeResult | AverageResult | DetectResult) -> list[str]:
            listed = result.checkpoint.notes if isinstance(result, DetectResult) and result.checkpoint is not None else ()
            notes = listed or [note for output in getattr(result, "outputs", ()) for note in output.notes]
            return [note.text for note in notes if (note.level, note.code) == ("warning", "changed-side-file")]

        run = tiny.folder(tmp_path / "whole", tiny.weights(1), tiny.classless())
        (run / "LICENSE").write_text("ours")
        out = tmp_path / "again"
        ckpt_cli.merge(run, out)
        bare = tiny.folder(tmp_path / "bare", tiny.weights(2), tiny.classless())
        for path in bare.glob("*.json"):
            path.unlink()
        assert not changed(ckpt_cli.merge(out, tmp_path / "1"))
        assert not changed(ckpt_cli.merge(bare, tmp_path / "2", base=out))
        path = out / name
        path.write_text("theirs" if name == "LICENSE" else json.dumps({**json.loads(path.read_text()), "model_max_length": 7}))
        results = [
            ckpt_cli.merge(out, tmp_path / "3"),
            ckpt_cli.average([run, out], tmp_path / "4"),
            ckpt_cli.merge(bare, tmp_path / "5", base=out),
            ckpt_cli.detect(out),
        ]
        for result in results:
            assert changed(result) == [f"{name} of {out} changed since ckpt wrote it, and is taken as it is now"]
        assert not changed(ckpt_cli.average([out, run], tmp_path / "6"))  # those of the newest are taken

    def test_is_told_of_a_base(self, release: Path, tmp_path: Path) -> None:
        run = tiny.folder(tmp_path / "bare", tiny.weights(2), tiny.classless())
        assert self.lost(ckpt_cli.merge(run, tmp_path / "out", base=release))
        (run / "chat_template.jinja").write_text("its own")
        assert not self.lost(ckpt_cli.merge(run, tmp_path / "own", base=release))

    def test_is_none_where_the_base_gives_the_file(self, release: Path, tmp_path: Path) -> None:
        assert not self.lost(ckpt_cli.merge(release, tmp_path / "out", base=tmp_path / "run"))

    def test_of_a_training_state_is_no_matter(self, release: Path, tmp_path: Path) -> None:
        path = release / "ckpt-manifest.json"
        edit(path, side_files=["training_state.json", "lr_scheduler_state.json", "trainer_state.json", "optimizer.safetensors"])
        assert not self.lost(ckpt_cli.merge(release, tmp_path / "out"))
