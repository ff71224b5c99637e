"""One mask for one dropout of the model, however many copies of it the ranks make."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import fx

import autopar
from autopar import planning
from autopar.graphs import every_node
from autopar.pipeline import Pipeline
from autopar.recomputed import recomputed
from dropped import DROPPED, dropping
from plans import Subject, named_or_refused, random_plan, subject

LAYOUTS = ("ddp", "fsdp", "megatron", "megatron-sp", "atp", "auto")
NAMES = (*DROPPED, "blocks")


@functools.cache
def known(name: str) -> Subject:
    return subject(*dropping(name))


def seeds(module: fx.GraphModule) -> dict[str, list[int]]:
    """By dropout of the traced graph: what each of its copies adds to the seed."""
    found: dict[str, list[int]] = {}
    for node, _ in every_node(module):
        if getattr(node.target, "__name__", "") in ("dropout", "attention"):
            (seed,) = (
                n.args[1]
                for n in node.all_input_nodes
                if n.target is torch.ops.aten.add.Scalar and n.args[0].name == "seed"
            )
            found.setdefault(node.meta["source"], []).append(seed)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_drops_what_one_device_drops(name: str, layout: str) -> None:
    named_or_refused(known(name), 4, layout)


@pytest.mark.parametrize("name", NAMES)
def test_so_does_any_plan(name: str) -> None:
    for seed in range(3):
        known(name).at_random("x2.y2", seed)
    known(name).at_random("x2.y3", 3)


@pytest.mark.parametrize("name", NAMES)
def test_copies_have_one_seed_and_other_dropouts_another(name: str) -> None:
    copies = 0
    for mesh, draw in (("x2.y2", 0), ("x2.y2", 1), ("x2.y3", 2)):
        world = autopar.World.of(4 if mesh == "x2.y2" else 6)
        plan = random_plan(known(name).program, mesh, world, draw)
        program = dataclasses.replace(known(name).program, plan=plan)
        found = seeds(planning.rewritten(Pipeline(), program, world).module)
        assert all(len(set(numbers)) == 1 for numbers in found.values()), found
        assert len({numbers[0] for numbers in found.values()}) == len(found), found
        copies += sum(len(numbers) - 1 for numbers in found.values())
    assert copies or name not in ("attended", "twice", "normed"), "no plan makes copies"


@pytest.mark.parametrize("layout", ["ddp", "megatron"])
def test_copies_in_blocks_that_run_again_have_it_too(layout: Any) -> None:
    model, inputs = dropping("blocks")
    plan = autopar.plan(model, 2, inputs, layout=layout, recompute="full", smaller=False)
    assert plan.ready is not None
    calls = plan.ready.program.module.graph.find_nodes(op="call_function", target=recomputed)
    assert len(calls) == 2
    autopar.verify(model, 2, inputs, layout=layout, recompute="full")
