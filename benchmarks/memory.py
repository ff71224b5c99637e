"""The modelled peak of memory of a training step against the measured one.

    python -m benchmarks.memory [--json memory.json]

Every case plans a model, runs the emitted graph of every rank in lockstep on the CPU, and follows
rank 0: each memory that an op makes is counted from when it is made until it dies, through a
forward, a backward and a step of AdamW whose states are there already. That is how
`autopar.cost.peak` counts, but there no numbers are computed: one rank's graph is run on tensors
without storage, its collectives are shapes. What both leave out is what a kernel allocates for
itself alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import autopar
from autopar import lockstep, wire
from autopar._compat import pytree, without_modes
from autopar.cost.peak import Lives, highest
from autopar.program import Input, Program
from tests import models


@dataclass(frozen=True)
class Case:
    """A model of tests/models.py under a layout; its batch is four times that of the tests."""

    model: str
    ranks: int
    layout: str
    recompute: str = "none"
    dropout: float = 0.0


CASES = (
    Case("gpt", 1, "auto"),
    Case("gpt", 2, "ddp"),
    Case("gpt", 4, "megatron-sp", "full"),
    Case("gpt", 8, "4d", dropout=0.1),
    Case("gpt2", 2, "fsdp"),
    Case("gpt2", 2, "fsdp", "full"),
    Case("gpt2", 2, "fsdp", "gathers"),
    Case("gpt2", 4, "megatron"),
    Case("llama", 4, "auto"),
    Case("llama", 4, "2.5d"),
    Case("llama", 8, "4d", "full"),
    Case("llama", 4, "fsdp", "gathers"),
    Case("bert", 2, "megatron", "full"),
    Case("bert", 4, "fsdp"),
    Case("t5", 2, "ddp"),
    Case("t5", 2, "megatron-sp"),
)


@dataclass(frozen=True)
class Row:
    """Bytes on rank 0: modelled and measured at the peak."""

    case: Case
    modelled: float
    measured: float
    memory: autopar.figures.Memory

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1


def row(case: Case) -> Row:
    changes = {"dropout": case.dropout} if case.dropout else {}
    model, args, kwargs = getattr(models, case.model)(**changes)
    inputs = pytree.tree_map(_four_times, kwargs or args)
    recompute: Any = case.recompute
    plan = autopar.plan(model, case.ranks, inputs, case.layout, recompute=recompute)
    assert plan.memory is not None
    measured = measure(plan, pytree.tree_leaves(inputs))
    return Row(case, plan.memory.peak, measured, plan.memory)


def _four_times(x: Tensor) -> Tensor:
    return x.repeat(4, *[1] * (x.dim() - 1))


# -- measuring -------------------------------------------------------------------------------------
def measure(plan: autopar.Plan, leaves: list[Tensor]) -> float:
    """Bytes that rank 0 holds at the peak of a step of a plan that was made in this process."""
    program = plan.ready.program
    return lockstep.run(
        plan.mesh, lambda rank: _step(program, plan.mesh.coordinate(rank), leaves, rank == 0)
    )[0]


def _step(
    program: Program, coordinate: dict[str, int], leaves: list[Tensor], followed: bool
) -> float:
    held = [_held(program, entry, coordinate, leaves) for entry in program.signature.inputs]
    trained = [t for t in held if t.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    if not followed:
        _run(program, held, optimizer)
        return 0.0
    lives = Lives()
    states = [x for state in optimizer.state.values() for x in state.values()]
    for tensor in (*held, *states):
        lives.note(tensor)
    wire.simulator = _Followed(wire.simulator, lives)
    with lives:
        _run(program, held, optimizer)
    return float(highest(lives.lives)[1])


def _held(
    program: Program, entry: Input, coordinate: dict[str, int], leaves: list[Tensor]
) -> Tensor:
    if entry.kind == "coordinate":
        return torch.tensor([coordinate[entry.target]])
    if entry.kind == "seed":
        return torch.tensor(1)
    given = leaves[entry.position or 0] if entry.kind == "user" else program.tensors[entry.target]
    own = program.layouts[entry.node].cut(given.detach(), coordinate).clone()
    return own.requires_grad_(entry.trainable)


def _run(program: Program, held: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    outputs = program.module(*held)
    loss = next(o for o in outputs if o.requires_grad and o.dim() == 0)
    loss.backward()
    optimizer.step()


class _Followed:
    """The simulated wire, where what it makes for other ranks in rank 0's turn is not counted."""

    def __init__(self, inner: Any, lives: Lives) -> None:
        self._inner, self._lives = inner, lives

    def exchange(self, kind: str, x: Tensor, group: str) -> Tensor:
        if self._inner._own.rank != 0:
            return self._inner.exchange(kind, x, group)
        sent = x.detach().contiguous()
        with without_modes():
            arrived = self._inner.exchange(kind, sent, group)
        self._lives.note(arrived)
        return arrived


# -- printing --------------------------------------------------------------------------------------
def table(rows: list[Row]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, title="MiB on rank 0 at the peak", title_justify="left")
    for name in ("model", "ranks", "layout", "recomputed"):
        made.add_column(name)
    for name in ("modelled", "measured", "error", "parameters", "optimizer", "activations"):
        made.add_column(name, justify="right")
    for found in rows:
        case, memory = found.case, found.memory
        name = case.model + (f", dropout {case.dropout:g}" if case.dropout else "")
        sizes = (found.modelled, found.measured)
        parts = (memory.parameters, memory.optimizer, memory.activations)
        made.add_row(
            *(name, str(case.ranks), case.layout, case.recompute),
            *(f"{size / 2**20:.2f}" for size in sizes),
            f"{found.error:+.1%}",
            *(f"{size / 2**20:.2f}" for size in parts),
        )
    return made


def main() -> int:
    """1 where a modelled peak is more than a tenth off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    rows = [row(case) for case in CASES]
    Console(width=118).print(table(rows))
    worst = max(rows, key=lambda r: abs(r.error))
    print(f"worst error {worst.error:+.1%} of {len(rows)} (model, layout) pairs")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1), encoding="utf-8")
    return int(abs(worst.error) > 0.1)


if __name__ == "__main__":
    sys.exit(main())
