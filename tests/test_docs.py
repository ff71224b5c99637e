"""Every block of Python in docs/ runs as it stands, page by page; so does every doctest."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from torch.distributed.run import get_args_parser

import autopar
import doctest_blocks

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = DOCS.parent / "examples"
PAGES = [path for path in sorted(DOCS.glob("*.md")) if "```python" in path.read_text()]


class Block(NamedTuple):
    """A block of Python, and what the page says that it prints: the text that stands right after it
    or after a sentence with "prints"; None where the page does not say.
    """

    code: str
    printed: str | None


def blocks(text: str) -> list[Block]:
    fences = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    collected, after = [], 0
    for fence in fences.finditer(text):
        kind, body = fence.groups()
        if kind == "python":
            collected.append(Block(body, None))
        elif kind == "text" and collected and says_it_prints(text[after : fence.start()]):
            collected[-1] = collected[-1]._replace(printed=body)
        after = fence.end()
    return collected


def says_it_prints(between: str) -> bool:
    return not between.strip() or re.search(r"\bprints\b", between) is not None


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


@pytest.mark.slow_cells(
    "advise", "architecture", "choosing", "concepts", "getting-started", "memory", "report",
    "training", "troubleshooting",
)  # fmt: skip
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_blocks_of_a_page_print_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks(page.read_text())):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block.code, f"{page.name}, block {number}", "exec"), names)
        if block.printed is not None:
            assert lines(out.getvalue()) == lines(block.printed), f"block {number}"


def test_what_pages_say_is_printed_is_compared() -> None:
    (block,) = blocks("```python\nprint(1)\n```\n\nIt prints one:\n\n```text\n1\n```\n")
    assert block == Block("print(1)\n", "1\n")
    all_blocks = [block for page in PAGES for block in blocks(page.read_text())]
    assert sum(block.printed is not None for block in all_blocks) > 10


MODULES = [
    module.name
    for module in pkgutil.walk_packages(autopar.__path__, "autopar.")
    if not module.name.endswith("__main__")
]
WITH_EXAMPLES = [
    name for name in MODULES if ">>>" in inspect.getsource(importlib.import_module(name))
]


@pytest.mark.slow_cells("autopar.ir.plan", "autopar.planner.request", "autopar.runtime.module")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_give_what_they_say(name: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert results.attempted and not results.failed


def test_an_example_of_a_docstring_becomes_a_block_of_code() -> None:
    text = "A sum:\n\n>>> 1 + 1\n2\n\nIt is even."
    code = "```pycon\n>>> 1 + 1\n2\n```"
    assert doctest_blocks.fenced(text) == f"A sum:\n\n{code}\n\nIt is even."


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
    # with --quiet, --strict counts no warning
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=DOCS.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr[-4000:]
    assert '<span class="gp">&gt;&gt;&gt; </span>' in (tmp_path / "api.html").read_text()


def test_the_api_page_has_every_name_that_autopar_exports() -> None:
    names = re.findall(r"^::: autopar\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted(autopar.__all__)


def torchrun_commands() -> list[list[str]]:
    """The words after each torchrun of the page on several machines and of its Slurm script."""
    page = (DOCS / "multi-node.md").read_text()
    texts = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    texts.append((EXAMPLES / "slurm.sbatch").read_text())
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    commands = [re.match(r"(?:srun [^#]*?)?torchrun (.*)", line) for line in lines]
    return [shlex.split(command[1]) for command in commands if command]


def test_torchrun_takes_the_commands_for_several_machines() -> None:
    assert len(torchrun_commands()) == 4
    for words in torchrun_commands():
        options = get_args_parser().parse_args(words)
        assert options.rdzv_backend == "c10d" and options.rdzv_endpoint.endswith(":29500")
        assert options.module or (DOCS.parent / options.training_script).is_file()


def test_scripts_for_queues_are_well_formed() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sbatch")], check=True)
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    program, script, *_ = container["command"]
    assert program == "torchrun" and (DOCS.parent / script).is_file()


def test_the_diffs_of_extending_apply() -> None:
    """Each by itself, to the code as it is."""
    page = (DOCS / "extending.md").read_text()
    diffs = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(diffs) == 3
    for diff in diffs:
        command = ["git", "apply", "--check", "-"]
        checked = subprocess.run(
            command, cwd=DOCS.parent, input=diff, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stderr


def test_blocks_are_found() -> None:
    text = "Text\n\n```python\nx = 1\n```\n\n```bash\nls\n```\n\n```python\ny = 2\n```\n"
    assert [block.code for block in blocks(text)] == ["x = 1\n", "y = 2\n"]
    assert "index" in [path.stem for path in PAGES]
