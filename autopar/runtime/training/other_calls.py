"""The graphs of calls that the training plan was not made for: another mode, another batch size or
sequence length, other arguments.

    par.eval()
    with torch.no_grad():
        par(last_batch)    # planned at the first such call, on the mesh of the training plan

The mesh stays and so do the stored parameters, so nothing is moved or copied; a dim that an axis
does not divide leaves that axis idle. At most MOST graphs are kept besides the training one, the
oldest goes. What is traced is a skeleton of the model: its modules, without the numbers of its
tensors. A call enters `OtherCalls.graph_for`, a StepGraph leaves. runtime/module.py calls it, on
all ranks together.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.cost.memory import Budget, Recompute
from autopar.errors import InputError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ops.devices import filled
from autopar.planner.planner import Call, PlanContext
from autopar.planner.request import PlanRequest
from autopar.runtime.apply import build_runner, plan_on_rank_0
from autopar.runtime.backends import Backend, Overlap
from autopar.runtime.training.inputs_watch import InputsWatch
from autopar.runtime.training.parts import mirror
from autopar.runtime.training.step_graph import CallKey, StepGraph
from autopar.world import ranks
from autopar.world.world import say_once

MOST = 8  # graphs besides the training one


# -- the model without its numbers -----------------------------------------------------------------
class Skeleton:
    """A copy of a model whose parameters and buffers have no storage, and the mode of each of its
    modules. Tensors that are plain attributes are copied with their numbers: a graph may hold them.
    """

    def __init__(self, model: nn.Module) -> None:
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = _without_numbers(tensor)
        self.model: nn.Module = copy.deepcopy(model, memo)
        trains = model.training  # then a module in eval mode is meant to stay in it
        self._modes = [module.training or not trains for module in self.model.modules()]

    def in_mode(self, training: bool) -> nn.Module:
        """Return the model in eval mode, or with every module in the mode that it trains in."""
        for module, trained in zip(self.model.modules(), self._modes, strict=True):
            module.training = trained and training
        self.model.training = training
        return self.model


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def skeleton_of(model: nn.Module) -> Skeleton | None:
    """Return the model's skeleton, None where Python cannot copy it (an open file, a lock)."""
    try:
        return Skeleton(model)
    except Exception:  # whatever a __deepcopy__ of the user's raises
        return None


