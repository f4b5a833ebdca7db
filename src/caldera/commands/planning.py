"""From a config to a plan: what each phase of a step takes of a device, and how it is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from caldera.commands.plan_memory import (
    STATES,
    Held,
    ModelShape,
    Parts,
    Pass,
    Sampler,
    inference,
    sampling,
    training,
)
from caldera.config import (
    FSDPConfig,
    PPOTrainerConfig,
    needs_critic,
    needs_reference,
    resolve_for_machine,
)
from caldera.config.batches import choose_batch_sizes
from caldera.config.strategies import model_parallel_size, roles, sequence_parallel_size
from caldera.errors import ConfigError, UnsupportedError
from caldera.models.loading import DTYPES, shape_of_classifier, shape_of_policy
from caldera.rollout.native.parallel.sharding import check_sizes, planned_layers
from caldera.trainer.ppo.advantage import check_algorithm

# ---- How one step cuts its batch: prompts, samples, mini-batches, micro-batches, optimiser steps


@dataclass(frozen=True)
class Cut:
    """How a rank's rows of a batch become micro-batches, if all samples are as long as can be."""

    rows: int
    """Samples of a rank that are cut."""
    together: int
    """Samples of the largest micro-batch."""
    by_tokens: bool
    length: int
    """Tokens of a sample, prompt and answer."""
    answer: int
    sequence_parallel: int
    """Ranks that share the tokens of a micro-batch."""

    @property
    def micro_batches(self) -> int:
        return -(-self.rows // self.together)

    @property
    def largest(self) -> Pass:
        """The largest micro-batch, as a rank sees it."""
        tokens, answers = self.together * self.length, self.together * self.answer
        share = self.sequence_parallel
        return Pass(-(-tokens // share), -(-answers // share), self.micro_batches > 1)


@dataclass(frozen=True)
class StepBatches:
    """The numbers of one training step."""

    prompts: int
    n: int
    ranks: int
    copies: int
    """Copies of the actor's model, over which samples are balanced."""
    mini_batches: int
    epochs: int
    log_prob: Cut
    update: Cut

    @property
    def samples(self) -> int:
        return self.prompts * self.n

    @property
    def samples_a_copy(self) -> int:
        return self.samples // self.copies

    @property
    def samples_a_rank(self) -> int:
        """Those that a rank samples."""
        return -(-self.samples // self.ranks)

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches * self.epochs


def step_batches(config: PPOTrainerConfig) -> StepBatches:
    """The numbers of a config whose checks have passed."""
    parts, prompts = config.actor_rollout_ref, config.data.train_batch_size
    actor, rollout = parts.actor, parts.rollout
    assert prompts is not None and actor.ppo_mini_batch_size is not None, "they are chosen before"
    ranks = (config.trainer.n_gpus_per_node or 1) * config.trainer.nnodes
    copies = max(1, ranks // model_parallel_size(actor))
    rows = prompts * rollout.n // copies
    mini_batch = actor.ppo_mini_batch_size * rollout.n // copies
    return StepBatches(
        prompts=prompts,
        n=rollout.n,
        ranks=ranks,
        copies=copies,
        mini_batches=prompts // actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        log_prob=log_prob_cut(config, rollout, actor, rows),
        update=update_cut(config, actor, mini_batch),
    )


def log_prob_cut(config: PPOTrainerConfig, node: Any, computing: Any, rows: int) -> Cut:
    """Of log-probs; `node` has the keys, `computing` is the role that computes."""
    return _cut(
        config,
        computing,
        rows,
        bool(node.log_prob_use_dynamic_bsz),
        node.log_prob_micro_batch_size_per_gpu,
        node.log_prob_max_token_len_per_gpu,
    )


def update_cut(config: PPOTrainerConfig, node: Any, rows: int) -> Cut:
    """Of an update of the actor or of the critic."""
    return _cut(
        config,
        node,
        rows,
        bool(node.use_dynamic_bsz),
        node.ppo_micro_batch_size_per_gpu,
        node.ppo_max_token_len_per_gpu,
    )


def forward_cut(config: PPOTrainerConfig, node: Any, rows: int, size: int | None) -> Cut:
    """Of a forward pass of the critic or of the reward model."""
    dynamic, tokens = bool(node.use_dynamic_bsz), node.forward_max_token_len_per_gpu
    return _cut(config, node, rows, dynamic, size, tokens)


def _cut(
    config: PPOTrainerConfig, node: Any, rows: int, by_tokens: bool, size: int | None, tokens: int
) -> Cut:
    rollout, sequence_parallel = config.actor_rollout_ref.rollout, sequence_parallel_size(node)
    length = rollout.prompt_length + rollout.response_length
    most = tokens * sequence_parallel // length if by_tokens else size
    assert most, "the config's check has seen that a sample has room"
    together = max(1, min(rows, most))
    return Cut(rows, together, by_tokens, length, rollout.response_length, sequence_parallel)


# ---- The plan

GIB = 2**30
FROZEN = -1
DEVICES = {
    "h200": 139.8,
    "h100": 79.2,
    "a100-80g": 79.2,
    "a100-40g": 39.4,
    "l40s": 44.4,
    "4090": 23.5,
}
"""GiB that programs find on a device."""
CONTEXT = GIB
"""What CUDA and its libraries take of a device besides tensors."""
FRAGMENTS = 0.05
"""Share of a peak that the allocator loses to gaps between tensors."""


@dataclass(frozen=True)
class Phase:
    """One phase of a step, on one device."""

    name: str
    parts: Parts

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    @property
    def needed(self) -> int:
        """What the device must have for it."""
        return int(self.peak * (1 + FRAGMENTS)) + CONTEXT


@dataclass(frozen=True)
class Plan:
    """What a run does in a step, and what it needs."""

    batches: StepBatches
    roles: dict[str, Held]
    sampler: Sampler
    phases: list[Phase]
    checkpoint: int
    """Bytes of one checkpoint, of all ranks together."""
    device_bytes: int
    cached_sequences: int
    """Samples at their longest that the cache has room for at the same time."""

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def fits(self) -> bool:
        return self.largest.needed <= self.device_bytes and self.cached_sequences > 0


def device_bytes(name: str) -> int:
    """The memory of a device by its name, or of one with so many GiB."""
    if name.lower() in DEVICES:
        return int(DEVICES[name.lower()] * GIB)
    try:
        gib = float(name)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise ConfigError(f"--device={name}: takes {', '.join(DEVICES)}, or a number of GiB")
    return int(gib * GIB)


def make_plan(config: PPOTrainerConfig, memory: int) -> Plan:
    """The plan of a run whose config is checked, on devices of so many bytes."""
    trainer, reward = config.trainer, config.reward_model
    if trainer.device == "cpu":
        raise UnsupportedError("trainer.device='cpu': caldera plan works out the memory of GPUs")
    trainer.n_gpus_per_node = trainer.n_gpus_per_node or 1
    own = reward.n_gpus_per_node if reward.has_worker and reward.enable_resource_pool else 0
    resolve_for_machine(config, trainer.n_gpus_per_node + own)
    _check_planned(config)
    choose_batch_sizes(config, None)
    batches = step_batches(config)
    held = _held_roles(config, batches.ranks)
    sampler = _sampler(config, held["actor"].shape, batches)
    phases = _phases(config, batches, held, sampler, memory)
    cache = phases[0].parts["key/value cache"]
    return Plan(
        batches=batches,
        roles=held,
        sampler=sampler,
        phases=phases,
        checkpoint=_checkpoint_bytes(config, held),
        device_bytes=memory,
        cached_sequences=cache // (sampler.page_bytes * sampler.sequence_pages),
    )


def _check_planned(config: PPOTrainerConfig) -> None:
    check_algorithm(config)
    for role in roles(config).values():
        if role.is_needed and role.is_megatron:
            raise UnsupportedError(
                f"{role.name}.strategy='megatron': its memory is not worked out; "
                "takes local, fsdp, fsdp2"
            )
    name = config.actor_rollout_ref.rollout.name
    if name != "native":
        raise UnsupportedError(
            f"actor_rollout_ref.rollout.name={name!r}: the memory of its cache is not worked out; "
            "takes native"
        )
    if config.reward_model.is_served and config.reward_model.has_worker:
        raise UnsupportedError(
            "reward_model.rollout.name='native': the memory of a judge is not worked out"
        )


def _held_roles(config: PPOTrainerConfig, ranks: int) -> dict[str, Held]:
    """The models that a rank of the trainer holds."""
    parts = config.actor_rollout_ref
    policy = shape_of_policy(parts.model, "actor_rollout_ref.model")
    check_sizes(policy, parts.rollout.tensor_model_parallel_size)
    if parts.rollout.tensor_model_parallel_size > 1:  # adapters come over merged
        plain = replace(parts.model, lora_rank=0, lora_adapter_path=None)
        whole = shape_of_policy(plain, "actor_rollout_ref.model")
        planned_layers(whole, parts.rollout.tensor_model_parallel_size)
    shape, actor = ModelShape.of(policy), parts.actor
    found = {"actor": _trained(shape, actor, actor.fsdp_config, parts.model, ranks)}
    if needs_reference(config) and not parts.model.has_adapter:
        ref, memory = parts.ref, parts.ref.fsdp_config
        found["reference"] = replace(
            _held(shape, ref.strategy, memory, ranks), compiles=_compiles(ref, memory)
        )
    if needs_critic(config):
        critic, model = config.critic, config.critic.model
        shape = ModelShape.of(shape_of_classifier(model, "critic.model"))
        found["critic"] = _trained(shape, critic, model.fsdp_config, model, ranks)
    reward = config.reward_model
    if reward.has_worker and not reward.enable_resource_pool:
        shape = ModelShape.of(shape_of_classifier(reward.model, "reward_model.model"))
        found["reward model"] = _held(shape, reward.strategy, reward.model.fsdp_config, ranks)
    return found


def _trained(shape: ModelShape, node: Any, memory: FSDPConfig, model: Any, ranks: int) -> Held:
    return replace(
        _held(shape, node.strategy, memory, ranks),
        states=STATES.get(node.optim.optimizer, 2),
        checkpoints=model.enable_gradient_checkpointing,
        activation_offload=model.enable_activation_offload,
        compiles=_compiles(node, memory),
    )


def _held(shape: ModelShape, strategy: str, memory: Any, ranks: int) -> Held:
    kept = DTYPES[getattr(memory, "model_dtype", "fp32")].itemsize
    return Held(
        shape=shape,
        kept_bytes=kept,
        compute_bytes=DTYPES[getattr(memory, "dtype", None) or "bfloat16"].itemsize,
        shards=_shards(strategy, memory, ranks),
        states=FROZEN,
        param_offload=memory.param_offload,
        optimizer_offload=getattr(memory, "optimizer_offload", False),
    )


def _shards(strategy: str, memory: Any, ranks: int) -> int:
    if strategy == "local" or ranks == 1:
        return 1
    size = memory.fsdp_size
    return ranks if size < 1 else min(size, ranks)


def _compiles(node: Any, memory: FSDPConfig) -> bool:
    return getattr(node, "use_torch_compile", True) and memory.use_torch_compile


def _sampler(config: PPOTrainerConfig, shape: ModelShape, batches: StepBatches) -> Sampler:
    parts, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    dtype = DTYPES[str(rollout.dtype)]
    is_sharded = _shards(parts.actor.strategy, parts.actor.fsdp_config, batches.ranks) > 1
    longest = rollout.longest_sequence
    ranks = rollout.tensor_model_parallel_size
    has_own = is_sharded or ranks > 1 or dtype != DTYPES[parts.actor.fsdp_config.model_dtype]
    return Sampler(
        shape=shape,
        sample_bytes=dtype.itemsize,
        copies_weights=has_own,
        samples=batches.samples_a_rank * ranks,
        prompt_tokens=rollout.prompt_length,
        response_tokens=min(rollout.response_length, longest - rollout.prompt_length),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        filters=rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0,
        pages=rollout.kv_cache_blocks,
        ranks=ranks,
    )


def _phases(
    config: PPOTrainerConfig,
    batches: StepBatches,
    held: dict[str, Held],
    sampler: Sampler,
    memory: int,
) -> list[Phase]:
    """Every phase in which a model computes, in the order of a step."""
    computing = _computing(config, batches, held)
    own_cache = config.actor_rollout_ref.rollout.free_cache_engine
    actor = held["actor"]
    resident = actor.resident
    if not sampler.copies_weights:  # it samples with the trainer's, wherever they rest
        resident["weights"] = actor.weights
    others = _others(held, "actor")
    in_use = sum(resident.values()) + others + sampler.weights
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    sampled = sampling(sampler, int(share * memory) - in_use)
    phases = [Phase("rollout", resident | sampled | {"other models": others})]
    for name, (role, parts) in computing.items():
        rest = {"other models": _others(held, role), "sampler's weights": sampler.weights}
        if not own_cache:
            rest["key/value cache"] = sampled["key/value cache"]
        phases.append(Phase(name, parts | rest))
    return phases


def _computing(
    config: PPOTrainerConfig, batches: StepBatches, held: dict[str, Held]
) -> dict[str, tuple[str, Parts]]:
    """Phase -> the role that computes in it, and what that takes."""
    parts, rows = config.actor_rollout_ref, batches.samples_a_copy
    actor = held["actor"]
    found = {"log-prob": ("actor", inference(actor, batches.log_prob.largest))}
    if "reference" in held:
        cut = log_prob_cut(config, parts.ref, parts.ref, rows)
        found["reference"] = ("reference", inference(held["reference"], cut.largest))
    if "reward model" in held:
        reward = config.reward_model
        cut = forward_cut(config, reward, rows, reward.micro_batch_size_per_gpu)
        found["reward"] = ("reward model", inference(held["reward model"], cut.largest))
    if "critic" in held:
        critic, size = config.critic, config.critic.forward_micro_batch_size_per_gpu
        cut = forward_cut(config, critic, rows, size)
        found["values"] = ("critic", inference(held["critic"], cut.largest))
        assert critic.ppo_mini_batch_size is not None, "it is chosen before"
        mini = critic.ppo_mini_batch_size * batches.n // batches.copies
        cut = update_cut(config, critic, mini)
        found["critic update"] = ("critic", training(held["critic"], cut.largest))
    found["update"] = ("actor", training(actor, batches.update.largest))
    return found


def _others(held: dict[str, Held], role: str) -> int:
    return sum(sum(other.resident.values()) for name, other in held.items() if name != role)


def _checkpoint_bytes(config: PPOTrainerConfig, held: dict[str, Held]) -> int:
    """Weights as they are kept, the optimiser's state, and a Hugging Face folder if asked for."""
    contents = {
        "actor": config.actor_rollout_ref.actor.checkpoint.save_contents,
        "critic": config.critic.checkpoint.save_contents,
    }
    return sum(
        held[role].saved(content)
        for role, names in contents.items()
        for content in names
        if role in held
    )
