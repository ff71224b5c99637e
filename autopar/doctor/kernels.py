"""Every kernel of scaled_dot_product_attention on this rank's device, through a graph of autopar's.

They run on each rank alone, before the process group is open, so a kernel that ends a process does
it before anything else could wait.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar import api
from autopar.doctor.models import Attended
from autopar.doctor.result import Absent, Finding
from autopar.doctor.session import Session

# The names of torch.nn.attention.SDPBackend, and what autograd calls the op of each.
KERNELS = {
    "MATH": "",
    "FLASH_ATTENTION": "FlashAttention",
    "EFFICIENT_ATTENTION": "EfficientAttention",
    "CUDNN_ATTENTION": "CudnnAttention",
}
DTYPES = (torch.float32, torch.bfloat16)
# The largest norm of a difference over the norm of what it must be. TF32, which has 11 bits, is
# above the first; a bfloat16 has 8 (a unit of 0.004), and some ten roundings follow one another.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
WIDTH, HEADS, BATCH, SEQUENCE = 128, 2, 2, 128  # heads of 64 features: every kernel takes them
_SHOWN = 400  # characters of torch's reasons
_REFUSALS = ("No available kernel", "No viable backend", "not available", "not supported")


def kernel(session: Session, name: str, dtype: torch.dtype) -> Finding:
    """Enter: a kernel's name and a dtype. Leave: how far the result and every gradient of causal
    attention are from float64 on the CPU, in the plain formula; a fault where they are further than
    the limit, or where another kernel ran. Raises Absent where torch refuses these inputs.
    """
    module, x, expected = _prepared(session, dtype)
    found, ran = _run(module, x.to(session.device), name)
    errors = {part: _error(found[part], expected[part]) for part in expected}
    worst = max(errors, key=lambda part: _nan_is_most(errors[part]))
    limit, wanted = LIMITS[dtype], KERNELS[name]
    fault = ""
    if wanted not in ran or (ran and not wanted):
        fault = f"{ran or 'the plain formula'} ran in place of it"
    elif not errors[worst] <= limit:
        fault = f"{worst} is off by {errors[worst]:.1e}, the limit is {limit:.0e}"
    facts = {"errors": errors, "limit": limit, "ran": ran or "plain formula"}
    return Finding(f"largest error {errors[worst]:.1e}, limit {limit:.0e}", facts, fault)


def _prepared(session: Session, dtype: torch.dtype) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """The module as autopar runs it on one rank, its input, and what must come out: in float64 on
    the CPU, by torch itself, from the numbers that the model holds in its dtype. The same numbers
    on all ranks, and one module for all kernels.
    """
    name = f"attended {dtype}"
    if name not in session.kept:
        torch.manual_seed(0)
        model = Attended(WIDTH, HEADS).to(dtype)
        x = torch.randn(BATCH, SEQUENCE, WIDTH).to(dtype)
        expected = _step(copy.deepcopy(model).double(), x.double(), SDPBackend.MATH)
        session.kept[name] = api.parallelize(model, 1, (x,), device=session.device), x, expected
    found: tuple[Any, Tensor, dict[str, Tensor]] = session.kept[name]
    return found


def _run(module: Any, x: Tensor, name: str) -> tuple[dict[str, Tensor], str]:
    """The step under this kernel, and the name of the fused op that autograd recorded."""
    backend = getattr(SDPBackend, name)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(backend):
                y = module(x)[1]
        except RuntimeError as error:
            if any(text in str(error) for text in _REFUSALS):
                raise Absent(_refusal(str(error), [str(one.message) for one in said])) from None
            raise
    recorded = _fused(y.grad_fn)
    return _step(module, x, backend), recorded


def _refusal(error: str, said: list[str]) -> str:
    """Why torch takes no kernel: the reasons that it warns of, else the error's first sentence."""
    reasons = dict.fromkeys(one.split(" (Triggered")[0].strip() for one in said)
    return "; ".join(reasons)[:_SHOWN] or error.split(". ")[0]


def _step(module: Any, x: Tensor, backend: SDPBackend) -> dict[str, Tensor]:
    """The result and the gradients of one step, by name."""
    module.zero_grad()
    with sdpa_kernel(backend):
        loss, y = module(x)
        loss.backward()
    found = {name: p.grad.detach().clone() for name, p in module.named_parameters()}
    return {"result": y.detach(), **found}


def _fused(function: Any) -> str:
    """The fused attention among the functions that autograd recorded; "" for the plain formula."""
    seen, waiting = set(), [function]
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        if "ScaledDotProduct" in one.name():
            return str(one.name())
        waiting += [before for before, _ in one.next_functions]
    return ""


def _error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what is expected."""
    difference = found.double().cpu() - expected
    return float(difference.norm() / expected.norm())


def _nan_is_most(error: float) -> float:
    return error if error == error else float("inf")
