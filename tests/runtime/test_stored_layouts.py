"""What is stored is what plain `Shard`s in mesh order mean, whatever digits the products want:
torch joins, cuts, saves and loads it right, and bounds and search offer the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cost.many_meshes import HALF, Meshes
from autopar.errors import PlanError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.strategy import placements
from autopar.passes import annotate, trace
from autopar.planner.bounds.factor_graph import FIRST_SLOT, frame
from autopar.planner.bounds.option_costs import OptionCosts
from autopar.planner.constraint import Constraint
from autopar.planner.exact_search import Search
from autopar.planner.space import candidates
from fused_models import FUSED
from launch import RANK_SCRIPTS, environment

MESHES = ("x2.y2", "x4", "data2.x2.y2", "x2.y4", "x3.y2")


def annotated(name: str) -> Program:
    model, inputs = FUSED[name]()
    return annotate.annotate(trace.trace(model, inputs))


def numbered(layout: Layout) -> torch.Tensor:
    return torch.arange(torch.Size(layout.shape).numel()).reshape(layout.shape)


def chunked(layout: Layout, coordinate: dict[str, int]) -> torch.Tensor:
    """The part that plain shards give a rank: chunks of the dim, axis by axis."""
    part = numbered(layout)
    for place in layout.mesh.storage_order:
        axis, state = layout.mesh.axes[place], layout.states[place]
        if state.kind == "S":
            part = part.chunk(axis.size, state.dim)[coordinate[axis.name]]
    return part


@pytest.mark.slow_cells("grouped_queries-x3.y2")
@pytest.mark.slow_cells(
    "gated_products-data2.x2.y2", "gated_products-x2.y2", "gated_products-x2.y4",
    "grouped_queries-x2.y2", "queries_keys_values-x2.y2", "tied_and_fused-data2.x2.y2",
    "tied_and_fused-x2.y2", "tied_and_fused-x2.y4", "tied_and_fused-x3.y2", "tied_and_fused-x4",
)  # fmt: skip
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FUSED)
def test_a_layout_is_plain_where_shards_in_mesh_order_cut_the_same_parts(
    name: str, mesh: str
) -> None:
    program, parsed = annotated(name), Mesh.parse(mesh)
    assert program.annotations is not None
    plain = strided = 0
    for node, shape in shapes(program):
        for layout in placements(program.annotations.dims[node, 0], shape, parsed):
            places = map(parsed.coordinate, range(parsed.size))
            same = all(
                torch.equal(layout.cut(numbered(layout), p), chunked(layout, p)) for p in places
            )
            assert layout.is_plain == same, (node, layout.states)
            assert layout.plain_part().is_plain
            plain, strided = plain + same, strided + (not same)
    assert plain and (strided or mesh in ("x4", "x3.y2")), "no layout of the other kind was met"


def shapes(program: Program) -> list[tuple[str, tuple[int, ...]]]:
    parameters = {e.node for e in program.signature.inputs if e.kind == "parameter"}
    nodes = program.module.graph.nodes
    return [(n.name, tuple(n.meta["val"].shape)) for n in nodes if n.name in parameters]


def planned(*layouts: str) -> list[tuple[str, str]]:
    """Models with the layouts that their sizes allow: four ranks divide no odd one."""
    odd = ("auto", "ddp", "fsdp")
    return [(n, x) for n in FUSED for x in layouts if n != "odd_sizes" or x in odd]


@pytest.mark.slow_cells(
    "gated_products-auto", "gated_products-fsdp", "grouped_queries-4d", "grouped_queries-auto",
    "grouped_queries-megatron", "odd_sizes-auto", "queries_keys_values-4d",
    "queries_keys_values-auto", "queries_keys_values-fsdp", "queries_keys_values-megatron",
    "tied_and_fused-4d", "tied_and_fused-auto", "tied_and_fused-fsdp", "tied_and_fused-megatron",
)  # fmt: skip
@pytest.mark.parametrize(("name", "layout"), planned("auto", "fsdp", "megatron", "4d"))
def test_bounds_and_search_offer_the_same_stored_layouts(name: str, layout: str) -> None:
    program = annotated(name)
    variables = {v.name: v for v in frame(program).variables}
    world = autopar.World.of(4)
    for mesh, constraint in candidates(layout, 4, program):
        meshes = Meshes([mesh], world)
        costs = OptionCosts(frame(program), meshes, [constraint])
        for node, shape in shapes(program):
            wanted = {_slots(x) for x in stored(program, mesh, constraint, node)}
            rated = costs.rated(variables[node])
            legal = (rated.seconds[0] < HALF).nonzero()
            offered = {
                tuple(_state(variables[node], rated.options[i]) for i in place)
                for place in zip(*legal, strict=True)
            }
            assert offered == wanted, (node, shape, str(mesh))


def stored(program: Program, mesh: Mesh, constraint: Constraint, node: str) -> list[Layout]:
    search = Search(program, mesh, autopar.World.of(4), constraint).enter()
    return list(search.variables[search.index[node]].items)


def _slots(layout: Layout) -> tuple[int | None, ...]:
    return tuple(state.dim if state.kind == "S" else None for state in layout.states)


def _state(variable: Any, option: int) -> int | None:
    state = variable.options[option]
    return None if state < FIRST_SLOT else variable.kind.slots[state - FIRST_SLOT][0]


@pytest.mark.slow_cells(
    "g*", "odd_sizes-auto", "odd_sizes-fsdp", "queries_keys_values-2.5d", "queries_keys_values-4d",
    "queries_keys_values-atp", "queries_keys_values-auto", "queries_keys_values-ddp",
    "queries_keys_values-fsdp", "queries_keys_values-megatron", "tied_and_fused-2.5d",
    "tied_and_fused-4d", "tied_and_fused-atp", "tied_and_fused-auto", "tied_and_fused-ddp",
    "tied_and_fused-fsdp", "tied_and_fused-megatron",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "layout"), planned("auto", "ddp", "fsdp", "megatron", "atp", "4d", "2.5d")
)
def test_plans_of_fused_weights_are_proven_and_store_plain_shards(name: str, layout: str) -> None:
    model, inputs = FUSED[name]()
    plan = autopar.plan(model, 4, inputs, layout=layout, smaller=False)
    layouts = [*plan.stored.values(), *plan.outputs.values(), *plan.inputs.values()]
    assert layouts and all(each.is_plain for each in layouts)
    check = autopar.verify(model, None, inputs, layout=plan)
    assert check.grad_error < 1e-9


def test_a_plan_edited_to_store_strided_digits_is_refused() -> None:
    model, inputs = FUSED["queries_keys_values"]()
    plan = autopar.plan(model, 2, inputs, layout="megatron", smaller=False)
    data = plan.to_json()
    name = next(n for n in data["stored"] if "qkv" in n and "weight" in n)
    assert data["stored"][name]["shape"] == [72, 24]
    data["stored"][name]["states"] = ["S(0,12)"]  # the heads of q, of k and of v
    with pytest.raises(PlanError, match="plain Shards"):
        autopar.verify(model, None, inputs, layout=autopar.Plan.from_json(data))


def test_a_step_that_reshards_fused_weights_says_what_that_takes() -> None:
    model, inputs = FUSED["tied_and_fused"]()
    world = autopar.World.preset("dgx-h100", 4)
    notes = autopar.plan(model, world, inputs, layout="2.5d", smaller=False).notes
    assert len(notes) == 1 and "resharded for their products" in notes[0], notes
    assert autopar.plan(model, world, inputs, layout="ddp", smaller=False).notes == ()


# -- on real ranks ---------------------------------------------------------------------------------
def on_ranks(tmp_path: Path, ranks: int, *tasks: str) -> dict[str, Any]:
    out = tmp_path / f"{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        f"--nproc-per-node={ranks}",
        str(RANK_SCRIPTS / "stored_ranks.py"),
        str(out),
        *tasks,
    ]
    own = environment(STORED_AT=str(tmp_path))
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(out.read_text()))


@pytest.mark.slow
def test_torch_joins_saves_and_loads_every_stored_layout(tmp_path: Path) -> None:
    """Bitwise: `full_tensor`, state dicts of model and optimizer in all option pairs, checkpoints
    written by four ranks under one layout, and read under others, by two ranks and by one process.
    """
    four = on_ranks(tmp_path, 4, "every layout", "trained models")
    assert four["every layout"]["layouts"] > 100
    assert four["every layout"]["wrong"] == []
    assert four["trained models"]["wrong"] == []
    two = on_ranks(tmp_path, 2, "other world")
    assert two["other world"]["wrong"] == []
    assert two["other world"]["read"] >= 3
