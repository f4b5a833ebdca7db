"""The reward model's worker: a trained classifier that scores whole answers."""

from __future__ import annotations

from functools import partial

import torch

from caldera.config import FSDPConfig
from caldera.config.optim import WrapPolicyConfig
from caldera.config.reward import RewardModelConfig
from caldera.engine import EngineOptions, ForwardPlan
from caldera.models.loading import DTYPES, build_reward_model
from caldera.protocol import DataProto
from caldera.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from caldera.workers.building import (
    build_engine,
    compiles,
    megatron_of,
    memory_of,
    register_mesh,
)
from caldera.workers.inputs import ANSWERS
from caldera.workers.phases import on_device

ON_REWARD = make_nd_compute_dataproto_dispatch_fn("reward")


class RewardModelWorker(Worker):
    """Reads the same tokens as the actor, and is never trained."""

    def __init__(self, config: RewardModelConfig, device: str) -> None:
        super().__init__()
        self.config = config
        self.device = torch.device(device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the weights and build the engine."""
        config = self.config
        memory = memory_of(config.strategy, self._memory(), config.megatron, self.device)
        options = EngineOptions(
            memory, sequence_parallel=config.ulysses_sequence_parallel_size,
            compiles=compiles(self.device, memory.use_torch_compile),
            megatron=megatron_of(config.strategy, config.megatron),
        )  # fmt: skip
        dtype = DTYPES[memory.model_dtype]
        build = partial(build_reward_model, config.model, dtype, "reward_model.model")
        self.engine = build_engine(config.strategy, build, self.device, options)
        register_mesh(self, "reward", self.engine)
        self.engine.offload()

    @register(dispatch_mode=ON_REWARD, needs=ANSWERS)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Adds rm_scores (B, R): each answer's score at its last token, 0 elsewhere.

        An answer without tokens has no last one, and a score of 0.
        """
        config = self.config
        plan = ForwardPlan(
            ("scores",), config.use_dynamic_bsz, config.micro_batch_size_per_gpu,
            config.forward_max_token_len_per_gpu,
        )  # fmt: skip
        with on_device(self.engine):
            scores = self.engine.infer(data, plan)["scores"]
        return DataProto.from_dict({"rm_scores": scores})

    def _memory(self) -> FSDPConfig:
        """What the keys say, in the precision of the device."""
        given, on_gpu = self.config.model.fsdp_config, self.device.type == "cuda"
        return FSDPConfig(
            wrap_policy=WrapPolicyConfig(given.wrap_policy.min_num_params),
            param_offload=given.param_offload,
            reshard_after_forward=given.reshard_after_forward,
            fsdp_size=given.fsdp_size,
            forward_prefetch=given.forward_prefetch,
            model_dtype="bf16" if on_gpu else "fp32",
            dtype="bfloat16" if on_gpu else "float32",
        )
