"""Sizes of files and functions: a report to read, with a stop for what nobody can read.

Usage: python scripts/report_sizes.py [REPOSITORY]

Reads every Python file under src/, compat/, scripts/ and benchmarks/. Prints how many files and
lines each folder has, the longest files, and every function of more than 60 lines or nested more
than 4 deep. Exits with status 1 only for a function of more than 120 lines, or nested more than 5
deep: it is several functions.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("src", "compat", "scripts", "benchmarks")
LONGEST_FILES = 10
LONG_FUNCTION, MAX_FUNCTION_LINES = 60, 120
DEEP_NESTING, MAX_NESTING = 4, 5

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


@dataclass(frozen=True)
class Measured:
    """A function, by itself: functions within it are measured apart."""

    place: str
    name: str
    lines: int
    nesting: int

    @property
    def is_remarkable(self) -> bool:
        return self.lines > LONG_FUNCTION or self.nesting > DEEP_NESTING

    @property
    def is_too_big(self) -> bool:
        return self.lines > MAX_FUNCTION_LINES or self.nesting > MAX_NESTING


def measure(place: str, source: str) -> Iterator[Measured]:
    """Every function of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            assert node.end_lineno is not None, "ast.parse always sets it"
            lines = node.end_lineno - node.lineno + 1
            yield Measured(f"{place}:{node.lineno}", node.name, lines, deepest_block(node, 0))


def deepest_block(node: ast.AST, depth: int) -> int:
    """Depth of the most deeply nested block below `node`, which is itself at `depth`."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Scope):
            opens_block = isinstance(child, Block) and not is_elif(child, node)
            deepest = max(deepest, deepest_block(child, depth + opens_block))
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
    lengths: dict[str, int] = {}
    functions: list[Measured] = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            source, place = path.read_text(encoding="utf-8"), str(path.relative_to(root))
            lengths[place] = len(source.splitlines())
            functions += measure(place, source)
        found = [length for place, length in lengths.items() if place.startswith(f"{folder}/")]
        print(f"{folder}: {len(found)} files, {sum(found)} lines")
    print("longest files:")
    for place in sorted(lengths, key=lengths.__getitem__, reverse=True)[:LONGEST_FILES]:
        print(f"  {lengths[place]:4} {place}")
    print(f"functions of more than {LONG_FUNCTION} lines, or nested more than {DEEP_NESTING} deep:")
    for one in filter(lambda one: one.is_remarkable, functions):
        stop = "  <- too big" if one.is_too_big else ""
        print(f"  {one.place}: {one.name} has {one.lines} lines, {one.nesting} deep{stop}")
    return 1 if any(one.is_too_big for one in functions) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
