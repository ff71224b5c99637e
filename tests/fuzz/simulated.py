"""A case under `autopar.verify`, and its parallel program on simulated ranks against the module.

`verify` holds the program against autopar's own graph of the module; the second comparison holds
the same program, run rank by rank in one process, against the module itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import autopar
from autopar import api, errors
from autopar.ir.padding import Pad, cut_unpadded, filled_up
from autopar.ir.program import Input, Program
from autopar.ops.collectives import groups_of
from autopar.ops.sharded import draws
from autopar.passes.pass_manager import PassManager
from autopar.planner import planner, tracing
from autopar.planner.plan_context import fingerprint
from autopar.runtime import lockstep
from autopar.runtime.reference import double_by_default, to_float64
from autopar.world import World
from plans import random_plan

from .case import Case
from .habits import MOMENTUM, RATE
from .reference import STEPS, Trained, agrees, cotangents, differences, sharded_dropout
from .source import Built, Unfit, build, run_text, with_habits_done

_PLAN = re.compile(r"random_plan\('([^']+)', (\d+)\)")
TOLERANCE, LOOSE = 1e-7, 2e-2
FAILURES = ("wrong", "error", "hang", "false alarm")


@dataclasses.dataclass(frozen=True)
class Result:
    """How a case went. `kind`: ok, refused, unfit, or one of FAILURES; `said`: why; `used`: the op
    kinds that were in it.
    """

    kind: str
    said: str = ""
    used: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES

    @property
    def headline(self) -> str:
        """What two failures of one cause have in common, by and large."""
        words = re.sub(r"[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?", "#", self.said.split("\n")[0])
        return f"{self.kind}: {words}"[:110]


def run(case: Case, seed: int = 0) -> Result:
    """Plan, verify and simulate one case."""
    try:
        built = build(case, seed)
    except Unfit as unfit:
        return Result("unfit", str(unfit))
    return run_built(with_habits_done(built), case.layout, case.ranks)


def run_built(built: Built, layout: str, ranks: int) -> Result:
    with double_by_default():
        return _compare_simulated(built, layout, ranks)


def _compare_simulated(built: Built, layout: str, ranks: int) -> Result:
    """Against autopar's own graph by verify, and against the module."""
    programs: list[Program] = []
    try:
        kind, said = _verified(built, layout, ranks, programs)
        if programs and kind in ("ok", "false alarm"):
            differs = _simulated(programs[0], built, said)
            if differs:
                kind, said = "wrong", f"{'verify passes; ' if kind == 'ok' else ''}{differs}"
    except Unfit as unfit:
        kind, said = "unfit", str(unfit)
    except Exception as error:
        kind, said = "error", described(error)
    return Result(kind, said, built.kinds)


def described(error: BaseException) -> str:
    """An error in one line, and then where it was raised."""
    lines = [f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " "), ""]
    frames = traceback.extract_tb(error.__traceback__)
    at = [f"{f.filename.split('site-packages/')[-1]}:{f.lineno} {f.name}" for f in frames[-4:]]
    return "\n".join([*lines, *at])


def refused(error: Exception) -> bool:
    """By name, for what was given: not one of those that say that autopar itself is wrong."""
    return isinstance(error, errors.AutoparError) and not isinstance(
        error, errors.VerificationError | errors.RankError
    )


def _verified(built: Built, layout: str, ranks: int, programs: list[Program]) -> tuple[str, str]:
    """Calls `verify`; the program that it holds against its own graph is put into `programs`."""
    try:
        parsed, world = read_layout(layout, built, ranks)
        with _caught_program(programs):
            autopar.verify(built.model, world, built.inputs, parsed)
    except errors.VerificationError as error:
        return "false alarm", described(error)
    except errors.AutoparError as error:
        if not refused(error):
            raise
        return "refused", f"{type(error).__name__}: {error}"
    return "ok", ""


@contextlib.contextmanager
def _caught_program(programs: list[Program]) -> Iterator[None]:
    compare = api.compare

    def spy(program: Program, *rest: Any) -> Any:
        programs.append(program)
        return compare(program, *rest)

    with mock.patch.object(api, "compare", spy):
        yield


