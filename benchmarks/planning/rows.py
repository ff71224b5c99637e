"""What planning a call with other rows takes, beside the first plan: a last or a validation batch.

    python -m benchmarks.planning.rows                      # gpt2, and eight blocks of llama3-8b
    python -m benchmarks.planning.rows --model gpt2 --ranks 8
    python -m benchmarks.planning.rows --search             # other choices are searched for each

A row is a call: the first one is traced and searched, the others come on its mesh and stored
layouts, as `par(batch)` plans them, with the graph of the first one at their own size and, where
these are legal, its choices. Models are on the meta device; no ranks run.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import autopar
from autopar import World
from autopar.cost.memory import Budget
from autopar.ir.plan import Plan
from autopar.planner.plan_context import PlanContext
from autopar.planner.request import PlanRequest
from autopar.runtime.apply import plan_on_rank_0
from autopar.tools.targets import Batch, Target, resolve

ROWS = (8, 24, 5, 40)  # after 16
BLOCKS = 8  # of llama3-8b


class Row(NamedTuple):
    """The CPU seconds that planning a call of so many rows takes, and those of its modelled step,
    with every collective waited for.
    """

    rows: int
    seconds: float
    step: float


def rows(name: str, ranks: int, blocks: int | None = None, search: bool = False) -> Iterator[Row]:
    """Plan a model at 16 rows, then at others; with `search` each of them is searched."""
    target, world = _target(name, ranks, 16), World.preset("dgx-h100", ranks)
    if blocks is not None:
        target.model.blocks = target.model.blocks[:blocks]  # type: ignore[index]
    first, seconds = _timed(lambda: autopar.plan(target.model, world, target.inputs, smaller=False))
    yield Row(16, seconds, first.seconds)
    stored = _with_stored_layouts(first)
    stored = dataclasses.replace(stored, context=None) if search else stored
    for count in ROWS:
        inputs = _target(name, ranks, count).inputs
        request = PlanRequest.like(
            first, "auto", Budget(first.device_limit, first.optimizer, "auto")
        )
        plan, seconds = _timed(
            lambda inputs=inputs, request=request: plan_on_rank_0(  # type: ignore[misc]
                target.model, first.world, inputs, request, stored
            )
        )
        yield Row(count, seconds, plan.seconds)


def _target(name: str, ranks: int, count: int) -> Target:
    return resolve(name, Batch.parse(f"{count}x1024"), ranks, False)


def _with_stored_layouts(plan: Plan) -> Plan:
    """Return the plan with its stored layouts by the names of parameters."""
    context = plan.context
    assert isinstance(context, PlanContext)
    layouts = context.program.layouts
    entries = (e for e in context.program.signature.inputs if e.kind == "parameter")
    return dataclasses.replace(plan, stored={e.target: layouts[e.node] for e in entries})


def _timed(plan: Callable[[], Plan]) -> tuple[Plan, float]:
    """Return what a call makes, and the CPU seconds that it took."""
    start = time.process_time()
    planned = plan()
    return planned, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--search", action="store_true", help="search for other choices")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models = [("gpt2", None), ("llama3-8b", BLOCKS)]
    for name, blocks in [(options.model, None)] if options.model else models:
        print(f"{name}{f' of {blocks} blocks' if blocks else ''} on {options.ranks} ranks")
        for row in rows(name, options.ranks, blocks, options.search):
            step = f"a step of {row.step * 1e3:.3f} ms"
            print(f"  {row.rows:3} rows: {row.seconds:5.2f} CPU s, {step}")


if __name__ == "__main__":
    main()
