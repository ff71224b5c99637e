"""What a plan costs: seconds of computation and communication, and bytes of memory.

The planner asks for the cost of one choice of one node (compute.py, communication.py,
activations.py); the report and the simulator ask for the cost of a whole graph (summary.py,
formula.py, peak.py, simulator/). Both read the same functions. memory.py has the memory limit
of a device (`Budget`), algorithms.py the collective algorithms that gloo and NCCL choose from.
Nothing here runs on more than one rank, except calibration/, which measures what the formulas are
fitted to.
"""
