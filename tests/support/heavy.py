"""Cells of tables of tests that `make test` leaves to `make test-all`: each takes seconds, and
another cell of the same table, which stays, walks the same code. heavy.txt has one a line; `*` is
any text.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

UNMATCHED = pytest.StashKey[list[str]]()
HEAVY = (Path(__file__).parent / "heavy.txt").read_text().splitlines()


def unmatched(names: list[str]) -> list[str]:
    """Lines that name no test any more."""
    return [line for line in HEAVY if not any(re.fullmatch(_pattern(line), n) for n in names)]


def heavy(name: str) -> bool:
    return any(re.fullmatch(_pattern(line), name) for line in HEAVY)


def _pattern(line: str) -> str:
    return re.escape(line).replace(r"\*", ".*")
