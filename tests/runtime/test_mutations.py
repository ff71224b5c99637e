"""The teeth of verify: rules, adjoints, emitted graphs and layouts, each broken in one place, are
each found. By VerificationError: a mutation that merely crashes proves nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import models
from autopar import VerificationError, World
from autopar._compat import pytree
from autopar.ir.layout import S
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.sharding_rule import TABLE, OpShardingRule
from autopar.ops import autograd, comm, sharded
from autopar.ops import collectives as c
from autopar.ops.rules.pointwise import pointwise
from autopar.passes.pass_manager import PassManager
from autopar.planner import confirm, planner, tracing
from autopar.planner.request import PlanRequest
from autopar.runtime.verify import Check, compare
from mutations import (
    Mutation,
    another_axis,
    another_digit,
    another_digit_scattered,
    another_dim,
    another_divisor,
    another_place,
    another_state,
    applicable,
    broken,
    dropped,
    local_shape,
    local_size,
    misplaced,
    not_summed,
    offset_seed,
    one_axis_forgotten,
    reseeded,
    restrided,
    summed,
    undivided,
)
from odd_models import Simple, rows
from plans import Subject, random_plan, subject

aten = torch.ops.aten
NAMED = {"ddp": 2, "fsdp": 2, "megatron": 2, "megatron-sp": 2, "4d": 4, "2.5d": 4}


class GptWithMean(models.GptWithLogits):
    """With a mean, so that there is a divisor, next to the loss that divides by itself."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, loss = super().forward(ids, labels)
        return logits, loss + logits.square().mean()


@functools.cache
def gpt() -> Subject:
    torch.manual_seed(0)
    sizes = {"vocabulary": 24, "sequence": 8, "hidden": 24, "heads": 4}
    model = GptWithMean(**sizes, layers=1, dropout=0.2).train()
    ids = torch.randint(0, 24, (8, 8))
    return subject(model, (ids, models.ignore_some(ids.roll(-1, 1))))


@functools.cache
def planned(name: str) -> Program:
    """Under a named layout, or "x2.y2 3": drawn at random on that mesh with that seed."""
    if name in NAMED:
        world = World.of(NAMED[name])
        request = PlanRequest(name)
        chosen = planner.choose_plan(PassManager(), gpt().program, world, request)
    else:
        mesh, seed = name.split()
        world = World.of(Mesh.parse(mesh).size)
        plan = random_plan(gpt().program, mesh, world, int(seed))
        chosen = dataclasses.replace(gpt().program, plan=plan)
    return confirm.rewrite_for_ranks(PassManager(), chosen, world)


def verified(program: Program) -> Check:
    leaves = pytree.tree_leaves(tracing.call_arguments(gpt().inputs))
    return compare(program, gpt().single, leaves, 1e-9)


def refused(program: Program) -> str:
    with pytest.raises(VerificationError) as caught:
        verified(program)
    return str(caught.value)


@pytest.mark.slow_cells("fsdp")
@pytest.mark.slow_cells("ddp")
@pytest.mark.parametrize("name", [*NAMED, "x2.y2 0", "x2.y2 2"])
def test_what_is_not_broken_is_right(name: str) -> None:
    assert verified(planned(name)).grad_error < 1e-10


