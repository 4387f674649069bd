"""Small files in place of others: what git-annex and git-xet leave, and links of repositories that became texts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import FilePointer
from ckpt_cli.files.leftovers.pointers import POINTER_SIZE, refuse_pointer
from ckpt_cli.files.source import read_small
from tests.tiny import classless, folder, weights

ANNEX = b"/annex/objects/SHA256E-s1048576--0123456789abcdef.model\n"
XET = b"# xet version 0\nfilesize = 1223\nhash = '52df'\n"
BLOB = b"../../blobs/52dfb3a0f8e44f0b"
SAMBA = b"XSym\n0028\n" + b"0" * 32 + b"\n" + BLOB + b"\n" + b" " * 995


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("chat_template.jinja", BLOB, "the text of a link to ../../blobs/52dfb3a0f8e44f0b"),
        ("vocab.txt", BLOB, "the text of a link to ../../blobs/52dfb3a0f8e44f0b"),
        ("generation_config.json", BLOB, "the text of a link to ../../blobs/52dfb3a0f8e44f0b"),
        ("model.safetensors", BLOB, "the text of a link to ../../blobs/52dfb3a0f8e44f0b"),
        ("config.json", BLOB, "the text of a link to ../../blobs/52dfb3a0f8e44f0b"),
        ("merges.txt", b"/data/models/qwen/merges.txt", "the text of a link to /data/models/qwen/merges.txt"),
        ("modeling_my.py", b"code/modeling_my.py", "the text of a link to code/modeling_my.py"),
        ("tokenizer.model", b"tokenizer-v2.model", "the text of a link to tokenizer-v2.model"),
        ("tokenizer.model", ANNEX, "a pointer of git-annex"),
        ("model.safetensors", ANNEX, "a pointer of git-annex"),
        ("tokenizer.json", b"../.git/annex/objects/x/y/SHA256E-s1--0/SHA256E-s1--0", "a pointer of git-annex"),
        ("tokenizer.model", XET, "a pointer of git-xet"),
        ("vocab.json", SAMBA, "a link that was kept as a file"),
        ("spiece.model", b"IntxLNK\x01" + "a/b".encode("utf-16-le"), "a link that was kept as a file"),
    ],
)
def test_is_refused_as_a_pointer_of_git_lfs_is(name: str, content: bytes, text: str, tmp_path: Path) -> None:
    of = classless(auto_map={"AutoModelForCausalLM": "modeling_my.MyModel"} if name.endswith(".py") else None)
    made = folder(tmp_path / "run", weights(), of)
    (made / name).write_bytes(content)
    with pytest.raises(FilePointer) as caught:
        ckpt_cli.merge(made, tmp_path / "out")
    assert caught.value.message.startswith(f"this is {text}")
    assert caught.value.path == str(made / name)
    assert not (tmp_path / "out").exists()
    assert ("file-pointer", name) in {(item.code, item.file) for item in ckpt_cli.verify(made).findings}
    if name not in ("model.safetensors", "config.json"):
        base = Path(shutil.copytree(made, tmp_path / "base"))
        run = folder(tmp_path / "bare", weights(), bare=True)
        with pytest.raises(FilePointer):
            ckpt_cli.merge(run, tmp_path / "out", base=base)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("latest", b"../checkpoint-5"),
        ("latest.pt", b"step_5.pt"),
        ("last.json", b"steps/step_5.json"),
        ("requirements.txt", b"../package"),
        ("paths.pth", b"/home/user/project"),
        ("vocab.txt", b"[PAD]\n[UNK]\n../a\n"),
        ("vocab.txt", b"a"),
        ("chat_template.jinja", b"{{ messages }}"),
        ("chat_template.jinja", b"../{{ messages[0].content }}"),
        ("chat_template.jinja", b"/bin/sh -c x"),
        ("merges.txt", b"#version: 0.2\n. /\n./ /\n"),
        ("modeling_my.py", b"x = 1"),
        ("modeling_my.py", b"# xet version 0 is not read here\n"),
        ("notes.txt", BLOB),
        ("vocab.txt", ANNEX.replace(b"/annex", b"#annex") * 9),
        ("vocab.txt", b"../" + b"x" * POINTER_SIZE),
    ],
)
def test_is_none_where_a_path_or_its_words_may_be(name: str, content: bytes, tmp_path: Path) -> None:
    refuse_pointer(content, f"/tmp/{name}", len(content))
    (tmp_path / name).write_bytes(content)
    assert read_small(tmp_path / name) == content


def test_of_a_newer_step_is_not_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        folder(tmp_path / "run" / f"checkpoint-{step}", weights(step))
    (tmp_path / "run" / "checkpoint-2" / "model.safetensors").write_bytes(ANNEX)
    with pytest.raises(FilePointer):
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
