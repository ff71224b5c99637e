"""What an emulated rank does: each task gives facts, and a test says what they must be."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
import models
import readme as program
from autopar._compat import FakeTensorMode, pytree
from autopar.planner.plan_context import fingerprint
from autopar.planner.tracing import trace_model
from readme import scalar

Facts = dict[str, Any]


def run(name: str, rank: int) -> Facts:
    kind, _, rest = name.partition(":")
    warnings.simplefilter("ignore")
    try:
        facts: Facts = globals()[kind.replace(" ", "_")](rank, *filter(None, rest.split(",")))
    except Exception as error:
        if os.environ.get("RAISE"):
            raise
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    return facts


@contextmanager
def fake_cuda(device: str) -> Iterator[FakeTensorMode]:
    mode = FakeTensorMode()
    with mode, torch.device(device):
        yield mode


def facts_of(par: nn.Module, loss: Tensor) -> Facts:
    gradients = [p.grad for p in par.parameters()]
    return {
        "loss": str(loss.device),
        "parameters": sorted({str(p.device) for p in par.parameters()}),
        "gradients": sorted({str(g.device) for g in gradients if g is not None}),
        "without": sum(g is None for g in gradients),
    }


def layout(rank: int, name: str, *options: str) -> Facts:
    """A step of a GPT on this rank's device, under a layout."""
    dropout = 0.1 if "dropout" in options else 0.0
    more: dict[str, Any] = {"recompute": "full"} if "recompute" in options else {}
    if "reduce" in options:
        more["reduce_dtype"] = torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if "reduce" in options else before)
    with fake_cuda(f"cuda:{rank}") as mode:
        model, args, kwargs = models.gpt(dropout=dropout)
    torch.set_default_dtype(before)
    plan = autopar.plan(model, 8, args or kwargs, layout=name, smaller=False, **more)
    with mode:
        par = autopar.apply(model, plan)
        loss = scalar(par(*args, **kwargs))
        loss.backward()
    devices = {
        str(value)
        for node in par.graph.graph.nodes
        for value in pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(value, torch.device)
    }
    return {**facts_of(par, loss), "named": sorted(devices), "mesh": str(plan.mesh)}


def timeline(rank: int) -> Facts:
    """Of a step on a GPU: an error, and not times of the host."""
    with fake_cuda(f"cuda:{rank}") as mode:
        model, args, _ = models.gpt()
    plan = autopar.plan(model, 8, args, layout="ddp", smaller=False)
    with mode:
        autopar.apply(model, plan).timeline(*args)
    return {}


def fingerprints(rank: int) -> Facts:
    """Of one model here, on the meta device, and on the CPU."""
    prints = {}
    for device in (f"cuda:{rank}", "meta", "cpu"):
        with fake_cuda(device):
            model, args, kwargs = models.llama()
        prints[device.split(":")[0]] = fingerprint(trace_model(model, args or kwargs))
    return prints


_READ_SEEDS = (torch.ops.autopar.attention.default, torch.ops.autopar.attention_backward.default)


class _Copies(TorchDispatchMode):
    """Counts what waits for the device: numbers that are read, and copies from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before, after = (
            {x.device.type for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)}
            for tree in ((args, kwargs), result)
        )
        if func in _READ_SEEDS:  # of a seed on the host they read the number there: no copy
            before -= {"cpu"}
        if (before == {"cpu"} and "cuda" in after) or len(before) > 1:
            self.waits[f"{func} from the host"] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits["item"] += 1
        return result


def steps(rank: int, name: str) -> Facts:
    """What waits for the device in the third step: nothing."""
    with fake_cuda(f"cuda:{rank}") as mode:
        model, args, kwargs = models.gpt(dropout=0.1)
    plan = autopar.plan(model, 8, args or kwargs, layout=name, smaller=False)
    with mode:
        par = autopar.apply(model, plan)
        for _ in range(3):
            copies = _Copies()
            with copies:
                scalar(par(*args, **kwargs)).backward()
    return {"waits": dict(copies.waits)}


class _Forgetful(nn.Module):
    """Makes a tensor on the CPU, wherever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.ones(8, device="cpu")).sum()


def mixed(rank: int) -> Facts:
    """A model that mixes devices: as on a GPU, that is an error."""
    with fake_cuda(f"cuda:{rank}"):
        model, inputs = _Forgetful(), (torch.ones(8, 8),)
    autopar.plan(model, 8, inputs)
    return {}


def apart(rank: int, of_model: str, of_inputs: str) -> Facts:
    """A step of a model whose inputs are on another device than it is, before and after."""
    places = {"cpu": "cpu", "cuda": f"cuda:{rank}"}
    with fake_cuda(places[of_model]) as mode:
        model, _, _ = models.gpt()
    with mode, torch.device(places[of_inputs]):
        _, args, kwargs = models.gpt()
    with mode:
        par = autopar.parallelize(model, inputs=args or kwargs, layout="fsdp")
        loss = scalar(par(*args, **kwargs))
        loss.backward()
    return facts_of(par, loss)


def autocast(rank: int) -> Facts:
    """The dtypes of what enters the loss of a GPT, of bfloat16 logits: a GPU takes float32."""
    with fake_cuda(f"cuda:{rank}"):
        model, args, kwargs = models.gpt()
    with torch.autocast("cuda", torch.bfloat16):
        traced = trace_model(model, args or kwargs)
    losses = traced.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.cross_entropy_loss.default
    )
    (loss,) = losses
    return {"logits": str(loss.args[0].meta["val"].dtype), "loss": str(loss.meta["val"].dtype)}


def readme(rank: int) -> Facts:
    """README's program, word for word: the model and its batches are made on the CPU."""
    torch.distributed.init_process_group = lambda *_, **__: None  # emulated.py has opened one
    with FakeTensorMode():
        names = program.run(3)
    return facts_of(names["model"], names["loss"])
