"""The arguments and options of the command line: their names and help texts as typer reads them,
and how their text is read. The files of the commands use them.

Example: read_layout("4d:x=2,data=4") is Grid4D(x=2, y=1, z=1, data=4).
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from autopar.cli.terminal import console, print_json
from autopar.cost.memory import Limit, Optimizer
from autopar.errors import LayoutError, PlanError, WorldError
from autopar.planner.named_layouts import NAMES
from autopar.planner.request import (
    Grid2D,
    Grid3D,
    Grid4D,
    Grid25D,
    GridContext,
    GridEP,
    GridHSDP,
    Layouts,
    MicrobatchCount,
    Stages,
)
from autopar.tools.targets import NAMED
from autopar.world import PRESETS, World
from autopar.world.world import read_calibration

MODEL_HELP = (
    "file.py:function or package.module:function, a function that returns (model, inputs); a "
    "config.json of transformers or a folder that holds one; or one of " + ", ".join(NAMED)
)
TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help=MODEL_HELP, autocompletion=lambda: list(NAMED))
]
WorldOption = Annotated[
    str | None,
    typer.Option(
        metavar="WORLD",
        autocompletion=lambda: list(PRESETS),
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
LAYOUT_HELP = (
    "auto, ddp, fsdp, megatron, megatron-sp, cp, atp, 3d, 4d, 2.5d; or a grid: atp:4,2, 3d:2,2,2, "
    "4d:x=2,y=2,z=2,data=2, 2.5d:q=2,d=2, hsdp:shard=4,tensor=2, ep:data=2,expert=4, cp:2; or "
    "stages: pp, pp:4,fsdp."
)
LayoutOption = Annotated[
    str,
    typer.Option(
        metavar="LAYOUT",
        autocompletion=lambda: list(NAMES),
        help=LAYOUT_HELP,
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
    typer.Option(
        metavar="HOW", help="What runs again in the backward: auto, none, gathers, selective, full."
    ),
]
MicrobatchesOption = Annotated[
    str,
    typer.Option(
        metavar="N",
        help="Micro-batches of a step, one after the other: a number, or auto, to save memory.",
    ),
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
OutputsOption = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="What a rank returns: replicated, all of every output; sharded, its own part.",
    ),
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
ReportOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help="Write a page about the plan there, HTML that needs no network; by plotly and jinja2.",
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


def _print_schema(context: typer.Context, wanted: bool) -> None:
    """Print the schema of what the command prints with --json, and end. The context's object is
    `schema.schema_of`: that file knows all commands, which import this one.
    """
    if wanted:
        print_json(context.obj(str(context.info_name)))
        raise typer.Exit


SchemaOption = Annotated[
    bool,
    typer.Option(
        "--json-schema",
        is_eager=True,
        callback=_print_schema,
        help="Print the JSON schema of what --json prints, and no more.",
    ),
]
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

GRIDS = {
    "atp": Grid2D,
    "3d": Grid3D,
    "4d": Grid4D,
    "2.5d": Grid25D,
    "hsdp": GridHSDP,
    "ep": GridEP,
    "cp": GridContext,
    "pp": Stages,
}
_UNIT_BYTES = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNIT_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def read_memory(text: str) -> Limit:
    """Return the bytes of a size with its unit, or "auto". Raises PlanError.

    >>> read_memory("80GiB")
    85899345920.0
    """
    match = re.fullmatch(r"([0-9.]+) ?([KMGT]?i?B?)", text)
    if text == "auto":
        return "auto"
    if match is None or match[2] not in _UNIT_BYTES or match[1].count(".") > 1 or match[1] == ".":
        raise PlanError(f"--memory {text}: it is auto, or a size such as 80GiB or 40GB")
    return float(match[1]) * _UNIT_BYTES[match[2]]


def read_microbatches(text: str) -> MicrobatchCount:
    """Return the number of micro-batches of a step, or "auto". Raises PlanError.

    >>> read_microbatches("4")
    4
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal() or not int(text):
        raise PlanError(
            f"--microbatches {text}: it is auto, or a number of micro-batches, 1 or more"
        )
    return int(text)


