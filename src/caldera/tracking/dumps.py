"""JSON lines files of a run: written aside and renamed, so a reader never meets half of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np

from caldera.errors import DataError
from caldera.storage.writing import write_text_atomic


def json_line(row: Mapping[str, Any]) -> str:
    """One row as a line of JSON; numpy and torch values become plain numbers and lists."""
    return json.dumps(row, ensure_ascii=False, default=_to_plain) + "\n"


def _to_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON: {value!r}")


def write_jsonl_atomic(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line to a file that appears whole, or not at all."""
    write_text_atomic(path, (json_line(row) for row in rows))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file, without a last line that a killed process left torn."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        lines = file.readlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise DataError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number} holds no JSON object: {line[:80]!r}")
        rows.append(row)
    return rows


def dump_generations(
    folder: Path,
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[SupportsFloat],
    extras: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Write `{folder}/{step}.jsonl`, one object a sample; an extra never replaces a fixed key."""
    steps = [step] * len(inputs)
    fixed = {"input": inputs, "output": outputs, "gts": gts, "score": scores, "step": steps}
    columns = {**fixed, **{k: v for k, v in (extras or {}).items() if k not in fixed}}
    for name, values in columns.items():
        if len(values) != len(inputs):
            raise DataError(
                f"generation dump of step {step}: column {name!r} has {len(values)} values "
                f"for {len(inputs)} samples"
            )
    rows = zip(*columns.values(), strict=True)
    path = folder / f"{step}.jsonl"
    write_jsonl_atomic(path, (dict(zip(columns, row, strict=True)) for row in rows))


def select_val_generations(
    inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float], k: int
) -> list[tuple[str, str, float]]:
    """The k (input, output, score) to show: the same prompts at every validation."""
    samples = sorted(zip(inputs, outputs, scores, strict=True), key=lambda sample: sample[0])
    # Permuting indices keeps the tuples tuples; the order is that of shuffling the list itself.
    order = np.random.RandomState(42).permutation(len(samples))
    return [samples[index] for index in order[:k]]
