"""The reward model's worker: a classifier that scores whole responses, or a judge that writes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from caldera.config import FSDPConfig, ModelConfig
from caldera.config.optim import WrapPolicyConfig
from caldera.config.reward import RewardModelConfig, RewardModelModelConfig
from caldera.data import hf_tokenizer
from caldera.data.chat import Message
from caldera.data.conversation import (
    conversation_tokens,
    require_own_template,
    reward_model_tokenizer,
)
from caldera.engine import Engine, ForwardPlan
from caldera.errors import DataError
from caldera.models.forward import base_module
from caldera.models.loading import (
    Built,
    build_policy,
    build_reward_model,
    is_language_model,
)
from caldera.protocol import DataProto, tensors_of
from caldera.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from caldera.web import own_address
from caldera.workers.building import (
    WORKERS,
    register_mesh,
    role_engine,
)
from caldera.workers.chat_server import ChatServer, serve_language_model
from caldera.workers.phases import CONVERSATIONS, on_device
from caldera.workers.profiling import ProfiledWorker, profiled
from caldera.workers.reward_server import RewardServer, ServedModel

# ---- What a reward model reads of each response: the actor's own tokens, or a conversation anew

TokenLists = list[list[int]]


class RewardInputs:
    """Makes the tokens of each row of a batch."""

    def __init__(self, config: RewardModelConfig) -> None:
        self._max_length = config.max_length
        self._tokenizers = _tokenizers(config)

    def tokens(self, data: DataProto) -> TokenLists:
        """Of every row, without padding."""
        if self._tokenizers is None:
            tensors = tensors_of(data)
            rows = zip(tensors["input_ids"], tensors["attention_mask"].bool(), strict=True)
            return [ids[mask][: self._max_length].tolist() for ids, mask in rows]
        actors, own = self._tokenizers
        messages, responses = _prompts(data, actors), _responses(data, actors)
        return [
            conversation_tokens(own, asked, response, self._max_length)
            for asked, response in zip(messages, responses, strict=True)
        ]


def score_tokens(engine: Engine, tokens: TokenLists, plan: ForwardPlan) -> Tensor:
    """The model's verdict of each sequence, (B,)."""
    ids = pad_sequence([torch.tensor(row) for row in tokens], batch_first=True)  # (B, L)
    lengths = torch.tensor([len(row) for row in tokens])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()  # (B, L)
    # The engine looks for the last token among those of the response: here, among all.
    rows = DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "responses": ids})
    return engine.infer(rows, plan)["scores"].sum(1)


def at_last_tokens(scores: Tensor, data: DataProto) -> Tensor:
    """Each response's score (B,) at its last token, 0 elsewhere: (B, R).

    A response without tokens has no last one, and a score of 0.
    """
    tensors = tensors_of(data)
    width = tensors["responses"].shape[1]
    last = tensors["attention_mask"][:, -width:].sum(1, keepdim=True) - 1  # (B, 1)
    return torch.where(torch.arange(width) == last, scores[:, None], 0.0)


def _tokenizers(
    config: RewardModelConfig,
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None:
    """The actor's and the reward model's; None where the actor's tokens will do."""
    model = config.model
    if model.input_tokenizer in (None, model.path):
        return None
    actors = hf_tokenizer(
        str(model.input_tokenizer),
        trust_remote_code=model.trust_remote_code,
        key="reward_model.model.input_tokenizer",
    )
    try:
        own = reward_model_tokenizer(model)
        if own.chat_template == actors.chat_template and own.get_vocab() == actors.get_vocab():
            return None
        require_own_template(own)
    except DataError as error:
        raise DataError(
            f"{error}\nThe conversations that the reward model reads are rendered by its own "
            "tokenizer; with reward_model.model.input_tokenizer=null it reads the actor's tokens"
        ) from error
    return actors, own


def _prompts(data: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[list[Message]]:
    """The messages of each row; where a run does not keep them, its prompt as one message."""
    if "raw_prompt" in data.non_tensor_batch:
        return [list(messages) for messages in data.non_tensor_batch["raw_prompt"]]
    tensors = tensors_of(data)
    width = tensors["input_ids"].shape[1] - tensors["responses"].shape[1]
    ids, mask = tensors["input_ids"][:, :width], tensors["attention_mask"][:, :width].bool()
    texts = [_decode(tokenizer, ids[row][mask[row]]) for row in range(len(data))]
    return [[{"role": "user", "content": text}] for text in texts]


def _responses(data: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    tensors = tensors_of(data)
    responses = tensors["responses"]  # (B, R)
    mask = tensors["attention_mask"][:, -responses.shape[1] :].bool()
    return [_decode(tokenizer, responses[row][mask[row]]) for row in range(len(data))]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


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
        self.engine = role_engine(
            strategy,
            self._memory(),
            config.megatron,
            self.device,
            self._build,
            sequence_parallel=config.ulysses_sequence_parallel_size,
        )
        register_mesh(self, "reward", self.engine)
        if not config.is_served:
            self.inputs = RewardInputs(config)
        self.engine.offload()

    def _build(self, dtype: torch.dtype, seed: int, empty: bool) -> Built:
        model = self.config.model
        if self.writes:
            return build_policy(_plain(model), dtype, 0, MODEL_KEY, empty)
        return build_reward_model(model, dtype, MODEL_KEY, empty)

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
        """Adds rm_scores (B, R): each response's score at its last token, 0 elsewhere.

        A response without tokens has no last one, and a score of 0.
        """
        config = self.config
        plan = ForwardPlan(
            ("scores",),
            bool(config.use_dynamic_bsz),
            config.micro_batch_size_per_gpu,
            config.forward_max_token_len_per_gpu,
        )
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
        path=model.path,
        external_lib=model.external_lib,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
    )
