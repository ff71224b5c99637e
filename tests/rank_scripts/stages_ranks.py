"""What test_stages.py starts, as on_ranks.py says: trains on the stages of a pipeline, on real gloo
ranks, and compares with one device.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
import models
from autopar import Grid4D, Grid25D, GridEP, Stages
from autopar.ops.links import Links
from autopar.runtime.training.adapters import require_parallel
from benchmarks.models import llama
from models import GptWithLogits
from moe_models import mixtral
from on_ranks import Facts, caught, run_everywhere
from priced import slow_between
from stage_models import HEADS, TOKENS, WIDTH, WORDS, InFloat64, gpt

STEPS = 3
TASKS: dict[str, tuple[Stages, int | Literal["auto"]]] = {
    "open of 2": (Stages(within="ddp"), "auto"),
    "ddp of 2": (Stages(2, "ddp"), 4),
    "fsdp 1f1b": (Stages(2, "fsdp"), 4),
    "megatron interleaved": (Stages(2, "megatron", "interleaved", 2), 4),
    "4 stages gpipe": (Stages(4, "ddp", "gpipe"), 4),
    "ddp looped-bfs": (Stages(2, "ddp", "looped-bfs", 2), 4),
    "megatron in slices": (Stages(2, "megatron"), 4),
    "4d": (Stages(2, Grid4D(x=2)), 2),
    "2.5d": (Stages(2, Grid25D(q=2)), 4),
    "fsdp of 8": (Stages(2, "fsdp"), 2),
    "zero-bubble of 2": (Stages(2, "ddp", "zero-bubble"), 4),
    "zero-bubble ddp": (Stages(2, "ddp", "zero-bubble", 2), 4),
    "zero-bubble fsdp": (Stages(2, "fsdp", "zero-bubble"), 4),
    "zero-bubble megatron": (Stages(2, "megatron", "zero-bubble"), 4),
    "zero-bubble ddp llama": (Stages(2, "ddp", "zero-bubble"), 4),
    "zero-bubble fsdp llama": (Stages(2, "fsdp", "zero-bubble"), 4),
    "zero-bubble megatron llama": (Stages(2, "megatron", "zero-bubble", 2), 4),
    "zbv ddp": (Stages(2, "ddp", "zbv", 2), 4),
    "dualpipev fsdp": (Stages(2, "fsdp", "dualpipev", 2), 4),
    "4 stages zero-bubble": (Stages(4, "ddp", "zero-bubble"), 8),
}
# Models of transformers: a name, and the schedule of its cells. T5 in four stages is cut in both
# stacks.
SCHEDULE_OF: dict[str, tuple[Any, int]] = {
    "gpt2": ("1f1b", 1),
    "llama": ("zero-bubble", 1),
    "t5": ("interleaved", 2),
}
WITHIN: dict[str, tuple[Any, int]] = {  # and the ranks of both stages
    "ddp": ("ddp", 4),
    "fsdp": ("fsdp", 4),
    "megatron": ("megatron", 4),
    "4d": (Grid4D(x=2), 4),
    "2.5d": (Grid25D(q=2), 8),
}
RANKS = {
    f"transformers {name} {within}": ranks
    for name in SCHEDULE_OF
    for within, (_, ranks) in WITHIN.items()
}
TASKS |= {
    f"transformers {name} {within}": (Stages(2, layout, *schedule), 4)
    for name, schedule in SCHEDULE_OF.items()
    for within, (layout, _) in WITHIN.items()
}
OTHERS: dict[str, tuple[Stages, int]] = {
    "transformers t5 zbv": (Stages(2, "fsdp", "zbv", 2), 4),
    "transformers t5 4 stages": (Stages(4, "ddp", "zero-bubble"), 4),
    "transformers mixtral ep": (Stages(2, GridEP(expert=2)), 2),
    "transformers mixtral ep zero-bubble": (Stages(2, GridEP(expert=2), "zero-bubble"), 2),
}
TASKS |= OTHERS
RANKS |= dict.fromkeys(OTHERS, 4)


def gather(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def apart(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    return float(
        (actual - expected).abs().max() / expected.abs().max().clamp(min=max(least, 1e-30))
    )


def layers_of(task: str) -> int:
    return 2 if task.endswith("of 2") else 4


def example(task: str) -> tuple[nn.Module, Any]:
    """The model of a task, and its inputs."""
    if task.startswith("transformers"):
        name = task.split()[1]
        module, _, named = mixtral(layers=2) if name == "mixtral" else getattr(models, name)()
        return InFloat64(module), named
    model, inputs = gpt(layers=layers_of(task))
    if not task.endswith("llama"):
        return model, inputs
    torch.manual_seed(0)
    return llama(WORDS, TOKENS, WIDTH, 4, 2, 2 * WIDTH, layers_of(task)).double(), inputs


def called(module: nn.Module, inputs: Any, rows: int | None = None) -> tuple[Tensor, ...]:
    """What a model returns, the loss last, or the loss alone. `rows`: the first so many."""
    if isinstance(inputs, dict):
        output = module(**{name: x[:rows] for name, x in inputs.items()})
        return (*(x for name, x in output.items() if name != "loss"), output["loss"])
    output = module(*(x[:rows] for x in inputs))
    return output if isinstance(output, tuple) else (output,)


def sends_in_flight() -> list[int]:
    """How many tensors a rank has sent and not let go of, after each send from now on."""
    in_flight, send = [0], Links.send

    def counted(self: Links, copy: int, x: Tensor, what: str) -> None:
        send(self, copy, x, what)
        in_flight.append(sum(map(len, self._leaving.values())))

    Links.send = counted  # type: ignore[method-assign]
    return in_flight


def parity(task: str) -> Facts:
    """Three steps of AdamW with clipping; then an evaluation, and one of fewer rows."""
    layout, microbatches = TASKS[task]
    model, inputs = example(task)
    single = copy.deepcopy(model)
    if "mixtral" in task:  # torch's grouped matmul takes no float64
        single.get_submodule("model").set_experts_implementation("eager")  # type: ignore[operator]
    world = slow_between(2, 2) if "slices" in task else None
    par = autopar.parallelize(model, world, inputs, layout=layout, microbatches=microbatches)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (par, single))
    expected = dict(single.named_parameters(remove_duplicate=False))
    errors: dict[str, float] = {}
    leaving = sends_in_flight()
    for step in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        loss, right = called(par, inputs)[-1], called(single, inputs)[-1]
        loss.backward()
        right.backward()
        errors[f"loss {step}"] = apart(loss.detach(), right.detach())
        largest = max(float(p.grad.abs().max()) for p in single.parameters() if p.grad is not None)
        for name, parameter in par.named_parameters():
            gradient, other = parameter.grad, expected[name].grad
            assert gradient is not None and other is not None
            errors[f"gradient {name}"] = apart(gather(gradient), other, 1e-6 * largest)
        norms = par.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(single.parameters(), 0.1)
        errors[f"norm {step}"] = apart(norms[0], norms[1])
        ours.step()
        theirs.step()
    most = max(leaving)
    for name, parameter in par.named_parameters():
        errors[f"parameter {name}"] = apart(gather(parameter), expected[name].detach())
    with torch.no_grad():  # of the planned kind: every rank gets all rows
        pairs = zip(called(par, inputs), called(single, inputs), strict=True)
        errors["without gradients"] = max(apart(a, b) for a, b in pairs)
    facts = {"apart": max(errors.values()), "worst": max(errors, key=lambda n: errors[n])}
    facts |= {
        "compared": len(errors),
        "leaving": most,
        "names": [n for n, _ in par.named_parameters()],
        "layout": par.plan.layout,
        "slices": par.plan.slices_borders,
    }
    par.eval()
    single.eval()
    with torch.no_grad():
        for rows in (8, 4):
            own, expected_rows = (called(m, inputs, rows) for m in (par, single))
            pairs = zip(own, expected_rows, strict=True)
            facts[f"evaluation of {rows}"] = max(apart(a, b) for a, b in pairs)
    return facts


def around() -> Facts:
    """Checkpoints to another number of stages, files, an ordinary module, first numbers."""
    folders: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    model, inputs = gpt()
    par = autopar.parallelize(model, None, inputs, layout=Stages(2, "fsdp"), microbatches=4)
    optimizer = torch.optim.AdamW(groups(par), lr=1e-2)
    par(*inputs)[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    autopar.Checkpoints(folder / "run", model=par, optimizer=optimizer).save(1)
    par.save_pretrained(folder / "files", file_bytes=20_000)
    plain = par.unshard()
    assert plain is not None
    after = {name: x.detach().clone() for name, x in plain.named_parameters()}
    par(*inputs)[1].backward()
    optimizer.step()
    second = {name: x.detach() for name, x in par.unshard().named_parameters()}

    other = autopar.parallelize(gpt(1)[0], None, inputs, layout=Stages(4, "ddp"), microbatches=4)
    theirs = torch.optim.AdamW(groups(other), lr=1e-2)
    facts: Facts = {
        "step": autopar.Checkpoints(folder / "run", model=other, optimizer=theirs).load()
    }
    facts["loaded"] = max(apart(gather(p), after[n]) for n, p in other.named_parameters())
    other(*inputs)[1].backward()
    theirs.step()
    facts["goes on"] = max(apart(gather(p), second[n]) for n, p in other.named_parameters())

    fsdp = autopar.parallelize(gpt(1)[0], None, inputs, layout="fsdp")
    adam = torch.optim.AdamW(groups(fsdp), lr=1e-2)
    autopar.Checkpoints(folder / "run", model=fsdp, optimizer=adam).load()
    facts["without stages"] = max(apart(gather(p), after[n]) for n, p in fsdp.named_parameters())
    fsdp.load_weights(folder / "files")
    facts["files"] = max(apart(gather(p), after[n]) for n, p in fsdp.named_parameters())
    other.load_weights(folder / "files")
    facts["files in stages"] = max(apart(gather(p), after[n]) for n, p in other.named_parameters())

    other.load_state_dict({**after, "head.weight": after["token.weight"]})
    facts["whole states"] = max(apart(gather(p), after[n]) for n, p in other.named_parameters())
    next(other.parameters()).requires_grad_(False)
    facts["frozen"] = caught(lambda: other(*inputs))

    torch.set_default_dtype(torch.float64)  # in which numbers are drawn
    torch.manual_seed(3)
    untied = functools.partial(GptWithLogits, WORDS, TOKENS, WIDTH, HEADS, layers=4, tied=False)
    drawn = untied()
    with torch.device("meta"):
        empty = untied()
    par = autopar.parallelize(empty, None, inputs, layout=Stages(2, "fsdp"), microbatches=4)
    torch.manual_seed(3)
    par.init_weights()
    expected = dict(drawn.named_parameters())
    facts["first numbers"] = max(apart(gather(p), expected[n]) for n, p in par.named_parameters())
    facts["stats"] = par.stats() is None
    facts["refused"] = caught(lambda: require_parallel(par, "Trainer"))
    facts["compiled"] = apart(torch.compile(par, backend="eager")(*inputs)[1], par(*inputs)[1])
    with par.no_sync():
        par(*inputs)[1].backward()
    par(*inputs)[1].backward()
    once = {n: gather(p.grad) for n, p in par.named_parameters() if p.grad is not None}
    par.zero_grad()
    par(*inputs)[1].backward()
    facts["no_sync"] = max(
        apart(once[n], 2 * gather(p.grad)) for n, p in par.named_parameters() if p.grad is not None
    )
    return facts


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer, the first of which the last stage has nothing of."""
    named = [(n, p) for n, p in module.named_parameters()]
    first = [p for n, p in named if n.startswith("position")]
    return [{"params": first}, {"params": [p for n, p in named if not n.startswith("position")]}]


