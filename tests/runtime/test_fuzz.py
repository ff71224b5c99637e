"""Fixed cases of the fuzzer, and that it finds, shrinks and prints what is wrong."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest

from autopar.runtime import lockstep
from autopar.runtime.reference import double_by_default
from autopar.runtime.training.module_state import ModuleState
from autopar.runtime.training.step_graph import StepGraph
from tests.fuzz import ranks as real
from tests.fuzz.__main__ import report
from tests.fuzz.case import Case, random_case
from tests.fuzz.fixed import FIXED, GLOO, IN_FORWARD, MENDED
from tests.fuzz.habits import HABITS
from tests.fuzz.ops_tricky import IN_FORWARD as COUNTED
from tests.fuzz.shrink import shrunk
from tests.fuzz.simulated import FAILURES, Result, run, run_built
from tests.fuzz.source import Unfit, build, run_text, with_habits_done
from tests.fuzz.table import FROM_IDS, LOSS, OP, RETURN, TABLE
from tests.fuzz.workers import Task, Team

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """A process of its own: what once took its process down shall not take pytest's."""
    workers = Team()
    yield workers
    workers.stop()


def test_there_are_fifty_fixed_cases() -> None:
    assert len(FIXED) == len({Case.parse(line) for line in FIXED}) == 50


@pytest.mark.slow_cells("0", "10", "15", "20", "25", "30", "35", "40", "45", "5")
@pytest.mark.parametrize("place", range(0, 50, 5))
def test_fixed_cases_equal_one_device(team: Team, place: int) -> None:
    for line in FIXED[place : place + 5]:
        result = team.run(Task(Case.parse(line), 1), TIMEOUT_S)
        assert result.kind == "ok", f"{line}: {result.kind} {result.said}"


@pytest.mark.slow_cells("dropout drawn twice")
@pytest.mark.slow_cells("a table that outgrows memory")
@pytest.mark.parametrize("name", MENDED)
def test_mended_cases_are_right_or_refused(team: Team, name: str) -> None:
    """Right, or refused by name; never a wrong number, an error of Python's, a hang."""
    result = team.run(Task(Case.parse(MENDED[name]), 1), TIMEOUT_S)
    assert result.kind in ("ok", "refused"), f"{result.kind} {result.said}"


@pytest.mark.parametrize("kind", IN_FORWARD)
def test_draws_and_derivatives_in_forward(team: Team, kind: str) -> None:
    result = team.run(Task(Case.parse(IN_FORWARD[kind]), 1), TIMEOUT_S)
    assert result.kind == "ok" and kind in result.used, f"{result.kind} {result.said}"


@pytest.mark.slow
def test_cases_on_real_ranks() -> None:
    ranks = Team(4, gloo=True)
    try:
        for line in GLOO:
            result = ranks.run(Task(Case.parse(line), 1), TIMEOUT_S)
            assert result.kind == "ok", f"{line}: {result.kind} {result.said}"
    finally:
        ranks.stop()


# -- the fuzzer itself -----------------------------------------------------------------------------
@pytest.mark.slow
def test_every_kind_of_op_gets_into_modules() -> None:
    for name in TABLE:
        assert any(name in _used(name, seed) for seed in range(60)), name


def test_draws_and_derivatives_in_forward_are_drawn_often() -> None:
    """At least five cases in a thousand have each."""
    steps = Counter(step.op for seed in range(1000) for step in random_case(seed).steps)
    assert not {kind for kind in IN_FORWARD if steps[kind] < 5}, steps
    assert set(IN_FORWARD) <= COUNTED["derivatives"] | COUNTED["draws"] <= set(TABLE)


def test_every_case_has_one_of_the_kinds_that_are_requested() -> None:
    for seed in range(20):
        steps = {step.op for step in random_case(seed, only="force,noise").steps}
        assert any(op == "force" or op.startswith("noise") for op in steps)


def _used(name: str, seed: int) -> tuple[str, ...]:
    try:
        return build(random_case(seed, only=name), seed).used
    except Unfit:
        return ()


