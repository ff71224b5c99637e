"""Custom autograd functions in a traced graph: each call is one op, whose backward is the user's.

    x + Quantise.apply(x, 4)    ->    quantise = autopar_functions.Quantise_1f0c…(x); x + quantise

Export would record what `forward` computes and forget `backward`. So while a model is captured,
`apply` calls an op of its own instead. The op runs `Quantise.apply` on the tensors that it is
given: by autograd where the graph runs as it is, and through it where AOTAutograd derives graphs.
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
    """(reason, place, advice): what a graph cannot say of a model, for a TraceError."""


@dataclass(frozen=True)
class Signature:
    """Of a call: its arguments with None for every tensor, and what it returns likewise."""

    function: type[Function]
    spec: pytree.TreeSpec
    fixed: tuple[Any, ...]
    tensors: tuple[int, ...]  # places of tensors among the leaves of the arguments
    returned: tuple[Any, ...]
    results: tuple[int, ...]  # places of tensors in `returned`
    single: bool  # it returns no tuple

    def key(self) -> tuple[Any, ...]:
        """Two calls with the same key are the same op."""
        values = tuple((type(v), v if isinstance(v, _PLAIN) else id(v)) for v in self.fixed)
        constants = tuple((type(v), repr(v)) for v in self.returned)
        rest = self.tensors, self.results, self.single
        return self.function, self.spec, values, constants, *rest

    def digest(self) -> str:
        """The same in every process, for arguments that are numbers and the like."""
        values = [v if isinstance(v, _PLAIN) else type(v).__qualname__ for v in self.fixed]
        named = f"{self.function.__module__}.{self.function.__qualname__}"
        told = f"{named} {self.tensors} {self.results} {self.single} {values!r}"
        return hashlib.sha256(told.encode()).hexdigest()[:8]


_signatures: dict[OpOverload, Signature] = {}
_ops: dict[tuple[Any, ...], OpOverload] = {}
_library: list[torch.library.Library] = []


def is_custom(target: Any) -> bool:
    """Whether a node's target is a custom autograd function."""
    return target in _signatures


@contextmanager
def honoured(model: nn.Module) -> Iterator[None]:
    """While a model is captured: calls of custom functions become ops, and what is checkpointed is
    inlined, for what runs again in the backward is the plan's to say. Raises Refused.
    """
    global _capturing
    names = {id(module): name for name, module in model.named_modules()}

    def apply(function: type[Function], *args: Any) -> Any:
        if function is CheckpointFunction:
            return _inlined(*args)
        if _is_recorded(function):
            return apply_function(function, *args)
        place = Place.of(names, model)
        if function is BackwardHookFunction:
            raise place.refuse("has a backward hook", HOOK_ADVICE)
        return _as_op(function, args, place)

    _capturing = True
    try:
        with functions_applied(apply), checkpoints_inlined():
            yield
    finally:
        _capturing = False


def _inlined(run: Any, preserve_rng_state: Any, *args: Any) -> Any:
    """Reentrant checkpointing gives gradients where one of its own arguments has one."""
    carries = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(carries and torch.is_grad_enabled()):
        return run(*args)


_RECORDED = ("_functorch", "_higher_order_ops", "_library", "_dynamo", "_prims_common")


def _is_recorded(function: type[Function]) -> bool:
    """What torch makes itself, for ops that are recorded as such with their own backward."""
    package, _, rest = function.__module__.partition(".")
    return not _capturing or (package == "torch" and rest.split(".")[0] in _RECORDED)


class Captured:
    """A custom function that dynamo has captured: forward and backward are graphs, and `run` calls
    both as one function of the tensors.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.__name__ = self.__qualname__ = "captured"

    def apply(self, *args: Any) -> Any:
        """As an op, where a model is captured."""
        if not _capturing:
            return self.run(*args)
        return _as_op(cast(Any, self), args, Place("a function that dynamo captured", ""))


# -- where -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Where in a model something is called: the module, and the user's line."""

    module: str
    line: str

    @staticmethod
    def of(names: dict[int, str], model: nn.Module) -> Place:
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
        return Refused(f"{self.module} {what}", self.line, advice)


def is_inner(filename: str) -> bool:
    inner = (Path(torch.__file__).parent, Path(__file__).parent)
    return filename.startswith("<") or any(Path(filename).is_relative_to(p) for p in inner)


# -- a call as an op -------------------------------------------------------------------------------
def _as_op(function: type[Function], args: tuple[Any, ...], place: Place) -> Any:
    leaves, spec = pytree.tree_flatten(args)
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = [leaves[i] for i in places]
    fixed = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
    with run_as_they_are():
        returned = _tried(function, spec, fixed, places, tensors, place)
    single = not isinstance(returned, tuple)
    found = (returned,) if single else returned
    results = tuple(i for i, value in enumerate(found) if isinstance(value, torch.Tensor))
    constants = tuple(None if i in results else value for i, value in enumerate(found))
    if not results:
        raise place.refuse(_applies(function, "returns no tensor"), _ADVICE)
    signature = Signature(function, spec, fixed, places, constants, results, single)
    made = _op(signature)(*tensors)
    several = [made] if len(results) == 1 else made
    without = [not found[i].requires_grad for i in results]  # those that ctx marked as such
    pairs = zip(several, without, strict=True)
    values = iter([x.detach() if x.requires_grad and none else x for x, none in pairs])
    whole = [next(values) if i in results else value for i, value in enumerate(constants)]
    return whole[0] if single else tuple(whole)


