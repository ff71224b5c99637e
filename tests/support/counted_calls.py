"""Counts the collectives of a plan's step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import autopar
from autopar._compat import pytree
from autopar.ops import comm
from autopar.runtime import lockstep
from autopar.runtime.verify import _Rank


def calls(plan: autopar.Plan, inputs: Any) -> int:
    """The collectives that rank 0 takes part in, in a forward and a backward."""
    program, count = plan.context.program, 0
    tensors = {name: tensor.detach() for name, tensor in program.tensors.items()}
    program = dataclasses.replace(program, tensors=tensors)
    leaves = pytree.tree_leaves(inputs)

    def step(rank: int) -> None:
        nonlocal count
        inner = comm.simulator
        if rank == 0:
            comm.simulator = Counting()
        assert inner is not None
        _Rank(program, plan.mesh.coordinate(rank), leaves)._step()

    class Counting:
        def exchange(self, kind: str, x: torch.Tensor, group: str) -> torch.Tensor:
            nonlocal count
            count += run._own.rank == 0
            return run.exchange(kind, x, group)

    original = lockstep._Run.execute
    run: Any = None

    def execute(self: Any, rank_fn: Any) -> Any:
        nonlocal run
        run = self
        return original(self, rank_fn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep._Run, "execute", execute)
        lockstep.run(plan.mesh, step)
    return count
