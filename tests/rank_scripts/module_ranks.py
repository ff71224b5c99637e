"""What test_module.py starts on ranks: `module_ranks.py FILE TASK…`. What people do with a module
is done to a plain one and to a parallel one; FILE has the pairs of what came out: parallel, plain.
"""

from __future__ import annotations

import copy
import io
import math
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from on_ranks import run_tasks

Facts = dict[str, Any]


def gather(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def norms(model: nn.Module) -> float:
    return sum(gather(p.detach()).double().norm().item() for p in model.parameters())


def message(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def inputs(rows: int = 8, width: int = 16) -> Tensor:
    return torch.arange(float(rows * width)).sin().view(rows, width)


def pair(model: nn.Module, x: Any, layout: str = "fsdp") -> tuple[nn.Module, nn.Module]:
    """The plain model, and its parallel one."""
    return model, autopar.parallelize(copy.deepcopy(model), inputs=(x,), layout=layout)


# -- modes, attributes, classes --------------------------------------------------------------------
def modes() -> Facts:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    x, facts = inputs(), {}
    single, par = pair(net, x, "ddp")
    results = []
    for model in (par, single):
        model.get_submodule("1").eval()  # frozen BatchNorm
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        mean = dict(model.named_buffers())["1.running_mean"]
        results.append((loss.item(), norms(model), mean.norm().item()))
        model.train()
        results[-1] += (model(x).square().mean().item(), mean.norm().item())
    facts["frozen BatchNorm"] = results
    single, par = pair(
        nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4)), x, "ddp"
    )
    for name, by_type in (("by type", True), ("by name", False)):
        for model in (par, single):
            model.eval()
            for path, module in model.named_modules():
                if isinstance(module, nn.Dropout) if by_type else path == "1":
                    module.train()
        with torch.no_grad():
            results = [not torch.equal(m(x), m(x)) for m in (par, single)]
        facts[f"Monte Carlo dropout {name}"] = [results[0], True] if results[1] else results
    return facts


