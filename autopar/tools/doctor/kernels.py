"""The doctor's checks of attention kernels and of dropout.

- `kernel` runs each kernel of scaled_dot_product_attention on this rank's device, within a graph
  of autopar. Each rank runs them alone, before the process group is open, so a kernel that ends its
  process leaves no rank waiting.
- `dropout` and `attention` check random masks: the share that they keep, one mask on all ranks,
  another one every step; `attention` for the dropout inside torch's own kernel.

examination.py runs them; each takes a Session and returns a Finding.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar import api
from autopar.ops import sharded
from autopar.ops.sharded.attention import seed_at
from autopar.tools.doctor import (
    Absent,
    AttentionModel,
    DropoutModel,
    Finding,
    Session,
    multiple,
)
from autopar.world import ranks

# The names of torch.nn.attention.SDPBackend, and what autograd calls the op of each.
KERNELS = {
    "MATH": "",
    "FLASH_ATTENTION": "FlashAttention",
    "EFFICIENT_ATTENTION": "EfficientAttention",
    "CUDNN_ATTENTION": "CudnnAttention",
}
DTYPES = (torch.float32, torch.bfloat16)
# The largest norm of a difference over the norm of the expected value. TF32, which has 11 bits, is
# above the first; a bfloat16 has 8 (a unit of 0.004), and some ten roundings follow one another.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
WIDTH, HEADS, BATCH, SEQUENCE = 128, 2, 2, 128  # heads of 64 features: every kernel takes them
_SHOWN = 400  # characters of torch's reasons
_REFUSALS = ("No available kernel", "No viable backend", "not available", "not supported")


def kernel(session: Session, name: str, dtype: torch.dtype) -> Finding:
    """Check one kernel in one dtype: return how far the result and every gradient of causal
    attention are from float64 on the CPU, in the plain formula. It is a fault where they are
    further than the limit, or where another kernel ran. Raises Absent where torch refuses these
    inputs.
    """
    module, x, expected = _prepare(session, dtype)
    results, recorded = _run(module, x.to(session.device), name)
    errors = {tensor: _error(results[tensor], expected[tensor]) for tensor in expected}
    worst = max(errors, key=lambda tensor: _rank_nan_highest(errors[tensor]))
    limit, op_name = LIMITS[dtype], KERNELS[name]
    fault = ""
    if op_name not in recorded or (recorded and not op_name):
        fault = f"{recorded or 'the plain formula'} ran in place of it"
    elif not errors[worst] <= limit:
        fault = f"{worst} is off by {errors[worst]:.1e}, the limit is {limit:.0e}"
    facts = {"errors": errors, "limit": limit, "ran": recorded or "plain formula"}
    return Finding(f"largest error {errors[worst]:.1e}, limit {limit:.0e}", facts, fault)


def _prepare(session: Session, dtype: torch.dtype) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """Return the module as autopar runs it on one rank, its input, and the expected results: in
    float64 on the CPU, by torch itself, from the numbers that the model holds in its dtype. The
    numbers are the same on all ranks, and one module serves all kernels.
    """
    name = f"attended {dtype}"
    if name not in session.shared:
        torch.manual_seed(0)
        model = AttentionModel(WIDTH, HEADS).to(dtype)
        x = torch.randn(BATCH, SEQUENCE, WIDTH).to(dtype)
        expected = _step(copy.deepcopy(model).double(), x.double(), SDPBackend.MATH)
        session.shared[name] = api.parallelize(model, 1, (x,), device=session.device), x, expected
    prepared: tuple[Any, Tensor, dict[str, Tensor]] = session.shared[name]
    return prepared


def _run(module: Any, x: Tensor, name: str) -> tuple[dict[str, Tensor], str]:
    """Return the results of the step under this kernel, and the name of the fused op that autograd
    recorded.
    """
    backend = getattr(SDPBackend, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(backend):
                y = module(x)[1]
        except RuntimeError as error:
            if any(text in str(error) for text in _REFUSALS):
                raise Absent(
                    _refusal_text(str(error), [str(warning.message) for warning in caught])
                ) from None
            raise
    recorded = _fused_op(y.grad_fn)
    return _step(module, x, backend), recorded


def _refusal_text(error: str, texts: list[str]) -> str:
    """Return why torch takes no kernel: the reasons that it warns of, else the error's first
    sentence.
    """
    reasons = dict.fromkeys(text.split(" (Triggered")[0].strip() for text in texts)
    return "; ".join(reasons)[:_SHOWN] or error.split(". ")[0]


def _step(module: Any, x: Tensor, backend: SDPBackend) -> dict[str, Tensor]:
    """Return the result and the gradients of one step, by name."""
    module.zero_grad()
    with sdpa_kernel(backend):
        loss, y = module(x)
        loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in module.named_parameters()}
    return {"result": y.detach(), **gradients}


def _fused_op(function: Any) -> str:
    """Return the fused attention among the functions that autograd recorded; "" for the plain
    formula.
    """
    visited, stack = set(), [function]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if "ScaledDotProduct" in node.name():
            return str(node.name())
        stack += [before for before, _ in node.next_functions]
    return ""


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected value."""
    difference = actual.double().cpu() - expected
    return float(difference.norm() / expected.norm())


def _rank_nan_highest(error: float) -> float:
    return error if error == error else float("inf")


P = 0.2
SIGMAS = 5.0  # one of 1.7 million runs exceeds it by chance
ROWS, FEATURES = 512, 256


