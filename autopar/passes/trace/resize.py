"""A model that was exported at one batch size gets its graph of another size without an export.

    trace(model, (tokens_of_16_rows,)); trace(model, (tokens_of_5_rows,))      # one export

What a graph has at another size cannot be concluded from its numbers: 16 may be the rows of the
batch or the heads of a layer, a slice may be as long as what it is cut from, and Python may branch.
So it is observed. The model is called once on fake tensors of the new size, and every operator that
torch then runs below autograd is noted, with its arguments: `OperatorCalls`. The exported graph,
run at its own size, says which of them belong to which node. At the new size every node is given
the numbers that its operators have in the model, and is run on the model's own tensors: it must run
the very same operators on the very same operands as the model does. A node that looks as one that
was run is not run again. A graph that does so from its inputs to its outputs is the model's,
whatever its numbers were found by. Where anything differs, such as an operator that the model does
not run, `Differs` is raised, and the model is exported.

reuse.py keeps an `ExportedOnce` of each export, and asks it for the program of another call:
`at_size`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from autopar._compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    exported_with,
    exporting,
    pytree,
    without_modes,
)
from autopar.ir.containers import tensors_in
from autopar.ir.graph import copy_graph
from autopar.passes.trace.export import StandIns, fake_of, watch_forward

aten = torch.ops.aten

_CHECKS = "_assert_"  # in the names of operators that export adds, and that compute nothing
_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # of constants in Python's code
_MOST_UNCLEAR = 6  # numbers of one node that are tried as they were, and as others became
_MOST_BYTES = 1 << 16  # of a constant that is compared by value


class Differs(Exception):
    """At the new size the model does something else than its exported graph."""


class Operand(NamedTuple):
    """A tensor that an operator is given: the name of an input, or the number of a result."""

    name: str | int


class Result(NamedTuple):
    """A tensor that an operator gives."""

    name: str | int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def unsized(self) -> Any:
        """What it has in common with the same result at another size."""
        return self._replace(shape=(), strides=())


class OperatorCall(NamedTuple):
    """An operator that torch ran: its arguments, flattened, and its results."""

    operator: Any
    arguments: tuple[Any, ...]
    results: tuple[Result, ...]


class OperatorCalls(TorchDispatchMode):
    """Notes the operators that torch runs below autograd, within this context. `inputs`: tensors
    with names. A detach of what has no gradient, as torch makes them for itself, is no call.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []
        self._names: dict[int, str | int] = {id(value): name for name, value in inputs.items()}
        self._alive: list[Any] = list(inputs.values())  # so that no two values have one id
        self._count = 0

    def after(self) -> OperatorCalls:
        """Return what notes further operators, which are given the results of these."""
        later = OperatorCalls({})
        later._names, later._alive, later._count = {**self._names}, [*self._alive], self._count
        return later

    def by_name(self) -> dict[str | int, torch.Tensor]:
        """Return the tensors by the names of inputs and the numbers of results."""
        tensors: dict[str | int, torch.Tensor] = {}
        for value in self._alive:
            tensors.setdefault(self._names[id(value)], value)
        return tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_internal = func is aten.detach.default and not args[0].requires_grad
        if func is torch.ops.prim.device.default or is_internal:
            result = func(*args, **kwargs)
            if is_internal and id(result) not in self._names:
                self._name(result, self.name_of(args[0]))
            return result
        arguments = tuple(self._described((args, kwargs)))
        result = func(*args, **kwargs)
        results = tensors_in(result)
        if _CHECKS not in func.name():
            func = _LIFTS[0] if func in _LIFTS else func
            self.calls.append(OperatorCall(func, arguments, tuple(map(self._result, results))))
        return result

    def name_of(self, value: torch.Tensor) -> Any:
        """Return the name or number of a tensor; of a constant in the code, its value."""
        if id(value) in self._names:
            return self._names[id(value)]
        return _constant(value)

    def _name(self, value: torch.Tensor, name: Any) -> None:
        self._names[id(value)] = name
        self._alive.append(value)

    def _result(self, value: torch.Tensor) -> Result:
        if id(value) not in self._names:
            self._name(value, self._count)
            self._count += 1
        name = self._names[id(value)]
        shape = tuple(value.shape)
        if any(type(size) is not int for size in shape):
            raise Differs("a size depends on the values of a tensor")
        return Result(name, shape, value.stride(), value.dtype, value.device, value.requires_grad)

    def _described(self, value: Any) -> Iterator[Any]:
        """Yield the leaves of an operator's arguments, and the lengths of its lists."""
        if isinstance(value, torch.Tensor):
            yield Operand(self.name_of(value))
        elif isinstance(value, list | tuple):
            yield f"{len(value)} values"
            for inner in value:
                yield from self._described(inner)
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from self._described(inner)
        else:
            yield value


