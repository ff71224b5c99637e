"""The planner: a `PlanRequest` and a program enter, a `Plan` leaves (planner.py).

constraint.py and named_layouts.py say what a layout asks; mesh_search.py goes through meshes by
bounds on their cost (bounds/); exact_search.py finds the best plan on one mesh; memory_search.py
and
overlap_search.py look on for plans that fit, and for plans that hide more communication.
"""
