"""The page of an examination: one file of HTML that needs no network, to look at and to attach."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from autopar.ir.show import memory

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --ok: #2e8b57; --failed: #c62828;
  --absent: #a67c00; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left;
  vertical-align: top; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.name { white-space: nowrap; }
.status { border-radius: .6rem; color: white; padding: .05rem .55rem; white-space: nowrap; }
.ok { background: var(--ok); } .failed { background: var(--failed); }
.not-here, .under-way { background: var(--absent); }
pre { font-size: .8rem; margin: .3rem 0; max-height: 24rem; overflow: auto; white-space: pre-wrap; }
summary { cursor: pointer; opacity: .7; }
li { margin: .2rem 0; }
"""


def page(facts: Mapping[str, Any]) -> str:
    """The page of what `Examination.to_json` gives: what failed, every check, and the machine."""
    rows = "\n".join(map(_row, facts["checks"]))
    parts = (
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>autopar doctor</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>autopar doctor: {escape(verdict(facts))}</h1>",
        f"<p>{escape(_subject(facts))}</p>",
        "<table><thead><tr><th>check</th><th>result</th><th>figure</th><th>s</th></tr></thead>",
        f"<tbody>\n{rows}\n</tbody></table>",
        _machine(facts["machine"]),
        "</body></html>",
    )
    return "\n".join(parts) + "\n"


def verdict(facts: Mapping[str, Any]) -> str:
    """What it came to, in a few words."""
    counts = facts["counts"]
    if counts["failed"]:
        return f"{counts['failed']} of {len(facts['checks'])} checks failed"
    if counts["under way"]:
        return "it did not end"
    absent = f", {counts['not here']} are not for this machine" if counts["not here"] else ""
    return f"{counts['ok']} checks are well{absent}"


def _subject(facts: Mapping[str, Any]) -> str:
    versions = facts["machine"].get("versions", {})
    told = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    ranks = f"{facts['ranks']} rank{'s' if facts['ranks'] > 1 else ''}"
    return f"{ranks} ({facts['backend']}) on {facts['device']}, {facts['seconds']:.0f} s; {told}"


def _row(check: Mapping[str, Any]) -> str:
    status, figure = check["status"], escape(check["why"] or check["figure"])
    more = ""
    if check["facts"]:
        text = escape(json.dumps(check["facts"], indent=1, default=str))
        more = f"<details><summary>all of it</summary><pre>{text}</pre></details>"
    return (
        f'<tr><td class="name">{escape(check["name"])}</td>'
        f'<td><span class="status {status.replace(" ", "-")}">{status}</span></td>'
        f'<td>{figure}{more}</td><td class="number">{check["seconds"]:.1f}</td></tr>'
    )


def _machine(found: Mapping[str, Any]) -> str:
    """The devices, what will not work here, and everything else to unfold."""
    if not found:
        return ""
    devices = "".join(
        f"<li>{escape(str(one['name']))}, {memory(one['memory_bytes'])}</li>"
        for one in found["devices"]
    )
    warnings = "".join(f"<li>{escape(line)}</li>" for line in found["warnings"])
    text = escape(json.dumps(found, indent=1, default=str))
    return (
        f"<h2>Machine of rank 0</h2><ul>{devices}</ul>"
        + (f"<h2>What will not work here</h2><ul>{warnings}</ul>" if warnings else "")
        + f"<details><summary>all of it</summary><pre>{text}</pre></details>"
    )
