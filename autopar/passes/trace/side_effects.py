"""Finds what forward does besides computing its result; `trace` calls `refuse_side_effects` first.

The graph repeats one call for ever. So forward is called twice on fake tensors, the second time on
the model as the first call left it, under another clock. Both calls must do the same to what hangs
on inputs, parameters and buffers, and neither may keep changing the model, read a tensor that an
earlier call left, or draw from a generator that no graph has. Constants may be made once and kept.
"""

from __future__ import annotations

import gc
import io
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar._compat import FakeTensor, exporting, pytree, unwrap, version_of, without_modes
from autopar.errors import TraceError
from autopar.passes.trace.export import StandIns, refusal, stand_ins, trail
from autopar.passes.trace.model_state import _VALUES, Snapshot, snapshot

_DRAWS = ("rand", "normal", "bernoulli", "multinomial", "poisson", "uniform", "exponential",
    "log_normal", "geometric", "cauchy", "dropout", "alpha_dropout",
    "feature_alpha_dropout")  # fmt: skip
_SETS = ("requires_grad.__set__", "grad.__set__", "data.__set__", "backward")  # return nothing
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_LATER_S = 98_765.4321  # by which the second call's clocks are ahead
_MOST = 1_000_000  # elements of a constant that is compared by value
Within = AbstractContextManager[Any]
_MARK = "_autopar_mark"  # (call, hash of what made a constant; None for all else)

BUFFER_ADVICE = (
    "Keep what changes from call to call in a buffer (register_buffer) that forward changes in "
    "place, or take it as an input, or change it outside of forward."
)
RANDOM_ADVICE = (
    "Draw with torch (torch.rand, F.dropout), or draw outside of the model and pass it as an input."
)


def refuse_side_effects(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    recorders: Sequence[Within] = (),
) -> set[str]:
    """Raise TraceError where two calls of the model differ; return the names of the buffers that a
    call writes into. The model and all generators are left as they were. The first call is made
    within `recorders`.
    """
    python, numpy_state = random.getstate(), _numpy_state()
    torch_state = torch.get_rng_state()
    try:
        with stand_ins(model, args, dict(kwargs)) as fakes:
            tensors, written = _call_twice(model, fakes, recorders)
        if not torch.equal(torch.get_rng_state(), torch_state):
            reason = "forward changes the state of torch's random numbers (torch.manual_seed)"
            raise refusal(model, reason, "", "Seed outside of forward.")
        _refuse_escaped(model, tensors)
        return written
    finally:
        random.setstate(python)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


