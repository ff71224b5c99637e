"""Checkpoints of a training run, which any layout on any number of ranks goes on from.

    checkpoints = autopar.Checkpoints("runs/gpt", model=par, optimizer=optimizer, loader=loader)
    step = checkpoints.load() or 0  # None where there is none yet
    checkpoints.save(step)

A checkpoint is a folder of torch.distributed.checkpoint: tensors under the names of the original
model, each rank's parts in a file of its own. It is written beside its place and moved there once
all ranks are done, so a kill at any moment leaves the last one. What holds states enters, files
leave. Training scripts make these.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from autopar.errors import InputError
from autopar.runtime.module import ParallelModule
from autopar.world import ranks

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_STEP, _METADATA = "step-", ".metadata"
_OTHERS, _EMPTY_GROUP = "others.", "optimizer_group_without_parameters."
_SHOWN = 3  # differences that a message names


class Stateful(Protocol):
    """What has a state that is saved: a schedule, a loader, a GradScaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Checkpoints:
    """The checkpoints of a run, in one folder that all ranks see.

    >>> import autopar, tempfile
    >>> model = nn.Linear(8, 16)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> checkpoints = autopar.Checkpoints(tempfile.mkdtemp(), model=model, optimizer=optimizer)
    >>> checkpoints.load() is None
    True
    >>> checkpoints.save(10), checkpoints.load()
    (None, 10)

    `model` is a parallel model, or a plain one in a process of its own. Saved are its parameters
    and persistent buffers, the optimizer, the random states of torch, Python and of dropout, and
    `others`: whatever has state_dict and load_state_dict, by name. `most`: how many checkpoints
    stay, those written last. `asynchronous`: `save` returns once the state is copied to the CPU,
    and a thread writes it. All ranks make every call together.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        most: int = 2,
        asynchronous: bool = False,
        **others: Stateful,
    ) -> None:
        if most < 1:
            raise InputError(
                f"most is {most}: at least the last checkpoint stays, so give 1 or more"
            )
        self.folder, self.most, self.asynchronous = Path(folder), most, asynchronous
        self._model, self._optimizer, self._others = model, optimizer, others
        self._lock = threading.Lock()
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[Future[Any], Callable[[], None]] | None = None

    # -- writing -----------------------------------------------------------------------------------
    def save(self, step: int) -> None:
        """Write a checkpoint of this step. Collective. First waits for the checkpoint before it,
        and raises what went wrong with that.
        """
        self.wait()
        partial, place = self.folder / f".{_STEP}{step}.partial", self.folder / f"{_STEP}{step}"
        ranks.together("making the checkpoint's folder", lambda: self._make_room(partial))
        ranks.meet()
        state = self._state()

        def finish() -> None:
            with self._lock:  # a thread that has written comes here, and `wait`
                if not ranks.rank() and partial.exists():
                    _move(partial, place)
                    self._drop_old()

        if self.asynchronous and ranks.others():
            self._group = self._group or dist.new_group(backend="gloo")
            written = dcp.async_save(state, checkpoint_id=partial, process_group=self._group)
            assert isinstance(written, Future)
            self._pending = written, finish
            written.add_done_callback(lambda done: None if done.exception() else finish())
            return
        with _alone_is_meant():
            dcp.save(state, checkpoint_id=partial, no_dist=not ranks.others())
        ranks.together("finishing the checkpoint", finish)

    def wait(self) -> None:
        """Wait until the checkpoint under way is written. Collective. Raises what went wrong."""
        if self._pending is not None:
            written, finish = self._pending
            self._pending = None
            ranks.together("writing the checkpoint", written.result)
            ranks.together("finishing the checkpoint", finish)

    def _make_room(self, partial: Path) -> None:
        """Make an empty folder to write to, in place of what a killed run left."""
        if not ranks.rank():
            self._put_back()
            for left in self.folder.glob(f".{_STEP}*"):
                shutil.rmtree(left)
            partial.mkdir(parents=True)

    def _put_back(self) -> list[int]:
        """Put back a checkpoint that was moved away for one of its step that never came, and return
        all steps.
        """
        for old in self.folder.glob(f".{_STEP}*.old") if not ranks.rank() else ():
            place = self.folder / old.name.removeprefix(".").removesuffix(".old")
            if not place.exists():
                old.rename(place)
        return self.steps()

    def _drop_old(self) -> None:
        for step in self.steps()[: -self.most]:
            shutil.rmtree(self.folder / f"{_STEP}{step}")

    # -- reading -----------------------------------------------------------------------------------
    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, in the order in which they were written. So
        the last one is the newest also if a run went back to an earlier step.
        """
        written = sorted(
            self.folder.glob(f"{_STEP}*/{_METADATA}"), key=lambda path: path.stat().st_mtime_ns
        )
        numbers = (path.parent.name.removeprefix(_STEP) for path in written)
        return [int(number) for number in numbers if number.isdigit()]

    def load(self, step: int | None = None) -> int | None:
        """Restore the checkpoint of a step, by default the last one written, and return its step;
        None if there is no checkpoint. Collective. Raises InputError if it is of another model or
        lacks something; the model is then unchanged.
        """
        self.wait()
        there = ranks.from_rank_0(ranks.together("looking for checkpoints", self._put_back))
        if step is None and not there:
            return None
        step = there[-1] if step is None else step
        if step not in there:
            raise InputError(f"{self.folder} has no checkpoint of step {step}; it has {there}")
        place = self.folder / f"{_STEP}{step}"
        metadata: Metadata = ranks.together(
            "reading the checkpoint", dcp.FileSystemReader(place).read_metadata
        )
        state = self._state()
        # the ranks of a pipeline hold parameters of their own stages
        known = {name for names in ranks.all_of([*state["model"]]) for name in names}
        ranks.together(
            "comparing with the checkpoint", lambda: _compare(state, known, metadata, place)
        )
        own = f"random.{ranks.rank()}"
        if own in state and own not in metadata.state_dict_metadata:
            state["random.0"] = state.pop(own)
        with _alone_is_meant():
            dcp.load(state, checkpoint_id=place, no_dist=not ranks.others())
        self._take(state)
        return step

    # -- states ------------------------------------------------------------------------------------
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": {
                name: value if isinstance(value, torch.Tensor) else _packed(value)
                for name, value in self._model.state_dict().items()  # others: extra states
            }
        }
        if self._optimizer is not None:
            state |= _optimizer_state(self._model, self._optimizer)
        for name, other in self._others.items():
            state[f"{_OTHERS}{name}"] = _packed(other.state_dict())
        state[f"random.{ranks.rank()}"] = _packed(_random_state(self._model))
        return state

    def _take(self, state: Mapping[str, Any]) -> None:
        """Hand the states that were read to what they belong to."""
        self._model.load_state_dict(
            {
                name: value if isinstance(value, torch.Tensor) else _unpacked(value)
                for name, value in state["model"].items()
            }
        )
        if self._optimizer is not None:
            _set_optimizer_state(self._model, self._optimizer, state)
        for name, other in self._others.items():
            other.load_state_dict(_unpacked(state[f"{_OTHERS}{name}"]))
        (own,) = (value for name, value in state.items() if name.startswith("random."))
        _set_random_state(self._model, _unpacked(own))


