"""Side files that hold something else than their names say: a server's answer, a part of a file, no JSON object."""

from __future__ import annotations

import ast
import inspect
import json
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError
from ckpt_cli.hub.contents.answers import answer_in, answer_of
from ckpt_cli.hub.contents.cuts import cut_code, cut_pieces, cut_table
from ckpt_cli.hub.contents.templates import broken
from tests.tiny import classless, folder, verl, weights

PAGE = "<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>\u2026</body></html>"
STORE = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>'
CODE = (
    "from transformers import Qwen2Config, Qwen2ForCausalLM\n\n\nclass MyConfig(Qwen2Config):\n    model_type = 'my'\n\n\n"
    "class MyModel(Qwen2ForCausalLM):\n    config_class = MyConfig\n\n    def forward(self, *arguments,\n                **options):\n"
    "        return super().forward(*arguments, **options)\n"
)
TEMPLATE = (
    "{%- macro shown(message, more={}) -%}{{- '<|' + message.role + '|>' + message.content }}{%- endmacro -%}\n"
    "{#- one after the other -#}{%- for m in messages %}{%- if m.role == 'user' %}{{- shown(m, {'a': {'b': '%}'}}) }}{%- else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{%- endif %}{%- endfor %}{%- set close %}<end>{% endset %}{{- close }}"
)


def sized(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + sized(number >> 7)


def held(field: int, content: bytes) -> bytes:
    return sized(field << 3 | 2) + sized(len(content)) + content


def sentencepiece(pieces: int = 40) -> bytes:
    """A model as sentencepiece writes one: pieces with a score and a kind, then how it was trained and what it does to texts."""
    words = [held(1, f"\u2581w{number}".encode()) + b"\x15\0\0\x80\xbf\x18\x01" for number in range(pieces)]
    return b"".join(held(1, word) for word in words) + held(2, b"\x18\x01" + held(7, b"m" * 200)) + held(3, held(1, b"nmt_nfkc"))


def run(path: Path, name: str, content: str | bytes) -> Path:
    """A model with one file more, which its config names if it is code."""
    of = classless(auto_map={"AutoModelForCausalLM": "modeling_my.MyModel"} if name.endswith(".py") else None)
    made = folder(path, weights(), of)
    (made / name).parent.mkdir(exist_ok=True)
    (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return made


def damaged(result: Any) -> list[str]:
    return [note.text for note in result.outputs[0].notes if note.code == "damaged-asset" and note.level == "warning"]


def told_alike(tmp_path: Path, name: str, content: str | bytes, text: str) -> None:
    """Every command says so of a file: what is written has it, and what it is made of."""
    made = run(tmp_path / "run", name, content)
    wanted = f"{name} is passed on as it is: {text}"
    assert damaged(ckpt_cli.merge(made, tmp_path / "out")) == [wanted]
    assert damaged(ckpt_cli.average([folder(tmp_path / "older", weights(), classless()), made], tmp_path / "mean")) == [wanted]
    with pytest.raises(CkptError, match="strict"):
        ckpt_cli.merge(made, tmp_path / "strict", strict=True)
    for path in (made, tmp_path / "out"):
        (item,) = [item for item in ckpt_cli.verify(path).findings if item.code == "damaged-side-file"]
        assert (item.severity, item.file, item.message) == ("error", name, text)


def told_nothing(tmp_path: Path, name: str, content: str | bytes) -> None:
    made = run(tmp_path / "run", name, content)
    assert damaged(ckpt_cli.merge(made, tmp_path / "out")) == []
    for path in (made, tmp_path / "out"):
        assert "damaged-side-file" not in {item.code for item in ckpt_cli.verify(path).findings}


class TestWhatAServerSaid:
    """A download that does not look at the status of the answer saves the answer."""

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("chat_template.jinja", "Entry not found", "what a server said: 'Entry not found'"),
            ("additional_chat_templates/tool.jinja", "404: Not Found", "what a server said: '404: Not Found'"),
            ("modeling_my.py", "404: Not Found", "what a server said: '404: Not Found'"),
            ("merges.txt", "Invalid credentials in header\n", "what a server said: 'Invalid credentials in header'"),
            ("tokenizer.model", PAGE, "a page in HTML"),
            ("vocab.json", STORE, None),
            ("generation_config.json", "Too Many Requests", "what a server said: 'Too Many Requests'"),
            ("tokenizer_config.json", '{"error": "Entry not found"}', "what a server said: 'Entry not found'"),
            ("preprocessor_config.json", '{"message": "Not Found", "status": "404"}', "what a server said: 'Not Found'"),
        ],
    )
    def test_is_no_side_file(self, name: str, content: str, said: str | None, tmp_path: Path) -> None:
        if said is None:
            assert damaged(ckpt_cli.merge(run(tmp_path / "run", name, content), tmp_path / "out"))[0].endswith("<Error><Code>AccessDe...'")
        else:
            told_alike(tmp_path, name, content, f"the file holds {said}")

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("chat_template.jinja", "Not found: {{ messages[0].content }}"),
            ("chat_template.jinja", "<html>{% for m in messages %}{{ m.content }}{% endfor %}</html>"),
            ("generation_config.json", {"error": 3, "eos_token_id": 1}),
            ("vocab.txt", "error\nmessage\nnot found"),
            ("added_tokens.json", {"error": 61, "message": 62}),
            ("LICENSE.txt", "Forbidden"),
            ("LICENSE", PAGE),
        ],
    )
    def test_is_not_what_only_sounds_like_it(self, name: str, content: Any, tmp_path: Path) -> None:
        told_nothing(tmp_path, name, content if isinstance(content, str) else json.dumps(content))

    @pytest.mark.parametrize(
        "text",
        [
            "Repository not found",
            "Invalid username or password.",
            "Access to model org/name is restricted. You must have access to it and be authenticated to access it. Please log in.",
            "Found. Redirecting to https://cdn.example.org/x?Expires=1",
            "error code: 1015",
            "503 Service Temporarily Unavailable",
            "upstream connect error or disconnect/reset before headers. reset reason: connection failure",
        ],
    )
    def test_is_known_by_its_words(self, text: str) -> None:
        assert answer_in(text) is not None
        assert answer_of({"detail": text, "code": 3}) is not None
        assert answer_in(f"{{# {text} #}}{{{{ x }}}}") is None
        assert answer_of({"detail": text, "vocab_size": 3}) is None


