"""Op sharding rules of ops that work on planes of pixels or on windows of a signal: pooling,
resampling, pixel shuffles, patches, grids and short-time Fourier transforms.

Example: a max pool of (32, 64, 112, 112) to (32, 64, 56, 56) reads each plane of each channel by
itself, so samples and channels may be split and rows and columns may not: "b c h w -> b c y x".
Importing this file enters the rules in the table; ops/local.py fits the arguments that count groups
or samples to the shards.
"""

from __future__ import annotations

from torch import fx

from autopar._compat import OpOverload
from autopar.ir.sharding_rule import (
    Dims,
    OpShardingRule,
    bound,
    operands_of,
    results_of,
    shape_of,
    value_of,
)
from autopar.ops.rules import aten, name_dims, operand_shape, rule_for, unsplit
from autopar.ops.rules.shapes import unsharded_dims

_FIRST = (frozenset({0}),)  # partial values pass through the first operand


# -- planes ----------------------------------------------------------------------------------------
def planes(node: fx.Node, spatial: int, linear: bool) -> OpShardingRule:
    """Return the rule of an op that works on each plane of the last `spatial` dims by itself: all
    dims before these may be split. Every operand and every result has the same dims before them.
    """
    sizes: dict[str, int] = {}
    unsharded: set[str] = set()
    source = operands_of(node)[0]
    assert source is not None
    before = name_dims(operand_shape(source)[:-spatial], sizes, "b")

    def dims(shape: tuple[int, ...], prefix: str) -> Dims:
        plane = name_dims(shape[len(before) :], sizes, prefix)
        unsharded.update(name for (name,) in plane)
        return (*before, *plane)

    operands = [
        None if n is None else dims(operand_shape(n), f"h{i}_")
        for i, n in enumerate(operands_of(node))
    ]
    results = [dims(shape_of(value), f"y{i}_") for i, value in enumerate(results_of(node))]
    return OpShardingRule(
        tuple(operands),
        tuple(results),
        sizes,
        whole=frozenset(unsharded),
        linear=_FIRST if linear else (),
    )


_MAXIMA = {
    1: (
        aten.max_pool1d.default,
        aten.max_pool1d_with_indices.default,
        aten.adaptive_max_pool1d.default,
    ),
    2: (
        aten.max_pool2d.default,
        aten.max_pool2d_with_indices.default,
        aten.adaptive_max_pool2d.default,
        aten.max_unpool2d.default,
    ),
    3: (
        aten.max_pool3d.default,
        aten.max_pool3d_with_indices.default,
        aten.adaptive_max_pool3d.default,
        aten.max_unpool3d.default,
    ),
}
_AVERAGES = {
    1: (
        aten.avg_pool1d.default,
        aten.adaptive_avg_pool1d.default,
        aten.upsample_nearest1d.vec,
        aten._upsample_nearest_exact1d.vec,
        aten.upsample_linear1d.vec,
    ),
    2: (
        aten.avg_pool2d.default,
        aten.adaptive_avg_pool2d.default,
        aten.upsample_nearest2d.vec,
        aten._upsample_nearest_exact2d.vec,
        aten.upsample_bilinear2d.vec,
        aten.upsample_bicubic2d.vec,
        aten._upsample_bilinear2d_aa.vec,
        aten._upsample_bicubic2d_aa.vec,
    ),
    3: (
        aten.avg_pool3d.default,
        aten.adaptive_avg_pool3d.default,
        aten.upsample_nearest3d.vec,
        aten._upsample_nearest_exact3d.vec,
        aten.upsample_trilinear3d.vec,
    ),
}
_SPATIAL = {
    target: (spatial, table is _AVERAGES)
    for table in (_MAXIMA, _AVERAGES)
    for spatial, targets in table.items()
    for target in targets
}


@rule_for(tuple(_SPATIAL))
def plane_by_plane(node: fx.Node) -> OpShardingRule:
    """Return the rule "b c h w -> b c y x" of a pool or a resampling. A maximum of a sum is not the
    sum of maxima; averages and weighted sums are linear.
    """
    assert isinstance(node.target, OpOverload)
    spatial, linear = _SPATIAL[node.target]
    return planes(node, spatial, linear)


