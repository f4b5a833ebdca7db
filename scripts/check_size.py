"""The size gate: files, functions and nesting stay small enough to be read.

Usage: python scripts/check_size.py [REPOSITORY]

Checks every Python file under src/, compat/, scripts/ and benchmarks/, prints each offence as
`file:line: what is wrong` and exits with status 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKED_FOLDERS = ("src", "compat", "scripts", "benchmarks")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 4

Function = ast.FunctionDef | ast.AsyncFunctionDef
# These start a scope of their own: a function inside a function is measured by itself.
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Block = (
    ast.If
    | ast.For
    | ast.AsyncFor
    | ast.While
    | ast.With
    | ast.AsyncWith
    | ast.Try
    | ast.TryStar
    | ast.Match
)


def find_offences(root: Path) -> Iterator[str]:
    """Every offence under `root`, by file and line."""
    for folder in CHECKED_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for line, message in check_source(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(root)}:{line}: {message}"


def check_source(source: str) -> Iterator[tuple[int, str]]:
    """The offences of one file, each as (line, message)."""
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        yield MAX_FILE_LINES + 1, f"the file has {lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            yield from check_function(node)


def check_function(function: Function) -> Iterator[tuple[int, str]]:
    assert function.end_lineno is not None, "ast.parse always sets it"
    lines = function.end_lineno - function.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        message = f"{function.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
        yield function.lineno, message
    depth, line = deepest_block(function, 0)
    if depth > MAX_NESTING:
        yield line, f"{function.name} is nested {depth} deep, at most {MAX_NESTING}"


def deepest_block(node: ast.AST, depth: int) -> tuple[int, int]:
    """Depth and line of the most deeply nested block below `node`, which is itself at `depth`."""
    deepest = (depth, getattr(node, "lineno", 0))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Scope):
            continue
        opens_block = isinstance(child, Block) and not is_elif(child, node)
        deepest = max(
            deepest, deepest_block(child, depth + opens_block), key=lambda found: found[0]
        )
    return deepest


def is_elif(node: ast.AST, parent: ast.AST) -> bool:
    """Whether `node` is an `elif` of `parent`: unlike an `if` under `else:`, it is not indented."""
    return (
        isinstance(node, ast.If)
        and isinstance(parent, ast.If)
        and node in parent.orelse
        and node.col_offset == parent.col_offset
    )


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).parent.parent
    offences = list(find_offences(root))
    for offence in offences:
        print(offence)
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
