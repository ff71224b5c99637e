"""Every private torch API that autopar touches, in one folder; tests/test_compat.py calls each.

This file has what tracing and running need: process groups, modes, autograd's steps, parts of
DTensors. compiling.py has what compiles derived graphs, and imports that where it is used.
torch_versions.py refuses a torch that is not proven, before a private name of it is missing.
"""

from __future__ import annotations

from autopar._compat import torch_versions

# isort: split
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from operator import attrgetter
from typing import Any

import torch.distributed
import torch.utils.checkpoint as _checkpointing
from torch._C import DisableTorchFunction as without_torch_functions
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.experimental import register_sharding
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.nn.modules import transformer
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules.adaptive import _ASMoutput as AdaptiveOutput
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
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
from autopar._compat.pipelining import pipeline_actions


def register_process_group(name: str, group: torch.distributed.ProcessGroup) -> None:
    """Lets functional collectives find `group` by a name of our choice, the same on every rank."""
    torch._C._distributed_c10d._register_process_group(GroupName(name), group)


def unregister_process_group(name: str) -> None:
    """Frees a name; one that is not registered (any more) is no error."""
    torch._C._distributed_c10d._unregister_process_group(GroupName(name))


def process_group(name: str) -> torch.distributed.ProcessGroup:
    """The group that is registered as `name`. Raises RuntimeError where none is."""
    return torch._C._distributed_c10d._resolve_process_group(GroupName(name))


def default_store() -> Any:
    """The store over which the default process group was set up."""
    return torch.distributed.distributed_c10d._get_default_store()


def timeout_of(group: torch.distributed.ProcessGroup) -> timedelta | None:
    """How long a collective of this group may take, as the user said when it was made; None where
    its backend knows no limit.
    """
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta | None = getattr(backend.options, "_timeout", None)
    return timeout


def set_timeout(group: torch.distributed.ProcessGroup, timeout: timedelta | None) -> None:
    """How long a collective of this group may take from now on; None changes nothing."""
    if timeout is not None:
        torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def register_work(x: torch.Tensor, work: torch.distributed.Work) -> None:
    """Lets `_c10d_functional.wait_tensor(x)` wait for `work`, which x is kept alive for."""
    torch._C._distributed_c10d._register_work(x, work)


def forget_groups(device_mesh: torch.distributed.DeviceMesh) -> None:
    """Lets go of a mesh's process groups: DTensors hold their mesh for as long as they live, and so
    the groups' threads. The mesh can communicate no more.
    """
    getattr(device_mesh, "_pg_registry", {}).clear()


def forget_default_groups() -> None:
    """Lets go of the process group that functions of torch.distributed.nn have as a default: where
    that module is imported after the group was opened, as dynamo does, they would hold it, and so
    its threads, until Python ends. None stands for the running group as well.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in list(vars(module).values()) if module is not None else ():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, torch.distributed.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(
                None if isinstance(value, torch.distributed.ProcessGroup) else value
                for value in defaults
            )


def backend_name(name: str, device_type: str) -> str:
    """The backend, such as "gloo", of the group that is registered as `name`; "" where none is."""
    try:
        return process_group(name)._get_backend(torch.device(device_type)).name()
    except RuntimeError:
        return ""


@cache
def safe_gathers() -> torch.library.Library:
    """Sends `all_gather_into_tensor` of tensors on a CPU another way on gloo.

    A group has two threads there (torch 2.11 to 2.13), and each writes the name of the collective
    that it has run into a string that both share, without a lock. A name of up to 15 letters lies
    in the string itself; "ALLGATHER_COALESCED", which that op is called too, on the heap, where two
    threads that are done at once free one memory twice: a rank dies in `malloc`, sooner or later.
    The form that is given its result is called "ALLGATHER", and does the same, but for complex
    numbers, which gloo does not know there: they go as pairs of real ones.
    """
    kernels = torch.library.Library("_c10d_functional", "IMPL")  # which forgets them with itself
    kernels.impl("all_gather_into_tensor", _gathered, "CPU")
    return kernels


def _gathered(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    if x.is_complex():
        pairs = torch.view_as_real(x.resolve_conj())
        return torch.view_as_complex(_gathered(pairs, group_size, group_name))
    out = x.new_empty((group_size * x.shape[0], *x.shape[1:]))
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    gathered: torch.Tensor = gather(x.contiguous(), group_size, group_name, out=out)
    return gathered


@cache
def nan_checks() -> None:
    """Lets `torch.autograd.detect_anomaly` look for nan in the gradients of DTensors, by an op that
    DTensor does not know: a rank looks into its own part.
    """

    @register_sharding(torch.ops.aten._is_any_true.default)
    def _(flags: Any) -> list[tuple[list[Any], list[Any]]]:
        sharded = [([Partial("max")], [Shard(dim)]) for dim in range(len(flags.shape))]
        return [([Replicate()], [Replicate()]), *sharded]


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have a shape, a dtype and a device, but no storage; `item()` gives a
    symbol.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """What `function.apply` does, also while `functions_applied` has it do something else."""
    return super(_SingleLevelFunction, function).apply(*args)  # type: ignore[misc]


def modes_on() -> bool:
    """Whether a mode for torch functions or for dispatch is on, as `with torch.device(…)` sets."""
    return bool(_get_current_function_mode_stack() or _get_current_dispatch_mode_stack())


@contextmanager
def functions_applied(apply: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Custom autograd functions call `apply(function, *args)`, by whichever name: an `apply` that
    was kept (`quantise = Quantise.apply`) too. Gives what they call without this context.
    """
    before = vars(_SingleLevelFunction).get("apply")  # of a context around this one
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield apply_function if before is None else before.__func__
    finally:
        if before is None:
            del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        else:
            _SingleLevelFunction.apply = before  # type: ignore[attr-defined]


