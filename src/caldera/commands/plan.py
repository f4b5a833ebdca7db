"""`caldera plan key=value ...`: what a run would do and need, without running it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from caldera.config import PPOTrainerConfig, compose_config
from caldera.config.batches import needed_micro_batches
from caldera.config.fields import check_values
from caldera.config.validate import check_consistency
from caldera.tracking.progress import print_line
from caldera.trainer.entry import run_entry_point, split_overrides, text_parser

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


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(options)
    overrides += getattr(arguments, "key=value")

    def work() -> int:
        config = _config(overrides, arguments.config_name, arguments.config_path)
        from caldera.commands.plan_report import show
        from caldera.commands.planning import device_bytes, make_plan

        plan = make_plan(config, device_bytes(arguments.device))
        show(plan, arguments.device)
        return int(not plan.fits)

    return run_entry_point(work)


def _config(overrides: list[str], name: str, path: str | None) -> PPOTrainerConfig:
    """As a run would have it, but for its data, which nobody reads, and its micro-batches, of
    which something is assumed where nothing is said."""
    config = compose_config(overrides, name, path, PPOTrainerConfig)
    config.data.train_files = config.data.train_files or UNNAMED
    config.data.val_files = config.data.val_files or UNNAMED
    check_values(config)
    assumed = _assume_micro_batches(config)
    if assumed:
        keys = " ".join(f"{key}=True" for key in assumed)
        print_line(f"Assumed, since no size of micro-batches is given: {keys}")
    check_consistency(config)
    return config


def _assume_micro_batches(config: PPOTrainerConfig) -> list[str]:
    """Micro-batches are formed by tokens where nothing is said; the keys of which that is true."""
    keys = []
    for part in needed_micro_batches(config):
        if not part.is_told:
            setattr(part.node, part.dynamic_key, True)
            keys.append(f"{part.group}.{part.dynamic_key}")
    return keys


if __name__ == "__main__":
    sys.exit(main())
