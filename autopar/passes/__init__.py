"""The passes: each takes a Program and returns a new one; none imports another."""

from ..program import Program
from ..world import World
from . import emit, forms, pipeline, rewrite, route


def emitted(program: Program, world: World) -> Program:
    """The graph of one rank by the program's plan, as it runs but for what runs again: for those
    who compare plans. (api.py runs the same passes with their contracts.)
    """
    made = pipeline.pipeline(route.route(rewrite.rewrite(program, world), world))
    return emit.emit(forms.forms(made, world))
