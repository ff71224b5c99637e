"""Lower bounds on the step time of the best plan, on many meshes at once.

A program becomes a factor graph (factor_graph.py) with the costs of options (option_costs.py) and
of reshards between them (reshard_costs.py), as arrays over meshes (arrays.py); message_passing.py
bounds the minimum. mesh_search.py takes the bounds.
"""
