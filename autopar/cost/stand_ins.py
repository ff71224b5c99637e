"""An emitted graph for tensors without storage, which are torch's meta device: what holds which
memory can be run there at a third of the time that fake tensors take.

Meta tensors decide by themselves how an op is run where that depends on the device. That is so for
attention, which here keeps what it keeps on a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from autopar._compat import OpOverload, TorchDispatchMode, fake_mode, without_modes
from autopar.ir.graph import called
from autopar.ops.devices import renamed

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default  # keeps no scores
META = torch.device("meta")


def on_stand_ins(module: fx.GraphModule) -> fx.GraphModule:
    """The module, for tensors of the meta device."""
    graph, root = fx.Graph(), torch.nn.Module()
    output = graph.graph_copy(module.graph, {})
    for node in graph.nodes:
        node.args = renamed(node.args, lambda _: META)
        node.kwargs = renamed(node.kwargs, lambda _: META)
        if node.target is aten.scaled_dot_product_attention.default:
            node.target = attention
        elif node.op == "call_function" and _makes(node):
            node.kwargs = {**node.kwargs, "device": META}
        for block in called(module, node):
            name = next(n.target for n in node.all_input_nodes if n.op == "get_attr")
            root.add_module(str(name), on_stand_ins(block))
    graph.output(output)
    return fx.GraphModule(root, graph)


def _makes(node: fx.Node) -> bool:
    """Whether it is an op that makes a tensor of none."""
    if not isinstance(node.target, OpOverload) or node.all_input_nodes:
        return False
    return any(argument.name == "device" for argument in node.target._schema.arguments)


class _Looks(NamedTuple):
    """What torch looks at of an operand to choose a kernel."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    def made(self) -> Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return made.requires_grad_(self.trainable)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`aten.scaled_dot_product_attention` of meta tensors, by the kernel that a CPU takes."""
    operands = (query, key, value, attn_mask)
    allowed = torch.backends.cuda.flash_sdp_enabled()  # of all devices
    looks = tuple(None if x is None else _look(x) for x in operands)
    if not _by_flash(looks, dropout_p, is_causal, scale, enable_gqa, allowed):
        op = aten.scaled_dot_product_attention.default
        result: Tensor = op(*operands, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return result
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        on, off = (torch.tensor(x, dtype=query.dtype, device=META) for x in (0.0, -torch.inf))
        attn_mask = torch.where(attn_mask, on, off)
    more = {"attn_mask": attn_mask, "scale": scale}
    found: Tensor = FLASH(query, key, value, dropout_p, is_causal, **more)[0]
    return found


def _look(x: Tensor) -> _Looks:
    return _Looks(tuple(x.shape), x.stride(), x.dtype, x.requires_grad)


@lru_cache(maxsize=1 << 10)
def _by_flash(
    looks: tuple[_Looks | None, ...],
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    allowed: bool,
) -> bool:
    """Whether a CPU runs it by the kernel that keeps no scores: seen on fake tensors. Who counts
    what is made, or what a block saves, does not hear of it.
    """
    with without_modes(), saved_tensors_hooks(_nothing, _nothing), fake_mode():
        given = [None if look is None else look.made() for look in looks]
        with _Ran() as ran:
            aten.scaled_dot_product_attention.default(
                *given, dropout, causal, scale=scale, enable_gqa=grouped
            )
    return FLASH in ran.ops


def _nothing(x: Any) -> Any:
    """No backward follows."""
    return None


class _Ran(TorchDispatchMode):
    """Notes the ops that run while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))
