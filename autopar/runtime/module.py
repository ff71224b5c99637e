"""ParallelModule, the module that users train: their own module tree, with each rank's part of the
parameters as DTensors under their original names. A call of it runs the planned graph.

`api.apply` and `api.parallelize` make it by `parallel_module`, of a planned program, its runner and
a model with its tensors. What it needs besides the tree is in one attribute, its ParallelState.
"""

from __future__ import annotations

import copy
import itertools
import operator
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from autopar._compat import not_compiled
from autopar.errors import InputError
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.program import Program, without_autocast
from autopar.passes.trace.reuse import hand_on
from autopar.passes.trace.signature import NO_GENERATION
from autopar.runtime.backends import Backend, Overlap
from autopar.runtime.inspection import Inspection
from autopar.runtime.local_parts import ParameterParts
from autopar.runtime.training.call_graphs import CallGraphs
from autopar.runtime.training.data import Loader, RowSampler, RowShare, row_sampler
from autopar.runtime.training.initialize import init_weights
from autopar.runtime.training.inputs_watch import InputsWatch
from autopar.runtime.training.module_tree import (
    STATE,
    OriginalRoot,
    copied_tree,
    refuse_shadowed_tensors,
    shadowed_names,
)
from autopar.runtime.training.no_sync import NoSync
from autopar.runtime.training.over_stages import clip_grad_norm, unsharded_tensor
from autopar.runtime.training.pretrained import load_weights, save_pretrained
from autopar.runtime.training.runners import Runner
from autopar.runtime.training.step_graph import Seed, StepGraph
from autopar.runtime.training.step_stats import StepClock
from autopar.runtime.training.stored import StoredTensors, cut_state, own_tensors
from autopar.runtime.training.unshard import unshard
from autopar.world import ranks
from autopar.world.world import say_once


