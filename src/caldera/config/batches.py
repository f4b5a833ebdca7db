"""Checks of batch arithmetic: what must divide what, and in which unit."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from caldera.config.actor import ActorConfig
from caldera.config.critic import CriticConfig
from caldera.config.estimators import needs_critic, needs_reference
from caldera.config.ppo import PPOTrainerConfig
from caldera.config.samplers import check_sampling_devices
from caldera.config.strategies import (
    Role,
    check_ranks,
    model_parallel_size,
    roles,
    sequence_parallel_size,
)
from caldera.errors import ConfigError

logger = logging.getLogger(__name__)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"


@dataclass(frozen=True)
class MicroBatches:
    """The keys by which one pass over a batch is cut."""

    group: str
    node: Any
    size_key: str
    dynamic_key: str
    tokens_key: str

    @property
    def size(self) -> int | None:
        size: int | None = getattr(self.node, f"{self.size_key}_per_gpu")
        return size

    @property
    def dynamic(self) -> bool:
        return bool(getattr(self.node, self.dynamic_key))

    @property
    def tokens(self) -> int | None:
        tokens: int | None = getattr(self.node, self.tokens_key)
        return tokens


BATCH, MINI_BATCH = 1024, 256
"""Prompts of a training step and of an optimiser step, where no key gives them."""


def choose_batch_sizes(config: PPOTrainerConfig, rows: int | None) -> list[str]:
    """Fill in the prompts of a step and of an optimiser step, for a data set of so many rows (None:
    enough); returns what was chosen."""
    data, n = config.data, config.actor_rollout_ref.rollout.n
    roles: dict[str, ActorConfig | CriticConfig] = {ACTOR: config.actor_rollout_ref.actor}
    if needs_critic(config):
        roles["critic"] = config.critic
    shares = [_copies(config, role) for role in roles.values()]
    unit = math.lcm(*(copies // math.gcd(copies, n) for copies in shares))  # of prompts
    chosen = []
    if data.train_batch_size is None:
        most = BATCH if rows is None else min(BATCH, rows)
        given = [role.ppo_mini_batch_size for role in roles.values()]
        unit = math.lcm(unit, *(size for size in given if size is not None))
        if None in given and most >= math.lcm(unit, MINI_BATCH):
            unit = math.lcm(unit, MINI_BATCH)
        data.train_batch_size = most // unit * unit
        if data.train_batch_size == 0:
            raise ConfigError(
                f"data.train_batch_size=null: the data set has {rows} rows, and a batch that can "
                f"be cut into mini-batches and shared by the devices has a multiple of {unit}"
            )
        chosen.append(f"data.train_batch_size={data.train_batch_size}")
    batch = data.train_batch_size
    for name, role in roles.items():
        if role.ppo_mini_batch_size is None:
            fits = batch % MINI_BATCH == 0 and MINI_BATCH * n % _copies(config, role) == 0
            role.ppo_mini_batch_size = MINI_BATCH if fits else batch
            chosen.append(f"{name}.ppo_mini_batch_size={role.ppo_mini_batch_size}")
    return chosen


def settle_batch_sizes(config: PPOTrainerConfig, rows: int) -> list[str]:
    """Fill in the sizes for a data set of so many rows; returns what was chosen. Raises where the
    batch cannot be cut so."""
    chosen = choose_batch_sizes(config, rows)
    _check_mini_batches(config)
    check_devices(config)
    return chosen


def check_batches(config: PPOTrainerConfig) -> None:
    """Prompts, samples and tokens can be cut as the config says."""
    parts = _micro_batches(config)
    for part in parts:
        _take_global_size(part, _copies(config, part.node))
    for part in parts:
        if getattr(part.node, part.dynamic_key) is None:
            sizes = [other.size for other in parts if other.node is part.node]
            setattr(part.node, part.dynamic_key, sizes == [None] * len(sizes))
    _check_mini_batches(config)
    for part in needed_micro_batches(config):
        _check_micro_batch(part, config)
    check_devices(config)


def _micro_batches(config: PPOTrainerConfig) -> list[MicroBatches]:
    parts = config.actor_rollout_ref
    log_prob = ("log_prob_micro_batch_size", "log_prob_use_dynamic_bsz")
    log_prob_tokens = "log_prob_max_token_len_per_gpu"
    return [
        MicroBatches(ACTOR, parts.actor, "ppo_micro_batch_size", "use_dynamic_bsz",
                     "ppo_max_token_len_per_gpu"),
        MicroBatches(ROLLOUT, parts.rollout, *log_prob, log_prob_tokens),
        MicroBatches(REF, parts.ref, *log_prob, log_prob_tokens),
        MicroBatches("critic", config.critic, "ppo_micro_batch_size", "use_dynamic_bsz",
                     "ppo_max_token_len_per_gpu"),
        MicroBatches("critic", config.critic, "forward_micro_batch_size", "use_dynamic_bsz",
                     "forward_max_token_len_per_gpu"),
        MicroBatches("reward_model", config.reward_model, "micro_batch_size", "use_dynamic_bsz",
                     "forward_max_token_len_per_gpu"),
    ]  # fmt: skip


def needed_micro_batches(config: PPOTrainerConfig) -> list[MicroBatches]:
    """Those of the passes that the run makes."""
    needs = {
        "critic": needs_critic(config),
        REF: needs_reference(config),
        "reward_model": config.reward_model.enable and not config.reward_model.is_served,
    }
    return [part for part in _micro_batches(config) if needs.get(part.group, True)]


def _take_global_size(part: MicroBatches, devices: int) -> None:
    """Honour the deprecated size over all devices, or copies of a model, by sharing it out."""
    whole = getattr(part.node, part.size_key)
    key, per_device = f"{part.group}.{part.size_key}", f"{part.size_key}_per_gpu"
    # The critic's forward size follows its other one where it is not given itself.
    follows = "forward" in key and whole == part.node.ppo_micro_batch_size
    if whole is None or (follows and part.size is not None):
        return
    if part.size is not None and part.size * devices != whole:
        raise ConfigError(
            f"{key}={whole} samples over all devices and {key}_per_gpu={part.size} samples on each "
            "are both set: give the second alone"
        )
    if whole % devices:
        raise ConfigError(f"{key}={whole} samples cannot be shared by {devices} devices")
    if not follows:
        logger.warning("%s is deprecated; %s_per_gpu=%d says the same", key, key, whole // devices)
    setattr(part.node, per_device, whole // devices)


def _check_mini_batches(config: PPOTrainerConfig) -> None:
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    if prompts is None:
        return
    for key, mini in _mini_batches(config).items():
        if mini <= prompts and prompts % mini == 0:
            continue
        hint = ""
        if n > 1 and mini > prompts and mini <= prompts * n:
            hint = (
                f"; ppo_mini_batch_size counts prompts, not samples: {mini} samples are "
                f"{mini / n:g} prompts"
            )
        raise ConfigError(
            f"data.train_batch_size={prompts} prompts cannot be cut into mini-batches of "
            f"{key}={mini} prompts: the first must be a multiple of the "
            f"second ({prompts} = {prompts // mini} x {mini} + {prompts % mini}){hint}"
        )


def _check_micro_batch(part: MicroBatches, config: PPOTrainerConfig) -> None:
    if not part.dynamic:
        if part.size is None:
            raise ConfigError(
                f"{part.group}.{part.size_key}_per_gpu=null: give it a number of samples, "
                f"or form micro-batches by tokens with {part.group}.{part.dynamic_key}=True"
            )
        return
    if part.tokens is None:
        return
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    ranks = sequence_parallel_size(_computing(config, part.node))
    budget = part.tokens * ranks
    shared = f" x {ranks} ranks = {budget}" if ranks > 1 else ""
    if budget < longest:
        raise ConfigError(
            f"{part.group}.{part.tokens_key}={budget // ranks}{shared} tokens cannot hold one "
            f"sample of up to {longest} tokens ({ROLLOUT}.prompt_length={rollout.prompt_length} + "
            f"{ROLLOUT}.response_length={rollout.response_length}); takes at least "
            f"{-(-longest // ranks)}"
        )


CUDA_TOKENS = {ACTOR: 16384, ROLLOUT: 16384, REF: 16384, "critic": 32768, "reward_model": 32768}
"""Tokens of a micro-batch on a GPU, where no key gives them: verl's numbers."""
CPU_TOKENS = 4096
"""The same on a CPU, where larger micro-batches are no faster."""


