"""Namespaces, a switch between them, limiters; made and removed. Needs root and Debian's iproute2.

Nothing is made outside the namespaces: the bridge stands in one of its own, the veth pairs go from
there to the nodes. So removing the namespaces removes all, and no address, route or name meets the
machine's own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

from .shape import INTERFACE, Shape, address, burst, is_stale, node_name, queue, switch_name

_MTU = 9000


class Unavailable(RuntimeError):
    """Network namespaces cannot be made here; the message says what is missing."""


def missing() -> str:
    """What keeps this process from making a cluster, in words; "" where nothing does."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"no {' and no '.join(tools)} here: apt-get install iproute2 (Debian)"
    if os.geteuid() != 0:
        return "network namespaces and tc need root"
    return ""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _inside(namespace: str, *command: str) -> str:
    return _run("ip", "netns", "exec", namespace, *command)


@contextlib.contextmanager
def network(shape: Shape) -> Iterator[None]:
    """The nodes of `shape`, up while the block runs; removed however it ends.

    One at a time in a process. Raises Unavailable.
    """
    reason = missing()
    if reason:
        raise Unavailable(reason)
    remove_stale()
    try:
        _up(shape)
        yield
    finally:
        down(shape)


def _up(shape: Shape) -> None:
    switch = switch_name()
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "mtu", str(_MTU), "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "dev", "bridge", "up")
    for node in range(shape.nodes):
        _join(node)
    limit(shape)


def _join(node: int) -> None:
    """A node's namespace, and its cable to the switch."""
    switch, name, port = switch_name(), node_name(node), f"port{node}"
    _run("ip", "netns", "add", name)
    pair = ("link", "add", port, "mtu", str(_MTU), "type", "veth")
    _run("ip", "-n", switch, *pair, "peer", "name", INTERFACE, "mtu", str(_MTU), "netns", name)
    _run("ip", "-n", switch, "link", "set", "dev", port, "master", "bridge", "up")
    _run("ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", "dev", "lo", "up")
    _run("ip", "-n", name, "link", "set", "dev", INTERFACE, "up")
    _settings(name)


def _settings(namespace: str) -> None:
    """The same transport on every machine: reno is in every kernel, and a namespace may choose it.
    Between steps a link is idle: without the second setting each one would start slowly.
    """
    values = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
    for name, value in values.items():
        _inside(namespace, "sysctl", "-q", "-w", f"net.ipv4.{name}={value}")


def limit(shape: Shape) -> None:
    """Sets the rate of every cable, each way: on a running cluster too."""
    for node in range(shape.nodes):
        for namespace, device in ((node_name(node), INTERFACE), (switch_name(), f"port{node}")):
            _limit(namespace, device, shape.rate)


def _limit(namespace: str, device: str, rate: float | None) -> None:
    on = ("tc", "-n", namespace, "qdisc")
    if rate is None:
        subprocess.run((*on, "del", "dev", device, "root"), capture_output=True)
        return
    sizes = ("rate", f"{rate:.0f}bit", "burst", f"{burst(rate)}", "limit", f"{queue(rate)}")
    _run(*on, "replace", "dev", device, "root", "tbf", *sizes)


def down(shape: Shape) -> None:
    """Removes this process's namespaces and what runs in them. Signals wait till it is done."""
    waiting = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    try:
        own = {switch_name(), *(node_name(node) for node in range(shape.nodes))}
        for namespace in own & set(namespaces()):
            _remove(namespace)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def namespaces() -> list[str]:
    """Names of all network namespaces of this machine."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def remove_stale() -> list[str]:
    """Removes what runs that were killed have left; gives the names."""
    stale = [name for name in namespaces() if is_stale(name)]
    for name in stale:
        _remove(name)
    return stale


def _remove(namespace: str) -> None:
    for pid in _run("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "del", namespace)
