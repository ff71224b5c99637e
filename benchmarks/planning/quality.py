"""What plans move, beside what is known of others on the same work.

    python -m benchmarks.planning.quality [--json quality.json]

1. Four layers of Llama-3-8B's widths on the mesh (32, 8), batch 64 of 4096 tokens, bfloat16, sums
   of gradients in float32, no product computed twice. The peer's plan (Meta's AutoParallel) moves
   3.338 GB a rank and step in its graphs, 2.954 of them before it gathers weights again in the
   backward. Ours keeps gathered weights, which fit here, and so gathers them once; what gathering
   them twice would come to is shown too. One plan is chosen for H100s by this repository's model,
   one by the peer's own prices (`by_peers_prices`), of which both are given the seconds.
2. One layer at GPT-2's width, batch 32 of 1024, float32, on four H100s: the peer's moves 42.5 MB.
3. A GPT of 17 M parameters on two nodes of two ranks: bytes over the link between the nodes, beside
   67 MB of gradients that DDP sends across when it adds up within a node first.

4. The same GPT's plans by the simulated step, in which communication runs under computation, beside
   their summed seconds.

Wire bytes are those of the emitted graph: (n-1)/n of the whole in an all-gather or a
reduce-scatter, twice that in an all-reduce, (n-1)/n of a rank's part in an all-to-all.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autopar import World
from autopar.cost.activations import regather_weights
from autopar.cost.algorithms import flat_algorithms
from autopar.cost.communication import SentCollective, sent_collectives
from autopar.cost.network import halves, pattern, size
from autopar.cost.summary import summary_rows
from autopar.ir.layout import SUMS
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Value
from autopar.passes import emit_program, trace
from autopar.passes.pass_manager import PassManager
from autopar.planner.planner import analyse, fastest_plans
from autopar.planner.request import PlanRequest
from autopar.planner.simulate import simulate_plan
from autopar.tools.decoders import GptBlock
from autopar.tools.targets import NAMED
from autopar.world import Device, Level, Measured
from autopar.world.machines import (
    CPU_BYTES_PER_S,
    CPU_FLOP_PER_S,
    GLOO_BYTES_PER_S,
    GLOO_LAUNCH_S,
    GLOO_NETWORK_S,
    GLOO_S,
)
from benchmarks.models import SUBJECTS
from benchmarks.planning.__main__ import ModelAndInputs, chosen, h100, named

MESH = Mesh.parse("x32.y8")
PEER_GB, PEER_ONCE_GB = 3.338, 2.954  # with the gathers of the backward, and without
PEER_BLOCK_MB = 42.5
TWO_LEVEL_MB = 67.0  # DDP's gradients, added up within a node first

# torch's prices (torch/distributed/tensor/_collective_utils.py, MeshTopoInfo), which the peer
# takes: bytes/s and seconds a hop within a host and between hosts, seconds to start. That of an
# all-to-all is the peer's own (cost_models/collective_runtime_estimation.py): times five.
RATES = {"y": 87.7 * 2**30, "x": 0.22 * 87.7 * 2**30}
HOPS_S = {"y": 0.6e-6, "x": 2.7e-6}
START_S, ALL_TO_ALL = 6.6e-6, 5.0


@dataclass(frozen=True)
class Planned:
    """A plan with the graph that it is emitted as. `in_blocks`: the weights of products in blocks,
    which recompute="gathers" gathers twice.
    """

    program: Program
    plan: Plan
    in_blocks: frozenset[Value]

    @property
    def sent(self) -> Iterator[tuple[SentCollective, float]]:
        """Every collective with the bytes that a rank sends."""
        for move, collective in zip(
            sent_collectives(self.program), self.plan.collectives, strict=True
        ):
            yield move, collective.bytes

    def gigabytes(self) -> dict[str, float]:
        """What a rank sends, by what it is for; the peer counts an all-to-all as we do."""
        sent_by_purpose: dict[str, float] = defaultdict(float)
        for move, sent in self.sent:
            sent_by_purpose[self._purpose(move)] += sent / 1e9
        return sent_by_purpose

    def _purpose(self, move: SentCollective) -> str:
        if move.inside or move.node.meta["value"][0] not in self.plan.stored:
            return "activations"
        return "sums of gradients" if move.traffic.collective in SUMS else "gathers of weights"

    def blocks_gathers(self) -> float:
        """GB of the gathers that recompute="gathers" repeats."""
        several = ((m, sent) for m, sent in self.sent if not m.backward)
        gathers = (sent for m, sent in several if tuple(m.node.meta["value"]) in self.in_blocks)
        return sum(gathers) / 1e9


def planned(
    example: ModelAndInputs,
    world: World,
    mesh: str | None,
    dtype: torch.dtype | None = None,
    again: bool = False,
) -> Planned:
    """`again`: searched as if products' weights in blocks were gathered again in the backward."""
    model, inputs = example
    request = PlanRequest("auto", reduce_dtype=dtype)
    program = analyse(PassManager(), trace.trace(model, inputs, {}), request)
    fetching = regather_weights(program)
    program = emit_program(chosen(fetching if again else program, world, mesh), world)
    return Planned(program, summary_rows(program, world), fetching.counting.again)


