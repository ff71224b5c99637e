"""Activation checkpointing in an emitted graph: blocks that run again in the backward, and weights
that are gathered again there.

passes/recompute.py puts `recompute_in_backward` around a block whose activations are not saved, and
`regather_in_backward` around a matmul whose gathered weight is not saved: the shard is, and the
gather runs again. runtime/backends.py calls `tag` and `spread`, which say the same to torch's
partitioners by tags. `interpret` runs an emitted graph node by node with a callback;
runtime/reference.py and runtime/verify.py use it.
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
from autopar.ir.graph import inline


def recompute_in_backward(block: fx.GraphModule, draws: bool, *inputs: Any) -> Any:
    """Return what `block` gives for these inputs; the backward runs it again, with its collectives.

    `draws`: the block draws random numbers from torch's generators, whose state is then saved so
    that the second run draws the same. Our own dropout (autopar/ops/sharded/dropout.py) needs no
    such state.
    """
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=draws)


def regather_in_backward(block: fx.GraphModule, fetching: int, *inputs: Any) -> Any:
    """Return what `block` gives for these inputs, without saving the weights that it gathers.

    The first `fetching` ops of the block fetch stored weights for the others. Their results are
    freed after the forward; when the backward needs them, these ops alone run again.
    """
    if torch.compiler.is_compiling():  # there the partitioner does it, by checkpoint's tags
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=_save_matmuls)
    split = _split_of(block, fetching)
    stored = [inputs[place] for place in split.needs]
    weights = split.fetch(*stored)
    with _DropAndRefetch(lambda: split.fetch(*stored), weights):
        return split.rest(*inputs, *weights)


def rerun_in_backward(block: fx.GraphModule, cheap: int, *inputs: Any) -> Any:
    """Return what `block` gives for these inputs, without saving what its first `cheap` ops make:
    cheap ones, and gathers of weights.

    What these ops save for their own backward is not saved either, as far as they made it. When the
    backward needs any of it, they alone run again, once.
    """
    if torch.compiler.is_compiling():  # there the partitioner does it, by checkpoint's tags
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=_save_matmuls)
    split = _split_of(block, cheap, keep_all=True)
    values = [inputs[place] for place in split.needs]
    rerun = _Rerun(lambda: split.fetch(*values))  # knows no hooks: a cycle would keep what it holds
    with saved_tensors_hooks(rerun.pack, rerun.unpack):
        results_of_cheap = split.fetch(*values)
        results = split.rest(*inputs, *results_of_cheap)
    rerun.drop(results_of_cheap, values)
    return results


class _Saved:
    """A tensor that autograd saved; later, where one of the results of the cheap ops holds it, only
    the place of that result, and its geometry.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.place = 0
        self.view = (tensor.size(), tensor.stride(), tensor.storage_offset())


