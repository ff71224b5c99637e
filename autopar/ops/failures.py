"""What a collective that fails says to the user: which one it was, and which ranks are missing."""

from __future__ import annotations

import linecache
import operator
import re
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from torch import fx
from torch.distributed import DistError

from autopar._compat import OpOverload, takes_a_list
from autopar.errors import RankError
from autopar.ir.graph import module_path
from autopar.ir.mesh import axes_of_group
from autopar.world.store import FAILED, Pulse, missing, positions, pulse

# What gloo and NCCL say of a peer that is gone, or that did not come in time.
_TRANSPORT = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed ?out|broken pipe|socket", re.IGNORECASE
)
_LATE = re.compile(r"time ?d? ?out", re.IGNORECASE)
_GENERATED = "<eval_with_key>"  # the file that fx says its code is in


def guarded(run: Callable[..., Any], phase: str) -> Callable[..., Any]:
    """The same function; what a collective within raises says which one it was, and who is gone.
    `phase`: "forward" or "backward", which the others are told of.
    """

    def call(*values: Any) -> Any:
        beating = pulse()
        if beating is not None:
            beating.where = f"in the {phase}"
        try:
            found = run(*values)
        except RuntimeError as error:
            explain(error)
        if beating is not None:
            beating.where = f"after the {phase}"
        return found

    return takes_a_list(call) if getattr(run, "_boxed_call", False) else call


def explain(error: RuntimeError, collective: str = "") -> NoReturn:
    """Raise a RankError in place of what the transport says of a collective; any other error as it
    is. `collective`: which one it was, where the caller knows.
    """
    beating = pulse() if _from_transport(error) else None
    if beating is None:
        raise error
    site = _site(error)
    where = " in ".join(part for part in (collective, site) if part) or "a collective"
    try:
        told = _who(beating, error)
    except RuntimeError:  # the store is gone
        told = "the store has gone with the rank that kept it (rank 0, unless torchrun did)"
    said = re.sub(r"^\[\S+\] |\. This is typically.*", "", str(error).strip().splitlines()[0])
    raise RankError(f"{where} failed in call {beating.calls}: {told} [{said}]") from error


def _from_transport(error: RuntimeError) -> bool:
    return isinstance(error, DistError) or (
        type(error) is RuntimeError and bool(_TRANSPORT.search(str(error)))
    )


def _who(beating: Pulse, error: RuntimeError) -> str:
    """Which ranks are to blame: who is gone, who ended, else who is ahead."""
    was, beating.where = beating.where, FAILED
    beating.say()
    gone = beating.silent()
    signs = beating.signs()
    own = signs[beating.rank]
    if own is not None:
        signs[beating.rank] = own._replace(where=was)
    where = positions(signs)
    if gone:
        return f"{missing(gone)}. The last that was heard: {where}"
    if len({sign.calls for sign in signs if sign is not None}) > 1:
        return f"the ranks have not made the same calls: {where}. Make every call on every rank"
    late = "a rank did not come in time" if _LATE.search(str(error)) else "a rank has left"
    return f"{late}, though all ranks have been heard of: {where}"


# -- where it was ----------------------------------------------------------------------------------
def _site(error: RuntimeError) -> str:
    """The node of a generated graph that was running, in words; "" outside of any."""
    for frame, line in _frames(error):
        graph = getattr(frame.f_locals.get("self"), "graph", None)
        if frame.f_code.co_filename.startswith(_GENERATED) and isinstance(graph, fx.Graph):
            name = re.match(r"\s*(\w+)", linecache.getline(frame.f_code.co_filename, line))
            for node in graph.nodes:
                if name and node.name == name[1]:
                    return _described(node)
    return ""


def _frames(error: RuntimeError) -> Iterator[tuple[FrameType, int]]:
    """Those that the error went through, the innermost first, then those that are running."""
    yield from reversed(list(traceback.walk_tb(error.__traceback__)))
    yield from traceback.walk_stack(None)


def _described(node: fx.Node) -> str:
    """
    Example: "all_reduce_3 (all_reduce over data) of blocks.1.mlp"
    """
    while _carries_on(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    groups = [arg for arg in node.args if isinstance(arg, str) and arg.startswith("autopar/")]
    kind = (
        node.target._schema.name.split("::")[1].rstrip("_")
        if isinstance(node.target, OpOverload)
        else ""
    )
    over = f" ({kind} over {axes_of_group(groups[0])})" if groups else ""
    near = [node, *node.all_input_nodes, *node.users]  # the rewrite put it in between
    path = next((path for other in near if (path := _path(other))), "")
    return f"{node.name}{over}" + (f" of {path}" if path else "")


def _kind(node: fx.Node) -> str:
    """
    Example: "all_reduce" of _c10d_functional.all_reduce_
    """
    name = node.target._schema.name if isinstance(node.target, OpOverload) else str(node.target)
    return name.split("::")[-1].rstrip("_")


def _path(node: fx.Node) -> str:
    """The module of a node; those that AOTAutograd derives carry what they come from along."""
    return str(node.meta.get("custom", {}).get("module", "")) or module_path(node)


def _carries_on(node: fx.Node) -> bool:
    """Whether a node is the wait for a collective, or one result of several."""
    return _kind(node) == "wait_tensor" or node.target is operator.getitem
