"""A progress bar on stderr: how far, what is being done, how long it still takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

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
