"""What a user can get wrong. Each error says what and where, the sizes, and what to do."""


class AutoparError(ValueError):
    """Anything that autopar refuses to do because of what it was given; the parent of the others.

    >>> import autopar
    >>> try:
    ...     autopar.World.of(0)
    ... except autopar.AutoparError as error:
    ...     print(f"{type(error).__name__}: {error}")
    WorldError: a world of 0 ranks: at least 1 is needed
    """


class TraceError(AutoparError):
    """The model cannot be captured as one graph. `plan`, `parallelize` and `verify` raise it.

    >>> import autopar, torch
    >>> autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 7),))
    Traceback (most recent call last):
    autopar.errors.TraceError: Linear cannot be one graph: RuntimeError: a and b must have same ...
    """


class PlanError(AutoparError):
    """No plan meets the request: a layout, a mesh or a memory limit does not fit the model; or a
    plan is asked for something that it cannot know, such as the formulas of a plan from a file.

    >>> import autopar, torch
    >>> autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), memory=100)
    Traceback (most recent call last):
    autopar.errors.PlanError: no plan fits 98 bytes (100 bytes less 2 bytes for kernels) on each ...
    """


class LayoutError(AutoparError):
    """A layout or a mesh is malformed, or two of its parts contradict each other.

    >>> import autopar, torch
    >>> autopar.plan(torch.nn.Linear(8, 16), 4, (torch.ones(4, 8),), autopar.Grid4D(x=3))
    Traceback (most recent call last):
    autopar.errors.LayoutError: Grid4D(x=3, y=1, z=1, data=1) is for 1 · 1 · 3 · 1 = 3 ranks, ...
    """


class WorldError(AutoparError):
    """The description of the hardware is malformed, or does not match what is running.

    >>> import autopar
    >>> autopar.World.preset("dgx-h100", ranks=12)
    Traceback (most recent call last):
    autopar.errors.WorldError: dgx-h100 has 8 ranks a node: 12 ranks fill no whole number of ...
    """


class InputError(AutoparError):
    """Inputs are no arguments of the model, or not what a rank of the plan can take.

    >>> import autopar, torch
    >>> model = autopar.parallelize(torch.nn.Linear(8, 16), 1, (torch.ones(4, 8),))
    >>> model(torch.ones(4, 8), torch.ones(4, 8))
    Traceback (most recent call last):
    autopar.errors.InputError: Linear: too many positional arguments; it is called as forward...
    """


class VerificationError(AutoparError):
    """The distributed program does not compute what the original model computes: a layout, a rule
    or an edited plan is wrong, or `tolerance` is below the rounding of float64.

    >>> import autopar, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    >>> autopar.verify(model, 4, (torch.randn(4, 8),), "megatron", tolerance=1e-30)
    Traceback (most recent call last):
    autopar.errors.VerificationError: the first wrong node is linear_default...
    """


class RankError(AutoparError):
    """The ranks disagree about something on which all must agree, such as the shapes of a batch, or
    one of them failed or stays away. All ranks raise it, and it names the ranks that differ.

    >>> import torch
    >>> from autopar.ir.mesh import Mesh
    >>> from autopar.ops import collectives
    >>> from autopar.runtime import lockstep
    >>> def step(rank):  # rank 1 leaves out the sum
    ...     return rank or collectives.all_reduce(torch.ones(1), "x", "x2")
    >>> lockstep.run(Mesh.parse("x2"), step)
    Traceback (most recent call last):
    autopar.errors.RankError: rank 1 has ended, but rank 0 waits in all-reduce ...
    """
