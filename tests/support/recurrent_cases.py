"""Calls of recurrent layers, for rule_cases.py: layers, directions, projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shards import Case, call, real

aten = torch.ops.aten

SAMPLES, STEPS, FEATURES, HIDDEN = 12, 3, 4, 2
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def layer(
    kind: str,
    layers: int = 1,
    *,
    biases: bool = True,
    bidirectional: bool = False,
    samples_first: bool = False,
    projected: int = 0,
) -> tuple[Any, ...]:
    """The arguments of aten's op for a layer of this kind."""
    directions, gates = 1 + bidirectional, _GATES[kind] * HIDDEN
    out = projected or HIDDEN

    def states(width: int) -> Tensor:
        return real(layers * directions, SAMPLES, width)

    weights = []
    for depth in range(layers):
        for _ in range(directions):
            width = out * directions if depth else FEATURES
            weights += [real(gates, width), real(gates, out)]
            weights += [real(gates), real(gates)] if biases else []
            weights += [real(projected, HIDDEN)] if projected else []
    sizes = (SAMPLES, STEPS) if samples_first else (STEPS, SAMPLES)
    x = real(*sizes, FEATURES)
    hx: Any = [states(out), states(HIDDEN)] if kind == "lstm" else states(HIDDEN)
    return x, hx, weights, biases, layers, 0.0, False, bidirectional, samples_first


RECURRENT: list[Case] = [
    call(aten.lstm.input, *layer("lstm", samples_first=True)),
    call(aten.lstm.input, *layer("lstm", 2, bidirectional=True), note="two layers both ways"),
    call(aten.lstm.input, *layer("lstm", projected=1, biases=False), note="projected"),
    call(aten.gru.input, *layer("gru", samples_first=True)),
    call(aten.gru.input, *layer("gru", 2), note="two layers"),
    call(aten.rnn_tanh.input, *layer("rnn_tanh")),
    call(aten.rnn_relu.input, *layer("rnn_relu", bidirectional=True)),
]
