"""Arguments that cannot be meant: each call says which, what it is, and what it may be."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from typer.testing import CliRunner

import autopar
from autopar import AutoparError, Grid2D, InputError, LayoutError, PlanError, TraceError, World
from autopar.cli import main
from autopar.cost.memory import with_reserve
from autopar.world import Level


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 1.0) -> Tensor:
        z = self.down(self.up(x).tanh()) * scale
        return z.square().mean() if y is None else (z - y).square().mean()


def rows() -> Tensor:
    return torch.arange(128.0).view(8, 16) / 128


def said(work: Callable[[], Any], kind: type[Exception] = AutoparError) -> str:
    with pytest.raises(kind) as caught:
        work()
    assert len(str(caught.value)) < 600, caught.value
    return str(caught.value)


PLAIN = {"plan": autopar.plan, "verify": autopar.verify, "parallelize": autopar.parallelize}
FACE = [
    ("plan verify parallelize", "layout", None, "it is to be a name (auto, ddp"),
    ("plan verify parallelize", "layout", ["ddp"], "layout is ['ddp']: it is to be a name"),
    ("plan verify parallelize", "layout", Grid2D, "it is a class: give it sizes"),
    ("plan parallelize", "layout", Grid2D(True, 2), "its d1 is no whole number of ranks"),
    ("plan parallelize", "layout", {1: "ddp"}, "its key 1 is no pattern of module paths"),
    ("plan parallelize", "layout", {"up": 3}, "of 'up' it is to be a name"),
    ("plan parallelize", "optimizer", -3, "optimizer is -3: it is to be one of adamw"),
    ("plan parallelize", "optimizer", math.nan, "optimizer is nan"),
    ("plan parallelize", "optimizer", math.inf, "optimizer is inf"),
    ("plan parallelize", "optimizer", "adamww", "did you mean 'adamw'?"),
    ("plan parallelize", "optimizer", torch.optim.AdamW, "optimizer is <class "),
    ("plan parallelize", "memory", "80GiB", "memory is '80GiB': it is 'auto' or bytes"),
    ("plan parallelize", "memory", math.nan, "memory is nan"),
    ("plan parallelize", "memory", math.inf, "memory is inf"),
    ("plan parallelize", "memory", True, "memory is True"),
    ("plan parallelize", "overlap", "chunk", "overlap is 'chunk': it is to be True, False"),
    ("plan parallelize", "overlap", None, "overlap is None"),
    ("plan parallelize", "overlap", ("chunkk",), "overlap names 'chunkk'"),
    ("plan", "smaller", "no", "smaller is 'no': it is to be True or False"),
    ("plan verify", "progress", 3, "progress is 3"),
    ("parallelize", "backend", 3, "backend is 3: it is to be None, the name of a torch.compile"),
    ("parallelize", "backend", "nosuch", "knows no backend 'nosuch'"),
    ("verify", "tolerance", "1e-9", "tolerance is '1e-9'"),
    ("verify", "tolerance", math.nan, "tolerance is nan"),
    ("verify", "tolerance", -1.0, "tolerance is -1.0"),
]


@pytest.mark.parametrize(("calls", "name", "value", "says"), FACE)
def test_an_argument_of_the_wrong_kind_is_named(
    calls: str, name: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.planner.planner.trace_step", None)  # nothing is begun
    for call in calls.split():
        text = said(lambda call=call: PLAIN[call](Net(), 1, (rows(),), **{name: value}))
        assert says in text and (text.startswith(f"{call}: ") or name == "backend"), text


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("gpt2", "model is 'gpt2': it is to be an nn.Module"),
        (Net, "it is a class: give an instance of it"),
        (None, "model is None"),
        (torch.nn.DataParallel(Net()), "give the model inside, model.module"),
    ],
    ids=["str", "class", "None", "wrapped"],
)
def test_a_model_that_is_none(model: Any, says: str) -> None:
    for call in PLAIN.values():
        assert says in said(lambda call=call: call(model, 1, (rows(),)), InputError)
    plan = autopar.plan(Net(), 1, (rows(),))
    assert says in said(lambda: autopar.apply(model, plan), InputError)


def test_apply_wants_a_plan() -> None:
    for wrong in ("plan.json", None, {}, Net()):
        assert "autopar.Plan.load" in said(lambda w=wrong: autopar.apply(Net(), w), PlanError)
    plan = autopar.plan(Net(), 1, (rows(),))
    assert "overlap is 'chunk'" in said(lambda: autopar.apply(Net(), plan, overlap="chunk"))
    assert "backend is 3" in said(lambda: autopar.apply(Net(), plan, backend=3))
    assert "it is a plan" in said(lambda: autopar.plan(Net(), 1, (rows(),), layout=plan))


def test_a_parallel_module_is_recognized() -> None:
    par = autopar.parallelize(Net(), 1, (rows(),))
    for wrong in (par, autopar.parallelize(Net(), 1)):
        for call in PLAIN.values():
            text = said(lambda call=call, w=wrong: call(w, 1, (rows(),)), InputError)
            assert "it is a parallel model already" in text and "give the original model" in text


# -- layouts by pattern ----------------------------------------------------------------------------
def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    for pattern in ("upp", "blocks.*.up", "Up"):
        wrong = {pattern: "ddp", "*": "fsdp"}
        text = said(lambda w=wrong: autopar.plan(Net(), 2, (rows(),), layout=w), LayoutError)
        assert f"the pattern {pattern!r} matches no module" in text and "up" in text
    wrong = {"*": "ddp", "up": "fsdp"}
    text = said(lambda: autopar.plan(Net(), 2, (rows(),), layout=wrong), LayoutError)
    assert "'up' stands after '*'" in text and "put it before" in text
    autopar.plan(Net(), 2, (rows(),), layout={"up": "ddp", "*": "fsdp"})


# -- memory ----------------------------------------------------------------------------------------
def test_a_limit_below_what_is_stored_is_refused_before_any_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autopar.planner.planner.trace_step", None)
    numbers = 2 * 16 * 32 + 48
    start = time.perf_counter()
    text = said(lambda: autopar.plan(Net(), 2, (rows(),), memory=0.001), PlanError)
    assert time.perf_counter() - start < 1
    assert (
        "0.00098 bytes (0.001 bytes less 2e-05 bytes for kernels) on each of 2 devices" in text
        and "at least" in text
    )
    # float32 with adamw's two, on two devices
    most = with_reserve(12.0 * numbers / 2, autopar.World.of(2))
    assert "no plan fits" in said(lambda: autopar.plan(Net(), 2, (rows(),), memory=most - 1))
    with pytest.raises(TypeError):  # goes on to trace
        autopar.plan(Net(), 2, (rows(),), memory=most + 1)
    assert "no plan fits" in said(lambda: autopar.parallelize(Net(), 1, (rows(),), memory=0.001))


# -- calls -----------------------------------------------------------------------------------------
def test_one_argument_by_position_or_by_name() -> None:
    model = Net()
    par = autopar.parallelize(model, 1, (rows(), rows()))
    expected = model(rows(), rows())
    for call in (
        lambda: par(rows(), y=rows()),
        lambda: par(y=rows(), x=rows()),
        lambda: par(rows(), rows(), 1.0),
        lambda: par(rows(), rows(), scale=1.0),
    ):
        torch.testing.assert_close(call(), expected)
    par = autopar.parallelize(model, 1, {"y": rows(), "x": rows(), "scale": 1.0})
    torch.testing.assert_close(par(rows(), rows()), expected)  # the default is filled in


def test_an_argument_that_does_not_fit_is_named() -> None:
    par = autopar.parallelize(Net(), 1, (rows(), rows()))
    for call, says in (
        (lambda: par(), "missing a required argument: 'x'"),
        (
            lambda: par(rows(), z=rows()),
            "unexpected keyword argument 'z'; it is called as forward(",
        ),
        (lambda: par(rows(), rows(), y=rows()), "multiple values for argument 'y'"),
    ):
        text = said(call, InputError)
        assert says in text and "TreeSpec" not in text, text
    assert "unsupported operand" in said(lambda: par(rows(), {"a": rows()}), TraceError)


def test_calls_with_other_arguments_are_planned() -> None:
    model = Net()
    par = autopar.parallelize(model, 1, (rows(), rows()))
    torch.testing.assert_close(par(rows()), model(rows()))
    torch.testing.assert_close(par(rows(), rows(), 2.0), model(rows(), rows(), 2.0))


def test_inputs_that_are_no_arguments_of_forward() -> None:
    for inputs in ({"z": rows()}, (), (rows(), rows(), 1.0, 2)):
        assert "it is called as forward(x" in said(
            lambda arguments=inputs: autopar.plan(Net(), 2, arguments), InputError
        )


# -- alone, cached, looked at ----------------------------------------------------------------------
def test_one_rank_is_warned_where_nothing_was_started() -> None:
    with pytest.warns(UserWarning, match="the model runs on one rank: start with torchrun"):
        autopar.parallelize(Net(), inputs=(rows(),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopar.parallelize(Net(), 1, (rows(),))


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    ids = torch.arange(16).view(4, 4)
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def test_a_transformers_model_is_planned_without_its_cache() -> None:
    model, inputs = gpt2()
    assert model.config.use_cache
    with pytest.warns(UserWarning, match="GPT2LMHeadModel has use_cache on"):
        par = autopar.parallelize(model, 1, inputs)
    assert model.config.use_cache  # as it was
    assert par(**inputs).past_key_values is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopar.parallelize(model, 1, inputs)  # said once
    for module in (par, autopar.parallelize(model, 1)):
        assert "take par.unshard()" in said(module.generate, InputError)


def test_nothing_is_said_of_a_cache_that_an_encoder_never_makes() -> None:
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8,
        vocab_size=16, max_position_embeddings=8,
    )  # fmt: skip
    model, ids = transformers.BertForMaskedLM(config), torch.arange(16).view(4, 4)
    assert model.config.use_cache
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopar.parallelize(model, 1, {"input_ids": ids, "labels": ids})


@pytest.mark.slow_cells("cache")
@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["cache", "no cache"])
def test_packed_sequences_are_apart_where_the_model_takes_them_apart(options: Any) -> None:
    """With its cache on, transformers takes a row for one sequence, whatever its positions are."""
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config), torch.arange(16).view(4, 4)
    positions = torch.tensor([0, 1, 0, 1]).repeat(4, 1)
    inputs = {"input_ids": ids, "position_ids": positions, **options}
    par = autopar.parallelize(model, 1, inputs)
    torch.testing.assert_close(par(**inputs).logits, model(**inputs).logits)
    alone = model(ids[:, 2:], use_cache=False).logits
    assert torch.allclose(par(**inputs).logits[:, 2:], alone) == ("use_cache" in options)


def test_the_plan_of_a_parallel_module_can_be_read(two_ranks: None) -> None:
    par = autopar.parallelize(Net(), 2, (rows(),), layout="ddp")
    assert par.plan.timeline().seconds > 0
    assert par.plan.why("up") is not None
    assert not par.plan.context.program.tensors and not par.plan.context.source.tensors


# -- the command line ------------------------------------------------------------------------------
def tiny() -> tuple[nn.Module, Any]:
    return Net(), (rows(), rows())


def slow_world(path: Path, **overrides: Any) -> str:
    world = World((Level(4, 1.0, 1.0),), replace(World.of(1).device, **overrides), "gloo")
    world.save(path)
    return str(path)


def test_a_step_of_hours_is_refused_without_anyway(tmp_path: Path) -> None:
    world = slow_world(tmp_path / "slow.json")
    saved = tmp_path / "plan.json"
    command = ["plan", "test_misuse:tiny", "--world", world, "--layout", "ddp"]
    result = CliRunner().invoke(main.app, [*command, "--save", str(saved)])
    assert result.exit_code == 2 and result.stdout == "" and not saved.exists()
    assert "a step takes " in result.stderr and "--anyway" in result.stderr
    assert CliRunner().invoke(main.app, [*command, "--anyway"]).exit_code == 0


def test_a_plan_that_does_not_fit_is_refused_without_anyway(tmp_path: Path) -> None:
    world = slow_world(tmp_path / "small.json", memory_bytes=100.0)
    command = ["plan", "test_misuse:tiny", "--world", world, "--layout", "ddp", "--json"]
    result = CliRunner().invoke(main.app, command)
    assert result.exit_code == 2
    assert "on each device, which has " in json.loads(result.stdout)["message"]


def test_options_of_the_command_line_that_cannot_be_meant() -> None:
    for option, says in (("--optimizer=-3", "-3"), ("--optimizer=nan", "nan")):
        command = ["plan", "test_misuse:tiny", "--ranks", "2", option]
        result = CliRunner().invoke(main.app, command)
        assert result.exit_code == 2 and f"optimizer is '{says}'" in result.stderr


def test_a_model_that_is_planned_later_has_the_face_of_one_that_is_planned() -> None:
    par = autopar.parallelize(nn.Linear(8, 16), 1)
    with pytest.raises(InputError, match="its loader are known after the first call"):
        par.loader(torch.ones(10, 8))
    with pytest.raises(AttributeError):
        _ = par.fc
    par(torch.ones(4, 8))
    assert par.plan.world.ranks == 1 and par.rows() == slice(0, 4)
    assert torch.equal(par.get_parameter("weight"), par.module.weight)
