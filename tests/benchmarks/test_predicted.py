"""Predicted against measured, and the overhead by hand: the arithmetic; small runs of each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import autopar
from autopar.planner.space import candidates
from benchmarks.cluster import Failed
from benchmarks.model import predicted
from benchmarks.model.predicted import ALWAYS, Pair, groups_of, kendall
from benchmarks.models import SUBJECTS
from benchmarks.step_time import overhead
from benchmarks.step_time.forced import FORCED
from benchmarks.step_time.ranks import Timed
from launch import ROOT
from plans import subject
from priced import EMULATED


def pairs(modelled, measured):
    return [Pair(str(i), *pair) for i, pair in enumerate(zip(modelled, measured, strict=True))]


# -- predicted -------------------------------------------------------------------------------------
def test_kendall_counts_pairs_in_order():
    assert kendall(pairs([1, 2, 3], [10, 20, 30])) == 1
    assert kendall(pairs([1, 2, 3], [30, 20, 10])) == -1
    # The example of Kendall's tau-b with ties: 4 pairs agree, 1 does not, one is tied in each.
    assert kendall(pairs([1, 2, 2, 3], [1, 2, 3, 2])) == pytest.approx(2 / 5)
    assert kendall(pairs([1, 1], [1, 2])) == 0


def timed(name, seconds, modelled):
    graphs = {"forward_backward": [x / 2 for x in seconds], "scheduled": modelled / 4}
    return {**vars(Timed(name)), "seconds": seconds, "modelled": modelled, **graphs}


def test_groups_are_joined_and_summed_up():
    auto, ddp = timed("autopar auto", [1.0, 1.2], 1.0), timed("autopar ddp", [2.0, 2.0], 1.8)
    later = timed("autopar ddp", [3.0, 3.0], 1.8)
    groups = [
        {"model": "gpt", "contestants": [auto, ddp, timed("autopar 4d z4", [4.0], 5.0)]},
        {"model": "gpt", "contestants": [auto, later, timed("autopar fsdp", [1.0], 0.9)]},
    ]
    assert predicted.drift(groups) == pytest.approx(1.5)
    totals = predicted.summary(predicted.joined(groups))
    assert totals["layouts"] == 3 and totals["kendall"] == 1
    assert totals["median_error"] == pytest.approx(0.25)  # of 0.28, 0.25, 0.10
    assert totals["graphs_kendall"] == 1
    assert totals["graphs_median_error"] == pytest.approx(0.55)  # of 0.64, 0.375, 0.55
    assert totals["auto_over_fastest"] == pytest.approx(1.1)
    assert totals["repeated"] == 0  # of one layout that was timed twice


def test_steps_count_by_what_auto_and_ddp_took_in_their_round():
    def group(pace, *others):
        always = [timed(name, [2 * s for s in pace], 1.0) for name in ALWAYS]
        return {"model": "gpt", "contestants": [*always, *others]}

    slow_at_last = group([1.0, 1.0, 4.0], timed("autopar fsdp", [3.0, 3.0, 12.0], 1.0))
    fast = group([0.5, 0.5, 1.0], timed("autopar megatron", [1.0, 1.5, 3.0], 1.0))
    cell = predicted.joined(predicted.levelled([slow_at_last, fast]))
    steps_of = {t["name"]: t["seconds"] + t["forward_backward"] for t in cell["contestants"]}
    assert steps_of["autopar ddp"] == pytest.approx([2.0] * 6 + [1.0] * 6)
    assert steps_of["autopar fsdp"] == pytest.approx([3.0] * 3 + [1.5] * 3)
    assert steps_of["autopar megatron"] == pytest.approx([2.0, 3.0, 3.0, 1.0, 1.5, 1.5])
    assert slow_at_last["contestants"][2]["seconds"] == [3.0, 3.0, 12.0]


def test_a_group_without_auto_and_ddp_cannot_be_compared():
    cell = {"model": "gpt", "nodes": 2, "ranks_per_node": 2, "rate": None}
    group = {**cell, "contestants": [timed("autopar fsdp", [1.0], 1.0)]}
    with pytest.raises(Failed, match="gpt, 2×2 at unlimited"):
        predicted.levelled([group])


def test_measured_ranks_are_compared_with_themselves():
    steady = timed("autopar ddp", [1.0, 1.0, 1.0, 1.0], 1.0)
    either = [timed(str(i), [2.0, 3.0, 2.0, 3.0][i:] + [2.0] * i, 1.0) for i in range(2)]
    cell = {"contestants": [steady, *either]}
    assert predicted.repeated(cell) == pytest.approx(1 / 3)  # two pairs agree, one does not


def test_every_layout_is_in_one_group_and_auto_in_each():
    groups = groups_of(list(FORCED), 7)
    assert all(group[:2] == ALWAYS for group in groups)
    rest = [name for group in groups for name in group[2:]]
    assert sorted([*rest, "autopar ddp"]) == sorted(f"autopar {name}" for name in FORCED)


def test_all_forced_layouts_fit_four_ranks():
    small = SUBJECTS["tiny"]
    program = subject(small.model(), small.batches(1)[0]).program
    assert len(FORCED) >= 24
    assert all(list(candidates(layout, 4, program)) for layout in FORCED.values())


@pytest.mark.slow
def test_no_two_forced_layouts_come_to_the_same_plan():
    small = SUBJECTS["tiny"]
    model, batch = small.model(), small.batches(1)[0]
    plans = [autopar.plan(model, EMULATED, batch, layout=layout) for layout in FORCED.values()]
    assert len({(plan.seconds, plan.overlapped) for plan in plans}) == len(FORCED)


def test_a_world_of_an_earlier_run_is_of_one_rate(tmp_path, capsys):
    file = tmp_path / "world.json"
    with pytest.raises(SystemExit):
        predicted.parse(["--rates", "1gbit", "--world", str(file)])
    file.write_text("{}")
    assert predicted.parse(["--rates", "1gbit", "--world", str(file)]).world == file
    with pytest.raises(SystemExit):
        predicted.parse(["--rates", "1gbit", "200mbit", "--world", str(file)])
    assert "measured at the one rate given" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_run_from_end_to_end(tmp_path):
    options = "--model tiny --rates unlimited --layouts ddp megatron --steps 1 --warmups 1"
    done = run("model.predicted", *options.split(), "--calibrate", "5", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 layouts: median error" in " ".join(done.stdout.split())
    (cell,) = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert cell["calibrated"] and (tmp_path / "world-unlimited.json").exists()
    assert all(
        t["modelled"] > 0 and t["scheduled"] > 0 and not t["reason"] for t in cell["contestants"]
    )


# -- overhead --------------------------------------------------------------------------------------
def results(*seconds, losses=(2.0, 2.0, 2.0)):
    names = (overhead.HAND, overhead.EMITTED, overhead.EAGER)
    both = {"seconds": dict(zip(names, seconds)), "losses": dict(zip(names, losses))}
    return {"layout": "ddp", "ranks": 2, **both}


def test_ratios_are_of_one_round():
    recorded = results([1.0, 2.0], [1.1, 2.0], [2.0, 1.0])
    assert overhead.ratios(recorded, overhead.EMITTED, overhead.HAND) == [1.1, 1.0]


def test_another_loss_is_named():
    assert overhead.wrong(results([1], [1], [1])) == ""
    said = overhead.wrong(results([1], [1], [1], losses=(2.0, 2.1, 2.0)))
    assert said == "2 ranks, ddp: emitted is 5.0e-02 off"


@pytest.mark.slow
def test_by_hand_emitted_and_eager_agree(tmp_path):
    path = tmp_path / "overhead.json"
    options = "--pairs 3 --width 64 --layers 1 --sequence 16"
    done = run("step_time.overhead", *options.split(), "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    recorded = json.loads(path.read_text())["results"]
    assert [(f["ranks"], f["layout"]) for f in recorded] == [
        (1, "one device"), (2, "ddp"), (2, "megatron"),
    ]  # fmt: skip
    assert all(len(s) == 3 for f in recorded for s in f["seconds"].values())


def run(module, *options):
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
