"""What one device says of its own step, for `verify`: its numbers, how exact they can be, and which
of them mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autopar import rounding
from autopar.errors import VerificationError
from autopar.ir.graph import where
from autopar.ir.program import Program, Value
from autopar.ops.recomputation import Visit, unchanged
from autopar.unwritten import differing, filled, poison, tame, unwritten
from autopar.widened import is_inexact

Name = Value | str  # a value of the graph; an output or a gradient, in words
Observed = dict[Name, Tensor]
Observe = Callable[[Program, Visit], Observed]  # one step of a program, node by node


@dataclass(frozen=True)
class Known:
    """`floors`: what an error is held against at least, see rounding.py. `undefined`: where a value
    hangs on memory that was never written, as flags.
    """

    values: Observed
    floors: dict[Name, float]
    undefined: dict[Name, Tensor]

    def floor(self, name: Name) -> float:
        return max(self.floors.get(name, 0.0), 1e-300)


def known(reference: Program, observe: Observe) -> Known:
    """Raises VerificationError where an output or a gradient hangs on memory that nobody wrote."""
    decided: dict[fx.Node, Tensor] = {}

    def decide(node: fx.Node, result: Any) -> Any:
        if isinstance(result, Tensor) and not is_inexact(result):
            decided[node] = result
        return result

    plain = filled(reference, tame)
    values = observe(plain, decide)

    def sample(number: int) -> Observed:
        with rounding.shaken_backward(number):
            return observe(plain, rounding.shaken(decided, number))

    samples = (sample(number) for number in range(rounding.SAMPLES))
    return Known(values, rounding.floors(values, samples), _undefined(reference, values, observe))


def _undefined(reference: Program, values: Observed, observe: Observe) -> dict[Name, Tensor]:
    nodes = unwritten(reference)
    found = _differing(values, observe(filled(reference, poison), unchanged)) if nodes else {}
    if any(isinstance(name, str) for name in found):
        _refuse(reference, nodes, values, observe)
    return found


def _refuse(reference: Program, nodes: list[fx.Node], values: Observed, observe: Observe) -> None:
    for node in nodes:
        others = observe(filled(reference, poison, only=node.name), unchanged)
        for name in _differing(values, others):
            if isinstance(name, str):
                raise VerificationError(
                    f"the {name} hangs on memory that is never written, so on one device, too, it "
                    f"is another number at each call: {node.target} at {where(node)}. Fill that "
                    "memory, as torch.zeros does"
                )


def _differing(values: Observed, others: Observed) -> dict[Name, Tensor]:
    found = {name: differing(value, others.get(name)) for name, value in values.items()}
    return {name: differ for name, differ in found.items() if differ is not None}
