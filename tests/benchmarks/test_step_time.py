"""Step times: what is asked for, who is right, who wins; and one small cell from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks.cluster import Shape
from benchmarks.models import SUBJECTS, llama
from benchmarks.step_time import __main__ as step_time
from benchmarks.step_time import cells, peers, summaries, traces
from benchmarks.step_time import pages as step_pages
from benchmarks.step_time.ranks import Single, Timed, judge
from launch import ROOT


def timed(name, seconds, **facts):
    bytes_ = [facts.pop("cable", 10e6)] * len(seconds)
    both = {"forward_backward": seconds, "cpu_seconds": seconds, "cable_bytes": bytes_}
    return {**vars(Timed(name)), "seconds": seconds, **both, **facts}


def cell(rate, *contestants, model="gpt"):
    facts = {"model": model, "nodes": 2, "ranks_per_node": 2, "rate": rate, "load": 0.1, "steps": 3}
    facts["cores"] = 2
    origin = {"calibrated": False, "world": "w", "date": "2000-01-01", "command": "c"}
    return {**facts, **origin, "machine": cells.machine(), "contestants": list(contestants)}


PEER = timed("DDP", [1.0, 2.0, 1.2])
AUTO = timed("autopar auto", [0.8, 1.6, 1.0], cable=5e6, mesh="x4")
REFUSED = timed("FSDP2 × tensor", [], reason="refused: no grid")


def summary(*arguments, date="2000-01-01", **facts):
    return summaries.summary({**cell(*arguments, **facts), "date": date})


def printed(thing):
    console = Console(width=130, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(thing)
    return console.export_text()


# -- what is asked for -----------------------------------------------------------------------------
def test_all_cells_by_default_and_one_when_quick():
    assert len(step_time.parse([]).cells) == 4 * 3 * 4
    (only,) = step_time.parse(["--quick"]).cells
    assert only == ("gpt", Shape(2, 2, 1e9))


def test_the_earlier_row_is_peers_alone():
    options = step_time.parse(["--earlier"])
    assert [shape.rate for _, shape in options.cells] == [2e8, 1e9, 5e9]
    assert set(options.contestants) == set(step_time.EARLIER["1gbit"])


@pytest.mark.parametrize("wrong", [["--rates", "fast"], ["--shapes", "4"], ["--models", "opt"]])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(SystemExit):
        step_time.parse(wrong)


# -- who is right ----------------------------------------------------------------------------------
def test_a_wrong_loss_or_gradient_disqualifies():
    single = Single([4.0, 3.0], 2.0)
    for losses, norm, wrong in (
        ([4.0, 3.0002], 2.0, ""),
        ([4.0, 3.001], 2.0, "WRONG: its loss"),
        ([4.0, 3.0], 4.0, "WRONG: its gradient's norm"),
        ([4.0, float("nan")], 2.0, "WRONG"),
    ):
        contestant = Timed("x", losses=losses, gradient_norm=norm)
        judge(contestant, single)
        assert contestant.reason.startswith(wrong) and bool(contestant.reason) == bool(wrong)


# -- who wins --------------------------------------------------------------------------------------
def test_ratios_are_of_steps_of_one_round():
    assert cells.paired(AUTO, PEER) == pytest.approx(1.25)  # of medians it would be 1.2


def test_more_is_wanted_where_the_link_is_the_bottleneck():
    slow, slowest = (timed("DDP", [1.0, 2.0, 1.2], cable=c) for c in (32e6, 60e6))
    for rate, peer, wanted in (
        (4e8, PEER, 1.0), (4e8, slow, 1.15), (4e8, slowest, 1.3), (None, slow, 0.97)
    ):  # fmt: skip
        judged = summaries.verdict(cell(rate, peer, AUTO, REFUSED))
        assert judged["wanted"] == wanted and judged["met"] == (wanted < 1.25)
        assert judged["peer"] == "DDP"


def test_a_wrong_contestant_wins_nothing():
    wrong = timed("FSDP2", [0.1, 0.1, 0.1], reason="WRONG: its loss")
    assert summaries.verdict(cell(1e9, PEER, wrong, AUTO))["peer"] == "DDP"
    assert summaries.verdict(cell(1e9, wrong, AUTO)) is None


def test_rounding_makes_no_verdict():
    almost = timed("DDP", [0.996])
    judged = summaries.verdict(cell(1e9, almost, timed("autopar auto", [1.0])))
    assert (judged["ratio"], judged["wanted"], judged["met"]) == (1.0, 1.0, False)


def test_the_table_lists_the_fastest_first_and_the_refused_last():
    shown = printed(step_time.table(cell(4e8, PEER, REFUSED, AUTO)))
    assert shown.index("autopar auto") < shown.index("DDP") < shown.index("refused: no grid")


# -- what is kept ----------------------------------------------------------------------------------
def test_a_cell_replaces_its_older_self(tmp_path):
    path = tmp_path / "new" / "results.json"
    for rate, peer in ((4e8, PEER), (1e9, PEER), (4e8, REFUSED)):
        cells.keep(path, cell(rate, peer), "command")
    saved_cells = cells.load(path)["cells"]
    assert [c["rate"] for c in saved_cells] == [1e9, 4e8]
    assert saved_cells[1]["contestants"][0]["reason"] == "refused: no grid"


def test_a_summary_has_what_the_page_shows():
    wrong = timed("FSDP2", [0.1, 0.1, 0.1], reason="WRONG: its loss")
    uneven = timed("tensor", [1.23456, 3.45678, 2.34567])
    short = summary(4e8, PEER, AUTO, wrong, uneven)
    peer, _, out, rounded = short["contestants"]
    assert peer["seconds"] == {"median": 1.2, "least": 1.0, "most": 2.0} and not peer["reason"]
    assert out == {"name": "FSDP2", "reason": "WRONG: its loss", "seconds": None}
    assert rounded["seconds"] == {"median": 2.346, "least": 1.23, "most": 3.46}
    assert short["verdict"] == {
        "peer": "DDP", "ratio": 1.25, "wanted": 1.0, "share": 0.17, "met": True
    }  # fmt: skip


def test_a_pages_file_keeps_the_newest_of_each_cell(tmp_path):
    path = tmp_path / "new" / "page.json"
    older, newer = (summary(4e8, PEER, AUTO, date=f"2000-01-0{day}") for day in (1, 3))
    other = summary(None, PEER, AUTO, REFUSED, date="2000-01-02")
    assert summaries.merge(path, [older, other]) == [older, other]
    assert summaries.merge(path, [newer]) == [other, newer]
    assert summaries.merge(path, [older]) == [other, newer]  # left in OUT by a run before
    assert cells.load(path)["cells"] == [other, newer]


def test_the_page_has_every_figure_and_its_picture(tmp_path):
    even = timed("tensor", [0.2588, 0.2588, 0.31])  # its least is rounded to more than its median
    clusters = [
        summary(4e8, PEER, AUTO, REFUSED),
        summary(None, PEER, AUTO, even),
        summary(1e9, AUTO, model="llama"),
    ]
    page = tmp_path / "benchmarks.md"
    step_pages.write(clusters, page)
    text = page.read_text()
    assert "| model | cluster | 400mbit | 1gbit | unlimited |" in text
    assert "| gpt | 2×2 | 1.25 DDP |  |" in text and "| llama | 2×2 |  |  |  |" in text
    assert "| 2×2 | 400mbit | unlimited |" in text and "1.200 (1.00–2.00)" in text
    assert "| tensor |  | 0.259 (0.26–0.31) |" in text
    assert "- FSDP2 × tensor: refused: no grid" in text
    facts = cells.machine()
    machine = f"{facts['cpu']}, {facts['system']}, torch {facts['torch']}"
    assert f"Timed on 2000-01-01. Machines: {machine}." in text
    drawn = (tmp_path / "images" / "step-time.svg").read_text()
    assert drawn.count("<circle") == 3 + 2  # a key for each rate, a dot for each cell with a peer


def test_the_page_here_is_what_the_committed_summaries_give(tmp_path):
    committed = cells.load(summaries.COMMITTED)["cells"]
    step_pages.write(committed, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "benchmarks.md").read_text()


def test_only_cells_that_the_page_lacks_are_run(tmp_path, monkeypatch):
    ran = []

    def measured(model, shape, settings):
        ran.append(model)
        return cell(shape.rate, PEER, AUTO, model=model)

    monkeypatch.setattr(cells, "measured", measured)
    monkeypatch.setattr(step_time, "stop_on_signals", lambda: None)
    page, out, short_file = tmp_path / "page.md", str(tmp_path / "out"), tmp_path / "kept.json"
    known = summary(None, PEER, AUTO)
    summaries.merge(short_file, [known])
    options = ["--models", "gpt", "llama", "--shapes", "2x2", "--rates", "unlimited", "--missing"]
    step_time.main([*options, "--out", out, "--docs", str(page), "--summaries", str(short_file)])
    assert ran == ["llama"]
    first, second = cells.load(short_file)["cells"]
    assert first == known and second["model"] == "llama"
    assert "### gpt, " in page.read_text() and "### llama, " in page.read_text()
    step_time.main([*options, "--out", out])
    assert ran == ["llama", "gpt"]  # without the page OUT alone counts


@pytest.mark.parametrize("more", [[], ["--docs"]])
def test_no_cells_are_an_error_that_says_what_to_do(more, tmp_path, monkeypatch, capsys):
    """As where every cell failed: no page is written."""
    monkeypatch.setattr(step_time, "stop_on_signals", lambda: None)
    page, short_file = tmp_path / "page.md", tmp_path / "kept.json"
    options = [*more, str(page), "--summaries", str(short_file)] if more else []
    assert step_time.main(["--no-run", "--out", str(tmp_path / "out"), *options]) == 1
    said = capsys.readouterr().out
    assert ("has a cell" if more else "has no cell") in said and "without --no-run" in said
    assert not page.exists() and not short_file.exists()


# -- the models ------------------------------------------------------------------------------------
def test_models_and_batches_are_the_same_on_every_rank():
    subject = SUBJECTS["tiny"]
    first, two = subject.model().state_dict(), subject.model().state_dict()
    assert all(torch.equal(first[name], two[name]) for name in first)
    assert torch.equal(subject.batches(2)[1][0], subject.batches(2)[1][0])


def test_a_peer_that_would_cut_a_head_in_two_is_refused():
    mesh = SimpleNamespace(size=lambda: 8)
    with pytest.raises(ValueError, match="4 key and value heads do not split over 8 ranks"):
        peers.split(llama(96, 16, 64, 8, 4, 80, 2), mesh)


# -- all of it -------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_small_cell_from_end_to_end(tmp_path):
    """On loopback or namespaces, as this machine allows: all peers and auto are right."""
    options = "--models tiny --shapes 2x2 --rates unlimited --warmups 1 --steps 1 --timeout 300"
    names = ["--contestants", "DDP", "HSDP", "FSDP2 × tensor", "autopar auto"]
    command = [sys.executable, "-m", "benchmarks.step_time", *options.split(), *names]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--docs", str(tmp_path / "page.md"),
         "--summaries", str(tmp_path / "page.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (measured,) = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [t["name"] for t in cells.standing(measured)] == names[1:]
    assert all(len(t["seconds"]) == 15 for t in measured["contestants"])
    (short,) = cells.load(tmp_path / "page.json")["cells"]
    assert short == summaries.summary(measured) and short["verdict"] is not None
    assert (tmp_path / "images").exists()


# -- where the time goes ---------------------------------------------------------------------------
def event(name, start, end, category="cpu_op"):
    return {"ph": "X", "cat": category, "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6}


def test_a_trace_is_split_into_computing_hidden_and_exposed():
    events = [
        event("aten::mm", 0, 2),
        event("aten::addmm", 1, 3),  # nested or overlapping: an instant counts once
        event("gloo:all_reduce", 2, 5, "user_annotation"),
        event("gloo:all_gather", 7, 8, "user_annotation"),
        event("_c10d_functional::wait_tensor", 3, 5),
        event("autograd::engine::evaluate_function", 0, 9),
        {"ph": "M", "name": "process_name"},
    ]
    split = traces.account("x", events)
    figures = (split.step, split.computing, split.communicating, split.hidden, split.exposed)
    assert figures == pytest.approx((9, 3, 4, 1, 3)) and split.neither == pytest.approx(3)
    assert split.collectives == {"all_reduce": 1, "all_gather": 1}
    assert "1 all_gather, 1 all_reduce" in printed(traces.table([split]))


def test_clusters_with_as_many_ranks_have_a_table_each():
    sizes = [(2, 2), (4, 1)]
    clusters = [
        cell(rate, PEER) | {"nodes": nodes, "ranks_per_node": each}
        for rate in (4e8, 1e9)
        for nodes, each in sizes
    ]
    order = summaries.ordered(clusters)
    assert [(c["nodes"], c["rate"]) for c in order] == [(2, 4e8), (2, 1e9), (4, 4e8), (4, 1e9)]
