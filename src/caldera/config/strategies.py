"""Checks of what each training strategy takes: keys of one are not given to another."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from caldera.config.estimators import needs_critic, needs_reference
from caldera.config.fields import default_in, shown, walk
from caldera.config.megatron import (
    LAYOUT_KEYS,
    NO_MEGATRON_LORA,
    OPTIMIZER_OVERRIDES,
    MegatronConfig,
)
from caldera.config.optim import OptimizerConfig
from caldera.config.ppo import PPOTrainerConfig
from caldera.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

MEGATRON = "megatron"
MEGATRON_KEYS = (
    "megatron.",
    "optim.clip_grad",
    "optim.lr_warmup_init",
    "optim.lr_decay_steps",
    "optim.lr_decay_style",
    "optim.min_lr",
    "optim.weight_decay_incr_style",
    "optim.lr_wsd_decay_style",
    "optim.lr_wsd_decay_steps",
)
"""Keys of a role, or groups that end in a dot, that strategy=megatron alone takes."""
TORCH_KEYS = (
    "fsdp_config.",
    "model.fsdp_config.",
    "grad_clip",
    "ulysses_sequence_parallel_size",
    "optim.optimizer_impl",
    "optim.lr_scheduler_type",
    "optim.warmup_style",
    "optim.min_lr_ratio",
    "optim.num_cycles",
)
"""Those that the other strategies alone take."""
COUNTERPARTS = {
    "grad_clip": "optim.clip_grad",
    "ulysses_sequence_parallel_size": "megatron.context_parallel_size",
    "optim.lr_scheduler_type": "optim.lr_decay_style",
    "optim.warmup_style": "optim.lr_decay_style",
    "optim.min_lr_ratio": "optim.min_lr",
    "fsdp_config.dtype": "megatron.dtype",
    "fsdp_config.model_dtype": "megatron.dtype",
    "fsdp_config.optimizer_offload": "megatron.optimizer_offload",
    "fsdp_config.param_offload": "megatron.param_offload",
    "fsdp_config.seed": "megatron.seed",
    "fsdp_config.tensor_parallel_size": "megatron.tensor_model_parallel_size",
}
"""A key of the other strategies -> what megatron has instead."""
OPTIMIZERS = {"adam": "adam", "AdamW": "adam", "sgd": "sgd", "SGD": "sgd"}
"""Names of Megatron's optimisers; its adam is what torch calls AdamW."""


@dataclass(frozen=True)
class Role:
    """A model of a run, with its keys."""

    name: str
    """The group of its keys."""
    node: Any
    model_name: str
    model: Any
    is_needed: bool
    pool: str
    ranks: int | None
    """Of its pool; None: not known before the machine is."""

    @property
    def devices_from(self) -> str:
        """The keys that say how many ranks there are."""
        return f"{self.pool}.n_gpus_per_node x {self.pool}.nnodes"

    @property
    def is_megatron(self) -> bool:
        return bool(self.node.strategy == MEGATRON)

    @property
    def megatron(self) -> MegatronConfig:
        megatron: MegatronConfig = self.node.megatron
        return megatron

    @property
    def optim(self) -> OptimizerConfig | None:
        optim: OptimizerConfig | None = getattr(self.node, "optim", None)
        return optim


def roles(config: PPOTrainerConfig) -> dict[str, Role]:
    """Every model that a run can have, by the group of its keys."""
    trainer, parts, reward = config.trainer, config.actor_rollout_ref, config.reward_model
    devices = trainer.n_gpus_per_node and trainer.n_gpus_per_node * trainer.nnodes
    has_pool = reward.enable_resource_pool
    scorers = reward.n_gpus_per_node * reward.nnodes if has_pool else devices
    policy = ("actor_rollout_ref.model", parts.model)
    found = [
        Role("actor_rollout_ref.actor", parts.actor, *policy, True, "trainer", devices),
        Role("actor_rollout_ref.ref", parts.ref, *policy, needs_reference(config), "trainer",
             devices),
        Role("critic", config.critic, "critic.model", config.critic.model, needs_critic(config),
             "trainer", devices),
        Role("reward_model", reward, "reward_model.model", reward.model, reward.enable,
             "reward_model" if has_pool else "trainer", scorers),
    ]  # fmt: skip
    return {role.name: role for role in found}


def sequence_parallel_size(node: Any) -> int:
    """Ranks that share the tokens of a role's micro-batches."""
    if node.strategy == MEGATRON:
        return int(node.megatron.context_parallel_size)
    return int(node.ulysses_sequence_parallel_size)


def model_parallel_size(node: Any) -> int:
    """Ranks that have the same rows of a role's batches."""
    if node.strategy == MEGATRON:
        return int(node.megatron.ranks_of_a_copy)
    memory = getattr(node, "fsdp_config", None) or node.model.fsdp_config
    return sequence_parallel_size(node) * int(getattr(memory, "tensor_parallel_size", 1))


