"""What a timeline's file is to say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from autopar.cost.simulator import Seen


def check_timeline_file(seen: Seen, path: Path) -> None:
    """What the file says is what the timeline says; on no track does one thing overlap another."""
    seen.save(path)
    entries = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert list(names.values())[:2] == ["compute", "waits"]
    tracks: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for entry in entries:
        if entry["ph"] == "X":
            tracks[names[entry["tid"]]].append(entry)
    for track in tracks.values():
        ordered = sorted(track, key=lambda e: (e["ts"], e["dur"]))
        for event, other in itertools.pairwise(ordered):
            assert event["ts"] + event["dur"] <= other["ts"] + 1e-3, (event, other)  # in us
        assert all(e["args"]["node"] and e["args"]["phase"] for e in ordered)
    waited = sum(e["dur"] for e in tracks["waits"]) / 1e6
    lanes = [e for name, track in tracks.items() if name not in ("compute", "waits") for e in track]
    assert waited == pytest.approx(seen.exposed_seconds)
    assert sum(e["args"]["exposed_s"] for e in lanes) == pytest.approx(waited)
    assert sum(e["dur"] for e in lanes) / 1e6 == pytest.approx(seen.communication)
    assert sum(e["args"]["bytes"] for e in lanes) == pytest.approx(
        sum(total.bytes for total in seen.totals())
    )
