"""Every private torch API that autopar/_compat passes on still does what we need it for."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autopar import PlanError, _compat
from autopar._compat import compiling

TESTED: set[str] = set()
T = TypeVar("T")


def covers(*names: str) -> Callable[[T], T]:
    TESTED.update(names)
    return lambda test: test


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@covers("AdaptiveOutput")
def test_what_an_adaptive_softmax_returns() -> None:
    softmax = torch.nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2])
    result = softmax(torch.ones(3, 4), torch.arange(3))
    assert type(result) is _compat.AdaptiveOutput
    assert result._fields == ("output", "loss")


@covers("pipeline_actions")
def test_the_actions_of_schedules() -> None:
    """For two ranks and four micro-batches, as torch lists them; a backward in two halves too."""
    actions = _compat.pipeline_actions
    forwards, backwards = ([(kind, 0, number) for number in range(4)] for kind in "FB")
    assert actions("GPipe", 2, 1, 4)[0] == [*forwards, *backwards]
    both = actions("Interleaved1F1B", 2, 2, 4)
    assert [stage for _, stage, number in both[1] if not number] == [1, 3, 3, 1]
    assert {kind for kind, *_ in actions("InterleavedZeroBubble", 2, 2, 4)[0]} == {*"FIW"}


@covers("torch_versions")
def test_a_torch_that_is_not_proven_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.14 is: it loses the backward of custom functions in silence."""
    versions = _compat.torch_versions
    for good in (torch.__version__, "2.11.0", "2.13.1+cu130", "2.13.0a0+nv26.10"):
        versions.require(good)
    with pytest.raises(ImportError, match=r"2\.14\.0 is newer .*pip install 'torch>=2\.11,<2\.14'"):
        versions.require("2.14.0")
    with pytest.raises(ImportError, match=r"3\.0\.0\.dev20270101 is newer"):
        versions.require("3.0.0.dev20270101")
    with pytest.raises(ImportError, match=r"2\.10\.2 is too old"):
        versions.require("2.10.2")
    monkeypatch.setenv(versions.ANY, "1")
    with pytest.warns(UserWarning, match=r"2\.14\.0 is newer"):
        versions.require("2.14.0")


