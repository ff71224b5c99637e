"""The tensors that a parallel module holds: DTensors that scripts may treat as the tensors that
they stand for.

    weight = par.get_parameter("embed.weight")    # a rank holds its own rows
    weight.data = weight.data * 0.5               # the graph computes with the new numbers
    weight[0].zero_()                             # the row of the rank that holds it
    torch.nn.init.normal_(weight)                 # the numbers that one device draws

Parameters are `ParallelTensor`s, and so is what torch computes of them: gradients, the states of
optimizers, the entries of a state dict. An op on tensors that lie alike runs on the rank's own
parts. A write through a view that DTensor had to gather, a random draw, and an op that DTensor does
not know run on the whole tensor, on every rank alike, and each rank keeps its own part. What would
be silently wrong raises InputError: a rank's part that is pickled as if it were the whole, and a
plain tensor in the same op.

runtime/training/module_tree.py makes parameters of them, runtime/local_parts.py gives them
gradients.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from autopar._compat import (
    OpOverload,
    fit_placing,
    from_part,
    local_of,
    placing_of,
    put_local,
    pytree,
    storage_key,
    version_of,
)
from autopar.errors import InputError
from autopar.ops.devices import default_generator
from autopar.runtime.agreement import digest
from autopar.world import ranks

Kind = Literal["item", "draw", "pointwise", "foreach", "view", "write", "other"]

SAVE_UNSHARDED = (
    "    state = get_model_state_dict(par, options=StateDictOptions(full_state_dict=True, "
    "cpu_offload=True))  # on every rank\n"
    "    if rank == 0: torch.save(state, path)"
)


class Holder(Protocol):
    """Who keeps the parts of parameters between calls."""

    def clear(self) -> None:
        """Let go of them, as a parameter has others now."""


HOLDERS: weakref.WeakSet[Holder] = weakref.WeakSet()


class ParallelTensor(DTensor):
    """A DTensor whose `data` and `grad` can be assigned, whose views can be written to, and which
    is not pickled in part. See the module docstring.

    >>> import autopar
    >>> weight = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),)).weight
    >>> isinstance(weight, nn.Parameter)
    True
    """

    # Of a view that DTensor gathered: what it is a view of, by which steps, and the version that it
    # has the numbers of.
    _view_of: tuple[ParallelTensor, tuple[Any, ...], list[int]] | None = None

    # -- attributes --------------------------------------------------------------------------------
    @property
    def data(self) -> torch.Tensor:
        """The same numbers, without gradients. What is assigned is stored as this tensor is: a
        whole tensor is cut, a DTensor that lies otherwise is redistributed (then it is collective).
        Raises InputError for another shape or dtype.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        put_local(self, self._as_stored(value, "data"))
        for holder in HOLDERS:
            holder.clear()

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient. What is assigned is stored as the parameter is, but for a DTensor that is
        not summed over all ranks yet (`no_sync`).
        """
        return cast("torch.Tensor | None", become_parallel(_GRAD.__get__(self)))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and not (isinstance(value, DTensor) and _is_partial(value)):
            value = from_part(self._as_stored(value, "grad"), placing_of(self))
        if isinstance(value, DTensor):
            become_parallel(value)
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__set__(self, None)

    def _as_stored(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """Return the rank's own part of a value for `what`."""
        if not isinstance(value, torch.Tensor) or value.shape != self.shape:
            text = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise InputError(
                f"{what} of a parallel tensor of shape {tuple(self.shape)} was given {text}: give "
                "a tensor of the whole shape, or a DTensor"
            )
        if value.dtype != self.dtype:
            raise InputError(
                f"{what} of a parallel tensor of {self.dtype} was given {value.dtype}, and the "
                f"plan is for {self.dtype}: convert it with .to({self.dtype}), or parallelize the "
                "model in the other dtype"
            )
        return own_part(value.detach(), self)

    # -- whole tensors -----------------------------------------------------------------------------
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor on every rank, as DTensor does. Collective."""
        _refresh(self)
        return super().full_tensor(grad_placements=grad_placements)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's part, as DTensor does."""
        _refresh(self)
        return super().to_local(grad_placements=grad_placements)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return the tensor with other placements, as DTensor does. Collective."""
        return become_parallel(super().redistribute(*args, **kwargs))

    def __format__(self, pattern: str) -> str:
        if self.dim():
            return super().__format__(pattern)
        return format(self.item(), pattern)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the numbers as an array of numpy where this rank holds all of them; else raise
        InputError.
        """
        return self._replica("numpy()").numpy(force=force)

    def tolist(self) -> Any:
        """Return the numbers as lists where this rank holds all of them; else raise InputError."""
        return self._replica("tolist()").tolist()

    def _replica(self, call: str) -> torch.Tensor:
        if not all(isinstance(p, Replicate) for p in self.placements):
            raise InputError(
                f"{call} of a tensor of {tuple(self.shape)}, of which this rank holds a part of "
                f"{tuple(local_of(self).shape)}: take full_tensor() first, on every rank"
            )
        return local_of(self)

    # -- copies ------------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelTensor:
        if id(self) in memo:
            return cast(ParallelTensor, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that are leaves of autograd can be copied by deepcopy: detach() first"
            )
        with torch.no_grad():
            twin = become_parallel(from_part(local_of(self).clone(), placing_of(self)))
            if isinstance(self, nn.Parameter):
                twin = parallel_parameter(twin, self.requires_grad)
            else:
                twin.requires_grad_(self.requires_grad)
                if self.grad is not None:  # copies of parameters have none
                    twin.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name not in _INTERNAL:
                twin.__dict__[name] = copy.deepcopy(value, memo)
        memo[id(self)] = twin
        return twin

    def __copy__(self) -> torch.Tensor:
        return self.detach().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the plain tensor where this rank holds all of it. Raises InputError where it holds
        a part, unless `own_shards` says that the part is meant.
        """
        if _SHARDS_ARE_MEANT:
            return super().__reduce_ex__(protocol)
        if not all(isinstance(p, Replicate) for p in self.placements):
            shape, part = tuple(self.shape), tuple(local_of(self).shape)
            raise InputError(
                f"this rank holds a part of {part} of a tensor of {shape}, and what is pickled "
                f"here would be that part alone. The whole is saved by\n{SAVE_UNSHARDED}\nwith "
                "get_model_state_dict (get_optimizer_state_dict for an optimizer's) of "
                "torch.distributed.checkpoint.state_dict. autopar.Checkpoints saves each rank's "
                "part and loads it in any layout; `with autopar.own_shards():` around torch.save "
                "pickles this rank's parts"
            )
        own = local_of(self).detach()
        return own.requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    # -- ops ---------------------------------------------------------------------------------------
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "pointwise":
            if (local := _pointwise(func, args, kwargs)) is not None:
                return local
            kind = "write" if func._schema.is_mutable else "other"
        elif kind == "foreach":
            if (done := _foreach(func, args, kwargs)) is not _NOT_LOCAL:
                return done
            return _by_dtensor(func, args, kwargs)
        if kind == "item":
            return _unshard(args[0]).item()
        if kind == "draw":
            with _rank_0_draws(kwargs.get("generator"), args):
                return _run_unsharded(func, args, kwargs)
        if kind == "write":
            return _write(func, args, kwargs)
        if kind == "view":
            return _view(func, args, kwargs)
        try:
            return _by_dtensor(func, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            return _run_unsharded(func, args, kwargs, error)


_GRAD: Any = torch.Tensor.grad
_INTERNAL = ("_spec", "_local_tensor", "_view_of")
_NOT_LOCAL = object()
_SHARDS_ARE_MEANT: list[bool] = []


@contextmanager
def own_shards() -> Iterator[None]:
    """Let torch.save, within the context, write what this rank holds: each rank its own file.

    >>> import autopar, io
    >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
    >>> with autopar.own_shards():
    ...     torch.save(par.state_dict(), io.BytesIO())  # as f"rank{rank}.pt"

    Such a file is read by the same rank of a run with the same mesh, by
    `torch.load(path, weights_only=False)` and `par.load_state_dict`. `Checkpoints` has no such
    limits. Raises nothing itself; without it, pickling a part raises InputError.
    """
    _SHARDS_ARE_MEANT.append(True)
    try:
        yield
    finally:
        _SHARDS_ARE_MEANT.pop()


def become_parallel(x: Any) -> Any:
    """Make a DTensor a ParallelTensor, in place; return it. What is no DTensor stays as it is."""
    if type(x) is DTensor:
        x.__class__ = ParallelTensor
    return x


def parallel_parameter(x: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a parameter of this tensor: a ParallelTensor where it is a DTensor."""
    return become_parallel(nn.Parameter(_plain_class(x), requires_grad=requires_grad))


