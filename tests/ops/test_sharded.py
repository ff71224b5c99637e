"""Ops over split dims against the single-device ones: value and gradient, lockstep, float64."""

import sys
import zlib
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from autopar._compat import compiled_for
from autopar.errors import LayoutError
from autopar.ir.mesh import Mesh
from autopar.ops import sharded
from autopar.ops.sharded.dropout import FORMULAS
from autopar.ops.sharded.vocabulary import globalize, localize
from autopar.runtime import lockstep

MESH = Mesh.parse("a2.b3.z2")
TEXT = str(MESH)
# Digits of a dim of 24, never in mesh order by stride; the last three are whole divisor chains with
# the axes crossed.
DIGITS = [
    (("b", 8, 3),),
    (("b", 1, 3),),
    (("z", 12, 2), ("a", 2, 2)),
    (("a", 1, 2), ("b", 2, 3)),
    (("a", 3, 2), ("z", 12, 2), ("b", 1, 3)),
    (("a", 1, 2), ("b", 4, 3), ("z", 2, 2)),
]


def _random(shape, *key):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _coordinates(rank, digits, mesh=MESH):
    place = mesh.coordinate(rank)
    return [torch.tensor([place[axis]]) for axis, _, _ in digits]


def _rows(size, rank, digits, mesh=MESH):
    """The global indices of a dim that the rank owns, counted out one by one."""
    place = mesh.coordinate(rank)
    return torch.tensor(
        [i for i in range(size) if all(i // s % p == place[a] for a, s, p in digits)]
    )


def _cut(x, dim, rank, digits, mesh=MESH):
    return x.index_select(dim, _rows(x.shape[dim], rank, digits, mesh)).detach().requires_grad_()


def _names(digits):
    return tuple(axis for axis, _, _ in digits)


def _close(got, wanted, tolerance=1e-12):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("digits", DIGITS)
def test_local_and_global_indices(digits):
    for rank in range(MESH.size):
        rows, coordinates = _rows(24, rank, digits), _coordinates(rank, digits)
        local, owned = localize(torch.arange(24), coordinates, digits)
        assert owned.nonzero().flatten().tolist() == rows.tolist()
        assert local[owned].tolist() == list(range(len(rows)))
        assert local.min() >= 0 and local.max() < len(rows)
        assert globalize(torch.arange(len(rows)), coordinates, digits).tolist() == rows.tolist()


@pytest.mark.parametrize("digits", DIGITS)
@pytest.mark.parametrize("norm", ["layer", "layer without bias", "layer bare", "rms", "rms bare"])
def test_a_split_norm_equals_one_device(digits, norm):
    x = (_random((3, 2, 24), "x") + 5).requires_grad_()
    weight = _random(24, "w").requires_grad_()
    bias = _random(24, "b").requires_grad_()
    dy = _random((3, 2, 24), "dy")
    used = {"layer": 3, "layer without bias": 2, "layer bare": 1, "rms": 2, "rms bare": 1}[norm]

    def on_one_device(x, weight=None, bias=None):
        if norm.startswith("rms"):
            return F.rms_norm(x, (24,), weight, 1e-5)
        return F.layer_norm(x, (24,), weight, bias, 1e-5)

    def split(x, weight=None, bias=None):
        if norm.startswith("rms"):
            return sharded.rms_norm(x, weight, 1e-5, 24, _names(digits), TEXT)
        return sharded.layer_norm(x, weight, bias, 1e-5, 24, _names(digits), TEXT)

    def rank_fn(rank):
        own = [_cut(t, t.dim() - 1, rank, digits) for t in (x, weight, bias)][:used]
        y = split(*own)
        y.backward(dy.index_select(2, _rows(24, rank, digits)))
        return y, *[t.grad for t in own]

    whole = (x, weight, bias)[:used]
    y = on_one_device(*whole)
    grads = torch.autograd.grad(y, whole, dy)
    for rank, got in enumerate(lockstep.run(MESH, rank_fn)):
        for mine, all_of_it in zip(got, (y, *grads), strict=True):
            _close(mine, _cut(all_of_it, all_of_it.dim() - 1, rank, digits))


def test_rms_norm_takes_torchs_eps_and_norms_reckon_half_in_single():
    x = _random((5, 24), "x").bfloat16() * 1e-3
    digits = DIGITS[0]
    split = lockstep.run(
        MESH,
        lambda rank: sharded.rms_norm(
            _cut(x, 1, rank, digits), None, None, 24, ("b",), TEXT
        ).detach(),
    )
    whole = F.rms_norm(x, (24,))
    assert split[0].dtype == torch.bfloat16
    for rank, got in enumerate(split):
        _close(got, _cut(whole, 1, rank, digits).detach(), 1e-2)


@pytest.mark.parametrize("digits", DIGITS)
@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_split_softmax_equals_one_device(digits, dim, name):
    shape = (3, 24, 2) if dim == 1 else (3, 2, 24)
    x, dy = (_random(shape, "x") * 30).requires_grad_(), _random(shape, "dy")

    def rank_fn(rank):
        own = _cut(x, dim, rank, digits)
        y = getattr(sharded, name)(own, dim, _names(digits), TEXT)
        y.backward(dy.index_select(dim, _rows(24, rank, digits)))
        return y, own.grad

    y = getattr(F, name)(x, dim)
    wanted = (y, *torch.autograd.grad(y, x, dy))
    for rank, got in enumerate(lockstep.run(MESH, rank_fn)):
        for mine, whole in zip(got, wanted, strict=True):
            _close(mine, _cut(whole, dim, rank, digits))


@pytest.mark.parametrize("digits", DIGITS)
@pytest.mark.parametrize("padding_idx", [None, -1, 5])
def test_a_vocabulary_split_embedding_equals_one_device(digits, padding_idx):
    weight = _random((24, 4), "w").requires_grad_()
    indices = torch.tensor([[0, 5, 5], [23, 7, 16], [8, 5, 0]])
    dy = _random((3, 3, 4), "dy")

    def rank_fn(rank):
        own = _cut(weight, 0, rank, digits)
        y = sharded.embedding(own, indices, _coordinates(rank, digits), digits, padding_idx)
        y.backward(dy)
        return y.detach(), own.grad

    y = F.embedding(indices, weight, None if padding_idx == -1 else padding_idx)
    (grad,) = torch.autograd.grad(y, weight, dy)
    got = lockstep.run(MESH, rank_fn)
    for rank in range(MESH.size):
        group = MESH.group(_names(digits), rank)
        _close(sum(got[r][0] for r in group), y.detach())
        _close(got[rank][1], _cut(grad, 0, rank, digits).detach())


# -- cross entropy ---------------------------------------------------------------------------------

TOKENS = 8


def _targets(tokens_shape, ignored):
    """Targets of which unequal numbers are ignored: all of the first half of the rows, or as
    `ignored` says.
    """
    target = torch.randint(0, 24, tokens_shape, generator=torch.Generator().manual_seed(7))
    if ignored == "unequal":
        target[: TOKENS // 2] = -7
        target[TOKENS // 2 + 1] = -7
    if ignored == "all":
        target[:] = -7
    return target


def _assert_cross_entropy(
    digits, token_digits, reduction, smoothing, weighted, ignored="unequal", trailing=()
):
    logits = (_random((TOKENS, 24, *trailing), "x") * 10).requires_grad_()
    target = _targets((TOKENS, *trailing), ignored)
    weight = _random(24, "w").abs() + 0.1 if weighted else None
    loss = F.cross_entropy(logits, target, weight, None, -7, None, reduction, smoothing)
    dy = _random(loss.shape, "dy")
    (grad,) = torch.autograd.grad(loss, logits, dy)

    def rank_fn(rank):
        rows = _rows(TOKENS, rank, token_digits)
        own = _cut(_cut(logits, 0, rank, token_digits), 1, rank, digits)
        slice_of_weight = None if weight is None else weight[_rows(24, rank, digits)]
        place = _coordinates(rank, digits)
        rest = (reduction, -7, smoothing, 24, place, digits, _names(token_digits), TEXT)
        y = sharded.cross_entropy(own, target[rows], slice_of_weight, *rest)
        y.backward(dy[rows] if reduction == "none" else dy)
        return y.detach(), own.grad

    got = lockstep.run(MESH, rank_fn)
    for rank in range(MESH.size):
        if reduction == "none":
            _close(got[rank][0], loss[_rows(TOKENS, rank, token_digits)].detach())
        else:
            partial = MESH.group(_names(token_digits), rank) if reduction == "sum" else [rank]
            torch.testing.assert_close(
                sum(got[r][0] for r in partial),
                loss.detach(),
                rtol=1e-12,
                atol=1e-12,
                equal_nan=True,
            )
        own = _cut(_cut(grad, 0, rank, token_digits), 1, rank, digits)
        torch.testing.assert_close(
            got[rank][1], own.detach(), rtol=1e-12, atol=1e-12, equal_nan=True
        )


@pytest.mark.parametrize("digits", [(), *DIGITS])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("smoothing", "weighted"), [(0.0, False), (0.2, False), (0.0, True), (0.3, True)]
)
def test_cross_entropy_with_the_vocabulary_split(digits, reduction, smoothing, weighted):
    _assert_cross_entropy(digits, (), reduction, smoothing, weighted)


@pytest.mark.parametrize("digits", [(), *DIGITS[:2]])
@pytest.mark.parametrize("token_digits", [(("a", 4, 2),), (("z", 4, 2), ("a", 1, 2))])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.3, True)])
def test_cross_entropy_with_tokens_split_and_unequal_numbers_ignored(
    digits, token_digits, reduction, smoothing, weighted
):
    _assert_cross_entropy(digits, token_digits, reduction, smoothing, weighted)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_every_token_ignored(reduction):
    _assert_cross_entropy(DIGITS[0], (("a", 4, 2),), reduction, 0.1, True, ignored="all")


