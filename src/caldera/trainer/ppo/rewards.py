"""What the controller does with rewards, and with samples that could not be scored."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caldera.config import PPOTrainerConfig, uses_ray
from caldera.config.estimators import REWARD_KEYS, needs_of
from caldera.data import object_array
from caldera.errors import RewardError
from caldera.protocol import DataProto, tensors_of
from caldera.reward import (
    FAILED,
    OUTCOMES,
    TIMED_OUT,
    VALUE,
    Outcome,
    RewardManager,
    compute_reward,
)
from caldera.reward.manager import RewardResult
from caldera.reward.model_server import RouterUrl
from caldera.single_controller import Role, WorkerGroup
from caldera.single_controller._ray import ray_module
from caldera.single_controller.in_process import InProcessWorkerGroup
from caldera.trainer.metrics import Metrics
from caldera.trainer.ppo.agents import DUMPED, facts_in
from caldera.workers.reward_router import Router

Extras = dict[str, list[Any]]


class FirstScores:
    """Ends a run none of whose responses can be scored, at the first that there are.

    Once a sample has been scored, failures are data, even if they are all of a batch.
    """

    def __init__(self, config: PPOTrainerConfig) -> None:
        self._function = config.custom_reward_function
        self._are_first = True

    def check(self, extras: Mapping[str, Sequence[Any]]) -> None:
        """Raise RewardError if these are the first responses and none has a score."""
        states = extras.get("reward_state", [])
        if self._are_first and len(states) and not {None, VALUE} & set(states):
            function = self._function
            of = f"\n  score function: {function.name} of {function.path}" if function.path else ""
            raise RewardError(
                f"none of the first {len(states)} responses could be scored, so that the run would "
                f"learn nothing. The first: {extras['reward_error'][0]}{of}"
            )
        self._are_first = False


def score_responses(
    batch: DataProto, reward_fn: RewardManager, config: PPOTrainerConfig
) -> tuple[Tensor, Extras]:
    """The reward of every token (B, R), and what else the scorers said of each sample.

    A reward that an agent loop gave is kept, and its row is not scored. Those that tools and
    interactions gave to turns count as `multi_turn.turn_rewards` says.
    """
    facts = facts_in(batch)
    given = [fact.reward_score for fact in facts]
    if any(score is not None for score in given):
        known = batch.non_tensor_batch.get(OUTCOMES, object_array([None] * len(batch)))
        batch.non_tensor_batch[OUTCOMES] = object_array(
            [
                outcome if score is None else Outcome(float(score), {"acc": float(score)})
                for outcome, score in zip(known, given, strict=True)
            ]
        )
    scores, extras = compute_reward(batch, reward_fn)  # (B, R)
    if not facts:
        return scores, extras
    scores = scores.clone()  # it may be the batch's own, of a reward model
    _keep_given(batch, given, scores, extras)
    how = config.actor_rollout_ref.rollout.multi_turn.turn_rewards
    if how != "trajectory":
        scores = scores if how == "mixed" else torch.zeros_like(scores)
        for row, fact in enumerate(facts):
            for place, reward in fact.turn_rewards:
                scores[row, place] += reward
    return scores, extras


def _keep_given(
    batch: DataProto, given: Sequence[float | None], scores: Tensor, extras: Extras
) -> None:
    """Put the agents' own rewards in place of what a manager of whole batches may have said."""
    last = tensors_of(batch)["attention_mask"][:, -scores.shape[-1] :].sum(-1) - 1  # (B,)
    for row, score in enumerate(given):
        if score is None:
            continue
        scores[row] = 0
        if last[row] >= 0:
            scores[row, last[row]] = score
        if "reward_state" in extras:
            extras["reward_state"][row], extras["reward_error"][row] = VALUE, None


def record_scores(
    batch: DataProto, scores: Tensor, extras: Extras, config: PPOTrainerConfig
) -> list[str]:
    """Adds token_level_scores, has_reward, and what else the scorer said; names its columns.

    `has_reward` (B,) tells the rows that take part in advantages, losses and their metrics: with
    `reward.on_failure=zero` all do.
    """
    _check_components(extras, config)
    tensors = tensors_of(batch)
    tensors["token_level_scores"] = scores  # (B, R)
    tensors["has_reward"] = takes_part(extras, len(batch), config)
    batch.non_tensor_batch.pop(OUTCOMES, None)
    for key, values in extras.items():
        batch.non_tensor_batch[key] = object_array(values)
    return [*extras, *(key for key in DUMPED if key in batch.non_tensor_batch)]


def takes_part(extras: Mapping[str, Sequence[Any]], rows: int, config: PPOTrainerConfig) -> Tensor:
    """(B,): whether a row has a reward, or counts as scored 0."""
    states = extras.get("reward_state")
    if states is None or config.reward.on_failure == "zero":
        return torch.ones(rows, dtype=torch.bool)
    return torch.tensor([state == VALUE for state in states])


def rows_with_reward(batch: DataProto) -> Tensor:
    """(B,): the rows that take part. ReMax's need a baseline, which is NaN where there is none."""
    tensors = tensors_of(batch)
    kept = tensors.get("has_reward", None)
    if kept is None:
        kept = torch.ones(len(batch), dtype=torch.bool)
    baselines = tensors.get("reward_baselines", None)
    rows: Tensor = kept if baselines is None else kept & ~baselines.isnan()
    return rows


def failure_metrics(states: Sequence[str | None]) -> Metrics:
    """How many samples of a step could not be scored; None stands for one that was."""
    failed, timed_out = states.count(FAILED), states.count(TIMED_OUT)
    return {
        "reward/failed": float(failed),
        "reward/timed_out": float(timed_out),
        "reward/failure_rate": (failed + timed_out) / max(len(states), 1),
    }


