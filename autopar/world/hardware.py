"""The facts that a world is made of: a device, a level of links, one link of an irregular network.

Raises WorldError where a fact cannot be: a rate that is not positive, a name that is not known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import ConfigDict

from autopar.errors import WorldError
from autopar.world.json_file import shown

T = TypeVar("T")

# The collectives that cost factors may be given for (autopar.ir.layout.Traffic names the same).
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce")
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "rccl", "hccl", "fake", "undefined")
STRICT = ConfigDict(extra="forbid")  # of files: a name that nothing reads is a mistake


MOST_RANKS = 2**20
# A figure that is further out is a slip of the pen, and sums over a step would overflow: the
# rating adds up seconds in float32.
LEAST, MOST = 1e-12, 1e24  # of positive figures, of all
MOST_SHARE = 1e3  # of a rate that was measured next to a nominal one
MOST_SECONDS = 1e3  # of a latency, a launch


def positive(owner: object, *names: str) -> None:
    """Raise WorldError unless these fields of `owner` are finite and above 0."""
    for name in names:
        check_number(f"{type(owner).__name__}.{name}", getattr(owner, name), above=True)


def check_rates(owner: object, *names: str) -> None:
    """Raise WorldError unless these fields of `owner` are finite and 1 or more."""
    for name in names:
        check_number(f"{type(owner).__name__}.{name}", getattr(owner, name), above=True, least=1.0)


def check_seconds(owner: object, *names: str) -> None:
    """Raise WorldError unless these fields of `owner` are seconds from 0 on, no longer than any
    machine takes to start something.
    """
    for name in names:
        check_number(f"{type(owner).__name__}.{name}", getattr(owner, name), most=MOST_SECONDS)


def check_number(
    name: str, value: float, above: bool = False, least: float = LEAST, most: float = MOST
) -> None:
    """Raise WorldError unless the number is finite and at least 0 (`above`: more than 0), and not
    further out than figures of a machine can be.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WorldError(f"{name} is {shown(value)}: give a number")
    if not (value > 0 if above else value >= 0) or value == math.inf:
        raise WorldError(
            f"{name} is {shown(value)}: give a finite number {'above' if above else 'from'} 0"
        )
    if value > most or (above and value < least):
        reach = f"from {least:g} to {most:g}" if above else f"up to {most:g}"
        raise WorldError(f"{name} is {shown(value)}: no machine has that, give a number {reach}")


def check_dtype(name: str, dtype: str) -> None:
    """Raise WorldError unless torch has a dtype of that name."""
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise WorldError(f"{name}: torch has no dtype {shown(dtype)}")


Copied = Literal["", "left", "right"]  # the operand of a product that is copied first
Form = Literal["NN", "NT", "TN"]  # "T": that operand lies transposed
FORM_GAIN = 0.05  # a copy has to gain more than this share of a product's time


@dataclass(frozen=True)
class Forms:
    """Seconds of one rank's product (m, k) · (k, n) as its operands come in the `form`, and with
    the left or the right one copied into the other order first. "N": row by row in memory, "T":
    column by column.

    >>> Forms("float32", 64, 64, 64, "NT", 2e-3, 3e-3, 1e-3).fastest
    'right'
    """

    __pydantic_config__ = STRICT
    dtype: str
    m: int
    n: int
    k: int
    form: Form
    as_it_is_s: float
    left_copied_s: float
    right_copied_s: float

    def __post_init__(self) -> None:
        positive(self, "m", "n", "k")
        for name in ("as_it_is_s", "left_copied_s", "right_copied_s"):
            check_number(f"Forms.{name}", getattr(self, name), above=True, most=MOST_SECONDS)
        check_dtype("Forms.dtype", self.dtype)

    @property
    def fastest(self) -> Copied:
        """What to copy; "" unless that gains enough."""
        operand: Copied = "left" if self.left_copied_s <= self.right_copied_s else "right"
        seconds = min(self.left_copied_s, self.right_copied_s)
        return operand if seconds < self.as_it_is_s * (1 - FORM_GAIN) else ""


@dataclass(frozen=True)
class Attention:
    """The shares of a device's flop_per_s that scaled_dot_product_attention reaches with as many
    queries as keys, forward and backward. The FLOPs are those of `rules.Attends`: half of the
    products with a causal mask, 2.5 times the forward's in the backward.
    """

    __pydantic_config__ = STRICT
    dtype: str
    causal: bool
    keys: int
    head_size: int
    forward_share: float
    backward_share: float

    def __post_init__(self) -> None:
        positive(self, "keys", "head_size")
        for name in ("forward_share", "backward_share"):
            check_number(f"Attention.{name}", getattr(self, name), above=True, most=MOST_SHARE)
        check_dtype("Attention.dtype", self.dtype)