def _constant(value: torch.Tensor) -> Any:
    """Return what a constant in the code is compared by; what is equal to nothing where it is
    none.
    """
    constant = getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
    if constant is None or constant.device.type != "cpu" or constant.layout != torch.strided:
        return object()
    with without_modes():
        if constant.nbytes > _MOST_BYTES:
            return object()
        numbers = constant.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return tuple(constant.shape), str(constant.dtype), bytes(numbers)


class NodeCalls(NamedTuple):
    """The operators that a node of a graph runs, and the names of its results."""

    calls: list[OperatorCall]
    results: list[Any]


@dataclass
class ExportedOnce:
    """An export of a model, which gives the graphs of other sizes. `program`: before it is
    decomposed; `inputs`: the (args, kwargs) that it was called with, without numbers; `written`:
    the buffers that a call writes into.
    """

    program: ExportedProgram
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    written: set[str]
    # what each node runs at the size of the export, once it was asked for
    _of_nodes: dict[str, NodeCalls] = field(default_factory=dict)

    def at_size(
        self, model: nn.Module, fakes: StandIns, recorders: Sequence[Any] = ()
    ) -> ExportedProgram:
        """Return the program for a call with other sizes, in whose stand-ins the model is. The
        model is called within `recorders`. Raises Differs, and what the model raises.
        """
        if not self._of_nodes:
            self._run_at_own_size(model, fakes)
        inputs = _named_inputs(model, (fakes.args, fakes.kwargs))
        noted, returned = _calls_of(model, fakes, inputs, recorders)
        graph, of_model = copy_graph(self.program.graph), _Sequence(noted.calls)
        with _Run(self.program, graph, inputs, fakes, noted) as run:
            for node in _calls_in(graph):
                was = self._of_nodes[node.name]
                position = of_model.position
                try:
                    run.fit(node, was.calls, [of_model.next_like(call) for call in was.calls])
                except Differs:  # as a view of one row that was a copy of several
                    of_model.position = position
                    run.fit_in_turn(node, of_model)
                of_model.note(was.results, run.names_of(node))
        of_model.require_no_more_writes()
        run.require_returned(returned)
        own = partial(_described_by, fakes.mode, {})
        for node, value in run.values.items():
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, own, value)
        constants = {name: inputs.get(name, x) for name, x in self.program.constants.items()}
        return exported_with(self.program, graph, constants)

    def _run_at_own_size(self, model: nn.Module, fakes: StandIns) -> None:
        """Note the operators that each node runs at the size of the export."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda x: fake_of(fakes.mode, x, x.device), self.inputs
        )
        inputs = _named_inputs(model, (args, kwargs))
        graph, own = self.program.graph, fakes._replace(args=args, kwargs=kwargs)
        with _Run(self.program, graph, inputs, own) as run:
            of_nodes = {
                node.name: NodeCalls(run.run(node, (node.args, node.kwargs)), run.names_of(node))
                for node in _calls_in(graph)
            }
        self._of_nodes = of_nodes


class _Sequence:
    """The operators that the model runs, in order, of which some are those of a graph's nodes."""

    def __init__(self, calls: Sequence[OperatorCall]) -> None:
        self._calls, self.position = calls, 0
        self._names: dict[Any, Any] = {}  # of the graph's results at its own size -> of the model's
        self.became: dict[Any, list[Any]] = {}  # of numbers there -> here

    def next_like(self, call: OperatorCall) -> OperatorCall:
        """Return the next operator that is this one of the graph at its own size, whatever its
        sizes are. Raises Differs where there is none before the model writes into something.
        """
        while self.position < len(self._calls):
            candidate = self._calls[self.position]
            self.position += 1
            if self._alike(call, candidate):
                pairs = zip(call.results, candidate.results, strict=True)
                self._names |= {old.name: new.name for old, new in pairs}
                _add_numbers(self.became, [call], [candidate])
                return candidate
            if candidate.operator._schema.is_mutable:
                raise Differs(f"{candidate.operator} is not in the graph")
        raise Differs(f"the graph runs {call.operator}, which the model does not")

    def next_taken(self, take: Callable[[OperatorCall], bool]) -> OperatorCall:
        """Return the next operator that `take` accepts. Raises Differs as `next_like` does."""
        for candidate in self._calls[self.position :]:
            self.position += 1
            if take(candidate):
                return candidate
            if candidate.operator._schema.is_mutable:
                break
        raise Differs("the graph runs an operator that the model does not")

    def note(self, results: Sequence[Any], names: Sequence[Any]) -> None:
        """Note the names that results of the graph at its own size have in the model."""
        pairs = zip(results, names, strict=True)
        self._names |= {old: new for old, new in pairs if type(old) is int}

    def require_no_more_writes(self) -> None:
        """Raise Differs where the model writes into something after all that the graph does."""
        if any(call.operator._schema.is_mutable for call in self._calls[self.position :]):
            raise Differs("the model writes into something after all that the graph does")

    def _alike(self, old: OperatorCall, new: OperatorCall) -> bool:
        if old.operator is not new.operator or len(old.results) != len(new.results):
            return False
        kinds = (
            [(len(x.shape), x.unsized._replace(name="")) for x in call.results]
            for call in (old, new)
        )
        same_kinds = operator.eq(*kinds)
        arguments = [self._of_model(value) for value in _without_sizes(old.arguments)]
        return same_kinds and arguments == [*_without_sizes(new.arguments)]

    def _of_model(self, value: Any) -> Any:
        if not isinstance(value, Operand) or not isinstance(value.name, int):
            return value
        return Operand(self._names.get(value.name, "not in the model"))


