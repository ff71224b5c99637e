"""Runs commands in this process, and lists them."""

from __future__ import annotations

from typing import Any

import typer
from typer.testing import CliRunner

from autopar.cli import main


def run(*arguments: str, status: int = 0) -> Any:
    result = CliRunner().invoke(main.app, list(arguments))
    assert result.exit_code == status, (result.exception, result.output)
    return result


def refused(*arguments: str) -> str:
    """The message of a refusal: one line on stderr after any progress, no traceback."""
    result = run(*arguments, status=2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


GROUP: Any = typer.main.get_command(main.app)


COMMANDS = sorted(GROUP.commands)
