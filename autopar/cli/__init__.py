"""The command line: `autopar plan` and its fellows, a file for each command.

main.py lists them, command.py has what they share, options.py reads their options, terminal.py
shows progress and plans. What a command does beyond a call of `api` is in tools/.
"""
