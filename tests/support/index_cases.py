"""Calls of the ops that read and write by index, of those that run along a dim, and of products in
other words, for rule_cases.py.
"""

from __future__ import annotations

import torch

from shards import call, flags, integers, real

aten = torch.ops.aten


def distinct(*shape: int) -> torch.Tensor:
    """Indices along the last dim, none of them twice in a row."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(shape, generator=generator).argsort(-1)


INDEXED = [
    call(aten.index_select.default, real(4, 9, 6), 1, integers(9, 12)),
    call(aten.index_select.default, real(6, 6), 0, integers(6, 6), note="square"),
    call(aten.gather.default, real(4, 9, 6), 1, integers(9, 4, 12, 6)),
    call(aten.gather.default, real(6, 6), -1, integers(6, 4, 6), note="first rows"),
    call(aten.gather.default, real(4, 6), 1, integers(6, 4, 6), sparse_grad=False,
         note="as many"),
    call(aten.take_along_dim.default, real(4, 9, 6), integers(9, 4, 12, 6), 1),
    call(aten.take_along_dim.default, real(4, 9, 6), integers(9, 1, 12, 1), 1,
         note="one index"),
    call(aten.take_along_dim.default, real(1, 9, 6), integers(9, 4, 12, 6), 1,
         note="one source"),
    call(aten.take_along_dim.default, real(4, 6), integers(24, 12), note="flat"),
    call(aten.scatter.src, real(4, 6), 1, distinct(4, 6), real(4, 6)),
    call(aten.scatter.src, real(6, 12), -1, distinct(4, 6), real(6, 12).detach(),
         note="first rows"),
    call(aten.scatter.value, real(4, 6), 1, distinct(4, 6)[:, :2], 3.0),
    call(aten.scatter.value, real(4, 6), 0, integers(4, 2, 6), 0, note="zero"),
    call(aten.scatter_add.default, real(4, 9), 1, integers(9, 4, 12), real(4, 12)),
    call(aten.scatter_add.default, real(9, 6), 0, integers(9, 12, 6), real(12, 6),
         note="rows"),
    call(aten.scatter_add.default, real(6, 6), 1, integers(6, 4, 6),
         real(4, 12).detach(), note="first rows"),
    *(call(aten.scatter_reduce.two, real(4, 6), 1, integers(6, 4, 12), real(4, 12), reduce,
           include_self=include, note=reduce)
      for reduce, include in (("mean", False), ("amax", True), ("sum", False))),
    call(aten.index_add.default, real(9, 6), 0, integers(9, 12), real(12, 6)),
    call(aten.index_add.default, real(4, 6), -1, integers(6, 4), real(4, 4), alpha=2,
         note="scaled"),
    call(aten.slice_scatter.default, real(4, 9, 6), real(4, 3, 6), 1, 1, 9, 3),
    call(aten.slice_scatter.default, real(9, 6), real(4, 6), note="rows", start=-4),
    call(aten.select_scatter.default, real(4, 9, 6), real(4, 6), -2, -1),
    call(aten.index_copy.default, real(4, 9, 6), 1, distinct(9)[:4], real(4, 4, 6)),
    call(aten.index_copy.default, torch.randn(9, 6, dtype=torch.complex128), 0, distinct(9)[:4],
         torch.randn(4, 6, dtype=torch.complex128), note="complex"),
    call(aten.index.Tensor, real(4, 9, 6), [None, integers(9, 12)]),
    call(aten.index.Tensor, real(9, 6), [integers(9, 4, 6)], note="two dims"),
    call(aten.index.Tensor, real(4, 6, 9, 2), [None, integers(6, 4, 1), integers(9, 6)],
         note="adjacent"),
    call(aten.index.Tensor, real(4, 6, 9), [integers(4, 6, 1), None, integers(9, 4)],
         note="apart"),
    call(aten.index.Tensor, real(4, 6), [flags(4)], note="mask"),
    call(aten.index_put.default, real(9, 6), [integers(9, 12)], real(12, 6), True),
    call(aten.index_put.default, real(4, 9), [None, integers(9, 12)], real(4, 1), True,
         note="broadcast"),
    call(aten.index_put.default, real(4, 6, 9), [None, integers(6, 4, 1), integers(9, 6)],
         real(6), True, note="adjacent"),
    call(aten.index_put.default, real(9, 6), [distinct(9)[:4]], real(4, 6), note="overwrites"),
    call(aten.index_put.default, real(4, 6), [flags(4, 6)], real().detach(), note="mask"),
    call(aten.one_hot.default, integers(5, 4, 6), 5),
    call(aten.bucketize.Tensor, real(4, 6).detach(), torch.arange(-2.0, 3.0, dtype=torch.float64),
         out_int32=True, right=True),
    call(aten.searchsorted.Tensor, real(4, 9).detach().sort().values, real(4, 6).detach(),
         out_int32=True, right=True, side="right"),
    call(aten.searchsorted.Tensor, real(9).detach().sort().values, real(4, 6).detach(),
         note="one row"),
    call(aten.searchsorted.Tensor, real(6, 9).detach(), real(6, 4).detach(),
         sorter=real(6, 9).detach().argsort(), note="sorter"),
]  # fmt: skip
ALONG = [
    call(aten.cumprod.default, real(4, 6), 1, dtype=torch.float32),
    call(aten.logcumsumexp.default, real(4, 6), -1),
    *(call(f, real(4, 6), 1) for f in (aten.cummax.default, aten.cummin.default)),
    call(aten.sort.stable, real(4, 6), stable=True, dim=0, descending=True),
    call(aten.argsort.default, real(4, 6), 0, True),
    call(aten.argsort.stable, real(4, 6), stable=True, dim=0, descending=True),
    *(call(f, real(6, 12, 4), 1, keep, note=f"keep {keep}")
      for f in (aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default, aten.prod.dim_int,
                aten.argmin.default)
      for keep in (False, True)),
    call(aten.prod.dim_int, real(4, 6), 0, dtype=torch.float32, note="float32"),
    *(call(aten.aminmax.default, real(6, 12), dim=dim, keepdim=keep, note=str(dim))
      for dim, keep in ((None, False), (1, True))),
    call(aten.kthvalue.default, real(6, 12), 3, 0, True),
    *(call(f, real(6, 12, 4), [1, 2], False, True, note="keep")
      for f in (aten.std.dim, aten.var_mean.dim)),
    *(call(f, real(6, 12, 4), [1], correction=0, keepdim=True)
      for f in (aten.std.correction, aten.var_mean.correction)),
    *(call(aten.linalg_vector_norm.default, real(6, 12, 4), order, dims, keep, note=f"{order}")
      for order, dims, keep in ((2, [1], False), (1, [0, 2], True), (float("inf"), None, False),
                                (3, None, True), (0.5, [0], False), (0, [1], False))),
    call(aten.linalg_vector_norm.default, real(6, 12), 2, [1], dtype=torch.float64, note="dtype"),
    call(aten.linalg_vector_norm.default, real(6, 12).detach().mul(torch.arange(6)[:, None] > 1)
         .requires_grad_(), 2, [1], note="of zeros"),
    call(aten.nansum.default, real(6, 12, 4), [1], True),
    call(aten.nansum.default, real(6, 12), dtype=torch.float32, note="all"),
    call(aten.count_nonzero.default, integers(3, 6, 12)),
    call(aten.count_nonzero.default, integers(3, 6, 12), 1, note="rows"),
    call(aten.count_nonzero.dim_IntList, integers(3, 6, 12, 4), [0, 2]),
    call(aten.cosine_similarity.default, real(6, 12), real(6, 12).flip(0)),
    call(aten.cosine_similarity.default, real(4, 6, 5), real(6, 1), 0, 0.1, note="broadcast"),
    call(aten.pairwise_distance.default, real(6, 12), real(6, 12).flip(0)),
    call(aten.pairwise_distance.default, real(6, 4), real(4), 1.0, 0.1, True, note="broadcast"),
    call(aten.glu.default, real(4, 24)),
    call(aten.glu.default, real(12, 4), 0, note="rows"),
    call(aten.repeat.default, real(6, 12), [4, 1]),
    call(aten.repeat.default, real(6, 4), [6, 3, 2], note="new dim"),
    call(aten.tile.default, real(6, 12), [2]),
    call(aten.repeat_interleave.self_int, real(6, 4), 6, 1),
    call(aten.repeat_interleave.self_int, real(6, 4), 2, output_size=48, note="flat"),
    *(call(f, real(4, 6, 6), diagonal) for f in (aten.tril.default, aten.triu.default)
      for diagonal in (1,)),
    call(aten.view_as_real.default, torch.randn(4, 6, dtype=torch.complex128)),
    call(aten.view_as_complex.default, real(4, 6, 2)),
    call(aten.unsafe_split.Tensor, real(6, 24), 12, 1),
]  # fmt: skip
OTHER_PRODUCTS = [
    call(aten.outer.default, real(6), real(12)),
    *(call(f, real(12), real(12).flip(0)) for f in (aten.dot.default, aten.vdot.default)),
    call(aten.bilinear.default, real(4, 6), real(4, 12), real(6, 6, 12), real(6)),
    call(aten.bilinear.default, real(2, 4, 6), real(2, 4, 12), real(6, 6, 12), note="no bias"),
    call(aten.baddbmm.default, real(4, 6, 12), real(4, 6, 6), real(4, 6, 12)),
    call(aten.baddbmm.default, real(1, 12), real(4, 6, 6), real(4, 6, 12), beta=0.5, alpha=2,
         note="row"),
    *(call(aten.einsum.default, equation, [real(*shape) for shape in shapes], note=equation)
      for equation, shapes in (
          ("bchw,cd->bdhw", ((2, 6, 3, 4), (6, 12))),
          ("bi,bj,bk->bijk", ((4, 2), (4, 6), (4, 3))),
          ("b...i,...ij->b...j", ((4, 6, 12), (6, 12, 6))),
          ("...ij,...jk", ((6, 4, 12), (12, 4))),
          ("ij,jk", ((4, 12), (12, 6))),
          ("ii->i", ((6, 6),)),
          ("iij,j->i", ((4, 4, 6), (6,))),
          ("bij->", ((4, 6, 12),)),
          ("bhqd,bhkd->bhqk", ((2, 6, 4, 3), (2, 6, 4, 3))),
          ("ij,j->ij", ((6, 12), (12,))),
          ("ab,bc->ac", ((6, 1), (12, 6))),
          ("ba, ca -> bc", ((4, 6), (6, 6))),
      )),
    call(aten.einsum.default, "ab,bc,cd->ad", [real(4, 6), real(6, 12), real(12, 4)],
         path=[0, 1, 0, 1], note="path"),
    call(aten.cdist.default, real(4, 6, 3), real(4, 12, 3)),
    call(aten.cdist.default, real(6, 3), real(4, 12, 3), 1.0, 2, note="broadcast"),
    call(aten._weight_norm.default, real(6, 12, 3), real(6, 1, 1, low=0.1)),
    call(aten._weight_norm.default, real(4, 6), real(1, 6, low=0.1), 1, note="columns"),
]  # fmt: skip

# For meshes of three axes, all on one dim.
INDEX_DIGITS = [
    call(aten.index_select.default, real(5, 2), 0, integers(5, 12)),
    call(aten.scatter_add.default, real(5, 2), 0, integers(5, 12, 2), real(12, 2)),
    call(aten.index.Tensor, real(5, 2), [integers(5, 12)]),
    call(aten.glu.default, real(1, 24)),
    call(aten.repeat.default, real(12, 1), [2, 1]),
    call(aten.repeat_interleave.self_int, real(12, 1), 2, 0),
    call(aten.einsum.default, "bk,ok->bo", [real(2, 12), real(5, 12)]),
]
