"""Models at the sizes of their papers, on the meta device: no tensor holds values.

Images come from torchvision and timm, language and speech from transformers by configuration; what
none of them has is written here. Every model returns its training loss for GLOBAL_BATCH samples,
four on each of eight ranks; `for_ranks` has as many on each of more.
Factories can be pickled, as each plan is made in a process of its own.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.sizes import Example, Factory
from benchmarks.zoo.text_models import build
from benchmarks.zoo.torch_models import Classifier

SAMPLES_A_RANK = 4
GLOBAL_BATCH = 8 * SAMPLES_A_RANK


def for_ranks(ranks: int) -> None:
    """Let the factories return inputs for so many ranks from now on."""
    global GLOBAL_BATCH
    GLOBAL_BATCH = SAMPLES_A_RANK * ranks


def images(size: int = 224, channels: int = 3) -> Tensor:
    return torch.empty(GLOBAL_BATCH, channels, size, size)


def classes(*shape: int) -> Tensor:
    return torch.empty(GLOBAL_BATCH, *shape, dtype=torch.int64)


# -- torchvision and timm --------------------------------------------------------------------------
_MISSING: list[torch.library.Library] = []  # held, as ops go with their Library


def vision_package(name: str) -> Any:
    """Return torchvision or timm. A torchvision for CUDA beside a torch for CPUs does not load its
    library, and its import then asks for two ops of it, which no model here calls.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        _MISSING.append(torch.library.Library("torchvision", "FRAGMENT"))
        for op in ("nms", "qnms"):
            _MISSING[0].define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(name)


def of_torchvision(name: str, size: int) -> Example:
    models = vision_package("torchvision").models
    with torch.device("cpu"):  # a RegNet computes its widths with tensors
        model = models.get_model(name, weights=None)
    return Classifier(model.to("meta")), (images(size), classes())


def torchvision(name: str, size: int = 224) -> Factory:
    """Return the factory of a classifier of torchvision.models."""
    return partial(of_torchvision, name, size)


def of_timm(name: str, size: int) -> Example:
    return Classifier(vision_package("timm").create_model(name)), (images(size), classes())


def timm(name: str, size: int = 224) -> Factory:
    """Return the factory of a classifier of timm."""
    return partial(of_timm, name, size)


class Pixels(nn.Module):
    """`model(x, target)` is the cross-entropy of every pixel."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x)["out"], target)


def deeplab() -> Example:
    models = vision_package("torchvision").models.segmentation
    model = models.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    return Pixels(model), (images(512), classes(512, 512))


def video() -> Example:
    models = vision_package("torchvision").models.video
    return Classifier(models.r3d_18()), (torch.empty(GLOBAL_BATCH, 3, 16, 112, 112), classes())


# -- transformers ----------------------------------------------------------------------------------
def from_transformers(auto_class: str, kind: str, options: Any, **settings: Any) -> nn.Module:
    """Return a model of transformers, which imports torchvision where that is installed."""
    vision_package("torchvision")
    return build(auto_class, kind, options, **settings)


def labeled_tokens(sequence: int) -> dict[str, Tensor]:
    return {"input_ids": classes(sequence), "labels": classes(sequence)}


def of_decoder(kind: str, sequence: int, options: dict[str, Any]) -> Example:
    auto_class = "AutoModelForCausalLM"
    model = from_transformers(auto_class, kind, options, dtype=torch.bfloat16)
    return model, labeled_tokens(sequence)


def decoder(kind: str, sequence: int, **options: Any) -> Factory:
    """Return the factory of a decoder in bfloat16 with the loss of the next token."""
    return partial(of_decoder, kind, sequence, options)


class Loss(nn.Module):
    """`model(**inputs)` is the loss of a model of transformers alone. Logits are outputs, too: of
    256,000 words every rank would receive 31 GiB.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.body(input_ids=input_ids, labels=labels).loss


def of_loss(factory: Factory) -> Example:
    model, inputs = factory()
    return Loss(model), inputs


def of_encoder(
    auto_class: str, kind: str, inputs: Callable[[], Any], options: dict[str, Any]
) -> Example:
    return from_transformers(auto_class, kind, options), inputs()


