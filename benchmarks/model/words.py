"""Words that layouts move for a matrix product, against the lower bound and published figures.

    python -m benchmarks.model.words [--ranks 64] [--ratio 1] [--json words.json] [--markdown]

Formulas and what they count: formulas.py. Here they are evaluated exactly, at rationals,
on the grid of each layout that moves the fewest words forward and backward.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sympy
from rich import box
from rich.console import Console
from rich.table import Table
from sympy import Expr, Rational, Symbol

from autopar.ir.mesh import factorings
from benchmarks.model import formulas as f
from benchmarks.model.formulas import Words, lower_bound

RANKS = (4, 8, 16, 64)
RATIOS = (1, 4, 16)  # m / h, with k = n = h

Grid = tuple[int, ...]


# -- layouts and their grids -----------------------------------------------------------------------
@dataclass(frozen=True)
class Layout:
    """A named layout: its words, the axes in its formulas, and its grids on so many ranks."""

    name: str
    words: Words
    axes: tuple[Symbol, ...]
    grids: Callable[[int], Iterable[Grid]]


def squares(ranks: int) -> Iterator[Grid]:
    if math.isqrt(ranks) ** 2 == ranks:
        yield (math.isqrt(ranks),)


def squares_with_depth(ranks: int) -> Iterator[Grid]:
    """(q, d) with q²·d = ranks and 2 <= d <= q; with d = 1 it is 2D SUMMA."""
    for depth in range(2, ranks + 1):
        for (side,) in squares(ranks // depth) if ranks % depth == 0 else ():
            if depth <= side:
                yield side, depth


def _factored(name: str, words: Words, *axes: Symbol) -> Layout:
    return Layout(name, words, axes, lambda ranks: factorings(ranks, len(axes)))


LAYOUTS = (
    _factored("ddp", f.ddp(), f.P),
    _factored("fsdp", f.fsdp(), f.P),
    _factored("megatron", f.megatron(), f.P),
    _factored("megatron-sp", f.megatron_sp(), f.P),
    _factored("atp", f.atp(), f.d1, f.d2),
    _factored("4d", f.four_d(), f.x, f.y, f.z, f.data),
    _factored("3d", f.three_d(), f.on_m, f.on_n, f.on_k),
    Layout("2d summa", f.summa(f.UNITY), (f.q,), squares),
    Layout("2.5d", f.summa(f.d), (f.q, f.d), squares_with_depth),
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def at(words: Expr, layout: Layout, grid: Grid, ratio: Expr | int) -> Rational:
    """The words at m = ratio·h, k = n = h, in units of h²; exact.

    >>> at(BY_NAME["3d"].words.forward, BY_NAME["3d"], (4, 4, 4), 1)
    9/64
    """
    sizes = {f.m: ratio, f.k: 1, f.n: 1}
    return words.subs(sizes | dict(zip(layout.axes, grid, strict=True)))


def bound(ranks: int, ratio: int) -> Expr:
    return lower_bound(ranks, ratio, 1, 1)


@dataclass(frozen=True)
class Row:
    """A layout on its best grid, in h² words a rank; numbers are None where it has no grid."""

    layout: str
    grid: str = "none"
    forward: Rational | None = None
    of_bound: Expr | None = None  # forward / lower bound
    again: Rational | None = None
    saved: Rational | None = None
    stored: Rational | None = None


def row(layout: Layout, ranks: int, ratio: int) -> Row:
    """The grid of fewest words forward and backward (gathers repeated), then of least stored."""
    words = layout.words

    def cost(grid: Grid) -> tuple[Rational, Rational]:
        return at(words.again, layout, grid, ratio), at(words.stored, layout, grid, ratio)

    grids = list(layout.grids(ranks))
    if not grids:
        return Row(layout.name)
    grid = min(grids, key=cost)
    again, stored = cost(grid)
    forward, saved = (at(part, layout, grid, ratio) for part in (words.forward, words.saved))
    of_bound = forward / bound(ranks, ratio)
    return Row(layout.name, named(layout, grid), forward, of_bound, again, saved, stored)


def named(layout: Layout, grid: Grid) -> str:
    pairs = zip(layout.axes, grid, strict=True)
    return " ".join(f"{axis.name.removeprefix('on_')}={size}" for axis, size in pairs)


# -- published figures -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Published:
    """A published figure, as printed, and what the formulas give."""

    what: str
    published: str
    computed: Expr

    @property
    def ratio(self) -> float:
        return float(self.computed) / float(self.published)


# arXiv 2301.08658: all-reduce words a transformer layer, units of batch · sequence · hidden
ATP_LAYER: dict[Grid, str] = {
    (8, 1): "7.0",
    (4, 2): "6.0",
    (2, 4): "10",
    (16, 1): "7.5",
    (8, 2): "5.0",
    (4, 4): "6.0",
    (64, 1): "7.875",
    (32, 2): "4.25",
    (16, 4): "3.0",
    (8, 8): "3.5",
}
# 64 ranks, forward over the lower bound, by m/h and layout
OF_BOUND: dict[tuple[int, str, Grid], str] = {
    (1, "3d", (4, 4, 4)): "1.000",
    (1, "2d summa", (8,)): "1.556",
    (1, "2.5d", (4, 4)): "1.667",
    (4, "3d", (4, 4, 4)): "1.271",
    (4, "2d summa", (8,)): "1.648",
    (4, "2.5d", (4, 4)): "1.130",
}
# 64 ranks, forward and backward in h² words
BOTH_DIRECTIONS: dict[tuple[int, str, Grid], str] = {
    (16, "2.5d", (4, 4)): "2.91",
    (16, "2d summa", (8,)): "5.58",
    (1, "2.5d", (4, 4)): "0.80",
    (1, "2d summa", (8,)): "0.66",
}


def break_even(part: str) -> Rational:
    """The m/h above which [4,4,4] moves fewer words than [8,8,1]; part: "forward" or "again"."""
    ratio = Symbol("ratio")
    deep, flat = BY_NAME["2.5d"], BY_NAME["2d summa"]
    of_deep = at(getattr(deep.words, part), deep, (4, 4), ratio)
    of_flat = at(getattr(flat.words, part), flat, (8,), ratio)
    (root,) = sympy.solve(of_deep - of_flat, ratio)
    return root


def published() -> Iterator[Published]:
    """Every published figure that the formulas should give."""
    for grid, figure in ATP_LAYER.items():
        yield Published(f"ATP {grid}: all-reduces of a layer / bsh", figure, f.atp_layer(*grid))
    for (ratio, name, grid), figure in OF_BOUND.items():
        forward = at(BY_NAME[name].words.forward, BY_NAME[name], grid, ratio)
        what = f"{name} ({named(BY_NAME[name], grid)}), m = {ratio}h: forward / bound"
        yield Published(what, figure, forward / bound(64, ratio))
    for (ratio, name, grid), figure in BOTH_DIRECTIONS.items():
        both = at(BY_NAME[name].words.again, BY_NAME[name], grid, ratio)
        what = f"{name} ({named(BY_NAME[name], grid)}), m = {ratio}h: fwd+bwd / h²"
        yield Published(what, figure, both)
    yield Published("m/h where 2.5d = 2d summa, forward", "1.25", break_even("forward"))
    yield Published("m/h where 2.5d = 2d summa, fwd+bwd", "1.75", break_even("again"))


# -- output ----------------------------------------------------------------------------------------
HEADINGS = ("layout", "best grid", "forward", "/ bound", "fwd+bwd", "saved", "stored")
NOTE = (
    "fwd+bwd: gathered operands are dropped and gathered again; saved: they are kept.\n"
    "stored: words of X, W, Y kept between uses. Below the bound: it stores copies."
)


def cells(figures: Row) -> tuple[str, ...]:
    numbers = (figures.forward, figures.of_bound, figures.again, figures.saved, figures.stored)
    shown = ("" if number is None else f"{float(number):.3f}" for number in numbers)
    return (figures.layout, figures.grid, *shown)


def words_table(ranks: int, ratio: int) -> Table:
    least = float(bound(ranks, ratio))
    title = f"P = {ranks}, m = {ratio}h, k = n = h; h² words a rank; lower bound {least:.3f}"
    table = Table(*HEADINGS[:2], title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS[2:]:
        table.add_column(heading, justify="right")
    for layout in LAYOUTS:
        table.add_row(*cells(row(layout, ranks, ratio)))
    return table


def published_table() -> Table:
    table = Table("figure", title="Published figures and these formulas", box=box.SIMPLE_HEAD)
    for heading in ("published", "computed", "ratio"):
        table.add_column(heading, justify="right")
    for entry in published():
        computed = f"{float(entry.computed):.4f}"
        table.add_row(entry.what, entry.published, computed, f"{entry.ratio:.4f}")
    return table


def markdown(ranks: int, ratio: int) -> str:
    """The table of words as it stands in docs/layouts.md: without those of the forward alone, and
    those where gathered operands are kept.
    """
    lines = [HEADINGS, ("---", "---", *["--:"] * (len(HEADINGS) - 2))]
    lines += [cells(row(layout, ranks, ratio)) for layout in LAYOUTS]
    shown = [HEADINGS.index(name) for name in HEADINGS if name not in ("forward", "saved")]
    return "\n".join(f"| {' | '.join(line[i] for i in shown)} |" for line in lines)


def as_json(ranks: Iterable[int], ratios: Iterable[int]) -> dict[str, list[dict[str, Any]]]:
    """Everything that is printed, with floats for the rationals."""
    rows = [
        {"ranks": count, "m_over_h": ratio} | _plain(asdict(row(layout, count, ratio)))
        for count in ranks
        for ratio in ratios
        for layout in LAYOUTS
    ]
    figures = [_plain(asdict(entry) | {"ratio": entry.ratio}) for entry in published()]
    return {"words": rows, "published": figures}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(value) if isinstance(value, Expr) else value for key, value in values.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--ratio", type=int, nargs="+", default=RATIOS, help="m / h")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    parser.add_argument("--markdown", action="store_true", help="only the tables, as in the docs")
    options = parser.parse_args(arguments)
    cases = [(ranks, ratio) for ranks in options.ranks for ratio in options.ratio]
    if options.markdown:
        print("\n\n".join(markdown(*case) for case in cases))
    else:
        show(cases)
    if options.json:
        options.json.write_text(json.dumps(as_json(options.ranks, options.ratio), indent=1) + "\n")


def show(cases: Iterable[tuple[int, int]]) -> None:
    console = Console()
    for case in cases:
        console.print(words_table(*case))
    console.print(NOTE, published_table(), sep="\n\n", highlight=False)


if __name__ == "__main__":
    main()
