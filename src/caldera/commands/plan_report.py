"""A plan for a person to read."""

from __future__ import annotations

from rich import box
from rich.table import Table

from caldera.commands.planning import CONTEXT, FRAGMENTS, GIB, Cut, Plan
from caldera.tracking.progress import print_line, print_table

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
        f"  {step.prompts:,} prompts x {step.n} responses = {step.samples:,} samples; "
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
