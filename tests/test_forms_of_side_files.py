"""Side files in another form than loaders read: compressed, encrypted, in another encoding, with both sides of a merge conflict."""

from __future__ import annotations

import ast
import bz2
import gzip
import lzma
from pathlib import Path
from random import Random

import pytest

import ckpt_cli
from ckpt_cli.hub.contents.forms import conflict_in, form_of, no_code, no_text, no_utf8
from tests.test_contents import CODE, TEMPLATE, damaged, run, sentencepiece, told_alike, told_nothing

VOCABULARY = "[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n"
RANDOM = b"\x81" + Random(7).randbytes(3000)


def conflict(ours: str, theirs: str, *, label: str = "HEAD") -> str:
    return f"<<<<<<< {label}\n{ours}\n=======\n{theirs}\n>>>>>>> origin/main\n"


class TestBothSidesOfAMergeConflict:
    @pytest.mark.parametrize(
        ("name", "content", "line"),
        [
            ("chat_template.jinja", conflict("{{ a }}", "{{ b }}"), 1),
            ("chat_template.jinja", "{{ x }}\r\n" + conflict("{{ a }}", "{{ b }}").replace("\n", "\r\n"), 2),
            ("chat_template.jinja", conflict("{{ a }}\n||||||| 1234567\n{{ c }}", "{{ b }}", label="Updated upstream"), 1),
            ("additional_chat_templates/tool.jinja", conflict("{{ a }}", "{{ b }}"), 1),
            ("vocab.txt", "[PAD]\n[UNK]\n" + conflict("[CLS]", "[SEP]"), 3),
            ("merges.txt", "#version: 0.2\nt h\n" + conflict("th e", "i n"), 3),
            ("modeling_my.py", CODE + conflict("x = 1", "x = 2"), CODE.count("\n") + 1),
            ("generation_config.json", "{\n" + conflict('"eos_token_id": 1', '"eos_token_id": 2') + "}", 2),
            ("tokenizer.model", "YQ== 98\n" + conflict("Yg== 99", "Yw== 99"), 2),
        ],
    )
    def test_are_told(self, name: str, content: str, line: int, tmp_path: Path) -> None:
        told_alike(tmp_path, name, content, f"the file holds both sides of a merge conflict, from line {line} on")

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("chat_template.jinja", "Answer so:\n<<<<<<< SEARCH\nold\n=======\nnew\n>>>>>>> REPLACE\n{{ messages[0].content }}"),
            ("chat_template.jinja", "{{ x }}\n=======\n>>>>>>> y\n<<<<<<< z\n"),
            ("vocab.txt", "<<<<<<<\n=======\n>>>>>>>\n"),
            ("merges.txt", "#version: 0.2\n<<<<<<< <\n======= =\n>>>>>>> >\n"),
            ("modeling_my.py", f'"""Merging.\n\n{conflict("a", "b")}"""\n'),
            ("requirements.txt", "torch\n=======\nnumpy\n"),
        ],
    )
    def test_are_not_what_only_looks_like_them(self, name: str, content: str, tmp_path: Path) -> None:
        told_nothing(tmp_path, name, content)

    def test_in_a_template_of_a_config_are_told(self, tmp_path: Path) -> None:
        made = run(tmp_path / "run", "tokenizer_config.json", '{"chat_template": "<<<<<<< HEAD\\na\\n=======\\nb\\n>>>>>>> c"}')
        (text,) = damaged(ckpt_cli.merge(made, tmp_path / "out"))
        assert text.endswith("chat_template: the file holds both sides of a merge conflict, from line 1 on")

    def test_of_any_length_are_looked_for_in_time(self) -> None:
        for part in ("<<<<<<< HEAD\n", "=======\n", "<<<<<<< SEARCH\n", "<<<<<<< HEAD\n=======\n", "<" * 99, "\n"):
            assert conflict_in(part * 100_000) is None


