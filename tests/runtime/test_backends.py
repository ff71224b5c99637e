"""Backends: the code that inductor generates keeps the order that was scheduled; each backend gets
the scheduled forward and backward, and gives the numbers of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import fx
from torch._inductor.graph import GraphLowering
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
import models
from autopar import _compat
from autopar.cost.peak import LifetimeRecorder, highest
from autopar.cost.simulator.graph_events import carries_on, collective_of, is_wait
from autopar.ops import process_groups
from autopar.passes import OPTIONS
from autopar.runtime.backends import Scheduled
from derived import value_of
from launch import launched
from training_facts import LIMIT

RANKS = 4
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu", "baddbmm")


@pytest.fixture
def groups() -> Iterator[None]:
    """Process groups that exist but join nobody: a compiler only asks whether they do."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    process_groups.disconnect()
    dist.destroy_process_group()


# -- the order in generated code -------------------------------------------------------------------
def derived(layout: Any, backend: Any, passes: tuple[str, ...] = OPTIONS) -> Scheduled:
    """The small GPT's graphs by a backend, on tensors without storage. Four ranks."""
    model, args, _ = models.gpt()
    world = autopar.World.of(RANKS)
    program = autopar.plan(model, world, args, layout=layout, smaller=False).context.program
    process_groups.connect(program.plan.mesh, "cpu")
    run = Scheduled(program, world, passes, backend)
    with _compat.fake_mode():
        run.derived([value_of(entry, program) for entry in program.signature.inputs])
    return run


class Written(Exception):
    """Code was generated: nothing of it needs to be compiled."""


def generated(graph: fx.GraphModule, inputs: Any, backward: bool) -> str:
    codes: list[str] = []

    def stop(_: Any, code: Any) -> None:
        codes.append(code.value)
        raise Written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphLowering, "_compile_to_module_lines", stop)
        with pytest.raises(Exception, match="Written"):
            _compat.compile_in_order(graph, inputs, backward)
    return codes[0]


def anchors(graph: fx.Graph) -> dict[str, str]:
    """Collectives, waits and products by name, in their order: what each is."""
    kinds = {}
    for node in graph.nodes:
        if node.op == "call_function":
            packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
            what = collective_of(node) or ("wait_tensor" if is_wait(node) else packet)
            if collective_of(node) or is_wait(node) or packet in PRODUCTS:
                kinds[node.name] = what
    return kinds


CALL = re.compile(r"(?:extern_kernels|torch\.ops\.\w+)\.(\w+?)_?(?:\.default)?\(")
SOURCES = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\]")


def called(code: str, wanted: dict[str, str]) -> list[str]:
    """The anchors by the name of their node, in the order in which the code calls them."""
    names: list[str] = []
    sources: list[str] = []
    for line in code[code.index("def call(") :].splitlines():
        if comment := SOURCES.search(line):
            sources = comment[1].split(", ")
        elif (call := CALL.search(line)) and call[1] in wanted.values():
            left = [name for name, what in wanted.items() if what == call[1] and name not in names]
            named = [name for name in left if name in sources]
            names.append((named or left or [line])[0])  # inductor names no coalesced collective
    return names


@pytest.mark.slow_cells("4d", "fsdp")
@pytest.mark.parametrize("layout", ["fsdp", "4d"])
def test_inductor_keeps_the_order_of_collectives_waits_and_products(
    layout: str, groups: None
) -> None:
    graphs = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append((graph, inputs))
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduled, "_compiled", lambda self, *arguments: keep(*arguments))
        derived(layout, "inductor")
    assert len(graphs) == 2
    for (graph, inputs), backward in zip(graphs, (False, True), strict=True):
        for node in graph.graph.nodes:  # so that comments of the code name the nodes of this graph
            node.meta.pop("from_node", None)
        wanted = anchors(graph.graph)
        assert sum(what == "wait_tensor" for what in wanted.values()) > 1  # a bucket has one
        assert sum(what in PRODUCTS for what in wanted.values()) > 8
        assert called(generated(graph, inputs, backward), wanted) == list(wanted)


# -- what is made again in the backward ------------------------------------------------------------
@functools.cache
def planned(ranks: int, layout: Any, recompute: Any) -> autopar.Plan:
    """Of a GPT with a batch four times that of the other tests, so that activations matter."""
    model, args, _ = models.gpt()
    inputs = tuple(x.repeat(4, 1) for x in args)
    how: dict[str, Any] = {"recompute": recompute, "smaller": False, "outputs": "sharded"}
    if recompute == "both":  # weights and cheap ops, of every block
        peaks = [planned(ranks, layout, mode).peak_bytes for mode in ("gathers", "selective")]
        how |= {"recompute": "auto", "memory": 0.9 * min(peaks)}
    return autopar.plan(model, ranks, inputs, layout, **how)


def run_and_peak(plan: autopar.Plan, passes: tuple[str, ...]) -> tuple[Scheduled, int]:
    """The derived graphs, and the most bytes that a step by them holds, counted as cost/peak.py
    counts: memories without storage, by torch's own rules.
    """
    program = plan.context.program
    run = Scheduled(dataclasses.replace(program, plan=plan), plan.world, passes)
    with _compat.fake_mode():
        values = [value_of(entry, program) for entry in program.signature.inputs]
        step, lives = run.derived(values), LifetimeRecorder()
        for value in values:
            lives.note(value)
        with lives:
            outputs = step(*values)
            next(x for x in outputs if x.requires_grad and not x.dim()).backward()
    return run, highest(lives.lifetimes)[1]


def collectives(run: Scheduled) -> list[int]:
    assert run.forward is not None and run.backward is not None
    graphs = run.forward.graph, run.backward.graph
    return [sum(collective_of(node) is not None for node in graph.nodes) for graph in graphs]