class ParallelState:
    """What a parallel module has besides its tree: the plan and its graphs, the seed, what compares
    the ranks' calls. It reads the tensors of the tree for the graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        root: OriginalRoot,
        first: StepGraph,
        graphs: Mapping[str, fx.GraphModule],
        name: str,
        options: tuple[Plan, Backend, Overlap],
        empty: Sequence[str],
    ) -> None:
        self.root, self.first, self.options = root, first, options
        self.passes = dict(graphs)
        self.seed, self.device, self.device_mesh = first.seed, first.device, first.device_mesh
        self.layouts = first.layouts_of_parameters()
        self._begin(module, name)
        self.stored = StoredTensors(module, first, self.layouts, empty)
        self.graphs = CallGraphs(module, root, self, first, self.watch, options)

    def _begin(self, module: nn.Module, name: str) -> None:
        """Start what no copy of a module shares."""
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self._places: dict[str, tuple[dict[str, Any], str]] = {}  # registries and names of tensors
        # of the names that were asked for last: the list, how each is read, and under which name
        self._names: Sequence[str] = ()
        self._getters: list[Callable[[str], torch.Tensor | None]] = []
        self._last_names: list[str] = []
        self.watch, self.copies = InputsWatch(name), itertools.count()
        self.clock, self.no_sync = StepClock(), NoSync(module)
        self.parts = ParameterParts()

    def of(self, twin: nn.Module, memo: dict[int, Any]) -> ParallelState:
        """Return the state of a copy of the module, which shares the planned graphs."""
        state = object.__new__(ParallelState)
        state.__dict__ = dict(self.__dict__)
        state.root = self.root.copied(memo)
        state._begin(twin, f"{self.watch.name}.{next(self.copies)}")
        state.stored = self.stored.of(twin)
        state.graphs = self.graphs.of(twin, state.root, state, state.watch)
        return state

    @property
    def plan(self) -> Plan:
        return self.options[0]

    # -- what graphs read --------------------------------------------------------------------------
    def tensor(self, name: str) -> torch.Tensor:
        """Return the parameter or buffer of this name; functional_call puts others there."""
        if name not in self._places:
            path, _, last = name.rpartition(".")
            module = self._modules[path]
            registry: dict[str, Any] = module._parameters
            self._places[name] = (registry if last in registry else module._buffers), last
        registry, last = self._places[name]
        value = registry.get(last)
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"{name} was taken from the model since it was parallelized: parallelize the "
                "changed model"
            )
        return value

    def tensors(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the parameters or buffers of these names."""
        if names is not self._names:
            for name in names:
                self.tensor(name)
            places = [self._places[name] for name in names]
            self._getters = [registry.get for registry, _ in places]
            self._names, self._last_names = names, [last for _, last in places]
        values = list(map(operator.call, self._getters, self._last_names))
        if not all(map(operator.is_not, values, itertools.repeat(None))):
            return [self.tensor(name) for name in names]
        return cast(list[torch.Tensor], values)

    def full_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of a parameter or buffer, of what this rank has of it.
        Collective.
        """
        return unsharded_tensor(self.first.run, self.device, name, tensor)

    def attribute(self, name: str) -> Any:
        """Return the plain attribute of a module, None where there is none of this name."""
        path, _, last = name.rpartition(".")
        module = self._modules.get(path)
        return None if module is None else module.__dict__.get(last)


class ParallelModule(Inspection, nn.Module):
    """A model that trains on all ranks of a mesh as the original trains on one. `apply` and
    `parallelize` make it: a copy of the model, whose class is a subclass of this one, too.

    >>> import autopar
    >>> x = torch.ones(4, 8)
    >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
    >>> par(x).shape, [name for name, _ in par.named_parameters()]
    (torch.Size([4, 16]), ['weight', 'bias'])

    Call it with the same global inputs on every rank: it cuts out the rank's own shards. Inputs
    that are already cut are passed as DTensors, as `shard` makes them. Every rank gets what the
    model returns, so a loss outside the model is the same on all. Planned with `outputs="sharded"`,
    it returns DTensors in place of tensors that are no scalars.

    `graph` is the rewritten forward, `graphs` has every graph by pass. A call with other shapes,
    arguments, modes or module attributes than planned is planned when it first comes, and gets a
    graph of its own on the same mesh and stored parameters. Raises RankError where ranks pass
    different inputs.
    """

    _autopar: ParallelState

    # -- its tree ----------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "device" and STATE in self.__dict__:
                return self._autopar.device
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the planned graph, which has what the user's class does in `__call__`."""
        return nn.Module.__call__(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Return a module with its own parameters and buffers, which shares the planned graphs.
        Collective, as its calls are.
        """
        state: ParallelState = self._autopar
        with state.root.restored(self) as model:
            twin: Any = copy.deepcopy(model, memo)
        memo[id(self)] = twin
        own = state.root.copied(memo)
        own.take(twin)
        twin.__dict__[STATE] = state.of(twin, memo)
        return cast(ParallelModule, twin)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise InputError: what pickle would write hangs on this process and its groups."""
        if STATE not in self.__dict__:
            return super().__reduce_ex__(protocol)
        raise InputError(
            "a ParallelModule cannot be pickled, as it belongs to the process groups of this run: "
            "save par.state_dict(), par.save_pretrained(folder) or autopar.Checkpoints, and "
            "parallelize the model anew where it is loaded"
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any
    ) -> None:
        """Cut whole tensors to this rank's parts before they are loaded."""
        cut_state(self._autopar.stored, state_dict, prefix)
        for name in self._autopar.root.elsewhere:  # other stages take their own
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Give back the memory of what `to` and its like replace."""
        self._autopar.parts.clear()
        return super()._apply(fn, recurse)

    def layout(self, name: str) -> Layout:
        """Return the stored layout of a parameter, by any of its names, with the padding that it
        has in the graph; else raise InputError.

        >>> import autopar
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
        >>> par.layout("weight").shape
        (16, 8)
        """
        if name not in self._autopar.layouts:
            raise InputError(f"no parameter {name!r}; the names are those of the original model")
        return self._autopar.layouts[name]

    def init_weights(self, fn: Callable[[nn.Module], Any] | None = None) -> None:
        """Give a model from the meta device the first numbers that it would have on one device.
        Each rank holds only its own shards of them. Collective.

        Every module's reset_parameters is called, then transformers' own initialization, then `fn`
        as by nn.Module.apply. All is drawn from torch's CPU generator of rank 0. What has numbers
        already stays as it is. Raises InputError for what nothing initializes.

        >>> import autopar
        >>> with torch.device("meta"):
        ...     model, x = nn.Linear(8, 16), torch.ones(4, 8)
        >>> par = autopar.parallelize(model, 1, (x,))
        >>> par.init_weights()
        >>> bool(par.get_parameter("weight").abs().max() < 1)
        True
        """
        init_weights(self._autopar.graphs.bare_model(), fn, self._autopar.stored)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Read the weights from safetensors files as transformers writes them, or from a folder of
        torch.distributed.checkpoint. Each rank reads its own parts alone. Collective. Raises
        InputError where something is missing or has another shape; nothing has changed then.

        >>> import autopar, tempfile
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> par.save_pretrained(folder := tempfile.mkdtemp())
        >>> par.load_weights(folder)
        """
        prefix = getattr(self, "base_model_prefix", "")
        load_weights(path, self._autopar.stored, prefix if isinstance(prefix, str) else "")

    def save_pretrained(
        self, folder: str | os.PathLike[str], file_bytes: float = 5e9, **others: Any
    ) -> None:
        """Write the weights as transformers does, safetensors under the names of the original with
        its config, in files of at most `file_bytes`. A rank holds one file at a time. Collective.

        >>> import autopar, os, tempfile
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> par.save_pretrained(folder := tempfile.mkdtemp())
        >>> os.listdir(folder)
        ['model.safetensors']

        Raises InputError for other options of transformers' own.
        """
        if others:
            raise InputError(
                f"save_pretrained of a parallel model has no {', '.join(others)}: every rank calls "
                "it, with a folder and file_bytes. Under transformers' Trainer, make yours of "
                "autopar.ParallelTrainer, which does so"
            )
        state = self._autopar
        with state.root.restored(self):  # with the parameters of other stages, too
            tensors = state.stored.each()
        save_pretrained(
            folder, tensors, state.full_tensor, getattr(self, "config", None), file_bytes
        )

    def unshard(
        self, rank: int | None = None, device: torch.device | str | None = None
    ) -> nn.Module | None:
        """Return an ordinary module of the user's class, with the numbers that the parallel one has
        now: for `generate`, export, and whatever else wants a model on one device. Collective.

        - `rank`: the only rank that gets it; the others get None and hold one whole tensor at a
          time. None: every rank gets one.
        - `device`: where its tensors are, None for the rank's own device.

        The two share nothing. Raises InputError where a tensor has no numbers yet.

        >>> import autopar
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> model = par.unshard()
        >>> type(model).__name__, type(model.weight).__name__
        ('Linear', 'Parameter')
        """
        self._autopar.stored.has_numbers()
        place = self._autopar.device if device is None else torch.device(device)
        return unshard(self, self._autopar.root, self._autopar.full_tensor, rank, place)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients such that their joint norm is at most `max_norm`, and return the norm
        before. Collective.

        Without pipeline stages `torch.nn.utils.clip_grad_norm_` does the same; with stages it would
        see the gradients of one stage alone.

        >>> import autopar
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> par(torch.ones(4, 8)).sum().backward()
        >>> par.clip_grad_norm_(1.0).item() > 1.0
        True
        """
        run = self._autopar.first.run
        return clip_grad_norm(run, self.named_parameters(), max_norm, norm_type)

    @property
    def seed(self) -> int:
        """The seed of the next random numbers, the same on all ranks. It moves on with every call
        that draws or drops something, and starts anew after torch.manual_seed, from rank 0's seed.

        >>> import autopar
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> par.seed = 7
        >>> par.seed
        7
        """
        return self._autopar.seed.value

    @seed.setter
    def seed(self, value: int) -> None:
        self._autopar.seed.put(value)

    # -- its inputs --------------------------------------------------------------------------------
    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """Return the rank's own part of a global batch, as DTensors in the same structure: (args,
        kwargs), or the argument alone where there is one. Raises InputError as a call does.

        >>> import autopar
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
        >>> par.shard(x).shape  # a world of one rank keeps all of it
        torch.Size([4, 8])
        """
        graph, bound = self._autopar.graphs.graph_for(args, kwargs)
        args, kwargs = graph.shard(bound.leaves)
        return args[0] if len(args) == 1 and not kwargs else args if not kwargs else (args, kwargs)

    def rows(self, count: int | None = None) -> slice:
        """Return which rows of a global batch of `count` rows (None: the planned number) this rank
        computes with; all of them if they are not split.

        >>> import autopar
        >>> autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),)).rows()
        slice(0, 4, None)
        """
        share = RowShare(self._autopar.first)
        return share.rows(share.batch if count is None else count)

    def sampler(
        self,
        dataset: Sized,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> RowSampler:
        """Return the `batch_sampler` of a DataLoader of your own: it yields the rows of a dataset
        that this rank reads. `loader` makes both. Collective. Raises RankError if ranks ask for
        different rows.

        >>> import autopar
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> list(par.sampler(torch.ones(10, 8)))
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

        `batch_size`: rows of the global batch, None for the planned number. `shuffle`: another
        order in every epoch, which `seed` decides. `drop_last`: leave an incomplete batch out.
        """
        return row_sampler(self._autopar.first, dataset, batch_size, shuffle, seed, drop_last)

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        buckets: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        pad: Any = None,
        **options: Any,
    ) -> Loader:
        """Return a DataLoader that yields DTensors of the global batch, while each rank reads only
        its own rows. Collective. `options` are those of torch's DataLoader, such as num_workers and
        collate_fn; the others are those of `sampler`.

        >>> import autopar
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> rows = torch.utils.data.TensorDataset(torch.ones(10, 8))
        >>> [par(x).shape[0] for (x,) in par.loader(rows)]
        [4, 4, 2]

        `buckets=(512, 1024), lengths=[…], pad={"ids": 0, "labels": -100}` pads the sequences of a
        batch to the smallest bucket that holds them, so each bucket has one graph. `lengths` has
        the length of every row's sequence; `pad` has the number to fill up with, in the structure
        of a sample, and None for what is not padded.

        Raises RankError where ranks ask for other rows, InputError where no bucket holds a row.
        """
        sampler = row_sampler(
            self._autopar.first,
            cast(Sized, dataset),
            batch_size,
            shuffle,
            seed,
            drop_last,
            (buckets, lengths, pad),
        )
        return Loader(
            DataLoader(sampler.dataset(dataset), batch_sampler=sampler, **options), sampler
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards leave gradients unsummed across ranks, for
        accumulation over several calls: each rank holds Partial DTensors until the next backward
        outside the context sums them. Every rank enters it. A gradient whose sum is not the last
        step of its backward is summed in every call.

        >>> import autopar
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
        >>> with par.no_sync():
        ...     par(x).sum().backward()
        >>> par(x).sum().backward()
        """
        return self._autopar.no_sync.deferred()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        graph, values = self._checked_values(args, kwargs)
        if not graph.autocast:
            return self._outputs(graph, graph.run(*values))
        with without_autocast(graph.autocast):  # the casts are nodes of the graph
            results = graph.run(*values)
        return self._outputs(graph, results)

    @not_compiled
    def _outputs(self, graph: StepGraph, results: Any) -> Any:
        self._autopar.no_sync.after(graph)
        return graph.outputs(results, self._autopar)

    @not_compiled  # torch.compile of this module would trace all of it, for minutes
    def _checked_values(self, args: Any, kwargs: Any) -> tuple[StepGraph, list[Any]]:
        """Return the graph for a call and the values of its placeholders, after the check that no
        rank refuses its own inputs and, from time to time, that all ranks pass the same ones.
        """
        state: ParallelState = self._autopar
        try:
            state.stored.has_numbers()
            graph, bound = state.graphs.graph_for(args, kwargs)
            if graph.draws and state.seed.renewed():
                state.watch.agree("a call after torch.manual_seed")
                state.seed.start(ranks.from_rank_0(torch.initial_seed()))
            if (records := torch.is_grad_enabled()) not in graph.modes:
                state.watch.agree(f"a call {'with' if records else 'without'} gradients")
                graph.modes.add(records)
            values = graph.values(bound, state)
        except Exception as error:
            state.watch.count_call((), error)
            raise
        inputs = (bound.leaves[e.position] for e in graph.user_inputs if e.position is not None)
        tensors = (x for x in inputs if isinstance(x, torch.Tensor))
        state.watch.count_call([x for x in tensors if not isinstance(x, DTensor)])
        state.no_sync.before(graph)
        if graph is state.first and torch.is_grad_enabled():
            state.clock.count()
        return graph, values

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Raise InputError: DistributedDataParallel asks for this while it wraps a model."""
        raise InputError(
            "a parallel model was given to DistributedDataParallel, which would sum its gradients "
            "once more: train it as it is. Under transformers' Trainer, make yours of "
            "autopar.ParallelTrainer; under Accelerate, call autopar.prepare in the place of "
            "accelerator.prepare"
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError: a plan is for training steps, all of one shape."""
        raise InputError(NO_GENERATION)


