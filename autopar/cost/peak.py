"""The peak memory of a training step on one rank.

The emitted graph is run once, forward and backward, on tensors of torch's meta device, which have
no storage. A dispatch mode notes when each storage is allocated and when it is freed. So what
autograd saves and when it lets go, what a reshard allocates on the way, and which views share
storage follow torch's own rules, not a list of ours. The scratch memory that a kernel allocates for
itself alone is not seen.

An emitted program enters `peak`, a `Memory` leaves. The planner calls it to decide how much to
recompute (rematerialize.py) and to explain a plan (why.py).

Which kernels run, and so what they save, is decided for the world's device (meta_kernels.py).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopar._compat import TorchDispatchMode, pytree
from autopar.cost.halves import Holder, with_holds
from autopar.cost.memory import Optimizer, optimizer_bytes, step_bytes
from autopar.cost.meta_kernels import META, run_on_meta
from autopar.cost.microbatches import (
    memory_of_microbatches,
    microbatch_count,
    results_between,
    unreduced_bytes,
    with_gathered_weights,
    with_results,
)
from autopar.ir.containers import tensors_in
from autopar.ir.mesh import group_ranks
from autopar.ir.plan_table import Memory
from autopar.ir.program import Input, Program
from autopar.ops import comm
from autopar.world import World

_NEVER = 1 << 60


@dataclass
class _Lifetime:
    """The lifetime of one storage: its bytes, and the moments at which it is allocated and
    freed.
    """

    size: int
    born: int
    died: int = _NEVER


class LifetimeRecorder(TorchDispatchMode):
    """A dispatch mode that records the lifetime of every storage that ops allocate while it is on.
    `moment` counts the ops.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moment = 0
        self.lifetimes: list[_Lifetime] = []
        self.current: dict[int, _Lifetime] = {}
        self._known: dict[Any, _NewTensors] = {}  # results of ops, by what they were called with

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.moment += 1
        result = self._result(func, args, kwargs or {})
        for tensor in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.note(tensor)
        return result

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an op gives. Kernels of the meta device in Python take long, so an op that
        makes new tensors is run once for operands of the same shapes and strides.
        """
        key = _key_of_call(func, args, kwargs)
        fresh = None if key is None else self._known.get(key)
        if fresh is not None:
            return fresh.again()
        result = func(*args, **kwargs)
        if key is not None and (fresh := _NewTensors.of(result, (args, kwargs))) is not None:
            self._known[key] = fresh
        return result

    def note(self, tensor: Tensor) -> _Lifetime:
        """Return the lifetime of a tensor's storage; it begins now if the storage is new."""
        memory = tensor.untyped_storage()
        key = id(memory)
        if key not in self.current:
            life = self.current[key] = _Lifetime(memory.nbytes(), self.moment)
            self.lifetimes.append(life)
            weakref.finalize(memory, self._end, key)
        return self.current[key]

    def _end(self, key: int) -> None:
        self.current.pop(key).died = self.moment + 1

    def run_forward(self, module: fx.GraphModule, arguments: Sequence[Any]) -> Any:
        """Return what the module gives for these arguments."""
        return module(*arguments)

    def run_backward(self, outputs: Sequence[Any]) -> None:
        """Run the backward of these outputs."""
        _backward(outputs)


_Facts = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides


class _NewTensors(NamedTuple):
    """New tensors of the meta device that an op gave: their facts, or None, and how they come."""

    facts: tuple[_Facts | None, ...]
    kind: type

    @classmethod
    def of(cls, result: Any, arguments: Any) -> _NewTensors | None:
        """Return what a result is; None where it is no new tensor, or several in one storage."""
        values = result if type(result) in (tuple, list) else (result,)
        operands = tensors_in(arguments)
        storages = {id(x.untyped_storage()) for x in operands}
        facts: list[_Facts | None] = []
        for value in values:
            if value is None:
                facts.append(None)
                continue
            if type(value) is not Tensor or not value.is_meta or value.layout != torch.strided:
                return None
            own = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=META
            ).untyped_storage()
            storage = value.untyped_storage()
            if id(storage) in storages or storage.nbytes() != own.nbytes():
                return None
            storages.add(id(storage))
            facts.append((tuple(value.shape), value.stride(), value.dtype))
        return cls(tuple(facts), type(result) if type(result) in (tuple, list) else Tensor)

    def again(self) -> Any:
        """Return such tensors anew."""
        values = [
            None
            if fact is None
            else torch.empty_strided(fact[0], fact[1], dtype=fact[2], device=META)
            for fact in self.facts
        ]
        return values[0] if self.kind is Tensor else self.kind(values)


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format)  # fmt: skip


