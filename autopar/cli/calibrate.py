"""`autopar calibrate`: this machine measured, for the plans that are made for it.

Example: torchrun --nproc-per-node 4 -m autopar calibrate. runtime/calibrate_on_ranks.py measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from autopar.cli.command import report_errors, require_folder
from autopar.cli.options import MODEL_HELP, BatchOption, JsonOption, SchemaOption
from autopar.cli.terminal import bar, console, print_json, print_line
from autopar.runtime import calibrate_on_ranks
from autopar.tools.targets import Batch, resolve
from autopar.world import ranks as running
from autopar.world.world import CALIBRATED


def calibrate(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help=MODEL_HELP)] = None,
    save: Annotated[
        Path, typer.Option(metavar="FILE", dir_okay=False, help="The world, for plan --world.")
    ] = Path(CALIBRATED),
    seconds: Annotated[float, typer.Option(min=1.0, help="About how long to measure.")] = 120.0,
    batch: BatchOption = None,
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Measure collectives, matmuls, memory and launches on the ranks that run, and write them to
    world.json, which plan uses from then on. Start it with torchrun; one process alone measures its
    device. With TARGET, its own matmuls are measured, too.

    Example: torchrun --nproc-per-node 4 -m autopar calibrate
    """
    with (
        calibrate_on_ranks.open_process_group(),
        report_errors(as_json and running.rank() == 0, quiet=running.rank() > 0),
    ):
        running.together("looking for the folder", lambda: require_folder(save, "--save"))

        def build() -> tuple[nn.Module, Any]:
            built = resolve(str(target), None if batch is None else Batch.parse(batch), 16)
            return built.model, built.inputs

        with _progress_bar() as progress, redirect_stdout(sys.stderr):
            world = calibrate_on_ranks.calibrate_on_ranks(
                build if target else None, seconds, progress
            )
        if running.rank() == 0:
            world.save(save)
            if as_json:
                print_json({"saved": str(save), "world": world.to_json()})
                return
            print_line(console(), "world", str(world))
            print_line(console(), "saved", f"as {save}")


@contextmanager
def _progress_bar() -> Iterator[Callable[[float, str], None]]:
    """Yield what moves a progress bar on rank 0 and does nothing on others."""
    if running.rank() > 0:
        yield lambda share, doing: None
    else:
        with bar(console(stderr=True)) as progress:
            yield progress
