"""Words that each layout moves and stores for one matrix product, as sympy expressions.

The product is Y[m,n] = X[m,k] · W[k,n], with its two gradients dX = dY·Wᵀ and dW = Xᵀ·dY.
What is counted:

- Words that ONE rank receives (a rank sends as many), by ring collectives. With B the words of the
  whole value on the axes of the collective and p their ranks: all-gather and reduce-scatter
  (p-1)/p · B, all-reduce twice that (autopar.cost.communication.sent). Broadcasts of q panels,
  each from another root, move what an all-gather of them moves; reductions to q roots what a
  reduce-scatter moves.
- From X, W, Y as stored to X, W, Y as stored: Y ends as the next product's input lies, dX as X
  does, dW as W does. Layouts that swap two axes at the next product are counted over both
  products, and halved.
- Stored: words of X, W and Y that a rank keeps between the uses.

A word is one element, of any dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr, Integer, Rational, symbols

from autopar.cost.communication import sent

m, k, n = symbols("m k n", positive=True)
P, d1, d2, x, y, z, data, q, d = symbols("P d1 d2 x y z data q d", positive=True)
on_m, on_n, on_k = symbols("on_m on_n on_k", positive=True)  # the three axes of 3D

ZERO, UNITY = Integer(0), Integer(1)


def all_gather(whole: Expr, ranks: Expr) -> Expr:
    """Words a rank receives where `whole` words end on every one of the ranks."""
    return sent("all_gather", ranks) * whole


def reduce_scatter(whole: Expr, ranks: Expr) -> Expr:
    return sent("reduce_scatter", ranks) * whole


def all_reduce(whole: Expr, ranks: Expr) -> Expr:
    return sent("all_reduce", ranks) * whole


@dataclass(frozen=True)
class Words:
    """Words a rank of one product.

    `gather`: received in the forward, operands. `reduce`: received in the forward, the result's
    sum. `backward`: received in the backward, but for repeating the gathers. `stored`: kept.
    """

    gather: Expr
    reduce: Expr
    backward: Expr
    stored: Expr

    @property
    def forward(self) -> Expr:
        return self.gather + self.reduce

    @property
    def saved(self) -> Expr:
        """Forward and backward where gathered operands are saved: `gather` words more of memory."""
        return self.forward + self.backward

    @property
    def again(self) -> Expr:
        """Forward and backward where gathered operands are dropped and gathered again.

        All of them are: dX needs W, dW needs X.
        """
        return self.saved + self.gather


def ddp() -> Words:
    """All ranks → m, W whole on each: nothing moves but dW, in one all-reduce.

    Source: the ring all-reduce of Patarasuk and Yuan 2009.
    """
    return Words(ZERO, ZERO, all_reduce(k * n, P), stored=(m * k + m * n) / P + k * n)


def fsdp() -> Words:
    """All ranks → m, W split: all-gather W, again in the backward, reduce-scatter dW.

    That is 3·(1-1/P)·kn: ZeRO, arXiv 1910.02054, section 7 (3Ψ for parameters of Ψ words).
    """
    gathered = all_gather(k * n, P)
    return Words(gathered, ZERO, reduce_scatter(k * n, P), stored=(m * k + m * n + k * n) / P)


def split_weight(rows: Expr, k: Expr, n: Expr, by_k: Expr, by_n: Expr) -> tuple[Expr, Expr]:
    """(forward, backward) of a product whose W lies still on a grid of by_k × by_n ranks.

    X is split on k by `by_k` ranks and repeated over the `by_n` others. The local products are
    parts of a sum over by_k ranks, of n/by_n columns: an all-reduce of Y. In the backward those of
    dX are parts of a sum over by_n ranks, of k/by_k columns.
    """
    return all_reduce(rows * n / by_n, by_k), all_reduce(rows * k / by_k, by_n)


def swapped_pair(rows: Expr, by_k: Expr, by_n: Expr) -> tuple[Expr, Expr]:
    """The mean (forward, backward) of X[m,k]·W[k,n] and the next, Y[m,n]·V[n,k], axes swapped."""
    first = split_weight(rows, k, n, by_k, by_n)
    second = split_weight(rows, n, k, by_n, by_k)
    return (first[0] + second[0]) / 2, (first[1] + second[1]) / 2


def megatron() -> Words:
    """All ranks → n, at the next product → k: the second all-reduces Y, the first dX.

    Source: Megatron-LM, arXiv 1909.08053, section 3 (its operators f and g).
    """
    forward, backward = swapped_pair(m, by_k=UNITY, by_n=P)
    return Words(ZERO, forward, backward, stored=m * k + (m * n + k * n) / P)


def megatron_sp() -> Words:
    """As megatron, with the activation between the pairs split on rows (the sequence).

    Each all-reduce falls into its halves: the first product gathers X, the second scatters Y; in
    the backward the second gathers dY, the first scatters dX. Where the gathered X is dropped, it
    is gathered again for dW. Source: arXiv 2205.05198, section 4.2.2.
    """
    half = all_gather(m * k, P) / 2
    return Words(half, half, 2 * half, stored=(m * k + m * n + k * n) / P)


def atp() -> Words:
    """d1 → n, d2 → k, swapped at the next product; d2 = 1 is megatron.

    Source: ATP, arXiv 2301.08658 (column-first; row-first begins with the other).
    """
    forward, backward = swapped_pair(m, by_k=d2, by_n=d1)
    return Words(ZERO, forward, backward, stored=m * k / d2 + m * n / d1 + k * n / (d1 * d2))


def four_d() -> Words:
    """data, z → m; x → k, y → n, swapped at the next product; W split over z too.

    Source: AxoNN, arXiv 2305.13525, communication model: all-gather W over z, all-reduce Y over x,
    all-reduce dX over y, reduce-scatter dW over z, all-reduce dW over data. It gathers W once
    (`held`).
    """
    rows, weight = m / (z * data), k * n / (x * y)
    forward, backward = swapped_pair(rows, by_k=x, by_n=y)
    weights = reduce_scatter(weight, z) + all_reduce(weight / z, data)
    stored = rows * k / x + rows * n / y + weight / z
    return Words(all_gather(weight, z), forward, backward + weights, stored)


def three_d() -> Words:
    """Three axes → m, n, k, every matrix spread over all three.

    X is gathered over the axis on n, W over that on m, Y scattered over that on k. Backward, dY is
    gathered once for both gradients, dX and dW are scattered.
    Source: Agarwal, Balle, Gustavson, Joshi, Palkar 1995; for training, arXiv 2105.14450.
    """
    of_x = all_gather(m * k / (on_m * on_k), on_n)
    of_w = all_gather(k * n / (on_k * on_n), on_m)
    of_y = reduce_scatter(m * n / (on_m * on_n), on_k)
    stored = (m * k + m * n + k * n) / (on_m * on_n * on_k)
    return Words(of_x + of_w, of_y, of_y + of_x + of_w, stored)


def summa(depth: Expr) -> Words:
    """q × q × depth ranks: depth and row → m, column → n.

    A rank has one of depth·q × q blocks of X and one of q × q of W, the same on every depth. In q
    panels X is broadcast along the row group and W along the column group: (q-1)/q² · (mk/depth +
    kn). dX and dW broadcast one operand each and reduce their result along the other's group: the
    same again, twice. Then dW is summed over depth: 2·(1-1/depth)·kn/q².
    Source: arXiv 2105.14500; depth 1: van de Geijn and Watts 1997, Optimus (arXiv 2104.05343).
    """
    of_x, of_w = all_gather(m * k / (depth * q), q), all_gather(k * n / q, q)
    sums = of_x + of_w + all_reduce(k * n / q**2, depth)
    stored = (m * k + m * n) / (depth * q**2) + k * n / q**2
    return Words(of_x + of_w, ZERO, sums, stored)


def lower_bound(ranks: int, *sizes: Rational | int) -> Expr:
    """Words that some rank must receive for one product of these three loop sizes, P ranks.

    D - (mn + mk + nk)/P for m >= n >= k, if there is one copy of each matrix: Al Daas, Ballard,
    Grigori, Kumar, Rouse 2022 (arXiv 2205.13407, main theorem). A layout that stores copies may
    stay below: the forward of ddp moves nothing.

    >>> lower_bound(64, 1, 1, 1)
    9/64
    """
    m, n, k = sorted(map(sympy.sympify, sizes), reverse=True)
    if ranks <= m / n:
        touched = (m * n + m * k) / ranks + n * k
    elif ranks <= m * n / k**2:
        touched = 2 * sympy.sqrt(m * n * k**2 / ranks) + m * n / ranks
    else:
        touched = 3 * (m * n * k / ranks) ** Rational(2, 3)
    return touched - (m * n + m * k + n * k) / ranks


def atp_layer(d1: int, d2: int) -> Rational:
    """All-reduce words a rank of a transformer layer on DeviceMesh(d1, d2), forward and backward.

    In units of batch · sequence · hidden. The four products alternate: qkv (h → 3h) and up
    (h → 4h) have d1 on n, projection (h → h) and down (4h → h) have d1 on k.
    """
    total = ZERO
    for index, (inputs, outputs) in enumerate(((1, 3), (1, 1), (1, 4), (4, 1))):
        by_k, by_n = (d1, d2) if index % 2 else (d2, d1)
        arguments = (Integer(value) for value in (1, inputs, outputs, by_k, by_n))
        total += sum(split_weight(*arguments), ZERO)
    return total
