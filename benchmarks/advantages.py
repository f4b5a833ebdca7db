"""Advantages of a batch: every estimator beside a plain loop that computes the same.

    python benchmarks/advantages.py [--rows 4096] [--tokens 8192] [--turns 1] [--group 8]
        [--share 64] [--threads 2]

The loop is written as one would write it first: over tokens, one column at a time, for recursions
in time; over rows or groups otherwise. It gets 1/share of the tokens or of the rows, its time is
multiplied by share, and its result must agree with the estimator's. With --turns above 1 the
responses hold tool tokens, the last quarter of every turn. Prints the median of three runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caldera.config.algorithm import AlgorithmConfig
from caldera.core_algos import (
    AdvantageEstimator,
    AdvantageInputs,
    estimate_advantages,
    masked_whiten,
)

CONFIG = AlgorithmConfig(gamma=0.99, lam=0.95, gdpo_reward_keys=["score", "format"])
Loop = Callable[[AdvantageInputs], Tensor]


def make_inputs(rows: int, tokens: int, turns: int, group: int) -> AdvantageInputs:
    """Responses of 1 to `tokens` tokens, with a reward of 0 or 1 on their last one."""
    generator = torch.Generator().manual_seed(rows + tokens)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    places = torch.arange(tokens)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
    mask = places < lengths.unsqueeze(-1)
    if turns > 1:
        turn = max(2, tokens // turns)
        mask &= places % turn < turn - max(1, turn // 4)
    scores = (random(rows) < 0.5).float()
    rewards = torch.zeros(rows, tokens)
    rewards[torch.arange(rows), lengths - 1] = scores
    log_probs = -random(rows, tokens)
    return AdvantageInputs(
        rewards,
        mask.long(),
        index=np.array([f"prompt {row // group}" for row in range(rows)], dtype=object),
        values=random(rows, tokens),
        reward_baselines=(random(rows) < 0.5).float(),
        sum_pi_squared=log_probs.exp().square(),
        old_log_probs=log_probs,
        rollout_is_weights=random(rows, tokens) + 0.5,
        non_tensor_batch={"score": scores.numpy(), "format": random(rows).numpy()},
    )


# ---------------------------------------------------------------- loops over tokens


def gae_loop(inputs: AdvantageInputs) -> Tensor:
    values, mask = inputs.values, inputs.response_mask
    assert values is not None
    advantages = torch.zeros_like(values)
    next_value = next_advantage = stray = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        kept = mask[:, t].bool()
        stray = stray + inputs.token_level_rewards[:, t]
        delta = stray + CONFIG.gamma * next_value - values[:, t]
        advantage = delta + CONFIG.gamma * CONFIG.lam * next_advantage
        next_advantage = torch.where(kept, advantage, next_advantage)
        next_value = torch.where(kept, values[:, t], next_value)
        stray = stray.masked_fill(kept, 0)
        advantages[:, t] = next_advantage
    return masked_whiten(advantages, mask) * mask


def returns_loop(inputs: AdvantageInputs, gamma: float) -> Tensor:
    rewards, mask = inputs.token_level_rewards, inputs.response_mask
    returns = torch.zeros_like(rewards)
    following = stray = rewards.new_zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        kept = mask[:, t].bool()
        stray = stray + rewards[:, t]
        following = torch.where(kept, stray + gamma * following, following)
        stray = stray.masked_fill(kept, 0)
        returns[:, t] = following
    return returns * mask


def reinforce_plus_plus_loop(inputs: AdvantageInputs) -> Tensor:
    mask = inputs.response_mask
    return masked_whiten(returns_loop(inputs, CONFIG.gamma), mask) * mask


def remax_loop(inputs: AdvantageInputs) -> Tensor:
    assert inputs.reward_baselines is not None
    baselines = inputs.reward_baselines.unsqueeze(-1)
    return (returns_loop(inputs, 1.0) - baselines) * inputs.response_mask


# ---------------------------------------------------------------- loops over rows and groups


def groups_of(inputs: AdvantageInputs) -> Iterable[list[int]]:
    assert inputs.index is not None
    groups: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(inputs.index):
        groups.setdefault(uid, []).append(row)
    return groups.values()


def by_group(
    scores: list[float], inputs: AdvantageInputs, formula: Callable[..., Iterable[float]]
) -> Tensor:
    """`formula(scores, lengths)` of each group, on the tokens of its rows."""
    advantages = torch.zeros_like(inputs.token_level_rewards)
    for rows in groups_of(inputs):
        lengths = [int(inputs.response_mask[row].sum()) for row in rows]
        relative = formula([scores[row] for row in rows], lengths)
        for row, advantage in zip(rows, relative, strict=True):
            advantages[row] = advantage * inputs.response_mask[row]
    return advantages


def scores_of(inputs: AdvantageInputs) -> list[float]:
    return [float(row.sum()) for row in inputs.token_level_rewards]


def group_loop(formula: Callable[..., Iterable[float]]) -> Loop:
    return lambda inputs: by_group(scores_of(inputs), inputs, formula)


def centre(scores: list[float], _: Any = None) -> list[float]:
    mean = statistics.fmean(scores) if len(scores) > 1 else 0.0
    return [score - mean for score in scores]


def normalise(scores: list[float], _: Any = None) -> list[float]:
    std = statistics.stdev(scores) if len(scores) > 1 else 1.0
    return [centred / (std + 1e-6) for centred in centre(scores)]


def lead(scores: list[float], _: Any) -> list[float]:
    second, first = sorted(scores)[-2:]
    advantages = [0.0] * len(scores)
    advantages[scores.index(first)] = (first - second) / (statistics.stdev(scores) + 1e-6)
    return advantages


def leave_one_out(scores: list[float], _: Any) -> list[float]:
    return [score - (sum(scores) - score) / max(1, len(scores) - 1) for score in scores]


def less_weighted_mean(scores: list[float], lengths: list[int]) -> list[float]:
    weighted = sum(length * score for length, score in zip(lengths, scores, strict=True))
    return [score - weighted / max(1, sum(lengths)) for score in scores]


def over_mean(scores: list[float], _: Any) -> list[float]:
    mean = statistics.fmean(scores)
    return [(score - mean) / (mean + 1e-6) if mean > 0 else 0.0 for score in scores]


def gpg_loop(inputs: AdvantageInputs) -> Tensor:
    scores = scores_of(inputs)
    alpha = len(scores) / max(1, sum(score != 0 for score in scores))
    return alpha * by_group(scores, inputs, centre)


def reinforce_plus_plus_baseline_loop(inputs: AdvantageInputs) -> Tensor:
    centred = by_group(scores_of(inputs), inputs, centre)
    return masked_whiten(centred, inputs.response_mask) * inputs.response_mask


def gdpo_loop(inputs: AdvantageInputs) -> Tensor:
    assert inputs.non_tensor_batch is not None
    columns = inputs.non_tensor_batch.values()
    total = sum(by_group(column.tolist(), inputs, normalise) for column in columns)
    assert isinstance(total, Tensor)
    return masked_whiten(total, inputs.response_mask) * inputs.response_mask


def optimal_baseline_loop(inputs: AdvantageInputs, packed: bool) -> Tensor:
    """Token by token within each group; `packed` counts tokens, else positions."""
    advantages = torch.zeros_like(inputs.token_level_rewards)
    for rows in groups_of(inputs):
        tracks = [trajectory(inputs, row, packed) for row in rows]
        ends = sorted(max(track, default=-1) for track in tracks)
        for place in range(ends[-1] + 1):
            here = [
                (row, track[place])
                for row, track in zip(rows, tracks, strict=True)
                if place in track
            ]
            weights = sum(weight for _, (_, _, weight) in here)
            baseline = sum(to_go * weight for _, (_, to_go, weight) in here) / (weights + 1e-8)
            if len(ends) < 2 or place > ends[-2]:
                baseline = 0.0
            for row, (position, to_go, _) in here:
                advantages[row, position] = to_go - baseline
    return advantages


def trajectory(
    inputs: AdvantageInputs, row: int, packed: bool
) -> dict[int, tuple[int, float, float]]:
    """Place -> (position, reward-to-go, weight) of one response's tokens."""
    columns = (inputs.old_log_probs, inputs.sum_pi_squared, inputs.rollout_is_weights)
    log_probs, squares, importance = (c[row].tolist() for c in columns if c is not None)
    to_go = inputs.token_level_rewards[row].flip(-1).cumsum(-1).flip(-1).tolist()
    places: dict[int, tuple[int, float, float]] = {}
    energy = 0.0
    for position in inputs.response_mask[row].nonzero().flatten().tolist():
        energy += 1 - 2 * float(np.exp(log_probs[position])) + squares[position]
        place = len(places) if packed else position
        places[place] = (position, to_go[position], energy * importance[position] ** 2)
    return places


