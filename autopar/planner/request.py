"""What a plan is asked to be: the request, and the grids that a layout can be given as.

Example: PlanRequest("fsdp", Budget.of(world, "auto", "adamw", "full")) asks for FSDP's layout
within the memory of the world's devices, with every repeated block recomputed; PlanRequest(Grid4D(
x=2, z=4)) for a 4D layout with these sizes. `PlanOptions` makes requests of a caller's arguments,
cli/ reads grids; planner.py and the searches read both. named_layouts.py gives the axes of a grid
their roles.

The formulas of the grids count the words (elements) that one rank receives for one product
Y[m,n] = X[m,k] · W[k,n] forward, by ring collectives; docs/layouts.md has the backward, pictures
and comparisons. A plan raises LayoutError where sizes do not fit the ranks or the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from autopar.cost.memory import Budget, Limit, Optimizer, Recompute
from autopar.ir.plan import Plan
from autopar.ir.plan_file import read_reduce_dtype
from autopar.world import World


@dataclasses.dataclass(frozen=True)
class Grid2D:
    """A mesh of d1 · d2 ranks: d1 on n and d2 on k, swapped at the next product. W never moves; Y
    is all-reduced over the axis on k, dX over the axis on n.

    >>> import autopar, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    >>> plan = autopar.plan(model, 4, (torch.ones(8, 8),), Grid2D(2, 2))
    >>> [row.layout for row in plan.rows[:2]]
    ['x→n, y→k', 'x→k, y→n']

    `first`: "column" puts d1 on n at the first product of a chain, "row" puts it on k. Words, the
    mean of two products: (1-1/d2)·mn/d1 + (1-1/d1)·mk/d2. d2 = 1 is Megatron-LM (arXiv 1909.08053,
    section 3). Raises, when planned, LayoutError where d1 · d2 is not the number of ranks. Source:
    ATP, arXiv 2301.08658.
    """

    d1: int
    d2: int
    first: str = "column"


@dataclasses.dataclass(frozen=True)
class Grid3D:
    """A mesh of x · y · z ranks: one axis on m, one on n, one on k; for every product the search
    chooses which. X and W are gathered, Y is reduce-scattered, and between uses each of them may be
    split over all three axes.

    >>> import autopar, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    >>> plan = autopar.plan(model, 8, (torch.ones(8, 8),), Grid3D(2, 2, 2), outputs="sharded")
    >>> [row.layout for row in plan.rows[:2]]
    ['x→n, y→m, z→k', 'x→k, y→m, z→n']

    Words with x on m, y on n and z on k: (1-1/y)·mk/(xz) + (1-1/x)·kn/(yz) + (1-1/z)·mn/(xy).
    Raises, when planned, LayoutError where x · y · z is not the number of ranks. Source: Agarwal,
    Balle, Gustavson, Joshi, Palkar 1995; for training, arXiv 2105.14450.
    """

    x: int
    y: int
    z: int


@dataclasses.dataclass(frozen=True)
class Grid4D:
    """AxoNN's mesh of x · y · z · data ranks: data and z on m, x on k and y on n, swapped at the
    next product. z splits stored weights too: W is gathered over z, dW is reduce-scattered over it
    and all-reduced over data, Y is all-reduced over x and dX over y.

    >>> import autopar, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    >>> plan = autopar.plan(model, 8, (torch.ones(8, 8),), Grid4D(x=2, z=2, data=2))
    >>> [row.layout for row in plan.rows[:2]]
    ['data→m, z→m, x→k', 'data→m, z→m, x→n']

    Words with r = m/(z·data) rows, the mean of two products: (1-1/z)·kn/(xy) + (1-1/x)·rn/y +
    (1-1/y)·rk/x. Sizes default to 1: data alone is DDP, z alone is FSDP or ZeRO-3 (arXiv
    1910.02054, section 7), y alone is Megatron-LM. Raises, when planned, LayoutError where the
    product of the sizes is not the number of ranks, or data · z does not divide the batch. Source:
    AxoNN, arXiv 2305.13525, its communication model; 2502.08145.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1


