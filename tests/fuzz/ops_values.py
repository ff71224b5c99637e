"""Op kinds without weights: pointwise, views, pieces, indices, scans, reductions, pooling."""

from __future__ import annotations

from .table import op, ops

# -- pointwise -------------------------------------------------------------------------------------
for name in (
    "relu", "silu", "gelu", "softplus", "elu", "hardtanh", "leaky_relu", "selu", "mish",
    "logsigmoid", "relu6", "hardswish", "celu", "softsign", "tanhshrink", "softshrink",
    "hardshrink", "hardsigmoid",
):  # fmt: skip
    op(name, "F." + name + "({x})", weight=0.4)
for name in (
    "tanh", "sigmoid", "abs", "neg", "square", "sin", "cos", "erf", "asinh", "atan", "sinc",
    "exp2", "nan_to_num", "positive",
):  # fmt: skip
    op(name, "torch." + name + "({x})", weight=0.3)
ops(
    exp="torch.exp({x}.clamp(max=1))",
    log="torch.log({x}.abs() + 1)",
    log1p="torch.log1p({x}.square())",
    sqrt="({x}.square() + 0.1).sqrt()",
    rsqrt="torch.rsqrt({x}.square() + 1)",
    reciprocal="1 / ({x}.abs() + 1)",
    power="({x}.abs() + 0.1) ** {pick(0.5, 1.5, 2, 3)}",
    number_to_power="{pick(2, 0.5)} ** {x}",
    clamp="{x}.clamp(-0.5, 0.7)",
    floor="{x} - {x}.floor()",
    sign="{x} * {x}.sign()",
    threshold="F.threshold({x}, 0.1, 0.5)",
    gelu_tanh="F.gelu({x}, approximate='tanh')",
    rsub="1 - {x}",
    add="{x} + {y}",
    sub="torch.sub({x}, {y}, alpha=2)",
    mul="{x} * {y}",
    div="{x} / ({y}.abs() + 1)",
    maximum="torch.maximum({x}, {y})",
    atan2="torch.atan2({x}, {y}.abs() + 1)",
    hypot="torch.hypot({x}, {y} + 1)",
    lerp="torch.lerp({x}, {y}, {pick(0.3, x + '.sigmoid()')})",
    addcmul="torch.addcmul({x}, {y}, {y}, value=0.5)",
    addcdiv="torch.addcdiv({x}, {y}, {y}.abs() + 1)",
    logaddexp="torch.logaddexp({x}, {y})",
    fmod="torch.fmod({x}, 1.5)",
    remainder="torch.remainder({x}, 1.5)",
    where="torch.where({x} > 0.1, {x}, {y})",
    where_number="torch.where({x} > {y} + 0.1, {x}, 0.5)",
    mask="{x} * ({y} > 0.1)",
    masked_fill="{x}.masked_fill({given(f'torch.rand({shape}) > 0.6')}, 0.3)",
    mask_of_rows="{x} * {given(f'torch.rand({b}) > 0.3')}.view(-1, *[1] * {n - 1})",
    mask_of_columns="{x}.masked_fill({given(f'torch.rand({h}) > 0.7')}, 0)",
    compared="({x} > 0).logical_and({y} < 1).double() + {x}",
    ones_like="{x} + torch.ones_like({x}) * 0.5",
    full_like="{x} * torch.full_like({y}, 0.5)",
    new_zeros="torch.cat([{x}, {x}.new_zeros({b}, *{shape[1:-1]}, 2)], -1)",
    by_shape="{x} / {x}.shape[{dim}] ** 0.5",
    range="{x} + torch.arange({h}) / {h}",
    range_of_rows="{x} * (torch.arange({b}) % 3 + 1).view(-1, *[1] * {n - 1})",
    linspace="{x} * torch.linspace(0.5, 1, {h})",
)

# -- views -----------------------------------------------------------------------------------------
ops(
    reshape="{x}.reshape({refactored})",
    reshape_rows="{x}.reshape({b}, {refactored_rest})",
    view="{x}.contiguous().view({refactored})",
    flatten="{x}.flatten(1)",
    flatten_batch="{x}.flatten(0, 1)",
    unflatten="{x}.unflatten(-1, ({k}, -1))",
    unflatten_batch="{x}.unflatten(0, ({kb}, -1))",
    transpose="{x}.transpose({dim}, {dim2})",
    permute="{x}.permute({order})",
    transpose_last="{x}.mT",
    movedim="{x}.movedim({dim}, {dim2})",
    unsqueeze="({x}.unsqueeze({dim}) * 2).squeeze({dim})",
    interleave_heads="{x}.unflatten(-1, ({k}, -1)).transpose(-1, -2).flatten(-2)",
    expand="{x}.unsqueeze(1).expand(-1, {pick(2, 3)}, *{shape[1:]}).flatten(1, 2)",
    repeat="{x}.repeat({pick(1, 2)}, *{(1,) * (n - 2)}, {pick2(2, 3)})",
    tile="{x}.tile(2)",
    repeat_interleave="{x}.repeat_interleave({pick(2, 3)}, {dim})",
    unfold="{x}.unfold(-1, 2, {pick(1, 2)}).flatten(-2)",
    diagonal="{x} + ({x} @ {y}.mT).diagonal(dim1=-2, dim2=-1)[..., None]",
    squeeze_all="{x}[..., :1].squeeze(-1)[..., None] + {x}",
    contiguous="{x}.mT.contiguous().mT",
    view_as_real="torch.view_as_real(torch.polar({x}.abs() + 0.1, {y})).flatten(-2)",
)
op("pixel_shuffle", "F.pixel_shuffle({x}, 2)", when="n == 4 and c % 4 == 0")
op("pixel_unshuffle", "F.pixel_unshuffle({x}, 2)", when="n == 4 and h % 2 + shape[2] % 2 == 0")
op("channel_shuffle", "F.channel_shuffle({x}, {kc})", when="n == 4")
op("unfold_image", "F.unfold({x}, 2).mT", when="n == 4 and h > 1 and shape[2] > 1")
op("to_channels_last", "{x}.permute(0, 2, 3, 1).flatten(1, 2)", when="n == 4")
op("windows", "{x}.view({b}, {kc}, -1, {h}).transpose(1, 2).flatten(1, 2)", when="n == 3")

