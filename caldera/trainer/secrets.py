"""Secrets among config values: what is written about a run has a mask in their place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from caldera.config import config_to_dict

__all__ = [
    "SHOWN_VARIABLES", "is_masked", "is_shown_variable", "masked_arguments", "masked_dict",
    "masked_text", "masked_values", "masked_yaml",
]  # fmt: skip

MASK = "***"
SECRET = re.compile(
    r"(api|access|private|account)[_-]?key|secret|passwo?r?d|authorization|credential", re.I
)
"""In names of secrets, whatever stands around it."""
TOKEN = re.compile(r"(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!stop_)tokens?$", re.I)
"""The end of names of secrets, if they hold text: numbers are counts of tokens."""
VARIABLES = "env_vars"
"""The group of variables: all are taken for secrets but those below."""
SHOWN_VARIABLES = (
    "CALDERA_", "CUDA_VISIBLE_DEVICES", "HF_HUB_", "NCCL_", "OMP_", "PYTHONHASHSEED", "VERL_",
)  # fmt: skip
"""Beginnings of variables that change what a run does."""
SECRET_WORDS = ("KEY", "PASSW", "SECRET", "TOKEN")
USER_OF_URL = re.compile(
    r"\b([a-z][a-z0-9+.-]*://)[^/\s@:]*:[^/\s@]*@|\b(https?://)[^/\s@]+@", re.I
)
"""A password, or with HTTP a user alone: `abfs://container@account` is none."""
NOTHING = re.compile(r"|none|null|true|false|\{\}|\[\]", re.I)
"""Values that hide nothing, as text."""
COUNT = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.I)
PAIRS = re.compile(r"""([\w.-]+)['"]?\s*:\s*['"]?([^,'"{}\[\]]*)""")
"""The names in a dictionary that is written as text, with the values that are no groups."""


def masked_dict(config: Any) -> dict[str, Any]:
    """The resolved config, without secrets."""
    return masked_values(config_to_dict(config))


def masked_values(values: dict[str, Any]) -> dict[str, Any]:
    """The same of values by their keys."""
    return {key: _masked(value, key) for key, value in values.items()}


def masked_yaml(config: Any) -> str:
    """The same as YAML."""
    return yaml.safe_dump(masked_dict(config), sort_keys=False, allow_unicode=True)


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line, without the secrets among its `key=value`."""
    return [_masked_argument(text) for text in arguments]


def masked_text(text: str) -> str:
    """Without users and passwords of URLs."""
    return USER_OF_URL.sub(lambda found: f"{found[1] or found[2]}{MASK}@", text)


def is_masked(text: str) -> bool:
    return MASK in text


def is_shown_variable(name: str) -> bool:
    """Whether a variable matters for a run, and is nothing secret."""
    return name.startswith(SHOWN_VARIABLES) and not any(word in name for word in SECRET_WORDS)


def _names_a_secret(name: str, value: Any) -> bool:
    text = str(value).strip()
    if NOTHING.fullmatch(text):
        return False
    return bool(SECRET.search(name) or (TOKEN.search(name) and not COUNT.fullmatch(text)))


def _masked(value: Any, name: str = "", is_variable: bool = False) -> Any:
    if _names_a_secret(name, value) or (is_variable and not is_shown_variable(name)):
        return MASK
    if isinstance(value, dict):
        is_group = name == VARIABLES
        return {key: _masked(item, str(key), is_group) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    return masked_text(value) if isinstance(value, str) else value


def _masked_argument(text: str) -> str:
    key, is_set, value = text.partition("=")
    if not is_set:
        return masked_text(text)
    parts = key.lstrip("+").split(".")
    if value.lstrip().startswith(("{", "[")):
        # Hydra's way to write dictionaries is no YAML; one secret name hides all of it.
        pairs = [
            (parts[-1], value),
            *((name, item or value) for name, item in PAIRS.findall(value)),
        ]
        is_secret = any(name == VARIABLES or _names_a_secret(name, item) for name, item in pairs)
        return f"{key}={MASK}" if is_secret else masked_text(text)
    masked = _masked(value, parts[-1], VARIABLES in parts[:-1])
    return f"{key}={masked}"
