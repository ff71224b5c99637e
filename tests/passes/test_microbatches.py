"""The micro-batches of a step add up to the step of the whole batch, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import InputError, PlanError, VerificationError
from autopar.planner.tracing import call_arguments, trace_model, trace_step
from autopar.runtime.microbatches_check import compare_microbatches

ROWS, TOKENS, CLASSES = 12, 5, 16
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)
        self.norm, self.drop, self.loss = nn.LayerNorm(8), nn.Dropout(0.2), loss

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Any:
        scores = self.head(self.drop(torch.tanh(self.norm(self.embedding(ids)))))
        return self.loss(self, scores, labels, mask)


def mean_of_tokens(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def class_dim_inside(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, label_smoothing=0.1)


def sum_of_tokens(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") / 60


def masked_mean(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(scores.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum().clamp(min=1)


def means_of_means(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return scores.square().mean(-1).mean() - 2 * scores.mean() + F.mse_loss(scores, scores * 0.5)


def with_a_penalty(model: Any, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return scores.square().sum() + 0.3 * model.head.weight.square().sum()


def penalty_first(model: Any, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return model.head.weight.square().sum() - scores.square().sum()


def count_in_a_root(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return scores.square().sum() / torch.sqrt(mask.sum() + 1)


def a_count_used_twice(model: Any, scores: Tensor, labels: Tensor, mask: Tensor) -> Any:
    count = mask.sum()
    penalty = count * model.head.weight.square().sum()  # a sum over the micro-batches, as it is
    masked = (scores.square().sum(-1) * mask).sum()
    return penalty + masked / count + count / (1 + count), 2 * count, count


def rows_read_by_number(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    rows = torch.arange(mask.shape[0])[:, None]
    own = mask[rows, torch.arange(TOKENS)[None, :]]
    return (scores.square().sum(-1) * own).sum() / mask.sum()


def a_loss_that_is_not_returned(
    model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor
) -> Tensor:
    F.cross_entropy(scores.flatten(0, 1), labels.flatten())  # nothing else ties labels to scores
    return scores.square().mean()


def numbers_of_the_batch(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Any:
    rows, count = scores.shape[0], torch.ones(scores.shape[0], dtype=torch.float64).sum()
    loss = scores.square().sum() / rows + scores.sum() * (1 / scores[..., 0].numel())
    return loss + scores.square().sum() / count, torch.full((2,), rows), rows


def with_scores(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Any:
    return {"loss": scores.square().mean(), "scores": scores, "tokens": mask.sum()}


def log_likelihood(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(scores, -1).flatten(0, 1), labels.flatten())


def means_of_other_losses(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    wanted, signs = mask.unsqueeze(-1).expand_as(scores), mask * 2 - 1
    rows = scores.flatten(0, 1)
    probabilities = (rows.detach() * 2).softmax(-1)
    return (
        F.kl_div(rows.log_softmax(-1), probabilities, reduction="batchmean")
        + F.binary_cross_entropy(scores.sigmoid(), wanted)
        + F.soft_margin_loss(scores[..., 0], signs, reduction="sum")
        + F.cosine_embedding_loss(rows, rows.square(), signs.flatten())
        + F.triplet_margin_loss(scores, scores.square(), scores * 2)
        + F.cross_entropy(rows, probabilities)
        + F.poisson_nll_loss(scores, wanted)
    )


LOSSES = [
    mean_of_tokens, class_dim_inside, sum_of_tokens, masked_mean, means_of_means, with_a_penalty,
    penalty_first, count_in_a_root, a_count_used_twice, rows_read_by_number, log_likelihood,
    means_of_other_losses, a_loss_that_is_not_returned, numbers_of_the_batch, with_scores,
]  # fmt: skip


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Micro-batches differ in how many tokens count; the first has none."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=generator)
    labels = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=generator)
    mask = (torch.rand(ROWS, TOKENS, generator=generator) < 0.4).double()
    labels[:3], labels[5, 2:], mask[:3] = -100, -100, 0
    return ids, labels, mask


def compared(loss: Loss, count: int) -> None:
    torch.manual_seed(0)
    model, call = Model(loss).double(), call_arguments(inputs())
    microbatch, microbatches = trace_step(copy.deepcopy(model), call, count)
    assert microbatches is not None
    compare_microbatches(trace_model(model, call), microbatch, microbatches, call, 1e-12)


SLOW = pytest.mark.slow
COUNTS = [4, pytest.param(2, marks=SLOW), pytest.param(ROWS, marks=SLOW)]


@pytest.mark.slow_cells("means_of_means-4", "with_a_penalty-4", "with_scores-4")
@pytest.mark.slow_cells(
    "a_count_used_twice-4", "a_loss_that_is_not_returned-4", "class_dim_inside-4",
    "count_in_a_root-4", "log_likelihood-4", "masked_mean-4", "mean_of_tokens-4",
    "means_of_other_losses-4", "numbers_of_the_batch-4", "rows_read_by_number-4",
    "sum_of_tokens-4",
)  # fmt: skip
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_microbatches_add_up_to_the_step(loss: Loss, count: int) -> None:
    compared(loss, count)


def test_counts_of_a_microbatch_alone_are_seen_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the mean of each micro-batch taken over its own tokens, this would say so."""
    from autopar.passes import microbatches

    def own_mean(self: Any, node: Any) -> None:
        self.states[node] = "sum"
        self._scale(node)

    monkeypatch.setattr(microbatches._Division, "_divide_by_total", own_mean)
    with pytest.raises(VerificationError, match="4 micro-batches is not the step"):
        compared(mean_of_tokens, 4)


