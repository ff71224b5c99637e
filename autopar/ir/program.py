"""The program that passes hand on: a graph, its signature, and what has been decided about it so
far.

Example: trace makes a Program with `module` and `signature`, annotate adds `annotations`, chains
adds `chains`, the planner adds `plan`, and rewrite replaces the module and sets `layouts`. A pass
is a function from Program to Program and returns a new one; passes/pass_manager.py runs them.

The signature also holds the autocast that the model was traced under. Its casts are nodes of the
graph: the plan is for that autocast and no other, and the graph runs without one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from autopar._compat import pytree
from autopar.ir.layout import Element, Layout
from autopar.ir.padding import Pad
from autopar.ir.plan import Plan
from autopar.ir.sharding_rule import OpShardingRule, results_of, shape_of

Autocast = tuple[tuple[str, torch.dtype], ...]  # (device type, dtype to cast to)


def under_autocast(device_types: Iterable[str]) -> Autocast:
    """Return the autocast that is on for these device types.

    >>> with torch.autocast("cpu", torch.bfloat16): under_autocast(["cpu"])
    (('cpu', torch.bfloat16),)
    """
    kinds = sorted(set(device_types) - {"meta"})
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in enabled)


def autocast_text(autocast: Autocast) -> str:
    """Return an autocast as messages name it."""
    return " and ".join(f"torch.autocast({k!r}, {dtype})" for k, dtype in autocast) or "no autocast"


@contextmanager
def without_autocast(autocast: Autocast) -> Iterator[None]:
    """Turn autocast off for those device types."""
    with ExitStack() as stack:
        for kind, _ in autocast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@dataclass(frozen=True)
class Input:
    """One placeholder of the graph, in order.

    `kind` says what feeds it: a parameter, a buffer, a tensor constant that export lifted out of
    the code, a tensor that the user passes, or, inserted by the rewrite, the coordinate of a rank
    on a mesh axis or the seed of random numbers ("seed": the same on all ranks; "@x.z": one for
    each place on these axes). `target` is the qualified name of the parameter or buffer (the first
    of `names`, all the names under which the model holds that same tensor), the path of the user's
    input ("args[0]", "kwargs['labels']"), or the axis name. `position` is the index of a user's
    tensor in the flattened (args, kwargs). `trainable`: the tensor requires a gradient, whether it
    is a parameter or the user's.
    """

    kind: Literal["parameter", "buffer", "constant", "user", "coordinate", "seed"]
    node: str
    target: str
    names: tuple[str, ...] = ()
    trainable: bool = False
    position: int | None = None
    persistent: bool = True  # of a buffer: whether the model's state_dict has it

    @property
    def stored(self) -> bool:
        """Whether the tensor exists before a step begins."""
        return self.kind not in ("user", "seed")


@dataclass(frozen=True)
class Output:
    """One value that the graph returns, in order: the new value of a mutated buffer (`target`: its
    name), a user's leaf, or a border tensor that a stage of a pipeline sends on.
    """

    kind: Literal["mutation", "user", "border"]
    node: str | None  # None: the graph returns `constant`
    target: str = ""
    constant: Any = None


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a graph, and how a call of the model maps onto them."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_tree: pytree.TreeSpec  # of (args, kwargs)
    out_tree: pytree.TreeSpec
    fixed: tuple[
        tuple[int, Any], ...
    ] = ()  # (position, value) of the inputs that are no tensors: part of the trace
    training: bool = True  # the model's mode, which is part of the trace too
    forward: inspect.Signature | None = None  # the model's own, with the names of its arguments
    autocast: Autocast = ()  # around the call that was traced: its casts are in the graph
    reads: frozenset[tuple[str, str]] = frozenset()  # (module, attribute) that forward has read


Value = tuple[str, int]  # a tensor of the graph: (node, index of the result)


@dataclass(frozen=True)
class Atom:
    """A factor of a dim that no op of the graph splits further: axes take their digits inside one
    atom.

    All dims that ops tie together share the atom. `opaque`: views disagree about where to split
    it, so no axis may.

    Example: a view of (8, 12) as (8, 3, 4) makes the second dim two atoms, of sizes 3 and 4.
    """

    number: int
    size: int
    opaque: bool = False


@dataclass(frozen=True)
class Annotations:
    """The facts about every node that the choice of a layout needs.

    `specs` gives the sharding rule of every node, `dims` the atoms of every dim of every value,
    outer first, `factors` those of every factor of every node. `searched` are the nodes whose
    values depend on parameters or carry a gradient: the planner chooses their layouts. All others
    (masks, positions, token ids) are computed in the layouts that their consumers need. `gradient`
    are the values that carry a gradient, `weights` those of them that depend on parameters alone;
    ranks sum the gradients of weights in `reduce_dtype`, if that is wider than their own.
    `replicated_parameters`: every rank stores all parameters unsharded. `replicated_outputs`:
    every rank returns unsharded outputs. `strided_from`: sequences of so many tokens or more that
    attention by positions reads have an inner atom, where their size has divisors, so that an axis
    may take every n-th run of tokens; None where there are no such sequences. `unsplit_queries`:
    causal attention keeps its queries whole.
    """

    specs: dict[str, OpShardingRule]
    dims: dict[Value, tuple[tuple[Atom, ...], ...]]
    factors: dict[str, dict[str, tuple[Atom, ...]]]
    searched: frozenset[str]
    gradient: frozenset[Value]
    batch: Atom | None = None
    probed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    weights: frozenset[Value] = frozenset()
    reduce_dtype: torch.dtype | None = None
    replicated_parameters: bool = False
    replicated_outputs: bool = False
    strided_from: int | None = None
    unsplit_queries: bool = False
    # Whether a node carries a gradient, as ir/graph.py found: every search asks for all nodes.
    carrying: dict[str, bool] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Counting:
    """How much of a step a search counts; a program is counted in full until a search says else.

    `share`: of the seconds of weights' collectives, as these can hide under computation. `sums`: of
    the bytes of weights' gradients, `gathers`: of the bytes of gathered weights, as micro-batches
    sum and gather them once; `microbatches`: how many of these a step has. `again`: weights that
    are assumed to be gathered again in the backward, in the search for a plan that saves little.
    """

    share: float = 1.0
    sums: float = 1.0
    gathers: float = 1.0
    microbatches: int = 1
    again: frozenset[Value] = frozenset()


IN_FULL = Counting()


@dataclass(frozen=True)
class Chain:
    """A subgraph whose layout is chosen together: the matmuls (`products`) under one module and the
    nodes between them.
    """

    name: str
    nodes: tuple[str, ...]
    products: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A traced model between two passes. Passes are `(Program) -> Program` and never change their
    argument.
    """

    module: fx.GraphModule
    signature: Signature
    tensors: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # of each parameter, buffer and constant, by target
    annotations: Annotations | None = None
    chains: tuple[Chain, ...] = ()
    plan: Plan | None = None
    layouts: dict[str, Layout] = field(
        default_factory=dict
    )  # after the rewrite: those of its placeholders and outputs
    dtypes: dict[str, torch.dtype] = field(
        default_factory=dict
    )  # after the rewrite: those of its placeholders
    padding: dict[Value, tuple[Pad, ...]] = field(
        default_factory=dict
    )  # of the values that passes/pad.py has padded
    counting: Counting = IN_FULL

    def element(self, value: Value, own_bytes: int) -> Element:
        """Return the `Element` of a value whose elements have `own_bytes` bytes each."""
        notes, again = self.annotations, value in self.counting.again
        assert notes is not None
        if value not in notes.gradient:
            return Element(own_bytes, 0, again=again)
        if value not in notes.weights:
            return Element(own_bytes, own_bytes, again=again)
        wide = 0 if notes.reduce_dtype is None else notes.reduce_dtype.itemsize
        summed_bytes = max(own_bytes, wide) * self.counting.sums
        counting = self.counting
        return Element(own_bytes, summed_bytes, counting.share, again, counting.gathers)

    def pads(self, placeholder: str) -> tuple[Pad, ...]:
        """Return the padding of an input of the graph, which the model and the user have without
        it.
        """
        return self.padding.get((placeholder, 0), ())


