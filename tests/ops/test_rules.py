"""The rule table, by machine: the strategies of every op give on shards what one device gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar.ir.strategy
from autopar.ir.layout import Layout, R, S
from autopar.ir.mesh import Mesh
from autopar.ir.sharding_rule import TABLE, operands_of, results_of, shape_of
from autopar.ir.strategy import Strategy
from autopar.passes.rewrite import push_back_layouts
from autopar.runtime import lockstep
from rule_cases import CASES, DIGITS, GENERATED
from shards import (
    SEED,
    Case,
    Traced,
    as_list,
    check,
    compare,
    emitted,
    on_one_device,
    random_layout,
    sample,
    text,
    trace,
)


def test_every_line_of_the_table_has_a_case() -> None:
    missing = set(TABLE) - {case.target for case in (*CASES, *GENERATED)}
    assert not missing, f"ops in the table without a case here: {sorted(map(str, missing))}"


@pytest.mark.slow_cells(
    "aten.conv_transpose1d.default/dilated, no batch",
    "aten.conv_transpose2d.input/dilated, no batch",
    "aten.conv_transpose3d.input/dilated, no batch", "aten.index_put.default",
)  # fmt: skip
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shards_compute_what_one_device_computes(case: Case) -> None:
    traced = trace(case)
    whole = on_one_device(traced)
    for mesh, cut, most in (
        ("x2", False, 99),
        ("x3", True, 99),
        ("x2.y2", False, 3),
        ("x2.y3", True, 3),
    ):
        for strategy in sample(traced.strategies(mesh, cut), most, case.name + mesh):
            try:
                check(traced, whole, strategy, Mesh.parse(mesh))
            except Exception as error:
                error.add_note(f"{mesh}: {strategy.choices} {[str(r) for r in strategy.results]}")
                raise


# -- in words --------------------------------------------------------------------------------------
# Per strategy on an axis of two: what is split, the operands' states, the results'. S1/2 is the
# digit of stride 2 of dim 1.
GOLDEN = {
    "aten.linear.default": """
        I: I I I -> I
        R: R R R -> R
        _0: S0 R R -> S0
        _1: S1 R R -> S1
        k: S2 S1 P -> P
        n: R S0 S0 -> S2
        through 0 2: P R P -> P
        through 1 2: R P P -> P""",
    "aten.conv2d.default/groups": """
        I: I I I -> I
        R: R R R -> R
        c: S1/1 S1 P -> P
        o: R S0/2 S0/2 -> S1/2
        b0: S0 R R -> S0
        through 0 2: P R P -> P
        through 1 2: R P P -> P""",
    "aten.embedding.default": """
        I: I I -> I
        R: R R -> R
        v: S0 R -> P
        d: S1 R -> S2
        _0: R S0 -> S0
        _1: R S1 -> S1
        through 0: P R -> P""",
    "aten.layer_norm.default": """
        I: I I I -> I
        R: R R R -> R
        d0: S0 R R -> S0
        d1: S1 R R -> S1
        d2: S2 S0 S0 -> S2""",
    "aten.layer_norm.default/two dims": """
        I: I I I -> I
        R: R R R -> R
        d0: S0 R R -> S0""",
    "aten.scaled_dot_product_attention.default/causal": """
        I: I I I - -> I
        R: R R R - -> R
        q: S2 R R - -> S2
        b0: S0 S0 S0 - -> S0
        g: S1 S1 S1 - -> S1
        through 2: R R P - -> P""",
    "aten.scaled_dot_product_attention.default/grouped": """
        I: I I I - -> I
        R: R R R - -> R
        q: S2 R R - -> S2
        b0: S0 S0 S0 - -> S0
        g: S1 S1 S1 - -> S1
        r: S1/1 R R - -> S1/1
        through 2: R R P - -> P""",
    "aten.cross_entropy_loss.default/weighted sum": """
        I: I I I -> I
        R: R R R -> R
        d0: S0 S0 R -> P
        d1: S1 R S0 -> I""",
    "aten.cross_entropy_loss.default/none": """
        I: I I - -> I
        R: R R - -> R
        d0: S0 S0 - -> S0
        d1: S1 R - -> I""",
    "aten.view.default": """
        I: I -> I
        R: R -> R
        f0: S0 -> S0
        f1: S0/2 -> S1
        f2: S1 -> S1/2
        through 0: P -> P""",
    "aten.split.Tensor": """
        I: I -> I I
        R: R -> R R
        d0: S0 -> S0 S0
        piece: S1/6 -> S1 S1
        through 0: P -> P P""",
    "aten.split_with_sizes.default/uneven": """
        I: I -> I I I
        R: R -> R R R
        d0: S0 -> S0 S0 S0
        through 0: P -> P P P""",
    "aten.cat.default": """
        I: I I -> I
        R: R R -> R
        d0: S0 S0 -> S0
        piece: S1 S1 -> S1/6
        through 0 1: P P -> P""",
    "aten.add.Tensor/broadcast": """
        I: I I -> I
        R: R R -> R
        d0: S0 R -> S0
        d1: S1 S0 -> S1
        d2: S2 R -> S2
        through 0 1: P P -> P""",
    "aten.mul.Tensor/broadcast": """
        I: I I -> I
        R: R R -> R
        d0: S0 R -> S0
        d1: S1 S0 -> S1
        d2: S2 R -> S2
        through 0: P R -> P
        through 1: R P -> P""",
    "aten.mul.Tensor/flags": """
        I: I I -> I
        R: R R -> R
        d0: S0 S0 -> S0
        d1: S1 S1 -> S1
        through 0: P R -> P""",
    "aten.sum.dim_IntList/keep": """
        I: I -> I
        R: R -> R
        d0: S0 -> P
        d1: S1 -> S1
        d2: S2 -> P
        through 0: P -> P""",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_rule_gives_its_golden_strategies(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    strategies = [text(strategy) for strategy in trace(case).strategies("x2")]
    assert strategies == [line.strip() for line in GOLDEN[name].strip().splitlines()]


# -- three axes on one dim -------------------------------------------------------------------------


@pytest.mark.parametrize("case", DIGITS, ids=lambda case: case.name)
def test_three_axes_on_one_dim_in_any_order(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets in mesh order instead of stride order show on three axes; on two they may not."""
    monkeypatch.setattr(autopar.ir.strategy, "_ALL_ORDERS", 3)
    traced, whole, mesh = trace(case), on_one_device(trace(case)), Mesh.parse("x2.y3.z2")
    together = [
        s
        for s in traced.strategies(str(mesh)) + traced.strategies(str(mesh), cut=True)
        if any(
            o is not None and any(len(o.digits(d)) == 3 for d in range(len(o.shape)))
            for o in s.operands
        )
    ]
    assert len(together) >= 6
    for strategy in sample(together, 6, case.name):
        check(traced, whole, strategy, mesh)


