"""The collectives of the literature's layouts, derived by hand: what one training step of four
models moves, for test_collectives_golden.py.

The lists are (phase, kind, axes, words, times). Words are those of the whole value on its axes
(the B of the ring formulas): what an all-gather makes, what a reduce-scatter takes, what an
all-reduce takes and makes. Sizes: m rows (batch · sequence), h and i widths, v words in the
vocabulary.

All models begin with an embedding, so that the first product has a dX and its X is no user's
input, and end with a mean square, through which partial sums cannot pass.

chain: x += down(gelu(up(x))), twice, no biases: products (m, h→i) and (m, i→h).
block: x += out(attention(qkv(norm(x)))); x += down(gelu(up(norm(x)))), biases everywhere: products
       (m, h→3h), (m, h→h), (m, h→4h), (m, 4h→h). A norm over a split h sums 2 numbers a row forward
       (its mean, then its variance), and 2 at once backward.
experts, einsum: x += down(relu(up(x))) of each token's experts, of which a router (m, h→e) chooses:
       as one op that takes k of e for each token, or by einsum over the places (groups, e, c) of
       c tokens at each expert; no biases.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.planner.request import (
    Grid2D,
    Grid3D,
    Grid4D,
    Grid25D,
    GridContext,
    GridEP,
    Layouts,
)
from moe_models import CAPACITY

BATCH, SEQUENCE = 16, 32
m, h, i, v = BATCH * SEQUENCE, 64, 128, 1024
e, k = 8, 2  # experts, and how many a token goes to
FORWARD, BACKWARD = "forward", "backward"

Line = tuple[str, str, str, float, int]


def mirrored(lines: Iterable[Line]) -> list[Line]:
    """Gathers and scatters with those of the backward pass: a gathered value's gradient is
    scattered, a scattered one's is gathered.
    """
    other = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
    lines = list(lines)
    return [*lines, *((BACKWARD, other[kind], *rest) for _, kind, *rest in lines)]  # type: ignore[misc]


def loss(axes: str) -> Line:
    """The mean over rows and columns that these axes split: one number."""
    return FORWARD, "all_reduce", axes, 1, 1


# -- one axis --------------------------------------------------------------------------------------
CHAIN_WEIGHTS = [(h * i, 4), (v * h, 1)]
BLOCK_WEIGHTS = [(3 * h * h, 1), (h * h, 1), (4 * h * h, 2), (v * h, 1)]
BLOCK_VECTORS = [(3 * h, 1), (4 * h, 1), (h, 6)]  # biases of qkv and up; norms and other biases


def ddp(parameters: list[tuple[int, int]]) -> list[Line]:
    """All ranks split m, weights are whole: nothing forward, a sum of every gradient backward."""
    sums = [(BACKWARD, "all_reduce", "data", size, n) for size, n in parameters]
    return [*sums, loss("data")]


def fsdp(parameters: list[tuple[int, int]], axis: str = "data") -> list[Line]:
    """All ranks split m, weights are stored split: gathered before use, gradients scattered. What
    was gathered is kept for the backward pass.
    """
    gathers = [(FORWARD, "all_gather", axis, size, n) for size, n in parameters]
    return [*mirrored(gathers), loss(axis)]


def cp(parameters: list[tuple[int, int]], attentions: int) -> list[Line]:
    """All ranks split the sequence, weights are FSDP's; keys and values are gathered, and their
    gradients scattered.
    """
    keys_and_values = (FORWARD, "all_gather", "context", m * h, 2 * attentions)
    gathered = mirrored([keys_and_values]) if attentions else []
    return [*fsdp(parameters, "context"), *gathered]


def heads_of_context(parameters: list[tuple[int, int]]) -> list[Line]:
    """Ulysses: as cp, but ranks exchange their parts of the sequence for heads: q, k and v before
    attention, its result after it, and their gradients.
    """
    exchanges = [(phase, "all_to_all", "context", m * h, 4) for phase in (FORWARD, BACKWARD)]
    return [*fsdp(parameters, "context"), *exchanges]


def megatron(products: int) -> list[Line]:
    """Of every two products the first splits n, the second k: one sum of Y forward, one of dX
    backward for each pair. The embedding, which has no inner width but v, is whole on all ranks.
    """
    return [(phase, "all_reduce", "tp", m * h, products // 2) for phase in (FORWARD, BACKWARD)]


def megatron_sp(products: int, norm_vectors: int) -> list[Line]:
    """Megatron, but the residual stream is split on its sequence: each sum becomes a scatter and a
    gather. Embedding and norms see every rank's part of the rows, so theirs is FSDP's traffic.
    """
    gathers: list[Line] = [
        (FORWARD, "all_gather", "tp", m * h, products // 2),
        (FORWARD, "reduce_scatter", "tp", m * h, products // 2),
        (FORWARD, "all_gather", "tp", v * h, 1),
        (FORWARD, "all_gather", "tp", h, norm_vectors),
    ]
    return [*mirrored(line for line in gathers if line[-1]), loss("tp")]


# -- two axes --------------------------------------------------------------------------------------
def plane(outer: str, inner: str, o: int, n: int, rows: float = m) -> dict[str, list[Line]]:
    """ATP's and 4D's part in the plane: axis `outer` (size o) splits h, axis `inner` (size n) the
    widths within, i or 3h or 4h. A product is summed over the axis of its k: Y of up over outer, of
    down over inner. dX is summed over the axis of n: of up over inner, of down over outer. So each
    sum is of rows · width / (size of the other axis). The embedding's v lies on inner: one sum.
    Attention splits its heads over inner, and is repeated over outer.
    """
    wide, narrow = rows * h / n, rows * h / o  # of a width h within, and of the residual stream
    of_i = rows * i / n
    embedding: Line = (FORWARD, "all_reduce", inner, narrow, 1)
    return {
        "chain": [
            embedding,
            (FORWARD, "all_reduce", outer, of_i, 2),  # Y of up
            (FORWARD, "all_reduce", inner, narrow, 2),  # Y of down
            (BACKWARD, "all_reduce", outer, of_i, 2),  # dX of down
            (BACKWARD, "all_reduce", inner, narrow, 2),  # dX of up
        ],
        "block": [
            embedding,
            (FORWARD, "all_reduce", outer, 3 * wide, 1),  # Y of qkv
            (FORWARD, "all_reduce", outer, 4 * wide, 1),  # Y of up
            (FORWARD, "all_reduce", inner, narrow, 2),  # Y of out and down
            (BACKWARD, "all_reduce", inner, narrow, 2),  # dX of qkv and up
            (BACKWARD, "all_reduce", outer, wide, 1),  # dX of out
            (BACKWARD, "all_reduce", outer, 4 * wide, 1),  # dX of down
            (FORWARD, "all_reduce", outer, rows, 4),  # norms
            (BACKWARD, "all_reduce", outer, 2 * rows, 2),
        ],
    }


def atp(d1: int, d2: int, first: str, model: str) -> list[Line]:
    """Column first: d1 (axis x) takes n at the first product, so d2 (y) holds the residual stream;
    row first: the other way round. Parameters lie where they are used: nothing moves.
    """
    column = first == "column"
    outer, inner = ("y", "x") if column else ("x", "y")
    sizes = (d2, d1) if column else (d1, d2)
    return [*plane(outer, inner, *sizes)[model], loss(outer)]


# -- three axes ------------------------------------------------------------------------------------
def three_d(x: int, y: int, z: int, model: str) -> list[Line]:
    """x splits m throughout. Up: y splits k, z splits n; down the other way round. All three
    matrices are spread over all axes, so each product gathers X over the axis of n, W over the axis
    of m, and scatters Y over the axis of k; dX, dW and dY mirror that.

    The stream lies on rows by x and on h by y and z: so do the norms, which sum m / x rows over y
    and z. Vectors of norms are gathered over x; a bias is added once, its gradient summed over x.
    The embedding splits v on x: its rows are parts of sums, scattered over x.
    """
    stream, within = m * h / (x * y), m * h / (x * z)
    embedding: Line = (FORWARD, "reduce_scatter", "x", m * h / (y * z), 1)
    if model == "chain":
        lines: list[Line] = [
            embedding,
            (FORWARD, "all_gather", "z", stream, 2),  # X of up
            (FORWARD, "all_gather", "x", h * i / (y * z), 4),  # W
            (FORWARD, "reduce_scatter", "y", m * i / (x * z), 2),  # Y of up
            (FORWARD, "all_gather", "y", m * i / (x * z), 2),  # X of down
            (FORWARD, "reduce_scatter", "z", stream, 2),  # Y of down
        ]
        return [*mirrored(lines), loss("x+y+z")]
    lines = [
        embedding,
        (FORWARD, "all_gather", "z", stream, 2),  # X of qkv and up
        *((FORWARD, "all_gather", "x", size / (y * z), n) for size, n in BLOCK_WEIGHTS[:3]),
        (FORWARD, "reduce_scatter", "y", 3 * within, 1),  # Y of qkv
        (FORWARD, "all_gather", "y", within, 1),  # X of out
        (FORWARD, "reduce_scatter", "y", 4 * within, 1),  # Y of up
        (FORWARD, "all_gather", "y", 4 * within, 1),  # X of down
        (FORWARD, "reduce_scatter", "z", stream, 2),  # Y of out and down
        (FORWARD, "all_gather", "x", h / (y * z), 4),  # vectors of norms
    ]
    return [
        *mirrored(lines),
        *((BACKWARD, "all_reduce", "x", size / (y * z), n) for size, n in BLOCK_VECTORS[:2]),
        (BACKWARD, "all_reduce", "x", h / (y * z), 2),  # biases of out and down
        (FORWARD, "all_reduce", "y+z", m / x, 4),  # norms
        (BACKWARD, "all_reduce", "y+z", 2 * m / x, 2),
        loss("x+y+z"),
    ]


# -- four axes -------------------------------------------------------------------------------------
def four_d(x: int, y: int, z: int, data: int, model: str) -> list[Line]:
    """z and data split m, x and y are a plane as ATP's (x on k at the first product). Weights,
    split over the plane, are split over z too: gathered before use, gradients scattered over z,
    then summed over data: AG_z kn / (Gx·Gy), AR_x mn / (Gz·Gdata·Gy), AR_y mk / (Gz·Gdata·Gx),
    AR_data kn / (Gx·Gy·Gz).

    Small parameters: a bias is added once, before the sum over the axis of k, so that this axis,
    too, stores a part of it; its gradient is summed over data and z at once. The vectors of norms
    lie on x, are used whole on y, and take what sends less: stored over z like a weight (1/2 + 1/2
    + 1/2 of h / x at z = data = 2), or stored over y, gathered, and their gradient, of which each
    of y knows all, summed in parts over data and z (1/2 + 3/4).
    """

    def parameter(size: int, over: int, split: int, times: int) -> list[Line]:
        """Gathered over z to `size` / `over` words; the gradient's `split`-th part is summed."""
        gathered: list[Line] = [(FORWARD, "all_gather", "z", size / over, times)]
        return [*mirrored(gathered), (BACKWARD, "all_reduce", "data", size / split, times)]

    if model == "chain":
        weights, vectors = CHAIN_WEIGHTS, []
    else:
        weights = BLOCK_WEIGHTS
        biases = [(h, 2), (3 * h, 1), (4 * h, 1)]
        over_y: list[Line] = [
            (FORWARD, "all_gather", "y", h / x, 4),
            (BACKWARD, "all_reduce", "data+z", h / (x * y), 4),
        ]
        vectors = [
            *(over_y if z > 1 and data > 1 else parameter(h, x, x * z, 4)),
            *((BACKWARD, "all_reduce", "data+z", size / (x * y), n) for size, n in biases),
        ]
    parameters = [line for size, n in weights for line in parameter(size, x * y, x * y * z, n)]
    lines = [*plane("x", "y", x, y, m / (z * data))[model], *parameters, *vectors, loss("data+z+x")]
    return _without({"z": z, "data": data}, lines)


