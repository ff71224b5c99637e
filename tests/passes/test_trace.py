"""The traced graph computes what the eager model computes, and is as simple as it can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
from autopar.errors import InputError, TraceError
from autopar.ir.program import Program
from autopar.passes.trace import trace
from traced import run

aten = torch.ops.aten
ALL = [
    models.mlp, models.gpt, models.gpt2, models.llama, models.qwen3, models.gemma2, models.bert,
    models.t5, models.vit,
]  # fmt: skip


@cache
def traced(build: Callable[[], models.Example]) -> Program:
    """Tracing is most of the time of this file; programs are never changed, so tests share them."""
    return trace(*build())


def targets(program: Program) -> Counter[Any]:
    return Counter(n.target for n in program.module.graph.nodes if n.op == "call_function")


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def gradients(model: nn.Module, result: Any) -> dict[str, torch.Tensor]:
    """Of a sum over every differentiable output, so that all of them are checked."""
    model.zero_grad(set_to_none=True)
    sum(t.double().square().sum() for t in tensors_of(result) if t.requires_grad).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal_to_eager(
    model: nn.Module,
    args: tuple = (),
    kwargs: dict | None = None,
    program: Program | None = None,
) -> Program:
    kwargs = kwargs or {}
    program = program or trace(model, args, kwargs)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    want = model(*args, **kwargs)
    expected = gradients(model, want)
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    got = run(program, args, kwargs, tensors)
    assert type(want) is type(got)
    torch.testing.assert_close(tensors_of(got), tensors_of(want), rtol=1e-5, atol=1e-6)
    grads = gradients(model, got)
    assert expected.keys() == grads.keys()
    for name, gradient in expected.items():
        error = (grads[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-30)
        assert error < 2e-6, (name, error)
    return program


@pytest.mark.slow_cells("bert", "gemma2", "gpt2", "gpt", "llama", "qwen3", "t5", "vit")
@pytest.mark.parametrize("build", ALL, ids=lambda build: build.__name__)
def test_outputs_and_gradients_are_those_of_the_eager_model(
    build: Callable[[], models.Example],
) -> None:
    assert_equal_to_eager(*build(), program=traced(build))


@pytest.mark.slow_cells("bert", "gpt2", "t5", "vit")
@pytest.mark.parametrize("build", [models.gpt, models.gpt2, models.bert, models.t5, models.vit])
def test_dropout_is_one_node_in_training_and_none_otherwise(build: Callable[..., Any]) -> None:
    model, args, kwargs = build(dropout=0.1)
    counts = targets(trace(model, args, kwargs))
    assert counts[aten.dropout.default] >= 4
    assert counts[aten.native_dropout.default] == counts[aten.bernoulli.p] == 0
    assert targets(traced(build))[aten.dropout.default] == 0


@pytest.mark.slow
def test_dropout_in_evaluation_is_gone() -> None:
    model, args, kwargs = models.gpt(dropout=0.1)
    assert targets(trace(model.eval(), args, kwargs))[aten.dropout.default] == 0


def test_attention_keeps_its_dropout_rate() -> None:
    program = trace(*models.gpt(dropout=0.25))
    sdpa = aten.scaled_dot_product_attention.default
    (rate,) = {n.args[4] for n in program.module.graph.find_nodes(op="call_function", target=sdpa)}
    assert rate == 0.25


def test_composite_operators_stay_whole() -> None:
    counts = targets(traced(models.gpt))
    assert counts[aten.linear.default] == 9
    assert counts[aten.layer_norm.default] == 5
    assert counts[aten.scaled_dot_product_attention.default] == 2
    assert counts[aten.cross_entropy_loss.default] == 1
    assert counts[aten.gelu.default] == 2
    assert counts[aten.embedding.default] == 2
    assert targets(traced(models.gpt2))[aten.addmm.default] == 8
    assert targets(trace(nn.RMSNorm(4), (torch.ones(2, 4),))) == {aten.rms_norm.default: 1}


@pytest.mark.slow_cells("bert", "gemma2", "llama", "qwen3", "t5", "vit")
@pytest.mark.parametrize("build", ALL, ids=lambda build: build.__name__)
def test_no_assertion_copy_or_view_is_left(build: Callable[[], models.Example]) -> None:
    gone = {
        aten._assert_tensor_metadata.default, aten.alias.default, aten.clone.default,
        aten.view.default, aten._unsafe_view.default, aten.detach.default, aten.type_as.default,
    }  # fmt: skip
    assert not gone & targets(traced(build)).keys()


def test_nodes_remember_where_they_came_from() -> None:
    program = traced(models.gpt)
    (loss,) = program.module.graph.find_nodes(
        op="call_function", target=aten.cross_entropy_loss.default
    )
    assert "models.py" in loss.meta["stack_trace"]
    up = next(n for n in program.module.graph.nodes if n.args[1:2] and "up_w" in str(n.args[1]))
    assert [path for path, _ in up.meta["nn_module_stack"].values()][-1] == "blocks.0.up"
    assert up.meta["val"].shape == (16, 16, 256)


@pytest.mark.slow
def test_tied_weights_are_one_input_with_every_name() -> None:
    program = traced(models.t5)
    (tied,) = [entry for entry in program.signature.inputs if len(entry.names) > 1]
    assert tied.target == "shared.weight"
    assert {"lm_head.weight", "encoder.embed_tokens.weight"} < set(tied.names)
    model, args, kwargs = models.gpt()
    assert trace(model, args, kwargs).tensors["token.weight"] is model.head.weight


def test_inputs_are_in_the_order_of_the_placeholders() -> None:
    program = traced(models.gpt2)
    placeholders = [n.name for n in program.module.graph.find_nodes(op="placeholder")]
    assert [entry.node for entry in program.signature.inputs] == placeholders
    assert [e.target for e in program.signature.inputs if e.kind == "user"] == [
        "kwargs['input_ids']",
        "kwargs['labels']",
    ]


def test_one_tensor_given_twice_is_two_inputs() -> None:
    model, (ids, _), _ = models.gpt()
    program = trace(model, (ids, ids))
    users = [entry for entry in program.signature.inputs if entry.kind == "user"]
    assert [entry.target for entry in users] == ["args[0]", "args[1]"]
    other = ids.flip(1)
    torch.testing.assert_close(run(program, (ids, other)), model(ids, other))


class Choices(nn.Module):
    """Dictionaries, numbers, None and a plain tensor attribute, in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.bias.requires_grad_(False)
        self.scale = torch.full((4,), 2.0)

    def forward(self, batch: dict, power: int = 1, *, mode: str = "a", mask: Any = None) -> dict:
        y = self.linear(batch["x"]) ** power * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0])
        y = y if mode == "a" else -y
        return {"y": y, "mask": mask, "n": power, "both": (batch["x"], [y.sum()])}


