"""Cases of rollout correction, mismatch diagnostics and PF-PPO."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from naive import rollout_correction as correction
from naive.mismatch import mismatch
from naive.pf_ppo import pf_ppo_chances

from .batches import MASKS, Batches
from .case import CaseFile

FAR = "extreme_ratios"


def policies(name: str, far: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Trainer and sampler; the sampler's log-probs are 0 outside the mask, as it writes them."""
    batches = Batches(name)
    for kind in (*MASKS, FAR) if far else MASKS:
        mask = batches.mask(kind if kind in MASKS else "ordinary")
        old, rollout = batches.pair(mask, far=30.0 if kind == FAR else 0.0)
        rollout = [
            [value if here else 0.0 for value, here in zip(row, mask_row, strict=True)]
            for row, mask_row in zip(rollout, mask, strict=True)
        ]
        inputs = {"old_log_prob": old, "rollout_log_prob": rollout, "response_mask": mask}
        yield kind, inputs


def weight_file() -> CaseFile:
    file = CaseFile("rollout_is", "rollout_is")
    for case, inputs in policies("rollout_is"):
        for level in ("token", "sequence"):
            for threshold in ("2.0", "0.8_1.3"):
                for normalise in (False, True):
                    weights = correction.is_weights(
                        **inputs, level=level, threshold=threshold, batch_normalize=normalise
                    )
                    params = {
                        "rollout_is": level,
                        "rollout_is_threshold": threshold,
                        "rollout_is_batch_normalize": normalise,
                    }
                    label = f"{case}_{level}_{threshold}" + ("_normalised" if normalise else "")
                    file.add(label, inputs, params, {"weights": weights})
    return file


def middle_threshold(inputs: dict[str, Any], option: str) -> str:
    """A threshold that some tokens or responses pass and some do not, far from any of them."""
    values: set[float] = set()
    ratios = correction.log_ratios(inputs["old_log_prob"], inputs["rollout_log_prob"])
    for row, mask in zip(ratios, inputs["response_mask"], strict=True):
        statistics = correction.statistics_of(row, mask, option)
        values.update(abs(s) for s, here in zip(statistics, mask, strict=True) if here)
    ranked = sorted(values)
    middle_half = ranked[len(ranked) // 4 : len(ranked) - len(ranked) // 4]
    low, high = max(itertools.pairwise(middle_half), key=lambda pair: pair[1] - pair[0])
    middle = (low + high) / 2
    return f"{math.exp(middle) if option.endswith('k1') else middle:.6g}"


def rejection_expected(inputs: dict[str, Any], rollout_rs: str, threshold: str) -> dict[str, Any]:
    modified = correction.rejection_mask(
        **inputs, rollout_rs=rollout_rs, rollout_rs_threshold=threshold
    )
    fraction = correction.masked_fraction(inputs["response_mask"], modified)
    return {"modified_mask": modified, "masked_fraction": fraction}


def rejection_file() -> CaseFile:
    file = CaseFile("rollout_rs", "rollout_rs", ["modified_mask"])
    for case, inputs in policies("rollout_rs"):
        for option in correction.STATISTICS:
            threshold = middle_threshold(inputs, option)
            expected = rejection_expected(inputs, option, threshold)
            if not 0 < expected["masked_fraction"] < 1:
                raise ValueError(f"{case} {option}: nothing is decided here")
            params = {"rollout_rs": option, "rollout_rs_threshold": threshold}
            file.add(f"{case}_{option}", inputs, params, expected)
        several = {
            "one_bound_each": ("token_k1,seq_mean_k3,seq_max_k2", "0.6_1.6,0.05,0.16"),
            "one_bound_for_all": ("token_k2,seq_mean_k2", "0.1"),
            "ratio_bounds_token": ("token_k1", "0.65_1.2"),
            "ratio_bounds_seq": ("seq_mean_k1", "0.95_1.3"),
        }
        for label, (rollout_rs, threshold) in several.items():
            params = {"rollout_rs": rollout_rs, "rollout_rs_threshold": threshold}
            expected = rejection_expected(inputs, rollout_rs, threshold)
            file.add(f"{case}_{label}", inputs, params, expected)
    return file


def mismatch_file() -> CaseFile:
    file = CaseFile("mismatch", "mismatch")
    for case, inputs in policies("mismatch", far=False):
        file.add(case, inputs, {}, {"metrics": mismatch(**inputs)})
    return file


def pf_ppo_file() -> CaseFile:
    file = CaseFile("pf_ppo", "pf_ppo")
    batches = Batches("pf_ppo")
    situations = {
        "ordinary": batches.numbers(6, 0, 1),
        "negative_scores": batches.numbers(6, -2, 1),
        "several_best": [1.0, 0.0, 1.0, 0.5, 0.0, 1.0],
        "equal_scores": [0.5] * 4,
    }
    for case, scores in situations.items():
        for method in ("pow", "max_min", "max_random"):
            for power in (2.0, 0.5) if method == "pow" else (2.0,):
                params = {"reweight_method": method, "weight_pow": power}
                chances = pf_ppo_chances(scores, method, power)
                file.add(
                    f"{case}_{method}_{power}", {"scores": scores}, params, {"chances": chances}
                )
    return file


def files() -> Iterator[CaseFile]:
    yield weight_file()
    yield rejection_file()
    yield mismatch_file()
    yield pf_ppo_file()