def test_cross_entropy_has_the_classes_in_dim_1():
    _assert_cross_entropy(DIGITS[1], (("a", 4, 2),), "mean", 0.1, True, trailing=(3, 2))


def test_cross_entropy_of_one_token_without_a_batch():
    logits = _random(24, "x")
    digits = DIGITS[3]

    def rank_fn(rank):
        own, place = _cut(logits, 0, rank, digits), _coordinates(rank, digits)
        rest = ("mean", -100, 0.0, 24, place, digits, (), TEXT)
        return sharded.cross_entropy(own, torch.tensor(17), None, *rest).detach()

    for loss in lockstep.run(MESH, rank_fn):
        _close(loss, F.cross_entropy(logits, torch.tensor(17)))


def test_cross_entropy_of_masked_and_huge_logits():
    logits = _random((4, 24), "x") * 1e4
    logits[:, 5] = -float("inf")
    target = torch.tensor([0, 23, 12, 4])
    digits = DIGITS[0]

    def rank_fn(rank):
        own, place = _cut(logits, 1, rank, digits), _coordinates(rank, digits)
        loss = sharded.cross_entropy(
            own, target, None, "mean", -100, 0.0, 24, place, digits, (), TEXT
        )
        loss.backward()
        return loss.detach(), own.grad

    logits.requires_grad_()
    loss = F.cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(loss, logits)
    for rank, (got, got_grad) in enumerate(lockstep.run(MESH, rank_fn)):
        _close(got, loss.detach())
        _close(got_grad, _cut(grad, 1, rank, digits).detach())