def _without(sizes: dict[str, int], lines: list[Line]) -> list[Line]:
    """The lines less the axes of size 1."""
    others = []
    for phase, kind, axes, *rest in lines:
        names = "+".join(axis for axis in axes.split("+") if sizes.get(axis) != 1)
        if names:
            others.append((phase, kind, names, *rest))
    return others  # type: ignore[return-value]


# -- experts ---------------------------------------------------------------------------------------
def ep(data: int, expert: int, tensor: int, model: str) -> list[Line]:
    """data and expert split m, and every weight but those of experts is FSDP's over both. Experts
    lie on expert where they compute, and their weights are gathered over data alone. Rows of the
    router's weight are experts, whose outer digit is expert's: it is gathered in two steps.

    The op takes in the tokens, experts and scores of its group (an expert's number is 8 bytes: two
    words) and scatters parts of sums; tokens and scores have gradients, numbers have none. By
    einsum every rank sends a token's copy to the place that it has at its expert, and gets the
    result from there.

    tensor is Megatron's, inside of every expert: the embedding's v, the router's e and the inner
    width lie on it. Whole on all its ranks are x, after a sum of the embedding and one of the
    experts' result, and the scores, gathered by e; their gradients are summed. What the op scatters
    over expert is summed over tensor after that.
    """
    rows, group = m / (data * expert), m / data
    router: list[Line] = [
        (FORWARD, "all_gather", "data", e * h / (expert * tensor), 1),
        (FORWARD, "all_gather", "expert", e * h / tensor, 1),
    ]
    weights: list[Line] = [
        (FORWARD, "all_gather", "data+expert", v * h / tensor, 1),
        (FORWARD, "all_gather", "data", e * h * i / (expert * tensor), 2),
        *router,
    ]
    lines = [*mirrored(weights), loss("data+expert")]
    if model == "einsum":
        places = (BATCH / data) * e * CAPACITY * h
        lines += [(phase, "all_to_all", "expert", places, 2) for phase in (FORWARD, BACKWARD)]
    else:
        tokens: list[Line] = [
            (FORWARD, "all_gather", "expert", group * h, 1),
            (FORWARD, "all_gather", "expert", group * k, 1),  # scores
            (FORWARD, "reduce_scatter", "expert", group * h, 1),
        ]
        lines += [*mirrored(tokens), (FORWARD, "all_gather", "expert", 2 * group * k, 1)]
    if tensor > 1:
        lines += [
            (FORWARD, "all_reduce", "tensor", rows * h, 2),
            (FORWARD, "all_gather", "tensor", rows * e, 1),
            (BACKWARD, "all_reduce", "tensor", rows * h, 1),
            (BACKWARD, "all_reduce", "tensor", rows * k, 1),
        ]
    return _without({"data": data}, lines)


