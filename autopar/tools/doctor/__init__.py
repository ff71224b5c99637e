"""The doctor: what this machine has, and whether autopar computes right on it and as fast as
planned.

`autopar doctor` describes the machine (machine.py); under torchrun it runs every check on all ranks
and leaves one JSON file and one page (examination.py). exchanges.py, kernels.py and training.py
have the checks; `examples/first_gpu_run.py` calls the same ones one by one. Here are the ranks that
checks run on, what they return, and the models that they run:

- Session: this rank's device, the process group, what several checks share.
- Finding and Result: Finding("largest error 1e-07", {"error": 1e-7}) on every rank gives an "ok"; a
  Finding whose `fault` is not empty on rank 3 alone gives a "failed" that names rank 3
  (`merge_findings`).
- The models: small ones whose sizes every layout can shard, and one that keeps a GPU busy.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import _compat, api
from autopar.ops import process_groups
from autopar.planner.request import Grid, Grid4D
from autopar.tools.decoders import Gpt, GptAttention, Sizes
from autopar.world import ranks
from autopar.world.ranks import names_of

TIMEOUT = timedelta(seconds=60)  # of one collective, for ranks that wait for an absent one


@dataclass
class Session:
    """This rank while checks run. `rank` and `ranks` are those of torchrun. `backend`: "nccl",
    "gloo", or "" for one rank alone; `note` says why it is not the one that one would expect.
    `shared` holds objects that several checks share, such as a trained model. `timeout`: of one
    collective.
    """

    device: torch.device
    rank: int
    ranks: int
    backend: str
    note: str = ""
    shared: dict[str, Any] = field(default_factory=dict)
    timeout: timedelta = TIMEOUT
    _opened: int = 0

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def world(self) -> int | None:
        """The world to plan for: None for the running ranks, or 1."""
        return None if self.ranks > 1 else 1

    @staticmethod
    def here() -> Session:
        """Return the session by torchrun's environment: on GPUs with NCCL where every rank of this
        node can have one, else on the CPU with gloo. The rank's GPU becomes torch's current one.
        """
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        number = int(os.environ.get("LOCAL_RANK", "0"))
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        usable, note = gpus >= ranks_here, ""
        if gpus and not usable:
            note = (
                f"a process sees {gpus} GPU{'s' if gpus > 1 else ''} for the {ranks_here} ranks of "
                "its node, so they run on the CPU"
            )
        elif gpus and ranks_here > 1 and not dist.is_nccl_available():
            usable, note = False, "this torch has no NCCL, so the ranks run on the CPU"
        device = torch.device("cuda", number) if usable else torch.device("cpu")
        if usable:
            torch.cuda.set_device(device)
        several = int(os.environ.get("WORLD_SIZE", "1"))
        backend = "" if several == 1 else "nccl" if usable else "gloo"
        return Session(device, int(os.environ.get("RANK", "0")), several, backend, note)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the process group of all ranks within the block. One that is open already stays as
        it is, one rank alone needs none. Collective.
        """
        if dist.is_initialized() or not self.backend:
            yield
            return
        dist.init_process_group(self.backend, timeout=self.timeout)
        try:
            yield
        finally:
            if dist.is_initialized():
                self.shared.clear()
                process_groups.disconnect()
                dist.destroy_process_group()

    def reopen(self) -> None:
        """Open the group anew after a check in which ranks left a collective at different places:
        gloo closes the connections of a rank that waits in vain. Collective. The group of NCCL
        stays: NCCL ends the process where a collective never comes.
        """
        self.shared.clear()
        if self.backend != "gloo" or ranks.backends().get("cpu") != "gloo":
            return
        self._opened += 1
        store = dist.PrefixStore(f"doctor{self._opened}", _compat.default_store())
        process_groups.disconnect()
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.ranks, timeout=self.timeout
        )


Status = Literal["ok", "failed", "not here", "under way"]
_MOST_CALLS = 12  # calls of a traceback, the innermost


class Absent(Exception):
    """Raised by a check whose object does not exist here: a kernel, a counter, other ranks."""


@dataclass(frozen=True)
class Finding:
    """The result of a check on one rank. `figure` is one short line for people, `facts` are JSON
    for readers of the report. `fault` says what is wrong, `absent` why nothing can be checked here;
    both are empty where all is well. `raised`: the fault is an exception, so other ranks may have
    been left waiting in a collective.
    """

    figure: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    absent: str = ""
    raised: bool = False

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = _plain(asdict(self))
        return values


@dataclass(frozen=True)
class Result:
    """The result of a check on all ranks. `why` says what failed or does not exist here, `seconds`
    are those of the slowest rank.
    """

    name: str
    status: Status
    figure: str = ""
    why: str = ""
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_check(work: Callable[[], Finding]) -> Finding:
    """Run a check and return its Finding; an exception that it raises becomes a Finding, too."""
    try:
        return work()
    except Absent as absent:
        return Finding(absent=str(absent))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Finding(facts={"traceback": _innermost_calls(error)}, fault=text, raised=True)


def _innermost_calls(error: BaseException) -> list[str]:
    """Return the innermost calls that an error came through, without the folders of this
    machine.
    """
    return [
        f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)[-_MOST_CALLS:]
    ]


