"""What test_training.py starts, as on_ranks.py says: trains on real gloo ranks and compares with
one device.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import autopar
import models
from autopar.ir.layout import Layout
from autopar.planner.request import Grid2D, Grid4D, Grid25D, GridContext, Layouts
from autopar.runtime import backends
from on_ranks import Facts, caught, everywhere, run_tasks
from one_device import (
    called,
    compared,
    error,
    joined,
    trained,
)

ON_TWO: dict[str, tuple[Layouts, ...]] = {"gpt": ("fsdp",), "llama": ("auto", "fsdp")}
LAYOUTS = ("auto", "ddp", "fsdp", "megatron")
ON_FOUR = ("4d", "2.5d", "cp")  # these need several axes, or split a sequence
ON_EIGHT: tuple[Layouts, ...] = (
    Grid4D(2, 2, 2, 1),
    Grid25D(2, 2),
    Grid2D(4, 2),
    Grid2D(2, 4),
    "megatron-sp",
)
CONTEXTS: dict[str, Layouts] = {
    "strided": "cp",
    "contiguous": GridContext(2, "megatron", "contiguous"),
    "sharded": GridContext(2),
    "heads": GridContext(2, attention="heads"),
    "contiguous alone": GridContext(4, attention="contiguous"),
    "x of 4d": GridContext(2, Grid4D(x=2)),
}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- tasks -----------------------------------------------------------------------------------------
def parity(name: str) -> Facts:
    """Each layout against one device."""
    model, inputs = models.example(name)
    single = trained(copy.deepcopy(model), inputs, lambda _, t: t.clone())
    before = {n: p.detach().clone() for n, p in model.state_dict().items()}
    several = dist.get_world_size() == 4 and name == "gpt"
    layouts = ON_TWO[name] if dist.get_world_size() == 2 else LAYOUTS + (ON_FOUR if several else ())
    facts: Facts = {layout: one_layout(model, inputs, layout, single) for layout in layouts}
    facts["model untouched"] = all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    return facts


def grids() -> Facts:
    """Layouts of several axes against one device, on eight ranks; one layer is enough."""
    _, inputs = models.example("gpt")
    model = models.GptWithLogits(layers=1)
    single = trained(copy.deepcopy(model), inputs, lambda _, t: t.clone())
    return {str(layout): one_layout(model, inputs, layout, single) for layout in ON_EIGHT}


def context(name: str, layout: Layouts) -> Facts:
    """A sequence split over the ranks against one device."""
    model, inputs = models.example(name)
    single = trained(copy.deepcopy(model), inputs, lambda _, t: t.clone())
    return one_layout(model, inputs, layout, single)


def one_layout(model: nn.Module, inputs: Any, layout: Layouts, single: tuple[Any, ...]) -> Facts:
    par = autopar.parallelize(model, None, inputs, layout=layout, outputs="sharded")
    whole_logits = joined(called(par, inputs)[1].detach(), output_layout(par, single[1]))
    own = par.shard(*inputs) if isinstance(inputs, tuple) else par.shard(**inputs)[1]
    own_loss = float(called(par, own)[0])
    full = called(par, inputs)[1].full_tensor()
    stored = {n: type(p.data).__name__ for n, p in par.named_parameters()}
    names = [list(par.state_dict()), list(model.state_dict())]
    actual = trained(par, inputs, lambda n, t: joined(t, par.layout(n)))
    return {
        "mesh": str(par.plan.mesh),
        **compared(single, actual),
        "losses agree": len(set(everywhere(float(actual[0])))) == 1,
        "own part's loss": abs(own_loss - float(single[0])) / float(single[0]),
        "logits": error(whole_logits, single[1]),
        "full logits": error(full, single[1]),
        "names": names,
        "stored as": sorted(set(stored.values())),
        "own shapes": all(
            p.to_local().shape == par.layout(n).local_shape for n, p in par.named_parameters()
        ),
        "graphs agree": len(set(everywhere(sha(par.graph.code + str(par.graph.graph))))) == 1,
        "plans agree": len(set(everywhere(sha(json.dumps(par.plan.to_json()))))) == 1,
    }


def output_layout(par: Any, whole: Tensor) -> Layout:
    """Of the one output with the shape of this one."""
    layouts = par.plan.outputs.values()
    (layout,) = (layout for layout in layouts if layout.shape == tuple(whole.shape))
    return layout


def compiled(name: str, backend: str) -> Facts:
    """The same through torch.compile, for one layout of each kind."""
    model, inputs = models.example(name)
    single = trained(copy.deepcopy(model), inputs, lambda _, t: t.clone())
    facts: Facts = {}
    for layout in ("fsdp", "megatron"):
        par = autopar.parallelize(model, None, inputs, layout=layout, backend=backend)
        actual = trained(par, inputs, lambda n, t, par=par: joined(t, par.layout(n)))
        facts[layout] = compared(single, actual)
    return facts


def deferred() -> Facts:
    """No inputs given: planned at the first call."""
    model, inputs = models.example("gpt")
    par = autopar.parallelize(model)
    early = caught(lambda: list(par.parameters()))
    loss = called(par, inputs)[0]
    loss.backward()
    return {
        "early": early,
        "loss": abs(float(loss) / float(called(model, inputs)[0]) - 1),
        "gradients": all(p.grad is not None for p in par.parameters()),
        "count": [len(list(par.parameters())), len(list(model.parameters()))],
    }


def from_file() -> Facts:
    """A plan that one process saved, read and applied by all ranks."""
    model, inputs = models.example("llama")
    expected = float(called(model, inputs)[0])
    path = Path(sys.argv[1]).with_suffix(".plan.json")
    if dist.get_rank() == 0:
        autopar.plan(model, dist.get_world_size(), inputs, layout="megatron").save(path)
    dist.barrier()
    plan = autopar.Plan.load(path)
    loss = called(autopar.apply(model, plan, inputs), inputs)[0]
    other, other_inputs = models.example("gpt")
    return {
        "loss": abs(float(loss) / expected - 1),
        "without inputs": caught(lambda: autopar.apply(model, plan)),
        "another model": caught(lambda: autopar.apply(other, plan, other_inputs)),
    }


def dropout() -> Facts:
    """Losses in train mode by layout: the same masks, other ones at each call."""
    model, inputs = models.example("gpt", dropout=0.2)
    facts: Facts = {}
    for layout in LAYOUTS:
        torch.manual_seed(5)
        par = autopar.parallelize(model, None, inputs, layout=layout)
        facts[layout] = [float(called(par, inputs)[0]) for _ in range(2)]
        facts[f"{layout} agrees"] = len(set(everywhere(facts[layout][0]))) == 1
    return facts


def failing() -> Facts:
    """What every rank raises, after how many seconds, where rank 1 alone is wrong or all are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, inputs = models.example("gpt")
    odd = {"layers": 3} if rank == 1 else {}
    other = models.GptWithLogits(**odd)

    class Broken(models.GptWithLogits):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            raise ArithmeticError("rank 1 cannot")

    broken = Broken() if rank == 1 else models.GptWithLogits()
    longer = (inputs[0].repeat(2, 1), inputs[1].repeat(2, 1)) if rank == 1 else inputs
    plan = autopar.plan(model, size, inputs, layout="ddp")
    late = copy.deepcopy(model)
    if rank == 1:
        late.position = nn.Embedding(7, models.HIDDEN)
    wrong_plan = autopar.plan(model, size, inputs, layout="fsdp" if rank == 1 else "ddp")
    attempts: dict[str, Callable[[], Any]] = {
        "another model": lambda: autopar.parallelize(other, None, inputs),
        "a broken forward": lambda: autopar.parallelize(broken, None, inputs),
        "other inputs": lambda: autopar.parallelize(model, None, longer),
        "a resized parameter": lambda: autopar.apply(late, plan),
        "another plan": lambda: autopar.apply(model, wrong_plan),
        "broken on all": lambda: autopar.parallelize(Broken(), None, inputs),
        "an unknown layout": lambda: autopar.parallelize(model, None, inputs, layout="zero"),
        "a larger world": lambda: autopar.parallelize(model, 2 * size, inputs),
        "a larger plan": lambda: autopar.apply(model, autopar.plan(model, 2 * size, inputs)),
    }
    facts: Facts = {}
    for what, attempt in attempts.items():
        started = time.perf_counter()
        seen = caught(attempt)
        facts[what] = {"seen": everywhere(seen), "seconds": time.perf_counter() - started}
    loss = called(autopar.parallelize(model, None, inputs), inputs)[0]
    facts["afterwards"] = abs(float(loss) / float(called(model, inputs)[0]) - 1)
    return facts


