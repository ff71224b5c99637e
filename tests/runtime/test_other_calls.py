"""Calls that the training plan was not made for: eval mode, incomplete batches, other lengths."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.training import call_graphs
from launch import RANK_SCRIPTS, environment, launched
from odd_models import rows
from refusals import Options, two_layers

LAYOUTS = [
    pytest.param(names, marks=pytest.mark.slow) for names in (("fsdp",), ("megatron", "auto"))
]


@pytest.fixture(scope="module", params=LAYOUTS, ids=", ".join)
def facts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("calls")
    return launched(folder, 2, *request.param, script="other_calls_ranks.py")


def test_every_call_gives_what_one_device_gives(facts: dict[str, Any]) -> None:
    for layout in {"megatron", "fsdp", "auto"} & facts.keys():
        apart = facts[layout]["apart"]
        assert len(apart) > 10 and {k: d for k, d in apart.items() if not d < 1e-5} == {}, layout
        assert facts[layout]["stays"]  # no parameter has moved
        assert facts[layout]["graphs"] == 7


def test_ranks_that_make_different_calls_all_hear_of_it(facts: dict[str, Any]) -> None:
    assert len(facts["different"]) == 2
    for said in facts["different"]:
        assert "the ranks make different calls, call 2: " in said
        assert "rank 0 makes a call in train mode, inputs (5, 12)" in said
        assert "rank 1 makes a call as before" in said


def test_dropout_starts_anew_after_manual_seed(facts: dict[str, Any]) -> None:
    figures = facts["seeded"]
    first, again, other, by_rank = figures["runs"]
    assert first == again and len({*first, *other}) == 6
    assert other == by_rank and figures["same"]  # rank 0's seed counts


@pytest.mark.slow
def test_a_rank_that_makes_another_call_alone_waits_for_nobody(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(RANK_SCRIPTS / "other_calls_ranks.py")
    command = [*torchrun, "--nproc-per-node", "2", script, str(tmp_path / "facts"), "alone"]
    subprocess.run(command, env=environment(), check=True, timeout=120, capture_output=True)
    first, second = (json.loads((tmp_path / f"facts.{rank}").read_text()) for rank in range(2))
    assert "rank 1 makes a call after torch.manual_seed" in second["said"]
    assert "rank 0 makes a call as before" in second["said"] and second["seconds"] < 20
    assert first["said"]  # once rank 1 is gone


@pytest.mark.slow
def test_nothing_of_the_original_stays(two_ranks: None) -> None:
    model = nn.Sequential(nn.Linear(24, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    storages = [weakref.ref(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())]
    whole = weakref.ref(model)
    par = autopar.parallelize(model, 2, (rows(),), layout="ddp")
    del model
    gc.collect()
    assert [ref() for ref in storages] == [None] * len(storages) and whole() is None
    with par._autopar.graphs.bare_model() as bare:
        assert type(bare) is nn.Sequential and all(t.is_meta for t in bare.parameters())
    assert isinstance(par, nn.Sequential) and not any(t.is_meta for t in par.parameters())


def test_what_python_cannot_copy_is_shared(two_ranks: None) -> None:
    model = two_layers()
    model.lock = threading.Lock()
    par: Any = autopar.parallelize(model, 2, (rows(),), layout="ddp")
    assert par.lock is model.lock and par.up is not model.up
    par.eval()(rows())


@pytest.mark.slow
def test_calls_are_distinguished() -> None:
    x, y = torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)
    par: Any = autopar.parallelize(Options4(), 1, (x,))

    def graphs(*args: Any, **kwargs: Any) -> int:
        par(*args, **kwargs)
        return len(par._autopar.graphs.others)

    assert graphs(torch.zeros(2, 4)) == 0
    counts = [graphs(x[:1]), graphs(x.double().float(), 2), graphs(x, 2.0), graphs(x, True)]
    with torch.autocast("cpu", torch.bfloat16):
        counts.append(graphs(x))
    counts.append(graphs(y))
    par.eval()
    counts.append(graphs(x))
    assert counts == [1, 2, 3, 4, 5, 6, 7]
    with torch.no_grad():
        assert graphs(x) == 7  # the graph with gradients serves


class Options4(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Any = 1) -> Tensor:
        return self.layer(x) * scale


def test_other_numbers_and_arguments_are_planned_too() -> None:
    model, x = Options(), rows()
    par = autopar.parallelize(copy.deepcopy(model), 1, {"x": x, "scale": 2.0})
    for kwargs in ({"scale": 3.0}, {"scale": 2}, {}, {"scale": 2.0, "mode": "mean"}):
        torch.testing.assert_close(par(x=x, **kwargs), model(x, **kwargs))
    torch.testing.assert_close(par(x, 2.0), model(x, 2.0))


def test_the_oldest_graph_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_graphs, "MOST", 2)
    par: Any = autopar.parallelize(nn.Linear(4, 4), 1, (torch.ones(8, 4),))
    for count in (7, 6):
        par(torch.ones(count, 4))
    with pytest.warns(UserWarning, match="more than 2 kinds .* inputs .5, 4. float32: the oldest"):
        par(torch.ones(5, 4))
    graphs = par._autopar.graphs.others
    shapes = [graph.program.layouts[graph.user_inputs[0].node].shape for graph in graphs]
    assert shapes == [(6, 4), (5, 4)]
    par(torch.ones(8, 4))
    assert len(par._autopar.graphs.others) == 2  # the training graph is not among them


class Two(nn.Module):
    """One of two layers is used, and one of two attributes that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.factors = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, 3.0, 2.0, 1.0])]

    def forward(self, x: Tensor, which: int = 0, factor: int = 0) -> Tensor:
        y: Tensor = self.layers[which](x) * self.factors[factor]
        return y


@pytest.mark.parametrize("other", [{"which": 1}, {"factor": 1}])
def test_what_the_planned_step_does_not_use(other: dict[str, int]) -> None:
    model, x = Two(), torch.ones(2, 4)
    par = autopar.parallelize(copy.deepcopy(model), 1, {"x": x})
    torch.testing.assert_close(par(x, **other), model(x, **other))
