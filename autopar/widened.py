"""A program and its tensors in float64 on the CPU: what `verify` compares, so that rounding hides
nothing, and ranks that are threads of one process find their backward in their own thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.program import Program
from autopar.ops.devices import CPU, on_device


def widened(program: Program) -> Program:
    """The program in float64 on the CPU: its tensors, and every float cast, constant and device
    inside the graph.
    """
    graph = fx.Graph()
    output = graph.graph_copy(program.module.graph, {}, True)
    names = {node.name: node for node in program.module.graph.nodes}
    for node in graph.nodes:
        node.args = _wide(node.args)
        node.kwargs = _wide(node.kwargs)
        if node.name in names:
            node.meta = dict(names[node.name].meta)
    graph.output(output[0] if isinstance(output, tuple) else output)
    tensors = {name: to_double(tensor) for name, tensor in program.tensors.items()}
    module = on_device(fx.GraphModule(program.module, graph), CPU)
    return dataclasses.replace(program, module=module, tensors=tensors)


_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(_wide(item) for item in value)
    if isinstance(value, dict):
        return {key: _wide(item) for key, item in value.items()}
    return value


def to_double(tensor: Tensor) -> Tensor:
    """On the CPU; what is on the meta device has no numbers to bring."""
    device = tensor.device if tensor.is_meta else CPU
    return tensor.detach().to(device, _WIDE.get(tensor.dtype, tensor.dtype))


def is_inexact(tensor: Tensor) -> bool:
    """Whether it holds numbers that are rounded, as integers and flags are not."""
    return tensor.is_floating_point() or tensor.is_complex()


@contextmanager
def double_by_default() -> Iterator[None]:
    """What an op makes of integers (a quotient, a range of floats) has torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
