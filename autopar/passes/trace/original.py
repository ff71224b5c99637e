"""The traced graph compared with the model itself, both on one device, on copies of the tensors.

`verify` compares the ranks with the traced graph, so what tracing lost is lost to both. Where one
device can, the model itself runs, too: its results, every gradient and every buffer must equal the
graph's. `api.verify` calls `compare_original`. A model that takes derivatives in its forward is
compared whenever it is traced, on random values: `trace` calls `refuse_difference`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from autopar._compat import FakeTensor, TorchDispatchMode, pytree, without_modes
from autopar.errors import VerificationError
from autopar.ir.containers import tensors_in
from autopar.ir.graph import is_inexact
from autopar.ir.program import Program, without_autocast
from autopar.ops.devices import CPU, home_of, of_inputs, on_device
from autopar.passes.trace.derivatives import twice_differentiable
from autopar.passes.trace.export import borrow, refusal, trail
from autopar.passes.trace.signature import bind

FLOPS = 1e11  # a model whose step takes more is not run on one device
# A model that takes derivatives in its forward is refused where its step takes more than this, or
# where it holds more numbers: nothing else would tell whether its trace is right.
_DERIVATIVE_FLOPS, _DERIVATIVE_NUMBERS = 1e12, 2e9
_SEED = 40_009
_LEAST = 1e-3  # of the model's largest gradient: a smaller one may be zero but for rounding
# The tolerance is so many roundings of the dtype, at most _MOST.
_ROUNDINGS, _MOST = 1e4, 0.1

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Values = dict[str, Tensor]


@dataclass(frozen=True)
class _StepResult:
    """One training step: results and gradients by the names that errors give them."""

    results: Values
    gradients: Values


def compare_original(model: nn.Module, program: Program, inputs: Inputs, flops: float) -> bool:
    """Compare `program`, as it was traced, with `model` on these inputs. `flops` are those of a
    forward. Returns False where it cannot be done: a step of more than FLOPS, or tensors without
    values.

    Raises VerificationError with the value that is off the most.
    """
    tensors = [*program.tensors.values(), *tensors_in(inputs)]
    if 3 * flops > FLOPS or any(x.is_meta or isinstance(x, FakeTensor) for x in tensors):
        return False
    device = of_inputs(model)
    inputs = pytree.tree_map_only(Tensor, lambda x: x.to(device or x.device), inputs)
    difference = _difference(model, program, inputs, _copy)
    if difference:
        raise VerificationError(
            f"the graph that was traced is not what {type(model).__name__} computes on one device: "
            f"{difference}. Something of the model is not in the graph, such as state that it "
            "changes or random numbers of its own: no layout of it can be right"
        )
    return True


def refuse_difference(model: nn.Module, program: Program, inputs: Inputs) -> None:
    """Raise TraceError where the trace of a model that takes derivatives in its forward has other
    results or gradients than the model: on random values, so that no gradient is zero by chance
    or by an initialisation, and where those give no finite gradients, on the model's own.
    """
    flops = 3 * _flops(program)
    numbers = sum(x.numel() for x in program.tensors.values())
    if flops > _DERIVATIVE_FLOPS or numbers > _DERIVATIVE_NUMBERS:
        reason = (
            "forward takes derivatives, and is too large for its graph to be compared with it: "
            f"a step takes {flops:.1e} FLOPs, at most {_DERIVATIVE_FLOPS:.0e}; it holds "
            f"{numbers:.1e} numbers, at most {_DERIVATIVE_NUMBERS:.0e}"
        )
        raise refusal(model, reason, "", "Take the derivatives outside of the model, or plan it "
            "with a smaller batch.")  # fmt: skip
    failed: Exception | None = None
    entries = program.signature.inputs
    constants = [program.tensors[e.target] for e in entries if e.kind == "constant"]
    for own in (False, True):
        values = _Values(home_of(model, *inputs), constants, own)
        try:
            with warnings.catch_warnings(), redirect_stdout(io.StringIO()), without_modes():
                warnings.simplefilter("ignore")
                difference = _difference(model, program, inputs, values.copy, finite=True)
        except Exception as error:
            failed = failed or error
        else:
            if not difference:
                return
            reason = (
                "forward takes derivatives, and the graph that was traced is not what the model "
                f"computes: {difference}"
            )
            raise refusal(model, reason, "", DERIVATIVE_ADVICE)
    assert failed is not None
    message = (str(failed).strip() or type(failed).__name__).splitlines()[0]
    reason = f"forward takes derivatives, and its graph cannot be compared with it: {message}"
    raise refusal(model, reason, trail(failed), DERIVATIVE_ADVICE) from failed


DERIVATIVE_ADVICE = (
    "Check that a step of the model runs on one device; if so, take the derivative outside of the "
    "model, or write it out in forward."
)


class _Values:
    """Real tensors in the place of a model's and its inputs': random ones, or their `own` values
    where they have some. Constants, whole numbers and truth values keep their values, or are zero.
    """

    def __init__(self, home: torch.device, constants: Collection[Tensor], own: bool) -> None:
        self.home, self.own, self.constants = home, own, {id(x) for x in constants}
        self.replacements: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # with what was replaced, so that it lives

    def copy(self, value: Tensor) -> Tensor:
        """Return a fresh copy of the tensor in the place of this one."""
        if id(value) not in self.replacements:
            self.replacements[id(value)] = value, self._make(value)
        copy = self.replacements[id(value)][1].detach().clone()
        if isinstance(value, nn.Parameter):
            return nn.Parameter(copy, requires_grad=value.requires_grad)
        return copy.requires_grad_(value.requires_grad)

    def _make(self, value: Tensor) -> Tensor:
        empty = value.is_meta or isinstance(value, FakeTensor)
        if not empty and (self.own or id(value) in self.constants or not is_inexact(value.dtype)):
            return value.detach()
        device = self.home if value.is_meta else value.device
        if not is_inexact(value.dtype):
            return torch.zeros(value.shape, dtype=value.dtype, device=device)
        if isinstance(value, nn.Parameter) and value.dim() > 1:
            noise = torch.randn(value.shape, dtype=value.dtype, device=device)
            return noise / max(value[0].numel(), 1) ** 0.5
        noise = torch.rand(value.shape, dtype=value.dtype, device=device)
        if empty or isinstance(value, nn.Parameter):
            return noise + 0.5  # as of scales and variances
        return value.detach() + 0.1 * noise


def _flops(program: Program) -> float:
    """Return the FLOPs of the program's matrix products and convolutions."""
    total = 0.0
    for node in program.module.graph.nodes:
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is not None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            total += count(*args, **kwargs, out_val=node.meta["val"])
    return total