def read_layout(text: str, built: Built, ranks: int) -> tuple[Any, World | None]:
    """What `verify` and `parallelize` take: a layout and a world, or a random plan."""
    drawn = _PLAN.fullmatch(text)
    if not drawn:
        return eval(text, {"autopar": autopar}), World.of(ranks)
    source = tracing.trace_model(built.model, built.inputs)
    program = planner.analyse(PassManager(), to_float64(source))
    plan = random_plan(program, drawn[1], World.of(ranks), int(drawn[2]))
    return dataclasses.replace(plan, fingerprint=fingerprint(source)), None


# -- simulated ranks -------------------------------------------------------------------------------
def _simulated(program: Program, built: Built, alarm: str = "") -> str:
    """What differs between the program on its ranks and the module; "" where nothing does.
    `alarm`: what verify said of it.
    """
    assert program.plan is not None
    mesh, masks = program.plan.mesh, [[] for _ in range(STEPS)]
    fresh = run_text(built.text, built.used)
    with _seen_seeds(masks):
        ranks = lockstep.run(
            mesh,
            lambda rank: _Rank(program, mesh.coordinate(rank), fresh).train(masks),
            groups_of(program.module),
        )
    tolerance = LOOSE if built.loose else TOLERANCE

    def differ(expected: Trained) -> str:
        for rank, record in enumerate(ranks):
            cut = _Cut(program, mesh.coordinate(rank), built, expected)
            said = differences(record, expected, tolerance, cut)
            if said:
                return f"on rank {rank} of mesh {mesh}, {said}"
        return ""

    text = functools.partial(run_text, built.text, built.used)
    return agrees(differ, text, masks, tolerance, alarm)


@contextlib.contextmanager
def _seen_seeds(masks: list[list[int]]) -> Iterator[None]:
    """Enters the seeds of random numbers, as they are drawn, into the list that is the last not
    empty.
    """
    plain = sharded_dropout.keys_of

    def spy(seed: Tensor) -> tuple[Tensor, Tensor]:
        number = int(seed)
        step = (number & 0xFFFFFFFF) // 1_000_000 - 1  # the upper word is the node's
        if number not in masks[step]:
            masks[step].append(number)
        return plain(seed)

    with (
        mock.patch.object(sharded_dropout, "keys_of", spy),
        mock.patch.object(draws, "keys_of", spy),
    ):
        yield


