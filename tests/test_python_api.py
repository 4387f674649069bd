"""ckpt called from Python: values as Python has them, errors that say everything, options that tools know."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import ml_dtypes
import numpy
import pytest
import torch
from safetensors.torch import load_file

import ckpt_cli
from ckpt_cli import errors, given
from ckpt_cli.averaging.options import AverageKeywords, AverageOptions
from ckpt_cli.errors import CkptError, NotFound, Unreadable, UsageError
from ckpt_cli.loading.options import LoadKeywords, LoadOptions, OpenKeywords, OpenOptions
from ckpt_cli.merging.options import MergeKeywords, MergeOptions
from ckpt_cli.shell import in_python
from ckpt_cli.state.options import ExtractKeywords, ExtractOptions
from ckpt_cli.verifying.options import VerifyKeywords, VerifyOptions
from tests.cli import ROOT


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        place = tmp_path / "run" / f"global_step_{step}" / "actor"
        place.mkdir(parents=True)
        torch.save({f"{name}.weight": torch.full((64, 64), float(step)) for name in "abc"}, place / "model_world_size_1_rank_0.pt")
    return tmp_path / "run"


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


class TestValues:
    @pytest.mark.parametrize(
        "dtype",
        ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, ml_dtypes.bfloat16, numpy.dtype(ml_dtypes.bfloat16)],
        ids=repr,
    )
    def test_a_dtype_of_any_library(self, dtype: Any, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "merged", dtype=dtype)
        ckpt_cli.average(run, tmp_path / "averaged", everything=True, dtype=dtype)
        for folder in ("merged", "averaged"):
            assert {tensor.dtype for tensor in written(tmp_path / folder).values()} == {torch.bfloat16}

    @pytest.mark.parametrize("dtype", [numpy.float16, numpy.dtype("float16"), torch.half, "fp16"], ids=repr)
    def test_half_precision_by_any_name(self, dtype: Any, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out", dtype=dtype)
        assert {tensor.dtype for tensor in written(tmp_path / "out").values()} == {torch.float16}

    @pytest.mark.parametrize("dtype", [torch.int8, numpy.int64, "int8", float, 16, pytest.param(object(), id="object")], ids=repr)
    def test_a_dtype_that_nothing_is_cast_to(self, dtype: Any, run: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError):
            ckpt_cli.merge(run, tmp_path / "out", dtype=dtype)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("size", ["20KB", "20000", 20000, 2e4, numpy.int64(20000)], ids=repr)
    def test_a_size_as_a_number_or_as_people_write_it(self, size: Any, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "merged", max_shard_size=size)
        ckpt_cli.average(run, tmp_path / "averaged", everything=True, max_shard_size=size)
        for folder in ("merged", "averaged"):
            assert len(list((tmp_path / folder).glob("*.safetensors"))) == 3

    def test_one_where_several_may_be_given(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out", include="a.*", also=())
        assert written(tmp_path / "out").keys() == {"a.weight"}
        assert given.options_of(AverageOptions, {"steps": 2, "weights": 0.5}) == AverageOptions(steps=(2,), weights=(0.5,))
        assert len(ckpt_cli.average(run, tmp_path / "2", steps="1,2", weights="3,1").outputs[0].sources) == 2
        assert len(ckpt_cli.average(run, tmp_path / "3", steps=[1, 2], weights=numpy.array([3, 1])).outputs[0].sources) == 2

    @pytest.mark.parametrize(
        "options",
        [
            {"jobs": "2"},
            {"jobs": True},
            {"overwrite": "no"},
            {"overwrite": 0},
            {"dry_run": None},
            {"names": "hugging face"},
            {"lora": "merge"},
            {"shard_order": None},
            {"include": [5]},
            {"include": {"a": 1}},
            {"key_map": 5},
            {"max_shard_size": "5 boxes"},
            {"max_shard_size": 1.5},
            {"max_shard_size": True},
            {"weights_name": b"a"},
            {"step": "2"},
            {"step": 2.0},
            {"type": 5},
            {"also": 5},
            {"base": 5},
        ],
        ids=repr,
    )
    def test_a_value_of_another_type_is_named(self, options: dict[str, Any], run: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as caught:
            ckpt_cli.merge(run, tmp_path / "out", **options)
        assert caught.value.expected or " must be " in caught.value.message
        assert next(iter(options)) in str(caught.value) or "not a size" in str(caught.value)
        assert "--" not in str(caught.value)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"overwrite": 1}, "--overwrite must be True or False, not int"),
            ({"dry_run": None}, "--dry-run must be True or False, not None"),
            ({"base": 5}, "--base must be a path, not int"),
            ({"jobs": "2"}, "--jobs must be an int, not str"),
            ({"include": [5]}, "--include must be a str, not int"),
            ({"shard_order": None}, "--shard-order must be auto or "),
            ({"names": "foo"}, "foo is not a choice for --names"),
            ({"lora": "foo"}, "foo is not a choice for --lora"),
            ({"lora_alpha": "abc"}, "--lora-alpha must be a number, not str"),
            ({"lora_alpha": "5%"}, "--lora-alpha must be a number, not str"),
            ({"progress": 3}, "progress must be an object with the methods start, advance and finish, not int"),
        ],
        ids=repr,
    )
    def test_what_is_wrong_is_said_in_words(self, options: dict[str, Any], said: str, run: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as caught:
            ckpt_cli.merge(run, tmp_path / "out", **options)
        assert said in caught.value.message

    def test_only_a_sample_is_a_share(self, run: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(run, tmp_path / "out")
        assert ckpt_cli.verify(tmp_path / "out", full=True, sample="5%").exit_code == 0
        with pytest.raises(UsageError, match="the share is not a number"):
            ckpt_cli.verify(tmp_path / "out", full=True, sample="abc")
        for name in ("decay", "half_life"):
            with pytest.raises(UsageError, match=f"{name} must be a number, not str"):
                ckpt_cli.average(run, tmp_path / "average", everything=True, **{name: "5%"})  # type: ignore[arg-type]

    @pytest.mark.parametrize("path", [None, 5, b"run", ["run"]], ids=repr)
    @pytest.mark.parametrize("command", [ckpt_cli.merge, ckpt_cli.detect, ckpt_cli.inspect, ckpt_cli.verify, ckpt_cli.extract_state])
    def test_what_is_no_path(self, command: Callable[..., Any], path: Any) -> None:
        with pytest.raises(UsageError, match=r"PATH must be a path, not (None|int|bytes|list)"):
            command(path)

    @pytest.mark.filterwarnings("ignore:.*the pattern")
    @pytest.mark.parametrize(
        "odd", [0, -1, 1.5, "x", b"x", "\ud800", "\0", {}, [1], float("nan"), pytest.param(object(), id="object")], ids=repr
    )
    def test_whatever_is_given_where_it_is_an_error_of_ours_or_none(self, odd: Any, run: Path, tmp_path: Path) -> None:
        for _, options, command in PAIRS:
            names = [*(field.name for field in fields(options)), "type", "type", "step", "also", "base", "progress"]
            writes = command not in (ckpt_cli.verify, ckpt_cli.open, ckpt_cli.load_state_dict, ckpt_cli.load_into)
            for name in names:
                named = {**({"dry_run": True} if writes else {}), name: odd}
                first = [[run, run] if command is ckpt_cli.average else run]
                first = [torch.nn.Linear(64, 64), run] if command is ckpt_cli.load_into else first
                with contextlib.suppress(CkptError):
                    command(*first, tmp_path / name, **named) if writes else command(*first, **named)

    def test_an_average_of_nothing(self, tmp_path: Path) -> None:
        for paths in ([], ()):
            with pytest.raises(UsageError, match="no checkpoints"):
                ckpt_cli.average(paths, tmp_path / "out")

    def test_an_unknown_option_names_the_one_that_was_meant(self, run: Path, tmp_path: Path) -> None:
        for command in (ckpt_cli.merge, ckpt_cli.average, ckpt_cli.extract_state):
            with pytest.raises(UsageError, match="did you mean overwrite"):
                command(run, tmp_path / "out", overwrites=True)  # type: ignore[operator]

    def test_torch_is_not_imported_for_it(self, run: Path, tmp_path: Path) -> None:
        code = (
            "import sys, ckpt_cli; ckpt_cli.merge(sys.argv[1], sys.argv[2], dtype='torch.bfloat16', max_shard_size='5GB');"
            "print([name for name in ('torch', 'transformers') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code, run, tmp_path / "out"], capture_output=True, text=True, cwd=ROOT, check=True)
        assert done.stdout == "[]\n"


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CkptError)]


class TestErrors:
    @pytest.mark.parametrize("kind", KINDS)
    def test_say_everything_in_their_text(self, kind: type[CkptError]) -> None:
        error = kind("it broke", path="a/b", tensor="w", expected="better", hint="mend it", details=["this", "that"])
        assert str(error) == "it broke\n  this\n  that\n  tensor: w\n  path: a/b\n  expected: better\n  hint: mend it"
        assert str(kind("it broke")).splitlines()[0] == "it broke"
        advice = kind("it broke").advice
        assert advice is None or in_python(advice) in str(kind("it broke"))

    @pytest.mark.parametrize("kind", KINDS)
    def test_pass_from_process_to_process(self, kind: type[CkptError]) -> None:
        error = pickle.loads(pickle.dumps(kind("it broke", path="a/b", hint="mend it")))
        assert (type(error), str(error)) == (kind, str(kind("it broke", path="a/b", hint="mend it")))

    def test_never_pass_control_characters_to_a_terminal(self) -> None:
        assert "\x1b" not in str(NotFound("\x1b[2J", path="\x1b[2J", hint="\x1b[2J"))

    def test_of_the_system_are_errors_of_ours(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", str(run))

        for module, name in (("merge", "open_checkpoint"), ("inspect", "open_checkpoint"), ("verify", "find_subjects")):
            monkeypatch.setattr(f"ckpt_cli.commands.{module}.{name}", fail)
        monkeypatch.setattr("ckpt_cli.commands.average.open_snapshots", fail)
        monkeypatch.setattr("ckpt_cli.commands.extract_state.choose", fail)
        calls: list[Callable[[], object]] = [
            lambda: ckpt_cli.merge(run),
            lambda: ckpt_cli.average(run, tmp_path / "out"),
            lambda: ckpt_cli.verify(run),
            lambda: ckpt_cli.detect(run),
            lambda: ckpt_cli.inspect(run),
            lambda: ckpt_cli.extract_state(run),
        ]
        for call in calls:
            with pytest.raises(Unreadable, match="Permission denied") as caught:
                call()
            assert caught.value.path == str(run)

    def test_of_a_stream_stay_what_they_are(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise BrokenPipeError(32, "Broken pipe")

        monkeypatch.setattr("ckpt_cli.commands.merge.open_checkpoint", fail)
        with pytest.raises(BrokenPipeError):
            ckpt_cli.merge(run)


PAIRS = [
    (MergeKeywords, MergeOptions, ckpt_cli.merge),
    (AverageKeywords, AverageOptions, ckpt_cli.average),
    (ExtractKeywords, ExtractOptions, ckpt_cli.extract_state),
    (VerifyKeywords, VerifyOptions, ckpt_cli.verify),
    (OpenKeywords, OpenOptions, ckpt_cli.open),
    (OpenKeywords, OpenOptions, ckpt_cli.load_state_dict),
    (LoadKeywords, LoadOptions, ckpt_cli.load_into),
]


def parts(hint: Any) -> set[Any]:
    """The types that a type is made of, a literal taken apart."""
    if get_origin(hint) is typing.Literal:
        return set(get_args(hint))
    if get_origin(hint) in (types.UnionType, typing.Union):
        return set().union(*(parts(each) for each in get_args(hint)))
    return {hint}


class TestTypedOptions:
    @pytest.mark.parametrize(("keywords", "options", "command"), PAIRS)
    def test_are_those_of_the_command(self, keywords: Any, options: Any, command: Callable[..., Any]) -> None:
        assert list(keywords.__annotations__) == [field.name for field in fields(options)]
        assert inspect.signature(command).parameters["options"].annotation == f"Unpack[{keywords.__name__}]"
        assert keywords.__total__ is False

    @pytest.mark.parametrize(("keywords", "options", "command"), PAIRS)
    def test_take_what_the_fields_hold(self, keywords: Any, options: Any, command: Callable[..., Any]) -> None:
        wide, narrow = get_type_hints(keywords), get_type_hints(options)
        for name, hint in narrow.items():
            if name in ("dtype", "key_map"):
                continue
            taken, held = parts(wide[name]), parts(hint)
            if get_origin(hint) is tuple or any(get_origin(each) is tuple for each in held):
                element = next(get_args(each)[0] for each in held if get_origin(each) is tuple)
                assert {str, element} <= taken, name
                assert typing.get_args(next(each for each in taken if get_origin(each) is not None)) == (element,), name
            else:
                assert held <= taken, name
                assert not (taken - held - {str}), name

    @pytest.mark.parametrize(("keywords", "options", "command"), PAIRS)
    def test_none_is_taken_where_it_means_something(self, keywords: Any, options: Any, command: Callable[..., Any]) -> None:
        for field in fields(options):
            if field.default is None:
                assert given.options_of(options, {field.name: None}) == options()
            else:
                with pytest.raises(UsageError):
                    given.options_of(options, {field.name: None})

    @pytest.mark.parametrize("name", ["weights", "steps"])
    @pytest.mark.parametrize("kind", [set, frozenset])
    def test_a_set_has_no_order_that_could_be_meant(self, name: str, kind: type) -> None:
        with pytest.raises(UsageError, match="has no order"):
            given.options_of(AverageOptions, {name: kind([3, 7])})
        assert getattr(given.options_of(AverageOptions, {name: dict.fromkeys([3, 7]).keys()}), name) == (3, 7)

    @pytest.mark.parametrize("kind", [numpy.array, torch.tensor, iter])
    def test_arrays_are_lists_where_they_have_one_dimension(self, kind: Callable[[list[int]], Any]) -> None:
        assert given.options_of(AverageOptions, {"weights": kind([3, 7])}).weights == (3.0, 7.0)
        assert given.options_of(AverageOptions, {"steps": kind([30, 7])}).steps == (30, 7)

    @pytest.mark.parametrize("name", ["weights", "steps"])
    def test_arrays_of_other_dimensions_are_numbers_or_nothing(self, name: str) -> None:
        assert getattr(given.options_of(AverageOptions, {name: numpy.array(3)}), name) == (3,)
        for value in (numpy.array([[3, 7]]), torch.tensor([[3, 7]])):
            with pytest.raises(UsageError):
                given.options_of(AverageOptions, {name: value})

    @pytest.mark.slow
    def test_are_checked_by_mypy(self, tmp_path: Path) -> None:
        right = """