def test_cross_entropy_refuses_probabilities():
    with pytest.raises(LayoutError, match="class probabilities"):
        sharded.cross_entropy(
            torch.ones(2, 3), torch.ones(2, 3), None, "mean", -100, 0.0, 3, [], (), (), TEXT
        )


# -- dropout ---------------------------------------------------------------------------------------


def _drop(x, p, seed, digits_by_dim=None, rank=0, shape=None):
    digits_by_dim = digits_by_dim or ((),) * x.dim()
    place = [k for digits in digits_by_dim for k in _coordinates(rank, digits)]
    return sharded.dropout(x, p, torch.tensor(seed), place, digits_by_dim, shape or x.shape)


@pytest.mark.parametrize("digits", DIGITS)
def test_dropout_does_not_know_the_layout(digits):
    x, taken = _random((6, 24), "x"), {axis for axis, _, _ in digits}
    rows = () if "b" in taken else (("b", 1, 3),)
    whole = _drop(x, 0.4, 99)
    for rank in range(MESH.size):
        own = _cut(_cut(x, 0, rank, rows), 1, rank, digits)
        got = _drop(own, 0.4, 99, (rows, digits), rank, (6, 24))
        assert torch.equal(got, _cut(_cut(whole, 0, rank, rows), 1, rank, digits))
        (grad,) = torch.autograd.grad(got.sum(), own)
        assert torch.equal(grad != 0, got != 0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**40 + 3])
