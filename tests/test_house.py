"""The house is in order: the field's words for its rooms, and a sign at each door."""

from __future__ import annotations

import ast
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
def test_alike_names(pair: tuple[str, str]) -> None:
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
def retired() -> set[str]:
    """The words that docs/glossary.md lists as retired."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    table = text[text.index("## Retired words") :]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)
    return {word.strip(" `") for row in rows[1:] for word in row.split(",")}


def words(name: str) -> list[str]:
    """
    >>> words("SavedActivations"), words("chunk_units")
    (['saved', 'activations'], ['chunk', 'units'])
    """
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
    return [part for part in parts if part]


def public_names() -> Iterator[tuple[str, str]]:
    """(file, name) of modules, and of what stands at their top without an underscore before it."""
    for path in FILES:
        place = str(path.relative_to(ROOT))
        yield place, path.stem
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_":
                yield place, node.name


def test_no_module_or_public_name_uses_a_retired_word() -> None:
    assert len(retired()) > 20
    uses = [
        f"{place}: {name}"
        for place, name in public_names()
        if set(words(name)) & retired() or name in retired()
    ]
    assert not uses


# What is clean in methods, fields and arguments, too; the others follow.
CLEAN = ("api.py", "errors.py", "cli/*.py", "cli/doctor/*.py", "cost/*.py",
         "runtime/*.py")  # fmt: skip
UNCLEAN = ("runtime/backends.py",)
# "spans" are the events of a trace; verbs and nouns that end as participles do
EXEMPT, VERBS = {"spans"}, {"feed", "embed", "need", "seed", "speed"}


def clean_files() -> list[Path]:
    paths = {path for pattern in CLEAN for path in AUTOPAR.glob(pattern)}
    return sorted(paths - {AUTOPAR / name for name in UNCLEAN})


def vague() -> set[str]:
    """The words that docs/glossary.md says name nothing."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    first = text[text.index("## Words that name nothing") :].split(" say what ")[0]
    return set(re.findall(r"`(\w+)`", first))


def names_in(text: str) -> Iterator[tuple[str, str]]:
    """(kind, name) of the functions, classes, arguments and fields in a file's text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield ("function" if isinstance(node, ast.FunctionDef) else "class"), node.name
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            every = node.args.posonlyargs, node.args.args, node.args.kwonlyargs
            rest = node.args.vararg, node.args.kwarg
            yield from (("argument", a.arg) for a in (*itertools.chain(*every), *rest) if a)
        if isinstance(node, ast.ClassDef):
            fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
            yield from (("field", n.id) for n in fields if isinstance(n, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield "field", node.attr


def faults(text: str) -> list[str]:
    """The names in a file's text that are not the field's words."""
    unwanted = {word.lower() for word in retired() | vague()} - EXEMPT
    return [
        f"{kind} {name}"
        for kind, name in names_in(text)
        if set(words(name)) & unwanted or (kind == "function" and is_participle(name))
    ]


def is_participle(name: str) -> bool:
    return len(words(name)) == 1 and name.endswith("ed") and words(name)[0] not in VERBS


def test_clean_packages_use_the_fields_words() -> None:
    assert len(vague()) == 9 and len(clean_files()) > 30
    assert not {path.name: found for path in clean_files() if (found := faults(path.read_text()))}


def test_names_that_are_no_words_of_the_field_are_found() -> None:
    text = "class A:\n    held: int\n    def traced(self, asked): self.whole_bytes = found = asked"
    assert faults(text) == ["field held", "function traced", "argument asked", "field whole_bytes"]
    assert not faults("def feed(self, plan): self.measured_spans = plan")


def test_words() -> None:
    assert words("SavedActivations") == ["saved", "activations"]
    assert words("chunk_units") == ["chunk", "units"]
