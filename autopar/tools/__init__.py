"""What stands beside the compiler: the commands call it, and nothing of the compiler does.

doctor/ checks a machine, report/ writes the page of a plan, advise/ the degrees for another tool;
sweep.py plans one model for many worlds, compare.py says what differs between two plans, targets.py
finds models by name, function or config.json. `Plan.report` loads report/ where it is called.
"""
