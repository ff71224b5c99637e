"""The doctor: what is here, and whether autopar is right and as fast as planned on it.

`autopar doctor` says what is here; under torchrun it runs every check on all ranks and leaves one
JSON file and one page. `examples/first_gpu_run.py` calls the same checks one by one.
"""

from .examination import Examination
from .machine import facts
from .result import Absent, Finding, Result
from .session import Session

__all__ = ["Absent", "Examination", "Finding", "Result", "Session", "facts"]
