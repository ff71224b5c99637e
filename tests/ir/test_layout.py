"""Layouts: digits, cutting and joining; the paths between them, run with their gradients."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor, fx

from autopar.errors import LayoutError
from autopar.ir.layout import I, Layout, P, R, S, State, Step
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import reshard_steps
from autopar.ops.collectives import emit_step
from autopar.runtime import lockstep
from shards import compare, deal, gradient_layout, random_layout

XYZ = Mesh.parse("x2.y3.z2")


# -- digits ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mesh", "shape", "states", "says"),
    [
        ("x2", (7,), (S(0, 3),), "axis x of size 2 .* stride 3 of dim 0, which has 7 entries"),
        ("x2", (12,), (S(0, 12),), "stride 12 of dim 0"),
        ("x4", (6,), (S(0, 1),), "axis x of size 4"),
        ("x2.y2", (8,), (S(0, 4), S(0, 4)), "must be disjoint members of one divisor chain"),
        ("x2.y2", (8,), (S(0, 2), S(0, 2)), "inner digits up to 4"),
        ("x4.y2", (16,), (S(0, 2), S(0, 4)), "inner digits up to 2|inner digits up to 8"),
        ("x2.y3", (12,), (S(0, 2), S(0, 3)), "dim 0"),
        ("x2.y2", (6,), (S(0, 3), S(0, 1)), "dim 0"),
        ("x2.y2.z2", (4,), (S(0, 2), S(0, 1), S(0, 1)), "dim 0"),
    ],
)
def test_digits_that_overlap_or_do_not_divide_are_refused(
    mesh: str, shape: tuple[int, ...], states: tuple[State, ...], says: str
) -> None:
    with pytest.raises(LayoutError, match=says):
        Layout(Mesh.parse(mesh), shape, states)


def test_every_legal_layout_gives_each_index_to_one_rank() -> None:
    """By the definition of a digit: an axis holds (i // stride) % size of the index i."""
    draw = random.Random(3)
    for _ in range(200):
        layout = random_layout(XYZ, (24, 6), "SSSR", draw)
        whole = torch.arange(24 * 6).view(24, 6)
        for rank in range(XYZ.size):
            own = XYZ.coordinate(rank)
            keep = [
                [
                    i
                    for i in range(size)
                    if all(i // d.stride % d.size == own[d.axis] for d in layout.digits(dim))
                ]
                for dim, size in enumerate(layout.shape)
            ]
            assert torch.equal(layout.cut(whole, own), whole[keep[0]][:, keep[1]]), str(layout)


def test_inner_counts_local_elements() -> None:
    layout = Layout(XYZ, (24,), (S(0, 2), S(0, 4), S(0, 1)))
    assert [digit.axis for digit in layout.digits(0)] == ["y", "x", "z"]
    assert (layout.inner("y"), layout.inner("x"), layout.inner("z")) == (1, 1, 1)
    assert Layout(XYZ, (24,), (S(0, 1), S(0, 8), I)).inner("y") == 4
    assert layout.local_shape == (2,)


@pytest.mark.slow_cells("S")
@pytest.mark.parametrize("kinds", ["S", "SR", "SP", "SIRP"])
def test_join_is_the_inverse_of_cut(kinds: str) -> None:
    draw, three = random.Random(4), 0
    for _ in range(100):
        layout = random_layout(XYZ, draw.choice([(24, 6), (12,), (4, 6, 12)]), kinds, draw)
        three += any(len(layout.digits(dim)) == 3 for dim in range(len(layout.shape)))
        whole = torch.randn(layout.shape, dtype=torch.float64)
        parts = [layout.cut(whole, XYZ.coordinate(rank)) for rank in range(XYZ.size)]
        assert all(part.shape == layout.local_shape for part in parts)
        assert torch.equal(layout.join(parts), whole), str(layout)
        assert torch.allclose(layout.join(deal(layout, whole, 0)), whole), str(layout)
    assert three > 5 or "P" in kinds


def test_three_axes_on_one_dim_in_an_order_that_is_not_the_mesh_s() -> None:
    layout = Layout(XYZ, (12,), (S(0, 1), S(0, 4), S(0, 2)))  # outermost y, then z, then x
    parts = [layout.cut(torch.arange(12), XYZ.coordinate(rank)) for rank in range(12)]
    assert [int(part) for part in parts] == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
    assert torch.equal(layout.join(parts), torch.arange(12))


# -- changes ---------------------------------------------------------------------------------------
def convert(source: Layout, target: Layout, seed: int) -> None:
    """Takes a random value along the path on all ranks: the value stays, and a gradient comes back
    legal in the source's gradient layout, the same whole.
    """
    mesh, graph = source.mesh, fx.Graph()
    x = graph.placeholder("x")
    coordinates = {name: graph.placeholder(f"coordinate_{name}") for name in mesh.names}
    for step in reshard_steps(source, target):
        x = emit_step(graph, x, step, coordinates.__getitem__)
    graph.output(x)
    module = fx.GraphModule({}, graph)
    generator = torch.Generator().manual_seed(seed)
    value, cotangent = (
        torch.randn(source.shape, generator=generator, dtype=torch.float64) for _ in "vc"
    )
    values, cotangents = (
        deal(source, value, seed),
        deal(gradient_layout(target), cotangent, seed + 1),
    )

    def rank_fn(rank: int) -> tuple[Tensor, Tensor]:
        own = values[rank].clone().requires_grad_()
        result = module(own, *(torch.tensor([c]) for c in mesh.coordinate(rank).values()))
        result.backward(cotangents[rank])
        assert own.grad is not None
        return result.detach(), own.grad

    ranks = lockstep.run(mesh, rank_fn)
    compare("value", target, [result for result, _ in ranks], value, 1e-12)
    compare("gradient", gradient_layout(source), [grad for _, grad in ranks], cotangent, 1e-12)


def is_one_digit(step: Step) -> bool:
    """Whether the axes' digits adjoin one another in mesh order, before and after."""
    states_by_side = [
        [layout.state(axis) for axis in step.axes] for layout in (step.before, step.after)
    ]
    sizes = [step.before.mesh.sizes[axis] for axis in step.axes[1:]]
    return list(step.axes) == [a for a in step.before.mesh.names if a in step.axes] and all(
        outer.kind == inner.kind and outer.dim == inner.dim and outer.stride == inner.stride * size
        for states in states_by_side
        for outer, inner, size in zip(states, states[1:], sizes, strict=False)
    )


def check_path(source: Layout, target: Layout) -> None:
    """Steps join up, change what they say and nothing else, and no axis changes more than twice."""
    current, changed = source, dict.fromkeys(source.mesh.names, 0)
    for step in reshard_steps(source, target):
        assert step.before == current
        for axis in source.mesh.names:
            before, after = step.before.state(axis), step.after.state(axis)
            assert (axis in step.axes) == (before != after), str(step)
            if axis in step.axes:
                assert step.kind == f"{before.kind}->{after.kind}"
                changed[axis] += 1
        assert len(step.axes) == 1 or "S" not in step.kind or is_one_digit(step), str(step)
        current = step.after
    assert current == target
    assert max(changed.values()) <= 2, [step.kind for step in reshard_steps(source, target)]


@pytest.mark.slow_cells("x2.y3.z2", "x3.y2")
@pytest.mark.parametrize("mesh", ["x2.y2", "x3.y2", "x2.y3.z2"])
def test_every_path_keeps_the_value_and_the_gradient(mesh: str) -> None:
    draw = random.Random(mesh)
    for seed in range(150):
        shape = draw.choice([(24, 6), (12, 12), (12,), (2, 6, 12)])
        source, target = (random_layout(Mesh.parse(mesh), shape, "SSSIRP", draw) for _ in "st")
        try:
            check_path(source, target)
            convert(source, target, seed)
        except Exception as error:
            path = [f"{step.kind} {step.axes}" for step in reshard_steps(source, target)]
            error.add_note(f"{source.states} to {target.states} of {shape} on {mesh}: {path}")
            raise


@pytest.mark.parametrize("before", [I, R, P, S(0, 1), S(0, 3), S(1, 1)], ids=str)
@pytest.mark.parametrize("after", [I, R, P, S(0, 1), S(0, 3), S(1, 1)], ids=str)
def test_every_change_on_one_axis(before: State, after: State) -> None:
    mesh = Mesh.parse("x2")
    source, target = Layout(mesh, (6, 4), (before,)), Layout(mesh, (6, 4), (after,))
    same_dim = before.kind == after.kind == "S" and before.dim == after.dim
    assert len(reshard_steps(source, target)) == (0 if before == after else 2 if same_dim else 1)
    convert(source, target, 0)


@pytest.mark.slow
def test_paths_are_short_and_legal_for_many_more() -> None:
    draw, mesh = random.Random(5), Mesh.parse("x2.y3.z2.w2")
    for _ in range(3000):
        source, target = (random_layout(mesh, (24, 24), "SSSIRP", draw) for _ in "st")
        check_path(source, target)


@pytest.mark.parametrize(("before", "after"), [(P, I), (P, R), (I, R)])
def test_joint_reshards_are_one_step_over_the_joint_group(before: State, after: State) -> None:
    source, target = (Layout(XYZ, (6, 4), (s, S(0, 2), s)) for s in (before, after))
    (step,) = reshard_steps(source, target)
    assert (step.axes, step.group_size) == (("x", "z"), 4)
    convert(source, target, 0)


def factored(layout: Layout, mesh: Mesh) -> Layout:
    """The same on a mesh that has several axes in the place of one; their names begin alike."""
    states: list[State] = []
    for name, state in zip(layout.mesh.names, layout.states, strict=True):
        parts = [other for other in mesh.names if other[0] == name[0]]
        unit = math.prod(mesh.sizes[part] for part in parts)
        for part in parts:
            unit //= mesh.sizes[part]
            states.append(state._replace(stride=state.stride * unit))
    return Layout(mesh, layout.shape, tuple(states))


@pytest.mark.slow_cells("x2.y8/x2.ya2.yb2.yc2", "y4.x3/ya2.yb2.x3")
@pytest.mark.parametrize("meshes", ["x2.y6/x2.ya2.yb3", "y4.x3/ya2.yb2.x3", "x2.y8/x2.ya2.yb2.yc2"])
def test_axes_that_are_one_jointly_take_the_path_of_one(meshes: str) -> None:
    """Step by step the same change of the same bytes over as many ranks, whatever they hold."""
    flat, several = (Mesh.parse(text) for text in meshes.split("/"))
    draw = random.Random(meshes)
    for seed in range(400):
        pair = [random_layout(flat, (48, 24), "SSSIRP", draw) for _ in "st"]
        parts = [factored(layout, several) for layout in pair]
        path, longer = reshard_steps(*pair), reshard_steps(*parts)
        assert [(s.kind, s.group_size, s.traffic(True)) for s in path] == [
            (s.kind, s.group_size, s.traffic(True)) for s in longer
        ]
        assert [factored(s.after, several) for s in path] == [s.after for s in longer]
        if seed < 30:
            convert(parts[0], parts[1], seed)


def test_digits_in_another_order_than_the_mesh_s_go_one_by_one() -> None:
    mesh = Mesh.parse("x2.y3")
    inside_out = Layout(mesh, (12,), (S(0, 2), S(0, 4)))
    assert [s.axes for s in reshard_steps(inside_out, Layout(mesh, (12,), (R, R)))] == [
        ("x",),
        ("y",),
    ]
    apart = Layout(mesh, (24,), (S(0, 12), S(0, 2)))
    assert [s.axes for s in reshard_steps(apart, Layout(mesh, (24,), (R, R)))] == [("x",), ("y",)]


def test_sums_come_before_gathers_and_slices_before_sums() -> None:
    mesh = Mesh.parse("x2.y2")

    def kinds(source: tuple[State, State], target: tuple[State, State]) -> list[str]:
        return [
            s.kind
            for s in reshard_steps(Layout(mesh, (8, 8), source), Layout(mesh, (8, 8), target))
        ]

    assert kinds((P, S(0, 4)), (R, R)) == ["P->R", "S->R"]
    assert kinds((S(0, 4), I), (I, R)) == ["I->R", "S->I"]
    assert kinds((R, P), (S(0, 4), R)) == ["R->S", "P->R"]
    assert kinds((S(0, 4), P), (R, S(1, 4))) == ["P->S", "S->R"]
    assert kinds((S(0, 4), S(1, 4)), (S(1, 4), S(0, 4))) == ["S->R", "S->S", "R->S"]


def test_elements_that_a_reshard_sends() -> None:
    """The ring formulas' B, the whole value on the axes: a joint change counts it once."""
    mesh = Mesh.parse("x2.y4.z2")
    layout = Layout(mesh, (8, 16), (P, P, S(0, 4)))

    def moved(axes: dict[str, State], grad: bool = True) -> list[tuple[str, int]]:
        target = layout
        for axis, state in axes.items():
            target = target.with_state(axis, state)
        (step,) = reshard_steps(layout, target)
        return [tuple(t) for t in step.traffic(grad) if t is not None]

    local = 8 * 16 // 2
    assert moved({"x": I, "y": I}) == [("all_reduce", local)]
    assert moved({"x": R, "y": R}) == [("all_reduce", local), ("all_reduce", local)]
    assert moved({"x": R, "y": R}, grad=False) == [("all_reduce", local)]
    assert moved({"y": S(1, 4)}) == [("reduce_scatter", local), ("all_gather", local)]
    assert moved({"z": R}) == [("all_gather", 2 * local), ("reduce_scatter", 2 * local)]
    assert moved({"z": S(1, 8)}) == [("all_to_all", 2 * local), ("all_to_all", 2 * local)]
    assert math.prod(layout.local_shape) == local
