"""What a step in micro-batches takes and holds, of the figures of one.

Example: of a micro-batch that takes 10 ms, 2 of them to sum gradients and 1 to step the optimizer,
eight micro-batches take 8 · 10 - 7 · 3 = 59 ms: sums and the optimizer come once. Sums of weights'
gradients can be deferred (passes/overlap/accumulation.py), those that are scattered among them
where there is room for the unsummed ones (`Plan.sums_once`). Weights are gathered once where there
is room for all of them between the micro-batches (`Plan.gathers_once`,
passes/overlap/weight_reuse.py).

An emitted program of one micro-batch enters, with its annotations. summary.py, peak.py, formula.py
and the simulator ask.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from autopar.cost.communication import SentCollective, sent_collectives
from autopar.cost.compute import optimizer_seconds
from autopar.ir.graph import ancestors, values_of_alone, with_more_results
from autopar.ir.layout import SUMS
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program, Value
from autopar.world import World


class UnreducedGradient(NamedTuple):
    """What a rank holds of one weight's gradient between the micro-batches: `own_bytes` unsummed,
    or `stored_bytes` summed. `scattered`: summing divides it among ranks.
    """

    own_bytes: float
    stored_bytes: float
    scattered: bool


def unreduced_gradients(program: Program) -> dict[Value, UnreducedGradient]:
    """Return the gradients of weights that ranks sum, by the value whose gradient it is."""
    notes = program.annotations
    assert notes is not None
    sums: dict[Value, list[SentCollective]] = defaultdict(list)
    for collective in sent_collectives(program):
        value = collective.node.meta.get("value")
        if _is_sum(collective) and value in notes.weights:
            sums[value].append(collective)
    return {value: _gradient_of(own, program.counting.sums) for value, own in sums.items()}


def _is_sum(collective: SentCollective) -> bool:
    """Whether a collective sums a gradient in a reshard's backward."""
    summing = collective.backward and not collective.again and not collective.inside
    return summing and collective.traffic.collective in SUMS and "step" in collective.node.meta


def _gradient_of(collectives: list[SentCollective], counted: float) -> UnreducedGradient:
    width = max(collective.element_bytes for collective in collectives) / counted
    stored = min(collective.node.meta["step"].before.local_size for collective in collectives)
    own = max(collective.layout.local_size for collective in collectives)
    scattered = any(c.traffic.collective == "reduce_scatter" for c in collectives)
    return UnreducedGradient(float(own * width), float(stored * width), scattered)


class OncePerStep(NamedTuple):
    """The collectives of an emitted program that do not run in every micro-batch: those that sum
    the gradients of the values `sums`, and the forward ones of the nodes `gathers`.
    """

    sums: frozenset[Value] = frozenset()
    gathers: frozenset[fx.Node] = frozenset()

    @staticmethod
    def of(program: Program) -> OncePerStep:
        """Return those that a plan defers or keeps; none where a step is one micro-batch."""
        plan = program.plan
        assert plan is not None
        if plan.microbatches == 1:
            return OncePerStep()
        gradients = unreduced_gradients(program).items()
        sums = frozenset(v for v, deferred in gradients if plan.sums_once or not deferred.scattered)
        if not plan.gathers_once:
            return OncePerStep(sums)
        behind = ancestors(gathered_weights(program))
        return OncePerStep(sums, frozenset(node for node in behind if _gathers(node)))

    def has(self, collective: SentCollective) -> bool:
        """Whether a collective is one of these."""
        if collective.backward:
            return _is_sum(collective) and collective.node.meta.get("value") in self.sums
        return not collective.inside and collective.node in self.gathers


def times(program: Program) -> list[int]:
    """Return how often each of the program's collectives runs in a step, in their order."""
    assert program.plan is not None
    once, count = OncePerStep.of(program), program.plan.microbatches
    return [1 if once.has(c) else count for c in sent_collectives(program)]


def gathered_weights(program: Program) -> list[fx.Node]:
    """Return the nodes of an emitted program that are its gathered weights: computed of parameters
    alone, where ranks send something for them.
    """
    kinds = ("parameter", "coordinate")
    names = {entry.node for entry in program.signature.inputs if entry.kind in kinds}
    return values_of_alone(program.module.graph, names, _gathers)