def test_dictionaries_numbers_none_and_constants() -> None:
    args, kwargs = ({"x": torch.randn(3, 4)}, 2), {"mask": None, "mode": "b"}
    model = Choices()
    program = assert_equal_to_eager(model, args, kwargs)
    kinds = {entry.target: entry.kind for entry in program.signature.inputs}
    assert kinds["args[0]['x']"] == "user"
    assert kinds["scale"] == "constant"
    assert program.tensors["scale"] is model.scale
    assert (1, 2) in program.signature.fixed
    assert {value for _, value in program.signature.fixed} == {2, "b", None}
    trainable = {entry.target: entry.trainable for entry in program.signature.inputs}
    assert trainable["linear.weight"] and not trainable["linear.bias"]
    assert run(program, args, kwargs)["n"] == 2


def test_other_numbers_and_structures_are_refused() -> None:
    x = torch.randn(3, 4)
    program = trace(Choices(), ({"x": x}, 2))
    with pytest.raises(InputError, match="input 1 is 3, but 2 was traced"):
        run(program, ({"x": x}, 3))
    with pytest.raises(InputError, match="another structure"):
        run(program, (x, 2))


@dataclass
class Pair:
    loss: torch.Tensor
    logits: torch.Tensor


def test_dataclasses_need_no_registration() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Pair:
            y = self.linear(x)
            return Pair(y.sum(), y)

    assert_equal_to_eager(Model(), (torch.randn(3, 4),))


