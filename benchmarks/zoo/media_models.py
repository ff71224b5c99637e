"""Tiny vision, audio and multimodal models of transformers."""
from benchmarks.zoo.sizes import Factory
VISION: dict[str, Factory] = {}
AUDIO: dict[str, Factory] = {}
MULTIMODAL: dict[str, Factory] = {}