@dataclasses.dataclass(frozen=True)
class Grid25D:
    """Tesseract's mesh of d layers of q × q ranks (SUMMA-2.5): depth and row on m, col on n. X and
    W lie in q × q blocks, on each depth other rows of X and the same W.

    >>> import autopar, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    >>> plan = autopar.plan(model, 8, (torch.ones(8, 8),), Grid25D(q=2, d=2))
    >>> [row.layout for row in plan.rows[:2]]
    ['depth→m, row→m, col→n', 'depth→m, row→m, col→n']

    `panels`: SUMMA broadcasts operands in q panels, again in the backward, and no rank holds more
    than two; else operands are gathered in full and saved. The results are equal. Words:
    (1-1/q)·(mk/d + kn)/q. Raises, when planned, LayoutError where d · q² is not the number of
    ranks, q is less than d, or d · q does not divide the batch. Source: arXiv 2105.14500; d = 1:
    van de Geijn and Watts 1997, Optimus (arXiv 2104.05343).
    """

    q: int
    d: int = 1
    panels: bool = True


@dataclasses.dataclass(frozen=True)
class GridHSDP:
    """The degrees that other tools speak of: `replicate` · `shard` · `tensor` ranks. The first two
    split the batch, weights are whole on the first and stored split on the second (FSDP within each
    replica, HSDP), and `tensor` is Megatron's tensor parallelism within each shard.

    >>> import autopar, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    >>> plan = autopar.plan(model, 8, (torch.ones(8, 8),), GridHSDP(shard=4, tensor=2))
    >>> [row.layout for row in plan.rows[:2]]
    ['shard→m, tensor→n', 'shard→m, tensor→k']

    `sequence`: activations between the matmuls of a block are split on their sequence over `tensor`
    (Megatron's sequence parallelism, arXiv 2205.05198, section 4.2.2). Words with r = m/(replicate
    · shard) rows: as Grid4D's with z = shard, x = 1, y = tensor. Raises, when planned, LayoutError
    where the product of the sizes is not the number of ranks, or replicate · shard does not divide
    the batch. Source: FSDP, arXiv 2304.11277, section 3.2; Megatron-LM, arXiv 1909.08053.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: bool = True


@dataclasses.dataclass(frozen=True)
class GridContext:
    """Context parallelism within another layout: in place of each rank of that layout stand
    `context` ranks, which split its sequences. In attention, keys and values are gathered and
    queries stay, or ranks exchange slices of the sequence for heads. Weights are stored split over
    the axis, as in FSDP.

    >>> import autopar, torch
    >>> from torch.nn import functional as F
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed = torch.nn.Embedding(8, 4)
    ...     def forward(self, ids):
    ...         x = self.embed(ids)[:, None]
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True).square().mean()
    >>> ids = torch.zeros(2, 8, dtype=torch.long)
    >>> print(autopar.plan(Net(), 4, (ids,), GridContext(2)).mesh)
    data2.context2

    `within`: the other layout, a name of one axis or a grid. `attention`: which queries a rank
    computes. Under a causal mask early queries see fewer keys than late ones. So with "strided"
    each rank takes a run of queries, then the next rank, and so on over the sequence; with
    "contiguous" it takes one slice. Both receive (1-1/context)·(k + v) words of keys and values,
    backward as many. With "heads" a rank computes whole sequences of its heads and receives
    (1-1/context)·(q + k + v + out)/context words, backward as many. Raises, when planned,
    LayoutError where sizes do not multiply to the ranks, or `context` does not divide the sequence,
    or the heads. Source: Llama 3, arXiv 2407.21783, section 3.3.2; heads: DeepSpeed-Ulysses, arXiv
    2309.14509.
    """

    context: int
    within: str | Grid2D | Grid3D | Grid4D | Grid25D | GridHSDP | GridEP = "fsdp"
    attention: Literal["strided", "contiguous", "heads"] = "strided"


@dataclasses.dataclass(frozen=True)
class GridEP:
    """A mesh of data · expert · tensor ranks for a mixture of experts. Every axis but `tensor`
    splits the batch and the stored weights (FSDP); where experts compute, `expert` splits them: a
    rank holds experts / expert of them, takes in the tokens of its group, and their results are
    reduce-scattered. `tensor` is Megatron's tensor parallelism, inside every expert too.

    >>> import autopar, torch
    >>> class Experts(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up = torch.nn.Parameter(torch.randn(4, 8, 16))
    ...     def forward(self, x):
    ...         return torch.einsum("bed,edf->bef", x, self.up)
    >>> plan = autopar.plan(Experts(), 4, (torch.ones(8, 4, 8),), GridEP(data=2, expert=2))
    >>> [row.layout for row in plan.rows[:1]]
    ['data→m, expert→m']

    Words of a layer of experts with r rows on a rank and d columns: (expert - 1)·r·d gathered and
    as many scattered. `sequence` as in GridHSDP. Raises, when planned, LayoutError where the
    product of the sizes is not the number of ranks, data · expert does not divide the batch, the
    model has no experts, or `expert` does not divide them. Source: GShard, arXiv 2006.16668.
    """

    data: int = 1
    expert: int = 1
    tensor: int = 1
    sequence: bool = True


Grid = Grid2D | Grid3D | Grid4D | Grid25D | GridHSDP | GridEP | GridContext
Within = str | Grid | Mapping[str, "str | Grid"]


@dataclasses.dataclass(frozen=True)
class Stages:
    """A pipeline: the model is cut into `count` stages of consecutive blocks, each on an equal
    share of the ranks. A stage runs micro-batches one after the other and sends its results to the
    next.

    >>> import autopar, torch
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(4))
    ...     def forward(self, x):
    ...         for layer in self.layers:
    ...             x = layer(x).relu()
    ...         return x.square().mean()
    >>> plan = autopar.plan(Net(), 4, (torch.ones(512, 512),), Stages(2, "fsdp"), microbatches=4)
    >>> plan.stage_starts, str(plan.mesh)
    (('layers.2',), 'data2')

    - `count`: "auto" tries every divisor of the ranks and takes the fastest.
    - `within`: the layout of every stage, a name, a grid or a dict.
    - `schedule`: the order of forwards and backwards. With one stage a rank: "gpipe" (arXiv
      1811.06965, section 2.3) and "1f1b" (arXiv 2006.09503, section 3.1). With `rounds` stages a
      rank: "interleaved" (arXiv 2104.04473, section 2.2) and "looped-bfs" (arXiv 2211.05953). With
      backwards in two halves: "zero-bubble" of any rounds (arXiv 2401.10241, sections 2.1 and 5),
      "zbv" (section 6) and "dualpipev" (arXiv 2412.19437) of two. "auto" takes the fastest of 1f1b,
      interleaved, zero-bubble and zbv.

    Blocks are the model's repeated modules, and the cuts make the slowest stage as fast as can be.
    Raises, when planned, LayoutError where `count` does not divide the ranks; PlanError where the
    model has fewer blocks than stages, or a step has no micro-batches, or not as many as the
    schedule takes.
    """

    count: int | Literal["auto"] = "auto"
    within: Within = "auto"
    schedule: str = "1f1b"
    rounds: int = 1

    @staticmethod
    def of(plan: Plan, within: Within) -> Stages:
        """Return the stages that a plan has, to be asked for again."""
        return Stages(plan.pipeline.ranks, within, plan.schedule, plan.rounds)


Layouts = Within | Stages
Outputs = Literal["replicated", "sharded"]
MicrobatchCount = int | Literal["auto"]


# Tokens: "auto" looks for contexts in longer sequences alone, since that takes a search longer, and
# those of shorter ones seldom pay.
_LONG_FOR_AUTO = 8192


def _strided_from(layout: Layouts) -> int | None:
    match layout:
        case "cp":
            return 2
        case "auto":
            return _LONG_FOR_AUTO
        case Stages():
            return _strided_from(layout.within)
        case GridContext():
            return 2 if layout.attention == "strided" else None
        case Mapping():
            numbers = [n for own in layout.values() if (n := _strided_from(own)) is not None]
            return min(numbers, default=None)
    return None


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What the caller of `autopar.plan` asks for.

    `layout` None: the layout of a plan from a file. `budget` None: no memory limit applies, because
    the plan was made to fit before. `reduce_dtype`: the dtype in which gradients of parameters are
    summed, None for their own. `overlap`: plans are compared by a step with communication under
    computation, else by the sum of their seconds. `outputs`: "replicated" on all ranks, or
    "sharded" as they are computed. `replicated_parameters`: parameters are stored unsharded.
    `microbatches`: of a step, one after the other. `stages`: of a pipeline, each of which `layout`
    and `budget` are for. `plan_strided_from`: `strided_from` of a plan from a file,
    or of another call.
    `seeks_microbatches`: other numbers of micro-batches are tried, so that none is a remedy.
    """

    layout: Layouts | None = "auto"
    budget: Budget | None = None
    reduce_dtype: torch.dtype | None = None
    overlap: bool = False
    outputs: Outputs = "sharded"
    replicated_parameters: bool = False
    microbatches: int = 1
    stages: Stages | None = None
    plan_strided_from: int | None = None
    seeks_microbatches: bool = dataclasses.field(default=False, repr=False, compare=False)

    @property
    def strided_from(self) -> int | None:
        """The number of tokens from which on a sequence that causal attention reads may be split by
        stride, None for no sequence.

        >>> [PlanRequest(name).strided_from for name in ("cp", "auto", "fsdp")]
        [2, 8192, None]
        """
        if self.layout is None or self.plan_strided_from is not None:
            return self.plan_strided_from
        return _strided_from(self.layout)

    @property
    def recompute(self) -> str:
        """The mode of recomputation: "auto", "full", "selective", "gathers" or "none"."""
        return "auto" if self.budget is None else self.budget.recompute

    @property
    def memory_bytes(self) -> float | None:
        """The limit on each device, None without one."""
        return None if self.budget is None else self.budget.memory_bytes

    @staticmethod
    def like(plan: Plan, layout: Layouts | None, budget: Budget | None) -> PlanRequest:
        """Return the request for another plan that sums gradients, hides communication and hands
        out its outputs as `plan` does. `budget`: of one device; the request has that of the ranks
        of all stages.
        """
        overlap = plan.overlapped is not None
        outputs: Outputs = "replicated" if plan.replicated_outputs else "sharded"
        summed, strided_from = plan.reduce_dtype, plan.strided_from
        stages = Stages.of(plan, plan.layout) if plan.stage_starts else None
        if budget is not None and budget.memory_bytes is not None:
            of_all = budget.memory_bytes * plan.pipeline.ranks
            budget = dataclasses.replace(budget, memory_bytes=of_all)
        return PlanRequest(
            layout, budget, summed, overlap, outputs, stages=stages, plan_strided_from=strided_from
        )

    def under(self, layout: Layouts) -> PlanRequest:
        """Return the same request for another layout."""
        return dataclasses.replace(self, layout=layout)

    def divided(self, microbatches: int, stages: Stages | None = None) -> PlanRequest:
        """Return the same request for a step in so many micro-batches, with these stages or with
        the layout as it is.
        """
        layout = self.layout if stages is None else stages
        return dataclasses.replace(self, layout=layout, microbatches=microbatches)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """How to plan, as the caller writes it: arguments of `autopar.plan`, `parallelize` and
    `backend`, which explain them.

    >>> PlanOptions("fsdp", recompute="full").request(World.of(4)).recompute
    'full'
    """

    layout: Layouts = "auto"
    memory: Limit = "auto"
    optimizer: Optimizer = "adamw"
    recompute: Recompute = "auto"
    reduce_dtype: torch.dtype | str | None = None
    overlap: bool | Sequence[str] = True
    outputs: Outputs = "replicated"
    microbatches: MicrobatchCount = 1

    def request(self, world: World, replicated_parameters: bool = False) -> PlanRequest:
        """Return the request for a plan on a world. It has one micro-batch: division_search.py
        divides it. Raises PlanError for a value that an option does not have.
        """
        budget = Budget.of(world, self.memory, self.optimizer, self.recompute)
        summed = read_reduce_dtype(self.reduce_dtype)
        return PlanRequest(
            self.layout, budget, summed, bool(self.overlap), self.outputs, replicated_parameters
        )
