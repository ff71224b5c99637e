"""The terminal: consoles on stdout and stderr, and progress on stderr.

Results go to stdout as lines "name text" (`print_line`); `watch_progress` says what long work is
doing and for how long, `bar` how far it is. The other modules of autopar.cli call them.
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
    """Return a console on the current stdout or stderr (tracing replaces them for a while). One
    that is no terminal is at least WIDTH columns wide, so that the table fits.
    """
    out = Console(file=sys.stderr if stderr else sys.stdout, highlight=False)
    if not out.is_terminal:
        out.width = max(WIDTH, out.width)
    return out


def print_line(out: Console, name: str, text: str) -> None:
    """Print a bold name and its text on one line."""
    out.print(f"[bold]{name:8}[/] {escape(text)}", soft_wrap=True)


T = TypeVar("T")

PATIENCE_S = 2.0  # work that takes longer reports progress
QUIET_S = 30.0  # between two lines of progress in a file or a pipe
_QUARTERS = 4  # lines of progress in a file or a pipe


@contextmanager
def bar(console: Console) -> Iterator[Callable[[float, str], None]]:
    """Yield a function to call with (share that is done, what is being done), which moves a
    progress bar. A file or a pipe gets a line for each quarter and each new thing that is done.
    """
    if not console.is_terminal:
        yield _line_reporter(console)
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


def _line_reporter(console: Console) -> Callable[[float, str], None]:
    reported: set[tuple[str, int]] = set()

    def report(share: float, doing: str) -> None:
        quarter = int(share * _QUARTERS)
        if (doing, quarter) not in reported:
            reported.add((doing, quarter))
            console.print(f"{doing} … {share:.0%}", soft_wrap=True)

    return report


def watch_progress(
    doing: str, work: Callable[[Callable[[str], None]], T], quiet: bool = False
) -> T:
    """Return the result of `work`, which is called with a function to report the name of a pass.

    After two seconds stderr says what is being done, in which pass, and for how long, unless
    `quiet`. What a model prints goes to stderr, too: stdout is for results.
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
    reported, reported_at = "", start
    while not done.wait(0.1):
        seconds = time.perf_counter()
        if now[0] != reported or seconds - reported_at > QUIET_S:
            reported, reported_at = now[0], seconds
            console.print(f"{escape(reported)} … {reported_at - start:.0f} s", soft_wrap=True)
