"""What a trace makes of models that look at values or write to buffers: held against the module
itself, as `verify` shares the trace on both of its sides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.ops import sharded
from autopar.passes.trace import trace
from autopar.passes.trace.signature import bind
from traced import run
from value_models import MODES, Wrapped, doubled, encoder

# -- masks -----------------------------------------------------------------------------------------
X, Y = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
OTHER = torch.randn(6, 6)
PADDING = torch.arange(6) >= torch.tensor([[6], [4], [6], [2]])


def decoder() -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 1)


def transformer() -> nn.Transformer:
    return nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)


def attention() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(8, 2, batch_first=True)


Call = Callable[..., Any]
MASKED: dict[str, tuple[Callable[[], nn.Module], Call, tuple[Tensor, ...]]] = {
    "target": (transformer, lambda s, x, y, m: s.inner(x, y, tgt_mask=m), (X, Y)),
    "source": (transformer, lambda s, x, y, m: s.inner(x, y, src_mask=m), (X, Y)),
    "memory": (transformer, lambda s, x, y, m: s.inner(x, y, memory_mask=m), (X, Y)),
    "encoder": (encoder, lambda s, x, m: s.inner(x, m), (X,)),
    "decoder": (decoder, lambda s, x, y, m: s.inner(x, y, m), (X, Y)),
    "attention": (attention, lambda s, x, m: s.inner(x, x, x, attn_mask=m)[0], (X,)),
    "hint": (encoder, lambda s, x, m: s.inner(x, m, is_causal=True), (X,)),
}


@pytest.mark.slow_cells(
    "encoder-False", "encoder-True", "memory-True", "source-True", "target-True",
)  # fmt: skip
@pytest.mark.parametrize(("name", "training"), [*((n, True) for n in MASKED), ("encoder", False)])
def test_a_graph_traced_with_one_mask_is_right_with_another(name: str, training: bool) -> None:
    make, call, inputs = MASKED[name]
    model = Wrapped(make(), call).train(training)
    program = trace(model, (*inputs, CAUSAL))
    for mask in (CAUSAL, OTHER):
        actual, expected = run(program, (*inputs, mask)), model(*inputs, mask)
        assert torch.allclose(actual, expected, atol=1e-5)


@pytest.mark.slow_cells("held")
@pytest.mark.parametrize("name", ["made", "held"])
def test_a_causal_mask_of_the_models_own(name: str) -> None:
    def call(self: Wrapped, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        return self.inner(x, mask if name == "made" else self.mask)

    model = Wrapped(encoder(), call, mask=CAUSAL)
    assert torch.allclose(run(trace(model, (X,)), (X,)), model(X), atol=1e-5)
    autopar.verify(model, 4, (X,), layout="megatron")


@pytest.mark.slow
def test_torch_looks_at_masks_again_after_a_trace() -> None:
    from torch.nn.modules import transformer as module

    trace(Wrapped(encoder(), MASKED["encoder"][1]), (X, CAUSAL))
    assert module._detect_is_causal_mask(CAUSAL) and not module._detect_is_causal_mask(OTHER)


@pytest.mark.slow
def test_padding_that_an_encoder_in_eval_takes_out_is_refused() -> None:
    """It packs the samples without gradients, and puts zeros where they are padded."""

    def call(self: Wrapped, x: Tensor, padding: Tensor) -> Any:
        return self.inner(x, src_key_padding_mask=padding)

    model = Wrapped(encoder(), call)
    assert torch.allclose(run(trace(model, (X, PADDING)), (X, PADDING)), model(X, PADDING))
    with pytest.raises(TraceError, match=r"(?s)inner.*padded.*enable_nested_tensor=False"):
        trace(model.eval(), (X, PADDING))
    wrapped = Wrapped(encoder(enable_nested_tensor=False), call).eval()
    with torch.no_grad():
        expected = wrapped(X, PADDING)
    assert torch.allclose(run(trace(wrapped, (X, PADDING)), (X, PADDING)), expected, atol=1e-5)


def test_a_query_that_sees_no_key_gives_zeros_where_attention_drops_too() -> None:
    q, k, v = (torch.randn(2, 3, 4, 5, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    plain = (torch.tensor(1), [], [()] * 4, [2, 3, 4, 4])  # the seed, and nothing split
    actual = sharded.attention(q, k, v, mask, 0.0, False, None, *plain)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (actual, expected)]
    torch.testing.assert_close(*gradients)


# -- statistics ------------------------------------------------------------------------------------
IMAGES, SERIES, ROWS = torch.randn(4, 6, 4, 4) + 2, torch.randn(4, 6, 8) + 2, torch.randn(8, 6) + 2
NORMS: dict[str, tuple[nn.Module, Tensor]] = {
    "instance, 1d": (nn.InstanceNorm1d(6, affine=True, track_running_stats=True), SERIES),
    "instance, 2d": (nn.InstanceNorm2d(6, track_running_stats=True, momentum=0.5), IMAGES),
    "batch, rows": (nn.BatchNorm1d(6), ROWS),
    "batch, series": (nn.BatchNorm1d(6, affine=False, momentum=0.5), SERIES),
    "batch, images": (nn.BatchNorm2d(6), IMAGES),
    "batch, untracked": (nn.BatchNorm2d(6, track_running_stats=False), IMAGES),
    "batch, synchronized": (nn.SyncBatchNorm(6), IMAGES),
}


def buffers_after(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What the traced graph makes of the model's buffers."""
    program = trace(model, (x,))
    results = program.module(*bind(program, (x,)))
    tensors = [o for o in program.signature.outputs if o.node is not None]
    pairs = zip(tensors, results, strict=True)
    return {o.target: value for o, value in pairs if o.kind == "mutation"}


