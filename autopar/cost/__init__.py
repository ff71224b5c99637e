"""What a plan takes: seconds of computation and communication, and bytes of memory.

The planner asks for the cost of one choice of one node; the report and the simulator ask for the
cost of a whole graph. Both read the same functions. Nothing here runs on more than one rank, but
for calibration/, which measures what the formulas are fitted to.
"""
