"""Each layout moves what the literature says, and nothing else: every call that goes over the wire
in one training step, against the lists that golden.py derives by hand, and against the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
import models
from autopar._compat import pytree
from autopar.cost import algorithms
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ops.experts import BODIES, Body, experts_op
from autopar.planner.bounds.option_costs import OptionCosts
from autopar.planner.request import Grid2D, Grid4D, Grid25D, Layouts
from autopar.runtime import lockstep
from autopar.runtime.verify import _Rank
from autopar.tools.decoders import GptBlock, Sizes
from golden import BACKWARD, BATCH, CASES, FORWARD, SEQUENCE, Line, e, h, i, k, m, v
from moe_models import GShard


class Call(NamedTuple):
    """One collective as a rank calls it; words, of four bytes, are those of the whole value."""

    phase: str
    kind: str
    axes: str
    words: float


# -- models ----------------------------------------------------------------------------------------
class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(v, h)
        self.up = nn.ModuleList(nn.Linear(h, i, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(i, h, bias=False) for _ in range(2))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.tokens(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return ((x - target) ** 2).mean()


class Block(nn.Module):
    def __init__(self, heads: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(v, h)
        self.block = GptBlock(Sizes("gpt", 1, h, heads, v, SEQUENCE))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return ((self.block(self.tokens(ids)) - target) ** 2).mean()


BODIES["golden"] = Body(F.relu, gated=False)


class Experts(nn.Module):
    """A layer of experts as one op."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(v, h)
        self.router = nn.Linear(h, e, bias=False)
        self.up = nn.Parameter(torch.randn(e, i, h) / 8)
        self.down = nn.Parameter(torch.randn(e, h, i) / 8)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.tokens(ids).flatten(0, 1)
        scores, index = self.router(x).softmax(-1).topk(k)
        up, down = self.up, self.down
        y = experts_op(x, index, scores, up, None, down, None, None, "golden", e)
        return ((x + y - target.flatten(0, 1)) ** 2).mean()


class Einsum(GShard):
    def __init__(self) -> None:
        super().__init__(h, i, e, choices=1)
        self.tokens = nn.Embedding(v, h)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return ((self.layer(self.tokens(ids)) - target) ** 2).mean()


MODELS = {"chain": Chain, "block": Block, "experts": Experts, "einsum": Einsum}


@pytest.fixture(autouse=True)
def in_one_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists count collectives; test_levels.py counts those in several levels."""
    monkeypatch.setattr(algorithms, "_two_level", lambda *_: ())


@pytest.fixture(autouse=True)
def stored_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists are of layouts as the papers have them: weights lie in the digits that products
    take. What it moves to store plain shards instead is test_stored_layouts.py's.
    """
    monkeypatch.setattr(Layout, "is_plain", property(lambda layout: True))
    monkeypatch.setattr(OptionCosts, "_plain", lambda costs, kind, states: np.True_)


def world(ranks: int) -> autopar.World:
    """Links of so little latency that at these small sizes, too, words are what counts. Prices are
    remembered by world: no other file has this one.
    """
    device = autopar.Device("test", {"float32": 1e15}, 80e9, 1e15)
    return autopar.World((autopar.Level(ranks, 1e11, 1e-11),), device, name="in one level")


def planned(model: nn.Module, ranks: int, layout: Layouts, inputs: Any = None) -> tuple[Plan, Any]:
    if inputs is None:
        inputs = (torch.randint(0, v, (BATCH, SEQUENCE)), torch.randn(BATCH, SEQUENCE, h))
    how: dict[str, Any] = {"overlap": False, "outputs": "sharded"}
    return autopar.plan(model, world(ranks), inputs, layout, **how), inputs


