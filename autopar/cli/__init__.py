"""The command line: `autopar plan` and its fellows, a file for each command.

main.py lists them, command.py has what they share, options.py reads their options,
targets.py has the built-in models and finds those that a command names, huggingface.py builds those
of a config.json, terminal.py shows progress, doctor/ has the checks of `doctor`.
"""
