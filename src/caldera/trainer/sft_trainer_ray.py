"""`python3 -m caldera.trainer.sft_trainer_ray key=value ...`: `sft_trainer` on a Ray cluster."""

from __future__ import annotations

import sys
from dataclasses import replace

from caldera.trainer.sft_trainer import CONVERSATIONS

ON_RAY = replace(
    CONVERSATIONS,
    prog="python3 -m caldera.trainer.sft_trainer_ray",
    overrides=("trainer.worker_group=ray",),
)

if __name__ == "__main__":
    sys.exit(ON_RAY.main())
