"""Live models whose weights are at present not the trained ones: filled, they would compute something else than the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_cli
from ckpt_cli.errors import Unsupported
from tests.test_load_into_peft import adapted, equal
from tests.test_load_into_peft import saved as saved

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]
IDS = torch.arange(6)[None]


@pytest.mark.parametrize(
    ("file", "options"),
    [("both.pt", {}), ("adapter", {"strict": False}), ("base.pt", {"allow_missing": "*lora_*"})],
    ids=["whole", "adapter", "base"],
)
def test_merged_adapters_are_refused(file: str, options: Any, saved: tuple[Any, Path]) -> None:
    model, before = adapted(2), adapted(2)
    model.merge_adapter()
    before.merge_adapter()
    with pytest.raises(Unsupported, match="weights of 4 modules") as raised:
        ckpt_cli.load_into(model, saved[1] / file, **options)
    assert equal(model, before, factors=True)
    assert equal(model, before, factors=False)
    assert "model.unmerge_adapter()" in (raised.value.hint or "")
    model.unmerge_adapter()
    ckpt_cli.load_into(model, saved[1] / file, **options)


class Merging(nn.Linear):
    """As loralib and the first versions of PEFT have it: eval mode merges, and says so."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.lora_A, self.lora_B = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged is mode:
            self.weight.data += (-1 if mode else 1) * self.lora_B @ self.lora_A
            self.merged = not mode
        return self


def test_layers_that_merge_in_eval_mode_are_refused_in_it(tmp_path: Path) -> None:
    model = nn.Sequential(Merging())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.eval()
    with pytest.raises(Unsupported, match="weights of 1 module:"):
        ckpt_cli.load_into(model, tmp_path / "model.pt")
    assert ckpt_cli.load_into(model.train(), tmp_path / "model.pt").tensors == 3


def rwkv(seed: int, rescale_every: int = 2) -> Any:
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 96, "hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    model = RwkvForCausalLM(RwkvConfig(**sizes, rescale_every=rescale_every, context_length=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
    return model


def test_weights_that_are_rescaled_for_inference_are_refused(tmp_path: Path) -> None:
    source, model = rwkv(1), rwkv(2).eval()
    source.save_pretrained(tmp_path)
    wanted = source.eval()(IDS).logits
    model(IDS)
    with pytest.raises(Unsupported, match="rescaled") as raised:
        ckpt_cli.load_into(model, tmp_path)
    assert "model.train()" in (raised.value.hint or "")
    model.train()(IDS)
    ckpt_cli.load_into(model, tmp_path)
    assert torch.equal(model.eval()(IDS).logits, wanted)


def test_weights_that_are_never_rescaled_are_filled(tmp_path: Path) -> None:
    source, model = rwkv(1, rescale_every=0), rwkv(2, rescale_every=0).eval()
    source.save_pretrained(tmp_path)
    model(IDS)
    ckpt_cli.load_into(model, tmp_path)
    assert torch.equal(model(IDS).logits, source.eval()(IDS).logits)


def test_what_was_computed_of_a_codebook_is_not_gone_on_with(tmp_path: Path) -> None:
    from transformers.models.mimi.modeling_mimi import MimiConfig, MimiEuclideanCodebook

    model = nn.Sequential(MimiEuclideanCodebook(MimiConfig(codebook_size=8, codebook_dim=4)))
    torch.save({name: torch.ones_like(values) for name, values in model.state_dict().items()}, tmp_path / "model.pt")
    ckpt_cli.load_into(model, tmp_path / "model.pt")
    assert model[0].embed.sum() == 32
    with pytest.raises(Unsupported, match="in _embed"):
        ckpt_cli.load_into(model, tmp_path / "model.pt")
    model[0]._embed = None
    ckpt_cli.load_into(model, tmp_path / "model.pt")


def test_weights_that_accelerate_keeps_elsewhere_are_not_called_unmade(tmp_path: Path) -> None:
    """They are on the meta device, but materialising them would fill what no forward pass looks at."""
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch.save({name: torch.ones_like(values) for name, values in model.state_dict().items()}, tmp_path / "model.pt")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(Unsupported, match="elsewhere") as raised:
        ckpt_cli.load_into(model, tmp_path / "model.pt")
    assert "remove_hook_from_submodules" in (raised.value.hint or "")
    accelerate.hooks.remove_hook_from_submodules(model)
    ckpt_cli.load_into(model, tmp_path / "model.pt")
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 7.0))