def default_tokens(on_cuda: int, device: str, longest: int, ranks: int) -> int:
    """Tokens of a micro-batch whose tokens so many ranks share; it holds the longest sample."""
    return max(on_cuda if device == "cuda" else CPU_TOKENS, -(-longest // ranks))


def choose_token_budgets(config: PPOTrainerConfig, device: str) -> list[str]:
    """Fill in the tokens of micro-batches; returns what was chosen for passes of this run."""
    rollout = config.actor_rollout_ref.rollout
    used = [(part.node, part.tokens_key) for part in needed_micro_batches(config) if part.dynamic]
    chosen = []
    for part in _micro_batches(config):
        if part.tokens is not None:
            continue
        longest = rollout.prompt_length + rollout.response_length
        if part.node is config.reward_model:
            longest *= 2  # its own template and vocabulary may need more tokens
        ranks = sequence_parallel_size(_computing(config, part.node))
        tokens = default_tokens(CUDA_TOKENS[part.group], device, longest, ranks)
        setattr(part.node, part.tokens_key, tokens)
        if (part.node, part.tokens_key) in used:
            chosen.append(f"{part.group}.{part.tokens_key}={tokens}")
    return chosen


def check_devices(config: PPOTrainerConfig) -> None:
    """Every copy of a model gets as many samples as the others, of a batch and of a mini-batch."""
    if config.trainer.n_gpus_per_node is not None:
        _check_sharing(config)
    parts, n = config.actor_rollout_ref, config.actor_rollout_ref.rollout.n
    minis = _mini_batches(config)
    counts = {key: (mini, _node_of(config, key)) for key, mini in minis.items()}
    if config.data.train_batch_size is not None:
        whole = {"data.train_batch_size": (config.data.train_batch_size, parts.actor)}
        counts = {**whole, **counts}
    for key, (count, node) in counts.items():
        copies, ranks = _copies(config, node), model_parallel_size(node)
        if (count * n) % copies:
            shared = f"{copies} devices" if ranks == 1 else f"{copies} groups of {ranks} devices"
            raise ConfigError(
                f"{key}={count} prompts x {ROLLOUT}.n={n} = {count * n} samples cannot be shared "
                f"by {shared} (trainer.n_gpus_per_node x trainer.nnodes)"
            )


def _check_sharing(config: PPOTrainerConfig) -> None:
    """Devices that share tokens, matrices or layers come in whole groups."""
    for role in roles(config).values():
        if role.is_megatron and role.is_needed and role.ranks:
            check_ranks(role, role.ranks)
        elif not role.is_megatron and role.name != "reward_model":
            _check_torch_sharing(role, _devices(config))
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    check_sampling_devices(rollout, trainer.n_gpus_per_node, trainer.nnodes, ROLLOUT)


def _check_torch_sharing(role: Role, devices: int) -> None:
    tokens, both = sequence_parallel_size(role.node), model_parallel_size(role.node)
    if devices % both:
        raise ConfigError(
            f"{role.name}.ulysses_sequence_parallel_size={tokens} x tensor_parallel_size="
            f"{both // tokens} ranks do not divide the {devices} devices "
            "(trainer.n_gpus_per_node x trainer.nnodes)"
        )


def _computing(config: PPOTrainerConfig, node: Any) -> Any:
    """The role that computes: log-probs of samples are the actor's."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    return actor if node is rollout else node


def _node_of(config: PPOTrainerConfig, key: str) -> Any:
    return config.critic if key.startswith("critic.") else config.actor_rollout_ref.actor


def _copies(config: PPOTrainerConfig, node: Any) -> int:
    """Copies of a role's model, among which rows are shared; at least one, as far as is known."""
    return max(1, _devices(config) // model_parallel_size(_computing(config, node)))


def _devices(config: PPOTrainerConfig) -> int:
    return (config.trainer.n_gpus_per_node or 1) * config.trainer.nnodes


def _mini_batches(config: PPOTrainerConfig) -> dict[str, int]:
    """Prompts of an optimiser step, by key, where they are known."""
    minis = {f"{ACTOR}.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if needs_critic(config):
        minis["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    return {key: size for key, size in minis.items() if size is not None}
