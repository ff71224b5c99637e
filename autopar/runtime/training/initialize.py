"""Give a parallel model its first numbers, without any rank holding the whole.

    with torch.device("meta"):
        model = GPT(config)
    par = autopar.parallelize(model, inputs=inputs)
    par.init_weights()  # those that GPT(config) would have had on one device

Every rank draws the same numbers on the CPU, one module after another in the order in which one
device does: constructors, children first; what a model of transformers does at its end; a function
of the user's. What a module draws is cut to the rank's part and freed. A tensor that is initialized
twice is not held from the first time to the last: the first is drawn for the generator alone, and
again, from the generator's state of then, where the last one reads it. Which tensors an
initialization writes is found on the meta device first. The model without its numbers enters, the
tensors of a ParallelModule are written. runtime/module.py calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._compat import TorchDispatchMode, pytree
from autopar.errors import InputError
from autopar.ir.graph import is_inexact
from autopar.runtime.training.stored import StoredTensors
from autopar.world import ranks

Init = Callable[[nn.Module], Any]
CONSTRUCTOR, PRETRAINED, USER = range(3)  # what initializes, in the order in which it does


class _Step(NamedTuple):
    """The initialization of one module. `writes`: the names of the tensors that it writes; `over`:
    of those, the ones whose earlier numbers it does not read.
    """

    name: str
    module: nn.Module
    init: Init | None
    kind: int
    writes: tuple[str, ...]
    over: frozenset[str]


def init_weights(
    bare: AbstractContextManager[nn.Module], init: Init | None, stored: StoredTensors
) -> None:
    """Initialize the model that `bare` gives, whose tensors are on the meta device, module by
    module, and store the numbers of what has none yet; where all has some, of everything. `init`:
    what is called on every module at last, as by nn.Module.apply. Raises InputError for parameters
    that nothing initializes. Collective.
    """
    wanted, tensors = set(stored.empty) or set(stored.by_name()), stored.all_tensors()

    def take(name: str, value: torch.Tensor) -> None:
        if name in wanted:
            stored.fill(tensors[name], value)

    own, common = torch.get_rng_state(), ranks.from_rank_0(torch.get_rng_state())
    with bare as model, torch.no_grad():
        steps = list(_constructed(model))
        if init is not None:
            steps += [_step(*named, init, USER) for named in _children_first("", model)]
        _refuse_unwritten(model, steps)
        torch.set_rng_state(common)
        _Run(model, steps).store(take)
    if not torch.equal(own, common):
        torch.set_rng_state(own)
        torch.rand(())  # no rank's generator is as after torch.manual_seed: see Seed.renewed


# -- the order -------------------------------------------------------------------------------------
def _constructed(model: nn.Module) -> Iterator[_Step]:
    """Yield what happens as the model is made on one device. Modules of torch initialize
    themselves. A model of transformers then initializes all below it again, but for a model of
    transformers within, which has done so at its own end.
    """
    done: set[int] = set()
    seen: set[int] = set()  # a module in two places is made once

    def construct(name: str, module: nn.Module) -> Iterator[_Step]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child, inner in module.named_children():
            yield from construct(f"{name}{child}.", inner)
        yield _step(name, module, _reset_of(module), CONSTRUCTOR)
        if _is_pretrained(module):
            for inner_name, inner in _children_first(name, module):
                if id(inner) not in done:
                    own = cast(Any, module)._init_weights
                    yield _step(inner_name, inner, own, PRETRAINED)
                    done.add(id(inner))

    yield from construct("", model)


def _step(name: str, module: nn.Module, init: Init | None, kind: int) -> _Step:
    writes = {} if init is None else dict(_written(name, module, init))
    over = frozenset(n for n, overwritten in writes.items() if overwritten)
    return _Step(name, module, init, kind, tuple(writes), over)


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child, inner in module.named_children():
        yield from _children_first(f"{name}{child}.", inner)
    yield name, module


def _is_pretrained(module: nn.Module) -> bool:
    return callable(getattr(module, "_init_weights", None)) and hasattr(module, "config")


def _reset_of(module: nn.Module) -> Init | None:
    """Return what a module of torch initializes itself with, as it is made."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            return lambda _: reset()
    if type(module).__name__ == "Conv1D":  # of transformers, for GPT-2
        return lambda conv: nn.init.normal_(cast(Any, conv).weight, std=0.02)
    return None


# -- what is written -------------------------------------------------------------------------------
_READS = 1000  # of numbers that an initialization makes at most, before it is given up
# Ops that write every number of a tensor and read none.
_OVERWRITES = frozenset({"normal_", "uniform_", "fill_", "zero_", "copy_", "bernoulli_", "random_"})


