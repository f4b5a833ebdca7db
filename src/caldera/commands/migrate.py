"""`caldera migrate script.sh`: what is renamed, refused or defaulted differently, and a short
equivalent."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from caldera.commands.eval import EVALUATE
from caldera.commands.generate import GENERATE
from caldera.commands.launch_script import Launch, Script, is_of_shell, plain, quoted, stand_in
from caldera.config import compose_config, config_to_dict, known_keys
from caldera.config.fields import check_values, default_of, shown, walk
from caldera.config.loader import CONFIG_DIR, ENGINE_GROUP, read_override
from caldera.config.migrate import MOVED, MOVED_SUPERVISED, VERLS_DEFAULTS, is_place, moved_to
from caldera.config.ppo import PPOTrainerConfig
from caldera.config.sft import SFTTrainerConfig
from caldera.errors import CalderaError, ConfigError, UnsupportedError
from caldera.tracking.progress import print_line
from caldera.trainer.dpo_trainer import DPO
from caldera.trainer.entry import Asked, ConfigCommand, OptionsCommand, text_parser
from caldera.trainer.fsdp_sft_trainer import CLASSIC
from caldera.trainer.main_ppo import TRAIN
from caldera.trainer.rm_trainer import REWARD_MODEL
from caldera.trainer.sft_trainer import CONVERSATIONS

# ---- What becomes of the keys of one command


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


def study(asked: Asked, command: ConfigCommand[Any]) -> Study:
    """Look at each key by itself, then at all of them together."""
    found, schema = Study(), command.schema
    with _quiet():
        checked = _checked(asked, schema, found)
        while True:
            try:
                command.load(checked, asked.config_name, asked.config_path)
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


SOMETHING_REFUSED = 1

HELP = """\
Read a launch script of verl's, and tell what becomes of it here: which keys have
another name, which are refused, which defaults differ, and a short command that
does the same. Nothing is run. The exit status is 1 if something is refused, or
is still to settle.

  caldera migrate run_grpo.sh
  caldera migrate run_grpo.sh --output my_run.yaml
"""


@dataclass(frozen=True)
class Target:
    """What stands for one of verl's entry points."""

    name: str
    """`caldera NAME`, or the module where there is no such command."""
    module: str
    command: ConfigCommand[Any] | None


TARGETS = {
    "main_ppo": Target("train", "main_ppo", TRAIN),
    "main_ppo_v0": Target("train", "main_ppo", TRAIN),
    "main_dapo": Target("train", "main_ppo", TRAIN),
    "main_generation": Target("generate", "main_generation", GENERATE),
    "main_generation_server": Target("", "main_generation_server", None),
    "main_eval": Target("eval", "main_eval", EVALUATE),
    "fsdp_sft_trainer": Target("sft", "fsdp_sft_trainer", CLASSIC),
    "sft_trainer": Target("", "sft_trainer", CONVERSATIONS),
    "sft_trainer_ray": Target("", "sft_trainer_ray", CONVERSATIONS),
    "rm_trainer": Target("rm", "rm_trainer", REWARD_MODEL),
    "dpo_trainer": Target("dpo", "dpo_trainer", DPO),
    "model_merger": Target("merge", "model_merger", None),
}
FOLDER = re.compile(r"\$\(pwd\)|`pwd`|\$PWD\b|\$\{PWD\}")
HOME = re.compile(r"^(\$HOME\b|\$\{HOME\})")
MODULE = re.compile(r"(?:(?:verl|recipe|caldera)[./](?:[\w]+[./])*|(?:.*/)?)(\w+)(?:\.py)?")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = text_parser("caldera migrate", HELP)
    made.add_argument("script", type=Path, help="a bash script that starts verl")
    made.add_argument(
        "--output", type=Path, metavar="FILE.yaml", help="write the keys to a config file, too"
    )
    return made


