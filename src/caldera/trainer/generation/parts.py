"""What is finished: batches of answers in a folder beside the output, until all can be joined."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from caldera.config.fields import shown, walk
from caldera.config.offline import GenerationConfig
from caldera.errors import ConfigError, DataError
from caldera.storage.locks import locked_folder, remove_locked
from caldera.tracking.dumps import write_text_atomic
from caldera.trainer.generation.questions import RESPONSES, Questions
from caldera.trainer.secrets import masked_values

MANIFEST = "manifest.json"
ANSWERS = pyarrow.schema([(RESPONSES, pyarrow.list_(pyarrow.string()))])
INPUT = "the SHA-256 of data.path"
FREE = {
    "data.path",  # its content counts
    "data.output_path",
    "rollout.url",
    "rollout.remote.url",
    "rollout.engine_python",
    "rollout.gpu_memory_utilization",
    "rollout.max_num_batched_tokens",
}
"""Keys that do not change what is sampled."""
FREE_GROUPS = ("trainer.", "ray_kwargs.")
"""Groups of such keys."""


class Parts:
    """The folder OUTPUT.parts: a manifest, and a file for each finished batch."""

    def __init__(self, output: Path, rows: int, batch_size: int) -> None:
        self.output = output
        self.folder = output.with_name(f"{output.name}.parts")
        self.batches = [
            range(start, min(start + batch_size, rows)) for start in range(0, rows, batch_size)
        ]

    def locked(self) -> AbstractContextManager[None]:
        """Meanwhile no other run writes this output; one that does already is an error."""
        return locked_folder(self.folder, f"data.output_path={str(self.output)!r}")

    def open(self, manifest: dict[str, Any]) -> None:
        """Begin, or go on with what an earlier run of the same manifest has left."""
        file = self.folder / MANIFEST
        if file.exists():
            self._check(_read(file), manifest)
        elif any(self.folder.glob("*.parquet")):
            raise DataError(f"{self.folder} has no {MANIFEST}: remove the folder to begin anew")
        else:
            write_text_atomic(file, [json.dumps(manifest, indent=2), "\n"])

    def missing(self) -> list[range]:
        """The batches that are still to be sampled."""
        return [batch for batch in self.batches if not self._file(batch).exists()]

    def write(self, batch: range, answers: Sequence[Sequence[str]]) -> None:
        """Keep the answers to the prompts of a batch."""
        assert len(answers) == len(batch), "a list of answers for each prompt"
        rows = [{RESPONSES: list(texts)} for texts in answers]
        _write_table(pyarrow.Table.from_pylist(rows, ANSWERS), self._file(batch))

    def join(self, table: pyarrow.Table) -> None:
        """Write the output, the table with the answers, and remove the folder."""
        parts = [pyarrow.parquet.read_table(self._file(batch)) for batch in self.batches]
        answers = pyarrow.concat_tables(parts).column(RESPONSES)
        _write_table(table.append_column(ANSWERS.field(RESPONSES), answers), self.output)
        remove_locked(self.folder)

    def _file(self, batch: range) -> Path:
        return self.folder / f"rows-{batch.start:09d}-{batch.stop:09d}.parquet"

    def _check(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        differing = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        if differing:
            told = "; ".join(
                f"{key} was {shown(there.get(key))} there and is {shown(here.get(key))} here"
                for key in differing
            )
            raise ConfigError(
                f"data.output_path={str(self.output)!r}: {self.folder} has the answers of an "
                f"unfinished run that was another: {told}. Set back what differs to go on with "
                "it, take another data.output_path, or remove the folder to begin anew"
            )


def manifest_of(config: GenerationConfig, questions: Questions) -> dict[str, Any]:
    """Whatever decides which answers are sampled."""
    free = set(FREE)
    if config.rollout.name != "hf":
        free.add("rollout.max_num_seqs")  # hf draws the sequences of a batch together
    keys = {key: value for key, _, value in walk(config) if key not in free}
    fixed = {key: value for key, value in keys.items() if not key.startswith(FREE_GROUPS)}
    return {**masked_values(fixed), INPUT: questions.fingerprint}


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{file} cannot be read: {error}; remove its folder to begin anew"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is no manifest; remove its folder to begin anew")
    return content


def _write_table(table: pyarrow.Table, path: Path) -> None:
    """A parquet file that appears whole, or not at all."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("wb") as file:
        pyarrow.parquet.write_table(table, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
