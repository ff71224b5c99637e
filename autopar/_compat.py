"""Every private torch API that autopar touches, in one place; tests/test_compat.py calls each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import Any

import torch.distributed
import torch.utils.checkpoint as _checkpointing
from torch._C import DisableTorchFunction as without_torch_functions
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.nn.modules import transformer
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from autopar.errors import PlanError

__all__ = [
    "BackwardHookFunction",
    "BoxedCodeGen",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "aot_module_simplified",
    "apply_function",
    "autograd_step",
    "backend_name",
    "below_autograd",
    "changes_in_place",
    "checkpoints_inlined",
    "compile_in_order",
    "compiled_for",
    "default_partition",
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
    "without_modes",
    "without_torch_functions",
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


def default_store() -> Any:
    """The store over which the default process group was set up."""
    return torch.distributed.distributed_c10d._get_default_store()


def timeout_of(group: torch.distributed.ProcessGroup) -> timedelta | None:
    """How long a collective of this group may take, as the user said when it was made; None where
    its backend knows no limit.
    """
    backend = group._get_backend(group._device_types[0])
    found: timedelta | None = getattr(backend.options, "_timeout", None)
    return found


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
    The form that is given its result is called "ALLGATHER", and does the same.
    """
    kernels = torch.library.Library("_c10d_functional", "IMPL")  # which forgets them with itself
    kernels.impl("all_gather_into_tensor", _gathered, "CPU")
    return kernels


