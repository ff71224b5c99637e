"""What test_compiled.py starts, as on_ranks.py says: scripts that know of no ranks but for
torch.compile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import autopar
import models
from autopar.runtime import dynamo_backend
from on_ranks import Facts, caught, everywhere, gathered, run_tasks

STEPS = 4


def planned() -> Callable[[], list[Any]]:
    """From now on, the plans that the backend makes."""
    plans: list[Any] = []
    own = dynamo_backend.plan_on_rank_0

    def keep(*arguments: Any) -> Any:
        plans.append(own(*arguments))
        return plans[-1]

    mock.patch.object(
        dynamo_backend, "plan_on_rank_0", keep
    ).start()  # for as long as the process runs
    return lambda: plans


def trained(model: nn.Module, call: Callable[..., Any], inputs: Any) -> list[float]:
    """The loss of every step of the same script, on one device and on all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = call(*inputs)
        loss = outputs[1] if isinstance(outputs, tuple) else outputs
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def against(single: nn.Module, inputs: Any, **how: Any) -> Facts:
    """Errors of losses, parameters and buffers after the steps; whether all ranks hold the same."""
    model = copy.deepcopy(single)
    wanted = trained(single, single, inputs)
    losses = trained(model, torch.compile(model, **how), inputs)
    state, expected = model.state_dict(), single.state_dict()
    whole = all(type(p) is nn.Parameter and p.shape == q.shape for p, q in pairs(model, single))
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
        "gradients": max(error(p.grad, q.grad) for p, q in pairs(model, single)),
        "buffers": max([error(state[n], expected[n]) for n, _ in single.named_buffers()] or [0.0]),
        "whole": whole,
        "equal": all(torch.equal(x, other) for x in state.values() for other in gathered(x)),
    }


def pairs(model: nn.Module, single: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(model.parameters(), single.parameters(), strict=True))


def error(actual: Any, expected: Any) -> float:
    """‖found - expected‖ / ‖expected‖; a key's bias has a gradient of rounding only."""
    return float((actual - expected).double().norm() / expected.double().norm().clamp(min=1e-6))


def by_name() -> Facts:
    read_plans = planned()
    facts = against(*models.gpt()[:2], backend="autopar")
    (plan,) = read_plans()
    facts["ranks"] = plan.mesh.size
    facts["stored"] = sorted({s.kind for x in plan.stored.values() for s in x.states})
    facts["returned"] = sorted({s.kind for x in plan.outputs.values() for s in x.states})
    facts["split"] = sorted({c for x in plan.choices.values() for c in x.splits})
    facts["names"] = [e.target for e in plan.context.program.signature.inputs]
    facts["subgraphs"] = [chain.name for chain in plan.context.source.chains]
    return facts


def small(dropout: float = 0.0) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return models.GptWithLogits(layers=1, dropout=dropout), models.gpt()[1]


def layouts() -> Facts:
    facts = {}
    for layout in ("ddp", "fsdp", "megatron"):
        facts[layout] = against(*small(), backend="autopar", options={"layout": layout})
        torch._dynamo.reset()
    return facts


class Broken(nn.Module):
    """Statistics of the batch, a graph break in the middle, a buffer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 16)
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)))
        torch._dynamo.graph_break()
        return F.cross_entropy(self.scale * self.down(y), target)


def pieces() -> Facts:
    read_plans = planned()
    torch.manual_seed(0)
    model, batch = Broken(), (torch.randn(8, 32), torch.randint(16, (8,)))
    facts = against(model, batch, backend=autopar.backend())
    facts["plans"] = len(read_plans())
    single, several = Broken(), (torch.randn(12, 32), torch.randint(16, (12,)))
    parallel = copy.deepcopy(single)
    call = torch.compile(parallel, backend=autopar.backend(layout="ddp"))
    losses = []
    for inputs in (batch, several, batch):  # other shapes are planned again
        losses.append(abs(float(call(*inputs)) / float(single(*inputs)) - 1))
    single.eval()
    parallel.eval()
    with torch.no_grad():
        losses.append(abs(float(call(*several)) / float(single(*several)) - 1))
    return {**facts, "others": max(losses)}


def dropped() -> Facts:
    """With dropout all ranks draw the same numbers, and others at every call."""
    model, args = small(dropout=0.3)
    call = torch.compile(model, backend=autopar.backend(layout="ddp"))
    losses = [call(*args)[1] for _ in range(3)]
    losses[-1].backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    seeded = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        seeded += [float(call(*args)[1].detach()) for _ in range(2)]
    return {
        "seeded": seeded,
        "losses": [float(loss.detach()) for loss in losses],
        "equal": all(torch.equal(x, other) for x in grads for other in gathered(x)),
    }


def differing() -> Facts:
    """What all ranks raise where they do not hold the same."""
    facts: Facts = {}
    rank = dist.get_rank()
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    for what in ("parameters", "inputs"):
        torch.manual_seed(rank if what == "parameters" else 0)
        call = torch.compile(Broken(), backend=autopar.backend())
        x = inputs[0] + (rank if what == "inputs" else 0)
        facts[what] = everywhere(caught(lambda call=call, x=x: call(x, inputs[1])))
    torch.manual_seed(0)
    call = torch.compile(Broken(), backend=autopar.backend(layout="nonesuch"))
    facts["layout"] = everywhere(caught(lambda: call(*inputs)))
    call = torch.compile(Broken(), backend=autopar.backend(4))
    facts["world"] = everywhere(caught(lambda: call(*inputs)))
    torch.manual_seed(0)
    call = torch.compile(Broken(), backend=autopar.backend(layout="ddp"))
    call(*inputs)
    ids = inputs[1].flip(0) if rank else inputs[1]
    facts["later"] = everywhere(caught(lambda: call(inputs[0], ids)))
    return facts


def inner() -> Facts:
    """A backend of one's own behind it is given the scheduled graphs."""
    graphs: list[str] = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    facts = against(*small(), backend=autopar.backend(layout="ddp", backend=keep))
    facts["waits"] = ["wait_tensor" in code for code in graphs]
    return facts


def full_step() -> Facts:
    """All of a training step compiled: forward, the call of backward(), the optimizer."""
    torch.manual_seed(0)
    model, args, _ = models.mlp()
    single, read_plans = copy.deepcopy(model), planned()

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = checkpointed(module, *args)
        loss.backward()
        optimizer.step()
        return loss.detach()

    both = [(m, torch.optim.AdamW(m.parameters(), lr=1e-3)) for m in (model, single)]
    call = torch.compile(step, backend="autopar")
    errors = [error(call(*both[0]), step(*both[1])) for _ in range(STEPS)]
    moved = max(error(p.detach(), q.detach()) for p, q in pairs(model, single))
    return {"loss": max(errors), "parameters": moved, "plans": len(read_plans())}


def checkpointed(module: Any, x: Tensor, target: Tensor) -> Tensor:
    """models.py's Mlp, its first layer made again in the backward."""
    up = checkpoint(lambda x: F.gelu(module.up(x)), x, use_reentrant=False)
    return F.mse_loss(module.down(up), target)


TASKS = {
    "by name": by_name,
    "layouts": layouts,
    "pieces": pieces,
    "dropped": dropped,
    "differing": differing,
    "inner": inner,
    "whole step": full_step,
}


if __name__ == "__main__":
    run_tasks(TASKS)