class _Differs(RuntimeError):
    """A call did what no graph can repeat. Raised where it does so."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


def _call_twice(
    model: nn.Module, fakes: StandIns, recorders: Sequence[Within]
) -> tuple[list[weakref.ref[torch.Tensor]], set[str]]:
    """Call forward twice; return the tensors made and the names of the buffers written into."""
    named = [*model.named_parameters(), *model.named_buffers()]
    flags = [(name, value, value.requires_grad) for name, value in named]
    before = snapshot(model)
    inputs = [v for v in pytree.tree_leaves((fakes.args, fakes.kwargs)) if _is_tensor(v)]
    by_id = {id(value): value for value in (*dict(named).values(), *inputs)}
    buffers = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    mutations = {name: (value, version_of(value)) for name, value in model.named_buffers()}
    try:
        first = _Calls(by_id)
        if not _called(model, fakes, first, recorders):
            return [], set()
        written = {n for n, (value, count) in mutations.items() if version_of(value) > count}
        after = snapshot(model, lambda value: id(value) in before.tensors)
        _refuse_gradients(model, flags)
        for registry, content in buffers:  # what is assigned to a buffer is its new value
            registry.clear()
            registry.update(content)
        second = _Calls(by_id, first, after.tensors, _listed(before.changed(after), before, after))
        with _other_clock(model):
            _called(model, fakes, second)
        _refuse_mutations(model, after, snapshot(model, lambda value: id(value) in before.tensors))
    finally:
        before.restore()
    return [*first.tensors, *second.tensors], written


def _called(
    model: nn.Module, fakes: StandIns, calls: _Calls, recorders: Sequence[Within] = ()
) -> bool:
    """Call the model under `calls`; whether that worked."""
    try:
        with ExitStack() as stack:
            within: list[Within] = [
                fakes.mode,
                exporting(),
                redirect_stdout(io.StringIO()),
                calls,
                *recorders,
            ]
            for context in within:
                stack.enter_context(context)
            result = model(*fakes.args, **fakes.kwargs)
        calls.end(result)
    except TraceError:
        raise
    except Exception as error:
        if isinstance(error, _Differs):
            raise refusal(model, error.reason, trail(error), error.advice) from None
        if calls.earlier is None:
            return False
        message = (str(error) or type(error).__name__).splitlines()[0]
        reason = f"forward fails when it is called again: {type(error).__name__}: {message}"
        raise refusal(model, reason, trail(error), BUFFER_ADVICE) from error
    return True


class _Calls(TorchFunctionMode):
    """Records every torch function of a call that draws or depends on a tensor of `known`.
    `earlier` is the call to compare with, which left tensors at `paths`; `changed` tells how it
    changed the model.
    """

    def __init__(
        self,
        known: Mapping[int, torch.Tensor],
        earlier: _Calls | None = None,
        paths: Mapping[int, str] = MappingProxyType({}),
        changed: str = "",
    ) -> None:
        super().__init__()
        self.known, self.earlier, self.paths, self.changed = known, earlier, paths, changed
        self.names = {value: place for place, value in enumerate(known)}
        self.number = 1 if earlier is None else 2
        self.done: list[tuple[Any, ...]] = []
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.states = random.getstate(), _numpy_text()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        leaves = pytree.tree_leaves((args, kwargs))
        arguments = tuple(self._described(leaf) for leaf in leaves)
        depends = _draws(name) or any(isinstance(g, tuple) and g[0] == "tensor" for g in arguments)
        self._refuse_draws()
        result = func(*args, **kwargs)
        mark = (self.number, None if depends else hash((name, *arguments)))
        written = _written(name, args, kwargs)
        for target in written:
            self._mark(target, mark)
        results = [value for value in pytree.tree_leaves(result) if _is_tensor(value)]
        if depends and (results or written or name in _SETS):  # not for reading a shape
            self._add((name, *arguments))
        operand_ids = {id(leaf) for leaf in leaves}
        for value in results:
            if id(value) not in operand_ids:
                self._mark(value, mark)
                self.tensors.append(weakref.ref(value))
        return result

    def end(self, result: Any) -> None:
        """Compare what the call returns, and its length, with the earlier call."""
        self._refuse_draws()
        self._add(("return", *(self._described(leaf) for leaf in pytree.tree_leaves(result))))
        if self.earlier is not None and len(self.done) < len(self.earlier.done):
            self._differ(self.done[-1], self.earlier.done[len(self.done)])

    def _mark(self, value: torch.Tensor, mark: tuple[int, int | None]) -> None:
        value = unwrap(value)
        if id(value) not in self.known and isinstance(value, FakeTensor):
            setattr(value, _MARK, mark)

    def _add(self, call: tuple[Any, ...]) -> None:
        place = len(self.done)
        self.done.append(call)
        if self.earlier is None:
            return
        before = self.earlier.done[place] if place < len(self.earlier.done) else ("nothing",)
        if call != before:
            self._differ(call, before)

    def _differ(self, call: tuple[Any, ...], before: tuple[Any, ...]) -> None:
        reason = (
            f"forward does not do the same when it is called again: {_text(call)}, where the first "
            f"call had {_text(before)}" + (f"; it changed {self.changed}" if self.changed else "")
        )
        raise _Differs(reason, BUFFER_ADVICE)

    def _refuse_draws(self) -> None:
        now = random.getstate(), _numpy_text()
        for own, then, who in zip(now, self.states, ("Python's random", "numpy.random")):
            if own != then:
                reason = f"forward draws from {who}: what it drew would be the same in every call"
                raise _Differs(reason, RANDOM_ADVICE)

    def _described(self, leaf: Any) -> Any:
        """Return what two calls are compared by; ("tensor", …) depends on more than constants."""
        if not isinstance(leaf, torch.Tensor):
            return _described(leaf)
        leaf = unwrap(leaf)
        if id(leaf) in self.known:
            return ("tensor", "held", self.names[id(leaf)])
        number, constant = getattr(leaf, _MARK, (self.number, None))
        if constant is not None:
            return ("constant", constant)
        if not isinstance(leaf, FakeTensor):
            return ("constant", _hash_of(leaf))
        if number != self.number:
            where = self.paths.get(id(leaf), "a variable outside of the model (or of its class)")
            reason = f"forward reads a tensor that an earlier call of it left in {where}"
            raise _Differs(reason, BUFFER_ADVICE)
        shape = (size if type(size) is int else "?" for size in leaf.shape)  # else: depends on data
        return ("tensor", tuple(shape), leaf.dtype)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, _VALUES):
        return (type(leaf).__name__, repr(leaf))
    if isinstance(leaf, slice):
        return ("slice", *(_described(x) for x in (leaf.start, leaf.stop, leaf.step)))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.ndarray | numpy.generic):
        return ("array", leaf.shape, hash(leaf.tobytes()))
    return (type(leaf).__qualname__,)


def _hash_of(value: torch.Tensor) -> Any:
    """Hash a constant of the model's code by value; a large one, or one on a device, by its id."""
    with without_modes():
        if value.device.type != "cpu" or value.numel() > _MOST or value.layout != torch.strided:
            return id(value)
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return hash((tuple(value.shape), value.dtype, bytes(flat.view(torch.uint8).tolist())))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _name(func: Any) -> str:
    """Return a function's name: relu, add, __mul__; for an attribute shape.__get__."""
    name = getattr(func, "__name__", type(func).__name__)
    owner = getattr(func, "__self__", None)
    return f"{getattr(owner, '__name__', '')}.{name}" if name in ("__get__", "__set__") else name


def _draws(name: str) -> bool:
    return name.startswith(_DRAWS)


