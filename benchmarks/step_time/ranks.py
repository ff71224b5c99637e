"""What every rank of a timed cell runs on a cluster: `python -m benchmarks.step_time.ranks JOB`.

Contestants take turns step by step, so that whatever else the machine does hits all alike. A step
is what a user would time: forward, backward, AdamW. Rank 0 writes what all ranks saw.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.cost.simulator import Timeline
from autopar.runtime.backends import Scheduled
from autopar.runtime.calibrate_on_ranks import calibrate_on_ranks
from autopar.runtime.training.step_graph import timelines
from autopar.world import ranks as autopar_ranks
from benchmarks.cluster import sent_bytes
from benchmarks.models import SUBJECTS, Subject
from benchmarks.step_time import hidden, peers, worlds

LOOKS = 3  # profiled steps
LIMIT = 1e-4  # largest relative difference of a loss, or a gradient's norm, from one device's


@dataclass(frozen=True)
class Job:
    """A cell: one model on one cluster. `world`: the file of the world that autopar plans for;
    where there is none yet it is measured for `calibrate_s` seconds, or if that is 0 written by
    hand. `trace`: a folder for a profile of one more step of each contestant, "" for none. `seen`:
    whether some more steps of each layout of autopar are profiled for what they hide.
    """

    model: str
    nodes: int
    ranks_per_node: int
    rate: float | None
    contestants: tuple[str, ...]
    world: str
    out: str
    steps: int = 5
    warmups: int = 2
    trace: str = ""
    calibrate_s: float = 0.0
    seen: bool = False


@dataclass
class Timed:
    """A contestant's figures: seconds by step, of the slowest rank; bytes that the busiest node
    sent over its cable; `reason` why it is out: refused or wrong.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    forward_backward: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all ranks together
    cable_bytes: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_norm: float = 0.0
    error: float = 0.0
    reason: str = ""
    modelled: float = 0.0
    scheduled: float = 0.0  # modelled seconds of the forward and the backward that run
    mesh: str = ""
    setup_s: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)  # see `profiled`


@dataclass(frozen=True)
class Single:
    """What one device finds: the loss of every step and the norm of the first gradient."""

    losses: list[float]
    gradient_norm: float


def alone(subject: Subject, steps: int) -> Single:
    """On rank 0; the others wait."""
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        model = subject.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=peers.RATE, fused=True)
        losses, norm = [], 0.0
        for tokens, targets in subject.batches(steps):
            optimizer.zero_grad()
            loss = model(tokens, targets)
            loss.backward()
            norm = norm or math.sqrt(sum(_squared(p.grad) for p in model.parameters()))
            optimizer.step()
            losses.append(float(loss.detach()))
        results = [Single(losses, norm)]
    dist.broadcast_object_list(results)
    return results[0]


def _squared(gradient: torch.Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.double().square().sum())


def step(contestant: peers.Contestant, batch: peers.Batch, timed: Timed, local: list[Any]) -> None:
    """One step of one contestant; what this rank saw goes to `local`."""
    own = contestant.cut(batch)
    contestant.optimizer.zero_grad()
    gc.collect()
    dist.barrier()
    sent, cpu, started = sent_bytes(), time.process_time(), time.perf_counter()
    with contestant.context():
        loss = contestant.loss(own)
        loss.backward()
    passed = time.perf_counter()
    if not timed.gradient_norm:
        timed.gradient_norm = _norm(contestant)
    again = time.perf_counter()
    contestant.optimizer.step()
    ended = time.perf_counter()
    cpu = time.process_time() - cpu
    dist.barrier()  # what others still send is this step's too
    seconds = passed - started + ended - again
    local.append((seconds, passed - started, cpu, sent_bytes() - sent))
    timed.losses.append(_value(loss))