@pytest.mark.slow
def test_autopar_asks_for_the_versions_that_it_takes() -> None:
    """pyproject.toml, and what is said at import: also where private names are missing."""
    versions = _compat.torch_versions
    least, below = (".".join(map(str, pair)) for pair in (versions.LEAST, versions.BELOW))
    root = Path(__file__).parent.parent  # of the sources, or of a copy of the tests
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={least},<{below}" in wanted
    code = "import torch; torch.__version__ = '2.14.0'; del torch._C._AutoDispatchBelowAutograd\n"
    command = [sys.executable, "-c", code + "import autopar"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 1 and "ImportError: torch 2.14.0 is newer" in done.stderr


@covers("fake_mode", "FakeTensorMode", "FakeTensor")
def test_fake_tensors_have_a_shape_and_no_storage() -> None:
    with _compat.fake_mode() as mode:
        x = torch.empty(1 << 20, 1 << 20)
        y = x @ x.mT
    assert isinstance(x, _compat.FakeTensor)
    assert isinstance(mode, _compat.FakeTensorMode) and y.shape == (1 << 20, 1 << 20)
    with mode:
        symbol = torch.empty((), dtype=torch.int64).item()
        assert isinstance(symbol, torch.SymInt)
        mixed = torch.empty(3) + torch.ones(3)
    assert mixed.fake_mode is mode


@covers("TorchDispatchMode", "without_modes")
def test_a_dispatch_mode_sees_every_op() -> None:
    seen: list[str] = []

    class Listening(_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listening():
        torch.ones(2).add(1)
        with _compat.without_modes():
            torch.zeros(2)
    assert seen == ["aten.ones.default", "aten.add.Tensor"]


@covers("pytree")
def test_trees_are_flattened_with_paths_and_put_together_again() -> None:
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, structure = _compat.pytree.tree_flatten(tree)
    assert leaves == [1, 2, None, 3] and _compat.pytree.tree_unflatten(leaves, structure) == tree
    assert structure == _compat.pytree.tree_structure(tree)
    assert structure != _compat.pytree.tree_structure({"a": [1, 2], "b": 3})
    paths = [
        _compat.pytree.keystr(path) for path, _ in _compat.pytree.tree_flatten_with_path(tree)[0]
    ]
    assert paths == ["['a'][0]", "['a'][1][0]", "['a'][1][1]", "['b']"]
    assert _compat.pytree.tree_leaves(tree) == leaves
    doubled = _compat.pytree.tree_map_only(int, lambda number: 2 * number, tree)
    assert doubled == {"a": [2, (4, None)], "b": 6}
    assert _compat.pytree.SequenceKey(0) == _compat.pytree.SequenceKey(0)


@covers("register_process_group", "unregister_process_group", "process_group", "backend_name")
def test_groups_are_found_by_the_names_that_we_give_them(group: dist.ProcessGroup) -> None:
    name = "autopar/test"
    assert _compat.backend_name(name, "cpu") == ""
    with pytest.raises(RuntimeError):
        _compat.process_group(name)
    _compat.register_process_group(name, group)
    assert _compat.process_group(name) is group or _compat.process_group(name).size() == 1
    assert _compat.backend_name(name, "cpu") == "gloo"
    x = torch.ones(3)
    y = torch.ops._c10d_functional.all_reduce(x, "sum", name)
    assert torch.equal(torch.ops._c10d_functional.wait_tensor(y), x)
    _compat.unregister_process_group(name)
    assert _compat.backend_name(name, "cpu") == ""
    _compat.unregister_process_group(name)


@covers("default_store")
def test_the_store_of_the_default_group(group: dist.ProcessGroup) -> None:
    store = _compat.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value" and store.check(["key"]) and not store.check(["other"])
    assert store.add("count", 2) == 2 and store.multi_get(["key"]) == [b"value"]
    store.delete_key("key")
    assert not store.check(["key"])


@covers("timeout_of", "set_timeout")
def test_a_groups_timeout_is_set_and_read(group: dist.ProcessGroup) -> None:
    other = dist.new_group([0])
    assert _compat.timeout_of(other) != timedelta(seconds=9)
    _compat.set_timeout(other, timedelta(seconds=9))
    assert _compat.timeout_of(other) == timedelta(seconds=9)


@covers("safe_gathers")
@pytest.mark.parametrize("wanted_grad", [False, True])
def test_gathers_are_no_coalesced_ones(group: dist.ProcessGroup, wanted_grad: bool) -> None:
    """Of which two that end at once corrupt memory."""
    assert _compat.safe_gathers() is _compat.safe_gathers()
    functional = torch.ops._c10d_functional
    x = torch.arange(6.0).view(2, 3).t().requires_grad_(wanted_grad)  # not contiguous
    with torch.no_grad(), torch.profiler.profile() as seen:
        y = functional.wait_tensor(functional.all_gather_into_tensor(x, 1, group.group_name))
    assert torch.equal(x, y) and y.is_contiguous() and not y.requires_grad
    names = {event.name for event in seen.events()}
    assert "_c10d_functional::all_gather_into_tensor_out" in names
    assert "_c10d_functional::all_gather_into_tensor_coalesced" not in names


@covers("safe_gathers")
@pytest.mark.parametrize("conjugated", [False, True])
def test_complex_numbers_are_gathered(group: dist.ProcessGroup, conjugated: bool) -> None:
    """gloo has none in the form of a gather that is given its result."""
    functional = torch.ops._c10d_functional
    x = torch.randn(3, 2, dtype=torch.complex64)
    x = x.conj() if conjugated else x
    y = functional.wait_tensor(functional.all_gather_into_tensor(x, 1, group.group_name))
    assert torch.equal(x, y) and y.is_contiguous()


@covers("forget_groups")
def test_a_mesh_lets_go_of_its_groups(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    groups = getattr(mesh, "_pg_registry", None)
    assert groups is None or groups, "a mesh holds its groups somewhere else now"
    _compat.forget_groups(mesh)
    assert not groups


@covers("forget_default_groups")
def test_functions_let_go_of_the_group_they_have_as_a_default(group: dist.ProcessGroup) -> None:
    from torch.distributed.nn import functional

    before = functional.all_reduce.__defaults__
    functional.all_reduce.__defaults__ = (dist.ReduceOp.SUM, group)
    try:
        _compat.forget_default_groups()
        assert functional.all_reduce.__defaults__ == (dist.ReduceOp.SUM, None)
    finally:
        functional.all_reduce.__defaults__ = before


@covers("register_work")
def test_wait_tensor_waits_for_work_that_we_started(group: dist.ProcessGroup) -> None:
    x = torch.ones(3)
    work = dist.broadcast(x, 0, async_op=True)
    _compat.register_work(x, work)
    assert torch.ops._c10d_functional.wait_tensor(x) is x or work.is_completed()
    assert work.is_completed()


@pytest.mark.slow
def test_private_names_of_torch_are_used_nowhere_else() -> None:
    """Attributes and imports of torch that start with one underscore; operators apart."""
    offenders = []
    folder = Path(_compat.__file__).parent
    for path in sorted(folder.parent.rglob("*.py")):
        if folder not in path.parents:
            offenders += [
                f"{path.name}: {name}" for name in _private_names(ast.parse(path.read_text()))
            ]
    assert not offenders


def _private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            names = text.split(".") if text.startswith("torch.") else []
        if names[1:2] != ["ops"]:
            yield from (name for name in names if name[:1] == "_" and name[:2] != "__")


@covers("OpOverload")
def test_operators_know_their_schema_and_their_tags() -> None:
    linear = torch.ops.aten.linear.default
    assert isinstance(linear, _compat.OpOverload) and not isinstance(torch.add, _compat.OpOverload)
    assert [a.name for a in linear._schema.arguments] == ["input", "weight", "bias"]
    assert torch.Tag.pointwise in torch.ops.aten.relu.default.tags
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.rand_like.default.tags


@covers("constant_result", "not_compiled")
def test_dynamo_takes_a_result_as_a_constant_and_leaves_a_function_alone() -> None:
    calls: list[str] = []

    @_compat.constant_result
    def size() -> int:
        calls.append("size")
        return int("3")

    @_compat.not_compiled
    def alone(x: torch.Tensor) -> torch.Tensor:
        calls.append("alone" if not torch.compiler.is_dynamo_compiling() else "compiled")
        return x + 1

    run = torch.compile(lambda x: alone(x * size()), backend="eager")
    assert run(torch.ones(1)).item() == 4.0 and "size" in calls
    calls.clear()
    assert run(torch.ones(1)).item() == 4.0 and calls == ["alone"]


@covers("BoxedCodeGen")
def test_derived_graphs_show_collectives_and_take_lists() -> None:
    """Forward and backward are cut by a function of ours and run from a list that they clear."""

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            sent = torch.ops._c10d_functional.all_reduce((x * x).exp(), "sum", "none")
            return (torch.ops._c10d_functional.wait_tensor(sent),)

    cut: list[torch.fx.GraphModule] = []

    def partition(joint: torch.fx.GraphModule, inputs: object, **more: int) -> object:
        cut.extend(default_partition(joint, inputs, **more))
        return tuple(cut)

    def compiler(gm: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
        raise AssertionError("the forward was cut, that is all")

    x = torch.ones(2, requires_grad=True)
    module = torch.fx.symbolic_trace(Sum())
    with pytest.raises(AssertionError, match="that is all"):
        aot_module_simplified(module, [x], compiler, compiler, partition)
    forward, _ = cut
    assert [n.name for n in forward.graph.nodes][:2] == ["primals_1", "mul"]
    assert "_c10d_functional.all_reduce" in forward.code
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("y"),)))
    graph.set_codegen(_compat.BoxedCodeGen())
    values = [torch.ones(1)]
    assert torch.fx.GraphModule(torch.nn.Module(), graph).forward(values).item() == -1
    assert values == []


@covers("below_autograd")
def test_below_autograd_nothing_is_recorded() -> None:
    x = torch.ones(2, requires_grad=True)
    with _compat.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


@covers("put_local", "fit_placing", "storage_key", "placings_of", "locals_of")
def test_a_dtensor_gets_another_own_part(group: dist.ProcessGroup) -> None:
    x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    own = torch.zeros(4)
    _compat.put_local(x, own)
    assert _compat.local_of(x) is own and x.sum().full_tensor() == 0
    assert _compat.storage_key(own[1:]) == _compat.storage_key(own)
    assert _compat.storage_key(own.clone()) != _compat.storage_key(own)
    placing = _compat.placing_of(x)
    assert _compat.placings_of([x, own]) == [placing, None]
    assert _compat.locals_of([x, x])[1] is _compat.local_of(x)
    assert _compat.fit_placing(placing, torch.float32) is placing
    fitted = _compat.fit_placing(placing, torch.bool)
    assert _compat.from_part(own > 0, fitted).dtype == torch.bool
    assert placing.tensor_meta is not None and placing.tensor_meta.dtype == torch.float32


@covers("from_part", "local_of", "placing_of")
def test_dtensors_are_taken_apart_and_put_together(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert _compat.local_of(x).data_ptr() == x.to_local().data_ptr()
    y = _compat.from_part(torch.zeros(4), _compat.placing_of(x))
    assert y.placements == x.placements and y.shape == x.shape and not y.requires_grad
    torch.testing.assert_close((x + y).full_tensor(), torch.arange(4.0))


@covers("explain_autograd_steps")
def test_a_search_for_nan_shows_where_a_function_comes_from() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * float("nan")

    for function in (Doubled.apply, torch.sqrt):
        with torch.autograd.detect_anomaly():
            before = torch.zeros(2, requires_grad=True).exp() - 1
            since = _compat.next_autograd_step()
            after = function(before) * 0  # two functions in a row
            _compat.explain_autograd_steps([after], since, "line 7 of the model")
            with (
                pytest.warns(UserWarning, match="line 7 of the model"),
                pytest.raises(RuntimeError, match="returned nan values"),
            ):
                after.sum().backward()
        assert "traceback_" in before.grad_fn.metadata
        assert before.grad_fn.metadata["traceback_"] != ["line 7 of the model"]


@covers("nan_checks")
def test_a_search_for_nan_knows_dtensors(group: dist.ProcessGroup) -> None:
    _compat.nan_checks()
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]).requires_grad_()
    with torch.autograd.detect_anomaly():
        (x * 2).sum().backward()
        with pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"):
            (x.sqrt() * 0).sum().backward()


