"""What one device says of its own step, for `verify`: its numbers, how exact they can be, and which
of them mean nothing.

A program and its tensors in float64 on the CPU: what `verify` compares, so that rounding hides
nothing, and ranks that are threads of one process find their backward in their own thread.

Memory that a model takes without writing to it, and what hangs on its content.

Mixtral inverts a permutation by `inv = torch.empty_like(perm); inv[perm] = torch.arange(n)`: what
`empty_like` gives is another number each time, and means nothing. A graph in which such memory is
filled gives the same numbers each time; where two fillings give two values, they mean nothing.

How far rounding alone may move what a step computes, found by running it a little off.

`layer_norm(x).sum()` is zero but for rounding, and so is the gradient of a bias before a norm. One
device gives 3e-16 there and four ranks -8e-16: a relative error of 3.7 that says nothing. What such
a value may be off by follows from the terms that cancel in it. Summing them in absolute value would
need a rule for every op and every adjoint; instead the step is run again with every value off by a
random part of SHAKE. What m moves by then was added up from terms of about m / SHAKE.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from autopar._compat import TorchDispatchMode, in_backward, pytree
from autopar.errors import VerificationError
from autopar.ir.graph import where
from autopar.ir.program import Program, Value
from autopar.ops.devices import CPU, on_device
from autopar.ops.recomputation import Visit, unchanged


def to_float64(program: Program) -> Program:
    """The program in float64 on the CPU: its tensors, and every float cast, constant and device
    inside the graph.
    """
    graph = fx.Graph()
    output = graph.graph_copy(program.module.graph, {}, True)
    names = {node.name: node for node in program.module.graph.nodes}
    for node in graph.nodes:
        node.args = _wide(node.args)
        node.kwargs = _wide(node.kwargs)
        if node.name in names:
            node.meta = dict(names[node.name].meta)
    graph.output(output[0] if isinstance(output, tuple) else output)
    tensors = {name: tensor_to_float64(tensor) for name, tensor in program.tensors.items()}
    module = on_device(fx.GraphModule(program.module, graph), CPU)
    return dataclasses.replace(program, module=module, tensors=tensors)


_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(_wide(item) for item in value)
    if isinstance(value, dict):
        return {key: _wide(item) for key, item in value.items()}
    return value


def tensor_to_float64(tensor: Tensor) -> Tensor:
    """On the CPU; what is on the meta device has no numbers to bring."""
    device = tensor.device if tensor.is_meta else CPU
    return tensor.detach().to(device, _WIDE.get(tensor.dtype, tensor.dtype))


def is_inexact(tensor: Tensor) -> bool:
    """Whether it holds numbers that are rounded, as integers and flags are not."""
    return tensor.is_floating_point() or tensor.is_complex()


@contextmanager
def double_by_default() -> Iterator[None]:
    """What an op makes of integers (a quotient, a range of floats) has torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


aten = torch.ops.aten

_UNWRITTEN = {
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}

Fill = Callable[[Tensor], Tensor]


def tame(memory: Tensor) -> Tensor:
    """Fill it with numbers that look like any others: 1.0, the index 0, False."""
    return memory.fill_(1 if is_inexact(memory) else 0)


def poison(memory: Tensor) -> Tensor:
    """Fill it with what shows wherever it gets: nan; where there is none, the index 1 or True."""
    return memory.fill_(float("nan") if is_inexact(memory) else 1)


def unwritten_memory(program: Program) -> list[fx.Node]:
    """The nodes that give memory without writing to it, those within blocks too."""
    return [node for graph in _graphs(program.module) for node in graph.nodes if _is_empty(node)]


def fill_unwritten(program: Program, fill: Fill, only: str | None = None) -> Program:
    """The program with such memory filled; by `tame` but for the node `only`, if one is named."""
    if not unwritten_memory(program):
        return program
    module = copy.deepcopy(program.module)
    for graph in _graphs(module):
        for node in [node for node in graph.nodes if _is_empty(node)]:
            with graph.inserting_after(node):
                wanted = fill if only in (None, node.name) else tame
                new = graph.call_function(wanted, (node,))
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
            new.meta, node.meta = node.meta, {}
    for each in _modules(module):
        each.recompile()
    return dataclasses.replace(program, module=module)


