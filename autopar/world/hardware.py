"""The facts that a `World` is made of: a device, a level of links, a link of an irregular network,
and what calibration measured of matmuls, attention and collectives.

Each class checks its own fields and raises WorldError where a fact cannot be: a rate that is not
positive, a dtype that torch does not have. gpus.py, machines.py and cost/calibration make them,
world.py reads and writes them as JSON, and cost turns them into seconds.
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
STRICT = ConfigDict(extra="forbid")  # of files: an unknown field is a mistake


MOST_RANKS = 2**20
# A figure outside of these is a typing error, and the sum over a step would overflow: the planner's
# bounds add up seconds in float32.
LEAST, MOST = 1e-12, 1e24  # the least that a positive figure may be, the most that any may be
MOST_SHARE = 1e3  # of a measured rate over the nominal one
MOST_SECONDS = 1e3  # of a latency or of the time to launch something


def positive(owner: object, *names: str) -> None:
    """Raise WorldError unless these fields of `owner` are finite and above 0."""
    for name in names:
        check_number(f"{type(owner).__name__}.{name}", getattr(owner, name), above=True)


def check_rates(owner: object, *names: str) -> None:
    """Raise WorldError unless these fields of `owner` are finite and 1 or more."""
    for name in names:
        check_number(f"{type(owner).__name__}.{name}", getattr(owner, name), above=True, least=1.0)


def check_seconds(owner: object, *names: str) -> None:
    """Raise WorldError unless these fields of `owner` are seconds from 0 to MOST_SECONDS."""
    for name in names:
        check_number(f"{type(owner).__name__}.{name}", getattr(owner, name), most=MOST_SECONDS)


def check_number(
    name: str, value: float, above: bool = False, least: float = LEAST, most: float = MOST
) -> None:
    """Raise WorldError unless the number is finite, at least 0 (`above`: more than 0, and at least
    `least`) and at most `most`.
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


Copied = Literal["", "left", "right"]  # the operand of a matmul to copy first
Form = Literal["NN", "NT", "TN"]  # of both operands; "T": it lies transposed
FORM_GAIN = 0.05  # a copy has to gain more than this share of a matmul's time


