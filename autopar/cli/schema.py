"""What --json prints of each command, as a JSON schema.

Example: `autopar plan --json-schema` prints `schema_of("plan")`. OUTPUTS has a type for each
command: the facts that a command prints where it has a class for them, else a class of this file.
A refusal prints a `Refusal` in place of any of them. tests/cli/test_schema.py holds the outputs to
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from autopar.cli.compare import Comparison
from autopar.cli.graph import RankGraph
from autopar.cli.reasons import Explanation
from autopar.cli.sweep import Sweep
from autopar.cli.trace import Trace
from autopar.cost.throughput import Throughput
from autopar.ir.plan_table import Memory, Row
from autopar.tools.advise.degrees import Degrees
from autopar.tools.doctor import Status
from autopar.tools.doctor.abilities import Ability
from autopar.world import Level, World


class _Output(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Refusal(_Output):
    """Why a command was refused: the name of the error, and the message for people."""

    error: str
    message: str


class MeshSeconds(_Output):
    """A mesh that was considered, and a bound: no plan on it has a smaller sum of seconds."""

    mesh: str
    seconds: float


class PlanFacts(_Output):
    """A plan, by what a program needs of it; `show --json` prints it. Seconds and bytes are of one
    rank in one training step: `seconds` with every collective waited for, `overlapped` with
    communication under computation. `mesh`: the size of each axis. `measured`: whether the
    rates of the world were measured by calibrate, none assumed. `smaller`: ranks and seconds of a
    smaller world that would be as fast.
    """

    layout: str
    fingerprint: str
    seconds: float
    overlapped: float | None
    comm_bytes: float
    peak_bytes: float
    world: str
    measured: bool
    memory: Memory | None
    recompute: list[str]
    regather: list[str]
    rerun: list[str]
    groups: list[str]
    mesh: dict[str, int]
    ranks: int
    rows: list[Row]
    unsplit: list[str]
    microbatches: int
    sums_once: bool
    gathers_once: bool
    interleaved: bool
    smaller: tuple[int, float] | None
    meshes: list[MeshSeconds]
    seconds_by_pass: dict[str, float]


class RunnerUp(_Output):
    """A choice that was not made, and what it would add to the step and to the peak."""

    layout: str
    more_seconds: float
    by_term: dict[str, float]
    more_bytes: float


class WhyFacts(_Output):
    """The answer to --why: the choice, the runners-up, and sizes that no axis divides."""

    pattern: str
    chosen: str
    seconds: float
    peak_bytes: float
    runners: list[RunnerUp]
    notes: list[str]


class PlanOutput(PlanFacts):
    """What `plan` prints: the plan, its target, what the step means for training (None without a
    batch), and the answer to --why, where that was asked.
    """

    target: str
    parameters: int
    throughput: Throughput | None
    why: WhyFacts | None = None


class VerifyOutput(_Output):
    """What `verify` prints: the largest relative errors, and how many nodes were compared."""

    loss_error: float
    grad_error: float
    step_error: float
    nodes: int
    ranks: int
    layout: str
    verified: bool
    target: str
    parameters: int


class CalibrateOutput(_Output):
    """What `calibrate` prints on rank 0: the file that it wrote, and the world in it."""

    saved: str
    world: World


class RanksFacts(_Output):
    """The ranks that run, and the GPUs that the process sees."""

    started_by_torchrun: bool
    rank: int
    running: int
    on_node: int
    gpus: int


class HostFacts(_Output):
    """Cores, threads, shared memory, and the variables that change what ranks do."""

    cores: int | None
    threads: int
    shared_memory_bytes: int | None
    tf32: bool
    variables: dict[str, str]


class WorldFacts(_Output):
    """The world that a plan is made for here; `calibrated`: it was measured."""

    text: str
    calibrated: bool
    file: str
    ranks: int
    links: list[Level] = Field(alias="levels")
    device: dict[str, Any]
    peers: list[list[bool]]


class MachineFacts(_Output):
    """What `doctor` prints of a machine without running anything on it."""

    versions: dict[str, str | int | None]
    devices: list[dict[str, Any]]
    backends: dict[str, bool]
    ranks: RanksFacts
    environment: HostFacts
    world: WorldFacts
    abilities: list[Ability]
    warnings: list[str]


class CheckFacts(_Output):
    """One check of `doctor` on all ranks; `facts` differ by check."""

    name: str
    status: Status
    figure: str
    why: str
    seconds: float
    facts: dict[str, Any]


class ExaminationOutput(_Output):
    """What `doctor` prints after it ran the checks, as in doctor.json."""

    version: int
    ranks: int
    backend: str
    device: str
    seconds: float
    counts: dict[Status, int]
    machine: MachineFacts
    checks: list[CheckFacts]


class AdvicePlan(_Output):
    """A plan that `advise` speaks of: the tool's, or autopar's own."""

    mesh: dict[str, int]
    layout: str
    seconds: float
    overlapped: float | None
    peak_bytes: float


@dataclass(frozen=True)
class TriedDegrees(Degrees):
    """Degrees that were tried: the seconds of their modelled step, or `why` there are none."""

    overlapped: float | None
    why: str


class AdviseOutput(_Output):
    """What `advise` prints: the degrees for a tool, as its own `options`; `plan`: what autopar
    models for them; `own`: autopar's plan for the same memory, None where it was not asked for;
    `gain`: the part of the step that it saves, by what the tool cannot express (`beyond`).
    """

    plan: AdvicePlan
    own: AdvicePlan | None
    tool: str
    version: str
    degrees: Degrees
    options: str
    gain: float
    beyond: list[str]
    tried: list[TriedDegrees]
    target: str
    parameters: int


OUTPUTS: dict[str, Any] = {
    "plan": PlanOutput,
    "verify": VerifyOutput,
    "show": PlanFacts,
    "compare": Comparison,
    "explain": Explanation,
    "sweep": Sweep,
    "trace": Trace,
    "graph": RankGraph,
    "calibrate": CalibrateOutput,
    "advise": AdviseOutput,
    "doctor": MachineFacts | ExaminationOutput,
}


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of what `autopar COMMAND --json` prints.

    >>> [branch["$ref"] for branch in schema_of("show")["anyOf"]]
    ['#/$defs/PlanFacts', '#/$defs/Refusal']
    """
    facts: dict[str, Any] = TypeAdapter(OUTPUTS[command] | Refusal).json_schema()
    title = {"title": f"autopar {command} --json"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | title | facts
