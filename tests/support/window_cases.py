"""Calls of the ops that work on planes of pixels and on windows, for rule_cases.py: several sizes,
strides, paddings and groups of each.
"""

from __future__ import annotations

from typing import Any

import torch

from shards import Case, call, real

aten = torch.ops.aten

PIXELS = {1: (9,), 2: (7, 8), 3: (4, 5, 4)}  # rows that no number of ranks divides, columns that do


def plane(spatial: int, *before: int) -> Any:
    return real(*(before or (4, 6)), *PIXELS[spatial])


def name(operation: str, spatial: int) -> Any:
    overload = "vec" if "upsample" in operation else "default"
    return getattr(getattr(aten, operation.replace("_d", f"{spatial}d")), overload)


def pools(spatial: int) -> list[Case]:
    def each(n: int) -> list[int]:
        return [n] * spatial

    cases = []
    for operation in ("max_pool_d", "max_pool_d_with_indices"):
        target = name(operation, spatial)
        cases += [
            call(target, plane(spatial), each(2)),
            call(target, plane(spatial), each(3), each(2), each(1), each(1), True, note="ceil"),
            call(target, plane(spatial), each(2), each(1), each(0), each(2), note="dilated"),
            call(target, plane(spatial, 6), each(3), each(1), note="no batch"),
        ]
    average = name("avg_pool_d", spatial)
    cases += [
        call(average, plane(spatial), each(2)),
        call(average, plane(spatial), each(3), each(2), each(1), True, False, note="ceil"),
        call(average, plane(spatial, 6), each(3), each(1), note="no batch"),
    ]
    if spatial > 1:
        cases.append(call(average, plane(spatial), each(2), divisor_override=3, note="divisor"))
    for operation in ("adaptive_max_pool_d", "adaptive_avg_pool_d"):
        target = name(operation, spatial)
        cases += [
            call(target, plane(spatial), each(1)),
            call(target, plane(spatial), each(3), note="uneven"),
            call(target, plane(spatial, 6), each(2), note="no batch"),
        ]
    return cases


def unpooled(spatial: int) -> list[Case]:
    target = name("max_unpool_d", spatial)
    pool = name("max_pool_d_with_indices", spatial)
    values, indices = pool(plane(spatial), [2] * spatial)
    rest: tuple[Any, ...] = (list(PIXELS[spatial]),)
    if spatial == 3:
        rest = (*rest, [2] * 3, [0] * 3)
    return [call(target, values.detach().requires_grad_(), indices, *rest)]


def resampled(spatial: int) -> list[Case]:
    smooth = {1: "upsample_linear_d", 2: "upsample_bilinear_d", 3: "upsample_trilinear_d"}[spatial]
    names = ["upsample_nearest_d", "_upsample_nearest_exact_d", smooth]
    if spatial == 2:
        names += ["upsample_bicubic_d", "_upsample_bilinear_d_aa", "_upsample_bicubic_d_aa"]
    cases = []
    for operation in names:
        target = name(operation, spatial)
        aligned: tuple[Any, ...] = () if "nearest" in operation else (False,)
        sizes = [n + 3 for n in PIXELS[spatial]]
        cases += [
            call(target, plane(spatial), None, *aligned, [1.5] * spatial, note="scale"),
            call(target, plane(spatial), sizes, *aligned, None, note="size"),
        ]
        if aligned:
            cases.append(call(target, plane(spatial), sizes, True, None, note="aligned"))
    return cases


def transposed(spatial: int) -> list[Case]:
    operation = "conv_transpose_d".replace("_d", f"{spatial}d")
    target = getattr(getattr(aten, operation), "default" if spatial == 1 else "input")
    kernel, pixels = (3, 2, 3)[:spatial], PIXELS[spatial]

    def each(n: int) -> list[int]:
        return [n] * spatial

    options = (each(2), each(1), each(1))
    return [
        call(target, real(2, 6, *pixels), real(6, 4, *kernel), real(4)),
        call(target, real(2, 6, *pixels), real(6, 2, *kernel), real(6), *options, 3, note="groups"),
        call(target, real(4, 6, *pixels), real(6, 1, *kernel), None, *options, 6,
             note="depthwise"),
        call(target, real(6, *pixels), real(6, 4, *kernel), real(4), *options, 1, each(2),
             note="dilated, no batch"),
    ]  # fmt: skip


