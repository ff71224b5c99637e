"""The terminal: where lines go, and numbers with their units as people write them."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

WIDTH = 118  # columns of what goes to a file or a pipe


def console(stderr: bool = False) -> Console:
    """On this moment's stdout or stderr (tracing puts another one in its place for a while); a file
    is given columns enough for the table.
    """
    made = Console(file=sys.stderr if stderr else sys.stdout, highlight=False)
    if not made.is_terminal:
        made.width = max(WIDTH, made.width)
    return made


def line(out: Console, name: str, text: str) -> None:
    out.print(f"[bold]{name:8}[/] {escape(text)}", soft_wrap=True)