def _norm(contestant: peers.Contestant) -> float:
    if contestant.plan is not None and contestant.plan.stage_starts:  # each rank has some of it
        assert isinstance(contestant.model, autopar.ParallelModule)
        return float(contestant.model.clip_grad_norm_(math.inf))
    total = peers.squared_norm(contestant.model)
    dist.all_reduce(total)
    return float(total.sqrt())


def _value(loss: torch.Tensor) -> float:
    """The mean over the ranks' parts of the batch; where all have the whole one, that."""
    whole = loss.full_tensor() if isinstance(loss, torch.distributed.tensor.DTensor) else loss
    whole = whole.detach().clone().double()
    dist.all_reduce(whole)
    return float(whole) / dist.get_world_size()


def judge(timed: Timed, single: Single) -> None:
    """Disqualifies a contestant whose losses or gradient differ from the single device's."""
    norm = _off(timed.gradient_norm, single.gradient_norm)
    losses = [_off(*pair) for pair in zip(timed.losses, single.losses, strict=True)]
    timed.error = max([*losses, norm])
    if timed.error > LIMIT:
        what = "gradient's norm" if norm == timed.error else "loss"
        timed.reason = f"WRONG: its {what} is {timed.error:.1e} off the single device's"


def _off(actual: float, expected: float) -> float:
    """The relative difference; infinite where one is not a number."""
    off = abs(actual - expected) / abs(expected)
    return off if off == off else math.inf


def gathered(timed: Timed, local: list[Any], warmups: int) -> None:
    """The figures of all ranks, after the warm-ups."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, local[warmups:])
    for ranks in zip(*everywhere, strict=True):
        seconds, both, cpu, sent = zip(*ranks, strict=True)
        timed.seconds.append(max(seconds))
        timed.forward_backward.append(max(both))
        timed.cpu_seconds.append(sum(cpu))
        timed.cable_bytes.append(max(sent))


def enter(job: Job, world: autopar.World) -> tuple[dict[str, peers.Contestant], list[Timed]]:
    """All contestants on the running ranks; one that cannot be made is listed with the reason."""
    subject, contestants, table = SUBJECTS[job.model], {}, []
    model, batch = subject.model(), subject.batches(1)[0]
    for name in job.contestants:
        timed, started = Timed(name), time.perf_counter()
        try:
            contestant = peers.contestant_of(name, model, job.ranks_per_node, world, batch)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            timed.reason = f"refused: {str(error).splitlines()[0]}"
        else:
            contestants[name] = contestant
            if contestant.plan is not None:
                timed.modelled = contestant.plan.overlapped or contestant.plan.seconds
                timed.mesh = str(contestant.plan.mesh)
                if contestant.plan.stage_starts:
                    timed.mesh += (
                        f" {contestant.plan.layout}, {contestant.plan.microbatches} micro-batches"
                    )
        timed.setup_s = time.perf_counter() - started
        table.append(timed)
        say(f"{name}: {timed.reason or f'made in {timed.setup_s:.1f} s {timed.mesh}'}")
    return contestants, table


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {text}", file=sys.stderr, flush=True)


def race(job: Job, contestants: dict[str, peers.Contestant], table: list[Timed]) -> None:
    """Every step of every contestant, in turns."""
    gc.collect()
    gc.freeze()  # else every collection before a step walks all of torch's own objects
    local: dict[str, list[Any]] = {name: [] for name in contestants}
    running = [timed for timed in table if timed.name in contestants]
    for number, batch in enumerate(SUBJECTS[job.model].batches(job.warmups + job.steps)):
        for timed in running:
            step(contestants[timed.name], batch, timed, local[timed.name])
        last = ", ".join(f"{t.name} {local[t.name][-1][0]:.2f}" for t in running)
        say(f"step {number + 1} of {job.warmups + job.steps}: {last}")
    for timed in running:
        gathered(timed, local[timed.name], job.warmups)
        timed.scheduled = _scheduled(contestants[timed.name].model)


def _scheduled(model: torch.nn.Module) -> float:
    """0 for what autopar did not schedule."""
    run = getattr(getattr(model, "_first", None), "run", None)
    phases = run.modelled.values() if isinstance(run, Scheduled) else ()
    return sum(phase.seconds for phase in phases)


def profile(job: Job, contestants: dict[str, peers.Contestant]) -> None:
    """One more step of each under torch's profiler: FOLDER/CONTESTANT.RANK.json, for Perfetto."""
    folder = Path(job.trace)
    folder.mkdir(parents=True, exist_ok=True)
    batch = SUBJECTS[job.model].batches(1)[0]
    for name, contestant in contestants.items():
        contestant.optimizer.zero_grad()
        own = contestant.cut(batch)
        dist.barrier()
        with torch.profiler.profile() as seen, contestant.context():
            contestant.loss(own).backward()
        file = name.replace(" ", "_").replace("×", "x")
        seen.export_chrome_trace(str(folder / f"{file}.{dist.get_rank()}.json"))


