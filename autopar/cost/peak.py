"""The peak memory of a training step on one rank.

The emitted graph is run once, forward and backward, on tensors of torch's meta device, which have
no storage. A dispatch mode notes when each storage is allocated and when it is freed. So what
autograd saves and when it lets go, what a reshard allocates on the way, and which views share
storage follow torch's own rules, not a list of ours. The scratch memory that a kernel allocates for
itself alone is not seen.

An emitted program enters `peak`, a `Memory` leaves. The planner calls it to decide how much to
recompute (rematerialize.py) and to explain a plan (why.py).

Meta tensors run in a third of the time of fake tensors. They choose a kernel by themselves where
that depends on the device; for attention the kernel of a CPU is chosen here instead, so it saves
what it saves on a CPU.
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
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default  # saves no attention scores
META = torch.device("meta")


def run_on_meta(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the module that runs on tensors of the meta device."""
    graph, root = fx.Graph(), torch.nn.Module()
    output = graph.graph_copy(module.graph, {})
    for node in graph.nodes:
        node.args = renamed(node.args, lambda _: META)
        node.kwargs = renamed(node.kwargs, lambda _: META)
        if node.target is aten.scaled_dot_product_attention.default:
            node.target = attention
        elif node.op == "call_function" and _is_factory(node):
            node.kwargs = {**node.kwargs, "device": META}
        for block in called(module, node):
            name = next(n.target for n in node.all_input_nodes if n.op == "get_attr")
            root.add_module(str(name), run_on_meta(block))
    graph.output(output)
    return fx.GraphModule(root, graph)


def _is_factory(node: fx.Node) -> bool:
    """Whether the node is a factory op, which makes a tensor without taking one."""
    if not isinstance(node.target, OpOverload) or node.all_input_nodes:
        return False
    return any(argument.name == "device" for argument in node.target._schema.arguments)


class _OperandTraits(NamedTuple):
    """The properties of an operand by which torch chooses a kernel."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    def empty_tensor(self) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return tensor.requires_grad_(self.trainable)


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
    """Run `aten.scaled_dot_product_attention` on meta tensors, with the kernel that a CPU takes."""
    operands = (query, key, value, attn_mask)
    flash_enabled = torch.backends.cuda.flash_sdp_enabled()  # the switch holds for every device
    traits = tuple(None if x is None else _operand_traits(x) for x in operands)
    if not _by_flash(traits, dropout_p, is_causal, scale, enable_gqa, flash_enabled):
        op = aten.scaled_dot_product_attention.default
        result: Tensor = op(*operands, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return result
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed, masked = (
            torch.tensor(x, dtype=query.dtype, device=META) for x in (0.0, -torch.inf)
        )
        attn_mask = torch.where(attn_mask, allowed, masked)
    options = {"attn_mask": attn_mask, "scale": scale}
    output: Tensor = FLASH(query, key, value, dropout_p, is_causal, **options)[0]
    return output


def _operand_traits(x: Tensor) -> _OperandTraits:
    return _OperandTraits(tuple(x.shape), x.stride(), x.dtype, x.requires_grad)


@lru_cache(maxsize=1 << 10)
def _by_flash(
    traits: tuple[_OperandTraits | None, ...],
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    allowed: bool,
) -> bool:
    """Whether a CPU runs these operands with the flash kernel, which saves no scores; found by a
    run on fake tensors. The modes and hooks that count memory do not see this run.
    """
    with without_modes(), saved_tensors_hooks(_save_nothing, _save_nothing), fake_mode():
        operands = [None if operand is None else operand.empty_tensor() for operand in traits]
        with _OpRecorder() as recorder:
            aten.scaled_dot_product_attention.default(
                *operands, dropout, causal, scale=scale, enable_gqa=grouped
            )
    return FLASH in recorder.ops


def _save_nothing(x: Any) -> Any:
    """Save nothing, as no backward follows."""
    return None


class _OpRecorder(TorchDispatchMode):
    """A dispatch mode that records the ops that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


_NEVER = 1 << 60


@dataclass
class _Lifetime:
    """The lifetime of one storage: its bytes, and the moments at which it is allocated and
    freed.
    """

    size: int
    born: int
    died: int = _NEVER


