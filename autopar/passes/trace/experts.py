"""Records the experts of a transformers model as one op each, in the time of a trace.

A decorated experts module asks its config which function computes it. Within `one_op_of_experts`
that is `_layer`, which calls `autopar::experts` (ops/experts.py); the config is then put back.
Modules whose gate is no function of one row alone keep the implementation that they have.
planner/planner.py traces under this context.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import without_modes
from autopar.errors import TraceError
from autopar.ops.experts import BODIES, Body, experts_op

_NAME, _SETTING = "autopar", "_experts_implementation_internal"
_PLAIN = (bool, int, float, str, type(None))
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_TENSORS = {*_WEIGHTS, *(f"{name}_bias" for name in _WEIGHTS), "post_expert_norm.weight"}


@contextmanager
def one_op_of_experts(model: nn.Module) -> Iterator[None]:
    """Let each experts module of a transformers model be one op, for the time of this context."""
    interface: Any = sys.modules.get("transformers.integrations.moe")
    modules: list[Any] = [m for m in model.modules() if _is_decorated(m)] if interface else []
    names = {id(module): _enter_body(module) for module in modules}
    as_they_are = {id(m.config) for m in modules if names[id(m)] is None}
    configs = {id(m.config): m.config for m in modules if id(m.config) not in as_they_are}
    if not configs:
        yield
        return
    paths = {id(module): path for path, module in model.named_modules()}
    interface.ALL_EXPERTS_FUNCTIONS.register(_NAME, partial(_layer, names, paths))
    before = [(config, getattr(config, _SETTING)) for config in configs.values()]
    for config, _ in before:
        setattr(config, _SETTING, _NAME)
    try:
        yield
    finally:
        for config, setting in before:
            setattr(config, _SETTING, setting)


def _is_decorated(module: nn.Module) -> bool:
    """Whether transformers' `use_experts_implementation` decorates the module's class."""
    names = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
    return hasattr(getattr(module, "config", None), _SETTING) and all(
        hasattr(module, name) for name in names
    )


def _layer(
    names: dict[int, str | None],
    paths: dict[int, str],
    module: Any,
    tokens: Any = None,
    index: Any = None,
    scores: Any = None,
) -> Tensor:
    """Compute an experts module by the op; transformers calls it in place of its forward."""
    _refuse_choices(module, paths.get(id(module), ""), tokens, index, scores)
    kind = "gate_up_proj" if module.has_gate else "up_proj"
    up_bias, down_bias = (
        getattr(module, f"{name}_bias") if module.has_bias else None for name in (kind, "down_proj")
    )
    norm = _norm(module)
    weights = getattr(module, kind), up_bias, module.down_proj, down_bias
    of_norm = None if norm is None else norm.weight
    count, name = module.down_proj.shape[0], names[id(module)]
    assert name is not None, module
    result: Tensor = experts_op(tokens, index, scores, *weights, of_norm, name, count)
    return result


def _refuse_choices(module: Any, path: str, tokens: Any, index: Any, scores: Any) -> None:
    """Raise TraceError where a router did not give, for each token, the numbers of its experts and
    a score for each of these. `path`: of the module.
    """
    count = module.down_proj.shape[0]
    expected = (
        f"{type(module).__name__} {path or '(model)'} of {count} experts takes from its router, "
        "for each token, the whole numbers of its experts, and a score for each of these"
    )
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise TraceError(f"{expected}; its tokens (tokens, width) are {_in_words(tokens)}")
    rows = tokens.shape[0]
    for name, value, whole in (("numbers of experts", index, True), ("scores", scores, False)):
        is_right = isinstance(value, Tensor) and value.is_floating_point() is not whole
        if not is_right or value.dim() != 2 or value.shape[0] != rows:
            kind = "an integer" if whole else "a floating-point"
            raise TraceError(
                f"{expected}: its {name} are {_in_words(value)}, where {kind} tensor ({rows}, "
                f"experts of a token) is needed: have the router return topk's indices and values"
            )
    if index.shape != scores.shape or index.shape[1] > count:
        raise TraceError(
            f"{expected}, and got numbers {tuple(index.shape)} and scores {tuple(scores.shape)}: "
            f"both are ({rows}, experts of a token), at most {count} of them; take the scores of "
            "the chosen experts, as topk or gather gives them"
        )


def _in_words(value: Any) -> str:
    """Return what a value is, in words."""
    if not isinstance(value, Tensor):
        return "none" if value is None else f"of type {type(value).__name__}"
    return f"{value.dtype} of shape {tuple(value.shape)}"


# -- bodies ----------------------------------------------------------------------------------------
def _enter_body(module: Any) -> str | None:
    """Enter a module's body in BODIES and return its name; None where it is no body.

    The name is the same in every process: that of the class, and a digest of the numbers that the
    module and its activation hold. A body that differs from one of the same name gets another.
    """
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if not names <= _TENSORS or (module.has_post_expert_norm and _norm(module) is None):
        return None  # as an activation that is trained
    shell = _without_tensors(module)
    body = _body(module, shell)
    if body is None:
        return None
    inner = (getattr(shell, "act_fn", None), _norm(module))
    text = f"{type(module).__module__} {' '.join(map(_numbers, (shell, *inner)))}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = first = f"{type(module).__qualname__}-{digest}"
    copies = 1
    while name in BODIES and not _same_gate(BODIES[name], body):
        copies += 1
        name = f"{first}-{copies}"
    BODIES.setdefault(name, body)
    return name


def _same_gate(left: Body, right: Body) -> bool:
    """Whether the gates of two bodies give the same on a few numbers."""
    rows = _trial_rows(left.gated)
    with _on_numbers():
        return left.gated == right.gated and torch.equal(left.gate(rows), right.gate(rows))


def _numbers(holder: Any) -> str:
    """Return the kind of a module or function and the numbers that it holds, as text."""
    own = sorted(getattr(holder, "__dict__", {}).items())
    plain = {k: v for k, v in own if type(v) in _PLAIN and k[0] != "_" and k != "training"}
    return f"{getattr(holder, '__qualname__', type(holder).__qualname__)} {plain}"


def _without_tensors(module: nn.Module) -> Any:
    """Return a stand-in of the module that has its attributes, but no parameter and no config."""
    shell: Any = object.__new__(type(module))
    shell.__dict__.update({k: v for k, v in vars(module).items() if k != "config"})
    shell.__dict__["_parameters"], shell.__dict__["_buffers"] = {}, {}
    return shell


def _norm(module: Any) -> nn.Module | None:
    """Return the norm of each expert's results, where there is one of a single weight."""
    norm: nn.Module | None = getattr(module, "post_expert_norm", None)
    if norm is None or not module.has_post_expert_norm:
        return None
    return norm if [name for name, _ in norm.named_parameters()] == ["weight"] else None


