"""What is called training state, and what only begins like it."""

from __future__ import annotations

import doctest

import pytest

from ckpt_cli.formats import training_state_names
from ckpt_cli.formats.torch_files import averages
from ckpt_cli.formats.training_state_names import is_record_key, is_state_file, is_state_key


def test_examples_of_the_modules() -> None:
    for module in (training_state_names, averages):
        assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "name",
    [
        "optim_world_size_4_rank_0.pt", "optimizer_0.bin", "distrib_optim.pt", "extra_state_rank_0.pt", "scheduler.bin", "lr_scheduler.pt",
        "rng_state_0.pth", "random_states_0.pkl", "training_args.bin", "data.pt", "data_0.pt", "data_status.pt", "dataloader.pt",
        "scaler.pt", "sampler_1.bin", "losses.pt", "metrics.pt", "log.pt", "stats_rank_0.pt", "trainer_state.json", "train_state.pt",
    ],
)  # fmt: skip
def test_files_of_training_state(name: str) -> None:
    assert is_state_file(name)


@pytest.mark.parametrize("name", ["database.pt", "loss_0.31.ckpt", "trainable_params.bin", "randomly.pt", "logits.pt", "lr_1e-4.pt"])
def test_files_that_may_be_weights(name: str) -> None:
    assert not is_state_file(name)


@pytest.mark.parametrize(
    "key",
    [
        "optim", "opt", "opt_state", "optG", "opt_d", "optimizer_states", "generator_optimizer", "Optimiser", "base_optim", "lr_scheduler",
        "lr_schedulers", "scheduler", "sched", "rng", "rng_state", "cuda_rng_state_all", "random_states", "numpy_random_state",
        "dataloader", "train_dataloader", "data_loader_state",
    ],
)  # fmt: skip
def test_keys_of_training_state(key: str) -> None:
    assert is_state_key(key)


@pytest.mark.parametrize(
    "key", ["optimal_model", "options", "model", "noise_scheduler", "random_features", "data", "best_model", "loss", 3]
)
def test_keys_that_may_be_weights(key: object) -> None:
    assert not is_state_key(key)


@pytest.mark.parametrize("key", ["callbacks", "loops", "train_losses", "best", "grad_scaler", "noise_scheduler", "epoch"])
def test_keys_of_numbers(key: str) -> None:
    assert is_record_key(key)
