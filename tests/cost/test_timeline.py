"""The simulated step: small cases by hand, bounds that every simulation keeps, whole models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
import models
from autopar.cost.network import pattern
from autopar.cost.simulator import bucket_seconds, buckets, simulate
from autopar.cost.simulator.engine import Event, in_order, simulate_overlap
from autopar.cost.simulator.step_events import Events, link
from autopar.ir.mesh import Mesh
from autopar.world import Level
from events import op, programs, sent


def ends(events: Sequence[Event], **more: Any) -> list[float]:
    return simulate_overlap(events, **more).end


# -- by hand ---------------------------------------------------------------------------------------
def test_in_order_is_the_sum() -> None:
    run = in_order([op(2), sent(3, 0), op(2), op(1, 1)])
    assert (run.seconds, run.exposed) == (8, {1: 3})


def test_a_sum_runs_under_what_does_not_need_it() -> None:
    run = simulate_overlap([op(2), sent(3, 0), op(2), op(1, 1)])
    assert run.end == [2, 5, 4, 6]
    assert run.exposed == {1: 1}


def test_what_stands_later_runs_while_the_next_op_waits() -> None:
    """The product for dW stands behind the op that needs the sum."""
    assert ends([op(2), sent(3, 0), op(1, 1), op(2)]) == [2, 5, 6, 4]


def test_a_collective_slows_down_what_it_hides_under() -> None:
    run = simulate_overlap([op(1), sent(2, 0, takes_s=1.0), op(4), op(1, 1, 2)])
    assert run.end == pytest.approx([1, 3, 6, 7])  # two seconds at half the rate
    assert run.exposed == pytest.approx({1: 1})


def test_what_shares_a_link_slows_down_by_its_share_and_never_stops_computing() -> None:
    lanes = [sent(1, lane=lane, takes_s=0.6) for lane in "xy"]
    run = simulate_overlap([*lanes, op(4)])
    assert run.end == pytest.approx([2, 2, 5.2]) and run.exposed == pytest.approx({0: 0.6, 1: 0.6})
    lanes = [sent(1, lane=lane, link=link, takes_s=0.8) for link, lane in enumerate("xy")]
    run = simulate_overlap([*lanes, op(4)])  # they want 1.6 of 0.9 cores
    assert run.end == pytest.approx([16 / 9, 16 / 9, 5.6])
    assert run.exposed == pytest.approx({0: 0.8, 1: 0.8})
    both = simulate_overlap([*lanes, op(0, 0, 1)])
    assert both.end == pytest.approx([1.6, 1.6, 1.6])  # of 1 core


def test_one_lane_is_a_queue_and_lanes_share_their_link() -> None:
    assert ends([sent(2), sent(2), op(0, 0, 1)]) == [2, 4, 4]
    assert ends([sent(2), sent(2, lane="y"), op(0, 0, 1)]) == [4, 4, 4]
    assert ends([sent(2), sent(2, lane="y", link=1), op(0, 0, 1)]) == [2, 2, 2]
    assert ends([sent(1), sent(3, lane="y"), op(0, 0, 1)]) == [2, 4, 4]  # shared until 2


def test_gathers_are_issued_ahead_but_no_earlier_than_needed() -> None:
    gathers = [sent(1, lane="z", ahead=True, in_flight_bytes=8.0) for _ in range(3)]
    events = [gathers[0], op(3, 0), gathers[1], op(3, 2), gathers[2], op(3, 4)]
    run = simulate_overlap(events)
    assert run.seconds == 10  # the first gather alone is waited for
    assert run.start[2] == 1  # under the first product
    assert run.start[4] == 4  # under the second, not the first
    assert run.exposed == {0: 1}


def test_gathers_ahead_keep_the_memory_bound() -> None:
    """Gathers slower than their products would all go at once."""
    events = []
    for i in range(4):
        events += [sent(3, lane="z", ahead=True, in_flight_bytes=8.0), op(1, 2 * i)]
    free, bound = simulate_overlap(events), simulate_overlap(events, ahead_bytes=8.0)
    assert free.seconds == 4 * 3 + 1
    assert [a.event for a in free.order[:4]] == [0, 2, 4, 1]
    assert bound.seconds == 4 * (3 + 1)


def test_a_chained_collective_follows_at_once() -> None:
    """A two-level sum: the second part is issued when the first one is done, not at its use."""
    events = [op(1), sent(2, 0), sent(2, 1, lane="y"), op(2), op(2), op(1, 2)]
    assert ends(events) == [1, 3, 5, 3, 5, 6]


def test_patience_leaves_a_chain_alone_while_there_is_something_to_compute() -> None:
    """The second part of the sum goes a second later, under the same ops; with nothing else to do
    nobody waits longer.
    """
    events = [op(1), sent(2, 0), sent(1, 1, lane="y"), op(2), op(1), op(2), op(1, 2)]
    prompt, patient = (simulate_overlap(events, patience=p) for p in (0.0, 1.0))
    assert [a.event for a in prompt.order] == [0, 1, 3, 2, 4, 5, 6]
    assert [a.event for a in patient.order] == [0, 1, 3, 4, 2, 5, 6]
    assert prompt.seconds == patient.seconds == 7
    chain = [op(1), sent(2, 0), op(1, 1)]
    assert simulate_overlap(chain, patience=9.0).end == simulate_overlap(chain).end


def test_products_for_weights_wait_for_a_gap() -> None:
    """dX, dW, a norm, then the sum: dW moves under the sum."""
    late = {"phase": "backward"}
    events = [op(2, **late), op(2, **late), op(1, 0, **late), sent(3, 2, **late), op(2, 3, **late)]
    events += [op(2, 3, **late), op(3, 4, **late)]
    run = simulate_overlap(events)
    assert run.exposed[3] == 1
    assert run.seconds == 2 + 1 + 3 + 2 + 2 + 3


def test_what_is_waited_for_is_blamed_piece_by_piece() -> None:
    run = simulate_overlap([sent(2), sent(3, 0, lane="y"), op(1, 1)])
    assert run.exposed == {0: 2, 1: 3}


# -- whatever the events ---------------------------------------------------------------------------


@given(programs(), st.sampled_from([4.0, 8.0, math.inf]), st.sampled_from([0.0, 1.5]))
def test_every_simulation_keeps_its_bounds(
    events: list[Event], bound: float, patience: float
) -> None:
    run = simulate_overlap(events, bound, patience=patience)
    assert sorted(action.event for action in run.order) == list(range(len(events)))
    for index, event in enumerate(events):
        assert run.end[index] >= run.start[index] + event.seconds - 1e-9
        assert all(run.end[other] <= run.start[index] + 1e-9 for other in event.after)
    compute = sum(event.seconds for event in events if not event.lane)
    assert compute - 1e-9 <= run.seconds <= in_order(events).seconds + 1e-9
    assert sum(run.exposed.values()) == pytest.approx(run.seconds - compute)
    assert run.order == simulate_overlap(events, bound, patience=patience).order


# -- buckets ---------------------------------------------------------------------------------------
def together(events: Sequence[Event], size: int) -> list[list[int]]:
    """All that is sent is alike; what takes 9 seconds is a product."""
    leads = buckets.leading(events, [event.seconds == 9 for event in events])
    keys = [event.kind if event.lane else None for event in events]
    return buckets.together(events, keys, leads, simulate_overlap(events), size)


def as_one_event(events: Sequence[Event], members: Sequence[int]) -> Event:
    return events[members[0]]._replace(name="bucket", seconds=5.0)


def late(seconds: float, *after: int, **more: Any) -> Event:
    """A sum in the backward, of one byte."""
    return sent(seconds, *after, phase="backward", in_flight_bytes=1.0, **more)


def test_sums_that_no_matmul_needs_go_together() -> None:
    events = [
        op(9),
        late(1, 0),
        op(9, 1),
        late(1, 2),
        op(1, 2),
        late(1, 4),
        op(2, 3, 5),
        late(1, 6),
    ]
    assert together(events, 8) == [[3, 5]]  # one leads to a product, one hangs on both
    fused = buckets.fuse_buckets(events, [[3, 5]], lambda members: as_one_event(events, members))
    assert [e.after for e in fused] == [(), (0,), (1,), (2,), (2, 3), (4,), (5,)]
    assert [e.name == "bucket" for e in fused].index(True) == 4  # where the last of them stood


def test_a_bucket_is_of_one_lane_and_not_too_large() -> None:
    events = [op(9), *(late(1, 0) for _ in range(5)), late(1, 0, lane="y"), late(1, 0, lane="y")]
    assert together(events, 2) == [[1, 2], [3, 4], [6, 7]]
    assert together(events, 1) == []


def test_gathers_go_together_before_the_first_use() -> None:
    """Those of the second axis, too, though they stand between those of the first."""
    ahead = {"ahead": True, "in_flight_bytes": 1.0}
    pair = [sent(1, **ahead), sent(1, 0, lane="y", **ahead), op(9, 1)]
    events = [*pair, sent(1, **ahead), sent(1, 3, lane="y", **ahead), op(9, 2, 4)]
    groups = together(events, 8)
    assert groups == [[0, 3], [1, 4]]
    fused = buckets.fuse_buckets(events, groups, lambda members: as_one_event(events, members))
    assert [(e.name, e.after) for e in fused] == [
        ("bucket", ()), ("bucket", (0,)), ("op", (1,)), ("op", (1, 2))
    ]  # fmt: skip


def test_collectives_are_joined_in_each_level_as_in_the_one_before() -> None:
    """A sum of three, the second of which is too large for the bucket, and what follows each."""
    first = [late(1, 0), late(1, 0)._replace(in_flight_bytes=9.0), late(1, 0)]
    events = [op(9), *first, *(late(1, number, lane="y") for number in (1, 2, 3))]
    assert together(events, 8) == [[1, 3], [4, 6]]
    apart = [op(9), *(late(1, 0) for _ in range(4))]
    apart += [late(1, number, lane="y") for number in (1, 2, 3, 4)]
    assert together(apart, 2) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    small = [event._replace(in_flight_bytes=0.5) if event.lane == "y" else event for event in apart]
    assert together(small, 2) == [[1, 2], [3, 4], [5, 6], [7, 8]]  # though four would fit


@pytest.mark.slow_cells("fsdp")
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_what_a_bucket_copies_is_lost_to_computing(layout: str) -> None:
    """On gloo, of what is gathered or scattered; a sum in levels stays in one tensor."""
    model, args, _ = models.gpt()
    levels = (Level(2, 5e9, 1e-4), Level(2, 1e7, 2e-3))
    world = autopar.World(levels, autopar.World.of(4).device, backend="gloo")
    plan = autopar.plan(model, world, args, layout=layout)
    assert plan.context is not None
    step = Events(plan.context.program, world)
    step.run()
    alike: dict[Any, list[int]] = {}
    for index, (like, _) in step.joinable.items():
        alike.setdefault(like, []).append(index)
    joined = [step.fuse(members) for members in alike.values() if len(members) > 1]
    assert {event.kind for event in joined} >= {"reduce_scatter", "all_gather"}
    bandwidth = world.device.memory_bytes_per_s
    for event, members in zip(joined, (m for m in alike.values() if len(m) > 1), strict=True):
        whole = sum(step.joinable[index][1] for index in members)
        in_levels = layout == "ddp" or " replicate" in event.name  # of what is stored whole
        assert event.takes_s == (0.0 if in_levels else 2 * whole / bandwidth)


def test_starts_are_saved_but_no_overlap_is_given_up() -> None:
    """Where nothing but bytes takes time, no sum waits for another one."""
    model, args, _ = models.gpt()
    slow = Level(4, 1e7, latency_s=1e-3)
    for level, joins in ((slow, True), (replace(slow, latency_s=0.0), False)):
        world = autopar.World((level,), autopar.World.of(4).device, launch_s=0.0)
        plan = autopar.plan(model, world, args, layout="ddp")
        timeline = plan.timeline()
        sums = [event for event in timeline.events if event.lane]
        assert any(event.members for event in sums) == joins
        assert sum(event.bytes for event in sums) == pytest.approx(plan.comm_bytes)
        apart, *others = bucket_seconds(plan.context.program, world)
        assert timeline.seconds == min(apart, *others) == plan.overlapped
        assert (timeline.seconds < apart) == joins
        for event in sums:
            assert event.bytes == pytest.approx(sum(p.bytes for p in event.members or (event,)))
            assert not event.members or event.name.endswith(f" and {len(event.members) - 1} more")


def test_links_are_those_of_the_outermost_level() -> None:
    world, mesh = autopar.World.preset("dgx-h100", 64), Mesh.parse("data8.x8")
    assert link(world, pattern(mesh, ("x",))) == 0
    assert link(world, pattern(mesh, ("data",))) == link(world, pattern(mesh, mesh.names)) == 1


def test_thirty_thousand_events_are_all_placed() -> None:
    layer = [
        sent(1.0, lane="z", ahead=True, in_flight_bytes=1.0),
        *(op(0.5) for _ in range(9)),
        sent(2.0, 5),
        op(1.0, 0, 10),
    ]
    events: list[Event] = []
    while len(events) < 30_000:
        base = len(events)
        events += [e._replace(after=tuple(i + base for i in e.after)) for e in layer]
    run = simulate(events)
    assert run.seconds >= sum(e.seconds for e in events if not e.lane)


@pytest.mark.parametrize("before", [0.0, 1e4, 1e7])
def test_a_long_step_ends(before: float) -> None:
    """Though what is left of a collective is less than the clock can tell: it stood still there."""
    for number in range(1, 20):
        events = [op(before), sent(number / 7, 0, takes_s=number / 8), op(3.3, 0), op(0.0, 1, 2)]
        assert before + 3.3 < simulate_overlap(events).seconds < before + 6.0
