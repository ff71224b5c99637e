"""The second stage of the funnel, `bound`: seconds that no plan on a mesh is below, for all meshes
at once.

Example: of 35 candidates on 64 ranks, `bound` says in one pass of messages that 30 cannot beat the
best, so solve.py searches the others.

An annotated program and a space enter; bounds in seconds leave, or a `Bound`, from which `near`
reads the joint choices that the exact search takes. Candidates with as many axes are bounded in one
array, at several shares of what collectives count as if they were further meshes.

A program becomes a factor graph (bounds/factor_graph.py) with the costs of options
(bounds/option_costs.py) and of reshards between them (bounds/reshard_costs.py), as arrays over
meshes (cost/many_meshes.py). Tree-reweighted message passing, in sequence (Kolmogorov, TPAMI 28,
2006), bounds its minimum: every variable sends its neighbours the least costs of what lies behind
it, forwards through the graph and back. Any messages give a bound; a few rounds make it tight on
transformer graphs. A message is an array over the joint states of a value and, last, the mesh.

Updates are remembered by the identity of their inputs. A message that hardly differs from a known
one of the same kind is replaced by it, and the bound is lowered by the difference; so the layers of
a model cost what a few of them do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.activations import Price
from autopar.cost.many_meshes import BIG, HALF, Floats, meshes_of
from autopar.ir.deep_models import DeepModel
from autopar.ir.garbage import without_collection
from autopar.ir.graph import remember
from autopar.ir.layout import I, R
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.progress import tell
from autopar.ir.strategy import AxisChoice, Slot
from autopar.planner.bounds.factor_graph import (
    FIRST_SLOT,
    INVARIANT,
    REPLICATED,
    Edge,
    Frame,
    Kind,
    Variable,
    frame,
    shorten_frame,
)
from autopar.planner.bounds.option_costs import OptionCosts, Rated
from autopar.planner.bounds.reshard_costs import ReshardBounds
from autopar.planner.constraint import Constraint
from autopar.planner.space import Candidate, Space
from autopar.world import World

_TOGETHER = 96  # meshes bounded in one array: numpy works on rows of meshes
_ROUNDS = 1  # on the shorter frame: a second round changes bounds by 1e-5 and costs as much
_FEW = 16  # up to this many meshes under a layout's rules are all searched exactly
_ALIKE = 1e-3  # of the bound: the most that all replaced messages together may take from it
_REMEMBERED = 40  # messages of a kind with which a new one is compared
_MOST_KNOWN = 64  # layouts of a graph whose bounds are kept

Bounds = NDArray[np.float64]  # seconds, of every mesh
Joint = frozenset[tuple[int, ...]]  # joint options of a variable
Twins = Mapping[int, Variable]


class Bounded(NamedTuple):
    """A candidate's bound in seconds, and its place among the meshes of `messages`."""

    seconds: float
    messages: Bound
    place: int


class SpaceBounds(NamedTuple):
    """The bounds of a space in seconds: proven ones of its candidates and, by name, estimates of
    those of its rivals.
    """

    candidates: list[float]
    rivals: dict[str, list[float]]


def need_no_bound(candidates: Sequence[Candidate]) -> bool:
    """Whether the candidates are so few, and their rules leave so little, that each is searched."""
    one_rank = not candidates[0][0].axes
    return one_rank or (len(candidates) <= _FEW and not any(rules.free for _, rules in candidates))


def bound(program: Program, space: Space, world: World) -> SpaceBounds:
    """Return a lower bound of the step in seconds for every candidate of a space; 0 where all of a
    layout are searched exactly anyway. It is found once for the same lists of candidates.
    """
    own = [0.0] * len(space.candidates)
    if len(space.candidates) > 1 and not need_no_bound(space.candidates):
        reads = program.annotations, program.signature, world, space.candidates
        find = partial(lower_bounds, program, space.candidates, world)
        graph, counting = program.module.graph, program.counting
        own = remember(graph, "bounds", reads, find, counting, _MOST_KNOWN)
    return SpaceBounds(own, bound_rivals(program, space.rivals, world))


