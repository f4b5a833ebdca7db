"""The reward model's worker: a classifier that scores whole answers, or a judge that writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from caldera.config import FSDPConfig, ModelConfig
from caldera.config.optim import WrapPolicyConfig
from caldera.config.reward import RewardModelConfig, RewardModelModelConfig
from caldera.data.judged_conversation import reward_model_tokenizer
from caldera.engine import EngineOptions, ForwardPlan
from caldera.models.forward import base_module
from caldera.models.loading import (
    DTYPES,
    Built,
    build_policy,
    build_reward_model,
    is_language_model,
)
from caldera.protocol import DataProto
from caldera.serving.http_server import own_address
from caldera.single_controller import (
    Dispatch,
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
from caldera.workers.chat_server import ChatServer, serve_language_model
from caldera.workers.choosing import WORKERS
from caldera.workers.inputs import CONVERSATIONS
from caldera.workers.phases import on_device
from caldera.workers.profiling import ProfiledWorker, profiled
from caldera.workers.reward_inputs import RewardInputs, TokenLists, at_last_tokens, score_tokens
from caldera.workers.reward_server import RewardServer, ServedModel

MODEL_KEY = "reward_model.model"
ON_REWARD = make_nd_compute_dataproto_dispatch_fn("reward")


@WORKERS.register("reward_model")
class RewardModelWorker(ProfiledWorker):
    """Reads the actor's tokens, or conversations of its own making, and is never trained.

    Where the config asks for a server, every rank holds a whole model and serves it. That may be a
    language model, which is asked for text instead of scores.
    """

    def __init__(self, config: RewardModelConfig, device: str) -> None:
        super().__init__({"reward_model": config.profiler})
        self.config = config
        self.device = torch.device(device)
        self.server: RewardServer | ChatServer | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the weights and build the engine."""
        config = self.config
        strategy = "local" if config.is_served else config.strategy
        self.writes = config.is_served and is_language_model(config.model, MODEL_KEY)
        memory = memory_of(strategy, self._memory(), config.megatron, self.device)
        options = EngineOptions(
            memory, sequence_parallel=config.ulysses_sequence_parallel_size,
            compiles=compiles(self.device, memory.use_torch_compile),
            megatron=megatron_of(strategy, config.megatron),
        )  # fmt: skip
        dtype = DTYPES[memory.model_dtype]
        build: Callable[[bool], Built] = partial(build_reward_model, config.model, dtype, MODEL_KEY)
        if self.writes:
            build = partial(build_policy, _plain(config.model), dtype, 0, MODEL_KEY)
        self.engine = build_engine(strategy, build, self.device, options)
        register_mesh(self, "reward", self.engine)
        if not config.is_served:
            self.inputs = RewardInputs(config)
        self.engine.offload()

    def _memory(self) -> FSDPConfig:
        """What the keys say, in the precision of the device."""
        config, given = self.config, self.config.model.fsdp_config
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        if self.writes and config.rollout.dtype is not None:
            dtype = config.rollout.dtype
        return FSDPConfig(
            wrap_policy=WrapPolicyConfig(given.wrap_policy.min_num_params),
            param_offload=config.sleeps if config.is_served else given.param_offload,
            reshard_after_forward=given.reshard_after_forward,
            fsdp_size=given.fsdp_size,
            forward_prefetch=given.forward_prefetch,
            model_dtype="bf16" if dtype == "bfloat16" else "fp32",
            dtype=dtype,
        )

    @register(dispatch_mode=ON_REWARD, needs=CONVERSATIONS)
    @profiled("reward_model")
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
            scores = score_tokens(self.engine, self.inputs.tokens(data), plan)  # (B,)
        return DataProto.from_dict({"rm_scores": at_last_tokens(scores, data)})

    # ---- as a server

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serve(self) -> str:
        """Answer requests from now on, asleep if the config says so; returns the address."""
        host = own_address(self.get_master_addr_port()[0])
        tokenizer = reward_model_tokenizer(self.config.model)
        if self.writes:
            module = self.engine.module
            self.server = serve_language_model(module, tokenizer, self.config, self.device, host)
        else:
            self.server = self._serve_classifier(tokenizer, host)
        if self.config.sleeps:
            self.server.sleep()
        return self.server.address

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self) -> None:
        """Bring the model to its device and answer."""
        assert self.server is not None, "serve comes first"
        self.engine.onload()
        self.server.wake()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Turn requests away and make room on the device."""
        assert self.server is not None, "serve comes first"
        self.server.sleep()
        self.engine.offload()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_serving(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def _serve_classifier(self, tokenizer: PreTrainedTokenizerBase, host: str) -> RewardServer:
        rollout, hugging_face = self.config.rollout, base_module(self.engine.module).config
        served = ServedModel(
            name=str(self.config.model.path),
            tokenizer=tokenizer,
            vocabulary=hugging_face.vocab_size,
            max_length=rollout.max_model_len
            or getattr(hugging_face, "max_position_embeddings", None),
        )
        return RewardServer(
            self._score, served, rollout.max_num_batched_tokens, rollout.max_num_seqs, host
        )

    def _score(self, sequences: TokenLists) -> list[float]:
        plan = ForwardPlan(("scores",), False, len(sequences), None)
        scores: list[float] = score_tokens(self.engine, sequences, plan).tolist()
        return scores


def _plain(model: RewardModelModelConfig) -> ModelConfig:
    """The same model for who builds policies, without anything that training adds."""
    return ModelConfig(
        path=model.path, external_lib=model.external_lib, override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
    )  # fmt: skip
