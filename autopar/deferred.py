"""A model that waits for its first batch."""

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
        self.made: nn.Module | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._planned(args, kwargs)(*args, **kwargs)

    def timeline(self, *args: Any, **kwargs: Any) -> Any:
        """See ParallelModule.timeline; counts as the first call."""
        return self._planned(args, kwargs).timeline(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raises InputError, as that of a ParallelModule does."""
        raise InputError(NO_GENERATION)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.made is None:
            if args and kwargs:
                raise InputError(
                    "the first call takes all inputs by position or all by name; or give `inputs` "
                    "to parallelize"
                )
            self.made = self._make(kwargs or args)
        return self.made

    def parameters(self, recurse: bool = True) -> Any:
        if self.made is None:
            raise InputError(
                "the parameters are known after the first call; or give `inputs` to parallelize"
            )
        return self.made.parameters(recurse)
