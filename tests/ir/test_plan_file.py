"""Plans as files: they carry their world; what people edit in them is checked, priced and run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar.planner.objective import cost_terms
from autopar.runtime.apply import renew_plan
from models import Example, gpt, mlp

Json = dict[str, Any]
Edit = Callable[[Json], None]


def inputs(example: Example) -> Any:
    return example[2] or example[1]


def planned(example: Example, world: Any, layout: Any = "auto") -> Json:
    """A plan as it stands in its file."""
    plan = autopar.plan(example[0], world, inputs(example), layout)
    return json.loads(json.dumps(plan.to_json()))  # type: ignore[no-any-return]


def edited(data: Json, edit: Edit) -> autopar.Plan:
    edit(data)
    return autopar.Plan.from_json(data)


# -- what was not edited ---------------------------------------------------------------------------
@pytest.mark.slow_cells("gpt-auto", "gpt-megatron")
@pytest.mark.parametrize(("example", "layout"), [(gpt, "auto"), (mlp, "4d"), (gpt, "megatron")])
def test_a_plan_from_a_file_is_priced_as_it_was_planned(
    example: Callable[[], Example], layout: str
) -> None:
    case = example()
    model = case[0]
    before = autopar.plan(model, autopar.World.preset("dgx-h100", 16), inputs(case), layout)
    loaded = autopar.Plan.from_json(json.loads(json.dumps(before.to_json())))
    assert loaded == before and loaded.world == before.world and not loaded.edited
    after = renew_plan(model, loaded, inputs(case))
    assert not after.changed_figures
    assert after.seconds == pytest.approx(before.seconds, rel=1e-12)
    assert (after.comm_bytes, after.peak_bytes) == (before.comm_bytes, before.peak_bytes)
    assert after.collectives == before.collectives and after.unsplit == before.unsplit
    spent = cost_terms(before.context.source, before, before.world)
    assert sum(spent.values()) == pytest.approx(before.seconds, rel=1e-12)


def test_a_plan_is_rewritten_on_the_world_that_it_was_planned_for(tmp_path: Any) -> None:
    """Sums over two nodes go in two levels there; on a world like this machine's in one."""
    model, args, _ = mlp()
    levels = autopar.Level(4, 1e9, 1e-7), autopar.Level(2, 1e6, 1e-5)
    two_nodes = dataclasses.replace(autopar.World.of(8), levels=levels, launch_s=0.0)
    before = autopar.plan(model, two_nodes, args, "ddp")
    before.save(tmp_path / "plan.json")
    after = renew_plan(model, autopar.Plan.load(tmp_path / "plan.json"), args)
    wanted, graph = (str(p.context.program.module.graph) for p in (before, after))
    assert graph == wanted and "inside: 4" in wanted


def test_figures_that_differ_from_the_file_are_reported() -> None:
    model, args, _ = case = mlp()

    def slower(data: Json) -> None:
        data["seconds"] *= 2

    after = renew_plan(model, edited(planned(case, 4), slower), args)
    (line,) = after.changed_figures
    assert line.startswith("seconds: ") and "the file says" in line
    alone = edited(planned(case, 1), slower)
    with pytest.warns(UserWarning, match="seconds: "):
        autopar.apply(model, alone, args)


# -- edits that run --------------------------------------------------------------------------------
def stored_unsharded(data: Json) -> None:
    for layout in data["stored"].values():
        layout["states"] = ["I"] * len(layout["states"])


def stored_otherwise(data: Json) -> None:
    """Weights that were kept in rows are kept in columns."""
    axes = len(data["mesh"].split("."))
    layout = data["stored"]["p_up_weight"]
    layout["states"] = ["S(1,32)", *["I"] * (axes - 1)]


def rows_instead(data: Json) -> None:
    """The first product splits its rows instead; its layouts follow."""
    data["choices"]["linear"]["splits"] = ["m"] * len(data["choices"]["linear"]["splits"])


def rows_without_layouts(data: Json) -> None:
    rows_instead(data)
    del data["choices"]["linear"]["operands"], data["choices"]["linear"]["results"]


def layouts_of_rows(data: Json) -> None:
    choice = data["choices"]["linear"]
    for place, states in enumerate((["S(0,8)"], ["R"], ["R"])):
        choice["operands"][place]["states"] = states
    choice["results"][0]["states"] = ["S(0,8)"]


def every_state(data: Json) -> None:
    """Every product whole on every rank, R throughout."""
    for choice in data["choices"].values():
        choice["splits"] = ["R"] * len(choice["splits"])


