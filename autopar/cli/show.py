"""`autopar show`: the table of a saved plan. Example: autopar show plan.json."""

from __future__ import annotations

from autopar.cli.command import report_errors
from autopar.cli.options import JsonOption, PlanArgument, SchemaOption
from autopar.cli.terminal import console, plan_facts, print_json, print_summary
from autopar.ir.plan import Plan


def show(
    path: PlanArgument, as_json: JsonOption = False, json_schema: SchemaOption = False
) -> None:
    """Print the table of a saved plan.

    Example: autopar show plan.json
    """
    with report_errors(as_json):
        saved_plan = Plan.load(path)
        if as_json:
            print_json(plan_facts(saved_plan))
        else:
            print_summary(console(), saved_plan, None)
