"""Generate answers to the prompts of a file, or go on where an earlier run was ended."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Protocol

from caldera.config.generation_checks import resolve_generation
from caldera.config.offline import GenerationConfig
from caldera.errors import UnsupportedError
from caldera.tracking import TrainingProgress
from caldera.trainer.generation.parts import Parts, manifest_of
from caldera.trainer.generation.questions import Questions, read_questions

logger = logging.getLogger(__name__)


class Answers(Protocol):
    """Where answers come from."""

    def answers(self, rows: range) -> list[list[str]]:
        """The texts of all samples of each row."""


def generate(config: GenerationConfig) -> Path:
    """Write `data.output_path`; returns it."""
    _settle(config)
    output = Path(str(config.data.output_path)).expanduser()
    questions = read_questions(config.data)
    rows = len(questions.prompts)
    parts = Parts(output, rows, config.data.batch_size)
    parts.open(manifest_of(config, questions))
    missing = parts.missing()
    done = rows - sum(map(len, missing))
    if done:
        logger.info("going on with %s: %d of %d prompts have answers", parts.folder, done, rows)
    if output.exists():
        logger.warning("%s exists, and will be replaced in the end", output)
    if missing:
        progress = TrainingProgress(rows, done, "Generating", unit="prompt")
        with _answers(config, questions, missing, parts.folder / "logs") as source, progress:
            for batch in missing:
                parts.write(batch, source.answers(batch))
                done += len(batch)
                progress.update(done)
    parts.join(questions.table)
    logger.info("written: %s, %d prompts with %d answers each", output, rows, config.data.n_samples)
    return output


def _settle(config: GenerationConfig) -> None:
    """Fill in what depends on the machine, and tell of it."""
    if config.rollout.url is not None:
        return
    import torch  # which takes seconds, and a server does without

    chosen = resolve_generation(config, torch.cuda.device_count())
    if chosen:
        logger.info("chosen for this machine: %s", ", ".join(chosen))


def _answers(
    config: GenerationConfig, questions: Questions, batches: list[range], log_dir: Path
) -> AbstractContextManager[Answers]:
    if config.rollout.url is not None:
        try:
            from caldera.trainer.generation.server import ServerAnswers
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"rollout.url={config.rollout.url!r}: asking a server needs the package "
                f"{error.name}: install caldera[serve]"
            ) from error
        return ServerAnswers(config, questions)
    from caldera.trainer.generation.sampling import Samplers

    return Samplers(config, questions, chain.from_iterable(batches), log_dir)
