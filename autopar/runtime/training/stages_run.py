"""Runs a step on the stages of a pipeline: every rank runs its part of a schedule.

    rank of stage 0: F0 F1 B0 F2 …    sends what F0 returned to the rank of stage 1
    rank of stage 1: F0 B0 F1 …       sends the gradient of what it received back
    zero bubble:     F0 I0 F1 I1 W0 … sends it after I0; the gradients of its weights follow in W0

A rank holds the parameters of its own stages alone. What comes before and after the schedule is
that of any step in micro-batches (microbatches_run.py): the rows of each micro-batch, the totals
over the batch, gradients that are handed out by `loss.backward()`. At the end of a step the
gradients of parameters that two stages hold, such as tied embeddings, are summed over these, and
every rank gets the loss. Results with rows stay on the ranks that compute them; the others return
None in their place.

passes/stages.py cuts the graph, ir/pipeline_schedule.py orders the actions. api.py puts a StagesRun
in the place of what runs a graph.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar._compat import add_each, not_compiled
from autopar.errors import InputError, PlanError
from autopar.ir.pipeline_schedule import Action, Pipeline, runs_in_halves
from autopar.ir.program import Program
from autopar.ops.links import Links, Pending
from autopar.passes.microbatches import Microbatches
from autopar.passes.stages import Stage, carries
from autopar.runtime.backends import Scheduled
from autopar.runtime.deferred_backward import Rest
from autopar.runtime.reusing_forward import StepWeights
from autopar.runtime.training.microbatches_run import MicrobatchesRun, Sums, add_gradients
from autopar.world import ranks

Run = Callable[..., Any]
_Key = tuple[Action, str]  # the action that makes a tensor for another stage, and its name


def own_program(program: Program, stages: Sequence[Stage]) -> Program:
    """Return the program of a step with the inputs of a rank that has these stages: every input but
    the parameters of other stages.
    """
    own = {name for stage in stages for name in stage.parameters}
    inputs = tuple(e for e in program.signature.inputs if e.kind != "parameter" or e.node in own)
    signature = dataclasses.replace(program.signature, inputs=inputs)
    return dataclasses.replace(program, signature=signature)


class StagesRun(MicrobatchesRun):
    """Runs the stages of one rank. `program`: of one micro-batch, with all inputs of the rank
    (`own_program`). `runs`: what runs each of its stages, by number. `schedule`: the actions of
    every rank of the pipeline.
    """

    def __init__(
        self,
        program: Program,
        microbatches: Microbatches,
        device_mesh: DeviceMesh | None,
        stages: Sequence[Stage],
        runs: Mapping[int, Run],
        schedule: Sequence[Sequence[Action]],
        pipeline: Pipeline,
        links: Links,
        device: torch.device,
    ) -> None:
        first = next(iter(runs.values()))
        super().__init__(first, program, microbatches, device_mesh)
        self.stages, self.runs, self.pipeline, self.links = stages, runs, pipeline, links
        me = links.copy
        self._own_actions, self._splits = schedule[me], runs_in_halves(schedule)
        self._home = {place: s.number for s in stages for place in s.results}
        self._holders = _holders(stages)
        self.device, self.first_holders = device, _first_holders(stages, pipeline)
        self._borders = {
            number: [_example(stages[number], name, device) for name in stages[number].receives]
            for number in range(len(stages))
        }
        self.backwards: Counter[Action] = Counter()  # that ran, whole or in two halves
        self._prepared = False
        self._order_of_sends = {
            rank: [key for action in own for key in self._sends_of(action)]
            for rank, own in enumerate(schedule)
        }
        self._taken = {
            rank: self._taken_by(rank, own) for rank, own in enumerate(schedule) if rank != me
        }
        # what every rank gets; a call of another kind than the planned step hands out all it has
        states = enumerate(self._results())
        self._everywhere = [i for i, (_, s) in states if s != "rows" or microbatches.count == 1]
        self._shapes = _shapes_of_results(program, device)
        self.loss_place = self._place_of_loss(program)

    # -- a step ------------------------------------------------------------------------------------
    @not_compiled  # nothing that a compiler could make faster, and process groups
    def __call__(self, *values: Any) -> Any:
        if torch.is_grad_enabled():
            return super().__call__(*values)
        own, seeds = values[: len(self._own)], values[len(self._own) :]
        with torch.no_grad():
            results = self._forwards(own, seeds)
            return self._shared(results, range(len(self._shapes)), _EVALUATED)

    def _forwards(self, own: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
        """Return the results of a step without a backward."""
        step = _Step(self, list(self._values_of_runs(own, seeds)), {})
        step.run([action for action in self._own_actions if action.kind == "F"])
        return self._combined(step.results)

    def step(
        self, places: Sequence[int], own: Sequence[Any], seeds: Sequence[Any]
    ) -> tuple[list[Any], int, list[Tensor | None]]:
        """Return the results of a step, which of them is the loss, and its gradient for the values
        at `places`, summed across ranks.
        """
        if self.loss_place < 0:
            raise InputError(
                "a step in stages needs a loss: a scalar that carries a gradient. Call the model "
                "under torch.no_grad() where there is none"
            )
        leaves = {i: own[i].detach().requires_grad_() for i in places}
        named = [leaves.get(i, x) for i, x in enumerate(own)]
        values = list(self._values_of_runs(named, seeds))
        self._prepare(values[0])
        trained = {e.node: leaves[i] for i, e in enumerate(self._own) if i in leaves}
        step = _Step(self, values, trained)
        with self._gathering(self.runs.values()):
            step.run(self._own_actions)
        self._sum_over_stages(step.gradients, trained)
        gradients = [step.gradients.get(self._own[i].node) for i in places]
        results = self._shared(self._combined(step.results), self._everywhere, _TRAINED)
        return results, self.loss_place, gradients

    def _place_of_loss(self, program: Program) -> int:
        """Return the place of the loss among the results, the same on all ranks: the first scalar
        that is a sum over micro-batches and carries a gradient; the first sum where nothing carries
        one.
        """
        notes = program.annotations
        assert notes is not None
        values = {node.name: node.meta.get("value") for node in program.module.graph.nodes}
        scalars = [
            (i, values[output.node] in notes.gradient)
            for i, (output, state) in enumerate(self._results())
            if state == "sum" and not self._layouts[output.node].shape
        ]
        return next((i for i, carries in scalars if carries), scalars[0][0] if scalars else -1)

    def _combined(self, per_microbatch: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the results that this rank has of the step, None for those of others."""
        own = {
            i for i, stage in self._home.items() if self.pipeline.rank_of(stage) == self.links.copy
        }
        filled = [
            [x if i in own else _MISSING for i, x in enumerate(results)]
            for results in per_microbatch
        ]
        results = super()._combined(filled)
        return [x if i in own else None for i, x in enumerate(results)]

    def _joined(self, node: str, rows: Sequence[Tensor]) -> Any:
        return None if rows[0] is _MISSING else super()._joined(node, rows)

    def _shared(self, results: list[Any], places: Iterable[int], call: str) -> list[Any]:
        """Return the results, those at `places` on every rank. `call`: its kind."""
        me = self.links.copy
        for place in places:
            home = self.pipeline.rank_of(self._home[place])
            if home == me:
                for copy in range(self.pipeline.ranks):
                    if copy != me:
                        self.links.send(copy, results[place], f"{call} result {place}")
            else:
                like = self._shape_of_step(place)
                results[place] = self.links.receive(home, like, f"{call} result {place}").wait()
        self.links.finish()
        return results

    def _shape_of_step(self, place: int) -> Tensor:
        """Return an example of a result of all micro-batches."""
        own, state = self._shapes[place], self._microbatches.results[place]
        if state != "rows":
            return own
        return own[(0,) * own.dim()].expand(own.shape[0] * self.count, *own.shape[1:])

    def _sum_over_stages(self, gradients: dict[str, Tensor], trained: Mapping[str, Tensor]) -> None:
        """Sum the gradients of parameters that several ranks hold: the first one adds them up in
        the order of the ranks, and hands out the sum.
        """
        me = self.links.copy
        for name, stages in self._holders.items():
            holders = sorted({self.pipeline.rank_of(stage) for stage in stages})
            if len(holders) == 1 or me not in holders or name not in trained:
                continue
            first, *others = holders
            own = gradients.get(name)
            own = torch.zeros_like(trained[name]) if own is None else own
            if me != first:
                self.links.send(first, own, f"{_TRAINED} part of {name}")
                gradients[name] = self.links.receive(first, own, f"{_TRAINED} sum of {name}").wait()
                continue
            total = own.clone()
            for other in others:
                part = self.links.receive(other, own, f"{_TRAINED} part of {name}")
                add_each([total], [part.wait()])
            for other in others:
                self.links.send(other, total, f"{_TRAINED} sum of {name}")
            gradients[name] = total

    # -- what runs ---------------------------------------------------------------------------------
    def _prepare(self, values: Sequence[Any]) -> None:
        """Derive the graphs of all stages before the first step. Collective: within the schedule
        the ranks are at other places at one moment.
        """
        if self._prepared:
            return
        named = {e.node: x for e, x in zip(self._entries, values, strict=True)}

        def derive() -> None:
            for number, run in self.runs.items():
                if isinstance(run, Scheduled):
                    run.defers_scattered = self._sums_once
                    run.weights = StepWeights() if self._gathers_once else None
                    if self._splits:
                        run.waited_for = self._waited_for(number)
                    run.prepare(self.arguments(number, named, self._received_examples(number)))
                    if run.forward is None:
                        raise PlanError(
                            f"stages: nothing that is trained reaches what stage {number} sends or "
                            "returns: freeze its parameters before the model is parallelized, or "
                            "use fewer stages"
                        )

        ranks.together("deriving the backward", derive)
        orders = {n: run.order() for n, run in self.runs.items() if isinstance(run, Scheduled)}
        ranks.agree_on_orders(orders)
        self._prepared = True

    def _waited_for(self, number: int) -> frozenset[int]:
        """Return the places, among a stage's inputs, of those whose gradients are sent back."""
        sent = self.outputs_of(Action("B", number, 0))
        entries = enumerate(self.stages[number].program.signature.inputs)
        return frozenset(place for place, entry in entries if entry.node in sent)

    def _received_examples(self, number: int) -> dict[str, Tensor]:
        names = self.stages[number].receives
        return {
            name: torch.zeros_like(x).requires_grad_(x.requires_grad)
            for name, x in zip(names, self._borders[number], strict=True)
        }

    def arguments(
        self, number: int, named: Mapping[str, Any], received: Mapping[str, Tensor]
    ) -> list[Any]:
        """Return the values of a stage's placeholders."""
        entries = self.stages[number].program.signature.inputs
        return [received[e.node] if e.node in received else named[e.node] for e in entries]

    # -- tensors between stages --------------------------------------------------------------------
    def border_of(self, key: _Key) -> Tensor:
        """Return an example, without memory, of a tensor between stages."""
        action, name = key
        stage = action.stage + 1 if action.kind == "F" else action.stage
        return self._borders[stage][self.stages[stage].receives.index(name)]

    def _sends_of(self, action: Action) -> list[_Key]:
        """Return what an action sends to another rank, in order."""
        after = action.after(self.pipeline.stages)
        if after is None or self.pipeline.rank_of(after.stage) == self.pipeline.rank_of(
            action.stage
        ):
            return []
        return [(action.result, name) for name in self.outputs_of(action)]

    def _taken_by(self, rank: int, schedule: Sequence[Action]) -> dict[Action, int]:
        """Return how many tensors another rank has received of this one when it has run each of
        its actions, of a step. `schedule`: the actions of the other rank.
        """
        sent = {key: place for place, key in enumerate(self._sent_to(rank))}
        taken, most = {}, 0
        for action in schedule:
            before = action.before(self.pipeline.stages)
            if before is not None and self.pipeline.rank_of(before.stage) == self.links.copy:
                places = [sent[before, name] for name in self.outputs_of(before)]
                most = max([most, *(place + 1 for place in places)])
            taken[action.result] = most
        return taken

    def _sent_to(self, rank: int) -> list[_Key]:
        """Return what this rank sends to another one in a step, in order."""
        keys = []
        for key in self._order_of_sends[self.links.copy]:
            after = key[0].after(self.pipeline.stages)
            assert after is not None
            if self.pipeline.rank_of(after.stage) == rank:
                keys.append(key)
        return keys

    def release_after(self, action: Action) -> None:
        """Let go of what another rank must have received, as it sent what this action made."""
        rank = self.pipeline.rank_of(action.stage)
        self.links.release(rank, self._taken[rank][action])

    def outputs_of(self, action: Action) -> list[str]:
        """Return the names of the tensors that an action makes for another stage: what its stage
        sends, or in the backward the gradients of what it received.
        """
        if action.kind == "F":
            return list(self.stages[action.stage].sends)
        examples = zip(self.stages[action.stage].receives, self._borders[action.stage], strict=True)
        return [name for name, x in examples if x.requires_grad]

    def sends_between(self, source: int) -> list[_Key]:
        """Return what a rank sends to this one in a step, in its order."""
        stages = self.pipeline.stages
        keys = []
        for key in self._order_of_sends[source]:
            after = key[0].after(stages)
            assert after is not None
            if self.pipeline.rank_of(after.stage) == self.links.copy:
                keys.append(key)
        return keys


