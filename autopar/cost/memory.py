"""Memory budgets and the optimizer's memory, in bytes.

A `Budget` says what a plan must fit on each device; `refusal` is the error for a model that does
not fit; `optimizer_bytes` and `step_bytes` are the optimizer's states and what its step allocates
for a moment. The planner, the runtime and the command line read this file, as do cost/peak.py and
cost/activations.py, which count the rest of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from autopar.errors import PlanError
from autopar.ir.layout import Layout
from autopar.ir.plan_table import STATES, Memory
from autopar.world import World

# Temporary copies of a parameter that an optimizer's step makes: one parameter after the other, and
# all of them at once (foreach).
_STEP_COPIES = {"adamw": 2, "adam": 2, "rmsprop": 1, "adagrad": 1}
_STEP_COPIES_AT_ONCE = {"adamw": 1, "adam": 1, "rmsprop": 1, "adagrad": 2}

Optimizer = str | float  # one of STATES, or bytes of state for every trained number


_LARGE = 0.25  # of a peak: outputs that hold more are named where a model does not fit
IN_FLIGHT = 0.05  # share of a step's peak that overlapped communication holds in addition
RESERVE = 0.08  # share of a GPU's memory: the driver's context, NCCL, gaps of the allocator
_RESERVE_OF_CPU = 0.02, 2**20  # share and bytes, the less of both: gloo, scratch of kernels

Recompute = Literal["auto", "none", "gathers", "selective", "full"]
Limit = Literal["auto"] | float  # bytes on each device


@dataclass(frozen=True)
class Budget:
    """What a plan must fit: bytes on each device (None: no limit), the optimizer whose states are
    among them, and whether blocks may ("auto"), must ("full") or must not ("none") be recomputed.
    With "gathers" only the weights that blocks gather are dropped and gathered again, with
    "selective" only what norms, activations and other cheap ops make is dropped and made again.
    """

    memory_bytes: float | None = None
    optimizer: Optimizer = "adamw"
    recompute: Recompute = "auto"

    @staticmethod
    def of(world: World, memory: Limit, optimizer: Optimizer, recompute: Recompute) -> Budget:
        """Return the budget for what a user gives, less a reserve. `memory` "auto" is all that a
        GPU has; on a CPU, whose memory the system shares out and extends on disk, it is no limit.
        Raises PlanError for an unknown `recompute` or optimizer and for a `memory` that is not
        above 0.
        """
        if recompute not in get_args(Recompute):
            modes = ", ".join(map(repr, get_args(Recompute)))
            raise PlanError(f"recompute is {recompute!r}: it is one of {modes}")
        _check_optimizer(optimizer)
        if memory != "auto" and not (isinstance(memory, int | float) and memory > 0):
            raise PlanError(f"memory is {memory!r}: it is 'auto' or bytes on each device, above 0")
        limit: float | None = float(memory) if memory != "auto" else None
        if limit is None and world.device.name != "cpu":
            limit = world.device.memory_bytes
        if limit is not None:
            reserve_share, reserve_cap = _reserve(world)
            limit = max((1 - reserve_share) * limit, limit - reserve_cap)
        return Budget(limit, optimizer, recompute)

    def fits(self, memory: Memory) -> bool:
        return self.memory_bytes is None or memory.peak <= self.memory_bytes


def with_flight(memory: Memory, limit: float | None) -> Memory:
    """Return the memory with what overlapped communication holds in addition, as far as the limit
    of bytes leaves room for it.
    """
    room = math.inf if limit is None else max(0.0, limit - memory.waiting)
    in_flight_bytes = min(IN_FLIGHT * memory.waiting, room)
    return replace(memory, peak=memory.waiting + in_flight_bytes, in_flight=in_flight_bytes)


def no_room(above: float) -> str:
    """Return the warning for overlapped communication that would need so many bytes above the
    limit.
    """
    return (
        f"autopar: communication under computation would hold {text_of(above)} more than memory= "
        "allows on each device, so every collective is waited for at once: slower, and within the "
        'limit. A higher memory= or recompute="full" leaves room for it'
    )


def with_reserve(limit: float, world: World) -> float:
    """Return what `memory=` must be for a plan of so many bytes to fit."""
    reserve_share, reserve_cap = _reserve(world)
    return min(limit / (1 - reserve_share), limit + reserve_cap)


def limit_text(limit: float, world: World) -> str:
    """Return a limit as people read it: `memory=`, and the reserve that was taken off it."""
    memory = with_reserve(limit, world)
    reserved_for = (
        "kernels" if world.device.name == "cpu" else "the driver and the allocator's gaps"
    )
    return f"{text_of(limit)} ({text_of(memory)} less {text_of(memory - limit)} for {reserved_for})"


def _reserve(world: World) -> tuple[float, float]:
    return _RESERVE_OF_CPU if world.device.name == "cpu" else (RESERVE, math.inf)


def text_of(size: float) -> str:
    """Return a number of bytes as people read it."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale / 8:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.3g} bytes"


