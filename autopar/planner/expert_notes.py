"""What a plan takes for granted of a router, in a sentence: how many tokens an expert gets.

Example: "8 experts are split over expert of 8 ranks: priced for 8,192 tokens an expert (k·T/E), and
1.2 times as many on the busiest rank". planner.py adds it to the notes of a plan.
"""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program


def expert_notes(program: Program, plan: Plan) -> tuple[str, ...]:
    """Return a sentence for each size of layers whose experts a plan splits, without repeats."""
    assert program.annotations is not None
    notes: dict[str, None] = {}
    for name, choice in plan.choices.items():
        rule = program.annotations.specs.get(name)
        if rule is None or not rule.uneven:
            continue
        axes = [
            f"{axis.name} of {axis.size}"
            for axis, split in zip(plan.mesh.axes, choice.splits, strict=True)
            if split in rule.uneven
        ]
        if axes:
            sizes = rule.sizes
            tokens = sizes["k"] * sizes["t"] / sizes["e"]
            notes[
                f"{sizes['e']} experts are split over {' and '.join(axes)} ranks: priced for "
                f"{tokens:,.0f} tokens an expert (k·T/E of {sizes['k']}·{sizes['t']:,}/"
                f"{sizes['e']}), and {rule.skew:g} times as many on the busiest rank; no token is "
                "dropped, whatever the router does"
            ] = None
    return tuple(notes)
