"""Why a plan chose what it did: runners-up are real plans, and their costs add up."""

from __future__ import annotations

import dataclasses
import json

import pytest
import rich.console
from typer.testing import CliRunner

import autopar
from autopar.cli import main
from autopar.planner.objective import cost_terms
from autopar.planner.why import Why
from autopar.runtime.apply import renew_plan
from models import gpt, mlp

WORLD = autopar.World.preset("dgx-h100", 16)


def text(answer: Why) -> str:
    console = rich.console.Console(width=160)
    with console.capture() as captured:
        console.print(answer)
    return captured.get()


@pytest.mark.slow_cells("megatron")
@pytest.mark.slow_cells("auto")
@pytest.mark.parametrize("layout", ["auto", "megatron"])
def test_what_runners_up_cost_more(layout: str) -> None:
    model, args, _ = gpt()
    plan = autopar.plan(model, WORLD, args, layout)
    answer = plan.why("blocks.0.attention")
    assert 2 <= len(answer.runners) <= 5
    assert answer.seconds == pytest.approx(plan.seconds, rel=1e-9)
    more = [runner.more_seconds for runner in answer.runners]
    assert more == sorted(more) and more[0] >= -max(plan.gap, 1e-9) * plan.seconds
    for runner in answer.runners:
        assert runner.layout != answer.chosen
        assert sum(runner.by_term.values()) == pytest.approx(runner.more_seconds, abs=1e-12)
        spent = sum(cost_terms(plan.context.source, runner.plan, WORLD).values())
        assert spent == pytest.approx(runner.plan.seconds, rel=1e-9)
        assert spent - plan.seconds == pytest.approx(runner.more_seconds, abs=1e-12)
    printed = text(answer)
    assert "blocks.0.attention: qkv " in printed and "µs (" in printed


def test_a_runner_up_is_a_plan_that_runs() -> None:
    model, args, _ = mlp()
    plan = autopar.plan(model, 4, args)
    runner = plan.why("up").runners[0]
    other = dataclasses.replace(runner.plan, fingerprint=plan.fingerprint)
    assert other.choices["linear"].splits != plan.choices["linear"].splits
    assert autopar.verify(model, None, args, layout=other).grad_error < 1e-9


def test_a_runner_up_holds_what_it_would_as_a_plan() -> None:
    model, args, _ = mlp()
    plan = autopar.plan(model, 4, args)
    answer = plan.why("linear")
    assert answer.peak_bytes == plan.peak_bytes and answer.runners
    for runner in answer.runners:
        renewed = renew_plan(
            model, dataclasses.replace(runner.plan, fingerprint=plan.fingerprint), args
        )
        assert renewed.memory is not None and plan.memory is not None
        assert renewed.memory.waiting == pytest.approx(plan.memory.waiting + runner.more_bytes)
        assert renewed.seconds == pytest.approx(plan.seconds + runner.more_seconds)


@pytest.mark.slow
def test_all_layers_at_once() -> None:
    model, args, _ = gpt()
    plan = autopar.plan(model, WORLD, args)
    single, all_ = plan.why("blocks.0.up"), plan.why("blocks.*.up")
    names = [n for n, c in plan.choices.items() if n in ("linear_2", "linear_6")]
    assert len(names) == 2
    for runner in all_.runners:
        assert len({runner.plan.choices[n].splits for n in names}) == 1
    shared = {r.layout for r in single.runners} & {r.layout for r in all_.runners}
    assert shared


def test_what_cannot_be_explained() -> None:
    model, args, _ = mlp()
    plan = autopar.plan(model, 2, args)
    with pytest.raises(autopar.PlanError, match=r"'nix' names no node .* subgraphs are up, "):
        plan.why("nix")
    with pytest.raises(autopar.PlanError, match=r"from a file .* plan again"):
        autopar.Plan.from_json(plan.to_json()).why("up")
    alone = autopar.plan(model, 1, args).why("up")
    assert not alone.runners and "no other way" in text(alone)


def test_why_on_the_command_line() -> None:
    command = ["plan", "targets:tiny", "--ranks", "4", "--why", "up"]
    printed = CliRunner().invoke(main.app, command).stdout
    assert "up: " in printed and "instead" in printed
    facts = json.loads(CliRunner().invoke(main.app, [*command, "--json"]).stdout)
    assert facts["why"]["runners"][0]["by_term"]
