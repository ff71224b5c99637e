"""More small models with something odd in each: attention by all means, shapes, random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odd_models import (
    BATCH,
    HEADS,
    HIDDEN,
    SEQUENCE,
    VOCABULARY,
    Example,
    Simple,
    ids,
    odd,
    rows,
    sequences,
)

# -- attention -------------------------------------------------------------------------------------


@odd
def multihead_attention() -> Example:
    def body(m: Any, x: Tensor, padding: Tensor) -> Tensor:
        y, _ = m.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        return m.down(m.up(y)).square().mean()

    attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
    padding = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    padding[::3, -2:] = True
    return Simple(body, attention=attention), (sequences(), padding), {}


@odd
def multihead_attention_with_weights() -> Example:
    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = m.attention(x, x, x)
        return m.down(m.up(y)).square().mean(), weights

    return Simple(body, attention=nn.MultiheadAttention(HIDDEN, HEADS)), (sequences(),), {}


@odd
def encoder_layer() -> Example:
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.0, batch_first=True)
    return Simple(lambda m, x: m.layer(x).square().mean(), layer=layer), (sequences(),), {}


@odd
def encoder_layer_with_dropout() -> Example:
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.2, batch_first=True)
    return Simple(lambda m, x: m.layer(x).square().mean(), layer=layer), (sequences(),), {}


class Heads(nn.Module):
    """q, k and v of a sequence (b, h, s, e), from one fused weight."""

    def __init__(self, groups: int = HEADS) -> None:
        super().__init__()
        self.groups = groups
        self.qkv = nn.Linear(HIDDEN, HIDDEN + 2 * groups * HIDDEN // HEADS)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def split(self, x: Tensor) -> list[Tensor]:
        width = HIDDEN // HEADS
        parts = self.qkv(x).split([HIDDEN, self.groups * width, self.groups * width], -1)
        return [p.unflatten(-1, (-1, width)).transpose(1, 2) for p in parts]

    def join(self, y: Tensor) -> Tensor:
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


@odd
def a_bias_on_scores_that_is_trained() -> Example:
    class Biased(Heads):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(HEADS, SEQUENCE, SEQUENCE))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias))

    return Biased(), (sequences(),), {}


@odd
def attention_by_einsum() -> Example:
    class Einsum(Heads):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            scores = torch.einsum("bhqe,bhke->bhqk", q, k)
            mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
            weights = scores.masked_fill(~mask, -1e9).softmax(-1)
            return self.join(torch.einsum("bhqk,bhkv->bhqv", weights, v))

    return Einsum(), (sequences(),), {}


@odd
def attention_by_bmm() -> Example:
    class Bmm(Heads):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.flatten(0, 1) for t in self.split(x))
            weights = torch.baddbmm(q.sum(-1)[:, :, None], q, k.mT, beta=0.5, alpha=2).softmax(-1)
            return self.join(torch.bmm(weights, v).unflatten(0, (-1, HEADS)))

    return Bmm(), (sequences(),), {}


@odd
def grouped_queries_of_uneven_widths() -> Example:
    class Grouped(Heads):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            return self.join(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))

    return Grouped(groups=2), (sequences(),), {}


@odd
def attention_with_dropout() -> Example:
    class Dropped(Heads):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
            return self.join(F.dropout(y, 0.2))

    return Dropped(), (sequences(),), {}


# -- shapes ----------------------------------------------------------------------------------------


@odd
def a_gated_pair_from_one_weight() -> Example:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.up(x).chunk(2, -1)
            return self.down(F.silu(gate) * value).square().mean()

    return Gated(), (sequences(),), {}


@odd
def pieces() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        a, b, c = m.up(x).split([8, 16, 24], -1)
        d = torch.cat([c, a, b[:, :, 4:], a[..., :4]], -1)
        e = torch.stack([d, d.flip(1), d.roll(2, 1), d.roll(1, -1)], 1)
        f = torch.cat([e.unbind(1)[0], e[:, 1], e[:, 2] * e[:, 3]], 0)
        return m.down(f[:, ::2]).square().mean() + x.repeat(1, 2, 1).sum() * m.down.bias.sum()

    return Simple(body), (sequences(),), {}


@odd
def along_a_dim() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.up(x)
        y = y.cumsum(1) + y.flip(-1) + y.roll(1, 0) + y.tril() + y.sort(-1).values
        y = y + F.pad(y[:, 1:], (0, 0, 0, 1)) + F.normalize(y, dim=-1) + y.topk(1, -1).values
        return m.down(y).diff(dim=1).square().mean()

    return Simple(body), (sequences(),), {}


@odd
def indices() -> Example:
    def body(m: Any, x: Tensor, index: Tensor) -> Tensor:
        y = m.up(x)
        z = y.index_select(1, index[0]) + y.gather(1, index[:, :, None].expand(-1, -1, 48))
        z = z * F.one_hot(index, 48) + y[:, index[1]] + y[torch.arange(BATCH)[:, None], index]
        return m.down(z).square().mean() + torch.take_along_dim(y, index[:, :, None], 1).sum()

    return Simple(body), (sequences(), torch.randint(0, SEQUENCE, (BATCH, SEQUENCE))), {}


@odd
def writes_into_a_tensor() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.up(x)
        z = torch.zeros_like(y)
        z[:, 2:] = y[:, 2:]
        z[0] += 1
        return m.down(z.masked_fill_(y < 0, 0.5).add_(y)).square().mean()

    return Simple(body), (sequences(),), {}


@odd
def products() -> Example:
    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = m.bilinear(x, y) + torch.einsum("bi,bj,oij->bo", x, y, m.bilinear.weight)
        outer = torch.einsum("bi,bj->bij", z, x).flatten(1)
        return (outer @ outer.T).mean() + torch.outer(x[0], z[0]).sum() + z.mv(z[0]).sum()

    return Simple(body, bilinear=nn.Bilinear(HIDDEN, HIDDEN, HIDDEN)), (rows(), rows()), {}


@odd
def patches() -> Example:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, HIDDEN, 4, stride=4)
            self.mix = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=HEADS)
            self.token = nn.Parameter(torch.randn(1, 1, HIDDEN))
            self.head = nn.Linear(HIDDEN, VOCABULARY)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            y = self.mix(self.embed(x).flatten(2)).transpose(1, 2)
            y = torch.cat([self.token.expand(len(x), -1, -1), y], 1)
            return F.cross_entropy(self.head(y[:, 0] + y.mean(1)), labels)

    return Patches(), (rows(BATCH, 3, 8, 8), ids(BATCH)), {}


@odd
def an_image_network() -> Example:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(6, 24), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(24, 12),
    )  # fmt: skip
    return model, (rows(BATCH, 3, 8, 8),), {}


@odd
def norms() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.group(m.rms(m.up(x)).transpose(1, 2)).transpose(1, 2)
        return (m.layer(m.down(y)) * m.rms(m.up(x))[..., :HIDDEN]).square().mean()

    parts = {"rms": nn.RMSNorm(48), "group": nn.GroupNorm(6, 48)}
    layer = nn.LayerNorm((SEQUENCE, HIDDEN))
    return Simple(body, **parts, layer=layer), (sequences(),), {}


@odd
def casts() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.up(x).half().float() * m.up(x).bfloat16()
        return m.down(y.to(x.dtype)).square().mean() + (y > 0).sum() / y.numel()

    return Simple(body), (rows(),), {}


@odd
def complex_numbers() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        z = torch.view_as_complex(m.up(x).unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(z * torch.polar(torch.ones(6, 1), torch.arange(6.0)[:, None]))
        return m.down(turned.flatten(-2)).square().mean() + torch.fft.rfft(x).abs().sum() * 0

    return Simple(body), (sequences(),), {}


@odd
def complex_slices_written() -> Example:
    """Fourier layers write the lowest and the highest modes into zeros."""

    def body(m: Any, x: Tensor) -> Tensor:
        z = torch.fft.rfft2(m.up(x))
        modes = torch.zeros_like(z)
        modes[:, :2, :8] = torch.einsum("bsi,io->bso", z[:, :2, :8], m.modes)
        modes[:, -2:, :8] = z[:, -2:, :8].conj()
        modes[:, 0] += z[:, 1]
        modes[..., ::2] *= 2j
        torch.view_as_real(modes)[..., 1].mul_(2)
        return m.down(torch.fft.irfft2(modes, s=(x.shape[1], 48))).square().mean()

    model = Simple(body)
    model.modes = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat) / 8)
    return model, (sequences(),), {}


@odd
def recurrent() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], HIDDEN)
        for step in range(3):
            state = m.cell(x[:, step], state)
        return m.down(m.up(state)).square().mean()

    return Simple(body, cell=nn.GRUCell(HIDDEN, HIDDEN)), (sequences(),), {}


@odd
def recurrent_layers() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        y, (h, _) = m.lstm(x)
        return m.down(m.up(y)).square().mean() + h.sum()

    return Simple(body, lstm=nn.LSTM(HIDDEN, HIDDEN, batch_first=True)), (sequences(),), {}


@odd
def dropout_in_training() -> Example:
    def body(m: Any, x: Tensor) -> Tensor:
        y = F.dropout(m.up(F.dropout(x, 0.1)), 0.5)
        return m.down(y).square().mean() + F.dropout(m.up.weight, 0.3).sum()

    return Simple(body), (sequences(),), {}
