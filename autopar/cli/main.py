"""The command line: the list of all commands.

Each has a file of its own: `app.command()(sweep.sweep)` adds one. All of them are for people or
(--json) for programs.
"""

from __future__ import annotations

import gc

import typer

from autopar.cli import (
    advise,
    calibrate,
    compare,
    doctor,
    explain,
    graph,
    plan,
    show,
    sweep,
    trace,
    verify,
)
from autopar.cli.command import MEANINGS
from autopar.cli.schema import schema_of

app = typer.Typer(
    name="autopar",
    help="The fastest layout of a PyTorch model on many devices, planned and proved on one.",
    epilog="Exit status: " + "; ".join(f"{s.value} {text}" for s, text in MEANINGS.items()),
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "obj": schema_of},
)

# Every command has a file of its own, and one line here, in the order of --help.
app.command()(plan.plan)
app.command()(verify.verify)
app.command()(show.show)
app.command()(compare.compare)
app.command()(advise.advise)
app.command()(explain.explain)
app.command()(sweep.sweep)
app.command()(trace.trace)
app.command()(graph.graph)
app.command()(calibrate.calibrate)
app.command()(doctor.doctor)


def main() -> None:
    """Run the `autopar` command, as `python -m autopar` does."""
    try:
        app()
    finally:
        gc.freeze()  # what is left ends with the process: looking through it takes two seconds