# -- the work --------------------------------------------------------------------------------------
LINK_BYTES_PER_S = 400e6 / 8


def gpt2_block() -> ModelAndInputs:
    """One layer at GPT-2's width in float32."""
    with torch.device("meta"):
        return GptBlock(NAMED["gpt2"]), (torch.zeros(32, 1024, 768),)


def small_gpt() -> ModelAndInputs:
    """The GPT of the step-time benchmark: 17 M parameters, 67 MB of gradients."""
    with torch.device("meta"):
        tokens = torch.zeros(16, 128, dtype=torch.int64)
        return SUBJECTS["gpt"].make(), (tokens, tokens.clone())


def cluster(link: float = LINK_BYTES_PER_S, node: float = GLOO_BYTES_PER_S) -> World:
    """2 nodes × 2 ranks with gloo."""
    levels = Level(2, node, GLOO_S), Level(2, link, GLOO_NETWORK_S)
    memory = CPU_BYTES_PER_S if node == GLOO_BYTES_PER_S else node
    device = Device("cpu", {"float32": CPU_FLOP_PER_S}, 4e9, memory)
    return World(levels, device, "gloo", "2x2", GLOO_LAUNCH_S)


# -- the peer's prices -----------------------------------------------------------------------------
def by_peers_prices() -> World:
    """32 hosts of 8 H100s on which each collective takes what the peer says."""
    levels = Level(8, RATES["y"], HOPS_S["y"]), Level(32, RATES["x"], HOPS_S["x"], per="rank")
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    measured = tuple(_line(kind, axes) for kind in kinds for axes in (("x",), ("y",), ("x", "y")))
    return replace(
        h100(256)(), levels=levels, launch_s=START_S, measured=measured, name="by the peer's prices"
    )


def _line(kind: str, axes: tuple[str, ...]) -> Measured:
    """One axis after the other, x first, as the peer has no groups over both: on x a gather or a
    scatter has the part that y leaves.
    """
    digits, start, rate = pattern(MESH, axes), 0.0, 0.0
    for place, axis in enumerate(axes):
        ranks = MESH.sizes[axis]
        hops = (ranks - 1) * (2 if kind == "all_reduce" else 1)
        part = (
            1.0 if kind == "all_reduce" else 1 / math.prod(MESH.sizes[a] for a in axes[place + 1 :])
        )
        if kind == "all_to_all":
            part = 1 / size(digits)
        times = ALL_TO_ALL if kind == "all_to_all" else 1.0
        start += times * (START_S + hops * HOPS_S[axis])
        rate += times * part * hops / ranks / RATES[axis]
    return Measured(kind, digits, size(digits), start, rate)


def peers_seconds(sends: Iterable[SentCollective], world: World) -> float:
    """Of all collectives, by the peer's prices."""
    total = 0.0
    for move in sends:
        algorithm = flat_algorithms(world, move.traffic.collective, pattern(MESH, move.axes))[0]
        total += algorithm.seconds(move.traffic.elements * move.element_bytes)
    return total


