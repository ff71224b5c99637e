"""The peak of memory of a training step on one rank: the emitted graph is run once, forward and
backward, on tensors without storage, and every memory is noted when it is made and when it dies.

So what autograd saves and when it lets go, what a change of state makes on the way, and which views
share memory are torch's own rules, not a list of ours. What a kernel allocates for itself alone is
not seen.

An emitted graph for tensors without storage, which are torch's meta device: what holds which
memory can be run there at a third of the time that fake tensors take.

Meta tensors decide by themselves how an op is run where that depends on the device. That is so for
attention, which here keeps what it keeps on a CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from autopar._compat import OpOverload, TorchDispatchMode, fake_mode, pytree, without_modes
from autopar.cost.memory import Optimizer, optimizer_bytes, step_bytes
from autopar.ir.graph import called
from autopar.ir.mesh import group_ranks
from autopar.ir.plan_table import Memory
from autopar.ir.program import Input, Program
from autopar.ops import comm
from autopar.ops.devices import renamed
from autopar.world import World

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default  # keeps no scores
META = torch.device("meta")


def run_on_meta(module: fx.GraphModule) -> fx.GraphModule:
    """The module, for tensors of the meta device."""
    graph, root = fx.Graph(), torch.nn.Module()
    output = graph.graph_copy(module.graph, {})
    for node in graph.nodes:
        node.args = renamed(node.args, lambda _: META)
        node.kwargs = renamed(node.kwargs, lambda _: META)
        if node.target is aten.scaled_dot_product_attention.default:
            node.target = attention
        elif node.op == "call_function" and _makes(node):
            node.kwargs = {**node.kwargs, "device": META}
        for block in called(module, node):
            name = next(n.target for n in node.all_input_nodes if n.op == "get_attr")
            root.add_module(str(name), run_on_meta(block))
    graph.output(output)
    return fx.GraphModule(root, graph)


def _makes(node: fx.Node) -> bool:
    """Whether it is an op that makes a tensor of none."""
    if not isinstance(node.target, OpOverload) or node.all_input_nodes:
        return False
    return any(argument.name == "device" for argument in node.target._schema.arguments)


class _Looks(NamedTuple):
    """What torch looks at of an operand to choose a kernel."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    def made(self) -> Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return made.requires_grad_(self.trainable)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`aten.scaled_dot_product_attention` of meta tensors, by the kernel that a CPU takes."""
    operands = (query, key, value, attn_mask)
    allowed = torch.backends.cuda.flash_sdp_enabled()  # of all devices
    looks = tuple(None if x is None else _look(x) for x in operands)
    if not _by_flash(looks, dropout_p, is_causal, scale, enable_gqa, allowed):
        op = aten.scaled_dot_product_attention.default
        result: Tensor = op(*operands, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return result
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        on, off = (torch.tensor(x, dtype=query.dtype, device=META) for x in (0.0, -torch.inf))
        attn_mask = torch.where(attn_mask, on, off)
    more = {"attn_mask": attn_mask, "scale": scale}
    found: Tensor = FLASH(query, key, value, dropout_p, is_causal, **more)[0]
    return found


def _look(x: Tensor) -> _Looks:
    return _Looks(tuple(x.shape), x.stride(), x.dtype, x.requires_grad)


@lru_cache(maxsize=1 << 10)
def _by_flash(
    looks: tuple[_Looks | None, ...],
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    allowed: bool,
) -> bool:
    """Whether a CPU runs it by the kernel that keeps no scores: seen on fake tensors. Who counts
    what is made, or what a block saves, does not hear of it.
    """
    with without_modes(), saved_tensors_hooks(_nothing, _nothing), fake_mode():
        given = [None if look is None else look.made() for look in looks]
        with _Ran() as ran:
            aten.scaled_dot_product_attention.default(
                *given, dropout, causal, scale=scale, enable_gqa=grouped
            )
    return FLASH in ran.ops


def _nothing(x: Any) -> Any:
    """No backward follows."""
    return None


class _Ran(TorchDispatchMode):
    """Notes the ops that run while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


_NEVER = 1 << 60


@dataclass
class _Life:
    """One memory: its bytes, and between which two moments it is there."""

    size: int
    born: int
    died: int = _NEVER


class Lives(TorchDispatchMode):
    """Notes every memory that ops make while the mode is on. `moment` counts the ops."""

    def __init__(self) -> None:
        super().__init__()
        self.moment = 0
        self.lives: list[_Life] = []
        self.known: dict[int, _Life] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.moment += 1
        made = func(*args, **(kwargs or {}))
        for tensor in (made,) if isinstance(made, Tensor) else pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.note(tensor)
        return made

    def note(self, tensor: Tensor) -> _Life:
        """The life of a tensor's memory, which begins now where it was not known."""
        memory = tensor.untyped_storage()
        key = id(memory)
        if key not in self.known:
            life = self.known[key] = _Life(memory.nbytes(), self.moment)
            self.lives.append(life)
            weakref.finalize(memory, self._end, key)
        return self.known[key]

    def _end(self, key: int) -> None:
        self.known.pop(key).died = self.moment + 1


class _Shapes:
    """The wire of one rank alone: results of the right shape, with the memory that the transport
    holds on the way.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._sizes: dict[str, int] = {}

    def exchange(self, kind: str, x: Tensor, group: str) -> Tensor:
        if group not in self._sizes:
            self._sizes[group] = len(group_ranks(group, 0))
        size, sent = self._sizes[group], x.detach().contiguous()
        if kind == "all-gather":
            whole = sent.new_empty((size * sent.shape[0], *sent.shape[1:]))
            return whole.clone() if self._backend == "gloo" else whole  # it gathers, then copies
        if kind == "reduce-scatter":
            if self._backend == "gloo":  # see wire.reduce_scatter
                arrived = torch.empty_like(sent)
                del sent
                return arrived.unflatten(0, (size, -1)).sum(0, dtype=x.dtype)
            return sent.new_empty((sent.shape[0] // size, *sent.shape[1:]))
        return torch.empty_like(sent)


def peak(program: Program, optimizer: Optimizer = "adamw", world: World | None = None) -> Memory:
    """What one rank holds at the peak of a training step of an emitted program, in bytes.

    The optimizer has its states already, as from the second step on; gradients are set to None
    between steps; the outputs are held until the step is done. `world` says which transport, as
    gloo needs memory of its own, and which device, as on GPUs an optimizer steps all parameters at
    once. Raises PlanError for an unknown optimizer.

    Example: peak(plan.ready.program, "sgd").peak
    """
    assert program.plan is not None
    backend, at_once = "", False
    if world is not None:
        backend, at_once = world.backend, world.device.name != "cpu"
    with _simulated(_Shapes(backend)):
        return _Step(program, optimizer, at_once).run()


@contextmanager
def _simulated(simulator: comm.Simulator) -> Iterator[None]:
    before, comm.simulator = comm.simulator, simulator
    try:
        yield
    finally:
        comm.simulator = before


class _Step:
    """One training step without storage."""

    def __init__(self, program: Program, optimizer: Optimizer, at_once: bool) -> None:
        self.program, self.optimizer, self.at_once = program, optimizer, at_once
        self.lives = Lives()

    def run(self) -> Memory:
        entries = self.program.signature.inputs
        held = {e.node: self._held(e) for e in entries}
        stored = {e.node for e in entries if e.kind in ("parameter", "buffer", "constant")}
        parameters = [self.lives.note(t) for name, t in held.items() if name in stored]
        for name, tensor in held.items():
            if name not in stored:
                self.lives.note(tensor)
        with self.lives:
            outputs = run_on_meta(self.program.module)(*(self._fed(e, held) for e in entries))
            middle = self.lives.moment
            _backward(outputs)
        gradients = [self.lives.note(t.grad) for t in held.values() if t.grad is not None]
        return self._memory(middle, parameters, gradients)

    def _held(self, entry: Input) -> Tensor:
        layout, dtype = self.program.layouts.get(entry.node), self.program.dtypes.get(entry.node)
        if entry.kind == "coordinate":
            return torch.empty(1, dtype=torch.int64, device=META)
        if entry.kind == "seed":
            return torch.empty((), dtype=torch.int64, device=META)
        if layout is None or dtype is None:
            given = self._traced(entry)
            made = torch.empty(tuple(given.shape), dtype=given.dtype, device=META)
        else:
            made = torch.empty(layout.local_shape, dtype=dtype, device=META)
        return made.requires_grad_(entry.trainable)

    def _traced(self, entry: Input) -> Tensor:
        nodes = self.program.module.graph.find_nodes(op="placeholder")
        return next(n.meta["val"] for n in nodes if n.name == entry.node)

    def _fed(self, entry: Input, held: dict[str, Tensor]) -> Tensor | None:
        if entry.target.startswith("@") and not self.at_once:
            return None  # a CPU has no kernel that it would seed
        mutated = {o.target for o in self.program.signature.outputs if o.kind == "mutation"}
        tensor = held[entry.node]
        return tensor.clone() if entry.kind == "buffer" and entry.target in mutated else tensor

    def _memory(self, middle: int, parameters: list[_Life], gradients: list[_Life]) -> Memory:
        states, extra = self._states()
        moment, most = highest(self.lives.lives)
        end = self.lives.moment + 1
        still = sum(life.size for life in self.lives.lives if life.died > end)
        if still + extra > most:
            moment, most = end, int(still + extra)
        there = [x for x in self.lives.lives if x.born <= moment < x.died]
        kinds = {id(x): "parameters" for x in parameters} | {id(x): "gradients" for x in gradients}
        sizes = {"parameters": 0, "gradients": 0, "activations": 0}
        for life in there:
            saved = life.born <= middle < life.died
            kind = kinds.get(id(life), "activations" if saved else "")
            if kind:
                sizes[kind] += life.size
        return Memory(
            **{name: float(size) for name, size in sizes.items()},
            optimizer=states,
            transient=float(most - sum(sizes.values())),
            peak=float(most + states),
        )

    def _states(self) -> tuple[float, float]:
        """Bytes of the optimizer's states, and of what its step makes on the way."""
        states, sizes = 0.0, []
        for entry in self.program.signature.inputs:
            if entry.kind == "parameter" and entry.trainable:
                layout, size = self.program.layouts[entry.node], self._element_bytes(entry)
                states += optimizer_bytes(layout, size, self.optimizer)
                sizes.append(layout.local_size * float(size))
        return states, step_bytes(sizes, self.optimizer, self.at_once)

    def _element_bytes(self, entry: Input) -> int:
        dtype = self.program.dtypes.get(entry.node)
        return dtype.itemsize if dtype is not None else self._traced(entry).dtype.itemsize


def highest(lives: Sequence[_Life]) -> tuple[int, int]:
    """The moment with most bytes, and these."""
    changes: dict[int, int] = {}
    for life in lives:
        changes[life.born] = changes.get(life.born, 0) + life.size
        changes[life.died] = changes.get(life.died, 0) - life.size
    moment, most, now = 0, 0, 0
    for when in sorted(changes):
        now += changes[when]
        if now > most:
            moment, most = when, now
    return moment, most


def _backward(outputs: Sequence[Any]) -> None:
    """From the loss, the first scalar; a model without one gets a gradient for each result."""
    able = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    scalars = [o for o in able if o.dim() == 0]
    if scalars:
        scalars[0].backward()
    elif able:
        torch.autograd.backward(able, [torch.ones_like(o) for o in able])
