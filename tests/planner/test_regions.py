"""Regions: what only carries a layout is chosen together, and no region grows with the model."""

from __future__ import annotations

import pytest

import autopar
import models
from autopar.ir.mesh import Mesh
from autopar.passes.pass_manager import PassManager
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import Search
from autopar.planner.planner import analyse
from autopar.planner.tracing import trace_model


def most_options(layers: int) -> int:
    """Return the most options of a region of a T5 of so many layers."""
    model, _, inputs = models.t5(num_layers=layers)
    program = analyse(PassManager(), trace_model(model, inputs))
    search = Search(program, Mesh.parse("x4"), autopar.World.of(4), Constraint("auto")).enter()
    return max(len(region.options.items) for region in search.regions.all)


@pytest.mark.slow
def test_blocks_that_share_a_bias_do_not_multiply_their_options() -> None:
    """Every block of T5 masks the one bias of all."""
    assert most_options(2) == most_options(4)
