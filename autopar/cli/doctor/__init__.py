"""The doctor: what is here, and whether autopar is right and as fast as planned on it.

`autopar doctor` says what is here; under torchrun it runs every check on all ranks and leaves one
JSON file and one page. `examples/first_gpu_run.py` calls the same checks one by one.
"""

from autopar.cli.doctor.examination import Examination
from autopar.cli.doctor.machine import facts
from autopar.cli.doctor.session import Absent, Finding, Result, Session

__all__ = ["Absent", "Examination", "Finding", "Result", "Session", "facts"]