class TestBytesThatAreNoText:
    @pytest.mark.parametrize(
        ("name", "content", "text"),
        [
            ("vocab.txt", gzip.compress(VOCABULARY.encode(), mtime=0), "the file is compressed by gzip"),
            ("tokenizer.json", gzip.compress(b"{}", mtime=0), "the file is compressed by gzip"),
            ("chat_template.jinja", gzip.compress(TEMPLATE.encode(), mtime=0), "the file is compressed by gzip"),
            ("tokenizer.model", gzip.compress(sentencepiece(), mtime=0), "the file is compressed by gzip"),
            ("merges.txt", b"\x28\xb5\x2f\xfd\x04\x58" + RANDOM, "the file is compressed by zstd"),
            ("merges.txt", bz2.compress(b"a b\n" * 9), "the file is compressed by bzip2"),
            ("modeling_my.py", lzma.compress(CODE.encode()), "the file is compressed by xz"),
            ("vocab.txt", VOCABULARY.encode("utf-16"), "the file is UTF-16, not UTF-8"),
            ("merges.txt", "#version: 0.2\nt h\n".encode("utf-16-le"), "the file is UTF-16, not UTF-8"),
            ("vocab.txt", VOCABULARY.encode("utf-16-be"), "the file is UTF-16, not UTF-8"),
            ("modeling_my.py", CODE.encode("utf-16"), "the file is UTF-16, not UTF-8"),
            ("chat_template.jinja", TEMPLATE.encode("utf-16"), "the file is UTF-16, not UTF-8"),
            ("generation_config.json", "{}".encode("utf-16"), "the file is UTF-16, not UTF-8"),
            ("tokenizer.model", b"\0GITCRYPT\0" + RANDOM, "the file is encrypted by git-crypt"),
            ("special_tokens_map.json", b"\0GITCRYPT\0" + RANDOM, "the file is encrypted by git-crypt"),
            ("vocab.txt", RANDOM, "the file holds no text"),
            ("merges.txt", "t h\nth \xe9\n".encode("latin-1") + b"e s\n", "byte 7 of the file is not UTF-8"),
            ("modeling_my.py", RANDOM, "the file holds no text"),
            ("modeling_my.py", CODE.encode() + "# \xe9t\xe9\n".encode("latin-1"), "the code is not UTF-8, and names no other encoding"),
            ("tokenizer.model", RANDOM, "the file is neither a model of sentencepiece nor a table of tiktoken"),
            ("spiece.model", RANDOM, "the file is neither a model of sentencepiece nor a table of tiktoken"),
            ("tokenizer.model", "Sorry, you have been blocked", "the file is neither a model of sentencepiece nor a table of tiktoken"),
        ],
    )
    def test_are_told(self, name: str, content: str | bytes, text: str, tmp_path: Path) -> None:
        told_alike(tmp_path, name, content, text)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("modeling_my.py", f"# -*- coding: latin-1 -*-\n# \xe9t\xe9\n{CODE}\n# \xe9".encode("latin-1")),
            ("modeling_my.py", b"\xef\xbb\xbf" + CODE.encode()),
            ("modeling_my.py", ("# 模型\n" + CODE).encode()),
            ("vocab.txt", "[PAD]\n\u2581\n\x7f\n\x01\n\ufffd\n\U0001f600\n\u200b\ne\u0301\n"),
            ("vocab.txt", "BZh\nPK\nage\n"),
            ("merges.txt", "#version: 0.2\n\u0120 t\n\u010a \u00c3\n"),
            ("qwen.tiktoken", "IQ== 0\nIg== 1\nIw== 2\n"),
            ("tokenizer.model", "IQ== 0\r\nIg== 1\r\n"),
            ("tokenizer.model", "IQ== 0"),
            ("tokenizer.model", '{"type": "own"}'),
            ("tokenizer.model.v3", sentencepiece()),
            ("ice_text.model", RANDOM),
            ("ice_text.model", b"\x81 a\n" * 9 + b"\x81"),
            ("prophetnet.tokenizer", sentencepiece()),
            ("prophetnet.tokenizer", VOCABULARY),
            ("tekken.json", '{"config": {}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}'),
            ("labels.txt", "caf\xe9\nna\xefve\n".encode("latin-1")),
        ],
    )
    def test_are_not_what_some_loader_reads(self, name: str, content: str | bytes, tmp_path: Path) -> None:
        if name.endswith(".py") and isinstance(content, bytes):
            ast.parse(content)
        told_nothing(tmp_path, name, content)

    def test_of_a_large_file_are_told_by_its_beginning(self, tmp_path: Path) -> None:
        made = run(tmp_path / "run", "vocab.txt", gzip.compress(b"", mtime=0))
        with (made / "vocab.txt").open("r+b") as file:
            file.truncate(17 << 20)
        assert damaged(ckpt_cli.merge(made, tmp_path / "out")) == ["vocab.txt is passed on as it is: the file is compressed by gzip"]

    def test_are_never_an_error_of_the_check_itself(self) -> None:
        random = Random(3)
        for length in range(300):
            raw = random.randbytes(length)
            for check in (form_of, no_code, no_text, no_utf8):
                check(raw)
        for encoding in ("hex", "rot13", "punycode", "idna", "undefined", "utf-16", "nothing"):
            no_code(f"# coding: {encoding}\nx = 1\n".encode())