def same_inputs(program: Program) -> None:
    """Assert what holds after every pass that makes a graph: it passes fx's lint, and its
    placeholders are those of the signature.
    """
    program.module.graph.lint()
    names = [node.name for node in program.module.graph.nodes if node.op == "placeholder"]
    assert names == [entry.node for entry in program.signature.inputs], (
        "placeholders and signature differ"
    )


def returned_names(graph: fx.Graph) -> list[str]:
    """Return the names of the nodes that a graph returns, in their order."""
    results: Any = graph.output_node().args[0]
    return [node.name for node in results]


def renamed_outputs(outputs: Iterable[Output], graph: fx.Graph) -> tuple[Output, ...]:
    """Return the outputs of a signature with the names that their nodes have in this graph."""
    names = iter(returned_names(graph))
    return tuple(o if o.node is None else replace(o, node=next(names)) for o in outputs)


def same_outputs(program: Program) -> None:
    """Assert that the graph returns the nodes that the signature names, in their order: what reads
    one (the rewrite) and what reads the other (an interpreter) must agree.
    """
    names = [output.node for output in program.signature.outputs if output.node is not None]
    assert returned_names(program.module.graph) == names, "outputs and signature differ"


def check_choices(program: Program) -> None:
    """Assert what holds once a plan is chosen: every searched node has a choice whose layouts have
    the shapes of its tensors and lie on the plan's mesh, and every parameter a stored layout.
    """
    assert program.plan is not None and program.annotations is not None
    for name in program.annotations.searched & program.annotations.specs.keys():
        assert name in program.plan.choices, f"choose left {name} without a layout"
    for entry in program.signature.inputs:
        if entry.kind == "parameter":
            assert entry.node in program.plan.stored, (
                f"choose left parameter {entry.target} without a stored layout"
            )
    nodes = {node.name: node for node in program.module.graph.nodes}
    for name, choice in program.plan.choices.items():
        for layout, shape in zip(choice.results, _shapes(nodes[name]), strict=True):
            assert layout.shape == shape and layout.mesh == program.plan.mesh, (
                f"{name} of shape {shape} is to lie as ({layout}) of {layout.shape} on mesh "
                f"{layout.mesh}, the plan's is {program.plan.mesh}"
            )


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """Return the shapes of a node's tensor results."""
    return [shape_of(v) for v in results_of(node) if hasattr(v, "shape")]
