"""`autopar doctor`: what is here and what will not work; under torchrun, every check on all ranks.

tools/doctor/machine.py describes the machine, tools/doctor/examination.py runs the checks.
"""

from __future__ import annotations

from pathlib import Path

import typer

from autopar.cli.command import report_errors
from autopar.cli.options import JsonOption, OutOption, RunOption, SchemaOption
from autopar.cli.terminal import console, print_json
from autopar.tools.doctor import examination
from autopar.tools.doctor.description import print_facts
from autopar.tools.doctor.machine import facts as facts_of_machine


def doctor(
    run: RunOption = False,
    out: OutOption = Path("out/doctor"),
    as_json: JsonOption = False,
    json_schema: SchemaOption = False,
) -> None:
    """Say what is here and what will not work; with --run, or under torchrun, check it on all
    ranks: kernels, links, collectives, layouts against one device, a step as planned and measured.

    Exit status 1 where a check failed.

    Example: torchrun --standalone --nproc-per-node 4 -m autopar doctor
    """
    with report_errors(as_json):
        if run or examination.is_started_by_torchrun():
            raise typer.Exit(examination.run(out, as_json))
        facts = facts_of_machine()
        if as_json:
            print_json(facts)
        else:
            print_facts(facts, console())