def encoder(auto_class: str, kind: str, inputs: Callable[[], Any], **options: Any) -> Factory:
    """Return the factory of a model of transformers in float32, called with `inputs()`."""
    return partial(of_encoder, auto_class, kind, inputs, options)


def labeled_pixels() -> dict[str, Tensor]:
    return {"pixel_values": images(512), "labels": classes(512, 512)}


def labeled_sound() -> dict[str, Tensor]:
    return {"input_values": torch.empty(GLOBAL_BATCH, 80_000), "labels": classes()}


def mistral_shape(**options: Any) -> dict[str, Any]:
    return {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        **options,
    }  # fmt: skip


def wide(layers: int, width: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width,
        "num_attention_heads": heads,
    }  # fmt: skip


def clip_inputs() -> dict[str, Any]:
    return {"input_ids": classes(77), "pixel_values": images(), "return_loss": True}


def whisper_inputs() -> dict[str, Tensor]:
    return {"input_features": torch.empty(GLOBAL_BATCH, 80, 3000), "labels": classes(448)}


# -- diffusion -------------------------------------------------------------------------------------
class Residual(nn.Module):
    """Two convolutions with group norms, moved by the embedding of a time step."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, before), nn.GroupNorm(32, after)])
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norms[1](y)))


class PixelAttention(nn.Module):
    """Every pixel attends to every pixel."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(32, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1))
        query, key, value = pixels.transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed.transpose(-1, -2).flatten(1, 2).view_as(x))


class DiffusionUNet(nn.Module):
    """The U-Net of DDPM (arXiv 2006.11239); the noise is an input."""

    def __init__(self, width: int = 128, widths: tuple[int, ...] = (1, 1, 2, 2, 4, 4)) -> None:
        super().__init__()
        time, channels = 4 * width, [width * w for w in widths]
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem, self.width = nn.Conv2d(3, width, 3, padding=1), width
        self.down, self.up, sizes = nn.ModuleList(), nn.ModuleList(), [width]
        for level, wide in enumerate(channels):
            for _ in range(2):
                self.down.append(Residual(sizes[-1], wide, time))
                sizes.append(wide)
            if level < len(channels) - 1:
                self.down.append(nn.Conv2d(wide, wide, 3, stride=2, padding=1))
                sizes.append(wide)
        self.middle = nn.ModuleList([Residual(sizes[-1], sizes[-1], time) for _ in range(2)])
        self.attention, current = PixelAttention(sizes[-1]), sizes[-1]
        for level, wide in reversed(list(enumerate(channels))):
            for _ in range(3):
                self.up.append(Residual(current + sizes.pop(), wide, time))
                current = wide
            if level:
                self.up.append(nn.Conv2d(wide, wide, 3, padding=1))
        self.head = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 3, 3, 1, 1))

    def forward(self, x: Tensor, step: Tensor, noise: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-math.log(1e4) / 64))
        angles = step[:, None] * rates
        time = self.time(torch.cat((angles.sin(), angles.cos()), dim=1))
        x = self.stem(x)
        skips = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, Residual) else layer(x)
            skips.append(x)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for layer in self.up:
            if isinstance(layer, Residual):
                x = layer(torch.cat((x, skips.pop()), dim=1), time)
            else:
                x = layer(F.interpolate(x, scale_factor=2.0))
        return F.mse_loss(self.head(x), noise)


def diffusion_unet() -> Example:
    return DiffusionUNet(), (images(256), torch.empty(GLOBAL_BATCH), images(256))


