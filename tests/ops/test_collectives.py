"""Every change of state, value and gradient, and the lockstep run that they are tested in."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import RankError
from autopar.ir.mesh import Mesh
from autopar.ops import collectives as c
from autopar.ops import comm
from autopar.runtime import lockstep
from reshards import RESHARDS, deal, own, same


def _rows(size, p, inner, place):
    """The indices of a dim of `size` that the digit gives to `place`, counted out one by one."""
    return [i for i in range(size) if i // inner % p == place]


def _unsharded(state, values, dim, inner):
    """The value that the ranks of one group hold together."""
    if state in "IR":
        return values[0]
    if state == "P":
        return torch.stack(values).sum(0)
    shape = list(values[0].shape)
    shape[dim] *= len(values)
    unsharded = torch.empty(shape, dtype=values[0].dtype)
    for place, value in enumerate(values):
        rows = torch.tensor(_rows(shape[dim], len(values), inner, place))
        unsharded.index_copy_(dim, rows, value)
    return unsharded


def _pairing(state, values, gradients):
    """<value, gradient> of a group: an invariant value counts once, though all ranks hold it."""
    products = [(v * g).sum() for v, g in zip(values, gradients, strict=True)]
    return sum(products) / (len(products) if state == "I" else 1)


def _run_change(call, mesh, axis, values, gradients, dim, inner):
    def rank_fn(rank):
        x = values[rank].clone().requires_grad_()
        y = call(x, own(mesh, rank, axis), axis, dim, str(mesh), inner)
        y.backward(gradients[rank])
        return y.detach(), x.grad

    outputs = lockstep.run(mesh, rank_fn)
    return [y for y, _ in outputs], [g for _, g in outputs]


MESHES = [
    ("x2", "x"),
    ("data2.x3", "x"),
    ("data2.x3", "data"),
    ("data2.x2.z2", ("z", "data")),
    ("a2.b2.z3", "b"),
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(RESHARDS)),
    mesh_axis=st.sampled_from(MESHES),
    outer=st.integers(1, 3),
    inner=st.integers(1, 3),
    dim=st.integers(0, 2),
)
def test_value_and_adjoint_of_every_change(name, mesh_axis, outer, inner, dim):
    before, after, grows, call = RESHARDS[name]
    mesh, axis = Mesh.parse(mesh_axis[0]), mesh_axis[1]
    size = len(mesh.group(mesh.ordered(axis), 0))
    shapes = [[2, 3, 2], [2, 3, 2]]
    shapes[0][dim] = outer * inner * (size if grows == -1 else 1)
    shapes[1][dim] = outer * inner * (size if grows == 1 else 1) if grows else shapes[0][dim]
    x = deal(mesh, axis, shapes[0], same(before), name, "x")
    dy = deal(mesh, axis, shapes[1], same(after, gradient=True), name, "dy")
    y, dx = _run_change(call, mesh, axis, x, dy, dim, inner)
    for rank in range(mesh.size):
        group = mesh.group(mesh.ordered(axis), rank)

        def pick(tensors, group=group):
            return [tensors[r] for r in group]

        unsharded = [_unsharded(s, pick(v), dim, inner) for s, v in ((before, x), (after, y))]
        torch.testing.assert_close(unsharded[0], unsharded[1], rtol=1e-12, atol=1e-12)
        pairs = _pairing(after, pick(y), pick(dy)), _pairing(before, pick(x), pick(dx))
        torch.testing.assert_close(*pairs, rtol=1e-12, atol=1e-12)
        if same(after):
            assert all(torch.equal(y[r], y[rank]) for r in group)
        if same(before, gradient=True):
            assert all(torch.allclose(dx[r], dx[rank], rtol=1e-13) for r in group)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    mesh_axis=st.sampled_from(MESHES),
    dims=st.sampled_from(list(itertools.permutations(range(3), 2))),
    outers=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    inners=st.tuples(st.integers(1, 3), st.integers(1, 2)),
)
def test_all_to_all_swaps_a_digit(mesh_axis, dims, outers, inners):
    mesh, axis = Mesh.parse(mesh_axis[0]), mesh_axis[1]
    size = len(mesh.group(mesh.ordered(axis), 0))
    shape = [2, 2, 2]
    shape[dims[0]], shape[dims[1]] = outers[0] * inners[0], outers[1] * inners[1] * size
    after = list(shape)
    after[dims[0]], after[dims[1]] = shape[dims[0]] * size, shape[dims[1]] // size
    x, dy = deal(mesh, axis, shape, False, "x"), deal(mesh, axis, after, False, "dy")

    def call(x, k, a, d, m, n):
        return c.all_to_all(x, a, m, *dims, *inners)

    y, dx = _run_change(call, mesh, axis, x, dy, 0, 0)
    for rank in range(mesh.size):
        group = mesh.group(mesh.ordered(axis), rank)
        value = [
            _unsharded("S", [v[r] for r in group], d, n)
            for v, d, n in zip((x, y), dims, inners, strict=True)
        ]
        assert torch.equal(value[0], value[1])
        grad = [
            _unsharded("S", [v[r] for r in group], d, n)
            for v, d, n in zip((dx, dy), dims, inners, strict=True)
        ]
        assert torch.equal(grad[0], grad[1])


def test_integers_bools_and_strided_inputs_pass():
    def rank_fn(rank):
        ids = torch.arange(6).view(2, 3).t() + 10 * rank
        mask = ids % 2 == rank
        return (
            c.all_gather(ids, "x", 1, "x2"),
            c.all_gather(mask, "x", 0, "x2"),
            c.all_to_all(mask.repeat(1, 2), "x", "x2", 0, 1),
        )

    (ids, mask, moved), _ = lockstep.run(Mesh.parse("x2"), rank_fn)
    assert ids.tolist() == [[0, 3, 10, 13], [1, 4, 11, 14], [2, 5, 12, 15]]
    assert mask.dtype == moved.dtype == torch.bool
    assert mask[:, 0].tolist() == [True, False, True, False, True, False]
    assert moved.shape == (6, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_stay(dtype):
    results = lockstep.run(
        Mesh.parse("x2"),
        lambda rank: c.partial(c.all_reduce(torch.ones(2, dtype=dtype), "x", "x2"), "x", "x2"),
    )
    assert [r.dtype for r in results] == [dtype] * 2
    assert results[0].tolist() == [1.0, 1.0]


# -- lockstep --------------------------------------------------------------------------------------


def test_lockstep_names_both_of_two_different_calls():
    def rank_fn(rank):
        return c.all_reduce(torch.ones(2 + rank), "x", "x2")

    with pytest.raises(
        RankError, match=r"rank 0 calls all-reduce sum of float32\(2,\).*rank 1 .*\(3,\)"
    ):
        lockstep.run(Mesh.parse("x2"), rank_fn)
    assert comm.simulator is None


def test_lockstep_refuses_to_hang():
    def crossed(rank):
        return c.all_reduce(torch.ones(2), "a" if rank == 0 else "b", "a2.b2")

    with pytest.raises(RankError, match=r"no rank can go on|has ended"):
        lockstep.run(Mesh.parse("a2.b2"), crossed)
    with pytest.raises(RankError, match="rank 1 has ended, but rank 0 waits in all-reduce"):
        lockstep.run(
            Mesh.parse("x2"),
            lambda rank: c.all_reduce(torch.ones(1), "x", "x2") if rank == 0 else None,
        )


def test_lockstep_raises_the_first_error_with_its_rank_and_cleans_up():
    def rank_fn(rank):
        c.all_reduce(torch.ones(1), "x", "x4")
        if rank == 2:
            raise KeyError("broken")
        return c.all_reduce(torch.ones(1), "x", "x4")

    threads = torch.get_num_threads()
    with pytest.raises(KeyError, match="broken") as caught:
        lockstep.run(Mesh.parse("x4"), rank_fn)
    assert "rank 2" in caught.value.__notes__[0]
    assert comm.simulator is None and torch.get_num_threads() == threads
    assert lockstep.run(Mesh.parse("x2"), lambda rank: rank) == [0, 1]


def test_lockstep_refuses_nesting_and_too_many_ranks():
    def nested(rank):
        return lockstep.run(Mesh.parse("x2"), lambda inner: inner)

    with pytest.raises(RankError, match="inside another"):
        lockstep.run(Mesh.parse("x2"), nested)
    with pytest.raises(RankError, match="at most 64"):
        lockstep.run(Mesh.parse("x65"), lambda rank: rank)


def test_lockstep_takes_grad_mode_from_the_caller():
    with torch.no_grad():
        assert lockstep.run(Mesh.parse("x2"), lambda rank: torch.is_grad_enabled()) == [
            False,
            False,
        ]
    assert lockstep.run(Mesh.parse("x2"), lambda rank: torch.is_grad_enabled()) == [True, True]


def test_meet_calls_the_action_once_with_all_values():
    calls = []

    def action(values):
        calls.append(values)
        return max(values)

    assert (
        lockstep.run(Mesh.parse("a2.b2"), lambda rank: lockstep.meet_ranks(rank, rank * 10, action))
        == [30] * 4
    )
    assert calls == [[0, 10, 20, 30]]
    with pytest.raises(RankError, match="no lockstep run"):
        lockstep.meet_ranks(0, 1, action)


def test_ranks_get_tensors_of_their_own():
    def rank_fn(rank):
        y = c.all_gather(torch.ones(1), "x", 0, "x2").detach()
        return y.add_(rank)

    assert [y.tolist() for y in lockstep.run(Mesh.parse("x2"), rank_fn)] == [[1, 1], [2, 2]]


def test_a_joint_sum_on_64_ranks_is_that_of_each_group():
    mesh = Mesh.parse("a4.b4.z4")
    results = lockstep.run(
        mesh, lambda rank: c.all_reduce(torch.tensor([float(rank)]), ("z", "a"), str(mesh)).item()
    )
    assert results == [float(sum(mesh.group(("a", "z"), rank))) for rank in range(64)]


def test_complex_numbers_are_sent_as_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transport knows them."""

    class Alone:
        def exchange(self, kind: str, x: torch.Tensor, group: str) -> torch.Tensor:
            assert not x.is_complex() and x.shape[-1] == 2, kind
            return x

    monkeypatch.setattr(comm, "simulator", Alone())
    x = torch.randn(1, 3, dtype=torch.complex64).conj()
    sent = [
        comm.all_gather(x, 1, "g"), comm.reduce_scatter(x, 1, "g"), comm.all_reduce(x, 1, "g"),
        comm.all_to_all(x, "g"), *comm.all_reduce_coalesced([x], 1, "g"),
        comm.broadcast(x, 0, 1, "g"), comm.reduce(x, 0, 1, "g"),
    ]  # fmt: skip
    for received in sent:
        assert torch.equal(received, x.resolve_conj())