@pytest.mark.parametrize("name", ["chat_template.jinja", "merges.txt", "preprocessor_config.json"])
def test_files_beside_shards_are_judged_as_a_merge_writes_them(name: str, tmp_path: Path) -> None:
    home = verl(tmp_path, weights(), classless(), {name: "Entry not found", "special_tokens_map.json": "\ufeff{}"})
    assert [item.file for item in ckpt_cli.verify(home).findings if item.code == "damaged-side-file"] == [name]
    assert len(damaged(ckpt_cli.merge(home, tmp_path / "out"))) == 1
    assert [item.file for item in ckpt_cli.verify(tmp_path / "out").findings if item.code == "damaged-side-file"] == [name]


def test_files_of_a_base_whose_names_tell_nothing_are_found_again(tmp_path: Path) -> None:
    files = {"dataset_statistics.json": "{", "labels.txt": "404: Not Found", "words.model": "Entry not found", "cameras_config.json": "[1]"}
    base, made = folder(tmp_path / "base", weights(), classless(), files), folder(tmp_path / "run", weights(1), classless())
    told = damaged(ckpt_cli.merge(made, tmp_path / "out", base=base))
    wanted = {name for name in files if name != "cameras_config.json"}
    assert {text.split()[0] for text in told} == wanted
    assert {item.file for item in ckpt_cli.verify(tmp_path / "out").findings if item.code == "damaged-side-file"} == wanted


class TestJsonThatIsNoObject:
    @pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "vocab.json"])
    @pytest.mark.parametrize("content", ["null", "[]", '"x"'])
    def test_is_told(self, name: str, content: str, tmp_path: Path) -> None:
        made = run(tmp_path / "run", name, content)
        wanted = f"{name} is passed on as it is: the file does not hold a JSON object"
        assert damaged(ckpt_cli.merge(made, tmp_path / "out")) == [wanted]
        assert [item.file for item in ckpt_cli.verify(made).findings if item.code == "damaged-side-file"] == [name]

    @pytest.mark.parametrize(("name", "content"), [("modules.json", "[]"), ("tokenizer_config.json", "{}"), ("entity_vocab.json", "[1]")])
    def test_where_none_is_needed_is_not(self, name: str, content: str, tmp_path: Path) -> None:
        told_nothing(tmp_path, name, content)