# By task: the layout, and how many ranks of a stage have rows of their own.
DROPOUT: dict[str, tuple[Stages, int]] = {
    "dropout fsdp zero-bubble": (Stages(2, "fsdp", "zero-bubble"), 2),
    "dropout megatron": (Stages(2, "megatron"), 1),
}


def dropout(task: str) -> Facts:
    """How far three steps with dropout are from those of a layout without stages, and the losses.
    That has all rows on every rank: in the order in which micro-batches of the stages have them.
    """
    layout, ranks = DROPOUT[task]
    model, inputs = gpt(dropout=0.3)
    ordered = [x.unflatten(0, (ranks, 4, -1)).transpose(0, 1).flatten(0, 2) for x in inputs]
    staged = autopar.parallelize(model, None, inputs, layout=layout, microbatches=4)
    plain = autopar.parallelize(model, None, tuple(ordered), layout="megatron", microbatches=4)
    losses: list[Tensor] = []
    for par, own in ((plain, tuple(ordered)), (staged, inputs)):
        optimizer = torch.optim.AdamW(par.parameters(), lr=1e-2)
        torch.manual_seed(7)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = called(par, own)[-1]
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    errors = [apart(*pair) for pair in zip(losses[STEPS:], losses[:STEPS], strict=True)]
    expected = {name: gather(x) for name, x in plain.named_parameters()}
    ends = [apart(gather(x), expected[name]) for name, x in staged.named_parameters()]
    return {"apart": max(errors + ends), "losses": [float(loss) for loss in losses]}


