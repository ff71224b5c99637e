"""The time of a training step of a GPT on AxoNN's grids, from plans of a few layers.

Layers repeat: plans of two and of three layers differ by one, and a model of any depth is the rest
plus so many layers. What a layer moves is a formula in the sizes of model and mesh, read off one
plan, so every grid on so many ranks is rated at once; the best few are planned for what they
compute.

What is assumed of a run (the scripts in the authors' Megatron-AxoNN repository): bf16, every layer
recomputed, attention in one kernel. What fits decides whether gathered weights are kept for the
whole step and in how many parts the batch is run (`held`); what may hide under what: see
`Step.exposed`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

import autopar
from autopar import Grid2D, Grid4D, Plan, World
from autopar.cost.communication import collective_cost
from autopar.cost.formula import Formula, Term
from autopar.cost.pipeline import StageSeconds, simulate_pipeline
from autopar.ir.layout import Traffic
from autopar.ir.mesh import Axis, Mesh, factorings
from autopar.ir.pipeline_schedule import actions, pipeline_of
from autopar.tools.decoders import Gpt, Sizes
from autopar.tools.targets import NAMED

# arXiv 2104.04473, table 1
MODELS = {
    **NAMED,
    "gpt-39b": Sizes("gpt", 48, 8192, 64, 51200, 2048),
    "gpt-145b": Sizes("gpt", 80, 12288, 96, 51200, 2048),
    "gpt-310b": Sizes("gpt", 96, 16384, 128, 51200, 2048),
    "gpt-1t": Sizes("gpt", 128, 25600, 160, 51200, 2048),
}
SEQUENCE = 2048
FEW = 2  # grids that are planned


@dataclass(frozen=True)
class Machine:
    """A preset of autopar with the FLOP/s of matrix products measured on it, and the peak that its
    percentages are of (both from arXiv 2502.08145).
    """

    preset: str
    measured: float
    peak: float

    def world(self, ranks: int) -> World:
        world = World.preset(self.preset, ranks)
        reached = {"bfloat16": ((1.0, self.measured / self.peak),)}
        rates = {**world.device.flop_per_s, "bfloat16": self.peak}
        device = dataclasses.replace(world.device, flop_per_s=rates, efficiency=reached)
        return dataclasses.replace(world, device=device)


PERLMUTTER = Machine("perlmutter", 280e12, 312e12)
FRONTIER = Machine("frontier", 125e12, 191.5e12)
ALPS = Machine("alps", 813e12, 989e12)
DGX_A100 = Machine("dgx-a100", 280e12, 312e12)  # the same chip as Perlmutter's


@dataclass(frozen=True)
class Job:
    """A model (its name in tools/targets.py) on so many ranks, samples of 2048 tokens a step."""

    model: str
    machine: Machine
    ranks: int
    batch: int

    @property
    def sizes(self) -> Sizes:
        return MODELS[self.model]

    @property
    def flops(self) -> float:
        """Of a step with recomputation: 96·B·s·l·h²·(1 + s/6h + V/16lh), arXiv 2104.04473."""
        s, size = SEQUENCE, self.sizes
        layers, h = size.layers, size.width
        more = s / (6 * h) + size.vocabulary / (16 * layers * h)
        return 96 * self.batch * s * layers * h**2 * (1 + more)

    def of_peak(self, seconds: float) -> float:
        return self.flops / seconds / self.ranks / self.machine.peak


# -- what moves ------------------------------------------------------------------------------------
def planned(sizes: Sizes, layers: int, world: World, batch: int, grid: object) -> Plan:
    with torch.device("meta"):
        model = Gpt(dataclasses.replace(sizes, layers=layers)).to(torch.bfloat16)
        tokens = torch.zeros(batch, SEQUENCE, dtype=torch.int64)
    inputs = (tokens, tokens.clone())  # what fits is decided by `held`: a few layers do not tell
    return autopar.plan(model, world, inputs, grid, memory=1e18, recompute="none")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Moved:
    """What one layer moves, and all the rest of the model."""

    layer: Formula
    rest: Formula


ALL_AXES = Grid4D(2, 2, 2, 2)


@lru_cache
def moved(grid: Grid4D | Grid2D = ALL_AXES) -> Moved:
    """By difference of two depths, on a grid that has all the axes; for any GPT, by its sizes."""
    world = PERLMUTTER.world(math.prod(v for v in vars(grid).values() if isinstance(v, int)))
    two, three = (planned(MODELS["gpt-80b"], n, world, 1024, grid).formula() for n in (2, 3))
    layer = _difference(three, two, 1)
    return Moved(layer, _difference(two, layer, 2))


def _difference(first: Formula, other: Formula, times: int) -> Formula:
    counts = Counter({dataclasses.replace(t, count=1): t.count for t in first.terms})
    for term in other.terms:
        counts[dataclasses.replace(term, count=1)] -= times * term.count
    assert min(counts.values()) >= 0, "a layer moves what the whole does not"
    terms = tuple(dataclasses.replace(t, count=n) for t, n in counts.items() if n)
    return dataclasses.replace(first, terms=terms)


def kind_of(term: Term) -> str:
    """Which part of a 4D step a collective is."""
    if term.kind == "all_gather":
        return "gather"
    if term.kind == "reduce_scatter":
        return "scatter"
    if not term.backward:
        return "forward"
    return "gradients" if "data" in term.axes else "backward"


Sums = dict[str, float]  # seconds of collectives by kind
KINDS = ("gather", "scatter", "forward", "backward", "gradients")


def sums(formula: Formula, meshes: list[Mesh], job: Job) -> list[Sums]:
    """Of every mesh: the bytes of all at once, the price of each."""
    world, size = job.machine.world(job.ranks), job.sizes
    named: dict[str, Any] = {
        f"G{axis}": [mesh.sizes[axis] for mesh in meshes] for axis in meshes[0].names
    }
    named |= {"h": size.width, "f": 4 * size.width, "v": size.vocabulary, "b": job.batch}
    named |= {"heads": size.heads, "d": size.width // size.heads, "s": SEQUENCE}
    known = {symbol.name for symbol in formula.sizes}
    wholes = formula.wholes(**{name: value for name, value in named.items() if name in known})
    totals: list[Sums] = [dict.fromkeys(KINDS, 0.0) for _ in meshes]
    for term, whole in zip(formula.terms, wholes, strict=True):
        for each, mesh, amount in zip(totals, meshes, np.broadcast_to(whole, len(meshes))):
            traffic = Traffic(term.kind, float(amount))  # type: ignore[arg-type]
            price = collective_cost(traffic, term.axes, mesh, 1, world)
            each[kind_of(term)] += term.count * price.seconds
    return totals


def mesh_of(grid: Grid4D) -> Mesh:
    """As autopar lays it out: y innermost."""
    axes = ((name, getattr(grid, name)) for name in ("data", "z", "x", "y"))
    return Mesh(tuple(Axis(name, size) for name, size in axes))


def grids(job: Job, smallest: int) -> list[Grid4D]:
    """Every grid of so many ranks that divides the model, of `smallest` or more tensor ranks."""
    candidates = []
    for x, y, z, data in factorings(job.ranks, 4):
        fits = job.sizes.width % (x * y * z) == 0 and job.sizes.heads % y == 0
        if x * y * z >= smallest and job.batch % (data * z) == 0 and fits:
            candidates.append(Grid4D(x=x, y=y, z=z, data=data))
    return candidates


# -- memory ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Execution:
    """How a step is run: in so many parts of the batch, one after the other, and whether gathered
    weights are kept until the end of the step.
    """

    microbatches: int
    saves_weights: bool


def memory_bytes(job: Job, grid: Grid4D, execution: Execution) -> float:
    """Bytes a rank: 16 a parameter (bf16 and its gradient, float32 and two moments), weights as
    gathered (all, or two layers'), two layers' whole gradients, every layer's input, what one layer
    (10 + 24/t bytes a token and feature, arXiv 2205.05198, with flash attention) and the logits
    keep.
    """
    size, tensor = job.sizes, grid.x * grid.y
    h, layer = size.width, 12 * size.width**2
    parameters = size.layers * layer + (2 * size.vocabulary + SEQUENCE) * h
    tokens = job.batch / (grid.data * grid.z * execution.microbatches) * SEQUENCE
    gathered = 2 * (parameters if execution.saves_weights else 2 * layer) / tensor
    inputs = 2 * size.layers * tokens * h / grid.x
    working = tokens * (h * (10 / grid.x + 24 / grid.y) + 6 * size.vocabulary / grid.y)
    return 16 * parameters / (tensor * grid.z) + gathered + 4 * layer / tensor + inputs + working


def executions(job: Job, grid: Grid4D) -> list[Execution]:
    """Those that fit into a device's memory: the fewest parts with the weights kept, and not."""
    samples = job.batch // (grid.data * grid.z)
    capacity = job.machine.world(job.ranks).device.memory_bytes
    candidates = []
    for saves in (True, False):
        parts = [Execution(n, saves) for n in range(1, samples + 1) if samples % n == 0]
        candidates += [
            execution for execution in parts if memory_bytes(job, grid, execution) <= capacity
        ][:1]
    return candidates


# -- a step ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """A modelled step on a grid: seconds of one layer's forward computation, of the rest of the
    model forward and backward, and of the collectives of both.
    """

    grid: Grid4D
    execution: Execution
    layers: int
    forward: float
    rest: float
    layer_sums: Sums
    rest_sums: Sums

    @property
    def compute(self) -> float:
        """Every layer runs forward twice; one forward is a third of both, to 0.17 attentions."""
        return 4 * self.layers * self.forward + self.rest

    def exposed(self, overlap: bool) -> float:
        """Seconds in which only links work; a bound, for nothing slows what it hides under.

        Forward all-reduces are on the critical path, in both runs. With `overlap`: a weight's
        gather hides under the forward of the layer before it, an all-reduce of dX under dW's
        product (a quarter of the layer's work with recomputation), the scatter of dW under the
        backward. The sum over data comes at the end.
        """
        moving, parts = self.layer_sums, self.execution.microbatches
        gathers = 1 if self.execution.saves_weights else 2 * parts
        window = self.forward / parts if overlap else 0.0
        backward, scatter = moving["backward"] / parts, moving["scatter"]
        late = max(backward - window, backward + scatter - 2 * window, 0.0)
        hideable = gathers * max(moving["gather"] - window, 0.0) + parts * late
        every = 2 * moving["forward"] + hideable + moving["gradients"]
        return self.layers * every + sum(self.rest_sums.values())

    def seconds(self, overlap: bool = True) -> float:
        return self.compute + self.exposed(overlap)


@lru_cache
def computed(job: Job, grid: object) -> tuple[float, float]:
    """Seconds of computation of (one layer, the rest), forward and backward, from two plans."""
    world = job.machine.world(job.ranks)
    seconds = []
    for layers in (2, 3):
        plan = planned(job.sizes, layers, world, job.batch, grid)
        moving = sum(c.seconds for c in plan.collectives)
        seconds.append(sum(row.seconds for row in plan.rows) - moving)
    layer = seconds[1] - seconds[0]
    return layer, seconds[0] - 2 * layer


def steps(job: Job, among: list[Grid4D]) -> list[Step]:
    """The fastest of these grids, fastest first; only they are planned."""
    meshes = [mesh_of(grid) for grid in among]
    layer, rest = sums(moved().layer, meshes, job), sums(moved().rest, meshes, job)
    candidates = [
        (index, execution)
        for index, grid in enumerate(among)
        for execution in executions(job, grid)
    ]
    like = computed(job, among[0])

    def step_of(index: int, execution: Execution, computing: tuple[float, float]) -> Step:
        forward, other = computing[0] / 3, computing[1]
        grid, layers = among[index], job.sizes.layers
        return Step(grid, execution, layers, forward, other, layer[index], rest[index])

    candidates.sort(key=lambda candidate: step_of(candidate[0], candidate[1], like).seconds())
    shapes = dict.fromkeys((among[index].x, among[index].y) for index, _ in candidates)
    few = list(shapes)[:FEW]  # what is computed depends on these two axes more than on the others
    likely = [
        next(c for c in candidates if (among[c[0]].x, among[c[0]].y) == shape) for shape in few
    ]
    best = [step_of(index, execution, computed(job, among[index])) for index, execution in likely]
    return sorted(best, key=lambda step: step.seconds())


@lru_cache
def best(job: Job, smallest: int = 1) -> Step:
    return steps(job, grids(job, smallest))[0]


def pipelined(job: Job, tensor: int, stages: int) -> float:
    """Seconds of a step of Megatron-LM: one tensor axis, data, and stages under 1F1B, with
    micro-batches of one sample (arXiv 2104.04473): the simulated schedule, as a plan with stages
    has it. The head is on the last stage; each tensor rank sends its slice of a border tensor.
    """
    data = job.ranks // (tensor * stages)
    inner = Grid4D(y=tensor, data=data * stages)  # a stage's groups lie as these do
    mesh = [mesh_of(inner)]
    (layer,), (rest,) = sums(moved().layer, mesh, job), sums(moved().rest, mesh, job)
    both, outside = computed(job, inner)  # forward and backward; the latter is twice the former
    microbatches = job.batch // data
    # a stage has so many times fewer layers than the model, on so many times more rows
    times = job.sizes.layers / microbatches
    forward = times * (both / 3 + layer["forward"])
    backward = times * (both + layer["forward"] + layer["backward"])  # with the forward once more
    gradients = (layer["gradients"] * job.sizes.layers + rest["gradients"]) / stages
    send = _border_seconds(job, tensor)
    own = [StageSeconds(forward, backward, gradients, send) for _ in range(stages)]
    head = stages / microbatches
    own[-1] = own[-1]._replace(
        forward=forward + head * (outside / 3 + rest["forward"]),
        backward=backward + head * (outside * 2 / 3 + rest["backward"]),
    )
    pipeline = pipeline_of("1f1b", stages, 1)
    return simulate_pipeline(pipeline, actions("1f1b", pipeline, microbatches), own).seconds


def _border_seconds(job: Job, tensor: int) -> float:
    """Seconds that the activations of a sample take to the next stage, where all ranks of a machine
    send at once.
    """
    world, size = job.machine.world(job.ranks), job.sizes
    *inside, outer = world.levels
    share = outer.uplink(math.prod(level.ranks for level in inside))
    share /= math.prod(level.ranks for level in inside)
    sent = SEQUENCE * size.width * torch.bfloat16.itemsize / tensor
    return world.launch_s + outer.latency_s + sent / share
