"""A model that was traced before in this process is not exported a second time, if it still is what
it was.

    autopar.plan(model, 8, inputs); autopar.plan(model, 16, inputs)    # one export

A stale trace would be a wrong number, and what a forward depends on cannot be listed: attributes,
globals, closures. So the forward itself is asked: it is called once on fake tensors, and must make
the calls of torch that it made when it was traced, one by one, on the same values, in the same
modules. That takes a tenth of a trace. What no call shows must be equal as well (`_facts`): what
the model holds, which mode each module is in, the autocast around. What cannot be compared by
value, such as a function as an operand, a tensor from elsewhere or a custom autograd function, is
a reason to trace again.

`trace` calls `Record` while it looks for side effects, then `keep`; `traced_before` returns the
program that was kept. It is kept without the model's tensors, for as long as the model lives.
`captured_before` does so for a call with other sizes (resize.py).
"""

from __future__ import annotations

import io
import operator
import random
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from autopar._compat import (
    FakeTensor,
    LazyGraphModule,
    OpOverload,
    apply_function,
    exporting,
    functions_applied,
    modes_on,
    pytree,
    without_torch_functions,
)
from autopar.ir.containers import tensors_in
from autopar.ir.graph import copy_graph
from autopar.ir.program import Program
from autopar.ops.devices import home_of, of_inputs
from autopar.ops.experts import experts_op
from autopar.passes.trace.attribute_reads import AttributeReads
from autopar.passes.trace.export import Capture, capture, stand_ins
from autopar.passes.trace.model_state import Watch, refuse_registered
from autopar.passes.trace.resize import ExportedOnce

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, type(Ellipsis))  # fmt: skip
_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)


class Doubtful(Exception):
    """Something that cannot be compared with what it was by value."""


class Record(TorchFunctionMode):
    """The calls of torch that a forward makes, in order: each with its operands, by the number of
    the call that made them, and the shapes, strides, dtypes and devices of its results. `doubtful`:
    whether another forward might make the same calls and be traced as another graph.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.doubtful, self._in_experts = model, False, False
        self.calls: list[Any] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._numbers: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no two values have one id
        self._stack, self._apply = ExitStack(), apply_function

    def __enter__(self) -> Record:
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        self._numbers = {id(value): name for name, value in tensors}
        for handle in (
            register_module_forward_pre_hook(lambda module, _: self._note("enter", module)),
            register_module_forward_hook(lambda module, _, __: self._note("leave", module)),
            self.model.register_forward_hook(lambda _, __, result: self._returned(result)),
            self.model.register_forward_pre_hook(self._called, prepend=True, with_kwargs=True),
        ):
            self._stack.callback(handle.remove)
        self._apply = self._stack.enter_context(functions_applied(self._applied))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()
        self._numbers, self._alive = {}, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_functions():
            operands = self._described((args, kwargs))
        self._in_experts = func is experts_op
        result = func(*args, **kwargs)
        self._in_experts = False
        with without_torch_functions():
            results = tensors_in(result)
            if results or getattr(func, "__name__", "") != "__get__":  # as of a shape: no call
                self.calls.append((_name(func), operands, *map(self._numbered, results)))
        return result

    def _described(self, values: Any) -> Any:
        """Return what two calls' operands are compared by."""
        leaves, structure = pytree.tree_flatten(values)
        return structure, *(self._leaf(leaf) for leaf in leaves)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._numbers:
                self.doubtful = True
            return "tensor", self._numbers.get(id(leaf))
        if isinstance(leaf, slice):
            return "slice", *(self._leaf(x) for x in (leaf.start, leaf.stop, leaf.step))
        if not isinstance(leaf, _PLAIN):
            self.doubtful = True
        return type(leaf).__name__, repr(leaf) if isinstance(leaf, _PLAIN) else None

    def _numbered(self, value: torch.Tensor) -> Any:
        """Give a result its number; return that with its facts."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._alive)
            self._alive.append(value)
        if any(type(size) is not int for size in value.shape) or type(value) not in _TENSORS:
            self.doubtful = True
            return None
        facts = tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
        return self._numbers[id(value)], facts

    def _note(self, what: str, module: nn.Module) -> None:
        self.calls.append((what, self._names.get(id(module))))

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for place, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(leaf, torch.Tensor):
                self._numbers.setdefault(id(leaf), f"input {place}")

    def _returned(self, result: Any) -> None:
        self.calls.append(("return", self._described(result)))

    def _applied(self, function: Any, *args: Any) -> Any:
        self.doubtful = self.doubtful or not self._in_experts
        return self._apply(function, *args)


def _name(func: Any) -> str:
    """Return the name of a function of torch, of an attribute with what it is read from."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__qualname__", None) or type(func).__name__
    return f"{getattr(func, '__module__', '')} {getattr(owner, '__name__', '')} {name}"