# Estimator -> its loop, and what the loop is shortened in: rows or tokens.
LOOPS: dict[AdvantageEstimator, tuple[Loop, str]] = {
    AdvantageEstimator.GAE: (gae_loop, "tokens"),
    AdvantageEstimator.GRPO: (group_loop(normalise), "rows"),
    AdvantageEstimator.GRPO_VECTORIZED: (group_loop(normalise), "rows"),
    AdvantageEstimator.GRPO_PASSK: (group_loop(lead), "rows"),
    AdvantageEstimator.REINFORCE_PLUS_PLUS: (reinforce_plus_plus_loop, "tokens"),
    AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE: (reinforce_plus_plus_baseline_loop, "rows"),
    AdvantageEstimator.REMAX: (remax_loop, "tokens"),
    AdvantageEstimator.RLOO: (group_loop(leave_one_out), "rows"),
    AdvantageEstimator.RLOO_VECTORIZED: (group_loop(leave_one_out), "rows"),
    AdvantageEstimator.OPO: (group_loop(less_weighted_mean), "rows"),
    AdvantageEstimator.GPG: (gpg_loop, "rows"),
    AdvantageEstimator.MAXRL: (group_loop(over_mean), "rows"),
    AdvantageEstimator.GDPO: (gdpo_loop, "rows"),
    AdvantageEstimator.OPTIMAL_TOKEN_BASELINE: (
        lambda inputs: optimal_baseline_loop(inputs, packed=False),
        "rows",
    ),
    AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE: (
        lambda inputs: optimal_baseline_loop(inputs, packed=True),
        "rows",
    ),
}


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def time_loop(name: AdvantageEstimator, arguments: argparse.Namespace) -> float:
    """What the loop would take for the whole batch, after a check of what it computes."""
    loop, shortened = LOOPS[name]
    rows, tokens, group = arguments.rows, arguments.tokens, arguments.group
    if shortened == "rows":
        rows = min(rows, max(1, rows // arguments.share // group) * group)
    else:
        tokens = max(2, tokens // arguments.share)
    inputs = make_inputs(rows, tokens, arguments.turns, group)
    start = time.perf_counter()
    expected = loop(inputs)
    taken = time.perf_counter() - start
    advantages, _ = estimate_advantages(name, inputs, CONFIG)
    torch.testing.assert_close(advantages, expected, rtol=1e-3, atol=1e-3)
    return taken * (arguments.rows / rows) * (arguments.tokens / tokens)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--group", type=int, default=8, help="responses to one prompt")
    parser.add_argument("--share", type=int, default=64, help="the loop gets 1/share of the batch")
    parser.add_argument("--threads", type=int, help="of torch")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    inputs = make_inputs(arguments.rows, arguments.tokens, arguments.turns, arguments.group)
    size = f"{arguments.rows} x {arguments.tokens}"
    sys.stdout.write(
        f"{'estimator':30s} {'rows x tokens':>14s} {'seconds':>9s} {'loop':>9s} ratio\n"
    )
    for name in AdvantageEstimator:
        runs = [seconds(lambda name=name: estimate_advantages(name, inputs, CONFIG)) for _ in "123"]
        taken, loop = statistics.median(runs), time_loop(name, arguments)
        line = f"{name:30s} {size:>14s} {taken:9.3f} {loop:9.2f} {loop / taken:5.0f}\n"
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
