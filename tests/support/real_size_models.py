"""Models at the widths of their papers with a few samples, for training on gloo ranks: from
configurations of transformers, in training mode, without dropout, in float64: a ReLU or a batch
norm of a few numbers turns the rounding of float32 into per cents within three steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SAMPLES = 4  # one on each of four ranks
Example = tuple[nn.Module, dict[str, Tensor]]


def _pictures(model: nn.Module, pixels: int = 224) -> Example:
    images, labels = torch.randn(SAMPLES, 3, pixels, pixels), torch.randint(0, 1000, (SAMPLES,))
    return model, {"pixel_values": images, "labels": labels}


def _tokens(model: nn.Module, vocabulary: int, length: int) -> Example:
    ids = torch.randint(0, vocabulary, (SAMPLES, length))
    return model, {"input_ids": ids, "labels": ids.roll(1, 1)}


def _resnet(pixels: int, **options: Any) -> Example:
    config = transformers.ResNetConfig(num_labels=1000, **options)
    return _pictures(transformers.ResNetForImageClassification(config), pixels)


def resnet_10_at_64() -> Example:
    """ResNet-18 at its widths with one block at each, on smaller pictures."""
    return _resnet(64, layer_type="basic", depths=[1, 1, 1, 1], hidden_sizes=[64, 128, 256, 512])


def resnet_50() -> Example:
    return _resnet(224)


def vit_b() -> Example:
    config = transformers.ViTConfig(
        num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return _pictures(transformers.ViTForImageClassification(config))


def convnext_t() -> Example:
    config = transformers.ConvNextConfig(num_labels=1000)
    return _pictures(transformers.ConvNextForImageClassification(config))


def bert_base() -> Example:
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _tokens(transformers.BertForMaskedLM(config), config.vocab_size, 128)


def gpt2_small() -> Example:
    """Of 64 tokens: with 256, its logits and their gradients took one device to 10 GB."""
    config = transformers.GPT2Config(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    return _tokens(transformers.GPT2LMHeadModel(config), config.vocab_size, 64)


REAL_SIZES: dict[str, Callable[[], Example]] = {
    f.__name__: f for f in (resnet_10_at_64, resnet_50, vit_b, convnext_t, bert_base, gpt2_small)
}


def example(name: str) -> Example:
    """The model, the same on every rank, and its inputs."""
    torch.manual_seed(0)
    model, inputs = REAL_SIZES[name]()
    wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    return model.double().train(), wide