@dataclass(frozen=True)
class KernelTimes:
    """The measured seconds of one rank's matmul (m, k) · (k, n): with its operands as they come in
    the `form`, and with the left or the right one copied into the other memory order first. "N"
    is row-major, "T" column-major.

    >>> KernelTimes("float32", 64, 64, 64, "NT", 2e-3, 3e-3, 1e-3).fastest
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
            check_number(f"KernelTimes.{name}", getattr(self, name), above=True, most=MOST_SECONDS)
        check_dtype("KernelTimes.dtype", self.dtype)

    @property
    def fastest(self) -> Copied:
        """The operand to copy first; "" unless that gains more than FORM_GAIN of the time."""
        operand: Copied = "left" if self.left_copied_s <= self.right_copied_s else "right"
        seconds = min(self.left_copied_s, self.right_copied_s)
        return operand if seconds < self.as_it_is_s * (1 - FORM_GAIN) else ""


@dataclass(frozen=True)
class Attention:
    """The shares of a device's flop_per_s that scaled_dot_product_attention reaches, forward and
    backward, with as many queries as keys. FLOPs are counted as in `ir.sharding_rule.Attends`: half
    of the matmuls' with a causal mask, 2.5 times the forward's in the backward.
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
    """One rank's device: FLOP/s by dtype ("bfloat16", "float32"; dense, of matmuls), memory in
    bytes, memory bandwidth in bytes/s.

    `efficiency`: by dtype, points (FLOPs of one rank's matmul, share of flop_per_s that it
    reaches), with rising FLOPs; without any, flop_per_s itself is reached. `launch_s`: seconds to
    start any op. `forms`: a model's matmuls as calibration timed them, each in several memory
    orders. `attention`: measured shares of flop_per_s, for a dtype and a mask on a full grid of
    numbers of keys and head sizes; without any, attention is as efficient as a matmul of its FLOPs.
    `op_bytes_per_s`: bandwidth of all other ops, exponentials and fresh memory included; 0 stands
    for memory_bytes_per_s. Raises WorldError for a figure that no machine has, and for a dtype that
    torch does not have.

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
    forms: tuple[KernelTimes, ...] = field(default=(), hash=False)
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

    def _check_attention(self, name: tuple[str, bool], rows: list[Attention]) -> None:
        keys, sizes = (
            sorted({point.keys for point in rows}),
            sorted({point.head_size for point in rows}),
        )
        pairs = sorted((point.keys, point.head_size) for point in rows)
        if pairs != list(itertools.product(keys, sizes)):
            dtype, causal = name
            raise WorldError(
                f"Device.attention, {dtype}, {'causal' if causal else 'not causal'}, has (keys, "
                f"head size) {pairs}: give each of {keys} keys with each head size of {sizes} once"
            )

    @property
    def flops(self) -> float:
        """FLOP/s where the dtype does not matter: bfloat16's, else float32's, else the highest."""
        preferred = self.flop_per_s.get("bfloat16") or self.flop_per_s.get("float32")
        return preferred or max(self.flop_per_s.values())

    def rate(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s of matmuls in this dtype. The two half precisions stand in for one
        another, float32 for dtypes that are not listed.
        """
        flop_per_s = _stand_in(self.flop_per_s, dtype)
        return self.flops if flop_per_s is None else flop_per_s

    def to_copy(self, dtype: torch.dtype, m: int, n: int, k: int, form: str) -> Copied:
        """Return the operand of a rank's matmul (m, k) · (k, n) to copy into the other memory order
        first; "" for none, and for a matmul that was not measured.
        """
        timing = self._forms.get((str(dtype).removeprefix("torch."), m, n, k, form))
        return timing.fastest if timing else ""

    @cached_property
    def _forms(self) -> dict[tuple[str, int, int, int, str], KernelTimes]:
        return {(f.dtype, f.m, f.n, f.k, f.form): f for f in self.forms}

    @cached_property
    def _attention(self) -> dict[tuple[str, bool], list[Attention]]:
        by_kind: dict[tuple[str, bool], list[Attention]] = {}
        for point in self.attention:
            by_kind.setdefault((point.dtype, point.causal), []).append(point)
        return by_kind

    def attention_shares(self, dtype: torch.dtype, causal: bool) -> list[Attention]:
        """Return `attention` in this dtype, with the stand-ins of `rate`; [] where not known."""
        by_dtype = {
            name: points for (name, kind), points in self._attention.items() if kind == causal
        }
        return _stand_in(by_dtype, dtype) or []

    def points(self, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
        """Return `efficiency` in this dtype, with the stand-ins of `rate`; () where not known."""
        return _stand_in(self.efficiency, dtype) or ()


def _stand_in(known: Mapping[str, T], dtype: torch.dtype) -> T | None:
    """Return the entry of the dtype, else that of a dtype that stands in for it, else None."""
    halves = ("bfloat16", "float16")
    name = str(dtype).removeprefix("torch.")
    for other in (name, *(halves if name in halves else ()), "float32"):
        if other in known:
            return known[other]
    return None


@dataclass(frozen=True)
class Level:
    """One level of links. It joins `ranks` members: single ranks at the innermost level, groups of
    the level below further out. Two levels are 4 nodes of 8, where a node's cards carry 400 GB/s:

    >>> inner, outer = Level(8, 450e9, 1e-6), Level(4, 50e9, 5e-6, per="rank")
    >>> outer.uplink(inner.ranks)
    400000000000.0

    `latency_s`: seconds of one hop. `bytes_per_s` counts each way. With `per` "uplink" it is the
    bandwidth of one link that all ranks of a member share (a node's network cards together); with
    `per` "rank" each rank has a link of that bandwidth, and the ranks of a member pool theirs.
    `direct`: there is no switch but a wire to every other member (four A100 or GH200 in a node),
    and `bytes_per_s` is that of a member's wires together. Raises WorldError for fewer than 1 rank
    and for a rate that is not above 0.
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
        """Return the bytes/s each way between a member of so many ranks and the other members."""
        return self.bytes_per_s * (ranks if self.per == "rank" else 1)


@dataclass(frozen=True)
class Link:
    """One link of an irregular network, `bytes_per_s` each way. Its ends `a` and `b` are ranks
    (numbers) or switches (names).
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
    """The time of one collective over the groups of one pattern, as calibration measured it:
    start_s + s_per_byte · bytes of the unsharded value on a group.

    `pattern`: (size, stride) of each digit, outer first (see cost/network.py). `together`: all
    groups of the pattern ran at once, as plans run them; else one alone. `bends`: (bytes, how many
    more seconds a byte takes from there on), with rising bytes.

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

    def __post_init__(self) -> None:
        check_kind("Measured.kind", self.kind)
        self._check_bends()
        check_seconds(self, "start_s", "s_per_byte")
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
        """The number of ranks from the first to the last of a group."""
        return 1 + sum((size - 1) * stride for size, stride in self.pattern)


def check_kind(name: str, kind: str) -> None:
    """Raise WorldError unless `kind` is a collective."""
    if kind not in KINDS:
        raise WorldError(f"{name} names {shown(kind)}; the collectives are {', '.join(KINDS)}")


def check_backend(backend: str) -> None:
    """Raise WorldError unless torch may have a backend of collectives of that name, or of those
    names: "cpu:gloo,cuda:nccl" has one for each type of device.
    """
    backends = {*_BACKENDS, *getattr(dist.Backend, "backend_list", ())}
    names = [entry.rpartition(":")[2] for entry in backend.split(",")]
    unknown = [name for name in names if name not in backends]
    if unknown:
        raise WorldError(
            f"World.backend: {shown(unknown[0])} is none of {', '.join(sorted(backends))}"
        )
