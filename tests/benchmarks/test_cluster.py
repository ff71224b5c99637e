"""The emulated cluster: what it is told, what it makes, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import (
    Failed,
    Shape,
    launch,
    missing,
    network,
    rate_text,
    read_rate,
    read_shape,
    remove_stale,
)
from benchmarks.cluster.__main__ import main, parse
from benchmarks.cluster.launch import environment
from benchmarks.cluster.network import namespaces
from benchmarks.cluster.shape import address, is_stale, node_name, owner
from launch import RANK_SCRIPTS, ROOT

RANKS = RANK_SCRIPTS / "cluster_ranks.py"
needs_root = pytest.mark.skipif(bool(missing()), reason=f"no cluster here: {missing()}")


def command(task: str, out: Path) -> list[str]:
    return [sys.executable, str(RANKS), task, str(out)]


def facts(out: Path, rank: int) -> dict[str, Any]:
    return json.loads(Path(f"{out}.{rank}").read_text())


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


# -- what it is told -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "rate"), [("400mbit", 4e8), ("2gbit", 2e9), ("2.5Gbit", 2.5e9), ("unlimited", None)]
)
def test_rates_are_read_as_tc_writes_them(text, rate):
    assert read_rate(text) == rate
    assert rate_text(rate) == text.lower()


@pytest.mark.parametrize("text", ["fast", "400", "400 mbit", "-1gbit", "1tbit"])
def test_other_rates_are_refused(text):
    with pytest.raises(ValueError, match="write it as 400mbit"):
        read_rate(text)


def test_a_shape_is_read_and_checked():
    assert read_shape("2x4") == read_shape("2×4") == (2, 4)
    assert str(Shape(2, 4, 1e8)) == "2×4 at 100mbit" and Shape(2, 4).ranks == 8
    with pytest.raises(ValueError, match="write nodes x ranks"):
        read_shape("8")
    for sizes in ((0, 1), (251, 1), (1, 0), (1, 1, 10.0)):
        with pytest.raises(ValueError, match=r"nodes|ranks|rate"):
            Shape(*sizes)


def test_options_before_the_command_are_the_clusters():
    options = parse(["--nodes", "3", "--ranks-per-node", "2", "--rate", "1gbit", "--", "a", "--b"])
    assert options.shape == Shape(3, 2, 1e9) and options.command == ["a", "--b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command"),
        (["--rate", "fast", "--", "a"], "write it as 400mbit"),
        (["--nodes", "0", "--", "a"], "0 nodes"),
        (["--loopback", "--rate", "1gbit", "--", "a"], "loopback has no limit"),
    ],
)
def test_a_wrong_command_line_says_why(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        parse(arguments)
    assert left.value.code == 2 and message in capsys.readouterr().err


# -- names and addresses ---------------------------------------------------------------------------
def test_names_tell_the_living_from_the_dead():
    own = node_name(0)
    assert not is_stale(own)
    started = own.split("-")[2]
    assert is_stale(own.replace(started, str(int(started) - 1)))  # the id was used again
    assert is_stale("autopar-4194304-1-switch")
    assert not is_stale("somebody-else") and not is_stale("autopar-lab")


def test_addresses_are_private_and_apart():
    addresses = {address(node, pid=9) for node in range(250)}
    assert len(addresses) == 250 and all(a.startswith("10.77.9.") for a in addresses)


def test_ranks_are_numbered_node_by_node():
    shape = Shape(2, 3)
    ranks = [environment(shape, rank, 5, loopback=False) for rank in range(6)]
    assert [r["GROUP_RANK"] for r in ranks] == list("000111")
    assert [r["LOCAL_RANK"] for r in ranks] == list("012012")
    assert {r["MASTER_ADDR"] for r in ranks} == {address(0)}


# -- loopback: no root needed ----------------------------------------------------------------------
def test_ranks_on_loopback_find_what_torchrun_gives(tmp_path):
    out = tmp_path / "facts"
    launch(Shape(1, 2), command("variables", out), timeout=20, loopback=True).check()
    assert [facts(out, rank)["RANK"] for rank in range(2)] == ["0", "1"]
    assert facts(out, 1)["WORLD_SIZE"] == "2" and facts(out, 1)["MASTER_ADDR"] == "127.0.0.1"


def test_a_failing_rank_ends_the_others_and_is_named(tmp_path):
    done = launch(Shape(1, 2), command("failing", tmp_path / "x"), timeout=20, loopback=True)
    assert done.status == 7 and done.rank == 1 and done.seconds < 15
    with pytest.raises(Failed, match=r"rank 1 ended with status 7(.|\n)*rank 1 cannot go on"):
        done.check()


def test_a_time_limit_ends_all(tmp_path):
    done = launch(Shape(1, 2), command("waiting", tmp_path / "x"), timeout=1, loopback=True)
    assert (done.status, done.rank) == (124, None)
    with pytest.raises(Failed, match="time limit"):
        done.check()


def test_without_root_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--rate", "1gbit", "--", "true"]) == 2
    assert "need root" in (said := capsys.readouterr().err) and "--loopback" in said
    monkeypatch.setenv("PATH", "/nowhere")
    assert "apt-get install iproute2" in missing()


# -- with root -------------------------------------------------------------------------------------
def left_of(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"autopar-{pid}-")]


@needs_root
def test_nothing_is_left_after_a_failing_command(tmp_path):
    shape = Shape(2, 1, 1e9)
    with network(shape):
        assert len(left_of(os.getpid())) == 3
        done = launch(shape, command("failing", tmp_path / "x"), timeout=20)
    assert done.rank == 1
    assert left_of(os.getpid()) == []


def started(out: Path) -> subprocess.Popen[bytes]:
    """The command line with ranks that wait, once they do."""
    line = [sys.executable, "-m", "benchmarks.cluster", "--rate", "1gbit", "--"]
    run = subprocess.Popen([*line, *command("waiting", out)], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not out.with_suffix(".up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(left_of(run.pid)) == 3
    return run


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(tmp_path, number):
    run = started(tmp_path / "x")
    run.send_signal(number)
    assert run.wait(20) == 128 + number and left_of(run.pid) == []


@needs_root
def test_what_a_killed_run_leaves_the_next_one_removes(tmp_path):
    run = started(tmp_path / "x")
    run.kill()
    run.wait(20)
    gone = set(left_of(run.pid))
    assert len(gone) == 3 and gone <= set(remove_stale())
    assert left_of(run.pid) == []
    assert owner().split("-")[1] == str(os.getpid())


@pytest.mark.slow
@needs_root
def test_ranks_of_a_node_talk_past_the_limited_link(tmp_path):
    shape, out = Shape(2, 2, 1e9), tmp_path / "facts"
    with network(shape):
        launch(shape, command("gloo", out), timeout=60).check()
    for rank in range(4):
        of_rank = facts(out, rank)
        assert of_rank["sum"] == 8.0  # two ranks, then four of those sums
        assert of_rank["inside"] < 500_000 < 4_000_000 < of_rank["all"]  # the sums are of 4 MB


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("rate", ["100mbit", "400mbit", "2gbit"])  # above, others' work shows
def test_the_rate_stays_within_15_percent(tmp_path, rate, monkeypatch):
    shape, out = Shape(2, 1, read_rate(rate)), tmp_path / "facts"
    assert shape.rate is not None
    monkeypatch.setenv("BYTES", str(round(shape.rate / 8 * 0.4)))
    with network(shape):
        launch(shape, command("transfer", out), timeout=30).check()
    assert facts(out, 0)["rate"] == pytest.approx(shape.rate, rel=0.15)
