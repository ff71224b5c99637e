"""Whether files and functions of autopar are short enough to be read; part of `make lint`.

A file has at most 400 lines, a function at most 40 lines of code: its docstring, blank lines and
comments are not counted, nor is the head with its arguments.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

AUTOPAR = Path(__file__).parents[2] / "autopar"
FILE_LINES, FUNCTION_LINES = 400, 40
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def too_long(text: str) -> Iterator[str]:
    """What is too long in a file's text, one phrase each."""
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield f"{lines} lines, {FILE_LINES} are enough: ask what second thing it does"
    code = _lines_of_code(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            length = (
                len(code & set(range(body[0].lineno, (node.end_lineno or 0) + 1))) if body else 0
            )
            if length > FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {length} lines of code"


def _lines_of_code(text: str) -> set[int]:
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    return numbers


def main() -> int:
    """1 where a file or a function is too long, each of which is printed."""
    faults = [
        f"{path.relative_to(AUTOPAR.parent)}: {fault}"
        for path in sorted(AUTOPAR.rglob("*.py"))
        for fault in too_long(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(faults), end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
