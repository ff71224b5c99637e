"""What a parallel module answers about itself: its graph as text, what passes changed, how training
goes beside the plan, a measured step.

`ParallelModule` inherits this class; ir/show.py, step_stats.py and profiler.py hold the answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import fx

from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ir.show import difference, listing
from autopar.runtime.profiler import MeasuredStep
from autopar.runtime.training.step_graph import timelines
from autopar.runtime.training.step_stats import StepStats, stats

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule


class Inspection:
    """The questions that people ask a parallel module; see the module docstring."""

    @property
    def plan(self) -> Plan:
        """The plan that it runs."""
        return cast("ParallelModule", self)._autopar.plan

    @property
    def graph(self) -> fx.GraphModule:
        """The rewritten forward graph."""
        return cast("ParallelModule", self)._autopar.first.program.module

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graph after every pass, by the name of the pass."""
        return cast("ParallelModule", self)._autopar.passes

    def listing(self, pattern: str = "", fold: bool = True, phase: str = "") -> str:
        """Return the rewritten graph as people read it: a line a node, with its dtype, a rank's
        shape and the whole one, and its state on every axis; equal blocks are folded into the
        first.

        `pattern`: only this subgraph or module. `phase`: "forward" or "backward", the graph that
        runs, as it was derived and scheduled at the first step: where each collective is issued,
        with its bytes, and where it is waited for. Raises PlanError where `pattern` names nothing,
        and for a phase that has no graph.

        >>> import autopar, torch
        >>> par = autopar.parallelize(torch.nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> print(par.listing("linear"))
           linear = linear(input_1, p_weight, p_bias)   # float32 4×16
        <BLANKLINE>
        """
        module = self.graph if not phase else self._graph_of_phase(phase)
        return listing(module, pattern, shapes=True, fold=fold and not pattern)

    def _graph_of_phase(self, phase: str) -> fx.GraphModule:
        """Return the graph that runs in a phase of a step. Raises PlanError where there is none."""
        run = cast("ParallelModule", self)._autopar.first.run
        module = getattr(run, phase, None) if phase in ("forward", "backward") else None
        if not isinstance(module, fx.GraphModule):
            raise PlanError(
                f"there is no scheduled graph {phase!r}: there are 'forward' and 'backward' after "
                "the first step of a module on several ranks whose plan overlaps"
            )
        return module

    def diff(self, before: str, after: str) -> str:
        """Return what changed between the graphs of two passes, "-" what was and "+" what is; ""
        where nothing did. `par.graphs` has their names. Raises PlanError for another name.

        >>> import autopar, torch
        >>> par = autopar.parallelize(torch.nn.Linear(8, 16), 1, (torch.ones(4, 8),))
        >>> par.diff("trace", "trace")
        ''
        """
        unknown = [name for name in (before, after) if name not in self.graphs]
        if unknown:
            raise PlanError(f"there is no graph {unknown[0]!r}: there are {', '.join(self.graphs)}")
        return difference(self.graphs[before], self.graphs[after])

    def stats(self) -> StepStats | None:
        """Return seconds of a step, tokens/s, utilisation and peak memory since the last look,
        beside those of the plan; None before the second step. On GPUs it waits for all that runs.

        >>> import autopar, torch
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(torch.nn.Linear(8, 16), 1, (x,))
        >>> [par(x).sum().backward() for _ in range(4)] and par.stats().steps
        3
        """
        state = cast("ParallelModule", self)._autopar
        return stats(self.plan, state.clock, state.device)

    def timeline(self, *args: Any, **kwargs: Any) -> MeasuredStep:
        """Return how a step on these inputs runs on this rank, forward and backward: every op,
        every collective with its node and bytes, every wait, in seconds; `save(path)` writes it for
        Perfetto.

        >>> import autopar, torch
        >>> x = torch.ones(4, 8)
        >>> par = autopar.parallelize(torch.nn.Linear(8, 16), 1, (x,))
        >>> par.timeline(x).seconds > 0
        True

        Collective, on gloo; some steps are run, but gradients and buffers are left as they are. The
        backward is that of the first scalar that the model returns, else of all that it returns.
        Raises InputError as a call does, PlanError where another backend runs it, or on GPUs.
        """
        return timelines(cast("ParallelModule", self), 1, args, kwargs)[0]

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()
