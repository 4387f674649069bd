"""Training goes on from what was merged: two processes train with FSDP, and others continue bit for bit from the extracted state."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional

import ckpt_cli
from ckpt_cli.errors import Undecidable
from tests.cli import ROOT
from tests.ranks import run_ranks
from tests.tensors import Tensors, differences, load

pytestmark = pytest.mark.slow

RANKS = 2
SAVED_AT = 4
MORE_STEPS = 3
WIDTH = 5
"""Odd, so that no dimension divides by the number of ranks."""

TOLD = {
    "two groups": "by the order of parameters",
    "momentum": "by the order of parameters",
    "amsgrad": "by the order of parameters",
    "replicas": "by the order of parameters",
    "every linear": "FSDP1 flat parameters",
}
"""Other trainings and how their parameters are told. "replicas" is hybrid sharding (that of FSDP1 torch cannot gather itself); those
called every are of FSDP1, "every linear" wraps the linear layers inside of wrapped blocks."""

NOT_TOLD = ("frozen", "every parameter", "twins")
"""One of three like blocks is frozen; FSDP1 with `use_orig_params`, where ranks hold flat parts of any size of each parameter; one of two
like modules is wrapped, and only by taking a buffer for a parameter the sizes would fit one way, which is the wrong one."""

PARTS = ("optimizer", "scheduler", "random")
"""What is restored besides the weights."""

Optimizer = torch.optim.Optimizer


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 7)
        self.down = torch.nn.Linear(7, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + functional.dropout(self.down(functional.gelu(self.up(self.norm(hidden)))), 0.2, self.training)


class Toy(torch.nn.Module):
    """A small model with dropout, layers to wrap and parameters that no layer holds, and a buffer that is no parameter."""

    temperature: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.register_buffer("temperature", torch.tensor([0.5 + seed]))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 3, bias=False)

    def forward(self, tokens: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + noise
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden) / self.temperature
        return logits


def adamw(model: torch.nn.Module, lr: float = 0.02) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def schedule(optimizer: Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def backward(model: torch.nn.Module) -> float:
    """The gradients of one batch, which is drawn from all three random generators; returns the loss."""
    tokens, labels = torch.randint(11, (4,)), torch.randint(3, (4,))
    noise = torch.randn(4, WIDTH) * (np.random.rand() + random.random())
    loss = functional.cross_entropy(model(tokens, noise), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def train(model: torch.nn.Module, optimizer: Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """Training steps; the losses of this rank."""
    losses = []
    for _ in range(steps):
        losses.append(backward(model))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def whole(tensors: dict[str, Any]) -> Tensors:
    return {name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone() for name, tensor in tensors.items()}


def random_states() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    np.random.set_state(states["numpy"])
    random.setstate(states["random"])


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


# -- what the processes do -------------------------------------------------------------------------------------------


@contextmanager
def process_group(rank: int, folder: Path, name: str) -> Iterator[DeviceMesh]:
    """A group of gloo on the CPU; `<name>-<rank>.json` says so, and that it is gone afterwards."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.store", rank=rank, world_size=RANKS)
    facts: dict[str, Any] = {"backend": dist.get_backend(), "ranks": dist.get_world_size(), "pid": os.getpid()}
    try:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        facts["device"] = mesh.device_type
        yield mesh
        dist.barrier()
    finally:
        dist.destroy_process_group()
    facts["still_there"] = dist.is_initialized()
    (folder / f"{name}-{rank}.json").write_text(json.dumps(facts))