class _Rank:
    """One rank of the program: its parts of the module's own tensors, and two steps of SGD."""

    def __init__(self, program: Program, coordinate: dict[str, int], built: Built) -> None:
        self.program, self.coordinate, self.built = program, coordinate, built
        model = built.model
        self.unsharded = {**dict(model.named_parameters(remove_duplicate=False)),
                      **dict(model.named_buffers(remove_duplicate=False))}  # fmt: skip
        self.tensors = {e.node: self._hold(e) for e in program.signature.inputs if e.stored}
        self.inputs: dict[int, Tensor] = {}

    def _hold(self, entry: Input) -> Tensor:
        if entry.kind == "coordinate":
            return torch.tensor([self.coordinate[entry.target]])
        if entry.kind == "constant":
            return self.program.tensors[entry.target].clone()
        tensor = self.unsharded[entry.target].detach()
        if entry.kind != "parameter":
            return tensor.clone()
        layout, pads = self.program.layouts[entry.node], self.program.pads(entry.node)
        own = cut_unpadded(layout, tensor, pads, self.coordinate).clone()
        return own.requires_grad_(entry.trainable)

    def _feed(self, entry: Input, step: int) -> Any:
        if entry.kind == "seed":
            return torch.tensor((step + 1) * 1_000_000)
        if entry.kind == "parameter":  # its padding is no part of what a rank holds
            return filled_up(self.tensors[entry.node], self.program.layouts[entry.node].local_shape)
        if entry.kind != "user":
            return self.tensors[entry.node]
        assert entry.position is not None
        source = self.built.inputs[entry.position]
        if entry.position not in self.inputs:
            own = self.program.layouts[entry.node].cut(source.detach(), self.coordinate).clone()
            self.inputs[entry.position] = own.requires_grad_(source.requires_grad)
        return self.inputs[entry.position]

    def train(self, masks: list[list[int]]) -> Trained:
        record, entries = Trained(), self.program.signature.inputs
        named = {e.target: self.tensors[e.node] for e in entries if e.kind == "parameter"}
        trainable = [p for p in named.values() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, RATE, MOMENTUM) if trainable else None
        for step in range(STEPS):
            leaves = self._step(step, record)
            record.outputs += [x.detach() if isinstance(x, Tensor) else x for x in leaves]
            if step == 0:
                grads = {n: p.grad for n, p in named.items() if p.requires_grad}
                inputs = {i: x.grad for i, x in self.inputs.items() if x.requires_grad}
                grads |= {f"inputs[{i}]": g for i, g in inputs.items()}
                record.gradients = {n: None if g is None else g.clone() for n, g in grads.items()}
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()
        record.parameters = {n: p.detach() for n, p in named.items()}
        record.buffers = {e.target: self.tensors[e.node] for e in entries if e.kind == "buffer"}
        return record

    def _step(self, step: int, actual: Trained) -> list[Any]:
        """Forward and backward; what the module would return."""
        signature = self.program.signature
        buffers = {e.target: e.node for e in signature.inputs if e.kind == "buffer"}
        fed = [self._feed(e, step) for e in signature.inputs]
        fed = [x.clone() if e.kind == "buffer" else x for e, x in zip(signature.inputs, fed)]
        results = iter(self.program.module(*fed))
        leaves, nodes = [], []
        for output in signature.outputs:
            value = output.constant if output.node is None else next(results)
            if output.kind == "mutation":
                self.tensors[buffers[output.target]] = value.detach().clone()
                continue
            leaves.append(value)
            nodes.append(output.node)
        self._backward(leaves, nodes)
        return leaves

    def _backward(self, leaves: list[Any], nodes: list[str | None]) -> None:
        unsharded = [
            _Unsharded.like(x, n and self.program.layouts.get(n)) for x, n in zip(leaves, nodes)
        ]
        pairs = []
        for leaf, node, cotangent in zip(leaves, nodes, cotangents(unsharded)):
            if cotangent is not None and node is not None:
                layout = self.program.layouts[node]
                pairs.append((leaf, layout.cut(cotangent, self.coordinate)))
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


class _Unsharded:
    """The whole shape of a value of which a rank has a part."""

    @staticmethod
    def like(value: Any, layout: Any) -> Any:
        if not isinstance(value, Tensor) or layout is None:
            return value
        unsharded = torch.empty(layout.shape, dtype=value.dtype)
        return unsharded.requires_grad_() if value.requires_grad else unsharded


class _Cut:
    """The part of a whole value that a rank should have, by the name that `differences` uses."""

    def __init__(
        self, program: Program, coordinate: dict[str, int], built: Built, expected: Trained
    ) -> None:
        signature, self.coordinate = program.signature, coordinate
        self.pads: dict[str, tuple[Pad, ...]] = {}
        outputs = [o.node for o in signature.outputs if o.kind == "user"]
        self.layouts = {
            f"outputs[{i + step * len(outputs)}]": program.layouts[node]
            for step in range(STEPS)
            for i, node in enumerate(outputs)
            if node is not None
        }
        for entry in signature.inputs:
            if entry.kind == "parameter":
                for what in ("gradients", "parameters"):
                    self.layouts[f"{what}[{entry.target!r}]"] = program.layouts[entry.node]
                    self.pads[f"{what}[{entry.target!r}]"] = program.pads(entry.node)
            if entry.kind == "user":
                name = f"gradients['inputs[{entry.position}]']"
                self.layouts[name] = program.layouts[entry.node]

    def __call__(self, name: str, unsharded: Any) -> Any:
        layout = self.layouts.get(name)
        if layout is None or not isinstance(unsharded, Tensor):
            return unsharded
        return cut_unpadded(layout, unsharded, self.pads.get(name, ()), self.coordinate)