@dataclass(frozen=True)
class _Trace:
    """A trace: the facts and calls that it was made of, the program without tensors, and the export
    that it came of, which other traces share.
    """

    facts: _Facts
    calls: list[Any]
    program: Program
    once: ExportedOnce | None


# The last traces of each model, the newest last: a step in micro-batches has two, that of the whole
# batch and that of one micro-batch, and a search for their number has those of several.
_TRACES: weakref.WeakKeyDictionary[nn.Module, list[_Trace]] = weakref.WeakKeyDictionary()
_MOST_TRACES = 4


def keep(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    record: Record,
    to: Program,
    once: ExportedOnce | None,
) -> None:
    """Keep the program `to` that the model was traced as if every call of `record` can be compared
    by value; the last few of each model are kept. `once`: the export that it came of, None where
    that gives no graphs of other sizes.
    """
    targets = [node.target for node in to.module.graph.nodes if node.op == "call_function"]
    known = all(
        target is operator.getitem
        or target is experts_op
        or (isinstance(target, OpOverload) and target.namespace in ("aten", "prims"))
        for target in targets
    )
    if record.doubtful or not record.calls or not known:
        return
    try:
        facts = _facts(model, args, kwargs)
    except Doubtful:
        return
    # of numbers in the code, which the calls that make them are compared by
    kinds = {entry.target: entry.kind for entry in to.signature.inputs}
    constants = {name: x for name, x in to.tensors.items() if kinds.get(name) == "constant"}
    others = [trace for trace in _TRACES.get(model, []) if trace.facts != facts]
    _TRACES[model] = [*others, _Trace(facts, record.calls, _copy(to, constants), once)][
        -_MOST_TRACES:
    ]


def hand_on(model: nn.Module, twin: nn.Module) -> None:
    """Let a copy of a model be known by the traces of the model."""
    if model in _TRACES:
        _TRACES[twin] = [*_TRACES[model]]


def captured_before(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    record: Record,
    reads: AttributeReads,
) -> tuple[Capture, ExportedOnce] | None:
    """Return what is captured of a call whose sizes alone differ from those of a trace, and the
    export that it comes of; None where there is none, or the model does something else at these
    sizes. The model is called once, within `record` and `reads`.
    """
    if model not in _TRACES:
        return None
    try:
        unsized = _facts(model, args, kwargs).unsized
    except Doubtful:
        return None
    traces = (trace for trace in reversed(_TRACES[model]) if trace.facts.unsized == unsized)
    once = next((trace.once for trace in traces if trace.once is not None), None)
    if once is None:
        return None
    try:
        with _preserve_generators():
            export = partial(once.at_size, recorders=(record, reads))
            captured = capture(model, args, dict(kwargs), export)
    except Exception:  # whatever is other at this size, tracing explains
        return None
    return None if record.doubtful else (captured, once)  # as by a backward of the user's own


