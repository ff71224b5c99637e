"""Graphs as people read them: a line a node, with its layout, and what a pass changed.

Example: listing(par.graph) has lines such as ">> all_gather_2 = all_gather(mul_1)   # x:S(1)", and
difference(before, after) those that a pass added and took away. A graph enters, text leaves;
`autopar.listing`, `par.listing` and `par.diff` are these functions.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.errors import PlanError
from autopar.ir.graph import (
    alike,
    block_name,
    called_graphs,
    chain_name,
    module_path,
    numbered_block,
)
from autopar.ir.layout import Layout

_HIDDEN_ARGUMENTS = ("mesh", "coordinate")
_WAIT = "wait_tensor"  # functional collectives are waited for by this op
Block = tuple[str, int]


def listing(
    module: fx.GraphModule, pattern: str = "", shapes: bool = False, fold: bool = False
) -> str:
    """Return the graph as text: `name = function(operands)   # layout`, with a headline wherever
    the subgraph changes. `module` is any fx graph, such as `par.graph`.

    >>> import torch
    >>> print(listing(fx.symbolic_trace(torch.nn.ReLU())))
    input input_1
       relu = relu(input_1, inplace=False)
    <BLANKLINE>
    return relu
    <BLANKLINE>

    `pattern`: only subgraphs and modules of this name, "blocks.0", and what lies below. `shapes`:
    each line has the dtype and the shape, of a rank's part and, where that differs, of the whole.
    `fold`: of blocks that are alike the first one is shown, and one line stands for ops that hang
    on no input, such as those of causal masks and rotary angles. `>>` in front marks communication.
    The mesh, which every line would repeat, is left out. Raises PlanError where `pattern` names
    nothing, AttributeError where `module` has no graph.

    In a scheduled graph `>>` marks where a collective is issued, with the bytes of its larger side,
    and `<<` where it is waited for.
    """
    lines = list(_lines(module, pattern, shapes, fold))
    if pattern and not lines:
        names = dict.fromkeys(subgraph_of(n) for n in module.graph.nodes if n.op == "call_function")
        raise PlanError(
            f"{pattern!r} names no subgraph of the graph; it has {', '.join([*names][:12])}"
        )
    return "\n".join(lines) + "\n"


def difference(before: fx.GraphModule, after: fx.GraphModule) -> str:
    """Return the lines that differ between two graphs of one model, "-" what was and "+" what is,
    below the subgraph that they belong to; "" where none does.
    """
    first, second = (list(_lines_with_headline(listing(module))) for module in (before, after))
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    lines: list[str] = []
    head = ""
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        changed = [("-", x) for x in first[start:end]] + [
            ("+", x) for x in second[other_start:other_end]
        ]
        for sign, (chain, line) in changed:
            if chain != head:
                head = chain
                lines.append(f"# {chain}")
            lines.append(f"{sign} {line}")
    return "\n".join(lines) + "\n" if lines else ""


def _lines_with_headline(text: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a listing, each with the headline that it stands below."""
    head = ""
    for line in text.splitlines():
        if line.startswith("# "):
            head = line[2:]
        elif line.strip():
            yield head, line


# -- lines -----------------------------------------------------------------------------------------
def _lines(module: fx.GraphModule, pattern: str, shapes: bool, fold: bool) -> Iterator[str]:
    """Yield the lines of a graph and its headlines."""
    for text, node in entries(module, pattern, fold):
        if node is None:
            yield f"\n{text}" if text.startswith("# ") else f"   {text}"
        elif called_graphs(module, node):
            yield from _block_lines(module, node, shapes)
        else:
            yield _node_line(node, shapes)


def entries(
    module: fx.GraphModule, pattern: str = "", fold: bool = False
) -> Iterator[tuple[str, fx.Node | None]]:
    """Yield what a listing shows, in order: ("", node), or (text, None) for a headline, such as
    "# blocks.0.mlp" and "# blocks.1-3 as blocks.0", and for a line that stands for other nodes.

    >>> [text or node.name for text, node in entries(fx.symbolic_trace(torch.nn.ReLU()))]
    ['input_1', 'relu', 'output']
    """
    hidden = _folded(module) if fold else {}
    fixed = _fixed(module) if fold else frozenset()
    chain: str | None = None
    for node in module.graph.nodes:
        if node.op == "get_attr" or (pattern and not is_named(node, pattern)):
            continue
        if node in fixed:
            if node is next(n for n in module.graph.nodes if n in fixed):
                yield f"({len(fixed)} ops that hang on no input: masks, positions)", None
            continue
        if node.op == "placeholder" and _is_hidden_parameter(node.name, hidden):
            continue
        block = numbered_block(subgraph_of(node)) if node.op == "call_function" else None
        if block is not None and block_name(block) in hidden:
            line = hidden[block_name(block)]
            if line and line != chain:
                chain = line
                yield f"# {line}", None
            continue
        is_call = node.op == "call_function" and not called_graphs(module, node)
        if is_call and node.meta.get("chain") not in (None, chain):
            chain = str(node.meta["chain"])
            yield f"# {chain}", None
        yield "", node


