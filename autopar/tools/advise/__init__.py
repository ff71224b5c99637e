"""Plans for other tools: the best degrees within what a tool can express, as its own flags.

Example: `advise(model, world, inputs, "torchtitan").text` is a list of torchtitan's options.
search.py tries the degrees that tools.py says a tool has; tools.py writes them in its words.
"""

from autopar.tools.advise.search import Advice, advise
from autopar.tools.advise.tools import TOOLS

__all__ = ["TOOLS", "Advice", "advise"]
