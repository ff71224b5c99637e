"""Parallel models under the training loops of Lightning Fabric and of Accelerate.

    fabric = Fabric(strategy=autopar.fabric_strategy())  # Lightning Fabric
    accelerator = Accelerator()  # or Accelerate
    par, optimizer = autopar.prepare(accelerator, par, optimizer)

A model is made parallel before it is handed to either, so that the optimizer holds its parameters
from the start. Both would wrap a model in DistributedDataParallel and deal the batches out to the
ranks: here the graph sends what is to be sent, and every rank passes the global batch. A parallel
model and what trains it enter, the objects of the framework leave. Neither is imported before it is
used. Training scripts call these.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.module import ParallelModule
from autopar.runtime.training.checkpoint import Checkpoints

Path = str | os.PathLike[str]
State = dict[str, Any]

_PACKAGES = ("lightning.fabric", "lightning_fabric")  # one library under two names
_LATEST = 0  # a path of Fabric holds one checkpoint, which is kept as that of this step


class Value:
    """A plain value of a checkpoint, such as a number of steps, with a state as modules have one.

    >>> step = Value(3)
    >>> step.load_state_dict(Value(5).state_dict())
    >>> step.value
    5
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


# -- Lightning Fabric ------------------------------------------------------------------------------
def fabric_strategy(**options: Any) -> Any:
    """Return the strategy under which Lightning Fabric trains a parallel model.

    >>> from lightning.fabric import Fabric  # doctest: +SKIP
    >>> fabric = Fabric(strategy=autopar.fabric_strategy(), devices=8)  # doctest: +SKIP
    >>> fabric.launch()  # doctest: +SKIP
    >>> par = autopar.parallelize(model, inputs=batch)  # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(par.parameters())  # doctest: +SKIP
    >>> par, optimizer = fabric.setup(par, optimizer)  # doctest: +SKIP

    - `options`: those of Fabric's DDPStrategy that say how ranks are started and connected:
      `process_group_backend`, `timeout`, `cluster_environment`.

    `fabric.setup` leaves the parallel model as it is and `setup_dataloaders` gives every rank the
    global batch. `fabric.save(folder, state)` and `fabric.load(folder, state)` write and read an
    autopar.Checkpoints, whose random states go along; `state` has one model, at most one optimizer
    and whatever else has a state or is a plain value.

    Raises ImportError where Fabric is not installed. `setup` raises InputError for a model that is
    not parallel.
    """
    return _strategy_class(_fabric_package())(**options)


def _fabric_package() -> ModuleType:
    """Return Fabric's package, by the name under which the script has imported it."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    for name in (*imported, *_PACKAGES):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "."):
                raise
    raise ImportError(
        "Lightning Fabric is not installed: pip install lightning, or lightning-fabric"
    )


@functools.cache
def _strategy_class(fabric: ModuleType) -> type:
    """Return the strategy's class: DDPStrategy starts and connects the ranks."""
    strategies = importlib.import_module(f"{fabric.__name__}.strategies")

    class AutoparStrategy(strategies.DDPStrategy):  # type: ignore[name-defined]
        """What DDPStrategy does with ranks, and nothing of what it does with models."""

        distributed_sampler_kwargs = None  # every rank passes the global batch

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._backward_sync_control = None  # a graph's sums are not left out: Fabric says so

        def setup_module(self, module: nn.Module) -> nn.Module:
            return require_parallel(module, "fabric.setup")

        def module_to_device(self, module: nn.Module) -> None:
            require_parallel(module, "fabric.setup")  # its parts are on this rank's device

        def save_checkpoint(
            self, path: Path, state: State, storage_options: Any = None, filter: Any = None
        ) -> None:
            _save(path, state, storage_options, filter)

        def load_checkpoint(
            self, path: Path, state: Any = None, strict: bool = True, weights_only: Any = None
        ) -> State:
            return _load(path, state)

    return AutoparStrategy


def _save(path: Path, state: State, storage_options: Any, filter: Any) -> None:
    if storage_options is not None or filter is not None:
        raise InputError(
            "fabric.save with a filter or storage options: a checkpoint of a parallel model is a "
            "folder with all of the state, so leave them out"
        )
    _checkpoints(path, state, _values(state)).save(_LATEST)


