"""Plain models of torch.nn, as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.sizes import (
    BATCH,
    CLASSES,
    HEADS,
    HIDDEN,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    Example,
    Factory,
    class_labels,
    token_ids,
)

INNER = 2 * HIDDEN
CAUSAL = nn.Transformer.generate_square_subsequent_mask(SEQUENCE)


class Loss(nn.Module):
    """The mean square of what `body` returns; of its first result where it returns several."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Tensor) -> Tensor:
        output = self.body(*inputs)
        return (output[0] if isinstance(output, tuple) else output).square().mean()


class Classifier(nn.Module):
    """`model(x, target)` is the cross-entropy of what `body` returns."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), target)


def sequence() -> Tensor:
    """Return random activations of (BATCH, SEQUENCE, HIDDEN)."""
    return torch.randn(BATCH, SEQUENCE, HIDDEN)


def pictures() -> Tensor:
    """Return random images of (BATCH, 3, 16, 16)."""
    return torch.randn(BATCH, 3, 16, 16)


def mlp() -> Example:
    layers = nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Dropout(0.1), nn.Linear(INNER, CLASSES)
    return Classifier(nn.Sequential(*layers)), (torch.randn(BATCH, HIDDEN), class_labels())


# -- torch.nn's transformers -----------------------------------------------------------------------
def encoder() -> Example:
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, INNER, batch_first=True)
    return Loss(nn.TransformerEncoder(layer, LAYERS)), (sequence(),)


class MaskedTransformer(nn.Module):
    """`nn.Transformer` with a causal mask for its target."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(HIDDEN, HEADS, LAYERS, LAYERS, INNER, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        return self.body(source, target, tgt_mask=mask).square().mean()


def masked_transformer() -> Example:
    return MaskedTransformer(), (sequence(), sequence(), CAUSAL)


class CausalEncoder(nn.Module):
    """`nn.TransformerEncoder` with a causal mask that forward makes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, INNER, batch_first=True, norm_first=True, activation="gelu"
        )
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.body(self.embed(tokens), mask=mask))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def causal_encoder() -> Example:
    return CausalEncoder(), (token_ids(), token_ids())


class PaddedAttention(nn.Module):
    """`nn.MultiheadAttention` of padded rows, with the averaged weights as a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, x: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = self.attention(x, x, x, key_padding_mask=padded)
        return output.square().mean(), weights


def padded_attention() -> Example:
    padded = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    padded[1::2, -2:] = True
    return PaddedAttention(), (sequence(), padded)


# -- recurrent -------------------------------------------------------------------------------------
def lstm() -> Example:
    return Loss(nn.LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True)), (sequence(),)


