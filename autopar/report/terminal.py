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


def count(things: int) -> str:
    """Parameters, samples: with B for billions."""
    return amount(things).replace("G", "B").strip()


def amount(value: float) -> str:
    """A number with the prefix of its thousands, as "8.03 G"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.0f} "


def memory(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.2f} MiB"


def duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
