"""Products in pieces: what `passes/overlap/chunk.py` gains on an emulated cluster, by itself.

    python -m benchmarks.step_time.chunks                         # 2 nodes of one rank, 1 Gbit/s
    python -m benchmarks.step_time.chunks --ranks-per-node 2 --rate 400mbit

A case is a row of products, each with a collective that the next one waits for, and nothing else to
hide under: a sum over the ranks (all-reduce), the same in parts (gloo: all-to-all and a local sum),
or a gather of what the product takes. Widths are chosen so that the collective takes about 0.3, 1
and 3 times as long as the product. The graph is scheduled as it is and with the pass before it;
both run in turns, and the ratio is the middle one of paired runs. The world is written by hand from
the rate, with products and contention measured at the start.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import fx

from autopar import World, _compat
from autopar.cost.calibration.contention import measure_contention
from autopar.cost.simulator.graph_events import (
    collective_cost,
    collective_of,
    graph_seconds,
    op_seconds,
)
from autopar.ir.graph import add_call, copy_graph
from autopar.ir.mesh import Mesh, group_name
from autopar.ops.process_groups import connect
from autopar.passes.overlap import DerivedGraph, chunk, reinplace, schedule
from benchmarks.cluster import Shape, launch, network, stop_on_signals
from benchmarks.cluster.shape import read_rate
from benchmarks.step_time import cells, worlds

aten, functional = torch.ops.aten, torch.ops._c10d_functional
WANTED = 1.1
RATIOS = (0.3, 1.0, 3.0)
KINDS = ("all-reduce", "reduce-scatter", "gather")
_SECONDS = 0.15  # of the longer one, product or collective, in a case
_PRODUCTS = 2
_CONTENTION_S = 3.0  # for which World.contention is measured


class Case(NamedTuple):
    """A row of products of (rows, width / ranks) by (width / ranks, width), or for a gather of all
    rows by (width, width / ranks).
    """

    kind: str
    rows: int
    width: int


# -- graphs ----------------------------------------------------------------------------------------
def row_of_products(case: Case, ranks: int, group: str, count: int = _PRODUCTS) -> fx.Graph:
    """The graph of a case, as AOTAutograd would derive it: placeholders x and weights."""
    graph, (rows, width) = fx.Graph(), case[1:]
    part = width // ranks
    weight = (width, part) if case.kind == "gather" else (part, width)
    with _compat.fake_mode():
        shapes = [(rows, part), *([weight] * count)]
        values = [torch.empty(shape) for shape in shapes]
    x, *weights = (graph.placeholder(f"x{i}") for i in range(len(values)))
    for node, value in zip((x, *weights), values, strict=True):
        node.meta["val"] = value
    add = functools.partial(add_call, graph)
    for w in weights:
        x = _LINKS[case.kind](add, x, w, ranks, group)
    graph.output((x,))
    return graph


def _summed(add: Any, x: fx.Node, w: fx.Node, ranks: int, group: str) -> fx.Node:
    product = add(aten.mm.default, (x, w))
    done = _wait(add, add(functional.all_reduce.default, (product, "sum", group)))
    width = done.meta["val"].shape[1]
    return add(aten.slice.Tensor, (done, 1, 0, width // ranks))


def _scattered(add: Any, x: fx.Node, w: fx.Node, ranks: int, group: str) -> fx.Node:
    product = add(aten.mm.default, (x, w))
    rows, width = product.meta["val"].shape
    apart = add(aten.view.default, (product, [rows, ranks, width // ranks]))
    first = add(aten.permute.default, (apart, [1, 0, 2]))
    whole = add(aten.clone.default, (first,), {"memory_format": torch.contiguous_format})
    each = [1] * ranks
    sent = add(functional.all_to_all_single.default, (whole, each, each, group))
    return add(aten.sum.dim_IntList, (_wait(add, sent), [0]))


def _gathered(add: Any, x: fx.Node, w: fx.Node, ranks: int, group: str) -> fx.Node:
    rows, part = x.meta["val"].shape
    sent = add(aten.unsqueeze.default, (x, 0))
    done = _wait(add, add(functional.all_gather_into_tensor.default, (sent, ranks, group)))
    apart = add(aten.view.default, (done, [ranks, rows, part]))
    side_by_side = add(aten.permute.default, (apart, [1, 0, 2]))
    whole = add(aten.clone.default, (side_by_side,), {"memory_format": torch.contiguous_format})
    left = add(aten.view.default, (whole, [rows, ranks * part]))
    return add(aten.mm.default, (left, w))


def _wait(add: Any, sent: fx.Node) -> fx.Node:
    waited: fx.Node = add(functional.wait_tensor.default, (sent,))
    return waited


_LINKS: dict[str, Callable[..., fx.Node]] = {
    "all-reduce": _summed,
    "reduce-scatter": _scattered,
    "gather": _gathered,
}


def sized(kind: str, ratio: float, world: World, group: str) -> Case:
    """The case whose collective takes `ratio` times its product, by the world's figures."""

    def seconds(case: Case) -> tuple[float, float]:
        graph = row_of_products(case, world.ranks, group, 1)
        sent = next(node for node in graph.nodes if collective_of(node) is not None)
        product = next(node for node in graph.nodes if node.target is aten.mm.default)
        return op_seconds(product, world), collective_cost(sent, world)[1]

    def off(case: Case) -> float:
        product, sent = seconds(case)
        return abs(sent / product / ratio - 1)

    width, rows = 1024, 1024
    for _ in range(8):  # the rows move with the width: neither is right at once
        each = 32 * world.ranks
        widths = range(4 * each, 8193, each)
        width = min(widths, key=lambda w: off(Case(kind, rows, w)))
        longer = max(seconds(Case(kind, rows, width)))
        rows = max(64, round(rows * _SECONDS / longer / 64) * 64)
    return Case(kind, rows, width)


