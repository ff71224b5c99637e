"""What holds for every command: help with an example, JSON, exit statuses, completion."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar import api
from autopar.cli import main
from autopar.cli.command import MEANINGS, ExitStatus
from autopar.errors import VerificationError
from commands import COMMANDS, GROUP, run

ROOT = Path(__file__).parents[2]


def test_every_file_of_a_command_is_registered() -> None:
    assert set(COMMANDS) >= {
        "plan", "verify", "show", "compare", "explain", "sweep", "trace", "graph", "calibrate",
        "doctor",
    }  # fmt: skip
    assert all(command in run("--help").stdout for command in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_the_command_takes(name: str) -> None:
    """Its words are options and arguments that the command has."""
    (example,) = re.findall(r"^Example: (.+)$", GROUP.commands[name].help, re.MULTILINE)
    printed = " ".join(run(name, "--help").stdout.split())
    assert example in printed
    words = shlex.split(example)
    place = words.index("autopar")
    assert words[place + 1] == name
    context = GROUP.commands[name].make_context(name, words[place + 2 :])
    assert context.params


def test_exit_statuses_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    table = page[page.index("## Exit status") :].split("\n## ")[0]
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE))
    assert rows == {str(status.value): meaning for status, meaning in MEANINGS.items()}
    assert set(MEANINGS) == set(ExitStatus)
    text = " ".join(run("--help").stdout.split())
    assert all(f"{status.value} {meaning.split(':')[0]}" in text for status, meaning
               in MEANINGS.items())  # fmt: skip


def test_a_wrong_layout_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(*arguments: Any, **named: Any) -> None:
        raise VerificationError("the first wrong node is linear")

    monkeypatch.setattr(api, "verify", verify)
    result = run("verify", "targets:tiny", "--ranks", "2", status=ExitStatus.CHECK_FAILED)
    assert "the first wrong node is linear" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("plan",), ("plan", "gpt2", "--no-such"), ("nothing",), ("plan", "gpt9")]
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...]) -> None:
    assert run(*arguments, status=ExitStatus.REFUSED).stdout == ""


def test_an_interrupt_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "plan", plan)
    result = CliRunner().invoke(main.app, ["plan", "targets:tiny", "--ranks", "2"])
    assert result.exit_code == ExitStatus.INTERRUPTED


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("sw", {"sweep"}),
        ("plan llama", {"llama3-8b", "llama3-70b", "llama3-405b"}),
        ("plan gpt2 --world dgx-a", {"dgx-a100"}),
        ("plan gpt2 --layout meg", {"megatron", "megatron-sp"}),
        ("sweep gpt2 --pri", {"--price"}),
    ],
)
def test_a_shell_completes(typed: str, completed: set[str]) -> None:
    words = f"autopar {typed}"
    environment = {"_AUTOPAR_COMPLETE": "complete_bash", "COMP_WORDS": words,
                   "COMP_CWORD": str(len(words.split()) - 1)}  # fmt: skip
    result = CliRunner().invoke(main.app, [], env=environment, prog_name="autopar")
    assert set(result.stdout.split()) == completed


@pytest.mark.slow
def test_completion_is_shown_for_a_shell() -> None:
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'autopar'\n"
               "from autopar.cli.main import app; app()", "--show-completion", "bash"]  # fmt: skip
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "_AUTOPAR_COMPLETE=complete_bash" in shown.stdout
