"""Ways past scanners that were published, and pickles that are not quite right: `ckpt scan` lists what a loader would have reached.

The published ones are those of picklescan, fickling and modelscan (their advisories, and the papers about them). CPython's own unpickler,
with look-ups that only write down what is asked for, is the judge of what is reached.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.scanning.blobs import Held
from ckpt_cli.scanning.severity import severity
from ckpt_cli.scanning.trace import Name, trace
from tests.payloads import calling, in_dict, pickled, repacked, short, text, torch_file, zipped

SYSTEM = ("dangerous", "posix.system")
EVIL = calling("posix", "system", "touch marker")


def found(path: Path, data: bytes) -> list[tuple[str, str]]:
    path.write_bytes(data)
    return [(finding.severity, finding.name) for finding in ckpt_cli.scan(path).findings]


NAMES = [
    "pip.main",
    "pip._internal.main",
    "bdb.Bdb.run",
    "bdb.Bdb",
    "asyncio.unix_events._UnixSubprocessTransport._start",
    "asyncio.subprocess.create_subprocess_exec",
    "cProfile.runctx",
    "cProfile.run",
    "profile.run",
    "profile.Profile.run",
    "trace.Trace.run",
    "timeit.timeit",
    "doctest.debug_script",
    "pdb.run",
    "code.InteractiveInterpreter.runcode",
    "codeop.compile_command",
    "ctypes.CDLL",
    "_ctypes.LoadLibrary",
    "distutils.file_util.write_file",
    "ensurepip._run_pip",
    "idlelib.autocomplete.AutoComplete.get_entity",
    "idlelib.calltip.Calltip.fetch_tip",
    "idlelib.debugobj.ObjectTreeItem.SetText",
    "idlelib.pyshell.ModifiedInterpreter.runcode",
    "idlelib.run.Executive.runcode",
    "lib2to3.pgen2.grammar.Grammar.loads",
    "lib2to3.pgen2.pgen.ParserGenerator.make_label",
    "logging.config.listen",
    "logging.FileHandler",
    "multiprocessing.util.spawnv_passfds",
    "operator.methodcaller",
    "operator.attrgetter",
    "operator.itemgetter",
    "functools.partial",
    "functools.reduce",
    "builtins.getattr",
    "builtins.setattr",
    "builtins.eval",
    "builtins.exec",
    "builtins.compile",
    "builtins.open",
    "builtins.__import__",
    "builtins.apply",
    "builtins.map",
    "builtins.breakpoint",
    "builtins.input",
    "builtins.vars",
    "builtins.globals",
    "builtins.type",
    "builtins.super",
    "__builtin__.execfile",
    "__builtin__.eval",
    "__builtin__.file",
    "commands.getoutput",
    "os.system",
    "os.popen",
    "os.execve",
    "os.spawnl",
    "os.remove",
    "posix.system",
    "nt.system",
    "subprocess.Popen",
    "subprocess.check_output",
    "_posixsubprocess.fork_exec",
    "pty.spawn",
    "runpy.run_path",
    "runpy._run_code",
    "webbrowser.open",
    "importlib.import_module",
    "importlib.util.spec_from_file_location",
    "pydoc.locate",
    "pydoc.pipepager",
    "pkgutil.resolve_name",
    "zipimport.zipimporter",
    "shutil.rmtree",
    "shutil.copyfile",
    "socket.socket",
    "ssl.create_default_context",
    "http.client.HTTPSConnection",
    "http.client.HTTPConnection",
    "urllib.request.urlopen",
    "urllib2.urlopen",
    "ftplib.FTP",
    "smtplib.SMTP",
    "telnetlib.Telnet",
    "xmlrpc.client.ServerProxy",
    "requests.get",
    "requests.api.post",
    "aiohttp.client.ClientSession",
    "httpx.get",
    "tempfile.NamedTemporaryFile",
    "pathlib.Path.write_text",
    "io.open",
    "io.FileIO",
    "_io.open",
    "codecs.open",
    "marshal.loads",
    "types.CodeType",
    "types.FunctionType",
    "pickle.loads",
    "_pickle.loads",
    "shelve.open",
    "sqlite3.connect",
    "dbm.open",
    "tarfile.open",
    "zipfile.ZipFile",
    "sys.setprofile",
    "sys.modules",
    "signal.signal",
    "threading.Thread",
    "threading.Timer",
    "_thread.start_new_thread",
    "atexit.register",
    "gc.get_objects",
    "inspect.getattr_static",
    "linecache.getline",
    "sysconfig._init_posix",
    "venv.create",
    "uuid._get_command_stdout",
    "site.execsitecustomize",
    "numpy.f2py.crackfortran.getlincoef",
    "numpy.f2py.crackfortran._eval_length",
    "numpy.f2py.crackfortran.param_eval",
    "numpy.testing._private.utils.runstring",
    "numpy.f2py.diagnose.run",
    "numpy.load",
    "numpy.distutils.exec_command.exec_command",
    "torch.load",
    "torch.serialization.load",
    "torch.hub.load",
    "torch.hub._load_local",
    "torch.jit.load",
    "torch.jit.unsupported_tensor_ops.execWrapper",
    "torch.ops.load_library",
    "torch.storage._load_from_bytes",
    "torch._dynamo.guards.GuardBuilder.get",
    "torch._inductor.codecache.compile_file",
    "torch.distributed.run.main",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression",
    "torch.fx.graph_module._forward_from_src",
    "torch.utils._config_module.ConfigModule.load_config",
    "torch.utils.bottleneck.__main__.run_cprofile",
    "torch.utils.bottleneck.__main__.run_autograd_prof",
    "torch.utils.collect_env.run",
    "torch.utils.cpp_extension.load_inline",
    "torch.utils.data.datapipes.utils.decoder.basichandlers",
    "torch.utils.show_pickle.main",
    "torch.package.package_importer.PackageImporter",
    "torch.multiprocessing.spawn",
    "torch.classes.load_library",
    "torch.from_file",
    "joblib.load",
    "dill.loads",
    "cloudpickle.cloudpickle._make_function",
    "pandas.read_pickle",
    "pandas.eval",
    "pandas.io.pickle.read_pickle",
    "IPython.start_ipython",
    "cffi.FFI",
    "nltk.app.wordnet_app.app",
    "yaml.unsafe_load",
    "jinja2.Template",
    "fsspec.open",
    "huggingface_hub.snapshot_download",
    "transformers.dynamic_module_utils.get_class_in_module",
    "tensorflow.io.write_file",
    "setuptools.sandbox.run_setup",
    "pkg_resources.run_script",
]


class TestNames:
    @pytest.mark.parametrize("path", NAMES)
    def test_that_scanners_did_not_know_are_dangerous(self, path: str) -> None:
        """Each as a module and a name, and with every later dot in the name, which protocol 4 walks along."""
        parts = path.split(".")
        for cut in range(1, len(parts)):
            assert severity(Name(".".join(parts[:cut]), ".".join(parts[cut:]), 0)) == "dangerous"

    @pytest.mark.parametrize(
        "pair",
        [
            ("torch.serialization", "os.system"),
            ("torch", "serialization.os.system"),
            ("numpy", "testing._private.utils.os.system"),
            ("collections", "abc.sys.modules"),
            ("pathlib", "os.system"),
            ("builtins", "int.__class__.__subclasses__"),
            ("torch.storage", "os"),
            ("my_package", "subprocess"),
            ("my_package", "helpers.Popen"),
            ("my_package.shell", "system"),
            ("__main__", "__builtins__.eval"),
            ("collections", "OrderedDict.__class__"),
            ("torch._utils", "torch.hub.load"),
        ],
    )
    def test_behind_something_harmless_are_dangerous(self, pair: tuple[str, str]) -> None:
        assert severity(Name(*pair, 0)) == "dangerous"

    @pytest.mark.parametrize("pair", [("my_package.models", "Model"), ("__main__", "Config"), ("torch._utils", "_rebuild_new_thing")])
    def test_of_projects_are_unknown(self, pair: tuple[str, str]) -> None:
        assert severity(Name(*pair, 0)) == "unknown"

    def test_everything_else_in_the_standard_library_is_dangerous(self) -> None:
        import sys

        for module in sorted(sys.stdlib_module_names):
            assert severity(Name(module, "nothing_that_is_known", 0)) == "dangerous"

    def test_getattr_is_expected_of_a_sharded_tensor_alone(self, tmp_path: Path) -> None:
        api = "torch.distributed._shard.sharded_tensor.api"
        honest = f"c__builtin__\ngetattr\n(c{api}\nShardedTensor\n".encode() + text("ProcessGroupState") + b"tR"
        assert found(tmp_path / "a", pickled(honest)) == []
        other = f"c__builtin__\ngetattr\nq\x01(c{api}\nShardedTensor\n".encode() + text("ProcessGroupState") + b"tR0h\x01(cos\n"
        for evil in (
            other + b"path\n" + text("system") + b"tR",
            honest.replace(text("ProcessGroupState"), text("__init__")),
            honest.replace(b"ShardedTensor\n", b"ShardedTensors\n"),
            b"c__builtin__\ngetattr\n",
            b"(c__builtin__\ngetattr\ncmine\nThing\nt",
        ):
            assert ("dangerous", "__builtin__.getattr") in found(tmp_path / "a", pickled(evil))


# -- opcodes ---------------------------------------------------------------------------------------------------------

PICKLES: dict[str, bytes] = {
    "global and reduce": pickled(EVIL),
    "protocol 0": b"cposix\nsystem\np0\n(S'touch marker'\np1\ntp2\nRp3\n.",
    "protocol 0, unicode": b"cposix\nsystem\n(Vtouch marker\ntR.",
    "inst": b"(S'touch marker'\niposix\nsystem\n.",
    "inst of protocol 2": pickled(b"(" + text("touch marker") + b"iposix\nsystem\n"),
    "obj": pickled(b"(cposix\nsystem\n" + text("touch marker") + b"o"),
    "obj that is popped": pickled(b"(cposix\nsystem\n" + text("touch marker") + b"o0N"),
    "newobj": pickled(b"cposix\nsystem\n" + text("touch marker") + b"\x85\x81"),
    "newobj_ex": b"\x80\x04" + short("posix") + short("system") + b"\x93" + short("touch marker") + b"\x85}\x92.",
    "stack_global": b"\x80\x04" + short("posix") + short("system") + b"\x93" + short("touch marker") + b"\x85R.",
    "stack_global in a frame": b"\x80\x04\x95\x20\0\0\0\0\0\0\0"
    + short("posix")
    + short("system")
    + b"\x93"
    + short("touch marker")
    + b"\x85R.",
    "stack_global out of the memo": b"\x80\x04" + short("system") + b"q\x05" + short("posix") + b"q\x060" + b"0h\x06h\x05\x93)R.",
    "stack_global out of memoize": b"\x80\x04" + short("system") + b"\x94" + short("posix") + b"\x94h\x01h\x00\x93)R.",
    "stack_global after dup": b"\x80\x04" + short("posix") + b"20" + short("system") + b"\x93)R.",
    "stack_global of string opcodes": b"\x80\x04S'posix'\nU\x06system\x93)R.",
    "stack_global of long unicode": b"\x80\x04\x8d" + struct.pack("<Q", 5) + b"posix" + text("system") + b"\x93)R.",
    "strings with escapes": b"\x80\x04S'po\\x73ix'\nV\\u0073ystem\n\x93)R.",
    "memo index that is far": pickled(b"cposix\nsystem\nr\xff\xff\xff\x7f0j\xff\xff\xff\x7f)R"),
    "memo of a text index": pickled(b"cposix\nsystem\np999999999999\n0g999999999999\n)R"),
    "memo that is overwritten": b"\x80\x04"
    + short("posix")
    + b"q\x000"
    + short("json")
    + b"q\x010h\x00q\x010h\x01"
    + short("system")
    + b"\x93)R.",
    "only looked up": pickled(b"cposix\nsystem\n0N"),
    "in an argument": pickled(b"cbuiltins\nmap\ncposix\nsystem\n]" + text("x") + b"a\x86R"),
    "called by build": pickled(b"cmine\nThing\n)\x81}" + text("__setstate__") + b"cposix\nsystem\nsb" + text("x") + b"b"),
    "before nonsense": b"\x80\x02" + EVIL + b"\xff\xff\xff",
    "before an unknown extension": b"\x80\x02" + EVIL + b"\x82\x05.",
    "before the end of the file": b"\x80\x02" + EVIL,
    "before an empty stack": b"\x80\x02" + EVIL + b"00000000.",
    "before a memo that is not there": b"\x80\x02" + EVIL + b"h\x70.",
    "before a length that is too large": b"\x80\x04" + EVIL + b"\x8e" + b"\xff" * 8,
    "before a frame that is too long": b"\x80\x04" + EVIL + b"\x95\xff\xff\xff\xff\0\0\0\0.",
    "in a frame that ends too early": b"\x80\x04\x95\x02\0\0\0\0\0\0\0N0" + EVIL + b".",
    "behind a wrong protocol": b"\x80\x02\x80\x05" + EVIL + b".",
    "behind a persistent id": pickled(b"(" + text("storage") + text("0") + b"tQ0" + EVIL),
    "behind odd numbers": b"\x80\x02I0x10\n0L5L\n0F1e5\n0" + EVIL + b".",
    "in a long list": pickled(b"](" + b"K\x01" * 5_000 + EVIL + b"e"),
    "far behind": pickled(b"]" + (b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b"a") * 5 + EVIL + b"a"),
    "across windows": pickled(b"]" + b"".join(b"C" + bytes([i % 250]) + bytes(i % 250) + b"a" for i in range(20_000)) + EVIL + b"a"),
    "second of two": pickle.dumps(1) + pickled(EVIL),
    "second without a header": pickle.dumps(1) + b"(S'touch marker'\niposix\nsystem\n.",
    "set and frozenset": b"\x80\x04\x8f(" + EVIL + b"\x90(" + EVIL + b"\x91.",
    "python 2 names": pickled(calling("__builtin__", "eval", "1")),
    "buffers": b"\x80\x05\x97\x98" + EVIL + b".",
}
"""Each names posix.system, or what its key says."""


class Judge(pickle._Unpickler):  # type: ignore[name-defined]
    """CPython's unpickler; names are written down, and what is called does nothing."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), buffers=[b""])
        self.asked: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> Any:
        self.asked.append((module, name))
        return Inert

    def persistent_load(self, pid: object) -> Any:
        return Inert()


