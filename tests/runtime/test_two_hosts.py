"""Two network namespaces are two hosts: torchrun on each, one model on the ranks of both; and one
host alone goes on when the other is lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Shape, missing, network
from benchmarks.cluster.shape import INTERFACE, address, node_name
from launch import RANK_SCRIPTS, environment

SHAPE, PORT, SECONDS = Shape(2, 2), 29500, 180
STEPS_SAVED, FATAL = 2, 4
QUICK = (
    "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5"  # a lost host is missed
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"no namespaces here: {missing()}"),
]


def torchrun(host: int, nodes: str, command: list[str]) -> list[str]:
    """torchrun as docs/multi-node.md has it, within a host."""
    return [
        "ip", "netns", "exec", node_name(host),
        sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1",
        "--nnodes", nodes, "--nproc-per-node", str(SHAPE.ranks_per_node),
        "--rdzv-id", "7", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{PORT}",
        "--rdzv-conf", f"is_host={host == 0},{QUICK}", "--local-addr", address(host),
        *command,
    ]  # fmt: skip


def run(folder: Path, nodes: str, script: str, *arguments: str) -> tuple[dict[str, Any], list[int]]:
    """What rank 0 of a script saw on both hosts, and the exit status of each host's torchrun."""
    out = folder / "facts.json"
    command = [str(RANK_SCRIPTS / script), str(out), *arguments]
    variables = environment(
        GLOO_SOCKET_IFNAME=INTERFACE,
        TORCH_CPP_LOG_LEVEL="ERROR",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    logs = [folder / f"host{host}.txt" for host in range(SHAPE.nodes)]
    with network(SHAPE):  # what runs in the namespaces goes with them
        hosts = []
        for host, log in enumerate(logs):
            with log.open("w") as file:
                started = subprocess.Popen(
                    torchrun(host, nodes, command),
                    env=variables,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            hosts.append(started)
        statuses = [host.wait(SECONDS) for host in hosts]
    assert out.exists(), "\n".join(log.read_text()[-3000:] for log in logs)
    return json.loads(out.read_text()), statuses


def test_two_hosts_train_as_one_device_does(tmp_path: Path) -> None:
    facts, statuses = run(tmp_path, "2", "hosts_ranks.py")
    assert statuses == [0, 0]
    assert facts["losses"] == pytest.approx(facts["one device"], rel=1e-5)
    assert facts["levels"] == [2, 2] and sorted(facts["hosts"]) == [0, 0, 1, 1]
    assert min(facts["sent"]) > 10_000  # bytes over the cable, from either host


def test_a_host_goes_on_alone_when_the_other_is_lost(tmp_path: Path) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    facts, statuses = run(tmp_path, "1:2", "restart_ranks.py", checkpoints, str(FATAL), "host")
    assert statuses == [0, -9]  # killed
    assert (facts["ranks"], facts["start"]) == (2, STEPS_SAVED)
    assert facts["losses"] == pytest.approx(facts["undisturbed"][STEPS_SAVED:], abs=1e-5)
