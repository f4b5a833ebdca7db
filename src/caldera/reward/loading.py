"""The reward manager that the configuration asks for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from caldera.config import PPOTrainerConfig
from caldera.config.reward import RewardManagerConfig
from caldera.data.importing import load_object
from caldera.errors import ConfigError, RewardError
from caldera.protocol import DataProto
from caldera.reward.custom import ScoreFunction, get_custom_reward_fn, named_arguments
from caldera.reward.default import default_score_function
from caldera.reward.explaining import shown, writable
from caldera.reward.manager import (
    REWARD_MANAGERS,
    NaiveRewardManager,
    RewardManager,
    is_built_in,
)
from caldera.reward.managers import BatchRewardManager
from caldera.reward.model_server import served_score, server_arguments
from caldera.reward.samples import Sample, finite, plain
from caldera.reward.scoring import ScoringLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# ---- Managers of verl's newer contract: a class with `async run_single(data of length 1)`


def is_single(manager_class: Any) -> bool:
    """Whether it is a class of that contract."""
    return isinstance(manager_class, type) and callable(getattr(manager_class, "run_single", None))


class SingleRewardManager(NaiveRewardManager):
    """Calls `run_single`, which returns {"reward_score": ..., "reward_extra_info": {...}}."""

    def __init__(
        self,
        manager: Any,
        config: PPOTrainerConfig,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
    ) -> None:
        key = config.data.reward_fn_key
        super().__init__(tokenizer, num_examine, manager.run_single, key)

    def _arguments(self, data: DataProto, sample: Sample) -> Mapping[str, Any]:
        return {"data": data[sample.row : sample.row + 1]}

    def _judge(self, sample: Sample, returned: Any) -> tuple[float, dict[str, Any]]:
        if not isinstance(returned, Mapping) or "reward_score" not in returned:
            raise RewardError(
                f"run_single must return a dict with 'reward_score', and returned {shown(returned)}"
            )
        extras = returned.get("reward_extra_info") or {}
        if not isinstance(extras, Mapping):
            raise RewardError(f"'reward_extra_info' must be a dict, and is {shown(extras)}")
        score = finite(returned["reward_score"], "'reward_score'")
        return score, {writable(str(key)): plain(value) for key, value in extras.items()}


def load_reward_manager(
    config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase, num_examine: int
) -> RewardManager:
    """The manager that the configuration names, with the score function that it names.

    A manager with an argument `max_resp_len`, `reward_keys` or `reward_weights` gets
    `data.max_response_length`, `algorithm.gdpo_reward_keys` or `algorithm.gdpo_reward_weights`
    there, unless `reward_kwargs` say otherwise. Where there is a server of reward models, it
    scores, or a custom function does, which gets address and tokenizer.
    """
    manager_class = _manager_class(config.reward_manager)
    own_function = get_custom_reward_fn(config.custom_reward_function, config.custom)
    if manager_class is BatchRewardManager and own_function is None:
        raise ConfigError(
            "custom_reward_function.path=null: reward_model.reward_manager='batch' needs the "
            "Python file of a function that scores a whole batch; takes /x/y.py, file:///x/y.py or "
            "pkg://a.b.c"
        )
    by_source = default_score_function(config.reward_model.sandbox_fusion)
    server = server_arguments(config.reward_model)
    manager: RewardManager
    if is_single(manager_class):
        of_one = manager_class(
            config=config,
            tokenizer=tokenizer,
            compute_score=own_function or by_source,
            **{name: make() for name, make in server.items()},
        )
        manager = SingleRewardManager(of_one, config, tokenizer, num_examine)
    else:
        told: dict[str, Any] = {}
        function: ScoreFunction | None = own_function
        if config.reward_model.is_served and own_function is not None:
            told = named_arguments(own_function, server, or_any=True)
        elif _is_ours(manager_class) and own_function is None:
            served = config.reward_model.is_served
            function = served_score(config.reward_model) if served else by_source
        manager = manager_class(
            tokenizer=tokenizer,
            num_examine=num_examine,
            compute_score=function,
            reward_fn_key=config.data.reward_fn_key,
            **_further_arguments(manager_class, config),
            **told,
        )
        if own_function is not None and is_built_in(manager):
            own_function.check_call(manager.keywords())
    if isinstance(manager, NaiveRewardManager):
        manager.limits = ScoringLimits(config.reward.timeout, config.reward.num_workers)
    return manager


def _is_ours(manager_class: Any) -> bool:
    return isinstance(manager_class, type) and issubclass(manager_class, NaiveRewardManager)


def _further_arguments(manager_class: Any, config: PPOTrainerConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(config.reward_model.reward_kwargs)
    offered = {
        "max_resp_len": config.data.max_response_length,
        "reward_keys": config.algorithm.gdpo_reward_keys,
        "reward_weights": config.algorithm.gdpo_reward_weights,
        "custom": config.custom,
    }
    taken = inspect.signature(manager_class).parameters
    for name, value in offered.items():
        if name in taken and arguments.get(name) is None:
            arguments[name] = value
    return arguments


def _manager_class(config: RewardManagerConfig) -> Any:
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
    is_callable = isinstance(loaded, type) and any("__call__" in vars(b) for b in loaded.mro())
    if not (is_callable or is_single(loaded)):
        raise ConfigError(
            f"reward_manager.module.name={module.name!r} of {module.path} must be a class with "
            "__call__(data, return_dict=False), or with async run_single(data)"
        )
    return loaded
