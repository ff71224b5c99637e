"""One row of the table of real sizes: a model on the meta device, planned for some H100 under each
layout, every plan in a process of its own.

A process is forked by a server that has loaded what all need and has one thread: a fork of a
process with threads may wait for a lock for ever that another thread had.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

import torch

import autopar
from autopar.ir.strategy import IDLE
from autopar.planner.tracing import trace_model
from benchmarks.zoo import real_models
from benchmarks.zoo.rows import Row, reason
from benchmarks.zoo.sizes import Example, Factory

RANKS, CPU_SECONDS = 8, 600
ALONE, LAYOUTS = "one rank", ("fsdp", "megatron", "auto")
NOT_DONE = "not done after {} CPU seconds"
ENOUGH = 1e14  # bytes: how much one rank would hold is asked, not whether it can


def apart(function: Callable[[], Row], cpu_seconds: int) -> Row:
    """Return what a function returns in a process of its own with a limit of CPU seconds, or the
    reason why it did not. The function is pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "autopar", "benchmarks.zoo.real_models"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(function, sender, cpu_seconds))
    process.start()
    sender.close()
    try:
        row: Row = receiver.recv()
        return row
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            return {"reason": NOT_DONE.format(cpu_seconds)}
        return {"reason": f"the process ended with exit code {process.exitcode}"}
    finally:
        process.join()


def _send(function: Callable[[], Row], sender: Connection, cpu_seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    try:
        sender.send(function())
    except Exception as error:
        sender.send(reason(error))


def still_known(row: Row, cpu_seconds: int) -> Row:
    """Return what stays of a row when a plan may take this long: all but a reason of the whole row
    and the cells that took longer than a shorter limit.
    """
    cut = re.compile(NOT_DONE.format("([0-9]+)"))

    def stays(cell: object) -> bool:
        done = cut.fullmatch(cell.get("reason", "")) if isinstance(cell, dict) else None
        return done is None or int(done[1]) >= cpu_seconds

    return {name: cell for name, cell in row.items() if name != "reason" and stays(cell)}


def measure(
    factory: Factory, known: Row, layouts: Sequence[str], ranks: int, cpu_seconds: int
) -> Row:
    """Return the row of a model: its trace, and its plan on one rank and for `ranks` under each of
    these layouts, as far as the row does not have them yet.
    """
    real_models.for_ranks(ranks)
    row: Row = dict(known)
    if "trace_s" not in known:
        started = time.process_time()
        model, inputs = on_meta(factory)
        trace_model(model, inputs)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        row["trace_s"] = round(time.process_time() - started, 1)
    for layout in layouts:
        if layout not in known:
            row[layout] = apart(partial(planned, factory, layout, ranks), cpu_seconds)
    return row


def on_meta(factory: Factory) -> Example:
    """Return a model without numbers, and its inputs."""
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        return factory()


def planned(factory: Factory, layout: str, ranks: int) -> Row:
    """Return the figures of a plan for so many ranks in this layout, or for one rank."""
    real_models.for_ranks(ranks)
    model, inputs = on_meta(factory)
    started = time.process_time()
    if layout == ALONE:
        world = autopar.World.preset("dgx-h100", ranks=1)
        plan = autopar.plan(model, world, inputs, "ddp", memory=ENOUGH, recompute="none")
    else:
        world = autopar.World.preset("dgx-h100", ranks=ranks)
        plan = autopar.plan(model, world, inputs, layout)
    assert plan.context is not None and plan.context.source.annotations is not None
    return {
        "mesh": str(plan.mesh) or ALONE,
        "seconds": float(f"{plan.step_seconds:.4g}"),
        "peak_bytes": round(plan.peak_bytes),
        "whole": float(f"{whole_share(plan):.3g}"),
        "unsplit": list(plan.unsplit[:5]),
        "no_rule": list(plan.context.source.annotations.unknown),
        "cheapest": any("run whole on all ranks" in note for note in plan.notes),
        "plan_s": round(time.process_time() - started, 1),
    }


def whole_share(plan: autopar.Plan, target: object = None) -> float:
    """Return the fraction of the model's FLOPs in nodes that several ranks run whole: an axis of
    the mesh splits nothing there. With a `target`, of the FLOPs of these ops alone.
    """
    assert plan.context is not None and plan.context.source.annotations is not None
    specs = plan.context.source.annotations.specs
    nodes = plan.context.source.module.graph.nodes
    counted = {node.name for node in nodes if target is None or node.target is target}
    flops = {name: specs[name].flops for name in plan.choices if name in specs and name in counted}
    whole = sum(flops[n] for n in flops if any(s in IDLE for s in plan.choices[n].splits))
    return whole / max(sum(flops.values()), 1.0)
