"""How far long work is, and the bar on stderr that says so.

    with shown("planning"):                      # after two seconds: planning: choose ━━━╺━━ …
        step("choose")
        tell("meshes bounded", 12, 26)           # … 12 of 26 meshes bounded  0:00:04

What works calls `step` and `tell`, which cost nothing where nobody watches. api.py runs under
`shown`, on rank 0 alone and only where stderr is a terminal; the command line under `watch`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_S = 2.0  # work that takes longer shows its progress
_REFRESH_S = 0.1


@dataclass
class Work:
    """What is being done: in which step, and how many of how many things of a kind are done."""

    doing: str
    name: str = ""
    what: str = ""
    done: int = 0
    of: int = 0

    @property
    def text(self) -> str:
        return f"{self.doing}: {self.name}" if self.name else self.doing

    @property
    def count(self) -> str:
        return f"{self.done} of {self.of} {self.what}" if self.of else ""


_WATCHED: ContextVar[Work | None] = ContextVar("work", default=None)


def step(name: str) -> None:
    """Say which step of the work begins."""
    work = _WATCHED.get()
    if work is not None:
        work.name, work.what, work.done, work.of = name, "", 0, 0


def tell(what: str, done: int, of: int) -> None:
    """Say how many of how many things are done, as `tell("meshes bounded", 12, 26)`."""
    work = _WATCHED.get()
    if work is not None:
        work.what, work.done, work.of = what, done, of


@contextmanager
def watch(work: Work) -> Iterator[None]:
    """Let `step` and `tell` change `work`."""
    token = _WATCHED.set(work)
    try:
        yield
    finally:
        _WATCHED.reset(token)


@contextmanager
def shown(doing: str) -> Iterator[None]:
    """Show a bar on stderr for what takes longer than two seconds; nothing on ranks other than 0,
    where stderr is no terminal, and where the work is part of other work that is watched.
    """
    if _WATCHED.get() is not None or not sys.stderr.isatty() or _rank() != 0:
        yield
        return
    from rich.console import Console  # a fifth of a second that few calls need

    work, stop = Work(doing), threading.Event()
    out = Console(file=sys.stderr, highlight=False)
    watcher = threading.Thread(target=show_bar, args=(work, stop, out), daemon=True)
    watcher.start()
    try:
        with watch(work):
            yield
    finally:
        stop.set()
        watcher.join()


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def show_bar(work: Work, stop: threading.Event, out: Console) -> None:
    """Show a bar of `work` from PATIENCE_S on until `stop` is set. Without a count it has no
    length.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if stop.wait(PATIENCE_S):
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=out, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as progress:
        task = progress.add_task(work.text, total=None, count="")
        while True:
            total, count = work.of or None, work.count
            progress.update(
                task, description=work.text, completed=work.done, total=total, count=count
            )
            if stop.wait(_REFRESH_S):
                return
