"""Custom autograd functions in a traced graph: a call becomes one op, with the user's backward.

    x + Quantise.apply(x, 4)    ->    quantise = autopar_functions.Quantise_1f0c…(x); x + quantise

Export alone would record the ops that `forward` runs and lose the user's `backward`. While
passes/trace/export.py captures a model inside `honour`, `Quantise.apply` therefore calls an op of
its own. That op runs `Quantise.apply` on its tensors, so the user's backward runs wherever autograd
or AOTAutograd differentiates it. A call that cannot become such an op raises `Refused`.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import Function
from torch.utils.checkpoint import CheckpointFunction

from autopar._compat import (
    BackwardHookFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    apply_function,
    below_autograd,
    checkpoints_inlined,
    fake_mode,
    functions_applied,
    pytree,
    without_modes,
    without_torch_functions,
)

NAMESPACE = "autopar_functions"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_capturing = False  # whether ops are recorded rather than run


class Refused(Exception):
    """A refusal, with arguments (reason, place, advice), from which export makes a TraceError."""


@dataclass(frozen=True)
class Signature:
    """The identity of a call: its arguments with None for each tensor, and its results likewise."""

    function: type[Function]
    tree: pytree.TreeSpec
    fixed: tuple[Any, ...]
    tensors: tuple[int, ...]  # places of tensors among the leaves of the arguments
    returned: tuple[Any, ...]
    results: tuple[int, ...]  # places of tensors in `returned`
    single: bool  # the call returns one value, not a tuple

    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for two calls only if they are the same op."""
        values = tuple((type(v), v if isinstance(v, _PLAIN) else id(v)) for v in self.fixed)
        constants = tuple((type(v), repr(v)) for v in self.returned)
        tensor_places = self.tensors, self.results, self.single
        return self.function, self.tree, values, constants, *tensor_places

    def digest(self) -> str:
        """Return a hash that is the same in every process if the arguments are numbers and
        alike.
        """
        values = [v if isinstance(v, _PLAIN) else type(v).__qualname__ for v in self.fixed]
        named = f"{self.function.__module__}.{self.function.__qualname__}"
        text = f"{named} {self.tensors} {self.results} {self.single} {values!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]


_signatures: dict[OpOverload, Signature] = {}
_ops: dict[tuple[Any, ...], OpOverload] = {}
_library: list[torch.library.Library] = []


def is_custom(target: Any) -> bool:
    """Whether a node's target is a custom autograd function."""
    return target in _signatures


@contextmanager
def honour(model: nn.Module) -> Iterator[None]:
    """Record custom functions as ops and inline checkpointed regions while a model is captured: the
    plan decides what is recomputed in the backward. Raises Refused.
    """
    global _capturing
    names = {id(module): name for name, module in model.named_modules()}

    def apply(function: type[Function], *args: Any) -> Any:
        if function is CheckpointFunction:
            return _run_inlined(*args)
        if _is_recorded(function):
            return apply_function(function, *args)
        place = Place.of(names, model)
        if function is BackwardHookFunction:
            raise place.refuse("has a backward hook", HOOK_ADVICE)
        return _call_as_op(function, args, place)

    _capturing = True
    try:
        with functions_applied(apply), checkpoints_inlined():
            yield
    finally:
        _capturing = False


def _run_inlined(run: Any, preserve_rng_state: Any, *args: Any) -> Any:
    """Run a checkpointed function; it carries gradients where one of its own arguments does."""
    carries = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(carries and torch.is_grad_enabled()):
        return run(*args)


_RECORDED = ("_functorch", "_higher_order_ops", "_library", "_dynamo", "_prims_common")


def _is_recorded(function: type[Function]) -> bool:
    """Whether torch itself made the function, for ops that are recorded with their own backward."""
    package, _, submodule = function.__module__.partition(".")
    return not _capturing or (package == "torch" and submodule.split(".")[0] in _RECORDED)


class Captured:
    """A custom function that dynamo has captured: its forward and backward are graphs, and `run`
    calls both as one function of the tensors.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.__name__ = self.__qualname__ = "captured"

    def apply(self, *args: Any) -> Any:
        """Call the function, as an op while a model is captured."""
        if not _capturing:
            return self.run(*args)
        return _call_as_op(cast(Any, self), args, Place("a function that dynamo captured", ""))


# -- where -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Where in a model a function is called: the module, and the user's line."""

    module: str
    line: str

    @staticmethod
    def of(names: dict[int, str], model: nn.Module) -> Place:
        """Return the place of the running call, found on the stack."""
        module, line, frame = "", "", sys._getframe(1)
        while frame is not None:
            code, own = frame.f_code, frame.f_locals.get("self")
            if not line and not is_inner(code.co_filename):
                line = f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
            if code.co_name == "_call_impl" and id(own) in names:
                module = names[id(own)]
                break
            frame = cast(Any, frame.f_back)
        return Place(module or type(model).__name__, line)

    def refuse(self, what: str, advice: str) -> Refused:
        """Return the error that refuses this call."""
        return Refused(f"{self.module} {what}", self.line, advice)


