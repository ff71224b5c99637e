"""The world that `autopar calibrate` has measured here, for calls that name none."""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from pathlib import Path

from .cluster import World

CALIBRATED = "world.json"  # in the folder that a program runs in


def calibrated(ranks: int | None) -> tuple[World | None, str]:
    """The world of this folder's file if it has so many ranks (None: any); else None, and what is
    wrong with it, "" where there is no file. Raises WorldError for a file that cannot be read.
    """
    if not Path(CALIBRATED).is_file():
        return None, ""
    world = World.load(CALIBRATED)
    if ranks not in (None, world.ranks):
        return None, f"{CALIBRATED} is of {world.ranks} ranks and does not count for {ranks}"
    return dataclasses.replace(world, name=CALIBRATED), ""


def running_world() -> tuple[World, str]:
    """What runs, as it was calibrated here, else as far as this process can see; and what the user
    is to know of that, in one line.
    """
    seen = World.detect()
    if seen.ranks == 1:
        return seen, ""
    found, wrong = calibrated(seen.ranks)
    if found is not None and (found.device.name, found.backend) == (seen.device.name, seen.backend):
        return found, f"the world is {CALIBRATED}, which was calibrated"
    if found is not None:
        wrong = (
            f"{CALIBRATED} is of {found.device.name} with {found.backend}, here is "
            f"{seen.device.name} with {seen.backend}: it does not count"
        )
    assumed = (
        f"links are assumed, not measured ({seen}): `torchrun … -m autopar calibrate` takes two "
        f"minutes and writes {CALIBRATED}, which is used from then on"
    )
    return seen, f"{wrong}; {assumed}" if wrong else assumed


@cache
def say_once(line: str) -> None:
    """On stderr, once in a process."""
    print(f"autopar: {line}", file=sys.stderr, flush=True)
