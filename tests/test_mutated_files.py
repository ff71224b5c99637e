"""Files that are broken at random end in a named error, or are harmless (tests/mutate_files.py)."""

from __future__ import annotations

import pytest

import autopar
import mutate_files


@pytest.mark.parametrize(("kind", "plans", "worlds"), [("plan", 150, 0), ("world", 0, 150)])
def test_broken_files_are_refused_or_harmless(kind: str, plans: int, worlds: int) -> None:
    failed, counts = mutate_files.run(plans, worlds, seed=34)
    assert not failed, "\n".join(failed)
    assert sum(counts.values()) == 150
    assert counts[f"{kind}: refused when it is read"] > 50
    accepted = "accepted and proven right" if kind == "plan" else "accepted, and planned on"
    assert counts[f"{kind}: {accepted}"] > 5


def test_the_mutator_reports_raw_errors_and_wrong_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("states")

    monkeypatch.setattr(autopar.World, "load", staticmethod(fails))
    failed, counts = mutate_files.run(0, 3, seed=34)
    assert len(failed) == counts["world: RAW"] == 3 and "KeyError" in failed[0]
