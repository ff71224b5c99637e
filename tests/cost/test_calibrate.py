"""Calibration: fits recover what made the numbers up, what is measured, files, real ranks."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from autopar.cli import main, options
from autopar.cost import calibration
from autopar.cost.algorithms import flat_algorithms, formula
from autopar.cost.calibration import (
    Times,
    cases,
    fit,
    lines,
    local_matmuls,
    measure,
    patterns,
    with_matmuls,
)
from autopar.cost.calibration.measure import Case, Matmul, actual_bytes
from autopar.cost.communication import collective_cost
from autopar.errors import WorldError
from autopar.ir.layout import Traffic
from autopar.ir.mesh import Mesh
from autopar.runtime import calibrate_on_ranks
from autopar.tools.decoders import Gpt, Sizes
from autopar.world import KINDS, Device, Level, Measured, World
from launch import environment

CORE = Device("core", {"float32": 4e10}, 8e9, 1e10)
FORMS = ("NN", "NT", "TN")  # whether the left or the right operand lies transposed
TRUE = World((Level(2, 6e8, 1e-4), Level(4, 5e7, 1e-3)), CORE, launch_s=3e-4)
GUESS = World((Level(2, 1.5e9, 2e-4), Level(4, 1.25e9, 8e-4)), CORE, launch_s=1e-3)


def modelled_times(world: World, factors: dict[str, float], noise: float = 0.0) -> Times:
    """What calibration would measure if the formulas were true, with relative noise."""
    rng = np.random.default_rng(0)
    seconds: dict[Case | Matmul, float] = {}
    for case in cases(world.ranks, calibration.CPU_SIZES):
        algorithm = formula(world, case.kind, case.pattern)
        exact = factors.get(case.kind, 1.0) * algorithm.seconds(actual_bytes(case))
        seconds[case] = exact * float(np.exp(noise * rng.standard_normal()))
    return Times(seconds, 1)


# -- fits ------------------------------------------------------------------------------------------
def test_a_line_recovers_alpha_and_beta() -> None:
    sizes = [2**12, 2**15, 2**18, 2**20, 2**24]
    start, rate = fit.line(sizes, [3e-4 + 2e-9 * size for size in sizes])
    assert start == pytest.approx(3e-4, rel=1e-9) and rate == pytest.approx(2e-9, rel=1e-9)


def test_a_line_never_starts_or_falls_below_nothing() -> None:
    assert fit.line([1, 2, 4], [1.0, 2.1, 4.4])[0] == 0
    start, rate = fit.line([1e3, 1e4, 1e5], [2e-3, 1.1e-3, 1e-3])
    assert rate == 0 and start == pytest.approx(1.2e-3, rel=0.1)


def test_a_line_minds_small_sizes_as_much_as_large_ones() -> None:
    """An ordinary least square would give up the first points for the last."""
    sizes, seconds = [1e3, 1e4, 1e5, 1e8], [1.001e-3, 1.01e-3, 1.1e-3, 0.15]
    start, _ = fit.line(sizes, seconds)
    assert start == pytest.approx(1e-3, rel=0.1)


def test_a_curve_finds_the_bend() -> None:
    sizes = [2.0**power for power in range(8, 25, 2)]
    exact = [2e-3 + 3e-8 * max(0.0, size - 2**16) for size in sizes]
    start, rate, bends = fit.curve(sizes, exact)
    assert (start, rate) == (pytest.approx(2e-3), 0)
    assert bends == ((2**16, pytest.approx(3e-8)),)
    noisy = [s * factor for s, factor in zip(exact, [1.1, 0.9, 1.1, 1, 0.9, 1.1, 1, 1, 1])]
    start, rate, bends = fit.curve(sizes, noisy)
    assert start == pytest.approx(2e-3, rel=0.1) and len(bends) < 5
    assert all(more > 0 for _, more in bends)


def test_a_curve_through_a_line_is_that_line() -> None:
    sizes = [2.0**power for power in range(8, 25, 2)]
    start, rate, bends = fit.curve(sizes, [3e-4 + 2e-9 * size for size in sizes])
    assert start == pytest.approx(3e-4, rel=0.01)
    assert rate + sum(more for _, more in bends) == pytest.approx(2e-9, rel=0.01)


def test_least_squares_without_negatives() -> None:
    """Held against trying every choice of columns that are 0."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows, wanted = rng.standard_normal((8, 4)), rng.standard_normal(8)
        best = float(np.square(wanted).sum())
        for chosen in itertools.product([False, True], repeat=4):
            some = np.flatnonzero(chosen)
            x = np.linalg.lstsq(rows[:, some], wanted, rcond=None)[0]
            if len(some) and x.min() >= 0:
                best = min(best, float(np.square(rows[:, some] @ x - wanted).sum()))
        solution = fit.nonnegative(rows, wanted)
        assert solution.min() >= 0
        assert float(np.square(rows @ solution - wanted).sum()) == pytest.approx(best, abs=1e-9)


