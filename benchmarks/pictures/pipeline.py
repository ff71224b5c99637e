"""The picture of a pipeline: four ranks, eight micro-batches, 1F1B, a backward twice a forward."""

from __future__ import annotations

from autopar.cost.pipeline import StageSeconds, simulate_pipeline
from autopar.ir.pipeline_schedule import Pipeline, actions
from autopar.tools.report import pipeline as report


def picture() -> str:
    ranks = Pipeline(4)
    seconds = [StageSeconds(1e-3, 2e-3, end=0.8e-3, send=0.05e-3)] * ranks.stages
    step = simulate_pipeline(ranks, actions("1f1b", ranks, 8), seconds)
    return report.picture(step, "1f1b") + "\n"
