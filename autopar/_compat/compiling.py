"""Private torch API that compiles graphs: AOTAutograd, torch.compile's backends, inductor.

All of it is imported where it is used: it takes a second, which planning does not need.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.errors import PlanError

Function = TypeVar("Function", bound=Callable[..., Any])
not_compiled = _disable_dynamo  # `torch.compiler.disable` without the import of dynamo


def constant_result(function: Function) -> Function:
    """Marks a function whose result dynamo takes as a constant, by calling it while it compiles:
    `torch.compiler.assume_constant_result` without the import of dynamo.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def derive(
    module: torch.fx.GraphModule,
    values: Sequence[torch.Tensor],
    compiler: Callable[..., Any],
    partition: Callable[..., Any],
    decompositions: dict[Any, Any] | None = None,
    *,
    keeps_saved: bool = True,
) -> Callable[..., Any]:
    """What runs the graphs that AOTAutograd derives from `module` for such values, cut in two by
    `partition`, each made runnable by `compiler(graph, example_inputs)`. Both are compiled before
    this returns: torch would otherwise compile the backward when it is first run, where a rank
    that fails leaves the others waiting. Where a script compiles the call of backward(), dynamo
    leaves them alone. `keeps_saved`: the backward writes to no value that the forward saved, so
    that it may run again, after `backward(retain_graph=True)`.
    """

    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext, detect_fake_mode, tracing

    def apart(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        run = compiler(gm, example_inputs)
        uncompiled: Callable[..., Any] = torch.compiler.disable(run)
        return takes_a_list(uncompiled) if getattr(run, "_boxed_call", False) else uncompiled

    def backward(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        metadata: Any = context.fw_metadata
        metadata.bw_donated_idxs = []  # what AOTAutograd lets a compiler overwrite
        return apart(gm, example_inputs)

    context = TracingContext(detect_fake_mode(values) or FakeTensorMode())
    with config.patch(force_non_lazy_backward_lowering=True), tracing(context):
        return aot_module_simplified(
            module,
            list(values),
            fw_compiler=apart,
            bw_compiler=backward if keeps_saved else apart,
            partition_fn=partition,
            decompositions=decompositions,
        )


def takes_a_list(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which AOTAutograd knows now that it takes all its values in one list,
    which it may clear.
    """
    marked: Any = run
    marked._boxed_call = True
    return run


def dynamo_sources(graph: torch.fx.Graph) -> list[str]:
    """Where dynamo takes the value of each placeholder from, as it writes that: "L['x']" for an
    argument, "L['self']._modules['up']._buffers['mean']". To be asked while a backend compiles the
    graph; "" for what it does not say of.
    """
    sources = []
    for node in graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        sources.append("" if source is None else str(source.name))
    return sources


def named_backend(name: str) -> Callable[..., Any]:
    """The backend that torch.compile knows by this name. Raises PlanError where it knows none."""
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    if name not in list_backends(exclude_tags=()):
        known = ", ".join(list_backends(exclude_tags=()))
        raise PlanError(f"torch.compile knows no backend {name!r}; it knows {known}")
    compiler: Callable[..., Any] = lookup_backend(name)
    return compiler


def partition(
    joint: torch.fx.GraphModule, inputs: Any, **more: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """torch's cut of a joint graph into forward and backward: what the backward needs is saved,
    unless its node is tagged to be made again. What is made again may draw no random numbers: torch
    would keep the generators' states for whatever has the tag of such an op, as attention without
    dropout has too, and is told here that there is nothing of the kind.
    """
    from torch._functorch import partitioners

    drawn = [n.name for n in joint.graph.nodes if partitioners.must_recompute(n) and _draws(n)]
    assert not drawn, f"made again with other random numbers: {', '.join(drawn)}"
    draws = partitioners.has_recomputable_rng_ops
    partitioners.has_recomputable_rng_ops = lambda fx_g: False
    try:
        return partitioners.default_partition(joint, inputs, **more)
    finally:
        partitioners.has_recomputable_rng_ops = draws


def _draws(node: torch.fx.Node) -> bool:
    """Whether an op takes numbers from torch's generators; attention does for dropout alone."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    assert isinstance(node.target, OpOverload)
    arguments = enumerate(node.target._schema.arguments)
    rates = [(place, argument) for place, argument in arguments if argument.name == "dropout_p"]
    if not rates:
        return True
    ((place, rate),) = rates
    drop_rate = node.args[place] if place < len(node.args) else node.kwargs.get(rate.name)
    return bool(rate.default_value if drop_rate is None else drop_rate)


# -- inductor --------------------------------------------------------------------------------------
def inductor_decompositions() -> dict[Any, Any]:
    """What graphs must be decomposed by for `compile_in_order`."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def compile_in_order(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], backward: bool
) -> Callable[..., Any]:
    """A functional ATen graph compiled by inductor, which may fuse what it likes but keeps the
    order of collectives, waits, products and other extern kernels among themselves.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    output = graph.graph.output_node()
    results = pytree.tree_leaves(output.args)
    output.meta["user_visible_output_idxs"] = [  # with the strides that the other graph expects
        place for place, result in enumerate(results) if isinstance(result, torch.fx.Node)
    ]
    mode = next(x.fake_mode for x in example_inputs if isinstance(x, FakeTensor))
    with V.set_fake_mode(mode), config.patch(_keeping_order()):
        compiled: Callable[..., Any] = compile_fx_inner(graph, example_inputs, is_backward=backward)
    return compiled


def compiled_for(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of tensors whose gradients nobody asks for, compiled by inductor for the shapes,
    dtypes and devices that it is called with: without dynamo, which would compare all it knows of
    them at every call. Where inductor fails, as without a compiler, it warns and runs as it is.
    """
    by_key: dict[Any, Callable[..., Any]] = {}

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        key = tuple((x.shape, x.stride(), x.dtype, x.device) for x in inputs)
        if key not in by_key:
            try:
                by_key[key] = _compiled(plain, inputs)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:500]
                warnings.warn(f"autopar: a mask is made op by op, as {why}", stacklevel=2)
                by_key[key] = lambda *args: [plain(*args)]
        result: torch.Tensor = by_key[key](*inputs)[0]
        return result

    return run


def _compiled(plain: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    from torch._inductor import compile as compiled
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        graph = make_fx(lambda *args: [plain(*args)], tracing_mode="fake")(*inputs)
        run: Callable[..., Any] = compiled(graph, list(inputs))
    return run


def _keeping_order() -> dict[str, Any]:
    """Settings of inductor under which nothing but `_chained` says what comes first. It chains what
    must keep its order before anything is fused: a fusion that would pull a wait forward makes a
    cycle then, which inductor refuses.
    """
    from torch._inductor import custom_graph_pass

    settings: dict[str, Any] = {
        "reorder_for_peak_memory": False,
        "reorder_for_compute_comm_overlap": False,
        "reorder_for_locality": False,
        "aten_distributed_optimizations.enable_overlap_scheduling": False,
    }
    if not hasattr(custom_graph_pass, "CustomSchedulerPass"):
        # before torch 2.13 any function is taken, which the cache of compiled graphs does not see
        return {**settings, "fx_graph_cache": False, "_pre_fusion_custom_pass": _chained}

    class InOrder(custom_graph_pass.CustomSchedulerPass):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return _chained(nodes)

        def uuid(self) -> str:
            return "autopar: in order, 1"

    return {**settings, "_pre_fusion_custom_pass": InOrder()}


def _chained(nodes: list[Any]) -> list[Any]:
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    anchors = [n for n in nodes if isinstance(n, ExternKernelSchedulerNode) or n.is_template()]
    for before, after in pairwise(anchors):
        mutating = next(iter(after.get_buffer_names()))
        known = {dep.name for dep in after.unmet_dependencies}
        if known.isdisjoint(before.get_buffer_names()):
            for name in before.get_buffer_names():
                after.add_fake_dep(WeakDep(name, mutating_buf=mutating, is_fake=True))
    if anchors:
        scheduler = anchors[0].scheduler
        scheduler.nodes = nodes
        scheduler.compute_ancestors()  # what fusions are held against
    return nodes