def _difference(
    model: nn.Module,
    program: Program,
    inputs: Inputs,
    copy: Callable[[Tensor], Tensor],
    finite: bool = False,
) -> str:
    """Return which result or gradient of the program is off by how much; "" where none is. Both run
    on what `copy` gives. Raises ValueError where the model's gradients are to be `finite` and are
    not: they would hide a difference.
    """
    tensors = [*program.tensors.values(), *pytree.tree_leaves(inputs)]
    tensors = [x for x in tensors if isinstance(x, Tensor)]
    floats = [x for x in tensors if x.is_floating_point()]
    roundings = [_ROUNDINGS * torch.finfo(x.dtype).eps for x in floats]
    tolerance = min(_MOST, max(roundings, default=0.0))
    for alike in (False, True):
        with _fixed_draws(tensors, alike) as model_draws, twice_differentiable():
            expected = _of_model(model, inputs, copy)
        if finite and not all(x.isfinite().all() for x in expected.gradients.values()):
            raise ValueError("its gradients are not finite")
        with _fixed_draws(tensors, alike) as draws, twice_differentiable():
            actual = _of_program(program, inputs, copy)
        difference = _step_difference(actual, expected, tolerance)
        # export drops a dropout that nothing uses, and all behind it draw other numbers
        if not difference or alike or draws.count == model_draws.count:
            return difference
    return ""


def _step_difference(actual: _StepResult, expected: _StepResult, tolerance: float) -> str:
    largest = max((_largest(x) for x in expected.gradients.values()), default=0.0)
    return _values_difference(
        actual.results, expected.results, 0.0, tolerance
    ) or _values_difference(actual.gradients, expected.gradients, _LEAST * largest, tolerance)


class _Draws(TorchDispatchMode):
    """Counts the ops that draw random numbers, and makes them draw by the logical index of an
    entry, not by its place in memory. `alike`: an op draws by its own arguments' shapes alone,
    independent of how many have drawn before.
    """

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.alike, self.count = alike, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.count += 1
        if self.alike:
            torch.manual_seed(_SEED)
        return _draw_in_logical_order(func, args, kwargs)