class Frozen(nn.Module):
    """Parts without gradients, nested both ways, one of which goes through a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.a(x)
        with torch.no_grad():
            y = self.b(x)
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.mean += x[0]
            self.mean[:2] = x[1, :2]
            with torch.no_grad():
                index, z = y.argmax(-1), y * 2
            with torch.enable_grad():
                w = self.c(z)
            v = w * 3
        was = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        u = self.b(v + w)
        torch.set_grad_enabled(was)
        return x * y + z, w * u, v + index[:, None], x * self.mean, x.detach() * x, x.data * x


def test_regions_without_gradients_stay_so() -> None:
    program = assert_equal_to_eager(Frozen(), (torch.randn(3, 4),))
    assert targets(program)[aten.detach.default] >= 4


def test_no_grad_around_the_trace_does_not_matter() -> None:
    model, args, kwargs = models.mlp()
    with torch.no_grad():
        program = trace(model, args, kwargs)
    assert run(program, args, kwargs).requires_grad


def test_autocast_becomes_casts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.a(x)
                with torch.no_grad():
                    z = self.b(y)
                return y * z

    counts = targets(assert_equal_to_eager(Model(), (torch.randn(3, 8),)))
    assert counts[aten._to_copy.default] >= 4 and counts[aten.detach.default] == 1


def test_a_mutated_buffer_is_an_output_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    program = assert_equal_to_eager(model, (torch.randn(8, 4),))
    mutated = [o for o in program.signature.outputs if o.kind == "mutation"]
    assert {o.target for o in mutated} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    x = torch.randn(8, 4)
    values = [program.tensors.get(entry.target, x) for entry in program.signature.inputs]
    results = dict(zip((o.target for o in program.signature.outputs), program.module(*values)))
    model(x)
    torch.testing.assert_close(results["1.running_var"], model[1].running_var)
    assert not results["1.running_mean"].requires_grad


def test_modules_that_keep_their_weights_in_lists() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    assert_equal_to_eager(Model(), (torch.randn(2, 3, 4),))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        self.seen = self.linear(x)
        if fail:
            raise RuntimeError("as asked")
        return self.seen


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_is_left_as_it_was(fail: bool) -> None:
    model = Remembers().eval()
    model.linear.bias.requires_grad_(False)
    before = [(dict(m.__dict__), dict(m._parameters)) for m in model.modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if fail:
        with pytest.raises(TraceError, match="RuntimeError: as asked"):
            trace(model, (torch.ones(2, 4), True))
    else:
        trace(model, (torch.ones(2, 4),))
    for module, (attributes, parameters) in zip(model.modules(), before):
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[name] is value for name, value in attributes.items())
        assert all(module._parameters[name] is value for name, value in parameters.items())
    assert not model._forward_hooks and not model.training and model.seen is None
    torch.testing.assert_close(model.state_dict(), values)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line to be named
            return x
        return -x


class Select(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return x * self.weight


class WritesBlindly(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        with torch.no_grad():
            y.mul_(2)
        return y


class WritesView(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[0].add_(1)
        return x * self.weight


class Conditional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@pytest.mark.slow_cells("Conditional-str-str")
@pytest.mark.parametrize(
    ("model", "reason", "line"),
    [
        (Conditional(), "cond takes a function as an operand", "return torch.cond("),
        (Branch(), "depends on the values of a tensor", "if x.sum() > 0:"),
        (Select(), "depends on the data", "return x[x > 0]"),
        (Item(), "depends on the data", "return x * x.max().item()"),
        (Writes(), "changes 'weight'", "self.weight.mul_(0.9)"),
        (WritesBlindly(), "mul_ without gradients changes", "y.mul_(2)"),
        (WritesView(), "changes 'x'", "x[0].add_(1)"),
        (nn.Linear(4, 4), "RuntimeError: .*reduction dim", ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_says_why_and_names_the_line(
    model: nn.Module, reason: str, line: str, capfd: pytest.CaptureFixture
) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        trace(model, (torch.ones(3),))
    message = str(caught.value)
    assert message.startswith(f"{type(model).__name__} cannot be one graph: ")
    assert line in message
    assert not line or f'File "{__file__}", line ' in message
    assert len(message.splitlines()) <= 4
    assert capfd.readouterr().err == ""


class Selected(nn.Module):
    """Uses what a mask selects, whose size depends on the data."""

    def __init__(self, use: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[x > 0]  # the line to be named
        return self.use(y).sum() * x


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "joined": lambda y: torch.cat([y, y]),
    "joined to nothing": lambda y: torch.cat([y, y.new_zeros(0)]),
    "viewed": lambda y: y.view(1, -1),
    "expanded": lambda y: torch.zeros(1).expand_as(y),
    "cut": lambda y: y[:2],
    "cut from behind": lambda y: y[1:],
    "copied": lambda y: torch.zeros_like(y).copy_(y),
    "broadcast": lambda y: torch.broadcast_tensors(y, torch.ones(1))[1],
    "cast": lambda y: y.double().type_as(y),
}


@pytest.mark.slow_cells("joined")
@pytest.mark.slow_cells("cast", "cut from behind", "cut", "joined to nothing", "viewed")
@pytest.mark.parametrize("name", USES)
def test_a_size_that_depends_on_the_data_is_refused_whatever_uses_it(name: str) -> None:
    with pytest.raises(TraceError, match="depends on the data") as caught:
        trace(Selected(USES[name]), (torch.ones(3),))
    assert "the line to be named" in str(caught.value)


def test_a_size_that_nothing_uses_is_none() -> None:
    program = trace(Selected(lambda y: torch.ones(2)), (torch.ones(3),))
    assert not program.module.graph.find_nodes(op="call_function", target=aten.index.Tensor)


def test_an_error_of_export_is_chained() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Branch(), (torch.ones(3),))
    assert caught.value.__cause__ is not None


@pytest.mark.slow
def test_large_models_are_traced_on_the_meta_device() -> None:
    """Llama-3-8B widths, 4 of 32 layers: 4.0 GB of weights, none of which exist."""
    with torch.device("meta"):
        model, _, _ = models.llama(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        )
    ids = torch.zeros(64, 4096, dtype=torch.int64, device="meta")
    program = trace(model, (), {"input_ids": ids, "labels": ids})
    assert program.tensors["lm_head.weight"].is_meta
    devices = {n.kwargs["device"].type for n in program.module.graph.nodes if "device" in n.kwargs}
    assert devices == {"cpu"}


@pytest.mark.slow
def test_meta_and_fake_and_real_give_the_same_graph() -> None:
    model, args, _ = models.gpt()
    meta_args = tuple(t.to("meta") for t in args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake_args = tuple(mode.from_tensor(t) for t in args)
    codes = {trace(model, a).module.code for a in (args, meta_args, fake_args)}
    with torch.device("meta"):
        codes.add(trace(models.gpt()[0], meta_args).module.code)
    assert len(codes) == 1


def test_reshapes_accept_other_strides_than_the_traced_ones() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x).reshape(-1)

    program = trace(Model(), (torch.ones(3, 4),))
    x = torch.arange(12.0).view(4, 3).t()
    torch.testing.assert_close(run(program, (x,)), x.reshape(-1))
