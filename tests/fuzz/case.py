"""A case is data: which op kinds, which draws, which sizes, which ranks and layout. It reads back
from one line of text, so that a failure is a line and a fixed case is one too.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import ops_layers, ops_tricky, ops_values  # noqa: F401  (they fill the table)
from .habits import HABITS
from .table import FROM_IDS, LOSS, OP, RETURN, TABLE, names

_NAMES = ("auto", "ddp", "fsdp", "megatron", "megatron-sp", "atp", "3d", "4d", "2.5d")
HABITS_SHARE = 0.35  # of the cases
_NEEDED = {
    "mode": ("dropout_module", "batch_norm_eval", "batch_norm", "encoder_layer"),
    "attribute": ("switched", "gain", "gain_exp", "dropout_module", "gain_by_int"),
    "number": ("argument", "argument_branch", "argument_int"),
}
_MIXED = ("ddp", "fsdp", "megatron", "megatron-sp", "auto")


class Step(NamedTuple):
    """A kind of op or habit, and the seed of its draws."""

    op: str
    draw: int

    def __str__(self) -> str:
        return f"{self.op}:{self.draw}"


@dataclass(frozen=True)
class Case:
    """`start`: what the first input is, of these `sizes`; `layout`: Python text, as it is given to
    autopar, or `random_plan('x2.y2', 7)`; `module_edits`: what is done to the module, such as
    "eval"; `habits`: what is done to it between steps, as `| mode:3 data:7` at the line's end.

    >>> str(Case.parse("rows 4x6 | linear:1 | mean_square:2 return_loss:3 | | 2 | 'ddp'"))
    "rows 4x6 | linear:1 | mean_square:2 return_loss:3 | | 2 | 'ddp'"
    """

    start: str
    sizes: tuple[int, ...]
    steps: tuple[Step, ...]
    ending: tuple[Step, ...]
    module_edits: tuple[str, ...]
    ranks: int
    layout: str
    habits: tuple[Step, ...] = ()

    def __str__(self) -> str:
        first = f"{self.start} {'x'.join(map(str, self.sizes))}"
        steps, ending = (" ".join(map(str, some)) for some in (self.steps, self.ending))
        module_edits = " ".join(self.module_edits)
        habits = [" ".join(map(str, self.habits))] if self.habits else []
        parts = (first, steps, ending, module_edits, str(self.ranks), self.layout, *habits)
        return " | ".join(parts).replace("|  |", "| |")

    @staticmethod
    def parse(text: str) -> Case:
        parts = (p.strip() for p in text.split("|"))
        first, steps, ending, module_edits, ranks, layout, *habits = parts
        start, sizes = first.split()
        return Case(
            start,
            tuple(map(int, sizes.split("x"))),
            _steps(steps),
            _steps(ending),
            tuple(module_edits.split()),
            int(ranks),
            layout,
            _steps(habits[0]) if habits else (),
        )


def _steps(text: str) -> tuple[Step, ...]:
    pairs = (step.split(":") for step in text.split())
    return tuple(Step(name, int(draw)) for name, draw in pairs)


def random_case(
    seed: int, ranks: tuple[int, int] = (2, 16), only: str = "", habits: float = HABITS_SHARE
) -> Case:
    """The case of a seed. `only`: op kinds (or the beginning of several), with commas between, of
    which it has one for sure; `habits`: how often it has some.
    """
    draw = random.Random(seed)
    world = draw.randint(*ranks) if ranks[1] <= 4 or draw.random() < 0.15 else 0
    while not ranks[0] <= world <= ranks[1]:
        world = draw.choice((2, 2, 3, 4, 4, 4, 4, 6, 6, 8, 8, 9, 12, 16, ranks[0]))
    start = draw.choice(("rows", "sequences", "sequences", "sequences", "images", "ids"))
    prefixes = [name for name in only.split(",") if name]
    able = [n for a in prefixes for n in ([a] if a in TABLE else TABLE) if n.startswith(a)]
    wanted = [draw.choice(able)] if able else []
    kinds = {kind: [n for n in wanted if TABLE[n].kind == kind] for kind in (FROM_IDS, OP)}
    if kinds[FROM_IDS]:
        start = "ids"
    elif wanted and "n == 4" in TABLE[wanted[0]].when:
        start = "images"
    elif wanted and "n == 3" in TABLE[wanted[0]].when:
        start = "sequences"
    steps = [_drawn(draw, OP) for _ in range(draw.choice((1, 1, 2, 2, 3, 4, 5)))]
    steps.insert(draw.randint(0, 1), Step(draw.choice(("linear", "linear", "mlp")), 1))
    steps[draw.randint(0, 1) : 0] = [Step(n, draw.randrange(1000)) for n in kinds[OP]]
    if start == "images" and draw.random() < 0.8:
        steps.insert(0, Step("conv2d", draw.randrange(1000)))
    if start == "ids":
        first = Step(kinds[FROM_IDS][0], 3) if kinds[FROM_IDS] else _drawn(draw, FROM_IDS)
        steps.insert(0, first)
    ending = [_drawn(draw, LOSS), _drawn(draw, RETURN)]
    for place, kind in enumerate((LOSS, RETURN)):
        ending[place] = next((Step(n, 5) for n in wanted if TABLE[n].kind == kind), ending[place])
    rare = {"eval": 0.06, "freeze_first": 0.08, "input_gradient": 0.12, "no_bias_gradient": 0.04}
    module_edits = tuple(name for name, often in rare.items() if draw.random() < often)
    sizes = _sizes(draw, start, world)
    case = Case(
        start, sizes, tuple(steps), tuple(ending), module_edits, world, _layout(draw, world)
    )
    return _with_habits(case, draw) if draw.random() < habits else case


def _with_habits(case: Case, draw: random.Random) -> Case:
    """The case with one to four habits, and the ops that some of them need."""
    able = [*HABITS, "batch", "batch"]  # whose lines fit fewer modules than others
    kinds = [draw.choice(able) for _ in range(draw.choice((1, 2, 2, 3, 4)))]
    steps = list(case.steps)[:2]  # each habit may need a graph of its own, which takes long
    for kind in dict.fromkeys(kinds):
        if kind in _NEEDED:
            place = draw.randint(1, len(steps))
            steps.insert(place, Step(draw.choice(_NEEDED[kind]), draw.randrange(1000)))
    habits = tuple(Step(kind, draw.randrange(1000)) for kind in kinds)
    return replace(case, steps=tuple(steps), habits=habits)


def _drawn(draw: random.Random, kind: str) -> Step:
    options = names(kind)
    (name,) = draw.choices(options, [TABLE[option].weight for option in options])
    return Step(name, draw.randrange(1000))


def _sizes(draw: random.Random, start: str, world: int) -> tuple[int, ...]:
    divisible = [k * world for k in (1, 2, 3) if k * world <= 24] or [world]
    batch = draw.choice(divisible) if draw.random() < 0.8 else draw.randint(2, 12)
    width = draw.choice(divisible) if draw.random() < 0.7 else draw.choice((4, 6, 8, 12, 24))
    width = width if width > 1 else 4
    match start:
        case "rows":
            return batch, width
        case "sequences":
            return batch, draw.choice((2, 3, 4, 6, 8)), width
        case "images":
            side = draw.choice((3, 4, 5, 6))
            channels = draw.choice((1, 3, 4, 6)) if draw.random() < 0.5 else min(width, 12)
            return min(batch, 16), channels, side, draw.choice((side, 4))
    return batch, draw.choice((2, 3, 4, 6))


# -- layouts ---------------------------------------------------------------------------------------
def factors(ranks: int, most: int, draw: random.Random) -> list[int]:
    """Up to `most` numbers above 1 whose product is `ranks`."""
    sizes = [ranks]
    while len(sizes) < most:
        able = [k for k, f in enumerate(sizes) if any(f % d == 0 for d in range(2, f))]
        if not able or draw.random() < 0.25:
            break
        place = draw.choice(able)
        size = sizes.pop(place)
        divisor = draw.choice([d for d in range(2, size) if size % d == 0])
        sizes[place:place] = [divisor, size // divisor]
    return sizes


def _layout(draw: random.Random, ranks: int) -> str:
    chance = draw.random()
    if chance < 0.45:
        return repr(draw.choice(_NAMES))
    if chance < 0.6:
        return _grid(draw, ranks)
    if chance < 0.72:
        return repr({"m[1-4]*": draw.choice(_MIXED), "*": draw.choice(_MIXED[:4])})
    return _random_plan(draw, ranks)


def _random_plan(draw: random.Random, ranks: int) -> str:
    mesh = ".".join(f"{name}{size}" for name, size in zip("wxyz", factors(ranks, 4, draw)))
    return f"random_plan({mesh!r}, {draw.randrange(1000)})"


def with_random_plan(case: Case, seed: int) -> Case:
    """The case with a plan at random in the place of its layout."""
    return replace(case, layout=_random_plan(random.Random(seed), case.ranks))


def _grid(draw: random.Random, ranks: int) -> str:
    sizes = factors(ranks, 4, draw)
    padded = [*sizes, *[1] * (4 - len(sizes))]
    draw.shuffle(padded)
    if math.isqrt(ranks) ** 2 == ranks and draw.random() < 0.2:
        return f"autopar.Grid25D(q={math.isqrt(ranks)}, d=1)"
    if ranks == 8 and draw.random() < 0.2:
        return "autopar.Grid25D(q=2, d=2)"
    if len(sizes) <= 2 and draw.random() < 0.4:
        first, second = [*sizes, 1][:2]
        return f"autopar.Grid2D({first}, {second}, {draw.choice(('column', 'row'))!r})"
    if len(sizes) == 3 and draw.random() < 0.3:
        return f"autopar.Grid3D({sizes[0]}, {sizes[1]}, {sizes[2]})"
    w, x, y, z = padded
    return f"autopar.Grid4D(x={x}, y={y}, z={z}, data={w})"