def scheduled() -> Facts:
    """Scheduled and not, from the same plan: to the bit? And ranks whose orders differ."""
    _, inputs = models.example("gpt")
    model = models.GptWithLogits(layers=1)
    facts: Facts = {}
    for layout in ("fsdp", "4d"):
        plan = autopar.plan(model, autopar.World.of(None), inputs, layout=layout)
        results = []
        for overlap in (False, ("schedule",), True):
            par = autopar.apply(model, plan, overlap=overlap)
            loss = called(par, inputs)[0]
            loss.backward()
            grads = [p.grad.to_local() for p in par.parameters() if p.grad is not None]
            results.append([loss.detach(), *grads])
        pairs = list(zip(*results[:2], strict=True))
        joined = zip(*results[1:], strict=True)
        with torch.no_grad():
            unrecorded = called(par, inputs)[0]
        facts[layout] = {
            "equal": len(pairs) > 1 and all(torch.equal(value, other) for value, other in pairs),
            "joined": max(float((x - y).abs().max() / y.abs().max()) for x, y in joined),
            "without gradients": torch.equal(unrecorded, results[0][0]),
        }
    if dist.get_rank() == 1:  # as a world that was measured on each rank by itself would
        backends.collectives_in_order = lambda graph: ["another"]
    facts["orders differ"] = everywhere(
        caught(lambda: called(autopar.apply(model, plan, overlap=True), inputs)[0].backward())
    )
    return facts