# -- wishes pushed back ----------------------------------------------------------------------------


def without_gradients(case: Case) -> Case:
    def take(x: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) else x

    listed = [[take(y) for y in x] if isinstance(x, list) else take(x) for x in case.args]
    return Case(case.target, tuple(listed), case.kwargs, case.note, case.reference)


def placed_where_wanted(traced: Traced, wanted: Layout, result: int) -> tuple[Layout, list[Tensor]]:
    """As the rewrite makes values without a layout of their own: (layout reached, results)."""
    mesh, shapes = (
        wanted.mesh,
        [None if n is None else shape_of(n.meta["val"]) for n in operands_of(traced.node)],
    )
    reached, operands = push_back_layouts(traced.rule, wanted, result, tuple(shapes))
    results = [Layout(mesh, shape_of(v), (R,) * len(mesh.axes)) for v in results_of(traced.node)]
    results[result] = reached
    module = emitted(traced, Strategy((), operands, tuple(results), 1), mesh)
    pairs = [
        (o, n.meta["val"])
        for o, n in zip(operands, operands_of(traced.node), strict=True)
        if o and n
    ]

    def rank_fn(rank: int) -> Tensor:
        own = [layout.cut(value, mesh.coordinate(rank)) for layout, value in pairs]
        places = [torch.tensor([c]) for c in mesh.coordinate(rank).values()]
        return as_list(module(*own, *places, torch.tensor(SEED)))[result]

    return reached, lockstep.run(mesh, rank_fn)


@pytest.mark.slow_cells(
    "aten.conv_transpose1d.default/dilated, no batch",
    "aten.conv_transpose2d.input/dilated, no batch",
    "aten.conv_transpose3d.input/dilated, no batch",
)  # fmt: skip
@pytest.mark.parametrize("case", [*CASES, *GENERATED], ids=lambda case: case.name)
def test_a_wish_is_pushed_back_to_the_operands(case: Case) -> None:
    traced, draw = trace(without_gradients(case)), random.Random(case.name)
    results = on_one_device(traced).results
    for mesh in ("x2", "x2.y3"):
        index = draw.randrange(len(results))
        wanted = random_layout(Mesh.parse(mesh), shape_of(results[index]), "RSSS", draw)
        reached, parts = placed_where_wanted(traced, wanted, index)
        assert all(
            have in (R, want) for have, want in zip(reached.states, wanted.states, strict=True)
        )
        compare(f"{wanted} reached as", reached, parts, results[index], 1e-4)


@pytest.mark.parametrize("case", GENERATED[:9], ids=lambda case: case.name)
def test_constants_are_made_in_slices(case: Case) -> None:
    wanted = Layout(Mesh.parse("x2.y3"), (6, 12), (S(0, 3), S(1, 4)))
    assert placed_where_wanted(trace(case), wanted, 0)[0] == wanted
