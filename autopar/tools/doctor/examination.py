"""An examination: the doctor's checks run one after the other on all ranks, and the report is
written after each, so that a run which is cut off leaves its results. `autopar doctor` calls `run`.

Example, on every rank:

    examination = Examination(Path("out/doctor"))
    with examination.ranks():
        examination.check("versions", exchanges.versions)
    sys.exit(examination.close())

The report is doctor.json and a page, doctor.html: one file that needs no network (`page`).
"""

from __future__ import annotations

import html
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar.errors import RankError
from autopar.ir.plan_table import format_bytes
from autopar.tools.console import console
from autopar.tools.doctor import (
    Finding,
    Result,
    Session,
    exchanges,
    kernels,
    machine,
    merge_findings,
    run_check,
    training,
)
from autopar.tools.doctor.description import SEVERAL
from autopar.world import json_file, store

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --ok: #2e8b57; --failed: #c62828;
  --absent: #a67c00; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left;
  vertical-align: top; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.name { white-space: nowrap; }
.status { border-radius: .6rem; color: white; padding: .05rem .55rem; white-space: nowrap; }
.ok { background: var(--ok); } .failed { background: var(--failed); }
.not-here, .under-way { background: var(--absent); }
pre { font-size: .8rem; margin: .3rem 0; max-height: 24rem; overflow: auto; white-space: pre-wrap; }
summary { cursor: pointer; opacity: .7; }
li { margin: .2rem 0; }
"""


def page(facts: Mapping[str, Any]) -> str:
    """Return the HTML of what `Examination.to_json` returns: the verdict, every check, and the
    machine.
    """
    rows = "\n".join(map(_check_row, facts["checks"]))
    lines = (
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>autopar doctor</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>autopar doctor: {html.escape(verdict(facts))}</h1>",
        f"<p>{html.escape(_subject_text(facts))}</p>",
        "<table><thead><tr><th>check</th><th>result</th><th>figure</th><th>s</th></tr></thead>",
        f"<tbody>\n{rows}\n</tbody></table>",
        _machine_section(facts["machine"]),
        "</body></html>",
    )
    return "\n".join(lines) + "\n"


def verdict(facts: Mapping[str, Any]) -> str:
    """Return the outcome in a few words."""
    counts = facts["counts"]
    if counts["failed"]:
        return f"{counts['failed']} of {len(facts['checks'])} checks failed"
    if counts["under way"]:
        return "it did not end"
    absent = f", {counts['not here']} are not for this machine" if counts["not here"] else ""
    return f"{counts['ok']} checks are well{absent}"


def _subject_text(facts: Mapping[str, Any]) -> str:
    versions = facts["machine"].get("versions", {})
    listed = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    ranks = f"{facts['ranks']} rank{'s' if facts['ranks'] > 1 else ''}"
    return f"{ranks} ({facts['backend']}) on {facts['device']}, {facts['seconds']:.0f} s; {listed}"


def _check_row(check: Mapping[str, Any]) -> str:
    status, figure = check["status"], html.escape(check["why"] or check["figure"])
    details = ""
    if check["facts"]:
        text = html.escape(json.dumps(check["facts"], indent=1, default=str))
        details = f"<details><summary>all of it</summary><pre>{text}</pre></details>"
    return (
        f'<tr><td class="name">{html.escape(check["name"])}</td>'
        f'<td><span class="status {status.replace(" ", "-")}">{status}</span></td>'
        f'<td>{figure}{details}</td><td class="number">{check["seconds"]:.1f}</td></tr>'
    )


def _machine_section(facts: Mapping[str, Any]) -> str:
    """Return the HTML of the devices, what will not work here, and all facts to unfold."""
    if not facts:
        return ""
    devices = "".join(
        f"<li>{html.escape(str(device['name']))}, {format_bytes(device['memory_bytes'])}</li>"
        for device in facts["devices"]
    )
    absent = [f"{a['what']}: {a['why']}" for a in facts["abilities"] if not a["works"]]
    warnings = "".join(f"<li>{html.escape(line)}</li>" for line in (*absent, *facts["warnings"]))
    text = html.escape(json.dumps(facts, indent=1, default=str))
    return (
        f"<h2>Machine of rank 0</h2><ul>{devices}</ul>"
        + (f"<h2>What will not work here</h2><ul>{warnings}</ul>" if warnings else "")
        + f"<details><summary>all of it</summary><pre>{text}</pre></details>"
    )


Check = Callable[[Session], Finding]
COLOURS = {"ok": "green", "failed": "bold red", "not here": "yellow", "under way": "cyan"}
VERSION = 1  # of doctor.json
_PATIENCE = 3  # timeouts of a collective that a failed rank waits for ranks still in theirs
_MOST_WARNINGS = 5


class Examination:
    """The results of checks on this rank's session; rank 0 prints them and writes them to the
    folder `out`, unless that is None.
    """

    def __init__(self, out: Path | None = None, session: Session | None = None) -> None:
        self.session = Session.here() if session is None else session
        self.out, self.results = out, list[Result]()
        self._began = time.perf_counter()
        self._alone: list[tuple[str, Finding, float]] = []
        self._talking = self.session.ranks == 1
        self._facts: dict[str, Any] = {}
        logging.getLogger("torch.distributed.tensor").setLevel(
            logging.ERROR
        )  # it says what is slow
        if self._first:
            self._facts = machine.facts()
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)

    @property
    def _first(self) -> bool:
        return self.session.rank == 0

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Open the process group within the block. The findings of checks that ran before are
        exchanged first.
        """
        with self.session.open():
            self._talking = True
            for name, finding, seconds in self._alone:
                self._exchange(name, finding, seconds)
            self._alone.clear()
            yield

    def check(self, name: str, work: Check) -> None:
        """Run a check. It fails on all ranks where it fails on one, and later checks still run."""
        self._mark_running(name)
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            finding = run_check(lambda: work(self.session))
        texts = dict.fromkeys(str(warning.message).split(" (Triggered")[0] for warning in caught)
        if texts:
            warning_facts = {"warnings": list(texts)[:_MOST_WARNINGS]}
            finding = replace(finding, facts={**finding.facts, **warning_facts})
        seconds = time.perf_counter() - began
        if self._talking:
            self._exchange(name, finding, seconds)
        else:
            self._alone.append((name, finding, seconds))
            self._keep(merge_findings(name, [finding], seconds))

    def close(self, as_json: bool = False) -> int:
        """Print the table on rank 0, or the content of doctor.json. Returns the exit status: 1
        where a check failed.
        """
        if self._first:
            self._write()
            out = console()
            if as_json:
                out.file.write(_to_text(self.to_json()))
            else:
                out.print(table(self.results))
                self._say_files(out)
        return int(any(result.status == "failed" for result in self.results))

    def to_json(self) -> dict[str, Any]:
        """Return the content of doctor.json."""
        counts: list[str] = [result.status for result in self.results]
        return {
            "version": VERSION,
            "ranks": self.session.ranks,
            "backend": self.session.backend or "one rank alone",
            "device": self.session.device.type,
            "seconds": time.perf_counter() - self._began,
            "counts": {status: counts.count(status) for status in COLOURS},
            "machine": self._facts,
            "checks": [result.to_json() for result in self.results],
        }

    def _exchange(self, name: str, finding: Finding, seconds: float) -> None:
        """Exchange the findings of all ranks through the store, as a collective may be what failed,
        and keep and print the result.
        """
        patience = _PATIENCE * self.session.timeout.total_seconds()
        try:
            by_rank = store.all_of([finding.to_json(), seconds], patience)
        except RankError as error:
            lost = replace(finding, fault=f"{finding.fault or 'the check'}; then: {error}")
            by_rank = [[lost.to_json(), seconds]]
        findings = [Finding(**finding_facts) for finding_facts, _ in by_rank]
        result = merge_findings(name, findings, max(took for _, took in by_rank))
        self._keep(result)
        if any(each.raised for each in findings):
            self.session.reopen()
        if self._first:
            self._write()
            colour, figure = COLOURS[result.status], escape(result.why or result.figure)
            line = f"{name}: [{colour}]{result.status}[/] {figure} [dim]{result.seconds:.1f} s[/]"
            console(stderr=True).print(line, soft_wrap=True)

    def _keep(self, result: Result) -> None:
        """Put the result in the place of an earlier one of the same check, else at the end."""
        names = [earlier.name for earlier in self.results]
        if result.name in names:
            self.results[names.index(result.name)] = result
        else:
            self.results.append(result)

    def _mark_running(self, name: str) -> None:
        """Write to the report which check runs now: where that ends the process, the report says
        so.
        """
        if self._first:
            self._keep(Result(name, "under way", why="it did not end"))
            self._write()

    def _write(self) -> None:
        if self.out is None:
            return
        facts = self.to_json()
        json_file.write(self.out / "doctor.json", _to_text(facts))
        json_file.write(self.out / "doctor.html", page(facts))

    def _say_files(self, out: Console) -> None:
        counts = self.to_json()["counts"]
        text = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        where = "" if self.out is None else f"; attach {self.out}/doctor.json and doctor.html"
        took = time.perf_counter() - self._began
        ranks = f"{self.session.ranks} rank{'s' if self.session.ranks > 1 else ''}"
        out.print(f"{text} in {took:.0f} s on {ranks}{where}", soft_wrap=True)


