"""Published figures that autopar's cost model can speak to: published, modelled, and the ratio.

    python -m benchmarks.model.papers [--only WORD] [--json papers.json] [--markdown]

One set of constants a machine for all rows (steps.py, autopar/world/machines.py); nothing is fitted
to a row. Rows that miss by more than 25 % are listed again with the reason.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from autopar import Grid2D, Grid25D, World
from autopar.cost.formula import ELEMENT
from autopar.ir.mesh import Axis, Mesh
from autopar.tools.decoders import Sizes
from benchmarks.model.steps import (
    ALPS,
    DGX_A100,
    FRONTIER,
    MODELS,
    PERLMUTTER,
    SEQUENCE,
    Job,
    Machine,
    Step,
    best,
    mesh_of,
    moved,
    pipelined,
    planned,
    sums,
)
from benchmarks.model.words import ATP_LAYER

MISS = 0.25


@dataclass(frozen=True)
class Row:
    """A published figure and the modelled one; what was assumed; where it misses, why."""

    source: str
    what: str
    published: float
    modelled: float
    unit: str
    assumed: str = ""
    why: str = ""

    @property
    def ratio(self) -> float:
        return self.modelled / self.published

    @property
    def misses(self) -> bool:
        return abs(self.ratio - 1) > MISS


# -- AxoNN -----------------------------------------------------------------------------------------
# Batches are assumed. 2305.13525: 1024 samples, as in the authors' own table of
# communication; 2502.08145: 8192 samples (2^24 tokens), and beside it the least multiple of the
# ranks from there on, which spares a run its tensor axes where ranks outnumber samples.
EARLY, LATE = "2305.13525", "2502.08145"
BATCH = {EARLY: 1024, LATE: 8192}


def _assumed(step: Step, batch: int) -> str:
    """The grid that was found, and how the step is run."""
    sizes = "·".join(f"{axis.name}{axis.size}" for axis in mesh_of(step.grid).axes if axis.size > 1)
    note = ", weights kept" if step.execution.saves_weights else ""
    parts = f", {step.execution.microbatches} parts" if step.execution.microbatches > 1 else ""
    return f"{sizes}, batch {batch}{parts}{note}"


def _job(source: str, model: str, machine: Machine, ranks: int, each: bool = False) -> Job:
    batch = BATCH[source]
    return Job(model, machine, ranks, -(-batch // ranks) * ranks if each else batch)


_OPTIMISM = "every product is taken at the best rate measured, what hides at no cost"


def perlmutter() -> Iterator[Row]:
    job = _job(EARLY, "gpt-80b", PERLMUTTER, 1024)
    step = best(job)
    seconds, assumed = step.seconds(), _assumed(step, job.batch)
    share = job.of_peak(seconds)
    yield Row(EARLY, "80B on 1024 A100: % of peak", 57, 100 * share, "%", assumed)
    rate = share * job.ranks * PERLMUTTER.peak / 1e15
    yield Row(EARLY, "80B on 1024 A100: Pflop/s", 182, rate, "Pflop/s", assumed)
    rivals = {(t, 64 // t): pipelined(job, t, 64 // t) for t in (1, 2, 4, 8)}
    tensor, stages = min(rivals, key=rivals.__getitem__)
    gain = rivals[tensor, stages] / seconds
    against = f"Megatron-LM: tensor {tensor} × {stages} stages × data {1024 // 64}"
    yield Row(EARLY, "80B on 1024 A100: gain over Megatron-LM, ×", 1.26, gain, "×", against)


def overlap() -> Iterator[Row]:
    for ranks in (32, 256):
        job = _job(EARLY, "gpt-20b", PERLMUTTER, ranks)
        step = best(job)
        gain = step.seconds(overlap=False) / step.seconds()
        what = f"20B on {ranks} A100: gain by overlap, ×"
        why = "the number of GPUs is not given; the gain grows with it"
        yield Row(EARLY, what, 1.53, gain, "×", _assumed(step, job.batch), why)


WEAK = {512: "5b", 1024: "10b", 2048: "20b", 4096: "40b", 8192: "80b", 16384: "160b", 32768: "320b"}
_SAMPLES = (
    "8192 samples do not feed so many ranks, so tensor axes reach beyond the node; with a sample a "
    "rank (the next row) it is otherwise, and the batch is not published"
)


def weak(machine: Machine, ranks: int, model: str = "", each: bool = False) -> tuple[Job, Step]:
    job = _job(LATE, f"gpt-{model or WEAK[ranks]}", machine, ranks, each)
    return job, best(job)


def weak_perlmutter() -> Iterator[Row]:
    for ranks, published in ((512, 80.8), (4096, 620.1)):
        job, step = weak(PERLMUTTER, ranks)
        rate = job.flops / step.seconds() / 1e15
        what = f"{WEAK[ranks].upper()} on {ranks} A100: Pflop/s"
        why = f"computation alone would give {job.flops / step.compute / 1e15:.0f}: {_OPTIMISM}"
        yield Row(LATE, what, published, rate, "Pflop/s", _assumed(step, job.batch), why)


def weak_frontier() -> Iterator[Row]:
    first, start = weak(FRONTIER, 512)
    base = first.of_peak(start.seconds())
    for ranks, published in ((8192, 88.3), (16384, 79.0), (32768, 53.5)):
        for each in (False, True) if ranks > BATCH[LATE] else (False,):
            job, step = weak(FRONTIER, ranks, each=each)
            share = 100 * job.of_peak(step.seconds()) / base
            what = f"Frontier, {ranks} GCDs: % of the efficiency at 512"
            why = _OPTIMISM if each else _SAMPLES
            yield Row(LATE, what, published, share, "%", _assumed(step, job.batch), why)
    for each in (False, True):
        job, step = weak(FRONTIER, 32768, each=each)
        rate = job.flops / step.seconds() / 1e18
        why = f"computation alone would give {job.flops / step.compute / 1e18:.2f}: {_OPTIMISM}"
        what = "320B on 32,768 GCDs: Eflop/s"
        yield Row(LATE, what, 1.381, rate, "Eflop/s", _assumed(step, job.batch), why)


def weak_alps() -> Iterator[Row]:
    first, start = weak(ALPS, 1024)
    base = first.of_peak(start.seconds())
    for each in (False, True):
        job, step = weak(ALPS, 6144, "60b", each)
        share = job.of_peak(step.seconds())
        assumed, rate = _assumed(step, job.batch), share * 6144 * ALPS.peak / 1e18
        why = f"computation alone would give {job.flops / step.compute / 1e18:.2f}: {_OPTIMISM}"
        yield Row(LATE, "60B on 6144 GH200: Eflop/s", 1.423, rate, "Eflop/s", assumed, why)
        what = "Alps, 6144 GH200: % of the efficiency at 1024"
        why = _OPTIMISM if each else "3 divides no power of two: an axis of 3 lies askew in nodes"
        yield Row(LATE, what, 76.5, 100 * share / base, "%", assumed, why)


# (model, ranks, batch, (row, column, depth, data)): seconds of communication a batch
AXONNS_OWN = {
    ("gpt-20b", 32, (1, 1, 32, 1)): 1.335,
    ("gpt-20b", 32, (1, 1, 16, 2)): 1.522,
    ("gpt-20b", 32, (2, 1, 16, 1)): 10.134,
    ("gpt-40b", 64, (1, 1, 64, 1)): 2.663,
    ("gpt-40b", 64, (1, 1, 32, 2)): 2.846,
    ("gpt-40b", 64, (2, 1, 32, 1)): 9.371,
}


def axonns_own_model() -> Iterator[Row]:
    """Weights gathered in the forward and again in the backward, activations not recomputed; row is
    the axis that is first on k.
    """
    for (model, ranks, grid), published in AXONNS_OWN.items():
        row, column, depth, data = grid
        sizes = {"data": data, "z": depth, "x": row, "y": column}
        mesh = Mesh(tuple(Axis(name, size) for name, size in sizes.items()))
        job = Job(model, PERLMUTTER, ranks, 1024)
        (layer,) = sums(moved().layer, [mesh], job)
        modelled = job.sizes.layers * (sum(layer.values()) + layer["gather"])
        what = f"{model.removeprefix('gpt-').upper()} on {ranks} A100: s of communication, {grid}"
        assumed = "their model, batch 1024, no recomputation"
        yield Row(EARLY, what, published, modelled, "s", assumed)


# -- Megatron-LM -----------------------------------------------------------------------------------
# model: ranks, batch, stages, % of peak; tensor parallelism over the 8 ranks of a machine
MEGATRON = {
    "gpt-39b": (512, 1536, 2, 44),
    "gpt-145b": (1536, 2304, 8, 47),
    "gpt-310b": (1920, 2160, 16, 50),
    "gpt-1t": (3072, 3072, 64, 52),
}


def megatron() -> Iterator[Row]:
    for model, (ranks, batch, stages, published) in MEGATRON.items():
        job = Job(model, DGX_A100, ranks, batch)
        share = 100 * job.of_peak(pipelined(job, tensor=8, stages=stages))
        data = ranks // (8 * stages)
        assumed = f"tensor 8 × {stages} stages × data {data}, batch {batch}, 1F1B simulated"
        what = f"{model.removeprefix('gpt-').upper()} on {ranks} A100: % of peak"
        yield Row("2104.04473", what, published, share, "%", assumed, _OPTIMISM)


# -- ATP -------------------------------------------------------------------------------------------
def atp_words() -> Iterator[Row]:
    """All-reduce words of a layer's products, read off an emitted plan."""
    formula = moved(Grid2D(2, 2)).layer
    own = {symbol.name: symbol for symbol in formula.sizes}
    activations = [t for t in formula.terms if own["b"] in t.elements.free_symbols]
    words = sum(t.bytes / ELEMENT for t in activations if t.element_bytes == ELEMENT)
    size = MODELS["gpt-80b"]
    sizes = {"f": 4 * size.width, "h": size.width, "heads": size.heads, "d": 128, "b": 1, "s": 1}
    for (d1, d2), published in ATP_LAYER.items():
        here = {own[n]: v for n, v in {**sizes, "Gx": d1, "Gy": d2}.items() if n in own}
        modelled = float(words.subs(here)) / size.width
        what = f"ATP ({d1},{d2}): all-reduce words of a layer / bsh"
        yield Row("2301.08658", what, float(published), modelled, "bsh")


