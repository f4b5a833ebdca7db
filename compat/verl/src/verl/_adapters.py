"""Functions of verl's whose arguments differ from those of Caldera's."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caldera import core_algos
from caldera.config import AlgorithmConfig, PPOTrainerConfig
from caldera.core_algos import KLController
from caldera.data import load_object
from caldera.errors import UnsupportedError
from caldera.protocol import DataProto, tensors_of
from caldera.reward import RewardManager
from caldera.reward import get_custom_reward_fn as custom_reward_fn
from caldera.reward import load_reward_manager as reward_manager
from caldera.reward.custom import ScoreFunction
from caldera.storage import local_path
from caldera.storage.fetching import fetch
from caldera.storage.paths import is_fetched
from caldera.trainer import metrics as timers
from caldera.trainer.ppo import advantage, metrics

# ---------------------------------------------------------------------- the trainer


def compute_response_mask(data: DataProto) -> Tensor:
    """(B, R): which tokens of the responses are not padding."""
    tensors = tensors_of(data)
    mask: Tensor = tensors["attention_mask"][:, -tensors["responses"].shape[1] :]
    return mask


def compute_advantage(
    data: DataProto,
    adv_estimator: str | Enum,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgorithmConfig | None = None,
) -> DataProto:
    """Adds advantages and returns. Groups are those of `uid`, however often rows were repeated."""
    if "response_mask" not in tensors_of(data):
        tensors_of(data)["response_mask"] = compute_response_mask(data)
    name = str(adv_estimator.value if isinstance(adv_estimator, Enum) else adv_estimator)
    algorithm = dataclasses.replace(
        config or AlgorithmConfig(),
        adv_estimator=name,
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
    )
    advantage.compute_advantage(data, algorithm)
    return data


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Adds token_level_rewards."""
    tensors = tensors_of(data)
    if "response_mask" not in tensors:
        tensors["response_mask"] = compute_response_mask(data)
    tensors["token_level_rewards"], told = core_algos.apply_kl_penalty(
        tensors["token_level_scores"],
        tensors["old_log_probs"],
        tensors["ref_log_prob"],
        tensors["response_mask"],
        kl_ctrl,
        kl_penalty,
    )
    return data, told


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Statistics of one batch."""
    return metrics.compute_data_metrics(batch, use_critic)


def marked_timer(
    name: str, timing_raw: dict[str, float], color: str | None = None
) -> AbstractContextManager[None]:
    """Adds the block's seconds to `timing_raw`; marks have no colour here."""
    return timers.marked_timer(name, timing_raw)


# ---------------------------------------------------------------------- rewards


def get_custom_reward_fn(config: PPOTrainerConfig) -> ScoreFunction | None:
    """The function that `custom_reward_function` names."""
    return custom_reward_fn(config.custom_reward_function, config.custom)


def load_reward_manager(
    config: PPOTrainerConfig, tokenizer: Any, num_examine: int, **reward_kwargs: Any
) -> RewardManager:
    """The manager that the configuration names; `reward_kwargs` are added to its own."""
    own = config.reward_model
    given = dataclasses.replace(own, reward_kwargs={**own.reward_kwargs, **reward_kwargs})
    return reward_manager(dataclasses.replace(config, reward_model=given), tokenizer, num_examine)


class RewardManagerBase:
    """Base of managers that score one sample: `async run_single(data)`."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: Any,
        compute_score: ScoreFunction | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.reward_router_address = reward_router_address
        self.reward_model_tokenizer = reward_model_tokenizer

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """{"reward_score": ..., "reward_extra_info": {...}} of a batch of one row."""
        raise NotImplementedError


# ---------------------------------------------------------------------- helpers


def copy_to_local(src: str, cache_dir: str | None = None, use_shm: bool = False) -> str:
    """Where to read what a path or URL names."""
    if use_shm:
        raise UnsupportedError("copy_to_local(use_shm=True): files are read from disk")
    if cache_dir is not None and is_fetched(src):
        return str(fetch(src, "copy_to_local", Path(cache_dir).expanduser()))
    return local_path(src, "copy_to_local")


def load_extern_object(file_path: str, type_name: str) -> Any:
    """The class or function of a Python file."""
    return load_object(file_path, type_name, "load_extern_object")


def hf_processor(name_or_path: str, **kwargs: Any) -> None:
    """A model of text alone has no processor; others are not supported."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(local_path(name_or_path, "hf_processor"), **kwargs)
    seen = [part for part in ("vision_config", "audio_config") if hasattr(config, part)]
    if seen:
        raise UnsupportedError(f"hf_processor({name_or_path!r}): the model has a {seen[0]}")


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    return core_algos.masked_sum(values, mask, axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    return core_algos.masked_mean(values, mask, axis)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label: logits (..., V), labels (...)."""
    return torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def get_reverse_idx(idx_map: list[int]) -> list[int]:
    """The permutation that undoes one."""
    return sorted(range(len(idx_map)), key=idx_map.__getitem__)
