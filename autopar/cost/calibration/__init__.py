"""Measuring a machine: what runs on its ranks (measure.py, contention.py), what is fitted to it
(fit.py), and the order in which `autopar calibrate` does both within the seconds given
(procedure.py). A `World` leaves.
"""
