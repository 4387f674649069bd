"""Training state by trainer: what one file holds in the end, judged by what torch.load gives for each original."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MixedWorldSizes
from ckpt_cli.results.written import ExtractResult
from tests.conftest import Copy
from tests.test_inert_values import plain, same


@dataclass(frozen=True)
class Extracted:
    """An output folder: its files as a user opens them."""

    folder: Path
    result: ExtractResult

    @cached_property
    def extra(self) -> dict[str, Any]:
        return dict(torch.load(self.folder / "extra_state_merged.pt"))

    @property
    def training(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "training_state.json").read_text()))

    @property
    def scheduler(self) -> Any:
        return json.loads((self.folder / "lr_scheduler_state.json").read_text())

    @property
    def codes(self) -> dict[str, str]:
        return {note.code: note.level for note in self.result.notes}

    def bytes_of(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


Extract = Callable[..., Extracted]


@pytest.fixture
def extract(tmp_path: Path) -> Extract:
    """Extracts a state into a folder of its own."""

    def run(path: Path, **options: Any) -> Extracted:
        folder = tmp_path / f"state {len(list(tmp_path.glob('state *')))}"
        return Extracted(folder, ckpt_cli.extract_state(path, folder, **options))

    return run


def original(path: Path) -> Any:
    return torch.load(path, weights_only=False, map_location="cpu")


def rate(step: int) -> float:
    """The learning rate of the archives: a LambdaLR with 1 / (1 + step) over a rate of 1e-4."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-4)
    optimizer.param_groups[0]["initial_lr"] = 1e-4
    value = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n), last_epoch=step - 1).get_last_lr()[0]
    return float(value)


EXTRA = "extra_state_world_size_4_rank_{}.pt"
RUNS = {
    "verl, FSDP2": ("verl-run/run", f"verl-run/run/global_step_20/actor/{EXTRA}", 20),
    "verl, FSDP1": ("verl-others/verl_0_4_0", f"verl-others/verl_0_4_0/global_step_10/actor/{EXTRA}", 10),
    "verl, supervised": ("verl-others/supervised", f"verl-others/supervised/global_step_10/{EXTRA}", 10),
    "verl, critic": ("verl-others/value_head", f"verl-others/value_head/global_step_10/critic/{EXTRA}", 10),
    "EasyR1": ("verl-others/easyr1", f"verl-others/easyr1/global_step_10/actor/{EXTRA}", 10),
    "lmms-engine": ("lmms-run/run", f"lmms-run/run/checkpoint-200/extra_state/{EXTRA}", 200),
    "Hugging Face Trainer": ("accelerate/run", "accelerate/run/checkpoint-7/rng_state_{}.pth", 7),
    "accelerate": ("accelerate/full", "accelerate/full/rng_state_{}.pth", 7),
    "VeOmni in verl": ("veomni-experts/run", f"veomni-experts/run/global_step_4/actor/{EXTRA}", 4),
}
"""Run, the file of each of its four ranks, and the step at which its schedule stands."""

SNIPPET = """
extra_state = torch.load("<out>/extra_state_merged.pt")
lr_scheduler.load_state_dict(extra_state["lr_scheduler"])
torch.set_rng_state(extra_state["rng"]["cpu"])
"""


