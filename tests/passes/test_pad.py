"""Padding: its algebra, what ops can take it, and that a padded graph computes what it did."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import padded_models
from autopar.ir.layout import I, Layout, S
from autopar.ir.mesh import Mesh
from autopar.ir.padding import (
    Pad,
    cut_unpadded,
    filled_up,
    join_unpadded,
    padded_shape,
    part_box,
    plain_shards,
    unpadded_shape,
    without_padding,
)
from autopar.ops.local import UNPADDED
from autopar.passes import annotate, pad
from autopar.planner.tracing import trace_model

aten = torch.ops.aten


# -- the algebra -----------------------------------------------------------------------------------
@pytest.mark.slow
@given(size=st.integers(1, 60), ranks=st.integers(2, 9), other=st.integers(1, 4))
def test_parts_of_a_padded_dim_are_those_of_torch_chunk(size: int, ranks: int, other: int) -> None:
    padded = math.ceil(size / ranks) * ranks
    pads = (Pad(0, 1, size, padded, 1),)
    layout = Layout(Mesh.parse(f"x{ranks}"), (padded, other), (S(0, padded // ranks),))
    assert plain_shards(layout, pads)
    whole = torch.arange(size * other).view(size, other)
    parts = [cut_unpadded(layout, whole, pads, {"x": rank}) for rank in range(ranks)]
    chunks = list(torch.chunk(whole, ranks))
    chunks += [whole[:0]] * (ranks - len(chunks))
    for rank, (part, chunk) in enumerate(zip(parts, chunks, strict=True)):
        assert torch.equal(part, chunk)
        assert part_box(layout, pads, {"x": rank})[0][1] == len(chunk)
        assert tuple(filled_up(part, layout.local_shape).shape) == layout.local_shape
    assert torch.equal(join_unpadded(layout, parts, pads), whole)


@given(size=st.integers(2, 60), ranks=st.integers(2, 9), more=st.integers(1, 3))
def test_other_paddings_are_no_plain_shards(size: int, ranks: int, more: int) -> None:
    padded = (math.ceil(size / ranks) + more) * ranks
    layout = Layout(Mesh.parse(f"x{ranks}"), (padded,), (S(0, padded // ranks),))
    assert not plain_shards(layout, (Pad(0, 1, size, padded, 1),))
    assert plain_shards(Layout(layout.mesh, (padded,), (I,)), (Pad(0, 1, size, padded, 1),))


def test_two_axes_on_a_padded_dim_are_no_plain_shards() -> None:
    layout = Layout(Mesh.parse("x2.y2"), (8,), (S(0, 4), S(0, 2)))
    assert plain_shards(layout, ()) and not plain_shards(layout, (Pad(0, 1, 5, 8, 1),))


@given(
    outer=st.integers(1, 3), size=st.integers(1, 5), more=st.integers(0, 3), inner=st.integers(1, 3)
)
def test_an_inner_factor_loses_its_own_padding(
    outer: int, size: int, more: int, inner: int
) -> None:
    whole = torch.randn(2, outer * size * inner)
    pads = (Pad(1, outer, size, size + more, inner),)
    blocks = F.pad(whole.unflatten(1, (outer, size, inner)), (0, 0, 0, more))
    assert tuple(blocks.flatten(1).shape) == padded_shape(whole.shape, pads)
    assert unpadded_shape(blocks.flatten(1).shape, pads) == tuple(whole.shape)
    assert torch.equal(without_padding(blocks.flatten(1), pads), whole)


# -- what can be padded ----------------------------------------------------------------------------
def annotated(model: nn.Module, inputs: Any) -> Any:
    return annotate.annotate(trace_model(model, inputs))


def atoms(program: Any, size: int) -> dict[int, int]:
    """The atoms of this size, each with the next multiple of four."""
    return {
        atom.number: math.ceil(size / 4) * 4
        for dims in program.annotations.dims.values()
        for each in dims
        for atom in each
        if atom.size == size
    }


class Logits(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.loss = nn.Embedding(13, 6), nn.Linear(6, 13), loss

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.head(self.embed(ids)), ids)


TAKEN = {
    "cross entropy": lambda x, ids: F.cross_entropy(x.flatten(0, 1), ids.flatten()),
    "as float": lambda x, ids: F.cross_entropy(x.double().flatten(0, 1), ids.flatten()),
    "soft cap": lambda x, ids: F.cross_entropy(
        (3 * torch.tanh(x / 3)).transpose(1, 2), ids, label_smoothing=0.1
    ),
    "softmax": lambda x, ids: F.softmax(x, -1),
    "log softmax": lambda x, ids: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), ids.flatten()),
    "returned": lambda x, ids: x,
}
REFUSED = {
    "a sum of exponentials": lambda x, ids: torch.logsumexp(x, -1),
    "a largest entry": lambda x, ids: x.amax(-1),
    "a mean of all": lambda x, ids: x.mean(),
    "a division": lambda x, ids: 1 / x,
    "a cumulative sum": lambda x, ids: x.cumsum(-1),
    "a norm": lambda x, ids: F.layer_norm(x, (13,)),
    "probabilities as targets": lambda x, ids: F.cross_entropy(
        x.flatten(0, 1), F.one_hot(ids.flatten(), 13).to(x.dtype)
    ),
}


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_ops_that_take_a_padded_vocabulary(name: str) -> None:
    program = annotated(Logits((TAKEN | REFUSED)[name]), (torch.randint(0, 13, (4, 5)),))
    logits = program.annotations.dims["linear", 0][-1][0].number
    assert (logits in pad.paddable(program, atoms(program, 13))) == (name in TAKEN)


def run(program: Any, padded: bool, ids: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of a graph on one device, whose softmaxes know no padding."""
    leaves, values = {}, []
    for entry in program.signature.inputs:
        if entry.kind == "user":
            values.append(ids)
            continue
        leaves[entry.node] = leaf = program.tensors[entry.target].detach().clone().requires_grad_()
        node = next(n for n in program.module.graph.nodes if n.name == entry.node)
        values.append(filled_up(leaf, tuple(node.meta["val"].shape)) if padded else leaf)
    outputs = program.module(*values)
    torch.autograd.backward(list(outputs), [torch.ones_like(o) for o in outputs])
    return list(outputs), {name: leaf.grad for name, leaf in leaves.items()}


