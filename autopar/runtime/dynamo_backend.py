"""The backend for torch.compile: every graph that dynamo captures is planned by itself and run on
all ranks.

Example: torch.compile(model, backend="autopar", options={"layout": "ddp"}). The script stays as it
is: parameters, inputs and results are replicated on every rank, and only what is computed between
them is sharded. `autopar.backend` is `backend`; torch finds `by_name` by its entry point.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import preserve_node_meta

from autopar._compat import dynamo_sources, pytree
from autopar.cost.memory import Limit, Optimizer, Recompute
from autopar.errors import LayoutError, RankError
from autopar.ir.graph import is_inexact
from autopar.ir.padding import filled_up
from autopar.ir.program import Input, without_autocast
from autopar.ops.custom_functions import Captured
from autopar.ops.devices import CPU, fill_on
from autopar.ops.sharded.attention import seed_at
from autopar.ops.sharded.dropout import next_seed
from autopar.planner.plan_context import PlanContext
from autopar.planner.request import Layouts, PlanOptions, Stages
from autopar.runtime.apply import agree_on_request, build_runner, plan_on_rank_0
from autopar.runtime.backends import Backend, Overlap
from autopar.runtime.module import NUMBERS
from autopar.runtime.training.inputs_watch import InputsWatch
from autopar.runtime.training.step_graph import Seed
from autopar.world import World, ranks

Run = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Run]

_SAMPLES = 64  # entries of a tensor that ranks compare
_GRAPH_NUMBERS = itertools.count()  # numbers the planned graphs of this process
_TOLERANCE = 1e-2  # how far entries may be apart, relative to the largest


def backend(
    world: World | int | Any | None = None,
    layout: Layouts = "auto",
    backend: Backend = None,
    memory: Limit = "auto",
    optimizer: Optimizer = "adamw",
    recompute: Recompute = "auto",
    overlap: Overlap = True,
    reduce_dtype: torch.dtype | str | None = None,
) -> Compiler:
    """Return a backend for torch.compile that runs a model on all ranks. Every rank runs the same
    script, with the same parameters and the same global batch; each computes its part of every
    step, and results, gradients and parameters are replicated on all.

    >>> import autopar
    >>> model = torch.compile(nn.Linear(8, 16), backend=autopar.backend(layout="ddp"))
    >>> model(torch.ones(4, 8)).shape  # one rank; under torchrun each computes its part
    torch.Size([4, 16])

    `world` None: the running ranks; without a process group graphs run as they are. `layout`,
    `backend`, `memory`, `optimizer`, `recompute`, `overlap` and `reduce_dtype` are those of
    `parallelize`. Where dynamo breaks the graph, each captured graph is planned alone, at its first
    call, and again for other shapes and numbers.

    Calls raise what `parallelize` raises. Raises RankError where ranks hold different parameters or
    get different inputs at the first call, LayoutError for stages, which hold parts of the model.
    """
    if isinstance(layout, Stages):
        raise LayoutError(
            f"backend: layout is {layout}: under torch.compile every rank holds all parameters. "
            "Call autopar.parallelize(model, inputs=..., layout=...) for stages"
        )

    options = PlanOptions(layout, memory, optimizer, recompute, reduce_dtype, overlap)

    def plan_graph(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[PlanContext, Run]:
        common_world, request = agree_on_request(
            world, options, inputs, replicated_parameters=True, backend=backend
        )
        context = plan_on_rank_0(model, common_world, inputs, request).context
        assert isinstance(context, PlanContext)
        values = (*model.parameters(), *model.buffers(), *inputs)
        device = next((x.device for x in values if isinstance(x, torch.Tensor)), CPU)
        context = context.on_device(device)
        return context, build_runner(context, device.type, backend, overlap)[1]

    def compile_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Run:
        if _runs_alone(world):
            return graph
        captured = _CapturedGraph(graph, plan_graph)
        return lambda *values: captured(values)

    return compile_graph


def by_name(
    graph: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None
) -> Run:
    """Compile a graph for torch.compile(model, backend="autopar", options={"layout": "ddp"}): see
    `backend`.
    """
    return backend(**(options or {}))(graph, example_inputs)


def _runs_alone(world: Any) -> bool:
    """Whether no world is named and no other rank runs; warns where ranks were started without a
    process group.
    """
    if world is not None or ranks.running() > 1:
        return False
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        warnings.warn(
            f"{started} ranks were started but no process group is running: each runs all of the "
            "model by itself. Call torch.distributed.init_process_group before the model is called",
            stacklevel=2,
        )
    return True


class _Graph(nn.Module):
    """A captured graph as a model. It holds the parameters and buffers under their names in the
    model from which dynamo captured it; its inputs are the other placeholders.
    """

    def __init__(self, graph: fx.GraphModule, paths: dict[int, str], values: Sequence[Any]) -> None:
        super().__init__()
        self._captured, self._paths = graph, paths
        for place, path in paths.items():
            *parents, last = path.split(".")
            module: nn.Module = self
            for name in parents:
                if name not in module._modules:
                    setattr(module, name, nn.Module())
                module = module.get_submodule(name)
            value = values[place]
            if isinstance(value, nn.Parameter):
                setattr(module, last, value)
            else:
                module.register_buffer(last, value)

    def forward(self, *inputs: Any) -> Any:
        remaining, count = iter(inputs), len(self._paths) + len(inputs)
        state = {place: attrgetter(path)(self) for place, path in self._paths.items()}
        values = [state[place] if place in state else next(remaining) for place in range(count)]
        with preserve_node_meta():  # nodes keep the module path and the line of the user's code
            return _InliningInterpreter(self._captured).run(*values)


class _InliningInterpreter(fx.Interpreter):
    """Runs the graph with checkpointed blocks inlined, as the plan decides what is recomputed in
    the backward. Custom autograd functions keep their backward.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return _InliningInterpreter(args[0]).run(*args[1:])
        if target is torch.ops.higher_order.autograd_function_apply:
            return Captured(lambda *operands: target(*args[:2], *operands, **kwargs)).apply(
                *args[2:]
            )
        return super().call_function(target, args, kwargs)


