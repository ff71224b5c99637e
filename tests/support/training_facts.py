"""Limits for what train_ranks.py saw: real gloo ranks in float32 against one device."""

from __future__ import annotations

from typing import Any

LIMIT = 1e-4  # relative, in L2


def check_layout(facts: dict[str, Any], where: str) -> None:
    for what in (
        "loss",
        "own part's loss",
        "logits",
        "full logits",
        "all gradients",
        "all parameters",
    ):
        assert facts[what] < LIMIT, f"{where}{what}"
    for what in ("gradients", "parameters"):
        error, name = facts[what]
        assert error < LIMIT, f"{where}{what} of {name}"
    for what in ("losses agree", "graphs agree", "plans agree", "own shapes"):
        assert facts[what], f"{where}{what}"
    names, expected = facts["names"]
    assert sorted(names) == sorted(expected), where
    assert facts["stored as"] == ["ParallelTensor"], where


def check_training(facts: dict[str, Any]) -> None:
    assert facts["loss"] < LIMIT
    assert facts["gradients"][0] < LIMIT, facts
    assert facts["parameters"][0] < LIMIT, facts


def check_errors(facts: dict[str, dict[str, float]], limit: float) -> None:
    """All errors of each task are below the limit."""
    for errors in facts.values():
        wrong = {what: error for what, error in errors.items() if not error < limit}
        assert errors and not wrong, wrong
