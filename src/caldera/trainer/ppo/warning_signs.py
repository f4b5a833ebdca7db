"""Signs in the metrics that a run no longer learns: rules that read its steps, return a sentence.

A rule is a pure function of the steps so far, the newest last. It sees metrics alone, so it says
what they show and what to try, not what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

Step = Mapping[str, float]
Rule = Callable[[Sequence[Step], bool], str | None]
"""Of the steps, and whether the last of them is the run's."""

SCORE, LOWEST, HIGHEST = "critic/score/mean", "critic/score/min", "critic/score/max"
ENTROPY, GRADIENT, RATE = "actor/entropy", "actor/grad_norm", "actor/lr"
NUMBER, CUT_OFF = "training/global_step", "response_length/clip_ratio"
READ = (SCORE, LOWEST, HIGHEST, ENTROPY, GRADIENT, RATE, NUMBER, CUT_OFF)

SAME_REWARDS = 5
"""Steps in a row whose rewards are all the same."""
COLLAPSED = 3
"""Steps in a row with next to no entropy and gradient."""
LEFT = 0.05
"""Share of the first entropy, or of the largest gradient norm, that is next to nothing."""


def constant_reward(steps: Sequence[Step], is_end: bool = False) -> str | None:
    """All responses of several steps in a row got the same reward, or all of a shorter run."""
    last = steps[-SAME_REWARDS:]
    values = {step[key] for step in last for key in (LOWEST, HIGHEST) if key in step}
    if (len(last) < SAME_REWARDS and not is_end) or len(values) != 1:
        return None
    value = values.pop()
    when = f"last {len(last)} steps" if len(last) > 1 else "step"
    told = (
        f"every response of the {when} got the same reward, {value:g}, so there is no difference "
        "to learn from. "
    )
    best, worst = max(step[HIGHEST] for step in steps), min(step[LOWEST] for step in steps)
    if worst < best == value:
        return told + (
            "It is the best reward of the run: if it is the best there is, the prompts are solved; "
            "stop here, or train on harder ones (data.train_files)"
        )
    cut_off = last[-1].get(CUT_OFF, 0.0)
    return told + (
        "Check that the scorer reads the format in which the model answers "
        "(trainer.rollout_data_dir=FOLDER writes responses and scores), that the prompts are "
        "neither too hard nor solved, and that responses reach their end "
        f"({CUT_OFF}={cut_off:g}; data.max_response_length). More responses a prompt "
        "(actor_rollout_ref.rollout.n) or a higher actor_rollout_ref.rollout.temperature bring "
        "more varied ones"
    )


def collapsed_policy(steps: Sequence[Step], is_end: bool = False) -> str | None:
    """Entropy and gradient have gone, and the reward did not get better on the way."""
    known = [step for step in steps if ENTROPY in step and GRADIENT in step]
    if len(known) <= COLLAPSED:
        return None
    first, last = known[0], known[-COLLAPSED:]
    largest = max(step[GRADIENT] for step in known)
    for step in last:
        entropy_left, gradient_left = LEFT * first[ENTROPY], LEFT * largest
        if not (step[ENTROPY] <= entropy_left and step[GRADIENT] <= gradient_left):
            return None  # or it is not a number, of which another rule knows
    score = mean(step.get(SCORE, 0.0) for step in last)
    best = max(step.get(SCORE, 0.0) for step in known)
    if score > first.get(SCORE, 0.0) and score >= best - LEFT * abs(best):
        return None  # it is sure of itself because it is right
    now = last[-1]
    return (
        f"the policy has collapsed: {ENTROPY} fell from {first[ENTROPY]:.3g} (step "
        f"{first.get(NUMBER, 1):g}) to {now[ENTROPY]:.3g}, {GRADIENT} from {largest:.3g} to "
        f"{now[GRADIENT]:.3g}, and the reward is {score:.3g} (best {best:.3g}). It gives the same "
        "response again and again and does not recover by itself. Start anew, or from a checkpoint "
        "before (trainer.resume_from_path), with a lower actor_rollout_ref.actor.optim.lr "
        f"(now {now.get(RATE, 0.0):.3g}; a tenth is a good first try); "
        "actor_rollout_ref.actor.use_kl_loss=True or an actor_rollout_ref.actor.entropy_coeff "
        "above 0 hold it back, too"
    )


def diverged_policy(steps: Sequence[Step], is_end: bool = False) -> str | None:
    """Gradients are no finite numbers, so that the optimiser leaves out their updates."""
    last = [step for step in steps if GRADIENT in step][-COLLAPSED:]
    if len(last) < COLLAPSED or any(math.isfinite(step[GRADIENT]) for step in last):
        return None
    return (
        f"{GRADIENT} has not been a finite number for the last {COLLAPSED} steps: such updates are "
        "skipped, and the weights may hold NaN. Start anew, or from a checkpoint before "
        "(trainer.resume_from_path), with a lower actor_rollout_ref.actor.optim.lr "
        f"(now {last[-1].get(RATE, 0.0):.3g}; a tenth is a good first try)"
    )


RULES: tuple[Rule, ...] = (constant_reward, collapsed_policy, diverged_policy)


class WarningSigns:
    """The steps of a run, and which rules have spoken already: each does once."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self._waiting = list(rules)
        self._steps: list[Step] = []

    def read(self, metrics: Step, is_end: bool = False) -> list[str]:
        """Take in a step; returns what there is to say of it for the first time."""
        self._steps.append({name: metrics[name] for name in READ if name in metrics})
        told = []
        for rule in list(self._waiting):
            if sentence := rule(self._steps, is_end):
                told.append(sentence)
                self._waiting.remove(rule)
        return told
