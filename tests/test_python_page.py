"""The examples of docs/python.md, run from top to bottom: what stands behind an arrow is what comes out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cli import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()
START = """
import torch.distributed
torch.distributed.init_process_group("gloo", init_method="file://{meeting}", rank=0, world_size=1)
"""
END = "\ntorch.distributed.destroy_process_group()\nprint(CHECKED)\n"


def checked(code: str) -> str:
    """The code with every ``value  # -> text`` as a comparison."""
    return re.sub(r"^( *)(.+?)  # -> (.+)$", r"\1check((\2), '''\3''')", code, flags=re.MULTILINE)


def test_the_examples_do_what_they_say(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "tiny-run", tmp_path / "run")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    check = "CHECKED = 0\ndef check(value, text):\n    global CHECKED\n    CHECKED += 1\n    assert repr(value) == text, (value, text)\n"
    code = check + START.format(meeting=tmp_path / "meeting") + "\n".join(map(checked, blocks)) + END
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) == PAGE.count("# -> ")


def test_every_public_function_is_named() -> None:
    import ckpt_cli

    for name in ckpt_cli.__all__:
        if name.islower() and not name.startswith("__"):
            assert f"`{name}`" in PAGE or f"`ckpt_cli.{name}`" in PAGE, name
