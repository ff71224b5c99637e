"""Draw the pictures of docs/images: `python -m benchmarks.pictures`, or only those that are named.

The files are plain SVG, and the same on every run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.pictures import (
    before_after,
    layouts,
    pipeline,
    planning_time,
    scatter,
    stages,
    states,
    step_time,
)
from benchmarks.pictures.chains import CHAINS

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
PICTURES: dict[str, Callable[[], str]] = {
    "before-after": before_after.picture,
    "pipeline": pipeline.picture,
    "pipeline-zero-bubble": partial(pipeline.picture, "zero-bubble"),
    "stages": stages.picture,
    "states": states.picture,
    "step-time": step_time.picture,
    "planned-steps": scatter.steps,
    "planned-memory": scatter.peaks,
    "planning-time": planning_time.picture,
    **{f"layout-{chain.name}": partial(layouts.picture, chain) for chain in CHAINS},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(PICTURES)}; none: all")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(PICTURES)):
        parser.error(f"no picture is called {unknown[0]!r}: {', '.join(PICTURES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        path = options.folder / f"{name}.svg"
        path.write_text(PICTURES[name](), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
