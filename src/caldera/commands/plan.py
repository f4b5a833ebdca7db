"""`caldera plan key=value ...`: what a run would do and need, without running it."""

from __future__ import annotations

import argparse

from caldera.config import PPOTrainerConfig, compose_config
from caldera.config.fields import check_values
from caldera.config.validate import check_consistency
from caldera.trainer.entry import OptionsCommand, text_parser

HELP = """\
Work out what a training run would do and need: how each step cuts its batch,
how many parameters there are, the memory of a device in each phase, whether
that fits, and the size of a checkpoint. Takes the keys of `caldera train`. It
needs no GPU, no data and no weights: the model's config.json is enough.
Ends with status 1 if the run does not fit.

  caldera plan actor_rollout_ref.model.path=MODEL algorithm.adv_estimator=grpo ...
  caldera plan --device a100-40g actor_rollout_ref.model.path=MODEL ...
"""
UNNAMED = "unnamed.parquet"


def parser() -> argparse.ArgumentParser:
    """What reads the command line."""
    parser = text_parser("caldera plan", HELP)
    parser.add_argument(
        "--device",
        default="h200",
        metavar="NAME",
        help="h200, h100, a100-80g, a100-40g, l40s, 4090, or GiB (h200)",
    )
    parser.add_argument(
        "--config-name",
        default="ppo_trainer",
        metavar="NAME",
        help="YAML file to start from (ppo_trainer)",
    )
    parser.add_argument(
        "--config-path", metavar="FOLDER", help="folder of that file (Caldera's own)"
    )
    parser.add_argument("key=value", nargs="*", help="values of config keys")
    return parser


def work(options: argparse.Namespace) -> int:
    """Show the plan; returns the exit status."""
    config = _config(options.overrides, options.config_name, options.config_path)
    from caldera.commands.plan_report import show
    from caldera.commands.planning import device_bytes, make_plan

    plan = make_plan(config, device_bytes(options.device))
    show(plan, options.device)
    return int(not plan.fits)


def _config(overrides: list[str], name: str, path: str | None) -> PPOTrainerConfig:
    """As a run would have it, but for its data, which nobody reads."""
    config = compose_config(overrides, name, path, PPOTrainerConfig)
    config.data.train_files = config.data.train_files or UNNAMED
    check_values(config)
    check_consistency(config)
    return config


PLAN = OptionsCommand(parser, work, PPOTrainerConfig)
