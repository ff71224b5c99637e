"""Processes that run cases: one that simulates all ranks, or a team of real ones. A case that hangs
or takes its process down is a failure like any other; the team then starts anew.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from .case import Case
from .simulated import Result

_STARTED_S = 240.0  # importing torch, four times on a machine that does other things too
_ALONE_S = 20.0  # after one rank has failed, for the others to notice
_RENEWED = 60  # cases of a team of real ranks: process groups stay open as long as their process


class Task(NamedTuple):
    """What is sent to a worker: a case and the seed of its weights and inputs, or a module's text
    with a layout and a number of ranks.
    """

    case: Case | None
    seed: int = 0
    text: str = ""
    layout: str = ""
    ranks: int = 0


class Team:
    """`size` processes that each get every case; with `gloo` they are ranks of one another."""

    def __init__(self, size: int = 1, gloo: bool = False) -> None:
        self.size, self.gloo, self.tasks_sent = size, gloo, 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None  # where ranks meet

    def run(self, task: Task, timeout_s: float) -> Result:
        """What came of it. Starts the processes where there are none."""
        if not self.processes or (self.gloo and self.tasks_sent >= _RENEWED):
            self._start()
        self.tasks_sent += 1
        for pipe in self.pipes:
            pipe.send(task)
        answers = self._answers(timeout_s)
        if len(answers) == self.size:
            result = _together(answers)
        else:
            result = next(
                (answer for answer in answers.values() if answer.failed), None
            ) or self._lost(answers, timeout_s)
        if len(answers) < self.size or (self.gloo and result.kind in ("error", "hang")):
            self.stop()
        return result

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # at which a process that waits for a case ends
        for process in self.processes:
            process.join(0.5)
            process.kill()
            process.join()
        self.processes, self.pipes = [], []
        if self.folder is not None:
            self.folder.cleanup()

    def _start(self) -> None:
        self.stop()
        self.tasks_sent, context = 0, multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="autopar-fuzz-")
        store = str(Path(self.folder.name, "store"))
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            how = theirs, rank, self.size if self.gloo else 0, store
            process = context.Process(target=work, args=how, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        started = self._answers(_STARTED_S)
        assert len(started) == self.size, "the processes that run the cases did not start"

    def _answers(self, timeout_s: float) -> dict[int, Any]:
        """What the processes send, by number, as far as they do in time."""
        answers: dict[int, Any] = {}
        left, until = set(range(self.size)), time.monotonic() + timeout_s
        while left and time.monotonic() < until:
            for pipe in wait([self.pipes[i] for i in left], until - time.monotonic()):
                number = self.pipes.index(pipe)  # type: ignore[arg-type]
                left.discard(number)
                try:
                    answers[number] = self.pipes[number].recv()
                except (EOFError, ConnectionError):
                    return answers
                if isinstance(answers[number], Result) and answers[number].failed:
                    until = min(until, time.monotonic() + _ALONE_S)
        return answers

    def _lost(self, answers: dict[int, Result], timeout_s: float) -> Result:
        """A process has ended, or none of them answers any more."""
        for process in self.processes:
            process.join(0.5)
        codes = [p.exitcode for p in self.processes if p.exitcode is not None]
        if codes:
            name = signal.Signals(-codes[0]).name if codes[0] < 0 else f"exit status {codes[0]}"
            return Result("error", f"the process died: {name}")
        return Result("hang", f"no answer in {timeout_s:.0f} s")


def _together(answers: dict[int, Any]) -> Result:
    """The result of all ranks: a failed one's if there is one."""
    kinds = {answer.kind for answer in answers.values()}
    failed = [answer for answer in answers.values() if answer.failed]
    if failed:
        return failed[0]
    if len(kinds) > 1:
        return Result("error", f"the ranks end differently: {sorted(kinds)}", answers[0].used)
    return answers[0]


# -- in the process --------------------------------------------------------------------------------
def work(pipe: Connection, rank: int, ranks: int, store: str) -> None:
    """Runs cases until the pipe is closed; `ranks` real ones, or 0: all ranks are simulated."""
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from . import ranks as real
    from . import simulated

    if ranks:
        real.join(rank, ranks, store)
    pipe.send(None)
    module = real if ranks else simulated
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)  # what C++ says of what is refused
        pipe.send(_done(module, task))


def _done(module: Any, task: Task) -> Result:
    if task.case is not None:
        result: Result = module.run(task.case, task.seed)
    else:
        from .source import run_text

        result = module.run_built(run_text(task.text), task.layout, task.ranks)
    return result
