"""docs/models.md, written from the rows of models.json, real_models.json and expert_rows.json
alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.zoo import expert_rows, real_rows
from benchmarks.zoo.catalog import FAMILY_OF
from benchmarks.zoo.rows import LAYOUTS, Row

# what a layout is refused for, where the model has nothing that it could split
REFUSALS = ("LayoutError", "PlanError")
PREFACE = """\
# Models

Written by `make zoo` from `benchmarks/zoo/models.json` alone; do not edit.
`make zoo ZOO="llama bert"` runs these models again.

Each model has two layers and random weights, and is made from its configuration as a user makes it,
but without what draws NumPy's numbers (`layerdrop`, `apply_spec_augment`). Four ranks run in one
process, in float64, as in `autopar.verify`: every node, the loss, every gradient and the parameters
after three steps of AdamW are compared with one device.

A layout's column has the largest relative error; `CPU` is the seconds of tracing, planning and
proving. A column `no rule`, where there is one, lists ops that every rank runs whole, with their
share of the modelled step.
"""

REAL_RANKS, MOST_TIMES_DENSE = (8, 64), 2
REAL = """\
## Real sizes

Written by `python -m benchmarks.zoo --real` (after `pip install -e '.[zoo]'`) from
`benchmarks/zoo/real_models.json`; `--again` runs rows anew. With `--ranks 64`, those of
`real_models_64.json`.

Models of papers on the meta device, in float32 (GPT-2 XL, Llama-3, Mistral and Gemma-2 in
bfloat16): four samples on each H100 (`dgx-h100`), AdamW. `step` and `peak` are the modelled step
and a rank's memory, divided by those of one rank that holds all; `CPU` is the seconds of planning
`auto`. In brackets stands which share of the FLOPs in products, convolutions and attention several
ranks run whole, if it is 0.1 % or more (`*`: to split them would take longer), and then the ops
without a rule.
"""

EXPERTS = """\
## Mixtures of experts at real sizes

Written by `python -m benchmarks.zoo --experts` from `benchmarks/zoo/expert_rows.json`; `--again`
runs rows anew.

