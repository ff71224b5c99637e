"""A command as every rank of a cluster, with the environment that torchrun gives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .shape import INTERFACE, Shape, address, node_name

_GRACE_S = 3.0  # between asking a rank to end and ending it
_TAIL = 30  # lines of a failed rank's output that are shown


class Failed(RuntimeError):
    """A rank failed or the time was up; the message says which and what it printed last."""


@dataclass(frozen=True)
class Result:
    """How a run ended: exit status, the rank it comes from (None: the time was up, 124), seconds,
    and what that rank printed last.
    """

    status: int
    rank: int | None
    seconds: float
    tail: str = ""

    def check(self) -> None:
        """Raises Failed where the status is not 0."""
        if self.status:
            what = (
                f"the time limit of {self.seconds:.0f} s was reached"
                if self.rank is None
                else f"rank {self.rank} ended with status {self.status} after {self.seconds:.1f} s"
            )
            raise Failed(f"{what}; it printed last:\n{self.tail}")


def environment(shape: Shape, rank: int, port: int, loopback: bool) -> dict[str, str]:
    """What a rank finds in its environment, beside what this process has.

    Every node has one interface; what a rank sends to its own node's address the kernel takes over
    loopback, past the limiter (seen by test_cluster.py), so gloo is told of the one.
    """
    node, local = divmod(rank, shape.ranks_per_node)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(shape.ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(shape.ranks_per_node),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": "127.0.0.1" if loopback else address(0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo" if loopback else INTERFACE,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # no name service in a namespace: addresses have no names
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def launch(
    shape: Shape,
    command: Sequence[str],
    timeout: float = 600.0,
    loopback: bool = False,
    extra: Mapping[str, str] | None = None,
) -> Result:
    """Runs `command` as all ranks, on the `network` that is up (`loopback`: on this machine's own),
    until all have ended, one has failed or `timeout` seconds are over; then none is left.

    Rank 0 prints here; what others print is shown where they fail.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autopar-run-") as folder, _port() as port:
        logs = [Path(folder, f"rank{rank}") for rank in range(shape.ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(shape.ranks):
                own = environment(shape, rank, port, loopback)
                prefix = () if loopback else _entering(rank // shape.ranks_per_node)
                variables = {**os.environ, **own, **(extra or {})}
                ranks.append(_start([*prefix, *command], variables, logs[rank], rank == 0))
            status, rank_ended = _watch(ranks, started + timeout)
        finally:
            _end(ranks)
        seconds = time.monotonic() - started
        shown = 0 if rank_ended is None else rank_ended
        return Result(status, rank_ended, seconds, _tail(logs[shown]) if status else "")


def _entering(node: int) -> tuple[str, ...]:
    return ("ip", "netns", "exec", node_name(node))


@contextlib.contextmanager
def _port() -> Iterator[int]:
    """A port that is free on this machine now; within a cluster's own namespaces all are."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield port


def _start(
    command: list[str], variables: dict[str, str], log: Path, here: bool
) -> subprocess.Popen[bytes]:
    """One rank, in a session of its own, so that a Ctrl-C reaches only the launcher."""
    with log.open("wb") as file:
        output: dict[str, Any] = {} if here else {"stdout": file, "stderr": subprocess.STDOUT}
        return subprocess.Popen(
            command, env=variables, start_new_session=True, stdin=subprocess.DEVNULL, **output
        )


def _watch(ranks: list[subprocess.Popen[bytes]], deadline: float) -> tuple[int, int | None]:
    """(exit status, rank) of the first that failed, (0, None) where none did, (124, None) where the
    time was up.
    """
    while True:
        states = [rank.poll() for rank in ranks]
        for rank, state in enumerate(states):
            if state:
                return (state if state > 0 else 128 - state), rank
        if all(state == 0 for state in states):
            return 0, None
        if time.monotonic() > deadline:
            return 124, None
        time.sleep(0.05)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, number)
        deadline = time.monotonic() + _GRACE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace")
    return "\n".join(text.splitlines()[-_TAIL:]) or "(nothing here; rank 0 prints above)"


def sent_bytes() -> int:
    """Bytes that this rank's node has sent over its cable so far; called by a rank. 0 on loopback.

    What ranks of one node send one another is not among them.
    """
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def stop_on_signals() -> None:
    """These signals end this process as an exit does, so that what is open is closed. SIGINT as
    well: a shell's background jobs start with it ignored, and Python then leaves it so.
    """

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
