"""Graph rewrites, in the order in which they run. A pass takes a `Program` and returns a new one;
its `check` asserts what it promises. No pass imports another.

    trace/ → annotate → chains → (the planner chooses a plan) → rewrite → hierarchy → summa →
    kernel_choice → finalize → recompute

The passes of overlap/ run later, on the forward and the backward graph that AOTAutograd derives.
"""

from autopar.ir.program import Program
from autopar.passes import finalize, hierarchy, kernel_choice, rewrite, summa
from autopar.passes.pass_manager import Pass
from autopar.world import World

# What makes one rank's graph of a program with a plan, in this order.
PIPELINE = (
    Pass("rewrite", rewrite.rewrite, rewrite.check),
    Pass("hierarchy", hierarchy.hierarchy, hierarchy.check),
    Pass("summa", summa.summa, summa.check),
    Pass("kernel_choice", kernel_choice.kernel_choice, kernel_choice.check),
    Pass("finalize", finalize.finalize, finalize.check),
)


def emit_program(program: Program, world: World) -> Program:
    """Return the graph that one rank runs by the program's plan, without recomputation.

    The planner's searches call this to compare plans; planner/planner.py runs the same passes with
    their contracts and adds `recompute`.
    """
    for step in PIPELINE:
        program = step.run(program, world)
    return program