# -- what really runs ------------------------------------------------------------------------------
@pytest.fixture
def sent_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan, Any], list[Call]]:
    """A function that trains a plan's module for one step on all ranks in lockstep and gives every
    call of rank 0 that went over the wire.
    """
    calls: list[Call] = []
    phase = {0: FORWARD}
    exchange = lockstep._Run.exchange

    def recorded(run: Any, kind: str, x: Tensor, group: str) -> Tensor:
        if run._own.rank == 0:
            axes = group.split("/")[2].split(".")
            name = kind.split()[0].replace("-", "_")
            ranks = math.prod(run.mesh.sizes[axis] for axis in axes)
            whole = x.nbytes / 4 * (ranks if name in ("all_gather", "all_to_all") else 1)
            calls.append(Call(phase[0], name, "+".join(axes), whole))
        return exchange(run, kind, x, group)

    def run(plan: Plan, inputs: Any) -> list[Call]:
        program = plan.context.program

        def step(rank: int) -> None:
            own = _Rank(program, plan.mesh.coordinate(rank), pytree.tree_leaves(inputs))
            outputs = program.module(*(own.feed(entry) for entry in program.signature.inputs))
            phase[rank] = BACKWARD
            own._backward(list(outputs))

        calls.clear()
        phase[0] = FORWARD
        lockstep.run(plan.mesh, step)
        return list(calls)

    monkeypatch.setattr(lockstep._Run, "exchange", recorded)
    return run


def sent(plan: Plan, call: Call) -> float:
    """Bytes a rank sends for a call, by the ring formulas."""
    ranks = math.prod(plan.mesh.sizes[axis] for axis in call.axes.split("+"))
    share = (ranks - 1) / ranks * call.words * 4
    return {"all_reduce": 2 * share, "all_to_all": share / ranks}.get(call.kind, share)


def by_kind(
    rows: Iterable[tuple[str, str, str, float]],
) -> dict[tuple[str, str, str], list[float]]:
    """Amounts by (phase, kind, axes), sorted; the panels of SUMMA, q of each block, added up."""
    amounts: dict[tuple[str, str, str], list[float]] = {}
    for *key, amount in rows:
        amounts.setdefault(tuple(key), []).append(amount)  # type: ignore[arg-type]
    return {
        key: [sum(sizes)] if key[1] in ("broadcast", "reduce") else sorted(sizes)
        for key, sizes in amounts.items()
    }


def same_as_modelled(plan: Plan, calls: list[Call]) -> None:
    """The plan lists each call that runs, and no other: kind, axes, phase, bytes."""
    real = by_kind((*call[:3], sent(plan, call)) for call in calls)
    modelled = by_kind(
        (BACKWARD if c.backward else FORWARD, c.kind, "+".join(c.axes), c.bytes)
        for c in plan.collectives
    )
    assert real.keys() == modelled.keys()
    for key, amounts in real.items():
        assert amounts == pytest.approx(modelled[key], rel=1e-12), key
    assert sum(sent(plan, call) for call in calls) == pytest.approx(plan.comm_bytes)


def same_as_derived(calls: list[Call], expected: Iterable[Line]) -> None:
    ran = Counter(calls)
    wanted: Counter[Call] = Counter()
    for *call, times in expected:
        wanted[Call(*call)] += times  # type: ignore[arg-type, call-arg]
    assert not ran - wanted, "runs, but is not on the list"
    assert not wanted - ran, "is on the list, but does not run"


@pytest.mark.slow_cells(
    "block-Grid25D(q=2, d=1, panels=True)", "block-Grid25D(q=2, d=2, panels=True)",
    "block-Grid3D(x=2, y=2, z=2)", "block-Grid4D(x=4, y=2, z=2, data=1)", "block-cp",
)  # fmt: skip
@pytest.mark.parametrize(
    ("model", "ranks", "layout", "expected"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES]
)
def test_what_runs_is_what_was_derived(
    model: str, ranks: int, layout: Layouts, expected: list[Line], sent_calls: Any
) -> None:
    plan, inputs = planned(MODELS[model](), ranks, layout)
    calls = sent_calls(plan, inputs)
    same_as_modelled(plan, calls)
    same_as_derived(calls, expected)


