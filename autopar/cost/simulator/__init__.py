"""Event-by-event simulation of a step: one compute stream, and collectives that share links.

step_events.py derives events from an emitted program, graph_events.py from the graphs that
AOTAutograd derived; engine.py simulates them under contention (cost/contention.py); timeline.py is
the result that a user sees. buckets.py decides which collectives are fused, liveness.py how many
bytes a derived graph holds.
"""