def _calls_in(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _named_inputs(model: nn.Module, call: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a model holds and is called with, by name."""
    leaves = enumerate(pytree.tree_leaves(call))
    named = {f"input {place}": x for place, x in leaves if isinstance(x, torch.Tensor)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False)), **named}


def _calls_of(
    model: nn.Module,
    fakes: StandIns,
    inputs: Mapping[str, torch.Tensor],
    recorders: Sequence[Any],
) -> tuple[OperatorCalls, Any]:
    """Call the model; return its operators and what it returns, tensors by their names."""
    calls = OperatorCalls(inputs)
    with ExitStack() as stack:
        for context in (fakes.mode, exporting(), watch_forward(model), calls, *recorders):
            stack.enter_context(context)
        result = model(*fakes.args, **fakes.kwargs)
    leaves, structure = pytree.tree_flatten(result)
    names = [Operand(calls.name_of(x)) if isinstance(x, torch.Tensor) else x for x in leaves]
    return calls, (structure, names)


def _without_sizes(values: Any) -> Any:
    """Return what stays of an operator's arguments, or of a result, at another size."""
    if isinstance(values, list):
        return [_without_sizes(value) for value in values]
    if isinstance(values, tuple) and not isinstance(values, Operand):
        return tuple(_without_sizes(value) for value in values)
    return type(values) if type(values) in (int, float) else values


def _described_by(
    mode: FakeTensorMode, known: dict[Any, torch.Tensor], value: torch.Tensor
) -> torch.Tensor:
    """Return the fake tensor that says what a value is, without the steps that led to it: one for
    all that are alike. `known`: those that were returned before.
    """
    if not isinstance(value, FakeTensor):  # a constant of the code
        return fake_of(mode, value, value.device)
    if value.is_leaf:
        return value
    if value.layout != torch.strided or value.is_complex():
        return value.detach()
    facts = value.shape, value.stride(), value.dtype, value.device
    if facts not in known:
        known[facts] = value.detach()
    return known[facts]


class _Run:
    """A run of an exported graph on stand-ins, within its context: node by node, beside the calls
    that the model makes of the same inputs. `noted`: these calls, where every node is to be given
    the model's own tensors; one that looks as a node that was run is not run again.
    """

    def __init__(
        self,
        program: ExportedProgram,
        graph: fx.Graph,
        inputs: Mapping[str, torch.Tensor],
        fakes: StandIns,
        noted: OperatorCalls | None = None,
    ) -> None:
        self.values: dict[fx.Node, Any] = {}
        self._program, self._graph, self._mode = program, graph, fakes.mode
        self._calls = OperatorCalls(inputs) if noted is None else noted.after()
        self._tensors = None if noted is None else noted.by_name()
        self._stack = ExitStack()
        self._known: dict[Any, tuple[Any, list[Any]]] = {}  # results of nodes, by their keys
        self._names: dict[Any, Any] = {}  # of the model's results -> of the graph's
        leaves = iter(pytree.tree_leaves((fakes.args, fakes.kwargs)))
        placeholders = graph.find_nodes(op="placeholder")
        for node, entry in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if entry.kind is InputKind.USER_INPUT:
                self.values[node] = next(leaves)
            elif entry.kind in (InputKind.PARAMETER, InputKind.BUFFER) and entry.target in inputs:
                self.values[node] = inputs[entry.target]
            else:
                self.values[node] = program.constants.get(entry.target or "")
        for node in graph.find_nodes(op="get_attr"):
            self.values[node] = getattr(program.graph_module, str(node.target), None)

    def __enter__(self) -> _Run:
        for context in (self._mode, exporting(), self._calls):
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def run(self, node: fx.Node, arguments: Any) -> list[OperatorCall]:
        """Run a node with these (args, kwargs); return the operators that it runs."""
        before = len(self._calls.calls)
        args, kwargs = fx.map_arg(arguments, self.values.__getitem__)
        assert callable(node.target)
        self.values[node] = node.target(*args, **kwargs)
        return self._calls.calls[before:]

    def take(self, of_model: OperatorCall, of_graph: OperatorCall) -> bool:
        """Whether a call of the graph's is this one of the model's; its results then are, too."""
        if of_model.operator is not of_graph.operator:
            return False
        own = [self._in_graph(value) for value in of_model.arguments]
        if not _same(own, of_graph.arguments):
            return False
        pairs = list(zip(of_model.results, of_graph.results, strict=True))
        for left, right in pairs:
            written = Operand(left.name) in of_model.arguments
            name = self._in_graph(Operand(left.name)).name if written else right.name
            if left._replace(name=name) != right:
                return False
        self._names |= {left.name: right.name for left, right in pairs}
        return True

    def _in_graph(self, value: Any) -> Any:
        """Return an operand of the model's by its name in the graph."""
        if not isinstance(value, Operand) or not isinstance(value.name, int):
            return value
        own = "not in the graph" if self._tensors is None else value.name
        return Operand(self._names.get(value.name, own))

    def fit(
        self, node: fx.Node, was: Sequence[OperatorCall], becomes: Sequence[OperatorCall]
    ) -> None:
        """Give a node the numbers with which it runs the operators `becomes`, where it has those
        with which it ran `was`; and run it.
        """
        assert self._tensors is not None
        writes = any(call.operator._schema.is_mutable for call in becomes)
        for arguments in itertools.islice(_candidates(node, was, becomes), 1 if writes else None):
            key = None if writes else self._key(node, arguments, becomes)
            if key is not None and key in self._known:
                structure, names = self._known[key]
                own = [self._at(node, becomes, place) for place in names]
                self.values[node] = pytree.tree_unflatten(own, structure)
            elif not self._runs(node, arguments, becomes, key):
                continue
            if arguments != (node.args, node.kwargs):
                node.args, node.kwargs = arguments
            return
        raise Differs(f"{node.name} does not run what the model runs at this size")

    def fit_in_turn(self, node: fx.Node, of_model: _Sequence) -> None:
        """Give a node the numbers that others became, and run it: it must run operators that the
        model runs next, whatever it ran at the size of the export.
        """
        position = of_model.position
        for arguments in _with_numbers(node, of_model.became):
            of_model.position = position
            try:
                calls = self.run(node, arguments)
            except Exception:  # of numbers that do not belong to these operands
                continue
            if any(call.operator._schema.is_mutable for call in calls):
                break
            try:
                for call in calls:
                    of_model.next_taken(partial(self.take, of_graph=call))
            except Differs:
                self._names = {}
                continue
            self._take_results(node)
            if arguments != (node.args, node.kwargs):
                node.args, node.kwargs = arguments
            return
        raise Differs(f"{node.name} does not run what the model runs at this size")

    def names_of(self, node: fx.Node) -> list[Any]:
        """Return the names of a node's results."""
        leaves = pytree.tree_leaves(self.values[node])
        return [self._calls.name_of(x) if isinstance(x, torch.Tensor) else None for x in leaves]

    def _take_results(self, node: fx.Node) -> list[Any]:
        """Give a node that was run the model's own tensors; return the names of these."""
        assert self._tensors is not None
        of_model = {own: name for name, own in self._names.items()}
        self._names = {}
        leaves, structure = pytree.tree_flatten(self.values[node])
        names = self.names_of(node)
        names = [of_model.get(name, name) if type(name) is int else name for name in names]
        pairs = list(zip(names, leaves, strict=True))
        own = [self._tensors.get(name, x) if type(name) is int else x for name, x in pairs]
        self.values[node] = pytree.tree_unflatten(own, structure)
        return names

    def _runs(
        self, node: fx.Node, arguments: Any, becomes: Sequence[OperatorCall], key: Any
    ) -> bool:
        """Whether a node with these arguments runs what the model runs; its value is then the
        model's own.
        """
        assert self._tensors is not None
        try:
            calls = self.run(node, arguments)
        except Exception:  # of numbers that do not belong to these operands
            return False
        if len(calls) != len(becomes) or not all(map(self.take, becomes, calls)):
            self._names = {}
            return False
        places = [self._place(node, becomes, name) for name in self._take_results(node)]
        if key is not None and None not in places:
            self._known[key] = pytree.tree_structure(self.values[node]), places
        return True

    # -- nodes that look alike ---------------------------------------------------------------------
    def _operands(self, node: fx.Node) -> list[torch.Tensor]:
        """Return the tensors that a node is given, in order."""
        return [x for n in node.all_input_nodes for x in tensors_in(self.values[n])]

    def _places(self, node: fx.Node, becomes: Sequence[OperatorCall]) -> dict[Any, Any]:
        """Return where each tensor of a node's operators comes from, by its name: the place of an
        operand, or of a call and its result.
        """
        places: dict[Any, Any] = {}
        for place, value in enumerate(self._operands(node)):
            places.setdefault(self._calls.name_of(value), place)
        for number, call in enumerate(becomes):
            for place, result in enumerate(call.results):
                places.setdefault(result.name, (number, place))
        return places

    def _place(self, node: fx.Node, becomes: Sequence[OperatorCall], name: Any) -> Any:
        return None if name is None else self._places(node, becomes).get(name)

    def _at(self, node: fx.Node, becomes: Sequence[OperatorCall], place: Any) -> torch.Tensor:
        """Return the tensor at such a place."""
        assert self._tensors is not None
        if isinstance(place, int):
            return self._operands(node)[place]
        return self._tensors[becomes[place[0]].results[place[1]].name]

    def _key(self, node: fx.Node, arguments: Any, becomes: Sequence[OperatorCall]) -> Any:
        """Return what two nodes have in common that run the same operators on operands in the same
        places; None of one whose operands are not all compared.
        """
        places = self._places(node, becomes)
        facts = []
        for x in self._operands(node):
            if not isinstance(x, FakeTensor) or x.layout != torch.strided or x.is_complex():
                return None
            grad = x.requires_grad, x.is_leaf
            facts.append((x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, grad))
        calls: list[Any] = []
        for call in becomes:
            calls.append(call.operator)
            for value in call.arguments:
                if not isinstance(value, Operand):
                    calls.append((type(value), repr(value)))
                elif isinstance(value.name, int | str) and value.name in places:
                    calls.append(places[value.name])
                else:
                    return None
            for result in call.results:
                calls.append(result._replace(name=str(places[result.name])))
        lengths = [(number, len(pytree.tree_leaves(self.values[source])))
            for number, source in enumerate(node.all_input_nodes)]  # fmt: skip
        numbers = {source: number for number, source in enumerate(node.all_input_nodes)}
        own = fx.map_arg(arguments, lambda source: f"operand {numbers[source]}")
        return node.target, repr(own), tuple(lengths), tuple(facts), tuple(calls)

    def require_returned(self, returned: Any) -> None:
        """Require that the graph returns what the model returns."""
        if returned[0] != self._program.call_spec.out_spec:
            raise Differs(f"the model returns {returned[0]}")
        (results,) = self._graph.output_node().args
        assert isinstance(results, tuple | list)
        own: list[Any] = []
        pairs = zip(results, self._program.graph_signature.output_specs, strict=True)
        for result, entry in pairs:
            if entry.kind is not OutputKind.USER_OUTPUT:
                raise Differs("the graph returns what the model does not")
            if isinstance(entry.arg, ConstantArgument):
                own.append(entry.arg.value)
            else:
                assert isinstance(result, fx.Node)
                own.append(Operand(self._calls.name_of(self.values[result])))
        if not _same([self._in_graph(value) for value in returned[1]], own):
            raise Differs("the model returns something else than the graph")


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether values are of equal types and equal: 1 is not True, and 0.0 not -0.0."""
    return len(left) == len(right) and all(
        type(a) is type(b) and (repr(a) == repr(b) if isinstance(a, float) else a == b)
        for a, b in zip(left, right, strict=True)
    )


def _candidates(
    node: fx.Node, was: Sequence[OperatorCall], becomes: Sequence[OperatorCall]
) -> Iterator[Any]:
    """Return the (args, kwargs) that a node may have where its operators become others: each number
    is what it became there. One that became several others, as where a batch has as many rows as a
    layer has heads, is tried as each of them.
    """
    became: dict[Any, list[Any]] = {}
    _add_numbers(became, was, becomes)
    return _with_numbers(node, became)


def _add_numbers(
    became: dict[Any, list[Any]], was: Sequence[OperatorCall], becomes: Sequence[OperatorCall]
) -> None:
    """Add what each number of these operators became to the others."""
    for old, new in zip(was, becomes, strict=True):
        for before, after in zip(_numbers(old), _numbers(new), strict=True):
            values = became.setdefault((type(before), before), [])
            if after not in values:
                values.append(after)


def _with_numbers(node: fx.Node, became: Mapping[Any, list[Any]]) -> Iterator[Any]:
    """Yield the (args, kwargs) of a node with what its numbers became, each of several."""
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    choices = [became.get((type(x), x), [x]) if type(x) in (int, float) else [x] for x in leaves]
    if sum(len(each) > 1 for each in choices) > _MOST_UNCLEAR:
        raise Differs(f"{node.name} has too many numbers that became several others")
    for chosen in itertools.product(*choices):
        yield pytree.tree_unflatten(chosen, structure)


def _numbers(call: OperatorCall) -> list[int | float]:
    """Return the numbers of a call: its arguments and the sizes of its results, in order."""
    arguments = [x for x in call.arguments if type(x) in (int, float)]
    return [*arguments, *(size for result in call.results for size in result.shape)]
