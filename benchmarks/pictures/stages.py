"""The stages of the compiler, from the model to the graphs that a rank runs: stages.svg.

The names of passes are those of `autopar.passes`, the stages of the planner its modules.
"""

from __future__ import annotations

from autopar.passes import OVERLAP, PIPELINE
from autopar.planner import bound, confirm, fit, simulate, solve, space
from benchmarks.pictures.style import svg, text

WIDTH, LEFT, BOX = 560, 10, 540
FUNNEL = {  # the stages of the planner, each with what leaves it
    space: "the meshes that are searched",
    bound: "seconds that no plan on a mesh is below",
    solve: "the best plan of each promising mesh",
    simulate: "the shortest step, with communication hidden",
    fit: "the fastest that fits the memory",
    confirm: "one plan, with its exact peak and step",
}
MORE = """
  .stage { fill: #1f6feb; opacity: 0.16 } .way { stroke: #8c959f; stroke-width: 1.6 }
  @media (prefers-color-scheme: dark) { .stage { fill: #4493f8; opacity: 0.25 } }
"""


def picture() -> str:
    """Return the SVG."""
    top = 8
    drawn = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#8c959f"/></marker>'
        "</defs>"
    ]
    boxes: list[tuple[str, tuple[str, ...]]] = [
        ("your model", ("written for one device, with sample inputs",)),
        ("trace", ("torch.export: one forward graph of ATen ops, without a process group",)),
        ("annotate", ("a sharding rule for each op, atoms for each dim of a tensor",)),
        ("plan", ()),
        ("rewrite", ("the graph of one rank, with a node for each change of a state",
                     *_names([step.name for step in PIPELINE]))),
        ("derive and overlap", ("AOTAutograd derives forward and backward; these passes order them",
                                *_names([step.name for step in OVERLAP]))),
        ("ranks", ("your module tree with DTensors for parameters, your loop, your optimizer",)),
    ]  # fmt: skip
    for name, lines in boxes:
        height = 32 + 20 * len(lines) if name != "plan" else 44 + 32 * len(FUNNEL)
        drawn.append(
            f'<rect x="{LEFT}" y="{top}" width="{BOX}" height="{height}" rx="6" class="box"/>'
        )
        drawn.append(text(LEFT + 14, top + 23, name, "title"))
        drawn += [text(LEFT + 14, top + 43 + 19 * i, line, "small") for i, line in enumerate(lines)]
        if name == "plan":
            drawn += _funnel(top + 36)
        top += height + 20
        if name != boxes[-1][0]:
            drawn.append(
                f'<path d="M{WIDTH / 2:g} {top - 19} V{top - 2}" class="way" '
                'marker-end="url(#tip)"/>'
            )
    return svg(WIDTH, top - 12, "the stages of the compiler", drawn, MORE)


def _funnel(top: float) -> list[str]:
    """Return the stages of the planner, each narrower than the one before."""
    drawn = []
    for number, (stage, words) in enumerate(FUNNEL.items()):
        y, inset = top + 32 * number, 12 + 14 * number
        left, right = LEFT + inset, LEFT + BOX - inset
        drawn.append(
            f'<path d="M{left} {y} H{right} L{right - 14} {y + 28} H{left + 14} z" class="stage"/>'
        )
        name = stage.__name__.rpartition(".")[2]
        drawn.append(text(WIDTH / 2, y + 19, f"{name}: {words}", "", "middle"))
    return drawn


def _names(names: list[str]) -> tuple[str, ...]:
    """Return the names in their order, five a line."""
    lines = [names[start : start + 5] for start in range(0, len(names), 5)]
    return tuple("→ " * bool(n) + " → ".join(line) for n, line in enumerate(lines))