def gathered_bytes(program: Program) -> float:
    """Return the bytes that a rank holds of gathered weights, where a plan gathers them once."""
    assert program.plan is not None
    if not program.plan.gathers_once:
        return 0.0
    metas = (node.meta for node in gathered_weights(program) if "layout" in node.meta)
    return float(sum(meta["layout"].local_size * meta["dtype"].itemsize for meta in metas))


def _gathers(node: fx.Node) -> bool:
    """Whether a node of an emitted program is a reshard that sends something in the forward."""
    return "step" in node.meta and node.meta["step"].traffic(False)[0] is not None


def with_gathered_weights(program: Program) -> Program:
    """Return an emitted program whose graph returns the gathered weights, too: so they are there
    until the step is done.
    """
    names = [node.name for node in gathered_weights(program)]
    graph = with_more_results(program.module.graph, names)
    return dataclasses.replace(program, module=fx.GraphModule(program.module, graph))


def optimizer_step(program: Program, world: World) -> float:
    """Return the seconds of the optimizer's step."""
    return sum(
        optimizer_seconds(program.layouts[e.node], program.dtypes[e.node].itemsize, world)
        for e in program.signature.inputs
        if e.kind == "parameter" and e.trainable
    )


def unreduced_bytes(program: Program) -> float:
    """Return the bytes that a rank holds of gradients between the micro-batches of a step: of all
    weights, and of those whose sum is deferred what is not summed yet.
    """
    if microbatch_count(program) == 1:
        return 0.0
    assert program.plan is not None
    once = program.plan.microbatches > 1 and program.plan.sums_once
    stored = sum(
        program.layouts[e.node].local_size * program.dtypes[e.node].itemsize
        for e in program.signature.inputs
        if e.kind == "parameter" and e.trainable
    )
    return stored + sum(
        deferred.own_bytes - deferred.stored_bytes
        for deferred in unreduced_gradients(program).values()
        if once or not deferred.scattered
    )


def microbatch_count(program: Program) -> int:
    """Return the micro-batches of a step; a search knows them before its plan does."""
    assert program.plan is not None
    return max(program.plan.microbatches, program.counting.microbatches)


def memory_of_microbatches(
    program: Program, memory: Memory, unreduced: float, weights: float = 0.0
) -> Memory:
    """Return the memory of a step, before the optimizer's, of that of one micro-batch: between two
    a rank holds gradients, and of results that have rows those of all micro-batches. `unreduced`:
    bytes of these gradients. `weights`: bytes of gathered weights, which are there from micro-batch
    to micro-batch.
    """
    memory = with_results(program, memory)
    return with_gradients(program, memory, unreduced, unreduced, weights) if unreduced else memory


def with_results(program: Program, memory: Memory) -> Memory:
    """Return the memory of a micro-batch with the results of the others besides."""
    results = results_between(program)
    return replace(memory, transient=memory.transient + results, peak=memory.peak + results)


def with_gradients(
    program: Program, memory: Memory, more: float, total: float, weights: float = 0.0
) -> Memory:
    """Return the memory of a micro-batch with so many bytes `more` of gradients besides, `total` in
    all. A backward ends with as many of its own, which are then added to them, and with no
    activations but `weights` that are gathered once.
    """
    results = results_between(program)
    at_end = memory.parameters + memory.optimizer + results + 2 * total + weights
    if at_end > memory.peak + more:
        memory = replace(memory, activations=weights, transient=results, in_flight=0.0)
        return replace(memory, gradients=2 * total, peak=at_end)
    return replace(memory, gradients=memory.gradients + more, peak=memory.peak + more)


def results_between(program: Program) -> float:
    """Return the bytes of the other micro-batches' results, held until the step is done."""
    others = microbatch_count(program) - 1
    return others * _results_bytes(program) if others else 0.0


def _results_bytes(program: Program) -> float:
    """Return the bytes of a micro-batch's results but for scalars: a step returns those of all."""
    nodes = program.module.graph.output_node().all_input_nodes
    widths = {n.name: n.meta["dtype"].itemsize for n in nodes if "dtype" in n.meta}
    total = 0.0
    for output in program.signature.outputs:
        layout = program.layouts.get(output.node or "")
        if output.kind == "user" and layout is not None and layout.shape:
            total += layout.local_size * widths.get(str(output.node), 4)
    return total
