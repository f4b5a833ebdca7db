"""Keys of other generations of verl: moved ones go to their place here, others are refused.

Caldera's keys are those of verl 0.5 to 0.7. Later releases moved some groups and added others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from omegaconf import OmegaConf

from caldera.config.fields import shown
from caldera.config.megatron import OF_TORCH, OWN_BRIDGE
from caldera.config.reasons import (
    ALWAYS_PACKED,
    COMPUTED_HEAD,
    NO_IMAGES,
    NO_OTHER_SAMPLER,
    NO_PROFILER,
    NO_ROUTER_REPLAY,
    NO_TRANSFER,
    OTHER_KEY_OF_TOOLS,
)
from caldera.config.reward import NO_SERVER_OPTION
from caldera.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

Tree = dict[str, Any]

MOVED = {
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_manager": "reward_manager",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model": "reward_model",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "sandbox_fusion": "reward_model.sandbox_fusion",
    "critic.fsdp": "critic.model.fsdp_config",
    "skip.rollout.enable": "actor_rollout_ref.rollout.skip_rollout",
    "skip.rollout.dump_dir": "actor_rollout_ref.rollout.skip_dump_dir",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    ),
    "trainer.profile_steps": "global_profiler.steps",
    "ray_init.num_cpus": "ray_kwargs.ray_init.num_cpus",
    "ray_init.timeline_json_file": "ray_kwargs.timeline_json_file",
    # Those of Search-R1.
    "actor_rollout_ref.rollout.n_agent": "actor_rollout_ref.rollout.n",
    "data.train_data_num": "data.train_max_samples",
    "data.val_data_num": "data.val_max_samples",
    "data.shuffle_train_dataloader": "data.shuffle",
}
"""Group or key of another release -> its place here; the longest match counts."""
MOVED_SUPERVISED = {
    "data.messages_key": "data.multiturn.messages_key",
    "data.tools_key": "data.multiturn.tools_key",
    "data.enable_thinking_key": "data.multiturn.enable_thinking_key",
    "engine": "model.fsdp_config",
    "engine.strategy": "model.strategy",
    "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
    "model.fsdp_config.cpu_offload": "model.fsdp_config.offload_policy",
    "model.fsdp_config.offload_params": "model.fsdp_config.param_offload",
    "optim.lr_scheduler_type": "optim.lr_scheduler",
    "optim.warmup_style": "optim.lr_scheduler",
    "checkpoint": "trainer.checkpoint",
}
"""The same of supervised training."""
VERLS_DEFAULTS: Tree = {
    "actor_rollout_ref.rollout.calculate_log_probs": False,
    "actor_rollout_ref.rollout.dtype": "bfloat16",
    "actor_rollout_ref.rollout.enable_chunked_prefill": True,
    "actor_rollout_ref.rollout.enable_prefix_caching": True,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "data.dataloader_num_workers": 8,
    "trainer.default_local_dir": "checkpoints/verl_examples/gsm8k",
    "trainer.device": "cuda",
    "trainer.logger": ["console", "wandb"],
    "trainer.n_gpus_per_node": 8,
    "trainer.project_name": "verl_examples",
}
"""What verl 0.5 to 0.7 take where a key is not given, and Caldera takes something else."""
EMPTIED = (
    "custom_reward_function.", "reward_model.", "data.train_max_samples", "data.val_max_samples",
)  # fmt: skip
"""Groups that later releases left behind when they moved them, with null for what is not given,
and keys in which null asks for the default."""
NULL_IS_A_VALUE = ("reward_model.model.input_tokenizer",)
"""Keys of theirs that no later release has: null is what someone asks for."""

FLOAT32_STATE = "Megatron's optimisers keep their state in float32"
NO_BALANCE_METRICS = "the load of experts is not measured"
NO_MUON = "Megatron's optimisers are adam and sgd"
SAME_CONTEXT_PARALLEL_SIZE = "as many ranks share the tokens of every micro-batch"
NO_QUANTIZED_TRAINING = "training with quantised weights is not part of this release"
LATER_REASONS = {
    "actor_rollout_ref.actor.checkpoint.strict": "a checkpoint either fits or is an error",
    "actor_rollout_ref.rollout.disaggregation": NO_OTHER_SAMPLER,
    "actor_rollout_ref.rollout.checkpoint_engine": NO_TRANSFER,
    "actor_rollout_ref.rollout.moe_load_balance_metrics_interval": NO_BALANCE_METRICS,
    "actor_rollout_ref.rollout.full_determinism": "kernels are those that torch picks",
    "actor_rollout_ref.rollout": NO_TRANSFER,
    "critic.loss_scale_factor": "the critic's loss is scaled by the response length",
    "data.function_tool_path": OTHER_KEY_OF_TOOLS,
    "data": NO_IMAGES,
    "distillation": "distillation from a teacher is not part of this release",
    "reward.reward_model": NO_SERVER_OPTION,
    "ray_kwargs": NO_TRANSFER,
    "skip": "responses are sampled anew",
    "trainer.use_v1": "there is one trainer; leave the key out",
    "trainer.v1": "asynchronous training is not part of this release",
    "transfer_queue": NO_TRANSFER,
}
"""Why keys of later releases are refused, by the longest prefix."""
REASONS_BY_PART = {
    "profiler": NO_PROFILER,
    "global_profiler": NO_PROFILER,
    "dist_ckpt_optim_fully_reshardable": OF_TORCH,
    "distrib_optim_fully_reshardable_mem_efficient": OF_TORCH,
    "dynamic_context_parallel": SAME_CONTEXT_PARALLEL_SIZE,
    "max_seqlen_per_dp_cp_rank": SAME_CONTEXT_PARALLEL_SIZE,
    "entropy_from_logits_with_chunking": COMPUTED_HEAD,
    "pad_bshd_to_minibatch_max": ALWAYS_PACKED,
    "router_replay": NO_ROUTER_REPLAY,
    "use_megatron_fsdp": "strategy=fsdp2 shards parameters",
    "mbridge_config": OWN_BRIDGE,
    "zero_indexed_step": "the first step of a schedule is step 0",
    "exp_avg_dtype": FLOAT32_STATE,
    "exp_avg_sq_dtype": FLOAT32_STATE,
    "main_grads_dtype": FLOAT32_STATE,
    "use_precision_aware_optimizer": FLOAT32_STATE,
    "use_layer_wise_distributed_optimizer": NO_MUON,
    "optim": NO_MUON,
    "qat": NO_QUANTIZED_TRAINING,
    "turbo_config": "the turbo engine is not part of this release",
    "entropy_from_logits_chunk_size": COMPUTED_HEAD,
    "pad_to_length": "sequences are packed without padding",
    "pad_to_length_bucket": "sequences are packed without padding",
}
"""The same for parts that stand in several groups."""


@cache
def later_keys() -> dict[str, Any]:
    """Keys that only later releases of verl have, with their defaults there."""
    lines = (Path(__file__).parent / "later_keys.tsv").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("\t") for line in lines)
    return {key: json.loads(default) for key, default in pairs}


def later_reason(key: str) -> str:
    """Why a key of a later release is refused."""
    parts = key.split(".")
    for part in reversed(parts):
        if part in REASONS_BY_PART:
            return REASONS_BY_PART[part]
    for length in range(len(parts), 0, -1):
        if reason := LATER_REASONS.get(".".join(parts[:length])):
            return reason
    raise AssertionError(f"no reason for {key}")


def moved_to(key: str, moves: Mapping[str, str] = MOVED) -> str | None:
    """Where a key of another release is found here, or None."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if place := moves.get(".".join(parts[:length])):
            return ".".join([place, *parts[length:]])
    return None


