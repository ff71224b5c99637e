"""Turns a model into a functional graph: exported with fake tensors, decomposed, its failures
explained.

A model and the arguments of a call enter `capture`; the captured program leaves, with the model's
own tensors. No memory is allocated for values, and the model is restored afterwards. What a graph
could not repeat (writes into parameters, padded samples that are packed, gradients that get lost)
raises a TraceError that names the line and a remedy. `trace` calls `capture`; side_effects.py runs
the model on the same `stand_ins`, and original.py uses `borrow`.
"""

from __future__ import annotations

import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.overrides import TorchFunctionMode

from autopar._compat import (
    FakeTensor,
    FakeTensorMode,
    exporting,
    fake_mode,
    graphs_not_written_out,
    pytree,
    taken_apart,
    without_mask_detection,
)
from autopar.errors import TraceError
from autopar.ir.containers import register
from autopar.ir.graph import is_inexact
from autopar.ir.program import under_autocast, without_autocast
from autopar.ops.custom_functions import Refused, honour
from autopar.ops.devices import home_of, of_inputs
from autopar.passes.trace.autocast import cast_in_composites
from autopar.passes.trace.derivatives import forward_replaced, graph_below_autograd
from autopar.passes.trace.functional import written_functionally
from autopar.passes.trace.model_state import Watch, refuse_registered, snapshot
from autopar.passes.trace.simplify import inline_no_grad, secretly_written
from autopar.passes.trace.torch_branches import (
    BRANCHLESS,
    PACKED_ADVICE,
    branching_function,
    packs_sequences,
    without_branches,
)

DATA_ADVICE = (
    "Select with torch.where, give data-dependent sizes a fixed upper bound, or compute the value "
    "outside of the model and pass it as a Python number."
)
EXPERTS_ADVICE = (
    "A loop over experts takes as many tokens for each as the data has. Compute all experts at "
    "once: multiply a one-hot dispatch, the tokens and a weight of shape (experts, …) by einsum, "
    "as GShard does, or make it an experts module of transformers (use_experts_implementation), "
    "which autopar takes as one op."
)
MASK_ADVICE = (
    "transformers leaves out a mask that hides nothing, but not where a model is traced: there it "
    "makes one of (batch, 1, length, length), which this model does not take. Give the mask as it "
    "is added to the scores; one that hides nothing is "
    "attention_mask=torch.zeros(batch, 1, 1, length)."
)
DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Captured(NamedTuple):
    """A functional graph, and what export says of the program that it belongs to."""

    graph: fx.Graph
    graph_module: fx.GraphModule  # has what the graph takes by its name
    graph_signature: ExportGraphSignature
    constants: dict[str, Any]
    out_tree: pytree.TreeSpec

    @classmethod
    def of(cls, program: ExportedProgram) -> Captured:
        """Return what is captured by torch's decomposition."""
        return cls(
            program.graph, program.graph_module, program.graph_signature, program.constants,
            program.call_spec.out_spec,
        )  # fmt: skip


class Capture(NamedTuple):
    """What is captured of a model: the program, the model's own tensors by the id of the fake that
    replaced them, the program before it was decomposed, and the fakes that it was called with.
    """

    captured: Captured
    originals: dict[int, torch.Tensor]
    exported: ExportedProgram
    inputs: tuple[tuple[Any, ...], dict[str, Any]]


Export = Callable[[nn.Module, "StandIns"], ExportedProgram]


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], export: Export
) -> Capture:
    """Return what `export` captures of the model.

    No size and no device is too large for fake tensors, and the model is left as it was, also when
    this fails. Raises TraceError.
    """
    # Hooks are looked for on the model's own tensors, before others stand in for them.
    with _name_model_in_refusals(model), honour(model), stand_ins(model, args, kwargs) as fakes:
        try:
            exported = export(model, fakes)
            _refuse_writes(model, exported)
            _refuse_lost(model, exported, fakes)
            captured = _decompose(model, exported)
            _refuse_lost(model, captured, fakes)
        except (TraceError, Refused):
            raise
        except Exception as error:
            raise explain(model, error) from error
    _refuse_mutations(model, captured)
    return Capture(captured, fakes.originals, exported, (fakes.args, fakes.kwargs))


def exported_anew(model: nn.Module, fakes: StandIns) -> ExportedProgram:
    """Return what torch exports, with regions without gradients inlined and casts made explicit."""
    with watch_forward(model):
        exported = torch.export.export(model, fakes.args, fakes.kwargs, strict=False)
    return _inlined(exported)


def _inlined(exported: ExportedProgram) -> ExportedProgram:
    inline_no_grad(exported.graph_module)
    cast_in_composites(exported.graph_module)
    return exported


