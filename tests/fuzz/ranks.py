"""A case on real gloo ranks: every rank is in this process's place, four of them at once."""

from __future__ import annotations

import copy
import datetime
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar

from .case import Case
from .reference import (
    MOMENTUM,
    RATE,
    STEPS,
    Trained,
    agrees,
    cotangents,
    differences,
    gradients,
)
from .simulated import LOOSE, TOLERANCE, Result, described, read_layout, refused
from .source import Built, Unfit, build, run_text

_TIMEOUT_S = 60


def join(rank: int, ranks: int, store: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S),
    )


def run(case: Case, seed: int = 0) -> Result:
    """One case, on this rank of all."""
    try:
        built = build(case, seed)
    except Unfit as unfit:
        return Result("unfit", str(unfit))
    return run_built(built, case.layout, case.ranks)


def run_built(built: Built, layout: str, ranks: int) -> Result:
    torch.set_default_dtype(torch.float64)  # of this process, which does nothing else
    assert ranks == dist.get_world_size(), f"{ranks} ranks asked for, {dist.get_world_size()} run"
    try:
        differs = _compared(built, layout, ranks)
        kind, said = ("wrong", f"on gloo, {differs}") if differs else ("ok", "")
    except Exception as error:
        kind, said = "error", described(error)
        if refused(error):
            kind, said = "refused", f"{type(error).__name__}: {error}"
    return Result(kind, said, built.used)


def _compared(built: Built, layout: str, ranks: int) -> str:
    given, world = read_layout(layout, built, ranks)
    inputs = copy.deepcopy(built.inputs)
    if world is None:
        par = autopar.apply(built.model, given, inputs)
    else:
        par = autopar.parallelize(built.model, world, inputs, layout=given)
    found, masks = _trained(par, inputs)
    tolerance = LOOSE if built.loose else TOLERANCE

    def differ(expected: Trained) -> str:
        return differences(found, expected, tolerance, lambda name, whole: whole)

    return agrees(differ, lambda: run_text(built.text, built.used), masks)


def _trained(par: nn.Module, inputs: tuple[Any, ...]) -> tuple[Trained, list[list[int]]]:
    """As `reference.trained`, with DTensors."""
    found, masks = Trained(), []
    parameters = [p for p in par.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, RATE, MOMENTUM) if parameters else None
    for step in range(STEPS):
        leaves = [_whole(x) for x in pytree.tree_leaves(par(*inputs))]
        masks.append(_seeds(par))
        found.outputs += [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        pairs = [(x, g) for x, g in zip(leaves, cotangents(leaves)) if g is not None]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        if step == 0:
            named = gradients(par.named_parameters(), inputs)
            found.gradients = {n: _whole(g) for n, g in named.items()}
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    found.parameters = {n: _whole(p.detach()) for n, p in par.named_parameters()}
    found.buffers = {
        n: _whole(b) for n, b in par.named_buffers() if not n.startswith("coordinate_")
    }
    own = {n for n, _ in found.buffers.items() if n in _constants(par)}
    found.buffers = {n: b for n, b in found.buffers.items() if n not in own}
    return found, masks


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _constants(par: Any) -> set[str]:
    return {e.node for e in par._autopar.first.program.signature.inputs if e.kind == "constant"}


def _seeds(par: Any) -> list[int]:
    """The seeds of the step that was run, in the order of the graph."""
    graph = getattr(par, "graph", None)
    placeholders = graph.graph.find_nodes(op="placeholder", target="seed") if graph else []
    if not placeholders:
        return []
    added = [n.args[1] for n in placeholders[0].users if len(n.args) > 1]
    return [operator.add(par._autopar.seed.value, number) for number in dict.fromkeys(added)]
