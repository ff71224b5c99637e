"""Derivatives in forward: traced below autograd, and compared with eager at every trace."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import TraceError
from autopar.ir.graph import module_path
from autopar.passes.trace import derivative_ops, derivatives, export, original, trace
from derivative_models import MODELS, Differentiated, derivative, mlp, model_and_inputs

aten = torch.ops.aten


def ops_of(program: Any) -> collections.Counter[str]:
    return collections.Counter(
        str(node.target) for node in program.module.graph.nodes if node.op == "call_function"
    )


@pytest.mark.slow_cells(
    "a step of MAML", "attention", "convolutions", "forces", "gradient penalty", "jacobians",
    "jvp", "laplacian", "vmap of grad",
)  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_what_one_device_does(name: str) -> None:
    model, inputs = model_and_inputs(name)
    autopar.verify(model, 2, inputs, layout="megatron" if len(name) % 2 else "fsdp")


def test_no_operator_that_only_derivatives_have_is_left_without_a_rule() -> None:
    ops = ops_of(trace(*model_and_inputs("convolutions")))
    rare = [op for op in ops if "convolution" in op or "native" in op or "norm_backward" in op]
    assert rare == ["aten._native_batch_norm_legit_functional.default"]


# -- which detaches stay ---------------------------------------------------------------------------
def gated(net: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    h = net[0](x)
    return derivative(net[2](h.tanh() * h.sigmoid().detach()), x).square().mean()


def per_sample(net: Any, x: Tensor) -> Tensor:
    def value(point: Tensor) -> Tensor:
        h = net[0](point)
        return net[2](h.tanh() * h.sigmoid().detach()).squeeze(-1)

    return torch.func.vmap(torch.func.grad(value))(x).square().mean()


def without_graph(net: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return net(x).mean() * derivative(net(x), x, create_graph=False).square().mean()


def without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = net[0](x).sigmoid()
    x = x.detach().requires_grad_()
    return derivative(net[2](net[0](x).tanh() * gate), x).square().mean()


CALLS = (gated, per_sample, without_graph, without_gradients)


@pytest.mark.slow_cells("per_sample", "without_gradients")
@pytest.mark.parametrize("call", CALLS)
def test_the_detaches_of_the_user_stay(call: Callable[..., Any]) -> None:
    trace(Differentiated(mlp(2, 8, 1), call), (torch.rand(4, 2),))


@pytest.mark.slow_cells("per_sample")
@pytest.mark.parametrize("call", CALLS)
def test_a_detach_that_is_lost_is_found(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derivatives, "_MARK", "no mark")
    monkeypatch.setattr(derivatives._MarkDetaches, "__torch_function__", run_alone)
    with pytest.raises(TraceError, match="not what the model computes: gradient of net"):
        trace(Differentiated(mlp(2, 8, 1), call), (torch.rand(4, 2),))


def run_alone(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


@pytest.mark.slow_cells("a step of MAML")
@pytest.mark.parametrize("name", ["burgers", "a step of MAML"])
def test_a_detach_of_autograd_that_stays_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derivatives, "_join_saved", lambda graph: None)
    with pytest.raises(TraceError, match="not what the model computes: gradient of net"):
        trace(*model_and_inputs(name))


def test_a_zero_weight_hides_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are zero on its own values."""
    model, inputs = model_and_inputs("burgers")
    nn.init.zeros_(model.net[-1].weight)
    monkeypatch.setattr(derivatives, "_join_saved", lambda graph: None)
    with pytest.raises(TraceError, match="not what the model computes"):
        trace(model, inputs)


