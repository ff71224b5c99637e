"""`autopar compare`: what differs between two plans, and what it costs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cli.compare import compare_plans
from autopar.ir.plan import Plan
from commands import refused, run
from models import Mlp

INPUTS = (torch.zeros(16, 64), torch.zeros(16, 64))


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    names = "ddp", "fsdp", "megatron"
    return {name: autopar.plan(Mlp(), 4, INPUTS, name) for name in names}


def test_a_plan_is_like_itself(plans: dict[str, Plan]) -> None:
    difference = compare_plans(plans["ddp"], plans["ddp"])
    assert not difference.settings and not difference.subgraphs and not difference.stored
    assert difference.equal_subgraphs == len(plans["ddp"].rows)
    assert difference.same_graph and difference.verdict.endswith(
        "as much step, as much sent, as much peak memory"
    )


def test_what_differs_adds_up_to_the_step(plans: dict[str, Plan]) -> None:
    first, second = plans["ddp"], plans["megatron"]
    difference = compare_plans(first, second, ("a", "b"))
    assert {(s.name, s.first, s.second) for s in difference.settings} >= {
        ("layout", "ddp", "megatron"),
        ("mesh", "data4", "tp4"),
        ("groups", "data", "tp"),
    }
    figures = {figure.name: figure for figure in difference.figures}
    assert figures["step"].more == pytest.approx(second.overlapped - first.overlapped)
    assert figures["sent"].more == pytest.approx(second.comm_bytes - first.comm_bytes)
    subgraphs = [(s.first, s.second) for s in difference.subgraphs]
    sent = sum((b.bytes if b else 0) - (a.bytes if a else 0) for a, b in subgraphs)
    assert sent == pytest.approx(figures["sent"].more)
    stored = {(s.parameter, s.first, s.second) for s in difference.stored}
    assert ("p_up_weight", "whole", "tp:S(0)") in stored
    word = "slower" if figures["step"].more > 0 else "faster"
    assert difference.verdict.startswith("b against a: ") and word in difference.verdict


def test_layers_are_compared_whatever_their_numbers(plans: dict[str, Plan]) -> None:
    plan = plans["ddp"]
    row = plan.rows[0]
    names = [("blocks.0-3.mlp",), ("blocks.0.mlp", "blocks.1-3.mlp")]
    parts = [
        [
            dataclasses.replace(row, subgraph=name, bytes=row.bytes / len(group),
                                computation=1 / len(group), exposed=0.0)
            for name in group
        ]
        for group in names
    ]  # fmt: skip
    first, other = (dataclasses.replace(plan, rows=tuple(rows)) for rows in parts)
    difference = compare_plans(first, other)
    assert not difference.subgraphs and difference.equal_subgraphs == 1
    renamed = dataclasses.replace(plan, rows=(dataclasses.replace(row, subgraph="other"),))
    assert [(s.first is None, s.second is None) for s in
            compare_plans(first, renamed).subgraphs] in ([(True, False), (False, True)],
                                                       [(False, True), (True, False)])  # fmt: skip


def test_another_graph_is_said(plans: dict[str, Plan]) -> None:
    other = dataclasses.replace(plans["ddp"], fingerprint="0" * 16)
    difference = compare_plans(plans["ddp"], other)
    assert not difference.same_graph
    assert "they are for different graphs: another model, batch or mode" in difference.verdict


def test_the_command_prints_both(plans: dict[str, Plan], tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.json") for name in ("fsdp", "megatron")]
    for path, name in zip(paths, ("fsdp", "megatron"), strict=True):
        plans[name].save(path)
    printed = run("compare", *paths).stdout
    assert "second - first" in printed and "verdict " in printed and "data4" in printed
    facts = json.loads(run("compare", *paths, "--json").stdout)
    assert facts["first"] == paths[0] and facts["verdict"] in printed.replace("\n", " ")
    assert "No such file" in refused("compare", paths[0], str(tmp_path / "none.json"))
