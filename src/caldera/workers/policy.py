"""The policy's worker: it computes log-probs, is trained, and knows its reference."""

from __future__ import annotations

import torch

from caldera.config import (
    ActorRolloutRefConfig,
    CheckpointConfig,
    FSDPConfig,
    ModelConfig,
    RefConfig,
    RolloutConfig,
)
from caldera.engine import Engine, OutputName, Outputs
from caldera.errors import ConfigError
from caldera.models.forward import without_adapter
from caldera.models.loading import Built, build_policy
from caldera.protocol import DataProto
from caldera.single_controller import make_nd_compute_dataproto_dispatch_fn, register
from caldera.workers.building import (
    TrainedWorker,
    largest_norm,
    memory_of,
    register_mesh,
    role_engine,
)
from caldera.workers.losses import policy_loss
from caldera.workers.phases import (
    MASKED_RESPONSES,
    POLICY_LOSS,
    log_prob_plan,
    mfu_timer,
    on_device,
    train_epochs,
    update_plan,
)
from caldera.workers.profiling import ProfiledWorker, profiled

MODEL_KEY = "actor_rollout_ref.model"
ON_ACTOR = make_nd_compute_dataproto_dispatch_fn("actor")
"""Rows go to ranks as the actor's engine lays them out; the reference is laid out alike."""


class PolicyWorker(TrainedWorker, ProfiledWorker):
    """The actor's engine and, when the role says so, that of the reference."""

    reference: Engine | None

    def __init__(self, config: ActorRolloutRefConfig, role: str, device: str) -> None:
        profilers = {part: getattr(config, part).profiler for part in ("actor", "ref", "rollout")}
        super().__init__(profilers)
        self.config = config
        self.device = torch.device(device)
        self._with_reference = "ref" in role

    def build_actor(self) -> None:
        """Load the weights, and build the engine that trains them."""
        model, actor = self.config.model, self.config.actor
        self.actor = role_engine(
            actor.strategy,
            actor.fsdp_config,
            actor.megatron,
            self.device,
            self._model,
            compiles=actor.use_torch_compile,
            optim=actor.optim,
            grad_clip=largest_norm(actor),
            sequence_parallel=actor.ulysses_sequence_parallel_size,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            activation_offload=model.enable_activation_offload,
            checkpoint=actor.checkpoint,
        )
        register_mesh(self, "actor", self.actor)

    @register(dispatch_mode=ON_ACTOR, needs=MASKED_RESPONSES)
    @profiled("actor")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Adds old_log_probs and entropys, and where the config asks for it sum_pi_squared."""
        keys: dict[OutputName, str] = {"log_probs": "old_log_probs", "entropy": "entropys"}
        if self.config.actor.calculate_sum_pi_squared:
            keys["sum_pi_squared"] = "sum_pi_squared"
        outputs, mfu = self._infer(self.actor, data, self.config.rollout, *keys)
        tensors = {key: outputs[name] for name, key in keys.items()}
        return DataProto.from_dict(tensors, meta_info={"metrics": mfu})

    @register(dispatch_mode=ON_ACTOR, needs=MASKED_RESPONSES)
    @profiled("ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Adds ref_log_prob, and full_kl, that of the actor as it is now, if meta_info asks so."""
        assert self.reference is not None, "this worker's role has no reference"
        with without_adapter(self.reference.module):
            outputs, _ = self._infer(self.reference, data, self.config.ref, "log_probs")
        tensors = {"ref_log_prob": outputs["log_probs"]}
        if data.meta_info.get("full_kl"):
            outputs, _ = self._infer(self.actor, data, self.config.ref, "full_kl")
            tensors["full_kl"] = outputs["full_kl"]
        return DataProto.from_dict(tensors)

    @register(dispatch_mode=ON_ACTOR, needs=(*MASKED_RESPONSES, *POLICY_LOSS), in_mini_batches=True)
    @profiled("actor")
    def update_actor(self, data: DataProto) -> DataProto:
        """Train on the batch; returns metrics alone."""
        actor = self.config.actor
        assert actor.ppo_mini_batch_size is not None, "set-up chooses it"
        mini_batch_size = actor.ppo_mini_batch_size * self.config.rollout.n  # samples
        all_rows = len(data) * self.actor.dp_size
        on_policy = all_rows == mini_batch_size and actor.ppo_epochs == 1
        plan = update_plan(self.config, self.reference)
        with on_device(self.actor, plan.reference, optimizer=True):
            metrics = train_epochs(
                self.actor,
                data,
                policy_loss(actor, on_policy),
                plan,
                mini_batch_size,
                actor.ppo_epochs,
                actor.data_loader_seed if actor.shuffle else None,
                "actor",
            )
        if actor.use_kl_loss:
            metrics["actor/kl_coef"] = actor.kl_loss_coef
        return DataProto(meta_info={"metrics": metrics})

    def _trained(self) -> tuple[Engine, CheckpointConfig, ModelConfig]:
        return self.actor, self.config.actor.checkpoint, self.config.model

    def build_reference(self) -> Engine | None:
        """The engine of the frozen reference; with an adapter the actor, to be run without it."""
        if not self._with_reference:
            return None
        if self.config.model.has_adapter:
            return self.actor
        ref = self.config.ref
        engine = role_engine(
            ref.strategy,
            ref.fsdp_config,
            ref.megatron,
            self.device,
            self._model,
            compiles=ref.use_torch_compile,
            sequence_parallel=ref.ulysses_sequence_parallel_size,
        )
        own = (engine.sequence_parallel_size, engine.model_parallel_size)
        actors = (self.actor.sequence_parallel_size, self.actor.model_parallel_size)
        if own != actors:
            raise ConfigError(
                f"actor_rollout_ref.ref.strategy={ref.strategy}: the reference shares tokens over "
                f"{own[0]} of {own[1]} ranks with the same rows, the actor "
                f"over {actors[0]} of {actors[1]}: both must do alike"
            )
        engine.offload()
        return engine

    def memory(self) -> FSDPConfig:
        """Precision, seed and memory of the actor's model."""
        actor = self.config.actor
        return memory_of(actor.strategy, actor.fsdp_config, actor.megatron, self.device)

    def _model(self, dtype: torch.dtype, seed: int, empty: bool) -> Built:
        return build_policy(self.config.model, dtype, seed, MODEL_KEY, empty)

    def _infer(
        self,
        engine: Engine,
        data: DataProto,
        config: RolloutConfig | RefConfig,
        *outputs: OutputName,
    ) -> tuple[Outputs, dict[str, float]]:
        plan = log_prob_plan(config, outputs, self.config.rollout.temperature, self.reference)
        with (
            on_device(engine, plan.reference),
            mfu_timer("actor_infer", engine, data) as mfu,
        ):
            return engine.infer(data, plan), mfu