def read_optimizer(text: str) -> Optimizer:
    """Return an optimizer's name, or the bytes of state for every trained number."""
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else text


def read_layout(text: str) -> Layouts:
    """Return a layout's name, or a grid of "4d:x=2,y=2" or "atp:4,2". Raises LayoutError.

    >>> read_layout("4d:x=2,data=4")
    Grid4D(x=2, y=1, z=1, data=4)
    >>> read_layout("cp:2,within=megatron,attention=heads")
    GridContext(context=2, within='megatron', attention='heads')
    >>> read_layout("pp:4,fsdp")
    Stages(count=4, within='fsdp', schedule='1f1b', rounds=1)
    >>> read_layout("pp:8,schedule=auto,4d:z=8,y=8").within
    Grid4D(x=1, y=8, z=8, data=1)

    "pp" alone leaves stages, schedule and layout open. Of cp and pp, what stands from the name of
    another grid on is the layout within.
    """
    if text in NAMES:
        return text
    if text == "pp":
        return Stages(schedule="auto")
    text, inner = _split_within(text)
    name, colon, sizes = text.partition(":")
    grid = GRIDS.get(name)
    if not colon or grid is None:
        raise LayoutError(
            f"unknown layout {text!r}; known ones: {', '.join(NAMES)}, pp, and with sizes "
            f"{', '.join(GRIDS)}, as 4d:x=2,y=2"
        )
    fields = [
        field
        for field in dataclasses.fields(grid)
        if field.type in ("int", "str") or field.name in ("within", "attention", "count")
    ]
    names = [field.name for field in fields]
    values: dict[str, Any] = {} if inner is None else {"within": inner}
    for position, entry in enumerate(sizes.split(",")):
        key, equals, value = (piece.strip() for piece in entry.rpartition("="))
        if not equals:
            key = names[position] if position < len(names) else value
        if key not in names or key in values:
            raise LayoutError(
                f"layout {text!r}: {entry!r} is no size of {name}{_usage_text(names)}"
            )
        is_name = key in ("first", "within", "attention", "schedule")
        is_name |= (key, value) == ("count", "auto")
        values[key] = value if is_name else _read_size(text, entry, value)
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise LayoutError(f"layout {text!r} lacks {', '.join(missing)}{_usage_text(names)}")
    return grid(**values)


def _split_within(text: str) -> tuple[str, Layouts | None]:
    """Return a grid's text without that of a grid within it, and the grid within, None for none."""
    match = re.fullmatch(rf"((?:cp|pp):[^:]*?),(?:within=)?((?:{'|'.join(GRIDS)}):.*)", text)
    return (text, None) if match is None else (match[1], read_layout(match[2]))


def _usage_text(names: list[str]) -> str:
    return f"; it takes {', '.join(names)}, by position or as {names[0]}=2"


def _read_size(text: str, entry: str, value: str) -> int:
    if not re.fullmatch("[0-9]+", value) or int(value) < 1:
        raise LayoutError(f"layout {text!r}: {entry!r} is no whole number of ranks from 1 on")
    return int(value)


# -- what the options mean -------------------------------------------------------------------------
def read_world(text: str | None, ranks: int | None) -> World:
    """Return the world that --world and --ranks name together. Raises WorldError."""
    if text is None:
        measured, warning = read_calibration(ranks)
        if warning:
            console(stderr=True).print(warning, soft_wrap=True)
        if measured is not None:
            return measured
        here, gpus = World.of(ranks), torch.cuda.device_count()
        return World.of(gpus) if ranks is None and here.ranks == 1 < gpus else here
    if text.endswith(".json") or Path(text).is_file():
        world = World.load(text)
        if ranks not in (None, world.ranks):
            raise WorldError(
                f"--ranks {ranks}: the world of {text} has {world.ranks} ranks; leave --ranks out"
            )
        return world
    return World.preset(text, ranks)
