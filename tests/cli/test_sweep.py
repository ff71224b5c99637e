"""`autopar sweep`: plans of one trace for several numbers of ranks, as a table, CSV and curves."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec as unpatched_find
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.sweep import read_ranks
from autopar.errors import WorldError
from autopar.tools import sweep, sweep_plot
from autopar.tools.sweep import SweepPoint
from commands import refused, run


@pytest.mark.slow
def test_a_sweep_gives_the_plans_of_plan_and_traces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    trace_model = sweep.trace_model

    def count(*arguments: Any) -> Any:
        traces.append(arguments)
        return trace_model(*arguments)

    monkeypatch.setattr(sweep, "trace_model", count)
    arguments = ("sweep", "targets:tiny", "--ranks", "2,4,8", "--price", "3", "--json")
    facts = json.loads(run(*arguments).stdout)
    assert len(traces) == facts["traces"] == 1
    assert [point["ranks"] for point in facts["points"]] == [2, 4, 8]
    for point in facts["points"]:
        plan = json.loads(run("plan", "targets:tiny", "--ranks", str(point["ranks"]),
                              "--json").stdout)  # fmt: skip
        assert point["seconds"] == plan["overlapped"] and point["layout"] == plan["layout"]
        assert point["peak_bytes"] == plan["peak_bytes"]
        assert point["rate"] == plan["throughput"]["rate"] and point["unit"] == "samples"
        dollars = 3 / 3600 * point["ranks"] / point["rate"] * 1e6
        assert point["price_per_million"] == pytest.approx(dollars)


def test_batches_each_have_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    batches = ("--batch", "8x64,16x64", "--ranks", "2,4", "--layout", "ddp")
    printed = run("sweep", "targets:tiny_of", *batches, "--csv", str(path)).stdout
    assert "planned  4 of 4 points, 2 traces, saved as " in printed
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch"], row["ranks"]) for row in rows] == [
        ("8x64", "2"), ("8x64", "4"), ("16x64", "2"), ("16x64", "4"),
    ]  # fmt: skip
    assert all(row["layout"] == "ddp" and float(row["seconds"]) > 0 for row in rows)


def test_a_point_that_cannot_be_says_why(tmp_path: Path) -> None:
    options = ("--world", "dgx-h100", "--layout", "ddp", "--ranks", "8,12,32")
    printed = run("sweep", "targets:tiny", *options).stdout
    assert "12 ranks fill no whole number of nodes" in printed
    assert "refused  32 ranks: " in printed and "planned  1 of 3 points" in printed
    text = refused_after_table("--world", "dgx-h100", "--layout", "ddp", "--ranks", "32")
    assert text.startswith("PlanError: there is no plan of any point: ")


def refused_after_table(*options: str) -> str:
    stderr: str = run("sweep", "targets:tiny", *options, status=2).stderr
    return stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", "8,x"), "WorldError: --ranks 8,x: 'x' is no number of ranks"),
        (("--ranks", "0"), "'0' is no number of ranks"),
        (("--world", "dgx-h100", "--ranks", "9"), "9 ranks fill no whole number of nodes"),
        (("--batch", "8x8,8"), "batch '8': write samples x sequence"),
        (("--csv", "nowhere/x.csv"), "--csv nowhere/x.csv: there is no folder"),
        (("--layout", "5d", "--ranks", "2"), "LayoutError: unknown layout '5d'"),
    ],
)
def test_bad_options_are_refused(options: tuple[str, ...], message: str) -> None:
    assert message in refused("sweep", "targets:tiny", *options)


def test_lists_of_ranks_are_read() -> None:
    assert read_ranks("8,16, 8") == [8, 16]
    with pytest.raises(WorldError, match="write 64,128,256"):
        read_ranks("8,,16")


def points() -> list[SweepPoint]:
    figures: dict[str, Any] = {"layout": "ddp", "mesh": "data8", "unit": "tokens"}
    return [
        SweepPoint(16, "8x64", seconds=0.5, rate=2e3, utilization=0.4, peak_bytes=2**30,
                   price_per_million=2.0, **figures),
        SweepPoint(8, "8x64", seconds=0.9, rate=1e3, utilization=0.5, peak_bytes=2**31,
                   price_per_million=1.0, **figures),
        SweepPoint(12, "8x64", refused="no"),
    ]  # fmt: skip


def test_curves_leave_out_what_was_refused() -> None:
    lines = {title: pairs for title, _, pairs in sweep_plot.curves(points(), priced=True)}
    assert lines["step, ms"] == [(8, 900.0), (16, 500.0)]
    assert lines["memory on each device, GiB"] == [(8, 2.0), (16, 1.0)]
    assert lines["price of a million tokens or samples"] == [(8, 1.0), (16, 2.0)]
    assert len(sweep_plot.curves(points(), priced=False)) == 4


def test_a_page_of_curves(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    sweep_plot.write_page(tmp_path / "x.html", "gpt2", points(), priced=True)
    text = (tmp_path / "x.html").read_text()
    assert "autopar sweep: gpt2" in text and "lines+markers" in text
    assert "<script src=" not in text  # it needs no network


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_others(name: str) -> Any:
        return None if name == "plotly" else unpatched_find(name)

    monkeypatch.setattr(sweep_plot.importlib.util, "find_spec", find_others)
    text = refused("sweep", "targets:tiny", "--plot", "x.html")
    assert "pip install 'autopar[report]'" in text