Models of papers on the meta device, in bfloat16, under "auto" on H100 (`dgx-h100`): four sequences
of 4,096 tokens a rank, AdamW. `experts` says what each mesh axis splits of a layer of experts: its
tokens t, its experts e, their inner width f. `whole` is the share of the FLOPs of experts, and of
all, that several ranks run whole; `MFU` is the share of the peak that goes into the model's own
products. `CPU` is the seconds of tracing and planning, `CPU dense` those of a Mistral of as many
layers, ranks and tokens. `2 of 32` layers: the figures are those of a model of the first two.
"""


def at_parity(row: Row) -> bool:
    """Whether auto is proven, and every other layout is proven or does not apply."""
    layouts = row["layouts"]
    proven = [name for name in LAYOUTS if "error" in layouts.get(name, {})]
    refused = [
        name for name in LAYOUTS[1:] if layouts.get(name, {}).get("reason", "").startswith(REFUSALS)
    ]
    return "auto" in proven and len(proven) + len(refused) == len(LAYOUTS)


def verdict(row: Row) -> str:
    """Return one line about a row."""
    cells = [f"{name} {entry.get('error', entry.get('reason'))}" for name, entry in
             row["layouts"].items()]  # fmt: skip
    return f"{'parity' if at_parity(row) else 'FAILS'}, {row.get('cpu_s')} s: {'; '.join(cells)}"


def write(
    results: dict[str, Any],
    real: Mapping[int, dict[str, Row]],
    experts: dict[str, Row],
    path: Path,
) -> None:
    """Write the page: what is at parity, a table a family, and the models at real sizes."""
    lines = page_lines(results, real, experts)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def page_lines(
    results: dict[str, Any], real: Mapping[int, dict[str, Row]], experts: dict[str, Row]
) -> list[str]:
    """Return the lines of the page. `real`: by the number of ranks."""
    rows, versions = results["rows"], results["versions"]
    proven = sum(at_parity(row) for row in rows.values())
    text = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines = [PREFACE, f"**{proven} of {len(rows)} models are at parity** ({text})."]
    for family, names in groupby(rows, key=lambda name: FAMILY_OF[name]):
        lines += ["", f"## {family.capitalize()}", "", *table_lines({n: rows[n] for n in names})]
    tables = [line for ranks, rows in real.items() if rows for line in real_lines(rows, ranks)]
    return [*lines, "", REAL.rstrip("\n"), *tables, *expert_lines(experts)]


def real_lines(rows: dict[str, Row], ranks: int) -> list[str]:
    """Return the table of the models at real sizes on so many ranks: two columns a layout."""
    layouts = [name for name in real_rows.LAYOUTS if any(name in row for row in rows.values())]
    columns = [f"{layout} {what}" for layout in layouts for what in ("step", "peak")]
    headings = ("model", "parameters", "one rank", *columns, "CPU")
    reasons: list[str] = []
    lines = [f"### On {ranks} ranks", "", "| " + " | ".join(headings) + " |"]
    lines.append("|" + "---|" * len(headings))
    for name, row in rows.items():
        alone = row.get(real_rows.ALONE, {})
        numbers = f"{row['parameters'] / 1e6:,.1f} M" if "parameters" in row else ""
        cells = [name, numbers, _alone(alone)]
        for layout in layouts:
            cells += _real_cells(row.get(layout, row), alone, reasons)
        cells.append(_cpu(row.get("auto", {}), reasons))
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"{i}. {text}" for i, text in enumerate(reasons, 1)]
    return ["", *lines, *(["", *notes] if notes else [])]


def expert_lines(rows: dict[str, Row]) -> list[str]:
    """Return the section of mixtures of experts at real sizes; none where none was planned."""
    if not rows:
        return []
    headings = (
        "model", "parameters", "ranks", "layers", "mesh", "experts", "step", "MFU", "peak",
        "whole", "CPU", "CPU dense",
    )  # fmt: skip
    reasons: list[str] = []
    cases = {name: expert_rows.CASES[name] for name in rows}
    lines = [EXPERTS, "| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for name, row in rows.items():
        own = _expert_cells(row, cases[name], reasons)
        cells = [name, *own, _cpu(row.get("dense", {}), reasons)]
        lines.append("| " + " | ".join(cells) + " |")
    left = [name for name in expert_rows.CASES if name not in rows]
    below = (
        [f"{i}. {text}" for i, text in enumerate(reasons, 1)],
        [f"Not planned yet: {', '.join(left)}."] if left else [],
        [
            f"- {name}: a step in {case.microbatches} micro-batches, as a single one does not fit."
            for name, case in cases.items()
            if case.microbatches > 1
        ],
        [
            f"- {name}: planning takes {times_dense(row):.1f} times what the dense model takes."
            for name, row in rows.items()
            if times_dense(row) > MOST_TIMES_DENSE
        ],
        [f"- {name}: {case.published}." for name, case in cases.items() if case.published],
    )
    return ["", *lines, *(line for block in below if block for line in ("", *block))]


def times_dense(row: Row) -> float:
    """Return how many times as long planning takes as for the dense model; nan where that is not
    known.
    """
    return float(row.get("plan_s", math.nan)) / float(row.get("dense", {}).get("plan_s", math.nan))


def _expert_cells(row: Row, case: expert_rows.Case, reasons: list[str]) -> list[str]:
    whole = case.options["num_hidden_layers"]
    layers = f"{row['layers']}" if row["layers"] == whole else f"{row['layers']} of {whole}"
    sizes = [str(row["ranks"]), layers]
    if "seconds" not in row:
        return ["", *sizes, _reference(row["reason"], reasons), *[""] * 6]
    return [
        f"{row['parameters'] / 1e9:,.1f} B",
        *sizes,
        row["mesh"],
        row["experts"],
        f"{row['seconds'] * 1e3:,.0f} ms",
        f"{row['utilization']:.0%}",
        f"{row['peak_bytes'] / 1e9:,.1f} GB",
        f"{row['whole_experts']:.1%}, {row['whole']:.1%}",
        _cpu(row, reasons),
    ]


def _cpu(row: Row, reasons: list[str]) -> str:
    if "plan_s" in row:
        return f"{row['plan_s']:.0f}"
    return _reference(row["reason"], reasons) if "reason" in row else ""


def _alone(entry: Row) -> str:
    if "seconds" not in entry:
        return ""
    return f"{entry['seconds'] * 1e3:,.0f} ms, {entry['peak_bytes'] / 1e9:,.1f} GB"


def _real_cells(entry: Row, alone: Row, reasons: list[str]) -> list[str]:
    """Return the two cells of a plan; where there is none, the number of the reason."""
    if "seconds" not in entry:
        return [_reference(entry["reason"], reasons) if "reason" in entry else "", ""]
    step, peak = (
        _ratio(entry[key] / alone[key]) if key in alone else "" for key in ("seconds", "peak_bytes")
    )
    whole = [f"{entry['whole']:.1%}" + "*" * entry["cheapest"]] if entry["whole"] > 5e-4 else []
    unsplit = whole + [f"`{op_name(op)}`" for op in entry["no_rule"]]
    return [step + f" ({', '.join(unsplit)})" * bool(unsplit), peak]


def _ratio(ratio: float) -> str:
    """Return two digits behind the point, three of what is small."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}"


def table_lines(rows: dict[str, Row]) -> list[str]:
    """Return the table of some rows, and the reasons below it."""
    unsplit = any(row.get("without_rule") for row in rows.values())
    headings = ("model", *LAYOUTS, "CPU", *(["no rule"] if unsplit else []))
    reasons: list[str] = []
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for name, row in rows.items():
        cells = [name, *(cell(row, layout, reasons) for layout in LAYOUTS)]
        costs = (f"`{op_name(op)}` {p:.2%}" for op, p in row.get("without_rule", {}).items())
        cells += [str(row.get("cpu_s", "")), *([", ".join(costs)] if unsplit else [])]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", *(f"{i}. {text}" for i, text in enumerate(reasons, 1))]


def op_name(op: str) -> str:
    """Return the name of an op without its overload, and that of a function without its digest.

    >>> op_name("aten.index.Tensor"), op_name("autopar_functions.Gelu_dc2963d2.default")
    ('index', 'Gelu')
    """
    return re.sub(r"_[0-9a-f]{8}$", "", op.split(".")[1])


def cell(row: Row, layout: str, reasons: list[str]) -> str:
    """Return the error in a layout, or the number of its reason, which joins `reasons`."""
    entry = row["layouts"].get(layout)
    if entry is None:
        return ""
    if "error" in entry:
        return f"{entry['error']:.0e}"
    return _reference(entry["reason"], reasons)


def _reference(reason: str, reasons: list[str]) -> str:
    """Return the number of a reason in brackets; the reason joins `reasons` without its remedy."""
    line = " ".join(reason.replace("|", "\\|").replace("<", "&lt;").split())
    text = re.split(r"; use | Check that | Try | File | in \d+ of \d+ products:", line)[0]
    if text not in reasons:
        reasons.append(text)
    return f"[{reasons.index(text) + 1}]"
