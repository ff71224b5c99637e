"""Imports point one way: a package of autopar imports only what stands before it in ORDER."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
AUTOPAR = ROOT / "autopar"
TESTS = ROOT / "tests"

# From the ground up; "" is autopar/__init__.py.
ORDER = (
    "errors", "_compat", "world", "ir", "ops", "cost", "passes", "planner", "runtime",
    "api", "tools", "cli", "__main__", "",
)  # fmt: skip

# A pass knows no other one; its helpers stand in a folder of their own.
PASSES = ("annotate", "finalize", "hierarchy", "kernel_choice", "draws", "masks", "pad",
          "recompute", "rewrite", "summa", "trace")  # fmt: skip

# What talks to other ranks, and who may.
TALKS = ("world.ranks", "world.store", "ops.process_groups")
MAY_TALK = ("world", "ops.process_groups", "ops.devices", "ops.comm", "ops.links",
            "cost.calibration", "runtime", "api", "tools", "cli")  # fmt: skip


def test_imports_point_in_one_direction() -> None:
    assert violations(sources(AUTOPAR)) == []


def test_a_file_outside_the_order_is_reported() -> None:
    (message,) = violations({"errors": "", "extra.thing": ""})
    assert message.startswith("autopar.extra.thing has no place: put 'extra' in ORDER")


def test_an_upward_import_is_reported_with_its_line() -> None:
    upward = {"ir.mesh": "import math\n\ndef f():\n    from autopar.cost import comm\n", "cost": ""}
    assert violations(upward) == [
        "autopar.ir.mesh line 4 imports autopar.cost, which stands above it"
    ]


def test_an_import_for_types_alone_is_none() -> None:
    files = {"ir.mesh": "if TYPE_CHECKING:\n    from autopar.cost import comm\n"}
    files |= {"cost": "", "cost.comm": ""}
    assert violations(files) == []
    files["ir.mesh"] = files["ir.mesh"].replace("if", "if not")
    assert len(violations(files)) == 1


def test_the_face_is_above_everything() -> None:
    (message,) = violations({"": "from autopar import world", "world": "from . import World"})
    assert message == "autopar.world line 1 imports autopar, which stands above it"


def test_passes_are_strangers() -> None:
    files = {"passes": "from . import summa", "passes.summa": "from . import annotate"}
    files |= {"passes.annotate": "from autopar.passes.trace import export", "passes.trace": ""}
    files |= {"passes.trace.export": ""}
    first, second = violations(files)
    assert first == "autopar.passes.summa line 1 imports autopar.passes.annotate, another pass"
    assert (
        second == "autopar.passes.annotate line 1 imports autopar.passes.trace.export, another pass"
    )


def test_who_may_not_talk_to_other_ranks_is_reported() -> None:
    files = {"planner.choose": "from autopar.world import ranks", "world.ranks": "", "world": ""}
    (message,) = violations(files)
    assert message == (
        "autopar.planner.choose line 1 imports autopar.world.ranks: it may not talk to other ranks"
    )


def test_a_cycle_within_a_package_is_reported() -> None:
    files = {"cost.comm": "import autopar.cost.memory", "cost.memory": "from .comm import ring"}
    (message,) = violations(files)
    assert message.startswith("imports go round: autopar.cost.")


def test_downward_imports_pass() -> None:
    files = {
        "cost.comm": "from autopar.ir.mesh import Mesh\nimport torch",
        "cost": "from autopar.cost.comm import ring",
        "ir.mesh": "from autopar import errors, _compat",
        "ir": "",
        "errors": "",
        "_compat": "",
        "passes": "",
        "passes.choose": "from ..cost import comm\nfrom ..ir import mesh",
        "runtime.apply": "from autopar.world import ranks",
        "world": "",
        "world.ranks": "",
    }
    assert violations(files) == []


def sources(root: Path) -> dict[str, str]:
    """The text of each file by its name: "passes.trace", "passes" for its __init__.py."""
    texts = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        texts[name] = path.read_text(encoding="utf-8")
    return texts


def violations(files: dict[str, str]) -> list[str]:
    """What is wrong with the imports of these files, one sentence each."""
    unplaced = [name for name in files if top(name) not in ORDER]
    faults = [f"{full(n)} has no place: put {top(n)!r} in ORDER ({__file__})" for n in unplaced]
    edges = {}
    for name, text in files.items():
        imported = imports(name, text, files)
        edges[name] = {target for target, _ in imported}
        for target, line in imported:
            fault = judge(name, target)
            if fault:
                faults.append(f"{full(name)} line {line} imports {full(target)}{fault}")
    return faults or cycles(edges)


def judge(name: str, target: str) -> str:
    """Why `name` may not import `target`, or nothing, as for files that have no place yet."""
    if not {top(name), top(target)} <= set(ORDER):
        return ""
    if ORDER.index(top(target)) > ORDER.index(top(name)):
        return ", which stands above it"
    if pass_of(name) and pass_of(target) and pass_of(name) != pass_of(target):
        return ", another pass"
    if target in TALKS and not any(f"{name}.".startswith(f"{may}.") for may in MAY_TALK):
        return ": it may not talk to other ranks"
    return ""


def pass_of(name: str) -> str:
    """The pass that a file is, or belongs to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "passes" and parts[1] in PASSES else ""


