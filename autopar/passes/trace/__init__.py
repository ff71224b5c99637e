"""From a model to a graph: torch.export, which refuses what a graph would silently lose.

trace.py is the pass. export.py calls torch.export and explains its failures, simplify.py removes
ops that compute nothing, signature.py binds calls to the planned arguments, and side_effects.py,
hooks.py and snapshot.py find what a call of the model does besides computing its result.
"""
