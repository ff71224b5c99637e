"""The house is in order: the field's words for its rooms, and a sign at each door."""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import STALE, is_cell

ROOT = Path(__file__).parent.parent
AUTOPAR = ROOT / "autopar"
FILES = sorted(AUTOPAR.rglob("*.py"))
ENDINGS = ("s", "d", "ed", "ing", "er", "ted", "ting", "ation")  # cuts and cutting are one name


def test_passes_and_cost_are_links_at_the_root() -> None:
    for name in ("passes", "cost"):
        link = ROOT / name
        assert link.is_symlink() and link.resolve() == AUTOPAR / name


def test_cells_that_are_marked_slow_exist(pytestconfig: pytest.Config) -> None:
    """As a test, since an error of collection in a worker of pytest-xdist is shown by nobody."""
    if STALE not in pytestconfig.stash:
        pytest.skip("not all tests are collected")
    assert not pytestconfig.stash[STALE]


def test_a_cell_is_named_by_its_id_or_by_a_pattern() -> None:
    assert is_cell("gpt-(2, 2)", "gpt-(2, 2)") and is_cell("gpt-ddp-4", "gpt-*-4")
    assert not is_cell("gpt-ddp-4", "gpt") and not is_cell("gpt-ddp-48", "gpt-*-4")


def test_names_of_one_package_differ_by_more_than_an_ending() -> None:
    for folder in {path.parent for path in FILES}:
        names = sorted(path.stem for path in folder.glob("*.py"))
        pairs = [pair for pair in itertools.combinations(names, 2) if alike(*pair)]
        assert not pairs, f"{folder}: {pairs}"


@pytest.mark.parametrize("pair", [("cut", "cuts"), ("cuts", "cutting"), ("fit", "fitted")])
def test_names_that_differ_by_an_ending_are_seen(pair: tuple[str, str]) -> None:
    assert alike(*pair) and not alike("chunk", "chunk_units")


def alike(first: str, other: str) -> bool:
    """Whether two names are one word with two endings."""
    stems = [{name, *(name.removesuffix(e) for e in ENDINGS)} for name in (first, other)]
    return bool({stem for stem in stems[0] if len(stem) > 2} & stems[1])


def test_every_file_says_what_it_is() -> None:
    for path in FILES:
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc and "TODO" not in doc, f"{path} has no docstring"


def test_no_docstring_starts_with_of() -> None:
    assert not [place for place, doc in docstrings() if doc.startswith("Of ")]


def docstrings() -> Iterator[tuple[str, str]]:
    """(file:line, docstring) of every file, class and function."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", doc


# -- words -----------------------------------------------------------------------------------------
@functools.cache
def retired() -> set[str]:
    """The words that CONTRIBUTING.md lists as retired."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("## Retired words") :]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)
    return {word.strip(" `").lower() for row in rows[1:] for word in row.split(",")}


def words(name: str) -> list[str]:
    """
    >>> words("SavedActivations"), words("chunk_units")
    (['saved', 'activations'], ['chunk', 'units'])
    """
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
    return [part for part in parts if part]


# A retired word is one in every name of ours: of modules, classes, functions, arguments, fields,
# constants and variables. The name of a test is a sentence, whose verb may be "found" or "made".
@functools.cache
def vague() -> set[str]:
    """The words that CONTRIBUTING.md says name nothing."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    first = text[text.index("## Words that name nothing") :].split(" say what ")[0]
    return set(re.findall(r"`(\w+)`", first))


def names_in(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """(kind, name) of a module, and of all that it names itself. "variable": of a function, or of a
    comprehension outside of one.
    """
    tree = ast.parse(text)
    yield "module", path.stem
    outer = [name for statement in tree.body for name in assigned_names(statement)]
    yield from (("constant", name) for name in outer)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield ("function" if isinstance(node, ast.FunctionDef) else "class"), node.name
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            every = node.args.posonlyargs, node.args.args, node.args.kwonlyargs
            rest = node.args.vararg, node.args.kwarg
            yield from (("argument", a.arg) for a in (*itertools.chain(*every), *rest) if a)
        if isinstance(node, ast.ClassDef):
            fields = [name for n in node.body for name in assigned_names(n)]
            yield from (("field", name) for name in fields)
            outer += fields
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield "field", node.attr
    stored = collections.Counter(variables(tree)) - collections.Counter(outer)
    yield from (("variable", name) for name in stored)


def variables(tree: ast.Module) -> Iterator[str]:
    """Every name that is stored: by an assignment, a loop, a context, a pattern or an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def assigned_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module or of a class assigns."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    for node in itertools.chain(*map(ast.walk, targets)):
        if isinstance(node, ast.Name):
            yield node.id


def faults(path: Path, text: str) -> list[str]:
    """The names in a file's text that are not the field's words."""
    retired_words, vague_words = retired(), vague()
    return [
        f"{kind} {name}"
        for kind, name in names_in(path, text)
        if set(words(name)) & retired_words
        or (not name.startswith("test_") and names_nothing(words(name), vague_words))
    ]


def names_nothing(parts: list[str], vague_words: set[str]) -> bool:
    """Whether a name has a vague word. "One" may count (`one_rank`), but is no noun (`in_one`)."""
    return bool(set(parts) & vague_words - {"one"}) or (parts[-1:] == ["one"])


def test_no_name_uses_a_retired_word() -> None:
    assert len(retired()) > 20 and len(vague()) == 9
    folders = ("autopar", "tests", "benchmarks", "examples")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += ROOT.glob("*.py")
    assert len(paths) > 500
    wrong = {str(path.relative_to(ROOT)): faults(path, path.read_text()) for path in paths}
    assert not {place: names for place, names in wrong.items() if names}


def test_names_that_are_no_words_of_the_field_are_found() -> None:
    text = "class A:\n    held: int\n    def in_one(self, asked): self.told_bytes = found = asked"
    names = ["field held", "function in_one", "argument asked", "field told_bytes",
             "variable found"]  # fmt: skip
    assert sorted(faults(Path("fit.py"), text)) == sorted(names)
    assert faults(Path("cuts.py"), "TOLD, _MADE = 1, 2") == [
        "module cuts", "constant TOLD", "constant _MADE"
    ]  # fmt: skip
    assert faults(Path("test_a.py"), "def test_what_is_kept_is_found(): ...") == [
        "function test_what_is_kept_is_found"
    ]
    assert not faults(Path("test_a.py"), "def test_what_is_saved_is_found(one_rank): ...")
    for line in ("[found for found in x]", "for n, found in x: ...", "with x as found: ...",
                 "(found := 1)", "import x as found", "match x:\n  case [found, *_]: ...",
                 "try: ...\nexcept X as found: ..."):  # fmt: skip
        assert faults(Path("fit.py"), f"{line}") == ["variable found"], line


# Verbs that end as participles do.
VERBS = {"feed", "embed", "need", "seed", "speed"}


def is_participle(name: str) -> bool:
    return len(words(name)) == 1 and name.endswith("ed") and name not in VERBS


def test_a_public_function_is_a_verb_or_what_it_returns() -> None:
    assert is_participle("traced") and not is_participle("feed") and not is_participle("fed_rows")
    for path in FILES:
        functions = [
            n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)
        ]
        assert not [name for name in functions if name[0] != "_" and is_participle(name)], path


def test_a_name_is_taken_apart_into_words() -> None:
    assert words("SavedActivations") == ["saved", "activations"]
    assert words("chunk_units") == ["chunk", "units"]