def profiled(job: Job, contestant: peers.Contestant, world: autopar.World) -> dict[str, float]:
    """Of profiled steps: how much of the communication is hidden, and could be (see hidden.py);
    seconds of communication, exposed and lost to late ranks; modelled communication over
    computation. Nothing of peers and on other ranks than 0.
    """
    if contestant.plan is None:
        return {}
    assert isinstance(contestant.model, autopar.ParallelModule)
    subject = SUBJECTS[job.model]
    batch = subject.batches(1)[0]
    ran = [hidden.account(step) for step in timelines(contestant.model, LOOKS, batch, {})]
    seen = hidden.usual(autopar_ranks.all_of(ran))
    if dist.get_rank() > 0:
        return {}
    layout, _ = peers.wanted(contestant.name.removeprefix("autopar "))
    plan = autopar.plan(subject.model(), world, batch, layout=layout, smaller=False)
    timeline = plan.timeline()
    assert isinstance(timeline, Timeline)  # no stages were asked for
    events = timeline.events
    computing, communication = hidden.modelled(events)
    return {
        **asdict(seen),
        "hidden": seen.hidden,
        "could": hidden.could_be(events, seen),
        "communication_over_computation": communication / computing,
    }


def known_world(job: Job) -> autopar.World:
    """The one in the job's file; where there is none yet, one by hand or calibrated, left there for
    later cells. All ranks hold rank 0's.
    """
    path = Path(job.world)
    if not path.exists():
        if job.calibrate_s:
            say(f"calibrating for {job.calibrate_s:g} s")
            subject = SUBJECTS[job.model]
            world = calibrate_on_ranks(
                lambda: (subject.model(), subject.batches(1)[0]), job.calibrate_s
            )
        else:
            world = worlds.by_hand(job.nodes, job.ranks_per_node, job.rate)
        dist.barrier()  # or a slow rank would find the file already
        if dist.get_rank() == 0:
            world.save(path)
    dist.barrier()
    return autopar.World.load(path)


def run(job: Job) -> dict[str, Any]:
    world = known_world(job)
    say(f"world: {world}")
    single = alone(SUBJECTS[job.model], job.warmups + job.steps)
    load = os.getloadavg()[0]
    contestants, table = enter(job, world)
    race(job, contestants, table)
    for timed in table:
        if timed.name in contestants:
            judge(timed, single)
    if job.trace:
        profile(job, contestants)
    if job.seen:
        for timed in table:
            if timed.name in contestants and timed.name.partition("+")[2] in ("", "waiting"):
                timed.seen = profiled(job, contestants[timed.name], world)
    facts = {**asdict(job), "world": str(world), "load": load, "single": asdict(single)}
    facts["cores"] = os.cpu_count()
    return {**facts, "contestants": [asdict(timed) for timed in table]}


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    facts = run(job)
    if dist.get_rank() == 0:
        Path(job.out).write_text(json.dumps(facts, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
