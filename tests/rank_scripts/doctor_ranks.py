"""The doctor's checks on gloo ranks, some of them broken: started by test_doctor.py."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ops import comm
from autopar.runtime.training import step_graph
from autopar.tools.doctor import Finding, Session, exchanges, kernels
from autopar.tools.doctor.examination import Examination

OUT = Path(sys.argv[1])


def on_rank_1(call: Callable[..., Tensor], broken: Callable[[Tensor], Tensor]) -> Any:
    """The same function; what it gives on rank 1 is another."""

    def changed(*args: Any, **kwargs: Any) -> Tensor:
        result = call(*args, **kwargs)
        return broken(result) if dist.get_rank() == 1 else result

    return changed


def with_broken(name: str, broken: Callable[[Tensor], Tensor], kind: str, session: Session) -> Any:
    """The check of a kind while one function of the wire is wrong on rank 1."""
    right = getattr(comm, name)
    setattr(comm, name, on_rank_1(right, broken))
    try:
        return exchanges.alone(session, kind)
    finally:
        setattr(comm, name, right)


def with_seed(following: Callable[[int], int], session: Session) -> Finding:
    """The check of dropout while the seed of a step is made of the one before in this way."""
    right = step_graph.next_seed
    step_graph.next_seed = following
    try:
        return kernels.dropout(session)
    finally:
        step_graph.next_seed = right


def leaves(session: Session) -> Finding:
    """Rank 1 fails before the collective that rank 0 waits in."""
    if session.rank == 1:
        raise RuntimeError("left early")
    dist.all_reduce(torch.ones(1))
    return Finding("summed")


def main() -> int:
    torch.set_num_threads(1)
    session = dataclasses.replace(Session.here(), timeout=timedelta(seconds=3))
    examination = Examination(OUT, session)
    check = examination.check
    check("before", lambda session: Finding(str(dist.is_initialized())))
    with examination.ranks():
        check("leaves", leaves)
        check("versions", exchanges.versions)
        check("devices", exchanges.devices_of_ranks)
        check("links", exchanges.links)
        for kind in exchanges.KINDS:
            check(f"{kind} alone", partial(exchanges.alone, kind=kind))
        for kind in exchanges.FUSED_KINDS:
            check(f"{kind} joined", partial(exchanges.in_bucket, kind=kind))
        turned = partial(torch.flip, dims=(0,))
        check("one more", partial(with_broken, "all_reduce", lambda x: x + 1, "all_reduce"))
        check("dropout", kernels.dropout)
        check("one seed", partial(with_seed, lambda seed: seed))
        check("two seeds", partial(with_seed, lambda seed: seed + 1 + dist.get_rank()))
        check("turned", partial(with_broken, "all_gather", turned, "all_gather"))
    status = examination.close()
    if os.environ["RANK"] == "0":
        (OUT / "status.json").write_text(json.dumps(status))
    return 0


if __name__ == "__main__":
    sys.exit(main())
