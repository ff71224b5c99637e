"""The doctor: what is here, and whether autopar is right and as fast as planned on it.

`autopar doctor` says what is here; under torchrun it runs every check on all ranks and leaves one
JSON file and one page. `examples/first_gpu_run.py` calls the same checks one by one.
"""

from autopar.doctor.examination import Examination
from autopar.doctor.machine import facts
from autopar.doctor.result import Absent, Finding, Result
from autopar.doctor.session import Session

__all__ = ["Absent", "Examination", "Finding", "Result", "Session", "facts"]
