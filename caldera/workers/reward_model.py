"""The reward model's worker: a trained classifier that scores whole answers."""

from __future__ import annotations

import torch

from caldera.config import FSDPConfig
from caldera.config.reward import RewardModelConfig
from caldera.engine import ForwardPlan
from caldera.models.loading import DTYPES, load_reward_model
from caldera.protocol import DataProto
from caldera.single_controller import Dispatch, Worker, register
from caldera.workers.inputs import ANSWERS
from caldera.workers.phases import on_device
from caldera.workers.saving import build_engine


class RewardModelWorker(Worker):
    """Reads the same tokens as the actor, and is never trained."""

    def __init__(self, config: RewardModelConfig, device: str) -> None:
        super().__init__()
        self.config = config
        self.device = torch.device(device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the weights and build the engine."""
        model = self.config.model
        on_gpu = self.device.type == "cuda"
        memory = FSDPConfig(
            param_offload=model.fsdp_config.param_offload,
            model_dtype="bf16" if on_gpu else "fp32",
            dtype="bfloat16" if on_gpu else "float32",
        )
        module = load_reward_model(model, DTYPES[memory.model_dtype], "reward_model.model")
        self.engine = build_engine(self.config.strategy, module, self.device, memory)
        self.engine.offload()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, needs=ANSWERS)
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
