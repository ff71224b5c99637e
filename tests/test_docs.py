"""Every block of Python in docs/ runs as it stands, page by page; so does every doctest."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autopar

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [path for path in sorted(DOCS.glob("*.md")) if "```python" in path.read_text()]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks(page.read_text())):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


MODULES = [
    module.name
    for module in pkgutil.walk_packages(autopar.__path__, "autopar.")
    if not module.name.endswith("__main__")
]
WITH_EXAMPLES = [
    name for name in MODULES if ">>>" in inspect.getsource(importlib.import_module(name))
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_give_what_they_say(name: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert results.attempted and not results.failed


def test_many_modules_have_examples() -> None:
    assert len(WITH_EXAMPLES) > 20


@pytest.mark.parametrize("name", autopar.__all__)
def test_what_autopar_exports_says_how_to_use_it(name: str) -> None:
    """Each has an example, a function also its arguments in backticks and what it raises."""
    exported = getattr(autopar, name)
    doc = inspect.getdoc(exported) or ""
    assert ">>>" in doc
    if inspect.isfunction(exported):
        arguments = inspect.signature(exported).parameters
        assert not [argument for argument in arguments if f"`{argument}`" not in doc]
        assert "Raises" in doc


# Their example is that of `save`; the last says that it raises.
NO_EXAMPLE = {"Plan.load", "World.load", "ParallelModule.generate"}


@pytest.mark.parametrize("owner", [autopar.Plan, autopar.World, autopar.ParallelModule])
def test_each_public_method_has_an_example(owner: type) -> None:
    methods = {name: getattr(owner, name) for name in vars(owner) if name[0] != "_"}
    methods = {name: method for name, method in methods.items() if inspect.isfunction(method)}
    assert len(methods) > 4
    missing = {
        f"{owner.__name__}.{name}"
        for name, method in methods.items()
        if ">>>" not in (method.__doc__ or "") and name != "forward"
    }
    assert missing <= NO_EXAMPLE


def test_pages_build_and_their_links_lead_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=DOCS.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr[-4000:]
    assert (tmp_path / "api.html").is_file()


def test_blocks_are_found() -> None:
    text = "Text\n\n```python\nx = 1\n```\n\n```bash\nls\n```\n\n```python\ny = 2\n```\n"
    assert blocks(text) == ["x = 1\n", "y = 2\n"]
    assert "index" in [path.stem for path in PAGES]