class Inert:
    def __init__(self, *args: object, **named: object) -> None: ...

    def __new__(cls, *args: object, **named: object) -> Inert:
        return super().__new__(cls)

    def __call__(self, *args: object, **named: object) -> Inert:
        return Inert()

    def __setstate__(self, state: object) -> None: ...

    def append(self, item: object) -> None: ...

    def extend(self, items: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...


def asked_for(data: bytes) -> list[tuple[str, str]]:
    """The names that CPython looks up before it is done or fails."""
    judge = Judge(data)
    with contextlib.suppress(Exception):  # whatever it ends with, what it asked for counts
        judge.load()
    return judge.asked


class TestOpcodes:
    @pytest.mark.parametrize("name", PICKLES)
    def test_what_is_reached_is_listed(self, name: str, tmp_path: Path) -> None:
        content = PICKLES[name]
        severities = dict.fromkeys(found(tmp_path / "plain", content))
        assert severities
        assert all(kind == "dangerous" for kind, path in severities if path != "mine.Thing")
        for wrapped in (zipped(content), zipped(content, "x/y.bin"), b"junk in front" + zipped(content)):
            assert dict.fromkeys(found(tmp_path / "model.pt", wrapped)) == severities

    @pytest.mark.parametrize("name", [name for name in PICKLES if "second" not in name])
    def test_cpython_asks_for_nothing_else(self, name: str) -> None:
        content = PICKLES[name]
        asked = asked_for(content)
        assert asked
        assert asked == [(each.module, each.name) for each in trace(Held(content, len(content))).names][: len(asked)]

    def test_mutants_reach_nothing_that_is_not_listed(self) -> None:
        source = random.Random(11)
        seeds = [*PICKLES.values(), pickle.dumps({"a": [1.5, "x", {"y": (1, 2)}], "b": Inert()}, 4), torch_pickle()]
        seeds = [seed for seed in seeds if len(seed) < 4_000]
        asked = 0
        for _ in range(20_000):
            mutant = mutated(source.choice(seeds), source)
            if b"\x96" in mutant:
                continue  # CPython allocates what BYTEARRAY8 announces
            names = [pair for pair in asked_for(mutant) if pair[0]]
            asked += len(names)
            listed = [(each.module, each.name) for each in trace(Held(mutant, len(mutant))).names if each.module]
            assert listed[: len(names)] == names, mutant
        assert asked > 10_000

    @pytest.mark.parametrize(
        "body",
        [
            b"cbuiltins\nstr\n" + text("posix") + b"\x85R" + text("system") + b"\x93)R",
            text("posix") + b"c_codecs\nencode\n" + text("system") + text("latin1") + b"\x86R\x93)R",
            text("builtins") + text("int." + "__class__." * 500 + "x") + b"\x93)R",
            text("posix") + b"(" + text("a") + b"tQ" + b"cmine\nthing\n)R\x93)R",
        ],
        ids=["str", "codec", "long", "own function"],
    )
    def test_names_that_are_computed_are_dangerous(self, body: bytes, tmp_path: Path) -> None:
        kinds = [kind for kind, name in found(tmp_path / "a", b"\x80\x04" + body + b".") if name == "(a name that is computed)"]
        assert kinds == ["dangerous"]

    @pytest.mark.parametrize("code", [b"\x82\x07", b"\x83\x07\x01", b"\x84\x07\x01\x00\x00"])
    def test_extensions_are_dangerous(self, code: bytes, tmp_path: Path) -> None:
        assert [kind for kind, _ in found(tmp_path / "a", pickled(code + b")R"))] == ["dangerous"]

    def test_changing_what_a_name_stands_for_is_dangerous(self, tmp_path: Path) -> None:
        change = b"ctorch._utils\n_rebuild_tensor_v2\nN}" + text("__defaults__") + text("x") + b"s\x86b"
        assert found(tmp_path / "a", pickled(change)) == [("dangerous", "torch._utils._rebuild_tensor_v2")]


def torch_pickle() -> bytes:
    with zipfile.ZipFile(io.BytesIO(torch_file({"a": torch.ones(2), "b": torch.nn.Parameter(torch.ones(3))}))) as archive:
        return archive.read("archive/data.pkl")


def mutated(data: bytes, source: random.Random) -> bytes:
    """Some bytes changed, left out, repeated or taken from elsewhere; opcodes more often than others."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4))):
        at = source.randrange(len(changed) + 1)
        match source.randrange(4):
            case 0 if at < len(changed):
                changed[at] = source.choice((source.randrange(256), *b"(.02NtRbocieQhjqr\x81\x85\x93\x94"))
            case 1:
                del changed[at : at + source.choice((1, 2, 8))]
            case 2:
                changed[at:at] = bytes([source.choice(b"(.02NtRbocieQhjqr\x80\x81\x85\x93\x94\x95")])
            case _:
                start = source.randrange(len(changed) + 1)
                changed[at:at] = changed[start : start + source.randrange(40)]
    return bytes(changed)


# -- archives --------------------------------------------------------------------------------------------------------


def patched(data: bytes, change: Callable[[bytearray, int, int], None]) -> bytes:
    """The archive with both headers of data.pkl changed: ``change`` gets the bytes, the local and the central header."""
    raw = bytearray(data)
    local = raw.find(b"PK\x03\x04", raw.find(b"data.pkl") - 60)
    central = raw.rfind(b"PK\x01\x02", 0, raw.rfind(b"data.pkl"))
    assert local >= 0
    assert central >= 0
    change(raw, local, central)
    return bytes(raw)


def put(raw: bytearray, at: int, value: bytes) -> None:
    raw[at : at + len(value)] = value


WHOLE = zipped(in_dict(EVIL))
TRICKS: dict[str, Callable[[bytearray, int, int], None]] = {
    "wrong CRC": lambda raw, local, central: (put(raw, local + 14, b"\1\2\3\4"), put(raw, central + 16, b"\1\2\3\4"))[0],
    "encrypted by its flag": lambda raw, local, central: put(raw, central + 8, b"\x01\x00"),
    "patched by its flag": lambda raw, local, central: put(raw, central + 8, b"\x20\x00"),
    "strongly encrypted by its flag": lambda raw, local, central: put(raw, central + 8, b"\x40\x00"),
    "another local name": lambda raw, local, central: put(raw, local + 30, b"harmless"),
    "another central name": lambda raw, local, central: put(raw, central + 46, b"harmless"),
    "another local method": lambda raw, local, central: put(raw, local + 8, b"\x63\x00"),
    "a size of nothing locally": lambda raw, local, central: put(raw, local + 18, bytes(8)),
    "a packed size that is too small": lambda raw, local, central: put(raw, central + 20, struct.pack("<I", 4)),
    "a size beyond the file": lambda raw, local, central: put(raw, central + 20, b"\xf0\xff\xff\xff" * 2),
    "a name that is no text": lambda raw, local, central: put(raw, central + 46, b"\xff\xfe"),
}


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch marker",)


class TestPicklesWithoutAHeader:
    """torch.load reads five pickles of a file in its older format; protocols 0 and 1 give none of them a header."""

    @pytest.mark.parametrize("protocol", range(6))
    def test_in_a_file_of_torch(self, protocol: int, tmp_path: Path) -> None:
        torch.save({"a": Runs()}, tmp_path / "a.pt", _use_new_zipfile_serialization=False, pickle_protocol=protocol)
        result = ckpt_cli.scan(tmp_path / "a.pt")
        assert SYSTEM in [(item.severity, item.name) for item in result.findings]
        assert result.pickles == 5

    @pytest.mark.parametrize("before", [b"", b"N0" * 300, b"(dp0\n0", b"(VkI1\nVkI2\nd0"], ids=["plain", "padded", "memo", "twice"])
    def test_whose_first_is_padded(self, before: bytes, tmp_path: Path) -> None:
        """The first one is a number, however it comes about."""
        first = b"%sI119547037146038801333356\n." % before
        assert pickle.loads(first) == torch.serialization.MAGIC_NUMBER
        data = first + b"I1001\n." + b"(d." + b"cposix\nsystem\n(Vtouch marker\ntR." + b"(l."
        assert SYSTEM in found(tmp_path / "a", data)

    def test_that_are_weights_of_a_harmless_file(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False, pickle_protocol=1)
        assert ckpt_cli.scan(tmp_path / "a.pt").exit_code == 0


class TestArchives:
    @pytest.mark.parametrize("name", TRICKS)
    def test_whose_headers_lie(self, name: str, tmp_path: Path) -> None:
        assert found(tmp_path / "model.pt", patched(WHOLE, TRICKS[name])) == [SYSTEM]

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_with_a_name_twice(self, order: tuple[int, int], tmp_path: Path) -> None:
        contents = [in_dict(EVIL), pickle.dumps({})]
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", contents[order[0]])
            with pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr("archive/data.pkl", contents[order[1]])
        assert found(tmp_path / "model.pt", buffer.getvalue()) == [SYSTEM]

    def test_inside_of_which_several_directories_end(self, tmp_path: Path) -> None:
        """Loaders differ in which end record they take: the last one, the one that reaches the end, one in a comment."""
        clean = zipped(pickle.dumps({}))
        for whole in (
            WHOLE + clean,
            clean + WHOLE,
            WHOLE[:-2] + struct.pack("<H", 30) + b"PK\x05\x06".ljust(30, b"\0"),
            clean[:-2] + struct.pack("<H", len(WHOLE)) + WHOLE,
            WHOLE + b"\n",
            WHOLE + bytes(70_000),
            b"\x7fELF" + bytes(500) + WHOLE,
            in_dict(EVIL) + clean,
            WHOLE[: WHOLE.rfind(b"PK\x01\x02") + 10],
            WHOLE[:-22],
        ):
            assert found(tmp_path / "model.pt", whole) == [SYSTEM]

    def test_that_are_read_from_two_places(self, tmp_path: Path) -> None:
        """With bytes in front, torch counts from the start of the file and zipfile from that of the archive."""
        evil = in_dict(EVIL)
        clean = pickled(b"C" + bytes([len(evil) - 5]) + bytes(len(evil) - 5))
        assert len(clean) == len(evil)
        for front, back in ((evil, clean), (clean, evil)):
            assert found(tmp_path / "model.pt", zipped(front) + zipped(back)) == [SYSTEM]

    def test_with_a_wide_directory(self, tmp_path: Path) -> None:
        count = 66_000
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for number in range(count):
                archive.writestr(f"a/data/{number}", b"")
            archive.writestr("a/data.pkl", in_dict(EVIL))
        assert found(tmp_path / "model.pt", buffer.getvalue()) == [SYSTEM]

    def test_of_torchscript(self, tmp_path: Path) -> None:
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.pt")
        data = (tmp_path / "model.pt").read_bytes()
        evil = repacked(data, lambda name, old: pickled(EVIL) if name.endswith("constants.pkl") else old)
        assert SYSTEM in found(tmp_path / "model.pt", evil)
