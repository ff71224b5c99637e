"""The 2.5D product in panels: numbers against one device, words, live panels, order of issue."""

import itertools
import os
import threading
import zlib

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.mesh import Mesh, group_name
from autopar.ops import comm, sharded
from autopar.ops.process_groups import connect
from autopar.runtime import lockstep
from spawned import on_four_ranks

MESHES = ["depth1.row2.col2", "depth2.row2.col2", "depth1.row4.col4", "row3.col3"]
MESHES += ["col2.depth3.row2", "row1.col1"]
M, K, N = 24, 36, 60  # rows go over depth and row, k and n over q of 1 to 4


def _random(shape, *key):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _close(got, wanted, tolerance=1e-12):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# -- blocks ----------------------------------------------------------------------------------------


def _block(unsharded, mesh, rank, axes_by_dim):
    """The contiguous block of `rank`; the axes of a dim cut it one inside the other."""
    place = mesh.coordinate(rank)
    for dim, axes in axes_by_dim.items():
        for axis in axes:
            unsharded = unsharded.chunk(mesh.sizes[axis], dim)[place[axis]]
    return unsharded.detach().clone()


def _joined(blocks, unsharded, mesh, axes_by_dim, summed=()):
    """Puts the blocks in their places; those that differ on `summed` alone are added up. What no
    axis of the mesh splits or sums must be the same on its ranks.
    """
    joined, seen = torch.zeros_like(unsharded), {}
    index = torch.arange(unsharded.numel()).view(unsharded.shape)
    used = {axis for axes in axes_by_dim.values() for axis in axes} | set(summed)
    for rank, block in enumerate(blocks):
        place = tuple(mesh.coordinate(rank)[axis] for axis in mesh.names if axis in used)
        if place in seen:
            assert torch.equal(seen[place], block)
            continue
        seen[place] = block
        joined.view(-1)[_block(index, mesh, rank, axes_by_dim).flatten()] += block.flatten()
    return joined


def _splits(mesh, transposed):
    """Which axes split each dim of x (batch, rows, k), weight, bias and y (batch, rows, n)."""
    rows = [axis for axis in mesh.names if axis != "col"]
    weight = {0: ["row"], 1: ["col"]} if transposed else {0: ["col"], 1: ["row"]}
    return {1: rows, 2: ["col"]}, weight, {0: ["col"]}, {1: rows, 2: ["col"]}


def _wholes(transposed):
    weight = _random((K, N) if transposed else (N, K), "weight")
    return _random((2, M, K), "x"), weight, _random((N,), "bias"), _random((2, M, N), "dy")


def _coordinates(mesh, rank):
    place = mesh.coordinate(rank)
    return [torch.tensor([place["row"]]), torch.tensor([place["col"]])]


def _call(mesh, leaves, coordinates, transposed):
    x, weight, bias = leaves
    return sharded.summa_linear(x, weight, bias, "row", "col", str(mesh), coordinates, transposed)


def _on_rank(mesh, rank, transposed=False, call=_call, wants=(True, True, True)):
    """Value and gradients on one rank, of the operands that want one."""
    *parts, dy = (
        _block(unsharded, mesh, rank, axes)
        for unsharded, axes in zip(_wholes(transposed), _splits(mesh, transposed), strict=True)
    )
    leaves = [part.requires_grad_(wants) for part, wants in zip(parts, wants, strict=True)]
    y = call(mesh, leaves, _coordinates(mesh, rank), transposed)
    y.backward(dy)
    return y.detach(), *[leaf.grad for leaf in leaves]


def _on_one_device(transposed):
    x, weight, bias, dy = _wholes(transposed)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = F.linear(x, weight.t() if transposed else weight, bias)
    y.backward(dy)
    return y.detach(), *[leaf.grad for leaf in leaves]


def _assert_unsharded(mesh, outputs, transposed):
    x, weight, bias, y = _splits(mesh, transposed)
    outside = [axis for axis in mesh.names if axis not in ("row", "col")]
    summed = [(), (), outside, [*outside, "row"]]
    columns = zip(*outputs, strict=True)
    wanted = _on_one_device(transposed)
    for blocks, unsharded, axes, over in zip(
        columns, wanted, (y, x, weight, bias), summed, strict=True
    ):
        _close(_joined(blocks, unsharded, mesh, axes, over), unsharded)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("text", MESHES)
def test_value_and_gradients_are_those_of_one_device(text, transposed):
    mesh = Mesh.parse(text)
    outputs = lockstep.run(mesh, lambda rank: _on_rank(mesh, rank, transposed))
    _assert_unsharded(mesh, outputs, transposed)


def test_without_bias_and_without_leading_dims():
    mesh = Mesh.parse("row2.col2")
    x, weight = _random((8,), "x"), _random((6, 8), "w")

    def on_rank(rank):
        own = _block(x, mesh, rank, {0: ["col"]})
        block = _block(weight, mesh, rank, {0: ["col"], 1: ["row"]})
        return _call(mesh, (own, block, None), _coordinates(mesh, rank), False)

    for rank, y in enumerate(lockstep.run(mesh, on_rank)):
        _close(y, F.linear(x, weight).chunk(2)[mesh.coordinate(rank)["col"]])