class TestATemplateThatWasCut:
    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (TEMPLATE[: TEMPLATE.index("shown(m") + 4], "the template ends within a tag"),
            (TEMPLATE[: TEMPLATE.index("one after")], "the template ends within a comment"),
            (TEMPLATE[: TEMPLATE.index("{%- else")], "the template ends before {% endif %}"),
            (TEMPLATE[: TEMPLATE.index("<end>")], "the template ends before {% endset %}"),
            (TEMPLATE[TEMPLATE.index("{%- else") :], "the template has {% endif %} where no {% if %} is open"),
        ],
    )
    def test_is_told_wherever_it_is_kept(self, content: str, text: str, tmp_path: Path) -> None:
        told_alike(tmp_path / "alone", "chat_template.jinja", content, text)
        for number, kept in enumerate((content, {"default": TEMPLATE, "tool": content}, [{"name": "default", "template": content}])):
            made = run(tmp_path / f"{number}", "tokenizer_config.json", json.dumps({"chat_template": kept}))
            wanted = f"tokenizer_config.json is passed on as it is: chat_template: {text}"
            assert damaged(ckpt_cli.merge(made, tmp_path / f"out{number}")) == [wanted]
            assert "damaged-side-file" in {item.code for item in ckpt_cli.verify(made).findings}

    def test_and_a_whole_one_are_judged_as_jinja_does(self) -> None:
        """Cut anywhere: what is called broken compiles nowhere, and what compiles is never called so."""
        compiled = compiler()
        found = missed = 0
        for text in (TEMPLATE, *HEALTHY, *real_templates()):
            assert broken(text) is None
            for end in range(1, len(text), max(len(text) // 40, 1)):
                cut, fails = broken(text[:end]), not compiled(text[:end])
                # Of a comment or a raw text, the beginning alone compiles to nothing.
                assert fails or cut is None or text[:end].rstrip().endswith(("{#", "{#-", "{% raw %}", "{%- raw -%}"))
                found, missed = found + (cut is not None), missed + (fails and cut is None)
        assert found > 20 * missed

    @pytest.mark.parametrize(
        "part", ["{{", "{%", "{% if a %}", "{{ (", "{{ '\\'", "{%" + " " * 99, "{# ", "{% raw %}", "{%- raw ", "{{ 'a' "]
    )
    def test_of_any_length_is_read_in_time(self, part: str) -> None:
        start = time.monotonic()
        broken(part * (3_000_000 // len(part)))
        broken(part * (1_000_000 // len(part)))
        assert time.monotonic() - start < 20


HEALTHY = [
    "",
    "plain { text } % #",
    "{% raw %}{% if %}{{ {% endraw %}{%- raw -%} {# {%- endraw -%}x",
    "{# {% if %} #}a{#- {{ -#}",
    "{% set x %}a{% endset %}{% set y = 1 == 2 %}{% set z | replace('a', '=') %}b{% endset %}",
    "{% set ns = namespace(x=1) %}{% set ns.x = {'a=': '='} %}{% set a, b = 1, 2 %}",
    "{% call(u) f(1) %}x{% endcall %}{% filter upper %}y{% endfilter %}",
    "{{ 'it\\'s %} }} {% if' }}{{ \"a\\\\\" }}",
    "{%+ if a +%}x{%+ endif +%}{%\nif\nx\n%}y{%\nendif\n%}",
    "{% block b %}{% endblock b %}{% with a=1 %}{% endwith %}{% autoescape true %}{% endautoescape %}",
    "{% for x in [1] if x == 1 recursive %}{% continue %}{% break %}{% else %}{% endfor %}",
    "{{ a[{'b': 1}['b']] }}{{ (1, (2, 3)) }}{{ {} }}{{{'a': {'b': 1}}}}",
    "{{ 10 % 3 }}{% if 10 % 3 == 1 %}a{% endif %}{% if a == '=' %}{% endif %}",
]


def compiler() -> Callable[[str], bool]:
    """Whether transformers compiles a template."""
    jinja2 = pytest.importorskip("jinja2")
    template = import_module("transformers.utils.chat_template_utils")._compile_jinja_template

    def compiles(text: str) -> bool:
        try:
            getattr(template, "__wrapped__", template)(text)
        except (jinja2.TemplateError, ValueError):
            return False
        return True

    return compiles


def real_templates() -> Iterator[str]:
    """The templates that transformers has in its own code."""
    for name in ("llama", "gemma", "cohere", "gpt_neox", "idefics2", "llava", "qwen2_vl", "mistral", "blenderbot", "bloom"):
        for path in Path(inspect.getfile(import_module(f"transformers.models.{name}"))).parent.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and "{% for" in node.value:
                    yield node.value


class TestCodeThatWasCut:
    @pytest.mark.parametrize("end", ["**opt", "def forw", "super().forward(", "model_type = 'm"])
    def test_is_told(self, end: str, tmp_path: Path) -> None:
        content = CODE[: CODE.index(end) + len(end)]
        with pytest.raises(SyntaxError):
            ast.parse(content)
        made = run(tmp_path / "run", "modeling_my.py", content)
        (text,) = damaged(ckpt_cli.merge(made, tmp_path / "out"))
        assert text.startswith("modeling_my.py is passed on as it is: the code ends in the middle: ")
        for path in (made, tmp_path / "out"):
            assert "modeling_my.py" in {item.file for item in ckpt_cli.verify(path).findings if item.code == "damaged-side-file"}

    def test_in_a_folder_or_imported_is_told(self, tmp_path: Path) -> None:
        made = run(tmp_path / "run", "modeling_my.py", "from .helper_my import x\n" + CODE)
        (made / "helper_my.py").write_text("x = (1,\n     2")
        (made / "custom_generate").mkdir()
        (made / "custom_generate" / "generate.py").write_text("def generate(model, **options):\n")
        found = [item.file for item in ckpt_cli.verify(made).findings if item.code == "damaged-side-file"]
        assert sorted(map(str, found)) == ["custom_generate/generate.py", "helper_my.py"]
        assert len(damaged(ckpt_cli.merge(made, tmp_path / "out"))) == 2

    @pytest.mark.parametrize(
        "content",
        [
            CODE,
            "",
            "x = 1",
            "print 'of another version', x\ny = 1\n",
            "print 'of another version'",
            "x = (\n    $new(1),\n    2,\n)\ny = 3\n",
            "$new x = 3\n",
            "x = $'new'",
            'r = "\\d"\n',
        ],
    )
    def test_is_not_what_only_another_python_reads(self, content: str, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            told_nothing(tmp_path, "modeling_my.py", content)

    def test_of_any_form_is_read_in_time(self) -> None:
        start = time.monotonic()
        for text in (
            "x = " + "1+" * 200_000 + "1",
            "x = a" + ".b" * 200_000,
            "(" * 9000,
            "x = " + "not " * 99_000,
            "{1: " * 90,
            "x" * (2 << 20),
        ):
            cut_code(text.encode())
        assert time.monotonic() - start < 20


class TestAVocabularyThatWasCut:
    @pytest.mark.parametrize(
        ("name", "content", "text"),
        [
            ("merges.txt", "#version: 0.2\nt h\nth e\nthe", "the last line has 1 word, all others have 2"),
            ("bpe.codes", "n g 6374\nh i 31\ni n", "the last line has 2 words, all others have 3"),
            ("my.tiktoken", "YQ== 98\nYg== 99\nYw== 10", "the last line has the number 10 where 100 follows"),
            ("tokenizer.model", "YQ== 98\nYg== 99\nYw==", "the last line has 1 word, all others have 2"),
            ("vocab.txt", "a\nb\n\u2581c".encode()[:-2], "the file ends within a character"),
            ("merges.txt", b"#version: 0.2\nt h\n" + bytes(64), "the file ends with zeros, as after a power loss"),
            ("tokenizer.model", sentencepiece()[:-1], "the file ends within a field"),
            ("spiece.model", sentencepiece()[:200], "the file ends within a field"),
            ("source.spm", sentencepiece()[:-300] + bytes(300), None),
        ],
    )
    def test_is_told(self, name: str, content: str | bytes, text: str | None, tmp_path: Path) -> None:
        if text is not None:
            told_alike(tmp_path, name, content, text)
        else:
            assert "is no model of sentencepiece" in damaged(ckpt_cli.merge(run(tmp_path / "run", name, content), tmp_path / "out"))[0]

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("merges.txt", "#version: 0.2\nt h\nth e\n"),
            ("merges.txt", "#version: 0.2"),
            ("merges.txt", "#version: 0.2\r\nt h\r\nth\u00a0e \u0120t"),
            ("dict.txt", "the 99\nof 98\nin 9"),
            ("vocab.txt", "[PAD]\nthe\nof"),
            ("my.tiktoken", "YQ== 98\nYg== 99\nYw== 100"),
            ("tokenizer.model", "YQ== 98\nYg== 99\nYw== 100\n"),
            ("tokenizer.model", sentencepiece()),
            ("words.model", b"\x08\x01some other form\xff"),
            ("custom_generate/requirements.txt", "torch >= 2.0\nnumpy >= 1.0\neinops"),
        ],
    )
    def test_is_no_whole_one(self, name: str, content: str | bytes, tmp_path: Path) -> None:
        told_nothing(tmp_path, name, content)

    def test_of_sentencepiece_is_found_wherever_it_was_cut(self) -> None:
        whole = sentencepiece()
        assert cut_pieces(whole) is None
        between = {end for end in range(20, len(whole)) if cut_pieces(whole[:end]) is None}
        assert len(between) == 1  # before what it does to texts: older models may lack that
        assert cut_table("") is None
        assert cut_pieces(b"\n" * 90) is None
        assert cut_pieces(b"\x0a" + b"\xff" * 90) is None
