"""benchmarks.step_time.overlap: what it makes of a cell's figures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from autopar.cost.simulator import Span
from autopar.cost.simulator.engine import Event, simulate_overlap
from autopar.runtime.profiler import MeasuredStep
from benchmarks.step_time.hidden import Account, account, could_be, least_exposed, usual
from benchmarks.step_time.overlap import gains, parse, sentence, table
from events import op, programs, sent


def timed(name: str, seconds: list[float], **more: float) -> dict[str, Any]:
    return {"name": f"autopar {name}", "seconds": seconds, "reason": "", "seen": more}


def cell(ratio: float = 1.0) -> dict[str, Any]:
    parts = {"communication": 1.0, "exposed": 0.55, "skew": 0.1, "hidden": 0.45, "could": 0.5}
    seen = {"communication_over_computation": ratio, **parts}
    contestants = [
        timed("ddp", [1.0, 2.0, 1.0], **seen),
        timed("ddp+bucket", [2.0, 2.0, 2.0]),
        timed("ddp+schedule", [1.5, 1.5, 1.5]),
        timed("ddp+waiting", [1.5, 3.0, 1.2], hidden=0.1),
        {**timed("fsdp", []), "reason": "refused"},
        timed("fsdp+waiting", [1.0, 1.0, 1.0]),
    ]
    return {
        "model": "gpt",
        "nodes": 2,
        "ranks_per_node": 2,
        "rate": 1e9,
        "contestants": contestants,
    }


def test_gains_are_of_steps_of_one_round() -> None:
    (gain,) = gains(cell())
    assert gain.name == "ddp" and gain.counts
    assert gain.gains == pytest.approx({"": 1.5, "+bucket": 0.75, "+schedule": 1.0})
    assert gain.spread == pytest.approx((1.2, 1.5)) and gain.of_possible == pytest.approx(0.9)
    assert table(cell()).row_count == 2


def test_options_of_overlap_are_taken_where_they_apply() -> None:
    assert "1.50 (met)" in sentence(gains(cell())) and "90% (met)" in sentence(gains(cell()))
    assert sentence(gains(cell(ratio=3.0))).startswith("no layout's communication")


def test_every_model_has_a_rate() -> None:
    assert [str(shape) for shape in parse([]).shapes] == ["2×1 at 700mbit", "2×1 at 250mbit"]
    with pytest.raises(SystemExit):
        parse(["--models", "gpt"])


# -- of two ranks' steps ---------------------------------------------------------------------------
def stepped(late: float) -> MeasuredStep:
    """Computes for 4, one collective from 2 to 5, another in a second lane from 4 to 6; stands in
    the wait from 4 on, for a late rank after 6.
    """
    spans = (
        Span("mm", "compute", "compute", 0.0, 4.0),
        Span("one", "all_reduce", "x", 2.0, 5.0),
        Span("two", "all_reduce", "y", 4.0, 6.0),
        Span("one", "wait", "waits", 4.0, 6.0),
        Span("three", "skew", "waits", 6.0, 6.0 + late),
    )
    return MeasuredStep(spans, 6.0 + late)


def test_what_two_lanes_carry_at_once_is_communication_once() -> None:
    figures = account(stepped(1.0))
    assert figures == Account(computing=4.0, communication=4.0, exposed=2.0, skew=1.0)
    assert figures.hidden == 0.5
    steps = [account(stepped(late)) for late in (1.0, 2.0, 9.0)]
    assert usual([steps, [figures] * 3]) == Account(4.0, 4.0, 2.0, 1.5)


def test_the_critical_path_and_the_link_must_be_exposed() -> None:
    chain = [op(2), sent(3, 0), op(2), op(1, 1)]
    assert least_exposed(chain) == 1.0 and least_exposed(chain, 2.0) == 0.0
    assert least_exposed(chain, 1.0, 2.0) == 4.0
    two = [op(1), sent(3, 0), sent(3, 0, lane="y"), op(2), op(0, 1, 2)]
    assert least_exposed(two) == 4.0  # one link carries them in a row
    assert least_exposed([e._replace(link=n) for n, e in enumerate(two)]) == 1.0
    late = [op(1), op(3, 0), sent(2, 1), sent(2, 0)]
    assert least_exposed(late) == 2.0  # all that it hangs on is computed first
    assert could_be(chain, Account(10.0, 3.0, 1.0, 0.0)) == 1.0
    assert could_be(chain, Account(5.0, 3.0, 1.0, 0.0)) == pytest.approx(2 / 3)


@given(programs())
def test_no_simulated_order_exposes_less(events: list[Event]) -> None:
    events = [event._replace(phase="forward") for event in events]
    assert least_exposed(events) <= sum(simulate_overlap(events).exposed.values()) + 1e-9
