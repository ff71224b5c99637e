"""What test_alike.py starts, as on_ranks.py says: ranks that hold, ask for or are given something
else than the others.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import WorldError
from autopar.ops import process_groups
from autopar.ops.rules import user_rules
from autopar.runtime import agreement
from autopar.runtime.training import inputs_watch
from on_ranks import Facts, caught, everywhere, gathered, run_tasks

WIDTH = 12


class Net(nn.Module):
    """Two linears, with a buffer that takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x + self.shift))) ** 2).mean()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def rows(seed: int = 5, count: int = 12) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def warned(work: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        result = work()
    return result, [str(w.message) for w in recorded if "sync_parameters" in str(w.message)]


# -- parameters ------------------------------------------------------------------------------------
def seeds() -> Facts:
    """Another seed on every rank: afterwards all train rank 0's model."""
    facts: Facts = {}
    expected = net()(rows()).detach()
    for layout in ("ddp", "fsdp", "megatron"):
        model = net(dist.get_rank())
        par, said = warned(lambda m=model, k=layout: autopar.parallelize(m, None, (rows(),), k))
        parts = {n: p.full_tensor() for n, p in par.named_parameters()}
        of_rank_0 = all(torch.equal(parts[n], p) for n, p in net().named_parameters())
        buffer = torch.equal(par.get_buffer("shift"), net().get_buffer("shift"))
        loss = par(rows())
        facts[layout] = {
            "right": everywhere(of_rank_0 and buffer),
            "loss": everywhere(abs(float(loss.detach() / expected) - 1)),
            "said": everywhere(said),
        }
    _, again = warned(lambda: autopar.parallelize(net(), None, (rows(),), "ddp"))
    facts["said of equal ones"] = everywhere(again)
    return facts


def unsynchronised() -> Facts:
    """sync_parameters=False: refused on every rank, models as they were, and the next one works."""
    model = net()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.down.weight[3, 2] += 1e-6  # the last bit but some
    before = {n: t.clone() for n, t in model.state_dict().items()}

    def strict(model: nn.Module) -> Any:
        return autopar.parallelize(model, None, (rows(),), "fsdp", sync_parameters=False)

    seen = caught(lambda: strict(model))
    untouched = all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    return {
        "seen": everywhere(seen),
        "untouched": everywhere(untouched),
        "afterwards": everywhere(float(strict(net())(rows()).detach())),
    }


def kinds() -> Facts:
    """Tensors of all kinds, in buckets of a few bytes and in one."""
    facts: Facts = {}
    for bucket in (1, 40, 1 << 20):
        agreement.BUCKET = bucket
        torch.manual_seed(dist.get_rank())
        tensors = {
            "matrix": torch.randn(5, 7),
            "strided": torch.randn(6, 5).t()[1:, ::2],
            "half": torch.randn(3).bfloat16(),
            "flags": torch.rand(9) < 0.5,
            "scalar": torch.tensor(dist.get_rank()),
            "doubles": torch.randn(4, dtype=torch.float64, requires_grad=True),
            "complex": torch.randn(3, dtype=torch.complex64),
            "equal": torch.ones(3),
            "empty": torch.empty(0),
            "meta": torch.empty(3, device="meta"),
        }
        _, said = warned(lambda arguments=tensors: agreement.require_same_tensors(arguments, True))
        real = {n: t.detach() for n, t in tensors.items() if n != "meta"}
        facts[str(bucket)] = {
            "alike": all(
                all(torch.equal(part, parts[0]) for part in parts)
                for parts in (gathered(t.contiguous()) for t in real.values())
            ),
            "scalar": everywhere(int(tensors["scalar"])),
            "said": said,
        }
    return facts


# -- what is asked for -----------------------------------------------------------------------------
def requests() -> Facts:
    """What all ranks raise where rank 1 alone asks for something else, and what they must not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    odd: dict[str, Any] = {
        "layout": "fsdp",
        "memory": 1e9,
        "optimizer": "sgd",
        "recompute": "full",
        "overlap": False,
        "reduce_dtype": torch.float32,
        "backend": "aot_eager",
        "sync_parameters": False,
        "world": autopar.World.preset("dgx-h100", ranks=2 * size),
        "inputs": (rows(count=24),),
    }
    usual = {"world": None, "inputs": (rows(),), "layout": "ddp"}
    facts: Facts = {}
    for name, value in odd.items():
        options = {**usual, name: value} if rank == 1 else usual
        facts[name] = everywhere(
            caught(lambda arguments=options: autopar.parallelize(net(), **arguments))
        )
    plan = autopar.plan(net(), size, (rows(),), layout="ddp")
    other = {"overlap": False} if rank == 1 else {}
    facts["overlap of apply"] = everywhere(caught(lambda: autopar.apply(net(), plan, **other)))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setitem(user_rules._OWN, "an op", "an op as 'm -> m'")
        call = caught(lambda: autopar.parallelize(net(), **usual))
        facts["rules of your own"] = everywhere(call)
    alike = {**usual, "world": (None, size, autopar.World.detect())[rank % 3]}
    loss = autopar.parallelize(net(), **alike)(rows())
    facts["alike"] = everywhere(float(loss.detach()))
    return facts


# -- inputs ----------------------------------------------------------------------------------------
def inputs() -> Facts:
    """Other batches per rank: at once, later, as parts; and what one rank alone refuses."""
    rank, facts = dist.get_rank(), {}
    for layout in ("ddp", "fsdp", "megatron"):
        par = autopar.parallelize(net(), None, (rows(),), layout)
        facts[f"sampled {layout}"] = everywhere(caught(lambda p=par: p(rows(rank))))
    par = autopar.parallelize(net(), None, (rows(),), "ddp")
    parts = [par.shard(rows(seed=7 * rank + n)) for n in range(4)]  # as a loader of its own reads
    facts["parts"] = everywhere(caught(lambda: [par(part) for part in parts]))

    inputs_watch.FIRST = 1
    par = autopar.parallelize(net(), None, (rows(),), "ddp")
    seen, call = "", 0
    while not seen and call < 3000:
        call += 1
        seen = caught(lambda n=call: par(rows(rank if n == 2 and rank < 2 else 5)))
    facts["once"] = everywhere([seen, call])

    inputs_watch.FIRST = 3
    par = autopar.parallelize(net(), None, (rows(),), "ddp")
    seen = caught(lambda: par(rows(count=24 if rank == 1 else 12)))
    facts["refused"] = everywhere(seen)
    facts["after that"] = everywhere(float(par(rows()).detach()))
    return facts


# -- one attempt after another ---------------------------------------------------------------------
def again() -> Facts:
    """After an attempt that failed in the middle of connecting, on all ranks or on one alone, and
    for another type of devices, the next one works, and so does what was made before.
    """
    first = autopar.parallelize(net(), None, (rows(),), "fsdp")
    facts: Facts = {"meta": everywhere(caught(lambda: _on_meta("megatron")))}
    registered = process_groups._compat.register_process_group

    def broken(name: str, group: Any) -> None:
        registered(name, group)
        raise WorldError("a network that fails")

    for what, who in (("on all", (0, 1, 2)), ("on one", (1,))):
        process_groups._compat.register_process_group = (
            broken if dist.get_rank() in who else registered
        )
        layout = autopar.Grid2D(3, 1) if what == "on all" else autopar.Grid2D(1, 3)
        facts[what] = everywhere(caught(lambda k=layout: _first_loss(k)))
        process_groups._compat.register_process_group = registered
        facts[f"after {what}"] = everywhere(float(_first_loss(layout).detach()))
    facts["after meta"] = everywhere(float(_first_loss("megatron").detach()))
    facts["first"] = everywhere(float(first(rows()).detach()))
    return facts


def _first_loss(layout: Any) -> Tensor:
    return autopar.parallelize(net(), None, (rows(),), layout)(rows())


def _on_meta(layout: Any) -> Any:
    with torch.device("meta"):
        model = Net()
    return autopar.parallelize(model, None, (rows().to("meta"),), layout)


TASKS = {task.__name__: task for task in (seeds, unsynchronised, kinds, requests, inputs, again)}

if __name__ == "__main__":
    run_tasks(TASKS)
