"""What people read: the table of a plan, the listing of a graph.

>>> import autopar, torch
>>> par = autopar.parallelize(torch.nn.Linear(8, 16), 1, (torch.ones(4, 8),))
>>> "linear(input_1, p_weight, p_bias)" in autopar.report.listing(par.graph)
True
"""

from autopar.ir.graph import listing

__all__ = ["listing"]