def states_of(batch: DataProto) -> list[str | None]:
    """The state of each row's reward, None for one of a batch without failures."""
    column = batch.non_tensor_batch.get("reward_state")
    return [None] * len(batch) if column is None else list(column)


def component_metrics(batch: DataProto, config: PPOTrainerConfig) -> Metrics:
    """`gdpo/{key}/{mean,std,max,min}` of each reward that GDPO keeps apart, and `reward/...` of
    `reward.log_keys`."""
    metrics: Metrics = {}
    kept = rows_with_reward(batch).numpy()
    shown = [("gdpo", key) for key in _components(config)]
    shown += [("reward", key) for key in config.reward.log_keys]
    for group, key in shown:
        column = batch.non_tensor_batch.get(key)
        rows = [] if column is None else column[kept]
        numbers = [float(value) for value in rows if isinstance(value, int | float)]
        if not numbers:
            continue
        values = torch.tensor(numbers).double()
        metrics |= {
            f"{group}/{key}/mean": float(values.mean()),
            f"{group}/{key}/std": float(values.std()) if len(values) > 1 else 0.0,
            f"{group}/{key}/max": float(values.max()),
            f"{group}/{key}/min": float(values.min()),
        }
    return metrics


def waited_for_rewards(responses: DataProto, timing: dict[str, float]) -> None:
    """Count what scoring took beyond the slowest rank's sampling as time of scoring.

    A rank that waits for its scores while another still samples costs nothing.
    """
    metrics = responses.meta_info.pop("metrics", {})
    if "reward_wait" not in metrics:
        return
    sampled = np.atleast_1d(metrics["reward_sampling"])  # (ranks,)
    seconds = float((sampled + metrics["reward_wait"]).max() - sampled.max())
    timing["gen"] = timing["gen"] - seconds
    timing["reward"] = timing.get("reward", 0.0) + seconds


def _components(config: PPOTrainerConfig) -> Sequence[str]:
    algorithm = config.algorithm
    has_keys = REWARD_KEYS in needs_of(algorithm.adv_estimator)
    return algorithm.gdpo_reward_keys or () if has_keys else ()


def _check_components(extras: Extras, config: PPOTrainerConfig) -> None:
    """A sample without a number for each of GDPO's rewards has failed; scored 0, it has zeros."""
    keys = [key for key in _components(config) if key in extras]
    for key in keys:
        rows = len(extras[key])
        states = extras.get("reward_state", [VALUE] * rows)
        errors = extras.get("reward_error", [None] * rows)
        for row, value in enumerate(extras[key]):
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if states[row] == VALUE and not is_number:
                states[row] = FAILED
                errors[row] = f"the reward {key!r} must be a finite number, and is {value!r}"
        if any(state != VALUE for state in states):
            extras["reward_state"], extras["reward_error"] = states, errors
    states = extras.get("reward_state", [VALUE])
    if VALUE not in states:  # nobody said what there would have been
        keys = list(_components(config))
        extras |= {key: [0.0] * len(states) for key in keys if key not in extras}
    for key in keys:
        states = extras.get("reward_state", [VALUE] * len(extras[key]))
        pairs = zip(extras[key], states, strict=True)
        extras[key] = [value if state == VALUE else 0.0 for value, state in pairs]


# ---- The servers of reward models that a run uses: where they are, and when they are awake


class RewardServers:
    """One address for all servers of reward models, those of the run's own ranks or others.

    The address is known before the ranks are: score functions are made with it.
    """

    def __init__(self, config: PPOTrainerConfig) -> None:
        self._router: Router | None = None
        self._group: WorkerGroup | None = None
        self._sleeps = config.reward_model.sleeps
        self.config = config
        """The run's config, with the address in `reward_model.rollout.url`."""
        reward_model = config.reward_model
        others: list[str] = [] if reward_model.has_worker else reward_model.rollout.url or []
        if reward_model.is_served and len(others) != 1:
            self._router = Router(_host(config), others)
            self.config = copy.deepcopy(config)
            self.config.reward_model.rollout.url = [RouterUrl(f"http://{self._router.address}")]

    def start(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Have the ranks serve, where the model is theirs."""
        if self.config.reward_model.is_served and Role.RewardModel.value in groups:
            assert self._router is not None, "a model of the run's own stands behind a router"
            self._group = groups[Role.RewardModel.value]
            self._router.use(self._group.serve())

    def awake(self, manager: RewardManager) -> RewardManager:
        """The manager, around whose calls a model that sleeps is awake."""
        return _Awake(self, manager) if self._sleeps else manager

    def wake(self) -> None:
        assert self._group is not None, "start comes first"
        self._group.wake()

    def sleep(self) -> None:
        assert self._group is not None, "start comes first"
        self._group.sleep()

    def close(self) -> None:
        """Requests find nobody from now on; servers in other processes end with these."""
        if self._router is not None:
            self._router.close()
        if isinstance(self._group, InProcessWorkerGroup):
            self._group.stop_serving()


class _Awake:
    def __init__(self, servers: RewardServers, manager: RewardManager) -> None:
        self._servers = servers
        self.__wrapped__ = manager  # what it raises is judged by whose it is

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | RewardResult:
        self._servers.wake()
        try:
            return self.__wrapped__(data, return_dict=return_dict)
        finally:
            self._servers.sleep()


def _host(config: PPOTrainerConfig) -> str:
    """The address of this machine that all ranks can reach."""
    if not uses_ray(config):
        return "127.0.0.1"
    return str(ray_module("ray.util").get_node_ip_address())