@pytest.mark.slow_cells(
    "batch, images-*", "batch, series-*", "batch, untracked-*", "instance, 1d-*",
    "instance, 2d-True",
)  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_statistics_are_those_of_the_module(name: str, training: bool) -> None:
    model, x = copy.deepcopy(NORMS[name][0]).train(training), NORMS[name][1]
    statistics, before = buffers_after(model, x), {n: b.clone() for n, b in model.named_buffers()}
    model(x)
    for key, value in model.named_buffers():
        assert torch.allclose(statistics.get(key, before[key]), value), key
    for layout, world in (("ddp", 2), ("auto", 4)):
        autopar.verify(model, world, (x,), layout=layout)


class UnusedNorm(nn.Module):
    """Normalises, and uses only what it was given."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        return x.square().mean()


def test_statistics_of_a_module_that_nothing_uses() -> None:
    """Export drops an instance norm that nothing uses, with what it writes, but no batch norm."""
    statistics = buffers_after(UnusedNorm(nn.BatchNorm1d(6)), ROWS)
    assert statistics["norm.running_mean"].abs().max() > 0
    with pytest.raises(TraceError, match=r"buffer norm.running_mean by an op whose result nothing"):
        trace(UnusedNorm(nn.InstanceNorm1d(6, track_running_stats=True)), (SERIES,))


# -- tables ----------------------------------------------------------------------------------------
IDS = torch.tensor([[0, 2, 4, 1, 2, 3], [1, 3, 2, 3, 3, 1], [3, 1, 3, 2, 2, 4], [0, 4, 0, 2, 3, 4]])
TABLES = {
    "plain": {},
    "by frequency": {"scale_grad_by_freq": True},
    "padding": {"padding_idx": 2},
    "padding from the end": {"padding_idx": -8},
    "sparse": {"sparse": True},
    "by frequency, padding": {"scale_grad_by_freq": True, "padding_idx": 2},
}


@pytest.mark.slow_cells(
    "by frequency, padding-EmbeddingBag", "padding from the end-*", "sparse-EmbeddingBag",
)  # fmt: skip
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("name", TABLES)
def test_a_traced_table_has_its_own_gradient(kind: Any, name: str) -> None:
    options = TABLES[name]
    model = kind(12, 8, **options)
    program = trace(model, (IDS,))
    model(IDS).square().sum().backward()
    expected = model.weight.grad.to_dense()
    model.weight.grad = None
    run(program, (IDS,)).square().sum().backward()
    assert torch.allclose(model.weight.grad, expected)
    for layout, world in (("ddp", 2), ("megatron", 2), ("auto", 4)):
        autopar.verify(model, world, (IDS,), layout=layout)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_scales_its_rows_in_place_is_refused(kind: Any) -> None:
    with pytest.raises(TraceError, match="forward changes 'weight'"):
        trace(kind(12, 8, max_norm=1.0), (IDS,))


# -- custom ops ------------------------------------------------------------------------------------


@pytest.mark.slow_cells("cast")
@pytest.mark.slow_cells("clipped by norm", "clipped", "mixed", "own")
@pytest.mark.parametrize("mode", MODES)
def test_the_backward_of_a_custom_op(mode: str) -> None:
    """Under every layout the gradients are those of the module; the batch alone makes the op's
    gradient a part of a sum on some axis.
    """

    def call(self: Wrapped, x: Tensor) -> Any:
        return self.inner[1](doubled(self.inner[0](x), mode)).square().mean()

    model = Wrapped(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), call)
    x = torch.randn(8, 6)
    model(x).backward()
    program = trace(model, (x,))
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    run(program, (x,)).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name]), name
    for layout, world in (("ddp", 2), ("fsdp", 4), ("megatron", 2), ("4d", 4), ("auto", 4)):
        autopar.verify(model, world, (x,), layout=layout)
