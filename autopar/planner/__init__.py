"""The planner: a `PlanRequest` and a traced program enter, a `Plan` leaves (planner.py).

constraint.py and named_layouts.py say what a layout asks; mesh_search.py goes through meshes by
bounds on their cost (bounds/); exact_search.py finds the best plan on one mesh; memory_search.py
and overlap_search.py go on to plans that fit the memory, and to plans that hide more communication.
"""