# -- pieces ----------------------------------------------------------------------------------------
ops(
    "h > 3",
    split_uneven="a, b = {x}.split([1, {h} - 1], -1)\ntorch.cat([b, a], -1)",
    chunk="a, b = {x}.chunk(2, -1)\na.sum() / {size} + b",
    slice="{x}[..., 1:-1]",
    slice_strided="{x}[..., ::2]",
    slice_half="{x}[..., {h} // 2:] ",
    narrow="{x}.narrow(-1, 1, 2)",
    diff="{x}.diff(dim=-1)",
    tensor_split="torch.cat(torch.tensor_split({x}, 3, -1)[1:], -1)",
    rotate_half="torch.cat([-{x}[..., {h} // 2:], {x}[..., : {h} // 2]], -1)",
)
ops(
    cat="torch.cat([{x}, {y}], {dim})",
    cat_with_given="torch.cat([{x}, {given(f'torch.randn({shape})')}], -1)",
    stack="torch.stack([{x}, {y}], {dim}).sum({dim})",
    stack_kept="torch.stack([{x}, {y}], 1).flatten(1, 2)",
    unbind="sum(t * 0.5 for t in {x}.unbind(1))[:, None].expand_as({x})",
    select="{x} - {x}.select({dim}, 0).unsqueeze({dim})",
    last="{x}[:, -1:] + {x}",
    roll="{x}.roll({pick(1, 2, -1)}, {dim})",
    flip="{x}.flip({dim})",
    pad="F.pad({x}, (1, {pick(0, 2)}))",
    pad_rows="F.pad({x}, (0, 0, 1, 0), value=0.5)",
    tril="{x}.tril({pick(0, 1, -1)})",
    triu="{x}.triu()",
    shift_left="torch.cat([{x}[:, 1:], {x}[:, :1]], 1)",
    written_into="z = torch.zeros_like({x})\nz[..., 1:] = {x}[..., 1:]\nz[0] += 1\nz",
    written_in_place="z = {x} * 2\nz.mul_(0.5).add_({y})\nz[..., 0] = 0\nz",
    filled_in_place="z = {x}.clone()\nz.masked_fill_({y} < 0, 0.5)",
    copied_in_place="z = torch.empty_like({x})\nz.copy_({x})\nz * 2",
    new_empty="z = {x}.new_empty({shape})\nz[:] = {x}\nz + {y}",
)
ops("n == 3", pad_reflect="F.pad({x}, (1, 1), mode='replicate')")

# -- indices ---------------------------------------------------------------------------------------
ops(
    gather="{x}.gather({dim}, {given(f'torch.randint(0, {shape[dim]}, {shape})')})",
    take_along="torch.take_along_dim({x}, {given(f'torch.randint(0, {shape[dim]}, {shape})')}, "
    "{dim})",
    index_select="{x}.index_select({dim}, {given(f'torch.randint(0, {shape[dim]}, (5,))')})",
    index_columns="{x}[..., {given(f'torch.randint(0, {h}, (4,))')}]",
    index_constant="{x}[:, torch.arange({c}).flip(0)]",
    index_rows="{x}[{given(f'torch.randperm({b})')}]",
    index_pairs="{x}[torch.arange({b}), {given(f'torch.randint(0, {c}, ({b},))')}]"
    "[:, None].expand(-1, 2, *{shape[2:]})",
    scatter="torch.zeros_like({x}).scatter({dim}, {given(f'torch.rand({shape}).argsort({dim})')}, "
    "{x})",
    scatter_add="torch.zeros_like({x}).scatter_add({dim}, "
    "{given(f'torch.randint(0, {shape[dim]}, {shape})')}, {x})",
    scatter_mean="{x}.scatter_reduce({dim}, {given(f'torch.randint(0, {shape[dim]}, {shape})')}, "
    "{y}, 'mean')",
    index_add="{x}.index_add({dim}, {given(f'torch.randint(0, {shape[dim]}, ({shape[dim]},))')}, "
    "{y})",
    index_put="{x}.index_put(({given(f'torch.randperm({b})[:2]')},), torch.tensor(0.5))",
    index_copy="{x}.index_copy(-1, {given(f'torch.randperm({h})')}, {y})",
    index_fill="{x}.index_fill(-1, {given(f'torch.randperm({h})[:1]')}, 0.5)",
    topk="{x}.topk({pick(1, 2)}, {dim}).values",
    topk_mask="{x} * ({x} >= {x}.topk(2, -1).values[..., -1:])",
    sort="{x}.sort({dim}).values",
    argsort="{y}.gather(-1, {x}.argsort(-1))",
    argmax="{x} + {x}.argmax({dim}, keepdim=True) * 0.1",
    argmax_hot="F.one_hot({x}.argmax(-1), {h}) * {x}",
    best="{x}.max({dim}, keepdim=True).values - {x}",
    kthvalue="{x}.kthvalue(2, -1, keepdim=True).values + {x}",
    median="{x} - {x}.median({dim}, keepdim=True).values",
    bucketize="{x} * torch.bucketize({x}.detach(), torch.tensor([-0.5, 0.1, 0.7]))",
    masked_select="{x}[{x} > 0].sum() + {x}",
    nonzero="{x} + ({x} > 0).nonzero().shape[0]",
)