def gru() -> Example:
    body = nn.GRU(HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
    return Loss(body), (sequence(),)


# -- convolutions ----------------------------------------------------------------------------------
def batch_norm_net() -> Example:
    layers = (
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip
    return Classifier(nn.Sequential(*layers)), (pictures(), class_labels())


class UNet(nn.Module):
    """One step down and one up, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.leave = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, noisy: Tensor, noise: Tensor) -> Tensor:
        high = self.enter(noisy)
        low = F.silu(self.down(high))
        return F.mse_loss(self.leave(torch.cat((high, self.up(low)), dim=1)), noise)


def unet() -> Example:
    return UNet(), (pictures(), pictures())


def depthwise_net() -> Example:
    layers = (
        nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Hardswish(),
        nn.Conv2d(16, 32, 1), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32 * 16, CLASSES),
    )  # fmt: skip
    return Classifier(nn.Sequential(*layers)), (pictures(), class_labels())


class Mixer(nn.Module):
    """Patches mixed over positions, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.positions, self.channels = nn.Linear(16, 16), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.positions(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + F.gelu(self.channels(self.norms[1](x)))
        return self.head(x.mean(dim=1))


def mixer() -> Example:
    return Classifier(Mixer()), (pictures(), class_labels())


def text_convolution() -> Example:
    layers = (
        nn.Embedding(VOCABULARY, HIDDEN), nn.Flatten(), nn.Unflatten(1, (SEQUENCE, HIDDEN)),
        nn.Conv1d(SEQUENCE, 16, 3, padding=2, dilation=2), nn.ReLU(), nn.AdaptiveMaxPool1d(1),
        nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip
    return Classifier(nn.Sequential(*layers)), (token_ids(), class_labels())


# -- others ----------------------------------------------------------------------------------------
class Recommender(nn.Module):
    """Bags of categories and dense features, with the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(VOCABULARY, 16, mode=mode) for mode in ("sum", "mean")
        )
        self.dense, self.top = nn.Linear(8, 16), nn.Linear(16 + 9, 1)

    def forward(self, dense: Tensor, first: Tensor, second: Tensor, click: Tensor) -> Tensor:
        bottom = F.relu(self.dense(dense))
        vectors = torch.stack((bottom, self.bags[0](first), self.bags[1](second)), dim=1)
        pairs = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits = self.top(torch.cat((bottom, pairs), dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, click)


def recommender() -> Example:
    click = torch.randint(0, 2, (BATCH,)).float()
    return Recommender(), (torch.randn(BATCH, 8), token_ids(), token_ids(), click)


class GraphNetwork(nn.Module):
    """Messages along edges, summed at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(HIDDEN, HIDDEN), nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, target: Tensor) -> Tensor:
        messages = self.message(nodes)[edges[0]]
        summed = torch.zeros_like(nodes).index_add(0, edges[1], messages)
        return F.cross_entropy(self.update(torch.cat((nodes, summed), dim=1)), target)


def graph_network() -> Example:
    edges = torch.randint(0, 16, (2, 48))
    return GraphNetwork(), (torch.randn(16, HIDDEN), edges, torch.randint(0, CLASSES, (16,)))


class Autoencoder(nn.Module):
    """A variational autoencoder; the noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(HIDDEN, 2 * 8), nn.Linear(8, HIDDEN)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        output = self.decode(mean + (log_variance / 2).exp() * noise)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(dim=1) / 2
        return F.mse_loss(output, x) + divergence.mean()


def autoencoder() -> Example:
    return Autoencoder(), (torch.randn(BATCH, HIDDEN), torch.randn(BATCH, 8))


class Siamese(nn.Module):
    """One tower for three inputs, with a triplet loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.PReLU(), nn.Linear(INNER, 16))

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        anchor, near, far = (F.normalize(self.tower(x), dim=-1) for x in (anchor, near, far))
        return F.triplet_margin_loss(anchor, near, far)


def siamese() -> Example:
    return Siamese(), tuple(torch.randn(BATCH, HIDDEN) for _ in range(3))


class Experts(nn.Module):
    """A mixture of experts in which every expert computes every token."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts)
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, INNER) / 8)
        self.down = nn.Parameter(torch.randn(experts, INNER, HIDDEN) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(2)
        gates = torch.zeros(*x.shape[:-1], len(self.up)).scatter(-1, chosen, weights)
        inner = F.silu(torch.einsum("bsd,edf->bsef", x, self.up))
        return torch.einsum("bsef,efd,bse->bsd", inner, self.down, gates)


def experts() -> Example:
    return Loss(Experts()), (sequence(),)


MODELS: dict[str, Factory] = {
    "mlp": mlp,
    "nn.TransformerEncoder": encoder,
    "nn.Transformer(tgt_mask)": masked_transformer,
    "nn.TransformerEncoder(mask)": causal_encoder,
    "nn.MultiheadAttention": padded_attention,
    "nn.LSTM": lstm,
    "nn.GRU": gru,
    "batch norm": batch_norm_net,
    "u-net": unet,
    "depthwise": depthwise_net,
    "mixer": mixer,
    "text convolution": text_convolution,
    "recommender": recommender,
    "graph network": graph_network,
    "autoencoder": autoencoder,
    "siamese": siamese,
    "experts": experts,
}
