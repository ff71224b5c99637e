"""Compares a step on the stages of a pipeline with the same step on one device, in float64.

All ranks of all stages run in lockstep, as they run on real ones: the schedule, the sends, the sums
over stages. `verify` compares the layout within a stage node by node, and micro-batches with the
whole batch; here the micro-batches on stages are held against the same ones on one device: the
loss, every gradient on every rank that holds a part of it, and the parameters after three steps of
AdamW. api.py calls `compare_stages`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar._compat import pytree
from autopar.errors import VerificationError
from autopar.ir.padding import cut_unpadded, filled_up, join_unpadded
from autopar.ir.pipeline_schedule import Action, actions, runs_in_halves
from autopar.ir.program import Input, Program
from autopar.ops.collectives import groups_of
from autopar.ops.links import Links
from autopar.passes.microbatches import Microbatches, without_microbatches
from autopar.passes.stages import Stage, cut
from autopar.runtime import lockstep
from autopar.runtime.derived_in_lockstep import DerivedInLockstep
from autopar.runtime.microbatches_check import leaves_of_microbatches
from autopar.runtime.reference import double_by_default, tensor_to_float64, to_float64
from autopar.runtime.training.microbatches_run import batch_program
from autopar.runtime.training.stages_run import StagesRun, own_program

_STEPS, _RATE, _SEED = 3, 1e-3, 1234


class StageErrors(NamedTuple):
    """The largest relative errors of the loss, of gradients, and of parameters after AdamW."""

    loss: float
    gradient: float
    step: float


class _Trained(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]  # of the first step, by placeholder
    parameters: dict[str, Tensor]  # after the last
    backwards: Counter[Action]  # how often each one ran, whole or in two halves


def compare_stages(
    program: Program,
    reference: Program,
    microbatches: Microbatches | None,
    inputs: Any,
    tolerance: float,
) -> StageErrors:
    """Return the errors of a program in stages. `program`: the emitted one of a micro-batch, with a
    plan; `reference`: the same micro-batch on one device. Raises VerificationError past
    `tolerance`, naming the parameter and the rank.
    """
    plan = program.plan
    assert plan is not None and plan.stage_starts
    microbatches = microbatches or without_microbatches(program)
    pipeline = plan.pipeline
    schedule = actions(plan.schedule, pipeline, microbatches.count)
    stages = cut(program, plan.stage_starts)
    with double_by_default():
        totals = None
        if microbatches.totals is not None:
            totals = to_float64(Program(microbatches.totals, program.signature)).module
        batch = [
            tensor_to_float64(x) if isinstance(x, Tensor) else x for x in pytree.tree_leaves(inputs)
        ]
        calls = leaves_of_microbatches(
            _in_order_of_microbatches(batch, program, microbatches), microbatches, totals
        )
        expected = _train(
            lambda own: _loss_on_a_device(reference, calls, own), _own_parameters(reference)
        )
        runs = [_run_of(stage, runs_in_halves(schedule)) for stage in stages]
        ranks = lockstep.run(
            plan.mesh,
            lambda rank: _on_rank(rank, program, microbatches, stages, runs, schedule, batch),
            groups_of(program.module),
            pipeline.ranks,
        )
    _require_each_backward_once(ranks, schedule, plan.mesh.size)
    losses = [_error(rank.loss, expected.loss, 0.0) for rank in ranks]
    largest = max(float(x.abs().max()) for x in expected.gradients.values())
    gradients = _errors(program, ranks, "gradients", expected.gradients, 1e-6 * largest)
    steps = _errors(program, ranks, "parameters", expected.parameters, _STEPS * _RATE)
    errors = {f"the loss on rank {rank}": error for rank, error in enumerate(losses)}
    errors |= {f"the gradient of {name}": error for name, error in gradients.items()}
    errors |= {f"{name} after {_STEPS} steps": error for name, error in steps.items()}
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= tolerance:
        raise VerificationError(
            f"a step in {len(stages)} stages ({plan.schedule}) is not the step of one device: "
            f"{worst} is off by {errors[worst]:.1e}, past {tolerance:.0e}"
        )
    return StageErrors(max(losses), max(gradients.values()), max(steps.values()))


def _in_order_of_microbatches(
    batch: Sequence[Any], program: Program, microbatches: Microbatches
) -> list[Any]:
    """Return the leaves with their rows in the order of the micro-batches that ranks run: each has
    as many rows of every rank. So the same rows draw the same random numbers.
    """
    entries = [e for e in program.signature.inputs if e.position in microbatches.split]
    blocks = max(
        (math.prod(d.size for d in program.layouts[e.node].digits(0)) for e in entries), default=1
    )
    return [
        leaf.unflatten(0, (blocks, microbatches.count, -1)).transpose(0, 1).flatten(0, 2)
        if place in microbatches.split
        else leaf
        for place, leaf in enumerate(batch)
    ]


# -- one device ------------------------------------------------------------------------------------
def _own_parameters(reference: Program) -> dict[str, Tensor]:
    return {
        e.node: reference.tensors[e.target].detach().clone().requires_grad_(e.trainable)
        for e in reference.signature.inputs
        if e.kind == "parameter"
    }


def _loss_on_a_device(
    reference: Program, calls: Sequence[Sequence[Any]], own: dict[str, Tensor]
) -> Tensor:
    """Return the loss of a step: the sum over its micro-batches."""
    losses = []
    for number, leaves in enumerate(calls):
        values = [_value(e, reference, leaves, own, number) for e in reference.signature.inputs]
        results = reference.module(*values)
        losses.append(next(x for x in results if not x.dim() and x.requires_grad))
    return torch.stack(losses).sum()


def _value(
    entry: Input, program: Program, leaves: Sequence[Any], own: dict[str, Tensor], microbatch: int
) -> Any:
    if entry.kind == "parameter":
        return own[entry.node]
    if entry.kind == "user":
        assert entry.position is not None
        return leaves[entry.position]
    if entry.kind == "seed":
        return torch.tensor(_SEED + microbatch)
    return program.tensors[entry.target].detach()


def _train(loss_of: Callable[[dict[str, Tensor]], Tensor], own: dict[str, Tensor]) -> _Trained:
    """Return what three steps of AdamW give."""
    trained = {name: x for name, x in own.items() if x.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=_RATE, eps=1e-5)
    first: Tensor | None = None
    gradients: dict[str, Tensor] = {}
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = loss_of(own)
        loss.backward()
        if first is None:
            first = loss.detach()
            gradients = {
                n: torch.zeros_like(x) if x.grad is None else x.grad.clone()
                for n, x in trained.items()
            }
        optimizer.step()
    assert first is not None
    return _Trained(first, gradients, {n: x.detach() for n, x in trained.items()}, Counter())


def _run_of(stage: Stage, splits: bool) -> Callable[..., Any]:
    """Return what runs a stage in lockstep: its graph, or what is derived of it where a backward
    runs in two halves.
    """
    plan = stage.program.plan
    assert plan is not None
    if not splits:
        return stage.program.module
    free = dataclasses.replace(plan, memory=None, device_limit=None)  # float64 needs more
    return DerivedInLockstep(dataclasses.replace(stage.program, plan=free), plan.world)


# -- all ranks -------------------------------------------------------------------------------------
class _LockstepRun(StagesRun):
    """A StagesRun whose totals are those of the whole inputs, which every rank has here."""

    leaves: Sequence[Any] = ()

    def _gather(self, entry: Input, own: Tensor) -> Tensor:
        assert entry.position is not None
        leaf: Tensor = self.leaves[entry.position]
        return leaf


def _on_rank(
    rank: int,
    program: Program,
    microbatches: Microbatches,
    stages: Sequence[Stage],
    runs: Sequence[Callable[..., Any]],
    schedule: Sequence[Sequence[Action]],
    leaves: list[Any],
) -> _Trained:
    plan = program.plan
    assert plan is not None
    mesh, pipeline = plan.mesh, plan.pipeline
    links = Links(mesh, pipeline.ranks, rank)
    coordinate = mesh.coordinate(rank % max(1, mesh.size))
    own_stages = [stages[number] for number in pipeline.stages_of(links.copy)]
    own_runs = {stage.number: runs[stage.number] for stage in own_stages}
    rank_program = own_program(program, own_stages)
    run = _LockstepRun(
        rank_program,
        microbatches,
        None,
        stages,
        own_runs,
        schedule,
        pipeline,
        links,
        torch.device("cpu"),
    )
    batch = batch_program(rank_program, microbatches)
    run.leaves = leaves
    own: dict[str, Tensor] = {}
    for entry in batch.signature.inputs:
        if entry.kind == "parameter":
            whole, pads = program.tensors[entry.target].detach(), program.pads(entry.node)
            local = cut_unpadded(program.layouts[entry.node], whole, pads, coordinate)
            own[entry.node] = local.clone().requires_grad_(entry.trainable)

    def loss_of(own: dict[str, Tensor]) -> Tensor:
        values = []
        for entry in batch.signature.inputs:
            value = None
            if entry.kind == "coordinate":
                value = torch.tensor([coordinate[entry.target]])
            elif entry.kind == "user":
                assert entry.position is not None
                value = batch.layouts[entry.node].cut(leaves[entry.position], coordinate)
            elif entry.kind == "parameter" and coordinate:
                value = filled_up(own[entry.node], program.layouts[entry.node].local_shape)
            else:
                value = _value(entry, program, leaves, own, 0)
            values.append(value)
        seeds = sum(entry.kind == "seed" for entry in batch.signature.inputs)
        numbers = range(1, microbatches.count)
        later = [torch.tensor(_SEED + n) for n in numbers for _ in range(seeds)]
        results = run(*values, *later)
        loss: Tensor = results[run.loss_place]
        return loss

    return _train(loss_of, own)._replace(backwards=run.backwards)


def _require_each_backward_once(
    ranks: Sequence[_Trained], schedule: Sequence[Sequence[Action]], size: int
) -> None:
    """Raise VerificationError where a backward, or half of one, ran more or less than once a step:
    parity would hide it. `size`: ranks of a stage.
    """
    for rank, trained in enumerate(ranks):
        wanted = {action: _STEPS for action in schedule[rank // max(1, size)] if action.kind != "F"}
        wrong = {
            str(action): trained.backwards[action]
            for action in {*wanted, *trained.backwards}
            if trained.backwards[action] != wanted.get(action, 0)
        }
        if wrong:
            raise VerificationError(
                f"rank {rank} ran in {_STEPS} steps the backwards {wrong}: each is to run once a "
                "step"
            )


def _errors(
    program: Program,
    ranks: Sequence[_Trained],
    what: str,
    expected: dict[str, Tensor],
    least: float,
) -> dict[str, float]:
    """Return the error of each tensor on the worst of the stages that hold it."""
    assert program.plan is not None
    size = max(1, program.plan.mesh.size)
    error_of = {}
    for name, value in expected.items():
        errors = []
        for first in range(0, len(ranks), size):
            own = [getattr(rank, what).get(name) for rank in ranks[first : first + size]]
            if all(x is not None for x in own):
                joined = join_unpadded(program.layouts[name], own, program.pads(name))
                errors.append(_error(joined, value, least))
        error_of[name] = max(errors, default=float("inf"))
    return error_of


def _error(actual: Tensor, expected: Tensor, least: float) -> float:
    largest = max(float(expected.abs().max()) if expected.numel() else 0.0, least, 1e-30)
    return float((actual - expected).abs().max()) / largest if actual.numel() else 0.0