class _Later(NamedTuple):
    """What is left of a backward whose first half ran: the parameters, their gradients where these
    came with the first half, and else the second half.
    """

    leaves: dict[str, Tensor]
    gradients: Sequence[Tensor | None]
    rest: Rest | None


_TRAINED, _EVALUATED = "training", "evaluation"  # kinds of calls
_MISSING = torch.zeros(())  # stands for a result that another rank has


class _Step:
    """One step on one rank: what its actions have made so far."""

    def __init__(
        self, owner: StagesRun, values: Sequence[Sequence[Any]], trained: Mapping[str, Tensor]
    ) -> None:
        self._owner = owner
        self._named = [
            {e.node: x for e, x in zip(owner._entries, own, strict=True)} for own in values
        ]
        self._trained = trained
        self.gradients: dict[str, Tensor] = {}
        self.results: list[list[Any]] = [[None] * len(owner._shapes) for _ in values]
        self._loss = owner.loss_place
        self._at: dict[_Key, Tensor] = {}  # tensors between stages of this rank
        self._posted: dict[_Key, Pending] = {}
        self._awaited = {
            copy: owner.sends_between(copy)
            for copy in range(owner.pipeline.ranks)
            if copy != owner.links.copy
        }
        if not trained:  # no backward follows, so no gradients are sent
            self._awaited = {
                copy: [key for key in keys if key[0].kind == "F"]
                for copy, keys in self._awaited.items()
            }
        # of the actions whose backward is to come: what was received, and what has a gradient
        self._in_flight: dict[tuple[int, int], tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self._later: dict[tuple[int, int], _Later] = {}  # second halves of backwards
        self._next: Action | None = None
        self._left: dict[int, int] = defaultdict(lambda: len(values))  # backwards of a stage
        self._sums = {number: Sums() for number in owner.runs}
        for number, run in owner.runs.items():
            if isinstance(run, Scheduled):
                run.accumulator = self._sums[number]

    def run(self, actions: Sequence[Action]) -> None:
        """Run the actions, in order. The receive for the next one is posted before one computes."""
        for action, after in zip(actions, [*actions[1:], None], strict=True):
            self._next = after
            if action.kind == "F":
                self.forward(action)
            elif action.kind == "W":
                self.weights(action)
            else:
                self.backward(action)
        self.finish()

    def forward(self, action: Action) -> None:
        owner, stage = self._owner, self._owner.stages[action.stage]
        received = self._received(action, stage.receives)
        self._expect()
        for name, x in received.items():
            example = owner.border_of((Action("F", action.stage - 1, action.microbatch), name))
            received[name] = x.requires_grad_(example.requires_grad and bool(self._trained))
        values = owner.arguments(action.stage, self._named[action.microbatch], received)
        with torch.set_grad_enabled(bool(self._trained)):
            outputs = list(owner.runs[action.stage](*values))
        sent = dict(zip(stage.sends, outputs, strict=False))
        self._hand_over(action, sent)
        own = dict(zip(stage.results, outputs[len(sent) :], strict=True))
        for place, x in own.items():
            self.results[action.microbatch][place] = x.detach() if isinstance(x, Tensor) else x
        if self._trained:
            rooted = {name: x for name, x in sent.items() if x.requires_grad}
            if self._loss in own:
                rooted[""] = own[self._loss]
            self._in_flight[action.stage, action.microbatch] = received, rooted

    def backward(self, action: Action) -> None:
        """Run a backward, or its first half, and hand the gradients of what was received over."""
        owner, stage = self._owner, self._owner.stages[action.stage]
        received, rooted = self._in_flight.pop((action.stage, action.microbatch))
        owner.backwards[action] += 1
        incoming = self._received(action, [name for name in stage.sends if name in rooted])
        self._expect()
        sums, run = self._sums[action.stage], owner.runs[action.stage]
        if not owner._splits:
            self._left[action.stage] -= 1
            sums.closes = not self._left[action.stage]
        borders = {name: x for name, x in received.items() if x.requires_grad}
        leaves = {name: self._trained[name] for name in stage.parameters if name in self._trained}
        starts = [incoming[name] if name else None for name in rooted]
        new = torch.autograd.grad(
            list(rooted.values()), [*borders.values(), *leaves.values()], starts, allow_unused=True
        )
        back = {
            name: torch.zeros_like(x) if gradient is None else gradient
            for (name, x), gradient in zip(borders.items(), new, strict=False)
        }
        rest = run.take_rest() if isinstance(run, Scheduled) else None
        # what stays here is added to in place, while what is sent may not have left
        staying = [*new[len(borders) :], *(rest.carried if rest is not None else ())]
        own = {x.untyped_storage().data_ptr() for x in staying if x is not None} | sums.storages
        back = {
            name: x.clone() if x.untyped_storage().data_ptr() in own else x
            for name, x in back.items()
        }
        self._hand_over(action, back)
        self._later[action.stage, action.microbatch] = _Later(leaves, new[len(borders) :], rest)
        if action.kind == "B":
            self._finish_backward(action)

    def weights(self, action: Action) -> None:
        """Run the second half of a backward: add up the gradients of the weights."""
        self._owner.backwards[action] += 1
        self._expect()
        self._finish_backward(action)

    def _finish_backward(self, action: Action) -> None:
        later = self._later.pop((action.stage, action.microbatch))
        gradients = later.gradients
        if self._owner._splits:
            sums = self._sums[action.stage]
            self._left[action.stage] -= 1
            sums.closes = not self._left[action.stage]
            if later.rest is not None:
                entries = self._owner.stages[action.stage].program.signature.inputs
                results = later.rest.run(sums)
                by_node = {e.node: x for e, x in zip(entries, results, strict=True)}
                gradients = [by_node[name] for name in later.leaves]
        self._add(later.leaves, gradients)

    def finish(self) -> None:
        """Wait until everything has left, and see that nothing is left over."""
        self._owner.links.finish()
        assert not any(self._awaited.values()) and not self._posted, "a tensor was not received"

    def _add(self, leaves: Mapping[str, Tensor], gradients: Sequence[Tensor | None]) -> None:
        names = [name for name, x in zip(leaves, gradients, strict=True) if x is not None]
        new = [x for x in gradients if x is not None]
        sums: list[Tensor | None] = [self.gradients.get(name) for name in names]
        add_gradients(sums, new)
        self.gradients.update({n: x for n, x in zip(names, sums, strict=True) if x is not None})

    # -- tensors between stages --------------------------------------------------------------------
    def _hand_over(self, action: Action, outputs: Mapping[str, Tensor]) -> None:
        """Hand what an action made to the stage that needs it."""
        owner = self._owner
        after = action.after(owner.pipeline.stages)
        if after is None:
            return
        copy = owner.pipeline.rank_of(after.stage)
        for name in owner.outputs_of(action):
            if copy == owner.links.copy:
                self._at[action.result, name] = outputs[name].detach()
            else:
                owner.links.send(copy, outputs[name], self._named_send((action.result, name)))

    def _expect(self) -> None:
        """Post what the next action needs of another rank."""
        action, pipeline = self._next, self._owner.pipeline
        before = None if action is None else action.before(pipeline.stages)
        if before is None or pipeline.rank_of(before.stage) == self._owner.links.copy:
            return
        outputs = self._owner.outputs_of(before)
        self._post(pipeline.rank_of(before.stage), [(before, name) for name in outputs])

    def _received(self, action: Action, names: Sequence[str]) -> dict[str, Tensor]:
        """Return what an action needs of another stage's."""
        owner = self._owner
        before = action.before(owner.pipeline.stages)
        if before is None:
            return {}
        copy = owner.pipeline.rank_of(before.stage)
        if copy == owner.links.copy:
            return {name: self._at.pop((before, name)) for name in names}
        outputs = owner.outputs_of(before)
        self._post(copy, [(before, name) for name in outputs])
        tensors = {name: self._posted.pop((before, name)).wait() for name in outputs}
        if tensors and self._trained:  # without a backward, the other ranks' schedules are shorter
            owner.release_after(before)
        return {name: tensors[name] for name in names}

    def _post(self, copy: int, keys: Sequence[_Key]) -> None:
        """Post receives up to these, in the sender's order."""
        missing = {key for key in keys if key not in self._posted}
        awaited = self._awaited[copy]
        while missing:
            key = awaited.pop(0)
            like, what = self._owner.border_of(key), self._named_send(key)
            self._posted[key] = self._owner.links.receive(copy, like, what)
            missing.discard(key)

    def _named_send(self, key: _Key) -> str:
        """Return what is sent, in words that no other tensor of a step or of another call has."""
        return f"{_TRAINED if self._trained else _EVALUATED} {key[0]} {key[1]}"


def _holders(stages: Sequence[Stage]) -> dict[str, list[int]]:
    """Return the stages that read each parameter, of those that several read."""
    holders: dict[str, list[int]] = defaultdict(list)
    for stage in stages:
        for name in stage.parameters:
            holders[name].append(stage.number)
    return {name: numbers for name, numbers in holders.items() if len(numbers) > 1}


def _first_holders(stages: Sequence[Stage], pipeline: Pipeline) -> dict[str, int]:
    """Return by each name of a parameter the first rank of the pipeline that holds it."""
    first_holders: dict[str, int] = {}
    for stage in stages:
        for entry in stage.program.signature.inputs:
            if entry.kind == "parameter":
                rank = pipeline.rank_of(stage.number)
                for name in entry.names or (entry.target,):
                    first_holders[name] = min(rank, first_holders.get(name, rank))
    return first_holders


def _example(stage: Stage, name: str, device: torch.device) -> Tensor:
    """Return a tensor of the shape of what a stage receives, one element in memory."""
    node = next(n for n in stage.program.module.graph.nodes if n.name == name)
    layout, dtype = stage.program.layouts[name], stage.program.dtypes[name]
    element = torch.zeros((), dtype=dtype, device=device)
    return element.expand(layout.local_shape).requires_grad_(carries(node))


def _shapes_of_results(program: Program, device: torch.device) -> list[Tensor]:
    """Return examples of the graph's results, one element of each in memory."""
    examples = []
    nodes = program.module.graph.output_node().all_input_nodes
    by_name = {node.name: node for node in nodes}
    for output in program.signature.outputs:
        if output.node is None:
            continue
        meta = by_name[output.node].meta
        dtype = meta["dtype"] if "dtype" in meta else meta["val"].dtype
        shape = program.layouts[output.node].local_shape
        examples.append(torch.zeros((), dtype=dtype, device=device).expand(shape))
    return examples
