"""Rematerialization: which blocks run their cheap ops again in the backward pass, gather their
weights again or recompute all their activations, so that a plan fits the memory.

Example: of 12 blocks that do not fit, the first 5 are recomputed, or all 12 run their cheap ops
again and the first 2 are recomputed, whichever costs fewer seconds. Each such set of blocks is a
rung; rungs of more and more blocks form a ladder (rungs.py), and the search climbs to the first
that fits.

`RematerializationSteps` prices a rung exactly, on the emitted program; `Estimated` interpolates,
for deep models. `rematerialize_to_fit` is the last step of planning: an emitted program and a
budget enter, the program with its recompute regions leaves. Called by confirm.py, fit.py
and world_size.py.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from autopar.cost.block_memory import Rise, peak_of, segments_of
from autopar.cost.memory import Budget, optimizer_bytes, refusal, step_bytes
from autopar.cost.microbatches import (
    memory_of_microbatches,
    microbatch_count,
    unreduced_bytes,
    with_results,
)
from autopar.cost.peak import peak
from autopar.cost.summary import (
    gathered_output_bytes,
    rematerialization_seconds,
    rematerialization_seconds_by_block,
)
from autopar.ir.deep_models import DeepModel
from autopar.ir.graph import block_name, blocks
from autopar.ir.plan import Plan
from autopar.ir.plan_table import Memory
from autopar.ir.program import Program
from autopar.ir.sharding_rule import value_of
from autopar.passes import emit_program, recompute
from autopar.planner.rungs import Ladder, Names, Rematerialized, ladders
from autopar.world import World

_GUESSES = 3  # of the first rung that fits; after that what is left is halved


class TriedRematerialization(NamedTuple):
    """A rung that was priced: the blocks, the memory at the peak, and the seconds of what runs
    twice.
    """

    rung: Rematerialized
    memory: Memory
    seconds: float


class RematerializationSearch(ABC):
    """A search over the rungs of one program.

    `names`: its blocks in order; `fetching`: those that gather weights; `cheap`: those that have
    cheap ops to run again; `start`: the rung that its plan has already.
    """

    def __init__(
        self, names: Names, fetching: Names, cheap: Names, plan: Plan, budget: Budget
    ) -> None:
        self.names, self.fetching, self.cheap, self.budget = names, fetching, cheap, budget
        self.start = Rematerialized(
            plan.recompute,
            tuple(n for n in plan.regather if n in fetching or n not in names),
            tuple(n for n in plan.rerun if n in cheap or n not in names),
        )
        self.known: dict[Rematerialized, TriedRematerialization] = {}

    @abstractmethod
    def seconds_of(self, rung: Rematerialized) -> float:
        """Return the seconds of what runs twice on this rung."""

    @abstractmethod
    def memory_of(self, rung: Rematerialized) -> Memory:
        """Return the memory held at the peak on this rung."""

    def tried(self, rung: Rematerialized) -> TriedRematerialization:
        """Return the rung with its memory and seconds, priced once."""
        if rung not in self.known:
            self.known[rung] = TriedRematerialization(
                rung, self.memory_of(rung), self.seconds_of(rung)
            )
        return self.known[rung]

    def planned(self) -> TriedRematerialization:
        """Return the rung that the plan has already."""
        return self.tried(self.start)

    def counted(self) -> TriedRematerialization:
        """Return the rung on which every weight that may be gathered again is."""
        auto = self.budget.recompute == "auto" and self.fetching
        return self.tried(Rematerialized((), self.fetching)) if auto else self.planned()

    def best(self) -> TriedRematerialization:
        """Return the planned rung where it fits or nothing else is allowed; else the cheapest rung
        that fits, or the one that comes nearest.
        """
        planned = self.planned()
        if self._fits(planned) or self.budget.recompute != "auto":
            return planned
        return self._cheapest()

    def least(self, below: float) -> TriedRematerialization | None:
        """Return the fitting rung of fewest seconds, if these are fewer than `below`; None without
        one. Rungs are tried in the order of their seconds.
        """
        rungs = [self.start]
        if self.budget.recompute == "auto":
            rungs += [rung for ladder in self._ladders() for rung in ladder.rungs]
        for rung in sorted(dict.fromkeys(rungs), key=self.seconds_of):
            if self.seconds_of(rung) >= below:
                break
            if self._fits(self.tried(rung)):
                return self.tried(rung)
        return None

    def settled(self, estimate: RematerializationSearch) -> TriedRematerialization:
        """Return what `best` does, starting from the rung that an estimate has planned: a little
        more is recomputed where that does not fit, less where there is room.
        """
        if self.budget.recompute != "auto" or not any(self.start):
            return self.best()
        nothing = Rematerialized((), ())
        ladders = (ladder for ladder in self._ladders() if self.start in ladder.rungs)
        low, above = next(ladders, Ladder(nothing, [self.start]))
        rungs = [low, *above] if low == nothing else [nothing, low, *above]
        index = rungs.index(self.start)
        while not self._fits(self.tried(rungs[index])) and index + 1 < len(rungs):
            index += 1
        while index and self._has_room(rungs[index - 1], rungs[index], estimate):
            if not self._fits(self.tried(rungs[index - 1])):
                break
            index -= 1
        return self.tried(rungs[index])

    def _has_room(
        self, less: Rematerialized, rung: Rematerialized, estimate: RematerializationSearch
    ) -> bool:
        """Whether rung `less` should fit, by the estimated difference of the two peaks."""
        peak_of_less, peak_of_rung = (estimate.tried(each).memory.peak for each in (less, rung))
        limit = self.budget.memory_bytes
        return (
            limit is not None
            and self.tried(rung).memory.peak + peak_of_less - peak_of_rung <= limit
        )

    def _ladders(self) -> list[Ladder]:
        return ladders(self.names, self.fetching, self.cheap)

    def _cheapest(self) -> TriedRematerialization:
        """Return the fitting rung of fewest seconds, or the one that comes nearest where none fits.

        Of each ladder only the rungs are looked at that take fewer seconds than the best so far: if
        the last of these does not fit, none does.
        """
        best: TriedRematerialization | None = None
        for low, rungs in self._ladders():
            least = math.inf if best is None else best.seconds
            cheaper = rungs[: bisect.bisect_left(rungs, least, key=self.seconds_of)]
            if cheaper and self._fits(self.tried(cheaper[-1])):
                best = self._first_that_fits(low, cheaper)
        return best or min(self.known.values(), key=lambda tried: tried.memory.peak)

    def _first_that_fits(
        self, low: Rematerialized, rungs: list[Rematerialized]
    ) -> TriedRematerialization:
        """Return the first of these rungs that fits, where the last one does and `low` does not: it
        is guessed as if every rung took as much off the peak as the next, then halved.
        """
        assert self.budget.memory_bytes is not None
        fails, fits, guesses = -1, len(rungs) - 1, _GUESSES
        while fits - fails > 1:
            middle = (fails + fits) // 2
            if guesses:
                start = self.tried(rungs[fails] if fails >= 0 else low).memory.peak
                taken = max(1.0, start - self.tried(rungs[fits]).memory.peak)
                share = (start - self.budget.memory_bytes) / taken
                guessed = fails + math.ceil(share * (fits - fails) - 1e-9)
                middle, guesses = min(max(guessed, fails + 1), fits - 1), guesses - 1
            if self._fits(self.tried(rungs[middle])):
                fits = middle
            else:
                fails = middle
        return self.tried(rungs[fits])

    def _fits(self, tried: TriedRematerialization) -> bool:
        return self.budget.fits(tried.memory)


class RematerializationSteps(RematerializationSearch):
    """The rungs of an emitted program, priced exactly: each is rewritten and its peak simulated."""

    def __init__(self, program: Program, world: World, budget: Budget) -> None:
        assert program.plan is not None
        self.program, self.world = program, world
        self._programs: dict[Rematerialized, Program] = {}
        names = blocks(program.module.graph.nodes)
        fetching, cheap = recompute.regathers(program), recompute.reruns(program)
        super().__init__(names, fetching, cheap, program.plan, budget)

    def seconds_of(self, rung: Rematerialized) -> float:
        """Return the seconds of what runs twice on this rung."""
        return rematerialization_seconds(self.program_at(rung), self.world) if any(rung) else 0.0

    def memory_of(self, rung: Rematerialized) -> Memory:
        """Return the simulated memory at the peak on this rung."""
        return peak(self.program_at(rung), self.budget.optimizer, self.world)

    def program_at(self, rung: Rematerialized) -> Program:
        """Return the program rematerialized as the rung says."""
        if rung not in self._programs:
            assert self.program.plan is not None
            plan = dataclasses.replace(self.program.plan, **rung._asdict())
            program = recompute.recompute(dataclasses.replace(self.program, plan=plan))
            recompute.check(program)
            self._programs[rung] = program
        return self._programs[rung]


class BlockRung(NamedTuple):
    """What one block does again in the backward: all of it, gathers of its weights, cheap ops."""

    recompute: bool = False
    regather: bool = False
    rerun: bool = False


BLOCK_RUNGS = (
    BlockRung(),
    BlockRung(regather=True),
    BlockRung(rerun=True),
    BlockRung(regather=True, rerun=True),
    BlockRung(recompute=True),
    # again: the backward of a block frees its input within that of the block before, if that is
    # recomputed too, so of these two the second is measured
    BlockRung(recompute=True),
)


class Estimated(RematerializationSearch):
    """The rungs of a deep program, put together from what a block holds and takes in each way.

    A shorter program runs once, in which each of six equal blocks goes its way; where a model has
    fewer of a kind, a few times (cost/block_memory.py). A block with layouts of its own beside
    a run of equal ones is taken to save what one of them saves.
    """

    def __init__(self, deep: DeepModel, world: World, budget: Budget) -> None:
        chosen = deep.program
        assert chosen.plan is not None
        self.deep, self.world = deep, world
        several = DeepModel(chosen, deep, more=len(BLOCK_RUNGS))
        self._short = RematerializationSteps(emit_program(several.longer, world), world, budget)
        self._kinds: dict[str, str] = {}  # of every block: a name that equal blocks share
        self._followers: dict[str, tuple[str, ...]] = {}  # by block: those left out that follow it
        samples_by_kind: dict[str, tuple[str, ...]] = {}  # by kind: blocks that go each another way
        for run in several.runs:
            for equal in zip(*run, strict=True):  # the blocks at one place of their units
                names_of_kind = tuple(map(block_name, equal))
                self._kinds |= dict.fromkeys(names_of_kind, names_of_kind[0])
                samples_by_kind[names_of_kind[0]] = names_of_kind[1 : 1 + len(BLOCK_RUNGS)]
            left_out = (block for unit in run[1 + len(BLOCK_RUNGS) : -1] for block in unit)
            last = run[len(BLOCK_RUNGS)][-1]
            self._followers[block_name(last)] = tuple(map(block_name, left_out))
        self._like: dict[str, str] = {}  # of a block outside of the runs: the kind of a run beside
        run_at = {run[0][0][0]: run for run in several.runs}
        for name in self._short.names:
            if name in self._kinds:
                continue
            self._kinds[name] = name
            path, _, number = name.rpartition(".")
            if path in run_at:  # at the place in the unit where its turn would be
                unit = run_at[path][0]
                twin = unit[(int(number) - unit[0][1]) % len(unit)]
                self._like[name] = self._kinds[block_name(twin)]
            else:
                samples_by_kind[name] = (name,)
        names = blocks(chosen.module.graph.nodes)
        fetching, cheap = (
            tuple(n for n in names if samples_by_kind.get(self._kinds[n], (n,))[0] in able)
            for able in (self._short.fetching, self._short.cheap)
        )
        super().__init__(names, fetching, cheap, chosen.plan, budget)
        self._rises: dict[tuple[str, BlockRung], Rise] = {}
        self._seconds: dict[tuple[str, BlockRung], float] = {}
        self._segments: tuple[str, ...] = ()
        self._measure(samples_by_kind)
        self._base = self._stored_bytes()

    def _measure(self, samples_by_kind: Mapping[str, Sequence[str]]) -> None:
        """Run the shorter program until each kind of block has gone every way."""
        runs = max(
            math.ceil(len(BLOCK_RUNGS) / len(of_kind)) for of_kind in samples_by_kind.values()
        )
        for number in range(runs):
            rung_by_block = dict.fromkeys(self._like, BlockRung())
            for of_kind in samples_by_kind.values():
                for place, name in enumerate(of_kind):
                    rung_by_block[name] = BLOCK_RUNGS[
                        (number * len(of_kind) + place) % len(BLOCK_RUNGS)
                    ]
            emitted = self._short.program_at(self._rung(rung_by_block))
            segments = segments_of(emitted, self.budget.optimizer, self.world)
            seconds = rematerialization_seconds_by_block(emitted, self.world)
            for name, block_rung in rung_by_block.items():
                key = self._kinds[name], block_rung
                self._rises[key] = segments.rises.get(name, Rise())
                self._seconds[key] = seconds.get(name, 0.0)
            for name in segments.rises.keys() - self._kinds.keys():
                self._rises.setdefault((name, BlockRung()), segments.rises[name])
            self._start, self._segments = segments.start, tuple(segments.rises)

    def _rise(self, segment: str, block_rung: BlockRung) -> Rise:
        """Return how the bytes change over a segment. A block that differs from the run beside it
        changes as much from one way to another as a block of that run.
        """
        kind = self._kinds.get(segment, segment)
        if (kind, block_rung) in self._rises:
            return self._rises[kind, block_rung]
        own, other, usual = (
            self._rises[kind, BlockRung()],
            self._rises[self._like[kind], block_rung],
            self._rises[self._like[kind], BlockRung()],
        )
        return Rise(*(o + x - u for o, x, u in zip(own, other, usual, strict=True)))

    def _rung(self, rungs: Mapping[str, BlockRung]) -> Rematerialized:
        """Return the rung on which these blocks of the shorter program go these ways, as far as
        they can.
        """
        names = (
            tuple(
                n
                for n in self._short.names
                if n in able and n in rungs and getattr(rungs[n], field)
            )
            for field, able in (
                ("recompute", self._short.names),
                ("regather", self._short.fetching),
                ("rerun", self._short.cheap),
            )
        )
        return Rematerialized(*names)

    def _stored_bytes(self) -> tuple[float, float, float, float]:
        """Return the bytes of stored tensors, of trained ones among them, of the optimizer's
        states, and of what its step allocates for a moment.
        """
        plan, sizes, states, stored = self.deep.program.plan, list[float](), 0.0, 0.0
        assert plan is not None
        nodes = {n.name: n for n in self.deep.program.module.graph.nodes if n.op == "placeholder"}
        short = {entry.node for entry in self._short.program.signature.inputs}
        for entry in self.deep.program.signature.inputs:
            if not entry.stored:
                continue
            value, layout = value_of(nodes[entry.node]), plan.stored.get(entry.node)
            count = value.numel() if layout is None else layout.local_size
            size = float(count * value.dtype.itemsize)
            stored += size
            if entry.node not in short:
                self._start += size
            if entry.kind == "parameter" and entry.trainable:
                assert layout is not None
                states += optimizer_bytes(layout, value.dtype.itemsize, self.budget.optimizer)
                sizes.append(size)
        on_gpu = self.world.device.name != "cpu"
        step = step_bytes(sizes, self.budget.optimizer, on_gpu)
        return stored, sum(sizes), states, step

    def seconds_of(self, rung: Rematerialized) -> float:
        """Return the estimated seconds of what runs twice on this rung."""
        rung_by_block = self._rungs_of(rung)
        kinds = {name: self._like.get(name, self._kinds[name]) for name in self.names}
        return sum(self._seconds[kinds[name], rung_by_block[name]] for name in self.names)

    def memory_of(self, rung: Rematerialized) -> Memory:
        """Return the estimated memory at the peak on this rung."""
        rung_by_block = self._rungs_of(rung)
        rises = [
            self._rise(name, rung_by_block.get(name, BlockRung()))
            for segment in self._segments
            for name in (segment, *self._followers.get(segment, ()))
        ]
        stored, trained, states, step = self._base
        step_peak = peak_of(self._start, rises)

        def memory(most: float) -> Memory:
            return Memory(
                parameters=stored,
                gradients=trained,
                optimizer=states,
                activations=min(step_peak.saved, max(0.0, most - stored - trained)),
                transient=max(0.0, most - stored - trained - step_peak.saved),
                peak=most + states,
            )

        program = self._short.program
        passes = memory_of_microbatches(program, memory(step_peak.most), self._unreduced)
        stepping = with_results(program, memory(step_peak.end + step))
        return max(passes, stepping, key=lambda each: each.peak)

    def _rungs_of(self, rung: Rematerialized) -> dict[str, BlockRung]:
        recompute, regather, rerun = map(frozenset, rung)
        return {
            name: BlockRung(True)
            if name in recompute
            else BlockRung(False, name in regather, name in rerun)
            for name in self.names
        }

    @cached_property
    def _unreduced(self) -> float:
        """The bytes that a rank holds of gradients between micro-batches."""
        samples = self.deep.samples() if microbatch_count(self._short.program) > 1 else ()
        return sum(w * unreduced_bytes(emit_program(p, self.world)) for w, p in samples)


def rematerialize_to_fit(
    program: Program,
    world: World,
    budget: Budget | None,
    larger: Callable[[Memory], str] = lambda memory: "",
    free: bool = False,
    divisible: bool = False,
) -> Program:
    """Return the emitted program with its blocks recomputed as planned, and the plan with its
    memory.

    Where that does not fit and recompute is "auto", just enough of the first blocks are
    rematerialized. Raises PlanError where nothing fits. `budget` None: as planned, without a limit.
    `larger`: returns in words the smallest world that would do for this memory. `free`: the search
    chose the layout, so another one is no remedy. `divisible`: the step may be asked for in
    micro-batches. A plan whose memory is known and fits is not
    simulated again.
    """
    assert program.plan is not None
    if budget is None:
        return recompute.recompute(program)
    if (known_memory := program.plan.memory) is not None and budget.fits(known_memory):
        rungs = RematerializationSteps(program, world, budget)
        return _with_memory(rungs.program_at(rungs.start), known_memory, budget)
    if known_memory is not None and program.plan.limit == budget.memory_bytes:
        fitted, memory = program, known_memory  # what was found nearest to this limit
    else:
        fitted, memory = effort(program, world, budget)
    if not budget.fits(memory):
        assert budget.memory_bytes is not None and fitted.plan is not None
        again = "; ".join(f"{what} again: {names}" for names, what in fitted.plan.dropped)
        if len(fitted.plan.recompute) == len(blocks(program.module.graph.nodes)):
            again = "every block recomputed"
        auto, name = budget.recompute == "auto", "auto" if free else program.plan.layout
        outputs = gathered_output_bytes(fitted)
        divided = _bytes_in_microbatches(fitted, memory) if divisible else math.inf
        raise refusal(
            memory, budget.memory_bytes, world, name, again, auto, larger(memory), outputs, divided
        )
    return fitted


def _bytes_in_microbatches(program: Program, memory: Memory) -> float:
    """Return about the bytes that a rank needs where each micro-batch has one of its rows: sums of
    gradients beside those of a micro-batch, and a share of the activations and of what comes and
    goes with them. Infinite where the rank has one row.
    """
    notes, plan = program.annotations, program.plan
    if notes is None or notes.batch is None or plan is None:
        return math.inf
    rows = notes.batch.size
    for name, choice in plan.choices.items():
        for index, layout in enumerate(choice.results):
            for dim, atoms in enumerate(notes.dims[name, index]):
                if notes.batch in atoms:
                    of_dim = math.prod(atom.size for atom in atoms)
                    rows = min(rows, notes.batch.size * layout.local_shape[dim] // of_dim)
    if rows < 2:
        return math.inf
    entries = [e for e in program.signature.inputs if e.kind == "parameter" and e.trainable]
    sums = sum(
        program.layouts[e.node].local_size * program.dtypes[e.node].itemsize for e in entries
    )
    constant = memory.parameters + memory.optimizer + 2 * sums
    return constant + max(0.0, memory.peak - constant) / rows


def effort(program: Program, world: World, budget: Budget) -> tuple[Program, Memory]:
    """Return what `rematerialize_to_fit` does and its memory; where nothing fits, what comes
    nearest.
    """
    rungs = RematerializationSteps(program, world, budget)
    tried = rungs.best()
    return _with_memory(rungs.program_at(tried.rung), tried.memory, budget), tried.memory


def _with_memory(program: Program, memory: Memory, budget: Budget) -> Program:
    """Return the program, its plan with the memory it needs."""
    assert program.plan is not None
    plan = dataclasses.replace(
        program.plan, memory=memory, peak_bytes=memory.peak, optimizer=budget.optimizer
    )
    return dataclasses.replace(program, plan=plan)