# -- emitted graphs --------------------------------------------------------------------------------
GRAPHS: list[tuple[str, Any, Mutation]] = [
    ("ddp", c.replicate, dropped),
    ("ddp", sharded.cross_entropy, not_summed),
    ("ddp", sharded.cross_entropy, summed),
    ("ddp", sharded.dropout, misplaced),
    ("ddp", sharded.dropout, restrided),
    ("ddp", sharded.dropout, reseeded),
    ("ddp", sharded.dropout, local_shape),
    ("ddp", sharded.attention, misplaced),
    ("ddp", sharded.attention, reseeded),
    ("ddp", aten.add.Scalar, offset_seed),
    ("ddp", aten.mul.Tensor, undivided),
    ("ddp", aten.mul.Tensor, another_divisor),
    ("fsdp", c.all_gather, another_dim),
    ("fsdp", c.all_gather, another_digit),
    ("fsdp", c.all_gather, another_state),
    ("megatron", c.all_reduce, dropped),
    ("megatron", c.all_reduce, another_state),
    ("megatron", c.replicate, dropped),
    ("megatron", c.all_gather, another_place),
    ("megatron", c.place, another_digit),
    ("megatron", c.place, another_place),
    ("megatron", sharded.attention, restrided),
    ("megatron-sp", c.reduce_scatter, another_dim),
    ("megatron-sp", c.reduce_scatter, another_digit),
    ("megatron-sp", c.take_slice, another_place),
    ("megatron-sp", c.all_gather, another_digit),
    ("4d", sharded.embedding, misplaced),
    ("4d", sharded.embedding, restrided),
    ("4d", sharded.cross_entropy, misplaced),
    ("4d", sharded.cross_entropy, restrided),
    ("2.5d", c.replicate, another_axis),
    ("x2.y2 2", c.replicate, one_axis_forgotten),
    ("2.5d", c.all_to_all, another_digit),
    ("2.5d", sharded.layer_norm, not_summed),
    ("2.5d", sharded.layer_norm, local_size),
    ("x2.y2 0", c.all_reduce, another_axis),
    ("x2.y2 0", c.all_reduce, another_state),
    ("x2.y2 0", c.all_to_all, another_digit),
    ("x2.y2 0", c.all_to_all, another_digit_scattered),
    ("x2.y2 0", c.all_gather, another_state),
    ("x2.y2 0", c.invariant, dropped),
    ("x2.y2 0", c.partial, dropped),
    ("x2.y2 0", c.partial, another_state),
    ("x2.y2 0", c.reduce_scatter, another_digit),
    ("x2.y2 0", c.take_slice, another_digit),
    ("x2.y2 0", c.take_slice, another_place),
    ("x2.y2 0", c.take_slice, another_state),
    ("x2.y2 2", c.place, another_digit),
    ("x2.y2 2", c.partial, another_state),
    ("x2.y2 2", sharded.layer_norm, not_summed),
]


def name_of(value: Any) -> str:
    target = getattr(value, "__name__", str(value))
    return target.replace(" ", "_").removeprefix("aten.")


@pytest.mark.slow_cells(
    "2.5d-replicate-another_axis", "ddp-replicate-dropped", "fsdp-all_gather-another_state", "x2*",
)  # fmt: skip
@pytest.mark.parametrize(("name", "target", "mutation"), GRAPHS, ids=name_of)
def test_a_broken_graph_is_found(name: str, target: Any, mutation: Mutation) -> None:
    """At the last node that this mutation applies to: there it shows the least."""
    nodes = [node for node, by in applicable(planned(name), target) if by is mutation]
    assert nodes, f"{name} has nothing to break"
    program = broken(planned(name), nodes[-1], mutation)
    assert program is not None
    refused(program)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMED, "x2.y2 0", "x2.y2 2"])
def test_every_broken_graph_is_found(name: str) -> None:
    """Each node, by all that it can be broken by: some 900 programs."""
    for node, mutation in applicable(planned(name)):
        program = broken(planned(name), node, mutation)
        assert program is not None
        try:
            verified(program)
        except VerificationError:
            continue
        pytest.fail(f"{name}: {node} broken by {mutation.__name__} was not found")


# -- rules -----------------------------------------------------------------------------------------
NONE: frozenset[Any] = frozenset()
FIRST = (frozenset({0}),)  # linear in its first operand
BOTH = (frozenset({0, 1}),)  # linear in its first two, jointly

