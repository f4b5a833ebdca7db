"""Rollout sources: where a step's batch of scored responses comes from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from caldera.config import PPOTrainerConfig
from caldera.data import Batch, object_array
from caldera.errors import ConfigError, DataError
from caldera.protocol import DataProto, tensors_of
from caldera.reward import VALUE
from caldera.trainer.metrics import Metrics
from caldera.trainer.ppo.rewards import failure_metrics, rows_with_reward, states_of

logger = logging.getLogger(__name__)


class RolloutSource(Protocol):
    """Hands a trainer one batch a step, of whole groups of scored responses.

    The trainer cannot tell whether they were sampled for this step or ahead of it.
    """

    def next_batch(
        self, rows: Iterator[Batch], timing: dict[str, float]
    ) -> tuple[DataProto, Metrics]:
        """(the batch, metrics of how it came about); takes as many prompts from `rows`, the stream
        of the run, as it needs, and adds the seconds of its phases to `timing`."""
        ...

    def on_new_weights(self, version: int) -> None:
        """The policy has been updated for the `version`-th time; the sampler has the weights."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; empty where nothing is in flight between steps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SynchronousSource:
    """Samples and scores at the beginning of a step, with the newest weights.

    With dynamic sampling (`algorithm.filter_groups`) it repeats until there are enough prompts
    whose responses differ.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        rollout: Callable[[Batch, int, dict[str, float]], DataProto],
        score: Callable[[DataProto, dict[str, float]], None],
    ) -> None:
        """`rollout` and `score` are the trainer's phases of those names."""
        self._config = config
        self._rollout = rollout
        self._score = score

    def next_batch(
        self, rows: Iterator[Batch], timing: dict[str, float]
    ) -> tuple[DataProto, Metrics]:
        groups = GroupFilter(self._config)
        while not groups.enough:  # once, but for dynamic sampling
            batch = self._rollout(next(rows), groups.batches, timing)
            self._score(batch, timing)
            groups.add(batch)
        return groups.take()

    def on_new_weights(self, version: int) -> None:
        """The next batch is sampled with them."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is in flight between steps."""


# ---- Dynamic sampling: prompts whose responses are all alike teach nothing and are replaced (DAPO)

METRICS_OF_REWARD = ("score", "seq_reward", "seq_final_reward")
"""Names for the sum of a sample's scores; any other name is a value that the scorer returned."""


