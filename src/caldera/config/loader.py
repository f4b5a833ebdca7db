"""From YAML files and command-line overrides to one typed, checked config.

This is the only place that sees Hydra. YAML files are composed without types; keys of other
releases are moved, unknown ones refused; then the values are laid over the dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from caldera.config.estimators import with_group_size
from caldera.config.fields import Field, check_values, field_path, shown, use_one_spelling, walk
from caldera.config.migrate import (
    MOVED,
    MOVED_SUPERVISED,
    Tree,
    groups_of,
    later_keys,
    leaves_of,
    migrate,
    moved_to,
)
from caldera.config.offline import EvaluationConfig, GenerationConfig
from caldera.config.ppo import PPOTrainerConfig
from caldera.config.preference import (
    DPOTrainerConfig,
    RewardModelTrainerConfig,
    check_preference,
)
from caldera.config.serve import ServeConfig
from caldera.config.sft import SFTTrainerConfig, check_supervised
from caldera.config.suggest import did_you_mean
from caldera.config.validate import check_consistency
from caldera.errors import ConfigError, UnknownKeyError, UnsupportedError

CONFIG_DIR = Path(__file__).parent / "yaml"
BRACKETS_AND_QUOTES = tuple("[{(\"'")
SCHEMAS: dict[str, type] = {
    "ppo_trainer": PPOTrainerConfig,
    "ppo_megatron_trainer": PPOTrainerConfig,
    "sft_trainer": SFTTrainerConfig,
    "sft_trainer_engine": SFTTrainerConfig,
    "rm_trainer": RewardModelTrainerConfig,
    "dpo_trainer": DPOTrainerConfig,
    "generation": GenerationConfig,
    "evaluation": EvaluationConfig,
    "serve": ServeConfig,
}
"""The keys of each of Caldera's own YAML files."""
SWITCHES: dict[str, dict[str, Any]] = {
    "algorithm.rollout_correction": {
        "preset": None, "rollout_is": None, "rollout_rs": None, "bypass_mode": False,
    },
    "data.sampler": {"class_path": None, "class_name": None},
    "data.custom_cls": {"path": None, "name": None},
    "actor_rollout_ref.rollout.trace": {"backend": None},
    "global_profiler": {"tool": None, "steps": None},
}  # fmt: skip
"""Groups that null switches off, beside those with the key enable, path or url."""
ENGINE_GROUP = "model_engine"
"""Chooses YAML files and holds no keys."""
TYPES_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[int]": "a list of whole numbers, such as [1,2]",
    "list[float]": "a list of numbers, such as [0.9,0.99]",
    "list[str]": "a list of texts, such as [a,b]",
    "dict[str, Any]": "a dictionary, such as {name: value}",
}

T = TypeVar("T")
S = TypeVar("S", bound=SFTTrainerConfig)


def load_config(
    overrides: Sequence[str] = (), config_name: str = "ppo_trainer", config_path: str | None = None
) -> PPOTrainerConfig:
    """The config of a PPO run: composed, with every value checked."""
    config = compose_config(overrides, config_name, config_path, PPOTrainerConfig)
    check_values(config)
    check_consistency(config)
    return config


def load_supervised_config(
    overrides: Sequence[str], config_name: str, config_path: str | None, schema: type[S]
) -> S:
    """The config of a supervised run: composed, with every value checked."""
    config = compose_config(overrides, config_name, config_path, schema)
    check_values(config)
    check_supervised(config)
    check_preference(config)
    return config