def test_levels_and_factors_are_recovered() -> None:
    factors = {"all_gather": 1.3, "broadcast": 0.7}
    world = fit.fit_world(GUESS, lines(modelled_times(TRUE, factors)))
    for fitted, true in zip(world.levels, TRUE.levels, strict=True):
        assert fitted.bytes_per_s == pytest.approx(true.bytes_per_s, rel=1e-3)
        assert fitted.latency_s == pytest.approx(true.latency_s, rel=1e-3)
    assert world.launch_s == pytest.approx(TRUE.launch_s, rel=1e-3)
    assert world.factors == pytest.approx(
        {kind: factors.get(kind, 1.0) for kind in KINDS}, rel=1e-3
    )


def test_noise_shifts_them_little() -> None:
    world = fit.fit_world(GUESS, lines(modelled_times(TRUE, {}, noise=0.1)))
    for fitted, true in zip(world.levels, TRUE.levels, strict=True):
        assert fitted.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.15)


def test_what_was_not_measured_is_priced_by_the_fitted_formulas() -> None:
    """8 ranks as 2 × 2 × 2, over the outer and the inner axis: no single stride says that."""
    world = fit.fit_world(GUESS, lines(modelled_times(TRUE, {"all_reduce": 1.0})))
    traffic, mesh = Traffic("all_reduce", 10**6), Mesh.parse("a2.b2.c2")
    price = collective_cost(traffic, ("a", "c"), mesh, 4, world, flat_algorithms)
    true = collective_cost(traffic, ("a", "c"), mesh, 4, TRUE, flat_algorithms)
    assert price.algorithm.name == "ring"
    assert price.seconds == pytest.approx(true.seconds, rel=1e-3)


def test_what_was_measured_is_priced_as_measured() -> None:
    gather = Measured("all_gather", ((4, 2),), 4, 5e-3, 3e-9)
    alone = Measured("all_gather", ((4, 2),), 4, 1e-3, 1e-9, together=False)
    world = replace(TRUE, measured=(alone, gather))
    price = collective_cost(
        Traffic("all_gather", 10**6), ("a",), Mesh.parse("a4.b2"), 4, world, flat_algorithms
    )
    assert price.seconds == pytest.approx(5e-3 + 3e-9 * 4e6) and price.algorithm.name == "measured"
    assert hash(world) != hash(TRUE) and world.timing("all_gather", ((4, 2),), False) is alone


def test_gloos_scatters_are_exchanges_and_a_sum() -> None:
    exchange = Measured("all_to_all", ((4, 1),), 4, 1e-3, 1e-9, bends=((4096.0, 1e-9),))
    (modelled_scatter,) = calibration.scatter_of_measures(
        [exchange, replace(exchange, kind="broadcast")], GUESS.device
    )
    world = replace(GUESS, measured=(exchange, modelled_scatter))
    (scatter,), (whole,) = (
        flat_algorithms(world, kind, ((4, 1),)) for kind in ("reduce_scatter", "all_to_all")
    )
    for size in (100.0, 1e6):  # a rank takes so many bytes of each of four, and adds them up
        summing = 5 / 4 * size / GUESS.device.memory_bytes_per_s
        assert scatter.seconds(size) == pytest.approx(whole.seconds(4 * size) + summing)


def test_measured_matmuls_become_efficiencies() -> None:
    device = replace(CORE, launch_s=1e-6)
    exact = {Matmul(torch.float32, n, n, n): 2 * n**3 / 3e10 + 1e-6 for n in (64, 512)}
    exact[Matmul(torch.float32, 8, 8, 8)] = 2 * 8**3 / 1e9 + 1e-6
    world = with_matmuls(replace(TRUE, device=device), Times({**exact}, 1), 1e-6)
    assert world.device.flop_per_s["float32"] == pytest.approx(3e10)
    points = world.device.efficiency["float32"]
    assert [share for _, share in points] == pytest.approx([1 / 30, 1, 1])