def merge_findings(name: str, findings: Sequence[Finding], seconds: float) -> Result:
    """Return one Result of the findings of all ranks, in their order: failed where one of them
    failed. The facts are those of the first rank that failed, else of rank 0.

    >>> merge_findings("links", [Finding("9 GB/s"), Finding(fault="too late")], 0.1).why
    'rank 1: too late'
    """
    failed = [number for number, finding in enumerate(findings) if finding.fault]
    if failed:
        why = _join_texts([(number, findings[number].fault) for number in failed], len(findings))
        first = findings[failed[0]]
        return Result(name, "failed", first.figure, why, seconds, first.facts)
    absent = [(number, f.absent) for number, f in enumerate(findings) if f.absent]
    first = findings[0]
    if absent:
        why = _join_texts(absent, len(findings))
        return Result(name, "not here", "", why, seconds, findings[absent[0][0]].facts)
    return Result(name, "ok", first.figure, "", seconds, first.facts)


def _plain(value: Any) -> Any:
    """Return the value as JSON can hold it: a number that is not finite becomes text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _join_texts(texts: Sequence[tuple[int, str]], ranks: int) -> str:
    """Return the texts of all ranks as one, equal ones together; each with its ranks unless all
    ranks say the same.
    """
    by_text: dict[str, list[int]] = {}
    for number, text in texts:
        by_text.setdefault(text, []).append(number)
    if len(by_text) == 1 and len(texts) == ranks:
        return texts[0][1]
    return "; ".join(f"{names_of(numbers)}: {text}" for text, numbers in by_text.items())


Inputs = tuple[Tensor, Tensor]


class AttentionModel(nn.Module):
    """Causal attention with its projections; returns the mean square of the output, and the
    output.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = GptAttention(Sizes("gpt", 1, width, heads, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.attention(x)
        return y.square().mean(), y


class DropoutModel(nn.Module):
    """Dropout of ones, so that the output is the mask; returns its sum, and the output. The linear
    behind it gives layouts a matmul to shard; its weight is zero.
    """

    def __init__(self, features: int, p: float) -> None:
        super().__init__()
        self.p = p
        self.ones = nn.Parameter(torch.ones(features))
        self.behind = nn.Linear(features, features, bias=False)
        nn.init.zeros_(self.behind.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(x * self.ones, self.p, self.training)
        return y.sum() + self.behind(y).sum(), y


def multiple(of: int, least: int) -> int:
    """Return the least multiple of `of` that is at least `least`.

    >>> multiple(3, 8), multiple(8, 8)
    (9, 8)
    """
    return -(-least // of) * of


def small_model(session: Session) -> tuple[Gpt, Inputs]:
    """Return a GPT in float32 of two layers, the same on all ranks, with its inputs; every size is
    a multiple of the number of ranks. It is made on the CPU, as a model larger than any GPU would
    be.
    """
    ranks = session.ranks
    heads = multiple(ranks, 4)
    context, vocabulary = multiple(ranks, 16), multiple(ranks, 96)
    sizes = Sizes("gpt", 2, 8 * heads, heads, vocabulary, context)
    return _make_gpt(sizes, multiple(ranks, 8), torch.float32)


def parallel(session: Session, layout: str | Grid) -> Any:
    """Return the small model under a layout on the running ranks; it is made once for all checks.
    Collective.
    """
    name = f"small {layout}"
    if name not in session.shared:
        model, inputs = small_model(session)
        session.shared[name] = api.parallelize(
            model, session.world, inputs, layout=layout, device=session.device
        )
    return session.shared[name]


def grid_4d(count: int) -> Grid4D:
    """Return a Grid4D of so many ranks over all four axes, as far as their prime factors go.

    >>> grid_4d(4), grid_4d(24)
    (Grid4D(x=2, y=2, z=1, data=1), Grid4D(x=3, y=2, z=2, data=2))
    """
    sizes = [1, 1, 1, 1]
    for place, factor in enumerate(_prime_factors(count)):
        sizes[place % 4] *= factor
    return Grid4D(*sizes)


def _prime_factors(count: int) -> list[int]:
    """Return the prime factors, the largest first."""
    factors = []
    for factor in range(2, math.isqrt(count) + 1):
        while count % factor == 0:
            factors.append(factor)
            count //= factor
    return sorted([*factors, *([count] if count > 1 else [])], reverse=True)


def timed_model(session: Session) -> tuple[Gpt, Inputs]:
    """Return the GPT whose step is timed, with its inputs: on a GPU one of 0.12 billion parameters
    in bfloat16 that leaves it little time to idle, on a CPU one whose step takes a few tenths of a
    second.
    """
    ranks = session.ranks
    if session.cuda:
        sizes = Sizes("gpt", 8, 64 * multiple(ranks, 16), multiple(ranks, 16), 8192, 1024)
        return _make_gpt(sizes, 4 * ranks, torch.bfloat16)
    heads = multiple(ranks, 4)
    sizes = Sizes("gpt", 2, 32 * heads, heads, multiple(ranks, 512), 64)
    return _make_gpt(sizes, multiple(ranks, 16), torch.float32)


def _make_gpt(sizes: Sizes, batch: int, dtype: torch.dtype) -> tuple[Gpt, Inputs]:
    torch.manual_seed(0)
    model = Gpt(sizes).to(dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (batch, sizes.context)
    tokens = torch.randint(0, sizes.vocabulary, shape, generator=generator)
    return model, (tokens, tokens.roll(-1, 1))
