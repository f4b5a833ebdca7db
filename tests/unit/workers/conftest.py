from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from caldera.config import PPOTrainerConfig, load_config, resolve_for_machine
from caldera.protocol import DataProto
from caldera.single_controller import LocalWorkerGroup, ResourcePool, WorkerGroup
from caldera.workers import ActorRolloutRefWorker, CriticWorker

PROMPTS = [[3, 4, 5, 6], [7, 8], [9], [10, 11, 12], [7, 8], [13, 14, 15, 16]]
WIDTH = 4  # P


@pytest.fixture
def load(model_folder: Callable[..., str]) -> Callable[..., PPOTrainerConfig]:
    """The config of a run on a CPU: three prompts with two answers each, of up to eight tokens."""

    def make(*overrides: str) -> PPOTrainerConfig:
        config = load_config(
            [
                "data.train_files=unused",
                "data.val_files=unused",
                "data.train_batch_size=3",
                f"data.max_prompt_length={WIDTH}",
                "data.max_response_length=8",
                f"actor_rollout_ref.model.path={model_folder()}",
                "actor_rollout_ref.actor.ppo_mini_batch_size=3",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.actor.optim.lr=0.02",
                "actor_rollout_ref.rollout.n=2",
                "actor_rollout_ref.rollout.temperature=0.8",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
                "critic.ppo_micro_batch_size_per_gpu=2",
                "critic.optim.lr=0.01",
                *overrides,
            ]
        )
        resolve_for_machine(config, gpus=0)
        return config

    return make


@pytest.fixture
def policy(load: Callable[..., PPOTrainerConfig]) -> Callable[..., WorkerGroup]:
    """A group of one policy worker with its models loaded."""

    def make(*overrides: str, role: str = "actor_rollout_ref") -> WorkerGroup:
        config = load(*overrides).actor_rollout_ref
        group = LocalWorkerGroup(
            ResourcePool((1,)), lambda: ActorRolloutRefWorker(config, role, "cpu")
        )
        group.init_model()
        return group

    return make


@pytest.fixture
def critic(load: Callable[..., PPOTrainerConfig]) -> Callable[..., WorkerGroup]:
    """A group of one critic worker with its model loaded."""

    def make(*overrides: str) -> WorkerGroup:
        config = load(*overrides)
        n = config.actor_rollout_ref.rollout.n
        group = LocalWorkerGroup(ResourcePool((1,)), lambda: CriticWorker(config.critic, n, "cpu"))
        group.init_model()
        return group

    return make


@pytest.fixture
def prompts() -> DataProto:
    """Six rows as the trainer hands them to the sampler."""
    input_ids = torch.zeros(len(PROMPTS), WIDTH, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(PROMPTS):
        input_ids[row, WIDTH - len(tokens) :] = torch.tensor(tokens)
        mask[row, WIDTH - len(tokens) :] = 1
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        },
        {"sample_seed": np.arange(len(PROMPTS)).astype(object)},
        {"eos_token_id": 2, "pad_token_id": 0},
    )


@pytest.fixture
def advantages() -> Callable[[DataProto], DataProto]:
    """Adds what an update needs to a batch of answers."""

    def add(batch: DataProto) -> DataProto:
        assert batch.batch is not None
        mask = batch.batch["response_mask"]
        generator = torch.Generator().manual_seed(2)
        chosen = torch.randn(len(batch), 1, generator=generator).expand(mask.shape)
        batch.batch["advantages"] = chosen * mask
        batch.batch["returns"] = chosen * mask
        return batch

    return add
