"""A cluster in one machine: nodes are network namespaces, their links are limited by `tc`.

python -m benchmarks.cluster --nodes 2 --ranks-per-node 2 --rate 400mbit -- python train.py
"""

from .launch import Failed, Result, launch, sent_bytes, stop_on_signals
from .network import Unavailable, limit, missing, network, remove_stale
from .shape import Shape, rate_text, read_rate, read_shape, read_shapes

__all__ = [
    "Failed",
    "Result",
    "Shape",
    "Unavailable",
    "launch",
    "limit",
    "missing",
    "network",
    "rate_text",
    "read_rate",
    "read_shape",
    "read_shapes",
    "remove_stale",
    "sent_bytes",
    "stop_on_signals",
]
