"""One call or more of every op in the rule table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from argument_cases import ARGUMENTS, CREATED_LIKE
from autopar.ops import sharded
from autopar.ops.sharded.masked_attention import BLOCK_MASK, MASKED_ATTENTION
from expert_cases import EXPERT_LAYERS
from index_cases import ALONG, INDEX_DIGITS, INDEXED, OTHER_PRODUCTS
from loss_cases import LOSS_CASES, LOSS_DIGITS
from recurrent_cases import RECURRENT
from shards import SEED, Case, call, flags, integers, real
from window_cases import GROUPS, WINDOW_DIGITS, WINDOWS

aten = torch.ops.aten


def same(*targets: Any, args: tuple[Any, ...] = (), **kwargs: Any) -> list[Case]:
    """Each of these ops on one tensor."""
    return [call(target, real(6, 1, 12), *args, **kwargs) for target in targets]


def dropped(x: Tensor) -> Tensor:
    return sharded.dropout(x, 0.4, torch.tensor(SEED), [], [()] * x.dim(), list(x.shape))


def drawn(kind: Any, low: int, high: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    size, digits = (6, 12), ((), ())
    return lambda: sharded.draw(
        kind, (low, high), size, dtype, torch.tensor(SEED), [], digits, size
    )


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shape = [*q.shape[:-1], k.shape[-2]]
    return sharded.attention(
        q, k, v, None, 0.4, True, None, torch.tensor(SEED), [], [()] * 4, shape
    )


def attention(query: tuple[int, ...], key: tuple[int, ...], *rest: Any, **options: Any) -> Case:
    return call(
        aten.scaled_dot_product_attention.default,
        real(*query),
        real(*key),
        real(*key[:-1], 5),
        *rest,
        **options,
    )


def masked(
    *sizes: int, heads: tuple[int, int] = (6, 6), pairs: int = 1, band: Any, **more: Any
) -> Case:
    """Attention of a batch of 4 under a description: segments, and the padding of keys."""
    queries, keys = sizes
    vectors = [integers(3, 4, queries), torch.ones(1, queries, dtype=torch.bool)]
    others = [integers(3, 4, keys), flags(4, keys)]
    operands = real(4, heads[0], queries, 3), real(4, heads[1], keys, 3), real(4, heads[1], keys, 5)
    compare = " ".join(["ge", "eq"][:pairs])
    description = (vectors[:pairs], others[:pairs], compare)
    return call(MASKED_ATTENTION, *operands, *description, *band, None, [], [], **more)


def cross_entropy(logits: tuple[int, ...], *rest: Any, note: str) -> Case:
    shape = (*logits[:1], *logits[2:]) if len(logits) > 1 else ()
    target = integers(logits[min(1, len(logits) - 1)], *shape)
    if shape:
        target.view(-1)[1:4] = -100  # ignored: unequal numbers of them on the shards
    return call(aten.cross_entropy_loss.default, real(*logits), target, *rest, note=note)


PRODUCTS = [
    call(aten.linear.default, real(4, 6, 12), real(6, 12), real(6)),
    call(aten.linear.default, real(6, 12), real(6, 12), note="no bias"),
    call(aten.linear.default, real(12), real(6, 12), real(6), note="vector"),
    call(aten.mm.default, real(6, 12), real(12, 6)),
    call(aten.bmm.default, real(6, 4, 12), real(6, 12, 6)),
    call(aten.addmm.default, real(6), real(4, 12), real(12, 6)),
    call(aten.addmm.default, real(4, 6), real(4, 12), real(12, 6), note="matrix"),
    call(aten.addmm.default, real(1, 6), real(4, 12), real(12, 6), beta=0.5, alpha=2, note="row"),
    call(aten.matmul.default, real(2, 6, 4, 12), real(6, 12, 6)),
    call(aten.matmul.default, real(2, 1, 4, 12), real(6, 12, 6), note="broadcast"),
    call(aten.matmul.default, real(12), real(6, 12, 4), note="vector left"),
    call(aten.matmul.default, real(6, 4, 12), real(12), note="vector right"),
    call(aten.matmul.default, real(12), real(12), note="dot"),
    call(aten.conv1d.default, real(6, 4, 8), real(6, 4, 3), real(6), [1], [1]),
    call(
        aten.conv1d.default, real(4, 6, 8), real(12, 1, 3), None, [1], [2], [1], 6, note="depthwise"
    ),
    call(aten.conv2d.default, real(4, 6, 5, 5), real(6, 6, 3, 3), real(6), [2, 2]),
    call(
        aten.conv2d.default,
        real(4, 6, 5, 5),
        real(12, 2, 3, 3),
        real(12),
        [1, 1],
        [1, 1],
        [1, 1],
        3,
        note="groups",
    ),
    call(aten.conv2d.default, real(6, 5, 5), real(6, 6, 3, 3), note="no batch"),
    call(aten.conv2d.padding, real(4, 6, 5, 5), real(6, 6, 3, 3), real(6), [1, 1], "same"),
    call(aten.conv1d.padding, real(4, 6, 5), real(6, 6, 3), None, [1], "same"),
    call(aten.conv3d.padding, real(2, 6, 3, 3, 3), real(6, 6, 2, 2, 2), None, [1, 1, 1], "valid"),
    call(aten.conv3d.default, real(2, 6, 3, 3, 3), real(6, 6, 2, 2, 2), real(6)),
]
NORMS = [
    call(aten.embedding.default, real(12, 6), integers(12, 4, 6)),
    call(aten.embedding.default, real(12, 6), integers(12, 4, 6), 3, note="padding"),
    call(aten.layer_norm.default, real(4, 6, 12), [12], real(12), real(12)),
    call(aten.layer_norm.default, real(4, 6, 12), [12], note="plain"),
    call(
        aten.layer_norm.default, real(4, 6, 12), [6, 12], real(6, 12), real(6, 12), note="two dims"
    ),
    call(aten.layer_norm.default, real(4, 6, 12), [6, 12], note="two dims, plain"),
    call(aten.rms_norm.default, real(4, 6, 12), [12], real(12)),
    call(aten.rms_norm.default, real(4, 6, 12), [12], note="plain"),
    call(aten.rms_norm.default, real(4, 6, 12), [6, 12], note="two dims"),
    call(
        aten._native_batch_norm_legit_functional.default,
        *(
            real(4, 12, 6),
            real(12),
            real(12),
            real(12).detach(),
            real(12, low=0.1).detach(),
            True,
            0.1,
            1e-5,
        ),
    ),
    call(aten._native_batch_norm_legit.no_stats, real(6, 12), None, None, True, 0.1, 1e-5),
    call(
        aten._native_batch_norm_legit_no_training.default,
        *(real(4, 12, 6), real(12), None, real(12).detach(), real(12, low=0.1).detach(), 0.1, 1e-5),
    ),
    *(call(f, real(4, 12, 6), 1) for f in (aten.softmax.int, aten.log_softmax.int)),
    *(call(f, real(4, 12), -1, False) for f in (aten._softmax.default, aten._log_softmax.default)),
    call(aten.softmax.int, real(4, 12), -1, torch.float32, note="float32"),
]
POINTWISE = [
    *same(
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.contiguous.default,
        aten.lift_fresh_copy.default,
        aten.ones_like.default,
        aten.zeros_like.default,
        aten.relu.default,
        aten.silu.default,
        aten.gelu.default,
        aten.softplus.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.elu.default,
        aten.selu.default,
        aten.mish.default,
        aten.log_sigmoid.default,
        aten.relu6.default,
        aten.hardswish.default,
        aten.neg.default,
        aten.tanh.default,
        aten.sigmoid.default,
        aten.exp.default,
        aten.sin.default,
        aten.cos.default,
        aten.abs.default,
        aten.logical_not.default,
        aten.isnan.default,
        aten.reciprocal.default,
        aten.square.default,
        aten.erf.default,
    ),
    *same(
        aten.full_like.default,
        aten.add.Scalar,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.sub.Scalar,
        args=(3,),
    ),
    *same(
        aten.pow.Tensor_Scalar,
        aten.rsub.Scalar,
        aten.fmod.Scalar,
        aten.gt.Scalar,
        aten.le.Scalar,
        args=(2,),
    ),
    *same(aten.clamp.default, args=(-0.5, 0.5)),
    *same(aten._to_copy.default, dtype=torch.float32),
    *same(aten.to.dtype, args=(torch.float32,)),
    call(aten._to_copy.default, integers(9, 6, 12), dtype=torch.float64, note="from integers"),
    call(aten.dropout.default, real(6, 12), 0.4, False),
    call(aten.dropout.default, real(6, 12), 0.4, True, note="train", reference=dropped),
    *(
        call(f, real(6, 12, low=0.1))
        for f in (aten.rsqrt.default, aten.sqrt.default, aten.log.default)
    ),
    call(aten.frexp.Tensor, real(6, 12)),
    *(
        call(f, real(4, 6, 12), real(6, 1, low=0.1), note="broadcast")
        for f in (
            aten.add.Tensor,
            aten.sub.Tensor,
            aten.mul.Tensor,
            aten.div.Tensor,
            aten.maximum.default,
            aten.atan2.default,
        )
    ),
    call(aten.add.Tensor, real(6, 12), real(6, 12), alpha=2),
    call(aten.add.Tensor, real(6, 12), 2.0, note="number"),
    call(aten.add.Tensor, real(6, 12), integers(5, 12), note="integers"),
    call(aten.mul.Tensor, real(6, 12), real(6, 12)),
    call(aten.mul.Tensor, real(6, 12), flags(6, 12), note="flags"),
    call(aten.mul.Tensor, integers(5, 6, 12), real(12), note="integers first"),
    call(aten.div.Tensor, real(6, 12), integers(3, 1, 12) + 1, note="integers"),
    call(aten.div.Tensor_mode, real(6, 12), real(12, low=0.1), rounding_mode="floor"),
    call(aten.pow.Tensor_Tensor, real(6, 12, low=0.1), real(12)),
    call(aten.eq.Tensor, integers(3, 6, 1), integers(3, 12)),
    call(aten.lt.Tensor, real(6, 12), real(12)),
    call(aten.logical_and.default, flags(6, 12), flags(12)),
    call(aten.bitwise_and.Tensor, flags(6, 1), flags(12)),
    *(
        call(f, flags(6, 1), flags(6, 12))
        for f in (aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor)
    ),
    call(aten.bitwise_not.default, flags(6, 12)),
    call(aten.addcmul.default, real(6, 12), real(12), real(6, 1)),
    call(aten.lerp.Tensor, real(6, 12), real(12), real(6, 1)),
    call(aten.masked_fill.Scalar, real(6, 12), flags(12), -1e4),
    call(aten.masked_fill.Scalar, real(6, 12), flags(12), 0, note="zero"),
    call(aten.masked_fill.Tensor, real(6, 12), flags(6, 1), real()),
    call(aten.where.self, flags(6, 1), real(6, 12), real(12)),
    call(aten.where.self, flags(6, 12), real(6, 12), integers(4, 12), note="integers"),
    call(aten.where.ScalarOther, flags(6, 12), real(6, 12), 0.0),
    call(aten.where.ScalarSelf, flags(6, 12), 1.0, real(6, 12)),
    call(aten.where.Scalar, flags(6, 12), 1.0, 0.0),
    call(aten.copy.default, real(6, 12).detach(), real(12).detach()),
]
VIEWS = [
    *(
        call(f, real(8, 4, 5), [2, 16, 5])
        for f in (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
    ),
    call(aten.view.default, real(4, 6, 12), [24, 12], note="merge"),
    call(aten.view.default, real(24, 12), [4, 6, 3, 4], note="split"),
    call(aten.view.default, real(12, 6), [9, 8], note="no chain"),
    call(aten.view.default, real(1, 6, 1, 12), [72], note="ones"),
    call(aten.flatten.using_ints, real(4, 6, 12), 1),
    call(aten.unflatten.int, real(4, 24), 1, [4, 6]),
    call(aten.squeeze.dim, real(6, 1, 12), 1),
    call(aten.squeeze.dims, real(6, 1, 12, 1), [1, 3]),
    call(aten.squeeze.default, real(2, 1, 3)),
    call(aten.unsqueeze.default, real(6, 12), 1),
    call(aten.view_as.default, real(6, 4), real(24)),
    call(aten.permute.default, real(4, 6, 12), [2, 0, -2]),
    call(aten.transpose.int, real(4, 6, 12), 0, -1),
    call(aten.t.default, real(6, 12)),
    call(aten.t.default, real(6), note="vector"),
    call(aten.numpy_T.default, real(4, 6, 12)),
    call(aten.expand.default, real(6, 1, 12), [4, -1, 6, 12]),
    call(aten.expand_as.default, real(6, 1), real(4, 6, 12)),
    call(aten.broadcast_to.default, real(6, 1), [4, 6, 12]),
]
PIECES = [
    call(aten.split.Tensor, real(6, 24), 12, 1),
    call(aten.split.Tensor, real(6, 24), 12, -1, note="negative dim"),
    call(aten.split.Tensor, real(6, 20), 12, 1, note="uneven"),
    call(aten.split_with_sizes.default, real(36, 6), [12, 12, 12]),
    call(aten.split_with_sizes.default, real(6, 24), [12, 6, 6], -1, note="uneven"),
    call(aten.chunk.default, real(6, 24), 2, -1),
    call(aten.slice.Tensor, real(6, 24), 1, 12, 24),
    call(aten.slice.Tensor, real(6, 24), -1, -6, 2**62, note="from the end"),
    call(aten.slice.Tensor, real(6, 24), 1, 3, 20, note="uneven"),
    call(aten.slice.Tensor, real(6, 24), 1, 0, 24, 2, note="strided"),
    call(aten.slice.Tensor, real(6, 24), 1, 0, 2**62, note="all"),
    call(aten.slice.Tensor, real(6, 24), note="defaults"),
    call(aten.slice.Tensor, real(12, 6), 0, None, 6, note="no start"),
    call(aten.cat.default, [real(6, 12), real(6, 12)], 1),
    call(aten.cat.default, [real(6, 12), real(6, 6)], -1, note="uneven"),
    call(aten.cat.default, [real(6, 12), integers(5, 6, 12)], note="integers"),
    call(aten.stack.default, [real(6, 12), real(6, 12)], -1),
    call(aten.select.int, real(6, 12), 1, 5),
    call(aten.unbind.int, real(3, 6, 12)),
    call(aten.constant_pad_nd.default, real(6, 12), [1, 2]),
    call(aten.constant_pad_nd.default, real(6, 12), [0, 0, 1, 0], 1.0, note="one"),
    call(aten.pad.default, real(6, 12), [1, 2]),
    call(aten.pad.default, real(6, 12), [1, 2], "constant", 1.0, note="one"),
    call(aten.pad.default, real(6, 4, 12), [1, 2], "reflect", note="reflect"),
]
REDUCTIONS = [
    call(aten.histc.default, integers(4, 6, 12).double(), 4, 0, 3),
    call(aten.histc.default, integers(4, 6, 12).double(), 4, note="no bounds"),
    call(aten.histc.default, integers(4, 6, 12).double(), 4, 1, 3, note="from one"),
    *(
        call(f, real(6, 12, 4), [1])
        for f in (aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default)
    ),
    *(
        call(f, real(6, 12, 4), [0, -1], True, note="keep")
        for f in (aten.sum.dim_IntList, aten.mean.dim)
    ),
    *(call(f, real(6, 12)) for f in (aten.sum.default, aten.mean.default, aten.argmax.default)),
    call(aten.sum.dim_IntList, real(6, 12), None, note="all"),
    call(aten.sum.dim_IntList, integers(5, 6, 12), [1], note="integers"),
    call(aten.sum.dim_IntList, flags(6, 12), [1], note="flags"),
    call(aten.sum.default, real(), note="scalar"),
    call(aten.mean.dim, real(6, 12), [1], dtype=torch.float32, note="float32"),
    *(
        call(f, real(6, 12), [1])
        for f in (aten.amax.default, aten.amin.default, aten.var.correction, aten.var.dim)
    ),
    call(aten.amax.default, real(6, 12), note="all"),
    *(
        call(f, real(6, 12), real(6, 12), reduction, note=str(reduction))
        for f in (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
        )
        for reduction in (0, 1, 2)
    ),
    *(
        call(
            aten.binary_cross_entropy_with_logits.default,
            real(6, 12),
            real(6, 12),
            reduction=reduction,
            note=str(reduction),
        )
        for reduction in (0, 1, 2)
    ),
    call(aten.var.correction, real(6, 12), correction=0, keepdim=True, note="all"),
    call(aten.argmax.default, real(6, 12), -1, note="last"),
    *(call(f, flags(6, 12), 1) for f in (aten.any.dim, aten.all.dim)),
    call(aten.cumsum.default, real(6, 12), -1),
    call(aten.flip.default, real(6, 12), [1]),
    call(aten.diff.default, real(6, 12)),
    call(aten.diff.default, real(6, 12), 1, -1, real(6, 1), note="prepend"),
    call(aten.diff.default, real(6, 12), 2, 1, real(6, 3), real(6, 2), note="prepend and append"),
    call(aten.sort.default, real(6, 12)),
    call(aten.topk.default, real(6, 12), 4),
]
ATTENTION = [
    attention((4, 6, 5, 4), (4, 6, 7, 4)),
    attention((2, 6, 4, 3), (2, 6, 4, 3), None, 0.0, True, note="causal"),
    attention((2, 12, 4, 3), (2, 6, 4, 3), None, 0.0, True, enable_gqa=True, note="grouped"),
    attention((2, 6, 4, 3), (2, 1, 4, 3), enable_gqa=True, note="one group"),
    attention((6, 4, 3), (6, 4, 3), scale=0.3, note="3 dims"),
    attention((6, 3), (4, 3), note="2 dims"),
    masked(12, 12, pairs=0, band=(None, 0), note="causal"),
    masked(12, 12, band=(3, 0), note="window and segments"),
    masked(12, 6, heads=(12, 6), pairs=2, band=(None, None), note="grouped"),
    call(
        BLOCK_MASK,
        [integers(3, 4, 12)],
        [integers(3, 1, 6)],
        "eq",
        None,
        0,
        12,
        6,
        torch.device("cpu"),
        [],
        [],
    ),
    attention((2, 6, 4, 3), (2, 6, 6, 3), real(1, 6, 4, 6), note="float mask"),
    attention(
        (2, 6, 4, 3), (2, 6, 6, 3), torch.ones(4, 6, dtype=torch.bool).tril(1), note="bool mask"
    ),
    attention((4, 6, 4, 3), (1, 6, 6, 3), note="keys broadcast"),
    attention((2, 6, 4, 3), (2, 6, 4, 3), None, 0.4, True, note="dropout", reference=attended),
]
LOSSES = [
    cross_entropy((6, 12), note="mean"),
    cross_entropy((6, 12), real(12, low=0.1).detach(), 2, note="weighted sum"),
    cross_entropy((6, 12), real(12, low=0.1).detach(), 1, -100, 0.1, note="smooth weighted mean"),
    cross_entropy((6, 12), None, 0, note="none"),
    cross_entropy((4, 12, 6), note="three dims"),
    cross_entropy((12,), note="one token"),
]
KINDS = (
    PRODUCTS,
    NORMS,
    POINTWISE,
    VIEWS,
    PIECES,
    REDUCTIONS,
    ATTENTION,
    LOSSES,
    ARGUMENTS,
    WINDOWS,
    GROUPS,
    INDEXED,
    ALONG,
    OTHER_PRODUCTS,
    LOSS_CASES,
    RECURRENT,
    EXPERT_LAYERS,
)
CASES = [case for kind in KINDS for case in kind]


# Tensors made from nothing: values without a layout of their own.
GENERATED = [
    *(call(f, [6, 12], dtype=torch.int64) for f in (aten.zeros.default, aten.ones.default)),
    call(aten.full.default, [6, 12], -1e4, dtype=torch.float64),
    *(
        call(f, real(3), [6, 12], dtype=torch.bool)
        for f in (aten.new_zeros.default, aten.new_ones.default)
    ),
    call(aten.new_full.default, real(3), [6, 12], 7.0),
    call(
        aten.rand.default,
        [6, 12],
        dtype=torch.float64,
        reference=drawn("uniform", 0, 1, torch.float64),
    ),
    call(
        aten.randn.default,
        [6, 12],
        dtype=torch.float64,
        reference=drawn("normal", 0, 1, torch.float64),
    ),
    call(
        aten.randint.low,
        -3,
        9,
        [6, 12],
        dtype=torch.int64,
        reference=drawn("integers", -3, 9, torch.int64),
    ),
    call(aten.arange.default, 12),
    call(aten.arange.start, 3, 15),
    call(aten.arange.start_step, 3, 27, 2),
    call(aten.scalar_tensor.default, 3.0),
    call(aten.empty.memory_format, [6, 0]),
    call(aten.eye.default, 6),
    call(aten.tril.default, flags(6, 12)),
    *CREATED_LIKE,
]

# For meshes of three axes, all on one dim.
DIGITS = [
    call(aten.embedding.default, real(12, 2), integers(12, 5)),
    cross_entropy((4, 12), real(12, low=0.1).detach(), 1, -100, 0.1, note="weighted mean"),
    cross_entropy((12, 4), note="tokens"),
    call(aten.layer_norm.default, real(4, 12), [12], real(12), real(12)),
    call(aten.log_softmax.int, real(4, 12), 1),
    call(aten.linear.default, real(4, 12), real(6, 12), real(6)),
    call(aten.dropout.default, real(12, 6), 0.4, True, reference=dropped),
    call(aten.view.default, real(24, 5), [2, 12, 5]),
    *WINDOW_DIGITS,
    *INDEX_DIGITS,
    *LOSS_DIGITS,
]
