"""What a plan says of matmuls that it does not split, and of sizes that no axis divides."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.strategy import IDLE


class Words(nn.Module):
    def __init__(self, vocabulary: int, mean_loss: float = 0.0) -> None:
        super().__init__()
        self.mean_loss = mean_loss
        self.embed, self.head = nn.Embedding(vocabulary, 64), nn.Linear(64, vocabulary, bias=False)
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        logits = self.head(x).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten())
        if not self.mean_loss:
            return loss
        return loss + self.mean_loss * logits.sum(-1).square().mean()


def plan_words(vocabulary: int, layout: str, mean_loss: float = 0.0) -> autopar.Plan:
    with torch.device("meta"):
        ids = torch.empty(4, 12, dtype=torch.int64)
        return autopar.plan(Words(vocabulary, mean_loss), 4, (ids, ids), layout=layout)


def printed(value: object) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(value)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_vocabulary_that_no_axis_divides_is_named_with_the_next_multiple() -> None:
    """An op that takes no padding, a sum of all logits, keeps the vocabulary as it is."""
    uneven, even = (plan_words(words, "megatron", 1e-4) for words in (50257, 50260))
    (note,) = [note for note in uneven.notes if "pad it to" in note]
    assert "the vocabulary of head" in note and "50,260" in note
    assert uneven.comm_bytes > 100 * even.comm_bytes and not even.notes
    megabytes = float(note.split("sends ")[1].split(" MB")[0].replace(",", ""))
    assert megabytes == pytest.approx(uneven.comm_bytes / 1e6, rel=0.05)
    assert "50,260" in printed(uneven.why("head")) and "50,260" in printed(uneven.table())
    assert "50,260" not in printed(uneven.why("up"))


def test_a_vocabulary_is_not_named_where_the_batch_is_split() -> None:
    assert not plan_words(50257, "fsdp").notes


def test_batch_norms_send_sums_of_channels_and_no_images() -> None:
    """An image net of this size once gathered every activation around its batch norms."""
    with torch.device("meta"):
        blocks = [
            layer
            for channels in (3, 64, 64)
            for layer in (nn.Conv2d(channels, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
        ]
        net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        plan = autopar.plan(net, 4, (torch.empty(32, 3, 112, 112),), layout="fsdp")
    weights = sum(p.numel() for p in net.parameters()) * 4
    assert not plan.unsplit
    assert plan.comm_bytes < 4 * weights < 4 * 64 * 112 * 112


class Towers(nn.Module):
    """Captions beside images, compared with one another: the batch of each is a dim of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.words = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.pixels = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        words = F.normalize(self.words(self.embed(ids).mean(1)), dim=-1)
        scores = words @ F.normalize(self.pixels(images), dim=-1).t()
        return sum(F.cross_entropy(x, torch.arange(len(x))) for x in (scores, scores.t()))


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(64, 64)
        self.rnn = nn.LSTM(32, 32, 2, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.rnn(self.embed(ids))[0]).mT, labels)


@pytest.mark.slow_cells("Letters-ddp", "Letters-fsdp", "Towers-ddp")
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [Towers, Letters])
def test_the_batches_of_all_inputs_and_of_recurrent_layers_are_split(
    kind: type[nn.Module], layout: str
) -> None:
    torch.manual_seed(0)
    model, ids = kind(), torch.randint(64, (8, 6))
    inputs = ids, torch.randn(8, 48) if kind is Towers else ids
    plan = autopar.plan(model, 4, inputs, layout=layout)
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert not plan.unsplit and plan.comm_bytes < 4 * weights
    heavy = {n: c.splits for n, c in plan.choices.items() if n.startswith(("linear", "lstm"))}
    assert len(heavy) >= 2
    assert not any(all(split in IDLE for split in splits) for splits in heavy.values()), heavy
    autopar.verify(model, 4, inputs, layout=layout)


