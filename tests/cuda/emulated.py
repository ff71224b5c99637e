"""A rank on a CUDA device that is not there: fake tensors are on cuda:0 to cuda:7 of a CPU build,
collectives go to torch's "fake" backend, and a mix of devices raises as on a GPU.

    python tests/cuda/emulated.py GUARD.SO RANK TASK...

It must be the first that loads torch. Prints {task: facts} as its last line; the tasks are in
tasks.py. Attention runs in torch's plain form here, as no CUDA kernel is there to be chosen.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

DEVICES = 8
NAME = "NVIDIA H100 80GB HBM3"


def load(guard: str) -> None:
    """Registers the devices with torch's core, before Python's side of torch looks for any."""
    assert "torch" not in sys.modules
    torch_package = importlib.util.find_spec("torch")
    assert torch_package is not None and torch_package.origin is not None
    libraries = Path(torch_package.origin).parent / "lib"
    for pattern in ("libgomp*", "libc10.so", "libtorch_cpu.so"):
        for library in sorted(libraries.glob(pattern)):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(guard)


def patch() -> None:
    """What torch.cuda would ask the driver."""
    import torch
    import torch.cuda.random

    def properties(device: Any = None) -> Any:
        facts = {"total_memory": 80 << 30, "major": 9, "minor": 0}
        return types.SimpleNamespace(name=NAME, uuid=f"GPU-{device}", **facts)

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        torch._C._accelerator_setDeviceIndex(index)

    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": torch._C._accelerator_getDeviceIndex,
        "set_device": set_device,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: NAME,
        "can_device_access_peer": lambda first, other: True,
        "get_rng_state": lambda *_: state.clone(),
        "set_rng_state": lambda *_: None,
        "manual_seed_all": lambda seed: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, answer)
    torch.accelerator.device_count = lambda: DEVICES


def open_group(rank: int) -> None:
    """A group that moves nothing, and sends from CUDA alone, as NCCL's does."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from autopar import api
    from autopar.ops import process_groups

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(DEVICES))
    dist.init_process_group("cuda:fake", rank=rank, world_size=DEVICES, store=FakeStore())

    def outside_of_fakes(work: Any) -> Any:
        def done(*arguments: Any) -> Any:
            with unset_fake_temporarily():
                return work(*arguments)

        return done

    # a mesh reads the numbers of its ranks, and a trace makes fakes of its own
    process_groups._connection = outside_of_fakes(process_groups._connection)
    api.plan_on_rank_0 = outside_of_fakes(api.plan_on_rank_0)


def main() -> None:
    guard, rank, *names = sys.argv[1:]
    load(guard)
    patch()
    open_group(int(rank))
    import tasks

    print(json.dumps({name: tasks.run(name, int(rank)) for name in names}), flush=True)
    os._exit(0)  # autograd's threads for devices that are not there may outlive the interpreter


if __name__ == "__main__":
    main()
