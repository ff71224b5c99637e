"""Making a plan fit: the modelled peak against the memory that there is, and as little gathered
again or recomputed as it takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from .cost.memory import Budget, refusal
from .cost.peak import peak
from .figures import Memory
from .graphs import blocks
from .passes import recompute
from .program import Program
from .report.summary import twice_seconds
from .world import World


def fitted(
    program: Program,
    world: World,
    budget: Budget | None,
    larger: Callable[[Memory], str] = lambda memory: "",
) -> Program:
    """The emitted program with its blocks recomputed as planned, and the plan with its memory.

    Where that does not fit and recompute is "auto": with as little as it takes made again in the
    backward, in the first blocks. Raises PlanError where nothing does. `budget` None: as planned,
    whatever it needs. `larger`: from what is needed here to the smallest world that it would fit,
    in words. A plan whose memory is known by now is not run again to find out.
    """
    assert program.plan is not None
    if budget is None:
        return recompute.recompute(program)
    if (known := program.plan.memory) is not None and budget.fits(known):
        return Rungs(program, world, budget).remembered(known)
    found, memory = effort(program, world, budget)
    if not budget.fits(memory):
        assert budget.memory_bytes is not None and found.plan is not None
        every = len(found.plan.recompute) == len(blocks(program.module.graph.nodes))
        name, advice = program.plan.layout, larger(memory)
        raise refusal(memory, budget.memory_bytes, world, name, every, advice)
    return found


def effort(program: Program, world: World, budget: Budget) -> tuple[Program, Memory]:
    """As `fitted`, but where nothing fits what comes nearest."""
    found = Rungs(program, world, budget).best()
    return found.program, found.memory


class _Rung(NamedTuple):
    """The blocks that are recomputed, and those that only gather their weights again."""

    recompute: tuple[str, ...]
    regather: tuple[str, ...]


class Tried(NamedTuple):
    """A program with what it drops, what that needs, and the seconds of what runs twice."""

    program: Program
    memory: Memory
    seconds: float


class Rungs:
    """A program that drops more and more of what it makes and makes it again in the backward."""

    def __init__(self, program: Program, world: World, budget: Budget) -> None:
        self.program, self.world, self.budget = program, world, budget
        self.names = blocks(program.module.graph.nodes)
        self.fetching = recompute.regathers(program)
        self.known: dict[_Rung, Tried] = {}
        self._unrun: dict[_Rung, tuple[Program, float]] = {}

    def best(self) -> Tried:
        """As planned where that fits or nothing else may be; else the cheapest that fits, or what
        comes nearest.
        """
        planned = self.planned()
        if self._fits(planned) or self.budget.recompute != "auto":
            return planned
        return self.cheapest(planned)

    def least(self, below: float) -> Tried | None:
        """What takes the fewest seconds of all that fits, if it is fewer than `below` for what runs
        twice: every rung is tried. None where nothing does.
        """
        rungs = [self._planned()]
        if self.budget.recompute == "auto":
            every, fetched, mixed = self._ladders()
            rungs += [*fetched, *mixed, *every]
        best: Tried | None = None
        for rung in dict.fromkeys(rungs):
            if self._made(rung)[1] < below and self._fits(self.tried(rung)):
                best = self.tried(rung)
                below = best.seconds
        return best

    def planned(self) -> Tried:
        return self.tried(self._planned())

    def _planned(self) -> _Rung:
        plan = self.program.plan
        assert plan is not None
        idle = {*self.names} - {*self.fetching}  # blocks that gather no weight
        regather = tuple(name for name in plan.regather if name not in idle)
        return _Rung(plan.recompute, regather)

    def _ladders(self) -> tuple[list[_Rung], list[_Rung], list[_Rung]]:
        """Blocks recomputed, the first ones; blocks that gather again; and all that gather again,
        some of these recomputed.
        """
        names, fetching = self.names, self.fetching
        every = [_Rung(names[: n + 1], ()) for n in range(len(names))]
        fetched = [_Rung((), fetching[: n + 1]) for n in range(len(fetching))]
        mixed = [_Rung(rung.recompute, _without(fetching, rung)) for rung in every if fetching]
        return every, fetched, mixed

    def counted(self) -> Tried:
        """With every weight gathered again that may be."""
        auto = self.budget.recompute == "auto" and self.fetching
        return self.tried(_Rung((), self.fetching)) if auto else self.planned()

    def tried(self, rung: _Rung) -> Tried:
        if rung not in self.known:
            self.known[rung] = self._try(rung)
        return self.known[rung]

    def _dropped(self, rung: _Rung) -> Program:
        assert self.program.plan is not None
        plan = dataclasses.replace(
            self.program.plan, recompute=rung.recompute, regather=rung.regather
        )
        made = recompute.recompute(dataclasses.replace(self.program, plan=plan))
        recompute.check(made)
        return made

    def _made(self, rung: _Rung) -> tuple[Program, float]:
        """The program that drops so much, and the seconds of what runs twice."""
        if rung not in self._unrun:
            made = self._dropped(rung)
            again = twice_seconds(made, self.world) if rung.recompute or rung.regather else 0.0
            self._unrun[rung] = made, again
        return self._unrun[rung]

    def _try(self, rung: _Rung) -> Tried:
        made, seconds = self._made(rung)
        memory = peak(made, self.budget.optimizer, self.world.backend)
        return Tried(self._with(made, memory), memory, seconds)

    def remembered(self, memory: Memory) -> Program:
        """As planned, with what that is known to need."""
        return self._with(self._dropped(self._planned()), memory)

    def _with(self, made: Program, memory: Memory) -> Program:
        assert made.plan is not None
        plan = dataclasses.replace(
            made.plan, memory=memory, peak_bytes=memory.peak, optimizer=self.budget.optimizer
        )
        return dataclasses.replace(made, plan=plan)

    def cheapest(self, start: Tried) -> Tried:
        """What takes the fewest seconds of those that fit; what comes nearest where nothing does.

        Either as few blocks as it takes gather again, and where that is not enough as few as it
        takes of these are recomputed; or as few as it takes are recomputed and the others keep all.
        """
        every, fetched, mixed = self._ladders()
        found: list[tuple[Tried, list[_Rung]]] = []
        if fetched:
            middle = self.tried(fetched[-1])
            found = [(start, fetched) if self._fits(middle) else (middle, mixed)]
        found = [(low, rungs) for low, rungs in found if self._fits(self.tried(rungs[-1]))]
        one = self._made(every[0])[1] if every else 0.0
        if every and not (found and self._guess(*found[0])[1] <= start.seconds + one):
            found += [(start, every)] if self._fits(self.tried(every[-1])) else []
        if not found:
            return min((start, *self.known.values()), key=lambda tried: tried.memory.peak)
        return self._climb(*min(reversed(found), key=lambda pair: self._guess(*pair)[1]))

    def _fits(self, tried: Tried) -> bool:
        return self.budget.fits(tried.memory)

    def _guess(self, low: Tried, rungs: list[_Rung]) -> tuple[int, float]:
        """The first rung that could fit, and its seconds, if every one takes as much off the peak
        and costs as much as the next.
        """
        assert self.budget.memory_bytes is not None
        high = self.tried(rungs[-1])
        part = (low.memory.peak - self.budget.memory_bytes) / (low.memory.peak - high.memory.peak)
        number = min(len(rungs), max(1, math.ceil(part * len(rungs) - 1e-9)))
        return number - 1, low.seconds + (high.seconds - low.seconds) * number / len(rungs)

    def _climb(self, low: Tried, rungs: list[_Rung]) -> Tried:
        """From the guessed rung upwards until it fits."""
        number = self._guess(low, rungs)[0]
        while not self._fits(self.tried(rungs[number])):
            number = min(len(rungs) - 1, number + max(1, len(rungs) // 16))
        return self.tried(rungs[number])


def _without(fetching: tuple[str, ...], rung: _Rung) -> tuple[str, ...]:
    return tuple(name for name in fetching if name not in rung.recompute)