# -- patches and shuffles --------------------------------------------------------------------------
@rule_for(aten.im2col.default)
def im2col(node: fx.Node) -> OpShardingRule:
    """Return the rule "b c h w -> b (c k) l": the pixels k of a patch lie inside a channel."""
    source = operands_of(node)[0]
    assert source is not None
    image, columns = operand_shape(source), shape_of(value_of(node))
    return _patches(image, columns, to_columns=True)


@rule_for(aten.col2im.default)
def col2im(node: fx.Node) -> OpShardingRule:
    """Return the rule "b (c k) l -> b c h w", that of im2col backwards."""
    source = operands_of(node)[0]
    assert source is not None
    image, columns = shape_of(value_of(node)), operand_shape(source)
    return _patches(image, columns, to_columns=False)


def _patches(image: tuple[int, ...], columns: tuple[int, ...], to_columns: bool) -> OpShardingRule:
    """Return the rule of im2col or col2im for these shapes."""
    sizes = {"c": image[-3], "k": columns[-2] // image[-3], "l": columns[-1]}
    batch = name_dims(image[:-3], sizes, "b")
    plane = name_dims(image[-2:], sizes, "h")
    pixels = (*batch, ("c",), *plane)
    patches = (*batch, ("c", "k"), ("l",))
    before, after = (pixels, patches) if to_columns else (patches, pixels)
    unsharded = frozenset({"k", "l", *(name for (name,) in plane)})
    return OpShardingRule((before,), (after,), sizes, whole=unsharded, linear=_FIRST)


@rule_for(aten.unfold.default)
def unfold(node: fx.Node) -> OpShardingRule:
    """Return the rule of windows along one dim, which stays unsharded, as do the windows."""
    source = operands_of(node)[0]
    assert source is not None
    shape, sizes = operand_shape(source), dict[str, int]()
    if not shape:
        return unsplit(node, source="rule")
    dims = name_dims(shape, sizes)
    dim = bound(node)["dimension"] % len(shape)
    sizes["r"], sizes["window"] = shape_of(value_of(node))[dim], shape_of(value_of(node))[-1]
    result = [("r",) if i == dim else d for i, d in enumerate(dims)]
    return OpShardingRule(
        (tuple(dims),),
        ((*result, ("window",)),),
        sizes,
        whole=frozenset({f"d{dim}", "r", "window"}),
        linear=_FIRST,
    )


@rule_for((aten.pixel_shuffle.default, aten.pixel_unshuffle.default))
def pixel_shuffle(node: fx.Node) -> OpShardingRule:
    """Return the rule "(c r s) h w -> c (h r) (w s)", or that backwards: channels, rows and columns
    may be split, the pixels r and s of a channel may not.
    """
    source = operands_of(node)[0]
    assert source is not None
    shuffles = node.target is aten.pixel_shuffle.default
    factor = bound(node)["upscale_factor" if shuffles else "downscale_factor"]
    shape, result = operand_shape(source), shape_of(value_of(node))
    deep, wide = (shape, result) if shuffles else (result, shape)
    sizes = {"r": factor, "s": factor, "c": wide[-3], "h": deep[-2], "w": deep[-1]}
    batch = name_dims(shape[:-3], sizes, "b")
    deep_dims = (*batch, ("c", "r", "s"), ("h",), ("w",))
    wide_dims = (*batch, ("c",), ("h", "r"), ("w", "s"))
    before, after = (deep_dims, wide_dims) if shuffles else (wide_dims, deep_dims)
    return OpShardingRule((before,), (after,), sizes, whole=frozenset({"r", "s"}), linear=_FIRST)


@rule_for(aten.channel_shuffle.default)
def channel_shuffle(node: fx.Node) -> OpShardingRule:
    """Return the rule "b (g c) ... -> b (c g) ...": the channels of each group may be split."""
    source = operands_of(node)[0]
    assert source is not None
    shape, sizes = operand_shape(source), dict[str, int]()
    dims = name_dims(shape, sizes)
    groups = bound(node)["groups"]
    del sizes["d1"]
    sizes["g"], sizes["c"] = groups, shape[1] // groups
    return OpShardingRule(
        ((dims[0], ("g", "c"), *dims[2:]),),
        ((dims[0], ("c", "g"), *dims[2:]),),
        sizes,
        whole=frozenset({"g"}),
        linear=_FIRST,
    )


@rule_for(aten.roll.default)
def roll(node: fx.Node) -> OpShardingRule:
    """Return the rule of a roll: dims that are rolled stay unsharded; all of them where it rolls
    the flattened tensor.
    """
    values, source = bound(node), operands_of(node)[0]
    assert source is not None
    shape = operand_shape(source)
    dims = values["dims"] or []
    rolled = {d % len(shape) for d in dims} if dims else set(range(len(shape)))
    return unsharded_dims(node, rolled)


# -- grids -----------------------------------------------------------------------------------------
@rule_for(aten.grid_sampler.default)
def grid_sampler(node: fx.Node) -> OpShardingRule:
    """Return the rule "b c h w, b y x 2 -> b c y x": the points of the grid may be split, the
    pixels that they read may not.
    """
    source, grid = operands_of(node)
    assert source is not None and grid is not None
    shape, points = operand_shape(source), operand_shape(grid)
    sizes = {"b": shape[0], "c": shape[1], "coordinate": points[-1]}
    pixels, grid_dims = name_dims(shape[2:], sizes, "h"), name_dims(points[1:-1], sizes, "y")
    return OpShardingRule(
        ((("b",), ("c",), *pixels), (("b",), *grid_dims, ("coordinate",))),
        ((("b",), ("c",), *grid_dims),),
        sizes,
        whole=frozenset({"coordinate", *(name for (name,) in pixels)}),
        linear=_FIRST,
    )


@rule_for(aten.affine_grid_generator.default)
def affine_grid(node: fx.Node) -> OpShardingRule:
    """Return the rule "b r k -> b y x r": only samples may be split, as a point's coordinates
    depend on where it lies in the image.
    """
    theta = operands_of(node)[0]
    assert theta is not None
    shape, result = operand_shape(theta), shape_of(value_of(node))
    sizes = {"b": shape[0], "r": shape[1], "k": shape[2]}
    points = name_dims(result[1:-1], sizes, "y")
    return OpShardingRule(
        ((("b",), ("r",), ("k",)),),
        ((("b",), *points, ("r",)),),
        sizes,
        whole=frozenset(sizes) - {"b"},
        linear=_FIRST,
    )


# -- spectra ---------------------------------------------------------------------------------------
@rule_for(
    (
        aten.fft_fft.default,
        aten.fft_ifft.default,
        aten.fft_rfft.default,
        aten.fft_irfft.default,
        aten.fft_fft2.default,
        aten.fft_ifft2.default,
        aten.fft_rfft2.default,
        aten.fft_irfft2.default,
        aten.fft_fftn.default,
        aten.fft_ifftn.default,
        aten.fft_rfftn.default,
        aten.fft_irfftn.default,
    )
)
def spectrum(node: fx.Node) -> OpShardingRule:
    """Return the rule of a Fourier transform: the dims that it transforms stay unsharded."""
    values, source = bound(node), operands_of(node)[0]
    assert source is not None
    dim, count = values["dim"], len(operand_shape(source))
    if dim is None:  # all of them, or the last ones that `s` gives sizes of
        dim = range(count if values["s"] is None else len(values["s"]))
        dim = [-1 - d for d in dim]
    dims = [dim] if isinstance(dim, int) else dim
    return unsharded_dims(node, {d % count for d in dims})


@rule_for((aten.stft.default, aten.stft.center, aten.istft.default))
def short_time_spectrum(node: fx.Node) -> OpShardingRule:
    """Return the rule "b t, w -> b f n" of a short-time Fourier transform, or that backwards:
    signals may be split, time may not.
    """
    source, window = operands_of(node)
    assert source is not None
    backwards = node.target is aten.istft.default
    shape, result = operand_shape(source), shape_of(value_of(node))
    sizes: dict[str, int] = {}
    batch = name_dims(shape[: -2 if backwards else -1], sizes, "b")
    before = name_dims(shape[len(batch) :], sizes, "t")
    after = name_dims(result[len(batch) :], sizes, "f")
    window_dims = None if window is None else tuple(name_dims(operand_shape(window), sizes, "w"))
    return OpShardingRule(
        ((*batch, *before), window_dims),
        ((*batch, *after),),
        sizes,
        whole=frozenset(sizes) - {name for (name,) in batch},
        linear=_FIRST,
    )
