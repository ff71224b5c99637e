"""Random numbers in forward: the same on every rank, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar._compat import pytree
from autopar.errors import PlanError, TraceError, VerificationError
from autopar.ops import sharded
from autopar.passes.draws import draws
from autopar.passes.pass_manager import PassManager
from autopar.passes.trace.signature import bind
from autopar.planner import confirm, planner
from autopar.planner.request import PlanRequest
from autopar.planner.tracing import trace_model
from autopar.runtime.verify import compare
from autopar.world import World
from mutations import MUTATIONS, Mutation, broken
from plans import subject

KEEP = 0.75


def stochastic_depth(x: Tensor) -> Tensor:
    keep = KEEP + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)
    return x.div(KEEP) * keep.floor_()


def stochastic_depth_by_bernoulli(x: Tensor) -> Tensor:
    return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(KEEP).div_(KEEP)


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(torch.rand(x.shape[:2])[..., None] < 1 - KEEP, 0.0)


def mask_above(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) >= 1 - KEEP, x, -x)


def mask_at_most(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) <= KEEP, x, -x)


def dropped_above(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) > KEEP, -x, x)


DRAWS = (
    stochastic_depth,
    stochastic_depth_by_bernoulli,
    masked,
    mask_above,
    mask_at_most,
    dropped_above,
)


@pytest.mark.slow_cells(
    "Dropout1d(p=0.25, inplace=False)", "FeatureAlphaDropout(p=0.25, inplace=False)",
)  # fmt: skip
@pytest.mark.parametrize(
    "module", [nn.Dropout1d(0.25), nn.AlphaDropout(0.25), nn.FeatureAlphaDropout(0.25)], ids=str
)
def test_torch_s_other_dropouts_are_masks(module: nn.Module) -> None:
    check = autopar.verify(Model(module), 4, inputs(), layout="megatron")
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-12


class Model(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(16, 32), nn.Linear(32, 16), draw

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.draw(self.down(F.gelu(self.up(x))))).square().mean()


def inputs() -> tuple[Tensor]:
    return (torch.randn(8, 4, 16),)


@pytest.mark.slow_cells(
    "fsdp-stochastic_depth", "fsdp-stochastic_depth_by_bernoulli", "megatron-stochastic_depth",
)  # fmt: skip
@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("layout", ["megatron", "fsdp"])
def test_every_layout_draws_the_same(draw: Callable[[Tensor], Tensor], layout: str) -> None:
    check = autopar.verify(Model(draw), 4, inputs(), layout=layout)
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-12


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_as_many_survive_as_on_one_device(draw: Callable[[Tensor], Tensor]) -> None:
    """The part of ones that a draw leaves alone, of the model and of its graph."""

    class Draw(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return draw(x)

    torch.manual_seed(0)
    ones = torch.ones(4000, 1, 1)
    program = draws(trace_model(Draw(), (ones,)))
    for result in (draw(ones), program.module(ones)[0]):
        assert len(result.unique()) == 2
        assert float((result == result.max()).float().mean()) == pytest.approx(KEEP, abs=0.03)
        assert float(result.max()) in (1.0, pytest.approx(1 / KEEP))


def test_every_call_draws_anew() -> None:
    par = autopar.parallelize(Model(stochastic_depth), 1, (x := inputs())[:1])
    losses = {float(par(*x).detach()) for _ in range(4)}
    assert len(losses) > 1


def two_masks(x: Tensor) -> Tensor:
    drawn = torch.rand_like(x)
    return torch.where(drawn < 0.5, x, 0.0) + torch.where(drawn >= 0.5, 2 * x, 0.0)


def counts(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) + 1.5).floor()


def by_a_tensor(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) < x)


def reparametrised(x: Tensor) -> Tensor:
    return x + (0.5 * x).exp() * torch.randn_like(x)


def noised(x: Tensor) -> Tensor:
    """As diffusion adds noise at a random timestep."""
    share = torch.linspace(0.9, 0.1, 10)[torch.randint(0, 10, (x.shape[0],))][:, None, None]
    return share.sqrt() * x + (1 - share).sqrt() * torch.empty_like(x).normal_()


def chosen(x: Tensor) -> Tensor:
    return F.gumbel_softmax(x, hard=True)


def shuffled(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))]


def sampled(x: Tensor) -> Tensor:
    scores = x.softmax(-1).flatten(0, 1)
    places = torch.multinomial(scores, 2) + torch.multinomial(scores, 2, replacement=True)
    return x + places.sum(-1).reshape(x.shape[:2])[..., None]


def leaking(x: Tensor) -> Tensor:
    return F.rrelu(x, training=True)


def projected(x: Tensor) -> Tensor:
    """A product takes operands of one dtype, so a draw of the default dtype follows the model's."""
    return torch.rand(x.shape) @ x.mT @ x


USES = (two_masks, counts, by_a_tensor, reparametrised, noised, chosen, shuffled, sampled, leaking,
        projected)  # fmt: skip


