"""The command line: fresh cases until the time is up; what fails is made smaller and printed."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
import sys
import threading
import time

from .case import HABITS_SHARE, Case, random_case, with_random_plan
from .habits import HABITS
from .ops_tricky import IN_FORWARD
from .shrink import PLAIN_OPS, shrunk
from .simulated import Result
from .source import Built, build
from .table import TABLE
from .workers import Task, Team

_SHRINK_S = 60.0
_PROGRESS_S = 30.0
REAL_RANKS = 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="when to stop")
    parser.add_argument("--cases", type=int, default=0, help="how many at most")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first case; else a fresh one"
    )
    parser.add_argument("--ranks", default="2-16", help="the worlds, such as 2-16 or 4")
    parser.add_argument(
        "--only", default="", help="op kinds, or beginnings, with commas: every case has one"
    )
    parser.add_argument(
        "--without", default="", help="op kinds and habits to leave out, with commas between"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument(
        "--gloo", type=int, nargs="?", const=REAL_RANKS, default=0,
        help=f"on real ranks, {REAL_RANKS} or as many as are named",
    )  # fmt: skip
    parser.add_argument(
        "--habits", type=float, default=HABITS_SHARE, help="the share of cases that have some"
    )
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds; more is a hang")
    parser.add_argument("--case", default="", help="this one case, as a failure prints it")
    parser.add_argument("--list", action="store_true", help="the op kinds, and nothing else")
    return parser.parse_args()


class Fuzzer:
    """Draws cases, runs them on teams of processes, and keeps what came of each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        first, _, last = options.ranks.partition("-")
        self.worlds = (options.gloo,) * 2 if options.gloo else (int(first), int(last or first))
        self.base = int(time.time()) % 10_000_000 * 1000 if options.seed is None else options.seed
        self.started = self.said = time.monotonic()
        self.until = self.started + options.seconds
        self.next, self.lock = 0, threading.Lock()
        self.kinds: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()
        self.drawn: collections.Counter[str] = collections.Counter()
        self.passed: collections.Counter[str] = collections.Counter()
        self.in_forward: collections.Counter[str] = collections.Counter()
        self.failures: list[tuple[str, frozenset[str], int]] = []  # kind, ops, how many like it

    def run(self) -> int:
        threads = [threading.Thread(target=self._job) for _ in range(max(1, self.options.jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._summary()
        return 1 if self.failures else 0

    def _job(self) -> None:
        team = Team(self.options.gloo or 1, bool(self.options.gloo))
        try:
            while (seed := self._take()) is not None:
                case = self._case(seed)
                result = self._try(team, case, seed)
                if result.kind == "refused" and result.said.startswith("LayoutError"):
                    self._try(team, with_random_plan(case, seed), seed)  # which fits any module
        finally:
            team.stop()

    def _try(self, team: Team, case: Case, seed: int) -> Result:
        result = team.run(Task(case, seed), self.options.timeout)
        if self._enter(result):
            self._shrink(team, case, seed, result)
        return result

    def _case(self, seed: int) -> Case:
        case = random_case(seed, self.worlds, self.options.only, self.options.habits)
        without = self.options.without
        steps = tuple(step for step in case.steps if step.op not in without.split(","))
        habits = tuple(habit for habit in case.habits if habit.op not in without.split(","))
        return dataclasses.replace(case, steps=steps, habits=habits)

    def _take(self) -> int | None:
        with self.lock:
            spent = self.options.cases and self.next >= self.options.cases
            if spent or time.monotonic() > self.until:
                return None
            self.next += 1
            return self.base + self.next - 1

    def _enter(self, result: Result) -> bool:
        """Whether it is a failure of a new kind."""
        with self.lock:
            self.kinds[result.kind] += 1
            self.drawn.update(set(result.used))
            has = [what for what, kinds in IN_FORWARD.items() if kinds & set(result.used)]
            self.in_forward.update((*has, " and ".join(has)) if len(has) > 1 else has)
            if result.kind == "ok":
                self.passed.update(set(result.used))
            if result.kind == "refused":
                self.refusals[re.sub(r"[0-9]+", "#", result.said)[:70]] += 1
            if time.monotonic() > self.said + _PROGRESS_S:
                self.said = time.monotonic()
                print(self._line(), flush=True)
            for place, (kind, ops, times) in enumerate(self.failures):
                if result.kind == kind and ops and ops <= set(result.used):
                    self.failures[place] = kind, ops, times + 1
                    return False
        return result.failed

    def _shrink(self, team: Team, case: Case, seed: int, result: Result) -> None:
        def attempt(simpler: Case) -> Result:
            return team.run(Task(simpler, seed), self.options.timeout)

        small, last = shrunk(case, result, attempt, _SHRINK_S, bool(self.options.gloo))
        with self.lock:
            self.failures.append((result.kind, frozenset(last.used) - PLAIN_OPS, 1))
            print(report(len(self.failures), small, seed, last, self.options.gloo), flush=True)

    def _line(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        return f"{time.monotonic() - self.started:.0f} s: {self.kinds.total()} cases: {counts}"

    def _summary(self) -> None:
        print(f"\n{self._line()}; seeds from {self.base} on")
        habits = {kind: self.drawn[kind] for kind in HABITS if self.drawn[kind]}
        if habits:
            print(f"  habits in {', '.join(f'{n} cases: {kind}' for kind, n in habits.items())}")
        if self.in_forward:
            counts = (f"{what} in {n} cases" for what, n in sorted(self.in_forward.items()))
            print(f"  in forward: {', '.join(counts)}")
        for said, times in self.refusals.most_common(12):
            print(f"  refused {times} times: {said}")
        never = sorted(n for n in self.drawn if not self.passed[n] and self.drawn[n] > 1)
        if never:
            print(f"  never passed: {', '.join(f'{n} ({self.drawn[n]})' for n in never)}")
        for number, (kind, ops, times) in enumerate(self.failures, 1):
            print(f"  failure {number}, {times} times: {kind}, {', '.join(sorted(ops)) or 'plain'}")


def report(number: int, case: Case, seed: int, result: Result, gloo: bool) -> str:
    """A failure as it is printed: what is wrong, the module, the layout, how to run it again."""
    how = f"--gloo {case.ranks} " if gloo else ""
    lines = [f"\n-- failure {number}: {result.kind} " + "-" * 50, result.said, ""]
    built = build(case, seed)
    lines += [built.text, *_habit_lines(built, gloo)]
    lines += [f"layout {case.layout} on {case.ranks} ranks", ""]
    lines += [f'python -m tests.fuzz {how}--seed {seed} --case "{case}"']
    return "\n".join(lines)


def _habit_lines(built: Built, gloo: bool) -> list[str]:
    if not built.habits:
        return []
    when = "one before each further step" if gloo else "all before the first step"
    return [f"# habits, {when}; rank is 0 for the plain module", *(h for _, h in built.habits), ""]


def one_case(options: argparse.Namespace) -> int:
    """Runs the one case of the command line."""
    team, case, seed = Team(options.gloo or 1, bool(options.gloo)), None, options.seed or 0
    try:
        case = Case.parse(options.case)
        result = team.run(Task(case, seed), options.timeout)
    finally:
        team.stop()
    print(
        report(1, case, seed, result, options.gloo)
        if result.failed
        else f"{result.kind} {result.said}"
    )
    return 1 if result.failed else 0


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    options = arguments()
    if options.list:
        print("\n".join(f"{entry.kind:9} {name}" for name, entry in TABLE.items()))
        return 0
    return one_case(options) if options.case else Fuzzer(options).run()


if __name__ == "__main__":
    sys.exit(main())