# -- the facts of a trace --------------------------------------------------------------------------
class Everything(nn.Module):
    """Buffers that are assigned and written, a constant, hooks, a dict, arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop, self.scale = mlp(4, 8, 1), nn.Dropout(0.3), 2.0
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_forward_hook(lambda module, args, result: {**result, "hooked": True})

    def forward(self, x: Tensor, *, y: Tensor | None = None) -> dict[str, Any]:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        self.count += 1
        x = (x - self.mean).detach().requires_grad_()
        hidden = checkpoint(lambda z: self.drop(self.net(z)), x, use_reentrant=False)
        force = derivative(hidden * self.scale, x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"force": force, "none": None, "y": y, "training": self.training}


def test_a_trace_has_the_facts_that_export_gives() -> None:
    model, x = Everything(), torch.randn(4, 4)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    program = trace(model, (x,))
    signature = program.signature
    assert [e.target for e in signature.inputs if e.kind == "parameter"] == [
        "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias",
    ]  # fmt: skip
    assert [e.target for e in signature.inputs if e.kind == "user"] == ["args[0]"]
    assert [e.kind for e in signature.inputs].count("constant") == 1
    assert {o.target for o in signature.outputs if o.kind == "mutation"} == {"mean", "count"}
    assert [o.constant for o in signature.outputs if o.node is None] == [None, None, True, True]
    assert ("", "scale") in signature.reads
    assert program.tensors["net.0.weight"] is model.net[0].weight
    tanh = program.module.graph.find_nodes(op="call_function", target=aten.tanh.default)[0]
    slope = program.module.graph.find_nodes(op="call_function", target=aten.tanh_backward.default)
    assert module_path(tanh) == "net.1"
    assert "force = derivative(hidden" in export.place(slope[0])
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert len(model._forward_hooks) == 1 and "forward" not in vars(model)
    assert "hooked" in model(x)


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_traced_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_inputs("a step of MAML")
    expected = ops_of(trace(model, inputs))
    assert ops_of(trace(model.to("meta"), inputs)) == expected
    model, inputs = model_and_inputs("burgers")
    monkeypatch.setattr(derivatives, "_join_saved", lambda graph: None)
    with pytest.raises(TraceError, match="not what the model computes"):
        trace(model.to("meta"), tuple(x.to("meta") for x in inputs))


def test_casts_of_autocast_are_in_the_graph_once() -> None:
    model, inputs = model_and_inputs("forces")
    with torch.autocast("cpu", torch.bfloat16):
        program = trace(model, inputs)
        original.compare_original(model, program, (inputs, {}), 1.0)
    assert program.signature.autocast == (("cpu", torch.bfloat16),)
    assert ops_of(program)["aten._to_copy.default"] > 3


def test_other_models_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("traced below autograd")

    monkeypatch.setattr(export, "graph_below_autograd", fail)
    mapped = Differentiated(mlp(2, 8, 1), lambda net, x: torch.func.vmap(net)(x).mean())
    trace(mapped, (torch.rand(4, 2),))
    with pytest.raises(TraceError, match="traced below autograd"):
        trace(*model_and_inputs("burgers"))


# -- refusals --------------------------------------------------------------------------------------
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def custom(net: Any, x: Tensor) -> Tensor:
    return derivative(Doubled.apply(net(x)).tanh(), x)


def hooked(net: Any, x: Tensor) -> Tensor:
    y = net(x)
    y.register_hook(lambda g: g * 2)
    return derivative(y, x)


def branching(net: Any, x: Tensor) -> Tensor:
    slope = derivative(net(x), x)
    return slope if slope.sum() > 0 else -slope


def writing(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net[0].bias.add_(1)
    return derivative(net(x), x)


def infinite(net: Any, x: Tensor) -> Tensor:
    return derivative((net(x) * 0).sqrt(), x)


REFUSED = {
    custom: "derivative through the custom autograd function Doubled",
    hooked: "registers the hook hooked",
    branching: "a branch or a shape depends on the values",
    writing: r"forward changes 'net\.0\.bias', a parameter or an input, in place\n  File",
    infinite: "cannot be compared with it: its gradients are not finite",
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_has_no_graph_is_refused_by_name(call: Callable[..., Any]) -> None:
    model = Differentiated(mlp(2, 8, 1), call)
    with pytest.raises(TraceError, match=REFUSED[call]):
        trace(model, (torch.rand(4, 2, requires_grad=True),))


def test_what_is_too_large_to_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original, "_DERIVATIVE_FLOPS", 1e3)
    with pytest.raises(TraceError, match=r"too large .* a step takes [\d.]+e\+05 FLOPs, at most"):
        trace(*model_and_inputs("burgers"))


# -- operators that only derivatives have ----------------------------------------------------------
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_backward_of_a_convolution_is_convolutions(dims: int, transposed: bool) -> None:
    torch.manual_seed(0)
    for stride, padding, dilation, groups in itertools.product((1, 3), (0, 1), (1, 2), (1, 2)):
        x = torch.randn(3, 4, *(9, 8)[:dims], dtype=torch.float64)
        channels = (4, 6 // groups) if transposed else (6, 4 // groups)
        weight = torch.randn(*channels, *(3, 2)[:dims], dtype=torch.float64)
        extra = int(transposed and max(stride, dilation) > 1)
        how = ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [extra] * dims)
        gradient = torch.randn_like(aten.convolution(x, weight, None, *how, groups))
        arguments = (gradient, x, weight, [6], *how, groups, [True, True, True])
        gradients = derivative_ops.written_with_others(aten.convolution_backward.default)(
            *arguments
        )
        torch.testing.assert_close(gradients, aten.convolution_backward(*arguments))


class Recurrent(nn.Module):
    """Two layers of an LSTM, whose kernel for float32 has an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.head(self.rnn(x)[0][:, -1]).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().mean()


@pytest.mark.slow_cells("fsdp")
@pytest.mark.slow_cells("auto")
@pytest.mark.parametrize("layout", ["auto", "fsdp"])
def test_a_recurrent_net_may_be_differentiated(layout: str) -> None:
    enabled = torch.backends.mkldnn.enabled
    autopar.verify(Recurrent(), 2, (torch.randn(4, 3, 3),), layout=layout)
    assert torch.backends.mkldnn.enabled == enabled