def traced_before(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Program | None:
    """Return the program that the model was traced as before, with the tensors that it holds now;
    None where it was not, or where it or the call may have changed since.
    """
    if model not in _TRACES:
        return None
    try:
        facts = _facts(model, args, kwargs)
        trace = next((each for each in _TRACES[model] if each.facts == facts), None)
        if trace is None:
            return None
        reads = AttributeReads(model)
        if _calls_now(model, args, dict(kwargs), reads) != trace.calls:
            return None
    except Exception:  # whatever a changed model raises, tracing explains
        return None
    tensors = {
        **trace.program.tensors,
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    entries = (entry for entry in trace.program.signature.inputs if entry.kind != "user")
    known = _copy(trace.program, {entry.target: tensors[entry.target] for entry in entries})
    signature = replace(known.signature, reads=frozenset(reads.attributes))
    return replace(known, signature=signature)


def _copy(program: Program, tensors: dict[str, torch.Tensor]) -> Program:
    """Return the program with a graph of its own and these tensors."""
    module = LazyGraphModule(program.module, copy_graph(program.module.graph))
    return replace(program, module=module, tensors=tensors)


def _calls_now(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reads: AttributeReads
) -> list[Any]:
    """Call the model once on fake tensors; return its calls, none where they are doubtful."""
    refuse_registered(model)
    record, watch = Record(model), Watch(model)
    with (
        _preserve_generators(), stand_ins(model, args, kwargs) as fakes, watch.saved(),
        fakes.mode, exporting(), redirect_stdout(io.StringIO()), watch, record, reads,
    ):  # fmt: skip
        model(*fakes.args, **fakes.kwargs)
    return [] if record.doubtful else record.calls


@contextmanager
def _preserve_generators() -> Iterator[None]:
    """Leave the generators of random numbers as they are."""
    numpy, state = sys.modules.get("numpy"), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


# -- what no call shows ----------------------------------------------------------------------------
class _Facts(NamedTuple):
    """What a trace depends on besides the calls of the model: its modules, its tensors, the
    arguments, their sizes, and the settings of torch.
    """

    modules: Any
    tensors: Any
    arguments: Any
    sizes: Any
    surroundings: Any

    @property
    def unsized(self) -> Any:
        """What two calls have in common that differ in their sizes alone."""
        return self._replace(sizes=())


def _facts(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Facts:
    """Return what the trace of a model depends on besides its calls. A tensor counts as on the
    device that its stand-in is on. Raises Doubtful.
    """
    home, own = home_of(model, args, dict(kwargs)), of_inputs(model)
    modules = [
        (name, type(module), module.training, sorted(module._non_persistent_buffers_set))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    tensors = [
        (name, first.setdefault(id(value), name), *_own_facts(value, home), *_sizes(value))
        for name, value in named
    ]
    sizes: list[Any] = []
    arguments = _arguments((args, dict(kwargs)), home, own, sizes)
    return _Facts(modules, tensors, arguments, sizes, _surroundings())


def _arguments(value: Any, home: torch.device, own: torch.device | None, sizes: list[Any]) -> Any:
    """Return what is compared of the arguments of a call, and add the sizes of their tensors."""
    if type(value) in (tuple, list):
        return type(value), *(_arguments(inner, home, own, sizes) for inner in value)
    if type(value) is dict:
        pairs = ((key, _arguments(inner, home, own, sizes)) for key, inner in value.items())
        return dict, *pairs
    if isinstance(value, torch.Tensor):
        sizes.append(_sizes(value))
        return _own_facts(value, home, own)
    if not isinstance(value, _PLAIN):
        raise Doubtful(type(value).__name__)
    return type(value), repr(value)


def _own_facts(value: torch.Tensor, home: torch.device, device: torch.device | None = None) -> Any:
    """Return what is compared of a tensor that the model holds or is called with, but for its
    sizes.
    """
    own = {**getattr(value, "__dict__", {})}
    if type(value) not in _TENSORS or value.layout != torch.strided:
        raise Doubtful(type(value).__name__)
    if not all(isinstance(attribute, _PLAIN) for attribute in own.values()):
        raise Doubtful(", ".join(own))
    device = device or (home if value.is_meta else value.device)
    kind = type(value), repr(own), value.is_leaf, value.is_inference()
    return *kind, value.dim(), value.dtype, device, value.requires_grad


def _sizes(value: torch.Tensor) -> Any:
    return tuple(value.shape), value.stride()


def _surroundings() -> Any:
    """Return the settings of torch that change what a call does."""
    if modes_on():
        raise Doubtful("a mode")
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return (
        autocast, torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )  # fmt: skip
