"""Consoles on stdout and stderr, and lines "name text" on them."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

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
