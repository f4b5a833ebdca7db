"""What the roles do alike: build an engine, and write its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from caldera.config import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    FSDPConfig,
    MegatronConfig,
    ModelConfig,
    RolloutConfig,
)
from caldera.config.strategies import MEGATRON
from caldera.data import chosen_class, hf_tokenizer
from caldera.engine import ENGINES, Engine, EngineOptions
from caldera.errors import ConfigError
from caldera.models.forward import base_module
from caldera.models.loading import DTYPES, Built
from caldera.registry import Registry
from caldera.rollout.base import Decode
from caldera.seeds import derive_seed, seed_everything
from caldera.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from caldera.workers.phases import on_device

logger = logging.getLogger(__name__)

SHARDING = ("fsdp", "fsdp2")
BuildModel = Callable[[torch.dtype, int, bool], Built]
"""(precision, seed, whether it is to be without values) -> the model."""


def role_engine(
    strategy: str,
    keys: FSDPConfig,
    megatron: MegatronConfig,
    device: torch.device,
    build: BuildModel,
    *,
    compiles: bool = True,
    **options: Any,
) -> Engine:
    """The engine of a role, as its keys say; `options` are those of `EngineOptions` beside."""
    memory = memory_of(strategy, keys, megatron, device)
    dtype = DTYPES[memory.model_dtype]
    told = EngineOptions(
        memory,
        compiles=compiles and memory.use_torch_compile and device.type == "cuda",
        megatron=megatron if strategy == MEGATRON else None,
        **options,
    )
    return build_engine(strategy, lambda empty: build(dtype, memory.seed, empty), device, told)


def build_engine(
    strategy: str, build: Callable[[bool], Built], device: torch.device, options: EngineOptions
) -> Engine:
    """The engine of a strategy; `build` makes the module, without its weights if told so.

    One process alone has nothing to shard: fsdp and fsdp2 are `local` there, unless parameters are
    to stay on the host while it computes on the device. Megatron has layers of its own, even there.
    """
    is_alone = _ranks() == 1
    if strategy in SHARDING and is_alone and not options.memory.offload_policy:
        strategy = "local"
    is_empty = strategy in (*SHARDING, MEGATRON)
    if is_empty and is_alone:
        _join_alone()
    built = build(is_empty)
    engine = ENGINES[strategy](built.module, built.source, device, options)
    if _ranks() > 1:  # a process of its own, whose generators nobody has seeded
        seed_everything(derive_seed(options.memory.seed, "rank", engine.dp_rank))
    return engine


def memory_of(
    strategy: str, memory: FSDPConfig, megatron: MegatronConfig, device: torch.device
) -> FSDPConfig:
    """Precision, seed and memory of a role's model: Megatron's keys say them in other words."""
    if strategy != MEGATRON:
        return memory
    dtype = megatron.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return FSDPConfig(
        param_offload=megatron.param_offload,
        optimizer_offload=megatron.optimizer_offload,
        model_dtype="bf16" if dtype == "bfloat16" else "fp32",
        dtype=dtype,
        seed=megatron.seed,
        use_torch_compile=False,
    )


def largest_norm(role: ActorConfig | CriticConfig) -> float:
    """Bound of a role's gradient norm: Megatron's key is the optimiser's."""
    return role.optim.clip_grad if role.strategy == MEGATRON else role.grad_clip


def register_mesh(worker: Worker, name: str, engine: Engine) -> None:
    """Say which rows of a batch this rank gets for its engine, and if its result is collected."""
    worker._register_dispatch_collect_info(name, engine.dp_rank, engine.is_dp_leader)


