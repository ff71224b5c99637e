"""Plan a Llama for 1024 GPUs on the machine in front of you, within their memory.

    python examples/plan_1024.py                 # 70 billion parameters: some minutes
    python examples/plan_1024.py --small         # a narrow model on 16 GPUs: some seconds

No GPU and no memory for the parameters is needed: the model is on the meta device. It prints the
plan, why one block has its layout, and writes the page with everything.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import autopar
from autopar.tools.targets import Batch, resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="gpt2 on 16 GPUs")
    parser.add_argument("--out", type=Path, default=Path("out/plan"), help="where files go")
    options = parser.parse_args()
    name, ranks, batch = "llama3-70b", 1024, Batch(1024, 4096)
    if options.small:
        name, ranks, batch = "gpt2", 16, Batch(16, 256)
    target = resolve(name, batch, ranks)
    world = autopar.World.preset("dgx-h100", ranks)
    plan = autopar.plan(target.model, world, target.inputs, smaller=False)
    print(plan)
    print(plan.why("blocks.*.up").chosen)
    options.out.mkdir(parents=True, exist_ok=True)
    plan.save(options.out / "plan.json")
    plan.report(options.out / "report.html", target.name, target.inputs, compare=not options.small)
    print(f"{options.out}/ has plan.json and report.html")


if __name__ == "__main__":
    main()
