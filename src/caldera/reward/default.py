"""The score function of a run that names none: scorers by data source, programs in a sandbox."""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from caldera.config.reward import SandboxFusionConfig
from caldera.errors import ConfigError
from caldera.reward.custom import ScoreFunction
from caldera.reward.scoring import in_a_queue
from caldera.reward_score import Score, default_compute_score
from caldera.reward_score.code_tests import Program, ProgramResult
from caldera.sandbox import Limits, Outcome, Sandbox, SandboxFusionClient

RUN_ASSERTS = """
exec({asserts!r}, globals())
print({mark!r})
"""
"""Appended to a program whose asserts have to run beside it: they are not part of its source, so
that a mistake in its last line stays its own."""


def default_score_function(config: SandboxFusionConfig) -> ScoreFunction:
    """Scores by data source, with programs where `reward_model.sandbox_fusion` puts them."""
    if config.url is not None:
        _client(config.url, config.max_concurrent, config.memory_limit_mb)  # a bad URL ends here
    return partial(score_by_data_source, sandbox=config)


def scores_by_source(function: ScoreFunction) -> bool:
    """Whether it is the one below that scores, and not one of the user's own."""
    return getattr(function, "func", function) is score_by_data_source


def score_by_data_source(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox: SandboxFusionConfig | None = None,
    **kwargs: Any,
) -> Score:
    """`default_compute_score`, with code problems tested in a sandbox.

    It is the server's that `sandbox` names; without a URL, this machine's own.
    """
    run_tests = partial(_run_tests, sandbox or SandboxFusionConfig())
    return default_compute_score(
        data_source, solution_str, ground_truth, extra_info, run_tests=run_tests, **kwargs
    )


def _run_tests(config: SandboxFusionConfig, programs: Sequence[Program]) -> Iterator[ProgramResult]:
    """One by one, since the caller may stop at the first that fails."""
    if config.url is not None:
        client = _client(config.url, config.max_concurrent, config.memory_limit_mb)
        run = partial(_run_on_server, client)
    else:
        run = partial(_run_here, _sandbox(config.max_concurrent, config.memory_limit_mb))
    for program in programs:
        # Programs of other responses may come first, and each program has its own time limit.
        with in_a_queue() as count:
            outcome = run(program)
            count(outcome.seconds)
        yield ProgramResult(outcome.stdout, outcome.ok)


def _run_here(sandbox: Sandbox, program: Program) -> Outcome:
    if program.asserts:
        return sandbox.check(program.source, program.asserts)
    return sandbox.run(program.source, program.stdin)


def _run_on_server(client: SandboxFusionClient, program: Program) -> Outcome:
    """Where a server only runs programs, asserts run after the program, in its own process."""
    if not program.asserts:
        return client.run(program.source, program.stdin)
    if judged := client.check(program.source, program.asserts):
        return judged
    mark = secrets.token_hex(16)  # a program that ends before its asserts do cannot print it
    rest = RUN_ASSERTS.format(asserts=program.asserts, mark=mark)
    outcome = client.run(f"{program.source}\n{rest}", program.stdin)
    stdout, found, _ = outcome.stdout.rpartition(f"{mark}\n")
    status = outcome.status if found or not outcome.ok else "failed"
    return replace(outcome, stdout=stdout, status=status)


@cache
def _client(url: str, max_concurrent: int, memory_limit_mb: int) -> SandboxFusionClient:
    try:
        limits = Limits(memory_mb=memory_limit_mb)
        return SandboxFusionClient(url, limits, max_concurrent=max_concurrent)
    except ConfigError as error:
        raise ConfigError(f"reward_model.sandbox_fusion: {error}") from error


@cache
def _sandbox(max_concurrent: int, memory_limit_mb: int) -> Sandbox:
    """Started by the first code problem, ended with the process.

    Programs beyond the machine's cores would only use up each other's time.
    """
    slots = min(max_concurrent, os.cpu_count() or 1)
    sandbox = Sandbox(Limits(memory_mb=memory_limit_mb), slots)
    atexit.register(sandbox.close)
    return sandbox
