"""What every entry point does around its work: the command line, logging, and errors that a person
can act on."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import pydoc
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from caldera.config import (
    SHORT_PROFILE,
    PPOTrainerConfig,
    annotated_yaml,
    compose_config,
    did_you_mean,
    help_text,
    known_keys,
)
from caldera.config.fields import check_values
from caldera.errors import CalderaError, ConfigError, UnsupportedError
from caldera.tracking.progress import LogHandler

# ---- Variables of verl's that would have no effect here: they are refused by name

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


USER_ERROR = 2
STOPPED = 130
"""What a shell says of a command that Ctrl-C has ended."""
SFT_LEVEL = "VERL_SFT_LOGGING_LEVEL"
VERLS_FOLDER = "config"
"""Where verl has its YAML files, relative to its entry points."""

C = TypeVar("C")


def text_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser whose help shows the description as it is written, with its examples."""
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options, config overrides), which may stand in any order: argparse would mind."""
    overrides = [text for text in arguments if "=" in text and not text.startswith("-")]
    return [text for text in arguments if text not in overrides], overrides


def torchrun_rank() -> int | None:
    """The rank of this process where torchrun has started several, else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    return int(os.environ.get("RANK", "0"))


def leave_to_rank_0() -> None:
    """Have Ctrl-C end this rank in silence, whatever it waits for: rank 0 says what there is to."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_entry_point(work: Callable[[], int | None], tell: Callable[[str], str] = str) -> int:
    """Run the work; returns the exit status, which is the work's own where it returns one.

    A mistake of the user's becomes one message, as `tell` puts it, and status 2; Ctrl-C becomes
    one message, and status 130.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[LogHandler()])
    try:
        logging.getLogger("caldera").setLevel(log_level("VERL_LOGGING_LEVEL", "INFO"))
        if os.environ.get(SFT_LEVEL):
            logging.getLogger("caldera.trainer.sft").setLevel(log_level(SFT_LEVEL, "INFO"))
        check_environment()
        return work() or 0
    except CalderaError as error:
        _show_traceback()
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])  # where it came up
        sys.stderr.write(f"caldera: error: {tell(told)}\n")
        return USER_ERROR
    except KeyboardInterrupt as stop:
        return stopped(stop)


def stopped(stop: KeyboardInterrupt) -> int:
    """Tell of Ctrl-C, in the words of the last note on it if it has any; returns the status."""
    _show_traceback()
    told = getattr(stop, "__notes__", ["stopped by Ctrl-C."])[-1]
    sys.stderr.write(f"caldera: {told}\n")
    return STOPPED


def leave_if_stopped(status: int) -> int:
    """The exit status of this process, which after Ctrl-C ends here.

    Threads may then be in the middle of anything. Once all that is registered has been closed they
    are left to it, and not heard: an interpreter that is taken down under them has them fail, or
    crashes.
    """
    if status == STOPPED:
        threading.excepthook = lambda failure: None
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _show_traceback() -> None:
    if os.environ.get("CALDERA_TRACEBACK") == "1":
        traceback.print_exc()


@dataclass(frozen=True)
class Asked:
    """What a command line says."""

    overrides: list[str]
    config_name: str
    config_path: str | None
    help: str | None
    """None: not asked for; empty: all of it; else the key that it is about."""
    cfg: str | None
    is_of_process: bool = False
    """Whether it is this process's own: then the process ends with the command."""

    @property
    def only_tells(self) -> bool:
        return self.help is not None or self.cfg is not None