# (op, what its rule says wrongly, a model with it)
RULES: list[tuple[Any, dict[str, Any], Callable[..., Tensor]]] = [
    (aten.relu.default, {"linear": FIRST}, lambda m, x: m.down(m.up(x).relu())),
    (aten.gelu.default, {"linear": FIRST}, lambda m, x: m.down(F.gelu(m.up(x)))),
    (aten.mul.Tensor, {"linear": BOTH}, lambda m, x: m.up(x) * m.down(m.up(x)).repeat(1, 2)),
    (aten.flip.default, {"whole": NONE}, lambda m, x: m.up(x).flip(1)),
    (aten.cumsum.default, {"whole": NONE}, lambda m, x: m.up(x).cumsum(1)),
    (aten.softmax.int, {"linear": FIRST}, lambda m, x: m.up(x).softmax(1)),
    (aten.linear.default, {"added": NONE}, lambda m, x: m.down(m.up(x))),
    (aten.sum.dim_IntList, {"sum": NONE, "shared": "all"}, lambda m, x: m.up(x).sum(1)),
    (aten.amax.default, {"whole": NONE, "sum": "all"}, lambda m, x: m.up(x).amax(1)),
]


@pytest.mark.slow_cells("mul.Tensor-{'linear':_(frozenset({0,_1}),)}-<lambda>")
@pytest.mark.parametrize(("target", "lie", "body"), RULES, ids=name_of)
def test_a_wrong_rule_is_found(
    target: Any, lie: dict[str, Any], body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the first random plan that makes use of what it says wrongly."""
    build = TABLE.get(target, pointwise)

    def lying(node: fx.Node) -> OpShardingRule:
        right = build(node)
        return dataclasses.replace(
            right, **{k: frozenset(right.sizes) if v == "all" else v for k, v in lie.items()}
        )

    torch.manual_seed(0)
    model = Simple(lambda m, x: body(m, x).square().sum())
    right = subject(model, (rows(),))
    monkeypatch.setitem(TABLE, target, lying)
    wrong = subject(model, (rows(),))
    messages = (said(wrong, seed) for seed in range(40))
    message = next(filter(None, messages), "not found")
    assert message.startswith(f"the first wrong node is {target.overloadpacket.__name__}"), message
    monkeypatch.setitem(TABLE, target, build)
    assert not any(said(right, seed) for seed in range(4))


def said(model_subject: Subject, seed: int) -> str:
    try:
        model_subject.at_random("x2", seed)
    except VerificationError as error:
        return str(error)
    return ""


# -- adjoints --------------------------------------------------------------------------------------
def none(count: int) -> tuple[None, ...]:
    return (None,) * count


def unsummed(ctx: Any, grad: Tensor) -> Any:
    return grad, None, None


def unsummed_of_all_reduce(ctx: Any, grad: Tensor) -> Any:
    return grad, *none(3)


def summed_twice(ctx: Any, grad: Tensor) -> Any:
    return 2 * grad, None


def own_part_of_all_gather(ctx: Any, grad: Tensor) -> Any:
    """The first slice of the own gradient instead of the sum over all ranks."""
    dim, inner, back = ctx.facts
    own = autograd._expose(grad, dim, inner, comm.route_size(back))[0]
    return own.flatten(dim, dim + 1), *none(6)


def scattered_in_another_order(ctx: Any, grad: Tensor) -> Any:
    dim, inner, back = ctx.facts
    local = grad.shape[dim] // comm.route_size(back)
    return autograd._scatter(grad, dim, 1 if inner > 1 else local, back), *none(6)


def neighbours_slice(ctx: Any, grad: Tensor) -> Any:
    (coordinate,) = ctx.saved_tensors
    dim, inner, size = ctx.facts
    return autograd._take(grad, (coordinate + 1) % size, dim, inner, size), *none(5)


def repeated(ctx: Any, grad: Tensor) -> Any:
    dim, _, back = ctx.facts
    return torch.cat([grad] * comm.route_size(back), dim), *none(5)


def gathered_in_another_order(ctx: Any, grad: Tensor) -> Any:
    dim, inner, back = ctx.facts
    return autograd._gather(grad, dim, 1 if inner > 1 else grad.shape[dim], back), *none(5)


def padded_elsewhere(ctx: Any, grad: Tensor) -> Any:
    (coordinate,) = ctx.saved_tensors
    size = ctx.facts[2]
    return autograd._pad(grad, (coordinate + 1) % size, *ctx.facts), *none(4 + 1)


def placed_back_elsewhere(ctx: Any, grad: Tensor) -> Any:
    (coordinate,) = ctx.saved_tensors
    size = ctx.facts[2]
    return autograd._take(grad, (coordinate + 1) % size, *ctx.facts), *none(4 + 1)


def undivided_gradient(ctx: Any, grad: Tensor) -> Any:
    return grad, None, None


def swapped_in_another_order(ctx: Any, grad: Tensor) -> Any:
    gathered, scattered, *rest = ctx.facts
    right = autograd._swap(grad, gathered, scattered, *rest)
    return right.flip((gathered, scattered)), *none(7)


def not_a_number(ctx: Any, grad: Tensor) -> Any:
    """Of one parameter among many: a nan is not larger than the errors of the others."""
    return (
        torch.where(grad.isnan() | (grad.dim() == 1), torch.nan, autograd._sum(grad, *ctx.facts)),
        None,
        None,
    )


ADJOINTS: list[tuple[str, type, Callable[..., Any]]] = [
    ("ddp", autograd.Replicate, unsummed),
    ("ddp", autograd.Replicate, not_a_number),
    ("fsdp", autograd.AllGather, own_part_of_all_gather),
    ("fsdp", autograd.AllGather, scattered_in_another_order),
    ("megatron", autograd.Replicate, unsummed),
    ("megatron", autograd.AllReduceToInvariant, summed_twice),
    ("megatron", autograd.AllGatherToInvariant, neighbours_slice),
    ("megatron", autograd.Place, placed_back_elsewhere),
    ("megatron-sp", autograd.ReduceScatter, repeated),
    ("megatron-sp", autograd.ReduceScatter, gathered_in_another_order),
    ("x2.y2 0", autograd.AllReduce, unsummed_of_all_reduce),
    ("x2.y2 0", autograd.Scale, undivided_gradient),
    ("x2.y2 0", autograd.SliceOfInvariant, repeated),
    ("x2.y2 0", autograd.SliceOfInvariant, gathered_in_another_order),
    ("x2.y2 0", autograd.SliceOfReplicated, padded_elsewhere),
    ("x2.y2 0", autograd.AllToAll, swapped_in_another_order),
]


@pytest.mark.slow_cells(
    "x2.y2_0-SliceOfInvariant-gathered_in_another_order", "x2.y2_0-SliceOfInvariant-repeated",
)  # fmt: skip
@pytest.mark.parametrize(("name", "change", "backward"), ADJOINTS, ids=name_of)
def test_a_broken_adjoint_is_found(
    name: str, change: type, backward: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change, "backward", staticmethod(backward))
    assert refused(planned(name)).startswith("grad_error is ")


# -- what feeds a graph ----------------------------------------------------------------------------
def test_coordinates_in_another_order_are_found() -> None:
    program = planned("x2.y2 0")
    other = {"x": "y", "y": "x"}
    entries = tuple(
        dataclasses.replace(e, target=other[e.target]) if e.kind == "coordinate" else e
        for e in program.signature.inputs
    )
    signature = dataclasses.replace(program.signature, inputs=entries)
    refused(dataclasses.replace(program, signature=signature))


@pytest.mark.parametrize("name", ["fsdp", "megatron"])
def test_a_parameter_stored_by_another_digit_is_found(name: str) -> None:
    program = planned(name)
    axis = program.plan.mesh.names[0]
    stored = next(
        e.node
        for e in program.signature.inputs
        if e.kind == "parameter" and program.layouts[e.node].axes_of("S")
    )
    layout = program.layouts[stored]
    state = layout.state(axis)
    other = layout.with_state(axis, S(state.dim, 1 if state.stride > 1 else 2))
    refused(dataclasses.replace(program, layouts={**program.layouts, stored: other}))


def test_a_result_handed_out_in_another_order_is_found() -> None:
    program = planned("ddp")
    logits = program.signature.outputs[0].node
    other = program.layouts[logits].with_state("data", S(0, 1))
    refused(dataclasses.replace(program, layouts={**program.layouts, logits: other}))