def _fixed(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the ops that hang on no input, if there are several."""
    fixed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "call_function" and fixed.issuperset(node.all_input_nodes):
            fixed.add(node)
    return frozenset(fixed) if len(fixed) > 1 else frozenset()


def _is_hidden_parameter(name: str, hidden: dict[str, str]) -> bool:
    """Whether a placeholder is a parameter or a buffer of a block that is not shown."""
    return any(name[1:].startswith(f"_{block.replace('.', '_')}_") for block in hidden)


def subgraph_of(node: fx.Node) -> str:
    """Return the subgraph that a node belongs to: "blocks.0.mlp"."""
    return str(node.meta.get("chain") or chain_name(node))


def is_named(node: fx.Node, pattern: str) -> bool:
    """Whether a pattern names a call, its subgraph or its module, or what these lie in."""
    if not node.op.startswith("call_"):
        return False
    names = [node.name, subgraph_of(node)]
    if "step" not in node.meta:  # a reshard stands with its consumer, not with what made its value
        names.append(module_path(node))
    return any(fnmatch.fnmatch(name, p) for name in names for p in (pattern, f"{pattern}.*"))


def _folded(module: fx.GraphModule) -> dict[str, str]:
    """Return the blocks that are like one before them, each with the line that stands for all of
    its run, at the first of them.
    """
    keys: dict[Block, list[Any]] = {}
    for node in module.graph.nodes:
        block = numbered_block(subgraph_of(node)) if node.op == "call_function" else None
        if block is not None:
            keys.setdefault(block, []).append((function_name(node.target), _note(node, True)))
    hidden: dict[str, str] = {}
    for run in alike({block: tuple(key) for block, key in keys.items()}):
        (path, first), last = run[0], run[-1][1]
        numbers = f"{first + 1}-{last}" if last > first + 1 else f"{last}"
        for block in run[1:]:
            hidden[block_name(block)] = f"{path}.{numbers} as {path}.{first}".lstrip(".")
    return hidden


def _block_lines(module: fx.GraphModule, node: fx.Node, shapes: bool) -> list[str]:
    """Return the lines of a call of a subgraph, which is computed or gathered again in the
    backward: its arguments, and its own lines indented.
    """
    (block,) = called_graphs(module, node)
    arguments = ", ".join(str(a) for a in node.args[2:])
    lines: Iterable[str] = _lines(block, "", shapes, False)
    inner = "\n".join(line for line in lines if not line.startswith("input "))
    indented = [f"    {line}" if line else "" for line in inner.split("\n")]
    return [f"\n   {node.name} = {function_name(node.target)}({arguments}):", *indented]


def _node_line(node: fx.Node, shapes: bool) -> str:
    """Return the line of one node."""
    if node.op == "placeholder":
        return f"input {node.name}" + (_note(node, shapes) if shapes else "")
    if node.op == "output":
        return f"\nreturn {_argument_text(node.args[0])}"
    arguments = [_argument_text(a) for a in node.args]
    arguments += [
        f"{k}={_argument_text(v)}"
        for k, v in node.kwargs.items()
        if k not in _HIDDEN_ARGUMENTS and v is not None
    ]
    waits = function_name(node.target) == _WAIT
    mark = "<< " if waits else ">> " if communicates(node) else "   "
    call = f"{function_name(node.target)}({', '.join(arguments)})"
    return f"{mark}{node.name} = {call}{_note(node, shapes)}"


def _note(node: fx.Node, shapes: bool) -> str:
    """Return what stands behind a node: its layout, with `shapes` its dtype and shapes, too."""
    layout, value = node.meta.get("layout"), node.meta.get("val")
    facts = []
    if shapes:
        dtype = value.dtype if isinstance(value, torch.Tensor) else node.meta.get("dtype")
        if dtype is not None:
            facts.append(str(dtype).removeprefix("torch."))
        if isinstance(layout, Layout):
            facts.append(part_text(layout.local_shape, layout.shape))
        elif isinstance(value, torch.Tensor):
            facts.append(size_text(tuple(value.shape)))
        if _issues(node):
            facts.append(f"{max(map(_bytes, (node, *node.all_input_nodes))):,} bytes")
    if layout is not None:
        facts.append(str(layout))
    return f"   # {' '.join(facts)}" if facts else ""


def communicates(node: fx.Node) -> bool:
    """Whether a node changes a layout, or starts a collective in a derived graph."""
    return "step" in node.meta or _issues(node)


def _issues(node: fx.Node) -> bool:
    """Whether a node of a derived graph starts a collective."""
    schema = getattr(node.target, "_schema", None)
    name = "" if schema is None else schema.name
    return (
        name.startswith("_c10d_functional::") and name.removeprefix("_c10d_functional::") != _WAIT
    )


def _bytes(node: fx.Node) -> int:
    """Return the bytes of a node's value, of all tensors where it has several."""
    values = node.meta.get("val")
    tensors = values if isinstance(values, list | tuple) else [values]
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def size_text(shape: Sequence[int]) -> str:
    """Return a shape as text: "4×8", "scalar"."""
    return "×".join(map(str, shape)) or "scalar"


def part_text(part: Sequence[int], unsharded: Sequence[int] | None) -> str:
    """Return the shape of a rank's part, with that of the whole where it differs: "4×4 of 4×16"."""
    more = (
        ""
        if unsharded is None or tuple(unsharded) == tuple(part)
        else f" of {size_text(unsharded)}"
    )
    return size_text(part) + more


def function_name(target: Any) -> str:
    """Return the name of a node's function, without the namespace of ATen."""
    if isinstance(target, OpOverload):
        return target._schema.name.removeprefix("aten::").removeprefix("_c10d_functional::")
    return getattr(target, "__name__", str(target))


def _argument_text(value: Any) -> str:
    """Return an argument as text."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_argument_text(v) for v in value) + "]"
    return str(value)
