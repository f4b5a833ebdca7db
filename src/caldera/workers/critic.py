"""The critic's worker: it predicts values and is trained."""

from __future__ import annotations

import torch

from caldera.config import CheckpointConfig, CriticConfig, ModelConfig
from caldera.engine import Engine, ForwardPlan
from caldera.models.loading import build_value_model
from caldera.protocol import DataProto
from caldera.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from caldera.workers.building import (
    WORKERS,
    TrainedWorker,
    largest_norm,
    register_mesh,
    role_engine,
)
from caldera.workers.losses import value_loss
from caldera.workers.phases import MASKED_RESPONSES, VALUE_LOSS, on_device, train_epochs
from caldera.workers.profiling import ProfiledWorker, profiled

ON_CRITIC = make_nd_compute_dataproto_dispatch_fn("critic")


@WORKERS.register("critic")
class CriticWorker(TrainedWorker, ProfiledWorker):
    def __init__(self, config: CriticConfig, rollout_n: int, device: str) -> None:
        super().__init__({"critic": config.profiler})
        self.config = config
        self.rollout_n = rollout_n
        self.device = torch.device(device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the weights and build the engine."""
        config, model = self.config, self.config.model
        self.engine = role_engine(
            config.strategy,
            model.fsdp_config,
            config.megatron,
            self.device,
            lambda dtype, seed, empty: build_value_model(model, dtype, seed, "critic.model", empty),
            optim=config.optim,
            grad_clip=largest_norm(config),
            sequence_parallel=config.ulysses_sequence_parallel_size,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            activation_offload=model.enable_activation_offload,
            checkpoint=config.checkpoint,
        )
        register_mesh(self, "critic", self.engine)
        self.engine.offload()

    @register(dispatch_mode=ON_CRITIC, needs=MASKED_RESPONSES)
    @profiled("critic")
    def compute_values(self, data: DataProto) -> DataProto:
        """Adds values."""
        config = self.config
        plan = ForwardPlan(
            ("values",),
            bool(config.use_dynamic_bsz),
            config.forward_micro_batch_size_per_gpu,
            config.forward_max_token_len_per_gpu,
        )
        with on_device(self.engine):
            values = self.engine.infer(data, plan)["values"]
        return DataProto.from_dict({"values": values})

    @register(dispatch_mode=ON_CRITIC, needs=(*MASKED_RESPONSES, *VALUE_LOSS), in_mini_batches=True)
    @profiled("critic")
    def update_critic(self, data: DataProto) -> DataProto:
        """Train on the batch; returns metrics alone."""
        config = self.config
        assert config.ppo_mini_batch_size is not None, "set-up chooses it"
        plan = ForwardPlan(
            ("values",),
            bool(config.use_dynamic_bsz),
            config.ppo_micro_batch_size_per_gpu,
            config.ppo_max_token_len_per_gpu,
        )
        with on_device(self.engine, optimizer=True):
            metrics = train_epochs(
                self.engine,
                data,
                value_loss(config),
                plan,
                config.ppo_mini_batch_size * self.rollout_n,
                config.ppo_epochs,
                config.data_loader_seed if config.shuffle else None,
                "critic",
            )
        return DataProto(meta_info={"metrics": metrics})

    def _trained(self) -> tuple[Engine, CheckpointConfig, ModelConfig]:
        return self.engine, self.config.checkpoint, self.config.model