def bound_rivals(
    program: Program, rivals: Mapping[str, list[Candidate]], world: World
) -> dict[str, list[float]]:
    """Return an estimate of the bound of every candidate of each of several layouts, which says
    where their plans are searched and proves nothing. All are in the same arrays: a layout takes as
    long as one of its meshes. Of a model without equal blocks each is searched, without a bound.
    """
    deep = any(len(each) > 1 for each in rivals.values()) and DeepModel.of(program).runs
    several = [name for name, each in rivals.items() if len(each) > 1 and deep]
    candidates = [candidate for name in several for candidate in rivals[name]]
    seconds: list[float] = []
    if candidates:
        reads = program.annotations, program.signature, world, *rivals.values()
        find = partial(estimated_bounds, program, candidates, world)
        seconds = remember(program.module.graph, "bounds of rivals", reads, find, program.counting)
    bounds = iter(seconds)
    return {
        name: [next(bounds) for _ in each] if name in several else [0.0] * len(each)
        for name, each in rivals.items()
    }


@without_collection()
def lower_bounds(
    program: Program, candidates: Sequence[Candidate], world: World, price: Price | None = None
) -> list[float]:
    """Return a lower bound of the step in seconds for every candidate. With a `price`, it includes
    the price of the bytes that a plan holds.
    """
    bounds, done = [0.0] * len(candidates), 0
    for chunk in _chunks(candidates):
        tell("meshes bounded", done, len(candidates))
        # not in threads: numpy's calls are short, and they would wait for Python
        messages = pass_messages(program, [candidates[i] for i in chunk], world, price)
        for index, seconds in zip(chunk, messages.run(), strict=True):
            bounds[index] = max(0.0, float(seconds))  # messages round
        done += len(chunk)
    tell("meshes bounded", done, len(candidates))
    return bounds


@without_collection()
def estimated_bounds(
    program: Program, candidates: Sequence[Candidate], world: World, price: Price | None = None
) -> list[float]:
    """Return an estimate of what `lower_bounds` does: the bounds of a shorter model, in which what
    stands for several equal blocks counts as often.
    """
    estimates = [0.0] * len(candidates)
    for chunk in _chunks(candidates):
        start, whole, twins = _on_short_frame(program, [candidates[i] for i in chunk], world, price)
        times = Counter(id(twins[id(variable)]) for variable in whole.variables)
        rounds = 2 if start.frame is whole else 1
        for index, seconds in zip(chunk, start.run(rounds, times), strict=True):
            estimates[index] = max(0.0, float(seconds))
    return estimates


@without_collection()
def bound_candidates(
    program: Program,
    candidates: Sequence[Candidate],
    world: World,
    price: Price | None,
    shares: Sequence[float] = (),
) -> list[Bounded]:
    """Return the bound of every candidate, at its own of `shares`, to read options from."""
    bounded: dict[int, Bounded] = {}
    for chunk in _chunks(candidates):
        own_shares = [shares[i] for i in chunk] if shares else ()
        messages = pass_messages(program, [candidates[i] for i in chunk], world, price, own_shares)
        for place, (index, seconds) in enumerate(zip(chunk, messages.run(), strict=True)):
            bounded[index] = Bounded(max(0.0, float(seconds)), messages, place)  # messages round
    return [bounded[index] for index in range(len(candidates))]


def _chunks(candidates: Sequence[Candidate]) -> list[list[int]]:
    """Return the places of the candidates that are bounded in one array: as many axes, not too
    many meshes.
    """
    together: list[list[int]] = []
    for count in sorted({len(mesh.axes) for mesh, _ in candidates}):
        same = [i for i, (mesh, _) in enumerate(candidates) if len(mesh.axes) == count]
        together.extend(same[i : i + _TOGETHER] for i in range(0, len(same), _TOGETHER))
    return together


def pass_messages(
    program: Program,
    candidates: Sequence[Candidate],
    world: World,
    price: Price | None = None,
    shares: Sequence[float] = (),
) -> Bound:
    """Return a bound whose messages have converged on a shorter frame first. `shares`: by
    candidate, of the collectives that can overlap; () for the program's own.
    """
    start, whole, twins = _on_short_frame(program, candidates, world, price, shares)
    start.run(_ROUNDS)
    return start if start.frame is whole else Bound(whole, start.costs, start, twins)


