"""What the commands share: how they refuse, what status they end with, and how they build a target.

Example: inside a command, `with report_errors(as_json): ...` prints a user's mistake in red, as
JSON too, and ends with status 2. Every file of this folder that has a command calls this one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.markup import escape

from autopar.cli.terminal import console, print_json, watch_progress
from autopar.errors import AutoparError, VerificationError
from autopar.ir.plan_table import format_ranks
from autopar.tools.targets import Batch, Target, resolve
from autopar.world import World


class ExitStatus(enum.IntEnum):
    """The exit statuses of all commands; MEANINGS says what each is."""

    DONE = 0
    CHECK_FAILED = 1
    REFUSED = 2
    INTERRUPTED = 130  # typer's own


MEANINGS = {
    ExitStatus.DONE: "done",
    ExitStatus.CHECK_FAILED: "a check failed: one of `doctor`'s, or `verify` found a difference; "
    "or the reader of a pipe has gone; or, with a traceback, autopar itself is at fault",
    ExitStatus.REFUSED: "refused: an option, the target, the layout, the world, the batch or a "
    "file is not valid, or no plan fits; the message says what, where and what to do",
    ExitStatus.INTERRUPTED: "interrupted, as by Ctrl-C",
}


@contextmanager
def report_errors(as_json: bool, quiet: bool = False) -> Iterator[None]:
    """Print a user's mistake in red, unless `quiet`, and in --json; exit with REFUSED, or with
    CHECK_FAILED where a layout was found to be wrong.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (AutoparError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        if as_json:
            print_json({"error": type(error).__name__, "message": text})
        message = f"[bold red]{type(error).__name__}:[/] [red]{escape(text)}[/]"
        if not quiet:
            console(stderr=True).print(message, soft_wrap=True)
        wrong = isinstance(error, VerificationError)
        raise typer.Exit(ExitStatus.CHECK_FAILED if wrong else ExitStatus.REFUSED) from None


def require_folder(path: Path | None, option: str) -> None:
    """Raise FileNotFoundError where the folder of a file to be written does not exist."""
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {path.parent}")


def build_target(text: str, batch: str | None, samples: int, real: bool = False) -> Target:
    """Return the target that a command names, with progress; arguments as `targets.resolve` has
    them.
    """
    parsed = None if batch is None else Batch.parse(batch)
    return watch_progress(f"building {text}", lambda report: resolve(text, parsed, samples, real))


def ranks_text(world: World) -> str:
    """Return the ranks of a world in words: "8 ranks"."""
    return format_ranks(world.ranks)
