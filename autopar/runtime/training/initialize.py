"""Give a parallel model its first numbers, without any rank holding the whole.

    with torch.device("meta"):
        model = GPT(config)
    par = autopar.parallelize(model, inputs=inputs)
    par.init_weights()  # those that GPT(config) would have had on one device

Every rank draws the same numbers on the CPU, one module after another in the order in which one
device does: children first. What a module draws is cut to the rank's part and freed, as soon as no
later module writes it. Which tensors a module's initialization writes is found on the meta device
first. The model without its numbers enters, the tensors of a ParallelModule are written.
runtime/module.py calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from autopar._compat import TorchDispatchMode
from autopar.errors import InputError
from autopar.runtime.training.stored import StoredTensors
from autopar.world import ranks

Init = Callable[[nn.Module], Any]


class _Step(NamedTuple):
    """The initialization of one module; `writes`: the names of the tensors that it writes. `drawn`:
    as its constructor does, for the generator alone, because the numbers are drawn once more.
    """

    name: str
    module: nn.Module
    init: Init | None
    writes: tuple[str, ...]
    drawn: bool = False


def init_weights(model: nn.Module, init: Init | None, stored: StoredTensors) -> None:
    """Initialize `model`, whose tensors are on the meta device, module by module, and store the
    numbers of what has none yet; where all has some, of everything. `init`: as for nn.Module.apply;
    None calls what each module has itself. Raises InputError for parameters that nothing
    initializes. Collective.
    """
    wanted = set(stored.empty) or set(stored.by_name())

    def take(name: str, value: torch.Tensor) -> None:
        if name in wanted:
            stored.fill(name, value)

    steps = list(_applied(model, init) if init is not None else _constructed(model))
    _refuse_unwritten(model, steps)
    own, common = torch.get_rng_state(), ranks.from_rank_0(torch.get_rng_state())
    torch.set_rng_state(common)
    with torch.no_grad():
        _run(model, steps, take, last=init is not None)
    if not torch.equal(own, common):
        torch.set_rng_state(own)
        torch.rand(())  # no rank's generator is as after torch.manual_seed: see Seed.renewed


# -- the order -------------------------------------------------------------------------------------
def _applied(model: nn.Module, init: Init) -> Iterator[_Step]:
    """Yield the calls of nn.Module.apply, children first."""
    for name, module in _children_first("", model):
        yield _step(name, module, init)


def _constructed(model: nn.Module) -> Iterator[_Step]:
    """Yield what happens as the model is made on one device. Modules of torch initialize
    themselves. A model of transformers then initializes all below it again, but for a model of
    transformers within, which has done so at its own end.
    """
    done: set[int] = set()

    def construct(name: str, module: nn.Module, within: bool) -> Iterator[_Step]:
        owns = _is_pretrained(module)
        for child, inner in module.named_children():
            yield from construct(f"{name}{child}.", inner, within or owns)
        yield _step(name, module, _reset_of(module))._replace(drawn=within or owns)
        if owns:
            for inner_name, inner in _children_first(name, module):
                if id(inner) not in done:
                    yield _step(inner_name, inner, cast(Any, module)._init_weights)
                    done.add(id(inner))

    yield from construct("", model, False)


def _step(name: str, module: nn.Module, init: Init | None) -> _Step:
    return _Step(name, module, init, tuple(_written(name, module, init)))


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
class _Writes(TorchDispatchMode):
    """Records the storages that ops write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, torch.Tensor):
                self.storages.add(value.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


def _written(name: str, module: nn.Module, init: Init | None) -> Iterator[str]:
    """Yield the names of the tensors of a module, and of those below it, that its initialization
    writes: all of them where that cannot be found on the meta device.
    """
    if init is None:
        return
    named = dict(_tensors(module))
    before, mode = {n: id(x) for n, x in named.items()}, _Writes()
    found: set[int] | None
    try:
        with mode, torch.no_grad():
            init(module)
        found = mode.storages
    except Exception:  # whatever needs numbers
        found = None
    for tensor_name, tensor in dict(_tensors(module)).items():
        replaced = before.get(tensor_name) != id(tensor)
        if found is None or replaced or tensor.untyped_storage()._cdata in found:
            yield name + tensor_name
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
    first = _shared(model, last=False)
    written = {first[name] for step in steps if not step.drawn for name in step.writes}
    for name, _ in model.named_parameters():
        if first[name] not in written:
            holder = model.get_submodule(name.rpartition(".")[0])
            raise InputError(
                f"{name} has no numbers and {type(holder).__name__} does not initialize it: "
                "give its class a reset_parameters, or give init_weights a function as "
                "nn.Module.apply takes it"
            )


# -- numbers ---------------------------------------------------------------------------------------
def _run(
    model: nn.Module,
    steps: list[_Step],
    take: Callable[[str, torch.Tensor], None],
    last: bool = False,
) -> None:
    """Run these initializations. A tensor has memory from the first that writes it to the last.
    Where several modules share one, each draws its own, and those of the first are taken, or of the
    `last`.
    """
    until = {name: n for n, step in enumerate(steps) if not step.drawn for name in step.writes}
    empty = dict(_tensors(model))
    shared = _shared(model, last)
    for number, step in enumerate(steps):
        if step.init is None:
            continue
        for name in step.writes:
            if _tensor_at(model, name).is_meta:
                _put(model, name, _memory_for(empty[name]))
        step.init(step.module)
        for name in step.writes:
            if not step.drawn and until[name] == number and shared.get(name, name) == name:
                take(name, _tensor_at(model, name).detach())
            if step.drawn or until[name] == number:
                _put(model, name, empty[name])


def _memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU in place of one on the meta device: nan, or zeros, so that what an
    initialization leaves out is seen.
    """
    nan = tensor.is_floating_point() or tensor.is_complex()
    memory = torch.full_like(tensor.detach(), math.nan if nan else 0, device="cpu")
    return nn.Parameter(memory, False) if isinstance(tensor, nn.Parameter) else memory


def _shared(model: nn.Module, last: bool) -> dict[str, str]:
    """Return for each name of a tensor that name whose module draws the numbers that count."""
    groups: dict[int, list[str]] = {}
    for name, tensor in _tensors(model):
        groups.setdefault(id(tensor), []).append(name)
    return {name: names[-1 if last else 0] for names in groups.values() for name in names}


def _tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), last)
    return tensor
