"""Rules of sums, norms and softmax."""

from __future__ import annotations

from torch import fx

from autopar.ir.sharding_rule import Spec, bound, operands_of, results_of
from autopar.ops.common import aten, named, operand_shape, spec, unsplit
from autopar.ops.pointwise import pointwise


@spec((aten.sum.dim_IntList, aten.mean.dim, aten.sum.default, aten.mean.default))
def summed(node: fx.Node) -> Spec:
    """A sum is partial over a split dim that it sums; so is a mean, once scaled (see local.py)."""
    return _reduction(node, summed=True)


@spec(
    (
        aten.amax.default,
        aten.amin.default,
        aten.var.correction,
        aten.var.dim,
        aten.argmax.default,
        aten.any.dim,
        aten.all.dim,
        aten.logsumexp.default,
    )
)
def reduced(node: fx.Node) -> Spec:
    return _reduction(node, summed=False)


def _reduction(node: fx.Node, summed: bool) -> Spec:
    source = operands_of(node)[0]
    assert source is not None
    sizes: dict[str, int] = {}
    dims = named(operand_shape(source), sizes)
    values = bound(node)
    listed = values.get("dim")
    if listed is None or listed == []:
        listed = list(range(len(dims)))
    gone = {d % len(dims) for d in (listed if isinstance(listed, list | tuple) else [listed])}
    keep = values.get("keepdim", False)
    result = tuple(() if j in gone else d for j, d in enumerate(dims) if keep or j not in gone)
    factors = frozenset(f"d{j}" for j in gone)
    linear = (frozenset({0}),) if summed else ()
    return Spec(
        (tuple(dims),),
        (result,),
        sizes,
        linear=linear,
        sum=factors if summed else frozenset(),
        whole=frozenset() if summed else factors,
    )


@spec((aten.layer_norm.default, aten.rms_norm.default))
def norm(node: fx.Node) -> Spec:
    """ "... d, d, d -> ... d": one normalised dim may be split (its statistics are reduced over the
    axes), several may not.
    """
    source, *affine = operands_of(node)
    assert source is not None
    sizes: dict[str, int] = {}
    dims = named(operand_shape(source), sizes)
    own = tuple(dims[len(dims) - len(bound(node)["normalized_shape"]) :])
    factors = frozenset(name for (name,) in own)
    alone, none = len(own) == 1, frozenset[str]()
    return Spec(
        (tuple(dims), *(None if n is None else own for n in affine)),
        (tuple(dims),),
        sizes,
        shared=factors if alone else none,
        whole=none if alone else factors,
    )


@spec(
    (
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
    )
)
def batch_norm(node: fx.Node) -> Spec:
    """b c ..., then c each -> b c ..., then c each: in training the statistics run over all but the
    channels, which are whole.
    """
    source, *rest = operands_of(node)
    assert source is not None
    sizes: dict[str, int] = {}
    dims = named(operand_shape(source), sizes)
    others, channels = frozenset(sizes) - {"d1"}, (dims[1],)
    training = node.target is not aten._native_batch_norm_legit_no_training.default
    if training and not bound(node)["training"]:
        return unsplit(node)  # torch.nn calls the other op
    results = [tuple(dims), *([channels] * (len(results_of(node)) - 1))]
    if not training:  # no statistics: two empty results
        sizes["none"] = 0
        results[1:] = [(("none",),)] * 2
    return Spec(
        (tuple(dims), *(None if n is None else channels for n in rest)),
        tuple(results),
        sizes,
        shared=frozenset() if training else others | {"d1"},
        whole=others if training else frozenset({"none"}),
    )


@spec(
    (
        aten.softmax.int,
        aten._softmax.default,
        aten.log_softmax.int,
        aten._log_softmax.default,
    )
)
def softmax(node: fx.Node) -> Spec:
    made = pointwise(node)
    dim = bound(node)["dim"] % len(made.results[0])
    return Spec(made.operands, made.results, made.sizes, shared=frozenset({f"d{dim}"}))
