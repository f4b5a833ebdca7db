"""The package against the recorded cases of tests/reference, which know nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from caldera.config.actor import ActorConfig, PolicyLossConfig
from caldera.config.algorithm import AlgorithmConfig
from caldera.config.rollout_correction import RolloutCorrectionConfig
from caldera.core_algos import (
    AdaptiveKLController,
    AdvantageEstimator,
    AdvantageInputs,
    FixedKLController,
    agg_loss,
    apply_kl_penalty,
    compute_offpolicy_metrics,
    compute_pf_ppo_weights,
    compute_rollout_correction_and_rejection_mask,
    compute_value_loss,
    estimate_advantages,
    get_policy_loss_fn,
    kl_penalty,
)
from caldera.errors import CalderaError

REFERENCE = Path(__file__).parents[2] / "reference"
CASE_FILES = sorted((REFERENCE / "cases").glob("*.json"))
# Relative to the expected value, and beside it for values near 0.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}

# Not the rewards: outside the mask they count (an outcome may stand on a token of a tool).
MASKED_INPUTS = {
    *("log_prob", "old_log_prob", "old_log_probs", "ref_log_prob", "rollout_log_prob"),
    *("advantages", "returns", "values", "vpreds", "loss_mat"),
    *("rollout_is_weights", "sum_pi_squared"),
}

Case = dict[str, Any]
Outputs = dict[str, Any]


def tensors_of(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The inputs that are numbers, as tensors."""
    return {
        name: torch.tensor(value, dtype=dtype)
        for name, value in case["inputs"].items()
        if name not in ("uid", "components")
    }