@contextmanager
def _alone_is_meant() -> Iterator[None]:
    """torch warns of every checkpoint of a process that has no others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _move(partial: Path, place: Path) -> None:
    """Move a complete checkpoint to its place; one of the same step goes."""
    if place.exists():
        place.rename(place.with_name(f".{place.name}.old"))
    partial.rename(place)
    shutil.rmtree(place.with_name(f".{place.name}.old"), ignore_errors=True)


def _packed(state: Any) -> bytes:
    """Return a state as one value, so that its own structure is free to change."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by the names of parameters, and what groups without parameters
    hold (lr, betas), which no parameter's name could stand for, in their order.
    """
    state: dict[str, Any] = {"optimizer": {}}
    with _without_empty_groups(optimizer):
        if optimizer.param_groups:
            state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    for number, group in enumerate(_empty_everywhere(optimizer)):
        settings = {name: value for name, value in group.items() if name != "params"}
        state[f"{_EMPTY_GROUP}{number}"] = _packed(settings)
    return state


def _set_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Give the optimizer what `_optimizer_state` returned."""
    empty = _empty_everywhere(optimizer)
    with _without_empty_groups(optimizer):
        if optimizer.param_groups:
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_OPTIONS)
    for number, group in enumerate(empty):
        for name, value in _unpacked(state[f"{_EMPTY_GROUP}{number}"]).items():
            own = group.get(name)
            if isinstance(own, torch.Tensor):  # a rate that a compiled optimizer reads
                value = torch.as_tensor(value, dtype=own.dtype, device=own.device)
            group[name] = value


def _empty_everywhere(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups without parameters on any rank. Collective: the parameters of a group may
    be those of another stage of a pipeline.
    """
    own = [n for n, group in enumerate(optimizer.param_groups) if not group["params"]]
    common = set(own).intersection(*ranks.all_of(own))
    return [optimizer.param_groups[n] for n in sorted(common)]


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take the groups without parameters out of the optimizer within the block: torch's functions
    of a distributed optimizer's state know a group by its first parameter.
    """
    groups = optimizer.param_groups
    if all(group["params"] for group in groups):
        yield
        return
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:  # a state that was loaded has made the others anew
        others = iter(optimizer.param_groups)
        optimizer.param_groups = [next(others) if g["params"] else g for g in groups]


def _random_state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        state["device"] = torch.get_device_module().get_rng_state()
    if isinstance(model, ParallelModule):
        state["dropout"] = model.seed
    return state


def _set_random_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "device" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["device"])
    if "dropout" in state and isinstance(model, ParallelModule):
        model.seed = state["dropout"]


def _compare(
    state: Mapping[str, Any], known: Collection[str], metadata: Metadata, place: Path
) -> None:
    """Raise InputError where a checkpoint is of another model: with what it lacks and what has
    another shape. `known`: the names that the model has on any rank.
    """
    saved = metadata.state_dict_metadata
    wanted = {f"model.{name}": value for name, value in state["model"].items()}
    others = [*(f"optimizer.{name}" for name in state.get("optimizer", ()))]
    others += [name for name in state if name.startswith((_OTHERS, _EMPTY_GROUP))]
    faults = [f"it lacks {name}" for name in (*wanted, *others) if name not in saved]
    if "optimizer" in state:
        faults += [
            f"it has {name}, which the optimizer has not"
            for name in saved
            if name.startswith(_EMPTY_GROUP) and name not in state
        ]
    faults += [
        f"it has {name}, which the model has not"
        for name in saved
        if name.startswith("model.") and name.removeprefix("model.") not in known
    ]
    for name, value in wanted.items():
        entry = saved.get(name)
        if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) != tuple(value.shape):
            faults.append(f"{name} is {tuple(entry.size)} there and {tuple(value.shape)} here")
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise InputError(
            f"the checkpoint {place} is of something else: {'; '.join(faults[:_SHOWN])}{more}. "
            "Build the model, the optimizer and what else is saved as the run did that wrote it"
        )
