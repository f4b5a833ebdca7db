"""Cases of aggregation, policy losses, value loss and KL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from naive import batch_policy_losses as batch_losses
from naive.aggregation import MODES, agg_loss
from naive.basics import Matrix
from naive.bypass import bypass_mode
from naive.kl import TYPES, adaptive_coefficients, kl_in_reward, kl_penalty
from naive.policy_losses import TOKEN_LOSSES, LossResult, Settings, token_loss
from naive.value_loss import value_loss

from .batches import MASKS, ROWS, Batches, at_last_token
from .case import CaseFile

CLIP: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
CLIP_HIGHER: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
# What a loss needs beside the defaults, one after the other over its cases.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "vanilla": [{}, CLIP_HIGHER, {"clip_ratio_c": 1.5}],
    "gspo": [{"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}, {}],
    "sapo": [{}, {"tau_pos": 2.0, "tau_neg": 3.0}],
    "cispo": [{}, CLIP_HIGHER],
    "dppo_tv": [{"clip_ratio_c": 20.0}, {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}],
    "dppo_kl": [
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
        {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.2},
    ],
    "dro": [{"dro_beta": 0.05}, {"dro_beta": 1.5}],
    "geo_mean": [{"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, {}],
    # All of the eligible tokens, or none.
    "clip_cov": [
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0},
        {"clip_cov_ratio": 0.5, "clip_cov_lb": 50.0, "clip_cov_ub": 60.0},
    ],
    "kl_cov": [{"kl_cov_ratio": 0.25}, {"kl_cov_ratio": 1.0, "ppo_kl_coef": 1.0}, {}],
}
NAMES = (*TOKEN_LOSSES, "gspo", "geo_mean", "clip_cov", "kl_cov")
# The metric ppo_kl at log ratios of 30 depends on a clamp that only `vanilla` is sure to have.
FAR = "extreme_ratios"
# Here the loss itself does: whether e^20 is the most that enters is left open.
NOT_BEYOND_20 = ("clip_cov", "kl_cov", "geo_mean")


def policy_batches(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    batches = Batches(f"policy loss {name}")
    far = 18.0 if name in NOT_BEYOND_20 else 30.0
    for kind in (*MASKS, "importance_weights", FAR):
        mask = batches.mask(kind if kind in MASKS else "ordinary")
        old, new = batches.pair(mask, far=far if kind == FAR else 0.0)
        inputs = {
            "old_log_prob": old,
            "log_prob": new,
            "advantages": batches.matrix(mask, -2, 2),
            "response_mask": mask,
        }
        if kind == "importance_weights":
            inputs["rollout_is_weights"] = batches.matrix(mask, 0.2, 2)
        yield kind, inputs
    # One advantage a response, as most estimators give.
    mask = batches.mask("ordinary")
    old, new = batches.pair(mask)
    scores = batches.numbers(ROWS, -1, 1)
    yield (
        "outcome_advantages",
        {
            "old_log_prob": old,
            "log_prob": new,
            "advantages": [[s * here for here in row] for s, row in zip(scores, mask, strict=True)],
            "response_mask": mask,
        },
    )


def policy_result(name: str, inputs: dict[str, Any], mode: str, settings: Settings) -> LossResult:
    if name in TOKEN_LOSSES:
        return token_loss(name, **inputs, loss_agg_mode=mode, settings=settings)
    if name == "gspo":
        return batch_losses.gspo(**inputs, settings=settings)
    if name == "geo_mean":
        return batch_losses.geo_mean(**inputs, settings=settings)
    function = batch_losses.clip_cov if name == "clip_cov" else batch_losses.kl_cov
    return function(**inputs, loss_agg_mode=mode, settings=settings)


def recorded(result: LossResult, with_metrics: bool = True) -> dict[str, Any]:
    expected: dict[str, Any] = {"loss": result.loss, "gradient": result.gradient}
    if with_metrics:
        expected["metrics"] = result.metrics
    return expected


def policy_files() -> Iterator[CaseFile]:
    for name in NAMES:
        file = CaseFile(name, "policy_loss", ["gradient"])
        choices = SETTINGS.get(name, [{}])
        for index, (case, inputs) in enumerate(policy_batches(name)):
            for turn in range(len(MODES) if name == "vanilla" else 1):
                mode = MODES[(index + turn) % len(MODES)]
                chosen = choices[(index + turn) % len(choices)]
                params = {"loss_agg_mode": mode, **CLIP, **chosen}
                if mode == "seq-mean-token-sum-norm" and index % 2:
                    params["loss_scale_factor"] = 11.0
                given = {key: value for key, value in params.items() if key != "loss_agg_mode"}
                result = policy_result(name, inputs, mode, Settings(**given))
                label = f"{case}_{mode}" if name == "vanilla" else case
                with_metrics = case != FAR or name == "vanilla"
                file.add(label, inputs, params, recorded(result, with_metrics))
        yield file


BYPASS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"loss_type": "ppo_clip"},
    "ppo_clip_ignores_weights": {"loss_type": "ppo_clip", "rollout_is": "token"},
    "ppo_clip_rejected_tokens": {
        "loss_type": "ppo_clip",
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.7_1.4",
    },
    "ppo_clip_rejected_responses": {
        "loss_type": "ppo_clip",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "1.1",
    },
    "reinforce": {"loss_type": "reinforce"},
    "reinforce_token": {"loss_type": "reinforce", "rollout_is": "token"},
    "reinforce_token_icepop": {
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_threshold": "0.7_1.4",
    },
    "reinforce_sequence_rejected": {
        "loss_type": "reinforce",
        "rollout_is": "sequence",
        "rollout_rs": "token_k3,seq_max_k2",
        "rollout_rs_threshold": "0.1,0.15",
    },
    "reinforce_normalised": {
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_batch_normalize": True,
    },
}
NO_CORRECTION: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": "2.0",
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "rollout_is_batch_normalize": False,
}


def bypass_file() -> CaseFile:
    file = CaseFile("bypass_mode", "policy_loss", ["gradient"])
    batches = Batches("bypass_mode")
    for index, (case, chosen) in enumerate(BYPASS.items()):
        mask = batches.mask(MASKS[index % len(MASKS)])
        rollout, new = batches.pair(mask)
        advantages = batches.matrix(mask, -2, 2)
        correction = {**NO_CORRECTION, **chosen}
        for mode in (MODES[index % len(MODES)], "seq-mean-token-mean"):
            result = bypass_mode(rollout, new, advantages, mask, mode, Settings(), **correction)
            inputs = {
                "old_log_prob": rollout,
                "log_prob": new,
                "advantages": advantages,
                "response_mask": mask,
            }
            params = {"loss_agg_mode": mode, **CLIP, "rollout_correction": correction}
            label = f"{case}_{mode}"
            if label not in [c.name for c in file.cases]:
                file.add(label, inputs, params, recorded(result, with_metrics=False))
    return file


def aggregation_file() -> CaseFile:
    file = CaseFile("agg_loss", "agg_loss")
    batches = Batches("agg_loss")
    masks: dict[str, Matrix] = {kind: batches.mask(kind) for kind in MASKS}
    masks["nothing_but_empty_rows"] = [[0.0] * 4, [0.0] * 4]
    for kind, mask in masks.items():
        losses = batches.matrix(mask, -2, 2)
        for mode in MODES:
            choices: list[dict[str, Any]] = [{}]
            if kind == "ordinary":
                choices.append({"dp_size": 4, "batch_num_tokens": 150, "global_batch_size": 30})
            if mode == "seq-mean-token-sum-norm":
                choices.append({"loss_scale_factor": 100.0})
            for params in choices:
                label = "_".join([kind, mode, *params])
                inputs = {"loss_mat": losses, "response_mask": mask}
                loss = agg_loss(losses, mask, mode, **params)
                file.add(label, inputs, {"loss_agg_mode": mode, **params}, {"loss": loss})
    return file


def value_file() -> CaseFile:
    file = CaseFile("value_loss", "value_loss", ["gradient"])
    batches = Batches("value_loss")
    for kind in MASKS:
        mask = batches.mask(kind)
        inputs: dict[str, Any] = {
            "vpreds": batches.matrix(mask, -1, 1),
            "values": batches.matrix(mask, -1, 1),
            "returns": batches.matrix(mask, -1, 1),
            "response_mask": mask,
        }
        for index, mode in enumerate(MODES):
            params: dict[str, Any] = {
                "cliprange_value": (0.5, 0.2)[index % 2],
                "loss_agg_mode": mode,
            }
            loss, gradient, fraction = value_loss(**inputs, **params)
            expected = {"loss": loss, "gradient": gradient, "clipfrac": fraction}
            file.add(f"{kind}_{mode}", inputs, params, expected)
    return file


def kl_penalty_file() -> CaseFile:
    file = CaseFile("kl_penalty", "kl_penalty")
    batches = Batches("kl_penalty")
    for far in (0.0, 30.0):
        logprob, ref = batches.pair(batches.mask("ordinary", rows=4), far)
        for kind in TYPES:
            for name in (kind, f"{kind}+"):
                values, slopes = kl_penalty(logprob, ref, name)
                inputs = {"logprob": logprob, "ref_logprob": ref}
                label = f"{name}_far" if far else name
                expected = {"values": values, "gradient": slopes}
                file.add(label, inputs, {"kl_penalty": name}, expected)
    return file


def kl_in_reward_file() -> CaseFile:
    file = CaseFile("kl_in_reward", "kl_in_reward")
    batches = Batches("kl_in_reward")
    for kind, name in zip(MASKS, ("kl", "low_var_kl", "abs"), strict=True):
        mask = batches.mask(kind)
        old, ref = batches.pair(mask)
        scores = at_last_token(batches.numbers(ROWS, 0, 1), mask)
        rewards, current = kl_in_reward(scores, old, ref, mask, 0.05, name)
        inputs = {
            "token_level_scores": scores,
            "old_log_probs": old,
            "ref_log_prob": ref,
            "response_mask": mask,
        }
        expected = {"token_level_rewards": rewards, "current_kl": current}
        file.add(kind, inputs, {"kl_coef": 0.05, "kl_penalty": name}, expected)
    return file


def kl_controller_file() -> CaseFile:
    file = CaseFile("kl_controller", "kl_controller")
    for name, kls in (
        ("rises", [0.2, 0.3, 5.0]),
        ("falls", [0.05, 0.0, -1.0]),
        ("settles", [0.11, 0.1, 0.095, 0.104]),
    ):
        n_steps = [64 * (index + 1) for index in range(len(kls))]
        values = adaptive_coefficients(0.01, 0.1, 1000, list(zip(kls, n_steps, strict=True)))
        file.add(
            name,
            {"current_kl": kls, "n_steps": n_steps},
            {"kl_coef": 0.01, "target_kl": 0.1, "horizon": 1000},
            {"values": values},
        )
    return file


def files() -> Iterator[CaseFile]:
    yield aggregation_file()
    yield from policy_files()
    yield bypass_file()
    yield value_file()
    yield kl_penalty_file()
    yield kl_in_reward_file()
    yield kl_controller_file()