class _Rerun:
    """What the cheap ops of one call made, as long as the backward needs it: `make` runs them."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]]) -> None:
        self.make = make
        self.results: tuple[Tensor, ...] | None = None
        self.saved: list[_Saved] = []
        self.dropped = self.left = 0

    def pack(self, tensor: Tensor) -> _Saved:
        """Hold a tensor that autograd saves, until `drop` says whether it may go."""
        self.saved.append(_Saved(tensor))
        return self.saved[-1]

    def unpack(self, saved: _Saved) -> Tensor:
        """Return a saved tensor; the first that was dropped makes all of them again, the last lets
        go of them.
        """
        if saved.tensor is not None:
            return saved.tensor
        if self.results is None:
            self.left = self.dropped
            with torch.no_grad():
                self.results = self.make()
        result = self.results[saved.place].as_strided(*saved.view)
        self.left -= 1
        if self.left <= 0:
            self.results = None
        return result

    def drop(self, results: Sequence[Any], remaining: Sequence[Any]) -> None:
        """Let go of what lies in the memory of these results, and not in that of what is kept."""
        own = {id(x.untyped_storage()) for x in remaining if isinstance(x, Tensor)}
        places = {
            id(x.untyped_storage()): place
            for place, x in enumerate(results)
            if isinstance(x, Tensor)
        }
        for saved in self.saved:
            assert saved.tensor is not None
            memory = id(saved.tensor.untyped_storage())
            if memory in places and memory not in own:
                saved.tensor, saved.place = None, places[memory]
                self.dropped += 1
        self.saved.clear()


class _DropAndRefetch(saved_tensors_hooks):
    """Saved-tensor hooks that save, for any view of one of these tensors, only its geometry; the
    backward calls `make` to get the tensors again.
    """

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], tensors: tuple[Tensor, ...]) -> None:
        places = {id(t.untyped_storage()): place for place, t in enumerate(tensors)}

        def pack(saved: Tensor) -> Any:
            place = places.get(id(saved.untyped_storage()))
            if place is None:
                return saved
            return place, saved.size(), saved.stride(), saved.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            place, *view = packed
            with torch.no_grad():
                return make()[place].as_strided(*view)

        super().__init__(pack, unpack)


CALLS = (recompute_in_backward, regather_in_backward, rerun_in_backward)


class _SplitBlock(NamedTuple):
    """A block in two graphs. `fetch` takes the block's inputs at the places `needs` and returns
    what `rest` uses of it; `rest` takes all inputs of the block, then these results.
    """

    fetch: fx.GraphModule
    needs: tuple[int, ...]
    rest: fx.GraphModule


def _split_of(block: fx.GraphModule, fetching: int, keep_all: bool = False) -> _SplitBlock:
    """Return the block split in two, cached in the block. `keep_all`: all tensors that the first
    one makes are among its results, but for those of reshards that it alone uses.
    """
    split: _SplitBlock | None = block.__dict__.get("_autopar_split")
    if split is None:
        split = block.__dict__["_autopar_split"] = _split_block(block, fetching, keep_all)
    return split


def _split_block(block: fx.GraphModule, fetching: int, keep_all: bool) -> _SplitBlock:
    """Split a block after its first `fetching` calls."""
    inputs = [n for n in block.graph.nodes if n.op == "placeholder"]
    calls = [n for n in block.graph.nodes if n.op == "call_function"]
    fetching_calls = dict.fromkeys(calls[:fetching])
    needs = tuple(
        place for place, n in enumerate(inputs) if not fetching_calls.keys().isdisjoint(n.users)
    )
    fetched = [
        n
        for n in fetching_calls
        if (keep_all and "step" not in n.meta) or not fetching_calls.keys() >= n.users.keys()
    ]
    fetch = _graph_of([inputs[place] for place in needs], fetching_calls, tuple(fetched))
    outputs = block.graph.output_node().args[0]
    return _SplitBlock(fetch, needs, _graph_of([*inputs, *fetched], calls[fetching:], outputs))


def _graph_of(inputs: Iterable[fx.Node], calls: Iterable[fx.Node], outputs: Any) -> fx.GraphModule:
    """Return a graph module of these calls."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(outputs, copies.__getitem__))
    return fx.GraphModule(torch.nn.Module(), graph)


def _save_matmuls() -> Any:
    """Return checkpoint contexts that save the results of matmuls and recompute everything else."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_matmul = getattr(op, "overloadpacket", op) in flop_registry
        return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def tag(module: fx.GraphModule) -> fx.GraphModule:
    """Return the module as one flat graph whose recomputed nodes have the tags of torch's
    partitioners: `CheckpointPolicy.MUST_RECOMPUTE`, and a number for each block.
    """
    flat = inline(module)
    numbers: dict[str, int] = {}
    for node in flat.graph.nodes:
        if "block" in node.meta and node.meta["again"]:
            number = numbers.setdefault(node.meta["block"], len(numbers))
            node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": number}
    return flat


def spread(joint: fx.Graph) -> None:
    """Extend the recomputation tags of a joint graph, traced from a tagged module, to views and
    copies of recomputed values, such as the transpose of a gathered weight that a matmul makes.
    """
    for node in joint.nodes:
        inputs = node.all_input_nodes
        if len(inputs) == 1 and "recompute" not in node.meta and _is_view_or_copy(node):
            marks = inputs[0].meta
            if marks.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE:
                node.meta |= {key: marks[key] for key in ("recompute", "ac_graph_id")}


def _is_view_or_copy(node: fx.Node) -> bool:
    """Whether the result of a node is its operand in another view, order, dtype or memory."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    aliases = [result.alias_info for result in target._schema.returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    return views or target.overloadpacket in _COPIES


_COPIES = (torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten._unsafe_view)


Visit = Callable[[fx.Node, Any], Any]  # (node, its result) -> the result that later nodes take


def interpret(module: fx.GraphModule, inputs: list[Any], visit: Visit) -> Any:
    """Run the graph node by node and return its outputs; `visit` is called at every node, within
    blocks too.
    """
    env: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            result = next(remaining)
        elif node.op == "get_attr":
            result = getattr(module, str(node.target))
        elif node.target in CALLS:
            block, _, *values = args
            result = interpret(block, values, visit)
        else:
            result = node.target(*args, **kwargs)
        env[node] = visit(node, result)
    raise AssertionError("a graph has an output")


def identity(_: fx.Node, result: Any) -> Any:
    """Return the result as it is: the visit that does nothing."""
    return result