def is_inner(filename: str) -> bool:
    """Whether a file is torch's, autopar's or generated, and not the user's."""
    inner = (Path(torch.__file__).parent, Path(__file__).parents[1])
    return filename.startswith("<") or any(Path(filename).is_relative_to(p) for p in inner)


# -- calling as an op ------------------------------------------------------------------------------
def _call_as_op(function: type[Function], args: tuple[Any, ...], place: Place) -> Any:
    """Return what the function would, by its op; a run on fake tensors first finds the results."""
    leaves, structure = pytree.tree_flatten(args)
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = [leaves[i] for i in places]
    fixed = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
    with run_as_they_are():
        returned = _try_on_fakes(function, structure, fixed, places, tensors, place)
    single = not isinstance(returned, tuple)
    values = (returned,) if single else returned
    results = tuple(i for i, value in enumerate(values) if isinstance(value, torch.Tensor))
    constants = tuple(None if i in results else value for i, value in enumerate(values))
    if not results:
        raise place.refuse(_reason(function, "returns no tensor"), _ADVICE)
    signature = Signature(function, structure, fixed, places, constants, results, single)
    op_results = _op_of(signature)(*tensors)
    outputs = [op_results] if len(results) == 1 else op_results
    no_gradient = [not values[i].requires_grad for i in results]  # as ctx marked them
    pairs = zip(outputs, no_gradient, strict=True)
    detached = iter([x.detach() if x.requires_grad and none else x for x, none in pairs])
    merged = [next(detached) if i in results else value for i, value in enumerate(constants)]
    return merged[0] if single else tuple(merged)


HOOK_ADVICE = (
    "Take it off before the model is planned. What scales a gradient can be a torch.autograd."
    "Function; what watches or changes gradients of parameters goes on those of the parallel model."
)
_ADVICE = (
    "Write it with torch's own operations (x + (f(x) - x).detach() passes a gradient straight "
    "through), or make the function one that computes from its arguments alone."
)


def _reason(function: type[Function], why: str) -> str:
    return f"applies the autograd function {function.__name__}, which {why}"


@contextmanager
def run_as_they_are() -> Iterator[None]:
    """Run custom functions within, in place of recording them, nested ones too."""
    global _capturing
    before, _capturing = _capturing, False
    try:
        yield
    finally:
        _capturing = before


def _op_of(signature: Signature) -> OpOverload:
    """Return the op of a call, defining it at the first such call."""
    key = signature.key()
    if key not in _ops:
        _ops[key] = _define_op(signature)
        _signatures[_ops[key]] = signature
    return _ops[key]


def _define_op(signature: Signature) -> OpOverload:
    """Define the op of a call in the library, with its shapes and its gradient."""
    if not _library:
        _library.append(torch.library.Library(NAMESPACE, "FRAGMENT"))
    plain = re.sub(r"\W", "_", signature.function.__name__)
    base = name = f"{plain}_{signature.digest()}"
    taken_names = {str(op._schema.name).partition("::")[2] for op in _signatures}
    count = 1
    while name in taken_names:  # other arguments, or another class of the same name
        count += 1
        name = f"{base}_{count}"
    params = ", ".join(f"Tensor x{i}" for i in range(len(signature.tensors)))
    types = ", ".join(["Tensor"] * len(signature.results))
    _library[0].define(f"{name}({params}) -> " + (types if "," not in types else f"({types})"))
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def run(*tensors: torch.Tensor) -> Any:
        return _apply_function(signature, tensors)

    def differentiable(*tensors: torch.Tensor) -> Any:
        if not _capturing:
            return run(*tensors)
        return apply_function(_Linked, op, *tensors)

    _library[0].impl(name, run, "CompositeExplicitAutograd")
    _library[0].impl(name, differentiable, "Autograd")

    def shapes(*tensors: torch.Tensor) -> Any:
        with run_as_they_are(), torch.no_grad():
            results = run(*tensors)
        fresh = [
            torch.empty_like(r) for r in ([results] if len(signature.results) == 1 else results)
        ]
        return fresh[0] if len(fresh) == 1 else tuple(fresh)

    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_library[0])
    return op


