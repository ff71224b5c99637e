"""`autopar explain`: why a plan is as it is, and what its parts are, cost and could be."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

import autopar
from autopar.cli.reasons import _grid_text, explain_plan
from autopar.ir.plan import Plan
from autopar.ir.plan_table import subgraphs_of
from commands import refused, run
from models import Mlp

INPUTS = (torch.zeros(16, 64), torch.zeros(16, 64))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(Mlp(), 4, INPUTS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    run("plan", "targets:tiny", "--ranks", "4", "--layout", "megatron", "--save", path)
    return path


def test_the_reasons_are_the_plans_own_figures(plan: Plan) -> None:
    explanation = explain_plan(plan)
    assert any(reason.startswith(f"{len(plan.meshes)} meshes") for reason in explanation.reasons)
    turned = dataclasses.replace(plan, meshes=plan.meshes[::-1])
    assert explain_plan(turned).meshes == explanation.meshes
    bounds = [mesh.seconds for mesh in explanation.meshes]
    assert bounds == sorted(bounds) and bounds[0] == min(s for _, s in plan.meshes)
    assert sum(c.bytes for c in explanation.collectives) == pytest.approx(plan.comm_bytes)
    assert sum(c.count for c in explanation.collectives) == len(plan.collectives)
    assert explanation.selection is None


def test_limits_and_what_runs_again_are_reasons(plan: Plan) -> None:
    less = dataclasses.replace(
        plan, limit=2.0**30, recompute=("blocks.0", "blocks.1"), smaller=(2, 0.5),
        unsplit=tuple(f"node {n}" for n in range(9)),
    )  # fmt: skip
    reasons = " | ".join(explain_plan(less).reasons)
    assert "the fastest plan needs more than 1.00 GiB on each device" in reasons
    assert "computed again in the backward: 2 blocks, blocks.0 to blocks.1" in reasons
    assert "2 ranks would be as fast: 500.00 ms" in reasons
    assert "not split: node 4 | not split: 4 more nodes" in reasons


def test_a_subgraph_has_its_collectives_closed_form_and_alternatives(plan: Plan) -> None:
    selection = explain_plan(plan, "up").selection
    assert selection is not None and [row.subgraph for row in selection.rows] == ["up"]
    (node,) = selection.nodes
    assert node.module == "up" and node.splits == dict(
        zip(plan.mesh.names, plan.choices[node.node].splits, strict=True)
    )
    named = explain_plan(plan, node.node).selection
    assert named is not None and [row.subgraph for row in named.rows] == ["up"]
    assert named.formula == selection.formula
    own = [c for c in plan.collectives if c.chain == "up"]
    assert sum(c.bytes for c in selection.collectives) == pytest.approx(sum(c.bytes for c in own))
    assert set(selection.stored) == {"p_up_weight", "p_up_bias"}
    assert selection.formula is not None and "bytes a rank sends in a step: up" in selection.formula
    assert selection.why is not None and selection.why["runners"]


def test_a_node_has_the_collectives_of_its_operands_and_results() -> None:
    """Those of the two linears of Megatron's layout: dX of the first, Y of the second."""
    plan = autopar.plan(Mlp(), 4, INPUTS, "megatron", outputs="sharded")
    selections = [explain_plan(plan, name).selection for name in ("linear", "linear_1")]
    first, second = (
        [(c.kind, c.backward) for c in selection.collectives]
        for selection in selections
        if selection
    )
    assert ("all_reduce", False) in second and ("all_reduce", False) not in first
    assert selections[0] is not None and selections[0].nodes[0].seconds
    every = explain_plan(plan, "*").selection
    assert every is not None and every.sum is not None
    rows = [row for row in plan.rows if row.subgraph != "optimizer"]
    assert every.sum.seconds == pytest.approx(sum(row.seconds for row in rows))
    assert every.sum.share == pytest.approx(every.sum.seconds / plan.seconds)
    node = selections[1]
    assert node is not None and node.sum is not None and node.nodes[0].seconds
    assert node.sum.computation == node.nodes[0].seconds
    assert node.sum.communication == sum(each.seconds for each in node.collectives) > 0
    assert every.formula == str(plan.formula("*"))
    optimizer = explain_plan(plan, "optimizer").selection
    assert optimizer is not None and optimizer.formula is None and optimizer.rows
    times = [node.seconds for node in every.nodes if node.seconds is not None]
    assert sum(times) == pytest.approx(sum(r.computation for r in plan.rows
                                           if r.subgraph != "optimizer"))  # fmt: skip


def test_alternatives_are_left_out_where_they_are_not_known(plan: Plan) -> None:
    by_name = explain_plan(plan, "linear*").selection
    assert by_name is not None and len(by_name.nodes) == 2 and by_name.why is None
    for layout in ("{'up': 'fsdp'}", "megatron", "Grid25D(q=2, d=1, panels=False)"):
        other = explain_plan(dataclasses.replace(plan, layout=layout), "up").selection
        assert other is not None and other.why is None and other.formula is not None


def test_a_plan_from_a_file_has_neither(plan: Plan) -> None:
    selection = explain_plan(Plan.from_json(plan.to_json()), "up").selection
    assert selection is not None and selection.formula is selection.why is None
    assert selection.rows and selection.stored and not selection.nodes
    name = next(iter(plan.choices))
    selection = explain_plan(Plan.from_json(plan.to_json()), name).selection
    assert selection is not None and [node.node for node in selection.nodes] == [name]


def test_the_command_traces_the_target_again(saved: str) -> None:
    printed = run("explain", saved).stdout
    assert "layout megatron, mesh tp4" in printed and "all_reduce over tp" in printed
    assert "add --target" in run("explain", saved, "up").stdout
    printed = run("explain", saved, "up", "--target", "targets:tiny").stdout
    assert "in up: tp→n; (tp:R, tp:S(0), tp:S(0)) → (tp:S(1))" in printed
    assert re.search(r"sum +computes for [0-9.]+ ms \+ collectives of [0-9.]+ ms = ", printed)
    assert "sum: " in printed and "the layout leaves no other choice" in printed
    facts = json.loads(run("explain", saved, "up", "--target", "targets:tiny", "--json").stdout)
    assert facts["selection"]["nodes"][0]["splits"] == {"tp": "n"}


def test_what_cannot_be_explained(saved: str) -> None:
    assert "'sideways' names no node, parameter or subgraph" in refused(
        "explain", saved, "sideways"
    )
    text = refused("explain", saved, "--target", "targets:tiny_of", "--batch", "8x64")
    assert text.startswith("PlanError: ")
    assert "--batch 8x64: it is the target's" in refused("explain", saved, "--batch", "8x64")


def test_names_of_several_layers() -> None:
    assert subgraphs_of("a.8-10.mlp") == ["a.8.mlp", "a.9.mlp", "a.10.mlp"]
    assert subgraphs_of("a1-2.mlp") == ["a1-2.mlp"]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (autopar.Grid4D(x=2, data=2), "4d:x=2,y=1,z=1,data=2"),
        (autopar.Grid2D(4, 2), "atp:d1=4,d2=2,first=column"),
        (autopar.Grid25D(2, 2), "2.5d:q=2,d=2"),
        (autopar.GridHSDP(2, 4), "hsdp:replicate=2,shard=4,tensor=1"),
        (autopar.Grid25D(2, panels=False), "2.5d:q=2,d=1,panels=False"),  # which none reads
        ("fsdp", "fsdp"),
    ],
)
def test_grids_are_read_back(layout: object, text: str) -> None:
    assert _grid_text(str(layout)) == text
