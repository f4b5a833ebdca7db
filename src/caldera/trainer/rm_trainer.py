"""`caldera rm key=value ...`: train a reward model on pairs of responses.

The same as `python3 -m caldera.trainer.rm_trainer`, which may also be started by torchrun.
"""

from __future__ import annotations

import sys
from functools import partial

from caldera.config.preference import RewardModelTrainerConfig
from caldera.trainer.sft import SupervisedCommand, train

REWARD_MODEL = SupervisedCommand(
    prog="caldera rm",
    description="""\
Train a reward model on pairs of responses, of which one was preferred.

  caldera rm model.partial_pretrain=MODEL \\
    data.train_files=pairs.parquet data.val_files=test.parquet
""",
    config_name="rm_trainer",
    schema=RewardModelTrainerConfig,
    work=partial(train, "caldera.workers.preference:REWARD_MODEL"),
)

if __name__ == "__main__":
    sys.exit(REWARD_MODEL.main())