def test_a_padded_graph_has_the_same_results_and_gradients() -> None:
    """On one device, of logits that are returned: no op masks there, that is what ranks do."""
    ids = torch.randint(0, 13, (4, 5))
    program = annotated(Logits(TAKEN["returned"]).double(), (ids,))
    padded = pad.pad(program, pad.paddable(program, atoms(program, 13)))
    pad.check(padded)
    assert padded.padding["linear", 0] == (
        Pad(2, 1, 13, 16, 1, padded.padding["linear", 0][0].atom),
    )
    for actual, expected in zip(run(padded, True, ids), run(program, False, ids), strict=True):
        pairs = zip(actual, expected, strict=True) if isinstance(actual, list) else (
            (actual[name], expected[name]) for name in expected
        )  # fmt: skip
        for value, other in pairs:
            assert torch.equal(value, other)


@pytest.mark.slow
def test_heads_inside_a_fused_weight_are_padded_and_their_size_stays_a_factor() -> None:
    model, inputs = padded_models.gpt2()
    program = annotated(model, inputs)
    sizes = pad.paddable(program, atoms(program, 6) | atoms(program, 3) | atoms(program, 515))
    assert sorted(sizes.values()) == [8, 8, 516]  # two layers; three of q, k and v cannot be
    padded = pad.pad(program, sizes)
    amounts = [
        node.args[1]
        for node in padded.module.graph.find_nodes(
            op="call_function", target=aten.constant_pad_nd.default
        )
    ]
    assert len(amounts) == 6  # a weight and a bias before, a weight behind, in two layers
    (loss,) = padded.module.graph.find_nodes(
        op="call_function", target=aten.cross_entropy_loss.default
    )
    assert loss.meta[UNPADDED] == 515
    assert padded.pads("p_model_transformer_wte_weight")[0].padded == 516
    again = annotate.annotate(padded)
    assert atoms(again, 516) and not atoms(again, 515)


@pytest.mark.slow
def test_dropout_in_attention_keeps_heads_as_they_are() -> None:
    model, inputs = padded_models.gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    program = annotated(model, inputs)
    assert pad.paddable(program, atoms(program, 6)) == {}


def test_a_padded_output_breaks_the_contract() -> None:
    program = annotated(Logits(TAKEN["returned"]), (torch.randint(0, 13, (4, 5)),))
    padded = pad.pad(program, pad.paddable(program, atoms(program, 13)))
    (name,) = [output.node for output in padded.signature.outputs]
    with pytest.raises(AssertionError, match="padded"):
        pad.check(dataclasses.replace(padded, padding={(name, 0): ()}))