def exported_with_derivatives(model: nn.Module, fakes: StandIns) -> ExportedProgram:
    """Export the graph that the model is below autograd, where derivatives are operators."""
    before = snapshot(model)
    try:
        with fakes.mode, exporting():
            below = graph_below_autograd(
                model, fakes.args, fakes.kwargs, partial(watch_forward, model)
            )
    finally:
        before.restore()
    for node in below.module.graph.nodes:
        writes = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if writes and node.args[0] in below.fixed:
            raise _write_error(model, below.fixed[node.args[0]], place(node))
    kinds = {x.device.type for x in pytree.tree_leaves((fakes.args, *model.parameters()))
        if isinstance(x, torch.Tensor)}  # fmt: skip
    # The casts of autocast are in the graph.
    with forward_replaced(model, below), without_autocast(under_autocast(kinds)):
        exported = torch.export.export(model, fakes.args, fakes.kwargs, strict=False)
    return _inlined(exported)


@contextmanager
def watch_forward(model: nn.Module) -> Iterator[None]:
    """Record a forward's regions without gradients, and refuse the hooks that it registers."""
    watch = Watch(model)
    with watch.saved(), _DetachWithoutGrad(), _no_packing(model), watch:
        yield


class StandIns(NamedTuple):
    """The fakes that a model is called with, and its own tensors by the id of their fake."""

    mode: FakeTensorMode
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    originals: dict[int, torch.Tensor]


@contextmanager
def stand_ins(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[StandIns]:
    """Put fake tensors in the place of all that the model holds and is called with. The model is
    restored at the end, whatever its forward has done. Warnings and logs are silenced, and
    gradients are on.
    """
    mode = fake_mode()
    register((args, kwargs))
    home = home_of(model, args, kwargs)
    own = of_inputs(model)
    # One fake for every leaf: a tensor that is passed twice (ids = labels) stays two inputs.
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda value: fake_of(mode, value, home, own), (args, kwargs)
    )
    with (
        without_branches(model), _quiet(), torch.enable_grad(), without_mask_detection(),
        graphs_not_written_out(),
        borrow(model, lambda x: fake_of(mode, x, home)) as originals,
    ):  # fmt: skip
        try:
            yield StandIns(mode, args, kwargs, originals)
        finally:
            torch.clear_autocast_cache()  # casts of leaves that forward made, such as inputs


@contextmanager
def _name_model_in_refusals(model: nn.Module) -> Iterator[None]:
    """Refuse hooks on the model, and turn every Refused into a TraceError that names the model."""
    try:
        refuse_registered(model)
        yield
    except Refused as error:
        raise refusal(model, *error.args) from None


@contextmanager
def _no_packing(model: nn.Module) -> Iterator[None]:
    """Refuse encoders that would pack padded samples: in eval mode without gradients, torch.nn's
    gives zeros where samples are padded, and other numbers under torch.export.
    """
    encoders = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.TransformerEncoder)]
    hooks = [
        encoder.register_forward_pre_hook(partial(_refuse_packing, model, name), with_kwargs=True)
        for name, encoder in encoders
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_packing(
    model: nn.Module, name: str, encoder: nn.TransformerEncoder, args: Any, kwargs: dict[str, Any]
) -> None:
    """Raise TraceError where this call of an encoder would pack padded samples."""
    arguments = {**dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)), **kwargs}
    packs = getattr(encoder, "use_nested_tensor", False) and not encoder.layers[0].training
    if not packs or not torch.backends.mha.get_fastpath_enabled():
        return
    if arguments.get("mask") is None and arguments.get("src_key_padding_mask") is not None:
        reason = (
            f"the encoder {name!r} in eval mode puts zeros where samples are padded, which "
            "torch.export leaves out"
        )
        advice = (
            "Make it with enable_nested_tensor=False, or call "
            "torch.backends.mha.set_fastpath_enabled(False) first."
        )
        raise refusal(model, reason, "", advice)