Rows = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""(B,): whether a row is meant."""


class GroupFilter:
    """Collects scored batches until there are enough prompts whose responses differ.

    Without `algorithm.filter_groups` the first batch is enough, and is handed back as it is.
    """

    def __init__(self, config: PPOTrainerConfig) -> None:
        self._settings = config.algorithm.filter_groups
        assert config.data.train_batch_size is not None, "set-up chooses it"
        self._wanted = config.data.train_batch_size  # prompts
        self._rows_a_prompt = config.actor_rollout_ref.rollout.n
        self._kept: list[DataProto] = []
        self._prompts_kept = 0
        self._prompts_seen = 0
        self._states: list[str | None] = []
        self._unjudged: list[DataProto] = []
        self._prompts_unjudged = 0

    @property
    def batches(self) -> int:
        """How many batches have been sampled for this step."""
        return len(self._kept)

    @property
    def enough(self) -> bool:
        if self.batches == 0 or not self._settings.enable:
            return self.batches > 0
        return self._prompts_kept >= self._wanted or self._fills_up

    def add(self, batch: DataProto) -> None:
        """Keep the groups of a scored batch that are informative."""
        self._states += states_of(batch)
        if not self._settings.enable:
            self._kept.append(batch)
            return
        rows = informative_rows(batch, str(self._settings.metric))
        self._kept.append(batch.select_idxs(rows))
        self._prompts_kept += int(rows.sum()) // self._rows_a_prompt
        self._prompts_seen += len(batch) // self._rows_a_prompt
        self._note_unjudged(batch, rows)
        most = self._settings.max_num_gen_batches
        if not self.enough and most and self.batches >= most:
            raise DataError(
                f"algorithm.filter_groups.max_num_gen_batches={most} batches were sampled, and "
                f"only {self._prompts_kept} of the {self._wanted} prompts that a step needs have "
                f"responses that differ in {self._settings.metric!r}: the prompts may be too hard "
                "or too easy, or data.gen_batch_size too small"
            )
        if not self.enough:
            logger.info(
                "dynamic sampling: %d of %d prompts after %d batches",
                self._prompts_kept,
                self._wanted,
                self.batches,
            )

    @property
    def _fills_up(self) -> bool:
        """Whether a step is full, once no more may be sampled, with prompts that failures took out.

        A scorer that fails should not end a run: those prompts are in the batch, and in no loss.
        Nor should it keep a step for ever: without a limit, they may be as many as a step needs.
        """
        most = self._settings.max_num_gen_batches
        if not most:
            return self._prompts_unjudged >= self._wanted
        found = self._prompts_kept + self._prompts_unjudged
        return self.batches >= most and found >= self._wanted

    def _note_unjudged(self, batch: DataProto, kept: Rows) -> None:
        """Keep aside the groups that are not kept and of which a member could not be scored.

        So many as a step needs are enough of them.
        """
        failed = ~(rows_with_reward(batch).numpy() & _is_scored(batch))
        uids = batch.non_tensor_batch["uid"].astype(str)
        part = batch.select_idxs(np.isin(uids, uids[failed]) & ~kept)
        part = part[: (self._wanted - self._prompts_unjudged) * self._rows_a_prompt]
        if len(part):
            tensors_of(part)["has_reward"] = torch.zeros(len(part), dtype=torch.bool)
            self._unjudged.append(part)
            self._prompts_unjudged += len(part) // self._rows_a_prompt

    def take(self) -> tuple[DataProto, dict[str, float]]:
        """(the batch of a step, metrics); prompts beyond the wanted number are dropped."""
        metrics = failure_metrics(self._states)
        if not self._settings.enable:
            return self._kept[0], metrics
        metrics |= {
            "training/num_gen_batches": float(self.batches),
            "training/filter_groups/kept_ratio": self._prompts_kept / self._prompts_seen,
            "training/filter_groups/evicted_samples": float(
                (self._prompts_seen - self._prompts_kept) * self._rows_a_prompt
            ),
        }
        parts = [part for part in (*self._kept, *self._unjudged) if len(part)]
        whole = DataProto.concat(_with_equal_columns(parts))
        return whole[: self._wanted * self._rows_a_prompt], metrics


def informative_rows(batch: DataProto, metric: str) -> Rows:
    """Which rows belong to a group whose values differ, or that has one member.

    Rows without a reward say nothing of their group.
    """
    values = _values(batch, metric)
    uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
    sizes = Counter(uids)
    by_uid: dict[str, set[float]] = {}
    for uid, value, is_there in zip(uids, values, rows_with_reward(batch).tolist(), strict=True):
        if is_there:
            by_uid.setdefault(uid, set()).add(value)
    kept = {uid: sizes[uid] == 1 or len(values) > 1 for uid, values in by_uid.items()}
    return np.array([kept.get(uid, False) for uid in uids], dtype=bool)


def _is_scored(batch: DataProto) -> Rows:
    """Whether a row has a score; one that counts as scored 0 has none."""
    return np.array([state in (None, VALUE) for state in states_of(batch)], dtype=bool)


def _with_equal_columns(parts: list[DataProto]) -> list[DataProto]:
    """What a scorer said of one batch and not of another is None there."""
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    for part in parts:
        for name in names:
            part.non_tensor_batch.setdefault(name, object_array([None] * len(part)))
    return parts


def _values(batch: DataProto, metric: str) -> list[float]:
    """The value of each row; 0 for one that has none."""
    if metric in batch.non_tensor_batch:
        return [float(value or 0) for value in batch.non_tensor_batch[metric]]
    nothing_said = not (rows_with_reward(batch).numpy() & _is_scored(batch)).any()
    if metric in METRICS_OF_REWARD or nothing_said:
        scores: torch.Tensor = tensors_of(batch)["token_level_scores"]
        return [float(score) for score in scores.sum(-1)]
    said = ", ".join(sorted(batch.non_tensor_batch.keys() - {"uid"}))
    raise ConfigError(
        f"algorithm.filter_groups.metric={metric!r}: takes {', '.join(METRICS_OF_REWARD)}, or a "
        f"value of the scorer's; the rows have {said}"
    )
