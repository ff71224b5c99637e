"""The degrees that other tools take, and what a tool can express of them.

Example: Degrees(replicate=1, shard=8, tensor=8, keeps="shards", recompute=False, …) is FSDP over 8
shards of 8 ranks with tensor parallelism. search.py makes them of a world, tools.py writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.planner.request import GridHSDP
from autopar.world import World

# How weights are held, and the recomputation of autopar that stands for it: whole until their
# backward, as shards that are gathered again for it, or the same with every block computed again.
MODES = ("none", "gathers", "full")


@dataclass(frozen=True)
class Degrees:
    """What a run of another tool is given. The ranks are `replicate` · `shard` · `tensor`; a rank
    group of `tensor` ranks computes `local_batch` rows of `sequence_length` at a time (0: not a
    sequence of tokens). `mode`: one of MODES. `ranks_per_node`: of the world's innermost level.
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

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """The ranks that take different rows of a batch."""
        return self.replicate * self.shard

    @property
    def regathers(self) -> bool:
        """Whether weights are freed after the forward and gathered again in the backward."""
        return self.mode != "none" and self.shard > 1

    @property
    def recomputes(self) -> bool:
        """Whether every block is computed again in the backward."""
        return self.mode == "full"


@dataclass(frozen=True)
class Tool:
    """Another tool: what it can express, and how its options are written.

    `refuses` returns why degrees are none that it has, "" where they are. `sequence`: its tensor
    parallelism splits what stands between products on the sequence. `more_bytes`: what a rank holds
    in addition to a plan of autopar, for the parameters of one rank of `tensor`. `file`: the name
    under which what it writes is kept; `version` that was looked at.
    """

    name: str
    version: str
    file: str
    sequence: bool
    refuses: Callable[[Degrees], str]
    write: Callable[[Degrees], str]
    more_bytes: Callable[[Degrees, int], float] = lambda degrees, parameters: 0.0

    def grid(self, degrees: Degrees) -> GridHSDP:
        """Return the layout of autopar that these degrees are under this tool."""
        sizes = degrees.replicate, degrees.shard, degrees.tensor
        return GridHSDP(*sizes, sequence=self.sequence)


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
