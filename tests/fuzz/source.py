"""A case becomes the text of a module: that text is what runs and what a failure prints."""

from __future__ import annotations

import linecache
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.reference import double_by_default

from .case import Case, Step
from .habits import Session, lines_of
from .table import FROM_IDS, LOSS, TABLE, Op

WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24)
VOCABULARY = 12
_MOST = 20_000  # elements of a value
_LARGEST = 30.0  # what a value may reach: rounding shall stay far below what is looked for
_FIELD = re.compile(r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_HEAD = """import autopar, torch, torch.nn.functional as F
from torch import nn
torch.set_default_dtype(torch.float64)
torch.manual_seed({seed})
"""
_numbers = count()


class Unfit(Exception):
    """No module can be made of the case: nothing is left of it, or its values are rounding."""


@dataclass(frozen=True)
class Built:
    """A module and its inputs, with the text that makes them. `used`: the kinds that are in it;
    `habits`: kinds and lines of what is done to it, one before each step but the first.
    """

    text: str
    model: nn.Module
    inputs: tuple[Any, ...]
    used: tuple[str, ...]
    habits: tuple[tuple[str, str], ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of ops and of habits."""
        return (*self.used, *(kind for kind, _ in self.habits))

    @property
    def loose(self) -> bool:
        return any(TABLE[name].loose for name in self.used if name in TABLE)


class _Fields(dict[str, Any]):
    """What the texts of an op kind may name; draws are made when they are first named."""

    def __init__(self, maker: _Maker, step: Step, number: int) -> None:
        super().__init__(m=f"m{number}", f=F, vocabulary=VOCABULARY)
        self.maker, self.draw = maker, random.Random(step.draw)
        last = TABLE[step.op].kind == LOSS or self.draw.random() < 0.8
        chosen = maker.values[-1] if last else maker.pick_value(self.draw)
        self["x"], self["shape"] = chosen, tuple(maker.env[chosen].shape)
        shape = self["shape"]
        self.update(n=len(shape), size=math.prod(shape), pick=self.pick, pick2=self.pick)
        if shape:
            self.update(b=shape[0], c=shape[min(1, len(shape) - 1)], h=shape[-1])
        self.update(given=self.as_input, divisor=self.divisor)

    def pick(self, *options: Any) -> Any:
        return self.draw.choice(options)

    def divisor(self, size: int) -> int:
        able = [d for d in range(2, size) if size % d == 0]
        return self.draw.choice(able) if able else 1

    def as_input(self, text: str, also: str = "") -> str:
        return self.maker.more_input(text, also)

    def __missing__(self, name: str) -> Any:
        if name in ("torch", "range", "min", "repr", "F"):
            raise KeyError(name)
        self[name] = value = self._drawn(name)
        return value

    def _drawn(self, name: str) -> Any:
        shape = self["shape"]
        match name:
            case "o":
                divisible = [w for w in (1, 2, 3, 4) if w * self.maker.case.ranks <= 24]
                if divisible and self.draw.random() < 0.7:
                    return self.maker.case.ranks * self.draw.choice(divisible)
                return self.draw.choice(WIDTHS)
            case "flag" | "flag2":
                return self.draw.random() < 0.5
            case "dim" | "dim2":
                return self.draw.randrange(len(shape))
            case "k" | "kc" | "kb":
                return self.divisor(self[{"k": "h", "kc": "c", "kb": "b"}[name]])
            case "g" | "r" | "e":
                return self.draw.choice((1, 2, 3, 4) if name == "r" else (1, 2, 3))
            case "y":
                return self.maker.like(self["x"], self.draw)
            case "other":
                return self.maker.pick_value(self.draw)
            case "order":
                return ", ".join(map(str, self.draw.sample(range(len(shape)), len(shape))))
            case "refactored":
                return ", ".join(map(str, refactored(math.prod(shape), self.draw)))
            case "refactored_rest":
                return ", ".join(map(str, refactored(math.prod(shape[1:]), self.draw)))
        raise KeyError(name)


def refactored(size: int, draw: random.Random) -> list[int]:
    """Two or three sizes with this product, their prime factors in another order."""
    primes, rest = [], size
    for prime in (2, 3, 5, 7, 11, 13, rest):
        while prime > 1 and rest % prime == 0:
            primes.append(prime)
            rest //= prime
    draw.shuffle(primes)
    dims = [1] * draw.choice((2, 3))
    for prime in primes:
        dims[draw.randrange(len(dims))] *= prime
    return dims


class _Maker:
    """Writes the lines of a module, and runs each as it is written: so shapes are known."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.seed = case, seed
        self.module = nn.Module()
        self.init: list[str] = []
        self.forward: list[str] = []
        self.defined: list[str] = []
        self.inputs: list[tuple[str, str]] = []
        self.used: list[str] = []
        self.values: list[str] = []
        self.env: dict[str, Any] = {"self": self.module, "torch": torch, "nn": nn, "F": F}
        torch.manual_seed(seed)

    # -- values ------------------------------------------------------------------------------------
    def pick_value(self, draw: random.Random) -> str:
        return draw.choice(self.values)

    def like(self, name: str, draw: random.Random) -> str:
        shape = self.env[name].shape
        return draw.choice([v for v in self.values if self.env[v].shape == shape])

    def more_input(self, text: str, also: str = "") -> str:
        name = f"in{len(self.inputs)}"
        value = eval(text, dict(self.env))
        if also == "eye":  # nothing is masked whole: torch gives nan there
            text = f"({text}) | torch.eye({value.shape[-1]}, dtype=torch.bool)"
        self.env[name] = eval(text, dict(self.env))
        self.inputs.append((name, text))
        return name

    # -- steps -------------------------------------------------------------------------------------
    def step(self, step: Step, number: int, into: str) -> bool:
        """Adds an op, where it fits what there is; else leaves all as it was."""
        entry, sizes_before = (
            TABLE[step.op],
            (len(self.inputs), len(self.init), set(vars(self.module))),
        )
        try:
            fields = _Fields(self, step, number)
            if not eval(entry.when, {}, fields):
                return False
            init, lines = self._filled(entry, fields)
            self._define(entry)
            for line in init:
                exec(line, self.env)
            self._run(lines, into, entry)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError):
            del self.inputs[sizes_before[0] :]
            return False
        self.init += init
        self.forward += [*lines[:-1], f"{into} = {lines[-1].strip()}"]
        self.used.append(step.op)
        return True

    def _filled(self, op: Op, fields: _Fields) -> tuple[list[str], list[str]]:
        def put(match: re.Match[str]) -> str:
            return str(eval(match[1], {"torch": torch, "repr": repr}, fields))

        init = [_FIELD.sub(put, line) for line in op.init.split("\n") if line]
        return init, [_FIELD.sub(put, line) for line in op.text.split("\n")]

    def _define(self, op: Op) -> None:
        if op.define and op.define not in self.defined:
            exec(op.define, self.env)
            self.defined.append(op.define)

    def _run(self, lines: list[str], into: str, op: Op) -> None:
        state = torch.get_rng_state()
        buffers = {name: b.clone() for name, b in self.module.named_buffers()}
        attributes = {
            n: v for n, v in vars(self.module).items() if isinstance(v, int | Tensor | None)
        }
        exec("\n".join(lines[:-1]), self.env)
        result = eval(lines[-1].strip(), self.env)
        vars(self.module).update(attributes)
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        torch.set_rng_state(state)
        if op.kind in ("op", FROM_IDS, "loss"):
            self._check(result)
        self.env[into] = result

    def _check(self, built: Any) -> None:
        if not isinstance(built, Tensor) or built.numel() > _MOST or not built.numel():
            raise ValueError
        if not built.dtype.is_floating_point or not built.isfinite().all():
            raise ValueError
        if built.abs().max() > _LARGEST:
            raise ValueError

    # -- the whole ---------------------------------------------------------------------------------
    def text(self) -> str:
        names = ", ".join(["self", *(name for name, _ in self.inputs)])
        inputs = ", ".join(text for _, text in self.inputs)
        lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.init]
        lines += [f"    def forward({names}):", *(f"        {line}" for line in self.forward)]
        after = [f"model.{line}" for line in self._changed()]
        lines += ["model = Model()", *after, f"inputs = ({inputs},)"]
        if "input_gradient" in self.case.module_edits and self.case.start != "ids":
            lines.append("inputs[0].requires_grad_()")
        return _HEAD.format(seed=self.seed) + "\n".join([*self.defined, *lines]) + "\n"

    def _changed(self) -> list[str]:
        module_edits, parameters = self.case.module_edits, list(self.module.named_parameters())
        lines = ["eval()"] if "eval" in module_edits else []
        if "freeze_first" in module_edits and len(parameters) > 1:
            lines.append(f"{parameters[0][0].split('.')[0]}.requires_grad_(False)")
        if "no_bias_gradient" in module_edits and parameters:
            lines += [f"{n}.requires_grad_(False)" for n, _ in parameters if n.endswith(".bias")][
                :1
            ]
        return [re.sub(r"\.(\d+)\.", r"[\1].", line) for line in lines]