def advantage(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    tensors = tensors_of(case, dtype)
    components = case["inputs"].get("components", {})
    inputs = AdvantageInputs(
        **tensors,
        index=np.array(case["inputs"]["uid"]) if "uid" in case["inputs"] else None,
        non_tensor_batch={key: np.array(values) for key, values in components.items()},
    )
    advantages, returns = estimate_advantages(name, inputs, AlgorithmConfig(**case["params"]))
    return {"advantages": advantages, "returns": returns}


def policy_loss(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    params = dict(case["params"])
    mode = params.pop("loss_agg_mode")
    of_loss = {f.name: params.pop(f.name) for f in fields(PolicyLossConfig) if f.name in params}
    if "rollout_correction" in of_loss:
        of_loss["rollout_correction"] = RolloutCorrectionConfig(**of_loss["rollout_correction"])
    config = ActorConfig(**params, policy_loss=PolicyLossConfig(loss_mode=name, **of_loss))
    tensors = tensors_of(case, dtype)
    log_prob = tensors["log_prob"].requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(**tensors, loss_agg_mode=mode, config=config)
    loss.backward()
    reported = {key.removeprefix("actor/"): value for key, value in metrics.items()}
    return {"loss": loss, "gradient": log_prob.grad, "metrics": reported}


def aggregation(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    tensors = tensors_of(case, dtype)
    return {"loss": agg_loss(tensors["loss_mat"], tensors["response_mask"], **case["params"])}


def value_loss(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    tensors = tensors_of(case, dtype)
    vpreds = tensors["vpreds"].requires_grad_()
    loss, clipfrac = compute_value_loss(**tensors, **case["params"])
    loss.backward()
    return {"loss": loss, "gradient": vpreds.grad, "clipfrac": clipfrac}


def kl_values(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    tensors = tensors_of(case, dtype)
    logprob = tensors["logprob"].requires_grad_()
    values = kl_penalty(logprob, tensors["ref_logprob"], case["params"]["kl_penalty"])
    values.sum().backward()
    return {"values": values, "gradient": logprob.grad}


def kl_in_reward(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    controller = FixedKLController(case["params"]["kl_coef"])
    rewards, metrics = apply_kl_penalty(
        **tensors_of(case, dtype), controller=controller, kl_penalty=case["params"]["kl_penalty"]
    )
    return {"token_level_rewards": rewards, "current_kl": metrics["actor/reward_kl_penalty"]}


def kl_controller(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    params, inputs = case["params"], case["inputs"]
    controller = AdaptiveKLController(params["kl_coef"], params["target_kl"], params["horizon"])
    values = []
    for current_kl, n_steps in zip(inputs["current_kl"], inputs["n_steps"], strict=True):
        controller.update(current_kl, n_steps)
        values.append(controller.value)
    return {"values": values}


def rollout_is(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    tensors = tensors_of(case, dtype)
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(**tensors, **case["params"])
    assert torch.equal(mask, tensors["response_mask"])
    return {"weights": weights}


def rollout_rs(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        **tensors_of(case, dtype), **case["params"]
    )
    assert weights is None
    fraction = metrics["rollout_corr/rollout_rs_masked_fraction"]
    return {"modified_mask": mask, "masked_fraction": fraction}


def mismatch(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    metrics = compute_offpolicy_metrics(**tensors_of(case, dtype))
    return {"metrics": {k.removeprefix("rollout_corr/"): v for k, v in metrics.items()}}


def pf_ppo(name: str, case: Case, dtype: torch.dtype) -> Outputs:
    weights = compute_pf_ppo_weights(tensors_of(case, dtype)["scores"], **case["params"])
    return {"chances": weights / weights.sum()}


FAMILIES: dict[str, Callable[[str, Case, torch.dtype], Outputs]] = {
    "advantage": advantage,
    "agg_loss": aggregation,
    "kl_controller": kl_controller,
    "kl_in_reward": kl_in_reward,
    "kl_penalty": kl_values,
    "mismatch": mismatch,
    "pf_ppo": pf_ppo,
    "policy_loss": policy_loss,
    "rollout_is": rollout_is,
    "rollout_rs": rollout_rs,
    "value_loss": value_loss,
}


def differences(
    case: Case, outputs: Outputs, zero_outside_mask: list[str], tolerance: float
) -> list[str]:
    """What is not as recorded, by output."""
    mask = case["inputs"].get("response_mask")
    found = []
    expected = dict(case["expected"])
    for name, value in expected.pop("metrics", {}).items():
        expected[name] = value
        outputs[name] = outputs["metrics"][name]
    for name, value in expected.items():
        wanted = torch.tensor(value, dtype=torch.float64)
        got = torch.as_tensor(outputs[name], dtype=torch.float64).detach()
        if wanted.dim() == 2 and mask is not None and name not in zero_outside_mask:
            kept = torch.tensor(mask).bool()
            wanted, got = wanted[kept], got[kept]
        if wanted.shape != got.shape:
            found.append(f"{name}: {tuple(got.shape)} instead of {tuple(wanted.shape)}")
        elif not torch.allclose(got, wanted, rtol=tolerance, atol=tolerance):
            found.append(f"{name}: off by {(got - wanted).abs().max():.3g}")
    return found


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("path", CASE_FILES, ids=lambda path: path.stem)
def test_recorded_cases(path: Path, dtype: torch.dtype) -> None:
    recorded = json.loads(path.read_text(encoding="utf-8"))
    function = FAMILIES[recorded["family"]]
    found = []
    for case in recorded["cases"]:
        if case["expected"] is None:
            with pytest.raises((ValueError, CalderaError)):
                function(recorded["function"], case, dtype)
            continue
        outputs = function(recorded["function"], case, dtype)
        off = differences(case, outputs, recorded["zero_outside_mask"], TOLERANCES[dtype])
        found += [f"{case['name']}: {line}" for line in off]
    assert found == []


@pytest.mark.parametrize("path", CASE_FILES, ids=lambda path: path.stem)
def test_what_stands_outside_the_mask_does_not_matter(path: Path) -> None:
    recorded = json.loads(path.read_text(encoding="utf-8"))
    function = FAMILIES[recorded["family"]]
    found = []
    for case in recorded["cases"]:
        inputs, mask = case["inputs"], case["inputs"].get("response_mask")
        if mask is None or case["expected"] is None:
            continue
        for name in MASKED_INPUTS & inputs.keys():
            rows = zip(inputs[name], mask, strict=True)
            inputs[name] = [np.where(mask_row, row, np.nan).tolist() for row, mask_row in rows]
        outputs = function(recorded["function"], case, torch.float64)
        off = differences(case, outputs, recorded["zero_outside_mask"], TOLERANCES[torch.float64])
        found += [f"{case['name']}: {line}" for line in off]
    assert found == []


def test_every_estimator_is_recorded() -> None:
    recorded = {path.stem.removeprefix("advantage_") for path in CASE_FILES}
    assert {name.value for name in AdvantageEstimator} - recorded == {"grpo_vectorized"}


def test_grpo_vectorized_is_grpo() -> None:
    recorded = json.loads((REFERENCE / "cases" / "advantage_grpo.json").read_text(encoding="utf-8"))
    for case in recorded["cases"]:
        outputs = advantage("grpo_vectorized", case, torch.float64)
        assert differences(case, outputs, recorded["zero_outside_mask"], 1e-6) == []


def test_recording_again_gives_the_same_files(tmp_path: Path) -> None:
    command = [sys.executable, str(REFERENCE / "record.py"), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    recorded = {path.name: path.read_bytes() for path in CASE_FILES}
    assert sorted(again) == sorted(recorded)
    assert [name for name in recorded if again[name] != recorded[name]] == []


def test_the_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in CASE_FILES) < 1_500_000
