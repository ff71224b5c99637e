"""The command line: `autopar plan`, `verify`, `show`, `calibrate` and `doctor`.

main.py has the commands, options.py reads their options, targets.py builds the models that they
name (models.py has the built-in ones), terminal.py shows progress, doctor/ has the checks of
`doctor`.
"""
