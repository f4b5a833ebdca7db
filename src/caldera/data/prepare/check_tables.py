"""A checked file on the screen."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from caldera.data.prepare.check import FileCheck

BINS = 8
BAR = 32  # characters


def check_tables(check: FileCheck) -> RenderableType:
    """Everything that is known of a file, problems last."""
    parts: list[RenderableType] = [Text(f"{check.file}: {check.rows:,} rows"), _schema(check)]
    parts.append(_sources(check))
    for lengths, unit in ((check.characters, "characters"), (check.tokens, "tokens")):
        if lengths:
            parts.append(_histogram(lengths, unit))
    parts.append(Text(f"duplicate prompts: {check.duplicates:,}"))
    if check.overlap is not None:
        parts.append(Text(f"prompts that are in the other file too: {check.overlap:,}"))
    if check.problems:
        parts.append(_problems(check))
    else:
        parts.append(Text("no problems found", style="green"))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _schema(check: FileCheck) -> Table:
    table = _table("schema", "column", "type")
    for column, kind in check.schema.items():
        table.add_row(Text(column), Text(kind))
    return table


def _sources(check: FileCheck) -> Table:
    table = _table("data sources", "data_source", "rows", "scorer")
    for source, (count, scorer) in check.sources.items():
        named = Text(scorer) if scorer else Text("none known", style="yellow")
        table.add_row(Text(source), f"{count:,}", named)
    return table


def _histogram(lengths: list[int], unit: str) -> Table:
    middle = statistics.median(lengths)
    title = f"{unit} of a prompt: {min(lengths):,} to {max(lengths):,}, median {middle:,.0f}"
    table = _table(title, unit, "rows", "")
    bins = list(histogram(lengths))
    most = max(count for _, _, count in bins)
    for first, last, count in bins:
        bar = "#" * -(-count * BAR // most)
        table.add_row(f"{first:,} to {last:,}", f"{count:,}", bar)
    return table


def histogram(lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """Bins of one width over all lengths, each as (first, last, how many lengths)."""
    low, high = min(lengths), max(lengths)
    width = (high - low) // BINS + 1
    for first in range(low, high + 1, width):
        last = min(first + width - 1, high)
        yield first, last, sum(first <= length <= last for length in lengths)


def _problems(check: FileCheck) -> Table:
    table = _table("problems", "what is wrong")
    for problem in check.problems:
        table.add_row(Text(problem, style="red"))
    return table