class _Linked(Function):
    """Gives the op's result a gradient where the function's would have one, while a model is
    captured: a model may read `requires_grad` or call `register_hook`.
    """

    @staticmethod
    def forward(ctx: Any, op: OpOverload, *tensors: torch.Tensor) -> Any:
        ctx.op = op.name().partition("::")[2].rpartition("_")[0]
        with below_autograd():
            return op(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise Refused(
            f"forward takes a derivative through the custom autograd function {ctx.op}",
            "",
            "Write what is differentiated in forward with torch's own operations.",
        )


def _apply_function(signature: Signature, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what the user's function gives, in float64 where an input is, as under verify."""
    returned = signature.function.apply(
        *_unflatten_arguments(signature.tree, signature.fixed, signature.tensors, tensors)
    )
    values = (returned,) if signature.single else returned
    in_float64 = any(tensor.dtype == torch.float64 for tensor in tensors)
    results = []
    for index in signature.results:
        value = values[index]
        results.append(value.double() if in_float64 and value.is_floating_point() else value)
    return results[0] if len(results) == 1 else tuple(results)


def _unflatten_arguments(
    tree: pytree.TreeSpec, fixed: Sequence[Any], places: Sequence[int], tensors: Sequence[Any]
) -> Any:
    leaves = list(fixed)
    for index, tensor in zip(places, tensors, strict=True):
        leaves[index] = tensor
    return pytree.tree_unflatten(leaves, tree)


# -- trying a call on fake tensors -----------------------------------------------------------------
def _try_on_fakes(
    function: type[Function],
    tree: pytree.TreeSpec,
    fixed: Sequence[Any],
    places: Sequence[int],
    tensors: Sequence[torch.Tensor],
    place: Place,
) -> Any:
    """Run the function forward and backward on fake tensors and return its results. Raises Refused
    where the function does what an op cannot: see `_Watch`.
    """
    with without_modes(), without_torch_functions(), torch.enable_grad():
        mode = fake_mode()
        fakes = [_fake_like(mode, tensor) for tensor in tensors]
        with mode, _Watch(mode, function, place):
            arguments = [fake.clone() if fake.requires_grad else fake for fake in fakes]
            versions = [tensor._version for tensor in arguments]
            returned = function.apply(*_unflatten_arguments(tree, fixed, places, arguments))
            if versions != [tensor._version for tensor in arguments]:
                why = "changes an argument in place"
                raise place.refuse(_reason(function, why), "Let it work on a clone of it.")
            _backward(function, returned, fakes, place)
    return returned


def _fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(
            tuple(int(n) for n in tensor.shape), tensor.stride(),
            dtype=tensor.dtype, device=tensor.device,
        )  # fmt: skip
    return fake.requires_grad_(tensor.requires_grad)


def _backward(
    function: type[Function], returned: Any, inputs: Sequence[torch.Tensor], place: Place
) -> None:
    results = [
        value
        for value in (returned if isinstance(returned, tuple) else (returned,))
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    differentiable = [tensor for tensor in inputs if tensor.requires_grad]
    if not results or not differentiable:
        return
    try:
        gradients = [torch.ones_like(result) for result in results]
        torch.autograd.grad(results, differentiable, gradients, allow_unused=True)
    except Refused:
        raise
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        why = f"has a backward that does not run on tensors without values: {message}"
        raise place.refuse(_reason(function, why), _ADVICE) from error


class _Watch(TorchDispatchMode):
    """Refuses what makes a custom function more than an op of its arguments: random numbers, which
    ranks would draw differently, and tensors from elsewhere, such as parameters and activations in
    a closure, whose gradients would be lost and of which a rank may hold only a shard.
    """

    def __init__(self, mode: FakeTensorMode, function: type[Function], place: Place) -> None:
        super().__init__()
        self.mode, self.function, self.place = mode, function, place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            why = f"draws random numbers ({func}), on every rank others"
            advice = "Draw them outside of the model and pass them as inputs, or use dropout."
            raise self.place.refuse(_reason(self.function, why), advice)
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor) and self._foreign(leaf):
                why = f"takes a tensor of shape {tuple(leaf.shape)} that is no argument of it"
                advice = "Pass every parameter and every activation that it reads to apply()."
                raise self.place.refuse(_reason(self.function, why), advice)
        return func(*args, **(kwargs or {}))

    def _foreign(self, leaf: torch.Tensor) -> bool:
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode is not self.mode
        return leaf.requires_grad or type(leaf) is not torch.Tensor
