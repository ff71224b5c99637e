"""fill: products write their results where a bucket wants them.

The gradients that go as one are copied together (joint.py), as many bytes as the model has, into
memory that is touched for the first time. A product can write into its part of that memory itself.
Nothing else may read the product: a bucket is summed where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.graph import computed, made

aten = torch.ops.aten

_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.t, aten.transpose, aten.permute)


def fill(graph: fx.Graph, room: float = math.inf) -> int:
    """Let products fill the buckets that they are copied into, in a graph whose order is final; how
    many do. `room`: the bytes of buckets that may be there before they are full.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    count = 0
    for node in list(place):
        value = node.meta.get("val")
        if node.target is not aten.cat.default or value.dim() != 1 or value.nbytes > room:
            continue
        products = [_product(part) for part in node.all_input_nodes]
        able = [product for product in products if product is not None]
        if able and len(products) == len(node.args[0]):  # none twice
            _fill(graph, node, products, min(able, key=place.__getitem__))
            room -= value.nbytes
            count += len(able)
    return count


def _product(part: fx.Node) -> fx.Node | None:
    """The product whose numbers a part of a bucket is, in their order, if nothing else reads it."""
    node = part
    while len(node.users) == 1 and getattr(node.target, "overloadpacket", None) in _RESHAPES:
        shown = node.all_input_nodes[0]
        if node.target is aten.reshape.default and not shown.meta["val"].is_contiguous():
            return None  # a copy in another order
        node = shown
    alone = node.target is aten.mm.default and len(node.users) == 1
    return node if alone and node.meta["val"].is_contiguous() else None


def _fill(
    graph: fx.Graph, bucket: fx.Node, products: Sequence[fx.Node | None], first: fx.Node
) -> None:
    value, parts = bucket.meta["val"], bucket.all_input_nodes
    with graph.inserting_before(first):
        kind = {"dtype": value.dtype, "device": value.device}
        whole = made(graph, aten.empty.memory_format, ([value.numel()],), value, kind)
    bucket.replace_all_uses_with(whole)
    start = 0
    for part, product in zip(parts, products, strict=True):
        stop = start + part.meta["val"].numel()
        with graph.inserting_before(product or bucket):
            slot = computed(graph, aten.slice.Tensor, (whole, 0, start, stop))
            if product is None:
                made(graph, aten.copy_.default, (slot, part), slot.meta["val"])
            else:
                own = product.meta["val"]
                slot = computed(graph, aten.view.default, (slot, list(own.shape)))
                made(graph, aten.mm.out, product.args, own, {"out": slot}).meta = product.meta
        start = stop
    graph.erase_node(bucket)
    for part, product in zip(parts, products, strict=True):
        node = part
        while product is not None and not node.users:
            unused, node = node, node.all_input_nodes[0]
            graph.erase_node(unused)
            if unused is product:
                break
