"""What every test runs under: one thread, no network, the same random examples each time."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# No deadline: the first call of a torch operator may take longer than all the others together.
settings.register_profile(
    "autopar",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("autopar")
