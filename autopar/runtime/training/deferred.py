"""A model that is planned at its first call: what `autopar.parallelize` returns without inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autopar.errors import InputError
from autopar.passes.trace.signature import NO_GENERATION

_LATER = "are known after the first call; or give `inputs` to parallelize"


class Deferred(nn.Module):
    """A model that is planned at its first call, with that call's inputs: `make` returns the
    ParallelModule, which takes its place within. `face`: what has the names that it will have.
    """

    def __init__(self, make: Callable[[Any], nn.Module], face: type[nn.Module]) -> None:
        super().__init__()
        self._make, self._face = make, face
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

    def __getattr__(self, name: str) -> Any:
        """Return what the ParallelModule has by this name, once there is one; before that raise
        InputError.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            if self.module is not None:
                return getattr(self.module, name)
            if name in ("plan", "graph", "graphs") or hasattr(self._face, name):
                raise InputError(f"the model's plan and its {name} {_LATER}") from None
            raise

    def parameters(self, recurse: bool = True) -> Any:
        if self.module is None:
            raise InputError(f"the parameters {_LATER}")
        return self.module.parameters(recurse)
