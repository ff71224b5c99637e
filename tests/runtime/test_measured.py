"""Measured timelines of real gloo ranks: they say what the plan says, and what the clock says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
import models
from autopar.runtime.op_log import Entry, IssuedCollective, OpLog, collective_periods
from autopar.runtime.profiler import MeasuredStep, read_profile, timeline
from launch import launched
from timeline_files import check_timeline_file


@pytest.mark.slow
def test_a_measured_timeline_names_what_was_sent(tmp_path: Path) -> None:
    tasks = ["fsdp in-order", "4d overlapped"]
    by_task = launched(tmp_path, 4, *tasks, "one_fails", script="timeline_ranks.py")
    for task in tasks:
        facts = by_task[task]
        assert facts["sent"] == facts["planned"], task  # what the graph's collectives send
        assert all(facts["nodes"]) and all(facts["modules"]), task
        assert {"blocks.0.up", "blocks.1.attention", "head"} <= set(facts["named products"]), task
        assert facts["phases"] == ["backward", "forward"], task
        assert facts["collectives"] == facts["issues"] >= 4, task
        for what in ("within", "alike on all ranks", "gradients untouched", "hidden and met"):
            assert facts[what], (task, what)
        assert sum(facts["parts"]) + facts["skew"] == pytest.approx(facts["seconds"])
        assert all(part > 0 for part in facts["parts"]), (task, facts["parts"])
        assert facts["table"] == len(facts["totals"]) + 1
    assert by_task["fsdp in-order"]["tracks"] == ["data"]
    assert {"data", "x"} <= set(by_task["4d overlapped"]["tracks"])
    shows_what_it_counted(tmp_path / "fsdp-False.json", by_task["fsdp in-order"])
    said = by_task["one_fails"]["said"]
    assert all("the ranks hold different calls" in text and "rank 1 train" in text for text in said)
    assert by_task["one_fails"]["seconds"] < 20


def shows_what_it_counted(path: Path, facts: dict[str, Any]) -> None:
    entries = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert sum(e["args"].get("bytes", 0) for e in entries) == facts["sent"]
    computed = sum(e["dur"] for e in entries if e["cat"] == "compute")
    assert computed == pytest.approx(facts["parts"][0] * 1e6)


def test_a_compiled_graph_is_refused() -> None:
    model, args, _ = models.gpt()
    par = autopar.parallelize(model, 1, args, backend="aot_eager")
    with pytest.raises(autopar.PlanError, match="apply the plan with backend=None"):
        par.timeline(*args)


def test_buffers_and_modes_stay(tmp_path: Path) -> None:
    """Without inputs at first; a second timeline is like the first; eval has no backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    x = torch.randn(4, 8)
    par = autopar.parallelize(model, 1)
    measured = par.timeline(x)
    assert {span.phase for span in measured.spans} == {"forward", "backward"}
    assert torch.equal(par.module.get_buffer("1.running_mean"), torch.zeros(8))
    with torch.no_grad():
        assert {span.phase for span in par.timeline(x).spans} == {"forward"}
    par.module.eval().timeline(x)
    assert torch.equal(par.module.get_buffer("1.running_mean"), torch.zeros(8))


def test_one_rank_computes_only(tmp_path: Path) -> None:
    model, args, _ = models.gpt()
    par = autopar.parallelize(model, 1, args)
    measured = par.timeline(*args)
    assert not measured.totals() and measured.communication == measured.exposed_seconds == 0
    assert 0 < measured.computing < measured.seconds
    assert {"blocks.0.up", "head"} <= {span.module for span in measured.spans}
    assert {span.phase for span in measured.spans} == {"forward", "backward"}
    assert all(p.grad is None for p in par.parameters())
    check_timeline_file(measured, tmp_path / "trace.json")


# -- by hand ---------------------------------------------------------------------------------------
def event(name: str, start: float, end: float, *below: Any, **more: Any) -> Any:
    time = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    facts = {"thread": 1, "input_shapes": [], **more}
    return SimpleNamespace(name=name, time_range=time, cpu_children=list(below), **facts)


SUM, WAIT = "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"
GROUP = "autopar/data4/data"
SCRIPT = OpLog(
    [
        Entry("aten::mm", "mm", "up"),
        Entry(SUM, "sum_1", "up", "all_reduce", GROUP, 24.0, 4),
        Entry(SUM, "sum_2", "up", "all_reduce", GROUP, 48.0, 8),
        Entry("aten::mm", "mm_1", "down"),
        Entry(WAIT, "", "", waits_for=1),
        Entry(WAIT, "", "", waits_for=2),
    ],
    ("graph",),
)


def step(*ops: Any) -> list[Any]:
    graph = event("graph", 0, 100, *ops)
    whole = event("autopar step", 0, 100, event("autopar forward", 0, 100, graph))
    carried = {"thread": 2, "input_shapes": [[2, 2]]}, {"thread": 3, "input_shapes": [[8]]}
    sum_event = event("gloo:all_reduce", 11, 40, **carried[0])
    other = event("gloo:all_reduce", 13, 60, **carried[1])
    return [whole, other, sum_event]