@pytest.mark.parametrize("wants", list(itertools.product([True, False], repeat=3))[:-1])
def test_gradients_nobody_wants_are_not_computed(wants):
    mesh = Mesh.parse("row2.col2")
    all_of_them = lockstep.run(mesh, lambda rank: _on_rank(mesh, rank))
    outputs, trace = _traced(mesh, lambda rank: _on_rank(mesh, rank, wants=wants))
    for got, full in zip(outputs, all_of_them, strict=True):
        for mine, wanted, expected in zip(got[1:], wants, full[1:], strict=True):
            assert (mine is not None) == wanted
            if wanted:
                _close(mine, expected)
    # dX takes panels of W in and gives parts as large as X, dW the other way round: each costs what
    # the forward does.
    assert set(trace.words) == {_words(mesh) * (1 + wants[0] + wants[1])}


def test_half_types_sum_between_panels_in_their_own_precision():
    mesh = Mesh.parse("row2.col2")
    x, weight = _random((2, 8), "x").bfloat16(), _random((6, 8), "w").bfloat16()

    def on_rank(rank):
        own = _block(x, mesh, rank, {0: ["row"], 1: ["col"]})
        block = _block(weight, mesh, rank, {0: ["col"], 1: ["row"]})
        return _call(mesh, (own, block, None), _coordinates(mesh, rank), False)

    for rank, y in enumerate(lockstep.run(mesh, on_rank)):
        expected = F.linear(x.double(), weight.double())
        assert y.dtype == torch.bfloat16
        _close(y.double(), _block(expected, mesh, rank, {0: ["row"], 1: ["col"]}), 2e-2)


def test_axes_of_two_sizes_are_refused():
    mesh = Mesh.parse("row2.col3")
    block = torch.ones(2, 2)
    with pytest.raises(AssertionError, match="row and col of one size"):
        _call(mesh, (block, block, None), _coordinates(mesh, 0), False)


# -- what moves, what lives, in what order ---------------------------------------------------------


class _Trace:
    """Stands between a lockstep run and its wire; keeps each rank's words, panels and order."""

    def __init__(self, mesh):
        self.mesh, self.simulator, self.own = mesh, comm.simulator, threading.local()
        self.words = [0] * mesh.size
        self.panels = [{} for _ in range(mesh.size)]  # by group, those of one pass
        self.peaks = [{} for _ in range(mesh.size)]
        self.orders = [[] for _ in range(mesh.size)]

    def exchange(self, kind, x, group):
        rank, (name, root) = self.own.rank, kind.split(" root ")
        axis = group.rpartition("/")[2]
        if self.mesh.coordinate(rank)[axis] != int(root):
            self.words[rank] += x.numel()
        result = self.simulator.exchange(kind, x, group)
        self.orders[rank].append(f"{name} {axis} {root}")
        if name == "broadcast":
            self._count(rank, axis, result)
        return result

    def _count(self, rank, axis, panel):
        """The number of panels grows nowhere else, so the peak is seen here."""
        panels = self.panels[rank].setdefault(axis, [])
        panels.append((StorageWeakRef(panel.untyped_storage()), panel.nbytes))
        panels[:] = [(ref, size) for ref, size in panels if not ref.expired()]
        seen = len(panels), sum(size for _, size in panels)
        self.peaks[rank][axis] = max(self.peaks[rank].get(axis, (0, 0)), seen)


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


