"""Run by test_stored_layouts.py on gloo ranks: torch's own tools on parameters as they are stored.

    STORED_AT=FOLDER torchrun --standalone --nproc-per-node 4 stored_ranks.py OUT TASK...

Checkpoints are left in FOLDER by four ranks ("trained models") and read by two ("other world").
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import autopar
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ops.process_groups import connect
from autopar.passes import annotate, trace
from autopar.planner.exact_search import Search
from autopar.planner.space import candidates
from autopar.runtime.apply import placements
from fused_models import FUSED
from on_ranks import Facts, run_tasks

SAVED = ("ddp", "fsdp", "megatron")
MODELS = ("queries_keys_values", "tied_and_fused")
Trained = tuple[Any, torch.optim.Optimizer, Any]  # a model, its optimizer, its inputs
FOLDER = Path(os.environ.get("STORED_AT", "."))


def same(first: torch.Tensor, other: torch.Tensor) -> bool:
    return first.shape == other.shape and torch.equal(first, other)


# -- every stored layout ---------------------------------------------------------------------------
def every_layout() -> Facts:
    """Each layout in which the search may store a parameter, of all models on all meshes of four:
    joined, saved and loaded into each mesh's next layout of it.
    """
    wrong, count = [], 0
    for mesh in ("x4", "x2.y2"):
        layouts = dict(_offered(Mesh.parse(mesh)))
        count += len(layouts)
        device_mesh = connect(Mesh.parse(mesh), "cpu", set())
        wrong += _joined_and_cut(layouts, device_mesh)
        wrong += _saved_and_loaded(layouts, device_mesh, FOLDER / f"every {mesh}")
    return {"layouts": count, "wrong": wrong}


def _offered(mesh: Mesh) -> Iterator[tuple[str, Layout]]:
    for name in FUSED:
        model, inputs = FUSED[name]()
        program = annotate.annotate(trace.trace(model, inputs))
        for layout in ("auto",) if name == "odd_sizes" else ("auto", "fsdp", "megatron"):
            for candidate_mesh, constraint in candidates(layout, 4, program):
                if str(candidate_mesh.sizes.values()) != str(mesh.sizes.values()):
                    continue
                search = Search(program, candidate_mesh, autopar.World.of(4), constraint).enter()
                for entry in program.signature.inputs:
                    if entry.kind == "parameter":
                        for stored in search.variables[search.index[entry.node]].items:
                            on_mesh = Layout(mesh, stored.shape, stored.states)
                            yield f"{on_mesh.shape} {on_mesh}".replace(".", " "), on_mesh


def _random_tensor(layout: Layout, seed: int) -> torch.Tensor:
    return torch.randn(layout.shape, generator=torch.Generator().manual_seed(seed))


def _stored(layout: Layout, unsharded: torch.Tensor, device_mesh: Any) -> DTensor:
    local = layout.cut(unsharded, layout.mesh.coordinate(dist.get_rank()))
    return DTensor.from_local(
        local, device_mesh, placements(layout), shape=unsharded.shape, stride=unsharded.stride()
    )


def _joined_and_cut(layouts: dict[str, Layout], device_mesh: Any) -> list[str]:
    wrong = []
    for seed, (name, layout) in enumerate(layouts.items()):
        unsharded = _random_tensor(layout, seed)
        placed = _stored(layout, unsharded, device_mesh)
        if not same(placed.full_tensor(), unsharded):
            wrong.append(f"full_tensor of {name}")
        cut = dist.tensor.distribute_tensor(unsharded, device_mesh, placements(layout))
        if not same(cut.to_local(), placed.to_local()):
            wrong.append(f"distribute_tensor to {name}")
    return wrong


def _saved_and_loaded(layouts: dict[str, Layout], device_mesh: Any, folder: Path) -> list[str]:
    """Each is loaded into the next layout of its shape."""
    tensors = {
        name: _random_tensor(layout, seed) for seed, (name, layout) in enumerate(layouts.items())
    }
    state = {name: _stored(layouts[name], tensors[name], device_mesh) for name in layouts}
    dcp.save(state, checkpoint_id=folder)
    wrong = []
    others: dict[str, Any] = {}
    for name, layout in layouts.items():
        alike = [other for other in layouts.values() if other.shape == layout.shape]
        target = alike[(alike.index(layout) + 1) % len(alike)]
        others[name] = _stored(target, torch.zeros(layout.shape), device_mesh)
    dcp.load(others, checkpoint_id=folder)
    wrong += [f"loaded {n}" for n, w in tensors.items() if not same(others[n].full_tensor(), w)]
    return wrong


# -- whole models ----------------------------------------------------------------------------------
def _parallel(name: str, layout: str) -> Trained:
    model, inputs = FUSED[name]()
    par = autopar.parallelize(model, inputs=inputs, layout=layout)
    return par, torch.optim.AdamW(par.parameters(), lr=1e-2, eps=1e-3), inputs


def _single(name: str) -> Trained:
    model, inputs = FUSED[name]()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), inputs


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(*inputs).backward()
        optimizer.step()


def _full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter and every state of the optimizer, whole, by name."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    parameters = {n: _joined(p) for n, p in model.named_parameters(remove_duplicate=False)}
    states = get_optimizer_state_dict(model, optimizer, options=options)
    return parameters | {n: _joined(v) for n, v in states.items() if isinstance(v, torch.Tensor)}


def _joined(value: torch.Tensor) -> torch.Tensor:
    """A copy: what is whole already would be written over by the next step."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def _differing(first: dict[str, Any], other: dict[str, Any], what: str) -> list[str]:
    keys = [f"{what}: keys {sorted(first.keys() ^ other.keys())[:3]}"] * (
        first.keys() != other.keys()
    )
    return keys + [
        f"{what}: {n}" for n in first.keys() & other.keys() if not same(first[n], other[n])
    ]


