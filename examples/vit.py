"""Train a small ViT on all ranks, and hold its first loss against one device.

    torchrun --standalone --nproc-per-node 4 examples/vit.py --layout megatron

The model is transformers' ViT from a configuration, with random weights; the images are noise, so
nothing is downloaded. On GPUs each rank takes its own.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import autopar

CONFIG = ViTConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    image_size=32, patch_size=8,
)  # fmt: skip


class Classifier(nn.Module):
    """Images (batch, 3, 32, 32) and classes (batch,) to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = ViTForImageClassification(CONFIG)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.vit(images).logits, classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)
    model = Classifier().to(device)
    images = torch.randn(16, 3, 32, 32, device=device)
    classes = torch.randint(0, 2, (16,), device=device)
    alone = model(images, classes).item()
    par = autopar.parallelize(model, inputs=(images, classes), layout=options.layout)
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-3)
    losses = []
    for _ in range(options.steps):
        loss = par(images, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if dist.get_rank() == 0:
        print(par.plan)
        print(f"first loss {losses[0]:.6f} (one device {alone:.6f}), last {losses[-1]:.6f}")
        print(par.stats())
    assert abs(losses[0].item() / alone - 1) < 1e-4, "the first loss is not one device's"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
