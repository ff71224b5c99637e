"""From a model to a graph: torch.export, with a refusal for what a graph would silently lose.

trace.py is the pass; export.py calls torch.export, simplify.py takes out what computes nothing,
side_effects.py, hooks.py and snapshot.py find what calls do besides computing.
"""
