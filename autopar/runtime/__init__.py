"""What runs on the ranks: placing a model by its plan, calling it, and proving it.

apply.py places the parameters, module.py is the module that users train, backends.py runs and
schedules its graphs, dynamo_backend.py is the way in by torch.compile; verify.py compares a plan
with one device on simulated ranks (lockstep.py); profiler.py measures a real step.
"""
