"""What bound.py bounds: factor_graph.py has what is to be decided, option_costs.py and
reshard_costs.py what it costs on many meshes at once.
"""
