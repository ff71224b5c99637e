"""Lower bounds of a step on many meshes at once: factor_graph.py has what is to be decided,
option_costs.py and reshard_costs.py what it costs, messages.py bounds the minimum.
"""
