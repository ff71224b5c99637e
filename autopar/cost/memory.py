"""Memory: what a rank stores of parameters, and what is held at the peak of a step, in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.errors import PlanError
from autopar.ir.layout import Layout
from autopar.ir.plan_table import STATES, Memory
from autopar.world import World

# Copies of a parameter that a step makes for a moment: one after the other, and all at once.
_STEP_COPIES = {"adamw": 2, "adam": 2, "rmsprop": 1, "adagrad": 1}
_STEP_COPIES_AT_ONCE = {"adamw": 1, "adam": 1, "rmsprop": 1, "adagrad": 2}

Optimizer = str | float  # one of STATES, or bytes of state for every trained number


IN_FLIGHT = 0.05  # of what a step holds, besides, for communication under computation
RESERVE = 0.08  # of a GPU's memory: the driver's context, transports, what lies between blocks
_RESERVE_OF_CPU = 0.02, 2**20  # part and bytes, the less of both: transports, what kernels hold

Recompute = Literal["auto", "none", "gathers", "full"]
Limit = Literal["auto"] | float  # bytes on each device


@dataclass(frozen=True)
class Budget:
    """What a plan must fit: bytes on each device (None: no limit), the optimizer whose states are
    among them, and whether blocks may ("auto"), must ("full") or must not ("none") be recomputed;
    "gathers": only the weights that they gather are dropped and gathered again.
    """

    memory_bytes: float | None = None
    optimizer: Optimizer = "adamw"
    recompute: Recompute = "auto"

    @staticmethod
    def of(world: World, memory: Limit, optimizer: Optimizer, recompute: Recompute) -> Budget:
        """From what a user gives, less a reserve. `memory` "auto" is all that a GPU has; that of a
        CPU, which the system shares out and extends on disk, has no limit then. Raises PlanError.
        """
        if recompute not in ("auto", "none", "gathers", "full"):
            raise PlanError(
                f"recompute is {recompute!r}: it is 'auto', 'none', 'gathers' or 'full'"
            )
        _known(optimizer)
        if memory != "auto" and not (isinstance(memory, int | float) and memory > 0):
            raise PlanError(f"memory is {memory!r}: it is 'auto' or bytes on each device, above 0")
        limit: float | None = float(memory) if memory != "auto" else None
        if limit is None and world.device.name != "cpu":
            limit = world.device.memory_bytes
        if limit is not None:
            part, most = _reserve(world)
            limit = max((1 - part) * limit, limit - most)
        return Budget(limit, optimizer, recompute)

    def fits(self, memory: Memory) -> bool:
        return self.memory_bytes is None or memory.peak <= self.memory_bytes


def with_flight(memory: Memory, limit: float | None) -> Memory:
    """With what is held besides where communication runs under computation, as far as the limit of
    bytes leaves room for it.
    """
    room = math.inf if limit is None else max(0.0, limit - memory.waiting)
    more = min(IN_FLIGHT * memory.waiting, room)
    return replace(memory, peak=memory.waiting + more, in_flight=more)


def no_room(above: float) -> str:
    """What to say where communication under computation needs so many bytes above the limit."""
    return (
        f"autopar: communication under computation would hold {text_of(above)} more than memory= "
        "allows on each device, so every collective is waited for at once: slower, and within the "
        'limit. A higher memory= or recompute="full" leaves room for it'
    )


def with_reserve(limit: float, world: World) -> float:
    """What `memory=` must be for a plan of so many bytes to fit."""
    part, most = _reserve(world)
    return min(limit / (1 - part), limit + most)


def limit_text(limit: float, world: World) -> str:
    """A limit as people read it, with what it is of and what is kept back."""
    whole = with_reserve(limit, world)
    kept = "kernels" if world.device.name == "cpu" else "the driver and the allocator's gaps"
    return f"{text_of(limit)} ({text_of(whole)} less {text_of(whole - limit)} for {kept})"


def _reserve(world: World) -> tuple[float, float]:
    return _RESERVE_OF_CPU if world.device.name == "cpu" else (RESERVE, math.inf)


def text_of(size: float) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale / 8:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.3g} bytes"


def refusal(
    memory: Memory, limit: float, world: World, layout: str, recomputed: bool, larger: str = ""
) -> PlanError:
    """What to tell a user whose model does not fit. `recomputed`: with all blocks recomputed
    already. `larger`: the smallest world that it would fit, in words, such as "16 devices".
    """
    every = ", every block recomputed," if recomputed else ""
    tries = [larger or "more devices", "" if recomputed else 'recompute="auto"', "a smaller batch"]
    tries += ["another layout"] if layout != "auto" else []
    *first, last = [part for part in tries if part]
    advice = f"{', '.join(first)} or {last}"
    return PlanError(
        f"no plan fits {limit_text(limit, world)} on each of {world.ranks} devices: "
        f"layout {layout!r}{every} needs {memory}. Try {advice}"
    )


def _known(optimizer: Optimizer) -> None:
    if isinstance(optimizer, str) and optimizer not in STATES:
        raise PlanError(
            f"unknown optimizer {optimizer!r}: it is one of {', '.join(STATES)}, or a number, "
            "the bytes of state for every trained number"
        )


def optimizer_bytes(layout: Layout, element_bytes: int, optimizer: Optimizer) -> float:
    """The optimizer's states of one trained parameter on one rank. Raises PlanError for an
    optimizer of another name than those in STATES.

    A bfloat16 parameter with a float32 copy of itself and two float32 moments is `optimizer=12`.
    """
    _known(optimizer)
    if isinstance(optimizer, str):
        return float(STATES[optimizer] * element_bytes * layout.local_size)
    return float(optimizer * layout.local_size)


def step_bytes(sizes: Sequence[float], optimizer: Optimizer, at_once: bool = False) -> float:
    """What an optimizer's step makes for a moment, for parameters of so many bytes in its order.

    On a CPU torch's optimizers take one parameter at a time; the last thing made for one lives
    until the next one's replaces it. On GPUs they take all of them `at_once` (foreach).
    """
    _known(optimizer)
    known = _STEP_COPIES_AT_ONCE if at_once else _STEP_COPIES
    made = known.get(optimizer, 0) if isinstance(optimizer, str) else max(known.values())
    if at_once:
        return made * sum(sizes)
    before = (0.0, *sizes)
    return max((made * own + bool(made) * last for own, last in zip(sizes, before)), default=0.0)