def is_place(key: str | None, known: Container[str]) -> TypeGuard[str]:
    """Whether a key is known, or lies within one: that holds a free dictionary."""
    parts = [] if key is None else key.split(".")
    return any(".".join(parts[:length]) in known for length in range(1, len(parts) + 1))


def migrate(
    leaves: dict[str, Any], known: frozenset[str], moves: Mapping[str, str] = MOVED
) -> dict[str, Any]:
    """Known keys alone, moved ones in their place here; keys of no release stay as they are."""
    placed: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    moved: dict[str, str] = {}
    for key, value in leaves.items():
        place = key
        if key not in known and is_place(new_place := moved_to(key, moves), known):
            place = new_place
        elif is_target(key):
            check_target(key, value)
            continue
        elif key not in known and key in later_keys():
            check_later(key, value)
            continue
        if place in known and value is None and _is_left_behind(place):
            continue
        if place in placed and placed[place] != value:
            raise ConfigError(
                f"{given_as[place]}={shown(placed[place])} and {key}={shown(value)} are one key: "
                f"set {place} alone"
            )
        placed[place] = value
        given_as.setdefault(place, key)
        if place != key:
            moved[key] = place
    if moved:
        logger.warning(
            "keys of another release of verl were moved: %s",
            ", ".join(f"{old} -> {new}" for old, new in sorted(moved.items())),
        )
    return placed


def _is_left_behind(place: str) -> bool:
    return place.startswith(EMPTIED) and place not in NULL_IS_A_VALUE


def is_target(key: str) -> bool:
    return key == "_target_" or key.endswith("._target_")


def check_target(key: str, value: Any) -> None:
    """A node's class is given by its place: naming verl's class there asks for nothing else."""
    if not str(value).startswith("verl."):
        raise UnsupportedError(
            f"{key}={value!r} is not supported: the place of a node decides its class; "
            "leave the key out"
        )


def check_later(key: str, value: Any) -> None:
    """The default of a later release asks for nothing; any other value is refused."""
    default = later_keys()[key]
    if value not in (default, _without_references(default)):
        raise UnsupportedError(f"{key}={shown(value)} is not supported: {later_reason(key)}")


def _without_references(default: Any) -> Any:
    """What a default is where the keys that it refers to are not set."""
    resolved = OmegaConf.to_container(OmegaConf.create({"default": default}), resolve=True)
    assert isinstance(resolved, dict)
    return resolved["default"]


def groups_of(keys: Iterable[str]) -> set[str]:
    """Every group that holds one of the keys."""
    parts = (key.split(".") for key in keys)
    return {".".join(names[:length]) for names in parts for length in range(1, len(names))}


def leaves_of(
    tree: Tree, known: Mapping[str, bool], moves: Mapping[str, str] = MOVED, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of a tree; a key that is known to hold a value is not entered."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        place = key if key in known else moved_to(key, moves)
        is_leaf = place in known or key in later_keys()
        if isinstance(value, dict) and value and not is_leaf:
            yield from leaves_of(value, known, moves, f"{key}.")
        else:
            yield key, value