@pytest.mark.parametrize(
    ("edit", "world"),
    [
        (stored_unsharded, 4),
        (stored_otherwise, 2),
        (rows_instead, 2),
        (rows_instead, 4),
        (rows_without_layouts, 4),
        (layouts_of_rows, 2),
        (every_state, 4),
    ],
)
def test_an_edited_plan_runs(edit: Edit, world: int) -> None:
    model, args, _ = case = mlp()
    before = planned(case, world, "megatron")
    plan = edited(json.loads(json.dumps(before)), edit)
    assert plan.edited
    check = autopar.verify(model, None, args, layout=plan)
    assert check.grad_error < 1e-9 and check.ranks == world
    after = renew_plan(model, plan, args)
    assert after.changed_figures[0].startswith("edited by hand since it was planned: ")
    assert after.seconds > before["seconds"]
    again = autopar.Plan.from_json(json.loads(json.dumps(after.to_json())))
    assert again.edited and again.choices == after.choices


@pytest.mark.slow
def test_an_edited_gpt_runs() -> None:
    """One block's up projection takes another loop dim, its weight is stored whole."""
    model, args, _ = case = gpt()
    data = planned(case, 4, "megatron")
    name = next(n for n, c in data["choices"].items() if c["splits"] == ["n"])
    data["choices"][name]["splits"] = ["k"]
    plan = autopar.Plan.from_json(data)
    assert autopar.verify(model, None, args, layout=plan).grad_error < 1e-9
    changed = renew_plan(model, plan, args).choices[name]
    assert changed.splits == ("k",) and changed.results[0].states[0].kind == "P"


# -- edits that are refused ------------------------------------------------------------------------
def at(*path: Any) -> Callable[[Any], Edit]:
    """An edit that puts a value at this path."""

    def put(value: Any) -> Edit:
        def edit(data: Json) -> None:
            for step in path[:-1]:
                data = data[step]
            data[path[-1]] = value

        return edit

    return put


FIRST = "choices.linear.operands.0: "  # where its first operand stands in the file
LINEAR = ("choices", "linear")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (at(*LINEAR, "splits")(["q"]), ("linear in up", "'q' on axis tp of 4", "_0 or m, k, n")),
        (at(*LINEAR, "splits")(["n", "m"]), ("linear in up", "has 1 axes")),
        (
            at(*LINEAR, "operands", 0, "states")(["S(1,16)"]),
            ("linear in up", "axis tp of 4", "k: "),
        ),
        (at(*LINEAR, "results", 0, "states")(["P"]), ("linear in up", "-> (S(1,64))", "k: ")),
        (at(*LINEAR, "results", 0, "states")(["S(1,1)"]), ("linear in up", "do not go together")),
        (at(*LINEAR, "operands", 0, "states")(["X"]), (FIRST, "'X'", "I, R, P")),
        (at(*LINEAR, "operands", 0, "states")(["S(7,1)"]), (FIRST, "2 dims")),
        (at(*LINEAR, "operands", 0, "states")(["S(1,5)"]), (FIRST, "stride 5")),
        (at(*LINEAR, "operands", 0, "shape")([16, 32]), ("linear in up", "(16, 64)")),
        (at("stored", "p_up_bias", "states")(["R"]), ("p_up_bias", "(R)", "I, S(0,64)")),
        (at("stored", "p_up_bias", "states")(["P"]), ("p_up_bias", "(P)", "I, S(0,64)")),
        (at("stored", "p_other")({"shape": [4], "states": ["I"]}), ("`stored`", "'p_other'")),
        (at("outputs", "0", "states")(["P"]), ("output 0", "(P)")),
        (at("recompute")(["blocks.7"]), ("blocks.7",)),
        (at("mesh")("tp2"), ("mesh tp2 has 2 ranks", "world 4")),
    ],
)
def test_an_edit_that_cannot_be_is_refused(edit: Edit, says: tuple[str, ...]) -> None:
    model, args, _ = case = mlp()
    data = planned(case, 4, "megatron")
    with pytest.raises(autopar.PlanError) as error:
        renew_plan(model, edited(data, edit), args)
    assert all(part in str(error.value) for part in says), error.value


def test_splits_and_layouts_that_contradict_each_other_are_refused() -> None:
    model, args, _ = case = mlp()
    data = planned(case, 2, "megatron")
    layouts_of_rows(data)
    data["choices"]["linear"]["splits"] = ["k"]
    with pytest.raises(autopar.PlanError, match=r"splits k, .* as if it split _0: change both"):
        renew_plan(model, autopar.Plan.from_json(data), args)


def test_a_world_that_is_none_is_named() -> None:
    data = planned(mlp(), 2)
    data["world"]["device"]["memory_bytes"] = "much"
    with pytest.raises(autopar.WorldError, match=r"device\.memory_bytes"):
        autopar.Plan.from_json(data)


def test_a_file_that_is_cut_short_is_no_plan() -> None:
    data = planned(mlp(), 2)
    del data["stored"]
    with pytest.raises(autopar.PlanError, match="cut short"):
        autopar.Plan.from_json(data)
    assert torch.is_grad_enabled()
