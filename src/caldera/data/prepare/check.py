"""A look at a prepared file: what is in it, and what is wrong with it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from caldera.data.chat import Message, prompt_messages
from caldera.data.files import Row, RowTable, is_null, read_rows
from caldera.data.rl_dataset import FAILED, prompt_lengths
from caldera.errors import CalderaError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


OF_SCORERS = ("data_source", "reward_model")
"""Columns that built-in scorers need, and no other ones."""

FindScorer = Callable[[str], Callable[..., Any]]
"""The scorer of a data source; a CalderaError if there is none."""


@dataclass
class FileCheck:
    """The contents of a file, and its problems."""

    file: str
    rows: int
    schema: dict[str, str] = field(default_factory=dict)
    """Columns and their types."""
    sources: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    """Data sources with the number of their rows and the scorer that they would get."""
    characters: list[int] = field(default_factory=list)
    """The length of each prompt that can be read."""
    tokens: list[int] | None = None
    """The same in tokens, if a tokenizer was given."""
    duplicates: int = 0
    """Rows whose prompt came before."""
    overlap: int | None = None
    """Rows whose prompt is also in the other file, if one was given."""
    missing: list[str] = field(default_factory=list)
    """Columns without which no built-in scorer scores."""
    problems: list[str] = field(default_factory=list)


def check_file(
    file: str,
    *,
    find_scorer: FindScorer,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processes: int = 1,
    against: str | None = None,
) -> FileCheck:
    """Look at every row of a file; prompts that differ in space and case only are the same."""
    table = read_rows(file, key="FILE")
    check = FileCheck(file, len(table.rows), _schema(table.rows))
    if "prompt" not in check.schema:
        check.problems.append("there is no column 'prompt'")
    check.missing = [column for column in OF_SCORERS if column not in check.schema]
    if "data_source" in check.schema:
        check.sources = _sources(table, find_scorer, check.problems)
    prompts = _prompts(table, check.problems)
    check.characters = [sum(len(_text(message)) for message in prompt) for prompt in prompts]
    check.problems += _empty_prompts(prompts)
    check.problems += _ground_truth_problems(table)
    normal = [_normalised(prompt) for prompt in prompts]
    check.duplicates = len(normal) - len(set(normal))
    if against is not None:
        others = _prompts(read_rows(against, key="--against"), [])
        both = set(normal) & {_normalised(prompt) for prompt in others}
        check.overlap = sum(prompt in both for prompt in normal)
        if check.overlap:
            check.problems.append(f"{_rows(check.overlap)} with prompts that are in {against} too")
    if tokenizer is not None:
        lengths = prompt_lengths(prompts, tokenizer, template_kwargs={}, workers=processes)
        check.tokens = [length for length in lengths if length != FAILED]
        if failed := len(lengths) - len(check.tokens):
            check.problems.append(f"{_rows(failed)} that the chat template cannot render")
    return check


def _schema(rows: list[Row]) -> dict[str, str]:
    schema = {}
    for column in rows[0]:
        try:
            schema[column] = str(pyarrow.array([row[column] for row in rows]).type)
        except pyarrow.ArrowException:  # in JSON files, one column may hold anything
            kinds = {type(row[column]).__name__ for row in rows}
            schema[column] = f"mixed: {', '.join(sorted(kinds))}"
    return schema


def _sources(
    table: RowTable, find_scorer: FindScorer, problems: list[str]
) -> dict[str, tuple[int, str | None]]:
    names = [row["data_source"] for row in table.rows]
    counts = Counter(name for name in names if isinstance(name, str))
    if nameless := len(names) - counts.total():
        problems.append(f"{_rows(nameless)} whose data_source is no text")
    return {name: (count, _scorer_name(name, find_scorer)) for name, count in counts.items()}


def _scorer_name(source: str, find_scorer: FindScorer) -> str | None:
    try:
        scorer = find_scorer(source)
    except CalderaError:
        return None
    return f"{scorer.__module__}.{scorer.__qualname__}"


def _prompts(table: RowTable, problems: list[str]) -> list[list[Message]]:
    """The prompts that are text or chats; the others become problems."""
    prompts, wrong = [], []
    for number, row in enumerate(table.rows):
        if "prompt" not in row:
            break
        try:
            prompts.append(prompt_messages(row["prompt"], f"the prompt of {table.where(number)}"))
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        problems.append(f"{_rows(len(wrong))} without a prompt; the first: {wrong[0]}")
    return prompts


def _empty_prompts(prompts: list[list[Message]]) -> Iterator[str]:
    empty = sum(not any(_text(message).strip() for message in prompt) for prompt in prompts)
    if empty:
        yield f"{_rows(empty)} with an empty prompt"


def _ground_truth_problems(table: RowTable) -> Iterator[str]:
    kinds: dict[str, Counter[str]] = {}
    without = []
    for number, row in enumerate(table.rows):
        if "reward_model" not in row:
            return
        reward_model = row["reward_model"] if isinstance(row["reward_model"], dict) else {}
        truth = reward_model.get("ground_truth")
        if not is_null(truth):
            source = str(row.get("data_source"))
            kinds.setdefault(source, Counter())[type(truth).__name__] += 1
        elif reward_model.get("style") != "model":
            without.append(number)
    if without:
        sources = sorted({str(table.rows[number].get("data_source")) for number in without})
        yield (
            f"{_rows(len(without))} without a ground truth (null, NaN, empty or "
            f"missing in reward_model.ground_truth), of data_source {', '.join(sources)}: "
            f"{table.where_all(without)}"
        )
    for source, counts in kinds.items():
        if len(counts) > 1:
            found = ", ".join(f"{kind} ({count})" for kind, count in counts.most_common())
            yield f"the ground truths of {source} have several types: {found}"


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(p.get("text", "")) if isinstance(p, dict) else str(p) for p in content)


def _normalised(prompt: list[Message]) -> str:
    texts = [f"{message['role']} {_text(message)}" for message in prompt]
    return " ".join(" ".join(texts).split()).casefold()


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


BINS = 8
BAR = 32  # characters


def check_tables(check: FileCheck) -> RenderableType:
    """Everything that is known of a file, problems last."""
    schema = [(Text(column), Text(kind)) for column, kind in check.schema.items()]
    unknown = Text("none known", style="yellow")
    sources = [
        (Text(source), f"{count:,}", Text(scorer) if scorer else unknown)
        for source, (count, scorer) in check.sources.items()
    ]
    parts: list[RenderableType] = [
        Text(f"{check.file}: {check.rows:,} rows"),
        _table("schema", ("column", "type"), schema),
        _table("data sources", ("data_source", "rows", "scorer"), sources),
    ]
    for lengths, unit in ((check.characters, "characters"), (check.tokens, "tokens")):
        if lengths:
            parts.append(_histogram(lengths, unit))
    parts.append(Text(f"duplicate prompts: {check.duplicates:,}"))
    if check.overlap is not None:
        parts.append(Text(f"prompts that are in the other file too: {check.overlap:,}"))
    if check.missing:
        named = " and ".join(map(repr, check.missing))
        parts.append(
            Text(
                f"without {named}, only a custom function (custom_reward_function.path) or a "
                "reward model scores these rows",
                style="yellow",
            )
        )
    if check.problems:
        problems = [(Text(problem, style="red"),) for problem in check.problems]
        parts.append(_table("problems", ("what is wrong",), problems))
    else:
        parts.append(Text("no problems found", style="green"))
    return Group(*parts)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _histogram(lengths: list[int], unit: str) -> Table:
    middle = statistics.median(lengths)
    title = f"{unit} of a prompt: {min(lengths):,} to {max(lengths):,}, median {middle:,.0f}"
    bins = list(histogram(lengths))
    most = max(count for _, _, count in bins)
    rows = [
        (f"{first:,} to {last:,}", f"{count:,}", "#" * -(-count * BAR // most))
        for first, last, count in bins
    ]
    return _table(title, (unit, "rows", ""), rows)


def histogram(lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """Bins of one width over all lengths, each as (first, last, how many lengths)."""
    low, high = min(lengths), max(lengths)
    width = (high - low) // BINS + 1
    for first in range(low, high + 1, width):
        last = min(first + width - 1, high)
        yield first, last, sum(first <= length <= last for length in lengths)