def regathered(backend: str | None) -> Facts:
    """Weights gathered again in the backward: errors against one device."""
    model, inputs = models.example("gpt")
    single = trained(copy.deepcopy(model), inputs, lambda _, t: t.clone())
    how: Any = {"layout": "fsdp", "backend": backend, "recompute": "gathers"}
    par = autopar.parallelize(model, None, inputs, **how)
    actual = trained(par, inputs, lambda n, t: joined(t, par.layout(n)))
    return {**compared(single, actual), "regather": par.plan.regather}


def gathers_of_graphs() -> Facts:
    """All-gathers in the forward and backward graphs that AOTAutograd derives, kept and not."""
    model, inputs = models.example("gpt")
    facts: Facts = {}
    for recompute in ("none", "gathers"):
        counts: list[int] = []

        def count(module: Any, _: Any, counts: list[int] = counts) -> Any:
            counts.append(sum("all_gather_into" in str(n.target) for n in module.graph.nodes))
            return make_boxed_func(module.forward)

        how: Any = {"backend": aot_autograd(fw_compiler=count), "recompute": recompute}
        how["overlap"] = False  # the backend derives them itself
        par = autopar.parallelize(model, None, inputs, layout="fsdp", **how)
        called(par, inputs)[0].backward()
        planned = [c.backward for c in par.plan.collectives if c.kind == "all_gather"]
        facts[recompute] = {"graphs": counts, "planned": [planned.count(False), sum(planned)]}
    return facts


TASKS: dict[str, Callable[[], Facts]] = {
    "regathered": lambda: regathered(None),
    "regathered by aot_eager": lambda: regathered("aot_eager"),
    "regathered by inductor": lambda: regathered("inductor"),
    "gathers of graphs": gathers_of_graphs,
    "gpt": lambda: parity("gpt"),
    "llama": lambda: parity("llama"),
    "grids": grids,
    **{
        f"{name} {how}": partial(context, name, layout)
        for name in ("llama", "bert", "gpt2", "gemma3", "t5")
        for how, layout in CONTEXTS.items()
    },
    "aot_eager": lambda: compiled("gpt", "aot_eager"),
    "inductor": lambda: compiled("gpt", "inductor"),
    "deferred": deferred,
    "from_file": from_file,
    "dropout": dropout,
    "failing": failing,
    "scheduled": scheduled,
}


if __name__ == "__main__":
    run_tasks(TASKS)
