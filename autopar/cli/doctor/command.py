"""What `autopar doctor` does: say what is here, or (`--run`) run every check."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from autopar.cli import terminal
from autopar.cli.doctor import exchanges, kernels, training
from autopar.cli.doctor.examination import Examination
from autopar.ir import show

SEVERAL = "torchrun --standalone --nproc-per-node 4 -m autopar doctor"


def started() -> bool:
    """Whether torchrun has started this process as one of its ranks. Then the checks are wanted,
    without an option that says so: torchrun would take `--run` for its own `--run-path`.
    """
    return "WORLD_SIZE" in os.environ


def run(out: Path, as_json: bool = False) -> int:
    """Run every check on the ranks that torchrun has started, or on this one, and leave doctor.json
    and doctor.html in a folder. Returns the exit status: 1 where a check failed.
    """
    examination = Examination(out)
    one_rank(examination)
    with examination.ranks():
        all_ranks(examination)
    status = examination.close(as_json)
    if examination.session.ranks == 1 and not as_json:
        terminal.console().print(f"on several ranks: {SEVERAL}", soft_wrap=True)
    return status


def one_rank(examination: Examination) -> None:
    """The checks that each rank does alone, before the process group is open."""
    for dtype in kernels.DTYPES:
        for name in kernels.KERNELS:
            title = f"{name.lower().replace('_', ' ')} {str(dtype).removeprefix('torch.')}"
            examination.check(f"kernel {title}", partial(kernels.kernel, name=name, dtype=dtype))


def all_ranks(examination: Examination) -> None:
    """The checks that the ranks do together, what others hang on first."""
    check = examination.check
    check("versions", exchanges.versions)
    check("devices", exchanges.devices_of_ranks)
    check("links", exchanges.links)
    check("groups", exchanges.groups)
    for kind in exchanges.KINDS:
        check(f"{kind} alone", partial(exchanges.alone, kind=kind))
    for kind in exchanges.JOINED:
        check(f"{kind} joined", partial(exchanges.joined, kind=kind))
    for name, layout in training.layouts(examination.session.ranks).items():
        check(f"parity {name}", partial(training.parity, layout=layout))
    check("dropout", kernels.dropout)
    check("dropout of attention", kernels.attention)
    check("step", training.step)
    check("peak", training.peak)
    check("synchronisation", training.synchronisation)


def tell(facts: dict[str, Any], out: Console) -> None:
    """Print what `machine.facts` found, for people."""
    versions, where = facts["versions"], facts["environment"]
    told = [f"{name} {value}" for name, value in versions.items() if value]
    terminal.line(out, "versions", ", ".join(told))
    for device in facts["devices"]:
        terminal.line(out, "device", _device(device))
    terminal.line(out, "modelled", _modelled(facts["world"]["device"]))
    there = [name for name, is_there in facts["backends"].items() if is_there]
    terminal.line(out, "backends", ", ".join(there) or "none")
    shared = where["shared_memory_bytes"]
    room = "no /dev/shm" if shared is None else f"/dev/shm {show.memory(shared)}"
    omp = os.environ.get("OMP_NUM_THREADS", "not set")
    terminal.line(
        out,
        "host",
        f"{where['cores']} cores, OMP_NUM_THREADS {omp}, {where['threads']} threads, {room}",
    )
    measured = "measured" if facts["world"]["calibrated"] else "assumed"
    terminal.line(out, "world", f"{facts['world']['text']} ({measured})")
    for line in facts["warnings"]:
        out.print(f"[bold yellow]note    [/] {escape(line)}", soft_wrap=True)
    terminal.line(out, "next", f"{SEVERAL}  (three minutes at most; one rank without torchrun)")


def _device(device: dict[str, Any]) -> str:
    name = f"{device['index']}: {device['name']}" if "index" in device else device["name"]
    text = f"{name}, {show.memory(device['memory_bytes'])}"
    if "known_as" in device:
        text += f", capability {device['capability']}, planned as "
        text += device["known_as"] or "an A100, as nothing is known of it"
    return text


def _modelled(device: dict[str, Any]) -> str:
    rates = (f"{dtype} {rate / 1e12:.3g}" for dtype, rate in device["flop_per_s"].items())
    return (
        f"{device['name']}: TFLOP/s in {', '.join(rates)}; "
        f"{device['memory_bytes_per_s'] / 1e9:.3g} GB/s of memory"
    )
