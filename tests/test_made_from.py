"""What several processes note of the files that they read, and when that says that a file is another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_cli.files.descriptors import Identity, MadeFrom

A, B = (Identity(f"/run/{name}", 100, 5, device=1, inode=inode, ctime_ns=7) for name, inode in (("a", 11), ("b", 12)))


def differing(*now: Identity, copies: bool, elsewhere: bool = False) -> list[str]:
    then = MadeFrom.of([A, B])
    return (replace(then, machine="another") if elsewhere else then).differences(MadeFrom.of(now), copies=copies)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
class TestEverywhere:
    @pytest.mark.parametrize("change", [{"size": 101}, {"mtime_ns": 6}, {"tag": "v2"}, {"ctime_ns": 8}])
    def test_a_change_is_seen(self, change: dict[str, Any], elsewhere: bool, copies: bool) -> None:
        assert differing(A, replace(B, **change), copies=copies, elsewhere=elsewhere) == ["/run/b"]

    def test_a_file_that_was_not_there(self, elsewhere: bool, copies: bool) -> None:
        assert differing(A, B, replace(B, path="/run/c"), copies=copies, elsewhere=elsewhere) == ["/run/c"]

    def test_the_same(self, elsewhere: bool, copies: bool) -> None:
        assert differing(B, A, copies=copies, elsewhere=elsewhere) == []


def test_copies_on_another_machine() -> None:
    copied = [replace(each, device=2, inode=each.inode + 50, ctime_ns=9) for each in (A, B)]
    assert differing(*copied, copies=True, elsewhere=True) == []
    assert differing(*copied, copies=False, elsewhere=True) == ["/run/a", "/run/b"]


def test_numbers_that_a_mount_makes_up_say_nothing_where_all_see_one_file_system() -> None:
    assert differing(replace(A, device=3, inode=1), replace(B, device=3, inode=2), copies=False, elsewhere=True) == []


def test_the_digest_is_that_of_the_files_and_not_of_the_mount() -> None:
    known = MadeFrom.of([A, B]).digest
    assert MadeFrom.of([replace(B, device=9), replace(A, device=9)]).digest == known
    assert MadeFrom.of([A, replace(B, ctime_ns=8)]).digest != known