def _on_short_frame(
    program: Program,
    candidates: Sequence[Candidate],
    world: World,
    price: Price | None,
    shares: Sequence[float] = (),
) -> tuple[Bound, Frame, Twins]:
    """Return a bound on the shorter frame without a message yet, the whole frame, and the twin in
    the shorter one of each of its variables.
    """
    whole = frame(program)
    short, twins = shorten_frame(whole)
    meshes = meshes_of(tuple(mesh for mesh, _ in candidates), world, tuple(shares))
    costs = OptionCosts(whole, meshes, [constraint for _, constraint in candidates], price)
    return Bound(short, costs), whole, twins


def bound_on(program: Program, mesh: Mesh, constraint: Constraint, world: World) -> Bound:
    """Return the bound of every option of every node on one mesh; read it with `near`."""
    messages = pass_messages(program, [(mesh, constraint)], world)
    messages.run(2)
    return messages


# -- the options near the least --------------------------------------------------------------------
Choices = tuple[tuple[AxisChoice, ...], ...]


def near(messages: Bound, margin: float, most: int, place: int = 0) -> Mapping[str, Choices]:
    """Return for every node and stored tensor the joint choices whose bound on the mesh at this
    place is at most `margin` seconds above the least, at most `most` per region.
    """
    joint_options = messages.near(margin, most, place)
    choices: dict[str, Choices] = {}
    choices_by_key: dict[Hashable, Choices] = {}
    for variable in messages.frame.variables:
        if variable.name not in joint_options:
            continue
        names = [variable.name] if variable.region is None else variable.region.nodes
        for position, name in enumerate(names):
            key = (variable.key, joint_options[variable.name], position)
            if key not in choices_by_key:
                choices_by_key[key] = _joint_choices(
                    variable, joint_options[variable.name], position
                )
            choices[name] = choices_by_key[key]
    return choices


def _joint_choices(variable: Variable, left: Joint, position: int) -> Choices:
    """Return the joint choices of the node at `position` in a region, or of a stored tensor, for
    the options left.
    """
    if variable.region is not None:
        axis_choices = [option[position].choice for option in variable.options]
    else:
        axis_choices = [_stored_choice(variable, state) for state in variable.options]
    return tuple(dict.fromkeys(tuple(axis_choices[i] for i in each) for each in sorted(left)))


def _stored_choice(variable: Variable, state: int) -> AxisChoice:
    """Return the choice that gives a stored tensor this state on one axis."""
    if state < FIRST_SLOT:
        return I if state == INVARIANT else R
    dim, place = variable.slots[state - FIRST_SLOT]
    return Slot(str(dim), place)


# -- messages --------------------------------------------------------------------------------------
class Message(NamedTuple):
    """The seconds over the joint states of a value; `number`: an identity."""

    number: int
    seconds: Floats
    sample: Floats  # a few entries, to tell messages apart quickly


@dataclass(frozen=True, eq=False)
class _End:
    """An edge as one of its variables sees it: the state of each own option (`mine`) and of each
    option of the other variable (`theirs`), in `states`; `reshards`: those between them;
    `number`: an identity of all these.
    """

    edge: Edge
    makes: bool
    mine: tuple[int, ...]
    theirs: tuple[int, ...]
    states: tuple[int, ...]
    reshards: ReshardBounds
    number: int

    def across(self, costs: Floats) -> Floats:
        """Return costs over the states at this end as costs over the states at the other: a new
        array.
        """
        costs = self.reshards.push(costs) if self.makes else self.reshards.pull(costs)
        return only(costs, self.theirs, self.states)


class _EdgeStates(NamedTuple):
    """The states and reshards that edges of equal keys share: see _End."""

    produced: tuple[int, ...]
    wanted: tuple[int, ...]
    reshards: ReshardBounds
    number: int