def _draw_in_logical_order(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an op that draws random numbers on contiguous copies of its operands.

    torch draws in the order of memory: `dropout(x.t().contiguous())` drops other entries than
    `dropout(x.t())`, and tracing leaves out copies such as that one. The results have the strides
    that they would have without the copies.
    """
    originals: dict[int, Tensor] = {}  # by the id of the copy

    def contiguous(x: Tensor) -> Tensor:
        copy = x.contiguous()
        if copy is not x:
            originals[id(copy)] = x
        return copy

    copied_args, copied_kwargs = pytree.tree_map_only(Tensor, contiguous, (args, kwargs))
    results = func(*copied_args, **copied_kwargs)
    operands = dict(zip((a.name for a in func._schema.arguments), copied_args, strict=False))
    operands |= copied_kwargs
    for argument in func._schema.arguments:
        operand = operands.get(argument.name)
        if argument.is_write and isinstance(operand, Tensor) and id(operand) in originals:
            originals[id(operand)].copy_(operand)
    first = next(iter(tensors_in((args, kwargs))), None)

    def as_without_copies(x: Tensor) -> Tensor:
        if id(x) in originals:  # the op writes into this operand and returns it
            return originals[id(x)]
        if not originals or first is None or x.shape != first.shape or "memory_format" in kwargs:
            return x
        return torch.empty_like(first, dtype=x.dtype).copy_(x)

    return pytree.tree_map_only(Tensor, as_without_copies, results)


@contextmanager
def _fixed_draws(tensors: list[Tensor], alike: bool) -> Iterator[_Draws]:
    """Start the block from a fixed seed, so that both runs draw the same random numbers, and
    restore the generators after it.
    """
    devices = {x.device for x in tensors if x.device.type == "cuda"}
    with torch.random.fork_rng([d.index or 0 for d in devices]), torch.enable_grad():
        torch.manual_seed(_SEED)
        with _Draws(alike) as draws:
            yield draws


def _of_model(model: nn.Module, inputs: Inputs, copy: Callable[[Tensor], Tensor]) -> _StepResult:
    """Run the step of the model itself on copies of its tensors."""
    with borrow(model, copy):
        args, kwargs = own = pytree.tree_map_only(Tensor, copy, inputs)
        results = _named_tensors(model(*args, **kwargs), "result ")
        _backward(results)
        buffers = {f"buffer {n}": b for n, b in model.named_buffers(remove_duplicate=False)}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return _collect_step({**results, **buffers}, parameters, own)


def _of_program(program: Program, inputs: Inputs, copy: Callable[[Tensor], Tensor]) -> _StepResult:
    """Run the step of the traced program on copies of its tensors."""
    args, kwargs = own = pytree.tree_map_only(Tensor, copy, inputs)
    tensors = {name: copy(tensor) for name, tensor in program.tensors.items()}
    values = bind(program, args, kwargs, tensors)
    device = next((x.device for x in values if isinstance(x, Tensor)), CPU)
    with without_autocast(program.signature.autocast):  # the casts are nodes of the graph
        results_of_graph = iter(on_device(program.module, device)(*values))
    leaves, buffers = [], {}
    for output in program.signature.outputs:
        value = output.constant if output.node is None else next(results_of_graph)
        if output.kind == "user":
            leaves.append(value)
        elif isinstance(value, Tensor):
            buffers[f"buffer {output.target}"] = value
    results = _named_tensors(pytree.tree_unflatten(leaves, program.signature.out_tree), "result ")
    _backward(results)
    parameters = {
        e.target: tensors[e.target] for e in program.signature.inputs if e.target in tensors
    }
    return _collect_step({**results, **buffers}, parameters, own)


def _copy(value: Tensor) -> Tensor:
    copy = value.detach().clone()
    if isinstance(value, nn.Parameter):
        return nn.Parameter(copy, requires_grad=value.requires_grad)
    return copy.requires_grad_(value.requires_grad)


def _named_tensors(tree: Any, kind: str) -> Values:
    pairs = pytree.tree_flatten_with_path(tree)[0]
    leaves = {f"{kind}{pytree.keystr(path)}".strip(): value for path, value in pairs}
    return {name: value for name, value in leaves.items() if isinstance(value, Tensor)}


def _backward(results: Values) -> None:
    """Run the backward from the first scalar; without one, from all results with random
    gradients.
    """
    differentiable = [value for value in results.values() if value.requires_grad]
    scalar = next((value for value in differentiable if value.dim() == 0), None)
    if scalar is not None:
        scalar.backward()
    elif differentiable:
        generator = torch.Generator().manual_seed(_SEED)
        cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in differentiable]
        torch.autograd.backward(differentiable, cotangents)


def _collect_step(results: Values, parameters: Mapping[str, Tensor], inputs: Inputs) -> _StepResult:
    leaves = {f"gradient of {name}": value for name, value in parameters.items()}
    leaves |= _named_tensors(inputs, "gradient of input ")
    trained = {name: value for name, value in leaves.items() if value.requires_grad}
    gradients = {n: _gradient(x) for n, x in trained.items()}
    return _StepResult({name: x.detach() for name, x in results.items()}, gradients)


def _gradient(x: Tensor) -> Tensor:
    """Return the gradient of x: zeros where it is None, dense where it is sparse."""
    gradient = torch.zeros_like(x) if x.grad is None else x.grad
    return gradient.to_dense() if gradient.is_sparse else gradient


def _values_difference(actual: Values, expected: Values, least: float, tolerance: float) -> str:
    errors = {n: _error(x, expected[n], least) for n, x in actual.items() if n in expected}
    worst = max(errors, key=lambda name: errors[name], default="")
    if worst and not errors[worst] <= tolerance:
        return f"{worst} is off by {errors[worst]:.1e} of its largest entry, past {tolerance:.0e}"
    return ""


def _error(actual: Tensor, expected: Tensor, least: float) -> float:
    """Return the largest |difference| over the largest finite |expected|; inf where one has a
    number and the other a nan, or another infinity.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if not is_inexact(expected.dtype):
        return 0.0 if torch.equal(actual, expected) else float("inf")
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, (actual - expected).abs().double())
    if not difference.isfinite().all():
        return float("inf")
    return _largest(difference) / max(_largest(expected), least, 1e-30)


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