def test_a_case_reads_back_from_its_line_and_builds_the_same_text() -> None:
    for seed in range(40):
        case = random_case(seed)
        assert Case.parse(str(case)) == case
        try:
            text = build(case, seed).text
        except Unfit:
            continue
        assert text == build(case, seed).text
        assert run_text(text).text == text
    assert {entry.kind for entry in TABLE.values()} == {FROM_IDS, OP, LOSS, RETURN}


def test_a_wrong_sum_is_found_by_both_comparisons() -> None:
    """Of verify, and of the module itself where verify is told to believe everything."""
    case = Case.parse("rows 4x8 | linear:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'")
    assert run(case, 1).kind == "ok"
    with mock.patch.object(lockstep, "_sum", lambda values: values[0].clone()):
        assert run(case, 1).failed
        with mock.patch("autopar.api.compare", return_value=None):
            result = run(case, 1)
    assert result.kind == "wrong" and "on rank 0 of mesh data2" in result.said


def test_rounding_of_the_module_itself_is_no_failure() -> None:
    """A row of zeros, divided by its norm: a bias behind it has a gradient of 1e12 times terms that
    cancel. Any other value that is wrong is found all the same.
    """
    case = Case.parse(
        "ids 3x6 | embedding:650 noise:841 unbind:719 mlp:1 linear:1 amax:702 instance_norm:818 | "
        "contrastive:0 return_loss:0 | | 3 | 'ddp'"
    )
    result = run(case, 570354)
    assert result.kind == "unfit" and "rounding moves" in result.said, result.said
    with mock.patch.object(lockstep, "_sum", lambda values: values[0].clone()):
        assert run(case, 570354).kind == "wrong"


def test_every_habit_is_drawn_and_becomes_a_line_that_acts_on_the_module() -> None:
    drawn = [random_case(seed, (2, 2)) for seed in range(1000)]
    assert sum(len(case.habits) for case in drawn) > 500
    assert {habit.op for case in drawn for habit in case.habits} == set(HABITS)
    assert not set(HABITS) & set(TABLE)
    for kind, op in {**dict.fromkeys(HABITS, "linear"), **NEEDED}.items():
        case = Case.parse(f"rows 4x8 | mlp:1 {op}:1 | mean_square:0 return_loss:0 | | 1 | 'ddp'")
        wanted = Case.parse(f"{case} | {kind}:3")
        built = build(wanted, 1)
        assert str(wanted) == f"{case} | {kind}:3" and built.kinds == (*built.used, kind)
        assert built.habits[0][1] in report(1, wanted, 1, Result("wrong"), True)


NEEDED = {"mode": "dropout_module", "attribute": "switched", "number": "argument"}
MISSED = {
    "mode:1": "rows 4x8 | linear:1 batch_norm:2",
    "attribute:1": "rows 4x8 | linear:1 switched:1",
    "attribute:2": "rows 4x8 | linear:1 gain_exp:1",
}


@pytest.mark.slow_cells("mode:1")
@pytest.mark.parametrize("habit", MISSED)
def test_a_stale_graph_is_found_by_a_habit(habit: str) -> None:
    """On one real rank, where the module is the same but for what the habit changes."""
    case = Case.parse(f"{MISSED[habit]} | mean_square:0 return_loss:0 | | 1 | 'ddp' | {habit}")
    with double_by_default():
        assert real.run(case, 1).kind == "ok"
        with mock.patch.object(ModuleState, "holds", return_value=True):
            assert real.run(case, 1).kind == "wrong"


def test_simulated_ranks_have_the_habits_done_before_the_plan() -> None:
    case = Case.parse(
        "rows 4x8 | linear:1 batch_norm:2 | mean_square:0 return_loss:0 | | 2 | 'ddp' | "
        "mode:1 init:4 freeze:2"
    )
    built = build(case, 1)
    text = with_habits_done(built).text
    assert len(built.habits) == 3 and all(line in text for _, line in built.habits)
    result = run(case, 1)
    assert result.kind == "ok" and set(result.used) > {"mode", "init", "freeze"}


