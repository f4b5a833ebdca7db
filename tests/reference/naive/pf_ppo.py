"""Chances with which PF-PPO draws a sample anew.

    pow         |s|^p
    max_min     1 for the largest and the smallest score of the batch, else 0
    max_random  0.4 for the largest score, else 0.1

No weight is smaller than 1e-8. The chance of a sample is its weight over the sum of all.
"""

from __future__ import annotations

import math

FLOOR = 1e-8


def pf_ppo_chances(scores: list[float], reweight_method: str, weight_pow: float) -> list[float]:
    weights: list[float] = []
    for s in scores:
        if reweight_method == "pow":
            weight = abs(s) ** weight_pow
        elif reweight_method == "max_min":
            weight = 1.0 if s in (max(scores), min(scores)) else 0.0
        elif reweight_method == "max_random":
            weight = 0.4 if s == max(scores) else 0.1
        else:
            raise ValueError(f"unknown reweight_method {reweight_method}")
        weights.append(max(weight, FLOOR))
    total = math.fsum(weights)
    return [w / total for w in weights]
