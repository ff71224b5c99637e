"""Collectives with the contract of NCCL on a stream, by way of gloo: a result is garbage until
`wait_tensor`, an operand is read when the collective is issued ("early") or not before it is waited
for ("late"), and what one group has been given is done in that order. `as_nccl` has graphs written
as for NCCL: reduce-scatters as such, and the coalesced forms.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _compat
from autopar.passes.overlap import bucket

When = Literal["early", "late"]


class _Issued(NamedTuple):
    results: list[Tensor]
    work: Callable[[], list[Tensor]]
    done: list[Tensor] | None  # where it was done at once


class Streams:
    """Every group's queue of what was issued and is not waited for yet."""

    def __init__(self, when: When) -> None:
        self.when = when
        self.queues: dict[str, list[_Issued]] = defaultdict(list)
        self.issued: Counter[str] = Counter()
        self.forgotten = 0  # 1 of so many waits is left out, to see that it is missed; 0: none
        self.waits = 0
        self.library: Any = None

    # -- the contract ------------------------------------------------------------------------------
    def issue(
        self, kind: str, group: str, results: list[Tensor], work: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        self.issued[kind] += 1
        done = work() if self.when == "early" else None
        for result in results:
            _spoil(result)
        self.queues[group].append(_Issued(results, work, done))
        return results

    def wait(self, x: Tensor) -> Tensor:
        self.waits += 1
        if self.forgotten and self.waits % self.forgotten == 0:
            return x
        for queue in self.queues.values():
            waited = [i for i, call in enumerate(queue) if any(_meet(r, x) for r in call.results)]
            if waited:
                for call in queue[: waited[-1] + 1]:
                    done = call.work() if call.done is None else call.done
                    for result, value in zip(call.results, done, strict=True):
                        result.copy_(value)
                del queue[: waited[-1] + 1]
                return x
        return x  # it came with another, which was issued behind it

    # -- the collectives ---------------------------------------------------------------------------
    def all_reduce(self, x: Tensor, op: str, group: str) -> Tensor:
        return self.all_reduce_coalesced([x], op, group)[0]

    def all_reduce_(self, x: Tensor, op: str, group: str) -> Tensor:
        return self.all_reduce_coalesced_([x], op, group)[0]

    def all_reduce_coalesced(self, xs: Sequence[Tensor], op: str, group: str) -> list[Tensor]:
        copies = [x.clone(memory_format=torch.contiguous_format) for x in xs]  # as torch's own
        return self.all_reduce_coalesced_(copies, op, group)

    def all_reduce_coalesced_(self, xs: Sequence[Tensor], op: str, group: str) -> list[Tensor]:
        assert all(x.is_contiguous() for x in xs)
        clones = [x.clone() for x in xs]  # operand and result are one
        return self.issue(
            _name("all_reduce", xs),
            group,
            list(xs),
            lambda: [_summed(x, op, group) for x in clones],
        )

    def all_gather_into_tensor(self, x: Tensor, ranks: int, group: str) -> Tensor:
        return self.all_gather_into_tensor_coalesced([x], ranks, group)[0]

    def all_gather_into_tensor_coalesced(
        self, xs: Sequence[Tensor], ranks: int, group: str
    ) -> list[Tensor]:
        assert all(x.is_contiguous() for x in xs)
        results = [x.new_empty((ranks * (x.shape[0] if x.dim() else 1), *x.shape[1:])) for x in xs]
        return self.issue(
            _name("all_gather", xs),
            group,
            results,
            lambda: [_gathered(x, ranks, group) for x in xs],
        )

    def reduce_scatter_tensor(self, x: Tensor, op: str, ranks: int, group: str) -> Tensor:
        return self.reduce_scatter_tensor_coalesced([x], op, ranks, group)[0]

    def reduce_scatter_tensor_coalesced(
        self, xs: Sequence[Tensor], op: str, ranks: int, group: str
    ) -> list[Tensor]:
        assert all(x.is_contiguous() for x in xs)
        results = [x.new_empty((x.shape[0] // ranks, *x.shape[1:])) for x in xs]
        own = dist.get_rank(_compat.process_group(group))
        return self.issue(
            _name("reduce_scatter", xs),
            group,
            results,
            lambda: [_summed(x.clone(), op, group).chunk(ranks)[own] for x in xs],
        )

    def all_to_all_single(
        self, x: Tensor, takes: Sequence[int], gives: Sequence[int], group: str
    ) -> Tensor:
        assert x.is_contiguous()
        result = x.new_empty((sum(takes), *x.shape[1:]))

        def work() -> list[Tensor]:
            received = torch.empty_like(result)
            dist.all_to_all_single(received, x, takes, gives, group=_compat.process_group(group))
            return [received]

        return self.issue("all_to_all", group, [result], work)[0]

    def broadcast(self, x: Tensor, source: int, group: str) -> Tensor:
        copy = x.clone()

        def work() -> list[Tensor]:
            dist.broadcast(copy, group_src=source, group=_compat.process_group(group))
            return [copy]

        return self.issue("broadcast", group, [torch.empty_like(x)], work)[0]

    def install(self) -> None:
        """In the place of torch's functional collectives, on the CPU."""
        self.library = torch.library.Library("_c10d_functional", "IMPL")
        names = (
            "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_",
            "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
            "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast",
        )  # fmt: skip
        for name in names:
            self.library.impl(name, getattr(self, name), "CPU", allow_override=True)
        self.library.impl("wait_tensor", self.wait, "CPU", allow_override=True)


def as_nccl() -> None:
    """Graphs are written as for NCCL, though their tensors are on the CPU."""
    _compat.backend_name = lambda name, device_type: "nccl"
    _compat.register_work = lambda x, work: work.wait()
    bucket.on_cpu = lambda node: False


def _name(kind: str, xs: Sequence[Tensor]) -> str:
    return kind if len(xs) == 1 else f"{kind} of several"


def _spoil(x: Tensor) -> None:
    x.fill_(math.nan if x.is_floating_point() else 113)


def _meet(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common, by the memory that they span."""
    if first.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    spans = []
    for x in (first, other):
        reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
        start = x.storage_offset() * x.element_size()
        spans.append((start, start + (reach * x.element_size() if x.numel() else 0)))
    (a, b), (c, d) = spans
    return a < d and c < b


def _summed(x: Tensor, op: str, group: str) -> Tensor:
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op.upper()), group=_compat.process_group(group))
    return x


def _gathered(x: Tensor, ranks: int, group: str) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x, group=_compat.process_group(group))
    return torch.cat([part.reshape(-1, *x.shape[1:]) for part in parts])
