"""Cases of the advantage estimators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from naive import outcome_advantages as outcome
from naive import token_advantages, token_baselines
from naive.basics import Matrix, Row, row_sums

from .batches import MASKS, ROWS, Batches, at_last_token, on_mask, on_next_place
from .case import CaseFile

# Groups lie interleaved: nothing may rely on their rows being neighbours.
UIDS = ["a", "b", "a", "b", "b", "a", "a", "b"]
UIDS_WITH_SINGLETONS = ["a", "b", "c", "a", "d", "d", "d", "e"]

OutcomeFunction = Callable[[Matrix, Matrix, list[str]], Matrix]


def outcome_batches(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(case name, inputs) of the situations that every estimator by groups has to handle."""
    batches = Batches(name)

    def inputs(scores: Row, mask: Matrix, uid: list[str] = UIDS) -> dict[str, Any]:
        rewards = at_last_token(scores, mask)
        return {"token_level_rewards": rewards, "response_mask": mask, "uid": uid}

    for kind in MASKS:
        yield kind, inputs(batches.numbers(ROWS, 0, 1), batches.mask(kind))
    mask = batches.mask("ordinary")
    yield "singleton_groups", inputs(batches.numbers(ROWS, 0, 1), mask, UIDS_WITH_SINGLETONS)
    # Sums of quarters are exact: no rounding noise is blown up by a division by 1e-6.
    equal = [0.25 if uid == "a" else 1.0 for uid in UIDS]
    yield "equal_scores", inputs(equal, mask)
    yield "binary_scores", inputs([1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0], mask)
    yield "negative_scores", inputs(batches.numbers(ROWS, -2, -0.5), mask)
    mixed = inputs([], [])
    mixed["response_mask"] = batches.mask("observation")
    mixed["token_level_rewards"] = on_mask(
        lambda: batches.number(-0.5, 0.5), mixed["response_mask"]
    )
    yield "rewards_on_every_token", mixed


def outcome_file(name: str, function: OutcomeFunction) -> CaseFile:
    file = CaseFile(name, "advantage", ["advantages", "returns"])
    for case, inputs in outcome_batches(name):
        advantages = function(inputs["token_level_rewards"], inputs["response_mask"], inputs["uid"])
        file.add(case, inputs, {}, {"advantages": advantages, "returns": advantages})
    return file


def grpo_files() -> Iterator[CaseFile]:
    for name, function in (("grpo", outcome.grpo), ("grpo_passk", outcome.grpo_passk)):
        file = CaseFile(name, "advantage", ["advantages", "returns"])
        for case, inputs in outcome_batches(name):
            for by_std in (True, False):
                label = case if by_std else f"{case}_without_std"
                params = {"norm_adv_by_std_in_grpo": by_std}
                expected = None
                if name == "grpo" or case != "singleton_groups":
                    advantages = function(**inputs, norm_adv_by_std_in_grpo=by_std)
                    expected = {"advantages": advantages, "returns": advantages}
                file.add(label, inputs, params, expected)
        yield file


def gdpo_file() -> CaseFile:
    file = CaseFile("gdpo", "advantage", ["advantages", "returns"])
    batches = Batches("gdpo components")
    for index, (case, inputs) in enumerate(outcome_batches("gdpo")):
        accuracy = row_sums(inputs["token_level_rewards"])
        style = batches.numbers(ROWS, -1, 1)
        if case == "equal_scores":
            style = [0.5] * ROWS
        weights = [1.0, 0.5] if index % 2 else None
        components = {"accuracy": accuracy, "style": style}
        advantages = outcome.gdpo(
            components, weights or [1.0, 1.0], inputs["response_mask"], inputs["uid"]
        )
        file.add(
            case,
            {**inputs, "components": components},
            {"gdpo_reward_keys": list(components), "gdpo_reward_weights": weights},
            {"advantages": advantages, "returns": advantages},
        )
    return file