def for_types_alone(tree: ast.Module) -> set[ast.AST]:
    """The imports under `if TYPE_CHECKING`: they name types and never run."""
    blocks = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def cycles(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return ["imports go round: " + " <- ".join(full(name) for name in error.args[1])]
    return []


def imports(name: str, text: str, files: dict[str, str]) -> list[tuple[str, int]]:
    """(file of autopar, line) of every import in `text` that runs, those inside functions too."""
    targets_and_lines = []
    tree = ast.parse(text)
    left_out = for_types_alone(tree)
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, name, files)
            targets = [resolve(base, alias.name, files) for alias in node.names]
        else:
            continue
        ours = [t for t in targets if t.split(".")[0] == "autopar"]
        targets_and_lines += [
            (t.removeprefix("autopar").lstrip("."), node.lineno) for t in dict.fromkeys(ours)
        ]
    return targets_and_lines


def absolute(node: ast.ImportFrom, name: str, files: dict[str, str]) -> str:
    """The dotted module that a `from` names, relative ones made absolute."""
    if node.level == 0:
        return node.module or ""
    package = is_package(name, files)
    parts = full(name).split(".")
    parts = parts[: len(parts) - node.level + package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def resolve(base: str, member: str, files: dict[str, str]) -> str:
    """`from base import member`: the file member if there is one, else base itself."""
    candidate = f"{base}.{member}"
    return candidate if candidate.removeprefix("autopar.") in files else base


def is_package(name: str, files: dict[str, str]) -> bool:
    return name == "" or any(other.startswith(name + ".") for other in files)


def top(name: str) -> str:
    return name.split(".")[0]


def full(name: str) -> str:
    return f"autopar.{name}" if name else "autopar"


# -- tests -----------------------------------------------------------------------------------------
def test_what_tests_share_stands_in_support() -> None:
    texts = {path.relative_to(TESTS): path.read_text() for path in TESTS.rglob("*.py")}
    assert imports_of_tests(texts) == []


def test_an_import_of_a_test_or_of_another_rank_script_is_reported() -> None:
    texts = {
        "cli/test_b.py": "def f():\n    from test_a import run",
        "cli/test_c.py": "import tests.cli.test_a as a\nfrom tests.cli import test_b",
        "cli/test_d.py": "from tests.fuzz.case import Case\nimport launch, train_ranks",
        "rank_scripts/moe_ranks.py": "from train_ranks import joined\nimport torch",
        "rank_scripts/train_ranks.py": "import test_a",
        "support/plans.py": "import train_ranks",
    }
    assert imports_of_tests({Path(name): text for name, text in texts.items()}) == [
        "cli/test_b.py line 2 imports test_a",
        "cli/test_c.py line 1 imports tests.cli.test_a",
        "cli/test_c.py line 2 imports tests.cli.test_b",
        "rank_scripts/moe_ranks.py line 1 imports train_ranks",
        "rank_scripts/train_ranks.py line 1 imports test_a",
        "support/plans.py line 1 imports train_ranks",
    ]


def imports_of_tests(texts: dict[Path, str]) -> list[str]:
    """Every import of a test module, and of a rank script by another file than a test."""
    scripts = {path.stem for path in texts if path.parent.name == "rank_scripts"}
    messages = []
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            targets = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                members = [f"{base}.{a.name}" for a in node.names if a.name.startswith("test_")]
                targets = [base, *members]
            for target in targets:
                name = target.split(".")[-1]
                script = name in scripts and not path.name.startswith("test_")
                if name.startswith("test_") or script:
                    messages.append(f"{path} line {node.lineno} imports {target}")
    return messages
