"""The description of a machine (machine.py) as lines for people: what `autopar doctor` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from autopar.ir.plan_table import format_bytes
from autopar.tools.console import print_line

SEVERAL = "torchrun --standalone --nproc-per-node 4 -m autopar doctor"


def print_facts(facts: dict[str, Any], out: Console) -> None:
    """Print the facts of `machine.facts` for people."""
    versions, where = facts["versions"], facts["environment"]
    version_texts = [f"{name} {value}" for name, value in versions.items() if value]
    print_line(out, "versions", ", ".join(version_texts))
    for device in facts["devices"]:
        print_line(out, "device", _device_text(device))
    print_line(out, "modelled", _modelled_text(facts["world"]["device"]))
    print_line(out, "backends", _backends_text(facts["backends"], versions["nccl"]))
    print_line(out, "ranks", _ranks_text(facts["ranks"]))
    shared = where["shared_memory_bytes"]
    room = "no /dev/shm" if shared is None else f"/dev/shm {format_bytes(shared)}"
    omp = where["variables"].get("OMP_NUM_THREADS", "not set")
    host = f"{where['cores']} cores, OMP_NUM_THREADS {omp}, {where['threads']} threads, {room}"
    print_line(out, "host", host)
    measured = "measured" if facts["world"]["calibrated"] else "assumed"
    print_line(out, "world", f"{facts['world']['text']} ({measured})")
    works = [ability["what"] for ability in facts["abilities"] if ability["works"]]
    print_line(out, "works", "; ".join(works) or "nothing")
    for ability in facts["abilities"]:
        if not ability["works"]:
            text = f"{escape(ability['what'])}: {escape(ability['why'])}"
            out.print(f"[bold red]not here[/] {text}", soft_wrap=True)
    for line in facts["warnings"]:
        out.print(f"[bold yellow]note    [/] {escape(line)}", soft_wrap=True)
    print_line(out, "next", f"{SEVERAL}  (three minutes at most; one rank without torchrun)")


def _backends_text(backends: dict[str, bool], nccl: str | None) -> str:
    available = [
        f"{name} {nccl}" if name == "nccl" and nccl else name
        for name, is_there in backends.items()
        if is_there
    ]
    absent = [name for name, is_there in backends.items() if not is_there]
    without = f" (not in this torch: {', '.join(absent)})" if absent else ""
    return (", ".join(available) or "none") + without


def _ranks_text(ranks: dict[str, Any]) -> str:
    if ranks["started_by_torchrun"]:
        return (
            f"rank {ranks['rank']} of {ranks['running']}, {ranks['on_node']} on this node, by "
            "torchrun"
        )
    most = f"{ranks['gpus']} here, one a GPU" if ranks["gpus"] else "any number here, on the CPU"
    return f"one process, not started by torchrun, which can start {most}"


def _device_text(device: dict[str, Any]) -> str:
    name = f"{device['index']}: {device['name']}" if "index" in device else device["name"]
    text = f"{name}, {format_bytes(device['memory_bytes'])}"
    if "known_as" in device:
        text += f", capability {device['capability']}, planned as "
        text += device["known_as"] or "an A100, as nothing is known of it"
    return text


def _modelled_text(device: dict[str, Any]) -> str:
    rates = (f"{dtype} {rate / 1e12:.3g}" for dtype, rate in device["flop_per_s"].items())
    return (
        f"{device['name']}: TFLOP/s in {', '.join(rates)}; "
        f"{device['memory_bytes_per_s'] / 1e9:.3g} GB/s of memory"
    )
