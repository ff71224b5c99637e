"""Graph rewrites, in the order in which they run. A pass takes a `Program` and returns a new one;
its `check` asserts what it promises. No pass imports another.

    trace/ → annotate → chains → (the planner chooses a plan) → rewrite → hierarchy → summa →
    kernel_choice → finalize → recompute

The passes of overlap/ run later, on the forward and the backward graph that AOTAutograd derives.
"""

from autopar.ir.program import Program
from autopar.passes import finalize, hierarchy, kernel_choice, rewrite, summa
from autopar.world import World


def emit_program(program: Program, world: World) -> Program:
    """Return the graph that one rank runs by the program's plan, without recomputation.

    The planner's searches call this to compare plans; planner/planner.py runs the same passes with
    their contracts and adds `recompute`.
    """
    rewritten = summa.summa(hierarchy.choose_hierarchies(rewrite.rewrite(program, world), world))
    return finalize.finalize(kernel_choice.choose_kernels(rewritten, world))
