"""autopar: take a single-device PyTorch model and make it a distributed one."""

from . import report
from .api import apply, parallelize, plan, verify
from .compiled import backend
from .errors import (
    AutoparError,
    InputError,
    LayoutError,
    PlanError,
    RankError,
    TraceError,
    VerificationError,
    WorldError,
)
from .layouts import Grid2D, Grid3D, Grid4D, Grid25D
from .module import ParallelModule
from .plan import Plan
from .verify import Check
from .world import Device, Level, World

__all__ = [
    "AutoparError",
    "Check",
    "Device",
    "Grid2D",
    "Grid3D",
    "Grid4D",
    "Grid25D",
    "InputError",
    "LayoutError",
    "Level",
    "ParallelModule",
    "Plan",
    "PlanError",
    "RankError",
    "TraceError",
    "VerificationError",
    "World",
    "WorldError",
    "apply",
    "backend",
    "parallelize",
    "plan",
    "report",
    "verify",
]
