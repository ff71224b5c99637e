"""What tests of the whole pipeline share: plans drawn at random, and a model held against eager."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import autopar
from autopar import LayoutError
from autopar._compat import pytree
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.pass_manager import PassManager
from autopar.planner import confirm, exact_search, planner, solve, tracing
from autopar.planner.constraint import Constraint, strategies
from autopar.planner.exact_search import ReshardCosts
from autopar.planner.request import PlanRequest
from autopar.runtime.reference import to_float64
from autopar.runtime.verify import Check, compare
from autopar.world import World
from traced import run


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that is traced once and verified under many plans."""

    model: nn.Module
    inputs: Any
    program: Program
    single: Program

    def named(self, ranks: int, layout: str) -> Check:
        """Verified under a named layout; raises LayoutError where it does not fit."""
        world = World.of(ranks)
        chosen = planner.choose_plan(PassManager(), self.program, world, PlanRequest(layout))
        return self._compared(confirm.rewrite_for_ranks(PassManager(), chosen, world))

    def at_random(self, mesh: str, seed: int) -> Check:
        """Verified under a plan that draws one legal layout for every tensor and op."""
        world = World.of(Mesh.parse(mesh).size)
        plan = random_plan(self.program, mesh, world, seed)
        program = dataclasses.replace(self.program, plan=plan)
        return self._compared(confirm.rewrite_for_ranks(PassManager(), program, world))

    def _compared(self, several: Program) -> Check:
        return compare(
            several, self.single, pytree.tree_leaves(tracing.call_arguments(self.inputs)), 1e-9
        )


def subject(model: nn.Module, inputs: Any) -> Subject:
    program = planner.analyse(PassManager(), to_float64(tracing.trace_model(model, inputs)))
    world = World.of(1)
    single = confirm.rewrite_for_ranks(
        PassManager(), solve.search_meshes(program, world, PlanRequest("auto")), world
    )
    return Subject(model, inputs, program, single)


def named_or_refused(model_subject: Subject, ranks: int, layout: str) -> None:
    """Verified, or refused by an error that says which axis does not fit."""
    try:
        model_subject.named(ranks, layout)
    except LayoutError as error:
        said = str(error)
    else:
        return
    assert f"layout {layout!r} puts axis" in said and f"{ranks} ranks" in said


def random_plan(program: Program, mesh: str, world: World, seed: int) -> Any:
    """The search with the dice in the place of the minimum."""
    draw = np.random.default_rng(seed)

    def thrown(sizes: Any, *rest: Any, order: Any) -> tuple[float, list[int]]:
        return 0.0, [int(draw.integers(size)) for size in sizes]

    def free(
        _: Any, sources: Any, targets: Any, facts: Any
    ) -> Any:  # the dice do not look at costs
        return np.zeros((len(sources), len(targets)))

    def idle_too(*facts: Any) -> Any:  # axes may be idle at every node
        return strategies(*facts[:6], may_idle=True)

    with (
        mock.patch.object(exact_search, "minimise", thrown),
        mock.patch.object(ReshardCosts, "_between", free),
        mock.patch("autopar.planner.constraint.strategies", idle_too),
    ):
        return exact_search.search(program, Mesh.parse(mesh), world, Constraint("auto"))


def assert_equal_to_eager(subject: Subject) -> None:
    """The traced graph in float64 gives what the model gives: verify compares with the graph."""
    model = copy.deepcopy(subject.model).double()
    args, kwargs = pytree.tree_map(_double, tracing.call_arguments(subject.inputs))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wanted = model(*args, **kwargs)
        actual = run(subject.program, args, kwargs, tensors)
    finally:
        torch.set_default_dtype(default)
    torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


def _double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double()
    return value


def verified_plan(case: tuple[nn.Module, Any], ranks: int, layout: Any) -> autopar.Plan:
    """The plan of a model and its inputs, after `verify`."""
    model, inputs = case
    plan = autopar.plan(model, ranks, inputs, layout=layout, smaller=False)
    autopar.verify(model, None, inputs, layout=plan)
    return plan
