"""Generate responses to the prompts of a file, or resume where an earlier run was ended."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow
import pyarrow.parquet

from caldera.config import uses_ray
from caldera.config.fields import shown, walk
from caldera.config.machine import log_chosen
from caldera.config.offline import GenerationConfig, GenerationDataConfig, resolve_generation
from caldera.data.chat import Message, prompt_messages
from caldera.data.files import RowTable, read_rows
from caldera.errors import ConfigError, DataError
from caldera.storage import local_path
from caldera.storage.locks import locked_folder, remove_locked
from caldera.storage.writing import write_text_atomic, written_aside
from caldera.tracking import TrainingProgress
from caldera.trainer.bundle import write_bundle
from caldera.trainer.secrets import masked_values

if TYPE_CHECKING:
    from caldera.commands.generation_samplers import MakeGroups


logger = logging.getLogger(__name__)


# ---- The file of prompts

RESPONSES = "responses"


@dataclass(frozen=True)
class Questions:
    """The prompts, and the columns that are written out again as they are."""

    table: pyarrow.Table
    prompts: list[list[Message]]
    fingerprint: str
    """SHA-256 of the file."""
    origin: RowTable
    """Without the rows themselves."""

    def where(self, row: int) -> str:
        """Where a prompt comes from, for an error message."""
        return self.origin.where(row)


def read_questions(config: GenerationDataConfig) -> Questions:
    """Every prompt of `data.path`."""
    given = str(config.path)
    rows = read_rows(given, key="data.path", required={config.prompt_key: "data.prompt_key"})
    if RESPONSES in rows.rows[0]:
        raise DataError(
            f"data.path={given!r} has a column {RESPONSES!r} already, which the responses would "
            "replace: rename it or leave it out"
        )
    prompts = [
        prompt_messages(row[config.prompt_key], f"{config.prompt_key!r} in {rows.where(number)}")
        for number, row in enumerate(rows.rows)
    ]
    path = Path(local_path(given, "data.path")).expanduser()
    if not path.is_file():
        raise DataError(f"data.path={given!r}: takes one file, not a folder or a data set")
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    return Questions(_table(path, rows), prompts, fingerprint, replace(rows, rows=[]))


def _table(path: Path, rows: RowTable) -> pyarrow.Table:
    """The columns; those of a parquet file keep their types."""
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path)
    try:
        return pyarrow.Table.from_pylist(rows.rows)
    except pyarrow.ArrowException as error:
        raise DataError(f"data.path: {path} has no parquet form: {error}") from error


# ---- What is finished: batches of answers in a folder beside the output, until all can be joined

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
    "rollout.enable_chunked_prefill",
    "rollout.enable_prefix_caching",
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
        assert len(answers) == len(batch), "a list of responses for each prompt"
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
                f"data.output_path={str(self.output)!r}: {self.folder} has the responses of an "
                f"unfinished run that was another: {told}. Set back what differs to go on with "
                "it, take another data.output_path, or remove the folder to begin anew"
            )


def manifest_of(config: GenerationConfig, questions: Questions) -> dict[str, Any]:
    """Whatever decides which answers are sampled."""
    free = set(FREE)
    traits = config.rollout.traits
    if traits is not None and not traits.draws_together:
        free.add("rollout.max_num_seqs")
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
    with written_aside(path) as aside:
        pyarrow.parquet.write_table(table, aside)


class Answers(Protocol):
    """Where answers come from."""

    def answers(self, rows: range) -> list[list[str]]:
        """The texts of all samples of each row."""


def generate(config: GenerationConfig) -> Path:
    """Write `data.output_path`; returns it."""
    if config.rollout.url is not None:
        write_answers(config)
    elif uses_ray(config):
        from caldera.trainer.ray_runner import run_on_ray

        run_on_ray(config, _settle, write_answers)
    else:
        import torch  # which takes seconds, and a server does without

        _settle(config, torch.cuda.device_count())
        write_answers(config)
    return _output(config)


def write_answers(config: GenerationConfig, make_groups: MakeGroups | None = None) -> None:
    """Sample what is missing, and join it. Groups are local ones unless they are made so."""
    output = _output(config)
    questions = read_questions(config.data)
    rows = len(questions.prompts)
    parts = Parts(output, rows, config.data.batch_size)
    with parts.locked():
        parts.open(manifest_of(config, questions))
        if output.exists():
            logger.warning("%s exists, and will be replaced in the end", output)
        _sample_missing(config, questions, parts, make_groups)
        parts.join(questions.table)
        write_bundle(output.with_name(f"{output.name}.bundle"), config, "data.output_path")
    logger.info(
        "written: %s, %d prompts with %d responses each", output, rows, config.data.n_samples
    )


def _output(config: GenerationConfig) -> Path:
    return Path(str(config.data.output_path)).expanduser()


def _sample_missing(
    config: GenerationConfig, questions: Questions, parts: Parts, make_groups: MakeGroups | None
) -> None:
    """Write the batches that are not there yet."""
    missing, rows = parts.missing(), len(questions.prompts)
    done = rows - sum(map(len, missing))
    if done:
        logger.info("going on with %s: %d of %d prompts have responses", parts.folder, done, rows)
    if not missing:
        return
    progress = TrainingProgress(rows, done, "Generating", unit="prompt")
    with _answers(config, questions, missing, parts, make_groups) as source, progress:
        for batch in missing:
            parts.write(batch, source.answers(batch))
            done += len(batch)
            progress.update(done)


def _settle(config: GenerationConfig, gpus: int) -> None:
    """Fill in what depends on the machine, or on the nodes of a cluster, and tell of it."""
    log_chosen(resolve_generation(config, gpus))


def _answers(
    config: GenerationConfig,
    questions: Questions,
    batches: list[range],
    parts: Parts,
    make_groups: MakeGroups | None,
) -> AbstractContextManager[Answers]:
    if config.rollout.url is not None:
        from caldera.commands.generation_samplers import ServerAnswers

        return ServerAnswers(config, questions)
    from caldera.commands.generation_samplers import Samplers
    from caldera.trainer.groups import local_groups, timeout_of

    if make_groups is None:
        make_groups = partial(
            local_groups,
            device=str(config.trainer.device),
            timeout_s=timeout_of(config),
            log_dir=parts.folder / "logs",
        )
    return Samplers(config, questions, chain.from_iterable(batches), make_groups)
