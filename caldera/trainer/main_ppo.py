"""`python3 -m caldera.trainer.main_ppo key=value ...`: train with PPO or a relative of it."""

from __future__ import annotations

import argparse
import pydoc
import sys
from collections.abc import Sequence

from caldera.config import (
    SHORT_PROFILE,
    PPOTrainerConfig,
    annotated_yaml,
    compose_config,
    help_text,
    load_config,
)
from caldera.trainer.entry import run_entry_point, split_overrides


def run_ppo(config: PPOTrainerConfig) -> None:
    """Train as the config says."""
    from caldera.trainer.ppo.setup import run  # torch and transformers take seconds to import

    run(config)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    options, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(options)
    overrides += getattr(arguments, "key=value")  # what is no override is told so by the loader
    name, path = arguments.config_name, arguments.config_path
    if arguments.help is not None:
        keys = help_text(PPOTrainerConfig, arguments.help)
        pydoc.pager(keys if arguments.help else f"{parser.format_help()}\n{keys}")
        return 0

    def work() -> None:
        if arguments.cfg == "short":
            config = compose_config(overrides, name, path, PPOTrainerConfig)
            sys.stdout.write(annotated_yaml(config, SHORT_PROFILE))
        elif arguments.cfg == "job":
            sys.stdout.write(annotated_yaml(load_config(overrides, name, path)))
        else:
            run_ppo(load_config(overrides, name, path))

    return run_entry_point(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="caldera train",
        description="Train a language model by reinforcement learning.",
        add_help=False,
    )
    parser.add_argument(
        *("-h", "--help"), nargs="?", const="", metavar="KEY",
        help="show this and every key; with KEY, a key or group, that alone",
    )  # fmt: skip
    parser.add_argument("--config-name", default="ppo_trainer", help="YAML file to start from")
    parser.add_argument("--config-path", help="folder of that file; default: Caldera's own")
    parser.add_argument(
        "--cfg", choices=["job", "short"],
        help="print the resolved config and stop: job, all of it; short, what most runs set",
    )  # fmt: skip
    parser.add_argument("key=value", nargs="*", help="values of config keys")
    return parser


if __name__ == "__main__":
    sys.exit(main())