_FIRST = {
    "rows": "torch.randn({0})",
    "sequences": "torch.randn({0})",
    "images": "torch.randn({0})",
    "ids": "torch.randint(0, 12, {0})",
}


def build(case: Case, seed: int = 0) -> Built:
    """The module of a case. Raises Unfit where none of its steps fits."""
    with double_by_default():
        maker = _Maker(case, seed)
        maker.more_input(_FIRST[case.start].format(case.sizes))
        maker.inputs, maker.env["x"] = [("x", maker.inputs[0][1])], maker.env["in0"]
        maker.values = ["x"]
        _add_steps(maker)
        built = run_text(maker.text(), tuple(maker.used))
        return replace(built, habits=_applicable(built, case)) if case.habits else built


def _applicable(built: Built, case: Case) -> tuple[tuple[str, str], ...]:
    """The habits of a case that fit its module: with which it trains, and its values stay small."""

    def session() -> Session:
        fresh = run_text(built.text)
        return Session(fresh.model, fresh.inputs)

    def trial(lines: Sequence[str]) -> bool:
        now = session()
        try:
            for line in ("", *lines):
                now.do(line)
                leaves = [x for x in now.call() if isinstance(x, Tensor)]
                if not all(x.isfinite().all() for x in leaves if x.is_floating_point()):
                    return False
                able = [x.square().mean() for x in leaves if x.requires_grad]
                if able:
                    sum(able).backward()  # type: ignore[union-attr]
                now.update()
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, ArithmeticError):
            return False
        return all(x.numel() == 0 or x.abs().max() < _LARGEST for x in leaves)

    return tuple(lines_of(case.habits, session, trial))


