from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from caldera.config import PPOTrainerConfig
from caldera.data import Batch, object_array
from caldera.protocol import DataProto
from caldera.trainer.sources import SynchronousSource


def config(*, filters: bool) -> PPOTrainerConfig:
    found = PPOTrainerConfig()
    found.data.train_batch_size = 2
    found.actor_rollout_ref.rollout.n = 2
    found.algorithm.filter_groups.enable = filters
    found.algorithm.filter_groups.metric = "score"
    return found


def rows() -> Iterator[Batch]:
    """Each batch of prompts says its number."""
    number = 0
    while True:
        yield {"number": np.array([number, number])}
        number += 1


def scored(number: int, scores: list[float]) -> DataProto:
    count = len(scores)
    return DataProto.from_dict(
        {"token_level_scores": torch.tensor(scores)[:, None], "has_reward": torch.ones(count) > 0},
        {"uid": object_array([f"{number}-{row // 2}" for row in range(count)])},
    )


def test_a_step_samples_and_scores_one_batch() -> None:
    calls: list[tuple[str, int]] = []

    def rollout(batch: Batch, attempt: int, timing: dict[str, float]) -> DataProto:
        calls.append(("rollout", attempt))
        timing["gen"] = 1.0
        return scored(int(batch["number"][0]), [0.0, 1.0, 1.0, 1.0])

    def score(batch: DataProto, timing: dict[str, float]) -> None:
        calls.append(("score", len(batch)))

    source, stream = SynchronousSource(config(filters=False), rollout, score), rows()
    for number in range(2):
        timing: dict[str, float] = {}
        batch, metrics = source.next_batch(stream, timing)
        assert str(batch.non_tensor_batch["uid"][0]) == f"{number}-0"
        assert timing == {"gen": 1.0} and metrics["reward/failed"] == 0
        source.on_new_weights(number + 1)
    assert calls == [("rollout", 0), ("score", 4)] * 2
    assert source.state_dict() == {}, "nothing is in flight between steps"


def test_dynamic_sampling_goes_on_until_there_are_enough_prompts() -> None:
    attempts: list[int] = []

    def rollout(batch: Batch, attempt: int, timing: dict[str, float]) -> DataProto:
        attempts.append(attempt)
        return scored(int(batch["number"][0]), [0.0, 1.0, 1.0, 1.0])  # one of two prompts differs

    source = SynchronousSource(config(filters=True), rollout, lambda batch, timing: None)
    batch, metrics = source.next_batch(rows(), {})
    assert attempts == [0, 1]
    assert [str(uid) for uid in batch.non_tensor_batch["uid"]] == ["0-0", "0-0", "1-0", "1-0"]
    assert metrics["training/num_gen_batches"] == 2