def own_part(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of a value that is to lie as `like` does: of a whole tensor, cut; of
    a DTensor, redistributed (collective where it lies otherwise).
    """
    if isinstance(value, DTensor):
        if _lies_as(value, like):
            return local_of(value)
        value = _unshard(value)
    value = value.to(local_of(like).device)
    if all(isinstance(p, Replicate) for p in like.placements):
        return value
    cut = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return local_of(cut).contiguous()


# -- kinds of ops ----------------------------------------------------------------------------------
# Ops whose result is, number by number, made of the numbers in the same places, and which torch
# does not tag as such.
_ALIKE = frozenset({
    "aten::zero_", "aten::fill_", "aten::copy_", "aten::masked_fill_", "aten::masked_fill",
    "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like", "aten::detach",
    "aten::_to_copy",
})  # fmt: skip
_REDUCING = ("norm", "max", "powsum")  # of _foreach_ ops


@cache
def _kind(func: Any) -> Kind:
    """Return how an op is run on tensors of which a rank holds a part."""
    if not isinstance(func, OpOverload):
        return "other"
    name = func._schema.name
    if name == "aten::_local_scalar_dense":
        return "item"
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "draw"
    short = name.removeprefix("aten::")
    if short.startswith("_amp_"):  # which DTensor knows
        return "other"
    if short.startswith(("_foreach_", "_fused_")):
        return "other" if short.endswith(_REDUCING) else "foreach"
    is_out = any(argument.is_out for argument in func._schema.arguments)
    returns_tensors = all(str(r.type) != "bool" for r in func._schema.returns)
    if (torch.Tag.pointwise in func.tags or name in _ALIKE) and not is_out and returns_tensors:
        return "pointwise"
    if func._schema.is_mutable:
        return "write"
    if any(r.alias_info is not None for r in func._schema.returns):
        return "view"
    return "other"


def _pointwise(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run an op on the ranks' own parts, where every tensor lies as the first one does or is a
    plain number; else return None.
    """
    like = args[0]
    if not isinstance(like, ParallelTensor):
        return None
    own = []
    for x in args:
        if isinstance(x, DTensor):
            if x is not like and not (x.shape == like.shape and _lies_as(x, like)):
                return None
            if _is_partial(x) or (type(x) is ParallelTensor and x._view_of is not None):
                return None
            own.append(local_of(x))
        elif any(isinstance(y, torch.Tensor) and y.dim() for y in pytree.tree_leaves(x)):
            return None
        else:
            own.append(x)
    if any(isinstance(x, torch.Tensor) for x in kwargs.values()):
        return None
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return None
    result = func(*own, **kwargs)
    if func._schema.is_mutable:
        return like
    if not isinstance(result, torch.Tensor) or result.device != local_of(like).device:
        return None
    return become_parallel(from_part(result, fit_placing(placing_of(like), result.dtype)))


def _foreach(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run an op on lists of tensors, place by place, on the ranks' own parts; return _NOT_LOCAL
    where tensors in one place lie otherwise.
    """
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple)]
    likes = args[0]
    for each in lists:
        if len(each) != len(likes) or each is likes:
            continue
        for x, like in zip(each, likes, strict=True):
            if not isinstance(x, torch.Tensor) or not x.dim() or not isinstance(like, DTensor):
                continue
            if not (isinstance(x, DTensor) and x.shape == like.shape and _lies_as(x, like)):
                return _redistribute_lists(func, args, kwargs)
    if any(not isinstance(x, ParallelTensor) or x._view_of or _is_partial(x) for x in likes):
        return _NOT_LOCAL
    flat = [*args, *kwargs.values()]
    if any(isinstance(x, DTensor) for x in flat):  # such as a norm that all are scaled by
        flat_args = [_number(x) for x in args]
        kwargs = {name: _number(x) for name, x in kwargs.items()}
    else:
        flat_args = list(args)
    local_args = [_locals(x) for x in flat_args]
    result = func(*local_args, **{name: _locals(x) for name, x in kwargs.items()})
    if func._schema.is_mutable:
        return result if result is None else list(likes)
    return [
        become_parallel(from_part(x, fit_placing(placing_of(like), x.dtype)))
        for x, like in zip(result, likes, strict=True)
    ]


def _number(x: Any) -> Any:
    return _unshard(x) if isinstance(x, DTensor) and not x.dim() else x


def _locals(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [local_of(y) if isinstance(y, DTensor) else y for y in x]
    return local_of(x) if isinstance(x, DTensor) else x


def _redistribute_lists(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run an op on lists, of which tensors that lie otherwise are cut or redistributed as those of
    the first list. What has other shapes is left to DTensor.
    """
    likes = args[0]

    def fit(x: Any) -> Any:
        if not isinstance(x, list | tuple) or len(x) != len(likes):
            return x
        return [
            from_part(own_part(y, like), placing_of(like))
            if isinstance(y, torch.Tensor) and isinstance(like, DTensor) and y.shape == like.shape
            else y
            for y, like in zip(x, likes, strict=True)
        ]

    args, kwargs = tuple(map(fit, args)), {name: fit(x) for name, x in kwargs.items()}
    return _by_dtensor(func, args, kwargs)


# -- running them ----------------------------------------------------------------------------------
def _by_dtensor(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op as torch runs it on DTensors. Raises InputError where a plain tensor takes part."""
    swapped = []
    for x in pytree.tree_leaves((args, kwargs)):
        if type(x) is ParallelTensor:  # one that is there twice is swapped once
            _refresh(x)
            x.__class__ = DTensor  # type: ignore[assignment]
            swapped.append(x)
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise InputError(_mixed_text(func)) from None
    finally:
        for x in swapped:
            x.__class__ = ParallelTensor
    return pytree.tree_map(become_parallel, result)


def _mixed_text(func: Any) -> str:
    return (
        f"{func._schema.name.removeprefix('aten::')} has a tensor of a parallel module, of which a "
        "rank holds a part, and a plain tensor: a module within a parallel model runs with it "
        "alone, so call the parallel model; to compute with one of its tensors, take "
        "parameter.full_tensor(), which is whole and carries gradients"
    )


def _view(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return a view. Where DTensor gathered for it, so that a write would not reach the tensor, it
    remembers what it is a view of.
    """
    base = args[0]
    if not isinstance(base, ParallelTensor):
        return _by_dtensor(func, args, kwargs)
    try:
        if base._view_of is not None:
            raise NotImplementedError  # its whole is at hand
        result = _by_dtensor(func, args, kwargs)
    except InputError:
        raise
    except (NotImplementedError, RuntimeError):
        whole = func(_unshard(base), *args[1:], **kwargs)
        result = pytree.tree_map_only(torch.Tensor, lambda x: replicate(x, base), whole)
    root, steps, _ = base._view_of or (base, (), [])
    several = isinstance(result, list | tuple)
    for number, view in enumerate(result if several else [result]):
        if isinstance(view, ParallelTensor) and _memory(view) != _memory(root):
            step = func, args[1:], kwargs, number if several else None
            view._view_of = root, (*steps, step), [version_of(root)]
    return result


def _memory(x: DTensor) -> int:
    return storage_key(local_of(x))


def _refresh(view: ParallelTensor) -> None:
    """Give a gathered view the numbers that its tensor has now, where that was written since."""
    if view._view_of is None:
        return
    root, steps, version = view._view_of
    if version != [version_of(root)]:
        version[:] = [version_of(root)]
        local_of(view).copy_(own_part(_replay(_unshard(root), steps), view))


def _write(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run an op that writes into a tensor. On parts where all that it reads lies as what it writes,
    after it was cut or redistributed; else on the whole.
    """
    target: Any = args[0] if args else None
    alike = _kind(func) == "pointwise" and isinstance(target, ParallelTensor)
    if alike and target._view_of is None and not _is_partial(target):
        own = [_fit_operand(x, target) for x in args]
        if _NOT_LOCAL not in [x for x in own if not isinstance(x, torch.Tensor)]:
            func(*own, **{name: _number(x) for name, x in kwargs.items()})
            return target
    return _run_unsharded(func, args, kwargs)


def _fit_operand(x: Any, like: ParallelTensor) -> Any:
    """Return what stands for an operand where an op runs on the parts of `like`."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.shape == like.shape:
        return local_of(x) if x is like else own_part(x, like)
    if not x.dim():
        return _unshard(x) if isinstance(x, DTensor) else x
    return _NOT_LOCAL


def _run_unsharded(func: Any, args: Any, kwargs: Any, error: Exception | None = None) -> Any:
    """Run an op on whole tensors, on every rank alike; what it writes is cut and stored, what it
    returns is replicated. Collective. `error`: why DTensor did not run it.
    """
    if isinstance(error, InputError):
        raise error
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, ParallelTensor)]
    if not tensors or not isinstance(func, OpOverload):
        raise error or NotImplementedError(str(func))
    written = _targets(func, args, kwargs)
    wholes: dict[int, torch.Tensor] = {}
    roots: dict[int, tuple[ParallelTensor, torch.Tensor]] = {}
    for x in tensors:
        if id(x) in wholes:
            continue
        if any(x is target for target in written):
            root, steps, _ = x._view_of or (x, (), [])
            base = _unshard(root).clone()
            wholes[id(x)] = _replay(base, steps)
            roots[id(x)] = root, base
        else:
            wholes[id(x)] = _unshard(x)
    plain = [
        x
        for x in pytree.tree_leaves((args, kwargs))
        if isinstance(x, torch.Tensor) and x.dim() and not isinstance(x, DTensor)
    ]
    if plain and error is not None:
        raise InputError(_mixed_text(func))
    if plain and ranks.others():
        ranks.agree(
            "tensor that is written into a parallel module's", str(list(map(digest, plain)))
        )

    def unshard(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return wholes[id(x)] if id(x) in wholes else _unshard(x) if isinstance(x, DTensor) else x

    whole_args, whole_kwargs = pytree.tree_map(unshard, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    for x in written:
        _store(x, wholes[id(x)], *roots[id(x)])
    if func._schema.is_mutable:
        return written[0] if len(written) == 1 else args[0]
    like = tensors[0]

    def shard(x: torch.Tensor) -> torch.Tensor:
        if x.shape == like.shape and not _is_partial(like) and like._view_of is None:
            return become_parallel(
                from_part(own_part(x, like), fit_placing(placing_of(like), x.dtype))
            )
        return replicate(x, like)

    return pytree.tree_map_only(torch.Tensor, shard, result)


def _store(
    x: ParallelTensor, value: torch.Tensor, root: ParallelTensor, base: torch.Tensor
) -> None:
    """Write what an op has made of a whole tensor, or of a view of it, into the rank's part."""
    if value.shape != x.shape:
        raise InputError(
            f"a write would make a parallel tensor of {tuple(x.shape)} one of "
            f"{tuple(value.shape)}, and the plan is for its shape: parallelize the changed model"
        )
    local_of(root).copy_(own_part(base, root))
    if root is not x:
        assert x._view_of is not None
        local_of(x).copy_(own_part(value, x))
        x._view_of[2][:] = [version_of(root)]


def _targets(func: OpOverload, args: Any, kwargs: Any) -> list[ParallelTensor]:
    """Return the tensors that an op writes into."""
    targets = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            targets += [x for x in pytree.tree_leaves(value) if isinstance(x, ParallelTensor)]
    return targets


def _replay(base: torch.Tensor, steps: Sequence[Any]) -> torch.Tensor:
    """Return the view of a whole tensor that these steps of views give."""
    for func, rest, kwargs, pick in steps:
        base = func(base, *rest, **kwargs)
        base = base if pick is None else base[pick]
    return base


@contextmanager
def _rank_0_draws(generator: torch.Generator | None, args: Any) -> Iterator[None]:
    """Let every rank draw what rank 0 draws next, and put its generator where a draw leaves it. A
    rank whose generator stood elsewhere keeps it. Collective.
    """
    if not ranks.others():
        yield
        return
    tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, DTensor)]
    device = local_of(tensors[0]).device
    own = generator or default_generator(device)
    before = own.get_state()
    common = ranks.from_rank_0(before)
    own.set_state(common)
    try:
        yield
    finally:
        if not torch.equal(before, common):
            own.set_state(before)
            torch.rand((), device=own.device, generator=own)  # see Seed.renewed


# -- parts and wholes ------------------------------------------------------------------------------
def replicate(value: torch.Tensor, like: DTensor) -> Any:
    """Return a tensor that is the same on all ranks as a ParallelTensor on the mesh of `like`."""
    placements = [Replicate()] * like.device_mesh.ndim
    return become_parallel(DTensor.from_local(value, like.device_mesh, placements, run_check=False))


def _unshard(x: DTensor) -> torch.Tensor:
    """Return the whole tensor, detached. Collective where a rank holds a part."""
    if isinstance(x, ParallelTensor):
        _refresh(x)
    own = local_of(x).detach()
    if all(isinstance(p, Replicate) for p in x.placements):
        return own
    return cast(torch.Tensor, _plain_class(x.detach()).full_tensor()).detach()


def _plain_class(x: Any) -> Any:
    """Return an alias of the tensor that is a DTensor and nothing more, with its gradients."""
    if type(x) is not ParallelTensor:
        return x
    alias = x.view_as(x) if x.requires_grad and torch.is_grad_enabled() else x.detach()
    alias.__class__ = DTensor
    return alias


def _lies_as(x: DTensor, like: DTensor) -> bool:
    own, other = placing_of(x), placing_of(like)
    if own is other:
        return True
    return own.placements == other.placements and own.mesh == other.mesh


def _is_partial(x: DTensor) -> bool:
    return any(isinstance(p, Partial) for p in x.placements)
