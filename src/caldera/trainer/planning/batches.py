"""How one step cuts its batch: prompts, samples, mini-batches, micro-batches, optimiser steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caldera.config import PPOTrainerConfig
from caldera.config.strategies import row_sharers, token_sharers
from caldera.trainer.planning.memory import Pass


@dataclass(frozen=True)
class Cut:
    """How a rank's rows of a batch become micro-batches, if all samples are as long as can be."""

    rows: int
    """Samples of a rank that are cut."""
    together: int
    """Samples of the largest micro-batch."""
    by_tokens: bool
    length: int
    """Tokens of a sample, prompt and answer."""
    answer: int
    sharers: int
    """Ranks that share the tokens of a micro-batch."""

    @property
    def micro_batches(self) -> int:
        return -(-self.rows // self.together)

    @property
    def largest(self) -> Pass:
        """The largest micro-batch, as a rank sees it."""
        tokens, answers = self.together * self.length, self.together * self.answer
        share = self.sharers
        return Pass(-(-tokens // share), -(-answers // share), self.micro_batches > 1)


@dataclass(frozen=True)
class StepBatches:
    """The numbers of one training step."""

    prompts: int
    n: int
    ranks: int
    copies: int
    """Copies of the actor's model, among which samples are dealt."""
    mini_batches: int
    epochs: int
    log_prob: Cut
    update: Cut

    @property
    def samples(self) -> int:
        return self.prompts * self.n

    @property
    def samples_a_copy(self) -> int:
        return self.samples // self.copies

    @property
    def samples_a_rank(self) -> int:
        """Those that a rank samples."""
        return -(-self.samples // self.ranks)

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches * self.epochs


def step_batches(config: PPOTrainerConfig) -> StepBatches:
    """The numbers of a config whose checks have passed."""
    parts, prompts = config.actor_rollout_ref, config.data.train_batch_size
    actor, rollout = parts.actor, parts.rollout
    ranks = (config.trainer.n_gpus_per_node or 1) * config.trainer.nnodes
    copies = max(1, ranks // row_sharers(actor))
    rows = prompts * rollout.n // copies
    mini_batch = actor.ppo_mini_batch_size * rollout.n // copies
    return StepBatches(
        prompts=prompts,
        n=rollout.n,
        ranks=ranks,
        copies=copies,
        mini_batches=prompts // actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        log_prob=log_prob_cut(config, rollout, actor, rows),
        update=update_cut(config, actor, mini_batch),
    )


def log_prob_cut(config: PPOTrainerConfig, node: Any, computing: Any, rows: int) -> Cut:
    """Of log-probs; `node` has the keys, `computing` is the role that computes."""
    return _cut(
        config, computing, rows, node.log_prob_use_dynamic_bsz,
        node.log_prob_micro_batch_size_per_gpu, node.log_prob_max_token_len_per_gpu,
    )  # fmt: skip


def update_cut(config: PPOTrainerConfig, node: Any, rows: int) -> Cut:
    """Of an update of the actor or of the critic."""
    return _cut(
        config, node, rows, node.use_dynamic_bsz, node.ppo_micro_batch_size_per_gpu,
        node.ppo_max_token_len_per_gpu,
    )  # fmt: skip


def forward_cut(config: PPOTrainerConfig, node: Any, rows: int, size: int | None) -> Cut:
    """Of a forward pass of the critic or of the reward model."""
    dynamic, tokens = node.use_dynamic_bsz, node.forward_max_token_len_per_gpu
    return _cut(config, node, rows, dynamic, size, tokens)


def _cut(
    config: PPOTrainerConfig, node: Any, rows: int, by_tokens: bool, size: int | None, tokens: int
) -> Cut:
    rollout, sharers = config.actor_rollout_ref.rollout, token_sharers(node)
    length = rollout.prompt_length + rollout.response_length
    most = tokens * sharers // length if by_tokens else size
    assert most, "the config's check has seen that a sample has room"
    together = max(1, min(rows, most))
    return Cut(rows, together, by_tokens, length, rollout.response_length, sharers)