def _to_text(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=1, default=str) + "\n"


def table(results: list[Result]) -> Table:
    """Return a table with a row for each check."""
    grid = Table(title="autopar doctor", title_justify="left")
    grid.add_column("check", no_wrap=True)
    grid.add_column("result", no_wrap=True)
    grid.add_column("figure", overflow="fold")
    grid.add_column("s", justify="right")
    for result in results:
        status = f"[{COLOURS[result.status]}]{result.status}[/]"
        grid.add_row(
            escape(result.name),
            status,
            escape(result.why or result.figure),
            f"{result.seconds:.1f}",
        )
    return grid


def is_started_by_torchrun() -> bool:
    """Whether torchrun has started this process as one of its ranks. Then the checks run without an
    option that asks for them: torchrun would take `--run` for its own `--run-path`.
    """
    return "WORLD_SIZE" in os.environ


def run(out: Path, as_json: bool = False) -> int:
    """Run every check on the ranks that torchrun has started, or on this one, and leave doctor.json
    and doctor.html in a folder. Returns the exit status: 1 where a check failed.
    """
    examination = Examination(out)
    check_each_rank(examination)
    with examination.ranks():
        check_all_ranks(examination)
    status = examination.close(as_json)
    if examination.session.ranks == 1 and not as_json:
        console().print(f"on several ranks: {SEVERAL}", soft_wrap=True)
    return status


def check_each_rank(examination: Examination) -> None:
    """Run the checks that each rank does alone, before the process group is open."""
    for dtype in kernels.DTYPES:
        for name in kernels.KERNELS:
            title = f"{name.lower().replace('_', ' ')} {str(dtype).removeprefix('torch.')}"
            examination.check(f"kernel {title}", partial(kernels.kernel, name=name, dtype=dtype))


def check_all_ranks(examination: Examination) -> None:
    """Run the checks that the ranks do together, first those that others depend on."""
    check = examination.check
    check("versions", exchanges.versions)
    check("devices", exchanges.devices_of_ranks)
    check("links", exchanges.links)
    check("groups", exchanges.groups)
    for kind in exchanges.KINDS:
        check(f"{kind} alone", partial(exchanges.alone, kind=kind))
    for kind in exchanges.FUSED_KINDS:
        check(f"{kind} joined", partial(exchanges.in_bucket, kind=kind))
    for name, layout in training.layouts(examination.session.ranks).items():
        check(f"parity {name}", partial(training.parity, layout=layout))
    check("dropout", kernels.dropout)
    check("dropout of attention", kernels.attention)
    check("step", training.step)
    check("peak", training.peak)
    check("synchronisation", training.synchronisation)
