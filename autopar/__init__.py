"""autopar: take a single-device PyTorch model and make it a distributed one."""

import gc

_collects = gc.isenabled()
gc.disable()  # as ir/garbage.py does, which cannot be imported before torch
try:
    from autopar.api import apply, parallelize, plan, verify
    from autopar.errors import (
        AutoparError,
        InputError,
        LayoutError,
        PlanError,
        RankError,
        TraceError,
        VerificationError,
        WorldError,
    )
    from autopar.ir.plan import Plan
    from autopar.ir.show import listing
    from autopar.ops.rules.user_rules import rule
    from autopar.planner.request import (
        Grid2D,
        Grid3D,
        Grid4D,
        Grid25D,
        GridContext,
        GridEP,
        GridHSDP,
        Stages,
    )
    from autopar.runtime.dynamo_backend import backend
    from autopar.runtime.module import ParallelModule
    from autopar.runtime.parallel_tensor import own_shards
    from autopar.runtime.training.adapters import fabric_strategy, prepare
    from autopar.runtime.training.checkpoint import Checkpoints
    from autopar.runtime.training.trainer import ParallelTrainer
    from autopar.runtime.verify import Check
    from autopar.world import Device, Level, World
finally:
    if _collects:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()

__all__ = [
    "AutoparError",
    "Check",
    "Checkpoints",
    "Device",
    "Grid2D",
    "Grid3D",
    "Grid4D",
    "Grid25D",
    "GridContext",
    "GridEP",
    "GridHSDP",
    "InputError",
    "LayoutError",
    "Level",
    "ParallelModule",
    "ParallelTrainer",
    "Plan",
    "PlanError",
    "RankError",
    "Stages",
    "TraceError",
    "VerificationError",
    "World",
    "WorldError",
    "apply",
    "backend",
    "fabric_strategy",
    "listing",
    "own_shards",
    "parallelize",
    "plan",
    "prepare",
    "rule",
    "verify",
]