@pytest.mark.slow_cells("chosen", "noised", "sampled")
@pytest.mark.parametrize("draw", USES, ids=lambda draw: draw.__name__)
def test_other_uses_are_the_same_in_every_layout(draw: Callable[[Tensor], Tensor]) -> None:
    number = USES.index(draw)
    layout = ("fsdp", "auto", "ddp")[number % 3]
    check = autopar.verify(Model(draw), (2, 4)[number % 2], inputs(), layout=layout)
    assert max(check.loss_error, check.grad_error, check.step_error) < 1e-9


def test_noise_is_split_as_what_it_is_added_to() -> None:
    def body(x: Tensor) -> Tensor:
        return F.gelu(reparametrised(x))

    model = nn.Sequential(nn.Linear(16, 32), Drawing(body), nn.Linear(32, 16))
    plan = autopar.plan(model, 4, (torch.randn(8, 16),), layout="megatron", smaller=False)
    assert plan.context is not None
    graph = plan.context.program.module.graph
    (noise,) = graph.find_nodes(op="call_function", target=sharded.draw)
    assert noise.args[2] == [8, 8] and noise.args[-1] == [8, 32]


@pytest.mark.parametrize("mutation", MUTATIONS[sharded.draw], ids=lambda change: change.__name__)
def test_verify_notices_other_numbers(mutation: Mutation) -> None:
    known = subject(Model(reparametrised), inputs())
    world, request = World.of(2), PlanRequest("fsdp")
    chosen = planner.choose_plan(PassManager(), known.program, world, request)
    program = confirm.rewrite_for_ranks(PassManager(), chosen, world)
    leaves = list(known.inputs)
    assert compare(program, known.single, leaves, 1e-9).ranks == 2
    (noise,) = program.module.graph.find_nodes(op="call_function", target=sharded.draw)
    wrong = broken(program, noise.name, mutation)
    assert wrong is not None
    with pytest.raises(VerificationError):
        compare(wrong, known.single, leaves, 1e-9)


# -- each draw against torch's ---------------------------------------------------------------------
N = 20_000
LIKE = torch.empty(N)
DISTRIBUTIONS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(N),
    "rand_like": lambda: torch.rand_like(LIKE),
    "uniform": lambda: torch.empty(N).uniform_(-2, 3),
    "randn": lambda: torch.randn(N),
    "normal": lambda: torch.normal(2.0, 0.5, (N,)),
    "normal of tensors": lambda: torch.normal(torch.ones(N), torch.full((N,), 3.0)),
    "normal of a mean": lambda: torch.normal(torch.ones(N), 2.0),
    "normal of deviations": lambda: torch.normal(1.0, torch.full((N,), 2.0)),
    "normal_": lambda: torch.empty(N).normal_(1, 2),
    "log_normal": lambda: torch.empty(N).log_normal_(0.5, 0.3),
    "exponential": lambda: torch.empty(N).exponential_(2.0),
    "randint": lambda: torch.randint(-3, 12, (N,)),
    "randint_like": lambda: torch.randint_like(LIKE, 2, 7),
    "random_": lambda: torch.empty(N).random_(9),
    "random_ of floats": lambda: torch.empty(N).random_(),
    "random_ of bytes": lambda: torch.empty(N, dtype=torch.uint8).random_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((N,), 0.3)),
    "bernoulli_": lambda: torch.empty(N).bernoulli_(torch.full((N,), 0.7)),
    "rrelu": lambda: F.rrelu(torch.linspace(-1, 1, N), training=True),
    "randperm": lambda: torch.randperm(N),
    "multinomial": lambda: torch.multinomial(torch.tensor([0.1, 0.0, 0.6, 0.3]), N, True),
    "multinomial of one": lambda: torch.multinomial(torch.ones(N, 3), 1)[:, 0],
    "multinomial of two": lambda: torch.multinomial(
        torch.tensor([0.1, 0.0, 0.6, 0.3]).expand(N, 4), 2
    ).matmul(torch.tensor([10, 1])),
    "complex": lambda: torch.view_as_real(torch.randn(N, dtype=torch.complex64)).flatten(),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_numbers_are_distributed_as_torch_s(name: str) -> None:
    """By the statistic of Kolmogorov and Smirnov of two samples."""
    torch.manual_seed(0)
    wanted = DISTRIBUTIONS[name]()
    par: Any = autopar.parallelize(Drawing(lambda x: DISTRIBUTIONS[name]() + 0 * x), 1, (zero(),))
    drawn_values = par(zero()).to(wanted.dtype)
    # Larger by chance once in a thousand.
    assert distance(drawn_values, wanted) < 1.95 * (2 / len(wanted)) ** 0.5
    assert not torch.equal(drawn_values, wanted)
    if name == "randperm":
        assert torch.equal(drawn_values.sort().values, torch.arange(N))


