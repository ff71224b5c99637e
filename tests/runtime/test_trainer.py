"""transformers' Trainer trains a parallel model as it trains a plain one on one device with the
global batch: losses, norms, rates, evaluations, checkpoints; and `unshard` gives the model back.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import autopar
from launch import launched
from trainer_cases import ROWS, arguments, fresh, history, rows


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "accumulated"), [("fsdp", 2), ("megatron", 1)])
def test_its_loop_is_that_of_one_device(tmp_path: Path, layout: str, accumulated: int) -> None:
    plain = transformers.Trainer(
        model=fresh(), args=arguments(str(tmp_path / "plain"), ROWS, accumulated),
        train_dataset=rows(), eval_dataset=rows()[:11],
    )  # fmt: skip
    plain.train()
    facts = launched(tmp_path, 2, layout, str(accumulated), script="trainer_ranks.py", seconds=400)

    expected = [pytest.approx(line, rel=1e-4) for line in history(plain)]
    assert facts["history"] == expected
    assert facts["resumed"] == expected  # the lines before the checkpoint come out of it
    assert facts["predicted"] == [11, 8, 32]
    assert facts["parameters after resuming"] < 1e-5 and facts["saved"] == 0
    assert facts["on one rank"] == [["NoneType", 0], ["GPT2LMHeadModel", 1]]
    assert facts["unsharded"] == "GPT2LMHeadModel" and facts["plain"] == ["Parameter"]
    assert facts["tied"] and facts["generated"] == [2, 7]
    refusals = [
        facts[name] for name in ("under ddp", "not parallel", "other options", "no such rank")
    ]
    assert all(text.startswith("InputError: ") for text in refusals)
    assert "autopar.ParallelTrainer" in facts["under ddp"]
    assert "Trainer has a GPT2LMHeadModel, which is not parallel" in facts["not parallel"]
    assert "has no state_dict" in facts["other options"]
    assert "the ranks are 0 to 1" in facts["no such rank"]


def test_the_mixin_alone_says_what_to_write() -> None:
    with pytest.raises(autopar.InputError, match=r"class Trainer\(autopar.ParallelTrainer, trans"):
        autopar.ParallelTrainer(model=fresh())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.scale = nn.Linear(4, 4), nn.BatchNorm1d(4), 2.0

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        """Return the loss."""
        return (self.norm(self.layer(x)) * self.scale * gain).square().mean()


def test_unshard_gives_a_module_of_the_user_s_class() -> None:
    net, x = _Net(), torch.randn(6, 4)
    net.layer.bias.requires_grad_(False)
    par = autopar.parallelize(net, 1, (x,))
    par(x).backward()
    par.scale = 3.0
    model = par.eval().unshard()
    assert type(model) is _Net and not isinstance(model, autopar.ParallelModule)
    assert model.scale == 3.0 and not model.training and not model.layer.bias.requires_grad
    assert torch.equal(model.norm.running_mean, par.norm.running_mean)
    assert torch.equal(model(x), par(x))
    with torch.no_grad():
        model.layer.weight.zero_()
    assert par.layer.weight.abs().max() > 0  # they share nothing
    assert isinstance(par, autopar.ParallelModule) and type(par.layer) is nn.Linear


def test_a_parallel_module_has_the_signature_of_the_model() -> None:
    par = autopar.parallelize(_Net(), 1, (torch.randn(6, 4),))
    assert str(inspect.signature(par.forward)) == str(inspect.signature(_Net().forward))
    assert par.forward.__doc__ == "Return the loss."
