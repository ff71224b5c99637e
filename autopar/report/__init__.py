"""What people read: the table of a plan, the listing of a graph."""

from autopar.ir.graph import listing

__all__ = ["listing"]
