"""What plans move, counted in the emitted graphs: the figures of benchmarks/planning/quality.py."""

from __future__ import annotations

import pytest
import torch

from benchmarks.planning import quality
from benchmarks.planning.__main__ import named


@pytest.mark.slow
def test_a_gpt_sends_less_over_the_link_than_a_two_level_sum_of_its_gradients() -> None:
    figures = quality.gpt()
    assert 50 < figures["MB"] < quality.TWO_LEVEL_MB


@pytest.mark.slow
def test_by_the_peers_own_prices_less_is_moved_than_by_the_peer() -> None:
    """Sums of gradients in float32; the price of the plan is as good as proven to be the least."""
    world = quality.by_peers_prices()
    planned = quality.planned(named("llama3-8b", 64, 4)(), world, str(quality.MESH), torch.float32)
    sent = planned.gigabytes()
    assert sent.total() == pytest.approx(planned.plan.comm_bytes / 1e9)
    assert sent.total() < 3.3 < quality.PEER_GB
    assert sent["sums of gradients"] == pytest.approx(2 * sent["gathers of weights"], rel=0.1)
    assert planned.plan.gap < 1e-3


def test_the_peers_prices_are_torchs() -> None:
    """As torch has them (microseconds, GiB), for one axis at a time."""
    from types import SimpleNamespace

    from torch.distributed.tensor import _collective_utils as theirs

    names = quality.MESH.names
    rates = [quality.RATES[n] / 2**30 for n in names]
    topology = SimpleNamespace(
        mesh_dim_devices=[quality.MESH.sizes[n] for n in names],
        mesh_dim_bandwidth=rates,
        mesh_dim_latency=[quality.HOPS_S[n] * 1e6 for n in names],
    )
    for kind, price in (
        ("all_gather", theirs.allgather_cost),
        ("reduce_scatter", theirs.reduce_scatter_cost),
        ("all_reduce", theirs.allreduce_cost),
    ):
        for place, axis in enumerate(names):
            line = quality._line(kind, (axis,))
            seconds = line.start_s + line.s_per_byte * 2**30
            assert seconds * 1e6 == pytest.approx(price(1.0, topology, place))  # type: ignore[arg-type]