# -- what is measured ------------------------------------------------------------------------------
def test_every_pattern_of_a_world() -> None:
    assert patterns(4) == [((2, 1),), ((4, 1),), ((2, 2),)]
    assert len(patterns(8)) == 6 and len(patterns(6)) == 5
    all_cases = cases(4, calibration.CPU_SIZES)
    assert len({case.unsharded_bytes for case in all_cases}) >= 5
    assert {case.kind for case in all_cases} == set(KINDS)
    assert {case.pattern for case in all_cases if not case.together} == {((2, 1),), ((2, 2),)}


def test_the_products_that_ranks_may_get() -> None:
    matmuls = local_matmuls([(torch.float32, 8, 6, 4)], 4)
    forward = {(p.m, p.n, p.k) for p in matmuls if p.form == "NT"}
    assert forward == {(2, 6, 4), (8, 6, 1), (4, 3, 4), (4, 6, 2), (8, 3, 2)}
    assert {(p.m, p.n, p.k) for p in matmuls if p.form == "NN"} == {
        (m, k, n) for m, n, k in forward
    }
    assert {(p.m, p.n, p.k) for p in matmuls if p.form == "TN"} == {
        (n, k, m) for m, n, k in forward
    }
    assert len(matmuls) == 3 * len(forward)


@pytest.mark.parametrize("form", FORMS)
def test_forms_lie_as_they_say(form: str) -> None:
    """Each run of a product has operands and a result of its own."""
    left, right, results = torch.randn(42), torch.randn(70), torch.zeros(30)
    wanted = [
        (a.view(7, 3).t() if form[0] == "T" else a.view(3, 7))
        @ (b.view(5, 7).t() if form[1] == "T" else b.view(7, 5))
        for a, b in zip(left.split(21), right.split(35), strict=True)
    ]
    for copied in measure.COPIES:
        shape = Matmul(torch.float32, 3, 5, 7, form, copied)
        run = measure.time_matmul(shape, left, right, results)
        for expected in (*wanted, wanted[0]):
            torch.testing.assert_close(run(), expected)
        torch.testing.assert_close(results.view(2, 3, 5), torch.stack(wanted))
        assert shape.flops == 2 * 3 * 5 * 7 and shape.moved_bytes == 4 * (21 + 35 + 15)


def test_operands_are_taken_in_turn() -> None:
    operands = measure.in_turn(torch.arange(15.0), 2, 3)
    first, second = torch.arange(12.0).view(2, 2, 3)
    for wanted in (first, second, first):
        assert torch.equal(next(operands), wanted)


def test_short_cases_are_visited_often_and_what_plans_do_not_run_less() -> None:
    case = Case("all_gather", ((2, 1),), True, 4096)
    short, long = measure.Often(3, 1e-4), measure.Often(1, 0.3)
    assert calibration._visits(case, short) == 12 and calibration._visits(case, long) == 1
    assert calibration._visits(case._replace(together=False), short) == 3


def test_rounds_visit_each_case_as_often_as_requested() -> None:
    shares: list[float] = []
    times = measure.in_rounds([1, 3], lambda index: float(index), 1e-4, shares.append)
    assert len(times[1]) == 3 * len(times[0]) and set(times[1]) == {1.0}
    assert shares == sorted(shares)


def test_forms_of_matmuls_are_timed_with_copies() -> None:
    shapes = [Matmul(torch.float32, 64, 32, 16, form) for form in FORMS]
    shares: list[float] = []
    timed = calibration.time_kernel_choices(
        shapes, torch.device("cpu"), 0.1, lambda share, doing: shares.append(share)
    )
    assert [(f.m, f.n, f.k, f.form) for f in timed] == [(64, 32, 16, f) for f in FORMS]
    assert all(min(f.as_it_is_s, f.left_copied_s, f.right_copied_s) > 0 for f in timed)
    assert shares == sorted(shares)


def test_a_long_look_at_short_work() -> None:
    """So that ranks which share a core take turns."""
    runs: list[int] = []
    often = measure.Often(3, 1e-2)
    measure.shared_seconds(lambda: runs.append(1), often, torch.device("cpu"))
    assert len(runs) == 10


@pytest.mark.slow
def test_one_process_calibrates_its_device_alone() -> None:
    shares: list[float] = []
    world = calibration.calibrate(
        World.of(1), [], seconds=0.2, progress=lambda share, _: shares.append(share)
    )
    assert world.measured == () and world.device.launch_s > 0
    assert world.device.op_bytes_per_s > 0
    assert len(world.device.efficiency["float32"]) >= 5
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1)


