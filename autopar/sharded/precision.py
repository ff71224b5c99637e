"""In which precision the sharded ops reckon: half types in float32, as torch's own kernels do
inside.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reckoning(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, any other dtype as it is."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def widen(x: Tensor) -> Tensor:
    """x in the precision that its dtype is reckoned in."""
    return x.to(reckoning(x.dtype))
