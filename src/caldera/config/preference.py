"""The configuration of reward models and of direct preference optimisation.

Both extend that of supervised training: a sample is a pair of responses to the same prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from caldera.config.fields import nested, option, refused
from caldera.config.reasons import ALWAYS_PACKED
from caldera.config.sft import (
    MultiTurnDataConfig,
    SFTDataConfig,
    SFTOptimizerConfig,
    SFTRunConfig,
    SFTTrainerConfig,
)
from caldera.config.strategies import MEGATRON
from caldera.errors import ConfigError, UnsupportedError

DPO_LOSSES = ("sigmoid", "ipo", "hinge")
PAIRS = (
    "a sample is a pair: data.prompt_key, data.chosen_key and data.rejected_key name its columns"
)


@dataclass
class PairedMultiTurnConfig(MultiTurnDataConfig):
    enable: bool = refused(False, PAIRS)
    messages_key: str = refused("messages", PAIRS)
    tools_key: str = refused("tools", PAIRS)
    enable_thinking_key: str = refused("enable_thinking", PAIRS)


@dataclass
class PreferenceDataConfig(SFTDataConfig):
    prompt_key: str = "prompt"
    """Column with the prompt: text, or messages."""
    chosen_key: str = "chosen"
    """Column with the preferred response: text, or a message, perhaps after those of the prompt."""
    rejected_key: str = "rejected"
    """Column with the rejected response."""
    prompt_dict_keys: list[str] | None = refused(None, PAIRS)
    response_key: str = refused("answer", PAIRS)
    response_dict_keys: list[str] | None = refused(None, PAIRS)
    multiturn: PairedMultiTurnConfig = nested(PairedMultiTurnConfig)
    pad_mode: str = refused("no_padding", ALWAYS_PACKED)
    ignore_input_ids_mismatch: bool = refused(False, PAIRS)
    margin_key: str | None = None
    """Column with how far apart the two scores ought to be at least; null: any distance will do."""

    @property
    def longest(self) -> int:
        return 2 * self.max_length

    @property
    def longest_in_words(self) -> str:
        return f"the responses of a pair, up to data.max_length={self.max_length} tokens each"


@dataclass
class RewardModelRunConfig(SFTRunConfig):
    project_name: str = "reward-model"
    """Project under which loggers file the run."""


@dataclass
class RewardModelTrainerConfig(SFTTrainerConfig):
    """`caldera rm`."""

    data: PreferenceDataConfig = nested(PreferenceDataConfig)
    trainer: RewardModelRunConfig = nested(RewardModelRunConfig)


@dataclass
class DPODataConfig(PreferenceDataConfig):
    margin_key: str | None = refused(None, "margins are between the scores of a reward model")


@dataclass
class DPOConfig:
    beta: float = option(0.1, minimum=0)
    """How much a log-probability counts as reward: the larger, the closer to the reference."""
    loss_type: str = option("sigmoid", choices=DPO_LOSSES)
    """Loss of a pair: Bradley-Terry of the rewards, identity preference optimisation, hinge."""
    label_smoothing: float = option(0.0, minimum=0, maximum=0.5, unit="share of pairs")
    """With `sigmoid`: the share of pairs whose preference is taken to be the wrong way round."""
    reference_free: bool = False
    """Assume a uniform reference, instead of the model at the start."""


@dataclass
class DPOOptimizerConfig(SFTOptimizerConfig):
    lr: float = option(1e-6, minimum=0)
    """Peak learning rate."""


@dataclass
class DPORunConfig(SFTRunConfig):
    project_name: str = "dpo"
    """Project under which loggers file the run."""


@dataclass
class DPOTrainerConfig(SFTTrainerConfig):
    """`caldera dpo`."""

    data: DPODataConfig = nested(DPODataConfig)
    dpo: DPOConfig = nested(DPOConfig)
    optim: DPOOptimizerConfig = nested(DPOOptimizerConfig)
    trainer: DPORunConfig = nested(DPORunConfig)


def check_preference(config: SFTTrainerConfig) -> None:
    """Raise unless the keys fit each other; those of other supervised runs are no matter here."""
    if isinstance(config, DPOTrainerConfig):
        _check_dpo(config.dpo)
    if isinstance(config, RewardModelTrainerConfig) and config.model.strategy == MEGATRON:
        raise UnsupportedError(
            "model.strategy='megatron': reward models are trained by local, fsdp and fsdp2"
        )


def _check_dpo(dpo: DPOConfig) -> None:
    if dpo.beta == 0:
        raise ConfigError("dpo.beta=0.0: must be more than 0, else no response has a reward")
    if dpo.label_smoothing and dpo.loss_type != "sigmoid":
        raise ConfigError(
            f"dpo.label_smoothing={dpo.label_smoothing}: dpo.loss_type={dpo.loss_type!r} takes 0; "
            "sigmoid can"
        )