INTERCONNECTS = ("dgx-h100", "pcie-4090", "ethernet-25g", "perlmutter")


def atp_meshes() -> Iterator[Row]:
    """The best mesh by interconnect, end to end, against (16,1); either axis may be the inner."""
    ranks, low, high = 16, 1.37, 1.64
    formula = moved(Grid2D(2, 2)).layer
    for name in INTERCONNECTS:
        job = _Plain(name, ranks, 16, Sizes("gpt", 24, 4096, 32, 51200, SEQUENCE))
        seconds = {}
        for d1 in (16, 8, 4, 2):
            axes = [Axis("x", d1), Axis("y", ranks // d1)]
            meshes = [Mesh(tuple(axes)), Mesh(tuple(reversed(axes)))]
            computing = job.layer(Grid2D(d1, ranks // d1))
            for mesh, moving in zip(meshes, sums(formula, meshes, job), strict=True):  # type: ignore[arg-type]
                seconds[mesh] = computing + sum(moving.values())
        mesh = min(seconds, key=seconds.__getitem__)
        gain = next(iter(seconds.values())) / seconds[mesh]
        what = f"ATP, 16 ranks, {name}: best mesh over (16,1), ×"
        chosen = f"{mesh} best; h 4096, batch 16"
        why = "published for two interconnects of the authors', 1.37 and 1.64; this is another"
        yield Row("2301.08658", what, min(max(gain, low), high), gain, "×", chosen, why)


class _Plain:
    """A GPT's layer on a preset as it is: what `sums` asks of a job, and its computation."""

    def __init__(self, preset: str, ranks: int, batch: int, sizes: Sizes) -> None:
        self.ranks, self.batch, self.sizes, self.machine = ranks, batch, sizes, self
        self.on = World.preset(preset, ranks)

    def world(self, ranks: int) -> object:
        return self.on

    def layer(self, grid: object) -> float:
        """Seconds of computation of one layer."""
        return self._compute(grid, 3) - self._compute(grid, 2)

    def _compute(self, grid: object, layers: int) -> float:
        plan = planned(self.sizes, layers, self.on, self.batch, grid)
        return sum(r.seconds for r in plan.rows) - sum(c.seconds for c in plan.collectives)

    def step(self, grid: object) -> float:
        """Seconds of one layer, computation and communication one after the other."""
        plans = [planned(self.sizes, layers, self.on, self.batch, grid) for layers in (2, 3)]
        first, second = (sum(row.seconds for row in plan.rows) for plan in plans)
        return second - first


# -- 2.5D ------------------------------------------------------------------------------------------
def tesseract() -> Iterator[Row]:
    size = Sizes("gpt", 2, 4096, 64, 51200, SEQUENCE)
    for batch in (16, 64):
        job = _Plain("perlmutter", 64, batch, size)
        gain = job.step(Grid25D(8, 1)) / job.step(Grid25D(4, 4))
        what = f"2.5D [4,4,4] over [8,8,1], m/h = {batch * SEQUENCE // size.width}: ×"
        assumed = f"one layer, h 4096, batch {batch}, 64 A100 as on Perlmutter"
        why = "model sizes and machine of that figure are not known; the gain grows with m/h"
        yield Row("2105.14500", what, 1.45, gain, "×", assumed, why)


# -- output ----------------------------------------------------------------------------------------
PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    part.__name__: part
    for part in (
        perlmutter, overlap, weak_perlmutter, weak_frontier, weak_alps, axonns_own_model, megatron,
        atp_words, atp_meshes, tesseract,
    )
}  # fmt: skip
SILENT = (
    ("kernel choice of NN, NT, TN a product: time to solution 56 % lower at 80B", "no model"),
    ("Alpa's intra-stage meshes", "every stage has the same mesh"),
    ("async tensor parallelism, decomposition, Domino", "chunks of a product, not in a step's sum"),
    ("lower bounds at P = 64", "python -m benchmarks.model.words prints them"),
)


def rows(only: str = "") -> Iterator[Row]:
    for name, part in PARTS.items():
        if only in name:
            yield from part()


def cells(row: Row) -> tuple[str, ...]:
    published, modelled = (f"{value:.4g}" for value in (row.published, row.modelled))
    mark = " *" if row.misses else ""
    return row.what, published, modelled, row.unit, f"{row.ratio:.2f}{mark}", row.assumed


HEADINGS = ("figure", "published", "modelled", "unit", "ratio", "assumed")


def show(compared: list[Row], console: Console) -> None:
    table = Table(*HEADINGS[:1], box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="left" if heading in ("unit", "assumed") else "right")
    for row in compared:
        table.add_row(*cells(row))
    console.print(table)
    console.print(f"* misses by more than {MISS:.0%}:", highlight=False)
    for row in compared:
        if row.misses:
            console.print(f"  {row.what}: {row.why or 'no reason found'}", highlight=False)
    console.print("published figures without a row:", highlight=False)
    for what, why in SILENT:
        console.print(f"  {what}: {why}", highlight=False)


def markdown(compared: list[Row]) -> str:
    """The table of docs/papers.md: without units, which the names of the figures have."""
    lines = [HEADINGS, ("---", "--:", "--:", "---", "--:", "---"), *map(cells, compared)]
    unit = HEADINGS.index("unit")
    return "\n".join(f"| {' | '.join(line[:unit] + line[unit + 1 :])} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help=f"a part: {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    parser.add_argument("--markdown", action="store_true", help="the table as in docs/papers.md")
    options = parser.parse_args(arguments)
    compared = list(rows(options.only))
    if options.markdown:
        print(markdown(compared))
    else:
        show(compared, Console())
    if options.json:
        entries = [asdict(row) | {"ratio": row.ratio, "misses": row.misses} for row in compared]
        options.json.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