def test_dropout_keeps_the_right_share(p, seed):
    n = 1 << 18
    y = _drop(torch.ones(512, n // 512), p, seed)
    deviation = 5 * (n * p * (1 - p)) ** 0.5
    assert abs((y != 0).sum() - n * (1 - p)) < deviation
    for dim in (0, 1):  # no row and no column stands out
        share = (y != 0).double().mean(dim)
        assert (share - (1 - p)).abs().max() < 5.5 * (p * (1 - p) / 512) ** 0.5
    assert y.max() == pytest.approx(1 / (1 - p))


@pytest.mark.parametrize(
    "seeds", [(0, 1), (5, 5 + 2**32), (1, -1), (123456, 123457), (8, 8 ^ 2**31)]
)
def test_dropout_masks_of_two_seeds_are_independent(seeds):
    n = 1 << 18
    first, other = ((_drop(torch.ones(n), 0.5, seed) != 0).double() * 2 - 1 for seed in seeds)
    for shift in (0, 1, 2, 3, 64, 1000):
        assert abs((first * other.roll(shift)).mean()) < 5 / n**0.5
        assert shift == 0 or abs((first * first.roll(shift)).mean()) < 5 / n**0.5


def test_dropout_of_nothing_and_of_everything():
    x = _random((3, 4), "x")
    assert torch.equal(_drop(x, 0, 1), x)
    assert torch.equal(_drop(x, 1, 1), torch.zeros(3, 4, dtype=torch.float64))


def test_dropout_tells_elements_apart_beyond_two_to_the_32():
    digits = (("a", 2**33, 2),)
    masks = [_drop(torch.ones(4096), 0.5, 3, (digits,), rank, (2**34,)) != 0 for rank in (0, 6)]
    assert 0.4 < (masks[0] == masks[1]).double().mean() < 0.6


@pytest.mark.parametrize("shape", [(), (1,), (70000,), (3, 5), (7, 40000), (2, 3, 1, 11000)])
@pytest.mark.parametrize("times", [1, 2**20])
def test_dropout_in_blocks_is_the_formula(shape, times):
    """On a CPU it goes block by block in 32-bit words, where the whole tensor's indices fit."""
    x = _random(shape, "x")
    whole = (*shape[:-1], shape[-1] * times) if shape else ()
    coordinates, digits = [torch.tensor([1])], [(), (), (), (("a", 1, 2),)][-len(shape) :]
    if len(shape) < 1:
        coordinates, digits = [], []
    elif times == 1:
        whole = (*shape[:-1], shape[-1] * 2)
    counts, facts = [len(d) for d in digits], [n for d in digits for _, *pair in d for n in pair]
    formula = FORMULAS[torch.ops.autopar.dropout.default]
    arguments = 0.3, torch.tensor(-77 << 30), coordinates, counts, facts, list(whole)
    assert torch.equal(sharded.dropout(x, *arguments[:3], digits, whole), formula(x, *arguments))


def test_dropout_of_what_is_not_contiguous():
    x = _random((6, 8), "x").T
    assert torch.equal(_drop(x, 0.4, 7), _drop(x.contiguous(), 0.4, 7))
    assert _drop(x, 0.4, 7).is_contiguous()


def test_dropout_is_an_op_that_torch_knows_all_about():
    coordinates = [torch.tensor([1])]
    arguments = 0.3, torch.tensor(5), coordinates, [0, 1], [1, 2], [3, 8]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.autopar.dropout.default, (x, *arguments))
    assert torch.autograd.gradcheck(lambda x: torch.ops.autopar.dropout(x, *arguments), (x,))


@pytest.mark.slow
def test_dropout_as_a_gpu_runs_it_is_compiled_within_the_op(monkeypatch):
    x = _random((4, 8), "x").requires_grad_()
    arguments = 0.4, torch.tensor(7), [torch.tensor([1])], [(("a", 4, 2),), ()], (8, 8)
    y = sharded.dropout(x, *arguments)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    formula = sys.modules["autopar.ops.sharded.dropout"]

    def on_gpu(x, seed, coordinates, how):
        return compiled_for(partial(formula._all_at_once, how=how))(x, seed, *coordinates)

    monkeypatch.setattr(formula, "_in_blocks", on_gpu)
    assert torch.equal(sharded.dropout(x, *arguments), y)
    assert torch.equal(torch.autograd.grad(sharded.dropout(x, *arguments).sum(), x)[0], gradient)
