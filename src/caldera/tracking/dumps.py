"""JSON lines files of a run: written aside and renamed, so a reader never meets half of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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


class GenerationDump:
    """Writes `{folder}/{step}.jsonl`, one object per sample, in a background thread.

    An error of the thread is raised by the next `write` or by `close`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generation-dump")
        self._pending: Future[None] | None = None

    def write(
        self,
        step: int,
        inputs: Sequence[str],
        outputs: Sequence[str],
        gts: Iterable[Any],
        scores: Iterable[SupportsFloat],
        extras: Mapping[str, Iterable[Any]] | None = None,
    ) -> None:
        """Dump the samples of one step; an extra never replaces one of the five fixed keys."""
        fixed = {
            "input": list(inputs),
            "output": list(outputs),
            "gts": list(gts),
            "score": list(scores),
            "step": [step] * len(inputs),
        }
        # Copies, because the caller goes on with its lists while the thread writes.
        columns = fixed | {k: list(v) for k, v in (extras or {}).items() if k not in fixed}
        for name, values in columns.items():
            if len(values) != len(inputs):
                raise DataError(
                    f"generation dump of step {step}: column {name!r} has {len(values)} values "
                    f"for {len(inputs)} samples"
                )
        self._wait()
        rows = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        path = self.folder / f"{step}.jsonl"
        self._pending = self._writer.submit(write_jsonl_atomic, path, rows)

    def _wait(self) -> None:
        """Wait for the file under way, normally long written, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait until everything is on disk; raises what went wrong on the way."""
        try:
            self._wait()
        finally:
            self._writer.shutdown()

    def __enter__(self) -> GenerationDump:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def select_val_generations(
    inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float], k: int
) -> list[tuple[str, str, float]]:
    """The k (input, output, score) to show: the same prompts at every validation."""
    samples = sorted(zip(inputs, outputs, scores, strict=True), key=lambda sample: sample[0])
    # Permuting indices keeps the tuples tuples; the order is that of shuffling the list itself.
    order = np.random.RandomState(42).permutation(len(samples))
    return [samples[index] for index in order[:k]]
