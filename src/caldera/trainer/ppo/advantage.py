"""From rewards to advantages on the driver, and what corrects for the sampler's policy."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from caldera import core_algos
from caldera.config import AlgorithmConfig, PPOTrainerConfig
from caldera.config.batches import check_batches
from caldera.config.estimators import (
    PAIRS,
    AdvantageEstimator,
    check_estimator,
    declare_needs,
    needs_of,
)
from caldera.core_algos import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageInputs,
    KLController,
    compute_offpolicy_metrics,
    compute_pf_ppo_indices,
    compute_rollout_correction_and_rejection_mask,
    compute_variance_proxies,
    estimate_advantages,
)
from caldera.data import registered_or_own
from caldera.protocol import DataProto, tensors_of
from caldera.seeds import derive_seed
from caldera.trainer.main_ppo import check_responses
from caldera.trainer.metrics import Metrics
from caldera.trainer.ppo.metrics import compute_rollout_diff_metrics
from caldera.trainer.ppo.rewards import rows_with_reward


def check_algorithm(config: PPOTrainerConfig) -> None:
    """Raise unless estimator and loss are known, and the run has what the estimator needs.

    Not part of the config's own checks: modules of the user's may register either.
    """
    name = config.algorithm.adv_estimator
    estimator = registered_or_own(ADV_ESTIMATORS, name)
    registered_or_own(POLICY_LOSSES, config.actor_rollout_ref.actor.policy_loss.loss_mode)
    if name not in list(AdvantageEstimator):  # the config's checks did not know what it needs
        declare_needs(name, getattr(estimator, "needs", ()))
        check_estimator(config)
        check_batches(config)
    check_responses(config)


def rewarded_part(batch: DataProto, algorithm: AlgorithmConfig) -> tuple[DataProto, Tensor]:
    """(the rows that have a reward, which they are (B,)).

    Advantages are computed as if no others had been sampled.
    """
    rows = rows_with_reward(batch)
    if rows.all():
        return batch, rows
    if PAIRS in needs_of(algorithm.adv_estimator):  # there is no lead over nobody
        uids = batch.non_tensor_batch["uid"]
        responses = Counter(uids[rows.numpy()])
        rows &= torch.tensor([responses[uid] > 1 for uid in uids])
    return batch.select_idxs(rows), rows


def scatter_rows(part: DataProto, rows: Tensor, batch: DataProto) -> None:
    """Scatter what was computed for these rows to the whole batch.

    Other rows get zeros, and lose their response_mask, so that they are in no loss. They stay in
    the batch, so that mini-batches have the same members whatever fails.
    """
    if part is batch:
        return
    tensors = tensors_of(batch)
    found = {str(key): tensors_of(part)[key] for key in tensors_of(part).keys()}  # noqa: SIM118
    for key in ("token_level_rewards", "advantages", "returns"):
        found.setdefault(key, found["token_level_scores"])  # of no rows at all
    for key in found.keys() - tensors.keys() | {"response_mask"}:
        whole = found[key].new_zeros(len(batch), *found[key].shape[1:])
        whole[rows] = found[key]
        tensors[key] = whole


def apply_kl_penalty(
    batch: DataProto, algorithm: AlgorithmConfig, controller: KLController
) -> Metrics:
    """Adds token_level_rewards: the scores, less a penalty for the KL to the reference."""
    tensors = tensors_of(batch)
    tensors["token_level_rewards"] = tensors["token_level_scores"]
    if not algorithm.use_kl_in_reward:
        return {}
    tensors["token_level_rewards"], metrics = core_algos.apply_kl_penalty(
        tensors["token_level_scores"],
        tensors["old_log_probs"],
        tensors["ref_log_prob"],
        tensors["response_mask"],
        controller,
        algorithm.kl_penalty,
        full_kl=tensors.get("full_kl", None),
    )
    return metrics


def correct_rollout(batch: DataProto, algorithm: AlgorithmConfig) -> Metrics:
    """Compare the sampler's log-probs with the trainer's, and correct for the difference.

    Adds rollout_is_weights, and takes what is rejected out of response_mask, where
    `algorithm.rollout_correction` says so. In bypass mode the policy loss does this instead.
    """
    tensors, correction = tensors_of(batch), algorithm.rollout_correction
    sampled = tensors.get("rollout_log_probs", None)
    if sampled is None or correction.bypass_mode:
        return {}
    old, mask = tensors["old_log_probs"], tensors["response_mask"]
    differences = compute_rollout_diff_metrics(sampled, old, mask)
    if correction.rollout_is is None and correction.rollout_rs is None:
        return differences | _floats(compute_offpolicy_metrics(old, sampled, mask))
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old,
        sampled,
        mask,
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_rs=correction.rollout_rs,
        rollout_rs_threshold=correction.rollout_rs_threshold,
        rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
    )
    tensors["response_mask"] = kept
    if weights is not None:
        tensors["rollout_is_weights"] = weights
    return differences | _floats(metrics)


def compute_advantage(batch: DataProto, algorithm: AlgorithmConfig) -> None:
    """Adds advantages and returns."""
    tensors = tensors_of(batch)
    optional = ("values", "reward_baselines", "sum_pi_squared", "old_log_probs")
    held = {key: tensors.get(key, None) for key in (*optional, "rollout_is_weights")}
    inputs = AdvantageInputs(
        tensors["token_level_rewards"],
        tensors["response_mask"],
        index=batch.non_tensor_batch["uid"],
        non_tensor_batch=batch.non_tensor_batch,
        batch=tensors,
        **held,
    )
    advantages, returns = estimate_advantages(algorithm.adv_estimator, inputs, algorithm)
    tensors["advantages"], tensors["returns"] = advantages, returns


def resample(batch: DataProto, algorithm: AlgorithmConfig, step: int) -> DataProto:
    """PF-PPO: the batch with the rows that have a reward resampled by their scores."""
    rows = rows_with_reward(batch).nonzero().squeeze(-1)
    if not algorithm.use_pf_ppo or not len(rows):
        return batch
    draw = torch.Generator().manual_seed(derive_seed(0, "pf_ppo", step))
    scores = tensors_of(batch)["token_level_scores"].sum(-1)[rows]
    settings = algorithm.pf_ppo
    drawn = compute_pf_ppo_indices(scores, draw, settings.reweight_method, settings.weight_pow)
    order = torch.arange(len(batch))
    order[rows] = rows[drawn]
    return batch.select_idxs(order)


def variance_metrics(batch: DataProto, grad_norm: float | None) -> Metrics:
    """How noisy the gradient of this batch was, where sum_pi_squared is there to tell."""
    tensors = tensors_of(batch)
    if tensors.get("sum_pi_squared", None) is None or grad_norm is None:
        return {}
    proxies = compute_variance_proxies(
        tensors["advantages"],
        tensors["old_log_probs"],
        tensors["sum_pi_squared"],
        tensors["response_mask"],
        tensors.get("rollout_is_weights", None),
        torch.tensor(grad_norm),
    )
    return _floats(proxies)


def _floats(metrics: dict[str, Tensor]) -> Metrics:
    return {name: float(value) for name, value in metrics.items()}
