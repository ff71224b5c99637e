"""`python -m autopar` is the command line."""

from autopar.cli.main import main

if __name__ == "__main__":
    main()
