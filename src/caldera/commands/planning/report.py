"""A plan for a person to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from caldera.commands.planning.memory import Pass
from caldera.commands.planning.plan import CONTEXT, FRAGMENTS, GIB, Plan
from caldera.config import PPOTrainerConfig
from caldera.config.strategies import model_parallel_size, sequence_parallel_size
from caldera.tracking.progress import print_line, print_table

# ---- How one step cuts its batch: prompts, samples, mini-batches, micro-batches, optimiser steps


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
    sequence_parallel: int
    """Ranks that share the tokens of a micro-batch."""

    @property
    def micro_batches(self) -> int:
        return -(-self.rows // self.together)

    @property
    def largest(self) -> Pass:
        """The largest micro-batch, as a rank sees it."""
        tokens, answers = self.together * self.length, self.together * self.answer
        share = self.sequence_parallel
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
    copies = max(1, ranks // model_parallel_size(actor))
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
        config,
        computing,
        rows,
        node.log_prob_use_dynamic_bsz,
        node.log_prob_micro_batch_size_per_gpu,
        node.log_prob_max_token_len_per_gpu,
    )


def update_cut(config: PPOTrainerConfig, node: Any, rows: int) -> Cut:
    """Of an update of the actor or of the critic."""
    return _cut(
        config,
        node,
        rows,
        node.use_dynamic_bsz,
        node.ppo_micro_batch_size_per_gpu,
        node.ppo_max_token_len_per_gpu,
    )


def forward_cut(config: PPOTrainerConfig, node: Any, rows: int, size: int | None) -> Cut:
    """Of a forward pass of the critic or of the reward model."""
    dynamic, tokens = node.use_dynamic_bsz, node.forward_max_token_len_per_gpu
    return _cut(config, node, rows, dynamic, size, tokens)


def _cut(
    config: PPOTrainerConfig, node: Any, rows: int, by_tokens: bool, size: int | None, tokens: int
) -> Cut:
    rollout, sequence_parallel = config.actor_rollout_ref.rollout, sequence_parallel_size(node)
    length = rollout.prompt_length + rollout.response_length
    most = tokens * sequence_parallel // length if by_tokens else size
    assert most, "the config's check has seen that a sample has room"
    together = max(1, min(rows, most))
    return Cut(rows, together, by_tokens, length, rollout.response_length, sequence_parallel)


PARTS = (
    "weights",
    "gradients",
    "optimiser",
    "activations",
    "sampler's weights",
    "key/value cache",
    "other models",
)


def show(plan: Plan, device: str) -> None:
    """Print it: batches, parameters, bytes a device by phase, and the verdict."""
    _show_batches(plan)
    _show_models(plan)
    _show_memory(plan)
    _show_verdict(plan, device)


def _show_batches(plan: Plan) -> None:
    step, together = plan.batches, plan.sampler.ranks
    samplers = _count(step.ranks, "rank")
    if together > 1:
        samplers = f"{_count(step.ranks // together, 'group')} of {together} ranks"
    print_line("One step")
    print_line(
        f"  {step.prompts:,} prompts x {step.n} answers = {step.samples:,} samples; "
        f"{plan.sampler.samples:,} are sampled by each of {samplers}"
    )
    print_line(f"  log-probs: {_cut_in_words(step.log_prob)}")
    each = step.update.rows * step.copies
    print_line(
        f"  update: {_count(step.mini_batches, 'mini-batch')} of {each:,} samples x "
        f"{_count(step.epochs, 'epoch')} = {_count(step.optimizer_steps, 'optimiser step')}; in "
        f"each, {_cut_in_words(step.update)}"
    )


def _cut_in_words(cut: Cut) -> str:
    bound = "at most " if cut.by_tokens else ""
    return (
        f"{cut.rows:,} samples a rank in {bound}{_count(cut.micro_batches, 'micro-batch')} of up "
        f"to {cut.together:,} samples ({cut.largest.tokens:,} tokens)"
    )


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("batch") else "s"
    return f"{number:,} {noun}{plural}"


def _show_models(plan: Plan) -> None:
    print_line("Models")
    for name, held in plan.roles.items():
        shape = held.shape
        print_line(
            f"  {name}: {shape.parameters:,} parameters"
            + (f", {shape.trained:,} trained" if held.states >= 0 else ", frozen")
            + f", {8 * held.kept_bytes} bits each"
            + (f", sharded over {held.shards} ranks" if held.shards > 1 else "")
        )
    print_line(f"  a checkpoint: {_size(plan.checkpoint)} on disk")


def _show_memory(plan: Plan) -> None:
    # Without lines between them, the columns of PPO with all its models fit into 80 cells.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("on a device")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    for part in PARTS:
        sizes = [phase.parts.get(part, 0) for phase in plan.phases]
        if any(sizes):
            table.add_row(part, *map(_size, sizes))
    table.add_section()
    table.add_row("peak", *(_size(phase.peak) for phase in plan.phases))
    print_table(table)


def _size(count: int) -> str:
    """Bytes in the largest unit of which they are at least a tenth."""
    units = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
    for name, unit in units.items():
        if 10 * count >= unit:
            number = count / unit
            return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f} {name}"
    return f"{count} B" if count else "0"


def _show_verdict(plan: Plan, device: str) -> None:
    largest, has = plan.largest, plan.device_bytes / GIB
    wanted = min(plan.sampler.samples, plan.sampler.max_num_seqs)
    if plan.cached_sequences < wanted:
        print_line(
            f"The key/value cache has room for {plan.cached_sequences} samples at their longest, "
            f"{wanted} could be sampled at the same time: "
            "actor_rollout_ref.rollout.gpu_memory_utilization bounds it"
        )
    verdict = "fits" if plan.fits else "does not fit"
    print_line(
        f"It {verdict}: {largest.name} needs {largest.needed / GIB:.1f} GiB ({FRAGMENTS:.0%} for "
        f"gaps and {CONTEXT / GIB:.0f} GiB for CUDA included), {device} has {has:.1f} GiB"
    )
    if not plan.fits:
        for hint in _hints(plan):
            print_line(f"  {hint}")


def _hints(plan: Plan) -> list[str]:
    """Keys that would make the largest phase smaller, the most effective first."""
    actor, name = plan.roles["actor"], plan.largest.name
    hints = []
    if plan.cached_sequences == 0:
        hints.append("higher: actor_rollout_ref.rollout.gpu_memory_utilization")
    if name == "update" and not actor.checkpoints:
        hints.append("actor_rollout_ref.model.enable_gradient_checkpointing=True")
    if name == "update" and plan.batches.update.together > 1:
        hints.append("fewer samples or tokens in a micro-batch of actor_rollout_ref.actor")
    if name != "update" and not actor.optimizer_offload:
        hints.append("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True")
    if plan.largest.parts.get("other models", 0):
        hints.append("fsdp_config.param_offload=True of the models that do not compute then")
    if actor.shards == 1:
        hints.append("more devices: strategy=fsdp2 shares weights and optimiser out to them")
    return hints
