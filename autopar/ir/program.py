"""The program that the passes hand on: a graph, what its inputs and outputs are, and what was
decided about it.

The autocast that a model was traced under: its casts are nodes of the graph, so a plan is for
that autocast and no other, and the graph runs without one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from autopar._compat import pytree
from autopar.ir.layout import Element, Layout
from autopar.ir.plan import Plan
from autopar.ir.sharding_rule import OpShardingRule

Autocast = tuple[tuple[str, torch.dtype], ...]  # device types with the dtype that is cast to


def under_autocast(device_types: Iterable[str]) -> Autocast:
    """What autocast is on, for these types of devices.

    >>> with torch.autocast("cpu", torch.bfloat16): around(["cpu"])
    (('cpu', torch.bfloat16),)
    """
    kinds = sorted(set(device_types) - {"meta"})
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in enabled)


def autocast_text(found: Autocast) -> str:
    return " and ".join(f"torch.autocast({k!r}, {dtype})" for k, dtype in found) or "no autocast"


@contextmanager
def without_autocast(found: Autocast) -> Iterator[None]:
    """Autocast is off for those device types."""
    with ExitStack() as stack:
        for kind, _ in found:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@dataclass(frozen=True)
class Input:
    """One placeholder of the graph, in order.

    `kind` says what feeds it: a parameter, a buffer, a tensor constant that export lifted out of
    the code, a tensor that the user passes, or, inserted by the rewrite, the coordinate of a rank
    on a mesh axis or the seed of random numbers ("seed" that of all ranks, "@x.z" one
    that knows a rank's place on these axes). `target` is the qualified name of the parameter or
    buffer (the first of `names`, all the names under which the model holds that same tensor), the
    path of the user's input ("args[0]", "kwargs['labels']"), or the axis name. `position` is the
    index of a user's tensor in the flattened (args, kwargs). `trainable`: it requires a gradient,
    be it a parameter's or the user's.
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
        """Whether it is there before a step begins."""
        return self.kind not in ("user", "seed")


@dataclass(frozen=True)
class Output:
    """One value that the graph returns, in order: the new value of a mutated buffer (`target`: its
    name), or a user's leaf.
    """

    kind: Literal["mutation", "user"]
    node: str | None  # None: `constant` is returned as it is
    target: str = ""
    constant: Any = None


@dataclass(frozen=True)
class Signature:
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_spec: pytree.TreeSpec  # of (args, kwargs)
    out_spec: pytree.TreeSpec
    fixed: tuple[
        tuple[int, Any], ...
    ] = ()  # (position, value) of the inputs that are no tensors: part of the trace
    training: bool = True  # the model's mode, which is part of the trace too
    forward: inspect.Signature | None = None  # of the model, as calls name their arguments
    autocast: Autocast = ()  # around the call that was traced: its casts are in the graph


Value = tuple[str, int]  # a tensor of the graph: (node, index of the result)


@dataclass(frozen=True)
class Atom:
    """A stretch of a dim that no op of the graph cuts further: axes take their digits inside one
    atom.

    All dims that the graph ties together share the atom, whatever ops lie between. `opaque`: views
    disagree about where to cut it, so no axis may split it.
    """

    number: int
    size: int
    opaque: bool = False


@dataclass(frozen=True)
class Annotations:
    """What is known of every node before a layout is chosen.

    `dims` gives the atoms of every dim of every value, outer first; `factors` those of every factor
    of every node. `searched` are the nodes whose values hang on parameters or carry a gradient:
    their layouts are chosen. All others (masks, positions, token ids) are made in whatever layout
    their consumers want. `gradient` are the values that carry a gradient, `weights` those of them
    that hang on parameters alone; where ranks add up the gradient of one of these, they do so in
    `reduce_dtype`, if that is wider than its own. `share`: what part of the seconds of their
    collectives a search is to count, for these can hide under computation. `again`: weights that
    are taken to be gathered again in the backward (in the search for a plan that keeps little).
    `whole`: every rank stores all parameters whole and returns everything whole.
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
    share: float = 1.0
    again: frozenset[Value] = frozenset()
    whole: bool = False

    def element(self, value: Value, own_bytes: int) -> Element:
        """Of a value of `own_bytes` an element."""
        again = value in self.again
        if value not in self.gradient:
            return Element(own_bytes, 0, again=again)
        if value not in self.weights:
            return Element(own_bytes, own_bytes, again=again)
        wide = 0 if self.reduce_dtype is None else self.reduce_dtype.itemsize
        return Element(own_bytes, max(own_bytes, wide), self.share, again)


@dataclass(frozen=True)
class Chain:
    """A subgraph that chooses its layout together: the matrix products under one module and what
    hangs between them.
    """

    name: str
    nodes: tuple[str, ...]
    products: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A traced model between two passes. Passes are `(Program) -> Program` and never change the one
    they are given.
    """

    module: fx.GraphModule
    signature: Signature
    tensors: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # value of each parameter, buffer, constant by target
    annotations: Annotations | None = None
    chains: tuple[Chain, ...] = ()
    plan: Plan | None = None
    layouts: dict[str, Layout] = field(
        default_factory=dict
    )  # after the rewrite: of its placeholders and outputs
    dtypes: dict[str, torch.dtype] = field(
        default_factory=dict
    )  # after the rewrite: of its placeholders


def same_inputs(program: Program) -> None:
    """The contract of every pass that makes a graph: it is sound, and its placeholders are those of
    the signature.
    """
    program.module.graph.lint()
    names = [node.name for node in program.module.graph.nodes if node.op == "placeholder"]
    assert names == [entry.node for entry in program.signature.inputs], (
        "placeholders and signature differ"
    )
