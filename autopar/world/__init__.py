"""The hardware: how many ranks, what a device can do, what the links between ranks carry."""

from autopar.world.hardware import (
    KINDS,
    Attention,
    Copied,
    Device,
    Form,
    Forms,
    Level,
    Link,
    Measured,
)
from autopar.world.presets import PRESETS
from autopar.world.world import World

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