@dataclass(frozen=True)
class ConfigCommand(Generic[C]):
    """A command that takes `key=value ...`, and shows its keys and its config."""

    prog: str
    description: str
    """Its first paragraph says what it does; examples follow."""
    config_name: str
    schema: type[C]
    work: Callable[[C], None]
    """What it does. Modules that take seconds to import are imported there."""
    check: Callable[[C], None] = field(default=lambda config: None, kw_only=True)
    """Whether keys fit together, each of which has a value that it takes."""
    takes_torchrun: bool = field(default=False, kw_only=True)
    """Whether processes of torchrun's can be its ranks."""

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=self.prog,
            description=self.description,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument(
            *("-h", "--help"),
            nargs="?",
            const="",
            metavar="KEY",
            help="show this and every key; with KEY, a key or group, that alone",
        )
        parser.add_argument(
            "--config-name",
            default=self.config_name,
            metavar="NAME",
            help=f"YAML file to start from ({self.config_name})",
        )
        parser.add_argument(
            "--config-path", metavar="FOLDER", help="folder of that file (Caldera's own)"
        )
        parser.add_argument(
            "--cfg",
            choices=self._shown(),
            help="print the resolved config and stop: job, all of it"
            + ("; short, what most runs set" if "short" in self._shown() else ""),
        )
        parser.add_argument("key=value", nargs="*", help="values of config keys")
        return parser

    def read(self, argv: Sequence[str] | None = None) -> Asked:
        """What the command line says; by default that of this process."""
        options, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
        parser = self.parser()
        given, unknown = parser.parse_known_args(options)
        if unknown:
            key = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
            hint = did_you_mean(key, known_keys(self.schema), {})
            parser.error(f"{unknown[0]} is no option: values are written key=value{hint}")
        # What is no override is told so by the loader.
        overrides += getattr(given, "key=value")
        name = given.config_name.removesuffix(".yaml")
        path = _own_or_given(given.config_path, name)
        return Asked(overrides, name, path, given.help, given.cfg, argv is None)

    def load(self, overrides: Sequence[str], config_name: str, config_path: str | None) -> C:
        """The config, with every value checked."""
        config = compose_config(overrides, config_name, config_path, self.schema)
        check_values(config)
        self.check(config)
        return config

    def main(self, argv: Sequence[str] | None = None) -> int:
        """The command line; returns the exit status."""
        return self.run(self.read(argv))

    def run(self, asked: Asked) -> int:
        """Show what was asked for, or do the work; returns the exit status."""
        source = (asked.overrides, asked.config_name, asked.config_path)
        rank = None if self.takes_torchrun else torchrun_rank()
        if rank:  # rank 0 refuses
            leave_to_rank_0()
            return 0
        if asked.help is not None:
            keys = help_text(self.schema, asked.help)
            pydoc.pager(keys if asked.help else f"{self.parser().format_help()}\n{keys}")
            return 0

        def show_or_work() -> None:
            if asked.cfg == "short":
                composed = compose_config(*source, self.schema)
                sys.stdout.write(annotated_yaml(composed, SHORT_PROFILE))
                # A file to start from may be unfinished; what it lacks is an error.
                self.load(*source)
            elif asked.cfg == "job":
                sys.stdout.write(annotated_yaml(self.load(*source)))
            else:
                if rank is not None:
                    raise self._refused_torchrun()
                self.work(self.load(*source))

        status = run_entry_point(show_or_work, self._in_own_words)
        return leave_if_stopped(status) if asked.is_of_process else status

    def _refused_torchrun(self) -> ConfigError:
        groups = {each.name for each in fields(cast(Any, self.schema))}
        how_many = "; trainer.n_gpus_per_node=N starts N processes" if "trainer" in groups else ""
        return ConfigError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes of {self.prog}, each of "
            f"which would be a whole run: call it without torchrun{how_many}"
        )

    def _in_own_words(self, message: str) -> str:
        """Samplers name their keys as training has them; elsewhere the group is at the top."""
        if "rollout" not in {each.name for each in fields(cast(Any, self.schema))}:
            return message
        return message.replace("actor_rollout_ref.rollout", "rollout")

    def _shown(self) -> list[str]:
        return ["job", "short"] if self.schema is PPOTrainerConfig else ["job"]


@dataclass(frozen=True)
class OptionsCommand:
    """A command that takes options."""

    parser: Callable[[], argparse.ArgumentParser]
    work: Callable[[argparse.Namespace], int | None]
    """What it does; returns the exit status, or None where all is well."""
    schema: type | None = None
    """The config whose `key=value ...` it takes as well: `overrides` of the options."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """The command line; returns the exit status."""
        given: list[str] = list(sys.argv[1:] if argv is None else argv)
        overrides: list[str] = []
        if self.schema is not None:
            given, overrides = split_overrides(given)
        options = self.parser().parse_args(given)
        options.overrides = overrides + getattr(options, "key=value", [])
        return run_entry_point(lambda: self.work(options))


def _own_or_given(path: str | None, name: str) -> str | None:
    """A folder of YAML files; None is Caldera's own, which stands for verl's."""
    is_verls = path is not None and os.path.normpath(path) == VERLS_FOLDER
    return None if is_verls and not Path(VERLS_FOLDER, f"{name}.yaml").is_file() else path
