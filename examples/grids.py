"""Force a 4D and a 2.5D layout on a model, prove both, and look at who holds what.

    python examples/grids.py --out out/grids

All ranks run in this one process. For each grid it prints the plan and one block of the graph that
a rank runs, and writes a page with pictures of the blocks of X, W and Y.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import autopar
from gpt import GPT, Config

GRIDS: dict[str, autopar.Grid4D | autopar.Grid25D] = {
    "4d": autopar.Grid4D(x=2, y=2, z=2),
    "2.5d": autopar.Grid25D(q=2, d=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/grids"), help="where pages go")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    config = Config(vocabulary=64, context=32, layers=2, heads=4, width=32)
    model = GPT(config)
    tokens = torch.randint(0, config.vocabulary, (8, config.context))
    for name, grid in GRIDS.items():
        plan = autopar.plan(model, 8, (tokens, tokens), layout=grid, smaller=False)
        assert plan.context is not None
        print(plan)
        print(autopar.listing(plan.context.graphs["finalize"], "blocks.1", shapes=True))
        print(autopar.verify(model, 8, (tokens, tokens), layout=grid))
        plan.report(out / f"{name}.html", f"a small GPT, {name}", (tokens, tokens), compare=False)


if __name__ == "__main__":
    main()
