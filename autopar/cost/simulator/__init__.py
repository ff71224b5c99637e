"""A step simulated event by event: one compute stream, and collectives that share links.

step_events.py makes events of an emitted program, graph_events.py of the graphs that AOTAutograd
derived; engine.py plays them on links.py; timeline.py says what a user sees of it.
"""
