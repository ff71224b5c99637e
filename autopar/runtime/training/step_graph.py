"""One planned graph of a model on a rank: how a call becomes the values of its placeholders, and
its results those of the model.

Example: for `par(tokens)` on 4 ranks, `values` gives every parameter's own part, this rank's rows
of the tokens and the rank's coordinates, `run` runs the graph on them, and `outputs` makes DTensors
of what it returns. A ParallelModule has a graph for training, and one for each other kind of call
(runtime/training/call_graphs.py). `timelines` says how its steps run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import are_trained, placings_of, pytree, version_of, without_modes
from autopar.errors import InputError, PlanError
from autopar.ir.layout import Layout
from autopar.ir.padding import Pad, filled_up, unpadded_shape
from autopar.ir.program import (
    Autocast,
    Input,
    Program,
    autocast_text,
    under_autocast,
    without_autocast,
)
from autopar.ops.devices import default_generator, fill_on
from autopar.ops.sharded.attention import seed_at
from autopar.ops.sharded.dropout import next_seed
from autopar.passes.trace.signature import as_planned_call
from autopar.runtime.apply import placements, to_dtensor
from autopar.runtime.local_parts import (
    ParameterParts,
    local_parts,
    require_unchanged,
    to_local,
)
from autopar.runtime.profiler import MeasuredStep, backward, measure_step, phase, restore_after
from autopar.world import ranks

_SEEDS = 1 << 62  # seeds are below


class Seed:
    """The seed of a module's random numbers, which every call that draws some moves on. `value`: a
    number that is the same on all ranks.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.start(seed)
        self._generator = default_generator(device)
        self._unused: tuple[int, torch.Tensor] | None = None  # the state of a generator so seeded

    def start(self, seed: int) -> None:
        """Start anew from a seed of torch's; the numbers of neighbouring ones have nothing in
        common.
        """
        digest = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
        self.value = int.from_bytes(digest, "big") % _SEEDS

    def put(self, value: int) -> None:
        """Go on from this value, whatever torch.manual_seed said before."""
        self.renewed()
        self.value = value

    def renewed(self) -> bool:
        """Whether torch.manual_seed was called since numbers were drawn; one number is drawn, so
        that the next call is told from this one.
        """
        generator = self._generator
        seed, device = generator.initial_seed(), generator.device
        with without_modes():  # these are no ops of the model
            if self._unused is None or self._unused[0] != seed:
                self._unused = seed, torch.Generator(device).manual_seed(seed).get_state()
            if not torch.equal(generator.get_state(), self._unused[1]):
                return False
            torch.rand((), device=device, generator=generator)
        return True


class CallKind(NamedTuple):
    """What tells a call from calls that need other graphs, for messages and for planning: the mode,
    whether gradients are recorded, the autocast around it, and the shape and dtype of every tensor.
    `differences`: what of the module is other than it was when it was planned first.
    """

    training: bool
    gradients: bool
    autocast: Autocast
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    differences: tuple[str, ...] = ()

    @staticmethod
    def of(
        training: bool,
        device: torch.device,
        args: Any,
        kwargs: Any,
        differences: Sequence[str] = (),
    ) -> CallKind:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = tuple((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, torch.Tensor))
        cast = under_autocast((device.type,))
        return CallKind(training, torch.is_grad_enabled(), cast, tensors, tuple(differences))

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in self.tensors
        )
        mode = "train" if self.training else "eval"
        gradients = "" if self.gradients else " without gradients"
        cast = f" under {autocast_text(self.autocast)}" if self.autocast else ""
        differences = "".join(f", {change}" for change in self.differences)
        return f"{mode} mode{gradients}{cast}, inputs {shapes or 'none'}{differences}"


