"""Operators: what may be split how, and what an emitted graph calls instead.

rules/ has the sharding rule of each op; sharded/ the ops whose reduced dim is split; collectives.py
the functions that take a value from one layout to another, over comm.py (what is sent) and
autograd.py (what is sent backward).
"""
