"""The reference step on one device that `verify` compares a plan with: every value in float64 on
the CPU, how far rounding alone may move it, and which values are undefined.

- Rounding. `layer_norm(x).sum()` is zero but for rounding: one device gives 3e-16 and four ranks
  -8e-16, a relative error of 3.7 that says nothing. How large the terms are that cancel in a value
  is measured instead of derived op by op: the step runs again with every value disturbed by a
  random part of SHAKE. A value that moves by m was added up from terms of about m / SHAKE.
- Unwritten memory. Mixtral inverts a permutation by `inv = torch.empty_like(perm); inv[perm] =
  torch.arange(n)`. The graph runs with such memory filled in two different ways; a value that
  differs between the two runs is undefined and is not compared.

verify.py and api.verify call this module. All of it runs on the CPU, where a backward runs in its
caller's thread: the ranks of `verify` are threads of one process.
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
from autopar.ir.graph import is_inexact, where
from autopar.ir.program import Program, Value
from autopar.ops.devices import CPU, on_device
from autopar.ops.recomputation import Visit, identity


def to_float64(program: Program) -> Program:
    """Return the program in float64 on the CPU: its tensors, and every float cast, constant and
    device inside the graph.
    """
    graph = fx.Graph()
    output = graph.graph_copy(program.module.graph, {}, True)
    names = {node.name: node for node in program.module.graph.nodes}
    for node in graph.nodes:
        node.args = _widen(node.args)
        node.kwargs = _widen(node.kwargs)
        if node.name in names:
            node.meta = dict(names[node.name].meta)
    graph.output(output[0] if isinstance(output, tuple) else output)
    tensors = {name: tensor_to_float64(tensor) for name, tensor in program.tensors.items()}
    module = on_device(fx.GraphModule(program.module, graph), CPU)
    return dataclasses.replace(program, module=module, tensors=tensors)


_WIDER = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(_widen(item) for item in value)
    if isinstance(value, dict):
        return {key: _widen(item) for key, item in value.items()}
    return value


def tensor_to_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64 (complex128) on the CPU; one on the meta device stays there, as
    it has no numbers to move.
    """
    device = tensor.device if tensor.is_meta else CPU
    return tensor.detach().to(device, _WIDER.get(tensor.dtype, tensor.dtype))


@contextmanager
def double_by_default() -> Iterator[None]:
    """Make float64 torch's default dtype within the block, so that ops that make floats of integers
    (a quotient, a range of floats) return float64.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


aten = torch.ops.aten

_EMPTY_OPS = {
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}

Fill = Callable[[Tensor], Tensor]


def tame(memory: Tensor) -> Tensor:
    """Fill memory with numbers that look like any others: 1.0, the index 0, False."""
    return memory.fill_(1 if is_inexact(memory.dtype) else 0)


def poison(memory: Tensor) -> Tensor:
    """Fill memory with nan, which shows wherever it spreads; integers and flags, which have no nan,
    with the index 1 or True.
    """
    return memory.fill_(float("nan") if is_inexact(memory.dtype) else 1)


def unwritten_memory(program: Program) -> list[fx.Node]:
    """Return the nodes that allocate memory without writing to it (`torch.empty` and its kin),
    those within blocks too.
    """
    return [node for graph in _graphs(program.module) for node in graph.nodes if _is_empty(node)]


def fill_unwritten(program: Program, fill: Fill, only: str | None = None) -> Program:
    """Return the program with unwritten memory filled by `fill`. If the node `only` is named,
    `fill` applies to it alone and all others are filled by `tame`.
    """
    if not unwritten_memory(program):
        return program
    module = copy.deepcopy(program.module)
    for graph in _graphs(module):
        for node in [node for node in graph.nodes if _is_empty(node)]:
            with graph.inserting_after(node):
                node_fill = fill if only in (None, node.name) else tame
                filled = graph.call_function(node_fill, (node,))
            node.replace_all_uses_with(
                filled, delete_user_cb=lambda user, filled=filled: user is not filled
            )
            filled.meta, node.meta = node.meta, {}
    for submodule in _modules(module):
        submodule.recompile()
    return dataclasses.replace(program, module=module)


def differing_values(value: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return flags for the entries where two runs give two numbers (two nans are equal); None where
    no entry differs.
    """
    if value is None or other is None or value is other:
        return None
    differ = ~((value == other) | ((value != value) & (other != other)))
    return differ if bool(differ.any()) else None


