"""The hardware: how many ranks, what a device can do, what the links between ranks carry."""

from .cluster import World
from .hardware import KINDS, Attention, Copied, Device, Form, Forms, Level, Link, Measured
from .presets import PRESETS

__all__ = [
    "KINDS",
    "PRESETS",
    "Attention",
    "Copied",
    "Device",
    "Form",
    "Forms",
    "Level",
    "Link",
    "Measured",
    "World",
]
