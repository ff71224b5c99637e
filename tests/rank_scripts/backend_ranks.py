"""What test_backends.py starts, as on_ranks.py says: backends on gloo ranks against one device."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import autopar
import models
from autopar import passes
from autopar.passes.overlap import DerivedGraph, chunk
from on_ranks import Facts, caught, everywhere, run_tasks
from one_device import called, joined, worst

LAYOUTS = ("ddp", "fsdp", "megatron", "4d", "auto")


def step(module: nn.Module, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients) of the second of two equal steps: nothing of the first may be left."""
    for _ in range(2):
        module.zero_grad()
        loss = called(module, inputs)[0]
        loss.backward()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def against(single: tuple[Tensor, dict[str, Tensor]], par: Any, inputs: Any, run: Any) -> Facts:
    """Errors of the loss and of the worst gradient. The key's bias has none but rounding."""
    loss, grads = step(run, inputs)
    own = {n: p.grad for n, p in par.named_parameters() if p.grad is not None}
    assert grads.keys() and own.keys() == single[1].keys()
    whole = {n: joined(g, par.layout(n)) for n, g in own.items()}
    return {
        "loss": abs(float(loss - single[0]) / float(single[0])),
        "gradients": worst(whole, single[1]),
        "runs": type(par._autopar.first.run).__name__,
        "again": [bool(names) for names in (par.plan.rerun, par.plan.regather)],
    }


def small() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return models.GptWithLogits(layers=1), models.example("gpt")[1]


def trained_case(name: str, layout: Any, backend: Any, overlap: bool, **more: Any) -> Facts:
    model, inputs = small() if name == "small" else models.example(name)
    single = step(copy.deepcopy(model), inputs)
    how: Any = {"layout": layout, "backend": backend, "overlap": overlap, **more}
    par = autopar.parallelize(model, None, inputs, **how)
    return against(single, par, inputs, par)


def callable_backend() -> Facts:
    """A callable is given the scheduled forward and backward."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, example_inputs: Any) -> Any:
        assert len(example_inputs) == len(graph.graph.find_nodes(op="placeholder"))
        graphs.append(graph)
        return graph.forward

    facts = trained_case("small", "fsdp", keep, True)
    names = [{str(n.target) for n in graph.graph.nodes} for graph in graphs]
    facts["waits"] = [any("wait_tensor" in name for name in group) for group in names]
    return facts


def compiled_from_outside() -> Facts:
    """torch.compile(par), scheduled or not."""
    model, inputs = small()
    single = step(copy.deepcopy(model), inputs)
    facts: Facts = {}
    for overlap in (False, True):
        par = autopar.parallelize(model, None, inputs, layout="fsdp", overlap=overlap)
        compiled = torch.compile(par, backend="aot_eager")
        facts[f"overlap {overlap}"] = against(single, par, inputs, compiled)
        with torch.no_grad():
            loss = called(par, inputs)[0]
        facts[f"overlap {overlap}"]["no_grad"] = abs(float(loss - single[0]) / float(single[0]))
    return facts


def failing() -> Facts:
    """A compiler that fails on rank 1, in the forward or in the backward: what all ranks raise."""
    model, inputs = small()
    facts: Facts = {}
    for which in (0, 1):
        count = iter(range(2))

        def broken(graph: Any, _: Any, which: int = which, count: Any = count) -> Any:
            if next(count) == which and dist.get_rank() == 1:
                raise ArithmeticError("cannot compile this")
            return graph.forward

        how: Any = {"layout": "ddp", "backend": broken, "overlap": True}
        par = autopar.parallelize(model, None, inputs, **how)
        facts[str(which)] = everywhere(caught(lambda par=par: called(par, inputs)[0].backward()))
    facts["unknown"] = caught(lambda: autopar.parallelize(model, None, inputs, backend="nonesuch"))
    return facts


def quick() -> Facts:
    cells = [
        ("small", "4d", "aot_eager"),
        ("llama", "auto", "eager"),
    ]
    return {" ".join(cell): trained_case(*cell, True) for cell in cells}


def again(backend: str | None) -> Facts:
    """Plans that gather weights again, or recompute blocks, scheduled; and those that do as little
    as fits a limit, as they stand, too.
    """
    cells = itertools.product(("fsdp", "4d"), ("gathers", "selective", "full"))
    cases = {
        f"{layout} {how}": trained_case("gpt", layout, backend, True, recompute=how)
        for layout, how in cells
    }
    model, inputs = models.example("gpt")
    plan = autopar.plan(model, None, inputs, "fsdp", recompute="none", smaller=False)
    for overlap in (True, False):
        limit = 0.8 * plan.peak_bytes
        cases[f"limit {overlap}"] = trained_case("gpt", "fsdp", backend, overlap, memory=limit)
    return cases


def matrix(backend: str | None) -> Facts:
    cells = itertools.product(("gpt", "llama"), LAYOUTS, (False, True))
    cases = {}
    for name, layout, overlap in cells:
        cases[f"{name} {layout} {overlap}"] = trained_case(name, layout, backend, overlap)
        torch._dynamo.reset()
    return cases


def in_pieces(backend: str | None) -> Facts:
    """Every product that can be is cut in two, whatever that costs."""
    own, cut = passes.OVERLAP, []

    def forced(derived: DerivedGraph, world: autopar.World) -> DerivedGraph:
        rewritten = chunk.chunk(derived, world, pieces=2)
        cut.append(rewritten.graph is not derived.graph)
        return rewritten

    passes.OVERLAP = tuple(p._replace(run=forced) if p.name == "chunk" else p for p in own)
    facts = {}
    try:
        for layout in PIECES:
            facts[str(layout)] = {**trained_case("small", layout, backend, True), "cut": cut.copy()}
            cut.clear()
            torch._dynamo.reset()
    finally:
        passes.OVERLAP = own
    return facts


def in_levels() -> Facts:
    """Buckets of sums in two levels, on links so unequal that these pay: of what the backward has
    how many.
    """
    slow = autopar.Level(2, 5e7, 2e-3)
    world = autopar.World((autopar.Level(2, 5e9, 1e-5), slow), autopar.World.of(4).device)
    model, inputs = small()
    single = step(copy.deepcopy(model), inputs)
    par = autopar.parallelize(model, world, inputs, layout="ddp")
    facts = against(single, par, inputs, par)
    run: Any = par._autopar.first.run
    names = [str(node.target) for node in run.backward.graph.nodes]
    wanted = ("all_to_all_single", "all_reduce_", "all_gather_into_tensor", "clone")
    return {
        **facts,
        **{name: sum(name in name_in_graph for name_in_graph in names) for name in wanted},
    }


PIECES: tuple[Any, ...] = (
    *("megatron", "megatron-sp"),
    *(autopar.Grid2D(2, 2), autopar.Grid4D(x=2, z=2)),
)
TASKS = {
    "pieces": lambda: in_pieces(None),
    "pieces by aot_eager": lambda: in_pieces("aot_eager"),
    "pieces by inductor": lambda: in_pieces("inductor"),
    "levels": in_levels,
    "quick": quick,
    "callable": callable_backend,
    "outside": compiled_from_outside,
    "failing": failing,
    "again": lambda: again(None),
    "again by inductor": lambda: again("inductor"),
    "None": lambda: matrix(None),
    "aot_eager": lambda: matrix("aot_eager"),
    "inductor": lambda: matrix("inductor"),
    "inductor once": lambda: {"gpt megatron": trained_case("small", "megatron", "inductor", True)},
}


if __name__ == "__main__":
    run_tasks(TASKS)
