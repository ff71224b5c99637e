"""First numbers of models from the meta device, and weights in files: every rank holds its own
parts alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from launch import launched

MODELS = ("plain", "llama", "gpt2")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) for name in ("megatron", "fsdp")],
)
def facts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("weights")
    return launched(folder, 2, str(folder), request.param, script="weights_ranks.py")


@pytest.mark.parametrize("model", MODELS)
def test_the_start_is_that_of_one_device_to_the_bit(facts: dict[str, Any], model: str) -> None:
    for rank in facts[model]:
        assert rank["unequal"] == [] and rank["draw"]
        assert rank["apart"] < 1e-5
        assert "has no numbers yet" in rank["empty"] and "par.init_weights()" in rank["empty"]


def test_a_function_of_the_user_s_initializes_modules_below_too(facts: dict[str, Any]) -> None:
    assert facts["own function"]["unequal"] == []
    said = facts["own function"]["said"]
    assert said.startswith("scale has no numbers and Own does not initialize it: give its class")


def test_files_of_transformers_are_read_and_written(facts: dict[str, Any]) -> None:
    wrong = facts["files"]
    said = wrong.pop("said")
    assert len(wrong) == 3 and not any(wrong.values()), wrong
    assert "transformer.wpe.weight is missing" in said["missing"]
    assert "mlp.gate_proj.weight is (64, 32) there and (128, 32) here" in said["shape"]


def test_no_rank_has_all_of_a_model(facts: dict[str, Any]) -> None:
    """Above its own parts a rank holds a module, a part, or a file, and 32 MiB of what the process
    and its allocator need; the other half of the model are 96 MiB.
    """
    memory, more = facts["memory"], 32 * 2**20
    assert memory["own"] == 24 * memory["largest"]
    assert memory["init_weights"] < memory["own"] + memory["largest"] + more
    assert memory["load_weights"] < 0.1 * memory["own"] + more
    assert memory["save_pretrained"] < 3 * 2e7 + more  # safetensors copies what it writes


class Inverse(nn.Module):
    """A buffer that only the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("inverse", 1 / torch.arange(1.0, 5.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.inverse


def test_what_nothing_fills_is_named() -> None:
    with torch.device("meta"):
        model = Inverse()
    par = autopar.parallelize(model, 1, (torch.ones(2, 4),))
    par.init_weights()
    with pytest.raises(InputError, match=r"inverse has no numbers yet: .* outside of torch.device"):
        par(torch.ones(2, 4))
    par.load_state_dict(nn.Linear(4, 4).state_dict(prefix="up."))
    model = Inverse().to_empty(device="cpu")
    par = autopar.parallelize(model, 1, (torch.ones(2, 4),))
    par.up.weight.data.fill_(2.0)
    par.init_weights()  # nothing is empty: all is drawn anew
    assert par.up.weight.abs().max() < 1


def test_what_a_load_refuses_stays_without_numbers() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    par = autopar.parallelize(model, 1, (torch.ones(2, 4),))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        par.load_state_dict({"weight": torch.ones(8, 8), "bias": torch.ones(4)})
    with pytest.raises(InputError, match="weight has no numbers yet: "):
        par(torch.ones(2, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def test_one_name_of_a_tied_weight_is_enough() -> None:
    with torch.device("meta"):
        model = Tied()
    par = autopar.parallelize(model, 1, (torch.ones(2, 4),))
    par.load_state_dict({"down.weight": torch.eye(4)}, strict=False)
    assert torch.equal(par(torch.ones(2, 4)), torch.ones(2, 4))


class Bare(nn.Module):
    """A parameter that its constructor leaves without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def test_what_an_initialization_leaves_out_is_nan() -> None:
    with torch.device("meta"):
        model = Bare()
    par = autopar.parallelize(model, 1, (torch.ones(2, 4),))
    par.init_weights(lambda module: module.weight[0].zero_())
    assert par(torch.ones(2, 4)).isnan().sum() == 6


class Deep(nn.Module):
    """Modules that draw, in modules that draw for them, a tied weight, and one in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(16, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.again = nn.Sequential(self.mlp[0])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.ids.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.ids(ids))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.again(self.mlp(x)))


def scaled(module: nn.Module) -> None:
    """Reads what the constructors drew, of modules below and of tied weights too."""
    if isinstance(module, nn.Linear):
        module.weight.mul_(0.5)
    if isinstance(module, nn.MultiheadAttention):
        module.in_proj_weight[:8].normal_()
        module.out_proj.weight.add_(1)


def drawn_anew(module: nn.Module) -> None:
    """Writes over some, as most functions do."""
    if isinstance(module, nn.Embedding | nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
    if isinstance(module, nn.Embedding):
        module.weight[0].zero_()
    if isinstance(module, Deep):
        for name, parameter in module.named_parameters():
            if name.endswith("out_proj.weight"):
                nn.init.orthogonal_(parameter)


@pytest.mark.slow_cells("scaled")
@pytest.mark.parametrize("function", [scaled, drawn_anew])
def test_a_function_comes_after_the_constructors(function: Any) -> None:
    torch.manual_seed(6)
    single = Deep()
    with torch.no_grad():
        single.apply(function)
    draw = torch.rand(())
    ids = torch.arange(12).reshape(2, 6)
    with torch.device("meta"):
        model = Deep()
    par = autopar.parallelize(model, 1, (ids,))
    torch.manual_seed(6)
    par.init_weights(function)
    assert torch.rand(()) == draw
    state = par.state_dict()
    assert [n for n, x in single.state_dict().items() if not torch.equal(state[n], x)] == []


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    par = autopar.parallelize(nn.Linear(4, 4), 1, (torch.ones(2, 4),))
    with pytest.raises(InputError, match=r"has no weights: no model\.safetensors, no model"):
        par.load_weights(tmp_path)
