"""The command line of supervised training, whatever its objective."""

from __future__ import annotations

import argparse
import importlib
import os
import pydoc
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from caldera.config import (
    SFTTrainerConfig,
    annotated_yaml,
    help_text,
    load_supervised_config,
)
from caldera.trainer.entry import run_entry_point, split_overrides


@dataclass(frozen=True)
class SupervisedCommand:
    """`key=value ...` for one objective, which is named so that torch is imported late."""

    prog: str
    description: str
    config_name: str
    schema: type[SFTTrainerConfig]
    objective: str
    """`module:NAME`."""
    overrides: tuple[str, ...] = ()
    """What this command always says."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run; returns the exit status."""
        parser = self._parser()
        options, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
        arguments = parser.parse_args(options)
        overrides += getattr(arguments, "key=value")  # what is no override is told by the loader
        if _is_served_by_another():
            only_tells = arguments.help is not None or arguments.cfg is not None
            return 0 if only_tells else run_entry_point(_serve)  # telling is for rank 0
        if arguments.help is not None:
            keys = help_text(self.schema, arguments.help)
            pydoc.pager(keys if arguments.help else f"{parser.format_help()}\n{keys}")
            return 0

        def work() -> None:
            config = load_supervised_config(
                [*self.overrides, *overrides], arguments.config_name, arguments.config_path,
                self.schema,
            )  # fmt: skip
            if arguments.cfg:
                sys.stdout.write(annotated_yaml(config))
            else:
                self._train(config)

        return run_entry_point(work)

    def _train(self, config: SFTTrainerConfig) -> None:
        from caldera.trainer.sft.setup import run  # torch and transformers take seconds to import

        module, _, name = self.objective.partition(":")
        run(config, getattr(importlib.import_module(module), name))

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=self.prog, description=self.description, add_help=False
        )
        parser.add_argument(
            *("-h", "--help"), nargs="?", const="", metavar="KEY",
            help="show this and every key; with KEY, a key or group, that alone",
        )  # fmt: skip
        parser.add_argument(
            "--config-name", default=self.config_name, help="YAML file to start from"
        )
        parser.add_argument("--config-path", help="folder of that file; default: Caldera's own")
        parser.add_argument("--cfg", choices=["job"], help="print the resolved config and stop")
        parser.add_argument("key=value", nargs="*", help="values of config keys")
        return parser


def _is_served_by_another() -> bool:
    """Whether this is a process of torchrun's that another one gives its work to."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def _serve() -> None:
    from caldera.trainer.sft.setup import serve_torchrun

    serve_torchrun()