def test_a_loss_keeps_its_dtype() -> None:
    model, call = Model(mean_of_tokens).bfloat16(), call_arguments(inputs())
    microbatch, _ = trace_step(model, call, 4)
    (results,) = microbatch.module.graph.output_node().args
    assert results[0].meta["val"].dtype is torch.bfloat16
    tensors = {e.node: microbatch.tensors.get(e.target) for e in microbatch.signature.inputs}
    leaves = [*(x[:3] for x in call.args), torch.tensor(40.0)]
    values = [
        leaves[e.position or 0] if e.kind == "user" else tensors[e.node]
        for e in microbatch.signature.inputs
    ]
    assert microbatch.module(*values)[0].dtype is torch.bfloat16


# -- what is refused -------------------------------------------------------------------------------
def perplexity(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return torch.exp(mean_of_tokens(model, scores, labels, mask))


def contrastive(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    rows = scores.mean(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(rows.shape[0]))


def batch_statistics(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (scores - scores.mean(0)).square().mean()


def weighed_by_place(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (scores.mean((1, 2)) * torch.arange(scores.shape[0])).sum()


def places_as_a_result(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Any:
    return scores.square().mean(), torch.arange(scores.shape[0]).unsqueeze(1)


def half_of_the_rows(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return scores[: scores.shape[0] // 2].square().mean()


def another_graph(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return scores.square().mean() if scores.shape[0] == ROWS else scores.abs().mean()


def weights_of_classes(model: Any, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), weights)


def weights_of_likelihoods(model: Any, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
    return F.nll_loss(F.log_softmax(scores, -1).flatten(0, 1), labels.flatten(), weights)


def no_loss(model: nn.Module, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return scores


REFUSED = {
    perplexity: "needs a sum over all micro-batches",
    contrastive: "micro-batches: ",
    batch_statistics: "needs a sum over all micro-batches",
    weighed_by_place: "computes with the numbers of its rows",
    places_as_a_result: "numbers its rows",
    half_of_the_rows: "micro-batches: slice_",
    another_graph: "computes otherwise on a",
    weights_of_classes: "weighs tokens by their class",
    weights_of_likelihoods: "weighs tokens by their class",
    no_loss: "returns no loss",
}


@pytest.mark.slow_cells("contrastive-4", "batch_statistics-4")
@pytest.mark.slow_cells(
    "no_loss-4", "perplexity-4", "weights_of_classes-4", "weights_of_likelihoods-4",
)  # fmt: skip
@pytest.mark.parametrize("count", [4, pytest.param(ROWS, marks=SLOW)])
@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_what_crosses_the_microbatches_is_refused(loss: Loss, count: int) -> None:
    with pytest.raises(PlanError, match=REFUSED[loss]):
        trace_step(Model(loss).double(), inputs(), count)


def test_batch_norm_is_refused_with_its_line() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square().mean()

    with pytest.raises(PlanError, match=r"micro-batches: .*inner.1"):
        trace_step(Mean(), (torch.ones(8, 4),), 2)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="microbatches is 5, and the inputs have 12 rows"):
        autopar.plan(Model(mean_of_tokens).double(), 2, inputs(), microbatches=5)
    with pytest.raises(PlanError, match="microbatches is 0: it is 'auto' or a whole number"):
        autopar.plan(Model(mean_of_tokens), 2, inputs(), microbatches=0)


@pytest.mark.parametrize("count", [2, 4])
def test_a_mask_of_as_many_tokens_as_rows_is_the_same_in_all_microbatches(count: int) -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor, weights: Tensor, table: Tensor) -> Tensor:
            mixed = torch.einsum("st,btd->bsd", table, super().forward(x))
            return (mixed.square().mean(-1) * weights).sum()

    generator = torch.Generator().manual_seed(0)
    sizes = (4, 4, 8), (4,), (4, 4)
    call = call_arguments(tuple(torch.randn(s, generator=generator).double() for s in sizes))
    model = Masked(8, 8).double()
    microbatch, microbatches = trace_step(model, call, count)
    assert microbatches is not None and microbatches.split == {0}
    compare_microbatches(trace_model(model, call), microbatch, microbatches, call, 1e-12)


def test_an_input_with_a_gradient_is_refused() -> None:
    class Prompted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    with pytest.raises(PlanError, match="an input requires a gradient"):
        trace_step(Prompted(4, 4), (torch.ones(8, 4, requires_grad=True),), 2)


@pytest.mark.slow
def test_verify_compares_what_ranks_run_with_the_full_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rewrite that is wrong alike on one rank and on several is seen."""
    model = Model(mean_of_tokens).double().eval()  # ranks' graphs are compared without dropout
    assert autopar.verify(model, 2, inputs(), "ddp", microbatches=2).loss_error < 1e-12
    rewritten = autopar.api.rewrite_for_ranks

    def doubled(*arguments: Any) -> Any:
        program = rewritten(*arguments)
        graph = program.module.graph
        (loss,) = graph.output_node().args[0]
        with graph.inserting_before(graph.output_node()):
            twice = graph.call_function(torch.ops.aten.mul.Tensor, (loss, 2.0))
        twice.meta = dict(loss.meta)
        graph.output_node().args = ((twice,),)
        program.module.recompile()
        return program

    monkeypatch.setattr(autopar.api, "rewrite_for_ranks", doubled)
    with pytest.raises(VerificationError, match="is not the step of the whole batch"):
        autopar.verify(model, 2, inputs(), "ddp", microbatches=2)