def _key_of_call(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what two calls of an op have in common that give the same new tensors; None of one
    that writes, or may return an operand or a view of it, or has operands that are not compared.
    """
    schema = func._schema
    if schema.is_mutable or any(each.alias_info for each in schema.returns):
        return None
    key: list[Any] = [func]
    values = [*args, *(item for pair in kwargs.items() for item in pair)]
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            if not value.is_meta or value.layout != torch.strided or value.is_complex():
                return None
            key.append((value.shape, value.stride(), value.dtype))
        elif type(value) in (list, tuple):
            key.append(len(value))
            values.extend(value)
        elif type(value) in _PLAIN:
            key.append((type(value), value))
        else:
            return None
    return tuple(key)


class _Shapes:
    """A communication simulator for one rank alone: its collectives return results of the right
    shape, and hold the memory that the backend holds on the way.
    """

    def __init__(self, world: World | None) -> None:
        self._backend = "" if world is None else world.backend
        self._sizes: dict[str, int] = {}
        self.sums_in_place = False  # as a derived graph does where it may

    def send(self, to: int, x: Tensor) -> None:
        """Raise: the graph of a stage sends nothing to other stages itself."""
        raise AssertionError("a graph has no sends")

    def receive(self, number: int, source: int) -> Tensor:
        """Raise, as `send` does."""
        raise AssertionError("a graph has no receives")

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
        if kind.startswith("all-reduce") and self.sums_in_place:
            return sent
        return torch.empty_like(sent)


def peak(program: Program, optimizer: Optimizer = "adamw", world: World | None = None) -> Memory:
    """Return what one rank holds at the peak of a training step of an emitted program, in bytes.

    The optimizer has its states already, as from the second step on; gradients are set to None
    between steps; the outputs are held until the step is done. `world` gives the backend, as gloo
    needs memory of its own, and the device, as on GPUs an optimizer steps all parameters at once.
    Raises PlanError for an unknown optimizer.

    Example: peak(plan.context.program, "sgd").peak
    """
    return peak_and_saved(program, optimizer, world).memory


class MemoryOfStep(NamedTuple):
    """The memory of a step while forwards and backwards run (`passes`; until the `first` backward
    has run, no gradients of other micro-batches wait) and while the optimizer steps (`stepping`).
    Then bytes: those that a rank holds between the forward and the backward of a micro-batch
    besides parameters, gradients and the optimizer's states, `saved` by each micro-batch, and
    `weights` by all of a step together, the weights that are gathered once; and the gradients that
    wait between micro-batches, `unreduced`.
    """

    passes: Memory
    first: Memory
    stepping: Memory
    saved: float
    weights: float
    unreduced: float

    @property
    def memory(self) -> Memory:
        """The memory at the peak of the step."""
        return max(self.passes, self.stepping, key=lambda memory: memory.peak)


def peak_and_saved(program: Program, optimizer: Optimizer, world: World | None) -> MemoryOfStep:
    """Return what `peak` returns, and what is held between forward and backward."""
    assert program.plan is not None
    keeps = program.plan.gathers_once and program.plan.microbatches > 1
    step_program = with_gathered_weights(program) if keeps else program
    with _use_simulator(_Shapes(world)):
        step = _Step(step_program, optimizer, world)
        step.run()
    waiting = unreduced_bytes(program)
    passes = memory_of_microbatches(program, step.passes, waiting, step.weights)
    first, stepping = (with_results(program, m) for m in (step.passes, step.stepping))
    saved = step.saved - step.weights
    return MemoryOfStep(passes, first, stepping, saved, step.weights, waiting)


class HalvesMemory(NamedTuple):
    """What a rank holds of one micro-batch whose backward runs in two halves, in bytes besides
    parameters, gradients that wait between micro-batches (`unreduced`), the optimizer's states and
    `results` of other micro-batches: at most while the forward, the `first` half and the `rest`
    run; what is `carried` from the first half to the rest.
    """

    forward: float
    first: float
    rest: float
    carried: float
    unreduced: float
    results: float

    def most(self, kind: str) -> float:
        """Return the most that is held while an action of this kind runs."""
        by_kind = {"F": self.forward, "I": self.first, "W": self.rest}
        return by_kind.get(kind, max(self.first, self.rest))


def peak_of_halves(
    program: Program,
    received: Sequence[str],
    optimizer: Optimizer,
    world: World | None,
) -> HalvesMemory:
    """Return the memory of a micro-batch of an emitted program whose backward runs in two halves,
    of which the first gives the gradients of what is `received`. So it holds operands and gradients
    of every product with a weight until the rest runs (cost/halves.py says of which ops).
    """
    assert program.plan is not None
    plan = program.plan
    keeps = plan.gathers_once and plan.microbatches > 1
    step_program = with_gathered_weights(program) if keeps else program
    waiting = unreduced_bytes(program)
    results = results_between(program)
    with _use_simulator(_Shapes(world)):
        step = _Step(step_program, optimizer, world)
        if not any(e.node in received and e.trainable for e in program.signature.inputs):
            step.run()
            memory, saved = step.passes, step.saved - step.weights
            own = memory.activations + memory.transient + memory.gradients - step.weights
            return HalvesMemory(saved, saved, own, saved, waiting, results)
        return step.run_halves(received, waiting)._replace(results=results)


def run_step(
    program: Program, optimizer: Optimizer, world: World, recorder: LifetimeRecorder
) -> None:
    """Run the step that `peak` runs, and let `recorder` record it."""
    with _use_simulator(_Shapes(world)):
        _Step(program, optimizer, world, recorder).run()


class Moment(NamedTuple):
    """What a rank holds after `op` ops of a step, in bytes by kind."""

    op: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transient: float


def moments(
    program: Program, optimizer: Optimizer = "adamw", world: World | None = None, most: int = 200
) -> list[Moment]:
    """Return what one rank holds over a step that waits for every collective, at `most` moments
    that lie evenly, at the peak, and last while the optimizer steps; arguments as for `peak`.
    """
    step = _Step(program, optimizer, world)
    with _use_simulator(_Shapes(world)):
        step.run(most)
    return step.moments


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

    def __init__(
        self,
        program: Program,
        optimizer: Optimizer,
        world: World | None,
        recorder: LifetimeRecorder | None = None,
    ) -> None:
        self.program, self.optimizer = program, optimizer
        self.on_gpu = world is not None and world.device.name != "cpu"
        self.recorder = LifetimeRecorder() if recorder is None else recorder
        self.moments: list[Moment] = []
        self.passes = self.stepping = Memory(0, 0, 0, 0, 0, 0)  # of `run`
        self.saved = 0.0  # bytes that are held between forward and backward
        self.weights = 0.0  # and of these, those of results that the step's program does not have

    def run(self, most: int = 0) -> None:
        """Run the step; leave its figures, and about `most` of its `moments`."""
        entries = self.program.signature.inputs
        tensors = {e.node: self._local_tensor(e) for e in entries}
        stored_names = {e.node for e in entries if e.kind in ("parameter", "buffer", "constant")}
        parameters = [self.recorder.note(t) for name, t in tensors.items() if name in stored_names]
        for name, tensor in tensors.items():
            if name not in stored_names:
                self.recorder.note(tensor)
        with self.recorder:
            outputs = self.recorder.run_forward(
                run_on_meta(self.program.module, self.on_gpu),
                [self._graph_argument(e, tensors) for e in entries],
            )
            forward_end = self.recorder.moment
            own = sum(output.node is not None for output in self.program.signature.outputs)
            more = outputs[own:]
            own_lives = {id(life): life for life in map(self.recorder.note, more)}
            self.weights = float(sum(life.size for life in own_lives.values()))
            if microbatch_count(self.program) > 1 and isinstance(comm.simulator, _Shapes):
                # of micro-batches the last alone sums, in place: see passes/overlap/accumulation.py
                comm.simulator.sums_in_place = True
            self.recorder.run_backward(outputs[:own])
        gradients = [self.recorder.note(t.grad) for t in tensors.values() if t.grad is not None]
        self._kinds = {id(x): "parameters" for x in parameters}
        self._forward_end = forward_end
        self._kinds |= {id(x): "gradients" for x in gradients}
        self.moments = self._moments(most) if most else []
        self.saved = self._sizes(forward_end)["activations"]
        self.passes, self.stepping = self._passes(), self._stepping()  # while tensors are there

    def run_halves(self, received: Sequence[str], unreduced: float) -> HalvesMemory:
        """Return the memory of a forward and of a backward in two halves. `unreduced`: bytes of the
        gradients of one micro-batch, as they wait for the others.
        """
        entries = self.program.signature.inputs
        tensors = {e.node: self._local_tensor(e) for e in entries}
        for tensor in tensors.values():
            self.recorder.note(tensor)
        stored = ("parameter", "buffer", "constant")
        outside = {id(self.recorder.note(tensors[e.node])) for e in entries if e.kind in stored}
        holder = Holder()
        module = run_on_meta(self.program.module, self.on_gpu)
        module = with_holds(self.program, module, holder)
        with self.recorder:
            outputs = self.recorder.run_forward(
                module, [self._graph_argument(e, tensors) for e in entries]
            )
            forward_end = self.recorder.moment
            own = sum(output.node is not None for output in self.program.signature.outputs)
            outside |= {id(life) for life in map(self.recorder.note, outputs[own:])}
            roots = _roots_of_backward(outputs[:own])
            starts = [torch.ones_like(root) for root in roots]
            borders = [tensors[name] for name in received if tensors[name].requires_grad]
            saved_outputs = outputs[own:]
            del outputs
            input_gradients = torch.autograd.grad(roots, borders, starts, allow_unused=True)
            first_end = self.recorder.moment
            del roots, starts
        sizes = {
            id(life): life.size
            for products in holder.products
            for life in map(self.recorder.note, products.tensors)
            if id(life) not in outside
        }
        lives = [
            [id(self.recorder.note(x)) for x in products.tensors] for products in holder.products
        ]
        del input_gradients, saved_outputs
        carried = float(sum(sizes.values()))
        whole = sum(products.gradient_bytes for products in holder.products)
        share = min(1.0, unreduced / whole) if whole and unreduced else 1.0
        left, waiting, rest = (
            Counter(key for own_lives in lives for key in own_lives),
            carried,
            carried,
        )
        for products, own_lives in zip(holder.products, lives, strict=True):
            rest = max(rest, waiting + products.gradient_bytes)
            waiting += products.gradient_bytes * share
            left.subtract(own_lives)
            waiting -= sum(sizes.pop(key, 0.0) for key in set(own_lives) if not left[key])

        def highest_between(first: int, last: int) -> float:
            lifetimes = [
                dataclasses.replace(life, born=max(life.born, first), died=min(life.died, last + 1))
                for life in self.recorder.lifetimes
                if id(life) not in outside and life.born <= last and life.died > first
            ]
            return float(highest(lifetimes)[1])

        forward = highest_between(0, forward_end)
        first = highest_between(forward_end + 1, first_end)
        return HalvesMemory(forward, first, max(rest, waiting), carried, unreduced, 0.0)

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
        if entry.target.startswith("@") and not self.on_gpu:
            return None  # a seed for GPU kernels, which a CPU does not have
        mutated = {o.target for o in self.program.signature.outputs if o.kind == "mutation"}
        tensor = tensors[entry.node]
        return tensor.clone() if entry.kind == "buffer" and entry.target in mutated else tensor

    def _moments(self, most: int) -> list[Moment]:
        """Return what is held at evenly spaced moments, at the peak, and as the optimizer steps."""
        peak_moment, _ = highest(self.recorder.lifetimes)
        every = max(1, self.recorder.moment // most)
        states, step_extra = self._states()
        moments = []
        for op in sorted({*range(0, self.recorder.moment + 1, every), peak_moment}):
            sizes = self._sizes(op)
            moments.append(Moment(op, optimizer=states, **sizes))
        end = self.recorder.moment + 1
        last = self._sizes(end)
        last["transient"] += step_extra
        return [*moments, Moment(end, optimizer=states, **last)]

    def _sizes(self, moment: int) -> dict[str, float]:
        """Return the bytes alive at a moment by kind, activations being what the forward leaves."""
        sizes = dict.fromkeys(("parameters", "gradients", "activations", "transient"), 0.0)
        for life in self.recorder.lifetimes:
            if life.born <= moment < life.died:
                saved = life.born <= self._forward_end < life.died
                kind = self._kinds.get(id(life), "activations" if saved else "transient")
                sizes[kind] += life.size
        return sizes

    def _passes(self) -> Memory:
        """Return the peak while forward and backward run, and what it consists of: parameters,
        gradients, activations, optimizer states, and transient memory.
        """
        moment, peak_bytes = highest(self.recorder.lifetimes)
        return self._memory(moment, float(peak_bytes))

    def _stepping(self) -> Memory:
        """Return what is held while the optimizer steps, weights that were gathered once apart."""
        end = self.recorder.moment + 1
        remaining = sum(life.size for life in self.recorder.lifetimes if life.died > end)
        return self._memory(end, remaining + self._states()[1])

    def _memory(self, moment: int, total_bytes: float) -> Memory:
        states, _ = self._states()
        sizes = self._sizes(moment)
        sizes["transient"] = total_bytes - sum(sizes.values()) + sizes["transient"]
        return Memory(**sizes, optimizer=states, peak=total_bytes + states)

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
        return state_bytes, step_bytes(parameter_bytes, self.optimizer, self.on_gpu)

    def _element_bytes(self, entry: Input) -> int:
        dtype = self.program.dtypes.get(entry.node)
        return dtype.itemsize if dtype is not None else self._traced_value(entry).dtype.itemsize


def highest(lifetimes: Sequence[_Lifetime]) -> tuple[int, int]:
    """Return the moment with the most live bytes, and how many these are."""
    deltas: dict[int, int] = {}
    for life in lifetimes:
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
    roots = _roots_of_backward(outputs)
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _roots_of_backward(outputs: Sequence[Any]) -> list[Tensor]:
    differentiable = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    scalars = [o for o in differentiable if o.dim() == 0]
    return scalars[:1] or differentiable