class Wave(nn.Module):
    """Ten small convolutions, which cost less than the messages of any split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 32, 1)
        self.middle = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1) for _ in range(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for conv in self.middle:
            x = x + conv(x).tanh()
        return F.cross_entropy(self.last(x.relu()), y)


@pytest.mark.slow
def test_auto_says_that_fewer_ranks_would_be_as_fast_where_it_splits_nothing() -> None:
    inputs = torch.randn(8, 1, 64), torch.randint(32, (8, 64))
    plan = autopar.plan(Wave(), 4, inputs)
    assert plan.smaller is not None and plan.smaller[0] == 1
    assert not plan.unsplit
    (note,) = plan.notes
    assert note.startswith("10 of 10 matmuls run whole on all ranks of axis ")
    assert note.endswith("fewer ranks would be as fast")


# -- images at the sizes that people train ---------------------------------------------------------
class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.block = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU())
        self.up, self.head = nn.ConvTranspose2d(64, 64, 2, 2), nn.Linear(64, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.interpolate(self.up(self.block(self.stem(x))), scale_factor=0.5, mode="bilinear")
        x = F.pad(x, (1, 1, 1, 1), mode="reflect").roll((1, 2), (2, 3))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), y)


@pytest.mark.slow_cells("auto", "megatron")
@pytest.mark.parametrize("layout", ["fsdp", "megatron", "auto"])
def test_large_images_leave_nothing_unsharded(layout: str) -> None:
    with torch.device("meta"):
        model, inputs = Images(), (torch.empty(32, 3, 224, 224), torch.zeros(32, dtype=torch.long))
    plan = autopar.plan(model, 4, inputs, layout=layout, smaller=False)
    assert not plan.unsplit
    windows = ("conv", "max_pool", "group_norm", "upsample", "roll", "pad", "adaptive")
    choices = {n: c.splits for n, c in plan.choices.items() if n.startswith(windows)}
    assert len(choices) >= 9
    whole = [n for n, splits in choices.items() if all(split in IDLE for split in splits)]
    assert not whole or layout == "megatron"


def test_a_head_of_ten_classes_does_not_refuse_megatron_to_a_convolutional_net() -> None:
    model, inputs = Images(), (torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))
    report = autopar.verify(model, 4, inputs, layout="megatron")
    assert report is not None


class Einsum(nn.Module):
    """An einsum with its weight first or second."""

    def __init__(self, equation: str, first: bool) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(12, 8))
        self.equation, self.first = equation, first

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        operands = (self.weight, x) if self.first else (x, self.weight)
        return torch.einsum(self.equation, *operands).square().mean()


@pytest.mark.parametrize(("equation", "first"), [("oi,bi->bo", True), ("bi,oi->bo", False)])
def test_an_einsum_splits_its_batch_wherever_its_weight_stands(equation: str, first: bool) -> None:
    model, inputs = Einsum(equation, first), (torch.randn(8, 8),)
    plan = autopar.plan(model, 4, inputs, layout="ddp", smaller=False)
    assert plan.choices["einsum"].splits == ("b",) and not plan.unsplit
    autopar.verify(model, 4, inputs, layout="megatron")


class ConvNext(nn.Module):
    """A stem, and blocks whose depthwise and strided convolutions lie in the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = width, 2 * width
        self.stem, self.down = nn.Conv2d(3, width, 4, 4), nn.Conv2d(*widths, 2, 2)
        self.mixes = nn.ModuleList(nn.Conv2d(n, n, 7, padding=3, groups=n) for n in widths)
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))
            for n in widths
        )

    def block(self, x: Tensor, stage: int) -> Tensor:
        y = self.mixes[stage](x).permute(0, 2, 3, 1)
        return x + self.mlps[stage](y).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.down(self.block(self.stem(x), 0)), 1).square().mean()


@pytest.mark.slow
def test_convolutions_of_the_residual_stream_may_split_their_channels_under_megatron() -> None:
    with torch.device("meta"):
        model, inputs = ConvNext(192), (torch.empty(32, 3, 224, 224),)
    world = autopar.World.preset("dgx-h100", ranks=4)
    plan = autopar.plan(model, world, inputs, layout="megatron", smaller=False)
    assert plan.choices["conv2d_2"].splits in (("o",), ("c",))
    autopar.verify(ConvNext(8), 4, (torch.randn(4, 3, 32, 32),), layout="megatron")
