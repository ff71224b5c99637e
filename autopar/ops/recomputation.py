"""Parts of a graph whose values, or whose gathered weights, are not kept for the backward but made
again there.

Run an emitted graph node by node, with somebody looking on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from autopar._compat import OpOverload
from autopar.ir.graph import inlined


def recompute_in_backward(block: fx.GraphModule, draws: bool, *inputs: Any) -> Any:
    """What `block` gives for these inputs, its collectives included; the backward runs it again.

    `draws`: it draws random numbers from torch's generators, which must be the same again. Our own
    dropout (autopar/ops/sharded/dropout.py) does not.
    """
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=draws)


def regather_in_backward(block: fx.GraphModule, fetching: int, *inputs: Any) -> Any:
    """What `block` gives for these inputs. Its first `fetching` ops fetch stored weights, which the
    rest takes: what they give is dropped after the forward, and when the backward asks for it they
    alone run again.
    """
    if torch.compiler.is_compiling():  # there the partitioner does it, told by checkpoint's tags
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=_products_are_kept)
    parts = _parts(block, fetching)
    stored = [inputs[place] for place in parts.needs]
    weights = parts.fetch(*stored)
    with _Dropping(lambda: parts.fetch(*stored), weights):
        return parts.rest(*inputs, *weights)


class _Dropping(saved_tensors_hooks):
    """Autograd keeps, of all that shares memory with one of these tensors, only how to `make` them
    again.
    """

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], tensors: tuple[Tensor, ...]) -> None:
        places = {id(t.untyped_storage()): place for place, t in enumerate(tensors)}

        def pack(kept: Tensor) -> Any:
            place = places.get(id(kept.untyped_storage()))
            if place is None:
                return kept
            return place, kept.size(), kept.stride(), kept.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            place, *view = packed
            with torch.no_grad():
                return make()[place].as_strided(*view)

        super().__init__(pack, unpack)


class _Parts(NamedTuple):
    """A block in two: what fetches gives all that the rest takes of it, and needs these inputs of
    the block; the rest takes that after all inputs of the block.
    """

    fetch: fx.GraphModule
    needs: tuple[int, ...]
    rest: fx.GraphModule


def _parts(block: fx.GraphModule, fetching: int) -> _Parts:
    """Kept with the block."""
    found: _Parts | None = block.__dict__.get("_autopar_parts")
    if found is None:
        found = block.__dict__["_autopar_parts"] = _cut(block, fetching)
    return found


def _cut(block: fx.GraphModule, fetching: int) -> _Parts:
    inputs = [n for n in block.graph.nodes if n.op == "placeholder"]
    calls = [n for n in block.graph.nodes if n.op == "call_function"]
    first = dict.fromkeys(calls[:fetching])
    needs = tuple(place for place, n in enumerate(inputs) if not first.keys().isdisjoint(n.users))
    fetched = [n for n in first if not first.keys() >= n.users.keys()]
    fetch = _graph([inputs[place] for place in needs], first, tuple(fetched))
    given = block.graph.output_node().args[0]
    return _Parts(fetch, needs, _graph([*inputs, *fetched], calls[fetching:], given))


def _graph(inputs: Iterable[fx.Node], calls: Iterable[fx.Node], outputs: Any) -> fx.GraphModule:
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in inputs}
    for node in calls:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(fx.map_arg(outputs, made.__getitem__))
    return fx.GraphModule(torch.nn.Module(), graph)


def _products_are_kept() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = getattr(op, "overloadpacket", op) in flop_registry
        return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def tagged(module: fx.GraphModule) -> fx.GraphModule:
    """The same in one graph, in which what is made again in the backward has the marks that torch's
    partitioners want: `CheckpointPolicy.MUST_RECOMPUTE`, and a number for each block.
    """
    flat = inlined(module)
    numbers: dict[str, int] = {}
    for node in flat.graph.nodes:
        if "block" in node.meta and node.meta["again"]:
            number = numbers.setdefault(node.meta["block"], len(numbers))
            node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": number}
    return flat


def spread(joint: fx.Graph) -> None:
    """In a joint graph traced from that: what only shows or copies what is made again, as the
    product's own transpose of a gathered weight does, is not kept either.
    """
    for node in joint.nodes:
        inputs = node.all_input_nodes
        if len(inputs) == 1 and "recompute" not in node.meta and _copies(node):
            marks = inputs[0].meta
            if marks.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE:
                node.meta |= {key: marks[key] for key in ("recompute", "ac_graph_id")}


def _copies(node: fx.Node) -> bool:
    """Whether a node's result is its operand in another view, order, dtype or memory."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in _returns(target))
    return views or target.overloadpacket in _COPIES


def _returns(target: OpOverload) -> Sequence[Any]:
    found: Sequence[Any] = target._schema.returns
    return found


_COPIES = (torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten._unsafe_view)


Visit = Callable[[fx.Node, Any], Any]  # (node, what it gave) -> what the graph goes on with


def interpret(module: fx.GraphModule, inputs: list[Any], visit: Visit) -> Any:
    """Return what the graph returns; `visit` is called at every node, within blocks too."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            result = next(given)
        elif node.op == "get_attr":
            result = getattr(module, str(node.target))
        elif node.target in (recompute_in_backward, regather_in_backward):
            block, _, *values = args
            result = interpret(block, values, visit)
        else:
            result = node.target(*args, **kwargs)
        env[node] = visit(node, result)
    raise AssertionError("a graph has an output")


def unchanged(_: fx.Node, result: Any) -> Any:
    """The visit that does nothing."""
    return result
