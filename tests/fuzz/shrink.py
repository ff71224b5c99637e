"""A case that fails becomes the smallest one found that fails alike."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from .case import Case, Step
from .simulated import Result

_PLAIN = (
    Step("linear", 1),
    Step("mean_square", 0),
    Step("weighted_sum", 0),
    Step("return_loss", 0),
)
PLAIN_OPS = frozenset({"linear", "mlp", "mean_square", "sum_square", "weighted_sum", "return_loss"})


def shrunk(
    case: Case, result: Result, attempt: Callable[[Case], Result], seconds: float, real: bool
) -> tuple[Case, Result]:
    """Tries what is simpler, keeps what fails alike, until nothing is left to try or the time is
    up. `real`: the number of ranks stays.
    """
    until, again = time.monotonic() + seconds, True
    tried = {case}
    while again and time.monotonic() < until:
        again = False
        for simpler in _simpler(case, real):
            if simpler in tried or time.monotonic() > until:
                continue
            tried.add(simpler)
            simpler_result = attempt(simpler)
            if alike(simpler_result, result):
                case, result, again = simpler, simpler_result, True
                break
    return case, result


def alike(smaller: Result, result: Result) -> bool:
    """Whether two failures may have one cause."""
    if smaller.kind != result.kind:
        return False
    return smaller.kind != "error" or smaller.said.split(":")[0] == result.said.split(":")[0]


def _simpler(case: Case, real: bool) -> Iterator[Case]:
    replace = dataclasses.replace
    for start in range(len(case.steps)):  # most of it at once, then one by one
        if len(case.steps) > 3:
            yield replace(case, steps=case.steps[: start + 1])
    for place in range(len(case.steps)):
        yield replace(case, steps=case.steps[:place] + case.steps[place + 1 :])
    for place in range(len(case.habits)):
        yield replace(case, habits=case.habits[:place] + case.habits[place + 1 :])
    if case.module_edits:
        yield replace(case, module_edits=())
    loss, returned = case.ending
    for other in (_PLAIN[1], _PLAIN[2]):
        yield replace(case, ending=(other, returned))
    yield replace(case, ending=(loss, _PLAIN[3]))
    yield from _fewer_ranks(case, real)
    for place, step in enumerate(case.steps):
        if step.op == "mlp" or (step.op == "linear" and step.draw != 1):
            yield replace(case, steps=(*case.steps[:place], _PLAIN[0], *case.steps[place + 1 :]))
    for place, size in enumerate(case.sizes):
        for smaller in (2, 3, 4, 6):
            if smaller < size and (place or smaller % case.ranks == 0):
                yield replace(case, sizes=(*case.sizes[:place], smaller, *case.sizes[place + 1 :]))
        if not place and size > case.ranks and size % case.ranks == 0:
            yield replace(case, sizes=(case.ranks, *case.sizes[1:]))


def _fewer_ranks(case: Case, real: bool) -> Iterator[Case]:
    """Layouts that are simpler: of two ranks, of one axis, with a name."""
    worlds = [case.ranks] if real else [n for n in (2, 3, 4) if n < case.ranks] + [case.ranks]
    for ranks in worlds:
        simple = ["'ddp'", "'fsdp'", "'megatron'", "'auto'"]
        own = simple.index(case.layout) if case.layout in simple else len(simple)
        for layout in simple[: own if ranks == case.ranks else None]:
            yield dataclasses.replace(case, ranks=ranks, layout=layout)
        if not case.layout.startswith("random_plan") or ranks == case.ranks:
            continue
        for seed in range(4):
            mesh = f"w{ranks}" if ranks < 4 else "w2.x2"
            yield dataclasses.replace(case, ranks=ranks, layout=f"random_plan({mesh!r}, {seed})")
