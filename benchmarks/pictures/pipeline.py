"""The pictures of pipelines: four ranks, eight micro-batches, a backward twice a forward."""

from __future__ import annotations

from autopar.cost.pipeline import StageSeconds, simulate_pipeline
from autopar.ir.pipeline_schedule import actions, pipeline_of
from autopar.tools.report import pipeline as report


def picture(schedule: str = "1f1b", rounds: int = 1) -> str:
    """Return the picture of a schedule; both parts of a backward take as long as a forward."""
    ranks = pipeline_of(schedule, 4, rounds)
    unit = 1e-3 / rounds
    own = StageSeconds(unit, 2 * unit, end=0.8e-3 / rounds, send=0.05e-3, inputs=unit, weights=unit)
    step = simulate_pipeline(ranks, actions(schedule, ranks, 8), [own] * ranks.stages)
    return report.picture(step, schedule) + "\n"
