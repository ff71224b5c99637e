"""Every private torch API that autopar touches, in one folder; tests/test_compat.py calls each.

running.py has what tracing and running need, compiling.py what compiles derived graphs.
"""

from torch._C import DisableTorchFunction as without_torch_functions
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from autopar._compat.compiling import (
    compile_in_order,
    compiled_for,
    constant_result,
    derive,
    dynamo_sources,
    inductor_decompositions,
    named_backend,
    not_compiled,
    partition,
    takes_a_list,
)
from autopar._compat.running import (
    apply_function,
    autograd_step,
    backend_name,
    checkpoints_inlined,
    default_store,
    exporting,
    fake_mode,
    forget_groups,
    from_part,
    functions_applied,
    in_backward,
    local_of,
    masks_as_given,
    next_autograd_step,
    placing_of,
    process_group,
    recording_again,
    register_process_group,
    register_work,
    safe_gathers,
    set_timeout,
    strict_fake_mode,
    taken_apart,
    timeout_of,
    unregister_process_group,
    version_of,
)

__all__ = [
    "BackwardHookFunction",
    "BoxedCodeGen",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "apply_function",
    "autograd_step",
    "backend_name",
    "below_autograd",
    "checkpoints_inlined",
    "compile_in_order",
    "compiled_for",
    "constant_result",
    "default_store",
    "derive",
    "dynamo_sources",
    "exporting",
    "fake_mode",
    "forget_groups",
    "from_part",
    "functions_applied",
    "in_backward",
    "inductor_decompositions",
    "local_of",
    "masks_as_given",
    "named_backend",
    "next_autograd_step",
    "not_compiled",
    "partition",
    "placing_of",
    "process_group",
    "pytree",
    "recording_again",
    "register_process_group",
    "register_work",
    "safe_gathers",
    "set_timeout",
    "strict_fake_mode",
    "taken_apart",
    "takes_a_list",
    "timeout_of",
    "unregister_process_group",
    "version_of",
    "without_modes",
    "without_torch_functions",
]
