"""The traced graph compared with the model itself, both on one device, on copies of the tensors.

`verify` compares the ranks with the traced graph, so what tracing lost is lost to both. Where one
device can, the model itself runs, too: its results, every gradient and every buffer must equal the
graph's. `api.verify` calls `compare_original`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import FakeTensor, TorchDispatchMode, pytree
from autopar.errors import VerificationError
from autopar.ir.program import Program, without_autocast
from autopar.ops.devices import CPU, of_inputs, on_device
from autopar.passes.trace import bind
from autopar.passes.trace.export import borrowed

FLOPS = 1e11  # a model whose step takes more is not run on one device
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
    input_tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    tensors = [*program.tensors.values(), *input_tensors]
    if 3 * flops > FLOPS or any(x.is_meta or isinstance(x, FakeTensor) for x in tensors):
        return False
    device = of_inputs(model)
    inputs = pytree.tree_map_only(Tensor, lambda x: x.to(device or x.device), inputs)
    floats = [x for x in tensors if x.is_floating_point()]
    roundings = [_ROUNDINGS * torch.finfo(x.dtype).eps for x in floats]
    tolerance = min(_MOST, max(roundings, default=0.0))
    for alike in (False, True):
        with _fixed_draws(tensors, alike) as model_draws:
            expected = _of_model(model, inputs)
        with _fixed_draws(tensors, alike) as draws:
            actual = _of_program(program, inputs)
        try:
            _check_step(model, actual, expected, tolerance)
            break
        except VerificationError:
            # export drops a dropout that nothing uses, and all behind it draw other numbers
            if alike or draws.count == model_draws.count:
                raise
    return True


def _check_step(
    model: nn.Module, actual: _StepResult, expected: _StepResult, tolerance: float
) -> None:
    largest = max((_largest(x) for x in expected.gradients.values()), default=0.0)
    _check_values(model, actual.results, expected.results, 0.0, tolerance)
    _check_values(model, actual.gradients, expected.gradients, _LEAST * largest, tolerance)


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
    first = next((x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)

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


def _of_model(model: nn.Module, inputs: Inputs) -> _StepResult:
    """Run the step of the model itself on copies of its tensors."""
    with borrowed(model, _copy):
        args, kwargs = own = pytree.tree_map_only(Tensor, _copy, inputs)
        results = _named_tensors(model(*args, **kwargs), "result ")
        _backward(results)
        buffers = {f"buffer {n}": b for n, b in model.named_buffers(remove_duplicate=False)}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return _collect_step({**results, **buffers}, parameters, own)


def _of_program(program: Program, inputs: Inputs) -> _StepResult:
    """Run the step of the traced program on copies of its tensors."""
    args, kwargs = own = pytree.tree_map_only(Tensor, _copy, inputs)
    tensors = {name: _copy(tensor) for name, tensor in program.tensors.items()}
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
    results = _named_tensors(pytree.tree_unflatten(leaves, program.signature.out_spec), "result ")
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


def _check_values(
    model: nn.Module, actual: Values, expected: Values, least: float, tolerance: float
) -> None:
    errors = {n: _error(x, expected[n], least) for n, x in actual.items() if n in expected}
    worst = max(errors, key=lambda name: errors[name], default="")
    if worst and not errors[worst] <= tolerance:
        raise VerificationError(
            f"the graph that was traced is not what {type(model).__name__} computes on one device: "
            f"{worst} is off by {errors[worst]:.1e} of its largest entry, past {tolerance:.0e}. "
            "Something of the model is not in the graph, such as state that it changes or random "
            "numbers of its own: no layout of it can be right"
        )


def _error(actual: Tensor, expected: Tensor, least: float) -> float:
    """Return the largest |difference| over the largest finite |expected|; inf where one has a
    number and the other a nan, or another infinity.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(actual, expected) else float("inf")
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, (actual - expected).abs().double())
    if not difference.isfinite().all():
        return float("inf")
    return _largest(difference) / max(_largest(expected), least, 1e-30)


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