# -- graphs ----------------------------------------------------------------------------------------
class OtherCalls:
    """Plans and keeps the graphs of other calls. `plan`: the training plan, whose mesh, stored
    layouts, world and limits stay.
    """

    def __init__(
        self,
        skeleton: Skeleton | None,
        plan: Plan,
        backend: Backend,
        overlap: Overlap,
        device: torch.device,
    ) -> None:
        self._skeleton, self._plan, self._device = skeleton, plan, device
        self._backend, self._overlap = backend, overlap
        self._graphs: OrderedDict[CallKey, StepGraph] = OrderedDict()
        self._dropped = False

    def begin(self, first: StepGraph, watch: InputsWatch) -> None:
        """Take the graph of the training plan, whose stored tensors all graphs read, and what
        compares the calls of the ranks.
        """
        self._first, self._watch = first, watch

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that hold the parts of the model's parameters, by name."""
        if self._skeleton is not None:
            yield from mirror(self._skeleton.model).named_children()

    def bare_model(self) -> nn.Module:
        """Return the model without the numbers of its tensors. Raises InputError where it could not
        be copied.
        """
        if self._skeleton is None:
            raise InputError(
                "the model cannot be initialized by autopar, because copy.deepcopy does not copy "
                "it: load its numbers with load_weights or load_state_dict"
            )
        return self._skeleton.model

    def config(self) -> Any:
        """Return the config of a model of transformers, None where there is none."""
        return None if self._skeleton is None else getattr(self._skeleton.model, "config", None)

    def prefix(self) -> str:
        """Return what names of weights of transformers may have more or less."""
        model = None if self._skeleton is None else self._skeleton.model
        prefix = getattr(model, "base_model_prefix", "")
        return prefix if isinstance(prefix, str) else ""

    def attribute(self, name: str) -> Any:
        """Return a plain value that the original has as an attribute, such as a config. Raises
        AttributeError for what it has not, and for tensors, modules and methods.
        """
        value = None if self._skeleton is None else getattr(self._skeleton.model, name, None)
        if value is None or callable(value) or isinstance(value, torch.Tensor | nn.Module):
            raise AttributeError(
                f"a ParallelModule has no {name!r}, and of the original it has plain values alone: "
                "call a method on the original model"
            )
        return value

    def graph_for(self, args: Any, kwargs: Any, owner: nn.Module) -> tuple[StepGraph, list[Any]]:
        """Return the graph for a call, planned if it is the first of its kind, and the call's
        leaves. Collective where it is. Raises what `plan` raises, and InputError where the model
        could not be copied.
        """
        key = CallKey.of(owner.training, self._device, args, kwargs)
        graph = self._graphs.get(key) or self._graphs.get(key._replace(gradients=True))
        if graph is None:
            graph = self._graphs[key] = self._new_graph(key, args, kwargs, owner)
            self._drop_oldest()
        leaves = graph.bind(args, kwargs, owner.training)
        assert leaves is not None, key
        return graph, leaves

    def _drop_oldest(self) -> None:
        if len(self._graphs) <= MOST:
            return
        dropped, _ = self._graphs.popitem(last=False)
        if not self._dropped and not ranks.rank():
            warnings.warn(
                f"calls of more than {MOST} kinds besides the planned one: the graph for {dropped} "
                "is dropped, and planned anew when it is needed. Pad or bucket the inputs to fewer "
                "shapes",
                stacklevel=2,
            )
        self._dropped = True

    def _new_graph(self, key: CallKey, args: Any, kwargs: Any, owner: nn.Module) -> StepGraph:
        if self._skeleton is None:
            raise InputError(
                f"the plan is for another call than {key}, and the model cannot be traced again, "
                "because copy.deepcopy does not copy it: call it as it was planned, or plan again"
            )
        self._watch.agree(f"a call in {key}")
        started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            context = self._planned(key, args, kwargs, owner)
        context = context.on_device(self._device)
        device_mesh, run = build_runner(context, self._device.type, self._backend, self._overlap)
        own = self._own_tensors(context.program)
        if not ranks.rank():
            seconds = time.perf_counter() - started
            say_once(f"a call in {key}: planned in {seconds:.1f} s on the same mesh")
        place = self._first.coordinate, self._device, self._first.seed
        return StepGraph(context.program, run, device_mesh, *place, own)

    def _planned(self, key: CallKey, args: Any, kwargs: Any, owner: nn.Module) -> PlanContext:
        assert self._skeleton is not None
        model = self._skeleton.in_mode(key.training)
        held = dict(owner.named_parameters())
        for name, parameter in model.named_parameters():
            trained = name in held and held[name].requires_grad
            parameter.requires_grad_(trained and key.gradients)
        call = Call(*pytree.tree_map_only(torch.Tensor, self._example(key), (args, kwargs)))
        budget = Budget(self._plan.device_limit, self._plan.optimizer, self._recompute(key))
        request = PlanRequest.like(self._plan, "auto", budget)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was said of the model was said at its plan
            plan = plan_on_rank_0(model, self._plan.world, call, request, self._stored())
        assert isinstance(plan.context, PlanContext)
        return plan.context

    def _recompute(self, key: CallKey) -> Recompute:
        """Return what is recomputed in the backward: as little as fits a limit; without one what
        the training plan recomputes.
        """
        if not key.gradients:
            return "none"
        if self._plan.device_limit is not None:
            return "auto"
        plan = self._plan
        lighter: Recompute = "gathers" if plan.regather else "selective" if plan.rerun else "none"
        return "full" if plan.recompute else lighter

    def _example(self, key: CallKey) -> Any:
        """Return what makes a tensor of a call one to trace with: of its global shape, without
        numbers, with the gradient that is recorded.
        """

        def example(x: torch.Tensor) -> torch.Tensor:
            if isinstance(x, DTensor):
                x = torch.empty(
                    x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad
                )
            return x if key.gradients or not x.requires_grad else x.detach()

        return example

    def _stored(self) -> Plan:
        """Return the training plan with the stored layouts by the names of parameters."""
        layouts = self._first.program.layouts
        parameters = (e for e in self._first.signature.inputs if e.kind == "parameter")
        return dataclasses.replace(
            self._plan, stored={entry.target: layouts[entry.node] for entry in parameters}
        )

    def _own_tensors(self, program: Program) -> dict[str, torch.Tensor]:
        """Return the coordinates of a new graph, and the constants that it was traced with."""
        own: dict[str, torch.Tensor] = {}
        for entry in program.signature.inputs:
            if entry.kind == "coordinate":
                own[entry.node] = filled((1,), self._first.coordinate[entry.target], self._device)
            elif entry.kind == "constant":
                own[entry.node] = program.tensors[entry.target].detach().to(self._device)
        return own