class DiTBlock(nn.Module):
    """Attention and an MLP, scaled and moved by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.modulation = heads, nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        move, scale, gate, move_mlp, scale_mlp, gate_mlp = (
            self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        )  # fmt: skip
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + move
        query, key, value = self.qkv(y).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, value)))
        x = x + gate * self.out(mixed.transpose(1, 2).flatten(2))
        return x + gate_mlp * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + scale_mlp) + move_mlp)


class DiT(nn.Module):
    """DiT-XL/2 (arXiv 2212.09748) on latents of 32 × 32."""

    def __init__(self, width: int = 1152, layers: int = 28, heads: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.places = nn.Parameter(torch.empty(1, 256, width))
        self.label, self.time = nn.Embedding(1001, width), nn.Linear(256, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, time: Tensor, label: Tensor, noise: Tensor) -> Tensor:
        condition = self.time(time) + self.label(label)
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            tokens = block(tokens, condition)
        output = self.head(tokens).view(-1, 16, 16, 2, 2, 4).permute(0, 5, 1, 3, 2, 4)
        return F.mse_loss(output.reshape(x.shape), noise)


def dit() -> Example:
    latents = torch.empty(GLOBAL_BATCH, 4, 32, 32)
    return DiT(), (latents, torch.empty(GLOBAL_BATCH, 256), classes(), latents.clone())


# -- others ----------------------------------------------------------------------------------------
def pair(before: int, after: int) -> nn.Sequential:
    """Return two convolutions of a 3D U-Net."""
    layers: list[nn.Module] = []
    for width in (before, after):
        layers += [nn.Conv3d(width, after, 3, padding=1), nn.InstanceNorm3d(after, affine=True)]
        layers += [nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers)


class VolumeUNet(nn.Module):
    """A 3D U-Net (arXiv 1606.06650) with the widths of nnU-Net."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256, 320)) -> None:
        super().__init__()
        below = list(pairwise(widths))
        self.down = nn.ModuleList([pair(1, widths[0]), *(pair(a, b) for a, b in below)])
        self.rise = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in below)
        self.up = nn.ModuleList(pair(2 * a, a) for a, _ in below)
        self.head = nn.Conv3d(widths[0], 3, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skips = []
        for level, layer in enumerate(self.down):
            x = layer(F.max_pool3d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for rise, layer in reversed(list(zip(self.rise, self.up, strict=True))):
            x = layer(torch.cat((rise(x), skips.pop()), dim=1))
        return F.cross_entropy(self.head(x), target)


def volume_unet() -> Example:
    return VolumeUNet(), (torch.empty(GLOBAL_BATCH, 1, 96, 96, 96), classes(96, 96, 96))


class PointNet(nn.Module):
    """PointNet (arXiv 1612.00593) without its transforms: points to a class."""

    def __init__(self, widths: tuple[int, ...] = (3, 64, 64, 64, 128, 1024)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(),
            nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(256, 40),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(dim=-1))


def pointnet() -> Example:
    return Classifier(PointNet()), (torch.empty(GLOBAL_BATCH, 3, 2048), classes())


class DLRM(nn.Module):
    """DLRM (arXiv 1906.00091) at the sizes of MLPerf, tables of at most a million rows."""

    def __init__(self, tables: int = 26, rows: int = 1_000_000, width: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
            nn.Linear(256, width), nn.ReLU(),
        )  # fmt: skip
        self.top = nn.Sequential(
            nn.Linear(width + (tables + 1) ** 2, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
            nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1),
        )  # fmt: skip

    def forward(self, dense: Tensor, categories: Tensor, click: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *rows], dim=1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)
        logits = self.top(torch.cat((bottom, products), dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, click)


def dlrm() -> Example:
    batch = 64 * GLOBAL_BATCH
    categories = torch.empty(batch, 26, dtype=torch.int64)
    return DLRM(), (torch.empty(batch, 13), categories, torch.empty(batch))


class LstmLanguageModel(nn.Module):
    """Two layers of 1,024 (arXiv 1602.02410, its smaller one)."""

    def __init__(self, vocabulary: int = 32_000, width: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        logits = self.head(self.lstm(self.embedding(tokens))[0])
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def lstm() -> Example:
    return LstmLanguageModel(), (classes(128), classes(128))


class GraphConvolutions(nn.Module):
    """A graph convolution network (arXiv 1609.02907) on batches of dense graphs."""

    def __init__(self, features: int = 1433, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        widths = [features, *(width for _ in range(layers))]
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.head = nn.Linear(width, 40)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(adjacency @ layer(x))
        return self.head(x.mean(dim=1))


class GraphClassifier(nn.Module):
    """`model(x, adjacency, target)` is the cross-entropy of the graphs' classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GraphConvolutions()

    def forward(self, x: Tensor, adjacency: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x, adjacency), target)


def graphs() -> Example:
    nodes, edges = torch.empty(GLOBAL_BATCH, 2048, 1433), torch.empty(GLOBAL_BATCH, 2048, 2048)
    return GraphClassifier(), (nodes, edges, classes())


class ImageAutoencoder(nn.Module):
    """A convolutional variational autoencoder; the noise is an input."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512), latent: int = 512) -> None:
        super().__init__()
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        for before, after in zip((3, *widths), widths, strict=False):
            down += [nn.Conv2d(before, after, 4, 2, 1), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
            up = [nn.ReLU(), nn.ConvTranspose2d(after, before, 4, 2, 1), *up]
        self.encode = nn.Sequential(*down, nn.Flatten(), nn.Linear(512 * 16, 2 * latent))
        self.decode = nn.Sequential(
            nn.Linear(latent, 512 * 16), nn.Unflatten(1, (512, 4, 4)), *up, nn.Sigmoid()
        )

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        output = self.decode(mean + (log_variance / 2).exp() * noise)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(dim=1) / 2
        return F.mse_loss(output, x) + divergence.mean()


def autoencoder() -> Example:
    return ImageAutoencoder(), (images(64), torch.empty(GLOBAL_BATCH, 512))


SEGFORMER_B5 = {
    "depths": [3, 6, 40, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768,
    "num_labels": 150,
}  # fmt: skip
WAV2VEC2_LARGE = {
    **wide(24, 1024, 16), "feat_extract_norm": "layer", "do_stable_layer_norm": True,
    "conv_bias": True, "apply_spec_augment": False, "layerdrop": 0.0, "num_labels": 12,
}  # fmt: skip
CLIP_L = {
    "text_config": wide(12, 768, 12), "projection_dim": 768,
    "vision_config": {**wide(24, 1024, 16), "patch_size": 14},
}  # fmt: skip
WHISPER_LARGE = {
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
    "vocab_size": 51865,
}  # fmt: skip
FACTORIES: dict[str, Factory] = {
    "ResNet-18": torchvision("resnet18"),
    "ResNet-50": torchvision("resnet50"),
    "RegNetY-16GF": torchvision("regnet_y_16gf"),
    "DenseNet-121": torchvision("densenet121"),
    "MobileNetV3-L": torchvision("mobilenet_v3_large"),
    "EfficientNet-B4": torchvision("efficientnet_b4", 380),
    "ConvNeXt-L": torchvision("convnext_large"),
    "Swin-B": torchvision("swin_b"),
    "ViT-L/16": torchvision("vit_l_16"),
    "DeiT-B": timm("deit_base_patch16_224"),
    "EfficientNetV2-S": timm("tf_efficientnetv2_s", 300),
    "DeepLabV3": deeplab,
    "R3D-18": video,
    "SegFormer-B5": encoder(
        "AutoModelForSemanticSegmentation", "segformer", labeled_pixels, **SEGFORMER_B5,
    ),
    "DDPM U-Net": diffusion_unet,
    "DiT-XL/2": dit,
    "3D U-Net": volume_unet,
    "PointNet": pointnet,
    "VAE": autoencoder,
    "GPT-2 XL": decoder("gpt2", 1024, n_embd=1600, n_layer=48, n_head=25),
    "Llama-3 8B": decoder("llama", 2048, **mistral_shape(vocab_size=128_256)),
    "Mistral-7B": decoder("mistral", 2048, **mistral_shape(vocab_size=32_000)),
    "Gemma-2 9B": partial(of_loss, decoder(
        "gemma2", 2048, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256,
    )),
    "BERT-large": encoder(
        "AutoModelForMaskedLM", "bert", partial(labeled_tokens, 512), **wide(24, 1024, 16),
        max_position_embeddings=512,
    ),
    "T5-3B": encoder(
        "AutoModelForSeq2SeqLM", "t5", partial(labeled_tokens, 512), d_model=1024, d_ff=16384,
        num_layers=24, num_heads=32, d_kv=128, decoder_start_token_id=0,
    ),
    "Whisper-large": encoder("AutoModelForSpeechSeq2Seq", "whisper", whisper_inputs,
                             **WHISPER_LARGE),
    "wav2vec2-large": encoder(
        "AutoModelForAudioClassification", "wav2vec2", labeled_sound, **WAV2VEC2_LARGE,
    ),
    "CLIP-L/14": encoder("AutoModel", "clip", clip_inputs, **CLIP_L),
    "DLRM": dlrm,
    "LSTM LM": lstm,
    "GCN": graphs,
}  # fmt: skip
