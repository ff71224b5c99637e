"""Where a rank computes, and where its graph makes tensors."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autopar import WorldError
from autopar.ops import devices
from autopar.passes import trace
from autopar.planner.plan_context import fingerprint
from autopar.world import ranks, store

CPU, META = torch.device("cpu"), torch.device("meta")


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(4, device=x.device)


def named(module: fx.GraphModule) -> set[torch.device]:
    return {d for n in module.graph.nodes for d in n.kwargs.values() if isinstance(d, torch.device)}


def test_a_graph_makes_its_tensors_where_it_runs() -> None:
    program = trace.trace(Counts(), (torch.zeros(2, 4),))
    here = devices.on_device(program.module, CPU)
    assert here is program.module and named(here) == {CPU}
    moved = devices.on_device(program.module, META)
    assert named(moved) == {META} and named(program.module) == {CPU}
    values = [n.meta["val"].device for n in moved.graph.nodes if "val" in n.meta]
    assert set(values) == {META}
    assert moved(torch.zeros(2, 4, device=META))[0].is_meta
    assert torch.equal(here(torch.zeros(2, 4))[0][1], torch.arange(4.0))


def test_devices_of_a_graph_lose_their_numbers_and_are_no_part_of_its_name() -> None:
    program = trace.trace(Counts(), (torch.zeros(2, 4),))
    before = fingerprint(program)
    for node in program.module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:3")}
    assert fingerprint(program) == before
    devices.take_numbers_off(program.module.graph)
    assert named(program.module) == {torch.device("cuda")}


@pytest.mark.parametrize(
    ("backends", "parameters", "expected"),
    [
        ({}, CPU, "cpu"),
        ({"cpu": "gloo", "cuda": "gloo"}, CPU, "cpu"),
        ({"cuda": "nccl"}, CPU, "cuda"),
        ({"cpu": "gloo", "cuda": "nccl"}, CPU, "cuda"),
        ({"cpu": "gloo", "cuda": "nccl"}, META, "cuda"),
        ({"cpu": "gloo", "cuda": "gloo"}, META, "cpu"),
    ],
)
def test_a_rank_computes_where_its_backend_sends_from(
    monkeypatch: pytest.MonkeyPatch,
    backends: dict[str, str],
    parameters: torch.device,
    expected: str,
) -> None:
    monkeypatch.setattr(ranks, "backends", lambda: backends)
    tensors = [torch.zeros(2, device=parameters)]
    assert devices.of_rank(tensors, None) == torch.device(expected)


def test_a_device_that_the_group_does_not_send_from_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "backends", lambda: {"cuda": "nccl"})
    with pytest.raises(
        WorldError, match=r"device cpu is asked for, .* \(cuda:nccl\) does not send"
    ):
        devices.of_rank([], "cpu")


def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices._numbered(torch.device("cuda")) == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(WorldError, match=r"cuda:2, but this node has 2 \(LOCAL_RANK is 2\)"):
        devices._numbered(torch.device("cuda"))


def test_two_ranks_of_a_node_on_one_accelerator_are_named() -> None:
    apart = [("a", "cuda:0"), ("b", "cuda:0"), ("a", "cuda:1"), ("a", ""), ("a", "")]
    devices._refuse_shared(apart)
    with pytest.raises(WorldError, match=r"ranks 0, 5 of node a all compute on cuda:0"):
        devices._refuse_shared([*apart, ("a", "cuda:0")])


def test_alone_nobody_is_waited_for() -> None:
    assert store.all_of("here") == ["here"]
    assert store.done_on_rank_0(lambda: 3) == 3
