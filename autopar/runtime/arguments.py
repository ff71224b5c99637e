"""Checks of the arguments of the public calls, before anything is done with them.

Example: `plan(..., optimizer=-3)` raises "plan: optimizer is -3: it is to be one of …". api.py
calls `check` (or `check_together`, on several ranks) with the arguments by name.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import named_backend
from autopar.cost.memory import STATES, Budget, limit_text, text_of
from autopar.errors import AutoparError, InputError, LayoutError, PlanError
from autopar.ir.plan import Plan
from autopar.passes import OPTIONS
from autopar.planner.named_layouts import NAMES
from autopar.planner.request import (
    Grid2D,
    Grid3D,
    Grid4D,
    Grid25D,
    GridContext,
    GridEP,
    GridHSDP,
    Stages,
)
from autopar.runtime.module import ParallelModule
from autopar.runtime.training.deferred import Deferred
from autopar.world import World, ranks

_GRIDS = (Grid2D, Grid3D, Grid4D, Grid25D, GridHSDP, GridEP, GridContext, Stages)
_LAYOUT_TEXT = f"a name ({', '.join(NAMES)}), a Grid…, or a dict from module pattern to these"
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def check(call: str, **arguments: Any) -> None:
    """Raise autopar's error for an argument of `call` that is not valid.

    >>> check("plan", optimizer=-3)
    Traceback (most recent call last):
    autopar.errors.PlanError: plan: optimizer is -3: ...
    """
    for name, value in arguments.items():
        fault = _CHECKS[name](value)
        if fault:
            error = _ERRORS.get(name, PlanError)
            raise error(f"{call}: {name.removesuffix('_or_plan')} is {_value_text(value)}: {fault}")


def check_together(call: str, **arguments: Any) -> None:
    """Check the arguments on every rank: where one rank refuses its own, all raise. Collective."""
    ranks.together("reading the arguments", lambda: check(call, **arguments))


def _value_text(value: Any) -> str:
    """Return the value itself where it is plain, else its type: models are pages long."""
    plain = value is None or isinstance(value, str | int | float | bytes | tuple | list | dict)
    if plain or isinstance(value, (type, *_GRIDS)):
        return repr(value)[:120].splitlines()[0]
    return f"of type {type(value).__module__}.{type(value).__qualname__}"


# -- one check an argument: it returns what is wrong, or "" ----------------------------------------
def _model(value: Any) -> str:
    if isinstance(value, ParallelModule | Deferred):
        module: Any = value.module if isinstance(value, Deferred) else value
        details = ""
        if module is not None:
            details = f", on mesh {str(module.plan.mesh) or 'of one rank'} as {module.plan.layout}"
        return (
            f"it is a parallel model already{details}: call it as it is, or give the original model"
        )
    if isinstance(value, type):
        return "it is a class: give an instance of it"
    if not isinstance(value, nn.Module):
        return "it is to be an nn.Module"
    inner = _WRAPPERS.get(type(value).__name__)
    if inner is not None:
        return f"it is wrapped for another way to run it: give the model inside, model.{inner}"
    distributed = next((n for n, p in value.named_parameters() if isinstance(p, DTensor)), None)
    if distributed is not None:
        return f"its parameter {distributed} is a DTensor: give the model before it is distributed"
    return ""


def _layout(value: Any) -> str:
    if isinstance(value, Plan):
        return "it is a plan: give it to apply(model, plan), or to verify"
    if isinstance(value, Mapping):
        wrong = next((k for k in value if not isinstance(k, str)), None)
        if wrong is not None:
            return f"its key {wrong!r} is no pattern of module paths, such as 'blocks.*.mlp'"
        inner = (f"of {k!r} {s}" for k, v in value.items() if (s := _single_layout(v)))
        return next(inner, "")
    return _single_layout(value)


def _single_layout(value: Any) -> str:
    if isinstance(value, type) and value in _GRIDS:
        return f"it is a class: give it sizes, such as {value.__name__}(2, 2)"
    if isinstance(value, _GRIDS):
        other = ("first", "panels", "sequence", "within", "attention", "schedule")
        numbers = {n: v for n, v in vars(value).items() if n not in other}
        numbers = {n: v for n, v in numbers.items() if (n, v) != ("count", "auto")}
        wrong = [n for n, v in numbers.items() if isinstance(v, bool) or not isinstance(v, int)]
        fault = f"its {wrong[0]} is no whole number of ranks" if wrong else ""
        if isinstance(value, Stages) and not fault:
            inner = _layout(value.within)
            return f"its within is no layout: {inner}" if inner else ""
        if isinstance(value, GridContext) and not fault:
            inner = _single_layout(value.within)
            return f"its within is no layout: {inner}" if inner else ""
        return fault
    return "" if isinstance(value, str) else f"it is to be {_LAYOUT_TEXT}"


def _optimizer(value: Any) -> str:
    choices = (
        f"one of {', '.join(STATES)}, or the bytes of state for every trained number, 0 or more"
    )
    if isinstance(value, str):
        matches = difflib.get_close_matches(value, STATES, 1)
        hint = f" (did you mean {matches[0]!r}?)" if matches else ""
        return "" if value in STATES else f"unknown optimizer {value!r}{hint}: it is {choices}"
    return "" if _is_number(value) and value >= 0 else f"it is to be {choices}"


def _memory(value: Any) -> str:
    if value == "auto" and isinstance(value, str):
        return ""
    if _is_number(value) and value > 0:
        return ""
    return "it is 'auto' or bytes on each device, above 0, such as 80 * 2**30"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _overlap(value: Any) -> str:
    if isinstance(value, bool):
        return ""
    names = f"True, False, or a tuple of {', '.join(OPTIONS)}"
    if isinstance(value, str) or not isinstance(value, Sequence):
        return f"it is to be {names}"
    wrong = [name for name in value if name not in OPTIONS]
    return f"overlap names {wrong[0]!r}; the passes are {', '.join(OPTIONS)}" if wrong else ""


def _backend(value: Any) -> str:
    if isinstance(value, str):
        named_backend(value)  # raises, with the names that there are
        return ""
    if value is None or callable(value):
        return ""
    return "it is to be None, the name of a torch.compile backend, or a callable"


def _plan(value: Any) -> str:
    if isinstance(value, Plan):
        return ""
    return "it is to be a Plan: what autopar.plan returns, or autopar.Plan.load reads from a file"


def _tolerance(value: Any) -> str:
    if _is_number(value) and value >= 0:
        return ""
    return "it is to be the largest relative error that is still equal, a number such as 1e-9"


def _yes_or_no(value: Any) -> str:
    return "" if isinstance(value, bool) else "it is to be True or False"


def _outputs(value: Any) -> str:
    return "" if value in ("replicated", "sharded") else "it is to be 'replicated' or 'sharded'"


def _microbatches(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return ""
    if value == "auto" and isinstance(value, str):
        return ""
    return "it is 'auto' or a whole number, 1 or more, that divides the rows of the batch"


def _progress(value: Any) -> str:
    return "" if value is None or callable(value) else "it is to be None or a function of a name"


def _layout_or_plan(value: Any) -> str:
    return "" if isinstance(value, Plan) else _layout(value)


_CHECKS: dict[str, Callable[[Any], str]] = {
    "model": _model,
    "layout": _layout,
    "optimizer": _optimizer,
    "memory": _memory,
    "overlap": _overlap,
    "backend": _backend,
    "plan": _plan,
    "tolerance": _tolerance,
    "smaller": _yes_or_no,
    "progress": _progress,
    "outputs": _outputs,
    "microbatches": _microbatches,
    "layout_or_plan": _layout_or_plan,
}
_ERRORS: dict[str, type[AutoparError]] = {
    "model": InputError,
    "layout": LayoutError,
    "layout_or_plan": LayoutError,
}


# -- arguments together ----------------------------------------------------------------------------
def check_room(model: nn.Module, world: World, budget: Budget | None) -> None:
    """Raise PlanError where parameters and optimizer states alone, sharded over all devices, take
    more than the limit: no layout stores less.
    """
    if budget is None or budget.memory_bytes is None:
        return
    optimizer = budget.optimizer
    total = 0.0
    for p in model.parameters():
        states = (
            STATES[optimizer] * p.element_size() if isinstance(optimizer, str) else float(optimizer)
        )
        total += p.numel() * (p.element_size() + states * p.requires_grad)
    if total / world.ranks > budget.memory_bytes:
        needed = math.ceil(total / budget.memory_bytes)
        limit = limit_text(budget.memory_bytes, world)
        raise PlanError(
            f"no plan fits {limit} on each of {world.ranks} devices: the "
            f"parameters and the optimizer's states alone are {text_of(total)}, at least "
            f"{text_of(total / world.ranks)} on each. Try at least {needed:,} devices, an "
            "optimizer with less state, or a smaller model"
        )


def warn_alone(world: Any) -> None:
    """Warn where no world is named and no process group is open, as the model then runs on one
    rank.
    """
    started = dist.is_available() and dist.is_initialized()
    if world is None and not started:
        warnings.warn(
            "there is no process group, so the model runs on one rank: start with torchrun "
            "--nproc-per-node N and call torch.distributed.init_process_group first (or say "
            "world=1)",
            stacklevel=3,
        )