def save_like_verl(folder: Path, rank: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """What FSDPCheckpointManager of verl saves for one role."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"world_size_{RANKS}_rank_{rank}.pt"
    torch.save(model, folder / f"model_{suffix}")
    torch.save(optimizer, folder / f"optim_{suffix}")
    torch.save({"lr_scheduler": scheduler.state_dict(), "rng": random_states()}, folder / f"extra_state_{suffix}")


def sharded(model: Toy, mesh: DeviceMesh) -> Toy:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp1(model: Toy, wrapped: Sequence[type[torch.nn.Module]] = (Block,), **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(wrapped), device_id=torch.device("cpu"), **options)


def write_runs(rank: int, folder: Path) -> None:
    """One rank of the trainings that are interrupted later on."""
    with process_group(rank, folder, "train") as mesh:
        for write in (write_verl, write_dcp, write_flat, write_easyr1):
            write(rank, folder, mesh)
        for name in (*TOLD, *NOT_TOLD[:-1]):
            write_variant(name, rank, folder, mesh)
        write_twins(rank, folder, mesh)


def write_verl(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """FSDP2 in verl's layout; then three steps more, whose first is recorded in whole tensors, for one process to repeat it."""
    model = sharded(Toy(1), mesh)
    optimizer = adamw(model)
    scheduler = schedule(optimizer)
    seed_everything(100 + rank)
    train(model, optimizer, scheduler, SAVED_AT)
    run = folder / "verl" / f"global_step_{SAVED_AT}" / "actor"
    save_like_verl(run, rank, model.state_dict(), optimizer.state_dict(), scheduler)
    losses = [backward(model)]
    gradients = whole({name: parameter.grad for name, parameter in model.named_parameters()})
    optimizer.step()
    after_one = whole(dict(model.named_parameters()))
    optimizer.zero_grad()
    scheduler.step()
    losses += train(model, optimizer, scheduler, MORE_STEPS - 1)
    record = {"losses": losses, "gradients": gradients, "after_one": after_one, "weights": whole(model.state_dict())}
    torch.save(record, folder / f"verl-{rank}.pt")


def write_dcp(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """FSDP2 with weights and optimizer in one folder of torch.distributed.checkpoint."""
    model = sharded(Toy(2), mesh)
    optimizer = adamw(model)
    seed_everything(200 + rank)
    train(model, optimizer, schedule(optimizer), SAVED_AT)
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp" / f"step-{SAVED_AT}")
    oracle = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    record_on_first(rank, folder / "dcp.pt", oracle)


def write_flat(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """FSDP1, whose optimizer knows flat parameters only, in verl's layout."""
    model = fsdp1(Toy(3))
    optimizer = adamw(model)
    scheduler = schedule(optimizer)
    seed_everything(300 + rank)
    train(model, optimizer, scheduler, SAVED_AT)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        save_like_verl(folder / "flat" / "global_step_4" / "actor", rank, model.state_dict(), optimizer.state_dict(), scheduler)
    options = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *options):
        record_on_first(rank, folder / "flat.pt", FullyShardedDataParallel.optim_state_dict(model, optimizer))


def write_easyr1(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """FSDP1 with a mesh, weights and optimizer by get_state_dict, as EasyR1 saves them."""
    model = fsdp1(Toy(4), device_mesh=mesh)
    optimizer = adamw(model)
    scheduler = schedule(optimizer)
    seed_everything(400 + rank)
    train(model, optimizer, scheduler, SAVED_AT)
    save_like_verl(folder / "easyr1" / "global_step_4" / "actor", rank, *get_state_dict(model, optimizer), scheduler)
    oracle = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    record_on_first(rank, folder / "easyr1.pt", oracle)


def write_variant(name: str, rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Other trainings in verl's layout, all with optimizers that number their parameters."""
    toy = Toy(5)
    if name == "frozen":
        for parameter in toy.blocks[1].parameters():
            parameter.requires_grad = False
    model: torch.nn.Module
    if name.startswith("every"):
        wrapped = (Block, torch.nn.Linear) if name == "every linear" else (Block,)
        model = fsdp1(toy, wrapped, use_orig_params=name == "every parameter")
    elif name == "replicas":
        model = sharded(toy, init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard")))
    else:
        model = sharded(toy, mesh)
    optimizer = optimizer_of(name, [parameter for parameter in model.parameters() if parameter.requires_grad])
    scheduler = schedule(optimizer)
    seed_everything(500 + rank)
    train(model, optimizer, scheduler, SAVED_AT)
    kind = FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT) if name.startswith("every") else nullcontext()
    with kind:
        save_like_verl(folder / name / "global_step_4" / "actor", rank, model.state_dict(), optimizer.state_dict(), scheduler)
    oracle = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    record_on_first(rank, folder / f"{name}.pt", oracle)


class Twins(torch.nn.Module):
    """Two modules with a weight each, one of which counts, and a parameter of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.first, self.second = torch.nn.Linear(2, 4, bias=False), torch.nn.Linear(2, 4, bias=False)
        self.first.register_buffer("count", torch.tensor(0.0))


def write_twins(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """FSDP1 with one of two like modules wrapped, after a step with gradients that tell all elements apart."""
    twins = Twins()
    cpu = torch.device("cpu")
    twins.first = FullyShardedDataParallel(twins.first, device_id=cpu)  # type: ignore[assignment]
    model = FullyShardedDataParallel(twins, device_id=cpu)
    optimizer = adamw(model)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.arange(1.0, parameter.numel() + 1) + 10 * number + 100 * rank
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        save_like_verl(folder / "twins" / "global_step_4" / "actor", rank, model.state_dict(), optimizer.state_dict(), schedule(optimizer))


def optimizer_of(name: str, parameters: list[torch.nn.Parameter]) -> Optimizer:
    if name == "two groups":
        decayed, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.02)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.02, amsgrad=name == "amsgrad")


def record_on_first(rank: int, path: Path, value: Any) -> None:
    if rank == 0:
        torch.save(value, path)


def by_name(state: Path) -> dict[str, Any]:
    """An optimizer's state as torch's full optimizer state dicts are, of the files that `extract_state` wrote."""
    content = json.loads((state / "optimizer.json").read_text())
    tensors = load(state / "optimizer.safetensors")

    def value(entry: Any) -> Any:
        return tensors[entry["tensor"]] if isinstance(entry, dict) and entry.keys() == {"tensor"} else entry

    named = {name: {slot: value(entry) for slot, entry in slots.items()} for name, slots in content["state"].items()}
    return {"state": named, "param_groups": content["param_groups"]}


def resume_runs(rank: int, folder: Path, merged: Path, state: Path) -> None:
    """Another process goes on, with everything restored, and once without each part."""
    with process_group(rank, folder, "resume") as mesh:
        for left_out in (None, *PARTS):
            record = resume(rank, mesh, merged, state, left_out)
            torch.save(record, folder / f"resumed-{left_out}-{rank}.pt")


def resume(rank: int, mesh: DeviceMesh, merged: Path, state: Path, left_out: str | None) -> dict[str, Any]:
    model = Toy(99)
    model.load_state_dict(load(merged / "model.safetensors"))
    model = sharded(model, mesh)
    optimizer = adamw(model, lr=0.5)
    lr_scheduler = schedule(optimizer)
    seed_everything(rank)
    extra_state = torch.load(merged / "extra_state_merged.pt")
    if left_out != "optimizer":
        set_optimizer_state_dict(model, optimizer, by_name(state), options=StateDictOptions(full_state_dict=True))
    if left_out != "scheduler":
        lr_scheduler.load_state_dict(extra_state["lr_scheduler"])
    if left_out != "random":
        set_random_states(extra_state[f"rng_rank_{rank}"])
    return {"losses": train(model, optimizer, lr_scheduler, MORE_STEPS), "weights": whole(model.state_dict())}


# -- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs `verl`, `dcp`, `flat` and `easyr1`, and what torch itself says about each."""
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(write_runs, folder, ranks=RANKS)
    return folder


@pytest.fixture(scope="module")
def merged(folder: Path) -> Path:
    """verl's run, merged together with its state."""
    ckpt_cli.merge(folder / "verl", folder / "verl-merged", with_state=True)
    return folder / "verl-merged"


@pytest.fixture(scope="module")
def state_of(folder: Path) -> Callable[[str], Path]:
    """The folder with the extracted state of a run."""

    def extract(run: str) -> Path:
        target = folder / f"{run}-state"
        if not target.exists():
            ckpt_cli.extract_state(folder / run, target, optimizer=True)
        return target

    return extract


@pytest.fixture(scope="module")
def resumed(folder: Path, merged: Path, state_of: Callable[[str], Path]) -> Callable[[str | None, int], dict[str, Any]]:
    """What a rank saw that went on without one part, or with all of them (None)."""
    run_ranks(resume_runs, folder, merged, state_of("verl"), ranks=RANKS)
    return lambda left_out, rank: dict(torch.load(folder / f"resumed-{left_out}-{rank}.pt"))


def uninterrupted(folder: Path, rank: int) -> dict[str, Any]:
    return dict(torch.load(folder / f"verl-{rank}.pt"))


class TestAResumedTraining:
    """The losses are equal as floats, not nearly: weights, moments, rates and random numbers are the same bits."""

    @pytest.mark.parametrize("rank", range(RANKS))
    def test_has_the_losses_of_the_uninterrupted_one(
        self, folder: Path, resumed: Callable[[str | None, int], dict[str, Any]], rank: int
    ) -> None:
        losses = resumed(None, rank)["losses"]
        assert len(losses) == MORE_STEPS
        assert losses == uninterrupted(folder, rank)["losses"]

    def test_ends_with_the_same_weights(self, folder: Path, resumed: Callable[[str | None, int], dict[str, Any]]) -> None:
        assert differences(resumed(None, 0)["weights"], uninterrupted(folder, 0)["weights"]) == []

    @pytest.mark.parametrize("left_out", PARTS)
    def test_needs_every_part_of_the_state(self, folder: Path, resumed: Callable[[str | None, int], dict[str, Any]], left_out: str) -> None:
        assert resumed(left_out, 0)["losses"] != uninterrupted(folder, 0)["losses"]

    def test_has_random_numbers_of_its_own_on_every_rank(self, folder: Path) -> None:
        assert uninterrupted(folder, 0)["losses"] != uninterrupted(folder, 1)["losses"]

    def test_finds_the_same_state_beside_merged_weights_and_extracted_alone(self, merged: Path, state_of: Callable[[str], Path]) -> None:
        name = "extra_state_merged.pt"
        assert (merged / name).read_bytes() == (state_of("verl") / name).read_bytes()


class TestTheProcesses:
    @pytest.mark.usefixtures("resumed")
    def test_were_a_group_of_gloo_on_the_cpu_and_left_it(self, folder: Path) -> None:
        facts = [json.loads((folder / f"{name}-{rank}.json").read_text()) for name in ("train", "resume") for rank in range(RANKS)]
        assert {fact["backend"] for fact in facts} == {"gloo"}
        assert {fact["device"] for fact in facts} == {"cpu"}
        assert {fact["ranks"] for fact in facts} == {RANKS}
        assert {fact["still_there"] for fact in facts} == {False}
        assert len({fact["pid"] for fact in facts} - {os.getpid()}) == 2 * RANKS
        assert not dist.is_initialized()


class TestOneProcess:
    """An AdamW over the whole model takes the step that the sharded ones took together."""

    def test_takes_the_same_next_step(self, folder: Path, merged: Path, state_of: Callable[[str], Path]) -> None:
        model = Toy(99)
        model.load_state_dict(load(merged / "model.safetensors"))
        optimizer = adamw(model, lr=0.5)
        numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
        named = by_name(state_of("verl"))
        assert [list(group["params"]) for group in named["param_groups"]] == [list(numbers)]
        groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
        optimizer.load_state_dict({"state": {numbers[name]: slots for name, slots in named["state"].items()}, "param_groups": groups})
        record = uninterrupted(folder, 0)
        for name, parameter in model.named_parameters():
            parameter.grad = record["gradients"][name]
        before = whole(dict(model.named_parameters()))
        optimizer.step()
        after = whole(dict(model.named_parameters()))
        assert all(not torch.equal(after[name], before[name]) for name in after)
        assert differences(after, record["after_one"]) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
class TestTheLinesOfTheDocumentation:
    """docs/state.md says how an optimizer is loaded: as they are, these lines give every parameter its own state."""

    @pytest.mark.parametrize("run", ["verl", "dcp", "two groups", "flat", "easyr1", "every linear"])
    def test_load_the_state_into_an_optimizer_over_the_whole_model(
        self, folder: Path, state_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, run: str
    ) -> None:
        text = (ROOT / "docs" / "state.md").read_text()
        (lines,) = (block.partition("```")[0] for block in text.split("```python\n")[1:] if "optimizer.json" in block)
        (folder / f"docs-{run}").mkdir(exist_ok=True)
        (folder / f"docs-{run}" / "state").symlink_to(state_of(run))
        monkeypatch.chdir(folder / f"docs-{run}")
        model = Toy(0)
        optimizer = optimizer_of(run, list(model.parameters()))
        exec(lines, {"model": model, "optimizer": optimizer})
        wanted = by_name(state_of(run))
        for name, parameter in model.named_parameters():
            assert torch.equal(optimizer.state[parameter]["exp_avg"], wanted["state"][name]["exp_avg"]), name
        assert [group["weight_decay"] for group in optimizer.param_groups] == [group["weight_decay"] for group in wanted["param_groups"]]


RUNS = {"dcp": "DCP, by name", "flat": "FSDP1 flat parameters", "easyr1": "by name", **TOLD}


class TestTheOptimizer:
    """torch gathers whole states itself while the processes live; ours come from the files alone."""

    @pytest.mark.parametrize("run", RUNS)
    def test_is_what_torch_gathers(self, folder: Path, state_of: Callable[[str], Path], run: str) -> None:
        oracle = torch.load(folder / f"{run}.pt")
        assert json.loads((state_of(run) / "optimizer.json").read_text())["layout"] == RUNS[run]
        found = by_name(state_of(run))
        assert sorted(found["state"]) == sorted(name for name, _ in Toy(0).named_parameters())
        assert differences(flattened(found["state"]), flattened(oracle["state"])) == []

    @pytest.mark.parametrize("run", RUNS)
    def test_has_the_parameter_groups_that_torch_gathers(self, folder: Path, state_of: Callable[[str], Path], run: str) -> None:
        oracle = torch.load(folder / f"{run}.pt")["param_groups"]
        found = by_name(state_of(run))["param_groups"]
        assert [group["params"] for group in found] == [group["params"] for group in oracle]
        assert [plain(group) for group in found] == [plain(group) for group in oracle]

    @pytest.mark.parametrize("run", ["verl", *RUNS])
    def test_has_moved(self, state_of: Callable[[str], Path], run: str) -> None:
        for name, slots in by_name(state_of(run))["state"].items():
            moments = slots["momentum_buffer" if run == "momentum" else "exp_avg"]
            assert moments.abs().sum() > 0, name
            assert slots.get("step", SAVED_AT) == SAVED_AT, name

    @pytest.mark.parametrize("run", NOT_TOLD)
    def test_is_refused_where_its_parameters_cannot_be_told(self, folder: Path, tmp_path: Path, run: str) -> None:
        with pytest.raises(Undecidable):
            ckpt_cli.extract_state(folder / run, tmp_path / "state", optimizer=True)
        assert list(tmp_path.iterdir()) == []
        ckpt_cli.extract_state(folder / run, tmp_path / "state")
        assert not (tmp_path / "state" / "optimizer.json").exists()


def flattened(state: dict[str, dict[str, torch.Tensor]]) -> Tensors:
    return {f"{name}.{slot}": torch.as_tensor(value) for name, slots in state.items() for slot, value in slots.items()}


def plain(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group as JSON has them."""
    return dict(json.loads(json.dumps({name: value for name, value in group.items() if name != "params"})))
