"""What a backward that runs in two halves holds between them: of every product with a weight its
other operands and the gradient of its result, as the gradient of the weight is made of these later
(passes/overlap/split_backward.py).

An emitted graph enters `with_holds`, one that tells a `Holder` of its products leaves. peak.py runs
it on tensors without storage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar.cost import meta_kernels
from autopar.ir.graph import called_graphs
from autopar.ir.program import Program
from autopar.ops.recomputation import recompute_in_backward

aten = torch.ops.aten
# Ops whose backward gives all gradients at once, or cheaply: none of their operands is held. So it
# is with pointwise ops.
_AT_ONCE = frozenset(
    {
        aten.layer_norm.default,
        aten.native_layer_norm.default,
        aten.group_norm.default,
        aten.rms_norm.default,
        aten.convolution.default,
        meta_kernels.rms_norm,
    }
)


class Product(NamedTuple):
    """What is held of one op with weights, and the bytes of the gradients of these."""

    tensors: tuple[Tensor, ...]
    gradient_bytes: float


class Holder:
    """Holds, once the backward has come to an op with weights, what the rest of it takes."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self._by_name: dict[str, Tensor] = {}

    def hold(
        self,
        result: Any,
        operands: Sequence[Any],
        later_operands: Mapping[str, Any],
        weights: Sequence[Tensor],
    ) -> None:
        """Note an op, by its result and its operands besides weights: those that are there since
        the forward, and those that the backward computes again, once for all ops that take it by
        this name.
        """
        if not isinstance(result, Tensor) or not result.requires_grad:
            return
        own = [w for w in weights if isinstance(w, Tensor) and w.requires_grad]
        if not own:
            return
        size = float(sum(w.numel() * w.element_size() for w in own))
        there = tuple(x for x in operands if isinstance(x, Tensor))
        shapes = {
            name: (x.shape, x.dtype, x.device)
            for name, x in later_operands.items()
            if isinstance(x, Tensor)
        }

        def arrived(gradient: Tensor) -> None:
            for name, (shape, dtype, device) in shapes.items():
                if name not in self._by_name:
                    self._by_name[name] = torch.empty(shape, dtype=dtype, device=device)
            later = (self._by_name[name] for name in shapes)
            self.products.append(Product((*there, *later, gradient), size))

        result.register_hook(arrived)


def with_holds(program: Program, module: fx.GraphModule, holder: Holder) -> fx.GraphModule:
    """Return the module, of a program's graph, that tells `holder` of its ops with weights. It is
    changed on the way, and so are the graphs that it calls.
    """
    entries = program.signature.inputs
    stored = {e.node for e in entries if e.kind in ("parameter", "coordinate", "constant")}
    trained = {e.node for e in entries if e.kind == "parameter" and e.trainable}
    return _with_holds(module, stored, trained, holder, in_block=False, at_end=False)


def _with_holds(
    module: fx.GraphModule,
    stored: Collection[str],
    trained_names: Collection[str],
    holder: Holder,
    in_block: bool,
    at_end: bool,
) -> fx.GraphModule:
    graph = module.graph
    alone, trained = set[fx.Node](), set[fx.Node]()  # computed of what is stored, of weights
    for node in list(graph.nodes):
        inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
        if node.op == "placeholder":
            alone |= {node} if node.name in stored else set()
            trained |= {node} if node.name in trained_names else set()
        elif node.op != "call_function":
            continue
        elif blocks := called_graphs(module, node):
            for block in blocks:
                inner = block.graph.find_nodes(op="placeholder")
                pairs = list(zip(inner, node.args[2:], strict=True))
                own = {place.name for place, operand in pairs if operand in alone}
                own_trained = {place.name for place, operand in pairs if operand in trained}
                ordered = node.target is not recompute_in_backward  # by the places of its ops
                _with_holds(block, own, own_trained, holder, True, ordered)
        elif alone.issuperset(inputs):
            alone.add(node)
            trained |= {node} if not trained.isdisjoint(inputs) else set()
        elif not trained.isdisjoint(inputs) and not _at_once(node):
            others = [n for n in inputs if n not in alone]
            names = {f"{id(graph)} {n.name}": n for n in others}
            recomputable = {k: n for k, n in names.items() if in_block and n.op != "placeholder"}
            passed = [n for name, n in names.items() if name not in recomputable]
            own_weights = [n for n in inputs if n in trained]
            before = graph.output_node() if at_end else node.next
            with graph.inserting_before(before):
                graph.call_function(holder.hold, (node, passed, recomputable, own_weights))
    module.recompile()
    return module


def _at_once(node: fx.Node) -> bool:
    return node.target in _AT_ONCE or torch.Tag.pointwise in getattr(node.target, "tags", ())