def test_a_number_that_is_not_fed_is_found_by_a_habit() -> None:
    case = Case.parse(
        "rows 4x8 | linear:1 argument:1 | mean_square:0 return_loss:0 | | 1 | 'ddp' | "
        "number:1 number:2"
    )
    number = StepGraph._number
    with double_by_default():
        assert real.run(case, 1).kind == "ok"
        with mock.patch.object(StepGraph, "_number", lambda g, value, e: number(g, 0.25, e)):
            assert real.run(case, 1).kind == "wrong"


def test_a_false_alarm_and_an_error_are_failures_and_a_refusal_is_none() -> None:
    from autopar.errors import VerificationError

    case = Case.parse("rows 4x8 | linear:1 | mean_square:0 return_loss:0 | | 2 | 'fsdp'")
    for error, kind in ((VerificationError("alarm"), "false alarm"), (KeyError("x"), "error")):
        with mock.patch("autopar.api.compare", side_effect=error):
            assert run(case, 1).kind == kind and kind in FAILURES
    few = "rows 1x8 | linear:1 | mean_square:0 return_loss:0 | | 4 | 'fsdp'"
    refused = run(Case.parse(few), 1)  # too few rows to be padded for
    assert refused.kind == "refused" and "LayoutError" in refused.said and not refused.failed


def test_a_failure_is_shrunk_to_what_makes_it_fail_and_printed_as_it_runs() -> None:
    case = Case.parse(
        "sequences 12x4x24 | linear:1 topk:3 mlp:2 layer_norm:4 gelu:5 | "
        "cross_entropy:1 return_dictionary:2 | eval | 8 | random_plan('w2.x4', 3)"
    )

    def attempt(tried: Case) -> Result:
        names = {step.op for step in tried.steps}
        return Result("wrong" if "topk" in names else "ok", "off", tuple(sorted(names)))

    small, result = shrunk(case, attempt(case), attempt, 60.0, False)
    assert [step.op for step in small.steps] == ["topk"] and result.kind == "wrong"
    assert small.ranks == 2 and small.layout == "'ddp'" and not small.module_edits
    small = dataclasses.replace(small, steps=Case.parse(FIXED[0]).steps, sizes=case.sizes)
    printed = report(
        1, dataclasses.replace(small, start=Case.parse(FIXED[0]).start), 1, result, False
    )
    (line,) = re.findall(r'--case "(.*)"$', printed, re.M)
    assert Case.parse(line).layout == "'ddp'"
    source = printed[printed.index("import autopar") : printed.index("\nlayout 'ddp'")]
    assert not run_built(run_text(source), "'ddp'", 2).failed


def test_a_failure_is_shrunk_to_the_habit_that_makes_it_fail() -> None:
    case = Case.parse(
        "rows 4x8 | linear:1 gelu:5 | mean_square:0 return_loss:0 | | 2 | 'fsdp' | "
        "data:1 mode:2 write:3 freeze:4"
    )

    def attempt(tried: Case) -> Result:
        return Result("wrong" if "write" in {habit.op for habit in tried.habits} else "ok", "off")

    small, _ = shrunk(case, attempt(case), attempt, 60.0, True)
    assert str(small).endswith("| 2 | 'ddp' | write:3")


@pytest.mark.slow
def test_a_hang_and_a_process_that_dies_are_failures() -> None:
    workers = Team()
    try:
        case = Case.parse("rows 4x8 | linear:1 | mean_square:0 return_loss:0 | | 2 | 'ddp'")
        text = build(case, 1).text
        endless = text.replace("super().__init__()", "super().__init__()\n        while True: pass")
        assert workers.run(Task(None, 0, endless, "'ddp'", 2), 2.0).kind == "hang"
        dying = text.replace(
            "super().__init__()", "super().__init__()\n        import os; os.abort()"
        )
        result = workers.run(Task(None, 0, dying, "'ddp'", 2), 60.0)
        assert result.kind == "error" and "SIGABRT" in result.said
        assert workers.run(Task(case, 1), TIMEOUT_S).kind == "ok"
    finally:
        workers.stop()