def test_other_ranks_than_the_world_has() -> None:
    with pytest.raises(WorldError, match="has 8 ranks, 1 are running"):
        calibration.calibrate(TRUE)


# -- files -----------------------------------------------------------------------------------------
CALIBRATED = fit.fit_world(GUESS, lines(modelled_times(TRUE, {}))[:4])


def test_a_calibrated_world_comes_back_from_its_file(tmp_path: Path) -> None:
    CALIBRATED.save(tmp_path / "world.json")
    again = World.load(tmp_path / "world.json")
    assert again == CALIBRATED and hash(again) == hash(CALIBRATED)
    assert "calibrated" in str(again)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "sum", r"measured\.0: Measured\.kind names 'sum'; the collectives are all_gather"),
        ("pattern", [[2, 0]], r"measured\.0: Measured\.pattern is \(\(2, 0\),\)"),
        ("pattern", [[2, 8]], r"Measured: .* reaches over 9 ranks, the world has 8"),
        ("ranks", 3, r"measured\.0: Measured\.ranks is 3, its pattern is \(\(2, 1\),\)"),
        ("start_s", -1, r"measured\.0: Measured\.start_s is -1\.0"),
        ("s_per_byte", "slow", r"measured\.0\.s_per_byte: .*number \(it is 'slow'\)"),
        ("bytes", 1, r"measured\.0\.bytes: "),
    ],
)
def test_a_bad_table_is_refused(field: str, value: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "world.json"
    CALIBRATED.save(file)
    data = json.loads(file.read_text())
    data["measured"][0][field] = value
    file.write_text(json.dumps(data))
    with pytest.raises(WorldError, match=message.replace("Measured: ", "measured: ")):
        World.load(file)


def test_what_is_measured_twice_is_refused() -> None:
    gather = Measured("all_gather", ((2, 1),), 2, 0.0, 1e-9)
    with pytest.raises(WorldError, match="is there twice"):
        replace(TRUE, measured=(gather, replace(gather, start_s=1.0)))


# -- the command line ------------------------------------------------------------------------------
@pytest.mark.slow
def test_plan_takes_the_world_that_calibrate_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main.app, ["calibrate", "--seconds", "1"])
    assert result.exit_code == 0, result.output
    assert "saved    as world.json" in result.stdout and "products … " in result.stderr
    world = World.load("world.json")
    assert options.read_world(None, None) == replace(world, name="world.json")
    assert options.read_world(None, 2) == World.of(2)


def test_a_folder_that_is_not_there_is_said_before_measuring(tmp_path: Path) -> None:
    result = CliRunner().invoke(main.app, ["calibrate", "--save", str(tmp_path / "no" / "w.json")])
    assert result.exit_code == 2 and "there is no folder" in result.stderr


def launched(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "-m", "autopar", "calibrate", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_two_real_ranks(tmp_path: Path) -> None:
    result = launched("targets:tiny", "--seconds", "4", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    world = World.load(tmp_path / "world.json")
    assert world.ranks == 2 and world.backend == "gloo"
    assert {m.kind for m in world.measured} == set(KINDS) and 0 <= world.contention <= 1
    assert world.device.forms
    assert all(m.pattern == ((2, 1),) and m.start_s > 0 for m in world.measured)
    assert result.stdout.count("saved") == 1 and "contention … 100%" in result.stderr


@pytest.mark.slow
def test_what_fails_on_all_ranks_is_said_once(tmp_path: Path) -> None:
    result = launched("targets:broken", "--seconds", "4", folder=tmp_path)
    assert result.returncode != 0
    assert result.stderr.count("no weights today") == 1
    assert not (tmp_path / "world.json").exists()


@pytest.mark.slow
def test_a_models_own_products() -> None:
    """qkv, out, up, down, head: as (rows, columns, inner) of one device; attention's are none."""
    with torch.device("meta"):
        model = Gpt(Sizes("gpt", layers=2, width=64, heads=4, vocabulary=256, context=8))
        tokens = torch.zeros(2, 8, dtype=torch.int64)
    shapes = {
        (m, n, k)
        for _, m, n, k in calibrate_on_ranks.unsharded_work(model, (tokens, tokens)).matmuls
    }
    width = model.head.in_features
    assert (16, 3 * width, width) in shapes and (16, width, 4 * width) in shapes
    assert all(m == 16 for m, _, _ in shapes)
