"""The graphs of a parallel module: one for the planned call, and one for each other kind of call.

    par.eval()
    with torch.no_grad():
        par(last_batch)    # planned at the first such call, on the mesh of the training plan
    par.tau = 0.5
    par(batch)             # planned anew, as forward reads tau

A call is of another kind in another mode, with other shapes or arguments, under another autocast,
with a parameter trained that was frozen, or where the modules are not what they were when a graph
was traced (runtime/training/module_state.py). The mesh stays and so do the stored parameters, so
nothing is moved or copied; a batch that an axis does not divide is padded where its ops allow that
(planner/padding.py), another dim leaves that axis idle. Numbers that change from call to call
become inputs of the graph where forward computes with them alone (runtime/training/numbers.py). At
most MOST graphs are kept besides the first one, the oldest goes.

A call enters `CallGraphs.graph_for`, a StepGraph and what it takes of the call leave. All ranks
call it together: runtime/module.py.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.cost.memory import Budget, Recompute
from autopar.errors import InputError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planner.plan_context import PlanContext
from autopar.planner.request import PlanRequest
from autopar.planner.tracing import Call
from autopar.runtime.apply import plan_on_rank_0
from autopar.runtime.backends import Backend, Overlap
from autopar.runtime.training.inputs_watch import InputsWatch
from autopar.runtime.training.module_state import ModuleState
from autopar.runtime.training.module_tree import OriginalRoot, as_written
from autopar.runtime.training.numbers import Number, changed_numbers, traced_with_inputs
from autopar.runtime.training.runners import rank_runner
from autopar.runtime.training.step_graph import Bound, CallKind, Owner, StepGraph
from autopar.world import ranks
from autopar.world.world import say_once

MOST = 8  # graphs besides the first one

Example = Callable[[torch.Tensor], torch.Tensor]


class CallGraphs:
    """Plans and keeps the graphs of one parallel module. `plan`: the first one, whose mesh, stored
    layouts, world and limits stay. `root`: what the module was in the user's code.
    """

    def __init__(
        self,
        module: nn.Module,
        root: OriginalRoot,
        owner: Owner,
        first: StepGraph,
        watch: InputsWatch,
        options: tuple[Plan, Backend, Overlap],
    ) -> None:
        self._module, self._root, self._owner = module, root, owner
        self.first, self.watch, self._options = first, watch, options
        self._plan, self._backend, self._overlap = options
        self._states = {first: self._state_of(first)}
        self.others: list[StepGraph] = []
        self._inputs_of: dict[StepGraph, list[Number]] = {first: []}  # numbers that are inputs
        self._keyed: set[str] = set()  # numbers that are part of the graphs
        self._dropped = False

    def of(
        self, module: nn.Module, root: OriginalRoot, owner: Owner, watch: InputsWatch
    ) -> CallGraphs:
        """Return the graphs of a copy of the module: it shares them."""
        twin = CallGraphs(module, root, owner, self.first, watch, self._options)
        twin.others, twin._keyed, twin._dropped = [*self.others], {*self._keyed}, self._dropped
        twin._inputs_of = dict(self._inputs_of)
        twin._states = {graph: state.of(module) for graph, state in self._states.items()}
        return twin

    def graph_for(self, args: Any, kwargs: Any) -> tuple[StepGraph, Bound]:
        """Return the graph for a call, planned if it is the first of its kind, and what it takes of
        the call. Collective where it is. Raises what `plan` raises, and InputError where a
        submodule was replaced or hooked.
        """
        if tampered := self._states[self.first].tampered():
            raise InputError(
                f"{tampered} since the model was parallelized, and its graph would not know of it: "
                "do so on the original model before it is parallelized, or put a hook on the "
                "parallel model itself or on a parameter"
            )
        self._require_as_trained()
        training = self._module.training
        for graph in (self.first, *self.others):
            bound = graph.bind(args, kwargs, training, self._owner)
            if bound is not None and self._states[graph].holds():
                return graph, bound
        graph = self._new_graph(args, kwargs)
        bound = graph.bind(args, kwargs, training, self._owner)
        assert bound is not None
        return graph, bound

    def _require_as_trained(self) -> None:
        """Raise InputError where a parameter of a model in stages was frozen or unfrozen: other
        ranks, which do not hold it, would not know, and wait.
        """
        if not self._plan.stage_starts or not torch.is_grad_enabled():
            return
        for entry in self.first.parameters:
            if self._owner.tensor(entry.target).requires_grad != entry.trainable:
                raise InputError(
                    f"{entry.target} was {'frozen' if entry.trainable else 'unfrozen'} since the "
                    "model was parallelized in stages, and ranks of other stages do not know it: "
                    "do so before autopar.parallelize; to evaluate, call under torch.no_grad()"
                )

    @contextmanager
    def bare_model(self) -> Iterator[nn.Module]:
        """Make the module, within the context, the user's model on the meta device."""
        with as_written(self._module, self._root, lambda p: p.requires_grad) as model:
            yield model

    def incomparable(self) -> list[str]:
        """Return the attributes that forward reads and whose inner changes are not seen."""
        return self._states[self.first].incomparable()

    # -- planning ----------------------------------------------------------------------------------
    def _new_graph(self, args: Any, kwargs: Any) -> StepGraph:
        """Plan the graph of another kind of call. Collective."""
        differences = self._states[self.first].differences()
        device = self.first.device
        kind = CallKind.of(self._module.training, device, args, kwargs, differences)
        self.watch.agree(f"a call in {kind}")
        started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            numbers, traced = self._numbers(kind, args, kwargs)
            context = self._plan_call(kind, args, kwargs, traced)
        context = context.on_device(device)
        program, run, device_mesh = rank_runner(context, device, self._backend, self._overlap)
        if not ranks.rank():
            seconds = time.perf_counter() - started
            say_once(f"a call in {kind}: planned in {seconds:.1f} s on the same mesh")
        graph = StepGraph(
            program, run, device_mesh, self.first.coordinate, device, self.first.seed,
            context.program.tensors, kind.gradients, numbers_at(numbers),
        )  # fmt: skip
        self._states[graph], self._inputs_of[graph] = self._state_of(graph), numbers
        self.others.append(graph)
        self._drop_oldest(kind)
        return graph

    def _state_of(self, graph: StepGraph) -> ModuleState:
        """Return what the module is now, where the graph depends on it."""
        reads = graph.signature.reads
        constants = {e.target for e in graph.signature.inputs if e.kind == "constant"}
        fed = {path for path in reads if ".".join(filter(None, path)) in constants}
        return ModuleState(self._module, reads, fed)

    def _numbers(
        self, kind: CallKind, args: Any, kwargs: Any
    ) -> tuple[list[Number], Program | None]:
        """Return the numbers that tell this call from one that has a graph, and the trace that has
        them as inputs; none where forward does more than compute with them. Collective.
        """
        for graph in (self.first, *self.others):
            state, own = self._states[graph], Call(args, kwargs)
            changed, planned = changed_numbers(graph, state, own, self._module)
            names = {number.name for number in changed} - self._keyed
            if not names:
                continue
            numbers = [*self._inputs_of[graph], *(n for n in changed if n.name in names)]
            call = self._example_call(kind, *planned)
            with self._as_written(kind) as model, _without_warnings():
                traced = ranks.together(
                    "tracing numbers", partial(traced_with_inputs, model, call, numbers)
                )
            if traced is not None:
                return numbers, traced
            self._keyed |= names
            if not ranks.rank():
                say_once(
                    f"{', '.join(sorted(names))} changes between calls, and forward does more with "
                    "it than arithmetic: each of its values has a graph of its own, which is "
                    "planned at its first call"
                )
        return [], None

    @contextmanager
    def _as_written(self, kind: CallKind) -> Iterator[nn.Module]:
        with as_written(
            self._module, self._root, lambda p: p.requires_grad and kind.gradients
        ) as model:
            yield model

    def _plan_call(
        self, kind: CallKind, args: Any, kwargs: Any, traced: Program | None
    ) -> PlanContext:
        limit = self._plan.device_limit
        limit = None if limit is None else limit * self._plan.pipeline.ranks  # of all stages
        budget = Budget(limit, self._plan.optimizer, self._recompute(kind))
        request = PlanRequest.like(self._plan, "auto", budget)
        call = self._example_call(kind, args, kwargs)
        with self._as_written(kind) as model, _without_warnings():
            plan = plan_on_rank_0(model, self._plan.world, call, request, self._stored(), traced)
        assert isinstance(plan.context, PlanContext)
        return plan.context

    def _recompute(self, kind: CallKind) -> Recompute:
        """Return what is recomputed in the backward: as little as fits a limit; without one what
        the training plan recomputes.
        """
        if not kind.gradients:
            return "none"
        if self._plan.device_limit is not None:
            return "auto"
        plan = self._plan
        lighter: Recompute = "gathers" if plan.regather else "selective" if plan.rerun else "none"
        return "full" if plan.recompute else lighter

    def _example_call(self, kind: CallKind, args: Any, kwargs: Any) -> Call:
        """Return the call with tensors to trace with: of their global shapes, without numbers, with
        the gradients that are recorded.
        """

        def example(x: torch.Tensor) -> torch.Tensor:
            if isinstance(x, DTensor):
                x = torch.empty(
                    x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad
                )
            return x if kind.gradients or not x.requires_grad else x.detach()

        return Call(*pytree.tree_map_only(torch.Tensor, example, (args, kwargs)))

    def _stored(self) -> Plan:
        """Return the training plan with the stored layouts by the names of parameters."""
        context = self._plan.context
        assert context is not None
        layouts = context.program.layouts  # of all parameters, those of other stages too
        parameters = (e for e in context.program.signature.inputs if e.kind == "parameter")
        return dataclasses.replace(
            self._plan, stored={entry.target: layouts[entry.node] for entry in parameters}
        )

    def _drop_oldest(self, kind: CallKind) -> None:
        if len(self.others) <= MOST:
            return
        oldest = self.others.pop(0)
        del self._states[oldest], self._inputs_of[oldest]
        if not self._dropped and not ranks.rank():
            warnings.warn(
                f"calls of more than {MOST} kinds besides the planned one, the last in {kind}: the "
                "oldest graph is dropped, and planned anew when it is needed. Pad or bucket the "
                "inputs to fewer shapes; a number that changes is best passed as a tensor",
                stacklevel=2,
            )
        self._dropped = True


@contextmanager
def _without_warnings() -> Iterator[None]:
    """What is said of a model was said at its plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def numbers_at(numbers: list[Number]) -> Mapping[int, type]:
    """Return the type of each number that is an argument, by its position."""
    return {n.position: n.kind for n in numbers if n.position is not None}
