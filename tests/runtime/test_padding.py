"""Vocabularies, heads and experts that no axis divides: exact, and as cheap as padded ones."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
import moe_models
import padded_models
from autopar.errors import LayoutError, PlanError
from autopar.ir.layout import I, Layout, S
from autopar.ir.mesh import Mesh
from autopar.ir.padding import Pad
from autopar.ir.program import Program
from autopar.passes.pass_manager import PassManager
from autopar.planner import padding, planner, tracing
from autopar.planner.plan_context import fingerprint
from autopar.planner.request import GridEP, Layouts, PlanRequest
from launch import launched
from padded_models import HEADS, WORDS

LAYOUTS = ["ddp", "fsdp", "megatron", "megatron-sp", "atp", "3d", "4d", "2.5d", "auto"]


@pytest.mark.slow_cells(
    "4-2.5d-*", "4-3d-*", "4-4d-*", "4-atp-*", "4-auto-*", "4-ddp-*", "4-fsdp-*",
    "4-megatron-bert", "4-megatron-gpt2", "4-megatron-llama", "4-megatron-sp-*", "4-megatron-t5",
    "8-*",
)  # fmt: skip
@pytest.mark.parametrize("name", [*padded_models.CASES])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_compute_what_one_does(name: str, layout: str, ranks: int) -> None:
    model, inputs = padded_models.CASES[name]()
    plan = autopar.plan(model, ranks, inputs, layout=layout, smaller=False)
    sizes = {(x.size, x.padded) for x in plan.padding}
    if layout == "megatron":
        assert (WORDS, -(-WORDS // ranks) * ranks) in sizes
        assert name not in ("gpt2", "bert") or (HEADS, 8) in sizes
        assert name != "llama" or ranks != 4 or (HEADS // 2, 4) in sizes
    if layout in ("ddp", "fsdp"):
        assert not sizes
    autopar.verify(model, None, inputs, layout=plan)


@pytest.mark.slow_cells("*")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "ranks"), [(12, 8), (25, 4)])
def test_heads_of_published_models(heads: int, ranks: int, layout: str) -> None:
    """GPT-2 has 12, GPT-2 XL 25."""
    model, inputs = padded_models.gpt2(heads=heads)
    plan = autopar.plan(model, ranks, inputs, layout=layout, smaller=False)
    if layout == "megatron":
        assert (heads, -(-heads // ranks) * ranks) in {(x.size, x.padded) for x in plan.padding}
    autopar.verify(model, None, inputs, layout=plan)


@pytest.mark.slow_cells("log softmax", "smoothing", "weights and smoothing")
@pytest.mark.parametrize("kind", ["smoothing", "weights", "weights and smoothing", "log softmax"])
def test_losses_that_sum_over_all_classes_leave_the_padding_out(kind: str) -> None:
    model = padded_models.Smoothed(words=4099, kind=kind)
    ids = torch.randint(0, 4099, (8, 32))
    plan = autopar.plan(model, 4, (ids, ids.roll(1, 1)), layout="megatron", smaller=False)
    assert {(x.size, x.padded) for x in plan.padding} <= {(4099, 4100)}
    assert plan.padding or kind == "log softmax"
    autopar.verify(model, None, (ids, ids.roll(1, 1)), layout=plan)


@pytest.mark.slow
def test_micro_batches_and_checkpointed_blocks() -> None:
    model, inputs = padded_models.gpt2()
    for options in ({"microbatches": 2}, {"recompute": "full"}):
        autopar.verify(model, 4, inputs, layout="megatron", **options)


class Words(nn.Module):
    """A language model without blocks; `apart`: its head has a weight of its own."""

    def __init__(self, words: int, apart: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, 64), nn.Linear(64, words, bias=False)
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)
        if not apart:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.slow_cells("*-auto-*", "apart-megatron-8", "tied-megatron-4", "tied-megatron-8")
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("layout", ["megatron", "auto"])
@pytest.mark.parametrize("apart", [False, True], ids=["tied", "apart"])
def test_a_vocabulary_of_50257_sends_what_50304_sends(ranks: int, layout: str, apart: bool) -> None:
    with torch.device("meta"):
        ids = torch.empty(8, 64, dtype=torch.int64)
        uneven, even = (
            autopar.plan(Words(words, apart), ranks, (ids, ids), layout=layout, smaller=False)
            for words in (50257, 50304)
        )
    assert uneven.comm_bytes == pytest.approx(even.comm_bytes, rel=0.01)
    assert uneven.step_seconds == pytest.approx(even.step_seconds, rel=0.01)
    assert not even.padding
    if layout == "megatron":
        assert {(x.size, x.padded) for x in uneven.padding} == {(50257, -(-50257 // ranks) * ranks)}


class Scored(Words):
    """Its head has a bias, and it returns its logits, too."""

    def __init__(self, words: int) -> None:
        super().__init__(words, apart=False)
        self.bias = nn.Parameter(torch.randn(words))

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embed(ids)) + self.bias
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_what_only_storage_splits_is_not_padded() -> None:
    """The logits of BERT's 30,522 words were sliced from 30,528, as the weight was stored in rows:
    "auto" took 0.3 % longer than "fsdp", which stores it in columns.
    """
    model, ids = Scored(1001), torch.randint(0, 1001, (8, 6))
    world, source = autopar.World.of(4), tracing.trace_model(model, (ids, ids))
    program = planner.analyse(PassManager(), source, PlanRequest(layout="auto"))

    def search(program: Program) -> Program:
        return planner.search_plan(program, world, PlanRequest(layout="fsdp"))

    result = padding.search_with_padding(search, program, world, PlanRequest(layout="auto"))
    assert result.plan is not None and not result.plan.padding and not result.padding
    stored = {name: str(layout) for name, layout in result.plan.stored.items()}
    assert stored["p_embed_weight"] == "data:S(1)" and stored["p_bias"] == "whole"
    plain = search(program).plan
    assert plain is not None and result.plan.bound <= result.plan.seconds
    assert result.plan.seconds == pytest.approx(plain.seconds)
    plan = dataclasses.replace(result.plan, fingerprint=fingerprint(source))
    autopar.verify(model, None, (ids, ids), layout=plan)


def test_a_parameter_without_padding_is_stored_in_parts_of_its_other_dim() -> None:
    mesh = Mesh.parse("x2.y2")
    rows, both = (S(0, 504), S(0, 252)), (S(0, 504), S(1, 32))
    of = padding._in_other_dims
    for states, expected in ((rows, (S(1, 32), S(1, 16))), (both, (S(1, 32), S(1, 16)))):
        stored = Layout(mesh, (1008, 64), states)
        assert of(stored, [Pad(0, 1, 1001, 1008, 1)]) == Layout(mesh, (1001, 64), expected)
    assert of(Layout(mesh, (1008, 64), both), []).shape == (1008, 64)
    bias = of(Layout(mesh, (1008,), rows), [Pad(0, 1, 1001, 1008, 1)])
    assert bias == Layout(mesh, (1001,), (I, I))
    with pytest.raises(LayoutError, match="splits no dim"):
        of(Layout(mesh, (1008, 6), rows), [Pad(0, 1, 1001, 1008, 1)])


@pytest.mark.slow
def test_sizes_that_divide_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "_searched_padded", lambda *_: pytest.fail("a second search"))
    model, inputs = padded_models.gpt2(words=512, heads=8)
    assert not autopar.plan(model, 4, inputs, layout="megatron").padding


@pytest.mark.slow
def test_the_plan_says_what_is_padded_and_a_file_keeps_it(tmp_path: Path) -> None:
    model, inputs = padded_models.gpt2()
    plan = autopar.plan(model, 4, inputs, layout="megatron", smaller=False)
    notes = " ".join(plan.notes)
    assert "the vocabulary of model.transformer.wte is padded" in notes
    assert "from 515 to 516" in notes and "from 6 to 8" in notes and "33 % more" in notes
    console = Console(file=io.StringIO(), width=400)
    console.print(plan.table())
    assert "from 515 to 516" in console.file.getvalue()
    assert plan.stored["p_model_transformer_wte_weight"].shape == (516, 48)
    plan.save(path := tmp_path / "plan.json")
    loaded = autopar.Plan.load(path)
    assert loaded == plan
    autopar.verify(model, None, inputs, layout=loaded)
    other, text = padded_models.gpt2(words=517)
    with pytest.raises(PlanError):
        autopar.verify(other, None, text, layout=loaded)


@pytest.mark.slow
def test_four_ranks_train_and_save_it(tmp_path: Path) -> None:
    facts = launched(tmp_path, 4, "states", script="padding_ranks.py")["states"]
    assert [515, 516] in facts["padding"] and [6, 8] in facts["padding"]
    assert facts["rows"] == [129, 129, 129, 128] and facts["shape"] == [515, 48]
    assert max(facts["steps"]) < 1e-9 and facts["norm"] < 1e-9
    for what in ("parameters", "state", "loaded", "taken", "fewer", "unshard"):
        assert facts[what] < 1e-9, what


def test_what_is_too_small_is_not_padded() -> None:
    """Two classes on eight ranks would be padded fourfold."""
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 2))
    try:
        plan = autopar.plan(model, 8, (torch.ones(8, 16),), layout="megatron")
    except LayoutError:
        return
    assert not plan.padding


@pytest.mark.slow_cells("2-ep-mixtral")
@pytest.mark.slow_cells("*-gpt_oss", "*-qwen3_moe", "4-*")
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, "ep"), (4, GridEP(2, 2)), (4, GridEP(expert=2, tensor=2))], ids=str
)
def test_three_experts_on_two_ranks(
    name: str, ranks: int, layout: Layouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank has one of them, and one of zeros that no router chooses."""
    monkeypatch.setattr(moe_models, "EXPERTS", 3)
    model, args, kwargs = getattr(moe_models, name)()
    plan = autopar.plan(model, ranks, args or kwargs, layout=layout, smaller=False)
    assert {(x.size, x.padded) for x in plan.padding} == {(3, 4)}
    autopar.verify(model, None, args or kwargs, layout=plan)
