"""Which versions of torch autopar is proven on; any other one is refused when autopar is imported.

Example: fault("2.14.1") says that torch 2.14.1 is newer than any that was proven, and what to do;
fault("2.13.0+cpu") is "". What is private in torch changes without notice, and a change may cost no
error but a gradient, so a version counts only once the tests have run on it.
"""

from __future__ import annotations

import os
import re
import warnings

import torch

LEAST, BELOW = (2, 11), (2, 14)  # as pyproject.toml says
ANY = "AUTOPAR_ANY_TORCH"  # a variable that makes a warning of the refusal


def fault(version: str) -> str:
    """Return why autopar does not run on this version of torch, and the remedy; "" where it does.

    >>> fault("2.13.0+cpu")
    ''
    >>> print(fault("2.10.0"))
    torch 2.10.0 is too old; autopar runs on 2.11 to 2.13: pip install 'torch>=2.11,<2.14'
    """
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if LEAST <= number < BELOW:
        return ""
    last = (BELOW[0], BELOW[1] - 1)
    least, below, newest = (".".join(map(str, pair)) for pair in (LEAST, BELOW, last))
    remedy = f"autopar runs on {least} to {newest}: pip install 'torch>={least},<{below}'"
    if number < LEAST:
        return f"torch {version} is too old; {remedy}"
    return (
        f"torch {version} is newer than any that autopar was proven on, and 2.14 drops the "
        f"backward of custom autograd functions without an error; {remedy}"
    )


def require(version: str) -> None:
    """Raise ImportError for a version of torch that is not proven; warn where ANY is set."""
    why = fault(version)
    if not why:
        return
    if not os.environ.get(ANY):
        raise ImportError(f"{why}; {ANY}=1 makes this a warning, for trying it out")
    warnings.warn(f"{why}; hold what it computes against one device", stacklevel=2)


require(torch.__version__)