def _is_empty(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _EMPTY_OPS


def _graphs(module: fx.GraphModule) -> list[fx.Graph]:
    return [submodule.graph for submodule in _modules(module)]


def _modules(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [submodule for submodule in module.modules() if isinstance(submodule, fx.GraphModule)]


Key = TypeVar("Key", bound=Hashable)

# Large enough that where a value jumps (a relu at zero) it seems to be made of terms of at most a
# million times itself, small enough that all else moves in proportion.
SHAKE = 2.0**-20
SAMPLES = 2  # disturbed runs; in a single one a random number may come out near zero
# A value that is smaller than a thousandth of its terms has its error divided by that thousandth:
# with tolerance 1e-9 the terms count to 1e-12, where float64 rounds at 2e-16 and a long sum at some
# 1e-14.
_SHARE_OF_TERMS = 1e-3


def shake(decided: Mapping[fx.Node, Tensor], sample: int) -> Visit:
    """Return a visitor that multiplies every float value of a run by 1 - SHAKE · (random numbers
    from 0 to 1).

    The factor never exceeds 1, so that a value stays within the domain of the next op (the cosine
    of an angle, a probability). `decided`: the integers and flags of the undisturbed run, by node.
    They are put back, so that a choice, of experts for instance, stays the same.
    """
    generator = torch.Generator().manual_seed(sample)

    def visit(node: fx.Node, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if node in decided:
            return decided[node]
        return _disturbed(result, generator)

    return visit


@contextmanager
def shake_backward(sample: int) -> Iterator[None]:
    """Disturb every float that an op of a backward makes, too: in a composite op, such as
    cosine_similarity, terms may cancel in a backward of which the graph shows nothing.
    """
    with _ShakeBackward(sample):
        yield


class _ShakeBackward(TorchDispatchMode):
    def __init__(self, sample: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(sample)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = any(value.alias_info is not None for value in func._schema.returns)
        if aliases or not in_backward():
            return result
        return pytree.tree_map_only(torch.Tensor, self._disturbed, result)

    def _disturbed(self, value: Tensor) -> Tensor:
        return _disturbed(value, self.generator) if is_inexact(value.dtype) else value


def _disturbed(value: Tensor, generator: torch.Generator) -> Tensor:
    factors = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    return value * (1 - SHAKE * factors).to(value.device)


def rounding_floors(
    plain: Mapping[Key, Tensor], samples: Iterable[Mapping[Key, Tensor]]
) -> dict[Key, float]:
    """Return the least number that an error of each value is divided by, by name. `samples` are the
    disturbed runs; they are taken one after the other, so that only one is in memory.
    """
    floors = {name: 0.0 for name, value in plain.items() if is_inexact(value.dtype)}
    for sample in samples:
        for name, floor in floors.items():
            if name in sample:
                terms = _largest_difference(plain[name], sample[name]) / SHAKE
                floors[name] = max(floor, _SHARE_OF_TERMS * terms)
    return floors


def _largest_difference(value: Tensor, other: Tensor) -> float:
    """Return the largest finite difference. Where a disturbed run leaves the domain of an op, the
    result is not finite and says nothing.
    """
    if not value.numel():
        return 0.0
    difference = (other - value).abs()
    return float(torch.where(difference.isfinite(), difference, 0.0).max())


def relative_error(actual: Tensor, expected: Tensor, least: float) -> float:
    """Return the largest |difference| over the largest |expected| (at least `least`)."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return 0.0 if torch.equal(actual.to(expected.dtype), expected) else float("inf")
    difference = differences(actual, expected)
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return float(difference.max()) / max(scale, least) if difference.numel() else 0.0


def differences(actual: Tensor, expected: Tensor) -> Tensor:
    """Return |actual - expected|: 0 for equal infinities and two nans, infinite for a nan and a
    number.
    """
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return torch.where(same, 0.0, (actual - expected).abs().nan_to_num(nan=torch.inf))


Name = Value | str  # a value of the graph; an output or a gradient, in words
Observed = dict[Name, Tensor]
Observe = Callable[[Program, Visit], Observed]  # one step of a program, node by node


@dataclass(frozen=True)
class Reference:
    """The values of a step on one device. `floors`: the least number that an error of each value is
    divided by (`rounding_floors`). `undefined`: flags for the entries that depend on memory that
    was never written.
    """

    values: Observed
    floors: dict[Name, float]
    undefined: dict[Name, Tensor]

    def floor(self, name: Name) -> float:
        return max(self.floors.get(name, 0.0), 1e-300)


def reference_step(reference: Program, observe: Observe) -> Reference:
    """Run the step of `reference` on one device, undisturbed and disturbed. Raises
    VerificationError where an output or a gradient depends on memory that was never written.
    """
    decided: dict[fx.Node, Tensor] = {}

    def decide(node: fx.Node, result: Any) -> Any:
        if isinstance(result, Tensor) and not is_inexact(result.dtype):
            decided[node] = result
        return result

    plain = fill_unwritten(reference, tame)
    values = observe(plain, decide)

    def sample(number: int) -> Observed:
        with shake_backward(number):
            return observe(plain, shake(decided, number))

    samples = (sample(number) for number in range(SAMPLES))
    return Reference(
        values, rounding_floors(values, samples), _find_undefined(reference, values, observe)
    )


def _find_undefined(reference: Program, values: Observed, observe: Observe) -> dict[Name, Tensor]:
    nodes = unwritten_memory(reference)
    undefined = (
        _differences(values, observe(fill_unwritten(reference, poison), identity)) if nodes else {}
    )
    if any(isinstance(name, str) for name in undefined):
        _refuse_undefined(reference, nodes, values, observe)
    return undefined


def _refuse_undefined(
    reference: Program, nodes: list[fx.Node], values: Observed, observe: Observe
) -> None:
    for node in nodes:
        others = observe(fill_unwritten(reference, poison, only=node.name), identity)
        for name in _differences(values, others):
            if isinstance(name, str):
                raise VerificationError(
                    f"the {name} hangs on memory that is never written, so on one device, too, it "
                    f"is another number at each call: {node.target} at {where(node)}. Fill that "
                    "memory, as torch.zeros does"
                )


def _differences(values: Observed, others: Observed) -> dict[Name, Tensor]:
    flags = {name: differing_values(value, others.get(name)) for name, value in values.items()}
    return {name: differ for name, differ in flags.items() if differ is not None}
