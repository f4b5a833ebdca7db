"""What surrounds the work on a batch: models come to the device, and its use is measured."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from caldera.config import ActorRolloutRefConfig, RefConfig, RolloutConfig
from caldera.engine import Engine, ForwardPlan, LossFn, OutputName
from caldera.models.flops import promised_flops
from caldera.protocol import DataProto, tensors_of

logger = logging.getLogger(__name__)


@contextmanager
def on_device(*engines: Engine | None, optimizer: bool = False) -> Iterator[None]:
    """Offloaded models, of the first the optimiser too if asked, are on the device meanwhile."""
    present = [engine for engine in engines if engine is not None]
    for position, engine in enumerate(present):
        engine.onload(optimizer=optimizer and position == 0)
    yield
    for engine in present:
        engine.offload()


@contextmanager
def mfu_timer(
    role: str, engine: Engine, data: DataProto, epochs: int = 0
) -> Iterator[dict[str, float]]:
    """Yields a dict that in the end holds `perf/mfu/{role}`: needed over promised arithmetic.

    `epochs` passes forward and backward over the batch; 0 is one pass forward. Where either number
    is unknown, as on a CPU, the dict stays empty.
    """
    metrics: dict[str, float] = {}
    start = time.perf_counter()
    yield metrics
    promised = promised_flops(engine.device)
    if promised is None:
        return
    torch.cuda.synchronize(engine.device)
    seconds = time.perf_counter() - start
    tensors = tensors_of(data)
    lengths = tensors["attention_mask"].sum(1).tolist()
    responses = int(tensors["response_mask"].sum())
    needed = engine.arithmetic.flops(lengths, responses, epochs > 0)
    if needed is not None:
        work = needed * max(epochs, 1) / engine.model_parallel_size
        metrics[f"perf/mfu/{role}"] = work / seconds / promised


# ---- What the engines are to compute in each phase, as the config says


def update_plan(config: ActorRolloutRefConfig, reference: Engine | None) -> ForwardPlan:
    """For training the actor; `reference` is used where the loss needs the full KL to it."""
    actor = config.actor
    outputs: list[OutputName] = ["log_probs"]
    if actor.entropy_coeff != 0 or actor.calculate_entropy:
        outputs.append("entropy")
    if full_kl := actor.use_kl_loss and actor.kl_loss_type == "full":
        outputs.append("full_kl")
    return ForwardPlan(
        tuple(outputs),
        bool(actor.use_dynamic_bsz),
        actor.ppo_micro_batch_size_per_gpu,
        actor.ppo_max_token_len_per_gpu,
        config.rollout.temperature,
        reference if full_kl else None,
        actor.classic_loss_normalization,
    )


def log_prob_plan(
    config: RolloutConfig | RefConfig,
    outputs: tuple[OutputName, ...],
    temperature: float,
    reference: Engine | None,
) -> ForwardPlan:
    """For log-probs and their like, without training."""
    return ForwardPlan(
        outputs,
        bool(config.log_prob_use_dynamic_bsz),
        config.log_prob_micro_batch_size_per_gpu,
        config.log_prob_max_token_len_per_gpu,
        temperature,
        reference if "full_kl" in outputs else None,
    )


# ---- Training on one batch: epochs, mini-batches, one schedule step


def train_epochs(
    engine: Engine,
    data: DataProto,
    loss_fn: LossFn,
    plan: ForwardPlan,
    mini_batch_size: int,
    epochs: int,
    shuffle_seed: int | None,
    name: str,
) -> dict[str, float]:
    """One optimiser step per mini-batch, of `mini_batch_size` rows over all ranks.

    `data` are this rank's rows, the same number on each. Metrics are means over the steps.
    """
    own_size = mini_batch_size // engine.dp_size  # the config's check has seen that it divides
    order = {"shuffle": shuffle_seed is not None}
    mini_batches = data.make_iterator(own_size, epochs, shuffle_seed, order)
    with mfu_timer(name, engine, data, epochs) as mfu:
        steps = [engine.train(mini_batch, loss_fn, plan) for mini_batch in mini_batches]
    metrics = _read(steps, name)
    metrics[f"{name}/lr"] = engine.step_schedule()
    return metrics | mfu | memory_metrics()


def _read(steps: list[dict[str, Tensor]], name: str) -> dict[str, float]:
    """Means over the steps. Only here does anybody wait for the device."""
    found = torch.stack([torch.stack([*step.values()]).float() for step in steps])  # (steps, keys)
    rows: list[list[float]] = found.tolist()
    names = list(steps[0])
    metrics = {key: sum(column) / len(rows) for key, *column in zip(names, *rows, strict=True)}
    for number, row in enumerate(rows):
        norm = row[names.index("grad_norm")]
        if not math.isfinite(norm):
            logger.warning("%s: the gradient norm of step %d is %s: skipped", name, number, norm)
    metrics[f"{name}/grad_norm"] = metrics.pop("grad_norm")
    return metrics


def memory_metrics() -> dict[str, float]:
    """Peak memory of this process, and of its GPU where there is one, in GiB."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"perf/cpu_memory_used_gb": kibibytes / 2**20}
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return metrics


# ---- Which tensors and columns of a batch the workers' methods read; no others are sent to them
#
# Those that a run does not have, such as the reference's log-probs, may be missing.

REWARD_ROWS = "reward_rows"
"""Column of what is known of each row: for agent loops, and for scoring responses as they end."""
PROMPTS = ("input_ids", "attention_mask", "raw_prompt_ids", "sample_seed", REWARD_ROWS)
RESPONSES = ("input_ids", "attention_mask", "responses")
CONVERSATIONS = (*RESPONSES, "raw_prompt")
MASKED_RESPONSES = (*RESPONSES, "response_mask")
POLICY_LOSS = ("old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")
VALUE_LOSS = ("values", "returns")
