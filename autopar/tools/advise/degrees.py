"""The degrees that other tools take, and what a tool can express of them.

Example: Degrees(replicate=1, shard=8, tensor=8, keeps="shards", recompute=False, …) is FSDP over 8
shards of 8 ranks with tensor parallelism. search.py makes them of a world, tools.py writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.planner.request import GridContext, GridEP, GridHSDP, Layouts, Stages
from autopar.world import World

# How weights are held, and the recomputation of autopar that stands for it: whole until their
# backward, as shards that are gathered again for it, or the same with every block computed again.
MODES = ("none", "gathers", "full")


@dataclass(frozen=True)
class Degrees:
    """What a run of another tool is given. The ranks are `pipeline` · `replicate` · `shard` ·
    `context` · `tensor`; a rank group of `context` · `tensor` ranks computes `local_batch` rows of
    `sequence_length` at a time (0: not a sequence of tokens), `microbatches` times a step. `expert`
    of the `shard` ranks split the experts of a layer. `mode`: one of MODES. `ranks_per_node`: of
    the world's innermost level.
    """

    replicate: int
    shard: int
    tensor: int
    mode: str
    local_batch: int
    sequence_length: int
    ranks_per_node: int
    layers: int
    dtype: str  # of the parameters
    context: int
    expert: int
    pipeline: int  # stages, under 1F1B, each of as many layers
    microbatches: int

    @property
    def ranks(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """The ranks that take different rows of a batch."""
        return self.replicate * self.shard

    @property
    def global_batch(self) -> int:
        """The rows of a step."""
        return self.local_batch * self.data * self.microbatches

    @property
    def holders(self) -> int:
        """The ranks over which a weight is stored in shards, besides those of `tensor`."""
        return self.shard * self.context

    @property
    def regathers(self) -> bool:
        """Whether weights are freed after the forward and gathered again in the backward."""
        return self.mode != "none" and self.holders > 1

    @property
    def recomputes(self) -> bool:
        """Whether every block is computed again in the backward."""
        return self.mode == "full"


@dataclass(frozen=True)
class Tool:
    """Another tool: what it can express, and how its options are written.

    `refuses` returns why degrees are none that it has, "" where they are. `sequence`: its tensor
    parallelism splits what stands between products on the sequence. `context`, `expert`,
    `pipeline`: it can split sequences in attention, experts, and layers into stages. `more_bytes`:
    what a rank holds in addition to a plan of autopar, for the parameters that one rank of a
    stage's `tensor` has. `file`: the name under which what it writes is kept; `version` that was
    looked at.
    """

    name: str
    version: str
    file: str
    sequence: bool
    refuses: Callable[[Degrees], str]
    write: Callable[[Degrees], str]
    more_bytes: Callable[[Degrees, int], float] = lambda degrees, parameters: 0.0
    context: bool = False
    expert: bool = False
    pipeline: bool = False

    def layout(self, degrees: Degrees) -> Layouts:
        """Return the layout of autopar that these degrees are under this tool."""
        grid = self._grid(degrees)
        return grid if degrees.pipeline == 1 else Stages(degrees.pipeline, grid)

    def _grid(self, degrees: Degrees) -> GridHSDP | GridContext | GridEP:
        grid: GridHSDP | GridEP
        if degrees.expert > 1:
            sizes = degrees.shard // degrees.expert, degrees.expert, degrees.tensor
            grid = GridEP(*sizes, sequence=self.sequence)
        else:
            sizes = degrees.replicate, degrees.shard, degrees.tensor
            grid = GridHSDP(*sizes, sequence=self.sequence)
        return grid if degrees.context == 1 else GridContext(degrees.context, grid)


def splits_of(world: World) -> Iterator[tuple[int, int, int]]:
    """Yield (replicate, shard, tensor) for a world: tensor parallelism within a node, and the rest
    all shards, all replicas, or shards within a node and replicas between them.
    """
    inside = world.levels[0].ranks if world.levels else 1
    for tensor in (t for t in range(1, inside + 1) if inside % t == 0):
        data = world.ranks // tensor
        shards = {1, data, inside // tensor, inside}
        for shard in sorted(s for s in shards if data % s == 0):
            yield data // shard, shard, tensor


def stages_of(world: World, layers: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (pipeline, microbatches, shard, tensor) for a world: stages of as many layers each, all
    ranks of a stage that are not for tensor parallelism being shards, and four micro-batches a
    stage, or as many more or fewer as divide the rows of a rank.

    >>> list(stages_of(World.preset("dgx-h100", 16), 4, 64))[-1]
    (4, 16, 1, 4)
    """
    for pipeline in range(2, min(layers, world.ranks) + 1):
        if world.ranks % pipeline or layers % pipeline or world.links:
            continue
        inside = min(world.ranks // pipeline, world.levels[0].ranks if world.levels else 1)
        for tensor in (t for t in range(1, inside + 1) if inside % t == 0):
            shard = world.ranks // pipeline // tensor
            numbers = [n for n in range(2, rows // shard + 1) if rows % (shard * n) == 0]
            if numbers:
                wanted = (n for n in numbers if n >= 4 * pipeline)
                yield pipeline, next(wanted, numbers[-1]), shard, tensor


def contexts_of(degrees: Degrees) -> Iterator[Degrees]:
    """Yield the degrees in which ranks of a node that were shards split the sequence instead.

    >>> degrees = Degrees(1, 8, 2, "none", 1, 8192, 8, 1, "bfloat16", 1, 1, 1, 1)
    >>> list(d.context for d in contexts_of(degrees))
    [2, 4]
    """
    inside = max(1, degrees.ranks_per_node // degrees.tensor)
    for context in range(2, min(degrees.shard, inside) + 1):
        if degrees.shard % context == 0 and inside % context == 0:
            yield replace(degrees, shard=degrees.shard // context, context=context)


def experts_of(degrees: Degrees, experts: Sequence[int]) -> Iterator[Degrees]:
    """Yield the degrees in which shards split layers of so many experts, all of them; none with
    replicas, which no layout of autopar has beside experts.

    >>> degrees = Degrees(1, 8, 1, "none", 1, 8192, 8, 1, "bfloat16", 1, 1, 1, 1)
    >>> list(d.expert for d in experts_of(degrees, (4,)))
    [2, 4]
    """
    if not experts or degrees.replicate > 1:
        return
    for expert in range(2, min(degrees.shard, *experts) + 1):
        if not any(count % expert for count in (degrees.shard, *experts)):
            yield replace(degrees, expert=expert)