# -- against published figures ---------------------------------------------------------------------
@pytest.mark.slow_cells(
    "Grid2D(d1=16, d2=1, first='column')-7.5", "Grid2D(d1=2, d2=4, first='column')-10.0",
    "Grid2D(d1=4, d2=2, first='column')-6.0", "Grid2D(d1=4, d2=4, first='column')-6.0",
)  # fmt: skip
@pytest.mark.parametrize(
    ("layout", "units"),
    [
        (Grid2D(8, 1), 7.0),
        (Grid2D(4, 2), 6.0),
        (Grid2D(2, 4), 10.0),
        (Grid2D(16, 1), 7.5),
        (Grid2D(8, 2), 5.0),
        (Grid2D(4, 4), 6.0),
    ],
    ids=str,
)
def test_atp_sends_what_its_paper_says(layout: Grid2D, units: float, sent_calls: Any) -> None:
    """All-reduce words of a layer, in units of b·s·h (arXiv 2301.08658, table of layouts): those of
    the four products' Y and dX. The embedding's sum, norms and loss are no part of it.
    """
    plan, inputs = planned(Block(heads=16), layout.d1 * layout.d2, layout)
    large = [c for c in sent_calls(plan, inputs) if c.words >= m * h / 8]
    assert {call.kind for call in large} == {"all_reduce"}
    large.remove(next(c for c in large if c.axes == "x" and c.phase == FORWARD))  # the embedding's
    assert sum(sent(plan, call) for call in large) / (4 * m * h) == pytest.approx(units, rel=1e-12)


# -- whole models ----------------------------------------------------------------------------------
def full_model(name: str) -> tuple[nn.Module, Any]:
    model, args, kwargs = getattr(models, name)()
    return model, args or kwargs


FOUR_D = {("all_gather", "z"), ("reduce_scatter", "z")} | {
    ("all_reduce", axes) for axes in ("x", "y", "data", "data+z")
}


@pytest.mark.slow_cells("gpt2", "llama", "t5")
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "t5"])
def test_4d_on_full_models_sends_nothing_else(name: str, sent_calls: Any) -> None:
    """No activation is ever gathered, neither for norms nor between products: the only gathers are
    those of parameters over z.
    """
    model, inputs = full_model(name)
    plan, _ = planned(model, 16, Grid4D(2, 2, 2, 2), inputs)
    calls = sent_calls(plan, inputs)
    same_as_modelled(plan, calls)
    over_y = {("all_gather", "y")}  # small parameters of norms, stored over y: see `four_d`
    assert {(c.kind, c.axes) for c in calls} - over_y <= FOUR_D
    assert all(c.words <= models.HIDDEN for c in calls if (c.kind, c.axes) in over_y)


@pytest.mark.slow
def test_4d_on_an_odd_chain_swaps_once(sent_calls: Any) -> None:
    """BERT's head has one product whose X and Y are both of the stream's width: its Y, of which x
    holds parts of sums and y slices, is gathered over y and scattered over x, and its gradient,
    which x holds in slices and y needs in slices, is gathered over x.
    """
    model, inputs = full_model("bert")
    plan, _ = planned(model, 16, Grid4D(2, 2, 2, 2), inputs)
    calls = sent_calls(plan, inputs)
    same_as_modelled(plan, calls)
    large = [c for c in calls if c.words > models.HIDDEN and (c.kind, c.axes) not in FOUR_D]
    stream = models.BATCH * models.SEQUENCE / 4 * models.HIDDEN
    assert large == [
        Call(FORWARD, "all_gather", "y", stream),
        Call(FORWARD, "reduce_scatter", "x", stream),
        Call(BACKWARD, "all_gather", "x", stream),
    ]


@pytest.mark.slow
def test_products_that_share_an_operand_gather_it_once(sent_calls: Any) -> None:
    """Llama's q, k and v take one X, its gate and up another: 2.5D gathers each once, and scatters
    the sum of their gradients once; so does 4D sum it once.
    """
    model, inputs = full_model("llama")
    plan, _ = planned(model, 8, Grid25D(2, 2), inputs)
    rows, layers = models.BATCH * models.SEQUENCE, models.LAYERS
    counts = Counter(sent_calls(plan, inputs))
    x = rows * models.HIDDEN / 4
    assert counts[Call(FORWARD, "all_gather", "col", x)] == 2 * layers
    assert counts[Call(BACKWARD, "reduce_scatter", "col", x)] == 2 * layers

    plan, _ = planned(model, 16, Grid4D(2, 2, 2, 2), inputs)
    counts = Counter(sent_calls(plan, inputs))
    x = rows * models.HIDDEN / (2 * 2) / 2
    assert counts[Call(BACKWARD, "all_reduce", "y", x)] == 2 * layers + 1  # and the head's
