"""`caldera eval data.path=FILE`: score a file of responses."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from caldera.config.offline import EvaluationConfig
from caldera.config.reward import check_path_given
from caldera.trainer.entry import ConfigCommand

if TYPE_CHECKING:
    from caldera.reward.custom import ScoreFunction


@dataclass
class Positional:
    """A score function, called as verl's evaluation calls it: by place, with three arguments."""

    function: ScoreFunction

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any) -> Any:
        return self.function(data_source, solution_str, ground_truth)


def run_eval(config: EvaluationConfig) -> None:
    """Score the file, and tell what was found."""
    from caldera.commands.evaluation import evaluate, print_scores
    from caldera.reward.custom import get_custom_reward_fn
    from caldera.reward.default import score_by_data_source
    from caldera.reward.prime import ProcessScoring

    options = config.evaluation
    custom = get_custom_reward_fn(config.custom_reward_function)
    if custom is not None:
        custom.check_call_by_place(("data_source", "solution_str", "ground_truth"))
    function = custom or score_by_data_source
    workers = options.num_workers or os.cpu_count() or 1
    scoring = ProcessScoring(Positional(function), options.timeout, workers)
    print_scores(evaluate(config, scoring))


def check_evaluation(config: EvaluationConfig) -> None:
    """Keys fit together."""
    check_path_given(config.custom_reward_function, "custom_reward_function")


EVALUATE = ConfigCommand(
    prog="caldera eval",
    description="""\
Score the responses in a parquet file, as `caldera generate` writes it: by the
scorer of each row's data source, or by a custom function. Shows mean@n, pass@k,
best@k and maj@k with 95 % intervals, and writes a JSON file and a page with the
responses that do not pass.

  caldera eval data.path=out.parquet
  caldera eval data.path=new.parquet data.compare_path=old.parquet
  caldera eval data.path=out.parquet custom_reward_function.path=my_score.py
""",
    config_name="evaluation",
    schema=EvaluationConfig,
    work=run_eval,
    check=check_evaluation,
)
main = EVALUATE.main

if __name__ == "__main__":
    sys.exit(main())