@dataclass(frozen=True)
class Device:
    """One rank's device: FLOP/s by dtype ("bfloat16", "float32"; dense, of matrix products),
    memory in bytes, memory bandwidth in bytes/s.

    `efficiency`: by dtype, points (FLOPs of one rank's product, share of flop_per_s that it
    reaches), with rising FLOPs; without any, flop_per_s itself is reached. `launch_s`: seconds to
    start any op. `forms`: a model's products as calibration timed them, in several forms each.
    `attention`: of a dtype, with a causal mask or without, every number of keys with every head
    size; without any, attention is as efficient as products of as many FLOPs. `op_bytes_per_s`: of
    what ops other than products and attention read and write, exponentials and fresh memory
    included; 0 stands for memory_bytes_per_s.

    >>> Device("H100", {"bfloat16": 989e12, "float32": 67e12}, 80e9, 3.35e12).rate(torch.float32)
    67000000000000.0
    """

    __pydantic_config__ = STRICT
    name: str
    flop_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    memory_bytes_per_s: float
    efficiency: Mapping[str, tuple[tuple[float, float], ...]] = field(
        default_factory=dict, hash=False
    )
    launch_s: float = 0.0
    forms: tuple[Forms, ...] = field(default=(), hash=False)
    attention: tuple[Attention, ...] = field(default=(), hash=False)
    op_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        check_rates(self, "memory_bytes", "memory_bytes_per_s")
        check_seconds(self, "launch_s")
        if self.op_bytes_per_s != 0:
            check_rates(self, "op_bytes_per_s")
        if not self.flop_per_s:
            raise WorldError(f"Device.flop_per_s of {self.name!r} names no dtype; add 'float32'")
        for dtype, rate in self.flop_per_s.items():
            check_dtype("Device.flop_per_s", dtype)
            check_number(f"Device.flop_per_s[{dtype!r}]", rate, above=True, least=1.0)
        for dtype, points in self.efficiency.items():
            self._check_points(dtype, points)
        for name, attention in self._attention.items():
            self._check_attention(name, attention)

    def _check_points(self, dtype: str, points: tuple[tuple[float, float], ...]) -> None:
        name = f"Device.efficiency[{dtype!r}]"
        check_dtype("Device.efficiency", dtype)
        for flops, share in points:
            check_number(f"{name}: FLOPs", flops, above=True)
            check_number(f"{name}: share", share, above=True, most=MOST_SHARE)
        sizes = [flops for flops, _ in points]
        if any(after <= before for before, after in itertools.pairwise(sizes)):
            raise WorldError(f"{name} has points at {sizes} FLOPs: write them in rising order")

    def _check_attention(self, name: tuple[str, bool], found: list[Attention]) -> None:
        keys, sizes = sorted({one.keys for one in found}), sorted({one.head_size for one in found})
        given = sorted((one.keys, one.head_size) for one in found)
        if given != list(itertools.product(keys, sizes)):
            dtype, causal = name
            raise WorldError(
                f"Device.attention, {dtype}, {'causal' if causal else 'not causal'}, has (keys, "
                f"head size) {given}: give each of {keys} keys with each head size of {sizes} once"
            )

    @property
    def flops(self) -> float:
        """FLOP/s where the dtype does not matter: of bfloat16, else float32, else the highest."""
        found = self.flop_per_s.get("bfloat16") or self.flop_per_s.get("float32")
        return found or max(self.flop_per_s.values())

    def rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of matrix products in this dtype; the two half precisions stand in for one
        another, float32 for what is not listed.
        """
        found = _stand_in(self.flop_per_s, dtype)
        return self.flops if found is None else found

    def to_copy(self, dtype: torch.dtype, m: int, n: int, k: int, form: str) -> Copied:
        """The operand of a rank's product (m, k) · (k, n) to copy into the other order first; ""
        where none, and where the product was not measured.
        """
        found = self._forms.get((str(dtype).removeprefix("torch."), m, n, k, form))
        return found.fastest if found else ""

    @cached_property
    def _forms(self) -> dict[tuple[str, int, int, int, str], Forms]:
        return {(f.dtype, f.m, f.n, f.k, f.form): f for f in self.forms}

    @cached_property
    def _attention(self) -> dict[tuple[str, bool], list[Attention]]:
        found: dict[tuple[str, bool], list[Attention]] = {}
        for one in self.attention:
            found.setdefault((one.dtype, one.causal), []).append(one)
        return found

    def attention_shares(self, dtype: torch.dtype, causal: bool) -> list[Attention]:
        """`attention` in this dtype, with the same stand-ins as `rate`; [] where not known."""
        known = {name: found for (name, kind), found in self._attention.items() if kind == causal}
        return _stand_in(known, dtype) or []

    def points(self, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
        """`efficiency` in this dtype, with the same stand-ins as `rate`; () where not known."""
        return _stand_in(self.efficiency, dtype) or ()


def _stand_in(known: Mapping[str, T], dtype: torch.dtype) -> T | None:
    halves = ("bfloat16", "float16")
    name = str(dtype).removeprefix("torch.")
    for other in (name, *(halves if name in halves else ()), "float32"):
        if other in known:
            return known[other]
    return None


@dataclass(frozen=True)
class Level:
    """One level of links: it joins `ranks` members, which are ranks at the innermost level and
    whole groups of the level below further out; `latency_s` is of one hop.

    `bytes_per_s`, each way: `per` "uplink", of the one link that all ranks of a member share (a
    node's network cards together); `per` "rank", of each rank's own (its card), which the ranks of
    a member pool. `direct`: no switch, a member's bytes/s are those of its wires to all the other
    members together, one wire each (four A100 or GH200 in a node).

    Example: Level(8, 450e9, 1e-6), Level(4, 50e9, 5e-6, per="rank"): 4 nodes of 8, a node's cards
    carry 400 GB/s.
    """

    __pydantic_config__ = STRICT
    ranks: int
    bytes_per_s: float
    latency_s: float
    per: Literal["uplink", "rank"] = "uplink"
    direct: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise WorldError(
                f"Level.ranks is {shown(self.ranks)}: a level joins 1 or more, {MOST_RANKS:,} at "
                "the most"
            )
        check_rates(self, "bytes_per_s")
        check_seconds(self, "latency_s")
        if self.per not in ("uplink", "rank"):
            raise WorldError(f"Level.per is {self.per!r}: bytes/s are per 'uplink' or per 'rank'")

    def uplink(self, ranks: int) -> float:
        """bytes/s each way between a member of so many ranks and the others."""
        return self.bytes_per_s * (ranks if self.per == "rank" else 1)


@dataclass(frozen=True)
class Link:
    """One link of an irregular network, `bytes_per_s` each way. Ends are ranks, which are numbers,
    or switches, which are names.
    """

    __pydantic_config__ = STRICT
    a: int | str
    b: int | str
    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_rates(self, "bytes_per_s")
        check_seconds(self, "latency_s")
        if self.a == self.b:
            raise WorldError(f"Link joins {self.a!r} to itself: leave it out")


@dataclass(frozen=True)
class Measured:
    """What calibration found for one collective over the groups of one pattern (cost/network.py:
    (size, stride) of each digit, outer first): start_s + s_per_byte · bytes of the whole value on a
    group. `together`: with all groups of the pattern at once, as plans run them; else one alone.
    `bends`: (bytes, how many more seconds a byte takes from there on), with rising bytes.
    `takes_s`, `slows`: the seconds of computing that a rank loses to starting it, and for each
    further second of it, where both run at once.

    Example: Measured("all_reduce", ((2, 4),), 2, 1e-3, 2e-9): 8 ranks in pairs 4 apart sum 1 MB in
    3 ms.
    """

    __pydantic_config__ = STRICT
    kind: str
    pattern: tuple[tuple[int, int], ...]
    ranks: int
    start_s: float
    s_per_byte: float
    together: bool = True
    bends: tuple[tuple[float, float], ...] = ()
    takes_s: float = 0.0
    slows: float = 0.0

    def __post_init__(self) -> None:
        check_kind("Measured.kind", self.kind)
        self._check_bends()
        check_seconds(self, "takes_s", "start_s", "s_per_byte")
        check_number("Measured.slows", self.slows, most=MOST_SHARE)
        if not self.pattern or any(size < 2 or stride < 1 for size, stride in self.pattern):
            raise WorldError(
                f"Measured.pattern is {self.pattern}: give (size, stride) pairs, sizes from 2"
            )
        if self.ranks != math.prod(size for size, _ in self.pattern):
            raise WorldError(f"Measured.ranks is {self.ranks}, its pattern is {self.pattern}")

    def _check_bends(self) -> None:
        slope = self.s_per_byte
        for size, more in self.bends:
            check_number("Measured.bends: bytes", size)
            slope += more
            check_number(
                f"Measured.bends: seconds per byte from {size:g} bytes on", slope, most=MOST_SECONDS
            )
        sizes = [size for size, _ in self.bends]
        if any(after <= before for before, after in itertools.pairwise(sizes)):
            raise WorldError(f"Measured.bends has {sizes} bytes: write them in rising order")

    @property
    def reach(self) -> int:
        """Ranks from the first to the last of a group."""
        return 1 + sum((size - 1) * stride for size, stride in self.pattern)


def check_kind(name: str, kind: str) -> None:
    """Raise WorldError unless it is a collective."""
    if kind not in KINDS:
        raise WorldError(f"{name} names {shown(kind)}; the collectives are {', '.join(KINDS)}")


def check_backend(backend: str) -> None:
    """Raise WorldError unless torch may have a backend of collectives of that name; also one for
    each kind of device, as "cpu:gloo,cuda:nccl".
    """
    known = {*_BACKENDS, *getattr(dist.Backend, "backend_list", ())}
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    strange = [name for name in names if name not in known]
    if strange:
        raise WorldError(
            f"World.backend: {shown(strange[0])} is none of {', '.join(sorted(known))}"
        )
