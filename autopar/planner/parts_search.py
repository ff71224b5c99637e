"""How many micro-batches a step takes, where `microbatches="auto"` leaves that open.

Example: a model that would recompute all its blocks to fit takes two parts, if a step in two is
faster. One part is planned first. It stands where it fits and repeats no whole block; else numbers
of parts that divide the rows are tried from the least on, until one fits without repeating blocks.
Of all that fit the fastest step is chosen. api.py asks, and gives what plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.errors import AutoparError, PlanError
from autopar.ir.plan import Plan
from autopar.planner.tracing import Inputs, call_arguments, rows_of

_MOST_TRIES = 5


def in_fastest_parts(
    attempt: Callable[[int], Plan], inputs: Inputs, in_stages: bool = False
) -> Plan:
    """Return the fastest plan that `attempt` makes for a number of parts. Raises what it raises for
    one part, where no other number does. `in_stages`: stages of a pipeline wait less the more parts
    there are, so all numbers are tried.
    """
    found: list[Plan] = []
    refused: PlanError | None = None
    try:
        found.append(attempt(1))
    except PlanError as error:
        refused = error
    if found and not found[0].recompute:
        return found[0]
    for count in _counts(inputs):
        try:
            found.append(attempt(count))
        except AutoparError:  # it cannot be divided so, or does not fit yet
            continue
        if not found[-1].recompute and not in_stages:
            break
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda plan: plan.step_seconds)


def _counts(inputs: Inputs) -> Iterator[int]:
    """Yield the numbers of parts to try: those that divide the rows, doubled or more each time."""
    rows, least, tries = rows_of(call_arguments(inputs)), 2, 0
    for count in range(2, rows + 1):
        if count >= least and rows % count == 0 and tries < _MOST_TRIES:
            yield count
            least, tries = 2 * count, tries + 1
