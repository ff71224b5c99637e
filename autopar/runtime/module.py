"""ParallelModule, the module that users train: it holds the rank's part of the parameters, as
DTensors under their original names, and runs the planned graph.

`api.apply` and `api.parallelize` make it of a planned program, its runner and a model's tensors.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from autopar._compat import not_compiled
from autopar.errors import InputError, PlanError
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.program import Program, without_autocast
from autopar.passes.trace.signature import NO_GENERATION
from autopar.runtime.inspection import Inspection
from autopar.runtime.training.data import Loader, RowSampler, RowShare, row_sampler
from autopar.runtime.training.initialize import init_weights
from autopar.runtime.training.inputs_watch import InputsWatch
from autopar.runtime.training.no_sync import NoSync
from autopar.runtime.training.other_calls import OtherCalls
from autopar.runtime.training.parts import hold, own_tensors
from autopar.runtime.training.pretrained import load_weights, save_pretrained
from autopar.runtime.training.step_graph import Seed, StepGraph
from autopar.runtime.training.step_stats import StepClock
from autopar.runtime.training.stored import StoredTensors, cut_state
from autopar.world import ranks

_RESERVED_NAMES = ("graph", "graphs", "plan")


class ParallelModule(Inspection, nn.Module):
    """A model that trains on all ranks of a mesh as the original trains on one. `apply` and
    `parallelize` make it.

    >>> import autopar
    >>> x = torch.ones(4, 8)
    >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
    >>> par(x).shape, [name for name, _ in par.named_parameters()]
    (torch.Size([4, 16]), ['weight', 'bias'])

    Call it with the same global inputs on every rank: it cuts out the rank's own part. Parts that
    are already cut are passed as DTensors, as `shard` makes them. It returns what the model
    returns, on every rank: a loss outside the model is computed on every rank alike, and its
    backward starts from the same gradients. Planned with `outputs="sharded"`, it returns DTensors
    of the rank's own parts in place of tensors that are no scalars.

    `graph` is the rewritten forward, `graphs` has every graph by pass. A call in another mode, with
    other shapes or other arguments than planned gets a graph of its own, planned at the first such
    call, on the same mesh and the same stored parameters. RankError is raised where ranks pass
    different inputs.
    """

    def __init__(
        self,
        program: Program,
        graphs: Mapping[str, fx.GraphModule],
        device_mesh: DeviceMesh | None,
        rank: int,
        seed: int,
        order: Sequence[str],
        run: Callable[..., Any] | None = None,
        number: int = 0,
        *,
        others: OtherCalls,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        assert program.plan is not None
        self.plan: Plan = program.plan
        self.graph: fx.GraphModule = program.module
        self.graphs = dict(graphs)
        self._device, self._device_mesh = device, device_mesh
        self._coordinate = program.plan.mesh.coordinate(rank)
        self._layouts = program.layouts
        run = program.module if run is None else run
        self._seed, self._watch = Seed(seed, device), InputsWatch(str(number))
        self._first = StepGraph(program, run, device_mesh, self._coordinate, device, self._seed)
        self._others = others
        others.begin(self._first, self._watch)
        self._layout_of = self._first.layouts_of_parameters()
        named = dict(own_tensors(self, self._first, tensors))
        self._take(named)
        for name, part in others.parts():
            self.add_module(name, part)
        for name in sorted(named, key=list(order).index):  # optimizer states follow this order
            hold(self, name, *named[name])
        place = self._coordinate, device, device_mesh
        self._stored = StoredTensors(self, self._layout_of, *place, self._first.empty(tensors))
        self.register_load_state_dict_pre_hook(cut_state)
        self._copies, self._clock = itertools.count(), StepClock()
        self._no_sync = NoSync(self)
        self.train(program.signature.training)

    # -- its tensors -------------------------------------------------------------------------------
    def _take(self, names: Iterable[str]) -> None:
        """Raise PlanError where the model has a name that this module needs for itself."""
        for name in names:
            root = name.split(".")[0]
            if hasattr(ParallelModule, root) or root in _RESERVED_NAMES:
                raise PlanError(
                    f"a ParallelModule has its own {root!r}: rename {name} in the model"
                )

    def __getattr__(self, name: str) -> Any:
        """Return what the original has by this name where that says the same here: its config and
        other plain values. Raises AttributeError for methods, which would run without the ranks.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_others" not in self.__dict__:
                raise
            if name == "device":
                return self._device
            return self._others.attribute(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Return a module with its own parameters and buffers, which shares the planned graphs.
        Collective, as its calls are.
        """
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__ = {  # hooks are its own: one registered on the twin is not this module's
            name: copy.copy(value) if isinstance(value, dict) else value
            for name, value in self.__dict__.items()
        }
        for registry in ("_parameters", "_buffers", "_modules"):
            shared = {"graph": self.graph} if registry == "_modules" else {}
            own = {k: v for k, v in self.__dict__[registry].items() if k not in shared}
            twin.__dict__[registry] = {**copy.deepcopy(own, memo), **shared}
        twin._load_state_dict_pre_hooks.clear()  # torch binds them to the module they were made for
        twin.register_load_state_dict_pre_hook(cut_state)
        twin._stored = self._stored.of(twin)
        twin._copies, twin._clock = itertools.count(), StepClock()
        twin._no_sync = NoSync(twin)
        twin._watch = InputsWatch(f"{self._watch.name}.{next(self._copies)}")
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise InputError: what pickle would write hangs on this process and its groups."""
        raise InputError(
            "a ParallelModule cannot be pickled, as it belongs to the process groups of this run: "
            "save par.state_dict(), par.save_pretrained(folder) or autopar.Checkpoints, and "
            "parallelize the model anew where it is loaded"
        )

    def layout(self, name: str) -> Layout:
        """Return the stored layout of a parameter, by any of its names; else raise InputError.

        >>> import autopar
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
        >>> par.layout("weight").shape
        (16, 8)
        """
        if name not in self._layout_of:
            raise InputError(f"no parameter {name!r}; the names are those of the original model")
        return self._layout_of[name]

    def init_weights(self, fn: Callable[[nn.Module], Any] | None = None) -> None:
        """Give a model from the meta device its first numbers: those that it would have had on one
        device, of which each rank holds its own parts alone. Collective.

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
        init_weights(self._others.bare_model(), fn, self._stored)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Read the weights from safetensors files as transformers writes them, or from a folder of
        torch.distributed.checkpoint. Each rank reads its own parts alone. Collective. Raises
        InputError where something is missing or has another shape; nothing has changed then.

        >>> import autopar, tempfile
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> par.save_pretrained(folder := tempfile.mkdtemp())
        >>> par.load_weights(folder)
        """
        load_weights(path, self._stored, self._others.prefix())

    def save_pretrained(self, folder: str | os.PathLike[str], file_bytes: float = 5e9) -> None:
        """Write the weights as transformers does, safetensors under the names of the original with
        its config, in files of at most `file_bytes`. A rank holds one file at a time. Collective.

        >>> import autopar, os, tempfile
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> par.save_pretrained(folder := tempfile.mkdtemp())
        >>> os.listdir(folder)
        ['model.safetensors']
        """
        save_pretrained(folder, self._stored.each(), self._others.config(), file_bytes)

    @property
    def seed(self) -> int:
        """The seed of the next dropout, the same on all ranks. It moves on with every call that
        drops something, and starts anew after torch.manual_seed, from rank 0's seed.

        >>> import autopar
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> par.seed = 7
        >>> par.seed
        7
        """
        return self._seed.value

    @seed.setter
    def seed(self, value: int) -> None:
        self._seed.put(value)

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
        graph, leaves = self._graph_for(args, kwargs)
        args, kwargs = graph.shard(leaves)
        return args[0] if len(args) == 1 and not kwargs else args if not kwargs else (args, kwargs)

    def rows(self, count: int | None = None) -> slice:
        """Return which rows of a global batch this rank computes with by the plan, of `count` rows,
        None for the planned number. All of them where they cannot be divided.

        >>> import autopar
        >>> autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),)).rows()
        slice(0, 4, None)
        """
        share = RowShare(self._first)
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
        """Return what chooses the rows of a dataset that this rank reads: the `batch_sampler` of a
        DataLoader of your own. `loader` makes both. Collective. Raises RankError where ranks ask
        for other rows.

        >>> import autopar
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> list(par.sampler(torch.ones(10, 8)))
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

        `batch_size`: rows of the global batch, None for the planned number. `shuffle`: another
        order in every epoch, which `seed` decides. `drop_last`: leave an incomplete batch out.
        """
        return row_sampler(self._first, dataset, batch_size, shuffle, seed, drop_last)

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
        """Return a DataLoader of which each rank reads its own rows alone, and which gives DTensors
        of the global batch. Collective. `options` are those of torch's DataLoader, such as
        num_workers and collate_fn; the others are those of `sampler`.

        >>> import autopar
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> rows = torch.utils.data.TensorDataset(torch.ones(10, 8))
        >>> [par(x).shape[0] for (x,) in par.loader(rows)]
        [4, 4, 2]

        Sequences of many lengths are padded to the smallest of `buckets` that holds those of their
        batch, so that each bucket has one graph. `lengths` has the length of the sequence in every
        row, `pad` the number to fill up with in the place of every sequence of a sample, None for
        what is not padded: `buckets=(512, 1024), lengths=[…], pad={"ids": 0, "labels": -100}`.

        Raises RankError where ranks ask for other rows, InputError where no bucket holds a row.
        """
        sampler = row_sampler(
            self._first,
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
        """Return a context in which backwards leave gradients unsummed across ranks: each rank
        holds its own, as Partial DTensors, until the next backward outside sums them with its own.
        For accumulation over several calls; every rank enters it. Gradients that cannot wait, as
        their sum is no last step of the backward, are summed as ever.

        >>> import autopar
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(nn.Linear(8, 16), 1, (x,))
        >>> with par.no_sync():
        ...     par(x).sum().backward()
        >>> par(x).sum().backward()
        """
        return self._no_sync.deferred()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        graph, values = self._checked_values(args, kwargs)
        if not graph.autocast:
            return self._outputs(graph, graph.run(*values))
        with without_autocast(graph.autocast):  # the casts are nodes of the graph
            results = graph.run(*values)
        return self._outputs(graph, results)

    @not_compiled
    def _outputs(self, graph: StepGraph, results: Any) -> Any:
        self._no_sync.after(graph)
        return graph.outputs(results, self)

    @not_compiled  # torch.compile of this module would trace all of it, for minutes
    def _checked_values(self, args: Any, kwargs: Any) -> tuple[StepGraph, list[Any]]:
        """Return the graph for a call and the values of its placeholders, after the check that no
        rank refuses its own inputs and, from time to time, that all ranks pass the same ones.
        """
        try:
            self._stored.has_numbers()
            graph, leaves = self._graph_for(args, kwargs)
            if graph.draws and self._seed.renewed():
                self._watch.agree("a call after torch.manual_seed")
                self._seed.start(ranks.from_rank_0(torch.initial_seed()))
            values = graph.values(leaves, self)
        except Exception as error:
            self._watch.count_call((), error)
            raise
        inputs = (leaves[e.position] for e in graph.user_inputs if e.position is not None)
        self._watch.count_call([x for x in inputs if not isinstance(x, DTensor)])
        self._no_sync.before(graph)
        if graph is self._first and torch.is_grad_enabled():
            self._clock.count()
        return graph, values

    def _graph_for(self, args: Any, kwargs: Any) -> tuple[StepGraph, list[Any]]:
        """Return the graph that runs such a call, which is planned where there is none yet, and the
        leaves of the call in its order.
        """
        leaves = self._first.bind(args, kwargs, self.training)
        if leaves is not None:
            return self._first, leaves
        return self._others.graph_for(args, kwargs, self)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError: a plan is for training steps, all of one shape."""
        raise InputError(NO_GENERATION)


NUMBERS = itertools.count()  # numbers the modules of this process
