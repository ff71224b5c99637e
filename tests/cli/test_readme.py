"""README's program, word for word, trains as one device does."""

from __future__ import annotations

from pathlib import Path

import torch

import readme
from launch import launched

STEPS = 3


def test_its_program_trains_on_gloo_ranks_as_on_one_device(tmp_path: Path) -> None:
    """On emulated GPUs it runs in cuda/test_emulated.py."""
    found = launched(tmp_path, 4, str(STEPS + 1), script="readme_ranks.py", options=())
    torch.manual_seed(0)
    model = readme.Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens, targets in readme.batches(STEPS):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
    for one in found["losses"]:
        torch.testing.assert_close(one, float(loss), rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        if name.endswith("qkv.bias"):
            continue  # that of keys: a gradient of rounding alone, which AdamW scales up
        trained = torch.tensor(found["weights"][name])
        torch.testing.assert_close(trained, parameter.detach(), rtol=1e-3, atol=1e-4, msg=name)
