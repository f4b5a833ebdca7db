"""`python3 -m caldera.trainer.sft_trainer key=value ...`: fine-tune on conversations.

It takes the keys of verl's later releases; `fsdp_sft_trainer` starts from the classic file.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

from caldera.config import SFTTrainerConfig
from caldera.trainer.sft import SupervisedCommand, train

SFT = SupervisedCommand(
    prog="caldera sft",
    description="""\
Fine-tune a language model on responses, or on whole conversations.

  caldera sft model.partial_pretrain=MODEL data.train_files=train.parquet \\
    data.val_files=test.parquet data.prompt_key=question data.response_key=answer
  torchrun --nproc_per_node=8 -m caldera.trainer.sft_trainer \\
    model.path=MODEL data.train_files=talks.parquet data.val_files=talks.parquet
""",
    config_name="sft_trainer",
    schema=SFTTrainerConfig,
    work=partial(train, "caldera.workers.supervised:FINE_TUNING"),
)
CONVERSATIONS = replace(
    SFT, prog="python3 -m caldera.trainer.sft_trainer", config_name="sft_trainer_engine"
)

if __name__ == "__main__":
    sys.exit(CONVERSATIONS.main())
