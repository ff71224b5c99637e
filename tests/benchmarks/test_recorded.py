"""Recorded steps rated anew: the arithmetic, and that the records can still be read."""

from __future__ import annotations

import pytest

from autopar import World
from benchmarks.model import recorded
from benchmarks.models import SUBJECTS
from benchmarks.step_time import cells

RECORDS = cells.load(recorded.RECORDS)


def test_only_rows_of_the_plan_that_ran_count():
    timed = {"reason": "", "seconds": [2.0, 1.0, 4.0], "mesh": "data4", "modelled": 1.5}
    cell = {"model": "gpt", "world": "w", "rate": 1e9, "date": "then"}
    contestants = [{"name": "autopar ddp", **timed}, {"name": "autopar fsdp", **timed}]
    records = {"cells": [{**cell, "contestants": contestants}]}
    plans = {"ddp": ("data4", 1.8), "fsdp": ("z4", 9.0)}
    read_rows = list(recorded.rows(records, lambda model, world, layout: plans[layout]))
    assert [row.same for row in read_rows] == [True, False]
    assert recorded.means(read_rows) == pytest.approx((0.25, 0.1))
    assert recorded.table(read_rows).row_count == 2


def test_the_records_name_worlds_and_models_that_are_there():
    worlds = {name: World.from_json(data, name) for name, data in RECORDS["worlds"].items()}
    for cell in RECORDS["cells"]:
        assert cell["model"] in SUBJECTS
        assert worlds[cell["world"]].ranks == cell["nodes"] * cell["ranks_per_node"]
        assert all(timed["modelled"] > 0 and timed["mesh"] for timed in cells.standing(cell))
    assert all(0 < world.contention < 1 for world in worlds.values())
