"""Variables of verl's that would have no effect here: they are refused by name."""

from __future__ import annotations

import logging
import os

from caldera.errors import ConfigError, UnsupportedError

REFUSED = {
    "VERL_DISABLE_FLASH_ATTN_CE": "log-probs always come from the chunked head",
    "VERL_FORCE_DEVICE": "trainer.device says it",
    "VERL_FULL_DETERMINISM": "kernels are those that torch picks",
    "VERL_PLATFORM": "trainer.device says it",
    "VERL_PROFILE_": "global_profiler says what is recorded",
    "VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS": "there is no replay buffer",
    "VERL_SEED": "actor_rollout_ref.rollout.seed, data.seed and trainer.seed say it",
    "VERL_USE_EXTERNAL_MODULES": "external_lib of the model names modules to import",
    "VERL_USE_MODELSCOPE": "models come from a folder or from the Hugging Face hub",
}
"""Why, by the beginning of the name."""
SECOND_NAMES = ("WARN", "FATAL")
"""Of levels that the choices name already."""
OFF = ("", "0", "false")


def log_level(variable: str, default: str) -> str:
    """The level of messages that a variable names; where it is not set, the default."""
    value = os.environ.get(variable, default)
    known = logging.getLevelNamesMapping()
    if value.upper() not in known:
        names = ", ".join(name for name in known if name not in SECOND_NAMES)
        raise ConfigError(f"{variable}={value!r}: takes one of {names}")
    return value.upper()


def check_environment() -> None:
    """Raise for the first variable that asks for what Caldera does not do."""
    for name, value in sorted(os.environ.items()):
        for prefix, reason in REFUSED.items():
            if name.startswith(prefix) and value.lower() not in OFF:
                raise UnsupportedError(f"{name}={value!r} is not supported: {reason}")
