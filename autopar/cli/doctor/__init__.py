"""The doctor: what this machine has, and whether autopar computes right on it and as fast as
planned.

`autopar doctor` describes the machine; under torchrun it runs every check on all ranks and leaves
one JSON file and one page. examination.py runs the checks, session.py has the ranks and the
results, machine.py the description, exchanges.py, kernels.py and training.py the checks themselves.
`examples/first_gpu_run.py` calls the same checks one by one.
"""

from autopar.cli.doctor.examination import Examination
from autopar.cli.doctor.machine import facts
from autopar.cli.doctor.session import Absent, Finding, Result, Session

__all__ = ["Absent", "Examination", "Finding", "Result", "Session", "facts"]
