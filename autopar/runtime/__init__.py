"""Running a plan: a model is placed by its plan, called, verified and profiled.

apply.py plans on rank 0 and places the parameters, module.py is the module that users train,
local_parts.py hands its parameters to autograd, backends.py schedules and runs its graphs,
dynamo_backend.py is the backend for torch.compile; verify.py compares a plan with one device on
simulated ranks (lockstep.py); profiler.py measures a real step.
"""