def _written(name: str, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a function writes into, and those that they are views of."""
    writes = name.endswith("_") and not name.endswith("__")
    writes = writes or name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    targets = [kwargs.get("out"), args[0] if writes and args else None]
    tensors = [value for value in targets if isinstance(value, torch.Tensor)]
    return tensors + [value._base for value in tensors if value._base is not None]


def _text(call: tuple[Any, ...]) -> str:
    """Show a call: mul(tensor (3, 4), 0.73)."""
    name, *arguments = call
    return name + ("" if name == "nothing" else f"({', '.join(_shown(g) for g in arguments)})")


def _shown(described: Any) -> str:
    if described[0] == "tensor":
        return "a tensor" if described[1] == "held" else f"tensor {described[1]}"
    if described[0] == "constant":
        return "a constant"
    return str(described[-1])


def _refuse_mutations(model: nn.Module, first: Snapshot, second: Snapshot) -> None:
    """Refuse a model in which the second call left other values than the first."""
    mutations = first.changed(second)
    if mutations:
        listed = _listed(mutations, first, second)
        reason = f"every call of forward changes {listed}, which is no buffer"
        raise refusal(model, reason, "", BUFFER_ADVICE)


def _listed(lines: list[str], before: Snapshot, after: Snapshot) -> str:
    listed = ", ".join(f"{path} ({_values(path, before, after)})" for path in lines[:3])
    return listed + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")


def _values(path: str, before: Snapshot, after: Snapshot) -> str:
    """Show the value at a path before and after: "0, then 1"."""
    return ", then ".join(_leaf_text(state.leaves.get(path)) for state in (before, after))


def _leaf_text(leaf: Any) -> str:
    if not isinstance(leaf, tuple):
        return "nothing"
    kind, value = leaf[0], leaf[-1]
    if kind in ("list", "dict", "set", "deque", "tuple"):
        return f"a {kind} of {value}"
    return value if isinstance(value, str) else kind.strip("_")


def _refuse_gradients(model: nn.Module, tensors: list[tuple[str, torch.Tensor, bool]]) -> None:
    for name, value, before in tensors:
        if value.grad is not None:
            reason = f"forward calls backward(), which gives {name} a gradient"
            raise refusal(model, reason, "", "Call backward() on what forward returns.")
        if isinstance(value, nn.Parameter) and value.requires_grad != before:
            reason = f"forward changes requires_grad of {name}"
            raise refusal(model, reason, "", "Freeze parameters before the model is planned.")


def _refuse_escaped(model: nn.Module, tensors: list[weakref.ref[torch.Tensor]]) -> None:
    """Refuse a forward that leaves fake tensors outside of the model."""
    if any(ref() is not None for ref in tensors):
        gc.collect()
    escaped = [ref() for ref in tensors if ref() is not None and not _is_packed(ref)]
    if escaped:
        holders = gc.get_referrers(escaped[0])
        kinds = {
            type(holder).__name__
            for holder in holders
            if holder is not escaped and not isinstance(holder, types.FrameType)
        }
        reason = (
            f"forward leaves {len(escaped)} tensors in variables outside of the model (in a "
            f"{' or a '.join(sorted(kinds)) or 'cache'}): there are stand-ins without values now"
        )
        advice = (
            "Keep them in the model or return them; a cache of constants is to be filled by a call "
            "of the model before it is planned. Empty what holds them now."
        )
        raise refusal(model, reason, "", advice)


def _is_packed(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether only tuples hold a tensor that nothing else holds: activations packed by a hook."""
    holders = _holders(ref(), None)
    packed = [isinstance(holder, tuple) and not _holders(holder, holders) for holder in holders]
    return bool(packed) and all(packed)


def _holders(value: Any, apart: Any) -> list[Any]:
    kinds = (list, dict, tuple, set, types.CellType)
    return [h for h in gc.get_referrers(value) if h is not apart and isinstance(h, kinds)]


@contextmanager
def _other_clock(model: nn.Module) -> Iterator[None]:
    """Let this thread read later times, by every name that the model's modules have for a clock."""
    names = {type(module).__module__ for module in model.modules()}
    modules = [sys.modules[name] for name in names if name in sys.modules and name[:6] != "torch."]
    clocks: dict[Any, Callable[[], Any]] = {}
    for name in _CLOCKS:
        clocks[getattr(time, name)] = _clock_ahead(getattr(time, name), _LATER_S)
        nanoseconds = getattr(time, f"{name}_ns")
        clocks[nanoseconds] = _clock_ahead(nanoseconds, round(_LATER_S * 1e9))
    replaced = []
    try:
        for place in [vars(time), *map(vars, modules)]:
            for key, value in list(place.items()):
                if isinstance(value, types.BuiltinFunctionType) and value in clocks:
                    replaced.append((place, key, value))
                    place[key] = clocks[value]
        yield
    finally:
        for place, key, value in replaced:
            place[key] = value


def _clock_ahead(clock: Callable[[], Any], ahead: float) -> Callable[[], Any]:
    thread = threading.get_ident()
    return lambda: clock() + (ahead if threading.get_ident() == thread else 0)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _numpy_text() -> Any:
    state = _numpy_state()
    return None if state is None else (state[1].tobytes(), *state[2:])
