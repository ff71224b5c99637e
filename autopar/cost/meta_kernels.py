"""Runs an emitted graph on tensors of torch's meta device, which have no storage, with the kernels
that the rank's device takes.

Meta tensors run in a third of the time of fake tensors. They choose a kernel by themselves where
that depends on the device, which decides what is saved for the backward:

- attention takes what a CPU would take, a GPU's too: a flash kernel, which saves no scores, or the
  product of all of them;
- rms_norm consists of four operators on a CPU, each of which saves what it needs; on a GPU it is
  one kernel that saves its operands and the scale of each row.

A graph enters `run_on_meta`, the graph that runs leaves. peak.py calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from autopar._compat import OpOverload, TorchDispatchMode, fake_mode, without_modes
from autopar.ir.graph import called_graphs
from autopar.ops.devices import rename_devices

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default  # saves no attention scores
META = torch.device("meta")


def run_on_meta(module: fx.GraphModule, on_gpu: bool = False) -> fx.GraphModule:
    """Return a copy of the module that runs on tensors of the meta device; `on_gpu` takes a GPU's
    rms_norm, which is one kernel.
    """
    graph, root = fx.Graph(), torch.nn.Module()
    output = graph.graph_copy(module.graph, {})
    for node in graph.nodes:
        node.args = rename_devices(node.args, lambda _: META)
        node.kwargs = rename_devices(node.kwargs, lambda _: META)
        if node.target is aten.scaled_dot_product_attention.default:
            node.target = attention
        elif node.target is aten.rms_norm.default and on_gpu:
            node.target = rms_norm
        elif node.op == "call_function" and _is_factory(node):
            node.kwargs = {**node.kwargs, "device": META}
        for block in called_graphs(module, node):
            name = next(n.target for n in node.all_input_nodes if n.op == "get_attr")
            root.add_module(str(name), run_on_meta(block, on_gpu))
    graph.output(output)
    return fx.GraphModule(root, graph)


def _is_factory(node: fx.Node) -> bool:
    """Whether the node is a factory op, which makes a tensor without taking one, on the device that
    its options name or on the default one.
    """
    if not isinstance(node.target, OpOverload) or node.all_input_nodes:
        return False
    by_name = node.target._schema.arguments[len(node.args) :]
    return any(argument.name == "device" for argument in by_name)


class _OperandTraits(NamedTuple):
    """The properties of an operand by which torch chooses a kernel."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    def empty_tensor(self) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return tensor.requires_grad_(self.trainable)


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
    """Run `aten.scaled_dot_product_attention` on meta tensors, with the kernel that a CPU takes."""
    operands = (query, key, value, attn_mask)
    flash_enabled = torch.backends.cuda.flash_sdp_enabled()  # the switch holds for every device
    traits = tuple(
        x if x is None else _OperandTraits(tuple(x.shape), x.stride(), x.dtype, x.requires_grad)
        for x in operands
    )
    if not _by_flash(traits, dropout_p, is_causal, scale, enable_gqa, flash_enabled):
        op = aten.scaled_dot_product_attention.default
        result: Tensor = op(*operands, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return result
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed, masked = (
            torch.tensor(x, dtype=query.dtype, device=META) for x in (0.0, -torch.inf)
        )
        attn_mask = torch.where(attn_mask, allowed, masked)
    options = {"attn_mask": attn_mask, "scale": scale}
    output: Tensor = FLASH(query, key, value, dropout_p, is_causal, **options)[0]
    return output


@lru_cache(maxsize=1 << 10)
def _by_flash(
    traits: tuple[_OperandTraits | None, ...],
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    allowed: bool,
) -> bool:
    """Whether a CPU runs these operands with the flash kernel, which saves no scores; found by a
    run on fake tensors. The modes and hooks that count memory do not see this run.
    """
    with without_modes(), saved_tensors_hooks(_save_nothing, _save_nothing), fake_mode():
        operands = [None if operand is None else operand.empty_tensor() for operand in traits]
        with _OpRecorder() as recorder:
            aten.scaled_dot_product_attention.default(
                *operands, dropout, causal, scale=scale, enable_gqa=grouped
            )
    return FLASH in recorder.ops


def _save_nothing(x: Any) -> Any:
    """Save nothing, as no backward follows."""
    return None


class _OpRecorder(TorchDispatchMode):
    """A dispatch mode that records the ops that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Run `aten.rms_norm` on meta tensors, as a GPU's kernel does; a GPU takes the operators of
    which it consists where the weight has another dtype.
    """
    if weight is not None and weight.dtype != x.dtype:
        result: Tensor = aten.rms_norm.default(x, normalized_shape, weight, eps)
        return result
    fused: Tensor = _FusedRmsNorm.apply(x, weight, len(normalized_shape))
    return fused


class _FusedRmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = (*x.shape[: x.dim() - dims], *(1,) * dims)
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None
