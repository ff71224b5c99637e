"""The smoke and parity tests on other interpreters and versions of torch: `make test-matrix`.

Example: python tests/support/matrix.py --pythons "python3.11 python3.13" --torches "2.11 2.13"
makes an environment for each pair in out/matrix/, with the wheel of this folder and the locked
versions of everything but torch and the setuptools that it wants, runs TESTS and `autopar doctor`
there, and prints a line a pair. Interpreters that are not here are said and left out. The exit
status is 1 where a pair failed. It needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "out" / "matrix"
TESTS = ("tests/test_smoke.py", "tests/test_compat.py", "tests/runtime/test_parity.py")


def executable(name: str) -> str | None:
    """Return the path of an interpreter that runs: of `python3.12` by name, where pyenv's are found
    too, or of a path itself.
    """
    if os.sep in name:
        return name if os.access(name, os.X_OK) else None
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    version = name.removeprefix("python")
    places = [shutil.which(name), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    for place in filter(None, places):
        command = [place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return place
    return None


def run(command: list[str], log: Path, folder: Path = ROOT, **options: str) -> bool:
    """Run a command in a folder, with its output in `log` and with environment variables; say
    whether it succeeded.
    """
    with log.open("a") as out:
        done = subprocess.run(
            command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=os.environ | options
        )
    return done.returncode == 0


def wheel(log: Path) -> Path | None:
    """Return the wheel of this folder, built anew; None where that fails."""
    shutil.rmtree(FOLDER / "dist", ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(FOLDER / "dist"), "."]
    return next((FOLDER / "dist").glob("*.whl"), None) if run(command, log) else None


def install(interpreter: str, torch: str, built: Path, place: Path, log: Path) -> bool:
    """Make the environment of a pair at `place`, or bring one that is there up to date."""
    lock = (ROOT / "requirements.lock").read_text()
    wanted = place / "requirements.txt"
    pip = [str(place / "bin/python"), "-m", "pip", "install", "--quiet"]
    if not place.exists() and not run([interpreter, "-m", "venv", str(place)], log):
        return False
    unpinned = re.sub(r"(?m)^setuptools==.*$", "setuptools", lock)  # torch 2.11 takes none of today
    wanted.write_text(re.sub(r"(?m)^torch==.*$", f"torch=={torch}.*", unpinned))
    return run([*pip, "-r", str(wanted)], log) and run(
        [*pip, "--no-deps", "--force-reinstall", str(built)], log
    )


def check(place: Path, log: Path) -> str:
    """Return what failed of the tests and of `autopar doctor` in an environment, "" for nothing.

    They run in a copy of the tests beside no sources, so it is the wheel that they import.
    """
    for name in ("tests", "examples"):
        shutil.copytree(ROOT / name, place / "apart" / name, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", place / "apart")
    options = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    commands = {
        "tests": ["-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        "autopar doctor": ["-m", "autopar", "doctor", "--run", "--out", str(place / "doctor")],
    }
    python = str(place / "bin/python")
    return ", ".join(
        name
        for name, arguments in commands.items()
        if not run([python, *arguments], log, place / "apart", **options)
    )


def pair(name: str, torch: str, built: Path) -> str:
    """Return the outcome of one interpreter with one torch, in a few words."""
    interpreter = executable(name)
    if interpreter is None:
        return "no such interpreter here"
    place = FOLDER / f"{name.strip(os.sep).replace(os.sep, '-')}-torch{torch}"
    start = time.monotonic()
    log = FOLDER / f"{place.name}.log"
    log.unlink(missing_ok=True)
    if not install(interpreter, torch, built, place, log):
        return f"FAILED to install: {log.relative_to(ROOT)}"
    failed = check(place, log)
    text = f"FAILED: {failed}; {log.relative_to(ROOT)}" if failed else "passed"
    return f"{text} ({time.monotonic() - start:.0f} s)"


def main() -> int:
    """Run all pairs; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", default="python3.11 python3.12 python3.13")
    parser.add_argument("--torches", default="2.11 2.12 2.13")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    built = wheel(FOLDER / "wheel.log")
    if built is None:
        print(f"the wheel cannot be built: {(FOLDER / 'wheel.log').relative_to(ROOT)}")
        return 1
    outcomes = []
    for name in options.pythons.split():
        for torch in options.torches.split():
            outcomes.append(pair(name, torch, built))
            print(f"{name:12} torch {torch:6} {outcomes[-1]}", flush=True)
    return int(any(outcome.startswith("FAILED") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
