"""One examination: checks run one after the other on all ranks, and their results are written after
each, so that a run which is cut off leaves what it found.

Example, on every rank:

    examination = Examination(Path("out/doctor"))
    with examination.ranks():
        examination.check("versions", basics.versions)
    sys.exit(examination.close())
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar.doctor import machine
from autopar.doctor.page import page
from autopar.doctor.result import Finding, Result, found_by, merged
from autopar.doctor.session import Session
from autopar.errors import RankError
from autopar.report import terminal
from autopar.world import json_file, store

Check = Callable[[Session], Finding]
COLOURS = {"ok": "green", "failed": "bold red", "not here": "yellow", "under way": "cyan"}
VERSION = 1  # of doctor.json
_PATIENCE = 3  # collectives' timeouts that a rank which fails waits for those in its collective
_MOST_WARNINGS = 5


class Examination:
    """The results of checks on this rank's session; rank 0 says them and writes them in `out`, a
    folder, or nowhere.
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
        """All ranks can talk within: the process group is open. What was checked before is told."""
        with self.session.open():
            self._talking = True
            for name, finding, seconds in self._alone:
                self._tell(name, finding, seconds)
            self._alone.clear()
            yield

    def check(self, name: str, work: Check) -> None:
        """Run a check. It fails on all ranks where it fails on one, and then others still run."""
        self._under_way(name)
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            finding = found_by(lambda: work(self.session))
        texts = dict.fromkeys(str(one.message).split(" (Triggered")[0] for one in said)
        if texts:
            told = {"warnings": list(texts)[:_MOST_WARNINGS]}
            finding = replace(finding, facts={**finding.facts, **told})
        seconds = time.perf_counter() - began
        if self._talking:
            self._tell(name, finding, seconds)
        else:
            self._alone.append((name, finding, seconds))
            self._keep(merged(name, [finding], seconds))

    def close(self, as_json: bool = False) -> int:
        """Print the table on rank 0, or what is in doctor.json. Returns the exit status: 1 where a
        check failed.
        """
        if self._first:
            self._write()
            out = terminal.console()
            if as_json:
                out.file.write(_json(self.to_json()))
            else:
                out.print(table(self.results))
                self._say_files(out)
        return int(any(result.status == "failed" for result in self.results))

    def to_json(self) -> dict[str, Any]:
        """What doctor.json holds."""
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

    def _tell(self, name: str, finding: Finding, seconds: float) -> None:
        """Tell all ranks what each found: through the store, as a collective may be what failed."""
        patience = _PATIENCE * self.session.timeout.total_seconds()
        try:
            told = store.all_of([finding.to_json(), seconds], patience)
        except RankError as error:
            lost = replace(finding, fault=f"{finding.fault or 'the check'}; then: {error}")
            told = [[lost.to_json(), seconds]]
        findings = [Finding(**one) for one, _ in told]
        result = merged(name, findings, max(took for _, took in told))
        self._keep(result)
        if any(one.raised for one in findings):
            self.session.reopen()
        if self._first:
            self._write()
            colour, figure = COLOURS[result.status], escape(result.why or result.figure)
            line = f"{name}: [{colour}]{result.status}[/] {figure} [dim]{result.seconds:.1f} s[/]"
            terminal.console(stderr=True).print(line, soft_wrap=True)

    def _keep(self, result: Result) -> None:
        """In the place of what was said of the same check before, else at the end."""
        names = [one.name for one in self.results]
        if result.name in names:
            self.results[names.index(result.name)] = result
        else:
            self.results.append(result)

    def _under_way(self, name: str) -> None:
        """Say in the file what runs now: where that ends the process, the file tells of it."""
        if self._first:
            self._keep(Result(name, "under way", why="it did not end"))
            self._write()

    def _write(self) -> None:
        if self.out is None:
            return
        facts = self.to_json()
        json_file.write(self.out / "doctor.json", _json(facts))
        json_file.write(self.out / "doctor.html", page(facts))

    def _say_files(self, out: Console) -> None:
        counts = self.to_json()["counts"]
        parts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        where = "" if self.out is None else f"; attach {self.out}/doctor.json and doctor.html"
        took = time.perf_counter() - self._began
        ranks = f"{self.session.ranks} rank{'s' if self.session.ranks > 1 else ''}"
        out.print(f"{parts} in {took:.0f} s on {ranks}{where}", soft_wrap=True)


def _json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=1, default=str) + "\n"


def table(results: list[Result]) -> Table:
    """A row for each check."""
    shown = Table(title="autopar doctor", title_justify="left")
    shown.add_column("check", no_wrap=True)
    shown.add_column("result", no_wrap=True)
    shown.add_column("figure", overflow="fold")
    shown.add_column("s", justify="right")
    for one in results:
        status = f"[{COLOURS[one.status]}]{one.status}[/]"
        shown.add_row(escape(one.name), status, escape(one.why or one.figure), f"{one.seconds:.1f}")
    return shown
