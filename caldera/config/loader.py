"""From command-line overrides to one typed, checked config: the only place that sees Hydra."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from caldera.config.fields import check_values, walk
from caldera.config.ppo import PPOTrainerConfig
from caldera.config.validate import check_consistency
from caldera.errors import ConfigError, UnknownKeyError, UnsupportedError, nearest

CONFIG_DIR = Path(__file__).parent
BRACKETS_AND_QUOTES = tuple("[{(\"'")


def load_config(
    overrides: Sequence[str] = (), config_name: str = "ppo_trainer", config_path: str | None = None
) -> PPOTrainerConfig:
    """Compose the YAML file with the overrides, and check every value."""
    config = compose_config(overrides, config_name, config_path)
    check_values(config)
    check_consistency(config)
    return config


def compose_config(
    overrides: Sequence[str], config_name: str, config_path: str | None
) -> PPOTrainerConfig:
    """The typed config before its values are checked."""
    directory = Path(config_path).expanduser().resolve() if config_path else CONFIG_DIR
    if not (directory / f"{config_name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in directory.glob("*.yaml"))) or "none"
        raise ConfigError(f"--config-name={config_name}: not in {directory} (there: {known})")
    _store_schema()
    checked = [_checked_override(text) for text in overrides]
    try:
        with initialize_config_dir(str(directory), version_base="1.3"):
            # A user's own folder may build on the files here.
            search = [f"hydra.searchpath=[file://{CONFIG_DIR}]"]
            composed = compose(config_name, [*checked, *search])
        return cast(PPOTrainerConfig, OmegaConf.to_object(composed))
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(error) from error


def config_to_dict(config: Any) -> dict[str, Any]:
    """The config as plain dictionaries, for loggers."""
    return dataclasses.asdict(config)


def config_to_yaml(config: Any) -> str:
    """The config as YAML text, every key resolved."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


@cache
def _store_schema() -> None:
    ConfigStore.instance().store(name="ppo_trainer_schema", node=PPOTrainerConfig)


@cache
def known_keys() -> dict[str, bool]:
    """Every dotted key, and whether it holds a free dictionary."""
    return {
        key: str(field.type).startswith("dict[str, Any]")
        for key, field, _ in walk(PPOTrainerConfig())
    }


def _checked_override(text: str) -> str:
    """The override as Hydra takes it; `+key=value` of a known key is a plain override."""
    override, text = _parse(text)
    if override.is_delete():
        raise UnsupportedError(f"{text}: keys cannot be deleted; set the value that you want")
    key = override.key_or_group
    keys = known_keys()
    if any(free and f"{key}.".startswith(f"{name}.") for name, free in keys.items()):
        return "++" + text.lstrip("+")  # Hydra adds keys to a dictionary only when told to
    if key in keys or any(name.startswith(f"{key}.") for name in keys):
        return text.lstrip("+")
    raise UnknownKeyError(f"unknown config key {key!r} in {text!r}{_did_you_mean(key)}")


def _parse(text: str) -> tuple[Override, str]:
    """The override, and its text in Hydra's grammar.

    A shell has taken the quotes away from `key="<b>"`, without which Hydra cannot read the value.
    """
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"{text!r} is not an override: write key=value")
    parser = OverridesParser.create()
    try:
        return parser.parse_override(text), text
    except HydraException as error:
        key, _, value = text.partition("=")
        if value[:1] in BRACKETS_AND_QUOTES or not key.strip("+~").replace(".", "").isidentifier():
            raise ConfigError(f"cannot read {text!r}: {str(error).splitlines()[0]}") from error
        # Within quotes, backslashes count only where they stand before a quote.
        escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
        quoted = f"{key}='{escaped}'"
        return parser.parse_override(quoted), quoted


def _did_you_mean(key: str) -> str:
    guess = _same_leaf(key, known_keys()) or nearest(key, known_keys())
    return f"; did you mean {guess}?" if guess else ""


def _same_leaf(key: str, keys: dict[str, bool]) -> str | None:
    """A known key that ends like this one, for a leaf under the wrong group."""
    leaf = key.rsplit(".", 1)[-1]
    return next((name for name in keys if name.rsplit(".", 1)[-1] == leaf), None)


def _explained(error: Exception) -> ConfigError:
    """What Hydra and OmegaConf say, as one sentence that names the key."""
    cause: BaseException = error
    link: BaseException | None = error
    while link is not None:  # the innermost one knows the key
        cause = link if getattr(link, "full_key", None) else cause
        link = link.__cause__ or link.__context__
    key = getattr(cause, "full_key", None)
    if key and isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return UnknownKeyError(f"unknown config key {key!r}{_did_you_mean(str(key))}")
    message = str(getattr(cause, "msg", None) or cause).splitlines()[0]
    return ConfigError(f"{key}: {message}" if key else message)