# -- 2.5D ------------------------------------------------------------------------------------------
def two_and_a_half_d(q: int, d: int, model: str) -> list[Line]:
    """Depth and row split m, col splits k of X and n; W is split on k over row and on n over col.
    Forward q panels of X go along the rows of ranks (over col), q of W along the columns (over
    row). Backward both go again, and as many words of dX and dW come back; dW is summed over depth.
    Norms sum m / (d·q) rows over col. The embedding and vectors lie on col, gathered over row.
    """
    lines: list[Line] = []
    if model == "chain":
        products = [(h, i), (i, h)] * 2
        sizes = [(v * h, q, 1)]
    else:
        products = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
        sizes = [(v * h, q, 1), *((size, q, n) for size, n in BLOCK_VECTORS)]
        lines += [
            (FORWARD, "all_reduce", "col", m / (d * q), 4),
            (BACKWARD, "all_reduce", "col", 2 * m / (d * q), 2),
        ]
    for k, n in products:
        for axis, words in (("col", m * k / (d * q) / q), ("row", k * n / q / q)):
            for phase, kind in (
                (FORWARD, "broadcast"),
                (BACKWARD, "broadcast"),
                (BACKWARD, "reduce"),
            ):
                lines.append((phase, kind, axis, words, q))
        if d > 1:
            lines.append((BACKWARD, "all_reduce", "depth", k * n / q**2, 1))
    for size, over, times in sizes:
        lines += mirrored([(FORWARD, "all_gather", "row", size / over, times)])
        if d > 1:
            lines.append((BACKWARD, "all_reduce", "depth", size / over / q, times))
    return [*lines, loss("depth+row+col" if d > 1 else "row+col")]


