"""The arguments and options of the command line, as typer reads them: names and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.targets import NAMED

MODEL_HELP = (
    "package.module:function, a function that returns (model, inputs), or one of "
    + ", ".join(NAMED)
)
TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help=MODEL_HELP)]
WorldOption = Annotated[
    str | None,
    typer.Option(
        metavar="WORLD",
        help="A preset's name or a JSON file; left out: world.json of this folder, which calibrate "
        "writes, else machines like this one.",
    ),
]
RanksOption = Annotated[
    int | None, typer.Option(min=1, help="Devices; left out: those of the world, 8 to verify.")
]
BatchOption = Annotated[
    str | None,
    typer.Option(metavar="SAMPLESxSEQUENCE", help="The global batch of one step, as 64x4096."),
]
LayoutOption = Annotated[
    str,
    typer.Option(
        metavar="LAYOUT",
        help="auto, ddp, fsdp, megatron, megatron-sp, atp, 3d, 4d, 2.5d; or a grid: atp:4,2, "
        "3d:2,2,2, 4d:x=2,y=2,z=2,data=2, 2.5d:q=2,d=2.",
    ),
]
MemoryOption = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Of each device, as 80GiB; auto: the world's, less 8 %."),
]
OptimizerOption = Annotated[
    str, typer.Option(metavar="NAME", help="Whose states take memory: adamw, sgd, ...; or bytes.")
]
RecomputeOption = Annotated[
    str,
    typer.Option(metavar="HOW", help="What runs again in the backward: auto, none, gathers, full."),
]
RedundantOption = Annotated[
    bool,
    typer.Option("--redundant", help="Products may be computed whole on several ranks at once."),
]
ReduceOption = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="float32: what gradients are added up in across ranks; left out: their own dtype.",
    ),
]
OverlapOption = Annotated[
    bool,
    typer.Option(help="Compare plans by a step in which communication runs under computation."),
]
WhyOption = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Also why this subgraph or node has its layout."),
]
SaveOption = Annotated[
    Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the plan there, as JSON.")
]
TimelineOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help="Write the modelled step there, event by event, for ui.perfetto.dev.",
    ),
]
AnywayOption = Annotated[
    bool,
    typer.Option(
        "--anyway",
        help="Print the plan also where it does not fit, or a step takes over ten minutes.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, no more.")]
RunOption = Annotated[
    bool,
    typer.Option(
        "--run",
        help="Run every check on this one rank, in three minutes at most. Under torchrun they run "
        "on all ranks; leave the option out there, as torchrun takes it for one of its own.",
    ),
]
OutOption = Annotated[
    Path,
    typer.Option(
        metavar="DIR", file_okay=False, help="Where the checks leave their JSON and their page."
    ),
]
PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A file that plan --save wrote.")
]