import ckpt_cli, torch, numpy
from pathlib import Path
ckpt_cli.merge("run", dtype=torch.bfloat16, max_shard_size="5GB", include="*.mlp.*", overwrite=True, lora="export")
ckpt_cli.merge(Path("run"), "out", dtype="bf16", also=["a", Path("b")], max_shard_size=5, key_map=Path("k"))
ckpt_cli.average(["a", "b"], "out", weights=(0.5, 0.5), dtype=numpy.dtype("float16"), method="weighted")
ckpt_cli.verify("out", full=True, against="run", sample="5%")
ckpt_cli.extract_state("run", optimizer=True, jobs=2)
print(ckpt_cli.merge("run").outputs[0].output.upper())
print(ckpt_cli.open("run", type="ema")["a"][:8, 0].torch().sum(), ckpt_cli.load_state_dict("run", dtype=torch.bfloat16)["a"].sum())
print(ckpt_cli.load_into(torch.nn.Linear(2, 2), "run", allow_missing="*.bias", jobs=2).elements)
"""
        wrong = """
import ckpt_cli
ckpt_cli.merge("run", overwrites=True)
ckpt_cli.merge("run", overwrite="yes")
ckpt_cli.merge("run", names="hugging face")
ckpt_cli.average(["a"], "out", method="median")
ckpt_cli.verify("out", full="yes")
ckpt_cli.extract_state("run", optimiser=True)
ckpt_cli.merge("run").outputs[0].nothing
ckpt_cli.open("run", name="hub")
ckpt_cli.load_into({}, "run")
"""
        (tmp_path / "right.py").write_text(right)
        (tmp_path / "wrong.py").write_text(wrong)
        command = [sys.executable, "-m", "mypy", "--config-file", "", "--cache-dir", str(tmp_path / "cache"), "--follow-imports=silent"]
        done = subprocess.run([*command, tmp_path / "right.py", tmp_path / "wrong.py"], capture_output=True, text=True, cwd=ROOT)
        found = {line.split(": error:")[0].removeprefix(str(tmp_path) + "/") for line in done.stdout.splitlines() if ": error:" in line}
        assert found == {f"wrong.py:{number}" for number in range(3, 12)}, done.stdout