class _NotMeta(TorchFunctionMode):
    """Hides the meta device, on which functions of torch.nn.init return at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func == _IS_META else func(*args, **(kwargs or {}))


_IS_META = cast(Any, torch.Tensor.is_meta).__get__


class _Writes(TorchDispatchMode):
    """Records the storages that ops write to, and those that are written over, all of them, before
    an op reads them. A number that is read, such as whether any is too large, is zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.over: set[int] = set()
        self._touched: set[int] = set()
        self._reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            self._reads += 1
            if self._reads < _READS:  # else torch says that there is none
                return torch.zeros((), dtype=args[0].dtype).item()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or argument.alias_info.is_write:  # else it makes a view
                written = argument.alias_info is not None
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        self._record_access(tensor, written, func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))

    def _record_access(self, tensor: torch.Tensor, written: bool, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        if written:
            self.written.add(key)
            if key not in self._touched and op in _OVERWRITES and whole:
                self.over.add(key)
        self._touched.add(key)


def _written(name: str, module: nn.Module, init: Init) -> Iterator[tuple[str, bool]]:
    """Yield the names of the tensors of a module, and of those below it, that its initialization
    writes, and whether it writes over all that they held: every tensor where that cannot be found
    on the meta device.
    """
    named = dict(_tensors(module))
    before, mode = {n: id(x) for n, x in named.items()}, _Writes()
    runs = True
    try:
        with mode, _NotMeta(), torch.no_grad():
            init(module)
    except Exception:  # whatever needs numbers
        runs = False
    for tensor_name, tensor in dict(_tensors(module)).items():
        replaced = before.get(tensor_name) != id(tensor)
        key = tensor.untyped_storage()._cdata
        if not runs or replaced or key in mode.written:
            yield name + tensor_name, runs and not replaced and key in mode.over
    for tensor_name, tensor in named.items():  # what was put in its place is no part of the model
        _put(module, tensor_name, tensor)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    *path, last = name.split(".")
    holder = module.get_submodule(".".join(path))
    registry = holder._parameters if last in holder._parameters else holder._buffers
    registry[last] = tensor  # type: ignore[assignment]


def _refuse_unwritten(model: nn.Module, steps: list[_Step]) -> None:
    """Raise InputError where a parameter is written by no module's initialization."""
    first = _first_names(model)
    written = {first[name] for step in steps for name in step.writes}
    for name, _ in model.named_parameters():
        if first[name] not in written:
            holder = model.get_submodule(name.rpartition(".")[0])
            raise InputError(
                f"{name} has no numbers and {type(holder).__name__} does not initialize it: "
                "give its class a reset_parameters, or give init_weights a function as "
                "nn.Module.apply takes it"
            )


# -- numbers ---------------------------------------------------------------------------------------
class _Run:
    """Runs initializations in their order. A tensor has memory from the first of the last kind that
    writes it to the last of them.
    """

    def __init__(self, model: nn.Module, steps: list[_Step]) -> None:
        self._model, self._steps = model, steps
        self._empty = dict(_tensors(model))
        self._first = _first_names(model)
        self._names: dict[str, list[str]] = {}
        for name, first in self._first.items():
            self._names.setdefault(first, []).append(name)
        self._kind: dict[str, int] = {}
        self._writers: dict[str, list[int]] = {}  # the steps that write a name
        for number, step in enumerate(steps):
            for name in step.writes:
                self._kind[self._first[name]] = step.kind
                self._writers.setdefault(name, []).append(number)
        self._until = {
            self._first[name]: number
            for number, step in enumerate(steps)
            for name in step.writes
            if self._counts(step, name)
        }
        # The generator's states before steps that may run again, made at once: small tensors in
        # between would keep the memory of those that are freed from being used again.
        again = [
            number
            for number, step in enumerate(steps)
            if not all(self._counts(step, name) for name in step.writes)
        ]
        states = torch.get_rng_state().repeat(len(again), 1)
        self._generator = dict(zip(again, states, strict=True))

    def store(self, take: Callable[[str, torch.Tensor], None]) -> None:
        """Run all, and hand every tensor on as soon as no later step writes it."""
        for number, step in enumerate(self._steps):
            if step.init is None:
                continue
            if number in self._generator:
                self._generator[number].copy_(torch.get_rng_state())
            for name in step.writes:
                if _tensor_at(self._model, name).is_meta:
                    self._put(step, name, self._memory_of_step(number, name))
            step.init(step.module)
            for name in step.writes:
                counts, first = self._counts(step, name), self._first[name]
                if counts and self._until[first] > number:
                    continue
                value = _tensor_at(self._model, name)
                if counts and not value.is_meta:  # one of several names has been handed on
                    take(first, value.detach())
                self._put(step, name, self._empty[name])

    def _counts(self, step: _Step, name: str) -> bool:
        """Whether what a step writes here counts. Constructors of modules that share a tensor each
        draw their own, of which the first one's counts; afterwards they share it.
        """
        first = self._first[name]
        return step.kind == self._kind[first] and (step.kind == USER or first == name)

    def _put(self, step: _Step, name: str, tensor: torch.Tensor) -> None:
        for each in self._names[self._first[name]] if step.kind == USER else (name,):
            _put(self._model, each, tensor)

    def _memory_of_step(self, number: int, name: str) -> torch.Tensor:
        """Return the memory that a step writes to: with the numbers of steps before it where it may
        read them.
        """
        step, first = self._steps[number], self._first[name]
        memory = _memory_for(self._empty[name])
        if name in step.over or not self._counts(step, name):
            return memory
        generator = torch.get_rng_state()
        for writer in self._writers.get(first, ()):
            if self._steps[writer].kind < step.kind:
                torch.set_rng_state(self._generator[writer].clone())  # torch crashes on a row
                memory = self._rerun_step(self._steps[writer], first, memory)
        torch.set_rng_state(generator)
        return memory

    def _rerun_step(self, step: _Step, name: str, memory: torch.Tensor) -> torch.Tensor:
        """Run a step once more, for one of the tensors that it writes."""
        assert step.init is not None
        before = {n: _tensor_at(self._model, n) for n in step.writes}
        for n in step.writes:
            _put(self._model, n, memory if n == name else _memory_for(self._empty[n]))
        step.init(step.module)
        memory = _tensor_at(self._model, name)
        for n, tensor in before.items():
            _put(self._model, n, tensor)
        return memory


def _memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU in place of one on the meta device: nan, or zeros, so that what an
    initialization leaves out is seen.
    """
    number = math.nan if is_inexact(tensor.dtype) else 0
    memory = torch.full_like(tensor.detach(), number, device="cpu")
    return nn.Parameter(memory, False) if isinstance(tensor, nn.Parameter) else memory


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return for each name of a tensor the first of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in _tensors(model)}


def _tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), last)
    return tensor