def compose_config(
    overrides: Sequence[str], config_name: str, config_path: str | None, schema: type[T]
) -> T:
    """The typed config before its values are checked."""
    directory = Path(config_path).expanduser().resolve() if config_path else CONFIG_DIR
    if not (directory / f"{config_name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in directory.glob("*.yaml"))) or "none"
        raise ConfigError(f"--config-name={config_name}: not in {directory} (there: {known})")
    if SCHEMAS.get(config_name, schema) is not schema:
        fitting = ", ".join(name for name, cls in SCHEMAS.items() if cls is schema)
        raise ConfigError(f"--config-name={config_name}: this command takes {fitting}")
    keys = known_keys(schema)
    given = [key for text in overrides for key in _without_null_group(text, keys)]
    tree = _compose(given, config_name, directory)
    moves = MOVED_SUPERVISED if issubclass(schema, SFTTrainerConfig) else MOVED
    values = migrate(dict(leaves_of(tree, keys, moves)), frozenset(keys), moves)
    given_values = _only_known(values, keys, moves)
    if schema is PPOTrainerConfig:
        given_values = with_group_size(given_values)
    config = _typed(schema, given_values)
    use_one_spelling(config)
    return config


def config_to_dict(config: Any) -> dict[str, Any]:
    """The config as plain dictionaries, for loggers."""
    return dataclasses.asdict(config, dict_factory=_by_key)


def _by_key(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name.removesuffix("_"): value for name, value in fields}


def config_to_yaml(config: Any) -> str:
    """The config as YAML text, every key resolved."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


def known_keys(schema: type = PPOTrainerConfig) -> dict[str, bool]:
    """Every dotted key, and whether it holds a free dictionary."""
    return _known_keys(schema)


@cache
def _known_keys(schema: type) -> dict[str, bool]:
    return {key: str(field.type).startswith("dict[str, Any]") for key, field, _ in walk(schema())}


def read_override(text: str) -> tuple[str, Any]:
    """The key and the value of `key=value`."""
    override, _ = _parse(text)
    return override.key_or_group, override.value()


# ---------------------------------------------------------------------- composing


def _compose(overrides: Sequence[str], config_name: str, directory: Path) -> Tree:
    """YAML files and overrides as nested dictionaries, references still unresolved."""
    checked = [_for_hydra(text, directory) for text in overrides]
    # A user's own folder may build on the files here.
    search = [] if directory == CONFIG_DIR else [f"hydra.searchpath=[file://{CONFIG_DIR}]"]
    try:
        with initialize_config_dir(str(directory), version_base="1.3"):
            composed = compose(config_name, [*checked, *search])
        return cast(Tree, OmegaConf.to_container(composed, resolve=False))
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra's search path follows, which says nothing of the mistake.
        message = str(getattr(error, "msg", None) or error).partition("Config search path:")[0]
        raise ConfigError(" ".join(message.split())) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config-name={config_name}: {' '.join(str(error).split())}") from error


def _for_hydra(text: str, directory: Path) -> str:
    """The override as Hydra takes it: keys are added to the files' own, groups are chosen."""
    override, text = _parse(text)
    if override.is_delete():
        raise UnsupportedError(f"{text}: keys cannot be deleted; set the value that you want")
    if re.match(r"hydra[./]", override.key_or_group):
        raise UnsupportedError(
            f"{text} is not supported: the folder of a run is trainer.default_local_dir, and "
            "--config-path finds YAML files"
        )
    if _chooses_file(override, directory) or override.package is not None:
        return text
    return "++" + text.lstrip("+")


def _chooses_file(override: Override, directory: Path) -> bool:
    """Whether `group=name` names one of the group's files."""
    group, name = override.key_or_group, override.value()
    if not isinstance(name, str) or "." in group:
        return False
    choices = {path.stem for root in (directory, CONFIG_DIR) for path in (root / group).glob("*")}
    if choices and name not in choices:
        known = ", ".join(sorted(choices))
        raise ConfigError(
            f"{override.get_key_element()}={name!r}: takes one of {known} (files of its folder)"
        )
    return name in choices


def _parse(text: str) -> tuple[Override, str]:
    """The override, and its text in Hydra's grammar.

    A shell has taken the quotes away from `key="<b>"`, without which Hydra cannot read the value,
    and from `key="a,b"`, which would be two runs.
    """
    key, _, value = text.partition("=")
    if ("=" not in text or not key) and not text.startswith("~"):
        raise ConfigError(f"{text!r} is not an override: write key=value")
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
        if not override.is_sweep_override():
            return override, text
    except HydraException as error:
        if value[:1] in BRACKETS_AND_QUOTES or not re.fullmatch(r"[+~\w.@/-]+", key):
            raise ConfigError(
                f"cannot read {text!r}: check its brackets, quotes and spaces"
            ) from error
    # Within quotes, backslashes count only where they stand before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    quoted = f"{key}='{escaped}'"
    return parser.parse_override(quoted), quoted


# ---------------------------------------------------------------------- knowing


def _only_known(values: Tree, keys: dict[str, bool], moves: Mapping[str, str]) -> Tree:
    """The values that were given; a key that does not exist is an error.

    A group may be empty, null or refer to another one. `???` is Hydra's "not given".
    """
    groups, groups_elsewhere = groups_of(keys), {ENGINE_GROUP, *groups_of(later_keys())}
    given: Tree = {}
    for key, value in values.items():
        is_group = key in groups or moved_to(key, moves) in groups or key in groups_elsewhere
        if is_group and value == {}:
            continue
        if is_group and value is None and (off := switched_off(moved_to(key, moves) or key, keys)):
            given |= off
            continue
        refers = key in groups and str(value).startswith("${")
        if not (key in keys or _in_free_dictionary(key, keys) or refers):
            if is_group:
                raise ConfigError(f"{key}={shown(value)}: is a group{_example(key, keys, moves)}")
            raise UnknownKeyError(f"unknown config key {key!r}{did_you_mean(key, keys, moves)}")
        if value != "???":
            given[key] = value
    return given


def switched_off(group: str, keys: Iterable[str]) -> Tree:
    """What `group=null` asks for: the keys that switch the group off; empty where none does."""
    usual = {"enable": False}, {"path": None}, {"url": None}
    for off in (SWITCHES.get(group, {}), *usual):
        asked = {f"{group}.{name}": value for name, value in off.items()}
        if asked and asked.keys() <= set(keys):
            return asked
    return {}


def _without_null_group(text: str, keys: dict[str, bool]) -> list[str]:
    """`group=null` of the command line as keys of the group: Hydra has no such choice."""
    override, text = _parse(text)
    group = override.key_or_group
    if override.is_delete() or override.value() is not None or group not in groups_of(keys):
        return [text]
    if off := switched_off(group, keys):
        return [f"{key}={json.dumps(value)}" for key, value in off.items()]
    raise ConfigError(f"{group}=null: is a group{_example(group, keys, {})}")


def _example(group: str, keys: Iterable[str], moves: Mapping[str, str]) -> str:
    """A key of the group, where it is one of those here."""
    place = moved_to(group, moves) or group
    example = next((key for key in keys if key.startswith(f"{place}.")), None)
    return f"; set its keys, such as {example}=..." if example else ""


def _in_free_dictionary(key: str, keys: dict[str, bool]) -> bool:
    parts = key.split(".")
    return any(keys.get(".".join(parts[:length])) for length in range(1, len(parts)))


# ---------------------------------------------------------------------- typing


def _typed(schema: type[T], values: dict[str, Any]) -> T:
    """The values over the dataclasses' defaults, references resolved."""
    plain: type = schema
    try:
        config = copy.deepcopy(_structured(plain))
        for key, value in values.items():
            # References are kept for the end: what they point at may come later.
            OmegaConf.update(
                config, field_path(key), value, force_add=key not in known_keys(schema)
            )
        return cast(T, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        raise _explained(error, schema, values) from error


@cache
def _structured(schema: type) -> Any:
    """The schema as OmegaConf has it; making one takes longer than all the rest of loading."""
    return OmegaConf.structured(schema)


def _explained(error: OmegaConfBaseException, schema: type, values: Tree) -> ConfigError:
    """What OmegaConf says, as one sentence that names the key, the value and what it takes."""
    cause: BaseException = error
    link: BaseException | None = error
    seen: list[BaseException] = []  # under a debugger, OmegaConf makes an error its own cause
    while link is not None and link not in seen:  # the innermost one knows the key
        seen.append(link)
        cause = link if getattr(link, "full_key", None) else cause
        link = link.__cause__ or link.__context__
    key = str(getattr(cause, "full_key", None) or "").partition("[")[0]
    given = f"{key}={shown(values[key])}" if key in values else key
    field = next((f for name, f, _ in walk(schema()) if name == key), None)
    if field is not None and isinstance(cause, ValidationError):
        return ConfigError(f"{given}: takes {what_it_takes(field)}")
    reason = str(getattr(cause, "msg", None) or cause).splitlines()[0]
    return ConfigError(f"{given}: {reason}" if key else reason)


def what_it_takes(field: Field) -> str:
    """The type of a key in words, with its unit."""
    name = str(field.type)
    plain = name.removesuffix(" | None")
    text = TYPES_IN_WORDS.get(plain, plain)
    if unit := field.metadata.get("unit"):
        text += f" ({unit})"
    return f"{text} or null" if name.endswith(" | None") else text
