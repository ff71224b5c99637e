"""Graph rewrites, in the order in which they run, in two lists. Each has a name, a function and a
contract, which the pass manager checks after every run. No pass imports another.

    trace/ → draws → masks → annotate → chains → (the planner chooses a plan, of a program that went
    through pad where no axis divides a dim) → PIPELINE → recompute
    → (AOTAutograd derives a forward and a backward) → OVERLAP on each of the two

    PIPELINE    run(program, world) -> Program         check(program)
    OVERLAP     run(derived, world) -> DerivedGraph    check(before, derived)

The passes over programs leave the program that they were given as it is. Those over derived graphs
may write into the graph that they were given; `before` are its facts from before (`GraphFacts`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from autopar.ir.graph import copy_graph, reorder
from autopar.ir.program import Program
from autopar.passes import finalize, hierarchy, kernel_choice, rewrite, summa
from autopar.passes.overlap import (
    DerivedGraph,
    Freedom,
    assumptions,
    bucket,
    chunk,
    reinplace,
    schedule,
    summa_fusion,
)
from autopar.passes.pass_manager import OverlapPass, Pass, PassManager
from autopar.world import World

# What makes one rank's graph of a program with a plan, in this order.
PIPELINE = (
    Pass("rewrite", rewrite.rewrite, rewrite.check),
    Pass("hierarchy", hierarchy.hierarchy, hierarchy.check),
    Pass("summa", summa.summa, summa.check),
    Pass("kernel_choice", kernel_choice.kernel_choice, kernel_choice.check),
    Pass("finalize", finalize.finalize, finalize.check),
)

# What makes a derived graph the one that runs, in this order.
OVERLAP = (
    OverlapPass("chunk", chunk.chunk, chunk.check, "chunk"),
    OverlapPass("summa_fusion", summa_fusion.summa_fusion, summa_fusion.check, "bucket"),
    OverlapPass("bucket", bucket.bucket, bucket.check, "bucket"),
    OverlapPass("schedule", schedule.schedule, schedule.check, "schedule"),
    OverlapPass("limit_memory", schedule.limit_memory, schedule.check),
    OverlapPass("reinplace", reinplace.reinplace, reinplace.check),
    OverlapPass("views", assumptions.views, assumptions.check),
    OverlapPass("fill_buckets", reinplace.fill_buckets, reinplace.check_filled),
)
OPTIONS = tuple(dict.fromkeys(step.option for step in OVERLAP if step.option))  # of `overlap=`

# How freely a derived graph is scheduled: the first that fits its memory is taken.
_PUNCTUAL = Freedom(patience=())
FREEDOMS = (
    Freedom(),
    _PUNCTUAL,
    _PUNCTUAL._replace(bucket_bytes=1 << 20),
    _PUNCTUAL._replace(bucket_bytes=1 << 16),
    _PUNCTUAL._replace(bucket_bytes=0),
    Freedom(ahead=1, window=8, patience=(), bucket_bytes=0),  # hardly higher than its own order
)


def emit_program(program: Program, world: World) -> Program:
    """Return the graph that one rank runs by the program's plan, without recomputation.

    The planner's searches call this to compare plans; planner/confirm.py runs the same passes with
    their contracts and adds `recompute`.
    """
    for step in PIPELINE:
        program = step.run(program, world)
    return program


def overlap_derived(
    derived: DerivedGraph, world: World, options: Sequence[str], manager: PassManager
) -> DerivedGraph:
    """Return the derived graph after the passes of OVERLAP without an option and with one of these.
    What orders it is tried with less and less freedom until the graph fits its memory.
    """

    def run(passed: DerivedGraph, *names: str) -> DerivedGraph:
        steps = [p for p in OVERLAP if p.name in names and p.option in ("", *options)]
        return manager.run_overlap(steps, passed, world)

    chunked = run(derived, "chunk")
    for attempt in _attempts(derived, chunked):
        order = list(attempt.graph.nodes)
        ordered = run(attempt, "summa_fusion", "bucket", "schedule")
        filled = ordered if ordered.compiler else run(_copy(ordered), "fill_buckets")
        limited = ordered if filled.peak_bytes <= filled.bound else run(ordered, "limit_memory")
        if limited.room >= 0:
            break
        reorder(attempt.graph, order)  # as no bucket was made, that graph was scheduled itself
    else:
        limited = dataclasses.replace(run(derived, "limit_memory"), room=0.0)
    return run(limited, "reinplace", "views", "fill_buckets")


def _attempts(derived: DerivedGraph, chunked: DerivedGraph) -> Iterator[DerivedGraph]:
    """Yield the graphs to order, with less and less freedom: in chunks only where there is some."""
    if chunked.graph is not derived.graph:
        for freedom in FREEDOMS[:2]:
            yield dataclasses.replace(chunked, freedom=freedom)
    for freedom in FREEDOMS:
        yield dataclasses.replace(derived, freedom=freedom)


def _copy(derived: DerivedGraph) -> DerivedGraph:
    return dataclasses.replace(derived, graph=copy_graph(derived.graph))
