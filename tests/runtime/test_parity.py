"""All ranks together compute what one device does: in lockstep in one process, in float64.

`autopar.verify` compares the loss, every gradient and the parameters after three AdamW steps with
the traced graph on one device; `test_one_rank_runs_the_original` compares the traced graph with the
model as it was written.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
import models
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.planner import exact_search, space
from autopar.planner.named_layouts import Constraint

LIMIT = 1e-9
LAYOUTS = ["auto", "ddp", "fsdp", "megatron"]
MODELS = ["gpt", "gpt2", "llama", "bert", "t5"]
MORE_MODELS = ["vit", "qwen3", "gemma2"]

pytestmark = pytest.mark.usefixtures("traced_once")
_examples: dict[str, models.Example] = {}


def example(name: str, **overrides: Any) -> tuple[nn.Module, Any]:
    """(model, inputs), one and the same for all tests of this process."""
    key = f"{name} {overrides}"
    if key not in _examples:
        _examples[key] = getattr(models, name)(**overrides)
    model, args, kwargs = _examples[key]
    return model, args or kwargs


def holds(name: str, ranks: int, layout: str, **overrides: Any) -> None:
    model, inputs = example(name, **overrides)
    check = autopar.verify(model, ranks, inputs, layout=layout)
    assert check.ranks == ranks
    assert check.nodes > 0
    assert check.loss_error < LIMIT
    assert check.grad_error < LIMIT
    assert check.step_error < LIMIT


def cells() -> Iterator[Any]:
    """Every model on 1 to 16 ranks in every layout; searching 16 takes half a minute a model."""
    for name, ranks, layout in itertools.product(MODELS, (1, 2, 4, 8, 16), LAYOUTS):
        long = ranks == 16 and layout == "auto" and name not in ("gpt", "t5")
        yield pytest.param(name, ranks, layout, marks=pytest.mark.slow if long else ())


@pytest.mark.slow_cells(
    "*-1-*", "*-2-*", "*-8-*", "bert-16-*", "bert-4-auto", "bert-4-ddp", "bert-4-fsdp",
    "gpt-16-auto", "gpt-16-ddp", "gpt-16-fsdp", "gpt-16-megatron", "gpt-4-auto", "gpt-4-ddp",
    "gpt-4-fsdp", "gpt-4-megatron", "gpt2-16-*", "gpt2-4-auto", "gpt2-4-ddp", "gpt2-4-fsdp",
    "gpt2-4-megatron", "llama-16-*", "llama-4-auto", "llama-4-ddp", "llama-4-fsdp",
    "llama-4-megatron", "t5-16-*", "t5-4-auto", "t5-4-ddp", "t5-4-fsdp", "t5-4-megatron",
)  # fmt: skip
@pytest.mark.parametrize(("name", "ranks", "layout"), cells())
def test_a_layout_equals_one_device(name: str, ranks: int, layout: str) -> None:
    holds(name, ranks, layout)


@pytest.mark.slow_cells("*-16-*", "*-4-auto", "gemma2-8-megatron", "qwen3-8-megatron")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, "auto"),
        (8, "megatron"),
        pytest.param(16, "auto", marks=pytest.mark.slow),
        (16, "fsdp"),
    ],
)
@pytest.mark.parametrize("name", MORE_MODELS)
def test_a_layout_of_more_models_equals_one_device(name: str, ranks: int, layout: str) -> None:
    holds(name, ranks, layout)


@pytest.mark.slow_cells("gpt-2.5d", "gpt-3d", "gpt-4d", "gpt-atp", "llama-*", "t5-*")
@pytest.mark.parametrize("layout", ["megatron-sp", "atp", "3d", "4d", "2.5d"])
@pytest.mark.parametrize("name", ["gpt", "llama", "t5"])
def test_parity_of_layouts_of_the_literature(name: str, layout: str) -> None:
    holds(name, 8, layout)


@pytest.mark.slow_cells(
    "bert-*", "gpt-auto", "gpt-ddp", "gpt-fsdp", "gpt2-auto", "gpt2-ddp", "gpt2-fsdp",
    "gpt2-megatron", "t5-*",
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt", "gpt2", "bert", "t5"])
def test_dropout_under_a_layout_equals_one_device(name: str, layout: str) -> None:
    """In train mode, at a rate of 0.2: what is dropped does not depend on the layout."""
    holds(name, 4, layout, dropout=0.2)


# -- a layout is what its name says ----------------------------------------------------------------
def stored(plan: Plan) -> list[tuple[str, Layout]]:
    return sorted(plan.stored.items())


@pytest.mark.slow_cells("gpt2", "llama", "t5")
@pytest.mark.parametrize("name", MODELS)
def test_ddp_leaves_parameters_unsharded_and_splits_the_batch(name: str) -> None:
    model, inputs = example(name)
    plan = autopar.plan(model, 4, inputs, layout="ddp", outputs="sharded")
    assert str(plan.mesh) == "data4"
    assert not any(layout.axes_of("S") for _, layout in stored(plan)), stored(plan)
    # A mask may stay whole: BERT looks its own up by index.
    split = {key: layout.states[0].kind == "S" for key, layout in plan.inputs.items()}
    assert split and all(is_split for key, is_split in split.items() if "mask" not in key), split
    assert {c.kind for c in plan.collectives} == {"all_reduce"}


@pytest.mark.slow_cells("gpt2")
@pytest.mark.slow_cells("bert", "llama", "t5")
@pytest.mark.parametrize("name", MODELS)
def test_fsdp_splits_every_parameter_and_the_batch(name: str) -> None:
    model, inputs = example(name)
    plan = autopar.plan(model, 4, inputs, layout="fsdp")
    assert str(plan.mesh) == "data4"
    # No plain shard of a fused bias is what its product wants: it may stay whole.
    whole = [name for name, layout in stored(plan) if layout.states[0].kind != "S"]
    assert all(name.endswith(("qkv_bias", "c_attn_bias")) for name in whole), stored(plan)
    assert {c.kind for c in plan.collectives if not c.backward} >= {"all_gather"}
    assert {c.kind for c in plan.collectives if c.backward} >= {"reduce_scatter"}


@pytest.mark.slow_cells("gpt2", "llama", "t5")
@pytest.mark.parametrize("name", MODELS)
def test_megatron_splits_products_and_never_the_batch(name: str) -> None:
    model, inputs = example(name)
    plan = autopar.plan(model, 4, inputs, layout="megatron")
    assert str(plan.mesh) == "tp4"
    assert not any(layout.axes_of("S") for layout in plan.inputs.values())
    program = plan.context.program
    products = [row for row in plan.rows if "tp" in row.layout]
    assert products, [row.layout for row in plan.rows]
    assert sum(layout.states[0].kind == "S" for _, layout in stored(plan)) >= len(stored(plan)) / 3
    assert program.plan is not None


# -- a world of one --------------------------------------------------------------------------------
def reached(outputs: Any) -> Tensor:
    """The loss in what a model of these tests returns."""
    loss = outputs.loss if hasattr(outputs, "loss") else outputs[-1]
    assert isinstance(loss, Tensor) and loss.dim() == 0
    return loss


def called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.slow_cells(
    "*-auto", "gemma2-megatron", "llama-megatron", "qwen3-megatron", "t5-megatron",
)  # fmt: skip
@pytest.mark.parametrize("layout", ["auto", "megatron"])
@pytest.mark.parametrize("name", MODELS + MORE_MODELS)
def test_one_rank_runs_the_original(name: str, layout: str) -> None:
    """No collective, no change of state: the traced graph, which computes what the model does."""
    model, inputs = example(name)
    par = autopar.parallelize(model, 1, inputs, layout=layout)
    called = [n.target for n in par.graph.graph.nodes if n.op == "call_function"]
    assert called == [n.target for n in par.graphs["trace"].graph.nodes if n.op == "call_function"]
    assert not [t for t in called if getattr(t, "__module__", "").startswith("autopar")]
    assert [
        e.kind
        for e in par._autopar.first.program.signature.inputs
        if e.kind in ("coordinate", "seed")
    ] == []
    same_step(model, par, inputs)


def same_step(model: nn.Module, par: nn.Module, inputs: Any) -> None:
    """Loss and gradients of both in float32, to its rounding."""
    for module in (model, par):
        module.zero_grad()
        reached(called(module, inputs)).backward()
    torch.testing.assert_close(
        reached(called(par, inputs)), reached(called(model, inputs)), rtol=1e-6, atol=0
    )
    expected, grads = gradients(model), gradients(par)
    model.zero_grad()
    assert grads.keys() == expected.keys()
    largest = max(float(g.norm()) for g in expected.values())
    for key, gradient in expected.items():
        assert float((grads[key] - gradient).norm()) <= 1e-5 * max(
            float(gradient.norm()), 1e-3 * largest
        ), key


# -- plans that no cost model would make -----------------------------------------------------------
class Drawn(Constraint):
    """At most four strategies of a node and four stored layouts of a parameter, by `draws`."""

    draws = random.Random()

    def joint(self, path: str, rule: Any, candidates: Sequence[Any]) -> list[Any]:
        return self.draws.sample(list(candidates), min(4, len(candidates)))

    def storage(self, name: str, path: str, candidates: Sequence[Any]) -> list[Any]:
        return self.draws.sample(list(candidates), min(4, len(candidates)))


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """From now on plans are random ones: few strategies to choose from, and every computation and
    conversion costs a random time.
    """

    def from_seed(seed: str, mesh: str) -> None:
        def candidates(layout: Any, ranks: int, program: Program) -> list[tuple[Mesh, Constraint]]:
            single = Mesh(), Constraint("auto")
            return [single if ranks == 1 else (Mesh.parse(mesh), Drawn("drawn"))]

        def convert(path: Any, *_: Any) -> tuple[float, float]:
            return 0.0, 1e-3 + weight * rng.random() if path else 0.0

        rng = Drawn.draws = random.Random(seed)
        weight = rng.choice([0.02, 0.3, 1.0])  # of conversions: the smaller, the more of them
        monkeypatch.setattr(exact_search, "node_costs", lambda *_: (rng.random(), []))
        monkeypatch.setattr(exact_search, "optimizer_seconds", lambda *_: rng.random())
        monkeypatch.setattr(exact_search, "path_terms", convert)
        monkeypatch.setattr(space, "candidates", candidates)

    return from_seed


@pytest.mark.slow_cells(
    "*-x4", "bert-x2.y2.z2", "bert-x2.y2", "gpt-x2.y2.z2", "gpt2-x2.y2.z2", "gpt2-x2.y2",
    "llama-x2.y2.z2", "llama-x2.y2", "t5-*",
)  # fmt: skip
@pytest.mark.parametrize("mesh", ["x4", "x2.y2", "x2.y2.z2"])
@pytest.mark.parametrize("name", MODELS)
def test_parity_of_random_plans(name: str, mesh: str, draw: Callable[[str, str], None]) -> None:
    """Right whatever was chosen: every change of state, digits in every order, three axes."""
    draw(f"{name} {mesh}", mesh)
    holds(name, Mesh.parse(mesh).size, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["x4", "x2.y2", "x4.y2", "x2.y4.z2", "w2.x2.y2.z2"])
@pytest.mark.parametrize("name", MODELS + MORE_MODELS)
def test_parity_of_many_random_plans(
    name: str, mesh: str, draw: Callable[[str, str], None]
) -> None:
    for seed in range(2):
        draw(f"{name} {mesh} {seed}", mesh)
        holds(name, Mesh.parse(mesh).size, "auto")