def trained_models() -> Facts:
    """Trained under one layout: near one device's numbers, and taken over bitwise by the next
    layout, through files and through state dicts.
    """
    wrong: list[str] = []
    for name in MODELS:
        single, alone, inputs = _single(name)
        _train(single, alone, inputs)
        models = {layout: _parallel(name, layout) for layout in SAVED}
        for layout, (par, optimizer, _) in models.items():
            _train(par, optimizer, inputs)
            wrong += _apart(dict(single.named_parameters()), par, f"{name} under {layout}")
        for source, target in zip(SAVED, (*SAVED[1:], SAVED[0]), strict=True):
            wrong += _taken_over(name, source, models[source], models[target])
    return {"wrong": wrong}


def _apart(single: dict[str, torch.Tensor], par: nn.Module, what: str) -> list[str]:
    parameters = {n: _joined(p) for n, p in par.named_parameters()}
    near = {n: torch.allclose(parameters[n], p, atol=1e-4) for n, p in single.items()}
    return [f"{what}: {n} is far from one device's" for n, fits in near.items() if not fits]


def _taken_over(name: str, source: str, giver: Trained, taker: Trained) -> list[str]:
    par, optimizer, _ = giver
    other, states, inputs = taker
    what, trained = f"{name} from {source} to {other.plan.layout}", _full(par, optimizer)
    folder = FOLDER / f"{name} {source}"
    dcp.save(_state(par, optimizer), checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(trained, FOLDER / f"{name} {source}.pt")
    loaded = _state(other, states)
    dcp.load(loaded, checkpoint_id=folder)
    loaded = {part: _cloned(state) for part, state in loaded.items()}
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, states, loaded["optimizer"])
    wrong = _differing(_full(other, states), trained, f"{what}, checkpoint")
    for first in (False, True):
        _train(other, states, inputs, steps=1)
        _hand_over(giver, taker, first)
        wrong += _differing(_full(other, states), trained, f"{what}, state dicts, {first=}")
    before = _state(par, optimizer)
    before = {part: _cloned(state) for part, state in before.items()}
    _train(par, optimizer, inputs, steps=1)
    set_model_state_dict(par, before["model"])
    set_optimizer_state_dict(par, optimizer, before["optimizer"])
    return wrong + _differing(_full(par, optimizer), trained, f"{what}, its own sharded state")


def _cloned(state: Any) -> Any:
    """What torch hands out refers to the model's and the optimizer's own tensors."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), state)


def _hand_over(giver: Trained, taker: Trained, first: bool) -> None:
    """Whole tensors go from one model and optimizer to the other; `first`: from rank 0's alone."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=first)
    model_state = _cloned(get_model_state_dict(giver[0], options=options))
    optimizer_state = _cloned(get_optimizer_state_dict(giver[0], giver[1], options=options))
    if first and dist.get_rank() > 0:
        model_state, optimizer_state = {}, {}
    into = StateDictOptions(full_state_dict=True, broadcast_from_rank0=first)
    set_model_state_dict(taker[0], model_state, options=into)
    set_optimizer_state_dict(taker[0], taker[1], optimizer_state, options=into)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def other_world() -> Facts:
    """What four ranks saved, read by these, fewer ones, and by one process alone."""
    wrong, read = [], 0
    for name in MODELS:
        par, optimizer, inputs = _parallel(name, "fsdp")
        _train(par, optimizer, inputs, steps=1)
        for source in SAVED:
            folder = FOLDER / f"{name} {source}"
            trained = torch.load(FOLDER / f"{name} {source}.pt")
            loaded = _state(par, optimizer)
            dcp.load(loaded, checkpoint_id=folder)
            set_model_state_dict(par, loaded["model"])
            set_optimizer_state_dict(par, optimizer, loaded["optimizer"])
            wrong += _differing(_full(par, optimizer), trained, f"{name} {source} on two")
            state = {"model": get_model_state_dict(_single(name)[0])}
            dcp.load(state, checkpoint_id=folder, no_dist=True)
            alone = {n: trained[n] for n in state["model"]}
            wrong += _differing(state["model"], alone, f"{name} {source} in one process")
            read += 1
    return {"wrong": wrong, "read": read}


if __name__ == "__main__":
    run_tasks(
        {
            "every layout": every_layout,
            "trained models": trained_models,
            "other world": other_world,
        }
    )
