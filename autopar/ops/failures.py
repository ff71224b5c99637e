"""Errors of failed collectives: which collective it was, and which ranks are missing.

Example: gloo's "Connection closed by peer" becomes a RankError that names the collective, the
module of the model and the rank that is gone. comm.py calls `explain` when it waits for a
collective; runtime/backends.py wraps the forward and the backward in `guarded`.
"""

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

# Words in the errors of gloo and NCCL for a peer that is gone, or that did not come in time.
_TRANSPORT_ERROR = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed ?out|broken pipe|socket", re.IGNORECASE
)
_TIMED_OUT = re.compile(r"time ?d? ?out", re.IGNORECASE)
_GENERATED = "<eval_with_key>"  # the file name that fx gives to generated code


def guarded(run: Callable[..., Any], phase: str) -> Callable[..., Any]:
    """Return the same function with failures of its collectives explained by `explain`.

    `phase` is "forward" or "backward"; the other ranks see in which one this rank is.
    """

    def call(*values: Any) -> Any:
        heartbeat = pulse()
        if heartbeat is not None:
            heartbeat.where = f"in the {phase}"
        try:
            result = run(*values)
        except RuntimeError as error:
            explain(error)
        if heartbeat is not None:
            heartbeat.where = f"after the {phase}"
        return result

    return takes_a_list(call) if getattr(run, "_boxed_call", False) else call


def explain(error: RuntimeError, collective: str = "") -> NoReturn:
    """Raise a RankError for an error that gloo or NCCL raised in a collective; raise any other
    error as it is.

    `collective` names the collective, where the caller knows it.
    """
    heartbeat = pulse() if _from_transport(error) else None
    if heartbeat is None:
        raise error
    site = _failing_node(error)
    where = " in ".join(part for part in (collective, site) if part) or "a collective"
    try:
        ranks_at_fault = _blame(heartbeat, error)
    except RuntimeError:  # the store is gone
        ranks_at_fault = (
            "the store has gone with the rank that kept it (rank 0, unless torchrun did)"
        )
    message = re.sub(r"^\[\S+\] |\. This is typically.*", "", str(error).strip().splitlines()[0])
    raise RankError(
        f"{where} failed in call {heartbeat.calls}: {ranks_at_fault} [{message}]"
    ) from error


def _from_transport(error: RuntimeError) -> bool:
    """Whether an error comes from gloo or NCCL."""
    return isinstance(error, DistError) or (
        type(error) is RuntimeError and bool(_TRANSPORT_ERROR.search(str(error)))
    )


def _blame(beating: Pulse, error: RuntimeError) -> str:
    """Return which ranks are to blame: those that are gone or have ended, else those that are
    ahead.
    """
    previous, beating.where = beating.where, FAILED
    beating.say()
    silent_ranks = beating.silent()
    signs = beating.signs()
    own_sign = signs[beating.rank]
    if own_sign is not None:
        signs[beating.rank] = own_sign._replace(where=previous)
    where = positions(signs)
    if silent_ranks:
        return f"{missing(silent_ranks)}. The last that was heard: {where}"
    if len({sign.calls for sign in signs if sign is not None}) > 1:
        return f"the ranks have not made the same calls: {where}. Make every call on every rank"
    late = "a rank did not come in time" if _TIMED_OUT.search(str(error)) else "a rank has left"
    return f"{late}, though all ranks have been heard of: {where}"


# -- where it failed -------------------------------------------------------------------------------
def _failing_node(error: RuntimeError) -> str:
    """Return a description of the graph node that was running; "" outside of generated graphs."""
    for frame, line in _frames(error):
        graph = getattr(frame.f_locals.get("self"), "graph", None)
        if frame.f_code.co_filename.startswith(_GENERATED) and isinstance(graph, fx.Graph):
            name = re.match(r"\s*(\w+)", linecache.getline(frame.f_code.co_filename, line))
            for node in graph.nodes:
                if name and node.name == name[1]:
                    return _describe(node)
    return ""


def _frames(error: RuntimeError) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that the error went through, innermost first, then the running ones, with
    their lines.
    """
    yield from reversed(list(traceback.walk_tb(error.__traceback__)))
    yield from traceback.walk_stack(None)


def _describe(node: fx.Node) -> str:
    """Return a description of a node, such as "all_reduce_3 (all_reduce over data) of
    blocks.1.mlp".
    """
    while _passes_through(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    groups = [arg for arg in node.args if isinstance(arg, str) and arg.startswith("autopar/")]
    kind = (
        node.target._schema.name.split("::")[1].rstrip("_")
        if isinstance(node.target, OpOverload)
        else ""
    )
    over = f" ({kind} over {axes_of_group(groups[0])})" if groups else ""
    # The rewrite inserts collectives between nodes of the model, which have a path.
    near = [node, *node.all_input_nodes, *node.users]
    path = next((path for other in near if (path := _path(other))), "")
    return f"{node.name}{over}" + (f" of {path}" if path else "")


def _kind(node: fx.Node) -> str:
    """Return the kind of a node, such as "all_reduce" for _c10d_functional.all_reduce_."""
    name = node.target._schema.name if isinstance(node.target, OpOverload) else str(node.target)
    return name.split("::")[-1].rstrip("_")


def _path(node: fx.Node) -> str:
    """Return the module path of a node; nodes that AOTAutograd derives carry that of their
    source.
    """
    return str(node.meta.get("custom", {}).get("module", "")) or module_path(node)


def _passes_through(node: fx.Node) -> bool:
    """Whether a node waits for a collective, or takes one result of several."""
    return _kind(node) == "wait_tensor" or node.target is operator.getitem