@pytest.mark.slow_cells("4-fsdp-both", "4-fsdp-gathers", "4-fsdp-selective", "4-megatron-sp-full")
@pytest.mark.parametrize(
    ("ranks", "layout", "recompute"),
    [
        *((4, "fsdp", "gathers"), (4, "megatron-sp", "full"), (4, "fsdp", "selective")),
        (4, "fsdp", "both"),
    ],
)
def test_what_the_plan_makes_again_is_not_saved(ranks: int, layout: str, recompute: str) -> None:
    plain, plain_bytes = run_and_peak(planned(ranks, layout, "none"), ())
    plan = planned(ranks, layout, recompute)
    again, least = run_and_peak(plan, ())
    before, after = collectives(plain), collectives(again)
    more = len(plan.collectives) - len(planned(ranks, layout, "none").collectives)
    assert after[0] == before[0] and bool(more) <= after[1] - before[1] <= more
    assert (more == 0) == (recompute == "selective")
    assert recompute == "full" or after[1] - before[1] == more  # no bias is gathered for nothing
    assert least < plain_bytes
    states = plan.memory.optimizer
    assert least <= plan.memory.peak - states
    _, most = run_and_peak(dataclasses.replace(plan, limit=plan.peak_bytes), OPTIONS)
    assert most <= max(least, plan.memory.peak - states)


@pytest.mark.slow
def test_gathers_of_the_backward_are_issued_ahead() -> None:
    run, _ = run_and_peak(planned(4, "fsdp", "gathers"), ("schedule",))
    assert run.backward is not None
    nodes = list(run.backward.graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    early = 0
    for node in nodes:
        if collective_of(node) == "all_gather_into_tensor":
            (wait,) = [user for user in node.users if is_wait(user)]
            between = nodes[place[node] + 1 : place[wait]]
            early += any(n.op == "call_function" and not carries_on(n) for n in between)
    assert early >= 6  # of the eight products


@pytest.mark.slow
def test_a_scheduled_graph_is_listed_with_its_collectives() -> None:
    run, _ = run_and_peak(planned(4, "fsdp", "gathers"), ("schedule",))
    assert run.forward is not None and run.backward is not None
    for module, kind in ((run.forward, "all_gather"), (run.backward, "reduce_scatter")):
        text = autopar.listing(module, shapes=True)
        issued = [line for line in text.splitlines() if line.startswith(">> ")]
        waited = [line for line in text.splitlines() if line.startswith("<< ")]
        assert len(issued) == len(waited) == sum(map(bool, map(collective_of, module.graph.nodes)))
        assert all(re.search(r" [0-9,]+ bytes$", line) for line in issued)
        assert any(f"= {kind}" in line for line in issued)
    gather = next(
        line for line in autopar.listing(run.forward, shapes=True).splitlines() if ">>" in line
    )
    size = int(re.search(r"([0-9,]+) bytes$", gather)[1].replace(",", ""))  # type: ignore[index]
    node = next(n for n in run.forward.graph.nodes if collective_of(n))
    assert size == node.meta["val"].numel() * node.meta["val"].element_size()


# -- numbers ---------------------------------------------------------------------------------------
def on_ranks(folder: Path, *tasks: str, ranks: int = 2, seconds: int = 180) -> dict[str, Any]:
    return launched(folder, ranks, *tasks, script="backend_ranks.py", seconds=seconds)


def right(facts: dict[str, Any], where: str, runs: str = "") -> None:
    assert facts["loss"] < LIMIT, where
    assert facts["gradients"][0] < LIMIT, (where, facts["gradients"])
    assert facts["runs"] == runs or not runs, where


@pytest.mark.slow
def test_backends_give_the_numbers_of_one_device(tmp_path: Path) -> None:
    facts = on_ranks(tmp_path, "quick", "callable", "outside", "failing", "again", seconds=240)
    for cell, figures in facts["again"].items():
        scheduled = "" if cell == "limit False" else "Scheduled"
        right(figures, f"made again: {cell}", scheduled)
        assert "limit" not in cell or figures["again"] == [True, True]  # cheap ops, gathers
    for cell, figures in facts["quick"].items():
        right(figures, cell, "Scheduled")
    right(facts["callable"], "callable", "Scheduled")
    assert facts["callable"]["waits"] == [True, True]
    for overlap in ("overlap False", "overlap True"):
        right(facts["outside"][overlap], overlap)
        assert facts["outside"][overlap]["no_grad"] < LIMIT
    start = "RankError: rank 1 of 2 failed while deriving the backward: ArithmeticError: cannot"
    for which in ("0", "1"):
        assert all(text.startswith(start) for text in facts["failing"][which]), facts["failing"]
    assert facts["failing"]["unknown"].startswith("PlanError: torch.compile knows no backend 'none")


@pytest.mark.slow
def test_buckets_of_sums_in_two_levels(tmp_path: Path) -> None:
    """Each as many scatters, sums between nodes and gathers; no part is copied out of one."""
    facts = on_ranks(tmp_path, "levels", ranks=4)["levels"]
    right(facts, "levels", "Scheduled")
    buckets = facts["all_to_all_single"]
    assert 1 <= buckets <= 4
    assert facts["all_gather_into_tensor"] == buckets
    assert facts["all_reduce_"] >= buckets  # the loss may be summed besides
    assert facts["clone"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["None", "aot_eager", "inductor"])
def test_the_matrix_gives_the_numbers_of_one_device(tmp_path: Path, backend: str) -> None:
    facts = on_ranks(tmp_path, backend, seconds=3000)[backend]
    assert len(facts) == 20
    for cell, figures in facts.items():
        right(figures, cell, "Scheduled" if cell.endswith("True") else "")
