"""Every private torch API that autopar touches, in one place; tests/test_compat.py calls each."""

from __future__ import annotations

import copy

import torch.distributed
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BoxedCodeGen",
    "FakeTensorMode",
    "OpOverload",
    "StridedShard",
    "TorchDispatchMode",
    "aot_module_simplified",
    "autograd_step",
    "backend_name",
    "below_autograd",
    "default_partition",
    "fake_mode",
    "forget_groups",
    "from_part",
    "local_of",
    "next_autograd_step",
    "placing_of",
    "process_group",
    "pytree",
    "register_process_group",
    "register_work",
    "unregister_process_group",
]


def register_process_group(name: str, group: torch.distributed.ProcessGroup) -> None:
    """Lets functional collectives find `group` by a name of our choice, the same on every rank."""
    torch._C._distributed_c10d._register_process_group(GroupName(name), group)


def unregister_process_group(name: str) -> None:
    """Frees a name; one that is not registered (any more) is no error."""
    torch._C._distributed_c10d._unregister_process_group(GroupName(name))


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """The group that is registered as `name`. Raises RuntimeError where none is."""
    return torch._C._distributed_c10d._resolve_process_group(GroupName(name))


def register_work(x: torch.Tensor, work: torch.distributed.Work) -> None:
    """Lets `_c10d_functional.wait_tensor(x)` wait for `work`, which x is kept alive for."""
    torch._C._distributed_c10d._register_work(x, work)


def forget_groups(device_mesh: torch.distributed.DeviceMesh) -> None:
    """Lets go of a mesh's process groups: DTensors hold their mesh for as long as they live, and so
    the groups' threads. The mesh can communicate no more.
    """
    getattr(device_mesh, "_pg_registry", {}).clear()


def backend_name(name: str, device_type: str) -> str:
    """The backend, such as "gloo", of the group that is registered as `name`; "" where none is."""
    try:
        return process_group(name)._get_backend(torch.device(device_type)).name()
    except RuntimeError:
        return ""


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have a shape, a dtype and a device, but no storage; `item()` gives a
    symbol.
    """
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def next_autograd_step() -> int:
    """The number that the next function gets that autograd records."""
    return int(torch._C._autograd._get_sequence_nr())


def autograd_step() -> int:
    """The number of the function whose backward runs; -1 outside of a backward."""
    running = torch._C._current_autograd_node()
    return -1 if running is None else int(running._sequence_nr())


def local_of(x: DTensor) -> torch.Tensor:
    """The rank's own part, the tensor itself, without an autograd function."""
    return x._local_tensor


def placing_of(x: DTensor) -> DTensorSpec:
    """Where the parts of x lie: what `from_part` makes others like it of."""
    return x._spec


def from_part(part: torch.Tensor, placing: DTensorSpec) -> DTensor:
    """A DTensor that lies so, with this own part; without an autograd function."""
    return DTensor(part, copy.copy(placing), requires_grad=False)
