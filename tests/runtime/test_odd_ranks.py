"""Odd models on two gloo ranks in float32: outputs, gradients, buffers and names."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import autopar
import odd_shapes  # noqa: F401  (enters its models)
from autopar._compat import pytree
from odd_models import HIDDEN, ODD, Simple
from on_ranks import unsharded

RANKS = 2
LIMIT_S = 240
NAMES = (
    "a_dictionary_with_none", "only_integers_out", "inputs_that_require_gradients",
    "an_output_that_is_an_input_and_one_that_is_constant", "adapters_on_a_frozen_base",
    "batch_norm_of_sequences", "a_moving_average", "a_tied_embedding", "one_module_twice",
    "multihead_attention_with_weights", "complex_numbers", "attention_with_dropout",
    "dropout_in_training", "weights_that_are_computed_of_parameters",
)  # fmt: skip


def parametrized() -> Any:
    """Weights that are properties of their modules, computed of parameters."""
    torch.manual_seed(0)
    inner = parametrizations.spectral_norm(nn.Linear(HIDDEN, 2 * HIDDEN))
    out = parametrizations.orthogonal(nn.Linear(2 * HIDDEN, HIDDEN))

    def body(m: Any, x: Tensor) -> Tensor:
        return m.out(m.inner(x).tanh()).square().mean()

    return Simple(body, inner=inner, out=out), (torch.randn(8, HIDDEN),), {}


MODELS = {**ODD, "weights_that_are_computed_of_parameters": parametrized}


def _leaves(tree: Any) -> list[Any]:
    return [unsharded(leaf) for leaf in pytree.tree_leaves(tree)]


def _fresh(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def copied(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.requires_grad)

    return pytree.tree_map_only(Tensor, copied, inputs)


def _trained(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Two calls, so that buffers move twice; the gradients of the second one's loss."""
    args, kwargs = _fresh((args, kwargs))
    for _ in range(2):
        outputs = _leaves(module(*args, **kwargs))
    losses = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad and not o.dim()]
    if losses:
        losses[0].backward()
    grads = {n: unsharded(p.grad) for n, p in module.named_parameters() if p.grad is not None}
    inputs = [x.grad for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return {
        "outputs": [o.detach() if isinstance(o, Tensor) else o for o in outputs],
        "gradients": {name: grad for name, grad in grads.items() if grad.any()},
        "inputs": inputs,
        "buffers": {n: b for n, b in module.named_buffers() if not n.startswith("coordinate_")},
    }


def _same_on_all_ranks(facts: dict[str, Any]) -> None:
    for tensor in pytree.tree_leaves(facts):
        if isinstance(tensor, Tensor):
            copies = [torch.empty_like(tensor) for _ in range(RANKS)]
            dist.all_gather(copies, tensor.contiguous())
            assert all(torch.equal(copies[0], other) for other in copies)


def _compare(name: str, layout: str) -> None:
    model, args, kwargs = MODELS[name]()
    torch.manual_seed(100 + dist.get_rank())  # ranks need not be seeded alike
    par = autopar.parallelize(model, None, args or kwargs, layout=layout)
    assert par.state_dict().keys() == model.state_dict().keys()
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n, p in par.named_parameters() if p.requires_grad} == trainable
    expected = _trained(copy.deepcopy(model), args, kwargs)
    actual = _trained(par, args, kwargs)
    _same_on_all_ranks(actual)
    if "dropout" not in name:
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def _worker(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    failed = []
    for number, name in enumerate(NAMES):
        try:
            _compare(name, ("auto", "fsdp")[number % 2])
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    Path(folder, str(rank)).write_text("\n".join(failed))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_odd_models_train_on_ranks_as_on_one(tmp_path: Path) -> None:
    context = multiprocessing.start_processes(
        _worker, (str(tmp_path),), nprocs=RANKS, join=False, start_method="spawn"
    )
    assert context is not None
    try:
        deadline = time.monotonic() + LIMIT_S
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, "the ranks did not end in time"
    finally:
        for process in context.processes:
            process.kill()
    for rank in range(RANKS):
        assert not (tmp_path / str(rank)).read_text()
