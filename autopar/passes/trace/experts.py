"""Records the experts of a transformers model as one op each, in the time of a trace.

A decorated experts module asks its config which function computes it. Within `one_op_of_experts`
that is `_layer`, which calls `autopar::experts` (ops/experts.py); the config is put back at the end.
Modules whose gate is no function of one row alone keep the implementation that they have.
planner/planner.py traces under this context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar._compat import without_modes
from autopar.ops.experts import BODIES, Body, experts_op

_NAME, _SETTING = "autopar", "_experts_implementation_internal"
_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def one_op_of_experts(model: nn.Module) -> Iterator[None]:
    """Let each experts module of a transformers model be one op, for the time of this context."""
    interface: Any = sys.modules.get("transformers.integrations.moe")
    modules = {m: _body_name(m) for m in model.modules() if _is_decorated(m)} if interface else {}
    configs = {id(m.config): cast(Any, m.config) for m, name in modules.items() if name}
    plain = {id(m.config) for m, name in modules.items() if not name}
    configs = {key: config for key, config in configs.items() if key not in plain}
    if not configs:
        yield
        return
    interface.ALL_EXPERTS_FUNCTIONS.register(_NAME, _layer)
    before = [(config, getattr(config, _SETTING, None)) for config in configs.values()]
    for config in configs.values():
        setattr(config, _SETTING, _NAME)
    try:
        yield
    finally:
        for config, setting in before:
            setattr(config, _SETTING, setting)


def _is_decorated(module: nn.Module) -> bool:
    """Whether transformers' `use_experts_implementation` decorates the module's class."""
    names = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    return hasattr(getattr(module, "config", None), _SETTING) and all(
        hasattr(module, name) for name in names
    )


def _layer(module: Any, tokens: Tensor, index: Tensor, scores: Tensor) -> Tensor:
    """Compute an experts module by the op; transformers calls it in place of its forward."""
    kind = "gate_up_proj" if module.has_gate else "up_proj"
    norm = module.post_expert_norm.weight if _norm(module) is not None else None
    biases = [
        getattr(module, f"{name}_bias") if module.has_bias else None for name in (kind, "down_proj")
    ]
    weights = getattr(module, kind), biases[0], module.down_proj, biases[1], norm
    name = _body_name(module)
    assert name is not None
    result: Tensor = experts_op(tokens, index, scores, *weights, name, module.down_proj.shape[0])
    return result


# -- bodies ----------------------------------------------------------------------------------------
def _body_name(module: Any) -> str | None:
    """Return the name of a module's body, which it enters in BODIES; None where it is none.

    The name is the same in every process: that of the class, with the numbers that the module and
    its activation hold.
    """
    if getattr(module, "has_post_expert_norm", False) and _norm(module) is None:
        return None
    shell = _without_tensors(module)
    name = _described(type(module), vars(shell), getattr(module, "act_fn", None))
    if name in BODIES:
        return name
    body = _body(module, shell)
    if body is not None:
        BODIES[name] = body
    return name if body is not None else None


def _described(kind: type, attributes: dict[str, Any], activation: Any) -> str:
    """Return the name of a body: its class, its plain attributes, and those of its activation."""
    plain = {k: v for k, v in sorted(attributes.items()) if type(v) in _PLAIN and k != "training"}
    own = getattr(activation, "__dict__", {})
    numbers = {k: v for k, v in sorted(own.items()) if type(v) in _PLAIN and k != "training"}
    functions = [getattr(v, "__qualname__", "") for _, v in sorted(own.items()) if callable(v)]
    act = getattr(activation, "__qualname__", type(activation).__qualname__)
    return f"{kind.__module__}.{kind.__qualname__} {plain} {act} {numbers} {functions}"


def _without_tensors(module: nn.Module) -> Any:
    """Return a stand-in of the module that has its attributes, but no parameter and no config."""
    shell: Any = object.__new__(type(module))
    shell.__dict__.update({k: v for k, v in vars(module).items() if k != "config"})
    shell.__dict__["_parameters"], shell.__dict__["_buffers"] = {}, {}
    return shell


def _norm(module: Any) -> nn.Module | None:
    """Return the norm of each expert's results, where there is one of a single weight."""
    norm = getattr(module, "post_expert_norm", None)
    has = getattr(module, "has_post_expert_norm", False) and norm is not None
    return norm if has and [name for name, _ in norm.named_parameters()] == ["weight"] else None


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
    inner = 4
    with without_modes(), torch.no_grad(), torch.device("cpu"):
        rows = torch.linspace(-9, 9, 3 * 2 * inner, dtype=torch.float64).view(3, -1)
        rows = rows if gated else rows[:, :inner].contiguous()
        try:
            results = gate(rows)
            per_row = results.shape == (3, inner) and torch.equal(gate(rows[1:2]), results[1:2])
            if not gated:
                half = rows[:, 2:]
            elif concatenated:
                half = rows.unflatten(1, (2, inner))[:, :, 2:].flatten(1)
            else:
                half = rows.unflatten(1, (inner, 2))[:, 2:].flatten(1)
            sliced = gate(half)
        except Exception:  # whatever a gate of the user's raises, the module stays as it is
            return False, False
    return per_row, sliced.shape == (3, 2) and torch.equal(sliced, results[:, 2:])