def test_draws_of_one_graph_differ_and_so_do_calls() -> None:
    def both(x: Tensor) -> Tensor:
        return torch.stack((torch.randn(100), torch.randn(100))) + x

    par: Any = autopar.parallelize(Drawing(both), 1, (torch.zeros(()),))
    first, second = par(torch.zeros(())), par(torch.zeros(()))
    noise, other, *later = (*first, *second)
    assert len({tuple(x.tolist()) for x in (noise, other, *later)}) == 4
    assert float((noise * other).mean()) < 0.5


def distance(actual: Tensor, wanted: Tensor) -> float:
    """The largest difference of the two samples' shares of numbers up to any one."""
    actual, wanted = actual.double().sort().values, wanted.double().sort().values
    assert actual.shape == wanted.shape
    both = torch.cat((actual, wanted)).unique()
    shares = (torch.searchsorted(x, both, right=True) / len(x) for x in (actual, wanted))
    return float((next(shares) - next(shares)).abs().max())


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)


def test_no_gradient_goes_through_a_draw() -> None:
    mean = torch.randn(4, requires_grad=True)
    program = draws(trace_model(Drawing(lambda x: torch.normal(x, x.exp()) + x), (mean,)))
    (gradient,) = torch.autograd.grad(program.module(mean)[0].sum(), mean)
    assert torch.equal(gradient, torch.ones(4))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, drawn: x + torch.rand(4, generator=drawn),
        lambda x, drawn: x + torch.empty(4).normal_(generator=drawn),
        lambda x, drawn: x + torch.bernoulli(x, generator=drawn),
    ],
    ids=["rand", "normal_", "bernoulli"],
)
def test_a_generator_of_the_model_is_refused_with_a_remedy(draw: Any) -> None:
    drawn = torch.Generator()
    with pytest.raises(TraceError, match=r"(?s)torch\.Generator of its own.*Leave generator= out"):
        trace_model(Drawing(lambda x: draw(x, drawn)), (torch.ones(4),))


# -- recurrent layers ------------------------------------------------------------------------------
RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(16, 16, 3, dropout=0.2, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(16, 16, 2, dropout=0.2),
    "rnn": lambda: nn.RNN(16, 16, 2, dropout=0.2, bias=False),
    "projected": lambda: nn.LSTM(16, 16, 2, dropout=0.2, proj_size=8),
}


@pytest.mark.slow_cells("gru", "lstm", "projected")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_drop_between_them(name: str) -> None:
    """Without dropout, an op for each layer is the op of all."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.up = RECURRENT[name](), nn.Linear(16, 16)

        def forward(self, x: Tensor, start: Any = None) -> tuple[Tensor, Any]:
            return self.layers(self.up(x), start)

    model, x = Recurrent(), torch.randn(4, 4, 16)
    call = x, pytree.tree_map(torch.randn_like, model(x)[1])
    program = draws(trace_model(model, call))
    rates = [n for n in program.module.graph.nodes if n.target is torch.ops.aten.dropout.default]
    assert len(rates) == model.layers.num_layers - 1
    for node in rates:
        node.update_arg(1, 0.0)
    program.module.recompile()
    model.layers.dropout = 0.0
    values = bind(program, call)
    flat = pytree.tree_leaves(model(*call))
    for actual, wanted in zip(program.module(*values), flat, strict=True):
        torch.testing.assert_close(actual, wanted)
    model.layers.dropout = 0.2
    autopar.verify(model, 2, call, layout="ddp")


def test_recurrent_layers_that_drop_nothing_stay() -> None:
    model = nn.LSTM(16, 16, 2, dropout=0.2).eval()
    program = trace_model(model, (torch.randn(3, 4, 16),))
    assert draws(program) is program


# -- micro-batches ---------------------------------------------------------------------------------
@pytest.mark.slow_cells("noised")
@pytest.mark.parametrize("draw", [noised, reparametrised, masked], ids=lambda draw: draw.__name__)
def test_microbatches_of_a_step_are_the_step_but_for_their_numbers(
    draw: Callable[[Tensor], Tensor],
) -> None:
    autopar.verify(Model(draw), 2, inputs(), layout="fsdp", microbatches=2)


def test_a_permutation_of_the_batch_is_refused_in_microbatches() -> None:
    with pytest.raises(PlanError, match="computes with the rows of all micro-batches"):
        autopar.plan(Model(shuffled), 2, inputs(), layout="fsdp", microbatches=2)


class Masked(nn.Module):
    """Divides by the number of tokens that it draws: micro-batches would need that of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        labels = labels.masked_fill(torch.rand(labels.shape) < 0.5, -100)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_a_count_of_what_is_drawn_is_refused_in_microbatches() -> None:
    call = (*inputs(), torch.zeros(8, 4, dtype=torch.int64))
    autopar.verify(Masked(), 2, call, layout="fsdp")
    with pytest.raises(
        PlanError, match="draws random numbers that a sum over all micro-batches needs"
    ):
        autopar.plan(Masked(), 2, call, layout="fsdp", microbatches=2)