def reward_batches(name: str) -> Iterator[tuple[str, Matrix, Matrix]]:
    """(case name, rewards, mask) of the situations of estimators by tokens."""
    batches = Batches(name)
    for kind in MASKS:
        mask = batches.mask(kind)
        yield kind, at_last_token(batches.numbers(ROWS, 0, 1), mask), mask
        yield f"{kind}_dense", on_mask(lambda: batches.number(-0.5, 0.5), mask), mask
    mask = batches.mask("ordinary")
    yield "equal_scores", at_last_token([0.5] * ROWS, mask), mask
    yield "negative_scores", at_last_token(batches.numbers(ROWS, -2, -0.5), mask), mask
    mask = batches.mask("observation")
    yield "reward_on_observation", on_next_place(batches.numbers(ROWS, 0, 1), mask), mask


def token_files() -> Iterator[CaseFile]:
    gae = CaseFile("gae", "advantage")
    batches = Batches("gae values")
    discounts = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.5)]
    for index, (case, rewards, mask) in enumerate(reward_batches("gae")):
        gamma, lam = discounts[index % len(discounts)]
        values = batches.matrix(mask, -1, 1)
        advantages, returns = token_advantages.gae(rewards, values, mask, gamma, lam)
        inputs = {"token_level_rewards": rewards, "response_mask": mask, "values": values}
        expected = {"advantages": advantages, "returns": returns}
        gae.add(case, inputs, {"gamma": gamma, "lam": lam}, expected)
    yield gae

    plus = CaseFile("reinforce_plus_plus", "advantage", ["advantages"])
    for index, (case, rewards, mask) in enumerate(reward_batches("reinforce_plus_plus")):
        # Equal returns everywhere would be whitened into rounding noise: discount those.
        gamma = (0.9, 1.0)[index % 2]
        advantages, returns = token_advantages.reinforce_plus_plus(rewards, mask, gamma)
        inputs = {"token_level_rewards": rewards, "response_mask": mask}
        expected = {"advantages": advantages, "returns": returns}
        plus.add(case, inputs, {"gamma": gamma}, expected)
    yield plus

    remax = CaseFile("remax", "advantage")
    batches = Batches("remax baselines")
    for case, rewards, mask in reward_batches("remax"):
        baselines = batches.numbers(ROWS, 0, 1)
        advantages, returns = token_advantages.remax(rewards, mask, baselines)
        remax.add(
            case,
            {"token_level_rewards": rewards, "response_mask": mask, "reward_baselines": baselines},
            {},
            {"advantages": advantages, "returns": returns},
        )
    yield remax


def token_baseline_files() -> Iterator[CaseFile]:
    functions = {
        "optimal_token_baseline": token_baselines.optimal_token_baseline,
        "tir_optimal_token_baseline": token_baselines.tir_optimal_token_baseline,
    }
    for name, function in functions.items():
        file = CaseFile(name, "advantage", ["advantages"])
        batches = Batches(f"{name} policies")
        for case, inputs in outcome_batches(name):
            if name == "optimal_token_baseline":
                if case in ("observation", "rewards_on_every_token"):
                    continue  # position and step differ: what it is not meant for
            elif case == "empty_rows":
                inputs["token_level_rewards"][2][0] = inputs["token_level_rewards"][-1][0] = 0.0
            log_probs = batches.log_probs(inputs["response_mask"])
            inputs = {
                **inputs,
                "old_log_probs": log_probs,
                "sum_pi_squared": batches.sum_pi_squared(log_probs),
            }
            if case in ("ordinary", "rewards_on_every_token"):
                inputs["rollout_is_weights"] = batches.matrix(inputs["response_mask"], 0.5, 2)
            advantages, returns = function(**inputs)
            file.add(case, inputs, {}, {"advantages": advantages, "returns": returns})
        yield file


def files() -> Iterator[CaseFile]:
    yield from token_files()
    yield from grpo_files()
    yield outcome_file("reinforce_plus_plus_baseline", outcome.reinforce_plus_plus_baseline)
    yield outcome_file("rloo", lambda r, m, u: outcome.rloo(r, m, u, alone_gets_score=True))
    yield outcome_file(
        "rloo_vectorized", lambda r, m, u: outcome.rloo(r, m, u, alone_gets_score=False)
    )
    for name, function in (("opo", outcome.opo), ("gpg", outcome.gpg), ("maxrl", outcome.maxrl)):
        yield outcome_file(name, function)
    yield gdpo_file()
    yield from token_baseline_files()
