"""What forward does besides its result: calls that are not alike are refused, by attribute or line;
caches of constants and tensors passed on within a call are welcome; the model stays as it was.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
import time
from collections.abc import Callable
from time import time as now
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import TraceError
from autopar._compat import FakeTensor
from autopar.passes.trace import trace
from autopar.passes.trace.side_effects import refuse_side_effects
from traced import run

Forward = Callable[[Any, Tensor], Any]
CALLS = {"n": 0}
LEAKED: list[Tensor] = []
WRONG: dict[str, tuple[Forward, str]] = {}
RIGHT: dict[str, Forward] = {}


class Model(nn.Module):
    total = 0  # of the class

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = nn.Module()
        self.inner.step = 0
        self.prev: Any = None
        self.plain = torch.zeros(3, 4)
        self.table: dict[str, Any] = {"counts": [0, 0]}
        self.state = SimpleNamespace(step=0)
        self.generator = np.random.default_rng(0)
        self.random = random.Random(0)
        self.values = np.zeros(3)
        self.register_buffer("mean", torch.zeros(4))
        self.own_forward = forward

    def forward(self, x: Tensor) -> Any:
        return self.own_forward(self, x)


def wrong(says: str) -> Callable[[Forward], Forward]:
    def enter(forward: Forward) -> Forward:
        WRONG[forward.__name__] = forward, says
        return forward

    return enter


def right(forward: Forward) -> Forward:
    RIGHT[forward.__name__] = forward
    return forward


# -- what changes from call to call ----------------------------------------------------------------
@wrong("it changed inner.step (0, then 1)")
def a_counted_step(m: Any, x: Tensor) -> Tensor:
    m.inner.step += 1
    return m.linear(x).sum() / m.inner.step


@wrong("every call of forward changes inner.step (1, then 2), which is no buffer")
def a_step_that_nothing_uses(m: Any, x: Tensor) -> Tensor:
    m.inner.step += 1
    return m.linear(x).sum()


@wrong("table['counts'][1] (1, then 2)")
def a_number_in_a_list_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.table["counts"][1] += 1
    return m.linear(x).sum()


@wrong("state.step (1, then 2)")
def a_number_of_a_plain_object(m: Any, x: Tensor) -> Tensor:
    m.state.step += 1
    return m.linear(x).sum()


@wrong("changes values (array")
def an_array(m: Any, x: Tensor) -> Tensor:
    m.values += 1
    return m.linear(x).sum()


@wrong("flag")
def a_flag_that_flips(m: Any, x: Tensor) -> Tensor:
    m.flag = not getattr(m, "flag", False)
    return m.linear(x).sum()


@wrong("where the first call had mul(tensor (3, 4), 2)")
def the_first_call_alone(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    if m.prev is None:
        m.prev, y = True, y * 2
    return y.sum()


@wrong("div(tensor (), 2), where the first call had div(tensor (), 1)")
def a_global_count(m: Any, x: Tensor) -> Tensor:
    CALLS["n"] += 1
    return m.linear(x).sum() / CALLS["n"]


@wrong("when it is called again: mul")
def a_count_of_the_class(m: Any, x: Tensor) -> Tensor:
    type(m).total += 1
    return m.linear(x).sum() * type(m).total


@wrong("when it is called again: mul")
def a_tensor_of_a_number(m: Any, x: Tensor) -> Tensor:
    m.inner.step += 1
    return (m.linear(x) * torch.full((4,), float(m.inner.step))).sum()


@wrong("when it is called again: return")
def a_number_that_is_returned(m: Any, x: Tensor) -> Any:
    CALLS["n"] += 1
    return m.linear(x).sum(), CALLS["n"]


@wrong("changes late")
def a_layer_that_forward_adds(m: Any, x: Tensor) -> Tensor:
    m.late = nn.Linear(4, 4)
    return m.late(m.linear(x)).sum()


@wrong("changes requires_grad of linear.weight")
def a_parameter_that_forward_freezes(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.requires_grad_(False)
    return m.linear(x).sum()


@wrong("calls backward(), which gives linear.weight a gradient")
def a_backward_inside(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x).square().sum()
    y.backward(retain_graph=True)
    return y


# -- tensors that outlive a call -------------------------------------------------------------------
@wrong("reads a tensor that an earlier call of it left in prev")
def the_last_result(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    if m.prev is not None:
        y = y + m.prev
    m.prev = y.detach()
    return y.sum()


@wrong("left in plain")
def a_plain_tensor_replaced(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x) + m.plain
    m.plain = y.detach()
    return y.sum()


@wrong("left in prev")
def the_last_result_returned(m: Any, x: Tensor) -> Any:
    last, m.prev = m.prev, m.linear(x)
    return last if last is not None else m.prev


@wrong("a list of 1, then a list of 2")
def a_growing_list(m: Any, x: Tensor) -> Tensor:
    m.table.setdefault("history", []).append(m.linear(x).detach())
    return m.linear(x).sum()


@wrong("left in noise")
def noise_drawn_once(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "noise"):
        m.noise = torch.randn(3, 4)
    else:
        torch.randn(3, 4)  # so that both calls draw alike
    return (m.linear(x) + m.noise).sum()


@wrong("leaves 1 tensors in variables outside of the model (in a list)")
def a_global_list(m: Any, x: Tensor) -> Tensor:
    LEAKED[:] = [m.linear(x).detach()]
    return m.linear(x).sum()


@functools.lru_cache
def mask(size: int) -> Tensor:
    return torch.ones(size, size).triu()


@wrong("a _lru_cache_wrapper")
def a_cache_outside(m: Any, x: Tensor) -> Tensor:
    return (mask(3) @ m.linear(x)).sum()


# -- random numbers and clocks ---------------------------------------------------------------------
@wrong("draws from Python's random")
def python_random(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).sum() * random.random()


@wrong("draws from Python's random")
def a_layer_dropped_at_random(m: Any, x: Tensor) -> Tensor:
    return x.sum() if random.random() < 1e-9 else m.linear(x).sum()


@wrong("draws from numpy.random")
def numpy_random(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).sum() * float(np.random.rand())


@wrong("it changed generator (random")
def a_generator_of_numpy(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).sum() * float(m.generator.random())


@wrong("changes random (random")
def a_generator_of_python(m: Any, x: Tensor) -> Tensor:
    return x.sum() if m.random.random() < 1e-9 else m.linear(x).sum()


@wrong("changes the state of torch's random numbers")
def a_seed_set(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.dropout(m.linear(x), 0.5, True).sum()


@wrong("when it is called again: mul")
def the_time(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).sum() * (int(time.time()) % 1000)


@wrong("when it is called again: mul")
def the_time_by_another_name(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).sum() * torch.tensor(float(int(now()) // 100))


# -- what is welcome -------------------------------------------------------------------------------
@right
def a_force(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = m.linear(x).tanh().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy + force.square().sum()


@right
def a_gradient_of_a_weight(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x).square().sum()
    (gradient,) = torch.autograd.grad(y, m.linear.weight, create_graph=True)
    return y + gradient.square().sum()


@right
def a_table_of_constants_built_once(m: Any, x: Tensor) -> Tensor:
    if m.inner.step < len(x):
        m.inner.step = len(x)
        m.prev = torch.zeros(len(x), 4)
        m.prev[:, ::2] = torch.outer(torch.arange(len(x)).float(), torch.ones(2)).cos()
    return (m.linear(x) * m.prev[: len(x)]).sum()


@right
def a_loss_left_for_later_in_the_call(m: Any, x: Tensor) -> Tensor:
    m.inner.loss = m.linear(x).square().mean()
    m.table["x"] = x
    return m.linear(x).sum() + m.inner.loss


@right
def a_moving_average(m: Any, x: Tensor) -> Tensor:
    m.mean = m.mean * 0.9 + x.mean(0) * 0.1
    return (m.linear(x) - m.mean).sum()


@right
def warns_once(m: Any, x: Tensor) -> Tensor:
    m.table["told"] = True
    if x.shape[0] > 2 and not m.state.step:
        m.state.step = 1
    return m.linear(x).sum()


def calm() -> None:
    CALLS["n"] = 0
    LEAKED.clear()
    Model.total = 0
    mask.cache_clear()


def state_of(model: Model) -> Any:
    names = ("prev", "table", "state", "training")
    return copy.deepcopy([model.inner.__dict__["step"], *(getattr(model, n) for n in names)])


def fakes() -> int:
    gc.collect()
    return sum(isinstance(o, FakeTensor) for o in gc.get_objects() if type(o) is FakeTensor)


@pytest.mark.slow_cells("a_cache_outside", "a_global_list")
@pytest.mark.parametrize("name", WRONG)
def test_calls_that_are_not_alike_are_refused(name: str) -> None:
    forward, says = WRONG[name]
    calm()
    model = Model(forward)
    before, names = state_of(model), set(model.__dict__)
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()
    plain = model.plain
    with pytest.raises(TraceError) as caught:
        trace(model, (torch.randn(3, 4),))
    assert says in str(caught.value), str(caught.value)
    assert str(caught.value).startswith("Model cannot be one graph: ")
    assert state_of(model) == before and model.plain is plain
    assert set(model.__dict__) == names and model.linear.weight.grad is None
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tobytes()
    calm()


@pytest.mark.slow_cells("a_moving_average")
@pytest.mark.slow_cells("a_table_of_constants_built_once")
@pytest.mark.parametrize("name", RIGHT)
def test_what_every_call_does_alike_is_traced(name: str) -> None:
    model = Model(RIGHT[name])
    before, names = state_of(model), set(model.__dict__)
    x = torch.randn(3, 4)
    program = trace(model, (x,))
    assert state_of(model) == before and set(model.__dict__) == names  # and no stand-in is left
    torch.testing.assert_close(run(program, (x,)), model(x))


@pytest.mark.slow
def test_no_stand_in_outlives_the_check() -> None:
    calm()
    before = fakes()
    for name in ("a_table_of_constants_built_once", "a_loss_left_for_later_in_the_call"):
        refuse_side_effects(Model(RIGHT[name]), (torch.randn(3, 4),), {})
    for name in ("the_last_result", "a_growing_list", "noise_drawn_once"):
        with pytest.raises(TraceError):
            refuse_side_effects(Model(WRONG[name][0]), (torch.randn(3, 4),), {})
    assert fakes() <= before


def test_the_line_is_named() -> None:
    calm()
    with pytest.raises(TraceError, match=r"(?s)test_side_effects.py.*random.random\(\)"):
        trace(Model(python_random), (torch.randn(3, 4),))


@pytest.mark.parametrize("call", ["plan", "verify", "parallelize"])
def test_every_call_of_the_face_refuses(call: str) -> None:
    inputs = (torch.randn(4, 4),)
    known = {
        "plan": lambda m: autopar.plan(m, 2, inputs),
        "verify": lambda m: autopar.verify(m, 2, inputs),
        "parallelize": lambda m: autopar.parallelize(m, 1, inputs),
    }
    with pytest.raises(TraceError, match=r"inner.step \(1, then 2\)"):
        known[call](Model(a_step_that_nothing_uses))


def test_norms_that_write_their_weights_are_no_side_effects() -> None:
    old = torch.nn.utils
    with pytest.warns(FutureWarning):
        layer = old.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(layer, old.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    trace(model, (torch.randn(8, 4),))
