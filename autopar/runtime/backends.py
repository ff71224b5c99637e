"""What runs an emitted graph: the graphs that AOTAutograd derives from it, scheduled, or the graph
as it is; and by which backend.

With `overlap` a backend gets the scheduled forward and backward:

| `backend`     | what becomes of them                                                            |
|---------------|---------------------------------------------------------------------------------|
| None          | run as they are, ops writing in place where they can                            |
| "aot_eager"   | run as they are, every op through torch's dispatch, none in place               |
| "inductor"    | compiled, order of collectives, waits and products kept                         |
| another name, | each is given to it as `(gm, example_inputs)`, which AOTAutograd calls what     |
| a callable    | compiles a forward or a backward                                                |

A backend of torch.compile takes an fx.GraphModule and gives what runs it; so it does with the two
graphs, which are ATen ops and functional collectives on a rank's own tensors and want no gradients.
What it gives is called with as many tensors as the graph has placeholders. Without `overlap`, or
where no gradients are wanted, torch.compile gets the emitted graph with that backend.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from autopar._compat import (
    BoxedCodeGen,
    below_autograd,
    compile_in_order,
    derive,
    inductor_decompositions,
    named_backend,
    partition,
    takes_a_list,
)
from autopar.cost.memory import no_room
from autopar.cost.simulator.engine import Run
from autopar.cost.simulator.graph_events import Phase, bytes_of, sent_as_given, writes
from autopar.cost.simulator.liveness import StepMemory, live_bytes, saved_by
from autopar.errors import PlanError
from autopar.ir.graph import copied, reorder
from autopar.ir.program import Program
from autopar.ops.failures import guarded
from autopar.ops.process_groups import connect, undone_on_failure
from autopar.ops.recomputation import spread, tagged
from autopar.ops.sharded.dropout import FORMULAS
from autopar.passes.overlap import bucket, chunk, lanes, reinplace, schedule, views
from autopar.passes.overlap.aux_outputs import (
    Gradients,
    Late,
    as_constants,
    beside_the_loss,
    through,
)
from autopar.world import World, ranks

Backend = str | Callable[..., Any] | None


Overlap = bool | Sequence[str]
PASSES = ("chunk", "bucket", "schedule")  # that overlap=True means
BY_NAME = ("chunk", "bucket", "lanes", "schedule")
OVERLAP: Overlap = True  # where a user does not say

# Bytes of the largest bucket and how freely ops move: the first that the memory allows is taken.
_ATTEMPTS: tuple[tuple[float, schedule.Freedom], ...] = (
    (math.inf, schedule.USUAL),
    (math.inf, schedule.PUNCTUAL),
    (1 << 20, schedule.PUNCTUAL),
    (1 << 16, schedule.PUNCTUAL),
    (0, schedule.PUNCTUAL),
    (0, schedule.LEAST),
)


def runner(
    program: Program, world: World, backend: Backend, overlap: Overlap
) -> Callable[..., Any]:
    """What a ParallelModule calls with the values of the graph's placeholders. `overlap`: True for
    PASSES, False for none, or names of BY_NAME. Raises PlanError for another name, of a pass or of
    a backend.
    """
    passes = (PASSES if overlap else ()) if isinstance(overlap, bool) else tuple(overlap)
    unknown = [name for name in passes if name not in BY_NAME]
    if unknown:
        raise PlanError(f"overlap names {unknown[0]!r}; the passes are {', '.join(BY_NAME)}")
    if isinstance(backend, str):
        named_backend(backend)
    assert program.plan is not None
    if not program.plan.mesh.axes or overlap is False:
        return _plain(program.module, backend)
    return Scheduled(program, world, passes, backend)


def _plain(module: fx.GraphModule, backend: Backend) -> Callable[..., Any]:
    return module if backend is None else torch.compile(module, backend=backend)


class Scheduled:
    """Runs a program by its scheduled forward and backward, which are derived at the first call
    that wants gradients, by a backend; without gradients, and where they would hold more than the
    plan's limit, it runs the graph as it is.

    `forward` and `backward`: the scheduled graphs, once there are; `modelled`: their runs.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        passes: Sequence[str] = PASSES,
        backend: Backend = None,
    ) -> None:
        self.module, self.world, self.passes = program.module, world, passes
        self._plain, self.backend = _plain(program.module, backend), backend
        self._plan = program.plan
        self.stored = frozenset(
            f"primals_{place}"
            for place, entry in enumerate(program.signature.inputs, start=1)
            if entry.stored
        )
        # Of each graph, what is there before it runs and may be fetched at any time.
        self._there: dict[Phase, frozenset[str]] = {"forward": self.stored}
        assert program.plan is not None
        self.mesh = program.plan.mesh
        self._constant = beside_the_loss(program)
        self._late: set[int] = set()  # of these, what would have a gradient
        inputs = enumerate(program.signature.inputs)
        self._given = [place for place, entry in inputs if entry.kind == "user"]
        self._strides: dict[int, tuple[int, ...]] = {}  # of what a user gave, when it was derived
        self._run: Callable[..., Any] | None = None
        self.forward: fx.GraphModule | None = None
        self.backward: fx.GraphModule | None = None
        self.modelled: dict[str, Run] = {}
        self._above = 0.0  # bytes that the graphs need above the limit

    def __call__(self, *values: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return self.module(*values)
        if not self._wants(values):
            return self._plain(*values)
        given = self._as_derived(values)
        if self._run is None:
            self._run = ranks.together("deriving the backward", lambda: self.derived(given))
            if self.forward is None or self._above:  # nothing that it gives carries a gradient
                self._run, self._late = self._plain, set()
                if self._above and not ranks.rank():
                    warnings.warn(no_room(self._above), stacklevel=2)
                return self._plain(*values)
            ranks.agree("collective order", self.order())
            self._open(values[0].device.type)
        found = list(self._run(*given))
        for place in self._late:
            found[place] = Late.apply(self._asked, place, found[place], *given)
        return found

    def _as_derived(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values, those of the user in the memory order of the first step: what is returned may
        be a view of them, and AOTAutograd makes it anew by that order.
        """
        found = list(values)
        for place in self._given:
            value = found[place]
            if self._run is None:
                found[place] = value.contiguous() if _overlaps(value) else value
                self._strides[place] = found[place].stride()
            elif value.stride() != self._strides[place]:
                other = value.new_empty_strided(value.shape, self._strides[place])
                found[place] = other.copy_(value)
        return found

    def _asked(
        self, place: int, gradient: torch.Tensor, values: Sequence[torch.Tensor]
    ) -> Gradients:
        """The gradients by way of a result beside the loss. Who asks once asks again."""
        self._run, self._constant = None, frozenset()
        return through(self.module, place, gradient, values)

    def _open(self, device_type: str) -> None:
        """The groups of lane 1: all ranks are here, with the same names."""
        assert self.forward is not None and self.backward is not None
        names = lanes.opened(self.forward.graph, self.backward.graph)
        if names:
            with undone_on_failure():
                ranks.together(
                    "opening process groups", lambda: connect(self.mesh, device_type, names)
                )

    def order(self) -> str:
        """Names the order of all collectives, forward and backward."""
        assert self.forward is not None and self.backward is not None
        lines = [
            line
            for module in (self.forward, self.backward)
            for line in schedule.collectives_in_order(module.graph)
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @staticmethod
    def _wants(values: Sequence[torch.Tensor]) -> bool:
        """Whether this call records gradients, as the derived graphs do; under autocast other ops
        would run than were derived.
        """
        return (
            torch.is_grad_enabled()
            and any(value.requires_grad for value in values)
            and not torch.is_autocast_enabled(values[0].device.type)
        )

    def derived(self, values: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Derive and schedule the graphs for such values; what runs them."""
        decompositions = None
        if self.backend == "inductor":
            decompositions = inductor_decompositions() | FORMULAS
        self.forward, self.backward, self._above = None, None, 0.0
        module = tagged(self.module)  # what the plan makes again is not saved
        module, self._late = as_constants(module, self._constant)
        run = derive(module, values, self._compiled, self._partition, decompositions)
        if self.forward is None and self._late:  # the scalar is no loss
            self._constant = frozenset()
            return self.derived(values)
        return run

    def _compiled(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        """What runs one of the two graphs. The backward may be given as a copy. A backend of
        torch.compile is called with tensors, whatever it says of itself.
        """
        backward = gm is not self.forward
        return guarded(
            self._unguarded(gm, example_inputs, backward), "backward" if backward else "forward"
        )

    def _unguarded(
        self, gm: fx.GraphModule, example_inputs: Any, backward: bool
    ) -> Callable[..., Any]:
        if self.backend is None or self.forward is None:
            return _boxed(gm, below_autograd)
        if self.backend == "aot_eager":
            return _boxed(gm, nullcontext)
        if self.backend == "inductor":
            return compile_in_order(gm, example_inputs, backward=backward)
        made = named_backend(self.backend) if isinstance(self.backend, str) else self.backend
        from functorch.compile import make_boxed_func  # imports dynamo, which takes a second

        return make_boxed_func(made(gm, list(example_inputs)))

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, **more: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's own cut into forward and backward, each put in order."""
        spread(joint.graph)
        self.forward, self.backward = partition(joint, inputs, **more)
        given = self.forward.graph.find_nodes(op="placeholder")
        primals = float(sum(bytes_of(node) for node in given))
        saved, staged = saved_by(self.forward.graph), self.world.backend == "gloo"
        step = StepMemory(primals, saved, staged)
        phases: tuple[tuple[fx.GraphModule, Phase], ...]
        phases = (self.forward, "forward"), (self.backward, "backward")
        self._there["backward"] = self.stored | sent_as_given(self.backward.graph)
        for module, phase in phases:
            self._finish(module, phase, step)
        return self.forward, self.backward

    def _finish(self, module: fx.GraphModule, phase: Phase, step: StepMemory) -> None:
        """The passes over one of the derived graphs."""
        _sweep(module.graph)
        graph, room = self._ordered(module.graph, phase, step)
        if self.backend is None:  # compilers take functional graphs
            reinplace.reinplace(graph)
            reinplace.check(graph)
        views.views(graph, operands=self.backend != "inductor")
        views.check(graph)
        if self.backend is None:
            reinplace.fill_buckets(graph, room)
        self._above = max(self._above, self._above_limit(graph, step))
        module.graph = graph  # recompiles

    def _ordered(self, graph: fx.Graph, phase: Phase, step: StepMemory) -> tuple[fx.Graph, float]:
        """The graph with as much freedom as the memory allows; the bytes that it leaves."""
        bound, in_pieces, there = self._bound(graph, step), graph, self._there[phase]
        if "chunk" in self.passes:
            in_pieces = chunk.chunk(graph, self.world, there, phase)
        tries = [(graph, *attempt) for attempt in _ATTEMPTS]
        if in_pieces is not graph:
            tries = [(in_pieces, *attempt) for attempt in _ATTEMPTS[:2]] + tries
        for base, most, freedom in tries:
            before = [(node, node.args) for node in base.nodes]
            found, run = self._attempt(base, phase, most, freedom)
            filled = self._filled_fits(found, bound, step)
            if filled or schedule.limit_memory(found, there, bound, step):
                if run is not None:
                    self.modelled[phase] = run
                return found, math.inf if filled else bound - live_bytes(found, step)
            reorder(base, [node for node, _ in before])
            for node, given in before:  # lanes
                node.args = given
        schedule.limit_memory(graph, there, bound, step)
        return graph, 0.0

    def _filled_fits(self, graph: fx.Graph, bound: float, step: StepMemory) -> bool:
        """Whether it holds no more than the bound once products write into their buckets."""
        if self.backend is not None:
            return False
        filled = copied(graph)
        reinplace.fill_buckets(filled)
        return live_bytes(filled, step) <= bound

    def _bound(self, graph: fx.Graph, step: StepMemory) -> float:
        """Bytes besides the optimizer's states: what the plan allows; where torch's own order holds
        more than was planned, that and what may be in flight; never more than the limit.
        """
        plan = self._plan
        if plan is None or plan.memory is None:
            return math.inf
        memory, limit = plan.memory, plan.device_limit or math.inf
        usual = live_bytes(graph, step) + memory.in_flight
        return min(max(memory.peak - memory.optimizer, usual), limit - memory.optimizer)

    def _above_limit(self, graph: fx.Graph, step: StepMemory) -> float:
        """Bytes that a graph, as lean as it could be made, needs above the limit."""
        plan = self._plan
        if plan is None or plan.memory is None or plan.device_limit is None:
            return 0.0
        needs = live_bytes(graph, step) + plan.memory.optimizer
        return max(0.0, needs - plan.device_limit)

    def _attempt(
        self, graph: fx.Graph, phase: Phase, most: float, freedom: schedule.Freedom
    ) -> tuple[fx.Graph, Run | None]:
        there = self._there[phase]
        if "bucket" in self.passes:
            graph = bucket.bucket(graph, self.world, there, phase, most)
        if "lanes" in self.passes:
            lanes.lanes(graph, self.world, there, phase)
        if "schedule" not in self.passes:
            return graph, None
        before = list(graph.nodes)
        run = schedule.schedule(graph, self.world, there, phase, freedom)
        schedule.check(graph, before)
        return graph, run


def _overlaps(value: torch.Tensor) -> bool:
    """Whether two elements may share memory, as those of an expanded tensor do."""
    reach = 0
    pairs = zip(value.stride(), value.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in pairs if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _sweep(graph: fx.Graph) -> None:
    """Remove what nothing uses. torch keeps what may draw random numbers, and so repeats a whole
    attention in the backward for nothing.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not writes(node):
            graph.erase_node(node)


def _boxed(gm: fx.GraphModule, within: Callable[[], Any]) -> Callable[..., Any]:
    """The graph as Python that takes a list and clears it, so that inputs can be freed early.
    `within`: below autograd, as what an op or a collective costs there is spent for nothing.
    """
    gm.graph.set_codegen(BoxedCodeGen())
    gm.recompile()

    def run(values: list[Any]) -> Any:
        with within():
            return forward(values)

    forward = gm.forward
    return takes_a_list(run)
