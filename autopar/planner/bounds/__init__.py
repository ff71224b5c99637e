"""Bounds: what the best plan on each of many meshes takes at the least, for all of them at once.

The program becomes a factor graph (factor_graph.py) with costs of options (option_costs.py) and of
reshards between them (reshard_costs.py); message_passing.py bounds its minimum.
"""
