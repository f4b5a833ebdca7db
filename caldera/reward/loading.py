"""The reward manager that the configuration asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from caldera.config import PPOTrainerConfig
from caldera.config.reward import RewardManagerConfig
from caldera.data.importing import load_object
from caldera.errors import ConfigError
from caldera.reward.custom import get_custom_reward_fn
from caldera.reward.manager import REWARD_MANAGERS, RewardManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_reward_manager"]


def load_reward_manager(
    config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, num_examine: int
) -> RewardManager:
    """The manager that the configuration names, with the score function that it names.

    A manager with an argument `max_resp_len` gets `data.max_response_length` there, unless
    `reward_kwargs` say otherwise.
    """
    manager_class = _manager_class(config.reward_manager)
    reward_kwargs: dict[str, Any] = dict(config.reward_model.reward_kwargs)
    takes_length = "max_resp_len" in inspect.signature(manager_class).parameters
    if takes_length and reward_kwargs.get("max_resp_len") is None:
        reward_kwargs["max_resp_len"] = config.data.max_response_length
    return manager_class(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=get_custom_reward_fn(config.custom_reward_function),
        reward_fn_key=config.data.reward_fn_key,
        **reward_kwargs,
    )


def _manager_class(config: RewardManagerConfig) -> Callable[..., RewardManager]:
    module = config.module
    if config.source == "register":
        if module.path is not None:
            raise ConfigError(
                f"reward_manager.module.path={module.path!r} is given, and "
                "reward_manager.source=register does not read it; takes importlib"
            )
        return REWARD_MANAGERS[config.name]
    if module.path is None:
        raise ConfigError(
            "reward_manager.module.path=null: reward_manager.source=importlib needs the Python "
            "file (/x/y.py, file:///x/y.py or pkg://a.b.c) that holds the manager's class"
        )
    loaded: Any = load_object(module.path, module.name, "reward_manager.module")
    # `callable` would be true of every class, since calling a class makes an instance.
    if not (isinstance(loaded, type) and any("__call__" in vars(base) for base in loaded.mro())):
        raise ConfigError(
            f"reward_manager.module.name={module.name!r} of {module.path} must be a class with "
            "__call__(data, return_dict=False)"
        )
    return loaded