def check_strategies(config: PPOTrainerConfig) -> None:
    """Every role has keys of its own strategy alone, and they fit together."""
    every = roles(config)
    for role in every.values():
        check_role(config, role)
    if every["actor_rollout_ref.actor"].is_megatron or every["actor_rollout_ref.ref"].is_megatron:
        _check_full_kl(config)
    _check_layouts_alike([role for role in every.values() if role.is_megatron and role.is_needed])


def check_role(config: Any, role: Role) -> None:
    """A role of a run with this config has keys of its own strategy alone, and they fit."""
    _check_keys(config, role)
    if role.optim is not None:
        _check_optimizer(role, role.optim)
    if role.is_megatron:
        _check_model(role)
        _check_megatron(role)
    _drop_load_options(role)


def _check_keys(config: Any, role: Role) -> None:
    foreign = TORCH_KEYS if role.is_megatron else MEGATRON_KEYS
    for key, field, value in walk(role.node, f"{role.name}."):
        own = key.removeprefix(f"{role.name}.")
        is_foreign = any(own == name or (name[-1] == "." and own.startswith(name))
                         for name in foreign)  # fmt: skip
        if is_foreign and value != default_in(config, field):
            strategies = "local, fsdp and fsdp2" if role.is_megatron else MEGATRON
            instead = _counterpart(role, own)
            takes = f"takes {role.name}.{instead}" if instead else "does not take it"
            raise ConfigError(
                f"{key}={shown(value)} is a key of {strategies}; "
                f"{role.name}.strategy={role.node.strategy!r} {takes}"
            )


def _counterpart(role: Role, own: str) -> str | None:
    """What the role's strategy has instead of another's key."""
    if role.is_megatron:
        return COUNTERPARTS.get(own.removeprefix("model."))
    names = [theirs for theirs, ours in COUNTERPARTS.items() if ours == own]
    has = {key for key, _, _ in walk(role.node)}
    return next((n for name in names for n in (name, f"model.{name}") if n in has), None)


def _check_optimizer(role: Role, optim: OptimizerConfig) -> None:
    key = f"{role.name}.optim"
    if not role.is_megatron:
        if optim.optimizer_impl == "torch.optim" and optim.optimizer in ("adam", "sgd"):
            raise ConfigError(
                f"{key}.optimizer={optim.optimizer!r} is Megatron's; "
                f"{role.name}.strategy={role.node.strategy!r} takes a class of "
                f"{key}.optimizer_impl={optim.optimizer_impl!r}, such as AdamW"
            )
        return
    if optim.optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"{key}.optimizer={optim.optimizer!r}: {role.name}.strategy='megatron' takes adam, sgd"
        )
    optim.optimizer = OPTIMIZERS[optim.optimizer]
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(optim, name) > optim.lr:
            raise ConfigError(
                f"{key}.{name}={getattr(optim, name)}: takes at most {key}.lr={optim.lr}"
            )
    if optim.lr_decay_style == "WSD" and optim.lr_wsd_decay_steps is None:
        raise ConfigError(f"{key}.lr_decay_style='WSD' needs {key}.lr_wsd_decay_steps=...")
    if optim.lr_decay_steps is not None and optim.lr_warmup_steps >= optim.lr_decay_steps:
        raise ConfigError(
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} steps: takes fewer than "
            f"{key}.lr_decay_steps={optim.lr_decay_steps}"
        )
    known = OPTIMIZER_OVERRIDES[optim.optimizer]
    for name, value in (optim.override_optimizer_config or {}).items():
        if name not in known:
            raise UnsupportedError(
                f"{key}.override_optimizer_config.{name}={shown(value)} is not supported: "
                f"{optim.optimizer} of {role.name}.strategy='megatron' takes {', '.join(known)}"
            )


def _check_model(role: Role) -> None:
    key, model = role.model_name, role.model
    for name, reason in {
        "lora_rank": NO_MEGATRON_LORA,
        "lora_adapter_path": NO_MEGATRON_LORA,
        "use_liger": "Megatron has layers of its own",
        "enable_activation_offload": "what the backward pass needs stays on the device",
    }.items():
        if value := getattr(model, name, None):
            raise UnsupportedError(
                f"{key}.{name}={shown(value)} is not supported with "
                f"{role.name}.strategy='megatron': {reason}"
            )
    checkpoint = getattr(role.node, "checkpoint", None)
    if checkpoint is not None and checkpoint.layout != "dist":
        raise UnsupportedError(
            f"{role.name}.checkpoint.layout={checkpoint.layout!r} is not supported with "
            f"{role.name}.strategy='megatron': takes dist"
        )
    _take_inner_overrides(key, model.override_config)