class _CapturedGraph:
    """A captured graph, planned at its first call with tensors of some shapes."""

    def __init__(
        self,
        graph: fx.GraphModule,
        plan_graph: Callable[[nn.Module, tuple[Any, ...]], tuple[PlanContext, Run]],
    ) -> None:
        self.graph, self.plan_graph = graph, plan_graph
        sources = dynamo_sources(graph.graph)
        self.paths = [_path(source) for source in sources]
        self.buffers = ["._buffers[" in source for source in sources]
        self.numbers = _mark_numbers(graph.graph)
        graph.recompile()
        self.runs: dict[Any, Callable[[Sequence[Any]], Any]] = {}
        for node in graph.graph.nodes:
            if stack := node.meta.get("nn_module_stack"):
                own = {key: (_path(where), kind) for key, (where, kind) in stack.items()}
                node.meta["nn_module_stack"] = own

    def __call__(self, values: Sequence[Any]) -> Any:
        pairs = zip(values, self.numbers, strict=True)
        values = [value.item() if is_number else value for value, is_number in pairs]
        key = tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in values)
        if key not in self.runs:
            self.runs[key] = self._plan_values(values)
        return self.runs[key](values)

    def _plan_values(self, values: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        if _is_update(self.graph, values):
            return lambda call_values: self.graph(*call_values)
        paths: dict[int, str] = {}
        for place, value in enumerate(values):
            if isinstance(value, nn.Parameter) or self.buffers[place]:
                path = self.paths[place]
                paths[place] = path if path and path not in paths.values() else f"held_{place}"
        _require_same_values(
            values, [paths.get(i) or path or f"input {i}" for i, path in enumerate(self.paths)]
        )
        input_places = [place for place in range(len(values)) if place not in paths]
        model = _Graph(self.graph, paths, values)
        context, run = self.plan_graph(model, tuple(values[place] for place in input_places))
        places = {path: place for place, path in paths.items()}
        return _PlannedGraph(context, run, places, input_places)


class _Starts(Seed):
    """The seed from which the graphs of a device have started, and how often."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device)
        self.times = 0


_STARTS: dict[torch.device, _Starts] = {}


class _PlannedGraph:
    """A planned graph, called with all values of the captured one: parameters, buffers and inputs
    are the script's own tensors.
    """

    def __init__(
        self, context: PlanContext, run: Run, places: dict[str, int], input_places: Sequence[int]
    ) -> None:
        program = context.program
        assert program.plan is not None
        constants = {k: v for k, v in program.tensors.items() if k not in places}
        self.program = dataclasses.replace(program, tensors=constants)
        self.run, self.places, self.input_places = run, places, input_places
        self.own = program.plan.mesh.coordinate(ranks.rank())
        self.draws = any(entry.kind == "seed" for entry in program.signature.inputs)
        self.number, number = ranks.from_rank_0((next(_GRAPH_NUMBERS), next(NUMBERS)))
        self.watch, self.seed, self.starts = InputsWatch(str(number)), 0, 0
        self.mutated = {o.target for o in program.signature.outputs if o.kind == "mutation"}

    def __call__(self, values: Sequence[Any]) -> Any:
        device = next((v.device for v in values if isinstance(v, torch.Tensor)), None)
        input_values = [values[place] for place in self.input_places]
        # floats that another graph has computed may differ in the last bit; integers do not
        exact = [x for x in input_values if isinstance(x, torch.Tensor) and not is_inexact(x.dtype)]
        if self.draws:
            self._renew_seed(device)
        self.watch.count_call(exact)
        signature = self.program.signature
        with without_autocast(signature.autocast):
            results = iter(self.run(*(self._feed(e, values, device) for e in signature.inputs)))
        leaves = []
        for output in signature.outputs:
            value = output.constant if output.node is None else next(results)
            if output.kind == "mutation":
                with torch.no_grad():
                    values[self.places[output.target]].copy_(value)
            else:
                leaves.append(value)
        return pytree.tree_unflatten(leaves, signature.out_tree)

    def _renew_seed(self, device: Any) -> None:
        """Start anew after torch.manual_seed, as every graph of this process does. No two graphs
        draw the same numbers, and all ranks draw alike.
        """
        seeds = _STARTS.setdefault(device, _Starts(device))
        if seeds.renewed() or not seeds.times:
            self.watch.agree("a call after torch.manual_seed")
            seeds.start(ranks.from_rank_0(torch.initial_seed()))
            seeds.times += 1
        if self.starts != seeds.times:
            self.starts = seeds.times
            self.seed = (seeds.value + (self.number << 48)) % (1 << 62)

    def _feed(self, entry: Input, values: Sequence[Any], device: Any) -> torch.Tensor:
        """Return the value of one placeholder of the planned graph."""
        if entry.kind == "coordinate":
            return fill_on((1,), self.own[entry.target], device)
        if entry.kind == "seed":
            if entry.target != "seed":
                return seed_at(self.seed, self.own, entry.target)
            self.seed = next_seed(self.seed)
            return fill_on((), self.seed, device)
        if entry.kind == "user":
            assert entry.position is not None
            layout, value = (
                self.program.layouts[entry.node],
                values[self.input_places[entry.position]],
            )
            return layout.cut(value, self.own) if layout.axes_of("S") else value
        if entry.target not in self.places:
            return self.program.tensors[entry.target]
        value = values[self.places[entry.target]]
        if self.program.pads(entry.node):
            value = filled_up(value, self.program.layouts[entry.node].shape)
        return value.clone() if entry.target in self.mutated else value


def _mark_numbers(graph: fx.Graph) -> list[bool]:
    """Return which placeholders are Python numbers, and make them so.

    Dynamo passes a number that has changed since its last compilation as a tensor, on which the
    graph calls item(); these calls are removed.
    """
    are_numbers = []
    for node in graph.find_nodes(op="placeholder"):
        are_items = [(user.op, user.target) == ("call_method", "item") for user in node.users]
        are_numbers.append(bool(are_items) and all(are_items))
        for user in list(node.users) if are_numbers[-1] else ():
            user.replace_all_uses_with(node)
            graph.erase_node(user)
    return are_numbers


def _is_update(module: fx.GraphModule, values: Sequence[Any]) -> bool:
    """Whether a graph writes into every parameter that it takes, as a compiled optimizer step does.
    Every rank runs all of it, as parameters are replicated.
    """
    graph = module.graph
    placed = list(zip(graph.find_nodes(op="placeholder"), values, strict=True))
    placed += [(node, attrgetter(node.target)(module)) for node in graph.find_nodes(op="get_attr")]
    unwritten = {node for node, value in placed if isinstance(value, nn.Parameter)}
    has_parameters = bool(unwritten)
    for node in graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and node.args:
            first = node.args[0]
            unwritten -= set(first if isinstance(first, list | tuple) else [first])
    return has_parameters and not unwritten


def _require_same_values(values: Sequence[Any], names: Sequence[str]) -> None:
    """Raise a RankError where the ranks hold different parameters or get different inputs, as their
    results would belong to neither. A few entries of every tensor are compared, not to the last
    bit. A tensor with a gradient that is no leaf was computed from compared ones and is skipped.
    """
    samples = {
        name: _sample(value)
        for name, value in zip(names, values, strict=True)
        if isinstance(value, torch.Tensor) and (value.is_leaf or not value.requires_grad)
    }
    expected = ranks.from_rank_0(samples)

    def compare() -> None:
        for name, own in samples.items():
            if name not in expected or not _is_close(own, expected[name]):
                raise RankError(
                    f"{name} is not what it is on rank 0: under torch.compile with autopar every "
                    "rank makes the same parameters (torch.manual_seed before the model is made) "
                    "and gives the same global batch, of which each computes its part (no "
                    "DistributedSampler)"
                )

    ranks.together("comparing what the ranks hold", compare)


def _sample(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].double().cpu()


def _is_close(own: torch.Tensor, first: torch.Tensor) -> bool:
    if own.shape != first.shape:
        return False
    largest = float(first.nan_to_num(0.0, 0.0, 0.0).abs().max()) if first.numel() else 0.0
    return torch.allclose(own, first, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)


def _path(source: str) -> str:
    """Return the name in the model of what dynamo took from a source.

    >>> _path("L['self']._modules['blocks']._modules['0']._parameters['weight']")
    'blocks.0.weight'
    >>> _path("G['model'].blocks.0"), _path("L['self']")
    ('model.blocks.0', '')
    """
    text = re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", source)
    text = re.sub(r"^[LG]\[(['\"])(\w+)\1\]", r"\2", text)
    text = ".".join(word for word in re.split(r"\W+", text) if word)
    return re.sub(r"^self(\.|$)", "", text)
