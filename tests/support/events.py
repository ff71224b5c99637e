"""Events of a step for the simulator, one by one and at random."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from autopar.cost.simulator.engine import Event


def op(seconds: float, *after: int, **more: Any) -> Event:
    return Event("op", "compute", seconds, after, **more)


def sent(seconds: float, *after: int, lane: str = "x", **more: Any) -> Event:
    return Event("sum", "all_reduce", seconds, after, lane=lane, **more)


@st.composite
def programs(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = []
    for index in range(draw(st.integers(1, 24))):
        after = tuple(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else ()
        seconds = float(draw(st.integers(0, 4)))
        lane = draw(st.sampled_from(["", "", "x", "y", "x aside"]))
        ahead = bool(lane) and not after and draw(st.booleans())
        phase = "backward" if index > 8 else "forward"
        facts = {"lane": lane, "link": draw(st.integers(0, 1)) if lane else 0}
        kind = "all_reduce" if lane else "compute"
        events.append(
            Event("e", kind, seconds, after, phase, ahead=ahead, in_flight_bytes=4.0, **facts)
        )
    return events
