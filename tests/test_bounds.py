"""Bounds fail closed: what is too deep, too long, unknown or empty is refused or named, never left out without a word."""

from __future__ import annotations

import collections
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, Gap, Inconsistent, MissingShard, NotRecognised, Unsupported
from ckpt_cli.files import pickle_nodes
from ckpt_cli.files.pickle_nodes import Call, Global, Persistent, as_dict
from ckpt_cli.files.source import Files
from ckpt_cli.formats.dcp.metadata import read_catalog
from ckpt_cli.formats.placeholders import placeholders
from ckpt_cli.formats.torch_files import state_dict
from ckpt_cli.formats.torch_files.state_dict import StorageSearch
from tests.cli import ckpt

State = dict[str, Any]


def weights() -> State:
    return {f"layers.{i}.weight": torch.full((3, 2), float(i)) for i in range(14)}


def deep(content: object, depth: int, around: Callable[[object], object]) -> object:
    for _ in range(depth):
        content = around(content)
    return content


class Kept:
    """An object of a class of a trainer."""

    def __init__(self, content: object) -> None:
        self.content = content


class Rebuilt:
    """Pickled as a call of a function that ckpt does not know."""

    def __init__(self, function: object, *args: object) -> None:
        self.made = function, args

    def __reduce__(self) -> Any:
        return self.made


def _rebuild_something(*args: object) -> object:
    return args


def rebuilt_by_name(*args: object, **kwargs: object) -> object:
    return args, kwargs


class Named:
    """Pickled with keyword arguments (NEWOBJ_EX)."""

    def __new__(cls, **kwargs: object) -> Named:
        return super().__new__(cls)

    def __init__(self, **kwargs: object) -> None:
        self._kwargs = kwargs

    def __getnewargs_ex__(self) -> Any:
        return (), self._kwargs

    def __getstate__(self) -> None:
        return None


LAST = torch.ones(3, 2)
HIDDEN: dict[str, Callable[[], object]] = {
    "nine dicts deep": lambda: deep(LAST, 9, lambda inner: {"in": inner}),
    "five hundred dicts deep": lambda: deep(LAST, 150, lambda inner: {"in": inner}),
    "lists in lists": lambda: deep(LAST, 150, lambda inner: [inner]),
    "behind 150 000 items": lambda: [*range(150_000), LAST],
    "before 150 000 items": lambda: [LAST, *range(150_000)],
    "in a tuple in a set of objects": lambda: Kept(({"a": Kept([LAST])},)),
    "in an OrderedDict": lambda: collections.OrderedDict(a=collections.OrderedDict(b=LAST)),
    "in a defaultdict": lambda: collections.defaultdict(list, a=[LAST]),
    "an argument of an unknown call": lambda: Rebuilt(rebuilt_by_name, LAST),
    "deep in the arguments of an unknown call": lambda: Rebuilt(rebuilt_by_name, (({"a": [LAST]},),)),
    "a keyword of an unknown object": lambda: Named(data=LAST),
    "a rebuild call that is not known": lambda: Rebuilt(_rebuild_something, LAST),
    "a rebuild call without a storage": lambda: Rebuilt(_rebuild_something, b"\0" * 24, (3, 2)),
    "pickled bytes": lambda: Rebuilt(torch._utils._rebuild_tensor_v2, Rebuilt(torch.storage._load_from_bytes, b"xxxx"), 0, (2,), (1,)),
}


def commands(place: Path) -> list[Callable[[Path], object]]:
    """What reads weights."""
    return [
        ckpt_cli.inspect,
        lambda path: ckpt_cli.merge(path, place / "out"),
        lambda path: ckpt_cli.average([path, path], place / "averaged"),
        lambda path: ckpt_cli.merge(path, place / "out", names="native", dry_run=True),
    ]


