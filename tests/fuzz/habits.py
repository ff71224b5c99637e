"""Habits: what people do to a module between two steps, alike to a plain and to a parallel one.

    model.get_submodule('m1').eval()
    model.m2 = 0.5
    p = model.get_parameter('m1.weight'); p.data = p.data * 0.5

A habit of a case is a kind and the seed of its draws, such as `mode:12`. Here it becomes a line of
Python that acts on `model` and `inputs`: that line is what runs and what a failure prints. `rank`
in it is 0 for the plain module. A `Session` trains a module with a habit before each further step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

RATE, MOMENTUM = 0.05, 0.9
_READ = ("p", "eps", "momentum", "negative_slope", "norm_first")  # of torch's own modules

Draw = random.Random
Writer = Callable[[Draw, nn.Module, tuple[Any, ...]], str]
HABITS: dict[str, Writer] = {}


def habit(write: Writer) -> Writer:
    HABITS[write.__name__] = write
    return write


def _submodule(draw: Draw, model: nn.Module, wanted: Callable[[nn.Module], bool]) -> str:
    """The text of a submodule, "" where there is none of this kind."""
    able = [name for name, module in model.named_modules() if wanted(module)]
    if not able:
        return ""
    name = draw.choice(able)
    return f"model.get_submodule({name!r})" if name else "model"


def _parameter(draw: Draw, model: nn.Module) -> tuple[str, Tensor]:
    name, tensor = draw.choice(list(model.named_parameters()))
    return f"p = model.get_parameter({name!r})", tensor


@habit
def mode(draw: Draw, model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """A submodule trains or not, whatever the others do; those with a mode of their own first."""
    moody = ("Dropout", "BatchNorm", "InstanceNorm", "Encoder", "Decoder", "Attention", "RNN")
    kinds = moody if draw.random() < 0.6 else ("",)
    module = _submodule(draw, model, lambda m: any(k in type(m).__name__ for k in kinds))
    return module and f"{module}.{draw.choice(('eval()', 'eval()', 'train()'))}"


@habit
def attribute(draw: Draw, model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """A plain attribute that forward reads has another value."""
    able = [
        (path, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float)
        and (name in _READ if path else name.startswith("m"))
    ]
    if not able:
        return ""
    path, name, value = draw.choice(able)
    owner = f"model.get_submodule({path!r})" if path else "model"
    return f"{owner}.{name} = {_other(draw, name, value)!r}"


def _other(draw: Draw, name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + draw.choice((1, 2, -1))
    if name == "p":
        return draw.choice([p for p in (0.1, 0.25, 0.4) if p != value])
    return value * draw.choice((0.5, 0.75, 1.5)) if value else 0.3


@habit
def number(draw: Draw, model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """A number among the arguments is another one."""
    able = [place for place, value in enumerate(inputs) if isinstance(value, int | float)]
    if not able:
        return ""
    place = draw.choice(able)
    value = _other(draw, "", inputs[place])
    return f"inputs = (*inputs[:{place}], {value!r}, *inputs[{place + 1} :])"


@habit
def data(draw: Draw, model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """A parameter's data is assigned: what was computed of it, a plain tensor, or the numbers of a
    parameter of its shape, which may lie otherwise.
    """
    line, tensor = _parameter(draw, model)
    plain = (
        f"torch.randn(p.shape, generator=torch.Generator().manual_seed({draw.randrange(99)})) / 3"
    )
    options = ["p.data * 0.5", "p.data.clone() + 0.1", "p.detach().tanh()", plain, plain]
    for name, other in model.named_parameters():
        if other.shape == tensor.shape and other is not tensor:
            options.append(f"model.get_parameter({name!r}).data * 0.9")
    return f"{line}; p.data = {draw.choice(options)}"


@habit
def write(draw: Draw, model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """A view of a parameter is written, or the parameter through it."""
    line, tensor = _parameter(draw, model)
    if not tensor.dim():
        return f"{line}; torch.no_grad()(lambda: p.mul_(0.5))()"
    last = tensor.shape[0] - 1
    options = [
        "p[0].zero_()", f"p[{draw.randint(0, last)}].mul_(0.5)", "p.data[0].fill_(0.1)",
        f"p.__setitem__(slice({draw.randint(0, last)}, None), 0.2)", "p[..., -1].add_(0.25)",
        "p.view(-1)[1:3].mul_(2)", "p.chunk(2)[-1].mul_(0.5)", "p.__setitem__(p > 0.2, 0.1)",
        "p.add_(torch.ones(p.shape) / 8)", "p.copy_(torch.ones(p.shape).cumsum(0) / 9)",
        "[row.mul_(1 - i / 9) for i, row in enumerate(p)]",
    ]  # fmt: skip
    if tensor.dim() > 1:
        options += ["p.mT[..., 0].mul_(0.5)", "p.data[:, 0].fill_(0.3)", "p[0][0].add_(1)"]
    return f"{line}; torch.no_grad()(lambda: {draw.choice(options)})()"


@habit
def init(draw: Draw, model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """Numbers are drawn into a parameter: those of rank 0's generator."""
    line, tensor = _parameter(draw, model)
    options = ["nn.init.normal_(p, 0, 0.3)", "nn.init.uniform_(p, -0.5, 0.5)",
               "nn.init.trunc_normal_(p, 0, 0.3)", "p.data.normal_(0, 0.3)",
               "torch.no_grad()(lambda: p.add_(torch.randn_like(p) * 0.1))()",
               "torch.no_grad()(lambda: p.mul_(torch.rand_like(p)))()"]  # fmt: skip
    if tensor.dim():
        options += ["torch.no_grad()(lambda: p[0].normal_(0, 0.3))()"]
    if tensor.dim() > 1:
        options += ["nn.init.kaiming_uniform_(p)", "nn.init.xavier_normal_(p)"]
    seed = f"torch.manual_seed({draw.randrange(99)} + rank)"
    return f"{line}; {seed}; {draw.choice(options)}"