class Owner(Protocol):
    """The module that a graph runs for, whose tensors it reads at every call. `parts`: the rank's
    own parts of its parameters.
    """

    parts: ParameterParts

    def tensor(self, name: str) -> torch.Tensor:
        """Return the parameter or buffer of this name."""

    def tensors(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the parameters or buffers of these names."""

    def attribute(self, name: str) -> Any:
        """Return the plain attribute of this name."""


class Bound(NamedTuple):
    """A call of a graph: the leaves of its arguments in the planned order, and the module's
    parameters as they are now.
    """

    leaves: list[Any]
    parameters: list[torch.Tensor]


class StepGraph:
    """A planned program without the model's tensors, and `run`, which runs its graph on this rank.
    `constants`: the tensors that the graph was traced with and that no module holds. `gradients`:
    whether it was planned for calls that record them. `numbers`: for each number among the
    arguments that is an input of the graph, its position.
    """

    def __init__(
        self,
        program: Program,
        run: Callable[..., Any],
        device_mesh: DeviceMesh | None,
        coordinate: dict[str, int],
        device: torch.device,
        seed: Seed,
        constants: Mapping[str, torch.Tensor],
        gradients: bool = True,
        numbers: Mapping[int, type] = MappingProxyType({}),
    ) -> None:
        self.program, self.run = dataclasses.replace(program, tensors={}), run
        self.device_mesh, self.coordinate, self.device = device_mesh, coordinate, device
        self.seed, self.gradients, self._numbers = seed, gradients, dict(numbers)
        self.modes = {gradients}  # whether the calls that all ranks agreed on record gradients
        self.signature = program.signature
        self.autocast: Autocast = program.signature.autocast
        self.replicated_outputs = program.plan is not None and program.plan.replicated_outputs
        self.user_inputs = [e for e in program.signature.inputs if e.kind == "user"]
        self.draws = any(entry.kind == "seed" for entry in program.signature.inputs)
        self.parameters = [e for e in program.signature.inputs if e.kind == "parameter"]
        self._names = [entry.target for entry in self.parameters]
        # the shapes with padding of the rank's parts of parameters, by their place in the signature
        self._padded = {
            place: program.layouts[entry.node].local_shape
            for place, entry in enumerate(program.signature.inputs)
            if entry.kind == "parameter" and program.pads(entry.node) and coordinate
        }
        self._trained = [entry.trainable for entry in self.parameters]
        # what is no parameter; for each placeholder, its place among parameters and then others
        self._others = [e for e in program.signature.inputs if e.kind != "parameter"]
        places = {e.node: place for place, e in enumerate([*self.parameters, *self._others])}
        self._order = [places[entry.node] for entry in program.signature.inputs]
        self._followed: list[Any] = []  # the DTensors of the call that is under way
        # what the user is handed as it is may get hooks, which are for that call alone
        nodes = {entry.node for entry in self.parameters}
        self._keeps_parts = not any(o.node in nodes for o in program.signature.outputs)
        self._mutated = {o.target for o in program.signature.outputs if o.kind == "mutation"}
        # the rank's coordinates and the constants of the graph, and which attribute each has been
        self._own: dict[str, torch.Tensor] = {}
        self._fed_from: dict[str, tuple[Any, int]] = {}
        self._placings: list[Any] = []  # of parameters that were compared with the plan
        for entry in program.signature.inputs:
            if entry.kind == "coordinate":
                self._own[entry.node] = fill_on((1,), coordinate[entry.target], device)
            elif entry.kind == "constant":
                constant = constants[entry.target].detach()
                self._own[entry.node] = (
                    constant.to(device)
                    if not constant.is_meta
                    else (torch.empty_like(constant, device=device))
                )

    def layouts_of_parameters(self) -> dict[str, Layout]:
        """Return the stored layout of every parameter, by each of its names."""
        return {
            name: self.program.layouts[entry.node]
            for entry in self.signature.inputs
            if entry.kind == "parameter"
            for name in (entry.target, *entry.names)
        }

    def pads_of_parameters(self) -> dict[str, tuple[Pad, ...]]:
        """Return the padding of every parameter that has some, by each of its names."""
        return {
            name: self.program.pads(entry.node)
            for entry in self.parameters
            if self.program.pads(entry.node)
            for name in (entry.target, *entry.names)
        }

    def empty(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the tensors of a model that have no numbers, on the meta device."""
        kinds = ("parameter", "buffer", "constant")
        entries = [entry for entry in self.signature.inputs if entry.kind in kinds]
        return [
            name
            for entry in entries
            if tensors[entry.target].is_meta
            for name in entry.names or (entry.target,)
        ]

    # -- inputs ------------------------------------------------------------------------------------
    def bind(self, args: Any, kwargs: Any, training: bool, owner: Owner) -> Bound | None:
        """Return what the graph takes of a call, None where this graph is not for it: in another
        mode, with other arguments, or where other parameters are trained. What the modules hold is
        compared by ModuleState.
        """
        if training != self.signature.training or not self._under_planned_autocast():
            return None
        recorded = torch.is_grad_enabled()
        if recorded and not self.gradients:
            return None
        leaves = as_planned_call(self.signature.forward, self.signature.in_tree, args, kwargs)
        if leaves is None or any(_differ(leaves[at], value) for at, value in self.signature.fixed):
            return None
        if any(type(leaves[position]) is not kind for position, kind in self._numbers.items()):
            return None
        if not all(self._fits(entry, leaves[entry.position or 0]) for entry in self.user_inputs):
            return None
        parameters = owner.tensors(self._names)
        # on one rank gradients are summed over nothing, and autograd follows whatever is trained
        if recorded and self.coordinate and are_trained(parameters) != self._trained:
            return None
        return Bound(leaves, parameters)

    def _under_planned_autocast(self) -> bool:
        kinds = (self.device.type, *(kind for kind, _ in self.autocast))
        return under_autocast(kinds) == self.autocast

    def _fits(self, entry: Input, value: Any) -> bool:
        """Whether an input has the shape and dtype that were planned, and no gradient else."""
        if entry.position in self._numbers:
            return True
        layout = self.program.layouts[entry.node]
        return (
            isinstance(value, torch.Tensor)
            and tuple(value.shape) == layout.shape
            and value.dtype == self.program.dtypes[entry.node]
            and not (value.requires_grad and not entry.trainable and torch.is_grad_enabled())
        )

    def values(self, bound: Bound, owner: Owner) -> list[Any]:
        """Return the values of the graph's placeholders: the rank's own part of everything. Raises
        InputError for an input or a gradient that was not planned.
        """
        parts = self._parts_of(bound.parameters, owner)
        others = [self._feed(entry, bound.leaves, owner) for entry in self._others]
        for _ in range(getattr(self.run, "count", 1) - 1):  # every micro-batch drops others
            seeds = (e for e in self._others if e.kind == "seed")
            others += [self._feed(entry, bound.leaves, owner) for entry in seeds]
        if self.coordinate:
            dtensors = (x for x in others if isinstance(x, DTensor))
            self._followed = [*bound.parameters, *dtensors]
            others = to_local(others, first_order=bool(parts))
        values = [*parts, *others]
        values[: len(self._order)] = [values[place] for place in self._order]
        for place, shape in self._padded.items():  # ranks whose part is full change nothing
            values[place] = filled_up(values[place], shape)
        return values

    def _parts_of(self, parameters: list[Any], owner: Owner) -> list[torch.Tensor]:
        """Return the rank's own parts of the parameters; raise InputError where these are not as
        planned.
        """
        cached = owner.parts.reuse(parameters, self._trained) if self._keeps_parts else None
        if cached is not None:
            return cached
        placings = placings_of(parameters)
        if not self._placings or not all(map(operator.is_, placings, self._placings)):
            for entry, parameter in zip(self.parameters, parameters, strict=True):
                self._refuse_other_parameter(entry, parameter)
            self._placings = placings  # those of the same tensors stay the same objects
        if not self.coordinate:
            return parameters
        if not self._keeps_parts:
            return local_parts(parameters)
        return owner.parts.of(parameters, self._trained)

    def _feed(self, entry: Input, leaves: list[Any], owner: Owner) -> Any:
        if entry.kind == "user":
            assert entry.position is not None
            return self._own_part(entry, leaves[entry.position])
        if entry.kind == "seed":
            if entry.target != "seed":
                return seed_at(self.seed.value, self.coordinate, entry.target)
            self.seed.value = next_seed(self.seed.value)
            return fill_on((), self.seed.value, self.device)
        if entry.kind == "coordinate":
            return self._own[entry.node]
        if entry.kind == "constant":
            return self._constant(entry, owner)
        now = owner.tensor(entry.target)  # what the backward saves must not be written over
        return now.clone() if entry.target in self._mutated else now

    def _constant(self, entry: Input, owner: Owner) -> torch.Tensor:
        """Return a constant of the graph: what the attribute has now that it was traced from, or
        what was traced where it has no attribute.
        """
        now = owner.attribute(entry.target)
        if isinstance(now, torch.Tensor) and not now.is_meta:
            version = 0 if now.is_inference() else version_of(now)
            if self._fed_from.get(entry.node) != (id(now), version):
                self._own[entry.node] = now.detach().to(self.device, copy=True)
                self._fed_from[entry.node] = id(now), version
        elif type(now) in (int, float):
            return self._number(now, entry)
        return self._own[entry.node]

    def _number(self, value: Any, entry: Input) -> torch.Tensor:
        """Return a number as an input of the graph, made on the rank's device."""
        return torch.full((), value, dtype=self.program.dtypes[entry.node], device=self.device)

    def _refuse_other_parameter(self, entry: Input, parameter: torch.Tensor) -> None:
        """Raise InputError for a parameter that was replaced by one that lies otherwise."""
        layout, dtype = self.program.layouts[entry.node], self.program.dtypes[entry.node]
        is_own = not self.coordinate or isinstance(parameter, DTensor)
        shape = unpadded_shape(layout.shape, self.program.pads(entry.node))
        if not is_own or parameter.dtype != dtype or tuple(parameter.shape) != shape:
            actual = f"{type(parameter).__name__} of {tuple(parameter.shape)} {parameter.dtype}"
            raise InputError(
                f"parameter {entry.target} is a {actual}, and the plan is for a parameter of "
                f"{shape} {dtype} of which this rank holds its part: assign to its `data`, "
                "or parallelize the changed model"
            )

    def _refuse_gradient(self, what: str, tensor: torch.Tensor, entry: Input) -> None:
        """Raise InputError for an unplanned gradient, as gradients decide where ranks sum."""
        unplanned = tensor.requires_grad and not entry.trainable
        if unplanned and self.coordinate and torch.is_grad_enabled():
            raise InputError(
                f"{what} requires a gradient, when the plan was made it did not: plan again with "
                "one that does, or take it back (detach it, requires_grad_(False))"
            )

    def _own_part(self, entry: Input, value: Any) -> torch.Tensor:
        """Return the rank's part of one input, a DTensor where it is given as one; raise InputError
        for what was not planned.
        """
        layout, dtype = self.program.layouts[entry.node], self.program.dtypes[entry.node]
        if entry.position in self._numbers:
            return self._number(value, entry)
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or (tuple(value.shape), value.dtype) != (layout.shape, dtype):
            actual = f"{tuple(value.shape)} {value.dtype}" if is_tensor else repr(value)
            raise InputError(
                f"input {entry.target} is {actual}, the plan is for {layout.shape} {dtype}: plan "
                "again for other shapes or dtypes"
            )
        self._refuse_gradient(f"input {entry.target}", value, entry)
        if isinstance(value, DTensor):
            return self._as_planned(entry, value)
        own = layout.cut(value, self.coordinate) if layout.axes_of("S") else value
        return own if own.device == self.device else own.to(self.device, non_blocking=True)

    def _as_planned(self, entry: Input, tensor: DTensor) -> DTensor:
        """Return an input as a DTensor that lies as planned; collective where it lies otherwise and
        is not the same on the ranks of an axis.
        """
        planned = placements(self.program.layouts[entry.node])
        if tensor.device_mesh != self.device_mesh:
            raise InputError(
                f"input {entry.target} is a DTensor on {tensor.device_mesh}, the plan wants one on "
                f"{self.device_mesh}: give the global tensor, or what `shard` makes of it"
            )
        if tensor.placements == planned:
            return tensor
        return tensor.redistribute(placements=planned)

    def shard(self, leaves: list[Any]) -> tuple[Any, Any]:
        """Return (args, kwargs) with the rank's own part of each tensor, as DTensors."""
        leaves = list(leaves)
        for entry in self.user_inputs:
            assert entry.position is not None
            own = self._own_part(entry, leaves[entry.position])
            layout = self.program.layouts[entry.node]
            if not isinstance(own, DTensor):
                own = to_dtensor(own, layout, self.device_mesh)
            leaves[entry.position] = own
        args, kwargs = pytree.tree_unflatten(leaves, self.signature.in_tree)
        return args, kwargs

    # -- results -----------------------------------------------------------------------------------
    def outputs(self, results: Any, owner: Owner) -> Any:
        """Return what the model returns, of what the graph returned; new values of buffers are
        written into the owner's.
        """
        followed, self._followed = self._followed, []
        if followed and torch.is_grad_enabled():
            require_unchanged(results, followed)
            owner.parts.release(results)
        remaining = iter(results)
        leaves = []
        for output in self.signature.outputs:
            value = output.constant if output.node is None else next(remaining)
            if output.kind == "mutation":
                with torch.no_grad():
                    owner.tensor(output.target).copy_(value)
                continue
            is_part = (
                isinstance(value, torch.Tensor) and value.dim() and not self.replicated_outputs
            )
            if is_part and output.node is not None:
                value = to_dtensor(value, self.program.layouts[output.node], self.device_mesh)
            leaves.append(value)
        return pytree.tree_unflatten(leaves, self.signature.out_tree)


def _differ(value: Any, planned: Any) -> bool:
    """Whether an argument that is no tensor has another value than planned; 2 and 2.0 make other
    graphs, and a tensor equals no number.
    """
    return type(value) is not type(planned) or value != planned


def timelines(module: Any, times: int, args: Any, kwargs: Any) -> list[MeasuredStep]:
    """Return the timelines of `times` steps of a ParallelModule. Collective. Raises InputError as a
    call does, PlanError on GPUs.
    """
    device = module.device
    if device.type != "cpu":
        raise PlanError(
            f"a timeline is read off what the CPU does, and this step runs on {device}: "
            "what runs on its streams would not be seen. Profile the step with torch.profiler "
            "and its CUDA activity"
        )
    if module.plan.stage_starts:
        raise PlanError(
            "a timeline is read off one forward and one backward of a graph, and this module runs "
            "stages: par.plan.timeline() has the modelled step of all of them, and plan.report "
            "draws it"
        )
    if module.plan.microbatches > 1:
        raise PlanError(
            "a timeline is read off one forward and one backward, and a step of this module runs "
            f"{module.plan.microbatches} micro-batches: plan with microbatches=1 to see one, or "
            "read par.stats()"
        )
    ranks.agree("call", str(CallKind.of(module.training, device, args, kwargs)))
    state = module._autopar
    graph, bound = state.graphs.graph_for(args, kwargs)
    ranks.together("reading the inputs", lambda: graph.values(bound, state))
    with restore_after(module):
        return measure_step(graph.run, lambda run: _step(module, graph, run, bound), times)


def _step(module: Any, graph: StepGraph, run: Callable[..., Any], bound: Bound) -> None:
    module.zero_grad()
    with phase("forward"):
        values = graph.values(bound, module._autopar)
        with without_autocast(graph.autocast):
            results = graph.outputs(run(*values), module._autopar)
    with phase("backward"):
        backward(results)
