"""Pipelines: the numbers of one device in every schedule, on simulated and on real ranks."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
import models
from autopar import Grid4D, Grid25D, GridEP, Stages
from launch import launched
from moe_models import mixtral
from priced import slow_between
from stage_models import apart_towers, gpt
from stages_ranks import DROPOUT, FAULTS, RANKS, STEPS, example

VERIFIED: list[tuple[Stages, int, int]] = [
    (Stages(2, "ddp"), 2, 4),
    (Stages(2, "fsdp"), 4, 4),
    (Stages(2, "megatron", "interleaved", 2), 4, 4),
    (Stages(4, "ddp", "gpipe"), 4, 8),
    (Stages(2, "fsdp", "looped-bfs", 2), 4, 4),
    (Stages(2, Grid4D(x=2, z=2)), 8, 4),
    (Stages(2, Grid25D(q=2)), 8, 4),
    (Stages(4, "fsdp"), 8, 4),
    (Stages(4, Grid4D(x=2, y=2)), 16, 4),
]
IN_HALVES: list[tuple[Stages, int, int]] = [
    (Stages(2, "ddp", "zero-bubble"), 2, 4),
    (Stages(2, "fsdp", "zero-bubble"), 4, 4),
    (Stages(2, "megatron", "zero-bubble", 2), 4, 4),
    (Stages(2, "ddp", "zbv", 2), 4, 4),
    (Stages(2, "megatron", "zbv", 2), 4, 4),
    (Stages(2, "fsdp", "dualpipev", 2), 4, 4),
    (Stages(4, "ddp", "zero-bubble"), 4, 8),
    (Stages(4, Grid4D(x=2), "zero-bubble"), 8, 8),
    (Stages(2, Grid25D(q=2), "zero-bubble"), 8, 4),
]
QUICK = str(VERIFIED[1][0]), str(IN_HALVES[0][0])
TOLERANCE = 1e-9
# sends that a rank may hold on to at a time, of the twice as many of a step
LEAVING = {"ddp of 2": 2, "zero-bubble of 2": 2, "4 stages zero-bubble": 4}


@pytest.mark.parametrize(
    ("layout", "ranks", "microbatches"),
    [
        pytest.param(
            *case, marks=() if str(case[0]) in QUICK else pytest.mark.slow, id=str(case[0])
        )
        for case in (*VERIFIED, *IN_HALVES)
    ],
)
def test_a_step_in_stages_is_that_of_one_device(
    layout: Stages, ranks: int, microbatches: int
) -> None:
    model, inputs = gpt()
    check = autopar.verify(model, ranks, inputs, layout, microbatches=microbatches)
    assert max(check.loss_error, check.grad_error, check.step_error) < TOLERANCE
    assert check.ranks == ranks


# ranks, micro-batches, blocks, rows
MANY: list[tuple[Stages, int, int, int, int]] = [
    (Stages(32, "ddp"), 32, 32, 32, 32),
    (Stages(64, "ddp"), 64, 64, 64, 64),
    (Stages(64, "ddp", "gpipe"), 64, 64, 64, 64),
    (Stages(64, "ddp", "zero-bubble"), 64, 64, 64, 64),
    (Stages(32, "ddp", "interleaved", 2), 32, 32, 64, 32),
    (Stages(32, "ddp", "zbv", 2), 32, 32, 64, 32),
    (Stages(16, "fsdp", "dualpipev", 2), 32, 32, 32, 64),
    (Stages(16, Grid4D(x=2, y=2)), 64, 16, 16, 16),
    (Stages(8, "fsdp"), 64, 16, 8, 128),
    (Stages(32, "megatron", "zero-bubble"), 64, 8, 32, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks", "microbatches", "blocks", "rows"),
    [pytest.param(*case, id=str(case[0])) for case in MANY],
)
def test_a_step_on_many_ranks_is_that_of_one_device(
    layout: Stages, ranks: int, microbatches: int, blocks: int, rows: int
) -> None:
    model, inputs = gpt(layers=blocks, rows=rows)
    check = autopar.verify(model, ranks, inputs, layout, microbatches=microbatches)
    assert max(check.loss_error, check.grad_error, check.step_error) < TOLERANCE
    assert check.ranks == ranks


SLICED: list[tuple[Stages, dict[str, Any]]] = [
    (Stages(2, "megatron"), {}),
    (Stages(2, "megatron", "zero-bubble"), {}),
    (Stages(2, "megatron"), {"recompute": "full"}),
    (Stages(2, "megatron"), {"recompute": "selective"}),
    (Stages(2, "megatron", "interleaved", 2), {}),
    (Stages(2, Grid4D(x=2, y=2)), {}),
    (Stages(2, Grid4D(y=2, z=2)), {}),
]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(*SLICED[0]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLICED[1:]),
    ],
    ids=str,
)
def test_border_tensors_in_slices(layout: Stages, options: dict[str, Any]) -> None:
    model, inputs = gpt()
    how: dict[str, Any] = {"layout": layout, "microbatches": 4, **options}
    assert autopar.plan(model, slow_between(4, 2), inputs, **how).slices_borders
    check = autopar.verify(model, slow_between(4, 2), inputs, **how)
    assert max(check.loss_error, check.grad_error, check.step_error) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(("name", "count"), [("gpt2", 2), ("t5", 4)])
def test_border_tensors_in_slices_of_models_of_transformers(
    name: str, count: int, schedule: str
) -> None:
    world = slow_between(2, count)
    model, args, kwargs = getattr(models, name)()
    how: dict[str, Any] = {"layout": Stages(count, "megatron", schedule), "microbatches": 4}
    assert autopar.plan(model, world, args or kwargs, **how).slices_borders
    check = autopar.verify(model, world, args or kwargs, **how)
    assert max(check.loss_error, check.grad_error, check.step_error) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("recompute", ["full", "selective", "gathers"])
def test_blocks_that_run_again_in_stages(recompute: Any, schedule: str) -> None:
    model, inputs = gpt()
    layout = Stages(2, "fsdp", schedule)
    autopar.verify(model, 4, inputs, layout, microbatches=4, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_dropout_in_stages_is_that_of_one_device(schedule: str) -> None:
    model, inputs = gpt(dropout=0.3)
    autopar.verify(model, 4, inputs, Stages(2, "fsdp", schedule), microbatches=4)


@pytest.mark.slow
def test_a_metric_before_the_loss_is_no_loss() -> None:
    class Counting(models.GptWithLogits):
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
            logits, loss = super().forward(tokens, labels)
            return (logits.argmax(-1) == labels).double().mean(), loss

    _, inputs = gpt()
    autopar.verify(Counting(layers=4).double(), 2, inputs, Stages(2, "ddp"), microbatches=4)


@pytest.mark.slow
def test_two_stacks_are_cut_in_both() -> None:
    model, inputs = apart_towers()
    autopar.verify(model, 4, inputs, Stages(4, "ddp"), microbatches=4)
    autopar.verify(model, 4, inputs, Stages(2, "ddp", "interleaved", 3), microbatches=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize(
    ("within", "ranks"), [("ddp", 4), ("fsdp", 4), ("megatron", 4), (Grid4D(x=2, z=2), 8)], ids=str
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_models_of_transformers_in_stages(
    name: str, within: Any, ranks: int, schedule: str
) -> None:
    model, args, kwargs = getattr(models, name)()
    layout = Stages(2, within, schedule)
    check = autopar.verify(model, ranks, args or kwargs, layout, microbatches=2)
    assert max(check.loss_error, check.grad_error, check.step_error) < TOLERANCE


@pytest.mark.slow
def test_experts_in_stages_equal_one_device() -> None:
    model, args, inputs = mixtral(layers=2)
    layout = Stages(2, GridEP(expert=2))
    autopar.verify(model, 4, inputs or args, layout, microbatches=2)


def test_a_gradient_that_is_not_summed_over_stages_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime.training.stages_run import StagesRun

    monkeypatch.setattr(StagesRun, "_sum_over_stages", lambda *_: None)
    model, inputs = gpt(layers=2)
    with pytest.raises(autopar.VerificationError, match=r"stages \(1f1b\).*p_token_weight"):
        autopar.verify(model, 2, inputs, Stages(2, "ddp"), microbatches=4)


@pytest.mark.slow
def test_a_backward_that_runs_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime.training import stages_run

    before = stages_run._Step.backward

    def twice(self: Any, action: Any) -> None:
        before(self, action)
        self._owner.backwards[action] += 1

    monkeypatch.setattr(stages_run._Step, "backward", twice)
    model, inputs = gpt()
    with pytest.raises(autopar.VerificationError, match="each is to run once a step"):
        autopar.verify(model, 2, inputs, Stages(2, "ddp"), microbatches=4)


@pytest.mark.slow
def test_gradients_of_weights_that_are_left_out_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime.training import stages_run

    before = stages_run._Step.weights

    def skipped(self: Any, action: Any) -> None:
        if action.microbatch == 2:
            self._owner.backwards[action] += 1
            return
        before(self, action)

    monkeypatch.setattr(stages_run._Step, "weights", skipped)
    model, inputs = gpt(layers=2)
    with pytest.raises(autopar.VerificationError, match=r"stages \(zero-bubble\)"):
        autopar.verify(model, 2, inputs, Stages(2, "ddp", "zero-bubble"), microbatches=4)


# -- plans -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_plan_says_its_stages_and_its_bubble(tmp_path: Path) -> None:
    model, inputs = gpt()
    plan = autopar.plan(model, 4, inputs, Stages(2, "fsdp"), microbatches=4)
    assert plan.stage_starts == ("blocks.2",) and plan.ranks == 4 and str(plan.mesh) == "data2"
    notes = " ".join(plan.notes)
    assert re.search(r"2 stages.*ranks wait \d+% \(the bubble\)", notes)
    assert "stage 1 (2 blocks, blocks.2 to blocks.3)" in notes and "1 in flight" in notes
    plan.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    assert read == plan and read.schedule == "1f1b"


def test_a_timeline_has_a_track_for_every_rank_of_the_pipeline(tmp_path: Path) -> None:
    model, inputs = gpt(layers=2)
    plan = autopar.plan(model, 2, inputs, Stages(2, "ddp", "zero-bubble"), microbatches=4)
    step = plan.timeline()
    assert step.seconds == plan.step_seconds and not step.totals()
    names = [span.name for span in step.spans if span.track == "rank 1"]
    assert names[:3] == ["F1.0", "I1.0", "F1.1"] and names[-1] == "sums, optimizer"
    assert {s.track for s in step.spans} == {"rank 0", "rank 1", "rank 0 sends", "rank 1 sends"}
    assert f"ranks wait {step.other_seconds / step.seconds:.0%}" in " ".join(plan.notes)
    step.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(step.spans)
    assert step.table().row_count == 2


@pytest.mark.slow
def test_a_report_draws_the_pipeline_and_says_how_many_ranks_there_are(tmp_path: Path) -> None:
    model, inputs = gpt()
    plan = autopar.plan(model, 4, inputs, Stages(2, "fsdp"), microbatches=4)
    plan.report(path := tmp_path / "report.html", "a GPT", inputs)
    page = path.read_text()
    assert "a GPT on 4 ranks" in page and "2 stages were asked for" in page
    assert "<svg" in page and "backward B1.3" in page and "best named layout" not in page


@pytest.mark.slow
def test_a_plan_from_a_file_is_verified(tmp_path: Path) -> None:
    model, inputs = gpt()
    plan = autopar.plan(model, slow_between(2, 2), inputs, Stages(2, "megatron"), microbatches=2)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.slices_borders
    autopar.verify(model, None, inputs, loaded)


@pytest.mark.slow
def test_the_number_of_stages_is_found() -> None:
    model, inputs = gpt()
    best = autopar.plan(model, 4, inputs, Stages(within="ddp"), microbatches="auto")
    seconds = []
    for count in (2, 4):
        for microbatches in (2, 4, 8):
            with contextlib.suppress(autopar.LayoutError):  # 8 have a row each, not one a rank
                layout = Stages(count, "ddp")
                plan = autopar.plan(model, 4, inputs, layout, microbatches=microbatches)
                seconds.append(plan.step_seconds)
    assert len(seconds) == 5 and best.step_seconds == pytest.approx(min(seconds))


@pytest.mark.slow
def test_more_micro_batches_leave_a_smaller_bubble() -> None:
    model, inputs = gpt()
    plans = [autopar.plan(model, 2, inputs, Stages(2, "ddp"), microbatches=n) for n in (2, 8)]
    matches = [re.search(r"ranks wait (\d+)%", " ".join(plan.notes)) for plan in plans]
    waits = [int(match[1]) for match in matches if match is not None]
    assert len(waits) == 2 and waits[0] > waits[1]


@pytest.mark.slow_cells("within")
@pytest.mark.parametrize(
    ("layout", "options", "error", "words"),
    [
        (Stages(2, "fsdp"), {}, autopar.PlanError, "a step has 1: plan with microbatches=8"),
        (Stages(3, "fsdp"), {"microbatches": 4}, autopar.LayoutError, "3 stages do not divide 4"),
        (Stages(2, "fsdp", "zb"), {"microbatches": 4}, autopar.PlanError, "unknown schedule 'zb'"),
        (Stages(2, "fsdp", "zbv"), {"microbatches": 4}, autopar.PlanError, "2 stages a rank"),
        (
            Stages(2, "ddp", "dualpipev", 2),
            {"microbatches": 2},
            autopar.PlanError,
            "at least as many microbatches as stages, but got 2",
        ),
        ({"blocks.*": Stages(2, "fsdp")}, {}, autopar.LayoutError, "is no layout: a name"),
        (Stages(1, "fsdp"), {"microbatches": 4}, autopar.LayoutError, "has 2 or more ranks"),
        (Stages(2, "fsd"), {"microbatches": 4}, autopar.LayoutError, "unknown layout 'fsd'"),
        (
            Stages(2, "fsdp"),
            {"microbatches": 4, "memory": 20_000},
            autopar.PlanError,
            "no plan fits",
        ),
    ],
    ids=[
        "no micro-batches",
        "divisor",
        "schedule",
        "rounds",
        "micro-batches",
        "in a dict",
        "one",
        "within",
        "memory",
    ],
)
def test_stages_that_cannot_be_are_refused(
    layout: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model, inputs = gpt()
    with pytest.raises(error, match=words):
        autopar.plan(model, 4, inputs, layout, **options)


def test_float16_in_stages_is_refused() -> None:
    model, inputs = gpt(layers=2)
    with pytest.raises(autopar.PlanError, match=r"in float16, .*GradScaler: .*bfloat16"):
        autopar.plan(model.half(), 2, inputs, Stages(2, "ddp"), microbatches=2)


def test_torch_compile_has_no_stages() -> None:
    with pytest.raises(autopar.LayoutError, match="every rank holds all parameters"):
        autopar.backend(layout=Stages(2, "fsdp"))


# -- on real ranks ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ranks", "tasks"),
    [
        (2, ("ddp of 2", "open of 2")),
        pytest.param(4, ("fsdp 1f1b",), marks=pytest.mark.slow),
        pytest.param(4, ("megatron interleaved", "4 stages gpipe"), marks=pytest.mark.slow),
        pytest.param(4, ("megatron in slices",), marks=pytest.mark.slow),
        pytest.param(4, ("ddp looped-bfs", "4d"), marks=pytest.mark.slow),
        pytest.param(8, ("2.5d", "fsdp of 8"), marks=pytest.mark.slow),
        pytest.param(2, ("zero-bubble of 2",), marks=pytest.mark.slow),
        *(
            pytest.param(4, (f"zero-bubble {within}{model}",), marks=pytest.mark.slow)
            for within in ("ddp", "fsdp", "megatron")
            for model in ("", " llama")
        ),
        pytest.param(4, ("zbv ddp", "dualpipev fsdp"), marks=pytest.mark.slow),
        pytest.param(4, ("4 stages zero-bubble",), marks=pytest.mark.slow),
        *(pytest.param(count, (task,), marks=pytest.mark.slow) for task, count in RANKS.items()),
    ],
    ids=str,
)
def test_three_steps_on_gloo_are_those_of_one_device(
    tmp_path: Path, ranks: int, tasks: tuple[str, ...]
) -> None:
    everyone = launched(tmp_path, ranks, *tasks, script="stages_ranks.py", seconds=900)
    for task in tasks:
        names = {name for facts in everyone for name in facts[task]["names"]}
        assert names == {name for name, _ in example(task)[0].named_parameters()}
        for facts in everyone:
            figures = facts[task]
            assert figures["apart"] < 1e-9, (task, figures["worst"], figures["apart"])
            assert len(figures["names"]) < len(names), "a rank holds its stages' parameters alone"
            assert figures["evaluation of 8"] < 1e-9 and figures["evaluation of 4"] < 1e-9
            assert figures["leaving"] <= LEAVING.get(task, figures["leaving"])
            assert figures["layout"].count("Stages(") == 1, "a stage has no stages of its own"
            assert figures["slices"] == ("slices" in task)


@pytest.mark.slow
def test_dropout_on_gloo_is_that_without_stages(tmp_path: Path) -> None:
    for facts in launched(tmp_path, 4, *DROPOUT, script="stages_ranks.py", seconds=900):
        for task in DROPOUT:
            assert facts[task]["apart"] < TOLERANCE, (task, facts[task])
            assert len(set(facts[task]["losses"][:STEPS])) == STEPS, "every step draws anew"


@pytest.mark.parametrize(
    "task",
    [pytest.param(t, marks=() if t == "faults zero-bubble" else pytest.mark.slow) for t in FAULTS],
)
def test_every_rank_says_why_a_pipeline_cannot_be(tmp_path: Path, task: str) -> None:
    """The same error on all ranks; then the next step is that of one device."""
    everyone = [facts[task] for facts in launched(tmp_path, 2, task, script="stages_ranks.py")]
    (schedule, _), (other, _), odd = FAULTS[task]
    says = {
        "micro-batches": rf"(Input|Plan)Error: .*(microbatches is {odd}|{odd} micro)",
        "blocks": "stages of a model with . repeated blocks: a stage has at least one",
        "no parameters": "stage . of ., from blocks.. on, has no parameter that is trained",
        "schedule": f"RankError: .*schedule='{schedule}'.* on rank 0, .*'{other}'.* on rank 1",
        "count of micro-batches": "RankError: .*microbatches is 4 on rank 0, 8 on rank 1",
        "memory": "PlanError: no plan fits",
        "plan": "RankError: the ranks hold different plans",
    }
    for kind, text in says.items():
        assert len({facts[kind] for facts in everyone}) == 1, kind
        assert re.search(text, everyone[0][kind]), (kind, everyone[0][kind])
    for facts in everyone:
        assert facts["8 rows"] < TOLERANCE and facts["6 rows"] < TOLERANCE, facts


@pytest.mark.slow
def test_what_goes_on_around_training_in_stages(tmp_path: Path) -> None:
    for of_rank in launched(tmp_path, 4, "around", script="stages_ranks.py", seconds=900):
        facts = of_rank["around"]
        assert facts.pop("step") == 1 and facts.pop("stats")
        assert "Trainer has a model in stages" in facts.pop("refused")
        assert "was frozen since the model was parallelized in stages" in facts.pop("frozen")
        assert max(facts.values()) < 1e-9, facts
