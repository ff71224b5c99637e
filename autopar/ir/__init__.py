"""The intermediate representation: what every pass reads and writes.

A `Program` (program.py) is a traced graph with its annotations and, once chosen, its `Plan`
(plan.py). A plan gives each value a `Layout` (layout.py) on a `Mesh` (mesh.py): one state an axis,
I, R, P or S. An `OpShardingRule` (sharding_rule.py) says how an op may be split, a `Strategy`
(strategy.py) is one such split, and `reshard_steps` (reshard.py) leads from one layout to another.
"""
