"""Operators: how each op may be split, and the functions that an emitted graph calls on each rank.

rules/ has the sharding rule of each op. sharded/ has the ops whose reduced dim is split, such as a
layer norm over a sharded last dim. collectives.py has the functions that reshard a tensor; they are
built from comm.py (the forward communication, and what differs between gloo and NCCL) and
autograd.py (the backward communication). ctc.py has an op that stands in the place of one of
torch's.
"""
