"""benchmarks.overlap: what it makes of a cell's figures."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.overlap import gains, parse, sentence, table


def timed(name: str, seconds: list[float], **more: float) -> dict[str, Any]:
    return {"name": f"autopar {name}", "seconds": seconds, "reason": "", "seen": more}


def cell(ratio: float = 1.0) -> dict[str, Any]:
    seen = {"communication_over_computation": ratio, "hidden": 0.45, "hidden_simulated": 0.5}
    contestants = [
        timed("ddp", [1.0, 2.0, 1.0], **seen),
        timed("ddp+bucket", [2.0, 2.0, 2.0]),
        timed("ddp+schedule", [1.5, 1.5, 1.5]),
        timed("ddp+waiting", [1.5, 3.0, 1.2]),
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
    (one,) = gains(cell())
    assert one.name == "ddp" and one.counts
    assert one.gains == pytest.approx({"": 1.5, "+bucket": 0.75, "+schedule": 1.0})
    assert one.spread == pytest.approx((1.2, 1.5)) and one.of_possible == pytest.approx(0.9)
    assert table(cell()).row_count == 2


def test_what_is_wanted_is_asked_where_it_can_be_had() -> None:
    assert "1.50 (met)" in sentence(gains(cell())) and "90% (met)" in sentence(gains(cell()))
    assert sentence(gains(cell(ratio=3.0))).startswith("no layout's communication")


def test_every_model_has_a_rate() -> None:
    assert [str(shape) for shape in parse([]).shapes] == ["2×2 at 1gbit", "2×2 at 400mbit"]
    with pytest.raises(SystemExit):
        parse(["--models", "gpt"])