def migrate(path: Path, output: Path | None = None) -> int:
    """Tell what becomes of each command of a script; returns the exit status."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    script = Script(text, str(path))
    found = [(launch, place) for launch in script.launches if (place := _entry(launch.words))]
    if not found:
        known = ", ".join(sorted(TARGETS))
        raise ConfigError(f"{path} starts none of verl's entry points ({known})")
    if output is not None:
        _check_output(output)
    if output is not None and len(found) > 1:
        raise ConfigError(f"--output={str(output)!r}: {path} has {len(found)} commands; takes one")
    clean = [_tell(path, launch, place, output) for launch, place in found]
    _section("Notes", script.notes)
    return 0 if all(clean) else SOMETHING_REFUSED


def _check_output(output: Path) -> None:
    if output.suffix != ".yaml":
        raise ConfigError(f"--output={str(output)!r}: takes a file whose name ends in .yaml")
    if output.exists():
        raise ConfigError(f"--output={str(output)!r} exists already; remove it, or take another")


def _entry(words: Sequence[str]) -> int | None:
    """The place of the word that names an entry point."""
    for place, word in enumerate(words):
        match = MODULE.fullmatch(word)
        follows = place > 0 and (words[place - 1] == "-m" or word.endswith(".py"))
        if match and follows and match[1] in TARGETS:
            return place
    return None


def _tell(path: Path, launch: Launch, place: int, output: Path | None) -> bool:
    """Of one command; whether all of it can be taken."""
    match = MODULE.fullmatch(launch.words[place])
    assert match is not None
    target = TARGETS[match[1]]
    arguments = launch.words[place + 1 :]
    print_line(f"{path}:{launch.line}: {launch.words[place]}, {len(arguments)} arguments")
    start = _start(launch.words[:place], target)
    before = [f"{name}={value}" for name, value in launch.settings.items()]
    before += [f"export {name}={quoted(value)}" for name, value in launch.environment.items()]
    if target.command is None:
        _section("The same here", [*before, " ".join([start, *map(quoted, arguments)])])
        return True
    asked = target.command.read(arguments)
    readable, missing = _with_its_file(asked, target.command)
    found = study(readable, target.command)
    _section("Renamed", found.renamed)
    _section("Refused, and left out below", found.refused)
    _section("Left out below, since the defaults say the same", found.needless)
    _section("Defaults that differ", found.defaults)
    unsettled = [text for text in (missing, found.unsettled) if text]
    _section("Still to settle", unsettled)
    keys = found.kept
    if output is not None:
        keys = [key for key in found.kept if not _fits_a_file(key, found)]
        _write_yaml(output, asked, found)
    _section("The same here", [*before, *_command(start, asked, target.command, keys, output)])
    return not found.refused and not unsettled


def _with_its_file(asked: Asked, command: ConfigCommand[Any]) -> tuple[Asked, str | None]:
    """The same with a config file that can be read here, and what is said where there is none."""
    folder = FOLDER.sub(lambda _: os.getcwd(), asked.config_path or str(CONFIG_DIR))
    folder = os.path.expanduser(HOME.sub("~", folder))
    if Path(folder, f"{asked.config_name}.yaml").is_file():
        return replace(asked, config_path=asked.config_path and folder), None
    told = f"--config-name={asked.config_name}: there is no such file in {plain(folder)}; "
    told += f"the keys were read as if it were {command.config_name}.yaml"
    return replace(asked, config_path=None, config_name=command.config_name), told


def _start(launcher: Sequence[str], target: Target) -> str:
    """What starts it: `caldera NAME`, behind whatever launched verl."""
    before = list(launcher[:-1] if launcher[-1] == "-m" else launcher)
    is_python = bool(before) and re.fullmatch(r"(.*/)?python[\d.]*", before[-1]) is not None
    if is_python and target.name:
        return " ".join([*map(quoted, before[:-1]), "caldera", target.name])
    return " ".join([*map(quoted, before), "-m", f"caldera.trainer.{target.module}"])


def _command(
    start: str, asked: Asked, command: ConfigCommand[Any], keys: list[str], output: Path | None
) -> list[str]:
    """The command as lines that a shell reads."""
    options = []
    if output is not None:
        options = [f"--config-path={output.parent}", f"--config-name={output.stem}"]
    else:
        if asked.config_path is not None:
            options.append(f"--config-path={asked.config_path}")
        if asked.config_name != command.config_name:
            options.append(f"--config-name={asked.config_name}")
    lines = [start, *(f"  {quoted(text)}" for text in (*options, *keys))]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _write_yaml(output: Path, asked: Asked, found: Study) -> None:
    if asked.config_path is not None:
        raise ConfigError(
            f"--output={str(output)!r}: the script has a config of its own in "
            f"--config-path={asked.config_path}; add the keys below to that"
        )
    tree: Any = OmegaConf.create()
    for key in found.kept:
        if _fits_a_file(key, found):
            OmegaConf.update(tree, *read_override(plain(key)), force_add=True)
    text = yaml.safe_dump(OmegaConf.to_container(tree), sort_keys=False, allow_unicode=True)
    text = text if tree else ""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(f"defaults:\n  - {asked.config_name}\n  - _self_\n\n{text}", encoding="utf-8")


def _fits_a_file(key: str, found: Study) -> bool:
    """Others stay on the command line: what a shell expands, and what chooses files."""
    return key not in found.of_shell and not key.startswith(f"{ENGINE_GROUP}=")


def _section(title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        print_line(f"\n{title}")
        for line in lines:
            print_line(f"  {line}")


MIGRATE = OptionsCommand(parser, lambda options: migrate(options.script, options.output))
