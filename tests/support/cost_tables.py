"""Random problems for minimise: a table of costs for some of the variables."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from autopar.planner.elimination import Table


def random_problem(draw: random.Random) -> tuple[list[int], list[Table]]:
    """Up to 6 variables of up to 4 values, 9 tables over 1 to 3 of them; some entries forbidden.

    Half of the tables have small whole numbers, so that there are ties.
    """
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 6))]
    tables = [random_table(sizes, draw) for _ in range(draw.randint(1, 9))]
    return sizes, tables + draw.sample(tables, draw.randint(0, 1))


def random_table(sizes: Sequence[int], draw: random.Random) -> Table:
    count = min(draw.randint(1, 3), len(sizes))
    variables = tuple(sorted(draw.sample(range(len(sizes)), count)))
    numbers = np.random.default_rng(draw.randrange(1 << 30))
    shape = [sizes[v] for v in variables]
    costs = numbers.integers(0, 4, shape) if draw.random() < 0.5 else numbers.random(shape) - 0.5
    return Table(variables, np.where(numbers.random(shape) < 0.1, np.inf, costs))


def total(tables: Sequence[Table], values: Sequence[int]) -> float:
    return math.fsum(float(t.costs[tuple(values[v] for v in t.variables)]) for t in tables)
