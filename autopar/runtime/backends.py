"""How an emitted graph runs: AOTAutograd derives forward and backward, the overlap passes schedule
them, and a backend runs them; without `overlap` or gradients the emitted graph runs as it is.

apply.py calls `runner`. With `overlap` a backend gets the scheduled forward and backward:

| `backend`     | how the two graphs run                                                          |
|---------------|---------------------------------------------------------------------------------|
| None          | run as they are, ops writing in place where they can                            |
| "aot_eager"   | run as they are, every op through torch's dispatch, none in place               |
| "inductor"    | compiled; collectives, waits and matmuls stay in order                          |
| another name, | each is given to it as `(gm, example_inputs)`, which AOTAutograd calls what     |
| a callable    | compiles a forward or a backward                                                |

A backend of torch.compile takes an fx.GraphModule and returns a callable that runs it with a tensor
for each placeholder. The two graphs are ATen ops and functional collectives on a rank's own tensors
and need no gradients. Without `overlap` or gradients, torch.compile gets the emitted graph.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar._compat import (
    BoxedCodeGen,
    below_autograd,
    compile_in_order,
    derive,
    explain_autograd_steps,
    inductor_decompositions,
    named_backend,
    next_autograd_step,
    partition,
    takes_a_list,
)
from autopar.cost.memory import no_room
from autopar.cost.simulator.engine import Run
from autopar.cost.simulator.graph_events import Phase, bytes_of, sent_unchanged
from autopar.cost.simulator.liveness import (
    SavedMemory,
    StepMemory,
    graph_peak_bytes,
    saved_by,
)
from autopar.errors import PlanError
from autopar.ir.graph import where
from autopar.ir.program import Program
from autopar.ops.process_groups import guard
from autopar.ops.recomputation import interpret, spread, tag
from autopar.ops.sharded.dropout import FORMULAS
from autopar.passes import OPTIONS, overlap_derived
from autopar.passes.overlap import DerivedGraph, collectives_in_order, erase_unused
from autopar.passes.overlap.accumulation import Tail
from autopar.passes.overlap.assumptions import (
    Gradients,
    Late,
    as_constants,
    aux_output_places,
    rerun_for,
)
from autopar.passes.pass_manager import PassManager
from autopar.runtime.deferred_backward import Accumulator, DeferredBackward, Rest
from autopar.runtime.reusing_forward import ReusingForward, StepWeights
from autopar.world import World, ranks

Backend = str | Callable[..., Any] | None
Overlap = bool | Sequence[str]


def runner(
    program: Program, world: World, backend: Backend, overlap: Overlap, splits: bool = False
) -> Callable[..., Any]:
    """Return what a ParallelModule calls with the values of the graph's placeholders. `overlap`:
    True for all OPTIONS, False for none, or some of them. `splits`: its backward is to run in two
    parts. Raises PlanError for an unknown option or backend.
    """
    options = (OPTIONS if overlap else ()) if isinstance(overlap, bool) else tuple(overlap)
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise PlanError(f"overlap names {unknown[0]!r}; the passes are {', '.join(OPTIONS)}")
    if isinstance(backend, str):
        named_backend(backend)
    assert program.plan is not None
    if not splits and (not program.plan.mesh.axes or overlap is False):
        return _plain(program.module, backend)
    return Scheduled(program, world, options, backend)


def _plain(module: fx.GraphModule, backend: Backend) -> Callable[..., Any]:
    return module if backend is None else torch.compile(module, backend=backend)


class Scheduled:
    """Runs a program by its scheduled forward and backward, which are derived at the first call
    with gradients. Without gradients, and where they would need more memory than the plan's limit,
    it runs the graph as it is; so it does within `torch.autograd.detect_anomaly`, op by op.

    `forward` and `backward`: the scheduled graphs, once they are derived; `modelled`: their
    simulated runs; `manager`: ran the passes, and knows the seconds of each.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        options: Sequence[str] = OPTIONS,
        backend: Backend = None,
    ) -> None:
        self.module, self.world, self.options = program.module, world, options
        self.manager = PassManager()
        self._plain, self.backend = _plain(program.module, backend), backend
        self._plan = program.plan
        self.stored = frozenset(
            f"primals_{place}"
            for place, entry in enumerate(program.signature.inputs, start=1)
            if entry.stored
        )
        self._parameters = frozenset(  # and what else no forward of a step changes
            f"primals_{place}"
            for place, entry in enumerate(program.signature.inputs, start=1)
            if entry.kind in ("parameter", "coordinate")
        )
        # By graph, the placeholders that exist before it runs: their gathers may run at any time.
        self._there: dict[Phase, frozenset[str]] = {"forward": self.stored}
        self._constant = aux_output_places(program)
        self._late: set[int] = set()  # the auxiliary outputs that would have a gradient
        inputs = enumerate(program.signature.inputs)
        self._user_places = [place for place, entry in inputs if entry.kind == "user"]
        self._strides: dict[int, tuple[int, ...]] = {}  # of the user's inputs at derivation
        self._run: Callable[..., Any] | None = None
        self.forward: fx.GraphModule | None = None
        self.backward: fx.GraphModule | None = None
        self.modelled: dict[str, Run] = {}
        # who sums gradients over several backwards, and whether those larger than what is stored
        self.accumulator: Accumulator | None = None
        self.defers_scattered = True
        self._deferred: DeferredBackward | None = None
        self.waited_for: frozenset[int] | None = None  # places of gradients: split by these
        self.rest: Rest | None = None  # of the backward that ran last, where backwards are split
        self.weights: StepWeights | None = None  # where the forwards of a step gather them once
        self._reusing: ReusingForward | None = None
        self._forward_inputs: list[Any] = []
        self._layouts = [
            program.layouts[entry.node] if entry.kind == "parameter" else None
            for entry in program.signature.inputs
        ]
        self._step = StepMemory(0.0, {})
        self._backward_inputs: list[Any] = []
        self._forms: list[fx.GraphModule] = []
        self._above = 0.0  # bytes that the graphs need above the limit

    def __call__(self, *values: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return self.module(*values)
        if not self._wants(values):
            return self._plain(*values)
        if torch.is_anomaly_enabled():
            return _op_by_op(self.module, values)
        ordered = self._as_derived(values)
        if self._run is None:
            self._run = ranks.together("deriving the backward", lambda: self.derived(ordered))
            if self.forward is None or self._above:  # no output carries a gradient
                self._run, self._late = self._plain, set()
                if self._above and not ranks.rank():
                    warnings.warn(no_room(self._above), stacklevel=2)
                return self._plain(*values)
            ranks.agree("collective order", self.order())
        if self.accumulator is not None or self.weights is not None:
            self._make_forms()
        outputs = list(self._run(*ordered))
        for place in self._late:
            outputs[place] = Late.apply(self._auxiliary_gradients, place, outputs[place], *ordered)
        return outputs

    def prepare(self, values: Sequence[torch.Tensor]) -> None:
        """Derive the graphs, and the forms of a step in micro-batches, from values like those of a
        step, on this rank alone: the stages of a pipeline have graphs of their own.
        """
        self._run = self.derived(self._as_derived(values))
        if self._above:
            warnings.warn(no_room(self._above), stacklevel=2)
        for make in self._missing_forms():
            make()

    def _as_derived(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the values, the user's inputs in the memory order of the first step: an output may
        be a view of an input, and AOTAutograd makes it anew by that order.
        """
        ordered = list(values)
        for place in self._user_places:
            value = ordered[place]
            if self._run is None:
                ordered[place] = value.contiguous() if _overlaps(value) else value
                self._strides[place] = ordered[place].stride()
            elif value.stride() != self._strides[place]:
                restrided = value.new_empty_strided(value.shape, self._strides[place])
                ordered[place] = restrided.copy_(value)
        return ordered

    def _auxiliary_gradients(
        self, place: int, gradient: torch.Tensor, values: Sequence[torch.Tensor]
    ) -> Gradients:
        """Return the gradients that come through an auxiliary output. The next call derives the
        graphs anew with gradients for these outputs, as a script that asks once asks again.
        """
        self._run, self._constant = None, frozenset()
        return rerun_for(self.module, place, gradient, values)

    def order(self) -> str:
        """Return a hash of the order of all collectives, forward and backward, and in the forms of
        both that there are.
        """
        assert self.forward is not None and self.backward is not None
        lines = [
            line
            for module in (self.forward, self.backward, *self._forms)
            for line in collectives_in_order(module.graph)
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @staticmethod
    def _wants(values: Sequence[torch.Tensor]) -> bool:
        """Whether this call records gradients, as the derived graphs do. Under autocast other ops
        would run than were derived.
        """
        return (
            torch.is_grad_enabled()
            and any(value.requires_grad for value in values)
            and not torch.is_autocast_enabled(values[0].device.type)
        )

    def derived(self, values: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Derive and schedule the graphs for such values, and return what runs them."""
        decompositions = None
        if self.backend == "inductor":
            decompositions = inductor_decompositions() | FORMULAS
        self.forward, self.backward, self._above = None, None, 0.0
        self._forms = []
        module = tag(self.module)  # values that the plan recomputes are not saved
        module, self._late = as_constants(module, self._constant)
        # inductor reuses the memory of what was saved, unless other forwards need it
        keeps = self.backend != "inductor" or (self._plan is not None and self._plan.gathers_once)
        keeps = keeps or self.waited_for is not None
        compiling = self._compiled, self._partition, decompositions
        run = derive(module, values, *compiling, keeps_saved=keeps)
        if self.forward is None and self._late:  # the scalar is no loss
            self._constant = frozenset()
            return self.derived(values)
        return run

    def _compiled(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        """Return what runs one of the two graphs. The backward may come as a copy. A backend of
        torch.compile is called with tensors, whatever calling convention it declares.
        """
        backward = gm is not self.forward
        run = self._unguarded(gm, example_inputs, backward)
        if self._deferred is None or self._reusing is None:  # a graph without gradients
            return guard(_without_views(run), "forward")
        if not backward:
            self._forward_inputs = list(example_inputs)
            forward = self._reusing
            forward.begin(_taking_a_list(guard(run, "forward")))
            return _without_views(takes_a_list(lambda values: forward.run(values, self.weights)))
        self._backward_inputs = list(example_inputs)
        forms = self._deferred
        forms.begin(_taking_a_list(guard(run, "backward")))
        return takes_a_list(lambda values: self._run_backward(forms, values))

    def _run_backward(self, forms: DeferredBackward, values: list[Any]) -> Any:
        if forms.halves is None:
            return forms.run(values, self.accumulator)
        gradients, self.rest = forms.run_first(values)
        return gradients

    def take_rest(self) -> Rest | None:
        """Return the second half of the backward that ran last; None where it ran whole, as within
        autocast and `detect_anomaly`.
        """
        rest, self.rest = self.rest, None
        return rest

    @property
    def ends(self) -> tuple[Tail, ...]:
        """The sums across ranks that the backward can hold."""
        return (
            () if self._deferred is None or not self._deferred.has_variants else self._deferred.ends
        )

    def _make_forms(self) -> None:
        """Make the forms that a step in micro-batches takes, once. Collective."""
        for make in self._missing_forms():
            ranks.together("deriving the graphs of micro-batches", make)

    def _missing_forms(self) -> list[Callable[[], None]]:
        """Return what makes the forms of the two graphs that are asked for and not there yet: of
        the backward those that hold gradients, of the forward those that gather weights once.
        """
        backward, forward = self._deferred, self._reusing
        makers: list[Callable[[], None]] = []
        if backward is not None and self.waited_for is not None:
            if backward.halves is None:
                form = partial(self._form, "backward")
                more = self.defers_scattered, self.waited_for
                makers.append(partial(backward.make_halves, form, *more))
        elif backward is not None and not backward.has_variants and backward.ends:
            form = partial(self._form, "backward")
            makers.append(partial(backward.make, form, self.defers_scattered))
        keeps = self.weights is not None and forward is not None and bool(forward.names)
        if keeps and forward is not None and not forward.has_variants:
            makers.append(partial(forward.make, partial(self._form, "forward")))
        return makers

    def _form(self, phase: Phase, graph: fx.Graph) -> Callable[..., Any]:
        """Return what runs another form of one of the graphs, scheduled and compiled as it is."""
        backward = phase == "backward"
        derived = self.backward if backward else self.forward
        known = self._backward_inputs if backward else self._forward_inputs
        assert derived is not None
        module = fx.GraphModule(derived, graph)
        operands = list(graph.find_nodes(op="placeholder"))
        step, inputs = self._step, [n.meta["val"] for n in operands]
        if any("carried" in n.meta for n in operands):  # the second half of a backward
            step = step._replace(saved=_carried_memory(operands, step.saved))
        else:
            inputs[: len(known)] = known
        module.graph = self._scheduled(module.graph, phase, step).graph
        self._forms.append(module)
        return _taking_a_list(guard(self._unguarded(module, inputs, backward), phase))

    def _unguarded(
        self, gm: fx.GraphModule, example_inputs: Any, backward: bool
    ) -> Callable[..., Any]:
        if self.backend is None or self.forward is None:
            return _make_boxed(gm, below_autograd)
        if self.backend == "aot_eager":
            return _make_boxed(gm, nullcontext)
        if self.backend == "inductor":
            return compile_in_order(gm, example_inputs, backward=backward)
        compiler = named_backend(self.backend) if isinstance(self.backend, str) else self.backend
        from functorch.compile import make_boxed_func  # imports dynamo, which takes a second

        return make_boxed_func(compiler(gm, list(example_inputs)))

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, **more: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return AOTAutograd's forward and backward, each scheduled."""
        spread(joint.graph)
        self.forward, self.backward = partition(joint, inputs, **more)
        placeholders = self.forward.graph.find_nodes(op="placeholder")
        primals = float(sum(bytes_of(node) for node in placeholders))
        saved, staged = saved_by(self.forward.graph), self.world.backend == "gloo"
        step = StepMemory(primals, saved, staged)
        phases: tuple[tuple[fx.GraphModule, Phase], ...]
        phases = (self.forward, "forward"), (self.backward, "backward")
        self._there["backward"] = self.stored | sent_unchanged(self.backward.graph)
        self._deferred, self._step = DeferredBackward(self.backward.graph, self._layouts), step
        self._reusing = ReusingForward(self.forward.graph, self._parameters)
        for module, phase in phases:
            derived = self._scheduled(module.graph, phase, step)
            if derived.run is not None:
                self.modelled[phase] = derived.run
            self._above = max(self._above, self._above_limit(derived))
            module.graph = derived.graph  # recompiles
        return self.forward, self.backward

    def _scheduled(self, graph: fx.Graph, phase: Phase, step: StepMemory) -> DerivedGraph:
        """Return one of the derived graphs as the passes of OVERLAP leave it."""
        erase_unused(graph)
        bound = self._bound(graph, step)
        compiler = self.backend if isinstance(self.backend, str) else "callable"
        compiler = "" if self.backend is None else compiler
        derived = DerivedGraph(graph, phase, self._there[phase], step, bound, compiler)
        return overlap_derived(derived, self.world, self.options, self.manager)

    def _bound(self, graph: fx.Graph, step: StepMemory) -> float:
        """Return the bytes that a graph may need besides the optimizer's states: what was planned;
        where torch's own order already needs more, that plus the bytes in flight; never more than
        the limit.
        """
        plan = self._plan
        if plan is None or plan.memory is None:
            return math.inf
        memory, limit = plan.memory, plan.device_limit or math.inf
        usual = graph_peak_bytes(graph, step) + memory.in_flight
        return min(max(memory.peak - memory.optimizer, usual), limit - memory.optimizer)

    def _above_limit(self, derived: DerivedGraph) -> float:
        """Return the bytes that a graph, at its leanest, needs above the limit."""
        plan = self._plan
        if plan is None or plan.memory is None or plan.device_limit is None:
            return 0.0
        needed_bytes = derived.peak_bytes + plan.memory.optimizer
        return max(0.0, needed_bytes - plan.device_limit)


def _carried_memory(
    operands: Sequence[fx.Node], saved: Mapping[str, SavedMemory]
) -> dict[str, SavedMemory]:
    """Return the storage of each operand of the second half of a backward. `saved`: of what the
    forward saved.
    """
    return {
        n.name: saved.get(n.meta["carried"], SavedMemory(n.name, float(bytes_of(n))))
        for n in operands
        if "carried" in n.meta
    }


def _op_by_op(module: fx.GraphModule, values: Sequence[torch.Tensor]) -> Any:
    """Run a graph such that torch, which looks for nan in what each function of the backward
    returns, says which op and line of the model it belongs to.
    """
    step = next_autograd_step()

    def explain(node: fx.Node, result: Any) -> Any:
        nonlocal step
        trace = (node.meta.get("stack_trace") or "").rstrip()
        explain_autograd_steps(result, step, f"{trace}\nwhich is {where(node)} of the graph\n")
        step = next_autograd_step()
        return result

    return interpret(module, list(values), explain)


def _overlaps(value: torch.Tensor) -> bool:
    """Whether two elements may share memory, as those of an expanded tensor do."""
    reach = 0
    pairs = zip(value.stride(), value.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in pairs if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _taking_a_list(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return the same function, called with all its values in one list."""
    return run if getattr(run, "_boxed_call", False) else lambda values: run(*values)


def _without_views(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same forward, of whose results autograd knows none as a view: a script may write
    over what it is handed.
    """

    def call(*values: Any) -> Any:
        results = run(*values)
        return [x.detach() if isinstance(x, torch.Tensor) and x._is_view() else x for x in results]

    return takes_a_list(call) if getattr(run, "_boxed_call", False) else call


def _make_boxed(gm: fx.GraphModule, within: Callable[[], Any]) -> Callable[..., Any]:
    """Return the graph as Python that takes a list and clears it, so that inputs can be freed
    early. `within` makes the context of a run: below autograd, whose cost for each op and
    collective would be spent for nothing.
    """
    gm.graph.set_codegen(BoxedCodeGen())
    gm.recompile()

    def run(values: list[Any]) -> Any:
        with within():
            return forward(values)

    forward = gm.forward
    return takes_a_list(run)
