"""`python3 -m caldera.trainer.main_ppo key=value ...`: train with PPO or a relative of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from caldera.config import PPOTrainerConfig, config_to_yaml, load_config
from caldera.trainer.entry import run_entry_point, split_overrides
from caldera.trainer.ppo.setup import TaskRunner


def run_ppo(config: PPOTrainerConfig) -> None:
    """Train as the config says, in this process."""
    TaskRunner().run(config)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="caldera train",
        description="Train a language model by reinforcement learning.",
        epilog="Keys are those of --cfg job; for example: data.train_files=train.parquet",
    )
    parser.add_argument("--config-name", default="ppo_trainer", help="YAML file to start from")
    parser.add_argument("--config-path", help="folder of that file; default: Caldera's own")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved config and stop")
    parser.add_argument("key=value", nargs="*", help="values of config keys")
    options, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(options)
    overrides += getattr(arguments, "key=value")  # what is no override is told so by the loader

    def train() -> None:
        config = load_config(overrides, arguments.config_name, arguments.config_path)
        if arguments.cfg:
            sys.stdout.write(config_to_yaml(config))
        else:
            run_ppo(config)

    return run_entry_point(train)


if __name__ == "__main__":
    sys.exit(main())
