"""The planner: a model and a `PlanRequest` enter, a `Plan` leaves. Begin with planner.py, which
traces the model and says what may be split how.

The rest is a funnel; each stage takes what the one before leaves, in a file of its name:

    space.py     the meshes that a layout allows, with its rules (named_layouts.py, constraint.py)
    bound.py     seconds that no plan on a mesh is below (bounds/)
    solve.py     exact decisions on the most promising meshes (exact_search.py, elimination.py)
    simulate.py  contenders in order of a step with communication under computation
    fit.py       the fastest that fits the memory (rematerialize.py, rungs.py, small_models.py)
    confirm.py   the graph of one rank, with its exact memory and step
"""
