"""Garbage collection is paused while autopar plans, and as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from autopar.ir.garbage import without_collection


def test_collection_is_paused_and_runs_again() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), without_collection():
        _ = 1 / int(gc.isenabled())
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_new_counts_as_old() -> None:
    young = [[] for _ in range(10)]  # type: ignore[var-annotated]
    with without_collection():
        young += [[] for _ in range(10_000)]
    assert gc.get_count()[0] < 5_000 and len(young) == 10_010


def test_what_a_process_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with without_collection():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
