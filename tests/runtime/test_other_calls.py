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
from test_errors import Options, refused, rows, two_layers, two_ranks  # noqa: F401
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from autopar.runtime.training import other_calls
from autopar.runtime.training.other_calls import Skeleton, skeleton_of
from autopar.runtime.training.step_graph import CallKey
from launch import RANK_SCRIPTS, environment, launched

LAYOUTS = [("fsdp",), pytest.param(("megatron", "auto"), marks=pytest.mark.slow)]


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
    found = facts["seeded"]
    first, again, other, by_rank = found["runs"]
    assert first == again and len({*first, *other}) == 6
    assert other == by_rank and found["same"]  # rank 0's seed counts


def test_a_rank_that_makes_another_call_alone_waits_for_nobody(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(RANK_SCRIPTS / "other_calls_ranks.py")
    command = [*torchrun, "--nproc-per-node", "2", script, str(tmp_path / "facts"), "alone"]
    subprocess.run(command, env=environment(), check=True, timeout=120, capture_output=True)
    first, second = (json.loads((tmp_path / f"facts.{rank}").read_text()) for rank in range(2))
    assert "rank 1 makes a call after torch.manual_seed" in second["said"]
    assert "rank 0 makes a call as before" in second["said"] and second["seconds"] < 20
    assert first["said"]  # once rank 1 is gone


def test_a_skeleton_holds_no_number() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    model[2].eval()
    held = [weakref.ref(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())]
    skeleton = Skeleton(model)
    assert all(t.is_meta for t in (*skeleton.model.parameters(), *skeleton.model.buffers()))
    modes = [module.training for module in skeleton.in_mode(True)]
    assert modes == [True, True, False]
    assert not any(module.training for module in skeleton.in_mode(False).modules())
    del model
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_a_model_that_python_cannot_copy_runs_as_planned_alone(two_ranks: None) -> None:  # noqa: F811
    model = two_layers()
    model.lock = threading.Lock()
    assert skeleton_of(model) is None
    par = autopar.parallelize(model, 2, (rows(),), layout="ddp")
    says = ("the plan is for another call than eval mode, inputs (12, 24)", "copy.deepcopy")
    with refused(InputError, *says):
        par.eval()(rows())


def test_what_tells_calls_apart() -> None:
    x, y = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)

    def key(*args: Any, training: bool = True, **kwargs: Any) -> CallKey:
        return CallKey.of(training, torch.device("cpu"), args, kwargs)

    assert key(x) == key(torch.zeros(2, 3)) != key(x, x)
    different = [key(x), key(x, training=False), key(x[:1]), key(x.double()), key(y), key(x=x)]
    with torch.no_grad():
        different.append(key(x))
        assert key(x) == key(y)
    with torch.autocast("cpu", torch.bfloat16):
        different.append(key(x))
    assert len(set(different)) == len(different)
    assert key(x, 2) != key(x, 2.0) != key(x, True)


def test_other_numbers_and_arguments_are_planned_too() -> None:
    model, x = Options(), rows()
    par = autopar.parallelize(copy.deepcopy(model), 1, {"x": x, "scale": 2.0})
    for kwargs in ({"scale": 3.0}, {"scale": 2}, {}, {"scale": 2.0, "mode": "mean"}):
        torch.testing.assert_close(par(x=x, **kwargs), model(x, **kwargs))
    torch.testing.assert_close(par(x, 2.0), model(x, 2.0))


def test_the_oldest_graph_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_calls, "MOST", 2)
    par: Any = autopar.parallelize(nn.Linear(4, 4), 1, (torch.ones(8, 4),))
    for count in (7, 6):
        par(torch.ones(count, 4))
    with pytest.warns(UserWarning, match="more than 2 kinds .* inputs .7, 4. float32 is"):
        par(torch.ones(5, 4))
    kept = [key.leaves[0] for key in par._others._graphs]
    assert [shape for shape, _, _ in kept] == [(6, 4), (5, 4)]
    par(torch.ones(8, 4))
    assert len(par._others._graphs) == 2  # the training graph is not among them


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
