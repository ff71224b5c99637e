"""Layouts against one device: the loss and every gradient of a small GPT in float32."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.doctor.models import grid_4d, parallel, small
from autopar.doctor.result import Absent, Finding
from autopar.doctor.session import Session
from autopar.errors import LayoutError, PlanError
from autopar.planner.named_layouts import Grid, Grid25D

LIMIT = 1e-4  # of the loss, and of the norm of each gradient's difference
# A gradient that is smaller than this part of the largest is held against this part of it: the
# bias of keys has none but for rounding.
FLOOR = 1e-2


def layouts(ranks: int) -> dict[str, str | Grid]:
    """Five layouts for so many ranks, 2.5D besides where they are a square; one rank alone has
    nothing to lay out.

    >>> list(layouts(4)), list(layouts(8)), layouts(1)
    (['ddp', 'fsdp', 'megatron', 'megatron-sp', '4d', '2.5d'], ['ddp', ... '4d'], {'auto': 'auto'})
    """
    if ranks == 1:
        return {"auto": "auto"}
    found: dict[str, str | Grid] = {n: n for n in ("ddp", "fsdp", "megatron", "megatron-sp")}
    found["4d"] = grid_4d(ranks)
    side = math.isqrt(ranks)
    if side * side == ranks:
        found["2.5d"] = Grid25D(side)
    return found


def parity(session: Session, layout: str | Grid) -> Finding:
    """Enter: a layout. Leave: how far the loss and every gradient of two steps are from the same
    model in float64 on one device; a fault where one is further than LIMIT.
    """
    model, inputs = small(session)
    expected_loss, expected = _single(model, inputs, session)
    try:
        module = parallel(session, layout)
    except (LayoutError, PlanError) as error:
        raise Absent(f"{session.ranks} ranks cannot have it: {error}") from None
    for _ in range(2):  # the first derives the scheduled graphs
        module.zero_grad()
        loss = module(*inputs)
        loss.backward()
    found = {name: _whole(p.grad) for name, p in module.named_parameters()}
    errors = {"loss": abs(float(loss.detach().double()) / expected_loss - 1)}
    errors |= _errors(found, expected)
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else math.inf)
    fault = ""
    if not errors[worst] <= LIMIT:
        fault = f"{worst} is off by {errors[worst]:.1e} relative, the limit is {LIMIT:.0e}"
    mesh = str(module.plan.mesh) or "of one rank"
    figure = f"largest error {errors[worst]:.1e}, limit {LIMIT:.0e}; mesh {mesh}"
    facts = {
        "mesh": str(module.plan.mesh),
        "groups": list(module.plan.groups),
        "limit": LIMIT,
        "floor": FLOOR,
        "worst": worst,
        "errors": errors,
    }
    return Finding(figure, facts, fault)


def _single(model: Any, inputs: Any, session: Session) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of one device, in float64: its rounding is none of the ranks'."""
    single = copy.deepcopy(model).double().to(session.device)
    loss = single(*(x.to(session.device) for x in inputs))
    loss.backward()
    gradients = {name: p.grad.detach().cpu() for name, p in single.named_parameters()}
    return float(loss.detach()), gradients


def _whole(gradient: Any) -> Tensor:
    """A gradient put together from all ranks, in float64 on the CPU."""
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    found: Tensor = whole.detach().double().cpu()
    return found


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By parameter, the norm of the difference over that of the gradient, or over FLOOR of the
    largest gradient's.
    """
    largest = max(float(gradient.norm()) for gradient in expected.values())
    return {
        name: float((found[name] - gradient).norm()) / max(float(gradient.norm()), FLOOR * largest)
        for name, gradient in expected.items()
    }
