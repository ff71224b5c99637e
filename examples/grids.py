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
from autopar.tools.decoders import Gpt, Sizes, small_weights

GRIDS: dict[str, autopar.Grid4D | autopar.Grid25D] = {
    "4d": autopar.Grid4D(x=2, y=2, z=2),
    "2.5d": autopar.Grid25D(q=2, d=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/grids"), help="where pages go")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes("gpt", layers=2, width=32, heads=4, vocabulary=64, context=32)
    model = Gpt(sizes).apply(small_weights)
    tokens = torch.randint(0, sizes.vocabulary, (8, sizes.context))
    for name, grid in GRIDS.items():
        plan = autopar.plan(model, 8, (tokens, tokens), layout=grid, smaller=False)
        assert plan.context is not None
        print(plan)
        print(autopar.listing(plan.context.graphs["finalize"], "blocks.1", shapes=True))
        print(autopar.verify(model, 8, (tokens, tokens), layout=grid))
        plan.report(out / f"{name}.html", f"a small GPT, {name}", (tokens, tokens), compare=False)


if __name__ == "__main__":
    main()