@covers("autograd_step", "next_autograd_step")
def test_functions_of_autograd_are_numbered() -> None:
    seen = []
    first = _compat.next_autograd_step()
    x = torch.randn(3, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda gradient: seen.append(_compat.autograd_step()))

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            seen.append(_compat.autograd_step())
            return gradients[0]

    Watched.apply(y).sum().backward()
    assert first + 1 in seen and _compat.autograd_step() == -1


@covers("derive", "inductor_decompositions", "named_backend")
def test_both_graphs_are_compiled_at_once_by_any_backend() -> None:
    count: list[list[str]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> object:
        count.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(_compat.named_backend("eager")(graph, inputs))

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.nn.functional.silu, (x,)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    value = torch.ones(3, requires_grad=True)
    table = _compat.inductor_decompositions()
    run = _compat.derive(module, [value], compiler, default_partition, table)
    assert len(count) == 2 and not any("silu" in name for names in count for name in names)
    (result,) = run(value)
    result.sum().backward()
    wanted = torch.ones(3, requires_grad=True)
    torch.nn.functional.silu(wanted).sum().backward()
    torch.testing.assert_close(value.grad, wanted.grad)
    with pytest.raises(PlanError, match="knows no backend 'nonesuch'; it knows aot_eager"):
        _compat.named_backend("nonesuch")


@covers("dynamo_sources")
def test_dynamo_says_where_it_takes_inputs_from() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleList([torch.nn.BatchNorm1d(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[0](x)

    sources: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        sources.append(_compat.dynamo_sources(graph.graph))
        return graph.forward

    torch.compile(Model(), backend=backend)(torch.ones(3, 2))
    inner = "L['self']._modules['inner']._modules['0']"
    assert f"{inner}._parameters['weight']" in sources[0]
    assert f"{inner}._buffers['running_mean']" in sources[0]
    assert any("x" in name for name in sources[0] if "self" not in name)


def checkpointed_module(first: Callable[[torch.fx.Graph, torch.fx.Node], torch.fx.Node]) -> Any:
    """exp(sin(first(x))), whose first two ops have the tag of what is made again."""
    graph = torch.fx.Graph()
    middle = graph.call_function(torch.sin, (first(graph, graph.placeholder("x")),))
    for node in graph.nodes:
        if node.op == "call_function":
            again = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
            node.meta |= {"recompute": again, "ac_graph_id": 0}
    graph.output((graph.call_function(torch.exp, (middle,)),))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def boxed(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
    return make_boxed_func(gm.forward)


@covers("partition")
def test_what_is_tagged_is_made_again() -> None:
    """Attention among it, whose op torch takes for one that draws random numbers."""
    attention = torch.nn.functional.scaled_dot_product_attention
    module = checkpointed_module(lambda graph, x: graph.call_function(attention, (x, x, x)))
    cut: list[str] = []

    def parted(joint: torch.fx.GraphModule, inputs: object, **more: object) -> object:
        both = _compat.partition(joint, inputs, **more)
        cut.extend(part.code for part in both)
        return both

    value = torch.randn(1, 1, 4, 8, requires_grad=True)
    (y,) = _compat.derive(module, [value], boxed, parted)(value)
    y.sum().backward()
    assert [code.count("aten._scaled_dot_product_flash") for code in cut] == [1, 2]
    own, value.grad = value.grad, None
    torch.exp(torch.sin(attention(value, value, value))).sum().backward()
    torch.testing.assert_close(own, value.grad)


@pytest.mark.parametrize("draw", [torch.rand_like, torch.nn.functional.dropout])
def test_what_draws_random_numbers_is_not_made_again(draw: Callable[..., torch.Tensor]) -> None:
    module = checkpointed_module(
        lambda graph, x: graph.call_function(torch.mul, (x, graph.call_function(draw, (x,))))
    )
    value = torch.randn(3, requires_grad=True)
    with pytest.raises(AssertionError, match="made again with other random numbers: "):
        _compat.derive(module, [value], boxed, _compat.partition)


def test_attention_draws_where_it_drops() -> None:
    graph = torch.fx.Graph()
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    x = graph.placeholder("x")
    rates = [((x, x, x), {}), ((x, x, x, 0.0), {}), ((x, x, x, 0.1), {})]
    rates += [((x, x, x), {"dropout_p": 0.0}), ((x, x, x), {"dropout_p": 0.1})]
    draws = [compiling._draws(graph.call_function(op, *rate)) for rate in rates]
    assert draws == [False, False, True, False, True]


@covers("takes_a_list")
def test_a_function_of_a_list_is_distinguished_from_others() -> None:
    """AOTAutograd gives it a list, which it may clear."""
    seen: list[type] = []

    def compiler(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(values: list[torch.Tensor]) -> object:
            seen.append(type(values))
            return gm.forward(*values)

        assert _compat.takes_a_list(run) is run
        return run

    module = checkpointed_module(lambda graph, x: graph.call_function(torch.neg, (x,)))
    value = torch.randn(3, requires_grad=True)
    (y,) = _compat.derive(module, [value], compiler, _compat.partition)(value)
    y.sum().backward()
    assert seen == [list, list]


@covers("compile_in_order")
def test_inductor_compiles_one_graph() -> None:
    """What it keeps the order of is seen in test_backends.py."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    graph.output((product,))
    with _compat.fake_mode():
        example = torch.empty(2, 2)
        product.meta["val"] = x.meta["val"] = example
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    run = _compat.compile_in_order(module, [example], backward=False)
    (result,) = run([2 * torch.eye(2)])
    torch.testing.assert_close(result, 4 * torch.eye(2))


@pytest.mark.slow
@covers("compiled_for")
def test_a_function_is_compiled_for_each_shape() -> None:
    calls = []

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return x * 2 + y

    run = _compat.compiled_for(plain)
    for size in (3, 4, 3):
        x, y = torch.randn(2, size)
        assert torch.equal(run(x, y), x * 2 + y)
    assert calls == [(3,), (4,)]


@covers("compiled_for")
def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compiling, "_compiled", failing)
    run = _compat.compiled_for(lambda x: x * 2)
    with pytest.warns(UserWarning, match="op by op, as RuntimeError: no compiler"):
        assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))  # says it once


@covers("recording_again")
def test_an_op_may_record_gradients_within() -> None:
    @torch.library.custom_op("autopar_tests::slope", mutates_args=())
    def slope(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with _compat.recording_again():
            (derivative,) = torch.autograd.grad((x**3).sum(), x)
        assert not (x * 2).requires_grad  # off again
        return derivative

    slope.register_autograd(lambda ctx, gradient: gradient)
    assert torch.equal(slope(torch.ones(2, requires_grad=True)), torch.full((2,), 3.0))


@covers("differentiating", "unwrapped")
def test_a_function_knows_that_it_is_differentiated() -> None:
    seen, x = [], torch.ones(3)

    def square(point: torch.Tensor) -> torch.Tensor:
        seen.append(_compat.differentiating())
        inner = _compat.unwrap(point)
        assert not torch._C._functorch.is_functorch_wrapped_tensor(inner)
        assert inner.shape == x.shape and inner.data_ptr() == x.data_ptr()
        return (point**2).sum()

    torch.func.vmap(square)(x)
    torch.func.grad(square)(x)
    torch.func.vmap(torch.func.grad(square))(x)
    torch.func.jvp(square, (x,), (x,))
    square(x)
    assert seen == [False, True, True, True, False]
    assert not _compat.differentiating()


@covers("in_backward")
def test_a_backward_knows_that_it_is_one() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(_compat.in_backward()))
    (x * 2).sum().backward()
    assert seen == [True] and not _compat.in_backward()


@covers("scales_partial_gradients")
@pytest.mark.parametrize(("version", "scales"), [("2.11.0+cpu", False), ("2.13.0", True)])
def test_which_torch_keeps_what_is_written_into_partial_gradients(
    monkeypatch: pytest.MonkeyPatch, version: str, scales: bool
) -> None:
    """test_no_sync.py clips and steps on such gradients, where they are held."""
    monkeypatch.setattr(torch, "__version__", version)
    assert _compat.scales_partial_gradients() is scales


@covers("add_each")
def test_each_tensor_takes_another_one_in_place() -> None:
    sums, more = [torch.ones(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    places = [x.data_ptr() for x in sums]
    _compat.add_each(sums, more)
    _compat.add_each([], [])
    assert [x.tolist() for x in sums] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
    assert [x.data_ptr() for x in sums] == places


@covers("exporting")
def test_code_sees_that_it_is_exported() -> None:
    questions = torch.compiler.is_exporting, torch.compiler.is_compiling
    with _compat.exporting():
        assert all(ask() for ask in questions)
    assert not any(ask() for ask in questions)


@covers("version_of", "versions_of", "are_trained")
def test_a_distributed_tensor_counts_its_versions(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for x in (torch.ones(3), distribute_tensor(torch.ones(3), mesh, [Shard(0)])):
        before = _compat.version_of(x)
        x.add_(1)
        assert _compat.version_of(x) > before
        assert _compat.versions_of([x]) == [_compat.version_of(x)]
        assert _compat.are_trained([x, x.clone().requires_grad_()]) == [False, True]


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g / 2


_halve = _Halved.apply


@covers("apply_function", "functions_applied")
def test_functions_are_applied_by_whichever_name() -> None:
    calls: list[Any] = []

    def apply(function: Any, *args: Any) -> Any:
        calls.append(function)
        return _compat.apply_function(function, *args)

    x = torch.ones(2, requires_grad=True)
    with _compat.functions_applied(apply):
        (_halve(x) + _Halved.apply(x)).sum().backward()
    assert calls == [_Halved, _Halved]
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0]
    _halve(x)
    assert len(calls) == 2


@covers("BackwardHookFunction")
def test_backward_hooks_of_modules_are_applied_as_a_function() -> None:
    calls: list[Any] = []

    def apply(function: Any, *args: Any) -> Any:
        calls.append(function)
        return _compat.apply_function(function, *args)

    linear = torch.nn.Linear(2, 2)
    linear.register_full_backward_hook(lambda *_: None)
    with _compat.functions_applied(apply):
        linear(torch.ones(1, 2, requires_grad=True))
    assert set(calls) == {_compat.BackwardHookFunction}


@covers("checkpoints_inlined")
def test_inlined_checkpoints_run_once() -> None:
    runs: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    with _compat.checkpoints_inlined():
        result = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    result.sum().backward()
    assert len(runs) == 1
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(runs) == 3


@covers("without_torch_functions")
def test_without_torch_functions_no_mode_sees_a_call() -> None:
    seen: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode(), _compat.without_torch_functions():
        x.exp()
    assert seen == []


@covers("FakeTensor")
def test_a_fake_tensor_is_of_its_mode() -> None:
    mode = _compat.fake_mode()
    with mode:
        x = torch.ones(2)
    assert isinstance(x, _compat.FakeTensor) and x.fake_mode is mode


@covers("strict_fake_mode")
def test_a_strict_fake_mode_does_not_say_a_value() -> None:
    with _compat.strict_fake_mode():
        x = torch.ones(2)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(x.sum() > 1)


@covers("taken_apart")
def test_writes_of_a_composite_op_are_counted() -> None:
    op = torch.ops.aten.instance_norm.default
    mean, var = torch.zeros(6), torch.ones(6)
    result = _compat.taken_apart(op)(
        torch.randn(4, 6, 8), None, None, mean, var, True, 0.1, 1e-5, False
    )
    assert result.shape == (4, 6, 8) and bool(mean.any())
    assert _compat.version_of(mean) == 1 and _compat.version_of(torch.zeros(2)) == 0


@covers("has_kernel")
def test_kernels_are_known_by_their_key() -> None:
    aten = torch.ops.aten
    assert _compat.has_kernel(aten.einsum.default, "CompositeImplicitAutograd")
    assert _compat.has_kernel(aten.linear.default, "AutocastCPU")
    assert not _compat.has_kernel(aten.einsum.default, "AutocastCPU")
    assert not _compat.has_kernel(aten.mm.default, "CompositeImplicitAutograd")
    assert not _compat.has_kernel(aten.mm.default, "NoSuchKey")


@covers("name_of_calls")
def test_calls_are_named_as_torchs_tracers_name_them() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    calls = make_fx(lambda x: torch.ops.aten.__and__(x, x).split(1)[1])(torch.tensor([True, False]))
    graph = torch.fx.Graph()
    for node in calls.graph.find_nodes(op="placeholder"):
        graph.placeholder(node.name)
    for node in calls.graph.nodes:
        if node.op == "call_function":
            name = _compat.name_of_calls(graph, node.target)
            assert graph.create_node("call_function", node.target, name=name).name == node.name


@covers("graphs_not_written_out")
def test_graphs_are_written_out_when_they_are_called() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with _compat.graphs_not_written_out():
        module = make_fx(lambda x: x + 1)(torch.zeros(2))
    assert isinstance(module, _compat.LazyGraphModule)
    assert module(torch.zeros(2)).tolist() == [1.0, 1.0]


@covers("without_mask_detection")
def test_transformers_do_not_look_at_masks() -> None:
    """Only a hint says that one is causal; a mask on the meta device could not be looked at."""
    from torch.nn.modules import transformer

    detect = transformer._detect_is_causal_mask
    mask = torch.empty(4, 4, device="meta")
    with _compat.without_mask_detection():
        assert transformer._detect_is_causal_mask(mask, None, 4) is False
        assert transformer._detect_is_causal_mask(mask, is_causal=True) is True
    assert transformer._detect_is_causal_mask is detect


@covers("modes_on")
def test_modes_are_seen() -> None:
    assert not _compat.modes_on()
    with torch.device("meta"):
        assert _compat.modes_on()
    with _compat.fake_mode():
        assert _compat.modes_on()
    assert not _compat.modes_on()


@covers("LazyGraphModule")
def test_a_lazy_graph_module_is_compiled_when_it_is_called() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    module = _compat.LazyGraphModule(torch.nn.Module(), graph)
    assert isinstance(module, torch.fx.GraphModule) and module._needs_recompile()
    assert module(torch.ones(())).item() == -1 and not module._needs_recompile()
    assert "torch.neg" in module.code


def test_every_name_is_tested_here() -> None:
    assert set(_compat.__all__) == TESTED