WINDOWS = [
    *(case for make in (pools, resampled, transposed) for n in (1, 2, 3) for case in make(n)),
    *(case for n in (2, 3) for case in unpooled(n)),
    call(aten.im2col.default, real(4, 6, 7, 8), [3, 2], [1, 1], [1, 0], [2, 1]),
    call(aten.im2col.default, real(6, 7, 8), [2, 3], [2, 1], [0, 1], [1, 2], note="no batch"),
    call(aten.col2im.default, real(4, 36, 40), [7, 8], [3, 2], [1, 2], [0, 1], [1, 1]),
    call(aten.col2im.default, real(36, 9), [7, 8], [2, 3], [1, 1], [0, 0], [2, 2],
         note="no batch"),
    call(aten.unfold.default, real(4, 6, 9), 2, 3, 2),
    call(aten.unfold.default, real(4, 12, 6), -2, 4, 4, note="no overlap"),
    call(aten.pixel_shuffle.default, real(2, 24, 4, 6), 2),
    call(aten.pixel_shuffle.default, real(18, 4, 6), 3, note="no batch"),
    call(aten.pixel_unshuffle.default, real(2, 6, 8, 12), 2),
    call(aten.pixel_unshuffle.default, real(4, 18, 12), 3, note="no batch"),
    call(aten.channel_shuffle.default, real(4, 12, 3), 2),
    call(aten.channel_shuffle.default, real(2, 18, 2, 3), 3, note="three"),
    call(aten.roll.default, real(4, 6, 12), [3], [2]),
    call(aten.roll.default, real(4, 8, 6, 12), [-2, 6], [1, -1], note="two dims"),
    call(aten.roll.default, real(4, 6), [1], note="flat"),
    *(
        call(aten.grid_sampler.default, real(4, 6, 5, 4), real(4, 6, 9, 2), mode, padding, corners,
             note=f"{mode} {padding}")
        for mode, padding, corners in ((0, 0, False), (1, 1, True), (2, 2, False))
    ),
    call(aten.grid_sampler.default, real(2, 6, 3, 4, 3), real(2, 4, 3, 6, 3), 0, 1, True,
         note="volume"),
    call(aten.affine_grid_generator.default, real(6, 2, 3), [6, 3, 4, 5], False),
    call(aten.affine_grid_generator.default, real(4, 3, 4), [4, 3, 4, 2, 3], True, note="volume"),
    *(
        call(f, real(4, 6, 12), size, dim, norm, note=f"{size} {dim}")
        for f in (aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default,
                  aten.fft_irfft.default)
        for size, dim, norm in ((None, -1, None), (5, 1, "ortho"))
    ),
    *(
        call(f, real(4, 6, 12), size, dim, norm, note=f"{size} {dim}")
        for f in (aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_rfft2.default,
                  aten.fft_irfft2.default)
        for size, dim, norm in ((None, [-2, -1], None), ([5, 4], [0, 2], "ortho"))
    ),
    *(
        call(f, real(4, 6, 12), size, dim, norm, note=f"{size} {dim}")
        for f in (aten.fft_fftn.default, aten.fft_ifftn.default, aten.fft_rfftn.default,
                  aten.fft_irfftn.default)
        for size, dim, norm in ((None, None, None), ([5], None, None), ([4], [1], "ortho"))
    ),
    *(
        call(aten.stft.default, real(6, 32), 8, 4, 6, real(6, low=0.1), True, onesided, True, *on,
             note=f"onesided {onesided}")
        for onesided, on in ((True, ()), (False, (True,)))
    ),
    call(aten.stft.center, real(4, 32), 8, 4, 8, None, False, "constant", True, True, True, True,
         note="center"),
    call(aten.stft.default, real(32), 8, return_complex=True, note="no batch"),
    call(aten.istft.default, torch.randn(4, 5, 9, dtype=torch.complex128), 8, 4, 6,
         real(6, low=0.5).detach(), True, True, True, 24),
    call(aten.istft.default, torch.randn(6, 8, 9, dtype=torch.complex128), 8, 2, None,
         torch.ones(8, dtype=torch.float64), False, False, False, None, True, note="complex"),
]  # fmt: skip
GROUPS = [
    call(aten.group_norm.default, real(4, 12, 5), 6, real(12), real(12)),
    call(aten.group_norm.default, real(4, 12, 2, 3), 3, real(12), None, 0.5, note="eps"),
    call(aten.group_norm.default, real(6, 4, 3), 1, note="one group"),
    call(aten.group_norm.default, real(2, 12, 6), 1, real(12), real(12), note="one group, affine"),
    call(aten.group_norm.default, real(4, 6), 2, real(6), real(6), note="no pixels"),
    call(aten.instance_norm.default, real(4, 6, 5), real(6), real(6), None, None, True, 0.1, 1e-5,
         True),
    call(aten.instance_norm.default, real(4, 6, 2, 3), None, None, real(6).detach(),
         real(6, low=0.1).detach(), False, 0.2, 0.5, True, note="running"),
    call(aten.instance_norm.default, real(2, 6, 12, 3), real(6), None, None, None, True, 0.1, 1e-5,
         True, note="pixels"),
    call(aten.prelu.default, real(4, 6, 5), real(6)),
    call(aten.prelu.default, real(4, 6), real(1), note="one slope"),
    call(aten.prelu.default, real(12), real(1), note="vector"),
]  # fmt: skip

# For meshes of three axes, all on one dim.
WINDOW_DIGITS = [
    call(aten.group_norm.default, real(1, 24, 2), 12, real(24), real(24), note="groups"),
    call(aten.conv_transpose1d.default, real(1, 12, 3), real(12, 2, 2), real(24), [1], [0], [0],
         12, note="groups"),
    call(aten.pixel_shuffle.default, real(48, 1, 2), 2),
    call(aten.grid_sampler.default, real(1, 2, 3, 3), real(1, 12, 2, 2), 0, 0, False),
    call(aten.im2col.default, real(1, 12, 3, 3), [2, 2], [1, 1], [0, 0], [1, 1]),
    call(aten.channel_shuffle.default, real(1, 24, 2), 2),
    call(aten.max_pool1d.default, real(12, 1, 5), [2]),
]  # fmt: skip