def _decompose(model: nn.Module, exported: ExportedProgram) -> Captured:
    """Return the functional program with composite operators left intact, but for those that write
    into an operand without saying so in their signatures, as instance_norm does into its running
    statistics.
    """
    devices = {x.device.type for x in exported.graph_module.parameters()}
    values = (node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder"))
    devices |= {x.device.type for x in values if isinstance(x, torch.Tensor)}
    # Under autocast a call does not stand for itself: decomposed alone, it would be cast again.
    graph = None if under_autocast(devices) else written_functionally(exported)
    if graph is None:
        captured = Captured.of(exported.run_decompositions({}))
    else:
        captured = Captured.of(exported)._replace(graph=graph)
    writers = secretly_written(captured.graph)
    if not writers:
        return captured
    captured = Captured.of(exported.run_decompositions({op: taken_apart(op) for op in writers}))
    for op, node in secretly_written(captured.graph).items():
        reason = f"{op} writes into an operand, which its signature does not say"
        raise refusal(model, reason, place(node), "Use an operator that returns what it makes.")
    return captured


class _DetachWithoutGrad(TorchFunctionMode):
    """Detaches what is computed, or written elsewhere, while gradients are off.

    Export records such regions, decomposition forgets them, and under autocast export forgets them
    too. `simplify` removes detaches that turn out to be needless.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == DATA:  # export would make it a constant
            return args[0].detach()
        func = BRANCHLESS.get(func, func)
        if torch.is_grad_enabled():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.endswith("_"):  # mul_, __iadd__, __setitem__
            _refuse_blind_write(name, args)
            args = (*args[:1], *pytree.tree_map_only(torch.Tensor, _detach, tuple(args[1:])))
        result = func(*args, **kwargs)
        written = bool(args) and result is args[0]
        return result if written else pytree.tree_map_only(torch.Tensor, _detach, result)


def _refuse_blind_write(name: str, args: Any) -> None:
    """Refuse an in-place write without gradients into a tensor that carries one: eager autograd
    does not see it, and a functional graph would.
    """
    writes = not name.startswith("__") or name == "__setitem__" or name[:3] == "__i"
    harmless = name in ("add_", "sub_", "__iadd__", "__isub__", "detach_", "requires_grad_")
    target = args[0] if args else None
    carries = isinstance(target, torch.Tensor) and target.requires_grad and not target.is_leaf
    if writes and carries and not harmless:
        raise RuntimeError(f"{name} without gradients changes a tensor that carries a gradient")


def _detach(value: torch.Tensor) -> torch.Tensor:
    """Detach a tensor that may carry a gradient."""
    return value.detach() if is_inexact(value.dtype) else value


def fake_of(
    mode: FakeTensorMode,
    value: torch.Tensor,
    home: torch.device,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return a fake of this tensor, with its shape, strides, dtype and `requires_grad`; on its own
    device unless another is given.
    """
    device = device or (home if value.device.type == "meta" else value.device)
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake.requires_grad_(value.requires_grad)  # a model may look at it


@contextmanager
def borrow(
    model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[dict[int, torch.Tensor]]:
    """Put what `make` returns in the place of each of the model's tensors, and restore the model at
    the end.

    Yields the original tensors by the id of what stands in for them.
    """
    before = snapshot(model)
    fakes: dict[int, torch.Tensor] = {}
    originals: dict[int, torch.Tensor] = {}

    def stand_in(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in fakes:
            fakes[id(value)] = make(value)
            originals[id(fakes[id(value)])] = value
        return fakes[id(value)]

    hook = model.register_forward_hook(lambda _, __, result: register(result))
    try:
        for module in model.modules():
            _replace_tensors(module, stand_in, fakes)
        yield originals
    finally:
        hook.remove()
        before.restore()


def _replace_tensors(
    module: nn.Module,
    stand_in: Callable[[torch.Tensor], torch.Tensor],
    fakes: dict[int, torch.Tensor],
) -> None:
    """Replace the tensors that one module holds, in its registries, lists and attributes."""
    registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for registry in registries:
        for name, value in registry.items():
            if value is not None:
                registry[name] = stand_in(value)
    # Some modules hold tensors elsewhere too: nn.LSTM in a list, others in plain attributes.
    for name, value in list(module.__dict__.items()):
        if isinstance(value, list) and any(id(item) in fakes for item in value):
            module.__dict__[name] = [fakes.get(id(item), item) for item in value]
        elif isinstance(value, torch.Tensor) and (id(value) in fakes or value.is_meta):
            module.__dict__[name] = stand_in(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what export prints of its inner workings; `explain` reports its errors."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


# Refusals: what the model did, where, and what to do about it.


def refusal(model: nn.Module, reason: str, place: str, advice: str) -> TraceError:
    """Return a TraceError that says which model cannot be one graph, why, where, and what to do."""
    where = f"\n{place}" if place else ""
    return TraceError(f"{type(model).__name__} cannot be one graph: {reason}{where}\n{advice}")


def place(node: fx.Node | None) -> str:
    """Return the line of the user's code that made this node, from the trace that export keeps."""
    trail = (node.meta.get("stack_trace") or "") if node is not None else ""
    frames = [frame for frame in re.split(r'\s*File "', trail) if frame and frame[0] != "<"]
    return f'  File "{frames[-1].rstrip()}' if frames else ""


def _refuse_writes(model: nn.Module, exported: ExportedProgram) -> None:
    """Refuse operators that write into a parameter or an input, while their lines are still
    there.
    """
    specs = {entry.arg.name: entry for entry in exported.graph_signature.input_specs}
    for node in exported.graph.nodes:
        if not getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            continue
        entry = specs.get(getattr(node.args[0], "name", ""))
        if entry is not None and entry.kind in (InputKind.PARAMETER, InputKind.USER_INPUT):
            raise _write_error(model, entry.target or entry.arg.name, place(node))


def _refuse_mutations(model: nn.Module, exported: Captured) -> None:
    """Refuse such writes through a view, which show only once the program is functional."""
    for entry in exported.graph_signature.output_specs:
        if entry.kind not in (OutputKind.BUFFER_MUTATION, OutputKind.USER_OUTPUT):
            node = next((n for n in exported.graph.nodes if n.name == entry.arg.name), None)
            raise _write_error(model, entry.target or entry.arg.name, place(node))


def _refuse_lost(model: nn.Module, exported: ExportedProgram | Captured, fakes: StandIns) -> None:
    """Refuse values of the trace that export took for constants: what autograd saved of them is no
    part of the graph, and their gradients would be lost.
    """
    names = {s.arg.name: s.target for s in exported.graph_signature.input_specs}
    for node in exported.graph.find_nodes(op="placeholder"):
        value = exported.constants.get(names.get(node.name) or "")
        lost = isinstance(value, FakeTensor) and id(value) not in fakes.originals and node.users
        if lost and id(value) not in snapshot(model).tensors:
            reason = "torch.autograd.grad in forward uses a value that export cannot follow"
            raise refusal(
                model,
                reason,
                place(next(iter(node.users))),
                "Write the derivative out in forward, or take it outside of the model.",
            )


def _write_error(model: nn.Module, name: str, where: str) -> TraceError:
    """Return the TraceError for a parameter or an input that forward changes in place."""
    reason = f"forward changes {name!r}, a parameter or an input, in place"
    return refusal(model, reason, where, "Work on a clone of it, or register it as a buffer.")


def explain(model: nn.Module, error: Exception) -> TraceError:
    """Return a TraceError for an error of export or of the model itself, with the user's line."""
    if packs_sequences(error):
        reason = "the shapes of packed sequences depend on their lengths, the values of a tensor"
        advice = PACKED_ADVICE
    elif any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutputShape")):
        reason = "a branch or a shape depends on the values of a tensor"
        advice = data_advice("".join(traceback.format_tb(error.__traceback__)))
        torch_branch = branching_function(error)
        if torch_branch is not None:
            owner, instead = torch_branch
            reason = f"inside {owner}, torch's own code, {reason}"
            advice = instead or (
                f"Write what {owner} computes without the branch, or compute it outside of the "
                "model."
            )
    else:
        message = (str(error).strip() or "no message").splitlines()[0]
        reason = f"{type(error).__name__}: {message}"
        advice = "Check that the model runs on these inputs; if so, torch.export cannot follow it."
        if _adds_mask_of_transformers(error):
            advice = MASK_ADVICE
    return refusal(model, reason, trail(error), advice)


def _adds_mask_of_transformers(error: Exception) -> bool:
    """Whether a model of transformers failed where it uses its attention mask."""
    last = traceback.extract_tb(error.__traceback__)
    outer = [frame for frame in last if not _is_inner(frame.filename)][-1:]
    return any(
        "transformers" in Path(frame.filename).parts and "attention_mask" in (frame.line or "")
        for frame in outer
    )


def data_advice(code: str) -> str:
    """Return what to do about values that decide a shape, by the lines of code that led there."""
    loops = re.search(r"expert|moe", code, re.IGNORECASE)
    return EXPERTS_ADVICE if loops else DATA_ADVICE


def trail(error: Exception) -> str:
    """Return the last line outside of torch that `error` passed; where that is in another library,
    the user's line that called it comes first.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_inner(f.filename)]
    user_frames = [frame for frame in frames if "site-packages" not in frame.filename][-1:]
    shown = user_frames if user_frames == frames[-1:] else user_frames + frames[-1:]
    lines = (f'  File "{f.filename}", line {f.lineno}, in {f.name}\n    {f.line}' for f in shown)
    return "\n".join(lines)


def _is_inner(filename: str) -> bool:
    """Whether a file belongs to torch, autopar or the standard library."""
    path = Path(filename)
    if filename.startswith("<") or path.is_relative_to(Path(__file__).parents[2]):
        return True
    if "site-packages" in path.parts:  # may lie inside the standard library's folder
        return path.is_relative_to(Path(torch.__file__).parent)
    return path.is_relative_to(Path(traceback.__file__).parent)