CASES: list[tuple[str, int, Layouts, list[Line]]] = [
    ("chain", 4, "ddp", ddp(CHAIN_WEIGHTS)),
    ("block", 4, "ddp", ddp(BLOCK_WEIGHTS + BLOCK_VECTORS)),
    ("chain", 4, "fsdp", fsdp(CHAIN_WEIGHTS)),
    ("block", 4, "fsdp", fsdp(BLOCK_WEIGHTS + BLOCK_VECTORS)),
    ("chain", 4, "cp", cp(CHAIN_WEIGHTS, 0)),
    ("block", 4, "cp", cp(BLOCK_WEIGHTS + BLOCK_VECTORS, 1)),
    (
        "block",
        4,
        GridContext(4, attention="heads"),
        heads_of_context(BLOCK_WEIGHTS + BLOCK_VECTORS),
    ),
    ("chain", 4, "megatron", megatron(4)),
    ("block", 4, "megatron", megatron(4)),
    ("chain", 4, "megatron-sp", megatron_sp(4, 0)),
    ("block", 4, "megatron-sp", megatron_sp(4, 4)),
    *(
        (model, 8, Grid2D(d1, d2, first), atp(d1, d2, first, model))
        for model in ("chain", "block")
        for d1, d2, first in ((4, 2, "column"), (2, 4, "column"), (4, 2, "row"))
    ),
    ("chain", 8, Grid3D(2, 2, 2), three_d(2, 2, 2, "chain")),
    ("block", 8, Grid3D(2, 2, 2), three_d(2, 2, 2, "block")),
    *(
        (model, 16, Grid4D(*sizes), four_d(*sizes, model))
        for model in ("chain", "block")
        for sizes in ((2, 2, 2, 2), (4, 2, 2, 1), (2, 4, 1, 2))
    ),
    *(
        (model, d * q * q, Grid25D(q, d), two_and_a_half_d(q, d, model))
        for model in ("chain", "block")
        for q, d in ((2, 1), (2, 2), (4, 1))
    ),
    *(
        (model, data * expert, GridEP(data, expert), ep(data, expert, 1, model))
        for model in ("experts", "einsum")
        for data, expert in ((1, 4), (2, 2), (2, 4))
    ),
    ("experts", 8, GridEP(2, 2, 2, sequence=False), ep(2, 2, 2, "experts")),
]