# By task: the schedule with its rounds, another one, and micro-batches that do not divide.
FAULTS = {
    "faults 1f1b": (("1f1b", 1), ("zero-bubble", 1), 3),
    "faults zero-bubble": (("zero-bubble", 1), ("1f1b", 1), 5),
    "faults zbv": (("zbv", 2), ("interleaved", 2), 3),
    "faults dualpipev": (("dualpipev", 2), ("zbv", 2), 5),
}


def faults(task: str) -> Facts:
    """What every rank is told where a pipeline cannot be, or the ranks do not agree on one, by the
    kind of fault; and how far from one device a step is thereafter.
    """
    own, other, odd = FAULTS[task]
    first = not dist.get_rank()
    model, inputs = gpt()

    def refused(layout: Any, model: nn.Module = model, inputs: Any = inputs, count: int = 4) -> str:
        return caught(
            lambda: autopar.parallelize(model, None, inputs, layout=layout, microbatches=count)
        )

    layout, fewer = Stages(2, "ddp", *own), gpt(layers=2 * own[1] - 1)
    plans = [
        autopar.plan(model, 2, inputs, Stages(2, "ddp", *schedule), microbatches=4)
        for schedule in (own, other)
    ]
    facts: Facts = {
        "micro-batches": refused(layout, count=odd),
        "blocks": refused(layout, *fewer),
        "no parameters": refused(layout, *without_parameters()),
        "schedule": refused(layout if first else Stages(2, "ddp", *other)),
        "count of micro-batches": refused(layout, count=4 if first else 8),
        "memory": caught(
            lambda: autopar.parallelize(
                model, None, inputs, layout=layout, microbatches=4, memory=50_000
            )
        ),
        "plan": caught(lambda: autopar.apply(model, plans[0 if first else 1])),
    }
    par, single = autopar.apply(model, plans[0]), copy.deepcopy(model)
    for rows in (8, 6):  # the planned call, and one with other rows than the parts divide
        for module in (par, single):
            module.zero_grad()
            called(module, inputs, rows)[-1].backward()
        expected = dict(single.named_parameters(remove_duplicate=False))
        facts[f"{rows} rows"] = max(
            apart(gather(p.grad), expected[name].grad, 1e-6)  # type: ignore[arg-type]
            for name, p in par.named_parameters()
        )
    return facts


def without_parameters() -> tuple[nn.Module, tuple[Tensor]]:
    """A model of which every cut has a stage without parameters at its end, and its inputs."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linear = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.blocks = nn.ModuleList([*linear, *(nn.Tanh() for _ in range(4))])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    torch.manual_seed(0)
    return Bare().double(), (torch.randn(8, WIDTH).double(),)


def facts_of(task: str) -> Facts:
    if task in TASKS:
        return parity(task)
    if task in DROPOUT:
        return dropout(task)
    return faults(task) if task in FAULTS else around()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_everywhere(facts_of)
