"""Keywords of Python calls as config keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from caldera.config import known_keys
from caldera.errors import ConfigError, nearest

Values = dict[str, Any]
"""Values by dotted key."""

RL_KEYS: dict[str, tuple[str, ...]] = {
    "n": ("actor_rollout_ref.rollout.n",),
    "lr": ("actor_rollout_ref.actor.optim.lr",),
    "batch_size": ("data.train_batch_size",),
    "mini_batch_size": ("actor_rollout_ref.actor.ppo_mini_batch_size",),
    "temperature": ("actor_rollout_ref.rollout.temperature",),
    "lora_rank": ("actor_rollout_ref.model.lora_rank",),
    "seed": ("actor_rollout_ref.rollout.seed", "data.seed"),
}
SUPERVISED_KEYS: dict[str, tuple[str, ...]] = {
    "lr": ("optim.lr",),
    "batch_size": ("data.train_batch_size",),
    "lora_rank": ("model.lora_rank",),
    "seed": ("trainer.seed",),
}
RUN_KEYS: dict[str, tuple[str, ...]] = {
    "steps": ("trainer.total_training_steps",),
    "epochs": ("trainer.total_epochs",),
    "eval_every": ("trainer.test_freq",),
    "save_every": ("trainer.save_freq",),
    "processes": ("trainer.n_gpus_per_node",),
}
FIRST_GROUPS = ("data", "algorithm", "actor_rollout_ref", "trainer", "model", "optim")
"""Where a keyword is looked for first: those of a critic or a reward model are written out."""


def settings(
    schema: type,
    short: Mapping[str, tuple[str, ...]],
    keywords: Mapping[str, Any],
    config: Mapping[str, Any] | None,
) -> Values:
    """The values of all keys that a call names, by keyword or in its `config`.

    A keyword is a short name, a group with a dict, or the last word of one key. None leaves the
    default.
    """
    keys = known_keys(schema)
    values: Values = {}
    for name, value in keywords.items():
        if value is None:
            continue
        if name in short:
            values |= dict.fromkeys(short[name], value)
        elif isinstance(value, Mapping) and any(key.startswith(f"{name}.") for key in keys):
            values |= flat({name: value}, keys)
        else:
            values[_key_of(name, keys, short)] = value
    return values | flat(config or {}, keys)


def flat(given: Mapping[str, Any], keys: Mapping[str, bool], group: str = "") -> Values:
    """Nested or dotted keys as dotted keys; a key that holds a free dictionary keeps it."""
    values: Values = {}
    for name, value in given.items():
        key = f"{group}{name}"
        if isinstance(value, Mapping) and not keys.get(key) and not _is_free(key, keys):
            values |= flat(value, keys, f"{key}.")
        else:
            values[key] = value
    return values


def _is_free(key: str, keys: Mapping[str, bool]) -> bool:
    parts = key.split(".")
    return any(keys.get(".".join(parts[:length])) for length in range(1, len(parts)))


def _key_of(name: str, keys: Mapping[str, bool], short: Mapping[str, Any]) -> str:
    found = [key for key in keys if key == name or key.endswith(f".{name}")]
    ours = [key for key in found if _is_policys(key)]
    if len(ours) == 1 or len(found) == 1:
        return (ours or found)[0]
    if found:
        raise ConfigError(
            f"{name}: several keys end so, {', '.join(sorted(ours or found))}; name one in config="
            f'{{"{(ours or found)[0]}": ...}}'
        )
    guess = nearest(name, [*short, *(key.rpartition(".")[2] for key in keys)])
    hint = f" (did you mean {guess}?)" if guess else ""
    raise ConfigError(
        f"unknown keyword {name!r}{hint}. Short names are {', '.join(short)}; any other key is "
        "named by its last word, or in config={...}"
    )


def _is_policys(key: str) -> bool:
    """Whether a key is the policy's, the data's or the run's own."""
    return key.startswith(FIRST_GROUPS) and not key.startswith("actor_rollout_ref.ref.")


def overrides(values: Mapping[str, Any]) -> list[str]:
    """`key=value` of each, as the command line has them."""
    return [f"{key}={_text(value, key)}" for key, value in values.items()]


def _text(value: Any, key: str) -> str:
    """A value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))  # without the type of NumPy's
    if isinstance(value, str | PathLike):
        return _quoted(str(value))
    if isinstance(value, Mapping):
        items = (f"{name}: {_text(each, key)}" for name, each in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(_text(each, key) for each in value)}]"
    if hasattr(value, "item"):  # a number of NumPy's or torch's
        return _text(value.item(), key)
    raise ConfigError(
        f"{key}={value!r}: takes text, numbers, true or false, lists and dicts of these"
    )


def _quoted(text: str) -> str:
    # Within quotes, backslashes count only where they stand before a quote, or at the end.
    pieces = text.split("'")
    escaped = [piece + "\\" * _trailing(piece) for piece in pieces]
    return "'" + "\\'".join(escaped) + "'"


def _trailing(text: str) -> int:
    return len(text) - len(text.rstrip("\\"))


def free_folder(root: Path, kind: str) -> Path:
    """The first `runs/grpo-001` that no run has taken."""
    taken = {path.name for path in root.glob(f"{kind}-*")} if root.is_dir() else set()
    number = next(number for number in range(1, 100_000) if f"{kind}-{number:03d}" not in taken)
    return root / f"{kind}-{number:03d}"
