"""Graph rewrites, in the order in which they run. Each takes a `Program` and returns a new one, and
has a `check` that holds what it promises; none imports another.

trace/ → annotate → chains → (the planner chooses) → rewrite → hierarchy → summa → kernel_choice →
finalize → recompute. overlap/ has those that run on the forward and the backward that AOTAutograd
derives.
"""

from autopar.ir.program import Program
from autopar.passes import finalize, hierarchy, kernel_choice, rewrite, summa
from autopar.world import World


def emit_program(program: Program, world: World) -> Program:
    """The graph of one rank by the program's plan, as it runs but for what runs again: for those
    who compare plans. (api.py runs the same passes with their contracts.)
    """
    made = summa.summa(hierarchy.choose_hierarchies(rewrite.rewrite(program, world), world))
    return finalize.finalize(kernel_choice.choose_kernels(made, world))