def refusal(
    memory: Memory,
    limit: float,
    world: World,
    layout: str,
    again: str,
    auto: bool,
    larger: str,
    outputs: Mapping[str, float],
    divided: float = math.inf,
) -> PlanError:
    """Return the error for a user whose model does not fit. `again`: what runs again already, such
    as "every block recomputed". `auto`: the search chose that. `larger`: the smallest world in
    which it would fit, in words, such as "16 devices"; "" if unknown. `outputs`: the bytes of those
    that every rank receives, by path. `divided`: the bytes that a step of the smallest
    micro-batches needs.
    """
    note = f", {again}," if again else ""
    large = {path: size for path, size in outputs.items() if size > _LARGE * memory.peak}
    received = ", ".join(f"{path} of {text_of(size)}" for path, size in large.items())
    remedies = [
        f"outputs='sharded' (every rank receives all of {received})" if large else "",
        larger or ("" if large else "more devices"),
        "" if auto else 'recompute="auto"',
        'microbatches="auto"' if divided <= limit else "",
        "a smaller batch",
    ]
    remedies += ["another layout"] if layout != "auto" else []
    *first, last = [remedy for remedy in remedies if remedy]
    advice = f"{', '.join(first)} or {last}"
    return PlanError(
        f"no plan fits {limit_text(limit, world)} on each of {world.ranks} devices: "
        f"layout {layout!r}{note} needs {memory}. Try {advice}"
    )


def _check_optimizer(optimizer: Optimizer) -> None:
    if isinstance(optimizer, str) and optimizer not in STATES:
        raise PlanError(
            f"unknown optimizer {optimizer!r}: it is one of {', '.join(STATES)}, or a number, "
            "the bytes of state for every trained number"
        )


def optimizer_bytes(layout: Layout, element_bytes: int, optimizer: Optimizer) -> float:
    """Return the bytes of the optimizer's states of one trained parameter on one rank. Raises
    PlanError for an optimizer of another name than those in STATES.

    A bfloat16 parameter with a float32 copy of itself and two float32 moments is `optimizer=12`.
    """
    _check_optimizer(optimizer)
    if isinstance(optimizer, str):
        return float(STATES[optimizer] * element_bytes * layout.local_size)
    return float(optimizer * layout.local_size)


def step_bytes(sizes: Sequence[float], optimizer: Optimizer, at_once: bool) -> float:
    """Return what an optimizer's step allocates for a moment, for parameters of so many bytes in
    its order.

    On a CPU torch's optimizers take one parameter at a time; the last temporary of one lives until
    that of the next replaces it. On GPUs they take all of them `at_once` (foreach).
    """
    _check_optimizer(optimizer)
    copies = _STEP_COPIES_AT_ONCE if at_once else _STEP_COPIES
    count = copies.get(optimizer, 0) if isinstance(optimizer, str) else max(copies.values())
    if at_once:
        return count * sum(sizes)
    previous_sizes = (0.0, *sizes)
    return max(
        (count * size + bool(count) * previous for size, previous in zip(sizes, previous_sizes)),
        default=0.0,
    )