OPS = (
    event("aten::mm", 0, 10, event("aten::empty", 1, 2)),
    event(SUM, 10, 12, event("aten::clone", 10, 11)),
    event(SUM, 12, 14),
    event("aten::mm", 14, 30),
    event(WAIT, 30, 42),
    event(WAIT, 42, 61),
)


def measure(events: list[Any], *others: float) -> MeasuredStep:
    """Of rank 3, beside one on which both sums took so long."""
    played = read_profile(events, SCRIPT)
    everywhere = [played.durations] * 4
    if others:
        everywhere[1] = {GROUP: others}
    return timeline(played, 3, everywhere)


def test_what_was_hidden_and_what_was_waited_for() -> None:
    measured = measure(step(*OPS))
    spans = {(span.name, span.kind): span for span in measured.spans}
    assert [round(value * 1e6) for value in (measured.seconds, measured.computing)] == [100, 26]
    assert [round(value * 1e6) for value in (measured.exposed_seconds, measured.issuing)] == [31, 4]
    first, other = spans["sum_1", "all_reduce"], spans["sum_2", "all_reduce"]
    assert [round(v * 1e6) for v in (first.start, first.end, first.hidden, first.exposed)] == [
        11, 40, 19, 12
    ]  # fmt: skip
    assert [round(v * 1e6) for v in (other.start, other.end, other.hidden, other.exposed)] == [
        40, 60, 0, 19
    ]  # fmt: skip
    assert (first.track, first.bytes, first.module) == ("data", 24.0, "up")
    (total,) = measured.totals()
    assert (total.number, total.bytes) == (2, 72.0)
    assert spans["sum_2", "wait"].start == pytest.approx(42e-6)
    assert spans["mm_1", "compute"].module == "down"


def test_waiting_for_a_late_rank_is_no_communication() -> None:
    """The first sum took 29 here and 8 on the rank that came last, the second one 20 and 15."""
    measured = measure(step(*OPS), 8.0, 15.0)
    spans = {(span.name, span.kind): span for span in measured.spans if span.kind != "skew"}
    first, other = spans["sum_1", "all_reduce"], spans["sum_2", "all_reduce"]
    assert [round(v * 1e6) for v in (first.start, first.end, first.hidden, first.exposed)] == [
        32, 40, 0, 10
    ]  # fmt: skip
    assert [round(v * 1e6) for v in (other.start, other.end, other.hidden, other.exposed)] == [
        45, 60, 0, 16
    ]  # fmt: skip
    late = [span for span in measured.spans if span.kind == "skew"]
    assert [(s.name, round(s.start * 1e6), round(s.end * 1e6)) for s in late] == [
        ("sum_1", 30, 32), ("sum_2", 42, 45)
    ]  # fmt: skip
    whole = measure(step(*OPS))
    assert measured.exposed_seconds + measured.skew_seconds == pytest.approx(whole.exposed_seconds)
    assert measured.other_seconds == pytest.approx(whole.other_seconds)
    assert measured.communication == pytest.approx(23e-6)
    assert measured.trace()["traceEvents"] and measured.table().row_count == 2


def test_equal_collectives_go_to_the_threads_of_their_group() -> None:
    """Two groups, two sums each of one size; the first group's second sum ran on a thread of its
    own before the second group's, which began earlier, had ended.
    """
    groups = (GROUP, "autopar/data2.x2/x")
    issued = [
        IssuedCollective("all_reduce", groups[n % 2], 4, float(n), 50.0 + 10 * n) for n in range(4)
    ]
    spans = {(2, 11.0): 20.0, (4, 12.0): 48.0, (3, 21.0): 30.0, (4, 49.0): 75.0}
    events = [
        event("gloo:all_reduce", start, end, thread=thread, input_shapes=[[4]])
        for (thread, start), end in spans.items()
    ]
    before = event("gloo:all_reduce", -5.0, 1.0, thread=2, input_shapes=[[4]])
    periods = collective_periods(issued, [before, *events], 0.0)
    assert periods == [(11, 20), (12, 48), (21, 30), (49, 75)]


@pytest.mark.parametrize("record", [OPS[:2] + OPS[3:], OPS[:5], (*OPS, OPS[5])])
def test_another_step_than_the_graphs_is_refused(record: Any) -> None:
    with pytest.raises(autopar.PlanError, match="the step that ran is not the one of the graph"):
        read_profile(step(*record), SCRIPT)


def test_ops_that_the_script_does_not_know_keep_their_own_name() -> None:
    odd = (event("aten::odd", 0, 0.5), *OPS)
    measured = measure(step(*odd))
    names = [span.name for span in measured.spans if span.kind == "compute"]
    assert names == ["aten::odd", "mm", "mm_1"]
    assert torch.tensor([span.seconds for span in measured.spans]).min() >= 0
