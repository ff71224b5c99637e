"""The command line: `autopar plan`, `verify`, `show`, `calibrate` and `doctor`.

main.py has the commands, options.py reads their options, targets.py has the built-in models and
finds those that a command names, terminal.py shows progress, doctor/ has the checks of `doctor`.
"""