def parallel_module(
    model: nn.Module,
    graphs: Mapping[str, fx.GraphModule],
    runner: Runner,
    device: torch.device,
    tensors: Mapping[str, torch.Tensor],
    seed: int,
    number: int,
    options: tuple[Plan, Backend, Overlap],
) -> ParallelModule:
    """Return the parallel module of a model, whose planned graph `runner` runs.
    `tensors`: the model's, by the names of the program. `number`: tells modules apart. Raises
    PlanError where a tensor of the model has a name that a ParallelModule needs for itself.
    """
    program, run, device_mesh = runner
    names = [entry.target for entry in program.signature.inputs if entry.target in tensors]
    refuse_shadowed_tensors(names, ParallelModule)
    plan = options[0]
    coordinate = plan.mesh.coordinate(ranks.rank() % max(1, plan.mesh.size))
    first = StepGraph(program, run, device_mesh, coordinate, device, Seed(seed, device), tensors)
    elsewhere = parameters_elsewhere(plan, program)
    own = own_tensors(model, first, tensors, elsewhere)
    module: Any = copied_tree(model, own)
    hand_on(model, module)
    shadowed = shadowed_names(module, ParallelModule)
    if shadowed and not ranks.rank():
        say_once(
            f"a parallel module has its own {', '.join(shadowed)}: what "
            f"{type(model).__name__} means by that is had from the original model"
        )
    if elsewhere and not ranks.rank():
        say_once(
            "every rank holds the parameters of its own stages: clip gradients with "
            "par.clip_grad_norm_(max_norm), as torch's function sees those of one stage alone"
        )
    root = OriginalRoot(module, ParallelModule, elsewhere)
    empty = first.empty(tensors)
    state = ParallelState(module, root, first, graphs, str(number), options, empty)
    module.__dict__[STATE] = state
    unseen = state.graphs.incomparable()
    if unseen and not ranks.rank():
        say_once(
            f"forward reads {', '.join(unseen)}, and a change inside of it is not seen by a "
            "parallel module: put another object in its place, or keep what changes in numbers, "
            "tensors, lists or dicts"
        )
    return cast(ParallelModule, module)


def parameters_elsewhere(plan: Plan, program: Program) -> tuple[str, ...]:
    """Return the names of the parameters that other stages of a pipeline hold, and not this rank's:
    those of the planned program that this rank's has not.
    """
    if not plan.stage_starts:
        return ()
    assert plan.context is not None
    own = {entry.node for entry in program.signature.inputs}
    entries = (e for e in plan.context.program.signature.inputs if e.kind == "parameter")
    return tuple(name for e in entries if e.node not in own for name in e.names or (e.target,))


NUMBERS = itertools.count()  # numbers the modules of this process
