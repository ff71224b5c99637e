"""autopar: take a single-device PyTorch model and make it a distributed one."""

from .api import plan, verify
from .plan import Plan
from .world import Device, Level, World

__all__ = ["Device", "Level", "Plan", "World", "plan", "verify"]
