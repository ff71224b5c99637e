"""Files that are broken at random end in a named error, or are harmless (mutate_files.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
import mutate_files
from autopar.planner import edit
from autopar.runtime import apply as applying


@pytest.mark.slow_cells("world-40")
@pytest.mark.slow_cells("plan-40")
@pytest.mark.parametrize("count", [40, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plan", "world"])
def test_broken_files_are_refused_or_harmless(kind: str, count: int) -> None:
    plans, worlds = (count, 0) if kind == "plan" else (0, count)
    failed, counts = mutate_files.run(plans, worlds, seed=34)
    assert not failed, "\n".join(failed)
    assert sum(counts.values()) == count
    assert counts[f"{kind}: refused when it is read"] > count // 3
    accepted = "accepted and proven right" if kind == "plan" else "accepted, and planned on"
    assert counts[f"{kind}: {accepted}"] > count // 30


def test_the_mutator_reports_raw_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("states")

    monkeypatch.setattr(autopar.World, "load", staticmethod(fails))
    failed, counts = mutate_files.run(0, 3, seed=34)
    assert len(failed) == counts["world: RAW"] == 3 and "KeyError" in failed[0]


@pytest.mark.slow
def test_the_mutator_reports_a_plan_that_computes_something_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the rules, a partial sum that is taken for the whole one gets through."""
    document = mutate_files.documents_of_plans()[0]
    partial = [c for c in document["choices"].values() if c["results"][0]["states"] == ["P"]]
    partial[0]["results"][0]["states"] = ["R"]
    data = json.dumps(document).encode()
    trial = mutate_files.Trial(tmp_path)
    assert trial.plan(data) == "refused when it is used"
    for module in (applying, edit):
        monkeypatch.setattr(module, "check_edits", lambda program, plan: plan)
    with pytest.raises(autopar.VerificationError):
        trial.plan(data)


@pytest.mark.slow
def test_panels_leave_operands_alone_that_are_gathered_on_both_axes(tmp_path: Path) -> None:
    """What the mutator found: such an edited plan of 2.5D ended in an assertion."""
    trial, documents = mutate_files.Trial(tmp_path), mutate_files.documents_of_plans()
    failed = mutate_files.tried("plan", documents, range(254, 255), 7, trial)
    assert not failed and trial.counts == {"plan: accepted and proven right": 1}