def _load(path: Path, state: Any) -> State:
    """Read what `state` names into it, and return what else there is: nothing."""
    if not isinstance(state, dict):
        raise InputError(
            "fabric.load without a dict of what is loaded: each rank reads its own parts into the "
            "model, so give the state that fabric.save was given"
        )
    values = _values(state)
    _checkpoints(path, state, values).load(_LATEST)
    state.update({name: value.value for name, value in values.items()})
    return {}


def _values(state: Mapping[str, Any]) -> dict[str, Value]:
    """Return the plain values of a state, by name."""
    return {name: Value(entry) for name, entry in state.items() if not hasattr(entry, "state_dict")}


def _checkpoints(path: Path, state: Mapping[str, Any], values: Mapping[str, Value]) -> Checkpoints:
    """Return the checkpoints at a path of Fabric. Raises InputError for several models."""
    models = [entry for entry in state.values() if isinstance(entry, ParallelModule)]
    optimizers = [entry for entry in state.values() if isinstance(entry, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        raise InputError(
            f"a state with {len(models)} parallel models and {len(optimizers)} optimizers: a "
            "checkpoint has one model and at most one optimizer, so save each in its own folder"
        )
    others = {
        f"state.{name}": values.get(name, entry)
        for name, entry in state.items()
        if not isinstance(entry, ParallelModule | torch.optim.Optimizer)
    }
    return Checkpoints(path, model=models[0], optimizer=next(iter(optimizers), None), **others)


def require_parallel(module: nn.Module, call: str) -> nn.Module:
    """Return a parallel model; raise InputError for another one, and for one in stages: what clips
    gradients and gathers predictions here would see one stage.
    """
    if not isinstance(module, ParallelModule):
        raise InputError(
            f"{call} has a {type(module).__name__}, which is not parallel: call "
            "autopar.parallelize(model, inputs=...) first, with the process group up, and give the "
            "optimizer the parameters of what it returns"
        )
    if module.plan.stage_starts:
        raise InputError(
            f"{call} has a model in stages ({module.plan.layout}), whose gradients and predictions "
            "it would see of one stage alone: write the loop with par.clip_grad_norm_, or plan "
            "without autopar.Stages"
        )
    return module


# -- Accelerate ------------------------------------------------------------------------------------
def prepare(accelerator: Any, *objects: Any) -> Any:
    """Return `objects` as `accelerator.prepare` does, in their order: parallel models, optimizers
    and schedules, known to the accelerator.

    >>> accelerator = accelerate.Accelerator()  # doctest: +SKIP
    >>> par = autopar.parallelize(model, inputs=batch)  # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(par.parameters())  # doctest: +SKIP
    >>> par, optimizer = autopar.prepare(accelerator, par, optimizer)  # doctest: +SKIP

    - `accelerator`: an accelerate.Accelerator; `accumulate`, `backward` and `clip_grad_norm_` are
      then those of any script.
    - `objects`: models stay as they are, but for its autocast; a schedule moves on once for each
      step of its optimizer; whatever else there is, such as `par.loader(rows)`, is returned as it
      is, since every rank passes the global batch.

    Raises InputError for a model that is not parallel.
    """
    prepared = tuple(_prepare(accelerator, entry) for entry in objects)
    return prepared if len(prepared) != 1 else prepared[0]


def _prepare(accelerator: Any, entry: Any) -> Any:
    if isinstance(entry, nn.Module):
        require_parallel(entry, "autopar.prepare")
        # "evaluation" leaves out DistributedDataParallel; the graph reduces the gradients
        return accelerator.prepare_model(entry, device_placement=False, evaluation_mode=True)
    if isinstance(entry, torch.optim.Optimizer):
        return accelerator.prepare_optimizer(entry, device_placement=False)
    if isinstance(entry, torch.optim.lr_scheduler.LRScheduler):
        schedule = accelerator.prepare_scheduler(entry)
        schedule.split_batches = True  # the batch is the global one: a step is one step
        return schedule
    return entry