@contextmanager
def checkpoints_inlined() -> Iterator[None]:
    """What is checkpointed by saved tensors' hooks (use_reentrant=False) is just run."""

    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    before = _checkpointing._checkpoint_without_reentrant_generator
    _checkpointing._checkpoint_without_reentrant_generator = nothing
    try:
        yield
    finally:
        _checkpointing._checkpoint_without_reentrant_generator = before


def strict_fake_mode() -> FakeTensorMode:
    """A mode in which an op without an implementation for fake tensors fails, where torch would run
    its kernel on zeros to see what comes out; so does asking for a value.
    """
    return FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)


@contextmanager
def exporting() -> Iterator[None]:
    """Code that asks `torch.compiler.is_exporting()` or `is_compiling()` is told that it is so."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = [getattr(torch.compiler, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(torch.compiler, flag, value)


def graphs_not_written_out() -> AbstractContextManager[None]:
    """Modules of graphs that torch traces write their graph out as Python when they are called, not
    whenever it changes: `torch.export` changes it a dozen times, and calls it never.
    """
    return _use_lazy_graph_module(True)


def exported_with(
    program: torch.export.ExportedProgram, graph: torch.fx.Graph, constants: dict[str, Any]
) -> torch.export.ExportedProgram:
    """The exported program with another graph, which has placeholders and results of the same
    names, and with these constants.
    """
    module = LazyGraphModule(program.graph_module, graph)
    return program._update(module, program.graph_signature, constants=constants)


def taken_apart(op: OpOverload) -> Callable[..., Any]:
    """A composite op as the ops that it is made of, in C++, whatever was registered for it in
    Python: `op.decompose` would call a table's entry, which this is, again.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return call


def name_of_calls(graph: torch.fx.Graph, function: Any) -> str:
    """What torch's tracers name the calls of an op, or of another function, after: `and` for
    `aten.__and__.Tensor`.
    """
    packet = getattr(function, "overloadpacket", function)
    return graph._target_to_str(packet.__name__)


def has_kernel(op: OpOverload, key: str) -> bool:
    """Whether something is registered for an op under a dispatch key, by its name; also False for
    a key that torch does not know.
    """
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))
    except RuntimeError:
        return False


@contextmanager
def without_mask_detection() -> Iterator[None]:
    """Within it torch.nn's transformers take an attention mask as it is. They would look at the
    values of one that comes without a hint, and take the kernel for causal masks if it is that: the
    same numbers, but a branch that is right for this one mask alone.
    """
    detect = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect


def differentiating() -> bool:
    """Whether this runs within a function that torch.func differentiates (grad, vjp, jvp)."""
    kinds = torch._C._functorch.TransformType
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in (kinds.Grad, kinds.Jvp) for level in stack)


def unwrap(x: torch.Tensor) -> torch.Tensor:
    """The tensor within what torch.func's transforms hand to a function; others as they are."""
    functions = torch._C._functorch
    while functions.is_functorch_wrapped_tensor(x):
        x = functions.get_unwrapped(x)
    return x


def next_autograd_step() -> int:
    """The number that the next function gets that autograd records."""
    return int(torch._C._autograd._get_sequence_nr())