# -- over the link ---------------------------------------------------------------------------------
def over_the_link(result: Planned) -> float:
    """Bytes that leave a node of `cluster` in a step, by the levels that the graph's collectives go
    in: seconds on one where a byte over the link takes a second and all else nothing.
    """
    counting, total = cluster(1.0, 1e24), 0.0
    for move, _ in result.sent:
        kind, digits = move.traffic.collective, pattern(result.plan.mesh, move.axes)
        whole = float(move.traffic.elements * move.element_bytes)
        inside = move.node.kwargs.get("backward_inside" if move.backward else "inside", ())
        for ranks in [inside] if isinstance(inside, int) else inside:  # type: ignore[union-attr]
            assert isinstance(ranks, int)
            within, digits = next((a, b) for a, b in halves(digits) if size(a) == ranks)
            assert not _leaves_a_node(within)
            whole /= ranks  # what a rank has once its node has scattered goes across
        if _leaves_a_node(digits):
            total += flat_algorithms(counting, kind, digits)[0].s_per_byte * whole
    return total


def _leaves_a_node(digits: Any) -> bool:
    return any(count * stride > 2 for count, stride in digits)


# -- the report ------------------------------------------------------------------------------------
def llama() -> dict[str, dict[str, float]]:
    """Of the plan for H100s and the one by the peer's prices: GB, seconds, and the proven gap."""
    theirs, figures = by_peers_prices(), {}
    for name, world, again in (
        ("chosen for H100s", h100(256)(), False),
        ("chosen by the peer's prices", theirs, False),
        ("the same, to gather again", theirs, True),
    ):
        result = planned(named("llama3-8b", 64, 4)(), world, str(MESH), torch.float32, again)
        sent = result.gigabytes()
        total = sum(sent.values())
        figures[name] = {
            **{purpose: sent[purpose] for purpose in sorted(sent)},
            "GB": total,
            "of 2.954": total / PEER_ONCE_GB,
            "of 3.338": total / PEER_GB,
            "blocks gathering twice": total + result.blocks_gathers(),
            "all weights twice": total + sent["gathers of weights"],
            "ms a step, as chosen": 1e3 * result.plan.seconds,
            "ms of collectives, peer's": 1e3 * peers_seconds((m for m, _ in result.sent), theirs),
            "gap": result.plan.gap,
        }
    return figures


def gpt() -> dict[str, float]:
    result = planned(small_gpt(), cluster(), None)
    crossing = over_the_link(result) / 1e6
    return {"MB": crossing, "of 67": crossing / TWO_LEVEL_MB, "ms": 1e3 * result.plan.seconds}


def block() -> dict[str, float]:
    result = planned(gpt2_block(), h100(4)(), None)
    sent = result.plan.comm_bytes / 1e6
    return {"MB": sent, "of 42.5": sent / PEER_BLOCK_MB, "ms": 1e3 * result.plan.seconds}


def hidden() -> dict[str, dict[str, float]]:
    """The GPT's plans, the shortest simulated step first; one of them has the least sum."""
    model, inputs = small_gpt()
    program = analyse(PassManager(), trace.trace(model, inputs, {}))
    world = cluster()
    plans = fastest_plans(program, world, PlanRequest(overlap=True))
    return {
        f"plan {number}": {
            "step, ms": 1e3 * simulate_plan(contender.program, world),
            "sum, ms": 1e3 * contender.plan.seconds,
        }
        for number, contender in enumerate(plans, 1)
    }


def table(rows: dict[str, dict[str, float]], title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for name in next(iter(rows.values())):
        shown.add_column(name, justify="right")
    for name, row in rows.items():
        shown.add_row(name, *(f"{value:.4g}" for value in row.values()))
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    work, layer, link, steps = llama(), block(), gpt(), hidden()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table(work, "4 layers of Llama-3-8B on (32, 8): GB a rank and step"))
    console.print(table({"auto": layer}, "GPT-2's layer on 4 H100s"))
    console.print(table({"auto": link}, "GPT on 2 × 2 ranks, over the link"))
    console.print(table(steps, "GPT on 2 × 2 ranks, with communication under computation"))
    if options.json:
        facts = {
            "Llama-3-8B": work,
            "GPT-2 block": layer,
            "GPT over the link": link,
            "hidden": steps,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    more = work["chosen by the peer's prices"]["of 3.338"] > 1, layer["MB"] >= PEER_BLOCK_MB + 0.05
    return int(any(more) or link["of 67"] > 1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
