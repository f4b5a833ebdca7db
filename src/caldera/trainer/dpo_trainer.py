"""`caldera dpo key=value ...`: direct preference optimisation on pairs of responses.

The same as `python3 -m caldera.trainer.dpo_trainer`, which may also be started by torchrun.
"""

from __future__ import annotations

import sys
from functools import partial

from caldera.config.preference import DPOTrainerConfig
from caldera.trainer.sft import SupervisedCommand, train

DPO = SupervisedCommand(
    prog="caldera dpo",
    description="""\
Train a language model to prefer one response of each pair to the other: direct
preference optimisation.

  caldera dpo model.partial_pretrain=MODEL dpo.beta=0.1 \\
    data.train_files=pairs.parquet data.val_files=test.parquet
""",
    config_name="dpo_trainer",
    schema=DPOTrainerConfig,
    work=partial(train, "caldera.workers.preference:DIRECT"),
)

if __name__ == "__main__":
    sys.exit(DPO.main())