def with_habits_done(built: Built) -> Built:
    """The module with all its habits done before its first step: their lines become its text's."""
    if not built.habits:
        return built
    lines = ["rank = 0", *(line for _, line in built.habits)]
    return run_text(built.text + "\n".join(lines) + "\n", built.kinds)


def again(built: Built) -> Built:
    """The same module made anew."""
    return replace(run_text(built.text, built.used), habits=built.habits)


def _add_steps(maker: _Maker) -> None:
    case = maker.case
    for number, step in enumerate(case.steps, 1):
        if (case.start == "ids") != (TABLE[step.op].kind == FROM_IDS) and maker.values == ["x"]:
            continue
        if TABLE[step.op].kind == FROM_IDS and maker.values != ["x"]:
            continue
        if maker.step(step, number, f"v{number}"):
            maker.values = [*(v for v in maker.values if case.start != "ids" or v != "x")]
            maker.values.append(f"v{number}")
    if not maker.used or not list(maker.module.parameters()):
        raise Unfit(f"no op with a parameter is left of {case}")
    loss, returned = case.ending
    if not maker.step(loss, 98, "loss") and not maker.step(Step("mean_square", 0), 98, "loss"):
        raise Unfit(f"no loss fits {case}")
    if not maker.step(returned, 99, "result"):
        raise Unfit(f"nothing to return fits {case}")
    maker.forward.append("return result")


def run_text(text: str, used: tuple[str, ...] = ()) -> Built:
    """The module and the inputs that a source text makes."""
    name = f"<fuzz {next(_numbers)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {"__name__": "fuzzed"}
    with double_by_default():  # the text sets it, for whoever runs it by hand
        exec(compile(text, name, "exec"), space)
    return Built(text, space["model"], space["inputs"], used)
