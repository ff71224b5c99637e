"""Closed forms of what a plan moves: equal to the plan's own bytes, here and at other sizes."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from rich.console import Console
from sympy import Symbol, symbols
from torch import nn

import autopar
from autopar import Grid2D, Grid4D, Grid25D, Plan, PlanError
from autopar.cost.formula import ELEMENT, Formula
from benchmarks.model import formulas
from models import gpt, llama

MODELS = {"gpt": gpt, "llama": llama}


def planned(model: str, ranks: int, layout: Any) -> Plan:
    module, args, kwargs = MODELS[model]()
    # By the sum: what hides differs from mesh to mesh, and so the layouts that are chosen.
    return autopar.plan(module, ranks, args or kwargs, layout, overlap=False)


def expanded(formula: Formula) -> Counter[Any]:
    terms: Counter[Any] = Counter()
    for term, each in zip(formula.terms, formula.each(), strict=True):
        terms[term.kind, term.axes, term.backward, float(each)] += term.count
    return terms


# (layout, ranks), and the same layout on another mesh
LAYOUTS = {
    "ddp": (("ddp", 4), ("ddp", 8)),
    "fsdp": (("fsdp", 2), ("fsdp", 8)),
    "megatron": (("megatron", 2), ("megatron", 4)),
    "megatron-sp": (("megatron-sp", 2), ("megatron-sp", 4)),
    "atp": ((Grid2D(2, 2), 4), (Grid2D(4, 2), 8)),
    "4d": ((Grid4D(2, 2, 2, 2), 16), (Grid4D(x=2, y=4, z=2, data=4), 64)),
    "2.5d": ((Grid25D(2, 2), 8), (Grid25D(4, 2), 32)),
}
QUICK = {("4d", "llama"), ("megatron", "llama"), *((name, "gpt") for name in LAYOUTS)}
CASES = [
    pytest.param(name, model, marks=() if (name, model) in QUICK else pytest.mark.slow)
    for name in LAYOUTS
    for model in MODELS
]


@pytest.mark.slow_cells("megatron-gpt")
@pytest.mark.slow_cells(
    "*-llama", "2.5d-gpt", "4d-gpt", "atp-gpt", "ddp-gpt", "fsdp-gpt", "megatron-sp-gpt",
)  # fmt: skip
@pytest.mark.parametrize(("name", "model"), CASES)
def test_equal_to_the_plan_here_and_elsewhere(name: str, model: str) -> None:
    (layout, ranks), (other, more) = LAYOUTS[name]
    plan = planned(model, ranks, layout)
    formula = plan.formula()
    wanted = Counter((c.kind, c.axes, c.backward, c.bytes) for c in plan.collectives)
    assert expanded(formula) == wanted
    assert formula.bytes() == plan.comm_bytes
    there = planned(model, more, other)
    sizes = {f"G{axis}": size for axis, size in there.mesh.sizes.items()}
    assert formula.bytes(**sizes) == there.comm_bytes


class Pair(nn.Module):
    """Two products, as in the feed-forward net of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), target)


@pytest.fixture(scope="module")
def pair() -> Plan:
    """On 2 × 2 × 2 × 2 ranks; the input has a gradient, as it has within a model."""
    inputs = (torch.randn(16, 64, requires_grad=True), torch.randn(16, 64))
    return autopar.plan(Pair(), 16, inputs, Grid4D(2, 2, 2, 2))


def test_4d_sends_what_its_formulas_say(pair: Plan) -> None:
    """The closed forms of AxoNN's communication model, for every size of model and mesh."""
    formula = pair.formula()
    products = [  # without the sum of the loss, and the gradient that the user gets whole
        term
        for term in formula.terms
        if term.elements != 1 and (term.kind, term.backward) != ("all_gather", True)
    ]
    b, h, f = symbols("b h f", positive=True)
    sizes = {formulas.m: b, formulas.k: h, formulas.n: f}
    axes = {s: Symbol(f"G{s.name}", positive=True) for s in (formulas.x, formulas.y, formulas.z)}
    axes[formulas.data] = Symbol("Gdata", positive=True)
    wanted = 2 * ELEMENT * formulas.four_d().saved.subs(sizes | axes)
    assert sympy.simplify(sum(term.bytes for term in products) - wanted) == 0


def test_all_mesh_shapes_at_once(pair: Plan) -> None:
    formula = pair.formula()
    ones, twos = np.ones(3), np.array([1, 2, 4])
    sizes = formula.bytes(Gx=twos, Gy=4 / twos, Gz=ones, Gdata=ones)
    assert sizes.shape == (3,)
    alone = [formula.bytes(Gx=n, Gy=4 / n, Gz=1, Gdata=1) for n in (1, 2, 4)]
    assert sizes.tolist() == [float(value) for value in alone]
    assert formula.bytes(Gx=1, Gy=1, Gz=1, Gdata=1) == 0
    assert formula.bytes(Gx=[[1], [2]], b=[16, 32, 64]).shape == (2, 3)
    by_hand = formula.forward.subs(formula.sizes) + formula.backward.subs(formula.sizes)
    assert float(formula.total.subs(formula.sizes)) == float(by_hand) == float(formula.bytes())


def test_what_a_person_reads(pair: Plan) -> None:
    text = str(pair.formula())
    assert "forward    2 all_gather z: (1 - 1/Gz)*e*2*h*f/(Gx*Gy)" in text
    assert "forward    1 all_reduce x: 2*(1 - 1/Gx)*e*b*f/(Gdata*Gy*Gz)" in text
    assert "backward   2 all_reduce data: 2*(1 - 1/Gdata)*e*2*h*f/(Gx*Gy*Gz)" in text
    assert "h = 64 residual width, f = 256 inner width" in text
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(pair.formula("up"))
    assert "2*(1 - 1/Gdata)*e*h*f/(Gx*Gy*Gz)" in console.export_text()


def test_layers_are_added_up() -> None:
    plan = planned("gpt", 4, "megatron")
    layer, both = plan.formula("blocks.1.attention"), plan.formula("blocks.*.attention")
    assert both.chains == ("blocks.0.attention", "blocks.1.attention")
    assert both.bytes() == 2 * layer.bytes()
    assert sympy.simplify(both.total - 2 * layer.total) == 0
    # the fused weight is stored in plain shards, or whole; its products want the heads' digit
    (backward,) = (line for line in layer.lines() if line[1] == "all_reduce")
    assert {line[1] for line in layer.lines()} <= {"all_reduce", "all_gather", "all_to_all"}
    assert backward[:4] == (True, "all_reduce", ("tp",), 1)
    assert backward[4] == "2*(1 - 1/Gtp)*e*b*s*h"


def test_mistakes_are_named(pair: Plan) -> None:
    with pytest.raises(
        PlanError, match=r"'blocks\.\*' names no subgraph of the plan; there are up"
    ):
        pair.formula("blocks.*")
    with pytest.raises(PlanError, match="has no size Gtp; it has b, h, f, Gdata"):
        pair.formula().bytes(Gtp=2)
    loaded = Plan.from_json(pair.to_json())
    with pytest.raises(PlanError, match="from a file holds no graph"):
        loaded.formula()


@pytest.mark.slow
def test_a_half_precision_model_reduces_statistics_in_float32() -> None:
    module, args, _ = gpt()
    plan = autopar.plan(module.to(torch.bfloat16), 16, args, Grid4D(2, 2, 2, 2))
    formula = plan.formula()
    assert formula.sizes[ELEMENT] == 2
    assert {term.element_bytes for term in formula.terms} >= {ELEMENT, sympy.Integer(4)}
    assert formula.bytes() == plan.comm_bytes
