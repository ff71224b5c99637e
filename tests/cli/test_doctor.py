"""The doctor: what it says of a machine, and that its checks find what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from autopar.cli import main
from autopar.tools.doctor import (
    Absent,
    AttentionModel,
    Finding,
    Session,
    abilities,
    description,
    machine,
    merge_findings,
    run_check,
    training,
)
from autopar.tools.doctor import examination as doctor_command
from autopar.tools.doctor import kernels as doctor_kernels
from autopar.tools.doctor.examination import Examination, page
from html_page import Page
from launch import RANK_SCRIPTS, ROOT, environment

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def alone(device: torch.device = CPU) -> Session:
    return Session(device, 0, 1, "")


# -- what is here ----------------------------------------------------------------------------------
def test_it_says_what_is_here() -> None:
    result = CliRunner().invoke(main.app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["environment"]["cores"] == os.cpu_count()
    assert facts["backends"]["gloo"] is True
    assert facts["world"]["ranks"] == 1 and facts["world"]["device"]["flop_per_s"]["float32"] > 0
    printed = CliRunner().invoke(main.app, ["doctor"])
    assert printed.exit_code == 0
    for word in (f"torch {torch.__version__}", "gloo", "OMP_NUM_THREADS", "-m autopar doctor"):
        assert word in printed.stdout


def test_it_says_what_is_known_of_gpus_and_what_will_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["NVIDIA H100 80GB HBM3", "Voodoo 2"]

    def properties(device: Any = 0) -> Any:
        return types.SimpleNamespace(
            name=names[device], total_memory=80 << 30, multi_processor_count=132
        )

    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": properties,
        "get_device_capability": lambda device=0: (9, 0) if not device else (7, 5),
        "can_device_access_peer": lambda first, other: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(machine, "_shared_memory", lambda: 64 << 20)
    facts = machine.facts()
    assert [entry["known_as"] for entry in facts["devices"]] == ["H100", None]
    assert facts["world"]["peers"] == [[True, False], [False, True]]
    assert facts["world"]["ranks"] == 2
    said = "\n".join([*facts["warnings"], *(ability["why"] for ability in facts["abilities"])])
    for words in (
        "no NCCL", "GPUs differ", "knows nothing of a Voodoo 2", "older than Ampere",
        "not every GPU reaches", "/dev/shm has 64 MiB", "nothing overlaps", "links are assumed",
    ):  # fmt: skip
        assert words in said
    json.dumps(facts)


def test_what_does_not_work_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {ability.what: ability for ability in abilities.abilities()}
    assert there["ranks on CPUs (gloo)"].works and not there["ranks on CPUs (gloo)"].why
    assert there["plan, sweep, verify, trace, graph"].works
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(abilities, "find_spec", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    absent = {a.what: a.why for a in abilities.abilities() if not a.works}
    assert absent["plan, sweep, verify, trace, graph"].startswith("torch 2.4.1 is too old")
    assert absent["ranks on CPUs (gloo)"] == "this torch was built without gloo"
    assert absent["ranks on GPUs (NCCL)"].startswith("torch finds no GPU: see nvidia-smi")
    assert absent["a config.json as target"].endswith("pip install 'autopar[hf]'")
    assert absent["autopar.fabric_strategy()"].endswith("pip install lightning-fabric")
    assert absent['backend="inductor"'].startswith("there is no C++ compiler")
    printed = CliRunner().invoke(main.app, ["doctor"]).stdout
    assert "not here ranks on CPUs (gloo): this torch was built without gloo" in printed


def test_ranks_threads_and_shared_memory_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not started by torchrun" in CliRunner().invoke(main.app, ["doctor"]).stdout
    for name, value in {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "_shared_memory", lambda: 64 << 20)
    facts = machine.facts()
    assert facts["ranks"] == {
        "started_by_torchrun": True, "rank": 5, "running": 8, "on_node": 4, "gpus": 0,
    }  # fmt: skip
    said = "\n".join(facts["warnings"])
    assert "4 ranks of 3 threads each share 8 cores" in said
    assert "/dev/shm has 64 MiB: data loaders may fail" in said
    out = io.StringIO()
    description.print_facts(facts, Console(file=out, width=200))
    assert "ranks    rank 5 of 8, 4 on this node, by torchrun" in out.getvalue()
    assert "OMP_NUM_THREADS 3" in out.getvalue()
    monkeypatch.delenv("OMP_NUM_THREADS")
    said = "\n".join(machine.facts()["warnings"])
    assert "OMP_NUM_THREADS is not set: plans share the 3 threads of this machine" in said
    assert "each share" not in said


def test_ranks_without_a_gpu_of_their_own_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    session = Session.here()
    assert (session.device, session.backend, session.rank, session.ranks) == (CPU, "gloo", 3, 4)
    assert session.note == (
        "a process sees 2 GPUs for the 4 ranks of its node, so they run on the CPU"
    )


# -- results ---------------------------------------------------------------------------------------
def bad(session: Session) -> Finding:
    raise ValueError("a <bad> thing")


def gone(session: Session) -> Finding:
    raise Absent("no such kernel")


def warned(session: Session) -> Finding:
    warnings.warn("slow & strange", stacklevel=1)
    return Finding("fine", {"error": float("nan")})


def test_a_failing_check_is_named_and_the_others_go_on(tmp_path: Path, capsys: Any) -> None:
    examination = Examination(tmp_path / "out", alone())
    for name, check in {"first": bad, "second": gone, "third": warned}.items():
        examination.check(name, check)
    with examination.ranks():
        examination.check("fourth", lambda session: Finding("well", fault="too far"))
    assert examination.close() == 1
    said = capsys.readouterr()
    assert "first" in said.out and "ValueError: a <bad> thing" in said.out
    facts = json.loads((tmp_path / "out" / "doctor.json").read_text(), parse_constant=pytest.fail)
    checks = {entry["name"]: entry for entry in facts["checks"]}
    assert [entry["status"] for entry in checks.values()] == ["failed", "not here", "ok", "failed"]
    assert checks["first"]["why"] == "ValueError: a <bad> thing"
    assert any("in bad: raise" in line for line in checks["first"]["facts"]["traceback"])
    assert checks["third"]["facts"] == {"error": "nan", "warnings": ["slow & strange"]}
    assert facts["counts"] == {"ok": 1, "failed": 2, "not here": 1, "under way": 0}
    parsed = Page((tmp_path / "out" / "doctor.html").read_text())
    assert parsed.open == [] and parsed.links == []
    assert parsed.cells[::4] == ["first", "second", "third", "fourth"]
    assert "a <bad> thing" in parsed.cells[2]


@pytest.mark.parametrize(("check", "status"), [(bad, 1), (gone, 0)])
def test_the_command_runs_every_check(
    check: Any, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor_command, "check_each_rank", lambda examination: examination.check("one", check)
    )
    monkeypatch.setattr(
        doctor_command, "check_all_ranks", lambda examination: examination.check("two", warned)
    )
    more = ("--out", str(tmp_path / "reports" / "here"))
    printed = CliRunner().invoke(main.app, ["doctor", "--run", *more])
    assert printed.exit_code == status, printed.output
    assert "1 ok" in printed.stdout and doctor_command.SEVERAL in printed.stdout
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun does
    result = CliRunner().invoke(main.app, ["doctor", "--json", *more])
    assert result.exit_code == status
    facts = json.loads(result.stdout)
    assert [entry["name"] for entry in facts["checks"]] == ["one", "two"]
    written = json.loads((tmp_path / "reports" / "here" / "doctor.json").read_text())
    assert written["checks"] == facts["checks"]


def test_what_is_not_here_is_no_failure(tmp_path: Path) -> None:
    examination = Examination(None, alone())
    examination.check("gone", gone)
    assert examination.close() == 0


def test_a_run_that_is_cut_off_leaves_what_it_found(tmp_path: Path) -> None:
    examination = Examination(tmp_path, alone())

    def cut(session: Session) -> Finding:
        raise KeyboardInterrupt

    examination.check("first", lambda session: Finding("well"))
    with pytest.raises(KeyboardInterrupt):
        examination.check("second", cut)
    facts = json.loads((tmp_path / "doctor.json").read_text())
    assert [entry["status"] for entry in facts["checks"]] == ["ok", "under way"]
    assert "it did not end" in page(facts)


def test_ranks_that_differ_are_named() -> None:
    well, wrong = Finding("well"), Finding(fault="too far")
    assert merge_findings("x", [well, wrong, wrong], 1.0).why == "ranks 1, 2: too far"
    assert merge_findings("x", [wrong, wrong], 1.0).why == "too far"
    absent = run_check(lambda: gone(alone()))
    assert merge_findings("x", [well, absent], 1.0).status == "not here"
    assert merge_findings("x", [absent, wrong], 1.0).status == "failed"


# -- checks, and what they must find ---------------------------------------------------------------
@pytest.mark.slow_cells("dtype1")
@pytest.mark.parametrize("dtype", doctor_kernels.DTYPES)
def test_attention_kernels_equal_float64(dtype: torch.dtype) -> None:
    session = alone()
    for name in ("MATH", "FLASH_ATTENTION"):
        check = doctor_kernels.kernel(session, name, dtype)
        assert check.fault == "" and check.facts["errors"].keys() > {"result"}
    assert "Flash" in check.facts["ran"]
    with pytest.raises(Absent, match="No viable backend"):
        doctor_kernels.kernel(session, "CUDNN_ATTENTION", dtype)
    module, x, expected = session.shared[f"attended {dtype}"]
    worse = {**expected, "attention.out.bias": expected["attention.out.bias"] * 1.1}
    session.shared[f"attended {dtype}"] = module, x, worse
    check = doctor_kernels.kernel(session, "MATH", dtype)
    assert check.fault.startswith("attention.out.bias is off by 9.1e-02")


def test_another_kernel_than_wanted_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor_kernels.KERNELS, "FLASH_ATTENTION", "EfficientAttention")
    check = doctor_kernels.kernel(alone(), "FLASH_ATTENTION", torch.float32)
    assert (
        "FlashAttentionForCpu" in check.fault.replace("_", "") and "in place of it" in check.fault
    )


def test_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    session = alone()
    assert training.parity(session, "auto").fault == ""
    single = training._one_device

    def wrong(*args: Any) -> Any:
        loss, gradients = single(*args)
        return loss, {
            **gradients,
            "head.weight": gradients["head.weight"] * (1 + 2 * training.LIMIT),
        }

    monkeypatch.setattr(training, "_one_device", wrong)
    assert training.parity(session, "auto").fault == (
        "head.weight is off by 2.0e-04 relative, the limit is 1e-04"
    )
    assert training.LIMIT == 1e-4


def test_a_wrong_dropout_mask_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_kernels.dropout(alone()).fault == ""
    masks = doctor_kernels._masks(alone(), "auto")
    first, _, gradient = masks
    for wrong, fault in (
        ((first, first, first.sum(0)), "two steps have one mask"),
        ((*masks[:2], gradient.flip(0)), "the gradient has another mask"),
        (tuple(x * 0.8 for x in masks), "what is kept is not divided by 0.8"),
    ):
        monkeypatch.setattr(doctor_kernels, "_masks", lambda *_, wrong=wrong: wrong)
        assert doctor_kernels.dropout(alone()).fault == fault
    monkeypatch.setattr(doctor_kernels, "_masks", lambda *_: masks)
    monkeypatch.setattr(doctor_kernels, "P", 0.21)
    assert " sigma" in doctor_kernels.dropout(alone()).fault


class Steps:
    """In the place of a trained model on a GPU: it waits for the device where it is told to."""

    def __init__(self, waits: dict[int, str]) -> None:
        self.waits, self.count, self.before = waits, 0, 0
        self.optimizer = types.SimpleNamespace(zero_grad=lambda: None)
        self.plan = types.SimpleNamespace(peak_bytes=2**20, memory=None)

    def step(self) -> torch.Tensor:
        self.count += 1
        if self.count in self.waits:
            text = (
                "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp)"
            )
            warnings.warn_explicit(text, UserWarning, self.waits[self.count], 7)
        return torch.zeros(())


@pytest.mark.parametrize(
    ("waits", "fault"),
    [
        ({1: "/x/mine/a.py", 2: "/x/mine/a.py", 5: "/x/autopar/runtime/agreement.py"}, ""),
        ({3: "/x/mine/b.py", 10: "/x/mine/b.py"}, "the host waits in mine/b.py:7 (2 ×)"),
    ],
)
def test_waits_after_the_first_two_steps_are_named(
    waits: dict[int, str], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    session = alone(GPU)
    session.shared["trained"] = Steps(waits)
    assert training.synchronisation(session).fault == fault
    assert modes == ["warn", 0] * 10


@pytest.mark.slow_cells("0.5-True", "1.09-True")
@pytest.mark.parametrize(("measured", "well"), [(0.5, True), (1.09, True), (1.2, False)])
def test_a_peak_above_the_planned_one_is_a_failure(
    measured: float, well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: int(measured * 2**20))
    session = alone(GPU)
    session.shared["trained"] = Steps({})
    assert (training.peak(session).fault == "") == well
    for check in (training.peak, training.synchronisation):
        with pytest.raises(Absent):
            check(alone())


def test_attention_of_the_kernels_has_a_gradient_for_each_weight() -> None:
    model = AttentionModel(16, 2)
    model(torch.randn(1, 4, 16))[0].backward()
    assert all(p.grad is not None for p in model.parameters())


# -- ranks -----------------------------------------------------------------------------------------
def launched(
    *script: str, ranks: int = 2, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(ranks), *script]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=seconds
    )


@pytest.mark.slow
def test_ranks_that_fail_apart_go_on_together(tmp_path: Path) -> None:
    """A rank that leaves, and what is wrong on one rank, among checks that are well."""
    result = launched(str(RANK_SCRIPTS / "doctor_ranks.py"), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "status.json").read_text()) == 1
    facts = json.loads((tmp_path / "doctor.json").read_text())
    failed = {
        entry["name"]: entry["why"] for entry in facts["checks"] if entry["status"] == "failed"
    }
    assert failed.keys() == {"leaves", "one more", "turned", "one seed", "two seeds"}
    assert failed["one seed"] == "two steps have one mask"
    assert "ranks have different masks" in failed["two seeds"]
    assert "rank 1: RuntimeError: left early" in failed["leaves"]
    assert failed["one more"].startswith("rank 1: wrong numbers: float32 over outer2/outer")
    assert failed["turned"].startswith("rank 1: wrong numbers")
    assert {entry["status"] for entry in facts["checks"]} == {"ok", "failed"}
    assert facts["checks"][0] == facts["checks"][0] | {"name": "before", "figure": "False"}


@pytest.mark.slow
@pytest.mark.parametrize("script", [("-m", "autopar", "doctor"), ("examples/first_gpu_run.py",)])
def test_the_doctor_passes_on_two_ranks(script: tuple[str, ...], tmp_path: Path) -> None:
    path = (str(ROOT / script[0]),) if len(script) == 1 else script
    result = launched(*path, "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    facts = json.loads((tmp_path / "doctor.json").read_text())
    assert facts["ranks"] == 2 and facts["counts"]["failed"] == 0 and facts["counts"]["ok"] >= 20
    names = [entry["name"] for entry in facts["checks"]]
    assert Page((tmp_path / "doctor.html").read_text()).cells[::4] == names
    assert "doctor.json and doctor.html" in result.stdout


def test_a_wrong_dropout_in_attention_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_kernels.attention(alone()).fault == ""
    monkeypatch.setattr(doctor_kernels, "seed_at", lambda *_: torch.tensor(3))
    assert doctor_kernels.attention(alone()).fault == "two seeds drop alike"
    monkeypatch.undo()
    kernels: Any = sys.modules["autopar.ops.sharded.attention"]
    monkeypatch.setattr(kernels, "_seeded", lambda device, seed: contextlib.nullcontext())
    fault = doctor_kernels.attention(alone()).fault
    assert "a seed drops otherwise a second time; the backward drops others" in fault


def test_the_mask_of_a_device_is_that_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    formula: Any = sys.modules["autopar.ops.sharded.dropout"]
    assert doctor_kernels._as_on_a_cpu(alone())
    plain, calls = formula._in_blocks, iter((0, 1))
    monkeypatch.setattr(
        formula, "_in_blocks", lambda x, seed, *more: plain(x, seed + next(calls), *more)
    )
    assert not doctor_kernels._as_on_a_cpu(alone())


def test_the_example_makes_the_checks_of_the_command() -> None:
    named = r"\b(?:exchanges|kernels|training)\.\w+"
    example = (ROOT / "examples" / "first_gpu_run.py").read_text()
    body = (ROOT / "autopar" / "tools" / "doctor" / "examination.py").read_text()
    assert set(re.findall(named, example)) == set(re.findall(named, body))
