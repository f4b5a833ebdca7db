"""What is measured about a training step, on the driver, under verl's metric names."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from caldera.protocol import DataProto, tensors_of
from caldera.trainer.ppo.rewards import rows_with_reward

# Phases whose time per token is reported: generation works on response tokens, the rest on all.
PHASES_OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")


def compute_data_metrics(batch: DataProto, use_critic: bool) -> dict[str, float]:
    """Statistics of one batch. Those of an empty set of samples or tokens are 0.

    Reads `token_level_scores`, `token_level_rewards`, `advantages`, `returns`, `response_mask`,
    `responses`, `attention_mask`, with a critic `values`, and if present `has_reward` (scores and
    rewards of other rows are not counted) and `__num_turns__`.
    """
    prompt_length, response_length = _lengths(batch)  # (B,), (B,)
    finished = response_length > 0  # an aborted sample has no response, hence no score of its own
    max_response_length = tensors_of(batch)["responses"].shape[-1]
    max_prompt_length = tensors_of(batch)["attention_mask"].shape[-1] - max_response_length

    metrics: dict[str, float] = {}
    rewarded = finished & rows_with_reward(batch)
    scores = tensors_of(batch)["token_level_scores"].sum(-1)[rewarded]
    rewards = tensors_of(batch)["token_level_rewards"].sum(-1)[rewarded]
    metrics |= _statistics("critic/score", scores)
    metrics |= _statistics("critic/rewards", rewards)
    metrics |= _token_metrics(batch, use_critic)
    metrics |= _length_metrics("response_length", response_length, max_response_length)
    metrics |= _length_metrics(
        "response_length_non_aborted", response_length[finished], max_response_length
    )
    metrics["response/aborted_ratio"] = _mean(~finished)
    metrics |= _length_metrics("prompt_length", prompt_length, max_prompt_length)
    if "__num_turns__" in batch.non_tensor_batch:
        turns = batch.non_tensor_batch["__num_turns__"].astype(np.float64)
        metrics |= _statistics("num_turns", torch.from_numpy(turns))
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Seconds of every phase, and of the phases that work on tokens the milliseconds per token."""
    prompt_length, response_length = _lengths(batch)
    response_tokens = int(response_length.sum())
    all_tokens = int(prompt_length.sum()) + response_tokens
    tokens = {"gen": response_tokens} | dict.fromkeys(PHASES_OVER_ALL_TOKENS, all_tokens)

    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name, count in tokens.items():
        if name in timing_raw and count > 0:
            metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000 / count
    return metrics


def compute_throughput_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> dict[str, float]:
    """Tokens of the batch (prompts and responses), by second and device over the whole step."""
    total_tokens = int(tensors_of(batch)["attention_mask"].sum())
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": total_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": total_tokens / (seconds * n_gpus),
    }


def compute_rollout_diff_metrics(
    rollout_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """How far the sampler's token probabilities are from those that the actor computes.

    All three are (B, R). `valid` is 0, and so is the rest, if the mask leaves no token.
    """
    mask = response_mask.bool()
    rollout_probs = rollout_log_probs[mask].double().exp()  # (T,)
    actor_probs = old_log_probs[mask].double().exp()  # (T,)
    difference = (rollout_probs - actor_probs).abs()
    prefix = "training/rollout_probs_diff"
    return {
        f"{prefix}_valid": float(difference.numel() > 0),
        f"{prefix}_max": float(difference.max()) if difference.numel() else 0.0,
        f"{prefix}_mean": _mean(difference),
        f"{prefix}_std": _variance(difference) ** 0.5,
        "training/rollout_actor_probs_pearson_corr": _pearson(rollout_probs, actor_probs),
    }


def _lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Tokens of each prompt and of each response, tool tokens included, padding not: (B,), (B,)."""
    attention_mask = tensors_of(batch)["attention_mask"]  # (B, P + R)
    max_response_length = tensors_of(batch)["responses"].shape[-1]
    prompt_length = attention_mask[:, :-max_response_length].sum(-1)
    response_length = attention_mask[:, -max_response_length:].sum(-1)
    return prompt_length, response_length


def _token_metrics(batch: DataProto, use_critic: bool) -> dict[str, float]:
    """Statistics over the tokens that the model generated."""
    mask = tensors_of(batch)["response_mask"].bool()  # (B, R)
    returns = tensors_of(batch)["returns"][mask].float()  # (T,)
    metrics = _statistics("critic/advantages", tensors_of(batch)["advantages"][mask])
    metrics |= _statistics("critic/returns", returns)
    if use_critic:
        values = tensors_of(batch)["values"][mask].float()  # (T,)
        metrics |= _statistics("critic/values", values)
        # The small number keeps returns that are all equal from dividing by zero.
        unexplained = _variance(returns - values) / (_variance(returns) + 1e-5)
        metrics["critic/vf_explained_var"] = 1.0 - unexplained
    return metrics


def _length_metrics(name: str, lengths: Tensor, max_length: int) -> dict[str, float]:
    return _statistics(name, lengths) | {f"{name}/clip_ratio": _mean(lengths == max_length)}


def _statistics(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {f"{name}/mean": 0.0, f"{name}/max": 0.0, f"{name}/min": 0.0}
    return {
        f"{name}/mean": _mean(values),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def _variance(values: Tensor) -> float:
    """The unbiased variance; 0 where fewer than two values leave it undefined."""
    return float(values.double().var()) if values.numel() > 1 else 0.0


def _pearson(first: Tensor, second: Tensor) -> float:
    """The correlation of two vectors; where one is constant, 1 if they are equal, else 0."""
    if first.numel() == 0:
        return 0.0
    if first.min() == first.max() or second.min() == second.max():
        return float(torch.equal(first, second))
    first_centred, second_centred = first - first.mean(), second - second.mean()
    norm = first_centred.norm() * second_centred.norm()
    return float((first_centred @ second_centred / norm).clamp(-1.0, 1.0))