@pytest.fixture
def generators() -> Iterator[None]:
    """Puts the random generators back to where they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def drawn() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(2).tolist(), [random.random() for _ in range(3)]


@pytest.mark.usefixtures("generators")
@pytest.mark.parametrize("name", RUNS)
class TestWhatATrainingScriptDoesWithIt:
    def test_the_three_lines_of_the_documentation_work_as_they_are(self, layouts: Path, extract: Extract, name: str) -> None:
        run, file, step = RUNS[name]
        out = extract(layouts / run)
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-4)
        lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        exec(SNIPPET.replace("<out>", str(out.folder)), {"torch": torch, "lr_scheduler": lr_scheduler})
        found = torch.rand(5)
        states = original(layouts / file.format(0))
        torch.set_rng_state(states.get("rng", states)["cpu"])
        assert torch.equal(found, torch.rand(5))
        assert lr_scheduler.last_epoch == step
        assert lr_scheduler.get_last_lr() == [rate(step)]
        optimizer.step()
        lr_scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4 / (2 + step), rel=1e-12)

    @pytest.mark.parametrize("rank", range(4))
    def test_all_generators_of_every_rank_go_on_as_they_would_have(self, layouts: Path, extract: Extract, name: str, rank: int) -> None:
        run, file, _ = RUNS[name]
        found = extract(layouts / run).extra[f"rng_rank_{rank}"]
        states = original(layouts / file.format(rank))
        draws = []
        for held in (found, states.get("rng", states)):
            torch.set_rng_state(held["cpu"])
            np.random.set_state(held["numpy"])
            random.setstate(held["random"])
            draws.append(drawn())
        assert draws[0] == draws[1]

    def test_the_states_of_every_rank_are_the_original_ones(self, layouts: Path, extract: Extract, name: str) -> None:
        run, file, _ = RUNS[name]
        extra = extract(layouts / run).extra
        for rank in range(4):
            states = original(layouts / file.format(rank))
            assert same(extra[f"rng_rank_{rank}"], plain(states.get("rng", states)))
        assert same(extra["rng"], {key: extra["rng_rank_0"][key] for key in ("cpu", "numpy", "random")})

    def test_the_scheduler_is_the_original_one(self, layouts: Path, extract: Extract, name: str) -> None:
        run, file, step = RUNS[name]
        path = layouts / file.format(0)
        states = original(path if "extra" in path.name else path.parent / "scheduler.pt")
        scheduler = states.get("lr_scheduler", states.get("lr_scheduler_state", states))
        out = extract(layouts / run)
        assert same(out.extra["lr_scheduler"], plain(scheduler))
        assert out.scheduler == json.loads(json.dumps(scheduler))
        assert out.result.scheduler == {"last_epoch": step, "_last_lr": [rate(step)], "base_lrs": [1e-4]}


@dataclass(frozen=True)
class Stand:
    """Where training stood, as training_state.json says it."""

    framework: str
    step: int | None
    epoch: int | None
    rate: float | None
    ranks: int | None
    counters: dict[str, float]


STANDS = {
    "verl-run/run": Stand("verl", 20, None, rate(20), 4, {}),
    "verl-others/verl_0_4_0": Stand("verl", 10, None, rate(10), 4, {}),
    "verl-others/supervised": Stand("verl", 10, None, rate(10), 4, {}),
    "verl-others/value_head": Stand("verl", 10, None, rate(10), 4, {}),
    "verl-others/easyr1": Stand("EasyR1", 10, None, rate(10), 4, {}),
    "lmms-run/run": Stand("lmms-engine", 200, None, rate(200), 4, {}),
    "accelerate/run": Stand("Hugging Face Trainer", 7, 0, rate(7), 4, {}),
    "accelerate/full": Stand("accelerate", None, None, rate(7), 4, {}),
    "torchtitan/run/checkpoint": Stand("torchtitan", 5, None, None, None, {}),
    "lightning/fabric": Stand("Lightning", 5, None, None, None, {"iteration": 5}),
    "lightning/trainer": Stand("Lightning", 5, 0, None, None, {"epoch": 0, "global_step": 5}),
    "olmo-core/run": Stand("OLMo-core", 5, None, None, 4, {"global_step": 5}),
    "composer/run": Stand("composer", 5, None, None, 1, {}),
    "bagel-runs/official": Stand("BAGEL", 6, None, rate(6), None, {}),
    "bagel-runs/fork_dcp": Stand("BAGEL fork", 6, None, rate(6), None, {}),
    "bagel-runs/fork_ranks": Stand("BAGEL fork", 6, None, rate(6), None, {}),
    "bagel-hybrid/run": Stand("BAGEL fork", 6, None, rate(6), None, {}),
    "veomni-experts/run": Stand("verl", 4, None, rate(4), 4, {}),
    "plain-files/nested/checkpoint.pt": Stand("torch.save", None, None, None, None, {}),
}


@pytest.mark.parametrize("run", STANDS)
class TestWhereTrainingStood:
    def test_is_said_in_plain_json(self, layouts: Path, extract: Extract, run: str) -> None:
        out, stand = extract(layouts / run), STANDS[run]
        training = out.training
        assert (training["framework"], training["world_size"]) == (stand.framework, stand.ranks)
        assert (training["step"], training["epoch"], training["counters"]) == (stand.step, stand.epoch, stand.counters)
        assert training["lr"] == (None if stand.rate is None else [stand.rate])

    def test_is_returned_as_well(self, layouts: Path, extract: Extract, run: str) -> None:
        out, stand = extract(layouts / run), STANDS[run]
        assert (out.result.framework, out.result.ranks, out.result.step) == (stand.framework, stand.ranks or 0, stand.step)
        assert {key: out.result.training[key] for key in ("step", "epoch", "lr", "counters")} == {
            key: out.training[key] for key in ("step", "epoch", "lr", "counters")
        }

    def test_names_all_that_was_read_and_copied(self, layouts: Path, extract: Extract, run: str) -> None:
        out = extract(layouts / run)
        files = {path.name for path in (layouts / run).parent.rglob("*")}
        assert set(out.training["read"]) | set(out.training["copied"]) <= files
        assert tuple(out.training["copied"]) == out.result.copied
        assert {finding["code"]: finding["level"] for finding in out.training["findings"]}.items() <= out.codes.items()


class TestWhatStandsBesides:
    def test_the_trainers_own_json_is_kept_whole(self, layouts: Path, extract: Extract) -> None:
        file = layouts / "accelerate" / "run" / "checkpoint-7" / "trainer_state.json"
        assert extract(layouts / "accelerate" / "run").training["trainer_state"] == json.loads(file.read_text())
        file = layouts / "bagel-runs" / "fork_ranks" / "0000006" / "metadata.json"
        assert extract(layouts / "bagel-runs" / "fork_ranks").training["metadata"] == json.loads(file.read_text())

    @pytest.mark.parametrize(
        ("run", "step", "files"),
        [
            ("verl-run/run", "global_step_20", ["data.pt"]),
            ("verl-others/easyr1", "global_step_10", ["dataloader.pt"]),
            ("lmms-run/run", "checkpoint-200", [f"dataloader_state/dataloader_state_world_size_4_rank_{rank}.pt" for rank in range(4)]),
            ("bagel-runs/official", "0000006", ["data_status.pt"]),
            ("bagel-runs/fork_dcp", "0000006", ["data_status.pt"]),
            ("bagel-hybrid/run", "0000006", ["data_status.pt"]),
        ],
    )
    def test_dataloaders_are_copied_byte_for_byte(self, layouts: Path, extract: Extract, run: str, step: str, files: list[str]) -> None:
        out = extract(layouts / run)
        assert out.result.copied == tuple(sorted(Path(file).name for file in files))
        for file in files:
            assert out.bytes_of(Path(file).name) == (layouts / run / step / file).read_bytes()

    def test_a_dataloader_in_a_dcp_folder_is_a_file_of_its_own(self, layouts: Path, extract: Extract) -> None:
        out = extract(layouts / "torchtitan" / "run" / "checkpoint")
        assert torch.load(out.folder / "dataloader_state.pt") == {"dataloader": {"position": b"5"}}
        assert "dataloader" not in out.extra

    def test_everything_in_a_dcp_folder_but_weights_and_optimizer_is_there(self, layouts: Path, extract: Extract) -> None:
        titan = extract(layouts / "torchtitan" / "run" / "checkpoint").extra
        assert set(titan) == {"lr_scheduler", "train_state"}
        composer = extract(layouts / "composer" / "run").extra
        assert set(composer) == {"rng", "rng_rank_0", "timestamp", "run_name"}
        assert composer["timestamp"] == {"batch": 5}
        assert composer["run_name"] == "toy"
        assert set(composer["rng"]) == {"cpu", "numpy", "random"}

    def test_what_lies_beside_the_weights_of_one_file_is_there(self, tmp_path: Path, extract: Extract) -> None:
        content = {"model": {"w": torch.ones(2)}, "lr_scheduler": {"last_epoch": 3}, "epoch": 2, "best": float("inf"), "optimizer": {}}
        (tmp_path / "run").mkdir()
        torch.save(content, tmp_path / "run" / "checkpoint.pt")
        out = extract(tmp_path / "run" / "checkpoint.pt")
        assert out.extra == {"lr_scheduler": {"last_epoch": 3}, "epoch": 2, "best": float("inf")}
        assert out.training["epoch"] == 2


# -- trainers whose files are imitated --------------------------------------------------------------------------------

RANKS = 4


def weights(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.ones(3, 2)}, folder / "model.safetensors")
    return folder


def device_state(rank: int, device: int = 0) -> torch.Tensor:
    """Like the state of a GPU's generator: 16 bytes."""
    return torch.arange(16, dtype=torch.uint8) + 16 * rank + device