HOOK_ADVICE = (
    "Take it off before the model is planned. What scales a gradient can be a torch.autograd."
    "Function; what watches or changes gradients of parameters goes on those of the parallel model."
)
_ADVICE = (
    "Write it with torch's own operations (x + (f(x) - x).detach() passes a gradient straight "
    "through), or make the function one that computes from its arguments alone."
)


def _applies(function: type[Function], why: str) -> str:
    return f"applies the autograd function {function.__name__}, which {why}"


@contextmanager
def run_as_they_are() -> Iterator[None]:
    """Custom functions are run, not recorded, also those that one calls in turn."""
    global _capturing
    before, _capturing = _capturing, False
    try:
        yield
    finally:
        _capturing = before


def _op(signature: Signature) -> OpOverload:
    """The op of such a call; the same one each time."""
    key = signature.key()
    if key not in _ops:
        _ops[key] = _made(signature)
        _signatures[_ops[key]] = signature
    return _ops[key]


def _made(signature: Signature) -> OpOverload:
    if not _library:
        _library.append(torch.library.Library(NAMESPACE, "FRAGMENT"))
    plain = re.sub(r"\W", "_", signature.function.__name__)
    base = name = f"{plain}_{signature.digest()}"
    known = {str(op._schema.name).partition("::")[2] for op in _signatures}
    count = 1
    while name in known:  # another object among the arguments, or a class of the same name
        count += 1
        name = f"{base}_{count}"
    taken = ", ".join(f"Tensor x{i}" for i in range(len(signature.tensors)))
    given = ", ".join(["Tensor"] * len(signature.results))
    _library[0].define(f"{name}({taken}) -> " + (given if "," not in given else f"({given})"))
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def run(*tensors: torch.Tensor) -> Any:
        return _applied(signature, tensors)

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
    """While a model is captured: the op's result carries a gradient where the function's would, so
    that a model that looks (`requires_grad`, `register_hook`) does what it does when it runs.
    """

    @staticmethod
    def forward(ctx: Any, op: OpOverload, *tensors: torch.Tensor) -> Any:
        with below_autograd():
            return op(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("a gradient through a custom function is asked for within the forward")


def _applied(signature: Signature, tensors: Sequence[torch.Tensor]) -> Any:
    """The user's function on these tensors. In float64, as verify runs it, results are too."""
    returned = signature.function.apply(
        *_rebuilt(signature.spec, signature.fixed, signature.tensors, tensors)
    )
    found = (returned,) if signature.single else returned
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    results = []
    for place in signature.results:
        value = found[place]
        results.append(value.double() if wide and value.is_floating_point() else value)
    return results[0] if len(results) == 1 else tuple(results)


def _rebuilt(
    spec: pytree.TreeSpec, fixed: Sequence[Any], places: Sequence[int], tensors: Sequence[Any]
) -> Any:
    leaves = list(fixed)
    for place, tensor in zip(places, tensors, strict=True):
        leaves[place] = tensor
    return pytree.tree_unflatten(leaves, spec)


# -- tried on tensors without values ---------------------------------------------------------------
def _tried(
    function: type[Function],
    spec: pytree.TreeSpec,
    fixed: Sequence[Any],
    places: Sequence[int],
    tensors: Sequence[torch.Tensor],
    place: Place,
) -> Any:
    """What the function returns, of fake tensors, when it has been run forward and backward. Raises
    Refused where it does what an op cannot: see `_Watch`.
    """
    with without_modes(), without_torch_functions(), torch.enable_grad():
        mode = fake_mode()
        fakes = [_stand_in(mode, tensor) for tensor in tensors]
        with mode, _Watch(mode, function, place):
            given = [fake.clone() if fake.requires_grad else fake for fake in fakes]
            before = [tensor._version for tensor in given]
            returned = function.apply(*_rebuilt(spec, fixed, places, given))
            if before != [tensor._version for tensor in given]:
                why = "changes an argument in place"
                raise place.refuse(_applies(function, why), "Let it work on a clone of it.")
            _backward(function, returned, fakes, place)
    return returned


def _stand_in(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
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
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not results or not wanted:
        return
    try:
        gradients = [torch.ones_like(result) for result in results]
        torch.autograd.grad(results, wanted, gradients, allow_unused=True)
    except Refused:
        raise
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        why = f"has a backward that does not run on tensors without values: {message}"
        raise place.refuse(_applies(function, why), _ADVICE) from error


class _Watch(TorchDispatchMode):
    """Refuses what makes a custom function more than an op of its arguments: tensors from
    elsewhere (parameters and activations that it knows by a closure, whose gradients would be lost,
    and which a rank holds only a part of) and random numbers, which ranks would draw apart.
    """

    def __init__(self, mode: FakeTensorMode, function: type[Function], place: Place) -> None:
        super().__init__()
        self.mode, self.function, self.place = mode, function, place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            why = f"draws random numbers ({func}), on every rank others"
            advice = "Draw them outside of the model and pass them as inputs, or use dropout."
            raise self.place.refuse(_applies(self.function, why), advice)
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor) and self._foreign(leaf):
                why = f"takes a tensor of shape {tuple(leaf.shape)} that is no argument of it"
                advice = "Pass every parameter and every activation that it reads to apply()."
                raise self.place.refuse(_applies(self.function, why), advice)
        return func(*args, **(kwargs or {}))

    def _foreign(self, leaf: torch.Tensor) -> bool:
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode is not self.mode
        return leaf.requires_grad or type(leaf) is not torch.Tensor
