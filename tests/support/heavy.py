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
_NAMES = {line for line in HEAVY if "*" not in line}
_PATTERNS = {
    line: re.compile(re.escape(line).replace(r"\*", ".*")) for line in HEAVY if "*" in line
}


def unmatched(names: list[str]) -> list[str]:
    """Lines that name no test any more."""
    patterns = [
        line for line, pattern in _PATTERNS.items() if not any(map(pattern.fullmatch, names))
    ]
    return sorted([*_NAMES.difference(names), *patterns])


def heavy(name: str) -> bool:
    return name in _NAMES or any(pattern.fullmatch(name) for pattern in _PATTERNS.values())