class Bound:
    """Messages on a frame for some meshes. `run` improves them; `near` reads the remaining
    options.
    """

    def __init__(
        self,
        frame: Frame,
        costs: OptionCosts,
        start: Bound | None = None,
        twins: Twins | None = None,
    ) -> None:
        """Set up a bound. `start`: a bound on a shorter frame, whose messages are taken over;
        `twins`: by id of a variable of this frame, the variable of the shorter frame like it.
        """
        self.frame, self.costs, self.meshes = frame, costs, costs.meshes
        self.inner = [v for v in frame.variables if not v.is_leaf]
        self._place = {id(v): i for i, v in enumerate(frame.variables)}
        self._inward: dict[int, Rated] = {} if start is None else start._inward
        self._rated = {id(v): self._mesh_last(costs.rated(v)) for v in frame.variables}
        self._edge_states: dict[Hashable, _EdgeStates] = {} if start is None else start._edge_states
        self._ends: dict[int, list[_End]] = {id(v): self._ends_of(v) for v in frame.variables}
        self._messages: dict[tuple[int, bool], Message] = {}  # by edge, and whether to its maker
        self._kinds: dict[Hashable, list[Message]] = defaultdict(list)
        self._count = 0
        self._known: dict[Hashable, tuple[Bounds, list[Message]]] = {}
        self._folded: dict[Hashable, Rated] = {} if start is None else start._folded
        for variable in self.inner:
            self._rated[id(variable)] = self._with_leaves(variable)
        self._grain = self._grain_of(self._least_alone())
        self.rounds = 0  # of messages on this frame
        self.more_rounds = 2 if start is None else 1  # that still gain more than they take
        self._bounds = np.zeros(self.meshes.mesh_count)
        self.seconds = 0.0  # the bound on the first mesh after the last round
        if start is not None and twins is not None:
            self._take_over(start, twins)

    # -- set up ------------------------------------------------------------------------------------
    def _mesh_last(self, rated: Rated) -> Rated:
        if rated.number not in self._inward:
            seconds = np.ascontiguousarray(np.moveaxis(rated.seconds, 0, -1))
            self._inward[rated.number] = rated._replace(seconds=seconds)
        return self._inward[rated.number]

    def _ends_of(self, variable: Variable) -> list[_End]:
        return [self._end(edge, edge.maker is variable) for edge in variable.edges]

    def _end(self, edge: Edge, makes: bool) -> _End:
        numbers = (self._rated[id(edge.maker)].number, self._rated[id(edge.user)].number)
        key = (edge.key, *numbers)
        if key not in self._edge_states:
            produced = self._states(edge.kind, edge.produced, edge.maker)
            wanted = self._states(edge.kind, edge.wanted, edge.user)
            reshards = self._reshards_of(edge.kind, produced, wanted)
            number = len(self._edge_states) + 1
            self._edge_states[key] = _EdgeStates(produced, wanted, reshards, number)
        produced, wanted, reshards, number = self._edge_states[key]
        mine, theirs = (produced, wanted) if makes else (wanted, produced)
        return _End(edge, makes, mine, theirs, reshards.states, reshards, number)

    def _states(self, kind: Kind, states: tuple[int, ...], variable: Variable) -> tuple[int, ...]:
        """Return the states of the remaining options; I and R are one where no gradient flows."""
        remaining = (states[i] for i in self._rated[id(variable)].options)
        return tuple(
            remaining
            if kind.element.gradient
            else (REPLICATED if s == INVARIANT else s for s in remaining)
        )

    def _reshards_of(
        self, kind: Kind, produced: tuple[int, ...], wanted: tuple[int, ...]
    ) -> ReshardBounds:
        key, known = (kind, frozenset(produced), frozenset(wanted)), self.meshes.reshards
        if key not in known:
            known[key] = ReshardBounds(kind, frozenset(produced), frozenset(wanted), self.meshes)
        reshards: ReshardBounds = known[key]
        return reshards

    def _with_leaves(self, variable: Variable) -> Rated:
        """Return a variable's rated options plus the least costs of parameters with one use that it
        takes, and of the outputs it makes.
        """
        own = self._rated[id(variable)]
        leaves = [e for e in self._ends[id(variable)] if not e.makes and e.edge.maker.is_leaf]
        key = (
            own.number,
            tuple((e.number, self._rated[id(e.edge.maker)].number) for e in leaves),
            tuple(variable.handed),
        )
        if key not in self._folded:
            seconds = own.seconds
            for end in leaves:
                seconds = seconds + self._of_leaf(end)
            for kind, produced, wanted in variable.handed:
                seconds = seconds + self._of_output(variable, kind, produced, wanted)
            number = len(self._folded) + 1
            self._folded[key] = Rated(number, own.options, np.minimum(seconds, BIG))
        return self._folded[key]

    def _of_leaf(self, end: _End) -> Floats:
        """Return the cost of the best way to store a parameter, by the option of its user."""
        stored = least(self._rated[id(end.edge.maker)].seconds, end.theirs, end.states)
        return spread(end.reshards.push(stored), end.mine, end.states)

    def _of_output(
        self, variable: Variable, kind: Kind, produced: tuple[int, ...], wanted: tuple[int, ...]
    ) -> Floats:
        """Return the cost of the best layout of an output, by the option of the variable that it is
        taken from.
        """
        own_states = self._states(kind, produced, variable)
        output_states = tuple(
            s if kind.element.gradient or s != INVARIANT else REPLICATED for s in wanted
        )
        reshards = self._reshards_of(kind, own_states, output_states)
        free = np.zeros(
            (len(reshards.states),) * self.meshes.axis_count + (self.meshes.mesh_count,), np.float32
        )
        return spread(
            reshards.pull(only(free, output_states, reshards.states)), own_states, reshards.states
        )

    def _take_over(self, other: Bound, twins: Twins) -> None:
        """Start from the messages of a bound on the shorter frame."""
        arrived = {
            (id(v), end.number, end.makes, _beyond(end)): message
            for v in other.inner
            for end in other._ends[id(v)]
            if (message := other._messages.get((id(end.edge), end.makes))) is not None
        }
        for variable in self.inner:
            for end in self._ends[id(variable)]:
                key = (id(twins[id(variable)]), end.number, end.makes, _beyond(end, twins))
                if key in arrived:
                    self._messages[id(end.edge), end.makes] = arrived[key]
        self._kinds, self._count = other._kinds, other._count
        self._known, self._grain = other._known, other._grain

    def _least_alone(self) -> Bounds:
        """Return the sum of each variable's own least cost: the bound without any message."""
        return sum(
            (self._lowest(self._rated[id(v)].seconds).astype(np.float64) for v in self.inner),
            np.zeros(self.meshes.mesh_count),
        )

    def _grain_of(self, bounds: Bounds) -> float:
        """Return the seconds within which two messages count as the same."""
        edges = sum(len(ends) for ends in self._ends.values()) / 2
        return _ALIKE * float(bounds.min()) / max(1.0, edges)

    # -- messages ----------------------------------------------------------------------------------
    def run(self, rounds: int = 1, times: Mapping[int, int] | None = None) -> Bounds:
        """Run more rounds and return the bound after them, in seconds per mesh. `times`: by id of a
        variable, how often it counts.
        """
        self.rounds += rounds
        for _ in range(rounds):
            self._known.clear()  # the last round's updates: few come again
            for variable in self.inner:
                self._update(variable, forwards=True)
            bounds = np.zeros(self.meshes.mesh_count)
            for variable in reversed(self.inner):
                count = 1 if times is None else times[id(variable)]
                bounds += count * self._update(variable, forwards=False)
            self._grain, self._bounds = self._grain_of(bounds), bounds
        self.seconds = float(self._bounds[0])
        return self._bounds

    def _update(self, variable: Variable, forwards: bool) -> Bounds:
        """Send messages to all later (or earlier) neighbours; return what stays, which counts for
        the bound.
        """
        own = self._rated[id(variable)]
        ends = [e for e in self._ends[id(variable)] if not self._other(e).is_leaf]
        later = [self._place[id(self._other(e))] > self._place[id(variable)] for e in ends]
        sending = [e for e, late in zip(ends, later, strict=True) if late == forwards]
        share = 1.0 / max(1, sum(later), len(later) - sum(later))
        key = (
            own.number,
            share,
            tuple((e.number, e.makes, e in sending, self._arrived(e)[0]) for e in ends),
        )
        if key not in self._known:
            self._known[key] = self._computed(own.seconds, ends, sending, share)
        bounds, sent = self._known[key]
        for end, message in zip(sending, sent, strict=True):
            self._messages[id(end.edge), not end.makes] = message
        return bounds

    def _other(self, end: _End) -> Variable:
        return end.edge.user if end.makes else end.edge.maker

    def _arrived(self, end: _End) -> tuple[int, Floats | None]:
        message = self._messages.get((id(end.edge), end.makes))
        return (0, None) if message is None else (message.number, message.seconds)

    def _total(self, seconds: Floats, ends: list[_End]) -> Floats:
        """Return the variable's own costs plus the messages that arrived: a new array."""
        total = seconds.copy()
        for end in ends:
            _, arrived = self._arrived(end)
            if arrived is not None:
                total += spread(arrived, end.mine, end.states)
        return np.minimum(total, BIG, out=total)

    def _computed(
        self, seconds: Floats, ends: list[_End], sending: list[_End], share: float
    ) -> tuple[Bounds, list[Message]]:
        """Return what stays of a variable's costs, and its messages to the neighbours in
        `sending`.
        """
        total = self._total(seconds, ends)
        lowest, impossible = self._lowest(total), total >= HALF
        total -= lowest
        total *= np.float32(share)
        np.copyto(total, BIG, where=impossible)
        bounds, sent = lowest.astype(np.float64), []
        for end in sending:
            outgoing = least(total, end.mine, end.states)
            _, arrived = self._arrived(end)
            if arrived is not None:
                outgoing = np.where(outgoing < HALF, outgoing - arrived, BIG)
            message_seconds = end.across(outgoing)
            lowest = self._lowest(message_seconds)
            bounds += lowest
            message_seconds -= lowest
            np.minimum(message_seconds, BIG, out=message_seconds)
            message, excess = self._unique(message_seconds, (end.number, end.makes))
            bounds -= excess
            sent.append(message)
        return bounds, sent

    def _lowest(self, seconds: Floats) -> Floats:
        return seconds.reshape(-1, self.meshes.mesh_count).min(axis=0)

    def _unique(self, seconds: Floats, kind: Hashable) -> tuple[Message, Bounds | float]:
        """Return a message of these costs or nearly these, and how much this lowers the bound."""
        messages = self._kinds[kind]
        sample = seconds.reshape(-1)[:: 1 | seconds.size // 200]  # odd, to fall on most meshes
        for message in reversed(messages):
            if float(np.abs(message.sample - sample).max()) <= self._grain:
                excess = message.seconds - seconds
                if float(np.abs(excess).max()) <= self._grain:
                    return message, np.maximum(self._lowest(-excess) * -1.0, 0.0)
        self._count += 1
        messages.append(Message(self._count, seconds, sample.copy()))
        del messages[:-_REMEMBERED]
        return messages[-1], 0.0

    # -- what is left ------------------------------------------------------------------------------
    def near(self, margin: float, most: int, place: int = 0) -> dict[str, Joint]:
        """Return for every region and stored tensor, on the mesh at this place, the joint options
        with a bound of at most `margin` seconds above the least, but only the `most` lowest.
        """
        near_options: dict[str, Joint] = {}
        options_by_key: dict[Hashable, Joint] = {}
        for variable in self.inner:
            own = self._rated[id(variable)]
            ends = [e for e in self._ends[id(variable)] if not self._other(e).is_leaf]
            key = (own.number, own.options, tuple((e.number, self._arrived(e)[0]) for e in ends))
            total: Floats | None = None
            if key not in options_by_key:
                total = self._total(own.seconds, ends)
                options_by_key[key] = _lowest_options(own, total[..., place], margin, most)
            if not variable.is_hub:
                near_options[variable.name] = options_by_key[key]
            for number, end in enumerate(self._ends[id(variable)]):
                if self._other(end).is_leaf:
                    if (key, number) not in options_by_key:
                        total = self._total(own.seconds, ends) if total is None else total
                        stored = self._of_stored(end, total)[..., place]
                        leaf = self._rated[id(end.edge.maker)]
                        options_by_key[key, number] = _lowest_options(leaf, stored, margin, most)
                    near_options[self._other(end).name] = options_by_key[key, number]
        return near_options

    def _of_stored(self, end: _End, total: Floats) -> Floats:
        """Return the bounds of a parameter with one use, given those of its user."""
        own = self._rated[id(end.edge.maker)]
        user_costs = np.where(total < HALF, total - self._of_leaf(end), BIG)
        user = end.across(least(user_costs, end.mine, end.states))
        return np.minimum(own.seconds + spread(user, end.theirs, end.states), BIG)


def _beyond(end: _End, twins: Twins | None = None) -> Hashable:
    """Return the variable at the other end, named so that the name is the same in a shorter
    frame.
    """
    edge = end.edge
    mine, theirs = (edge.maker, edge.user) if end.makes else (edge.user, edge.maker)
    if mine.block is None or theirs.block is None or mine.block[0] != theirs.block[0]:
        return id(twins[id(theirs)] if twins else theirs)
    offset = theirs.block[1] - mine.block[1]
    return (offset > 0) - (offset < 0), theirs.place


def _lowest_options(own: Rated, total: Floats, margin: float, most: int) -> Joint:
    """Return the joint options of the lowest totals: at most `most`, within `margin` seconds of the
    least.
    """
    flat = total.reshape(-1)
    low = np.argsort(flat, kind="stable")[:most]
    low = low[flat[low] <= min(float(flat[low[0]]) + margin, float(HALF))]
    places = np.unravel_index(low, total.shape)
    tuples = zip(*(place.tolist() for place in places), strict=True) if places else [()]
    return frozenset(tuple(own.options[i] for i in each) for each in tuples)


# -- from joint options to joint states, and back --------------------------------------------------
def spread(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """Return the costs over joint states as costs over joint options, given the state of each
    option.
    """
    if states == known:
        return seconds
    axes = seconds.ndim - 1
    rows = seconds.reshape(len(known) ** axes, -1)
    option_seconds = rows.take(_joint_rows(states, known, axes), axis=0)
    return option_seconds.reshape((len(states),) * axes + (-1,))


@cache
def _joint_rows(states: tuple[int, ...], known: tuple[int, ...], axes: int) -> NDArray[np.intp]:
    """Return for every joint option the index of its joint state."""
    axis_rows = np.array([known.index(state) for state in states], dtype=np.intp)
    rows = np.zeros((), dtype=np.intp)
    for _ in range(axes):
        rows = rows[..., None] * len(known) + axis_rows
    return rows.reshape(-1)


def least(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """Return the costs over joint states: the least of the options that have a state, BIG for a
    state without options. A new array, unless nothing changes.
    """
    if states == known:
        return seconds
    first_option, further, unreached = _options_by_state(states, known)
    for dim in range(seconds.ndim - 1):
        before: Any = (slice(None),) * dim
        state_seconds = seconds.take(first_option, axis=dim)
        for place, option in further:
            into = state_seconds[(*before, place)]
            np.minimum(into, seconds[(*before, option)], out=into)
        if unreached:
            state_seconds[(*before, unreached)] = BIG
        seconds = state_seconds
    return seconds


@cache
def _options_by_state(
    states: tuple[int, ...], known: tuple[int, ...]
) -> tuple[NDArray[np.intp], tuple[tuple[int, int], ...], list[int]]:
    """Return for every state the first option that has it (any option where none has), then (state,
    option) of the further options, and the states without an option.
    """
    first = [states.index(state) if state in states else 0 for state in known]
    more = [(known.index(s), i) for i, s in enumerate(states) if first[known.index(s)] != i]
    missing = [place for place, state in enumerate(known) if state not in states]
    return np.array(first, dtype=np.intp), tuple(more), missing


def only(seconds: Floats, states: tuple[int, ...], known: tuple[int, ...]) -> Floats:
    """Set the states that no option has to BIG, in place, and return the array."""
    missing = [place for place, state in enumerate(known) if state not in states]
    for dim in range(seconds.ndim - 1) if missing else ():
        index: Any = (*(slice(None),) * dim, missing)
        seconds[index] = BIG
    return seconds