def explain_autograd_steps(results: Any, since: int, text: str) -> None:
    """`torch.autograd.detect_anomaly` shows `text` as where the functions come from that autograd
    has recorded of these results since it gave the number `since`.
    """
    until = next_autograd_step()
    pending = [x.grad_fn for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    while pending:
        step: Any = pending.pop()
        if step is None or not since <= step._sequence_nr() < until:
            continue
        if step.metadata.get("traceback_") != [text]:
            step.metadata["traceback_"] = [text]
            pending += [function for function, _ in step.next_functions]


def autograd_step() -> int:
    """The number of the function whose backward runs; -1 outside of a backward."""
    running = torch._C._current_autograd_node()
    return -1 if running is None else int(running._sequence_nr())


_LOCAL, _VERSION = attrgetter("_local_tensor"), attrgetter("_version")
_REQUIRES_GRAD = attrgetter("requires_grad")


def local_of(x: DTensor) -> torch.Tensor:
    """The rank's own part, the tensor itself, without an autograd function."""
    return x._local_tensor


def locals_of(xs: Sequence[DTensor]) -> list[torch.Tensor]:
    """The rank's own part of each DTensor, as `local_of`."""
    return list(map(_LOCAL, xs))


def version_of(x: torch.Tensor) -> int:
    """How often x was written into so far: what autograd holds saved tensors against."""
    return x._version


def versions_of(xs: Sequence[torch.Tensor]) -> list[int]:
    """How often each was written into so far."""
    with without_torch_functions():  # looking for one takes most of the time
        return list(map(_VERSION, xs))


def are_trained(xs: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each requires a gradient."""
    with without_torch_functions():
        return list(map(_REQUIRES_GRAD, xs))


def placing_of(x: DTensor) -> DTensorSpec:
    """Where the parts of x lie: what `from_part` makes others like it of."""
    return x._spec


def placings_of(xs: Sequence[torch.Tensor]) -> list[DTensorSpec | None]:
    """The placing of each DTensor, None for a plain tensor."""
    return [getattr(x, "_spec", None) for x in xs]


def from_part(part: torch.Tensor, placing: DTensorSpec) -> DTensor:
    """A DTensor that lies so, with this own part; without an autograd function."""
    return DTensor(part, copy.copy(placing), requires_grad=False)


def put_local(x: DTensor, part: torch.Tensor) -> None:
    """Makes `part` the rank's own part of x, in the place of what it held: it lies as that did."""
    x._local_tensor = part


def fit_placing(placing: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same placing for a tensor of another dtype."""
    meta = placing.tensor_meta
    if meta is None or meta.dtype == dtype:
        return placing
    fitted = copy.copy(placing)
    fitted.tensor_meta = meta._replace(dtype=dtype)
    return fitted


def storage_key(x: torch.Tensor) -> int:
    """What two tensors have in common that share their memory."""
    return int(x.untyped_storage()._cdata)


def scales_partial_gradients() -> bool:
    """Whether what is written in place into a Partial DTensor stays: torch 2.11 scales a copy, and
    so would clip no gradient that is not summed yet; of 2.12 that is not known.
    """
    return tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)


def add_each(sums: Sequence[torch.Tensor], more: Sequence[torch.Tensor]) -> None:
    """Adds to each tensor another one, in place: in few kernels on a GPU."""
    if sums:
        torch._foreach_add_(list(sums), list(more))


def in_backward() -> bool:
    """Whether this runs within a backward: what `torch.utils.checkpoint` runs again does."""
    return int(torch._C._current_graph_task_id()) != -1


@contextmanager
def recording_again() -> Iterator[None]:
    """Records gradients within the implementation of an op, where torch has turned that off."""
    keys = torch._C.DispatchKey
    every = [keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor]
    excluded = [key for key in every if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


__all__ = [
    "AdaptiveOutput",
    "BackwardHookFunction",
    "BoxedCodeGen",
    "FakeTensor",
    "FakeTensorMode",
    "LazyGraphModule",
    "OpOverload",
    "TorchDispatchMode",
    "add_each",
    "apply_function",
    "are_trained",
    "autograd_step",
    "backend_name",
    "below_autograd",
    "checkpoints_inlined",
    "compile_in_order",
    "compiled_for",
    "constant_result",
    "default_store",
    "derive",
    "differentiating",
    "dynamo_sources",
    "explain_autograd_steps",
    "exporting",
    "fake_mode",
    "fit_placing",
    "forget_default_groups",
    "forget_groups",
    "from_part",
    "functions_applied",
    "graphs_not_written_out",
    "has_kernel",
    "in_backward",
    "inductor_decompositions",
    "local_of",
    "locals_of",
    "modes_on",
    "name_of_calls",
    "named_backend",
    "nan_checks",
    "next_autograd_step",
    "not_compiled",
    "partition",
    "pipeline_actions",
    "placing_of",
    "placings_of",
    "process_group",
    "put_local",
    "pytree",
    "recording_again",
    "register_process_group",
    "register_work",
    "safe_gathers",
    "scales_partial_gradients",
    "set_timeout",
    "storage_key",
    "strict_fake_mode",
    "taken_apart",
    "takes_a_list",
    "timeout_of",
    "torch_versions",
    "unregister_process_group",
    "unwrapped",
    "version_of",
    "versions_of",
    "without_mask_detection",
    "without_modes",
    "without_torch_functions",
]
