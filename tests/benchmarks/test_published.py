"""Published runs: how a row is read, and a small one modelled."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.model import published

with published.ROWS.open(newline="") as _shown:
    HEADER = next(csv.reader(_shown))


def row(**facts: object) -> dict[str, str]:
    plain = {
        "source": "s", "model": "MPT-1b", "layers": 24, "hidden": 2048, "heads": 16, "vocab": 50368,
        "seq": 2048, "global_batch": 112, "gpus": 8, "gpu_type": "h100_80gb", "dtype": "amp_bf16",
        "sp/fsdp": "FULL_SHARD mbs7 accum2", "reported_metric": "MFU %", "value": 40,
    }  # fmt: skip
    return {name: str({**plain, **facts}.get(name, "")) for name in HEADER}


def written(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADER)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_every_shown_row_is_read() -> None:
    runs = published.read(published.ROWS)
    assert len(runs) == 78
    left_out = [run.model for run, why in runs if why]
    assert left_out == ["GPT-3 177B"] * 2
    for run, why in runs:
        assert 0.2 < run.mfu(run.published) < 0.7, run
        assert why or run.micro * run.parts * run.gpus // run.tensor == run.batch, run
        assert sum(level.ranks for level in published.world_of(run).levels) > 1


def test_parameters_are_those_of_the_models() -> None:
    """As their source counts them: MPT-7b 6.65, MPT-70b 64.9 billion."""
    sizes = {run.model: run.sizes for run, _ in published.read(published.ROWS)}
    assert published.parameters(sizes["MPT-7b"]) == pytest.approx(6.66e9, rel=0.05)
    assert published.parameters(sizes["MPT-70b"]) == pytest.approx(64.9e9, rel=0.01)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, {"micro": 7, "parts": 2, "shards": "full", "gpu": "H100", "reduced_in": "float32"}),
        ({"sp/fsdp": "SHARD_GRAD_OP mbs14 accum1"}, {"shards": "grad", "micro": 14, "parts": 1}),
        ({"sp/fsdp": "", "tp": 4, "dp": 2}, {"shards": "", "tensor": 4, "micro": 56}),
        ({"gpu_type": "a100_40gb", "dtype": "bf16"}, {"gpu": "A100", "reduced_in": ""}),
        ({"gpu_type": "A100"}, {"gpu": "A100-SXM4-80GB"}),
    ],
)
def test_a_row_says_how_it_ran(facts: dict[str, object], expected: dict[str, object]) -> None:
    run, why = published._run(row(**facts))
    assert not why and {name: getattr(run, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"sp/fsdp": ""}, "no parallel sizes"),
        ({"pp": 4}, "a pipeline"),
        ({"ep": 8}, "experts"),
        ({"dtype": "amp_fp8"}, "fp8"),
    ],
)
def test_what_the_model_does_not_know_is_left_out(facts: dict[str, object], why: str) -> None:
    assert published._run(row(**facts))[1] == why


def test_every_metric_gives_the_same_tokens() -> None:
    run, _ = published._run(row())
    tokens = run.published
    values_by_metric = {
        "TFLOP/s/GPU": 0.4 * 989.4, "tokens/s/GPU": tokens / 8, "tokens/s": tokens,
        "samples/s": tokens / 2048, "s/step": 112 * 2048 / tokens,
    }  # fmt: skip
    for metric, value in values_by_metric.items():
        converted = replace(run, metric=metric, value=value).published
        assert converted == pytest.approx(tokens, rel=1e-6), metric


@pytest.mark.slow
def test_a_small_run_is_modelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro-batches share one optimizer's step; more parts give a few more tokens a second."""
    few = row(layers=6, hidden=256, heads=4, vocab=1024, seq=256, global_batch=32)
    many = {**few, "global_batch": "128", "sp/fsdp": "FULL_SHARD mbs4 accum4"}
    unaccumulated = {**few, "sp/fsdp": "FULL_SHARD mbs4 accum1"}
    path = written(tmp_path / "rows.csv", unaccumulated, many, row(pp=2))
    out = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["published", "--rows", str(path), "--json", str(out)])
    assert published.main() == 0
    assert "2 rows: mean absolute error" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert set(report) >= {"mean_absolute_error", "bias", "tau"}
    first, second, third = report["rows"]
    assert 0 < first["modelled"] < second["modelled"] < 1.5 * first["modelled"]
    assert third["why"] == "a pipeline"


@pytest.mark.slow
def test_seconds_of_a_step_grow_by_the_layer() -> None:
    """Extrapolated from few layers, a step of eight layers is that of the plan of all eight."""
    run, _ = published._run(row(layers=8, hidden=512, heads=4, seq=512, global_batch=112))
    step, _ = published._planned(published._part(run), 8)
    (few, (a, _)), (more, (b, _)) = (
        (count, published._planned(published._part(run), count)) for count in published.LAYERS
    )
    assert a + (8 - few) * (b - a) / (more - few) == pytest.approx(step, rel=0.02)
    assert run.device.rate(torch.bfloat16) == 989.4e12


def test_tau_counts_pairs() -> None:
    assert published.kendall([(1, 1), (2, 2), (3, 3)]) == 1.0
    assert published.kendall([(1, 3), (2, 2), (3, 1)]) == -1.0
