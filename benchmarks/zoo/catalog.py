"""Every model of the zoo by name, family by family."""

from __future__ import annotations

from benchmarks.zoo import media_models, text_models, torch_models
from benchmarks.zoo.sizes import Factory

FAMILIES: dict[str, dict[str, Factory]] = {
    "decoder": text_models.DECODERS,
    "encoder": text_models.ENCODERS,
    "encoder-decoder": text_models.ENCODER_DECODERS,
    "mixture of experts": text_models.MIXTURES,
    "state space": text_models.STATE_SPACE,
    "vision": media_models.VISION,
    "audio": media_models.AUDIO,
    "multimodal": media_models.MULTIMODAL,
    "torch": torch_models.MODELS,
}
FACTORIES: dict[str, Factory] = {
    name: factory for family in FAMILIES.values() for name, factory in family.items()
}
FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names}