# -- scans and reductions --------------------------------------------------------------------------
ops(
    cumsum="{x}.cumsum({dim})",
    cumsum_back="{x}.flip({dim}).cumsum({dim}).flip({dim})",
    cumprod="{x}.cumprod({dim})",
    logcumsumexp="{x}.logcumsumexp({dim})",
    cummax="{x}.cummax({dim}).values",
    softmax="{x}.softmax({dim})",
    log_softmax="{x}.log_softmax({dim})",
    softmin="F.softmin({x}, {dim})",
    center="{x} - {x}.mean({dim}, keepdim=True)",
    center_all="{x} - {x}.mean()",
    total="{x} + {x}.sum({dim}, keepdim=True) / {shape[dim]}",
    variance="{x} / ({x}.var({dim}, keepdim=True, correction={pick(0, 1)}) + 1)",
    std="{x} / ({x}.std() + 1)",
    amax="{x} - {x}.amax({dim}, keepdim=True)",
    amin="{x} - {x}.amin(({dim}, {dim2}) if {dim} != {dim2} else {dim}, keepdim=True)",
    logsumexp="{x} - {x}.logsumexp({dim}, keepdim=True)",
    norm="{x} / (1 + {x}.norm(dim={dim}, keepdim=True))",
    norm_of_one="{x} / (1 + {x}.norm(p=1, dim=-1, keepdim=True))",
    normalize="F.normalize({x}, dim={dim})",
    prod="{x} * {x}.tanh().prod({dim}, keepdim=True)",
    vector_norm="{x} / (1 + torch.linalg.vector_norm({x}, 3, -1, keepdim=True))",
    any="{x} * ({x} > 0.5).any({dim}, keepdim=True)",
    count="{x} / (1 + ({x} > 0.1).sum({dim}, keepdim=True))",
    cosine="{x} * F.cosine_similarity({x}, {y} + 1, dim=-1)[..., None]",
    cdist="torch.cdist({x}, {y} + 1)",
    var_mean="v, m = torch.var_mean({x}, -1, keepdim=True)\n({x} - m) * (v + 1e-1).rsqrt()",
    trapezoid="torch.trapezoid({x}, dim=-1)[..., None] + {x}",
    meshgrid="{x} + torch.meshgrid(torch.arange(2.0), torch.arange(3.0), indexing='ij')[0].sum()",
)
ops("n >= 3", pool_tokens="{x}.mean(1)", pool_max="{x}.amax(-2)", pool_sum="{x}.sum(1) / {c}")

# -- pooling ---------------------------------------------------------------------------------------
ops(
    "n == 4 and h >= 2 and shape[2] >= 2",
    max_pool="F.max_pool2d({x}, 2)",
    avg_pool="F.avg_pool2d({x}, 2, {pick(1, 2)})",
    adaptive_avg_pool="F.adaptive_avg_pool2d({x}, {pick(1, 2)})",
    adaptive_max_pool="F.adaptive_max_pool2d({x}, 2)",
    lp_pool="F.lp_pool2d({x}.abs() + 0.1, 2, 2)",
    upsample="F.interpolate({x}, scale_factor=2)",
    upsample_bilinear="F.interpolate({x}, size={shape[2] + 1, h + 2}, mode='bilinear')",
    grid_sample="F.grid_sample({x}, {given(f'torch.rand({b}, 2, 3, 2)')}, align_corners=False)",
)
ops(
    "n == 3 and h >= 2",
    max_pool1d="F.max_pool1d({x}, 2)",
    avg_pool1d="F.avg_pool1d({x}, 2, 1)",
    adaptive_pool1d="F.adaptive_avg_pool1d({x}, 2)",
    upsample1d="F.interpolate({x}, scale_factor=2)",
)