def _gathered(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    out = x.new_empty((group_size * x.shape[0], *x.shape[1:]))
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    gathered: torch.Tensor = gather(x.contiguous(), group_size, group_name, out=out)
    return gathered


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have a shape, a dtype and a device, but no storage; `item()` gives a
    symbol.
    """
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """What `function.apply` does, also while `functions_applied` has it do something else."""
    return super(_SingleLevelFunction, function).apply(*args)  # type: ignore[misc]


@contextmanager
def functions_applied(apply: Callable[..., Any]) -> Iterator[None]:
    """Custom autograd functions call `apply(function, *args)`, by whichever name: an `apply` that
    was kept (`quantise = Quantise.apply`) too.
    """
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


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


def taken_apart(op: OpOverload) -> Callable[..., Any]:
    """A composite op as the ops that it is made of, in C++, whatever was registered for it in
    Python: `op.decompose` would call a table's entry, which this is, again.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return call


@contextmanager
def masks_as_given() -> Iterator[None]:
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


def changes_in_place(x: torch.Tensor) -> int:
    """How often x was written into so far: what autograd holds saved tensors against."""
    return x._version


def placing_of(x: DTensor) -> DTensorSpec:
    """Where the parts of x lie: what `from_part` makes others like it of."""
    return x._spec


def from_part(part: torch.Tensor, placing: DTensorSpec) -> DTensor:
    """A DTensor that lies so, with this own part; without an autograd function."""
    return DTensor(part, copy.copy(placing), requires_grad=False)


def derive(
    module: torch.fx.GraphModule,
    values: Sequence[torch.Tensor],
    compiler: Callable[..., Any],
    partition: Callable[..., Any],
    decompositions: dict[Any, Any] | None = None,
) -> Callable[..., Any]:
    """What runs the graphs that AOTAutograd derives from `module` for such values, cut in two by
    `partition`, each made runnable by `compiler(graph, example_inputs)`. Both are compiled before
    this returns: torch would otherwise compile the backward when it is first run, where a rank
    that fails leaves the others waiting. Where a script compiles the call of backward(), dynamo
    leaves them alone.
    """

    def apart(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        run = compiler(gm, example_inputs)
        made: Callable[..., Any] = torch.compiler.disable(run)
        return takes_a_list(made) if getattr(run, "_boxed_call", False) else made

    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        return aot_module_simplified(
            module,
            list(values),
            fw_compiler=apart,
            bw_compiler=apart,
            partition_fn=partition,
            decompositions=decompositions,
        )


def takes_a_list(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which AOTAutograd knows now that it takes all its values in one list,
    which it may clear.
    """
    marked: Any = run
    marked._boxed_call = True
    return run


def dynamo_sources(graph: torch.fx.Graph) -> list[str]:
    """Where dynamo takes the value of each placeholder from, as it writes that: "L['x']" for an
    argument, "L['self']._modules['up']._buffers['mean']". To be asked while a backend compiles the
    graph; "" for what it does not say of.
    """
    found = []
    for node in graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        found.append("" if source is None else str(source.name))
    return found


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


def named_backend(name: str) -> Callable[..., Any]:
    """The backend that torch.compile knows by this name. Raises PlanError where it knows none."""
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    if name not in list_backends(exclude_tags=()):
        known = ", ".join(list_backends(exclude_tags=()))
        raise PlanError(f"torch.compile knows no backend {name!r}; it knows {known}")
    found: Callable[..., Any] = lookup_backend(name)
    return found


def partition(
    joint: torch.fx.GraphModule, inputs: Any, **more: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """torch's cut of a joint graph into forward and backward: what the backward needs is saved,
    unless its node is tagged to be made again. What is made again may draw no random numbers: torch
    would keep the generators' states for whatever has the tag of such an op, as attention without
    dropout has too, and is told here that there is nothing of the kind.
    """
    drawn = [n.name for n in joint.graph.nodes if partitioners.must_recompute(n) and _draws(n)]
    assert not drawn, f"made again with other random numbers: {', '.join(drawn)}"
    draws = partitioners.has_recomputable_rng_ops
    partitioners.has_recomputable_rng_ops = lambda fx_g: False
    try:
        return default_partition(joint, inputs, **more)
    finally:
        partitioners.has_recomputable_rng_ops = draws


def _draws(node: torch.fx.Node) -> bool:
    """Whether an op takes numbers from torch's generators; attention does for dropout alone."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    assert isinstance(node.target, OpOverload)
    arguments = enumerate(node.target._schema.arguments)
    rates = [(place, argument) for place, argument in arguments if argument.name == "dropout_p"]
    if not rates:
        return True
    ((place, rate),) = rates
    given = node.args[place] if place < len(node.args) else node.kwargs.get(rate.name)
    return bool(rate.default_value if given is None else given)


# -- inductor: imported where it is wanted, which takes a second -----------------------------------
def inductor_decompositions() -> dict[Any, Any]:
    """What graphs must be decomposed by for `compile_in_order`."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def compile_in_order(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], backward: bool
) -> Callable[..., Any]:
    """A functional ATen graph compiled by inductor, which may fuse what it likes but keeps the
    order of collectives, waits, products and other extern kernels among themselves.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    output = graph.graph.output_node()
    results = pytree.tree_leaves(output.args)
    output.meta["user_visible_output_idxs"] = [  # with the strides that the other graph expects
        place for place, result in enumerate(results) if isinstance(result, torch.fx.Node)
    ]
    mode = next(x.fake_mode for x in example_inputs if isinstance(x, FakeTensor))
    with V.set_fake_mode(mode), config.patch(_keeping_order()):
        made: Callable[..., Any] = compile_fx_inner(graph, example_inputs, is_backward=backward)
    return made


def compiled_for(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of tensors whose gradients nobody asks for, compiled by inductor for the shapes,
    dtypes and devices that it is called with: without dynamo, which would compare all it knows of
    them at every call. Where inductor fails, as without a compiler, it warns and runs as it is.
    """
    made: dict[Any, Callable[..., Any]] = {}

    def run(*given: torch.Tensor) -> torch.Tensor:
        key = tuple((x.shape, x.stride(), x.dtype, x.device) for x in given)
        if key not in made:
            try:
                made[key] = _compiled(plain, given)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:500]
                warnings.warn(f"autopar: a mask is made op by op, as {why}", stacklevel=2)
                made[key] = lambda *args: [plain(*args)]
        found: torch.Tensor = made[key](*given)[0]
        return found

    return run


def _compiled(plain: Callable[..., Any], given: Sequence[torch.Tensor]) -> Callable[..., Any]:
    from torch._inductor import compile as compiled
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        graph = make_fx(lambda *args: [plain(*args)], tracing_mode="fake")(*given)
        found: Callable[..., Any] = compiled(graph, list(given))
    return found


def _keeping_order() -> dict[str, Any]:
    """Settings of inductor under which nothing but `_chained` says what comes first. It chains what
    must keep its order before anything is fused: a fusion that would pull a wait forward makes a
    cycle then, which inductor refuses.
    """
    from torch._inductor import custom_graph_pass

    settings: dict[str, Any] = {
        "reorder_for_peak_memory": False,
        "reorder_for_compute_comm_overlap": False,
        "reorder_for_locality": False,
        "aten_distributed_optimizations.enable_overlap_scheduling": False,
    }
    if not hasattr(custom_graph_pass, "CustomSchedulerPass"):
        # before torch 2.13 any function is taken, which the cache of compiled graphs does not see
        return {**settings, "fx_graph_cache": False, "_pre_fusion_custom_pass": _chained}

    class InOrder(custom_graph_pass.CustomSchedulerPass):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return _chained(nodes)

        def uuid(self) -> str:
            return "autopar: in order, 1"

    return {**settings, "_pre_fusion_custom_pass": InOrder()}


def _chained(nodes: list[Any]) -> list[Any]:
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    anchors = [n for n in nodes if isinstance(n, ExternKernelSchedulerNode) or n.is_template()]
    for before, after in pairwise(anchors):
        mutating = next(iter(after.get_buffer_names()))
        known = {dep.name for dep in after.unmet_dependencies}
        if known.isdisjoint(before.get_buffer_names()):
            for name in before.get_buffer_names():
                after.add_fake_dep(WeakDep(name, mutating_buf=mutating, is_fake=True))
    if anchors:
        scheduler = anchors[0].scheduler
        scheduler.nodes = nodes
        scheduler.compute_ancestors()  # what fusions are held against
    return nodes