@habit
def freeze(draw: Draw, model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """A module is frozen, or one that was frozen is trained; the optimizer gets what is new."""
    module = _submodule(draw, model, lambda m: next(m.parameters(), None) is not None)
    target = eval(module, {"model": model})
    trains = any(p.requires_grad for p in target.parameters())
    return f"{module}.requires_grad_({not trains})"


@habit
def batch(draw: Draw, model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """Every input has another number of rows."""
    rows = inputs[0].shape[0]
    count = draw.choice([n for n in range(1, 2 * rows + 1) if n != rows])
    return (
        f"inputs = tuple(torch.cat([x, x.roll(1, -1)])[:{count}].detach().requires_grad_("
        f"x.requires_grad) if torch.is_tensor(x) and x.dim() and x.shape[0] == {rows} else x "
        "for x in inputs)"
    )


@habit
def evaluate(draw: Draw, model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """A call without gradients, in eval mode; then the model trains again."""
    rest = draw.choice(("model.train()", "model.train()", "None"))
    return f"model.eval(); seen = torch.no_grad()(model)(*inputs); {rest}"


# -- doing them ------------------------------------------------------------------------------------
class Session:
    """A module with its inputs and an optimizer. `rank`: 0 for a plain module."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], rank: int = 0) -> None:
        self.model, self.optimizer, self._known = model, None, set[int]()
        self.space: dict[str, Any] = {
            "model": model, "inputs": inputs, "rank": rank, "torch": torch, "nn": nn
        }  # fmt: skip
        self._train_what_is_new()

    @property
    def inputs(self) -> tuple[Any, ...]:
        values: tuple[Any, ...] = self.space["inputs"]
        return values

    def do(self, line: str) -> list[Any]:
        """Runs the line of a habit; returns what the module gave, if it was called."""
        exec(line, self.space)
        self._train_what_is_new()
        return pytree.tree_leaves(self.space.pop("seen", ()))

    def _train_what_is_new(self) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        new = [p for p in parameters if id(p) not in self._known]
        self._known |= set(map(id, new))
        if new and self.optimizer is None:
            self.optimizer: Any = torch.optim.SGD(new, RATE, MOMENTUM)
        elif new:
            self.optimizer.add_param_group({"params": new})

    def call(self) -> list[Any]:
        return pytree.tree_leaves(self.model(*self.inputs))

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def lines_of(
    habits: Sequence[tuple[str, int]],
    session: Callable[[], Session],
    trial: Callable[[Sequence[str]], bool],
) -> list[tuple[str, str]]:
    """The kinds and lines of the habits that fit a module, in order. `session`: begins one with the
    module as it was made; `trial`: whether the module can be trained with these.
    """
    lines: list[tuple[str, str]] = []
    for kind, seed in habits:
        now = session()
        for _, line in lines:
            now.do(line)
        line = HABITS[kind](random.Random(seed), now.model, now.inputs)
        if line and trial([*(line for _, line in lines), line]):
            lines.append((kind, line))
    return lines