def dropout(session: Session) -> Finding:
    """Check dropout: return the share of ones that a dropout of 0.2 keeps, under a layout that
    shards the batch and one that shards weights. Faults: a share more than five standard deviations
    off, a value that is kept but not divided by 0.8, ranks or layouts that have different masks,
    two steps with one mask, a gradient with another mask than the forward.
    """
    layouts = ("ddp", "megatron") if session.ranks > 1 else ("auto",)
    masks = {layout: _masks(session, layout) for layout in layouts}
    first, second, gradient = masks[layouts[0]]
    count, nonzero_count = first.numel(), int((first != 0).sum())
    sigma = math.sqrt(P * (1 - P) / count)
    off = (nonzero_count / count - (1 - P)) / sigma
    values = first[first != 0]
    faults = {
        f"kept {nonzero_count / count:.4f} of {count}, {off:+.1f} sigma": abs(off) > SIGMAS,
        "what is kept is not divided by 0.8": not torch.allclose(values, torch.tensor(1 / (1 - P))),
        "two steps have one mask": torch.equal(first, second),
        "the device's mask is not the CPU's": not _as_on_a_cpu(session),
        "the gradient has another mask": not torch.allclose(gradient, second.sum(0), rtol=1e-5),
        "layouts have different masks": any(
            not torch.equal(first, other[0]) or not torch.equal(second, other[1])
            for other in masks.values()
        ),
        "ranks have different masks": len(set(ranks.all_of(_digest(masks)))) > 1,
    }
    facts = {
        "p": P,
        "elements": count,
        "kept": nonzero_count / count,
        "sigmas": off,
        "mean": float(first.double().mean()),
        "layouts": list(layouts),
    }
    figure = f"kept {nonzero_count / count:.4f} of {count} ({off:+.1f} σ), mean {facts['mean']:.4f}"
    return Finding(figure, facts, "; ".join(text for text, wrong in faults.items() if wrong))


def _as_on_a_cpu(session: Session) -> bool:
    """Whether the device's kernel drops the same entries as the CPU's, for a part of a larger
    tensor.
    """
    x, seed, place = torch.ones(60, 130), torch.tensor(5 << 33), torch.tensor([1])
    on_cpu, on_device = (
        sharded.dropout(
            x.to(where), P, seed.to(where), [place.to(where)], [(), [("x", 130, 2)]], [60, 260]
        )
        for where in (torch.device("cpu"), session.device)
    )
    return torch.equal(on_cpu, on_device.cpu())


def attention(session: Session) -> Finding:
    """Check the dropout of attention: return the share of equal weights that torch's kernel keeps
    when it drops 0.2, seeded by a rank's place. Faults: a share more than five standard deviations
    off, a seed that drops other weights the second time, two places, draws or steps that drop the
    same, a backward that drops others than its forward.
    """
    keys = 64  # as many as numbers of a head: with ones on the diagonal, values show the weights
    where: Any = {"device": session.device, "dtype": torch.float32}
    query = torch.zeros(2, 8, 256, keys, **where)
    key, value = torch.zeros(2, 8, keys, keys, **where), torch.eye(keys, **where)
    value = value.expand(2, 8, keys, keys).contiguous().requires_grad_()

    def drop(step: int = 1, place: int = 0, draw: int = 1) -> Tensor:
        seed = seed_at(step, {"x": place}, "@x")
        arguments = query, key, value, None, P, False, None, seed, draw
        return torch.ops.autopar.attention(*arguments).transpose(1, 2)

    first = drop()
    cotangent = torch.randn_like(first)
    (gradient,) = torch.autograd.grad(first, value, cotangent)
    expected = first.detach().transpose(2, 3) @ cotangent
    count, nonzero_count = first.numel(), int((first != 0).sum())
    sigma = math.sqrt(P * (1 - P) / count)
    off = (nonzero_count / count - (1 - P)) / sigma
    others = (drop(step=2), drop(place=1), drop(draw=2))
    error = float((gradient - expected).norm() / expected.norm())
    faults = {
        f"kept {nonzero_count / count:.4f} of {count}, {off:+.1f} sigma": abs(off) > SIGMAS,
        "a seed drops otherwise a second time": not torch.equal(first, drop()),
        "two seeds drop alike": any(torch.equal(first, other) for other in others),
        f"the backward drops others than the forward, error {error:.1e}": not error < 1e-3,
    }
    facts = {
        "p": P,
        "elements": count,
        "kept": nonzero_count / count,
        "sigmas": off,
        "error": error,
    }
    figure = f"kept {nonzero_count / count:.4f} of {count} ({off:+.1f} σ), gradient {error:.1e} off"
    return Finding(figure, facts, "; ".join(text for text, wrong in faults.items() if wrong))


def _masks(session: Session, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unsharded masks of two steps, and the gradient of the ones in the second, on the
    CPU.
    """
    torch.manual_seed(0)  # the seed of masks
    features = multiple(session.ranks, FEATURES)
    x = torch.ones(multiple(session.ranks, ROWS), features)
    model = DropoutModel(features, P)
    module: Any = api.parallelize(model, session.world, (x,), layout=layout, device=session.device)
    masks = []
    for _ in range(2):
        module.zero_grad()
        loss, mask = module(x)
        loss.backward()
        masks.append(_unsharded_tensor(mask))
    return masks[0], masks[1], _unsharded_tensor(module.ones.grad)


def _unsharded_tensor(x: Any) -> Tensor:
    unsharded: Tensor = (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()
    return unsharded


def _digest(masks: dict[str, tuple[Tensor, Tensor, Tensor]]) -> str:
    """Return a digest that is equal on ranks whose masks of both steps are equal, under every
    layout.
    """
    each = (mask for first, second, _ in masks.values() for mask in (first, second))
    mask_bytes = b"".join((mask != 0).numpy().tobytes() for mask in each)
    return hashlib.sha256(mask_bytes).hexdigest()