def differing_values(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Where two runs give two numbers, as flags; None where they do nowhere."""
    if one is None or other is None or one is other:
        return None
    differ = ~((one == other) | ((one != one) & (other != other)))
    return differ if bool(differ.any()) else None


def _is_empty(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _UNWRITTEN


def _graphs(module: fx.GraphModule) -> list[fx.Graph]:
    return [each.graph for each in _modules(module)]


def _modules(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [each for each in module.modules() if isinstance(each, fx.GraphModule)]


Key = TypeVar("Key", bound=Hashable)

# Large enough that where a value jumps (a relu at zero) it seems to be made of terms of at most a
# million times itself, small enough that all else moves in proportion.
SHAKE = 2.0**-20
SAMPLES = 2  # of random numbers a single one may come out near zero
# A value is held against a thousandth of its terms where it is smaller: with tolerance 1e-9 they
# count to 1e-12, where float64 rounds at 2e-16 and a long sum at some 1e-14.
_OF_TERMS = 1e-3


def shake(decided: Mapping[fx.Node, Tensor], sample: int) -> Visit:
    """Give every float value of a run times 1 - SHAKE · (random numbers from 0 to 1).

    Never more, so that what an op is defined for (the cosine of an angle, a probability) it stays
    defined for. `decided`: the integers and flags of the undisturbed run, by node. A choice that
    was made, of experts for instance, stays made.
    """
    generator = torch.Generator().manual_seed(sample)

    def visit(node: fx.Node, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if node in decided:
            return decided[node]
        return _off(result, generator)

    return visit


@contextmanager
def shake_backward(sample: int) -> Iterator[None]:
    """Every float that an op of a backward makes is off as well: in a composite op, such as
    cosine_similarity, terms may cancel in a backward of which the graph shows nothing.
    """
    with _Shaken(sample):
        yield


class _Shaken(TorchDispatchMode):
    def __init__(self, sample: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(sample)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = any(value.alias_info is not None for value in func._schema.returns)
        if aliases or not in_backward():
            return result
        return pytree.tree_map_only(torch.Tensor, self._off, result)

    def _off(self, value: Tensor) -> Tensor:
        return _off(value, self.generator) if is_inexact(value) else value


def _off(value: Tensor, generator: torch.Generator) -> Tensor:
    off = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    return value * (1 - SHAKE * off).to(value.device)


def rounding_floors(
    plain: Mapping[Key, Tensor], samples: Iterable[Mapping[Key, Tensor]]
) -> dict[Key, float]:
    """The least number that an error of each value is held against, by its name. `samples` are
    taken one after the other, so that one alone is in memory.
    """
    found = {name: 0.0 for name, value in plain.items() if is_inexact(value)}
    for sample in samples:
        for name, floor in found.items():
            if name in sample:
                terms = _moved(plain[name], sample[name]) / SHAKE
                found[name] = max(floor, _OF_TERMS * terms)
    return found


def _moved(value: Tensor, other: Tensor) -> float:
    """The largest finite difference: where a disturbed run leaves what an op is defined for, it
    says nothing.
    """
    if not value.numel():
        return 0.0
    difference = (other - value).abs()
    return float(torch.where(difference.isfinite(), difference, 0.0).max())


Name = Value | str  # a value of the graph; an output or a gradient, in words
Observed = dict[Name, Tensor]
Observe = Callable[[Program, Visit], Observed]  # one step of a program, node by node


@dataclass(frozen=True)
class Reference:
    """`floors`: what an error is held against at least, see rounding.py. `undefined`: where a value
    hangs on memory that was never written, as flags.
    """

    values: Observed
    floors: dict[Name, float]
    undefined: dict[Name, Tensor]

    def floor(self, name: Name) -> float:
        return max(self.floors.get(name, 0.0), 1e-300)


def reference_step(reference: Program, observe: Observe) -> Reference:
    """Raises VerificationError where an output or a gradient hangs on memory that nobody wrote."""
    decided: dict[fx.Node, Tensor] = {}

    def decide(node: fx.Node, result: Any) -> Any:
        if isinstance(result, Tensor) and not is_inexact(result):
            decided[node] = result
        return result

    plain = fill_unwritten(reference, tame)
    values = observe(plain, decide)

    def sample(number: int) -> Observed:
        with shake_backward(number):
            return observe(plain, shake(decided, number))

    samples = (sample(number) for number in range(SAMPLES))
    return Reference(
        values, rounding_floors(values, samples), _undefined(reference, values, observe)
    )


def _undefined(reference: Program, values: Observed, observe: Observe) -> dict[Name, Tensor]:
    nodes = unwritten_memory(reference)
    found = (
        _differing(values, observe(fill_unwritten(reference, poison), unchanged)) if nodes else {}
    )
    if any(isinstance(name, str) for name in found):
        _refuse(reference, nodes, values, observe)
    return found


def _refuse(reference: Program, nodes: list[fx.Node], values: Observed, observe: Observe) -> None:
    for node in nodes:
        others = observe(fill_unwritten(reference, poison, only=node.name), unchanged)
        for name in _differing(values, others):
            if isinstance(name, str):
                raise VerificationError(
                    f"the {name} hangs on memory that is never written, so on one device, too, it "
                    f"is another number at each call: {node.target} at {where(node)}. Fill that "
                    "memory, as torch.zeros does"
                )


def _differing(values: Observed, others: Observed) -> dict[Name, Tensor]:
    found = {name: differing_values(value, others.get(name)) for name, value in values.items()}
    return {name: differ for name, differ in found.items() if differ is not None}