def save_each(folder: Path, name: str, content: Callable[[int], object], ranks: int = RANKS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        torch.save(content(rank), folder / name.format(rank))


def scheduler(step: int) -> dict[str, Any]:
    return {"base_lrs": [1e-4], "last_epoch": step, "_step_count": step + 1, "_last_lr": [1e-4 / (1 + step)], "lr_lambdas": [None]}


class TestStatesOfDevices:
    """A list over ranks, for `torch.cuda.set_rng_state_all` in one process or one entry per rank."""

    @pytest.mark.parametrize("device", ["cuda", "npu", "xpu", "musa", "hpu", "mlu"])
    def test_of_verl_are_a_list_over_ranks(self, tmp_path: Path, extract: Extract, device: str) -> None:
        def content(rank: int) -> dict[str, Any]:
            return {"lr_scheduler": scheduler(3), "rng": {"cpu": torch.get_rng_state(), device: device_state(rank)}}

        save_each(weights(tmp_path / "global_step_3"), EXTRA, content)
        out = extract(tmp_path / "global_step_3")
        assert same(out.extra["rng"][device], [device_state(rank) for rank in range(RANKS)])
        assert out.result.random == ("cpu", device)
        assert all(same(out.extra[f"rng_rank_{rank}"][device], device_state(rank)) for rank in range(RANKS))

    def test_of_trainers_that_save_every_visible_device_are_those_of_the_rank(self, tmp_path: Path, extract: Extract) -> None:
        """accelerate saves `get_rng_state_all`: with two devices a node, rank 3 runs on the second one of its node."""

        def content(rank: int) -> dict[str, Any]:
            return {
                "torch_manual_seed": torch.get_rng_state(),
                "torch_cuda_manual_seed": [device_state(rank, d) for d in (0, 1)],
            }

        save_each(weights(tmp_path / "checkpoint-3"), "random_states_{}.pkl", content)
        out = extract(tmp_path / "checkpoint-3")
        assert same(out.extra["rng"]["cuda"], [device_state(0, 0), device_state(1, 1), device_state(2, 0), device_state(3, 1)])

    def test_of_a_missing_rank_are_none(self, tmp_path: Path, extract: Extract) -> None:
        save_each(weights(tmp_path / "global_step_3"), EXTRA, lambda rank: {"rng": {"cuda": device_state(rank)}})
        (tmp_path / "global_step_3" / EXTRA.format(2)).unlink()
        out = extract(tmp_path / "global_step_3")
        assert same(out.extra["rng"]["cuda"], [device_state(0), device_state(1), None, device_state(3)])
        assert out.codes["missing-rank"] == "warning"
        assert "rng_rank_2" not in out.extra

    def test_of_ranks_without_one_are_none(self, tmp_path: Path, extract: Extract) -> None:
        def content(rank: int) -> dict[str, Any]:
            return {"rng": {"cuda": device_state(rank)} if rank else {"cpu": torch.get_rng_state()}}

        save_each(weights(tmp_path / "global_step_3"), EXTRA, content, ranks=2)
        out = extract(tmp_path / "global_step_3")
        assert out.extra["rng"]["cuda"][0] is None
        assert same(out.extra["rng"]["cuda"][1], device_state(1))


class TestTrainers:
    def test_accelerate(self, tmp_path: Path, extract: Extract) -> None:
        folder = weights(tmp_path / "checkpoint-3")
        states = {
            "step": 12,
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
            "torch_cuda_manual_seed": [device_state(0)],
        }
        save_each(folder, "random_states_{}.pkl", lambda rank: states, ranks=2)
        torch.save(scheduler(3), folder / "scheduler.bin")
        torch.save(scheduler(5), folder / "scheduler_1.bin")
        torch.save({"scale": 65536.0, "_growth_tracker": 7}, folder / "scaler.pt")
        copied = ("sampler.bin", "sampler_1.bin", "dl_state_dict.bin", "custom_checkpoint_0.pkl")
        for name in copied:
            torch.save({"any": argparse.Namespace(a=name)}, folder / name)
        out = extract(folder)
        assert same(out.extra["lr_scheduler"], scheduler(3))
        assert same(out.extra["scheduler_1"], scheduler(5))
        assert out.extra["scaler"] == {"scale": 65536.0, "_growth_tracker": 7}
        wanted = {"cpu": states["torch_manual_seed"], "numpy": states["numpy_random_seed"], "random": states["random_state"]}
        assert same(out.extra["rng"], plain({**wanted, "cuda": [device_state(0)] * 2}))
        assert same(out.extra["rng_rank_1"], plain(states))
        assert out.result.copied == tuple(sorted(copied))
        assert all(out.bytes_of(name) == (folder / name).read_bytes() for name in copied)

    def test_hugging_face_trainer(self, tmp_path: Path, extract: Extract) -> None:
        folder = weights(tmp_path / "checkpoint-3")

        def states(rank: int) -> dict[str, Any]:
            return {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "cpu": torch.get_rng_state(),
                "cuda": [device_state(rank, device) for device in range(2)],
            }

        save_each(folder, "rng_state_{}.pth", states, ranks=2)
        torch.save(scheduler(3), folder / "scheduler.pt")
        torch.save({"scale": 2.0}, folder / "scaler.pt")
        torch.save(argparse.Namespace(output_dir="out"), folder / "training_args.bin")
        progress = {"global_step": 3, "epoch": 0.75, "log_history": [{"loss": 1.5, "step": 1}], "best_metric": None}
        (folder / "trainer_state.json").write_text(json.dumps(progress))
        out = extract(folder)
        assert set(out.extra) == {"lr_scheduler", "scaler", "rng", "rng_rank_0", "rng_rank_1"}
        assert same(out.extra["rng"]["random"], plain(random.getstate()))
        assert same(out.extra["rng"]["cuda"], [device_state(0, 0), device_state(1, 1)])
        assert (out.training["step"], out.training["epoch"], out.training["trainer_state"]) == (3, 0.75, progress)
        assert out.bytes_of("training_args.bin") == (folder / "training_args.bin").read_bytes()
        assert not out.result.not_represented

    def test_hugging_face_trainer_on_one_device(self, tmp_path: Path, extract: Extract) -> None:
        folder = weights(tmp_path / "checkpoint-3")
        torch.save({"cpu": torch.get_rng_state(), "cuda": device_state(0)}, folder / "rng_state.pth")
        out = extract(folder)
        assert same(out.extra["rng"], {"cpu": torch.get_rng_state(), "cuda": [device_state(0)]})
        assert same(out.extra["rng_rank_0"]["cuda"], device_state(0))

    def test_skyrl(self, tmp_path: Path, extract: Extract) -> None:
        folder = tmp_path / "global_step_3"
        save_each(folder / "policy", "model_world_size_4_rank_{}.pt", lambda _: {"w": torch.ones(2)})

        def content(rank: int) -> dict[str, Any]:
            return {
                "lr_scheduler": scheduler(3),
                "client_state": {"epoch": 1},
                "tag": "global_step_3",
                "fsdp_strategy": "fsdp2",
                "world_size": RANKS,
                "rank": rank,
                "rng": {"cpu": torch.get_rng_state(), "cuda": device_state(rank)},
            }

        save_each(folder / "policy", EXTRA, content)
        torch.save({"global_step": 3, "config": {"lr": 1e-4}}, folder / "trainer_state.pt")
        torch.save({"position": 5}, folder / "data.pt")
        out = extract(folder)
        assert out.extra["global_step"] == 3
        assert out.extra["config"] == {"lr": 1e-4}
        assert out.extra["client_state"] == {"epoch": 1}
        assert same(out.extra["rng"]["cuda"], [device_state(rank) for rank in range(RANKS)])
        assert "ranks-differ" not in out.codes, "that ranks have numbers of their own is no finding"
        assert out.bytes_of("data.pt") == (folder / "data.pt").read_bytes()
        assert (out.result.framework, out.result.step, out.result.component) == ("SkyRL", 3, "policy")

    def test_veomni(self, tmp_path: Path, extract: Extract) -> None:
        folder = tmp_path / "global_step_3"
        save_dcp({"model": {"w": torch.ones(3, 2)}}, checkpoint_id=folder, no_dist=True)

        def content(rank: int) -> dict[str, Any]:
            return {
                "global_step": 3,
                "lr_scheduler": scheduler(3),
                "train_dataloader": {"position": rank},
                "environ_meter": {"tokens": 100 + rank},
                "torch_rng_state": torch.get_rng_state(),
            }

        save_each(folder / "extra_state", "extra_state_rank_{}.pt", content)
        out = extract(folder)
        assert same(out.extra["lr_scheduler"], scheduler(3))
        assert same(out.extra["rng"], {"cpu": torch.get_rng_state()})
        assert torch.load(out.folder / "dataloader_state.pt") == {
            f"train_dataloader_rank_{rank}": {"position": rank} for rank in range(RANKS)
        }
        assert [out.extra[f"environ_meter_rank_{rank}"] for rank in range(RANKS)] == [{"tokens": 100 + rank} for rank in range(RANKS)]
        assert out.extra["environ_meter"] == {"tokens": 100}
        assert out.codes == {"ranks-differ": "info"}
        assert out.result.training["counters"] == {"global_step": 3}

    def test_prime_rl(self, tmp_path: Path, extract: Extract) -> None:
        folder = tmp_path / "step_3"
        state = {"app": {"model": {"w": torch.ones(3, 2)}, "scheduler": scheduler(3), "progress": {"step": 3, "total_tokens": 4_000}}}
        save_dcp(state, checkpoint_id=folder / "trainer", no_dist=True)
        save_each(folder / "dataloader", "rank_{}.pt", lambda rank: {"position": rank}, ranks=2)
        out = extract(folder)
        assert out.extra["lr_scheduler"]["last_epoch"] == 3
        assert out.extra["progress"] == {"step": 3, "total_tokens": 4_000}
        assert out.result.copied == ("dataloader_rank_0.pt", "dataloader_rank_1.pt")
        assert out.bytes_of("dataloader_rank_1.pt") == (folder / "dataloader" / "rank_1.pt").read_bytes()

    def test_bagel(self, tmp_path: Path, extract: Extract) -> None:
        folder = weights(tmp_path / "0000003")
        torch.save(scheduler(3), folder / "scheduler.pt")
        (folder / "metadata.json").write_text('{"train_steps": 3, "world_size": 8}')
        torch.save([{"vlm": {0: [6, 0]}}], folder / "data_status.pt")
        out = extract(folder)
        assert out.training["metadata"] == {"train_steps": 3, "world_size": 8}
        assert same(out.extra, {"lr_scheduler": scheduler(3)})
        assert out.result.copied == ("data_status.pt",)

    def test_a_folder_of_dcp_with_tensors_of_every_kind(self, tmp_path: Path, extract: Extract) -> None:
        state = {
            "model": {"w": torch.ones(3, 2)},
            "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.5]},
            "train_state": {"step": torch.tensor(3), "losses": torch.arange(3.0), "data": b"\x00\xff", "names": ["a", {"b": (1, 2)}]},
            "rng": {"cpu": torch.get_rng_state()},
        }
        save_dcp(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
        out = extract(tmp_path / "step-3")
        assert same(out.extra["train_state"]["losses"], torch.arange(3.0))
        assert same(out.extra["train_state"]["step"], torch.tensor(3))
        assert out.extra["train_state"]["data"] == b"\x00\xff"
        assert same(out.extra["rng"]["cpu"], torch.get_rng_state())
        assert out.scheduler == {"last_epoch": 3, "_last_lr": [0.5]}
        assert out.training["lr"] == [0.5]

    def test_lists_and_dicts_in_a_dcp_folder_stay_apart(self, tmp_path: Path, extract: Extract) -> None:
        """torch records indices of lists as numbers and keys of dicts as text."""
        state = {"workers": {"0": torch.ones(1), "1": torch.zeros(1)}, "history": [torch.ones(1), {"a": 1}], "shares": {"0": 1, "1": 2}}
        save_dcp({"model": {"w": torch.ones(2)}, "progress": state}, checkpoint_id=tmp_path / "step-3", no_dist=True)
        assert same(extract(tmp_path / "step-3").extra["progress"], state)


class TestRanks:
    def test_whose_schedulers_differ_are_told(self, copy: Copy, extract: Extract) -> None:
        run = copy("layouts", "verl-run", "run")
        file = run / "global_step_20" / "actor" / EXTRA.format(2)
        state = original(file)
        state["lr_scheduler"]["last_epoch"] = 19
        torch.save(state, file)
        out = extract(run)
        (note,) = (note for note in out.result.notes if note.code == "scheduler-differs")
        assert note.level == "warning"
        assert "ranks 2 differ" in note.text
        assert "rank 0" in note.text
        assert out.extra["lr_scheduler"]["last_epoch"] == 20
        assert [finding["code"] for finding in out.training["findings"]] == ["written-apart", "ranks-of-steps", "scheduler-differs"]

    @pytest.mark.parametrize("rank", range(4))
    def test_that_are_missing_are_told_and_left_out(self, copy: Copy, extract: Extract, rank: int) -> None:
        run = copy("layouts", "verl-run", "run")
        (run / "global_step_20" / "actor" / EXTRA.format(rank)).unlink()
        out = extract(run)
        (note,) = (note for note in out.result.notes if note.code == "missing-rank")
        assert note.level == "warning"
        assert f"rank {rank} of 4 is missing from the training state" in note.text
        assert [f"rng_rank_{other}" in out.extra for other in range(4)] == [other != rank for other in range(4)]
        first = original(run / "global_step_20" / "actor" / EXTRA.format(0 if rank else 1))
        assert same(out.extra["rng"]["cpu"], first["rng"]["cpu"])
        assert same(out.extra["lr_scheduler"], plain(first["lr_scheduler"]))
        assert out.training["world_size"] == 4

    @pytest.mark.parametrize("rank", [0, 1, 3])
    def test_whose_dataloader_is_missing_are_told(self, copy: Copy, extract: Extract, rank: int) -> None:
        run = copy("layouts", "lmms-run", "run")
        name = "dataloader_state_world_size_4_rank_{}.pt"
        (run / "checkpoint-200" / "dataloader_state" / name.format(rank)).unlink()
        out = extract(run, step=200)
        (note,) = (note for note in out.result.notes if note.code == "missing-rank")
        assert note.level == "warning"
        assert note.text == f"rank {rank} of 4 is missing among {name.format('R')}: it cannot be passed on"
        assert len([file for file in out.result.copied if file.startswith("dataloader")]) == 3

    @pytest.mark.parametrize(
        ("names", "told"),
        [
            (["dataloader/rank_0.pt", "dataloader/rank_2.pt"], ["ranks 1, 3 of 4 are missing among dataloader/rank_R.pt"]),
            (["dataloader/rank_0.pt"], ["ranks 1, 2, 3 of 4 are missing among dataloader/rank_R.pt"]),
            ([f"dataloader/rank_{rank}.pt" for rank in range(4)], []),
            (["data_0.pt", "data_2.pt"], ["rank 1 of 3 is missing among data_R.pt"]),
            (["data_0.pt", "data_1.pt"], []),
            (["data.pt"], []),
            (["sampler.bin", "sampler_2.bin", "custom_checkpoint_3.pkl"], []),
            ([f"random_states_{rank}.pkl" for rank in (0, 1, 3)], ["rank 2 of 4 is missing from the training state"]),
            (
                ["extra_state_rank_0.pt", "extra_state_rank_1.pt", *(f"random_states_{rank}.pkl" for rank in range(4))],
                ["ranks 2, 3 of 4 are missing among extra_state_rank_R.pt"],
            ),
        ],
    )
    def test_of_any_kind_of_file_are_told(self, copy: Copy, extract: Extract, names: list[str], told: list[str]) -> None:
        folder = copy("layouts", "verl-run", "run") / "global_step_20" / "actor"
        for file in folder.glob("extra_state*"):
            file.unlink()
        for file in folder.parent.glob("data*.pt"):
            file.unlink()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            torch.save({"epoch": 1}, folder / name)
        found = [note.text.partition(":")[0] for note in extract(folder).result.notes if note.code == "missing-rank"]
        assert found == told

    def test_that_lack_a_part_are_told(self, copy: Copy, extract: Extract) -> None:
        run = copy("layouts", "verl-run", "run")
        file = run / "global_step_20" / "actor" / EXTRA.format(2)
        torch.save({"lr_scheduler": None, "other": 3}, file)
        out = extract(run)
        told = [note.text for note in out.result.notes if note.code == "missing-part"]
        assert told == ["rank 2 saved no scheduler, others did", "rank 2 saved no random state, others did"]

    def test_of_two_saves_are_refused(self, copy: Copy, extract: Extract) -> None:
        run = copy("layouts", "verl-run", "run")
        actor = run / "global_step_20" / "actor"
        (actor / "extra_state_world_size_8_rank_0.pt").write_bytes((actor / EXTRA.format(0)).read_bytes())
        with pytest.raises(MixedWorldSizes, match="4 and 8"):
            extract(run)

    def test_that_are_there_twice_are_refused(self, copy: Copy, extract: Extract) -> None:
        run = copy("layouts", "verl-run", "run")
        actor = run / "global_step_20" / "actor"
        (actor / EXTRA.format("00")).write_bytes((actor / EXTRA.format(0)).read_bytes())
        with pytest.raises(Inconsistent, match="same rank"):
            extract(run)

    def test_with_values_of_their_own_are_all_kept(self, tmp_path: Path, extract: Extract) -> None:
        def content(rank: int) -> dict[str, Any]:
            return {"tokens": 100 + rank, "epoch": 2, "only_first": rank} if rank == 0 else {"tokens": 100 + rank, "epoch": 2}

        save_each(weights(tmp_path / "global_step_3"), EXTRA, content)
        out = extract(tmp_path / "global_step_3")
        assert out.extra == {"tokens": 100, "epoch": 2, "only_first": 0, **{f"tokens_rank_{rank}": 100 + rank for rank in range(RANKS)}}
        assert out.codes == {"ranks-differ": "info"}
        assert out.training["counters"]["tokens"] == 100

    def test_that_agree_in_nan_do_not_differ(self, tmp_path: Path, extract: Extract) -> None:
        save_each(weights(tmp_path / "global_step_3"), EXTRA, lambda rank: {"loss": float("nan"), "lr_scheduler": {"best": float("nan")}})
        out = extract(tmp_path / "global_step_3")
        assert out.codes == {}
        assert set(out.extra) == {"loss", "lr_scheduler"}

    def test_of_another_step_than_the_folder_are_told(self, tmp_path: Path, extract: Extract) -> None:
        save_each(weights(tmp_path / "global_step_3"), EXTRA, lambda rank: {"global_step": 99}, ranks=1)
        (tmp_path / "global_step_3" / EXTRA.format(0)).rename(tmp_path / "global_step_3" / "extra_state_world_size_1_rank_0.pt")
        out = extract(tmp_path / "global_step_3")
        (note,) = out.result.notes
        assert (note.level, note.code) == ("warning", "step-differs")
        assert "step 3" in note.text
        assert "99" in note.text
        assert out.training["step"] == 3


def two_steps(layouts: Path, tmp_path: Path) -> Path:
    """A run with steps 10 and 20, of four ranks each."""
    for step in (10, 20):
        folder = tmp_path / "run" / f"global_step_{step}"
        shutil.copytree(layouts / "verl-run" / "run" / "global_step_20", folder)
        for rank in range(4):
            file = folder / "actor" / EXTRA.format(rank)
            torch.save({**original(file), "lr_scheduler": scheduler(step)}, file)
    return tmp_path / "run"


class TestStatesOfAnotherStep:
    """A state of another save than its folder, or than that of other ranks, is told with both numbers."""

    def test_that_another_folder_of_the_run_has_is_told(self, layouts: Path, tmp_path: Path, extract: Extract) -> None:
        run = two_steps(layouts, tmp_path)
        for rank in range(4):
            shutil.copy(run / "global_step_10" / "actor" / EXTRA.format(rank), run / "global_step_20" / "actor")
        out = extract(run, step=20)
        # The weights of the two are the same too.
        (note,) = [note for note in out.result.notes if note.code != "other-step"]
        assert (note.level, note.code) == ("warning", "step-differs")
        assert "step 20" in note.text
        assert "is at 10" in note.text

    @pytest.mark.parametrize(("kind", "number"), [("torch", "scheduler.pt"), ("accelerate", "scheduler.bin")])
    def test_of_one_file_as_well(self, tmp_path: Path, extract: Extract, kind: str, number: str) -> None:
        for step in (100, 200):
            torch.save(scheduler(100), weights(tmp_path / f"checkpoint-{step}") / number)
        assert extract(tmp_path, step=200).codes == {"step-differs": "warning"}, kind
        assert "step-differs" not in extract(tmp_path, step=100).codes

    @pytest.mark.parametrize(
        "count", [lambda n: 2 * n, lambda n: n // 2, lambda n: n // 100, lambda n: 100], ids=["x2", "/2", "epoch", "one"]
    )
    def test_a_scheduler_that_counts_otherwise_contradicts_nothing(
        self, tmp_path: Path, extract: Extract, count: Callable[[int], int]
    ) -> None:
        # Two processes of accelerate, two batches per step, epochs; and a constant, which says nothing once three folders show it.
        steps = (100, 200, 400)
        for step in steps:
            torch.save(scheduler(count(step)), weights(tmp_path / f"checkpoint-{step}") / "scheduler.pt")
        told = ["step-differs" in extract(tmp_path, step=step).codes for step in steps]
        assert not any(told)

    def test_a_scheduler_alone_contradicts_nothing(self, tmp_path: Path, extract: Extract) -> None:
        torch.save(scheduler(100), weights(tmp_path / "checkpoint-200") / "scheduler.pt")
        assert extract(tmp_path / "checkpoint-200").codes == {}

    @pytest.mark.parametrize("how", ["also", "parent", "one folder"])
    def test_of_some_ranks_are_told_by_merge_as_well(self, layouts: Path, tmp_path: Path, how: str) -> None:
        run = two_steps(layouts, tmp_path)
        nodes = [tmp_path / "nodes" / f"node{i}" / "global_step_20" for i in (0, 1)]
        if how == "one folder":
            nodes = [nodes[0], nodes[0]]
        shutil.copytree(run / "global_step_20", nodes[0])
        for rank in (2, 3):
            for file in list((nodes[0] / "actor").glob(f"*_rank_{rank}.pt")):
                file.unlink()
        (nodes[1] / "actor").mkdir(parents=True, exist_ok=True)
        for rank in (2, 3):
            for file in (run / "global_step_10" / "actor").glob(f"*_rank_{rank}.pt"):
                shutil.copy(file, nodes[1] / "actor")
        path = tmp_path / "nodes" if how == "parent" else nodes[0]
        also = nodes[1] if how == "also" else ()
        merged = ckpt_cli.merge(path, tmp_path / "merged", also=also)
        extracted = ckpt_cli.extract_state(path, tmp_path / "state", also=also)
        for notes in (merged.checkpoint.notes, extracted.notes, ckpt_cli.detect(path, also=also).checkpoint.notes):
            (note,) = [note for note in notes if note.code == "ranks-of-steps"]
            assert note.level == "warning"
            assert "10 (ranks 2, 3" in note.text
            assert "20 (ranks 0, 1" in note.text
        with pytest.raises(CkptError):
            ckpt_cli.merge(path, tmp_path / "strict", also=also, strict=True)

    def test_of_nodes_with_a_trainer_state_each_are_told(self, layouts: Path, tmp_path: Path) -> None:
        run = two_steps(layouts, tmp_path)
        nodes = [tmp_path / node / "global_step_20" for node in "ab"]
        for node, step, ranks in zip(nodes, (20, 10), ((0, 1), (2, 3)), strict=True):
            (node / "actor").mkdir(parents=True)
            for rank in ranks:
                shutil.copy(run / "global_step_20" / "actor" / f"model_world_size_4_rank_{rank}.pt", node / "actor")
            (node / "actor" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        notes = ckpt_cli.merge(nodes[0], tmp_path / "out", also=nodes[1]).checkpoint.notes
        (text,) = [note.text for note in notes if note.code == "ranks-of-steps"]
        assert "10 (" in text
        assert "20 (" in text

    def test_of_one_save_are_no_reason_to_warn(self, layouts: Path, tmp_path: Path) -> None:
        run = two_steps(layouts, tmp_path)
        assert not [
            note for note in ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes if note.level == "warning" and "steps" in note.text
        ]


class TestWhatIsLost:
    """Nothing is lost in silence: it is listed, and the file that holds it is copied."""

    def test_an_object_is_left_out_listed_and_copied(self, tmp_path: Path, extract: Extract) -> None:
        folder = weights(tmp_path / "global_step_3")
        file = folder / "extra_state_world_size_1_rank_0.pt"
        torch.save({"lr_scheduler": scheduler(3), "args": argparse.Namespace(lr=1), "list": [1, argparse.Namespace()]}, file)
        out = extract(folder)
        assert out.extra == {"lr_scheduler": scheduler(3), "list": [1, None]}
        assert len(out.result.not_represented) == 2
        assert out.training["not_represented"] == list(out.result.not_represented)
        assert all("argparse.Namespace" in lost and file.name in lost for lost in out.result.not_represented)
        assert out.result.copied == (file.name,)
        assert out.bytes_of(file.name) == file.read_bytes()

    @pytest.mark.parametrize("content", [[1, 2], (3,), torch.ones(2), "text", 7, argparse.Namespace(a=1)], ids=repr)
    def test_a_file_that_holds_no_dict_is_listed_or_copied(self, tmp_path: Path, extract: Extract, content: object) -> None:
        folder = weights(tmp_path / "global_step_3")
        file = folder / "extra_state_world_size_1_rank_0.pt"
        torch.save(content, file)
        try:
            out = extract(folder)
        except CkptError:
            return
        assert out.result.not_represented or out.result.copied, "the state of this rank is nowhere, and nothing says so"

    def test_objects_in_a_dcp_folder_are_listed(self, tmp_path: Path, extract: Extract) -> None:
        state = {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(a=1), "lr_scheduler": {"last_epoch": 3}}
        save_dcp(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
        out = extract(tmp_path / "step-3")
        assert out.extra == {"lr_scheduler": {"last_epoch": 3}}
        assert [lost.split(":")[0] for lost in out.result.not_represented] == ["args in step-3"]

    def test_a_dcp_object_whose_file_is_missing_is_listed(self, copy: Copy, extract: Extract) -> None:
        run = copy("layouts", "composer", "run")
        for file in (run / "ep0-ba5").glob("*.distcp"):
            file.unlink()
        try:
            out = extract(run)
        except CkptError as error:
            assert error.exit_code in (3, 4)  # noqa: PT017
        else:
            assert out.result.not_represented

    def test_an_empty_value_of_bytes_does_not_spoil_the_file(self, tmp_path: Path, extract: Extract) -> None:
        """A dataloader or a tokenizer may keep b"": whatever happens to it, `torch.load` must read the rest."""
        folder = weights(tmp_path / "global_step_3")
        for protocol in (2, 4):
            file = folder / "extra_state_world_size_1_rank_0.pt"
            torch.save({"lr_scheduler": scheduler(3), "buffer": {"rest": b""}}, file, pickle_protocol=protocol)
            assert same(extract(folder).extra["lr_scheduler"], scheduler(3))


class TestDamagedFiles:
    @pytest.mark.parametrize(
        "name", ["extra_state_world_size_1_rank_0.pt", "rng_state_0.pth", "random_states_0.pkl", "scheduler.pt", "scaler.pt", "meta.pt"]
    )
    @pytest.mark.parametrize("content", [b"", b"x" * 3_000, bytes(3_000)], ids=["empty", "text", "zeros"])
    def test_are_refused_by_name(self, tmp_path: Path, extract: Extract, name: str, content: bytes) -> None:
        folder = weights(tmp_path / "global_step_3")
        (folder / name).write_bytes(content)
        with pytest.raises(CorruptFile) as caught:
            extract(folder)
        assert caught.value.path == str(folder / name)

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"global_step": 1' + b"0" * 6_000 + b"}"])
    @pytest.mark.parametrize("name", ["trainer_state.json", "metadata.json"])
    def test_json_is_refused_by_name(self, tmp_path: Path, extract: Extract, name: str, content: bytes) -> None:
        folder = weights(tmp_path / "global_step_3")
        (folder / name).write_bytes(content)
        with pytest.raises(CorruptFile) as caught:
            extract(folder)
        assert caught.value.path == str(folder / name)

    @pytest.mark.parametrize(
        "content", ["[1]", "3", "null", '{"global_step": [1], "epoch": {"a": 1}}', '{"global_step": NaN}', '{"train_steps": "x"}']
    )
    @pytest.mark.parametrize("name", ["trainer_state.json", "metadata.json"])
    def test_json_that_says_something_else_does_no_harm(self, tmp_path: Path, extract: Extract, name: str, content: str) -> None:
        folder = weights(tmp_path / "global_step_3")
        torch.save(scheduler(3), folder / "scheduler.pt")
        (folder / name).write_text(content)
        assert extract(folder).training["step"] == 3

    @pytest.mark.parametrize(
        "content",
        [
            {"rng": 3},
            {"rng": [1, None]},
            {"rng": {"cpu": "x", "cuda": [], "numpy": {}}},
            {"rng": None, "lr_scheduler": None},
            {"lr_scheduler": 3},
            {"lr_scheduler": [scheduler(1), scheduler(2)]},
            {"lr_scheduler": {"_last_lr": "x", "last_epoch": {"a": 1}}},
            {"step": torch.tensor(1.0).to(torch.float8_e4m3fn), "epoch": torch.tensor(1j), "iteration": torch.ones(3)},
            {"step": True, "epoch": "first"},
            {"rng_rank_0": 5, "rng": {"cpu": torch.ones(1)}},
            {1: 2, None: 3, (1, 2): 4},
            {},
        ],
        ids=repr,
    )
    def test_values_of_other_kinds_do_no_harm(self, tmp_path: Path, extract: Extract, content: object) -> None:
        folder = weights(tmp_path / "global_step_3")
        torch.save(content, folder / "extra_state_world_size_1_rank_0.pt")
        torch.save({"scale": 2.0}, folder / "scaler.pt")
        assert extract(folder).extra["scaler"] == {"scale": 2.0}
