"""Calibration of a machine: measurements on its ranks (measure.py, contention.py), the fit of the
cost model to them (fit.py), and the order in which `autopar calibrate` does both within the seconds
it is given (procedure.py). The result is a `World`.
"""
