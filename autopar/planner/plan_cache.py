"""Chosen plans on disk: a search that was made before is not made again.

Example: with AUTOPAR_CACHE=~/.cache/autopar in the environment, the second `autopar plan gpt2
--ranks 8` reads the plan that the first one chose, and says so.

A plan's file is named by all that the search depends on: the traced graph, how its nodes may be
sharded, the world, the request, the sources of autopar and torch's version. So a file of another
version is never read. Files are written in one step, so two processes may share the folder; one
that cannot be read, or that was edited, is passed over and written anew.

`chosen_before` takes an analysed program and the search, and returns the program with its plan.
Called by planner.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.ir.program import Program, check_choices
from autopar.planner.padding import with_padding_of
from autopar.planner.plan_context import fingerprint
from autopar.planner.request import PlanRequest
from autopar.world import World, json_file
from autopar.world.world import say_once

FOLDER = "AUTOPAR_CACHE"  # the environment variable that names it; without it nothing is kept


def chosen_before(
    program: Program,
    world: World,
    request: PlanRequest,
    search: Callable[[Program], Program],
) -> Program:
    """Return the program with the plan that was chosen for it before, else with the one that
    `search` finds, which is kept.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return search(program)
    path = Path(folder).expanduser() / f"{_key(program, world, request)}.json"
    cached = _load(path, program)
    if cached is not None:
        say_once(f"the plan is read from {path}, no search was made; unset {FOLDER} to search anew")
        return cached
    program = search(program)
    assert program.plan is not None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        json_file.write(path, json.dumps(program.plan.to_json()))
    except OSError as error:
        say_once(f"the plan cannot be kept in {path.parent}: {error.strerror or error}")
    return program


def _load(path: Path, program: Program) -> Program | None:
    """Return the program with the plan of this file; None where there is none that is whole and as
    it was written.
    """
    if not path.exists():
        return None
    try:
        plan = Plan.load(path)
        if plan.edited:
            return None
        plan = dataclasses.replace(plan, planned=("", ""))
        planned = dataclasses.replace(with_padding_of(program, plan), plan=plan)
        check_choices(planned)
    except (AutoparError, AssertionError):
        return None
    return planned


def _key(program: Program, world: World, request: PlanRequest) -> str:
    """Return 32 hex digits that name all that a search depends on."""
    assert program.annotations is not None
    rules = _plain(program.annotations.specs)
    versions = torch.__version__, _sources()
    facts = [fingerprint(program), rules, world.to_json(), repr(request), *versions]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, sets in one order: that of their hashes differs by process."""
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=str)
    return [*map(_plain, value)] if isinstance(value, list | tuple) else str(value)


@cache
def _sources() -> str:
    """Return a digest of autopar's own sources: any change of them may change a plan."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
