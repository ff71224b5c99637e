"""Imports point one way: a file of autopar may import only what stands before it in ORDER."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "autopar"

# From the ground up. "cost" is the file cost.py or all of the package cost/, whose files may import
# one another as long as they make no cycle. "" is autopar/__init__.py.
ORDER = (
    "errors", "documents", "ranks", "digest", "replicas", "_compat", "autocast", "pulse", "store",
    "devices", "watch",
    "spans", "mesh", "world", "agreement", "layout", "changes", "written", "figures", "plan_file",
    "plan", "rules", "ops", "trials", "probe", "program", "graphs", "faults", "secret_writes",
    "simplify", "functions", "hooks", "snapshot", "capture", "function_rules", "binding",
    "side_effects",
    "strategies", "pushback", "wire", "levels", "adjoints", "collectives", "conversion",
    "sharded", "local", "recomputed", "interpret", "constraint", "unsplit", "cost", "joint",
    "summa",
    "cuts", "cutting", "layouts", "elimination", "ranking", "regions", "price", "editing",
    "conversion_costs", "search", "ascending", "rating",
    "lockstep", "passes", "beside", "backends", "script", "transport", "measured", "placement",
    "module", "widened", "original", "rounding", "unwritten", "known", "verify", "report",
    "depth", "shallow", "dropping", "fitting", "hiding", "proven", "affordable", "sizing", "ready",
    "held", "deferred", "arguments", "pipeline", "planning", "api",
    "compiled", "calibration",
    "targets", "doctor", "options", "cli_options", "cli", "__main__", "",
)  # fmt: skip

# Packages whose files know nothing of one another; the package's own __init__ may list them.
STRANGERS = ("passes",)


def test_imports_point_one_way() -> None:
    assert violations(sources(ROOT)) == []


def test_a_file_outside_the_order_is_reported() -> None:
    (message,) = violations({"errors": "", "extra.thing": ""})
    assert message.startswith("autopar.extra.thing has no place: put 'extra' in ORDER")


def test_an_upward_import_is_reported_with_its_line() -> None:
    upward = {"mesh": "import math\n\ndef f():\n    from autopar.plan import Plan\n", "plan": ""}
    assert violations(upward) == [
        "autopar.ir.mesh line 4 imports autopar.plan, which stands above it"
    ]


def test_the_face_is_above_everything() -> None:
    (message,) = violations({"": "from autopar import mesh", "mesh": "from . import Mesh"})
    assert message == "autopar.ir.mesh line 1 imports autopar, which stands above it"


def test_passes_are_strangers() -> None:
    files = {"passes": "from . import choose", "passes.choose": "from . import trace"}
    files["passes.trace"] = ""
    (message,) = violations(files)
    assert message == "autopar.planner.choose line 1 imports autopar.passes.trace: strangers"


def test_a_cycle_within_a_package_is_reported() -> None:
    files = {"cost.comm": "import autopar.cost.memory", "cost.memory": "from .comm import ring"}
    (message,) = violations(files)
    assert message.startswith("imports go round: autopar.cost.")


def test_downward_imports_pass() -> None:
    files = {
        "cost.comm": "from autopar.mesh import Mesh\nimport torch",
        "cost": "from autopar.cost.comm import ring",
        "mesh": "from autopar import errors, _compat",
        "errors": "",
        "_compat": "",
        "passes.choose": "from ..cost import comm\nfrom .. import mesh",
    }
    assert violations(files) == []


def sources(root: Path) -> dict[str, str]:
    """The text of each file by its name: "passes.trace", "passes" for its __init__.py."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def violations(files: dict[str, str]) -> list[str]:
    """What is wrong with the imports of these files, one sentence each."""
    unplaced = [name for name in files if top(name) not in ORDER]
    found = [f"{full(n)} has no place: put {top(n)!r} in ORDER ({__file__})" for n in unplaced]
    edges = {}
    for name, text in files.items():
        imported = imports(name, text, files)
        edges[name] = {target for target, _ in imported}
        for target, line in imported:
            fault = judge(name, target)
            if fault:
                found.append(f"{full(name)} line {line} imports {full(target)}{fault}")
    return found or cycles(edges)


def judge(name: str, target: str) -> str:
    """Why `name` may not import `target`, or nothing, as for files that have no place yet."""
    if not {top(name), top(target)} <= set(ORDER):
        return ""
    if ORDER.index(top(target)) > ORDER.index(top(name)):
        return ", which stands above it"
    if top(name) == top(target) and top(name) in STRANGERS and "." in name:
        return ": strangers"
    return ""


def cycles(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return ["imports go round: " + " <- ".join(full(name) for name in error.args[1])]
    return []


def imports(name: str, text: str, files: dict[str, str]) -> list[tuple[str, int]]:
    """(file of autopar, line) of every import in `text`, those inside functions too."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, name, files)
            targets = [resolve(base, alias.name, files) for alias in node.names]
        else:
            continue
        ours = [t for t in targets if t.split(".")[0] == "autopar"]
        found += [(t.removeprefix("autopar").lstrip("."), node.lineno) for t in dict.fromkeys(ours)]
    return found


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
