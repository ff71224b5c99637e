"""Corrects what AOTAutograd assumes as it derives the graphs: that values lie in memory as
predicted, and that every result gets a gradient.

The pass `views` makes a derived graph right for any memory layout of its inputs and intermediate
results:

    view(transpose(mse_loss_backward(...)), [48, 16])    ->    reshape(...)
    all_gather_into_tensor(x)                            ->    all_gather_into_tensor(contiguous(x))

AOTAutograd decides by predicted strides whether a reshape is a view and whether a copy can be left
out. The prediction fails where an op's kernel gives other strides than its meta function says (the
gradient of `mse_loss` of a transposed tensor), and where an input has other strides than in the
first step. Eager would copy there; a view raises, and `as_strided` would read other numbers.
`reshape` and `contiguous` copy only where they must. Views whose strides are certain stay: those of
matmuls, of collectives' results, and of everything with one dim.

Auxiliary outputs are results beside the loss, such as logits. A backward that AOTAutograd derives
takes a gradient of every result. Where the loss alone is differentiated, autograd makes zeros for
the others: for logits as many bytes again, and a pass over them. So the graphs are derived as if
auxiliary outputs were constants (`as_constants`). Where the gradient of one is taken after all, it
is computed through the emitted graph, which runs once more (`Late`, `rerun_for`); from the next
step on the graphs are derived with it. As with any gradient, all ranks take it or none.
runtime/backends.py calls these functions when it derives the graphs and when it returns results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import OpOverload
from autopar.cost.simulator.graph_events import carries_on, collective_of, is_wait, writes
from autopar.ir.graph import add_node, copy_graph
from autopar.ir.program import Program
from autopar.passes.overlap import DerivedGraph, GraphFacts, check_interface, collectives_in_order
from autopar.world import World

aten = torch.ops.aten

_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
_READERS = frozenset({aten.as_strided.default, aten.view.dtype, aten.view_as_complex.default})
_CERTAIN = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default})


# -- the memory layout of values -------------------------------------------------------------------
def views(derived: DerivedGraph, world: World) -> DerivedGraph:
    """Return the derived graph, in which views are reshapes where strides are uncertain, and in
    which what a collective sends is contiguous, as is what is reinterpreted as another dtype or by
    strides. Inductor makes these contiguous itself.
    """
    graph, operands = derived.graph, derived.compiler != "inductor"
    certain: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if not certain.issuperset(node.all_input_nodes):
            if node.target in _VIEWS:
                node.target = aten.reshape.default
            elif operands and _needs_contiguous(node):
                _make_contiguous(graph, node, certain)
        if _has_certain_strides(node, certain):
            certain.add(node)
    return derived


def check(before: GraphFacts, after: DerivedGraph) -> None:
    """The contract: no view takes a value whose strides are uncertain. The collectives are those
    that there were.
    """
    check_interface(before, after.graph)
    assert collectives_in_order(after.graph) == before.collectives, "other collectives"
    certain: set[fx.Node] = set()
    for node in after.graph.nodes:
        doubtful = set(node.all_input_nodes) - certain
        assert not (node.target in _VIEWS and doubtful), f"{node.name} views {doubtful}"
        if _has_certain_strides(node, certain):
            certain.add(node)


def _needs_contiguous(node: fx.Node) -> bool:
    """Whether an op reads its operands by their place in memory."""
    return node.target in _READERS or collective_of(node) is not None


def _has_certain_strides(node: fx.Node, certain: set[fx.Node]) -> bool:
    """Whether the strides of a result are those of its `meta["val"]` in every run."""
    if node.op != "call_function":
        return False
    if is_wait(node) or carries_on(node) or writes(node):
        return node.target is aten.contiguous.default or certain.issuperset(node.all_input_nodes)
    if node.target in _CERTAIN or collective_of(node) is not None or not node.all_input_nodes:
        return True
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() < 2


def _make_contiguous(graph: fx.Graph, node: fx.Node, certain: set[fx.Node]) -> None:
    """Make the uncertain operands contiguous that are predicted to be."""

    def ordered(operand: fx.Node) -> fx.Node:
        value: Any = operand.meta.get("val")
        predicted = isinstance(value, torch.Tensor) and value.is_contiguous()
        if operand in certain or not predicted:
            return operand
        contiguous = add_node(graph, aten.contiguous.default, (operand,), value)
        certain.add(contiguous)
        return contiguous

    assert isinstance(node.target, OpOverload)
    with graph.inserting_before(node):
        node.args = fx.node.map_arg(node.args, ordered)


# -- auxiliary outputs -----------------------------------------------------------------------------
Gradients = tuple[Tensor | None, ...]
Backward = Callable[[int, Tensor, Sequence[Tensor]], Gradients]


def aux_output_places(program: Program) -> frozenset[int]:
    """Return the places of the auxiliary outputs among the graph's results: what a user gets
    besides a scalar. Empty where no result is a scalar.
    """
    outputs = [(o.kind, o.node) for o in program.signature.outputs if o.node is not None]
    dims = {
        place: len(program.layouts[node].shape)
        for place, (kind, node) in enumerate(outputs)
        if kind == "user"
    }
    return frozenset(place for place, n in dims.items() if n) if 0 in dims.values() else frozenset()


def as_constants(module: fx.GraphModule, places: frozenset[int]) -> tuple[fx.GraphModule, set[int]]:
    """Return the module with these results detached, and a set. Tracing the module fills the set
    with the places of those that would have a gradient.
    """
    graph, differentiable = copy_graph(module.graph), set[int]()
    output = graph.output_node()
    returned: Any = output.args[0]
    results = list(returned)
    with graph.inserting_before(output):
        for place in sorted(places):
            results[place] = graph.call_function(
                _detach_and_note(place, differentiable), (results[place],)
            )
    output.args = (tuple(results),)
    return fx.GraphModule(module, graph), differentiable


def _detach_and_note(place: int, places: set[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that detaches a result, and notes its place if it had a gradient."""

    def constant(value: Tensor) -> Tensor:
        if value.requires_grad:
            places.add(place)
        return value.detach()

    return constant


class Late(torch.autograd.Function):
    """Returns a result whose gradient no derived backward takes. In the backward, `gradients`
    computes the gradients of the values that the result was made of.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: Backward, place: int, result: Tensor, *values: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.place = gradients, place
        ctx.save_for_backward(*values)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, *ctx.gradients(ctx.place, gradient, ctx.saved_tensors)


def rerun_for(
    module: fx.GraphModule, place: int, gradient: Tensor, values: Sequence[Tensor]
) -> Gradients:
    """Return gradients of the values by running the emitted graph once more. None where there is
    none.
    """
    leaves = [value.detach().requires_grad_(value.requires_grad) for value in values]
    differentiable = [value for value in leaves if value.requires_grad]
    with torch.enable_grad():
        result = module(*leaves)[place]
    gradients = iter(torch.autograd.grad(result, differentiable, gradient, allow_unused=True))
    return tuple(next(gradients) if value.requires_grad else None for value in leaves)
