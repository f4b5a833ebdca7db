"""`python3 -m caldera.trainer.fsdp_sft_trainer key=value ...`: fine-tune on responses.

The same as `caldera sft`. It may also be started by torchrun.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from caldera.trainer.sft_trainer import SFT

CLASSIC = replace(SFT, prog="python3 -m caldera.trainer.fsdp_sft_trainer")

if __name__ == "__main__":
    sys.exit(CLASSIC.main())
