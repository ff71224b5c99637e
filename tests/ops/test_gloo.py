"""Four gloo ranks: changes of state and sharded ops agree with lockstep, compiled or not, in one
level and in two; and many tensors at once.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch import fx

import autopar
from autopar import Device, Level, World
from autopar.errors import WorldError
from autopar.ir.mesh import Mesh
from autopar.ops import collectives as c
from autopar.ops import comm, sharded
from autopar.ops.process_groups import connect, disconnect
from autopar.runtime import lockstep
from reshards import RESHARDS, deal, own, random, same
from spawned import on_four_ranks

MESH = Mesh.parse("data2.x2")


def _every_change(rank):
    """Value and gradient of every change on data2.x2, over one axis and over both."""
    results = {}
    for name, (before, after, grows, call) in RESHARDS.items():
        for axis in ("data", "x", ("data", "x")):
            size = len(MESH.group(MESH.ordered(axis), rank))
            x = deal(MESH, axis, (2, 8, 3), same(before), "x")[rank].requires_grad_()
            y = call(x, own(MESH, rank, axis), axis, 1, str(MESH), 2)
            y.backward(deal(MESH, axis, y.shape, same(after, gradient=True), "dy")[rank])
            assert y.shape[1] == 8 * size**grows
            results[name, axis] = y.detach(), x.grad
    x = random((4, 6), rank).requires_grad_()
    y = c.all_to_all(x, "x", str(MESH), 0, 1, 1, 3)
    y.backward(random(y.shape, rank))
    results["all-to-all"] = y.detach(), x.grad
    results["ids"] = (c.all_gather(torch.arange(4) + rank, "x", 0, str(MESH), 2),)
    results["mask"] = (c.all_gather(torch.arange(4) > rank, "x", 0, str(MESH)),)
    results["half"] = (c.all_reduce(torch.full((3,), float(rank)).bfloat16(), "data", str(MESH)),)
    return results


def _two_layers():
    """y = relu(x W1) W2 with W1 stored split over data (gathered), its columns and W2's rows over
    x; x's rows over data.
    """
    graph = fx.Graph()
    x, w1, w2, k = (graph.placeholder(name) for name in ("x", "w1", "w2", "coordinate_data"))
    mesh = str(MESH)
    own = graph.call_function(c.take_slice, (x, k, "data", 0, mesh))
    own = graph.call_function(c.replicate, (own, "x", mesh))
    whole = graph.call_function(c.all_gather, (w1, "data", 0, mesh))
    hidden = graph.call_function(torch.relu, (graph.call_function(torch.matmul, (own, whole)),))
    columns = graph.call_function(c.replicate, (w2, "data", mesh))
    y = graph.call_function(torch.matmul, (hidden, columns))
    y = graph.call_function(c.all_reduce, (y, "x", mesh, "I"))
    loss = graph.call_function(torch.sum, (graph.call_function(torch.mul, (y, y)),))
    graph.output(graph.call_function(c.all_reduce, (loss, "data", mesh, "I")))
    return fx.GraphModule(torch.nn.Module(), graph)


def _compiled(function, backend):
    if backend == "eager":
        return function
    return torch.compile(function, backend=backend, fullgraph=True)


def _operands():
    return random((6, 4), 1), random((4, 8), 2), random((8, 5), 3)


def _gradients_of_layers(rank, backend="eager"):
    place = MESH.coordinate(rank)
    x, w1, w2 = _operands()
    x = x.requires_grad_()
    w1 = w1.chunk(2, 0)[place["data"]].chunk(2, 1)[place["x"]].contiguous().requires_grad_()
    w2 = w2.chunk(2, 0)[place["x"]].contiguous().requires_grad_()
    loss = _compiled(_two_layers(), backend)(x, w1, w2, torch.tensor([place["data"]]))
    loss.backward()
    return loss.detach(), x.grad, w1.grad, w2.grad


def _single_gradients(rank):
    place = MESH.coordinate(rank)
    x, w1, w2 = (t.requires_grad_() for t in _operands())
    loss = (torch.relu(x @ w1) @ w2).square().sum()
    loss.backward()
    w1_grad = w1.grad.chunk(2, 0)[place["data"]].chunk(2, 1)[place["x"]]
    return loss.detach(), x.grad, w1_grad, w2.grad.chunk(2, 0)[place["x"]]


def _sharded_ops(x, weight, bias, table, ids, target, seed, k_data, k_x):
    """One of each sharded op; rows lie on data, features and the vocabulary on x."""
    mesh, features = str(MESH), [("x", 4, 2)]
    rows = c.all_reduce(sharded.embedding(table, ids, [k_x], features, 3), "x", mesh)
    x = x + c.take_slice(rows, k_x, "x", 1, mesh, of="R")
    x = sharded.layer_norm(x, weight, bias, 1e-5, 8, ["x"], mesh)
    x = sharded.rms_norm(x, weight, None, 8, ["x"], mesh)
    x = x + sharded.softmax(x, -1, ["x"], mesh) + sharded.log_softmax(x, 1, ["x"], mesh)
    digits = [[("data", 3, 2)], features]
    x = sharded.dropout(x, 0.3, seed, [k_data, k_x], digits, [6, 8])
    rest = ("mean", -1, 0.1, 8, [k_x], features, ["data"], mesh)
    return c.all_reduce(sharded.cross_entropy(x, target, weight.detach(), *rest), "data", mesh, "I")


def _gradients_of_sharded_ops(rank, backend="eager"):
    place = MESH.coordinate(rank)
    leaves = [random(shape, rank).requires_grad_() for shape in ((3, 4), (4,), (4,), (4, 8))]
    ids, target = torch.tensor([1, 3, 7]), torch.tensor([0, -1, 5])
    loss = _compiled(_sharded_ops, backend)(
        *leaves, ids, target, torch.tensor(9), *(torch.tensor([place[axis]]) for axis in MESH.names)
    )
    loss.backward()
    return loss.detach(), *[leaf.grad for leaf in leaves]


BOTH = ("data", "x")


def _levels(x, w, k_data, k_x):
    """Every collective that goes in two levels, forward and backward."""
    mesh = str(MESH)
    in_two, back = {"inside": 2}, {"backward_inside": 2}
    w = c.all_gather(w, BOTH, 1, mesh, 1, **in_two, **back)
    y = c.all_reduce(torch.relu(x @ w), BOTH, mesh, **in_two, **back)
    y = y + c.reduce_scatter(torch.cat([y] * 4), BOTH, 0, mesh, 1, **in_two, **back)
    y = c.all_gather(y, BOTH, 0, mesh, 1, [k_data, k_x], "I", **in_two)
    y = c.take_slice(y, [k_data, k_x], BOTH, 0, mesh, 1, **back)
    loss = c.all_reduce(y.square().sum(), BOTH, mesh, "I", **in_two)
    return c.replicate(loss, BOTH, mesh, **back)


def _gradients_in_levels(rank, backend="eager"):
    place = MESH.coordinate(rank)
    leaves = [random(shape, rank).requires_grad_() for shape in ((3, 5), (5, 3))]
    coordinates = [torch.tensor([place[axis]]) for axis in BOTH]
    loss = _compiled(_levels, backend)(*leaves, *coordinates)
    loss.backward()
    return loss.detach(), *[leaf.grad for leaf in leaves]


def _many_at_once(rank):
    size, group = comm.size_of(BOTH, str(MESH)), comm.group_of(BOTH, str(MESH))
    tensors = [random((n, 3), rank, n).t() for n in (1, 4, 2)]
    return tuple(comm.all_reduce_coalesced(tensors, size, group))


def _model_and_data():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 3)
    return torch.nn.Sequential(*layers), torch.randn(8, 64)


def _trained_in_levels(layout, backend):
    """Gradients of a model on links so unequal that its sums go in two levels; graph as text."""
    links = Level(2, 5e9, 1e-5), Level(2, 5e7, 2e-3)
    world = World(links, Device("test", {"float32": 1e12}, 80e9, 1e12))
    model, x = _model_and_data()
    par = autopar.parallelize(model, world, (x,), layout=layout, backend=backend)
    y = par(x)
    y.square().sum().backward()
    grads = {name: p.grad.full_tensor() for name, p in par.named_parameters()}
    return grads, str(par.graph.code)


SUBJECTS = {
    "layers": _gradients_of_layers,
    "ops": _gradients_of_sharded_ops,
    "levels": _gradients_in_levels,
}
TRAINED = [("ddp", None), ("fsdp", "aot_eager")]


def _groups_of_levels():
    routes = [comm.route(BOTH, str(MESH), inside) for inside in ((), 2)]
    return [group for route in routes for _, group in route]


def _worker(rank, store, runs, results):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    device_mesh = connect(MESH, "cpu")
    assert connect(MESH, "cpu", _groups_of_levels()) is device_mesh
    assert device_mesh.mesh_dim_names == ("x", "data")  # weights are gathered over data
    with pytest.raises(WorldError, match="8 ranks, the running process group has 4"):
        connect(Mesh.parse("data2.x4"), "cpu")
    outputs = {"changes": _every_change(rank), "many": _many_at_once(rank)}
    for layout, backend in TRAINED if runs else ():
        outputs["trained", layout, backend] = _trained_in_levels(layout, backend)
    for subject, backend in runs:
        outputs[subject, backend] = SUBJECTS[subject](rank, backend)
    disconnect()
    connect(MESH, "cpu", _groups_of_levels())
    outputs["again"] = c.all_reduce(torch.ones(1), ("data", "x"), str(MESH))
    torch.save(outputs, f"{results}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _assert_agree(tmp_path, runs):
    outputs = on_four_ranks(_worker, runs, tmp_path)
    exactly = {"rtol": 1e-12, "atol": 1e-12}
    reshards = lockstep.run(MESH, _every_change)
    ops = lockstep.run(MESH, _gradients_of_sharded_ops)
    levels, many = lockstep.run(MESH, _gradients_in_levels), lockstep.run(MESH, _many_at_once)
    for rank, output in enumerate(outputs):
        assert output["changes"].keys() == reshards[rank].keys()
        for name, tensors in output["changes"].items():
            torch.testing.assert_close(tensors, reshards[rank][name], **exactly, msg=str(name))
        torch.testing.assert_close(output["many"], many[rank], **exactly)
        wanted = {"layers": _single_gradients(rank), "ops": ops[rank], "levels": levels[rank]}
        for subject, backend in runs:
            torch.testing.assert_close(output[subject, backend], wanted[subject], **exactly)
        assert output["again"].tolist() == [4.0]
        for key in TRAINED:
            _assert_trained(*output["trained", *key], *key)


def _assert_trained(grads, code, layout, backend):
    """In float32: the gradients of one device, and sums of gradients in two levels."""
    model, x = _model_and_data()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=2e-5, atol=1e-5)
    assert "backward_inside = 2" in code, f"{layout} {backend}: {code}"


@pytest.mark.slow
def test_gloo_agrees_with_lockstep_and_one_device(tmp_path):
    runs = [("layers", "eager"), ("ops", "eager"), ("levels", "eager")]
    _assert_agree(tmp_path, [*runs, ("layers", "aot_eager"), ("levels", "aot_eager")])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_ranks_agree_with_lockstep_and_one_device(tmp_path, backend):
    _assert_agree(tmp_path, [("layers", backend), ("ops", backend), ("levels", backend)])


def test_lockstep_gives_the_gradients_of_one_device():
    outputs = lockstep.run(MESH, _gradients_of_layers)
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(output, _single_gradients(rank), rtol=1e-12, atol=1e-12)
