"""The terminal: where lines go, and numbers with their units as people write them.

Progress on stderr: how far, what is being done, how long it takes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

WIDTH = 118  # columns of what goes to a file or a pipe


def console(stderr: bool = False) -> Console:
    """On this moment's stdout or stderr (tracing puts another one in its place for a while); a file
    is given columns enough for the table.
    """
    made = Console(file=sys.stderr if stderr else sys.stdout, highlight=False)
    if not made.is_terminal:
        made.width = max(WIDTH, made.width)
    return made


def print_line(out: Console, name: str, text: str) -> None:
    out.print(f"[bold]{name:8}[/] {escape(text)}", soft_wrap=True)


T = TypeVar("T")

PATIENCE_S = 2.0  # what takes longer says that it is at work
QUIET_S = 30.0  # between two such lines where nobody watches a terminal
_QUARTERS = 4  # lines of progress where nobody watches a terminal


@contextmanager
def bar(console: Console) -> Iterator[Callable[[float, str], None]]:
    """What to call with (share that is done, what is being done). A file or a pipe gets a line for
    each quarter and each new thing that is done.
    """
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda share, doing: progress.update(task, completed=share, description=doing)


def _lines(console: Console) -> Callable[[float, str], None]:
    said: set[tuple[str, int]] = set()

    def report(share: float, doing: str) -> None:
        quarter = int(share * _QUARTERS)
        if (doing, quarter) not in said:
            said.add((doing, quarter))
            console.print(f"{doing} … {share:.0%}", soft_wrap=True)

    return report


def watch_progress(
    doing: str, work: Callable[[Callable[[str], None]], T], quiet: bool = False
) -> T:
    """The result of `work`; after two seconds stderr says what is being done, in which pass, and
    for how long, unless `quiet`. `work` is given what to call with the name of a pass. What a model
    prints goes to stderr, too: stdout is for results.
    """
    done, now = threading.Event(), [doing]

    def report(name: str) -> None:
        now[0] = f"{doing}: {name}"

    arguments = (now, done, console(stderr=True))
    watcher = threading.Thread(target=_watch, args=arguments, daemon=True)
    if not quiet:
        watcher.start()
    try:
        with redirect_stdout(sys.stderr):
            return work(report)
    finally:
        done.set()
        if not quiet:
            watcher.join()


def _watch(now: list[str], done: threading.Event, console: Console) -> None:
    start = time.perf_counter()
    if done.wait(PATIENCE_S):
        return
    if console.is_terminal:
        with console.status(escape(now[0])) as status:
            while not done.wait(0.1):
                status.update(f"{escape(now[0])} … {time.perf_counter() - start:.0f} s")
        return
    said, at = "", start
    while not done.wait(0.1):
        seconds = time.perf_counter()
        if now[0] != said or seconds - at > QUIET_S:
            said, at = now[0], seconds
            console.print(f"{escape(said)} … {at - start:.0f} s", soft_wrap=True)