def written(folder: Path, form: str, content: State) -> Path:
    """A state dict as the readers of torch files find it."""
    folder.mkdir()
    if form == "rank file":
        torch.save(content, folder / "model_world_size_1_rank_0.pt")
    elif form == "legacy":
        torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        torch.save(content if form == "torch file" else {"state_dict": content, "epoch": 3}, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("form", ["rank file", "torch file", "checkpoint", "legacy"])
@pytest.mark.parametrize("place", HIDDEN)
def test_a_tensor_is_never_lost_because_of_where_it_is(tmp_path: Path, form: str, place: str) -> None:
    if form == "legacy" and place == "pickled bytes":
        pytest.skip("torch < 1.6 wrote storages otherwise")
    run = written(tmp_path / "run", form, {**weights(), "last": HIDDEN[place]()})
    for command in (
        ckpt_cli.inspect,
        lambda path: ckpt_cli.merge(path, tmp_path / "out"),
        lambda p: ckpt_cli.average([p, p], tmp_path / "a"),
    ):
        with pytest.raises((Unsupported, CorruptFile)) as caught:
            command(run)
        assert caught.value.tensor == "last"
    assert ckpt_cli.detect(run).problem
    assert not (tmp_path / "out").exists()


def test_of_fifteen_tensors_fourteen_are_no_model(tmp_path: Path) -> None:
    run = written(tmp_path / "run", "torch file", {**weights(), "last": Rebuilt(_rebuild_something, LAST)})
    done = ckpt("merge", run, "-o", tmp_path / "out")
    assert done.code == 3
    assert "tests.test_bounds._rebuild_something" in done.err


@pytest.mark.parametrize("content", [np.ones((3, 2)), b"\0" * 5000], ids=["array", "bytes"])
def test_data_that_are_no_tensors_are_named(tmp_path: Path, content: object) -> None:
    for form in ("rank file", "torch file"):
        run = written(tmp_path / form, form, {**weights(), "mean": content, "version": 3, "x._extra_state": b"\0" * 9000})
        notes = {note.code: note.text for note in ckpt_cli.inspect(run).checkpoint.notes if note.level == "warning"}
        assert notes.keys() == {"left-out"}
        assert notes["left-out"].startswith("mean: ")


class TestTheSearch:
    def test_is_linear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A structure that all entries share is looked through once."""
        shared: list[Any] = [[i] for i in range(1000)]
        visits: list[int] = []
        real = pickle_nodes.below
        monkeypatch.setattr(state_dict, "below", lambda node: visits.append(1) or real(node))
        entries = [{"a": shared, "b": shared} for _ in range(100)]
        search = StorageSearch()
        assert not any(map(search.holds, entries))
        assert len(visits) == 1000 + 1 + 100

    def test_ends_where_a_pickle_refers_to_itself(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        assert not StorageSearch().holds(loop)

    def test_does_not_forget_what_it_has_not_seen_to_the_end(self) -> None:
        """An entry that was refused says nothing about the rest of what it holds."""
        rest = [[Persistent("a")]]
        search = StorageSearch()
        assert search.holds([Persistent("b"), rest])
        assert search.holds(rest)

    @pytest.mark.parametrize("where", ["target", "args", "kwargs", "state", "items", "keys", "values"])
    def test_looks_everywhere_in_a_call(self, where: str) -> None:
        storage = Persistent("a")
        call = Call(Call(Global("a", "b"), (storage,)) if where == "target" else Global("a", "b"), (storage,) if where == "args" else ())
        call.kwargs = {"a": storage} if where == "kwargs" else None
        call.state = {"a": storage} if where == "state" else None
        call.items = [storage] if where == "items" else None
        call.pairs = {"keys": {storage: 1}, "values": {1: storage}}.get(where)  # type: ignore[dict-item]
        assert StorageSearch().holds([call])


class TestOrderedDicts:
    def node(self, *args: object) -> Call:
        return Call(Global("collections", "OrderedDict"), args)

    def test_of_python_2_keep_keys_that_are_no_text(self) -> None:
        assert as_dict(self.node([[1, "a"], ("b", 2)])) == {1: "a", "b": 2}
        assert as_dict(self.node({"a": 1})) == {"a": 1}
        assert as_dict(self.node()) == {}

    @pytest.mark.parametrize("args", [([[1]],), ([1, 2],), ("ab",), ([], []), ([[[1], 2]],), ([["a", 1], ["a", 2]],)])
    def test_of_other_forms_are_refused(self, args: tuple[object, ...]) -> None:
        with pytest.raises(CorruptFile):
            as_dict(self.node(*args))


class TestDcp:
    def test_an_object_of_the_model_whose_file_is_gone_is_refused(self, tmp_path: Path) -> None:
        """Nothing tells whether it held tensors."""
        content = {"model": {"embed.weight": torch.ones(3, 4), "other": {"epoch": 3}}}
        writer = dcp.FileSystemWriter(tmp_path / "dcp", single_file_per_rank=False)
        dcp.save(content, storage_writer=writer, no_dist=True)
        ckpt_cli.merge(tmp_path / "dcp", tmp_path / "fine")
        (thing,) = read_catalog([tmp_path / "dcp"], Files()).objects.values()
        assert thing.stored is not None
        (tmp_path / "dcp" / thing.stored.file).unlink()
        with pytest.raises(MissingShard) as caught:
            ckpt_cli.merge(tmp_path / "dcp", tmp_path / "out")
        assert "other" in f"{caught.value.tensor}"

    def test_two_entries_of_one_place_are_not_one(self) -> None:
        from ckpt_cli.formats.dcp.state import put, with_lists

        state: dict[Any, Any] = {}
        put(state, ("a", "b"), 1)
        for keys in (("a", "b"), ("a",), ("a", "b", "c")):
            with pytest.raises(Inconsistent):
                put(state, keys, 2)
        with pytest.raises(Inconsistent):
            with_lists({1: "a", "1": "b"})

    def test_a_number_of_the_metadata_makes_no_long_list(self) -> None:
        from ckpt_cli.formats.dcp.state import with_lists

        assert with_lists({0: "a", 2: "c"}) == ["a", None, "c"]
        assert with_lists({0: "a", (1 << 20) - 1: "c"}) == {"0": "a", "1048575": "c"}
        assert with_lists({-1: "a"}) == {"-1": "a"}


EMPTY = torch.empty(0)


class TestPlaceholders:
    """A module under ZeRO stage 3 has ``torch.empty(0)`` in place of every parameter."""

    @pytest.fixture(params=["safetensors", "torch file", "rank file", "dcp", "index"])
    def write(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[State], Path]:
        def made(content: State) -> Path:
            run = tmp_path / "run"
            if request.param in ("safetensors", "index"):
                run.mkdir()
                name = "model.safetensors" if request.param == "safetensors" else "model-00001-of-00001.safetensors"
                save_file({key: value.clone() for key, value in content.items()}, run / name)
                if request.param == "index":
                    index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(content, name)}
                    (run / "model.safetensors.index.json").write_text(json.dumps(index))
            elif request.param == "dcp":
                dcp.save({"model": content}, storage_writer=dcp.FileSystemWriter(run), no_dist=True)
            else:
                written(run, request.param, content)
            return run

        return made

    @pytest.mark.parametrize(
        "content",
        [
            dict.fromkeys(weights(), EMPTY),
            {**dict.fromkeys(weights(), EMPTY), "inv_freq": torch.ones(4)},
            {"embed.weight": torch.ones(3, 2), "head.weight": EMPTY},
            {"a.gate_up_proj": EMPTY, "a.norm.weight": torch.ones(3), "b.norm.weight": torch.ones(3)},
            {"a": torch.empty(0, 4), "b": torch.empty(3, 0)},
            {"a.A_log": EMPTY, "b.A_log": EMPTY, "norm.weight": torch.ones(3)},
        ],
        ids=["all", "all but a buffer", "one weight", "experts", "all, with other dimensions", "most"],
    )
    def test_are_no_weights(self, write: Callable[[State], Path], tmp_path: Path, content: State) -> None:
        run = write(content)
        for command in (
            ckpt_cli.inspect,
            lambda p: ckpt_cli.merge(p, tmp_path / "out"),
            lambda p: ckpt_cli.average([p, p], tmp_path / "a"),
        ):
            with pytest.raises(Gap) as caught:
                command(run)
            assert caught.value.exit_code == 4
            assert "ZeRO stage 3" in f"{caught.value.expected}"
        assert "no elements" in f"{ckpt_cli.detect(run).problem}"
        try:
            codes = {item.code for item in ckpt_cli.verify(run).findings}
        except Gap:
            codes = {"empty-weights"}
        assert "empty-weights" in codes
        assert not (tmp_path / "out").exists()

    def test_are_not_every_empty_tensor(self, write: Callable[[State], Path], tmp_path: Path) -> None:
        run = write({**weights(), "mask": EMPTY, "none.weight": torch.empty(0, 4), "history": torch.empty(3, 0)})
        ckpt_cli.merge(run, tmp_path / "out")
        assert "empty-weights" not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}

    def test_are_told_by_shapes(self) -> None:
        assert placeholders({}) == []
        assert placeholders({"scale": ()}) == []
        assert placeholders({"empty": (0,), "w": (2, 2)}) == []
        assert placeholders({"x.lora_A.default.weight": (0,), "w": (2, 2)}) == []

    def test_are_no_base(self, tmp_path: Path) -> None:
        (tmp_path / "base").mkdir()
        save_file({"w.weight": EMPTY}, tmp_path / "base" / "model.safetensors")
        run = written(tmp_path / "run", "torch file", weights())
        with pytest.raises(CkptError):
            ckpt_cli.merge(run, tmp_path / "out", base=tmp_path / "base", match_base=True, fill_missing_from_base=True)


def test_a_file_that_holds_nothing_but_a_name_is_said_to(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": Rebuilt(_rebuild_something, 1)}, buffer)
    (tmp_path / "pytorch_model.bin").write_bytes(buffer.getvalue())
    with pytest.raises(Unsupported):
        ckpt_cli.inspect(tmp_path)


class TestNothingAtAll:
    """A file without a tensor is no model."""

    def test_in_safetensors(self, tmp_path: Path) -> None:
        save_file({}, tmp_path / "model.safetensors")
        with pytest.raises(CorruptFile, match="no tensor"):
            ckpt_cli.inspect(tmp_path)

    def test_in_shards_of_dcp(self, tmp_path: Path) -> None:
        save_file({}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", metadata={"DCP_SHARDING_INFO": "{}"})
        with pytest.raises(CorruptFile, match="no tensor"):
            ckpt_cli.inspect(tmp_path)


def test_more_nodes_than_are_looked_through_are_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_cli.discover.nodes.parents.MAX_NODES", 2)
    for rank in range(3):
        folder = tmp_path / "nodes" / f"node{rank}" / "global_step_3"
        folder.mkdir(parents=True)
        torch.save(weights(), folder / f"model_world_size_4_rank_{rank}.pt")
    with pytest.raises(NotRecognised, match="more than 2 folders"):
        ckpt_cli.inspect(tmp_path / "nodes")