def _body(module: Any, shell: Any) -> Body | None:
    """Return what one expert of a module computes; None where its gate needs more than one row."""
    gated, concatenated = bool(module.has_gate), bool(module.is_concatenated)
    kind = type(module)
    gate: Callable[[Tensor], Tensor] = (
        (lambda rows: kind._apply_gate(shell, rows)) if gated else (lambda rows: shell.act_fn(rows))
    )
    per_row, splits_inner = _gate_facts(gate, gated, concatenated)
    norm = _norm(module)
    return (
        Body(
            gate,
            gated,
            concatenated,
            bool(module.is_transposed),
            splits_inner,
            None if norm is None else _call_of_norm(norm),
        )
        if per_row
        else None
    )


def _call_of_norm(norm: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a norm as a function of rows and its weight."""
    shell = _without_tensors(norm)

    def call(rows: Tensor, weight: Tensor) -> Tensor:
        shell.__dict__["_parameters"] = {"weight": weight}
        try:
            result: Tensor = type(norm).forward(shell, rows)
        finally:
            shell.__dict__["_parameters"] = {}
        return result

    return call


def _gate_facts(
    gate: Callable[[Tensor], Tensor], gated: bool, concatenated: bool
) -> tuple[bool, bool]:
    """Return whether a gate maps each row by itself to the inner width, and whether it commutes
    with slicing that width; by trial on a few numbers.
    """
    rows, inner = _trial_rows(gated), _INNER
    with _on_numbers():
        try:
            results = gate(rows)
            per_row = results.shape == (len(rows), inner)
            per_row = per_row and _equal_but_for_rounding(gate(rows[1:2]), results[1:2])
            if not gated:
                half = rows[:, inner // 2 :]
            elif concatenated:
                half = rows.unflatten(1, (2, inner))[:, :, inner // 2 :].flatten(1)
            else:
                half = rows.unflatten(1, (inner, 2))[:, inner // 2 :].flatten(1)
            sliced = gate(half)
        except Exception:  # whatever a gate of the user's raises, the module stays as it is
            return False, False
    return per_row, _equal_but_for_rounding(sliced, results[:, inner // 2 :])


_INNER = 4  # the inner width that gates are tried with


def _trial_rows(gated: bool) -> Tensor:
    """Return a few rows of numbers for a gate: (3, two f), or (3, f)."""
    with _on_numbers():
        rows = torch.linspace(-9, 9, 3 * 2 * _INNER, dtype=torch.float64).view(3, -1)
        return rows if gated else rows[:, :_INNER].contiguous()


@contextmanager
def _on_numbers() -> Iterator[None]:
    """Compute with numbers on the CPU, whatever mode or default device is on."""
    with without_modes(), torch.no_grad(), torch.device("cpu"):
        yield


def _equal_but_for_rounding(left: Tensor, right: Tensor) -> bool:
    """Whether two results are equal but for rounding: kernels round the last of a row otherwise."""
    return left.shape == right.shape and torch.allclose(left, right, 1e-12, 1e-12)
