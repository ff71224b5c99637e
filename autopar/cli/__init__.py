"""The command line: `autopar plan`, `verify`, `show`, `calibrate` and `doctor`.

main.py has the commands, options.py what their options mean, targets.py the models that they are
given by name (models.py has the built-in ones), terminal.py what is printed while they work.
"""