def _take_inner_overrides(key: str, overrides: dict[str, Any]) -> None:
    """verl's Megatron has two groups here: overrides of config.json, and of the experts."""
    experts = overrides.pop("moe_config", None) or {}
    for name, value in experts.items():
        if name != "freeze_moe_router" or value:
            raise UnsupportedError(
                f"{key}.override_config.moe_config.{name}={shown(value)} is not supported: "
                "takes freeze_moe_router=False"
            )
    overrides |= overrides.pop("model_config", None) or {}


def _drop_load_options(role: Role) -> None:
    """Scripts for verl name transformers' attention kernels and precisions where they override the
    model's config.json; loading does not take them from there."""
    attention = (
        "training uses Caldera's own attention function, over packed sequences, whatever is named "
        "here"
    )
    precision = f"the precision of parameters is {_precision_key(role)}"
    reasons = dict.fromkeys(("attn_implementation", "_attn_implementation"), attention)
    reasons |= dict.fromkeys(("torch_dtype", "dtype"), precision)
    for name, reason in reasons.items():
        given = role.model.override_config.pop(name, None)
        if given is not None:
            logger.warning(
                "%s.override_config.%s=%s has no effect: %s; leave the key out",
                role.model_name,
                name,
                given,
                reason,
            )


def _precision_key(role: Role) -> str:
    own = "megatron.dtype" if role.is_megatron else "fsdp_config.model_dtype"
    keys = [key for key, _, _ in walk(role.node, f"{role.name}.")]
    return next((key for key in keys if key.endswith(own)), "that of the device")


def _check_megatron(role: Role) -> None:
    key, megatron = f"{role.name}.megatron", role.megatron
    stages = megatron.virtual_pipeline_model_parallel_size
    if stages is not None and megatron.pipeline_model_parallel_size == 1:
        raise ConfigError(
            f"{key}.virtual_pipeline_model_parallel_size={stages}: needs "
            f"{key}.pipeline_model_parallel_size of at least 2, got 1"
        )
    if role.optim is not None:
        _check_recomputation(key, megatron)


def _check_recomputation(key: str, megatron: MegatronConfig) -> None:
    given = megatron.override_transformer_config
    key = f"{key}.override_transformer_config"
    for name in ("recompute_method", "recompute_num_layers"):
        value = getattr(given, name)
        if value is not None and given.recompute_granularity != "full":
            raise ConfigError(
                f"{key}.{name}={shown(value)}: needs {key}.recompute_granularity=full, got "
                f"{shown(given.recompute_granularity)}"
            )


def check_ranks(role: Role, ranks: int) -> None:
    """The ranks of a role's pool hold whole copies of its model."""
    key, megatron = f"{role.name}.megatron", role.megatron
    pipeline = megatron.pipeline_model_parallel_size
    copy = megatron.ranks_of_a_copy
    if ranks % copy:
        raise ConfigError(
            f"{key}.tensor_model_parallel_size={megatron.tensor_model_parallel_size} x "
            f"pipeline_model_parallel_size={pipeline} x "
            f"context_parallel_size={megatron.context_parallel_size} = {copy} ranks do not divide "
            f"the {ranks} devices ({role.devices_from})"
        )
    experts = megatron.expert_model_parallel_size
    if ranks % (experts * pipeline):
        raise ConfigError(
            f"{key}.expert_model_parallel_size={experts} x pipeline_model_parallel_size={pipeline} "
            f"= {experts * pipeline} ranks do not divide the {ranks} devices ({role.devices_from})"
        )


def _check_layouts_alike(used: list[Role]) -> None:
    """Megatron's groups of ranks are the same for all models of a process."""
    first: dict[str, Role] = {}
    for role in used:
        other = first.setdefault(role.pool, role)
        for name in LAYOUT_KEYS:
            ours, theirs = getattr(role.megatron, name), getattr(other.megatron, name)
            if ours != theirs:
                raise ConfigError(
                    f"{role.name}.megatron.{name}={shown(ours)} and "
                    f"{other.name}.megatron.{name}={shown(theirs)}: Megatron lays all models of a "
                    "pool out alike; give both the same"
                )


def _check_full_kl(config: PPOTrainerConfig) -> None:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    asked = {
        "actor_rollout_ref.actor.kl_loss_type": actor.use_kl_loss and actor.kl_loss_type,
        "algorithm.kl_penalty": algorithm.use_kl_in_reward and algorithm.kl_penalty,
    }
    for key, kind in asked.items():
        if kind == "full":
            raise UnsupportedError(
                f"{key}='full' is not supported with strategy='megatron': the engine compares "
                "log-probs of sampled tokens alone; takes the other estimates"
            )
