"""What a cluster is: how many nodes, ranks and bit/s; the names and addresses that follow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PREFIX = "autopar"
INTERFACE = "cable"  # of every node, in its own namespace
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BURST_S = 4e-4  # what a limiter may send at once, as seconds of its rate
_LEAST_BURST = 20_000  # bytes: two packets of 9000
_QUEUE_S = 20e-3  # what may wait at a limiter before packets are dropped, as seconds of its rate
_LEAST_QUEUE = 500_000  # bytes


@dataclass(frozen=True)
class Shape:
    """`nodes` of `ranks_per_node` ranks; each node's link carries `rate` bit/s each way (None: as
    fast as it goes).

    Raises ValueError for sizes below 1 and for more nodes than a /24 has addresses.

    >>> Shape(2, 2, 400e6).ranks, str(Shape(2, 2, 400e6))
    (4, '2×2 at 400mbit')
    """

    nodes: int
    ranks_per_node: int
    rate: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 250:
            raise ValueError(f"{self.nodes} nodes: a cluster has 1 to 250")
        if self.ranks_per_node < 1:
            raise ValueError(f"{self.ranks_per_node} ranks a node: at least 1 is needed")
        if self.rate is not None and not 1e6 <= self.rate <= 1e11:
            raise ValueError(f"a rate of {self.rate:g} bit/s: give 1mbit to 100gbit, or unlimited")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def size(self) -> str:
        return f"{self.nodes}×{self.ranks_per_node}"

    def __str__(self) -> str:
        return f"{self.size} at {rate_text(self.rate)}"


def read_rate(text: str) -> float | None:
    """bit/s from tc's way of writing, "400mbit" or "2gbit"; None for "unlimited". Raises
    ValueError.

    >>> read_rate("400mbit"), read_rate("2.5gbit"), read_rate("unlimited")
    (400000000.0, 2500000000.0, None)
    """
    if text == "unlimited":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.lower())
    if not match:
        raise ValueError(f"rate {text!r}: write it as 400mbit, 2gbit or unlimited")
    return float(match[1]) * _UNITS[match[2]]


def rate_text(rate: float | None) -> str:
    """What `read_rate` reads.

    >>> rate_text(4e8), rate_text(2e9), rate_text(None)
    ('400mbit', '2gbit', 'unlimited')
    """
    if rate is None:
        return "unlimited"
    return f"{rate / 1e9:g}gbit" if rate >= 1e9 else f"{rate / 1e6:g}mbit"


def read_shape(text: str) -> tuple[int, int]:
    """(nodes, ranks a node) from "2x2". Raises ValueError."""
    match = re.fullmatch(r"(\d+)[x×](\d+)", text)
    if not match:
        raise ValueError(f"shape {text!r}: write nodes x ranks a node, as 2x2")
    return int(match[1]), int(match[2])


def read_shapes(text: str, rates: Iterable[str]) -> list[Shape]:
    """Clusters of one size at several rates, from "2x2" and ["400mbit", "unlimited"]. Raises
    ValueError.
    """
    size = read_shape(text)
    return [Shape(*size, read_rate(rate)) for rate in rates]


def burst(rate: float) -> int:
    """Bytes that a limiter may send at once. More than that much passes unlimited, so it is small;
    the limiters have timers of their own and keep 10 Gbit/s with less than half a millisecond.
    """
    return max(_LEAST_BURST, round(rate / 8 * _BURST_S))


def queue(rate: float) -> int:
    """Bytes that may wait at a limiter."""
    return max(_LEAST_QUEUE, round(rate / 8 * _QUEUE_S))


# -- names: of the process that made them, so that what the dead left can be told apart ------------
def owner(pid: int | None = None) -> str:
    """Names a process for good: its id, which may be used again, and when it started."""
    pid = os.getpid() if pid is None else pid
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{PREFIX}-{pid}-{fields[19]}"


def is_stale(namespace: str) -> bool:
    """Whether a namespace is one of ours and the process that made it is gone."""
    match = re.fullmatch(rf"({PREFIX}-(\d+)-\d+)-(?:switch|node\d+)", namespace)
    if not match:
        return False
    try:
        return owner(int(match[2])) != match[1]
    except (FileNotFoundError, ProcessLookupError):
        return True


def switch_name() -> str:
    return f"{owner()}-switch"


def node_name(node: int) -> str:
    return f"{owner()}-node{node}"


def address(node: int, pid: int | None = None) -> str:
    """Of a node, in a /24 that exists in the cluster's own namespaces only; the third byte tells
    runs apart in what they print.

    >>> address(1, pid=7)
    '10.77.7.2'
    """
    return f"10.77.{(os.getpid() if pid is None else pid) % 250}.{node + 1}"
