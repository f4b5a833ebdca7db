"""Supervised training: what each strategy takes, and how many ranks share what."""

from __future__ import annotations

from caldera.config.fields import shown
from caldera.config.megatron import OPTIMIZER_OVERRIDES, MegatronConfig
from caldera.config.optim import FSDPConfig
from caldera.config.sft import SFTOptimizerConfig, SFTTrainerConfig
from caldera.config.strategies import MEGATRON, OPTIMIZERS, Role, check_ranks, check_role
from caldera.errors import ConfigError, UnsupportedError


def check_supervised_strategy(config: SFTTrainerConfig) -> None:
    """The model has keys of its own strategy alone, and they fit together."""
    role = _role(config)
    check_role(config, role)
    if not role.is_megatron:
        return
    tokens = config.ulysses_sequence_parallel_size
    if tokens != 1:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={tokens} is a key of local, fsdp and fsdp2; "
            "model.strategy='megatron' takes model.megatron.context_parallel_size"
        )
    layout = config.trainer.checkpoint.layout
    if layout != "dist":
        raise UnsupportedError(
            f"trainer.checkpoint.layout={layout!r} is not supported with "
            "model.strategy='megatron': takes dist"
        )
    _check_optimizer(config.optim)


def _check_optimizer(optim: SFTOptimizerConfig) -> None:
    """Megatron has optimisers and schedules of its own."""
    if optim.optimizer not in OPTIMIZERS or optim.optimizer_impl != "torch.optim":
        name = f"{optim.optimizer_impl}.{optim.optimizer}"
        raise ConfigError(
            f"optim.optimizer={name}: model.strategy='megatron' takes {', '.join(OPTIMIZERS)}"
        )
    if optim.num_cycles != 0.5:
        raise UnsupportedError(
            f"optim.num_cycles={optim.num_cycles} is not supported with "
            "model.strategy='megatron': takes 0.5"
        )
    known = OPTIMIZER_OVERRIDES[OPTIMIZERS[optim.optimizer]]
    for name, value in (optim.override_optimizer_config or {}).items():
        if name not in known:
            raise UnsupportedError(
                f"optim.override_optimizer_config.{name}={shown(value)} is not supported: "
                f"{optim.optimizer} of model.strategy='megatron' takes {', '.join(known)}"
            )


def check_supervised_ranks(config: SFTTrainerConfig, devices: int) -> int:
    """Ranks that share samples, which must divide the devices."""
    role = _role(config)
    if role.is_megatron:
        check_ranks(role, devices)
        return role.megatron.ranks_of_a_copy
    tokens = config.ulysses_sequence_parallel_size
    matrices = config.model.fsdp_config.tensor_parallel_size
    if devices % (tokens * matrices):
        raise ConfigError(
            f"ulysses_sequence_parallel_size={tokens} x model.fsdp_config.tensor_parallel_size="
            f"{matrices} ranks do not divide the {devices} devices "
            "(trainer.n_gpus_per_node x trainer.nnodes)"
        )
    return tokens * matrices


def supervised_sequence_parallel_size(config: SFTTrainerConfig) -> int:
    """Ranks that share the tokens of a micro-batch."""
    if config.model.strategy == MEGATRON:
        return config.model.megatron.context_parallel_size
    return config.ulysses_sequence_parallel_size


def memory_of_supervised(config: SFTTrainerConfig) -> tuple[str, FSDPConfig | MegatronConfig]:
    """What says the precision of the model, and its name among the model's keys."""
    model = config.model
    if model.strategy == MEGATRON:
        return "megatron", model.megatron
    return "fsdp_config", model.fsdp_config


def _role(config: SFTTrainerConfig) -> Role:
    return Role("model", config.model, "model", config.model, True, "trainer", None)