def register_sampling_mesh(worker: Worker, name: str, rollout: RolloutConfig) -> None:
    """The same for sampling: ranks that do it together get the same rows, and the first answers."""
    size = min(rollout.tensor_model_parallel_size, _ranks())  # one rank may have several devices
    worker._register_dispatch_collect_info(name, worker.rank // size, worker.rank % size == 0)


def stop_tokens(module: nn.Module, eos_token_id: int | None) -> set[int]:
    """The tokenizer's end token, and those that the model's generation config names."""
    own = base_module(module).generation_config.eos_token_id
    listed = own if isinstance(own, list) else [own]
    return {int(token) for token in [eos_token_id, *listed] if token is not None}


def check_stop_tokens(module: nn.Module, config: RolloutConfig, key: str) -> None:
    """Raise unless the model has every token of `stop_token_ids` in the group `key`."""
    vocabulary = base_module(module).config.vocab_size
    if any(token >= vocabulary for token in config.stop_token_ids or ()):
        raise ConfigError(
            f"{key}.stop_token_ids={config.stop_token_ids}: the model has the tokens 0 to "
            f"{vocabulary - 1}"
        )


def warn_of_length(module: nn.Module, config: RolloutConfig, keys: str) -> None:
    """Warn where prompts and responses may be longer than the model was made for."""
    most = getattr(base_module(module).config, "max_position_embeddings", None)
    asked = config.prompt_length + config.response_length
    if most is not None and asked > most:
        logger.warning(
            "%s = %d tokens, but the model was made for %d (max_position_embeddings)",
            keys,
            asked,
            most,
        )


def decoder(model: ModelConfig) -> Decode:
    """From tokens to the text in which stop strings are looked for."""
    tokenizer = _tokenizer(model)
    return lambda token_ids: str(tokenizer.decode(list(token_ids)))


def _tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    return hf_tokenizer(
        model.tokenizer_path or model.path or "",
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _join_alone() -> None:
    """A process group of this process alone, which FSDP and Megatron ask for."""
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )


def save_role(
    engine: Engine, folder: Path, checkpoint: CheckpointConfig, model: ModelConfig
) -> None:
    """Engine state, and a `huggingface` folder with config and tokenizer.

    To be called by every rank; `engine.wait_for_save` tells when all have written their part.
    """
    adapter = engine.adapter_weights()
    if engine.dp_rank == 0 and engine.is_dp_leader:
        _save_descriptions(engine.module, folder, model, adapter)
    engine.save(folder, checkpoint.save_contents)


def _save_descriptions(
    module: nn.Module, folder: Path, model: ModelConfig, adapter: dict[str, Tensor]
) -> None:
    target = folder / "huggingface"
    hugging_face = base_module(module)
    tokenizer = _tokenizer(model)
    tokenizer.save_pretrained(target)
    if hugging_face.can_generate():
        hugging_face.generation_config.save_pretrained(target)
    elif getattr(hugging_face.config, "pad_token_id", None) is None:
        # transformers' classifiers look for the last token that is no padding.
        hugging_face.config.pad_token_id = tokenizer.pad_token_id
    hugging_face.config.save_pretrained(target)
    if adapter:
        module.save_pretrained(folder / "lora_adapter", state_dict=adapter)  # type: ignore[operator]


# ---- What workers with a model that is trained have in common: it is saved, and read back


class TrainedWorker(Worker):
    def _trained(self) -> tuple[Engine, CheckpointConfig, ModelConfig]:
        """The engine that is trained, and the keys of its checkpoint and model."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path) -> None:
        """Write the model into the folder."""
        engine, checkpoint, model = self._trained()
        with on_device(engine, optimizer=True):
            save_role(engine, folder, checkpoint, model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self) -> bool:
        """Whether everything that `save_checkpoint` has to write is written."""
        return self._trained()[0].is_saved()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        """Return once it is."""
        self._trained()[0].wait_for_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: Path) -> None:
        """Read the model back."""
        engine, checkpoint, _ = self._trained()
        with on_device(engine, optimizer=True):
            engine.load(folder, checkpoint.load_contents)


# ---- Which class works for a role: the role's own, a registered one, or one of the user's file

WORKERS: Registry[type[Worker]] = Registry("worker")
"""What the keys `worker_class` choose from."""


class ChosenWorker(ClassWithInitArgs):
    """How to build the worker that a key names.

    It is pickled by that name: a class of a user's file cannot be imported elsewhere.
    """

    def __init__(self, name: str | None, base: type[Worker], key: str, *args: Any) -> None:
        super().__init__(chosen_class(WORKERS, name, base, key), *args)
        self._choice = name, base, key

    def __reduce__(self) -> tuple[type[ChosenWorker], tuple[Any, ...]]:
        return type(self), (*self._choice, *self.args)
