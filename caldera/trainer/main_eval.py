"""`python3 -m caldera.trainer.main_eval data.path=FILE`: score a file of answers."""

from __future__ import annotations

import argparse
import os
import pydoc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from caldera.config import compose_config, help_text
from caldera.config.fields import check_values
from caldera.config.offline import EvaluationConfig
from caldera.trainer.entry import run_entry_point, split_overrides

if TYPE_CHECKING:
    from caldera.reward.custom import ScoreFunction

HELP = """\
Score the answers in a parquet file, as `caldera generate` writes it: by the
scorer of each row's data source, or by a function of your own. Shows mean@n,
pass@k, best@k and maj@k with 95 % intervals, and writes a JSON file and a page
with the answers that do not pass.

  caldera eval data.path=out.parquet
  caldera eval data.path=new.parquet data.compare_path=old.parquet
  caldera eval data.path=out.parquet custom_reward_function.path=my_score.py
"""


@dataclass
class Positional:
    """A score function, called as verl's evaluation calls it: by place, with three arguments."""

    function: ScoreFunction

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any) -> Any:
        return self.function(data_source, solution_str, ground_truth)


def run_eval(config: EvaluationConfig) -> None:
    """Score the file, and tell what was found."""
    from caldera.reward.custom import get_custom_reward_fn
    from caldera.reward.default import score_by_data_source
    from caldera.reward.prime import ProcessScoring
    from caldera.trainer.evaluation.run import evaluate, print_scores

    options = config.evaluation
    function = get_custom_reward_fn(config.custom_reward_function) or score_by_data_source
    workers = options.num_workers or os.cpu_count() or 1
    scoring = ProcessScoring(Positional(function), options.timeout or None, workers)
    print_scores(evaluate(config, scoring))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="caldera eval", description=HELP, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        *("-h", "--help"), nargs="?", const="", metavar="KEY",
        help="show this and every key; with KEY, a key or group, that alone",
    )  # fmt: skip
    parser.add_argument("--config-name", default="evaluation", help="YAML file to start from")
    parser.add_argument("--config-path", help="folder of that file; default: Caldera's own")
    parser.add_argument("key=value", nargs="*", help="values of config keys")
    options, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(options)
    if arguments.help is not None:
        keys = help_text(EvaluationConfig, arguments.help)
        pydoc.pager(keys if arguments.help else f"{parser.format_help()}\n{keys}")
        return 0

    def work() -> None:
        given = [*overrides, *getattr(arguments, "key=value")]
        name, path = arguments.config_name, arguments.config_path
        config = compose_config(given, name, path, EvaluationConfig)
        check_values(config)
        run_eval(config)

    return run_entry_point(work)


if __name__ == "__main__":
    sys.exit(main())
