"""What stands in a graph in the place of operators that only derivatives have.

    native_layer_norm(x, …)[1]             ->    mean(x, …)
    convolution_backward(gradient, x, w)   ->    conv_transpose2d(gradient, w), conv2d(x, gradient)

Below autograd a norm is an operator that also returns its statistics, which its derivative takes;
and a derivative is an operator such as `convolution_backward`. Rules of sharding know the operators
that models call, and what autograd saved of a norm carries no gradient. So each of these operators
is written with others: the statistics as functions of the input, the derivatives as torch's own
decompositions have them. derivatives.py calls `written_with_others` when it runs a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar._compat import OpOverload

aten = torch.ops.aten
Op = Callable[..., Any]

_CONVOLUTIONS: dict[int, Op] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED: dict[int, Op] = {
    1: torch.conv_transpose1d,
    2: torch.conv_transpose2d,
    3: torch.conv_transpose3d,
}
_OTHERS = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
    aten._safe_softmax.default, aten.log_sigmoid_forward.default)  # fmt: skip


def written_with_others(op: Any) -> Op:
    """Return a function of other operators that gives what `op` does; `op` where it may stand."""
    return _table().get(op, op)


@cache
def _table() -> dict[Any, Op]:
    known = torch.export.default_decompositions()
    of_torch = {
        op: known[op]
        for op in known
        if isinstance(op, OpOverload)
        and (op in _OTHERS or "_backward" in op._schema.name)
        and torch.Tag.pointwise not in op.tags
    }
    return {
        **of_torch,
        aten.native_layer_norm.default: _layer_norm,
        aten.native_group_norm.default: _group_norm,
        aten.native_batch_norm.default: _batch_norm,
        aten.convolution.default: _convolution,
        aten.convolution_backward.default: _convolution_backward,
    }


# -- norms -----------------------------------------------------------------------------------------
def _statistics(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean over these dims, and one over the standard deviation."""
    variance, mean = torch.var_mean(x, list(dims), correction=0, keepdim=True)
    return mean, (variance + eps).rsqrt()


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = range(x.dim() - len(shape), x.dim())
    return torch.layer_norm(x, list(shape), weight, bias, eps), *_statistics(x, dims, eps)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, pixels: int,
    groups: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    mean, scale = _statistics(x.reshape(n, groups, -1), [2], eps)
    return torch.group_norm(x, groups, weight, bias, eps), mean.squeeze(2), scale.squeeze(2)


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    mean, scale = _statistics(x, [d for d in range(x.dim()) if d != 1], eps)
    result = torch.batch_norm(
        x, weight, bias, running_mean, running_var, training, momentum, eps, False
    )
    return result, mean.flatten(), scale.flatten()


# -- convolutions ----------------------------------------------------------------------------------
def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
) -> Tensor:  # fmt: skip
    dims = x.dim() - 2
    if transposed:
        by = stride, padding, output_padding, groups, dilation
        return torch.as_tensor(_TRANSPOSED[dims](x, weight, bias, *by))
    return torch.as_tensor(_CONVOLUTIONS[dims](x, weight, bias, stride, padding, dilation, groups))


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int],
    groups: int, wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of a convolution's operands: that of the input is the convolution the
    other way round, that of the weight one of the input with the gradient as its kernel, in which
    samples are channels.
    """
    of_x = of_weight = of_bias = None
    if wanted[0]:
        missing = [  # of the input's sizes: what the last step of the stride did not reach
            size - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
            for size, out, s, p, d, k in zip(
                x.shape[2:], gradient.shape[2:], stride, padding, dilation, weight.shape[2:]
            )
        ]
        back = (stride, padding, dilation, not transposed, [0] * len(stride))
        if not transposed:
            back = (*back[:4], missing)
        of_x = _cut(_convolution(gradient, weight, None, *back, groups), x)
    if wanted[1]:
        image, kernel = (gradient, x) if transposed else (x, gradient)
        channels = image.unflatten(1, (groups, -1)).transpose(0, 2).flatten(1, 2)
        result = _convolution(
            channels, kernel.transpose(0, 1), None, dilation, padding, stride, False, [], groups
        )
        of_weight = _cut(result.transpose(0, 1), weight)
    if wanted[2]:
        of_bias = gradient.sum([d for d in range(gradient.dim()) if d != 1])
    return of_x, of_weight, of_bias


def _cut(x: Tensor, like: Tensor) -> Tensor:
    """Return the first pixels of x, as many as the other tensor has."""
    for dim, size in enumerate(like.shape[2:], 2):
        x = x.narrow(dim, 0, size)
    return x