class Lives(TorchDispatchMode):
    """A dispatch mode that records the lifetime of every storage that ops allocate while it is on.
    `moment` counts the ops.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moment = 0
        self.lives: list[_Lifetime] = []
        self.current: dict[int, _Lifetime] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.moment += 1
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.note(tensor)
        return result

    def note(self, tensor: Tensor) -> _Lifetime:
        """Return the lifetime of a tensor's storage; it begins now if the storage is new."""
        memory = tensor.untyped_storage()
        key = id(memory)
        if key not in self.current:
            life = self.current[key] = _Lifetime(memory.nbytes(), self.moment)
            self.lives.append(life)
            weakref.finalize(memory, self._end, key)
        return self.current[key]

    def _end(self, key: int) -> None:
        self.current.pop(key).died = self.moment + 1


class _Shapes:
    """A communication simulator for one rank alone: its collectives return results of the right
    shape, and hold the memory that the backend holds on the way.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._sizes: dict[str, int] = {}

    def exchange(self, kind: str, x: Tensor, group: str) -> Tensor:
        """Return a result of the shape that this kind of collective gives, and hold what the
        backend holds.
        """
        if group not in self._sizes:
            self._sizes[group] = len(group_ranks(group, 0))
        size, sent = self._sizes[group], x.detach().contiguous()
        if kind == "all-gather":
            gathered = sent.new_empty((size * sent.shape[0], *sent.shape[1:]))
            # gloo gathers, then copies
            return gathered.clone() if self._backend == "gloo" else gathered
        if kind == "reduce-scatter":
            if self._backend == "gloo":  # see ops.comm.reduce_scatter
                received = torch.empty_like(sent)
                del sent
                return received.unflatten(0, (size, -1)).sum(0, dtype=x.dtype)
            return sent.new_empty((sent.shape[0] // size, *sent.shape[1:]))
        return torch.empty_like(sent)


def peak(program: Program, optimizer: Optimizer = "adamw", world: World | None = None) -> Memory:
    """Return what one rank holds at the peak of a training step of an emitted program, in bytes.

    The optimizer has its states already, as from the second step on; gradients are set to None
    between steps; the outputs are held until the step is done. `world` gives the backend, as gloo
    needs memory of its own, and the device, as on GPUs an optimizer steps all parameters at once.
    Raises PlanError for an unknown optimizer.

    Example: peak(plan.context.program, "sgd").peak
    """
    assert program.plan is not None
    backend, at_once = "", False
    if world is not None:
        backend, at_once = world.backend, world.device.name != "cpu"
    with _use_simulator(_Shapes(backend)):
        return _Step(program, optimizer, at_once).run()


@contextmanager
def _use_simulator(simulator: comm.Simulator) -> Iterator[None]:
    """Run collectives on this simulator within the context."""
    before, comm.simulator = comm.simulator, simulator
    try:
        yield
    finally:
        comm.simulator = before


class _Step:
    """One training step on tensors without storage."""

    def __init__(self, program: Program, optimizer: Optimizer, at_once: bool) -> None:
        self.program, self.optimizer, self.at_once = program, optimizer, at_once
        self.lives = Lives()

    def run(self) -> Memory:
        """Return the memory at the peak of the step."""
        entries = self.program.signature.inputs
        tensors = {e.node: self._local_tensor(e) for e in entries}
        stored_names = {e.node for e in entries if e.kind in ("parameter", "buffer", "constant")}
        parameters = [self.lives.note(t) for name, t in tensors.items() if name in stored_names]
        for name, tensor in tensors.items():
            if name not in stored_names:
                self.lives.note(tensor)
        with self.lives:
            outputs = run_on_meta(self.program.module)(
                *(self._graph_argument(e, tensors) for e in entries)
            )
            forward_end = self.lives.moment
            _backward(outputs)
        gradients = [self.lives.note(t.grad) for t in tensors.values() if t.grad is not None]
        return self._memory(forward_end, parameters, gradients)

    def _local_tensor(self, entry: Input) -> Tensor:
        """Return the tensor of an input, in its local shape."""
        layout, dtype = self.program.layouts.get(entry.node), self.program.dtypes.get(entry.node)
        if entry.kind == "coordinate":
            return torch.empty(1, dtype=torch.int64, device=META)
        if entry.kind == "seed":
            return torch.empty((), dtype=torch.int64, device=META)
        if layout is None or dtype is None:
            traced = self._traced_value(entry)
            tensor = torch.empty(tuple(traced.shape), dtype=traced.dtype, device=META)
        else:
            tensor = torch.empty(layout.local_shape, dtype=dtype, device=META)
        return tensor.requires_grad_(entry.trainable)

    def _traced_value(self, entry: Input) -> Tensor:
        nodes = self.program.module.graph.find_nodes(op="placeholder")
        return next(n.meta["val"] for n in nodes if n.name == entry.node)

    def _graph_argument(self, entry: Input, tensors: dict[str, Tensor]) -> Tensor | None:
        """Return what the graph is given for an input; a buffer that the step writes is copied."""
        if entry.target.startswith("@") and not self.at_once:
            return None  # a seed for GPU kernels, which a CPU does not have
        mutated = {o.target for o in self.program.signature.outputs if o.kind == "mutation"}
        tensor = tensors[entry.node]
        return tensor.clone() if entry.kind == "buffer" and entry.target in mutated else tensor

    def _memory(
        self, middle: int, parameters: list[_Lifetime], gradients: list[_Lifetime]
    ) -> Memory:
        """Return the peak and what it consists of: parameters, gradients, activations, optimizer
        states, and transient memory.
        """
        states, step_extra = self._states()
        moment, peak_bytes = highest(self.lives.lives)
        end = self.lives.moment + 1
        remaining = sum(life.size for life in self.lives.lives if life.died > end)
        if remaining + step_extra > peak_bytes:
            moment, peak_bytes = end, int(remaining + step_extra)
        alive = [x for x in self.lives.lives if x.born <= moment < x.died]
        kinds = {id(x): "parameters" for x in parameters} | {id(x): "gradients" for x in gradients}
        sizes = {"parameters": 0, "gradients": 0, "activations": 0}
        for life in alive:
            saved = life.born <= middle < life.died
            kind = kinds.get(id(life), "activations" if saved else "")
            if kind:
                sizes[kind] += life.size
        return Memory(
            **{name: float(size) for name, size in sizes.items()},
            optimizer=states,
            transient=float(peak_bytes - sum(sizes.values())),
            peak=float(peak_bytes + states),
        )

    def _states(self) -> tuple[float, float]:
        """Return the bytes of the optimizer's states, and the bytes that its step allocates for a
        moment.
        """
        state_bytes, parameter_bytes = 0.0, []
        for entry in self.program.signature.inputs:
            if entry.kind == "parameter" and entry.trainable:
                layout, size = self.program.layouts[entry.node], self._element_bytes(entry)
                state_bytes += optimizer_bytes(layout, size, self.optimizer)
                parameter_bytes.append(layout.local_size * float(size))
        return state_bytes, step_bytes(parameter_bytes, self.optimizer, self.at_once)

    def _element_bytes(self, entry: Input) -> int:
        dtype = self.program.dtypes.get(entry.node)
        return dtype.itemsize if dtype is not None else self._traced_value(entry).dtype.itemsize


def highest(lives: Sequence[_Lifetime]) -> tuple[int, int]:
    """Return the moment with the most live bytes, and how many these are."""
    deltas: dict[int, int] = {}
    for life in lives:
        deltas[life.born] = deltas.get(life.born, 0) + life.size
        deltas[life.died] = deltas.get(life.died, 0) - life.size
    moment, peak_bytes, bytes_now = 0, 0, 0
    for when in sorted(deltas):
        bytes_now += deltas[when]
        if bytes_now > peak_bytes:
            moment, peak_bytes = when, bytes_now
    return moment, peak_bytes


def _backward(outputs: Sequence[Any]) -> None:
    """Run the backward from the loss, the first scalar output. A model without one gets a gradient
    of ones for each differentiable output.
    """
    differentiable = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    scalars = [o for o in differentiable if o.dim() == 0]
    if scalars:
        scalars[0].backward()
    elif differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(o) for o in differentiable])
