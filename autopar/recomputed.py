"""Parts of a graph whose values, or whose gathered weights, are not kept for the backward but made
again there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def recomputed(block: fx.GraphModule, draws: bool, *inputs: Any) -> Any:
    """What `block` gives for these inputs, its collectives included; the backward runs it again.

    `draws`: it draws random numbers from torch's generators, which must be the same again. Our own
    dropout (autopar/sharded/dropout.py) does not.
    """
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=draws)


def regathered(block: fx.GraphModule, fetching: int, *inputs: Any) -> Any:
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