def prepared(graph: fx.Graph, world: World) -> Callable[..., Any]:
    """Scheduled, what can be in place, ready to be called."""
    derived = schedule.schedule(DerivedGraph(copy_graph(graph), "forward"), world)
    derived = reinplace.reinplace(derived, world)
    return fx.GraphModule(torch.nn.Module(), derived.graph).forward


# -- on a rank -------------------------------------------------------------------------------------
def timed(run: Callable[..., Any], operands: list[torch.Tensor]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    run(*operands)
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def apart(case: Case, ranks: int, group: str) -> tuple[float, float]:
    """Seconds of one product, and of its collective, each by itself."""
    graph = row_of_products(case, ranks, group, 1)
    w = torch.randn(graph.find_nodes(op="placeholder")[1].meta["val"].shape)
    sent = next(node for node in graph.nodes if collective_of(node) is not None)
    left = torch.randn(case.rows, w.shape[0])
    value = torch.randn(sent.all_input_nodes[0].meta["val"].shape)

    def communicate() -> None:
        assert callable(sent.target)
        functional.wait_tensor.default(sent.target(value, *sent.args[1:]))

    pairs = [(timed(lambda: left @ w, []), timed(communicate, [])) for _ in range(4)]
    product, collective = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
    return product, collective


def with_products(world: World, group: str) -> World:
    """The world with products as fast as those of the cases are, on all ranks at once."""
    rates = []
    for ratio in RATIOS:
        case = sized("all-reduce", ratio, world, group)
        product, _ = apart(case, world.ranks, group)
        rates.append(2.0 * case.rows * case.width**2 / world.ranks / product)
    device = dataclasses.replace(world.device, flop_per_s={"float32": statistics.median(rates)})
    return dataclasses.replace(world, device=device)


def raced(case: Case, world: World, group: str, pairs: int) -> dict[str, Any]:
    """Whole and in pieces in turns; who begins changes."""
    graph = row_of_products(case, world.ranks, group)
    cut = chunk.chunk(DerivedGraph(graph, "forward"), world).graph
    counts = [sum(collective_of(node) is not None for node in g.nodes) for g in (graph, cut)]
    torch.manual_seed(dist.get_rank())
    operands = [
        torch.randn(n.meta["val"].shape) / n.meta["val"].shape[0] ** 0.5
        for n in graph.find_nodes(op="placeholder")
    ]
    runs = [prepared(g, world) for g in (graph, cut)]
    (expected,), (other,) = runs[0](*operands), runs[1](*operands)
    error = float((expected - other).norm() / expected.norm())
    seconds: list[list[float]] = [[], []]
    for number in range(pairs):
        for which in (0, 1) if number % 2 else (1, 0):
            seconds[which].append(timed(runs[which], operands))
    modelled = [graph_seconds(g, world, frozenset(), "forward") for g in (graph, cut)]
    product, collective = apart(case, world.ranks, group)
    return {
        **case._asdict(), "pieces": counts[1] / counts[0], "seconds": seconds, "error": error,
        "product": product, "collective": collective, "modelled": modelled[0] / modelled[1],
    }  # fmt: skip


def on_rank(job: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = worlds.by_hand(job["nodes"], job["per_node"], job["rate"])
    pattern = ((world.ranks, 1),)
    lost = measure_contention([pattern], torch.device("cpu"), _CONTENTION_S, lambda _: None)
    world = dataclasses.replace(world, contention=lost)
    mesh = Mesh.parse(f"x{world.ranks}")
    connect(mesh, "cpu")
    group = group_name(str(mesh), ("x",))
    world = with_products(world, group)
    cases = [sized(kind, ratio, world, group) for kind in job["kinds"] for ratio in RATIOS]
    with torch.no_grad():
        results = [raced(case, world, group, job["pairs"]) for case in cases]
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps({"contention": lost, "cases": results}))
    dist.barrier()
    dist.destroy_process_group()


# -- outside ---------------------------------------------------------------------------------------
def gains(result: dict[str, Any]) -> list[float]:
    whole, cut = result["seconds"]
    return [a / b for a, b in zip(whole, cut, strict=True)]


def table(results: list[dict[str, Any]], shape: Shape, pairs: int) -> Table:
    title = f"{_PRODUCTS} products on {shape}, medians of {pairs} pairs"
    shown = Table("collective", "rows × width", title=title, title_justify="left")
    headings = "product ms", "collective ms", "ratio", "pieces", "whole ms", "gain", "quartiles"
    for heading in (*headings, "modelled", ""):
        shown.add_column(heading, justify="right")
    for result in results:
        low, middle, high = statistics.quantiles(gains(result), n=4)
        shown.add_row(
            result["kind"], f"{result['rows']} × {result['width']}",
            f"{1e3 * result['product']:.0f}",
            f"{1e3 * result['collective']:.0f}", f"{result['collective'] / result['product']:.2f}",
            f"{result['pieces']:g}", f"{1e3 * statistics.median(result['seconds'][0]):.0f}",
            f"{middle:.2f}", f"{low:.2f}–{high:.2f}", f"{result['modelled']:.2f}",
            "met" if middle >= WANTED else "missed",
        )  # fmt: skip
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--rate", type=read_rate, default="1gbit", help="of each node's link")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    stop_on_signals()
    shape = Shape(options.nodes, options.ranks_per_node, options.rate)
    loopback = shape.rate is None
    with (
        tempfile.TemporaryDirectory(prefix="autopar-chunks-") as folder,
        nullcontext() if loopback else network(shape),
    ):
        job = {
            "nodes": shape.nodes, "per_node": shape.ranks_per_node, "rate": shape.rate,
            "pairs": options.pairs, "kinds": options.kinds, "out": str(Path(folder, "out.json")),
        }  # fmt: skip
        extra = {"AUTOPAR_CHUNKS": json.dumps(job)}
        command = [sys.executable, "-m", "benchmarks.step_time.chunks"]
        launch(shape, command, options.timeout, loopback, extra).check()
        seen = json.loads(Path(str(job["out"])).read_text())
        results = seen["cases"]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    lost = f"contention {seen['contention']:.2f}"
    load = f"load average {os.getloadavg()[0]:.1f}"
    console.print(table(results, shape, options.pairs), f"{lost}; {load}")
    if options.json:
        facts = {"date": cells.now(), "machine": cells.machine(), "shape": str(shape)}
        options.json.write_text(json.dumps({**facts, **seen}, indent=1) + "\n")
    faults = [f"{r['kind']}: {r['error']:.1e} off" for r in results if not r["error"] <= 1e-5]
    for fault in faults:
        console.print(f"[bold red]WRONG[/]: {fault}")
    return int(bool(faults))


if __name__ == "__main__":
    if "AUTOPAR_CHUNKS" in os.environ:
        on_rank(json.loads(os.environ["AUTOPAR_CHUNKS"]))
    else:
        sys.exit(main())
