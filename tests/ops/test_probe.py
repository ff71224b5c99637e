"""Rules found by trial: the right dims for ops without a rule, and no split that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.sharding_rule import OpShardingRule
from autopar.ops.rules.probe import probe, rule_of, unrepeatable
from shards import (
    Case,
    call,
    check,
    graph_of,
    integers,
    on_one_device,
    real,
    sample,
    trace,
)

aten = torch.ops.aten
KERNEL = "autopar_test"


@pytest.fixture(scope="module", autouse=True)
def _library() -> Iterator[None]:
    """Custom ops, as a user's model may hold."""
    library = torch.library.Library(KERNEL, "FRAGMENT")
    for schema, function in KERNELS.items():
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeImplicitAutograd")
    yield
    library._destroy()


def _blocks(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 3)).softmax(-1).flatten(-2)


def _running(x: Tensor) -> Tensor:
    return x.cummax(0).values


def _windows(x: Tensor, of: int) -> Tensor:
    return x.unflatten(1, (-1, of)).softmax(2).flatten(1, 2)


def _twice(x: Tensor, y: Tensor) -> Tensor:
    assert 2 * x.shape[1] == y.shape[0], "one dim is twice another"
    return x * y.narrow(0, 0, x.shape[1])


def _outer_mean(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x @ y, (x @ y).mean(-1)


KERNELS = {
    "scale(Tensor x, Tensor y, float f) -> Tensor": lambda x, y, f: x * y.tanh() * f,
    "blocks(Tensor x) -> Tensor": _blocks,
    "running(Tensor x) -> Tensor": _running,
    "pair(Tensor x, Tensor y) -> (Tensor, Tensor)": _outer_mean,
    "log_sum(Tensor x) -> Tensor": lambda x: (x.cumsum(-1) - 1e3).log(),
    "noise(Tensor x) -> Tensor": lambda x: x + torch.randn_like(x),
    "rare(Tensor x) -> Tensor": lambda x: x * (torch.rand_like(x) > 1e-3),
    "swap(Tensor x, Tensor? bias, Tensor y) -> Tensor": lambda x, bias, y: y - x,
    "position(Tensor x) -> Tensor": lambda x: x + torch.arange(x.shape[-1], device=x.device),
    "first(Tensor x) -> Tensor": lambda x: (
        x * (torch.arange(x.shape[0], device=x.device) < 7).view(-1, 1)
    ),
    "mean_of(Tensor x) -> Tensor": lambda x: x - x.mean(0),
    "shift(Tensor x, int by) -> Tensor": lambda x, by: x.roll(by, 1),
    "windows(Tensor x, int of) -> Tensor": _windows,
    "twice(Tensor x, Tensor y) -> Tensor": _twice,
}


def kernel(name: str, *args: Any, note: str = "") -> Case:
    return Case(getattr(getattr(torch.ops, KERNEL), name).default, args, note=note)


def probed_rule(case: Case) -> OpShardingRule | None:
    _, node = graph_of(case)
    assert rule_of(node) is None, f"{case.name} has a rule: this tests nothing"
    return probe(node, {})


def in_words(rule: OpShardingRule | None) -> str:
    """The dims of operands and results that may be split: "a _, a _ -> a _"; "" without a rule."""
    if rule is None:
        return ""
    letters: dict[str, str] = {}

    def text(dims: Any) -> str:
        words = []
        for names in dims or ():
            splittable = [n for n in names if rule.splittable(n)]
            words.append(
                letters.setdefault(splittable[0], "abcdef"[len(letters)]) if splittable else "_"
            )
        return " ".join(words)

    sides = [
        ", ".join("-" if d is None else text(d) for d in side)
        for side in (rule.operands, rule.results)
    ]
    return f"{sides[0]} -> {sides[1]}"


ATEN = [
    (call(aten.mv.default, real(4, 6), real(6)), "a _, _ -> a"),
    (call(aten._cdist_forward.default, real(4, 6, 3), real(4, 9, 3), 2.0, None),
     "a b _, a c _ -> a b c"),
    (call(aten._cdist_forward.default, real(4, 4, 4), real(4, 4, 4), 2.0, None, note="square"),
     "a b _, a c _ -> a b c"),
    (call(aten.diagonal.default, real(4, 6, 6), 0, 1, 2), "a _ _ -> a _"),
    (call(aten.diag_embed.default, real(4, 6)), "a _ -> a _ _"),
    (call(aten.linalg_cross.default, real(4, 3, 6), real(4, 3, 6), dim=1), "a _ b, a _ b -> a _ b"),
    (call(aten.linalg_inv.default, real(4, 3, 3)), "a _ _ -> a _ _"),
    (call(aten.renorm.default, real(4, 6), 2, 0, 1.0), "a _ -> a _"),
    (call(aten.rot90.default, real(4, 6, 9), 2, [1, 2]), "a _ _ -> a _ _"),
    (call(aten.nanmedian.dim, real(4, 6), 1), "a _ -> a, a"),
    (call(aten.trapezoid.dx, real(4, 6)), "a _ -> a"),
    (call(aten.index_fill.int_Scalar, real(4, 6), 1, integers(6, 4), 0.0), "a _, _ -> a _"),
    (call(aten.isin.Tensor_Tensor, integers(5, 4, 6), integers(5, 9)),
     "a b, _ -> a b"),
    (call(aten.matrix_exp.default, real(4, 4)), ""),
    (call(aten.meshgrid.indexing, [real(4), real(6)], indexing="ij"), "a, b -> a b, a b"),
    (call(aten.renorm.default, real(11, 3), 2, 1, 1.0, note="odd"), "_ a -> _ a"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "words"), ATEN, ids=lambda x: x.name if isinstance(x, Case) else ""
)
def test_the_dims_that_may_be_split(case: Case, words: str) -> None:
    assert in_words(probed_rule(case)) == words


CUSTOM = [
    ("scale", (real(4, 6), real(4, 6), 2.0), "a b, a b -> a b"),
    ("scale", (real(4, 6), real(6), 2.0), "a b, b -> a b"),
    ("pair", (real(4, 6), real(6, 9)), "a _, _ _ -> a _, a"),
    ("swap", (real(4, 6), None, real(4, 6)), "a b, -, a b -> a b"),
    ("blocks", (real(4, 6),), "a _ -> a _"),
    ("blocks", (real(4, 12),), "a _ -> a _"),
    ("running", (integers(2, 6, 4),), "_ a -> _ a"),
    ("position", (real(4, 6),), "a _ -> a _"),
    ("first", (real(12, 6),), "_ a -> _ a"),
    ("mean_of", (real(4, 6),), "_ a -> _ a"),
    ("log_sum", (real(4, 6),), ""),
    ("noise", (real(4, 6),), ""),
]


@pytest.mark.parametrize(
    ("name", "args", "words"), CUSTOM, ids=lambda x: x if isinstance(x, str) else ""
)
def test_the_dims_of_custom_ops(name: str, args: tuple[Any, ...], words: str) -> None:
    assert in_words(probed_rule(kernel(name, *args))) == words


@pytest.mark.parametrize(
    "case",
    [
        call(aten.bernoulli.default, real(4, 6).sigmoid().detach()),
        call(aten.rand_like.default, real(4, 6)),
        call(aten.native_dropout.default, real(4, 6), 1e-9, True),
        call(aten.multinomial.default, real(4, 6, low=0.1), 2),
    ],
    ids=lambda case: case.name,
)
def test_random_ops_are_refused(case: Case) -> None:
    assert probed_rule(case) is None


def test_one_tensor_passed_twice_is_two_operands() -> None:
    graph, node = graph_of(kernel("scale", real(4, 6), real(4, 6), 2.0))
    first = next(iter(graph.nodes))
    node.args = (first, first, 2.0)
    assert in_words(probe(node, {})) == "a b, a b -> a b"


def test_probing_leaves_the_random_state_alone() -> None:
    _, node = graph_of(kernel("noise", real(4, 6)))
    before = torch.random.get_rng_state()
    assert probe(node, {}) is None
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_was_found_serves_every_layer_but_no_other_shape_or_argument() -> None:
    known: dict[object, OpShardingRule | None] = {}
    for args in (
        (real(4, 6), [0]),
        (real(4, 6), [0]),
        (real(4, 6), [1]),
        (real(6, 4), [0]),
        (integers(2, 4, 6), [0]),
    ):
        _, node = graph_of(call(aten.rot90.default, args[0], 2, [*args[1], 2 - 1 - args[1][0]]))
        node.name = f"layer{len(known)}"
        probe(node, known)
    assert len(known) == 4


# -- tensors that are too large to run -------------------------------------------------------------
def large(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


LARGE = [
    (call(aten.mv.default, large(2048, 1024), large(1024)), "a _, _ -> a"),
    (call(aten.diagonal.default, large(64, 512, 512), 0, 1, 2), "a _ _ -> a _"),
    (call(aten.renorm.default, large(2048, 1024), 2, 1, 1.0), "_ a -> _ a"),
    (call(aten._cdist_forward.default, large(4, 1000, 300), large(4, 1000, 300), 2.0, None),
     "a b _, a c _ -> a b c"),
    (call(aten.rot90.default, large(16, 3, 224, 224), 2, [2, 3]), "a b _ _ -> a b _ _"),
    (call(aten.isin.Tensor_Tensor, large(2048, 1024), large(12)), "a b, _ -> a b"),
    (call(aten.renorm.default, large(4099, 1024), 2, 0, 1.0, note="prime"), ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "words"), LARGE, ids=lambda x: x.name if isinstance(x, Case) else ""
)
def test_large_operands_are_tried_with_smaller_dims(case: Case, words: str) -> None:
    rule = probed_rule(case)
    assert in_words(rule) == words
    if rule is not None:
        shapes = [tuple(rule.sizes[name] for (name,) in dims) for dims in rule.operands if dims]
        assert shapes == [tuple(x.shape) for x in case.tensors]


WINDOWED = [
    ("shift", (large(64, 4096, 16), 16), "a _ b -> a _ b"),  # as the dim of 16 would pass
    ("shift", (large(64, 4096, 16), 8), "a _ b -> a _ b"),
    ("windows", (large(64, 14, 4096), 7), "a _ b -> a _ b"),
    ("windows", (large(64, 21, 4096), 7), "a _ b -> a _ b"),
    ("first", (large(4096, 1024),), "_ a -> _ a"),
    ("blocks", (large(1024, 1200),), "a _ -> a _"),
    ("twice", (large(4096, 1024), large(2048)), "a _, _ -> a _"),
    ("noise", (large(2048, 1024),), ""),
]


@pytest.mark.slow_cells("shift-args0-a _ b -> a _ b")
@pytest.mark.parametrize(("name", "args", "words"), WINDOWED)
def test_a_dim_on_which_an_argument_acts_stays_unsharded(
    name: str, args: tuple[Any, ...], words: str
) -> None:
    assert in_words(probed_rule(kernel(name, *args))) == words


def test_a_large_op_that_draws_is_refused() -> None:
    _, node = graph_of(kernel("noise", large(2048, 1024)))
    assert unrepeatable(node)
    _, node = graph_of(kernel("first", large(2048, 1024)))
    assert not unrepeatable(node)


@pytest.mark.parametrize(
    "case", [case for case, words in ATEN if words], ids=lambda case: case.name
)
def test_shards_compute_what_one_device_computes(case: Case) -> None:
    traced = trace(case)
    assert traced.rule.source == "probe"
    whole = on_one_device(traced)
    for mesh, cut in (("x2", True), ("x3", False), ("x2.y2", False)):
        for strategy in sample(traced.strategies(mesh, cut), 8, case.name):
            check(traced, whole, strategy, Mesh.parse(mesh))
