"""Rules found by trial: the right dims for ops without a rule, and no split that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.sharding_rule import OpShardingRule
from autopar.ops.rules.probe import probe, rule_of
from shards import (
    Case,
    call,
    check,
    flags,
    graph_of,
    on_one_device,
    real,
    sample,
    trace,
    whole_numbers,
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
    "first(Tensor x) -> Tensor": lambda x: x * (torch.arange(x.shape[0]) < 7).view(-1, 1),
    "mean_of(Tensor x) -> Tensor": lambda x: x - x.mean(0),
}


def kernel(name: str, *args: Any, note: str = "") -> Case:
    return Case(getattr(getattr(torch.ops, KERNEL), name).default, args, note=note)


def found(case: Case) -> OpShardingRule | None:
    _, node = graph_of(case)
    assert rule_of(node) is None, f"{case.name} has a rule: this tests nothing"
    return probe(node, {})


def in_words(spec: OpShardingRule | None) -> str:
    """The dims of operands and results that may be split: "a _, a _ -> a _"; "" without a rule."""
    if spec is None:
        return ""
    letters: dict[str, str] = {}

    def text(dims: Any) -> str:
        words = []
        for names in dims or ():
            kept = [n for n in names if spec.splittable(n)]
            words.append(letters.setdefault(kept[0], "abcdef"[len(letters)]) if kept else "_")
        return " ".join(words)

    sides = [
        ", ".join("-" if d is None else text(d) for d in side)
        for side in (spec.operands, spec.results)
    ]
    return f"{sides[0]} -> {sides[1]}"


A, B, C = real(4, 6, 9), real(4, 6, 8), real(4, 8, 9)
ATEN = [
    (call(aten.cumprod.default, real(4, 6), 1), "a _ -> a _"),
    (call(aten.roll.default, real(4, 6), [1], [0]), "_ a -> _ a"),
    (call(aten.roll.default, real(4, 6), [3], [1], note="half"), "a _ -> a _"),
    (call(aten.tril.default, real(4, 6, 6)), "a _ _ -> a _ _"),
    (call(aten.tril.default, flags(6, 6), note="flags"), ""),
    (call(aten.baddbmm.default, A, B, C), "a b c, a b _, a _ c -> a b c"),
    (call(aten.baddbmm.default, real(4, 4, 4), real(4, 4, 4), real(4, 4, 4), note="square"),
     "a b c, a b _, a _ c -> a b c"),
    (call(aten._cdist_forward.default, real(4, 6, 3), real(4, 9, 3), 2.0, None),
     "a b _, a c _ -> a b c"),
    (call(aten.gather.default, real(4, 6), 1, whole_numbers(6, 4, 9)), "a _, a b -> a b"),
    (call(aten.index_select.default, real(4, 6), 0, whole_numbers(4, 9)), "_ a, b -> b a"),
    (call(aten.index_select.default, real(4, 6), 0, whole_numbers(4, 4), note="as many"),
     "_ a, b -> b a"),
    (call(aten.diagonal.default, real(4, 6, 6), 0, 1, 2), "a _ _ -> a _"),
    (call(aten.group_norm.default, real(4, 6, 10), 2, real(6), real(6)), "a _ _, _, _ -> a _ _"),
    (call(aten.group_norm.default, real(4, 6, 10), 2, note="plain"), "a _ _, -, - -> a _ _"),
    (call(aten.avg_pool2d.default, real(4, 6, 8, 8), [2, 2]), "a b _ _ -> a b _ _"),
    (call(aten.pixel_shuffle.default, real(4, 9, 2, 2), 3), "a _ _ _ -> a _ _ _"),
    (call(aten.max.dim, real(4, 6), 1), "a _ -> a, a"),
    (call(aten.var_mean.correction, real(4, 6), [0]), "_ a -> a, a"),
    (call(aten.cummax.default, whole_numbers(2, 4, 6), 1, note="flags"), "a _ -> a _, a _"),
    (call(aten.cummax.default, whole_numbers(2, 2, 2), 1, note="two flags"), "a _ -> a _, a _"),
    (call(aten.repeat.default, real(4, 6), [1, 3]), "a _ -> a _"),
    (call(aten.glu.default, real(4, 6), 1), "a _ -> a _"),
    (call(aten.meshgrid.indexing, [real(4), real(6)], indexing="ij"), "a, b -> a b, a b"),
    (call(aten.scatter_add.default, real(4, 6), 1, whole_numbers(6, 4, 3), real(4, 3)),
     "a _, a _, a _ -> a _"),
    (call(aten.linalg_vector_norm.default, real(4, 6), 2, [1]), "a _ -> a"),
    (call(aten.cumprod.default, real(11, 3), 0, note="odd"), "_ a -> _ a"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "words"), ATEN, ids=lambda x: x.name if isinstance(x, Case) else ""
)
def test_the_dims_that_may_be_split(case: Case, words: str) -> None:
    assert in_words(found(case)) == words


CUSTOM = [
    ("scale", (real(4, 6), real(4, 6), 2.0), "a b, a b -> a b"),
    ("scale", (real(4, 6), real(6), 2.0), "a b, b -> a b"),
    ("pair", (real(4, 6), real(6, 9)), "a _, _ _ -> a _, a"),
    ("swap", (real(4, 6), None, real(4, 6)), "a b, -, a b -> a b"),
    ("blocks", (real(4, 6),), "a _ -> a _"),
    ("blocks", (real(4, 12),), "a _ -> a _"),
    ("running", (whole_numbers(2, 6, 4),), "_ a -> _ a"),
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
    assert in_words(found(kernel(name, *args))) == words


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
    assert found(case) is None


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
        (real(4, 6), 1),
        (real(4, 6), 1),
        (real(4, 6), 0),
        (real(6, 4), 1),
        (whole_numbers(2, 4, 6), 1),
    ):
        _, node = graph_of(call(aten.cumprod.default, *args))
        node.name = f"layer{len(known)}"
        probe(node, known)
    assert len(known) == 4


def test_large_tensors_are_not_run() -> None:
    with torch.device("meta"):
        large = torch.empty(2048, 1024)
    assert found(call(aten.cumprod.default, large, 1)) is None


@pytest.mark.parametrize(
    "case", [case for case, words in ATEN if words], ids=lambda case: case.name
)
def test_shards_compute_what_one_device_computes(case: Case) -> None:
    traced = trace(case)
    assert traced.spec.found == "probe"
    whole = on_one_device(traced)
    for mesh, cut in (("x2", True), ("x3", False), ("x2.y2", False)):
        for strategy in sample(traced.strategies(mesh, cut), 8, case.name):
            check(traced, whole, strategy, Mesh.parse(mesh))
