"""What becomes of the keys of one command."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from caldera.config import compose_config, config_to_dict, known_keys
from caldera.config.fields import check_values, default_of, shown, walk
from caldera.config.migrate import MOVED, MOVED_SUPERVISED, VERLS_DEFAULTS, is_place, moved_to
from caldera.config.ppo import PPOTrainerConfig
from caldera.config.sft import SFTTrainerConfig
from caldera.errors import CalderaError, UnsupportedError
from caldera.trainer.entry import Asked
from caldera.trainer.migration.expansions import is_of_shell, plain, stand_in

Load = Callable[[Sequence[str], str, str | None], Any]


@dataclass
class Study:
    """What was found; keys are those of the script, in their order."""

    renamed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Messages of keys and values that cannot be taken; the equivalent is without them."""
    needless: list[str] = field(default_factory=list)
    """What the defaults say anyway."""
    kept: list[str] = field(default_factory=list)
    """The equivalent, under the names here."""
    of_shell: set[str] = field(default_factory=set)
    """Those of them that have a part which only a shell can tell."""
    unsettled: str | None = None
    """What is still missing, or does not fit together."""
    defaults: list[str] = field(default_factory=list)
    """Keys that the script does not give and that are something else here."""


def study(asked: Asked, schema: type, load: Load) -> Study:
    """Look at each key by itself, then at all of them together."""
    found = Study()
    with _quiet():
        checked = _checked(asked, schema, found)
        while True:
            try:
                load(checked, asked.config_name, asked.config_path)
                break
            except UnsupportedError as error:
                unfit = _named_in(str(error), checked)
                if unfit is None:
                    found.unsettled = str(error)
                    break
                found.refused.append(str(error))
                checked.remove(unfit)
                _forget(unfit, found)
            except CalderaError as error:
                found.unsettled = str(error)
                break
        _drop_needless(asked, schema, found, checked)
    _tell_defaults(schema, found)
    return found


def _checked(asked: Asked, schema: type, found: Study) -> list[str]:
    """What is taken as it is, each under its place here and with a stand-in for shell's parts."""
    taken = [_stand_in(text, schema) for text in asked.overrides]
    try:
        check_values(compose_config(taken, asked.config_name, asked.config_path, schema))
        unfit: dict[str, str] = {}
    except CalderaError:  # of one of them; now to find which, and whether there are more
        unfit = _unfit(taken, asked, schema)
    checked: list[str] = []
    for text, known in zip(asked.overrides, taken, strict=True):
        key, place = text.partition("=")[0].lstrip("+"), known.partition("=")[0]
        of_shell = is_of_shell(text)
        if known in unfit and not of_shell:
            found.refused.append(unfit[known])
            continue
        if known not in unfit:
            checked.append(known)
        if place != key:
            found.renamed.append(f"{key} -> {place}")
        found.kept.append(f"{place}={text.partition('=')[2]}")
        if of_shell:
            found.of_shell.add(found.kept[-1])
    return checked


def _unfit(taken: Sequence[str], asked: Asked, schema: type) -> dict[str, str]:
    """Those that cannot be taken, with the reason."""
    reasons = {}
    for text in taken:
        try:
            check_values(compose_config([text], asked.config_name, asked.config_path, schema))
        except CalderaError as error:
            reasons[text] = str(error)
    return reasons


def _stand_in(text: str, schema: type) -> str:
    given, equals, value = text.partition("=")
    return f"{_place(given.lstrip('+'), schema)}{equals}{stand_in(value)}"


def _named_in(message: str, checked: Sequence[str]) -> str | None:
    """The `key=value` that a message begins with."""
    starts = (text for text in checked if message.startswith(f"{text.partition('=')[0]}="))
    return next(starts, None)


def _forget(text: str, found: Study) -> None:
    """Take a key back that was thought to fit."""
    key = text.partition("=")[0]
    found.kept = [kept for kept in found.kept if kept.partition("=")[0] != key]
    found.renamed = [told for told in found.renamed if not told.endswith(f" -> {key}")]


def _place(key: str, schema: type) -> str:
    """The name of a key here; that of one which does not exist stays as it is."""
    moves = MOVED_SUPERVISED if issubclass(schema, SFTTrainerConfig) else MOVED
    known, moved = known_keys(schema), moved_to(key, moves)
    return moved if key not in known and is_place(moved, known) else key


def _drop_needless(asked: Asked, schema: type, found: Study, checked: list[str]) -> None:
    """Leave out what changes nothing: each by itself, since a default may follow another key."""

    def resolved(overrides: Sequence[str]) -> dict[str, Any]:
        config: Any = compose_config(overrides, asked.config_name, asked.config_path, schema)
        return {key: value for key, _, value in walk(config)}

    follows = {key for key, about, _ in walk(schema()) if "${" in str(default_of(about))}
    try:
        whole, usual = resolved(checked), resolved([])
    except CalderaError:  # of keys that do not fit together, which is told already
        return
    left = list(checked)
    for text in checked:
        key = text.partition("=")[0]
        is_usual = key in usual and whole[key] == usual[key]
        without = [other for other in left if other is not text]
        kept = next((one for one in found.kept if plain(one) == text), None)
        if kept and (is_usual or key in follows) and resolved(without) == whole:
            left = without
            found.kept.remove(kept)
            found.needless.append(text)


def _tell_defaults(schema: type, found: Study) -> None:
    if schema is not PPOTrainerConfig:
        return
    here = config_to_dict(PPOTrainerConfig())
    given = {text.partition("=")[0] for text in (*found.kept, *found.needless)}
    for key, default in VERLS_DEFAULTS.items():
        if key not in given:
            own: Any = here
            for name in key.split("."):
                own = own[name]
            told = "chosen from the machine" if own is None else _plain(own, key)
            found.defaults.append(f"{key}: {shown(default)} in verl, here {told}")


def _plain(value: Any, key: str) -> str:
    """A default as people read it; that of one that follows others is their names."""
    if isinstance(value, str) and "${" in value:
        return "made of trainer.project_name and trainer.experiment_name"
    return shown(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading tells of moved keys, which are told here in another way."""
    logger = logging.getLogger("caldera.config")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
