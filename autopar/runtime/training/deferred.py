"""A model that is planned at its first call, with that call's inputs.

`autopar.parallelize(model)` without inputs returns one; a ParallelModule takes its place within.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autopar.errors import InputError
from autopar.passes.trace.signature import NO_GENERATION


class Deferred(nn.Module):
    """A model that is planned at its first call, with that call's inputs."""

    def __init__(self, make: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self._make = make
        self.module: nn.Module | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._plan_once(args, kwargs)(*args, **kwargs)

    def timeline(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ParallelModule.timeline does; it counts as the first call."""
        return self._plan_once(args, kwargs).timeline(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError, as a ParallelModule does."""
        raise InputError(NO_GENERATION)

    def _plan_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.module is None:
            if args and kwargs:
                raise InputError(
                    "the first call takes all inputs by position or all by name; or give `inputs` "
                    "to parallelize"
                )
            self.module = self._make(kwargs or args)
        return self.module

    def parameters(self, recurse: bool = True) -> Any:
        if self.module is None:
            raise InputError(
                "the parameters are known after the first call; or give `inputs` to parallelize"
            )
        return self.module.parameters(recurse)
