"""ParallelModule, the module that users train: it holds the rank's part of the parameters, as
DTensors under their original names, and runs the planned graph. Deferred is planned at its first
call.

`api.apply` and `api.parallelize` make them of a planned program, its runner and a model's tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._compat import not_compiled, pytree
from autopar.errors import InputError, PlanError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Input, Program, autocast_text, under_autocast, without_autocast
from autopar.ops.devices import filled
from autopar.ops.sharded.attention import seed_at
from autopar.ops.sharded.dropout import next_seed
from autopar.passes.trace.signature import NO_GENERATION, as_planned_call
from autopar.runtime.agreement import InputsWatch
from autopar.runtime.apply import placements, to_dtensor, to_local
from autopar.runtime.profiler import MeasuredStep, backward, measure_step, phase, restore_after
from autopar.world import ranks

Backend = Callable[[fx.GraphModule], Callable[..., Any]]
_RESERVED_NAMES = ("graph", "graphs", "plan")


class ParallelModule(nn.Module):
    """A model that trains on all ranks of a mesh as the original trains on one. `apply` and
    `parallelize` make it.

    >>> import autopar
    >>> x = torch.ones(4, 8)
    >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
    >>> par(x).shape, [name for name, _ in par.named_parameters()]
    (torch.Size([4, 16]), ['weight', 'bias'])

    Call it with the same global inputs on every rank: it cuts out the rank's own part. Parts that
    are already cut are passed as DTensors, as `shard` makes them. It returns what the model
    returns: scalars replicated on every rank, other tensors as DTensors. `graph` is the rewritten
    forward, `graphs` has every graph by pass. Calls raise InputError for other shapes, dtypes,
    modes or constants than planned, and RankError where ranks pass different inputs.
    """

    def __init__(
        self,
        program: Program,
        graphs: Mapping[str, fx.GraphModule],
        device_mesh: DeviceMesh | None,
        rank: int,
        seed: int,
        order: Sequence[str],
        run: Callable[..., Any] | None = None,
        number: int = 0,
        *,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        assert program.plan is not None
        self.plan: Plan = program.plan
        self.graph: fx.GraphModule = program.module
        self.graphs = dict(graphs)
        # the model's tensors are cut and released: only the rank's own parts stay
        self._program, self._device_mesh = dataclasses.replace(program, tensors={}), device_mesh
        self._device = device
        self._mesh: Mesh = program.plan.mesh
        self._coordinate = self._mesh.coordinate(rank)
        self._run = program.module if run is None else run
        self._watch = InputsWatch(number)
        self._mutated = {o.target for o in program.signature.outputs if o.kind == "mutation"}
        named = dict(
            pair for entry in program.signature.inputs for pair in self._hold(entry, tensors)
        )
        for name in sorted(named, key=list(order).index):  # optimizer states follow this order
            self._register(name, *named[name])
        self._seed = seed % (1 << 62)
        self.train(program.signature.training)

    # -- its tensors -------------------------------------------------------------------------------
    def _hold(
        self, entry: Input, tensors: Mapping[str, torch.Tensor]
    ) -> list[tuple[str, tuple[torch.Tensor, bool]]]:
        """Return a parameter or buffer, and whether it is saved in state_dict, for every name that
        the original model has for it. Coordinates and constants are registered at once.
        """
        if entry.kind == "coordinate":
            place = filled((1,), self._coordinate[entry.target], self._device)
            self.register_buffer(entry.node, place, persistent=False)
            return []
        if entry.kind not in ("parameter", "buffer", "constant"):
            return []
        unsharded = tensors[entry.target].detach()
        if entry.kind == "constant":
            self.register_buffer(entry.node, self._own_copy(unsharded), persistent=False)
            return []
        tensor: torch.Tensor
        if entry.kind == "parameter":
            layout = self._program.layouts[entry.node]
            local = self._to_device(layout.cut(unsharded, self._coordinate))
            tensor = nn.Parameter(
                to_dtensor(local, layout, self._device_mesh), requires_grad=entry.trainable
            )
        else:
            tensor = self._own_copy(unsharded)
        return [(name, (tensor, entry.persistent)) for name in entry.names or (entry.target,)]

    def _own_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        on_device = tensor.device == self._device
        return tensor.clone() if on_device else self._to_device(tensor)

    def _to_device(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor on this rank's device; one without numbers stays on the meta device."""
        return part if part.is_meta else part.to(self._device)

    def _register(self, name: str, tensor: torch.Tensor, persistent: bool) -> None:
        module: nn.Module = self
        *path, last = name.split(".")
        root = name.split(".")[0]
        if hasattr(ParallelModule, root) or root in _RESERVED_NAMES:
            raise PlanError(f"a ParallelModule has its own {root!r}: rename {name} in the model")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(last, tensor)
        else:
            module.register_buffer(last, tensor, persistent=persistent)

    def layout(self, name: str) -> Layout:
        """Return the stored layout of a parameter, by any of its names; else raise InputError.

        >>> import autopar
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
        >>> par.layout("weight").shape
        (16, 8)
        """
        for entry in self._program.signature.inputs:
            if entry.kind == "parameter" and name in (entry.target, *entry.names):
                return self._program.layouts[entry.node]
        raise InputError(f"no parameter {name!r}; the names are those of the original model")

    # -- its inputs --------------------------------------------------------------------------------
    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """Return the rank's own part of a global batch, as DTensors in the same structure: (args,
        kwargs), or the argument alone where there is one. Raises InputError as a call does.

        >>> import autopar
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
        >>> par.shard(x).shape  # a world of one rank keeps all of it
        torch.Size([4, 8])
        """
        leaves, spec = self._leaves(args, kwargs)
        for entry in self._user_inputs():
            assert entry.position is not None
            layout = self._program.layouts[entry.node]
            own = self._own_part(entry, leaves[entry.position])
            leaves[entry.position] = to_dtensor(own, layout, self._device_mesh)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return args[0] if len(args) == 1 and not kwargs else args if not kwargs else (args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model_outputs(self._run_graph(args, kwargs))

    def _run_graph(self, args: Any, kwargs: Any) -> Any:
        """Return the results of the graph, run without autocast, as the casts are nodes of it."""
        values, cast = self._checked_values(args, kwargs), self._program.signature.autocast
        if not cast:
            return self._run(*values)
        with without_autocast(cast):
            return self._run(*values)

    @not_compiled
    def _checked_values(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the values of the graph's placeholders, after the check that no rank refuses its
        own inputs and, from time to time, that all ranks pass the same ones.
        """
        try:
            values = self._values(args, kwargs)
        except Exception as error:
            self._watch.count_call((), error)
            raise
        leaves = pytree.tree_leaves((args, kwargs))
        user_values = [leaves[e.position] for e in self._user_inputs() if e.position is not None]
        self._watch.count_call([x for x in user_values if not isinstance(x, DTensor)])
        return values

    @not_compiled  # torch.compile of this module would trace all of it, for minutes
    def _values(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the values of the graph's placeholders: the rank's own part of everything."""
        if self.training != self._program.signature.training:
            planned, called = ("eval", "train") if self.training else ("train", "eval")
            raise InputError(
                f"the model was planned in {planned} mode and is called in {called} mode, but the "
                f"mode is part of the graph: plan again after model.{called}()"
            )
        self._refuse_autocast()
        leaves, _ = self._leaves(args, kwargs)
        return to_local([self._feed(entry, leaves) for entry in self._program.signature.inputs])

    def _refuse_autocast(self) -> None:
        planned = self._program.signature.autocast
        now = under_autocast((self._device.type, *(kind for kind, _ in planned)))
        if now != planned:
            raise InputError(
                f"the model was planned under {autocast_text(planned)} and is called under "
                f"{autocast_text(now)}, but its casts are part of the graph: plan (or "
                "parallelize) and call it under the same one"
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError: a plan is for training steps, all of one shape."""
        raise InputError(NO_GENERATION)

    def timeline(self, *args: Any, **kwargs: Any) -> MeasuredStep:
        """Return how a step on these inputs runs on this rank, forward and backward: every op,
        every collective with its node and bytes, every wait, in seconds; `save(path)` writes it for
        Perfetto.

        >>> import autopar
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
        >>> par.timeline(x).seconds > 0
        True

        Collective, on gloo; some steps are run, but gradients and buffers are left as they are. The
        backward is that of the first scalar that the model returns, else of all that it returns.
        Raises InputError as a call does, PlanError where another backend runs it, or on GPUs.
        """
        return self._timelines(1, args, kwargs)[0]

    def _timelines(self, times: int, args: Any, kwargs: Any) -> list[MeasuredStep]:
        """Return the timelines of `times` steps."""
        if self._device.type != "cpu":
            raise PlanError(
                f"a timeline is read off what the CPU does, and this step runs on {self._device}: "
                "what runs on its streams would not be seen. Profile the step with torch.profiler "
                "and its CUDA activity"
            )
        ranks.together("reading the inputs", lambda: self._values(args, kwargs))
        with restore_after(self):
            return measure_step(self._run, lambda run: self._step(run, args, kwargs), times)

    def _step(self, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.zero_grad()
        with phase("forward"):
            values = self._values(args, kwargs)
            with without_autocast(self._program.signature.autocast):
                results = self._model_outputs(run(*values))
        with phase("backward"):
            backward(results)

    def _user_inputs(self) -> list[Input]:
        return [entry for entry in self._program.signature.inputs if entry.kind == "user"]

    def _leaves(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        signature = self._program.signature
        leaves = as_planned_call(signature.forward, signature.in_spec, args, kwargs)
        for position, value in signature.fixed:
            leaf = leaves[position]  # 2 and 2.0 make other graphs, a tensor equals no number
            if type(leaf) is not type(value) or leaf != value:
                text = repr(leaf)
                if isinstance(leaf, torch.Tensor):
                    text = f"a tensor {tuple(leaf.shape)} {leaf.dtype}"
                raise InputError(
                    f"input {position} is {text}, planned was {value!r}; what is no "
                    "tensor is part of the plan: plan again"
                )
        return leaves, signature.in_spec

    def _feed(self, entry: Input, leaves: list[Any]) -> Any:
        if entry.kind == "user":
            assert entry.position is not None
            leaf = leaves[entry.position]
            own = self._own_part(entry, leaf)
            return leaf if isinstance(leaf, DTensor) else own  # `to_local` takes it apart
        if entry.kind == "seed":
            if entry.target != "seed":
                return seed_at(self._seed, self._coordinate, entry.target)
            self._seed = next_seed(self._seed)
            return filled((), self._seed, self._device)
        if entry.kind in ("coordinate", "constant"):
            return self.get_buffer(entry.node)
        if entry.kind == "buffer":
            now = self.get_buffer(entry.target)  # what the backward saves must not be written over
            return now.clone() if entry.target in self._mutated else now
        parameter = self.get_parameter(entry.target)
        self._refuse_gradient(f"parameter {entry.target}", parameter, entry)
        return parameter

    def _refuse_gradient(self, what: str, tensor: torch.Tensor, entry: Input) -> None:
        """Raise InputError for an unplanned gradient, as gradients decide where ranks sum."""
        unplanned = tensor.requires_grad and not entry.trainable
        if unplanned and self._mesh.axes and torch.is_grad_enabled():
            raise InputError(
                f"{what} requires a gradient, when the plan was made it did not: plan again with "
                "one that does, or take it back (detach it, requires_grad_(False))"
            )

    def _own_part(self, entry: Input, value: Any) -> torch.Tensor:
        """Return the rank's part of one input; raise InputError for what was not planned."""
        layout, dtype = self._program.layouts[entry.node], self._program.dtypes[entry.node]
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or (tuple(value.shape), value.dtype) != (layout.shape, dtype):
            actual = f"{tuple(value.shape)} {value.dtype}" if is_tensor else repr(value)
            raise InputError(
                f"input {entry.target} is {actual}, the plan is for {layout.shape} {dtype}: plan "
                "again for other shapes or dtypes"
            )
        self._refuse_gradient(f"input {entry.target}", value, entry)
        if isinstance(value, DTensor):
            self._check_placements(entry, value)
            return value.to_local()
        own = layout.cut(value, self._coordinate) if layout.axes_of("S") else value
        return own if own.device == self._device else own.to(self._device, non_blocking=True)

    def _check_placements(self, entry: Input, tensor: DTensor) -> None:
        planned = placements(self._program.layouts[entry.node])
        if tensor.device_mesh != self._device_mesh or tensor.placements != planned:
            raise InputError(
                f"input {entry.target} is a DTensor with placements {tensor.placements} on "
                f"{tensor.device_mesh}, the plan wants {planned} on {self._device_mesh}: give the "
                "global tensor, or what `shard` makes of it"
            )

    # -- its outputs -------------------------------------------------------------------------------
    @not_compiled
    def _model_outputs(self, results: Any) -> Any:
        remaining = iter(results)
        leaves = []
        for output in self._program.signature.outputs:
            value = output.constant if output.node is None else next(remaining)
            if output.kind == "mutation":
                with torch.no_grad():
                    self.get_buffer(output.target).copy_(value)
                continue
            if output.node is not None and isinstance(value, torch.Tensor) and value.dim():
                value = to_dtensor(value, self._program.layouts[output.node], self._device_mesh)
            leaves.append(value)
        return pytree.tree_unflatten(leaves, self._program.signature.out_spec)


class Deferred(nn.Module):
    """A model that is planned at its first call, with that call's inputs."""

    def __init__(self, make: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self._make = make
        self.module: nn.Module | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._plan_once(args, kwargs)(*args, **kwargs)

    def timeline(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ParallelModule.timeline does; it counts as the first call."""
        return self._plan_once(args, kwargs).timeline(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError, as a ParallelModule does."""
        raise InputError(NO_GENERATION)

    def _plan_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.module is None:
            if args and kwargs:
                raise InputError(
                    "the first call takes all inputs by position or all by name; or give `inputs` "
                    "to parallelize"
                )
            self.module = self._make(kwargs or args)
        return self.module

    def parameters(self, recurse: bool = True) -> Any:
        if self.module is None:
            raise InputError(
                "the parameters are known after the first call; or give `inputs` to parallelize"
            )
        return self.module.parameters(recurse)


NUMBERS = itertools.count()  # numbers the modules of this process
