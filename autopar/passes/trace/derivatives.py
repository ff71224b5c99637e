"""Models whose forward takes derivatives: forces as -dE/dx, physics-informed nets, penalties on
gradients, a step of MAML.

    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True); return g.square().mean()
    ->    tanh = tanh(linear(x, w)); tanh_backward(mm(…), tanh); …; mean

torch.export records above autograd, where a derivative is a call into it and no operator. So such a
model is recorded below autograd first: `graph_below_autograd` gives a graph of operators in which
each derivative is written out, and within `forward_replaced` the model runs that graph, which
export follows as it follows any forward. What autograd saves for a backward it saves detached, and
those detaches would cut the graph when it is differentiated again: they are removed, and the user's
own, which `_MarkDetaches` sees, are kept.

`trace` asks `DerivativeCalls` whether a forward takes derivatives, and export.py records it.
original.py compares the results and gradients of every such trace with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx import traceback as node_meta
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from autopar._compat import differentiating, pytree
from autopar.ir.containers import tensors_in
from autopar.passes.trace.derivative_ops import written_with_others

aten = torch.ops.aten

_MARK = "autopar_detach"
_TENSOR = object()
_GRAD: Any = torch.autograd.grad
_DETACHES = {torch.Tensor.detach, torch.detach, torch.tensor, torch.as_tensor,
    torch.Tensor.new_tensor}  # fmt: skip


class DerivativeCalls(TorchFunctionMode):
    """Finds out, within its context, whether code takes derivatives: `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dual = getattr(func, "__name__", "") == "_make_dual"
        self.taken = self.taken or func is _GRAD or dual or differentiating()
        return func(*args, **(kwargs or {}))


class _MarkDetaches(TorchFunctionMode):
    """Marks the detaches that the user's code asks for. A derivative that is taken without
    `create_graph` is detached: no gradient flows into it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DETACHES:
            with node_meta.annotate({_MARK: True}):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is not _GRAD or _creates_graph(args, kwargs):
            return result
        with node_meta.annotate({_MARK: True}):
            return pytree.tree_map_only(torch.Tensor, lambda x: x.detach(), result)


def _creates_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of torch.autograd.grad gives derivatives that carry a gradient."""
    return bool(args[4] if len(args) > 4 else kwargs.get("create_graph", False))


class BelowAutograd(NamedTuple):
    """The graph of a forward with its derivatives written out. Its placeholders are the model's
    tensors, by `names`, and then the tensors among the arguments; it returns the tensors among
    the `leaves` of the result, and then the new values of `assigned` buffers.
    """

    module: fx.GraphModule
    names: list[str]
    leaves: list[Any]  # of the result; _TENSOR in the place of each tensor
    tree: pytree.TreeSpec
    assigned: list[str]
    fixed: dict[fx.Node, str]  # the placeholders of parameters and inputs, which stay as they are


def graph_below_autograd(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], modes: Callable[[], Any]
) -> BelowAutograd:
    """Record a call of the model on fake tensors, which it holds as well, below autograd, where a
    derivative is a number of operators. `modes` gives what the forward is to run within.
    """
    own = dict(_tensors_of(model))
    inputs = tensors_in((args, kwargs))
    facts: dict[str, Any] = {}

    def run(*_: torch.Tensor) -> list[torch.Tensor]:
        with _MarkDetaches(), modes(), _module_stacks(model), twice_differentiable():
            leaves, facts["tree"] = pytree.tree_flatten(model(*args, **kwargs))
        now = dict(model.named_buffers())
        facts["assigned"] = [n for n, x in now.items() if n in own and x is not own[n]]
        facts["leaves"] = [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        return [*tensors, *(now[name] for name in facts["assigned"])]

    with node_meta.preserve_node_meta(), _without_fused_layers():
        record = make_fx(run, record_stack_traces=True)
        module = record(*own.values(), *inputs)
    _join_saved(module.graph)
    module.recompile()
    placeholders = module.graph.find_nodes(op="placeholder")
    names = [*own, *(f"input {place}" for place in range(len(inputs)))]
    buffers = dict(model.named_buffers())
    fixed = {p: n for p, n in zip(placeholders, names, strict=True) if n not in buffers}
    return BelowAutograd(module, list(own), **facts, fixed=fixed)


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Let norms and recurrent layers run as operators with derivatives of every order: cuDNN's
    have no second one, and oneDNN's LSTM takes no float64 besides.
    """
    onednn: Any = torch.backends.mkldnn
    before = bool(onednn.enabled)
    try:
        onednn.enabled = False
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        onednn.enabled = before


def twice_differentiable() -> AbstractContextManager[None]:
    """Let attention run as matrix products and a softmax: its fused kernels have a backward that
    has no derivative.
    """
    return sdpa_kernel(SDPBackend.MATH)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _module_stacks(model: nn.Module) -> Iterator[None]:
    """Note on every node that is recorded which modules' forwards it lies in."""
    meta, names = node_meta.get_current_meta(), {id(m): n for n, m in model.named_modules()}
    stacks: list[dict[str, tuple[str, str]]] = [{}]

    def enter(module: nn.Module, _: Any) -> None:
        name, kind = names.get(id(module), ""), type(module).__qualname__
        meta["nn_module_stack"] = {**stacks[-1], f"{len(stacks)} {name}": (name, kind)}
        stacks.append(meta["nn_module_stack"])

    def leave(*_: Any) -> None:
        stacks.pop()
        meta["nn_module_stack"] = stacks[-1]

    with ExitStack() as hooks:
        hooks.callback(meta.pop, "nn_module_stack", None)
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


def _join_saved(graph: fx.Graph) -> None:
    """Remove the detaches that autograd made of what it saved, but not the user's."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        if not node.meta.get("custom", {}).get(_MARK):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


class _Replay(fx.Interpreter):
    """Runs a graph with operators that rules of sharding know."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return written_with_others(target)(*args, **kwargs)


@contextmanager
def forward_replaced(model: nn.Module, below: BelowAutograd) -> Iterator[None]:
    """Let the model's forward run this graph, on the tensors that the model holds then."""
    original = model.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = dict(_tensors_of(model))
        inputs = tensors_in((args, kwargs))
        with node_meta.preserve_node_meta():
            results = iter(_Replay(below.module).run(
                *(tensors[name] for name in below.names), *inputs
            ))  # fmt: skip
        leaves = [next(results) if leaf is _TENSOR else leaf for leaf in below.leaves]
        for name, value in zip(below.assigned, results, strict=True):
            owner, _, buffer = name.rpartition(".")
            setattr(model.get_submodule(owner), buffer, value)
        return pytree.tree_unflatten(leaves, below.tree)

    # The graph has the model's own hooks in it: they must not run around it once more.
    replaced = {"forward": forward, "_forward_hooks": {}, "_forward_pre_hooks": {}}
    before = dict(model.__dict__)
    model.__dict__.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del model.__dict__[name]
        model.__dict__.update({n: x for n, x in before.items() if n in replaced})