class Adapted(nn.Module):
    """A layer with an adapter, and switches of every kind."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(16, 32), nn.Linear(16, 2), nn.Linear(2, 32)
        self.disabled, self.tau, self.drop = False, 1.0, nn.Dropout(0.0)
        self.config = {"act": "tanh", "sizes": [1, 2]}
        self.act, self.shift, self.steps = torch.tanh, torch.ones(32), 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        y = self.drop(y if self.disabled else y + self.up(self.down(x))) / self.tau
        y = self.act(y) if self.config["act"] == "tanh" else y.relu()
        return (y + self.shift) * self.scale * self.config["sizes"][0]  # type: ignore[operator]

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def attributes() -> Facts:
    torch.manual_seed(0)
    single, par = pair(Adapted(), inputs(), "fsdp")
    facts = {}

    def both(what: str, change: Callable[[Any], Any], rows: int = 8) -> None:
        results = []
        for model in (par, single):
            change(model)
            results.append(model(inputs(rows)).norm().item())
        facts[what] = results

    def put(model: Any, path: str, value: Any) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    both("as planned", lambda m: None)
    both("tau", lambda m: put(m, "tau", 0.5))
    both("disabled", lambda m: put(m, "disabled", True))
    both("enabled again", lambda m: put(m, "disabled", False))
    both("a dict", lambda m: m.config.update(act="relu"))
    both("a list in a dict", lambda m: m.config["sizes"].__setitem__(0, 3))
    both("a function", lambda m: (m.config.update(act="tanh"), put(m, "act", torch.sin)))
    both("a tensor", lambda m: put(m, "shift", torch.full((32,), 3.0)))
    both("a tensor in place", lambda m: m.shift.mul_(2.0))
    both("other rows", lambda m: None, rows=4)
    both("dropout of everything", lambda m: put(m, "drop.p", 1.0))
    both("dropout of nothing", lambda m: put(m, "drop.p", 0.0))
    Adapted.scale = 2.0
    both("an attribute of the class", lambda m: None)
    Adapted.scale = 1.0
    both("and back", lambda m: None)
    graphs = len(par._autopar.graphs.others)  # type: ignore[union-attr]
    both("what forward does not read", lambda m: put(m, "steps", 3))
    facts["graphs for that"] = [len(par._autopar.graphs.others), graphs]  # type: ignore[union-attr]
    facts["a method"] = [par.loss(inputs()).item(), single.loss(inputs()).item()]  # type: ignore[operator]
    return facts


def classes() -> Facts:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32))
    ids = torch.arange(48).view(8, 6) % 32
    single, par = pair(net, ids)
    for model in (par, single):
        bare = {
            f"{name}.{p}"
            for name, module in model.named_modules()
            if isinstance(module, nn.LayerNorm | nn.Embedding)
            for p, _ in module.named_parameters(recurse=False)
        }
        named = dict(model.named_parameters())
        decay = [n for n in named if n not in bare and not n.endswith("bias")]
        groups = [
            {"params": [named[n] for n in decay], "weight_decay": 0.5},
            {"params": [p for n, p in named.items() if n not in decay], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
    facts = {"groups by type": [norms(par), norms(single)]}

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)

    for model in (par, single):
        model.apply(fill)
    facts["apply by type"] = [norms(par), norms(single)]
    facts["types"] = [[type(m).__name__ for m in model.modules()] for model in (par, single)]
    return facts


# -- numbers and gradients that are assigned and written -------------------------------------------
def assigned(layout: str) -> Facts:
    def half(model: Any) -> None:
        for p in model.parameters():
            p.data = p.data * 0.5

    def plain(model: Any) -> None:
        for p in model.parameters():
            p.data = torch.arange(float(p.numel())).view(p.shape)

    def sgd(model: Any) -> None:
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad.data

    def sharpness(model: Any) -> None:
        old = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data + 0.05 * p.grad
        model(inputs()).square().mean().backward()
        for p, o in zip(model.parameters(), old, strict=True):
            p.data = o
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.1)

    def gradient(model: Any) -> None:
        for p in model.parameters():
            p.grad.data = p.grad.data * 0.5
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def gradient_of_another(model: Any) -> None:
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def vector(model: Any) -> None:
        vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())

    facts = {}
    acts = half, plain, sgd, sharpness, gradient, gradient_of_another, vector
    for act in acts:
        single, par = pair(mlp(), inputs(), layout)
        for model in (par, single):
            model(inputs()).square().mean().backward()
            act(model)
        outputs = [model(inputs()).norm().item() for model in (par, single)]
        facts[act.__name__] = [[norms(par), outputs[0]], [norms(single), outputs[1]]]
    weight = par.get_parameter("0.weight")
    facts["another shape"] = message(lambda: setattr(weight, "data", torch.ones(3, 3)))
    facts["another dtype"] = message(lambda: setattr(weight, "data", weight.data.double()))
    return facts


VIEW_WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda w: w[0].zero_(),
    "a row of data": lambda w: w.data[0].zero_(),
    "setitem": lambda w: w.__setitem__(slice(1, 4), 7.0),
    "setitem of a tensor": lambda w: w.__setitem__(slice(1, 3), torch.ones(2, 4)),
    "setitem by a mask": lambda w: w.__setitem__(w > 5, 0.0),
    "setitem by numbers": lambda w: w.__setitem__(torch.tensor([1, 4]), 0.0),
    "a column of data": lambda w: w.data[:, 1].fill_(3),
    "transposed": lambda w: w.t()[1].zero_(),
    "flat": lambda w: w.view(-1)[5:9].mul_(2),
    "rows in a loop": lambda w: [row.mul_(i) for i, row in enumerate(w)],
    "a chunk": lambda w: w.chunk(2)[1].zero_(),
    "a view of a view": lambda w: w[1:5][2].add_(1),
    "in place with a plain tensor": lambda w: w.add_(torch.ones(6, 4)),
    "in place with a row": lambda w: w.add_(torch.arange(4.0)),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([1, 3]), 2.0),
    "tril_": lambda w: w.tril_(),
    "renorm_": lambda w: w.renorm_(2, 0, 3.0),
    "fill_diagonal_": lambda w: w.fill_diagonal_(0.0),
    "copy_": lambda w: w.copy_(torch.ones(6, 4)),
    "eye_": lambda w: nn.init.eye_(w),
    "a view after a write": lambda w: (lambda v: (w.zero_(), w.add_(v.sum() + 1)))(w[0]),
}
DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal_": nn.init.normal_,
    "uniform_": lambda w: w.uniform_(-1, 1),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "a row": lambda w: w[2].normal_(),
    "noise": lambda w: w.add_(torch.randn_like(w) * 0.1),
    "bernoulli_": lambda w: w.bernoulli_(0.5),
    "exponential_": lambda w: w.exponential_(),
}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(24.0).view(6, 4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w.t()).square().mean()


def written() -> Facts:
    facts: Facts = {}
    x = inputs(8, 4)
    for layout in ("fsdp", "megatron", "ddp"):
        single, par = pair(Holder(), x, layout)
        start = {"w": torch.arange(24.0).view(6, 4) + 0.5}
        for name, write in {**VIEW_WRITES, **DRAWS}.items():
            results = []
            for model in (par, single):
                model.load_state_dict(start)
                # rank 0's generator counts
                torch.manual_seed(7 if model is single else 7 + dist.get_rank())
                with torch.no_grad():
                    write(model.get_parameter("w"))
                with torch.no_grad():
                    results.append([gather(model.get_parameter("w")).tolist(), model(x).item()])
            facts[f"{layout}: {name}"] = results
    return facts


def plain_average(model: nn.Module) -> float:
    """The norm of an average that a script keeps in plain tensors."""
    average = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            assert average[name].mul_(0.9).add_(p, alpha=0.1) is average[name]
            p.copy_(average[name])
    return norms(model)


def read() -> Facts:
    """Numbers that are read off a sharded parameter are those of the whole."""
    single, par = pair(mlp(), inputs())
    reads: dict[str, Callable[[Tensor], Any]] = {
        "item of a sum": lambda w: w.abs().sum().item(),
        "float of a dot": lambda w: float(torch.dot(w.flatten()[::1], w.flatten()[::1])),
        "dot with itself": lambda w: float(w.flatten().dot(w.flatten())) + float(w[0].dot(w[0])),
        "bool of any": lambda w: bool((w > 0.2).any()),
        "format": lambda w: f"{w.sum():.4f}",
        "equal": lambda w: torch.equal(w, w.clone()),
        "norm": lambda w: w.norm().item(),
    }
    facts = {
        name: [get(m.get_parameter("0.weight").detach()) for m in (par, single)]
        for name, get in reads.items()
    }
    facts["an average in plain tensors"] = [plain_average(m) for m in (par, single)]
    return facts


# -- states ----------------------------------------------------------------------------------------
class Scaled(nn.Linear):
    amax = 1.25

    def get_extra_state(self) -> Any:
        return {"amax": self.amax}

    def set_extra_state(self, state: Any) -> None:
        self.amax = state["amax"]


def states() -> Facts:
    torch.manual_seed(0)
    net = nn.Sequential(Scaled(16, 32), nn.Linear(32, 4))
    single, par = pair(net, inputs())
    facts: Facts = {"names": [list(par.state_dict()), list(single.state_dict())]}
    single[0].amax = 2.5  # type: ignore[index]
    par.load_state_dict(single.state_dict())
    facts["extra state that was loaded"] = [par[0].amax, 2.5]  # type: ignore[index]
    par[0].load_state_dict(nn.Linear(16, 32).state_dict(), strict=False)  # type: ignore[index]
    par[0].load_state_dict(single[0].state_dict())  # type: ignore[index]
    facts["a state of one module"] = [norms(par), norms(single)]
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    autopar.Checkpoints(folder[0], model=par).save(1)
    par[0].amax = 0.0  # type: ignore[index]
    autopar.Checkpoints(folder[0], model=par).load()
    facts["extra state of a checkpoint"] = [par[0].amax, 2.5]  # type: ignore[index]
    optimizer = torch.optim.AdamW(par.parameters())
    par(inputs()).square().mean().backward()
    optimizer.step()
    facts["refused"] = [
        message(partial(torch.save, state, io.BytesIO()))
        for state in (par.state_dict(), optimizer.state_dict(), par.get_parameter("1.weight"))
    ]
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(par, options=options)
    if dist.get_rank() == 0:
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        copy.deepcopy(single).load_state_dict(loaded)
    with autopar.own_shards():
        torch.save(par.state_dict(), file := io.BytesIO())
    file.seek(0)
    before = norms(par)
    own = torch.load(file, weights_only=False)
    with torch.no_grad():
        for p in par.parameters():
            p.zero_()
    par.load_state_dict(own)
    facts["own shards"] = [norms(par), before]
    _, whole_copies = pair(mlp(), inputs(), "ddp")
    torch.save(whole_copies.state_dict(), file := io.BytesIO())
    file.seek(0)
    facts["whole on every rank"] = type(torch.load(file)["0.weight"]).__name__
    return facts


# -- numbers that change, parameters that are unfrozen ---------------------------------------------
class Annealed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.how, self.gain = nn.Linear(16, 32), how, 1.0

    def forward(self, x: Tensor, beta: float = 0.0) -> Tensor:
        loss = self.layer(x).tanh().square().mean() * self.gain
        if self.how == "isinstance":
            return loss * beta if isinstance(beta, float) else loss
        if self.how == "exp":
            return loss * math.exp(beta)
        if self.how == "branch":
            return loss * beta if beta > 0.1 else loss
        if self.how == "half":
            return (loss.bfloat16() * (1 + beta)).float()
        return (1 - beta) * loss + loss.sqrt() * beta / 3 - beta


def numbers() -> Facts:
    facts: Facts = {}
    for how in ("arithmetic", "half", "isinstance", "exp", "branch"):
        single = Annealed(how)
        inputs_by_name = {"x": inputs(), "beta": 0.0}
        par: Any = autopar.parallelize(Annealed(how), inputs=inputs_by_name, layout="fsdp")
        results = []
        for i in range(1, 4):
            for model in (par, single):
                model.zero_grad()
                model(inputs(), beta=i / 7).backward()
                gradient = gather(model.get_parameter("layer.weight").grad)
                results.append([model(inputs(), beta=i / 7).item(), gradient.norm().item()])
        for i in range(1, 3):
            for model in (par, single):
                model.gain = i / 3
                results.append(model(inputs(), i / 9).item())
        facts[how] = [results[::2], results[1::2]]
        facts[f"{how}: graphs"] = len(par._autopar.graphs.others)
        facts[f"{how}: keyed"] = sorted(par._autopar.graphs._keyed)
    return facts


def frozen() -> Facts:
    facts: Facts = {}
    x = inputs()
    for layout in ("fsdp", "megatron"):
        for first_frozen in (False, True):
            single = mlp()
            single[0].requires_grad_(not first_frozen)
            par: Any = autopar.parallelize(copy.deepcopy(single), inputs=(x,), layout=layout)
            results = []
            for model in (par, single):
                trained = [p for p in model.parameters() if p.requires_grad]
                optimizer = torch.optim.SGD(trained, lr=0.1)
                for trains in (first_frozen, not first_frozen, first_frozen, True):
                    model.get_submodule("0").requires_grad_(trains)
                    known = {id(p) for g in optimizer.param_groups for p in g["params"]}
                    new = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
                    if new:
                        optimizer.add_param_group({"params": new})
                    for rows in (4, 8):
                        optimizer.zero_grad()
                        model(x[:rows]).square().mean().backward()
                        optimizer.step()
                results.append(norms(model))
            facts[f"{layout}, first {'frozen' if first_frozen else 'trained'}"] = results
    return facts


# -- hooks, submodules, copies ---------------------------------------------------------------------
def refusals() -> Facts:
    x = inputs()
    facts: Facts = {}
    _, par = pair(mlp(), x)
    facts["submodule"] = message(lambda: par[0](x))  # type: ignore[index]
    handle = par[0].register_forward_hook(lambda *_: None)  # type: ignore[index]
    facts["hook"] = message(lambda: par(x))
    handle.remove()
    facts["no hook"] = message(lambda: par(x))
    seen: list[Any] = []
    par.register_forward_hook(lambda module, args, result: seen.append(result))
    par(x)
    facts["hook of the root"] = len(seen)
    par[2].bias = None  # type: ignore[index]
    facts["no bias"] = message(lambda: par(x))
    _, par = pair(mlp(), x)
    par[1] = nn.GELU()  # type: ignore[index]
    facts["replaced"] = message(lambda: par(x))
    _, par = pair(mlp(), x)
    par[0].weight = nn.Parameter(torch.ones(32, 16))  # type: ignore[index]
    facts["a plain parameter"] = message(lambda: par(x))
    return facts


def traced_hooks() -> Facts:
    """Hooks that the model had are in its graph, those of its root once."""
    x, facts = inputs(), {}
    for name in ("", "0"):
        single = mlp()
        single.get_submodule(name).register_forward_hook(lambda module, args, result: result * 2)
        par = autopar.parallelize(single, inputs=(x,), layout="fsdp")
        facts[f"hook of {name or 'the root'}"] = [par(x).norm().item(), single(x).norm().item()]
    return facts


def copies() -> Facts:
    x, facts = inputs(), {}
    single, par = pair(mlp(), x)
    for model in (par, single):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            twin = copy.deepcopy(model)  # while gradients are there
            average.update_parameters(model)
        with torch.no_grad():
            few = average.eval()(x[:3]).norm().item()
        gradients = [p.grad is None for p in twin.parameters()]
        facts.setdefault("copies", []).append([norms(twin), gradients, norms(average), few])
    student = autopar.parallelize(mlp(), inputs=(x,), layout="megatron")
    teacher = autopar.parallelize(mlp().requires_grad_(False), inputs=(x,), layout="ddp")
    twice = mlp()
    with torch.no_grad():
        for p in (*student.parameters(), *twice.parameters()):
            p.mul_(2.0)
        for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
            a.lerp_(b, 0.25)
        torch._foreach_lerp_([*teacher.parameters()], [*student.parameters()], 0.25)
    for p in twice.parameters():
        p.data *= 1 + 0.0
    expected = mlp()
    with torch.no_grad():
        for _ in range(2):
            for a, b in zip(expected.parameters(), twice.parameters(), strict=True):
                a.lerp_(b, 0.25)
    facts["between layouts"] = [norms(teacher), norms(expected)]
    with torch.no_grad():
        for p in teacher.unshard().parameters():  # each rank has all of the teacher
            p.zero_()
    facts["what an ordinary module shares"] = [norms(teacher), norms(expected)]
    par.load_state_dict(student.state_dict())
    facts["a state of another layout"] = [norms(par), norms(twice)]
    return facts


def complexes() -> Facts:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(4, 8, 8, 5, dtype=torch.complex64) * 0.1)
            self.p = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(x), self.w)
            return self.p(torch.fft.irfft2(z).relu()).square().mean()

    x, facts = torch.arange(2048.0).sin().view(8, 4, 8, 8), {}
    for layout in ("ddp", "fsdp"):
        single, par = pair(Spectral(), x, layout)
        results = []
        for model in (par, single):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            w = model.get_parameter("w")
            results.append(
                [gather(w.detach()).abs().sum().item(), gather(w.grad).abs().sum().item()]
            )
        facts[layout] = results
        par.load_state_dict(Spectral().state_dict())
        facts[f"{layout}: loaded"] = [norms_of(par), norms_of(Spectral())]
    return facts


def norms_of(model: nn.Module) -> float:
    return sum(gather(p.detach()).abs().sum().item() for p in model.parameters())


def differ() -> Facts:
    """Ranks whose modules are not alike all hear of it, with the attribute's name."""
    _, par = pair(Adapted(), inputs())
    par(inputs())
    if dist.get_rank() == 0:
        par.tau = 0.5  # type: ignore[assignment]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, message(lambda: par(inputs())))
    return {"said": said}


if __name__ == "__main__":
    run_tasks(
        {
            "modes": modes, "attributes": attributes, "classes": classes, "written": written,
            "assigned fsdp": lambda: assigned("fsdp"), "read": read, "states": states,
            "assigned megatron": lambda: assigned("megatron"), "numbers": numbers,
            "frozen": frozen, "refusals": refusals, "traced hooks": traced_hooks,
            "copies": copies, "complexes": complexes, "differ": differ,
        }
    )  # fmt: skip
