"""What test_padding.py starts, as on_ranks.py says: a GPT-2 whose vocabulary and heads no axis
divides, on four ranks and on one device.
"""

from __future__ import annotations

import copy
import tempfile

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
import padded_models
import uneven_batches
import uneven_sequences
from autopar.world import ranks
from on_ranks import Facts, everywhere, run_tasks


def gather(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def largest_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest entry of each; all ranks gather each tensor."""
    errors = [
        float((gather(actual[name]) - value).abs().max() / value.abs().max().clamp(min=1e-6))
        for name, value in expected.items()
    ]
    return max(errors)


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train() -> Facts:
    """Three steps of AdamW with clipped gradients, then what is saved and read, and a call in
    another mode on fewer rows.
    """
    model, inputs = padded_models.gpt2()
    model, fresh = model.double(), copy.deepcopy(model.double())
    par = autopar.parallelize(model, inputs=inputs, layout="megatron")
    facts: Facts = {"padding": [(x.size, x.padded) for x in par.plan.padding], "steps": []}
    weight = par.get_parameter("model.transformer.wte.weight")
    facts["rows"] = everywhere(weight.to_local().shape[0])
    facts["shape"] = list(weight.shape)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-3) for m in (model, par)]
    for _ in range(3):
        for each, optimizer in zip((model, par), optimizers, strict=True):
            optimizer.zero_grad()
            each(**inputs).backward()
        facts["steps"].append(largest_error(gradients(par), gradients(model)))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, par)]
        facts["norm"] = abs(float(gather(norms[1])) / float(norms[0]) - 1)
        for optimizer in optimizers:
            optimizer.step()
    facts["parameters"] = largest_error(named(par), named(model))
    state = {name: gather(x) for name, x in par.state_dict().items()}
    facts["state"] = largest_error(state, dict(model.state_dict()))
    folder = ranks.from_rank_0(tempfile.mkdtemp())
    par.save_pretrained(folder)
    other = autopar.parallelize(fresh, inputs=inputs, layout="megatron")
    other.load_weights(folder)
    facts["loaded"] = largest_error(named(other), named(model))
    other.load_state_dict(fresh.state_dict())
    facts["taken"] = largest_error(named(other), named(fresh))
    fewer = {name: x[:4] for name, x in inputs.items()}
    with torch.no_grad():
        pair = [float(m.eval()(**fewer)) for m in (model, par)]
    facts["fewer"] = abs(pair[1] / pair[0] - 1)
    facts["unshard"] = largest_error(named(par.unshard()), named(model))
    return facts


def last_batch() -> Facts:
    """A module planned for 8 rows meets 7, in training and in eval, and one is planned for 7."""
    (model, eight), (_, seven) = (uneven_batches.tokens(rows) for rows in (8, 7))
    model = model.double()
    eight, seven = ([x.double() for x in inputs] for inputs in (eight, seven))
    facts: Facts = {"padding": [], "errors": []}
    for planned, calls in ((eight, (eight, seven)), (seven, (seven,))):
        par = autopar.parallelize(copy.deepcopy(model), inputs=tuple(planned), layout="fsdp")
        for inputs in calls:
            for each in (model, par):
                each.zero_grad()
                each(*inputs).backward()
            facts["errors"].append(largest_error(gradients(par), gradients(model)))
            graph = [par._autopar.first, *par._autopar.graphs.others][-1]
            padding = graph.program.plan.padding
            facts["padding"].append([(each.size, each.padded) for each in padding])
    with torch.no_grad():
        pair = [float(m.eval()(*seven)) for m in (model, par)]
    facts["errors"].append(abs(pair[1] / pair[0] - 1))
    return facts


def seven_tokens() -> Facts:
    """Seven tokens split over four ranks, in training and in eval."""
    model, inputs = uneven_sequences.llama(7)
    model = model.double()
    par = autopar.parallelize(copy.deepcopy(model), inputs=inputs, layout="cp")
    for each in (model, par):
        each(**inputs).backward()
    errors = [largest_error(gradients(par), gradients(model))]
    with torch.no_grad():
        pair = [float(m.eval()(**inputs)) for m in (model, par)]
    errors.append(abs(pair[1] / pair[0] - 1))
    return {"padding": [(x.size, x.padded) for x in par.plan.padding], "errors": errors}


if __name__ == "__main__":
    run_tasks({"train": train, "last_batch": last_batch, "seven_tokens": seven_tokens})