class _Products(TorchDispatchMode):
    """Notes matrix products among the rank's exchanges."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in _PRODUCTS:
            self.order.append("product")
        return function(*args, **(kwargs or {}))


def _traced(mesh, rank_fn):
    """The results of a lockstep run and its trace."""
    traces = []

    def start(_):
        comm.simulator = trace = _Trace(mesh)
        traces.append(trace)

    def on_rank(rank):
        lockstep.meet_ranks(rank, None, start)
        traces[0].own.rank = rank
        with _Products(traces[0].orders[rank]):
            return rank_fn(rank)

    outputs = lockstep.run(mesh, on_rank)
    return outputs, traces[0]


def _words(mesh):
    """What a rank moves in one forward: (q-1)/q² · (mk/d + kn); x is (2, M, K) in all."""
    q, d = mesh.sizes["row"], mesh.size // mesh.sizes["row"] ** 2
    return (q - 1) * (2 * M * K // d + K * N) // q**2


def _forward(mesh, rank):
    parts = (
        _block(unsharded, mesh, rank, axes)
        for unsharded, axes in zip(_wholes(False)[:3], _splits(mesh, False)[:3], strict=True)
    )
    return _call(mesh, list(parts), _coordinates(mesh, rank), False)


@pytest.mark.parametrize("text", MESHES)
def test_words_are_those_of_the_formula(text):
    mesh = Mesh.parse(text)
    expected = _words(mesh)
    _, trace = _traced(mesh, lambda rank: _forward(mesh, rank))
    assert trace.words == [expected] * mesh.size
    _, trace = _traced(mesh, lambda rank: _on_rank(mesh, rank))
    assert (
        trace.words == [3 * expected] * mesh.size
    )  # the backward broadcasts both and reduces both


@pytest.mark.parametrize("text", ["row2.col2", "depth2.row3.col3", "depth1.row4.col4"])
def test_two_panels_of_each_operand_are_alive_at_a_time(text):
    mesh = Mesh.parse(text)
    q, rows = mesh.sizes["row"], 2 * M * mesh.sizes["row"] // mesh.size
    x_bytes, weight_bytes = 8 * rows * K // q, 8 * K * N // q**2
    for rank_fn in (_forward, _on_rank):
        _, trace = _traced(mesh, lambda rank, run=rank_fn: run(mesh, rank))
        for peaks in trace.peaks:
            assert peaks == {"col": (2, 2 * x_bytes), "row": (2, 2 * weight_bytes)}


def test_the_next_panel_is_issued_before_a_matmul():
    mesh = Mesh.parse("row3.col3")
    _, trace = _traced(mesh, lambda rank: _on_rank(mesh, rank))
    forward = """broadcast col 0, broadcast row 0, broadcast col 1, broadcast row 1, product,
        broadcast col 2, broadcast row 2, product, product"""
    backward = """broadcast row 0, broadcast col 0, broadcast row 1, broadcast col 1,
        product, reduce col 0, product, reduce row 0, broadcast row 2, broadcast col 2,
        product, reduce col 1, product, reduce row 1,
        product, reduce col 2, product, reduce row 2"""
    expected = [step.strip() for step in f"{forward}, {backward}".split(",")]
    assert trace.orders == [expected] * mesh.size


# -- the wire --------------------------------------------------------------------------------------


def _rooted(rank, mesh):
    """Broadcast and reduce over each axis with each root: {name: result}, where it is defined."""
    results = {}
    for axis, root in itertools.product(("row", "col"), range(2)):
        group = group_name(str(mesh), (axis,))
        x = _random((3, 4), rank, axis, root).t()
        results[f"broadcast {axis} {root}"] = comm.broadcast(x, root, 2, group)
        total = comm.reduce(x, root, 2, group)
        assert total.shape == x.shape
        half = comm.reduce(torch.full((5,), rank + 1.0).bfloat16(), root, 2, group)
        if mesh.coordinate(rank)[axis] == root:
            results[f"reduce {axis} {root}"] = total, half
    return results


def test_broadcast_and_reduce_by_hand():
    mesh = Mesh.parse("row2.col2")
    for rank, results in enumerate(lockstep.run(mesh, lambda rank: _rooted(rank, mesh))):
        place = mesh.coordinate(rank)
        for axis, root in itertools.product(("row", "col"), range(2)):
            ranks = mesh.group([axis], rank)
            parts = [_random((3, 4), other, axis, root).t() for other in ranks]
            _close(results[f"broadcast {axis} {root}"], parts[root], 0)
            assert (f"reduce {axis} {root}" in results) == (place[axis] == root)
            if place[axis] == root:
                total, half = results[f"reduce {axis} {root}"]
                _close(total, parts[0] + parts[1])
                assert half.tolist() == [sum(ranks) + 2.0] * 5


def test_a_reduce_spoils_the_result_of_all_but_the_root():
    mesh = Mesh.parse("x3")
    reduce = comm.reduce
    by_rank = lockstep.run(mesh, lambda rank: reduce(torch.ones(2), 1, 3, group_name("x3", ("x",))))
    assert by_rank[1].tolist() == [3.0, 3.0]
    assert by_rank[0].isnan().all() and by_rank[2].isnan().all()


def test_a_root_outside_the_group_is_refused():
    for call in (comm.broadcast, comm.reduce):
        with pytest.raises(AssertionError, match="root 2 of 2 ranks"):
            call(torch.ones(1), 2, 2, "nobody")


# -- four gloo ranks -------------------------------------------------------------------------------

GLOO = Mesh.parse("row2.col2")


def _worker(rank, store, backends, results):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    connect(GLOO, "cpu")
    outputs = {"rooted": _rooted(rank, GLOO)}
    for backend, transposed in itertools.product(backends, (False, True)):
        call = (
            _call if backend == "eager" else torch.compile(_call, backend=backend, fullgraph=True)
        )
        outputs[backend, transposed] = _on_rank(GLOO, rank, transposed, call)
    torch.save(outputs, f"{results}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _assert_agree(tmp_path, backends):
    outputs = on_four_ranks(_worker, backends, tmp_path)
    rooted = lockstep.run(GLOO, lambda rank: _rooted(rank, GLOO))
    for rank, output in enumerate(outputs):
        _close(output["rooted"], rooted[rank])
    for backend, transposed in itertools.product(backends, (False, True)):
        _assert_unsharded(GLOO, [output[backend, transposed] for output in outputs], transposed)


@pytest.mark.slow
def test_gloo_agrees_with_one_device(tmp_path):
    _assert_agree(tmp_path, ["eager"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_ranks_agree_with_one_device(tmp_path, backend):
    _assert_agree(tmp_path, [backend])
