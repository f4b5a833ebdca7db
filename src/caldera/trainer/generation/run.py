"""Generate answers to the prompts of a file, or go on where an earlier run was ended."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from caldera.config import uses_ray
from caldera.config.generation_checks import resolve_generation
from caldera.config.machine import log_chosen
from caldera.config.offline import GenerationConfig
from caldera.errors import UnsupportedError
from caldera.installation import install_command
from caldera.tracking import TrainingProgress
from caldera.trainer.bundle import write_bundle
from caldera.trainer.generation.parts import Parts, manifest_of
from caldera.trainer.generation.questions import Questions, read_questions

if TYPE_CHECKING:
    from caldera.trainer.generation.sampling import MakeGroups

logger = logging.getLogger(__name__)


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
    logger.info("written: %s, %d prompts with %d answers each", output, rows, config.data.n_samples)


def _output(config: GenerationConfig) -> Path:
    return Path(str(config.data.output_path)).expanduser()


def _sample_missing(
    config: GenerationConfig, questions: Questions, parts: Parts, make_groups: MakeGroups | None
) -> None:
    """Write the batches that are not there yet."""
    missing, rows = parts.missing(), len(questions.prompts)
    done = rows - sum(map(len, missing))
    if done:
        logger.info("going on with %s: %d of %d prompts have answers", parts.folder, done, rows)
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
    config: GenerationConfig, questions: Questions, batches: list[range], parts: Parts,
    make_groups: MakeGroups | None,
) -> AbstractContextManager[Answers]:  # fmt: skip
    if config.rollout.url is not None:
        try:
            from caldera.trainer.generation.server import ServerAnswers
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"rollout.url={config.rollout.url!r}: asking a server needs the package "
                f"{error.name}: {install_command('serve')}"
            ) from error
        return ServerAnswers(config, questions)
    from caldera.trainer.generation.sampling import Samplers
    from caldera.trainer.groups import local_groups, timeout_of

    if make_groups is None:
        make_groups = partial(
            local_groups, device=str(config.trainer.device), timeout_s=timeout_of(config),
            log_dir=parts.folder / "logs",
        )  # fmt: skip
    return Samplers(config, questions, chain.from_iterable(batches), make_groups)
