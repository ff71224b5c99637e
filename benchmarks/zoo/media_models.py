"""Tiny vision, audio and multimodal models of transformers, made from their configurations."""

from __future__ import annotations

from typing import Any

import torch

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
from benchmarks.zoo.text_models import BART, COMMON, GROUPED, build

IMAGE = 16
BLOCKS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
PATCHES = {**BLOCKS, "image_size": IMAGE, "patch_size": 4}


def images() -> torch.Tensor:
    """Return random images of (BATCH, 3, IMAGE, IMAGE)."""
    return torch.randn(BATCH, 3, IMAGE, IMAGE)


def image_classes(kind: str, **options: Any) -> Factory:
    """Return the factory of a classifier of images."""

    def make() -> Example:
        settings = {**options, "num_labels": CLASSES}
        model = build("AutoModelForImageClassification", kind, settings)
        return model, {"pixel_values": images(), "labels": class_labels()}

    return make


def deit() -> Example:
    """A classifier of images, by its class: the automatic one fails for this configuration."""
    from transformers.models.deit.configuration_deit import DeiTConfig
    from transformers.models.deit.modeling_deit import DeiTForImageClassification

    model = DeiTForImageClassification(DeiTConfig(**{**PATCHES, "num_labels": CLASSES})).train()
    return model, {"pixel_values": images(), "labels": class_labels()}


def segformer() -> Example:
    """A label for every pixel."""
    options = {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": HIDDEN,
        "num_labels": CLASSES,
    }
    labels = torch.randint(0, CLASSES, (BATCH, IMAGE, IMAGE))
    model = build("AutoModelForSemanticSegmentation", "segformer", options)
    return model, {"pixel_values": images(), "labels": labels}


VISION: dict[str, Factory] = {
    "vit": image_classes("vit", **PATCHES),
    "deit": deit,
    "beit": image_classes("beit", **PATCHES),
    "dinov2": image_classes("dinov2", **PATCHES, mlp_ratio=2),
    "swin": image_classes(
        "swin", image_size=IMAGE, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": image_classes(
        "convnext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=2
    ),
    "resnet": image_classes(
        "resnet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"
    ),
    "segformer": segformer,
}  # fmt: skip


# -- audio -----------------------------------------------------------------------------------------
WAVES = {
    **BLOCKS,
    "vocab_size": VOCABULARY,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "num_labels": CLASSES,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}


def wave_classes(kind: str) -> Factory:
    """Return the factory of a classifier of waveforms."""

    def make() -> Example:
        model = build("AutoModelForAudioClassification", kind, WAVES)
        return model, {"input_values": torch.randn(BATCH, 128), "labels": class_labels()}

    return make


def spectrogram_transformer() -> Example:
    """A classifier of mel spectrograms."""
    options = {**BLOCKS, "num_mel_bins": 16, "max_length": 16, "patch_size": 4}
    strides = {"frequency_stride": 4, "time_stride": 4, "num_labels": CLASSES}
    model = build(
        "AutoModelForAudioClassification", "audio-spectrogram-transformer", options | strides
    )
    return model, {"input_values": torch.randn(BATCH, 16, 16), "labels": class_labels()}


def whisper() -> Example:
    """Speech to text."""
    options = {**COMMON, **BART, "num_mel_bins": 8, "max_source_positions": 16}
    model = build("AutoModelForSpeechSeq2Seq", "whisper", {**options, "max_target_positions": 16})
    return model, {"input_features": torch.randn(BATCH, 8, 32), "labels": token_ids()}


AUDIO: dict[str, Factory] = {
    "whisper": whisper,
    "wav2vec2": wave_classes("wav2vec2"),
    "hubert": wave_classes("hubert"),
    "audio spectrogram": spectrogram_transformer,
}


# -- text and images -------------------------------------------------------------------------------
TEXT = {**COMMON, "max_position_embeddings": 16}


def contrastive(kind: str, **options: Any) -> Factory:
    """Return the factory of two towers, of texts and of images, with a contrastive loss."""

    def make() -> Example:
        towers = {"text_config": TEXT, "vision_config": PATCHES}
        model = build("AutoModel", kind, {**towers, **options})
        return model, {"input_ids": token_ids(), "pixel_values": images(), "return_loss": True}

    return make


def llava() -> Example:
    """A decoder that reads an image's patches among its tokens."""
    image_token = VOCABULARY - 1
    options = {
        "vision_config": {"model_type": "clip_vision_model", **PATCHES},
        "text_config": {"model_type": "llama", **COMMON, **GROUPED},
        "image_token_index": image_token,
        "vision_feature_layer": -1,
    }
    ids = torch.randint(3, image_token, (BATCH, 16 + SEQUENCE))
    ids[:, :16] = image_token
    model = build("AutoModelForImageTextToText", "llava", options)
    return model, {"input_ids": ids, "pixel_values": images(), "labels": ids.clone()}


def vision_encoder_decoder() -> Example:
    """A caption for an image: a vision transformer, and a decoder that attends to it."""
    from transformers import (
        GPT2Config,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
        ViTConfig,
    )

    sizes: dict[str, Any] = {
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 16,
    }
    kind: dict[str, Any] = {"add_cross_attention": True, "is_decoder": True}
    decoder = GPT2Config(vocab_size=VOCABULARY, **sizes, **kind)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**PATCHES), decoder)
    config.pad_token_id, config.decoder_start_token_id = 0, 1
    model = VisionEncoderDecoderModel(config=config).train()
    return model, {"pixel_values": images(), "labels": token_ids()}


MULTIMODAL: dict[str, Factory] = {
    "clip": contrastive("clip", projection_dim=16),
    "siglip": contrastive("siglip"),
    "llava": llava,
    "vision encoder-decoder": vision_encoder_decoder,
}
